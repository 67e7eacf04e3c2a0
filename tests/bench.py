"""Benchmarks: both sides in one run, medians, a ratio. Nothing here asserts a time.

    python tests/bench.py step                         # one bench
    python tests/bench.py all --save=tests/measured    # all, a file for each

A bench that fails says so, and the next one runs. Where memory is short, B is halved on all sides.
"""
import argparse
import contextlib
import io
import itertools
import json
import math
import multiprocessing
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("GPT2_SHARED", ROOT.parent / "shared"))
sys.path.insert(0, str(ROOT))
import hellaswag as h  # noqa: E402
import train_gpt2 as t  # noqa: E402

BENCHES = "reference quick_start step ladder memory save tokenize hellaswag muon".split()
SITTING = {  # what to run where a GPU is at hand for 45 minutes: its minutes at most, its command
    "tests": (7, "-m pytest -q -rs {root}/tests"), "first_run": (3, "{root}/train_gpt2.py"),
    **{name: (5, f"{{root}}/tests/bench.py {name}")
       for name in ("step", "ladder", "memory", "hellaswag", "save")},
    "adamw": (3, "{root}/train_gpt2.py {flags} --warmup_steps=20 --optimizer=adamw --log_dir=adam"),
    "muon": (3, "{root}/train_gpt2.py {flags} --warmup_steps=20 --optimizer=muon --log_dir=muon")}
CUDA = torch.cuda.is_available()
TEXTS = []  # what tokenize() tokenizes; its forked workers have it, too


# ----------------------------------------------------------------------------- measuring
def table(header, rows):
    for cells in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(map(str, cells))} |")


def machine():
    """One line that says when, where and with what the figures were measured."""
    cpu, path = platform.machine(), Path("/proc/cpuinfo")
    if path.exists() and "model name" in path.read_text():
        cpu = path.read_text().split("model name")[1].splitlines()[0].strip("\t :")
    return (f"{time.strftime('%Y-%m-%d %H:%M')}; "
            f"{torch.cuda.get_device_name() if CUDA else 'no GPU'}; {os.cpu_count()} cores of "
            f"{cpu}; Python {platform.python_version()}; torch {torch.__version__}")


def seconds_of(function, *arguments):
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def median_seconds(functions, repeats, warmup=0):
    rounds = [[seconds_of(f) for f in functions] for _ in range(warmup + repeats)]
    return [statistics.median(seconds) for seconds in zip(*rounds[warmup:])]


