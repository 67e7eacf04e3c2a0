"""check.py: whole checks of tiny trainings, and the functions that compare and examine runs."""
import contextlib
import copy
import math
import os
import random
import signal
import subprocess
import sys
import time
import types
import zlib
from collections import Counter, deque
from unittest import mock

import check
import check_run
import numpy as np
import pytest
import torch
from conftest import ENV, ROOT, TINY, beside_others, until, write_text
from torch.nn import functional as F

import train_gpt2

SCRIPTS = ("train_gpt2.py", "fineweb.py", "hellaswag.py")
CORES = check.CORES  # some tests patch check.CORES

# Appended to train_gpt2.py. The loss depends on how often forward() was called, which a checkpoint
# does not hold; generate() draws from other logits; the validation loss has a factor.
WRONG_EDIT = """
def forward(self, idx, targets=None, real=GPT.forward, **more):
    logits, loss = real(self, idx, targets, **more)
    if loss is not None and self.training:
        self.calls = getattr(self, "calls", 0) + 1
        loss = loss * (1 + self.calls)
    if loss is not None and not self.training:
        loss = loss * 1.01
    return logits, loss

def generate(self, idx, max_new_tokens, **more):
    return torch.cat((idx, 0 * idx[:, :1].expand(-1, max_new_tokens)), dim=1)

GPT.forward, GPT.generate = forward, generate
"""

def copy_scripts(folder):
    """Copy the scripts, check.py and a short text into `folder`; return the path of check.py."""
    (folder / "tests").mkdir()
    for name in (*SCRIPTS, "tests/check.py", "tests/check_run.py"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    write_text(folder)
    return folder / "tests" / "check.py"

def append(path, text):
    """Add code at the end of a script, in front of the line that calls main()."""
    source = path.read_text(encoding="utf-8")
    head, line, tail = source.rpartition('if __name__ == "__main__":')
    path.write_text(head + text + "\n" + line + tail, encoding="utf-8")

def commit(folder):
    identity = ("-c", "user.name=A", "-c", "user.email=a@b.c")
    for words in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "Before")):
        subprocess.run(["git", *words], cwd=folder, check=True, env=ENV)

def flags(folder, **changes):
    """Return the flags of a tiny run. It is on a CPU: check.py knows nothing of simulated GPUs."""
    constants = {name: value for name, value in TINY.items() if name not in check.OWN_FLAGS}
    constants |= dict(data=folder / "text.txt", val_tokens=256, device="cpu") | changes
    return [f"--{name}={value}" for name, value in constants.items()]

def outcomes(text):
    """Return {promise: holds, BROKEN or not checked} of what check.py printed."""
    found = {}
    for promise, (name, _) in check.PROMISES.items():
        rest = text.partition(name)[2].lstrip()
        found[promise] = next((outcome for outcome in ("holds", "BROKEN", "not checked")
                               if rest.startswith(outcome)), None)
    return found

@beside_others
def test_all_promises_of_the_script_hold(tmp_path):
    """Without an edit and without git, eleven promises hold. Three say why they are not checked.

    Rows of 16 tokens are too short to tell whether they are validation data.
    """
    script = copy_scripts(tmp_path)
    command = [sys.executable, script, "--steps=4", *flags(tmp_path, dropout=0.1)]
    done = subprocess.run(command, env=ENV | {"TMPDIR": str(tmp_path)}, cwd=tmp_path, text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 0, (done.stdout, done.stderr)
    found = outcomes(done.stdout)
    two = "holds" if CORES > 1 else "not checked"
    assert found == dict.fromkeys(check.PROMISES, "holds") | {
        "processes": two, "apart": "not checked", "effect": "not checked", "begin": "not checked"}
    assert "All promises hold" in done.stdout and "git" in done.stdout
    assert "Note: " not in done.stdout
    assert "--steps=12" in done.stdout
    assert not list(tmp_path.glob("check_gpt2_*"))

@beside_others
def test_broken_promises_are_named_with_their_cause(tmp_path):
    """An edit of a git checkout is compared with the commit, and each promise that it breaks is
    reported, with the attribute that a restart forgets."""
    script = copy_scripts(tmp_path)
    commit(tmp_path)
    append(tmp_path / "train_gpt2.py", WRONG_EDIT)
    command = [sys.executable, script, "--steps=4", *flags(tmp_path, dropout=0.1)]
    done = subprocess.run(command, env=ENV, cwd=tmp_path, text=True, capture_output=True,
                          timeout=300)
    assert done.returncode == 1, (done.stdout, done.stderr)
    found = outcomes(done.stdout)
    found.pop("processes")  # there may be one core only
    assert found == {"same": "holds", "killed": "BROKEN", "B": "BROKEN", "evaluations": "holds",
                     "saved": "holds", "samples": "BROKEN", "later": "holds", "draws": "holds",
                     "tokens": "holds", "apart": "not checked", "loss": "BROKEN",
                     "effect": "holds", "begin": "holds"}
    assert "This changed during training and is not saved: self.calls in GPT." in done.stdout
    assert "Make it an attribute of State" in done.stdout
    # Dropout is a cause only if validation uses it, and not if only check_run.py does
    assert "Random numbers are drawn in forward passes without gradient" not in done.stdout

@beside_others
def test_a_signal_ends_all_processes_and_deletes_the_folder(tmp_path):
    """SIGTERM during a check leaves neither processes nor temporary files behind."""
    script = copy_scripts(tmp_path)
    process = subprocess.Popen(
        [sys.executable, script, "--steps=4", *flags(tmp_path)], cwd=tmp_path, text=True,
        env=ENV | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    last = "two" if CORES > 1 else "base"  # if possible, two processes train together then
    until(lambda: list(tmp_path.glob(f"check_gpt2_*/{last}/err_*.txt")))
    started = descendants(process.pid)
    assert len(started) >= 3
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=180) == 128 + signal.SIGTERM, process.stdout.read()
    process.stdout.close()
    assert not list(tmp_path.glob("check_gpt2_*"))
    until(lambda: not started & running_processes().keys())

def running_processes():
    """Return {pid: pid of the parent} of all running processes."""
    lines = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], env=ENV, capture_output=True,
                           text=True)
    words = [line.split() for line in lines.stdout.splitlines()]
    return {int(pid): int(parent) for pid, parent, stat in words if not stat.startswith("Z")}

def descendants(pid):
    """Return the ids of all processes that a process has started, directly or indirectly."""
    parents = running_processes()
    children = {child for child, parent in parents.items() if parent == pid}
    return children.union(*(descendants(child) for child in children))

