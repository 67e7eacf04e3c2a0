"""Tests of check.py: what each check finds, and whole runs of it on edited copies of the script."""
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import check
import numpy as np
import pytest
import torch
from conftest import ENV, FORKS, ROOT, TINY, ids, shake, small, start_forkserver, until

FLAGS = [f"--{name}={value}" for name, value in TINY.items()
         if name not in ("max_steps", "eval_every", "print_every", "hellaswag_every", "dtype")]
FLAGS += ["--max_steps=8", f"--data={ROOT / 'input.txt'}", "--device=cpu"]

def copied(folder, *replacements):
    """Copy the scripts and check.py to a folder, with replacements (old, new) in train_gpt2.py."""
    for name in ("fineweb.py", "hellaswag.py"):
        shutil.copy(ROOT / name, folder)
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "check.py", folder / "tests")
    source = (ROOT / "train_gpt2.py").read_text()
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (folder / "train_gpt2.py").write_text(source)
    return [sys.executable, folder / "tests" / "check.py", *FLAGS]

class ForkedPopen:
    """A run that check.py starts, forked to save time. It has the methods of subprocess.Popen.

    fault: a function that is called with the module train_gpt2 and the job before the run starts.
    """
    lock = threading.Lock()  # multiprocessing polls all processes when it starts one

    def __init__(self, command, env, fault=None, **options):
        self.stderr = tempfile.mkstemp()[1]
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            env = env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
        self.process = FORKS.Process(target=run_command, args=(command, env, self.stderr, fault))
        with self.lock:
            start_forkserver()
            self.process.start()
        self.pid = self.process.pid

    def communicate(self, timeout):
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("", timeout)
            time.sleep(0.01)
        self.returncode = self.poll()
        return None, Path(self.stderr).read_text()

    def poll(self):
        with self.lock:
            return self.process.exitcode

def run_command(command, env, stderr, fault):
    """Do in the forked process what the command does: one run, or torchrun with its processes."""
    os.setsid()
    os.environ.update(env)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(stderr, os.O_WRONLY), 2)
    n = int(next((word[17:] for word in command if word.startswith("--nproc_per_node=")), 0))
    if not n:
        return run_child(command[-1], fault)
    os.environ["WORLD_SIZE"] = str(n)
    pids = []
    for rank in range(n):
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        pids.append(os.fork())
        if not pids[-1]:
            try:
                run_child(command[-1], fault)
            finally:
                os._exit(bool(sys.exc_info()[0]))
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status:
            for other in pids:
                os.kill(other, signal.SIGKILL)
            os._exit(1)

def run_child(job, fault):
    job = json.loads(job)
    for name in ("train_gpt2", "fineweb", "hellaswag"):
        sys.modules.pop(name, None)  # the copies are imported instead
    np.random.seed()  # a new process has a random state
    sys.path.insert(0, job["scripts"])
    if fault:
        fault(importlib.import_module("train_gpt2"), job)
    check.child(job)

@pytest.fixture
def run_check(tmp_path, monkeypatch, capsys):
    """Return a function that checks the scripts in tmp_path, which copied() has written.

    It returns the exit status, {name of a check: its line} and the lines of the facts.
    torchrun: whether torchrun may start the run with two processes. Otherwise, that run fails.
    """
    def start(command, **options):
        if "torch.distributed.run" not in command:
            return ForkedPopen(command, **options)
        return subprocess.Popen(command if use_torchrun else ["false"], **options)

    def run_check(torchrun=False):
        nonlocal use_torchrun
        use_torchrun = torchrun
        with pytest.raises(SystemExit) as exited:
            sys.exit(check.main())
        checks, _, facts = capsys.readouterr().out.partition("\n\n")[2].partition("\n\n")
        return exited.value.code, {line.split()[0]: line for line in checks.splitlines()}, facts
    use_torchrun = False
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(sys, "argv", ["check.py", *FLAGS])
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": start}))
    before = signal.getsignal(signal.SIGTERM)
    yield run_check
    signal.signal(signal.SIGTERM, before)

def test_the_unedited_script_keeps_its_promises(tmp_path, run_check):
    copied(tmp_path)
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a",
                                                 "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, env=ENV)
    status, lines, facts = run_check(torchrun=True)
    assert status == 0 and lines.keys() == check.CHECKS.keys()
    assert all(line.endswith(": holds") for line in lines.values())
    assert "these runs used no edit" in facts
    [parameters] = [line for line in facts.splitlines() if line.startswith("parameters")]
    assert parameters.split()[1] == parameters.split()[2] != "-"

def test_an_edit_that_breaks_promises_is_reported(tmp_path, run_check):
    """Layers are dropped by NumPy's generator, the loss covers half of the rows, and one weight is
    not trained. A check that raises an error names the line of the script.
    """
    copied(
        tmp_path,
        ("        for block in self.transformer.h:\n            x = block(x)\n",
         "        for block in self.transformer.h:\n"
         "            x = x if self.training and np.random.rand() < 0.5 else block(x)\n"),
        ("logits.flatten(0, 1), targets.flatten(), ignore_index=-100)",
         "logits[::2].flatten(0, 1), targets[::2].flatten(), ignore_index=-100)"),
        ("    others = [p for p in model.parameters() if p.requires_grad",
         "    others = [p for p in model.parameters() if p.shape != (16,) and p.requires_grad"),
        ("        if temperature == 0:\n", "        if temperature == 0 and 1 / 0:\n"))
    status, lines, facts = run_check()
    assert status == 1 and lines.keys() == check.CHECKS.keys()
    for name in ("same", "resume", "loss", "trains"):
        assert "BROKEN" in lines[name], lines[name]
    assert "ln_1.weight is in 0 optimizer groups" in lines["trains"]
    assert "not checked (no message)" in lines["processes"]
    assert "not checked (train_gpt2.py, line" in lines["samples"]
    assert "if temperature == 0 and 1 / 0: (ZeroDivisionError" in lines["samples"]
    assert lines["saved"].endswith(": holds")
    assert facts == "There are no facts about the committed version: no commit is here\n"

