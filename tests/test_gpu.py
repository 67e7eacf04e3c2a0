"""Tests of training on GPUs, and of the simulated GPUs themselves.

    pytest tests --device=simulated

Most of these tests need the simulated GPUs of simulated_gpu.py, which count how often the CPU waits
for the GPU and how often torch.compile compiles.
"""
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from unittest import mock

import pytest
import simulated_gpu
import torch
from conftest import (
    ENV, ROOT, TINY, Forked, assert_close_logs, is_real_gpu, is_simulated, load, read_log, succeed,
    together, write_text)

GPU = pytest.mark.skipif(TINY["device"] != "cuda", reason="needs --device=cuda or =simulated")
SIMULATED = pytest.mark.skipif(not is_simulated(), reason="needs --device=simulated")

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the text that all runs train on."""
    folder = tmp_path_factory.mktemp("gpu")
    write_text(folder)
    return folder

# ---- how often a run waits and compiles
def count(arrange, path):
    """Write the numbers of waits and compilations to a file at the begin and end of each step.

    Each rank writes to its own file, `path`.<rank>.
    """
    real, file = arrange.t.train_step, open(f"{path}.{os.environ.get('RANK', 0)}", "w")

    def note(what):
        values = what, simulated_gpu.waits(), simulated_gpu.compilations()
        print(*values, file=file, flush=True)

    def train_step(run):
        note("begin")
        result = real(run)
        note("end")
        return result
    arrange.t.train_step = train_step

def counts(path):
    """Return what count() wrote, as a tuple for each step but the last.

    The tuple is (waits during the step, waits until the next step begins, compilations up to then).
    """
    lines = [line.split() for line in path.read_text().splitlines()]
    begins = [(int(waits), int(graphs)) for what, waits, graphs in lines if what == "begin"]
    ends = [int(waits) for what, waits, _ in lines if what == "end"]
    assert len(begins) == len(ends)
    return [(end - begin[0], after[0] - begin[0], after[1])
            for begin, end, after in zip(begins, ends, begins[1:], strict=False)]

def train(n, log_dir, **changes):
    """Train with n processes. Return the Forked run of rank 0."""
    if n == 1:
        return succeed(Forked(log_dir, **changes))
    statuses, runs = together(n, log_dir, **changes)
    assert statuses == [0] * n, [run.err for run in runs]
    return runs[0]

# A step has 8 micro-steps on one GPU, and 4 on each of two GPUs
STEPS_ALONE = dict(B=1, max_steps=6, eval_every=0, save_every=0)

@SIMULATED
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_step_waits_for_the_gpu_once(folder, n, optimizer, dtype):
    """In float32 and bfloat16 the only wait of a step is for its loss and norm, after train_step().

    In float16 train_step() also waits to find out whether a gradient overflowed: at most twice per
    optimizer, and not in each micro-step. The second step is not checked, because in it DDP
    rearranges its buckets to the order in which the gradients became ready.
    """
    name = f"waits {n} {optimizer} {dtype}"
    train(n, folder / name, optimizer=optimizer, dtype=dtype, arrange={count: folder / name},
          **STEPS_ALONE)
    optimizers = 2 if optimizer == "muon" else 1
    for rank in range(n):
        seen = counts(folder / f"{name}.{rank}")
        assert len(seen) == 5
        for inside, whole, _ in seen[:1] + seen[2:]:
            assert whole == inside + 1
            assert 1 <= inside <= 2 * optimizers if dtype == "float16" else inside == 0, seen

def forbid_waits(arrange, first_step):
    """Let train_step() raise RuntimeError if it waits for the GPU, from this step on."""
    warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
    real = arrange.t.train_step

    def train_step(run):
        if run.state.step < first_step:
            return real(run)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return real(run)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    arrange.t.train_step = train_step

@pytest.mark.skipif(not is_real_gpu(), reason="needs --device=cuda; simulated GPUs count waits")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_does_not_wait_for_a_real_gpu(folder, optimizer):
    """In bfloat16 train_step() never waits. CUDA's own sync debug mode checks this."""
    succeed(Forked(folder / f"no waits {optimizer}", optimizer=optimizer, dtype="bfloat16",
                   arrange={forbid_waits: 1}, **STEPS_ALONE))

@SIMULATED
def test_a_validation_waits_as_often_for_many_batches_as_for_one(folder):
    """A validation keeps its sum of losses on the GPU until the end."""
    waits = []
    for val_tokens in (64, 1024):
        path = folder / f"validation {val_tokens}"
        train(1, path, **STEPS_ALONE | dict(eval_every=2, val_tokens=val_tokens),
              arrange={count: path.with_suffix(".counts")})
        waits.append([whole for _, whole, _ in counts(path.with_suffix(".counts.0"))])
    assert waits[0] == waits[1] and waits[0][1] > waits[0][0] == 1