def measure(function, **arguments):
    """function(**arguments) of this file in a fresh process. MemoryError if memory ran out."""
    code = f"import bench, json; print(json.dumps(bench.{function}(**{arguments!r})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent,
                          capture_output=True, text=True)
    if any(text in done.stderr for text in ("out of memory", "OutOfMemory", "allocate memory")):
        raise MemoryError
    if done.returncode != 0:
        raise RuntimeError(f"{function} {arguments}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# ------------------------------------------------------------------------------ the step
@contextlib.contextmanager
def training_run(**constants):
    """What set_up() builds, on random tokens."""
    tokens = np.random.default_rng(0).integers(0, 50257, 2**21, dtype=np.uint16)
    with tempfile.TemporaryDirectory() as folder:
        for split in ("val", "train"):
            np.save(Path(folder, f"random_{split}_000000.npy"), tokens)
        cfg = t.Config(data=folder, log_dir=f"{folder}/log", hellaswag_every=0, **constants)
        run = t.set_up(cfg, t.pick_device("cuda:0" if CUDA else "cpu"))
        with run.thread:
            yield run


def naive_attention(q, k, v, dropout_p=0.0, is_causal=True):
    """Attention as in the paper, every (T, T) matrix in memory."""
    T = q.size(-2)
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ v


def plain_losses(model, cfg, loader):
    """The loss of one step after another of a plain loop around transformers' GPT-2, on a CPU."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": cfg.weight_decay},
                                   {"params": others, "weight_decay": 0.0}],
                                  betas=(0.9, 0.95), eps=1e-8, foreach=True)
    rows = cfg.total_batch_size // cfg.T
    model.eval()  # no dropout
    for step in itertools.count():
        x, y = loader.batch(step * rows, rows)
        with torch.autocast("cpu", torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
            loss = model(x, labels=x, shift_labels=y.contiguous(), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = t.get_lr(step, cfg)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def step_side(B, T, dtype="bfloat16", compile="False", fused=True, logits=False, flash=True,
              tf32=True, padded=True, ours=True, repeats=5, warmup=2):
    if not padded:
        t.padded = lambda n_vocab: n_vocab
    if not flash:
        t.F.scaled_dot_product_attention = naive_attention
    with training_run(B=B, T=T, total_batch_size=B * T, dtype=dtype, compile=compile) as run:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        model = run.state.raw_model
        flops = t.flops_per_token(model, T) * B * T
        if not fused:  # AdamW as `foreach` has it, torch's default on GPUs
            for group in run.state.optimizers[0].param_groups:
                group |= dict(fused=False, foreach=True)
        if logits:  # hand them out although nobody asked: what many scripts do
            model.register_forward_pre_hook(lambda _, args, kwargs: (args, {}), with_kwargs=True)
        if not ours:
            import transformers
            run.state = run.ddp_model = model = None  # frees our GPT
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
            losses = plain_losses(model, run.cfg, run.train_loader)

        def one_step():
            if not ours:
                return next(losses)
            t.train_step(run)[0].item()
            if CUDA:
                torch.cuda.synchronize()
        [seconds] = median_seconds([one_step], repeats, warmup)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"ms": seconds * 1e3, "tok/s": B * T / seconds, "FLOP/s": flops / seconds,
                "bytes": torch.cuda.max_memory_allocated() if CUDA else memory,
                "peak": t.peak_flops(run.device)}


def measure_sides(sides, B):
    """{name: its median figures}; B is halved until every side has room."""
    size = dict(T=1024, repeats=20, warmup=5) if CUDA else dict(T=256, repeats=4, warmup=1)
    found = {name: [] for name in sides}
    try:
        for _ in range(1 if CUDA else 2):
            for name, side in sides.items():
                found[name].append(measure("step_side", **{"B": B} | size | side))
    except MemoryError:
        print(f"out of memory with B={B}")
        return measure_sides(sides, B // 2)
    print(f"A step of GPT-2 (124M) on {B} x {size['T']} tokens\n")
    return {name: {key: statistics.median(figures[key] for figures in results)
                   for key in results[0]} for name, results in found.items()}


def step_table(found):
    rows = []
    first = before = next(iter(found.values()))["ms"]
    for name, side in found.items():
        mfu = f"{side['FLOP/s'] / side['peak']:.1%}" if side["peak"] else "-"
        rows.append((name, f"{side['ms']:.0f}", f"{first / side['ms']:.2f}x",
                     f"{before / side['ms']:.2f}x", f"{side['bytes'] / 2**30:.2f}",
                     f"{side['tok/s']:,.0f}", f"{side['FLOP/s'] / 1e12:.2f}", mfu))
        before = side["ms"]
    table(("side", "ms", "ratio to first", "to row above", "peak GiB", "tok/s", "TFLOP/s", "MFU"),
          rows)


def step():
    """Our step against a plain script's: eager, foreach AdamW, logits that nobody uses."""
    sides = {"GPT-2 of transformers in a plain loop, eager": dict(ours=False),
             "plain: eager, foreach AdamW, logits returned": dict(fused=False, logits=True),
             "fused AdamW": dict(logits=True),
             "no logits returned: ours on a CPU": {},
             "compiled, but logits returned": dict(compile="True", logits=True),
             "compiled: ours on a GPU": dict(compile="True")}
    if CUDA:  # that loop is for CPUs
        del sides["GPT-2 of transformers in a plain loop, eager"]
    found = measure_sides(sides, B=64 if CUDA else 8)
    step_table(found)
    if CUDA:
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))

        def ten():
            for _ in range(10):
                a @ b
            torch.cuda.synchronize()
        rate = 10 * 2 * 8192**3 / median_seconds([ten], repeats=5, warmup=1)[0]
        print(f"\n8192^3 bfloat16 product: {rate / 1e12:.0f} TFLOP/s; our step "
              f"{found['compiled: ours on a GPU']['FLOP/s'] / rate:.1%} of it")


