"""Checkpoints, resuming, signals, kills, full disks, damaged files: with real processes, killed for real.

Importing torch takes seconds, so most runs are forked off one process that has done it (serve() below); those under
torchrun, and one alone, are started as a user would. GPT2_SOAK=1 adds the long soak.
"""
import json
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import OrderedDict
from pathlib import Path
from unittest.mock import MagicMock

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
STEPS = 30
FLAGS = dict(encoding="bytes", n_layer=1, n_head=2, n_embd=16, T=16, B=4, total_batch_size=128, max_steps=STEPS,
             max_lr=1e-2, warmup_steps=5, save_every=5, eval_every=5, val_tokens=1024, sample_every=0, milestone_every=0,
             hellaswag_every=0, dtype="float32", device="cpu")
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "GIT_OPTIONAL_LOCKS": "0"}


# ------------------------------------------------------------------------------- the process that runs fork from
def nth_call(module, name, n, act):
    """From its nth call on, module.name does act() first."""
    real, calls = getattr(module, name), [0]

    def counted(*args, **kwargs):
        calls[0] += 1
        if calls[0] >= n:
            act()
        return real(*args, **kwargs)
    setattr(module, name, counted)


class DyingFile:
    """A file at whose nth write the process is killed, half of the bytes written."""
    left = 0

    def __init__(self, f):
        self.f = f

    def write(self, data):
        DyingFile.left -= 1
        if DyingFile.left == 0:
            self.f.write(bytes(data)[:len(data) // 2])
            self.f.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.f.write(data)

    def __getattr__(self, name):
        return getattr(self.f, name)


def arrange(t, kill=None, signal_at=None, slow=0.0, picture=False, signal_in=None):
    """Patch a forked process: kill=(call, n) dies at the nth such call, signal_at=(signal, *steps) gets the signal in
    those steps, signal_in=(signal, function) when that function is called; slow: seconds a step takes longer."""
    if kill and kill[0] == "write":
        DyingFile.left, save = kill[1], t.torch.save
        t.torch.save = lambda content, f: save(content, DyingFile(f))
    elif kill:
        nth_call(os, *kill, lambda: os.kill(os.getpid(), signal.SIGKILL))
    if signal_in:
        nth_call(t, signal_in[1], 1, lambda: os.kill(os.getpid(), signal_in[0]))
    step = t.train_step

    def train_step(run, *args):
        time.sleep(slow)
        if signal_at and run.state.step in signal_at[1:]:
            os.kill(os.getpid(), signal_at[0])
        return step(run, *args)
    t.train_step = train_step
    if picture:
        figure = MagicMock()
        figure.savefig = lambda f, dpi: f.write(b"picture" * 10_000)
        sys.modules |= {"matplotlib": MagicMock(), "matplotlib.figure": MagicMock(Figure=lambda **k: figure)}


def serve():
    """Fork a training process for each {"argv", "env", "out", "arrange"} on stdin, its pid to stdout; for {"wait": pid}
    its exit status, or null while it runs."""
    import filelock  # noqa: F401
    import train_gpt2 as t
    import torch._dynamo  # noqa: F401  the first optimizer would import it, for seconds
    t.torch.set_num_threads(1)
    sys.modules |= {"transformers": None, "matplotlib": None}  # they take seconds; the script started whole has them
    t.git_commit = lambda: None
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            continue
        if pid := os.fork():
            print(pid, flush=True)
            continue
        for number, end in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{request['out']}.{end}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.environ.update(request["env"])
        sys.argv = ["train_gpt2.py", *request["argv"]]
        arrange(t, **request["arrange"])
        status = 0
        try:
            t.main()
        except SystemExit as e:  # as the interpreter does at the end, less taking all modules apart
            status = e.code if isinstance(e.code, int) else 1
            print(e.code if isinstance(e.code, str) else "", end="\n" * isinstance(e.code, str), file=sys.stderr)
        except BaseException:
            traceback.print_exc()
            status = 1
        os._exit(status)


class Forked:
    """A run in a forked process: pid, out and err so far, wait() for its exit status (-9 = killed)."""
    server, count, outputs = None, 0, None

    def __init__(self, folder, env=None, arrange=None, **flags):
        if Forked.server is None:
            Forked.server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                             text=True, env=ENV)
        Forked.count += 1
        self.log_dir, self.path = Path(folder), f"{Forked.outputs}/{Forked.count}"
        self.pid = self.ask({"argv": argv(folder, **flags), "env": env or {}, "out": self.path, "arrange": arrange or {}})
        self.status = None

    @staticmethod
    def ask(request):
        print(json.dumps(request), file=Forked.server.stdin, flush=True)
        return json.loads(Forked.server.stdout.readline())

    @property
    def out(self):
        return Path(f"{self.path}.out").read_text() if Path(f"{self.path}.out").exists() else ""

    @property
    def err(self):
        return Path(f"{self.path}.err").read_text() if Path(f"{self.path}.err").exists() else ""

    def ended(self):
        if self.status is None:
            self.status = self.ask({"wait": self.pid})
        return self.status is not None

    def wait_for_stop(self):
        """Until it is at its SIGSTOP; then go_on() is the next."""
        until(lambda: "State:\tT" in Path(f"/proc/{self.pid}/status").read_text(), run=self)

    def go_on(self):
        os.kill(self.pid, signal.SIGCONT)
        until(lambda: "State:\tT" not in Path(f"/proc/{self.pid}/status").read_text())

    def wait(self, timeout=60):
        until(self.ended, timeout)
        return self.status


def argv(folder, **flags):
    return [f"--{k}={v}" for k, v in {"data": Path(folder).parent / "text.txt", "log_dir": folder, **FLAGS, **flags}.items()]


def until(condition, timeout=60, run=None):
    """Wait for condition() to hold."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end and not (run and run.ended() and not condition()), \
            f"in vain for {timeout} s or until its end: {run and (run.out, run.err)}"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the text that all train on; ends the server when all tests are done."""
    folder = tmp_path_factory.mktemp("checkpoint")
    Forked.outputs = tmp_path_factory.mktemp("outputs")
    (folder / "text.txt").write_bytes((ROOT / "input.txt").read_bytes()[:50_000].decode("utf-8", "ignore").encode())
    yield folder
    if Forked.server:
        Forked.server.stdin.close()
        Forked.server.wait(10)
        Forked.server = None


_made = {}


@pytest.fixture
def reference(place):
    """reference(optimizer) -> folder of a run never stopped. Not to be changed."""
    def make(optimizer="adamw"):
        if optimizer not in _made:
            run = Forked(place / f"reference_{optimizer}", optimizer=optimizer)
            assert run.wait() == 0 and not run.err, run.err
            _made[optimizer] = run.log_dir
        return _made[optimizer]
    return make


@pytest.fixture
def halfway(place):
    """halfway(name) -> a folder of its own with a run that a SIGTERM in step 12 stopped: checkpoints 10 and 13."""
    def make(name):
        if "halfway" not in _made:
            run = Forked(place / "halfway", arrange={"signal_at": (signal.SIGTERM, 12)})
            assert run.wait() == 0, run.err
            _made["halfway"] = run.log_dir
        return shutil.copytree(_made["halfway"], place / name)
    return make


def load(path):
    import torch
    return torch.load(path, map_location="cpu", weights_only=True)


def same(a, b):
    """Whether two checkpoints' contents are equal bit for bit."""
    import torch
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def assert_same_run(folder, reference, steps=STEPS):
    """Same log, byte for byte, and same final weights and optimizer state, bit for bit, as the run never stopped."""
    assert (folder / "log.txt").read_bytes() == (reference / "log.txt").read_bytes()
    for name in (f"model_{steps:05d}.pt", f"checkpoint_{steps:05d}.pt"):
        a, b = load(folder / name), load(reference / name)
        for volatile in ("constants", "versions"):
            del a[volatile], b[volatile]
        assert same(a, b), name


def assert_all_whole(folder):
    """No file under a checkpoint's or model's name is half written."""
    import train_gpt2 as t
    for path in folder.glob("*.pt"):
        t.read_checkpoint(path)


def one_line(err):
    """The one line that a failing command says on stderr."""
    assert err.startswith("train_gpt2.py: ") and err.count("\n") == 1 and "Traceback" not in err, err
    return err


def losses(folder):
    """{(step, stream): value} of log.txt, each line there once and in order."""
    lines = [line.split() for line in (folder / "log.txt").read_text().splitlines()]
    keys = [(int(step), stream) for step, stream, _ in lines]
    assert len(set(keys)) == len(keys) and [k[0] for k in keys] == sorted(k[0] for k in keys)
    return {k: float(v) for k, (_, _, v) in zip(keys, lines)}


def assert_close_run(folder, reference):
    ours, theirs = losses(folder), losses(reference)
    assert ours.keys() == theirs.keys()
    assert max(abs(ours[k] - theirs[k]) for k in ours) <= 1e-5


# ------------------------------------------------------------------------------------------------ kill -9, resume
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_moments(place, reference, optimizer, seed):
    rng, folder = random.Random(seed), place / f"killed_{optimizer}_{seed}"
    whole, killed = reference(optimizer), 0
    for _ in range(4):
        run = Forked(folder, optimizer=optimizer, arrange={"slow": 0.03})
        time.sleep(rng.uniform(0.05, 0.6))
        os.kill(run.pid, signal.SIGKILL)
        killed += run.wait() == -signal.SIGKILL
        assert_all_whole(folder)
    assert killed
    assert Forked(folder, optimizer=optimizer).wait() == 0
    assert_same_run(folder, whole)


@pytest.mark.parametrize("call", ["fsync", "replace", "unlink", "write"])
def test_killed_inside_a_save(place, reference, call):
    """Again and again at a random one of the calls that make up a save."""
    rng, folder = random.Random(call), place / f"inside_{call}"
    nth = {"fsync": (3, 9), "replace": (3, 7), "unlink": (1, 9), "write": (1, 900)}[call]
    for _ in range(8):
        run = Forked(folder, arrange={"kill": (call, rng.randint(*nth))})
        if run.wait() == 0:
            break
        assert run.status == -signal.SIGKILL, run.err
        assert_all_whole(folder)
    else:
        assert Forked(folder).wait() == 0
    assert not list(folder.glob("*.part"))
    assert_same_run(folder, reference())


def test_the_script_itself_killed_and_started_again(place, reference):
    """As a user types it, in processes of their own; the end exports to Hugging Face where transformers is."""
    folder, command = place / "script", [sys.executable, str(ROOT / "train_gpt2.py")]
    run = subprocess.Popen(command + argv(folder), env=ENV, stdout=subprocess.DEVNULL)
    until(lambda: (folder / "checkpoint_00010.pt").exists())
    run.kill()
    assert run.wait() == -signal.SIGKILL
    subprocess.run(command + argv(folder), env=ENV, check=True, stdout=subprocess.DEVNULL)
    assert_same_run(folder, reference())
    assert not list(folder.glob("*.part"))


def test_a_checkpoint_made_on_a_gpu_is_read_without_one(tmp_path, monkeypatch):
    import torch
    import train_gpt2 as t
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
    torch.save({"weight": torch.ones(3)}, tmp_path / "gpu.pt")
    assert t.unpickled(tmp_path / "gpu.pt")["weight"].tolist() == [1, 1, 1]


def test_a_line_cut_short_and_lines_of_lost_steps_go(halfway, reference):
    folder = halfway("cut")
    with open(folder / "log.txt", "a") as f:
        f.write("13 train 9.9\n14 train 9.9\n15 tra")
    assert Forked(folder).wait() == 0
    assert_same_run(folder, reference())


# -------------------------------------------------------------------------------------------------------- signals
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [0, 14, STEPS - 1])
def test_a_signal_stops_in_good_order(place, reference, number, step):
    folder = place / f"signal_{number}_{step}"
    run = Forked(folder, arrange={"signal_at": (number, step)})
    assert run.wait() == 0 and not run.err
    assert losses(folder)[step, "train"]  # the step was finished
    if step < STEPS - 1:
        assert f"saved {folder}/checkpoint_{step + 1:05d}.pt" in run.out
        assert f"Stopped by a signal before step {step + 1}" in run.out.splitlines()[-1]
        assert Forked(folder).wait() == 0
    assert_same_run(folder, reference())


