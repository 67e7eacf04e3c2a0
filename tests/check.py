"""Check that an edited train_gpt2.py still keeps its promises. This takes one or two minutes.

    python tests/check.py                 # with your constants; without shards, the quick start's
    python tests/check.py --data=my.txt --optimizer=adamw     # with any flags of train_gpt2.py
    python tests/check.py --steps=60      # for an edit that acts later
    python tests/check.py --against=main  # compare with this commit instead of HEAD

The command trains a few steps several times, in temporary folders. Each run differs from the first
run in one thing: for example, it is killed and resumed, or it uses half of B. For each promise the
command prints whether it holds. Below the promises it prints notes: facts about the edit that are
often, but not always, mistakes. The exit status is 0 if no promise is broken, and 1 otherwise. The
learning-rate schedule is compressed so that the checked steps include both warmup and decay.
"""
import argparse
import ast
import inspect
import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import zlib
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch

SCRIPTS = Path(__file__).resolve().parent.parent  # the folder of the scripts to check

# {name: (the promise, the likely cause if it is broken)}
PROMISES = {
    "same": ("the same command twice gives the same run",
        "The usual reason is a random number that does not come from torch's generator (but from "
        "the modules random or numpy.random, from the order of a set, or from hash() of a string "
        "or id() of an object, which are different in each process), or a value that depends on "
        "the time."),
    "evaluations": ("validation and samples do not change training",
        "Perhaps forward() updates a buffer or a counter also in validation. Do so under "
        "`if self.training`. If training is meant to depend on the validation loss, as with early "
        "stopping, remove eval_every from FREE_TO_CHANGE in train_gpt2.py, so that a run is "
        "resumed with the same eval_every."),
    "killed": ("a killed run continues as if it had not been killed",
        "Something that later steps depend on is neither in State nor a parameter or buffer. Make "
        "it an attribute of State or a buffer (register_buffer), so that a checkpoint holds it. "
        "Gradients that are kept for a later step (p.grad) are not saved either. "
        "Another reason is a random number that is drawn before torch.manual_seed() in "
        "train_step(), for example in read_step()."),
    "B": ("B changes speed only",
        "The usual reason is a term or a statistic over the rows of a micro-batch (also in "
        "validation, where the last one may be smaller), a random number that is drawn or seeded "
        "per micro-batch, a value that counts forward passes instead of steps, or a use of cfg.B."),
    "processes": ("the number of processes changes speed only",
        "The usual reason is a term or a statistic over the rows of one process, a value that each "
        "process computes from its own rows or from the number of processes, or a parameter that "
        "has a gradient on one process only (for example an idle expert). Give such a parameter a "
        "gradient of zeros on the other processes, and do the same for a parameter that is frozen "
        "in some steps. Other reasons are a random number that is drawn before "
        "torch.manual_seed() in train_step(), for example in read_step(), or that only one process "
        "calls a function that needs all of them, such as validation_loss()."),
    "saved": ("what is saved is what was validated",
        "Validation depends on a value that is not saved, so the saved weights alone are a "
        "different model. Keep this value in a buffer (register_buffer, without "
        "persistent=False). A value that is drawn from the seed is not saved either: "
        "--init_from was tried with a different seed. Another reason is an edit of train() that "
        "changes weights between the save and the validation of a step, or that validates other "
        "rows at each step."),
    "samples": ("samples follow the model",
        "generate() computes its logits differently from forward(). Let it call self(idx). If the "
        "edit is meant to change sampling (for example by a repetition penalty), this is as it "
        "should be."),
    "later": ("a token's logits do not depend on later tokens",
        "If the logits change with later tokens, the model sees tokens that it should predict, and "
        "its loss is too low. Usual reasons are an attention mask, a convolution that is padded on "
        "both sides, or a norm, a mean or a top-k over all positions. (topk() returns positions "
        "in the order of their scores. Sort them before causal attention.) If the loss ignores the "
        "targets of such tokens, as in a prefix language model, this is as it should be."),
    "draws": ("each step draws new random numbers",
        "forward() seeds torch's generator, for example by torch.manual_seed(). train_step() has "
        "already seeded it for the step, so dropout would use the same masks in each step. Draw "
        "from torch's generator without seeding it. To draw only once, do so in __init__ and keep "
        "the result in a buffer."),
    "tokens": ("State.tokens counts the tokens that the model reads",
        "forward() cuts or drops tokens, but State.tokens counts all that it gets. Cut x and y in "
        "read_step(), so that the number of tokens, which compare.py shows, is right."),
    "apart": ("the model is not trained on validation data",
        "val is too low, because the model has seen its text. Check open_data() and read_step()."),
    "loss": ("the loss is the cross-entropy",
        "The validation loss has an additional term or factor, so it is not comparable with the "
        "losses of other runs. Put a term that only training should minimize under "
        "`if self.training`. Other reasons are that validation leaves out targets, or that "
        "forward() uses `targets` for the logits, too."),
    "effect": ("the edit has an effect",
        "Every loss is the same digit for digit as without the edit. Perhaps the edited code is "
        "never reached, something overwrites its result (for example init_weights(), which draws "
        "initial weights), or it acts only in later steps, in a condition that did not occur, or "
        "with a flag that you can add to this command. If the edit is meant to change only speed, "
        "memory or samples, this is as it should be."),
    "begin": ("untouched weights begin as before",
        "Both versions have these parameters with the same shapes, but their initial values "
        "differ. If the edit is meant to change initial weights, this is as it should be. "
        "Otherwise the results will differ for this reason too. init_weights() derives each draw "
        "from the seed and the parameter's name."),
}
# Promises whose check compares values that are the same in each run of an unedited script
NEED_EQUAL_RUNS = ("evaluations", "killed", "B", "processes", "saved", "loss")
# Flags that this command sets itself
OWN_FLAGS = ("log_dir", "max_steps", "epochs", "minutes", "eval_every", "save_every", "keep_every",
             "sample", "compile")
DEFAULTS = {"dtype": "float32", "compile": False, "hellaswag_every": 0, "sample_every": 0,
            "epochs": 0, "minutes": 0, "keep_every": 0}
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
KILLED = 9  # exit status of a run that was to be killed
LAST_CHECKPOINT = object()  # init_from of a run: the last checkpoint of the run before it
LOSSES = ("train", "val", "hella")
# To find out whether validation data is trained on: the shortest row in tokens, since shorter ones
# may be equal by chance, how many rows to compare, and in how many tokens of a file to search
SHORTEST_ROW, MOST_ROWS, MOST_TOKENS = 32, 320, 2**21
TIMES = re.compile(  # metrics that always differ, for example data_ms
    "minute|second|time|speed|tok/s|tokens_per|memory|"
    "(?<![a-z])(sec|ms|us|mem|[kmg]i?b|tps|mfu)(?![a-z])", re.I)

class Failed(Exception):
    """A run stopped with an error, or nothing can be checked. The text says why."""

class Unchecked(Exception):
    """One promise cannot be checked. The text says why."""

# ---- The command line
def parse(words):
    """Return the steps, the commit (against) and the flags for train_gpt2.py ({name: text})."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False, usage="check.py [options] [flags of train_gpt2.py]")
    parser.add_argument("--steps", type=int, default=20, help="number of steps per run [20]")
    parser.add_argument("--against", default="HEAD", help="commit to compare with [HEAD]")
    options, rest = parser.parse_known_args(words)
    if options.steps < 4:
        parser.error(f"--steps={options.steps}: at least 4 steps are needed.")
    options.flags = {}
    for word in rest:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not equals:
            parser.error(f"{word}: write each flag of train_gpt2.py as --name=value.")
        if name in OWN_FLAGS:
            parser.error(f"--{name} cannot be given, because check.py sets it for each run.")
        options.flags[name] = value
    return options

# ---- Runs. Each one is a process of its own (two processes with torchrun), which calls
# be_a_run() at the end of this file
@dataclass
class Finished:
    """What a run left behind."""
    log: dict          # {(step, metric): value as text}
    checkpoint: Path   # the last one
    report: dict       # see train_and_report()
    seconds: float

class Laboratory:
    """A temporary folder and the runs in it, at most `workers` at a time."""
    def __init__(self, workers):
        self.folder = Path(tempfile.mkdtemp(prefix="check_gpt2_"))
        self.pool = ThreadPoolExecutor(workers)
        self.runs = {}      # {name: Future of a Finished}
        self.n_done = 0
        self.closed = False

    def close(self):
        """Stop all runs and delete the folder."""
        self.closed = True
        self.pool.shutdown(cancel_futures=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, name, flags, **how):
        """Start a run, or let it wait for its turn. See run() for the arguments."""
        self.runs[name] = self.pool.submit(self.run, name, flags, **how)

    def result(self, name):
        """Return the Finished of a run. Raise Failed if it stopped with an error."""
        return self.runs[name].result()  # waits

    def run(self, name, flags, scripts=SCRIPTS, processes=1, after=None, log_of=None, **job):
        """Run train_gpt2.py in the folder `scripts` with {name: value} of flags.

        after: the name of a run to wait for. log_of: the name of the run to resume.
        job: what else the process does, as described in train_and_report().
        """
        seconds = self.result(after).seconds if after else 0.0
        # Several processes may wait for each other forever
        patience = 30 + 5 * seconds if processes > 1 else math.inf
        folder = self.folder / name
        folder.mkdir()
        log_dir = self.folder / (log_of or name) / "log"
        if flags.get("init_from") is LAST_CHECKPOINT:
            flags = flags | {"init_from": self.result(after).checkpoint}
        job |= {"scripts": scripts, "folder": folder, "flags": flags | {"log_dir": log_dir}}
        launcher = [sys.executable]
        if processes > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone",
                         f"--nproc_per_node={processes}", f"--log_dir={folder}"]
        begin = time.monotonic()
        command = [*launcher, __file__, "--be", json.dumps(job, default=str)]
        status = self.status_of(command, log_dir / "log.txt", patience)
        seconds = time.monotonic() - begin
        self.n_done += 1
        show_progress(f"{self.n_done} of {len(self.runs)} runs done")
        if status == 0 and "kill_at" in job:
            raise Unchecked(f"no forward pass of training came at state.step {job['kill_at']}")
        if status != (KILLED if "kill_at" in job else 0):
            raise Failed(error_of(folder, status))
        report = folder / "report.json"  # a killed run has none
        checkpoints = sorted(log_dir.glob("checkpoint_[0-9]*.pt"))  # not those of an edit
        if status == 0 and not checkpoints and not job.get("stop"):
            raise Failed("The run left no checkpoint, which finish() saves at the end of train().")
        if name not in ("base", "again", "killed", "continued"):
            for path in checkpoints:
                path.unlink()  # it is not needed, and may be large
        return Finished(log=read_log(log_dir / "log.txt"), seconds=seconds,
                        checkpoint=max(checkpoints, default=None),
                        report=json.loads(report.read_text()) if report.exists() else {})

    def status_of(self, command, log, patience):
        """Run a command and return its exit status.

        Stop it and raise Failed if the log has not grown for `patience` seconds, or if the check
        ends.
        """
        env = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        # At the end of this block, stdin is closed, which ends the run (see end_with_check)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, env=env,
                              start_new_session=True) as process:  # without the user's Ctrl-C
            begin = time.time()
            while process.poll() is None:
                if self.closed:
                    raise Failed("The check was stopped.")
                last = log.stat().st_mtime if log.exists() else begin
                if time.time() > last + patience:
                    raise Failed(f"No step was taken for {patience:.0f} seconds. Probably the "
                                 "processes wait for each other, because only one of them uses a "
                                 "parameter or calls an operation such as all_reduce.")
                time.sleep(0.05)
        return process.returncode

def show_progress(text):
    """Print a line to stderr. On a terminal, the next line replaces it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)

