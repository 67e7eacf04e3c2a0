"""Tests of branches, which continue a copied checkpoint, and of changed settings."""
import shutil
from unittest import mock

import pytest
import torch
from conftest import (
    Training, assert_same_checkpoints, last_checkpoint, load, log_lines, one_line, read_log,
    succeed)

import train_gpt2 as t

WORDS = dict(optimizer="muon", dropout=0.1, keep_every=10, max_steps=20)

@pytest.fixture(scope="module")
def source(place):
    """Return the folder of the run that others branch from. It has checkpoints of steps 10, 20."""
    return succeed(Training(place / "source", **WORDS)).log_dir

def branch(folder, source, *steps, **changes):
    """Copy the checkpoints of these steps to a new folder, and train on there."""
    folder.mkdir()
    for step in steps:
        shutil.copy(source / f"checkpoint_{step:05d}.pt", folder)
    return Training(folder, **WORDS | changes)

def test_a_branch_with_the_same_settings_continues_the_run_bit_for_bit(place, source):
    run = succeed(branch(place / "same", source, 10))
    assert "from step 10 on" in run.out and "!!!" not in run.out
    expected = [line for line in log_lines(source) if int(line[0]) >= 10]
    assert log_lines(run.log_dir)[2:] == expected  # after parameters and bytes_per_token
    assert_same_checkpoints(last_checkpoint(source), last_checkpoint(run.log_dir))

def test_a_branch_with_other_settings_prints_one_line_and_trains_on(place, source):
    """The line names them. A repetition with settings that differ from these is refused."""
    (place / "other.txt").write_bytes((place / "text.txt").read_bytes()[:40_000])
    changes = dict(max_lr=2e-3, total_batch_size=256, optimizer="adamw", lr_shape="wsd", T=8,
                   decay_steps=5, data=place / "other.txt", max_steps=30)
    run = succeed(branch(place / "other", source, 20, **changes))
    [line] = [line for line in run.out.splitlines() if "max_lr was 0.01, is 0.002" in line]
    for part in ("total_batch_size was 128, is 256", "optimizer was muon, is adamw",
                 "lr_shape was linear, is wsd", "max_steps was 20, is 30",
                 "T was 16, is 8", "data_tokens was 50000, is 40000"):
        assert part in line
    assert {step for step, _ in read_log(run.log_dir)} == {*range(20, 31)}
    saved = last_checkpoint(run.log_dir)
    assert saved["step"] == 30 and saved["best_step"] > 20
    assert saved["gpt_config"]["block_size"] == 16
    again = Training(run.log_dir, **WORDS | changes | dict(max_lr=3e-3, keep_every=5))
    assert again.wait() == 1
    one_line(again.err, "max_lr was 0.002, is 0.003", "keep_every was 10, is 5")
    assert "complete" in succeed(Training(run.log_dir, **WORDS | changes)).out

def test_the_best_checkpoint_counts_if_it_is_in_the_folder(place, source):
    """Thus, a folder that was moved keeps its best checkpoint."""
    older = shutil.copytree(source, place / "older")
    for path in older.glob("*.pt"):
        torch.save(load(path) | dict(best_step=10, best_loss=1.0), path)
    for steps, best in (((10, 20), 10), ((20,), 25)):
        run = succeed(branch(place / f"best {best}", older, *steps, max_steps=25))
        assert last_checkpoint(run.log_dir)["best_step"] == best

def test_optimizer_states_are_used_for_the_parameters_of_the_same_optimizer(place, source):
    """From Muon to AdamW and back, only the embeddings, which AdamW always trains, keep theirs."""
    steps, before = {}, source
    for optimizer, last in (("adamw", 30), ("muon", 40), ("adamw", 50)):
        run = succeed(branch(place / f"state {last}", before, last - 10, optimizer=optimizer,
                             max_steps=last))
        states, before = last_checkpoint(run.log_dir)["optimizers"], run.log_dir
        steps[last] = [{name: int(state.get("step", -1)) for name, state in each.items() if state}
                       for each in states]
    wte, matrix = "transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"
    assert [steps[last][0][wte] for last in steps] == [30, 40, 50]
    assert steps[30][0][matrix] == steps[50][0][matrix] == 10
    assert matrix not in steps[40][0] and steps[40][1][matrix] == -1

@pytest.mark.parametrize("changes, parts", [
    (dict(n_layer=2), ["n_layer"]), (dict(n_head=1), ["n_head"]), (dict(n_embd=32), ["n_embd"]),
    (dict(encoding="gpt2"), ["encoding"]), (dict(T=32), ["T=32", "16"])])
def test_the_checkpoint_determines_the_model(place, source, changes, parts, gpt2_encoding):
    run = branch(place / f"branch {changes}", source, 20, max_steps=22, **changes)
    assert run.wait() == 1
    one_line(run.err, *parts)
    assert {path.name for path in run.log_dir.iterdir()} == {"checkpoint_00020.pt", ".lock"}

def test_a_changed_setting_or_text_is_refused_with_both_values(source):
    """In the folder of a run, only the settings in MAY_CHANGE and max_steps may change."""
    saved = last_checkpoint(source)
    now = saved["config"] | saved["data_facts"]
    for name in now.keys() - t.MAY_CHANGE - {"max_steps"}:
        new = f"{now[name]}x" if isinstance(now[name], str) else now[name] + 1
        cfg = t.Config(**saved["config"])
        run = mock.Mock(cfg=t.replace(cfg, **{name: new}) if name in saved["config"] else cfg,
                        data_facts={key: new if key == name else value
                                    for key, value in saved["data_facts"].items()})
        with pytest.raises(t.UserError, match=f"{name} was {now[name]}, is {new}"):
            t.restore(run, saved)
    assert t.MAY_CHANGE == {
        "data", "B", "print_every", "eval_every", "hellaswag_every", "sample_every", "log_dir",
        "sample_prompt", "sample_tokens", "temperature", "top_k", "device", "dtype", "compile"}
