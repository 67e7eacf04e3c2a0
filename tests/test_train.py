"""Tests of training as users start it: presets, several processes, and common mistakes."""
import dataclasses
import re
from unittest import mock
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from conftest import (
    ROOT, TINY, Forked, assert_close_logs, beside_others, device_type, one_line, read_log,
    run_python, run_script, start_simulation, succeed, together, write_text)
from test_model import small
from torch.nn import functional as F

import hellaswag
import train_gpt2 as t

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the text that all runs train on."""
    folder = tmp_path_factory.mktemp("train")
    write_text(folder)
    return folder

def save_shards(folder, train=5000, val=1000):
    """Write shards of random bytes with these numbers of tokens, and none for 0 tokens."""
    folder.mkdir(exist_ok=True)
    tokens = np.random.default_rng(0).integers(0, 257, 5000).astype(np.uint16)
    for split, size in (("train", train), ("val", val)):
        if size:
            np.save(folder / f"x_{split}_000000.npy", tokens[:size])

@beside_others
def test_the_quick_start(tmp_path):
    """Without training shards, the script trains on Shakespeare and says how to go on.

    It also does so if a failed fineweb.py has left an incomplete folder. Nothing is written to
    stderr, not even the warnings of Python's development mode about unclosed files and deprecated
    functions.
    """
    save_shards(tmp_path / "edu_fineweb10B", train=0)
    (tmp_path / "edu_fineweb10B" / ".lock").touch()
    shorter = ["--max_steps=15", "--eval_every=15", "--sample_every=15", "--val_tokens=4096",
               "--sample_tokens=50"]
    env = {"PYTHONDEVMODE": "1", "PYTHONWARNINGS": "error::ResourceWarning"}
    done = run_script("train_gpt2.py", *shorter, f"--device={device_type()}", cwd=tmp_path,
                      env=env)
    assert (done.returncode, done.stderr) == (0, "")
    start, first_lines, *_ = done.stdout.split("\n\n")
    assert start.startswith("Quick start") and "python fineweb.py" in start
    assert "SMALL" in first_lines and "n_layer=3" in first_lines and "max_steps=15" in first_lines
    assert re.findall(r"^ +(\d+)/15 train", done.stdout, re.M) == ["0", "10"]
    assert done.stdout.count("--- sample at step 15") == done.stdout.count("--- sample") == 1
    assert "--sample=3 --log_dir=log_small" in done.stdout
    values = read_log(tmp_path / "log_small")
    assert set(values) == {(0, "val"), (15, "val"), *((step, "train") for step in range(15))}
    assert values[15, "val"] < 3.5 < values[0, "val"]
    val, bits = re.search(r" 15/15 val (.*) \((.*) bits per byte\)", done.stdout).groups()
    assert float(val) == pytest.approx(values[15, "val"], abs=1e-4)
    assert float(bits) == pytest.approx(float(val) / np.log(2), abs=1e-3)  # each token is one byte

def test_with_shards_the_command_of_the_quick_start_trains_on_them(tmp_path, monkeypatch):
    save_shards(tmp_path / "edu_fineweb10B")
    monkeypatch.chdir(tmp_path)
    cfg, _, lines = t.resolve_config({"encoding": "bytes"})
    assert cfg == t.Config(encoding="bytes") and "settings  Config" in lines

def test_the_data_selects_the_preset_and_flags_override_it(tmp_path, monkeypatch):
    """A text file is trained with SMALL, and a folder of shards with the defaults in Config."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    given = {"data": "text.txt", "n_layer": "5", "seed": "7"}
    cfg, _, lines = t.resolve_config(given)
    expected = t.SMALL | {"data": "text.txt", "n_layer": 5, "seed": 7}
    assert cfg == dataclasses.replace(t.Config(), **expected)
    assert all(f"{name}={expected[name]!r}" in lines for name in t.SMALL)
    assert "SMALL" in lines and "Quick start" not in lines
    save_shards(tmp_path / "shards")
    cfg, start, lines = t.resolve_config(given | {"data": "shards", "encoding": "bytes"})
    assert cfg == t.Config(data="shards", encoding="bytes", n_layer=5, seed=7)
    assert start == t.StartingPoint()
    assert t.gpt_config_of_run(cfg) == t.GPTConfig(n_vocab=257, n_layer=5)
    assert "Config" in lines and "SMALL" not in lines
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.B = 1

