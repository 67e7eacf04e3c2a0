"""Tests of training as users start it: presets, several processes, and common mistakes."""
import dataclasses
import re

import numpy as np
import pytest
import torch
from conftest import (
    ROOT, TINY, Training, ask_four_questions, assert_close_logs, assert_refused, device_type, flags,
    no_questions, one_line, read_log, succeed, train, write_text)
from torch.nn import functional as F

import hellaswag
import train_gpt2 as t

def save_shards(folder, train=5000, val=1000, change=lambda tokens: tokens):
    """Write shards of random bytes with these numbers of tokens, and none for 0 tokens."""
    folder.mkdir(exist_ok=True)
    tokens = np.random.default_rng(0).integers(0, 257, 5000).astype(np.uint16)
    for split, size in (("train", train), ("val", val)):
        if size:
            np.save(folder / f"x_{split}_000000.npy", change(tokens[:size]))
    return folder

def test_the_quick_start(tmp_path):
    """A text file is trained with SMALL, and the last lines say how to go on.

    Nothing is written to stderr.
    """
    shorter = dict(max_steps=15, eval_every=15, sample_every=15, val_tokens=4096, sample_tokens=50)
    done = succeed(Training(None, without=TINY, device=device_type(), cwd=tmp_path, hide=(),
                            data=ROOT / "input.txt", **shorter))
    assert "settings  SMALL" in done.out and "trained by AdamW and Muon" in done.out
    assert re.findall(r"^ +(\d+)/15 train", done.out, re.M) == ["0", "10"]
    assert done.out.count("--- sample at step 15") == done.out.count("--- sample") == 1
    assert f"--sample=3 --data={ROOT / 'input.txt'} --log_dir=log_small" in done.out
    values = read_log(tmp_path / "log_small")
    values = {key: values[key] for key in values if key[1] != "norm"}
    assert set(values) == {(0, "val"), (15, "val"), *((step, "train") for step in range(15))}
    assert values[15, "val"] < 3.5 < values[0, "val"]
    val = float(re.search(r" 15/15 val (\S+)", done.out).group(1))
    assert val == pytest.approx(values[15, "val"], abs=1e-4)
    run = succeed(Training(None, without=TINY, sample=2, sample_tokens=5, cwd=tmp_path,
                           data=ROOT / "input.txt"))
    assert "\nSamples from log_small/checkpoint_00015.pt:\n" in run.out
    assert run.out.count("---\n") == 2

