"""What a run leaves for people to look at, curves.png and run.json, and what it tells them."""
import dataclasses
import json
import re
import signal

import numpy as np
import pytest
from conftest import ENV, ROOT, Forked, flags, run_python, run_script, succeed, write_text

import train_gpt2 as t

TRAINING = "".join(f"{step} train {1 + 9 * 0.9**step + step % 2}\n" for step in range(1000))
LOG = TRAINING + "0 val 10.9\n250 val 7.1\n0 hella 0.25\n250 hella 0.26\n"


def draw(folder, log, data="edu_fineweb10B"):
    (folder / "log.txt").write_text(log)
    constants = {"total_batch_size": 2048, "data": data}
    (folder / "run.json").write_text(json.dumps({"constants": constants}))
    t.draw_curves(str(folder))
    return folder / "curves.png"


@pytest.mark.filterwarnings("error")  # they would be told at each validation
@pytest.mark.parametrize("log", [LOG, "0 val 10.9\n", "0 val 10.9\n0 train 5.5\n1 train 5\n"])
@pytest.mark.parametrize("data", ["edu_fineweb10B", "my.txt"])
def test_curves_are_drawn_of_any_log(tmp_path, log, data):
    pytest.importorskip("matplotlib")
    assert draw(tmp_path, log, data).read_bytes().startswith(b"\x89PNG")


def test_curves_show_what_matters(tmp_path, monkeypatch):
    """Smoothed, from where the loss has come down, and beside what there is to beat."""
    figure = pytest.importorskip("matplotlib.figure")
    seen = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, file, **_: seen.append(self))
    draw(tmp_path, LOG)
    loss, hella = seen[0].axes
    labels = " ".join(text.get_text() for axis in seen[0].axes for text in axis.get_legend().texts)
    assert all(number in labels for number in ("3.2924", "0.2945", "0.260"))
    assert "tokens" in loss.get_xlabel() and "tokens" in hella.get_xlabel()
    tokens, losses = np.array(loss.lines[0].get_data())
    assert len(losses) < 400 and losses[100:].std() < 0.2 and tokens[-1] == pytest.approx(2, 0.1)
    assert losses[0] > 5 and 1.5 < loss.get_ylim()[1] < 3
    draw(tmp_path, TRAINING)
    assert len(seen[1].axes) == 1  # where HellaSwag is off


def test_a_run_describes_itself(tmp_path):
    """Constants, versions, commit, and the command of each start, for json and for people."""
    write_text(tmp_path)
    succeed(Forked(tmp_path / "log", max_steps=4, arrange={"signal_at": (signal.SIGTERM, 0)}))
    succeed(Forked(tmp_path / "log", max_steps=4))
    text = (tmp_path / "log" / "run.json").read_text()
    run = json.loads(text)
    assert set(run["constants"]) == set(t.Config.__dataclass_fields__)
    assert run["constants"]["n_embd"] == 16 and text.count("\n") > 40
    first, second = run["starts"]
    assert (first["step"], second["step"]) == (0, 1)
    assert second["command"][1:] == flags(tmp_path / "log", max_steps=4)
    assert {"torch", "python", "commit", "time"} <= set(second)
    assert re.fullmatch(r"\S*", second["commit"])  # empty without git


@pytest.mark.parametrize("script", ["train_gpt2.py", "fineweb.py", "hellaswag.py"])
def test_help_fits_a_terminal_and_prints_nothing_else(script):
    done = run_script(script, "--help", env={"COLUMNS": "80"})
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert len(done.stdout) > 400 and "\x1b" not in done.stdout
    if script == "train_gpt2.py":
        text = " ".join(done.stdout.split())
        for field in dataclasses.fields(t.Config):
            entry = re.search(rf"--{field.name} X (.*?)(?= --\w+ X |$)", text)[1]
            assert len(entry) < 120 and f"[{field.default!r}" in entry, entry
            assert (f"in SMALL {t.SMALL.get(field.name)!r}]" in entry) == (field.name in t.SMALL)


def test_import_does_nothing(tmp_path):
    done = run_python("import train_gpt2, hellaswag, fineweb, sys; "
                      "assert not {'transformers', 'datasets', 'matplotlib'} & set(sys.modules)",
                      cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


def test_how_long_threads_spin_is_set_unless_the_user_did(monkeypatch):
    """Before anything else: OpenMP reads it when torch is imported."""
    code = ("import os, runpy, sys; sys.modules['numpy'] = None\n"
            "try: runpy.run_path(sys.argv[1], run_name='__main__')\n"
            "except ImportError: print(os.environ['GOMP_SPINCOUNT'])")
    monkeypatch.delitem(ENV, "GOMP_SPINCOUNT", raising=False)
    for env, spin_count in (({}, "10000\n"), ({"GOMP_SPINCOUNT": "5"}, "5\n")):
        assert run_python(code, ROOT / "train_gpt2.py", env=env).stdout == spin_count


def test_an_ascii_terminal_shows_everything(tmp_path):
    """And a machine without matplotlib and transformers trains, too."""
    write_text(tmp_path)
    run = succeed(Forked(tmp_path / "données", max_steps=1, sample_every=1, sample_prompt="Grüße",
                         ascii_stdout=True, hide=["matplotlib", "transformers"]))
    assert "donn\\xe9es/log.txt" in run.out and "---\nGr\\xfc\\xdfe" in run.out
    assert "not exported" in run.out and not (run.log_dir / "curves.png").exists()