def test_a_script_that_does_not_train_is_reported(tmp_path, run_check):
    copied(tmp_path, ("        x = self.transformer.ln_f(x)\n", "        x = x.foo()\n"))
    message = run_check()[0]
    assert "does not train: train_gpt2.py, line" in message and "x = x.foo()" in message

def test_sigterm_ends_all_runs(tmp_path, run_check, monkeypatch):
    """It kills the run that is being made, and leaves no files behind."""
    runs, communicate = [], ForkedPopen.communicate

    def stop_when_it_trains(run, timeout):
        if runs:
            return communicate(run, timeout)
        runs.append(run)
        until(lambda: list(tmp_path.glob("*/base/log.txt")))
        signal.raise_signal(signal.SIGTERM)
    monkeypatch.setattr(ForkedPopen, "communicate", stop_when_it_trains)
    copied(tmp_path)
    assert run_check()[0] == 143
    [run] = runs
    until(lambda: run.poll() is not None)
    assert run.poll() == -signal.SIGKILL and not list(tmp_path.glob("*/base"))

def spoilt(method):
    """Return a small model whose forward() is replaced by method(model, forward, idx, targets)."""
    model = shake(small())
    forward = model.forward
    model.forward = lambda idx, targets=None, return_logits=True: method(
        model, forward, idx, targets)
    return model

def test_logits_that_depend_on_later_tokens_or_on_no_earlier_one_are_found():
    def leak(model, forward, idx, targets):
        logits, loss = forward(idx)
        return logits + logits.mean(1, keepdim=True), loss
    assert "change earlier logits" in check.problem_with_logits(spoilt(leak), ids(1))
    def hide(model, forward, idx, targets):  # a row as if each document stood alone
        starts = (idx[0] == 256).nonzero().flatten().tolist()
        parts = [idx[:, a:b] for a, b in zip([0, *starts], [*starts, None])]
        return torch.cat([forward(part)[0] for part in parts if part.numel()], 1), None
    documents = ids(1)
    documents[0, 20] = 256
    assert check.problem_with_logits(spoilt(hide), documents) == ""
    blind = spoilt(lambda model, forward, idx, targets: (forward(idx[:, :, None].flatten(0, 1))[
        0].view(1, -1, 257), None))
    assert "does not change the last logits" in check.problem_with_logits(blind, ids(1))
    assert check.problem_with_logits(shake(small()), ids(1)) == ""

def test_samples_that_are_not_the_most_likely_tokens_are_found():
    model = shake(small())
    assert check.problem_with_samples(model, ids()) == ""
    real = model.generate
    model.generate = lambda idx, n, **words: real(idx[:, -20:], n, **words)
    assert "after a prompt" in check.problem_with_samples(model, ids())

def test_a_loss_that_is_not_the_cross_entropy_is_found():
    def z_loss(model, forward, idx, targets):
        logits, loss = forward(idx, targets)
        return logits, loss + 1e-3 * logits.logsumexp(-1).square().mean()
    assert "the loss is" in check.problem_with_loss(spoilt(z_loss), ids(), ids(seed=1))
    assert check.problem_with_loss(shake(small()), ids(), ids(seed=1)) == ""

def test_parameters_that_do_not_train_are_found():
    model = small()
    first = check.checksums(model)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    run = SimpleNamespace(model=model, optimizers=optimizers)
    assert check.problem_with_parameters(run, first).endswith("has not changed")
    shake(model)
    assert check.problem_with_parameters(run, first) == ""
    run.optimizers = optimizers * 2
    assert "is in 2 optimizer groups" in check.problem_with_parameters(run, first)
    run.optimizers = []
    for p in model.parameters():
        p.requires_grad = False
    assert check.problem_with_parameters(run, first) == ""  # frozen

def test_the_first_difference_of_two_logs_is_named():
    a = {(0, "train"): 1.0, (1, "train"): 2.0, (1, "val"): 3.0}
    assert check.difference(a, dict(a)) == ""
    assert check.difference(a, a | {(1, "train"): 2.5}) == "train of step 1 is 2 and 2.5"
    allowed = check.rounding(a, a | {(1, "val"): 3.03})  # by 1 %, so by 5 %
    assert check.difference(a, a | {(1, "train"): 2.09}, allowed) == ""
    assert check.difference(a, a | {(1, "train"): 2.11}, allowed)
    assert check.difference(a, a | {(0, "train"): 1.1}, allowed) == "train of step 0 is 1 and 1.1"
    assert "nan" in check.difference(a, a | {(1, "val"): float("nan")}, allowed)
    assert "only one run has val of step 2" in check.difference(a, a | {(2, "val"): 1.0})

def test_the_error_of_a_run_is_named_with_the_line_of_the_script():
    text = ('[rank1]: Traceback (most recent call last):\n[rank1]:   File "/x/train_gpt2.py", line 7'
            ', in f\n[rank1]:     x = y\n[rank1]:   File "/torch/a.py", line 9, in g\n[rank1]:     z'
            '\n[rank1]: ValueError: bad\n' + "=" * 60 + "\ntrain_gpt2.py FAILED\n" + "=" * 60)
    assert check.line_of_script(text) == "train_gpt2.py, line 7: x = y (ValueError: bad)"
    assert check.line_of_script("Killed\n") == "Killed"
    assert check.line_of_script("W1\ntrain_gpt2.py: Out of memory.\n====\n") == "Out of memory"
