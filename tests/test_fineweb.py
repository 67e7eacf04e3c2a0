"""fineweb.py as its user runs it: same bytes as a naive tokenizer, stops and kills, bad input."""
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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
    rng = random.Random(seed)
    words = "model token loss gradient Straße naïve 数据 🙂 the of and to in 3.14 x_i".split()
    return [" ".join(rng.choices(words, k=rng.randint(1, 400))) for _ in range(n)]

def write_parquet(path, texts, rows=20):
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = pa.array([text and text.encode(errors="surrogateescape") for text in texts])
    table = pa.table({"text": texts.view(pa.string()), "id": range(len(texts))})
    pq.write_table(table, path, row_group_size=rows, compression="none")

def write_lines(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)

def naive(texts, encoding):
    """The ten-line tokenizer that fineweb.py has to agree with, byte for byte."""
    tokens = []
    for text in texts:
        if text and text.strip():
            tokens += [encoding.eot_token, *encoding.encode_ordinary(text)]
    return np.array(tokens)

def shards_of(folder):
    return sorted(Path(folder).glob("*.npy"), key=lambda path: path.stem[-6:])

def tokens_of(folder):
    return np.concatenate([np.load(path, allow_pickle=False) for path in shards_of(folder)])

def digests(folder):
    return {path.name: hash(path.read_bytes()) for path in shards_of(folder)}

def flags(source, local_dir, **changes):
    constants = dict(source=source, local_dir=local_dir, shard_size=SHARD, nprocs=2,
                     encoding="bytes") | changes
    return [f"--{name}={value}" for name, value in constants.items()]

def run(source, local_dir, env=None, **changes):
    return run_script("fineweb.py", *flags(source, local_dir, **changes), env=env)

def start(*words, **kwargs):
    return subprocess.Popen([sys.executable, ROOT / "fineweb.py", *words], text=True,
                            env=os.environ | {"PYTHONUNBUFFERED": ""},  # lines come without it
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs)

@pytest.fixture
def make(monkeypatch, capsys):
    """Function: make shards in this process; returns what is printed."""
    monkeypatch.setattr(fineweb, "ProcessPoolExecutor", lambda n, *_: ThreadPoolExecutor(n))

    def make(source, local_dir, **changes):
        monkeypatch.setattr(sys, "argv", ["fineweb.py", *flags(source, local_dir, **changes)])
        given = fineweb.parse_flags(fineweb.Config, "")
        fineweb.make_shards(fineweb.make_config(fineweb.Config, given))
        return capsys.readouterr()
    return make

def refused(match):
    return pytest.raises(fineweb.UserError, match=match)

TEXTS = make_texts(400, seed=1) + ODD
TEXTS[220:220] = ODD

