"""Check that an edited train_gpt2.py still keeps its promises.

    python tests/check.py                      # with the quick start's settings, in float32
    python tests/check.py --optimizer=adamw    # with flags of the script

Ten short runs are made, two at a time, and the files that they leave behind are compared. Each
check prints one line. Exit status 1: at least one check is broken; 2: none is broken, but at least
one could not be made. Facts about this version and the committed one follow, without a judgement.
"""
import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
CHECKS = {  # what each check promises
    "same": "the same command twice gives the same losses and weights",
    "evaluation": "more validations and samples do not change the training losses",
    "resume": "a run that is killed and resumed is the same as one that is not",
    "B": "with half of B, losses are the same up to rounding ({})",
    "processes": "with several processes, losses are the same up to rounding ({})",
    "saved": "a model that is loaded from a checkpoint has the validation loss of the trained one",
    "samples": "greedy samples are the most likely tokens, also beyond the context",
    "causal": "logits depend on all earlier tokens and on no later one",
    "loss": "the loss in eval mode is the cross-entropy of the logits",
    "trains": "each trainable parameter is in one optimizer and has changed"}
METRICS = ("train", "norm", "val")
NUDGE = 1e-6      # weights of the run that measures rounding are changed by this
FACTORS = {"train": 5, "val": 5, "norm": 100}  # see rounding()
PRECISION = 2e-6  # of the values in log.txt