def test_an_error_of_the_script_is_shown(monkeypatch):
    """A constant that the script refuses ends the check with the script's own line."""
    monkeypatch.setattr("sys.argv", ["check.py", "--n_embd=30", "--n_head=4", "--device=cpu"])
    monkeypatch.setattr(check.signal, "signal", mock.Mock())
    monkeypatch.setattr(check.FORKED, "set_forkserver_preload", mock.Mock())
    for name in ("OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE",  # main() sets them
                 "PYTORCH_NVML_BASED_CUDA_CHECK"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(SystemExit, match="train_gpt2.py: n_embd=30"):
        check.main()

# ------------------------------------------------------------------- the functions of check.py
def options(*words):
    return check.parse(words)

def test_flags(capsys):
    """Unknown flags are for the script; flags that the command sets itself are refused."""
    found = options("--n_layer=2", "--data=a b.txt", "--steps=60", "--against=main")
    assert (found.steps, found.against) == (60, "main")
    assert found.flags == {"n_layer": "2", "data": "a b.txt"}
    for word in ("--max_steps=9", "--log_dir=log", "x", "--data", "--steps=3"):
        with pytest.raises(SystemExit):
            options(word)
        assert word.partition("=")[0] in capsys.readouterr().err
    with pytest.raises(check.Failed, match="--n_layers"):
        plan(words=["--n_layers=2"])

def test_the_first_difference_of_two_logs(tmp_path):
    """Logs are compared in the order of their lines, a validation before the step after it; times
    are left out, and with a tolerance so are metrics that are no losses."""
    (tmp_path / "log.txt").write_text(
        "0 val 5.5\n0 minutes 0.1\n0 train 5.4\n1 train 5.0\n1 balance 7.0\n2 val nan\n")
    log = check.read_log(tmp_path / "log.txt")
    assert all(map(check.TIMES.search, ("data_ms", "mem", "peak_gib", "GB", "ms/step")))
    assert not any(check.TIMES.search(name) for name in ("rms", "norm", "items", "gbm", "train"))
    assert log == {(0, "val"): "5.5", (0, "train"): "5.4", (1, "train"): "5.0",
                   (1, "balance"): "7.0", (2, "val"): "nan"}
    assert check.first_difference(log, dict(log)) is None
    other = log | {(0, "val"): "5.6", (0, "train"): "5.5"}
    assert check.first_difference(log, other) == check.Difference(0, "val", ("5.5", "5.6"))
    shorter = {key: value for key, value in log.items() if key != (1, "train")}
    assert check.first_difference(log, shorter).values == ("5.0", None)
    allowed = dict.fromkeys(range(3), 0.05)
    assert check.first_difference(log, log | {(0, "val"): "5.54", (1, "balance"): "8.0"},
                                  allowed) is None
    found = check.first_difference(log, log | {(1, "train"): "4.9"}, allowed)
    assert (found.step, found.metric) == (1, "train")
    assert found.verdict("here", "there", "").evidence[0] == (
        "At step 1, train is 5.0 here and 4.9 there. The difference is 0.1, but rounding explains "
        "only 0.05.")
    assert check.first_difference(log, log | {(1, "train"): "nan"}, allowed)

def test_what_rounding_explains_grows_with_the_steps():
    """The tolerance is ten times the largest difference so far between the run and one whose
    weights were nudged, and never below a few units of rounding."""
    log = {(step, "train"): "4.0" for step in range(3)} | {(2, "norm"): "1.0"}
    nudged = log | {(1, "train"): "4.001", (2, "norm"): "9.0"}
    assert check.tolerances(log, nudged, 2e-6) == pytest.approx({0: 1e-5, 1: 1e-2, 2: 1e-2})
    assert check.tolerances(log, nudged, 2e-4)[0] == pytest.approx(1e-3)
    # Selected experts may change because of rounding, but not in the first step
    selects = check.tolerances(log, nudged, 2e-5, selects=True)
    assert selects == pytest.approx({0: 1e-4, 1: 1e-2, 2: 1e-2})
    selects = check.tolerances(log, log, 2e-5, selects=True)
    assert selects == pytest.approx({0: 1e-4, 1: 5e-3, 2: 5e-3})

def test_checkpoints_are_compared_by_all_their_tensors(tmp_path):
    """The first tensor that differs is named, also in nested lists and dictionaries. Values that
    are no tensors are ignored."""
    one = {"eval_model": {"w": torch.ones(2)}, "state": {"step": 3, "optimizers": [
        {"state": {0: torch.zeros(2)}}]}}
    two = {"eval_model": {"w": torch.ones(2)}, "state": {"step": 4, "optimizers": [
        {"state": {0: torch.tensor([0.0, 1.0])}}]}}
    three = one | {"eval_model": {"w": torch.tensor([1.0, float("nan")])}}
    four = one | {"eval_model": {"w": torch.ones(1)}}
    for number, content in enumerate((one, two, three, four), 1):
        torch.save(content, tmp_path / str(number))

    def differs(a, b):
        return check.first_tensor_that_differs(tmp_path / str(a), tmp_path / str(b))
    assert differs(1, 1) is None and differs(3, 3) is None
    assert differs(1, 2) == "state.optimizers.0.state.0 differs by up to 1"
    assert differs(1, 3).startswith("eval_model.w differs by")
    assert differs(1, 4).startswith("eval_model.w differs in its shape")

def test_which_version_is_the_committed_one(tmp_path, monkeypatch):
    """The committed scripts are extracted if the code beside them differs from them; otherwise
    the reason is given."""
    folder = tmp_path / "project"  # in a folder of a larger repository
    folder.mkdir()
    monkeypatch.setattr(check, "SCRIPTS", folder)
    copy_scripts(folder)
    with pytest.raises(check.Unchecked, match="git"):
        check.extract_committed("HEAD", tmp_path / "out1")
    commit(tmp_path)
    with pytest.raises(check.Unchecked, match="as in HEAD"):
        check.extract_committed("HEAD", tmp_path / "out2")
    append(folder / "fineweb.py", "# a comment")
    with pytest.raises(check.Unchecked, match="as in HEAD"):
        check.extract_committed("HEAD", tmp_path / "out3")
    append(folder / "fineweb.py", "MORE = 1")
    check.extract_committed("HEAD", tmp_path / "out4")
    assert "MORE" not in (tmp_path / "out4" / "fineweb.py").read_text(encoding="utf-8")
    with pytest.raises(check.Unchecked, match="git"):
        check.extract_committed("no_such_commit", tmp_path / "out5")

def plan(words=("--steps=4",), device="cpu", **changes):
    """Return the Plan for a script with small constants."""
    constants = dict(B=4, T=16, dropout=0.0, warmup_steps=5, val_tokens=10**6, dtype="float32",
                     device=device,
                     total_batch_size=128) | changes
    return check.Plan(options(*words), constants, device)

def test_which_runs_are_planned(monkeypatch):
    """B is halved to a value that one and two processes can use; what cannot be checked says
    why."""
    monkeypatch.setattr(check, "CORES", 2)
    usual = plan(words=[])
    assert (usual.B, usual.half_B, usual.no_processes) == (4, 2, "")
    assert (usual.common["eval_every"], usual.saved, usual.first_saved) == (5, 17, 7)
    assert [plan(words=[f"--steps={n}"]).saved for n in (4, 5, 8, 60)] == [2, 2, 5, 53]
    assert usual.common["val_tokens"] == 13 * 16 and usual.common["warmup_steps"] == 5
    assert plan(words=["--dtype=bfloat16"], dtype="bfloat16").common["dtype"] == "bfloat16"
    odd = plan(total_batch_size=3 * 16, B=3)
    assert odd.half_B == 1 and "3 rows" in odd.no_processes and odd.saved == odd.first_saved == 2
    monkeypatch.setattr(check, "CORES", 1)
    assert "two cores" in plan().no_processes
    assert "GPUs" in plan(words=["--device=cuda:1"], device="cuda").no_processes

def test_the_killed_run_is_continued_twice():
    """It is killed after a save in the middle and after one near the end."""
    lab = mock.Mock()
    plan(words=[], seed=1).start_runs(lab, committed=None)
    how = {call.args[0]: call.kwargs for call in lab.start.call_args_list}
    flags = {call.args[0]: call.args[1] for call in lab.start.call_args_list}
    assert how["killed"] == dict(kill_at=8, kill_after=7)
    assert how["killed_again"] == dict(
        kill_at=18, kill_after=17, after="killed", log_of="killed")
    assert how["continued"] == dict(after="killed_again", log_of="killed")
    # Only a process that is not forked has a different hash() of a text
    assert how["again"] == dict(context=check.FRESH)
    saves = [flags[name]["save_every"] for name in ("killed", "killed_again", "continued")]
    assert saves == [7, 17, 17]

BOTH = {"files": [], "rows": 40, "equal_rows": 2, "only_val_rows": 0, "val_rows": 50,
        "equal_val_rows": 10}

def finished(log, path, tensors, **report):
    """Return a finished run, with a checkpoint that is written to `path`."""
    torch.save(tensors, path)
    return check.Finished(log=log, checkpoint=path, seconds=1.0, warnings=[], report={
        "changed": [], "draws": False, "step": 2, "samples": None, "later": None,
        "later_in_training": None, "cross_entropy": 4.0, "drawn": [1], "tokens": 512,
        "draws_without_grad": False, "seeds": False, "embedded": 512, "state_differs": [],
        "in_both": BOTH, "val_data": [[16], [1]],
        "initial": {"w": [[2], 7, [1.0, 2.0], 1]}, "first_update": {"w": 1.0}, "muon": [],
        "attributes": ["step"], "selections": [],
        "trained": {"w": zlib.crc32(str(log).encode())},
        "B_is_free": True, "eval_every_is_free": True, "constants": {"B": 4}} | report)

def stub_check(folder, no_committed="no git", **runs):
    """Return a Check whose runs are alike, but for `runs`."""
    log = {(step, "train"): "4.0" for step in range(4)} | {(4, "val"): "4.0"}
    finished_runs = {}
    for name in ("base", "again", "continued", "nudged", "half", "two", "evaluated", "committed",
                 "reloaded"):
        changes, report = runs.get(name, ({}, {}))
        report = dict(report)
        own = {(0, "val"): "4.0"} if name == "reloaded" else log
        tensors = {"w": report.pop("tensors", torch.ones(2))}
        finished_runs[name] = finished(own | changes, folder / f"{name}.pt", tensors, **report)
    usual = plan()
    usual.no_processes = ""
    return check.Check(usual, finished_runs.get, no_committed)

def verdicts(folder, no_committed="no git", **runs):
    """Return the verdicts of a check whose runs are alike, but for `runs`."""
    checking = stub_check(folder, no_committed, **runs)
    return {promise: checking.verdict(promise) for promise in check.PROMISES}

@pytest.mark.parametrize("promise, runs, text", [
    ("same", dict(again=({(2, "train"): "4.1"}, {})), "train differs from step 2 on"),
    ("same", dict(again=({}, dict(tensors=torch.zeros(2)))), "last checkpoints differ"),
    ("killed", dict(continued=({(4, "val"): "4.1"}, {})), "val differs from step 4 on"),
    ("killed", dict(continued=({}, dict(tensors=torch.zeros(2)))), "w differs by up to 1."),
    ("killed", dict(base=({(1, "x"): "1"}, {}), again=({(1, "x"): "1"}, {})), "give `step` to"),
    ("killed", dict(continued=({}, dict(step=0))), "it continues at step 0"),
    ("B", {name: ({(1, "train"): "4.001"}, {}) for name in ("half", "nudged", "two")},
     "The difference is 0.001"),
    ("processes", dict(two=({(3, "train"): "4.001"}, {})), "train differs from step 3 on"),
    ("processes", dict(two=({}, dict(tokens=1024))), "State.tokens is 512 with one process and 1,"),
    ("evaluations", dict(evaluated=({(3, "train"): "4.1"}, {})), "train differs from step 3 on"),
    ("evaluations", dict(evaluated=({(4, "val"): "4.1"}, {})), "val differs from step 4 on"),
    ("saved", dict(reloaded=({(0, "val"): "4.1"}, {})), "--init_from) is 4.1"),
    ("samples", dict(base=({}, dict(samples=["a wrong token", "there"]))), "a wrong token"),
    ("later", dict(base=({}, dict(later=["logits change", "by 1"]))), "logits change"),
    ("later", dict(base=({}, dict(later_in_training=["logits change", "x"]))), "in training mode"),
    ("draws", dict(base=({}, dict(seeds=True))), "seeds torch's generator"),
    ("tokens", dict(base=({}, dict(embedded=511))), "given 511 token ids, and State.tokens co"),
    ("apart", dict(base=({}, dict(in_both=BOTH | {"equal_rows": 3}))), "3 of 40"),
    ("apart", dict(base=({}, dict(in_both=BOTH | {"equal_val_rows": 11}))), "11 of 50 validation"),
    ("apart", dict(base=({}, dict(in_both=BOTH | {"files": ["a.npy"]}))), "It is a.npy"),
    ("apart", dict(base=({}, dict(in_both=BOTH | {"only_val_rows": 1}))), "1 of 40 training rows"),
    ("loss", dict(base=({}, dict(cross_entropy=3.9))), "3.900000"),
    ("loss", dict(committed=({}, dict(val_data=[[16], [2]]))), "other inputs or targets"),
    ("effect", dict(), "no effect on training"),
    ("begin", dict(committed=({}, dict(initial={"w": [[2], 8, [1.0, 3.0], 2]}))), "They are w."),
    ("begin", dict(base=({}, dict(initial={"w": [[2], 7, [1.0, 2.0], None]})),
                   committed=({}, dict(initial={"w": [[2], 8, [1.0, 3.0], None]}))), "They are w."),
])
def test_each_broken_promise_is_reported_alone(tmp_path, promise, runs, text):
    """What breaks one promise leaves the others, and the verdict says what differs."""
    compared = promise in ("effect", "begin") or "committed" in runs
    found = verdicts(tmp_path, no_committed="" if compared else "no", **runs)
    broken = {name for name, verdict in found.items() if verdict.outcome == "BROKEN"}
    assert broken - {"effect"} == {promise} - {"effect"} and found[promise].outcome == "BROKEN"
    printed = check.in_words(promise, found[promise])
    assert text in printed
    # The likely cause is left out if the text already contains the real one
    assert (check.PROMISES[promise][1][:40] in printed) != (text == "other inputs or targets")

@pytest.mark.parametrize("change, words", [
    (lambda w: w * 0, "0 everywhere"), (lambda w: w * 0.1, "0.1 times as large"),
    (lambda w: w + 1, ""), (lambda w: torch.cat((w[1:], w[:1])), ""),
    (lambda w: w.masked_fill(torch.arange(30) == 29, 5.0), ""), (lambda w: w.roll(10), "")])
def test_scaled_and_constant_initial_values_are_told_from_new_draws(change, words):
    w = torch.randn(30, generator=torch.Generator().manual_seed(0))
    before, now = check_run.some_values(w), check_run.some_values(change(w))
    assert check.in_words_how_set(before, now) == words

def test_a_scaled_column_is_not_a_scaled_matrix():
    w = torch.randn(48, 16, generator=torch.Generator().manual_seed(0))
    changed = w.clone()
    changed[:, 0] *= 0.5
    values = [check_run.some_values(x) for x in (w, changed, w * 0.5)]
    assert check.in_words_how_set(values[0], values[1]) == ""
    assert check.in_words_how_set(values[0], values[2]) == "0.5 times as large"

def test_what_is_not_saved_is_noted_unless_a_verdict_has_named_it(tmp_path):
    changed = dict(changed=["self.calls in GPT"])
    for continued, n in (({}, 1), ({(4, "val"): "4.1"}, 0)):
        checking = stub_check(tmp_path, base=({}, changed), continued=(continued, {}))
        for promise in check.PROMISES:
            checking.verdict(promise)
        notes = [note for note in checking.own_notes() if "self.calls in GPT" in note]
        assert len(notes) == n

def test_an_edit_that_sets_initial_weights_is_described(tmp_path):
    """Neither zero initialization nor a change after init_weights() is reported as broken."""
    before = {"v": [[2], 5, [1.0, 3.0], 6], "w": [[2], 8, [1.0, 3.0], 8], "x": [[1], 1, [1.0], 1]}
    before["u"] = before["v"]
    now = {"v": [[2], 9, [1.0, 4.0], 6], "w": [[2], 7, [0.0], 7], "x": [[1], 1, [1.0], 1],
           "u": [[2], 9, [1.0, 4.0], 6], "new": [[1], 1, [1.0], 1]}
    found = verdicts(tmp_path, no_committed="", base=({}, dict(initial=now)),
                     committed=({}, dict(initial=before)))
    assert found["begin"] == check.holds(
        "1 of 5 have new names and are not compared; changed after init_weights(): v and 1 more; "
        "0 everywhere: w")

def test_what_init_weights_draws_is_told_from_what_is_set_afterwards():
    drawn = check_run.watch_draws(module := types.SimpleNamespace(
        init_weights=lambda model, seed: torch.nn.init.constant_(model.weight, seed)))
    model = torch.nn.Linear(2, 1, bias=False)
    module.init_weights(model, 5)
    assert drawn == {id(model): {"weight": check_run.crc_of(torch.tensor([[5.0, 5.0]]))}}

def test_verdicts_on_an_edit_without_and_with_effect(tmp_path):
    """An edit that only adds a metric, or only changes samples, has an effect. A metric that
    differs between equal runs is not compared. If equal runs differ, runs with another B are not
    compared."""
    same = stub_check(tmp_path).base.report["trained"]
    for changes, report, text in ((({}), dict(drawn=[2]), "samples only"),
                                  ({(1, "balance"): "1.0"}, {}, "on balance only"),
                                  ({(1, "train"): "4.000001"}, {}, "within rounding"),
                                  ({(1, "train"): "4.2"}, dict(trained=same), "losses only"),
                                  ({(1, "train"): "4.1"}, {}, "from step 1 on")):
        folder = tmp_path / text.split()[-2]
        folder.mkdir()
        found = verdicts(folder, no_committed="", committed=(changes, report))
        assert found["effect"].outcome == "holds" and text in found["effect"].detail
    runs = {name: ({(1, "load"): str(i)}, {})
            for i, name in enumerate(("base", "again", "continued", "committed"))}
    found = verdicts(tmp_path, no_committed="", **runs)
    assert found["same"].outcome == found["killed"].outcome == "holds"
    assert "except for load" in found["same"].detail and found["effect"].outcome == "BROKEN"
    runs["again"][1]["tensors"] = torch.zeros(2)
    assert verdicts(tmp_path, **runs)["same"].detail == "load differs from step 1 on"
    found = verdicts(tmp_path, again=({(0, "train"): "1.0"}, {}), half=({(0, "train"): "2.0"}, {}))
    assert [found[name].outcome for name in check.PROMISES][:9] == [
        "BROKEN", *["not checked"] * 5, "holds", "holds", "holds"]
    assert found["loss"].outcome == "not checked"

def test_a_metric_that_depends_on_B_or_on_processes_is_noted(tmp_path):
    """Only metrics that an edit has added are noted, and only if they differ by over 0.01 %."""
    values = dict(base="1.0", half="1.00005", nudged="1.00005", two="1.1")
    runs = {name: ({(1, "acc"): value, (1, "norm"): value}, {}) for name, value in values.items()}
    note, = stub_check(tmp_path, **runs).notes_about_metrics()
    assert note.startswith("acc is 1.00005 with one process and 1.1 with two processes, at step 1")

def test_constants_that_are_not_free_to_change_are_not_checked(tmp_path):
    """README tells those whose loss depends on B to remove it from NOT_COMPARED. The same is
    true of eval_every."""
    found = verdicts(tmp_path, half=({(1, "train"): "4.1"}, dict(B_is_free=False)),
                     evaluated=({(1, "train"): "4.1"}, dict(eval_every_is_free=False)))
    for promise in ("B", "evaluations"):
        verdict = found[promise]
        assert verdict.outcome == "not checked" and "NOT_COMPARED" in verdict.detail

def test_jumps_of_the_learning_rate_and_different_batches_are_noted():
    """A usual schedule and equal batches give no note."""
    cfg = train_gpt2.Config(T=4, total_batch_size=8, warmup_steps=2, max_steps=40)
    assert check_run.notes_about_schedules(train_gpt2, cfg) == []
    edited = types.SimpleNamespace(get_lr=lambda step, cfg: 1.0 if step < 30 else 0.5,
                                   rows_of_step=lambda cfg, step: 20 if step == 9 else 2)
    sizes, end, jump = check_run.notes_about_schedules(edited, cfg)
    assert end == "the learning rate is 5.00e-01 in the last step, 39, but min_lr is 6.00e-05."
    assert "8 at first, 8 at the end, and at most 80, in step 9. If this is a mistake" in sizes
    assert "from 1.00e+00 in step 29 to 5.00e-01 in step 30" in jump
    edited = types.SimpleNamespace(get_lr=lambda step, cfg: 1.0 - step / 20,
                                   rows_of_step=lambda cfg, step: 2)
    note, = check_run.notes_about_schedules(edited, cfg)
    assert note == "the learning rate is negative in step 39 (-9.50e-01)."

def test_values_that_train_keeps_and_defaults_in_part_one_are_noted():
    """Values that come from State, or from a clock, give no note. Neither does part two."""
    before = "def train(run):\n    cfg, stopped = run.cfg, False\n    {}\n"
    loop = "    while not stopped:\n        stopped = True\n        {}\ndef f():\n    Config.T\n"
    for start, change, name in (
            ("best, n = math.inf, cfg.T", "best = min(best, n)", "best"),
            ("losses = []", "losses.append(1)", "losses"),
            ("seen: dict = {}", "seen[1] = 2", "seen"),
            ("step = run.state.step", "step += 1", ""),
            ("t0 = time.time()", "t0 = time.time()", ""),
            ("n = 3", "print(n)", "")):
        notes = check_run.notes_about_code(before.format(start) + loop.format(change))
        expected = f"train() keeps {name} from one step to the next in local variables"
        assert [note.partition(", which")[0] for note in notes] == ([expected] if name else [])
    module = ("class A(nn.Module):\n"
              "    def __init__(self, config, layer=0, more=1, width=4):\n        pass\n"
              "def g():\n    A(1)\n    A(2, more=3)\n    B(layer=1)\n")
    note, = check_run.notes_about_code(module + before.format("x = 1") + loop.format("pass"))
    assert note == "no call of A() passes `layer`, so it always has its default."
    starred = module + "def h(a):\n    A(*a)\n" + before.format("x = 1") + loop.format("pass")
    assert check_run.notes_about_code(starred) == []
    note, = check_run.notes_about_code(before.format("x = Config.B") + loop.format("pass"))
    assert note.startswith("Config.B in line 3 is the default")
    assert check_run.notes_about_code("def other():\n    Config.T\n") == []

def test_constants_that_nothing_reads_are_noted(tmp_path, monkeypatch):
    """They may be read in a module of the user's own, and by a name that is put together."""
    script = tmp_path / "edited.py"
    script.write_text(
        "import lion, outside\n"
        "class Config:\n"
        "    B: int = 1\n    cap: int = 3\n    beta: int = 1\n    lr_a: int = 1\n"
        "    rate: float = 1.0\n"
        "def f(cfg, part):\n"
        "    'Use the rate.'\n"
        "    return cfg.B + getattr(cfg, 'cap') + getattr(cfg, f'lr_{part}')\n")
    (tmp_path / "lion.py").write_text("def g(cfg):\n    return cfg.beta\n")
    module = types.SimpleNamespace(__file__=str(script), modules_beside=train_gpt2.modules_beside)
    note, = check_run.notes_about_constants(module)
    assert note.startswith("no code reads rate of Config, so it has no effect.")
    assert check_run.notes_about_constants(train_gpt2) == []

class Unregistered(torch.nn.Module):
    """A model that holds parts of which torch does not know, and parts that are right."""
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.unused = torch.nn.Parameter(torch.ones(2))
        self.decayed = torch.nn.Parameter(torch.ones(2))
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("constant", torch.ones(2))
        self.gate, self.positions = torch.ones(2), torch.arange(2)
        self.layers = [torch.nn.Linear(2, 1)]
        self.teacher, self.last = [torch.nn.Linear(2, 1)], torch.ones(2)

def test_parts_of_a_model_that_are_not_trained_are_noted():
    """A buffer, a frozen parameter, a teacher in a list and a computed value give no note."""
    model = Unregistered()
    initial = {name: (list(p.shape), check_run.crc_of(p)) for name, p in model.named_parameters()}
    adamw = torch.optim.AdamW([dict(params=[model.weight, model.decayed], weight_decay=0.1),
                               dict(params=[model.unused], weight_decay=0.0)])
    train_gpt2.prepare_groups([adamw])
    run = types.SimpleNamespace(state=types.SimpleNamespace(
        raw_model=model, eval_model=model, optimizers=[adamw], step=0,
        state_dict=lambda: {"raw_model": model.state_dict(), "mean": [torch.ones(2)]}))
    nonzero, _, with_zeros = check_run.watch_gradients(run)
    model.layers[0](model.weight).sum().backward()
    model.decayed.grad = torch.zeros(2)
    adamw.step()
    assert (set(nonzero), with_zeros) == ({"weight"}, set())
    run.state.step = 2
    adamw.step()
    assert with_zeros == set()  # zeros in the first three steps do not count
    run.state.step = 3
    adamw.step()
    assert with_zeros == {"decayed"}
    notes = check_run.notes_about_parameters(run.state, initial, nonzero)
    notes += check_run.notes_about_attributes(model, ["self.last in Unregistered"])
    assert [note[:48] for note in notes] == [
        "unused got no gradient in any step (1 in all). T",
        "decayed got no gradient in any step, but changed",
        "self.gate in Unregistered holds a tensor that is",
        "self.layers in Unregistered holds a tensor that "]
    assert check_run.notes_about_copies(run.state) == check_run.notes_about_groups([adamw]) == []
    run.state.state_dict = lambda: {"last": [{"weight": model.weight}]}
    note, = check_run.notes_about_copies(run.state)
    assert note.startswith("State.last holds the weights of raw_model themselves")
    for value in (0.0, 0.5):  # a schedule may have such values
        adamw.param_groups[0]["weight_decay"] = value
        assert check_run.notes_about_groups([adamw]) == []
    adamw.param_groups[0]["weight_decay"] = 1e-7
    note, = check_run.notes_about_groups([adamw])
    assert note == ("training changes weight_decay in a parameter group of AdamW from 0.1 to 1e-07 "
                    "(2 parameters). If it is computed from its own earlier value (*=), factors "
                    "accumulate.")
    model.frozen.requires_grad = True
    note = check_run.notes_about_parameters(run.state, initial, nonzero)[0]
    assert note.startswith("at the end of training, no optimizer has frozen (1 in all)")

def test_the_shares_of_an_average_are_found():
    """If the average also contains something else, no shares are found."""
    samples = list(torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).double())
    average = 0.25 * samples[0] + 0.75 * samples[3]
    shares = check_run.shares_in_average(samples, average)
    assert shares == pytest.approx([0.25, 0, 0, 0.75, 0], abs=1e-9)
    assert check_run.shares_in_average(samples, average + torch.arange(40)) is None
    assert check_run.shares_in_average(samples, average[:30]) is None

