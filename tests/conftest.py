"""Helpers and fixtures that all tests share: paths, data, tiny training runs, and a local hub.

Importing torch and transformers takes seconds. Most runs of train_gpt2.py are therefore forked from
one process that has already imported them. Other runs start the script as a user does.
"""
import functools
import hashlib
import http.server
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import MagicMock, patch

import pytest
import simulated_gpu

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("GPT2_SHARED", ROOT.parent / "shared"))
sys.path.insert(0, str(ROOT))
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "GIT_OPTIONAL_LOCKS": "0"}
# A shell script ignores SIGINT in its background jobs. Processes of the tests would inherit that
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
TINY = dict(
    encoding="bytes", n_layer=1, n_head=2, n_embd=16, T=16, B=4, total_batch_size=128,
    optimizer="adamw", muon_lr_ratio=1.0, max_steps=30, max_lr=1e-2, warmup_steps=5,
    print_every=1, eval_every=5, val_tokens=1024, hellaswag_every=0, sample_every=0,
    save_every=5, keep_every=0, dtype="float32", device="cpu")

# ------------------------------------------------------- tests that run beside the others
STARTED = {}  # {test: its Future} of the tests that beside_others() decorates

def beside_others(test):
    """Decorate a test that starts programs and waits for them for ten seconds or so.

    It runs in a thread while the other tests run, which saves a minute in all. Such a test gets
    tmp_path, uses no other fixture, and passes cwd and ENV to its programs, because the working
    directory and os.environ belong to the test that runs at the same time. It uses nothing that
    other tests patch.
    """
    @functools.wraps(test)
    def wait_for_test(tmp_path):
        if test in STARTED:
            STARTED[test].result()  # raises what the test has raised
        else:
            test(tmp_path)
    wait_for_test.beside_others = test
    return wait_for_test

def pytest_collection_modifyitems(items):
    """Move the tests that run beside the others to the end, when most of them have finished."""
    items.sort(key=lambda item: decorated_test(item) is not None)

def decorated_test(item):
    """Return the test that beside_others() has decorated, or None if this is another test."""
    return getattr(getattr(item, "function", None), "beside_others", None)

@pytest.fixture(scope="session", autouse=True)
def start_tests_beside_others(request, tmp_path_factory):
    """Start the tests that run beside the others, one after another."""
    executor = ThreadPoolExecutor(max_workers=1)
    if not hasattr(request.config, "workerinput"):  # not in a process of pytest-xdist
        for item in request.session.items:
            if test := decorated_test(item):
                folder = tmp_path_factory.mktemp(item.name)
                STARTED[test] = executor.submit(test, folder)
    yield
    executor.shutdown(cancel_futures=True)

# ------------------------------------------------------- --device: CPU, GPU or simulated GPU
DEVICES = ("cpu", "cuda", "simulated")
DEVICE_VARIABLE = "GPT2_TEST_DEVICE"  # passes --device on to the processes of the tests

def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="the device that the tests train on: "
                     "cpu (default), cuda, or simulated, which needs no GPU")

def pytest_configure(config):
    """Prepare the device, and start the process that runs are forked from."""
    name = config.getoption("--device")
    if name not in DEVICES:
        raise pytest.UsageError(f"--device={name} is unknown: choose cpu, cuda or simulated.")
    try:
        use_device(name)
    except simulated_gpu.CannotSimulate as e:
        raise pytest.UsageError(f"--device=simulated: {e}") from None
    if is_real_gpu():
        import torch
        if not torch.cuda.is_available():
            raise pytest.UsageError(f"--device=cuda: torch {torch.__version__} sees no GPU here. "
                                    "--device=simulated needs no GPU.")
    preload = ["conftest", "filelock", "transformers.models.gpt2.modeling_gpt2", "torch._dynamo",
               "train_gpt2"]  # torch.optim imports torch._dynamo
    FORKS.set_forkserver_preload(preload)
    start_forkserver()  # it imports these packages while pytest collects the tests

