"""The script is made to be changed: an edit works, or is told; it is never silently wrong."""
import copy
import dataclasses
import json
import math
import re
import shutil
import signal
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import (
    ROOT, TINY, Forked, assert_close_logs, assert_same, assert_same_logs, load, one_line, read_log,
    succeed, together, write_text)
from test_model import ids, shake, small, stub_run
from torch.nn import functional as F

import train_gpt2 as t

LAST = f"checkpoint_{TINY['max_steps']:05d}.pt"

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("changed")
    write_text(folder)
    return folder

@pytest.fixture(scope="module")
def finished(folder):
    """A folder in which a run has ended. Not to be changed."""
    return succeed(Forked(folder / "finished")).log_dir

def narrow_window(arrange, width):
    """Attention to so many tokens. The first ones see what they always saw."""
    def attention(q, k, v, dropout_p, is_causal):
        all_pairs = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device)
        return F.scaled_dot_product_attention(q, k, v, all_pairs.tril().triu(1 - width))
    arrange.t.F = SimpleNamespace(cross_entropy=F.cross_entropy,
                                  scaled_dot_product_attention=attention)

def in_attention(arrange, add):
    """add(it, config) at the end of its constructor."""
    def __init__(self, config):
        real(self, config)
        add(self, config)
    real, arrange.t.CausalSelfAttention.__init__ = arrange.t.CausalSelfAttention.__init__, __init__

def gain_of_queries(attention, config):
    attention.q_gain = torch.nn.Parameter(torch.ones(config.n_embd))

def mask_as_buffer(attention, config):
    """-inf where a token may not look, as in many a GPT."""
    attention.register_buffer("mask", torch.full((config.block_size,) * 2, -math.inf).triu(1))

def low_rank(attention, config):
    """LoRA, which begins at zero, with a gate that begins open."""
    attention.lora_a = t.undrawn(torch.nn.Linear(config.n_embd, 16, bias=False))
    attention.lora_b = torch.nn.Linear(16, config.n_embd, bias=False)
    torch.nn.init.zeros_(attention.lora_b.weight)
    attention.gate_bias = torch.nn.Parameter(torch.ones(config.n_embd))

def documents_apart(arrange, end_of_text):  # in a text without documents, this is GPT-2
    real, arrange.t.GPT.hidden = arrange.t.GPT.hidden, lambda self, idx: (
        real(self, idx) * (1 + (idx == end_of_text).cumsum(1)[..., None]))

@pytest.mark.parametrize("edit, value, reason", [
    (narrow_window, 12, "logits differ by"), (documents_apart, 256, "logits differ by"),
    (in_attention, gain_of_queries, "q_gain"), (in_attention, mask_as_buffer, "mask")])
@pytest.mark.usefixtures("is_gpt2")
def test_an_edited_model_trains_to_the_end_and_is_not_exported(folder, edit, value, reason):
    """hf/ would compute something else than what was trained."""
    run = succeed(Forked(folder / f"{edit.__name__} {reason}", max_steps=6, arrange={edit: value},
                         hide=["matplotlib"], sample_every=6, sample_tokens=9))
    assert re.search(rf"^Not exported: transformers would compute something else \(.*{reason}",
                     run.out, re.M)
    assert (6, "val") in read_log(run.log_dir) and not (run.log_dir / "hf").exists()

def test_what_a_module_sets_itself_stays_and_others_begin_as_ever(monkeypatch):
    """LoRA would not begin at zero; and two models would differ in all weights, not in an edit."""
    before = small().state_dict()
    monkeypatch.setattr(t.CausalSelfAttention, "__init__", t.CausalSelfAttention.__init__)
    in_attention(SimpleNamespace(t=t), low_rank)
    model = small()
    after, attention = model.state_dict(), model.transformer.h[1].attn
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not attention.lora_b.weight.any() and (attention.gate_bias == 1).all()
    assert attention.lora_a.weight.std().item() == pytest.approx(0.02, rel=0.2)

