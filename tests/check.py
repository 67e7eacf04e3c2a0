"""Check that an edited train_gpt2.py still keeps its promises, in about a minute on two cores.

    python tests/check.py                 # with your constants; without shards, the quick start's
    python tests/check.py --data=my.txt --optimizer=adamw     # any flags of train_gpt2.py
    python tests/check.py --steps=60      # more steps, for an edit that acts later
    python tests/check.py --against=main  # compare with another commit than HEAD

The command runs the scripts beside it several times, for a few steps each, in temporary folders.
Each of these runs is made by a process of its own, and differs from the others in one thing: it is
killed and continued, or has half of B, or two processes, and so on. The command prints one line
per promise. It exits with 0 if no promise is broken, else with 1. The learning-rate schedule is
compressed into the checked steps, so that warmup and decay are both part of them.
"""
import ast
import contextlib
import dataclasses
import io
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
import tarfile
import tempfile
import textwrap
import threading
import time
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

SCRIPTS = Path(__file__).resolve().parent.parent  # the folder of the scripts to check
STEPS = 20  # by default

# name: (the promise, the likely cause if it is broken)
PROMISES = {
    "same": (
        "the same command twice gives the same run",
        "The usual reason is a random number that does not come from torch's generator (the "
        "modules random and numpy.random, or the order of a set), or a value that depends on the "
        "time."),
    "killed": (
        "a killed run continues as if it had not been killed",
        "Something that later steps depend on is neither in State nor a parameter or buffer. Make "
        "it a field of State or a buffer (register_buffer), so that a checkpoint holds it."),
    "B": (
        "B changes speed only",
        "The usual reason is a term or a statistic over the rows of a micro-batch, or a state that "
        "counts forward passes instead of steps."),
    "processes": (
        "the number of processes changes speed only",
        "The usual reason is a term or a statistic over the rows of one process, a state that each "
        "process updates with its own rows, or a parameter that gets a gradient on one process "
        "only."),
    "saved": (
        "what is saved is what was validated",
        "Validation depends on a state that is neither a parameter nor a buffer, so the saved "
        "weights alone are another model. Keep it in a buffer (register_buffer)."),
    "samples": (
        "samples follow the model",
        "generate() computes logits in another way than forward(). Let it call self(idx)."),
    "loss": (
        "the loss is the cross-entropy",
        "The validation loss has another term or factor, so it is not comparable with the losses "
        "of other runs. Put a term that only training minimises under `if self.training`."),
    "effect": (
        "the edit has an effect",
        "Every loss is the same digit for digit as without the edit, so in these steps the edit "
        "has no effect on training. Perhaps it is never reached, something overwrites it later "
        "(for example init_weights, if it changes initial weights), or it acts in later steps "
        "only."),
    "begin": (
        "untouched weights begin as before",
        "Both versions have these parameters with the same shapes, but draw other values for "
        "them. If that is not the purpose of the edit, results differ by more than the edit. "
        "init_weights seeds each draw by the parameter's name."),
}
# Why a run may stop in the check of a promise, if it is not only the likely cause above
ERRORS = {
    "processes": (
        "If the error is one of the communication between processes, a parameter probably gets no "
        "gradient on one of them, for example because a layer or an expert is skipped there. Each "
        "parameter needs a gradient on all processes in each step, if need be of zeros."),
}
# Flags that this command sets for each run, and others that it sets unless they are given
OWN_FLAGS = ("log_dir", "max_steps", "epochs", "minutes", "eval_every", "save_every", "keep_every",
             "sample")
DEFAULTS = {"dtype": "float32", "compile": "False", "hellaswag_every": 0, "sample_every": 0,
            "epochs": 0, "minutes": 0, "keep_every": 0}
# Streams whose names match this hold times, which differ between equal runs
TIMES = re.compile(r"minute|second|time|speed|tok/s|tokens_per", re.I)
NO_REPEAT = "the same command already gives another run"
VAL_VARIES = "the same weights have another validation loss each time"
WITHOUT_DROPOUT = "with dropout=0"
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has no SIGKILL; SIGTERM ends at once


class Failed(Exception):
    """A run that ended with an error, or what else stops the check; its text is shown."""


# ---- command line
@dataclass
class Options:
    flags: dict           # {name: text} for train_gpt2.py
    steps: int = STEPS
    against: str = "HEAD"

def parse(words):
    """Return the Options of a command line. Raises Failed."""
    flags, words = {}, list(words)
    while words:
        match = re.fullmatch(r"--(\w+)(?:=(.*))?", words.pop(0), re.S)
        if not match:
            raise Failed("Give flags as --name=value; --help explains them.")
        name, value = match.groups()
        if value is None:
            if not words or words[0].startswith("--"):
                raise Failed(f"--{name} lacks a value.")
            value = words.pop(0)
        if name in OWN_FLAGS:
            raise Failed(f"--{name} cannot be given, because check.py sets it for each run; "
                         "--steps=60 takes more steps.")
        flags[name] = value
    steps, against = flags.pop("steps", str(STEPS)), flags.pop("against", "HEAD")
    if not steps.isdecimal() or int(steps) < 4:
        raise Failed(f"--steps={steps}: it must be a whole number of at least 4.")
    return Options(flags, int(steps), against)


# ---- what runs leave behind: log.txt and checkpoints
@dataclass
class Difference:
    """The first line in which two logs differ. A value is None where a log lacks the line."""
    step: int
    stream: str
    values: tuple         # two texts
    allowed: float = 0.0  # the largest difference that rounding explains

    def __str__(self):
        return f"{self.stream} differs from step {self.step} on"

    def says(self, one, other):
        """Return both values in words; one and other name the runs."""
        values = ["no line" if value is None else value for value in self.values]
        text = f"{values[0]} {one}, {values[1]} {other}"
        if self.allowed and None not in self.values:
            gap = abs(float(values[0]) - float(values[1]))
            text += f": {gap:.2g} apart, where rounding explains {self.allowed:.1g}"
        return text

