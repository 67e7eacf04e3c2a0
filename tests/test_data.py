"""The data of a step is a pure function of (seed, row number); shards stay on the disk."""
from unittest import mock

import numpy as np
import pytest
import torch

import train_gpt2 as t

T = 8
# first tokens of rows 0-5 and 60-65 of these shards, for seed 1337
ORDER = [148, 140, 124, 116, 100, 132, 72, 16, 48, 88, 32, 64]


def shards(folder, lengths=(100, 57, 8, 300)):
    """Shards of consecutive numbers, so that every token tells where it stands."""
    folder.mkdir(exist_ok=True)
    paths, start = [], 0
    for i, n in enumerate(lengths):
        paths.append(folder / f"numbers_train_{i:06d}.npy")
        np.save(paths[-1], np.arange(start, start + n, dtype=np.uint16))
        start += n
    return paths


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_is_every_row_once(tmp_path, shuffle):
    loader = t.DataLoaderLite(shards(tmp_path), T, seed=3, shuffle=shuffle)
    firsts = [*range(0, 96, T), *range(100, 156, T), *range(165, 461, T)]
    assert loader.rows_per_epoch == len(firsts) == 12 + 7 + 0 + 37
    for epoch in range(3):
        x, y = loader.batch(epoch * len(firsts), len(firsts))
        assert x.dtype == y.dtype == torch.int64 and torch.equal(y, x + 1)
        assert sorted(x[:, 0].tolist()) == firsts
        assert (x[:, 0].tolist() == firsts) is not shuffle
    assert isinstance(loader.tokens, np.memmap)  # each process would hold 200 MB otherwise


def test_the_order_never_changes_between_versions(tmp_path):
    """A run begun with an older NumPy or an older copy of the script continues with its rows."""
    loader = t.DataLoaderLite(shards(tmp_path), T, seed=1337, shuffle=True)
    assert [*loader.read(0, 6)[:, 0], *loader.read(60, 6)[:, 0]] == ORDER


@pytest.mark.parametrize("B", [1, 5, 56, 130])
def test_rows_depend_on_seed_and_number_alone(tmp_path, B):
    """There is no state: any batch size reads the same rows, in any order."""
    loader, other = (t.DataLoaderLite(shards(tmp_path), T, seed, shuffle=True) for seed in (5, 6))
    whole = loader.read(0, 260)
    for first in range(0, 260 - B, 37):
        assert np.array_equal(loader.read(first, B), whole[first:first + B])
    epochs = [whole[n * 56:(n + 1) * 56].tolist() for n in range(3)]
    assert other.read(0, 56).tolist() not in epochs and epochs[0] not in epochs[1:]


@pytest.mark.parametrize("B, processes", [(12, 1), (2, 1), (3, 2)])
def test_each_row_of_a_step_is_dealt_out_once(monkeypatch, B, processes):
    monkeypatch.setattr(t, "world_size", lambda: processes)
    rows = []
    for rank in range(processes):
        monkeypatch.setattr(t, "rank", lambda rank=rank: rank)
        for micro_step in range(12 // (B * processes)):
            first = t.first_row(t.Config(total_batch_size=12 * T, T=T, B=B), 7, micro_step)
            rows += range(first, first + B)
    assert sorted(rows) == list(range(7 * 12, 8 * 12))


@pytest.mark.parametrize("B, processes", [(1, 1), (4, 1), (64, 1), (3, 2), (2, 5)])
def test_validation_is_the_same_for_any_b_and_number_of_processes(monkeypatch, B, processes):
    """The mean over the first rows. Every batch has one shape, or a GPU would plan anew."""
    def model(x, y, return_logits):
        assert x.shape == (B, T) and x.min() >= 0
        return None, y[y != -100].float().mean()
    run = mock.MagicMock(cfg=t.Config(B=B, T=T, val_tokens=13 * T + 3), device=torch.device("cpu"))
    run.val_loader = t.DataLoaderLite([np.arange(1000, dtype=np.uint16)], T)
    run.state.raw_model = model
    monkeypatch.setattr(t, "world_size", lambda: processes)
    monkeypatch.setattr(t, "sum_over_ranks", lambda total: total)
    parts = []
    for rank in range(processes):
        monkeypatch.setattr(t, "rank", lambda rank=rank: rank)
        parts.append(t.validation_loss(run))
    assert sum(parts) == pytest.approx(np.arange(1, 13 * T + 1).mean(), rel=1e-6)


NO_SHARDS = {"float32": np.zeros(100, np.float32), "10, 10": np.zeros((10, 10), np.uint16),
             "object": np.array([{}], dtype=object), "": np.zeros(100, np.uint16)}


@pytest.mark.parametrize("problem", NO_SHARDS)
def test_what_is_no_shard_is_named(tmp_path, problem):
    path = tmp_path / "x_train_000000.npy"
    np.save(path, NO_SHARDS[problem])
    if not problem:
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(t.UserError, match=f"x_train_000000.npy .*{problem}"):
        t.DataLoaderLite([path], T)


def test_an_id_beyond_the_vocabulary_names_its_shard(tmp_path):
    """Wherever it stands: it is seen when its row is read."""
    paths = shards(tmp_path)
    loader = t.DataLoaderLite(paths, T, n_vocab=1000)
    damaged = np.load(paths[3])
    damaged[100] = 60000
    np.save(paths[3], damaged)
    with pytest.raises(t.UserError, match="numbers_train_000003.npy .*--encoding"):
        loader.read(0, loader.rows_per_epoch)


def test_shards_of_bytes_are_not_taken_for_gpt2s_tokens(tmp_path):
    """All ids are in both encodings: the model would learn nonsense without a word."""
    for part in ("train", "val"):
        np.save(tmp_path / f"x_{part}_000000.npy", np.arange(257, dtype=np.uint16))
    cfg = t.Config(data=str(tmp_path), T=T)
    assert t.open_data(cfg, mock.Mock(n_vocab=257))[0].rows_per_epoch == 32
    with pytest.raises(t.UserError, match="--encoding=bytes"):
        t.open_data(cfg, mock.Mock(n_vocab=50257))


def test_same_shards_elsewhere_are_the_same_data(tmp_path):
    def fingerprint(paths):
        return t.fingerprint_of(t.DataLoaderLite(paths, T))
    assert fingerprint(shards(tmp_path / "y", (100, 57, 8, 301))) != fingerprint(shards(tmp_path))
    other = shards(tmp_path / "y")
    assert fingerprint(other) == fingerprint(shards(tmp_path))
    assert fingerprint(other).endswith("#0e2a7cf4")  # in each version, or no run could go on
    np.save(other[1], np.load(other[1]) + 1)
    assert fingerprint(other) != fingerprint(shards(tmp_path))


def test_a_text_keeps_every_byte_and_its_last_tenth_for_validation(tmp_path):
    text = "naïve\r\n\t日本 \0 \U0001f600 <|endoftext|>".encode().ljust(1000, b"x")
    (tmp_path / "a.txt").write_bytes(text)
    train, val = t.open_data(t.Config(data=f"{tmp_path}/a.txt", T=T), t.get_encoding("bytes"))
    assert (bytes([*train.shards[0]]), bytes([*val.shards[0]])) == (text[:900], text[900:])
    assert (t.padded(257), t.padded(50257), t.padded(256)) == (384, 50304, 256)
