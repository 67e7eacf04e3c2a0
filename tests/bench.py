"""Benchmarks: both sides in one run, medians, a ratio. Nothing here asserts a time.

    python tests/bench.py step                         # one bench
    python tests/bench.py all --save=tests/measured    # all, a file for each
    python tests/bench.py optimizers --save=...        # also busy: too long for all

A bench that fails says so, and the next one runs. On a GPU that is too small,
B is halved on all sides, and the table says so.
"""
import argparse
import contextlib
import ctypes
import io
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("GPT2_SHARED", ROOT.parent / "shared"))
sys.path.insert(0, str(ROOT))
BENCHES, LONG = {}, {}  # name -> function


def bench(function):
    BENCHES[function.__name__] = function
    return function


def long_bench(function):
    LONG[function.__name__] = function
    return function


# ----------------------------------------------------------------------------- measuring
def seconds_of(function, *arguments):
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def median_seconds(function, repeats=5, warmup=1):
    """Median wall time of function() in seconds, after `warmup` calls that are not counted."""
    for _ in range(warmup):
        function()
    return statistics.median(seconds_of(function) for _ in range(repeats))


def machine():
    """One line that says where, when and with what the figures were measured."""
    import torch
    chip = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    cpu = platform.machine()
    path = Path("/proc/cpuinfo")
    if path.exists():
        names = [line.split(":")[1].strip() for line in path.read_text().splitlines()
                 if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return (f"{time.strftime('%Y-%m-%d %H:%M')}; {chip}; {os.cpu_count()} cores of {cpu}; "
            f"Python {platform.python_version()}; torch {torch.__version__}")


def table(header, rows):
    """A Markdown table on stdout."""
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |", flush=True)


def on_cuda():
    import torch
    return torch.cuda.is_available()


def plain_malloc():
    """Undo keep_freed_memory(): glibc's thresholds where they settle in any plain script."""
    if sys.platform == "linux":
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 65536)
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)
        libc.mallopt(M_TRIM_THRESHOLD, 2**26)
        libc.malloc_trim(0)


@contextlib.contextmanager
def training_run(**constants):
    """What set_up() builds, on shards of random tokens, logging into a temporary folder."""
    import numpy as np

    import train_gpt2 as t
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for split, size in {"val": 2**17, "train": 2**21}.items():
            tokens = rng.integers(0, 50257, size).astype(np.uint16)
            np.save(Path(folder, f"random_{split}_000000.npy"), tokens)
        constants.setdefault("total_batch_size", constants["B"] * constants["T"])
        cfg = t.Config(data=folder, log_dir=f"{folder}/log", val_tokens=2**16, hellaswag_every=0,
                       **constants)
        with contextlib.redirect_stdout(io.StringIO()):
            run = t.set_up(cfg, t.join_processes(cfg))
        yield run
        run.background.shutdown()


# ----------------------------------------------------- sides, each in a process of its own
def take_steps(run, repeats, warmup):
    """Median seconds of train_step, the device's work included."""
    import torch

    import train_gpt2 as t

    def step():
        loss, _ = t.train_step(run)
        loss.item()
        if run.device.type == "cuda":
            torch.cuda.synchronize()
    return median_seconds(step, repeats, warmup)


def unfuse(run):
    """AdamW as `foreach` has it, torch's default on GPUs, instead of the fused one."""
    import torch
    for i, optimizer in enumerate(run.state.optimizers):
        if isinstance(optimizer, torch.optim.AdamW):
            groups = [{key: group[key] for key in ("params", "weight_decay")}
                      for group in optimizer.param_groups]
            run.state.optimizers[i] = torch.optim.AdamW(
                groups, lr=6e-4, betas=(0.9, 0.95), eps=1e-8, foreach=True)


def naive_attention(q, k, v, attn_mask=None, is_causal=False):
    """Attention as in the paper, every (T, T) matrix in memory."""
    import torch
    T = q.size(-2)
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ v


class WithLogits:
    """A model that hands out its logits although nobody asked: what many scripts do."""

    def __init__(self, model):
        self.model = model

    def __call__(self, idx, targets, return_logits):
        return self.model(idx, targets, return_logits=True)


def step_side(B, T, dtype="bfloat16", compile="False", fused=True, logits=False, malloc="kept",
              flash=True, tf32=True, padded=True, repeats=5, warmup=2):
    """{ms, peak GiB, tok/s, TFLOP/s, MFU} of a step of GPT-2 (124M)."""
    import resource

    import torch

    import train_gpt2 as t
    if not padded:
        t.padded = lambda n_vocab: n_vocab
    if not flash:
        t.F.scaled_dot_product_attention = naive_attention
        t.attention_kernel = lambda *_: "naive"
    with training_run(B=B, T=T, dtype=dtype, compile=compile) as run:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        if malloc == "plain":
            plain_malloc()
        if not fused:
            unfuse(run)
        if logits:
            run.ddp_model = WithLogits(run.ddp_model)
        seconds = take_steps(run, repeats, warmup)
        flops = t.flops_per_token(run.state.raw_model, T) * B * T / seconds
        peak = t.peak_flops(run.device)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if run.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated()
    return {"ms": seconds * 1e3, "GiB": memory / 2**30, "tok/s": B * T / seconds,
            "TFLOP/s": flops / 1e12, "MFU": flops / peak if peak else None}


