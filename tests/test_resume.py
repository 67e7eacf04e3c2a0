"""Tests of checkpoints: runs that are stopped or killed and then resumed, and what is kept.

The runs are real processes, which are killed. Which steps are affected is random, with the seed
GPT2_SEED (by default 0).
"""
import dataclasses
import io
import itertools
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
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import (
    ENV, ROOT, STEPS, TINY, Bomb, Forked, assert_close_logs, assert_same, before_steps, flags,
    last_checkpoint, load, need_gpus, one_line, poison_at, read_log, signal_at, signal_on_rank,
    slow_saves, succeed, train, write_text)

import train_gpt2 as t

start = partial(Forked, optimizer="muon", dropout=0.1)  # Muon's runs also use AdamW

@pytest.fixture(scope="module")
def reference(place):
    """Return the folder of a run that was never stopped. Tests must not change it."""
    return succeed(start(place / "reference")).log_dir

@pytest.fixture(scope="module")
def halfway(place):
    """Return a function that copies a run to place / name and returns the copy.

    The run was stopped by a SIGTERM in step 12. It has the checkpoints of steps 10 and 13.
    """
    run = succeed(start(place / "stopped", arrange=[(signal_at, signal.SIGTERM, 12)]))
    assert names(run.log_dir) == [10, 13]
    return lambda name: shutil.copytree(run.log_dir, place / name)

def names(folder):
    """Return the steps of the checkpoints in a folder. Assert that each checkpoint is readable."""
    found = t.find_checkpoints(folder)
    for step, path in found.items():
        assert load(path)["step"] == step
    return sorted(found)

def snapshot(folder):
    """Return {name: content} of the files in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}

# ---- A run that is stopped or killed and resumed is identical to one that was not
def kill_in(t, name, n):
    """Kill the process at the nth call of os.fsync, os.replace or Path.unlink."""
    owner = Path if name == "unlink" else os
    real, calls = getattr(owner, name), itertools.count(1)

    def counted(*args, **words):
        if next(calls) == n:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **words)
    setattr(owner, name, counted)

def kill_while_writing(t, n):
    """Kill the process when half of the nth checkpoint is in its file."""
    real, calls = torch.save, itertools.count(1)

    def save(content, file):
        real(content, whole := io.BytesIO())
        if next(calls) == n:
            file.write(whole.getvalue()[:len(whole.getvalue()) // 2])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        file.write(whole.getvalue())
    torch.save = save

def kill_after_save(t, step):
    """Kill the process before this step, but let it first finish the save in progress."""
    def act(run):
        run.last_save.result()
        os.kill(os.getpid(), signal.SIGKILL)
    before_steps(t, [step], act)

def ignore(t, number):
    signal.signal(number, signal.SIG_IGN)

RANDOM = random.Random(int(os.environ.get("GPT2_SEED", 0)))
MIDDLE = RANDOM.randrange(6, 24)  # a step that is neither among the first nor among the last ones
KILLS = sorted(RANDOM.sample(range(STEPS), 4))
STOPPED = f"Stopped by a signal at step {MIDDLE + 1}. To resume the run, repeat"

# {name: (actions that stop the run, one list per start; exit status; words on stdout)}. Each start
# also writes config.json and a copy of the script, and those are calls 1 and 2 of kill_in
STOPS = {
    "killed": ([[(signal_at, signal.SIGKILL, step)] for step in KILLS], -signal.SIGKILL, ""),
    "half written": ([[(kill_while_writing, n)] for n in (2, 1)], -signal.SIGKILL, ""),
    "slow save": ([[(slow_saves, 0.3), (kill_after_save, 9)]], -signal.SIGKILL, "00005.pt"),
    "fsync": ([[(kill_in, "fsync", n)] for n in (5, 2, 3)], -signal.SIGKILL, ""),
    "replace": ([[(kill_in, "replace", n)] for n in (4, 1, 5)], -signal.SIGKILL, ""),
    "unlink": ([[(kill_in, "unlink", n)] for n in (6, 5, 4)], -signal.SIGKILL, ""),
    "SIGTERM": ([[(signal_at, signal.SIGTERM, MIDDLE)]], 0, STOPPED),
    "SIGINT": ([[(signal_at, signal.SIGINT, MIDDLE)]], 0, STOPPED),
    "SIGHUP": ([[(signal_at, signal.SIGHUP, MIDDLE)]], 0, STOPPED),
    "first and last step": ([[(signal_at, signal.SIGTERM, step)] for step in (0, STEPS - 1)], 0,
                            "Stopped by a signal at step "),
    "nohup": ([[(ignore, signal.SIGHUP), (signal_at, signal.SIGHUP, MIDDLE)]], 0, "Done."),
    "second Ctrl-C": ([[(signal_at, signal.SIGINT, MIDDLE, MIDDLE)]], -signal.SIGINT,
                      "Stopping after this step")}

@pytest.mark.parametrize("stop", STOPS)
def test_a_stopped_run_is_resumed_by_repeating_its_command(place, reference, stop):
    """It ends with the losses, weights and optimizer states of a run that was never stopped.

    After each stop, every checkpoint can be read.
    """
    folder, (starts, status, words) = place / f"stopped by {stop}", STOPS[stop]
    for arrange in starts:
        run = start(folder, arrange=arrange)
        assert run.wait() == status and not run.err, (run.out, run.err)
        assert words in run.out
        names(folder)
    if status == 0:  # nothing was lost
        assert f"from step {max(names(folder))} on" in start_again(folder).out
    else:
        start_again(folder)
    assert_same(folder, reference)

def start_again(folder):
    return succeed(start(folder))

def test_a_signal_to_one_of_two_processes_stops_both(place, reference):
    """Both stop after the same step. One process can continue the run, with another B."""
    words = dict(arrange=[(signal_on_rank, 1, signal.SIGTERM, MIDDLE)], dropout=0.0)
    plain = succeed(start(place / "plain", dropout=0.0)).log_dir
    assert STOPPED in train(2, place / "two", optimizer="muon", B=2, **words).out
    succeed(start(place / "two", dropout=0.0, B=8))
    assert_close_logs(place / "two", plain)

def test_two_signals_at_once_under_torchrun_save_and_stop_the_run(place, reference):
    """torchrun sends each Ctrl-C twice."""
    folder = place / "twice"
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
           "LOCAL_RANK": "0"}
    run = start(folder, env=env, arrange=[(signal_at, signal.SIGINT, MIDDLE, MIDDLE)])
    assert STOPPED in succeed(run).out
    start_again(folder)
    assert_same(folder, reference)

TORCHRUN = """
import os, signal, sys
sys.path.append({tests!r})
sys.modules["transformers"] = sys.modules["matplotlib"] = None  # importing them takes seconds
import train_gpt2 as t
from conftest import before_steps, until