def ladder():
    """The lecture that reproduces GPT-2, rung by rung; ms: on its A100, 16 rows of 1024."""
    rungs = {"fp32 (1000 ms)": dict(dtype="float32", compile="False", fused=False, flash=False,
                                    tf32=False, padded=False, logits=True),
             "TF32 (333 ms)": dict(tf32=True), "bf16 (300 ms)": dict(dtype="bfloat16"),
             "compile (130 ms)": dict(compile="True"), "flash attention (96 ms)": dict(flash=True),
             "vocab 50304 (93 ms)": dict(padded=True), "fused AdamW (90 ms)": dict(fused=True),
             "loss alone": dict(logits=False)}
    if not CUDA:
        del rungs["TF32 (333 ms)"]
    changes_so_far = itertools.accumulate(rungs.values(), dict.__or__)
    step_table(measure_sides(dict(zip(rungs, changes_so_far)), B=16 if CUDA else 2))


# ------------------------------------------------------------------- the script as it is
def quick_start():
    """The first command of README on a CPU: its seconds, and the loss it comes to."""
    command = [sys.executable, ROOT / "train_gpt2.py", "--device=cpu"]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - start
        log = Path(folder, "log_small", "log.txt").read_text().splitlines()
    ms = [float(line.split(" ms ")[0].split()[-1]) for line in done.stdout.splitlines()
          if " tok/s" in line]
    val = [line.split()[2] for line in log if " val " in line]
    print(f"{seconds:.0f} s from command to end; a step {statistics.median(ms):.0f} ms (median of "
          f"the {len(ms)} printed); validation loss {val[-1]} nats a byte")


