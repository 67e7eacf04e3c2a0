"""Benchmarks: both sides in one run, medians, a ratio. Nothing here asserts a time.

    python tests/bench.py ladder | step | memory | loader | wire | tokenize | hellaswag | save | all
    python tests/bench.py optimizers        # ten minutes on two cores, so not in all
"""
import argparse
import contextlib
import ctypes
import gc
import io
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("GPT2_SHARED", ROOT.parent / "shared"))
sys.path.insert(0, str(ROOT))


def median_seconds(fn, repeats=5, warmup=1):
    """Median wall time of fn() in seconds, after `warmup` calls that are not counted."""
    for _ in range(warmup):
        fn()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def machine():
    """One line that says where and with what the figures were measured."""
    import torch
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (f"{time.strftime('%Y-%m-%d')} · {gpu} · {os.cpu_count()} cores ({platform.machine()}) · "
            f"Python {platform.python_version()} · torch {torch.__version__}")


BENCHES = {}  # name -> function; filled below each bench


# ------------------------------------------------------------------------------------------------ training step
TUTORIAL_MS = {"fp32": 1000, "TF32": 333, "bf16": 300, "compile": 130, "flash attention": 96, "vocab 50304": 93,
               "fused AdamW": 90}  # A100, 16 x 1024 tokens, as told in the "reproduce GPT-2" lecture


@contextlib.contextmanager
def training_run(folder, **constants):
    """A real Run of train_gpt2 on shards of random tokens, logging into a temporary folder."""
    import numpy as np
    import train_gpt2 as t
    rng = np.random.default_rng(0)
    data = Path(folder, "shards")
    if not data.exists():
        data.mkdir()
        for split, n in (("val", 2**17), ("train", 2**21)):
            np.save(data / f"random_{split}_000000.npy", rng.integers(0, 50257, n).astype(np.uint16))
    cfg = t.Config(**{"data": str(data), "log_dir": tempfile.mkdtemp(dir=folder), "val_tokens": 2**16, "resume": False,
                      "hellaswag_every": 0, "total_batch_size": constants["B"] * constants["T"]} | constants)
    place = t.join_processes(cfg)
    with contextlib.redirect_stdout(io.StringIO()):
        run = t.set_up(cfg, place)
    try:
        yield run
    finally:
        run.lock.release()
        del run
        free_memory()


def free_memory():
    """Give a finished run's memory back, so that the next one is measured alone."""
    import torch
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def step_seconds(run, repeats=10, warmup=3):
    """Median seconds of train_step, which ends with a synchronisation."""
    import train_gpt2 as t
    return median_seconds(lambda: t.train_step(run), repeats, warmup)


def plain_malloc():
    """Undo keep_freed_memory(): glibc's thresholds where they come to rest by themselves, as in any plain script, and
    nothing kept."""
    if sys.platform == "linux":
        for option, value in ((-4, 65536), (-3, 2**25), (-1, 2**26)):  # M_MMAP_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            ctypes.CDLL(None).mallopt(option, value)
        ctypes.CDLL(None).malloc_trim(0)


def unfused(run):
    """Swap the run's AdamW for the plain foreach one."""
    import torch
    for i, o in enumerate(run.state.optimizers):
        if isinstance(o, torch.optim.AdamW):
            run.state.optimizers[i] = torch.optim.AdamW([{k: g[k] for k in ("params", "weight_decay")} for g in
                                                         o.param_groups], lr=o.defaults["lr"], betas=o.defaults["betas"],
                                                        eps=o.defaults["eps"], fused=False)


def naive_attention(q, k, v, attn_mask=None, is_causal=False):
    """Attention as in the paper, every (T, T) matrix in memory: what flash attention is measured against."""
    import torch
    T = q.size(-2)
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


def table(rows, header):
    """A Markdown table on stdout."""
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(str(c) for c in row) + " |", flush=True)


