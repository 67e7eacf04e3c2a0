"""The data of a step is a pure function of (seed, row number); shards stay on the disk."""
import os
import queue

import numpy as np
import pytest
import torch
from conftest import run_python

import train_gpt2 as t

T = 8
# first tokens of rows 0-5 and 60-65 of the shards below, for seed 1337
ORDER = [148, 140, 124, 116, 100, 132, 72, 16, 48, 88, 32, 64]


def shards(tmp_path, lengths=(100, 57, 8, 300), split="train"):
    """Shards of consecutive numbers, so that every token tells where it stands."""
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
    """A run begun with an older NumPy or an older copy of this file continues with its rows."""
    loader = t.DataLoaderLite(shards(tmp_path), T, seed=1337, shuffle=True)
    assert loader.read(0, 70)[:6, 0].tolist() == ORDER[:6]
    assert loader.read(60, 6)[:, 0].tolist() == ORDER[6:]


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


HELD = """
import sys
from pathlib import Path
import train_gpt2 as t
def allocated():
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024
before = allocated()
loader = t.DataLoaderLite([Path(sys.argv[1])], 1024, seed=1, shuffle=True)
for row in range(0, 6400, 64):
    loader.batch(row, 64)
print(allocated() - before)
"""


def test_a_process_holds_megabytes(tmp_path):
    """A shard of 100 M tokens is 200 MB; reading it allocates far less."""
    if not os.path.exists("/proc/self/status"):
        pytest.skip("needs /proc to see what a process allocates")
    path = tmp_path / "big_train_000000.npy"
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint16, shape=(100_000_000,))
    array[::50000] = 7
    del array
    done = run_python(HELD, path)
    assert float(done.stdout) < 20, done.stderr


def test_the_shard_that_is_read_and_the_next_one_are_announced(tmp_path, monkeypatch):
    """Cold pages of a network disk must not hold up a step."""
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("this system has no posix_fadvise")
    announced = queue.Queue()

    def fadvise(number, offset, length, advice):
        announced.put((os.path.basename(os.readlink(f"/proc/self/fd/{number}")), advice))
    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    paths = shards(tmp_path)
    loader = t.DataLoaderLite(paths, T)
    loader.read(0, 12)
    names = {announced.get(timeout=60) for _ in range(2)}
    assert names == {(path.name, os.POSIX_FADV_WILLNEED) for path in paths[:2]}
    loader.read(12, 7)
    names = {announced.get(timeout=60)[0] for _ in range(2)}
    assert paths[1].name in names and announced.empty()


def test_a_shard_that_was_replaced_is_named(tmp_path):
    paths = shards(tmp_path)
    loader = t.DataLoaderLite(paths, T)
    loader.read(0, 12)
    os.replace(paths[0], paths[1])
    with pytest.raises(t.UserError, match="000001.npy was replaced: it had 57 tokens .* has 100"):
        loader.read(12, 1)


def test_unreadable_shards_are_not_to_be_deleted(tmp_path, monkeypatch):
    path = shards(tmp_path)[0]

    def refuse(path, **_):
        raise PermissionError(13, "Permission denied", str(path))
    monkeypatch.setattr(np, "load", refuse)
    with pytest.raises(OSError) as e:
        t.open_shard(path)
    line = t.explain(e.value)
    assert line.startswith(f"{path} cannot be used (Permission denied)") and "delete" not in line


def config(data, **changes):
    constants = {"data": str(data), "encoding": "bytes", "T": T, "B": 2, "val_tokens": 64,
                 "total_batch_size": 4 * T}
    return t.Config(**constants | changes)


def test_text_file_keeps_its_last_tenth_for_validation(tmp_path):
    text = "".join(chr(32 + i % 90) for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    train, val = t.open_data(config(tmp_path / "a.txt"), t.get_encoding("bytes"))
    assert bytes(train.read(0, 1)[0].tolist()).decode() in text[:900]
    assert val.read(0, val.rows_per_epoch).ravel()[:5].tolist() == list(text[900:905].encode())
    assert (train.lengths, val.lengths) == ([900], [100])


def test_text_file_in_gpt2s_encoding(tmp_path, gpt2_encoding):
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over <|endoftext|>. " * 100)
    cfg = config(tmp_path / "a.txt", encoding="gpt2", shuffle=False)
    train, _ = t.open_data(cfg, gpt2_encoding)
    assert gpt2_encoding.decode(train.read(0, 1)[0].tolist()).startswith("The quick brown fox")
    assert 50256 not in train.read(0, train.rows_per_epoch)


def test_bytes_encoding_keeps_every_byte():
    encoding = t.get_encoding("bytes")
    text = "naïve\r\n\t日本 \0 \U0001f600 <|endoftext|>" + "x" * 1000
    assert encoding.encode_ordinary(text) == list(text.encode())
    assert (encoding.n_vocab, encoding.eot_token) == (257, 256)
    assert (t.padded(257), t.padded(50257)) == (384, 50304)


def test_a_million_spaces_are_encoded(gpt2_encoding):
    """tiktoken panics at 999,999 before a word; where it does not, the ids are its own."""
    text = "a" + " " * 999_998 + "b \n\n c" + "\u3000\n " * 200_000 + "d"
    assert t.encode(gpt2_encoding, text) == gpt2_encoding.encode_ordinary(text)
    ids = t.encode(gpt2_encoding, "a" + " " * 2_000_000 + "b")
    assert gpt2_encoding.decode(ids) == "a" + " " * 2_000_000 + "b"
    assert t.encode(gpt2_encoding, "") == []


def test_printed_text_cannot_confuse_a_terminal():
    assert t.printable("plain\n\ttext é") == "plain\n\ttext é"
    assert t.printable("\x1b[2J\r\0") == "\\x1b[2J\\r\\x00"


def test_same_shards_elsewhere_are_the_same_data(tmp_path):
    def fingerprint(folder, lengths=(100, 57, 8, 300)):
        (tmp_path / folder).mkdir(exist_ok=True)
        return t.check_shards(t.DataLoaderLite(shards(tmp_path / folder, lengths), T))
    first = fingerprint("x")
    assert first == fingerprint("y") != fingerprint("y", (100, 57, 8, 301))


def test_the_fingerprint_never_changes_between_versions(tmp_path):
    """Or no run could continue after an upgrade."""
    loader = t.DataLoaderLite(shards(tmp_path), T)
    assert t.check_shards(loader) == "465 tokens in 4 file(s) #0e2a7cf4"
    text = t.DataLoaderLite([np.arange(50, dtype=np.uint16)], T)
    assert t.check_shards(text) == "50 tokens in 1 file(s) #19f6a821"