def test_ctrl_c_before_the_first_step(place):
    run = Forked(place / "early", arrange={"signal_in": (signal.SIGINT, "build_model")})
    assert run.wait() == 1
    assert "before the first step" in one_line(run.err)


# ------------------------------------------------------------------------------------------------------ torchrun
LONG = dict(max_steps=400, eval_every=50, save_every=20, max_lr=3e-3)


class Torchrun:
    """A run under torchrun with two gloo workers."""

    def __init__(self, folder, *options, **flags):
        self.log_dir, self.out_file = Path(folder), open(f"{folder}.torchrun", "w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *options,
             str(ROOT / "train_gpt2.py"), *argv(folder, **flags)], env=ENV, start_new_session=True,
            stdout=self.out_file, stderr=subprocess.STDOUT)

    @property
    def out(self):
        return Path(self.out_file.name).read_text()

    def workers(self):
        """{rank: pid}"""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = re.search(r"\) \S (\d+)", (folder / "stat").read_text())[1]
                rank = re.search(rb"\0RANK=(\d)", (folder / "environ").read_bytes())
            except (OSError, TypeError):
                continue
            if int(parent) == self.process.pid and rank:
                found[int(rank[1])] = int(folder.name)
        return found

    def wait_for_step(self, step):
        log = self.log_dir / "log.txt"
        until(lambda: log.exists() and f"\n{step} train " in log.read_text() or self.process.poll() is not None, 90)
        assert self.process.poll() is None, self.out

    def wait(self):
        try:
            return self.process.wait(90)
        finally:
            self.out_file.close()
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)