def measure(function, **arguments):
    """function(**arguments) of this file in a fresh process; None if memory ran out."""
    done = subprocess.run([sys.executable, __file__, function, "--side", json.dumps(arguments)],
                          capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if any(text in done.stderr for text in ("out of memory", "OutOfMemory", "allocate memory")):
        return None
    raise RuntimeError(f"{function} {arguments}: {done.stderr[-2000:]}")


def measure_sides(sides, rounds, B, **common):
    """({name: medians over `rounds`}, B); turn and turn about, since machines have moods."""
    while True:
        found = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                found[name].append(measure("step_side", B=B, **common | side))
                if found[name][-1] is None:
                    break
        if all(None not in results for results in found.values()):
            break
        B //= 2
        print(f"out of memory: all sides at B={B}\n", flush=True)

    def median(results, key):
        values = [result[key] for result in results]
        return None if None in values else statistics.median(values)
    keys = found[next(iter(found))][0]
    return {name: {key: median(results, key) for key in keys}
            for name, results in found.items()}, B


def step_rows(found):
    """Rows for a table, with the gain over the first side."""
    first = next(iter(found.values()))["ms"]
    for name, side in found.items():
        mfu = f"{side['MFU']:.1%}" if side["MFU"] else "-"
        yield (name, f"{side['ms']:.0f}", f"{first / side['ms']:.2f}x", f"{side['GiB']:.2f}",
               f"{side['tok/s']:,.0f}", f"{side['TFLOP/s']:.2f}", mfu)


STEP_HEADER = ("side", "ms", "ratio", "peak GiB", "tok/s", "TFLOP/s", "MFU")


def matmul_tflops(n=8192):
    """TFLOP/s that a GPU reaches on an n^3 bfloat16 product of random matrices."""
    import torch
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def ten():
        for _ in range(10):
            a @ b
        torch.cuda.synchronize()
    return 10 * 2 * n**3 / median_seconds(ten) / 1e12


# ------------------------------------------------------------------------------ the step
@bench
def step():
    """Our step against a plain script's: eager, foreach AdamW, logits that nobody uses."""
    sides = {"plain: eager, foreach AdamW, logits returned":
                 dict(fused=False, logits=True, malloc="plain"),
             "fused AdamW": dict(logits=True, malloc="plain"),
             "no logits returned": dict(malloc="plain")}
    compiled = {"compiled, but logits returned": dict(compile="True", logits=True),
                "compiled": dict(compile="True")}
    if on_cuda():
        found, B = measure_sides(sides | compiled, rounds=1, B=64, T=1024, repeats=20, warmup=5)
        print(f"B={B} rows of 1024 tokens; ours is the last row\n")
    else:
        sides["freed memory kept: ours on a CPU"] = {}
        found, B = measure_sides(sides | compiled, rounds=2, B=8, T=256, repeats=4, warmup=1)
        print(f"{B} rows of 256 tokens, bfloat16\n")
    table(STEP_HEADER, step_rows(found))
    if on_cuda():
        rate, ours = matmul_tflops(), found["compiled"]["TFLOP/s"]
        print(f"\n8192^3 bfloat16 product: {rate:.0f} TFLOP/s; our step {ours / rate:.1%} of it")


TUTORIAL_MS = {"fp32": 1000, "TF32": 333, "bf16": 300, "compile": 130, "flash attention": 96,
               "vocab 50304": 93, "fused AdamW": 90}  # an A100, 16 x 1024 tokens


@bench
def ladder():
    """The rungs of the lecture that reproduces GPT-2, each added to the ones before."""
    rungs = {"fp32": dict(dtype="float32", compile="False", fused=False, flash=False, tf32=False,
                          padded=False, logits=True, malloc="plain"),
             "TF32": dict(tf32=True), "bf16": dict(dtype="bfloat16"),
             "compile": dict(compile="True"), "flash attention": dict(flash=True),
             "vocab 50304": dict(padded=True), "fused AdamW": dict(fused=True)}
    if not on_cuda():
        del rungs["TF32"]
    sides, so_far = {}, {}
    for name, change in rungs.items():
        so_far = so_far | change
        sides[name] = so_far
    sides["loss alone, freed memory kept"] = so_far | dict(logits=False, malloc="kept")
    if on_cuda():
        found, B = measure_sides(sides, rounds=1, B=16, T=1024, repeats=20, warmup=5)
    else:
        found, B = measure_sides(sides, rounds=2, B=2, T=256, repeats=4, warmup=1)
    print(f"A step of GPT-2 (124M) on {B} x {1024 if on_cuda() else 256} tokens\n")
    rows, before = [], None
    for name, side in found.items():
        gain = f"{before / side['ms']:.2f}x" if before else ""
        mfu = f"{side['MFU']:.1%}" if side["MFU"] else "-"
        rows.append((name, f"{side['ms']:.0f}", gain, mfu, TUTORIAL_MS.get(name, "-")))
        before = side["ms"]
    table(("rung", "ms", "gain", "MFU", "A100 in the lecture, ms"), rows)


@bench
def quick_start():
    """The first command of README: seconds and loss over the whole validation text."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        start = time.perf_counter()
        done = subprocess.run([sys.executable, str(ROOT / "train_gpt2.py")], cwd=folder, env=env,
                              capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - start
        lines = Path(folder, "log", "log.txt").read_text().split("\n")
    steps = [float(line.split(" ms ")[0].split()[-1]) for line in done.stdout.splitlines()
             if " tok/s" in line]
    val = [line.split()[2] for line in lines if " val " in line]
    print(f"{seconds:.0f} s from command to end, {sum(steps) / 1e3:.0f} s of it in "
          f"{len(steps):,} steps of {statistics.median(steps):.1f} ms (median); "
          f"validation loss {val[-1]} nats a byte")


def script_step_ms(flags, environment, processes=1):
    """ms of each step that train_gpt2.py prints, the first five left out."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone",
                     f"--nproc_per_node={processes}"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*launcher, str(ROOT / "train_gpt2.py"), "--device=cpu", "--log_dir=log",
             "--eval_every=0", "--sample_every=0", "--save_every=0", "--hellaswag_every=0", *flags],
            cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=True)
    return [float(line.split(" ms ")[0].split()[-1]) for line in done.stdout.splitlines()
            if " tok/s" in line][5:]