def die(run):
    os.kill(os.getpid(), signal.SIGKILL)

def hang_up(run):
    if t.RANK == 0:
        os.kill(os.getppid(), signal.SIGHUP)  # torchrun passes it on
    until(lambda: run.signalled)

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    before_steps(t, [20], hang_up)
elif t.RANK == 1:
    before_steps(t, [12], die)
t.main()
"""

def test_torchrun_restarts_a_run_and_passes_signals_on(tmp_path, place, reference):
    """With --max-restarts, torchrun resumes a run after one of its processes was killed.

    If the terminal is closed, torchrun gets a SIGHUP. The run is saved, stops, and can be resumed.
    """
    need_gpus(2)
    folder, script = place / "torchrun", tmp_path / "script.py"
    script.write_text(TORCHRUN.format(tests=str(ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         "--max-restarts=1", script, *flags(folder, optimizer="muon", dropout=0.1)], cwd=tmp_path,
        capture_output=True, text=True, env=ENV | {"PYTHONPATH": str(ROOT)}, timeout=180)
    assert ", from step 10 on" in done.stdout, done.stderr
    assert "Stopped by a signal at step 21. " in done.stdout
    # No process was aborted when it exited. (torchrun itself fails if it gets a signal)
    assert not re.search("Fatal Python error|terminate called", done.stderr), done.stderr
    train(2, folder, optimizer="muon", dropout=0.1)
    assert_close_logs(folder, reference)

# ---- What is saved when
def rise_after(t, step):
    """Replace the validation loss by one that is lowest at `step`."""
    t.validation_loss = lambda run: 1 + abs(run.step - step) / 10

def test_the_best_checkpoint_is_kept_exported_and_used(place):
    """The newest checkpoint, the best one, and those at multiples of keep_every are kept.

    Stopping the run does not change which one is the best. Samples, the export and init_from use
    it, and a run with init_from may itself be best at step 0.
    """
    words = dict(eval_every=3, keep_every=10, hide=["matplotlib"])
    run = start(place / "best", arrange=[(rise_after, 9), (signal_at, signal.SIGTERM, 16)], **words)
    assert succeed(run) and names(run.log_dir) == [9, 10, 17]
    words["keep_every"] = 0  # what an earlier value has kept is not deleted
    run = succeed(start(place / "best", arrange=[(rise_after, 9)], **words))
    best = run.log_dir / "checkpoint_00009.pt"
    assert names(run.log_dir) == [9, 10, 30] and f"exported {best} to" in run.out
    assert last_checkpoint(run.log_dir)["best_step"] == 9
    sampled = succeed(Forked(None, without=TINY, log_dir=run.log_dir, sample=1, sample_tokens=5))
    assert sampled.out.startswith(f"Samples from {best}:")
    shape = ("n_layer", "n_head", "n_embd", "encoding")
    tuned = succeed(Forked(place / "tuned", without=shape, init_from=run.log_dir, max_steps=10,
                           arrange=[(rise_after, 0)]))
    assert names(tuned.log_dir) == [0, 10] and "settings  FINETUNE" in tuned.out
    first, source = load(tuned.log_dir / "checkpoint_00000.pt"), load(best)
    torch.testing.assert_close(first["model"], source["model"], rtol=0, atol=0)

def fail_at_step_10(t):
    """Let the second evaluation on HellaSwag, and the first sample, fail."""
    import hellaswag
    error = RuntimeError("no answer")
    hellaswag.prepare_on_all_ranks = lambda *args: ["a question"]
    hellaswag.evaluate = mock.Mock(side_effect=[mock.Mock(acc_norm=0.5), error])
    t.sample_text = mock.Mock(side_effect=error)

@pytest.mark.parametrize("name", ["sample_every", "hellaswag_every"])
def test_a_step_is_saved_before_it_is_sampled_and_scored(place, name):
    """If these fail, no step is lost. The save in progress is completed."""
    run = start(place / f"failed {name}", arrange=[(fail_at_step_10,)], eval_every=10, **{name: 10})
    assert run.wait() == 1 and run.err.endswith("RuntimeError: no answer\n"), run.err
    assert names(run.log_dir) == [10]

def limit_files(t, first, last=STEPS):
    """In these steps, no file may become larger than 20 kB, as if the disk were full."""
    def act(run):
        small = 20_000 if run.step < last else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (small, resource.RLIM_INFINITY))
    before_steps(t, [first, last], act)

def test_a_full_disk_does_not_stop_training(place, reference):
    """A line reports each save that fails, and earlier checkpoints are kept.

    The run ends with an error, because its last step is not saved. When there is space again, the
    same command completes the run.
    """
    run = start(place / "full", arrange=[(limit_files, 12)])
    assert run.wait() == 1
    one_line(run.err, f"Step {STEPS} is not saved in log_dir={run.log_dir}: free some space")
    assert re.search("!!! NOT SAVED at step 15: .*too large.*   29/30 train", run.out, re.S)
    assert run.out.count(" saved ") == 2  # at steps 5 and 10
    assert names(run.log_dir) == [10] and not list(run.log_dir.glob("*.part"))
    start_again(run.log_dir)
    assert_same(run.log_dir, reference)

def save_fails(t, step):
    """Let the copy of this step's checkpoint fail, and every deletion of an old one."""
    real = t.serialized

    def serialized(content):
        if isinstance(content, dict) and content.get("step") == step:
            raise MemoryError("no memory")
        return real(content)
    unlink = Path.unlink

    def unlink_others(path, **words):
        if path.suffix == ".pt":
            raise PermissionError("Operation not permitted")
        unlink(path, **words)
    t.serialized, Path.unlink = serialized, unlink_others

