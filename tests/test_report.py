"""Tests of what a run reports: curves.png, run.json, log.txt and the lines on stdout."""
import contextlib
import dataclasses
import json
import math
import re
import signal
from collections import deque
from concurrent.futures import Future
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

def draw(folder, log):
    """Draw the curves of a log in `folder`. Return the path of the figure."""
    (folder / "log.txt").write_text(log)
    (folder / "run.json").write_text(json.dumps({"constants": {"total_batch_size": 2048}}))
    t.plot_curves(str(folder))
    return folder / "curves.png"

# Fail on warnings, because users would see them at each validation
@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
@pytest.mark.parametrize("log", [LOG, "0 val 10.9\n", "0 val 10.9\n0 train 5.5\n1 train 5\n"])
def test_curves_are_drawn_from_any_log(tmp_path, log):
    """Long logs and logs with only a few values are drawn without warnings."""
    pytest.importorskip("matplotlib")
    assert draw(tmp_path, log).read_bytes().startswith(b"\x89PNG")

def test_curves_are_smoothed_and_cut_off_above(tmp_path, monkeypatch):
    """The losses are smoothed, and the axis cuts off the high losses of the first steps.

    Each metric that is not a loss has its own panel.
    """
    figure = pytest.importorskip("matplotlib.figure")
    seen = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, file, **_: seen.append(self))
    draw(tmp_path, LOG)
    loss, hella = seen[0].axes
    assert "0.260" in hella.get_legend().texts[0].get_text()
    assert "tokens" in loss.get_xlabel() and "tokens" in hella.get_xlabel()
    tokens, losses = np.array(loss.lines[0].get_data())
    assert len(losses) < 400 and losses[100:].std() < 0.2 and tokens[-1] == pytest.approx(2, 0.1)
    assert losses[0] > 5 and 1.5 < loss.get_ylim()[1] < 3
    draw(tmp_path, TRAINING + "0 val 10.9\n0 minutes 0\n0 norm 0.5\n")
    axis, norm = seen[1].axes  # no panel for HellaSwag or minutes
    assert norm.get_ylabel() == "norm"

def test_a_run_describes_itself(tmp_path):
    """run.json holds the constants, the versions and command of each start, and the result.

    The last lines on stdout show the same result. A run that was stopped has no result.
    """
    write_text(tmp_path)
    succeed(Forked(tmp_path / "log", max_steps=4, arrange={"signal_at": (signal.SIGTERM, 0)}))
    assert t.read_run_json(tmp_path / "log")["result"] is None
    ended = succeed(Forked(tmp_path / "log", max_steps=4))
    text = (tmp_path / "log" / "run.json").read_text()
    run = json.loads(text)
    result, losses = run["result"], dict(t.read_metrics(tmp_path / "log")["val"])
    assert ended.out.endswith("".join(f"{name:17} {value}\n" for name, value in result.items()))
    assert result["val"] == losses[4] and result["lowest_val"] == min(losses.values())
    assert losses[result["lowest_step"]] == result["lowest_val"] and result["steps"] == 4
    assert result["bits_per_byte"] == pytest.approx(losses[4] / math.log(2), abs=1e-6)  # per byte
    assert result["tokens"] == 4 * run["constants"]["total_batch_size"]
    assert result["tokens_per_second"] > 0 and result["minutes"] > 0
    assert "tokens in 1 file(s) #" in run["data"]
    assert set(run["constants"]) == set(t.Config.__dataclass_fields__)
    assert run["constants"]["n_embd"] == 16 and text.count("\n") > 40
    first, second = run["starts"]
    assert (first["step"], second["step"]) == (0, 1)
    assert second["command"][1:] == flags(tmp_path / "log", max_steps=4)
    assert {"torch", "python", "code", "time"} <= set(second)

def step_399(monkeypatch, *others, float16=False):
    """Return a Run that has just taken step 399.

    others: (loss, norm, signal) of each other process. float16: "fine", "scale 0" (the loss scale
    has fallen to 0), or False for another dtype.
    """
    monkeypatch.setattr(t, "world_size", lambda: 1 + len(others))
    monkeypatch.setattr(t.dist, "all_gather", lambda everyones, mine: everyones.__setitem__(
        slice(None), [mine, *map(torch.tensor, others)]))
    run = MagicMock(cfg=t.Config(max_steps=1000, total_batch_size=2000, T=10, max_lr=7.15e-4),
                    step_seconds=deque([5.0, 1.0, 90.0, 1.0, 1.0, 2.0]))
    run.state.step = 400
    run.signal_came.is_set.return_value = False
    run.state.scaler.is_enabled.return_value = float16
    run.state.scaler.get_scale.return_value = float16 == "fine"  # 1 or 0
    return run

