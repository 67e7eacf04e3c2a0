"""Tests of fineweb.py: its shards, stopping and continuing, bad input, and the shared helpers."""
import contextlib
import dataclasses
import gzip
import io
import json
import math
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, one_line, run_script, shared, until

import fineweb

SHARD = 50_000  # tokens
BYTES = fineweb.get_encoding("bytes")
DATASET = "HuggingFaceFW/fineweb-edu"
README = (b"---\nconfigs: [{config_name: default, data_files: data/**}, "
          b"{config_name: sample-10BT, data_files: sample/10BT/**}]\n---")
ODD = ["<|endoftext|>", "a <|endoftext|> b <|fim_prefix|>", "\x00\x01\r\n\r", " " * 5000, "no end",
       "\u200b\u202e\ufeff z\u0351\u0313algo \U0010ffff", "a" * 5000, "👩‍👩‍👧 中文",
       "no UTF-8 in parquet, half an emoji in JSON: \udce9.", "", None, "\n"]

def make_texts(n, seed):
    """Return n texts of 1 to 400 random words."""
    rng = random.Random(seed)
    words = "model token loss gradient Straße naïve 数据 🙂 the of and to in 3.14 x_i".split()
    return [" ".join(rng.choices(words, k=rng.randint(1, 400))) for _ in range(n)]

def write_parquet(path, texts, rows=20):
    """Write a parquet file with `rows` texts per row group. A lone surrogate becomes a bad byte."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = pa.array([text and text.encode(errors="surrogateescape") for text in texts])
    table = pa.table({"text": texts.view(pa.string()), "id": range(len(texts))})
    pq.write_table(table, path, row_group_size=rows, compression="none")

def write_lines(path, texts):
    """Write a .jsonl or .jsonl.gz file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)

def naive(texts, encoding):
    """Tokenize texts in the simplest way. The shards must hold the same tokens."""
    tokens = []
    for text in texts:
        if text and text.strip():
            tokens += [encoding.eot_token, *encoding.encode_ordinary(text)]
    return np.array(tokens)

def shards_of(folder):
    """Return the paths of the shards in order."""
    return sorted(Path(folder).glob("*.npy"), key=lambda path: path.stem[-6:])

def tokens_of(folder):
    return np.concatenate([np.load(path, allow_pickle=False) for path in shards_of(folder)])

def digests(folder):
    return {path.name: hash(path.read_bytes()) for path in shards_of(folder)}

def flags(source, local_dir, **changes):
    """Return the command line for small shards of bytes."""
    constants = dict(source=source, local_dir=local_dir, shard_size=SHARD, nprocs=2,
                     encoding="bytes") | changes
    return [f"--{name}={value}" for name, value in constants.items()]

def run(source, local_dir, env=None, **changes):
    """Run fineweb.py as a user does; return the CompletedProcess."""
    return run_script("fineweb.py", *flags(source, local_dir, **changes), env=env)

def start(*words, env=os.environ, **kwargs):
    """Start fineweb.py; return the Popen. Its output must come at once without PYTHONUNBUFFERED."""
    return subprocess.Popen([sys.executable, ROOT / "fineweb.py", *words], text=True,
                            env=env | {"PYTHONUNBUFFERED": ""},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs)

class InThisProcess:
    """A fineweb.Worker without a process of its own, because a process takes a second to start."""
    def __init__(self, name):
        self.name = name

    def tokenize(self, texts):
        return fineweb.tokenize(texts, self.name)

    def stop(self):
        pass

@pytest.fixture
def make(monkeypatch, capsys):
    """Return a function that makes shards in this process and returns what was printed."""
    monkeypatch.setattr(fineweb, "Worker", InThisProcess)

    def make(source, local_dir, **changes):
        monkeypatch.setattr(sys, "argv", ["fineweb.py", *flags(source, local_dir, **changes)])
        given = fineweb.parse_flags(fineweb.Config, "")
        fineweb.make_shards(fineweb.make_config(fineweb.Config, given))
        return capsys.readouterr()
    return make

def refused(match):
    """Expect a UserError whose text matches."""
    return pytest.raises(fineweb.UserError, match=match)

TEXTS = make_texts(400, seed=1) + ODD
TEXTS[220:220] = ODD

