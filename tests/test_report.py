"""What a run leaves for people to look at: log lines, curves.png, run.json, help."""
import json
import math
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    ROOT,
    Forked,
    assert_close_logs,
    flags,
    run_python,
    run_script,
    succeed,
    write_text,
)

import train_gpt2 as t

TRAINING = "".join(f"{step} train {10 - step / 100}\n" for step in range(500))
LOG = TRAINING + "0 val 10.9\n250 val 7.1\n0 hella 0.25\n250 hella 0.26\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_text(folder)
    return folder


# ---------------------------------------------------------------------------------- curves
def draw(folder, log):
    (folder / "log.txt").write_text(log)
    constants = {"total_batch_size": 2048, "encoding": "gpt2"}
    (folder / "run.json").write_text(json.dumps({"constants": constants}))
    t.draw_curves(str(folder))
    return folder / "curves.png"


@pytest.mark.parametrize("log", [LOG, "", "0 val 10.9\n", "0 val 10.9\n0 hella 0.25\n",
                                 "0 train nan\n", LOG + "251 tra"])
def test_curves_are_drawn_of_any_log(tmp_path, log):
    pytest.importorskip("matplotlib")
    assert draw(tmp_path, log).read_bytes().startswith(b"\x89PNG")


def test_curves_tell_what_to_beat(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    seen = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, file, **_: seen.append(self))
    draw(tmp_path, LOG)
    legends = [panel.get_legend().get_texts() for panel in seen[0].axes]
    labels = " ".join(text.get_text() for texts in legends for text in texts)
    for number in ("3.2924", "0.2945", "0.337"):
        assert number in labels
    for panel in seen[0].axes:
        assert "tokens" in panel.get_xlabel()
        assert panel.xaxis.get_major_formatter()(1_500_000) == "1.5 M"


def test_the_documented_command_draws_the_curves_of_any_run(tmp_path):
    pytest.importorskip("matplotlib")
    draw(tmp_path, LOG).unlink()
    code = re.search(r'python -c "(.*draw_curves.*)"', t.__doc__)[1]
    done = run_python(code.replace("'log'", f"'{tmp_path}'"))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "curves.png").exists()


def test_no_picture_is_no_reason_to_die(folder):
    run = succeed(Forked(folder / "without", max_steps=1, hide=["matplotlib", "transformers"]))
    assert "curves     off: no matplotlib here" in run.out
    assert not (run.log_dir / "curves.png").exists()


def test_a_broken_picture_is_no_reason_to_die(folder, tmp_path):
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("raise RuntimeError('broken')")
    done = run_script("train_gpt2.py", *flags(folder / "broken", max_steps=1),
                      env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "no curves.png this time: RuntimeError broken" in done.stdout


# -------------------------------------------------------------------------- words on stdout
def test_a_run_describes_itself(folder):
    """Constants, versions, command and commit, for json and for people; each start is added."""
    words = dict(max_steps=4, save_every=2, n_embd=16)
    succeed(Forked(folder / "log", arrange={"signal_at": (signal.SIGTERM, 0)}, **words))
    succeed(Forked(folder / "log", **words))
    text = (folder / "log" / "run.json").read_text()
    run = json.loads(text)
    assert run["constants"]["n_embd"] == 16
    assert set(run["constants"]) == set(t.Config.__dataclass_fields__)
    first, second = run["starts"]
    assert (first["step"], second["step"]) == (0, 1)
    assert second["command"][1:] == flags(folder / "log", **words)
    assert second["versions"]["torch"] and second["processes"] == 1
    assert "commit" in second and "16 wide" in second["said"]["model"]
    assert text.count("\n") > 40  # indented: people read it too


def test_the_commit_is_told(tmp_path, monkeypatch):
    if not shutil.which("git"):
        pytest.skip("no git here")

    def git(*words):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x",
                   "-c", "commit.gpgsign=false", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    script = tmp_path / "train_gpt2.py"
    script.touch()
    monkeypatch.setattr(t, "__file__", str(script))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert t.git_commit() is None
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "x")
    assert t.git_commit() == git("rev-parse", "HEAD")
    script.write_text("changed")
    assert t.git_commit() == git("rev-parse", "HEAD") + "-dirty"


@pytest.mark.parametrize("per_step, left", [
    (0.004, "0:00:00"), (0.59, "0:00:59"), (0.61, "0:01:01"), (36, "1:00:00"),
    (936, "1 day, 2:00:00")])
