"""Tests of checkpoints: resuming, full disks, signals and kills.

The tests kill real processes. With GPT2_SOAK=100 in the environment, the tests of random moments
kill each run a hundred times instead of four times.
"""
import dataclasses
import inspect
import io
import itertools
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import (
    ENV, ROOT, TINY, Forked, assert_close_logs, assert_same, assert_same_logs, beside_others, flags,
    load, need_gpus, one_line, read_log, start_simulation, succeed, together, until, write_text)

import train_gpt2 as t

STEPS = TINY["max_steps"]
LAST = f"checkpoint_{STEPS:05d}.pt"
LONG = dict(max_steps=20_000, eval_every=50, max_lr=3e-3)

@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with the text that all runs train on."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_text(folder)
    return folder

@pytest.fixture(scope="module")
def reference(place):
    """Return the folder of a run that was never stopped. Tests must not change it."""
    return succeed(Forked(place / "reference")).log_dir

@pytest.fixture(scope="module")
def halfway(place):
    """Return a function that copies a run to place / name and returns the copy.

    The run was stopped by a SIGTERM in step 12. It has the checkpoints of steps 10 and 13.
    """
    run = succeed(Forked(place / "stopped", arrange={"signal_at": (signal.SIGTERM, 12)}))
    return lambda name: shutil.copytree(run.log_dir, place / name)

def assert_same_run(folder, reference, last=LAST):
    """Assert that a run has the log (without times) and the last checkpoint of `reference`."""
    assert_same_logs(folder, reference)
    assert_same(load(folder / last), load(reference / last))

def assert_all_whole(folder):
    """Assert that every checkpoint in a folder can be read."""
    for path in folder.glob("*.pt"):
        t.read_checkpoint(path)

def names(folder):
    """Return the names of the checkpoints in a folder, sorted."""
    return sorted(path.name for path in folder.glob("*.pt"))

