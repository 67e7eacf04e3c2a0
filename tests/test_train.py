"""Training as its user runs it: two settings, several processes, and the mistakes people make."""
import dataclasses
import itertools
import os
import platform
import re
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import (
    ENV, ROOT, TINY, Forked, assert_close_logs, flags, free_port, one_line, read_log, run_python,
    run_script, succeed, torchrun, two_processes, write_text)

import hellaswag
import train_gpt2 as t


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the text that all train on."""
    folder = tmp_path_factory.mktemp("train")
    write_text(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """The run that others are compared with: one process, 2 micro-steps of 4 rows a step."""
    return succeed(Forked(folder / "alone"))


def save_shards(folder, train=5000, val=1000):
    """Shards of random bytes; 0 tokens: no such shard."""
    folder.mkdir(exist_ok=True)
    tokens = np.random.default_rng(0).integers(0, 257, 5000).astype(np.uint16)
    for split, size in (("train", train), ("val", val)):
        if size:
            np.save(folder / f"x_{split}_000000.npy", tokens[:size])


def train_here(monkeypatch, *words):
    """main() in this process, without its handlers of signals, and with nothing exported."""
    monkeypatch.setattr(t, "StopRequest", lambda: mock.Mock(received=False, agreed=False))
    monkeypatch.setattr(t.signal, "signal", mock.Mock())
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *words])
    t.main()


def test_quick_start_and_then_the_real_thing(tmp_path):
    """Beside what a fineweb.py that failed left; with shards, the same command trains on those."""
    save_shards(tmp_path / "edu_fineweb10B", train=0)
    (tmp_path / "edu_fineweb10B" / ".lock").touch()
    shorter = ["--max_steps=25", "--eval_every=25", "--sample_every=25", "--val_tokens=4096"]
    done = run_script("train_gpt2.py", *shorter, "--device=cpu", cwd=tmp_path, env=ENV)
    assert (done.returncode, done.stderr) == (0, "")
    start, first_lines, *_ = done.stdout.split("\n\n")
    assert start.startswith("Quick start") and "python fineweb.py" in start
    assert "SMALL" in first_lines and "n_layer=3" in first_lines and "max_steps=25" in first_lines
    assert re.findall(r"^ +(\d+)/25 loss", done.stdout, re.M) == ["0", "10", "20"]
    assert done.stdout.count("--- sample at step 25") == done.stdout.count("--- sample") == 1
    assert "--sample=3 --log_dir=log_small" in done.stdout
    log = (tmp_path / "log_small" / "log.txt").read_text()
    values = read_log(tmp_path / "log_small")
    assert set(values) == {(0, "val"), (25, "val"), *((step, "train") for step in range(25))}
    assert values[25, "val"] < 3.2 < values[0, "val"]

    save_shards(tmp_path / "edu_fineweb10B")
    real = succeed(Forked(None, cwd=tmp_path, max_steps=1, val_tokens=512))
    assert "settings  Config" in real.out
    assert set(read_log(tmp_path / "log")) == {(0, "val"), (0, "train"), (1, "val")}
    assert (tmp_path / "log_small" / "log.txt").read_text() == log


def test_a_text_gets_small_and_a_folder_config_and_flags_win(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    given = {"data": "text.txt", "n_layer": "5", "seed": "7"}
    cfg, lines = t.choose_settings(given)
    expected = t.SMALL | {"data": "text.txt", "n_layer": 5, "seed": 7}
    assert cfg == dataclasses.replace(t.Config(), **expected)
    assert all(f"{name}={expected[name]!r}" in lines for name in t.SMALL)
    assert "SMALL" in lines and "Quick start" not in lines
    with pytest.raises(t.UserError, match="--max_lr"):  # SMALL's would spoil given weights
        t.choose_settings({"data": "text.txt", "init_from": "gpt2"})
    save_shards(tmp_path / "shards")
    cfg, lines = t.choose_settings(given | {"data": "shards"})
    assert cfg == t.Config(data="shards", n_layer=5, seed=7)
    assert "Config" in lines and "SMALL" not in lines


@pytest.mark.parametrize("sizes, quick", [((0, 0), True), ((0, 1000), True), ((1000, 0), False)])
def test_what_counts_is_whether_there_are_training_shards(tmp_path, monkeypatch, sizes, quick):
    monkeypatch.chdir(tmp_path)
    save_shards(tmp_path / "edu_fineweb10B", *sizes)
    cfg, lines = t.choose_settings({})
    assert ("Quick start" in lines) is quick
    assert cfg.data == (str(ROOT / "input.txt") if quick else "edu_fineweb10B")
    assert cfg.encoding == ("bytes" if quick else "gpt2")
    assert t.choose_settings({"data": "edu_fineweb10B"})[0] == t.Config()  # asked for: no text


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("encoding", ["bytes", "gpt2"])
def test_own_text_trains_the_small_model(tmp_path, monkeypatch, capsys, request, encoding):
    if encoding == "gpt2":
        request.getfixturevalue("gpt2_encoding")
    (tmp_path / "my.txt").write_text("What looks special, <|endoftext|>, is text. " * 500)
    words = dict(data=tmp_path / "my.txt", encoding=encoding, max_steps=2, B=2, eval_every=0,
                 total_batch_size=128, save_every=0, log_dir=f"{tmp_path}/log/", device="cpu")
    train_here(monkeypatch, *(f"--{name}={value}" for name, value in words.items()))
    out = capsys.readouterr().out
    assert "n_layer=3, n_head=4, n_embd=128" in out and "//" not in out
    assert set(read_log(tmp_path / "log")) == {(0, "train"), (1, "train")}


def test_two_processes_divide_smalls_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")  # as Slurm does, alone, for a single process
    assert t.world_size() == 1 and t.choose_settings({})[0].B == t.SMALL["B"]
    monkeypatch.setenv("RANK", "1")
    cfg = t.choose_settings({})[0]
    assert (cfg.B, cfg.total_batch_size) == (t.SMALL["B"] // 2, t.SMALL["total_batch_size"])
    assert t.choose_settings({"B": "8"})[0].B == 8


def test_a_step_of_minutes_is_announced(capsys):
    run = mock.MagicMock(cfg=t.Config(), device=torch.device("cpu"))
    run.state.step, run.train_loader.rows_per_epoch = 0, 9765625
    with torch.device("meta"):
        run.state.raw_model = t.GPT(t.GPTConfig())
    for run.cfg.total_batch_size, slow in ((524288, True), (1024, False)):
        t.describe(run, torch.bfloat16, False)
        out = capsys.readouterr().out
        assert "124,475,904" in out and ("minutes on a CPU" in out) is slow


def test_an_edited_copy_of_the_script_trains_with_its_constants(tmp_path):
    """The command has no flags. The comments of what was edited are gone, or have one space."""
    save_shards(tmp_path / "edu_fineweb10B")
    (tmp_path / "transformers.py").write_text("raise ImportError")  # which takes seconds
    source = (ROOT / "train_gpt2.py").read_text()
    for name, value in (TINY | dict(max_steps=2e0, compile=False, val_tokens=512)).items():
        line = re.compile(rf"^(    {name}: \w+ =) .*", re.M)
        source, n = line.subn(rf"\1 {value!r}{' # was 12' * (name == 'n_head')}", source, count=1)
        assert n == 1, name
    (tmp_path / "train_gpt2.py").write_text(source)
    (tmp_path / "fineweb.py").symlink_to(ROOT / "fineweb.py")
    done = run_python("import train_gpt2; train_gpt2.main()", cwd=tmp_path, env={"PYTHONPATH": ""})
    assert (done.returncode, done.stderr) == (0, "")
    assert "n_layer=1, n_head=2, n_embd=16" in done.stdout
    assert [step for step, stream in read_log(tmp_path / "log") if stream == "train"] == [0, 1]


def test_a_constant_that_lost_its_type_is_a_line():
    """Of one that SMALL sets, too."""
    @dataclasses.dataclass
    class Edited:
        n_head: int = 2
        n_layer = 6
    for values in ({}, {"n_layer": 3}):
        with pytest.raises(t.UserError, match="n_layer .*type"):
            t.make_config(Edited, values)


def test_half_the_batch_is_the_same_training(alone, folder):
    """Samples change nothing. All steps are in the log, however seldom they are printed."""
    half = succeed(Forked(folder / "half", B=2, print_every=12, sample_every=3, sample_tokens=5))
    assert_close_logs(alone.log_dir, half.log_dir)
    assert re.findall(r"^ +(\d+)/30 loss", half.out, re.M) == ["0", "12", "24"]
    assert re.findall(r"^ +(\d+)/30 val", half.out, re.M) == [str(n) for n in range(0, 31, 5)]
    numbers = r"\d\.\d{4} lr \S+ norm \S+ \d+ ms [\d,]+ tok/s \d:\d\d:\d\d left"
    assert len(re.findall(rf"^ +\d+/30 loss {numbers}$", alone.out, re.M)) == 30


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_processes_are_the_same_training(folder, optimizer):
    words = dict(optimizer=optimizer, muon_lr_ratio=2.5, B=2, sample_every=30, sample_tokens=9)
    one = succeed(Forked(folder / f"one_{optimizer}", **words))
    statuses, runs = two_processes(folder / f"two_{optimizer}", **words)
    assert statuses == [0, 0], [run.err for run in runs]
    assert_close_logs(one.log_dir, runs[0].log_dir)
    assert runs[0].out.count("--- sample at step 30 ---") == 1 and runs[1].out == ""


COUNTING = """
import os, subprocess, sys, time
sys.modules["transformers"] = None  # takes seconds
import train_gpt2 as t
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
calls = []

