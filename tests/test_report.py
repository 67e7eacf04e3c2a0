"""What a run leaves for people to look at, curves.png and run.json, and what it tells them."""
import contextlib
import dataclasses
import json
import math
import re
import signal
from unittest import mock
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from conftest import Forked, flags, succeed, write_text
from test_model import small

import fineweb
import hellaswag
import train_gpt2 as t

TRAINING = "".join(f"{step} train {1 + 9 * 0.9**step + step % 2}\n" for step in range(1000))
LOG = TRAINING + "0 val 10.9\n250 val 7.1\n0 hella 0.25\n250 hella 0.26\n"


def draw(folder, log, data="edu_fineweb10B"):
    (folder / "log.txt").write_text(log)
    constants = {"total_batch_size": 2048, "data": data}
    (folder / "run.json").write_text(json.dumps({"constants": constants}))
    t.draw_curves(str(folder))
    return folder / "curves.png"


@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")  # told each time
@pytest.mark.parametrize("log", [LOG, "0 val 10.9\n", "0 val 10.9\n0 train 5.5\n1 train 5\n"])
def test_curves_are_drawn_of_any_log(tmp_path, log):
    pytest.importorskip("matplotlib")
    assert draw(tmp_path, log).read_bytes().startswith(b"\x89PNG")


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
    draw(tmp_path, TRAINING + "0 val 10.9\n0 norm 0.5\n", data="my.txt")  # without HellaSwag
    axis, norm = seen[1].axes  # any stream has its curve; of another corpus, GPT-2 says nothing
    assert "3.2924" not in str([text.get_text() for text in axis.get_legend().texts])
    assert norm.get_ylabel() == "norm"


def test_a_run_describes_itself(tmp_path):
    """Constants, versions, and the command of each start, for json and for people."""
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
    assert {"torch", "python", "code", "time"} <= set(second)


def step_of_four(monkeypatch, stops=0, float16=False):
    """Run of four processes after its step 399, which began at second 10 and ends at 12."""
    monkeypatch.setattr(t, "world_size", lambda: 4)
    monkeypatch.setattr(t, "sum_over_ranks", lambda x: 4 * x + torch.tensor([0, 0, stops]))
    monkeypatch.setattr(t.time, "perf_counter", lambda: 12.0)
    monkeypatch.setattr(t, "peak_flops", lambda device: 1e9)
    monkeypatch.setattr(t, "flops_per_token", lambda model, T: 1e6)
    run = MagicMock(cfg=t.Config(max_steps=1000, total_batch_size=2000, max_lr=7.15e-4))
    run.state.step = 400
    run.signal.is_set.return_value = False
    run.state.scaler.is_enabled.return_value = float16
    return run


def test_the_numbers_of_a_step(monkeypatch, capsys):
    """Tokens of all processes a second; a device's share of its own peak; time for 600 steps."""
    run = step_of_four(monkeypatch)
    t.report_step(run, torch.tensor(2.5), torch.tensor(0.75), start=10.0)
    assert capsys.readouterr().out == (
        "  399/1000 loss 2.5000 lr 4.00e-04 norm 0.75 2000 ms 1,000 tok/s mfu 25% 0:20:00 left\n")
    run.log.write.assert_called_once_with(b"399 train 2.500000\n")
    assert run.stopping is False
    run = step_of_four(monkeypatch, stops=1)  # a signal came to another process
    t.report_step(run, torch.tensor(2.5), torch.tensor(0.75), start=10.0)
    assert run.stopping is True


@pytest.mark.parametrize("loss, norm, float16, ends", [
    (1.0, math.inf, True, False), (1.0, math.nan, True, False), (math.nan, 1.0, True, True),
    (1.0, math.inf, False, True), (math.inf, 1.0, False, True)])
def test_what_ends_a_run(monkeypatch, loss, norm, float16, ends):
    """In float16 the scaler skips steps that overflowed; a loss that is not finite stays so."""
    run = step_of_four(monkeypatch, float16=float16)
    with pytest.raises(t.UserError, match="Step 399") if ends else contextlib.nullcontext():
        t.report_step(run, torch.tensor(loss), torch.tensor(norm), start=10.0)
    assert run.log.write.called != ends


def test_the_first_lines_count_epochs(capsys):
    run = MagicMock(cfg=t.Config(max_steps=10, total_batch_size=4096, T=1024))
    run.train_loader.rows_per_epoch, run.state.raw_model, run.state.step = 16, small(), 10
    t.describe(run, torch.float32, compiled=False)
    out = capsys.readouterr().out
    assert "10 steps of 4,096 tokens, 2.50 epochs" in out and "This run is finished" in out
    assert f"a step is {t.flops_per_token(small(), 1024) * 4096 / 1e12:,.2g} TFLOP" in out


def test_files_are_never_half_written(tmp_path, monkeypatch, capsys):
    """A kill amid run.json would end every later start. A picture that fails is told once."""
    for name in ("run.json", "curves.png"):
        (tmp_path / name).write_text('{"starts": []}')
    monkeypatch.setattr("os.replace", mock.Mock(side_effect=KeyboardInterrupt))  # the last moment
    monkeypatch.setattr(t, "plot", mock.Mock())
    with pytest.raises(KeyboardInterrupt):
        t.begin_run(t.Config(log_dir=str(tmp_path)), 0, lock=None, continues=True)
    with pytest.raises(KeyboardInterrupt):
        t.draw_curves(tmp_path)
    for name in ("run.json", "curves.png"):
        assert (tmp_path / name).read_text() == '{"starts": []}'
    t.plot.side_effect = ValueError("no such font")
    t.print0_once.cache_clear()
    t.draw_curves(tmp_path)
    t.draw_curves(tmp_path)
    assert capsys.readouterr().out.count("no such font") == 1


@pytest.mark.parametrize("script", [t, fineweb, hellaswag])
def test_help_fits_a_terminal_and_prints_nothing_else(script, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.argv", [script.__file__, "--help"])
    monkeypatch.setattr("signal.signal", mock.Mock())
    with pytest.raises(SystemExit, match="^0$"):
        script.main()
    text, err = capsys.readouterr()
    assert len(text) > 400 and "\x1b" not in text and not err
    assert max(map(len, text.splitlines())) <= 80
    if script == t:
        text = " ".join(text.split()).partition("--help")[2]
        for field in dataclasses.fields(t.Config):
            entry = re.search(rf"--{field.name} \S+ (.*?)(?= --\w+ [X\w|]+ |$)", text)[1]
            assert len(entry) < 120 and f"[{field.default!r}" in entry, entry
            assert (f"in SMALL {t.SMALL.get(field.name)!r}]" in entry) == (field.name in t.SMALL)


def test_an_ascii_terminal_shows_everything(tmp_path):
    """And a machine without matplotlib and transformers trains, too."""
    write_text(tmp_path)
    run = succeed(Forked(tmp_path / "données", max_steps=1, sample_every=1, sample_prompt="Grüße",
                         ascii_stdout=True, hide=["matplotlib", "transformers"]))
    assert "donn\\xe9es/log.txt" in run.out and "---\nGr\\xfc\\xdfe" in run.out
    assert "Not exported" in run.out and not (run.log_dir / "curves.png").exists()
