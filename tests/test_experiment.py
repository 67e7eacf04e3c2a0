"""Tests of experiment.py. In most of them, a fake script takes the place of train_gpt2.py."""
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import experiment
import pytest
import torch
from conftest import ENV, ROOT, Forked, flags, read_log, succeed, until, write_text

pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="needs git")

# A run of this script takes no time. Its loss is lowest for a learning rate of 0.1
FAKE = '''
import json, math, sys, time, types
from pathlib import Path
Config, PRESETS, MAX_LR, WORSE = None, {}, 0.1, 0.0

def parse_flags(*_):
    return {"max_lr": MAX_LR} | dict(word[2:].split("=") for word in sys.argv[1:])

def configure(flags):
    print("settings")
    return types.SimpleNamespace(max_lr=float(flags["max_lr"]), min_lr=0.0)

def main():
    flags = parse_flags()
    folder, lr, seed = Path(flags["log_dir"]), float(flags["max_lr"]), int(flags["seed"])
    with open(folder / "starts.txt", "a") as file:
        file.write(flags.get("device", "cpu") + "\\n")
    (folder / "train_gpt2_00000.py").write_text(Path(__file__).read_text())
    (folder / "config.json").write_text(json.dumps({
        "max_steps": 20, "total_batch_size": 8, "encoding": "bytes", "val_tokens": 8,
        "max_lr": lr, "seed": seed}))
    act(folder, lr)
    (folder / "checkpoint_00020.pt").write_text("")
    loss = 2 + abs(math.log2(lr / 0.1)) + WORSE + 0.001 * seed
    (folder / "log.txt").write_text("".join(
        f"{n} val {loss}\\n{n} train_s {n}\\n{n} tok/s 80\\n" for n in (10, 20)))

def act(folder, lr):
    """Do what a test wants."""
'''

@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Return a function that makes a git repository with these branches, {name: train_gpt2.py}.

    The first branch is checked out, and experiment.py takes versions from this repository.
    """
    root = tmp_path / "repository"
    root.mkdir()
    monkeypatch.setattr(experiment, "ROOT", root)
    monkeypatch.chdir(tmp_path)

    def make(branches, files=()):
        git(root, "init", "-q")
        for path in files:
            (root / path).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / path, root / path)
        for name, script in branches.items():
            git(root, "checkout", "-q", "-b", name)
            (root / "train_gpt2.py").write_text(script)
            git(root, "add", ".")
            git(root, "commit", "-q", "--allow-empty", "-m", name)
        git(root, "checkout", "-q", next(iter(branches)))
        return root
    return make

def git(root, *words):
    done = subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", *words], cwd=root,
                          check=True, capture_output=True, text=True)
    return done.stdout

@pytest.fixture
def compared(tmp_path, monkeypatch, capsys):
    """Return a function that runs experiment.py and returns its output and its error message."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    data = write_text(tmp_path)

    def run(*words):
        monkeypatch.setattr("sys.argv", ["experiment.py", f"--data={data}", *words])
        message = ""
        try:
            experiment.main()
        except SystemExit as e:
            message = e.code
        return capsys.readouterr().out, message
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)

def names(folder):
    return sorted(path.name for path in Path("experiment", folder).iterdir())

def row_of(out, version):
    return next(line for line in out.splitlines() if line.startswith(f"| {version} |"))

def test_each_version_is_tuned_and_then_compared(repository, compared):
    """A list of factors is extended, a tuning run is not compared, and only missing runs run."""
    repository({"main": FAKE, "half": FAKE.replace("0.1, 0.0", "0.05, 0.0"),
                "a/b": FAKE.replace("0.1, 0.0", "0.4, 0.5"),
                "far": FAKE.replace("0.1, 0.0", "0.001, 0.0")})
    words = ("main", "half", "a/b", "far", "--lr=0.5,1", "--seeds=2")
    out, message = compared(*words)
    assert message == ""
    assert names("tuning") == sorted(
        [f"main_lr{x}_seed0" for x in ("0.5", "1", "2")]
        + [f"half_lr{x}_seed0" for x in ("0.5", "1", "2", "4")]
        + [f"a_b_lr{x}_seed0" for x in ("0.125", "0.25", "0.5", "1")]
        + [f"far_lr{x}_seed0" for x in ("0.5", "1", "2", "4")])
    assert names("runs") == sorted(f"{run}_seed{seed}" for seed in (1, 2)
                                   for run in ("main_lr1", "half_lr2", "a_b_lr0.25", "far_lr4"))
    assert "| 2.0015 | 0.0007 | 2 | - | the baseline | 0.1 (1) |" in row_of(out, "main")
    assert "| +0.0000 +- 0.0030 | within noise | 0.1 (2) |" in row_of(out, "half")
    assert "| +0.5000 +- 0.0030 | behind | 0.1 (0.25) |" in row_of(out, "a_b")
    assert "\nfar: a factor beyond 4 may be better" in out and out.count("beyond") == 1
    assert not list(Path("experiment").rglob("checkpoint_*"))
    pytest.importorskip("matplotlib")
    assert Path("experiment/experiment.png").stat().st_size > 1000
    shutil.rmtree("experiment/runs/half_lr2_seed2")
    assert compared(*words) == (out, "")
    starts = [path.read_text() for path in Path("experiment").rglob("starts.txt")]
    assert starts == ["cpu\n"] * 23

