"""Checkpoints, resuming, full disks, signals, kills: real ones, a hundred with GPT2_SOAK=100."""
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
    ENV, ROOT, TINY, Forked, assert_close_logs, assert_same, assert_same_logs, flags, load,
    need_gpus, one_line, read_log, start_simulation, succeed, together, until, write_text)

import train_gpt2 as t

STEPS = TINY["max_steps"]
LAST = f"checkpoint_{STEPS:05d}.pt"
LONG = dict(max_steps=20_000, eval_every=50, max_lr=3e-3)

@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the text that all train on; on PYTHONPATH it hides what takes seconds."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_text(folder)
    for name in ("matplotlib", "transformers"):
        (folder / f"{name}.py").write_text("raise ImportError")
    return folder

@pytest.fixture(scope="module")
def reference(place):
    """Folder of a run never stopped. Not to be changed."""
    return succeed(Forked(place / "reference")).log_dir

@pytest.fixture(scope="module")
def halfway(place):
    """halfway(name) -> a copy of a run that a SIGTERM in step 12 stopped: checkpoints 10, 13."""
    run = succeed(Forked(place / "stopped", arrange={"signal_at": (signal.SIGTERM, 12)}))
    return lambda name: shutil.copytree(run.log_dir, place / name)

def assert_same_run(folder, reference, last=LAST):
    """The same log, but for times, and the same last checkpoint as the run never stopped."""
    assert_same_logs(folder, reference)
    assert_same(load(folder / last), load(reference / last))

def assert_all_whole(folder):
    """No file under a checkpoint's name is half written."""
    for path in folder.glob("*.pt"):
        t.read_checkpoint(path)

def names(folder):
    return sorted(path.name for path in folder.glob("*.pt"))

def snapshot(folder):
    """{name: content} of the files in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()
            if path.is_file() and path.name != ".lock"}

def nth_call(owner, name, n, act):
    """From now on, the nth call of owner.name does act(its arguments) first."""
    real, numbers = getattr(owner, name), itertools.count(1)

    def counted(*args, **kwargs):
        if next(numbers) == n:
            act(*args)
        return real(*args, **kwargs)
    setattr(owner, name, counted)

KILLS = int(os.environ.get("GPT2_SOAK", 4))

@pytest.mark.parametrize("optimizer, dtype", [("adamw", "float32"), ("muon", "bfloat16")])
def test_killed_at_random_moments(place, optimizer, dtype):
    """Killed at any moment and started again is not the same as never killed."""
    words = dict(optimizer=optimizer, dtype=dtype, max_steps=30 * KILLS)
    whole = succeed(Forked(place / f"whole_{optimizer}", **words))
    rng, folder = random.Random(0), place / f"killed_{optimizer}"
    for _ in range(KILLS):
        run = Forked(folder, arrange={"slow": 0.02}, **words)
        seen = rng.randint(1, 9)  # steps, then it may be anywhere
        until(lambda: run.out.count(" train ") > seen and names(folder), run=run)  # noqa: B023
        run.process.kill()
        run.wait()
        assert_all_whole(folder)
    run = succeed(Forked(folder, **words))
    assert int(re.search(r"from step (\d+) on", run.out)[1]) > 0
    assert_same_run(folder, whole.log_dir, f"checkpoint_{30 * KILLS:05d}.pt")

def kill(arrange, call, n):
    """Die at the nth such call of os; Python 3.10's Path has its own os.unlink."""
    owner = Path if call == "unlink" else os
    nth_call(owner, call, n, lambda *_: os.kill(os.getpid(), signal.SIGKILL))

@pytest.mark.parametrize("call, last", [("fsync", 9), ("replace", 5), ("unlink", 8)])
def test_killed_inside_a_save(place, reference, call, last):
    """A save cut off anywhere spoils a checkpoint or leaves half of one for good."""
    rng, folder = random.Random(call), place / f"inside_{call}"
    for n in (rng.randint(2, last), rng.randint(1, 3), 1):
        assert Forked(folder, arrange={kill: (call, n)}).wait() == -signal.SIGKILL
        assert_all_whole(folder)
    (folder / "checkpoint_00007.pt.part").touch()  # of a save whose step does not come again
    succeed(Forked(folder))
    assert not list(folder.glob("*.part"))
    assert_same_run(folder, reference)

