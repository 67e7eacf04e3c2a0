"""Simulate GPUs on a machine without one: a device "cuda" whose tensors are in the CPU's memory.

    pytest tests --device=simulated
    python tests/simulated_gpu.py train_gpt2.py --max_steps=20     # run a script on simulated GPUs
    SIMULATED_GPUS=2 SIMULATED_CAPABILITY=7.0 python ...           # two V100s instead of 8 H100s

How it works:
- start() compiles simulated_gpu.cpp, which registers the device with PyTorch's C++ part. Each
  operator on a GPU tensor checks what a GPU would refuse and then calls the CPU's kernel. The
  library is compiled once into the temporary folder, which takes about ten seconds.
- start() replaces the functions of torch.cuda that describe GPUs to PyTorch's Python part.
- gloo is used in place of NCCL. It refuses CPU tensors, as NCCL does.
- torch.compile traces the model, lets DDP split it and differentiates it, as on a GPU. It then runs
  the graphs with PyTorch's operators ("aot_eager"), because Inductor's kernels need a real GPU.
A run therefore computes real losses. waits() and compilations() count events that slow a GPU down.

What it cannot show:
- It has no GPU kernels, so it says nothing about their rounding, their speed or their bugs.
- Each operation is finished before its call returns, so it cannot find a read that comes too early.
- GPU memory has no limit, and torch.cuda reports 0 bytes in use.
- NCCL does not run.

It needs Linux, g++ and a CPU build of PyTorch. It was tested with torch 2.13, and it also compiles
with the headers of 2.11 and 2.14. Any version of PyTorch may change the C++ interface that is used
here. If the headers do not fit, start() raises CannotSimulate with the compiler's first error.
"""
import contextlib
import hashlib
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce",
               "reduce_scatter", "reduce_scatter_tensor", "gather", "scatter", "all_to_all",
               "all_to_all_single", "send", "recv", "isend", "irecv")
MOST_GPUS = 16
compiled_graphs = 0  # in this process


class CannotSimulate(Exception):
    """Raised if GPUs cannot be simulated on this machine. The message is one sentence."""


def find_torch():
    """Return the folder of the installed torch. Raise CannotSimulate if it is no CPU build."""
    if sys.platform != "linux":
        raise CannotSimulate(f"Simulated GPUs need Linux, and this is {sys.platform}.")
    if not shutil.which("g++"):
        raise CannotSimulate("Simulated GPUs need the compiler g++, which is not installed.")
    if "torch" in sys.modules:
        raise CannotSimulate("Simulated GPUs must start before torch is imported.")
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CannotSimulate("Simulated GPUs need PyTorch, which is not installed.")
    folder = Path(spec.origin).parent
    version = runpy.run_path(str(folder / "version.py"))  # without importing torch
    if version.get("cuda") or version.get("hip"):
        raise CannotSimulate(
            f"Simulated GPUs need a CPU build of torch, and {version['__version__']} is built for "
            "real GPUs: install one from https://download.pytorch.org/whl/cpu.")
    return folder


def build(torch_folder):
    """Return the path of the library, and compile it if needed. Raise CannotSimulate on failure."""
    parts = (SOURCE, torch_folder / "version.py")
    key = b"".join(path.read_bytes() for path in parts) + bytes(torch_folder)
    name = f"simulated_gpu_{os.getuid()}_{hashlib.sha256(key).hexdigest()[:16]}.so"
    library = Path(tempfile.gettempdir(), name)
    if library.exists():
        return library
    # Several processes may compile at once, so each one writes its own file and then renames it
    unfinished = library.with_suffix(f".{os.getpid()}.part")
    include, lib = torch_folder / "include", torch_folder / "lib"
    command = ["g++", "-shared", "-fPIC", "-std=c++20", "-O1", "-w", f"-I{include}",
               f"-I{include}/torch/csrc/api/include", str(SOURCE), f"-L{lib}",
               f"-Wl,-rpath,{lib}", "-lc10", "-ltorch_cpu", "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        unfinished.unlink(missing_ok=True)
        lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
        error = next((line for line in lines if "error" in line), lines[0])
        raise CannotSimulate(f"g++ cannot compile {SOURCE.name} with this torch ({error.strip()}).")
    unfinished.replace(library)
    return library


@contextlib.contextmanager
def silent_stderr():
    """Discard what C++ code writes to stderr."""
    stderr, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nothing)


def start():
    """Give this process simulated GPUs. Call this once, before torch is imported."""
    import ctypes
    library = build(find_torch())
    # PyTorch would warn that operators of c10d get a second kernel, which is intended
    with silent_stderr():
        try:
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        except OSError as e:
            raise CannotSimulate(f"The simulated GPUs cannot be loaded ({e}).") from None
    import torch
    replace_functions_of_torch_cuda(torch)
    replace_nccl(torch)
    replace_inductor(torch)


# ---- counters for the tests
def waits():
    """Return how often a real GPU would have made this process wait so far."""
    import torch
    return torch.ops.simulated_gpu.waits()


def compilations():
    """Return how many graphs torch.compile has compiled in this process so far."""
    return compiled_graphs