def test_the_numbers_of_a_step(monkeypatch, capsys):
    """The line of a step has the loss, learning rate, norm, speed and time left.

    The time left is 600 times the median duration, so that one slow step has no effect. (If two
    durations are in the middle, the shorter one is used.) Values of other metrics have lines with
    the names of the metrics. A full disk does not stop the run.
    """
    run = step_399(monkeypatch)
    t.report(run, 399, "gate", 0.5)
    t.report_step(run, 399, 2.5, 0.75)
    assert capsys.readouterr().out == (
        "  399/1000 gate 0.5000\n"
        "  399/1000 train 2.5000 lr 4.00e-04 norm 0.75 2000 ms 1,000 tok/s 0:10:00 left\n")
    written = [call.args[0] for call in run.folder.log.write.call_args_list]
    assert written == [b"399 gate 0.500000\n", b"399 train 2.500000\n", b"399 norm 0.750000\n"]
    run.folder.log.write.side_effect = OSError("No space left")
    for every in (2, 0):
        run.cfg = dataclasses.replace(run.cfg, print_every=every)
        t.report_step(run, 399, 2.5, 0.75)
        assert capsys.readouterr().out == ""
        t.report(run, 399, "val", 2.5, note=" (bits)", print_always=True)
        assert capsys.readouterr().out == "  399/1000 val 2.5000 (bits)\n"

