"""Checkpoints, resuming, signals, kills, full disks, damaged files: real processes, real kills.

GPT2_SOAK=1 adds the long soak.
"""
import dataclasses
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
import subprocess
import sys
import time
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from conftest import (
    ENV,
    ROOT,
    TINY,
    Forked,
    assert_close_logs,
    flags,
    load,
    one_line,
    read_log,
    succeed,
    torchrun,
    two_processes,
    until,
    write_text,
)

import train_gpt2 as t

STEPS = TINY["max_steps"]
SCRIPT = [sys.executable, str(ROOT / "train_gpt2.py")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the text that all train on."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_text(folder)
    return folder


@pytest.fixture(scope="module")
def reference(place):
    """reference(optimizer) -> folder of a run never stopped. Not to be changed."""
    made = {}

    def make(optimizer="adamw"):
        if optimizer not in made:
            run = succeed(Forked(place / f"reference_{optimizer}", optimizer=optimizer))
            made[optimizer] = run.log_dir
        return made[optimizer]
    return make


@pytest.fixture(scope="module")
def stopped(place):
    return succeed(Forked(place / "stopped", arrange={"signal_at": (signal.SIGTERM, 12)})).log_dir


@pytest.fixture
def halfway(place, stopped):
    """halfway(name) -> a copy of a run that a SIGTERM in step 12 stopped: checkpoints 10, 13."""
    return lambda name: shutil.copytree(stopped, place / name)


@pytest.fixture(scope="module")
def long(place):
    """Folder of one process's run with LONG constants, never stopped."""
    return succeed(Forked(place / "long", **LONG)).log_dir


LONG = dict(max_steps=1000, eval_every=50, save_every=20, max_lr=3e-3)


def same(a, b):
    """Whether two checkpoints' contents are equal bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def assert_same_run(folder, reference, steps=STEPS):
    """The same log byte for byte, weights and optimizers bit for bit, as the run never stopped."""
    assert (folder / "log.txt").read_bytes() == (reference / "log.txt").read_bytes()
    for name in (f"model_{steps:05d}.pt", f"checkpoint_{steps:05d}.pt"):
        a, b = load(folder / name), load(reference / name)
        for volatile in ("constants", "versions"):
            del a[volatile], b[volatile]
        assert same(a, b), name


def assert_all_whole(folder):
    """No file under a checkpoint's or model's name is half written."""
    for path in folder.glob("*.pt"):
        t.read_checkpoint(path)


# ------------------------------------------------------------------------- kill -9, resume
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_moments(place, reference, optimizer, seed):
    rng, folder = random.Random(seed), place / f"killed_{optimizer}_{seed}"
    whole, killed = reference(optimizer), 0
    for _ in range(4):
        run = Forked(folder, optimizer=optimizer, arrange={"slow": 0.03})
        time.sleep(rng.uniform(0.05, 0.6))
        os.kill(run.pid, signal.SIGKILL)
        killed += run.wait() == -signal.SIGKILL
        assert_all_whole(folder)
    assert killed
    succeed(Forked(folder, optimizer=optimizer))
    assert_same_run(folder, whole)


@pytest.mark.parametrize("call", ["fsync", "replace", "unlink", "write"])
def test_killed_inside_a_save(place, reference, call):
    """Again and again, while the thread that saves is at a random one of the calls it makes."""
    rng, folder = random.Random(call), place / f"inside_{call}"
    nth = {"fsync": (3, 9), "replace": (3, 7), "unlink": (1, 9), "write": (1, 900)}[call]
    killed = 0
    for _ in range(8):
        run = Forked(folder, arrange={"kill": (call, rng.randint(*nth))})
        if run.wait() == 0:
            break
        assert run.status == -signal.SIGKILL, run.err
        killed += 1
        assert_all_whole(folder)
    else:
        succeed(Forked(folder))
    assert killed
    assert not list(folder.glob("*.part"))
    assert_same_run(folder, reference())


def test_killed_between_the_last_save_and_the_end(place, reference):
    """The last step's checkpoint stands, but its validation, weights and export do not yet."""
    folder = place / "last"
    run = Forked(folder, arrange={"signal_in": (signal.SIGKILL, "finish")})
    assert run.wait() == -signal.SIGKILL
    until(lambda: run.ended())
    assert not (folder / f"model_{STEPS:05d}.pt").exists()
    again = succeed(Forked(folder))
    assert f"{STEPS:5d}/{STEPS} val loss" in again.out
    assert_same_run(folder, reference())


def test_the_script_itself_killed_and_started_again(place, reference):
    """As a user types it; the end exports to Hugging Face where transformers is."""
    folder = place / "script"
    command = SCRIPT + flags(folder)
    run = subprocess.Popen(command, env=ENV, stdout=subprocess.DEVNULL)
    until(lambda: (folder / "checkpoint_00010.pt").exists())
    run.kill()
    assert run.wait() == -signal.SIGKILL
    subprocess.run(command, env=ENV, check=True, stdout=subprocess.DEVNULL)
    assert_same_run(folder, reference())
    assert not list(folder.glob("*.part"))


def test_training_goes_on_while_a_save_is_written(place, reference):
    """The thread that writes checkpoint 5 is held up until step 9 was logged."""
    folder = place / "slow disk"
    run = Forked(folder, arrange={"hold_save_until": 9})
    assert run.wait() == 0, run.err
    lines = run.out.splitlines()
    saved = next(i for i, line in enumerate(lines) if "saved" in line and "_00005.pt" in line)
    logged = next(i for i, line in enumerate(lines) if re.match(r" +9/30 loss", line))
    assert logged < saved
    assert_same_run(folder, reference())


def test_no_memory_for_a_copy_is_no_reason_to_end(place, reference):
    run = succeed(Forked(place / "no copy", arrange={"fail_in": ("copy_to_host", "MemoryError")}))
    assert run.out.count("saved") == 6
    assert_same_run(run.log_dir, reference())


def test_a_checkpoint_made_on_a_gpu_is_read_without_one(reference, tmp_path, monkeypatch):
    content = load(reference() / f"model_{STEPS:05d}.pt")
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
    torch.save(content, tmp_path / "gpu.pt")
    assert same(dict(t.read_checkpoint(tmp_path / "gpu.pt")), content)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_checkpoints_of_earlier_versions_load(place, reference, optimizer):
    """With torch.optim.Muon's constants, "tied", the best losses, and fewer constants of ours."""
    folder = place / f"earlier_{optimizer}"
    succeed(Forked(folder, optimizer=optimizer, arrange={"signal_at": (signal.SIGTERM, 12)}))
    path = folder / "checkpoint_00013.pt"
    content = load(path)
    content["gpt_config"]["tied"] = True
    content |= {"best_val": 5.0, "last_val": 5.0, "dtype": "float32", "device": "cpu"}
    for name in ("sample", "temperature", "top_k"):
        del content["constants"][name]
    for group in content["optimizers"][-1]["param_groups"]:
        if optimizer == "muon":
            group |= {"nesterov": True, "ns_coefficients": (3.4445, -4.775, 2.0315),
                      "eps": 1e-7, "ns_steps": 5, "adjust_lr_fn": "match_rms_adamw"}
    torch.save(content, path)
    run = succeed(Forked(folder, optimizer=optimizer))
    assert f"continuing from {path}" in run.out
    assert (folder / "log.txt").read_bytes() == (reference(optimizer) / "log.txt").read_bytes()


def test_a_line_cut_short_and_lines_of_lost_steps_go(halfway, reference):
    folder = halfway("cut")
    with open(folder / "log.txt", "a") as file:
        file.write("13 train 9.9\n14 train 9.9\n15 tra")
    succeed(Forked(folder))
    assert_same_run(folder, reference())


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"starts": 3}', "{"])
def test_a_damaged_run_json_is_written_anew(halfway, text):
    folder = halfway(f"run.json {text}")
    (folder / "run.json").write_text(text)
    succeed(Forked(folder, arrange={"signal_at": (signal.SIGTERM, 14)}))
    starts = json.loads((folder / "run.json").read_text())["starts"]
    assert [start["step"] for start in starts] == [13]