def test_a_logit_made_otherwise_is_so_in_loss_samples_and_scores(monkeypatch):
    """A softcap, say. Its gradient needs its output, which nothing may overwrite."""
    model, real = shake(small()), t.GPT.to_logits
    monkeypatch.setattr(t.GPT, "to_logits", lambda self, x: real(self, x).clamp(-0.5, 0.5).tanh())
    logits, loss = model(ids(), ids(seed=1))
    assert logits.abs().max() < 0.5 and loss < 6.2
    loss.backward()
    seen = []
    monkeypatch.setattr(torch.Tensor, "topk", lambda x, k: seen.append(x) or torch.topk(x, k))
    model.generate(ids(1), 1, top_k=5)
    assert seen[0].abs().max() < 0.5

def other_code(arrange, _):
    arrange.t.code_checksum = lambda: 7

def test_other_code_continues_a_run_and_says_so(folder, finished):
    """Two models in one run. A finished one would be validated and exported as another's."""
    saved = load(finished / LAST)
    with pytest.raises(t.UserError, match="edited since it finished.*--log_dir"):
        t.check_same_training(saved | {"code": 7}, t.Config(**saved["constants"]), saved["data"])
    copy = shutil.copytree(finished, folder / "edited")
    run = succeed(Forked(copy, max_steps=32, arrange={other_code: 0}))
    assert "!!! train_gpt2.py was edited: from step 30 on, other code continues" in run.out
    assert "was edited" not in succeed(Forked(copy, max_steps=32, arrange={other_code: 0})).out

def test_a_checkpoint_that_does_not_fit_the_code_is_a_line(folder, finished):
    """And nothing says that it goes on. Torch would give one optimizer's state to another."""
    copy = shutil.copytree(finished, folder / "misfit")
    run = Forked(copy, max_steps=32, arrange={in_attention: gain_of_queries, other_code: 0})
    assert run.wait() == 1 and "other code continues" not in run.out
    one_line(run.err, "does not fit", "Missing key", "q_gain", copy, "--log_dir")
    saved = load(finished / LAST)
    cfg = t.Config(**saved["constants"])
    model = t.build_model(cfg, t.get_encoding("bytes"), saved)
    optimizers = [torch.optim.SGD(model.parameters())]
    with mock.patch.object(t, "configure_optimizers", return_value=optimizers):
        with pytest.raises(t.UserError, match=r"its optimizers are \['AdamW'\], here are \['SGD'"):
            t.build_state(model, cfg, torch.float32, saved)

def test_what_counts_as_other_code(tmp_path, monkeypatch):
    """Comments, blank lines and constants do not; as it was imported, not as it is now."""
    source, path = (ROOT / "train_gpt2.py").read_text(), tmp_path / "train_gpt2.py"

    def checksum(source):
        path.write_text(source)
        return t.code_checksum.__wrapped__()
    monkeypatch.setattr(t, "__file__", str(path))
    same = checksum(source)
    assert same == t.code_checksum()  # still that of the file that was imported
    for old, new, is_same in (
            ("class Block", "# a comment\n\n\nclass Block", True),
            ("import re\n", "import re  # as ever\n", True),
            ("seed: int = 1337", "seed: int = 2", True),
            ("    encoding=", "    seed=3,\n    encoding=", True),
            ("log_dir=\"log_finetune\"", "log_dir=\"tuned\"", True),
            ("return self.c_proj(", "return -self.c_proj(", False),
            ("state.step += 1", "state.step += 2", False),
            ("        kept += len(line)\n", "    kept += len(line)\n", False)):
        assert old in source and (checksum(source.replace(old, new, 1)) == same) == is_same, old
    monkeypatch.setattr(t, "encoding_parts", t.get_encoding)  # which ids a text has
    assert checksum(source) != same

def test_what_is_new_had_its_default_in_old_runs(finished):
    """Else nobody could go on: `dropout was None`, or other code, which no one can put back."""
    saved, cfg = load(finished / LAST), t.Config(**load(finished / LAST)["constants"])
    del saved["constants"]["dropout"], saved["code"]
    t.check_same_training(saved, cfg, saved["data"])
    with pytest.raises(t.UserError, match=f"dropout was {t.Config.dropout}, is 0.5"):
        t.check_same_training(saved, dataclasses.replace(cfg, dropout=0.5), saved["data"])