def bench_ladder():
    """The tutorial's rungs, each added to the ones before."""
    import torch
    import train_gpt2 as t
    cuda = torch.cuda.is_available()
    B, T = (16, 1024) if cuda else (2, 256)
    rungs = [("fp32", {}), ("TF32", {"tf32": True}), ("bf16", {"dtype": "bfloat16"}), ("compile", {"compile": "True"}),
             ("flash attention", {"flash": True}), ("vocab 50304", {"multiple": 128}), ("fused AdamW", {"fused": True})]
    on, rows, before = dict(dtype="float32", compile="False", tf32=False, flash=False, multiple=1, fused=False), [], None
    for name, change in rungs:
        on |= change
        if name == "TF32" and not cuda:
            rows.append((name, "-", "-", "-", "no TF32 on a CPU", TUTORIAL_MS[name]))
            continue
        sdpa, multiple = t.F.scaled_dot_product_attention, t.VOCAB_MULTIPLE
        t.VOCAB_MULTIPLE = on["multiple"]
        if not on["flash"]:
            t.F.scaled_dot_product_attention = naive_attention
        try:
            with tempfile.TemporaryDirectory() as folder, \
                    training_run(folder, B=B, T=T, dtype=on["dtype"], compile=on["compile"]) as run:
                torch.set_float32_matmul_precision("high" if on["tf32"] else "highest")
                if not on["fused"]:
                    unfused(run)
                seconds = step_seconds(run, *((20, 5) if cuda else (3, 1)))
                flops = run.state.model.flops_per_token(T) * B * T / seconds
                peak = t.peak_flops(run.place.device)
        finally:
            t.F.scaled_dot_product_attention, t.VOCAB_MULTIPLE = sdpa, multiple
        rows.append((name, f"{seconds * 1e3:.1f}", f"{B * T / seconds:,.0f}", f"{flops / peak:.1%}" if peak else "-",
                     f"{before / seconds:.2f}x" if before else "", TUTORIAL_MS[name]))
        before = seconds
    print(f"One step of GPT-2 (124M) on {B} x {T} tokens\n")
    table(rows, ("rung", "ms", "tok/s", "MFU", "gain", "A100 in the tutorial, ms"))


BENCHES["ladder"] = bench_ladder


def matmul_flops(n=8192):
    """FLOP/s that this GPU reaches on an n^3 bf16 product of random matrices."""
    import torch
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def ten():
        for _ in range(10):
            a @ b
        torch.cuda.synchronize()
    return 10 * 2 * n**3 / median_seconds(ten)


def bench_step():
    """Our step as the constants have it, against the eager bf16 baseline with an unfused AdamW."""
    import torch
    cuda = torch.cuda.is_available()
    B, T = (64, 1024) if cuda else (8, 256)
    sides = [("baseline: eager bf16, foreach AdamW", "False", (unfused, plain_malloc)),
             ("fused AdamW", "False", (plain_malloc,)), ("+ compile" + " = ours" * cuda, "True", (plain_malloc,))]
    if not cuda:
        sides += [("fused AdamW, freed memory kept = ours", "False", ()), ("+ compile", "True", ())]
    rows, first = [], None
    for name, compiled, without in sides:
        with tempfile.TemporaryDirectory() as folder, \
                training_run(folder, B=B, T=T, dtype="bfloat16", compile=compiled) as run:
            if unfused in without:
                unfused(run)
            if plain_malloc in without:
                plain_malloc()
            seconds = step_seconds(run, *((20, 5) if cuda else (5, 1)))
            flops = run.state.model.flops_per_token(T) * B * T / seconds
        first = first or seconds
        memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if cuda else "-"
        rows.append((name, f"{seconds * 1e3:.1f}", f"{B * T / seconds:,.0f}", f"{flops / 1e12:.1f}", memory,
                     f"{first / seconds:.2f}x"))
    table(rows, ("side", "ms", "tok/s", "TFLOP/s", "GiB", "ratio"))
    if cuda:
        rate = matmul_flops()
        print(f"\n8192^3 bf16 product: {rate / 1e12:.0f} TFLOP/s; our step reaches {flops / rate:.1%} of it")