@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of all kinds of files; in reading order they hold TEXTS."""
    folder = tmp_path_factory.mktemp("corpus")
    write_parquet(folder / "a.parquet", TEXTS[:150])
    write_lines(folder / "b.jsonl", TEXTS[150:200])
    write_lines(folder / "c.jsonl.gz", TEXTS[200:250])
    write_parquet(folder / "deeper.parquet/d.parquet", TEXTS[250:])
    return folder

@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """The shards of `corpus`, made in one go by two workers, on a terminal that knows ASCII."""
    folder = tmp_path_factory.mktemp("données")
    done = run(corpus, folder, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "") and "donn\\xe9es" in done.stdout
    return folder

def test_shards_are_what_a_naive_tokenizer_makes(whole):
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

def test_number_of_workers(corpus, whole, tmp_path, make, monkeypatch):
    pool = Mock(side_effect=lambda n, *_: ThreadPoolExecutor(n))
    monkeypatch.setattr(fineweb, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(5), raising=False)
    for nprocs in (1, 3, 0):
        make(corpus, tmp_path / str(nprocs), nprocs=nprocs)
        assert digests(tmp_path / str(nprocs)) == digests(whole)
    assert [call.args[0] for call in pool.call_args_list] == [1, 3, 5]

def test_gpt2_tokens_of_a_slice_of_the_standin(gpt2_encoding, tmp_path, make):
    table = pq.read_table(shared("fineweb_standin") / "000_00000.parquet").slice(100, 300)
    texts = table["text"].to_pylist() + ODD
    write_parquet(tmp_path / "in/slice.parquet", texts, rows=64)
    make(tmp_path / "in", tmp_path / "out", encoding="gpt2")
    np.testing.assert_array_equal(tokens_of(tmp_path / "out"), naive(texts, gpt2_encoding))

def test_more_than_65536_ids_are_uint32(tmp_path, make, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared("tiktoken_cache")))
    write_parquet(tmp_path / "in/a.parquet", TEXTS)
    for max_shards in (2, 0):
        make(tmp_path / "in", tmp_path / "out", encoding="cl100k_base", max_shards=max_shards)
    shards = [np.load(path, allow_pickle=False) for path in shards_of(tmp_path / "out")]
    assert {shard.dtype for shard in shards} == {np.dtype(np.uint32)} and shards[0][0] == 100257
    expected = naive(TEXTS, fineweb.get_encoding("cl100k_base"))  # whose last id is 100276
    np.testing.assert_array_equal(np.concatenate(shards), expected)

def test_encodings(monkeypatch):
    assert fineweb.get_encoding("bytes") is BYTES  # or HellaSwag builds it 60,000 times
    parts = fineweb.encoding_parts("bytes") | {"special_tokens": {"<|end|>": 256}}
    monkeypatch.setattr(fineweb, "encoding_parts", lambda name: parts)
    with refused(r"encoding=mine lacks the special token <\|endoftext\|>"):
        fineweb.get_encoding("mine")

def test_a_row_group_is_not_read_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(fineweb, "BATCH_BYTES", 5000)
    path, sizes = tmp_path / "a.parquet", []
    write_parquet(path, make_texts(4000, seed=1), rows=4000)

    class File(io.FileIO):
        def read(self, size=-1):
            sizes.append(size)
            return super().read(size)
    with File(path) as file:
        assert sum(map(len, fineweb.read_parquet(file, 0))) == 4000
    assert max(sizes) < path.stat().st_size / 3

@pytest.mark.parametrize("rows, size", [(20, 500), (10_000, 5000)])
def test_reading_starts_anywhere_and_cuts_big_row_groups(tmp_path, monkeypatch, rows, size):
    monkeypatch.setattr(fineweb, "BATCH_BYTES", size)
    texts = make_texts(400, seed=1)
    write_parquet(tmp_path / "a.parquet", texts[:200], rows=rows)
    write_lines(tmp_path / "b.jsonl.gz", texts[200:])
    urls = [str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl.gz")]
    for file, row in ((0, 0), (0, 1), (0, 63), (0, 199), (1, 0), (1, 77)):
        found = texts[:200 * file + row]
        for at_file, at_row, part in fineweb.read_batches(urls, {"file": file, "row": row}):
            assert 200 * at_file + at_row == len(found) and len(part) < 30  # of 1300 bytes each
            found += part
        assert found == texts

def test_few_batches_are_in_memory_but_enough_for_every_worker(make):
    taken = []
    batches = (taken.append(row) or (0, row, ["a"]) for row in range(50))
    for used, (_, row, _) in enumerate(fineweb.tokenize_all(batches, 2, "bytes")):
        assert row == used and min(50, used + 4) <= len(taken) <= used + 6

def test_stopping_early_going_on_and_a_deleted_shard(corpus, whole, tmp_path, make, monkeypatch):
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
    monkeypatch.delattr(fineweb, "get_encoding")  # what is finished needs no vocabulary
    assert "This run: 0 tokens" in make(corpus, out).out

def test_killed_at_random_moments(corpus, tmp_path, make):
    make(corpus, tmp_path / "once", shard_size=5000)
    out = tmp_path / "out"
    for _ in range(3):
        wanted = len(shards_of(out)) + random.randint(1, 9)
        with start(*flags(corpus, out, shard_size=5000)) as process:
            until(lambda: len(shards_of(out)) >= wanted or process.poll() is not None, 60)
            process.kill()
    (out / "edufineweb_train_000999.npy.part").write_bytes(b"half")
    make(corpus, out, shard_size=5000)
    assert not list(out.glob("*.part"))
    assert digests(out) == digests(tmp_path / "once")

@pytest.fixture
def long_run(tmp_path):
    """fineweb.py in a process group of its own, amid work of half a minute."""
    write_parquet(tmp_path / "long/0.parquet", make_texts(100, seed=0) * 60, rows=100)
    for i in range(1, 80):
        (tmp_path / f"long/{i}.parquet").symlink_to("0.parquet")
    words = flags(tmp_path / "long", tmp_path / "shards", shard_size=500_000)
    with start(*words, start_new_session=True) as process:
        until(lambda: len(shards_of(tmp_path / "shards")) > 1, 60)
        yield process
        process.kill()

@pytest.mark.skipif(sys.platform != "linux", reason="looks for the workers in /proc")
def test_workers_ignore_ctrl_c_and_end_by_kill_9(long_run, tmp_path, make):
    with refused("Another run uses .*/shards/"):
        make(tmp_path / "long", tmp_path / "shards", shard_size=500_000)
    children = Path(f"/proc/{long_run.pid}/task/{long_run.pid}/children").read_text().split()
    assert len(children) == 3  # two workers, and a process of Python's that looks after locks
    states = [Path(f"/proc/{pid}/status").read_text() for pid in children]
    ignored = [int(re.search(r"SigIgn:\s+(\w+)", state)[1], 16) for state in states]
    assert all(mask & 1 << signal.SIGINT - 1 for mask in ignored)  # Ctrl-C is for the parent
    long_run.kill()
    until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in children), 60)
    assert "edufineweb_val_000000.npy: 500,000 tokens, " in long_run.stdout.read()  # at once

@pytest.mark.parametrize("signal_number, kill", [(signal.SIGINT, os.killpg),
                                                 (signal.SIGTERM, os.kill)])
def test_ctrl_c_and_sigterm_say_one_line(long_run, tmp_path, signal_number, kill):
    kill(long_run.pid, signal_number)
    says = "\nStopped. The same command continues after the last whole shard.\n"
    assert (long_run.communicate(timeout=60)[1], long_run.returncode) == (says, 130)
    assert {len(np.load(path)) for path in shards_of(tmp_path / "shards")} == {500_000}

def test_killed_worker_is_a_line_not_a_hang(monkeypatch):
    monkeypatch.setattr(fineweb, "tokenize", os.kill)
    batches = ((0, 0, multiprocessing.active_children()[0].pid) for _ in range(1))
    with refused("A worker process died.*--nprocs"):
        list(fineweb.tokenize_all(batches, 1, signal.SIGKILL))

@pytest.fixture
def fineweb_hub(hub, corpus):
    hub.files[DATASET] = {f"sample/10BT/{path.relative_to(corpus)}": path.read_bytes()
                          for path in corpus.rglob("*.*") if path.is_file()}
    hub.files[DATASET] |= {"README.md": README, "data/CC-MAIN-2013-20/1.jsonl": b"another"}
    return hub

def test_hub_dataset_streams_to_the_same_tokens(fineweb_hub, corpus, whole, tmp_path):
    hub, out = fineweb_hub, tmp_path / "out"
    done = run(DATASET, out, env=hub.env, max_shards=2)
    assert (done.returncode, done.stderr, len(shards_of(out))) == (0, "", 2)
    manifest = (out / "manifest.json").read_text()
    assert f'"a.parquet, {(corpus / "a.parquet").stat().st_size} bytes"' in manifest
    row = json.loads(manifest)["shards"][-1]["row"]
    groups = pq.ParquetFile(corpus / "a.parquet").metadata
    # one request fails: the hub's client tries again, and its line on that is not shown
    hub.fail = lambda path, span: 500 if span and sum(bool(s) for *_, s in hub.log) == 1 else None
    hub.revision = "c" * 40  # a commit that touches none of these files
    hub.log.clear()
    done = run(DATASET, out, env=hub.env)
    assert (done.returncode, done.stderr) == (0, "")
    assert digests(out) == digests(whole)
    spans = [span for _, path, span in hub.log if path.endswith("a.parquet") and span]
    first = min(int(re.match(r"bytes=(\d+)", span)[1]) for span in spans)
    assert row >= 60 and first >= groups.row_group(row // 20).column(0).dictionary_page_offset
    cached = [path.stat().st_size for path in Path(hub.env["HF_HOME"]).rglob("*") if path.is_file()]
    assert sum(cached) < 20_000, "the corpus was copied to the disk"

def test_no_network_and_what_the_hub_lacks(fineweb_hub, tmp_path):
    hub, out = fineweb_hub, tmp_path / "out"
    done = run("nobody/nothing", out, env=hub.env)
    one_line(done.stderr, "source=nobody/nothing", "doesn't exist on the Hub", "HF_ENDPOINT")
    done = run_script("fineweb.py", cwd=tmp_path, env=hub.env | {"HF_HUB_OFFLINE": "1"})
    one_line(done.stderr, f"cannot be fetched from {hub.env['HF_ENDPOINT']}", DATASET, "hf-mirror")
    assert done.returncode == 1 and not (tmp_path / "edu_fineweb10B").exists()
    hub.fail = lambda path, span: 404 if span and "d.par" in path else None
    done = run(DATASET, out, env=hub.env)
    one_line(done.stderr, "deeper.parquet/d.parquet cannot be read from row 1 on", "continues")

@pytest.mark.parametrize("change, says", [
    ({"shard_siz": 5}, "unrecognized arguments: --shard_siz"), ({"shard_size": 99}, "=99: .*1025"),
    ({"nprocs": "-1"}, "nprocs=-1: it must be a whole number >= 0"),
    ({"encoding": "gpt3"}, "encoding=gpt3 is none of bytes, gpt2, .*cl100k_base")])
def test_bad_flags(corpus, tmp_path, make, change, says):
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
    ("x.jsonl.gz", gzip.compress(b'{"text": "a"}\n')[:-9], r"x.jsonl.gz .* 1 on \(EOFError"),
    ("x.jsonl", b'{"text": "a"}\n\n{"text": "b\n', "from row 3 on .*JSONDecodeError")])
def test_damaged_documents_are_named(tmp_path, make, name, data, says):
    (tmp_path / name).write_bytes(data)
    with refused(says):
        make(tmp_path, tmp_path / "out")

def test_no_file_stays_open(corpus, tmp_path):
    done = run(corpus, tmp_path / "out", env={"PYTHONDEVMODE": "1"})
    assert done.returncode == 0 and "ResourceWarning" not in done.stderr, done.stderr
    write_lines(tmp_path / "in/a.jsonl", TEXTS[:50])
    (tmp_path / "in/b.jsonl").write_bytes(b'{"text": "a')
    done = run(tmp_path / "in", tmp_path / "out2", env={"PYTHONDEVMODE": "1"})
    assert done.returncode == 1 and "ResourceWarning" not in done.stderr, done.stderr

def test_a_corpus_that_fits_into_the_validation_shard(corpus, whole, tmp_path, make,
                                                       monkeypatch):
    n = len(tokens_of(whole))
    for _ in range(2):
        with refused(f"{n:,} tokens .* nothing to train on.* --shard_size={n // 10 + 1} "):
            make(corpus, tmp_path, shard_size=n)
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(fineweb, "add_shards", Mock(side_effect=KeyboardInterrupt))
        make(corpus, tmp_path, shard_size=n // 10 + 1)
    assert not (tmp_path / "manifest.json").exists()  # it would vouch for the next shard 0
    make(corpus, tmp_path, shard_size=n // 10 + 1)
    assert len(shards_of(tmp_path)) == 10
    with refused("has 0 tokens .'text' in its .parquet, .jsonl.* Take more text or"):
        make(ROOT / "tests", tmp_path / "none")

def test_other_settings_and_used_files_that_changed_are_refused(tmp_path, make):
    source, out = tmp_path / "in", tmp_path / "out"
    for i in range(3):
        write_lines(source / f"{i}.jsonl", make_texts(50, seed=i))
    make(source, out, max_shards=2)
    with refused("shard_size was 50000 and is 5000; encoding was bytes and is gpt2.*another"):
        make(source, out, shard_size=5000, encoding="gpt2")
    write_lines(source / "2.jsonl", make_texts(60, seed=5))  # this one is not used yet
    make(source, out)
    write_lines(source / "3.jsonl", ["after a shorter last shard"])
    with refused(r"file 3 was unknown and is 3.jsonl, \d+ bytes"):
        make(source, out)
    write_lines(source / "1.jsonl", ["shorter"])
    with refused(r"\(file 1 was 1.jsonl, \d+ bytes and is 1.jsonl, \d+ bytes; file 3 was"):
        make(source, out)
    (out / "manifest.json").unlink()
    with refused("shard_size was unknown"):
        make(source, out)

def test_no_folder_and_no_vocabulary(corpus, tmp_path):
    one_line(run(corpus, __file__).stderr, f"local_dir={__file__} cannot be written (", "make room")
    nowhere = "http://127.0.0.1:9"
    env = {"TIKTOKEN_CACHE_DIR": str(tmp_path), "HTTPS_PROXY": nowhere, "https_proxy": nowhere}
    done = run(corpus, tmp_path / "out", encoding="gpt2", env=env)
    one_line(done.stderr, "encoding=gpt2 has no vocabulary (", "TIKTOKEN_CACHE_DIR")

def test_disk_full_leaves_only_whole_shards(corpus, whole, tmp_path, make):
    resource = pytest.importorskip("resource", reason="needs setrlimit")
    make(corpus, tmp_path, max_shards=2)
    with start(*flags(corpus, tmp_path), preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_FSIZE, [2 * SHARD] * 2)) as process:  # the header is too much
        one_line(process.communicate(timeout=60)[1], "cannot be written", "File too large")
    assert len(shards_of(tmp_path)) == 2 and not list(tmp_path.glob("*.part"))
    make(corpus, tmp_path)
    assert digests(tmp_path) == digests(whole)

def test_files_are_on_the_disk_and_verified_before_their_names(corpus, tmp_path, make, monkeypatch):
    flushed, renamed, replace = [], [], os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.fstat(fd).st_size))
    monkeypatch.setattr(os, "replace", lambda part, path: (
        renamed.append(part.stat().st_size), replace(part, path)))
    make(corpus, tmp_path, max_shards=2)
    assert flushed == renamed and flushed[::2] == [128 + 2 * SHARD] * 2  # shard, manifest, ...
    path, verify = tmp_path / "manifest.json", Mock(side_effect=fineweb.UserError("half of it"))
    with refused("half of it"):
        fineweb.write_whole(path, lambda file: file.write(b"half"), verify)
    assert len(path.read_bytes()) > 4  # what was there

@pytest.mark.parametrize("error, says", [(NotImplementedError(), "(NotImplementedError)"),
                                         (OSError("No locks here.\nNone."), "(No locks here)")])
def test_a_disk_without_locks(corpus, tmp_path, make, monkeypatch, error, says):
    monkeypatch.setattr("filelock.FileLock.acquire", Mock(side_effect=error))
    assert f"cannot be locked {says}: no" in make(corpus, tmp_path / "new", max_shards=2).out

@dataclasses.dataclass
class Edited:
    steps: int = 1e3  # was 12
    fast: bool = "True"  # 100 % of it
    name: str = False
    rate: float = "1e-3"

def test_constants_and_flags(monkeypatch, capsys):
    assert fineweb.make_config(Edited, {}) == Edited(1000, True, "False", 0.001)
    monkeypatch.setattr(sys, "argv", ["x.py", "--steps=2e1", "--fast=false"])
    given = fineweb.parse_flags(Edited, "doc")
    assert fineweb.make_config(Edited, given) == Edited(20, False, "False", 0.001)
    numbers = ("nan", "inf", "1e400", "-1", "one", None, -0.5, math.nan)
    for name, what, values in (("steps", "a whole number >= 0", ("1.5", *numbers)),
                               ("rate", "a finite number >= 0", numbers),
                               ("fast", "True or False", ("yes",))):
        for value in values:
            with refused(f"^{name}={value}: it must be {what}\\.$"):
                fineweb.make_config(Edited, {name: value})
    monkeypatch.setattr(sys, "argv", ["x.py", "--help"])
    with pytest.raises(SystemExit):
        fineweb.parse_flags(Edited, "doc", {"SMALL": {"steps": 7}, "FINETUNE": {"steps": 9}})
    out = capsys.readouterr().out
    assert "was 12 [1000.0, in SMALL 7, in FINETUNE 9]" in " ".join(out.split())
    assert "100 % of it ['True']" in out
    with refused("step is mistyped"):  # in SMALL, say
        fineweb.make_config(Edited, {"step": 1})
    monkeypatch.setattr(Edited, "depth", 5, raising=False)
    with refused("depth .* lacks a type"):
        fineweb.make_config(Edited, {})
    for kind in (tuple, float | None):
        monkeypatch.setattr(Edited, "__annotations__", Edited.__annotations__ | {"depth": kind})
        with refused(f"depth=5: it must be {re.escape(str(kind))}"):
            fineweb.make_config(Edited, {})
