"""The harness of all tests: paths and shared data, tiny trainings, runs in processes of their own.

Importing torch and transformers takes seconds. So most runs of train_gpt2.py are forked off one
process that has imported them; some are started as a user would.
"""
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
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import MagicMock, patch

import pytest
import simulated_gpu

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("GPT2_SHARED", ROOT.parent / "shared"))
sys.path.insert(0, str(ROOT))
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "GIT_OPTIONAL_LOCKS": "0"}
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a shell script
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or tests' processes inherit it
TINY = dict(
    encoding="bytes", n_layer=1, n_head=2, n_embd=16, T=16, B=4, total_batch_size=128,
    optimizer="adamw", muon_lr_ratio=1.0, max_steps=30, max_lr=1e-2, warmup_steps=5,
    print_every=1, eval_every=5, val_tokens=1024, hellaswag_every=0, sample_every=0,
    save_every=5, keep_every=0, dtype="float32", device="cpu")

# ------------------------------------------------------- --device: CPU, GPU or simulated GPU
DEVICES = ("cpu", "cuda", "simulated")
DEVICE_VARIABLE = "GPT2_TEST_DEVICE"  # tells the value of --device to the processes of the tests

def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="cpu (default), cuda or simulated: where the "
                     "tests train; simulated GPUs need no GPU (tests/simulated_gpu.py)")

def pytest_configure(config):
    """Prepare the device, and start the process that runs are forked off."""
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
            raise pytest.UsageError(f"--device=cuda: torch {torch.__version__} sees no GPU here; "
                                    "--device=simulated needs none.")
    preload = ["conftest", "filelock", "transformers.models.gpt2.modeling_gpt2", "torch._dynamo",
               "train_gpt2"]  # optimizers import _dynamo
    FORKS.set_forkserver_preload(preload)
    start_forkserver()  # it imports while pytest collects

