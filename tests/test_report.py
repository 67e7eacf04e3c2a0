"""Tests of what a run reports: log.txt, config.json, curves.png, --help and the lines on stdout."""
import dataclasses
import json
import os
import re
import sys
from unittest import mock

import pytest
from conftest import ROOT, Forked, device_type, flags, run_script, write_text

import fineweb
import hellaswag
import train_gpt2 as t

def test_a_run_describes_itself(tmp_path):
    """log.txt has each metric of each step, and stdout the lines that are due.

    The terminal lacks some characters, which are escaped, and two packages are not installed.
    """
    write_text(tmp_path)
    for name in ("transformers", "matplotlib"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('it is not here')")
    given = flags(tmp_path / "données", max_steps=12, print_every=4, sample_every=12,
                  sample_prompt="Grüße")
    env = {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(tmp_path)}
    run = run_script("train_gpt2.py", *given, env=env)
    assert run.returncode == 0 and not run.stderr, run.stderr
    folder = tmp_path / "données"
    log = [line.split() for line in (folder / "log.txt").read_text().splitlines()]
    assert all(re.fullmatch(r"\d\S*", value) for _, _, value in log)
    steps = {metric: [int(step) for step, name, _ in log if name == metric]
             for _, metric, _ in log}
    assert steps == {"parameters": [0], "val": [0, 5, 10, 12], "train": [*range(12)],
                     "norm": [*range(12)], "tok/s": [5, 10, 12], "train_s": [0, 5, 10, 12]}
    seconds = [float(value) for _, metric, value in log if metric == "train_s"]
    assert seconds[0] == 0 and seconds == sorted(set(seconds))
    assert re.search(rf"^machine   1 x {device_type()}.*, torch 2\.", run.stdout, re.M)
    assert re.search(r"^model +[\d,]+ parameters; AdamW trains 6 matrices and 10 vectors$",
                     run.stdout, re.M)
    assert [int(step) for step, _, _ in log] == sorted(int(step) for step, _, _ in log)
    number = r"[\d.,e+-]+"
    for step in (0, 4, 8):
        assert re.search(rf"^ +{step}/12 train {number} lr {number} norm {number} {number} ms "
                         rf"{number} tok/s 0:\d\d:\d\d left$", run.stdout, re.M), run.stdout
    assert len(re.findall(" train .* left$", run.stdout, re.M)) == 3
    assert re.search(rf"^ +10/12 val {number}( .* TFLOP/s per GPU, peak .* GiB)?$", run.stdout,
                     re.M)
    assert "donn\\xe9es/log.txt" in run.stdout and "---\nGr\\xfc\\xdfe" in run.stdout
    assert "Not exported: it is not here" in run.stdout
    config = json.loads((folder / "config.json").read_text())
    assert config.keys() == t.Config.__dataclass_fields__.keys() and config["n_embd"] == 16
    assert (folder / "train_gpt2_00000.py").read_bytes() == (ROOT / "train_gpt2.py").read_bytes()

def close_stdout(t):
    """Make stdout a pipe whose other end is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    sys.stdout = open(writer, "w")

def test_a_closed_terminal_does_not_stop_a_run(tmp_path):
    """With `| head -1`, nothing reads the output after the first line. The run goes on."""
    write_text(tmp_path)
    Forked(tmp_path / "log", max_steps=4, arrange=[(close_stdout,)]).wait()
    assert t.find_checkpoints(tmp_path / "log").keys() == {4}

def test_a_metric_is_logged():
    """log_metric() appends a line to the log. A full disk does not stop the run."""
    run = mock.Mock()
    t.log_metric(run, 399, "gate", 1 / 3)
    run.log.write.side_effect = OSError("No space left")
    t.log_metric(run, 400, "val", 1e-9)
    written = [call.args[0] for call in run.log.write.call_args_list]
    assert written == [b"399 gate 0.3333333\n", b"400 val 1e-09\n"]
    with mock.patch("builtins.print", side_effect=OSError("No space left")):
        t.print0("to a file on the same disk")

def test_the_later_line_of_a_repeated_step_counts(tmp_path):
    """A killed run repeats steps. Half a line and a user's notes are ignored."""
    assert t.read_metrics(tmp_path) == {}
    (tmp_path / "log.txt").write_bytes(
        b"# on Monday\n9 val 3.5\n10 train 2.0\n11 train 3.0\n12 tra\n11 train 1.5e-02\n"
        b"12 my/gate nan\nthe cat\n\xff\n13 train")
    assert {name: {step: str(value) for step, value in values.items()}
            for name, values in t.read_metrics(tmp_path).items()} == {
        "val": {9: "3.5"}, "train": {10: "2.0", 11: "0.015"}, "my/gate": {12: "nan"}}

# Fail on warnings, because users would see them at each validation
@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
@pytest.mark.parametrize("log", ["", "0 val 9.5\n", "0 val 9.5\n0 train 5.5\n1 train 4\n1 val 5\n"])
def test_curves_are_drawn_from_any_log(tmp_path, log, monkeypatch):
    """Losses are drawn as curves. A kill during the drawing does not damage an earlier figure."""
    figure = pytest.importorskip("matplotlib.figure")
    (tmp_path / "log.txt").write_text(log)
    t.plot_curves(tmp_path)
    drawn = (tmp_path / "curves.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    seen = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, file, **_: seen.append(self))
    monkeypatch.setattr("os.replace", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        t.plot_curves(tmp_path)
    assert (tmp_path / "curves.png").read_bytes() == drawn
    lines = {line.get_label(): [*zip(*line.get_data())] for line in seen[0].axes[0].lines}
    metrics = t.read_metrics(tmp_path)
    assert lines == {name: [*metrics[name].items()] for name in ("train", "val")}

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
            entry = re.search(rf"--{field.name} \S+ (.*?)(?= --\w+ [{{\w|]+ |$)", text)[1]
            assert len(entry) < 160 and f"[{field.default!r}" in entry, entry
            for name, preset in (("SMALL", t.SMALL), ("FINETUNE", t.FINETUNE)):
                said = f"in {name} {preset.get(field.name)!r}"
                assert (said in entry) == (field.name in preset), entry