def made_up_questions(arrange, number):
    """Replace HellaSwag by this number of made-up questions of several lengths."""
    import hellaswag
    questions = [{"ctx": "a man " * (1 + i % 3), "label": i % 4,
                  "endings": ["b" * (1 + i % 5), "cd", "efg " * (1 + i % 2), "h"]}
                 for i in range(number)]
    arrange.t.sys.modules["hellaswag"] = hellaswag
    hellaswag.iterate_examples = lambda split: iter(questions)
    hellaswag.GPU_BATCH = 64  # tokens per batch, so that there are many batches

EVALUATED = dict(hellaswag_every=4, sample_every=4, sample_tokens=12, eval_every=4, save_every=4,
                 max_steps=12, B=2, val_tokens=1024 + 16)  # the last batch of a validation is short

@SIMULATED
@pytest.mark.parametrize("n, dtype", [(1, "bfloat16"), (2, "float32")])
def test_a_run_compiles_once_for_training_and_once_for_validation(folder, n, dtype):
    """HellaSwag and samples compile nothing, and a compiled run has the losses of an eager one."""
    name = f"compiled {n} {dtype}"
    plain = train(n, folder / f"plain {n} {dtype}", dtype=dtype, **EVALUATED,
                  arrange={made_up_questions: 20})
    run = train(n, folder / name, dtype=dtype, compile=True, **EVALUATED,
                arrange={count: folder / name, made_up_questions: 20})
    assert "compile=True" in run.out and run.out.count("--- sample at step ") == 3
    for rank in range(n):
        compilations = [graphs for *_, graphs in counts(folder / f"{name}.{rank}")]
        assert compilations == [2] * 11  # validation precedes the first step
    a, b = read_log(plain.log_dir), read_log(run.log_dir)
    tolerance = 1e-5 if dtype == "float32" else 0.05
    assert a.keys() == b.keys() and (12, "hella") in a
    assert max(abs(a[key] - b[key]) for key in a) <= tolerance

# ---- results
@GPU
def test_the_quick_start_has_the_same_losses_on_a_gpu_and_a_cpu(folder):
    """The preset SMALL trains the same model on both devices.

    On a real GPU, a larger difference is allowed, because its kernels round differently.
    """
    short = dict(max_steps=12, eval_every=6, val_tokens=8192, sample_every=0, dtype="float32",
                 data=ROOT / "input.txt")
    # No other flags, so that SMALL is used
    cpu, gpu = (Forked(None, log_dir=folder / device, device=device, without=TINY, **short)
                for device in ("cpu", "cuda"))
    succeed(cpu), succeed(gpu)
    assert "settings  SMALL" in gpu.out and "1 x cuda, float32" in gpu.out
    assert_close_logs(folder / "cpu", folder / "cuda")

@GPU
def test_a_run_moves_between_a_gpu_and_the_cpu(folder):
    """A run that is stopped on one device continues on the other from the same checkpoint.

    Its losses are those of a run that was never stopped.
    """
    whole = succeed(Forked(folder / "whole", optimizer="muon"))
    stop = {"signal_at": (signal.SIGTERM, 7, 19)}
    for device in ("cuda", "cpu", "cuda"):
        run = succeed(Forked(folder / "moved", optimizer="muon", device=device, arrange=stop))
        assert f"1 x {device}" in run.out
    assert_close_logs(whole.log_dir, run.log_dir)

@GPU
def test_two_gpus_have_the_losses_and_scores_of_one(folder):
    """This also holds if the second GPU has no rows to validate."""
    words = dict(EVALUATED, val_tokens=16, dtype="float32", arrange={made_up_questions: 20})
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
    run = train(8, several, arrange={"signal_on_rank": (3, signal.SIGTERM, 8)}, **words)
    assert "8 x cuda" in run.out and "Stopped by a signal after 9 steps" in run.out
    run = train(4, several, **words)
    assert "4 x cuda" in run.out and "from step 9 on" in run.out
    assert_close_logs(one.log_dir, several)

def note_devices(arrange, path):
    """Write the type of device of the weights to `path` when a text is sampled."""
    real = arrange.t.GPT.generate

    def generate(self, *args, **kwargs):
        path.write_text(next(self.parameters()).device.type)
        return real(self, *args, **kwargs)
    arrange.t.GPT.generate = generate

@GPU
def test_sampling_without_training_uses_the_gpu(folder):
    """With --sample, the weights are moved to the chosen device."""
    log_dir = succeed(Forked(folder / "sampled", max_steps=2)).log_dir
    run = succeed(Forked(log_dir, sample=1, sample_tokens=5, arrange={
        note_devices: folder / "device of samples"}))
    assert "Samples from" in run.out and (folder / "device of samples").read_text() == "cuda"

