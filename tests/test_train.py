"""Tests of training as users start it: presets, several processes, and common mistakes."""
import dataclasses
import io
import json
import re
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import (
    ROOT, TINY, Forked, ask_four_questions, assert_close_logs, device_type, flags, load,
    no_questions, one_line, raise_at, read_log, slow_saves, succeed,
    together, train, write_text)
from torch.nn import functional as F

import hellaswag
import train_gpt2 as t

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the text that all runs train on."""
    folder = tmp_path_factory.mktemp("train")
    write_text(folder)
    return folder

def save_shards(folder, train=5000, val=1000, change=lambda tokens: tokens):
    """Write shards of random bytes with these numbers of tokens, and none for 0 tokens."""
    folder.mkdir(exist_ok=True)
    tokens = np.random.default_rng(0).integers(0, 257, 5000).astype(np.uint16)
    for split, size in (("train", train), ("val", val)):
        if size:
            np.save(folder / f"x_{split}_000000.npy", change(tokens[:size]))
    return folder

def hide_gpus(t):
    torch.cuda.is_available = lambda: False
    t.shutil.which = lambda name: None

def test_the_quick_start(tmp_path):
    """Without training shards, the script trains on Shakespeare and says how to go on.

    It also does so if a failed fineweb.py has left an incomplete folder. Nothing is written to
    stderr. With a GPU, the text must be named.
    """
    save_shards(tmp_path / "edu_fineweb10B", train=0)
    shorter = ["--max_steps=15", "--eval_every=15", "--sample_every=15", "--val_tokens=4096",
               "--sample_tokens=50"]
    on_cpu = device_type() == "cpu"
    words = dict(arrange=[(hide_gpus,)]) if on_cpu else dict(data=ROOT / "input.txt")
    done = succeed(Forked(None, *shorter, without=TINY, device=device_type(), cwd=tmp_path,
                          hide=(), **words))
    assert not on_cpu or done.out.startswith("Quick start") and "python fineweb.py" in done.out
    assert "settings  SMALL" in done.out and "n_layer=3" in done.out
    assert re.findall(r"^ +(\d+)/15 train", done.out, re.M) == ["0", "10"]
    assert done.out.count("--- sample at step 15") == done.out.count("--- sample") == 1
    assert "--sample=3 --log_dir=log_small" in done.out
    values = read_log(tmp_path / "log_small")
    values = {key: values[key] for key in values if key[1] != "norm"}
    assert set(values) == {(0, "val"), (15, "val"), *((step, "train") for step in range(15))}
    assert values[15, "val"] < 3.5 < values[0, "val"]
    val = float(re.search(r" 15/15 val (\S+)", done.out).group(1))
    assert val == pytest.approx(values[15, "val"], abs=1e-4)
    run = succeed(Forked(None, without=TINY, sample=2, sample_tokens=5, cwd=tmp_path))
    assert run.out.startswith("Samples from log_small/checkpoint_00015.pt:\n")
    assert run.out.count("---\n") == 2

def test_the_data_selects_the_preset_and_flags_override_it(tmp_path, monkeypatch, capsys):
    """A text file is trained with SMALL, and a folder of shards with the defaults in Config."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    given = {"data": "text.txt", "n_layer": 5, "seed": 7}
    assert t.configure(given) == dataclasses.replace(t.Config(), **t.SMALL | given)
    assert capsys.readouterr().out == "settings  SMALL; flags: data, n_layer, seed\n"
    save_shards(tmp_path / "shards")
    cfg = t.configure({"data": "shards", "encoding": "bytes"})
    assert cfg == t.Config(data="shards", encoding="bytes")
    save_shards(tmp_path / "edu_fineweb10B")
    assert t.configure({}) == t.Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.B = 1
    given = {"data": "text.txt", "init_from": "gpt2", "max_steps": 7}
    assert t.configure(given) == t.Config(**t.FINETUNE | given | {"epochs": 0.0})

def test_shards_of_bytes_select_the_small_preset(tmp_path):
    save_shards(tmp_path)
    (tmp_path / "manifest.json").write_text('{"settings": {"encoding": "bytes"}, "shards": []}')
    data = {"data": str(tmp_path)}
    assert t.configure(data) == dataclasses.replace(t.Config(), **t.SMALL | data)
    given = data | {"init_from": "gpt2"}
    assert t.configure(given) == t.Config(**given)