@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Return a folder with all kinds of files, which hold TEXTS in reading order."""
    folder = tmp_path_factory.mktemp("corpus")
    write_parquet(folder / "a.parquet", TEXTS[:150])
    write_lines(folder / "b.jsonl", TEXTS[150:200])
    write_lines(folder / "c.jsonl.gz", TEXTS[200:250])
    write_parquet(folder / "deeper.parquet/d.parquet", TEXTS[250:])
    return folder

@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """Return a folder with the shards of `corpus`, made without a stop by two workers.

    The terminal's encoding is ASCII, and the folder's name is not.
    """
    folder = tmp_path_factory.mktemp("données")
    done = run(corpus, folder, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "") and "donn\\xe9es" in done.stdout
    return folder

def test_shards_equal_those_of_a_naive_tokenizer(whole):
    """Tokens, types, lengths, names and the documents in the manifest are as documented."""
    shards = [np.load(path, allow_pickle=False) for path in shards_of(whole)]
    assert all(shard.dtype == np.uint16 and shard.ndim == 1 for shard in shards)
    assert len(shards) > 5 and {len(shard) for shard in shards[:-1]} == {SHARD}
    np.testing.assert_array_equal(np.concatenate(shards), naive(TEXTS, BYTES))
    manifest = json.loads((whole / "manifest.json").read_text())
    documents = [entry["documents"] for entry in manifest["shards"]]
    assert documents == [sum(shard == 256) for shard in shards]
    names = {f"edufineweb_train_{i:06d}.npy" for i in range(1, len(shards))}
    names |= {"edufineweb_val_000000.npy", ".lock", "manifest.json"}
    assert {path.name for path in whole.iterdir()} == names

def test_shards_do_not_depend_on_the_number_of_workers(corpus, whole, tmp_path, make, monkeypatch):
    """nprocs=0 starts one worker per core that this process may use."""
    monkeypatch.setattr(fineweb, "Worker", worker := Mock(side_effect=InThisProcess))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(5), raising=False)
    for nprocs in (1, 3, 0):
        make(corpus, tmp_path / str(nprocs), nprocs=nprocs)
        assert digests(tmp_path / str(nprocs)) == digests(whole)
        assert worker.call_count == (nprocs or 5)
        worker.reset_mock()

def test_gpt2_tokens_of_real_documents(gpt2_encoding, tmp_path, make):
    """With GPT-2's encoding, too, the shards equal those of a naive tokenizer."""
    table = pq.read_table(shared("fineweb_standin") / "000_00000.parquet").slice(100, 300)
    texts = table["text"].to_pylist() + ODD
    write_parquet(tmp_path / "in/slice.parquet", texts, rows=64)
    make(tmp_path / "in", tmp_path / "out", encoding="gpt2")
    np.testing.assert_array_equal(tokens_of(tmp_path / "out"), naive(texts, gpt2_encoding))

