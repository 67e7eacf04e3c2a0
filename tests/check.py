"""Check that an edited train_gpt2.py still keeps its promises.

    python tests/check.py                      # with the quick start's settings, in float32
    python tests/check.py --optimizer=adamw    # with flags of the script

Ten short runs are made, two at a time, and the files that they leave behind are compared. Each
check prints one line. Exit status 1: at least one check is broken; 2: none is broken, but at least
one could not be made. Facts about this version and the committed one follow, without a judgement.
"""
import argparse
import io
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
ENV = os.environ | {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
CHECKS = {  # what each check promises
    "same": "the same command twice gives the same losses and weights",
    "evaluation": "more validations and samples do not change the training losses",
    "resume": "a run that is killed and resumed is the same as one that is not",
    "B": "with half of B, losses are the same up to rounding",
    "processes": "with two processes, losses are the same up to rounding",
    "saved": "a model that is loaded from a checkpoint has the validation loss of the trained one",
    "samples": "greedy samples are the most likely tokens, also beyond the context",
    "causal": "logits depend on all earlier tokens and on no later one",
    "loss": "the loss in eval mode is the cross-entropy of the logits",
    "trains": "each trainable parameter is in one optimizer and has changed"}
METRICS = ("train", "norm", "val")

def parse_flags():
    """Return the script's flags, as a list, and the number of steps."""
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--dropout", type=float, default=0.0)
    known, flags = parser.parse_known_args()
    half = max(1, known.max_steps // 2)
    defaults = dict(dtype="float32", eval_every=half, sample_every=0, hellaswag_every=0,
                    val_tokens=8192, print_every=0)
    flags = [f"--{name}={value}" for name, value in defaults.items()] + flags
    return [*flags, f"--max_steps={known.max_steps}", f"--dropout={known.dropout}"], known

# ---- in the process of a run
def child(job):
    """Do what `python train_gpt2.py` does, with the additions that `job` asks for."""
    sys.path.insert(0, job["scripts"])
    import train_gpt2 as t
    t.export = t.plot_curves = lambda *_: None  # they would take seconds
    train, train_step, seconds = t.train, t.train_step, []

    def step_or_die(run):
        if run.step == job["kill_at"]:
            run.last_save.result()  # only steps after a checkpoint are lost
            os._exit(9)
        start = time.perf_counter()
        result = train_step(run)
        seconds.append(time.perf_counter() - start)
        return result

    def watched(run):
        if job["nudge"]:
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for p in run.model.parameters():
                    noise = torch.randn(p.shape, generator=generator).to(p.device)
                    p.mul_(1 + job["nudge"] * noise)
        first = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        facts = describe(t, run, first)
        train(run)
        if job["inspect"] and t.RANK == 0:
            report = {"facts": facts, "ms": 1e3 * statistics.median(seconds), **inspect(run, first)}
            Path(job["folder"], "report.json").write_text(json.dumps(report))
    t.train, t.train_step, sys.argv = watched, step_or_die, ["train_gpt2.py", *job["flags"]]
    t.main()

def describe(t, run, first):
    """Return facts about a run before its first step."""
    cfg = run.cfg
    steps = [cfg.max_steps * i // 4 for i in range(5)]
    return {"parameters": sum(p.numel() for p in first.values()),
            "tokens per step": cfg.total_batch_size,
            "learning rate at 5 steps": " ".join(f"{t.get_lr(n, cfg):.3g}" for n in steps),
            "weights": {name: f"{tuple(p.shape)} {p.double().sum():.9g} {p.double().norm():.9g}"
                        for name, p in first.items()}}

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
    """Change tokens, and look which logits change."""
    x, n = x[:1], x.size(1)
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
    n_groups = {id(p): 0 for p in run.model.parameters()}
    for group in groups:
        for p in group["params"]:
            n_groups[id(p)] = n_groups.get(id(p), 0) + 1
    for name, p in run.model.named_parameters():
        if p.requires_grad and n_groups[id(p)] != 1:
            return f"{name} is in {n_groups[id(p)]} optimizer groups"
        if p.requires_grad and torch.equal(p, first[name]):
            return f"{name} has not changed"
    return ""

# ---- the runs
def line_of_script(text):
    """Return the error of a traceback, with the last line of train_gpt2.py that is in it."""
    text = re.sub(r"^\[rank\d+\]: ?", "", text.strip(), flags=re.M)  # torchrun's prefix
    lines = text.splitlines() or ["no message"]
    places = [i for i, line in enumerate(lines) if re.search(r'train_gpt2\.py", line \d+', line)]
    if not places:
        return lines[-1]
    number = re.search(r"line (\d+)", lines[places[-1]])[1]
    error = next((line for line in lines[places[-1] + 2:] if line[:1].isalpha()), lines[-1])
    return f"train_gpt2.py, line {number}: {lines[places[-1] + 1].strip()} ({error})"

class Failed(Exception):
    """A run that a check needs has failed."""

@dataclass
class Result:
    """What a run has left behind."""
    log: dict         # {(step, metric): value}
    checkpoint: dict  # the last one
    report: dict      # what inspect() returned

class Runs:
    """Makes each run at most once, and kills what is still running at the end."""
    def __init__(self, folder, flags):
        self.folder, self.flags = folder, flags
        self.processes, self.timeout = set(), 600

    def run(self, name, *flags, processes=1, scripts=None, folder=None, **job):
        """Make a run, wait for it, and return its Result. Raise Failed if it fails."""
        folder = self.folder / (folder or name)
        job = dict(kill_at=None, nudge=0, inspect=False) | job | dict(
            scripts=str(scripts or ROOT), folder=str(folder),
            flags=[*self.flags, *flags, f"--log_dir={folder}"])
        command = [sys.executable, __file__, "--child", json.dumps(job)]
        if processes > 1:
            command[1:1] = ["-m", "torch.distributed.run", "--standalone",
                            f"--nproc_per_node={processes}"]
        process = subprocess.Popen(command, env=ENV, stdout=subprocess.DEVNULL, text=True,
                                   stderr=subprocess.PIPE, start_new_session=True)
        self.processes.add(process)
        try:
            _, err = process.communicate(timeout=self.timeout)
        except subprocess.TimeoutExpired:
            raise Failed(f"it took more than {self.timeout:.0f} s") from None
        if process.returncode != (9 if job["kill_at"] is not None else 0):
            raise Failed(line_of_script(err))
        return None if job["kill_at"] is not None else self.read(folder)

    def read(self, folder):
        log = {}
        for line in (folder / "log.txt").read_text().splitlines():
            step, metric, value = line.split()
            if metric in METRICS:
                log[int(step), metric] = float(value)
        last = max(folder.glob("checkpoint_*.pt"))
        report = folder / "report.json"
        return Result(log, torch.load(last, map_location="cpu", weights_only=True),
                      json.loads(report.read_text()) if report.exists() else {})

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

def start_all(runs, base, known, executor):
    """Start the runs that are compared with `base`. Return {name: function that returns it}."""
    B = base.checkpoint["config"]["B"]
    steps, last = known.max_steps, runs.folder / "base" / f"checkpoint_{known.max_steps:05d}.pt"
    kill_at = steps * 3 // 4

    def resumed():
        runs.run("killed", kill_at=kill_at)
        return runs.run("resumed", folder="killed")
    jobs = {
        "again": lambda: runs.run("again"),
        "evaluated": lambda: runs.run("evaluated", "--eval_every=1", "--sample_every=2",
                                      "--sample_tokens=4"),
        "resumed": resumed,
        "plain": (lambda: runs.run("plain", "--dropout=0")) if known.dropout else lambda: base,
        "nudged": lambda: runs.run("nudged", "--dropout=0", nudge=1e-6),
        "half": lambda: runs.run("half", "--dropout=0", f"--B={max(1, B // 2)}"),
        "two": lambda: runs.run("two", "--dropout=0", f"--B={max(1, B // 2)}", processes=2),
        "reloaded": lambda: runs.run("reloaded", f"--init_from={last}", "--max_steps=0"),
        "before": lambda: runs.run("before", scripts=committed(runs.folder), inspect=True)}
    return {name: executor.submit(job).result for name, job in jobs.items()}

def committed(folder):
    """Return a folder with the scripts of the last commit."""
    done = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True)
    if done.returncode:
        raise Failed("no commit is here")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder / "commit", filter="data")
    return folder / "commit"

# ---- the checks
def difference(a, b, allowed=0.0, metrics=METRICS):
    """Return where two logs differ by more than `allowed`, or ""."""
    a, b = ({key: log[key] for key in log if key[1] in metrics} for log in (a, b))
    for key in sorted(a.keys() | b.keys()):
        if key not in a or key not in b:
            return f"only one run has {key[1]} of step {key[0]}"
        if not abs(a[key] - b[key]) <= allowed:  # also true for NaN
            return f"{key[1]} of step {key[0]} is {a[key]:.7g} and {b[key]:.7g}"
    return ""

def difference_of_weights(a, b):
    """Return the name of the first tensor that differs between two checkpoints, or ""."""
    for name, tensor in a["model"].items():
        if name not in b["model"] or not torch.equal(tensor, b["model"][name]):
            return f"the weights {name} differ"
    return ""

def compared(a, b):
    return difference(a.log, b.log) or difference_of_weights(a.checkpoint, b.checkpoint)

def rounding(get):
    """Return how far losses may differ: by twice as much as those of weights changed by 1e-6."""
    plain, nudged = get["plain"]().log, get["nudged"]().log
    keys = [key for key in plain if key[1] != "norm"]
    return 2 * max(abs(plain[key] - nudged[key]) for key in keys) + 2e-6  # the log's precision

def problem(name, get, base, known):
    """Return why a check is broken, or "". Raise Failed if it cannot be made."""
    losses = ("train", "val")
    if name == "same":
        return compared(base, get["again"]())
    if name == "evaluation":
        return difference(base.log, get["evaluated"]().log, metrics=["train"])
    if name == "resume":
        return compared(base, get["resumed"]())
    if name in ("B", "processes"):
        other = "half" if name == "B" else "two"
        if name == "processes" and torch.cuda.is_available() and torch.cuda.device_count() < 2:
            raise Failed("it needs two GPUs")
        return difference(get["plain"]().log, get[other]().log, rounding(get), losses)
    if name == "saved":
        step, val = max((step, val) for (step, name), val in base.log.items() if name == "val")
        again = get["reloaded"]().log[0, "val"]
        return "" if abs(val - again) <= 2e-6 * abs(val) else (
            f"val is {val:.7g} after step {step}, and {again:.7g} when it is loaded")
    found = base.report[name]
    if isinstance(found, dict):
        raise Failed(found["error"])
    return found

def print_checks(get, base, known):
    """Print a line for each check. Return the exit status."""
    status = 0
    for name, promise in CHECKS.items():
        try:
            found = problem(name, get, base, known)
        except Failed as e:
            status = status or 2
            print(f"{name:10} {promise}: not checked ({e})", flush=True)
            continue
        if found:
            status = 1
        print(f"{name:10} {promise}: {f'BROKEN ({found})' if found else 'holds'}", flush=True)
    return status

def print_facts(base, before):
    """Print facts about the committed version and this one side by side."""
    rows = {}
    for column, result in enumerate((before, base)):
        facts, log = dict(result.report["facts"]), result.log
        weights = facts.pop("weights")
        last = max(step for step, metric in log if metric == "train")
        facts[f"train, steps 0 and {last}"] = f"{log[0, 'train']:.4f} {log[last, 'train']:.4f}"
        facts["val, last"] = f"{max((k, v) for k, v in log.items() if k[1] == 'val')[1]:.4f}"
        other = (base if result is before else before).report["facts"]["weights"]
        changed = sum(other.get(name, text) != text for name, text in weights.items())
        facts["weights that begin differently"] = f"{changed} of {len(weights)}"
        facts["weights that the other lacks"] = f"{len(weights.keys() - other.keys())}"
        facts["ms per step"] = f"{result.report['ms']:.0f}"
        for name, value in facts.items():
            rows.setdefault(name, ["-", "-"])[column] = value
    print(f"\n{'':32} {'committed':>24} {'here':>24}")
    for name, (then, now) in rows.items():
        print(f"{name:32} {then!s:>24} {now!s:>24}")

def main():
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
        return 0
    flags, known = parse_flags()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder, executor = Path(tempfile.mkdtemp()), ThreadPoolExecutor(max_workers=2)
    runs = Runs(folder, flags)
    try:
        start = time.perf_counter()
        try:
            base = runs.run("base", inspect=True)
        except Failed as e:
            sys.exit(f"check.py: the script does not train: {e}")
        seconds = time.perf_counter() - start
        runs.timeout = 60 + 10 * seconds
        print(f"One run takes {seconds:.0f} s, so this takes about {6 * seconds:.0f} s\n",
              flush=True)
        get = start_all(runs, base, known, executor)
        status = print_checks(get, base, known)
        try:
            print_facts(base, get["before"]())
        except Failed as e:
            print(f"\nThere are no facts about the committed version: {e}")
        return status
    finally:
        runs.close()
        executor.shutdown(cancel_futures=True)
        shutil.rmtree(folder, ignore_errors=True)

if __name__ == "__main__":
    sys.exit(main())
