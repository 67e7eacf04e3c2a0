"""Tests of runs that are stopped or killed and then resumed, and of what they keep.

The runs are real processes. The steps and moments at which they are killed are random, with the
seed GPT2_SEED (by default 0).
"""
import io
import json
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    ROOT, STEPS, TINY, Bomb, Training, ask_four_questions, assert_same, before_steps,
    last_checkpoint, load, names, one_line, poison_at, read_log, signal_at, succeed, together,
    torchrun_env)

import train_gpt2 as t

RANDOM = random.Random(int(os.environ.get("GPT2_SEED", 0)))
MIDDLE = RANDOM.randrange(6, 24)  # a step that is neither among the first nor among the last ones
start = partial(Training, optimizer="muon", dropout=0.1)  # Muon's runs also use AdamW

@pytest.fixture(scope="module")
def reference(place):
    """Return the folder of a run that was never stopped. Tests must not change it."""
    return succeed(start(place / "reference")).log_dir

@pytest.fixture(scope="module")
def halfway(place):
    """Return a function that copies a run to place / name and returns the copy.

    The run was stopped by a SIGTERM in step 12. It has the checkpoints of steps 10 and 13.
    """
    run = succeed(start(place / "stopped", arrange=[(signal_at, signal.SIGTERM, 12)]))
    assert names(run.log_dir) == [10, 13]
    return lambda name: shutil.copytree(run.log_dir, place / name)