def use_device(name):
    """Train on this device in this process and in those that it starts. Raises CannotSimulate."""
    if name == "simulated":
        simulated_gpu.start()
    if name == "cuda":
        # The process that runs are forked off imports packages that ask for GPUs. By default this
        # initialises CUDA, which a forked process cannot use then. NVML answers without it.
        ENV["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        # TF32 rounds factors to 10 bits: losses of different kernels would differ by about 1e-3.
        ENV["NVIDIA_TF32_OVERRIDE"] = os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
        # Inductor would take up to a minute in each of a hundred runs.
        TINY["compile"] = "False"
    if name != "cpu":
        TINY["device"] = "cuda"
    ENV[DEVICE_VARIABLE] = name

def is_simulated():
    return ENV.get(DEVICE_VARIABLE) == "simulated"

def is_real_gpu():
    return ENV.get(DEVICE_VARIABLE) == "cuda"

# The process that runs are forked off imports this file, and finds the device in its environment.
use_device(os.environ.get(DEVICE_VARIABLE, "cpu"))

def device_type():
    """Return "cpu" or "cuda": where a test puts its own tensors."""
    return TINY["device"]

def start_simulation():
    """Return Python code that a script of a test begins with, to find the simulated GPUs."""
    if not is_simulated():
        return ""
    return (f"import sys; sys.path.append({str(ROOT / 'tests')!r})\n"
            "import simulated_gpu; simulated_gpu.start()\n")

def need_gpus(number):
    """Skip the test if it runs on GPUs and there are not so many."""
    if is_real_gpu():
        import torch
        found = torch.cuda.device_count()
        if found < number:
            pytest.skip(f"{number} processes need {number} GPUs, and there are {found}")

def flags(folder=None, **changes):
    """The command line of a tiny training; of text.txt beside `folder`, its log_dir."""
    constants = TINY | changes
    if folder:
        constants = dict(data=Path(folder).parent / "text.txt", log_dir=folder) | constants
    return [f"--{name}={value}" for name, value in constants.items()]

def write_text(folder, size=50_000):
    """text.txt for tiny trainings."""
    path = Path(folder, "text.txt")
    path.write_bytes((ROOT / "input.txt").read_bytes()[:size])
    return path

def shared(name):
    """Path of `name` in the shared data, or a skip when this machine has none."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"no shared data at {path}")
    return path

@pytest.fixture(scope="session")
def gpt2_encoding():
    """tiktoken's GPT-2 encoding, or a skip that says why it is missing."""
    import tiktoken
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as e:  # tiktoken raises whatever its download raised: requests', OSError, ...
        pytest.skip(f"GPT-2 vocabulary not at hand ({type(e).__name__}); set TIKTOKEN_CACHE_DIR")

@pytest.fixture(scope="session")
def is_gpt2(tmp_path_factory):
    """What holds for GPT-2 alone is skipped where the model was edited into another."""
    import torch
    import train_gpt2 as t
    pytest.importorskip("transformers", reason="transformers is not installed")
    model = t.GPT(t.GPTConfig(vocab_size=384, n_layer=2, n_head=2, n_embd=32, n_vocab=257))
    for p in model.parameters():  # large, so that each part of the model shows
        p.data += 0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    try:
        t.save_hugging_face(model, tmp_path_factory.mktemp("hf"))
    except t.UserError as e:
        pytest.skip(f"the model here is no GPT-2 any more: {e}")

@pytest.fixture
def one_thread():
    """Models as small as the tests' are not worth threads, which wait for each other."""
    import torch
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

# ------------------------------------------------------------------- a stand-in for the hub
class Hub(http.server.ThreadingHTTPServer):
    """As much of huggingface.co as `datasets` and hf_hub_download ask of dataset repositories.

    files: {repository: {path: bytes}}, the same in every revision. log: (method, path, the Range
    header or None) of each request. fail: a function of path and Range that gives the HTTP
    status to fail with, or None. revision: the commit that every revision's name stands for.
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
        if not asked:  # the client wonders about other things as well
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
        """paths-info: what is known of these paths."""
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
    """A Hub of its own for each test, with an empty cache."""
    with Hub(tmp_path_factory.mktemp("hf_home")) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()

# ------------------------------------------------------------------------ looking at results
def one_line(stderr, *parts):
    """Assert that a failing script said one line on stderr, with these parts. Returns it."""
    assert re.match(r"\w+\.py: ", stderr) and stderr.count("\n") == 1, stderr
    for part in parts:
        assert str(part) in stderr, stderr
    return stderr

STREAMS = ("train", "val", "hella")  # of other streams, which an edit may add, tests know nothing

def read_log(folder):
    """{(step, stream): value} of log.txt, each line there once and in the order of steps."""
    lines = [line.split() for line in Path(folder, "log.txt").read_text().splitlines()]
    lines = [line for line in lines if line[1] in STREAMS]
    values = {(int(step), stream): float(value) for step, stream, value in lines}
    assert len(values) == len(lines)
    assert [step for step, _ in values] == sorted(step for step, _ in values)
    return values

def lines_of_log(folder):
    """Those of log.txt that hold no times."""
    lines = Path(folder, "log.txt").read_bytes().splitlines(keepends=True)
    return [line for line in lines if b" minutes " not in line]

def assert_close_logs(a, b):
    """The same lines with losses equal to 1e-5; each a folder or what read_log() returned.

    On a GPU 1e-3 is allowed: another B or another number of processes may select other kernels,
    whose rounding differs, and thirty steps at a learning rate of 1e-2 amplify the difference.
    """
    a, b = (log if isinstance(log, dict) else read_log(log) for log in (a, b))
    assert a.keys() == b.keys()
    assert max(abs(a[key] - b[key]) for key in a) <= (1e-3 if is_real_gpu() else 1e-5)

def assert_same_logs(a, b):
    """Two folders' logs are the same to the last digit, but for lines that hold times.

    Some kernels of a GPU add up in an order that changes, so there the losses are close only.
    """
    if is_real_gpu():
        assert_close_logs(a, b)
    else:
        assert lines_of_log(a) == lines_of_log(b)

def load(path):
    import torch
    return torch.load(path, map_location="cpu", weights_only=True)

def assert_same(a, b):
    """Two checkpoints' contents are the same bit for bit; their folders may differ.

    On a GPU only their names and steps are compared. Some kernels add up in an order that changes,
    and where a gradient would be zero, Adam turns what remains of it into a step of full length.
    assert_same_logs() shows that the models are as good as equal.
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
    """Wait for condition() to hold; fail after `timeout` seconds, or when `run` has ended."""
    end = time.monotonic() + timeout
    while not condition():
        ended = run is not None and run.ended() and not condition()
        assert time.monotonic() < end and not ended, f"in vain: {run and (run.out, run.err)}"
        time.sleep(0.01)

# ------------------------------------------------------------------- as a user starts scripts
def run_command(command, cwd, env, timeout):
    return subprocess.run(command, cwd=cwd, env=env, timeout=timeout, capture_output=True,
                          text=True, encoding="utf-8", errors="replace")

def run_script(script, *args, cwd=None, env=None, timeout=180):
    """`python <script> ...`; returns the CompletedProcess with text output."""
    simulation = [str(ROOT / "tests" / "simulated_gpu.py")] if is_simulated() else []
    command = [sys.executable, *simulation, str(ROOT / script), *map(str, args)]
    return run_command(command, cwd, {**os.environ, **(env or {})}, timeout)

def run_python(code, *args, cwd=None, env=None, timeout=180):
    """`python -c <code> ...` with the project's scripts to import, one thread each."""
    command = [sys.executable, "-c", code, *map(str, args)]
    return run_command(command, cwd, ENV | {"PYTHONPATH": str(ROOT)} | (env or {}), timeout)

FORKS = multiprocessing.get_context("forkserver")

def start_forkserver():
    """Unless it runs: the process to fork off, which imports what takes seconds."""
    with patch.dict(os.environ, ENV):
        os.environ |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "HF_HUB_OFFLINE": "1",
                       "HF_HOME": f"{tempfile.gettempdir()}/no_hf_home_{os.getpid()}"}
        forkserver.ensure_running()

