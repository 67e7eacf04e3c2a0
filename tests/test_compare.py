"""Tests of compare.py: which runs form a row, what counts as noise, and what the table shows."""
import json
import math

import compare
import pytest

CONSTANTS = {"max_lr": 0.1, "max_steps": 20, "encoding": "bytes", "val_tokens": 512,
             "total_batch_size": 200}
CODE = '''"""A script."""
class Config:
    max_lr: float = 0.1
SMALL = dict(max_steps=20)
def f(x):
    """Return x + 1."""
    return x + 1  # one more
'''

def write_run(folder, val, *, code=CODE, before=(), **constants):
    """Write the folder of a finished run. Its seed is the last digit of the folder's name."""
    folder.mkdir()
    constants = CONSTANTS | {"seed": int(folder.name[-1]), "log_dir": str(folder)} | constants
    (folder / "config.json").write_text(json.dumps(constants))
    (folder / "train_gpt2.py").write_text(code)
    for step, older in enumerate(before):
        (folder / f"train_gpt2_before_{step:05d}.py").write_text(older)
    (folder / "log.txt").write_text(
        f"0 val 9.0\n10 val 3.0\n10 tok/s 2000\n20 val 7.0\n{constants['max_steps']} val {val}\n")

@pytest.fixture
def lines_of(tmp_path, monkeypatch, capsys):
    """Return a function that runs compare.py in tmp_path and returns the lines of its output."""
    monkeypatch.chdir(tmp_path)

    def run(*patterns):
        monkeypatch.setattr("sys.argv", ["compare.py", *patterns])
        compare.main()
        return capsys.readouterr().out.splitlines()
    return run

def row_of(lines, folder):
    """Return the only line of the table whose first folder is this one."""
    [row] = [line for line in lines if line.startswith("| ") and f" {folder}: " in line]
    return row

def test_runs_that_differ_only_in_their_seed_form_a_row(tmp_path, lines_of):
    """A row shows means over its seeds, and the verdict uses the noise pooled over all rows."""
    other = CODE.replace("x + 1", "x + 2")
    for name, val, more in (
            ("a1", 2.0, {}), ("a2", 2.2, {}), ("a3", 2.1, {}), ("b1", 2.11, dict(code=other)),
            ("b2", 2.11, dict(code=other)), ("c1", 1.0, dict(max_lr=0.2))):
        write_run(tmp_path / name, val, **more)
    lines = lines_of("a?", "*")
    assert [line.split()[1] for line in lines[2:5]] == ["1.0000", "2.1000", "2.1100"]
    # The deviations are 0.1, 0 and 0.1 in one row, and 0 and 0 in another. The rows have 2 + 1
    # degrees of freedom, for which t is 3.18
    spread = math.sqrt(0.02 / 3)
    assert lines[-1] == f"The noise of a run is {spread:.4f}, with 3 degrees of freedom."
    assert row_of(lines, "a1") == "| 2.1000 | 0.1000 | 3 | the baseline | 100.0 | a1: - |"
    allowed = 3.18 * spread * math.sqrt(1 / 2 + 1 / 3)
    assert row_of(lines, "b1") == (
        f"| 2.1100 | 0.0000 | 2 | +0.0100 +- {allowed:.4f}: within noise | 100.0 | b1: code |")
    allowed = 3.18 * spread * math.sqrt(1 + 1 / 3)
    assert row_of(lines, "c1") == (
        f"| 1.0000 | - | 1 | -1.1000 +- {allowed:.4f}: ahead | 100.0 | c1: max_lr=0.2 |")
    assert ": behind |" in row_of(lines_of("c1", "*"), "a1")

def test_without_two_seeds_there_is_no_verdict(tmp_path, lines_of):
    write_run(tmp_path / "a1", 1.0)
    write_run(tmp_path / "b1", 2.0, max_lr=0.2)
    lines = lines_of("a1", "b1")
    assert "| +1.0000, no verdict: one seed |" in row_of(lines, "b1")
    assert lines[-1].startswith("No row comparable with the baseline has two seeds")

@pytest.mark.parametrize("change, reason", [
    (dict(max_steps=5), "another length"), (dict(encoding="gpt2"), "another encoding"),
    (dict(val_tokens=64), "another val_tokens")])
def test_rows_that_are_not_comparable_do_not_change_the_noise(tmp_path, lines_of, change, reason):
    for name, val, more in (("a1", 2.000, {}), ("a2", 2.002, {}), ("s1", 4.0, change),
                            ("s2", 3.0, change), ("t1", 2.0, dict(max_steps=10,
                                                                  total_batch_size=400))):
        write_run(tmp_path / name, val, **more)
    lines = lines_of("a*", "*")
    assert lines[-1].startswith(f"The noise of a run is {0.001 * math.sqrt(2):.4f}, with 1 deg")
    assert f"| +1.4990, no verdict: {reason} |" in row_of(lines, "s1")
    assert "within noise" in row_of(lines, "t1")  # as many tokens

def test_constants_comments_and_docstrings_are_not_code(tmp_path, lines_of):
    """Their values are in config.json. A run that other code has continued has both codes."""
    write_run(tmp_path / "a1", 2.0)
    same = CODE.replace("= 0.1", "= 0.2").replace("=20", "=9").replace("one more", "1")
    write_run(tmp_path / "a2", 2.0, code=same.replace("Return x", "Give x"))
    write_run(tmp_path / "b1", 2.0, before=[CODE.replace("x + 1", "x")])
    lines = lines_of("*")
    assert "| 2 | the baseline |" in row_of(lines, "a1")
    assert row_of(lines, "b1").endswith("| b1: code |")

def test_folders_without_a_finished_run_are_left_out_with_the_reason(tmp_path, lines_of):
    write_run(tmp_path / "a1", 2.0)
    write_run(tmp_path / "b1", 2.0)  # the same run in another folder
    write_run(tmp_path / "c1", 2.0)
    (tmp_path / "c1" / "config.json").write_text('{"max_lr"')
    write_run(tmp_path / "d1", 2.0)
    (tmp_path / "d1" / "log.txt").write_text("0 val 9.0\n")
    for_b, for_c, for_d, *table = lines_of("*")
    assert for_b == "b1 is left out: it is the same run as a1."
    assert for_c.startswith("c1 is left out: it holds no run (")
    assert for_d == "d1 is left out: step 20 has not been validated."
    assert row_of(table, "a1")
    with pytest.raises(SystemExit, match=r"no finished run in d1 x\*"):
        lines_of("d1", "x*")
    assert lines_of("x*", "a*")[0] == "No folder matches x*."