def snapshot(folder):
    """Return {name: content} of the files in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()
            if path.is_file() and path.name != ".lock"}

def nth_call(owner, name, n, act):
    """Make the nth call of owner.name, counted from now on, call act with its arguments first."""
    real, numbers = getattr(owner, name), itertools.count(1)

    def counted(*args, **kwargs):
        if next(numbers) == n:
            act(*args)
        return real(*args, **kwargs)
    setattr(owner, name, counted)

KILLS = int(os.environ.get("GPT2_SOAK", 3))

@pytest.mark.parametrize("optimizer, dtype", [("adamw", "float32"), ("muon", "bfloat16")])
def test_killed_at_random_moments(place, optimizer, dtype):
    """A run that is killed at random moments and restarted equals a run that was never killed.

    After each kill, every checkpoint can be read.
    """
    words = dict(optimizer=optimizer, dtype=dtype, max_steps=30 * KILLS)
    whole = succeed(Forked(place / f"whole_{optimizer}", **words))
    rng, folder = random.Random(0), place / f"killed_{optimizer}"
    # However busy the machine is, a run waits near its end until it is killed
    arrange = {"slow": 0.02, "signal_at": (signal.SIGSTOP, 30 * KILLS - 2)}
    for _ in range(KILLS):
        run = Forked(folder, arrange=arrange, **words)
        seen = rng.randint(1, 9)  # steps to wait for; the run may be anywhere when it is killed
        until(lambda: run.is_stopped() or (  # noqa: B023
            run.out.count(" train ") > seen and names(folder)), run=run)  # noqa: B023
        run.process.kill()
        run.wait()
        assert_all_whole(folder)
    run = succeed(Forked(folder, **words))
    assert int(re.search(r"from step (\d+) on", run.out)[1]) > 0
    assert_same_run(folder, whole.log_dir, f"checkpoint_{30 * KILLS:05d}.pt")

def kill(arrange, call, n):
    """Kill the process at the nth call of this function of os.

    For unlink, count the calls of Path.unlink, which in Python 3.10 does not look up os.unlink.
    """
    owner = Path if call == "unlink" else os
    nth_call(owner, call, n, lambda *_: os.kill(os.getpid(), signal.SIGKILL))

@pytest.mark.parametrize("call, last", [("fsync", 9), ("replace", 5), ("unlink", 8)])
def test_killed_inside_a_save(place, reference, call, last):
    """Checkpoints remain readable if the run is killed at any system call of a save.

    The next start removes the partial file that the killed save left, and continues the run.
    """
    rng, folder = random.Random(call), place / f"inside_{call}"
    for n in (rng.randint(2, last), rng.randint(1, 3), 1):
        assert Forked(folder, arrange={kill: (call, n)}).wait() == -signal.SIGKILL
        assert_all_whole(folder)
    # Left by a killed save of step 7, which later starts do not save again
    (folder / "checkpoint_00007.pt.part").touch()
    succeed(Forked(folder))
    assert not list(folder.glob("*.part"))
    assert_same_run(folder, reference)

def test_training_goes_on_while_a_save_is_written(tmp_path, monkeypatch):
    """A save copies the weights, so later steps do not change what is written.

    A tensor that occurs twice, such as the tied embedding, is copied once. The next save waits
    until the previous one is written, and then copies into the same memory. log.txt is synced
    before the weights are copied.
    """
    folder, weight = t.RunFolder(t.Config(log_dir=str(tmp_path)), "data"), torch.zeros(3)
    copy, buffers = t.copy_to_host({"model": [weight, weight], "step": 5}, {})
    weight += 1
    first, second = copy["model"]
    assert first is second and not first.any()
    again, _ = t.copy_to_host({"model": [weight]}, buffers)
    assert again["model"][0] is first and first.all()
    seen = mock.MagicMock()
    folder.last_save, folder.log, folder.executor = seen.saving, seen.log, seen.executor
    monkeypatch.setattr(t, "copy_to_host", lambda *args: (seen.copy(*args), {}))
    monkeypatch.setattr(t.os, "fsync", seen.fsync)
    monkeypatch.setattr(t, "checkpoint_of", lambda state, cfg, fingerprint: {"state": {}})
    folder.save(mock.MagicMock(step=5))
    calls = [name for name, *_ in seen.mock_calls if "__" not in name]
    assert calls == ["saving.result", "log.fileno", "fsync", "copy", "executor.submit"]

def test_a_checkpoint_is_verified_before_it_is_renamed(tmp_path, capsys):
    """If a new checkpoint cannot be read back, a line says so, and earlier ones are kept.

    The thread that saves starts no OpenMP threads, since they would slow training down.
    """
    for step in (5, 8, 10):
        (tmp_path / f"checkpoint_{step:05d}.pt").touch()
    before, folder = names(tmp_path), t.RunFolder(t.Config(log_dir=str(tmp_path)), "data")
    content = {"gpt_config": {}, "state": {"step": 15, "w": torch.zeros(2**17)}}
    with mock.patch.object(torch, "save", lambda content, file: file.write(b"damaged")):
        folder.write_checkpoint(content)
    assert names(tmp_path) == before and folder.saved_step != 15
    assert "NOT SAVED at step 15" in capsys.readouterr().out
    threads = set(Path("/proc/self/task").glob("*"))  # empty except on Linux
    folder.executor.submit(folder.write_checkpoint, content).result()
    assert len(set(Path("/proc/self/task").glob("*")) - threads) <= 1
    folder.executor.shutdown()
    assert folder.saved_step == 15
    assert names(tmp_path) == ["checkpoint_00010.pt", "checkpoint_00015.pt"]

def test_a_checkpoint_made_on_a_gpu_is_read_without_one(reference, tmp_path, monkeypatch):
    """A checkpoint with tensors from a GPU can be read on a machine that lacks this GPU."""
    content = load(reference / LAST)
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
    torch.save(content, tmp_path / "gpu.pt")
    assert_same(t.read_checkpoint(tmp_path / "gpu.pt"), content)

@pytest.mark.parametrize("first, second", [("SIGTERM", "SIGINT"), ("SIGINT", "SIGTERM")])
def test_signals_in_the_first_a_middle_and_the_last_step(place, reference, first, second):
    """After a signal, the run completes and saves the step in progress, and then it stops.

    The same command continues it.
    """
    folder = place / f"signal_{first}"
    for name, step in ((first, 0), (second, 14), (first, STEPS - 1)):
        run = succeed(Forked(folder, arrange={"signal_at": (getattr(signal, name), step)}))
        assert (step, "train") in read_log(folder)
        assert run.out.index("Stopping after this step") < run.out.index(f" {step}/30 train")
        assert f"saved {folder}/checkpoint_{step + 1:05d}.pt" in run.out
        assert f"Stopped by a signal after {step + 1} steps" in run.out.splitlines()[-1]
    succeed(Forked(folder))
    assert_same_run(folder, reference)

def test_a_second_ctrl_c_ends_at_once(halfway, reference):
    """A second Ctrl-C ends the process without waiting for the step and its save.

    A step may take minutes or never end. A second SIGTERM changes nothing.
    """
    folder = halfway("impatient")
    run = Forked(folder, arrange={"signal_at": (signal.SIGINT, 16, 16)})
    assert run.wait() == 130 and not run.err and (16, "train") not in read_log(folder)
    assert run.out.splitlines()[-1].startswith("Ended at once. To resume from the last")
    run = succeed(Forked(folder, arrange={"signal_at": (signal.SIGTERM, 18, 18)}))
    assert "Stopped by a signal after 19 steps" in run.out
    succeed(Forked(folder))
    assert_same_run(folder, reference)

EXIT = """
import os, subprocess, sys, time
sys.modules["transformers"] = sys.modules["matplotlib"] = None  # importing them takes seconds
import train_gpt2 as t
t.main()
end, names = time.time() + 10, "gloo"  # a joined thread may be listed for a short time
while "gloo" in names and time.time() < end:
    names = subprocess.getoutput(f"cat /proc/{os.getpid()}/task/*/comm")