BENCHES["step"] = bench_step


def tokenize_naively(text):
    """One document in a worker of the naive pool: what fineweb.py's batches are measured against."""
    import numpy as np
    import tiktoken
    encoding = tiktoken.get_encoding("gpt2")
    return np.array([encoding.eot_token, *encoding.encode_ordinary(text)], dtype=np.uint16)


def tokenize_barely(texts):
    """Tokens per second of tiktoken in this process: no reading, no writing, nothing handed over."""
    import tiktoken
    encoding = tiktoken.get_encoding("gpt2")
    start = time.perf_counter()
    tokens = sum(len(encoding.encode_ordinary(text)) for text in texts)
    return tokens / (time.perf_counter() - start)


def bench_tokenize():
    """Documents to tokens: bare tiktoken on every core at once, a pool over documents, fineweb.py as it is run."""
    import multiprocessing
    import random
    import subprocess
    import tempfile
    import pyarrow as pa
    import pyarrow.parquet as pq
    import tiktoken
    encoding, cores = tiktoken.get_encoding("gpt2"), len(os.sched_getaffinity(0))
    spawn = multiprocessing.get_context("spawn")
    copies = 6  # of the corpus: one shard of the default size, so that starting the workers weighs little
    with tempfile.TemporaryDirectory() as corpus, tempfile.TemporaryDirectory() as made_up:
        files = sorted((SHARED / "fineweb_standin").glob("*.parquet"))
        if not files:
            words = [f"{a}{b}" for a in ("the", "over", "in", "re", "con") for b in ("", "sult", "tain", "st", "ing")]
            texts = [" ".join(random.Random(i).choices(words, k=1000)) for i in range(10_000)]
            files = [Path(made_up, "made_up.parquet")]
            pq.write_table(pa.table({"text": texts}), files[0], row_group_size=1000)
        for copy in range(copies):
            for file in files:
                Path(corpus, f"{copy}_{file.name}").symlink_to(file)
        texts = [text for file in files for text in pq.read_table(file, columns=["text"])["text"].to_pylist()]
        tokens = sum(map(len, encoding.encode_ordinary_batch(texts, num_threads=cores))) + len(texts)

        def bare():
            with spawn.Pool(cores) as workers:
                return sum(workers.map(tokenize_barely, [texts[i::cores] for i in range(cores)], chunksize=1))

        def pool():
            start = time.perf_counter()
            with spawn.Pool(cores) as workers:
                for _ in workers.imap(tokenize_naively, texts, chunksize=16):
                    pass
            return tokens / (time.perf_counter() - start)

        def ours():
            start = time.perf_counter()
            with tempfile.TemporaryDirectory() as shards:
                subprocess.run([sys.executable, ROOT / "fineweb.py", f"--source={corpus}", f"--local_dir={shards}"],
                               check=True, stdout=subprocess.DEVNULL)
            return tokens * copies / (time.perf_counter() - start)

        sides = {f"bare tiktoken, {cores} processes": bare, "a pool over documents": pool,
                 "fineweb.py, start to end": ours}
        # turn and turn about, since the machine may be busy with other work too
        rounds = [[run() for run in sides.values()] for _ in range(5)]
    medians = [statistics.median(rates) for rates in zip(*rounds)]
    for name, rate in zip(sides, medians):
        print(f"{name:28} {rate / 1e6:6.2f} M tokens/s   {rate / medians[0]:5.2f} of bare")


BENCHES["tokenize"] = bench_tokenize


def naive_ending_losses(model, tokens, mask):
    """Summed loss of each ending's tokens, (4,), the plain way: four padded rows, logits for every token of them."""
    import torch
    logits = model(tokens)[0]  # (4, N, V)
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(),
                                               reduction="none").view(4, -1)
    return (losses * mask[:, 1:]).sum(1)