def test_a_preset_may_choose_the_data(tmp_path, monkeypatch):
    """A flag replaces it, as it does for other constants."""
    given = {"log_dir": str(tmp_path / "log")}
    mine, other = str(write_text(tmp_path)), str(t.__file__)
    monkeypatch.setitem(t.SMALL, "data", mine)
    assert t.resolve_config(given)[0].data == mine
    assert t.resolve_config(given | {"data": other})[0].data == other

def test_weights_and_a_text_select_finetune_and_determine_the_shape(folder, monkeypatch):
    """Given weights are trained on a text with FINETUNE, since SMALL would destroy them.

    The weights determine the model's shape and encoding. A flag that contradicts them is refused.
    """
    decided = dict(n_layer=2, n_head=3, n_embd=12, block_size=100, n_vocab=257)
    # Whether the weights were trained with dropout does not matter
    content = {"gpt_config": decided | {"dropout": 0.0}, "encoding": "bytes", "eval_model": {}}
    weights = t.weights_in_checkpoint(content, "weights")
    monkeypatch.setattr(t, "read_weights", lambda name: weights)
    given = {"data": f"{folder}/text.txt", "init_from": "weights", "dropout": "0.1"}
    cfg, start, lines = t.resolve_config(given)
    assert start.weights is weights and start.checkpoint is None
    gpt_config = t.gpt_config_of_run(cfg, start.constants_from)
    assert (gpt_config.block_size, gpt_config.dropout, gpt_config.n_layer) == (100, 0.1, 2)
    assert "FINETUNE" in lines
    assert lines.endswith("weights   weights sets n_layer=2, n_head=3, n_embd=12, encoding='bytes'")
    assert f" max_lr={0.1 / 12} T=64 " in lines
    expected = t.FINETUNE | given | dict(n_layer=2, n_head=3, n_embd=12, T=64, encoding="bytes",
                                         dropout=0.1, max_lr=0.1 / 12)
    assert cfg == dataclasses.replace(t.Config(), **expected)
    cfg, *_ = t.resolve_config(given | {"T": "32", "max_steps": "7"})  # instead of epochs
    assert (cfg.T, cfg.max_steps, cfg.epochs) == (32, 7, 0)
    with pytest.raises(t.UserError, match="n_embd is 12 in the weights weights: leave out --n_e"):
        t.resolve_config(given | {"n_embd": "24"})
    assert t.resolve_config(given | {"n_embd": "12"})[0].n_embd == 12  # not a contradiction
    for name, value in (("max_lr", 0.5), ("T", 16)):  # added to FINETUNE
        monkeypatch.setitem(t.FINETUNE, name, value)
    cfg, *_ = t.resolve_config(given)
    assert (cfg.max_lr, cfg.T) == (0.5, 16)

def test_the_losses_are_those_of_a_plain_loop(folder):
    """The losses equal those of a short loop over the same rows with the same model and AdamW.

    `epochs` determines the number of steps.
    """
    run = succeed(Forked(folder / "plain", shuffle=False, epochs=0.0341, weight_decay=0.3,
                         grad_clip=0.5, lr_shape="linear", min_lr=0, seed=1337, eval_every=0))
    assert "12 steps, 1,536 tokens, 0.03 epochs" in run.out
    text = torch.tensor(list((folder / "text.txt").read_bytes()))
    torch.manual_seed(1337)
    model = t.GPT(t.GPTConfig(block_size=16, n_layer=1, n_head=2, n_embd=16, n_vocab=257))
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
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in adamw.param_groups:
            group["lr"] = 1e-2 * min((step + 1) / 5, (12 - step) / (12 - 5))
        adamw.step()
        adamw.zero_grad()
        losses[step, "train"] = loss.item()
    assert_close_logs(run.log_dir, losses)

@beside_others
def test_an_edited_copy_of_the_script_trains_with_its_constants(tmp_path):
    """Constants that are edited in the file take effect without flags.

    Comments at the end of edited lines may be missing, or may follow after a single space.
    """
    save_shards(tmp_path / "edu_fineweb10B")
    for name in ("transformers.py", "matplotlib.py"):  # importing them takes seconds
        (tmp_path / name).write_text("raise ImportError")
    source = (ROOT / "train_gpt2.py").read_text()
    for name, value in (TINY | dict(max_steps=2e0, compile=False, val_tokens=512)).items():
        line = re.compile(rf"^(    {name}: [^=]+ =) .*", re.M)
        source, n = line.subn(rf"\1 {value!r}{' # was 12' * (name == 'n_head')}", source, count=1)
        assert n == 1, name
    (tmp_path / "train_gpt2.py").write_text(source)
    (tmp_path / "fineweb.py").symlink_to(ROOT / "fineweb.py")
    code = start_simulation() + "import train_gpt2; train_gpt2.main()"
    done = run_python(code, cwd=tmp_path, env={"PYTHONPATH": ""})
    assert (done.returncode, done.stderr) == (0, "")
    assert "n_layer=1, n_head=2, n_embd=16" in done.stdout
    assert [step for step, metric in read_log(tmp_path / "log") if metric == "train"] == [0, 1]