def use_device(name):
    """Let this process, and all processes that it starts, train on a device.

    Raise CannotSimulate if the device is "simulated" and cannot be simulated here.
    """
    if name == "simulated":
        simulated_gpu.start()
    if name == "cuda":
        # The process that runs are forked from imports packages that look for GPUs. By default this
        # initializes CUDA, and then no forked process can use it. With NVML, CUDA is not needed
        ENV["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        # TF32 rounds factors to 10 bits, so losses of different kernels would differ by about 1e-3
        ENV["NVIDIA_TF32_OVERRIDE"] = os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
        # Compilation with Inductor would take up to a minute in each of a hundred runs
        TINY["compile"] = "False"
    if name != "cpu":
        TINY["device"] = "cuda"
    ENV[DEVICE_VARIABLE] = name

def is_simulated():
    return ENV.get(DEVICE_VARIABLE) == "simulated"

def is_real_gpu():
    return ENV.get(DEVICE_VARIABLE) == "cuda"

# The process that runs are forked from imports this file. Its environment names the device
use_device(os.environ.get(DEVICE_VARIABLE, "cpu"))

def device_type():
    """Return "cpu" or "cuda", the type of device for tensors that a test makes itself."""
    return TINY["device"]

def start_simulation():
    """Return Python code that starts the simulated GPUs. A test puts it in front of a script."""
    if not is_simulated():
        return ""
    return (f"import sys; sys.path.append({str(ROOT / 'tests')!r})\n"
            "import simulated_gpu; simulated_gpu.start()\n")

def need_gpus(number):
    """Skip the test if it runs on real GPUs and needs more of them than there are."""
    if is_real_gpu():
        import torch
        found = torch.cuda.device_count()
        if found < number:
            pytest.skip(f"{number} processes need {number} GPUs, but there are {found}")

def flags(folder=None, without=(), **changes):
    """Return the flags of a tiny training run. without: constants in TINY to leave out.

    If its log_dir, `folder`, is given, the run trains on text.txt in the parent of that folder.
    """
    constants = {name: value for name, value in TINY.items() if name not in without} | changes
    if folder:
        constants = dict(data=Path(folder).parent / "text.txt", log_dir=folder) | constants
    return [f"--{name}={value}" for name, value in constants.items()]

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

@pytest.fixture(scope="session")
def gpt2_encoding():
    """Return tiktoken's GPT-2 encoding. Skip the test if it cannot be loaded, and say why."""
    import tiktoken
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as e:  # the error depends on how the download failed
        pytest.skip(f"tiktoken cannot load the GPT-2 vocabulary ({type(e).__name__}). Set "
                    "TIKTOKEN_CACHE_DIR to a folder that contains it.")

@pytest.fixture(scope="session")
def is_gpt2(tmp_path_factory):
    """Skip the test if the model was edited and is no longer GPT-2."""
    import torch
    import train_gpt2 as t
    pytest.importorskip("transformers", reason="transformers is not installed")
    model = t.GPT(t.GPTConfig(n_layer=2, n_head=2, n_embd=32, n_vocab=257))
    for p in model.parameters():  # large values, so that every part affects the logits
        p.data += 0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    try:
        t.save_hugging_face(model, tmp_path_factory.mktemp("hf"))
    except t.UserError as e:
        pytest.skip(f"the model here is no GPT-2 any more: {e}")

@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Use one thread in this process, too. Several threads would slow such small models down."""
    import torch
    torch.set_num_threads(1)

# ------------------------------------------------------------------- a local hub
class Hub(http.server.ThreadingHTTPServer):
    """A local server in place of huggingface.co.

    It implements the part of the API that `datasets` and hf_hub_download use for datasets.

    files: {repository: {path: bytes}}, the same in every revision. log: (method, path, Range header
    or None) of each request. fail: a function of (path, Range header or None) that returns the HTTP
    status of a failure, or None to answer normally. revision: the hash of the commit that every
    revision name refers to.
    """
    daemon_threads = True

    def __init__(self, cache):
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.files, self.log, self.revision = {}, [], "a" * 40
        self.fail = lambda path, span: None
        self.env = {"HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}", "HF_HOME": str(cache),
                    "NO_PROXY": "*", "HF_HUB_OFFLINE": "0"}

class HubRequest(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path, _, query = self.path.partition("?")
        asked = re.fullmatch(r"/(?:api/)?datasets/(.+?)(?:/(resolve|tree|revision)/[^/]+/?(.*))?",
                             path)
        if not asked:  # the client also makes requests that do not matter here
            return self.answer(b"", 404)
        path, span = urllib.parse.unquote(path), self.headers.get("Range")
        self.server.log.append((self.command, path, span))
        status = self.server.fail(path, span)
        if status:
            return self.answer(b"", status)
        repository, what, name = asked.groups()
        if repository not in self.server.files:
            return self.answer(b"", 404, X_Error_Code="RepoNotFound")
        files, name = self.server.files[repository], urllib.parse.unquote(name or "")
        if what == "resolve":
            return self.answer_file(files, name, span)
        if what == "tree":
            return self.answer_tree(files, name, "recursive=true" in query.lower())
        self.answer({"_id": "1", "id": repository, "sha": self.server.revision,
                     "private": False, "tags": [], "downloads": 0, "likes": 0, "siblings": []})

    do_HEAD = do_GET

    def do_POST(self):
        """Answer a paths-info request with the entries of the given paths."""
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.log.append((self.command, self.path, None))
        form = json.loads(text) if text.startswith("{") else urllib.parse.parse_qs(text)
        files = self.server.files[re.match(r"/api/datasets/(.+)/paths-info/", self.path)[1]]
        self.answer([self.entry(files, name) for name in form["paths"] if name in files])

    def answer(self, content, status=200, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**headers, "Content_Length": len(body)}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def entry(self, files, name):
        oid = hashlib.sha1(files[name]).hexdigest()
        return {"type": "file", "path": name, "size": len(files[name]), "oid": oid}

    def answer_file(self, files, name, span):
        if name not in files:
            return self.answer(b"", 404, X_Error_Code="EntryNotFound")
        headers = {"ETag": f'"{self.entry(files, name)["oid"]}"', "Accept_Ranges": "bytes",
                   "X_Repo_Commit": self.server.revision}
        if not span:
            return self.answer(files[name], **headers)
        start, end = re.fullmatch(r"bytes=(\d+)-(\d*)", span).groups()
        part = files[name][int(start):int(end) + 1 if end else None]
        last, size = int(start) + len(part) - 1, len(files[name])
        self.answer(part, 206, Content_Range=f"bytes {start}-{last}/{size}", **headers)

    def answer_tree(self, files, folder, recursive):
        prefix = folder and folder + "/"
        entries = {}
        for name in sorted(name for name in files if name.startswith(prefix)):
            child = prefix + name[len(prefix):].split("/")[0]
            if name == child or recursive:
                entries[name] = self.entry(files, name)
            if name != child:
                entries[child] = {"type": "directory", "path": child, "size": 0, "oid": "b" * 40}
        self.answer(list(entries.values()), 200 if entries else 404)

    def log_message(self, *args):
        pass

@pytest.fixture
def hub(tmp_path_factory):
    """Start a new Hub, with an empty cache, for each test."""
    with Hub(tmp_path_factory.mktemp("hf_home")) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()

# ------------------------------------------------------------------------ comparing results
def one_line(stderr, *parts):
    """Assert that stderr is one line of a script that failed, with these parts. Return it."""
    assert re.match(r"\w+\.py: ", stderr) and stderr.count("\n") == 1, stderr
    for part in parts:
        assert str(part) in stderr, stderr
    return stderr

METRICS = ("train", "val", "hella")  # an edit may add other metrics, which tests ignore

def read_log(folder):
    """Return {(step, metric): value} of log.txt.

    Assert that no line occurs twice, and that the lines are in the order of their steps.
    """
    lines = [line.split() for line in Path(folder, "log.txt").read_text().splitlines()]
    lines = [line for line in lines if line[1] in METRICS]
    values = {(int(step), metric): float(value) for step, metric, value in lines}
    assert len(values) == len(lines)
    assert [step for step, _ in values] == sorted(step for step, _ in values)
    return values

def lines_of_log(folder):
    """Return the lines of log.txt, except those that hold times."""
    lines = Path(folder, "log.txt").read_bytes().splitlines(keepends=True)
    return [line for line in lines if b" minutes " not in line]

def assert_close_logs(a, b):
    """Assert that two logs have the same lines, with losses that are equal to 1e-5.

    a, b: folders, or what read_log() returned for them.

    On a GPU 1e-3 is allowed. Another B or another number of processes may select other kernels,
    which round differently, and thirty steps at a learning rate of 1e-2 amplify the difference.
    """
    a, b = (log if isinstance(log, dict) else read_log(log) for log in (a, b))
    assert a.keys() == b.keys()
    assert max(abs(a[key] - b[key]) for key in a) <= (1e-3 if is_real_gpu() else 1e-5)

def assert_same_logs(a, b):
    """Assert that the logs of two folders are the same to the last digit, except for times.

    On a GPU, assert only that the losses are close. Some GPU kernels add up numbers in an order
    that varies.
    """
    if is_real_gpu():
        assert_close_logs(a, b)
    else:
        assert lines_of_log(a) == lines_of_log(b)

def load(path):
    import torch
    return torch.load(path, map_location="cpu", weights_only=True)

def assert_same(a, b):
    """Assert that two checkpoints are the same bit for bit. Their folders may differ.

    On a GPU, compare only names and steps. Some GPU kernels add up numbers in an order that varies,
    and if the exact gradient is zero, Adam turns its rounding error into a step of full length. In
    this case assert_same_logs() shows that the models are nearly equal.
    """
    import torch
    assert a.keys() == b.keys() and (a["encoding"], a["data"]) == (b["encoding"], b["data"])
    if is_real_gpu():
        assert a["state"]["step"] == b["state"]["step"]
        assert a["eval_model"].keys() == b["eval_model"].keys()
        return
    for key in ("gpt_config", "eval_model"):
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=0)
    a, b = a["state"], b["state"]
    for key in ("step", "tokens", "raw_model", "scaler"):
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=0)
    for one, other in zip(a["optimizers"], b["optimizers"], strict=True):
        assert one["param_groups"] == other["param_groups"]
        torch.testing.assert_close(one["state"], other["state"], rtol=0, atol=0)

def until(condition, timeout=180, run=None):
    """Wait until condition() holds. Fail after `timeout` seconds, or when `run` has ended."""
    end = time.monotonic() + timeout
    while not condition():
        ended = run is not None and run.ended() and not condition()
        assert time.monotonic() < end and not ended, (
            f"the condition did not become true: {run and (run.out, run.err)}")
        time.sleep(0.01)

# ------------------------------------------------------------------- starting scripts
def run_command(command, cwd, env, timeout):
    return subprocess.run(command, cwd=cwd, env=env, timeout=timeout, capture_output=True,
                          text=True, encoding="utf-8", errors="replace")

def run_script(script, *args, cwd=None, env=None, timeout=180):
    """Run `python <script> ...` with one thread. Return the CompletedProcess with text output."""
    simulation = [str(ROOT / "tests" / "simulated_gpu.py")] if is_simulated() else []
    command = [sys.executable, *simulation, str(ROOT / script), *map(str, args)]
    return run_command(command, cwd, ENV | (env or {}), timeout)

def run_python(code, *args, cwd=None, env=None, timeout=180):
    """Run `python -c <code> ...` with one thread. The code can import the project's scripts."""
    command = [sys.executable, "-c", code, *map(str, args)]
    return run_command(command, cwd, ENV | {"PYTHONPATH": str(ROOT)} | (env or {}), timeout)

FORKS = multiprocessing.get_context("forkserver")

def start_forkserver():
    """Start the process that runs are forked from, unless it is running already."""
    with patch.dict(os.environ, ENV):
        os.environ |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "HF_HUB_OFFLINE": "1",
                       "HF_HOME": f"{tempfile.gettempdir()}/no_hf_home_{os.getpid()}"}
        forkserver.ensure_running()

