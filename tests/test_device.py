"""Devices and dtypes: what a GPU does, played on a CPU. test_gpu.py trains on GPUs."""
import ctypes
import math
import os
import re
import signal
from unittest import mock

import pytest
import torch
from conftest import TINY, Forked, device_type, load, read_log, succeed, write_text
from test_model import ids, small, stub_run

import train_gpt2 as t

def test_dtype_is_what_the_hardware_is_fast_in(monkeypatch):
    """V100 is 7.0 and T4 7.5; both emulate bfloat16 slowly, and torch says that it is there. For
    older ones Triton has no code."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(t.importlib.util, "find_spec", found := mock.Mock(return_value="triton"))
    for capability, dtype, compiled in (
            ((6, 1), torch.float16, False), ((7, 5), torch.float16, True),
            ((8, 0), torch.bfloat16, True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", mock.Mock(return_value=capability))
        assert t.pick_dtype("auto", gpu) == dtype and t.pick_compile("auto", gpu) == compiled
    found.return_value = None  # as on Windows
    assert not t.pick_compile("auto", gpu) and t.pick_compile("True", gpu)
    for capabilities, dtype in (({}, torch.float32), ({"amx_bf16": True}, torch.bfloat16)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)  # noqa: B023
        assert t.pick_dtype("auto", cpu) == dtype
    assert t.pick_dtype("float16", cpu) == torch.float16

def test_auto_is_the_fastest_device_that_processes_can_share(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ctypes, "CDLL", library := mock.Mock())
    assert t.pick_device("auto") == torch.device("mps")
    monkeypatch.setattr(t, "world_size", lambda: 2)
    assert t.pick_device("auto") == torch.device("cpu")  # where freed memory is kept
    assert [call.args for call in library().mallopt.mock_calls] == [(-4, 0), (-1, -1)]
    library.side_effect = OSError("libc.so.6: no such file")  # on macOS, say
    assert t.pick_device("cpu") == torch.device("cpu")

def play_gpus(monkeypatch, number, error=None):
    """So many, on which a first kernel runs or fails."""
    facts = dict(is_available=True, device_count=number, get_device_name="Old", set_device=None)
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, mock.Mock(return_value=value))
    monkeypatch.setattr(torch, "ones", mock.Mock(side_effect=error))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", mock.Mock())

def test_each_process_takes_its_gpu_and_tf32(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    play_gpus(monkeypatch, 4)
    assert t.pick_device("auto") == torch.device("cuda", 3)
    torch.cuda.set_device.assert_called_with(torch.device("cuda", 3))
    torch.set_float32_matmul_precision.assert_called_with("high")
    play_gpus(monkeypatch, 2)  # fewer than processes: NCCL would only say that it is invalid usage
    with pytest.raises(t.UserError, match=r"no cuda:3: torch sees 2 GPU.*--nproc_per_node"):
        t.pick_device("auto")

def test_a_gpu_that_torch_has_no_code_for_is_a_line(monkeypatch):
    """Each product would fail with "no kernel image", amid a traceback."""
    play_gpus(monkeypatch, 1)
    assert t.pick_device("cuda") == torch.device("cuda", 0)
    torch.ones.assert_called_once_with(1, device=torch.device("cuda", 0))
    play_gpus(monkeypatch, 1, torch.AcceleratorError("CUDA error: no kernel image\nFor debugging"))
    said = r"fails on Old \(CUDA error: no kernel image\)\. If .* install"
    with pytest.raises(t.UserError, match=said):
        t.pick_device("cuda")

def test_a_gpu_that_torch_does_not_see_is_told(tmp_path, monkeypatch, capsys):
    """With an old driver a night's run would be on the CPU, without a reason."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh")
    (tmp_path / "nvidia-smi").chmod(0o755)
    said = f"torch {re.escape(torch.__version__)} sees no GPU. Install a newer dr"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert t.pick_device("auto") == torch.device("cpu")
    assert re.match(f"!!! Training on the CPU: {said}", capsys.readouterr().out)
    with pytest.raises(t.UserError, match=f"device=cuda:0: {said}"):
        t.pick_device("cuda")
    says = "device=xla is unknown: use auto, cuda, cuda:1, mps or cpu"
    with pytest.raises(t.UserError, match=says):
        t.pick_device("xla")