def read_log(folder):
    """Return {(step, stream): value as text} of log.txt, without times."""
    text = Path(folder, "log.txt").read_text(errors="replace")
    lines = re.findall(r"^(\d+) (.+) (\S+)$", text, re.M)
    return {(int(step), stream): value for step, stream, value in lines if not TIMES.search(stream)}

def is_loss(stream):
    return stream in ("train", "val", "hella")

def in_order(key):
    """Sort the lines of a step: the validation before it, its loss, then other streams."""
    step, stream = key
    return step, {"val": 0, "train": 1}.get(stream, 2), stream

def first_difference(one, other, allowed=None):
    """Return the first Difference of two logs, or None.

    allowed(step, stream, value) is how far apart two losses may be. Streams that an edit adds are
    not compared then, since a metric of one micro-batch may well depend on B. Without `allowed`,
    all lines must be the same.
    """
    for step, stream in sorted(one.keys() | other.keys(), key=in_order):
        a, b = one.get((step, stream)), other.get((step, stream))
        if a == b or (allowed and not is_loss(stream)):
            continue
        if a is None or b is None or not allowed:
            return Difference(step, stream, (a, b))
        most = allowed(step, stream, float(a))
        if not abs(float(a) - float(b)) <= most:  # NaN, too
            return Difference(step, stream, (a, b), most)
    return None

class Rounding:
    """How far apart rounding may drive the losses of two runs that should be equal.

    It is measured: `nudged` is the log of a run whose initial weights were changed by about one
    unit of rounding. Small differences grow from step to step, at a rate that depends on the model.
    """
    def __init__(self, log, nudged, low_precision, margin=5):
        self.margin, self.floor = margin, 2e-4 if low_precision else 2e-6  # relative to the loss
        self.grown, most = {}, 0.0  # {step: the largest difference up to there}
        for step, stream in sorted(log.keys() & nudged.keys()):
            if is_loss(stream):
                gap = abs(float(log[step, stream]) - float(nudged[step, stream]))
                most = max(most, gap) if math.isfinite(gap) else most
            self.grown[step] = most

    def __call__(self, step, stream, value):
        return max(self.floor * max(5.0, abs(value)), self.margin * self.grown.get(step, 0.0))

def tensors_of(content, name=""):
    """Yield (name, tensor) of all tensors in a checkpoint."""
    import torch
    if torch.is_tensor(content):
        yield name, content
    elif isinstance(content, (dict, list, tuple)):
        parts = content.items() if isinstance(content, dict) else enumerate(content)
        for key, part in parts:
            yield from tensors_of(part, f"{name}.{key}" if name else str(key))

def load_tensors(path):
    import torch
    return dict(tensors_of(torch.load(path, map_location="cpu", weights_only=True)))

def first_tensor_that_differs(path, other):
    """Return its name and the largest difference, or None if all common tensors are equal."""
    theirs = load_tensors(other)
    for name, tensor in load_tensors(path).items():
        if name in theirs and not same_tensor(tensor, theirs[name]):
            if tensor.shape != theirs[name].shape:
                return name, math.inf
            return name, (tensor.double() - theirs[name].double()).abs().max().item()
    return None

def same_tensor(one, other):
    """Whether two tensors have the same shape and values; NaN equals NaN."""
    import torch
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)

def distance(path, other):
    """Return how far apart the tensors of two checkpoints are, relative to their norm."""
    theirs, apart, norm = load_tensors(other), 0.0, 0.0
    for name, tensor in load_tensors(path).items():
        if name in theirs and tensor.is_floating_point() and tensor.shape == theirs[name].shape:
            apart += (tensor.double() - theirs[name].double()).square().sum().item()
            norm += tensor.double().square().sum().item()
    return math.sqrt(apart / max(norm, 1e-30))


# ---- runs, each in a process of its own
@dataclass
class Finished:
    """A run that came to its end."""
    name: str
    log_dir: Path
    report: dict  # what the process wrote about itself

    @property
    def log(self):
        return read_log(self.log_dir)

    @property
    def checkpoint(self):
        """The path of the last checkpoint."""
        return max(self.log_dir.glob("checkpoint_*.pt"))

# Their checkpoints are compared
KEEP_WEIGHTS = ("base", "again", "half", "nudged", "continued_killed", "continued")

class Laboratory:
    """A temporary folder and the processes that run in it. Leaving it ends and deletes them."""
    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="check_gpt2_"))
        self.processes, self.seconds, self.closed = [], {}, False
        self.planned = 0  # runs, for the progress
        self.pool = ThreadPoolExecutor(max_workers=min(2, cores()))
        self.turn = contextlib.nullcontext()  # a lock where only one run fits at a time

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.closed = True
        stop_runs(self.folder.glob("*"))
        for process in self.processes:
            process.kill()  # unless it has ended
        self.pool.shutdown(cancel_futures=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, name, flags, script=SCRIPTS, log_dir=None, processes=1, limit=None, **job):
        """Run the script with {name: value} of flags; job says what else its process does.

        limit: the seconds after which a run counts as stuck. Raises Failed.
        """
        folder = self.folder / name
        log_dir = log_dir or folder / "log"
        folder.mkdir()
        job |= {"scripts": str(script), "folder": str(folder), "parent": os.getpid(),
                "flags": {key: str(value) for key, value in flags.items()} | {
                    "log_dir": str(log_dir)}}
        (folder / "job.json").write_text(json.dumps(job))
        command = [sys.executable, __file__, f"--be={folder}"]
        if processes > 1:
            command[1:1] = ["-m", "torch.distributed.run", "--standalone",
                            f"--nproc_per_node={processes}"]
        with self.turn:
            begin = time.monotonic()
            code = wait_for(self.start_process(command, folder), folder, limit or math.inf)
            self.seconds[name] = time.monotonic() - begin
        show_progress(f"{len(self.seconds)} of {self.planned} runs done")
        if name not in KEEP_WEIGHTS:
            for path in log_dir.glob("checkpoint_*.pt"):
                path.unlink()
        if code != 0 and not (folder / "killed").exists():
            raise Failed(error_of(folder, code))
        return Finished(name, log_dir, json.loads((folder / "report.json").read_text()))

    def start_process(self, command, folder):
        if self.closed:
            raise Failed("The check was stopped.")
        with open(folder / "output.txt", "wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output,
                                       stderr=output, env=environment(), start_new_session=True)
        self.processes.append(process)
        return process

    def run_and_continue(self, name, flags, step, checkpoint):
        """Kill a run in that step, after that checkpoint is written; return the continued run."""
        killed = self.run(f"{name}_killed", flags, kill={"step": step, "after": checkpoint})
        if not (self.folder / killed.name / "killed").exists():
            raise Failed("NOT KILLED")
        return self.run(name, flags, log_dir=killed.log_dir)