class Forked:
    """train_gpt2.py in a forked process: pid, out and err so far, wait() for its exit status.

    arrange: {method of Arrange, or a function like them: its argument, or a tuple of them}.
    hide: packages that the process cannot import; these two take seconds.
    """
    outputs, numbers = None, itertools.count()

    def __init__(self, folder=None, *words, env=None, arrange=None, cwd=None, ascii_stdout=False,
                 hide=("transformers", "matplotlib"), **changes):
        self.log_dir = folder and Path(folder)
        self.path = f"{Forked.outputs}/{next(Forked.numbers)}"
        words = [*flags(folder, **changes), *map(str, words)]
        self.process = FORKS.Process(target=run_forked, args=(
            self.path, words, env or {}, arrange or {}, cwd or Forked.outputs, ascii_stdout, hide))
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
        """Until it is at its SIGSTOP; then go_on() is the next."""
        until(self.is_stopped, run=self)

    def go_on(self):
        os.kill(self.pid, signal.SIGCONT)
        until(lambda: self.ended() or not self.is_stopped())

def run_forked(path, words, env, arrange, cwd, ascii_stdout, hide):
    """In the forked process: be `python train_gpt2.py <words>`."""
    for number, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{path}.{end}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    import train_gpt2 as t
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

@pytest.fixture(scope="session", autouse=True)
def forked_outputs(tmp_path_factory):
    """Where forked runs write. None of them outlives the tests."""
    Forked.outputs = tmp_path_factory.mktemp("outputs")
    yield
    for process in multiprocessing.active_children():
        process.kill()

def succeed(run):
    assert run.wait() == 0 and not run.err, (run.out, run.err)
    return run

def together(n, folder, **changes):
    """n forked processes that train together; returns their exit statuses and them."""
    need_gpus(n)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    runs = [Forked(folder, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, **changes)
            for rank in range(n)]
    return [run.wait() for run in runs], runs

class Arrange:
    """What a forked process is told to do or to suffer; each method is one such thing."""

    def __init__(self, t):
        self.t = t

    def before(self, steps, act):
        """act(run) before these steps."""
        real = self.t.train_step

        def train_step(run):
            if run.state.step in steps:
                act(run)
            return real(run)
        self.t.train_step = train_step

    def signal_at(self, number, *steps):
        """Get the signal in these steps (12, 12: twice); not amid a save, which SIGSTOP would
        stop as well."""
        def act(run):
            run.folder.executor.submit(int).result()  # the saves and pictures before it are done
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
        """In that step the gradient is NaN."""
        def act(run):
            weight = next(run.state.raw_model.parameters())
            weight.register_hook(lambda grad: grad * math.nan)
        self.before([step], act)

    def raise_at(self, step, error):
        self.before([step], MagicMock(side_effect=error))

    def mistake_on_rank(self, rank, step):
        """Of all processes, that one alone meets a mistake in that step."""
        if self.t.rank() == rank:
            self.before([step], MagicMock(side_effect=self.t.UserError("A bad token.")))
