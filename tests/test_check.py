"""Tests of check.py and preflight.py: what they say about edits and about faults of a machine."""
import importlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import check
import preflight
import pytest
import torch
from conftest import ENV, ROOT, Started, flags, ids, run_script, shake, small

FLAGS = flags(max_steps=8, data=ROOT / "input.txt", device="cpu")

@pytest.fixture
def run_tool(tmp_path, monkeypatch, capsys):
    """Return a function that calls main() of check.py or preflight.py. Their runs are forked.

    It returns the exit status, {name of a check: its line}, and all lines. arrange: see Started.
    """
    def run_tool(tool, *words, arrange=()):
        forks = vars(subprocess) | {"Popen": lambda command, env, **options: Started(
            *command[1:], env=env, arrange=arrange)}
        monkeypatch.setattr(check, "subprocess", SimpleNamespace(**forks))
        monkeypatch.setattr(sys, "argv", ["", *FLAGS, *words])
        with pytest.raises(SystemExit) as exited:
            sys.exit(tool.main())
        out = capsys.readouterr().out
        assert not list(tmp_path.glob("tmp*"))  # nothing is left behind
        return exited.value.code, {line[:11].strip(): line for line in out.splitlines()}, out
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield run_tool
    for number, handler in before.items():
        signal.signal(number, handler)

@pytest.fixture
def edit(tmp_path, monkeypatch):
    """Return a function that lets check.py use a copy of the scripts, with texts replaced."""
    def edit(replacements):
        source = (ROOT / "train_gpt2.py").read_text()
        for old, new in replacements.items():
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        for name in ("fineweb.py", "hellaswag.py"):
            shutil.copy(ROOT / name, tmp_path)
        (tmp_path / "train_gpt2.py").write_text(source)
        monkeypatch.setattr(check, "ROOT", tmp_path)
    return edit

# ---- check.py
def test_the_unedited_script_keeps_its_promises(tmp_path, run_tool, edit):
    edit({})
    for words in "init", "add .", "-c user.name=a -c user.email=a commit -m a":
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True, env=ENV)
    status, lines, out = run_tool(check, "--dropout=0.1")
    assert status == 0 and all(lines[name].endswith(": holds") for name in check.CHECKS), out
    facts = [line.split()[-2:] for line in out.splitlines()[-6:]]
    assert all(then == here for then, here in facts[:5]), out  # all except for the time

# {edit: ({check: a part of its line, by default "holds"}, {text: its replacement})}
EDITS = {
    "random factors, an untrained weight, a checkpoint that cannot be loaded": ({
        "same": "BROKEN", "evaluation": "BROKEN", "resume": "cannot be read as a checkpoint",
        "B": "", "processes": "", "saved": "not checked (",
        "samples": "not checked (train_gpt2.py, line", "causal": "BROKEN (in training mode, tokens",
        "trains": "BROKEN (transformer.ln_f.weight is in 0 optimizer groups"}, {
        "        x = self.dropout(x)\n":
            "        x = self.dropout(x) * (1 + self.training * 0.1 * np.random.rand())\n",
        "if p.requires_grad:": "if p.requires_grad and 'ln_f.weight' not in name:",
        "        if temperature == 0:\n": "        if temperature == 0 and 1 / 0:\n",
        '"scaler": run.scaler.state_dict(),':
            '"scaler": run.scaler.state_dict(), "path": Path("x"),'}),
    "a counter that is not saved": (dict.fromkeys(
        "evaluation resume B processes saved samples causal loss".split(), "BROKEN"), {
        "        x = self.transformer.ln_f(x)\n":
            "        self.calls = getattr(self, 'calls', 0) + 1\n"
            "        x = self.transformer.ln_f(x) * math.sin(self.calls * (1 + RANK))\n"}),
    "wrong gradients, and half of the optimizer's state is lost": ({
        "resume": "BROKEN", "B": "BROKEN (norm of step 0", "processes": "BROKEN"}, {
        "run.scaler.scale(loss / len(starts))": "run.scaler.scale(loss)",
        "WORLD_SIZE > 1 and row != starts[-1]": "WORLD_SIZE > 1",
        "if p in own and": "if p in own and p.dim() > 1 and"})}

@pytest.mark.parametrize("name", EDITS)
def test_an_edit_that_breaks_promises_is_reported(run_tool, edit, name):
    expected, replacements = EDITS[name]
    edit(replacements)
    status, lines, out = run_tool(check)
    assert status == 1 and "no commit is here" in out, out
    for check_name in check.CHECKS:
        assert expected.get(check_name, ": holds") in lines[check_name], out

def test_the_exit_status_is_2_if_a_check_cannot_be_made(capsys):
    def fail():
        raise check.Failed("no memory")
    base = check.Result({}, [{"last": {}} | dict.fromkeys(check.CHECKS, "")])
    runs = dict.fromkeys(("same", "evaluation", "resume"), lambda: base)
    assert check.print_checks(base, runs | {"allowed": fail}) == 2
    assert capsys.readouterr().out.count(": not checked (no memory)") == 2  # B and processes

def test_a_script_that_does_not_train_is_reported(run_tool, edit):
    edit({"        x = self.transformer.ln_f(x)\n": "        x = x.foo()\n"})
    message = run_tool(check)[0]
    assert "does not train: train_gpt2.py, line" in message and "x = x.foo()" in message