def error_of(folder, status):
    """Return the reason why a run stopped, in one or two lines."""
    paths = sorted(folder.glob("err_*.txt"), key=lambda path: path.stat().st_mtime_ns)
    text = "\n".join(path.read_text(errors="replace") for path in paths)  # first failure first
    if own := re.search(r"^train_gpt2\.py: .+", text, re.M):  # a message of the script itself
        return own[0]
    if found := re.search(r"^Traceback .*?\n(\w[^\n]*)", text, re.S | re.M):
        return "\n".join([*places_in_scripts(found[0])[-1:], found[1][:300]])
    abort = re.search(r"^ *what\(\): +(.+)", text, re.M)  # by a C++ library, such as gloo
    return abort[1][:300] if abort else f"The process ended with status {status}."

def places_in_scripts(text):
    """Return the lines of the user's code in a traceback, for example "x.py, line 7, in f: ..."."""
    names = [path.name for path in SCRIPTS.glob("*.py")]
    places = re.findall(r'^  File "(.+)", (line \d+.*)\n    (.+)', text, re.M)
    return [f"{Path(path).name}, {place}: {code.strip()}" for path, place, code in places
            if Path(path).name in names]

# ---- Comparing logs
def read_log(path):
    """Return {(step, metric): value as text} of log.txt, without metrics that hold times."""
    lines = re.findall(r"^(\d+) (.+) (\S+)$", path.read_text(errors="replace"), re.M)
    return {(int(step), metric): value for step, metric, value in lines if not TIMES.search(metric)}

def losses_of(log):
    return {key: value for key, value in log.items() if key[1] in LOSSES}

def last_val(log):
    """Return the last validation loss."""
    return float(log[max(key for key in log if key[1] == "val")])

@dataclass
class Difference:
    """The first line in which two logs differ. A value is None if its log lacks the line."""
    step: int
    metric: str
    values: tuple         # two texts
    allowed: float = 0.0  # the largest difference that rounding explains

    def verdict(self, in_one, in_two, hint):
        """Return the Verdict on two runs that should be equal."""
        a, b = ["missing" if value is None else value for value in self.values]
        text = f"At step {self.step}, {self.metric} is {a} {in_one} and {b} {in_two}."
        if self.allowed and None not in self.values:
            gap = abs(float(a) - float(b))
            text += f" The difference is {gap:.2g}, but rounding explains only {self.allowed:.1g}."
        return broken(f"{self.metric} differs from step {self.step} on", text, hint)

def first_difference(one, other, allowed=None):
    """Return the first Difference of two logs, or None.

    Without `allowed`, all lines must be the same. allowed: {step: largest difference of losses}.
    With it, only losses are compared, since a metric that an edit adds may depend on B.
    """
    if allowed:
        one, other = losses_of(one), losses_of(other)
    order = {"val": 0, "train": 1}  # the script validates before it takes the step
    for step, metric in sorted(one.keys() | other.keys(),
                               key=lambda key: (key[0], order.get(key[1], 2), key[1])):
        a, b = one.get((step, metric)), other.get((step, metric))
        limit = allowed.get(step, 0.0) if allowed else 0.0
        if a == b or (limit and a and b and abs(float(a) - float(b)) <= limit):
            continue
        return Difference(step, metric, (a, b), limit)
    return None

def tolerances(log, nudged, floor):
    """Return {step: how far apart rounding may drive the losses of two runs}.

    Small differences grow from step to step, at a rate that depends on the model, so this rate is
    measured. nudged: the log of the same run with initial weights that were changed by a few units
    of rounding. floor: the smallest tolerance, relative to the loss.
    """
    allowed, largest = {}, 0.0
    for key, value in sorted(losses_of(log).items()):
        step, loss = key[0], float(value)
        gap = abs(loss - float(nudged.get(key, value)))
        if math.isfinite(gap):
            largest = max(largest, gap)
        allowed[step] = max(floor * max(5.0, abs(loss)), 10 * largest, allowed.get(step, 0.0))
    return allowed

# ---- Comparing checkpoints
def tensors_of(content, name=""):
    """Yield (name, tensor) for all tensors in a checkpoint, for example ("state.mean", ...)."""
    if torch.is_tensor(content):
        yield name, content
    elif isinstance(content, (dict, list, tuple)):
        parts = content.items() if isinstance(content, dict) else enumerate(content)
        for key, part in parts:
            yield from tensors_of(part, f"{name}.{key}" if name else str(key))

def first_tensor_that_differs(path, other):
    """Return the first tensor in two checkpoints that differs in any bit, in words, or None."""
    mine, theirs = [dict(tensors_of(torch.load(file, map_location="cpu", weights_only=True)))
                    for file in (path, other)]
    for name, tensor in mine.items():
        if name not in theirs or tensor.shape != theirs[name].shape:
            return f"{name} differs in its shape, or one of the checkpoints lacks it"
        if crc_of(tensor) != crc_of(theirs[name]):
            gap = (tensor.double() - theirs[name].double()).abs().max().item()
            return f"{name} differs by up to {gap:.2g}"
    return None