def test_slow_steps_are_reported_in_one_line(monkeypatch, capsys):
    """The line names the cause and the remedy. It is printed once per start, and only on CPUs."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    run = step_399(monkeypatch)
    run.device, run.warned_slow = torch.device("cpu"), False
    run.step_seconds = deque([0.04] * 20 + [0.07] * 20)
    t.warn_of_slow_steps(run)
    run.step_seconds.extend([0.1] * 9)  # fewer than half of the last twenty steps
    t.warn_of_slow_steps(run)
    assert capsys.readouterr().out == "" and not run.warned_slow
    run.step_seconds.extend([0.1] * 2)
    for device, threads in (("cuda", 2), ("cpu", 1)):
        run.device = torch.device(device)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # noqa: B023
        t.warn_of_slow_steps(run)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    t.report_step(run, 399, 2.5, 0.75)
    t.report_step(run, 399, 2.5, 0.75)
    slow = [line for line in capsys.readouterr().out.splitlines() if "train" not in line]
    assert len(slow) == 1 and "2.5 times as long" in slow[0] and "OMP_NUM_THREADS=1" in slow[0]

def test_processes_agree_on_a_step(monkeypatch):
    """Each process gets the losses, norms and signals of all, so that a signal stops them all.

    Gradients with different norms end the run, since the processes would train different models.
    """
    mine = torch.tensor(2.5), torch.tensor(0.75)
    step_399(monkeypatch)
    assert t.gather_from_ranks(*mine, signal_came=True) == [[2.5], [0.75], [1]]
    run = step_399(monkeypatch, (3.5, 0.7500001, 1.0), (6.0, 0.75, 0.0))
    losses, norms, signals = t.gather_from_ranks(*mine, signal_came=False)
    assert losses == [2.5, 3.5, 6.0] and signals == [0, 1, 0]
    t.check_step(run, 399, sum(losses), norms)
    with pytest.raises(t.UserError, match="step 399 .*0.75 .*0.7501.* different models"):
        t.check_step(run, 399, sum(losses), [0.75, 0.7501, 0.75])
    assert "different models" in run.folder.write_run.call_args.args[0]["failed"]

@pytest.mark.parametrize("loss, norm, float16, ends", [
    (1.0, math.inf, "fine", False), (1.0, math.nan, "fine", False), (math.nan, 1.0, "fine", True),
    (1.0, math.nan, "scale 0", True),
    (1.0, math.inf, False, True), (math.inf, 1.0, False, True), (2e4, 1.0, False, True),
    (-2e4, 1.0, False, True), (9e3, 1e9, False, False)])
def test_a_run_that_no_longer_learns_is_ended(monkeypatch, loss, norm, float16, ends):
    """A run ends if its loss is not finite or is above 10,000, or if its norm is not finite.

    In float16 a norm that is not finite only skips the step, unless the loss scale has fallen to 0.
    The message lists the possible causes.
    """
    run = step_399(monkeypatch, float16=float16)
    suspects = ["--max_lr", "vocabulary", "zeros", "float16", "edit", "CUDNN", "--init_from=log/"]
    said = f"Step 399 has loss {loss:g} and .* norm {norm:g}.*" + ".*".join(suspects)
    with pytest.raises(t.UserError, match=said) if ends else contextlib.nullcontext():
        t.check_step(run, 399, loss, [norm])
    assert bool(run.folder.write_run.call_args_list) == ends  # it writes {"failed": ...}

def test_the_first_lines_show_epochs_and_optimizer_groups(monkeypatch):
    """The groups show the effect of edits that freeze parameters or change their weight decay.

    The number of tokens follows an edit of rows_before().
    """
    model, cfg = small(), t.Config(max_steps=10, total_batch_size=4096, T=1024)
    run = MagicMock(cfg=cfg)
    run.train_loader.rows_per_epoch, run.state.step = 16, 10
    run.state.raw_model, run.state.optimizers = model, t.configure_optimizers(model, cfg)
    run.device = torch.device("cpu")
    out = t.description(run, checkpoint=None)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    assert "10 steps, 40,960 tokens, 2.50 epochs" in out and "This run is finished" in out
    assert re.search(r"(\S+) in 10 tensors by AdamW with decay 0.1; 896 in 18 tensors by AdamW "
                     "with decay 0.0$", out, re.M)[1] == f"{sum(p.numel() for p in matrices):,}"
    monkeypatch.setattr(t, "rows_before", lambda cfg, step: step * (step + 1) // 2)
    assert f"10 steps, {55 * 1024:,} tokens" in t.description(run, checkpoint=None)

def test_only_the_newest_plot_is_drawn_after_a_slow_save(tmp_path, monkeypatch):
    """A plot that waits for a save is dropped when the next plot is due."""
    pytest.importorskip("matplotlib")
    folder, hold = t.RunFolder(t.Config(log_dir=str(tmp_path)), "data"), Future()
    monkeypatch.setattr(t, "plot_curves", plot_curves := mock.Mock())
    folder.executor.submit(hold.result)  # in place of a slow save
    for _ in range(5):
        folder.plot_in_background()
    hold.set_result(None)
    folder.close()
    plot_curves.assert_called_once_with(tmp_path)

def test_lines_of_repeated_steps_are_removed_from_a_log(tmp_path, monkeypatch):
    """When a run continues, its log loses incomplete lines and lines of steps that are repeated.

    Earlier lines and users' notes are kept. New lines are written to disk at once. A full disk does
    not stop print0().
    """
    path, kept = tmp_path / "log.txt", b"# tried on Monday\n\n0 val 9.5\n# the cat\n11 train 1.0\n"
    for rest in (b"12 train 1.0\n# no\n", b"13 val nan\n", b"12 my gate -1.0\n", b"11 tra", b"1",
                 b"# half", b""):
        path.write_bytes(kept + rest)
        with t.truncate_and_open_log(path, 12) as log:
            log.write(b"12 train 2.0\n")
            assert path.read_bytes() == kept + b"12 train 2.0\n", rest
    monkeypatch.setattr("builtins.print", mock.Mock(side_effect=OSError("No space left")))
    t.print0("to a file on the same disk")

def test_files_are_never_half_written(tmp_path, monkeypatch):
    """If a process is killed while it writes run.json or curves.png, the old file remains.

    No later start would succeed with half of a run.json.
    """
    # os.replace is the last call of such a write
    monkeypatch.setattr("os.replace", mock.Mock(side_effect=KeyboardInterrupt))
    (tmp_path / "run.json").write_text('{"starts": []}')
    with pytest.raises(KeyboardInterrupt):
        t.RunFolder(t.Config(log_dir=str(tmp_path)), "data").begin(0, continues=True)
    assert (tmp_path / "run.json").read_text() == '{"starts": []}'
    pytest.importorskip("matplotlib")
    with pytest.raises(KeyboardInterrupt):
        draw(tmp_path, LOG)
    assert not (tmp_path / "curves.png").exists()

@pytest.mark.parametrize("script", [t, fineweb, hellaswag])
def test_help_fits_a_terminal_and_prints_nothing_else(script, monkeypatch, capsys):
    """No line of --help is longer than 80 columns.

    In train_gpt2.py, each flag has a short description, its default, and its value in each preset.
    """
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
            for name in ("SMALL", "FINETUNE"):
                preset = t.PRESETS[name]
                said = f"in {name} {preset.get(field.name)!r}"
                assert (said in entry) == (field.name in preset), entry

def test_an_ascii_terminal_shows_everything(tmp_path):
    """Characters that are missing in the terminal's encoding are escaped.

    The run also needs neither matplotlib nor transformers.
    """
    write_text(tmp_path)
    run = succeed(Forked(tmp_path / "données", max_steps=1, sample_every=1, sample_prompt="Grüße",
                         ascii_stdout=True, hide=["matplotlib", "transformers"]))
    assert "donn\\xe9es/log.txt" in run.out and "---\nGr\\xfc\\xdfe" in run.out
    assert "Not exported" in run.out and not (run.log_dir / "curves.png").exists()

def test_a_run_that_ends_early_is_validated_once(monkeypatch):
    """An edit may add a `break` to train(), before or after the validation of a step."""
    called = []
    for name in ("save_last_step", "export", "result_of", "print_result"):
        monkeypatch.setattr(t, name, lambda run: None)
    monkeypatch.setattr(t, "validate", lambda run: called.append(run.validated_step))
    for validated_step in (4, 5):
        run = mock.Mock(cfg=t.Config(max_steps=10), validated_step=validated_step)
        run.state.step = 5
        t.finish(run, stopped=False)
    assert called == [4]