def test_errors_while_saving_or_deleting_do_not_stop_training(place):
    """One line names the cause. If the last step is not saved, the exit status is 1."""
    run = start(place / "errors", arrange=[(save_fails, 10)])
    assert run.wait() == 0 and run.out.count("NOT SAVED") == 1, run.err
    assert "!!! NOT SAVED at step 10: no memory" in run.out
    assert f"{run.log_dir}/checkpoint_00005.pt cannot be deleted: Operation not permit" in run.out
    assert names(run.log_dir) == [5, 15, 20, 25, 30]
    run = start(place / "last", arrange=[(save_fails, 30)])
    assert run.wait() == 1
    one_line(run.err, "Step 30 is not saved")

def break_weight_after(t, step):
    """Let a weight be NaN after this step, as if the loss had not shown it."""
    real = t.train_step

    def train_step(run):
        result = real(run)
        if run.step == step + 1:
            next(run.model.parameters()).data[0] = math.nan
        return result
    t.train_step = train_step

def test_weights_with_nan_are_not_saved(place):
    run = start(place / "nan", arrange=[(break_weight_after, 9)])
    assert run.wait() == 1 and names(run.log_dir) == [5]
    one_line(run.err, "The validation loss at step 10 is nan: the model has diverged")

def add_to_checkpoint(t):
    """Let checkpoint_of() return something that weights_only=True does not load."""
    real = t.checkpoint_of
    t.checkpoint_of = lambda run: real(run) | {"gate": np.float64(1.5)}