@contextlib.contextmanager
def busy_neighbour():
    """Another process that computes all the time, on a core of its choice."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        other.kill()
        other.wait()


@long_bench
def busy():
    """Steps while another process computes too, by how long OpenMP's threads spin at barriers.

    300,000 is libgomp's own spin count, 1,000 what train_gpt2.py sets before torch is loaded.
    """
    big = ["--encoding=bytes", f"--data={ROOT / 'input.txt'}", "--B=8", "--T=256",
           "--total_batch_size=2048", "--max_steps=8", "--val_tokens=2048"]
    quick = ["--max_steps=50"]
    spins = ("300000", "1000")
    sides = [("quick start", quick, 1, spin, 5) for spin in spins]
    sides.append(("quick start, 2 processes of 1 thread", quick, 2, "1000", 5))
    sides += [("12 layers 768 wide, 8 x 256 bytes", big, 1, spin, 1) for spin in spins]
    found = {}
    for turn in range(5):
        for name, flags, processes, spin, rounds in sides:
            for company in (contextlib.nullcontext, busy_neighbour):
                if turn < rounds:
                    with company():
                        times = script_step_ms(flags, {"GOMP_SPINCOUNT": spin}, processes)
                    found.setdefault((name, spin, company), []).append(times)
    rows = []
    for name, _, _, spin, _ in sides:
        row = [name, f"{int(spin):,}"]
        for company in (contextlib.nullcontext, busy_neighbour):
            rounds = found[name, spin, company]
            means = [statistics.mean(times) for times in rounds]
            row += [f"{statistics.median(means):.0f} ({min(means):.0f} to {max(means):.0f})",
                    f"{max(map(max, rounds)):.0f}"]
        rows.append(row)
    print(f"Mean ms a step: median of the rounds (lowest to highest); {os.cpu_count()} cores\n")
    table(("training", "spin count", "all cores free", "slowest step", "one core busy",
           "slowest step"), rows)


@bench
def processes():
    """The quick start's steps in one process of two threads and in two under torchrun."""
    found = {"1 process, 2 threads": [], "2 processes, 1 thread each": []}
    for _ in range(6):
        for n, times in enumerate(found.values(), start=1):
            threads = {"OMP_NUM_THREADS": str(2 // n)}
            times.append(statistics.median(script_step_ms(["--max_steps=60"], threads, n)))
    rows = [(name, f"{statistics.median(times):.0f}", " ".join(f"{ms:.0f}" for ms in times))
            for name, times in found.items()]
    table(("side", "ms a step, median", "by round"), rows)


def reference_losses(cfg, steps):
    """The losses of a plain training loop around transformers' GPT-2, on the same rows."""
    import torch
    import transformers

    import train_gpt2 as t
    transformers.logging.disable_progress_bar()
    torch.manual_seed(cfg.seed)
    encoding = t.get_encoding(cfg.encoding)
    loader, _ = t.open_data(cfg, encoding)
    with tempfile.TemporaryDirectory() as folder:
        t.build_model(cfg, encoding).save_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()  # no dropout
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": cfg.weight_decay},
                                   {"params": plain, "weight_decay": 0.0}],
                                  betas=(0.9, 0.95), eps=1e-8, foreach=False)
    losses, rows = [], cfg.total_batch_size // cfg.T
    for step in range(steps):
        tokens = torch.from_numpy(loader.read(step * rows, rows))
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = t.get_lr(step, cfg)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@bench
def reference():
    """Our losses against a plain loop's around transformers' GPT-2: 1 and 2 processes, any B."""
    import train_gpt2 as t
    steps = 20
    constants = dict(data=str(ROOT / "input.txt"), encoding="bytes", n_layer=4, n_head=4,
                     n_embd=128, T=64, total_batch_size=2048, max_steps=steps, warmup_steps=5,
                     max_lr=1e-3, eval_every=0, sample_every=0, save_every=0, device="cpu",
                     dtype="float32", hellaswag_every=0)
    expected = reference_losses(t.Config(**constants, B=32), steps)
    rows = []
    for processes, B in ((1, 32), (1, 4), (2, 16), (2, 2)):
        with tempfile.TemporaryDirectory() as folder:
            flags = [f"--{k}={v}" for k, v in (constants | dict(B=B, log_dir=folder)).items()]
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                       f"--nproc_per_node={processes}", str(ROOT / "train_gpt2.py"), *flags]
            subprocess.run(command, check=True, capture_output=True)
            log = Path(folder, "log.txt").read_text().splitlines()
        ours = [float(line.split()[2]) for line in log if " train " in line]
        worst = max(abs(a - b) for a, b in zip(ours, expected))
        rows.append((processes, B, 32 // (B * processes), f"{ours[0]:.6f}", f"{ours[-1]:.6f}",
                     f"{worst:.1e}"))
    print(f"{steps} steps of 2,048 tokens in float32; the log has six digits\n")
    table(("processes", "B", "micro-steps", "first loss", "last loss",
           "largest difference from the plain loop"), rows)


