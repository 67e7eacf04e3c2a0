"""Benchmarks: both sides in one run, medians, a ratio. Nothing here asserts a time.

    python tests/bench.py guard                        # what users feel, beside the record
    python tests/bench.py guard --save=tests/measured  # ... which is made anew
    python tests/bench.py gpu --minutes=45 --save=DIR  # a sitting on a GPU, most wanted first
    python tests/bench.py all --save=DIR               # step ladder memory reference muon

Each row is printed, and written to DIR/<bench>.txt, as soon as it is measured. What fails says so,
and the next row or bench runs. Where memory is short, B is halved.
"""
import argparse
import contextlib
import ctypes
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
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("GPT2_SHARED", ROOT.parent / "shared"))
sys.path.insert(0, str(ROOT))
import train_gpt2 as t  # noqa: E402, before torch: it says how long OpenMP's threads spin
import hellaswag as h  # noqa: E402
import torch  # noqa: E402

BENCHES = "step ladder memory reference muon".split()
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
QUESTIONS, TEXTS = SHARED / "hellaswag" / "hellaswag_val.jsonl", SHARED / "fineweb_standin"
QUICK = t.SMALL | dict(data=str(ROOT / "input.txt"), device="cpu")  # the first command
COMMAND = [sys.executable, ROOT / "train_gpt2.py", "--device=cpu"]  # the same from outside
TIMES = dict(repeats=20, warmup=5) if CUDA else dict(repeats=4, warmup=1)
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312}  # bfloat16
END, ROW_SECONDS = np.inf, 600  # when gpu() has to stop, what one of its measurements may take

# ---- measuring
def cells(*values):
    return f"| {' | '.join(map(str, values))} |"

def header(*names):
    return f"{cells(*names)}\n{cells(*['---'] * len(names))}"

def kind_of_cpu():  # which a record's ratios hold for
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"model name\s*: (.*)", text)
    able = [flag for flag in ("amx_bf16", "avx512_bf16") if torch.cpu.get_capabilities().get(flag)]
    return (f"{CORES} cores of {name[1] if name else os.uname().machine} with "
            f"{' '.join(able) or 'no bfloat16'}, torch {torch.__version__}")

def seconds_of(function, *arguments):
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start

def in_turns(rounds, *sides):  # medians of what they return, a number or more each
    found = [np.hstack([side() for side in sides]) for _ in range(rounds)]
    return np.median(found, axis=0).tolist()

def median_seconds(*functions, repeats, warmup=0):
    for function in functions * warmup:
        function()
    return in_turns(repeats, *(partial(seconds_of, function) for function in functions))

@contextlib.contextmanager
def started(command, **options):  # a process that ends with this context, and its own too
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux: nor a bench that kill -9 ends
    process = subprocess.Popen(command, text=True, start_new_session=True, **options,
                               preexec_fn=prctl and (lambda: prctl(1, signal.SIGKILL)))
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

def output_of(command, **options):
    """What a command printed. RuntimeError if it failed, TimeoutError if time was over."""
    limit = max(0, min(ROW_SECONDS, END - time.monotonic()))
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        try:
            output, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{limit:.0f} s were not enough") from None
    if process.returncode != 0:
        raise RuntimeError(f"exit status {process.returncode}: {errors.strip()[-2000:]}")
    return output

def measure(function, **arguments):  # of this file, in a fresh process and an empty folder
    code = (f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import bench, json; "
            f"print(json.dumps(bench.{function}(**{arguments!r})))")
    with tempfile.TemporaryDirectory() as folder:
        try:
            return json.loads(output_of([sys.executable, "-c", code], cwd=folder).splitlines()[-1])
        except RuntimeError as e:
            memory = re.search("out of memory|OutOfMemory|allocate memory|status -9", str(e))
            raise (MemoryError if memory else RuntimeError)(str(e).splitlines()[-1]) from e

# ---- the step
def random_encoding(name):  # of GPT-2's size, without a file: each byte is a token
    ranks = {bytes([i]): i for i in range(256)}
    ranks |= {bytes([255, *divmod(i, 256)]): i for i in range(256, 50256)}
    return t.tiktoken.Encoding(name=name, pat_str=r"[\s\S]", mergeable_ranks=ranks,
                               special_tokens={"<|endoftext|>": 50256})