@pytest.mark.parametrize("sign", ["torchrun", "GPU", "nvidia-smi"])
def test_a_toy_is_not_trained_by_mistake(tmp_path, monkeypatch, sign):
    """Where GPT-2 (124M) was probably meant, missing shards are an error. Samples need no data."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sign == "GPU")
    monkeypatch.setattr(t.shutil, "which", lambda name: sign if name == sign else None)
    if sign == "torchrun":
        monkeypatch.setenv("RANK", "0")
    with pytest.raises(t.UserError, match="no shards.*python fineweb.py.*--data=.*input.txt"):
        t.configure({})
    assert t.configure({"sample": 2}).sample == 2
    assert t.configure({"data": str(ROOT / "input.txt")}).n_layer == 3

def test_shards_that_the_manifest_does_not_list_or_that_are_missing_get_a_line(folder, capsys):
    """Hidden files are left out."""
    save_shards(folder / "odd")
    np.save(folder / "odd" / "._x_train_000000.npy", np.zeros(3))
    listed = [{"name": "x_val_000000.npy"}, {"name": "x_train_000000.npy"}]
    for entries, said in ((listed, ""), ([*listed, {"name": "x_train_000009.npy"}], "000009.npy"),
                          (listed[:1], "x_train_000000.npy")):
        (folder / "odd" / "manifest.json").write_text(json.dumps(
            {"settings": {"encoding": "bytes"}, "shards": entries}))
        train, val = t.open_shards(folder / "odd", "bytes")
        assert [len(shard) for shard in train + val] == [5000, 1000]
        out = capsys.readouterr().out
        assert said in out and out.count("\n") == (said != "")

def test_a_bad_id_ends_the_run_after_all_earlier_steps(folder):
    """The next batch is read while the GPU computes, but an error in it does not lose a step."""
    def spoil(tokens):
        tokens = tokens.copy()
        tokens[3 * 128 + 5:][:len(tokens) == 5000] = 300
        return tokens
    save_shards(folder / "bad id", change=spoil)
    run = Forked(folder / "log bad id", data=folder / "bad id", shuffle=False)
    assert run.wait() == 1
    one_line(run.err, "The data contains ids from", "to 300", "--encoding")
    assert [step for step, metric in read_log(run.log_dir) if metric == "train"] == [0, 1, 2]

def test_paths_may_begin_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_text(tmp_path)
    cfg = t.configure({"data": "~/text.txt", "log_dir": "~/log", "init_from": "~/weights"})
    assert (cfg.data, cfg.log_dir) == (f"{tmp_path}/text.txt", f"{tmp_path}/log")
    assert cfg.init_from == f"{tmp_path}/weights"

def test_weights_determine_constants_and_flags_may_not_contradict_them(tmp_path):
    """The model's shape and encoding come from the weights, and T is at most block_size."""
    config = t.GPTConfig(block_size=24, n_layer=2, n_head=3, n_embd=12, vocab_size=257,
                         encoding="bytes")
    path, model = tmp_path / "x.pt", t.GPT(config, seed=3)
    torch.save({"gpt_config": dataclasses.asdict(config), "model": model.state_dict()}, path)
    cfg = t.Config(init_from=str(path), dropout=0.1, **{"T": 1024})
    built = t.build_model(cfg)
    cfg = t.with_model_settings(cfg, built)
    assert torch.equal(built.lm_head.weight, model.lm_head.weight)
    assert (built.config.dropout, built.training) == (0.1, False)
    assert (cfg.n_layer, cfg.n_head, cfg.n_embd, cfg.encoding, cfg.T) == (2, 3, 12, "bytes", 24)
    for source in ("init_from", "branch_from"):
        for flag in ("n_layer", "n_head", "n_embd"):
            with pytest.raises(t.UserError, match=f"--{flag} contradicts init_from or branch"):
                t.configure({"data": str(ROOT / "input.txt"), source: str(path), flag: 4})

def test_dropout_is_active_in_training_only(folder):
    logs = [read_log(succeed(Forked(folder / f"dropout {p}", dropout=p, max_steps=1)).log_dir)
            for p in (0.0, 0.5)]
    assert logs[0][0, "val"] == logs[1][0, "val"] and logs[0][0, "train"] != logs[1][0, "train"]

def test_the_losses_are_those_of_a_plain_loop(folder):
    """The losses equal those of a short loop over the same rows with the same model and AdamW.

    `epochs` determines the number of steps.
    """
    run = succeed(Forked(folder / "plain", without=["max_steps"], shuffle=False, epochs=0.0341,
                         weight_decay=0.3, grad_clip=0.5, lr_shape="linear", min_lr=0, seed=1337,
                         eval_every=0))
    assert "12 steps (warmup 5), 1,536 tokens, 0.034 epochs" in run.out
    text = torch.tensor(list((folder / "text.txt").read_bytes()))
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