# --------------------------------------------------------------------------------- signals
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [0, 14, STEPS - 1])
def test_a_signal_stops_in_good_order(place, reference, number, step):
    folder = place / f"signal_{number}_{step}"
    run = succeed(Forked(folder, arrange={"signal_at": (number, step)}))
    assert read_log(folder)[step, "train"]  # the step was finished
    assert f"saved {folder}/checkpoint_{step + 1:05d}.pt" in run.out
    assert f"Stopped by a signal after {step + 1} steps" in run.out.splitlines()[-1]
    succeed(Forked(folder))
    assert_same_run(folder, reference())


@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_during_a_validation_ends_it(place, reference, processes):
    """torchrun gives its workers 30 s after a SIGTERM; a validation may take minutes."""
    folder = place / f"signal in validation {processes}"
    arrange = {"signal_in_batch": 7}  # of the validation in step 5: it has 16 batches
    if processes == 1:
        run = succeed(Forked(folder, arrange=arrange, eval_every=7))
    else:
        statuses, (run, _) = two_processes(folder, arrange=arrange, eval_every=7, B=2)
        assert statuses == [0, 0], run.err
    assert "Stopped by a signal after 7 steps" in run.out.splitlines()[-1]
    assert (folder / "checkpoint_00007.pt").exists() and (7, "val") not in read_log(folder)
    succeed(Forked(folder, eval_every=7))
    whole = succeed(Forked(place / f"no signal {processes}", eval_every=7))
    assert_close_logs(folder, whole.log_dir)