def test_an_encoding_with_more_than_65536_ids_is_stored_as_uint32(tmp_path, make, monkeypatch):
    """The special tokens of cl100k_base, with the highest ids, are stored exactly."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared("tiktoken_cache")))
    write_parquet(tmp_path / "in/a.parquet", TEXTS)
    for max_shards in (2, 0):
        make(tmp_path / "in", tmp_path / "out", encoding="cl100k_base", max_shards=max_shards)
    shards = [np.load(path, allow_pickle=False) for path in shards_of(tmp_path / "out")]
    assert {shard.dtype for shard in shards} == {np.dtype(np.uint32)} and shards[0][0] == 100257
    expected = naive(TEXTS, fineweb.get_encoding("cl100k_base"))  # whose last id is 100276
    np.testing.assert_array_equal(np.concatenate(shards), expected)

def test_an_encoding_is_built_once_and_needs_an_end_of_text(monkeypatch):
    """get_encoding() caches, because HellaSwag calls it 60,000 times."""
    assert fineweb.get_encoding("bytes") is BYTES
    parts = fineweb.encoding_arguments("bytes") | {"special_tokens": {"<|end|>": 256}}
    monkeypatch.setattr(fineweb, "encoding_arguments", lambda name: parts)
    with refused(r"encoding=mine lacks the special token <\|endoftext\|>"):
        fineweb.get_encoding("mine")

def test_a_large_row_group_is_read_in_parts(tmp_path, monkeypatch):
    """No single read takes more than a third of the file, which is one row group."""
    monkeypatch.setattr(fineweb, "BATCH_BYTES", 5000)
    path, sizes = tmp_path / "a.parquet", []
    write_parquet(path, make_texts(4000, seed=1), rows=4000)

    class File(io.FileIO):
        def read(self, size=-1):
            sizes.append(size)
            return super().read(size)
    with File(path) as file:
        assert sum(map(len, fineweb.read_parquet_rows(file, 0))) == 4000
    assert max(sizes) < path.stat().st_size / 3

@pytest.mark.parametrize("rows, size", [(20, 500), (10_000, 5000)])
def test_reading_can_start_at_any_row(tmp_path, monkeypatch, rows, size):
    """read_batches() yields all rows from any row on, in batches of about BATCH_BYTES."""
    monkeypatch.setattr(fineweb, "BATCH_BYTES", size)
    texts = make_texts(400, seed=1)
    write_parquet(tmp_path / "a.parquet", texts[:200], rows=rows)
    write_lines(tmp_path / "b.jsonl.gz", texts[200:])
    urls = [str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl.gz")]
    for file, row in ((0, 0), (0, 1), (0, 63), (0, 199), (1, 0), (1, 77)):
        found = texts[:200 * file + row]
        for at_file, at_row, part in fineweb.read_batches(urls, file, row):
            assert 200 * at_file + at_row == len(found)
            assert 0 < len(part) < 30  # of 1300 bytes each
            found += part
        assert found == texts

def test_batches_are_read_ahead_by_a_fixed_number(make):
    """With two workers, four to six batches are read ahead of the one that is used."""
    taken = []
    batches = (taken.append(row) or (0, row, ["a"]) for row in range(50))
    for used, (_, row, _) in enumerate(fineweb.tokenize_all(batches, 2, "bytes")):
        assert row == used and min(50, used + 4) <= len(taken) <= used + 6

def test_continuing_with_more_shards_and_after_a_shard_was_deleted(
        corpus, whole, tmp_path, make, monkeypatch):
    """Shards that are missing are made, finished ones are kept, and the totals are printed."""
    out = tmp_path / "out"
    for max_shards, n in ((2, 2), (3, 3), (3, 3), (2, 3)):
        printed = make(corpus, out, max_shards=max_shards)
        assert len(shards_of(out)) == n and f"in {n} shards" in printed.out
    assert "This run: 0 tokens" in printed.out
    (tmp_path / "moved").symlink_to(corpus)
    printed = make(tmp_path / "moved", out, nprocs=1)
    tokens = tokens_of(whole)
    assert f"{sum(tokens == 256):,} documents, {len(tokens):,} tokens in" in printed.out
    assert f"This run: {len(tokens) - 3 * SHARD:,} tokens" in printed.out
    assert f"train_gpt2.py --data={out} --encoding=bytes\n" in printed.out
    shards_of(out)[4].unlink()
    make(corpus, out)
    assert digests(out) == digests(whole)
    monkeypatch.delattr(fineweb, "get_encoding")  # a finished corpus needs no vocabulary
    assert "This run: 0 tokens" in make(corpus, out).out

@pytest.mark.parametrize("batch_bytes", [500, 3000, 10**6])
def test_continuing_with_other_batches(tmp_path, make, monkeypatch, batch_bytes):
    """Shards are the same if a later run cuts the corpus into batches at other places.

    The first shards then end many tokens after the start of a batch of 5,000 bytes, so the later
    run skips several of its own batches, or only a part of a larger one.
    """
    source, texts = tmp_path / "in", make_texts(60, seed=2)
    write_lines(source / "a.jsonl", texts)
    monkeypatch.setattr(fineweb, "BATCH_BYTES", 5000)
    for max_shards in (2, 3, 4):
        out = tmp_path / str(max_shards)
        make(source, out, shard_size=1999, max_shards=max_shards)
        with monkeypatch.context() as changed:
            changed.setattr(fineweb, "BATCH_BYTES", batch_bytes)
            make(source, out, shard_size=1999)
        np.testing.assert_array_equal(tokens_of(out), naive(texts, BYTES))

def test_killed_at_random_moments(corpus, tmp_path, make):
    """Runs that are killed and repeated make the same shards as one that is not."""
    make(corpus, tmp_path / "once", shard_size=5000)
    out = tmp_path / "out"
    for _ in range(3):
        wanted = len(shards_of(out)) + random.randint(1, 9)
        with start(*flags(corpus, out, shard_size=5000)) as process:
            until(lambda: len(shards_of(out)) >= wanted or process.poll() is not None)
            process.kill()
    (out / "edufineweb_train_000999.npy.part").write_bytes(b"half")
    make(corpus, out, shard_size=5000)
    assert not list(out.glob("*.part"))
    assert digests(out) == digests(tmp_path / "once")

@pytest.fixture
def long_corpus(tmp_path):
    """Return a folder of documents that take half a minute."""
    write_parquet(tmp_path / "long/0.parquet", make_texts(100, seed=0) * 60, rows=100)
    for i in range(1, 80):
        (tmp_path / f"long/{i}.parquet").symlink_to("0.parquet")
    return tmp_path / "long"

@contextlib.contextmanager
def started(source, local_dir, shards=2, **changes):
    """Start fineweb.py in a process group of its own; return it when it has made some shards."""
    with start(*flags(source, local_dir, **changes), start_new_session=True) as process:
        try:
            until(lambda: len(shards_of(local_dir)) >= shards)
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

def children_of(process):
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()

@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
def test_workers_ignore_ctrl_c_and_end_after_kill_9(long_corpus, tmp_path, make):
    """Only the main process acts on Ctrl-C. When it is killed, the workers end by themselves."""
    out = tmp_path / "shards"
    with started(long_corpus, out, shard_size=500_000) as process:
        with refused("Another run uses .*/shards/"):
            make(long_corpus, out, shard_size=500_000)
        children = children_of(process)
        assert len(children) == 3  # two workers and Python's resource tracker
        for pid in children:
            os.kill(int(pid), signal.SIGINT)
        wanted = len(shards_of(out)) + 6  # more than can be made of batches that are finished
        until(lambda: len(shards_of(out)) >= wanted or process.poll() is not None)
        assert process.poll() is None and children_of(process) == children
        process.kill()
        until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in children))
        printed, errors = process.communicate()
        assert "edufineweb_val_000000.npy: 500,000 tokens, " in printed  # was not buffered
        assert errors == ""

STOPPED = "\nStopped. Repeat the command to resume after the last finished shard.\n"

@pytest.mark.parametrize("signal_number, kill", [(signal.SIGINT, os.killpg),
                                                 (signal.SIGTERM, os.kill),
                                                 (signal.SIGTERM, os.killpg)])
def test_ctrl_c_and_sigterm_end_with_one_line(long_corpus, tmp_path, signal_number, kill):
    """Ctrl-C goes to all processes of the group; a cluster may send SIGTERM to one or to all."""
    with started(long_corpus, tmp_path / "shards", shard_size=500_000) as process:
        kill(process.pid, signal_number)
        assert (process.communicate(timeout=180)[1], process.returncode) == (STOPPED, 130)
    assert {len(np.load(path)) for path in shards_of(tmp_path / "shards")} == {500_000}

@pytest.mark.parametrize("moment", range(6))
def test_ctrl_c_at_a_random_moment(long_corpus, tmp_path, moment):
    """Ctrl-C ends the script with the same line while workers start, and while they work.

    It is ignored in the moment in which they are started, so the user has to press it again.
    """
    with started(long_corpus, tmp_path, shards=moment % 2, shard_size=20_000) as process:
        until((tmp_path / "manifest.json").exists)  # it is written before workers are started
        time.sleep(random.random())
        while process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
        assert (process.communicate(timeout=180)[1], process.returncode) == (STOPPED, 130)

def test_ctrl_c_ends_a_process_that_waits_for_a_lock_for_ever():
    """Ctrl-C works whatever the interrupted code holds or does to clean up."""
    code = """if True:
        import sys, threading, fineweb
        def make_shards(cfg):
            lock = threading.Lock()
            lock.acquire()
            print("waiting", flush=True)
            try:
                lock.acquire()
            finally:
                lock.acquire()
        fineweb.make_shards = make_shards
        sys.exit(fineweb.main())"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == "waiting\n"
            process.send_signal(signal.SIGINT)
            assert (process.communicate(timeout=60)[1], process.returncode) == (STOPPED, 130)
        finally:
            process.kill()