@contextlib.contextmanager
def training_run(**constants):  # on random tokens, without a vocabulary, if no data is named
    if "data" not in constants:
        t.get_encoding = random_encoding
        tokens = np.random.default_rng(0).integers(0, 50257, 2**21, dtype=np.uint16)
        for split in ("val", "train"):
            np.save(f"random_{split}_000000.npy", tokens)
    cfg = t.Config(**dict(data=".", hellaswag_every=0, device=DEVICE) | constants)
    t.check_config(cfg)
    run = t.set_up(cfg, t.pick_device(cfg.device))
    with run.folder.thread:  # whose end waits for a save
        yield run

def naive_attention(q, k, v, dropout_p=0.0, is_causal=True):  # every (T, T) matrix in memory
    future = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.mT / q.size(-1) ** 0.5
    return torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ v

def plain_losses(model, cfg, loader):  # of a plain loop around transformers' GPT-2, on a CPU
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
    """ms, tok/s, peak memory and MFU of a step; FLOPs a token are 6 N + 12 layers * width * T."""
    tokens, parameters = cfg.total_batch_size, sum(p.numel() for p in model.parameters())
    flops = tokens * (6 * parameters + 12 * cfg.n_layer * cfg.n_embd * cfg.T)
    memory = (torch.cuda.max_memory_allocated() if CUDA
              else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    gpu = torch.cuda.get_device_name() if CUDA else ""
    peak = next((tflops * 1e12 for name, tflops in PEAK_TFLOPS.items() if name in gpu), np.nan)
    return seconds * 1e3, tokens / seconds, memory, flops / seconds / peak

def plain_side(repeats, warmup, **constants):  # eager, float32, AdamW, logits returned
    import transformers
    t.keep_freed_memory = lambda: None  # memory, too, is as they have it
    with training_run(**constants | dict(dtype="float32")) as run:  # for its rows
        cfg, run.state, run.ddp_model = run.cfg, None, None
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=run.encoding.n_vocab, n_positions=cfg.T, n_layer=cfg.n_layer,
            n_head=cfg.n_head, n_embd=cfg.n_embd, activation_function="gelu_pytorch_tanh"))
        losses = plain_losses(model, cfg, run.train_loader)
        [seconds] = median_seconds(lambda: next(losses), repeats=repeats, warmup=warmup)
        return figures_of(seconds, cfg, model)

def step_side(repeats, warmup, fused=True, logits=False, flash=True, tf32=True, padded=True,
              tune=False, ahead=False, late=False, **constants):
    """A step of ours, with rungs of the ladder taken away, or with some of SWITCHES."""
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
        if not fused:  # AdamW as `foreach` has it, torch's default on GPUs
            for group in run.state.optimizers[0].param_groups:
                group |= dict(fused=False, foreach=True)
        if logits:  # hand them out although nobody asked: what many scripts do
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
                t.over_all_processes(run, *waiting.pop(0))  # waits for the GPU
        [seconds] = median_seconds(one_step, repeats=repeats, warmup=warmup)
        return figures_of(seconds, run.cfg, model)

