"""Tests of bench.py: it still runs, and a measurement that fails does not end it."""
import argparse

import bench
import pytest

def test_steps_are_timed_with_and_without_the_speed_ups(monkeypatch):
    attention = bench.t.F.scaled_dot_product_attention
    monkeypatch.setattr(bench.t.F, "scaled_dot_product_attention", attention)  # is put back
    size = dict(B=2, T=16, total_batch_size=32, n_layer=1, n_head=2, n_embd=16, dtype="float32",
                compile=False)
    for changes in ({}, dict(fused=False, logits=True, flash=False, padded=False)):
        ms, _, tokens, _ = bench.time_steps(**size | changes)
        assert tokens == pytest.approx(32 / ms * 1e3) and ms > 0

def test_a_row_that_fails_gives_the_reason(monkeypatch):
    def fail(script):
        raise RuntimeError("no vocabulary")
    monkeypatch.setattr(bench, "GUARD", {"a": (fail, 1), "b": (lambda script: 2.0, 3)})
    lines = list(bench.guard(argparse.Namespace(script=None, only="")))
    assert lines[1:] == ["| a | not measured: no vocabulary |", "| b | 2 |"]