@pytest.mark.parametrize("fails", [False, True])
def test_workers_inherit_that_signals_are_ignored(monkeypatch, fails):
    """A worker never acts on Ctrl-C or SIGTERM, not even while it imports."""
    def handlers():
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    in_workers = []

    class Recording(InThisProcess):
        def __init__(self, name):
            in_workers.append(handlers())
            if fails:
                raise OSError
    monkeypatch.setattr(fineweb, "Worker", Recording)
    before = handlers()
    with pytest.raises(OSError) if fails else contextlib.nullcontext():
        fineweb.start_workers(3, "bytes")
    assert in_workers == [[signal.SIG_IGN] * 2] * (1 if fails else 3)
    assert handlers() == before != [signal.SIG_IGN] * 2

def test_ctrl_c_during_a_download(fineweb_hub, tmp_path):
    """Ctrl-C ends the script while it waits for the hub, without a line of any library."""
    hub, asked, answer = fineweb_hub, threading.Event(), threading.Event()

    def wait(path, span):
        if span:
            asked.set()
            answer.wait()
    hub.fail = wait
    hub.handle_error = Mock()  # the answer goes to a closed connection
    with start(*flags(DATASET, tmp_path), env=os.environ | hub.env) as process:
        try:
            assert asked.wait(180)
            process.send_signal(signal.SIGINT)
            assert (process.communicate(timeout=180)[1], process.returncode) == (STOPPED, 130)
        finally:
            process.kill()
            answer.set()