def test_training_goes_on_while_a_save_is_written(tmp_path, monkeypatch):
    """It changes what is saved; the embedding, which is the output, too, is there twice; or each
    save asks for new memory, while the one before it is still written."""
    folder, weight = t.RunFolder(t.Config(log_dir=str(tmp_path)), "data"), torch.zeros(3)
    copy, buffers = t.copy_to_host({"model": [weight, weight], "step": 5}, {})
    weight += 1
    first, second = copy["model"]
    assert first is second and not first.any()
    again, _ = t.copy_to_host({"model": [weight]}, buffers)
    assert again["model"][0] is first and first.all()
    seen = mock.MagicMock()
    folder.save_in_progress, folder.log, folder.thread = seen.saving, seen.log, seen.thread
    monkeypatch.setattr(t, "copy_to_host", lambda *args: (seen.copy(*args), {}))
    monkeypatch.setattr(t.os, "fsync", seen.fsync)
    folder.save(mock.MagicMock(step=5, **{"state_dict.return_value": {}}))
    calls = [name for name, *_ in seen.mock_calls if "__" not in name]
    assert calls == ["saving.result", "log.fileno", "fsync", "copy", "thread.submit"]

def test_a_checkpoint_is_verified_before_it_has_its_name(tmp_path, capsys):
    """Or the good ones before it go, and one that cannot be read stays. The thread that saves
    starts no threads of OpenMP, which would slow training."""
    for step in (5, 8, 10):
        (tmp_path / f"checkpoint_{step:05d}.pt").touch()
    before, folder = names(tmp_path), t.RunFolder(t.Config(log_dir=str(tmp_path)), "data")
    content = {"step": 15, "raw_model": {"weight": torch.zeros(2**17)}}
    with mock.patch.object(torch, "save", lambda content, file: file.write(b"damaged")):
        folder.write_checkpoint(content)
    assert names(tmp_path) == before and folder.safe_step != 15
    assert "NOT SAVED at step 15" in capsys.readouterr().out
    threads = set(Path("/proc/self/task").glob("*"))  # none but on Linux
    folder.thread.submit(folder.write_checkpoint, content).result()
    assert len(set(Path("/proc/self/task").glob("*")) - threads) <= 1
    folder.thread.shutdown()
    assert folder.safe_step == 15
    assert names(tmp_path) == ["checkpoint_00010.pt", "checkpoint_00015.pt"]

def test_a_checkpoint_made_on_a_gpu_is_read_without_one(reference, tmp_path, monkeypatch):
    """Reading asks for the GPU that the tensors were on."""
    content = load(reference / LAST)
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
    torch.save(content, tmp_path / "gpu.pt")
    assert_same(t.read_checkpoint(tmp_path / "gpu.pt"), content)

@pytest.mark.parametrize("first, second", [("SIGTERM", "SIGINT"), ("SIGINT", "SIGTERM")])
def test_signals_in_the_first_a_middle_and_the_last_step(place, reference, first, second):
    """A signal loses the step in progress, or the run does not continue after it."""
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
    """A step or a save may take minutes, or never end. SIGTERM is no impatience."""
    folder = halfway("impatient")
    run = Forked(folder, arrange={"signal_at": (signal.SIGINT, 16, 16)})
    assert run.wait() == 130 and not run.err and (16, "train") not in read_log(folder)
    assert run.out.splitlines()[-1].startswith("Ended at once. The same command continues")
    run = succeed(Forked(folder, arrange={"signal_at": (signal.SIGTERM, 18, 18)}))
    assert "Stopped by a signal after 19 steps" in run.out
    succeed(Forked(folder))
    assert_same_run(folder, reference)

EXIT = """
import os, subprocess, sys, time
sys.modules["transformers"] = None  # takes seconds
import train_gpt2 as t
t.main()
end, names = time.time() + 10, "gloo"  # a joined thread can stand there a moment longer
while "gloo" in names and time.time() < end:
    names = subprocess.getoutput(f"cat /proc/{os.getpid()}/task/*/comm")
print(f"threads of gloo: {'gloo' in names}", flush=True)
"""

