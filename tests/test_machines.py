"""Tests of several processes on one or more machines."""
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import (
    ENV, ROOT, Training, assert_close_logs, flags, load, need_gpus, one_line, raise_at, read_log,
    signal_at, signal_on_rank, slow_saves, succeed, together, torchrun_env, train)

WORDS = dict(optimizer="muon", max_steps=20)

@pytest.fixture(scope="module")
def alone(place):
    """Return the folder of a run with one process. It was stopped once, at step 7."""
    succeed(Training(place / "alone", arrange=[(signal_at, signal.SIGTERM, 6)], **WORDS))
    shutil.copytree(place / "alone", place / "seven")
    return succeed(Training(place / "alone", **WORDS)).log_dir

def test_a_signal_to_one_of_two_processes_stops_both(place, alone):
    """Both stop after the same step. One process can continue the run, with another B."""
    run = train(2, place / "two", B=2, arrange=[(signal_on_rank, 1, signal.SIGTERM, 12)], **WORDS)
    assert "Stopped by a signal at step 13" in run.out
    succeed(Training(place / "two", B=8, **WORDS))
    assert_close_logs(place / "two", alone)

# {what differs: arguments of the second process}
DIFFERENT = {
    "max_lr is 0.01 on rank 0, and 0.02 on rank 1": dict(max_lr=0.02), "B is 4": dict(B=2),
    "n_layer is 1": dict(n_layer=2), "dtype is torch.float32": dict(dtype="bfloat16"),
    "data_tokens is 50000 on rank 0, and 49500": dict(data="shorter.txt"),
    "data_checksum": dict(data="other.txt"), "the script's checksum": dict(copy="edited.py"),
    "the step of the checkpoint is 7 on rank 0, and None": dict(folder="empty"),
    "the step of the checkpoint is 7 on rank 0, and 10": dict(folder="ten"),
    "train_s is": dict(folder="same step")}

@pytest.fixture(scope="module")
def others(place, alone):
    """Return a folder with what the second process uses in the next test."""
    others, text = place / "others", (place / "text.txt").read_bytes()
    others.mkdir()
    (others / "shorter.txt").write_bytes(text[:-500])
    (others / "other.txt").write_bytes(text[::-1])
    (others / "edited.py").write_bytes((ROOT / "train_gpt2.py").read_bytes() + b"# edited")
    for name, change in (("ten", dict(step=10)), ("same step", dict(train_s=1.5))):
        shutil.copytree(place / "seven", others / name)
        path = others / name / "checkpoint_00007.pt"
        torch.save(load(path) | change, path.with_stem(f"checkpoint_{change.get('step', 7):05d}"))
    return others

@pytest.mark.parametrize("name", DIFFERENT)
def test_processes_that_disagree_end_with_one_sentence(place, others, name):
    """The sentence names what differs, and nothing is written."""
    own = {key: others / value if key in ("data", "copy", "folder") else value
           for key, value in DIFFERENT[name].items()}
    folder = shutil.copytree(place / "seven", place / name) if "folder" in own else place / "new"
    before = [(path, path.stat().st_mtime_ns) for path in sorted(place.rglob("*.*t"))]
    runs = together(2, folder, {1: dict(data=place / "text.txt") | own}, **WORDS)
    assert [run.wait() for run in runs] == [1, 1]
    for run in runs:
        one_line(run.err, name)
    assert before == [(path, path.stat().st_mtime_ns) for path in sorted(place.rglob("*.*t"))]

def test_a_mistake_of_one_process_ends_all_after_its_save(place):
    """Also if it is met before the first step. The process that met it says why."""
    runs = together(2, place / "lonely", {1: dict(data=place / "missing")}, **WORDS)
    assert runs[1].wait() == 1 and runs[0].wait() != 0
    one_line(runs[1].err, "data=", "missing")
    runs = together(2, place / "lone", arrange=[
        (slow_saves, 0.5), (raise_at, 5, "A bad token.", 0)], **WORDS)
    assert runs[0].wait() == 1 and runs[1].wait() != 0
    assert one_line(runs[0].err) == "A bad token.\n" and (4, "train") in read_log(place / "lone")
    assert load(place / "lone" / "checkpoint_00005.pt")["step"] == 5

def test_restarts_without_the_variable_are_reported(place):
    """Then, restarted processes may find the addresses of dead ones in the store of torchrun."""
    env = torchrun_env(1) | {"RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_MAX_RESTARTS": "3"}
    store = torch.distributed.TCPStore("127.0.0.1", int(env["MASTER_PORT"]), is_master=True)
    run = Training(place / "restarts", max_steps=1,
                   env=env | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert run.wait() == 0, run.err
    assert run.out.count("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") == 1
    del store

TORCHRUN = """
import atexit, os, signal, sys, time
sys.path.append({tests!r})
sys.modules["transformers"] = sys.modules["matplotlib"] = None  # importing them takes seconds
import train_gpt2 as t
from conftest import before_steps, until

def die(run):
    if not os.path.exists({died!r}):
        open({died!r}, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

def hang_up(run):
    if t.RANK == 0:
        os.kill(os.getppid(), signal.SIGHUP)  # torchrun passes it on
    until(lambda: run.signalled)

if {hang_up} and os.path.exists({died!r}):
    before_steps(t, [15], hang_up)
elif t.RANK == 1:
    before_steps(t, [10], die)
atexit.register(lambda: open({died!r} + str(t.RANK), "w").close())
t.main()
"""

@pytest.mark.parametrize("machines", [1, 2])
def test_torchrun_restarts_a_run_after_the_death_of_a_worker(tmp_path, place, alone, machines):
    """It resumes on one or two machines, with a shared log_dir. Exit handlers run.

    If the terminal is closed, torchrun gets a SIGHUP, and the run is saved and stops.
    """
    need_gpus(2)
    script, died, folder = tmp_path / "script.py", tmp_path / "died", place / f"{machines} machines"
    script.write_text(TORCHRUN.format(tests=str(ROOT / "tests"), died=str(died),
                                      hang_up=machines == 1))
    env = torchrun_env(1)
    rendezvous = ["--standalone"] if machines == 1 else [
        f"--nnodes={machines}", "--rdzv_backend=c10d",
        f"--rdzv_endpoint=127.0.0.1:{env['MASTER_PORT']}"]
    # On one machine, both agents would use the same GPU, so they use the CPU
    device = {} if machines == 1 else dict(device="cpu")
    command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--max-restarts=3",
               f"--nproc_per_node={2 // machines}", script, *flags(folder, **WORDS | device)]
    options = dict(
        cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV | {
            "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    agents = [subprocess.Popen([*map(str, command)], **options) for _ in range(machines)]
    out, err = ("".join(texts) for texts in zip(
        *[agent.communicate(timeout=600) for agent in agents], strict=True))
    assert re.search("from step (5|10) on", out) and died.exists(), (out, err)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in out
    # No process was aborted when it exited
    assert not re.search("Fatal Python error|terminate called", err), err
    assert {path.name for path in tmp_path.glob("died?")} == {"died0", "died1"}
    if machines == 1:
        assert "Stopped by a signal at step 16. " in out
        train(2, folder, **WORDS)
    assert_close_logs(folder, alone)