def test_a_killed_worker_ends_the_run_with_one_line():
    """It does not hang, and the message names the likely cause and the remedy."""
    def batches():
        yield 0, 0, ["a"]
        worker, = multiprocessing.active_children()
        worker.kill()
        worker.join()
        yield 0, 1, ["b"]
    with refused("A worker process died.*--nprocs"):
        list(fineweb.tokenize_all(batches(), 1, "bytes"))
    assert not multiprocessing.active_children()

@pytest.fixture
def fineweb_hub(hub, corpus):
    hub.files[DATASET] = {f"sample/10BT/{path.relative_to(corpus)}": path.read_bytes()
                          for path in corpus.rglob("*.*") if path.is_file()}
    hub.files[DATASET] |= {"README.md": README, "data/CC-MAIN-2013-20/1.jsonl": b"another"}
    return hub

def test_a_dataset_on_the_hub_gives_the_same_shards(fineweb_hub, corpus, whole, tmp_path):
    """It is streamed and not stored; a run that continues requests only the rest of the files."""
    hub, out = fineweb_hub, tmp_path / "out"
    done = run(DATASET, out, env=hub.env, max_shards=2)
    assert (done.returncode, done.stderr, len(shards_of(out))) == (0, "", 2)
    manifest = (out / "manifest.json").read_text()
    assert f'"a.parquet, {(corpus / "a.parquet").stat().st_size} bytes"' in manifest
    row = json.loads(manifest)["shards"][-1]["row"]
    groups = pq.ParquetFile(corpus / "a.parquet").metadata
    # One request fails. The hub's client tries again, and what it logs is not printed.
    hub.fail = lambda path, span: 500 if span and sum(bool(s) for *_, s in hub.log) == 1 else None
    hub.revision = "c" * 40  # a new commit, which changed none of these files
    hub.log.clear()
    done = run(DATASET, out, env=hub.env)
    assert (done.returncode, done.stderr) == (0, "")
    assert digests(out) == digests(whole)
    spans = [span for _, path, span in hub.log if path.endswith("a.parquet") and span]
    first = min(int(re.match(r"bytes=(\d+)", span)[1]) for span in spans)
    assert row >= 60 and first >= groups.row_group(row // 20).column(0).dictionary_page_offset
    cached = [path.stat().st_size for path in Path(hub.env["HF_HOME"]).rglob("*") if path.is_file()]
    assert sum(cached) < 20_000, "the corpus was copied to the disk"

def test_an_unreachable_hub_or_file_is_one_line(fineweb_hub, tmp_path):
    """The message names the dataset or the file, and the remedy."""
    hub, out = fineweb_hub, tmp_path / "out"
    done = run("nobody/nothing", out, env=hub.env)
    one_line(done.stderr, "source=nobody/nothing", "doesn't exist on the Hub", "HF_ENDPOINT")
    done = run_script("fineweb.py", cwd=tmp_path, env=hub.env | {"HF_HUB_OFFLINE": "1"})
    one_line(done.stderr, f"cannot be fetched from {hub.env['HF_ENDPOINT']}", DATASET, "hf-mirror")
    assert done.returncode == 1 and not (tmp_path / "edu_fineweb10B").exists()
    hub.fail = lambda path, span: 404 if span and "d.par" in path else None
    done = run(DATASET, out, env=hub.env)
    one_line(done.stderr, "deeper.parquet/d.parquet cannot be read from row 1 on", "to resume")

@pytest.mark.parametrize("change, says", [
    ({"shard_siz": 5}, "unrecognized arguments: --shard_siz"), ({"shard_size": 99}, "=99: .*1025"),
    ({"nprocs": "-1"}, "nprocs=-1: it must be a whole number >= 0"),
    ({"encoding": "gpt3"}, "encoding=gpt3 is unknown: choose bytes, gpt2, .*cl100k_base")])
def test_a_bad_flag_is_one_line(corpus, tmp_path, make, change, says):
    """The message names the flag and says what its value must be."""
    with refused(says):
        make(corpus, tmp_path, **change)

def parquet(**columns):
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()

@pytest.mark.parametrize("name, data, says", [
    ("x.parquet", parquet(text=["a"])[:-9], "x.parquet cannot be read from row 1 on"),
    ("x.parquet", parquet(content=["a"]), "1 on .*text"),
    ("x.parquet", parquet(text=[1]), "1 on .*int64"),
    ("x.jsonl.gz", gzip.compress(b'{"text": "a"}\n', mtime=0)[:-9],
     r"x.jsonl.gz .* 1 on \(EOFError"),
    ("x.jsonl", b'{"text": "a"}\n\n{"text": "b\n', "from row 3 on .*JSONDecodeError")])
def test_a_damaged_file_is_one_line(tmp_path, make, name, data, says):
    """The message names the file and the first row that could not be read."""
    (tmp_path / name).write_bytes(data)
    with refused(says):
        make(tmp_path, tmp_path / "out")

def test_every_file_is_closed(corpus, tmp_path):
    """Python's development mode reports no open file, neither after success nor after an error."""
    done = run(corpus, tmp_path / "out", env={"PYTHONDEVMODE": "1"})
    assert done.returncode == 0 and "ResourceWarning" not in done.stderr, done.stderr
    write_lines(tmp_path / "in/a.jsonl", TEXTS[:50])
    (tmp_path / "in/b.jsonl").write_bytes(b'{"text": "a')
    done = run(tmp_path / "in", tmp_path / "out2", env={"PYTHONDEVMODE": "1"})
    assert done.returncode == 1 and "ResourceWarning" not in done.stderr, done.stderr

def test_a_corpus_that_fits_into_the_validation_shard(corpus, whole, tmp_path, make):
    """The message suggests a --shard_size, and the same folder can be used with it."""
    n = len(tokens_of(whole))
    for _ in range(2):
        with refused(f"{n:,} tokens .* nothing to train on.* --shard_size={n // 10 + 1} "):
            make(corpus, tmp_path, shard_size=n)
    make(corpus, tmp_path, shard_size=n // 10 + 1)
    assert len(shards_of(tmp_path)) == 10
    with refused("has 0 tokens .'text' in its .parquet, .jsonl.* Use more text, a larger"):
        make(ROOT / "tests", tmp_path / "none")

@pytest.mark.parametrize("interrupted_after", [0, 1, 2])  # files written: manifest, shard, ...
def test_a_manifest_never_describes_a_shard_of_other_settings(
        corpus, whole, tmp_path, make, monkeypatch, interrupted_after):
    """A run that replaces a lone validation shard is killed: the old settings then remake it."""
    n, n_written, replace = len(tokens_of(whole)), 0, os.replace
    with refused("nothing to train on"):
        make(corpus, tmp_path, shard_size=n)
    before = digests(tmp_path)

    def replace_until_interrupted(part, path):
        nonlocal n_written
        if n_written == interrupted_after:
            raise KeyboardInterrupt
        n_written += 1
        replace(part, path)
    with monkeypatch.context() as changed, pytest.raises(KeyboardInterrupt):
        changed.setattr(os, "replace", replace_until_interrupted)
        make(corpus, tmp_path, shard_size=5000)
    with refused("nothing to train on"):
        make(corpus, tmp_path, shard_size=n)
    assert digests(tmp_path) == before

def test_other_settings_and_changed_files_are_refused(tmp_path, make):
    """Files that no finished shard contains may change. The message names what is different."""
    source, out = tmp_path / "in", tmp_path / "out"
    for i in range(3):
        write_lines(source / f"{i}.jsonl", make_texts(50, seed=i))
    make(source, out, max_shards=2)
    with refused("shard_size was 50000 and is 5000; encoding was bytes and is gpt2.*a different"):
        make(source, out, shard_size=5000, encoding="gpt2")
    with refused(r"\(shard_size was 50000 and is 90000\)"):
        make(source, out, shard_size=90_000)
    write_lines(source / "2.jsonl", make_texts(60, seed=5))  # no shard contains it yet
    make(source, out)
    write_lines(source / "3.jsonl", ["after a shorter last shard"])
    with refused(r"\(file 3 was absent and is 3.jsonl, \d+ bytes\): undo this change"):
        make(source, out)
    write_lines(source / "1.jsonl", ["shorter"])
    with refused(r"\(file 1 was 1.jsonl, \d+ bytes and is 1.jsonl, \d+ bytes; file 3 was absent"):
        make(source, out)

def entry(**changes):
    return {"name": "a", "tokens": 1, "documents": 1, "file": 0, "row": 0, "used": 1} | changes

@pytest.mark.parametrize("content, reason", [
    (b'{"settings": {}, "sh', "JSONDecodeError"), (b"\xff", "UnicodeDecodeError"),
    (b"", "JSONDecodeError"), (b"[]", "TypeError"), (b'{"shards": []}', "KeyError: 'settings'"),
    (b'{"settings": {}}', "KeyError: 'shards'"), (b'{"settings": 5, "shards": []}', "TypeError"),
    (b'{"settings": {}, "shards": [{"name": "a"}]}', "KeyError: 'file'"),
    (json.dumps({"settings": {}, "shards": [entry(row=None)]}).encode(), "TypeError"),
    (json.dumps({"settings": {}, "shards": [entry(used="x")]}).encode(), "ValueError")])
def test_a_damaged_manifest_is_one_line(corpus, tmp_path, make, content, reason):
    """The message names the manifest and what to do."""
    (tmp_path / "manifest.json").write_bytes(content)
    with refused(rf"/manifest.json cannot be read \({reason}.*\): restore it, or delete"):
        make(corpus, tmp_path)

def test_a_manifest_that_cannot_be_opened_or_is_missing_is_one_line(corpus, tmp_path, make):
    """An error while reading the manifest is not reported as one while writing."""
    (tmp_path / "manifest.json").mkdir()
    done = run(corpus, tmp_path)
    one_line(done.stderr, f"{tmp_path}/manifest.json cannot be read (IsADirectoryError", "restore")
    (tmp_path / "manifest.json").rmdir()
    (tmp_path / "edufineweb_train_000001.npy").touch()
    with refused("have no manifest.json that says .*: restore it, or choose a different"):
        make(corpus, tmp_path)

def test_the_content_of_a_manifest(corpus, tmp_path, make):
    """Keys and their meaning never change, so that shards of an earlier version continue."""
    make(corpus, tmp_path, max_shards=2)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    size = (corpus / "a.parquet").stat().st_size
    assert manifest["settings"] == {
        "shard_size": SHARD, "encoding": "bytes", "file 0": f"a.parquet, {size} bytes"}
    ends = [(entry["file"], entry["row"], entry["used"]) for entry in manifest["shards"]]
    for i, (file_number, row, used) in enumerate(ends, 1):
        before = naive(TEXTS[:row], BYTES)
        assert file_number == 0 and len(before) + used == i * SHARD
    assert [entry["name"] for entry in manifest["shards"]] == [
        "edufineweb_val_000000.npy", "edufineweb_train_000001.npy"]
    assert all(entry.keys() == {"name", "tokens", "documents", "file", "row", "used"}
               for entry in manifest["shards"])

def test_a_folder_that_cannot_be_written_and_a_missing_vocabulary_are_one_line(corpus, tmp_path):
    """Both messages name the constant and the remedy."""
    done = run(corpus, __file__)
    one_line(done.stderr, f"local_dir={__file__} cannot be written (", "free disk space or allow")
    nowhere = "http://127.0.0.1:9"
    env = {"TIKTOKEN_CACHE_DIR": str(tmp_path), "HTTPS_PROXY": nowhere, "https_proxy": nowhere}
    done = run(corpus, tmp_path / "out", encoding="gpt2", env=env)
    one_line(done.stderr, "encoding=gpt2 cannot be loaded (", "TIKTOKEN_CACHE_DIR")

def test_a_full_disk_leaves_only_whole_shards(corpus, whole, tmp_path, make):
    """The script says so in one line, and later the same command continues."""
    resource = pytest.importorskip("resource", reason="needs setrlimit")
    make(corpus, tmp_path, max_shards=2)
    with start(*flags(corpus, tmp_path), preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_FSIZE, [2 * SHARD] * 2)) as process:  # too little for the header
        one_line(process.communicate(timeout=180)[1], "cannot be written", "File too large")
    assert len(shards_of(tmp_path)) == 2 and not list(tmp_path.glob("*.part"))
    make(corpus, tmp_path)
    assert digests(tmp_path) == digests(whole)

def test_a_file_is_on_the_disk_before_it_gets_its_name(corpus, tmp_path, make, monkeypatch):
    """write_whole() flushes and verifies a file before it renames it."""
    flushed, renamed, replace = [], [], os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.fstat(fd).st_size))
    monkeypatch.setattr(os, "replace", lambda part, path: (
        renamed.append(part.stat().st_size), replace(part, path)))
    make(corpus, tmp_path, max_shards=2)
    assert flushed == renamed and flushed[1::2] == [128 + 2 * SHARD] * 2  # manifest, shard, ...
    path, verify = tmp_path / "manifest.json", Mock(side_effect=fineweb.UserError("half of it"))
    with refused("half of it"):
        fineweb.write_whole(path, lambda file: file.write(b"half"), verify)
    assert len(path.read_bytes()) > 4  # the earlier content is still there