class Forked:
    """A run of train_gpt2.py in a forked process.

    pid is its process id, and out and err are its output so far. wait() returns its exit status.

    arrange: {action: argument, or a tuple of arguments}. An action is the name of a method of
    Arrange, or a function that gets an Arrange and the arguments. hide: packages that the process
    cannot import. The default ones would take seconds to import.
    """
    outputs, numbers = None, itertools.count()

    def __init__(self, folder=None, *words, env=None, arrange=None, cwd=None, ascii_stdout=False,
                 hide=("transformers", "matplotlib"), **changes):
        import train_gpt2
        self.log_dir = folder and Path(folder)
        self.path = f"{Forked.outputs}/{next(Forked.numbers)}"
        words = [*flags(folder, **changes), *map(str, words)]
        self.process = FORKS.Process(target=run_forked, args=(
            self.path, words, env or {}, arrange or {}, cwd or Forked.outputs, ascii_stdout, hide,
            train_gpt2.code_checksum()))
        start_forkserver()
        self.process.start()
        self.pid = self.process.pid

    def output(self, end):
        path = Path(f"{self.path}.{end}")
        return path.read_text(errors="replace") if path.exists() else ""

    out = property(lambda self: self.output("out"))
    err = property(lambda self: self.output("err"))

    def ended(self):
        return self.process.exitcode is not None

    def wait(self, timeout=180):
        self.process.join(timeout)
        assert self.ended(), (self.out, self.err)
        return self.process.exitcode

    def is_stopped(self):
        return "State:\tT" in Path(f"/proc/{self.pid}/status").read_text()

    def wait_for_stop(self):
        """Wait until SIGSTOP has stopped the process. go_on() continues it."""
        until(self.is_stopped, run=self)

    def go_on(self):
        os.kill(self.pid, signal.SIGCONT)
        until(lambda: self.ended() or not self.is_stopped())