def test_constants_edited_in_a_copy_of_the_script_take_effect(tmp_path):
    save_shards(tmp_path / "edu_fineweb10B")
    source = (ROOT / "train_gpt2.py").read_text()
    for name, value in (TINY | dict(max_steps=2, compile=False, val_tokens=512)).items():
        line = re.compile(rf"^(    {name}: [^=]+ =) .*", re.M)
        source, n = line.subn(rf"\1 {value!r}{' # was 12' * (name == 'n_head')}", source, count=1)
        assert n == 1, name
    (tmp_path / "edited.py").write_text(source)
    run = succeed(Forked(None, without=TINY, script=tmp_path / "edited.py", cwd=tmp_path))
    assert "n_layer=1, n_head=2, n_embd=16" in run.out
    assert [step for step, metric in read_log(tmp_path / "log") if metric == "train"] == [0, 1]

@pytest.mark.parametrize("n, optimizer", [(2, "adamw"), (2, "muon"), (8, "muon")])
def test_n_processes_train_the_same_model_as_one(folder, n, optimizer):
    """The losses do not depend on the number of processes. B is lowered to 1 for 8 processes."""
    words = dict(optimizer=optimizer, muon_lr_ratio=2.5, B=2, max_steps=20, sample_every=20,
                 sample_tokens=9)
    one = succeed(Forked(folder / f"1_{optimizer}_{n}", **words))
    several = train(n, folder / f"{n}_{optimizer}", **words)
    assert_close_logs(one.log_dir, several.log_dir)
    assert several.out.count("--- sample at step 20 ---") == 1

@pytest.mark.parametrize("processes, tokens, T, B, lowered", [
    (8, 2048, 64, 32, 4), (1, 2048, 64, 10**9, 32), (8, 524288, 1024, 64, 64),
    (1, 524288, 1024, 60, 32), (4, 96, 8, 9, 3)])