def cores():
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

def environment():
    """Return the environment of runs. With the same number of threads, equal runs are equal bit
    for bit."""
    env = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    return {"OMP_NUM_THREADS": "1"} | env | {"PYTHONDONTWRITEBYTECODE": "1"}

def wait_for(process, folder, limit):
    """Return the exit status, or "stuck" after `limit` seconds. A run is also stopped if one of
    its processes has failed."""
    failed_at, end = math.inf, time.monotonic() + limit
    while process.poll() is None:
        time.sleep(0.05)
        now = time.monotonic()
        if failed_at == math.inf and list(folder.glob("failed_*")):
            failed_at = now
        # torchrun waits half a minute for processes that wait for a failed one
        if now > end or now > failed_at + 5:
            stop_runs([folder])
            process.kill()
            process.wait()
            return "stuck" if now > end else 1
    for path in folder.glob("running_*"):  # a process that was killed leaves it
        path.unlink()
    return process.returncode

def stop_runs(folders):
    """End the processes of runs, those that torchrun started included, and wait for their end.

    Without job.json they end themselves. (To kill them by number would not be safe: the number of
    a process that has ended may belong to another program.)
    """
    folders, end = list(folders), time.monotonic() + 10
    for folder in folders:
        (folder / "job.json").unlink(missing_ok=True)
    while any(list(folder.glob("running_*")) for folder in folders) and time.monotonic() < end:
        time.sleep(0.05)

def error_of(folder, code):
    """Return the error of a failed run in a few lines."""
    if code == "stuck":
        return "The processes made no progress: they wait for each other."
    paths = sorted(folder.glob("err_*.txt"), key=lambda path: path.stat().st_mtime_ns)
    texts = [path.read_text(errors="replace") for path in [*paths, folder / "output.txt"]
             if path.exists()]
    for text in texts:  # what the script itself says
        if line := re.search(r"^train_gpt2\.py: .+", text, re.M):
            return line[0]
    for text in texts[:len(paths)] or texts:
        if error := last_error(text):
            return error
    statuses = re.findall(r"exitcode +: (.+)", "".join(texts)) or [code]  # torchrun names them
    return f"The process ended with status {', '.join(map(str, statuses))}."

def last_error(text):
    """Return where and how a traceback ends, or what a C++ library says last, or None."""
    if line := re.search(r"^ *what\(\): +(.+)", text, re.M):
        return line[1][:300]
    if "Traceback (most recent call last)" not in text:
        return None
    text = text[text.rindex("Traceback (most recent call last)"):]
    frames = re.findall(r'^  File "(.+)", line (\d+), in (.+)\n    (.+)', text, re.M)
    mine = [frame for frame in frames if Path(frame[0]).parent == SCRIPTS
            or Path(frame[0]).parent.name == "committed"]
    path, line, function, code = (mine or frames or [("?", "?", "?", "")])[-1]
    says = [line for line in text.splitlines() if line and not line.startswith((" ", "Traceback"))]
    return (f"{Path(path).name}, line {line}, in {function}: {code.strip()}\n"
            f"{says[-1][:300] if says else ''}")