def test_logits_that_depend_on_later_tokens_or_on_no_earlier_one_are_found():
    model = shake(small())
    assert check.problem_with_logits(model, ids()) == ""
    forward = model.forward
    model.forward = lambda idx: (forward(idx)[0] + forward(idx)[0].mean(1, keepdim=True), None)
    assert "change earlier logits" in check.problem_with_logits(model, ids())
    model.forward = lambda idx: (forward(idx.T)[0].transpose(0, 1), None)
    assert "does not change the last logits" in check.problem_with_logits(model, ids())

def test_parameters_that_do_not_train_are_found():
    model = small()
    first, optimizer = check.checksums(model), torch.optim.SGD(model.parameters(), lr=0.1)
    run = SimpleNamespace(model=model, optimizers=[optimizer])
    assert check.problem_with_parameters(run, first).endswith("has not changed")
    shake(model)
    assert check.problem_with_parameters(run, first) == ""
    run.optimizers = [optimizer, optimizer]
    assert "is in 2 optimizer groups" in check.problem_with_parameters(run, first)
    model.requires_grad_(False)
    assert check.problem_with_parameters(run, first) == ""  # frozen

def test_the_first_difference_of_two_runs_is_named():
    a = {(0, "train"): 1.0, (1, "train"): 2.0, (1, "val"): 3.0}
    allowed = check.rounding(a, a | {(1, "val"): 3.03})  # by 1 %, so by 5 %
    for change, limits, expected in (
            ({(1, "train"): 2.09}, allowed, ""), ({(0, "hella"): 1.0}, None, ""),
            ({(1, "train"): 2.11}, allowed, "train of step 1 is 2 and 2.11"),
            ({(0, "train"): 1.1}, allowed, "train of step 0 is 1 and 1.1"),
            ({(1, "val"): 3.000001}, None, "val of step 1 is 3 and 3.000001"),
            ({(1, "val"): float("nan")}, allowed, "val of step 1 is 3 and nan")):
        runs = (check.Result(log, [{"last": {}}]) for log in (a, a | change))
        assert check.difference(*runs, limits) == expected

# ---- Both
@pytest.mark.parametrize("tool", ["check", "preflight"])
def test_a_wrong_flag_is_one_sentence(tool):
    done = run_script(f"tests/{tool}.py", "--n_head=3", "--device=cpu")
    assert done.returncode == 1 and not done.stdout and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"{tool}.py: ")
    assert "n_embd=128 must be a multiple of n_head=3" in done.stderr

def test_a_run_that_takes_too_long_is_ended(tmp_path):
    runs = check.Runs(tmp_path, FLAGS, ENV)
    runs.timeout = 0
    with pytest.raises(check.Failed, match="it was ended after 0 s"):
        runs.several(2)
    assert not list(tmp_path.iterdir())

@pytest.mark.parametrize("tool, number", [(check, signal.SIGTERM), (preflight, signal.SIGINT)])
def test_a_signal_ends_all_runs(tmp_path, run_tool, monkeypatch, tool, number):
    def sleep(seconds):
        if list(tmp_path.glob("*/base/log.txt")):
            signal.raise_signal(number)
        time.sleep(seconds)
    monkeypatch.setattr(check, "time", SimpleNamespace(**vars(time) | {"sleep": sleep}))
    assert run_tool(tool, "--max_steps=100000")[0] == 128 + number

# ---- preflight.py
def test_a_machine_in_order(run_tool):
    status, lines, out = run_tool(preflight, "--max_steps=1000000", "--dropout=0.1")
    for name in ("machine", "one process", "all GPUs", "resume"):
        assert lines[name][13:].startswith("ok "), out
    assert status == 0 and "2 processes have the losses" in lines["all GPUs"]
    assert "bit for bit" in lines["resume"]
    assert "--max_steps=1000000 --dropout=0.1` will take about" in out.splitlines()[-1]

def put_in(check, fault):
    """Call fault(module train_gpt2, run) before the training of each run."""
    t = importlib.import_module("train_gpt2")
    train = t.train
    t.train = lambda run: (fault(t, run), train(run))

def other_gradients(t, run):
    for p in run.model.parameters():
        p.register_hook(lambda gradient: gradient * (1 + 0.01 * t.RANK))

def other_weights(t, run):
    run.model.transformer.wte.weight.data[-1] += t.RANK  # of no token, so losses are the same

def wrong_rows(t, run):
    batch = run.train_loader.batch
    if run.step:
        run.train_loader.batch = lambda row, *args: batch(row + 1, *args)

def first_step(t, run):
    run.step = 0

def wrong_direction(t, run):
    for group in run.optimizers[0].param_groups:
        group["lr"] *= -1

def little_memory(t, run):
    if run.cfg.B > 1:
        raise torch.OutOfMemoryError("CUDA out of memory")

@pytest.mark.parametrize("fault, name, part", [
    (other_gradients, "all GPUs", "norm of step 0 is"),
    (other_weights, "all GPUs", "the last weights transformer.wte.weight differ"),
    (wrong_rows, "resume", "of step 4 is"),
    (first_step, "resume", "did not go on at its checkpoint"),
    (wrong_direction, "one process", "the loss is 5")])
def test_a_fault_is_named(run_tool, fault, name, part):
    status, lines, out = run_tool(preflight, arrange=[(put_in, fault)])
    assert status == 1 and out.endswith(f"This machine is not ready: {name} failed.\n"), out
    assert lines[name][13:].startswith("FAIL ") and part in lines[name], out

def test_a_smaller_b_is_advised_if_memory_runs_out(run_tool):
    _, lines, out = run_tool(preflight, arrange=[(put_in, little_memory)])
    assert "--B=4 does not fit, so use --B=1" in lines["one process"] and "--B=1` will" in out, out
