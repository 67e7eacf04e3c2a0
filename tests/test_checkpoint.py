"""Checkpoints, resuming, signals, kills, full disks, damaged files: real processes, real kills.

GPT2_SOAK=1 adds the long soak.
"""
import ctypes
import dataclasses
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
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    ENV, ROOT, TINY, Forked, assert_close_logs, flags, load, one_line, read_log, run_python,
    succeed, torchrun, two_processes, until, write_text)

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


def assert_same(a, b):
    """Two checkpoints' contents are the same bit for bit; their folders may differ."""
    assert a.keys() == b.keys() and (a["encoding"], a["data"]) == (b["encoding"], b["data"])
    for key in ("step", "gpt_config", "model", "optimizers", "scaler"):
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=0)


def assert_same_run(folder, reference, last=LAST):
    """The same log byte for byte and the same last checkpoint as the run never stopped."""
    assert (folder / "log.txt").read_bytes() == (reference / "log.txt").read_bytes()
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


# ------------------------------------------------------------------------- kill -9, resume
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_killed_at_random_moments(place, optimizer):
    """Killed at any moment and started again is not the same as never killed."""
    whole = succeed(Forked(place / f"whole_{optimizer}", optimizer=optimizer))
    rng, folder = random.Random(0), place / f"killed_{optimizer}"
    for _ in range(6):
        run = Forked(folder, optimizer=optimizer, arrange={"slow": 0.03})
        until(lambda: "from step" in run.out, run=run)  # noqa: B023
        time.sleep(rng.uniform(0, 0.3))
        run.process.kill()
        run.wait()
        assert_all_whole(folder)
    succeed(Forked(folder, optimizer=optimizer))
    assert_same_run(folder, whole.log_dir)


def kill(arrange, call, n):
    """Die at the nth such call of os, or when half of what the nth torch.save saves is written."""
    save = torch.save

    def die(*args):
        if call == "save":
            whole = io.BytesIO()
            save(args[0], whole)
            args[1].write(whole.getvalue()[:whole.tell() // 2])
            args[1].flush()
        os.kill(os.getpid(), signal.SIGKILL)
    nth_call(torch if call == "save" else os, call, n, die)


@pytest.mark.parametrize("call, last", [("fsync", 9), ("replace", 5), ("unlink", 8), ("save", 4)])
def test_killed_inside_a_save(place, reference, call, last):
    """A save cut off anywhere spoils a checkpoint or leaves half of one for good."""
    rng, folder = random.Random(call), place / f"inside_{call}"
    for n in (rng.randint(2, last), rng.randint(1, 3), 1):
        assert Forked(folder, arrange={kill: (call, n)}).wait() == -signal.SIGKILL
        assert_all_whole(folder)
    (folder / "checkpoint_00012.pt.part").touch()  # of a kill in the save that a signal asked for
    succeed(Forked(folder))
    assert not list(folder.glob("*.part"))
    assert_same_run(folder, reference)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.skipif(
    not os.environ.get("GPT2_SOAK"), reason="takes minutes: set GPT2_SOAK=1"))])
def test_the_script_itself_killed_and_started_again(place, kills):
    """What a user types does not continue where it was killed."""
    constants = LONG | dict(optimizer="muon", max_steps=150 * kills, save_every=25)
    whole = succeed(Forked(place / f"whole_{kills}", **constants))
    folder, rng = place / f"script_{kills}", random.Random(kills)
    command = [sys.executable, str(ROOT / "train_gpt2.py"), *flags(folder, **constants)]
    env, log = ENV | {"PYTHONPATH": str(place)}, folder / "log.txt"
    for _ in range(kills):
        start = time.time()
        run = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
        until(lambda: run.poll() or names(folder) and log.stat().st_mtime > start)  # noqa: B023
        time.sleep(rng.uniform(0, 0.5))
        run.kill()
        run.wait()
        assert_all_whole(folder)
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    assert_same_run(folder, whole.log_dir, f"checkpoint_{150 * kills:05d}.pt")


def hold_save_until(arrange, n, step):
    """The thread that saves waits in its nth save until that step begins."""
    begun = threading.Event()
    arrange.before([step], lambda run: begun.set())
    nth_call(t, "write_checkpoint", n, lambda *_: begun.wait())


def test_training_goes_on_while_a_save_is_written(place, reference):
    """Training waits for the disk, or changes what is being saved."""
    folder, name = place / "slow disk", "checkpoint_00025.pt"
    run = succeed(Forked(folder, arrange={hold_save_until: (5, 29)}))
    assert re.search(rf"   28/30 loss .*saved {folder}/{name}", run.out, re.S)
    assert_same(load(folder / name), load(reference / name))
    assert_same_run(folder, reference)


