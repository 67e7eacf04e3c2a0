"""Tests of edits to the script: an edit works, or the script reports the problem."""
import collections
import copy
import dataclasses
import enum
import json
import math
import re
import shutil
import signal
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import (
    ROOT, TINY, Forked, assert_close_logs, assert_same, assert_same_logs, load, one_line, read_log,
    succeed, together, write_text)
from test_model import ids, shake, small, stub_run
from torch.nn import functional as F

import hellaswag
import train_gpt2 as t

LAST = f"checkpoint_{TINY['max_steps']:05d}.pt"

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the text that all runs train on."""
    folder = tmp_path_factory.mktemp("changed")
    write_text(folder)
    return folder

@pytest.fixture(scope="module")
def finished(folder):
    """Return the folder of a finished run. Tests must not change it."""
    return succeed(Forked(folder / "finished")).log_dir

def narrow_window(arrange, width):
    """Let tokens attend to the last `width` tokens only. The first tokens still attend to all."""
    def attention(q, k, v, dropout_p, is_causal):
        all_pairs = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device)
        return F.scaled_dot_product_attention(q, k, v, all_pairs.tril().triu(1 - width))
    arrange.t.F = SimpleNamespace(cross_entropy=F.cross_entropy,
                                  scaled_dot_product_attention=attention)

def in_attention(arrange, add):
    """Call add(attention, config) at the end of CausalSelfAttention.__init__."""
    def __init__(self, config):
        real(self, config)
        add(self, config)
    real, arrange.t.CausalSelfAttention.__init__ = arrange.t.CausalSelfAttention.__init__, __init__

def edit_block(arrange, act):
    """Call act(block) at the end of Block.__init__."""
    def __init__(self, config):
        real(self, config)
        act(self)
    real, arrange.t.Block.__init__ = arrange.t.Block.__init__, __init__

def scale_projection(block):
    with torch.no_grad():
        block.mlp.c_proj.weight.mul_(0.1)

def normalize_weight(block):
    torch.nn.utils.parametrizations.weight_norm(block.mlp.c_fc)

def replace_weight_by_a_copy(block):
    block.mlp.c_proj.weight = torch.nn.Parameter(block.mlp.c_proj.weight.clone() * 0.05)

def copy_to_another_weight(block):
    with torch.no_grad():
        block.mlp.c_proj.weight.copy_(block.mlp.c_fc.weight.T)

@pytest.mark.parametrize("edit, name", [
    (scale_projection, "h.0.mlp.c_proj.weight"),
    (copy_to_another_weight, "h.0.mlp.c_proj.weight"),
    (replace_weight_by_a_copy, "h.0.mlp.c_proj.weight"),
    (normalize_weight, "h.0.mlp.c_fc.parametrizations.weight.original0")])
def test_a_weight_that_is_changed_or_copied_before_it_is_drawn_is_reported(monkeypatch, edit, name):
    """The start fails with a message that names the weight.

    Otherwise the edit would have no effect, or a different one from what its code says.
    """
    monkeypatch.setattr(t.Block, "__init__", t.Block.__init__)
    edit_block(SimpleNamespace(t=t), edit)
    with pytest.raises(t.UserError, match=rf"{name} has no initial values.*changes it, or copies"):
        t.build_state(small(), t.Config(), torch.float32)

def test_a_weight_that_is_never_drawn_is_reported():
    """A layer may be created too late, for example after init_weights() was called."""
    model = small()
    model.late = t.draw_later(torch.nn.Linear(4, 4))
    with pytest.raises(t.UserError, match="late.weight has no initial values.*created after init"):
        t.build_state(model, t.Config(), torch.float32)

def test_weights_can_be_changed_at_the_end_of_the_constructor(monkeypatch):
    """A change at the end of GPT.__init__, which the message recommends, takes effect.

    The output matrix can be untied there from the embedding.
    """
    before = small().state_dict()
    def __init__(self, config):
        real(self, config)
        with torch.no_grad():
            self.transformer.h[0].mlp.c_proj.weight.mul_(0.1)
        self.lm_head.weight = torch.nn.Parameter(self.transformer.wte.weight.clone())
    real = t.GPT.__init__
    monkeypatch.setattr(t.GPT, "__init__", __init__)
    model = small()
    name = "transformer.h.0.mlp.c_proj.weight"
    assert torch.equal(model.state_dict()[name], before[name] * 0.1)
    assert torch.equal(model.lm_head.weight, model.transformer.wte.weight)
    assert model.lm_head.weight is not model.transformer.wte.weight
    t.build_state(model, t.Config(), torch.float32)

def gain_of_queries(attention, config):
    attention.q_gain = torch.nn.Parameter(torch.ones(config.n_embd))

def mask_as_buffer(attention, config):
    """Add a buffer with -inf where a token must not attend, as in many implementations of GPT."""
    attention.register_buffer("mask", torch.full((config.block_size,) * 2, -math.inf).triu(1))

def low_rank(attention, config):
    """Add LoRA, whose product is zero at the start, and a gate that is open at the start."""
    attention.lora_a = t.draw_later(torch.nn.Linear(config.n_embd, 16, bias=False))
    attention.lora_b = torch.nn.Linear(16, config.n_embd, bias=False)
    torch.nn.init.zeros_(attention.lora_b.weight)
    attention.gate_bias = torch.nn.Parameter(torch.ones(config.n_embd))

def documents_apart(arrange, end_of_text):
    """Scale the logits by the number of texts up to each token. For a single text this is GPT-2."""
    def forward(self, idx, targets=None, return_logits=True):
        logits, loss = real(self, idx, targets)
        return logits * (1 + (idx == end_of_text).cumsum(1)[..., None]), loss
    real, arrange.t.GPT.forward = arrange.t.GPT.forward, forward

@pytest.mark.parametrize("edit, value, reason", [
    (narrow_window, 12, "logits differ by"), (documents_apart, 256, "logits differ by"),
    (in_attention, gain_of_queries, "q_gain"), (in_attention, mask_as_buffer, "mask")])
@pytest.mark.usefixtures("is_gpt2")
def test_an_edited_model_trains_to_the_end_and_is_not_exported(folder, edit, value, reason):
    """If transformers would compute other logits, nothing is exported, and a line says why."""
    run = succeed(Forked(folder / f"{edit.__name__} {reason}", max_steps=6, arrange={edit: value},
                         hide=["matplotlib"], sample_every=6, sample_tokens=9))
    assert re.search(rf"^Not exported: transformers would give different results \(.*{reason}",
                     run.out, re.M)
    assert (6, "val") in read_log(run.log_dir) and not (run.log_dir / "hf").exists()

def test_an_added_module_keeps_its_values_and_does_not_change_other_weights(monkeypatch):
    """Values that a module sets itself are kept, so that LoRA starts at zero.

    All other weights are drawn as before the edit, so that two models differ only in the edit.
    """
    before = small().state_dict()
    monkeypatch.setattr(t.CausalSelfAttention, "__init__", t.CausalSelfAttention.__init__)
    in_attention(SimpleNamespace(t=t), low_rank)
    model = small()
    after, attention = model.state_dict(), model.transformer.h[1].attn
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not attention.lora_b.weight.any() and (attention.gate_bias == 1).all()
    assert attention.lora_a.weight.std().item() == pytest.approx(0.02, rel=0.2)

def test_an_edit_of_the_logits_applies_to_samples_and_hellaswag(monkeypatch):
    """Samples and HellaSwag's scores use the logits of an edited forward()."""
    def forward(self, idx, targets=None, return_logits=True):
        logits = real(self, idx)[0]
        # A hash embedding of earlier tokens could favour a token in a similar way
        favourite = torch.nn.functional.one_hot((idx + 1) % 257, 257)
        return 100.0 * favourite + logits, None
    model, real = shake(small()), t.GPT.forward
    monkeypatch.setattr(t.GPT, "forward", forward)
    texts = model.generate(torch.tensor([[7]]), 5, temperature=0)
    assert texts.tolist() == [[7, 8, 9, 10, 11, 12]]
    endings = ["h", "i", "j", "k"]  # the edited model continues "g" with "h"
    question = dict(ctx="g", endings=endings, label=0)
    encode = lambda text: list(text.replace("a ", "a").encode())  # noqa: E731
    assert hellaswag.evaluate(model, hellaswag.prepare([question], model, encode)).acc == 1.0

