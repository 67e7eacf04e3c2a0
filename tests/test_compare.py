"""Tests of compare.py: which runs form a row, what counts as noise, and what the table shows."""
import json
import math

import compare
import pytest

CONSTANTS = {"max_lr": 0.1, "max_steps": 20, "encoding": "bytes", "val_tokens": 512,
             "total_batch_size": 200}
CODE = '''
SMALL = dict(max_steps=20)
def f(x):
    """Return x + 1."""
    return x + 1  # one more
'''

def write_run(folder, val, code=CODE, size=1, **constants):
    """Write the folder of a run. Its seed is the last digit of its name. size: bytes per token."""
    folder.mkdir()
    constants = CONSTANTS | {"seed": int(folder.name[-1]), "log_dir": str(folder)} | constants
    (folder / "config.json").write_text(json.dumps(constants))
    (folder / "train_gpt2_00000.py").write_text(code)
    (folder / "log.txt").write_text(
        f"0 parameters 1234\n0 bytes_per_token {size}\n0 val 9.0\n10 tok/s 2000\n"
        f"{constants['max_steps']} val {val}\n")

@pytest.fixture
def rows_of(tmp_path, monkeypatch, capsys):
    """Return a function that runs compare.py in tmp_path and returns {first cell: cells}."""
    monkeypatch.chdir(tmp_path)

    def run(*patterns):
        monkeypatch.setattr("sys.argv", ["compare.py", *patterns])
        compare.main()
        rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
        return {row[0]: row for row in rows}
    return run

def test_runs_that_differ_only_in_their_seed_form_a_row(tmp_path, rows_of):
    """Constants, comments and docstrings do not count as code. (config.json has the constants.)"""
    other = CODE.replace("x + 1", "x + 2")
    same = CODE.replace("=20", "=9").replace("one more", "1").replace("Return x", "Give x")
    for name, val, more in (
            ("a1", 2.0, {}), ("a2", 2.2, dict(code=same)), ("a3", 2.1, {}),
            ("b1", 2.11, dict(code=other)), ("b2", 2.11, dict(code=other)),
            ("c1", 1.0, dict(max_lr=0.2))):
        write_run(tmp_path / name, val, **more)
    rows = rows_of("a?", "*")
    assert [*rows][2:5] == ["c1", "a1", "b1"]
    assert rows["a1"] == ["a1", "2.1000", "0.1000", "3", "-", "the baseline", "0.1 (1)", "1,234",
                          "100.0 (1.00)", "-"]
    # Seed by seed, b differs by 0.11 and -0.09. With one degree of freedom, t is 12.7062
    assert rows["b1"][1:6] == ["2.1100", "0.0000", "2", "+0.0100 +- 1.2706", "within noise"]
    assert rows["c1"][3:7] == ["1", "-1.0000", "none: fewer than two common seeds", "0.2 (2)"]

def test_verdicts_are_corrected_for_their_number(tmp_path, rows_of):
    """A difference with p = 0.023 is not clear if it is the smallest p-value of three."""
    for name, slope in dict(a=0.1, b=0.108, c=0.09, d=0.12).items():
        for seed in range(3):
            write_run(tmp_path / f"{name}{seed}", 2 + 0.022 * (name == "b") + slope * seed,
                      CODE + f"name = '{name}'")
    assert rows_of("a*", "b*")["b0"][4:6] == ["+0.0300 +- 0.0199", "behind"]
    assert rows_of("*")["b0"][4:6] == ["+0.0300 +- 0.0199", "unclear"]

@pytest.mark.parametrize("change, reason", [
    (dict(max_steps=5), "another length"),
    (dict(val_tokens=64), "another amount of validation text"),
    (dict(encoding="gpt2", size=4), "another amount of validation text")])
def test_a_row_that_is_not_comparable_gets_no_verdict(tmp_path, rows_of, change, reason):
    for name, more in dict(a1={}, a2={}, s1=change).items():
        write_run(tmp_path / name, 2.0, **more)
    assert rows_of("a*", "s*")["s1"][5] == f"none: {reason}"
    assert rows_of("s1", "a1")["a1"][5].startswith("none: ")

def test_other_encodings_are_compared_in_bits_per_byte(tmp_path, rows_of):
    """A token of four bytes with a loss of 8 bits costs as much as four bytes of 2 bits each."""
    for seed, val in enumerate((1.99, 2.01)):
        write_run(tmp_path / f"a{seed}", val * math.log(2))
        write_run(tmp_path / f"b{seed}", 4 * val * math.log(2), size=4, encoding="gpt2",
                  val_tokens=128)
    rows = rows_of("*")
    assert "Encodings differ, so losses are in bits per byte, not in nats per token." in rows
    assert rows["b0"][1] == rows["a0"][1] == "2.0000"
    assert rows["b0"][4:6] == ["+0.0000 +- 0.0000", "within noise"]

def test_folders_without_a_finished_run_are_left_out_with_the_reason(tmp_path, rows_of):
    for name in ("a1", "c1", "d1"):
        write_run(tmp_path / name, 2.0)
    (tmp_path / "c1" / "config.json").write_text('{"max_lr"')
    (tmp_path / "d1" / "log.txt").write_text("0 val 9.0\n20 val nan\n")
    for_c, for_d, *_ = rows_of("*")
    assert for_c.startswith("c1 is left out: it holds no run (")
    assert for_d == "d1 is left out: step 20 has no finite validation loss."