def crc_of(tensor):
    """Return a checksum of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return zlib.crc32(flat.view(torch.uint8).numpy()) if flat.numel() else 0

# ---- The committed version
def extract_committed(commit, folder):
    """Write the committed version of the project into `folder`.

    Raise Unchecked if there is none, or if its code is the same as that of the scripts.
    """
    folder.mkdir()
    archive = folder / "project.zip"
    command = ["git", "archive", "--format=zip", f"--output={archive}", commit, "--", "."]
    try:
        subprocess.run(command, cwd=SCRIPTS, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise Unchecked("git is not installed") from None
    except subprocess.CalledProcessError as e:
        raise Unchecked(f"git: {e.stderr.splitlines()[0]}") from None
    shutil.unpack_archive(archive, folder)
    if not (folder / "train_gpt2.py").exists():
        raise Unchecked(f"{commit} has no train_gpt2.py")
    names = {path.name for place in (folder, SCRIPTS) for path in place.glob("*.py")}
    if all(code_of(folder / name) == code_of(SCRIPTS / name) for name in names):
        raise Unchecked(f"the code is the same as in {commit}; --against=COMMIT compares it with "
                        "a different commit")

def code_of(path):
    """Return the code of a file in a form that does not depend on comments and spaces."""
    return ast.dump(ast.parse(path.read_text(encoding="utf-8"))) if path.exists() else ""

# ---- The plan
class Plan:
    """What the runs have in common, derived from the constants of the edited script.

    constants: {name: value} as the script resolved them. device: the type of the device.
    """
    def __init__(self, options, constants, device):
        self.options, self.constants, self.device = options, constants, device
        unknown = options.flags.keys() - constants.keys()
        if unknown:
            raise Failed(f"--{min(unknown)}: neither check.py nor train_gpt2.py has this flag.")
        self.exact = device == "cpu"  # on a GPU, two equal runs may differ by rounding
        self.low_precision = not self.exact or constants["dtype"] != "float32"
        self.floor = 2e-4 if self.low_precision else 2e-6  # of losses that should be equal
        self.B, self.T = constants["B"], constants["T"]
        self.batch = constants["total_batch_size"]
        # If B divides the rows of a step, then so does B / 2 with two processes
        self.half_B = self.B // 2 if self.B % 2 == 0 else 1
        each, n = options.steps // 4, options.steps
        # A run is saved at a step near the end that no small number divides, because an edit may
        # do something in every second or fifth step, or in the last steps only
        self.saved = next((s for s in range(n - 3, 2, -1)
                           if all(s % divisor for divisor in range(2, min(s, 8)))), 2)
        self.killed = self.saved + 1  # the step in which the run is killed
        self.common = DEFAULTS | {
            "max_steps": options.steps, "eval_every": each, "save_every": self.saved,
            "warmup_steps": min(constants.get("warmup_steps", 0), each),
            # The last batch of a validation is smaller than B
            "val_tokens": min(constants["val_tokens"], (3 * self.B + self.B // 2 + 1) * self.T),
        } | options.flags
        # The dropout masks depend on B, so runs with a different B are compared without dropout
        self.dropout = constants.get("dropout", 0) > 0
        self.remark = "with dropout=0" if self.dropout else ""
        self.no_dropout = self.common | ({"dropout": 0} if self.dropout else {})
        self.half = self.no_dropout | {"B": self.half_B}
        device_flag = options.flags.get("device", "")  # may name a single GPU, such as cuda:1
        self.no_processes = ""  # or the reason why two processes cannot be tried
        if self.batch % (2 * self.T):
            self.no_processes = f"a step has {self.batch // self.T} rows, an odd number"
        elif (CORES if self.exact else torch.cuda.device_count()) < 2 or ":" in device_flag:
            self.no_processes = "two processes need two cores or two GPUs"

    def start_runs(self, lab, committed):
        """Start all runs, those first that others wait for. committed: a folder, or None."""
        lab.start("half", self.half)
        examine = 5e-2 if self.low_precision else 1e-4
        lab.start("base", self.common, examine=examine)
        if not self.no_processes:
            lab.start("two", self.half, after="half", processes=2)
        lab.start("killed", self.common, kill_at=self.killed, kill_after=self.saved)
        # With init_from, the script would choose a different preset, so give every constant. The
        # seed is a different one, because validation must not depend on it
        lab.start("reloaded", self.constants | self.common | {
            "max_steps": 0, "init_from": LAST_CHECKPOINT, "seed": self.constants["seed"] ^ 1},
            after="base")
        lab.start("again", self.common)
        lab.start("evaluated", self.common | {
            "eval_every": self.options.steps, "sample_every": self.common["eval_every"],
            "sample_tokens": 8})
        lab.start("continued", self.common, after="killed", log_of="killed")
        lab.start("nudged", self.half, nudge=4e-3 if self.low_precision else 1e-6)
        if self.dropout:
            lab.start("no_dropout", self.no_dropout)
        if committed:
            lab.start("committed", self.common, scripts=committed, examine=examine)

# ---- The verdicts
@dataclass
class Verdict:
    outcome: str          # holds, BROKEN or not checked
    detail: str = ""      # what differs, why the promise was not checked, or a remark
    evidence: tuple = ()  # more lines about a broken promise

def holds(remark=""):
    return Verdict("holds", remark)

def broken(detail, *evidence):
    return Verdict("BROKEN", detail, evidence)

def in_words(promise, verdict):
    """Return the line or lines to print about a promise."""
    name, cause = PROMISES[promise]
    line = f"{name:52} {verdict.outcome}"
    if verdict.outcome == "holds":
        return line + (f" ({verdict.detail})" if verdict.detail else "")
    lines = [f"{line}: {verdict.detail}"]
    if verdict.outcome == "BROKEN":
        for text in "\n".join(filter(None, [*verdict.evidence, cause])).splitlines():
            lines += textwrap.wrap(text, 96, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)

class Check:
    """The promises, each with a method that returns a Verdict.

    A method raises Unchecked if its promise cannot be checked, and Failed if a run stopped with an
    error. result: a function that returns the Finished of the run with a name.
    no_committed: the reason why there is no committed version to compare with, or an empty text.
    """
    def __init__(self, plan, result, no_committed):
        self.plan, self.result, self.no_committed = plan, result, no_committed
        self.base = result("base")
        self.repeats = True  # until check_same() finds otherwise
        self.unsteady = set()  # metrics that differ between equal runs, found by check_same()

    def verdict(self, promise):
        """Return the Verdict on a promise. They must be asked for in the order of PROMISES."""
        try:
            if promise in NEED_EQUAL_RUNS and not self.repeats:
                raise Unchecked("the same command already gives a different run")
            verdict = getattr(self, f"check_{promise}")()
        except Unchecked as reason:
            verdict = Verdict("not checked", str(reason))
        except Failed as error:
            verdict = broken("the run stops with an error", str(error))
        if promise == "same":
            self.repeats = verdict.outcome == "holds"
        return verdict

    def allowed(self):
        """Return the differences that rounding explains, as {step: difference}."""
        return tolerances(self.result("half").log, self.result("nudged").log, self.plan.floor)

    def hint(self, *runs):
        """Name what changed during training and is not saved, which is the likely reason."""
        changed = ", ".join(sorted({what for run in runs for what in run.report["changed"]}))
        text = f"This changed during training and is not saved: {changed}.\n" if changed else ""
        return text + self.noise(*runs)

    def noise(self, *runs):
        """Say so if forward passes without gradient, as in validation, draw random numbers."""
        if not any(run.report["draws_without_grad"] for run in runs):
            return ""
        return ("Random numbers are drawn in forward passes without gradient, so probably in "
                "validation. Is there a dropout outside of `if self.training`, or is the model in "
                "training mode when it is validated?")

    def compare_losses(self, one, two, in_one, in_two, remark=""):
        """Return the Verdict on two runs whose losses must be equal, apart from rounding."""
        difference = first_difference(one.log, two.log, self.allowed())
        if difference:
            return difference.verdict(in_one, in_two, self.hint(one, two))
        if one.report["tokens"] != two.report["tokens"]:
            return broken("the number of tokens differs",
                          f"State.tokens is {one.report['tokens']:,} {in_one} and "
                          f"{two.report['tokens']:,} {in_two}. Perhaps rows are read twice.")
        return holds(remark)

    def compare_all(self, run, in_base, in_run):
        """Return the Verdict on a run that must equal the first run in every bit.

        in_base, in_run: where the values are from, for example "in the first run". On a GPU,
        equal runs may differ by rounding, so only their losses are compared.
        """
        if not self.plan.exact:
            return self.compare_losses(self.base, run, in_base, in_run)
        difference = first_difference(self.steady(self.base.log), self.steady(run.log))
        if difference:
            return difference.verdict(in_base, in_run, self.hint(self.base))
        tensor = first_tensor_that_differs(self.base.checkpoint, run.checkpoint)
        if tensor:
            return broken("the logs are equal, but the last checkpoints differ",
                          f"In the checkpoint, {tensor}.", self.hint(self.base))
        return holds()

    def steady(self, log):
        """Return a log without the metrics that differ between equal runs."""
        return {key: value for key, value in log.items() if key[1] not in self.unsteady}

    def check_same(self):
        again = self.result("again")
        one, two = self.base.log, again.log
        differ = {key[1] for key in one.keys() | two.keys() if one.get(key) != two.get(key)}
        if differ and self.plan.exact and differ.isdisjoint(LOSSES):
            self.unsteady = differ
            if self.compare_all(again, "", "").outcome == "holds":  # the weights are equal too
                return holds(f"except for {', '.join(sorted(differ))}, which is not compared below")
            self.unsteady = set()
        return self.compare_all(again, "in the first run", "in the second run")

    def check_evaluations(self):
        run, every = self.result("evaluated"), self.plan.common["eval_every"]
        if not run.report["eval_every_is_free"]:
            raise Unchecked("eval_every is not in FREE_TO_CHANGE, so it may affect training")
        one, two = [{key: value for key, value in losses_of(log).items()
                     if key[1] == "train" or key[0] == self.plan.options.steps}
                    for log in (self.base.log, run.log)]
        difference = first_difference(one, two, None if self.plan.exact else self.allowed())
        if difference:
            return difference.verdict(
                f"with a validation every {every} steps",
                "with samples instead of most validations", self.hint(self.base))
        return holds()

    def check_killed(self):
        run, saved = self.result("continued"), self.plan.saved
        if run.report["step"] != saved:
            return broken(f"it continues at step {run.report['step']} instead of step {saved}")
        verdict = self.compare_all(run, "without a kill", f"with a kill after step {saved}")
        if any(step < saved for step, _ in self.base.log.keys() - run.log.keys()):
            verdict.evidence += (
                "A restart deletes log.txt from the first line of a later step on. After "
                "train_step(), state.step is one more than `step`: give `step` to report().",)
        return verdict

    def check_B(self):
        plan, half = self.plan, self.result("half")
        if plan.B == 1:
            raise Unchecked("B is 1, so it cannot be halved")
        if not half.report["B_is_free"]:
            raise Unchecked("B is not in FREE_TO_CHANGE, so it may affect training")
        if half.report["draws"]:
            raise Unchecked("forward() draws random numbers, which depend on B as those of dropout "
                            "do; switch them off to check B")
        one = self.result("no_dropout") if plan.dropout else self.base
        return self.compare_losses(one, half, f"with B={plan.B}", f"with B={plan.half_B}",
                                   plan.remark)

    def check_processes(self):
        if self.plan.no_processes:
            raise Unchecked(self.plan.no_processes)
        return self.compare_losses(self.result("half"), self.result("two"), "with one process",
                                   "with two processes and the same B", self.plan.remark)

    def compare_val(self, other, what, *evidence):
        """Return the Verdict on a number that must equal the last validation loss."""
        val = last_val(self.base.log)
        gap = val - other
        if abs(gap) <= 5 * self.plan.floor * max(1.0, abs(val)):
            return holds()
        return broken(f"val is {val:.6f}, but {what} is {other:.6f}",
                      f"The difference is {gap:+.6f}.", *evidence)

    def check_saved(self):
        return self.compare_val(last_val(self.result("reloaded").log),
                                "val of the checkpoint (with --init_from)", self.hint(self.base))

    def check_samples(self):
        problem = self.base.report["samples"]
        return broken(*problem, self.noise(self.base)) if problem else holds()

    def check_later(self):
        problem = self.base.report["later"]
        if isinstance(problem, str):
            raise Unchecked(problem)
        if problem:
            return broken(*problem)
        problem = self.base.report["later_in_training"]
        if isinstance(problem, list):
            return broken(f"in training mode, {problem[0]}", *problem[1:],
                          "In eval mode they do not, so val is computed without later tokens.")
        return holds()

    def check_draws(self):
        if self.base.report["seeds"]:
            return broken("forward() seeds torch's generator")
        return holds()

    def check_tokens(self):
        embedded, counted = self.base.report["embedded"], self.base.report["tokens"]
        if not embedded:
            raise Unchecked("transformer.wte is not called with token ids")
        if embedded < counted:
            return broken("the model reads fewer tokens than State.tokens counts",
                          f"In {self.plan.options.steps} steps, transformer.wte was given "
                          f"{embedded:,} token ids, and State.tokens counted {counted:,}.")
        return holds()

    def check_apart(self):
        both = self.base.report["in_both"]
        if both["files"]:
            return broken("a file is used for both", f"It is {both['files'][0]}.")
        # A text may repeat itself, so a few equal rows do not show anything
        if both["equal_val_rows"] > 0.2 * both["val_rows"]:
            return broken("the validation data is part of the training data",
                          f"{both['equal_val_rows']} of {both['val_rows']} validation rows are.")
        if not both["rows"]:
            raise Unchecked(f"rows of less than {SHORTEST_ROW} tokens may be equal by chance")
        if both["equal_rows"] > 0.05 * both["rows"]:
            return broken("training rows are part of the validation data",
                          f"{both['equal_rows']} of {both['rows']} training rows are.")
        return holds()

    def check_loss(self):
        cross_entropy = self.base.report["cross_entropy"]
        if isinstance(cross_entropy, str):
            return broken("it cannot be computed from the logits of model(idx)", cross_entropy)
        try:
            mine, theirs = self.base.report["val_data"], self.committed().report["val_data"]
        except Unchecked:
            mine = theirs = None
        if mine and theirs and mine[0] == theirs[0] and mine[1] != theirs[1]:
            return broken(f"validation reads other inputs or targets than "
                          f"{self.plan.options.against}, so val is not comparable",
                          "DataLoaderLite.batch() returns different values for the same rows of "
                          "the validation data. To change training only, edit read_step().")
        return self.compare_val(cross_entropy, "the cross-entropy", self.noise(self.base))

    def committed(self):
        """Return the run of the committed version. Raise Unchecked if there is none."""
        if self.no_committed:
            raise Unchecked(self.no_committed)
        try:
            return self.result("committed")
        except Failed as error:
            raise Unchecked(f"the committed version stops: {str(error).splitlines()[-1]}") from None

    def check_effect(self):
        committed, log = self.committed(), self.steady(self.base.log)
        losses = first_difference(losses_of(log), losses_of(committed.log))
        if losses:
            if self.repeats and not first_difference(log, committed.log, self.allowed()):
                return holds("but all losses are within rounding of those without the edit")
            if self.base.report["trained"] == committed.report["trained"]:
                return holds("on the reported losses only; the trained weights are the same digit "
                             "for digit")
            return holds(f"from step {losses.step} on")
        difference = first_difference(log, self.steady(committed.log))
        if difference:
            return holds(f"on {difference.metric} only; the losses are the same digit for digit")
        if self.base.report["drawn"] != committed.report["drawn"]:
            return holds("on samples only; the losses are the same digit for digit")
        new = ", ".join(f"--{name}=..." for name in sorted(
            self.base.report["constants"].keys() - committed.report["constants"].keys()))
        setting = f"The edit adds a setting. If it switches the edit on, give it: {new}"
        return broken("it has no effect on training", setting if new else "", (
            f"Compared with {self.plan.options.against} over {self.plan.options.steps} steps. "
            "Changes of constants that check.py sets itself, such as max_steps, do not show."))

    def own_notes(self):
        """Return notes on values that are not saved, and on metrics that an edit has added."""
        notes, changed = [], ", ".join(self.base.report["changed"])
        if changed:
            notes.append(f"this changed during training and is not saved: {changed}. If later "
                         "steps depend on it, make it an attribute of State.")
        return notes + self.notes_about_metrics() + notes_about_constants(self.base.log)

    def notes_about_metrics(self):
        """Return notes on metrics that an edit has added and that depend on B or on processes."""
        notes, plan = [], self.plan
        pairs = [("base", "half", f"with B={plan.B}", f"with B={plan.half_B}")]
        if not plan.no_processes:
            pairs.append(("half", "two", "with one process", "with two processes"))
        for first, second, in_one, in_two in pairs:
            try:
                one, two = self.result(first).log, self.result(second).log
            except Failed:  # a verdict has said so
                continue
            for step, metric in sorted(one.keys() & two.keys()):
                a, b = float(one[step, metric]), float(two[step, metric])
                own = metric not in {*LOSSES, "norm", *self.unsteady}
                if own and abs(a - b) > 0.01 * max(abs(a), abs(b)) and self.repeats:
                    notes.append(f"{metric} is {a:g} {in_one} and {b:g} {in_two}, at step {step}. "
                                 "If it should describe the whole step, take its mean over all "
                                 "micro-batches and processes. If it reads batches by itself, "
                                 "check their row numbers.")
                    break
        return notes if not plan.dropout else []

    def check_begin(self):
        mine, theirs = self.base.report["initial"], self.committed().report["initial"]
        differ = [name for name, (shape, crc) in mine.items()
                  if name in theirs and theirs[name][0] == shape and theirs[name][1] != crc]
        if not differ:
            new = len(mine.keys() - theirs.keys())
            return holds(f"{new} of {len(mine)} have new names and are not compared" if new else "")
        return broken(f"{len(differ)} of {len(mine)} parameters differ",
                      "They are " + ", ".join(differ[:6]) + (", ..." if differ[6:] else "."))

def notes_about_constants(log):
    """Return notes on metrics in a log that have the same value in all steps."""
    values = defaultdict(list)
    for (_, metric), value in log.items():
        values[metric].append(value)
    return [f"{metric} is {of_metric[0]} in all steps." for metric, of_metric in values.items()
            if len(of_metric) > 1 and len(set(of_metric)) == 1]

# ---- The command
def check(options):
    """Print the verdicts. Return the number of broken promises. Raise Failed."""
    code = code_of_scripts()
    with closing(Laboratory(workers=1)) as lab:  # to learn the constants, without a step
        lab.start("setup", DEFAULTS | options.flags, stop=True)
        setup = lab.result("setup").report
    plan = Plan(options, setup["constants"], setup["device"])
    print(f"Checking {options.steps} steps of {plan.batch:,} tokens, {plan.device}, "
          f"{plan.constants['dtype']}.\nIf the edit takes effect only later, check more steps: "
          f"--steps={3 * options.steps}", flush=True)
    outcomes = []
    # Two runs might need more memory than a GPU has
    with closing(Laboratory(workers=min(2, CORES) if plan.exact else 1)) as lab:
        committed, no_committed = lab.folder / "committed_scripts", ""
        try:
            extract_committed(options.against, committed)
        except Unchecked as reason:
            committed, no_committed = None, str(reason)
        plan.start_runs(lab, committed)
        checking = Check(plan, lab.result, no_committed)
        for promise in PROMISES:
            verdict = checking.verdict(promise)
            outcomes.append(verdict.outcome)
            show_progress("")
            print(in_words(promise, verdict), flush=True)
    notes = setup["notes"] + checking.base.report["notes"] + checking.own_notes()
    for note in dict.fromkeys(notes):
        print("\n".join(textwrap.wrap(f"Note: {note}", 100, subsequent_indent="    ")))
    if code_of_scripts() != code:
        raise Failed("A script was edited during the check. Run the check again.")
    n_broken, unchecked = outcomes.count("BROKEN"), outcomes.count("not checked")
    summary = f"{n_broken} of {len(outcomes)} promises broken" if n_broken else "All promises hold"
    print(summary + (f" ({unchecked} of {len(outcomes)} not checked)." if unchecked else "."))
    return n_broken

def code_of_scripts():
    """Return {name: checksum} of the scripts and of the modules beside them."""
    return {path.name: zlib.crc32(path.read_bytes()) for path in SCRIPTS.glob("*.py")}

def end_by_signal(number, frame):
    signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C does not interrupt the cleaning up
    raise SystemExit(128 + number)

def main():
    if sys.argv[1:2] == ["--be"]:
        be_a_run(json.loads(sys.argv[2]))
        return
    options = parse(sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_by_signal)
    try:
        sys.exit(1 if check(options) else 0)
    except Failed as error:
        sys.exit(f"check.py: the script cannot be checked.\n{error}")

# ==== From here on: the process of a run
def be_a_run(job):
    """Do what `python train_gpt2.py` with the job's flags does, and write a report."""
    folder, rank = Path(job["folder"]), os.environ.get("RANK", "0")
    sys.stdin = open(os.devnull)  # so that a breakpoint() in an edit is an error
    threading.Thread(target=end_with_check, daemon=True).start()
    with open(folder / f"err_{rank}.txt", "w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.path[0] = job["scripts"]
    import train_gpt2 as t
    # The committed version may lack a constant that the edit adds, and the other way round
    known = [constant.name for constant in fields(t.Config)]
    flags = [f"--{name}={value}" for name, value in job["flags"].items() if name in known]
    sys.argv = [t.__file__, *flags]
    train = t.train
    t.train = lambda run: train_and_report(t, train, run, job)
    t.main()

def end_with_check():
    """End this process when check.py closes its end of the pipe, or when check.py itself ends.

    torchrun hands the pipe on to the processes that it starts.
    """
    os.read(0, 1)  # waits
    os._exit(1)

def train_and_report(t, train, run, job):
    """Train, and write what check.py wants to know into report.json.

    The job may contain: stop (take no step), nudge (change the initial weights by about this
    fraction), kill_at and kill_after (end the process during step kill_at, once the checkpoint of
    step kill_after exists), and examine (compare samples and validation with model(idx), and look
    for logits that depend on later tokens; the value is the tolerance of logits).
    """
    for name in ("transformers", "matplotlib"):  # skip the export and the plots, which take seconds
        sys.modules.setdefault(name, None)
    for i, p in enumerate(run.state.raw_model.parameters() if "nudge" in job else []):
        noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(p.device)
        scale = max(job["nudge"], torch.finfo(p.dtype).eps)  # an edit may have 16-bit weights
        p.data.copy_(p.data.float() * (1 + scale * noise))
    report = {"constants": asdict(run.cfg), "device": run.device.type, "step": run.state.step,
              "B_is_free": "B" in t.FREE_TO_CHANGE,
              "eval_every_is_free": "eval_every" in t.FREE_TO_CHANGE}
    report["initial"] = {name: (list(p.shape), crc_of(p))
                         for name, p in run.state.raw_model.named_parameters()}
    rows = watch_forward_passes(run, report)
    watched = Watched(t, run) if "examine" in job else None
    if "kill_at" in job:
        kill_during_step(run, job["kill_at"], job["kill_after"])
    unsaved = unsaved_values(t, run)
    if job.get("stop"):
        report["notes"] = notes_about_schedules(t, run.cfg) + notes_about_code(inspect.getsource(t))
    else:
        train(run)
    report["tokens"] = getattr(run.state, "tokens", 0)
    now = unsaved_values(t, run)
    report["changed"] = [name for name in now if now[name] != unsaved.get(name)]
    report["in_both"] = training_and_validation(t, run, run.val_loader, rows)
    if watched:
        report["trained"] = {name: crc_of(p) for name, p in run.state.raw_model.named_parameters()}
        report["notes"] = watched.notes(t, run, report, rows)
        embedded = report["embedded"]  # by training
        with torch.no_grad(), run.autocast():
            found = examine(run, tolerance=job["examine"])
        report["embedded"] = embedded
        notes = report["notes"] + found["notes"] + notes_about_modes(run.cfg, found["modes"])
        report |= found | {"notes": notes}
    if os.environ.get("RANK", "0") == "0":
        Path(job["folder"], "report.json").write_text(json.dumps(report))

def watch_forward_passes(run, report):
    """Record in the report what forward passes do. Return a list, to which training adds rows.

    "draws": whether those with gradient draw from torch's generator; "draws_without_grad": whether
    the others do; "seeds": whether any of them seeds it; "embedded": the number of token ids that
    the embedding got in those with gradient; "shifted": what share_of_shifted_rows() returned
    for some of these. The list gets up to 16 rows (T,) of each of the first
    of these passes, as arrays of token ids.
    """
    # The hooks must not refer to `run`, because the script deletes it to end DDP
    get_state = torch.cuda.get_rng_state if run.device.type == "cuda" else torch.get_rng_state
    states, rows = [], []
    report |= {"draws": False, "draws_without_grad": False, "seeds": False, "embedded": 0,
               "shifted": []}

    def before(model, args):
        states.append((get_state(), torch.initial_seed()))
        if torch.is_grad_enabled() and len(rows) < MOST_ROWS and args:
            rows.extend(args[0][:16].cpu().numpy())
            report["shifted"].append(share_of_shifted_rows(*args))

    def after(model, args, outputs):
        state, seed = states.pop()
        if not torch.equal(state, get_state()):
            report["draws" if torch.is_grad_enabled() else "draws_without_grad"] = True
        report["seeds"] |= torch.initial_seed() != seed

    def count(embedding, args):
        if torch.is_grad_enabled() and args and not args[0].is_floating_point():
            report["embedded"] += args[0].numel()
    run.state.raw_model.register_forward_pre_hook(before)
    run.state.raw_model.register_forward_hook(after)
    for name, module in run.state.raw_model.named_modules():
        if name == "transformer.wte":
            module.register_forward_pre_hook(count)
    return rows

def share_of_shifted_rows(x, y=None, *args):
    """Return in which share of the rows most targets y are the tokens that follow in x (B, T)."""
    if not torch.is_tensor(y) or y.shape != x.shape or x.dim() != 2 or x.size(1) < 2:
        return 1.0  # an edit has other targets
    counted = y[:, :-1] >= 0
    agree = ((y[:, :-1] == x[:, 1:]) & counted).sum(1) >= 0.5 * counted.sum(1)  # (B,)
    return agree.float().mean().item()

def training_and_validation(t, run, loader, rows):
    """Return what training and the validation with a loader have in common.

    {"files": names of shards in both, "rows": the number of training rows that were compared,
    "equal_rows": how many of them are part of the validation data, "val_rows" and "equal_val_rows":
    the same for validation rows and the training data}. rows: arrays (T,) of token ids.
    """
    def paths(loader):
        return {str(shard) for shard in loader.shards if isinstance(shard, Path)}

    def first_tokens(loader):
        return t.open_shard(loader.shards[0])[:MOST_TOKENS].astype(np.uint32)
    rows, val_rows = [row for row in rows if len(row) >= SHORTEST_ROW], []
    files, training, validation = [], np.zeros(0, np.uint32), np.zeros(0, np.uint32)
    try:
        files = sorted(paths(run.train_loader) & paths(loader))
        training, validation = first_tokens(run.train_loader), first_tokens(loader)
        length = max(SHORTEST_ROW, run.cfg.T)
        starts = np.linspace(0, max(0, len(validation) - length), 50, dtype=int)
        val_rows = [validation[start:start + length] for start in starts]
    except Exception:  # an edit may have changed the loaders
        rows = []
    return {"files": files, "rows": len(rows), "equal_rows": count_parts(rows, validation),
            "val_rows": len(val_rows), "equal_val_rows": count_parts(val_rows, training)}

def count_parts(rows, tokens):
    """Return how many of the rows, arrays of token ids, are part of `tokens` (uint32)."""
    text = tokens.tobytes()
    return sum(is_part(row.astype(np.uint32).tobytes(), text) for row in rows)

def is_part(ids, text):
    """Return whether ids occur in a text. Both are the bytes of an array of uint32."""
    place = text.find(ids)
    while place > 0 and place % 4:  # not at the beginning of an id
        place = text.find(ids, place + 1)
    return place >= 0

def kill_during_step(run, step, saved):
    """End this process in the given step, once the checkpoint of the step `saved` exists."""
    state, checkpoint = run.state, Path(run.cfg.log_dir, f"checkpoint_{saved:05d}.pt")

    def kill(model, args):
        if state.step == step and torch.is_grad_enabled():
            end = time.monotonic() + 300
            while not checkpoint.exists() and time.monotonic() < end:
                time.sleep(0.01)
            os._exit(KILLED)  # like kill -9, this neither closes files nor waits for threads
    run.state.raw_model.register_forward_pre_hook(kill)

# ---- Notes. They state facts that are often, but not always, mistakes
class Watched:
    """What notes() needs to know about a training run. Create it before training starts."""
    def __init__(self, t, run):
        self.loaders = watch_validation(t)
        self.nonzero, self.with_zeros = watch_gradients(run)
        self.between = watch_average(run.state)
        self.clipped = watch_clipping()
        self.seeds = watch_seeds(run.state)
        self.optimizers = list(run.state.optimizers)
        self.integers, self.first_step = integers_of(run.state), run.state.step
        self.begin = [p.detach().clone() for p in run.state.raw_model.parameters()]
        self.buffers = {name: crc_of(b) for name, b in run.state.raw_model.named_buffers()}

    def notes(self, t, run, report, rows):
        """Return notes on the training. rows: those that watch_forward_passes() returned."""
        notes, state = [], run.state
        try:
            were_watched = state.optimizers == self.optimizers and all(
                isinstance(optimizer, torch.optim.Optimizer) for optimizer in self.optimizers)
            with_gradient = self.nonzero if were_watched else report["initial"]
            notes += notes_about_parameters(state, report["initial"], with_gradient)
            notes += notes_about_counters(
                self.integers, integers_of(state), state.step - self.first_step)
            notes += notes_about_zeros(self.with_zeros & self.nonzero.keys())
            notes += notes_about_elements(state.raw_model, self.nonzero)
            notes += notes_about_attributes(state.raw_model, report["changed"])
            notes += notes_about_groups(state.optimizers) + notes_about_copies(state)
            notes += notes_about_average(state, self.begin) + self.between
            notes += notes_about_buffers(state, self.buffers)
            notes += notes_about_clipping(state, self.clipped)
            notes += notes_about_seeds(self.seeds)
            notes += notes_about_repeated_rows(rows) + notes_about_shifts(report["shifted"])
            for loader in self.loaders:
                if loader is not run.val_loader:
                    notes += notes_about_validation(training_and_validation(t, run, loader, rows))
        except Exception:  # an edit may have changed anything; a note must not stop the check
            pass
        return notes

def watch_validation(t):
    """Return a list, to which each call of validation_loss() adds its loader if it is new."""
    loaders, original = [], getattr(t, "validation_loss", None)

    def validation_loss(*args, **kwargs):
        for value in (*args, *kwargs.values()):
            if hasattr(value, "shards") and value not in loaders:
                loaders.append(value)
        return original(*args, **kwargs)
    if original:
        t.validation_loss = validation_loss
    return loaders

def watch_clipping():
    """Return a set, to which the last call of clip_grad_norm_() adds the ids of its parameters."""
    clipped, original = set(), torch.nn.utils.clip_grad_norm_

    def clip_grad_norm_(parameters, *args, **kwargs):
        parameters = [parameters] if torch.is_tensor(parameters) else list(parameters)
        clipped.clear()
        clipped.update(map(id, parameters))
        return original(parameters, *args, **kwargs)
    torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
    return clipped

def watch_seeds(state):
    """Return {seed: set of steps}, to which seeds of torch's and NumPy's generators are added."""
    seeds, seed_default = defaultdict(set), torch.manual_seed
    default_rng = np.random.default_rng

    class Generator(torch.Generator):
        def manual_seed(self, seed):
            seeds[seed].add(state.step)
            return super().manual_seed(seed)

    def manual_seed(seed):
        seeds[seed].add(state.step)
        return seed_default(seed)

    class RandomState(np.random.RandomState):
        def __init__(self, seed=None):
            super().__init__(seed)
            note(seed)

    def seeded_default_rng(seed=None):
        note(seed)
        return default_rng(seed)

    def note(seed):
        if isinstance(seed, int):  # order_of() uses a tuple
            seeds[seed].add(state.step)
    torch.Generator, torch.manual_seed = Generator, manual_seed
    np.random.RandomState, np.random.default_rng = RandomState, seeded_default_rng
    return seeds

def watch_gradients(run):
    """Return what optimizers find in each step: {name: where a gradient was not 0}, and a set.

    The dict maps the name of a parameter that has got a gradient to a bool tensor of its shape. The
    set is for the names of parameters whose gradient was a tensor of zeros in some step.
    """
    names = {id(p): name for name, p in run.state.raw_model.named_parameters()}
    nonzero, with_zeros = {}, set()

    def before_step(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = names.get(id(p))
                if p.grad is not None and p.grad.any():
                    nonzero[name] = nonzero.get(name, False) | (p.grad != 0)
                elif p.grad is not None:
                    with_zeros.add(name)
    for optimizer in run.state.optimizers:
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.register_step_pre_hook(before_step)
    return nonzero, with_zeros

def watch_average(state):
    """Return a list, to which a note is added if eval_model changes between two optimizers' steps.

    Then it is not only updated after the last one.
    """
    notes, before = [], {}  # {step: checksum of eval_model} when the first optimizer takes its step

    def before_step(optimizer, args, kwargs):
        if state.eval_model is not state.raw_model and not notes:
            now = crc_of(next(state.eval_model.parameters()))
            if before.setdefault(state.step, now) != now:
                notes.append("eval_model changes between the steps of two optimizers, so it is "
                             "updated several times per step. Update it after step_optimizers().")
    for optimizer in state.optimizers:
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.register_step_pre_hook(before_step)
    return notes

def notes_about_schedules(t, cfg):
    """Return notes on the batch sizes and the learning rates of a run with this Config."""
    notes, steps = [], range(cfg.max_steps)
    try:
        # An edited rows_before() may take long, since it may add up the rows of all earlier steps
        sizes = [t.rows_of_step(cfg, step) * cfg.T for step in steps[:20_000]]
        if len(set(sizes)) > 1:
            notes.append(f"the number of tokens per step varies. It is {sizes[0]:,} at first, "
                         f"{sizes[-1]:,} at the end, and at most {max(sizes):,}, in step "
                         f"{sizes.index(max(sizes))}.")
        rates = [t.get_lr(step, cfg) for step in steps]
        if rates and rates[-1] - cfg.min_lr > 0.1 * abs(cfg.max_lr - cfg.min_lr):
            notes.append(f"the learning rate is {rates[-1]:.2e} in the last step, {steps[-1]}, but "
                         f"min_lr is {cfg.min_lr:.2e}.")
        if rates and min(rates) < 0:
            notes.append(f"the learning rate is negative in step {rates.index(min(rates))} "
                         f"({min(rates):.2e}).")
        jumps = [step for step in steps[cfg.warmup_steps + 1:]
                 if abs(rates[step] - rates[step - 1]) > 0.2 * max(rates)]
        if jumps:
            notes.append(f"the learning rate jumps from {rates[jumps[0] - 1]:.2e} in step "
                         f"{jumps[0] - 1} to {rates[jumps[0]]:.2e} in step {jumps[0]}.")
    except Exception:  # an edit may have given these functions other arguments
        pass
    return notes

def notes_about_code(source):
    """Return notes on the text of train_gpt2.py. Part one ends with train()."""
    notes, tree = [], ast.parse(source)
    train = next((node for node in tree.body
                  if isinstance(node, ast.FunctionDef) and node.name == "train"), None)
    if train is None:
        return []
    defaults = {node.attr: node.lineno for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Config"
                and node.lineno <= train.end_lineno}
    for name, line in defaults.items():
        notes.append(f"Config.{name} in line {line} is the default, not the value that this run "
                     f"uses. Use cfg.{name}.")
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any("Module" in ast.unparse(b) for b in node.bases):
            notes += [f"no call of {node.name}() passes `{name}`, so it always has its default."
                      for name in arguments_never_passed(tree, node)]
    names = sorted(kept_in_loop(train) - {"stopped"})
    if names:
        notes.append(f"train() keeps {', '.join(names)} from one step to the next in local "
                     "variables, which a restart forgets. Make them attributes of State.")
    return notes

def arguments_never_passed(tree, node):
    """Return the arguments with a default in the __init__ of a class that no call passes.

    Return [] if the class is never called, or called with *args or **kwargs.
    """
    init = next((part for part in node.body
                 if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)
    calls = [call for call in ast.walk(tree)
             if isinstance(call, ast.Call) and ast.unparse(call.func) == node.name]
    if init is None or not calls:
        return []
    names = [argument.arg for argument in init.args.args[1:]]  # without self
    passed = set()
    for call in calls:
        keywords = [keyword.arg for keyword in call.keywords]
        if None in keywords or any(isinstance(part, ast.Starred) for part in call.args):
            return []
        passed |= {*names[:len(call.args)], *keywords}
    with_default = names[len(names) - len(init.args.defaults):]
    return [name for name in with_default if name not in passed]

def kept_in_loop(function):
    """Return the names of local variables that the while loop of a function changes.

    A variable is left out if its value before the loop comes from state, run, cfg or a clock.
    """
    kept = set()
    loops = [node for node in function.body if isinstance(node, ast.While)]
    for node in function.body[:function.body.index(loops[0])] if loops else []:
        targets, value = [], getattr(node, "value", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = zip(target.elts, value.elts)
            kept |= {ast.unparse(name) for name, start in pairs
                     if names_in(start).isdisjoint({"state", "run", "cfg", "time"})}
    return kept & changed_names(loops[0]) if loops else set()

def names_in(node):
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}

def changed_names(loop):
    """Return the names that a loop assigns, or whose content it changes, such as by append()."""
    names = {node.id for node in ast.walk(loop)
             if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(loop):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            names.add(ast.unparse(node.value))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):  # x.append(y)
            names.add(ast.unparse(node.value.func).rpartition(".")[0])
    return names

def notes_about_parameters(state, initial, with_gradient):
    """Return notes on parameters that no optimizer has, or that got no gradient.

    initial: {name: (shape, checksum)} before training. with_gradient: the names of the parameters
    that have got a gradient.
    """
    notes, unused, decayed, left_out = [], [], [], []
    owned = {id(p) for optimizer in state.optimizers for group in optimizer.param_groups
             for p in group["params"]}
    for name, p in state.raw_model.named_parameters():
        if p.requires_grad and id(p) not in owned:
            left_out.append(name)
        elif p.requires_grad and name in initial and name not in with_gradient:
            (unused if crc_of(p) == initial[name][1] else decayed).append(name)
    if left_out:
        notes.append(f"at the end of training, no optimizer has {', '.join(left_out[:4])} "
                     f"({len(left_out)} in all). Perhaps these parameters were replaced, or "
                     "unfrozen, after configure_optimizers().")
    if unused:
        notes.append(f"{', '.join(unused[:4])} got no gradient in any step ({len(unused)} "
                     "parameters). They are not used, or they are detached.")
    if decayed:
        notes.append(f"{', '.join(decayed[:4])} got no gradient in any step, but changed, for "
                     f"example by weight decay ({len(decayed)} parameters). To freeze parameters, "
                     "set requires_grad=False.")
    return notes

def notes_about_zeros(names):
    """Return a note on parameters whose gradient is 0 in some steps but not in others."""
    if not names:
        return []
    some = ", ".join(sorted(map(str, names))[:4])
    return [f"the gradient of {some} is 0 in some steps ({len(names)} parameters). The optimizer "
            "still changes them then, by weight decay and momentum. To keep a parameter unchanged "
            "in a step, set p.grad = None."]

def notes_about_elements(model, nonzero):
    """Return a note on matrices in which most elements never got a gradient, except embeddings.

    nonzero: see watch_gradients().
    """
    embeddings = {id(module.weight) for module in model.modules()
                  if isinstance(module, torch.nn.Embedding)}
    shares = {name: nonzero[name].float().mean().item() for name, p in model.named_parameters()
              if p.dim() > 1 and name in nonzero and id(p) not in embeddings}
    sparse = [name for name, share in shares.items() if share < 0.5]
    if not sparse:
        return []
    return [f"only {shares[sparse[0]]:.1%} of the elements of {sparse[0]} got a gradient other "
            f"than 0 ({len(sparse)} such parameters). Perhaps an operation without a gradient is "
            "applied to it, such as round()."]

def notes_about_attributes(model, changed):
    """Return notes on tensors in the model's modules that are neither parameters nor buffers.

    changed: names of values that training has changed. Such a value is usually computed in
    forward().
    """
    notes = []
    for module in model.modules():
        for name, value in vars(module).items():
            label = f"self.{name} in {type(module).__name__}"
            if not name.startswith("_") and is_left_out(value) and label not in changed:
                notes.append(f"{label} holds a tensor that is neither a parameter nor a buffer of "
                             "the model, so it is neither trained nor saved, nor moved to the GPU. "
                             "Use nn.Parameter, nn.ModuleList or, for a constant, "
                             "register_buffer().")
    return list(dict.fromkeys(notes))[:4]  # modules of the same class give the same note

def notes_about_groups(optimizers):
    """Return notes on hyperparameters of optimizer groups that training changes, except lr."""
    notes = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            before = group.get("initial", group)
            for name in before.keys() - {"lr", "initial"}:
                if group.get(name) != before[name]:
                    notes.append(f"training changes {name} in a parameter group of "
                                 f"{type(optimizer).__name__} from {before[name]} to "
                                 f"{group.get(name)} ({len(group['params'])} parameters). If it "
                                 "is computed from its own earlier value (*=), factors accumulate.")
    return list(dict.fromkeys(notes))[:4]

def notes_about_copies(state):
    """Return notes on attributes of State that hold the weights of raw_model, and not a copy."""
    weights = {p.data_ptr() for p in state.raw_model.parameters()}
    return [f"State.{name} holds the weights of raw_model themselves, so it changes with them. To "
            "keep earlier weights, copy them with clone()."
            for name, content in state.state_dict().items()
            if name not in ("raw_model", "optimizers", "scaler")
            and any(part.data_ptr() in weights for _, part in tensors_of(content))]

def integers_of(state):
    """Return {name: value} of the integers in State that an edit has added."""
    return {name: value for name, value in vars(state).items()
            if type(value) is int and name not in ("step", "tokens")}

def notes_about_counters(before, after, steps):
    """Return notes on integers that grow by more than 1 per step. before, after: {name: value}."""
    return [f"State.{name} grows from {before.get(name, 0)} to {value} in {steps} steps. If it "
            "counts steps or updates, it is counted more than once per step."
            for name, value in after.items() if value - before.get(name, 0) > steps]

def notes_about_average(state, begin):
    """Return a note if eval_model is another model than raw_model, but has the same weights.

    begin: the parameters of raw_model before training.
    """
    mine, averaged = list(state.raw_model.parameters()), list(state.eval_model.parameters())
    if state.eval_model is state.raw_model or len(mine) != len(averaged):
        return []
    with torch.no_grad():
        gap = math.hypot(*(float((a - b).norm()) for a, b in zip(mine, averaged)))
        moved = math.hypot(*(float((a - b).norm()) for a, b in zip(mine, begin)))
    if gap > 0.03 * moved:
        return []
    return ["eval_model has almost the same weights as raw_model at the end. If it should be an "
            "average, check that it has begun, that it copies weights (clone()), and that its two "
            "factors are not exchanged."]

def notes_about_buffers(state, begin):
    """Return a note if training changes a buffer of raw_model, but not the one of eval_model.

    begin: {name: checksum} of the buffers before training.
    """
    if state.eval_model is state.raw_model:
        return []
    mine, averaged = [{name: crc_of(b) for name, b in model.named_buffers()}
                      for model in (state.raw_model, state.eval_model)]
    left = [name for name in mine if mine[name] != begin.get(name) == averaged.get(name)]
    if not left:
        return []
    return [f"training changes the buffer {left[0]} of raw_model, but eval_model still has its "
            "initial value. If validation uses it, copy it when you update the average."]

def notes_about_seeds(seeds):
    """Return a note if a generator gets the same seed in many steps. seeds: {seed: steps}."""
    often = [seed for seed, steps in seeds.items() if len(steps) > 3]
    if not often:
        return []
    return [f"a random generator is seeded with {often[0]} in {len(seeds[often[0]])} steps, so "
            "it yields the same random numbers in each of them. If they should differ, derive the "
            "seed from the step too: seed_from(cfg.seed, state.step)."]

def notes_about_repeated_rows(rows):
    """Return a note if training reads rows several times. rows: arrays (T,) of token ids."""
    times = Counter(row.tobytes() for row in rows if len(row) >= SHORTEST_ROW)
    repeated = sum(n - 1 for n in times.values())
    if repeated <= 0.05 * len(rows):  # a text may repeat itself
        return []
    return [f"{repeated} of the first {len(rows)} rows that the model is trained on are "
            "repetitions of other rows. If an edit uses the same rows twice, as SAM does, check "
            "that their gradients should be added up, and which of the losses is reported. "
            "Otherwise check read_step()."]

def notes_about_shifts(shares):
    """Return a note if rows of training have targets that are not the next tokens.

    shares: what share_of_shifted_rows() returned for some forward passes.
    """
    if min(shares, default=1.0) == 1.0:
        return []
    return [f"in a forward pass of training, only {min(shares):.0%} of the rows have targets that "
            "are the tokens that follow in their inputs. Check that read_step() changes, cuts and "
            "shifts x and y alike."]

def notes_about_clipping(state, clipped):
    """Return a note if some gradients are not clipped. clipped: the ids of the other parameters."""
    trained = [p for p in state.raw_model.parameters() if p.requires_grad]
    left = sum(id(p) not in clipped for p in trained)
    if not (clipped and left):
        return []
    return [f"{left} of {len(trained)} trained parameters are not given to clip_grad_norm_(), so "
            "their gradients are not clipped and are not part of the norm that it returns."]

def notes_about_validation(both):
    """Return a note if validation reads training data. both: from training_and_validation()."""
    if both["equal_rows"] <= 0.05 * both["rows"]:
        return []
    return ["validation_loss() also reads data on which the model is trained: "
            f"{both['equal_rows']} of {both['rows']} training rows are part of it."]

def notes_about_targets(model, x, y):
    """Return a note if training predicts a target from inputs that come after it.

    Such inputs contain the target. For example, targets.roll(-1, 1) moves the first target to the
    end of the row. x, y: inputs and targets (B, T). The model must be in training mode.
    """
    embedding, outputs = getattr(getattr(model, "transformer", None), "wte", None), []
    if embedding is None:
        return []
    hook = embedding.register_forward_hook(lambda module, args, output: outputs.append(output))
    gradients, other = [], y.clone()
    other[:, 0] = (y[:, 0] + 1) % (int(y.max()) + 1)
    try:
        for targets in (y, other):
            torch.manual_seed(0)
            outputs.clear()
            loss = model(x, targets)[1]
            gradients.append(torch.autograd.grad(loss, outputs[0])[0].float())  # (B, T, C)
    finally:
        hook.remove()
    # Only the first input may have an influence on how well the first target is predicted
    change = (gradients[0] - gradients[1]).norm(dim=-1).amax(dim=0)  # (T,)
    places = (change[1:] > 1e-3 * change.max()).nonzero().flatten() + 1
    if not len(places):
        return []
    return [f"the training loss compares the first target of a row with predictions from later "
            f"inputs (at position {places[0]} and {len(places) - 1} others), which contain that "
            "target. If roll() shifts the targets, leave out those that it moves from one end of "
            "the row to the other."]

def notes_about_modes(cfg, gap):
    """Return a note if the logits in training mode and in eval mode differ. gap: by how much."""
    if not gap or getattr(cfg, "dropout", 0):
        return []
    return [f"logits in training mode and in eval mode differ by up to {gap:.2g}. Validation, "
            "samples and the export use the model in eval mode. If training drops parts of the "
            "model at random, check that it scales up those that are left."]

def notes_in_training_mode(model, x, y):
    """Return notes on the training loss of inputs and targets (B, T)."""
    try:
        with torch.enable_grad():
            return (notes_about_dimensions(model, x, y) + notes_about_loss(model, x, y)
                    + notes_about_targets(model, x, y))
    except Exception:  # an edit may have given forward() other arguments; a note must not stop
        return []

class WatchDimensions(torch.overrides.TorchFunctionMode):
    """Records operations that normalize over a dimension other than the last one.

    found: {description: None}
    """
    DEFAULTS = {"normalize": 1, "softmax": None, "log_softmax": None, "logsumexp": None}

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        x = args[0] if args else None
        if name in self.DEFAULTS and torch.is_tensor(x) and x.dim() > 1:
            position = 2 if name == "normalize" else 1  # of dim, in args
            dim = kwargs.get("dim", args[position] if len(args) > position else self.DEFAULTS[name])
            place = places_in_scripts("".join(traceback.format_stack()))
            if isinstance(dim, int) and dim % x.dim() != x.dim() - 1 and place:
                self.found[f"{name}() works over dimension {dim} of a tensor of shape "
                           f"{tuple(x.shape)} ({place[-1]})"] = None
        return func(*args, **kwargs)

def notes_about_dimensions(model, x, y):
    """Return notes on softmax(), normalize() and so on over dimensions other than the last one."""
    with WatchDimensions() as watch:
        model(x, y)
    return [f"{text}. Check that this is the right dimension." for text in watch.found]

def notes_about_loss(model, x, y):
    """Return a note if additional terms make up much of the training loss.

    x, y: inputs and targets (B, T). The model must be in training mode.
    """
    logits, loss = model(x, y)
    cross_entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
    ratio = (loss / cross_entropy).item()
    if 0.5 <= ratio <= 1.5:
        return []
    return [f"the training loss of two rows is {loss.item():.4g}, but their cross-entropy is "
            f"{cross_entropy.item():.4g}. If an additional term should be smaller, check that it "
            "is a mean over all tokens."]

def is_left_out(value):
    """Return whether a module's attribute is or contains a tensor that torch does not know of.

    Modules in a list count only if they got gradients, since a teacher is also kept in a list.
    """
    if isinstance(value, (list, tuple)):
        return any(map(is_left_out, value))
    if isinstance(value, torch.nn.Module):
        return any(p.grad is not None for p in value.parameters())
    return torch.is_tensor(value) and value.is_floating_point()

# ---- What an edit keeps outside of State. It is named when a promise is broken
KEPT = (bool, int, float, str, bytes, list, dict, set, tuple, deque, np.ndarray, np.generic,
        random.Random, np.random.RandomState, np.random.Generator)

def unsaved_values(t, run):
    """Return {name: fingerprint} of values that a checkpoint does not hold."""
    values = {"the generator of the module random": fingerprint(random.getstate()),
              "the generator of numpy.random": fingerprint(np.random.get_state())}
    usual = {*vars(torch.nn.Module()), *vars(torch.optim.SGD([torch.zeros(1)], lr=0.1))}
    for thing in (*run.state.raw_model.modules(), *run.state.optimizers):
        for name in vars(thing).keys() - usual:
            label = f"self.{name} in {type(thing).__name__}"
            values.setdefault(label, []).append(fingerprint(getattr(thing, name)))
        for name in vars(type(thing)).keys() - {"__dict__", "__weakref__"}:  # of the class
            values[f"{type(thing).__name__}.{name}"] = fingerprint(getattr(type(thing), name, None))
    for name in vars(run.train_loader).keys() - {"last_shard", "last_tokens"}:
        values[f"{name} in the training loader"] = fingerprint(getattr(run.train_loader, name))
    for name in vars(run).keys() - {"validated_step", "step_seconds", "told_slow"}:
        values[f"run.{name}"] = fingerprint(getattr(run, name))
    for name in vars(t).keys() - {"__builtins__"}:
        values[f"the global {name}"] = fingerprint(getattr(t, name))
    return values

def fingerprint(value):
    """Return a checksum of a tensor, generator, number or container, or None for other objects."""
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if torch.is_tensor(value):
        return crc_of(value)
    if not isinstance(value, KEPT):
        return None
    if isinstance(value, (list, tuple)) and any(isinstance(p, torch.nn.Module) for p in value):
        return None  # for example a teacher
    try:
        return zlib.crc32(pickle.dumps(value))
    except Exception:  # pickle raises errors of many kinds
        return None

# ---- How samples and the validation loss of the trained model agree with model(idx)
def examine(run, tolerance):
    """Return what check.py wants to know about the trained model.

    {"samples": a problem or None, "drawn": token ids, "later": see leak_problem() and
    length_problem(), "notes": texts, "val_data": see validation_data(), "cross_entropy": loss,
    "later_in_training": as "later", in training mode, "modes": how far the logits in training mode
    are from those in eval mode}

    An edited generate() or forward() may raise anything, so errors become texts.
    """
    model, T = run.state.eval_model, run.cfg.T
    x, y = run.val_loader.batch(0, 2, run.device)
    report = examine_samples(model, x, T, tolerance) | {"notes": []}
    try:
        report["later"] = (leak_problem(model, x, tolerance / 10)
                           or length_problem(model, x, tolerance))
        if tolerance < 1e-3:  # 16-bit rounding can hide a small influence
            report["notes"] = notes_about_context(model, x)
    except Exception as e:
        report["later"] = f"{type(e).__name__}: {e}"
    report["val_data"] = validation_data(run)
    try:
        report["cross_entropy"] = cross_entropy(run, model)
    except Exception as e:
        report["cross_entropy"] = f"{type(e).__name__}: {e}"
    raw_model, report["modes"] = run.state.raw_model, 0.0
    try:
        logits = raw_model(x)[0].float()
        raw_model.train()  # late, because a forward pass may change buffers
        report["later_in_training"] = leak_problem(raw_model, x, tolerance / 10)
        gap = (raw_model(x)[0].float() - logits).abs().max().item()
        report["modes"] = gap if gap > tolerance * max(1.0, logits.abs().max().item()) else 0.0
    except Exception as e:
        report["later_in_training"] = f"{type(e).__name__}: {e}"
    report["notes"] += notes_in_training_mode(raw_model, x, y)
    raw_model.eval()
    report["samples"] = report["samples"] or sample_problem_if_sharpened(model, x, T, tolerance)
    return report

def examine_samples(model, x, T, tolerance):
    """Return {"samples": a problem or None, "drawn": token ids}. x: token ids (B, T)."""
    n, problem, drawn = min(12, T // 2), None, []
    try:
        for prompt in (x[:, :T // 4], x[:, n // 2:]):  # the second continuation exceeds the context
            problem = problem or sample_problem(model, prompt, n, T, tolerance)
        for _ in range(2):
            torch.manual_seed(0)
            # A high temperature shows an edit that leaves out unlikely tokens
            drawn.append(model.generate(x[:1, :1].repeat(8, 1), 64, temperature=1.5).tolist())
        if drawn[0] != drawn[1]:
            problem = problem or ["generate() returns other tokens although the seed is the same",
                                  "Its random numbers should come from torch's generator."]
    except Exception as e:
        place = "\n".join(places_in_scripts(traceback.format_exc())[-1:])
        problem = ["generate() stops with an error", f"{place}\n{type(e).__name__}: {e}"]
    return {"samples": problem, "drawn": drawn[-1:]}

def sample_problem(model, prompt, n, T, tolerance):
    """Return [what is wrong, where] if greedy tokens are not the arg max of model(idx), or None.

    prompt: token ids (B, length). n: the number of tokens to append.
    """
    block_size = getattr(model.config, "block_size", T)
    idx = model.generate(prompt, n, temperature=0)
    for i in range(prompt.size(1), idx.size(1)):
        logits = model(idx[:, max(0, i - block_size):i])[0][:, -1].float()  # (B, n_vocab)
        for token, row in zip(idx[:, i].tolist(), logits):
            best = row.max().item()
            if best - row[token].item() > tolerance * max(1.0, abs(best)):  # more than a tie
                return ["generate(temperature=0) differs from the arg max of model(idx)",
                        f"After {i} tokens generate() appends token {token}, but the arg max is "
                        f"{row.argmax().item()}."]
    return None

def sample_problem_if_sharpened(model, x, T, tolerance):
    """Multiply the model's matrices by 4, and return what sample_problem() returns.

    After a few steps a token depends little on those before it, so a wrong context (for example in
    a key-value cache) may not change the arg max. With larger weights it does. x: ids (B, T).
    """
    for p in model.parameters():
        if p.dim() >= 2:
            p.mul_(4)
    try:
        if not model(x)[0].isfinite().all():
            return None
        # The second half of the continuation is beyond the context. Rounding has larger effects
        problem = sample_problem(model, x[:, T // 2:], T, T, 10 * tolerance)
    except Exception:  # the unchanged model has been sampled without an error
        return None
    return problem and [problem[0], f"{problem[1]} (All weights were multiplied by 4 for this.)"]

def leak_problem(model, x, tolerance):
    """Return [what is wrong, where] if logits depend on later tokens, or None.

    Return a text instead if this cannot be checked. x: token ids (B, T).
    """
    T = x.size(1)

    def logits_of(idx):
        torch.manual_seed(0)  # a model that draws random numbers gets the same ones each time
        return model(idx)[0].float()  # (B, T, n_vocab)
    logits, again = logits_of(x), logits_of(x)
    limit = tolerance * max(1.0, logits.abs().max().item())
    if not (logits - again).abs().max() <= limit:  # in an edit that counts calls, for example
        return "model(idx) gives different logits when it is called again with the same tokens"
    # If tokens see the later ones of their own group only, a change that starts between two groups
    # does not show it
    for start in filter(None, (T // 2, 1, T // 3, T - 1)):
        changed = x.clone()
        changed[:, start:] = (x[:, start:] + 1) % logits.size(-1)
        gaps = (logits_of(changed) - logits)[:, :start].abs().amax(dim=(0, 2))  # one per position
        positions = (gaps > limit).nonzero().flatten().tolist()
        if positions:
            return ["logits change with later tokens", (
                f"When the tokens from position {start} on are changed, the logits at "
                f"{len(positions)} of the {start} positions before them change, the first at "
                f"position {positions[0]}, by up to {gaps.max().item():.2g}. Only rounding, "
                f"{limit:.1g}, is allowed.")]
    return None

def length_problem(model, x, tolerance):
    """Return [what is wrong, where] if logits differ when later tokens are cut off, or None.

    x: token ids (B, T).
    """
    logits = model(x)[0].float()
    if not torch.equal(logits, model(x)[0].float()):
        return None  # random numbers would differ for rows of another length
    limit = tolerance * max(1.0, logits.abs().max().item())
    for n in (x.size(1) // 2, x.size(1) // 2 + 1, x.size(1) - 1):
        gap = (model(x[:, :n])[0].float() - logits[:, :n]).abs().max().item()
        if not gap <= limit:
            return ["logits depend on the number of tokens in a row", (
                f"For the first {n} of {x.size(1)} tokens, model(x[:, :{n}]) differs from "
                f"model(x)[:, :{n}] by up to {gap:.2g}, so samples do not come from the model that "
                f"was validated. Only rounding, {limit:.1g}, is allowed.")]
    return None

def notes_about_context(model, x):
    """Return a note if some of the last four tokens have no influence on the logits at all.

    x: token ids (B, T).
    """
    if x.size(1) < 8:
        return []
    last, changed = x.size(1) - 1, x.repeat(4, 1, 1)  # (4, B, T)
    for distance in range(4):
        changed[distance, :, last - distance] += 1
        changed[distance, :, last - distance] %= int(x.max()) + 1
    logits = model(x)[0][:, -1]
    unseen = [distance for distance in range(4)
              if torch.equal(model(changed[distance])[0][:, -1], logits)]
    if not unseen:
        return []
    return [f"of the {last + 1} tokens in a row, the logits at the last one do not depend on token "
            f"{', '.join(str(last - distance) for distance in unseen)} (counted from 0). If they "
            "should, check the attention mask."]

def validation_data(run):
    """Return the source of the validation data and checksums of its rows, or None.

    Of a large corpus, only the first million tokens are included.
    """
    try:
        n_rows = min(run.val_loader.rows_per_epoch, max(1, 2**20 // run.cfg.T))
        batch = run.val_loader.batch(0, n_rows, run.device)
        source = [run.cfg.T, run.cfg.encoding, Path(run.cfg.data).name]
        return [source, [crc_of(part) for part in batch]]
    except Exception:  # an edit may give batch() other arguments
        return None

def cross_entropy(run, model):
    """Return the mean cross-entropy of the logits over the rows that validation reads."""
    cfg, loader = run.cfg, run.val_loader
    rows = min(max(1, cfg.val_tokens // cfg.T), loader.rows_per_epoch)
    total, counted = 0.0, 0
    for row in range(0, rows, cfg.B):
        x, y = loader.batch(row, min(cfg.B, rows - row), run.device)
        logits = model(x)[0].flatten(0, 1).float()
        if logits.size(1) != run.encoding.n_vocab:
            raise ValueError(f"there are {logits.size(1)} logits per token, but the encoding has "
                             f"{run.encoding.n_vocab} ids")
        total += torch.nn.functional.cross_entropy(logits, y.flatten(), reduction="sum").item()
        counted += (y >= 0).sum().item()
    return total / max(1, counted)

if __name__ == "__main__":
    main()
