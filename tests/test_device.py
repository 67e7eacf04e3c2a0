"""Tests of how devices, dtypes and kernels are chosen, and of training in 16 bits.

These tests need no GPU: functions of torch.cuda are replaced. test_gpu.py trains on GPUs.
"""
import math
import re
import signal
from unittest import mock

import pytest
import torch
from conftest import (
    ROOT, Training, device_type, ids, load, read_log, signal_at, small, stub_run, succeed,
    write_text)

import train_gpt2 as t

def test_auto_selects_the_dtype_that_the_hardware_is_fast_in(monkeypatch):
    """GPUs below capability 8.0 use float16. A given dtype or compile=True is used unchanged.

    V100 (7.0) and T4 (7.5) only emulate bfloat16, although torch reports that they support it.
    """
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for capability, dtype in (((7, 5), torch.float16), ((8, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)  # noqa: B023
        assert t.pick_dtype("auto", gpu) == dtype
    for capabilities, dtype in (({}, torch.float32), ({"amx_bf16": True}, torch.bfloat16)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)  # noqa: B023
        assert t.pick_dtype("auto", cpu) == dtype
    assert t.pick_dtype("float16", cpu) == torch.float16
    for found in ("triton", None):  # Triton is missing on Windows
        monkeypatch.setattr(t.importlib.util, "find_spec", lambda _: found)  # noqa: B023
        assert t.pick_compile("auto", gpu) == bool(found) and t.pick_compile(True, gpu)
        assert not t.pick_compile("auto", cpu)

def test_each_process_uses_its_own_gpu_with_tf32(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen := mock.Mock())
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precision := mock.Mock())
    for name, index in (("auto", 3), ("cuda", 3), ("cuda:1", 1)):
        assert t.set_up_device(name) == torch.device("cuda", index)
        chosen.assert_called_with(torch.device("cuda", index))
        precision.assert_called_with("high")

@pytest.mark.parametrize("device, backend", [("cpu", "gloo"), ("cuda:3", "nccl")])
def test_processes_on_gpus_use_nccl(monkeypatch, device, backend):
    """They wait for an hour, since the others wait while rank 0 exports."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("sys.argv", ["train_gpt2.py", f"--data={ROOT / 'input.txt'}"])
    monkeypatch.setattr(t, "set_up_device", lambda name: torch.device(device))
    monkeypatch.setattr(t.dist, "init_process_group", init := mock.Mock(side_effect=KeyError))
    with pytest.raises(KeyError):
        t.main()
    assert init.call_args.args == (backend,)
    assert init.call_args.kwargs["timeout"].total_seconds() >= 3600

def test_a_gpu_that_torch_does_not_see_is_reported(monkeypatch, capsys):
    """If nvidia-smi is installed, a line says why the CPU is used. device=cuda is refused."""
    said = f"torch {re.escape(torch.__version__)} sees no GPU: install the bu"
    monkeypatch.setattr(t.shutil, "which", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert t.set_up_device("auto") == torch.device("cpu")
    assert re.match(f"!!! Training on the CPU: {said}", capsys.readouterr().out)
    with pytest.raises(t.UserError, match=f"device=cuda:0: {said}"):
        t.set_up_device("cuda")

@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_float16_step_that_overflowed_changes_no_weight(bad, optimizer):
    """If any gradient overflows in float16, no optimizer changes its weights in this step.

    Losses are scaled up, and all gradients are scaled down again. A resumed run continues with the
    same scale.
    """
    cfg = t.Config(optimizer=optimizer, B=4, T=32, total_batch_size=128, warmup_steps=0)
    exact = t.train_step(stub_run(small(), cfg, ids(T=33)))
    run, seen = stub_run(small(), cfg, ids(T=33), float16=True), []
    weight = run.model.transformer.h[0].attn.c_attn.weight
    hook = weight.register_hook(lambda grad: seen.append(grad.norm().item()))
    assert t.train_step(run) == pytest.approx(exact, rel=1e-4)
    assert seen[0] > 100
    hook.remove()
    before = [p.clone() for p in run.model.parameters()]
    hook = weight.register_hook(lambda grad: torch.full_like(grad, bad))
    t.train_step(run)
    assert all(map(torch.equal, before, run.model.parameters()))
    assert run.scaler.get_scale() == 2**15
    again = stub_run(small(), cfg, ids(T=33), float16=True)
    t.restore(again, t.checkpoint_of(run))
    assert (again.scaler.get_scale(), again.step) == (2**15, 2)
    hook.remove()
    t.train_step(run)
    assert not any(map(torch.equal, before, run.model.parameters()))

@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_run_in_each_dtype_is_close_to_one_in_float32(tmp_path, dtype):
    """The losses of a run in 16 bits are close to those in float32, but not equal to them.

    The run prints samples, is stopped, and continues. On a GPU the model is compiled in bfloat16.
    """
    compiled = device_type() == "cuda" and dtype == "bfloat16"
    write_text(tmp_path)
    exact = succeed(Training(tmp_path / "exact"))
    for out in ("from step 0 on", "from step 13 on"):
        # transformers is not hidden, because the compiler looks into every imported module
        run = Training(tmp_path / dtype, dtype=dtype, sample_every=10, compile=compiled,
                     hide=["matplotlib"], arrange=[(signal_at, signal.SIGTERM, 12)])
        assert run.wait() == 0 and out in run.out, run.err
    a, b = read_log(exact.log_dir), read_log(run.log_dir)
    a, b = ({key: log[key] for key in log if key[1] != "norm"} for log in (a, b))
    # Equal losses would mean that matrices are still multiplied in float32
    assert a.keys() == b.keys() and 0 < max(abs(a[key] - b[key]) for key in a) < 0.05
    scaler = load(run.log_dir / "checkpoint_00030.pt")["scaler"]
    assert (dtype == "float16") == bool(scaler and scaler["scale"] > 0)