@pytest.mark.parametrize("factors, expected", [
    ([0.99, 0.0099, 0.0001], None),                    # a running average
    ([1 / 3, 1 / 3, 1 / 3], None),                     # the mean of all weights
    ([0, 0.5, 0.5], None),                             # the mean from the first step on
    ([0, 0.01, 0.99], "almost the same weights as raw_model"),
    ([0.1, 0.2, 0.2], "the factors add up to 0.5 instead of 1"),
    ([0.5, 0, 0.5], "the initial weights have a share of 50%")])
def test_an_average_with_unusual_shares_is_noted(factors, expected):
    model, average = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = types.SimpleNamespace(raw_model=model, eval_model=average, optimizers=[optimizer])
    samples, _ = check_run.watch_weights(state)
    generator = torch.Generator().manual_seed(0)
    for p in average.parameters():
        p.data.zero_()
    for state.step, factor in enumerate(factors):
        for p, of_average in zip(model.parameters(), average.parameters()):
            p.data.normal_(generator=generator)
            of_average.data.add_(p.data, alpha=factor)
        if state.step < 2:
            optimizer.step()
    notes = check_run.notes_about_average(state, samples)
    assert notes == [] if expected is None else expected in notes[0]
    state.eval_model = model
    assert check_run.notes_about_average(state, samples) == []

def average_by_state_dict(model, average):
    """Update an average, but a tied weight twice, since state_dict() contains it twice."""
    for key, value in average.state_dict().items():
        value.lerp_(model.state_dict()[key], 0.1)

@torch.no_grad()
def average_by_parameters(model, average):
    for of_average, p in zip(average.parameters(), model.parameters()):
        of_average.lerp_(p, 0.1)

@torch.no_grad()
def average_slowly(model, average):
    """In float32, such small changes of values near 1 are rounded."""
    for of_average, p in zip(average.parameters(), model.parameters()):
        of_average.lerp_(p, 1e-6)

@pytest.mark.parametrize("update, n", [
    (average_by_state_dict, 1), (average_by_parameters, 0), (average_slowly, 0),
    (lambda model, average: None, 0)])
def test_an_average_that_moves_some_weights_further_is_noted(update, n):
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    model[2].weight = model[0].weight
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = types.SimpleNamespace(raw_model=model, eval_model=average, optimizers=[optimizer])
    samples, averages = check_run.watch_weights(state)
    for state.step in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        update(model, average)
    notes = check_run.notes_about_uneven_average(samples, averages)
    assert len(notes) == n
    if notes:
        assert notes[0].startswith("one step moves eval_model by 0.1 of the way to the weights of "
                                   "raw_model, but 0.weight by 0.19.")
    assert check_run.notes_about_uneven_average(samples, {}) == []

def test_an_average_in_16_bits_is_noted():
    model = torch.nn.Linear(8, 8)
    state = types.SimpleNamespace(raw_model=model, eval_model=copy.deepcopy(model).bfloat16())
    note, = check_run.notes_about_average(state, {})
    assert note.startswith("eval_model has weights in bfloat16.")

def test_first_updates_of_another_size_are_noted(tmp_path):
    """They are divided by the learning rate, and parameters without a first gradient are left out.
    """
    model = torch.nn.Linear(4, 4)
    optimizers = [torch.optim.AdamW([p], lr=0.1, weight_decay=0) for p in model.parameters()]
    state = types.SimpleNamespace(raw_model=model, optimizers=optimizers, step=3)
    run = types.SimpleNamespace(state=state, cfg=None)
    sizes = check_run.watch_first_update(types.SimpleNamespace(get_lr=lambda *_: 0.05), run)
    model.bias.grad = torch.zeros(4)
    for state.step in (3, 4):
        model.weight.grad = torch.randn(4, 4)
        model.weight.grad[2:] = 0  # half of the weight is not used
        for optimizer in optimizers:
            optimizer.step()
    assert sizes == {"weight": pytest.approx(2, rel=1e-3)}

    def notes(mine, muon=()):
        initial = {name: [[2], 7, [1.0, 2.0], 1] for name in "wxyz"}
        runs = {"base": ({}, dict(first_update=mine, initial=initial, muon=muon)), "committed": (
            {}, dict(first_update={"w": 1.0, "x": 1.0, "y": 0.2}, initial=initial))}
        return stub_check(tmp_path, "", **runs).notes_about_first_update()
    assert notes({"w": 1.5, "x": 0.7, "z": 5.0}) == []
    note, = notes({"w": 0.44, "x": 0.4402, "y": 2.0})
    assert "0.44 times as large: w and 1 more; 10 times as large: y. The upd" in note
    assert "0 times as large (no update at all): w and 1 more. The" in notes(dict(w=0.0, x=0.0))[0]
    # A gradient with a low rank makes Muon's update of some matrices smaller
    assert notes({"w": 0.44, "x": 1.0}, muon=["w", "x"]) == []
    assert len(notes({"w": 0.44, "x": 0.44}, muon=["w", "x"])) == 1
    assert len(notes({"w": 1.8, "x": 1.0}, muon=["w", "x"])) == 1

def test_learning_rates_of_a_deeper_model_are_checked(monkeypatch):
    """If h.1 is looked for in the names of parameters, h.10 and h.11 are found, too."""
    cfg = train_gpt2.Config(optimizer="muon", n_layer=3, n_head=2, n_embd=16)
    config = train_gpt2.GPTConfig(block_size=16, n_vocab=9, n_layer=3, n_head=2, n_embd=16)
    original = train_gpt2.configure_optimizers

    def notes(rate_of):
        def edited(raw_model, cfg, muon_dtype=torch.float32):
            optimizers = original(raw_model, cfg, muon_dtype)
            n = cfg.n_layer
            names = {id(p): name for name, p in raw_model.named_parameters()}
            groups = [dict(params=[p], lr=rate_of(names[id(p)], n)) for optimizer in optimizers
                      for group in optimizer.param_groups for p in group["params"]]
            return [torch.optim.AdamW(groups)]
        monkeypatch.setattr(train_gpt2, "configure_optimizers", edited)
        model = train_gpt2.build_model(cfg, config)
        state = train_gpt2.build_state(model, cfg, torch.float32)
        return check_run.notes_about_depth(
            train_gpt2, types.SimpleNamespace(state=state, cfg=cfg))

    def by_block(n, name, pattern):
        return 0.9 ** (n - next((i for i in range(n) if pattern.format(i) in name), n))
    note, = notes(lambda name, n: by_block(n, name, "h.{}"))
    assert "0: 0.28, 1: 0.31, 2: 0.35" in note and "9: 0.73, 10: 0.31, 11: 0.31. Perhaps" in note
    assert notes(lambda name, n: by_block(n, name, "h.{}.")) == []
    assert notes(lambda name, n: 0.1 if ".h.1." in name else 0.2) == []  # not in order here either
    assert notes(lambda name, n: 0.1) == []

def test_a_divergence_that_is_divided_by_the_number_of_rows_is_noted(monkeypatch):
    """The logits of a distillation have three dimensions, and "batchmean" divides by the first."""
    monkeypatch.setattr(torch.nn.functional, "kl_div", torch.nn.functional.kl_div)
    shapes = check_run.watch_divergences()
    kl_div, p = torch.nn.functional.kl_div, torch.full((2, 3, 4), 0.25)
    kl_div(p.log(), p, reduction="sum")
    kl_div(p.log().flatten(0, 1), p.flatten(0, 1), reduction="batchmean")
    assert check_run.notes_about_divergences(shapes) == []
    torch.nn.KLDivLoss(reduction="batchmean")(p.log(), p)
    note, = check_run.notes_about_divergences(shapes)
    assert "shape (2, 3, 4), and divides by its first dimension only, 2" in note

def test_an_average_that_is_updated_for_each_optimizer_is_noted():
    """An average that is updated once, after the last optimizer, gives no note."""
    def notes(often):
        model, average = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        optimizers = [torch.optim.SGD([p], lr=1.0) for p in model.parameters()]
        state = types.SimpleNamespace(raw_model=model, eval_model=average, optimizers=optimizers)
        notes = check_run.watch_average(state)
        for state.step in range(3):
            for optimizer in optimizers:
                optimizer.step()
                if often or optimizer is optimizers[-1]:
                    average.weight.data += 1
        return notes
    assert notes(often=False) == []
    note, = notes(often=True)
    assert note.startswith("eval_model changes between the steps of two optimizers")

def test_a_buffer_that_an_average_does_not_follow_is_noted():
    """A buffer that is constant, or that the average also changes, gives no note."""
    def notes(state):
        return check_run.notes_about_buffers(state, begin)
    model, average = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    begin = {name: check_run.crc_of(b) for name, b in model.named_buffers()}
    state = types.SimpleNamespace(raw_model=model, eval_model=average)
    assert notes(state) == []
    model.running_mean += 1
    note, = notes(state)
    assert "training changes the buffer running_mean of raw_model" in note
    average.running_mean += 0.5
    assert notes(state) == []
    average.running_mean -= 0.5
    assert notes(types.SimpleNamespace(raw_model=model, eval_model=model)) == []