print(f"threads of gloo: {'gloo' in names}", flush=True)
"""

@beside_others
def test_under_torchrun(tmp_path):
    """A restart by torchrun (--max-restarts) continues from the last checkpoint.

    SIGTERM saves the step in progress and stops the run without an error. When main() returns, no
    thread of gloo is left: such a thread sometimes makes Python abort at its exit.
    """
    need_gpus(2)
    write_text(tmp_path)
    folder, out = tmp_path / "torchrun", tmp_path / "torchrun.out"
    (tmp_path / "exit.py").write_text(start_simulation() + EXIT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               "--max-restarts=1", str(tmp_path / "exit.py")]
    with open(out, "w") as file:
        job = subprocess.Popen(
            command + flags(folder, B=2, **LONG), stdout=file, stderr=subprocess.STDOUT,
            cwd=tmp_path, env=ENV | {"PYTHONPATH": str(ROOT)})

    def wait_for(condition):
        until(lambda: job.poll() is not None or condition())
    try:
        wait_for(lambda: names(folder)[1:])  # the checkpoint of step 0 and a later one
        workers = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(workers[-1]), signal.SIGKILL)
        wait_for(lambda: out.read_text().count(", from step ") == 2)
        again = json.loads((folder / "run.json").read_text())["starts"][1]["step"]
        wait_for(lambda: f"\n{again + 5} train " in (folder / "log.txt").read_text())
    finally:
        job.terminate()
        job.wait(180)
    said, step = out.read_text().rpartition(", from step ")[2], max(read_log(folder))[0] + 1
    assert 0 < again < step < LONG["max_steps"] and again % 5 == 0, said
    assert f"saved {folder}/checkpoint_{step:05d}.pt" in said
    assert f"Stopped by a signal after {step} steps" in said
    assert said.count("threads of gloo: False") == 2, said
    assert "exitcode" not in said  # torchrun prints this word for workers that failed

def again_in(arrange, name, number):
    """Send the signal once more when this function is first called.

    In addition, let only rank 0 find checkpoints, which can happen on a shared disk.
    """
    nth_call(arrange.t, name, 1, lambda *_: os.kill(os.getpid(), number))
    if arrange.t.rank():
        arrange.t.path_of_newest_checkpoint = lambda folder: None

def test_a_signal_to_one_of_two_processes(halfway, reference):
    """A signal to one process stops all processes after the same step.

    Another signal during the last save loses nothing. Rank 0 decides which checkpoint all processes
    load. The run can be continued with another number of processes and another B.
    """
    folder = halfway("alone and together")
    arrange = {"signal_on_rank": (1, signal.SIGINT, 20), again_in: ("finish", signal.SIGINT)}
    statuses, runs = together(2, folder, B=2, arrange=arrange)
    assert statuses == [0, 0], [run.err for run in runs]
    assert "from step 13 on" in runs[0].out and runs[1].out == ""
    assert "Stopped by a signal after 21 steps" in runs[0].out
    succeed(Forked(folder, B=8))
    assert_close_logs(folder, reference)

class Bomb:
    """An object that creates a folder when it is unpickled without weights_only=True."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)