def two_processes(folder, env=None, **flags):
    """Two forked processes with the environment torchrun would give them; their exit statuses."""
    import socket
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    runs = [Forked(folder, env={"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port),
                                "MASTER_ADDR": "127.0.0.1", **(env or {})}, **flags) for rank in range(2)]
    return [run.wait() for run in runs], runs


@pytest.fixture
def long(place):
    """Folder of one process's run with LONG constants, never stopped."""
    if "long" not in _made:
        run = Forked(place / "long", **LONG)
        assert run.wait() == 0, run.err
        _made["long"] = run.log_dir
    return _made["long"]


def test_sigterm_under_torchrun_and_another_number_of_processes(place, long):
    """2 processes until SIGTERM, 1 with another B until SIGTERM, 2 with a third B to the end: the losses are those of
    one process never stopped."""
    folder = place / "chain"
    run = Torchrun(folder, **LONG)
    run.wait_for_step(30)
    run.process.terminate()
    run.wait()
    stopped = max(losses(folder))[0] + 1
    assert f"Stopped by a signal before step {stopped}" in run.out and stopped < LONG["max_steps"]
    assert f"saved {folder}/checkpoint_{stopped:05d}.pt" in run.out and (folder / f"checkpoint_{stopped:05d}.pt").exists()
    assert "exitcode" not in run.out and "train_gpt2.py:" not in run.out  # with which torchrun lists failed workers
    alone = Forked(folder, **{**LONG, "B": 8}, arrange={"signal_at": (signal.SIGTERM, (stopped + 400) // 2)})
    assert alone.wait() == 0, alone.err
    statuses, runs = two_processes(folder, **{**LONG, "B": 2})
    assert statuses == [0, 0], [r.err for r in runs]
    assert f"going on from {folder}/checkpoint_{(stopped + 400) // 2 + 1:05d}.pt" in runs[0].out
    assert_close_run(folder, long)


def test_torchrun_restarts_after_a_killed_worker_and_stops_on_ctrl_c(place, long):
    """--max-restarts goes on from the last checkpoint by itself; Ctrl-C reaches torchrun and its workers at once."""
    folder = place / "restart"
    run = Torchrun(folder, "--max-restarts=3", **LONG, resume=False)  # False is for the first start alone
    run.wait_for_step(50)
    os.kill(run.workers()[1], signal.SIGKILL)
    until(lambda: "going on from" in run.out or run.process.poll() is not None, 90)
    log = folder / "log.txt"
    lines = log.read_text().count("\n")
    until(lambda: log.read_text().count("\n") > lines + 20 or run.process.poll() is not None)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does
    run.wait()
    starts = json.loads((folder / "run.json").read_text())["starts"]
    assert [s["step"] > 0 for s in starts] == [False, True] and starts[1]["step"] % 20 == 0, run.out
    assert not list(folder.glob("before_*"))
    said = run.out[run.out.index("going on from"):]
    assert "Stopped by a signal before step" in said and "exitcode" not in said, said
    statuses, runs = two_processes(folder, **LONG)
    assert statuses == [0, 0] and "going on from" in runs[0].out, [r.err for r in runs]
    assert_close_run(folder, long)


def test_every_process_ends(place):
    """In torch 2.13 one in four hung at its end: gloo's threads wanted the GIL of the thread that waited for theirs."""
    for n in range(5):
        statuses, runs = two_processes(place / f"ends_{n}", max_steps=3, eval_every=3)
        assert statuses == [0, 0], [run.err for run in runs]


# -------------------------------------------------------------------------------------------------- damaged files
class Bomb:
    """Unpickled by a careless reader, it makes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def damaged_files(good, marker):
    """{kind: bytes} of files that are no checkpoint."""
    import io
    import torch
    import zipfile
    content, files = load(good), {}

    def saved(thing, **kwargs):
        buffer = io.BytesIO()
        torch.save(thing, buffer, **kwargs)
        return buffer.getvalue()
    foreign = io.BytesIO()
    with zipfile.ZipFile(foreign, "w") as z:
        z.writestr("readme.txt", "hello")
    files["empty"] = b""
    files["text"] = b"step 13, loss 3.14\n" * 100
    files["zeros"] = bytes(len(good.read_bytes()))
    files["foreign zip"] = foreign.getvalue()
    files["foreign torch file"] = saved({"w": torch.zeros(3)})
    files["a tensor"] = saved(torch.zeros(3))
    files["weights alone"] = saved({k: content[k] for k in ("step", "model", "gpt_config", "encoding", "constants")})
    files["torch bomb"] = saved(content | {"model": Bomb(marker)})
    files["legacy torch bomb"] = saved(content | {"model": Bomb(marker)}, _use_new_zipfile_serialization=False)
    files["pickle bomb"] = pickle.dumps(Bomb(marker))
    files["truncated"] = good.read_bytes()[:-100]
    flipped = bytearray(good.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    files["flipped"] = bytes(flipped)
    return files


def test_the_one_before_a_damaged_checkpoint_is_used(halfway, tmp_path, capfd):
    """Every kind of damage is named, nothing in it is run, and the checkpoint before it is found."""
    import train_gpt2 as t
    folder, marker = halfway("kinds"), tmp_path / "the bomb went off"
    newest = folder / "checkpoint_00013.pt"
    for kind, content in damaged_files(newest, marker).items():
        newest.write_bytes(content)
        assert t.newest_checkpoint(folder) == folder / "checkpoint_00010.pt", kind
        said = capfd.readouterr().out
        assert str(newest) in said and "damaged" in said and said.count("\n") == 1, kind
        assert not marker.exists(), kind
    newest.unlink()
    newest.mkdir()
    assert t.newest_checkpoint(folder) == folder / "checkpoint_00010.pt"


def test_the_bombs_do_go_off_in_careless_hands(halfway, tmp_path):
    import torch
    for kind in ("torch bomb", "legacy torch bomb"):
        marker, path = tmp_path / kind, tmp_path / "bomb.pt"
        path.write_bytes(damaged_files(halfway(f"bomb {kind}") / "checkpoint_00013.pt", marker)[kind])
        torch.load(path, weights_only=False)
        assert marker.exists()


def test_a_run_goes_on_from_the_one_before(halfway, reference, tmp_path):
    folder, marker = halfway("bombed"), tmp_path / "the bomb went off"
    newest = folder / "checkpoint_00013.pt"
    newest.write_bytes(damaged_files(newest, marker)["torch bomb"])
    run = Forked(folder)
    assert run.wait() == 0 and f"{newest} is damaged" in run.out and not marker.exists()
    assert f"going on from {folder}/checkpoint_00010.pt" in run.out
    assert_same_run(folder, reference())


def test_no_whole_checkpoint_is_one_clear_line(halfway):
    folder = halfway("all damaged")
    before = (folder / "log.txt").read_bytes()
    for path in folder.glob("checkpoint_*.pt"):
        path.write_bytes(path.read_bytes()[:5000])
    run = Forked(folder)
    assert run.wait() == 1 and run.out.count("is damaged") == 2
    assert "--resume=False" in one_line(run.err)
    assert (folder / "log.txt").read_bytes() == before
    statuses, runs = two_processes(folder)
    assert statuses == [1, 1] and "--resume=False" in one_line(runs[0].err) and runs[1].err == ""


def read_or_refused(t, path, whole):
    """True if the file reads as whole, False if it is refused; anything else fails."""
    try:
        content = t.read_checkpoint(path)
    except t.Damaged as e:
        assert str(e) and "\n" not in str(e)
        return False
    assert same(content, whole)
    return True


def test_truncated_anywhere_is_refused(reference, tmp_path):
    import train_gpt2 as t
    path, good = tmp_path / "checkpoint_00001.pt", reference() / f"checkpoint_{STEPS:05d}.pt"
    content, rng = good.read_bytes(), random.Random(0)
    for n in {*range(0, 600, 61), *range(len(content) - 600, len(content), 23), len(content) - 1,
              *(rng.randrange(len(content)) for _ in range(60))}:
        path.write_bytes(content[:n])
        assert not read_or_refused(t, path, None), n


def test_flipped_bits_are_refused_or_do_not_matter(reference, tmp_path):
    """A bit in a tensor is always noticed; one in the padding between tensors may not be, and changes nothing."""
    import train_gpt2 as t
    path, good = tmp_path / "checkpoint_00001.pt", reference() / f"checkpoint_{STEPS:05d}.pt"
    content, whole, rng = good.read_bytes(), load(good), random.Random(0)
    directory = content.find(b"PK\x01\x02")
    embedding = content.find(whole["model"]["transformer.wte.weight"].numpy().tobytes())
    assert 0 < embedding < directory
    places = [*(rng.randrange(len(content)) for _ in range(200)), *range(0, 300, 7),
              *(rng.randrange(directory, len(content)) for _ in range(200))]
    for at in [*places, *(embedding + rng.randrange(16 * 384 * 4) for _ in range(50))]:
        damaged = bytearray(content)
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        read = read_or_refused(t, path, whole)
        assert not (read and embedding <= at < embedding + 16 * 384 * 4), at


def test_checkpoints_are_plain(reference):
    """Dicts, lists, numbers, strings and tensors, which weights_only=True reads."""
    import torch

    def check(x, path):
        if type(x) in (dict, OrderedDict):
            for k, v in x.items():
                assert type(k) in (str, int), path
                check(v, f"{path}/{k}")
        elif type(x) in (list, tuple):
            for i, v in enumerate(x):
                check(v, f"{path}/{i}")
        else:
            assert type(x) in (int, float, str, bool, type(None), torch.Tensor), (path, type(x))
    content = load(reference() / f"checkpoint_{STEPS:05d}.pt")
    assert {"model", "optimizers", "scaler", "step", "best_val", "last_val", "constants", "versions"} <= content.keys()
    assert content["step"] == STEPS and content["constants"]["max_lr"] == FLAGS["max_lr"]
    values = {k: v for (_, stream), v in losses(reference()).items() for k in [stream]}
    assert abs(content["last_val"] - values["val"]) < 1e-6 and content["best_val"] <= content["last_val"]
    check(content, "")
    check(load(reference() / f"model_{STEPS:05d}.pt"), "")
    assert "optimizers" not in load(reference() / f"model_{STEPS:05d}.pt")


def test_the_newest_two_are_kept_and_milestones_for_good(place, reference):
    folder = place / "milestones"
    assert Forked(folder, milestone_every=7, save_every=12).wait() == 0
    assert [p.name for p in sorted(folder.glob("model_*"))] == [f"model_{s:05d}.pt" for s in (7, 14, 21, 28, 30)]
    assert [p.name for p in sorted(folder.glob("checkpoint_*"))] == ["checkpoint_00028.pt", "checkpoint_00030.pt"]
    assert_same_run(folder, reference())


def test_the_order_of_checkpoints_is_that_of_their_steps(tmp_path):
    """Six digits sort before five as text. Files that are not ours to count stay out of it."""
    import train_gpt2 as t
    for name in ("99500", "99750", "100000", "99750_backup", "best"):
        (tmp_path / f"checkpoint_{name}.pt").touch()
    assert [p.stem[11:] for p in t.checkpoints(tmp_path)] == ["100000", "99750", "99500"]
    assert [p.stem[11:] for p in t.checkpoints(tmp_path, 99999)] == ["99750", "99500"]


# ------------------------------------------------------------------------------------------------------ full disk
@pytest.fixture(params=["tmpfs", "file size limit"])
def disk(request, place, tmp_path):
    """(folder on it, fill(run), free(run)): a disk that can be filled. Either a small tmpfs, which needs root, or a
    limit on the size of files, by which writing a checkpoint fails."""
    if request.param == "tmpfs":
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True)
        if mounted.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")

        def fill(run):
            with open(tmp_path / "ballast", "ab", buffering=0) as f, pytest.raises(OSError, match="No space left"):
                while True:
                    f.write(bytes(512))
        yield tmp_path, fill, lambda run: (tmp_path / "ballast").unlink()
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
    else:
        def limit(run, size):
            if not run.ended():
                resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        yield tmp_path, lambda run: limit(run, 20_000), lambda run: limit(run, resource.RLIM_INFINITY)


def test_disk_full_while_saving(disk, place, reference):
    """Training goes on and says so loudly, the old checkpoint stays good, the next save is tried, no line is lost."""
    folder, fill, free = disk[0] / "log", *disk[1:]
    run = Forked(folder, data=place / "text.txt", arrange={"signal_at": (signal.SIGSTOP, 12, 22), "picture": True})
    run.wait_for_stop()
    fill(run)
    run.go_on()
    run.wait_for_stop()
    assert run.out.count("NOT SAVED") == 2
    assert re.search(r"!!! NOT SAVED: .* at step \d+ \(.*(No space left|too large)", run.out), run.out
    assert not list(folder.glob("*.part"))
    assert_all_whole(folder)
    assert (folder / "checkpoint_00010.pt").exists()
    free(run)
    run.go_on()
    assert run.wait() == 0 and not run.err, run.err
    assert re.search(r"NOT SAVED.*saved", run.out, re.S)
    assert_same_run(folder, reference())


@pytest.mark.parametrize("leaving", [True, False])
def test_disk_full_to_the_end(disk, place, reference, leaving):
    """What can't be saved at the end, or on a signal, is said in a line; the same command goes on later."""
    folder, fill, free = disk[0] / "log", *disk[1:]
    run = Forked(folder, data=place / "text.txt", arrange={"signal_at": (signal.SIGSTOP, 12)})
    run.wait_for_stop()
    fill(run)
    if leaving:
        os.kill(run.pid, signal.SIGTERM)
    run.go_on()
    assert run.wait() == 1
    assert re.search(r"at step \d+ \(.*(No space left|too large)", one_line(run.err))
    assert_all_whole(folder)
    free(run)
    again = Forked(folder, data=place / "text.txt")
    assert again.wait() == 0 and "going on from" in again.out, again.err
    assert_same_run(folder, reference())


def unwritable(tmp_path):
    """A folder in which nothing can be made: read-only for root too, where mounting is allowed."""
    folder = tmp_path / "read_only"
    folder.mkdir()
    if os.geteuid():
        folder.chmod(0o555)
    elif subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)], capture_output=True).returncode:
        return None
    return folder


