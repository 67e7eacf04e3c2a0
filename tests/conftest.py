"""Helpers and fixtures that all tests share: paths, data, small models, and tiny training runs.

    pytest tests                  # on the CPU
    pytest tests --device=cuda    # on the GPUs of this machine

Importing torch and transformers takes seconds. Most runs of train_gpt2.py are therefore forked from
one process that has already imported them. Other runs start the script as a user does.
"""
import contextlib
import importlib.util
import itertools
import math
import multiprocessing
import operator
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import connection, forkserver
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it when it is imported
SHARED = Path(os.environ.get("GPT2_SHARED", ROOT.parent / "shared"))
sys.path.insert(0, str(ROOT))
import train_gpt2 as t  # noqa: E402

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}  # the environment of all programs that tests start
# Background jobs of a shell script ignore SIGINT, and those of nohup SIGHUP. Runs would inherit it
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
# The constants of the runs that tests start. eval_every is also the interval between checkpoints
TINY = dict(
    encoding="bytes", n_layer=1, n_head=2, n_embd=16, T=16, B=4, total_batch_size=128,
    optimizer="adamw", muon_lr_ratio=1.0, max_steps=30, max_lr=1e-2, warmup_steps=5,
    print_every=1, eval_every=5, val_tokens=1024, hellaswag_every=0, sample_every=0,
    keep_every=0, dtype="float32", device="cpu")
STEPS = TINY["max_steps"]

# ---- The device
def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"),
                     help="the device that the tests train on (default: cpu)")

def pytest_configure(config):
    """Prepare the device, and start the process that runs are forked from."""
    if config.getoption("--device") == "cuda":
        # The process that runs are forked from imports packages that look for GPUs. By default this
        # initializes CUDA, and then no forked process can use it. With NVML, CUDA is not needed.
        # TF32 rounds factors to 10 bits, so losses of different kernels would differ by about 1e-3
        variables = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "NVIDIA_TF32_OVERRIDE": "0"}
        os.environ.update(variables)
        ENV.update(variables)
        # Compilation with Inductor would take up to a minute in each of a hundred runs
        TINY.update(device="cuda", compile="False")
        if not torch.cuda.is_available():
            raise pytest.UsageError(f"--device=cuda: torch {torch.__version__} sees no GPU.")
    FORKS.set_forkserver_preload(["conftest", "filelock", "pandas", "torch._dynamo",
                                  "transformers.models.gpt2.modeling_gpt2"])
    start_forkserver()  # it imports these packages while pytest collects the tests

def device_type():
    """Return "cpu" or "cuda", the type of device for tensors that a test makes itself."""
    return TINY["device"]

def need_gpus(number):
    """Skip the test if the tests train on GPUs, and there are fewer than this number."""
    if device_type() == "cuda" and torch.cuda.device_count() < number:
        pytest.skip(f"needs {number} GPUs, and there are {torch.cuda.device_count()}")

@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Use one thread in this process, too. Several threads would slow such small models down."""
    torch.set_num_threads(1)

# ---- Files
@pytest.fixture(autouse=True)
def empty_folder(tmp_path_factory, monkeypatch):
    """Run each test in an empty folder, so that the runs in a user's clone do not affect it."""
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))

def write_text(folder, size=50_000):
    """Write text.txt, which tiny runs train on. Return its path."""
    path = Path(folder, "text.txt")
    path.write_bytes((ROOT / "input.txt").read_bytes()[:size])
    return path

def shared(name):
    """Return the path of `name` in the shared data. Skip the test if this machine lacks it."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"no shared data at {path}")
    return path

@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with the text that all runs of a module train on."""
    folder = tmp_path_factory.mktemp("runs")
    write_text(folder)
    return folder

@pytest.fixture(scope="session")
def gpt2_encoding():
    """Return tiktoken's GPT-2 encoding. Skip the test if it cannot be loaded, and say why."""
    import tiktoken
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as e:  # the error depends on how the download failed
        pytest.skip(f"tiktoken cannot load the GPT-2 vocabulary ({type(e).__name__}). Set "
                    "TIKTOKEN_CACHE_DIR to a folder that contains it.")

class Bomb:
    """An object that creates a file when it is unpickled without weights_only=True."""
    def __init__(self, path):
        self.path = Path(path)

    def __reduce__(self):
        return Path.touch, (self.path,)

# ---- Small models
def seeded(seed=0):
    """Return a random generator with this seed."""
    return torch.Generator().manual_seed(seed)