@pytest.mark.parametrize("n, optimizer", [(2, "adamw"), (2, "muon"), (8, "muon")])
def test_n_processes_train_the_same_model_as_one(folder, n, optimizer):
    """The losses do not depend on the number of processes. B is lowered to 1 for 8 processes."""
    words = dict(optimizer=optimizer, muon_lr_ratio=2.5, B=2, max_steps=20, sample_every=20,
                 sample_tokens=9)
    one = succeed(Forked(folder / f"1_{optimizer}_{n}", **words))
    statuses, runs = together(n, folder / f"{n}_{optimizer}", **words)
    assert statuses == [0] * n, [run.err for run in runs]
    assert_close_logs(one.log_dir, runs[0].log_dir)
    assert runs[0].out.count("--- sample at step 20 ---") == 1 and runs[1].out == ""

@pytest.mark.parametrize("processes, tokens, T, B, lowered", [
    (8, 2048, 64, 32, 4), (8, 524288, 1024, 64, 64), (1, 524288, 1024, 60, 32), (4, 96, 8, 9, 3),
    (None, 2048, 64, 32, 32)])
def test_b_is_lowered_until_it_divides_the_batch(monkeypatch, processes, tokens, T, B, lowered):
    """B is lowered until it divides the rows that each process reads in a step.

    The quick start needs this on 8 GPUs. If WORLD_SIZE is set without RANK, as Slurm may do, there
    is one process.
    """
    monkeypatch.setenv("WORLD_SIZE", str(processes or 8))
    if processes:
        monkeypatch.setenv("RANK", "0")
    cfg = t.Config(data=__file__, total_batch_size=tokens, T=T, B=B)
    t.check_config(cfg)
    assert t.fitting_B(cfg) == lowered
    if not processes:
        flags = dict(data=__file__, total_batch_size=tokens, T=T, B=B)
        assert t.resolve_config(flags)[0].B == lowered