def test_log_dir_that_cannot_be_written(place, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "text.txt").symlink_to(place / "text.txt")
    for log_dir in (tmp_path / "file", tmp_path / "file" / "log"):
        run = Forked(tmp_path / "x", log_dir=log_dir)
        assert run.wait() == 1
        assert f"log_dir={log_dir}" in one_line(run.err)
    if folder := unwritable(tmp_path):
        run = Forked(tmp_path / "x", log_dir=folder / "log")
        again = Forked(tmp_path / "x", log_dir=folder)
        assert run.wait() == 1 and f"log_dir={folder}" in one_line(run.err)
        assert again.wait() == 1 and f"log_dir={folder}" in one_line(again.err)
        if not os.geteuid():
            subprocess.run(["umount", str(folder)], check=True)


def test_disk_full_at_the_start_is_one_line(halfway, reference):
    """The checkpoint is there, but not even the log can be written."""
    folder = halfway("full at start")
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.name != ".lock"}
    run = Forked(folder, arrange={"signal_in": (signal.SIGSTOP, "open_log")})
    run.wait_for_stop()
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))  # enough for stderr
    run.go_on()
    assert run.wait() == 1
    assert f"log_dir={folder}" in one_line(run.err)
    assert before == {p.name: p.read_bytes() for p in folder.iterdir() if p.name != ".lock"}
    assert Forked(folder).wait() == 0
    assert_same_run(folder, reference())


