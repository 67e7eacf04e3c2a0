"""The script is made to be changed: an edit works, or is told; it is never silently wrong."""
import dataclasses
import re
import shutil
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import (
    ROOT, TINY, Forked, assert_same, load, one_line, read_log, succeed, write_text)
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
        all_pairs = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool)
        return F.scaled_dot_product_attention(q, k, v, all_pairs.tril().triu(1 - width))
    arrange.t.F = SimpleNamespace(cross_entropy=F.cross_entropy,
                                  scaled_dot_product_attention=attention)


def gain_of_queries(arrange, _):
    def __init__(self, config):
        real(self, config)
        self.q_gain = torch.nn.Parameter(torch.ones(config.n_embd))
    real, arrange.t.CausalSelfAttention.__init__ = arrange.t.CausalSelfAttention.__init__, __init__


def documents_apart(arrange, end_of_text):  # in a text without documents, this is GPT-2
    real, arrange.t.GPT.hidden = arrange.t.GPT.hidden, lambda self, idx: (
        real(self, idx) * (1 + (idx == end_of_text).cumsum(1)[..., None]))


@pytest.mark.parametrize("edit, value, reason", [
    (narrow_window, 12, "logits differ by"), (documents_apart, 256, "logits differ by"),
    (gain_of_queries, 0, "q_gain")])
@pytest.mark.usefixtures("is_gpt2")
def test_an_edited_model_trains_to_the_end_and_is_not_exported(folder, edit, value, reason):
    """hf/ would compute something else than what was trained."""
    run = succeed(Forked(folder / edit.__name__, max_steps=6, arrange={edit: value},
                         hide=["matplotlib"], sample_every=6, sample_tokens=9))
    *_, said, _, _ = run.out.splitlines()
    assert re.match(rf"Not exported: transformers would compute something else \(.*{reason}", said)
    assert (6, "val") in read_log(run.log_dir) and not (run.log_dir / "hf").exists()


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


def test_other_code_continues_a_run_and_says_so(finished, capsys):
    """Two models in one run. A finished one would be validated and exported as another's."""
    saved = load(finished / LAST)
    cfg = t.Config(**saved["constants"])
    t.check_same_training(saved, cfg, saved["data"])
    assert capsys.readouterr().out == ""
    saved["code"] = 7
    with pytest.raises(t.UserError, match="edited since it finished.*--log_dir"):
        t.check_same_training(saved, cfg, saved["data"])
    saved["step"] = 13
    t.check_same_training(saved, cfg, saved["data"])
    assert "!!! train_gpt2.py was edited: from step 13 on, other" in capsys.readouterr().out


def test_weights_that_do_not_fit_the_edited_model_are_a_line(folder, finished):
    copy = shutil.copytree(finished, folder / "misfit")
    run = Forked(copy, max_steps=32, arrange={gain_of_queries: 0})
    assert run.wait() == 1
    one_line(run.err, "other code", "Missing key", "q_gain", "--log_dir")


def test_what_counts_as_other_code(tmp_path, monkeypatch):
    """Comments, blank lines and constants do not; as it was imported, not as it is now."""
    source, path = (ROOT / "train_gpt2.py").read_text(), tmp_path / "train_gpt2.py"

    def checksum(source):
        path.write_text(source)
        return t.code_checksum.__wrapped__()
    monkeypatch.setattr(t, "__file__", str(path))
    same = checksum(source)
    assert same == t.code_checksum()  # still that of the file that was imported
    for old, new in (("class Block", "# a comment\n\n\nclass Block"),
                     ("seed: int = 1337", "seed: int = 2"),
                     ("    encoding=", "    seed=3, encoding="),
                     ("import re\n", "import re  # as always\n")):
        assert old in source and checksum(source.replace(old, new, 1)) == same, old
    for old, new in (("return self.c_proj(", "return -self.c_proj("),
                     ("state.step += 1", "state.step += 2"), ("    print0_once(", " print0_once(")):
        assert old in source and checksum(source.replace(old, new, 1)) != same, old


def test_a_new_constant_had_its_default_in_old_runs(finished):
    """Else nobody could go on: `dropout was None`, which no one can put back."""
    saved, cfg = load(finished / LAST), t.Config(**load(finished / LAST)["constants"])
    del saved["constants"]["dropout"]
    t.check_same_training(saved, cfg, saved["data"])
    with pytest.raises(t.UserError, match=f"dropout was {t.Config.dropout}, is 0.5"):
        t.check_same_training(saved, dataclasses.replace(cfg, dropout=0.5), saved["data"])


def test_optimizers_go_on_with_the_codes_settings(finished):
    """Of a checkpoint they take their state, or betas that were edited would have no effect."""
    saved = load(finished / LAST)
    model = t.build_model(t.Config(**saved["constants"]), t.get_encoding("bytes"), saved)
    state = t.State(model, t.configure_optimizers(model, t.Config()), torch.amp.GradScaler("cpu"))
    state.optimizers[0].param_groups[0]["betas"] = (0.8, 0.99)
    state.load_state_dict(saved)
    assert state.optimizers[0].param_groups[0]["betas"] == (0.8, 0.99)
    assert state.optimizers[0].state[model.transformer.ln_f.weight]["exp_avg"].any()


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
    assert (run.log_dir / "log.txt").read_bytes() == (dropped.log_dir / "log.txt").read_bytes()
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


def test_only_the_newest_drawing_waits():
    with ThreadPoolExecutor(1) as thread, mock.patch.object(t, "draw_curves") as draw_curves:
        run, hold = mock.Mock(thread=thread, drawing=Future()), Future()
        thread.submit(hold.result)  # a save
        for _ in range(5):
            t.draw(run)
        hold.set_result(None)
        run.drawing.result(60)
        assert draw_curves.call_count == 1


def test_what_stays_in_a_log(tmp_path, monkeypatch):
    """Steps that come again go, and half a line; comments stay, and what a full disk refused."""
    path, kept = tmp_path / "log.txt", b"# tried on Monday\n\n0 val 9.5\n# the cat\n11 train 1.0\n"
    for rest in (b"12 train 1.0\n# no\n", b"13 val 1.0\n", b"11 tra", b"1", b"# half", b""):
        path.write_bytes(kept + rest)
        log = t.Log(path, 12, lock=None)
        log.write(b"12 train 2.0\n")
        assert path.read_bytes() == kept + b"12 train 2.0\n", rest
    file, log.file = log.file, mock.Mock()
    log.file.write.side_effect = [3, OSError("No space left")]
    log.write(b"13 train 3.0\n")  # of which a full disk takes 3 bytes
    log.write(b"")
    assert log.refused == b"train 3.0\n"
    log.file = file
    with mock.patch.object(t.os, "fsync") as fsync:
        fsync.side_effect = lambda number: seen.append((number, path.read_bytes()))
        seen = []
        log.sync()
    assert seen == [(log.file.fileno(), kept + b"12 train 2.0\ntrain 3.0\n")]
    monkeypatch.setattr("builtins.print", mock.Mock(side_effect=OSError("No space left")))
    t.print0("to a file on the same disk")
