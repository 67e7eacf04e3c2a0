"""Benchmarks of the three scripts. No benchmark fails because of a slow time.

    python tests/bench.py guard                        # compare delays with those on record
    python tests/bench.py guard --save=tests/measured  # the same, and write a new record
    python tests/bench.py busy                         # the quick start beside busy processes
    python tests/bench.py gpu --minutes=45 --save=DIR  # a session on a GPU
    python tests/bench.py all --save=DIR               # step ladder memory reference muon busy

If two things are compared, both are timed in the same run, in turns, and the medians are shown.
Each row is printed, and written to DIR/<bench>.txt, as soon as it is measured. If a measurement
fails, its row gives the reason, and the next row is measured. If memory runs out, B is halved.
"""
import argparse
import contextlib
import ctypes
import dataclasses
import inspect
import itertools
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("GPT2_SHARED", ROOT.parent / "shared"))
sys.path.insert(0, str(ROOT))
# Import train_gpt2 before torch, because it sets GOMP_SPINCOUNT, which torch reads at its import
import train_gpt2 as t  # noqa: E402
import hellaswag as h  # noqa: E402
import torch  # noqa: E402

BENCHES = "step ladder memory reference muon busy".split()  # what "all" runs
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
QUESTIONS = SHARED / "hellaswag" / "hellaswag_val.jsonl"
TEXTS = SHARED / "fineweb_standin"  # .parquet files of documents
# The first command of the README, as constants and as a command line
QUICK = t.SMALL | dict(data=str(ROOT / "input.txt"), device="cpu")
COMMAND = [sys.executable, ROOT / "train_gpt2.py", "--device=cpu"]
TIMES = dict(repeats=20, warmup=5) if CUDA else dict(repeats=4, warmup=1)  # steps
# Dense bfloat16 peak in the data sheets. The first name that occurs in a GPU's name is used
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312}

@dataclass
class Limits:
    """Limits on the time of a command. gpu() lowers them, so that its session ends in time."""
    end: float = np.inf       # the session's end, on the clock of time.monotonic()
    command_s: float = 600.0  # seconds that one command may take

    def seconds_left(self):
        return max(0, self.end - time.monotonic())

limits = Limits()

# ---- tables
def cells(*values):
    """Return a line of a Markdown table."""
    return f"| {' | '.join(map(str, values))} |"

def header(*names):
    """Return the first two lines of a Markdown table."""
    return f"{cells(*names)}\n{cells(*['---'] * len(names))}"

def kind_of_cpu():
    """Return a description of the CPU and of torch. Ratios are comparable if it is the same."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"model name\s*: (.*)", text)
    able = [flag for flag in ("amx_bf16", "avx512_bf16") if torch.cpu.get_capabilities().get(flag)]
    return (f"{CORES} cores of {name[1] if name else os.uname().machine} with "
            f"{' '.join(able) or 'no bfloat16'}, torch {torch.__version__}")

# ---- measuring
def seconds_of(function, *arguments):
    """Return how many seconds a call takes."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start

def medians_in_turns(rounds, *sides):
    """Call the sides in turns and return the list of the medians of what they return.

    Each side returns a number or a list of numbers.
    """
    found = [np.hstack([side() for side in sides]) for _ in range(rounds)]
    return np.median(found, axis=0).tolist()

def median_seconds(*functions, repeats, warmup=0):
    """Call functions in turns and return the list of their median times in seconds."""
    for function in functions * warmup:
        function()
    return medians_in_turns(repeats, *(partial(seconds_of, function) for function in functions))

@contextlib.contextmanager
def started(command, **options):
    """Start a process. When the context ends, kill it and all processes that it has started."""
    # On Linux, prctl(PR_SET_PDEATHSIG, SIGKILL) kills it also if the benchmark itself is killed
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    process = subprocess.Popen(command, text=True, start_new_session=True, **options,
                               preexec_fn=prctl and (lambda: prctl(1, signal.SIGKILL)))
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

def output_of(command, **options):
    """Return the output of a command.

    Raise RuntimeError if the command fails, and TimeoutError if it takes too long.
    """
    limit = min(limits.command_s, limits.seconds_left())
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        try:
            output, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"it took more than {limit:.0f} s") from None
    if process.returncode != 0:
        raise RuntimeError(f"exit status {process.returncode}: {errors.strip()[-2000:]}")
    return output

def measure(function, omp_threads=None, **arguments):
    """Call a function of this file in a fresh process and an empty folder. Return its result.

    Raise MemoryError if the process runs out of memory, and RuntimeError if it fails otherwise.
    """
    code = (f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import bench, json; "
            f"print(json.dumps(bench.{function}(**{arguments!r})))")
    env = os.environ | ({"OMP_NUM_THREADS": str(omp_threads)} if omp_threads else {})
    with tempfile.TemporaryDirectory() as folder:
        try:
            output = output_of([sys.executable, "-c", code], cwd=folder, env=env)
            return json.loads(output.splitlines()[-1])
        except RuntimeError as e:
            # The parent can recognize a lack of memory only by the text of the error
            memory = re.search("out of memory|OutOfMemory|allocate memory|status -9", str(e))
            raise (MemoryError if memory else RuntimeError)(str(e).splitlines()[-1]) from e