def test_the_checkpoint_before_a_damaged_one_is_used(halfway, reference, tmp_path, capfd):
    """If the newest checkpoint is damaged or contains code, the run continues from the one before.

    One line names the damaged file. The code in it is not run. Lines of log.txt from steps that are
    repeated are replaced.
    """
    folder, marker, bomb = halfway("damaged"), tmp_path / "the bomb went off", io.BytesIO()
    newest = folder / "checkpoint_00013.pt"
    content = newest.read_bytes()
    torch.save(load(newest) | {"eval_model": Bomb(marker)}, bomb)
    table = load(newest)["eval_model"]["transformer.wte.weight"].numpy().tobytes()
    flipped = content.replace(table, table[:-1] + bytes([table[-1] ^ 1]))  # one bit of a weight
    for damaged in (b"", bytes(len(content)), content[:-100], pickle.dumps(Bomb(marker)),
                    bomb.getvalue(), flipped):
        newest.write_bytes(damaged)
        assert t.path_of_newest_checkpoint(folder) == folder / "checkpoint_00010.pt", damaged[:99]
        said = capfd.readouterr().out
        assert str(newest) in said and said.count("\n") == 1, said
        assert not marker.exists(), damaged[:99]
    with open(folder / "log.txt", "a") as file:
        file.write("13 train 9.9\n14 train 9.9\n15 tra")
    run = succeed(Forked(folder))
    assert f"{newest} cannot be read" in run.out and ", from step 10 on" in run.out
    assert not newest.exists() and [*folder.glob("checkpoint_00013.pt_before_*")]
    assert_same_run(folder, reference)
    torch.load(io.BytesIO(bomb.getvalue()), weights_only=False)
    assert marker.exists()  # without weights_only=True, the code is run

def test_the_two_newest_checkpoints_and_one_every_keep_every_are_kept(halfway, reference):
    """Other checkpoints are deleted. If one cannot be deleted (here a folder), the run goes on."""
    folder = halfway("kept")
    (folder / "checkpoint_00001.pt").mkdir()
    run = succeed(Forked(folder, keep_every=10, save_every=3))
    assert names(folder) == [f"checkpoint_{step:05d}.pt" for step in (1, 10, 20, 27, 30)]
    assert "NOT SAVED" not in run.out
    assert_same_run(folder, reference)
    for name in ("99500", "100000", "99750_backup", "best"):  # as text, 100000 sorts before 99500
        (folder / f"checkpoint_{name}.pt").touch()
    assert list(t.find_checkpoints(folder)) == [100000, 99500, 30, 27, 20, 10, 1]

def test_a_disk_that_is_full_until_the_end(place, reference):
    """Training goes on when the disk is full, and a line reports each save that fails.

    Earlier checkpoints are kept. The run ends with an error, because its last step is not saved.
    When there is space again, the same command completes the run.
    """
    run = Forked(place / "full", arrange={"signal_at": (signal.SIGSTOP, 12)})
    run.wait_for_stop()
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    run.go_on()
    assert run.wait() == 1
    one_line(run.err, f"Step {STEPS} is not saved", "too large")
    assert re.search("!!! NOT SAVED at step 15: .*too large.*   29/30 train", run.out, re.S)
    assert names(run.log_dir) == ["checkpoint_00005.pt", "checkpoint_00010.pt"]
    assert_all_whole(run.log_dir)
    assert not list(run.log_dir.glob("*.part"))
    succeed(Forked(run.log_dir))
    assert_same_run(run.log_dir, reference)