# ------------------------------------------------------------------------------- memory
def saved_bytes(B, T):
    """Bytes that a forward pass of GPT-2 (124M) in eager bfloat16 keeps for its backward."""
    import torch

    import train_gpt2 as t
    model = t.GPT(t.GPTConfig(block_size=T, n_vocab=50257))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor
    idx = torch.randint(0, 50257, (B, T))
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        _, loss = model(idx, idx, return_logits=False)  # alive, or nothing would be kept
    return sum(kept.values())


@bench
def memory():
    """The largest power of two for B in a GPU's memory: measured on one, else computed."""
    T, usable = 1024, 0.93  # the rest is CUDA's context and fragments
    if on_cuda():
        peaks = {B: measure("step_side", B=B, T=T, compile="True", repeats=2)["GiB"] * 2**30
                 for B in (2, 4)}
        row = (peaks[4] - peaks[2]) / 2
        fixed, how = peaks[2] - 2 * row, "measured at B = 2 and 4, compiled; the rest computed"
    else:
        row = saved_bytes(2, T) - saved_bytes(1, T)
        row += T * 50304 * (4 + 2)  # the logits' gradient, in float32 and cast
        fixed = (16 + 2) * 124_475_904  # weights, gradients, AdamW's state, bfloat16 copies
        how = "computed on a CPU for eager bfloat16; compiled needs less"
    print(f"{how}: {fixed / 2**30:.2f} GiB + {row / 2**30:.3f} GiB a row of {T} tokens\n")
    rows = []
    for size in (12, 16, 24, 40, 80):
        largest = 2 ** int(math.log2(max(1, (size * 1e9 * usable - fixed) / row)))
        rows.append((f"{size} GB", largest))
    table(("GPU memory", "largest B"), rows)


# ------------------------------------------------------------------------------- saving
def copy_state(run, copies):
    import torch

    import train_gpt2 as t
    t.copy_to_host(t.checkpoint_content(run), copies)
    if run.device.type == "cuda":
        torch.cuda.synchronize()


def write_bytes(size, block, file):
    for at in range(0, size, len(block)):
        file.write(block[:size - at])