# ---------------------------------------------------------------------------------------------- constants and data
OTHER = dict(encoding="gpt2", shuffle=False, seed=7, total_batch_size=256, T=8, n_layer=2, n_head=4, n_embd=32,
             init_from="gpt2", optimizer="muon", max_lr=0.5, min_lr=0.25, warmup_steps=6, max_steps=31, weight_decay=0.2,
             grad_clip=2.0, muon_lr_ratio=3.0, lr_shape="linear")


def test_every_other_constant_is_refused_with_both_values(reference):
    import dataclasses
    import train_gpt2 as t
    path = reference() / f"checkpoint_{STEPS:05d}.pt"
    saved = load(path)
    cfg, data = t.Config(**saved["constants"]), saved["fingerprint"]
    assert OTHER.keys() | t.FREE_TO_CHANGE | {"data"} == {f.name for f in dataclasses.fields(t.Config)}
    for name, value in OTHER.items():
        with pytest.raises(t.UserError) as e:
            t.load_checkpoint(path, dataclasses.replace(cfg, **{name: value}), data)
        line = str(e.value)
        assert f"{name} was {getattr(cfg, name)!r}, is {value!r}" in line and line.count(" was ") == 2, line
        assert "Put them back" in line and "--log_dir" in line and "--resume=False" in line and "\n" not in line
    with pytest.raises(t.UserError, match=f"data was '{re.escape(data)}', is 'another'"):
        t.load_checkpoint(path, cfg, "another")
    t.load_checkpoint(path, dataclasses.replace(cfg, data="elsewhere"), data)


