"""Benchmarks: both sides in one run, medians, a ratio. Nothing here asserts a time.

    python tests/bench.py ladder | step | loader | tokenize | hellaswag | save | all
"""
import argparse
import contextlib
import gc
import io
import os
import platform
import statistics
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
    sides = [("baseline: eager bf16, foreach AdamW", "False", False), ("fused AdamW", "False", True),
             ("+ compile = ours", "True", True)]
    rows, first = [], None
    for name, compiled, fused in sides:
        with tempfile.TemporaryDirectory() as folder, \
                training_run(folder, B=B, T=T, dtype="bfloat16", compile=compiled) as run:
            if not fused:
                unfused(run)
            seconds = step_seconds(run, *((20, 5) if cuda else (5, 2)))
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


def bench_tokenize():
    """Documents to tokens: bare tiktoken on one core times the cores, a pool over documents, fineweb.py as it is run."""
    import multiprocessing
    import random
    import subprocess
    import tempfile
    import pyarrow as pa
    import pyarrow.parquet as pq
    import tiktoken
    encoding, cores = tiktoken.get_encoding("gpt2"), len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        files = sorted((SHARED / "fineweb_standin").glob("*.parquet"))
        if not files:
            words = [f"{a}{b}" for a in ("the", "over", "in", "re", "con") for b in ("", "sult", "tain", "st", "ing")]
            texts = [" ".join(random.Random(i).choices(words, k=1000)) for i in range(10_000)]
            files = [Path(folder, "made_up.parquet")]
            pq.write_table(pa.table({"text": texts}), files[0], row_group_size=1000)
        texts = [text for file in files for text in pq.read_table(file, columns=["text"])["text"].to_pylist()]
        sample = texts[::len(texts) // 2000 or 1]
        copies = 6  # of the corpus: one shard of the default size, so that starting the workers weighs little
        for copy in range(copies):
            for file in files:
                Path(folder, f"{copy}_{file.name}").symlink_to(file)
        total, part = (sum(map(len, encoding.encode_ordinary_batch(t, num_threads=cores))) + len(t) for t in (texts, sample))
        if files[0].parent == Path(folder):
            total *= 1 + 1 / copies  # the made-up file itself lies in the folder as well

        def ours():
            with tempfile.TemporaryDirectory() as shards:
                subprocess.run([sys.executable, ROOT / "fineweb.py", f"--source={folder}", f"--local_dir={shards}"],
                               check=True, stdout=subprocess.DEVNULL)

        def pool():
            with multiprocessing.get_context("spawn").Pool(cores) as workers:
                for _ in workers.imap(tokenize_naively, texts, chunksize=16):
                    pass

        # turn and turn about, since other work on the machine slows whatever runs at that moment
        sides = {f"bare tiktoken x {cores} cores": (lambda: [encoding.encode_ordinary(text) for text in sample], part * cores),
                 "a pool over documents": (pool, total), "fineweb.py, start to end": (ours, total * copies)}
        rounds = [{name: tokens / median_seconds(run, repeats=1, warmup=0) for name, (run, tokens) in sides.items()}
                  for _ in range(3)]
    bare = None
    for name in sides:
        rate = statistics.median(one[name] for one in rounds)
        bare = bare or rate
        print(f"{name:28} {rate / 1e6:6.2f} M tokens/s   {rate / bare:5.2f}")


BENCHES["tokenize"] = bench_tokenize


def naive_ending_losses(model, tokens, mask):
    """Summed loss of each ending's tokens, (4,), the plain way: four padded rows, logits for every token of them."""
    import torch
    logits = model(tokens)[0]  # (4, N, V)
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(),
                                               reduction="none").view(4, -1)
    return (losses * mask[:, 1:]).sum(1)


def bench_hellaswag():
    """examples/s of hellaswag.evaluate against one question at a time, GPT-2 (124M) with random weights. Both sides are
    tokenized beforehand and run in one autocast; each of the rounds takes other questions from all over the file."""
    import contextlib
    import torch
    import hellaswag
    import train_gpt2
    rounds = 5
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    n_naive, n_fast = (300, 2000) if device.type == "cuda" else (24, 24)
    local = SHARED / "hellaswag" / "hellaswag_val.jsonl"
    examples = list(hellaswag.iterate_examples("val", local if local.exists() else None))
    torch.manual_seed(0)
    model = train_gpt2.GPT(train_gpt2.GPTConfig(n_vocab=50257)).to(device)

    def pick(r, n):
        return examples[r::len(examples) // n][:n]

    @torch.no_grad()
    def naive(rendered):
        right = 0
        for tokens, mask, label in rendered:
            losses = naive_ending_losses(model, tokens.to(device), mask.to(device))
            right += int((losses / mask.sum(1).to(device)).argmin() == label)
        return right

    for dtype in (torch.float32, torch.bfloat16):
        times = []
        with torch.autocast(device.type, dtype) if dtype != torch.float32 else contextlib.nullcontext():
            for r in range(-1, rounds):  # round -1 warms up
                rendered = [hellaswag.render_example(e)[1:] for e in pick(max(r, 0), n_naive if r >= 0 else 4)]
                questions = hellaswag.prepare(pick(max(r, 0), n_fast if r >= 0 else 4), model)
                start = time.perf_counter()
                naive(rendered)
                between = time.perf_counter()
                hellaswag.evaluate(model, questions)
                times.append(((between - start) / len(rendered), (time.perf_counter() - between) / len(questions.labels)))
        slow, fast = (statistics.median(t) for t in zip(*times[1:]))
        ratio = statistics.median(s / f for s, f in times[1:])
        print(f"{str(dtype)[6:]:<9} one at a time {1 / slow:7.2f} examples/s, evaluate {1 / fast:8.2f} examples/s: "
              f"{ratio:.2f}x (rounds {', '.join(f'{s / f:.2f}' for s, f in times[1:])})", flush=True)
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


BENCHES["hellaswag"] = bench_hellaswag


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=[*BENCHES, "all"])
    which = parser.parse_args().which
    print(machine())
    for name in BENCHES if which == "all" else [which]:
        print(f"\n## {name}")
        BENCHES[name]()


if __name__ == "__main__":
    main()
