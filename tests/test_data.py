"""The data of a step is a pure function of (seed, row number), read from shards that stay on the disk."""
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import train_gpt2 as t
from conftest import ROOT

T = 8
ORDER = [148, 140, 124, 116, 100, 132, 72, 16, 48, 88, 32, 64]  # first tokens of rows 0-5 and 60-65 of the shards below, seed 1337


def shards(tmp_path, lengths=(100, 57, 8, 300), split="train"):
    """Shards in which every token tells where it stands: consecutive numbers through all of them."""
    paths, start = [], 0
    for i, n in enumerate(lengths):
        paths.append(tmp_path / f"numbers_{split}_{i:06d}.npy")
        np.save(paths[-1], np.arange(start, start + n, dtype=np.uint16))
        start += n
    return paths


def all_rows(lengths=(100, 57, 8, 300)):
    rows, start = [], 0
    for n in lengths:
        rows += [tuple(range(start + i * T, start + i * T + T + 1)) for i in range((n - 1) // T)]
        start += n
    return rows


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_is_every_row_once(tmp_path, shuffle):
    loader = t.DataLoaderLite(shards(tmp_path), T, seed=3, shuffle=shuffle)
    expected = all_rows()
    assert loader.rows_per_epoch == len(expected) == 12 + 7 + 0 + 37
    for epoch in range(3):
        rows = [tuple(r) for r in loader.read(epoch * len(expected), len(expected))]
        assert sorted(rows) == expected
        assert (rows == expected) is not shuffle


def test_epochs_and_seeds_differ_and_repeat(tmp_path):
    paths = shards(tmp_path)
    a, b, c = (t.DataLoaderLite(paths, T, seed=s, shuffle=True) for s in (1, 1, 2))
    n = a.rows_per_epoch
    assert np.array_equal(a.read(0, 3 * n), b.read(0, 3 * n))
    assert not np.array_equal(a.read(0, n), a.read(n, n))
    assert not np.array_equal(a.read(0, n), c.read(0, n))


def test_the_order_never_changes_between_versions(tmp_path):
    """A run begun with an older NumPy or an older copy of this file must go on with the same rows."""
    loader = t.DataLoaderLite(shards(tmp_path), T, seed=1337, shuffle=True)
    assert loader.read(0, 70)[:, 0].tolist()[:6] == ORDER[:6] and loader.read(60, 6)[:, 0].tolist() == ORDER[6:]


@pytest.mark.parametrize("B", [1, 5, 56, 130])
def test_any_batch_size_and_starting_point_reads_the_same_rows(tmp_path, B):
    loader = t.DataLoaderLite(shards(tmp_path), T, seed=5, shuffle=True)
    whole = loader.read(0, 260)
    for first in range(0, 260 - B, 37):  # not in order either: there is no state
        assert np.array_equal(loader.read(first, B), whole[first:first + B])


def test_targets_are_the_next_tokens(tmp_path):
    x, y = t.DataLoaderLite(shards(tmp_path), T).batch(2, 3)
    assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (3, T)
    assert torch.equal(y, x + 1) and x[0, 0] == 2 * T


def test_a_bad_id_found_while_reading_names_its_shard(tmp_path):
    paths = shards(tmp_path)
    loader = t.DataLoaderLite(paths, T, n_vocab=1000)
    damaged = np.load(paths[3])
    damaged[100] = 60000
    np.save(paths[3], damaged)
    with pytest.raises(t.UserError, match="numbers_train_000003.npy holds token 60000"):
        loader.read(0, loader.rows_per_epoch)


def test_a_process_holds_megabytes(tmp_path):
    """A shard of 100 M tokens is 200 MB; what the process allocates while reading it stays far below."""
    if not os.path.exists("/proc/self/status"):
        pytest.skip("needs /proc to see what a process allocates")
    path = tmp_path / "big_train_000000.npy"
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint16, shape=(100_000_000,))
    array[::50000] = 7
    del array
    script = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
import train_gpt2 as t
def allocated():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon")) / 1024
before = allocated()
loader = t.DataLoaderLite([Path({str(path)!r})], 1024, seed=1, shuffle=True)
for row in range(0, 6400, 64):
    loader.batch(row, 64)
print(allocated() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 20


def config(data, **changes):
    return t.Config(**{"data": str(data), "encoding": "bytes", "T": T, "total_batch_size": 4 * T, "B": 2,
                       "val_tokens": 64} | changes)


def test_text_file_keeps_its_last_tenth_for_validation(tmp_path):
    text = "".join(chr(32 + i % 90) for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    train, val = t.open_data(config(tmp_path / "a.txt"), t.get_encoding("bytes"))
    assert bytes(train.read(0, 1)[0].tolist()).decode() in text[:900]
    assert val.read(0, val.rows_per_epoch).ravel()[:5].tolist() == list(text[900:905].encode())
    assert (train.tokens, val.tokens) == (900, 100)


def test_text_file_in_gpt2s_encoding(tmp_path, gpt2_encoding):
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over <|endoftext|>. " * 100)
    train, _ = t.open_data(config(tmp_path / "a.txt", encoding="gpt2", shuffle=False), gpt2_encoding)
    assert gpt2_encoding.decode(train.read(0, 1)[0].tolist()).startswith("The quick brown fox")
    assert 50256 not in train.read(0, train.rows_per_epoch)


def test_bytes_encoding_keeps_every_byte():
    encoding = t.get_encoding("bytes")
    text = "naïve\r\n\t日本 \0 \U0001f600 <|endoftext|>" + "x" * 1000
    assert encoding.encode_ordinary(text) == list(text.encode())
    assert (encoding.n_vocab, encoding.eot_token, t.padded(257), t.padded(50257)) == (257, 256, 384, 50304)


def test_shown_text_cannot_confuse_a_terminal():
    assert t.shown("plain\n\ttext é") == "plain\n\ttext é"
    assert t.shown("\x1b[2J\r\0") == "\\x1b[2J\\r\\x00"


def test_same_shards_elsewhere_are_the_same_data(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    a, b = (t.DataLoaderLite(shards(tmp_path / d), T).fingerprint for d in "xy")
    c = t.DataLoaderLite(shards(tmp_path / "y", (100, 57, 8, 301)), T).fingerprint
    assert a == b != c