# ---- the committed version
def git(*words):
    """Return what git prints in the folder of the scripts, as bytes. Raises Failed."""
    try:
        return subprocess.run(["git", *words], cwd=SCRIPTS, capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise Failed("git is not installed") from None
    except subprocess.CalledProcessError as e:
        lines = e.stderr.decode(errors="replace").strip().splitlines()
        raise Failed(f"git: {lines[0] if lines else 'failed'}") from None

def without_comments(source):
    """Return Python code in a form that depends neither on comments nor on docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(
                body[0].value, ast.Constant):
            body[0].value.value = ""
    return ast.dump(tree)

def extract_committed(revision, folder):
    """Write the committed version of the scripts into `folder`. Raises Failed with the reason if
    there is none, or if it is no other code than the one beside this command."""
    if git("rev-parse", "--is-inside-work-tree").strip() != b"true":
        raise Failed("the folder is no git checkout")
    archive = git("archive", "--format=tar", revision, "--", ".")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        if hasattr(tarfile, "data_filter"):  # the first versions of Python 3.10 lack it
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(folder)
    names = [path.relative_to(folder) for path in Path(folder).rglob("*.py")]
    names = [name for name in names if name.parts[0] != "tests"]
    if not Path(folder, "train_gpt2.py").exists():
        raise Failed(f"{revision} has no train_gpt2.py")
    changed = []
    for name in names:
        old, new = Path(folder, name), SCRIPTS / name
        if not new.exists() or old.read_bytes() != new.read_bytes():
            changed.append(name)
    if not changed:
        raise Failed(f"the scripts are as in {revision}; --against=COMMIT compares with another")
    for name in changed:
        new = SCRIPTS / name
        text = new.read_text(encoding="utf-8") if new.exists() else ""
        old = Path(folder, name).read_text(encoding="utf-8")
        if without_comments(old) != without_comments(text):
            return
    raise Failed("only comments and docstrings were edited")

def code_of_scripts():
    """Return {name: CRC} of the scripts and of what lies beside them."""
    return {path.name: zlib.crc32(path.read_bytes()) for path in sorted(SCRIPTS.glob("*.py"))}


# ---- the check
@dataclass
class Verdict:
    promise: str          # a key of PROMISES
    outcome: str          # holds, BROKEN or not checked
    detail: str = ""      # of BROKEN: what differs; of not checked: why
    evidence: list = field(default_factory=list)  # more lines of a broken promise

    def __str__(self):
        name, cause = PROMISES[self.promise]
        line = f"{name:52} {self.outcome}"
        if self.outcome == "holds":
            return line + (f" ({self.detail})" if self.detail else "")
        if self.outcome == "not checked":
            return f"{line}: {self.detail}"
        lines = [f"{line}: {self.detail}"]
        for text in filter(None, [*self.evidence, cause]):
            for part in text.splitlines():
                lines += textwrap.wrap(part, 96, initial_indent="    ", subsequent_indent="    ")
        return "\n".join(lines)

def largest_divisor(number, most):
    return max(n for n in range(1, max(1, most) + 1) if number % n == 0)

class Plan:
    """The runs of a check and their flags, which follow from the constants of the edited script."""
    def __init__(self, options, setup):
        constants, steps = setup["constants"], options.steps
        self.setup, self.dropout = setup, float(constants.get("dropout", 0))
        self.exact, self.rows = setup["device"] == "cpu", setup["rows"]
        self.low_precision = setup["dtype"] != "float32" or not self.exact
        self.B = largest_divisor(self.rows, int(constants["B"]))
        self.each = steps // 4   # steps between validations
        self.saved = 2 * self.each  # the step that is saved before the kill
        self.killed = self.saved + 1 + self.each // 2
        self.common = DEFAULTS | {
            "max_steps": steps, "eval_every": self.each, "save_every": self.saved,
            "warmup_steps": min(int(constants.get("warmup_steps", 0)), self.each),
            "val_tokens": min(int(constants["val_tokens"]), 4 * self.B * int(constants["T"])),
        } | options.flags
        two = self.rows % 2 == 0
        self.half_B = largest_divisor(self.rows // 2 if two else self.rows, max(1, self.B // 2))
        self.no_processes = self.why_no_processes(two, options.flags)

    def first_line(self):
        setup, steps = self.setup, self.common["max_steps"]
        return (f"Checking {steps} steps of {self.rows * int(setup['constants']['T']):,} tokens, "
                f"{setup['device']}, {setup['dtype']}. For an edit that acts later, take more: "
                f"--steps={3 * steps}")

    def why_no_processes(self, two, flags):
        """Return why two processes cannot be tried here, or an empty text."""
        device, T = self.setup["device"], self.setup["constants"]["T"]
        if not two or (self.rows // 2) % self.half_B:
            return f"the {self.rows} rows of a step cannot be divided between two processes"
        if int(self.setup["constants"]["total_batch_size"]) % (2 * int(T)):
            return "total_batch_size is no multiple of two rows"
        if device == "cpu":
            return "there is one core only" if cores() < 2 else ""
        if device == "cuda" and self.setup["gpus"] > 1 and ":" not in flags.get("device", ""):
            return ""
        return f"two processes need two GPUs, and the device is {flags.get('device', device)}"

class Check:
    """One check: it starts all runs, then yields the verdicts in the order of PROMISES."""
    def __init__(self, lab, options):
        self.lab, self.options, self.runs = lab, options, {}
        self.committed, self.no_committed = lab.folder / "committed", ""
        try:
            extract_committed(options.against, self.committed)
        except Failed as e:
            self.no_committed = str(e)

    def set_up(self):
        """Set the script up once, without a step, to learn its constants. Raises Failed."""
        flags = DEFAULTS | self.options.flags
        self.add("setup", flags, stop=True)
        if not self.no_committed:
            self.add("setup_committed", flags, script=self.committed, stop=True)
        self.plan = Plan(self.options, self.runs["setup"].result().report)
        if not self.plan.exact:  # the GPU's memory may not be enough for two runs
            self.lab.turn = threading.Lock()

    def start(self):
        """Start the runs. At most two run at a time, in this order."""
        lab, plan, common = self.lab, self.plan, self.plan.common
        # What dropout drops depends on B
        no_dropout = common | ({"dropout": 0} if plan.dropout else {})
        half = no_dropout | {"B": plan.half_B}
        self.add("base", common, examine=True)
        lab.planned += 2
        self.runs["continued"] = lab.pool.submit(
            lab.run_and_continue, "continued", common, plan.killed,
            f"checkpoint_{plan.saved:05d}.pt")
        self.add("again", common)
        self.add("half", half)
        self.add("nudged", half, nudge=4e-3 if plan.low_precision else 1e-6)
        if plan.dropout:
            self.add("no_dropout", no_dropout)
        if not self.no_committed:
            self.add("committed_run", common, script=self.committed, examine=True)
        self.add("reloaded", self.flags_to_reload(), after="base")
        if not plan.no_processes:
            self.add("two", half, after="half", processes=2)

    def add(self, name, flags, after=None, **job):
        """Start a run; one that comes after another run waits for its end."""
        if job.get("script") == self.committed:  # which may lack the edit's new constants
            job["optional"] = list(flags)

        def run():
            if after:
                self.runs[after].result()
            if job.get("processes"):  # they may wait for each other
                job["limit"] = 45 + 5 * self.lab.seconds[after]
            return self.lab.run(name, flags, **job)
        self.lab.planned += 1
        self.runs[name] = self.lab.pool.submit(run)

    def flags_to_reload(self):
        """The flags of a run that only validates what the first run saved last."""
        log_dir, steps = self.lab.folder / "base" / "log", self.options.steps
        # Weights choose another preset: give every constant
        return self.plan.setup["constants"] | self.plan.common | {
            "B": self.plan.B, "max_steps": 0, "init_from": log_dir / f"checkpoint_{steps:05d}.pt"}

    def verdicts(self):
        """Yield a Verdict for each promise. Raises Failed if nothing can be checked."""
        self.base = self.runs["base"].result()
        self.log, self.found, self.val_repeats = self.base.log, {}, True
        for promise, check_promise in (
                ("same", self.check_same), ("killed", self.check_killed), ("B", self.check_B),
                ("processes", self.check_processes), ("saved", self.check_saved),
                ("samples", self.check_samples), ("loss", self.check_loss),
                ("effect", self.check_effect), ("begin", self.check_begin)):
            try:
                verdict = check_promise()
            except Failed as e:
                verdict = Verdict(promise, "BROKEN", "the run stops with an error",
                                  [str(e), ERRORS.get(promise, "")])
            self.found[promise] = verdict.outcome
            yield verdict

    @property
    def rounding(self):
        half, nudged = self.runs["half"].result(), self.runs["nudged"].result()
        return Rounding(half.log, nudged.log, self.plan.low_precision)

    def repeats(self):
        """Whether the same command gave the same run, without which others cannot be compared."""
        return self.found["same"] == "holds"

    def hint(self, *runs):
        """Name what changed during a run and is not saved: the likely reason for a difference."""
        changed = {what for run in runs for what in run.report["changed"]}
        if not self.no_committed:
            with contextlib.suppress(Failed):  # fields of Run that the script itself changes
                usual = self.runs["committed_run"].result().report["changed"]
                changed -= {what for what in usual if what.startswith("run.")}
        if not changed:
            return ""
        return f"This changed during training and is not saved: {', '.join(sorted(changed))}."

    def compare_equal(self, promise, run, said, hints):
        """The verdict on a run that must equal the first: bit for bit on a CPU."""
        allowed = None if self.plan.exact else self.rounding
        difference = first_difference(self.log, run.log, allowed)
        if difference:
            return Verdict(promise, "BROKEN", str(difference), [difference.says(*said), *hints])
        if not self.plan.exact:
            half, nudged = self.runs["half"].result(), self.runs["nudged"].result()
            most = max(1e-4, 10 * distance(half.checkpoint, nudged.checkpoint))
            apart = distance(self.base.checkpoint, run.checkpoint)
            if not apart <= most:
                return Verdict(promise, "BROKEN", "the last checkpoints differ",
                               [f"They are {apart:.1g} apart, where rounding explains {most:.1g}.",
                                *hints])
            return Verdict(promise, "holds", "within rounding, as on a GPU equal runs may differ")
        differs = first_tensor_that_differs(self.base.checkpoint, run.checkpoint)
        if differs:
            name, apart = differs
            return Verdict(promise, "BROKEN", "the logs are equal, the last checkpoints differ",
                           [f"{name} is the first tensor that differs, by up to {apart:.2g}.",
                            *hints])
        return Verdict(promise, "holds")

    def check_same(self):
        again = self.runs["again"].result()
        difference = first_difference(self.log, again.log, None if self.plan.exact
                                      else self.rounding)
        self.val_repeats = not (difference and difference.stream == "val")
        used = ", ".join(self.base.report["used"])
        hints = [f"During training numbers were drawn from {used}."] if used else []
        return self.compare_equal("same", again, ("in the first run", "in the second"), hints)

    def check_killed(self):
        if not self.repeats():
            return Verdict("killed", "not checked", NO_REPEAT)
        try:
            run = self.runs["continued"].result()
        except Failed as e:
            if str(e) == "NOT KILLED":
                return Verdict("killed", "not checked",
                               f"run.state.step never became {self.plan.killed}")
            raise
        if run.report["step"] != self.plan.saved:
            return Verdict("killed", "BROKEN", f"it continues at step {run.report['step']}, though "
                           f"step {self.plan.saved} was saved")
        return self.compare_equal(
            "killed", run, ("not killed", f"killed and continued from step {self.plan.saved}"),
            [self.hint(self.base)])

    def check_B(self):
        plan, base, note = self.plan, self.base, ""
        if plan.half_B == plan.B:
            return Verdict("B", "not checked", f"B is {plan.B}, which cannot be halved")
        if not self.repeats():
            return Verdict("B", "not checked", NO_REPEAT)
        half = self.runs["half"].result()
        if plan.dropout:
            base, note = self.runs["no_dropout"].result(), WITHOUT_DROPOUT
        if half.report["draws"]:
            return Verdict("B", "not checked", "forward() draws random numbers in training, which "
                           "depend on B, as those of dropout do")
        difference = first_difference(base.log, half.log, self.rounding)
        if not difference:
            return Verdict("B", "holds", note)
        return Verdict("B", "BROKEN", str(difference), [difference.says(
            f"with B={plan.B}", f"with B={plan.half_B}"), self.hint(base)])

    def check_processes(self):
        plan = self.plan
        if plan.no_processes:
            return Verdict("processes", "not checked", plan.no_processes)
        if not self.repeats():
            return Verdict("processes", "not checked", NO_REPEAT)
        half, two = self.runs["half"].result(), self.runs["two"].result()
        difference = first_difference(half.log, two.log, self.rounding)
        if not difference:
            notes = [WITHOUT_DROPOUT] if plan.dropout else []
            if self.found["B"] != "holds":
                notes.append(f"with the same B, {plan.half_B}")
            return Verdict("processes", "holds", "; ".join(notes))
        return Verdict("processes", "BROKEN", str(difference), [difference.says(
            "with one process", "with two, and the same B"), self.hint(half, two)])

    def check_saved(self):
        steps = self.options.steps
        before = self.log.get((steps, "val"))
        after = self.runs["reloaded"].result().log.get((0, "val"))
        if before is None or after is None:
            return Verdict("saved", "not checked", "log.txt has no val of the last step")
        if not self.val_repeats:
            return Verdict("saved", "not checked", VAL_VARIES)
        difference = first_difference({(0, "val"): before}, {(0, "val"): after},
                                      Rounding({}, {}, self.plan.low_precision))
        if not difference:
            return Verdict("saved", "holds")
        return Verdict("saved", "BROKEN", "the validation loss differs", [difference.says(
            f"after step {steps}", "when its checkpoint is loaded by --init_from"),
            self.hint(self.base)])

    def check_samples(self):
        problem = self.base.report["samples"]
        if not problem:
            return Verdict("samples", "holds")
        return Verdict("samples", "BROKEN", problem[0], problem[1:])

    def check_loss(self):
        reported, own = self.log.get((self.options.steps, "val")), self.base.report["cross_entropy"]
        if reported is None:
            return Verdict("loss", "not checked", "log.txt has no val of the last step")
        if not self.val_repeats:
            return Verdict("loss", "not checked", VAL_VARIES)
        if not isinstance(own, float):
            return Verdict("loss", "BROKEN", "model(idx) gives no logits to compare with", [own])
        gap = float(reported) - own
        tolerance = 1e-3 if self.plan.low_precision else 1e-5
        if abs(gap) <= tolerance * max(1.0, abs(own)):
            return Verdict("loss", "holds")
        return Verdict("loss", "BROKEN", f"val is {reported}, the cross-entropy {own:.6f}",
                       [f"The difference is {gap:+.6f}."])

    def check_effect(self):
        if self.no_committed:
            return Verdict("effect", "not checked", self.no_committed)
        try:
            committed = self.runs["committed_run"].result()
        except Failed as e:
            return Verdict("effect", "not checked", f"{self.options.against} fails: "
                           f"{str(e).splitlines()[-1]}")
        theirs, difference = committed.log, first_difference(self.log, committed.log)
        losses = first_difference({key: self.log[key] for key in self.log if is_loss(key[1])},
                                  {key: theirs[key] for key in theirs if is_loss(key[1])})
        if losses:
            if self.repeats() and not first_difference(self.log, theirs, self.rounding):
                return Verdict("effect", "holds", "but all losses equal those without the edit "
                               "within rounding")
            return Verdict("effect", "holds", f"from step {losses.step} on")
        if difference:
            return Verdict("effect", "holds", f"on {difference.stream} only: all losses are the "
                           "same digit for digit")
        if self.base.report["drawn"] != committed.report["drawn"]:
            return Verdict("effect", "holds", "on samples only: all losses are the same digit for "
                           "digit")
        return Verdict("effect", "BROKEN", "it has no effect on training", [
            f"Compared with {self.options.against} over {self.options.steps} steps. Constants "
            "that check.py sets itself, for example max_steps and warmup_steps, do not show."])

    def check_begin(self):
        if self.no_committed:
            return Verdict("begin", "not checked", self.no_committed)
        try:
            committed = self.runs["setup_committed"].result()
        except Failed as e:
            return Verdict("begin", "not checked", f"{self.options.against} fails: "
                           f"{str(e).splitlines()[-1]}")
        theirs = committed.report["initial"]
        differ = []
        for name, (shape, crc) in self.plan.setup["initial"].items():
            if name in theirs and theirs[name][0] == shape and theirs[name][1] != crc:
                differ.append(name)
        if not differ:
            return Verdict("begin", "holds")
        return Verdict("begin", "BROKEN", f"{len(differ)} of {len(theirs)} parameters differ",
                       ["They are " + ", ".join(differ[:6]) + (", ..." if differ[6:] else ".")])


# ---- in the process of a run
def be_a_run(folder):
    """Be `python train_gpt2.py` with the flags in folder/job.json, and do what else it says."""
    job = json.loads((folder / "job.json").read_text())
    rank = os.environ.get("RANK", "0")
    running = folder / f"running_{rank}.{os.getpid()}"
    running.touch()
    threading.Thread(target=end_with, args=(job["parent"], folder, running), daemon=True).start()
    for number, name in ((1, f"out_{rank}.txt"), (2, f"err_{rank}.txt")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.dont_write_bytecode = True
    sys.path[0] = job["scripts"]
    import train_gpt2 as t
    known = {constant.name for constant in dataclasses.fields(t.Config)}
    # Left out if an edit removed them from Config, or if they are new there
    optional = [*DEFAULTS, "warmup_steps", *job.get("optional", ())]
    flags = {name: value for name, value in job["flags"].items()
             if name in known or name not in optional}
    sys.argv = [str(Path(job["scripts"], "train_gpt2.py")),
                *(f"--{name}={value}" for name, value in flags.items())]
    real_train = t.train

    def train(run):
        try:
            train_and_report(t, real_train, run, job, folder)
        except BaseException:  # check.py sees this file at once; main() handles the error
            (folder / f"failed_{rank}").touch()
            raise
    t.train = train
    t.main()

def end_with(parent, folder, running):
    """End this process when check.py deletes job.json, or when check.py has ended."""
    while (folder / "job.json").exists():
        if os.name != "nt":  # on Windows, signal 0 would end the process that it is sent to
            try:
                os.kill(parent, 0)
            except OSError:
                break
        time.sleep(0.2)
    with contextlib.suppress(OSError):
        running.unlink()
    os._exit(1)

def train_and_report(t, real_train, run, job, folder):
    """Train and write report.json, which holds all that check.py wants to know of the run."""
    import torch
    # Export and curves would import these, which takes seconds
    for name in ("transformers", "matplotlib"):
        sys.modules.setdefault(name, None)
    if job.get("nudge"):
        nudge(run, job["nudge"])
    report = describe(t, run)
    draws = count_draws(run)
    before, generators = unsaved_values(t, run), other_generators()
    if job.get("kill"):
        kill_at(run, job["kill"]["step"], Path(run.cfg.log_dir, job["kill"]["after"]), folder,
                report)
    if not job.get("stop"):
        real_train(run)
    after, used = unsaved_values(t, run), other_generators()
    report["changed"] = [what for what in after if after[what] != before.get(what)]
    report["used"] = [name for name in used if used[name] != generators[name]]
    report["draws"] = draws["count"]
    if job.get("examine"):
        with torch.no_grad(), run.autocast():
            report |= examine(run)
    write_report(folder, report)

def write_report(folder, report):
    if os.environ.get("RANK", "0") == "0":
        (folder / "report.json").write_text(json.dumps(report))

def describe(t, run):
    """Return what check.py wants to know of a run before its first step."""
    import torch
    with run.autocast():
        low = torch.is_autocast_enabled(run.device.type)
        dtype = str(torch.get_autocast_dtype(run.device.type))[6:] if low else "float32"
    names = [constant.name for constant in dataclasses.fields(t.Config)]
    return {
        "constants": {name: getattr(run.cfg, name) for name in names},
        "rows": t.rows_before(run.cfg, 1), "device": run.device.type, "dtype": dtype,
        "gpus": torch.cuda.device_count(), "step": run.state.step,
        "initial": {name: (list(p.shape), crc_of(p))
                    for name, p in run.state.raw_model.named_parameters()}}

def crc_of(tensor):
    import torch
    flat = tensor.detach().cpu().contiguous().flatten()
    return zlib.crc32(flat.view(torch.uint8).numpy()) if flat.numel() else 0

def nudge(run, size):
    """Change the initial weights by about `size` of their values: a few units of rounding."""
    import torch
    with torch.no_grad():
        for i, p in enumerate(run.state.raw_model.parameters()):
            generator = torch.Generator().manual_seed(i)
            noise = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
            p.mul_(1 + size * noise)

def kill_at(run, step, checkpoint, folder, report):
    """Have this process killed when the state comes to that step and the checkpoint exists."""
    class Watched(type(run.state)):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "step" and value == step:
                end = time.monotonic() + 300
                while not checkpoint.exists() and time.monotonic() < end:
                    time.sleep(0.01)
                write_report(folder, report)
                (folder / "killed").touch()
                os.kill(os.getpid(), KILL)
    Watched.__name__ = type(run.state).__name__
    run.state.__class__ = Watched

def count_draws(run):
    """Count forward passes in training that draw from torch's generator. A compiled model has no
    hooks, and counts 0."""
    import torch
    counted, before = {"count": 0}, []
    if run.cfg.compile == "True":
        return counted
    # Hooks must not refer to run: main() deletes it so that DDP ends before the process group
    device = run.device

    def state():
        return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    def begin(model, args):
        if model.training:
            before[:] = [state()]

    def end(model, args, outputs):
        if model.training and not torch.equal(before[0], state()):
            counted["count"] += 1
    run.state.raw_model.register_forward_pre_hook(begin)
    run.state.raw_model.register_forward_hook(end)
    return counted


# What an edit keeps outside of State, to name it when a promise is broken
KEPT = (bool, int, float, str, bytes, list, dict, set, tuple, deque, np.ndarray, np.generic,
        random.Random, np.random.RandomState, np.random.Generator)

def fingerprint(value):
    """Return a text that changes when a number, tensor, container or generator changes, or None."""
    import torch
    try:
        if isinstance(value, torch.Generator):
            return crc_of(value.get_state())
        if torch.is_tensor(value):
            return crc_of(value)
        if isinstance(value, KEPT) and not isinstance(value, type):
            parts = value.values() if isinstance(value, dict) else value
            if isinstance(value, (list, dict, set, tuple, deque)) and any(
                    isinstance(part, torch.nn.Module) for part in parts):
                return None
            return zlib.crc32(pickle.dumps(value))
    except (RuntimeError, TypeError, ValueError, AttributeError, pickle.PickleError):
        return None  # a value that cannot be pickled is not named
    return None

def unsaved_values(t, run):
    """Return {name: fingerprint} of values that a checkpoint does not hold."""
    import torch
    values, usual = {}, vars(torch.nn.Module())
    for module in run.state.raw_model.modules():
        for name, value in vars(module).items():
            if name not in usual:
                label = f"self.{name} in {type(module).__name__}"
                values.setdefault(label, []).append(fingerprint(value))
    saved = run.state.raw_model.state_dict()
    for name, buffer in run.state.raw_model.named_buffers():
        if name not in saved:
            values[f"the buffer {name}, which is not persistent"] = crc_of(buffer)
    for name, value in vars(run).items():
        if name not in ("validated_step", "step_seconds", "told_slow"):  # of the script itself
            values[f"run.{name}"] = fingerprint(value)
    for optimizer in run.state.optimizers:
        for name, value in vars(optimizer).items():
            if not name.startswith("_") and name not in ("state", "param_groups", "defaults"):
                values[f"self.{name} in {type(optimizer).__name__}"] = fingerprint(value)
    for name, value in vars(t).items():
        if not name.startswith("__"):
            values[f"the global {name}"] = fingerprint(value)
    return values

def other_generators():
    """Return {name: fingerprint} of the generators that are not torch's."""
    return {"the module random": zlib.crc32(pickle.dumps(random.getstate())),
            "numpy.random": zlib.crc32(pickle.dumps(np.random.get_state()))}

# ---- in the process of the first run, after its last step
def examine(run):
    """Return how samples and validation loss of the trained model agree with model(idx)."""
    import torch
    model, T = run.state.eval_model, run.cfg.T
    low = run.device.type != "cpu" or torch.is_autocast_enabled("cpu")
    x, _ = run.val_loader.batch(0, 2, run.device)
    n, drawn = max(1, min(12, T // 2)), None
    short = x[:, :max(1, T // 4)]
    # The continuation of the second prompt is longer than the context
    prompts = short, x[:, :max(1, T - n // 2)]
    try:
        problem = sample_problem(model, prompts, n, T, low)
    except Exception as e:  # an edited generate() may raise anything
        problem = ["generate() stops with an error", f"{type(e).__name__}: {e}"]
    with contextlib.suppress(Exception):
        torch.manual_seed(0)
        idx, probabilities = draw(model, short, n, temperature=0.8, top_k=20)
        drawn = idx.tolist(), [crc_of(probs) for probs in probabilities]
    try:
        loss = cross_entropy(run, model)
    except Exception as e:
        loss = f"{type(e).__name__}: {e}"
    return {"samples": problem, "drawn": drawn, "cross_entropy": loss}

def sample_problem(model, prompts, n, T, low):
    """Return [what is wrong, where] if generate() does not follow model(idx), else None."""
    for prompt in prompts:
        problem = greedy_problem(model, prompt, n, T, 5e-2 if low else 1e-4)
        problem = problem or drawn_problem(model, prompt, n, T, 5e-2 if low else 1e-3)
        if problem:
            return problem
    return None

def last_logits(model, idx, T):
    """Return logits (B, n_vocab) at the last position of idx (B, length), or of its last T."""
    block = getattr(getattr(model, "config", None), "block_size", T)
    return model(idx[:, -block:])[0][:, -1].float()

def greedy_problem(model, prompt, n, T, tolerance):
    """Return where a greedy continuation leaves the arg max of model(idx), or None."""
    idx = model.generate(prompt, n, temperature=0)
    for i in range(prompt.size(1), idx.size(1)):
        logits = last_logits(model, idx[:, :i], T)
        taken, best = logits.gather(1, idx[:, i:i + 1])[:, 0], logits.max(dim=-1)
        wrong = (best.values - taken > tolerance * best.values.abs().clamp(min=1)).nonzero()
        if len(wrong):
            row = wrong[0].item()
            return ["generate(temperature=0) leaves the arg max of model(idx)",
                    f"After {i} tokens generate() appends token {idx[row, i].item()}, the arg max "
                    f"is {best.indices[row].item()}."]
    return None

def draw(model, prompt, n, **how):
    """Return what generate() returns, and the list of probabilities that it drew tokens from."""
    import torch
    real, seen = torch.multinomial, []

    def multinomial(probs, *args, **more):
        seen.append(probs.detach().float())
        return real(probs, *args, **more)
    torch.multinomial = multinomial
    try:
        return model.generate(prompt, n, **how), seen
    finally:
        torch.multinomial = real

def drawn_problem(model, prompt, n, T, tolerance):
    """Return where generate() draws from other probabilities than the softmax of model(idx).

    The ratios of probabilities must agree, which allows generate() to leave tokens out. If it
    does not call torch.multinomial once per token, only greedy continuations are compared.
    """
    idx, seen = draw(model, prompt, n, temperature=1.0)
    if len(seen) != n:
        return None
    for i, probs in enumerate(seen, prompt.size(1)):
        logits = last_logits(model, idx[:, :i], T)
        if probs.shape != logits.shape:
            return None
        ratio = probs.log() - logits.log_softmax(-1)
        kept = (probs > 1e-5) & (logits.softmax(-1) > 1e-5)
        spread = (ratio.masked_fill(~kept, -math.inf).amax(-1)
                  - ratio.masked_fill(~kept, math.inf).amin(-1)).max().item()
        if spread > tolerance:
            return ["generate() draws from other probabilities than model(idx) gives",
                    f"After {i} tokens, at temperature 1, some tokens are up to "
                    f"{math.exp(min(spread, 50)):.4g} times as likely, compared with others."]
    return None

def cross_entropy(run, model):
    """Return the mean cross-entropy of the logits over the rows that validation reads."""
    from torch.nn import functional as F
    cfg, loader = run.cfg, run.val_loader
    rows = min(max(1, cfg.val_tokens // cfg.T), loader.rows_per_epoch)
    total, counted = 0.0, 0
    for row in range(0, rows, cfg.B):
        x, y = loader.batch(row, min(cfg.B, rows - row), run.device)
        logits = model(x)[0].flatten(0, 1).float()
        total += F.cross_entropy(logits, y.flatten(), reduction="sum").item()
        counted += (y >= 0).sum().item()
    return total / max(1, counted)


# ---- the command
def check(options):
    """Print the verdicts and return the number of broken promises. Raises Failed."""
    code = code_of_scripts()
    with Laboratory() as lab:
        checking, verdicts = Check(lab, options), []
        try:
            checking.set_up()
            print(checking.plan.first_line(), flush=True)
            checking.start()
            for verdict in checking.verdicts():
                verdicts.append(verdict)
                show_progress("")
                print(verdict, flush=True)
        except Failed as e:
            raise Failed(f"The script cannot be checked, because it stops.\n{e}") from None
    if code_of_scripts() != code:
        raise Failed("A script was edited during the check, so the verdicts mean nothing. Run it "
                     "again.")
    outcomes = [verdict.outcome for verdict in verdicts]
    broken, unchecked = outcomes.count("BROKEN"), outcomes.count("not checked")
    aside = f" ({unchecked} of {len(outcomes)} not checked)" if unchecked else ""
    print(f"{broken} of {len(outcomes)} promises broken{aside}." if broken
          else f"All promises hold{aside}.")
    return broken

def show_progress(text):
    """Write a line to stderr; on a terminal, the next one takes its place."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)

def end_by_signal(number, frame):
    raise SystemExit(128 + number)

def main():
    words = sys.argv[1:]
    if words and words[0].startswith("--be="):
        be_a_run(Path(words[0].removeprefix("--be=")))
        return
    if "--help" in words or "-h" in words:
        print(__doc__)
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_by_signal)
    try:
        sys.exit(1 if check(parse(words)) else 0)
    except Failed as error:
        print(f"check.py: {error}", file=sys.stderr)
        sys.exit(1)

if __name__ == "__main__":
    main()