def run_forked(path, words, env, arrange, cwd, ascii_stdout, hide, checksum):
    """Do in the forked process what `python train_gpt2.py <words>` does."""
    for number, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{path}.{end}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    import train_gpt2 as t
    t.code_checksum = lambda: checksum  # computing it takes as long as ten steps
    if ascii_stdout:
        sys.stdout.reconfigure(encoding="ascii")
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = ["train_gpt2.py", *words]
    sys.modules |= dict.fromkeys(hide)
    for method, values in arrange.items():
        method = method if callable(method) else getattr(Arrange, method)
        method(Arrange(t), *(values if isinstance(values, tuple) else [values]))
    t.main()

@pytest.fixture(autouse=True)
def empty_folder(tmp_path_factory, monkeypatch):
    """Run each test in an empty folder, so that the runs in a user's clone do not affect it."""
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))

@pytest.fixture(scope="session", autouse=True)
def forked_outputs(tmp_path_factory):
    """Make the folder for the output of forked runs. Kill the runs that the tests leave behind."""
    Forked.outputs = tmp_path_factory.mktemp("outputs")
    yield
    for process in multiprocessing.active_children():
        process.kill()

def succeed(run):
    """Wait for a run. Assert that it succeeded and wrote nothing to stderr. Return it."""
    assert run.wait() == 0 and not run.err, (run.out, run.err)
    return run

