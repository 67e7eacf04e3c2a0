"""Check that an edited train_gpt2.py still keeps its promises.

    python tests/check.py                      # with the quick start's settings, in float32
    python tests/check.py --optimizer=adamw    # with flags of the script

Nine short runs are made, two at a time, and what they leave behind is compared. Each check prints
one line. Exit status 1: at least one check is broken; 2: none is broken, but at least one could not
be made. Facts about this version and the committed one follow, without a judgement.
"""
import argparse
import contextlib
import dataclasses
import json
import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

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
NUDGE = 1e-6      # weights of the run that measures rounding are changed by this
FACTORS = {"train": 5, "val": 5, "norm": 100}  # {metric that is compared: see rounding()}
PRECISION = 2e-6  # of the values in log.txt

# ---- In the process of a run
def child(job):
    """Do what `python train_gpt2.py` does, with the additions that `job` asks for.

    Write a report to report_N.json or, if the run fails, its error to error_N.txt.
    scripts: the folder of train_gpt2.py. flags: its command line. folder: that of the reports.
    kill_at: the step at which rank 0 kills itself. nudge: how much to change the initial weights.
    look: whether not to train. inspect: whether to check the trained model.
    """
    def timed_step(run):
        if run.step == job.get("kill_at") and t.RANK == 0:
            if run.last_save:
                run.last_save.result()  # only steps after a checkpoint are lost
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.perf_counter()
        result = train_step(run)
        seconds.append(time.perf_counter() - start)
        return result

    def watched(run):
        if "nudge" in job:
            nudge_weights(run.model, job["nudge"])
        first = checksums(run.model)
        if "look" not in job:
            train(run)
        report = dict(machine_of(run), first=first, last=checksums(run.model), seconds=seconds,
                      cfg=dataclasses.asdict(run.cfg), parameters=sum(
                          p.numel() for p in run.model.parameters()))
        if "inspect" in job:
            report |= inspect(t, run, first)
        Path(job["folder"], f"report_{t.RANK}.json").write_text(json.dumps(report))
    try:
        sys.path.insert(0, job["scripts"])
        import train_gpt2 as t
        train, train_step, seconds = t.train, t.train_step, []
        # They would take seconds. And if the last step is not saved, finish() would end the run
        t.finish = t.plot_curves = lambda *_: None
        t.train, t.train_step, sys.argv = watched, timed_step, ["train_gpt2.py", *job["flags"]]
        t.main()
    except BaseException as e:  # a UserError is a SystemExit
        Path(job["folder"], f"error_{os.environ.get('RANK', 0)}.txt").write_text(describe(e))
        raise

def describe(error):
    """Return an error in one line, with the last line of train_gpt2.py that led to it."""
    if isinstance(error, SystemExit):
        return str(error).rstrip(".")
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.endswith("train_gpt2.py"):
            return f"train_gpt2.py, line {frame.lineno}: {frame.line} ({text})"
    return text

def machine_of(run):
    """Return the type of the device, the names of the GPUs, and this process's peak memory."""
    if run.device.type != "cuda":
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"device": run.device.type, "gpus": [], "peak": peak}
    gpus = [run.device] if ":" in run.cfg.device else range(torch.cuda.device_count())
    return {"device": "cuda", "gpus": [torch.cuda.get_device_name(gpu) for gpu in gpus],
            "peak": torch.cuda.max_memory_allocated()}

