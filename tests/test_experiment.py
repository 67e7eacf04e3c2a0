"""Tests of experiment.py. In most of them, a fake script takes the place of train_gpt2.py."""
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import experiment
import pytest
import torch
from conftest import ENV, ROOT, Training, flags, read_log, succeed, until, write_text

# The loss of this script is lowest for a learning rate of BEST. Seed 1000 prefers a rate of 0.1
FAKE = '''
import json, math, sys, time, types
from pathlib import Path
Config, PRESETS, BEST = None, {}, 0.1
parse_flags = configure = lambda *_: types.SimpleNamespace(max_lr=0.1, min_lr=0.0)

def main():
    flags = dict(word[2:].split("=") for word in sys.argv[1:])
    folder, lr, seed = Path(flags["log_dir"]), float(flags["max_lr"]), int(flags["seed"])
    (folder / "config.json").write_text(json.dumps({
        "max_steps": 20, "total_batch_size": 8, "encoding": "bytes", "val_tokens": 8,
        "max_lr": lr, "seed": seed}))
    print(flags.get("device", "cpu"))
    (folder / "checkpoint_00020.pt").write_text("")
    loss = 2 + abs(math.log2(lr / BEST)) + 0.001 * seed - 2 * (seed == 1000 and lr == 0.1)
    (folder / "log.txt").write_text(f"10 tok/s 80\\n10 val 3\\n20 val {loss}\\n")
'''
ACT = 'print(flags.get("device", "cpu"))'

def make_repository(root, branches):
    """Make a git repository with these branches, {name: train_gpt2.py}, and check out the first."""
    (root / "tests").mkdir(parents=True)
    for path in ("fineweb.py", "hellaswag.py", "tests/compare.py", "tests/experiment.py"):
        shutil.copy(ROOT / path, root / path)
    git = ["git", "-C", str(root), "-c", "user.name=x", "-c", "user.email=x"]
    subprocess.check_call([*git, "init", "-q"])
    for name, script in branches.items():
        (root / "train_gpt2.py").write_text(script)
        for words in (["checkout", "-q", "-b", name], ["add", "."], ["commit", "-qm", name]):
            subprocess.check_call([*git, *words])
    subprocess.check_call([*git, "checkout", "-q", next(iter(branches))])

@pytest.fixture
def compared(tmp_path, monkeypatch, capsys):
    """Return a function that runs experiment.py in tmp_path and returns what it prints."""
    monkeypatch.setattr(experiment, "ROOT", tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr("sys.argv", ["experiment.py", f"--data={__file__}", *words])
        with suppress(SystemExit):
            experiment.main()
        return capsys.readouterr().out
    return run

def names(folder):
    return sorted(os.listdir(f"experiment/{folder}"))

def outputs():
    return sorted(path.read_text() for path in Path("experiment").rglob("output.txt"))

def test_each_version_is_tuned_and_then_compared(tmp_path, compared):
    """Lists of factors are extended, and failed runs do not stop others and can be repeated."""
    make_repository(tmp_path, {
        "main": FAKE, "a/b": FAKE.replace("{}, 0.1", "{}, 0.02"),
        "wild": FAKE.replace(ACT, 'if lr > 0.1: sys.exit("it has diverged")'),
        "full": FAKE.replace(ACT, 'Path("retry").exists() or sys.exit("The disk is full")')})
    words = ("main", "a/b", "wild", "full", "--lr=0.5,1", "--seeds=2")
    out = compared(*words)
    assert "wild_lr2_seed0: it has diverged" in out and "full_lr1_seed0: The disk is full" in out
    assert names("tuning") == [f"{name}_seed0" for name in (
        "a_b_lr0.125", "a_b_lr0.25", "a_b_lr0.5", "a_b_lr1", "full_lr0.5", "full_lr1",
        "main_lr0.5", "main_lr1", "main_lr2", "wild_lr0.5", "wild_lr1", "wild_lr2")]
    assert names("runs") == [f"{run}_seed{seed}" for run in ("a_b_lr0.25", "main_lr1", "wild_lr1")
                             for seed in (1, 2)]
    assert "\n| main | 2.0015 | 0.0007 | 2 | - | the baseline | 0.1 (1) |" in out
    assert "\n| a_b | 2.3234 | 0.0007 | 2 | +0.3219 +- 0.0000 | behind | 0.025 (0.25) |" in out
    assert not list(Path("experiment").rglob("checkpoint_*"))
    Path("experiment/full/retry").touch()
    assert "\n| full | 2.0015 |" in compared(*words)
    assert outputs().count("cpu\n") == 11  # no other run is repeated
    assert not compared(*words, "--B=2")  # it is a different experiment

def test_factors_within_the_noise_get_a_second_seed(tmp_path, compared):
    """With seed 0, the factors 1 and 2 are equally good. The mean of two seeds decides."""
    make_repository(tmp_path, {"main": FAKE.replace("{}, 0.1", "{}, 0.1414")})
    compared("main", "main", "--lr=0.5,1,2,4", "--seeds=1")
    assert [name for name in names("tuning") if "1000" in name] == [
        f"{name}_seed1000" for name in ("main_2_lr1", "main_2_lr2", "main_lr1", "main_lr2")]
    assert names("runs") == ["main_2_lr1_seed1", "main_lr1_seed1"]

def test_four_gpus_have_four_runs_at_a_time(tmp_path, compared, monkeypatch):
    """Each run waits until four have started. One version is the working tree as it is."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    make_repository(tmp_path, {"main": FAKE})
    (tmp_path / "train_gpt2.py").write_text(FAKE.replace("loss = 2", "loss = 2.5").replace(
        ACT, ACT + """
    while len(list(folder.parent.glob("*/config.json"))) < 4:
        time.sleep(0.01)"""))
    out = compared("HEAD", ".", "--lr=1", "--seeds=2")
    assert "\n| working_tree | 2.5015 | 0.0007 | 2 | +0.5000 +- 0.0000 | behind |" in out
    assert outputs() == [f"cuda:{i}\n" for i in range(4)]

def test_an_experiment_that_is_killed_twice_ends_with_the_same_losses(tmp_path):
    """The first kill is of the kind that no process can handle. The runs save themselves."""
    source = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
    scripts = {"main": source, "idea": source.replace("c_proj(self.gelu(", "c_proj(2 * F.relu(")}
    make_repository(tmp_path / "root", scripts)
    settings = dict(max_steps=300, eval_every=50, print_every=0, device="cpu")
    words = [sys.executable, "tests/experiment.py", "main", "idea", "--lr=1", "--seeds=1",
             *flags(data=write_text(tmp_path), **settings)]
    pipes = dict(cwd=tmp_path / "root", env=ENV, text=True, stdout=subprocess.PIPE,
                 stderr=subprocess.PIPE)
    runs = {name: tmp_path / f"root/experiment/runs/{name}_lr1_seed1" for name in scripts}
    for version, number in (("main", signal.SIGKILL), ("idea", signal.SIGTERM)):
        process, log = subprocess.Popen(words, **pipes), runs[version] / "log.txt"
        until(lambda: log.exists() and "\n60 train " in log.read_text())
        process.send_signal(number)
        out, err = process.communicate()
    assert "Stopped. To go on, repeat the command" in err, (out, err)
    assert "\n| idea |" in subprocess.run(words, **pipes).stdout
    for version, script in scripts.items():
        (tmp_path / f"{version}.py").write_text(script, encoding="utf-8")
        succeed(Training(tmp_path / version, copy=tmp_path / f"{version}.py", seed=1, **settings))
        assert read_log(tmp_path / version) == read_log(runs[version])
