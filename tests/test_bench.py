"""Tests of bench.py: it still runs, and a measurement that fails does not end it."""
import argparse

import bench

SIZE = dict(B=2, T=16, total_batch_size=32, encoding="bytes", n_layer=1, n_head=2, n_embd=16,
            dtype="float32", compile=False)

def test_steps_are_timed_with_and_without_the_speed_ups():
    for changes in ({}, dict(fused=False, logits=True)):
        ms, _ = bench.time_steps(**SIZE, **changes)
        assert ms > 0

def test_a_row_that_fails_gives_the_reason(monkeypatch):
    def fail(script):
        raise RuntimeError("no vocabulary")
    monkeypatch.setattr(bench, "GUARD", {"a": (fail, 1), "b": (lambda script: 2.0, 3)})
    lines = list(bench.guard(argparse.Namespace(script=None, only="")))
    assert lines[1:] == ["| a | not measured: no vocabulary |", "| b | 2 |"]