def reference():
    """Our losses against a plain loop's around transformers' GPT-2: 1 and 2 processes, any B."""
    import transformers
    transformers.logging.disable_progress_bar()
    cfg = t.Config(data=str(ROOT / "input.txt"), encoding="bytes", n_layer=4, n_head=4, n_embd=128,
                   B=32, T=64, total_batch_size=2048, max_steps=20, warmup_steps=5, max_lr=1e-3,
                   eval_every=0, sample_every=0, save_every=0, hellaswag_every=0, device="cpu",
                   dtype="float32")
    encoding = t.get_encoding(cfg.encoding)
    loader, _ = t.open_data(cfg, encoding)
    with tempfile.TemporaryDirectory() as folder:
        t.save_hugging_face(t.build_model(cfg, encoding), folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected, rows = list(itertools.islice(plain_losses(model, cfg, loader), cfg.max_steps)), []
    for processes, B in ((1, 32), (1, 4), (2, 16), (2, 2)):
        with tempfile.TemporaryDirectory() as folder:
            constants = asdict(cfg) | dict(B=B, log_dir=folder)  # all, since SMALL has its own
            flags = [f"--{name}={value}" for name, value in constants.items()]
            subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                            f"--nproc_per_node={processes}", ROOT / "train_gpt2.py", *flags],
                           check=True, capture_output=True)
            log = Path(folder, "log.txt").read_text().splitlines()
        ours = [float(line.split()[2]) for line in log if " train " in line]
        worst = max(abs(a - b) for a, b in zip(ours, expected, strict=True))
        rows.append((processes, B, 32 // (B * processes), f"{ours[-1]:.6f}", f"{worst:.1e}"))
    print(f"{cfg.max_steps} steps of 2,048 tokens in float32; the log has six digits\n")
    table(("processes", "B", "micro-steps", "last loss", "largest difference of a loss"), rows)


# ---------------------------------------------------------------------------- optimizers
# Steps of AdamW, its max_lr and Muon's (best of a grid, or between two equal), what differs
SIZES = {
    "3 x 128, input.txt": (400, 4e-3, 7e-3, dict(data=str(ROOT / "input.txt"))),
    "4 x 192, FineWeb": (250, 2e-3, 7e-3, dict(n_layer=4, n_head=6, n_embd=192, T=128, B=16)),
    "6 x 256, FineWeb": (120, 1.5e-3, 7e-3, dict(n_layer=6, n_head=8, n_embd=256, T=128, B=16))}


def trained(**changes):
    """On one thread: the validation loss at the end, and the median seconds of a step."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cfg = t.Config(**t.SMALL | dict(log_dir=folder, device="cpu", dtype="float32") | changes)
        run = t.set_up(cfg, t.pick_device("cpu"))
        seconds = [seconds_of(t.train_step, run) for _ in range(cfg.max_steps)]
        return t.validation_loss(run, run.val_loader), statistics.median(seconds)


def muon_against_adamw(steps, adamw_lr, muon_lr, **size):
    """The loss where AdamW ends; Muon's share of its tokens for that, and of a step's time."""
    sides = [dict(optimizer="adamw", max_lr=adamw_lr, max_steps=steps),
             *(dict(max_lr=muon_lr, max_steps=int(steps * part)) for part in (0.3, 0.5))]
    with ThreadPoolExecutor(2) as pool:  # AdamW beside Muon's two runs
        (goal, adamw_s), (at_30, muon_s), (at_50, _) = pool.map(
            lambda side: measure("trained", **size, **side), sides)
    way = (at_30 - goal) / (at_30 - at_50)  # in between, the loss is linear in log(tokens)
    return goal, 0.3 * (0.5 / 0.3) ** way, muon_s / adamw_s


def muon():
    """The share of AdamW's tokens with which Muon comes to the loss where AdamW ends."""
    rows, source = [], SHARED / "fineweb_standin"
    with tempfile.TemporaryDirectory() as shards:
        subprocess.run([sys.executable, ROOT / "fineweb.py", f"--source={source}",
                        f"--local_dir={shards}", "--encoding=bytes", "--shard_size=2000000"],
                       check=True, stdout=subprocess.DEVNULL)
        for name, (*settings, size) in SIZES.items():
            losses, shares, times = zip(*(muon_against_adamw(
                *settings, seed=seed, **{"data": shards} | size) for seed in (1, 2, 3)))
            rows.append((name, settings[0], f"{statistics.mean(losses):.4f}",
                         f"{statistics.mean(shares):.0%} ({min(shares):.0%}-{max(shares):.0%})",
                         f"{statistics.median(times):.2f}"))
    table(("size", "AdamW's steps", "its loss", "Muon's share of them", "its step / AdamW's"), rows)


# ------------------------------------------------------------------------ memory, saving
def saved_bytes(B, T):
    """Bytes that a forward pass of GPT-2 (124M) in eager bfloat16 keeps for its backward."""
    model = t.GPT(t.GPTConfig(block_size=T))
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


def memory():
    """The largest power of two for B in a GPU's memory: measured on one, else computed."""
    T, usable = 1024, 0.93  # the rest is CUDA's context and fragments
    if CUDA:
        two, four = (measure("step_side", B=B, T=T, compile="True")["bytes"] for B in (2, 4))
        row, how = (four - two) / 2, "measured at B = 2 and 4, compiled; the rest computed"
        fixed = two - 2 * row
    else:
        row = saved_bytes(2, T) - saved_bytes(1, T)
        row += T * 50304 * (4 + 4)  # gradients of log-probabilities and of logits, in float32
        fixed = (16 + 2) * 124_475_904  # weights, gradients, AdamW's state, bfloat16 copies
        how = "computed on a CPU for eager bfloat16; compiled needs less"
    print(f"{how}: {fixed / 2**30:.2f} GiB + {row / 2**30:.3f} GiB a row of {T} tokens\n")
    rows = {size: max(1, (size * 1e9 * usable - fixed) / row) for size in (12, 16, 24, 40, 80)}
    table(("GPU memory, GB", "largest B"), [(gb, 2 ** int(math.log2(rows[gb]))) for gb in rows])


def save_side():
    """The size of a checkpoint, and median seconds of what save() lists."""
    disk, stall, whole, start = [], [], [], []
    with training_run(B=1, total_batch_size=1024, dtype="float32", compile="False") as run:
        t.train_step(run)  # makes the optimizer's state
        path, block = Path(run.cfg.log_dir, "plain.bin"), os.urandom(2**20)
        for _ in range(6):
            run.state.step += 1
            stall.append(seconds_of(t.save, run))
            whole.append(stall[-1] + seconds_of(run.saving.result))
            size = t.newest_checkpoint(run.cfg.log_dir).stat().st_size
            blocks = [block] * (size // len(block))
            disk.append(seconds_of(t.write_whole, path, lambda file: file.writelines(blocks)))
        for _ in range(6):  # last, since save() copies into new memory for new tensors
            begin = time.perf_counter()
            saved = t.read_checkpoint(t.newest_checkpoint(run.cfg.log_dir), mmap=CUDA)
            run.state.load_state_dict(saved)
            start.append(time.perf_counter() - begin)
    return size, *(statistics.median(times[1:]) for times in (disk, stall, whole, start))


def save():
    """How long a save of the 124M with AdamW's state holds up training, and what it takes."""
    size, *seconds = measure("save_side")
    names = ("plain write, fsync, rename of as many bytes", "save(): training waits",
             "until it is on the disk and verified", "a start: find, verify, read, load")
    print(f"{size / 1e9:.2f} GB; medians of 5, the first of each not counted\n")
    table(("what", "s", "GB/s", "of the plain write"),
          [(name, f"{s:.2f}", f"{size / s / 1e9:.2f}", f"{s / seconds[0]:.2f}x")
           for name, s in zip(names, seconds)])


# -------------------------------------------------------------------------------- tokens
def tokenize_document(text):
    encoding = t.get_encoding("gpt2")
    return np.array([encoding.eot_token, *encoding.encode_ordinary(text)], dtype=np.uint16)


def tokenize_share(first, step):
    """Nothing but tiktoken: neither text nor tokens travel."""
    encoding = t.get_encoding("gpt2")
    return sum(1 + len(encoding.encode_ordinary(text)) for text in TEXTS[first::step])


def tokenize():
    """Documents to tokens: bare tiktoken on every core, a pool over documents, fineweb.py."""
    import pyarrow.parquet as pq
    cores = len(os.sched_getaffinity(0))
    files = sorted((SHARED / "fineweb_standin").glob("*.parquet")) * 6  # so starting weighs little
    for file in files:
        TEXTS.extend(pq.read_table(file, columns=["text"])["text"].to_pylist())
    t.get_encoding("gpt2")  # before the fork
    shares = [(i, cores) for i in range(cores)]
    with (tempfile.TemporaryDirectory() as corpus, tempfile.TemporaryDirectory() as folder,
          multiprocessing.get_context("fork").Pool(cores) as workers):
        for i, file in enumerate(files):
            Path(corpus, f"{i:03d}.parquet").symlink_to(file)
        tokens = sum(workers.starmap(tokenize_share, shares))
        command = [sys.executable, ROOT / "fineweb.py", f"--source={corpus}"]
        sides = {
            f"bare tiktoken, {cores} processes": lambda: workers.starmap(tokenize_share, shares),
            "a pool over documents": lambda: sum(map(len, workers.imap(
                tokenize_document, TEXTS, chunksize=16))),
            "fineweb.py, start to end": lambda: subprocess.run(
                [*command, f"--local_dir={tempfile.mkdtemp(dir=folder)}"], check=True,
                stdout=subprocess.DEVNULL)}
        seconds = median_seconds(sides.values(), repeats=3)
    print(f"{tokens:,} tokens in {len(TEXTS):,} documents, medians of 3 rounds\n")
    table(("side", "M tokens/s", "of bare"),
          [(name, f"{tokens / s / 1e6:.2f}", f"{seconds[0] / s:.2f}")
           for name, s in zip(sides, seconds)])


# ----------------------------------------------------------------------------- HellaSwag
def naive_score(model, rendered):
    """acc_norm the plain way: a question at a time, four padded rows, logits everywhere."""
    right, device = 0, h.device_of(model)
    for _, tokens, mask, label in rendered:
        tokens, mask = tokens.to(device), mask.to(device)  # (4, N)
        logits, _ = model(tokens)                          # (4, N, V)
        losses = t.F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(),
                                   reduction="none")
        means = (losses.view(4, -1) * mask[:, 1:]).sum(1) / mask.sum(1)
        right += int(means.argmin() == label)
    return right / len(rendered)


def hellaswag():
    """examples/s of hellaswag.evaluate against one question at a time, random GPT-2 (124M)."""
    local = SHARED / "hellaswag" / "hellaswag_val.jsonl"
    h.DATA = local if local.exists() else h.DATA
    device, rounds = (t.pick_device("cuda"), 5) if CUDA else (torch.device("cpu"), 2)
    torch.manual_seed(0)
    model = t.GPT(t.GPTConfig()).to(device)
    examples = list(h.iterate_examples("val"))[::100]  # 101 questions of all kinds
    rendered = [h.render_example(example) for example in examples]
    scores, rows = {}, []
    sides = {"one question at a time": lambda: scores.update(naive=naive_score(model, rendered)),
             "evaluate": lambda: scores.update(ours=h.evaluate(model, examples).acc_norm)}
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad(), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            seconds = median_seconds(sides.values(), rounds)
        for name, s, acc_norm in zip(sides, seconds, scores.values()):
            rows.append((str(dtype)[6:], name, f"{len(examples) / s:.2f}",
                         f"{seconds[0] / s:.2f}x", f"{acc_norm:.4f}"))
    print(f"{len(examples)} questions, medians of {rounds} rounds; evaluate also tokenizes\n")
    table(("dtype", "side", "examples/s", "ratio", "acc_norm"), rows)


def sitting(folder, minutes):
    """Run SITTING in order, each for its share of the minutes at most; keep what each printed."""
    share = minutes * 60 / sum(most for most, _ in SITTING.values())
    flags = "--data=shards --eval_every=100 --val_tokens=1048576 --hellaswag_every=0 " + (
        "" if CUDA else "--n_layer=2 --n_head=2 --n_embd=48 --T=64 --B=8 --total_batch_size=4096")
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([sys.executable, ROOT / "fineweb.py", "--shard_size=2000000",
                        f"--source={SHARED / 'fineweb_standin'}", "--local_dir=shards"],
                       cwd=place, check=True)
        for name, (most, words) in SITTING.items():
            command = [sys.executable, *words.format(root=ROOT, flags=flags).split()]
            with open(Path(folder, f"sitting_{name}.txt"), "w", buffering=1) as file:
                print(f"{machine()}\npython {words.format(root='.', flags=flags)}\n", file=file)
                run = subprocess.Popen(command, cwd=place, stdout=file, stderr=file,
                                       start_new_session=True)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(most * share)
                print("exit status, None where time was over:", run.poll(), file=file)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)  # and its workers
            run.wait()
            print(f"{name}: {run.poll()}", flush=True)


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("which", choices=("all", "sitting", *BENCHES))
    parser.add_argument("--save", metavar="FOLDER", help="also write FOLDER/<bench>.txt")
    parser.add_argument("--minutes", type=float, default=45)
    args = parser.parse_args()
    if args.which == "sitting":
        return sitting(args.save or ROOT / "tests" / "measured", args.minutes)
    failed = []
    for name in BENCHES if args.which == "all" else [args.which]:
        bench, output = globals()[name], io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                print(f"# {name}: {' '.join(bench.__doc__.split())}\n\n{machine()}\n")
                bench()
            if args.save:
                Path(args.save).mkdir(parents=True, exist_ok=True)
                Path(args.save, f"{name}.txt").write_text(output.getvalue())
        except Exception:  # whatever it is, the next bench runs
            traceback.print_exc()
            failed.append(name)
        print(output.getvalue(), flush=True)
    if failed:
        sys.exit(f"bench.py: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