def test_a_checkpoint_made_on_a_gpu_is_read_without_one(reference, tmp_path, monkeypatch):
    """Reading asks for the GPU that the tensors were on."""
    content = load(reference / LAST)
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
    torch.save(content, tmp_path / "gpu.pt")
    assert_same(t.read_checkpoint(tmp_path / "gpu.pt"), content)


# --------------------------------------------------------------------------------- signals
@pytest.mark.parametrize("first, second", [("SIGTERM", "SIGINT"), ("SIGINT", "SIGTERM")])
def test_signals_in_the_first_a_middle_and_the_last_step(place, reference, first, second):
    """A signal loses the step in progress, or the run does not continue after it."""
    folder = place / f"signal_{first}"
    for name, step in ((first, 0), (second, 14), (first, STEPS - 1)):
        run = succeed(Forked(folder, arrange={"signal_at": (getattr(signal, name), step)}))
        assert (step, "train") in read_log(folder)
        assert f"saved {folder}/checkpoint_{step + 1:05d}.pt" in run.out
        assert f"Stopped by a signal after {step + 1} steps" in run.out.splitlines()[-1]
    succeed(Forked(folder))
    assert_same_run(folder, reference)


def test_ctrl_c_before_there_is_anything_to_save_ends_at_once():
    done = run_python("import os, signal, train_gpt2 as t\n"
                      "t.pick_device = lambda name: os.kill(os.getpid(), signal.SIGINT)\nt.main()")
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_second_ctrl_c_at_once_is_the_first():
    """`timeout -s INT` sends two, and people press twice before they read what that does."""
    done = run_python("import time, train_gpt2 as t\ntimes = [0, 0.5, 1.5]\n"
                      "t.time.time = lambda: print(times[0], flush=True) or times.pop(0)\n"
                      "t.StopRequest().button.send(b'\\2\\2\\2')\ntime.sleep(60)")
    assert (done.returncode, done.stdout.split()[-3:]) == (1, ["0", "0.5", "1.5"]), done


def hang_at(arrange, step):
    """That step never ends, in C: Python gets no turn to handle a signal."""
    mutex, lock = bytes(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    arrange.before([step], lambda run: lock(mutex))


def test_ctrl_c_is_answered_at_once_and_a_second_one_ends(place):
    """In a long step nothing is said, or nothing but kill -9 ends the process."""
    run = Forked(place / "ctrl c", arrange={hang_at: 7})
    until(lambda: "    6/30 loss" in run.out, run=run)
    os.kill(run.pid, signal.SIGINT)
    until(lambda: "Ctrl-C again ends" in run.out, run=run)
    time.sleep(3)
    assert not run.ended()
    os.kill(run.pid, signal.SIGINT)
    assert run.wait() == 1


# -------------------------------------------------------------------------------- torchrun
def test_under_torchrun_and_on_other_numbers_of_processes(place):
    """--max-restarts begins at step 0, SIGTERM loses steps, or B and processes change the model."""
    folder, out = place / "chain", place / "chain.out"
    command = torchrun("--standalone", "--nproc_per_node=2", "--max-restarts=3")
    with open(out, "w") as file:
        job = subprocess.Popen(
            command + flags(folder, **LONG), env=ENV | {"PYTHONPATH": str(place)}, stdout=file,
            stderr=subprocess.STDOUT)

    def wait_for(condition):
        until(lambda: job.poll() is not None or condition())
    try:
        wait_for(lambda: names(folder))
        workers = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(workers[-1]), signal.SIGKILL)
        wait_for(lambda: out.read_text().count(", from step ") == 2)
        again = json.loads((folder / "run.json").read_text())["starts"][1]["step"]
        wait_for(lambda: f"\n{again + 5} train " in (folder / "log.txt").read_text())
    finally:
        job.terminate()
        job.wait(300)
    said, step = out.read_text().rpartition(", from step ")[2], max(read_log(folder))[0] + 1
    assert 0 < again < step < LONG["max_steps"] and again % 5 == 0
    assert f"saved {folder}/checkpoint_{step:05d}.pt" in said
    assert f"Stopped by a signal after {step} steps" in said
    assert "exitcode" not in said  # with which torchrun lists failed workers
    succeed(Forked(folder, arrange={"signal_at": (signal.SIGTERM, step + 9)}, **LONG | {"B": 8}))
    stop = {"signal_at": (signal.SIGTERM, step + 19)}
    statuses, runs = two_processes(folder, arrange=stop, **LONG | {"B": 2})
    assert statuses == [0, 0], [run.err for run in runs]
    assert f", from step {step + 10} on" in runs[0].out
    whole = succeed(Forked(place / "not stopped", arrange=stop, **LONG))
    assert_close_logs(folder, whole.log_dir)