def test_ctrl_c_before_the_first_step(place):
    run = Forked(place / "early", arrange={"signal_in": (signal.SIGINT, "build_model")})
    assert run.wait() == 1
    one_line(run.err, "before anything was trained")


def test_ctrl_c_while_importing_is_no_traceback(place):
    run = subprocess.Popen(SCRIPT + flags(place / "import"), env=ENV, stderr=subprocess.PIPE)
    until(lambda: b"libtorch" in Path(f"/proc/{run.pid}/maps").read_bytes())
    run.send_signal(signal.SIGINT)
    assert run.communicate()[1] == b"" and run.returncode != 0


# -------------------------------------------------------------------------------- torchrun
class Torchrun:
    """A run under torchrun with two gloo workers."""

    def __init__(self, folder, *options, **changes):
        command = torchrun("--standalone", "--nproc_per_node=2", *options)
        self.log_dir, self.out_file = Path(folder), open(f"{folder}.torchrun", "w+")
        self.process = subprocess.Popen(
            command + flags(folder, **changes), env=ENV, start_new_session=True,
            stdout=self.out_file, stderr=subprocess.STDOUT)

    @property
    def out(self):
        return Path(self.out_file.name).read_text()

    def worker(self, rank):
        """Its pid."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = re.search(r"\) \S (\d+)", (folder / "stat").read_text())[1]
                environment = (folder / "environ").read_bytes()
            except (OSError, TypeError):
                continue
            if int(parent) == self.process.pid and f"\0RANK={rank}\0".encode() in environment:
                return int(folder.name)

    def ended(self):
        return self.process.poll() is not None

    def wait_for_step(self, step):
        log = self.log_dir / "log.txt"
        until(lambda: self.ended() or log.exists() and f"\n{step} train " in log.read_text())
        assert not self.ended(), self.out

    def wait(self):
        try:
            return self.process.wait(300)
        finally:
            self.out_file.close()
            if not self.ended():
                os.killpg(self.process.pid, signal.SIGKILL)


def test_sigterm_under_torchrun_and_another_number_of_processes(place, long):
    """2 processes until SIGTERM, 1 with another B until SIGTERM, 2 with a third B to the end:
    the losses are those of one process never stopped."""
    folder = place / "chain"
    run = Torchrun(folder, **LONG)
    run.wait_for_step(30)
    run.process.terminate()
    run.wait()
    step = max(read_log(folder))[0] + 1
    assert f"Stopped by a signal after {step} steps" in run.out and step < LONG["max_steps"]
    assert f"saved {folder}/checkpoint_{step:05d}.pt" in run.out
    assert (folder / f"checkpoint_{step:05d}.pt").exists()
    assert "exitcode" not in run.out  # with which torchrun lists failed workers
    assert "train_gpt2.py:" not in run.out
    middle = (step + LONG["max_steps"]) // 2
    succeed(Forked(folder, **LONG | dict(B=8), arrange={"signal_at": (signal.SIGTERM, middle)}))
    statuses, runs = two_processes(folder, **LONG | dict(B=2))
    assert statuses == [0, 0], [run.err for run in runs]
    assert f"continuing from {folder}/checkpoint_{middle + 1:05d}.pt" in runs[0].out
    assert_close_logs(folder, long)


def test_torchrun_restarts_after_a_killed_worker_and_stops_on_ctrl_c(place, long):
    """--max-restarts continues from the last checkpoint; Ctrl-C reaches torchrun and workers."""
    folder = place / "restart"
    run = Torchrun(folder, "--max-restarts=3", **LONG, resume=False)  # for the first start alone
    run.wait_for_step(50)
    os.kill(run.worker(rank=1), signal.SIGKILL)
    until(lambda: "continuing from" in run.out or run.ended())
    log = folder / "log.txt"
    lines = log.read_text().count("\n")
    until(lambda: log.read_text().count("\n") > lines + 20 or run.ended())
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does
    run.wait()
    starts = json.loads((folder / "run.json").read_text())["starts"]
    assert [start["step"] > 0 for start in starts] == [False, True], run.out
    assert starts[1]["step"] % 20 == 0
    assert not list(folder.glob("before_*"))
    said = run.out[run.out.index("continuing from"):]
    assert "Stopped by a signal after" in said and "exitcode" not in said, said
    statuses, runs = two_processes(folder, **LONG)
    assert statuses == [0, 0], [run.err for run in runs]
    assert "continuing from" in runs[0].out
    assert_close_logs(folder, long)


def test_every_process_ends(place):
    """In torch 2.13 one in four hung at its end: gloo's threads wanted the GIL of the thread
    that waited for theirs."""
    for n in range(5):
        statuses, runs = two_processes(place / f"ends_{n}", max_steps=3, eval_every=3)
        assert statuses == [0, 0], [run.err for run in runs]


# --------------------------------------------------------------------------- damaged files
class Bomb:
    """Unpickled by a careless reader, it makes a folder."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def saved(thing, **options):
    buffer = io.BytesIO()
    torch.save(thing, buffer, **options)
    return buffer.getvalue()