def side_rows(sides, B, T, total=None, **more):
    """A table with a row for each of {name: what it changes}; B is halved until there is room."""
    yield "\n" + header("side", "ms", "ratio to first", "to row above", "tok/s", "peak GiB", "MFU")
    first = before = None
    size = dict(B=B, T=T, total_batch_size=total or B * T) | TIMES | more
    for name, changes in sides.items():
        try:
            ms, tokens, memory, mfu = measure(
                "plain_side" if "transformers" in name else "step_side", **size | changes)
        except MemoryError:
            yield cells(name, f"out of memory with B={B}")
            return (yield from side_rows(sides, B // 2, T, total, **more))
        except (RuntimeError, TimeoutError) as e:  # the next row is measured
            yield cells(name, f"left out: {t.first_line(e)}")
            continue
        first, before = first or ms, before or ms
        yield cells(name, f"{ms:.4g}", f"{first / ms:.3f}x", f"{before / ms:.3f}x",
                    f"{tokens:,.0f}", f"{memory / 2**30:.2f}", f"{mfu:.1%}".replace("nan%", "-"))
        before = ms

def step():
    """Our step against a plain script's: eager, foreach AdamW, logits that nobody uses."""
    plain = {} if CUDA else {"a plain loop around transformers' GPT-2, float32": {}}
    ours = {"plain: eager, foreach AdamW, logits returned": dict(fused=False, logits=True),
            "fused AdamW": dict(logits=True), "no logits returned: ours on a CPU": {},
            "compiled, but logits returned": dict(compile="True", logits=True),
            "compiled: ours on a GPU": dict(compile="True")}
    return side_rows(plain | ours, B=64 if CUDA else 8, T=1024 if CUDA else 256,
                     dtype="bfloat16", compile="False")

def ladder(B=16 if CUDA else 2, T=1024 if CUDA else 256, **more):
    """The lecture that reproduces GPT-2, rung by rung; ms: on its A100, 16 rows of 1024."""
    rungs = {"fp32 (1000 ms)": dict(dtype="float32", compile="False", fused=False, flash=False,
                                    tf32=False, padded=False, logits=True),
             "TF32 (333 ms)": dict(tf32=True), "bf16 (300 ms)": dict(dtype="bfloat16"),
             "compile (130 ms)": dict(compile="True"), "flash attention (96 ms)": dict(flash=True),
             "vocab 50304 (93 ms)": dict(padded=True), "fused AdamW (90 ms)": dict(fused=True),
             "loss alone": dict(logits=False)}
    so_far = itertools.accumulate(rungs.values(), dict.__or__)
    return side_rows(dict(zip(rungs, so_far)), B, T, **more)

# ---- the script as it is: its losses, its optimizers, its memory
def reference():
    """Our losses against a plain loop's around transformers' GPT-2: 1 and 2 processes, any B."""
    import transformers
    changes = dict(optimizer="adamw", max_lr=1e-3, max_steps=20, dtype="float32", eval_every=0,
                   sample_every=0, save_every=0)
    cfg = t.Config(**QUICK | changes)
    encoding = t.get_encoding(cfg.encoding)
    loader, _ = t.open_data(cfg, encoding)
    with tempfile.TemporaryDirectory() as folder:
        t.save_hugging_face(t.build_model(cfg, encoding), folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = list(itertools.islice(plain_losses(model, cfg, loader), cfg.max_steps))
    yield f"{cfg.max_steps} steps of 2,048 tokens in float32; the log has six digits\n"
    yield header("processes", "B", "micro-steps", "last loss", "largest difference of a loss")
    for processes, B in ((1, 32), (1, 4), (2, 16), (2, 2)):
        with tempfile.TemporaryDirectory() as folder:
            constants = changes | dict(B=B, log_dir=folder)
            output_of([sys.executable, "-m", "torch.distributed.run", "--standalone",
                       f"--nproc_per_node={processes}", *COMMAND[1:],
                       *(f"--{name}={value}" for name, value in constants.items())])
            ours = [loss for _, loss in t.read_streams(folder)["train"]]
        worst = max(abs(a - b) for a, b in zip(ours, expected, strict=True))
        yield cells(processes, B, 32 // (B * processes), f"{ours[-1]:.6f}", f"{worst:.1e}")

# Steps of AdamW, its max_lr and Muon's (best of a grid, or between two equal), what differs
SIZES = {
    "3 x 128, input.txt": (400, 4e-3, 7e-3, {}),
    "4 x 192, FineWeb": (250, 2e-3, 7e-3, dict(n_layer=4, n_head=6, n_embd=192, T=128, B=16)),
    "6 x 256, FineWeb": (120, 1.5e-3, 7e-3, dict(n_layer=6, n_head=8, n_embd=256, T=128, B=16))}

def trained(**changes):  # losses, validation's at the end, seconds of a step, one thread
    torch.set_num_threads(1)
    with training_run(**QUICK | dict(dtype="float32") | changes) as run:
        torch.set_float32_matmul_precision("highest")  # no TF32
        losses, seconds = [], []
        for _ in range(run.cfg.max_steps):
            seconds.append(seconds_of(lambda: losses.append(t.train_step(run)[0].item())))
        return losses, t.validation_loss(run, run.val_loader), float(np.median(seconds))

def muon():
    """The share of AdamW's tokens with which Muon comes to the loss where AdamW ends."""
    yield header("size", "AdamW's steps", "its loss", "Muon's share of them", "its step / AdamW's")
    with tempfile.TemporaryDirectory() as shards, ThreadPoolExecutor(2) as pool:
        output_of([sys.executable, ROOT / "fineweb.py", f"--source={TEXTS}",
                   f"--local_dir={shards}", "--encoding=bytes", "--shard_size=2000000"])
        for name, (steps, adamw_lr, muon_lr, size) in SIZES.items():
            size = size | (dict(data=shards) if "FineWeb" in name else {})
            sides, found = [dict(optimizer="adamw", max_lr=adamw_lr, max_steps=steps)], []
            sides += [dict(max_lr=muon_lr, max_steps=int(steps * part)) for part in (0.3, 0.5)]
            for seed in (1, 2, 3):  # AdamW beside Muon's two runs
                (_, goal, adamw_s), (_, at_30, muon_s), (_, at_50, _) = pool.map(
                    lambda side: measure("trained", seed=seed, **size | side), sides)
                way = (at_30 - goal) / (at_30 - at_50)  # the loss is linear in log(tokens)
                found.append((goal, 0.3 * (0.5 / 0.3) ** way, muon_s / adamw_s))
            losses, shares, times = zip(*found)
            yield cells(name, steps, f"{np.mean(losses):.4f}",
                        f"{np.mean(shares):.0%} ({min(shares):.0%}-{max(shares):.0%})",
                        f"{np.median(times):.2f}")

def saved_bytes(B, T):  # by a forward pass of the 124M in eager bfloat16, weights among them
    kept, idx, model = {}, torch.zeros(B, T, dtype=torch.int64), t.GPT(t.GPTConfig())

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        _, loss = model(idx, idx, return_logits=False)  # alive, or nothing would be kept
    return sum(kept.values())

def memory():
    """The largest power of two for B in a GPU's memory: measured on one, else computed."""
    T, usable = 1024, 0.93  # the rest is CUDA's context and fragments
    if CUDA:
        two, four = (measure("step_side", **TIMES, B=B, T=T, total_batch_size=B * T)[2]
                     for B in (2, 4))
        row, fixed, how = (four - two) / 2, 2 * two - four, "measured at B = 2 and 4, compiled"
    else:  # beside what is saved, gradients of log-probabilities and of logits, in float32
        row = saved_bytes(2, T) - saved_bytes(1, T) + T * 50304 * (4 + 4)
        fixed = (16 + 2) * 124_475_904  # weights, gradients, AdamW's state, bfloat16 copies
        how = "computed for eager bfloat16; compiled needs less"
    yield f"{how}: {fixed / 2**30:.2f} GiB + {row / 2**30:.3f} GiB a row of {T} tokens\n"
    yield header("GPU memory, GB", "largest B")
    for size in (12, 16, 24, 40, 80):
        yield cells(size, 2 ** int(np.log2(max(1, (size * 1e9 * usable - fixed) / row))))

# ---- guard: what users feel
def ready_side():  # CPU seconds that a start spends on HellaSwag's questions
    h.DATA = QUESTIONS.resolve(strict=True)
    model = t.GPT(t.GPTConfig(n_layer=1, n_head=1, n_embd=8))
    start = time.process_time()
    h.prepare_for_training(model, h.gpt2_encode)
    return time.process_time() - start

def large_model():  # a random 124M on the CPU, and the context that it runs in
    dtype = t.pick_dtype("auto", t.pick_device("cpu"))
    torch.set_grad_enabled(False)
    return t.GPT(t.GPTConfig()), torch.autocast("cpu", dtype, enabled=dtype != torch.float32)

def score_side():  # seconds of a score, and of the plain way: one by one, with all logits
    h.DATA, (model, autocast) = QUESTIONS.resolve(strict=True), large_model()
    examples = list(h.iterate_examples("val"))[::100]
    rendered, questions = [h.render_example(e) for e in examples], h.prepare(examples, model)
    with autocast:
        return median_seconds(
            lambda: h.evaluate(model, questions),
            lambda: [model(tokens)[0].log_softmax(-1) for _, tokens, _, _ in rendered], repeats=3)

def token_side():  # seconds of a sampled token of the 124M, and of a pass over its context
    (model, autocast), idx = large_model(), torch.randint(50257, (1, 200))
    with autocast:
        return median_seconds(lambda: model.generate(idx, 1, top_k=50), lambda: model(idx),
                              repeats=30, warmup=3)

def tokenize_side():  # seconds of fineweb.py, start to end, and of bare tiktoken on all cores
    import pyarrow.parquet as pq
    files = sorted(TEXTS.resolve(strict=True).glob("*.parquet"))
    texts = [text for file in files for text in pq.read_table(file)["text"].to_pylist()] * 2
    for i, file in enumerate(files * 2):  # so starting weighs little
        Path(f"{i:03d}.parquet").symlink_to(file)
    numbers, fork = itertools.count(), multiprocessing.get_context("fork").Process
    encode = t.get_encoding("gpt2").encode_ordinary
    def bare():  # neither text nor tokens travel
        workers = [fork(target=lambda i=i: list(map(len, map(encode, texts[i::CORES]))))
                   for i in range(CORES)]
        for act in (fork.start, fork.join):
            list(map(act, workers))
    command = [sys.executable, ROOT / "fineweb.py", "--source=.", "--shard_size=10000000"]
    return median_seconds(lambda: output_of([*command, f"--local_dir={next(numbers)}"]), bare,
                          repeats=3)

def save_side(**constants):  # seconds that training waits, of a plain write, of all; bytes
    with training_run(**constants) as run:
        t.train_step(run)  # makes the optimizer's state
        block, found = os.urandom(2**20), []
        for _ in range(5):
            run.state.step += 1
            stall = seconds_of(run.folder.save, run.state)
            whole = stall + seconds_of(run.folder.wait_until_saved, run.state.step)
            size = t.newest_checkpoint(run.folder.path).stat().st_size
            blocks = [block] * (size // len(block))
            plain = seconds_of(t.write_whole, Path("plain"), lambda file: file.writelines(blocks))
            found.append((stall, plain, whole, size))
    return np.median(found[1:], axis=0).tolist()

def first_step_seconds():
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, started(
            COMMAND, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        for line in process.stdout:
            if re.match(r" *0/\d+ train ", line):
                return time.perf_counter() - begin
    raise RuntimeError("no step's line")

def beside_busy(function):  # function() while other processes keep every core busy
    with contextlib.ExitStack() as others:
        for _ in range(CORES):
            others.enter_context(started([sys.executable, "-c", "while True: pass"]))
        return function()

def peak_side():  # GB that the first command, made short, has at most
    output_of([*COMMAND, "--max_steps=40"])
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9  # on Linux

def ms_of(side, **arguments):
    return lambda: measure(side, **arguments)[0]

SHORT = QUICK | dict(repeats=60, warmup=10)
LARGE = dict(T=256, B=8, total_batch_size=2048, device="cpu", repeats=4, warmup=1)
GUARD = {  # rounds, and one or two sides; of two, their ratio is the figure
    "ms of the quick start's step / of a plain loop's":
        (3, ms_of("step_side", **SHORT), ms_of("plain_side", **SHORT)),
    "ms of the 124M's step, 8 x 256 tokens / of a plain loop's":
        (2, ms_of("step_side", **LARGE), ms_of("plain_side", **LARGE)),
    "CPU s to get HellaSwag's 10,042 questions ready": (3, partial(measure, "ready_side")),
    "s of HellaSwag's score, 101 questions / one at a time": (1, partial(measure, "score_side")),
    "s to tokenize, fineweb.py / bare tiktoken, all cores": (1, partial(measure, "tokenize_side")),
    "s that training waits for a save of the 124M / of a plain write with fsync":
        (1, lambda: measure("save_side", B=1, T=256, total_batch_size=256, device="cpu")[:2]),
    "s of a sampled token, 124M / a pass over its context": (1, partial(measure, "token_side")),
    "s from the quick start's command to its first step / to import torch, numpy, tiktoken":
        (3, first_step_seconds, partial(seconds_of, output_of, [
            sys.executable, "-c", "import torch, numpy, tiktoken"])),
    "ms of the quick start's step beside as many busy processes as cores / alone":
        (3, partial(beside_busy, ms_of("step_side", **SHORT)), ms_of("step_side", **SHORT)),
    "GB of peak memory of the first command": (1, partial(measure, "peak_side"))}

def guard(only, record):
    """What users feel, each figure beside the one on record. Smaller is better for every figure."""
    same_kind, load, ratios = f"; {kind_of_cpu()}\n" in record, os.getloadavg()[0] / CORES, {}
    before = dict(re.findall(r"^\| ([^|]+) \| ([\d.e+-]+)[ |(]", record, re.M))
    if not same_kind:
        yield "Measured only, not compared: the record is of another kind of CPU, or there is none."
    if load > 0.5:
        yield f"The load is {load:.1f} a core: figures that it changes are not compared."
    yield "\n" + header("figure", "now", "on record", "ratio now/record")
    for name in filter(only.search, GUARD):
        try:
            sides = in_turns(*GUARD[name])
            now = sides[0] / sides[1] if sides[1:] else sides[0]
            shown = f"{now:.3g}" + (f" ({sides[0]:.4g} / {sides[1]:.4g})" if sides[1:] else "")
        except Exception as e:  # whatever it is, the next row is measured
            now = np.inf if isinstance(e, TimeoutError) else np.nan  # worse than any record
            shown = f"not measured: {t.first_line(e)}"
        same = same_kind and (load <= 0.5 or name.startswith(("CPU s", "GB")))  # load changes not
        ratios[name] = ratio = now / float(before.get(name, "nan")) if same else np.nan
        yield cells(name, shown, before.get(name, "-"), "-" if np.isnan(ratio) else f"{ratio:.2f}")
    not_compared = [name for name, ratio in ratios.items() if np.isnan(ratio)]
    worse = [name for name, ratio in ratios.items() if ratio > 1.15]
    yield f"\nNot compared: {'; '.join(not_compared) or 'none'}."
    yield f"Of {len(ratios) - len(not_compared)} compared, " + (
        f"more than 15 % worse: {'; '.join(worse)}." if worse else "none is more than 15 % worse.")

# ---- gpu: a sitting. Without a GPU a tiny version of each row runs, to try the sitting itself
SIZE = dict(B=64, T=1024) if CUDA else dict(B=4, T=64, n_layer=2, n_head=2, n_embd=48)
ONE = SIZE | dict(total_batch_size=SIZE["B"] * SIZE["T"])  # one micro-step, as on each of 8 GPUs
# Not among them: Muon's products spread over the ranks. It takes several GPUs to time it, and a
# gather of every matrix in Muon.step(); at most, 7/8 of Muon's share of a step would go.
SWITCHES = {"as it comes": {}, "coordinate descent tuning": dict(tune=True, compile="False"),
            "next batch fetched before the loss is read": dict(ahead=True),
            "figures read one step late": dict(late=True), "as it comes, again": {}}

def save_rows():
    stall, plain, whole, size = measure("save_side", **ONE)
    yield (f"\na save: training waits {stall:.3f} s for {size / 1e9:.2f} GB, a plain write with "
           f"fsync takes {plain:.2f} s; on the disk and verified after {whole:.1f} s")

def loss_rows():
    expected, *_ = measure("trained", max_steps=20)  # of the quick start
    for dtype, compiled in (("float32", "False"), ("auto", "False"), ("auto", "True")):
        ours, *_ = measure("trained", max_steps=20, device=DEVICE, dtype=dtype, compile=compiled)
        worst = max(abs(a - b) for a, b in zip(ours, expected, strict=True))
        yield (f"losses, dtype={dtype} compile={compiled}: at most {worst:.1e} from the CPU's in "
               f"float32; the last is {ours[-1]:.4f}, the CPU's {expected[-1]:.4f}")

def duties_side(**constants):  # seconds of a step, and of duties as one rank of 8 has them
    tokens, n = (t.Config.val_tokens // 8, h.TOTAL // 8) if CUDA else (1024, 8)
    h.iterate_examples = lambda split: [  # as long as HellaSwag's: 45 and 29 tokens
        {"ctx": "a" * (10 + i % 71), "endings": ["b" * (5 + i % 49)] * 4, "label": 0}
        for i in range(n)]
    with training_run(**constants, val_tokens=tokens, hellaswag_every=250) as run:
        duties = (lambda: t.validation_loss(run, run.val_loader), lambda: t.hellaswag_score(run),
                  lambda: t.print_sample(run))
        return [*median_seconds(lambda: t.over_all_processes(run, *t.train_step(run)), **TIMES),
                *median_seconds(*duties, repeats=3, warmup=1)]

def duty_rows():
    step, *seconds = [*measure("duties_side", **ONE), measure("save_side", **ONE)[0]]
    c, total = t.Config, 0
    every = {"validation": c.eval_every, "HellaSwag": c.hellaswag_every, "a sample": c.sample_every,
             "a save": c.save_every}
    yield "\n" + header("8 GPUs, outside of steps", "s", "times in 250 steps", "share of them")
    for (name, n), s in zip(every.items(), seconds):
        total += s / (n * step)
        yield cells(name, f"{s:.3f}", f"{250 / n:g}", f"{s / (n * step):.2%}")
    yield cells(f"all, beside steps of {step * 1e3:.1f} ms", "", "", f"{total:.2%}")

def test_rows():
    command = ["timeout", f"{max(1, END - time.monotonic()):.0f}", sys.executable, "-m", "pytest",
               "-q", "-rs", "--tb=short", "tests" if CUDA else "tests/test_data.py"]
    with started(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        yield from map(str.rstrip, process.stdout)
        if process.wait() == 124:
            raise TimeoutError("time was over before their end")

def gpu(only, minutes):
    """A sitting on a GPU, most wanted first; its end says what it left out."""
    global END, ROW_SECONDS
    END, ROW_SECONDS, left_out = time.monotonic() + 60 * minutes, max(60, 60 * minutes / 9), []
    muon = {"one micro-step, AdamW": {}, "Muon: 1 - ratio is its share": dict(optimizer="muon")}
    parts = {"default": side_rows({"as it comes": {}}, **SIZE, total=524288 if CUDA else 2048),
             "ladder": ladder(**SIZE | dict(B=16 if CUDA else 4)), "muon": side_rows(muon, **SIZE),
             "save": save_rows(), "losses": loss_rows(), "switches": side_rows(SWITCHES, **SIZE),
             "duties": duty_rows(), "tests": test_rows()}
    for name in filter(only.search, parts):
        try:
            yield from parts[name]
        except Exception as e:  # whatever it is, the next part runs
            left_out.append(f"{name} ({t.first_line(e)})")
    yield f"\nLeft out: {'; '.join(left_out) or 'nothing'}."

def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("which", choices=("guard", "gpu", "all", *BENCHES))
    parser.add_argument("--save", metavar="FOLDER", type=Path, help="also write FOLDER/<bench>.txt")
    parser.add_argument("--minutes", type=float, default=45)
    parser.add_argument("--only", metavar="save|step", type=re.compile, default="",
                        help="rows of guard, parts of gpu; the file is appended to")
    args, failed = parser.parse_args(), []
    path = ROOT / "tests" / "measured" / "guard.txt"
    record = path.read_text() if path.exists() else ""  # now, since it may be made anew
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that started() ends its process
    for name in BENCHES if args.which == "all" else [args.which]:
        path = args.save / f"{name}.txt" if args.save else Path(os.devnull)
        path.parent.mkdir(parents=True, exist_ok=True)
        more = {"guard": [args.only, record], "gpu": [args.only, args.minutes]}.get(name, [])
        bench, gpu_name = globals()[name], torch.cuda.get_device_name() if CUDA else "no GPU"
        title = (f"# {name}: {' '.join(bench.__doc__.split())}\n\n{time.strftime('%F %R')}; Python "
                 f"{sys.version.split()[0]}; {gpu_name}; {kind_of_cpu()}\n")
        with open(path, "a" if args.only.pattern else "w") as file:
            try:
                for line in itertools.chain([title], bench(*more)):
                    for place in (sys.stdout, file):
                        print(line, file=place, flush=True)
            except Exception:  # whatever it is, the next bench runs
                traceback.print_exc()
                failed.append(name)
    sys.exit(f"bench.py: failed: {', '.join(failed)}" if failed else 0)

if __name__ == "__main__":
    main()