# ---- other programs on the same cores. Figures that are timed while they run are not comparable
FREE = 0.25           # cores that other programs may use, since a system is never completely idle
WAIT_SECONDS = 120.0  # how long wait_for_free_cores() waits

def ticks_of(text, cores):
    """Return (ticks not idle, all ticks) of some cores since boot, from a text of /proc/stat."""
    busy = total = 0
    for line in text.splitlines():
        name, *fields = line.split()
        if name in {f"cpu{core}" for core in cores}:
            # user nice system idle iowait irq softirq steal. The guest field is a part of user
            ticks = [int(field) for field in fields[:8]]
            total += sum(ticks)
            busy += sum(ticks) - ticks[3] - ticks[4]
    return busy, total

def busy_between(before, after, cores):
    """Return how many cores were busy between two texts of /proc/stat, or None if unknown."""
    (busy, total), (busy_later, total_later) = ticks_of(before, cores), ticks_of(after, cores)
    if total_later == total:  # in some sandboxes the counters do not advance
        return None
    return len(cores) * (busy_later - busy) / (total_later - total)

def cores_withheld(seconds):
    """Return how many cores other programs use, measured with one busy process per core.

    A process that shares its core gets less CPU time than wall time. The wall time of a fixed
    piece of work would not show this, because even a single process is slow if all cores are busy.
    """
    code = ("import time; start, cpu = time.perf_counter(), time.process_time()\n"
            f"while time.perf_counter() - start < {seconds}: pass\n"
            "print((time.process_time() - cpu) / (time.perf_counter() - start))")
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(started([sys.executable, "-c", code], stdout=subprocess.PIPE))
            for _ in range(CORES)]
        return CORES - sum(float(process.communicate()[0]) for process in processes)

def cores_in_use(seconds=2.0):
    """Return how many cores other programs use now, for example 1.0 for one busy process."""
    path = Path("/proc/stat")
    if path.exists():
        before = path.read_text()
        time.sleep(seconds)
        busy = busy_between(before, path.read_text(), sorted(os.sched_getaffinity(0)))
        if busy is not None:
            return busy
    return cores_withheld(seconds)

def wait_for_free_cores(in_use=cores_in_use, clock=time.monotonic):
    """Wait until the cores are free, for WAIT_SECONDS at most. Print a line if there is a wait.

    Return the last result of in_use(), the number of cores that other programs use.
    """
    end = clock() + WAIT_SECONDS
    used = in_use()
    if used > FREE:
        print(f"Other programs use {used:.1f} of {CORES} cores. Waiting for up to "
              f"{WAIT_SECONDS:.0f} s until they are free.", flush=True)
    while used > FREE and clock() < end:
        used = in_use()
    return used

def not_valid(used):
    """Return the line that says why timings are not valid, or "" if they are."""
    return (f"This comparison is not valid: other programs use {used:.1f} of {CORES} cores."
            if used > FREE else "")

def beside_busy(processes, function):
    """Call function() while this number of other processes are busy. Return its result."""
    with contextlib.ExitStack() as others:
        for _ in range(processes):
            others.enter_context(started([sys.executable, "-c", "while True: pass"]))
        return function()

# ---- one step of training
def random_encoding(name):
    """Return an encoding of GPT-2's size in which each byte is a token. It needs no download."""
    ranks = {bytes([i]): i for i in range(256)}
    ranks |= {bytes([255, *divmod(i, 256)]): i for i in range(256, 50256)}
    return t.tiktoken.Encoding(name=name, pat_str=r"[\s\S]", mergeable_ranks=ranks,
                               special_tokens={"<|endoftext|>": 50256})

@contextlib.contextmanager
def training_run(**constants):
    """Set up a run in the current folder, as train_gpt2.py does, and yield it.

    Without the constant `data`, the run reads random tokens and needs no vocabulary.
    """
    if "data" not in constants:
        t.get_encoding = random_encoding
        tokens = np.random.default_rng(0).integers(0, 50257, 2**21, dtype=np.uint16)
        for split in ("val", "train"):
            np.save(f"random_{split}_000000.npy", tokens)
    cfg = t.Config(**dict(data=".", hellaswag_every=0, device=DEVICE) | constants)
    t.check_config(cfg)
    cfg = dataclasses.replace(cfg, B=t.fitting_B(cfg))
    run = t.set_up(cfg, t.StartingPoint(), t.set_up_device(cfg.device))
    with run.folder.executor:  # its end waits for a save in progress
        yield run

def naive_attention(q, k, v, dropout_p=0.0, is_causal=True):
    """Compute attention and write each (T, T) matrix to memory."""
    future = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.mT / q.size(-1) ** 0.5
    return torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ v