def other_code(arrange, _):
    """Make the code look edited."""
    arrange.t.code_checksum = lambda: 7

def test_edited_code_continues_a_run_with_a_warning(folder, finished):
    """The warning is printed at the start and beside the result, also after later starts.

    Edited code cannot continue a finished run, because it would only validate a different model.
    """
    saved = load(finished / LAST)
    with pytest.raises(t.UserError, match="edited afterwards.*--log_dir"):
        t.check_code_of_finished_run(saved | {"code": 7}, t.Config(**saved["constants"]))
    copy = shutil.copytree(finished, folder / "edited")
    run = Forked(copy, arrange={other_code: 0})
    assert run.wait() == 1
    one_line(run.err, "is finished, and train_gpt2.py was edited afterwards")
    run = succeed(Forked(copy, max_steps=32, arrange={other_code: 0}))
    said = "train_gpt2.py was edited: from step 30 on, this run uses different code."
    assert run.out.count(f"!!! {said}") == 2  # at the start, and beside the result
    assert t.read_run_json(copy)["result"]["warnings"] == [said]
    again = succeed(Forked(copy, max_steps=32, arrange={other_code: 0}))
    assert again.out.count(said) == 1 and again.out.endswith(f"!!! {said}\n")  # in the result

def test_a_checkpoint_that_does_not_fit_the_code_is_reported(folder, finished):
    """One line names the tensor that does not fit, and no line says that the run continues.

    An optimizer of another class is refused as well, since torch would load its state without an
    error.
    """
    copy = shutil.copytree(finished, folder / "misfit")
    run = Forked(copy, max_steps=32, arrange={in_attention: gain_of_queries, other_code: 0})
    assert run.wait() == 1 and "uses different code" not in run.out
    one_line(run.err, "does not fit", "Missing key", "q_gain", copy, "--log_dir")
    saved = load(finished / LAST)
    cfg = t.Config(**saved["constants"])
    weights = t.weights_in_checkpoint(saved, "saved")
    model = t.build_model(cfg, t.gpt_config_of_run(cfg, weights.spec))
    optimizers = [torch.optim.SGD(model.parameters())]
    with mock.patch.object(t, "configure_optimizers", return_value=optimizers):
        with pytest.raises(t.UserError, match="has the state of AdamW, but the code uses SGD"):
            t.restore_checkpoint(t.build_state(model, cfg, torch.float32), saved, "run")
    # The average of an edit would not start from the weights in the checkpoint
    @dataclasses.dataclass
    class Averaged(t.State):
        average: torch.nn.Module = dataclasses.field(default_factory=lambda: torch.nn.Linear(1, 1))
    with mock.patch.object(t, "State", Averaged):
        with pytest.raises(t.UserError, match="checkpoint does not contain State.average"):
            t.restore_checkpoint(t.build_state(model, cfg, torch.float32), saved, "run")
    # Neither would a copy of the weights with which a run begins. Other values are kept
    for value, is_refused in (({"weights": [torch.ones(1)]}, True), (7, False), ([], False)):
        state = t.build_state(model, cfg, torch.float32)
        state.mine = value
        if is_refused:
            with pytest.raises(t.UserError, match="checkpoint does not contain State.mine"):
                t.restore_checkpoint(state, saved, "run")
        else:
            t.restore_checkpoint(state, saved, "run")
            assert state.mine == value

def test_which_edits_change_the_checksum_of_the_code(tmp_path, monkeypatch):
    """The checksum covers the code and the modules beside it, but not comments or constants.

    It also covers encoding_arguments().
    """
    source, path = (ROOT / "train_gpt2.py").read_text(), tmp_path / "train_gpt2.py"

    def checksum(source):
        path.write_text(source)
        return t.code_checksum.__wrapped__()
    monkeypatch.setattr(t, "__file__", str(path))
    same = checksum(source)
    assert same == t.code_checksum()  # the cached function returns the same value
    for old, new, is_same in (
            ("class Block", "# a comment\n\n\nclass Block", True),
            ("import re\n", "import re  # for text\n", True),
            ("seed: int = 1337", "seed: int = 2", True),
            ("    encoding=", "    seed=3,\n    encoding=", True),
            ("log_dir=\"log_finetune\"", "log_dir=\"tuned\"", True),
            ("return self.c_proj(", "return -self.c_proj(", False),
            ("state.step += 1", "state.step += 2", False),
            ("    file.truncate(kept)\n", "        file.truncate(kept)\n", False)):
        assert old in source and (checksum(source.replace(old, new, 1)) == same) == is_same, old
    (tmp_path / "lion.py").write_text("import tiger\n")
    with_lion = checksum(source + "from lion import Lion\n")
    assert with_lion != same
    (tmp_path / "lion.py").write_text("import tiger  # a comment\n")
    assert checksum(source + "from lion import Lion\n") == with_lion
    (tmp_path / "tiger.py").write_text("import lion\nx = 1\n")  # lion.py imports it
    assert checksum(source + "from lion import Lion\n") != with_lion
    assert checksum(source) == same
    monkeypatch.setattr(t, "encoding_arguments", t.get_encoding)  # it decides the ids of a text
    assert checksum(source) != same

