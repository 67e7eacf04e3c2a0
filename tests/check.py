"""Check that an edited train_gpt2.py still keeps its promises. This takes about a minute.

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
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import zlib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import check_run
from check_run import (
    KILLED, LOW_PRECISION, SCRIPTS, SHORTEST_ROW, crc_of, places_in_scripts, tensors_of)

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
        "stopping, remove eval_every from NOT_COMPARED in train_gpt2.py, so that a run is "
        "resumed with the same eval_every."),
    "killed": ("a killed run continues as if it had not been killed",
        "Something that later steps depend on is not restored. Usually it is neither in State nor "
        "a parameter or buffer. Make it an attribute of State or a buffer (register_buffer), so "
        "that a checkpoint holds it. Gradients that are kept for a later step (p.grad) are not "
        "saved either. If it is in State, perhaps it shares its memory with a weight, which it no "
        "longer does after a restart. If it is in the state of an optimizer, perhaps its dtype is "
        "not that of the parameter, to which PyTorch converts it when it is loaded. Another reason "
        "is a random number that is drawn before torch.manual_seed() in train_step(), for example "
        "in read_step()."),
    "B": ("B changes speed only",
        "The usual reason is a term or a statistic over the rows of a micro-batch (also in "
        "validation, where the last one may be smaller), a random number that is drawn or seeded "
        "per micro-batch, a value that counts forward passes instead of steps, or a use of cfg.B. "
        "If the difference is small, rounding may also have been amplified: it may change a "
        "selection of tokens or experts (top-k), or a decomposition of a matrix (eigh, svd, qr)."),
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
        "different model. Keep this value in a buffer, for example register_buffer(\"window\", "
        "torch.tensor(8)), without persistent=False, and change it with fill_(). The weights were "
        "loaded with a different --seed, so a value that is drawn from the seed is also different. "
        "Another reason is an edit of train() that changes weights between the save and the "
        "validation of a step, or that validates other rows at each step."),
    "samples": ("samples follow the model",
        "generate() does not choose the most likely token of model(idx). If it computes logits in "
        "another way, let it call self(idx). If the edit is meant to change sampling (for example "
        "by a repetition penalty), this is as it should be."),
    "later": ("a token's logits do not depend on later tokens",
        "If the logits change with later tokens, the model sees tokens that it should predict, and "
        "its loss is too low. Usual reasons are an attention mask, roll(), a convolution that is "
        "padded on both sides, or a norm, a mean or a top-k over all positions. (topk() returns "
        "positions in the order of their scores. Sort them before causal attention.) If the loss "
        "ignores the targets of such tokens, as in a prefix language model, this is as it should "
        "be. If the logits depend on the number of tokens, perhaps a size, such as that of a "
        "window, is derived from the length of the row."),
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
        "The validation loss is not comparable with the losses of other runs. Perhaps validation "
        "leaves out targets, or the loss has an additional term or factor (put a term that only "
        "training should minimize under `if self.training`), or forward() uses `targets` for the "
        "logits, too."),
    "effect": ("the edit has an effect",
        "Every loss is the same digit for digit as without the edit. Perhaps the edited code is "
        "never reached, something overwrites its result (for example init_weights(), which draws "
        "initial weights), or it acts only in later steps, in a condition that did not occur, or "
        "with a flag that you can add to this command. If the edit is meant to change only speed, "
        "memory, samples or validation, this is as it should be. (But with a different val_tokens, "
        "val is not comparable with earlier runs.)"),
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
LAST_CHECKPOINT = object()  # init_from of a run: the last checkpoint of the run before it
LOSSES = ("train", "val", "hella")
UNSAVED = "changed during training and is not saved"
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

# ---- Runs. Each one is a process of its own, or two processes with the environment that torchrun
# would give them. Importing torch takes several seconds. On Linux, processes are therefore forked
# from one that has already imported it. (It opens a socket in the temporary folder, whose path may
# have at most 107 characters)
CAN_FORK = sys.platform == "linux" and len(tempfile.gettempdir()) < 70
FRESH = multiprocessing.get_context("spawn")  # each process imports torch itself
FORKED = multiprocessing.get_context("forkserver" if CAN_FORK else "spawn")
PRELOAD = ["torch._dynamo", "tiktoken"]  # torch.optim imports torch._dynamo

@dataclass
class Finished:
    """What a run left behind."""
    log: dict          # {(step, metric): value as text}
    checkpoint: Path   # the last one
    report: dict       # see train_and_report()
    seconds: float
    warnings: list     # that Python printed

class Laboratory:
    """A temporary folder and the runs in it, at most `workers` at a time."""
    def __init__(self, workers):
        self.folder = Path(tempfile.mkdtemp(prefix="check_gpt2_"))
        self.pool = ThreadPoolExecutor(workers)
        self.runs = {}      # {name: Future of a Finished}
        self.n_done = 0
        self.closed = False
        self.lock = threading.Lock()  # Process.start() also looks at processes of other threads

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

    def run(self, name, flags, scripts=SCRIPTS, processes=1, after=None, log_of=None,
            context=FORKED, **job):
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
        begin = time.monotonic()
        with environments(processes) as envs:
            ranks = [context.Process(target=check_run.be_a_run, args=(job, env)) for env in envs]
            status = self.status_of(ranks, log_dir / "log.txt", patience)
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
        if name not in ("base", "again", "killed", "killed_again", "continued"):
            for path in checkpoints:
                path.unlink()  # it is not needed, and may be large
        return Finished(log=read_log(log_dir / "log.txt"), seconds=seconds,
                        checkpoint=max(checkpoints, default=None), warnings=warnings_of(folder),
                        report=json.loads(report.read_text()) if report.exists() else {})

    def status_of(self, ranks, log, patience):
        """Run processes. Return 0, or the exit status of a process that fails.

        Stop all of them if one fails. Stop them and raise Failed if the log has not grown for
        `patience` seconds, or if the check ends.
        """
        begin = time.time()
        try:
            for process in ranks:
                with self.lock:
                    process.start()
            while True:
                with self.lock:
                    statuses = [process.exitcode for process in ranks]
                if any(statuses):
                    return next(filter(None, statuses))
                if None not in statuses:
                    return 0
                if self.closed:
                    raise Failed("The check was stopped.")
                last = log.stat().st_mtime if log.exists() else begin
                if time.time() > last + patience:
                    raise Failed(f"No step was taken for {patience:.0f} seconds. Probably the "
                                 "processes wait for each other, because only one of them uses a "
                                 "parameter or calls an operation such as all_reduce.")
                time.sleep(0.05)
        finally:
            for process in ranks:
                if process.pid:  # it has been started
                    with self.lock:
                        process.kill()
                        process.join()

@contextmanager
def environments(n):
    """Yield a list with the environment variables for n processes, like those of torchrun."""
    if n == 1:
        yield [{}]
        return
    # Like torchrun, keep the store in which the processes find each other. It chooses a free port
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                          use_libuv=os.name != "nt")  # torch for Windows lacks libuv
    yield [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
           for rank in range(n)]

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

def warnings_of(folder):
    """Return the Python warnings that a run has printed, without repetitions."""
    text = "\n".join(path.read_text(errors="replace") for path in folder.glob("err_*.txt"))
    return list(dict.fromkeys(re.findall(r"^\S+\.py:\d+: (\w*Warning: .+)", text, re.M)))

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

def tolerances(log, nudged, floor, selects=False):
    """Return {step: how far apart rounding may drive the losses of two runs}.

    Small differences grow from step to step, at a rate that depends on the model, so this rate is
    measured. nudged: the log of the same run with initial weights that were changed by a few units
    of rounding. floor: the smallest tolerance, relative to the loss. selects: whether the model
    selects experts or tokens. Rounding changes few selections, but then the loss jumps.
    """
    allowed, largest = {}, 0.0
    for key, value in sorted(losses_of(log).items()):
        step, loss = key[0], float(value)
        gap = abs(loss - float(nudged.get(key, value)))
        if math.isfinite(gap):
            largest = max(largest, gap)
        smallest = floor * max(5.0, abs(loss)) * (50 if selects and step > 0 else 1)
        allowed[step] = max(smallest, 10 * largest, allowed.get(step, 0.0))
    return allowed

# ---- Comparing checkpoints
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
        # A run is killed twice. An edit may do something only in the last steps, or so rarely that
        # only the first kill leaves enough steps to see what the restart has forgotten
        self.saved = indivisible_step_before(n - 2)
        self.first_saved = indivisible_step_before(n // 2)
        self.common = DEFAULTS | {
            "max_steps": options.steps, "eval_every": each, "save_every": self.saved,
            "warmup_steps": min(constants.get("warmup_steps", 0), each),
            # The last batch of a validation is smaller than B
            "val_tokens": min(constants["val_tokens"], (3 * self.B + max(1, self.B // 4)) * self.T),
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
        examine = LOW_PRECISION if self.low_precision else 1e-4
        lab.start("base", self.common, examine=examine)
        if not self.no_processes:
            lab.start("two", self.half, after="half", processes=2)
        saved = self.first_saved
        lab.start("killed", self.common | {"save_every": saved}, kill_at=saved + 1,
                  kill_after=saved)
        lab.start("killed_again", self.common, after="killed", log_of="killed",
                  kill_at=self.saved + 1, kill_after=self.saved)
        # With init_from, the script would choose a different preset, so give every constant. The
        # seed is a different one, because validation must not depend on it
        lab.start("reloaded", self.constants | self.common | {
            "max_steps": 0, "init_from": LAST_CHECKPOINT, "seed": self.constants["seed"] ^ 1},
            after="base")
        # Forked processes are more alike than two commands: hash() of a text is the same in them
        lab.start("again", self.common, context=FRESH)
        lab.start("evaluated", self.common | {
            "eval_every": self.options.steps, "sample_every": self.common["eval_every"],
            "sample_tokens": 8})
        lab.start("continued", self.common, after="killed_again", log_of="killed")
        lab.start("nudged", self.half, nudge=4e-3 if self.low_precision else 1e-6)
        if self.dropout:
            lab.start("no_dropout", self.no_dropout)
        if committed:
            lab.start("committed", self.common, scripts=committed, examine=examine)

def indivisible_step_before(n):
    """Return the last step before n that no small number divides, or 2.

    An edit may do something in every second or fifth step.
    """
    return next((step for step in range(n - 1, 2, -1)
                 if all(step % divisor for divisor in range(2, min(step, 8)))), 2)

# ---- The verdicts
@dataclass
class Verdict:
    outcome: str          # holds, BROKEN or not checked
    detail: str = ""      # what differs, why the promise was not checked, or a remark
    evidence: tuple = ()  # more lines about a broken promise
    is_explained: bool = False  # whether the evidence contains the cause

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
        texts = [*verdict.evidence, "" if verdict.is_explained else cause]
        for text in "\n".join(filter(None, texts)).splitlines():
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
        self.named_unsaved = False  # whether a verdict has named what is not saved

    def verdict(self, promise):
        """Return the Verdict on a promise. They must be asked for in the order of PROMISES."""
        try:
            if promise in NEED_EQUAL_RUNS and not self.repeats:
                raise Unchecked("the same command already gives a different run")
            verdict = getattr(self, f"check_{promise}")()
        except Unchecked as reason:
            verdict = Verdict("not checked", str(reason))
        except Failed as error:
            # The usual causes of a broken promise do not explain an error, except that a process
            # may wait in vain for others
            verdict = Verdict("BROKEN", "the run stops with an error", (str(error),),
                              is_explained=promise != "processes")
        if verdict.outcome == "BROKEN" and any(UNSAVED in text for text in verdict.evidence):
            self.named_unsaved = True
        if promise == "same":
            self.repeats = verdict.outcome == "holds"
        return verdict

    def allowed(self):
        """Return the differences that rounding explains, as {step: difference}."""
        return tolerances(self.result("half").log, self.result("nudged").log, self.plan.floor,
                          selects=bool(self.base.report["selections"]))

    def hint(self, *runs):
        """Name what changed during training and is not saved, which is the likely reason."""
        changed = ", ".join(sorted({what for run in runs for what in run.report["changed"]}))
        text = f"This {UNSAVED}: {changed}.\n" if changed else ""
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
            raise Unchecked("eval_every is not in NOT_COMPARED, so it may affect training")
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
        verdict = self.compare_all(run, "without a kill",
                                   f"with kills after steps {self.plan.first_saved} and {saved}")
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
            raise Unchecked("B is not in NOT_COMPARED, so it may affect training")
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
            raise Unchecked("in training mode, transformer.wte is not called with token ids")
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
        if both["only_val_rows"]:
            return broken("training rows are part of the validation data",
                          f"{both['only_val_rows']} of {both['rows']} training rows are, and they "
                          "are not part of the training data.")
        if not both["rows"]:
            raise Unchecked(f"no forward pass in training mode has rows of {SHORTEST_ROW} or more "
                            "tokens, and shorter rows may be equal by chance")
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
            text = ("The validation data has a different number of rows, or DataLoaderLite.batch() "
                    "returns different values for its rows. To change training only, edit "
                    "read_step(), or the training loader in open_data().")
            return Verdict("BROKEN", f"validation reads other inputs or targets than "
                           f"{self.plan.options.against}, so val is not comparable", (text,),
                           is_explained=True)
        verdict = self.compare_val(cross_entropy, "the cross-entropy", self.noise(self.base))
        term = self.base.report.get("training_term")
        if verdict == holds() and term and abs(term) > 1e-4:
            return holds(f"at the end, the loss in training mode differs from it by {term:+.4f}")
        return verdict

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
        other = self.steady(committed.log)
        differ = sorted({key[1] for key in log.keys() | other.keys()
                         if log.get(key) != other.get(key)})
        if differ:
            return holds(f"on {', '.join(differ)} only; the losses are the same digit for digit")
        one, two = self.base.report, committed.report
        if one["drawn"] != two["drawn"] or bool(one["samples"]) != bool(two["samples"]):
            return holds("on samples only; the losses are the same digit for digit")
        new = ", ".join(f"--{name}=..." for name in sorted(
            self.base.report["constants"].keys() - committed.report["constants"].keys()))
        setting = f"The edit adds a setting. If it switches the edit on, give it: {new}"
        added = [f"State.{name}" for name in one["attributes"] if name not in two["attributes"]]
        unused = (f"The edit adds {', '.join(added)}, but training does not depend on it in these "
                  f"steps. If it acts only under a condition, try --steps="
                  f"{3 * self.plan.options.steps}.") if added else ""
        return broken("it has no effect on training", setting if new else "", unused, (
            f"Compared with {self.plan.options.against} over {self.plan.options.steps} steps. If "
            f"the edit acts in later steps only, give --steps={3 * self.plan.options.steps}. "
            "Changes of constants that check.py sets itself, such as max_steps, do not show."))

    def own_notes(self):
        """Return notes on values that are not saved, and on metrics that an edit has added."""
        notes, changed = [], ", ".join(self.base.report["changed"])
        if changed and not self.named_unsaved:
            notes.append(f"this {UNSAVED}: {changed}. If later steps depend on it, make it an "
                         "attribute of State. (This is not necessary for a cache whose values are "
                         "computed again.)")
        notes += self.notes_about_progress() + self.notes_about_first_update()
        notes += self.notes_about_processes() + self.notes_about_warnings()
        log = self.base.log
        return (notes + self.notes_about_metrics() + notes_about_constants(log)
                + notes_about_equal_metrics(log))

    def notes_about_progress(self):
        """Return a note if the loss falls much less than without the edit."""
        try:
            committed, trained = self.committed(), self.base.report["trained"]
            if trained == committed.report["trained"]:  # only the evaluated model is different
                return []
            log = committed.log
            first, last, without = float(log[0, "val"]), last_val(self.base.log), last_val(log)
        except (Unchecked, KeyError, ValueError):  # an edit may not validate at these steps
            return []
        if without > first or first - last > 0.7 * (first - without):
            return []
        return [f"after {self.plan.options.steps} steps, val is {last:.2f}, and {without:.2f} "
                f"without the edit (before the first step, {first:.2f}). If the edit is not meant "
                "to slow down training, check signs and factors."]

    def notes_about_first_update(self):
        """Return a note if an optimizer's first update is larger or smaller than without the edit.

        The updates of AdamW and Muon do not depend on the size of the gradient.
        """
        try:
            report, before = self.base.report, self.committed().report
        except Unchecked:
            return []
        one, two = report["first_update"], before["first_update"]
        ratios = {name: one[name] / two[name] for name in one if two.get(name)
                  and report["initial"][name][0] == before["initial"][name][0]}
        # A gradient with a low rank makes Muon's update smaller. This happens in the first step if
        # the inputs of a layer depend only on the current token. But it concerns few matrices
        smaller = {name for name in report["muon"] if ratios.get(name, 1) < 0.6}
        to_skip = smaller if len(smaller) <= len(report["muon"]) / 2 else set()
        by_ratio = defaultdict(list)
        for name, ratio in ratios.items():
            if not 0.6 < ratio < 1.67 and name not in to_skip:
                by_ratio[f"{ratio:.2g}"].append(name)
        # (The first step of an optimizer may only prepare averages)
        parts = [f"{ratio} times as large{'' if float(ratio) else ' (no update at all)'}: "
                 f"{some_of(names)}" for ratio, names in by_ratio.items()]
        if not parts:
            return []
        return ["the first updates of some parameters, divided by the learning rate, have a "
                f"different size than without the edit. {'; '.join(parts[:4])}. The updates of "
                "AdamW and Muon do not depend on the size of the gradient. So look for the reason "
                "in the learning rates, in the optimizer, in the way the parameter is used, in "
                "gradients that are 0 for most elements, or in rounding if the weights have 16 "
                "bits."]

    def notes_about_warnings(self):
        """Return the warnings that only the edited version prints."""
        try:
            before = self.committed().warnings
        except Unchecked:  # without a comparison, a warning may come from the installation
            return []
        return [f"Python prints a warning: {warning[:300]}" for warning in self.base.warnings
                if warning not in before]

    def notes_about_processes(self):
        """Return a note if processes have different values in State."""
        try:
            names = [] if self.plan.no_processes else self.result("two").report["state_differs"]
        except Failed:  # a verdict has said so
            names = []
        return [f"State.{name} is not the same in both processes, and a checkpoint holds only that "
                "of rank 0. If training depends on it, compute it from values of all processes."
                for name in names]

    def noise_of_metrics(self):
        """Return {metric: how much a tiny change of the initial weights changes it}."""
        try:
            log, nudged = self.result("half").log, self.result("nudged").log
        except Failed:
            return {}
        noise = defaultdict(float)
        for key in log.keys() & nudged.keys():
            noise[key[1]] = max(noise[key[1]], abs(float(log[key]) - float(nudged[key])))
        return noise

    def notes_about_metrics(self):
        """Return notes on metrics that an edit has added and that depend on B or on processes."""
        notes, plan, noise = [], self.plan, self.noise_of_metrics()
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
                allowed = max(1e-4 * max(abs(a), abs(b)), 10 * noise.get(metric, math.inf))
                if own and abs(a - b) > allowed and self.repeats:
                    notes.append(f"{metric} is {a:g} {in_one} and {b:g} {in_two}, at step {step}. "
                                 "If it should describe the whole step, take its mean over all "
                                 "micro-batches and processes, and apply functions such as exp() "
                                 "to the mean. If it reads batches by itself, check their row "
                                 "numbers.")
                    break
        return notes if not plan.dropout else []

    def check_begin(self):
        mine, theirs = self.base.report["initial"], self.committed().report["initial"]
        differ, were_set = [], defaultdict(list)  # {how: names}
        for name, (shape, crc, values, drawn) in mine.items():
            if name in theirs and theirs[name][0] == shape and theirs[name][1] != crc:
                how = in_words_how_set(theirs[name][2], values)
                # With init_from, the weights are loaded after init_weights()
                from_scratch = self.plan.constants.get("init_from", "scratch") == "scratch"
                if not how and from_scratch and drawn is not None and drawn == theirs[name][3]:
                    how = "changed after init_weights()"
                (were_set[how] if how else differ).append(name)
        if not differ:
            new = len(mine.keys() - theirs.keys())
            remarks = [f"{new} of {len(mine)} have new names and are not compared"] if new else []
            remarks += [f"{how}: {some_of(names)}" for how, names in were_set.items()]
            return holds("; ".join(remarks))
        return broken(f"{len(differ)} of {len(mine)} parameters differ",
                      "They are " + ", ".join(differ[:6]) + (", ..." if differ[6:] else "."))

def some_of(names):
    """Return the first of some names, and how many there are besides it."""
    return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")

def in_words_how_set(before, now):
    """Return how an edit has scaled a parameter, or to which number it has set it, or "".

    before, now: some_values() of its initial values without and with the edit.
    """
    if len(now) == 1 and math.isfinite(now[0]):
        return f"{now[0] + 0.0:g} everywhere"  # 0.0 turns -0 into 0
    pairs = list(zip(before, now))
    old, new = max(pairs, key=lambda pair: abs(pair[0]))
    factor = new / old if old else 1.0
    # For a single value, there is always such a factor
    scaled = len(pairs) > 1 and all(math.isclose(b, factor * a, rel_tol=1e-3) for a, b in pairs)
    if scaled and not math.isclose(factor, 1.0, rel_tol=1e-3):
        return f"{factor:.3g} times as large"
    return ""

def notes_about_constants(log):
    """Return notes on metrics in a log that have the same value in all steps."""
    values = defaultdict(list)
    for (_, metric), value in log.items():
        values[metric].append(value)
    return [f"{metric} is {of_metric[0]} in all steps." for metric, of_metric in values.items()
            if len(of_metric) > 1 and len(set(of_metric)) == 1]

def notes_about_equal_metrics(log):
    """Return notes on two metrics in a log that are equal in all steps that have both."""
    values = defaultdict(dict)
    for (step, metric), value in log.items():
        values[metric][step] = value
    notes = []
    for one, other in itertools.combinations(values, 2):
        steps = values[one].keys() & values[other].keys()
        changes = len({values[one][step] for step in steps}) > 1
        if changes and all(values[one][step] == values[other][step] for step in steps):
            notes.append(f"{one} and {other} are the same digit for digit in {len(steps)} steps. "
                         "Perhaps both are computed from the same data, or one is a value that "
                         "was kept from the other.")
    return notes

# ---- The command
def check(options):
    """Print the verdicts. Return the number of broken promises. Raise Failed."""
    code = code_of_scripts()
    with closing(Laboratory(workers=1)) as lab:  # to learn the constants, without a step
        lab.start("setup", DEFAULTS | options.flags, stop=True)
        setup = lab.result("setup").report
    plan = Plan(options, setup["constants"], setup["device"])
    print(f"Checking {options.steps} steps of {plan.batch:,} tokens, {plan.device}, "
          f"{plan.constants['dtype']}, n_layer={plan.constants['n_layer']}.\n"
          f"If the edit takes effect only later, check more steps: --steps={3 * options.steps}",
          flush=True)
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
    notes = list(dict.fromkeys(notes))
    for note in notes:
        print("\n".join(textwrap.wrap(f"Note: {note}", 100, subsequent_indent="    ")))
    if code_of_scripts() != code:
        raise Failed("A script was edited during the check. Run the check again.")
    n_broken, unchecked = outcomes.count("BROKEN"), outcomes.count("not checked")
    summary = f"{n_broken} of {len(outcomes)} promises broken" if n_broken else "All promises hold"
    summary += f" ({unchecked} of {len(outcomes)} not checked)" if unchecked else ""
    if notes:
        what = "the note above shows" if len(notes) == 1 else f"the {len(notes)} notes above show"
        summary += f". Before you trust the results, read what {what}"
    print(f"{summary}.")
    return n_broken

def code_of_scripts():
    """Return {name: checksum} of the scripts and of the modules beside them."""
    return {path.name: zlib.crc32(path.read_bytes()) for path in SCRIPTS.glob("*.py")}

def end_by_signal(number, frame):
    signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C does not interrupt the cleaning up
    raise SystemExit(128 + number)

def main():
    options = parse(sys.argv[1:])
    # The processes of the runs inherit these
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    # Looking for GPUs usually initializes CUDA, and then no forked process could use it
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    FORKED.set_forkserver_preload(PRELOAD)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_by_signal)
    try:
        sys.exit(1 if check(options) else 0)
    except Failed as error:
        sys.exit(f"check.py: the script cannot be checked.\n{error}")


if __name__ == "__main__":
    main()