def ids(B=4, T=32, seed=0):
    """Return random token ids (B, T)."""
    return torch.randint(257, (B, T), generator=seeded(seed))

def small(**changes):
    """Return a small GPT, with the same initial weights at each call."""
    constants = dict(block_size=32, n_layer=2, n_head=2, n_embd=32, vocab_size=257)
    return t.GPT(t.GPTConfig(**constants | changes), seed=0)

def shake(model):
    """Add noise to all parameters, so that an error in any bias or gain changes the outputs."""
    for p in model.parameters():
        p.data += torch.randn(p.shape, generator=seeded(p.numel())) * 0.05
    return model

def stub_run(model, cfg, rows, optimizers=None, float16=False):
    """Return a Run on the CPU whose loaders return `rows` (B, T + 1) at each call.

    float16: whether to scale the losses. (The model still computes in float32.)
    """
    optimizers = optimizers or t.configure_optimizers(model, cfg)
    loader = mock.Mock()
    loader.batch.return_value = rows[:, :-1], rows[:, 1:]
    return t.Run(
        cfg=cfg, device=torch.device("cpu"), model=model, ddp_model=model, optimizers=optimizers,
        scaler=torch.amp.GradScaler("cpu", enabled=float16), autocast=contextlib.nullcontext,
        train_loader=loader, val_loader=loader, data_facts={})

# ---- Comparing results
def one_line(stderr, *parts):
    """Assert that stderr is one line of a script that failed, with these parts. Return it."""
    assert stderr.count("\n") == 1 and stderr.endswith("\n"), stderr
    for part in parts:
        assert str(part) in stderr, stderr
    return stderr

def assert_refused(monkeypatch, words, *parts):
    """Assert that main() with these flags raises UserError, with one sentence that has `parts`."""
    monkeypatch.setattr("sys.argv", ["train_gpt2.py", *words])
    monkeypatch.setattr(t.signal, "signal", mock.Mock())
    monkeypatch.setattr(t, "train", mock.Mock())
    with pytest.raises(t.UserError) as e:
        t.main()
    assert all(part in str(e.value) for part in parts) and "\n" not in str(e.value), e.value

def read_log(folder):
    """Return {(step, metric): value} of the losses, norms and scores in log.txt."""
    metrics = t.read_metrics(folder)
    return {(step, metric): value for metric in ("train", "norm", "val", "hella", "hella_loss")
            for step, value in metrics[metric].items()}

def log_lines(folder):
    """Return the lines of log.txt, without times. (A process logs tok/s after its first step.)"""
    lines = [line.split() for line in Path(folder, "log.txt").read_text().splitlines()]
    return [(step, metric, "" if metric == "train_s" else value)
            for step, metric, value in lines if metric != "tok/s"]

def assert_close_logs(a, b):
    """Assert that two runs have the same steps, with losses that are equal to 1e-5.

    a, b: folders, or what read_log() returned for them.

    On a GPU 1e-3 is allowed. Another B or another number of processes may select other kernels,
    which round differently, and thirty steps at a learning rate of 1e-2 amplify the difference.
    """
    a, b = (log if isinstance(log, dict) else read_log(log) for log in (a, b))
    assert a.keys() == b.keys()
    tolerance = 1e-5 if device_type() == "cpu" else 1e-3
    for (step, metric), value in a.items():
        allowed = tolerance * (10 if metric == "norm" else 1)
        assert abs(value - b[step, metric]) <= allowed, (step, metric, value, b[step, metric])

def load(path):
    return torch.load(path, map_location="cpu", weights_only=True)

def flat(content, name=""):
    """Return {path: value} of nested dicts and lists, for example {"/config/T": 16}."""
    if isinstance(content, list):
        content = dict(enumerate(content))
    if not isinstance(content, dict):
        return {name: content}
    values = {}
    for key, part in content.items():
        values |= flat(part, f"{name}/{key}")
    return values

def names(folder):
    """Return the steps of the checkpoints in a folder. Assert that each checkpoint is readable."""
    found = t.find_checkpoints(folder)
    for step, path in found.items():
        assert load(path)["step"] == step
    return sorted(found)

def last_checkpoint(folder):
    """Return the content of a run's newest checkpoint."""
    found = t.find_checkpoints(folder)
    return load(found[max(found)])

def assert_same(a, b):
    """Assert that two folders have the same log and the same last checkpoint, bit for bit.

    On a GPU, assert only that the losses are close. Some GPU kernels add up numbers in an order
    that varies.
    """
    if device_type() != "cpu":
        return assert_close_logs(a, b)
    assert log_lines(a) == log_lines(b)
    assert_same_checkpoints(last_checkpoint(a), last_checkpoint(b))