def zipped(members, compression=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def damaged_files(good, marker):
    """{kind: bytes} of files that are no checkpoint."""
    content = load(good)
    weights = {key: value for key, value in content.items() if key != "optimizers"}
    bomb = content | {"model": Bomb(marker)}
    with zipfile.ZipFile(good) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    flipped = bytearray(good.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    return {
        "empty": b"",
        "text": b"step 13, loss 3.14\n" * 100,
        "zeros": bytes(len(good.read_bytes())),
        "foreign zip": zipped({"readme.txt": "hello"}),
        "compressed": zipped(members, zipfile.ZIP_DEFLATED),  # torch would read it as NaN
        "foreign torch file": saved({"w": torch.zeros(3)}),
        "a tensor": saved(torch.zeros(3)),
        "weights alone": saved(weights),
        "torch bomb": saved(bomb),
        "legacy torch bomb": saved(bomb, _use_new_zipfile_serialization=False),
        "pickle bomb": pickle.dumps(Bomb(marker)),
        "truncated": good.read_bytes()[:-100],
        "flipped": bytes(flipped)}


def test_the_one_before_a_damaged_checkpoint_is_used(halfway, tmp_path, capfd):
    """Every kind of damage is named, no code in it is run, and the one before it is found."""
    folder, marker = halfway("kinds"), tmp_path / "the bomb went off"
    newest = folder / "checkpoint_00013.pt"
    for kind, content in damaged_files(newest, marker).items():
        newest.write_bytes(content)
        assert t.newest_checkpoint(folder) == folder / "checkpoint_00010.pt", kind
        said = capfd.readouterr().out
        assert str(newest) in said and "damaged" in said and said.count("\n") == 1, kind
        assert not marker.exists(), kind
    newest.unlink()
    newest.mkdir()
    assert t.newest_checkpoint(folder) == folder / "checkpoint_00010.pt"


def test_the_bombs_do_go_off_in_careless_hands(stopped, tmp_path):
    for kind in ("torch bomb", "legacy torch bomb"):
        marker, path = tmp_path / kind, tmp_path / "bomb.pt"
        path.write_bytes(damaged_files(stopped / "checkpoint_00013.pt", marker)[kind])
        torch.load(path, weights_only=False)
        assert marker.exists()


def test_a_run_continues_from_the_one_before(halfway, reference, tmp_path):
    folder, marker = halfway("bombed"), tmp_path / "the bomb went off"
    newest = folder / "checkpoint_00013.pt"
    newest.write_bytes(damaged_files(newest, marker)["torch bomb"])
    run = succeed(Forked(folder))
    assert f"{newest} is damaged" in run.out and not marker.exists()
    assert f"continuing from {folder}/checkpoint_00010.pt" in run.out
    assert_same_run(folder, reference())


def test_no_whole_checkpoint_is_one_clear_line(halfway):
    folder = halfway("all damaged")
    before = (folder / "log.txt").read_bytes()
    for path in folder.glob("checkpoint_*.pt"):
        path.write_bytes(path.read_bytes()[:5000])
    run = Forked(folder)
    assert run.wait() == 1 and run.out.count("is damaged") == 2
    one_line(run.err, "--resume=False")
    assert (folder / "log.txt").read_bytes() == before
    statuses, runs = two_processes(folder)
    assert statuses == [1, 1] and runs[1].err == ""
    one_line(runs[0].err, "--resume=False")


def read_or_refused(path, whole):
    """True if the file reads as whole, False if it is refused; anything else fails."""
    try:
        content = t.read_checkpoint(path)
    except t.UserError as e:
        assert str(e) and "\n" not in str(e)
        return False
    assert same(dict(content), whole)
    return True


def test_truncated_anywhere_is_refused(reference, tmp_path):
    good = reference() / f"checkpoint_{STEPS:05d}.pt"
    path, content, rng = tmp_path / "checkpoint_00001.pt", good.read_bytes(), random.Random(0)
    size = len(content)
    lengths = {*range(0, 600, 61), *range(size - 600, size, 23), size - 1,
               *(rng.randrange(size) for _ in range(60))}
    for length in lengths:
        path.write_bytes(content[:length])
        assert not read_or_refused(path, None), length


def test_flipped_bits_are_refused_or_do_not_matter(reference, tmp_path):
    """A bit in a tensor is always noticed; one in the padding between tensors changes nothing."""
    good = reference() / f"checkpoint_{STEPS:05d}.pt"
    path, content, rng = tmp_path / "checkpoint_00001.pt", good.read_bytes(), random.Random(0)
    whole, size = load(good), len(content)
    directory = content.find(b"PK\x01\x02")
    table = whole["model"]["transformer.wte.weight"].numpy().tobytes()
    embedding = content.find(table)
    assert 0 < embedding < directory
    places = [*range(0, 300, 7)]
    places += [rng.randrange(size) for _ in range(200)]
    places += [rng.randrange(directory, size) for _ in range(200)]
    places += [embedding + rng.randrange(len(table)) for _ in range(50)]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        in_embedding = embedding <= place < embedding + len(table)
        assert not (read_or_refused(path, whole) and in_embedding), place


def test_checkpoints_are_plain(reference):
    """Dicts, lists, numbers, strings and tensors, which weights_only=True reads."""
    def check(x, path):
        if type(x) in (dict, OrderedDict):
            for key, value in x.items():
                assert type(key) in (str, int), path
                check(value, f"{path}/{key}")
        elif type(x) in (list, tuple):
            for i, value in enumerate(x):
                check(value, f"{path}/{i}")
        else:
            assert type(x) in (int, float, str, bool, type(None), torch.Tensor), (path, type(x))
    content = load(reference() / f"checkpoint_{STEPS:05d}.pt")
    assert content.keys() == {"step", "model", "gpt_config", "optimizers", "scaler", "encoding",
                              "constants", "versions", "fingerprint"}
    assert content["step"] == STEPS and content["constants"]["max_lr"] == TINY["max_lr"]
    check(content, "")
    weights = load(reference() / f"model_{STEPS:05d}.pt")
    check(weights, "")
    assert weights.keys() == content.keys() - {"optimizers", "scaler"}
    shared = {content["model"][f"{name}.weight"].data_ptr()
              for name in ("lm_head", "transformer.wte")}
    assert len(shared) == 1  # the embedding is in the file once


def test_the_newest_two_are_kept_and_milestones_for_good(place, reference):
    folder = place / "milestones"
    succeed(Forked(folder, milestone_every=7, save_every=12))
    names = [path.name for path in sorted(folder.glob("*.pt"))]
    assert names == ["checkpoint_00028.pt", "checkpoint_00030.pt",
                     *(f"model_{step:05d}.pt" for step in (7, 14, 21, 28, 30))]
    assert_same_run(folder, reference())


def test_the_order_of_checkpoints_is_that_of_their_steps(tmp_path):
    """Six digits sort before five as text. Files that are not ours to count stay out of it."""
    for name in ("99500", "99750", "100000", "99750_backup", "best"):
        (tmp_path / f"checkpoint_{name}.pt").touch()
    assert [step for step, _ in t.checkpoint_paths(tmp_path)] == [100000, 99750, 99500]


# ------------------------------------------------------------------------------- full disk
@pytest.fixture(params=["tmpfs", "file size limit"])
def disk(request, place, tmp_path):
    """(folder on it, fill(run), free(run)): a disk that can be filled. Either a small tmpfs,
    which needs root, or a limit on the size of files, by which writing a checkpoint fails."""
    if request.param == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
        mounted = subprocess.run(mount, capture_output=True)
        if mounted.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")

        def fill(run):
            with open(tmp_path / "ballast", "ab", buffering=0) as file:
                with pytest.raises(OSError, match="No space left"):
                    while True:
                        file.write(bytes(512))
        yield tmp_path, fill, lambda run: (tmp_path / "ballast").unlink()
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
    else:
        def limit(run, size):
            if not run.ended():
                resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        yield (tmp_path, lambda run: limit(run, 20_000),
               lambda run: limit(run, resource.RLIM_INFINITY))


def test_disk_full_while_saving(disk, place, reference):
    """Training goes on and says so loudly, the old checkpoint stays good, the next save is
    tried, no line is lost."""
    folder, fill, free = disk[0] / "log", *disk[1:]
    arrange = {"signal_at": (signal.SIGSTOP, 12, 22), "picture": True}
    run = Forked(folder, data=place / "text.txt", arrange=arrange)
    run.wait_for_stop()
    fill(run)
    run.go_on()
    run.wait_for_stop()
    assert run.out.count("NOT SAVED") == 2
    problem = "!!! NOT SAVED at step 15: .*(No space left|too large)"
    assert re.search(problem, run.out), run.out
    assert not list(folder.glob("*.part"))
    assert_all_whole(folder)
    assert (folder / "checkpoint_00010.pt").exists()
    free(run)
    run.go_on()
    assert run.wait() == 0 and not run.err, run.err
    assert re.search(r"NOT SAVED.*saved", run.out, re.S)
    assert_same_run(folder, reference())


@pytest.mark.parametrize("leaving", [True, False])
def test_disk_full_to_the_end(disk, place, reference, leaving):
    """What cannot be saved at the end, or on a signal, is said in a line; the same command
    continues later."""
    folder, fill, free = disk[0] / "log", *disk[1:]
    run = Forked(folder, data=place / "text.txt", arrange={"signal_at": (signal.SIGSTOP, 12)})
    run.wait_for_stop()
    fill(run)
    if leaving:
        os.kill(run.pid, signal.SIGTERM)
    run.go_on()
    assert run.wait() == 1
    assert re.search(r"Step \d+ could not be saved .*(No space left|too large)",
                     one_line(run.err))
    assert_all_whole(folder)
    free(run)
    again = succeed(Forked(folder, data=place / "text.txt"))
    assert "continuing from" in again.out
    assert_same_run(folder, reference())


def read_only_folder(tmp_path):
    """A folder in which nothing can be made, for root neither where mounting is allowed."""
    folder = tmp_path / "read_only"
    folder.mkdir()
    if os.geteuid():
        folder.chmod(0o555)
        return folder
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)]
    return None if subprocess.run(mount, capture_output=True).returncode else folder


