"""Tests of compare.py: which runs form a row, what counts as noise, and what the table shows."""
import json
import math

import compare
import pytest

CONSTANTS = {"max_lr": 0.1, "max_steps": 20, "encoding": "bytes"}
SHORT = {"max_steps": 5, "tokens": 1000}

def write_run(folder, val, *, codes=(1,), warnings=None, tokens=4000, **constants):
    """Write the folder of a finished run. Its seed is the last digit of the folder's name."""
    folder.mkdir()
    constants = CONSTANTS | {"seed": int(folder.name[-1]), "log_dir": str(folder)} | constants
    result = {"val": val, "bits_per_byte": 2 * val, "parameters": 7, "tokens": tokens,
              "steps": constants["max_steps"]}
    if warnings:  # results of older runs lack this key
        result["warnings"] = warnings
    (folder / "run.json").write_text(json.dumps({
        "constants": constants, "data": "a text", "starts": [{"code": code} for code in codes],
        "result": result}))
    (folder / "log.txt").write_text("0 val 9.0\n10 val 3.0\n10 minutes 1\n20 val 2.5\n")

def write_unfinished_run(folder, result):
    """Write the folder of a run with this result, which is not that of a finished run."""
    write_run(folder, 2.0)
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"result": result}))

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
    for name, val, more in (
            ("a1", 2.0, {}), ("a2", 2.2, {}), ("a3", 2.1, {}), ("b1", 2.11, dict(codes=[2])),
            ("b2", 2.11, dict(codes=[2])), ("c1", 1.0, dict(max_lr=0.2))):
        write_run(tmp_path / name, val, **more)
    lines = lines_of("a?", "*")
    assert [line.split()[1] for line in lines[2:5]] == ["1.0000", "2.1000", "2.1100"]
    # The deviations are 0.1, 0 and 0.1 in one row, and 0 and 0 in another. The rows have 2 + 1
    # degrees of freedom, for which t is 3.18
    spread = math.sqrt(0.02 / 3)
    assert f"noise of a run is {spread:.4f}, pooled over 3 row(s)" in lines[-1]
    assert "with 3 degrees of freedom" in lines[-1]
    assert row_of(lines, "a1") == (
        "| 2.1000 | 4.2000 | 0.1000 | 3 | the baseline | 20 | 7 | a1: - |")
    allowed = 3.18 * spread * math.sqrt(1 / 2 + 1 / 3)
    assert row_of(lines, "b1") == (
        f"| 2.1100 | 4.2200 | 0.0000 | 2 | -0.0100 +- {allowed:.4f}: within noise | 20 | 7 | "
        "b1: code='00000002' |")
    allowed = 3.18 * spread * math.sqrt(1 + 1 / 3)
    assert row_of(lines, "c1") == (
        f"| 1.0000 | 2.0000 | - | 1 | +1.1000 +- {allowed:.4f}: ahead | 20 | 7 | "
        "c1: max_lr=0.2 |")
    assert ": behind |" in row_of(lines_of("c1", "*"), "a1")
    if compare.importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "compare.png").stat().st_size > 10_000

def test_without_two_seeds_there_is_no_verdict(tmp_path, lines_of):
    write_run(tmp_path / "a1", 1.0)
    write_run(tmp_path / "b1", 2.0, codes=[2])
    lines = lines_of("a1", "b1")
    assert "| -1.0000, no verdict: one seed |" in row_of(lines, "b1")
    assert lines[-1].startswith("No row comparable with the baseline has two seeds")

def test_rows_of_another_length_do_not_change_the_noise(tmp_path, lines_of):
    """Short runs vary more between seeds. They are shown, but without a verdict."""
    for name, val, more in (
            ("a1", 2.000, {}), ("a2", 2.002, {}), ("b1", 1.9, dict(max_lr=0.2)),
            ("s1", 4.0, SHORT), ("s2", 3.0, SHORT)):
        write_run(tmp_path / name, val, **more)
    lines = lines_of("a*", "*")
    assert f"noise of a run is {0.001 * math.sqrt(2):.4f}, pooled over 2 row(s)" in lines[-2]
    assert "with 1 degrees of freedom" in lines[-2]
    assert ": ahead |" in row_of(lines, "b1")
    assert "| -1.4990, no verdict: another length |" in row_of(lines, "s1")
    assert lines[-1] == (
        "Left out of the noise, and without a verdict: s1 (another length).")
    lines = lines_of("s*", "*")  # the same runs, with the short ones as the baseline
    assert f"noise of a run is {math.sqrt(0.5):.4f}, pooled over 1 row(s)" in lines[-2]
    assert lines[-1].endswith(": a1 (another length), b1 (another length).")

@pytest.mark.parametrize("baseline, other", [
    (dict(), dict(tokens=2000)),  # equal steps
    (dict(), dict(max_steps=10)),  # equal tokens
    (dict(minutes=5.0), dict(minutes=5.0, max_steps=17, tokens=3400))])
def test_equal_steps_tokens_or_minutes_are_an_equal_length(tmp_path, lines_of, baseline, other):
    """Rows get a verdict if one of the three is equal."""
    write_run(tmp_path / "a1", 2.0, **baseline)
    write_run(tmp_path / "a2", 3.0, **baseline)
    write_run(tmp_path / "b1", 2.0, codes=[2], **other)
    assert "within noise" in row_of(lines_of("a*", "b*"), "b1")