@GPU
def test_a_model_that_is_not_saved_is_exported_from_the_gpu(folder, is_gpt2):
    """With max_steps=0 there is no checkpoint, so the model itself is exported."""
    run = succeed(Forked(folder / "exported", max_steps=0, hide=["matplotlib"]))
    assert "exported the model to" in run.out

def with_triton(arrange, _):
    """Let Triton appear to be installed. PyTorch's CPU build comes without it."""
    find_spec = importlib.util.find_spec

    def find(name, *args):
        return find_spec("torch", *args) if name == "triton" else find_spec(name, *args)
    importlib.util.find_spec = find

@SIMULATED
@pytest.mark.parametrize("capability, dtype, compiled", [
    ("6.1", "float16", False), ("7.0", "float16", True), ("7.5", "float16", True),
    ("8.0", "bfloat16", True), ("9.0", "bfloat16", True)])
def test_each_gpu_trains_in_the_dtype_that_it_is_fast_in(folder, capability, dtype, compiled):
    """A GPU below capability 8.0, such as a V100 (7.0), uses float16 and scales the losses.

    Below 7.0, which Triton does not support, nothing is compiled.
    """
    run = succeed(Forked(folder / capability, dtype="auto", compile="auto", max_steps=3,
                         eval_every=0, env={"SIMULATED_CAPABILITY": capability},
                         arrange={with_triton: 0, count: folder / f"counts {capability}"}))
    assert f"1 x cuda, {dtype}, compile={compiled}," in run.out
    compilations = [graphs for *_, graphs in counts(folder / f"counts {capability}.0")]
    assert compilations == [compiled] * 2
    scaler = load(run.log_dir / "checkpoint_00003.pt")["state"]["scaler"]
    assert bool(scaler) == (dtype == "float16") and (not scaler or scaler["scale"] > 1)

# ---- the simulated GPU itself
def on_gpu(*size):
    return torch.arange(1.0, 1 + torch.Size(size).numel(), device="cuda").view(size)

REFUSED = {  # name: an operation that mixes devices, which a GPU refuses
    "operands": lambda x: x + torch.ones(3, 4),
    "lists": lambda x: torch._foreach_add_([x], [torch.ones(3, 4)]),
    "ids": lambda x: torch.nn.functional.embedding(torch.tensor([1]), x),
    "masks": lambda x: x.masked_fill(torch.ones(3, 4, dtype=torch.bool), 0),
    "results": lambda x: torch.zeros(()).add_(x[0, 0]),
    "pieces": lambda x: torch.stack((x[0, 0], torch.zeros(()))),
    "values": lambda x: x.index_put_((x > 2,), torch.ones(10)),
    "two GPUs": lambda x: x + x.to("cuda:1"),
    "generator": lambda x: torch.multinomial(x, 1, generator=torch.Generator())}

@SIMULATED
@pytest.mark.parametrize("name", REFUSED)
def test_a_simulated_gpu_refuses_what_a_gpu_refuses(name):
    with pytest.raises(RuntimeError, match="device|cuda:0"):
        REFUSED[name](on_gpu(3, 4))

WAITS = {  # name: (how often the CPU waits, the operation)
    "item": (1, lambda x: x[0, 0].item()), "tolist": (1, lambda x: x.tolist()),
    "cpu": (1, lambda x: x.cpu()), "condition": (1, lambda x: bool(x[0, 0] > 0)),
    "mask": (1, lambda x: x[x > 2]), "values at a mask": (
        1, lambda x: x.index_put_((x > 2,), on_gpu(10))),
    "one value at a mask": (0, lambda x: x.index_put_((x > 2,), on_gpu(1))),
    "nonzero": (1, lambda x: x.nonzero()), "unique": (1, lambda x: x.unique()),
    "new tensor": (1, lambda x: torch.tensor([1, 2], device="cuda")),
    "CPU index": (1, lambda x: x[torch.tensor([0, 2])]),
    "from pageable memory": (1, lambda x: torch.ones(3).to("cuda", non_blocking=True)),
    "blocking": (1, lambda x: torch.ones(3).pin_memory().to("cuda")),
    "pinned": (0, lambda x: torch.ones(3).pin_memory().to("cuda", non_blocking=True)),
    "synchronize": (1, lambda x: torch.cuda.synchronize()),
    "CPU scalar": (0, lambda x: x * torch.tensor(2.0)), "zeros": (
        0, lambda x: torch.zeros(3, device="cuda")),
    "other GPU": (0, lambda x: x.to("cuda:1"))}