def test_a_constant_that_an_old_run_lacks_counts_as_its_default(finished):
    """A run that was started before a constant existed continues if the constant has its default.

    A checkpoint without a checksum of the code can be continued, too.
    """
    saved, cfg = load(finished / LAST), t.Config(**load(finished / LAST)["constants"])
    del saved["constants"]["dropout"], saved["code"]
    t.check_same_training(saved, cfg, saved["data"])
    with pytest.raises(t.UserError, match=f"dropout was {t.Config.dropout}, is 0.5"):
        t.check_same_training(saved, dataclasses.replace(cfg, dropout=0.5), saved["data"])

def test_groups_keep_their_ratio_to_max_lr_and_their_numbers_when_a_run_continues():
    """A group that was built with another lr keeps its ratio to max_lr in every step.

    Numbers that training adds to a group are restored, since schedule-free optimizers need them.
    """
    def state():
        model, scaler = small(), torch.amp.GradScaler("cpu", enabled=False)
        embeddings, *others = model.parameters()
        groups = [dict(params=others), dict(params=[embeddings], lr=cfg.max_lr / 100)]
        optimizers = [torch.optim.SGD(groups, lr=cfg.max_lr)]
        t.prepare_groups(optimizers)  # as build_state() does
        return t.State(model, optimizers, scaler)
    cfg = t.Config(T=32, B=4, total_batch_size=128)
    run = stub_run(small(), cfg, ids(T=33))
    run.state = state()
    for step in range(4):
        run.ddp_model = run.state.raw_model
        run.state.optimizers[0].param_groups[0]["lr"] *= 3  # as an edit may do
        t.train_step(run)
        groups = run.state.optimizers[0].param_groups
        assert [group["lr"] / t.get_lr(step, cfg) for group in groups] == pytest.approx([1, 0.01])
        assert groups[1].get("k", 0) == step
        groups[1]["k"] = step + 1
        saved, run.state = copy.deepcopy(run.state.state_dict()), state()
        run.state.load_state_dict(saved)
    # An edit may replace the optimizers during training
    run.ddp_model = run.state.raw_model
    run.state.optimizers = [torch.optim.SGD(run.state.raw_model.parameters(), lr=2 * cfg.max_lr)]
    t.prepare_groups(run.state.optimizers)
    t.train_step(run)
    group = run.state.optimizers[0].param_groups[0]
    assert group["lr"] == pytest.approx(2 * t.get_lr(4, cfg))

