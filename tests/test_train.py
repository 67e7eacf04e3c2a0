"""Training as its user runs it: quick start, several processes, and the mistakes people make."""
import dataclasses
import os
import platform
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import (
    ENV,
    ROOT,
    TINY,
    Forked,
    assert_close_logs,
    flags,
    free_port,
    load,
    one_line,
    read_log,
    run_python,
    run_script,
    succeed,
    torchrun,
    two_processes,
    write_text,
)

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


# ------------------------------------------------------------------------------- the script
def test_quick_start_and_then_the_real_thing(tmp_path):
    """No shards, no flags but a shorter training: it says what it does, learns, samples, logs.

    As its first line promises, the same command does the real thing once there are shards.
    """
    shorter = ["--max_steps=25", "--eval_every=25", "--sample_every=25", "--val_tokens=8192",
               "--save_every=10"]
    done = run_script("train_gpt2.py", *shorter, cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    first_paragraph = done.stdout.split("\n\n")[0]
    assert first_paragraph.startswith("Quick start") and "python fineweb.py" in first_paragraph
    for heading in ("versions", "data", "model", "batch", "training", "device", "dtype",
                    "attention", "compile", "log"):
        assert re.search(rf"^{heading} +\S", done.stdout, re.M), heading
    assert done.stdout.count("--- sample of rank 0 at step 25") == 1
    assert done.stdout.count("--- sample") == 1
    assert "--sample=3" in done.stdout.splitlines()[-1]
    for line in (tmp_path / "log" / "log.txt").read_text().splitlines():
        assert re.fullmatch(r"\d+ (train|val) \d+\.\d{6}", line)
    values = read_log(tmp_path / "log")
    assert [key for key in values if key[1] == "val"] == [(0, "val"), (25, "val")]
    assert [step for step, stream in values if stream == "train"] == list(range(25))
    assert values[25, "val"] < 3 < values[0, "val"]
    assert not list((tmp_path / "log").glob("*.part"))

    rng = np.random.default_rng(0)
    sizes = {"train": 5000, "val": 1000}
    (tmp_path / "edu_fineweb10B").mkdir()
    for split, size in sizes.items():
        tokens = rng.integers(0, 257, size).astype(np.uint16)
        np.save(tmp_path / "edu_fineweb10B" / f"x_{split}_000000.npy", tokens)
    real = Forked(None, cwd=tmp_path, max_steps=1, val_tokens=512)
    assert real.wait() == 0, real.err
    assert "the earlier results in log/ are now in log/before_1/" in real.out
    assert (tmp_path / "log" / "before_1" / "checkpoint_00025.pt").exists()
    assert set(read_log(tmp_path / "log")) == {(0, "val"), (0, "train"), (1, "val")}


def test_step_line_says_what_matters(alone):
    line = next(line for line in alone.out.splitlines() if re.match(r" +5/30 loss", line))
    assert re.fullmatch(r" +5/30 loss \d\.\d{4} lr \S+ norm \S+ \d+ ms [\d,]+ tok/s "
                        r"\d:\d\d:\d\d left", line)


def test_half_the_batch_is_the_same_training(alone, folder):
    half = succeed(Forked(folder / "half", B=2))
    assert_close_logs(alone.log_dir, half.log_dir)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_processes_are_the_same_training(folder, optimizer):
    constants = dict(optimizer=optimizer, muon_lr_ratio=2.5, B=2)
    one = succeed(Forked(folder / f"one_{optimizer}", **constants))
    statuses, runs = two_processes(folder / f"two_{optimizer}", sample_every=30, sample_tokens=9,
                                   **constants)
    assert statuses == [0, 0], [run.err for run in runs]
    assert_close_logs(one.log_dir, runs[0].log_dir)
    first, second = (runs[0].out.index(f"--- sample of rank {r} at step 30") for r in (0, 1))
    assert first < second and runs[1].out == ""
    saved = load(runs[0].log_dir / "checkpoint_00030.pt")
    rates = [group["lr"] for o in saved["optimizers"] for group in o["param_groups"]]
    lr = t.get_lr(29, t.Config(**TINY))
    assert rates == [lr, lr] + [2.5 * lr] * (optimizer == "muon")


def test_two_nodes_meet_on_loopback(alone, folder):
    """Two torchruns of one process each, as on two machines, with torchrun's own rendezvous."""
    command = torchrun("--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d",
                       "--rdzv_id=test", f"--rdzv_endpoint=127.0.0.1:{free_port()}")
    nodes = [subprocess.Popen([*command, *flags(folder / "nodes")], env=ENV, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
             for _ in range(2)]
    outputs = [node.communicate(timeout=300) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert_close_logs(alone.log_dir, folder / "nodes")


COUNTING = """
import os
import time
from pathlib import Path
import train_gpt2 as t
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
calls = []

class Counting(t.DDP):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_comm_hook(None, counted)

def counted(_, bucket):
    calls.append(1)
    return allreduce_hook(None, bucket)

def gloo_threads():  # none outside Linux
    try:
        tasks = list(Path("/proc/self/task").glob("*"))
        return sum("gloo" in (task / "comm").read_text() for task in tasks)
    except OSError:  # a thread that ended meanwhile
        return 1

if __name__ == "__main__":
    t.DDP = Counting
    t.main()
    patience = time.time() + 2  # a thread that was joined can stand there a moment longer
    while gloo_threads() and time.time() < patience:
        pass
    os.write(1, f"calls: {len(calls)} gloo: {gloo_threads()}\\n".encode())  # in one piece
"""


def test_gradients_travel_once_a_step(folder, tmp_path):
    """One bucket a step, however many micro-steps. And nothing of gloo outlives main(): its
    threads, at the interpreter's exit, would abort one run in many."""
    (tmp_path / "counting.py").write_text(COUNTING)
    command = torchrun("--standalone", "--nproc_per_node=2", script=tmp_path / "counting.py")
    done = subprocess.run([*command, *flags(folder / "counted", B=1, max_steps=8)],
                          env=ENV | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("calls: 8 gloo: 0") == 2  # 8 steps of 4 micro-steps, one bucket each


EARLY = """
import os, torch, train_gpt2 as t
from torch._dynamo.backends.debugging import aot_eager  # torch.compile, less the C++ compiler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{os.environ['PORT']}",
                                     rank=0, world_size=1)
os.environ |= {"RANK": "0", "WORLD_SIZE": "2"}
config = t.GPTConfig(block_size=16, vocab_size=384, n_layer=4, n_head=4, n_embd=384)
raw_model, order = t.GPT(config), []
raw_model.compile(backend=aot_eager)
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
print(order.index("bucket") < len(order) // 2, order.count("bucket") >= 2,
      order.count("gradient") == len(list(raw_model.parameters())))
torch.distributed.destroy_process_group()
"""


def test_gradients_leave_while_backward_still_runs():
    """Compiled too: DDP's buckets go out between the layers' gradients, not after the last."""
    done = run_python(EARLY, env={"PORT": str(free_port())})
    assert done.stdout.split() == ["True"] * 3, done.stderr


FAULTS = """
import resource, sys, torch, train_gpt2 as t
if sys.argv[1] == "kept":
    t.pick_device("cpu", 0)
faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
for i in range(64):
    torch.ones(2**24)  # 64 MiB
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(sorted(b - a for a, b in zip(faults, faults[1:]))[32])
"""


@pytest.mark.skipif((platform.libc_ver()[0], platform.machine()) != ("glibc", "x86_64"),
                    reason="freed memory is kept by glibc's malloc, which torch uses on x86")
def test_training_on_a_cpu_keeps_freed_memory():
    """Otherwise each big array comes anew from the system, a page fault for every 4 KiB of it.

    The median is looked at, since the first arrays leave scraps of which malloc keeps a few
    apart from their block, so that the next array does not fit into it.
    """
    alien = ("LD_PRELOAD", "MALLOC_", "GLIBC_")
    clean = {k: "" for k in os.environ if k.startswith(alien)}
    kept, plain = (int(run_python(FAULTS, side, env=clean).stdout) for side in ("kept", "plain"))
    if not plain:
        pytest.skip("this kernel does not count page faults")
    assert 2 * kept < plain


def test_watching_changes_nothing(alone, folder):
    """Samples and validation draw no random numbers of training's."""
    quiet = succeed(Forked(folder / "quiet", eval_every=0, sample_every=3, sample_tokens=5))
    losses = {key: value for key, value in read_log(alone.log_dir).items() if key[1] == "train"}
    assert read_log(quiet.log_dir) == losses


def test_help_lists_every_constant():
    done = run_script("train_gpt2.py", "--help")
    assert done.returncode == 0
    for field in dataclasses.fields(t.Config):
        assert f"--{field.name}" in done.stdout


def test_import_does_nothing(tmp_path):
    done = run_python("import train_gpt2, hellaswag, fineweb, sys; "
                      "assert not {'transformers', 'datasets', 'matplotlib'} & set(sys.modules)",
                      cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------- mistakes
def save_shards(folder, train, val=True):
    folder.mkdir()
    np.save(folder / "x_train_000000.npy", train)
    if val:
        np.save(folder / "x_val_000000.npy", np.zeros(1000, np.uint16))
    return folder


@pytest.fixture(scope="module")
def bad(folder):
    """A folder of data that no training can use."""
    bad = folder / "bad"
    bad.mkdir()
    good = np.zeros(5000, np.uint16)
    save_shards(bad / "floats", good.astype(np.float32))
    save_shards(bad / "square", good.reshape(50, 100))
    save_shards(bad / "ids", np.where(np.arange(5000) == 4321, 300, 0).astype(np.uint16))
    save_shards(bad / "pickle", np.array([{}], dtype=object))
    save_shards(bad / "noval", good, val=False)
    save_shards(bad / "cut", good)
    os.truncate(bad / "cut" / "x_train_000000.npy", 5000)
    save_shards(bad / "fifo", good)
    (bad / "fifo" / "x_train_000000.npy").unlink()
    os.mkfifo(bad / "fifo" / "x_train_000000.npy")
    (bad / "empty").mkdir()
    (bad / "short.txt").write_text("too short")
    (bad / "latin.txt").write_bytes(b"caf\xe9 " * 1000)
    small = t.GPT(t.GPTConfig(block_size=16, vocab_size=384, n_layer=1, n_head=1, n_embd=8,
                              n_vocab=257))
    content = {"step": 1, "model": small.state_dict(), "encoding": "bytes",
               "gpt_config": dataclasses.asdict(small.config)}
    torch.save(content, bad / "small.pt")
    return bad


MISTAKES = {  # name: (constants that differ, what the line must hold)
    "missing data": (dict(data="{bad}/nowhere"), ["nowhere", "fineweb.py"]),
    "empty folder": (dict(data="{bad}/empty"), ["empty", "_train_"]),
    "no validation shard": (dict(data="{bad}/noval"), ["noval", "_val_"]),
    "wrong dtype": (dict(data="{bad}/floats"), ["x_train_000000.npy", "float32", "uint16"]),
    "two dimensions": (dict(data="{bad}/square"), ["x_train_000000.npy", "(50, 100)"]),
    "ids beyond the vocabulary": (dict(data="{bad}/ids"), ["x_train_000000.npy", "300", "257"]),
    "truncated shard": (dict(data="{bad}/cut"), ["x_train_000000.npy", "complete"]),
    "pickled shard": (dict(data="{bad}/pickle"), ["x_train_000000.npy"]),
    "FIFO as a shard": (dict(data="{bad}/fifo"), ["x_train_000000.npy", "not a file"]),
    "long file name": (dict(data="x" * 300), ["xxx cannot be used", "name too long", "data"]),
    "short text": (dict(data="{bad}/short.txt"), ["short.txt", "--T"]),
    "not UTF-8": (dict(data="{bad}/latin.txt"), ["latin.txt", "UTF-8"]),
    "batch does not divide": (dict(total_batch_size=1000),
                              ["total_batch_size=1000", "--total_batch_size=1024"]),
    "T above the context": (dict(init_from="{bad}/small.pt", T=64, B=2),
                            ["T=64", "block_size=16"]),
    "heads do not divide": (dict(n_embd=33), ["n_embd=33", "n_head=2"]),
    "unknown flag": (dict(n_layers=3), ["--n_layers"]),
    "ill-typed flag": (dict(max_steps="many"), ["--max_steps", "many"]),
    "ill-typed switch": (dict(resume="maybe"), ["--resume", "maybe"]),
    "unknown choice": (dict(optimizer="sgd"), ["optimizer", "sgd", "muon"]),
    "no such device": (dict(device="cuda:99"), ["device", "cuda:99", "cpu"]),
    "loss not finite": (dict(max_lr=1e30, warmup_steps=0, grad_clip=0.0),
                        ["loss", "--max_lr", "--log_dir"]),
    "seed below its range": (dict(seed=-1), ["seed=-1"]),
    "seed above its range": (dict(seed=2**32), ["seed=4294967296"]),
    "uphill": (dict(grad_clip=-1), ["grad_clip=-1.0", "0 or more"]),
    "negative ratio": (dict(muon_lr_ratio=-1), ["muon_lr_ratio=-1.0"]),
    "negative decay": (dict(weight_decay=-1), ["weight_decay=-1.0"]),
    "rate of NaN": (dict(max_lr="nan"), ["max_lr=nan"]),
    "infinite rate": (dict(min_lr="inf"), ["min_lr=inf"]),
    "no rows": (dict(B=0), ["B=0", "1 or more"]),
    "Muon in float16": (dict(optimizer="muon", dtype="float16"), ["muon", "float16"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_clear_line(bad, folder, name):
    changes, expected = MISTAKES[name]
    changes = {k: v.format(bad=bad) if isinstance(v, str) else v for k, v in changes.items()}
    run = Forked(folder / f"log {name}", **changes)
    assert run.wait() == 1
    one_line(run.err, *expected)
    if name != "loss not finite":
        assert " loss " not in run.out  # before any training


def test_every_number_has_a_range():
    cfg = t.Config()
    for field in dataclasses.fields(cfg):
        if field.type in (int, float):
            for value in (-1, float("nan"), float("inf")):
                with pytest.raises(t.UserError, match=f"^{field.name}="):
                    t.check_config(dataclasses.replace(cfg, **{field.name: value}))


def test_without_the_vocabulary_it_says_so(folder, tmp_path):
    env = {"TIKTOKEN_CACHE_DIR": str(tmp_path), "HTTPS_PROXY": "http://127.0.0.1:9",
           "https_proxy": "http://127.0.0.1:9"}
    run = Forked(folder / "no vocabulary", env=env, encoding="gpt2")
    assert run.wait() == 1
    one_line(run.err, "TIKTOKEN_CACHE_DIR", "--encoding=bytes")


def test_a_gradient_that_is_not_finite_is_never_saved(folder):
    run = Forked(folder / "poisoned", save_every=2, eval_every=0, arrange={"poison_at": 5})
    assert run.wait() == 1
    one_line(run.err, "loss of step 5", "norm nan")
    names = sorted(path.name for path in run.log_dir.glob("*.pt"))
    assert names == ["checkpoint_00002.pt", "checkpoint_00004.pt"]


def test_a_mistake_is_told_once_under_torchrun(folder, tmp_path):
    command = torchrun("--standalone", "--nproc_per_node=2")
    done = subprocess.run([*command, *flags(folder / "told", data=tmp_path / "nowhere")],
                          env=ENV, capture_output=True, text=True)
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("There is no data at") == 1


def test_a_mistake_of_one_process_while_training_ends_all(folder):
    statuses, runs = two_processes(folder / "lone", arrange={"mistake_on_rank": (1, 3)})
    assert statuses == [1, 1]
    assert one_line(runs[1].err) == "train_gpt2.py: A bad token.\n"
    one_line(runs[0].err, "Rank 0 lost its connection to another process")


@pytest.mark.parametrize("error, text", [
    ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 1.00 GiB"),
    ("MemoryError", ""),
    ("RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried to allocate")])
def test_out_of_memory_names_a_smaller_batch(folder, error, text):
    """The error that torch would raise on a GPU or a CPU is raised in its place."""
    run = Forked(folder / f"memory {error}", total_batch_size=384, B=24,
                 arrange={"raise_at": (3, error, text)})
    assert run.wait() == 1
    one_line(run.err, "Out of memory with B=24: --B=12 trains the same model")


def test_an_error_of_ours_is_a_traceback(folder):
    run = Forked(folder / "bug", arrange={"raise_at": (3, "RuntimeError", "a bug")})
    assert run.wait() == 1
    assert "Traceback" in run.err and "a bug" in run.err


def test_rank_without_a_launcher_is_a_line(folder):
    env = {"RANK": "0", "WORLD_SIZE": "2"}
    run = Forked(folder / "rank", env=env)
    assert run.wait() == 1
    one_line(run.err, "RANK is set", "torchrun")
    succeed(Forked(folder / "world", env={"WORLD_SIZE": "2"}, max_steps=1))


@pytest.mark.parametrize("stdout", ["closed pipe", "full device", "closed"])
def test_losing_stdout_ends_nothing(folder, stdout):
    command = [sys.executable, str(ROOT / "train_gpt2.py"), *flags(folder / stdout, max_steps=3)]
    if stdout == "closed pipe":
        command = ["bash", "-c", f"set -o pipefail; {' '.join(map(repr, command))} | true"]
    elif stdout == "full device":
        command = ["bash", "-c", f"{' '.join(map(repr, command))} > /dev/full"]
    else:
        command = ["bash", "-c", f"{' '.join(map(repr, command))} >&-"]
    done = subprocess.run(command, env=ENV, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (2, "train") in read_log(folder / stdout)


def test_hellaswag_is_scored_while_training(folder, monkeypatch, capsys, gpt2_encoding):
    examples = [dict(ctx=f"Number {i} is", label=i % 4,
                     endings=["one", "a long way off", "two or three", "nothing"])
                for i in range(8)]
    monkeypatch.setattr(t.hellaswag, "iterate_examples", lambda split: iter(examples))
    monkeypatch.setattr(t.signal, "signal", lambda *_: None)
    words = dict(encoding="gpt2", max_steps=2, hellaswag_every=1, eval_every=0)
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *flags(folder / "on", **words)])
    t.main()
    scores = {key: v for key, v in read_log(folder / "on").items() if key[1] == "hella"}
    assert set(scores) == {(0, "hella"), (1, "hella"), (2, "hella")}
    assert all(value * 8 % 1 == 0 for value in scores.values())

    def unreachable(split):
        raise t.hellaswag.HellaSwagError("no network today")
    monkeypatch.setattr(t.hellaswag, "iterate_examples", unreachable)
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *flags(folder / "off", **words)])
    t.main()
    assert "HellaSwag  off: no network today" in capsys.readouterr().out
    assert {stream for _, stream in read_log(folder / "off")} == {"train"}
