"""Tests of compare.py: which runs form a row, what counts as noise, and what the table shows."""
import json
import math

import compare
import numpy as np
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

def write_run(folder, val, *, code=CODE, later=(), speed=2000, **constants):
    """Write the folder of a finished run. Its seed is the last digit of the folder's name.

    later: the code with which the run was continued at steps 1, 2, ...
    """
    folder.mkdir()
    constants = CONSTANTS | {"seed": int(folder.name[-1]), "log_dir": str(folder)} | constants
    (folder / "config.json").write_text(json.dumps(constants))
    for step, version in enumerate([code, *later]):
        (folder / f"train_gpt2_{step:05d}.py").write_text(version)
    (folder / "log.txt").write_text(
        f"0 parameters 1234\n0 val 9.0\n10 val {2 * val}\n10 tok/s {speed}\n20 val 7.0\n"
        f"{constants['max_steps']} val {val}\n")

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
    """Return the cells of the line of the first table that begins with this folder."""
    row = next(line for line in lines if line.startswith(f"| {folder} |"))
    return row.strip("| ").split(" | ")

def test_runs_that_differ_only_in_their_seed_form_a_row(tmp_path, lines_of):
    """A row shows means over its seeds. The noise is pooled over this row and the baseline."""
    other = CODE.replace("x + 1", "x + 2")
    for name, val, more in (
            ("a1", 2.0, {}), ("a2", 2.2, {}), ("a3", 2.1, {}), ("b1", 2.11, dict(code=other)),
            ("b2", 2.11, dict(code=other, speed=1000)), ("c1", 1.0, dict(max_lr=0.2))):
        write_run(tmp_path / name, val, **more)
    lines = lines_of("a?", "*")
    assert [line.split()[1] for line in lines[2:5]] == ["c1", "a1", "b1"]
    assert "give 0.1 verdicts of" in lines[6] and lines[7] == "ahead or behind (5 % of 2)."
    assert row_of(lines, "a1") == ["a1", "2.1000", "0.1000", "3", "-", "the baseline", "0.1 (1)",
                                   "1,234", "100.0 (1.00)", "-"]
    # The deviations are 0.1, 0 and 0.1 in one row, and 0 and 0 in the other. The rows have 2 + 1
    # degrees of freedom, for which t is 3.18
    allowed = 3.18 * math.sqrt(0.02 / 3) * math.sqrt(1 / 2 + 1 / 3)
    assert row_of(lines, "b1") == [
        "b1", "2.1100", "0.0000", "2", f"+0.0100 +- {allowed:.4f}", "within noise", "0.1 (1)",
        "1,234", "150.0 (1.50)", "code"]
    allowed = 4.30 * 0.1 * math.sqrt(1 + 1 / 3)  # c1 has one seed
    assert row_of(lines, "c1") == [
        "c1", "1.0000", "-", "1", f"-1.1000 +- {allowed:.4f}", "ahead", "0.2 (2)", "1,234",
        "100.0 (1.00)", "max_lr=0.2"]
    assert lines[9:] == ["| difference after step | 10 | 20 |", "| --- | --- | --- |",
                         "| c1 | -2.2000 | -1.1000 |", "| b1 | +0.0200 | +0.0100 |"]
    assert row_of(lines_of("c1", "*"), "a1")[5] == "behind"

def test_versions_of_an_experiment_are_rows_even_if_they_are_equal(tmp_path, lines_of):
    """The names of their folders tell the version and the factor of its learning rate."""
    for name in ("main_lr1_seed1", "main_lr1_seed2", "my_lr_idea_lr0.5_seed1"):
        write_run(tmp_path / name, 2.0)
    lines = lines_of("main*", "*")
    assert row_of(lines, "main")[3] == "2"
    assert row_of(lines, "my_lr_idea")[6] == "0.1 (0.5)"

