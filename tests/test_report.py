"""What a run leaves for people to look at: curves.png, run.json, times and text they can read."""
import json
import os
import subprocess
import sys

import pytest

import train_gpt2 as t
from conftest import ROOT, run_script
from test_train import ONE_THREAD, flags

LOG = "".join(f"{s} train {10 - s / 100}\n" for s in range(500)) + "0 val 10.9\n250 val 7.1\n0 hella 0.25\n250 hella 0.26\n"


def draw(folder, log):
    (folder / "log.txt").write_text(log)
    t.draw_curves(t.Config(log_dir=str(folder)))
    return folder / "curves.png"


@pytest.mark.parametrize("log", [LOG, "", "0 val 10.9\n", "0 val 10.9\n0 hella 0.25\n", "0 train nan\n", LOG + "251 tra"])
def test_curves_are_drawn_of_any_log(tmp_path, log):
    pytest.importorskip("matplotlib")
    assert draw(tmp_path, log).read_bytes().startswith(b"\x89PNG")


def test_curves_tell_what_to_beat(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    seen = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, file, **_: seen.append(self))
    draw(tmp_path, LOG)
    labels = " ".join(text.get_text() for panel in seen[0].axes for text in panel.get_legend().get_texts())
    for number in ("3.2924", "0.2945", "0.337"):
        assert number in labels
    assert all("tokens" in panel.get_xlabel() for panel in seen[0].axes)


def test_no_picture_is_no_reason_to_die(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as where it is not installed
    with pytest.raises(ImportError):
        draw(tmp_path, LOG)
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *flags(data=ROOT / "input.txt", log_dir=tmp_path / "log", max_steps=1)])
    monkeypatch.setattr(t.signal, "signal", lambda *_: None)
    t.main()
    assert (tmp_path / "log" / "log.txt").exists() and not (tmp_path / "log" / "curves.png").exists()


def test_a_broken_picture_is_no_reason_to_die(tmp_path):
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("raise RuntimeError('broken installation')")
    done = run_script("train_gpt2.py", *flags(data=ROOT / "input.txt", log_dir=tmp_path / "log", max_steps=1),
                      env=ONE_THREAD | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "no curves.png this time: RuntimeError broken installation" in done.stdout


def test_a_run_describes_itself(tmp_path):
    """Constants, versions, command and commit, for json and for people; each start is added."""
    words = flags(data=ROOT / "input.txt", log_dir=tmp_path / "log", max_steps=4, save_every=2, n_embd=16)
    stop = "import sys, os, signal; sys.path.insert(0, {!r}); import train_gpt2 as t; step = t.train_step\n" \
           "def once(run, signals=()):\n    os.kill(os.getpid(), signal.SIGTERM)\n    return step(run, signals)\n" \
           "t.train_step = once; t.main()".format(str(ROOT))
    subprocess.run([sys.executable, "-c", stop, *words], env={**os.environ, **ONE_THREAD}, check=True, timeout=60)
    assert run_script("train_gpt2.py", *words, env=ONE_THREAD).returncode == 0
    run = json.loads((tmp_path / "log" / "run.json").read_text())
    assert run["constants"]["n_embd"] == 16 and set(run["constants"]) == set(t.Config.__dataclass_fields__)
    first, second = run["starts"]
    assert (first["step"], second["step"]) == (0, 1)
    assert second["command"][1:] == words and second["versions"]["torch"] and second["processes"] == 1
    assert "commit" in second and "16 wide" in second["said"]["model"]
    assert (tmp_path / "log" / "run.json").read_text().count("\n") > 40  # indented: people read it too


def test_durations_are_in_units_people_read():
    assert [t.duration(s) for s in (0.4, 59, 61, 3600, 86400 + 7200)] == ["0s", "59s", "1m01s", "1h00m", "1d02h"]


@pytest.mark.parametrize("script", ["train_gpt2.py", "fineweb.py", "hellaswag.py"])
def test_help_fits_a_terminal_and_prints_nothing_else(script):
    done = run_script(script, "--help", env={"COLUMNS": "80"})
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) > 400
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout


def test_an_ascii_terminal_shows_everything(tmp_path):
    folder = tmp_path / "données"
    done = run_script("train_gpt2.py", *flags(data=ROOT / "input.txt", log_dir=folder, max_steps=1, sample_every=1,
                                              sample_tokens=50), env=ONE_THREAD | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "donn\\xe9es/log.txt" in done.stdout and "--- sample of rank 0 at step 1" in done.stdout