def test_log_dir_that_cannot_be_written(place, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "text.txt").symlink_to(place / "text.txt")
    bad = [tmp_path / "file", tmp_path / "file" / "log", Path("x" * 300)]
    folder = read_only_folder(tmp_path)
    if folder:
        bad += [folder, folder / "log"]
    for log_dir in bad:
        run = Forked(tmp_path / "x", log_dir=log_dir)
        assert run.wait() == 1
        one_line(run.err, log_dir, "cannot be used", "log_dir")
    if folder and not os.geteuid():
        subprocess.run(["umount", str(folder)], check=True)


def test_disk_full_at_the_start_is_one_line(halfway, reference):
    """The checkpoint is there, but not even the log can be written."""
    folder = halfway("full at start")
    before = snapshot(folder)
    run = Forked(folder, arrange={"signal_in": (signal.SIGSTOP, "RunFolder.begin")})
    run.wait_for_stop()
    limit = (500, resource.RLIM_INFINITY)  # enough for stderr
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, limit)
    run.go_on()
    assert run.wait() == 1
    one_line(run.err, folder, "cannot be used (File too large)")
    assert snapshot(folder) == before
    succeed(Forked(folder))
    assert_same_run(folder, reference())


def test_a_deleted_log_dir_is_made_again(place, reference):
    folder = place / "deleted"
    run = Forked(folder, arrange={"signal_at": (signal.SIGSTOP, 12)})
    run.wait_for_stop()
    shutil.rmtree(folder)
    run.go_on()
    assert run.wait() == 0, run.err
    assert_same_run(folder, reference())