def test_changed_constants_refused_by_the_script(halfway, reference):
    folder = halfway("changed")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    run = Forked(folder, max_lr=0.5, seed=7)
    assert run.wait() == 1
    assert "max_lr was 0.01, is 0.5; seed was 1337, is 7" in one_line(run.err)
    statuses, runs = two_processes(folder, grad_clip=0.5)
    assert statuses == [1, 1] and "grad_clip was 1.0, is 0.5" in one_line(runs[0].err) and runs[1].err == ""
    assert before == {p.name: p.read_bytes() for p in folder.iterdir()}
    assert Forked(folder).wait() == 0
    assert_same_run(folder, reference())


def test_constants_of_speed_and_place_may_change(halfway, reference):
    folder = halfway("free")
    elsewhere = folder.rename(folder.with_name("moved"))
    run = Forked(elsewhere, B=8, dtype="bfloat16", compile=False, save_every=3, milestone_every=11, sample_every=10,
                 sample_tokens=3, sample_prompt="x", eval_every=6, val_tokens=512, grad_comm="bfloat16", device="auto",
                 env={"CUDA_VISIBLE_DEVICES": ""})
    assert run.wait() == 0, run.err
    assert f"going on from {elsewhere}/checkpoint_00013.pt" in run.out
    ours, theirs = losses(elsewhere), losses(reference())
    assert all(abs(ours[s, "train"] - theirs[s, "train"]) < 0.05 for s in range(STEPS))


