"""Benchmarks of train_gpt2.py. No benchmark fails because of a slow time.

    python tests/bench.py guard                          # five delays that users notice
    python tests/bench.py guard --script=OLD/train_gpt2.py   # the same, in turns with another copy
    python tests/bench.py step        # a step, with its speed-ups added one by one
    python tests/bench.py ladder      # the speed-ups of the lecture "Let's reproduce GPT-2 (124M)"
    python tests/bench.py reference   # losses beside those of a plain loop
    python tests/bench.py gpu         # on a GPU: the default step, ladder, a save, the tests

If two things are compared, both are timed in the same run, in turns, and medians are shown. With
--save=DIR, the output is also written to DIR/<bench>.txt. If a measurement fails, its row gives the
reason, and the next row is measured.
"""
import argparse
import itertools
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Import train_gpt2 before torch, because it sets GOMP_SPINCOUNT, which torch reads at its import
import train_gpt2 as t  # noqa: E402
import torch  # noqa: E402

CUDA = torch.cuda.is_available()
# Dense bfloat16 peak in the data sheets. The first name that occurs in a GPU's name is used
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312}
QUIET = ["--eval_every=0", "--sample_every=0", "--print_every=1"]
# The 124M model on a CPU. input.txt needs the vocabulary of GPT-2
LARGE = ["--device=cpu", f"--data={ROOT / 'input.txt'}", "--encoding=gpt2", "--n_layer=12",
         "--n_head=12", "--n_embd=768", "--T=256", "--optimizer=adamw", "--max_lr=6e-4"]

def cells(*values):
    return f"| {' | '.join(map(str, values))} |"

def header(*names):
    return cells(*names) + "\n|" + " --- |" * len(names)

def output_of(command, timeout=900, **options):
    """Return the output of a command. Raise RuntimeError with its last line if it fails."""
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True,
                          timeout=timeout, **options)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
    return done.stdout