def test_b_is_lowered_until_it_divides_the_batch(monkeypatch, processes, tokens, T, B, lowered):
    """B divides the rows that each process reads in a step. The quick start needs this on 8 GPUs.

    `epochs`, if it is set, determines max_steps: the last step may begin the next epoch.
    """
    monkeypatch.setattr(t, "WORLD_SIZE", processes)
    cfg = t.Config(total_batch_size=tokens, T=T, B=B, epochs=1.5)
    cfg = t.with_batch_and_steps(cfg, rows_per_epoch=tokens // T * 3 + 1)
    assert (cfg.B, cfg.max_steps) == (lowered, 5)

def break_head(t):
    """Let all logits be NaN when the model is scored on HellaSwag."""
    real = t.score_hellaswag

    def score_hellaswag(run):
        hook = run.model.lm_head.register_forward_hook(lambda *args: args[-1] * float("nan"))
        real(run)
        hook.remove()
    t.score_hellaswag = score_hellaswag

def test_hellaswag_is_scored_when_it_is_due(folder, monkeypatch):
    """The score of the model is in the log. If it cannot be computed, one line says so.

    This is the case if the questions cannot be downloaded, or if losses are not finite.
    """
    words = dict(hellaswag_every=10, max_steps=20, eval_every=0)
    run = succeed(Forked(folder / "hella", arrange=[(ask_four_questions,)], **words))
    monkeypatch.setattr(hellaswag, "iterate_examples", None)  # is put back
    ask_four_questions(t)
    model = t.GPT.from_pretrained(run.log_dir / "checkpoint_00020.pt")
    questions = hellaswag.prepare(hellaswag.iterate_examples("val"), model,
                                  t.get_encoding("bytes").encode_ordinary)
    score = hellaswag.evaluate(model, questions).acc_norm
    assert read_log(run.log_dir)[20, "hella"] == pytest.approx(score)
    broken = succeed(Forked(folder / "broken", **words,
                            arrange=[(ask_four_questions,), (break_head,)]))
    assert broken.out.count("!!! HellaSwag: some losses are not finite") == 3
    assert (19, "train") in read_log(broken.log_dir)
    assert {key for key in read_log(run.log_dir) if key[1] == "hella"} == {
        (step, "hella") for step in (0, 10, 20)}
    assert " 20/20 hella 0." in run.out or " 20/20 hella 1." in run.out
    run = succeed(Forked(folder / "no_hella", arrange=[(no_questions,)], **words))
    assert run.out.count("HellaSwag is off: no network today\n") == 1
    assert "hella" not in {metric for _, metric in read_log(run.log_dir)}

SHAPE = ("n_layer", "n_head", "n_embd")
# {name of a mistake: (changed constants, parts of the message)}
MISTAKES = {
    "missing shards": (dict(data="edu_fineweb10B"), ["edu_fineweb10B", "fineweb.py"]),
    "no validation shard": (dict(data="{bad}/noval"), ["noval", "_val_"]),
    "a table": (dict(data="{bad}/table"), ["x_train_000000.npy", "(5000, 1)"]),
    "floats": (dict(data="{bad}/floats"), ["x_train_000000.npy", "float64"]),
    "negative ids": (dict(data="{bad}/negative"), ["ids from -", "--encoding"]),
    "other encoding": (dict(data="{bad}/large"), ["ids from 50000", "--encoding"]),
    "manifest": (dict(data="{bad}/manifest"), ["--encoding=gpt2", "not bytes"]),
    "short text": (dict(data="{bad}/short.txt"), ["short.txt", "--T"]),
    "not UTF-8": (dict(data="{bad}/latin1.txt"), ["latin1.txt is not UTF-8", "0xe9"]),
    "dangling link": (dict(data="{bad}/link"), ["x_train_000000.npy", "delete it", "repeat"]),
    "learning rate would rise": (dict(min_lr=0.1), ["min_lr=0.1", "max_lr=0.01"]),
    "batch does not divide": (dict(total_batch_size=1000), ["=1000", "= 16. ", "of 128, "]),
    "unknown flag": (dict(n_layers=3), ["--n_layers", "--help"]),
    "unknown choice": (dict(optimizer="sgd"), ["--optimizer", "sgd", "'adamw', 'muon'"]),
    "no such device": (dict(device="cuda:99", env={"CUDA_VISIBLE_DEVICES": ""}),
                       ["device=cuda:99", "no GPU"]),
    "no such weights": (dict(init_from="nowhere/or/other", without=SHAPE),
                        ["nowhere/or/other is neither a .pt", "Hugging Face"]),
    "no such checkpoint": (dict(init_from="missing.pt", without=SHAPE),
                           ["missing.pt", "cannot be read"]),
    "no such run": (dict(branch_from="nowhere", without=SHAPE), ["nowhere", "cannot be read"]),
    "nanoGPT's resume": (dict(init_from="resume", without=SHAPE), ["repeat its command"]),
    "log_dir is a file": (dict(log_dir="{bad}/short.txt"), ["log_dir=", "short.txt"]),
    "log_dir is empty": (dict(log_dir=""), ["log_dir"]),
    "nothing to sample from": (dict(sample=1), ["log_dir=", "no weights"]),
    "no vocabulary": (dict(encoding="gpt2", env={
        "TIKTOKEN_CACHE_DIR": "none", "https_proxy": "http://127.0.0.1:9"}), ["--encoding=bytes"]),
    # These are found only during training
    "out of memory": (dict(arrange=[(raise_at, 3, torch.OutOfMemoryError("CUDA"))]),
                      ["Out of memory", "--B"]),
    "no memory": (dict(arrange=[(raise_at, 3, MemoryError())]), ["Out of memory", "--B"]),
    "torch has no memory": (dict(arrange=[(raise_at, 3, RuntimeError(
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))]),
        ["Out of memory", "--B"])}

@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """Return a folder with data that cannot be used."""
    bad = tmp_path_factory.mktemp("bad")
    save_shards(bad / "noval", val=0)
    save_shards(bad / "table", change=lambda tokens: tokens[:, None])
    save_shards(bad / "floats", change=lambda tokens: tokens / 2)
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
def test_a_mistake_is_reported_in_one_line(folder, bad, name):
    changes, expected = MISTAKES[name]
    changes = {k: v.format(bad=bad) if isinstance(v, str) else v for k, v in changes.items()}
    run = Forked(folder / f"log {name}", **changes)
    assert run.wait() == 1
    one_line(run.err, *expected)

BAD = """--n_embd=0 --n_layer=0 --n_head=0 --n_head=5 --T=0 --B=0 --B=0.5 --max_steps=many
    --max_steps=-5 --max_lr=0 --max_lr=nan --max_lr=inf --min_lr=-1 --lr_shape=square --top_k=-1
    --temperature=-1 --grad_clip=-1 --grad_clip=nan --epochs=-1 --total_batch_size=0
    --total_batch_size=1000 --shuffle=2 --val_tokens=0 --keep_every=0.5 --device=gpu --dtype=float8
    --compile=maybe --encoding=morse --optimizer=sgd""".split()

@pytest.mark.parametrize("flag", BAD)
def test_an_invalid_value_is_reported_with_its_name(folder, monkeypatch, capsys, flag):
    """Without the check, some would cause a traceback, and others would yield a bad model."""
    monkeypatch.setattr("sys.argv", ["train_gpt2.py", f"--data={folder}/text.txt", flag])
    monkeypatch.setattr(t.signal, "signal", mock.Mock())
    monkeypatch.setattr(t, "train", mock.Mock())
    with pytest.raises(SystemExit):
        t.main()
    one_line(capsys.readouterr().err, flag.partition("=")[0][2:])

def test_a_value_edited_in_the_file_is_checked_like_a_flag():
    with pytest.raises(t.UserError, match="optimizer=Muon: choose one of adamw, muon"):
        t.check_values(t.Config(optimizer="Muon"), {})

def test_words_for_true_and_false_in_any_case(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train_gpt2.py", "--compile=false", "--shuffle=TRUE"])
    assert t.parse_flags(t.Config, "") == {"compile": False, "shuffle": True}
    monkeypatch.setattr("sys.argv", ["train_gpt2.py", "--compile=auto", "--max_lr=1e-3"])
    assert t.parse_flags(t.Config, "") == {"compile": "auto", "max_lr": 1e-3}

def test_end_of_text_in_a_text_file_and_in_a_prompt_is_the_special_token(tmp_path):
    """Its characters are not encoded as text: <|endoftext|> is 256 in the encoding "bytes"."""
    path = tmp_path / "a.txt"
    path.write_text("hello world\n<|endoftext|>\n" * 300)
    cfg, encoding = t.Config(data=str(path), encoding="bytes", T=16), t.get_encoding("bytes")
    tokens = np.concatenate([loader.shards[0] for loader in t.open_data(cfg, encoding)])
    assert (tokens == 256).sum() == 300 and len(tokens) == 300 * (12 + 1 + 1)
    model = mock.MagicMock()
    model.parameters = lambda: iter([torch.zeros(1)])
    model.generate = lambda idx, *_, **__: idx
    cfg = t.Config(sample_prompt="<|endoftext|>Hi")
    assert t.sample_text(model, encoding, cfg, seed=0) == "<|endoftext|>Hi"
    model.generate = mock.Mock(side_effect=model.generate)
    t.sample_text(model, encoding, cfg, seed=0)
    assert model.generate.call_args.args[0].tolist() == [[256, ord("H"), ord("i")]]

def test_a_text_that_tiktoken_refuses_is_encoded_in_parts(tmp_path, gpt2_encoding):
    path = tmp_path / "a.txt"
    path.write_text(" " * 999_999 + "x")
    loaders = t.open_data(t.Config(data=str(path), T=16), t.get_encoding("gpt2"))
    tokens = np.concatenate([loader.shards[0] for loader in loaders])
    assert gpt2_encoding.decode(tokens.tolist()) == path.read_text()

def test_main_works_with_streams_that_cannot_be_reconfigured(folder, monkeypatch, capfd):
    """A notebook's stdout, for example, has no reconfigure()."""
    monkeypatch.setattr("sys.argv", ["train_gpt2.py", *flags(folder / "log", max_steps=1)])
    monkeypatch.setattr(t.signal, "signal", mock.Mock())
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    for name in ("transformers", "matplotlib"):  # importing them takes seconds
        monkeypatch.setitem(sys.modules, name, None)
    t.main()
    assert "Done." in out.getvalue()

def test_main_takes_flags_in_a_notebook(folder, monkeypatch):
    """There, the command line belongs to the notebook."""
    monkeypatch.setattr("sys.argv", ["ipykernel", "-f", "kernel.json"])
    monkeypatch.setattr(t.signal, "signal", mock.Mock())
    monkeypatch.setattr(t, "train", trained := mock.Mock())
    t.main(flags(folder / "notebook", max_steps=3))
    assert trained.call_args.args[0].cfg.max_steps == 3

def test_a_mistake_of_one_process_ends_all_after_its_save(folder):
    """If one process meets a mistake, a save in progress is completed, and all processes end."""
    statuses, runs = together(2, folder / "lone", arrange=[
        (slow_saves, 0.5), (raise_at, 5, t.UserError("A bad token."), 0)])
    assert statuses == [1, 1] and (4, "train") in read_log(folder / "lone")
    assert one_line(runs[0].err) == "train_gpt2.py: A bad token.\n"
    assert load(folder / "lone" / "checkpoint_00005.pt")["step"] == 5
