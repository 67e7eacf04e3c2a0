"""Tests of the data: each row is a function of the seed and its number, and files are checked."""
import contextlib
import json
import pickle
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import Bomb, ids, small, stub_run

import train_gpt2 as t

T = 8
# The first tokens of rows 0 to 5 and 60 to 65 with seed 1337
ORDER = [148, 140, 124, 116, 100, 132, 72, 16, 48, 88, 32, 64]

def shards(lengths=(100, 57, 8, 300)):
    """Return shards of consecutive numbers, so that each token shows its position."""
    return np.split(np.arange(sum(lengths), dtype=np.uint16), np.cumsum(lengths)[:-1])

def first_tokens(loader, row, n):
    """Return the first token of each of n rows."""
    return loader.batch(row, n)[0][:, 0].tolist()

@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_visits_every_row_once(shuffle):
    """The targets are the inputs shifted by one token. Shards too short for a row are left out."""
    loader = t.DataLoaderLite([*shards(), np.zeros(0, np.uint16)], T, seed=3, shuffle=shuffle)
    firsts = [*range(0, 96, T), *range(100, 156, T), *range(165, 461, T)]
    assert loader.rows_per_epoch == len(firsts) == 12 + 7 + 0 + 37
    for epoch in range(3):
        x, y = loader.batch(epoch * len(firsts), len(firsts))
        assert x.dtype == y.dtype == torch.int64 and torch.equal(y, x + 1)
        assert sorted(x[:, 0].tolist()) == firsts
        assert (x[:, 0].tolist() == firsts) is not shuffle

def test_later_epochs_cut_a_text_at_other_places():
    """The cuts of different epochs are far apart."""
    loader = t.DataLoaderLite(shards([1000]), T, seed=3, shuffle=True, shift=True)
    epochs = [sorted(first_tokens(loader, epoch * 124, 124)) for epoch in range(4)]
    assert epochs[0] == [*range(0, 992, T)]
    assert all((np.diff(starts[1:]) == T).all() for starts in epochs)
    assert [starts[:2] for starts in epochs] == [[0, 8], [0, 4], [0, 7], [0, 2]]

def test_the_order_never_changes_between_versions():
    """A run that an older NumPy or an older script started continues with the same rows."""
    loader = t.DataLoaderLite(shards(), T, seed=1337, shuffle=True)
    assert first_tokens(loader, 0, 6) + first_tokens(loader, 60, 6) == ORDER

@pytest.mark.parametrize("B", [1, 5, 130])
def test_rows_depend_on_the_seed_and_their_number_only(B):
    """The loader has no state, so any batch size reads the same rows, in any order."""
    loader, other = (t.DataLoaderLite(shards(), T, seed=n, shuffle=True) for n in (5, 6))
    whole = first_tokens(loader, 0, 260)
    for row in reversed(range(0, 260 - B, 37)):
        assert first_tokens(loader, row, B) == whole[row:row + B]
    epochs = [whole[n * 56:(n + 1) * 56] for n in range(3)]
    assert first_tokens(other, 0, 56) not in epochs and epochs[0] not in epochs[1:]

@pytest.mark.parametrize("B, processes", [(12, 1), (2, 1), (3, 2)])
def test_each_row_of_a_step_is_read_once(monkeypatch, B, processes):
    """The processes and their micro-batches share the rows of a step without overlap."""
    monkeypatch.setattr(t, "WORLD_SIZE", processes)
    monkeypatch.setattr(t.dist, "all_reduce", lambda sums: None)
    rows, cfg = [], t.Config(total_batch_size=12 * 32, T=32, B=B)
    for rank in range(processes):
        monkeypatch.setattr(t, "RANK", rank)
        run = stub_run(small(), cfg, ids(B, 33))
        run.ddp_model.no_sync, run.step = contextlib.nullcontext, 7
        t.train_step(run)
        for call in run.train_loader.batch.call_args_list:
            rows += range(call.args[0], call.args[0] + B)
    assert sorted(rows) == list(range(7 * 12, 8 * 12))