def plain_losses(model, cfg, loader):
    """Yield the losses of a plain training loop around the GPT-2 of transformers, on a CPU."""
    groups = [dict(params=[p for p in model.parameters() if (p.dim() >= 2) == decays],
                   weight_decay=cfg.weight_decay * decays) for decays in (True, False)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=True)
    rows = cfg.total_batch_size // cfg.T
    model.eval()  # no dropout
    for step in itertools.count():
        x, y = loader.batch(step * rows, rows)
        loss = model(x, labels=x, shift_labels=y.contiguous(), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = t.get_lr(step, cfg)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()

def figures_of(seconds, cfg, model):
    """Return (ms, tokens per second, peak memory in bytes, MFU) of a step that took `seconds`.

    MFU is the share of the GPU's peak, with 6 N + 12 layers * width * T FLOPs per token. It is
    NaN on other devices.
    """
    tokens = cfg.total_batch_size
    parameters = sum(p.numel() for p in model.parameters())
    flops = tokens * (6 * parameters + 12 * cfg.n_layer * cfg.n_embd * cfg.T)
    memory = (torch.cuda.max_memory_allocated() if CUDA
              else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    gpu = torch.cuda.get_device_name() if CUDA else ""
    peak = next((tflops * 1e12 for name, tflops in PEAK_TFLOPS.items() if name in gpu), np.nan)
    return seconds * 1e3, tokens / seconds, memory, flops / seconds / peak

def plain_side(repeats, warmup, **constants):
    """Time a step of a plain loop around transformers' GPT-2. Return its figures_of().

    The loop is eager, in float32, with AdamW, and the model returns its logits.
    """
    import transformers
    t.keep_freed_memory = lambda: None  # a plain loop does not change how memory is freed
    with training_run(**constants | dict(dtype="float32")) as run:  # only its rows are used
        cfg, run.state, run.ddp_model = run.cfg, None, None
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=run.encoding.n_vocab, n_positions=cfg.T, n_layer=cfg.n_layer,
            n_head=cfg.n_head, n_embd=cfg.n_embd, activation_function="gelu_pytorch_tanh"))
        losses = plain_losses(model, cfg, run.train_loader)
        [seconds] = median_seconds(lambda: next(losses), repeats=repeats, warmup=warmup)
        return figures_of(seconds, cfg, model)

def step_side(repeats, warmup, fused=True, logits=False, flash=True, tf32=True, padded=True,
              tune=False, ahead=False, late=False, **constants):
    """Time a step of train_gpt2.py with some speed-ups removed or added. Return its figures_of().

    fused=False: AdamW uses torch's default, foreach. logits=True: the model returns unused logits.
    flash=False: attention writes its matrices to memory. tf32=False: matrices are multiplied in
    full float32. padded=False: the vocabulary has 50,257 rows. tune=True: torch.compile uses
    coordinate descent tuning. ahead=True: the next batch is read before waiting for the loss.
    late=True: the loss of a step is read after the next step has been started.
    """
    if not padded:
        t.padded = lambda n_vocab: n_vocab
    if not flash:
        t.F.scaled_dot_product_attention = naive_attention
    with training_run(**constants) as run:
        model, loader, fetched, waiting = run.state.raw_model, run.train_loader, {}, []
        if not tf32:
            torch.set_float32_matmul_precision("highest")
        if tune:
            model.compile(options={"coordinate_descent_tuning": True})
        if not fused:
            for group in run.state.optimizers[0].param_groups:
                group |= dict(fused=False, foreach=True)
        if logits:  # drop return_logits=False from each call
            model.register_forward_pre_hook(lambda _, args, kwargs: (args, {}), with_kwargs=True)
        if ahead:
            read = loader.batch
            loader.batch = lambda row, *more: fetched.pop(row, None) or read(row, *more)

        def one_step():
            waiting.append(t.train_step(run))
            if ahead:
                row = t.rows_before(run.cfg, run.state.step)
                fetched[row] = read(row, run.cfg.B, run.device)
            if len(waiting) > late:
                t.gather_from_ranks(*waiting.pop(0), False)  # waits for the GPU
        [seconds] = median_seconds(one_step, repeats=repeats, warmup=warmup)
        return figures_of(seconds, run.cfg, model)

PLAIN = dict(function="plain_side")  # a variant that does not use train_gpt2.py's step

def variant_rows(variants, **size):
    """Yield a table with a row for each variant. Raise MemoryError if memory runs out.

    variants: {name: arguments of step_side() that this variant changes}. size: the other arguments.
    """
    yield "\n" + header("variant", "ms per step", "speed-up over the first row",
                        "speed-up over the row above", "tokens per second", "peak memory, GiB",
                        "MFU")
    first = before = None
    for name, changes in variants.items():
        arguments = dict(function="step_side") | size | changes
        try:
            ms, tokens, memory, mfu = measure(**arguments)
        except (RuntimeError, TimeoutError) as e:
            yield cells(name, f"not measured: {t.summary_of(e)}")
            continue
        first, before = first or ms, before or ms
        yield cells(name, f"{ms:.4g}", f"{first / ms:.3f}x", f"{before / ms:.3f}x",
                    f"{tokens:,.0f}", f"{memory / 2**30:.2f}", f"{mfu:.1%}".replace("nan%", "-"))
        before = ms

