"""Training as its user runs it: two settings, several processes, and the mistakes people make."""
import dataclasses
import re
from unittest import mock
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from conftest import (
    ENV, ROOT, TINY, Forked, assert_close_logs, one_line, read_log, run_python, run_script, succeed,
    two_processes, write_text)
from test_model import small

import hellaswag
import train_gpt2 as t


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the text that all train on."""
    folder = tmp_path_factory.mktemp("train")
    write_text(folder)
    return folder


def save_shards(folder, train=5000, val=1000):
    """Shards of random bytes; 0 tokens: no such shard."""
    folder.mkdir(exist_ok=True)
    tokens = np.random.default_rng(0).integers(0, 257, 5000).astype(np.uint16)
    for split, size in (("train", train), ("val", val)):
        if size:
            np.save(folder / f"x_{split}_000000.npy", tokens[:size])


def test_quick_start_and_then_the_real_thing(tmp_path, monkeypatch):
    """Beside what a fineweb.py that failed left; with shards, the same command trains on those."""
    save_shards(tmp_path / "edu_fineweb10B", train=0)
    (tmp_path / "edu_fineweb10B" / ".lock").touch()
    shorter = ["--max_steps=15", "--eval_every=15", "--sample_every=15", "--val_tokens=4096",
               "--sample_tokens=50"]
    done = run_script("train_gpt2.py", *shorter, "--device=cpu", cwd=tmp_path, env=ENV)
    assert (done.returncode, done.stderr) == (0, "")
    start, first_lines, *_ = done.stdout.split("\n\n")
    assert start.startswith("Quick start") and "python fineweb.py" in start
    assert "SMALL" in first_lines and "n_layer=3" in first_lines and "max_steps=15" in first_lines
    assert re.findall(r"^ +(\d+)/15 loss", done.stdout, re.M) == ["0", "10"]
    assert done.stdout.count("--- sample at step 15") == done.stdout.count("--- sample") == 1
    assert "--sample=3 --log_dir=log_small" in done.stdout
    values = read_log(tmp_path / "log_small")
    assert set(values) == {(0, "val"), (15, "val"), *((step, "train") for step in range(15))}
    assert values[15, "val"] < 3.5 < values[0, "val"]
    save_shards(tmp_path / "edu_fineweb10B")
    monkeypatch.chdir(tmp_path)
    cfg, lines = t.choose_settings({})  # of the same command
    assert cfg == t.Config() and "settings  Config" in lines


def test_a_text_gets_small_and_a_folder_config_and_flags_win(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    given = {"data": "text.txt", "n_layer": "5", "seed": "7"}
    cfg, lines = t.choose_settings(given)
    expected = t.SMALL | {"data": "text.txt", "n_layer": 5, "seed": 7}
    assert cfg == dataclasses.replace(t.Config(), **expected)
    assert all(f"{name}={expected[name]!r}" in lines for name in t.SMALL)
    assert "SMALL" in lines and "Quick start" not in lines
    weights = t.choose_settings({"data": "text.txt", "init_from": "gpt2", "dropout": "0"})[1]
    assert "max_lr=" in weights and "n_layer" not in weights  # which the weights decide
    save_shards(tmp_path / "shards")
    cfg, lines = t.choose_settings(given | {"data": "shards"})
    assert cfg == t.Config(data="shards", n_layer=5, seed=7)
    assert "Config" in lines and "SMALL" not in lines


def test_an_edited_copy_of_the_script_trains_with_its_constants(tmp_path):
    """The command has no flags. The comments of what was edited are gone, or have one space."""
    save_shards(tmp_path / "edu_fineweb10B")
    for name in ("transformers.py", "matplotlib.py"):  # which take seconds
        (tmp_path / name).write_text("raise ImportError")
    source = (ROOT / "train_gpt2.py").read_text()
    for name, value in (TINY | dict(max_steps=2e0, compile=False, val_tokens=512)).items():
        line = re.compile(rf"^(    {name}: [^=]+ =) .*", re.M)
        source, n = line.subn(rf"\1 {value!r}{' # was 12' * (name == 'n_head')}", source, count=1)
        assert n == 1, name
    (tmp_path / "train_gpt2.py").write_text(source)
    (tmp_path / "fineweb.py").symlink_to(ROOT / "fineweb.py")
    done = run_python("import train_gpt2; train_gpt2.main()", cwd=tmp_path, env={"PYTHONPATH": ""})
    assert (done.returncode, done.stderr) == (0, "")
    assert "n_layer=1, n_head=2, n_embd=16" in done.stdout
    assert [step for step, stream in read_log(tmp_path / "log") if stream == "train"] == [0, 1]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_processes_are_the_same_training(folder, optimizer):
    words = dict(optimizer=optimizer, muon_lr_ratio=2.5, B=2, sample_every=30, sample_tokens=9)
    one = succeed(Forked(folder / f"one_{optimizer}", **words))
    statuses, runs = two_processes(folder / f"two_{optimizer}", **words)
    assert statuses == [0, 0], [run.err for run in runs]
    assert_close_logs(one.log_dir, runs[0].log_dir)
    assert runs[0].out.count("--- sample at step 30 ---") == 1 and runs[1].out == ""


def test_gradients_travel_in_grad_comm(monkeypatch):
    """bfloat16 halves their traffic. One bucket for all would leave after backward only; small
    ones cut a compiled model into many graphs."""
    hook = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook"
    monkeypatch.setattr(hook, compress := mock.Mock())
    monkeypatch.setattr(t, "DDP", DDP := mock.Mock())
    monkeypatch.setattr(t, "world_size", lambda: 2)
    model = small()
    assert t.wrap_ddp(model, t.Config()) is DDP() and not DDP().register_comm_hook.called
    assert mock.call(model, gradient_as_bucket_view=True, bucket_cap_mb=100) in DDP.mock_calls
    t.wrap_ddp(small(), t.Config(grad_comm="bfloat16"))
    DDP().register_comm_hook.call_args.args[1](None, "bucket")
    compress.assert_called_once_with(None, "bucket")


def test_restarted_processes_do_not_meet_the_dead(monkeypatch):
    """torchrun's store outlives a restart, and holds the addresses of those that were killed."""
    store, seen = torch.distributed.HashStore(), []
    monkeypatch.setattr(t.dist, "rendezvous", lambda url: iter([(store, 0, 2)]))
    monkeypatch.setattr(t.dist, "init_process_group", lambda **words: seen.append(words))
    for count, device in (("0", "cpu"), ("1", "cuda:0")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        t.join_processes(torch.device(device))
        seen[-1]["store"].set("address", count)
    assert [words["store"].get("address") for words in seen] == [b"0", b"1"]
    assert [words["backend"] for words in seen] == ["gloo", "nccl"]
    assert min(words["timeout"].total_seconds() for words in seen) >= 3600  # of rank 0's export


def test_rank_0_alone_has_the_questions(monkeypatch, gpt2_encoding, capsys):
    """The others would download them, too, or score nothing. Without any, training goes on."""
    question, seen, autocast = dict(ctx="a", endings=["b", "c", "d", "e"], label=0), [], MagicMock()
    monkeypatch.setattr(hellaswag, "iterate_examples", get := mock.Mock(return_value=[question]))
    monkeypatch.setattr(hellaswag, "evaluate", lambda model, questions: hellaswag.Score(
        acc=0.2, acc_norm=len(questions.labels), total=1, cut=0))
    assert t.hellaswag_scorer(t.Config(), small(), autocast)() == 1 and get.called
    get.side_effect = t.UserError("no network today")
    for cfg in (t.Config(), t.Config(encoding="bytes"), t.Config(hellaswag_every=0)):
        assert t.hellaswag_scorer(cfg, small(), autocast) is None
    reasons = re.findall("HellaSwag is off: (.*)", capsys.readouterr().out)
    assert reasons == ["no network today", "it needs --encoding=gpt2."]
    monkeypatch.setattr(t, "rank", lambda: 1)
    monkeypatch.setattr(t, "from_rank_0", lambda value: seen.append(value) or [question])
    get.reset_mock()
    assert t.hellaswag_scorer(t.Config(), small(), autocast)() == 1
    assert seen == [[]] and autocast().__enter__.called and not get.called


def test_the_order_of_things(monkeypatch):
    """First a save, or an evaluation that fails costs steps; everything when it is due."""
    seen, state = [], mock.Mock(step=0)
    cfg = t.Config(max_steps=3, save_every=2, keep_every=0, eval_every=2, hellaswag_every=3,
                   sample_every=2)
    run = MagicMock(cfg=cfg, state=state, stopping=False)

    def train_step(run):
        state.step += 1
        return "step", 0
    for name in ("save", "validation_loss", "draw", "print_samples", "finish"):
        monkeypatch.setattr(t, name, lambda *_, name=name: seen.append(name))
    run.hellaswag.side_effect = lambda: seen.append("hellaswag")
    monkeypatch.setattr(t, "train_step", train_step)
    monkeypatch.setattr(t, "report", lambda run, step, stream, *_: seen.append(stream))
    monkeypatch.setattr(t, "report_step", lambda run, loss, *_: seen.append(loss))
    t.train(run)
    evaluated, hella = ["save", "validation_loss", "val"], ["hellaswag", "hella"]
    assert seen == [*evaluated, *hella, "draw", "step", "step", *evaluated, "draw", "print_samples",
                    "step", *evaluated, *hella, "draw", "print_samples", "finish"]


def test_a_compiler_that_fails_is_not_needed(monkeypatch, capsys):
    """A save in progress is finished before a process ends, whatever ends it."""
    monkeypatch.setattr(t, "set_up", set_up := mock.Mock(return_value=MagicMock()))
    error = torch._dynamo.exc.TorchDynamoException("no C compiler")
    monkeypatch.setattr(t, "train", mock.Mock(side_effect=error))
    monkeypatch.setattr(t.signal, "signal", mock.Mock())
    monkeypatch.setattr(t.dist, "is_initialized", lambda: True)  # others may wait for this one
    monkeypatch.setattr(t.os, "_exit", end := mock.Mock(side_effect=SystemExit))
    monkeypatch.setattr("sys.argv", ["train_gpt2.py", f"--data={__file__}", "--device=cpu"])
    with pytest.raises(SystemExit):
        t.main()
    assert capsys.readouterr().err.endswith("--compile=False does without compiling.\n")
    assert set_up().thread.__exit__.called and end.call_args.args == (1,)


MISTAKES = {  # name: (constants that differ, what the line must hold)
    "missing shards": (dict(data="edu_fineweb10B", encoding="gpt2", env={  # told before the next
        "TIKTOKEN_CACHE_DIR": "none"}), ["edu_fineweb10B", "fineweb.py"]),
    "no validation shard": (dict(data="{bad}/noval"), ["noval", "_val_"]),
    "short text": (dict(data="{bad}/short.txt"), ["short.txt", "--T"]),
    "not UTF-8": (dict(data="{bad}/latin1.txt"), ["latin1.txt is not UTF-8", "0xe9"]),
    "learning rate would rise": (dict(min_lr=0.1), ["min_lr=0.1", "max_lr=0.01"]),
    "batch does not divide": (dict(total_batch_size=1000), ["total_batch_size=1000", "4 * 16 * 1"]),
    "unknown flag": (dict(n_layers=3), ["--n_layers", "--help"]),
    "unknown choice": (dict(optimizer="sgd"), ["optimizer=sgd", "'adamw', 'muon'"]),
    "no such device": (dict(device="cuda:99", env={"CUDA_VISIBLE_DEVICES": ""}),
                       ["device=cuda:99", "no GPU"]),
    "shape beside weights": (dict(init_from="gpt2"), ["init_from=gpt2 decides n_"]),
    "no vocabulary": (dict(encoding="gpt2", env={
        "TIKTOKEN_CACHE_DIR": "none", "https_proxy": "http://127.0.0.1:9"}), ["--encoding=bytes"])}
LATER = {  # while training
    "loss not finite": (dict(max_lr=1e30, warmup_steps=0, grad_clip=0.0), ["loss", "--max_lr"]),
    "gradient not finite": (dict(eval_every=0, save_every=2, arrange={"poison_at": 5}),
                            ["tep 5", "norm nan"]),
    "out of memory": (dict(arrange={"raise_at": (3, torch.OutOfMemoryError("CUDA"))}),
                      ["Out of memory", "--B"]),
    "no memory": (dict(arrange={"raise_at": (3, RuntimeError("can't allocate memory"))}),
                  ["Out of memory", "--B"])}


@pytest.mark.parametrize("name", [*MISTAKES, *LATER])
def test_a_mistake_gets_one_clear_line(folder, tmp_path, name):
    save_shards(tmp_path / "noval", val=0)
    (tmp_path / "short.txt").write_text("too short to validate on. " * 5)
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9 " * 1000)
    changes, expected = (MISTAKES | LATER)[name]
    changes = {k: v.format(bad=tmp_path) if isinstance(v, str) else v for k, v in changes.items()}
    run = Forked(folder / f"log {name}", **changes)
    assert run.wait() == 1
    one_line(run.err, *expected)
    assert run.log_dir.exists() == (name in LATER)


def test_a_mistake_of_one_process_ends_all(folder):
    statuses, runs = two_processes(folder / "lone", grad_comm="bfloat16",
                                   arrange={"mistake_on_rank": (1, 3)})
    assert statuses == [1, 1] and (2, "train") in read_log(folder / "lone")
    assert one_line(runs[1].err) == "train_gpt2.py: A bad token.\n"