def save_side():
    """Seconds to copy the state, until save() returns, until it is on the disk, and to read it."""
    import torch

    import train_gpt2 as t
    with training_run(B=1, T=1024, dtype="float32", compile="False") as run:
        for p in run.state.raw_model.parameters():
            p.grad = torch.zeros_like(p)
        run.state.optimizers[0].step()  # makes the optimizer's state
        path, block = Path(run.cfg.log_dir, "plain.bin"), os.urandom(2**26)
        found = {name: [] for name in ("disk", "copy", "stall", "whole", "verify", "restore")}
        copies = {}
        for _ in range(6):
            run.state.step += 1
            with contextlib.redirect_stdout(io.StringIO()):
                start = time.perf_counter()
                t.save(run)
                found["stall"].append(time.perf_counter() - start)
                t.wait_for_save(run)
                found["whole"].append(time.perf_counter() - start)
            newest = t.newest_checkpoint(run.folder.path)
            found["copy"].append(seconds_of(copy_state, run, copies))
            found["verify"].append(seconds_of(t.read_checkpoint, newest))
            saved = t.read_checkpoint(newest, verify=False)
            found["restore"].append(seconds_of(run.state.load_state_dict, saved))
            size = newest.stat().st_size
            found["disk"].append(seconds_of(t.write_whole, path, partial(write_bytes, size, block)))
    return {name: statistics.median(times[1:]) for name, times in found.items()} | {"size": size}


@bench
def save():
    """How long a save of the 124M with AdamW's state holds up training, and what it takes."""
    found = measure("save_side")
    size = found.pop("size")
    names = {"disk": "plain write, fsync, rename of as many bytes",
             "copy": "copy of the state in memory", "stall": "save(): training waits",
             "whole": "until it is on the disk and verified",
             "verify": "read, from the page cache, and verify",
             "restore": "load into model and optimizer"}
    print(f"{size / 1e9:.2f} GB; medians of 5, the first save not counted\n")
    table(("what", "s", "GB/s"),
          [(names[name], f"{s:.2f}", f"{size / s / 1e9:.2f}") for name, s in found.items()])


# -------------------------------------------------------------------------------- loader
def anonymous_mib():
    """MiB that this process itself allocated, or nan where /proc has no such figure."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return math.nan
    found = [line.split()[1] for line in lines if line.startswith("RssAnon")]
    return int(found[0]) / 1024 if found else math.nan


@bench
def loader():
    """A (64, 1024) batch out of a shard of 100 M tokens, and out of one that is not in memory."""
    import numpy as np
    import torch

    import train_gpt2 as t
    B, T, n = 64, 1024, 100_000_000
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:  # on a disk, not in memory
        path = Path(folder, "random_train_000000.npy")
        np.save(path, np.random.default_rng(0).integers(0, 50257, n).astype(np.uint16))
        row = iter(range(0, 10**9, B))
        before, start = anonymous_mib(), time.perf_counter()
        ours = t.DataLoaderLite([path], T, seed=1, shuffle=True)
        t.check_shards(ours)
        opened = time.perf_counter() - start
        batch = median_seconds(lambda: ours.batch(next(row), B), 200, 20)
        held = anonymous_mib() - before
        shard = np.load(path, mmap_mode="r")

        def plain():
            i = next(row) * T % (n - B * T - 1)
            torch.from_numpy(shard[i:i + B * T + 1].astype(np.int64))
        in_order = median_seconds(plain, 200, 20)
        before, start = anonymous_mib(), time.perf_counter()
        tokens = torch.tensor(np.load(path).astype(np.int64))
        loaded, held64 = time.perf_counter() - start, anonymous_mib() - before
        del tokens
        table(("side", "ms a batch", "ms to open and check", "MiB held"), [
            ("ours: shuffled rows of a memory-mapped shard", f"{batch * 1e3:.2f}",
             f"{opened * 1e3:.0f}", f"{held:.0f}"),
            ("plain memmap slice, in file order", f"{in_order * 1e3:.2f}", "", ""),
            ("whole shard as int64", "", f"{loaded * 1e3:.0f}", f"{held64:.0f}")])
        cold_shard(path)


def cold_shard(path):
    """The slowest of the first 40 batches, 50 ms apart, of a shard that the kernel forgot."""
    import train_gpt2 as t
    if not hasattr(os, "posix_fadvise"):
        return
    rows, real = [], t.read_ahead
    for name, announce in (("not announced", lambda shards: None), ("announced", real)):
        t.read_ahead = announce
        loader = t.DataLoaderLite([path], 1024, seed=1, shuffle=True)
        times = []
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for i in range(40):
            times.append(seconds_of(loader.batch, i * 64, 64))
            time.sleep(0.05)
        rows.append((name, f"{statistics.median(times) * 1e3:.2f}", f"{max(times[1:]) * 1e3:.1f}",
                     f"{sum(times[1:]):.3f}"))
    t.read_ahead = real
    print("\nA shard that is not in memory, batches 50 ms apart, the first one aside\n")
    table(("side", "median ms a batch", "slowest", "s in all"), rows)


# ---------------------------------------------------------------------------------- wire
def bytes_on_loopback():
    """Bytes that this machine has sent over its loopback interface so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])