def step_table(variants, B, T, total=None, **more):
    """Yield variant_rows(). If memory runs out, start the table again with half of B.

    total: tokens per step. The default is B * T.
    """
    while B:
        size = dict(B=B, T=T, total_batch_size=total or B * T) | TIMES | more
        try:
            yield from variant_rows(variants, **size)
            return
        except MemoryError:
            yield cells(f"out of memory with B={B}")
            B //= 2

def step():
    """Time a step of train_gpt2.py, with its speed-ups added one by one, and of a plain loop."""
    plain = {} if CUDA else {"a plain loop around transformers' GPT-2, float32": PLAIN}
    ours = {"train_gpt2.py, eager, foreach AdamW, logits returned": dict(fused=False, logits=True),
            "... with fused AdamW": dict(logits=True),
            "... and without logits (the default on a CPU)": {},
            "compiled, logits returned": dict(compile=True, logits=True),
            "compiled, without logits (the default on a GPU)": dict(compile=True)}
    return step_table(plain | ours, B=64 if CUDA else 8, T=1024 if CUDA else 256,
                      dtype="bfloat16", compile=False)

def ladder(B=16 if CUDA else 2, T=1024 if CUDA else 256, **more):
    """Repeat the speed-ups of the lecture "Let's reproduce GPT-2 (124M)", one after the other.

    The times in parentheses are from the lecture, on an A100 with 16 rows of 1,024 tokens.
    """
    rungs = {"float32, naive attention (1000 ms)":
             dict(dtype="float32", compile=False, fused=False, flash=False, tf32=False,
                  padded=False, logits=True),
             "TF32 (333 ms)": dict(tf32=True),
             "bfloat16 (300 ms)": dict(dtype="bfloat16"),
             "torch.compile (130 ms)": dict(compile=True),
             "flash attention (96 ms)": dict(flash=True),
             "vocabulary of 50,304 (93 ms)": dict(padded=True),
             "fused AdamW (90 ms)": dict(fused=True),
             "logits not returned (not in the lecture)": dict(logits=False)}
    so_far = itertools.accumulate(rungs.values(), dict.__or__)
    return step_table(dict(zip(rungs, so_far)), B, T, **more)