def test_a_group_may_hold_dtypes_lists_and_tensors(tmp_path):
    """A checkpoint can store them. Tensors are moved to the device of the parameters."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1, device="meta"))], lr=0.1)
    group, = optimizer.param_groups
    group["compute"], group["seen"], group["buffer"] = torch.bfloat16, [], torch.zeros(2)
    t.prepare_groups([optimizer])
    group["seen"].append(3)
    torch.save(t.saved_form_of(optimizer), tmp_path / "saved.pt")
    content = load(tmp_path / "saved.pt")
    assert t.unsavable_part(content) is None
    group["seen"], group["compute"] = [], None
    t.load_optimizer(optimizer, content)
    group, = optimizer.param_groups
    assert group["buffer"].device.type == "meta" and group["initial"]["seen"] == []
    assert (group["seen"], group["compute"]) == ([3], torch.bfloat16)

def muon_state(saved=None, **in_group):
    """Return the State of a small model with Muon, restored from `saved` if it is given.

    in_group: numbers that replace those of Muon's group, as after an edit.
    """
    optimizers = t.configure_optimizers(model := small(), t.Config(optimizer="muon"))
    optimizers[1].param_groups[0].update(in_group)
    t.prepare_groups(optimizers)  # as build_state() does
    state = t.State(model, optimizers, torch.amp.GradScaler("cpu", enabled=False))
    if saved:
        state.load_state_dict(saved)
    return state

def test_an_edited_number_of_a_group_takes_effect_when_a_run_continues():
    """All other values of a group, for example those that training changed, are the saved ones.

    The oldest checkpoints do not show what was edited, so all of their numbers are restored. Those
    of 26 November contain only what training changed. All else has the values in the code.
    """
    def file(state):
        """Return what a checkpoint of the state contains."""
        return copy.deepcopy(t.copy_to_host(state.state_dict(), {})[0])
    state = muon_state(k=0, pair=(1, 2))
    # As done by an optimizer that counts its steps
    state.optimizers[1].param_groups[0].update(k=7, pair=(3, 4))
    for _ in range(2):  # a second restart is like the first
        state = muon_state(file(state), k=0, pair=(1, 2), momentum=0.8)
        group = state.optimizers[1].param_groups[0]
        assert (group["momentum"], group["k"], group["weight_decay"]) == (0.8, 7, 0.1)
        assert group["pair"] == (3, 4)
        assert state.optimizers[0].param_groups[0]["betas"] == (0.9, 0.95)
    group = muon_state(file(state), k=0).optimizers[1].param_groups[0]
    assert (group["momentum"], group["k"]) == (0.95, 7)  # the edit was undone
    of_november_26 = file(state)
    of_november_26["optimizers"][1]["param_groups"] = [dict(params=[*range(8)], k=7)]
    group = muon_state(of_november_26, k=0, momentum=0.7).optimizers[1].param_groups[0]
    assert (group["momentum"], group["k"]) == (0.7, 7)
    old = file(state)
    for optimizer, saved in zip(state.optimizers, old["optimizers"]):
        saved["param_groups"] = optimizer.state_dict()["param_groups"]
        for group in saved["param_groups"]:
            del group["initial"]
    assert muon_state(old, momentum=0.5).optimizers[1].param_groups[0]["momentum"] == 0.8

def test_optimizers_with_an_empty_group_are_restored():
    """If an edit freezes the embeddings, Muon has all other matrices, and AdamW has none."""
    def adamw(parameters):
        optimizer = torch.optim.AdamW([dict(params=[]), dict(params=parameters)])
        t.prepare_groups([optimizer])
        return optimizer
    for parameters in ([torch.nn.Parameter(torch.ones(1))], []):
        saved = adamw(parameters)
        saved.param_groups[1]["k"] = (torch.ones(1), 3)
        optimizer = adamw(parameters)
        t.load_optimizer(optimizer, t.saved_form_of(saved))
        assert optimizer.param_groups[1]["k"] == (torch.ones(1), 3)

def test_an_optimizer_in_an_attribute_of_its_own_is_restored():
    """It need not be in State.optimizers. Edited values and initial ones are different objects."""
    def sgd(seen):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        optimizer.param_groups[0]["seen"] = seen
        return optimizer
    saved = t.saved_form_of(sgd([1]))
    t.load_object([optimizer := sgd([])], [saved])
    assert optimizer.param_groups[0]["seen"] == [1]
    for seen in ([1], [2], [2]):  # the second one is edited
        optimizer = sgd(seen)
        t.prepare_groups([optimizer])
        t.load_optimizer(optimizer, saved)
        optimizer.param_groups[0]["seen"].append(9)
        saved = copy.deepcopy(t.saved_form_of(optimizer))
    assert optimizer.param_groups[0]["seen"] == [2, 9, 9]

class Mode(str, enum.Enum):
    FAST = "fast"

@pytest.mark.parametrize("value, name", [(len, "builtin_function"), (Mode.FAST, "Mode")])
def test_what_cannot_be_stored_in_a_group_is_reported_before_the_first_step(
        monkeypatch, value, name):
    """A checkpoint with it could not be loaded."""
    def optimizers(raw_model, cfg, muon_dtype):
        return [torch.optim.SGD([dict(params=raw_model.parameters(), mode=value)])]
    monkeypatch.setattr(t, "configure_optimizers", optimizers)
    with pytest.raises(t.UserError, match=f"State.optimizers holds an object of type {name}"):
        t.build_state(small(), t.Config(), torch.float32)

def test_an_attribute_that_training_created_is_restored():
    """A new State does not have it yet. It may be a number, a string, a tensor, a list or dict."""
    saved = muon_state().state_dict() | {"average": {"w": torch.ones(1)}}
    assert muon_state(saved).average == {"w": torch.ones(1)}

def test_an_object_around_an_optimizer_is_restored_as_it_was_saved():
    """The script knows the format of its own optimizers, but not that of other objects."""
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    t.prepare_groups([adamw])

    class Lookahead:
        def state_dict(self):
            return adamw.state_dict()

        def load_state_dict(self, content):
            assert content["param_groups"] == adamw.state_dict()["param_groups"]
    content = {"state": {"optimizers": [t.saved_form_of(Lookahead())]}, "gpt_config": {}}
    t.load_object([Lookahead()], t.converted_to_todays_format(content)["state"]["optimizers"])

def test_hyperparameters_that_state_sets_are_initial_ones(monkeypatch):
    """State.__post_init__, which an edit may define, may add optimizers and change groups."""
    @dataclasses.dataclass
    class Mine(t.State):
        def __post_init__(self):
            self.optimizers[0].param_groups[0].update(eps=3.0, peak_lr=3.0)
            self.optimizers.append(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0))
    monkeypatch.setattr(t, "State", Mine)
    state = t.build_state(small(), t.Config(), torch.float32)
    assert state.optimizers[0].param_groups[0]["initial"]["eps"] == 3.0
    assert state.optimizers[-1].param_groups[0]["initial"]["lr"] == 2.0
    assert [optimizer.param_groups[0]["peak_lr"] for optimizer in state.optimizers] == [3.0, 2.0]

def test_weights_are_used_by_a_model_without_dropout(monkeypatch):
    """An edit may remove the constant dropout from GPTConfig."""
    names = [field for field in dataclasses.fields(t.GPTConfig) if field.name != "dropout"]
    plain = dataclasses.make_dataclass("Plain", [(f.name, f.type, f.default) for f in names])
    monkeypatch.setattr(t, "GPTConfig", plain)
    spec = t.ModelSpec("x", {"n_layer": 2, "block_size": 8}, "bytes")
    assert t.gpt_config_of_run(t.Config(n_layer=5), spec) == plain(n_layer=2, block_size=8)

def test_a_flag_may_set_a_constant_that_the_weights_lack(monkeypatch, tmp_path):
    """A flag that is written differently, but has the same value, does not contradict weights."""
    for name, default in (("GPTConfig", 4.0), ("Config", 3.0)):
        old = getattr(t, name)
        fields = [(f.name, f.type, f.default) for f in dataclasses.fields(old)]
        monkeypatch.setattr(t, name, dataclasses.make_dataclass(
            name, [*fields, ("width", float, default)], bases=(old,), frozen=name == "Config"))
    known = {"block_size": 16, "n_vocab": 257, "n_layer": 1, "n_head": 2,
             "n_embd": 16}
    flags = {"data": str(write_text(tmp_path)), "init_from": "w", "width": "30"}
    # transformers' GPT-2 lacks the constant, so the model has GPTConfig's default
    monkeypatch.setattr(t, "gpt_from_hugging_face", lambda name: t.GPT(t.GPTConfig(**known)))
    of_transformers = t.read_weights("w")
    of_checkpoint = t.Weights(t.ModelSpec("w", known | {"width": 30.0}, "bytes"), {})
    for weights in (of_transformers, of_checkpoint):
        monkeypatch.setattr(t, "read_weights", lambda name: weights)
        cfg, start, _ = t.resolve_config(flags | {"log_dir": str(tmp_path / "log")})
        assert cfg.width == t.gpt_config_of_run(cfg, start.constants_from).width == 30.0
    with pytest.raises(t.UserError, match="width is 30.0 in the weights w: leave out --width"):
        t.resolve_config(flags | {"log_dir": str(tmp_path / "log"), "width": "31"})

def average_and_running_mean(arrange, attribute):
    """Add attributes to State: torch's average of weights, a mean, a minimum and a history."""
    @dataclasses.dataclass
    class Mine(arrange.t.State):
        mean: float = 0.0  # a tensor after the first step
        best: object = None

        def __post_init__(self):
            self.average = torch.optim.swa_utils.AveragedModel(self.raw_model)
            self.history = [("start", 0)]

        eval_model = property(lambda self: self.average.module)

    def train_step(run):
        loss, norm = real(run)
        state = run.state
        state.average.update_parameters(state.raw_model)
        state.mean = 0.9 * state.mean + 0.1 * norm
        state.best = norm if state.best is None else torch.minimum(state.best, norm)
        state.history = state.history[-3:] + [("step", state.step)]
        return loss + 1e-3 * state.mean, norm  # so that the log depends on it
    real, arrange.t.train_step, arrange.t.State = arrange.t.train_step, train_step, Mine

def test_state_saves_all_of_its_attributes(folder):
    """A killed run continues with all attributes of State as if it had not been killed."""
    def run(name, *steps):
        return Forked(folder / name, max_steps=20, arrange={
            average_and_running_mean: 0, "signal_at": (signal.SIGKILL, *steps)})
    whole, killed = succeed(run("state")), run("state 2", 13)
    assert killed.wait() == -signal.SIGKILL
    again = succeed(run("state 2"))
    assert "from step 10 on" in again.out
    assert_same_logs(again.log_dir, whole.log_dir)
    a, b = (load(log_dir / "checkpoint_00020.pt") for log_dir in (again.log_dir, whole.log_dir))
    assert_same(a, b)
    a, b = a["state"], b["state"]
    assert a["average"]["n_averaged"] == 20 and a["history"] == b["history"]
    assert torch.is_tensor(a["mean"]) and torch.equal(a["mean"], b["mean"])