def test_seeds_that_do_not_change_from_step_to_step_are_noted(monkeypatch):
    """A generator that is seeded once, or with the step, gives no note."""
    monkeypatch.setattr(torch, "Generator", torch.Generator)
    monkeypatch.setattr(torch, "manual_seed", torch.manual_seed)
    monkeypatch.setattr(np.random, "RandomState", np.random.RandomState)
    monkeypatch.setattr(np.random, "default_rng", np.random.default_rng)
    state = types.SimpleNamespace(step=0)
    seeds = check_run.watch_seeds(state)
    torch.Generator().manual_seed(7)
    for state.step in range(5):
        torch.manual_seed(state.step)
    assert check_run.notes_about_seeds(seeds) == []
    for state.step in range(5):
        noise = torch.randn(2, generator=torch.Generator().manual_seed(7))
    note, = check_run.notes_about_seeds(seeds)
    assert "seeded with 7 at 5 values of State.step" in note
    state.step = 5
    torch.manual_seed(7)
    assert len(seeds[7]) == 6 and torch.equal(torch.randn(2), noise)
    for state.step in range(4):
        assert np.random.RandomState((1, 2)).rand() == np.random.RandomState([1, 2]).rand()
        np.random.RandomState(8)
        np.random.default_rng(9)
    assert {seed: len(steps) for seed, steps in seeds.items() if seed > 7} == {8: 4, 9: 4}

def test_rows_that_are_read_several_times_are_noted():
    """A few equal rows are not worth a note, and neither are short ones."""
    rows = [np.full(32, i) for i in range(20)]
    assert check_run.notes_about_repeated_rows([*rows, rows[0]]) == []
    assert check_run.notes_about_repeated_rows([row[:16] for row in [*rows, *rows]]) == []
    note, = check_run.notes_about_repeated_rows([*rows, *rows[:5]])
    assert "5 of the first 25 rows" in note

def clip_at_once(model):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 9.0)

def clip_each(model):
    norms = [torch.nn.utils.clip_grad_norm_(p, 9.0) for p in model.parameters()]
    return torch.stack(norms).norm()

def clip_each_and_return_the_last(model):
    return [torch.nn.utils.clip_grad_norm_(p, 9.0) for p in model.parameters()][-1]