# ---- guard: each function measures one copy of the script as its users start it
def ms_per_step(script, *flags):
    """Return the median of the times in the lines of a run, without its first third."""
    with tempfile.TemporaryDirectory() as folder:
        lines = output_of([script, *QUIET, *flags], cwd=folder)
    times = [float(ms) for ms in re.findall(r" train .* (\d+) ms ", lines)]
    return statistics.median(times[len(times) // 3:])

def quick_start_step(script):
    return ms_per_step(script, "--device=cpu", "--max_steps=90")

def large_step(script):
    return ms_per_step(script, *LARGE, "--B=8", "--total_batch_size=2048", "--max_steps=6")

# Time each save of a run, after the one before it has been written
TIMED_SAVES = """
import sys, time
sys.path.insert(0, sys.argv.pop(1))
import train_gpt2 as t

def timed(save, wait):
    def timed_save(first, *more, **words):
        wait(first)
        start = time.perf_counter()
        save(first, *more, **words)
        print("delay", time.perf_counter() - start, flush=True)
    return timed_save

if hasattr(t, "RunFolder"):  # commit f1ebea6
    t.RunFolder.save = timed(t.RunFolder.save, t.RunFolder.wait_for_save)
else:
    t.save = timed(t.save, lambda run: run.last_save and run.last_save.result())
t.main()
"""

def delay_of_a_save(script):
    """Return the median delay in seconds of saves of the 124M model, without the first one."""
    every = ["--eval_every=2", "--save_every=2"][:2 if "save_every" in script.read_text() else 1]
    with tempfile.TemporaryDirectory() as folder:
        lines = output_of(["-c", TIMED_SAVES, script.parent, *LARGE, "--B=1", "--max_steps=8",
                           "--total_batch_size=256", "--val_tokens=256", "--sample_every=0",
                           *every], cwd=folder)
    delays = [float(seconds) for seconds in re.findall(r"^delay (.*)$", lines, re.M)]
    return statistics.median([delay for delay in delays if delay > 1e-3][1:])  # 0: nothing to save

def seconds_to_first_step(script):
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(
            [sys.executable, script, "--device=cpu"], cwd=folder, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True) as process:
        try:
            for line in process.stdout:
                if re.match(r" *0/\d+ train ", line):
                    return time.perf_counter() - start
        finally:
            process.kill()
    raise RuntimeError("the quick start printed no line about its first step")

PEAK = """
import resource, subprocess, sys
subprocess.run([sys.executable, *sys.argv[1:]], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9)
"""

def peak_memory(script):
    """Return the peak memory in GB of 40 steps of the quick start, with one sample (on Linux)."""
    with tempfile.TemporaryDirectory() as folder:
        return float(output_of(["-c", PEAK, script, "--device=cpu", "--max_steps=40"], cwd=folder))

GUARD = {"quick start, one step (ms)": (quick_start_step, 3),
         "124M on a CPU, one step of 8 x 256 tokens (ms)": (large_step, 2),
         "124M, delay of training by a save (s)": (delay_of_a_save, 1),
         "quick start, from the command to the first step (s)": (seconds_to_first_step, 5),
         "quick start, peak memory (GB)": (peak_memory, 1)}

def guard(args):
    """Measure five delays that users notice. Smaller is better in every row.

    With --script, the same is measured with another copy of the script, in turns.
    """
    scripts = [ROOT / "train_gpt2.py"] + ([args.script.resolve()] if args.script else [])
    yield header("figure", "here", *(["the other copy", "here / other"] * bool(args.script)))
    for name, (measure, rounds) in GUARD.items():
        if not re.search(args.only, name):
            continue
        found = [[] for _ in scripts]
        try:
            for _ in range(rounds):
                for values, script in zip(found, scripts):
                    values.append(measure(script))
        except (RuntimeError, subprocess.TimeoutExpired) as e:
            yield cells(name, f"not measured: {t.summary_of(e)}")
            continue
        medians = [statistics.median(values) for values in found]
        ratio = [f"{medians[0] / medians[1]:.2f}"] if args.script else []
        yield cells(name, *(f"{median:.4g}" for median in medians), *ratio)

# ---- step and ladder: each variant is measured in a process of its own
def naive_attention(q, k, v, dropout_p=0.0, is_causal=True):
    """Compute attention and write each (T, T) matrix to memory."""
    future = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.mT / q.size(-1) ** 0.5
    return torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ v

def time_steps(fused=True, logits=False, flash=True, tf32=True, padded=True, **constants):
    """Time steps on random tokens, with some speed-ups removed. Return (ms, GiB, tokens, MFU).

    fused=False: AdamW uses torch's default, foreach. logits=True: the model returns unused logits.
    flash=False: attention writes its matrices to memory. tf32=False: matrices are multiplied in
    full float32. padded=False: the vocabulary has 50,257 rows.
    """
    device = t.set_up_device("auto")
    cfg = t.with_batch_and_steps(t.Config(**constants), rows_per_epoch=10**6)
    if not tf32:
        torch.set_float32_matmul_precision("highest")
    if not flash:
        t.F.scaled_dot_product_attention = naive_attention
    config = t.GPTConfig(block_size=cfg.T, n_layer=cfg.n_layer, n_head=cfg.n_head,
                         n_embd=cfg.n_embd)
    dtype, model = t.pick_dtype(cfg.dtype, device), t.GPT(config)
    if not padded:
        rows = torch.nn.Parameter(model.lm_head.weight[:config.vocab_size].detach().clone())
        model.lm_head.weight = model.transformer.wte.weight = rows
    model.to(device)
    optimizers = t.configure_optimizers(model, cfg, torch.bfloat16)
    if not fused:
        for group in itertools.chain.from_iterable(o.param_groups for o in optimizers):
            group |= dict(fused=False, foreach=True)
    if logits:  # drop return_logits=False from each call
        model.register_forward_pre_hook(lambda _, args, words: (args, {}), with_kwargs=True)
    if cfg.compile is True:
        model.compile()
    tokens = torch.randint(50257, (2**18,), generator=torch.Generator().manual_seed(0)).numpy()
    run = t.Run(
        cfg=cfg, device=device, model=model, ddp_model=model, optimizers=optimizers,
        scaler=torch.amp.GradScaler(device.type, enabled=dtype == torch.float16),
        autocast=t.partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32),
        train_loader=t.DataLoaderLite([tokens], cfg.T), val_loader=None, data_facts={})
    seconds = []
    for _ in range(25 if CUDA else 5):
        start = time.perf_counter()
        t.train_step(run)
        seconds.append(time.perf_counter() - start)
    seconds = statistics.median(seconds[5 if CUDA else 1:])
    flops = cfg.total_batch_size * t.flops_per_token(model, cfg.T)
    gpu = torch.cuda.get_device_name() if CUDA else ""
    peak = next((tflops * 1e12 for name, tflops in PEAK_TFLOPS.items() if name in gpu), 0)
    return (seconds * 1e3, torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0,
            cfg.total_batch_size / seconds, flops / seconds / peak if peak else 0)

def variants_in_turn(variants, **size):
    """Yield a table with a row for each variant. variants: {name: arguments of time_steps()}."""
    yield header("variant", "ms per step", "speed-up over the first row",
                 "speed-up over the row above", "tokens per second", "peak memory, GiB", "MFU")
    first = before = None
    for name, changes in variants.items():
        try:
            ms, gib, tokens, mfu = json.loads(output_of(
                [__file__, "child", json.dumps(size | changes)]).splitlines()[-1])
        except (RuntimeError, subprocess.TimeoutExpired) as e:
            yield cells(name, f"not measured: {t.summary_of(e)}")
            continue
        first, before = first or ms, before or ms
        yield cells(name, f"{ms:.4g}", f"{first / ms:.3f}x", f"{before / ms:.3f}x",
                    f"{tokens:,.0f}", f"{gib:.2f}" if gib else "-", f"{mfu:.1%}" if mfu else "-")
        before = ms

def step(args):
    """Time a step of train_gpt2.py, with its speed-ups added one by one."""
    B, T = (64, 1024) if CUDA else (8, 256)
    ours = {"train_gpt2.py, eager, foreach AdamW, logits returned": dict(fused=False, logits=True),
            "... with fused AdamW": dict(logits=True),
            "... and without logits (the default on a CPU)": {},
            "compiled, logits returned": dict(compile=True, logits=True),
            "compiled, without logits (the default on a GPU)": dict(compile=True)}
    return variants_in_turn(ours, B=B, T=T, total_batch_size=B * T, dtype="bfloat16",
                            compile=False)

def ladder(args):
    """Repeat the speed-ups of the lecture "Let's reproduce GPT-2 (124M)", one after the other.

    The times in parentheses are from the lecture, on an A100 with 16 rows of 1,024 tokens.
    """
    B, T = (16, 1024) if CUDA else (2, 256)
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
    so_far = dict(zip(rungs, itertools.accumulate(rungs.values(), dict.__or__)))
    return variants_in_turn(so_far, B=B, T=T, total_batch_size=B * T)

# ---- reference
def plain_losses(model, cfg, loader):
    """Yield the losses of a plain training loop around the GPT-2 of transformers, on a CPU."""
    groups = [dict(params=[p for p in model.parameters() if (p.dim() >= 2) == decays],
                   weight_decay=cfg.weight_decay * decays) for decays in (True, False)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    rows = cfg.total_batch_size // cfg.T
    model.eval()  # no dropout
    for step in range(cfg.max_steps):
        x, y = loader.batch(step * rows, rows)
        loss = model(x, labels=x, shift_labels=y.contiguous(), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = t.get_lr(step, cfg)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()

def reference(args):
    """Compare the losses with those of a plain loop around transformers' GPT-2.

    The loop uses one process. The script uses one or two processes and different values of B.
    """
    import transformers
    changes = dict(optimizer="adamw", max_lr=1e-3, max_steps=20, dtype="float32", eval_every=0,
                   sample_every=0, device="cpu")
    cfg = t.Config(**t.SMALL | dict(data=str(ROOT / "input.txt")) | changes)
    loader, _ = t.open_data(cfg, t.get_encoding(cfg.encoding))
    with tempfile.TemporaryDirectory() as folder:
        t.save_hugging_face(t.build_model(cfg), folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = list(plain_losses(model, cfg, loader))
    yield f"{cfg.max_steps} steps of 2,048 tokens in float32.\n"
    yield header("processes", "B", "micro-steps", "last loss", "largest difference in any step")
    for processes, B in ((1, 32), (1, 4), (2, 16), (2, 2)):
        with tempfile.TemporaryDirectory() as folder:
            constants = changes | dict(B=B, log_dir=folder)
            output_of(["-m", "torch.distributed.run", "--standalone",
                       f"--nproc_per_node={processes}", ROOT / "train_gpt2.py",
                       *(f"--{name}={value}" for name, value in constants.items())])
            ours = t.read_metrics(folder)["train"]
        worst = max(abs(ours[step] - loss) for step, loss in enumerate(expected))
        yield cells(processes, B, 32 // (B * processes), f"{ours[cfg.max_steps - 1]:.6f}",
                    f"{worst:.1e}")

# ---- gpu and the command line
def gpu(args):
    """Measure on a GPU: the default step, one micro-step, the ladder, a save, and the tests."""
    size = dict(B=64, T=1024, compile=True)
    one = size | dict(total_batch_size=65536)
    yield from variants_in_turn({"the default step": size, "one micro-step": one,
                                 "one micro-step, Muon": one | dict(optimizer="muon")})
    yield from ladder(args)
    seconds = delay_of_a_save(ROOT / "train_gpt2.py")
    yield f"\nA save of the 124M model on the CPU delays training by {seconds:.2f} s."
    yield output_of(["-m", "pytest", "-q", "-rs", ROOT / "tests", "--device=cuda"], timeout=1800)

def main():
    benches = dict(guard=guard, step=step, ladder=ladder, reference=reference, gpu=gpu)
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(time_steps(**json.loads(sys.argv[2]))))
        return
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("which", choices=benches)
    parser.add_argument("--script", type=Path, help="another train_gpt2.py, for guard")
    parser.add_argument("--only", default="", help="a regular expression: only these rows of guard")
    parser.add_argument("--save", type=Path, metavar="DIR", help="also write DIR/<bench>.txt")
    args = parser.parse_args()
    machine = torch.cuda.get_device_name() if CUDA else f"{platform.processor() or 'CPU'}, no GPU"
    lines = [f"# {args.which}: {benches[args.which].__doc__.splitlines()[0]}\n",
             f"{time.strftime('%F %R')}; Python {sys.version.split()[0]}; torch "
             f"{torch.__version__}; {machine}\n"]
    for line in itertools.chain(list(lines), benches[args.which](args)):
        print(line, flush=True)
        lines.append(line)
    if args.save:
        (args.save / f"{args.which}.txt").write_text("\n".join(lines[2:]) + "\n")

if __name__ == "__main__":
    main()
