"""Tests of training on GPUs.

    pytest tests --device=cuda

A test that needs more GPUs than there are is skipped. How often a model is compiled is tested on
any device.
"""
import re
import signal
import warnings
from pathlib import Path

import pytest
import torch
from conftest import (
    ROOT, TINY, Forked, ask_four_questions, assert_close_logs, read_log, signal_at, signal_on_rank,
    succeed, train, write_text)

GPU = pytest.mark.skipif(TINY["device"] != "cuda", reason="needs --device=cuda")

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the text that all runs train on."""
    folder = tmp_path_factory.mktemp("gpu")
    write_text(folder)
    return folder

def forbid_waits(t, first_step):
    """Let train_step() and validation_loss() fail if they wait for the GPU more than once.

    The wait that is allowed is the one for their results, in Tensor.tolist() or Tensor.item().
    """
    warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
    mode, waits = "default", []

    def set_mode(value):
        nonlocal mode
        mode = value
        torch.cuda.set_sync_debug_mode(mode)

    def forbid(name):
        real = getattr(t, name)

        def function(run):
            waits.clear()
            set_mode("error" if run.step >= first_step else "default")
            result = real(run)
            set_mode("default")
            assert len(waits) == 1, waits
            return result
        setattr(t, name, function)

    def note(name):
        real = getattr(torch.Tensor, name)

        def wait(tensor):
            if tensor.is_cuda:
                waits.append(name)
            torch.cuda.set_sync_debug_mode("default")
            value = real(tensor)
            torch.cuda.set_sync_debug_mode(mode)
            return value
        setattr(torch.Tensor, name, wait)
    forbid("train_step"), forbid("validation_loss"), note("tolist"), note("item")

@GPU
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_and_a_validation_wait_for_the_gpu_only_once(folder, n, optimizer, dtype):
    """A step of 8 micro-steps, or 4 on each of two GPUs, waits only for its loss and norm.

    In the first two steps, other waits are allowed, since DDP builds its buckets.
    """
    train(n, folder / f"waits {n} {optimizer} {dtype}", optimizer=optimizer, dtype=dtype,
          arrange=[(forbid_waits, 2)], B=1, max_steps=6, eval_every=3)

def count_graphs(t, path):
    """Write a line to `path` for each graph that torch.compile makes, and run the graph eagerly."""
    def backend(graph, inputs):
        with open(path, "a") as file:
            print(len(inputs), file=file)
        return graph.forward
    t.GPT.compile = lambda model: torch.nn.Module.compile(model, backend=backend)

def test_a_run_compiles_once_for_training_and_once_for_validation(folder):
    """HellaSwag and samples compile nothing, and a compiled run has the losses of an eager one.

    This also holds if the last batch of a validation is shorter than the others.
    """
    words = dict(hellaswag_every=4, sample_every=4, sample_tokens=12, eval_every=4, max_steps=12,
                 B=2, val_tokens=1024 + 16)
    path = folder / "graphs"
    plain = succeed(Forked(folder / "plain", **words, arrange=[(ask_four_questions,)]))
    run = Forked(folder / "compiled", compile=True, **words, hide=["matplotlib"],
                 arrange=[(ask_four_questions,), (count_graphs, path)])
    assert run.wait() == 0, run.err  # (with Python 3.13.0, torch.compile prints a warning)
    assert "compile=True" in run.out and run.out.count("--- sample at step ") == 3
    assert len(path.read_text().splitlines()) == 2
    assert_close_logs(plain.log_dir, run.log_dir)

@GPU
def test_the_quick_start_has_the_same_losses_on_a_gpu_and_a_cpu(folder):
    """The preset SMALL trains the same model on both devices."""
    short = dict(max_steps=12, eval_every=6, val_tokens=8192, sample_every=0, dtype="float32",
                 data=ROOT / "input.txt")
    # No other flags, so that SMALL is used
    cpu, gpu = (Forked(None, log_dir=folder / device, device=device, without=TINY, **short)
                for device in ("cpu", "cuda"))
    succeed(cpu), succeed(gpu)
    assert "settings  SMALL" in gpu.out
    assert re.search(r"1 x cuda \(.*\), torch .*, torch.float32, ", gpu.out)
    assert_close_logs(folder / "cpu", folder / "cuda")

@GPU
def test_a_run_moves_between_a_gpu_and_the_cpu(folder):
    """A run that is stopped on one device continues on the other from the same checkpoint.

    Its losses are those of a run that was never stopped.
    """
    whole = succeed(Forked(folder / "whole", optimizer="muon"))
    for device, step in (("cuda", 7), ("cpu", 19), ("cuda", 99)):
        run = succeed(Forked(folder / "moved", optimizer="muon", device=device,
                             arrange=[(signal_at, signal.SIGTERM, step)]))
        assert f"1 x {device}" in run.out
    assert_close_logs(whole.log_dir, run.log_dir)

@GPU
def test_two_gpus_have_the_losses_and_scores_of_one(folder):
    """This also holds if the second GPU has no rows to validate."""
    words = dict(hellaswag_every=4, eval_every=4, max_steps=12, B=2, val_tokens=16,
                 arrange=[(ask_four_questions,)])
    one, two = (train(n, folder / f"hellaswag {n}", **words) for n in (1, 2))
    assert_close_logs(one.log_dir, two.log_dir)
    assert {step for step, metric in read_log(two.log_dir) if metric == "hella"} == {0, 4, 8, 12}

@GPU
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_that_moves_from_eight_gpus_to_four_has_the_losses_of_one(folder, optimizer):
    """SIGTERM to one of eight processes stops them all. Four processes continue the run."""
    words = dict(optimizer=optimizer, max_steps=20, B=1)
    one = succeed(Forked(folder / f"one {optimizer}", **words))
    several = folder / f"eight and four {optimizer}"
    run = train(8, several, arrange=[(signal_on_rank, 3, signal.SIGTERM, 8)], **words)
    assert "8 x cuda" in run.out and "Stopped by a signal at step 9" in run.out
    run = train(4, several, **words)
    assert "4 x cuda" in run.out and "from step 9 on" in run.out
    assert_close_logs(one.log_dir, several)

def note_device(t, path):
    """Write the type of device of the weights to `path` when a text is sampled."""
    real = t.GPT.generate

    def generate(self, *args, **words):
        Path(path).write_text(next(self.parameters()).device.type)
        return real(self, *args, **words)
    t.GPT.generate = generate

@GPU
def test_sampling_without_training_uses_the_gpu(folder):
    """With --sample, the weights are moved to the chosen device."""
    log_dir = succeed(Forked(folder / "sampled", max_steps=2)).log_dir
    run = succeed(Forked(log_dir, sample=1, sample_tokens=5, arrange=[
        (note_device, folder / "device of samples")]))
    assert "Samples from" in run.out and (folder / "device of samples").read_text() == "cuda"

@GPU
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_run_in_16_bits_is_exported_from_the_gpu(folder, dtype):
    """It is also exported if it only evaluates."""
    for steps in (0, 3):
        run = succeed(Forked(folder / f"{dtype} {steps}", max_steps=steps, dtype=dtype,
                             hide=["matplotlib"]))
        assert f"exported {run.log_dir}/checkpoint_0000{steps}.pt to" in run.out