def test_groups_keep_their_share_of_the_rate_and_their_numbers_when_a_run_continues():
    """Embeddings would learn a hundred times too fast, or schedule-free optimizers begin again."""
    def state():
        model, scaler = small(), torch.amp.GradScaler("cpu", enabled=False)
        embeddings, *others = model.parameters()
        groups = [dict(params=others), dict(params=[embeddings], lr=cfg.max_lr / 100)]
        return t.State(model, [torch.optim.SGD(groups, lr=cfg.max_lr)], scaler)
    cfg = t.Config(T=32, B=4, total_batch_size=128)
    run = stub_run(small(), cfg, ids(T=33))
    run.state = state()
    for step in range(4):
        run.ddp_model = run.state.raw_model
        t.train_step(run)
        groups = run.state.optimizers[0].param_groups
        assert [group["lr"] / t.get_lr(step, cfg) for group in groups] == pytest.approx([1, 0.01])
        assert groups[1].get("k", 0) == step
        groups[1]["k"] = step + 1
        saved, run.state = copy.deepcopy(run.state.state_dict()), state()
        run.state.load_state_dict(saved)

def test_a_parameter_without_an_optimizer_or_with_two_or_without_values_is_named():
    """It would stay as it began, or move twice; or a step would be lost to NaN."""
    model = small()
    gains = [model.transformer.ln_f.weight]
    others = [p for p in model.parameters() if p is not gains[0]]
    for groups, says in (([others], "is in 0 groups"), ([others + gains, gains], "is in 2 groups")):
        with pytest.raises(t.UserError, match=f"transformer.ln_f.weight {says}"):
            t.check_parameters(model, [torch.optim.SGD(group) for group in groups])
    gains[0].requires_grad_(False)  # a frozen one may be in none
    t.check_parameters(model, [torch.optim.SGD(others)])
    model.lm_head.bias = torch.nn.Parameter(torch.full((384,), math.nan))  # of torch.empty, say
    with pytest.raises(t.UserError, match="lm_head.bias is not finite before the first step"):
        t.build_state(model, t.Config(), torch.float32, {})

def frozen_positions(arrange, _):
    def build_model(*args):
        model = real(*args)
        model.transformer.wpe.requires_grad_(False)
        return model
    real, arrange.t.build_model = arrange.t.build_model, build_model

def averaged_weights(arrange, decay):
    """An exponential moving average, as part one says that it is done."""
    @dataclasses.dataclass
    class Averaged(arrange.t.State):
        def __post_init__(self):
            super().__post_init__()
            self.average, self.moved = copy.deepcopy(self.raw_model), 0.0

        eval_model = property(lambda self: self.average)

    def train_step(run):
        result, trained = real(run), run.state.raw_model.parameters()
        for mean, p in zip(run.state.average.parameters(), trained, strict=True):
            mean.data.lerp_(p.data, 1 - decay)
        run.state.moved += result[1].item()  # a number of one's own
        return result
    real, arrange.t.train_step, arrange.t.State = arrange.t.train_step, train_step, Averaged

@pytest.mark.usefixtures("is_gpt2")
def test_averaged_weights_are_validated_saved_and_exported_and_frozen_ones_stay(folder):
    """Also when the run continues. In "val" and hf/ would be the last step's weights."""
    def run(name, *steps):
        return succeed(Forked(folder / name, max_steps=20, optimizer="muon", hide=["matplotlib"],
                              arrange={averaged_weights: 0.8, frozen_positions: 0,
                                       "signal_at": (signal.SIGTERM, *steps)}))
    whole, _, again = run("averaged"), run("averaged 2", 12), run("averaged 2")
    path = again.log_dir / "checkpoint_00020.pt"
    assert_same_logs(again.log_dir, whole.log_dir)
    assert_same(load(path), load(whole.log_dir / path.name))
    saved, (average, encoding) = load(path), t.load_weights(str(path))
    cfg = t.Config(**saved["constants"])
    loss = t.validation_loss(stub_run(average, cfg, ids()), t.open_data(cfg, encoding)[1])
    assert read_log(again.log_dir)[20, "val"] == pytest.approx(loss, abs=2e-6)
    exported = t.load_hugging_face(str(again.log_dir / "hf")).state_dict()
    new = t.build_model(cfg, encoding).state_dict()
    for name, weight in saved["model"].items():
        assert torch.equal(exported[name], weight)
        assert torch.equal(saved["trained"][name], weight) == (".wpe." in name), name
        assert torch.equal(new[name], weight) == (".wpe." in name), name