def test_weights_that_are_not_finite_are_never_saved(place):
    """The loss of step 4 is finite, its update is not: checkpoint 5 must not replace anything."""
    run = Forked(place / "overflow", save_every=1, max_steps=8, arrange={"overflow_after": 4})
    assert run.wait() == 1
    one_line(run.err, "loss of step 5")
    assert "NOT SAVED at step 5" in run.out
    names = [path.name for path in sorted(run.log_dir.glob("*.pt"))]
    assert names == ["checkpoint_00003.pt", "checkpoint_00004.pt"]
    last = Forked(place / "overflow at the end", max_steps=5, arrange={"overflow_after": 4})
    assert last.wait() == 1
    assert not list(last.log_dir.glob("*.pt"))


# ---------------------------------------------------------------------- constants and data
OTHER = dict(
    encoding="gpt2", shuffle=False, seed=7, total_batch_size=256, T=8, n_layer=2, n_head=4,
    n_embd=32, init_from="gpt2", optimizer="muon", max_lr=0.5, min_lr=0.25, warmup_steps=6,
    max_steps=31, weight_decay=0.2, grad_clip=2.0, muon_lr_ratio=3.0, lr_shape="linear")


def test_every_other_constant_is_refused_with_both_values(reference):
    path = reference() / f"checkpoint_{STEPS:05d}.pt"
    content = load(path)
    cfg, data = t.Config(**content["constants"]), content["fingerprint"]
    names = {field.name for field in dataclasses.fields(t.Config)}
    assert OTHER.keys() | t.FREE_TO_CHANGE | {"data"} == names
    for name, value in OTHER.items():
        with pytest.raises(t.UserError) as e:
            t.load_checkpoint(path, dataclasses.replace(cfg, **{name: value}), data)
        line = str(e.value)
        assert f"{name} was {getattr(cfg, name)!r}, is {value!r}" in line
        assert line.count(" was ") == 2 and "\n" not in line, line
        assert "Put them back" in line and "--log_dir" in line and "--resume=False" in line
    with pytest.raises(t.UserError, match=f"data was '{re.escape(data)}', is 'another'"):
        t.load_checkpoint(path, cfg, "another")
    t.load_checkpoint(path, dataclasses.replace(cfg, data="elsewhere"), data)