# ---- torch.cuda
class Properties:
    """The return value of torch.cuda.get_device_properties(), with the figures of an H100."""
    name = "Simulated GPU"
    total_memory = 85 * 10**9
    multi_processor_count = 132
    warp_size = 32
    gcnArchName = ""

    @property
    def major(self):
        return capability()[0]

    @property
    def minor(self):
        return capability()[1]


def capability(device=None):
    """Return the compute capability, for example (9, 0)."""
    major, minor = os.environ.get("SIMULATED_CAPABILITY", "9.0").split(".")
    return int(major), int(minor)


def always(value):
    """Return a function that returns `value`, whatever its arguments are."""
    return lambda *args, **kwargs: value


def replace_functions_of_torch_cuda(torch):
    """Replace the functions of torch.cuda that need a CUDA build of PyTorch."""
    cuda, ops = torch.cuda, torch.ops.simulated_gpu

    def index_of(device):
        index = torch.device(device).index if not isinstance(device, int) else device
        return ops.current() if index is None else index

    class use_device:
        """A replacement for the context manager torch.cuda.device."""
        def __init__(self, device):
            self.index = index_of(device)

        def __enter__(self):
            self.before = ops.current()
            ops.make_current(self.index)

        def __exit__(self, *error):
            ops.make_current(self.before)
    replaced = {
        "is_available": lambda: ops.count() > 0, "is_initialized": always(True),
        "_lazy_init": always(None), "device_count": lambda: ops.count(),
        "set_device": lambda device: ops.make_current(index_of(device)),
        "current_device": lambda: ops.current(), "device": use_device,
        "get_device_properties": always(Properties()), "get_device_name": always(Properties.name),
        "get_device_capability": capability, "get_arch_list": always(["sm_75", "sm_80", "sm_90"]),
        "is_bf16_supported": always(True),  # true also for old GPUs, which emulate bfloat16
        "synchronize": lambda device=None: ops.wait(), "empty_cache": always(None),
        "memory_allocated": always(0), "max_memory_allocated": always(0),
        "is_current_stream_capturing": always(False)}
    modules = [module for name, module in sys.modules.items() if name.startswith("torch.cuda")]
    for name, function in replaced.items():
        original = getattr(cuda, name)
        for module in modules:  # a module may have imported the function from another
            if vars(module).get(name) is original:
                setattr(module, name, function)
    cuda.default_generators = tuple(ops.default_generator(i) for i in range(MOST_GPUS))

    def storage_on_gpu(storage, location):
        if not location.startswith("cuda"):
            return None
        bytes_on_gpu = torch.empty(storage.nbytes(), dtype=torch.uint8, device=location)
        return bytes_on_gpu.untyped_storage().copy_(storage)
    # torch.load() tries these functions in the order of their numbers. PyTorch's own function for
    # GPUs has the number 20
    torch.serialization.register_package(15, always(None), storage_on_gpu)


# ---- NCCL
def refuse_cpu_tensors(collective, is_nccl):
    """Return `collective` with NCCL's check that no tensor is on the CPU."""
    def checked(*args, **kwargs):
        import torch
        tensors = [*args, *kwargs.values()]
        tensors += [one for many in tensors if isinstance(many, (list, tuple)) for one in many]
        if is_nccl() and any(torch.is_tensor(t) and not t.is_cuda for t in tensors):
            raise RuntimeError("No backend type associated with device type cpu")
        return collective(*args, **kwargs)
    return checked


def replace_nccl(torch):
    """Let init_process_group("nccl") use gloo, with the restrictions of NCCL.

    Tensors must be on GPUs, and each process must have its own GPU.
    """
    dist = torch.distributed
    init, all_gather, groups = dist.init_process_group, dist.all_gather, []

    def refuse_shared_gpus(device_id):
        mine = torch.tensor(device_id.index if device_id else torch.cuda.current_device())
        gpus = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        all_gather(gpus, mine)
        if len({gpu.item() for gpu in gpus}) < len(gpus):
            raise RuntimeError("Duplicate GPU detected: NCCL needs a GPU for each process")

    def init_process_group(backend=None, device_id=None, **kwargs):
        groups.append(backend)
        if backend == "nccl":
            init("cpu:gloo,cuda:gloo", **kwargs)
            refuse_shared_gpus(device_id)
        else:
            init(backend, **kwargs)
    dist.init_process_group = init_process_group
    for name in COLLECTIVES:
        collective = getattr(dist, name)
        setattr(dist, name, refuse_cpu_tensors(collective, lambda: groups[-1] == "nccl"))


# ---- torch.compile
def replace_inductor(torch):
    """Let torch.compile count its graphs, and run them with PyTorch's operators."""
    compile = torch.compile

    def count_and_run(graph, example_inputs):
        global compiled_graphs
        compiled_graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    def compile_without_inductor(*args, backend="inductor", **kwargs):
        backend = count_and_run if backend == "inductor" else backend
        return compile(*args, backend=backend, **kwargs)
    torch.compile = compile_without_inductor


def main():
    """Run the script that the command line names."""
    script = sys.argv[1]
    try:
        start()
    except CannotSimulate as e:
        sys.exit(f"simulated_gpu.py: {e}")
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
