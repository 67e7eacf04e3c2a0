"""Tests of the data: each row is a function of the seed and its number, and files are checked."""
import contextlib
import dataclasses
import pickle
from unittest import mock

import numpy as np
import pytest
import torch
from test_checkpoint import Bomb
from test_model import ids, small, stub_run

import train_gpt2 as t

T = 8
# The first tokens of rows 0 to 5 and 60 to 65 with seed 1337
ORDER = [148, 140, 124, 116, 100, 132, 72, 16, 48, 88, 32, 64]

def shards(folder, lengths=(100, 57, 8, 300)):
    """Write shards of consecutive numbers, so that each token shows its position."""
    folder.mkdir(exist_ok=True)
    paths, start = [], 0
    for i, n in enumerate(lengths):
        paths.append(folder / f"numbers_train_{i:06d}.npy")
        np.save(paths[-1], np.arange(start, start + n, dtype=np.uint16))
        start += n
    return paths

@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_visits_every_row_once(tmp_path, shuffle):
    """The targets are the inputs shifted by one token. Shards too short for a row are left out."""
    loader = t.DataLoaderLite([*shards(tmp_path), np.zeros(0, np.uint16)], T, 3, shuffle)
    firsts = [*range(0, 96, T), *range(100, 156, T), *range(165, 461, T)]
    assert loader.rows_per_epoch == len(firsts) == 12 + 7 + 0 + 37
    for epoch in range(3):
        x, y = loader.batch(epoch * len(firsts), len(firsts))
        assert x.dtype == y.dtype == torch.int64 and torch.equal(y, x + 1)
        assert sorted(x[:, 0].tolist()) == firsts
        assert (x[:, 0].tolist() == firsts) is not shuffle
    assert isinstance(loader.open_tokens, np.memmap)  # a shard in memory would take 200 MB

def test_later_epochs_cut_a_text_at_other_places():
    """The cuts of different epochs are far apart. Validation rows never change."""
    loader = t.DataLoaderLite([np.arange(1000, dtype=np.uint16)], T, 3, shuffle=True, recut=True)
    epochs = [np.sort(loader.read(epoch * 124, 124)[:, 0]) for epoch in range(4)]
    assert [*epochs[0]] == [*range(0, 992, T)]
    assert all((np.diff(starts[1:]) == T).all() for starts in epochs)
    assert [starts[1] for starts in epochs] == [8, 4, 7, 2]
    for shuffle in (True, False):
        cfg = t.Config(data=t.__file__, T=T, shuffle=shuffle)
        train, val = t.open_data(cfg, t.get_encoding("bytes"))
        assert (train.recut, val.recut) == (shuffle, False)

def test_the_order_never_changes_between_versions(tmp_path):
    """A run that an older NumPy or an older script started continues with the same rows."""
    loader = t.DataLoaderLite(shards(tmp_path), T, seed=1337, shuffle=True)
    assert [*loader.read(0, 6)[:, 0], *loader.read(60, 6)[:, 0]] == ORDER

@pytest.mark.parametrize("B", [1, 5, 56, 130])
def test_rows_depend_on_the_seed_and_their_number_only(tmp_path, B):
    """The loader has no state, so any batch size reads the same rows, in any order."""
    loader, other = (t.DataLoaderLite(shards(tmp_path), T, seed, shuffle=True) for seed in (5, 6))
    whole = loader.read(0, 260)
    for first in range(0, 260 - B, 37):
        assert np.array_equal(loader.read(first, B), whole[first:first + B])
    epochs = [whole[n * 56:(n + 1) * 56].tolist() for n in range(3)]
    assert other.read(0, 56).tolist() not in epochs and epochs[0] not in epochs[1:]

@pytest.mark.parametrize("B, processes", [(12, 1), (2, 1), (3, 2)])
def test_each_row_of_a_step_is_read_once(monkeypatch, B, processes):
    """The processes and their micro-batches share the rows of a step without overlap."""
    monkeypatch.setattr(t, "world_size", lambda: processes)
    monkeypatch.setattr(t, "sum_over_ranks", lambda share: share * processes)
    rows, cfg = [], t.Config(total_batch_size=12 * 32, T=32, B=B)
    for rank in range(processes):
        monkeypatch.setattr(t, "rank", lambda rank=rank: rank)
        run = stub_run(small(), cfg, ids(B, 33))
        run.ddp_model.no_sync = contextlib.nullcontext
        batch, run.state.step = run.train_loader.batch, 7
        t.train_step(run)
        for call in batch.call_args_list:
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
        assert run.autocast().__enter__.called
        return None, y[y != -100].float().mean()
    run = mock.MagicMock(cfg=t.Config(B=B, T=T, val_tokens=tokens), device=torch.device("cpu"))
    loader = t.DataLoaderLite([np.arange(1000, dtype=np.uint16)], T)
    monkeypatch.setattr(t, "world_size", lambda: processes)
    parts = []  # (sum of losses, number of targets) of each rank
    monkeypatch.setattr(t, "sum_over_ranks", lambda part: parts.append(part) or sum(parts))
    for rank in range(processes):
        monkeypatch.setattr(t, "rank", lambda rank=rank: rank)
        loss = t.validation_loss(run, loader, model)
    assert loss == pytest.approx(np.arange(1, rows * T + 1).mean(), rel=1e-6)