def test_a_value_that_cannot_be_loaded_again_is_reported_before_the_first_step(place):
    run = start(place / "gate", arrange=[(add_to_checkpoint,)])
    assert run.wait() == 1 and not (run.log_dir / "log.txt").exists()
    one_line(run.err, "checkpoint_of() returns 'gate'", "numbers")

def test_tensors_that_share_memory_are_stored_once(reference):
    weights = last_checkpoint(reference)["model"]
    a, b = weights["lm_head.weight"], weights["transformer.wte.weight"]
    assert a.data_ptr() == b.data_ptr()

@pytest.mark.parametrize("name", ["log.txt", "config.json"])
def test_files_of_other_programs_are_not_replaced(place, name):
    """A log of build-nanogpt has our format, and a Hugging Face folder has a config.json."""
    folder = place / f"others {name}"
    folder.mkdir()
    (folder / name).write_text("0 train 10.9\n" if name == "log.txt" else '{"model_type": "gpt2"}')
    before = snapshot(folder)
    run = start(folder)
    assert run.wait() == 1 and snapshot(folder) == before
    one_line(run.err, f"log_dir={folder} holds a log.txt or config.json of another",
             "choose a different")

def edit_options(t):
    """Edit what configure_optimizers() returns."""
    real = t.configure_optimizers

    def configure_optimizers(*args):
        optimizers = real(*args)
        optimizers[0].param_groups[0].update(betas=(0.5, 0.6), initial_lr=0.5)
        optimizers[0].param_groups.reverse()  # the state does not depend on the order
        return optimizers
    t.configure_optimizers = configure_optimizers
    t.finish = lambda run: print(run.optimizers[0].param_groups[1]["betas"],
                                 run.optimizers[0].param_groups[1]["lr"])

def test_options_of_the_optimizer_are_those_of_the_code(halfway):
    """Its state is loaded from the checkpoint."""
    run = succeed(start(halfway("options"), arrange=[(edit_options,)]))
    checkpoint = last_checkpoint(run.log_dir)
    cfg = t.Config(**checkpoint["config"])
    (lr,) = re.findall(r"^\(0.5, 0.6\) (.*)$", run.out, re.M)
    assert float(lr) == pytest.approx(0.5 * t.get_lr(29, cfg) / cfg.max_lr)
    for key, state in checkpoint["optimizers"].items():
        shapes = {value.shape for value in state.values()} - {torch.Size()}
        assert shapes == {checkpoint["model"][key.split(" ")[1]].shape}
    assert checkpoint["optimizers"]["AdamW transformer.wte.weight"]["step"] == 30

def rename_adamw(t):
    """Replace AdamW with an optimizer that has another name."""
    t.torch.optim.AdamW = type("Other", (t.torch.optim.AdamW,), {})

def test_states_of_another_optimizer_are_left_out(halfway):
    """Its state starts empty, and one line says so."""
    run = succeed(start(halfway("other"), arrange=[(rename_adamw,)]))
    saved = last_checkpoint(run.log_dir)["optimizers"]
    n_others = sum(key.startswith("Other ") for key in saved)
    assert f"The optimizer states of {n_others} parameters are not used" in run.out
    assert saved["Other transformer.wte.weight"]["step"] == 17

def test_a_run_of_no_steps_validates_samples_and_is_saved_once(place):
    run = succeed(start(place / "no steps", max_steps=0, sample_every=5))
    assert run.out.count("0/0 val ") == run.out.count("--- sample at step 0") == 1
    assert run.out.count(" saved ") == 1 and names(run.log_dir) == [0]