def test_under_torchrun(place):
    """--max-restarts begins at step 0; SIGTERM loses steps; threads outlive main(), and would
    abort one exit in many."""
    need_gpus(2)
    folder, out = place / "torchrun", place / "torchrun.out"
    (place / "exit.py").write_text(start_simulation() + EXIT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               "--max-restarts=1", str(place / "exit.py")]
    with open(out, "w") as file:
        job = subprocess.Popen(
            command + flags(folder, B=2, **LONG), stdout=file, stderr=subprocess.STDOUT,
            env=ENV | {"PYTHONPATH": str(ROOT)})

    def wait_for(condition):
        until(lambda: job.poll() is not None or condition())
    try:
        wait_for(lambda: names(folder)[1:])  # one of a step after 0
        workers = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(workers[-1]), signal.SIGKILL)
        wait_for(lambda: out.read_text().count(", from step ") == 2)
        again = json.loads((folder / "run.json").read_text())["starts"][1]["step"]
        wait_for(lambda: f"\n{again + 5} train " in (folder / "log.txt").read_text())
    finally:
        job.terminate()
        job.wait(60)
    said, step = out.read_text().rpartition(", from step ")[2], max(read_log(folder))[0] + 1
    assert 0 < again < step < LONG["max_steps"] and again % 5 == 0, said
    assert f"saved {folder}/checkpoint_{step:05d}.pt" in said
    assert f"Stopped by a signal after {step} steps" in said
    assert said.count("threads of gloo: False") == 2, said
    assert "exitcode" not in said  # with which torchrun lists failed workers

def again_in(arrange, name, number):
    """The signal comes once more when that function is called. Only rank 0 sees checkpoints."""
    nth_call(arrange.t, name, 1, lambda *_: os.kill(os.getpid(), number))
    if arrange.t.rank():
        arrange.t.newest_checkpoint = lambda folder: None

def test_a_signal_to_one_of_two_processes(halfway, reference):
    """Ranks decide differently, and wait for each other; a second signal loses what is unsaved;
    or a run does not go on with other numbers of processes and rows."""
    folder = halfway("alone and together")
    arrange = {"signal_on_rank": (1, signal.SIGINT, 20), again_in: ("finish", signal.SIGINT)}
    statuses, runs = together(2, folder, B=2, arrange=arrange)
    assert statuses == [0, 0], [run.err for run in runs]
    assert "from step 13 on" in runs[0].out and runs[1].out == ""
    assert "Stopped by a signal after 21 steps" in runs[0].out
    succeed(Forked(folder, B=8))
    assert_close_logs(folder, reference)