def test_two_ctrl_c_under_torchrun_are_one(place):
    """Workers, which get each Ctrl-C from torchrun as well, end before they have saved."""
    statuses, runs = two_processes(place / "twice", arrange={"signal_at": (signal.SIGINT, 12, 12)})
    assert statuses == [0, 0], [run.err for run in runs]
    assert "Stopped by a signal after 13 steps" in runs[0].out


def check_threads(arrange, name):
    """At the end no such thread is left."""
    def destroy_process_group():
        real()
        threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        assert len(threads) > 1 and name not in threads, threads
    real, t.dist.destroy_process_group = t.dist.destroy_process_group, destroy_process_group


def test_every_process_ends(place):
    """A thread of gloo is left, which may want the GIL while Python waits for it: some hung."""
    arrange = {check_threads: "pt_gloo_runloop"}
    statuses, runs = two_processes(place / "ends", max_steps=1, arrange=arrange)
    assert statuses == [0, 0], [run.err for run in runs]


# --------------------------------------------------------------------------- damaged files
class Bomb:
    """Unpickled by a careless reader, it makes a folder."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_the_one_before_a_damaged_checkpoint_is_used(halfway, reference, tmp_path, capfd):
    """Damage goes unnoticed, code in it is run, or the run, or its log, does not go on there."""
    folder, marker = halfway("damaged"), tmp_path / "the bomb went off"
    newest = folder / "checkpoint_00013.pt"
    content, archive, bomb = newest.read_bytes(), io.BytesIO(), io.BytesIO()
    np.savez(archive, hello=np.zeros(3))
    torch.save(load(newest) | {"model": Bomb(marker)}, bomb)
    for damaged in (b"", b"step 13\n", bytes(len(content)), content[:-100], archive.getvalue(),
                    pickle.dumps(Bomb(marker)), bomb.getvalue()):
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


def read_or_refused(path, content, whole):
    """True if a file with this content reads as `whole`, False if it is refused."""
    path.unlink(missing_ok=True)  # the one before it may still be mapped
    path.write_bytes(content)
    try:
        assert_same(t.read_checkpoint(path), whole)
        return True
    except t.UserError:
        return False


def test_truncated_anywhere_and_flipped_bits_are_refused(reference, tmp_path):
    """Damage goes unnoticed. A bit between two tensors changes nothing and may flip."""
    whole, content = load(reference / LAST), (reference / LAST).read_bytes()
    path, rng, size = tmp_path / "damaged.pt", random.Random(0), len(content)
    lengths = [*range(0, 600, 61), *range(size - 600, size, 23), *rng.sample(range(size), 50)]
    for length in [*lengths, size - 1]:
        assert not read_or_refused(path, content[:length], whole), length
    table = whole["model"]["transformer.wte.weight"].numpy().tobytes()
    begin, directory = content.index(table), content.index(b"PK\x01\x02")
    embedding = range(begin, begin + len(table))
    places = rng.sample(range(300), 40) + rng.sample(range(size), 100)
    places += rng.sample(range(directory, size), 100) + rng.sample(embedding, 50)
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << rng.randrange(8)
        assert not (read_or_refused(path, flipped, whole) and place in embedding), place


def test_what_a_checkpoint_holds(reference):
    """Something that the coming steps depend on is missing, or the embedding is there twice."""
    content = load(reference / LAST)  # by weights_only=True
    assert content.keys() == {"step", "model", "gpt_config", "optimizers", "scaler", "encoding",
                              "constants", "data"}
    shared = [content["model"][f"{name}.weight"] for name in ("lm_head", "transformer.wte")]
    assert shared[0].data_ptr() == shared[1].data_ptr()


def test_the_newest_two_stay_and_those_of_keep_every(halfway, reference):
    """What was to stay goes, or the disk fills up. One that cannot be deleted, a folder, stays."""
    folder = halfway("kept")
    (folder / "checkpoint_00001.pt").mkdir()
    run = succeed(Forked(folder, keep_every=10, save_every=12))
    assert names(folder) == [f"checkpoint_{step:05d}.pt" for step in (1, 10, 20, 24, 30)]
    assert "NOT SAVED" not in run.out
    assert_same_run(folder, reference)


def test_the_order_of_checkpoints_is_that_of_their_steps(tmp_path):
    """Six digits sort before five as text; files that are not ours count as checkpoints."""
    for name in ("99500", "99750", "100000", "99750_backup", "best"):
        (tmp_path / f"checkpoint_{name}.pt").touch()
    assert list(t.find_checkpoints(tmp_path)) == [100000, 99750, 99500]


def overflow_after(arrange, step):
    """That step's update makes a weight infinite, after a finite loss."""
    def act(run):
        weight = run.state.raw_model.transformer.wpe.weight.data
        run.state.optimizers[0].register_step_post_hook(lambda *_: weight.fill_(torch.inf))
    arrange.before([step], act)