def assert_same_checkpoints(a, b):
    """Assert that everything in two checkpoints is equal, except for times and folders."""
    a, b = flat(a), flat(b)
    assert a.keys() == b.keys()
    for name in a.keys() - {"/config/log_dir", "/folder", "/train_s"}:
        same = torch.equal if torch.is_tensor(a[name]) else operator.eq
        assert type(a[name]) is type(b[name]) and same(a[name], b[name]), name

def until(condition, timeout=600):
    """Wait until condition() holds, and return its value. Fail after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.01)
    return value

# ---- Starting scripts
def flags(folder=None, without=(), **changes):
    """Return the flags of a tiny training run. without: constants in TINY to leave out.

    If its log_dir, `folder`, is given, the run trains on text.txt in the parent of that folder.
    """
    constants = {name: value for name, value in TINY.items() if name not in without} | changes
    if folder:
        constants = dict(data=Path(folder).parent / "text.txt", log_dir=folder) | constants
    return [f"--{name}={value}" for name, value in constants.items()]

def run_script(script, *args, cwd=None, env=None, timeout=600):
    """Run `python <script> ...` with one thread. Return the CompletedProcess with text output."""
    return subprocess.run([sys.executable, str(ROOT / script), *map(str, args)], cwd=cwd,
                          env=ENV | (env or {}), timeout=timeout, capture_output=True, text=True,
                          encoding="utf-8", errors="replace")

FORKS = multiprocessing.get_context("forkserver")

def start_forkserver():
    """Start the process that scripts are forked from, once, since this changes the environment."""
    no_hub = {"HF_HOME": f"{tempfile.gettempdir()}/no_hf_{os.getpid()}"}
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    with mock.patch.dict(os.environ, ENV | no_hub | paths):
        forkserver.ensure_running()

@pytest.fixture(scope="session", autouse=True)
def outputs(tmp_path_factory):
    """Make the folder for the output of scripts. Kill those that the tests leave behind."""
    Started.outputs = tmp_path_factory.mktemp("outputs")
    yield
    for process in multiprocessing.active_children():
        process.kill()

class Started:
    """A script that runs in a forked process, which starts in 0.1 s instead of several seconds.

    The process has already imported torch, transformers and pandas. The scripts train_gpt2.py,
    fineweb.py and hellaswag.py are imported anew, from the folder of `script` if they are there.

    script: the script's name in this repository, such as "fineweb.py" or "tests/check.py", or a
    path. words: its command line. env: {variable: value} to add. cwd: by default an empty folder.
    name: the name of the module if `script` is an edited copy with another name.
    arrange: tuples (function, arguments ...). Before main(), the process calls each function with
    the module and these arguments. The functions must be at the top level of a module, and must
    use the module that they get instead of one that their own module has imported.
    hide: packages that the process cannot import.
    pid: the process id. out, err: the output so far, as text. It can be used in any thread.
    """
    outputs, numbers = None, itertools.count()
    lock = threading.Lock()  # multiprocessing polls all processes when it starts one

    def __init__(self, script, *words, env=None, cwd=None, name=None, arrange=(), hide=()):
        self.path = f"{Started.outputs}/{next(Started.numbers)}"
        self.process = FORKS.Process(target=run_started, kwargs=dict(
            path=self.path, script=ROOT / script, words=[*map(str, words)], env=env or {},
            cwd=cwd or Started.outputs, name=name or Path(script).stem, arrange=arrange,
            hide=hide))
        with self.lock:
            self.process.start()
        self.pid = self.process.pid

    def output(self, end):
        path = Path(f"{self.path}.{end}")
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    out = property(lambda self: self.output("out"))
    err = property(lambda self: self.output("err"))

    def poll(self):
        """Return the exit status (-9 after a SIGKILL), or None if the script is still running."""
        with self.lock:
            return self.process.exitcode

    def wait(self, timeout=600):
        """Wait until the script ends, and return its exit status."""
        connection.wait([self.process.sentinel], timeout)
        assert self.poll() is not None, ("it does not end", self.out, self.err)
        return self.poll()

    def wait_for(self, pattern, file=None, timeout=600):
        """Wait until this regular expression is found in stdout or, if it is given, in `file`.

        Return the match. Fail if the script ends before.
        """
        def look():
            ended = self.poll() is not None
            text = self.out if file is None else (
                Path(file).read_text(errors="replace") if Path(file).exists() else "")
            found = re.search(pattern, text, re.M)
            assert found or not ended, (pattern, self.out, self.err)
            return found
        return until(look, timeout)

    def kill(self, number=signal.SIGKILL):
        """Send a signal to the process, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it may end at this moment
                os.kill(self.pid, number)