def test_changed_constants_refused_by_the_script(halfway, reference):
    folder = halfway("changed")
    before = snapshot(folder)
    run = Forked(folder, max_lr=0.5, seed=7)
    assert run.wait() == 1
    one_line(run.err, "max_lr was 0.01, is 0.5; seed was 1337, is 7")
    statuses, runs = two_processes(folder, grad_clip=0.5)
    assert statuses == [1, 1] and runs[1].err == ""
    one_line(runs[0].err, "grad_clip was 1.0, is 0.5")
    assert snapshot(folder) == before
    succeed(Forked(folder))
    assert_same_run(folder, reference())


def test_constants_of_speed_and_place_may_change(halfway, reference):
    folder = halfway("free")
    elsewhere = folder.rename(folder.with_name("moved"))
    run = succeed(Forked(
        elsewhere, B=8, dtype="bfloat16", compile=False, save_every=3, milestone_every=11,
        sample_every=10, sample_tokens=3, sample_prompt="x", eval_every=6, val_tokens=512,
        grad_comm="bfloat16", temperature=0.5, top_k=3, device="auto",
        env={"CUDA_VISIBLE_DEVICES": ""}))
    assert f"continuing from {elsewhere}/checkpoint_00013.pt" in run.out
    ours, theirs = read_log(elsewhere), read_log(reference())
    for step in range(STEPS):
        assert abs(ours[step, "train"] - theirs[step, "train"]) < 0.05


def test_the_same_shards_elsewhere_are_the_same_data(place):
    import numpy as np
    rng, first, second = np.random.default_rng(0), place / "shards", place / "moved_shards"
    first.mkdir()
    sizes = {"x_val_000000": 2000, "x_train_000001": 9000, "x_train_000002": 7000}
    for name, size in sizes.items():
        np.save(first / f"{name}.npy", rng.integers(0, 256, size).astype(np.uint16))
    folder = place / "on_shards"
    succeed(Forked(folder, data=first, arrange={"signal_at": (signal.SIGTERM, 7)}))
    first.rename(second)
    succeed(Forked(folder, data=second, arrange={"signal_at": (signal.SIGTERM, 12)}))
    np.save(second / "x_train_000003.npy", rng.integers(0, 256, 5000).astype(np.uint16))
    run = Forked(folder, data=second)
    assert run.wait() == 1
    assert re.search("data was '16,000 tokens.*, is '21,000 tokens", one_line(run.err))
    run = Forked(folder)
    assert run.wait() == 1
    one_line(run.err, "data was ")


