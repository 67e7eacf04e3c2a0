"""Devices, dtypes, compilation: what a GPU does, played on a CPU; and real GPUs where there are."""
import pytest
import torch
from conftest import (
    Forked,
    assert_close_logs,
    load,
    one_line,
    read_log,
    succeed,
    torchrun,
    write_text,
)

import train_gpt2 as t

ONE_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("device")
    write_text(folder)
    return folder


# --------------------------------------------------------------------------- played on a CPU
@pytest.mark.parametrize("capability, optimizer, dtype", [
    ((7, 0), "adamw", torch.float16), ((7, 5), "adamw", torch.float16),
    ((7, 0), "muon", torch.float32), ((8, 0), "adamw", torch.bfloat16),
    ((9, 0), "muon", torch.bfloat16), ((12, 0), "adamw", torch.bfloat16)])
def test_dtype_of_each_generation_of_gpus(monkeypatch, capability, optimizer, dtype):
    """V100 is 7.0 and T4 7.5; both emulate bfloat16 slowly, and torch says that it is there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    chosen, reason = t.pick_dtype(t.Config(optimizer=optimizer), torch.device("cuda"))
    assert chosen == dtype and "capability" in reason


@pytest.mark.parametrize("capabilities, dtype", [
    ({"avx512_bf16": True, "amx_bf16": False}, torch.bfloat16),
    ({"avx512_bf16": False, "amx_bf16": True}, torch.bfloat16),
    ({"avx512_bf16": False, "avx2": True, "cpu_name": "avx512_bf16"}, torch.float32)])
def test_dtype_of_a_cpu_is_what_its_hardware_has(monkeypatch, capabilities, dtype):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert t.pick_dtype(t.Config(), torch.device("cpu"))[0] == dtype


def test_dtype_of_a_cpu_under_an_older_torch(monkeypatch):
    """From /proc/cpuinfo, and float32 where there is none."""
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    real = t.Path.read_text
    for flags, dtype in {"fpu avx512_bf16 avx2": torch.bfloat16, "avx2": torch.float32}.items():
        def read_text(path, flags=flags):
            return f"flags : {flags}\n" if str(path) == "/proc/cpuinfo" else real(path)
        monkeypatch.setattr(t.Path, "read_text", read_text)
        monkeypatch.setattr(t.Path, "exists", lambda path: True)
        assert t.pick_dtype(t.Config(), torch.device("cpu"))[0] == dtype
    monkeypatch.setattr(t.Path, "exists", lambda path: False)
    assert t.pick_dtype(t.Config(), torch.device("cpu"))[0] == torch.float32


@pytest.mark.parametrize("name, tflops", [
    ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756),
    ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989), ("NVIDIA H200 NVL", 835),
    ("NVIDIA GH200 480GB", 989), ("NVIDIA GB200", 2500), ("NVIDIA B200", 2250),
    ("NVIDIA RTX 6000 Ada Generation", 364), ("NVIDIA RTX A6000", 155), ("NVIDIA L4", 121),
    ("NVIDIA L40S", 362), ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA GeForce RTX 3090", 71),
    ("Tesla V100-SXM2-16GB", 125), ("Tesla T4", 65), ("NVIDIA A10G", 70), ("Quadro P400", None)])
def test_peak_of_each_gpu(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert t.peak_flops(torch.device("cuda")) == (tflops and tflops * 1e12)


def test_a_gpu_that_torch_has_no_code_for_is_a_line(folder):
    """Memory can be had on a V100 under a torch that no longer knows it; a kernel cannot run."""
    message = "CUDA error: no kernel image is available for execution on the device\nCompile with"
    run = Forked(folder / "v100", device="cpu", arrange={"no_kernels": message})
    assert run.wait() == 1
    one_line(run.err, "no kernel image", "https://download.pytorch.org/whl/cu126", "--device=cpu")


@pytest.mark.parametrize("device, words", [
    ("auto", "has 2 GPUs.*nproc_per_node"), ("cuda:1", "device=cuda:1 is for one process"),
    ("mps", "device=mps is for one process")])
def test_a_process_without_a_gpu_of_its_own_is_a_line(monkeypatch, device, words):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(t.UserError, match=words):
        t.pick_device(device, local_rank=2)


def test_tf32_is_set_before_anything_is_compiled(monkeypatch):
    """Set later, the trial compilation would warn once on every rank."""
    order = []
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: order.append(str(device)))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", order.append)
    assert t.pick_device("cuda", local_rank=3) == torch.device("cuda", 3)
    assert order == ["cuda:3", "high"]


def test_compile_that_does_not_work_is_told(monkeypatch):
    def broken(function):
        raise RuntimeError("Cannot find a working triton installation.\nMore lines")
    monkeypatch.setattr(torch, "compile", broken)
    compiled, reason = t.pick_compile("auto", torch.device("cuda"))
    assert not compiled and "Cannot find a working triton installation" in reason
    with pytest.raises(t.UserError, match="working triton installation.*--compile=False"):
        t.pick_compile("True", torch.device("cpu"))
    assert t.pick_compile("auto", torch.device("cpu"))[0] is False


def test_the_attention_kernel_is_told():
    shape = t.GPTConfig(block_size=16, n_head=2, n_embd=32)
    assert t.attention_kernel(shape, torch.device("cpu"), torch.float32) == "Flash"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert t.attention_kernel(shape, torch.device("cpu"), torch.float32) == "unfused"


# ----------------------------------------------------------------------------- on real GPUs
def tiny_gpu_model(dtype, compiled):
    torch.manual_seed(0)
    config = t.GPTConfig(block_size=64, vocab_size=384, n_layer=2, n_head=2, n_embd=128)
    model = t.GPT(config).cuda()
    if compiled:
        model.compile()
    idx = torch.randint(0, 384, (4, 65), generator=torch.Generator().manual_seed(1)).cuda()
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        _, loss = model(idx[:, :-1], idx[:, 1:], return_logits=False)
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters()]


@ONE_GPU
def test_a_compiled_step_in_bfloat16_is_the_eager_one():
    eager, compiled = (tiny_gpu_model(torch.bfloat16, on) for on in (False, True))
    assert compiled[0] == pytest.approx(eager[0], abs=0.01)
    for a, b in zip(compiled[1], eager[1]):
        assert (a - b).norm() <= 0.05 * b.norm() + 1e-6


@ONE_GPU
def test_a_training_on_a_gpu_with_samples_compiled(folder):
    run = Forked(folder / "gpu", device="cuda", dtype="bfloat16", compile="True", sample_every=10,
                 sample_tokens=20)
    assert run.wait(600) == 0, run.err
    values = read_log(run.log_dir)
    assert values[30, "val"] < 4.5 < values[0, "val"]
    assert run.out.count("--- sample of rank 0") == 3


@ONE_GPU
def test_float16_trains_with_loss_scaling(folder):
    run = Forked(folder / "fp16", device="cuda", dtype="float16", compile="False")
    assert run.wait(600) == 0, run.err
    assert read_log(run.log_dir)[30, "val"] < 4.5
    assert load(run.log_dir / "checkpoint_00030.pt")["scaler"]["scale"] > 0


@ONE_GPU
def test_save_and_resume_on_a_gpu(folder):
    import signal
    changes = dict(device="cuda", dtype="float32", compile="False")
    whole = succeed(Forked(folder / "gpu whole", **changes))
    for _ in range(2):
        run = Forked(folder / "gpu stopped", arrange={"signal_at": (signal.SIGTERM, 12)}, **changes)
        assert run.wait(600) == 0, run.err
    assert "continuing from" in run.out
    assert_close_logs(whole.log_dir, run.log_dir)


@ONE_GPU
def test_hellaswag_with_a_compiled_model():
    from test_hellaswag import made_up, prepare
    config = t.GPTConfig(block_size=64, vocab_size=384, n_layer=2, n_head=2, n_embd=32,
                         n_vocab=300)
    model = t.GPT(config).cuda()
    plain = t.hellaswag.evaluate(model, prepare(made_up(40), model))
    model.compile()
    model(torch.zeros(1, 8, dtype=torch.int64, device="cuda"))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert t.hellaswag.evaluate(model, prepare(made_up(40), model)) == plain
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@TWO_GPUS
def test_two_gpus_equal_one(folder):
    import subprocess

    from conftest import ENV, flags
    changes = dict(device="cuda", dtype="float32", compile="False")
    one = succeed(Forked(folder / "one gpu", **changes))
    command = torchrun("--standalone", "--nproc_per_node=2")
    subprocess.run([*command, *flags(folder / "two gpus", **changes)], env=ENV, check=True)
    assert_close_logs(one.log_dir, folder / "two gpus")