def parse_flags():
    """Return the script's flags, as a list, and the number of steps."""
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--max_steps", type=int, default=20)
    known, flags = parser.parse_known_args()
    defaults = dict(data=ROOT / "input.txt", dtype="float32", warmup_steps=2, sample_every=0,
                    hellaswag_every=0, eval_every=max(1, known.max_steps // 2), val_tokens=8192,
                    print_every=0)
    defaults = [f"--{name}={value}" for name, value in defaults.items()]
    return [*defaults, *flags, f"--max_steps={known.max_steps}"], known.max_steps

# ---- in the process of a run
def child(job):
    """Do what `python train_gpt2.py` does, with the additions that `job` asks for.

    Each process writes what it has found to rank_N.json in the folder of the run.
    """
    if "RANK" in os.environ:
        threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    sys.path.insert(0, job["scripts"])
    import train_gpt2 as t
    t.export = t.plot_curves = lambda *_: None  # they would take seconds
    train, train_step, seconds, rates = t.train, t.train_step, [], []

    def step_or_die(run):
        if run.step == job["kill_at"]:
            if run.last_save:
                run.last_save.result()  # only steps after a checkpoint are lost
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.perf_counter()
        result = train_step(run)
        seconds.append(time.perf_counter() - start)
        rates.append(run.optimizers[0].param_groups[0]["lr"])
        return result

    def watched(run):
        if job["nudge"]:
            nudge_weights(run.model, job["nudge"])
        first = checksums(run.model)
        if not job["look"]:
            train(run)
        report = {"first": first, "last": checksums(run.model), "seconds": seconds, "lr": rates,
                  "cfg": dataclasses.asdict(run.cfg), **machine_of(run)}
        if job["inspect"] and t.RANK == 0:
            report |= inspect(run, first)
        Path(job["folder"], f"rank_{t.RANK}.json").write_text(json.dumps(report))
    t.train, t.train_step, sys.argv = watched, step_or_die, ["train_gpt2.py", *job["flags"]]
    t.main()

def machine_of(run):
    """Return the type of the device, a text for each GPU, and the peak memory of this process."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    gpus = gpus if run.device.type == "cuda" else []
    return {"device": run.device.type,
            "gpus": [f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB, compute capability "
                     f"{gpu.major}.{gpu.minor})" for gpu in gpus],
            "peak": torch.cuda.max_memory_allocated() if gpus else
            1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}

def end_with(parent):
    """End this process when its parent ends. torchrun's processes would survive a SIGKILL to it."""
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(1)

@torch.no_grad()
def nudge_weights(model, size):
    """Change each weight at random, by a factor that differs from 1 by about `size`."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.mul_(1 + size * torch.randn(p.shape, generator=generator).to(p.device))

def checksums(model):
    """Return {name of a parameter: [number of elements, checksum of their values]}."""
    return {name: [p.numel(), zlib.crc32(p.detach().flatten().cpu().view(torch.uint8).numpy())]
            for name, p in model.named_parameters()}

def inspect(run, first):
    """Return {name of a check: problem, or "" if there is none, or {"error": ...}}."""
    x, y = run.val_loader.batch(0, min(run.cfg.B, 4), run.device)
    checks = {"samples": lambda: problem_with_samples(run.model, x),
              "causal": lambda: problem_with_logits(run.model, x),
              "loss": lambda: problem_with_loss(run.model, x, y),
              "trains": lambda: problem_with_parameters(run, first)}
    report = {}
    for name, check in checks.items():
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                report[name] = check()
        except Exception:
            report[name] = {"error": line_of_script(traceback.format_exc())}
    return report

def problem_with_samples(model, x):
    """Compare generate() with a plain loop, for a prompt in the context and a longer one."""
    size = model.config.block_size
    for prompt in (x[:1, :5], x.flatten()[None, :size + 3] if x.numel() > size + 3 else
                   x[:1].repeat(1, size // x.size(1) + 2)):
        expected = prompt
        for _ in range(8):
            logits = model(expected[:, -size:])[0][:, -1]
            expected = torch.cat((expected, logits.argmax(-1, keepdim=True)), dim=1)
        if not torch.equal(model.generate(prompt, 8, temperature=0), expected):
            return f"another token is sampled after a prompt of {prompt.size(1)} tokens"
    return ""

def problem_with_logits(model, x):
    """Change tokens, and look which logits change.

    <|endoftext|>, the last id, is replaced, because a model may hide earlier documents.
    """
    x, n = x[:1].clamp(max=model.config.vocab_size - 2), x.size(1)
    for mode, training in (("training", True), ("eval", False)):
        def logits(idx):
            model.train(training)
            torch.manual_seed(0)  # the same dropout
            result = model(idx)[0]
            model.eval()
            return result
        for k in (1, n // 2, n - 1):
            later = x.clone()
            later[:, k:] = x[:, k:].flip(1) ^ 1
            a, b = logits(x)[:, :k], logits(later)[:, :k]
            if not torch.allclose(a, b, rtol=1e-4, atol=1e-5):
                return f"in {mode} mode, tokens from position {k} on change earlier logits"
        first = x.clone()
        first[:, 0] ^= 1
        if torch.equal(logits(x)[:, -1], logits(first)[:, -1]):
            return f"in {mode} mode, the first token does not change the last logits"
    return ""

def problem_with_loss(model, x, y):
    """Compare the loss with the cross-entropy of the logits."""
    logits, loss = model(x, y)
    expected = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
    _, without_logits = model(x, y, return_logits=False)
    for value in (loss, without_logits):
        if not torch.isclose(value.float(), expected, rtol=1e-5, atol=1e-5):
            return f"the loss is {value:.6f}, the cross-entropy {expected:.6f}"
    return ""

def problem_with_parameters(run, first):
    """Return which trainable parameters are in no optimizer, in several, or have not changed."""
    groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
    n_groups = Counter(id(p) for group in groups for p in group["params"])
    last = checksums(run.model)
    for name, p in run.model.named_parameters():
        if p.requires_grad and n_groups[id(p)] != 1:
            return f"{name} is in {n_groups[id(p)]} optimizer groups"
        if p.requires_grad and last[name] == first[name]:
            return f"{name} has not changed"
    return ""

# ---- the runs
def line_of_script(text):
    """Return the error of a traceback, with the last line of train_gpt2.py that is in it."""
    text = re.sub(r"^\[rank\d+\]: ?", "", text.strip(), flags=re.M)  # torchrun's prefix
    if message := re.search(r"^train_gpt2\.py: (.+?)\.?$", text, re.M):
        return message[1]
    lines = text.splitlines() or ["no message"]
    places = [i for i, line in enumerate(lines) if re.search(r'train_gpt2\.py", line \d+', line)]
    if not places:
        return lines[-1]
    number = re.search(r"line (\d+)", lines[places[-1]])[1]
    error = next((line for line in lines[places[-1] + 2:] if line[:1].isalpha()), lines[-1])
    return f"train_gpt2.py, line {number}: {lines[places[-1] + 1].strip()} ({error})"

class Failed(Exception):
    """A run that a check needs has failed."""

class Result(NamedTuple):
    """What a run has left behind."""
    log: dict    # {(step, metric): value}
    ranks: list  # what each process has written

    report = property(lambda self: self.ranks[0])

class Runs:
    """Makes runs in a folder, with the same flags, and ends those that hang."""
    def __init__(self, folder, flags, env):
        self.folder, self.flags = folder, flags
        # torchrun leaves folders behind if it is killed, but tiktoken's cache should be kept
        self.env = {"TIKTOKEN_CACHE_DIR": f"{tempfile.gettempdir()}/data-gym-cache"} | env | {
            "TMPDIR": str(folder), "WANDB_MODE": "disabled"}
        self.processes, self.timeout = set(), 600
        self.executor = ThreadPoolExecutor(max_workers=2)
        self.show = lambda folder: None  # called twice per second, with the folder of the run

    def run(self, name, *flags, processes=1, scripts=None, folder=None, **job):
        """Make a run, wait for it, and return its Result. Raise Failed if it fails."""
        folder = self.folder / (folder or name)
        job = dict(kill_at=None, nudge=0, inspect=False, look=False) | job | dict(
            scripts=str(scripts or ROOT), folder=str(folder),
            flags=[*self.flags, *flags, f"--log_dir={folder}"])
        command = [sys.executable, __file__, "--child", json.dumps(job)]
        if processes > 1:
            command[1:1] = ["-m", "torch.distributed.run", "--standalone",
                            f"--nproc_per_node={processes}"]
        process = subprocess.Popen(command, env=self.env, stdout=subprocess.DEVNULL, text=True,
                                   stderr=subprocess.PIPE, start_new_session=True)
        self.processes.add(process)
        err, killed = self.wait(process, folder), job["kill_at"] is not None
        # If a process is killed, torchrun ends the others and exits with status 1
        if process.returncode not in ((-signal.SIGKILL, 1) if killed else (0,)):
            raise Failed(line_of_script(err))
        return self.read(folder)

    def wait(self, process, folder):
        """Wait until a process ends, and return its stderr. Raise Failed if it takes too long."""
        end = time.monotonic() + self.timeout
        try:
            while time.monotonic() < end:
                try:
                    return process.communicate(timeout=0.5)[1]
                except subprocess.TimeoutExpired:
                    self.show(folder)
            raise Failed(f"it was ended after {self.timeout:.0f} s")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=10)  # until all of its processes have ended

    def read(self, folder):
        log = {}
        for line in (folder / "log.txt").read_text().splitlines():
            step, metric, value = line.split()
            if metric in METRICS:
                log[int(step), metric] = float(value)
        return Result(log, [json.loads(path.read_text())
                            for path in sorted(folder.glob("rank_*.json"))])

    def close(self):
        self.timeout = 0  # also for runs that another thread is about to start
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        self.executor.shutdown(cancel_futures=True)

@contextlib.contextmanager
def temporary(flags, env):
    """Provide Runs in a temporary folder. At the end, also after a signal, delete everything."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    runs = Runs(Path(tempfile.mkdtemp()), flags, env)
    try:
        yield runs
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        runs.close()
        shutil.rmtree(runs.folder, ignore_errors=True)

def start_all(runs, base, steps):
    """Start the runs that are compared with `base`. Return {name: function that returns it}."""
    cfg = base.report["cfg"]
    half, plain = f"--B={max(1, cfg['B'] // 2)}", "--dropout=0"  # dropout masks depend on B

    def resumed():
        runs.run("killed", kill_at=steps * 3 // 4)
        return runs.run("resumed", folder="killed")

    def reloaded():  # a complete run is evaluated again
        shutil.copytree(runs.folder / "base", runs.folder / "reloaded")
        (runs.folder / "reloaded" / "log.txt").unlink()
        return runs.run("reloaded")
    jobs = {
        "again": lambda: runs.run("again"),
        "evaluated": lambda: runs.run("evaluated", "--eval_every=1", "--sample_every=2",
                                      "--sample_tokens=4"),
        "resumed": resumed,
        "plain": lambda: runs.run("plain", plain) if cfg["dropout"] else base,
        "nudged": lambda: runs.run("nudged", plain, nudge=NUDGE),
        "half": lambda: runs.run("half", plain, half),
        "several": lambda: runs.run("several", plain, half, processes=most_processes(base)),
        "reloaded": reloaded,
        "before": lambda: runs.run("before", scripts=committed(runs.folder))}
    return {name: runs.executor.submit(job).result for name, job in jobs.items()}

def most_processes(base):
    """Return how many processes can share a step here: on a CPU 2, otherwise all GPUs, if the
    rows can be divided among them.
    """
    cfg, available = base.report["cfg"], len(base.report["gpus"]) or 2
    rows = cfg["total_batch_size"] // cfg["T"]
    return max(n for n in range(1, available + 1) if rows % n == 0)

def committed(folder):
    """Return a folder with the scripts of the last commit."""
    archive = folder / "commit.tar"
    if subprocess.run(["git", "archive", "-o", archive, "HEAD"], cwd=ROOT,
                      capture_output=True).returncode:
        raise Failed("no commit is here")
    shutil.unpack_archive(archive, folder / "commit", filter="data")
    return folder / "commit"

# ---- the checks
def difference(a, b, allowed=None, metrics=METRICS):
    """Return where two logs differ, or "". allowed: {(step, metric): by how much they may}."""
    a, b = ({key: log[key] for key in log if key[1] in metrics} for log in (a, b))
    for key in sorted(a.keys() | b.keys()):
        if key not in a or key not in b:
            return f"only one run has {key[1]} of step {key[0]}"
        if not abs(a[key] - b[key]) <= (allowed[key] if allowed else 0):  # also true for NaN
            return f"{key[1]} of step {key[0]} is {a[key]:.7g} and {b[key]:.7g}"
    return ""

def rounding(plain, nudged):
    """Return {(step, metric): how far rounding may move it}, measured by a run of nudged weights.

    A single value may differ little by chance, so the largest relative difference of all values up
    to each step counts, times a factor. Thus, the first steps are the strict ones. Rounding moves
    the norms most, and after the first three steps without any limit.
    """
    allowed, largest = {}, 0.0
    for step in sorted({step for step, _ in plain}):
        values = {key: abs(value) for key, value in plain.items() if key[0] == step}
        largest = max(largest, *(abs(nudged[key] - plain[key]) / max(values[key], 1e-9)
                                 for key in values))
        for key, value in values.items():
            allowed[key] = FACTORS[key[1]] * largest * value + PRECISION * max(1, value)
            if key[1] == "norm" and step > 2:
                allowed[key] = math.inf
    return allowed

def limits(allowed, last):
    """Return a text with the differences that are allowed in the first and in the last step."""
    return f"{allowed[0, 'train']:.0e} in step 0, {allowed[last, 'train']:.0e} in step {last}"

def difference_of_weights(a, b):
    """Return which of the last weights differ between two reports, or ""."""
    different = [name for name in a["last"] if a["last"][name] != b["last"].get(name)]
    return f"the weights {different[0]} differ" if different else ""

def problem(name, get, base, allowed):
    """Return why a check is broken, or "". Raise Failed if it cannot be made."""
    if name in ("same", "resume"):
        other = get["again" if name == "same" else "resumed"]()
        return difference(base.log, other.log) or difference_of_weights(base.report, other.report)
    if name == "evaluation":
        return difference(base.log, get["evaluated"]().log, metrics=["train"])
    if name == "B":
        return difference(get["plain"]().log, get["half"]().log, allowed())
    if name == "processes":
        if most_processes(base) == 1:
            raise Failed("it needs two GPUs")
        log, ranks = get["several"]()
        return (difference(get["plain"]().log, log, allowed())
                or difference_of_weights(ranks[0], ranks[-1]))
    if name == "saved":
        step, val = max((step, val) for (step, name), val in base.log.items() if name == "val")
        again = get["reloaded"]().log[step, "val"]
        return "" if abs(val - again) <= PRECISION * abs(val) else (
            f"val is {val:.7g} after step {step}, and {again:.7g} when it is loaded")
    found = base.report[name]
    if isinstance(found, dict):
        raise Failed(found["error"])
    return found

def print_checks(get, base, last):
    """Print a line for each check. Return the exit status. last: the last step."""
    @functools.cache
    def allowed():
        return rounding(get["plain"]().log, get["nudged"]().log)
    status = 0
    for name, promise in CHECKS.items():
        try:
            if "{" in promise:
                promise = promise.format(limits(allowed(), last))
            found = problem(name, get, base, allowed)
            verdict = f"BROKEN ({found})" if found else "holds"
            status = 1 if found else status
        except Failed as e:
            verdict, status = f"not checked ({e})", status or 2
        print(f"{name:10} {promise}: {verdict}", flush=True)
    return status

def facts_of(result, other, last):
    """Return {fact: value} for a run. last: its last step."""
    log, report, begin = result.log, result.report, other.report["first"]
    return {
        "parameters": sum(size for size, _ in report["first"].values()),
        "weights that begin differently": sum(
            begin.get(name) != value for name, value in report["first"].items()),
        f"learning rate, steps 0, {last // 2}, {last}": " ".join(
            f"{report['lr'][step]:.3g}" for step in (0, last // 2, last)),
        f"train, steps 0 and {last}": f"{log[0, 'train']:.4f} {log[last, 'train']:.4f}",
        "val, last": f"{log[last + 1, 'val']:.4f}",
        "ms per step": f"{1e3 * statistics.median(report['seconds']):.0f}"}

def print_facts(base, before, last):
    """Print facts about the committed version and this one side by side."""
    then, now = facts_of(before, base, last), facts_of(base, before, last)
    for name, *values in ("\n", "committed", "here"), *zip(now, then.values(), now.values()):
        print(f"{name:32} {values[0]!s:>24} {values[1]!s:>24}")
    if not difference(base.log, before.log):
        print("\nAll losses equal those of the committed version: these runs used no edit.")

def main():
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
        return 0
    flags, steps = parse_flags()
    with temporary(flags, os.environ | {"OMP_NUM_THREADS": "1"}) as runs:
        start = time.perf_counter()
        try:
            base = runs.run("base", inspect=True)
        except Failed as e:
            return f"check.py: the script does not train: {e}"
        seconds = time.perf_counter() - start
        runs.timeout = 60 + 10 * seconds
        print(f"One run takes {seconds:.0f} s, so this takes about {6 * seconds:.0f} s\n",
              flush=True)
        get = start_all(runs, base, steps)
        status = print_checks(get, base, steps - 1)
        try:
            print_facts(base, get["before"](), steps - 1)
        except Failed as e:
            print(f"\nThere are no facts about the committed version: {e}")
        return status

if __name__ == "__main__":
    sys.exit(main())