# --------------------------------------------------------------------- finished, set aside
def snapshot(folder):
    """{name: content} of the files in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()
            if path.is_file() and path.name != ".lock"}


def test_a_finished_run_says_so(place, reference):
    folder = shutil.copytree(reference(), place / "finished")
    before = snapshot(folder)
    run = succeed(Forked(folder))
    assert f"is finished, after {STEPS} steps" in run.out
    statuses, _ = two_processes(folder)
    assert statuses == [0, 0]
    assert snapshot(folder) == before


def test_resume_false_sets_results_aside(place, reference):
    folder = shutil.copytree(reference(), place / "aside")
    first = snapshot(folder)
    succeed(Forked(folder, resume=False, seed=1))
    second = snapshot(folder)
    assert snapshot(folder / "before_1") == first and second["log.txt"] != first["log.txt"]
    run = succeed(Forked(folder, resume=False))
    assert f"{folder}/before_2" in run.out
    assert snapshot(folder / "before_1") == first and snapshot(folder / "before_2") == second
    assert_same_run(folder, reference())
    shutil.rmtree(folder / "before_1")
    succeed(Forked(folder, resume=False, arrange={"signal_at": (signal.SIGTERM, 2)}))
    assert snapshot(folder / "before_2") == second


@pytest.mark.parametrize("left", ["hf", "curves.png", "log.txt", "model_00030.pt"])
def test_results_of_another_run_are_set_aside_without_its_checkpoints(place, reference, left):
    """Somebody moves or deletes the big files of a finished run and trains again there."""
    folder = place / f"left {left}"
    folder.mkdir()
    if left == "hf":
        (folder / "hf").mkdir()
        (folder / "hf" / "model.safetensors").write_text("precious")
    elif left == "curves.png":
        (folder / left).write_text("precious")
    else:
        shutil.copy(reference() / left, folder)
    run = succeed(Forked(folder, arrange={"signal_at": (signal.SIGTERM, 2)}))
    assert f"are now in {folder}/before_1/" in run.out
    assert (folder / "before_1" / left).exists()
    assert (folder / "checkpoint_00003.pt").exists()


def test_a_start_without_a_step_leaves_nothing_to_set_aside(place):
    folder = place / "no step"
    run = Forked(folder, arrange={"raise_at": (0, "OutOfMemoryError", "")})
    assert run.wait() == 1 and (folder / "run.json").exists()
    succeed(Forked(folder, arrange={"signal_at": (signal.SIGTERM, 2)}))
    assert not list(folder.glob("before_*"))


def test_resume_false_holds_for_torchruns_first_start_alone(halfway, reference):
    folder, restarted = halfway("again"), {"TORCHELASTIC_RESTART_COUNT": "1"}
    succeed(Forked(folder, resume=False, env=restarted))
    assert_same_run(folder, reference())
    assert not list(folder.glob("before_*"))
    folder = halfway("never begun")  # the first start of this job did not come as far as run.json
    succeed(Forked(folder, resume=False, env=restarted | {"TORCHELASTIC_RUN_ID": "another job"}))
    assert_same_run(folder, reference())
    assert (folder / "before_1" / "checkpoint_00013.pt").exists()


def test_a_kill_between_a_milestone_and_its_checkpoint_loses_no_milestone(place):
    folder, constants = place / "milestone killed", dict(milestone_every=10, eval_every=0)
    run = Forked(folder, arrange={"signal_in": (signal.SIGKILL, "write_weights")}, **constants)
    assert run.wait() == -signal.SIGKILL
    until(lambda: run.ended())
    succeed(Forked(folder, **constants))
    assert (folder / "model_00010.pt").exists() and (folder / "model_00020.pt").exists()


def test_a_copy_is_waited_for_on_all_devices_but_cuda(monkeypatch):
    """On MPS a copy that does not block is never waited for, and what is saved would be old."""
    real, blocking = torch.Tensor.copy_, []

    def copy_(tensor, source, non_blocking=False):
        blocking.append(not non_blocking)
        return real(tensor, source)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    t.copy_to_host({"model": {"weight": torch.ones(2)}}, {})
    assert blocking == [True]


def test_a_damaged_newer_checkpoint_is_not_one_of_the_two_kept(halfway, reference):
    folder = halfway("newer damaged")
    (folder / "checkpoint_00029.pt").write_bytes(b"damaged")
    run = succeed(Forked(folder, save_every=2, arrange={"signal_at": (signal.SIGTERM, 17)}))
    assert "checkpoint_00029.pt is damaged" in run.out
    names = [path.name for path in sorted(folder.glob("checkpoint_*.pt"))]
    assert names == ["checkpoint_00016.pt", "checkpoint_00018.pt", "checkpoint_00029.pt"]
    succeed(Forked(folder))
    assert_same_run(folder, reference())


def test_what_a_killed_save_left_is_cleared(halfway, reference):
    folder = halfway("left over")
    (folder / "checkpoint_00012.pt.part").write_bytes(b"half")
    succeed(Forked(folder))
    assert not list(folder.glob("*.part"))


def test_the_second_of_two_runs_refuses(place, reference):
    folder = place / "two"
    first = Forked(folder, arrange={"signal_at": (signal.SIGSTOP, 2)})
    first.wait_for_stop()  # or it might end too soon
    for changes in ({}, {"resume": False}):
        second = Forked(folder, **changes)
        assert second.wait() == 1
        one_line(second.err, "Another run is using")
    statuses, runs = two_processes(folder)
    assert statuses == [1, 1] and runs[1].err == ""
    one_line(runs[0].err, "Another run is using")
    first.go_on()
    assert first.wait() == 0
    assert_same_run(folder, reference())


# ------------------------------------------------------------------------------------ soak
@pytest.mark.skipif(not os.environ.get("GPT2_SOAK"), reason="takes minutes: set GPT2_SOAK=1")
def test_soak(place):
    """Twenty kills of the script itself at random moments; it ends as if nothing had happened."""
    constants = LONG | dict(optimizer="muon", max_steps=3000, save_every=25, milestone_every=100)
    whole = Forked(place / "soak_reference", **constants)
    assert whole.wait(600) == 0
    folder, rng, kills = place / "soak", random.Random(math.pi), 0
    command = SCRIPT + flags(folder, **constants)
    log = folder / "log.txt"
    while kills < 20:
        before = log.stat().st_mtime_ns if log.exists() else 0
        run = subprocess.Popen(command, env=ENV, stdout=subprocess.DEVNULL)
        until(lambda: log.exists() and log.stat().st_mtime_ns != before)  # noqa: B023  it trains
        time.sleep(rng.uniform(0, 0.9))
        run.kill()
        if run.wait() == 0:
            break
        kills += 1
        assert_all_whole(folder)
    assert kills == 20, "the run ended before the kills did: make it longer"
    subprocess.run(command, env=ENV, check=True, stdout=subprocess.DEVNULL)
    assert_same_run(folder, whole.log_dir, 3000)