def clock(arrange, *seconds):
    """Replace perf_counter by a clock that only training steps advance.

    seconds: the time that a step takes on each rank.
    """
    now, real = [0.0], arrange.t.train_step

    def train_step(run):
        now[0] += seconds[arrange.t.rank()]
        return real(run)
    arrange.t.train_step, arrange.t.time.perf_counter = train_step, lambda: now[0]

def test_trial_steps_of_a_run_with_minutes_leave_no_trace(place, reference):
    """A run with `minutes` equals a run with the max_steps that the trial steps determined.

    A restart keeps this max_steps, even if steps have become slower, which is a warning about the
    result. Another value of minutes is refused, but a larger max_steps is allowed. Several
    processes agree on the number of steps.
    """
    words = dict(minutes=STEPS * 0.5 / 60, max_steps=7)
    stop = {"signal_at": (signal.SIGTERM, 22)}
    run = succeed(Forked(place / "minutes", arrange={clock: 0.5} | stop, **words))
    stopped = load(run.log_dir / "checkpoint_00023.pt")
    assert (stopped["state"]["step"], stopped["state"]["tokens"]) == (23, 23 * 128)
    # The first step does not count
    assert stopped["state"]["minutes_trained"] == pytest.approx(22 * 0.5 / 60)
    assert f"{STEPS} steps fit into 0.25 minutes. " in run.out
    assert f"use --max_steps={STEPS}\n" in run.out
    succeed(Forked(run.log_dir, arrange={clock: 99.0}, **words))
    assert_same_run(run.log_dir, reference)
    times = [value for _, value in t.read_metrics(run.log_dir)["minutes"]]
    assert times[0] == 0 and times == sorted(times) and len(set(times)) == len(times)
    result = t.read_run_json(run.log_dir)["result"]
    assert result["minutes"] == times[-1] == pytest.approx((22 * 0.5 + 6 * 99) / 60, abs=1e-5)
    [warning] = result["warnings"]
    assert warning.startswith("Training took 10.1 minutes instead of minutes=0.25, because its "
                              "steps were slower than the trial steps.")
    other = Forked(run.log_dir, **words | dict(minutes=2))
    assert other.wait() == 1
    one_line(other.err, "was not written with minutes=2", "leave out --minutes")
    longer = succeed(Forked(run.log_dir, max_steps=STEPS + 1))
    assert f"max_steps was {STEPS}, is {STEPS + 1}: the learning rate, and everything" in longer.out
    statuses, runs = together(2, place / "minutes 2", arrange={clock: (0.4, 0.6)}, **words)
    assert statuses == [0, 0], [run.err for run in runs]
    assert_close_logs(runs[0].log_dir, reference)

@pytest.mark.parametrize("minutes, step, n_starts, warned", [
    (4.6, 100, 1, False), (5.4, 100, 1, False), (4.4, 100, 1, True), (5.6, 100, 1, True),
    (4.4, 100, 4, False), (4.2, 100, 4, True), (2.0, 40, 1, False)])
def test_a_result_has_a_warning_if_training_did_not_take_minutes(minutes, step, n_starts, warned):
    """It was over 10% longer or shorter, and not because the first step after a start is not timed.

    A run that has not finished has no such warning.
    """
    state = mock.Mock(minutes_trained=minutes, step=step)
    cfg = t.Config(minutes=5.0, max_steps=100)
    assert bool(t.warning_about_time(cfg, state, n_starts)) == warned
    assert not t.warning_about_time(dataclasses.replace(cfg, minutes=0.0), state, n_starts)