@SIMULATED
@pytest.mark.parametrize("name", WAITS)
def test_a_simulated_gpu_counts_waits(name):
    expected, act = WAITS[name]
    x = on_gpu(3, 4)
    before = simulated_gpu.waits()
    act(x)
    assert simulated_gpu.waits() - before == expected

@SIMULATED
def test_a_simulated_gpu_computes():
    """Views share memory, and results stay on the GPU of their operands.

    A GPU has its own random generator, seeded by torch.manual_seed(). Its state can be saved.
    """
    x = on_gpu(3, 4)
    x.view(12)[3:].view(3, 3).t()[0].add_(100)
    x[1:, ::2].mul_(2)
    expected = torch.arange(1.0, 13).view(3, 4)
    expected.view(12)[[3, 6, 9]] += 100
    expected[1:, ::2] *= 2
    assert torch.equal(x.cpu(), expected)
    out = torch.empty(0, device="cuda:1")
    torch.add(x.to("cuda:1"), 1, out=out)
    assert out.device == torch.device("cuda:1") and torch.equal(out.cpu(), expected + 1)
    torch.manual_seed(5)
    first = torch.rand(3, device="cuda")
    torch.manual_seed(5)
    torch.rand(3)
    assert torch.equal(first, torch.rand(3, device="cuda"))
    state = torch.cuda.get_rng_state()
    later = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(later, torch.rand(3, device="cuda")) and not torch.equal(first, later)

def pytest_on(device, tmp_path, **env):
    """Run `pytest --device=...` on this file. Assert a usage error, and return the output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
               f"{ROOT}/tests/test_gpu.py", f"--device={device}", f"--rootdir={tmp_path}"]
    # Some plugins import torch, and then GPUs cannot be simulated for a different reason
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | env
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=180,
                          env=env)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout + done.stderr

def without_gpp(tmp_path):
    """Return an environment in which g++ is not found."""
    return {"PATH": str(tmp_path)}

def other_torch(tmp_path, cuda="None", header=""):
    """Return an environment with another torch, built for `cuda` and without its C++ headers."""
    package = tmp_path / "torch"
    (package / "include" / "ATen").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "version.py").write_text(f"__version__, cuda, hip = '9.9', {cuda}, None")
    return {"PYTHONPATH": str(tmp_path)}

@pytest.mark.skipif(sys.platform != "linux", reason="simulated GPUs need Linux")
@pytest.mark.parametrize("arrange, sentence", [
    (without_gpp, "need the compiler g++, which is not installed."),
    (lambda tmp_path: other_torch(tmp_path, cuda="'13.0'"),
     "need a CPU build of torch, and 9.9 is built for real GPUs: install one from https://"),
    (other_torch, "g++ cannot compile simulated_gpu.cpp with this torch (")])
def test_if_gpus_cannot_be_simulated_one_sentence_says_why(tmp_path, arrange, sentence):
    if arrange is not without_gpp and not shutil.which("g++"):
        pytest.skip("there is no g++")
    out = pytest_on("simulated", tmp_path, **arrange(tmp_path))
    assert re.fullmatch(r"ERROR: --device=simulated: [^\n]+\n\n?", out) and sentence in out, out

def test_an_unknown_device_is_reported_in_one_sentence(tmp_path):
    out = pytest_on("tpu", tmp_path)
    assert out.strip() == "ERROR: --device=tpu is unknown: choose cpu, cuda or simulated."

@pytest.mark.skipif(is_real_gpu(), reason="there is a GPU")
def test_a_missing_gpu_is_reported_in_one_sentence(tmp_path):
    out = pytest_on("cuda", tmp_path, CUDA_VISIBLE_DEVICES="")
    assert out.startswith("ERROR: --device=cuda: torch ") and out.strip().count("\n") == 0
    assert "sees no GPU here" in out

@SIMULATED
def test_the_launcher_runs_a_script_and_reports_what_is_missing(tmp_path):
    """`python tests/simulated_gpu.py SCRIPT ...` runs a script on simulated GPUs.

    If there is no compiler, one line says so.
    """
    script = tmp_path / "script.py"
    script.write_text("import sys, torch, json\n"
                      "print(json.dumps([sys.argv[1:], torch.cuda.device_count()]))\n")
    command = [sys.executable, f"{ROOT}/tests/simulated_gpu.py", str(script), "a", "--b"]
    two = ENV | {"SIMULATED_GPUS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, env=two)
    assert (done.stderr, json.loads(done.stdout)) == ("", [["a", "--b"], 2])
    done = subprocess.run(command, capture_output=True, text=True, env=ENV | {"PATH": ""})
    assert done.returncode == 1
    assert done.stderr == ("simulated_gpu.py: Simulated GPUs need the compiler g++, which is not "
                           "installed.\n")
