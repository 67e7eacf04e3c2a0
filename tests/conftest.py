"""The harness of all tests: paths and shared data, tiny trainings, runs in processes of their own.

Importing torch and transformers takes seconds. So most runs of train_gpt2.py are forked off one
process that has imported them (this file, started as a program); some are started as a user would.
"""
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from unittest.mock import MagicMock

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("GPT2_SHARED", ROOT.parent / "shared"))
sys.path.insert(0, str(ROOT))
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "GIT_OPTIONAL_LOCKS": "0"}
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a shell script
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or tests' processes inherit it
TINY = dict(
    encoding="bytes", n_layer=1, n_head=2, n_embd=16, T=16, B=4, total_batch_size=128,
    max_steps=30, max_lr=1e-2, warmup_steps=5, save_every=5, eval_every=5, val_tokens=1024,
    sample_every=0, milestone_every=0, hellaswag_every=0, dtype="float32", device="cpu")


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


# ----------------------------------------------------------------------------- shared data
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


@pytest.fixture
def one_thread():
    """Models as small as the tests' are not worth threads, which wait for each other."""
    import torch
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ------------------------------------------------------------------------ looking at results
def one_line(stderr, *parts):
    """Assert that a failing script said one line on stderr, with these parts. Returns it."""
    assert re.match(r"\w+\.py: ", stderr) and stderr.count("\n") == 1, stderr
    for part in parts:
        assert str(part) in stderr, stderr
    return stderr


def read_log(folder):
    """{(step, stream): value} of log.txt, each line there once and in the order of steps."""
    lines = [line.split() for line in Path(folder, "log.txt").read_text().splitlines()]
    values = {(int(step), stream): float(value) for step, stream, value in lines}
    assert len(values) == len(lines)
    assert [step for step, _ in values] == sorted(step for step, _ in values)
    return values


def assert_close_logs(a, b):
    """The same lines with losses equal to 1e-5; each a folder or what read_log() returned."""
    a, b = (log if isinstance(log, dict) else read_log(log) for log in (a, b))
    assert a.keys() == b.keys()
    assert max(abs(a[key] - b[key]) for key in a) <= 1e-5


def load(path):
    import torch
    return torch.load(path, map_location="cpu", weights_only=True)


def until(condition, timeout=120, run=None):
    """Wait for condition() to hold; fail after `timeout` seconds, or when `run` has ended."""
    end = time.monotonic() + timeout
    while not condition():
        ended = run is not None and run.ended() and not condition()
        assert time.monotonic() < end and not ended, f"in vain: {run and (run.out, run.err)}"
        time.sleep(0.01)


# ------------------------------------------------------------------- as a user starts scripts
def run_script(script, *args, cwd=None, env=None, timeout=300):
    """`python <script> ...`; returns the CompletedProcess with text output."""
    command = [sys.executable, str(ROOT / script), *map(str, args)]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **(env or {})}, timeout=timeout,
                          capture_output=True, text=True, encoding="utf-8", errors="replace")


def run_python(code, *args, cwd=None, env=None, timeout=300):
    """`python -c <code> ...` with the project's scripts to import, one thread each."""
    command = [sys.executable, "-c", code, *map(str, args)]
    env = ENV | {"PYTHONPATH": str(ROOT)} | (env or {})
    return subprocess.run(command, cwd=cwd, env=env, timeout=timeout, capture_output=True,
                          text=True, encoding="utf-8", errors="replace")