def together(n, folder, **changes):
    """Let n forked processes train together. Return their exit statuses and the n Forked runs."""
    need_gpus(n)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    runs = [Forked(folder, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, **changes)
            for rank in range(n)]
    return [run.wait() for run in runs], runs

class Arrange:
    """Actions that a test can request in a forked process. Each method is one action."""

    def __init__(self, t):
        self.t = t

    def before(self, steps, act):
        """Call act(run) before each of these steps."""
        real = self.t.train_step

        def train_step(run):
            if run.state.step in steps:
                act(run)
            return real(run)
        self.t.train_step = train_step

    def signal_at(self, number, *steps):
        """Send this process the signal in each of these steps. With steps 12, 12, send it twice.

        First wait for saves and plots in progress, which SIGSTOP would interrupt.
        """
        def act(run):
            run.folder.executor.submit(int).result()  # runs after all saves and plots
            for _ in range(steps.count(run.state.step)):
                os.kill(os.getpid(), number)
        self.before(steps, act)

    def signal_on_rank(self, rank, number, *steps):
        if self.t.rank() == rank:
            self.signal_at(number, *steps)

    def slow(self, seconds):
        self.before(range(10**9), lambda run: time.sleep(seconds))

    def slow_saves(self, seconds):
        real = self.t.write_whole
        self.t.write_whole = lambda *args, **words: (time.sleep(seconds), real(*args, **words))

    def poison_at(self, step):
        """Replace a gradient by NaN in this step."""
        def act(run):
            weight = next(run.state.raw_model.parameters())
            weight.register_hook(lambda grad: grad * math.nan)
        self.before([step], act)

    def raise_at(self, step, error):
        self.before([step], MagicMock(side_effect=error))

    def mistake_on_rank(self, rank, step):
        """Raise UserError in this step, in the process of one rank only."""
        if self.t.rank() == rank:
            self.before([step], MagicMock(side_effect=self.t.UserError("A bad token.")))