def unsavable_attribute(arrange, name):
    """Add an attribute to State that holds a deque."""
    @dataclasses.dataclass
    class Mine(arrange.t.State):
        def __post_init__(self):
            setattr(self, name, collections.deque([1]))
    arrange.t.State = Mine

def test_an_attribute_that_cannot_be_saved_is_reported_before_the_first_step(folder):
    run = Forked(folder / "unsavable", arrange={unsavable_attribute: "losses"})
    assert run.wait() == 1 and not list(run.log_dir.glob("log.txt"))
    one_line(run.err, "State.losses holds an object of type deque")
    weight = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(t.UserError, match="State.slow holds an object of type Parameter"):
        t.check_can_be_saved({"slow": {weight: weight}})  # as a key, which torch would not load

def with_whole_groups(content, name=None):
    """Return a checkpoint's optimizers with all values in their groups, as earlier versions did.

    name: the key under which each group also holds its initial values.
    """
    model = t.GPT(t.GPTConfig(**content["gpt_config"]))
    built = t.configure_optimizers(model, t.Config(**content["constants"]))
    t.prepare_groups(built)
    optimizers = copy.deepcopy(content["state"]["optimizers"])
    for saved, optimizer in zip(optimizers, built, strict=True):
        for i, initial in enumerate(optimizer.state_dict()["param_groups"]):
            group = saved["param_groups"][i]
            assert group.pop("initial") == initial["initial"]
            del group["peak_lr"]
            then = {key: value for key, value in initial["initial"].items() if key != "peak_lr"}
            group |= {name: then} if name else {}
    return optimizers

def until_november_23(content):
    """Return a checkpoint's content in the form that the script wrote until 2026-11-23."""
    state = content["state"]
    old = {name: content[name] for name in ("gpt_config", "encoding", "constants", "data", "code")}
    old |= {"step": state["step"], "scaler": state["scaler"]}
    old["numbers"] = {"step": state["step"], "minutes": state["minutes_trained"]}
    old["model"], old["trained"] = content["eval_model"], state["raw_model"]
    old["optimizers"] = with_whole_groups(content)
    old["optimizer_names"] = [optimizer.pop("class") for optimizer in old["optimizers"]]
    return old

def on_november_24(content):
    """Return a checkpoint's content in the first form that the script wrote on 2026-11-24."""
    flat = {name: value for name, value in content.items() if name != "state"} | content["state"]
    flat["minutes"] = flat.pop("minutes_trained")
    return flat | {"optimizers": with_whole_groups(content, "as_built")}

def at_the_end_of_november_24(content):
    """Return a checkpoint's content in the last form that the script wrote on 2026-11-24."""
    state = content["state"] | {"optimizers": with_whole_groups(content, "in_code")}
    return content | {"state": state}

def on_november_26(content):
    """Return a checkpoint's content in the form that the script wrote on 2026-11-26 at noon."""
    optimizers = copy.deepcopy(content["state"]["optimizers"])
    for group in (group for optimizer in optimizers for group in optimizer["param_groups"]):
        initial = group.pop("initial")
        del group["peak_lr"], initial["peak_lr"]
        for name in [name for name in group if group[name] == initial.get(name)]:
            del group[name]  # only what training had changed was stored
    return content | {"state": content["state"] | {"optimizers": optimizers}}

def on_november_27(content):
    """Return a checkpoint's content in the form that the script wrote on 2026-11-27 at noon."""
    if "minutes_trained" in content.get("state", {}):
        state = dict(content["state"])
        state["minutes"] = state.pop("minutes_trained")
        content = content | {"state": state}
    return content | {"gpt_config": content["gpt_config"] | {"vocab_size": 384}}

@pytest.mark.parametrize("earlier", [until_november_23, on_november_24, at_the_end_of_november_24,
                                     on_november_26, on_november_27])
def test_checkpoints_of_an_earlier_version_continue(folder, finished, earlier):
    """A run continues from a checkpoint with the former names of entries."""
    def in_earlier_form(path):
        return on_november_27(earlier(load(path)))  # the forms before it also had vocab_size
    copied = folder / earlier.__name__
    stopped = Forked(copied, arrange={"signal_at": (signal.SIGTERM, 12)})
    stopped.wait()
    path = copied / "checkpoint_00013.pt"
    minutes = load(path)["state"]["minutes_trained"]
    torch.save(in_earlier_form(path), path)
    converted = t.read_checkpoint(path)["state"]
    assert converted["minutes_trained"] == minutes > 0 and "minutes" not in converted
    run = succeed(Forked(copied))
    assert "from step 13 on" in run.out and "was edited" not in run.out
    assert_same_logs(copied, finished)
    assert_same(load(copied / LAST), load(finished / LAST))
    torch.save(in_earlier_form(copied / LAST), copied / "old.pt")
    old, new = (t.GPT.from_pretrained(copied / name).state_dict() for name in ("old.pt", LAST))
    assert all(torch.equal(old[name], new[name]) for name in new)

def test_weights_with_a_constant_that_the_code_lacks_are_refused(finished):
    """The message names the constant that GPTConfig lacks."""
    weights = t.read_weights(str(finished / LAST))
    weights.spec.model_constants["width"] = 5
    with pytest.raises(t.UserError, match="was made with the constant width, which GPTConfig in"):
        t.GPT.from_pretrained(weights)

@pytest.mark.parametrize("float16", [False, True])
def test_gradients_are_exact_where_edits_find_them(monkeypatch, float16):
    """Edits find the exact gradients of the step's loss in p.grad, also in float16.

    The gradients are unscaled, averaged over micro-steps and not yet clipped.
    """
    model, cfg = shake(small()), t.Config(T=32, B=4, total_batch_size=512, grad_clip=0.01)
    rows = ids(T=33)
    model(rows[:, :-1], rows[:, 1:])[1].backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    run, real = stub_run(model, cfg, rows, float16=float16), torch.manual_seed

    def manual_seed(seed):
        if seed == t.seed_from(cfg.seed, 0, "update"):
            seen.update({name: p.grad.clone() for name, p in model.named_parameters()})
        return real(seed)
    seen = {}
    monkeypatch.setattr(torch, "manual_seed", manual_seed)
    t.train_step(run)
    for name, grad in exact.items():
        torch.testing.assert_close(seen[name], grad, atol=1e-6, rtol=1e-4)

