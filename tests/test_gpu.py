"""Tests of training on GPUs.

    pytest tests --device=cuda

A test that needs more GPUs than there are is skipped. How often a model is compiled is tested on
any device.
"""
import signal
import warnings

import pytest
import torch
from conftest import (
    TINY, Training, ask_four_questions, assert_close_logs, read_log, signal_on_rank, succeed,
    train)

GPU = pytest.mark.skipif(TINY["device"] != "cuda", reason="needs --device=cuda")

def forbid_waits(t, first_step):
    """Let train_step() and validation_loss() fail if they wait for the GPU more than once.

    The wait that is allowed is the one for their results, in Tensor.tolist() or Tensor.item().
    """
    warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
    set_mode, modes, waits = torch.cuda.set_sync_debug_mode, ["default"], []

    def forbid(run, real):
        waits.clear()
        modes.append("error" if run.step >= first_step else "default")
        set_mode(modes[-1])
        result = real(run)
        modes.pop()
        set_mode("default")
        assert len(waits) == 1, waits
        return result

    def wait(tensor, real):
        set_mode("default")
        value = real(tensor)
        set_mode(modes[-1])
        waits.extend([real] * tensor.is_cuda)
        return value
    for owner, name, around in ((t, "train_step", forbid), (t, "validation_loss", forbid),
                                (torch.Tensor, "tolist", wait), (torch.Tensor, "item", wait)):
        setattr(owner, name, lambda x, around=around, real=getattr(owner, name): around(x, real))

@GPU
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_and_a_validation_wait_for_the_gpu_only_once(place, n, optimizer, dtype):
    """A step of 8 micro-steps, or 4 on each of two GPUs, waits only for its loss and norm.

    In the first two steps, other waits are allowed, since DDP builds its buckets.
    """
    train(n, place / f"waits {n} {optimizer} {dtype}", optimizer=optimizer, dtype=dtype,
          arrange=[(forbid_waits, 2)], B=1, max_steps=6, eval_every=3)

def count_graphs(t, path):
    """Write a line to `path` for each graph that torch.compile makes, and run the graph eagerly."""
    def backend(graph, inputs):
        with open(path, "a") as file:
            print(len(inputs), file=file)
        return graph.forward
    t.GPT.compile = lambda model: torch.nn.Module.compile(model, backend=backend)

def test_a_run_compiles_once_for_training_and_once_for_validation(place):
    """HellaSwag and samples compile nothing, and a compiled run has the losses of an eager one.

    This also holds if the last batch of a validation is shorter than the others.
    """
    words = dict(hellaswag_every=4, sample_every=4, sample_tokens=12, eval_every=4, max_steps=12,
                 B=2, val_tokens=1024 + 16)
    path = place / "graphs"
    plain = succeed(Training(place / "plain", **words, arrange=[(ask_four_questions,)]))
    run = Training(place / "compiled", compile=True, **words, hide=["matplotlib"],
                 arrange=[(ask_four_questions,), (count_graphs, path)])
    assert run.wait() == 0, run.err  # (with Python 3.13.0, torch.compile prints a warning)
    assert "compile=True" in run.out and run.out.count("--- sample at step ") == 3
    assert len(path.read_text().splitlines()) == 2
    assert_close_logs(plain.log_dir, run.log_dir)

@GPU
def test_two_gpus_have_the_losses_and_scores_of_one(place):
    """This also holds if the second GPU has no rows to validate."""
    words = dict(hellaswag_every=4, eval_every=4, max_steps=12, B=2, val_tokens=16,
                 arrange=[(ask_four_questions,)])
    one, two = (train(n, place / f"hellaswag {n}", **words) for n in (1, 2))
    assert_close_logs(one.log_dir, two.log_dir)
    assert {step for step, metric in read_log(two.log_dir) if metric == "hella"} == {0, 4, 8, 12}

@GPU
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_that_moves_from_eight_gpus_to_four_has_the_losses_of_one(place, optimizer):
    """SIGTERM to one of eight processes stops them all. Four processes continue the run."""
    words = dict(optimizer=optimizer, max_steps=20, B=1)
    one = succeed(Training(place / f"one {optimizer}", **words))
    several = place / f"eight and four {optimizer}"
    run = train(8, several, arrange=[(signal_on_rank, 3, signal.SIGTERM, 8)], **words)
    assert "8 x cuda" in run.out and "Stopped by a signal at step 9" in run.out
    run = train(4, several, **words)
    assert "4 x cuda" in run.out and "from step 9 on" in run.out
    assert_close_logs(one.log_dir, several)

@GPU
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_run_in_16_bits_is_exported_from_the_gpu(place, dtype):
    """It is also exported if it only evaluates."""
    for steps in (0, 3):
        run = succeed(Training(place / f"{dtype} {steps}", max_steps=steps, dtype=dtype,
                             hide=["matplotlib"]))
        assert f"exported {run.log_dir}/checkpoint_0000{steps}.pt to" in run.out
