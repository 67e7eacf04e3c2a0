"""Tests of several machines that train one model, and of several processes in general.

A machine without a shared disk is a process with a log_dir of its own.
"""
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from conftest import (
    ENV, ROOT, Forked, assert_close_logs, flags, one_line, signal_at, signal_on_rank, succeed,
    together, write_text)

import train_gpt2 as t

WORDS = dict(optimizer="muon", max_steps=20, B=4)

@pytest.fixture(scope="module")
def alone(place):
    """Return the folder of a run with one process."""
    return succeed(Forked(place / "alone", **WORDS)).log_dir

@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_machines_without_a_shared_disk_resume_from_the_checkpoint_of_rank_0(place, optimizer):
    """They are killed twice, and end with the losses of one process. Only rank 0 writes files."""
    words = WORDS | dict(optimizer=optimizer)
    one = succeed(Forked(place / f"one {optimizer}", **words))
    first, second = place / f"first {optimizer}", place / f"second {optimizer}"
    for step in (7, 13):
        statuses, _ = together(2, first, {1: dict(folder=second)}, **words,
                               arrange=[(signal_on_rank, 1, signal.SIGKILL, step)])
        assert statuses[1] == -signal.SIGKILL and statuses[0] != 0
    statuses, runs = together(2, first, {1: dict(folder=second)}, **words)
    assert statuses == [0, 0] and "from step 10 on" in runs[0].out
    assert_close_logs(one.log_dir, first)
    assert not second.exists()

def edit_script(t, folder):
    """Let the script differ from that of the other processes."""
    path = folder / "edited.py"
    path.write_bytes((ROOT / "train_gpt2.py").read_bytes() + b"# edited")
    t.__file__ = str(path)

# {what differs: arguments of the second process}
DIFFERENT = {
    "max_lr is 0.01 on rank 0, and 0.02 on rank 1": dict(max_lr=0.02),
    "seed is 1337": dict(seed=3), "B is 4": dict(B=2), "eval_every is 5": dict(eval_every=10),
    "n_layer is 1": dict(n_layer=2), "hellaswag_every is 0": dict(hellaswag_every=5),
    "dtype is torch.float32 on rank 0, and torch.bfloat16": dict(dtype="bfloat16"),
    "train_tokens is 45000": dict(data="shorter.txt"),
    "data_checksum": dict(data="other.txt"),
    "train_tokens is 45000 on rank 0, and 500": dict(data="shards"),
    "the script's checksum": dict(arrange=[(edit_script, "here")])}

def test_a_process_that_loses_another_one_ends_with_one_sentence(place):
    """The message of the process that failed says why."""
    statuses, runs = together(2, place / "lonely", {1: dict(data=place / "missing")}, max_steps=5)
    assert statuses == [1, 1]
    one_line(runs[0].err, "The connection to another process is lost")
    one_line(runs[1].err, "data=", "missing")

@pytest.mark.parametrize("name", DIFFERENT)
def test_processes_that_disagree_end_with_one_sentence(place, name, monkeypatch):
    """The sentence names what differs, and nothing is written."""
    text = (place / "text.txt").read_bytes()
    (place / "shorter.txt").write_bytes(text[:-500])
    (place / "other.txt").write_bytes(text[::-1])
    (place / "shards").mkdir(exist_ok=True)
    for split in ("train", "val"):
        np.save(place / "shards" / f"x_{split}_000000.npy", np.arange(500, dtype=np.uint16) % 250)
    own = dict(DIFFERENT[name])
    if "data" in own:
        own["data"] = place / own["data"]
    if "arrange" in own:
        own["arrange"] = [(edit_script, place)]
    statuses, runs = together(2, place / "different", {1: own}, max_steps=5)
    assert statuses == [1, 1]
    for run in runs:
        one_line(run.err, "The processes disagree: ", name)
    assert not [path for path in (place / "different").iterdir() if path.name != ".lock"]

def test_a_newer_checkpoint_on_another_machine_is_not_ignored(place, alone):
    """Otherwise, a run whose rank 0 is started on another machine would lose steps."""
    older = place / "older"
    succeed(Forked(older, **WORDS | dict(max_steps=20), arrange=[(signal_at, signal.SIGTERM, 4)]))
    newest = "the newest step is"
    statuses, runs = together(2, older, {1: dict(folder=alone)}, **WORDS)
    assert statuses == [1, 1]
    for run in runs:
        one_line(run.err, f"{newest} 5 on rank 0, and 20 on rank 1")
    statuses, _ = together(2, alone, {1: dict(folder=older)}, **WORDS)
    assert statuses == [0, 0]

TORCHRUN = """
import os, signal, sys, time
sys.path.append({tests!r})
sys.modules["transformers"] = sys.modules["matplotlib"] = None  # importing them takes seconds
import train_gpt2 as t
from conftest import before_steps, until

def die(run):
    open({died!r}, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)

real = t.print_sample

def sample_slowly(run):
    if t.RANK == 0 and run.step == 10 and not os.path.exists({died!r} + "2"):
        open({died!r} + "2", "w").close()
        until(lambda: os.path.exists({died!r}))
        time.sleep(1)
    real(run)
t.print_sample = sample_slowly

if t.RANK == 1 and not os.path.exists({died!r}):
    before_steps(t, [10], die)
t.main()
"""

def test_two_machines_survive_the_death_of_a_worker(tmp_path, place, alone):
    """torchrun restarts the workers of both machines, and they find each other again.

    The worker of the second machine dies while rank 0 samples. So only the agent of that machine
    counts a restart. (On one machine, both would use the same GPU, so they use the CPU.)
    """
    script, folder = tmp_path / "script.py", place / "two machines"
    script.write_text(TORCHRUN.format(tests=str(ROOT / "tests"), died=str(tmp_path / "died")))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{s.getsockname()[1]}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1",
               "--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}", "--max-restarts=2", script,
               *flags(folder, **WORDS | dict(sample_every=10, sample_tokens=3, device="cpu"))]
    options = dict(cwd=tmp_path, env=ENV | {"PYTHONPATH": str(ROOT)}, text=True,
                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    machines = [subprocess.Popen([*map(str, command)], **options) for _ in range(2)]
    outputs = [machine.communicate(timeout=300)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert "from step 10 on" in "".join(outputs) and (tmp_path / "died").exists()
    assert_close_logs(alone, folder)