def test_weights_that_are_not_finite_are_never_saved(place):
    """Step 4's loss is finite, its update is not: checkpoint 5 takes the place of a good one."""
    run = Forked(place / "overflow", save_every=1, max_steps=8, arrange={overflow_after: 4})
    assert run.wait() == 1
    one_line(run.err, "nan")
    assert "NOT SAVED at step 5" in run.out
    assert names(run.log_dir) == ["checkpoint_00003.pt", "checkpoint_00004.pt"]


# ------------------------------------------------------------------------------- full disk
def limit(run, size=resource.RLIM_INFINITY):
    """From now on that process can make no file larger than that."""
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.fixture(params=["tmpfs", "file size limit"])
def disk(request, tmp_path):
    """(log_dir, fill(run), free()): a disk that can be filled. Either a small tmpfs, which needs
    root, or a limit on the size of that run's files, by which writing a checkpoint fails."""
    if request.param == "file size limit":
        yield tmp_path / "log", lambda run: limit(run, 20_000), lambda: None
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")

    def fill(run):
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "ballast").write_bytes(bytes(2**20))
    yield tmp_path / "log", fill, (tmp_path / "ballast").unlink
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_disk_full_to_the_end(disk, place, reference):
    """A full disk ends training, goes unsaid, or costs what was saved, or it cannot go on later."""
    folder, fill, free = disk
    arrange = {"signal_at": (signal.SIGSTOP, 12), "picture": True}
    run = Forked(folder, data=place / "text.txt", arrange=arrange)
    run.wait_for_stop()
    fill(run)
    run.go_on()
    assert run.wait() == 1
    one_line(run.err, f"Step {STEPS} is not saved")
    problem = "!!! NOT SAVED at step 15: .*(No space left|too large).*   29/30 loss"
    assert re.search(problem, run.out, re.S), run.out
    assert names(folder) == ["checkpoint_00005.pt", "checkpoint_00010.pt"]
    assert_all_whole(folder)
    assert not list(folder.glob("*.part"))
    free()
    succeed(Forked(folder, data=place / "text.txt"))
    assert_same_run(folder, reference)


def test_lines_that_a_full_disk_refused_are_written_later(place, reference):
    """The log loses lines, or is another file, which `tail -f` misses, or stdout there is fatal."""
    run = Forked(place / "no room", arrange={"signal_at": (signal.SIGSTOP, 12, 22)})
    run.wait_for_stop()
    with open(run.log_dir / "log.txt", "rb") as tail:
        limit(run, len(tail.read()) + 10)
        run.go_on()
        run.wait_for_stop()
        assert len(tail.read()) == 10
        limit(run)
        run.go_on()
        succeed(run)
        tail.seek(0)
        assert tail.read() == (reference / "log.txt").read_bytes()
    assert_same_run(run.log_dir, reference)


# ------------------------------------------------------------------------- a folder is a run
OTHER = dict(
    encoding="gpt2", shuffle=False, seed=7, total_batch_size=256, T=8, n_layer=2, n_head=4,
    n_embd=32, init_from="gpt2", optimizer="muon", max_lr=0.5, min_lr=0.25, warmup_steps=6,
    max_steps=29, weight_decay=0.5, grad_clip=2.0, muon_lr_ratio=3.0, lr_shape="cosine")


def test_every_other_constant_is_refused_with_both_values(reference):
    """A constant that shapes training changes amid a run without a word."""
    saved = load(reference / LAST)
    cfg, data = t.Config(**saved["constants"]), saved["data"]
    fields = {field.name for field in dataclasses.fields(t.Config)}
    assert OTHER.keys() | t.FREE_TO_CHANGE | {"data"} == fields
    for name, value in OTHER.items():
        with pytest.raises(t.UserError) as e:
            t.check_same_training(saved, dataclasses.replace(cfg, **{name: value}), data)
        assert f"{name} was {getattr(cfg, name)!r}, is {value!r}" in str(e.value)
        assert str(e.value).count(" was ") == 1 and "--log_dir" in str(e.value)
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