# ---- losses, optimizers and memory
def reference():
    """Compare the losses with those of a plain loop around transformers' GPT-2.

    The loop uses one process. The script uses one or two processes and different values of B.
    """
    import transformers
    changes = dict(optimizer="adamw", max_lr=1e-3, max_steps=20, dtype="float32", eval_every=0,
                   sample_every=0, save_every=0)
    cfg = t.Config(**QUICK | changes)
    encoding = t.get_encoding(cfg.encoding)
    loader, _ = t.open_data(cfg, encoding)
    with tempfile.TemporaryDirectory() as folder:
        t.save_hugging_face(t.build_model(cfg, t.gpt_config_of_run(cfg)), folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = list(itertools.islice(plain_losses(model, cfg, loader), cfg.max_steps))
    yield f"{cfg.max_steps} steps of 2,048 tokens in float32. The log has six decimals.\n"
    yield header("processes", "B", "micro-steps", "last loss", "largest difference in any step")
    for processes, B in ((1, 32), (1, 4), (2, 16), (2, 2)):
        with tempfile.TemporaryDirectory() as folder:
            constants = changes | dict(B=B, log_dir=folder)
            output_of([sys.executable, "-m", "torch.distributed.run", "--standalone",
                       f"--nproc_per_node={processes}", *COMMAND[1:],
                       *(f"--{name}={value}" for name, value in constants.items())])
            ours = [loss for _, loss in t.read_metrics(folder)["train"]]
        worst = max(abs(a - b) for a, b in zip(ours, expected, strict=True))
        yield cells(processes, B, 32 // (B * processes), f"{ours[-1]:.6f}", f"{worst:.1e}")

class MuonSize(NamedTuple):
    """A model and a text on which Muon and AdamW are compared."""
    name: str
    fineweb: bool    # whether to train on the FineWeb stand-in instead of input.txt
    steps: int       # number of AdamW's steps
    adamw_lr: float  # AdamW's best max_lr in a grid, or the middle of two that are equally good
    muon_lr: float   # Muon's best max_lr, found in the same way
    changes: dict    # constants that differ from SMALL

MUON_SIZES = [
    MuonSize("3 x 128, input.txt", False, 400, 4e-3, 7e-3, {}),
    MuonSize("4 x 192, FineWeb", True, 250, 2e-3, 7e-3,
             dict(n_layer=4, n_head=6, n_embd=192, T=128, B=16)),
    MuonSize("6 x 256, FineWeb", True, 120, 1.5e-3, 7e-3,
             dict(n_layer=6, n_head=8, n_embd=256, T=128, B=16))]

def trained(**changes):
    """Train the quick start with these changes on one thread.

    Return (losses, validation loss at the end, median seconds per step).
    """
    torch.set_num_threads(1)
    with training_run(**QUICK | dict(dtype="float32") | changes) as run:
        torch.set_float32_matmul_precision("highest")  # no TF32
        losses, seconds = [], []
        for _ in range(run.cfg.max_steps):
            seconds.append(seconds_of(lambda: losses.append(t.train_step(run)[0].item())))
        return losses, t.validation_loss(run, run.val_loader), float(np.median(seconds))

def muon():
    """Find the share of AdamW's tokens with which Muon reaches AdamW's last validation loss."""
    yield header("size", "AdamW's steps", "AdamW's loss", "tokens that Muon needs (three seeds)",
                 "time per step, Muon / AdamW")
    with tempfile.TemporaryDirectory() as shards, ThreadPoolExecutor(2) as pool:
        output_of([sys.executable, ROOT / "fineweb.py", f"--source={TEXTS}",
                   f"--local_dir={shards}", "--encoding=bytes", "--shard_size=2000000"])
        for size in MUON_SIZES:
            changes = size.changes | (dict(data=shards) if size.fineweb else {})
            sides = [dict(optimizer="adamw", max_lr=size.adamw_lr, max_steps=size.steps)]
            sides += [dict(max_lr=size.muon_lr, max_steps=int(size.steps * part))
                      for part in (0.3, 0.5)]
            found = []
            for seed in (1, 2, 3):
                (_, goal, adamw_s), (_, at_30, muon_s), (_, at_50, _) = pool.map(
                    lambda side: measure("trained", seed=seed, **changes | side), sides)
                # Muon's loss was measured with 30 % and 50 % of the tokens. Interpolate linearly in
                # log(tokens)
                way = (at_30 - goal) / (at_30 - at_50)
                found.append((goal, 0.3 * (0.5 / 0.3) ** way, muon_s / adamw_s))
            losses, shares, times = zip(*found)
            yield cells(size.name, size.steps, f"{np.mean(losses):.4f}",
                        f"{np.mean(shares):.0%} ({min(shares):.0%}-{max(shares):.0%})",
                        f"{np.median(times):.2f}")

def saved_bytes(B, T):
    """Return the bytes that the 124M model keeps for the backward pass, including its weights."""
    kept, idx, model = {}, torch.zeros(B, T, dtype=torch.int64), t.GPT(t.GPTConfig())

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        _, loss = model(idx, idx, return_logits=False)  # while loss is alive, so is the graph
    return sum(kept.values())

def memory():
    """Find the largest power of two for B that fits into a GPU's memory.

    Memory is measured if there is a GPU; otherwise it is computed.
    """
    T, usable = 1024, 0.93  # the rest is for CUDA's context and for fragmentation
    if CUDA:
        two, four = (measure("step_side", **TIMES, B=B, T=T, total_batch_size=B * T)[2]
                     for B in (2, 4))
        row, fixed, how = (four - two) / 2, 2 * two - four, "Measured at B=2 and B=4, compiled"
    else:  # add the float32 gradients of log-probabilities and of logits to the saved tensors
        row = saved_bytes(2, T) - saved_bytes(1, T) + T * 50304 * (4 + 4)
        fixed = (16 + 2) * 124_475_904  # weights, gradients, AdamW's state, copies in bfloat16
        how = "Computed on a CPU for eager bfloat16 (a compiled model needs less)"
    yield (f"{how}. A step needs {fixed / 2**30:.2f} GiB, and {row / 2**30:.3f} GiB for each row "
           f"of {T} tokens.\n")
    yield header("GPU memory, GB", "largest B")
    for size in (12, 16, 24, 40, 80):
        yield cells(size, 2 ** int(np.log2(max(1, (size * 1e9 * usable - fixed) / row))))

# ---- guard: delays that users notice
SHORT = QUICK | dict(repeats=60, warmup=10)
LARGE = dict(T=256, B=8, total_batch_size=2048, device="cpu", repeats=4, warmup=1)  # 124M

def ready_side():
    """Return the CPU time in seconds for preparing HellaSwag's questions at the start."""
    h.DATA = QUESTIONS.resolve(strict=True)
    model = t.GPT(t.GPTConfig(n_layer=1, n_head=1, n_embd=8))
    start = time.process_time()
    h.prepare_on_all_ranks(model, h.gpt2_encode)
    return time.process_time() - start

def large_model():
    """Return a random 124M model on the CPU, and the autocast context that a run would use."""
    dtype = t.pick_dtype("auto", t.set_up_device("cpu"))
    torch.set_grad_enabled(False)
    return t.GPT(t.GPTConfig()), torch.autocast("cpu", dtype, enabled=dtype != torch.float32)

def score_side():
    """Return the seconds for scoring 101 questions: by hellaswag.py, and one at a time."""
    h.DATA = QUESTIONS.resolve(strict=True)
    model, autocast = large_model()
    examples = list(h.iterate_examples("val"))[::100]
    rendered, questions = [h.render_example(e) for e in examples], h.prepare(examples, model)
    with autocast:
        return median_seconds(
            lambda: h.evaluate(model, questions),
            lambda: [model(tokens)[0].log_softmax(-1) for _, tokens, _, _ in rendered], repeats=3)

def token_side():
    """Return the seconds for sampling a token, and for a forward pass over the same context."""
    (model, autocast), idx = large_model(), torch.randint(50257, (1, 200))
    with autocast:
        return median_seconds(lambda: model.generate(idx, 1, top_k=50), lambda: model(idx),
                              repeats=30, warmup=3)

def tokenize_side():
    """Return the seconds for tokenizing texts: with fineweb.py, and with tiktoken alone."""
    import pyarrow.parquet as pq
    files = sorted(TEXTS.resolve(strict=True).glob("*.parquet"))
    # Use each file twice, so that the start of fineweb.py is a small part of the time
    texts = [text for file in files for text in pq.read_table(file)["text"].to_pylist()] * 2
    for i, file in enumerate(files * 2):
        Path(f"{i:03d}.parquet").symlink_to(file)
    numbers, fork = itertools.count(), multiprocessing.get_context("fork").Process
    encode = t.get_encoding("gpt2").encode_ordinary

    def tiktoken_alone():  # neither texts nor tokens are passed between processes
        workers = [fork(target=lambda i=i: list(map(len, map(encode, texts[i::CORES]))))
                   for i in range(CORES)]
        for act in (fork.start, fork.join):
            list(map(act, workers))
    command = [sys.executable, ROOT / "fineweb.py", "--source=.", "--shard_size=10000000"]
    return median_seconds(lambda: output_of([*command, f"--local_dir={next(numbers)}"]),
                          tiktoken_alone, repeats=3)

def save_side(**constants):
    """Return medians over four saves and four plain writes of equal size.

    These are the seconds that training waits, the seconds of a plain write with fsync, the seconds
    until the save is verified, and its size in bytes.
    """
    with training_run(**constants) as run:
        t.train_step(run)  # creates the optimizer's state
        block, found = os.urandom(2**20), []
        for _ in range(5):
            run.state.step += 1
            stall = seconds_of(run.folder.save, run.state)
            whole = stall + seconds_of(run.folder.wait_for_save)
            size = t.path_of_newest_checkpoint(run.folder.path).stat().st_size
            blocks = [block] * (size // len(block))
            plain = seconds_of(t.write_whole, Path("plain"), lambda file: file.writelines(blocks))
            found.append((stall, plain, whole, size))
    return np.median(found[1:], axis=0).tolist()  # the first save allocates memory

def first_step_seconds():
    """Return the seconds from the start of the quick start to the line about its first step."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, started(
            COMMAND, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        for line in process.stdout:
            if re.match(r" *0/\d+ train ", line):
                return time.perf_counter() - start
    raise RuntimeError("the quick start printed no line about its first step")

def import_seconds():
    """Return the seconds that Python takes to start and to import torch, numpy and tiktoken."""
    return seconds_of(output_of, [sys.executable, "-c", "import torch, numpy, tiktoken"])

def peak_side():
    """Return the peak memory in GB of the first 40 steps of the quick start (on Linux)."""
    output_of([*COMMAND, "--max_steps=40"])
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9

def ms_of(side, **arguments):
    """Return a function that measures the milliseconds per step of step_side or plain_side."""
    return lambda: measure(side, **arguments)[0]

class Figure(NamedTuple):
    """A figure of guard(). If its sides return two numbers in total, the figure is their ratio."""
    name: str                  # the figure on record is found by this name
    rounds: int
    sides: list
    load_matters: bool = True  # whether another load on the machine changes the figure

GUARD = [
    Figure("quick start, one step: train_gpt2.py / a plain loop (ms)", 3,
           [ms_of("step_side", **SHORT), ms_of("plain_side", **SHORT)]),
    Figure("124M on a CPU, one step of 8 x 256 tokens: train_gpt2.py / a plain loop (ms)", 2,
           [ms_of("step_side", **LARGE), ms_of("plain_side", **LARGE)]),
    Figure("HellaSwag, preparing all 10,042 questions (s of CPU time)", 3,
           [partial(measure, "ready_side")], load_matters=False),
    Figure("HellaSwag, scoring 101 questions: hellaswag.py / one question at a time (s)", 1,
           [partial(measure, "score_side")]),
    Figure("tokenizing on all cores: fineweb.py / tiktoken alone (s)", 1,
           [partial(measure, "tokenize_side")]),
    Figure("saving the 124M: the delay of training / a plain write with fsync (s)", 1,
           [lambda: measure("save_side", B=1, T=256, total_batch_size=256, device="cpu")[:2]]),
    Figure("sampling from the 124M: one token / a forward pass over the same context (s)", 1,
           [partial(measure, "token_side")]),
    Figure("quick start, from the command to the first step / importing torch, numpy, tiktoken (s)",
           3, [first_step_seconds, import_seconds]),
    Figure("quick start, one step: beside as many busy processes as cores / alone (ms)", 3,
           [partial(beside_busy, CORES, ms_of("step_side", **SHORT)),
            ms_of("step_side", **SHORT)]),
    Figure("quick start, peak memory (GB)", 1, [partial(measure, "peak_side")],
           load_matters=False)]

def measured(figure):
    """Return (value, text) of a figure. The value is infinite if it takes too long to measure."""
    try:
        values = medians_in_turns(figure.rounds, *figure.sides)
    except Exception as e:  # after any error, measure the next figure
        value = np.inf if isinstance(e, TimeoutError) else np.nan
        return value, f"not measured: {t.summary_of(e)}"
    if len(values) == 1:
        return values[0], f"{values[0]:.3g}"
    ratio = values[0] / values[1]
    return ratio, f"{ratio:.3g} ({values[0]:.4g} / {values[1]:.4g})"

def recorded_figures(record):
    """Return {name: value as text} of a table that guard() has written."""
    return dict(re.findall(r"^\| ([^|]+) \| (\d[\d.e+-]*)[ |(]", record, re.M))

def guard(only, record):
    """Measure delays that users notice, and compare them with the record.

    In a row with a slash, the figure is the ratio of two times, which follow in parentheses.
    Smaller is better in every row.
    """
    before, ratios = recorded_figures(record), {}
    same_kind = f"; {kind_of_cpu()}\n" in record
    if not same_kind:
        yield "Nothing is compared: there is no record of this kind of CPU and this torch."
    used = wait_for_free_cores()
    if line := not_valid(used):
        yield f"{line} Rows that depend on the load are only measured."
    yield "\n" + header("figure", "now", "on record", "now / on record")
    for figure in GUARD:
        if not only.search(figure.name):
            continue
        value, text = measured(figure)
        compares = same_kind and not (line and figure.load_matters)
        ratio = value / float(before.get(figure.name, "nan")) if compares else np.nan
        ratios[figure.name] = ratio
        yield cells(figure.name, text, before.get(figure.name, "-"),
                    "-" if np.isnan(ratio) else f"{ratio:.2f}")
    not_compared = [name for name, ratio in ratios.items() if np.isnan(ratio)]
    worse = [name for name, ratio in ratios.items() if ratio > 1.15]
    compared = len(ratios) - len(not_compared)
    yield f"\nFigures compared: {compared} of {len(ratios)}."
    if not_compared:
        yield f"Not compared: {'; '.join(not_compared)}."
    if compared:
        yield f"More than 15 % worse than the record: {'; '.join(worse) or 'none'}."

def busy():
    """Time a step of the quick start in ms, while 0, 1 or more other processes are busy."""
    if line := not_valid(wait_for_free_cores()):
        yield f"{line}\n"
    threads = sorted({1, max(1, CORES - 1), CORES}, reverse=True)
    yield header("busy processes", *(f"OMP_NUM_THREADS={n}" for n in threads))
    for processes in sorted({0, 1, CORES}):
        sides = [partial(beside_busy, processes, ms_of("step_side", omp_threads=n, **SHORT))
                 for n in threads]
        yield cells(processes, *(f"{ms:.1f}" for ms in medians_in_turns(3, *sides)))

# ---- gpu: a session on a GPU. Without a GPU, run a tiny version of each part, to test the session
SIZE = dict(B=64, T=1024) if CUDA else dict(B=4, T=64, n_layer=2, n_head=2, n_embd=48)
# A step that has one micro-step, as on each of eight GPUs
ONE = SIZE | dict(total_batch_size=SIZE["B"] * SIZE["T"])
# Spreading Muon's products over the ranks is not timed here, because this needs several GPUs, and
# Muon.step() would have to gather every matrix. It could save 7/8 of Muon's time
SWITCHES = {"unchanged": {},
            "coordinate descent tuning": dict(tune=True, compile=False),
            "the next batch is read before the loss": dict(ahead=True),
            "the loss is read one step late": dict(late=True),
            "unchanged, again": {}}

def save_rows():
    """Yield a line about the time that a save takes."""
    stall, plain, whole, size = measure("save_side", **ONE)
    yield (f"\nA save of {size / 1e9:.2f} GB delays training by {stall:.3f} s. It is on disk and "
           f"verified after {whole:.1f} s. A plain write with fsync takes {plain:.2f} s.")

def loss_rows():
    """Yield lines that compare the quick start's losses on this device with those on the CPU."""
    expected, *_ = measure("trained", max_steps=20)
    for dtype, compiled in (("float32", False), ("auto", False), ("auto", True)):
        ours, *_ = measure("trained", max_steps=20, device=DEVICE, dtype=dtype, compile=compiled)
        worst = max(abs(a - b) for a, b in zip(ours, expected, strict=True))
        yield (f"Losses with dtype={dtype} and compile={compiled} differ from the CPU's in float32 "
               f"by at most {worst:.1e}. The last is {ours[-1]:.4f}, the CPU's {expected[-1]:.4f}.")

def duties_side(**constants):
    """Return the seconds of a step, a validation, a HellaSwag score and a sample.

    Validation and HellaSwag have the size of the share of one of eight processes.
    """
    tokens, n = (t.Config.val_tokens // 8, h.TOTAL // 8) if CUDA else (1024, 8)
    # As in HellaSwag, contexts have 45 tokens on average, and endings have 29
    h.iterate_examples = lambda split: [
        {"ctx": "a" * (10 + i % 71), "endings": ["b" * (5 + i % 49)] * 4, "label": 0}
        for i in range(n)]
    with training_run(**constants, val_tokens=tokens, hellaswag_every=250) as run:
        duties = (lambda: t.validation_loss(run, run.val_loader), lambda: t.hellaswag_score(run),
                  lambda: t.print_sample(run))
        return [*median_seconds(lambda: t.gather_from_ranks(*t.train_step(run), False), **TIMES),
                *median_seconds(*duties, repeats=3, warmup=1)]

def duty_rows():
    """Yield a table of the time that validation, HellaSwag, samples and saves add to the steps."""
    step, *seconds = [*measure("duties_side", **ONE), measure("save_side", **ONE)[0]]
    c, total = t.Config, 0
    every = {"validation": c.eval_every, "HellaSwag": c.hellaswag_every, "sample": c.sample_every,
             "save": c.save_every}
    yield "\n" + header("on 8 GPUs, besides the steps", "s", "times in 250 steps",
                        "time added to the steps")
    for (name, n), s in zip(every.items(), seconds):
        total += s / (n * step)
        yield cells(name, f"{s:.3f}", f"{250 / n:g}", f"{s / (n * step):.2%}")
    yield cells(f"all, with steps of {step * 1e3:.1f} ms", "", "", f"{total:.2%}")

def test_rows():
    """Yield the output of the project's tests, without a line for each test that passes."""
    tests = ["tests", "--device=cuda"] if CUDA else ["tests/test_data.py"]
    command = ["timeout", f"{max(1, limits.seconds_left()):.0f}", sys.executable, "-m", "pytest",
               "-v", "-rs", "--tb=short", *tests]
    with started(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        # -v names a failed test at once, even if the time is over before the tests end
        yield from (line.rstrip() for line in process.stdout
                    if not re.search(r"::.* (PASSED|SKIPPED)", line))
        if process.wait() == 124:
            raise TimeoutError("the session's time was over before the tests ended")

def gpu(only, minutes):
    """Measure a session on a GPU, the most important figures first.

    The last line names the parts that could not be measured.
    """
    limits.end = time.monotonic() + 60 * minutes
    limits.command_s = max(60, 60 * minutes / 9)
    muon_variants = {"one micro-step, AdamW": {},
                     "one micro-step, Muon": dict(optimizer="muon")}
    parts = {"default": step_table({"unchanged": {}}, **SIZE, total=524288 if CUDA else 2048),
             "ladder": ladder(**SIZE | dict(B=16 if CUDA else 4)),
             "muon": step_table(muon_variants, **SIZE),
             "save": save_rows(),
             "losses": loss_rows(),
             "switches": step_table(SWITCHES, **SIZE),
             "duties": duty_rows(),
             "tests": test_rows()}
    left_out = []
    for name in filter(only.search, parts):
        try:
            yield from parts[name]
        except Exception as e:  # after any error, run the next part
            left_out.append(f"{name} ({t.summary_of(e)})")
    yield f"\nLeft out: {'; '.join(left_out) or 'nothing'}."

# ---- the command line
def title(name, bench):
    """Return the first lines of a benchmark's output: what it does, the time and the machine."""
    gpu_name = torch.cuda.get_device_name() if CUDA else "no GPU"
    return (f"# {name}: {inspect.getdoc(bench)}\n\n{time.strftime('%F %R')}; Python "
            f"{sys.version.split()[0]}; {gpu_name}; {kind_of_cpu()}\n")

def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("which", choices=("guard", "gpu", "all", *BENCHES))
    parser.add_argument("--save", metavar="FOLDER", type=Path, help="also write FOLDER/<bench>.txt")
    parser.add_argument("--minutes", type=float, default=45, help="length of the session of gpu")
    parser.add_argument("--only", metavar="REGEX", type=re.compile, default="",
                        help="measure only these rows of guard, or parts of gpu; the file is "
                             "appended to")
    args, failed = parser.parse_args(), []
    path = ROOT / "tests" / "measured" / "guard.txt"
    record = path.read_text() if path.exists() else ""  # read it now, since --save may replace it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # lets started() kill its process
    for name in BENCHES if args.which == "all" else [args.which]:
        path = args.save / f"{name}.txt" if args.save else Path(os.devnull)
        path.parent.mkdir(parents=True, exist_ok=True)
        arguments = {"guard": [args.only, record], "gpu": [args.only, args.minutes]}.get(name, [])
        bench = globals()[name]
        with open(path, "a" if args.only.pattern else "w") as file:
            try:
                for line in itertools.chain([title(name, bench)], bench(*arguments)):
                    for place in (sys.stdout, file):
                        print(line, file=place, flush=True)
            except Exception:  # after any error, run the next benchmark
                traceback.print_exc()
                failed.append(name)
    sys.exit(f"bench.py: failed: {', '.join(failed)}" if failed else 0)

if __name__ == "__main__":
    main()