def test_restarted_processes_do_not_find_addresses_of_killed_ones(monkeypatch):
    """After a restart, processes use other keys of torchrun's store, which survives the restart.

    The timeout is long enough for the export, during which the other processes wait for rank 0.
    """
    store, seen = torch.distributed.HashStore(), []
    monkeypatch.setattr(t.dist, "rendezvous", lambda url: iter([(store, 0, 2)]))
    monkeypatch.setattr(t.dist, "init_process_group", lambda **words: seen.append(words))
    for count, device in (("0", "cpu"), ("1", "cuda:0")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        t.join_processes(torch.device(device))
        seen[-1]["store"].set("address", count)
    assert [words["store"].get("address") for words in seen] == [b"0", b"1"]
    assert [words["backend"] for words in seen] == ["gloo", "nccl"]
    assert min(words["timeout"].total_seconds() for words in seen) >= 3600

def test_rank_0_downloads_hellaswag_for_all_processes(monkeypatch, capsys):
    """The other processes get the questions from rank 0. Without questions, training goes on.

    The score is computed with eval_model under the run's autocast.
    """
    question, seen = dict(ctx="a w", endings=[*"bcde"], label=0), []
    model, encoding = small(), t.get_encoding("bytes")
    monkeypatch.setattr(hellaswag, "iterate_examples", get := mock.Mock(return_value=[question]))
    questions = t.prepared_hellaswag(t.Config(), model, encoding)
    assert questions.batches[0][1].max() == ord("w")  # encoded as bytes; "w" is the largest
    get.side_effect = t.UserError("no network today")
    for cfg in (t.Config(), t.Config(hellaswag_every=0)):
        assert t.prepared_hellaswag(cfg, model, encoding) is None
    assert capsys.readouterr().out == "HellaSwag is off: no network today\n"
    monkeypatch.setattr(hellaswag, "rank_and_world_size", lambda: (1, 2))
    monkeypatch.setattr(hellaswag.dist, "broadcast_object_list",
                        lambda values: seen.append(values[0]) or values.__setitem__(0, [question]))
    get.reset_mock()
    assert t.prepared_hellaswag(t.Config(), model, encoding).labels.tolist() == [0]
    assert seen == [[]] and not get.called
    score = hellaswag.Score(acc=0.2, acc_norm=0.3, total=1, n_truncated=0)
    monkeypatch.setattr(hellaswag, "evaluate", evaluate := mock.Mock(return_value=score))
    run = MagicMock()
    assert t.hellaswag_score(run) == 0.3 and run.autocast().__enter__.called
    evaluate.assert_called_once_with(run.state.eval_model, run.hellaswag_data)

def test_the_order_of_saving_evaluating_and_stepping(monkeypatch):
    """A step is saved before it is evaluated, so that no steps are lost if an evaluation fails.

    Saves, evaluations and samples happen when they are due. A signal ends the loop.
    """
    seen, state = [], mock.Mock(step=0, minutes_trained=0.0)
    cfg = t.Config(max_steps=3, save_every=2, keep_every=0, eval_every=2, hellaswag_every=3,
                   sample_every=2)
    run = MagicMock(cfg=cfg, state=state)
    run.folder.save = lambda _: seen.append("save")
    run.folder.plot_in_background = lambda: seen.append("plot")

    def train_step(run):
        state.step += 1
        return 2.5, 0.75
    for name in ("validate", "print_sample", "check_step", "report_step", "finish"):
        monkeypatch.setattr(t, name, lambda *_, name=name, **__: seen.append(name))
    monkeypatch.setattr(t, "hellaswag_score", lambda run: seen.append("hellaswag"))
    monkeypatch.setattr(t, "train_step", train_step)
    monkeypatch.setattr(
        t, "gather_from_ranks", lambda loss, norm, _: ([loss], [norm], [state.step == 9]))
    monkeypatch.setattr(t, "report", lambda run, step, metric, *_, **__: seen.append(metric))
    t.train(run)
    evaluated, hella = ["save", "validate"], ["hellaswag", "hella"]
    shown, step = ["plot"], ["check_step", "report_step"]
    assert seen == [*evaluated, *hella, *shown, *step, *step, *evaluated, *shown, "print_sample",
                    *step, *evaluated, *hella, *shown, "print_sample", "finish"]
    run.cfg = dataclasses.replace(cfg, max_steps=20, eval_every=0, hellaswag_every=0)
    t.train(run)  # until the signal after step 8
    assert state.step == 9 and seen[-3:] == [*step, "finish"]

def test_a_failure_ends_the_process_after_its_save(monkeypatch, capsys):
    """An unexpected error is printed as a traceback, and a save in progress is completed.

    Then the process ends without waiting for the other processes, which may wait for this one.
    """
    monkeypatch.setattr(t, "set_up", set_up := mock.Mock(return_value=MagicMock()))
    monkeypatch.setattr(t, "train", mock.Mock(side_effect=RuntimeError("can't allocate memory")))
    monkeypatch.setattr(t.signal, "signal", mock.Mock())
    monkeypatch.setattr(t.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(t.os, "_exit", end := mock.Mock(side_effect=SystemExit))
    monkeypatch.setattr("sys.argv", ["train_gpt2.py", f"--data={__file__}", "--device=cpu"])
    with pytest.raises(SystemExit):
        t.main()
    err = capsys.readouterr().err  # not reported as an out-of-memory error
    assert err.startswith("Traceback") and err.endswith("RuntimeError: can't allocate memory\n")
    assert set_up().folder.close.called and end.call_args.args == (1,)

# {name of a mistake: (changed constants, parts of the message)}
MISTAKES = {
    # Missing shards are reported before the missing vocabulary
    "missing shards": (dict(data="edu_fineweb10B", encoding="gpt2", env={
        "TIKTOKEN_CACHE_DIR": "none"}), ["edu_fineweb10B", "fineweb.py"]),
    "no validation shard": (dict(data="{bad}/noval"), ["noval", "_val_"]),
    "short text": (dict(data="{bad}/short.txt"), ["short.txt", "--T"]),
    "not UTF-8": (dict(data="{bad}/latin1.txt"), ["latin1.txt is not UTF-8", "0xe9"]),
    "learning rate would rise": (dict(min_lr=0.1), ["min_lr=0.1", "max_lr=0.01"]),
    "batch does not divide": (dict(total_batch_size=1000), ["=1000", "= 16 * 1: ", "=992"]),
    "unknown flag": (dict(n_layers=3), ["--n_layers", "--help"]),
    "unknown choice": (dict(optimizer="sgd"), ["optimizer=sgd", "'adamw', 'muon'"]),
    "no such device": (dict(device="cuda:99", env={"CUDA_VISIBLE_DEVICES": ""}),
                       ["device=cuda:99", "no GPU"]),
    "no such weights": (dict(init_from="nowhere/or/other"),
                        ["nowhere/or/other is neither a .pt", "Hugging Face"]),
    "no vocabulary": (dict(encoding="gpt2", env={
        "TIKTOKEN_CACHE_DIR": "none", "https_proxy": "http://127.0.0.1:9"}), ["--encoding=bytes"])}
# Mistakes that are found only during training
LATER = {
    "loss not finite": (dict(max_lr=1e30, warmup_steps=0, grad_clip=0.0), ["loss", "--max_lr"]),
    "gradient not finite": (dict(eval_every=0, save_every=2, arrange={"poison_at": 5}),
                            ["tep 5", "norm nan"]),
    "too few minutes": (dict(minutes=1e-6, warmup_steps=5), ["minutes=1e-06", "warmup_steps=5"]),
    "out of memory": (dict(arrange={"raise_at": (3, torch.OutOfMemoryError("CUDA"))}),
                      ["Out of memory", "--B"]),
    "no memory": (dict(arrange={"raise_at": (3, MemoryError())}), ["Out of memory", "--B"])}

@pytest.mark.parametrize("name", [*MISTAKES, *LATER])
def test_a_mistake_is_reported_in_one_line(folder, tmp_path, name):
    """The run ends with one line on stderr. If training has not begun, log_dir is not created."""
    save_shards(tmp_path / "noval", val=0)
    (tmp_path / "short.txt").write_text("too short to validate on. " * 5)
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9 " * 1000)
    changes, expected = (MISTAKES | LATER)[name]
    changes = {k: v.format(bad=tmp_path) if isinstance(v, str) else v for k, v in changes.items()}
    run = Forked(folder / f"log {name}", **changes)
    assert run.wait() == 1
    one_line(run.err, *expected)
    assert run.log_dir.exists() == (name in LATER)

BAD = """--n_embd=0 --n_layer=0 --n_head=0 --n_head=5 --T=0 --B=0 --B=0.5 --minutes=-1
    --max_steps=-5 --max_steps=many --epochs=-1 --max_lr=0 --max_lr=nan --max_lr=inf --min_lr=-1
    --muon_lr_ratio=-1 --lr_shape=square --warmup_steps=-1 --weight_decay=-1 --grad_clip=-1
    --total_batch_size=0 --total_batch_size=1000 --seed=-1 --seed=4294967296 --shuffle=2
    --val_tokens=0 --dropout=2 --dropout=1
    --eval_every=-1 --sample_tokens=-1 --temperature=-1 --top_k=-1 --sample=-1 --keep_every=0.5
    --device=gpu --dtype=float8 --compile=maybe --encoding=morse --optimizer=sgd""".split()

@pytest.mark.parametrize("flag", BAD)
def test_an_invalid_value_is_reported_with_its_name(folder, tmp_path, monkeypatch, capsys, flag):
    """An invalid value ends the run with one line that names the flag, before a file is written.

    Without the check, some values would cause a traceback, and others would yield a bad model.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train_gpt2.py", f"--data={folder}/text.txt", flag])
    monkeypatch.setattr(t.signal, "signal", mock.Mock())
    monkeypatch.setattr(t, "train", mock.Mock())
    with pytest.raises(SystemExit):
        t.main()
    one_line(capsys.readouterr().err, flag.partition("=")[0][2:] + "=")
    assert not any(tmp_path.iterdir())

def test_a_mistake_of_one_process_ends_all_after_its_save(folder):
    """If one process meets a mistake, a save in progress is completed, and all processes end."""
    statuses, runs = together(2, folder / "lone", arrange={
        "mistake_on_rank": (0, 5), "slow_saves": 0.5})
    assert statuses == [1, 1] and (4, "train") in read_log(folder / "lone")
    assert one_line(runs[0].err) == "train_gpt2.py: A bad token.\n"
    assert (folder / "lone" / "checkpoint_00005.pt").exists()