class Bomb:
    """Unpickled by a careless reader, it makes a folder."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)

def test_the_one_before_a_damaged_checkpoint_is_used(halfway, reference, tmp_path, capfd):
    """Damage goes unnoticed, code in it is run, or the run, or its log, does not go on there."""
    folder, marker, bomb = halfway("damaged"), tmp_path / "the bomb went off", io.BytesIO()
    newest = folder / "checkpoint_00013.pt"
    content = newest.read_bytes()
    torch.save(load(newest) | {"raw_model": Bomb(marker)}, bomb)
    table = load(newest)["raw_model"]["transformer.wte.weight"].numpy().tobytes()
    flipped = content.replace(table, table[:-1] + bytes([table[-1] ^ 1]))  # a bit of a weight
    for damaged in (b"", bytes(len(content)), content[:-100], pickle.dumps(Bomb(marker)),
                    bomb.getvalue(), flipped):
        newest.write_bytes(damaged)
        assert t.newest_checkpoint(folder) == folder / "checkpoint_00010.pt", damaged[:99]
        said = capfd.readouterr().out
        assert str(newest) in said and said.count("\n") == 1, said
        assert not marker.exists(), damaged[:99]
    with open(folder / "log.txt", "a") as file:
        file.write("13 train 9.9\n14 train 9.9\n15 tra")
    run = succeed(Forked(folder))
    assert f"{newest} cannot be read" in run.out and ", from step 10 on" in run.out
    assert_same_run(folder, reference)
    torch.load(io.BytesIO(bomb.getvalue()), weights_only=False)
    assert marker.exists()  # in careless hands it does go off

def test_the_newest_two_stay_and_those_of_keep_every(halfway, reference):
    """What was to stay goes, or the disk fills up. One that cannot be deleted, a folder, stays."""
    folder = halfway("kept")
    (folder / "checkpoint_00001.pt").mkdir()
    run = succeed(Forked(folder, keep_every=10, save_every=3))
    assert names(folder) == [f"checkpoint_{step:05d}.pt" for step in (1, 10, 20, 27, 30)]
    assert "NOT SAVED" not in run.out
    assert_same_run(folder, reference)
    for name in ("99500", "100000", "99750_backup", "best"):  # six digits sort before five as text
        (folder / f"checkpoint_{name}.pt").touch()
    assert list(t.find_checkpoints(folder)) == [100000, 99500, 30, 27, 20, 10, 1]

def test_disk_full_to_the_end(place, reference):
    """A full disk ends training, goes unsaid, or costs what was saved, or it cannot go on later."""
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
    """Let each step take so many seconds, by rank. Only steps move this clock, whoever reads it."""
    now, real = [0.0], arrange.t.train_step

    def train_step(run):
        now[0] += seconds[arrange.t.rank()]
        return real(run)
    arrange.t.train_step, arrange.t.time.perf_counter = train_step, lambda: now[0]

def test_minutes_are_steps_that_leave_no_trace(place, reference):
    """The steps that were timed would count twice, or each start of a run make it another one."""
    words = dict(minutes=STEPS * 0.5 / 60, max_steps=7)
    stop = {"signal_at": (signal.SIGTERM, 22)}
    run = succeed(Forked(place / "minutes", arrange={clock: 0.5} | stop, **words))
    stopped = load(run.log_dir / "checkpoint_00023.pt")
    assert (stopped["step"], stopped["tokens"]) == (23, 23 * 128)
    assert stopped["minutes"] == pytest.approx(22 * 0.5 / 60)  # without the first
    assert f"{STEPS} steps fit into 0.25 minutes. " in run.out
    assert f"use --max_steps={STEPS}\n" in run.out
    succeed(Forked(run.log_dir, arrange={clock: 99.0}, **words))
    assert_same_run(run.log_dir, reference)
    times = [value for _, value in t.read_streams(run.log_dir)["minutes"]]
    assert times[0] == 0 and times == sorted(times) and len(set(times)) == len(times)
    assert t.read_run(run.log_dir)["result"]["minutes"] == times[-1]
    assert times[-1] == pytest.approx((22 * 0.5 + 6 * 99) / 60, abs=1e-5)
    other = Forked(run.log_dir, **words | dict(minutes=2))
    assert other.wait() == 1 and one_line(other.err, "minutes was 0.25, is 2.0")
    longer = succeed(Forked(run.log_dir, max_steps=STEPS + 1))
    assert f"max_steps was {STEPS}, is {STEPS + 1}: the learning rate follows" in longer.out
    statuses, runs = together(2, place / "minutes 2", arrange={clock: (0.4, 0.6)}, **words)
    assert statuses == [0, 0], [run.err for run in runs]
    assert_close_logs(runs[0].log_dir, reference)

def other(constant):
    """Another value than any run's here."""
    if constant.name == "max_steps":  # may grow
        return STEPS - 1
    return constant.default + ("x" if isinstance(constant.default, str) else 1)

def test_every_other_constant_is_refused_with_both_values(reference):
    """One that shapes training changes amid a run without a word, or one of speed may not."""
    saved = load(reference / LAST)
    cfg, data = t.Config(**saved["constants"]), saved["data"]
    constants = {field.name: field for field in dataclasses.fields(t.Config)}
    assert t.FREE_TO_CHANGE <= constants.keys()
    for name in t.FREE_TO_CHANGE:
        changed = dataclasses.replace(cfg, **{name: other(constants[name])})
        t.check_same_training(saved, changed, data)
    for name in constants.keys() - t.FREE_TO_CHANGE - {"data"}:
        value = other(constants[name])
        with pytest.raises(t.UserError) as e:
            t.check_same_training(saved, dataclasses.replace(cfg, **{name: value}), data)
        assert f"{name} was {getattr(cfg, name)!r}, is {value!r}" in str(e.value)
        assert str(e.value).count(" was ") == 1 and "--log_dir" in str(e.value)
    t.check_same_training(saved, dataclasses.replace(cfg, max_steps=40), data)
    saved["step"] = 20  # a run that was to be 30 steps long cannot be made shorter
    with pytest.raises(t.UserError, match="max_steps was 30, is 29"):
        t.check_same_training(saved, dataclasses.replace(cfg, max_steps=29), data)
    with pytest.raises(t.UserError, match=f"data was '{re.escape(data)}', is 'another'"):
        t.check_same_training(saved, cfg, "another")

def test_a_refused_start_changes_nothing(halfway):
    """Other constants, or no whole checkpoint, cost the log and the checkpoints that are there."""
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
    arrange.t.validation_loss = lambda run, _: 1 + abs(run.state.step - step) / 10

