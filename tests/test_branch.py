"""Tests of branch_from: a new run that starts from a checkpoint of another run."""
import json

import pytest
import torch
from conftest import (
    TINY, Forked, last_checkpoint, load, one_line, read_log, succeed, train)

import train_gpt2 as t

SHAPE = ("n_layer", "n_head", "n_embd")
WORDS = dict(optimizer="muon", dropout=0.1, keep_every=10, max_steps=20)

@pytest.fixture(scope="module")
def source(place):
    """Return the folder of the run that others branch from. It has a checkpoint of step 10."""
    return succeed(Forked(place / "source", **WORDS)).log_dir

def branch(place, name, source, **changes):
    return Forked(place / name, without=SHAPE, **WORDS | dict(branch_from=source) | changes)

def test_a_branch_with_the_same_settings_continues_the_run_bit_for_bit(place, source):
    """This also holds if it is stopped and resumed. Then, the source is not read again."""
    middle = source / "checkpoint_00010.pt"
    run = succeed(branch(place, "same", middle, max_steps=20, arrange=[(stop_in, 14)]))
    assert "from step 10 on" in run.out and "Stopped by a signal at step 15" in run.out
    assert "!!!" not in run.out
    content = middle.read_bytes()
    middle.unlink()
    succeed(branch(place, "same", middle, max_steps=20))
    middle.write_bytes(content)
    expected, log = read_log(source), read_log(place / "same")
    assert log == {key: value for key, value in expected.items() if key[0] >= 10}
    a, b = last_checkpoint(source), last_checkpoint(place / "same")
    for name, weight in a["model"].items():
        assert torch.equal(weight, b["model"][name]), name
    assert b["best_step"] > 10 and b["gpt_config"] == a["gpt_config"]
    assert json.loads((place / "same" / "config.json").read_text())["branch_from"] == str(middle)

def stop_in(t, step):
    """Stop the run after this step, as a signal would."""
    real = t.train_step

    def train_step(run):
        run.signalled = run.step == step
        return real(run)
    t.train_step = train_step

# {name: (changed settings, words on stdout)}
CHANGES = {
    "learning rate": (dict(max_lr=2e-3), "!!! Not as in branch_from: max_lr was 0.01, is 0.002"),
    "larger batch": (dict(total_batch_size=256), "160 rows of the data are skipped"),
    "smaller batch": (dict(total_batch_size=64), "80 rows of the data are read again"),
    "decay": (dict(lr_shape="wsd", decay_steps=5), "30/30 val"),
    "optimizer": (dict(optimizer="adamw", beta1=0.8), "optimizer was 'muon', is 'adamw'"),
    "data": (dict(data="{place}/other.txt"), "from step 20 on")}

@pytest.mark.parametrize("name", CHANGES)
def test_a_branch_may_have_other_settings(place, source, name):
    """A folder means its newest checkpoint. The loss continues to fall."""
    (place / "other.txt").write_bytes((place / "text.txt").read_bytes()[:40_000])
    changes, words = CHANGES[name]
    changes = {key: value.format(place=place) if isinstance(value, str) else value
               for key, value in changes.items()}
    run = succeed(branch(place, f"branch {name}", source, max_steps=30, **changes))
    assert words in run.out and {step for step, _ in read_log(run.log_dir)} == {*range(20, 31)}
    checkpoint = last_checkpoint(run.log_dir)
    assert checkpoint["step"] == 30 and checkpoint["best_step"] >= 20
    assert checkpoint["config"]["beta1"] == changes.get("beta1", 0.9)
    state = checkpoint["optimizers"]["AdamW transformer.wte.weight"]
    assert state["step"] == (10 if name == "optimizer" else 30)

def test_two_processes_branch_from_a_run_of_one(place, source):
    words = WORDS | dict(dropout=0.0, branch_from=source, max_steps=24, B=2)
    train(2, place / "two", without=SHAPE, **words)
    succeed(Forked(place / "one", without=SHAPE, **words))
    a, b = read_log(place / "one"), read_log(place / "two")
    assert a.keys() == b.keys() and all(abs(a[key] - b[key]) < 1e-4 for key in a)

def test_mistakes_are_reported_in_one_line(place, source):
    """A folder that already holds a run keeps it, whether log_dir was given or not."""
    (place / "damaged.pt").write_bytes((source / "checkpoint_00010.pt").read_bytes()[:-99])
    before = sorted(path.name for path in source.iterdir())
    for changes, parts in (
            (dict(branch_from=place / "damaged.pt"), ["damaged.pt cannot be read"]),
            (dict(branch_from=place / "empty"), ["empty cannot be read"]),
            (dict(branch_from=source, log_dir=source), ["branch_from was ''", "--log_dir"])):
        run = Forked(place / "mistake", without=SHAPE, **WORDS | changes)
        assert run.wait() == 1
        one_line(run.err, *parts)
    run = branch(place, "shape", source, n_layer=1)
    assert run.wait() == 1
    one_line(run.err, "--n_layer contradicts init_from or branch_from")
    assert sorted(path.name for path in source.iterdir()) == before