@pytest.mark.parametrize("error, says", [(NotImplementedError(), "(NotImplementedError)"),
                                         (OSError("No locks here.\nNone."), "(No locks here)")])
def test_a_disk_without_locks_can_be_used(corpus, tmp_path, make, monkeypatch, error, says):
    """A line warns that the folder is not locked."""
    monkeypatch.setattr("filelock.FileLock.acquire", Mock(side_effect=error))
    printed = make(corpus, tmp_path / "new", max_shards=2).out
    assert f"cannot be locked {says}: make sure that no other run writes" in printed

@dataclasses.dataclass(frozen=True)
class Edited:
    """A Config after careless edits."""
    steps: int = 1e3  # was 12
    fast: bool = "True"  # 100 % of it
    name: str = False
    rate: float = "1e-3"
    shape: Literal["flat", "round"] = "flat"

def test_values_get_the_types_of_their_constants(monkeypatch):
    """Defaults, presets and flags are converted alike, and the Config is built only once."""
    assert fineweb.make_config(Edited, {}) == Edited(1000, True, "False", 0.001, "flat")
    monkeypatch.setattr(sys, "argv", ["x.py", "--steps=2e1", "--fast=false", "--shape=round"])
    given = fineweb.parse_flags(Edited, "doc")
    config = fineweb.make_config(Edited, {"rate": 2} | given)
    assert config == Edited(20, False, "False", 2.0, "round")
    assert [type(value) for value in dataclasses.astuple(config)] == [int, bool, str, float, str]