def test_where_validation_rises_the_best_weights_stay_and_are_exported(place, is_gpt2, capfd):
    """Weights that are tuned on a small text are at their best long before the last step."""
    run = succeed(Forked(place / "rises", arrange={rise_after: 10}, hide=["matplotlib"]))
    folder, best = run.log_dir, run.log_dir / "checkpoint_00010.pt"
    assert names(folder) == [best.name, "checkpoint_00025.pt", LAST]
    assert f"exported {best} to" in run.out
    result = json.loads((folder / "run.json").read_text())["result"]
    assert result["lowest_val"] == 1 and result["lowest_step"] == 10 and result["val"] == 3
    exported = t.GPT.from_pretrained(folder / "hf").state_dict()
    torch.testing.assert_close(exported, dict(load(best)["eval_model"]), rtol=0, atol=0)
    assert t.best_checkpoint(folder) == best
    (folder / "log.txt").write_text("10 val 1.0\n20 val 0.5\n25 val 0.9\n30 val 0.8\n")
    assert t.best_checkpoint(folder) == folder / LAST  # of step 20 there is none
    newest = (folder / LAST).rename(folder / "checkpoint_00032.pt")
    assert t.best_checkpoint(folder) == newest  # not validated, but validation still falls
    (folder / "log.txt").write_text("10 val 1.0\n25 val 1.5\n")
    assert t.best_checkpoint(folder) == best
    best.write_bytes(best.read_bytes()[:-100])
    assert t.best_checkpoint(folder) == newest  # the best is damaged, and a line says so
    said = capfd.readouterr().out
    assert f"{best} cannot be read" in said and "Using the newest one instead" in said

def leave_at(arrange, step):
    """An edit of the loop, say by a clock or a metric."""
    source = inspect.getsource(arrange.t.train)
    exec(source.replace("step >= cfg.max_steps:", f"step >= {step}:"), vars(arrange.t))

def test_a_loop_that_is_left_early_is_a_run(place, reference):
    """Its result would be of another step, or not saved, or look like the end of the training; or
    older weights are exported, where the last save takes long."""
    run = succeed(Forked(place / "left", arrange={leave_at: 7, "slow_saves": 0.3}))
    assert (7, "val") in read_log(run.log_dir) and "\n    7/30 val " in run.out
    saved = run.out.index(f"saved {run.log_dir}/checkpoint_00007.pt")
    assert saved < run.out.index("Not exported") < run.out.index("Ended after 7 of 30 steps. The s")
    succeed(Forked(run.log_dir))
    assert_same_run(run.log_dir, reference)

def test_a_finished_run_evaluates_and_exports_again(place, reference, is_gpt2):
    """The command of a finished run does nothing, or changes what is there."""
    folder = shutil.copytree(reference, place / "finished")
    before = snapshot(folder)
    run = succeed(Forked(folder, sample_every=10, sample_tokens=5, hide=["matplotlib"]))
    for said in ("is finished", f"{STEPS}/{STEPS} val ", f"at step {STEPS}",
                 f"exported {folder / LAST} to"):
        assert said in run.out, said
    assert snapshot(folder) | {"run.json": before["run.json"]} == before

def test_another_runs_log_and_export_are_renamed(tmp_path):
    """Where somebody moved the checkpoints away, a new run overwrites the old one's results."""
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
    """hf/ never holds older weights than the run. That of a finished run keeps its name."""
    for step, renamed in ((20, True), (30, False)):
        log_dir = tmp_path / str(step)
        (log_dir / "hf").mkdir(parents=True)
        folder = t.RunFolder(t.Config(log_dir=str(log_dir), max_steps=30), "data")
        folder.begin(step, continues=True)
        folder.close()
        assert (log_dir / "hf").exists() != renamed
        assert len([*log_dir.glob("hf_before_*")]) == renamed

def test_the_second_of_two_runs_refuses(place, reference):
    """Two runs write the same files."""
    first = Forked(place / "two", arrange={"signal_at": (signal.SIGSTOP, 2)})
    first.wait_for_stop()
    (place / "two" / "run.json.part").touch()  # the first one may be amid a save
    second = Forked(place / "two")
    assert second.wait() == 1 and (place / "two" / "run.json.part").exists()
    one_line(second.err, "Another run", place / "two")
    first.go_on()
    succeed(first)
    assert_same_run(place / "two", reference)