def other(constant):
    """Return a value of a constant that no run in this file uses."""
    if constant.name == "max_steps":  # a larger value would be allowed
        return STEPS - 1
    return constant.default + ("x" if isinstance(constant.default, str) else 1)

def test_a_changed_constant_is_refused_with_both_values(reference):
    """Constants that affect training cannot change when a run continues; max_steps may grow.

    The message names the old and the new value. The constants in NOT_COMPARED may change.
    """
    saved = load(reference / LAST)
    cfg, data = t.Config(**saved["constants"]), saved["data"]
    constants = {field.name: field for field in dataclasses.fields(t.Config)}
    assert t.NOT_COMPARED <= constants.keys()
    for name in t.NOT_COMPARED:
        changed = dataclasses.replace(cfg, **{name: other(constants[name])})
        t.check_same_training(saved, changed, data)
    for name in constants.keys() - t.NOT_COMPARED - {"data"}:
        value = other(constants[name])
        with pytest.raises(t.UserError) as e:
            t.check_same_training(saved, dataclasses.replace(cfg, **{name: value}), data)
        assert f"{name} was {getattr(cfg, name)!r}, is {value!r}" in str(e.value)
        assert str(e.value).count(" was ") == 1 and "--log_dir" in str(e.value)
    t.check_same_training(saved, dataclasses.replace(cfg, max_steps=40), data)
    saved["state"]["step"] = 20  # max_steps cannot become smaller, even before the run reaches it
    with pytest.raises(t.UserError, match="max_steps was 30, is 29"):
        t.check_same_training(saved, dataclasses.replace(cfg, max_steps=29), data)
    with pytest.raises(t.UserError, match=f"data was '{re.escape(data)}', is 'another'"):
        t.check_same_training(saved, cfg, "another")

def test_a_refused_start_changes_nothing(halfway):
    """If a start is refused, the log and the checkpoints keep their contents.

    The reasons tested are changed constants, and a folder in which every checkpoint is damaged.
    """
    folder = halfway("refused")
    before = snapshot(folder)
    run = Forked(folder, max_lr=0.5, seed=7)
    assert run.wait() == 1
    one_line(run.err, "max_lr was 0.01, is 0.5; seed was 1337, is 7")
    assert snapshot(folder) == before
    for path in folder.glob("*.pt"):
        path.write_bytes(path.read_bytes()[:5000])
    before = snapshot(folder)
    run = Forked(folder)
    assert run.wait() == 1 and run.out.count("cannot be read") == 2
    one_line(run.err, folder, "is damaged")
    assert snapshot(folder) == before

def rise_after(arrange, step):
    """Replace the validation loss by one that is lowest at `step`."""
    arrange.t.validation_loss = lambda run, _: 1 + abs(run.state.step - step) / 10

def test_the_best_weights_are_kept_and_exported_if_validation_rises(place, is_gpt2, capfd):
    """The checkpoint with the lowest validation loss is kept and exported, not the last one.

    When weights are fine-tuned on a small text, they are best long before the last step. If the
    best checkpoint is damaged, a line says so, and the newest one is used.
    """
    run = succeed(Forked(place / "rises", arrange={rise_after: 10}, hide=["matplotlib"]))
    folder, best = run.log_dir, run.log_dir / "checkpoint_00010.pt"
    assert names(folder) == [best.name, "checkpoint_00025.pt", LAST]
    assert f"exported {best} to" in run.out
    result = json.loads((folder / "run.json").read_text())["result"]
    assert result["lowest_val"] == 1 and result["lowest_step"] == 10 and result["val"] == 3
    exported = t.GPT.from_pretrained(folder / "hf").state_dict()
    torch.testing.assert_close(exported, dict(load(best)["eval_model"]), rtol=0, atol=0)
    assert t.path_of_checkpoint_to_use(folder) == best
    (folder / "log.txt").write_text("10 val 1.0\n20 val 0.5\n25 val 0.9\n30 val 0.8\n")
    assert t.path_of_checkpoint_to_use(folder) == folder / LAST  # step 20 has no checkpoint
    newest = (folder / LAST).rename(folder / "checkpoint_00032.pt")
    assert t.path_of_checkpoint_to_use(folder) == newest  # not validated, but the loss was falling
    (folder / "log.txt").write_text("10 val 1.0\n25 val 1.5\n")
    assert t.path_of_checkpoint_to_use(folder) == best
    best.write_bytes(best.read_bytes()[:-100])
    assert t.path_of_checkpoint_to_use(folder) == newest  # the best one is damaged
    said = capfd.readouterr().out
    assert f"{best} cannot be read" in said and "Trying another checkpoint" in said