def bench_hellaswag():
    """examples/s of hellaswag.evaluate against one question at a time, random GPT-2 (124M). Each round takes
    other batches of the whole set; both sides score the questions in them, tokenized beforehand. The plain loop
    enters autocast for each question, as such loops do (casting the weights anew); "warm" is it in one autocast.
    hellaswag.py on a CPU has malloc keep what is freed; the plain loop does without."""
    from functools import partial
    import torch
    import hellaswag
    import train_gpt2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rounds, n = 3, 6  # n batches a round
    local = SHARED / "hellaswag" / "hellaswag_val.jsonl"
    hellaswag.DATA = local if local.exists() else hellaswag.DATA
    examples = list(hellaswag.iterate_examples("val"))
    torch.manual_seed(0)
    model = train_gpt2.GPT(train_gpt2.GPTConfig(n_vocab=50257)).to(device)
    questions = hellaswag.prepare([e | {"label": i} for i, e in enumerate(examples)], model)  # label = which question

    @torch.no_grad()
    def naive(rendered, autocast):
        for tokens, mask, label in rendered:
            with autocast():
                losses = naive_ending_losses(model, tokens.to(device), mask.to(device))
            int((losses / mask.sum(1).to(device)).argmin() == label)

    def seconds(fn):
        start = time.perf_counter()
        fn()
        return time.perf_counter() - start

    for dtype in (torch.float32, torch.bfloat16):
        autocast, times = partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32), []
        for r in range(rounds + 1):  # the first warms up
            some = questions._replace(batches=questions.batches[r * n:(r + 1) * n])
            rendered = [hellaswag.render_example(examples[i])[1:] for labels, *_ in some.batches for i in labels]
            plain_malloc()
            slow = warm = seconds(partial(naive, rendered, autocast))
            with autocast():
                if dtype != torch.float32:
                    warm = seconds(partial(naive, rendered, contextlib.nullcontext))
                if device.type == "cpu":
                    hellaswag.keep_freed_memory()
                fast = seconds(partial(hellaswag.evaluate, model, some))
            times.append([t / len(rendered) for t in (slow, warm, fast)])
        slow, warm, fast = (statistics.median(t) for t in zip(*times[1:]))
        ratios = [statistics.median(t[i] / t[2] for t in times[1:]) for i in range(2)]
        print(f"{str(dtype)[6:]:<9} one at a time {1 / slow:7.2f} examples/s (warm {1 / warm:7.2f}), evaluate "
              f"{1 / fast:8.2f} examples/s: {ratios[0]:.2f}x (warm {ratios[1]:.2f}x), "
              f"rounds {', '.join(f'{t[0] / t[2]:.2f}' for t in times[1:])}", flush=True)
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


BENCHES["hellaswag"] = bench_hellaswag


def anonymous_mib():
    """MiB that this process itself allocated (not what it maps from files), or nan where /proc has no such figure."""
    try:
        return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon")) / 1024
    except (OSError, StopIteration):
        return float("nan")


