"""Tests of bench.py guard: which figures are compared with the record, and when.

The tests supply all measurements, so nothing is timed.
"""
import re

import bench
import pytest
from conftest import TINY, write_text

import train_gpt2

STAT = """cpu  700 0 300 9000 50 0 0 0 0 0
cpu0 {0} 0 100 4000 25 0 0 0 {4} 0
cpu1 {1} 5 200 {2} {3} 1 2 3 90 0
cpu2 9999 0 0 0 0 0 0 0 0 0
intr 12345 0 0
"""

class FakeLoad:
    """A load on the machine, as a list of measurements. Each takes two seconds of a fake clock."""

    def __init__(self, *values):
        self.values, self.seconds = list(values), 0.0

    def in_use(self):
        """Return the next measurement. The last one is repeated."""
        self.seconds += 2
        return self.values.pop(0) if len(self.values) > 1 else self.values[0]

    def wait(self):
        return bench.wait_for_free_cores(self.in_use, lambda: self.seconds)

def test_a_run_is_set_up_as_in_the_script(tmp_path):
    with bench.training_run(**TINY | dict(data=str(write_text(tmp_path)), device="cpu",
                                          compile=False)) as run:
        assert run.cfg.n_layer == 1 and run.state.step == 0
        assert train_gpt2.train_step(run)[0] > 0

def test_guard_does_not_wait_if_cores_are_free(capsys):
    load = FakeLoad(0.1)
    assert bench.not_valid(load.wait()) == ""
    assert load.seconds == 2
    assert capsys.readouterr().out == ""

def test_guard_waits_for_the_end_of_a_load(capsys):
    """One line says what the script waits for. When the load has ended, the comparison is valid."""
    load = FakeLoad(1.0, 1.1, 0.9, 0.05)
    assert bench.not_valid(load.wait()) == ""
    assert load.seconds == 8
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("Other programs use 1.0 of ")

def test_a_load_that_does_not_end_makes_the_comparison_invalid(capsys):
    """After WAIT_SECONDS the wait ends, and a line says why the comparison is not valid."""
    load = FakeLoad(1.0)
    line = bench.not_valid(load.wait())
    assert bench.WAIT_SECONDS <= load.seconds <= bench.WAIT_SECONDS + 4
    assert re.fullmatch(r"This comparison is not valid: other programs use 1\.0 of .*\.", line)
    assert len(capsys.readouterr().out.splitlines()) == 1

def test_busy_cores_are_read_from_proc_stat():
    """Only the cores that the process may use are counted.

    Time spent waiting for a disk is idle time. Guest time is a part of user time, so it is not
    added again.
    """
    before = STAT.format(600, 800, 5000, 25, 40)
    # On core 0, 50 of 50 ticks were busy, 10 of them for a guest. On core 1, 0 of 50 were busy
    after = STAT.format(650, 800, 5030, 45, 50)
    assert bench.busy_between(before, after, [0, 1]) == pytest.approx(1.0)
    assert bench.busy_between(before, after, [0]) == pytest.approx(1.0)
    assert bench.busy_between(before, after, [1]) == pytest.approx(0.0)
    assert bench.busy_between(before, before, [0, 1]) is None  # counters that do not advance

def test_cores_are_measured_by_cpu_time_where_proc_stat_is_missing(monkeypatch):
    """The same holds if /proc/stat exists but its counters do not advance."""
    monkeypatch.setattr(bench, "cores_withheld", lambda seconds: 0.7)
    monkeypatch.setattr(bench, "busy_between", lambda *_: None)
    assert bench.cores_in_use(0.0) == 0.7
    monkeypatch.setattr(bench.Path, "exists", lambda path: False)
    monkeypatch.setattr(bench, "busy_between", lambda *_: 0.2)
    assert bench.cores_in_use(0.0) == 0.7

def test_cores_withheld_is_between_none_and_all_cores():
    assert -0.1 < bench.cores_withheld(0.01) < bench.CORES

@pytest.fixture
def guard(monkeypatch):
    """Return a function that runs guard() on two made-up figures and returns its lines.

    used: cores that other programs use. kind: the kind of CPU in the record, by default this one.
    step, memory: the figures in the record. only: a regex for the names of figures to measure.
    """
    monkeypatch.setattr(bench, "GUARD", [
        bench.Figure("a step: ours / a loop (ms)", 3, [lambda: 6.0, lambda: [3.0]]),
        bench.Figure("memory (GB)", 1, [lambda: 1.0], load_matters=False)])

    def run(used, kind=None, step=2.0, memory=1.0, only=""):
        monkeypatch.setattr(bench, "wait_for_free_cores", lambda: used)
        record = (f"Python 3; no GPU; {kind or bench.kind_of_cpu()}\n| figure | now |\n"
                  f"| a step: ours / a loop (ms) | {step} (4 / 2) | 7 | 1.00 |\n"
                  f"| memory (GB) | {memory} | 7 | 1.00 |\n")
        return list(bench.guard(re.compile(only), record))
    return run

def test_guard_compares_every_figure_while_the_cores_are_free(guard):
    lines = guard(used=0.0)
    assert "| a step: ours / a loop (ms) | 2 (6 / 3) | 2.0 | 1.00 |" in lines
    assert "| memory (GB) | 1 | 1.0 | 1.00 |" in lines
    assert lines[-2:] == ["\nFigures compared: 2 of 2.",
                          "More than 15 % worse than the record: none."]

def test_guard_names_figures_that_are_worse_than_the_record(guard):
    assert guard(used=0.0, step=1.7)[-1].endswith("record: a step: ours / a loop (ms).")
    assert guard(used=0.0, step=1.8)[-1].endswith("record: none.")

def test_under_load_guard_compares_only_figures_that_load_does_not_change(guard):
    """A slow step is then not reported as worse, but a larger peak memory is."""
    lines = guard(used=1.0, step=0.1, memory=0.5)
    assert lines[0].startswith("This comparison is not valid: other programs use 1.0 of ")
    assert "| a step: ours / a loop (ms) | 2 (6 / 3) | 0.1 | - |" in lines
    assert lines[-3:] == ["\nFigures compared: 1 of 2.",
                          "Not compared: a step: ours / a loop (ms).",
                          "More than 15 % worse than the record: memory (GB)."]

def test_guard_compares_nothing_with_a_record_of_another_kind_of_cpu(guard):
    lines = guard(used=0.0, kind="64 cores of a dream", step=0.1)
    assert lines[0].startswith("Nothing is compared: ")
    assert lines[-2] == "\nFigures compared: 0 of 2."

def test_a_figure_that_fails_does_not_end_guard(guard, monkeypatch):
    """A figure that takes too long counts as worse than any record.

    A figure that fails for another reason is not compared.
    """
    def fail(error):
        raise error
    for error, worse in ((TimeoutError("it took more than 9 s"), True), (KeyError("x"), False)):
        figure = bench.GUARD[0]._replace(sides=[lambda error=error: fail(error)])
        monkeypatch.setattr(bench, "GUARD", [figure, *bench.GUARD[1:]])
        lines = guard(used=0.0)
        assert any("| not measured: " in line for line in lines)
        assert ("a step" in lines[-1]) is worse
        assert any("memory (GB) | 1 |" in line for line in lines)

def test_the_record_in_the_repository_has_every_figure():
    """guard() finds a figure in guard.txt by its name, so both must have the same names."""
    record = bench.ROOT / "tests" / "measured" / "guard.txt"
    assert bench.recorded_figures(record.read_text()).keys() == {
        figure.name for figure in bench.GUARD}
