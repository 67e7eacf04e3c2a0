"""Benchmarks of train_gpt2.py. No benchmark fails because of a slow time.

    python tests/bench.py guard                          # five delays that users notice
    python tests/bench.py guard --script=OLD/train_gpt2.py   # the same, in turns with another copy
    python tests/bench.py step        # a step, with its speed-ups added one by one

If two copies are compared, both are measured in turns, and medians are shown. If a measurement of
guard fails, its row gives the reason, and the next row is measured.
"""
import argparse
import contextlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Import train_gpt2 before torch, because it sets GOMP_SPINCOUNT, which torch reads at its import
import train_gpt2 as t  # noqa: E402
import torch  # noqa: E402

CUDA = torch.cuda.is_available()
QUICK = ["--device=cpu", f"--data={ROOT / 'input.txt'}"]  # the quick start
# The 124M model on a CPU. It needs the vocabulary of GPT-2
LARGE = [*QUICK, "--encoding=gpt2", "--n_layer=12", "--n_head=12", "--n_embd=768", "--T=256",
         "--optimizer=adamw", "--max_lr=6e-4"]

def cells(*values):
    return f"| {' | '.join(map(str, values))} |"

def header(*names):
    return cells(*names) + "\n|" + " --- |" * len(names)

def output_of(command):
    """Run a command in an empty folder. Return its output, or raise RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, *map(str, command)], cwd=folder,
                              capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
    return done.stdout

# ---- guard: each function measures one copy of the script as its users start it
def ms_per_step(flags, script):
    """Return the median of the times in the lines of a run, without its first third."""
    lines = output_of([script, *flags, "--eval_every=0", "--sample_every=0", "--print_every=1"])
    times = [float(ms) for ms in re.findall(r" train .* (\d+) ms ", lines)]
    return statistics.median(times[len(times) // 3:])

# Time each save of a run, after the one before it has been written
TIMED_SAVES = """
import sys, time
sys.path.insert(0, sys.argv.pop(1))
import train_gpt2 as t
save = t.save

def timed_save(run):
    if run.last_save:
        run.last_save.result()
    start = time.perf_counter()
    save(run)
    print("delay", time.perf_counter() - start, flush=True)

t.save = timed_save
t.main()
"""

def delay_of_a_save(script):
    """Return the median delay in seconds of saves of the 124M model, without the first one."""
    lines = output_of(["-c", TIMED_SAVES, script.parent, *LARGE, "--B=1", "--max_steps=8",
                       "--total_batch_size=256", "--val_tokens=256", "--sample_every=0",
                       "--eval_every=2"])
    delays = [float(seconds) for seconds in re.findall(r"^delay (.*)$", lines, re.M)]
    return statistics.median(delays[1:])

def seconds_to_first_step(script):
    """Return the seconds from the command to the line about the first step of the quick start."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(
            [sys.executable, script, *QUICK], cwd=folder, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True) as process:
        found = any(re.match(r" *0/\d+ train ", line) for line in process.stdout)
        seconds = time.perf_counter() - start
        process.kill()
    if not found:
        raise RuntimeError("the quick start printed no line about its first step")
    return seconds

PEAK = """
import resource, subprocess, sys
subprocess.run([sys.executable, *sys.argv[1:]], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9)
"""

def peak_memory(script):
    """Return the peak memory in GB of 40 steps of the quick start, with one sample (on Linux)."""
    return float(output_of(["-c", PEAK, script, *QUICK, "--max_steps=40"]))

GUARD = {"quick start, one step (ms)": (partial(ms_per_step, [*QUICK, "--max_steps=90"]), 3),
         "124M on a CPU, one step of 8 x 256 tokens (ms)": (partial(
             ms_per_step, [*LARGE, "--B=8", "--total_batch_size=2048", "--max_steps=6"]), 2),
         "124M, delay of training by a save (s)": (delay_of_a_save, 1),
         "quick start, from the command to the first step (s)": (seconds_to_first_step, 5),
         "quick start, peak memory (GB)": (peak_memory, 1)}

def guard(args):
    """Measure five delays that users notice. Smaller is better in every row."""
    scripts = [ROOT / "train_gpt2.py"] + ([args.script.resolve()] if args.script else [])
    yield header("figure", "here", *(["the other copy", "here / other"] if args.script else []))
    for name, (measure, rounds) in GUARD.items():
        if not re.search(args.only, name):
            continue
        found = [[] for _ in scripts]
        try:
            for _ in range(rounds):
                for values, script in zip(found, scripts):
                    values.append(measure(script))
        except (RuntimeError, subprocess.TimeoutExpired) as e:
            yield cells(name, f"not measured: {e}")
            continue
        medians = [statistics.median(values) for values in found]
        ratio = [f"{medians[0] / medians[1]:.2f}"] if args.script else []
        yield cells(name, *(f"{median:.4g}" for median in medians), *ratio)

# ---- step
def time_steps(fused=True, logits=False, **settings):
    """Return the median time of a step in ms and, on a GPU, the peak memory in GiB, else 0.

    fused=False: AdamW uses torch's default, foreach. logits=True: the model returns unused logits.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        cfg = t.Config(data=str(ROOT / "input.txt"), log_dir=folder, hellaswag_every=0, **settings)
        run = t.set_up(cfg, t.set_up_device("auto"))
    for group in run.optimizers[0].param_groups:
        group.update(fused=fused, foreach=not fused)
    if logits:  # drop return_logits=False from each call
        run.model.register_forward_pre_hook(lambda _, args, words: (args, {}), with_kwargs=True)
    seconds = []
    for _ in range(25 if CUDA else 5):
        start = time.perf_counter()
        t.train_step(run)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0
    return statistics.median(seconds[5 if CUDA else 1:]) * 1e3, peak

def step(args):
    """Time a step of the 124M model, with its speed-ups added one by one."""
    B, T = (64, 1024) if CUDA else (8, 256)
    size = dict(B=B, T=T, total_batch_size=B * T, dtype="bfloat16", compile=False)
    variants = {"eager, foreach AdamW, logits returned": dict(fused=False, logits=True),
                "... with fused AdamW": dict(logits=True),
                "... and without logits (the default on a CPU)": {},
                "compiled, logits returned": dict(compile=True, logits=True),
                "compiled, without logits (the default on a GPU)": dict(compile=True)}
    yield header("variant", "ms per step", "tokens per second", "peak memory, GiB")
    for name, changes in variants.items():
        ms, gib = time_steps(**size | changes)
        yield cells(name, f"{ms:.4g}", f"{B * T / ms * 1e3:,.0f}", f"{gib:.2f}" if gib else "-")

def main():
    benches = dict(guard=guard, step=step)
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("which", choices=benches)
    parser.add_argument("--script", type=Path, help="another train_gpt2.py, for guard")
    parser.add_argument("--only", default="", help="a regular expression: only these rows of guard")
    args = parser.parse_args()
    print(f"{time.strftime('%F %R')}; Python {sys.version.split()[0]}; torch {torch.__version__}; "
          f"{torch.cuda.get_device_name() if CUDA else 'no GPU'}\n")
    for line in benches[args.which](args):
        print(line, flush=True)

if __name__ == "__main__":
    main()