def clip_twice(model):
    """The same parameters are given twice, so the norms of the calls do not add up."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 9.0)
    return clip_at_once(model)

def clip_some(model):
    """The norm of all gradients is computed in another way."""
    for p in (model.weight[:1], model.weight[1:]):
        p.grad = torch.ones_like(p)
        torch.nn.utils.clip_grad_norm_(p, 9.0)
    return torch.tensor(3.0)

def clip_by_largest(model):
    norms = [torch.nn.utils.clip_grad_norm_(p, 9.0, float("inf")) for p in model.parameters()]
    return max(norms)

def clip_not_a_number(model):
    model.bias.grad[:] = math.nan
    return clip_each(model)

@pytest.mark.parametrize("clip, says", [
    (clip_at_once, None), (clip_each, None), (clip_twice, None), (clip_by_largest, None),
    (clip_not_a_number, None), (clip_some, "2 of 2 trained parameters are not given to"),
    (clip_each_and_return_the_last, "train_step() returns 1 as the norm of the gradient. The "),
    (lambda model: torch.nn.utils.clip_grad_norm_(model.bias, 9.0),
     "1 of 2 trained parameters are not given to clip_grad_norm_()")])
def test_gradients_that_are_not_clipped_and_wrong_norms_are_noted(monkeypatch, clip, says):
    """All calls of a step count, and a single tensor or a generator may be given."""
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", torch.nn.utils.clip_grad_norm_)
    model = torch.nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = torch.ones(1, 2), torch.ones(1)
    def train_step(run):
        train_step.calls += 1
        return 0.0, clip(model)
    train_step.calls = 0
    script = types.SimpleNamespace(train_step=train_step, clip=torch.nn.utils.clip_grad_norm_)
    state = types.SimpleNamespace(raw_model=model, optimizers=[])
    clipped, factors, norms, _ = check_run.watch_clipping(script, state)
    script.train_step.calls = 0  # an edit may use attributes of its functions
    script.train_step(None)
    assert script.clip is torch.nn.utils.clip_grad_norm_
    notes = check_run.notes_about_clipping(state, clipped, norms)
    assert len(notes) == bool(says) and all(note.startswith(says) for note in notes)
    assert check_run.notes_about_small_gradients(factors) == []

def test_gradients_that_clipping_makes_small_are_noted(monkeypatch):
    """A limit that is exceeded a little, or in a few steps only, gives no note."""
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", torch.nn.utils.clip_grad_norm_)
    state = types.SimpleNamespace(optimizers=[])
    _, factors, _, _ = check_run.watch_clipping(types.SimpleNamespace(), state)
    p = torch.nn.Parameter(torch.ones(1))
    for limits, n in (((2.0, 1.0, 0.5, 0.5), 0), ((9.0, 9.0, 0.01, 0.01), 0),
                      ((0.01, 0.02, 0.02, 9.0), 1)):
        factors.clear()
        for limit in limits:
            p.grad = torch.ones(1)
            torch.nn.utils.clip_grad_norm_([p], limit)
        notes = check_run.notes_about_small_gradients(factors)
        assert len(notes) == n
    assert notes[0].startswith("clip_grad_norm_() multiplies gradients by 0.02 (the median")

def test_tokens_that_are_never_targets_are_noted():
    """The first token of a row is not a target, and rare tokens need not be one."""
    encoding, tokens = train_gpt2.get_encoding("bytes"), torch.arange(33, 63).repeat(25, 1)
    for masked, n in ((255, 0), (40, 1)):
        x, y = tokens[:, :-1], tokens[:, 1:]
        y = torch.where(y == masked, -100, y)
        counts = check_run.count_ids(Counter(), Counter(), x, y)
        notes = check_run.notes_about_ids(encoding, *counts)
        assert len(notes) == n
    assert notes[0].startswith("the token b'(' (id 40) occurs 25 times in the inputs")

def test_biases_and_gains_with_weight_decay_are_noted():
    model = torch.nn.Linear(2, 1)
    for decay_of_bias in (0.0, 0.1):
        optimizer = torch.optim.AdamW([
            dict(params=[model.weight]), dict(params=[model.bias], weight_decay=decay_of_bias)])
        state = types.SimpleNamespace(raw_model=model, optimizers=[optimizer])
        notes = check_run.notes_about_decay(state)
        assert len(notes) == bool(decay_of_bias)
    assert "with weight decay, for example bias." in notes[0]
    model.bias.requires_grad_(False)
    assert check_run.notes_about_decay(state) == []

@pytest.mark.parametrize("value, decay, muon, words", [
    (1.0, 0.1, False, "has weight decay"), (1.0, 0.0, False, ""), (0.0, 0.1, False, ""),
    (1.0, 0.0, True, "is orthogonalized by Muon")])
def test_gains_that_are_treated_as_matrices_are_noted(value, decay, muon, words):
    """A matrix that is 0 at first, as in LoRA, is not a gain."""
    model = torch.nn.Linear(2, 3)
    named = [("weight", model.weight)]
    optimizer = train_gpt2.Muon(named, lr=0.1) if muon else torch.optim.AdamW(
        [model.weight], weight_decay=decay)
    state = types.SimpleNamespace(raw_model=model, optimizers=[optimizer])
    notes = check_run.notes_about_gains(state, {"weight": ([3, 2], 1, [value])})
    assert len(notes) == bool(words) and all(words in note for note in notes)
    assert check_run.notes_about_gains(state, {"weight": ([3, 2], 1, [1.0, 2.0])}) == []

def test_embeddings_that_muon_updates_are_noted():
    """Embeddings in blocks have two dimensions, like matrices."""
    config = train_gpt2.GPTConfig(block_size=16, n_vocab=9, n_layer=2, n_head=2, n_embd=16)
    model = train_gpt2.GPT(config)

    def notes():
        optimizers = train_gpt2.configure_optimizers(model, train_gpt2.Config(optimizer="muon"))
        return check_run.notes_about_tables(
            types.SimpleNamespace(raw_model=model, optimizers=optimizers))
    assert notes() == []
    model.transformer.h[1].table = torch.nn.Embedding(9, 16)
    note, = notes()
    assert note.startswith("Muon updates transformer.h.1.table.weight, which is an nn.Embedding")

def test_a_buffer_that_hardly_depends_on_the_position_is_noted():
    """For example, the exponent of sinusoidal positions may lack the division by the width."""
    model = torch.nn.Module()
    model.config = types.SimpleNamespace(block_size=64)

    def notes(exponents):
        angles = torch.arange(64)[:, None] * torch.exp(-exponents * math.log(10000.0))
        model.register_buffer("positions", torch.cat((angles.sin(), angles.cos()), dim=1))
        return check_run.notes_about_position_buffers(model)
    assert notes(torch.arange(0, 128, 2) / 128) == []
    note, = notes(torch.arange(0, 128, 2))
    assert "only 2 of its 128 columns are different at different positions" in note
    model.register_buffer("positions", torch.zeros(64, 128))
    assert check_run.notes_about_position_buffers(model) == []

class Model(torch.nn.Module):
    """Logits follow from the last token. generate() may add `skew` to them."""
    def __init__(self, skew=0.0):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(8, 8, generator=torch.manual_seed(0)))
        self.skew = skew * torch.arange(8.0)
        self.config = types.SimpleNamespace(block_size=6)

    def forward(self, idx):
        assert idx.size(1) <= self.config.block_size
        return self.table[idx], None

    def generate(self, idx, n, temperature=1.0, top_k=None):
        for _ in range(n):
            logits = self(idx[:, -6:])[0][:, -1] + self.skew
            if temperature == 0:
                token = logits.argmax(-1, keepdim=True)
            else:
                token = torch.multinomial((logits / temperature).softmax(-1), 1)
            idx = torch.cat((idx, token), 1)
        return idx

@torch.no_grad()
def test_samples_are_compared_with_the_model():
    """A generate() with other logits is found by its greedy tokens, also if the model's context is
    shorter than the text."""
    for prompt in ([[1, 2, 3], [4, 5, 6]], [[1, 2, 3, 4, 5], [1] * 5]):
        prompt = torch.tensor(prompt)
        assert check_run.sample_problem(Model(), prompt, 4, 6, tolerance=1e-4) is None
        found = check_run.sample_problem(Model(skew=1.0), prompt, 4, 6, tolerance=1e-4)
        assert found[0] == "generate(temperature=0) differs from the arg max of model(idx)"

class WithContext(Model):
    """The first token of the context has a small influence. generate() may take the wrong one."""
    def __init__(self, wrong):
        super().__init__()
        self.mix = torch.nn.Parameter(0.16 * self.table.detach().roll(3, 0))
        self.wrong = wrong

    def forward(self, idx, first=None):
        first = idx[:, :1] if first is None else first
        return self.table[idx] + self.table[first] @ self.mix @ self.mix @ self.mix, None

    def generate(self, idx, n, temperature=1.0, top_k=None):
        for _ in range(n):
            first = idx[:, :1] if self.wrong else None  # a token that has left the context
            token = self(idx[:, -6:], first)[0][:, -1].argmax(-1, keepdim=True)
            idx = torch.cat((idx, token), 1)
        return idx

@torch.no_grad()
def test_a_wrong_context_is_found_with_larger_weights():
    """A token outside of the context changes no arg max, unless the weights are multiplied."""
    x = torch.arange(12).view(2, 6) % 8
    for wrong in (False, True):
        model = WithContext(wrong)
        assert check_run.sample_problem(model, x, 6, 6, 1e-4) is None
        problem = check_run.sample_problem_if_sharpened(model, x, 6, 1e-4)
        assert (problem is not None) is wrong
    assert "multiplied by 4" in problem[1]
    broken = Model()
    broken.table *= math.nan
    assert check_run.sample_problem_if_sharpened(broken, x, 6, 1e-4) is None

@torch.no_grad()
def test_logits_that_depend_on_later_tokens_are_found():
    """Only a model that looks ahead is reported, also if it draws random numbers. A model with a
    counter cannot be checked."""
    table, calls = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), []
    models = {
        "causal": lambda idx: table[idx].cumsum(1),
        "noise": lambda idx: table[idx] + torch.randn(1),
        "ahead": lambda idx: table[idx] + 0.01 * table[idx].roll(-1, 1),
        "mean": lambda idx: table[idx] / table[idx].norm(dim=1, keepdim=True),
        "groups of 4": lambda idx: table[idx] + table[idx].view(2, 4, 8).flip(1).view(1, 8, 8),
        "counter": lambda idx: table[idx] + (calls.append(1) or len(calls))}
    x = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0]])
    found = {name: check_run.leak_problem(lambda idx: (model(idx), None), x, tolerance=1e-5)
             for name, model in models.items()}
    assert found["causal"] is None and found["noise"] is None
    assert "1 of the 4 positions before them change, the first at position 3" in found["ahead"][1]
    assert "4 of the 4 positions" in found["mean"][1]
    assert "1 of the 1 positions" in found["groups of 4"][1]
    assert "called again" in found["counter"]

@torch.no_grad()
def test_logits_that_depend_on_the_length_of_a_row_are_found():
    """A model that draws random numbers cannot be compared."""
    table = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    models = {
        "causal": lambda idx: table[idx].cumsum(1),
        "noise": lambda idx: table[idx] + torch.randn(1),
        "from the end": lambda idx: table[idx] + torch.arange(idx.size(1), 0, -1)[None, :, None]}
    x = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0]])
    found = {name: check_run.length_problem(lambda idx: (model(idx), None), x, tolerance=1e-4)
             for name, model in models.items()}
    assert found["causal"] is None and found["noise"] is None
    assert "model(x[:, :4]) differs from model(x)[:, :4] by up to 4" in found["from the end"][1]

class Shifted(torch.nn.Module):
    """A model whose loss may have a second term, with the targets that shift(targets) returns."""
    def __init__(self, shift):
        super().__init__()
        self.transformer = torch.nn.ModuleDict({"wte": torch.nn.Embedding(8, 8)})
        self.shift = shift

    def forward(self, idx, targets):
        logits = self.transformer.wte(idx).cumsum(1).transpose(1, 2)  # (B, n_vocab, T)
        loss = torch.nn.functional.cross_entropy(logits, targets)
        shifted = self.shift(targets)
        n = shifted.size(1)
        return None, loss + torch.nn.functional.cross_entropy(logits[..., :n], shifted)

def test_targets_that_are_predicted_from_inputs_after_them_are_noted():
    """roll() moves the first target to the end of the row. Without it, there is no note."""
    tokens = torch.arange(18).view(2, 9) % 8
    x, y = tokens[:, :-1], tokens[:, 1:]
    for shift, n in ((lambda y: y[:, 1:], 0), (lambda y: y.roll(-1, 1), 8),
                     (lambda y: torch.cat((y[:, 1:], torch.full((2, 1), -100)), 1), 0)):
        notes = check_run.notes_about_targets(Shifted(shift), x, y)
        assert len(notes) == (n > 0)
    roll, = check_run.notes_about_targets(Shifted(lambda y: y.roll(1, 1)), x, y)
    assert "from later inputs (at position 1 and perhaps others)" in roll
    assert check_run.notes_about_targets(torch.nn.Linear(1, 1), x, y) == []
    ignored = y.clone()
    ignored[:, 0] = -100
    assert check_run.notes_about_targets(Shifted(lambda y: y.roll(-1, 1)), x, ignored) == []
    # A model that draws random numbers from a generator of its own
    noisy, generator = Shifted(lambda y: y[:, 1:]), torch.Generator().manual_seed(0)
    noisy.transformer.wte.register_forward_hook(
        lambda module, args, output: output + torch.randn(output.shape, generator=generator))
    assert check_run.notes_about_targets(noisy, x, y) == []

def test_a_loss_that_selects_tokens_gives_no_note_on_targets():
    """If the first target changes, other tokens may be selected."""
    def select(model, idx, targets):
        torch.manual_seed(int(targets[0, 0]))
        logits = model.transformer.wte(idx)
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets,
                                                   reduction="none")
        return None, (losses * (torch.rand(losses.shape) < 0.5)).mean()
    x = torch.randint(8, (20, 4), generator=torch.Generator().manual_seed(0))
    with mock.patch.object(Shifted, "forward", select):
        assert check_run.notes_about_targets(Shifted(None), x, x) == []

def test_padding_that_is_trained_is_noted():
    """The rows are 0 unless the loss uses their logits, or an edit draws them."""
    model = train_gpt2.GPT(train_gpt2.GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8))
    assert check_run.notes_about_padding(model) == []
    model.transformer.wte.weight.data[-1, 3] = 0.1
    note, = check_run.notes_about_padding(model)
    assert note.startswith("the 47 rows of transformer.wte.weight")

def test_a_note_on_the_loss_does_not_depend_on_other_notes():
    """An error in one of the three functions leaves out its own note only."""
    def model(x, y):
        logits = torch.zeros(*x.shape, 8, requires_grad=True)
        return logits, 9 * torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    tokens = torch.arange(18).view(2, 9) % 8
    with mock.patch.object(check_run, "notes_about_targets", side_effect=RuntimeError):
        note, = check_run.notes_in_training_mode(model, tokens, tokens, leaks=False)
    assert note.startswith("the training loss of two rows is 18.7")

@pytest.mark.parametrize("term, n", [
    (lambda logits: 0.0, 0),
    (lambda logits: 1e-4 * (logits.logsumexp(-1) ** 2).mean(), 0),
    (lambda logits: 1e-4 * logits.logsumexp(-1).mean() ** 2, 1),
    (lambda logits: 1e-4 * torch.rand(()), 0),
    (lambda logits: 1e-4 * logits.to(torch.float32).logsumexp(-1).mean(), 0),
    (lambda logits: F.cross_entropy(logits.to(dtype=torch.float32).flatten(0, 1),
                                    torch.zeros(len(logits) * 32, dtype=torch.long)), 0)])
def test_a_term_over_the_rows_of_a_micro_batch_is_noted(term, n):
    """Rounding, random numbers and masked targets give no note."""
    class Model(train_gpt2.GPT):
        def forward(self, idx, targets=None, return_logits=True):
            logits, loss = super().forward(idx, targets)
            return logits, loss + term(logits)
    config = train_gpt2.GPTConfig(block_size=32, n_vocab=257, n_layer=2, n_head=2,
                                  n_embd=32)
    model = Model(config, seed=1)
    for p in model.parameters():
        p.data *= 3
    for seed in range(5):
        tokens = torch.randint(257, (2, 33), generator=torch.Generator().manual_seed(seed))
        x, y = tokens[:, :-1], tokens[:, 1:].clone()
        if not term(torch.zeros(2, 32, 257)):  # the terms are means over all positions
            y[0, :seed] = -100
        loader = types.SimpleNamespace(batch=lambda *_: (x, y))  # noqa: B023
        run = types.SimpleNamespace(state=types.SimpleNamespace(raw_model=model),
                                    val_loader=loader, device=torch.device("cpu"))
        notes = check_run.notes_about_rows_together(run)
        assert len(notes) == n and all("has a term over the rows" in note for note in notes)
    assert not model.training and model.lm_head.weight.dtype == torch.float32

def test_gradients_of_zeros_are_noted():
    assert check_run.notes_about_zeros(set()) == []
    note, = check_run.notes_about_zeros({"wte", "wpe"})
    assert note.startswith("the gradient of wpe, wte is 0 in some steps (2 in all)")

def test_targets_that_are_not_the_next_tokens_are_noted():
    """Masked targets, a few noisy inputs and targets of other shapes give no note."""
    tokens = torch.arange(18).view(2, 9)
    x, y = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    share = check_run.share_of_shifted_rows
    assert share(x, y) == share(x, y.masked_fill(y < 9, -100)) == 1.0
    assert share(x.roll(1, 0), y) == share(x[:, :4], y[:, -4:]) == 0.0
    assert share(torch.stack((x[0], x[0])), y) == 0.5
    x[1, 3] = 0
    assert share(x, y) == share(x) == share(x, y[:, :4]) == 1.0
    assert check_run.notes_about_shifts([]) == check_run.notes_about_shifts([1.0, 1.0]) == []
    note, = check_run.notes_about_shifts([1.0, 0.75])
    assert "only 75% of the rows" in note

def test_counters_that_grow_too_fast_are_noted():
    state = types.SimpleNamespace(step=3, tokens=9000, n=40, flag=True, name="a")
    assert check_run.integers_of(state) == {"n": 40}
    assert check_run.notes_about_counters({"n": 20}, state, 20) == []
    note, = check_run.notes_about_counters({"n": 0}, state, 20)
    assert note.startswith("State.n grows from 0 to 40 in 20 steps")

def test_a_note_that_raises_an_error_is_left_out():
    """An edit may change what a note looks at. The check and the other notes go on."""
    assert check_run.noted(lambda value: [value], "a note") == ["a note"]
    assert check_run.noted(check_run.notes_about_counters, {}, None, 20) == []

def test_operations_over_other_dimensions_are_noted(monkeypatch):
    """The last dimension gives no note, and neither do operations outside of the scripts."""
    monkeypatch.setattr(check_run, "SCRIPTS", ROOT / "tests")  # so that the lambdas here count
    x = torch.rand(2, 3, 4)
    for operation, text in (
            (lambda x, y: x.logsumexp(1), "logsumexp() works over dimension 1 of a tensor"),
            (lambda x, y: torch.nn.functional.normalize(x), "normalize() works over dimension 1"),
            (lambda x, y: x.softmax(dim=-2), "softmax() works over dimension -2"),
            (lambda x, y: torch.nn.functional.normalize(x, dim=2), ""),
            (lambda x, y: x.log_softmax(-1).sum(1), "")):
        notes = check_run.notes_about_dimensions(operation, x, None)
        assert len(notes) == bool(text) and text in "".join(notes)

def test_matrices_with_few_gradients_are_noted():
    """An embedding gets gradients only for the tokens that occur.

    An optimizer may also have parameters that do not belong to the model.
    """
    model = torch.nn.Sequential(torch.nn.Embedding(9, 2), torch.nn.Linear(2, 2, bias=False))
    others = [torch.nn.Parameter(torch.ones(n)) for n in (1, 2)]
    optimizer = torch.optim.SGD([*others, *model.parameters()], lr=1.0)
    for p in others:
        p.grad = torch.ones(len(p))
    run = types.SimpleNamespace(state=types.SimpleNamespace(
        raw_model=model, optimizers=[optimizer], step=0))
    nonzero, _, _ = check_run.watch_gradients(run)
    for column in (0, 1):
        model.zero_grad()
        model(torch.tensor([1]))[:, column].sum().backward()
        model[1].weight.grad[1] = 0
        optimizer.step()
    assert check_run.notes_about_elements(model, nonzero) == []  # half of the elements
    nonzero["1.weight"][0, 0] = False
    note, = check_run.notes_about_elements(model, nonzero)
    assert note.startswith("only 25.0% of the elements of 1.weight got a gradient other than 0 (1")

def test_metrics_with_the_same_value_in_all_steps_are_noted():
    log = {(0, "train"): "2.0", (1, "train"): "2.1", (0, "ratio"): "0.0", (9, "ratio"): "0.0",
           (4, "val"): "1.0"}
    assert check.notes_about_constants(log) == ["ratio is 0.0 in all steps."]

def test_two_metrics_with_the_same_values_are_noted():
    """Perhaps one of them was kept in a cache. Two constants are not noted, nor one equal step."""
    log = {(0, "val"): "2.0", (9, "val"): "1.0", (0, "new"): "2.0", (5, "new"): "3.0",
           (9, "new"): "1.0", (0, "a"): "0.0", (9, "a"): "0.0", (0, "b"): "0.0", (9, "b"): "0.0",
           (0, "hella"): "2.0"}
    note, = check.notes_about_equal_metrics(log)
    assert note.startswith("val and new are the same digit for digit in 2 steps.")

@pytest.mark.parametrize("limit, measure, n", [
    (1.0, lambda model: model.weight.grad.norm(), 1),
    (1.0, lambda model: torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]), 1),
    (1.0, lambda model: (model.bias.grad ** 2).sum(), 1),
    (1.0, lambda model: model.weight.norm(), 0),           # a norm of weights
    (9.0, lambda model: model.weight.grad.norm(), 0)])     # gradients that were not clipped
def test_norms_that_are_measured_after_clipping_are_noted(monkeypatch, limit, measure, n):
    """A norm that is measured before clipping, or by the optimizer, gives no note."""
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", torch.nn.utils.clip_grad_norm_)
    model = torch.nn.Linear(2, 1)

    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            model.weight.grad.norm()
            super().step()
    optimizer = Mine(model.parameters(), lr=0.1)

    def train_step(run):
        for p in model.parameters():
            p.grad = torch.full_like(p, 2.0)
            p.grad.norm()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        measure(model)
        optimizer.step()
        return 0.0, norm
    script = types.SimpleNamespace(train_step=train_step)
    state = types.SimpleNamespace(raw_model=model, optimizers=[optimizer])
    *_, measured = check_run.watch_clipping(script, state)
    for _ in range(2):
        script.train_step(None)
    notes = check_run.notes_about_clipped_norms(measured)
    assert len(notes) == n and all("after clip_grad_norm_()" in note for note in notes)

def test_validation_sets_are_those_that_are_read():
    """An edited validation_loss() may return what it has kept, without reading the given loader."""
    class Loader:
        shards = ()
        def read(self):
            return 4
    script = types.SimpleNamespace(DataLoaderLite=Loader,
                                   validation_loss=lambda run, loader: run or loader.read())
    found = check_run.watch_validation(script)
    one, two, other = Loader(), Loader(), types.SimpleNamespace(shards=(), read=lambda: 5)
    assert script.validation_loss(2, loader=one) == 2 and found == []
    assert script.validation_loss(0, two) == script.validation_loss(0, two) == 4 and found == [two]
    assert script.validation_loss(0, other) == 5 and found == [two, other]

def test_parameters_that_a_forward_pass_changes_are_noted():
    """In quantization-aware training, the rounded values must not replace the weights."""
    def rounded(weight):
        weight.round_(decimals=2)

    def new_model(*_, edited=False):
        model = one_layer()
        if edited:
            layer = model.transformer.h[0].mlp.c_fc
            layer.register_forward_pre_hook(lambda *_: rounded(layer.weight.data))
        return model
    run = types.SimpleNamespace(
        cfg=None, device=torch.device("cpu"), state=types.SimpleNamespace(raw_model=one_layer()),
        val_loader=mock.Mock(batch=lambda *_: (torch.zeros(1, 16, dtype=torch.long), None)))
    script = types.SimpleNamespace(build_model=new_model)
    assert check_run.notes_about_forward(script, run) == []
    script.build_model = lambda *_: new_model(edited=True)
    note, = check_run.notes_about_forward(script, run)
    assert "eval mode: transformer.h.0.mlp.c_fc.weight (1 in all)" in note

@torch.no_grad()
def test_a_term_that_training_adds_to_the_loss_is_measured_with_its_sign():
    """A researcher can see from the sign whether training minimizes or maximizes the term."""
    x = torch.randint(8, (2, 16))
    model = train_gpt2.GPT(train_gpt2.GPTConfig(
        block_size=16, n_vocab=9, n_layer=1, n_head=2, n_embd=16)).train()
    assert abs(check_run.term_of_loss(model, x, x)) < 1e-6
    forward = model.forward
    model.forward = lambda *args: (forward(*args)[0], forward(*args)[1] - 0.25)
    assert check_run.term_of_loss(model, x, x) == pytest.approx(-0.25, abs=1e-5)

@torch.no_grad()
def test_a_training_loss_that_is_mostly_other_terms_is_noted():
    """A term with the wrong normalization is found, a small one is not."""
    x = torch.randint(8, (2, 16))
    table = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))

    def model(x, y):
        logits = table[x]
        return logits, torch.nn.functional.cross_entropy(logits.transpose(1, 2), y) * factor
    for factor, n in ((1.0, 0), (1.2, 0), (9.0, 1), (0.1, 1)):
        assert len(check_run.notes_about_loss(model, x, x)) == n

class BlockOfTwo(train_gpt2.Block):
    def forward(self, x):
        return x * (x.topk(2).values[..., 1:] < 0)

def test_selections_by_topk_are_found():
    """The unedited model selects nothing. An edit calls topk()."""
    model = train_gpt2.GPT(train_gpt2.GPTConfig(
        block_size=16, n_vocab=9, n_layer=1, n_head=2, n_embd=16))
    x = torch.randint(9, (2, 16))
    assert check_run.selections(model, x, x) == []
    model.transformer.h[0].__class__ = BlockOfTwo
    assert check_run.selections(model, x, x) == ["topk"]

class BlockOfDetached(train_gpt2.Block):
    def forward(self, x):
        return x + self.mlp(self.ln_2(x.detach()))

def test_a_gradient_that_is_not_the_derivative_of_the_loss_is_noted():
    """A detach() hides an influence from the gradient. Dropout and a frozen layer do not."""
    model = train_gpt2.GPT(train_gpt2.GPTConfig(
        block_size=16, n_vocab=9, n_layer=2, n_head=2, n_embd=16, dropout=0.2))
    model.train().transformer.wpe.weight.requires_grad = False
    x, y = torch.randint(9, (2, 2, 16))
    for p in model.parameters():
        p.data.mul_(10)  # so that the blocks have an influence
    assert check_run.notes_about_derivatives(model, x, y) == []
    assert all(p.dtype == torch.float32 and p.grad is None for p in model.parameters())
    model.transformer.h[1].__class__ = BlockOfDetached
    note, = check_run.notes_about_derivatives(model, x, y)
    assert "the gradient is not the derivative" in note and " parameters. Usual reasons" in note

@torch.no_grad()
def test_tokens_just_before_that_have_no_influence_are_noted():
    """A model with a mask that is shifted by two does not see the last two tokens."""
    table = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    x = torch.arange(16).view(2, 8) % 8
    assert check_run.notes_about_context(lambda idx: (table[idx].cumsum(1), None), x) == []
    note, = check_run.notes_about_context(lambda idx: (table[idx].cumsum(1).roll(2, 1), None), x)
    assert "of the 8 tokens in a row, the logits at the last one do not depend on token 7, 6" in (
        note)
    note, = check_run.notes_about_context(lambda idx: (table[idx], None), x)
    assert "do not depend on any earlier one, so attention has no effect" in note
    assert check_run.notes_about_context(None, x[:, :7]) == []

def test_a_generate_that_masks_the_wrong_tokens_is_noted():
    """A mask of sorted probabilities belongs to sorted ones. Greedy sampling gives no note."""
    class Sampler(torch.nn.Module):
        config = types.SimpleNamespace(n_vocab=257)

        def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
            probs = self(idx)[0][:, -1].softmax(-1)
            if self.kind == "greedy":
                return probs.argmax(-1, keepdim=True)
            if self.kind != "all":
                values, order = probs.sort(dim=-1, descending=True)
                left_out = values.cumsum(-1) - values > 0.9  # the fourth token and all after it
                if self.kind == "right":
                    left_out = torch.zeros_like(left_out).scatter(1, order, left_out)
                probs = probs.masked_fill(left_out, 0.0)
            return torch.multinomial(probs, 1, generator=generator)
    model = Sampler()
    for model.kind in ("all", "greedy", "right"):
        assert check_run.notes_about_drawn_tokens(model, torch.device("cpu")) == []
    model.kind = "wrong"
    note, = check_run.notes_about_drawn_tokens(model, torch.device("cpu"))
    assert "draws them 0, 0, 0, 0 times in 1000 tries, and other tokens 1000 times" in note
    assert "forward" not in vars(model)

def test_logits_of_the_padding_are_reported():
    """The cross-entropy is computed only if there is one logit for each token id."""
    batch = torch.zeros(2, 4, dtype=torch.int64)
    run = mock.Mock(cfg=mock.Mock(B=2, T=4, val_tokens=8), encoding=mock.Mock(n_vocab=6))
    run.val_loader = mock.Mock(rows_per_epoch=2, batch=lambda *_: (batch, batch))
    logits = torch.zeros(2, 4, 6)
    assert check_run.cross_entropy(run, lambda idx: (logits, None)) == pytest.approx(math.log(6))
    run.encoding.n_vocab = 5
    with pytest.raises(ValueError, match="6 logits per token, but the encoding has 5 ids"):
        check_run.cross_entropy(run, lambda idx: (logits, None))

def test_what_a_checkpoint_lacks_is_named(monkeypatch):
    """Values that change during training, and that no checkpoint holds, are found: attributes of
    modules and optimizers, of their classes and of the training loader, fields of Run, globals, and
    generators other than torch's."""
    class Linear(torch.nn.Linear):
        window = 1
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), Linear(1, 1))
    model.register_buffer("kept", torch.zeros(1))
    model.calls, model[1].history, model.teacher = 0, deque([1]), [torch.nn.Linear(1, 1)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.count = 0
    state = types.SimpleNamespace(raw_model=model, optimizers=[optimizer])
    loader = types.SimpleNamespace(generator=np.random.default_rng(0), open_shard=None)
    run = types.SimpleNamespace(state=state, mean=0.0, step_seconds=[], train_loader=loader)
    t = types.SimpleNamespace(NOISE=torch.Generator().manual_seed(0), LIMIT=3)
    monkeypatch.setattr(torch, "Generator", type("Watched", (torch.Generator,), {}))  # see Watched
    before = check_run.unsaved_values(t, run)
    assert check_run.unsaved_values(t, run) == before
    model.kept += 1
    model.calls, run.mean, optimizer.count = 1, 0.5, 2
    model[1].history.append(2)
    run.step_seconds.append(0.1)
    Linear.window, loader.open_shard = 2, 1
    loader.generator.random()
    torch.rand(1, generator=t.NOISE)
    random.random()
    after = check_run.unsaved_values(t, run)
    assert {what for what in after if after[what] != before[what]} == {
        "self.calls in Sequential", "self.history in Linear", "run.mean", "the global NOISE",
        "self.count in SGD", "the generator of the module random", "Linear.window",
        "generator in the training loader"}

def test_the_error_of_a_run(tmp_path):
    """The script's own line is shown if a run fails, and otherwise the end of the traceback."""
    (tmp_path / "err_0.txt").write_text(
        "Traceback (most recent call last):\n"
        f'  File "{check_run.SCRIPTS}/train_gpt2.py", line 7, in forward\n    a[1]\n    ~~^^\n'
        '  File "torch.py", line 9, in get\n    return b\nKeyError: 1\n')
    assert check.error_of(tmp_path, 1) == "train_gpt2.py, line 7, in forward: a[1]\nKeyError: 1"
    (tmp_path / "err_1.txt").write_text("noise\ntrain_gpt2.py: Out of memory.\nnoise\n")
    assert check.error_of(tmp_path, 1) == "train_gpt2.py: Out of memory."
    (tmp_path / "err_0.txt").write_text("  what(): Connection reset\n")
    (tmp_path / "err_1.txt").unlink()
    assert check.error_of(tmp_path, 1) == "Connection reset"
    (tmp_path / "err_0.txt").unlink()
    assert "status -9" in check.error_of(tmp_path, -9)

def test_a_run_is_killed_after_its_checkpoint(tmp_path):
    """The process ends in the step that is named, and not before the checkpoint is there, however
    late it is written."""
    code = ("import sys, threading, types; from pathlib import Path\n"
            f"sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
            "import check_run, torch\n"
            "folder, model = Path(sys.argv[1]), torch.nn.Linear(1, 1)\n"
            "state = types.SimpleNamespace(step=0, raw_model=model)\n"
            "run = types.SimpleNamespace(state=state, cfg=types.SimpleNamespace(log_dir=folder))\n"
            "check_run.kill_during_step(run, 3, 2)\n"
            "threading.Timer(0.5, (folder / 'checkpoint_00002.pt').touch).start()\n"
            "for state.step in range(9):\n"
            "    with torch.no_grad():\n"
            "        model(torch.ones(1))\n"
            "    model(torch.ones(1))\n"
            "    (folder / 'step').write_text(str(state.step))\n")
    done = subprocess.run([sys.executable, "-c", code, tmp_path], timeout=180)
    assert done.returncode == check_run.KILLED
    assert (tmp_path / "step").read_text() == "2"
    assert (tmp_path / "checkpoint_00002.pt").exists()

def watched(module):
    """Return a model made of a module, the report on its forward passes, and its rows."""
    model, report = torch.nn.Sequential(module), {}
    run = types.SimpleNamespace(device=torch.device("cpu"), train_loader=None,
                                state=types.SimpleNamespace(raw_model=model))
    return model, report, check_run.watch_forward_passes(run, report)

def test_random_draws_in_training_are_noticed():
    """forward() draws from torch's generator with dropout, but not without it, and not during
    evaluation. Draws without a gradient are recorded separately."""
    for p, training, expected in ((0.5, True, True), (0.0, True, False), (0.5, False, False)):
        model, report, _ = watched(torch.nn.Dropout(p))
        model.train(training)
        model(torch.ones(2, 1))
        assert (report["draws"], report["draws_without_grad"]) == (expected, False)
        with torch.no_grad():
            model(torch.ones(2, 1))
        assert (report["draws"], report["draws_without_grad"]) == (expected, expected)
        assert not report["seeds"]

def test_a_seed_in_forward_is_noticed():
    """torch.manual_seed() in forward() is recorded, but not a generator of its own."""
    for own, expected in ((True, False), (False, True)):
        def draw(module, args):
            if own:
                torch.Generator().manual_seed(7)
            else:
                torch.manual_seed(7)
        torch.manual_seed(1)
        model, report, _ = watched(torch.nn.Identity())
        model[0].register_forward_pre_hook(draw)
        model(torch.ones(2, 1))
        assert report["seeds"] is expected

def test_the_tokens_that_the_embedding_gets_in_training_are_counted():
    """Ids in passes with gradient are counted, and their first 16 rows are kept."""
    embedding = torch.nn.Embedding(9, 1)
    model = torch.nn.ModuleDict({"transformer": torch.nn.ModuleDict({"wte": embedding})})
    model.forward = lambda idx: embedding(idx[:, :2])
    report = {}
    run = types.SimpleNamespace(device=torch.device("cpu"), train_loader=None,
                                state=types.SimpleNamespace(raw_model=model))
    rows = check_run.watch_forward_passes(run, report)
    idx = torch.arange(60).view(20, 3) % 9
    model(idx)
    with torch.no_grad():
        model(idx)
    assert report["embedded"] == 40
    assert len(rows) == 16 and rows[1].tolist() == [3, 4, 5]

def test_training_rows_that_are_validation_data_are_found(tmp_path):
    """A row is found at any token of the validation data, and files that are used for both."""
    val = np.arange(5000, dtype=np.uint16)
    def in_both(train, val, rows):
        run = types.SimpleNamespace(train_loader=types.SimpleNamespace(shards=train),
                                    cfg=types.SimpleNamespace(T=16))
        loader = types.SimpleNamespace(shards=val)
        return check_run.training_and_validation(train_gpt2, run, loader, rows)
    rows = [np.arange(start, start + 32) for start in (0, 7, 4968, 4969, 6000)]
    short = np.arange(31)
    found = in_both([val], [val], [*rows, short])
    assert (found["files"], found["rows"], found["equal_rows"]) == ([], 5, 3)
    assert found["val_rows"] == found["equal_val_rows"] == 50 and found["only_val_rows"] == 0
    assert in_both([val + 6000], [val], rows)["only_val_rows"] == 3
    assert in_both([val + 6000, val], [val], rows)["only_val_rows"] == 0  # not all are compared
    assert in_both([val[:2500]], [val], [])["equal_val_rows"] == 25
    assert in_both([val + 6000, val], [val], [])["equal_val_rows"] == 50  # in the second shard
    assert in_both([val + 6000, val[::-1]], [val], [])["equal_val_rows"] == 50  # read backwards
    one, two = tmp_path / "1.npy", tmp_path / "2.npy"
    np.save(one, val)
    np.save(two, val + 1)
    assert in_both([one, two], [two], [])["files"] == [str(two)]
    assert in_both([one], [two], [])["files"] == []

def test_a_second_validation_set_that_is_trained_on_is_noted():
    """Either the rows of training are found in it, or its rows in the training data."""
    assert check_run.notes_about_validation(BOTH) == []
    note, = check_run.notes_about_validation(BOTH | {"equal_rows": 3})
    assert note.endswith("trained: 3 of 40 training rows are part of it.")
    note, = check_run.notes_about_validation(BOTH | {"equal_val_rows": 11})
    assert "trained: 11 of 50 rows of one of its loaders are part of the training data." in note

def test_ids_are_part_of_a_text_only_at_the_beginning_of_an_id():
    """The search ends, also for ids that occur only between the beginnings of ids."""
    text = np.array([1, 256, 1], dtype=np.uint32).tobytes()
    for ids, expected in (([1, 256], True), ([256, 1], True), ([2], False), ([1, 1], False)):
        assert check_run.is_part(np.array(ids, dtype=np.uint32).tobytes(), text) is expected
    between = np.array([1 << 16], dtype=np.uint32).tobytes()  # 0, 0, 1, 0: within 1, 256
    assert text.find(between) % 4 and not check_run.is_part(between, text)

def test_processes_that_wait_for_each_other_are_stopped(tmp_path):
    """A run whose log no longer grows is stopped, and the error says so."""
    waiting = check.FORKED.Process(target=time.sleep, args=(600,))
    with contextlib.closing(check.Laboratory(workers=1)) as lab:
        with pytest.raises(check.Failed, match="wait for each other"):
            lab.status_of([waiting], tmp_path / "log.txt", patience=0.5)
    assert not waiting.is_alive()

def test_if_one_of_two_processes_fails_the_other_one_is_stopped(tmp_path):
    """The exit status is that of the process that failed."""
    waiting = check.FORKED.Process(target=time.sleep, args=(600,))
    failing = check.FORKED.Process(target=os._exit, args=(3,))
    with contextlib.closing(check.Laboratory(workers=1)) as lab:
        assert lab.status_of([waiting, failing], tmp_path / "log.txt", patience=600) == 3
    assert not waiting.is_alive()

# ----------------------------------------------------------------- notes on slow or wrong learning
def test_a_loss_that_hardly_falls_is_noted(tmp_path):
    """It is compared with the loss of the committed version. Without one, there is no note."""
    def notes(last, no_committed=""):
        base = {(0, "val"): "5.5", (4, "val"): last}
        committed = {(0, "val"): "5.5", (4, "val"): "3.5"}
        return stub_check(tmp_path, no_committed, base=(base, {}),
                          committed=(committed, {})).notes_about_progress()
    assert notes("4.0") == notes("3.0") == notes("5.0", "no git") == []
    note, = notes("4.2")
    assert note.startswith("after 4 steps, val is 4.20, and 3.50 without the edit (before the fir")

def test_values_in_state_that_differ_between_processes_are_noted(tmp_path):
    checking = stub_check(tmp_path, two=({}, dict(state_differs=["mean_loss"])))
    note, = checking.notes_about_processes()
    assert note.startswith("State.mean_loss is not the same in both processes")
    checking.plan.no_processes = "one core"
    assert checking.notes_about_processes() == []

def test_attributes_of_state_that_differ_between_processes_are_found(monkeypatch):
    """The time and what torch synchronizes are left out."""
    def gather(everyones, mine):
        assert mine.keys() == {"mean", "norms"}
        everyones[:] = [mine, dict(mine, mean="2.0")]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    content = {"raw_model": {}, "minutes_trained": 1.0, "mean": 1.0, "norms": [torch.ones(2)]}
    state = types.SimpleNamespace(state_dict=lambda: content)
    assert check_run.differs_between_processes(state) == ["mean"]

def test_small_differences_of_a_metric_are_compared_with_its_noise(tmp_path):
    """A metric that rounding changes by as much gives no note."""
    def notes(nudged):
        runs = {name: ({(3, "ppl"): value}, {}) for name, value in
                (("base", "50.0"), ("half", "50.1"), ("two", "50.1"), ("nudged", nudged))}
        return stub_check(tmp_path, **runs).notes_about_metrics()
    assert len(notes("50.1")) == 1 and notes("50.12") == []

def test_targets_that_are_not_in_the_text_are_noted():
    """Rows of shards and of large texts, and rows with ignored targets, are not looked up."""
    text = np.arange(4000, dtype=np.uint16)
    loader = types.SimpleNamespace(shards=[text])
    y = torch.arange(96).view(2, 48)
    count = check_run.rows_of_new_targets
    assert count(loader, y, y) == (0, 2)
    assert count(loader, y, y.flip(1)) == (2, 2)
    assert count(loader, y, y.masked_fill(y == 50, -100)) == (0, 1)
    assert count(loader, y) == count(types.SimpleNamespace(shards=[text, text]), y, y) == (0, 0)
    large = np.zeros(check_run.MOST_TOKENS + 1, dtype=np.uint16)
    assert count(types.SimpleNamespace(shards=[large]), y, y) == (0, 0)
    assert check_run.notes_about_new_targets(0, 9) == check_run.notes_about_new_targets(0, 0) == []
    note, = check_run.notes_about_new_targets(2, 9)
    assert note.startswith("the targets of 2 of 9 rows are not part of the training text")

@pytest.fixture(name="tokens")
def random_tokens():
    return torch.randint(257, (4, 128), generator=torch.Generator().manual_seed(0))

def one_layer(positions="learned"):
    """Return a GPT with one layer that has positions of some kind, right or wrong."""
    config = train_gpt2.GPTConfig(block_size=128, n_vocab=257, n_layer=1, n_head=2,
                                  n_embd=128)
    model = train_gpt2.GPT(config, seed=1)
    if positions == "learned":
        return model
    model.transformer.wpe.weight.data.zero_()
    attention, (n_head, dim) = model.transformer.h[0].attn, (2, 64)
    position = torch.arange(128)
    angles = position[:, None] * 100.0 ** -(torch.arange(dim // 2) / (dim // 2))  # (T, dim / 2)
    interleaved = positions == "RoPE with two layouts"
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)

    def rotated(x):
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    def forward(x):
        B, T, C = x.shape
        q, k, v = attention.c_attn(x).view(B, T, 3, n_head, dim).permute(2, 0, 3, 1, 4)
        bias = None
        if positions.startswith("RoPE"):
            q, k = rotated(q), rotated(k)
            if positions.endswith("temperature"):
                q = q * (position[:, None] + 2).log()
        elif positions != "none":
            distance = position[:, None] - position
            bias = (0.1 if positions == "ALiBi with a wrong sign" else -0.1) * distance
            bias = bias.masked_fill(distance < 0, -math.inf)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None)
        return attention.c_proj(y.transpose(1, 2).reshape(B, T, C))
    attention.forward = forward
    return model

@pytest.mark.usefixtures("is_gpt2")
@pytest.mark.parametrize("positions, number", [
    ("learned", 0), ("RoPE", 0), ("RoPE and a temperature", 0), ("ALiBi", 0), ("none", 1),
    ("RoPE with two layouts", 3),
    ("ALiBi with a wrong sign", 2)])
def test_wrong_positions_are_noted(positions, number, tokens):
    """Each kind of mistake has a note of its own, and right positions have none."""
    notes = (check_run.notes_about_order, check_run.notes_about_distance,
             check_run.notes_about_rotation)
    same = tokens[:1, :1].expand(1, 128)
    for i, note in enumerate(notes, 1):
        found = note(one_layer(positions), same if i == 3 else tokens)
        assert len(found) == (i == number), (positions, i, found)

@pytest.mark.usefixtures("is_gpt2")
def test_positions_are_looked_at_in_a_model_with_one_layer(tokens):
    """The model of the run may have more layers, and is not changed."""
    config = train_gpt2.GPTConfig(block_size=128, n_vocab=257, n_layer=2, n_head=2,
                                  n_embd=128)
    model = train_gpt2.GPT(config)
    before = check_run.crc_of(model.transformer.wpe.weight)
    run = types.SimpleNamespace(
        state=types.SimpleNamespace(raw_model=model), device=torch.device("cpu"),
        cfg=train_gpt2.Config(), val_loader=mock.Mock(batch=lambda *args: (tokens, tokens)))
    assert check_run.notes_about_positions(train_gpt2, run) == []
    assert check_run.crc_of(model.transformer.wpe.weight) == before

    def model_without_positions(config, seed):
        assert config.n_layer == 1
        return one_layer("none")
    note, = check_run.notes_about_positions(mock.Mock(GPT=model_without_positions), run)
    assert note.startswith("in a model with one layer, the order of the earlier tokens has no")

@pytest.mark.usefixtures("is_gpt2")
def test_branches_that_are_dropped_without_scaling_are_noted(tokens):
    """Stochastic depth that scales up the branches that are left gives no note."""
    class Block(train_gpt2.Block):
        keep, factor = 0.9, 1.0  # in training

        def forward(self, x):
            y = super().forward(x)
            return x + self.factor * (torch.rand(()) < self.keep) * (y - x) if self.training else y
    config = train_gpt2.GPTConfig(block_size=128, n_vocab=257, n_layer=3, n_head=2,
                                  n_embd=32)
    run = types.SimpleNamespace(
        state=types.SimpleNamespace(raw_model=types.SimpleNamespace(config=config)),
        device=torch.device("cpu"), cfg=train_gpt2.Config(),
        val_loader=mock.Mock(batch=lambda *args: (tokens, tokens)))
    with mock.patch.object(train_gpt2, "Block", Block):
        assert check_run.notes_about_modes(train_gpt2, run, 0.0, True) == []
        note, = check_run.notes_about_modes(train_gpt2, run, 1.0, True)
        assert note.startswith("in training mode, the blocks of a new model add on average only ")
        Block.factor = 1 / 0.9
        assert check_run.notes_about_modes(train_gpt2, run, 1.0, True) == []
        Block.keep, Block.factor = 1.0, 0.5
        note, = check_run.notes_about_modes(train_gpt2, run, 1.0, False)
    assert "differ by up to 1, although the model draws no random numbers" in note

def test_epochs_in_the_same_order_are_noted():
    """The order of a text is compared without the shift of its pieces."""
    loader = train_gpt2.DataLoaderLite([np.zeros(999, np.uint16)], T=9, shuffle=True, recut=True)
    run = types.SimpleNamespace(train_loader=loader, cfg=train_gpt2.Config())
    assert check_run.notes_about_epochs(train_gpt2, run) == []
    with mock.patch.object(train_gpt2, "order_of",
                           lambda n, shuffle, seed, epoch, *key: np.arange(n)[::-1]):
        note, = check_run.notes_about_epochs(train_gpt2, run)
    assert note.startswith("epochs 0 and 1 read the training data in the same order")
    run.cfg = train_gpt2.Config(shuffle=False)
    assert check_run.notes_about_epochs(train_gpt2, run) == []

def test_an_epoch_that_repeats_rows_is_noted():
    """The shifted pieces of a text are no repetition."""
    text = np.zeros(9001, np.uint16)
    for recut in (False, True):
        loader = train_gpt2.DataLoaderLite([text, text], T=9, shuffle=True, recut=recut)
        assert check_run.notes_about_rows(loader) == []
    with mock.patch.object(train_gpt2, "order_of",
                           lambda n, shuffle, seed, epoch, *key: np.arange(n) * 2 ** epoch % n):
        note, = check_run.notes_about_rows(loader)
    assert note.startswith("the first 2,000 rows of epoch 1 are only 500 different")

def test_c_attn_that_muon_does_not_split_is_noted():
    """A smaller matrix that is added to c_attn gives no note."""
    def notes(rows, name="h.0.attn.c_attn.weight"):
        weight = torch.nn.Parameter(torch.ones(rows, 4))
        muon = train_gpt2.Muon([(name, weight)], lr=0.1)
        return check_run.notes_about_muon(types.SimpleNamespace(optimizers=[muon]))
    assert notes(12) == []
    assert notes(8, "h.0.attn.c_attn.lora_a") == []
    note, = notes(8)
    assert note.startswith("Muon treats h.0.attn.c_attn.weight, (8, 4), as one matrix")

def test_a_c_attn_that_muon_splits_in_the_wrong_way_is_noted():
    """Its thirds must belong to query, key and value. With AdamW, any order is right."""
    class Interleaved(train_gpt2.CausalSelfAttention):
        def forward(self, x):
            B, T, C = x.shape
            q, k, v = self.c_attn(x).view(B, T, self.n_head, 3, C // self.n_head).unbind(3)
            y = torch.nn.functional.scaled_dot_product_attention(
                *(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
            return self.c_proj(y.transpose(1, 2).reshape(B, T, C))

    class OtherOrder(train_gpt2.CausalSelfAttention):
        def forward(self, x):
            B, T, C = x.shape
            v, k, q = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).unbind(2)
            y = torch.nn.functional.scaled_dot_product_attention(
                *(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
            return self.c_proj(y.transpose(1, 2).reshape(B, T, C))
    x = torch.arange(8)[None]
    for attention, optimizer, n in ((train_gpt2.CausalSelfAttention, "muon", 0),
                                    (OtherOrder, "muon", 0),
                                    (Interleaved, "adamw", 0), (Interleaved, "muon", 1)):
        with mock.patch.object(train_gpt2, "CausalSelfAttention", attention):
            model = one_layer()
        optimizers = train_gpt2.configure_optimizers(model, train_gpt2.Config(optimizer=optimizer))
        state = types.SimpleNamespace(raw_model=model, optimizers=optimizers)
        notes = check_run.notes_about_thirds(state, x)
        assert len(notes) == n
    assert notes[0].startswith("queries depend on 2 of the three thirds of transformer.h.0.attn.c_")

def accuracy(logits, y):
    counted = y >= 0
    return ((logits.argmax(-1) == y) & counted).sum() / counted.sum()

@pytest.mark.parametrize("name, measure, says", [
    ("accuracy", accuracy, None),
    ("errors", lambda logits, y: 100 - 100 * accuracy(logits, y), None),
    ("perplexity", lambda logits, y: F.cross_entropy(logits[:3].mT, y[:3]).exp(), None),
    ("accuracy", lambda logits, y: accuracy(logits[:, :-1], y[:, 1:]),
     "for a model that predicts each next token with certainty, but 1 for a model that predict"),
    ("copied", lambda logits, y: accuracy(logits[:, 1:], y[:, :-1]),
     "for a model that predicts each next token with certainty, but 1 for a model that repeats"),
    ("accuracy", lambda logits, y: (logits.argmax(-1) == y).float().mean(),
     "accuracy is 0.75, not 1, for a model that predicts each next token with certainty."),
    ("entropy_of_y", lambda logits, y: y.float().std(), None),
    ("train_acc", lambda logits, y: 0.31, None),
    ("grad_accum_steps", lambda logits, y: 4.0, None),
    ("accuracy", lambda logits, y: math.nan, None),
    ("gap", lambda logits, y: F.cross_entropy(logits[:1].mT, y[:1])  # a difference of losses
     - F.cross_entropy(logits[1:2].mT, y[1:2]), None)])
def test_metrics_that_look_at_the_wrong_token_are_noted(name, measure, says):
    """A metric of something else, which is the same for all models, gives no note."""
    script = types.SimpleNamespace(DataLoaderLite=train_gpt2.DataLoaderLite, finish=None,
                                   print_sample=None, report=None, write_log=None)
    tokens = np.random.default_rng(0).integers(0, 256, 500).astype(np.uint16)
    run = types.SimpleNamespace(
        cfg=train_gpt2.Config(), folder=None, encoding=train_gpt2.get_encoding("bytes"),
        val_loader=script.DataLoaderLite([tokens], 16),
        state=types.SimpleNamespace(eval_model=one_layer(), step=5))

    def train(run):
        assert run.cfg.max_steps == run.state.step
        x, y = run.val_loader.batch(0, 4)
        y[3:] = -100
        logits, loss = run.state.eval_model(x, y)
        script.report(run, 0, "val", loss, print_always=True)
        script.report(run, 0, name, measure(logits, y))
        script.write_log(run, 0, "minutes", 1.0)
        run.folder.save(run.state)
        script.finish(run, False)
    notes = check_run.notes_about_alignment(script, run, train)
    assert len(notes) == bool(says) and all(says in note for note in notes)

def test_batches_that_depend_on_the_length_of_the_run_are_noted():
    cfg = train_gpt2.Config(max_steps=100)
    assert check_run.notes_about_longer_runs(train_gpt2, cfg) == []
    edited = types.SimpleNamespace(rows_before=lambda cfg, step: max(0, step - cfg.max_steps // 2))
    note, = check_run.notes_about_longer_runs(edited, cfg)
    assert note.startswith("rows_before() depends on max_steps.")

def test_a_causal_mask_with_more_keys_than_queries_is_noted():
    x = torch.randn(1, 2, 8, 16)
    more = torch.cat((x[:, :, :1], x), dim=2)
    attention = torch.nn.functional.scaled_dot_product_attention
    for operation, n in ((lambda x, y: attention(x, more, more, is_causal=True), 1),
                         (lambda x, y: attention(x, more, more, None, 0.0, True), 1),
                         (lambda x, y: attention(x, more, more), 0),
                         (lambda x, y: attention(x, x, x, is_causal=True), 0)):
        notes = check_run.notes_about_dimensions(operation, x, None)
        assert len(notes) == n and all("with 8 queries and 9 keys" in note for note in notes)

class TwoHeads(torch.nn.Module):
    """A loss with a second head. second(logits, y) returns the logits and targets of its loss."""
    def __init__(self, second):
        super().__init__()
        self.second = second
        self.heads = torch.randn(2, 20, 20, generator=torch.Generator().manual_seed(0))

    def forward(self, x, y):
        cross_entropy, one, two = torch.nn.functional.cross_entropy, *self.heads[:, x]
        cross_entropy(one.flatten(0, 1), y.flatten())
        if self.second:
            logits, targets = self.second(two, y)
            cross_entropy(logits.flatten(0, 1), target=targets.flatten())

@pytest.mark.parametrize("second, n", [
    (None, 0), (lambda logits, y: (logits, y), 1),
    (lambda logits, y: (logits[:, :-1], y[:, :-1]), 1),
    (lambda logits, y: (logits[:, 1:], y[:, 1:]), 1),
    (lambda logits, y: (logits[:, :-1], y[:, 1:]), 0),
    (lambda logits, y: (logits, torch.nn.functional.pad(y[:, 1:], (0, 1), value=-100)), 0)])
def test_a_second_loss_that_predicts_the_same_tokens_is_noted(second, n):
    """A head for the token after the next one must not predict each token from the one before."""
    tokens = torch.arange(12).view(2, 6)
    notes = check_run.notes_about_dimensions(TwoHeads(second), tokens[:, :-1], tokens[:, 1:])
    assert len(notes) == n and all("2 cross-entropies have the next tokens" in x for x in notes)

def test_two_losses_of_the_same_logits_give_no_note():
    """A training loss may replace the usual one, for example to weight the tokens."""
    cross_entropy, y = torch.nn.functional.cross_entropy, torch.arange(10).view(2, 5)
    logits, model = torch.randn(2, 5, 20), torch.nn.Module()
    padded = torch.nn.functional.pad(logits, (0, 4), value=-math.inf)

    def forward(x, y):
        cross_entropy(padded.flatten(0, 1), y.flatten())
        cross_entropy(input=logits.transpose(1, 2), target=y, reduction="none")
    model.forward = forward
    assert check_run.notes_about_dimensions(model, y, y) == []

def test_learning_rates_that_only_one_optimizer_has_are_noted():
    """With Muon, an edit of AdamW's groups does not reach the matrices in the blocks."""
    model = train_gpt2.GPT(train_gpt2.GPTConfig(n_layer=2, n_head=1, n_embd=8, block_size=8))
    cfg = train_gpt2.Config(optimizer="muon")
    optimizers = train_gpt2.configure_optimizers(model, cfg)
    train_gpt2.prepare_groups(optimizers)
    state = types.SimpleNamespace(raw_model=model, optimizers=optimizers)
    assert check_run.notes_about_learning_rates(state) == []
    last = [p for p in model.transformer.h[1].parameters() if p.dim() < 2]
    group = optimizers[0].param_groups[1]
    group["params"] = [p for p in group["params"] if not any(p is other for other in last)]
    optimizers[0].add_param_group(dict(params=last, lr=0.1))
    train_gpt2.prepare_groups(optimizers)
    note, = check_run.notes_about_learning_rates(state)
    assert note.startswith("in the blocks, AdamW has 2 learning rates, but Muon, which trains 8 of")

@pytest.mark.parametrize("steps, replaced", [([0], {"SGD"}), ([1, 2], {"SGD"}), ([], set())])
def test_learning_rates_that_the_next_step_replaces_are_noted(monkeypatch, steps, replaced):
    """An edit may change a learning rate before or after step_optimizers() sets it.

    steps: those before which it is changed, or [] if it is changed after each step.
    """
    original = train_gpt2.step_optimizers

    def edited(state, cfg, norm):
        original(state, cfg, norm)
        state.optimizers[0].param_groups[0]["lr"] *= 0.5
    monkeypatch.setattr(train_gpt2, "step_optimizers", original if steps else edited)
    cfg = train_gpt2.Config()
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=cfg.max_lr)
    state = train_gpt2.State(weight, [optimizer], torch.amp.GradScaler("cpu", enabled=False))
    train_gpt2.prepare_groups([optimizer])
    names = check_run.watch_overwritten_rates(train_gpt2)
    for state.step in range(3):
        if state.step in steps:
            optimizer.param_groups[0]["lr"] *= 0.5
        train_gpt2.step_optimizers(state, cfg, torch.ones(()))
    assert names == replaced
    assert len(check_run.notes_about_overwritten_rates(names)) == len(replaced)

def test_masks_after_a_single_token_are_noted():
    """Masked targets that are one token, which follows various others, are not noted. The same is
    true if this token is masked only after itself."""
    encoding = train_gpt2.get_encoding("bytes")
    x = torch.tensor([10, 10, 11, 10, 12] * 30)
    y = x.roll(-1)
    for masked, n in ((x == 10, 1), (y == 10, 0), ((x == 10) & (y == 10), 0)):
        counts = [Counter(x[mask].tolist()) for mask in (masked, ~masked)]
        assert len(check_run.notes_about_masks(encoding, *counts)) == n

def test_attributes_of_state_that_are_still_zero_are_noted():
    content = {"raw_model": {"w": torch.zeros(2)}, "step": 0, "mean": torch.ones(1),
               "residual": [torch.zeros(2), torch.zeros(3)], "skipped": torch.zeros(1),
               "counts": torch.zeros(2, dtype=torch.int64), "queue": torch.empty(0)}
    note, = check_run.notes_about_zero_attributes(
        types.SimpleNamespace(state_dict=lambda: content))
    assert note.startswith("all elements of State.residual are 0 at the end of training.")

class Router(torch.nn.Module):
    """A model with a router, and with a head whose loss is computed only in training."""
    def __init__(self, uses_gate):
        super().__init__()
        self.table, self.router, self.head = (torch.nn.Linear(4, 4) for _ in range(3))
        self.uses_gate = uses_gate

    def forward(self, x, y):
        gate, more = self.router(x).softmax(-1), self.head(x)
        out = self.table(x) * (gate.argmax(-1, keepdim=True) == 0)
        loss = (out * (gate if self.uses_gate else 1)).square().mean()
        return out, loss + (gate.square().mean() + more.mean() if self.training else 0)

def test_layers_that_only_additional_terms_train_are_noted():
    """A head on which no logit depends gives no note. The weights stay as they were."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    for uses_gate in (True, False):
        torch.manual_seed(0)
        model = Router(uses_gate).eval()
        nonzero = {name: None for name, _ in model.named_parameters()}
        run = types.SimpleNamespace(
            state=types.SimpleNamespace(raw_model=model), device=torch.device("cpu"),
            val_loader=mock.Mock(batch=lambda *args: (x, x)))
        before = copy.deepcopy(model.state_dict())
        notes = check_run.notes_about_auxiliary_gradients(run, nonzero)
        assert len(notes) == (not uses_gate)
        assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert notes[0].startswith("router.weight")

def test_warnings_that_only_the_edit_causes_are_noted(tmp_path):
    text = "/a/b.py:7: UserWarning: reduction: 'mean' is wrong\n  warnings.warn(\nother\n"
    (tmp_path / "err_0.txt").write_text(text * 2)
    assert check.warnings_of(tmp_path) == ["UserWarning: reduction: 'mean' is wrong"]
    checking = stub_check(tmp_path, no_committed="")
    assert checking.notes_about_warnings() == []
    checking.base.warnings.append("UserWarning: x")
    assert checking.notes_about_warnings() == ["Python prints a warning: UserWarning: x"]
    checking.no_committed = "no git"
    assert checking.notes_about_warnings() == []

def test_gradients_with_few_different_values_are_noted():
    """Small parameters are not looked at, because their gradients have few values anyway."""
    model = torch.nn.ModuleList([torch.nn.Linear(64, 32), torch.nn.Linear(64, 32)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = types.SimpleNamespace(state=types.SimpleNamespace(
        raw_model=model, optimizers=[optimizer], step=0))
    _, magnitudes, _ = check_run.watch_gradients(run)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    sign = model[1].weight.sign().detach()
    (model[0](x).square().sum() + (model[1].weight * sign).sum()).backward()
    optimizer.step()
    assert set(magnitudes) == {"0.weight", "1.weight"}
    note, = check_run.notes_about_magnitudes(magnitudes)
    assert note.startswith("the elements of the gradient of 1.weight have only 1 different abs")

def test_learning_rates_that_differ_from_the_schedule_by_a_factor_are_noted():
    """A factor that changes from step to step gives no note."""
    cfg = train_gpt2.Config()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=cfg.max_lr)
    train_gpt2.prepare_groups([optimizer])
    group, = optimizer.param_groups
    for factors, n in (((1.0, 1.0), 0), ((0.5, 0.5), 1), ((0.9, 0.81), 0)):
        run = types.SimpleNamespace(cfg=cfg, state=types.SimpleNamespace(
            optimizers=[optimizer], step=0))
        found = check_run.watch_learning_rates(train_gpt2, run)
        for run.state.step, factor in enumerate(factors):
            group["lr"] = factor * train_gpt2.get_lr(run.state.step, cfg)
            optimizer.step()
        notes = check_run.notes_about_factors(found)
        assert len(notes) == n
    assert found == {"group 0 of SGD": {0.9, 0.81}}
    # An edit may have given get_lr() another argument
    with mock.patch.object(train_gpt2, "get_lr", lambda step, cfg, group: 1.0):
        found = check_run.watch_learning_rates(train_gpt2, run)
        optimizer.step()
    assert found == {}

def test_parameters_that_are_one_object_are_noted():
    """The tied embedding of GPT-2 is one object on purpose."""
    tied = torch.nn.ModuleDict(dict(transformer=torch.nn.ModuleDict(dict(
        wte=torch.nn.Embedding(4, 2))), lm_head=torch.nn.Linear(2, 4, bias=False)))
    tied["lm_head"].weight = tied["transformer"]["wte"].weight
    assert check_run.notes_about_shared_parameters(tied) == []
    tied["gates"] = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1))] * 2)
    note, = check_run.notes_about_shared_parameters(tied)
    assert note.startswith("gates.0, gates.1 are the same parameter")

def test_a_second_copy_of_the_weights_in_an_optimizer_is_noted():
    """Momentum gives no note, and neither does a copy that eval_model may use."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 64)).square().sum().backward()
    optimizer.step()
    state = types.SimpleNamespace(raw_model=model, eval_model=model, optimizers=[optimizer])
    assert check_run.notes_about_second_weights(state) == []
    optimizer.state[model.weight]["z"] = 1.1 * model.weight.detach()
    note, = check_run.notes_about_second_weights(state)
    assert note.startswith("SGD keeps 'z', which is similar to the weights (of weight, for exam")
    state.eval_model = torch.nn.Linear(64, 64)
    assert check_run.notes_about_second_weights(state) == []

def test_attention_that_cannot_become_sharp_is_noted():
    """Normalized queries and keys need a scale. Others can grow."""
    x = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(0))
    attention = torch.nn.functional.scaled_dot_product_attention
    unit = torch.nn.functional.normalize(x, dim=-1)
    for operation, n in ((lambda x, y: attention(unit, unit, x), 1),
                         (lambda x, y: attention(unit, unit, x, scale=10.0), 0),
                         (lambda x, y: attention(0.1 * x, 0.1 * x, x), 0)):
        notes = check_run.notes_about_dimensions(operation, x, None)
        assert len(notes) == n and all("almost uniform" in note for note in notes)

def test_buffers_are_restored():
    """A backward pass is still possible, since a buffer that has not changed is not overwritten."""
    model = torch.nn.BatchNorm1d(2)
    model.register_buffer("scale", torch.ones(2))
    weight = torch.ones(2, requires_grad=True)
    with check_run.buffers_restored(model):
        model(torch.randn(4, 2))
        output = weight * model.scale
        assert model.num_batches_tracked == 1
    assert model.num_batches_tracked == 0 and not model.running_mean.any()
    output.sum().backward()

def test_validation_text_in_lower_case_is_noted():
    """Different texts give no note."""
    encoding = train_gpt2.get_encoding("bytes")
    texts = [np.frombuffer("".join(chr(97 + (i * i * k + i) % 26) for i in range(3000)).encode(),
                           dtype=np.uint8).astype(np.uint16) for k in (3, 7)]
    upper = np.where(texts[0] >= 97, texts[0] - 32, texts[0])

    def notes(training, validation):
        loaders = [types.SimpleNamespace(shards=[text]) for text in (training, validation)]
        return check_run.notes_about_near_copies(train_gpt2, types.SimpleNamespace(
            train_loader=loaders[0], val_loader=loaders[1], encoding=encoding,
            cfg=train_gpt2.Config(T=64)))
    assert notes(texts[1], texts[0]) == []
    note, = notes(texts[0], upper)
    assert note.startswith("50 of 50 pieces of validation text are part of the training data")