def test_a_batch_that_grows_is_an_edit_of_rows_before_alone(monkeypatch, tmp_path, capsys):
    """Rows would be read twice or never, the curve be drawn at other tokens, or some left out."""
    warmup = {0: 0, 1: 4, 2: 12, 3: 24}  # the later steps have 16 rows
    monkeypatch.setattr(t, "rows_before", lambda cfg, n: warmup.get(n, 16 * n - 24))
    cfg = t.Config(T=32, B=2, total_batch_size=512, max_steps=6)
    run, rows, seen = stub_run(small(), cfg, ids(2, 33)), [], []
    batch = run.train_loader.batch.return_value
    run.train_loader.batch.side_effect = lambda row, B, _: rows.extend(range(row, row + B)) or batch
    for _ in range(6):
        t.train_step(run)
    assert rows == [*range(72)]
    with pytest.raises(t.UserError, match=r"Step 6 has 16 rows: rows_before.* = 3 \* 1"):
        cfg.B = 3
        t.train_step(run)
    run.state.step, run.step_seconds, run.unsaid = 3, [2.0], []
    t.report_step(run, 1.0, 1.0)
    assert f" {12 * 32 // 2} tok/s" in capsys.readouterr().out
    figure = pytest.importorskip("matplotlib.figure")
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, file, **_: seen.append(self))
    (tmp_path / "run.json").write_text(json.dumps({"constants": vars(cfg)}))
    (tmp_path / "log.txt").write_text("0 train 3.0\n1 train 2.0\n6 val 2.0\n")
    t.draw_curves(tmp_path)
    train, val = (line.get_xdata() * 1e6 for line in seen[0].axes[0].lines)
    assert [*train, *val] == pytest.approx([0, 4 * 32, 72 * 32])
    monkeypatch.setattr(t, "rows_before", lambda cfg, step: 24)
    with pytest.raises(t.UserError, match="Step 3 has 0 rows"):
        t.train_step(run)

def masked(arrange, _):
    """Of the row with number n, the first (n % 5) * 4 targets count, as in a chat its answers."""
    def batch(self, row, B, device=torch.device("cpu")):
        x, y = real(self, row, B, device)
        counted = torch.arange(row, row + B, device=device) % 5 * 4
        columns = torch.arange(self.T, device=device)
        return x, y.masked_fill(columns >= counted[:, None], -100)
    real, arrange.t.DataLoaderLite.batch = arrange.t.DataLoaderLite.batch, batch

def noisy_gradients(arrange, scale):
    def step_optimizers(state, *args):
        for p in state.raw_model.parameters():
            p.grad += scale * torch.randn_like(p)
        return real(state, *args)
    real, arrange.t.step_optimizers = arrange.t.step_optimizers, step_optimizers

def test_targets_that_do_not_count_and_noise_leave_b_and_processes_a_matter_of_speed(folder):
    """A mean of means gives a target more weight the fewer are in its batch; some have none. With
    noise of its own, each process would train another model."""
    edits = {masked: 0, noisy_gradients: 0.01}
    one = succeed(Forked(folder / "masked", B=8, arrange=edits))  # a step in one batch
    statuses, runs = together(2, folder / "masked 2", B=1, arrange=edits)
    assert statuses == [0, 0], [run.err for run in runs]
    assert_close_logs(one.log_dir, runs[0].log_dir)