NUMBERS = ("nan", "inf", "1e400", "-1", "one", None, -0.5, math.nan)

@pytest.mark.parametrize("name, what, values", [
    ("steps", "a whole number >= 0", ("1.5", *NUMBERS)), ("rate", "a finite number >= 0", NUMBERS),
    ("fast", "True or False", ("yes",)), ("shape", ".*'flat', 'round'.*", ("square", 1))])
def test_an_impossible_value_is_named(name, what, values):
    """The message has the constant, the value, and what the value must be."""
    for value in values:
        with refused(f"^{name}={value}: it must be {what}\\.$"):
            fineweb.make_config(Edited, {name: value})

def test_a_constant_that_config_lacks_or_that_has_no_type_is_named():
    """Otherwise a misspelt name in a preset, or an edited Config, would have no effect."""
    with refused("step is not a constant in Config: check its spelling"):
        fineweb.make_config(Edited, {"step": 1})

    class Untyped(Edited):
        depth = 5
    with refused("depth in Config lacks a type: write depth: int = 1"):
        fineweb.make_config(Untyped, {})
    for kind in (tuple, float | None):
        with refused(f"depth in Config has the type {re.escape(str(kind))}: use bool, int"):
            fineweb.make_config(dataclasses.make_dataclass("Odd", [("depth", kind, 5)]), {})

def test_help_has_comments_defaults_and_presets(monkeypatch, capsys):
    """--help prints each constant's comment, its default, and its value in each preset."""
    monkeypatch.setattr(sys, "argv", ["x.py", "--help"])
    with pytest.raises(SystemExit):
        fineweb.parse_flags(Edited, "doc", {"SMALL": {"steps": 7}, "FINETUNE": {"steps": 9}})
    out = capsys.readouterr().out
    assert "was 12 [1000.0, in SMALL 7, in FINETUNE 9]" in " ".join(out.split())
    assert "100 % of it ['True']" in out and "--shape flat|round" in out