def test_twenty_pairs_of_equal_versions_get_at_most_three_verdicts():
    """Two more pairs, which differ by six times the noise, get the right ones."""
    draw = np.random.RandomState(0).normal

    def verdict(difference):
        rows = [compare.Row(name, "1", CONSTANTS, [], {
            seed: {"val": {20: loss}} for seed, loss in enumerate(draw(mean, 0.01, 3))})
            for name, mean in (("main", 2.0), ("idea", 2.0 + difference))]
        return compare.compared(rows[1], rows[0])[1]
    verdicts = [verdict(0) for _ in range(20)]
    assert len(verdicts) - verdicts.count("within noise") <= 3
    assert [verdict(-0.06), verdict(0.06)] == ["ahead", "behind"]

def test_without_two_seeds_there_is_no_verdict(tmp_path, lines_of):
    write_run(tmp_path / "a1", 1.0)
    write_run(tmp_path / "b1", 2.0, max_lr=0.2)
    lines = lines_of("a1", "b1")
    assert row_of(lines, "b1")[4:6] == ["+1.0000", "none: one seed"]
    assert lines[6] == "ahead or behind (5 % of 0)."

@pytest.mark.parametrize("change, reason", [
    (dict(max_steps=5), "another length"), (dict(encoding="gpt2"), "another encoding"),
    (dict(val_tokens=64), "another val_tokens")])
def test_other_rows_do_not_change_the_noise_of_two_rows(tmp_path, lines_of, change, reason):
    """A row that is not comparable with the baseline gets no verdict."""
    for name, val, more in (("a1", 2.000, {}), ("a2", 2.002, {}), ("s1", 4.0, change),
                            ("s2", 3.0, change), ("t1", 2.0, dict(max_steps=10,
                                                                  total_batch_size=400))):
        write_run(tmp_path / name, val, **more)
    lines = lines_of("a*", "*")
    assert row_of(lines, "s1")[4:6] == ["+1.4990", f"none: {reason}"]
    allowed = 12.71 * 0.001 * math.sqrt(2) * math.sqrt(1 + 1 / 2)
    assert row_of(lines, "t1")[4:6] == [f"-0.0010 +- {allowed:.4f}", "within noise"]

def test_constants_comments_and_docstrings_are_not_code(tmp_path, lines_of):
    """Their values are in config.json. A run that other code has continued has both codes."""
    write_run(tmp_path / "a1", 2.0)
    same = CODE.replace("= 0.1", "= 0.2").replace("=20", "=9").replace("one more", "1")
    write_run(tmp_path / "a2", 2.0, code=same.replace("Return x", "Give x"))
    write_run(tmp_path / "b1", 2.0, later=[CODE.replace("x + 1", "x")])
    lines = lines_of("*")
    assert row_of(lines, "a1")[3] == "2"
    assert row_of(lines, "b1")[-1] == "code"

def test_folders_without_a_finished_run_are_left_out_with_the_reason(tmp_path, lines_of):
    write_run(tmp_path / "a1", 2.0)
    write_run(tmp_path / "b1", 2.0)  # the same run in another folder
    write_run(tmp_path / "c1", 2.0)
    (tmp_path / "c1" / "config.json").write_text('{"max_lr"')
    write_run(tmp_path / "d1", 2.0)
    (tmp_path / "d1" / "log.txt").write_text("0 val 9.0\n")
    write_run(tmp_path / "e1", 2.0)
    (tmp_path / "e1" / "train_gpt2_00000.py").unlink()
    for_b, for_c, for_d, for_e, *table = lines_of("*")
    assert for_b == "b1 is left out: it is the same run as seed 1 of a1."
    assert for_c.startswith("c1 is left out: it holds no run (")
    assert for_d == "d1 is left out: step 20 has not been validated."
    assert for_e == "e1 is left out: it holds no run (no copy of train_gpt2.py)."
    assert row_of(table, "a1")
    with pytest.raises(SystemExit, match=r"no finished run in d1 x\*"):
        lines_of("d1", "x*")
    assert lines_of("x*", "a*")[0] == "No folder matches x*."