def test_nothing_is_deleted_if_the_best_step_could_not_be_saved(place):
    """Otherwise, the best of the earlier checkpoints would be lost."""
    run = succeed(start(place / "full once", arrange=[(rise_after, 15), (limit_files, 12, 16)]))
    assert run.out.count("NOT SAVED") == 1 and names(run.log_dir) == [10, 20, 25, 30]

@pytest.mark.parametrize("changes", [
    dict(max_lr=1e30, warmup_steps=0, grad_clip=0.0), dict(arrange=[(poison_at, 7)])])
def test_a_diverged_run_ends_and_keeps_its_checkpoints(place, changes):
    """A message names the step and the remedy. NaN is never saved."""
    run = start(place / f"diverged {len(changes)}", optimizer="adamw", **changes)
    assert run.wait() == 1
    one_line(run.err, "has diverged", "--max_lr", "--branch_from=")
    for path in t.find_checkpoints(run.log_dir).values():
        assert all(weight.isfinite().all() for weight in load(path)["model"].values())
    if "arrange" in changes:
        one_line(run.err, "Step 7 has loss 4", "norm nan")
        assert names(run.log_dir) == [5]

def test_a_run_in_a_folder_that_is_in_use_is_refused(halfway, reference):
    """Nothing changes, and the run that uses the folder goes on undisturbed."""
    folder = halfway("in use")
    before = snapshot(folder)
    lock = t.lock_folder("log_dir", folder)
    run = start(folder)
    assert run.wait() == 1
    one_line(run.err, "Another run uses", folder, "log_dir")
    lock.release()
    assert snapshot(folder) == before
    start_again(folder)  # the lock is gone when its process is
    assert_same(folder, reference)

def test_a_changed_constant_or_text_is_refused_with_both_values(reference):
    """Constants that affect training cannot change when a run continues, but max_steps may grow."""
    saved = last_checkpoint(reference)
    cfg = t.Config(**saved["config"])
    run = mock.Mock(cfg=cfg)
    run.train_loader, run.val_loader = t.open_data(cfg, t.get_encoding(cfg.encoding))
    before = saved["config"] | saved["data_facts"]
    run.data_facts = saved["data_facts"]
    for name, value in saved["config"].items():
        new = f"{value}x" if isinstance(value, str) else value + 1  # True + 1 is not True
        new = value - 1 if name == "max_steps" else new
        run.cfg = dataclasses.replace(cfg, **{name: new})
        expected = {} if name in t.MAY_CHANGE else {name: f"{name} was {value!r}, is {new!r}"}
        assert t.changed_settings(run, before) == expected
    assert not t.MAY_CHANGE & {
        "total_batch_size", "T", "n_layer", "n_head", "n_embd", "dropout", "optimizer", "max_lr",
        "muon_lr_ratio", "min_lr", "lr_shape", "warmup_steps", "max_steps", "weight_decay",
        "grad_clip", "seed", "shuffle", "encoding", "init_from", "branch_from", "val_tokens",
        "beta1", "beta2", "eps", "muon_momentum", "decay_steps"}
    run.cfg, (train,), (val,) = cfg, run.train_loader.shards, run.val_loader.shards
    for shards, message in (
            (([train[:7], train[7:10]], [val]), f"train_tokens was {len(train)}, is 10"),
            (([train], [val[:9]]), f"validation_tokens was {len(val)}, is 9"),
            (([train[::-1]], [val]), "data_checksum was .*, is .*"),
            (([train], [val[::-1]]), "data_checksum was .*, is .*")):
        run.data_facts = t.data_facts(*shards)
        with pytest.raises(t.UserError, match=f"{message}.*different --log_dir"):
            t.restore(run, saved)

def test_a_refused_start_changes_nothing(halfway):
    """If constants changed, or the newest checkpoint is damaged, one line says what to do.

    No code in a checkpoint is run. After the damaged file was deleted, the run continues from the
    checkpoint before it.
    """
    folder = halfway("refused")
    newest, marker = folder / "checkpoint_00013.pt", folder / "the bomb went off"
    content, bomb, delete = newest.read_bytes(), io.BytesIO(), f"{newest} cannot be read .* delete"
    torch.save(load(newest) | {"more": Bomb(marker)}, bomb)
    for changes, damaged, said in (
            (dict(max_lr=0.5, seed=7), content, "max_lr was 0.01, is 0.5; seed was 1337, is 7"),
            ({}, content[:-100], delete), ({}, bytes(len(content)), delete), ({}, b"", delete),
            ({}, pickle.dumps(Bomb(marker), protocol=2), delete), ({}, bomb.getvalue(), delete)):
        newest.write_bytes(damaged)
        before = snapshot(folder)
        run = start(folder, **changes)
        assert run.wait() == 1
        assert re.search(said, one_line(run.err))
        assert snapshot(folder) == before  # so the bomb did not go off
    newest.unlink()
    assert "from step 10 on" in start_again(folder).out
    torch.load(io.BytesIO(bomb.getvalue()), weights_only=False)
    assert marker.exists()  # without weights_only=True, the code is run