def test_minutes_decide_the_length_of_a_row_and_steps_may_differ(tmp_path, lines_of):
    """Runs with the same --minutes form a row even if they took different numbers of steps."""
    for name, minutes, steps in (("a1", 5.0, 10), ("a2", 5.0, 12), ("b1", 6.0, 14)):
        write_run(tmp_path / name, 4.0, minutes=minutes, max_steps=steps, tokens=200 * steps)
    lines = lines_of("*")
    assert row_of(lines, "a1") == (
        "| 4.0000 | 8.0000 | 0.0000 | 2 | the baseline | 11 | 7 | a1: - |")
    assert "no verdict: another length" in row_of(lines, "b1")

def test_losses_of_another_encoding_get_no_verdict(tmp_path, lines_of):
    write_run(tmp_path / "a1", 2.0)
    write_run(tmp_path / "a2", 2.0)
    write_run(tmp_path / "b1", 3.0, encoding="gpt2")
    lines = lines_of("*")
    assert "no verdict: another encoding" in row_of(lines, "b1")
    assert lines[0].startswith("| val, nats per token (bytes: per byte) |")
    assert lines_of("a*")[0].startswith("| val, nats per byte |")
    assert lines_of("b*")[0].startswith("| val, nats per token |")

def test_losses_on_other_validation_tokens_get_no_verdict(tmp_path, lines_of):
    for name, val_tokens in (("a1", 4096), ("a2", 4096), ("b1", 512)):
        write_run(tmp_path / name, 2.0, val_tokens=val_tokens)
    assert "no verdict: another val_tokens" in row_of(lines_of("*"), "b1")

def test_the_figure_names_the_unit_of_the_loss(tmp_path, lines_of):
    pytest.importorskip("matplotlib")
    write_run(tmp_path / "a1", 2.0)
    compare.draw(compare.read_rows([str(tmp_path / "a1")]), tmp_path / "x.svg")
    write_run(tmp_path / "b1", 3.0, encoding="gpt2")
    compare.draw(compare.read_rows([str(tmp_path / "b1")]), tmp_path / "y.svg")
    # An .svg file repeats each text in a comment
    assert "validation loss, nats per byte" in (tmp_path / "x.svg").read_text()
    assert "validation loss, nats per token" in (tmp_path / "y.svg").read_text()

def test_two_runs_are_the_same_only_if_seed_constants_and_code_agree(tmp_path, lines_of):
    """A repeated run does not count as another seed. A line says that it is left out."""
    write_run(tmp_path / "a1", 2.0)
    write_run(tmp_path / "b1", 2.0)                    # the same run in another folder
    write_run(tmp_path / "c1", 2.0, codes=[2])         # other code
    write_run(tmp_path / "d1", 2.0, max_lr=0.2)        # another constant
    write_run(tmp_path / "e2", 2.0)                    # another seed
    lines = lines_of("*")
    assert [line for line in lines if "left out:" in line] == [
        "b1 is left out: a1 is the same run (seed, constants, data and code agree)."]
    assert "| 2 | the baseline |" in row_of(lines, "a1")
    assert row_of(lines, "c1").endswith("c1: code='00000002' |")
    assert row_of(lines, "d1").endswith("d1: max_lr=0.2 |")

def test_a_run_that_other_code_continued_names_both_codes_in_order(tmp_path, lines_of):
    write_run(tmp_path / "a1", 2.0)
    write_run(tmp_path / "b1", 2.1, codes=[2, 1, 1])
    write_run(tmp_path / "c1", 2.2, codes=[1, 2])
    lines = lines_of("*")
    assert row_of(lines, "b1").endswith("b1: code='00000002+00000001' |")
    assert row_of(lines, "c1").endswith("c1: code='00000001+00000002' |")

def test_warnings_of_a_result_are_shown_once_for_each_row(tmp_path, lines_of):
    """The row has a mark, and the text follows below the table. Older results have no warnings."""
    write_run(tmp_path / "a1", 2.0)
    for seed, gap in ((1, "+0.012"), (2, "-3.4e-05")):
        write_run(tmp_path / f"z{seed}", 1.8, codes=[2],
                  warnings=[f"val is {gap} from the cross-entropy", "x changed its length"])
    write_run(tmp_path / "z3", 1.8, codes=[2])
    lines = lines_of("*")
    assert row_of(lines, "z1").endswith("code='00000002' (!) |")
    assert "(!)" not in row_of(lines, "a1")
    assert [line for line in lines if line.startswith("(!)")] == [
        "(!) z1 (2 of 3 runs): val is +0.012 from the cross-entropy",
        "(!) z1 (2 of 3 runs): x changed its length"]

def test_folders_without_a_result_are_left_out_with_the_reason(tmp_path, lines_of):
    write_run(tmp_path / "a1", 2.0)
    write_unfinished_run(tmp_path / "d1", {"failed": "Step 3 has loss nan"})
    write_run(tmp_path / "e1", 2.0)
    (tmp_path / "e1" / "run.json").write_text('{"constants"')
    write_unfinished_run(tmp_path / "f1", None)
    for_d, for_e, for_f, *table = lines_of("*")
    assert for_d == "d1 is left out: the run failed: Step 3 has loss nan."
    assert for_e.startswith("e1 is left out: it holds no run (")
    assert for_f == "f1 is left out: the run has no result yet."
    assert row_of(table, "a1") and len(table) == 5
    with pytest.raises(SystemExit, match=r"no finished run in f1 x\*"):
        lines_of("f1", "x*")

def test_a_pattern_without_a_match_is_reported(tmp_path, lines_of):
    """A line names the pattern, because without it another row would become the baseline."""
    write_run(tmp_path / "a1", 2.0)
    assert lines_of("b*", "a*")[0] == "No folder matches b*."

def test_a_run_that_was_only_evaluated_is_shown(tmp_path, lines_of):
    write_run(tmp_path / "a1", 5.0, max_steps=0)
    assert "| the baseline | 0 | 7 | a1: - |" in row_of(lines_of("a1"), "a1")