def bench_loader():
    """A (64, 1024) batch from a shard of 100 M tokens: ours, a plain memmap slice, and a shard loaded to int64."""
    import numpy as np
    import torch
    import train_gpt2 as t
    B, T, n = 64, 1024, 100_000_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "random_train_000000.npy")
        np.save(path, np.random.default_rng(0).integers(0, 50257, n).astype(np.uint16))
        row = iter(range(0, 10**9, B))
        before, start = anonymous_mib(), time.perf_counter()
        loader = t.DataLoaderLite([path], T, seed=1, shuffle=True)
        opened = time.perf_counter() - start
        ours = median_seconds(lambda: loader.batch(next(row) , B), 200, 20)
        held = anonymous_mib() - before
        shard = np.load(path, mmap_mode="r")

        def plain():
            i = next(row) * T % (n - B * T - 1)
            torch.from_numpy(shard[i:i + B * T + 1].astype(np.int64))
        slice_ = median_seconds(plain, 200, 20)
        before, start = anonymous_mib(), time.perf_counter()
        tokens = torch.tensor(np.load(path).astype(np.int64))
        loaded, held64 = time.perf_counter() - start, anonymous_mib() - before

        def from_tensor():
            i = next(row) * T % (n - B * T - 1)
            tokens[i:i + B * T].view(B, T), tokens[i + 1:i + B * T + 1].view(B, T)
        views = median_seconds(from_tensor, 200, 20)
    table([("ours: shuffled rows of a memory-mapped shard", f"{ours * 1e3:.2f}", f"{opened * 1e3:.0f}", f"{held:.0f}"),
           ("plain memmap slice, in file order", f"{slice_ * 1e3:.2f}", "", ""),
           ("whole shard as int64", f"{views * 1e3:.2f}", f"{loaded * 1e3:.0f}", f"{held64:.0f}")],
          ("side", "ms per (64, 1024) batch", "ms to open and check a shard", "MiB held"))
    print(f"\nA batch costs {ours / slice_:.2f} x a plain slice; opening costs {opened / loaded:.2f} x loading to int64")


BENCHES["loader"] = bench_loader


def bytes_on_loopback():
    """Bytes that this machine has sent over its loopback interface so far."""
    line = next(l for l in open("/proc/net/dev") if l.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def bench_wire():
    """What two processes really send for a step, in float32 and in bfloat16, against the formula."""
    sent, losses = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for grad_comm in ("float32", "bfloat16"):
            for steps in (2, 12):
                before = bytes_on_loopback()
                log = Path(folder, f"{grad_comm}{steps}")
                constants = dict(n_layer=4, n_head=4, n_embd=256, T=64, B=4, total_batch_size=1024, max_steps=steps,
                                 encoding="bytes", data=ROOT / "input.txt", eval_every=0, sample_every=0, save_every=0,
                                 dtype="float32", log_dir=log, grad_comm=grad_comm, max_lr=1e-3, warmup_steps=2)
                subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                                str(ROOT / "train_gpt2.py"), *(f"--{k}={v}" for k, v in constants.items())],
                               check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
                sent[grad_comm, steps] = bytes_on_loopback() - before
                losses[grad_comm] = (log / "log.txt").read_text().split()[-1]
    import train_gpt2 as t
    N = t.GPT(t.GPTConfig(64, 384, 4, 4, 256, 257)).num_params()
    rows = []
    for grad_comm, width in (("float32", 4), ("bfloat16", 2)):
        real = (sent[grad_comm, 12] - sent[grad_comm, 2]) / 10 / 2
        formula = 2 * (2 - 1) / 2 * N * width
        rows.append((grad_comm, f"{real / 2**20:.2f}", f"{formula / 2**20:.2f}", f"{real / formula:.3f}", losses[grad_comm]))
    print(f"{N:,} parameters, 2 processes, gloo over loopback\n")
    table(rows, ("gradients in", "MiB sent per process and step", "ring formula 2 (n-1)/n N bytes", "ratio", "loss of step 12"))
    scaling_on_paper()