@torch.no_grad()
def nudge_weights(model, size):
    """Change each weight at random, by a factor that differs from 1 by about `size`."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.mul_(1 + size * torch.randn(p.shape, generator=generator).to(p.device))

def checksums(model):
    """Return {name of a parameter: checksum of its values}."""
    return {name: zlib.crc32(p.detach().flatten().cpu().view(torch.uint8).numpy())
            for name, p in model.named_parameters()}

def inspect(t, run, first):
    """Return {name of a check: problem, or "" if there is none, or {"error": ...}}."""
    x, y = run.val_loader.batch(0, min(run.cfg.B, 4), run.device)
    checks = {"saved": lambda: problem_with_checkpoint(t, run),
              "samples": lambda: problem_with_samples(run.model, x),
              "causal": lambda: problem_with_logits(run.model, x),
              "loss": lambda: problem_with_loss(run.model, x, y),
              "trains": lambda: problem_with_parameters(run, first)}
    found = {}
    for name, check in checks.items():
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                found[name] = check()
        except (Exception, SystemExit) as e:
            found[name] = {"error": describe(e)}
    return found

def problem_with_checkpoint(t, run):
    """Compare the validation losses of the trained model and of the one in its checkpoint."""
    run.last_save.result()
    loaded = t.GPT.from_pretrained(t.newest_checkpoint(run.cfg.log_dir)).to(run.device)
    trained, again = (t.validation_loss(dataclasses.replace(run, model=model))
                      for model in (run.model, loaded))
    return "" if math.isclose(trained, again, rel_tol=PRECISION) else (
        f"val is {trained:.7g} after the last step, and {again:.7g} when it is loaded")

def problem_with_samples(model, x):
    """Compare generate() with a plain loop, for a prompt in the context and a longer one."""
    size = model.config.block_size
    longer = x.flatten().repeat(size // x.numel() + 2)[None, :size + 3]
    for prompt in (x[:1, :5], longer):
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
            if not torch.allclose(logits(x)[:, :k], logits(later)[:, :k], rtol=1e-4, atol=1e-5):
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
    for value in (loss, model(x, y, return_logits=False)[1]):
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

# ---- The runs. preflight.py uses them, too
class Failed(Exception):
    """A run that a check needs has failed."""

# log: {(step, metric): value}. reports: what the child() of each process has written
Result = namedtuple("Result", "log reports")

class Runs:
    """Makes runs of train_gpt2.py with the same flags, and ends those that hang.

    A run has a folder in `folder`, which is deleted when its Result has been read.
    """
    def __init__(self, folder, flags, env):
        self.folder, self.flags, self.env = Path(folder), flags, env
        self.timeout = 600  # in seconds

    def several(self, n, *flags):
        """Make a run with n processes."""
        if n == 1:
            raise Failed("there is one GPU")
        return self.run("several", *flags, processes=n)

    def resumed(self, kill_at, n=1):
        """Kill a run with -9 in this step, and resume it. Return the Results of both parts."""
        killed = self.run("killed", processes=n, kill_at=kill_at)
        again = self.run("resumed", processes=n, log_dir="killed")
        if len(again.reports[0]["seconds"]) > kill_at:
            raise Failed("the killed run did not go on at its checkpoint")
        return killed, again

    def run(self, name, *flags, processes=1, scripts=None, log_dir=None, **job):
        """Make a run, wait for it, and return its Result. Raise Failed if it fails.

        log_dir: the name of the run that is resumed. job: see child().
        """
        folder, log_dir = self.folder / name, self.folder / (log_dir or name)
        folder.mkdir()
        job |= dict(scripts=str(scripts or ROOT), folder=str(folder),
                    flags=[*self.flags, *flags, f"--log_dir={log_dir}"])
        started = []
        try:
            self.start(started, processes, job)
            self.wait(started, job)
            reports = sorted(folder.glob("report_*.json"))
            return Result(read_log(log_dir), [json.loads(path.read_text()) for path in reports])
        finally:
            for process in started:
                process.kill()
                process.wait()
            if "kill_at" not in job:
                shutil.rmtree(folder)
                shutil.rmtree(log_dir, ignore_errors=True)

    def start(self, started, n, job):
        """Start n processes, with the variables that torchrun sets, and add them to `started`."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        # train_gpt2.py sets GOMP_SPINCOUNT, too, but too late: this file has imported torch before
        env = {"GOMP_SPINCOUNT": "10000", **self.env, "WANDB_MODE": "disabled",
               "WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in map(str, range(n)):
            if n > 1:
                env |= {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"}
            started.append(subprocess.Popen(
                [sys.executable, __file__, "--child", json.dumps(job)], env=env,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True))

    def wait(self, started, job):
        """Wait until all processes have ended, or one has failed. Raise Failed if one has failed.

        If rank 0 is to kill itself, the others may fail, or wait for it.
        """
        start, statuses = time.monotonic(), [None]
        while None in statuses and not any(statuses):
            if time.monotonic() - start > self.timeout:
                raise Failed(f"it was ended after {self.timeout:.0f} s")
            time.sleep(0.05)
            statuses = [process.poll() for process in started]
        if any(statuses) and ("kill_at" not in job or started[0].poll() != -signal.SIGKILL):
            # The first error may have caused the other ones
            errors = sorted(Path(job["folder"]).glob("error_*.txt"), key=os.path.getmtime)
            raise Failed(errors[0].read_text() if errors else f"exit statuses {statuses}")

def read_log(folder):
    """Return {(step, metric): value} of a run's log.txt."""
    lines = map(str.split, (folder / "log.txt").read_text().splitlines())
    return {(int(step), metric): float(value) for step, metric, value in lines
            if metric in FACTORS}

@contextlib.contextmanager
def temporary(flags, env):
    """Provide Runs in a temporary folder, which is deleted at the end, also after a signal."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder:
        yield Runs(folder, flags, env)

# ---- Comparing runs
def difference(a, b, allowed=None):
    """Return how the Result b differs from a, or "".

    allowed: {(step, metric): how far the logs may be apart}. Without it, they must be equal, and so
    must the last weights. With it, only the weights of b's processes must be equal.
    """
    for key, value in sorted(a.log.items()):
        other = b.log.get(key, math.nan)
        if not abs(value - other) <= (allowed[key] if allowed else 0):  # also true for NaN
            return f"{key[1]} of step {key[0]} is {value:.7g} and {other:.7g}"
    reports = b.reports if allowed else a.reports + b.reports
    for name, checksum in reports[0]["last"].items():
        if any(report["last"].get(name) != checksum for report in reports):
            return f"the last weights {name} differ"
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

def limits(allowed):
    """Return a text with the differences that are allowed in the first and in the last step."""
    last = max(step for step, metric in allowed if metric == "train")
    return f"{allowed[0, 'train']:.0e} in step 0, {allowed[last, 'train']:.0e} in step {last}"

# ---- The checks
def start_all(runs, base, steps, executor):
    """Start the runs that are compared with `base`. Return {name: function that returns it}.

    "allowed" returns what rounding() allows without dropout, whose masks depend on B.
    """
    cfg, plain = base.reports[0]["cfg"], "--dropout=0"
    half = f"--B={max(1, cfg['B'] // 2)}"
    jobs = {
        "same": lambda: runs.run("same"),
        "committed": lambda: runs.run("committed", scripts=committed(runs.folder)),
        "evaluation": lambda: runs.run("evaluation", "--eval_every=1", "--sample_every=2",
                                       "--sample_tokens=4"),
        "resume": lambda: runs.resumed(kill_at=steps * 3 // 4)[1],
        "plain": lambda: runs.run("plain", plain) if cfg["dropout"] else base,
        "nudged": lambda: runs.run("nudged", plain, nudge=NUDGE),
        "B": lambda: runs.run("B", plain, half),
        "processes": lambda: runs.several(len(base.reports[0]["gpus"]) or 2, plain, half)}
    get = {name: executor.submit(job).result for name, job in jobs.items()}
    return get | {"allowed": lambda: rounding(get["plain"]().log, get["nudged"]().log)}

def committed(folder):
    """Return a folder with the scripts of the last commit."""
    command = ["git", "clone", "-q", ROOT, folder / "commit"]
    if subprocess.run(command, capture_output=True).returncode:
        raise Failed("no commit is here")
    return folder / "commit"

def problem(name, base, get):
    """Return why a check is broken, or "". Raise Failed if it cannot be made."""
    if name in ("same", "evaluation", "resume"):
        return difference(base, get[name]())
    if name in ("B", "processes"):
        return difference(get["plain"](), get[name](), get["allowed"]())
    found = base.reports[0][name]
    if isinstance(found, dict):
        raise Failed(found["error"])
    return found

def print_checks(base, get):
    """Print a line for each check. Return the exit status."""
    verdicts = []
    for name, promise in CHECKS.items():
        try:
            if "{" in promise:
                promise = promise.format(limits(get["allowed"]()))
            found, verdict = problem(name, base, get), "BROKEN"
        except Failed as e:
            found, verdict = e, "BROKEN" if name == "resume" else "not checked"
        verdicts.append(verdict if found else "holds")
        detail = f" ({found})" if found else ""
        print(f"{name:10} {promise}: {verdicts[-1]}{detail}", flush=True)
    return 1 if "BROKEN" in verdicts else 2 if "not checked" in verdicts else 0

def print_facts(before, now, last):
    """Print facts about the committed version and this one side by side. last: the last step."""
    logs, reports = zip(*((run.log, run.reports[0]) for run in (before, now)))
    weights = [report["first"].items() for report in reports]
    facts = {
        "parameters": [report["parameters"] for report in reports],
        "initial weights that differ": [len(own - (weights[0] & weights[1])) for own in weights],
        "train, first": [log[0, "train"] for log in logs],
        "train, last": [log[last, "train"] for log in logs],
        "val, last": [log[last + 1, "val"] for log in logs],
        "ms per step": [round(1e3 * median(report["seconds"])) for report in reports]}
    print(f"\n{'':28} {'committed':>12} {'here':>12}")
    for name, values in facts.items():
        print(f"{name:28} {values[0]:12,} {values[1]:12,}")

def main():
    if sys.argv[1:2] == ["--child"]:
        return child(json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--max_steps", type=int, default=20)
    known, flags = parser.parse_known_args()
    flags = [f"--data={ROOT / 'input.txt'}", "--dtype=float32", "--warmup_steps=2",
             "--sample_every=0", "--hellaswag_every=0", "--val_tokens=8192", "--print_every=0",
             *flags, f"--max_steps={known.max_steps}", f"--eval_every={(known.max_steps + 1) // 2}"]
    executor = ThreadPoolExecutor(max_workers=2)
    with temporary(flags, os.environ | {"OMP_NUM_THREADS": "1"}) as runs:
        start = time.perf_counter()
        try:
            base = runs.run("base", inspect=True)
        except Failed as e:
            return f"check.py: the script does not train: {e}"
        seconds = time.perf_counter() - start
        print(f"The checks will take about {6 * seconds:.0f} s\n", flush=True)
        runs.timeout = 60 + 10 * seconds
        try:
            get = start_all(runs, base, known.max_steps, executor)
            status = print_checks(base, get)
            # These two runs were made at the same time, so their times are comparable
            print_facts(get["committed"](), get["same"](), known.max_steps - 1)
        except Failed as e:
            print(f"\nThere are no facts about the committed version: {e}")
        finally:
            runs.timeout = 0  # ends the runs in other threads
            executor.shutdown(cancel_futures=True)
        return status

if __name__ == "__main__":
    sys.exit(main())