def test_the_same_shards_elsewhere_are_the_same_data(place):
    import numpy as np
    rng, first, second = np.random.default_rng(0), place / "shards", place / "moved_shards"
    first.mkdir()
    for split, number, n in (("val", 0, 2000), ("train", 1, 9000), ("train", 2, 7000)):
        np.save(first / f"x_{split}_{number:06d}.npy", rng.integers(0, 256, n).astype(np.uint16))
    folder = place / "on_shards"
    assert Forked(folder, data=first, arrange={"signal_at": (signal.SIGTERM, 7)}).wait() == 0
    first.rename(second)
    assert Forked(folder, data=second, arrange={"signal_at": (signal.SIGTERM, 12)}).wait() == 0
    np.save(second / "x_train_000003.npy", rng.integers(0, 256, 5000).astype(np.uint16))
    run = Forked(folder, data=second)
    assert run.wait() == 1 and re.search("data was '16,000 tokens.*, is '21,000 tokens", one_line(run.err))
    run = Forked(folder)
    assert run.wait() == 1 and "data was " in one_line(run.err)


# -------------------------------------------------------------------------------------------- finished, set aside
def snapshot(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.name != ".lock"}


def test_a_finished_run_says_so(place, reference):
    folder = shutil.copytree(reference(), place / "finished")
    before = snapshot(folder)
    run = Forked(folder)
    assert run.wait() == 0 and f"finished: {STEPS} steps" in run.out and not run.err
    statuses, _ = two_processes(folder)
    assert statuses == [0, 0]
    assert snapshot(folder) == before