def test_inputs_and_targets_do_not_share_memory():
    """A change of the inputs in place does not change the targets, and vice versa."""
    loader = t.DataLoaderLite([np.arange(100, dtype=np.uint16)], T=8)
    x, y = loader.batch(0, 2)
    x += 1000
    assert y.max() < 100
    y.fill_(-100)
    assert x.min() >= 1000

def short_rows(arrange, length):
    """Let the first ten steps train on rows of `length` tokens."""
    def read_step(run):
        n = length if run.state.step < 10 else None
        return [(row, x[:, :n], y[:, :n]) for row, x, y in real(run)]
    real, arrange.t.read_step = arrange.t.read_step, read_step

def test_tokens_of_shorter_rows_are_counted(folder):
    """The token count uses the length of the rows that were trained on."""
    run = succeed(Forked(folder / "short", max_steps=15, arrange={short_rows: 4}))
    expected = 10 * 128 // 4 + 5 * 128
    assert t.read_run_json(run.log_dir)["result"]["tokens"] == expected
    assert load(run.log_dir / "checkpoint_00015.pt")["state"]["tokens"] == expected

def test_a_parameter_without_an_optimizer_or_with_two_or_without_values_is_reported():
    """Each trainable parameter must be in one group, and each parameter must be finite.

    Otherwise the parameter would never change, would be updated twice, or would turn the loss into
    NaN.
    """
    model = small()
    gains = [model.transformer.ln_f.weight]
    others = [p for p in model.parameters() if p is not gains[0]]
    for groups, n in (([others], 0), ([others + gains, gains], 2)):
        with pytest.raises(t.UserError, match=f"ln_f.weight is in {n} optimizer groups"):
            t.check_parameters(model, [torch.optim.SGD(group) for group in groups])
    gains[0].requires_grad_(False)  # a frozen parameter needs no group
    t.check_parameters(model, [torch.optim.SGD(others)])
    # A parameter made by torch.empty may hold NaN
    model.lm_head.bias = torch.nn.Parameter(torch.full((384,), math.nan))
    with pytest.raises(t.UserError, match="lm_head.bias is not finite before the first step"):
        t.build_state(model, t.Config(), torch.float32)

def frozen_positions(arrange, _):
    """Freeze the position embedding."""
    def build_model(*args, **words):
        model = real(*args, **words)
        model.transformer.wpe.requires_grad_(False)
        return model
    real, arrange.t.build_model = arrange.t.build_model, build_model

def averaged_weights(arrange, decay):
    """Average the weights exponentially, in the way that part one describes."""
    @dataclasses.dataclass
    class Averaged(arrange.t.State):
        def __post_init__(self):
            self.average, self.moved = copy.deepcopy(self.raw_model), 0.0

        eval_model = property(lambda self: self.average)

    def train_step(run):
        result, trained = real(run), run.state.raw_model.parameters()
        for mean, p in zip(run.state.average.parameters(), trained, strict=True):
            mean.data.lerp_(p.data, 1 - decay)
        run.state.moved += result[1].item()  # a number that the edit adds to State
        return result
    real, arrange.t.train_step, arrange.t.State = arrange.t.train_step, train_step, Averaged

@pytest.mark.usefixtures("is_gpt2")
def test_averaged_weights_are_validated_saved_and_exported_and_frozen_ones_never_change(folder):
    """The average is used instead of the weights of the last step, also after a restart."""
    def run(name, *steps):
        return succeed(Forked(folder / name, max_steps=20, optimizer="muon", hide=["matplotlib"],
                              arrange={averaged_weights: 0.8, frozen_positions: 0,
                                       "signal_at": (signal.SIGTERM, *steps)}))
    whole, _, again = run("averaged"), run("averaged 2", 12), run("averaged 2")
    path = again.log_dir / "checkpoint_00020.pt"
    assert_same_logs(again.log_dir, whole.log_dir)
    assert_same(load(path), load(whole.log_dir / path.name))
    saved, average, encoding = load(path), t.GPT.from_pretrained(path), t.get_encoding("bytes")
    cfg = t.Config(**saved["constants"])
    loss = t.validation_loss(stub_run(average, cfg, ids()), t.open_data(cfg, encoding)[1])
    assert read_log(again.log_dir)[20, "val"] == pytest.approx(loss, abs=2e-6)
    exported = t.gpt_from_hugging_face(str(again.log_dir / "hf")).state_dict()
    new = t.build_model(cfg, t.gpt_config_of_run(cfg)).state_dict()
    for name, weight in saved["eval_model"].items():
        assert torch.equal(exported[name], weight)
        assert torch.equal(saved["state"]["raw_model"][name], weight) == (".wpe." in name), name
        assert torch.equal(new[name], weight) == (".wpe." in name), name

def test_a_growing_batch_needs_only_an_edit_of_rows_before(monkeypatch, tmp_path, capsys):
    """Each row is read once, and tokens per second and the axis of the plot follow the edit.

    A step whose number of rows does not fit B, or is 0, is reported.
    """
    warmup = {0: 0, 1: 4, 2: 12, 3: 24}  # the later steps have 16 rows
    monkeypatch.setattr(t, "rows_before", lambda cfg, n: warmup.get(n, 16 * n - 24))
    cfg = t.Config(T=32, B=2, total_batch_size=512, max_steps=6)
    run, rows, seen = stub_run(small(), cfg, ids(2, 33)), [], []
    batch = run.train_loader.batch.return_value
    run.train_loader.batch.side_effect = lambda row, B, _: rows.extend(range(row, row + B)) or batch
    for _ in range(6):
        t.train_step(run)
    assert rows == [*range(72)]
    with pytest.raises(t.UserError, match=r"Step 6 has 16 rows. rows_before.* = 3 \* 1"):
        run.cfg = dataclasses.replace(cfg, B=3)
        t.train_step(run)
    run.cfg, run.state.step, run.step_seconds = cfg, 3, [2.0]
    t.report_step(run, run.state.step - 1, 1.0, 1.0)
    assert f" {12 * 32 // 2} tok/s" in capsys.readouterr().out
    figure = pytest.importorskip("matplotlib.figure")
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, file, **_: seen.append(self))
    (tmp_path / "run.json").write_text(json.dumps({"constants": vars(cfg)}))
    (tmp_path / "log.txt").write_text("0 train 3.0\n1 train 2.0\n6 val 2.0\n")
    t.plot_curves(tmp_path)
    train, val = (line.get_xdata() * 1e6 for line in seen[0].axes[0].lines)
    assert [*train, *val] == pytest.approx([0, 4 * 32, 72 * 32])
    monkeypatch.setattr(t, "rows_before", lambda cfg, step: 24)
    with pytest.raises(t.UserError, match="Step 3 has 0 rows"):
        t.train_step(run)

