"""Devices and dtypes: what a GPU does, played on a CPU; and real GPUs where there are."""
import math
import signal
import subprocess
from unittest import mock

import pytest
import torch
from conftest import (
    ENV, Forked, assert_close_logs, flags, load, read_log, succeed, torchrun, write_text)
from test_model import ids, small, stub_run

import hellaswag
import train_gpt2 as t

ONE_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")
DEVICES = ("cpu", pytest.param("cuda", marks=ONE_GPU))
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs here")


def test_dtype_is_what_the_hardware_is_fast_in(monkeypatch):
    """V100 is 7.0 and T4 7.5; both emulate bfloat16 slowly, and torch says that it is there."""
    for capability, dtype in (((7, 5), torch.float16), ((8, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", mock.Mock(return_value=capability))
        assert t.pick_dtype("auto", torch.device("cuda")) == dtype
    assert t.pick_dtype("auto", torch.device("cpu")) == torch.float32
    assert t.pick_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16


@pytest.mark.parametrize("name, tflops", [
    ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756),
    ("NVIDIA H200", 989), ("NVIDIA B200", 2250), ("NVIDIA GeForce RTX 4090", 165),
    ("Tesla V100-SXM2-16GB", 125), ("Tesla T4", 65), ("NVIDIA T400", 0)])
def test_peak_of_each_gpu(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert t.peak_flops(torch.device("cuda")) == tflops * 1e12


def test_each_process_takes_its_gpu_and_tf32(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", mock.Mock())
    monkeypatch.setattr(torch.cuda, "set_device", mock.Mock())
    assert t.pick_device("auto") == torch.device("cuda", 3)
    torch.cuda.set_device.assert_called_with(torch.device("cuda", 3))
    torch.set_float32_matmul_precision.assert_called_with("high")


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_float16_step_that_overflowed_changes_no_weight(bad, optimizer):
    """Wherever it did: an optimizer whose own gradients are fine must not take the others' NaN."""
    model = small()
    cfg = t.Config(optimizer=optimizer, B=4, T=32, total_batch_size=128, warmup_steps=0)
    run = stub_run(model, cfg, ids(T=33), float16=True)
    t.train_step(run)
    before = [p.clone() for p in model.parameters()]
    weight = model.transformer.h[0].attn.c_attn.weight
    hook = weight.register_hook(lambda grad: torch.full_like(grad, bad))
    t.train_step(run)
    assert all(map(torch.equal, before, model.parameters()))
    hook.remove()
    t.train_step(run)
    assert not any(map(torch.equal, before, model.parameters()))


def test_samples_and_scores_do_without_cudnns_attention(monkeypatch):
    """It makes a plan for each of their many shapes; training, which has one, may take it."""
    def hidden(*args):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return real(*args)
    seen, real, model = [], t.GPT.hidden, small()
    monkeypatch.setattr(t.GPT, "hidden", hidden)
    question = dict(ctx="a", endings=["b", "cd", "e", "f"], label=0)
    t.sample_text(model, t.get_encoding("bytes"), t.Config(sample_tokens=1), seed=1)
    hellaswag.evaluate(model, hellaswag.prepare([question], model, lambda text: [*text.encode()]))
    model(ids())
    assert seen == [False, False, True]


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_the_loss_are_exact_with_gpt2s_vocabulary(device):
    """In bfloat16, each log-probability, about -10.8, would be rounded to multiples of 1/16: the
    softmax part of the logits' gradient wrong by 1 to 3 %. What is left is its own rounding."""
    model, seen = small(vocab_size=50304, n_vocab=50257).to(device), []
    idx, targets = ids().to(device), ids(seed=1).to(device)

    def look(module, args, output):
        output.register_hook(lambda grad: seen.extend((output.detach(), grad)))
    model.lm_head.register_forward_hook(look)
    with torch.autocast(device, torch.bfloat16):
        loss = model(idx, targets, return_logits=False)[1]
    loss.backward()
    logits, grad = (x.flatten(0, 1)[:, :50257].double() for x in seen)
    exact = logits.softmax(1) / len(logits)
    for x in (exact, grad):
        x.scatter_(1, targets.view(-1, 1), 0)
    assert seen[0].dtype == torch.bfloat16
    assert (grad - exact).norm() < 0.004 * exact.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_training_in_each_dtype_is_near_the_exact_one(tmp_path, device, dtype):
    """With samples, and stopped on the way; in float16, losses are scaled."""
    write_text(tmp_path)
    exact = succeed(Forked(tmp_path / "exact"))
    for out in ("from step 0 on", "from step 13 on"):
        run = Forked(tmp_path / dtype, device=device, dtype=dtype, sample_every=10,
                     compile=device == "cuda" and dtype == "bfloat16",
                     arrange={"signal_at": (signal.SIGTERM, 12)})
        assert run.wait(600) == 0 and out in run.out, run.err
    a, b = read_log(exact.log_dir), read_log(run.log_dir)
    assert a.keys() == b.keys() and max(abs(a[key] - b[key]) for key in a) < 0.05
    scaler = load(run.log_dir / "checkpoint_00030.pt")["scaler"]
    assert (dtype == "float16") == bool(scaler and scaler["scale"] > 0)


@TWO_GPUS
def test_two_gpus_equal_one(tmp_path):
    write_text(tmp_path)
    exact = dict(device="cuda", dtype="float32", compile="False")
    one = succeed(Forked(tmp_path / "one gpu", **exact))
    command = torchrun("--standalone", "--nproc_per_node=2")
    subprocess.run([*command, *flags(tmp_path / "two gpus", **exact)], env=ENV, check=True)
    assert_close_logs(one.log_dir, tmp_path / "two gpus")