def scaling_on_paper(tokens=524288, tokens_per_second=16 * 1024 / 0.093, S=124_439_808):
    """Step time and efficiency from the ring formula; the compute rate is the tutorial's A100, nothing measured here.

    compute = tokens / (n * rate); sending = 2 (n-1)/n S bytes / bandwidth, of which the last micro-step's backward,
    two thirds of it, hides as much as it lasts: step = compute + max(0, sending - 2/3 last micro-step).
    """
    links = [("NVLink, 230 GB/s in a ring", 230e9), ("100 Gb/s Ethernet", 12.5e9)]
    rows = []
    for n in (1, 8, 16, 64):
        compute = tokens / (n * tokens_per_second)
        last = compute / max(1, tokens // (n * 64 * 1024))
        for name, bandwidth in links[:1] if n == 1 else links:
            cells = []
            for width in (4, 2):
                sending = 2 * (n - 1) / n * S * width / bandwidth
                step = compute + max(0.0, sending - 2 / 3 * last)
                cells += [f"{sending * 1e3:.0f}", f"{step * 1e3:.0f}", f"{compute / step:.0%}"]
            rows.append((n, name if n > 1 else "-", f"{compute * 1e3:.0f}", *cells))
    print("\nOn paper, GPT-2 (124M), 524,288 tokens a step, B = 64 or less\n")
    table(rows, ("GPUs", "link", "compute, ms", "sending fp32, ms", "step, ms", "efficiency", "sending bf16, ms", "step, ms",
                 "efficiency"))


BENCHES["wire"] = bench_wire


def saved_bytes(B, T):
    """Bytes that one forward pass of GPT-2 (124M) in eager bfloat16 keeps for its backward pass, weights aside."""
    import torch
    import train_gpt2 as t
    model = t.GPT(t.GPTConfig(block_size=T, n_vocab=50257))
    weights, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor
    idx = torch.randint(0, 50257, (B, T))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(idx, idx)
    return sum(kept.values())


def bench_memory():
    """The largest power of two for B in a GPU's memory: measured on a GPU, else computed from what autograd keeps."""
    import torch
    T, cards, usable = 1024, (12, 16, 24, 40, 80), 0.93  # the rest is CUDA's context and fragments
    if torch.cuda.is_available():
        peaks = {}
        for B in (4, 8):
            with tempfile.TemporaryDirectory() as folder, training_run(folder, B=B, T=T) as run:
                step_seconds(run, 2, 2)
                peaks[B] = torch.cuda.max_memory_allocated()
        row, how = (peaks[8] - peaks[4]) / 4, "measured at B = 4 and 8, extrapolated"
        fixed = peaks[4] - 4 * row
    else:
        row = saved_bytes(2, T) - saved_bytes(1, T)
        row += T * 50304 * (4 + 2)  # the logits' gradient, in float32 and cast
        fixed, how = 16 * 124_475_904 + 2 * 124_475_904, "computed for eager bfloat16; compiled needs less"  # + bf16 copies
    print(f"{how}: {fixed / 2**30:.2f} GiB + {row / 2**30:.3f} GiB a row of {T} tokens\n")
    table([(f"{gb} GB", 2 ** int(math.log2(max(1, (gb * 1e9 * usable - fixed) / row)))) for gb in cards],
          ("GPU memory", "largest B"))


BENCHES["memory"] = bench_memory


def train_quietly(data, **constants):
    """Train from scratch; returns ([(tokens, seconds, val loss), ...], median seconds a step)."""
    import train_gpt2 as t
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        cfg = t.Config(**dict(data=str(data), log_dir=folder, hellaswag_every=0, sample_every=0, resume=False,
                              encoding="bytes", dtype="float32") | constants)
        run = t.set_up(cfg, t.join_processes(cfg))
        curve, steps = [], []
        while True:
            if run.state.step % cfg.eval_every == 0:
                loss = t.validation_loss(run.state.model, run.val_loader, cfg, run.place, run.autocast)
                curve.append((run.state.step * cfg.total_batch_size, sum(steps), loss))
            if run.state.step == cfg.max_steps:
                run.lock.release()
                return curve, statistics.median(steps)
            start = time.perf_counter()
            t.train_step(run)
            steps.append(time.perf_counter() - start)
            run.state.step += 1


def bench_optimizers():
    """AdamW against Muon on English prose (the FineWeb stand-in's bytes): three learning rates each, then three seeds
    at the better one; and once with a batch so small that Muon's own work shows. Takes ten minutes on 2 cores."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, str(ROOT / "fineweb.py"), f"--source={SHARED / 'fineweb_standin'}",
                        "--encoding=bytes", "--shard_size=4000000", "--max_shards=4", f"--local_dir={folder}/shards"],
                       check=True, capture_output=True)
        size = dict(n_layer=4, n_head=4, n_embd=192, T=128, val_tokens=32768, warmup_steps=20, min_lr=0.0)
        for case, batch, steps, seeds in (("16 rows a step", 16, 200, (2, 3)), ("2 rows a step", 2, 400, ())):
            rows, best = [], {}
            for optimizer, rates in (("adamw", (1.5e-3, 3e-3, 6e-3)), ("muon", (5e-3, 1e-2, 2e-2))):
                runs = {(rate, 1): None for rate in rates}
                for rate, seed in runs:
                    runs[rate, seed] = train_quietly(Path(folder, "shards"), optimizer=optimizer, B=batch, seed=seed,
                                                     total_batch_size=batch * 128, max_lr=rate, max_steps=steps,
                                                     eval_every=steps // 4, **size)
                best[optimizer] = min(rates, key=lambda rate: runs[rate, 1][0][-1][2])
                for seed in seeds:
                    runs[best[optimizer], seed] = train_quietly(
                        Path(folder, "shards"), optimizer=optimizer, B=batch, seed=seed, total_batch_size=batch * 128,
                        max_lr=best[optimizer], max_steps=steps, eval_every=steps // 4, **size)
                for (rate, seed), (curve, step) in runs.items():
                    rows.append((optimizer, f"{rate:g}", seed, f"{step * 1e3:.0f}",
                                 *(f"{loss:.3f} ({seconds:.0f} s)" for _, seconds, loss in curve[1:])))
            print(f"\n{case}: val loss, nats a byte (seconds of training until then)\n")
            table(rows, ("optimizer", "max_lr", "seed", "ms a step",
                         *(f"{tokens / 1000:.0f} k tokens" for tokens, _, _ in curve[1:])))


def bench_save():
    """How long a save of the 124M model and its AdamW state stalls training, and what the disk needs for the bytes."""
    import torch
    import train_gpt2 as t
    with tempfile.TemporaryDirectory() as folder, training_run(folder, B=1, T=1024, dtype="float32", compile="False") as run:
        for p in run.state.model.parameters():
            p.grad = torch.zeros_like(p)
        run.state.optimizers[0].step()  # makes the optimizer's state, without a step's minutes on a CPU
        path = t.save_checkpoint(run)
        size, block, plain = path.stat().st_size, os.urandom(2**26), Path(folder, "plain")

        def disk():  # bytes at hand, written as safely: beside the file before it, which goes when the new one stands
            t.write_whole(plain, lambda f: [f.write(block[:size - at]) for at in range(0, size, len(block))])

        def load():
            t.restore(run.state, t.load_checkpoint(path, run.cfg, run.train_loader.fingerprint))
        sides = {"disk: write, fsync, rename": disk, "save_checkpoint, the stall": lambda: t.save_checkpoint(run),
                 "read_checkpoint, verifying": lambda: t.read_checkpoint(path), "load and restore": load}
        # A write right after its like: it then gets the file cache's pages that this one freed. Pages that a virtual
        # machine has yet to find take 2 s more, on either side.
        rounds = [{name: median_seconds(fn, repeats=1, warmup=1) for name, fn in sides.items()} for _ in range(5)]
    medians = {name: statistics.median(one[name] for one in rounds) for name in sides}
    print(f"{size / 1e9:.2f} GB\n")
    table([(name, f"{s:.2f}", f"{size / s / 1e9:.2f}", f"{s / medians['disk: write, fsync, rename']:.2f}x")
           for name, s in medians.items()], ("side", "s", "GB/s", "ratio"))


BENCHES["save"] = bench_save


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=[*BENCHES, "optimizers", "all"])
    which = parser.parse_args().which
    print(machine())
    for name in BENCHES if which == "all" else [which]:
        print(f"\n## {name}")
        plain_malloc()  # training_run() changes it, for the benches after it too
        (BENCHES | {"optimizers": bench_optimizers})[name]()  # by name only: all would take too long with it


if __name__ == "__main__":
    main()
