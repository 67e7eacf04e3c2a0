"""Tests of what a run reports: log.txt, config.json, curves.png, --help and the lines on stdout."""
import dataclasses
import json
import re
import signal
import time
from types import SimpleNamespace
from unittest import mock

import pytest
from conftest import (
    ROOT, Training, before_steps, device_type, flags, run_script, signal_at, succeed, write_text)

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
    assert steps == {
        "parameters": [0], "bytes_per_token": [0], "complete": [12], "val": [0, 5, 10, 12],
        "train_s": [0, 5, 10, 12], "tok/s": [5, 10, 12], "train": [*range(12)],
        "norm": [*range(12)]}
    seconds = [float(value) for _, metric, value in log if metric == "train_s"]
    assert seconds[0] == 0 and seconds == sorted(set(seconds))
    assert re.search(rf"^machine   1 x {device_type()}.*, torch 2\.", run.stdout, re.M)
    assert re.search(r"^model +[\d,]+ parameters, trained by AdamW$", run.stdout, re.M)
    assert [int(step) for step, _, _ in log] == sorted(int(step) for step, _, _ in log)
    number = r"[\d.,e+-]+"
    for step in (0, 4, 8):
        assert re.search(rf"^ +{step}/12 train {number} lr {number} norm {number} {number} ms "
                         rf"{number} tok/s 0:\d\d:\d\d left$", run.stdout, re.M), run.stdout
    assert len(re.findall(" train .* left$", run.stdout, re.M)) == 3
    assert re.search(rf"^ +10/12 val {number}$", run.stdout, re.M)
    assert "donn\\xe9es/log.txt" in run.stdout and "---\nGr\\xfc\\xdfe" in run.stdout
    assert "(it is not here)" in run.stdout
    config = json.loads((folder / "config.json").read_text())
    assert config.keys() == t.Config.__dataclass_fields__.keys() and config["n_embd"] == 16
    assert (folder / "train_gpt2_00000.py").read_bytes() == (ROOT / "train_gpt2.py").read_bytes()

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

def use_clock(t):
    """Let the first step take 100 s, and each other step 1 s."""
    clock = [0.0]
    t.time = SimpleNamespace(perf_counter=lambda: clock[0], time=lambda: clock[0],
                             monotonic=lambda: clock[0], sleep=time.sleep)

    def act(run):
        clock[0] += 1 if run.last_save else 100
    before_steps(t, range(100), act)

def test_the_time_of_training_is_without_the_first_step_of_a_process(place):
    """The first step may compile. A resumed run adds its time to that before."""
    words = dict(eval_every=1, arrange=[(use_clock,)])
    succeed(Training(place / "clock", max_steps=5, **words))
    run = succeed(Training(place / "clock", max_steps=10, **words))
    seconds = t.read_metrics(run.log_dir)["train_s"]
    assert [seconds[step] for step in range(11)] == [0, 0, 1, 2, 3, 4, 4, 5, 6, 7, 8]

def test_a_large_number_of_epochs_is_readable(place):
    run = succeed(Training(place / "epochs", max_steps=10**9,
                           arrange=[(signal_at, signal.SIGTERM, 0)]))
    [line] = [line for line in run.out.splitlines() if line.startswith("training ")]
    assert re.search(r"\b2,8\d\d,\d{3}(\.\d+)? epochs", line), line

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