def counted(_, bucket):
    calls.append(1)
    return allreduce_hook(None, bucket)

def wrap_ddp(*args):
    ddp_model = wrap(*args)
    ddp_model.register_comm_hook(None, counted)
    return ddp_model

wrap, t.wrap_ddp = t.wrap_ddp, wrap_ddp
t.main()
end, names = time.time() + 10, "gloo"  # a joined thread can stand there a moment longer
while "gloo" in names and time.time() < end:
    names = subprocess.getoutput(f"cat /proc/{os.getpid()}/task/*/comm")
print("calls:", len(calls), "gloo:", "gloo" in names)
"""


def test_two_nodes_meet_on_loopback_and_gradients_travel_once_a_step(alone, folder):
    """Nothing of gloo outlives main(): its threads would abort one interpreter's exit in many."""
    (folder / "counting.py").write_text(COUNTING)
    command = torchrun("--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=test",
                       f"--rdzv_endpoint=127.0.0.1:{free_port()}", script=folder / "counting.py")
    nodes = [subprocess.Popen([*command, *flags(folder / "nodes", B=2)], text=True,
                              env=ENV | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) for _ in range(2)]
    outputs = [node.communicate(timeout=300) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert all("calls: 30 gloo: False" in out for out, _ in outputs)  # in 30 steps of 2 micro-steps
    assert_close_logs(alone.log_dir, folder / "nodes")


EARLY = """
import os, torch, train_gpt2 as t
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{os.environ['PORT']}",
                                     rank=0, world_size=1)
os.environ |= {"RANK": "0", "WORLD_SIZE": "2"}
config = t.GPTConfig(block_size=16, vocab_size=384, n_layer=4, n_head=4, n_embd=384)
raw_model, order = t.GPT(config), []
raw_model.compile(backend="aot_eager")  # all of torch.compile but the C++ compiler
ddp_model = t.wrap_ddp(raw_model, t.Config(), torch.device("cpu"))

def hook(_, bucket):
    order.append("bucket")
    return allreduce_hook(None, bucket)
ddp_model.register_comm_hook(None, hook)
for p in raw_model.parameters():
    p.register_post_accumulate_grad_hook(lambda p: order.append("gradient"))
idx = torch.zeros(1, 16, dtype=torch.int64)
for _ in range(2):
    order.clear()
    ddp_model(idx, idx, return_logits=False)[1].backward()
print(order.index("bucket") < len(order) // 2, order.count("bucket") >= 2)
torch.distributed.destroy_process_group()
"""


def test_gradients_leave_while_backward_still_runs():
    """Compiled too: DDP's buckets go out between the layers' gradients, not after the last."""
    done = run_python(EARLY, env={"PORT": str(free_port())})
    assert done.stdout.split() == ["True"] * 2, done.stderr


FAULTS = """
import resource, torch, train_gpt2 as t
for _ in range(2):  # the system's malloc, then as the script sets it
    faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
    for i in range(24):
        torch.ones(2**24)  # 64 MiB
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    print(sorted(b - a for a, b in zip(faults, faults[1:]))[12])
    t.pick_device("cpu")
"""


@pytest.mark.skipif((platform.libc_ver()[0], platform.machine()) != ("glibc", "x86_64"),
                    reason="freed memory is kept by glibc's malloc, which torch uses on x86")
def test_training_on_a_cpu_keeps_freed_memory():
    """Or each big array is page-faulted again. The median, since the first arrays leave scraps."""
    clean = {k: "" for k in os.environ if k.startswith(("LD_PRELOAD", "MALLOC_", "GLIBC_"))}
    plain, kept = map(int, run_python(FAULTS, env=clean).stdout.split())
    if not plain:
        pytest.skip("this kernel does not count page faults")
    assert 2 * kept < plain


def test_hellaswag_is_scored_while_training(folder, monkeypatch, capsys, gpt2_encoding):
    endings = ["one", "a long way off", "two or three", "nothing"]
    examples = [dict(ctx=f"Number {i} is", label=i % 4, endings=endings) for i in range(8)]
    words = dict(encoding="gpt2", max_steps=2, hellaswag_every=1, eval_every=0)
    monkeypatch.setattr(hellaswag, "iterate_examples", lambda split: iter(examples))
    train_here(monkeypatch, *flags(folder / "on", **words))
    scores = {key: v for key, v in read_log(folder / "on").items() if key[1] == "hella"}
    assert len(scores) == 3 and all(value * 8 % 1 == 0 for value in scores.values())
    offline = mock.Mock(side_effect=t.UserError("no network today"))
    monkeypatch.setattr(hellaswag, "iterate_examples", offline)
    train_here(monkeypatch, *flags(folder / "off", **words))
    assert "HellaSwag is off: no network today" in capsys.readouterr().out
    assert {stream for _, stream in read_log(folder / "off")} == {"train"}


def test_what_costs_patience_is_told(folder, monkeypatch, capsys):
    """A step of over 10 s is printed, whatever print_every says, and why there are no scores."""
    monkeypatch.setattr(t.time, "perf_counter", itertools.count(step=20).__next__)
    train_here(monkeypatch, *flags(folder / "patience", print_every=1000, hellaswag_every=2))
    out = capsys.readouterr().out
    assert "    1/30 loss" in out and "HellaSwag is off: it needs --encoding=gpt2." in out


MISTAKES = {  # name: (constants that differ, what the line must hold)
    "missing shards": (dict(data="edu_fineweb10B"), ["edu_fineweb10B", "fineweb.py"]),
    "no validation shard": (dict(data="{bad}/noval"), ["noval", "_val_"]),
    "short text": (dict(data="{bad}/short.txt"), ["short.txt", "--T"]),
    "not UTF-8": (dict(data="{bad}/latin1.txt"), ["latin1.txt is not UTF-8", "0xe9"]),
    "learning rate would rise": (dict(min_lr=0.1), ["min_lr=0.1", "max_lr=0.01"]),
    "batch does not divide": (dict(total_batch_size=1000), ["total_batch_size=1000", "4 * 16 * 1"]),
    "heads do not divide": (dict(n_embd=33), ["n_embd=33", "n_head=2"]),
    "unknown flag": (dict(n_layers=3), ["--n_layers", "--help"]),
    "unknown choice": (dict(optimizer="sgd"), ["optimizer=sgd", "adamw, muon"]),
    "no such device": (dict(device="cuda:99", env={"CUDA_VISIBLE_DEVICES": ""}),
                       ["device=cuda:99", "no GPU"]),
    "shape beside weights": (dict(init_from="gpt2"), ["n_layer", "init_from=gpt2"]),
    "no vocabulary": (dict(encoding="gpt2", env={
        "TIKTOKEN_CACHE_DIR": "none", "HTTPS_PROXY": "http://127.0.0.1:9"}), ["--encoding=bytes"]),
}
LATER = {  # while training
    "loss not finite": (dict(max_lr=1e30, warmup_steps=0, grad_clip=0.0), ["loss", "--max_lr"]),
    "gradient not finite": (dict(eval_every=0, save_every=2, arrange={"poison_at": 5}),
                            ["tep 5", "norm nan"]),
    "out of memory": (dict(arrange={"raise_at": (3, "OutOfMemoryError", "CUDA out of memory.")}),
                      ["Out of memory", "--B"]),
    "no memory": (dict(arrange={"raise_at": (3, "RuntimeError", "can't allocate memory: ...")}),
                  ["Out of memory", "--B"]),
}


@pytest.mark.parametrize("name", [*MISTAKES, *LATER])
def test_a_mistake_gets_one_clear_line(folder, tmp_path, name):
    save_shards(tmp_path / "noval", val=0)
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9 " * 1000)
    changes, expected = (MISTAKES | LATER)[name]
    changes = {k: v.format(bad=tmp_path) if isinstance(v, str) else v for k, v in changes.items()}
    run = Forked(folder / f"log {name}", **changes)
    assert run.wait() == 1
    one_line(run.err, *expected)
    assert run.log_dir.exists() == (name in LATER)


def test_a_mistyped_data_is_told_first(folder, monkeypatch, capsys):
    monkeypatch.setattr(t, "get_encoding", mock.Mock(side_effect=AssertionError))
    with pytest.raises(SystemExit):
        train_here(monkeypatch, "--data=my.txtt", f"--log_dir={folder}/mistyped", "--device=cpu")
    one_line(capsys.readouterr().err, "data=my.txtt")
    assert not (folder / "mistyped").exists()


def test_a_mistake_of_one_process_ends_all(folder):
    statuses, runs = two_processes(folder / "lone", grad_comm="bfloat16",
                                   arrange={"mistake_on_rank": (1, 3)})
    assert statuses == [1, 1] and (2, "train") in read_log(folder / "lone")
    assert one_line(runs[1].err) == "train_gpt2.py: A bad token.\n"
