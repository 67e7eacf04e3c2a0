"""Tests of preflight.py: what it prints for a machine in order, and for one fault at a time."""
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import check
import fineweb
import preflight
import pytest
import torch
import torch.distributed as dist
from conftest import ENV, ROOT, poison_at, until
from test_check import ForkedPopen

TINY = ["--encoding=bytes", "--n_layer=1", "--n_head=2", "--n_embd=16", "--T=16", "--B=4",
        "--total_batch_size=128", "--dtype=float32", "--device=cpu"]

# ---- Faults, which are called in the process of each run
def with_hook(t, change):
    """Let change(gradients, own gradients) replace the averaged gradients of rank 1."""
    def hook(state, bucket):
        own = bucket.buffer().clone()
        dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
        if t.RANK == 1:
            change(bucket.buffer(), own)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future
    train = t.train

    def train_with_hook(run):
        if t.WORLD_SIZE > 1:
            run.ddp_model.register_comm_hook(None, hook)
        train(run)
    t.train = train_with_hook

def unshared_gradients(t, job):
    with_hook(t, lambda average, own: average.copy_(own))

def noise(t, job):
    with_hook(t, lambda average, own: average.mul_(1 + 0.01 * torch.randn_like(average)))

def same_rows(t, job):
    train_step = t.train_step

    def step(run):
        rank, t.RANK = t.RANK, 0
        try:
            return train_step(run)
        finally:
            t.RANK = rank
    t.train_step = step

def wrong_rows_after_resume(t, job):
    train = t.train

    def train_wrong(run):
        if run.step:
            batch = run.train_loader.batch
            run.train_loader.batch = lambda row, *args: batch(row + 1, *args)
        train(run)
    t.train = train_wrong

def little_memory(t, job):
    train_step = t.train_step

    def step(run):
        if run.cfg.B > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train_step(run)
    t.train_step = step

def diverge(t, job):
    poison_at(t, 3)

def hang(t, job):
    if t.RANK == 1:
        t.train = lambda run: time.sleep(1000)

# ---- Whole runs
@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a function that calls preflight.py with a fault in its runs.

    It returns the exit status, {name of a check: its line}, and the last line.
    """
    def run(*flags, fault=None):
        def ask(question, encoding, folder):
            raise check.Failed("no network today")
        popen = SimpleNamespace(**vars(subprocess) | {
            "Popen": lambda command, **options: ForkedPopen(command, fault=fault, **options)})
        monkeypatch.setattr(check, "subprocess", popen)
        monkeypatch.setattr(preflight, "ask", ask)
        monkeypatch.setattr(sys, "argv", ["preflight.py", *TINY, *flags])
        status = preflight.main()
        *lines, last = capsys.readouterr().out.splitlines() or [""]
        assert not list(tmp_path.glob("tmp*/*"))  # nothing is left behind
        return status, {line[8:21].strip(): line for line in lines}, last
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)

def test_a_machine_in_order(run):
    status, lines, last = run("--max_steps=1000000")
    assert status == 0, lines
    for name in ("machine", "one process", "all GPUs", "resume"):
        assert lines[name].startswith("ok "), lines[name]
    for name in ("vocabulary", "FineWeb-Edu", "HellaSwag"):  # not needed
        assert lines[name].startswith("skipped "), lines[name]
    assert "2 processes have the losses" in lines["all GPUs"]
    assert "bit for bit" in lines["resume"]
    assert "python" in last and "--max_steps=1000000" in last and "1,000,000 steps" in last

@pytest.mark.parametrize("fault, check, part", [
    (unshared_gradients, "all GPUs", "after the last step, the weights"),
    (noise, "all GPUs", "after the last step, the weights"),
    (same_rows, "all GPUs", "of step 0 is"),
    (wrong_rows_after_resume, "resume", "of step 4 is"),
    (diverge, "one process", "Step 3 has loss"),
    (hang, "all GPUs", "it was ended after"),
])
def test_a_fault_is_named(run, monkeypatch, fault, check, part):
    wait = preflight.check.Runs.wait

    def wait_a_second(runs, process, folder):
        if fault == hang and folder.name == "all GPUs":
            runs.timeout = 1
        return wait(runs, process, folder)
    monkeypatch.setattr(preflight.check.Runs, "wait", wait_a_second)
    status, lines, last = run(fault=fault)
    assert status == 1 and last.startswith("This machine is not ready") and check in last
    assert lines[check].startswith("FAIL ") and part in lines[check], lines
    assert [line for line in lines.values() if line.startswith("FAIL")] == [lines[check]]

def test_a_smaller_b_is_advised_if_memory_runs_out(run):
    status, lines, last = run(fault=little_memory)
    assert status == 0 and "--B=4 does not fit, so use --B=1" in lines["one process"], lines
    assert "--B=1`" in last

def test_a_small_disk_is_reported(run, monkeypatch):
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1e8))
    status, lines, last = run()
    assert status == 1 and "log_dir has 0.1 GB free and needs 0.5 GB" in lines["machine"]
    assert lines["resume"].startswith("ok ") and "machine failed" in last

def test_without_the_vocabulary_bytes_are_used(run, monkeypatch, tmp_path):
    """If neither shards nor the vocabulary are here, both are named. The other checks are made."""
    def no_vocabulary(name):
        if name != "bytes":
            raise fineweb.UserError("encoding=gpt2 cannot be loaded: set TIKTOKEN_CACHE_DIR.")
        return get_encoding(name)
    get_encoding = fineweb.get_encoding
    monkeypatch.setattr(preflight.fineweb, "get_encoding", no_vocabulary)
    status, lines, last = run("--encoding=gpt2", f"--data={tmp_path / 'none'}")
    assert status == 1 and last == "This machine is not ready: vocabulary, FineWeb-Edu failed."
    assert lines["resume"].startswith("ok "), lines

def test_a_wrong_flag_is_one_sentence(run):
    assert "the run cannot start: " in run("--n_head=3")[0]

def test_ctrl_c_cleans_up(tmp_path):
    with subprocess.Popen([sys.executable, ROOT / "tests" / "preflight.py", *TINY], text=True,
                          env=ENV | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        until(lambda: list(tmp_path.glob("*/one process/log.txt")))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130 and not err and not list(tmp_path.glob("tmp*"))