def test_flags_and_constants_select_the_preset(tmp_path, monkeypatch, capsys):
    """A text file or bytes select SMALL, init_from selects FINETUNE, and flags override both."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    save_shards(tmp_path / "shards")
    given = {"data": "text.txt", "n_layer": 5, "seed": 7}
    assert t.configure(given) == dataclasses.replace(t.Config(), **t.SMALL | given)
    assert capsys.readouterr().out == "settings  SMALL; flags: data, n_layer, seed\n"
    given = {"data": "shards", "encoding": "bytes", "max_steps": 5}
    assert t.configure(given) == t.Config(**t.SMALL | given)
    cfg = t.configure({"data": "shards"})
    assert cfg == t.Config(data="shards")
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.B = 1
    for data in ("shards", "text.txt"):
        given = {"data": data, "init_from": "gpt2", "warmup_steps": 7}
        assert t.configure(given) == t.Config(**t.FINETUNE | given)
    edited = dataclasses.make_dataclass("Config", [("data", str, "text.txt")], bases=(t.Config,),
                                        frozen=True)
    monkeypatch.setattr(t, "Config", edited)
    assert t.configure({}).n_layer == t.SMALL["n_layer"]

def test_the_losses_are_those_of_a_plain_loop(place):
    """The losses equal those of a short loop over the same rows with the same model and AdamW."""
    run = succeed(Training(place / "plain", shuffle=False, max_steps=12, weight_decay=0.3,
                           grad_clip=0.5, lr_shape="linear", min_lr=0, seed=1337, eval_every=0))
    assert "12 steps (5 of warmup), 1,536 tokens, 0.03 epochs" in run.out
    text = torch.tensor(list((place / "text.txt").read_bytes()))
    torch.manual_seed(1337)
    model = t.GPT(t.GPTConfig(block_size=16, n_layer=1, n_head=2, n_embd=16, vocab_size=257))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() == 1]
    adamw = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.3},
                               {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95))
    losses = {}
    for step in range(12):
        rows = text[128 * step:128 * step + 129]
        logits, _ = model(rows[:-1].view(8, 16))
        loss = F.cross_entropy(logits.flatten(0, 1), rows[1:])
        loss.backward()
        losses[step, "norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        for group in adamw.param_groups:
            group["lr"] = 1e-2 * min((step + 1) / 5, (12 - step) / (12 - 5))
        adamw.step()
        adamw.zero_grad()
        losses[step, "train"] = loss.item()
    assert_close_logs(run.log_dir, losses)

@pytest.mark.usefixtures("gpt2_encoding")
def test_constants_edited_in_a_copy_of_the_script_take_effect(tmp_path):
    save_shards(tmp_path / "edu_fineweb10B")
    source = (ROOT / "train_gpt2.py").read_text()
    for name, value in (
            TINY | dict(encoding="gpt2", max_steps=2, compile=False, val_tokens=512)).items():
        line = re.compile(rf"^(    {name}: [^=]+ =) .*", re.M)
        source, n = line.subn(rf"\1 {value!r}{' # was 12' * (name == 'n_head')}", source, count=1)
        assert n == 1, name
    (tmp_path / "edited.py").write_text(source)
    run = succeed(Training(None, without=TINY, copy=tmp_path / "edited.py", cwd=tmp_path))
    assert "settings  Config; flags: none" in run.out and " 2 steps (5 of warmup)" in run.out
    assert [step for step, metric in read_log(tmp_path / "log") if metric == "train"] == [0, 1]

@pytest.mark.parametrize("n, optimizer", [(2, "adamw"), (2, "muon"), (8, "muon")])
def test_n_processes_train_the_same_model_as_one(place, n, optimizer):
    """The losses do not depend on the number of processes. B is lowered to 1 for 8 processes."""
    words = dict(optimizer=optimizer, muon_lr_ratio=2.5, B=2, max_steps=20, sample_every=20,
                 sample_tokens=9)
    one = succeed(Training(place / f"1_{optimizer}_{n}", **words))
    several = train(n, place / f"{n}_{optimizer}", **words)
    assert_close_logs(one.log_dir, several.log_dir)
    assert several.out.count("--- sample at step 20 ---") == 1

@pytest.mark.parametrize("processes, tokens, T, B, lowered", [
    (8, 2048, 64, 32, 4), (1, 2048, 64, 10**9, 32), (8, 524288, 1024, 64, 64),
    (1, 524288, 1024, 60, 32), (4, 96, 8, 9, 3)])
def test_b_is_lowered_until_it_divides_the_batch(monkeypatch, processes, tokens, T, B, lowered):
    """B divides the rows that each process reads in a step. The quick start needs this on 8 GPUs.
    """
    monkeypatch.setattr(t, "WORLD_SIZE", processes)
    given = dict(data=str(ROOT / "input.txt"), total_batch_size=tokens, T=T, B=B)
    assert t.configure(given).B == lowered

def test_hellaswag_is_scored_when_it_is_due(place, monkeypatch):
    """The score is in the log. If the questions cannot be downloaded, one line says so."""
    words = dict(hellaswag_every=10, max_steps=20, eval_every=0)
    run = succeed(Training(place / "hella", arrange=[(ask_four_questions,)], **words))
    monkeypatch.setattr(hellaswag, "iterate_examples", None)  # is put back
    ask_four_questions(t)
    model = t.GPT.from_pretrained(run.log_dir / "checkpoint_00020.pt")
    questions = hellaswag.prepare(hellaswag.iterate_examples("val"), model,
                                  t.get_encoding("bytes").encode_ordinary)
    score, log = hellaswag.evaluate(model, questions), read_log(run.log_dir)
    assert log[20, "hella"] == pytest.approx(score.acc_norm)
    assert log[20, "hella_loss"] == pytest.approx(score.loss, rel=1e-4)
    assert {key for key in log if "hella" in key[1]} == {
        (step, name) for step in (0, 10, 20) for name in ("hella", "hella_loss")}
    assert f" 20/20 hella {score.acc_norm:.4f} loss {score.loss:.4f}" in run.out
    run = succeed(Training(place / "no_hella", arrange=[(no_questions,)], **words))
    assert run.out.count("HellaSwag is off: no network today\n") == 1
    assert not {metric for _, metric in read_log(run.log_dir) if "hella" in metric}

# {name of a mistake: (changed constants, parts of the message)}
MISTAKES = {
    "missing shards": (dict(data="edu_fineweb10B"),
                       ["edu_fineweb10B", "python fineweb.py", "--data=input.txt"]),
    "no validation shard": (dict(data="{bad}/noval"), ["noval", "_val_"]),
    "negative ids": (dict(data="{bad}/negative"), ["ids from -", "--encoding"]),
    "other encoding": (dict(data="{bad}/large"), ["ids from 50000", "--encoding"]),
    "manifest": (dict(data="{bad}/manifest"), ["--encoding=gpt2", "not bytes"]),
    "short text": (dict(data="{bad}/short.txt"), ["short.txt", "--T"]),
    "not UTF-8": (dict(data="{bad}/latin1.txt"), ["latin1.txt is not UTF-8", "0xe9"]),
    "dangling link": (dict(data="{bad}/link"), ["x_train_000000.npy", "delete it", "repeat"]),
    "learning rate would rise": (dict(min_lr=0.1), ["min_lr=0.1", "max_lr=0.01"]),
    "batch does not divide": (dict(total_batch_size=1000), ["=1000", "= 16", "896"]),
    "unknown flag": (dict(n_layers=3), ["--n_layers", "--help"]),
    "unknown choice": (dict(optimizer="sgd"), ["--optimizer", "sgd", "'adamw', 'muon'"]),
    "log_dir is a file": (dict(log_dir="{bad}/short.txt"), ["log_dir=", "short.txt"]),
    "log_dir is empty": (dict(log_dir=""), ["log_dir"])}

@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """Return a folder with data that cannot be used."""
    bad = tmp_path_factory.mktemp("bad")
    save_shards(bad / "noval", val=0)
    save_shards(bad / "negative", change=lambda tokens: tokens.astype(np.int16) - 300)
    save_shards(bad / "large", change=lambda tokens: tokens * 0 + 50000)
    save_shards(bad / "link", train=0)
    (bad / "link" / "x_train_000000.npy").symlink_to("nowhere.npy")
    save_shards(bad / "manifest")
    (bad / "manifest" / "manifest.json").write_text(
        '{"settings": {"encoding": "gpt2"}, "shards": []}')
    (bad / "short.txt").write_text("too short to validate on. " * 5)
    (bad / "latin1.txt").write_bytes(b"caf\xe9 " * 1000)
    return bad

@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_in_one_sentence(place, bad, monkeypatch, name):
    changes, expected = MISTAKES[name]
    changes = {k: v.format(bad=bad) if isinstance(v, str) else v for k, v in changes.items()}
    words = flags(place / f"log {name}", **changes)
    assert_refused(monkeypatch, words, *expected)

def test_a_mistake_ends_the_script_with_status_1_and_one_line(place):
    env = {"TIKTOKEN_CACHE_DIR": "none", "https_proxy": "http://127.0.0.1:9"}
    run = Training(place / "no vocabulary", encoding="gpt2", env=env)
    assert run.wait() == 1
    one_line(run.err, "--encoding=bytes")

BAD = """--n_embd=0 --n_layer=0 --n_head=0 --n_head=5 --T=0 --B=0 --B=0.5 --max_steps=many
    --lr_shape=square --total_batch_size=0 --total_batch_size=1000 --shuffle=2 --val_tokens=0
    --keep_every=0.5 --device=gpu --dtype=float8 --compile=maybe --encoding=morse
    --optimizer=sgd""".split()

@pytest.mark.parametrize("flag", BAD)
def test_an_invalid_value_is_reported_with_its_name(place, monkeypatch, flag):
    """Without the check, some would cause a traceback, and others would yield a bad model."""
    assert_refused(monkeypatch, [f"--data={place}/text.txt", flag], flag.partition("=")[0][2:])

def test_words_for_true_and_false_in_any_case_and_a_tilde(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train_gpt2.py", "--compile=false", "--shuffle=TRUE"])
    assert t.parse_flags(t.Config, "") == {"compile": False, "shuffle": True}
    monkeypatch.setattr("sys.argv", ["train_gpt2.py", "--compile=auto", "--max_lr=1e-3"])
    assert t.parse_flags(t.Config, "") == {"compile": "auto", "max_lr": 1e-3}
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr("sys.argv", ["train_gpt2.py", "--data=~/text.txt"])  # no shell expands it
    assert t.parse_flags(t.Config, "") == {"data": "/home/me/text.txt"}