@pytest.mark.parametrize("tokens, rows", [(13 * T + 3, 13), (1, 1), (10**6, 124)])
@pytest.mark.parametrize("B, processes", [(4, 1), (64, 1), (3, 2), (2, 5)])
def test_validation_is_the_same_for_any_b_and_processes(monkeypatch, B, processes, tokens, rows):
    """The loss is the mean over the first val_tokens tokens: at least one row, at most all rows.

    Every batch has the same shape, even the last one.
    """
    def model(x, y, return_logits):
        assert x.shape == (B, T) and x.min() >= 0 and not torch.is_grad_enabled()
        return None, y[y != -100].float().mean()

    def all_reduce(sums):  # the last process gets the sums over all processes
        parts.append(sums.clone())
        sums.copy_(sum(parts))
    parts, cfg = [], t.Config(B=B, T=T, val_tokens=tokens)
    run = mock.MagicMock(cfg=cfg, device=torch.device("cpu"), model=model,
                         val_loader=t.DataLoaderLite(shards([1000]), T))
    monkeypatch.setattr(t.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(t, "WORLD_SIZE", processes)
    for rank in range(processes):
        monkeypatch.setattr(t, "RANK", rank)
        loss = t.validation_loss(run)
    assert loss == pytest.approx(np.arange(1, rows * T + 1).mean(), rel=1e-6)

def test_bytes_per_token_are_those_of_the_targets_of_a_validation(gpt2_encoding):
    text = "<|endoftext|>It is naïve. " * 9
    shard = np.array(gpt2_encoding.encode(text, allowed_special="all"), np.uint16)
    run = mock.Mock(cfg=t.Config(T=8, val_tokens=24), val_loader=t.DataLoaderLite([shard], 8))
    targets = [token for token in shard[1:25].tolist() if token != 50256]
    assert t.bytes_per_token(run) == len(gpt2_encoding.decode_bytes(targets)) / 24

def test_a_file_that_is_not_a_shard_is_reported(tmp_path):
    """The message names the file: cut off, empty, a pickle, or an array of objects.

    Code in a pickle is not run. A shard is mapped into memory, since it may have 200 MB.
    """
    path, marker = tmp_path / "x_train_000000.npy", tmp_path / "the bomb went off"
    np.save(path, np.zeros(100, np.uint16))
    assert isinstance(t.open_shard(path), np.memmap)
    contents = [path.read_bytes()[:-1], b"", pickle.dumps(Bomb(marker))]
    np.save(path, np.array([Bomb(marker)]), allow_pickle=True)
    contents.append(path.read_bytes())
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(t.UserError, match="x_train_000000.npy .*shard"):
            t.open_shard(path)
    assert not marker.exists()

def test_a_folder_of_shards_is_opened(tmp_path):
    """Shards are sorted by name. Only training rows are shuffled, and the cuts stay in place.

    Shards whose manifest names another encoding are refused, because the model would learn
    nonsense. The ids of this encoding need uint32.
    """
    for split, i in (("val", 0), ("train", 3), ("train", 1), ("train", 2)):
        tokens = np.arange(70_000, 71_000, dtype=np.uint32) + i
        np.save(tmp_path / f"edufineweb_{split}_{i:06d}.npy", tokens)
    encoding = mock.Mock(n_vocab=100_277)
    for shuffle in (True, False):
        cfg = t.Config(data=str(tmp_path), T=T, seed=7, shuffle=shuffle)
        train, val = t.open_data(cfg, encoding)
        assert [shard[0] - 70_000 for shard in train.shards] == [1, 2, 3]
        assert val.shards[0][0] == 70_000 and train.seed == 7
        assert (train.shuffle, val.shuffle, train.shift, val.shift) == (shuffle, *[False] * 3)
    manifest = json.dumps({"settings": {"encoding": "cl100k_base"}})
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(t.UserError, match="need --encoding=cl100k_base, not gpt2"):
        t.open_data(cfg, encoding)
    t.open_data(t.replace(cfg, encoding="cl100k_base"), encoding)
    with pytest.raises(t.UserError, match="too short for T=1024"):
        t.open_data(t.replace(cfg, encoding="cl100k_base", T=1024), encoding)

def test_a_text_keeps_every_byte_and_its_last_tenth_is_for_validation(tmp_path, gpt2_encoding):
    """Line ends and odd characters are read as they are. <|endoftext|> is the special token.

    Only the training rows of a shuffled text are cut at new places in each epoch.
    """
    text = "naïve\r\n\t日本 \0 \U0001f600 ".encode().ljust(1000, b"x")
    path, encoding = tmp_path / "a.txt", t.get_encoding("bytes")
    path.write_bytes(text)
    for shuffle in (True, False):
        cfg = t.Config(data=str(path), T=T, shuffle=shuffle)
        train, val = t.open_data(cfg, encoding)
        assert (bytes([*train.shards[0]]), bytes([*val.shards[0]])) == (text[:900], text[900:])
        assert (train.shift, val.shift, val.shuffle) == (shuffle, False, False)
    text = "é<|endoftext|> It's".join("abcdefghijk" * 3)
    path.write_text(text, encoding="utf-8")
    train, val = t.open_data(cfg, gpt2_encoding)
    expected = gpt2_encoding.encode(text, allowed_special="all")
    assert np.concatenate([*train.shards, *val.shards]).tolist() == expected
    path.write_bytes(b"caf\xe9")
    with pytest.raises(t.UserError, match="a.txt is not UTF-8"):
        t.open_data(cfg, encoding)