@bench
def wire():
    """What two processes really send for a step over gloo, against the ring formula."""
    import train_gpt2 as t
    constants = dict(n_layer=4, n_head=4, n_embd=256, T=64, B=4, total_batch_size=1024,
                     encoding="bytes", data=ROOT / "input.txt", eval_every=0, sample_every=0,
                     save_every=0, dtype="float32", device="cpu", max_lr=1e-3, warmup_steps=2)
    N = t.GPT(t.GPTConfig(block_size=64, vocab_size=384, n_layer=4, n_head=4, n_embd=256,
                          n_vocab=257)).num_params()
    rows = []
    for grad_comm, width in {"float32": 4, "bfloat16": 2}.items():
        sent = {}
        for steps in (2, 12):
            with tempfile.TemporaryDirectory() as folder:
                changes = dict(log_dir=folder, grad_comm=grad_comm, max_steps=steps)
                flags = [f"--{k}={v}" for k, v in (constants | changes).items()]
                before = bytes_on_loopback()
                subprocess.run(
                    [sys.executable, "-m", "torch.distributed.run", "--standalone",
                     "--nproc_per_node=2", str(ROOT / "train_gpt2.py"), *flags],
                    check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
                sent[steps] = bytes_on_loopback() - before
                loss = Path(folder, "log.txt").read_text().split()[-1]
        real = (sent[12] - sent[2]) / 10 / 2
        formula = 2 * (2 - 1) / 2 * N * width
        rows.append((grad_comm, f"{real / 2**20:.2f}", f"{formula / 2**20:.2f}",
                     f"{real / formula:.3f}", loss))
    print(f"{N:,} parameters, 2 processes, gloo over loopback\n")
    table(("gradients in", "MiB sent per process and step", "ring formula 2 (n-1)/n N bytes",
           "ratio", "loss of step 12"), rows)


@bench
def scaling():
    """Computed, nothing here is measured: step time and efficiency on several GPUs.

    compute = tokens / (n * rate of the lecture's A100). sending = 2 (n-1)/n bytes / bandwidth.
    Buckets leave during the last micro-step's backward pass, two thirds of that micro-step, as
    soon as they are ready, which hides them. DDP's last bucket, with the tied embedding 35 % of
    the bytes, is ready only at its very end, and nothing hides it.
    """
    rate, tokens, N = 16 * 1024 / 0.093, 524_288, 124_439_808
    links = {"NVLink, 230 GB/s in a ring": 230e9, "100 Gb/s Ethernet": 12.5e9}
    rows = []
    for n in (1, 8, 16, 64):
        compute = tokens / (n * rate)
        backward = 2 / 3 * compute / max(1, tokens // (n * 64 * 1024))  # of the last micro-step
        for link, bandwidth in links.items():
            cells = []
            for width in (4, 2):
                per_parameter = 2 * (n - 1) / n * width / bandwidth
                early = max(0.0, 0.65 * N * per_parameter - backward)
                step = compute + early + 0.35 * N * per_parameter
                cells += [f"{step * 1e3:.0f}", f"{compute / step:.0%}"]
            rows.append((n, link, f"{compute * 1e3:.0f}", *cells))
    table(("GPUs", "link", "compute, ms", "step with fp32 gradients, ms", "efficiency",
           "step with bf16 gradients, ms", "efficiency"), rows[1:])


# -------------------------------------------------------------------------------- tokens
def tokenize_naively(text):
    """One document in a worker of the naive pool."""
    import numpy as np
    import tiktoken
    encoding = tiktoken.get_encoding("gpt2")
    return np.array([encoding.eot_token, *encoding.encode_ordinary(text)], dtype=np.uint16)


def tokenize_barely(texts):
    """Tokens per second of tiktoken in this process: no reading, no writing."""
    import tiktoken
    encoding = tiktoken.get_encoding("gpt2")
    start = time.perf_counter()
    tokens = sum(len(encoding.encode_ordinary(text)) for text in texts)
    return tokens / (time.perf_counter() - start)


@bench
def tokenize():
    """Documents to tokens: bare tiktoken on every core, a pool over documents, fineweb.py."""
    import multiprocessing

    import pyarrow.parquet as pq
    import tiktoken
    encoding, cores = tiktoken.get_encoding("gpt2"), len(os.sched_getaffinity(0))
    spawn = multiprocessing.get_context("spawn")
    copies = 6  # of the corpus: one shard of the default size, so that starting weighs little
    files = sorted((SHARED / "fineweb_standin").glob("*.parquet"))
    if not files:
        raise FileNotFoundError(f"no parquet files in {SHARED / 'fineweb_standin'}")
    texts = []
    for file in files:
        texts += pq.read_table(file, columns=["text"])["text"].to_pylist()
    tokens = sum(map(len, encoding.encode_ordinary_batch(texts, num_threads=cores))) + len(texts)
    with tempfile.TemporaryDirectory() as corpus:
        for copy in range(copies):
            for file in files:
                Path(corpus, f"{copy}_{file.name}").symlink_to(file)

        def bare():
            shares = [texts[i::cores] for i in range(cores)]
            with spawn.Pool(cores) as workers:
                return sum(workers.map(tokenize_barely, shares, chunksize=1))

        def pool():
            start = time.perf_counter()
            with spawn.Pool(cores) as workers:
                for _ in workers.imap(tokenize_naively, texts * copies, chunksize=16):
                    pass
            return tokens * copies / (time.perf_counter() - start)

        def ours():
            with tempfile.TemporaryDirectory() as shards:
                command = [sys.executable, ROOT / "fineweb.py", f"--source={corpus}",
                           f"--local_dir={shards}"]
                start = time.perf_counter()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                return tokens * copies / (time.perf_counter() - start)

        sides = {f"bare tiktoken, {cores} processes": bare, "a pool over documents": pool,
                 "fineweb.py, start to end": ours}
        rounds = [[side() for side in sides.values()] for _ in range(3)]
    medians = [statistics.median(rates) for rates in zip(*rounds)]
    table(("side", "M tokens/s", "of bare"),
          [(name, f"{rate / 1e6:.2f}", f"{rate / medians[0]:.2f}")
           for name, rate in zip(sides, medians)])


# ----------------------------------------------------------------------------- HellaSwag
def naive_ending_losses(model, tokens, mask):
    """Summed loss of each ending, (4,), the plain way: four padded rows, logits everywhere."""
    import torch
    logits = model(tokens)[0]  # (4, N, V)
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    return (losses.view(4, -1) * mask[:, 1:]).sum(1)


@bench
def hellaswag():
    """examples/s of hellaswag.evaluate against one question at a time, random GPT-2 (124M)."""
    import torch

    import hellaswag as h
    import train_gpt2 as t
    local = SHARED / "hellaswag" / "hellaswag_val.jsonl"
    h.DATA = local if local.exists() else h.DATA
    device = t.pick_device("auto", 0)
    plain_malloc()
    torch.manual_seed(0)
    model = t.GPT(t.GPTConfig(n_vocab=50257)).to(device)
    examples = list(h.iterate_examples("val"))[::100]  # 101 questions of all kinds
    rendered = [h.render_example(example) for example in examples]

    @torch.no_grad()
    def naive(autocast):
        right = 0
        for _, tokens, mask, label in rendered:
            with autocast():
                losses = naive_ending_losses(model, tokens.to(device), mask.to(device))
            right += int((losses / mask.sum(1).to(device)).argmin() == label)
        return right / len(rendered)

    def ours(autocast):
        with autocast():
            return h.evaluate(model, examples).acc_norm

    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        def autocast(dtype=dtype):
            return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
        rounds = 5 if device.type == "cuda" else 2
        found = {"one question at a time": naive, "evaluate": ours}
        times, scores = {name: [] for name in found}, {}
        for _ in range(rounds):
            for name, side in found.items():
                start = time.perf_counter()
                scores[name] = side(autocast)
                times[name].append(time.perf_counter() - start)
        rates = {name: len(examples) / statistics.median(t) for name, t in times.items()}
        slow = rates["one question at a time"]
        for name, rate in rates.items():
            rows.append((str(dtype)[6:], name, f"{rate:.2f}", f"{rate / slow:.2f}x",
                         f"{scores[name]:.4f}"))
    print(f"{len(examples)} questions, medians of {rounds} rounds; evaluate also tokenizes\n")
    table(("dtype", "side", "examples/s", "ratio", "acc_norm"), rows)


# ---------------------------------------------------------------------------- optimizers
def optimizer_side(size, optimizer):
    """Median ms of the optimizers' own work in a step, nothing else."""
    import torch

    import train_gpt2 as t
    device = t.pick_device("auto", 0)
    shapes = {"quick start": dict(block_size=64, vocab_size=384, n_layer=3, n_head=4, n_embd=128),
              "124M": {}}
    model = t.GPT(t.GPTConfig(**shapes[size])).to(device)
    dtype, _ = t.pick_dtype(t.Config(optimizer="muon"), device)
    cfg = t.Config(optimizer=optimizer)
    optimizers = t.configure_optimizers(model, cfg, torch.float32 if size != "124M" else dtype)
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 0.01

    def one():
        for o in optimizers:
            o.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return {"ms": median_seconds(one, 30 if size != "124M" else 5, 3) * 1e3}


@bench
def optimizer_work():
    """Milliseconds a step that AdamW, and Muon with AdamW, need for themselves."""
    rows = []
    for size in ("quick start", "124M"):
        found = {"adamw": [], "muon": []}
        for _ in range(3):
            for name, times in found.items():
                times.append(measure("optimizer_side", size=size, optimizer=name)["ms"])
        rows.append((size, *(f"{statistics.median(times):.1f}" for times in found.values())))
    table(("model", "AdamW, ms", "Muon and AdamW, ms"), rows)


def train_quietly(data, **constants):
    """Train from scratch; returns [(tokens, seconds, val loss), ...] and median s a step."""
    import train_gpt2 as t
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        cfg = t.Config(**dict(data=str(data), log_dir=folder, hellaswag_every=0, sample_every=0,
                              encoding="bytes", dtype="float32") | constants)
        run = t.set_up(cfg, t.join_processes(cfg))
        curve, steps = [], []
        while True:
            if run.state.step % cfg.eval_every == 0:
                tokens = run.state.step * cfg.total_batch_size
                curve.append((tokens, sum(steps), t.validation_loss(run)))
            if run.state.step == cfg.max_steps:
                return curve, statistics.median(steps)
            start = time.perf_counter()
            loss, _ = t.train_step(run)
            loss.item()
            steps.append(time.perf_counter() - start)
            if run.stop.received:
                raise KeyboardInterrupt


@long_bench
def optimizers():
    """AdamW against Muon on English prose, the FineWeb stand-in's bytes: two learning rates each,
    another seed at the better; and with a batch so small that Muon's work shows."""
    size = dict(n_layer=4, n_head=4, n_embd=192, T=128, val_tokens=32768, warmup_steps=20,
                min_lr=0.0)
    rates = {"adamw": (1.5e-3, 3e-3), "muon": (5e-3, 1e-2)}
    with tempfile.TemporaryDirectory() as folder:
        shards = Path(folder, "shards")
        command = [sys.executable, ROOT / "fineweb.py", "--encoding=bytes", "--max_shards=4",
                   f"--source={SHARED / 'fineweb_standin'}", "--shard_size=4000000",
                   f"--local_dir={shards}"]
        subprocess.run(command, check=True, capture_output=True)
        for batch, steps in ((16, 200), (2, 400)):
            rows = []
            for optimizer in rates:
                constants = dict(optimizer=optimizer, B=batch, total_batch_size=batch * 128,
                                 max_steps=steps, eval_every=steps // 4, **size)
                runs = {}
                for rate in rates[optimizer]:
                    runs[rate, 1] = train_quietly(shards, max_lr=rate, seed=1, **constants)
                best, _ = min(runs, key=lambda key: runs[key][0][-1][2])  # noqa: B023
                runs[best, 2] = train_quietly(shards, max_lr=best, seed=2, **constants)
                for (rate, seed), (curve, seconds) in runs.items():
                    cells = [f"{loss:.3f} ({s:.0f} s)" for _, s, loss in curve[1:]]
                    rows.append((optimizer, f"{rate:g}", seed, f"{seconds * 1e3:.0f}", *cells))
            print(f"\n{batch} rows a step: val loss, nats a byte (seconds of training)\n")
            tokens = [f"{tokens / 1000:.0f} k tokens" for tokens, _, _ in curve[1:]]
            table(("optimizer", "max_lr", "seed", "ms a step", *tokens), rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", help=f"all, or one of {', '.join([*BENCHES, *LONG])}")
    parser.add_argument("--save", metavar="FOLDER", help="also write FOLDER/<bench>.txt")
    parser.add_argument("--side", help=argparse.SUPPRESS)  # what measure() starts
    args = parser.parse_args()
    if args.side:
        print(json.dumps(globals()[args.which](**json.loads(args.side))))
        return
    known = BENCHES | LONG
    if args.which not in ["all", *known]:
        sys.exit(f"bench.py: there is no bench {args.which}; --help lists them.")
    failed = []
    for name in BENCHES if args.which == "all" else [args.which]:
        output = io.StringIO()
        with contextlib.redirect_stdout(Tee(sys.stdout, output)):
            print(f"# {name}: {' '.join(known[name].__doc__.split())}\n\n{machine()}\n")
            try:
                known[name]()
            except Exception:  # whatever it is, the next bench runs
                failed.append(name)
                print(f"FAILED:\n{traceback.format_exc()}")
            print()
        if args.save and name not in failed:
            Path(args.save).mkdir(parents=True, exist_ok=True)
            Path(args.save, f"{name}.txt").write_text(output.getvalue().rstrip() + "\n")
    if failed:
        sys.exit(f"bench.py: failed: {', '.join(failed)}")


class Tee(io.TextIOBase):
    """A file that writes to two."""

    def __init__(self, *files):
        self.files = files

    def write(self, text):
        for file in self.files:
            file.write(text)
            file.flush()
        return len(text)


if __name__ == "__main__":
    main()