def test_constants_of_speed_and_place_may_change(place, halfway, reference):
    """A run cannot continue on another machine, or changes there."""
    folder = halfway("free").rename(place / "elsewhere")
    run = succeed(Forked(
        folder, B=8, dtype="bfloat16", compile=False, save_every=3, keep_every=11,
        sample_every=10, sample_tokens=3, sample_prompt="x", eval_every=6, val_tokens=512,
        grad_comm="bfloat16", temperature=0.5, top_k=3, device="auto", print_every=5,
        env={"CUDA_VISIBLE_DEVICES": ""}))
    assert ", from step 13 on" in run.out
    ours, theirs = read_log(folder), read_log(reference)
    for step in range(STEPS):
        assert abs(ours[step, "train"] - theirs[step, "train"]) < 0.05


def test_the_same_shards_elsewhere_are_the_same_data(place):
    """A moved corpus is refused, or another one is trained on without a word."""
    folder, first, second = place / "on_shards", place / "shards", place / "moved_shards"
    first.mkdir()
    for name, size in {"val_0": 2000, "train_1": 9000, "train_2": 7000}.items():
        np.save(first / f"x_{name}.npy", np.arange(size, dtype=np.uint16) % 256)
    succeed(Forked(folder, data=first, arrange={"signal_at": (signal.SIGTERM, 7)}))
    first.rename(second)
    succeed(Forked(folder, data=second, arrange={"signal_at": (signal.SIGTERM, 12)}))
    np.save(second / "x_train_3.npy", np.arange(5000, dtype=np.uint16) % 256)
    run = Forked(folder, data=second)
    assert run.wait() == 1
    assert re.search("data was '16,000 tokens.*, is '21,000 tokens", one_line(run.err))


def test_max_steps_may_grow_but_not_shrink(place, halfway, reference):
    """A run, finished or not, cannot be trained longer, or its new schedule goes unsaid."""
    for folder, step in ((halfway("longer"), 13), (shutil.copytree(reference, place / "on"), 30)):
        run = succeed(Forked(folder, max_steps=40))
        lr = t.get_lr(step, t.Config(**load(folder / "checkpoint_00040.pt")["constants"]))
        assert "max_steps was 30, is 40: the learning rate follows" in run.out
        assert re.search(rf"{step}/40 loss .* lr {lr:.2e} ", run.out)
        assert max(read_log(folder)) == (40, "val")
        run = Forked(folder)
        assert run.wait() == 1
        one_line(run.err, "max_steps was 40, is 30")


def test_a_finished_run_evaluates_and_exports_again(place, reference):
    """The command of a finished run does nothing, or changes what is there."""
    folder = shutil.copytree(reference, place / "finished")
    before = snapshot(folder)
    run = succeed(Forked(folder, sample_every=10, sample_tokens=5, hide=["matplotlib"]))
    for said in ("is finished", f"{STEPS}/{STEPS} val loss", f"sample at step {STEPS}", "exported"):
        assert said in run.out, said
    assert snapshot(folder) | {"run.json": before["run.json"]} == before


def test_another_runs_log_and_export_are_renamed(place):
    """Where somebody moved the checkpoints away, a new run overwrites the old one's results."""
    folder = place / "left"
    (folder / "hf").mkdir(parents=True)
    (folder / "hf" / "model.safetensors").write_text("precious")
    (folder / "log.txt").write_text("0 train 10.0\n")
    succeed(Forked(folder, arrange={"signal_at": (signal.SIGTERM, 2)}))
    log, weights = *folder.glob("log.txt_before_*"), *folder.glob("hf_before_*/model.safetensors")
    assert (log.read_text(), weights.read_text()) == ("0 train 10.0\n", "precious")
    assert max(read_log(folder)) == (2, "train")


def test_the_second_of_two_runs_refuses(place, reference):
    """Two runs write the same files."""
    first = Forked(place / "two", arrange={"signal_at": (signal.SIGSTOP, 2)})
    first.wait_for_stop()
    second = Forked(place / "two")
    assert second.wait() == 1
    one_line(second.err, "Another run", place / "two")
    first.go_on()
    succeed(first)
    assert_same_run(place / "two", reference)