def leave_at(arrange, step):
    """Edit the loop in train() so that it ends before this step, as a `break` would end it."""
    source = inspect.getsource(arrange.t.train)
    exec(source.replace("step >= cfg.max_steps:", f"step >= {step}:"), vars(arrange.t))

def test_a_run_that_ends_by_a_break_is_validated_saved_and_continued(place, reference):
    """If an edit of train() ends a run before max_steps, its last step is validated and saved.

    The export waits for the save. The last lines say that the run ended early, and the same command
    continues it.
    """
    run = succeed(Forked(place / "left", arrange={leave_at: 7, "slow_saves": 0.3}))
    assert (7, "val") in read_log(run.log_dir) and "\n    7/30 val " in run.out
    saved = run.out.index(f"saved {run.log_dir}/checkpoint_00007.pt")
    assert saved < run.out.index("Not exported") < run.out.index("Ended after 7 of 30 steps. To re")
    succeed(Forked(run.log_dir))
    assert_same_run(run.log_dir, reference)

def test_a_finished_run_evaluates_and_exports_again(place, reference, is_gpt2):
    """Starting a finished run again changes no file except run.json."""
    folder = shutil.copytree(reference, place / "finished")
    before = snapshot(folder)
    run = succeed(Forked(folder, sample_every=10, sample_tokens=5, hide=["matplotlib"]))
    for said in ("is finished", f"{STEPS}/{STEPS} val ", f"at step {STEPS}",
                 f"exported {folder / LAST} to"):
        assert said in run.out, said
    assert snapshot(folder) | {"run.json": before["run.json"]} == before

def test_log_and_export_of_another_run_are_renamed(tmp_path):
    """A new run overwrites nothing if somebody moved the checkpoints of an old run away."""
    (tmp_path / "hf").mkdir()
    for old in (tmp_path / "hf" / "model.safetensors", tmp_path / "log.txt"):
        old.write_text("0 train 10.0\n")
    folder = t.RunFolder(t.Config(log_dir=str(tmp_path)), "data")
    folder.begin(0, continues=False)
    folder.close()
    kept = *tmp_path.glob("log.txt_before_*"), *tmp_path.glob("hf_before_*/model.safetensors")
    assert [path.read_text() for path in kept] == ["0 train 10.0\n"] * 2
    assert (tmp_path / "log.txt").read_text() == "" and not (tmp_path / "hf").exists()

def test_the_export_of_a_run_that_continues_is_renamed(tmp_path):
    """The folder hf never holds older weights than the run. A finished run keeps its export."""
    for step, renamed in ((20, True), (30, False)):
        log_dir = tmp_path / str(step)
        (log_dir / "hf").mkdir(parents=True)
        folder = t.RunFolder(t.Config(log_dir=str(log_dir), max_steps=30), "data")
        folder.begin(step, continues=True)
        folder.close()
        assert (log_dir / "hf").exists() != renamed
        assert len([*log_dir.glob("hf_before_*")]) == renamed

def test_a_second_run_in_the_same_folder_is_refused(place, reference):
    """The second run changes no file of the first one, which goes on undisturbed."""
    first = Forked(place / "two", arrange={"signal_at": (signal.SIGSTOP, 2)})
    first.wait_for_stop()
    (place / "two" / "run.json.part").touch()  # as if the first run were saving
    second = Forked(place / "two")
    assert second.wait() == 1 and (place / "two" / "run.json.part").exists()
    one_line(second.err, "Another run", place / "two")
    first.go_on()
    succeed(first)
    assert_same_run(place / "two", reference)