def torchrun(*options, script=ROOT / "train_gpt2.py"):
    """The beginning of a command line; the script's flags follow."""
    return [sys.executable, "-m", "torch.distributed.run", *options, str(script)]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def rank_environment(rank, world_size, port):
    """What torchrun tells its workers."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


# ------------------------------------------------------------------------------- forked runs
class Forked:
    """train_gpt2.py in a forked process: pid, out and err so far, wait() for its exit status.

    arrange: {method of Arrange: its arguments}. hide: packages that the process cannot import.
    """
    server, count, outputs = None, 0, None

    def __init__(self, folder=None, *words, env=None, arrange=None, hide=None, cwd=None,
                 ascii_stdout=False, **changes):
        Forked.count += 1
        self.log_dir = folder and Path(folder)
        self.path = f"{Forked.outputs}/{Forked.count}"
        self.status = None
        hide = ["transformers", "matplotlib"] if hide is None else hide  # they take seconds
        request = {"words": [*flags(folder, **changes), *map(str, words)], "env": env or {},
                   "out": self.path, "arrange": arrange or {}, "hide": hide,
                   "cwd": str(cwd or Forked.outputs), "ascii": ascii_stdout}
        self.pid = self.ask(request)

    @classmethod
    def ask(cls, request):
        if cls.server is None:
            env = ENV | {"HF_HUB_OFFLINE": "1", "HF_HOME": f"{cls.outputs}/hf_home"}
            cls.server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE,
                                          stdout=subprocess.PIPE, text=True, env=env)
        print(json.dumps(request, default=str), file=cls.server.stdin, flush=True)
        return json.loads(cls.server.stdout.readline())

    def output(self, end):
        path = Path(f"{self.path}.{end}")
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def out(self):
        return self.output("out")

    @property
    def err(self):
        return self.output("err")

    def ended(self):
        if self.status is None:
            self.status = self.ask({"wait": self.pid})
        return self.status is not None

    def wait(self, timeout=120):
        until(self.ended, timeout)
        return self.status

    def wait_for_stop(self):
        """Until it is at its SIGSTOP; then go_on() is the next."""
        status = Path(f"/proc/{self.pid}/status")
        until(lambda: "State:\tT" in status.read_text(), run=self)

    def go_on(self):
        os.kill(self.pid, signal.SIGCONT)
        until(lambda: self.ended() or
              "State:\tT" not in Path(f"/proc/{self.pid}/status").read_text())


@pytest.fixture(scope="session", autouse=True)
def forked_outputs(tmp_path_factory):
    """Where forked runs write; in the end the process that they are forked off is ended."""
    Forked.outputs = tmp_path_factory.mktemp("outputs")
    yield
    if Forked.server:
        Forked.server.stdin.close()
        Forked.server.wait()


def succeed(run):
    assert run.wait() == 0 and not run.err, (run.out, run.err)
    return run


def two_processes(folder, env=None, **changes):
    """Two forked processes that train together; returns their exit statuses and them."""
    port = free_port()
    runs = [Forked(folder, env=rank_environment(rank, 2, port) | (env or {}), **changes)
            for rank in range(2)]
    return [run.wait() for run in runs], runs


def nth_call(owner, name, n, act):
    """From its nth call on, owner.name does act() first; the name may be Class.method."""
    *outer, name = name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    real, calls = getattr(owner, name), [0]

    def counted(*args, **kwargs):
        calls[0] += 1
        if calls[0] >= n:
            act()
        return real(*args, **kwargs)
    setattr(owner, name, counted)


class DyingFile:
    """A file at whose nth write the process is killed, half of the bytes written."""
    left = 0

    def __init__(self, file):
        self.file = file

    def write(self, data):
        DyingFile.left -= 1
        if DyingFile.left == 0:
            self.file.write(bytes(data)[:len(data) // 2])
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


class Arrange:
    """What a forked process is told to do or to suffer; each method is one such thing."""

    def __init__(self, t):
        self.t = t

    def kill(self, call, n):
        """Die at the nth such call of os, or ("write") of the file that torch.save writes."""
        import torch
        if call == "write":
            DyingFile.left, save = n, torch.save
            torch.save = lambda content, file: save(content, DyingFile(file))
        else:
            nth_call(os, call, n, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def before_step(self, act):
        """act(step) before each step."""
        real = self.t.train_step

        def train_step(run):
            act(run.state.step, run)
            return real(run)
        self.t.train_step = train_step

    def signal_at(self, number, *steps):
        """Get the signal in these steps; not amid a save, which SIGSTOP would stop as well."""
        def act(step, run):
            if step in steps:
                run.background.submit(int).result()  # the saves and pictures before it are done
                os.kill(os.getpid(), number)
        self.before_step(act)

    def signal_in(self, number, function):
        """Get the signal when that function of train_gpt2 is called."""
        nth_call(self.t, function, 1, lambda: os.kill(os.getpid(), number))

    def signal_in_batch(self, n):
        """Rank 1, or the only process, gets SIGTERM amid the second validation."""
        def act():
            if self.t.rank() == self.t.world_size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
        real, calls = self.t.validation_loss, []

        def validation_loss(run):
            calls.append(1)
            if len(calls) == 2:
                nth_call(self.t.DataLoaderLite, "batch", n // self.t.world_size(), act)
            return real(run)
        self.t.validation_loss = validation_loss

    def slow(self, seconds):
        self.before_step(lambda step, run: time.sleep(seconds))

    def picture(self, _):
        """matplotlib is there, as a mock."""
        figure = MagicMock()
        figure.savefig = lambda file, dpi: file.write(b"picture" * 10_000)
        sys.modules |= {"matplotlib": MagicMock(__spec__="found"), "matplotlib.ticker": MagicMock(),
                        "matplotlib.figure": MagicMock(Figure=lambda **_: figure)}

    def poison_at(self, poisoned):
        """In that step the gradient is NaN."""
        def act(step, run):
            if step == poisoned:
                weight = run.state.raw_model.transformer.wpe.weight
                weight.register_hook(lambda grad: grad * math.nan)
        self.before_step(act)

    def overflow_after(self, last):
        """That step's update makes a weight infinite, after a finite loss."""
        real = self.t.train_step

        def train_step(run):
            result = real(run)
            if run.state.step == last + 1:
                run.state.raw_model.transformer.wpe.weight.data[0, 0] = math.inf
            return result
        self.t.train_step = train_step

    def raise_at(self, raising, error, text):
        """That step raises an error, of torch's or Python's."""
        import builtins

        import torch
        kind = getattr(torch, error, None) or getattr(builtins, error)

        def act(step, run):
            if step == raising:
                raise kind(text)
        self.before_step(act)

    def no_kernels(self, message):
        """Every kernel fails, as on a GPU that this torch was not built for."""
        import torch

        def ones(*_, **__):
            raise RuntimeError(message)
        torch.ones = ones

    def mistake_on_rank(self, rank, raising):
        """Of all processes, that one alone meets a mistake while training."""
        def act(step, run):
            if (step, self.t.rank()) == (raising, rank):
                raise self.t.UserError("A bad token.")
        self.before_step(act)

    def fail_in(self, function, error):
        import builtins

        def fail():
            raise getattr(builtins, error)
        nth_call(self.t, function, 1, fail)

    def hold_save_until(self, wanted):
        """The thread that saves waits until that step was reported."""
        reported, real = threading.Event(), self.t.report

        def report(run, stream, value, text, step=None):
            real(run, stream, value, text, step)
            if step == wanted:
                reported.set()
        self.t.report = report
        nth_call(self.t, "write_checkpoint", 1, reported.wait)


def serve():
    """Fork a run for each request on stdin, its pid to stdout; for {"wait": pid} its exit status,
    or null while it runs."""
    import filelock  # noqa: F401
    import torch
    import torch._dynamo  # noqa: F401  the first optimizer would import it, for seconds
    import transformers  # noqa: F401
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    import train_gpt2 as t
    torch.set_num_threads(1)
    t.git_commit = lambda: None
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
        elif pid := os.fork():
            print(pid, flush=True)
        else:
            run_forked(t, request)


def run_forked(t, request):
    """In the forked process: be `python train_gpt2.py <words>`."""
    for number, end in ((1, "out"), (2, "err")):
        path = f"{request['out']}.{end}"
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if request["ascii"]:
        sys.stdout.reconfigure(encoding="ascii")
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = ["train_gpt2.py", *request["words"]]
    sys.modules |= dict.fromkeys(request["hide"])
    for name, value in request["arrange"].items():
        getattr(Arrange(t), name)(*(value if isinstance(value, list) else [value]))
    status = 0
    try:
        t.main()
    except SystemExit as e:  # as the interpreter does at its end
        status = e.code if isinstance(e.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    serve()