def snapshot(folder):
    """Return {name: content} of the files in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()
            if path.is_file() and path.name != ".lock"}

# ---- A run that is stopped or killed and resumed is identical to one that was not
def slow_steps(t, seconds):
    before_steps(t, range(STEPS), lambda run: time.sleep(seconds))

@pytest.mark.parametrize("kind", ["one process", "two processes", "branch"])
def test_a_run_that_is_killed_at_random_moments_is_resumed_bit_for_bit(place, halfway, kind):
    """Repeating the command continues the run. It ends with the same log and the same checkpoint.

    A branch starts from a copied checkpoint.
    """
    def begin(folder, **changes):
        if kind == "branch" and not folder.exists():
            folder.mkdir()
            shutil.copy(halfway(f"source of {folder.name}") / "checkpoint_00010.pt", folder)
        words = dict(optimizer="muon", dropout=0.1, eval_every=3) | changes
        return together(2, folder, **words) if kind == "two processes" else [
            Training(folder, **words)]
    whole, killed = place / f"{kind}, whole", place / f"{kind}, killed"
    assert {run.wait() for run in begin(whole)} == {0}
    for _ in range(4):
        runs = begin(killed, arrange=[(slow_steps, 0.02)])
        runs[0].wait_for("^settings")
        time.sleep(RANDOM.uniform(0.0, 0.5))
        for run in runs:
            run.kill()
            run.wait()
        names(killed)  # all can be read
    assert {run.wait() for run in begin(killed)} == {0}
    assert_same(killed, whole)

def kill_before(t, name, file):
    """Kill the process when it renames or deletes (`name`) this file."""
    owner = Path if name == "unlink" else os
    real = getattr(owner, name)

    def function(*args, **words):
        if any(str(arg).endswith(file) for arg in args):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **words)
    setattr(owner, name, function)

def test_a_run_that_is_killed_while_it_writes_files_is_resumed(place, reference):
    for name, file in (("replace", "checkpoint_00005.pt"), ("replace", "log_before.txt"),
                       ("replace", "checkpoint_00010.pt"), ("unlink", "checkpoint_00005.pt")):
        assert start(place / "moments", arrange=[(kill_before, name, file)]).wait() < 0, file
        names(place / "moments")  # all can be read
    succeed(start(place / "moments"))
    assert_same(place / "moments", reference)

def test_signals_save_and_stop_a_run(place, reference):
    """Even in the first and in the last step. The repeated command completes the run.

    A complete run says so and is not evaluated, since this would show the loss of old weights as if
    it were the result of an edit.
    """
    folder = place / "signals"
    for number, step in ((signal.SIGHUP, 0), (signal.SIGTERM, 4), (signal.SIGINT, MIDDLE),
                         (signal.SIGTERM, STEPS - 1)):
        run = succeed(start(folder, arrange=[(signal_at, number, step)]))
        assert f"Stopped by a signal at step {step + 1}. To resume the run, repeat" in run.out
        assert max(names(folder)) == step + 1
    assert f"from step {STEPS} on" in succeed(start(folder, hide=["matplotlib"])).out
    assert_same(folder, reference)
    assert (folder / "hf/config.json").exists()
    before = snapshot(folder)
    assert f"complete at step {STEPS}. " in succeed(start(folder)).out
    assert snapshot(folder) == before

def ignore(t, number):
    signal.signal(number, signal.SIG_IGN)

@pytest.mark.parametrize("name, number, status", [
    ("nohup", signal.SIGHUP, 0), ("twice", signal.SIGINT, -signal.SIGINT),
    ("twice, torchrun", signal.SIGINT, 0)])
def test_a_signal_that_is_ignored_or_sent_twice(place, reference, name, number, status):
    """nohup makes a run ignore SIGHUP. A second Ctrl-C ends the process at once, but not under
    torchrun, which sends each Ctrl-C twice.
    """
    arrange = [(signal_at, number, *[MIDDLE] * (2 if "twice" in name else 1))]
    arrange += [(ignore, number)] * (name == "nohup")
    env = torchrun_env(1) | {"RANK": "0", "LOCAL_RANK": "0"} if "torchrun" in name else {}
    run = start(place / name, arrange=arrange, env=env)
    assert run.wait() == status and "Traceback" not in run.err, (run.out, run.err)
    assert ("Done." in run.out) == (name == "nohup")
    assert (f"Stopped by a signal at step {MIDDLE + 1}" in run.out) == ("torchrun" in name)
    succeed(start(place / name))
    assert_same(place / name, reference)

def fail_at(t, name, step):
    """Let this function fail at this step."""
    real = getattr(t, name)

    def failing(run):
        if run.step == step:
            raise RuntimeError("no answer")
        real(run)
    setattr(t, name, failing)

@pytest.mark.parametrize("name, step", [
    ("print_sample", 10), ("score_hellaswag", 10), ("score_hellaswag", 20)])
def test_a_step_is_saved_before_it_is_sampled_and_scored(place, name, step):
    """If these fail, no step is lost. After the last step, the repeated command completes it."""
    folder, words = place / f"failed {name} {step}", dict(
        eval_every=10, max_steps=20, sample_every=10, hellaswag_every=10, sample_tokens=5)
    run = start(folder, arrange=[(ask_four_questions,), (fail_at, name, step)], **words)
    assert run.wait() == 1 and run.err.endswith("RuntimeError: no answer\n"), run.err
    assert max(names(folder)) == step
    words |= dict(arrange=[(ask_four_questions,)])
    assert "Done." in succeed(start(folder, **words)).out
    assert_same(folder, succeed(start(place / f"whole {folder.name}", **words)).log_dir)

def test_a_log_is_kept_once_before_lines_are_cut(place, halfway, reference):
    """log_before.txt is written only if lines are cut, and never over an older one."""
    folder = halfway("log")
    for step, kept in ((16, ""), (22, "15 norm"), (28, "15 norm")):
        assert start(folder, arrange=[(signal_at, signal.SIGKILL, step)]).wait() < 0
        text = (folder / "log_before.txt").read_text() if kept else "\n"
        assert text.splitlines()[-1].startswith(kept)
        assert kept or not (folder / "log_before.txt").exists()
    succeed(start(folder))
    assert_same(folder, reference)
    new = place / "no checkpoint"  # a new run
    new.mkdir()
    shutil.copy(reference / "log.txt", new)
    succeed(start(new, max_steps=3))
    assert (new / "log_before.txt").read_bytes() == (reference / "log.txt").read_bytes()
    assert max(read_log(new)) == (3, "val")

# ---- What is saved when
def rise_after(t, step):
    """Replace the validation loss by one that is lowest at `step`."""
    t.validation_loss = lambda run: 1 + abs(run.step - step) / 10

def test_the_best_checkpoint_is_kept_exported_and_used(place):
    """The newest checkpoint, the best one, and those at multiples of keep_every are kept.

    Stopping the run does not change which one is the best. Samples, the export and init_from use
    it. A validation at step 0 is never the best, and a file with another name is left alone.
    """
    words = dict(eval_every=3, keep_every=10, hide=["matplotlib"])
    folder = place / "best"
    folder.mkdir()
    (folder / "checkpoint_00500_keep.pt").write_text("kept by hand")
    run = start(folder, arrange=[(rise_after, 9), (signal_at, signal.SIGTERM, 16)], **words)
    assert succeed(run) and names(folder) == [9, 10, 17]
    run = succeed(start(folder, arrange=[(rise_after, 9)], **words))
    best = folder / "checkpoint_00009.pt"
    assert names(folder) == [9, 10, 20, 30] and f"exported {best} to" in run.out
    assert last_checkpoint(folder)["best_step"] == 9
    assert (folder / "checkpoint_00500_keep.pt").read_text() == "kept by hand"
    sampled = succeed(Training(None, without=TINY, log_dir=folder, sample=1, sample_tokens=5))
    assert f"\nSamples from {best}:" in sampled.out
    words = dict(without=("n_layer", "n_head", "n_embd"), init_from=folder, sample_tokens=5)
    run = succeed(Training(place / "tuned", max_steps=10, arrange=[(rise_after, 0)], **words))
    assert last_checkpoint(run.log_dir)["best_step"] == 5 and "settings  FINETUNE" in run.out
    run = succeed(Training(place / "no steps", max_steps=0, sample_every=5, **words))
    for part in ("0/0 val ", "--- sample at step 0", " saved "):
        assert run.out.count(part) == 1
    weights = last_checkpoint(run.log_dir)["model"]
    torch.testing.assert_close(weights, load(best)["model"], rtol=0, atol=0)
    a, b = weights["lm_head.weight"], weights["transformer.wte.weight"]
    assert a.data_ptr() == b.data_ptr()  # they are stored once

def limit_files(t, first, last=STEPS):
    """In these steps, no file may become larger than 20 kB, as if the disk were full."""
    def act(run):
        small = 20_000 if run.step < last else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (small, resource.RLIM_INFINITY))
    before_steps(t, [first, last], act)

def test_a_full_disk_does_not_stop_training(place, reference):
    """A line reports each save that fails, and earlier checkpoints are kept.

    The run ends with an error, because its last step is not saved. When there is space again, the
    same command completes the run.
    """
    run = start(place / "full", arrange=[(limit_files, 12)])
    assert run.wait() == 1
    one_line(run.err, f"Step {STEPS} is not saved in log_dir={run.log_dir}: free some space")
    assert re.search("!!! NOT SAVED at step 15: .*too large.*   29/30 train", run.out, re.S)
    assert names(run.log_dir) == [10] and not list(run.log_dir.glob("*.part"))
    succeed(start(run.log_dir))
    assert_same(run.log_dir, reference)

def refuse_deletions(t):
    unlink = Path.unlink

    def refuse(path, **words):
        if path.suffix == ".pt":
            raise PermissionError("Operation not permitted")
        unlink(path, **words)
    Path.unlink = refuse

def add_to_checkpoint(t):
    """Let checkpoint_of() return something that weights_only=True does not load."""
    real = t.checkpoint_of
    t.checkpoint_of = lambda run: real(run) | {"gate": np.float64(1.5)}

def test_errors_in_deleting_or_reading_back_do_not_stop_training(place):
    """If the first checkpoint cannot be read back, one line says so, and nothing is deleted."""
    run = start(place / "deletions", arrange=[(refuse_deletions,)])
    assert run.wait() == 0 and "NOT SAVED" not in run.out, run.err
    assert names(run.log_dir) == [5, 10, 15, 20, 25, 30]
    run = start(place / "gate", arrange=[(add_to_checkpoint,)], max_steps=15)
    run.wait()
    assert "14/15 train" in run.out and len(re.findall("!!! .*00005.pt", run.out)) == 1
    assert t.find_checkpoints(run.log_dir).keys() == {5, 10, 15}

def nan_at(t, step):
    """Let the validation loss of this step be NaN, although no training loss has shown it."""
    t.validation_loss = lambda run: math.nan if run.step == step else 1.0

@pytest.mark.parametrize("changes, said, saved", [
    (dict(max_lr=1e30, warmup_steps=0, grad_clip=0.0), "has diverged", []),
    (dict(arrange=[(poison_at, 7)]), "Step 7 has loss 4.*norm nan", [5]),
    (dict(arrange=[(nan_at, 10)]), "The validation loss at step 10 is nan", [5])])
def test_a_diverged_run_ends_and_keeps_its_checkpoints(place, changes, said, saved):
    """A message names the step and the remedy. NaN is never saved."""
    run = start(place / f"diverged {said[:6]}", optimizer="adamw", **changes)
    assert run.wait() == 1
    assert re.search(said, one_line(run.err, "--max_lr"))
    assert names(run.log_dir) == saved

# ---- What a start refuses, and what may change
def test_a_refused_start_changes_nothing(place):
    """If the folder is in use, constants changed, or the newest checkpoint is damaged, one line
    says what to do. No code in a checkpoint is run. After the damaged file was deleted, the run
    continues from the checkpoint before it.
    """
    folder = succeed(start(place / "refused", arrange=[(signal_at, signal.SIGTERM, 12)])).log_dir
    newest, marker = folder / "checkpoint_00013.pt", folder / "the bomb went off"
    content, bomb, delete = newest.read_bytes(), io.BytesIO(), f"{newest} cannot be read .* delete"
    torch.save(load(newest) | {"more": Bomb(marker)}, bomb)

    def assert_refused_start(said, content, **changes):
        newest.write_bytes(content)
        before = snapshot(folder)
        run = start(folder, **changes)
        assert run.wait() == 1 and re.search(said, one_line(run.err))
        assert snapshot(folder) == before  # so the bomb did not go off
    lock = t.lock_folder("log_dir", folder)
    assert_refused_start(f"Another run uses {folder}.* log_dir", content)
    lock.release()
    assert_refused_start("max_lr was 0.01, is 0.5", content, max_lr=0.5)
    for damaged in (content[:-100], b"", pickle.dumps(Bomb(marker), protocol=2), bomb.getvalue()):
        assert_refused_start(delete, damaged)
    newest.unlink()
    assert "from step 10 on" in succeed(start(folder)).out
    torch.load(io.BytesIO(bomb.getvalue()), weights_only=False)
    assert marker.exists()  # without weights_only=True, the code is run

def test_a_run_keeps_its_code_and_its_constants(halfway, tmp_path):
    """If the script is edited before the run continues, a line says so, and both copies are kept.

    config.json has all constants.
    """
    folder, code = halfway("edited"), (ROOT / "train_gpt2.py").read_bytes()
    edited = tmp_path / "edited.py"
    edited.write_bytes(code + b"# edited")
    run = start(folder, copy=edited, arrange=[(signal_at, signal.SIGTERM, 20)])
    assert f"code      {folder}/train_gpt2_00013.py, used from step 13 on" in succeed(run).out
    assert "code   " not in succeed(start(folder, copy=edited)).out
    copies = {path.name: path.read_bytes() for path in folder.glob("*.py")}
    assert copies == {"train_gpt2_00000.py": code, "train_gpt2_00013.py": code + b"# edited"}
    constants = json.loads((folder / "config.json").read_text())
    assert t.Config(**constants) == t.Config(**last_checkpoint(folder)["config"])
    assert (constants["max_steps"], constants["dropout"]) == (STEPS, 0.1)
