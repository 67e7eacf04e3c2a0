"""The script as its user runs it: quick start, several processes, and every mistake a person can make."""
import dataclasses
import os
import platform
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import train_gpt2 as t
from conftest import ROOT, run_script

TINY = dict(encoding="bytes", n_layer=2, n_head=2, n_embd=32, T=32, B=8, total_batch_size=512, max_steps=8,
            warmup_steps=2, max_lr=3e-3, eval_every=4, val_tokens=2048, sample_every=0, hellaswag_every=0, dtype="float32")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_bytes((ROOT / "input.txt").read_bytes()[:60_000])
    return path


def flags(**changes):
    return [f"--{k}={v}" for k, v in (TINY | changes).items()]


def torchrun(*words, n=2, env=None):
    command = [sys.executable, "-m", "torch.distributed.run", *words, str(ROOT / "train_gpt2.py")]
    return [*command], {**os.environ, **ONE_THREAD, **(env or {})}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def train(folder, processes=1, **changes):
    """Run a tiny training; returns {(step, stream): value} from its log.txt, and its stdout."""
    arguments = flags(log_dir=folder, **changes)
    if processes == 1:
        done = run_script("train_gpt2.py", *arguments, env=ONE_THREAD)
    else:
        command, env = torchrun("--standalone", f"--nproc_per_node={processes}")
        done = subprocess.run([*command, *arguments], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return read_log(folder), done.stdout


def read_log(folder):
    lines = [line.split() for line in (folder / "log.txt").read_text().splitlines()]
    values = {(int(step), stream): float(value) for step, stream, value in lines}
    assert len(values) == len(lines)  # each step's line stands there once
    return values


def assert_same_losses(a, b):
    assert a.keys() == b.keys()
    assert max(abs(a[k] - b[k]) for k in a) <= 1e-5


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """The run that the others are compared with: one process, 2 micro-steps of 8 rows a step."""
    return train(tmp_path_factory.mktemp("alone"), data=corpus)


def test_quick_start(tmp_path):
    """No shards, no flags but a shorter training: it says what it does, learns, samples, and writes its log."""
    done = run_script("train_gpt2.py", "--max_steps=25", "--eval_every=25", "--sample_every=25", "--val_tokens=8192",
                      cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Quick start") and "python fineweb.py" in done.stdout.split("\n\n")[0]
    for heading in ("versions", "device", "dtype", "compile", "data", "model", "batch"):
        assert re.search(rf"^{heading} +\S", done.stdout, re.M), heading
    assert done.stdout.count("--- sample of rank 0 at step 25") == done.stdout.count("--- sample") == 1
    log = (tmp_path / "log" / "log.txt").read_text()
    assert all(re.fullmatch(r"\d+ (train|val) \d+\.\d{6}", line) for line in log.splitlines())
    values = read_log(tmp_path / "log")
    assert [k for k in values if k[1] == "val"] == [(0, "val"), (25, "val")]
    assert [k[0] for k in values if k[1] == "train"] == list(range(25))
    assert values[25, "val"] < 3 < values[0, "val"]
    assert not any((tmp_path / "log" / name).exists() for name in ("log.txt.part", "checkpoint_00025.pt.part"))


def test_step_line_says_what_matters(alone):
    line = next(l for l in alone[1].splitlines() if l.strip().startswith("5/8"))
    assert re.fullmatch(r" +5/8 loss \d\.\d{4} lr \S+ norm \S+ \d+ ms [\d,]+ tok/s \w+ left", line)


def test_half_the_batch_is_the_same_training(alone, corpus, tmp_path):
    assert_same_losses(alone[0], train(tmp_path, data=corpus, B=4)[0])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_processes_are_the_same_training(alone, corpus, tmp_path, optimizer):
    muon = dict(optimizer="muon", muon_lr_ratio=2.5) if optimizer == "muon" else {}
    one = train(tmp_path / "one", data=corpus, **muon)[0] if muon else alone[0]
    two, stdout = train(tmp_path / "two", processes=2, data=corpus, B=4, sample_every=8, sample_tokens=10, **muon)
    assert_same_losses(one, two)
    first, second = (stdout.index(f"--- sample of rank {r} at step 8") for r in (0, 1))
    assert first < second
    saved = torch.load(tmp_path / "two" / "checkpoint_00008.pt", weights_only=True)
    rates = [group["lr"] for o in saved["optimizers"] for group in o["param_groups"]]
    assert rates == [t.get_lr(7, t.Config(**TINY))] * 2 + [2.5 * t.get_lr(7, t.Config(**TINY))] * bool(muon)


def test_two_nodes_meet_on_loopback(alone, corpus, tmp_path):
    """Two torchruns of one process each, as on two machines, through torchrun's own rendezvous."""
    command, env = torchrun("--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=test",
                            f"--rdzv_endpoint=127.0.0.1:{free_port()}")
    nodes = [subprocess.Popen([*command, *flags(data=corpus, log_dir=tmp_path)], env=env, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert_same_losses(alone[0], read_log(tmp_path))


def test_gradients_travel_once_a_step(corpus, tmp_path):
    """A communication hook counts: one bucket a step, however many micro-steps. Nothing of gloo outlives main():
    its threads, at the interpreter's exit, would abort one run in many."""
    script = tmp_path / "counting.py"
    script.write_text(f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import time
from pathlib import Path
import train_gpt2 as t
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
calls = []
class Counting(t.DDP):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_comm_hook(None, lambda state, bucket: calls.append(1) or allreduce_hook(None, bucket))
t.DDP = Counting
if __name__ == "__main__":
    t.main()
    def gloos():  # none outside Linux
        try:
            return sum("gloo" in task.joinpath("comm").read_text() for task in Path("/proc/self/task").glob("*"))
        except OSError:  # a thread that ended meanwhile
            return 1
    patience = time.time() + 2  # a thread that was joined can stand there a moment longer
    while (left := gloos()) and time.time() < patience:
        pass
    print("calls:", len(calls), "gloo:", left)
""")
    command, env = torchrun("--standalone", "--nproc_per_node=2")
    done = subprocess.run([*command[:-1], str(script), *flags(data=corpus, log_dir=tmp_path / "log", B=2)], env=env,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("calls: 8 gloo: 0") == 2  # 8 steps of 4 micro-steps, one bucket each


@pytest.mark.skipif((platform.libc_ver()[0], platform.machine()) != ("glibc", "x86_64"),
                    reason="freed memory is kept by glibc's malloc, which torch uses on x86")
def test_training_on_a_cpu_keeps_freed_memory():
    """Otherwise each big array comes anew from the system, a page fault for every 4 KiB of it.

    Not the first arrays: aligning one leaves scraps, of which malloc keeps a few of each size apart from their block, so
    that the next does not fit into it.
    """
    script = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import resource, torch, train_gpt2 as t
if sys.argv[1] == "kept":
    t.join_processes(t.Config(device="cpu"))
faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
for i in range(64):
    torch.ones(2**24)  # 64 MiB
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(sorted(b - a for a, b in zip(faults, faults[1:]))[32])
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LD_PRELOAD", "MALLOC_", "GLIBC_"))} | ONE_THREAD
    kept, plain = (int(subprocess.run([sys.executable, "-c", script, side], capture_output=True, text=True, check=True,
                                      env=env).stdout) for side in ("kept", "plain"))
    if not plain:
        pytest.skip("this kernel does not count page faults")
    assert 2 * kept < plain


def test_gradients_leave_while_backward_still_runs():
    """Compiled too: DDP's buckets go out between the layers' gradients, not after the last one."""
    script = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import torch, train_gpt2 as t
from torch._dynamo.backends.debugging import aot_eager  # what torch.compile does, less the C++ compiler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
raw, order = t.GPT(t.GPTConfig(16, 384, 4, 4, 384, 257)), []
raw.compile(backend=aot_eager)
model = t.wrap_ddp(raw, t.Config(), t.Place(0, 0, 2, torch.device("cpu")))
model.register_comm_hook(None, lambda state, bucket: order.append("bucket") or allreduce_hook(None, bucket))
for p in raw.parameters():
    p.register_post_accumulate_grad_hook(lambda p: order.append("gradient"))
idx = torch.zeros(1, 16, dtype=torch.int64)
for _ in range(2):
    order.clear()
    model(idx, idx)[1].backward()
print(order.index("bucket") < len(order) // 2, order.count("bucket"), order.count("gradient") == len(list(raw.parameters())))
torch.distributed.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | ONE_THREAD)
    early, buckets, all_seen = done.stdout.split()
    assert early == all_seen == "True" and int(buckets) >= 2, done.stderr


def test_watching_changes_nothing(alone, corpus, tmp_path):
    """Samples and validation draw no random numbers of training's."""
    quiet = train(tmp_path, data=corpus, eval_every=0, sample_every=3, sample_tokens=5)[0]
    assert quiet == {k: v for k, v in alone[0].items() if k[1] == "train"}


def test_help_lists_every_constant():
    done = run_script("train_gpt2.py", "--help")
    assert done.returncode == 0
    for field in dataclasses.fields(t.Config):
        assert f"--{field.name}" in done.stdout


def test_import_does_nothing(tmp_path):
    done = subprocess.run([sys.executable, "-c", "import train_gpt2, hellaswag, fineweb, sys; "
                           "assert not {'transformers', 'datasets', 'matplotlib'} & set(sys.modules)"],
                          cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr, list(tmp_path.iterdir())) == (0, "", "", [])


# ------------------------------------------------------------------------------------------------- mistakes
def shard_folder(folder, train, val=np.zeros(1000, np.uint16)):
    folder.mkdir()
    for split, content in (("train", train), ("val", val)):
        np.save(folder / f"x_{split}_000000.npy", content)
    return folder


@pytest.fixture(scope="module")
def mistakes(corpus, tmp_path_factory):
    """{name: (flags, environment, what the message must hold)}, all run at once, two at a time."""
    d = tmp_path_factory.mktemp("mistakes")
    good = np.zeros(5000, np.uint16)
    shard_folder(d / "floats", good.astype(np.float32))
    shard_folder(d / "square", good.reshape(50, 100))
    shard_folder(d / "ids", np.where(np.arange(5000) == 4321, 300, 0).astype(np.uint16))
    shard_folder(d / "cut", good)
    os.truncate(d / "cut" / "x_train_000000.npy", 5000)
    shard_folder(d / "pickle", np.array([{}], dtype=object))
    shard_folder(d / "noval", good)
    (d / "noval" / "x_val_000000.npy").unlink()
    (d / "empty").mkdir()
    (d / "short.txt").write_text("too short")
    (d / "latin.txt").write_bytes(b"caf\xe9 " * 1000)
    cases = {
        "missing data": (dict(data=d / "nowhere"), {}, ["nowhere", "fineweb.py"]),
        "empty folder": (dict(data=d / "empty"), {}, ["empty", "_train_"]),
        "no validation shard": (dict(data=d / "noval"), {}, ["noval", "_val_"]),
        "wrong dtype": (dict(data=d / "floats"), {}, ["x_train_000000.npy", "float32", "uint16"]),
        "two dimensions": (dict(data=d / "square"), {}, ["x_train_000000.npy", "(50, 100)"]),
        "ids beyond the vocabulary": (dict(data=d / "ids"), {}, ["x_train_000000.npy", "300", "257"]),
        "truncated shard": (dict(data=d / "cut"), {}, ["x_train_000000.npy", "whole"]),
        "pickled shard": (dict(data=d / "pickle"), {}, ["x_train_000000.npy"]),
        "short text": (dict(data=d / "short.txt"), {}, ["short.txt", "--T"]),
        "not UTF-8": (dict(data=d / "latin.txt"), {}, ["latin.txt", "UTF-8"]),
        "batch does not divide": (dict(total_batch_size=1000), {}, ["total_batch_size=1000", "--total_batch_size=1024"]),
        "T above the context": (dict(init_from=d / "small.pt", T=64, B=4), {}, ["T=64", "block_size=16"]),
        "heads do not divide": (dict(n_embd=33), {}, ["n_embd=33", "n_head=2"]),
        "unknown flag": (dict(n_layers=3), {}, ["--n_layers"]),
        "ill-typed flag": (dict(max_steps="many"), {}, ["--max_steps", "many"]),
        "ill-typed switch": (dict(resume="maybe"), {}, ["--resume", "maybe"]),
        "unknown choice": (dict(optimizer="sgd"), {}, ["optimizer", "sgd", "muon"]),
        "no such device": (dict(device="cuda:99"), {}, ["device", "cuda:99", "cpu"]),
        "no vocabulary": (dict(encoding="gpt2"), {"TIKTOKEN_CACHE_DIR": str(d), "HTTPS_PROXY": "http://127.0.0.1:9"},
                          ["TIKTOKEN_CACHE_DIR", "--encoding=bytes"]),
        "loss not finite": (dict(max_lr=1e30, warmup_steps=0, grad_clip=0.0), {}, ["loss", "--max_lr", "--log_dir"]),
        "seed out of range": (dict(seed=-1), {}, ["seed=-1"]),
        "Muon in float16": (dict(optimizer="muon", dtype="float16"), {}, ["muon", "float16"]),
    }
    small = t.GPT(t.GPTConfig(16, 384, 1, 1, 8, 257))
    torch.save({"model": small.state_dict(), "gpt_config": dataclasses.asdict(small.config), "encoding": "bytes"},
               d / "small.pt")

    def run(name):
        changes, env, _ = cases[name]
        return run_script("train_gpt2.py", *flags(**{"data": corpus, "log_dir": d / f"log {name}"} | changes),
                          env=ONE_THREAD | env)
    with ThreadPoolExecutor(2) as pool:
        return cases, dict(zip(cases, pool.map(run, cases)))


MISTAKES = ["missing data", "empty folder", "no validation shard", "wrong dtype", "two dimensions",
            "ids beyond the vocabulary", "truncated shard", "pickled shard", "short text", "not UTF-8",
            "batch does not divide", "T above the context", "heads do not divide", "unknown flag", "ill-typed flag",
            "ill-typed switch", "unknown choice", "no such device", "no vocabulary", "loss not finite",
            "seed out of range", "Muon in float16"]


def test_the_real_thing_sets_a_quick_start_aside(tmp_path):
    """What the quick start's first line promises: the same command again, once there are shards."""
    first = run_script("train_gpt2.py", "--max_steps=2", "--val_tokens=1024", "--sample_every=0", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    rng = np.random.default_rng(0)
    shard_folder(tmp_path / "edu_fineweb10B", *(rng.integers(0, 257, n).astype(np.uint16) for n in (5000, 1000)))
    second = run_script("train_gpt2.py", *(f for f in flags(max_steps=1, val_tokens=512)), cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert "the earlier results in log/ are now in log/before_1/" in second.stdout
    assert (tmp_path / "log" / "before_1" / "checkpoint_00002.pt").exists()
    assert (0, "train") in read_log(tmp_path / "log") and (1, "train") not in read_log(tmp_path / "log")


def test_a_gradient_that_is_not_finite_is_never_saved(corpus, tmp_path, monkeypatch):
    step = t.train_step

    def poisoned(run, signals=()):
        if run.state.step == 5:
            run.state.model.transformer.wpe.weight.register_hook(lambda grad: grad * float("nan"))
        return step(run, signals)
    monkeypatch.setattr(t, "train_step", poisoned)
    monkeypatch.setattr(t.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *flags(data=corpus, log_dir=tmp_path, save_every=2, eval_every=0)])
    with pytest.raises(SystemExit, match="norm nan"):
        t.main()
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == ["checkpoint_00002.pt", "checkpoint_00004.pt"]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_clear_line(mistakes, name):
    cases, results = mistakes
    assert set(cases) == set(MISTAKES)
    done = results[name]
    assert done.returncode not in (0, None)
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for word in cases[name][2]:
        assert word in done.stderr
    if name != "loss not finite":
        assert " loss " not in done.stdout  # before any training


def test_a_mistake_is_told_once_under_torchrun(tmp_path):
    command, env = torchrun("--standalone", "--nproc_per_node=2")
    done = subprocess.run([*command, *flags(data=tmp_path / "nowhere", log_dir=tmp_path / "log")], env=env,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("There is no data at") == 1


def test_out_of_memory_names_a_smaller_batch(corpus, tmp_path, monkeypatch):
    """No GPU here: the error that torch would raise is raised in its stead."""
    def no_room(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
    monkeypatch.setattr(t, "train_step", no_room)
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *flags(data=corpus, log_dir=tmp_path, total_batch_size=768, B=24)])
    monkeypatch.setattr(t.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match="out of memory with B=24: --B=12 trains the same model"):
        t.main()


def test_hellaswag_is_scored_while_training(corpus, tmp_path, monkeypatch, capsys, gpt2_encoding):
    examples = [dict(ctx=f"Number {i} is", endings=["one", "a long way off", "two or three", "nothing"], label=i % 4)
                for i in range(8)]
    monkeypatch.setattr(t.hellaswag, "iterate_examples", lambda split: iter(examples))
    monkeypatch.setattr(t.signal, "signal", lambda *_: None)
    words = dict(data=corpus, encoding="gpt2", n_embd=16, max_steps=2, total_batch_size=256, hellaswag_every=1, eval_every=0)
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *flags(log_dir=tmp_path / "on", **words)])
    t.main()
    scores = {k: v for k, v in read_log(tmp_path / "on").items() if k[1] == "hella"}
    assert set(scores) == {(0, "hella"), (1, "hella"), (2, "hella")} and all(v * 8 % 1 == 0 for v in scores.values())

    def unreachable(split):
        raise t.hellaswag.HellaSwagError("no network today")
    monkeypatch.setattr(t.hellaswag, "iterate_examples", unreachable)
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *flags(log_dir=tmp_path / "off", **words)])
    t.main()
    assert "HellaSwag  off: no network today" in capsys.readouterr().out
    assert {k[1] for k in read_log(tmp_path / "off")} == {"train"}