def test_time_left_is_in_units_people_read(per_step, left):
    run = SimpleNamespace(cfg=t.Config(max_steps=102), device=torch.device("cpu"),
                          step_ends=[100.0, 100.0 + per_step])
    assert t.step_line(run, 1, 2.0, 1.0, start=100.0).endswith(f" {left} left")


@pytest.mark.parametrize("script", ["train_gpt2.py", "fineweb.py", "hellaswag.py"])
def test_help_fits_a_terminal_and_prints_nothing_else(script):
    done = run_script(script, "--help", env={"COLUMNS": "80"})
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) > 400
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("env, spin_count", [
    ({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "passive"}, "None")])
def test_how_long_threads_spin_is_set_unless_the_user_did(env, spin_count):
    code = (f"import os, runpy, sys; sys.argv = ['train_gpt2.py', '--help']\n"
            f"for name in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY'): os.environ.pop(name, None)\n"
            f"os.environ |= {env}\n"
            f"try: runpy.run_path({str(ROOT / 'train_gpt2.py')!r}, run_name='__main__')\n"
            f"finally: print(os.environ.get('GOMP_SPINCOUNT'), file=sys.stderr)")
    assert run_python(code).stderr.split()[-1] == spin_count


def test_an_ascii_terminal_shows_everything(folder):
    done = run_script("train_gpt2.py", env={"PYTHONIOENCODING": "ascii"},
                      *flags(folder / "données", max_steps=1, sample_every=1, sample_tokens=50))
    assert done.returncode == 0, done.stderr
    assert "donn\\xe9es/log.txt" in done.stdout
    assert "--- sample of rank 0 at step 1" in done.stdout


# -------------------------------------------------------------- reporting one step later
class Computed:
    """A stand-in for torch.cuda.Event that counts who waits for the GPU."""
    waits = 0

    def record(self):
        pass

    def synchronize(self):
        Computed.waits += 1


@pytest.mark.usefixtures("one_thread")
def test_on_a_gpu_a_step_is_reported_when_the_next_was_launched(folder, monkeypatch, capsys):
    """Played on a CPU that calls itself a GPU; the log is the same, and complete at the end."""
    plain = succeed(Forked(folder / "at once", max_steps=12))
    monkeypatch.setattr(t.torch.cuda, "Event", Computed)
    monkeypatch.setattr(t, "peak_flops", lambda device: None)
    monkeypatch.setattr(t.signal, "signal", lambda *_: None)
    real, waiting = t.report_step, []

    class FakeDevice:
        type = "cuda"

    def report_step(run, loss, norm, start):
        device, run.device = run.device, FakeDevice()
        real(run, loss, norm, start)
        run.device = device
        waiting.append(len(run.unreported))
    monkeypatch.setattr(t, "report_step", report_step)
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *flags(folder / "late", max_steps=12)])
    t.main()
    # nothing waits where a save or a validation comes next, after 5, 10 and 12 steps
    assert waiting == [1, 1, 1, 1, 0] * 2 + [1, 0] and Computed.waits == 12
    assert_close_logs(folder / "late", plain.log_dir)
    out = capsys.readouterr().out
    assert re.findall(r"^ +(\d+)/12 loss", out, re.M) == [str(step) for step in range(12)]
    log = (folder / "late" / "log.txt").read_text()
    assert [line.split()[:2] for line in log.splitlines()][5:7] == [["4", "train"], ["5", "val"]]


@pytest.mark.parametrize("scale, norm, ends", [
    (65536.0, 1.0, False), (65536.0, math.inf, False), (2**-20, math.inf, True), (0, 1.0, False)])
def test_float16_that_overflows_in_every_step_ends_the_run(scale, norm, ends):
    """A step is skipped now and then, and the scale halved; a scale near 0 means all were."""
    scaler = SimpleNamespace(is_enabled=lambda: scale > 0, get_scale=lambda: scale)
    run = SimpleNamespace(
        cfg=t.Config(), device=torch.device("cpu"), folder=None, step_ends=[],
        stop=SimpleNamespace(agreed=False),
        state=SimpleNamespace(scaler=scaler, raw_model=t.GPT(t.GPTConfig(n_layer=1, n_embd=12))),
        unreported=[(0, 0.0, torch.tensor([2.0, norm, 0.0]), None)])
    if ends:
        with pytest.raises(t.UserError, match="norm inf: .*--max_lr"):
            t.flush_reports(run)
    else:
        t.flush_reports(run)
        assert len(run.step_ends) == 1