def test_a_loss_that_is_not_the_cross_entropy_is_told(monkeypatch, capsys):
    """"val" would not compare with others', and be best where another term is."""
    def forward(self, idx, targets=None, return_logits=True):
        logits, loss = real(self, idx, targets)
        return logits, loss + (self.training or wrong) * 1e-3 * logits.logsumexp(-1).square().mean()
    real, run = t.GPT.forward, stub_run(small(), t.Config(), ids(T=33))
    run.val_loader = run.train_loader
    monkeypatch.setattr(t.GPT, "forward", forward)
    for wrong in (False, True):
        t.warn_of_other_loss(run)
        assert ("!!! val is not the cross-entropy" in capsys.readouterr().out) == wrong

def test_a_constant_of_the_model_reaches_it_by_its_name(monkeypatch):
    """And the seed decides its weights."""
    gpt_config = dataclasses.make_dataclass("Wider", [("width", int, 4)], bases=(t.GPTConfig,))
    config = dataclasses.make_dataclass("Config", [("width", int, 3)], bases=(t.Config,))
    monkeypatch.setattr(t, "GPTConfig", gpt_config)
    a, b, c = (t.build_model(config(**TINY, width=5, seed=seed), t.get_encoding("bytes"))
               for seed in (1, 1, 2))
    assert (a.config.width, a.config.n_layer, a.config.block_size) == (5, 1, 16)
    assert torch.equal(a.lm_head.weight, b.lm_head.weight)
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)

@pytest.fixture(scope="module")
def dropped(folder):
    return succeed(Forked(folder / "dropped", dropout=0.3, sample_every=10, sample_tokens=30))

def test_dropout_killed_and_continued_is_never_killed(folder, dropped):
    """Each start would draw the masks of step 0 again."""
    words = dict(dropout=0.3, sample_every=10, sample_tokens=30)
    for number, step in ((signal.SIGTERM, 6), (signal.SIGKILL, 23)):
        run = Forked(folder / "dropped 2", arrange={"signal_at": (number, step)}, **words)
        run.wait()
    succeed(Forked(run.log_dir, **words))
    assert_same_logs(run.log_dir, dropped.log_dir)
    assert_same(load(run.log_dir / LAST), load(dropped.log_dir / LAST))

def test_dropout_is_in_train_step_alone(dropped, finished):
    """Validation and samples are the whole model's; the noise is new in each micro-step."""
    with_noise, without = read_log(dropped.log_dir), read_log(finished)
    assert with_noise[0, "val"] == without[0, "val"]
    assert with_noise[0, "train"] != without[0, "train"]
    model, encoding = t.load_weights(str(dropped.log_dir / LAST), dropout=0.3)
    text = t.sample_text(model, encoding, t.Config(sample_prompt="\n\n", sample_tokens=30),
                         seed=1337 + 30)
    assert text in dropped.out.partition("sample at step 30")[2]
    assert not model.training and model.config.dropout == 0.3
    assert t.load_weights(str(dropped.log_dir / LAST))[0].config.dropout == 0.0
    seen = []
    cfg = t.Config(T=32, B=4, total_batch_size=256)
    run = stub_run(small(dropout=0.5), cfg, ids(T=33))
    run.ddp_model.register_forward_pre_hook(
        lambda module, _: seen.append((module.training, torch.initial_seed())))
    for cfg.seed in (1, 1, 2, 2):
        t.train_step(run)
    run.state.step = 0
    t.train_step(run)  # the first rows again, with another seed
    assert all(training for training, _ in seen) and len(set(seen)) == 10
    assert not run.ddp_model.training

def test_where_gpt2_drops_out(is_gpt2):
    """After the embedding, in attention, and after both parts of each block."""
    model = small(dropout=0.5).train()
    with mock.patch.object(F, "dropout", wraps=F.dropout) as dropout, mock.patch.object(
            F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as attention:
        model(ids())
    assert [call.args[1] for call in dropout.call_args_list] == [0.5] * (1 + 2 * 2)
    assert [call.kwargs["dropout_p"] for call in attention.call_args_list] == [0.5] * 2