@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_float16_step_that_overflowed_changes_no_weight(bad, optimizer):
    """Wherever it did: an optimizer whose own gradients are fine must not take the others' NaN.
    Losses are scaled up, all gradients down again; a resumed run knows by how much."""
    cfg = t.Config(optimizer=optimizer, B=4, T=32, total_batch_size=128, warmup_steps=0)
    exact = [x.item() for x in t.train_step(stub_run(small(), cfg, ids(T=33)))]
    run, seen = stub_run(small(), cfg, ids(T=33), float16=True), []
    state, weight = run.state, run.state.raw_model.transformer.h[0].attn.c_attn.weight
    hook = weight.register_hook(lambda grad: seen.append(grad.norm().item()))
    assert [x.item() for x in t.train_step(run)] == pytest.approx(exact, rel=1e-4)
    assert seen[0] > 100 and run.autocast().__enter__.called
    hook.remove()
    before = [p.clone() for p in state.raw_model.parameters()]
    hook = weight.register_hook(lambda grad: torch.full_like(grad, bad))
    t.train_step(run)
    assert all(map(torch.equal, before, state.raw_model.parameters()))
    assert state.scaler.get_scale() == 2**15
    again = stub_run(small(), cfg, ids(T=33), float16=True).state
    again.load_state_dict(state.state_dict())
    assert (again.scaler.get_scale(), again.step) == (2**15, 2)
    hook.remove()
    t.train_step(run)
    assert not any(map(torch.equal, before, state.raw_model.parameters()))

@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_each_dtype_needs(tmp_path, monkeypatch, dtype):
    """Muon's products overflow in float16; only its losses are scaled. On a CPU flash attention is
    slow in bfloat16 on short rows; on a GPU, cuDNN's drops out less than it is told to."""
    monkeypatch.setattr(t, "catch_signals", mock.Mock())
    monkeypatch.setattr(t.GPT, "compile", compiled := mock.Mock())
    monkeypatch.setattr(torch.backends.cuda, "enable_flash_sdp", flash := mock.Mock())
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", cudnn := mock.Mock())
    constants = TINY | dict(optimizer="muon", dtype=dtype, compile=dtype != "float32",
                            dropout=0.1 * (dtype == "float16"))
    cfg = t.Config(data=str(write_text(tmp_path)), log_dir=str(tmp_path / "log"), **constants)
    run = t.set_up(cfg, torch.device("cpu"))
    assert run.state.optimizers[1].dtype == getattr(torch, {"float16": "float32"}.get(dtype, dtype))
    assert run.state.scaler.is_enabled() == (dtype == "float16")
    assert compiled.called == (dtype != "float32")
    flash.assert_called_once_with(dtype != "bfloat16")  # T is 16
    cudnn.assert_called_once_with(dtype != "float16")
    t.set_attention(t.Config(), torch.device("cpu"), torch.bfloat16)
    flash.assert_called_with(True)
    with run.autocast():
        assert str(run.state.raw_model.lm_head(torch.ones(16)).dtype) == f"torch.{dtype}"
    run.folder.close()

def test_samples_do_without_gradients_and_cudnns_attention(monkeypatch):
    def forward(*args):
        seen.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.is_grad_enabled()))
        return real(*args)
    seen, real, model = [], t.GPT.forward, small()
    monkeypatch.setattr(t.GPT, "forward", forward)
    t.sample_text(model, t.get_encoding("bytes"), t.Config(sample_tokens=1), seed=1)
    model(ids())
    assert seen == [(False, False), (True, True)]

@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_training_in_each_dtype_is_near_the_exact_one(tmp_path, dtype):
    """With samples, and stopped on the way; in float16, losses are scaled. On a GPU the model is
    compiled in bfloat16."""
    compiled = device_type() == "cuda" and dtype == "bfloat16"
    write_text(tmp_path)
    exact = succeed(Forked(tmp_path / "exact"))
    for out in ("from step 0 on", "from step 13 on"):
        run = Forked(tmp_path / dtype, dtype=dtype, sample_every=10, compile=compiled,
                     arrange={"signal_at": (signal.SIGTERM, 12)})
        assert run.wait(300) == 0 and out in run.out, run.err
    a, b = read_log(exact.log_dir), read_log(run.log_dir)
    # Equal losses would mean that products are still computed in float32.
    assert a.keys() == b.keys() and 0 < max(abs(a[key] - b[key]) for key in a) < 0.05
    scaler = load(run.log_dir / "checkpoint_00030.pt")["state"]["scaler"]
    assert (dtype == "float16") == bool(scaler and scaler["scale"] > 0)