def test_the_steps_of_epochs_follow_a_batch_that_depends_on_max_steps(monkeypatch):
    """The batch may double in the second half of the steps, or grow with step / max_steps."""
    def rows_before(cfg, step):
        return step + max(0, step - cfg.max_steps // 2)
    monkeypatch.setattr(t, "rows_before", rows_before)
    cfg = t.Config(epochs=2, max_steps=1000)
    steps = t.steps_for_epochs(cfg, rows_per_epoch=30)
    assert rows_before(dataclasses.replace(cfg, max_steps=steps), steps) == 60
    assert rows_before(dataclasses.replace(cfg, max_steps=steps - 1), steps - 1) < 60
    monkeypatch.setattr(t, "rows_before", lambda cfg, step: step + step**2 // cfg.max_steps)
    assert t.steps_for_epochs(cfg, rows_per_epoch=1) == 1  # max_steps is never 0
    assert t.steps_for_epochs(cfg, rows_per_epoch=30) == 30

def masked(arrange, _):
    """Count only the first (n % 5) * 4 targets of row n.

    Training on chats masks targets in a similar way, so that only the answers count.
    """
    def batch(self, row, B, device=torch.device("cpu")):
        x, y = real(self, row, B, device)
        counted = torch.arange(row, row + B, device=device) % 5 * 4
        columns = torch.arange(self.T, device=device)
        return x, y.masked_fill(columns >= counted[:, None], -100)
    real, arrange.t.DataLoaderLite.batch = arrange.t.DataLoaderLite.batch, batch

def noisy_gradients(arrange, scale):
    """Add random noise to the gradients before the optimizers use them."""
    def step_optimizers(state, *args):
        for p in state.raw_model.parameters():
            p.grad += scale * torch.randn_like(p)
        return real(state, *args)
    real, arrange.t.step_optimizers = arrange.t.step_optimizers, step_optimizers

def test_masked_targets_and_gradient_noise_do_not_depend_on_b_and_processes(folder):
    """The loss is the mean over all targets that count, even if a micro-batch has none of them.

    Gradient noise is the same in all processes, so that they train the same model.
    """
    edits = {masked: 0, noisy_gradients: 0.01}
    one = succeed(Forked(folder / "masked", B=8, arrange=edits))  # one micro-batch per step
    statuses, runs = together(2, folder / "masked 2", B=1, arrange=edits)
    assert statuses == [0, 0], [run.err for run in runs]
    assert_close_logs(one.log_dir, runs[0].log_dir)

def smoothed_labels(arrange, n_columns):
    """Smooth the labels in the loss over the first n_columns columns of the logits."""
    def cross_entropy(logits, *args, **how):
        return real(logits[:, :n_columns], *args, label_smoothing=0.1, **how)
    real, arrange.t.F.cross_entropy = arrange.t.F.cross_entropy, cross_entropy

def test_a_loss_that_includes_the_padding_is_reported(folder):
    """Label smoothing over all columns stops in the first step. Over the vocabulary, it trains."""
    run = Forked(folder / "smoothed", arrange={smoothed_labels: None})
    assert run.wait() == 1
    assert "Step 0 has loss inf" in run.err and "padding's logits, which are -inf" in run.err
    succeed(Forked(folder / "smoothed 2", arrange={smoothed_labels: 257}))

def test_a_loss_that_is_not_the_cross_entropy_is_reported(monkeypatch, tmp_path):
    """A warning says that val is not the cross-entropy, unless only training adds the term.

    With such a loss, runs are not comparable, so the result keeps the warning after a restart.
    """
    def forward(self, idx, targets=None, return_logits=True):
        logits, loss = real(self, idx, targets)
        return logits, loss + (self.training or wrong) * 1e-3 * logits.logsumexp(-1).square().mean()
    real, run = t.GPT.forward, stub_run(small(), t.Config(), ids(T=33))
    run.val_loader = run.train_loader
    monkeypatch.setattr(t.GPT, "forward", forward)
    for wrong in (False, True):
        [*warning] = t.find_warnings(run, checkpoint={})
        assert bool(warning) == wrong
    assert "val is not the cross-entropy" in warning[0]
    folder = t.RunFolder(t.Config(log_dir=str(tmp_path)), "data")
    folder.begin(0, continues=False, warnings=warning)
    folder.close()
    folder = t.RunFolder(t.Config(log_dir=str(tmp_path)), "data")
    folder.begin(5, continues=True)  # a start that has no warning of its own
    run.folder, run.step_seconds = folder, []
    assert t.result_of(run)["warnings"] == warning
    folder.close()

def test_a_new_model_constant_is_passed_on_by_its_name(monkeypatch):
    """A constant in both Config and GPTConfig reaches the model. The seed decides the weights."""
    gpt_config = dataclasses.make_dataclass("Wider", [("width", int, 4)], bases=(t.GPTConfig,))
    config = dataclasses.make_dataclass("Config", [("width", int, 3)], bases=(t.Config,),
                                        frozen=True)
    monkeypatch.setattr(t, "GPTConfig", gpt_config)
    configs = [config(**TINY, width=5, seed=seed) for seed in (1, 1, 2)]
    a, b, c = (t.build_model(cfg, t.gpt_config_of_run(cfg)) for cfg in configs)
    assert (a.config.width, a.config.n_layer, a.config.block_size) == (5, 1, 16)
    assert torch.equal(a.lm_head.weight, b.lm_head.weight)
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)

@pytest.fixture(scope="module")
def dropped(folder):
    """Return a finished run with dropout."""
    return succeed(Forked(folder / "dropped", dropout=0.3, sample_every=10, sample_tokens=30))

def test_a_killed_run_with_dropout_equals_one_that_was_never_killed(folder, dropped):
    """After a restart, each step draws the dropout masks that it has in an uninterrupted run."""
    words = dict(dropout=0.3, sample_every=10, sample_tokens=30)
    for number, step in ((signal.SIGTERM, 6), (signal.SIGKILL, 23)):
        run = Forked(folder / "dropped 2", arrange={"signal_at": (number, step)}, **words)
        run.wait()
    succeed(Forked(run.log_dir, **words))
    assert_same_logs(run.log_dir, dropped.log_dir)
    assert_same(load(run.log_dir / LAST), load(dropped.log_dir / LAST))

def test_dropout_is_active_in_train_step_only(dropped, finished):
    """Validation and samples use no dropout. Each micro-step has its own random seed."""
    with_noise, without = read_log(dropped.log_dir), read_log(finished)
    assert with_noise[0, "val"] == without[0, "val"]
    assert with_noise[0, "train"] != without[0, "train"]
    model = t.GPT.from_pretrained(dropped.log_dir / LAST, dropout=0.3)
    assert not model.training and model.config.dropout == 0.3
    assert "sample at step 30" in dropped.out
    # An argument replaces a stored constant
    assert t.GPT.from_pretrained(dropped.log_dir / LAST, n_head=1).config.n_head == 1
    seen = []
    cfg = t.Config(T=32, B=4, total_batch_size=256)
    run = stub_run(small(dropout=0.5), cfg, ids(T=33))
    run.ddp_model.register_forward_pre_hook(
        lambda module, _: seen.append((module.training, torch.initial_seed())))
    for seed in (1, 1, 2, 2):
        run.cfg = dataclasses.replace(cfg, seed=seed)
        t.train_step(run)
    run.state.step = 0
    t.train_step(run)  # the first rows again, with another seed
    assert all(training for training, _ in seen) and len(set(seen)) == 10
    assert not run.ddp_model.training
    samples, run.state.step = [], 7
    with mock.patch.object(t, "sample_text", lambda model, encoding, cfg, seed: samples.append(
            (model.training, model is run.state.eval_model, seed))):
        t.print_sample(run)
    assert samples == [(False, True, run.cfg.seed + 7)]

def test_dropout_is_applied_where_gpt2_applies_it(is_gpt2):
    """Dropout follows the embedding and both parts of each block, and is part of attention."""
    model = small(dropout=0.5).train()
    with mock.patch.object(F, "dropout", wraps=F.dropout) as dropout, mock.patch.object(
            F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as attention:
        model(ids())
    assert [call.args[1] for call in dropout.call_args_list] == [0.5] * (1 + 2 * 2)
    assert [call.kwargs["dropout_p"] for call in attention.call_args_list] == [0.5] * 2

def test_dropout_can_be_changed_in_all_places_during_training(is_gpt2):
    """An edit that sets p of each nn.Dropout also changes the dropout of the attention weights."""
    model = small(dropout=0.5).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    assert model(ids())[0].equal(model.eval()(ids())[0])

def update_of_one_process(arrange, _):
    """Let the process with rank 1 skip its first update, as if its own loss had decided so."""
    def step_optimizers(state, *args):
        if t.rank() == 1 and state.step == 0:
            for optimizer in state.optimizers:
                optimizer.zero_grad()
        else:
            real(state, *args)
    real, arrange.t.step_optimizers = arrange.t.step_optimizers, step_optimizers

def test_processes_with_different_weights_are_reported_before_a_save(folder):
    """DDP averages the gradients, so their norms do not show that the weights differ.

    Otherwise the weights of rank 0 would be saved, and a restart would hide the difference.
    """
    log_dir = folder / "apart"
    statuses, runs = together(2, log_dir, arrange={update_of_one_process: 0})
    assert statuses == [1, 1]
    message = "The weights of the processes have norms from"
    assert message in runs[0].err and message in t.read_run_json(log_dir)["result"]["failed"]
    assert not list(log_dir.glob("*.pt"))

def scaled_mlp(arrange, scale):
    """Multiply the output of each MLP by an attribute that build_model() sets."""
    def forward(self, x):
        return self.scale * real_forward(self, x)
    def build_model(*args, **words):
        model = real_build(*args, **words)
        for block in model.transformer.h:
            block.mlp.scale = scale
        return model
    real_forward, arrange.t.MLP.forward = arrange.t.MLP.forward, forward
    arrange.t.MLP.scale = 1.0
    real_build, arrange.t.build_model = arrange.t.build_model, build_model

def halved_gain(arrange, _):
    """Let State halve a gain when it is created."""
    @dataclasses.dataclass
    class Halved(arrange.t.State):
        def __post_init__(self):
            self.raw_model.transformer.ln_f.weight.data.mul_(0.5)
    arrange.t.State = Halved

def write_gain_of_sample(arrange, path):
    """Write the mean gain of the model that is sampled to a file."""
    def sample_text(model, *args, **words):
        path.write_text(str(model.transformer.ln_f.weight.mean().item()))
        return real(model, *args, **words)
    real, arrange.t.sample_text = arrange.t.sample_text, sample_text

@pytest.mark.usefixtures("is_gpt2")
def test_an_edit_of_the_first_weights_does_not_change_trained_weights(folder):
    """Samples and the export have the weights in the checkpoint, and so does a resumed run."""
    flags = dict(max_steps=5, hide=["matplotlib"])
    run = succeed(Forked(folder / "halved", arrange={halved_gain: 0}, **flags))
    run = succeed(Forked(run.log_dir, arrange={halved_gain: 0}, **flags))
    gain = load(run.log_dir / "checkpoint_00005.pt")["eval_model"]["transformer.ln_f.weight"]
    assert 0.4 < gain.mean() < 0.6
    exported = t.gpt_from_hugging_face(str(run.log_dir / "hf")).transformer.ln_f.weight
    assert torch.equal(exported, gain)
    seen = folder / "seen gain"
    succeed(Forked(run.log_dir, sample=1, arrange={halved_gain: 0, write_gain_of_sample: seen}))
    assert float(seen.read_text()) == pytest.approx(gain.mean().item())

def write_scale_of_sample(arrange, path):
    """Write the scale of the model that is sampled to a file."""
    def sample_text(model, *args, **words):
        path.write_text(str(model.transformer.h[0].mlp.scale))
        return real(model, *args, **words)
    real, arrange.t.sample_text = arrange.t.sample_text, sample_text

@pytest.mark.usefixtures("is_gpt2")
def test_an_edit_of_build_model_also_applies_to_samples_and_the_export(folder):
    """A model that transformers computes differently is not exported. Samples use this model."""
    run = succeed(Forked(folder / "scaled", max_steps=5, hide=["matplotlib"],
                         arrange={scaled_mlp: 100.0}))
    assert "Not exported: transformers would give different results (logits differ" in run.out
    assert not (run.log_dir / "hf").exists()
    seen = folder / "seen"
    succeed(Forked(run.log_dir, sample=1, arrange={scaled_mlp: 100.0, write_scale_of_sample: seen}))
    assert seen.read_text() == "100.0"

def test_small_values_keep_their_digits_in_the_log(tmp_path):
    """report() accepts values such as learning rates. read_metrics() reads them back."""
    run = mock.MagicMock(cfg=t.Config())
    run.folder.log = open(tmp_path / "log.txt", "wb")
    for value in (7e-5, -3.2e-8, 0.0, 0.25):
        t.write_log(run, 3, "gate", value)
    run.folder.log.close()
    assert [value for _, value in t.read_metrics(tmp_path)["gate"]] == [7e-5, -3.2e-8, 0.0, 0.25]
    t.truncate_and_open_log(tmp_path / "log.txt", 3).close()
    assert not (tmp_path / "log.txt").read_bytes()  # all lines were of step 3