def test_a_file_that_is_not_a_shard_is_reported(tmp_path):
    """The message names a file that is cut off, empty or a pickle. Code in a pickle is not run."""
    path, marker = tmp_path / "x_train_000000.npy", tmp_path / "the bomb went off"
    np.save(path, np.zeros(100, np.uint16))
    contents = {"": path.read_bytes()[:-1], "No data": b"", "pickle": pickle.dumps(Bomb(marker))}
    for reason, content in contents.items():
        path.write_bytes(content)
        with pytest.raises(t.UserError, match=f"x_train_000000.npy .*{reason}"):
            t.DataLoaderLite([path], T)
    assert not marker.exists()

def test_each_loader_has_its_own_order(tmp_path, monkeypatch):
    """Shards are sorted by name, not as the disk lists them. Only training rows are shuffled."""
    for i in range(4):
        for split in ("val", "train"):
            np.save(tmp_path / f"x_{split}_00000{i}.npy", np.arange(500, 990, dtype=np.uint16))
    cfg, encoding = t.Config(data=str(tmp_path), T=T, seed=7), mock.Mock(n_vocab=990)
    glob = t.Path.glob
    monkeypatch.setattr(t.Path, "glob", lambda *args: sorted(glob(*args), reverse=True))
    train, val = t.open_data(cfg, encoding)
    for loader in (train, val):
        assert [path.stem[-1] for path in loader.shards] == list("0123")
    assert (train.seed, train.shuffle, val.shuffle) == (7, True, False)
    assert train.n_vocab == val.n_vocab == 990 and not train.recut
    cfg = dataclasses.replace(cfg, shuffle=False)
    assert t.open_data(cfg, encoding)[0].shuffle is False

def test_an_id_beyond_the_vocabulary_is_reported_with_its_shard(tmp_path):
    """The id is found when its row is read, wherever it is in the shard."""
    paths = shards(tmp_path)
    loader = t.DataLoaderLite(paths, T, n_vocab=1000)
    damaged = np.load(paths[3])
    damaged[100] = 1000  # the smallest id that is too large
    np.save(paths[3], damaged)
    with pytest.raises(t.UserError, match="numbers_train_000003.npy .*--encoding"):
        loader.read(0, loader.rows_per_epoch)
    loader.n_vocab = 1001
    loader.read(0, loader.rows_per_epoch)

def test_the_same_shards_in_another_folder_are_the_same_data(tmp_path):
    """The fingerprint depends on the contents, but not on the folder.

    For a shard it covers the size and both ends, and for a text every token.
    """
    def fingerprint(paths):
        return t.fingerprint_of(t.DataLoaderLite(paths, T))
    assert fingerprint(shards(tmp_path / "y", (100, 57, 8, 301))) != fingerprint(shards(tmp_path))
    other = shards(tmp_path / "y")
    assert fingerprint(other) == fingerprint(shards(tmp_path))
    # A version that computed a different value could not continue earlier runs
    assert fingerprint(other).endswith("#a7209012")
    tokens = np.arange(20_000, dtype=np.uint16)
    np.save(other[1], tokens)
    before = fingerprint(other)
    np.save(other[1], np.where(tokens == 19_999, 0, tokens).astype(np.uint16))  # its last token
    assert fingerprint(other) != before
    assert fingerprint([tokens]) != fingerprint([np.where(tokens == 10_000, 0, tokens)])

def test_a_text_keeps_every_byte_and_its_last_tenth_is_for_validation(tmp_path, gpt2_encoding):
    """Line ends, odd characters and special tokens are read as they are in the file."""
    text = "naïve\r\n\t日本 \0 \U0001f600 <|endoftext|>".encode().ljust(1000, b"x")
    (tmp_path / "a.txt").write_bytes(text)
    train, val = t.open_data(t.Config(data=f"{tmp_path}/a.txt", T=T), t.get_encoding("bytes"))
    assert (bytes([*train.shards[0]]), bytes([*val.shards[0]])) == (text[:900], text[900:])
    train, val = t.open_data(t.Config(data=f"{tmp_path}/a.txt", T=T), gpt2_encoding)
    tokens = gpt2_encoding.encode_ordinary(text.decode())
    assert [*train.shards[0], *val.shards[0]] == tokens
    assert (t.padded(257), t.padded(50257), t.padded(256)) == (384, 50304, 256)

def test_the_end_of_a_text_does_not_count_as_a_byte():
    """Bits per byte are per byte of the targets in validation. <|endoftext|> has no bytes."""
    tokens = np.array([*b"ab", 256, *b"cd", 256, *b"efgh"], dtype=np.uint16)
    loader = t.DataLoaderLite([tokens[:5], tokens[5:]], T=2)
    encoding = t.get_encoding("bytes")
    # The targets are b, <|endoftext|>, c, d in the first shard, and e, f, g, h in the second
    assert t.tokens_per_byte(loader, encoding, val_tokens=100) == pytest.approx(8 / 7)
    assert t.tokens_per_byte(loader, encoding, val_tokens=5) == pytest.approx(5 / 4)

def test_shards_must_have_the_encoding_that_their_manifest_names(tmp_path):
    """Another encoding is refused, because the model would learn nonsense.

    The ids of this encoding need uint32.
    """
    for part in ("train", "val"):
        np.save(tmp_path / f"x_{part}_000000.npy", np.arange(70_000, 71_000, dtype=np.uint32))
    (tmp_path / "manifest.json").write_text('{"settings": {"encoding": "cl100k_base"}}')
    cfg, encoding = t.Config(data=str(tmp_path), T=T), mock.Mock(n_vocab=100_277)
    with pytest.raises(t.UserError, match="need --encoding=cl100k_base, not gpt2"):
        t.open_data(cfg, encoding)
    cfg = dataclasses.replace(cfg, encoding="cl100k_base")
    assert t.open_data(cfg, encoding)[0].read(0, 1).min() >= 70_000