def edit_script(t, folder, edit=b"# edited"):
    """Let the script look as if somebody had edited it."""
    path = folder / "train_gpt2.py"
    path.write_bytes(Path(t.__file__).read_bytes() + edit)
    t.__file__ = str(path)

def test_a_run_keeps_its_code_and_its_constants(halfway, tmp_path):
    """If the script is edited before the run continues, a line says so, and both copies are kept.

    config.json has all constants. A larger max_steps is allowed. A complete run is not evaluated
    with other code.
    """
    folder, code = halfway("edited"), (ROOT / "train_gpt2.py").read_bytes()
    assert (folder / "train_gpt2_00000.py").read_bytes() == code
    words = dict(max_steps=40, arrange=[(edit_script, tmp_path)])
    run = succeed(start(folder, **words))
    assert "train_gpt2.py was edited: from step 13 on, the new code is used" in run.out
    assert re.search("!!! max_steps is 40, was 30, so the learning rate changes from .* at step 13",
                     run.out)
    assert (folder / "train_gpt2_00000.py").read_bytes() == code
    assert (folder / "train_gpt2_00013.py").read_bytes() == code + b"# edited"
    assert "was edited" not in succeed(start(folder, **words)).out
    assert len([*folder.glob("*.py")]) == 2
    constants = json.loads((folder / "config.json").read_text())
    assert t.Config(**constants) == t.Config(**last_checkpoint(folder)["config"])
    assert (constants["max_steps"], constants["dropout"]) == (40, 0.1)
    log = (folder / "log.txt").read_bytes()
    run = start(folder, max_steps=40)
    assert run.wait() == 1
    one_line(run.err, "edited/ has taken all steps", "--log_dir", "delete")
    assert (folder / "log.txt").read_bytes() == log
    (folder / "train_gpt2_00013.py").unlink()  # as the message says
    succeed(start(folder, max_steps=40))
    assert (39, "train") in read_log(folder)

def test_a_second_edit_at_the_same_step_replaces_the_first(halfway, tmp_path):
    """The first one has trained no step that is saved. The code of earlier steps is kept."""
    folder, code = halfway("edited twice"), (ROOT / "train_gpt2.py").read_bytes()
    first = [(edit_script, tmp_path), (signal_at, signal.SIGKILL, 14)]
    assert start(folder, arrange=first).wait() == -signal.SIGKILL
    succeed(start(folder, arrange=[(edit_script, tmp_path, b"# again")]))
    copies = {path.name: path.read_bytes() for path in folder.glob("*.py")}
    assert copies == {"train_gpt2_00000.py": code, "train_gpt2_00013.py": code + b"# again"}

def test_the_files_of_a_run_that_was_never_saved_are_replaced(place):
    """The run starts over. The log of a run that was saved is only appended to."""
    folder = place / "log"
    assert start(folder, arrange=[(signal_at, signal.SIGKILL, 3)]).wait() != 0
    with open(folder / "log.txt", "a") as log:
        log.write("99 train 10.0\n")
    (folder / "train_gpt2_00050.py").write_text("an old copy")
    words = dict(max_steps=5, warmup_steps=6)
    run = succeed(start(folder, **words))
    first = (folder / "log.txt").read_bytes()
    assert "!!! max_steps is below warmup_steps=6" in run.out
    assert run.out.count("from step 0 on") == 1 and (99, "train") not in read_log(folder)
    assert [path.name for path in folder.glob("*.py")] == ["train_gpt2_00000.py"]
    for _ in range(2):  # each repeats the last validation
        run = succeed(start(folder, **words))
        assert "from step 5 on" in run.out
    log = (folder / "log.txt").read_bytes()
    assert log.startswith(first)
    for is_long in (True, False):  # the log of the first of these two runs is short, and replaced
        t.newest_checkpoint(folder).unlink()
        run = succeed(start(folder, **words))
        assert ("holds the log of a run, but no checkpoint" in run.out) == is_long
        assert (folder / "log_before.txt").read_bytes() == log