def torchrun_env(n):
    """Return the variables that torchrun sets for n processes on one machine."""
    while True:
        # The system takes ports for outgoing connections from 32768 on
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

def run_started(path, script, words, env, cwd, name, arrange, hide):
    """Do in the forked process what `python <script> <words>` does."""
    for number, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{path}.{end}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(env)
    os.chdir(cwd)
    np.random.seed()  # a new process has a random state
    for ours in ("train_gpt2", "fineweb", "hellaswag"):
        sys.modules.pop(ours, None)
    sys.modules |= dict.fromkeys(hide)
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *words]
    spec = importlib.util.spec_from_file_location(name, script)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for function, *arguments in arrange:
        function(module, *arguments)
    sys.exit(module.main())

class Training(Started):
    """A run of train_gpt2.py.

    folder, changes: see flags(). words: more of the command line. copy: an edited copy to run.
    options: those of Started. Packages that take seconds to use are hidden by default.
    """
    def __init__(self, folder=None, *words, copy="train_gpt2.py", arrange=(), env=None, cwd=None,
                 hide=("transformers", "matplotlib"), **changes):
        self.log_dir = folder and Path(folder)
        super().__init__(copy, *flags(folder, **changes), *words, name="train_gpt2", env=env,
                         arrange=arrange, cwd=cwd, hide=hide)

def succeed(run):
    """Wait for a run. Assert that it succeeded and wrote nothing to stderr. Return it."""
    assert run.wait() == 0 and not run.err, (run.out, run.err)
    return run

def together(n, folder, of_rank=None, **changes):
    """Start n processes that train together. Return the n Training runs.

    of_rank: {rank: arguments of Training that only this rank gets}.
    """
    need_gpus(n)
    runs, env = [], torchrun_env(n)
    for rank in range(n):
        own = dict(folder=folder) | changes | (of_rank or {}).get(rank, {})
        runs.append(Training(own.pop("folder"), env=env | {
            "RANK": str(rank), "LOCAL_RANK": str(rank)}, **own))
    return runs

def train(n, folder, **changes):
    """Train with n processes, which must succeed. Return the Training of rank 0."""
    if n == 1:
        return succeed(Training(folder, **changes))
    runs = together(n, folder, **changes)
    assert [run.wait() for run in runs] == [0] * n, [run.err for run in runs]
    assert not any(run.out for run in runs[1:])  # only rank 0 prints
    return runs[0]

# ---- Actions for `arrange`
def before_steps(t, steps, act):
    """Call act(run) before each of these steps."""
    real = t.train_step

    def train_step(run):
        if run.step in steps:
            act(run)
        return real(run)
    t.train_step = train_step

def signal_at(t, number, *steps):
    """Send this process the signal in each of these steps. With steps 12, 12, send it twice."""
    def act(run):
        for _ in range(steps.count(run.step)):
            os.kill(os.getpid(), number)
    before_steps(t, steps, act)

def signal_on_rank(t, rank, number, *steps):
    if rank == t.RANK:
        signal_at(t, number, *steps)

def raise_at(t, step, text, rank):
    """Raise UserError in this step, in the process of this rank."""
    if rank == t.RANK:
        before_steps(t, [step], mock.Mock(side_effect=t.UserError(text)))

def poison_at(t, step):
    """Replace a gradient by NaN in this step."""
    def act(run):
        next(run.model.parameters()).register_hook(lambda grad: grad * math.nan)
    before_steps(t, [step], act)

def slow_saves(t, seconds):
    """Let each save take this much longer."""
    real = t.write_whole
    t.write_whole = lambda *args: (time.sleep(seconds), real(*args))

def ask_four_questions(t):
    """Let HellaSwag have four questions, of which every model answers one correctly."""
    import hellaswag
    question = dict(ctx="a man", endings=["runs.", "is a very old house.", "sits.", "x"])
    hellaswag.iterate_examples = lambda split: iter(
        [question | dict(label=label) for label in range(4)])

def no_questions(t):
    """Let the download of HellaSwag fail."""
    import hellaswag
    hellaswag.iterate_examples = mock.MagicMock(side_effect=t.UserError("no network today"))