def test_resume_false_sets_results_aside(place, reference):
    folder = shutil.copytree(reference(), place / "aside")
    first = snapshot(folder)
    assert Forked(folder, resume=False, seed=1).wait() == 0
    second = snapshot(folder)
    assert snapshot(folder / "before_1") == first and second["log.txt"] != first["log.txt"]
    run = Forked(folder, resume=False)
    assert run.wait() == 0 and f"{folder}/before_2" in run.out
    assert snapshot(folder / "before_1") == first and snapshot(folder / "before_2") == second
    assert_same_run(folder, reference())
    shutil.rmtree(folder / "before_1")
    assert Forked(folder, resume=False, arrange={"signal_at": (signal.SIGTERM, 2)}).wait() == 0
    assert snapshot(folder / "before_2") == second
    for path in folder.glob("checkpoint_*.pt"):
        path.unlink()
    (folder / "model_00030.pt").touch()
    assert Forked(folder, arrange={"signal_at": (signal.SIGTERM, 2)}).wait() == 0
    assert (folder / "before_3" / "model_00030.pt").exists()  # weights without a checkpoint: no run to go on with


def test_resume_false_holds_for_torchruns_first_start_alone(halfway, reference):
    folder = halfway("again")
    assert Forked(folder, resume=False, env={"TORCHELASTIC_RESTART_COUNT": "1"}).wait() == 0
    assert_same_run(folder, reference())
    assert not list(folder.glob("before_*"))


def test_what_a_killed_save_left_is_cleared(halfway, reference):
    folder = halfway("left over")
    (folder / "checkpoint_00012.pt.part").write_bytes(b"half")
    assert Forked(folder).wait() == 0
    assert not list(folder.glob("*.part"))


def test_the_second_of_two_runs_refuses(place, reference):
    folder = place / "two"
    first = Forked(folder, arrange={"signal_at": (signal.SIGSTOP, 2)})
    first.wait_for_stop()  # or it might end too soon
    for flags in ({}, {"resume": False}):
        second = Forked(folder, **flags)
        assert second.wait() == 1
        assert "Another run is at work" in one_line(second.err)
    statuses, runs = two_processes(folder)
    assert statuses == [1, 1] and "Another run is at work" in one_line(runs[0].err) and runs[1].err == ""
    first.go_on()
    assert first.wait() == 0
    assert_same_run(folder, reference())


# ------------------------------------------------------------------------------------------------------------ soak
@pytest.mark.skipif(not os.environ.get("GPT2_SOAK"), reason="takes minutes: set GPT2_SOAK=1")
def test_soak(place):
    """Twenty kills of the script itself at random moments, Muon and a longer run; then it ends as if nothing had."""
    flags = dict(LONG, optimizer="muon", max_steps=3000, save_every=25, milestone_every=100)
    command = [sys.executable, str(ROOT / "train_gpt2.py")]
    assert Forked(place / "soak_reference", **flags).wait(300) == 0
    folder, rng, kills = place / "soak", random.Random(math.pi), 0
    while kills < 20:
        run = subprocess.Popen(command + argv(folder, **flags), env=ENV, stdout=subprocess.DEVNULL)
        log = folder / "log.txt"
        before = log.stat().st_mtime_ns if log.exists() else 0
        until(lambda: log.exists() and log.stat().st_mtime_ns != before)  # it trains
        time.sleep(rng.uniform(0, 0.9))
        run.kill()
        if run.wait() == 0:
            break
        kills += 1
        assert_all_whole(folder)
    assert kills == 20, "the run ended before the kills did: make it longer"
    subprocess.run(command + argv(folder, **flags), env=ENV, check=True, stdout=subprocess.DEVNULL)
    assert_same_run(folder, place / "soak_reference", 3000)


if __name__ == "__main__":
    serve()