def test_failed_runs_are_reported_and_others_go_on(repository, compared):
    act = '"""Do what a test wants."""'
    repository({
        "main": FAKE, "broken": FAKE.replace("def act(", "def act("[:-1]),
        "wild": FAKE.replace(act, 'if lr > 0.1: sys.exit("train_gpt2.py: it has diverged")'),
        "full": FAKE.replace(act, 'Path("retry").exists() or sys.exit("The disk is full")')})
    words = ("main", "broken", "wild", "full", "--lr=1,2", "--seeds=1")
    out, message = compared(*words)
    assert "broken_lr1_seed0: SyntaxError: " in out
    assert "wild_lr2_seed0: train_gpt2.py: it has diverged" in out
    assert "full_lr2_seed0: The disk is full" in out
    assert row_of(out, "main") and row_of(out, "wild")
    assert names("runs") == ["main_lr1_seed1", "wild_lr1_seed1"]
    assert message.startswith("experiment.py: some runs have failed")
    Path("experiment/full/retry").touch()
    out, message = compared(*words)
    assert row_of(out, "full") and "wild_lr2_seed0: diverged" in out
    assert Path("experiment/tuning/wild_lr2_seed0/starts.txt").read_text() == "cpu\n"

def test_four_gpus_have_four_runs_at_a_time(repository, compared, monkeypatch):
    """Each run waits until four have started."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    repository({"main": FAKE.replace('"""Do what a test wants."""', """
    end = time.monotonic() + 60
    while len(list(folder.parent.glob("*/starts.txt"))) < 4:
        assert time.monotonic() < end
        time.sleep(0.01)""")})
    out, message = compared("main", "main", "--lr=1", "--seeds=2")
    assert message == "" and row_of(out, "main_2")
    assert sorted(path.read_text() for path in Path("experiment").rglob("starts.txt")) == [
        f"cuda:{i}\n" for i in range(4)]

def test_the_working_tree_is_a_version(repository, compared):
    """Its tracked files are copied as they are. If they change later, one sentence says so."""
    root = repository({"main": FAKE})
    (root / "train_gpt2.py").write_text(FAKE.replace("0.1, 0.0", "0.1, 0.5"))
    (root / "untracked.py").touch()
    before = git(root, "status", "--porcelain")
    out, _ = compared("HEAD", ".", "--lr=1", "--seeds=2")
    assert "| +0.5000 +- 0.0030 | behind |" in row_of(out, "working_tree")
    assert (git(root, "status", "--porcelain"), git(root, "stash", "list")) == (before, "")
    record = json.loads(Path("experiment/experiment.json").read_text())
    assert record["versions"]["HEAD"] == git(root, "rev-parse", "HEAD").strip()
    for words in (("--lr=1", "--seeds=3"), ("--lr=1", "--seeds=2", "--B=2"), ("--seeds=2",)):
        assert "holds a different experiment: " in compared("HEAD", ".", *words)[1]
    (root / "train_gpt2.py").write_text(FAKE)
    assert ": versions was {" in compared("HEAD", ".", "--lr=1", "--seeds=2")[1]

@pytest.mark.parametrize("words, part", [
    (["main"], "at least two versions"), (["main", "nosuch"], "nosuch"),
    (["main", "main", "--lr=a"], "'a'"), (["main", "main", "--data=x.txt"], "x.txt does not exist"),
    (["main", "main", "--seeds=0"], "one seed")])
def test_wrong_arguments_are_answered_with_a_sentence(repository, compared, words, part):
    repository({"main": FAKE})
    out, message = compared(*words)
    assert not out and message.startswith("experiment.py: ") and part in message
    assert not Path("experiment").exists()

def test_without_git_or_a_repository_one_sentence_says_so(repository, compared, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(experiment.ROOT.parent))
    assert "not a git repository" in compared("main", "idea")[1]
    monkeypatch.setenv("PATH", "")
    assert "'git'" in compared("main", "idea")[1]

def test_an_experiment_that_is_killed_twice_ends_with_the_same_losses(repository, tmp_path):
    """The first kill is of the kind that no process can handle. The runs save themselves."""
    source = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
    scripts = {"main": source, "idea": source.replace("c_proj(self.gelu(", "c_proj(2 * F.relu(")}
    root = repository(scripts, ["fineweb.py", "hellaswag.py", "tests/compare.py",
                                "tests/experiment.py"])
    settings = dict(max_steps=300, eval_every=50, print_every=0, device="cpu")
    words = [sys.executable, "tests/experiment.py", "main", "idea", "--lr=1", "--seeds=1",
             *flags(data=write_text(tmp_path), **settings)]
    log = "experiment/runs/{}_lr1_seed1/log.txt"

    def start():
        return subprocess.Popen(words, cwd=root, env=ENV, stdout=subprocess.PIPE, text=True,
                                stderr=subprocess.PIPE)
    for version, number in (("main", signal.SIGKILL), ("idea", signal.SIGTERM)):
        process, path = start(), root / log.format(version)
        until(lambda: process.poll() is not None
              or path.exists() and "\n60 train " in path.read_text())
        process.send_signal(number)
        out, err = process.communicate()
    assert "stopped. To go on, repeat the command" in err, (out, err)
    out, err = start().communicate()
    assert "\n| idea |" in out, (out, err)
    for version, script in scripts.items():
        (tmp_path / f"{version}.py").write_text(script, encoding="utf-8")
        succeed(Forked(tmp_path / version, script=tmp_path / f"{version}.py", seed=1, **settings))
        assert read_log(tmp_path / version) == read_log((root / log.format(version)).parent)
