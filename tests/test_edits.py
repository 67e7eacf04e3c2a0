"""Tests of edits that researchers make to a copy of train_gpt2.py."""
import signal

import pytest
import torch
from conftest import ROOT, Training, assert_same, last_checkpoint, read_log, signal_at, succeed

import train_gpt2 as t

ROTARY = """
def rotate(x):
    # Rotate each pair of values by an angle that grows with the position
    half = x.size(-1) // 2
    speeds = 1 / 10000 ** (torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.size(-2), device=x.device).outer(speeds)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

class MLP("""

GROUPED = """q, k, v = self.c_attn(x).split([C, C // self.n_head, C // self.n_head], dim=2)
"""

AVERAGE = """with torch.no_grad():
        for name, p in run.model.named_parameters():
            run.average.setdefault(name, torch.zeros_like(p)).lerp_(p, 0.1)
    run.step += 1"""

Z_LOSS = """if self.training:
            loss = loss + 0.01 * logits[..., :self.config.vocab_size].logsumexp(-1).square().mean()
        return (logits[..."""

UNCHANGED, EXPORTED, NOT_EXPORTED = "the same losses", "other losses", "no GPT-2"
# {name: (what becomes of the run, {text: its replacement})}
EDITS = {
    "squared ReLU": (NOT_EXPORTED, {
        "self.gelu(self.c_fc(x))": "F.relu(self.c_fc(x)).square()"}),
    "soft cap": (NOT_EXPORTED, {
        "logits = self.lm_head(x)": "logits = 2 * torch.tanh(self.lm_head(x) / 2)"}),
    "rotary positions": (NOT_EXPORTED, {
        "\nclass MLP(": ROTARY,
        "        y = F.scaled": "        q, k = rotate(q), rotate(k)\n        y = F.scaled",
        " + self.transformer.wpe(positions)": "",
        "            wpe=nn.Embedding(config.block_size, config.n_embd),\n": ""}),
    "grouped-query attention": (NOT_EXPORTED, {
        "nn.Linear(config.n_embd, 3 * config.n_embd)":
            "nn.Linear(config.n_embd, config.n_embd + 2 * config.n_embd // config.n_head)",
        "q, k, v = self.c_attn(x).split(C, dim=2)\n": GROUPED,
        "view(B, T, self.n_head, C": "view(B, T, -1, C",
        "            q, k, v,": "            q, k, v, enable_gqa=True,"}),
    "untied head": (NOT_EXPORTED, {
        "        self.lm_head.weight = self.transformer.wte.weight\n": ""}),
    "z-loss": (EXPORTED, {"return (logits[...": Z_LOSS}),
    "another optimizer": (EXPORTED, {
        "    return optimizers\n":
            "    return [torch.optim.NAdam(model.parameters(), cfg.max_lr)]\n"}),
    "frozen layers": (EXPORTED, {
        "        self.eval()  #": "        self.transformer.h[0].requires_grad_(False)\n"
                                  "        self.eval()  #"}),
    "a new constant": (EXPORTED, {
        "    max_steps: int =":
            "    power: float = -1.0  # minus the exponent of the decay\n    max_steps: int =",
        "    remaining = 1 - progress\n": "    remaining = (1 - progress) ** -cfg.power\n"}),
    "an average of the weights": (UNCHANGED, {
        "    stop: bool = False": "    average: dict = field(default_factory=dict)\n"
                                  "    stop: bool = False",
        "run.step += 1": AVERAGE,
        '"step": run.step,': '"step": run.step, "average": run.average,',
        "    load_weights(run.model, checkpoint": "    run.average = checkpoint['average']\n"
                                              "    load_weights(run.model, checkpoint"}),
    "a new metric": (UNCHANGED, {
        'log_metric(run, step, "norm", norm)\n':
            'log_metric(run, step, "norm", norm)\n'
            '        log_metric(run, step, "ratio", norm / loss)\n'})}

WORDS = dict(n_layer=2, lr_shape="linear", max_steps=20, eval_every=10, sample_every=20,
             sample_tokens=20)

@pytest.fixture(scope="module")
def unedited(place):
    return read_log(succeed(Training(place / "unedited", **WORDS)).log_dir)

@pytest.mark.parametrize("name", EDITS)
def test_an_edited_script_trains_samples_and_resumes(place, unedited, name):
    """A run that is stopped and resumed equals one that is not stopped.

    The model is exported if it is still a GPT-2.
    """
    result, replacements = EDITS[name]
    source = (ROOT / "train_gpt2.py").read_text()
    for text, replacement in replacements.items():
        assert source.count(text) == 1, text
        source = source.replace(text, replacement)
    script = place / f"{name}.py"
    script.write_text(source)
    words = WORDS | dict(copy=script) | (dict(power=-2.5) if name == "a new constant" else {})
    whole = Training(place / name, hide=["matplotlib"], **words)
    stopped = Training(place / f"{name}, stopped", **words,
                       arrange=[(signal_at, signal.SIGTERM, 12)])
    assert "Stopped by a signal at step 13" in succeed(stopped).out
    succeed(Training(stopped.log_dir, **words))
    assert "--- sample at step 20 ---" in succeed(whole).out
    assert_same(whole.log_dir, stopped.log_dir)
    assert (" has failed" if result == NOT_EXPORTED else "\nexported ") in whole.out
    assert (whole.log_dir / "hf").exists() == (result != NOT_EXPORTED)
    log = read_log(whole.log_dir)
    assert (log == unedited) == (result == UNCHANGED)
    assert log[20, "val"] < log[0, "val"] - 0.5
    if name == "a new metric":
        assert len(t.read_metrics(whole.log_dir)["ratio"]) == 20
    if name == "frozen layers":
        trained = last_checkpoint(whole.log_dir)
        initial = t.GPT(t.GPTConfig(**trained["gpt_config"]), seed=1337).state_dict()
        changed = {key for key in initial if not torch.equal(initial[key], trained["model"][key])}
        assert changed == {key for key in initial if ".h.0." not in key}
