"""fineweb.py as its user runs it: same bytes as a naive tokenizer, stops and kills, bad input."""
import gzip
import hashlib
import http.server
import itertools
import json
import multiprocessing.context
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
from conftest import ROOT, shared

import fineweb

SHARD = 50_000  # tokens
DATASET = "HuggingFaceFW/fineweb-edu"
ODD = ["<|endoftext|>", "a <|endoftext|> b <|fim_prefix|>", "\x00\x01\r\n\r", " " * 5000,
       "\u200b\u202e\ufeff z\u0351\u0313algo \U0010ffff", "a" * 5000, "no end",
       "👩‍👩‍👧 中文"]
README = """---
configs:
- config_name: default
  data_files: [{split: train, path: data/*/*}]
- config_name: sample-10BT
  data_files: [{split: train, path: sample/10BT/*}]
---
"""


# -------------------------------------------------------------------------- a stand-in for the hub
class Hub(http.server.BaseHTTPRequestHandler):
    """As much of huggingface.co as `datasets` needs: serves `files`, keeps requests in `log`."""
    protocol_version = "HTTP/1.1"
    revision = "a" * 40
    files, log = {}, []

    def log_message(self, *args):
        pass

    def answer(self, body, status=200, **headers):
        self.send_response(status)
        for name, value in {**headers, "Content_Length": len(body)}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, value, status=200):
        self.answer(json.dumps(value).encode(), status)

    def answer_missing(self, code):
        self.answer(b"", 404, X_Error_Code=code, X_Error_Message="not found")

    def answer_file(self, name):
        if name not in self.files:
            return self.answer_missing("EntryNotFound")
        data = self.files[name]
        headers = {"ETag": f'"{self.entry(name)["oid"]}"', "X_Repo_Commit": self.revision}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not asked:
            return self.answer(data, **headers)
        start, end = int(asked[1]), int(asked[2])
        headers["Content_Range"] = f"bytes {start}-{end}/{len(data)}"
        return self.answer(data[start:end + 1], 206, **headers)

    def entry(self, name):
        data = self.files[name]
        oid = hashlib.sha1(data).hexdigest()
        return {"type": "file", "path": name, "size": len(data), "oid": oid}

    def answer_tree(self, folder, recursive):
        prefix = folder and folder + "/"
        entries = {}
        for name in sorted(name for name in self.files if name.startswith(prefix)):
            child = prefix + name[len(prefix):].split("/")[0]
            if name == child or recursive:
                entries[name] = self.entry(name)
            if name != child:
                entries[child] = {"type": "directory", "path": child, "size": 0, "oid": "b" * 40}
        self.answer_json(list(entries.values()), 200 if entries else 404)

    def do_GET(self):
        address = urllib.parse.urlparse(self.path)
        path = urllib.parse.unquote(address.path)
        self.log.append((self.command, path, self.headers.get("Range")))
        if asked := re.fullmatch(rf"/datasets/{DATASET}/resolve/\w+/(.*)", path):
            self.answer_file(asked[1])
        elif asked := re.fullmatch(rf"/api/datasets/{DATASET}/tree/\w+/?(.*)", path):
            self.answer_tree(asked[1], "recursive=true" in address.query.lower())
        elif re.fullmatch(rf"/api/datasets/{DATASET}(/revision/\w+)?", path):
            self.answer_json({"_id": "1", "id": DATASET, "sha": self.revision, "private": False,
                              "tags": [], "downloads": 0, "likes": 0, "siblings": []})
        else:
            self.answer_missing("RepoNotFound")

    do_HEAD = do_GET

    def do_POST(self):  # paths-info: what is known of these paths
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.log.append((self.command, self.path, None))
        form = json.loads(asked) if asked.startswith("{") else urllib.parse.parse_qs(asked)
        self.answer_json([self.entry(path) for path in form["paths"] if path in self.files])


@pytest.fixture(scope="module")
def hub(texts, tmp_path_factory):
    """Environment that sends the hub's clients to the stand-in; the dataset has its real names."""
    folder = tmp_path_factory.mktemp("hub")
    write_parquet(folder / "sample/10BT/000_00000.parquet", texts[:200])
    write_parquet(folder / "sample/10BT/001_00000.parquet", texts[200:])
    write_parquet(folder / "data/CC-MAIN-2013-20/train-00000.parquet", ["another configuration"])
    (folder / "README.md").write_text(README)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    Hub.files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
           "HF_HOME": str(tmp_path_factory.mktemp("hf")), "NO_PROXY": "*", "HF_HUB_OFFLINE": "0"}
    server.shutdown()


# ----------------------------------------------------------------------------------------- helpers
def make_texts(n, seed):
    rng = random.Random(seed)
    words = "model token loss gradient Straße naïve 数据 🙂 the of and to in 3.14 x_i".split()
    return [" ".join(rng.choices(words, k=rng.randint(1, 400))) for _ in range(n)]


def write_parquet(path, texts, rows=20, compression="zstd"):
    """Like FineWeb-Edu's files: text among other columns, in row groups."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = [f"<urn:uuid:{i}>" for i in range(len(texts))]
    table = pa.table({"text": pa.array(texts, pa.string()), "id": ids})
    pq.write_table(table, path, row_group_size=rows, compression=compression,
                   write_page_checksum=True)


def write_lines(path, texts):
    lines = [json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)]
    data = "".join(lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def text_offset(file, group):
    """Where in a parquet file the texts of a row group begin."""
    column = file.metadata.row_group(group).column(0)
    return column.dictionary_page_offset or column.data_page_offset


def damage(path, group):
    """Overwrite texts of a row group with zeros."""
    start = text_offset(pq.ParquetFile(path), group) + 100
    data = bytearray(path.read_bytes())
    data[start:start + 100] = bytes(100)
    path.write_bytes(data)


def naive(texts, encoding):
    """The ten-line tokenizer that fineweb.py has to agree with, byte for byte."""
    tokens = []
    for text in texts:
        if text and text.strip():
            tokens.append(encoding.eot_token)
            tokens.extend(encoding.encode_ordinary(text))
    return np.array(tokens, dtype=np.uint16)


def flags_for(source, local_dir, encoding="bytes", shard_size=SHARD):
    return [f"--source={source}", f"--local_dir={local_dir}", f"--shard_size={shard_size}",
            f"--encoding={encoding}"]


def start(*flags, script=ROOT / "fineweb.py", env=None, **kwargs):
    """fineweb.py as a subprocess.Popen."""
    kwargs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **kwargs}
    return subprocess.Popen([sys.executable, script, *flags], env={**os.environ, **(env or {})},
                            encoding="utf-8", errors="replace", **kwargs)


def finish(process):
    stdout, stderr = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def make(source, local_dir, *flags, encoding="bytes", shard_size=SHARD, **kwargs):
    """Run fineweb.py to its end; kwargs: as for `start`."""
    settings = flags_for(source, local_dir, encoding=encoding, shard_size=shard_size)
    return finish(start(*settings, *flags, **kwargs))


def limited(limit, value):
    """subprocess's preexec_fn that lowers a limit of the process."""
    resource = pytest.importorskip("resource", reason="needs setrlimit")
    name = getattr(resource, limit)
    return lambda: resource.setrlimit(name, (value, value))


def shards_of(folder):
    return sorted(Path(folder).glob("*.npy"), key=lambda path: path.stem[-6:])


def tokens_of(folder):
    return np.concatenate([np.load(path, allow_pickle=False) for path in shards_of(folder)])


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in shards_of(folder)}


def ends_of(folder):
    return json.loads((folder / "manifest.json").read_text())["shards"]


def assert_made(result):
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def assert_refused(result, *patterns):
    """One line on stderr that says all of `patterns`, exit code 1, no traceback."""
    assert result.returncode == 1, result.stderr
    assert result.stderr.startswith("fineweb.py: "), result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    for pattern in patterns:
        assert re.search(pattern, result.stderr), result.stderr


def refused(match):
    return pytest.raises(fineweb.UserError, match=match)


@pytest.fixture(scope="module")
def texts():
    return make_texts(400, seed=1) + ODD


@pytest.fixture(scope="module")
def corpus(texts, tmp_path_factory):
    """A folder of all kinds of files; in reading order they hold `texts`."""
    folder = tmp_path_factory.mktemp("corpus")
    write_parquet(folder / "a.parquet", texts[:150])
    write_lines(folder / "b.jsonl", texts[150:200])
    write_lines(folder / "c.jsonl.gz", texts[200:250])
    write_parquet(folder / "deeper/d.parquet", texts[250:])
    (folder / "README.md").write_text("not a document")
    return folder


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """The shards of `corpus`, made in one go by two workers."""
    folder = tmp_path_factory.mktemp("whole")
    assert_made(make(corpus, folder, "--nprocs=2"))
    return folder


@pytest.fixture(scope="module", autouse=True)
def without_network(tmp_path_factory):
    """A run that finds no hub, begun early: the hub's client gives up after half a minute only."""
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path_factory.mktemp("hf"))}
    process = start("--encoding=bytes", env=env, cwd=tmp_path_factory.mktemp("offline"))
    yield process
    process.kill()
    process.communicate()


# -------------------------------------------------------------------------------------- the format
def test_shards_are_what_a_naive_tokenizer_makes(texts, whole, tmp_path):
    shards = [np.load(path, allow_pickle=False) for path in shards_of(whole)]
    names = [f"edufineweb_train_{i:06d}.npy" for i in range(1, len(shards))]
    assert [path.name for path in shards_of(whole)] == ["edufineweb_val_000000.npy", *names]
    assert all(shard.dtype == np.uint16 and shard.ndim == 1 for shard in shards)
    assert len(shards) > 5 and {len(shard) for shard in shards[:-1]} == {SHARD}
    assert 0 < len(shards[-1]) <= SHARD
    expected = naive(texts, fineweb.get_encoding("bytes"))
    np.testing.assert_array_equal(np.concatenate(shards), expected)
    np.save(tmp_path / "again.npy", shards[-1])
    assert (tmp_path / "again.npy").read_bytes() == shards_of(whole)[-1].read_bytes()
    others = [path.name for path in whole.iterdir() if path.suffix != ".npy"]
    assert sorted(others) == [".lock", "manifest.json"]


@pytest.mark.parametrize("nprocs", [1, 3])
def test_number_of_workers_changes_no_byte(corpus, whole, tmp_path, nprocs):
    assert_made(make(corpus, tmp_path, f"--nprocs={nprocs}"))
    assert digests(tmp_path) == digests(whole)


def test_gpt2_tokens_of_a_slice_of_the_standin(gpt2_encoding, tmp_path):
    table = pq.read_table(shared("fineweb_standin") / "000_00000.parquet").slice(100, 300)
    texts = table["text"].to_pylist() + ODD
    write_parquet(tmp_path / "in/slice.parquet", texts, rows=64)
    out = tmp_path / "out"
    assert_made(make(tmp_path / "in", out, "--nprocs=2", encoding="gpt2", shard_size=100_000))
    np.testing.assert_array_equal(tokens_of(out), naive(texts, gpt2_encoding))
    assert np.load(out / "edufineweb_val_000000.npy")[0] == 50256


def test_long_texts_are_encoded_in_parts_with_the_same_ids(gpt2_encoding, monkeypatch):
    rng = random.Random(0)
    pieces = [" ", "\n", "\t\r\n", "\u3000", "\x1c", "\x85", "a", "it's", " 's", "12", "!?", "数",
              "\u0301", "\u200b", "<|endoftext|>", "\ud800"]
    for max_chars in (1, 2, 3, 7):
        monkeypatch.setattr(fineweb, "MAX_ENCODE_CHARS", max_chars)
        for _ in range(1000):
            text = "".join(rng.choices(pieces, k=rng.randint(0, 25)))
            ids = gpt2_encoding.encode_ordinary(text)
            assert fineweb.encode(gpt2_encoding, text).tolist() == ids, repr(text)


def test_whitespace_that_tiktoken_cannot_encode(gpt2_encoding):
    batch = fineweb.Batch(0, "", 0, json.dumps({"text": "a" + " " * 10**6 + "b"}).encode())
    run = gpt2_encoding.encode_ordinary(" " * (10**6 - 1))
    expected = [50256, *gpt2_encoding.encode("a"), *run, *gpt2_encoding.encode(" b")]
    assert fineweb.tokenize(batch, gpt2_encoding).tokens.tolist() == expected


def test_whitespace_is_what_tiktoken_takes_for_it():
    bytes_ = {bytes([i]): i for i in range(256)}
    spaces = tiktoken.Encoding("spaces", pat_str=r"\s", mergeable_ranks=bytes_, special_tokens={})
    every = "".join(map(chr, itertools.chain(range(0xd800), range(0xe000, 0x110000))))
    found = spaces.decode(spaces.encode_ordinary(every))
    assert len(found) == 25
    assert set(found) == {c for c in every if fineweb.WORD_START.match(c + "a")}


def test_summary_counts_documents_and_those_without_text(tmp_path):
    (tmp_path / "in").mkdir()
    lines = [{"text": "one"}, {"text": ""}, {"text": None}, {"id": 4}, {"text": " \n\t"},
             {"text": "two \ud800 odd"}]
    (tmp_path / "in/x.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    write_parquet(tmp_path / "in/y.parquet", ["three", "", None, "  "])
    result = make(tmp_path / "in", tmp_path / "out", "--nprocs=1")
    assert_made(result)
    assert "3 documents, " in result.stdout
    assert "7 documents without text were left out" in result.stdout
    expected = naive(["one", "two \ufffd odd", "three"], fineweb.get_encoding("bytes"))
    np.testing.assert_array_equal(tokens_of(tmp_path / "out"), expected)
    size = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert f"{len(expected)} tokens in 1 shards, {size / 1e9:.3f} GB" in result.stdout
    assert re.search(r"[\d.]+ M tokens/s", result.stdout)


def test_parquet_strings_that_are_not_utf8(tmp_path):
    bad = b"caf\xe9 \xed\xa0\x80"  # Latin-1, and a surrogate
    table = pa.table({"text": pa.array([bad], pa.binary()).view(pa.string())})
    pq.write_table(table, tmp_path / "x.parquet")
    batch, = fineweb.read_batches([str(tmp_path / "x.parquet")], 0, 0)
    tokens = fineweb.tokenize(batch, fineweb.get_encoding("bytes")).tokens
    assert tokens[1:].astype(np.uint8).tobytes().decode() == bad.decode("utf-8", "replace")


@pytest.mark.parametrize("limit", [1, 1 << 40])
def test_reading_starts_at_any_batch_and_cuts_big_row_groups(corpus, texts, monkeypatch, limit):
    monkeypatch.setattr(fineweb, "MAX_GROUP_BYTES", limit)
    monkeypatch.setattr(fineweb, "BATCH_BYTES", 5000)
    urls = list(fineweb.find_files(str(corpus), ""))
    batches = list(fineweb.read_batches(urls, 0, 0))
    starts = {0: 0, 1: 150, 2: 200, 3: 250}
    assert {batch.file for batch in batches} == {*starts} and len(batches) > 20
    for batch in batches:
        found = fineweb.read_texts(batch)
        first = starts[batch.file] + batch.row
        assert found == texts[first:first + len(found)]
    for i in (0, 1, 7, len(batches) // 2, len(batches) - 1):
        assert list(fineweb.read_batches(urls, batches[i].file, batches[i].row)) == batches[i:]


def test_only_a_bounded_number_of_batches_is_in_memory(corpus):
    urls = list(fineweb.find_files(str(corpus), ""))
    taken = []
    batches = (taken.append(batch) or batch for batch in fineweb.read_batches(urls, 0, 0))
    results = fineweb.tokenize_all(batches, 1, fineweb.get_encoding("bytes"))
    for used, result in enumerate(results, start=1):
        assert len(taken) < used + fineweb.BATCHES_PER_WORKER
        assert (result.file, result.row) == (taken[used - 1].file, taken[used - 1].row)
    assert used == len(taken) > 10


# ------------------------------------------------------------------------------- the source folder
def test_links_are_followed_without_loops(tmp_path):
    write_lines(tmp_path / "elsewhere.jsonl", ["one"])
    for name in ("in/a", "in/c", "other/b"):
        (tmp_path / name).mkdir(parents=True)
        write_lines(tmp_path / name / "x.jsonl", ["two"])
    (tmp_path / "in/b").symlink_to(tmp_path / "other/b")
    (tmp_path / "in/c/back").symlink_to(tmp_path / "in")
    (tmp_path / "in/c/y.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    found = fineweb.find_files(str(tmp_path / "in"), "")
    names = ["a/x.jsonl", "b/x.jsonl", "c/x.jsonl", "c/y.jsonl"]
    assert list(found) == [str(tmp_path / "in" / name) for name in names]
    assert found[str(tmp_path / "in/c/y.jsonl")] == (tmp_path / "elsewhere.jsonl").stat().st_size


def test_what_cannot_be_read_in_the_source_folder_is_refused(tmp_path, monkeypatch):
    write_lines(tmp_path / "a.jsonl", ["one"])
    os.mkfifo(tmp_path / "b.jsonl")
    with refused("b.jsonl is not a regular file"):
        fineweb.find_files(str(tmp_path), "")
    (tmp_path / "b.jsonl").unlink()
    (tmp_path / "part2").symlink_to(tmp_path / "not mounted")
    with refused("part2 cannot be read .No such file"):
        fineweb.find_files(str(tmp_path), "")
    (tmp_path / "part2").unlink()
    (tmp_path / "part2").mkdir()

    def listdir(path, real=os.listdir):  # for root, no folder is unreadable
        if Path(path).name == "part2":
            raise PermissionError(13, "Permission denied", path)
        return real(path)
    monkeypatch.setattr(os, "listdir", listdir)
    with refused("part2 cannot be read .Permission denied"):
        fineweb.find_files(str(tmp_path), "")


# ------------------------------------------------------------------------------------------- stops
def test_stopping_early_and_going_on(corpus, whole, tmp_path):
    for max_shards, n in ((1, 1), (3, 3), (2, 3)):
        result = make(corpus, tmp_path, f"--max_shards={max_shards}", "--nprocs=1")
        assert_made(result)
        assert len(shards_of(tmp_path)) == n and f"in {n} shards" in result.stdout
    assert "This run: 0 tokens" in result.stdout
    before = {path: path.stat().st_mtime_ns for path in shards_of(tmp_path)}
    result = make(os.path.relpath(corpus, ROOT), tmp_path, "--nprocs=2", cwd=ROOT)
    assert_made(result)
    assert digests(tmp_path) == digests(whole)
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items())
    assert f"This run: {len(tokens_of(whole)) - 3 * SHARD:,} tokens" in result.stdout
    again = make(corpus, tmp_path, env={"TIKTOKEN_CACHE_DIR": "/nowhere"})
    assert_made(again)
    assert "This run: 0 tokens" in again.stdout


def test_a_finished_corpus_that_ends_with_an_empty_file_is_finished(tmp_path):
    write_parquet(tmp_path / "in/a.parquet", make_texts(100, seed=3))
    (tmp_path / "in/b.jsonl").write_bytes(b"")
    assert_made(make(tmp_path / "in", tmp_path / "out"))
    before = digests(tmp_path / "out")
    again = make(tmp_path / "in", tmp_path / "out")
    assert_made(again)
    assert "This run: 0 tokens" in again.stdout and digests(tmp_path / "out") == before


def test_finished_shards_are_not_read_again(tmp_path):
    for i in range(3):
        write_parquet(tmp_path / f"in/{i}.parquet", make_texts(100, seed=i))
    assert_made(make(tmp_path / "in", tmp_path / "once"))
    assert_made(make(tmp_path / "in", tmp_path / "out", "--max_shards=6"))
    assert ends_of(tmp_path / "out")[-1]["file"] > 0
    first = tmp_path / "in/0.parquet"
    first.write_bytes(bytes(first.stat().st_size))  # as large as before, but nobody could read it
    assert_made(make(tmp_path / "in", tmp_path / "out"))
    assert digests(tmp_path / "out") == digests(tmp_path / "once")


def test_a_repaired_file_is_continued(tmp_path):
    texts = make_texts(300, seed=3)
    write_parquet(tmp_path / "in/a.parquet", texts[:100])
    write_parquet(tmp_path / "in/b.parquet", texts[100:])
    assert_made(make(tmp_path / "in", tmp_path / "once"))
    damage(tmp_path / "in/b.parquet", 9)
    out = tmp_path / "out"
    says = "b.parquet cannot be read from row 181 on .* the same command continues"
    assert_refused(make(tmp_path / "in", out, "--nprocs=1"), says)
    end = ends_of(out)[-1]
    assert end["file"] == 1 and 0 < end["row"] < 180
    write_parquet(tmp_path / "in/b.parquet", texts[100:], rows=23)  # other batches
    assert_refused(make(tmp_path / "in", out, "--nprocs=1"), f"from row {end['row'] + 1} on")
    size = (tmp_path / "in/b.parquet").stat().st_size
    write_parquet(tmp_path / "in/b.parquet", texts[100:], compression="snappy")
    assert size != (tmp_path / "in/b.parquet").stat().st_size
    assert_made(make(tmp_path / "in", out, "--nprocs=1"))
    assert digests(out) == digests(tmp_path / "once")


@pytest.mark.parametrize("result", [
    None, fineweb.Result(1, 20, np.arange(4), 0), fineweb.Result(2, 0, np.arange(9), 0),
    fineweb.Result(1, 40, np.arange(9), 0), fineweb.Result(1, 20, np.arange(1, 9), 0)])
def test_a_file_that_changed_where_a_shard_ends_is_refused(tmp_path, result):
    np.save(tmp_path / "x.npy", np.arange(2, 5, dtype=np.uint16))
    end = fineweb.Position(file=1, row=20, used=5)
    shard = fineweb.Shard("x.npy", tokens=3, documents=1, end=end)
    good = fineweb.Result(1, 20, np.arange(9), 0)
    results = fineweb.continue_after(shard, tmp_path / "x.npy", "b.jsonl", iter([good, good]))
    assert list(results) == [good, good]
    results = iter([result] if result else [])
    with refused("b.jsonl does not hold, from row 21 on, .* x.npy"):
        list(fineweb.continue_after(shard, tmp_path / "x.npy", "b.jsonl", results))


def test_a_shard_of_the_wrong_size_is_made_again(corpus, whole, tmp_path):
    for number, size in ((-1, 0), (-2, 1000)):
        out = shutil.copytree(whole, tmp_path / str(size))
        shard = shards_of(out)[number]
        os.truncate(shard, size)
        result = make(corpus, out, "--nprocs=1")
        assert_made(result)
        assert f"{shard.name} is missing or incomplete" in result.stdout
        assert digests(out) == digests(whole)


KILLER = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import fineweb

left = [int(os.environ["STEPS"])]
def counted(step):
    def run(*args):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*args)
    return run

if __name__ == "__main__":
    os.fsync, os.replace = counted(os.fsync), counted(os.replace)
    fineweb.main()
"""


def test_killed_at_every_step_of_saving(corpus, whole, tmp_path):
    script, out = tmp_path / "killer.py", tmp_path / "out"
    script.write_text(KILLER)
    for steps in (1, 2, 3, 4, 8):  # of four: write the manifest, name it, write the shard, name it
        inodes = {path: path.stat().st_ino for path in shards_of(out)}
        result = make(corpus, out, "--nprocs=1", script=script, env={"STEPS": str(steps)})
        assert result.returncode == -signal.SIGKILL
        assert digests(out).items() <= digests(whole).items()
        assert all(path.stat().st_ino == inode for path, inode in inodes.items()), "made again"
    result = make(corpus, out, "--nprocs=2")
    assert_made(result)
    made = len(tokens_of(whole)) - SHARD  # the last kill left one shard
    assert f"This run: {made:,} tokens" in result.stdout
    assert digests(out) == digests(whole)
    assert not list(out.glob("*.tmp"))


@pytest.fixture(scope="module")
def long_corpus(tmp_path_factory):
    """Documents for half a minute of work: the tests stop it long before."""
    folder = tmp_path_factory.mktemp("long")
    write_parquet(folder / "0.parquet", make_texts(100, seed=0) * 60, rows=100)
    for i in range(1, 80):
        (folder / f"{i}.parquet").symlink_to("0.parquet")
    return folder


def start_long(source, out):
    """fineweb.py in a process group of its own, in the middle of its work."""
    process = start(*flags_for(source, out, shard_size=500_000), "--nprocs=2",
                    start_new_session=True)
    assert process.stdout.readline().startswith("edufineweb_val_000000.npy: 500,000 tokens")
    return process


def workers_of(process):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children
            if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the workers in /proc")
def test_kill_9_leaves_no_worker_behind_and_workers_are_spawned(long_corpus, tmp_path):
    process = start_long(long_corpus, tmp_path)
    second = make(long_corpus, tmp_path, shard_size=500_000)
    assert_refused(second, "Another fineweb.py is running in")
    workers = workers_of(process)
    assert len(workers) == 2
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)
    for path in shards_of(tmp_path):
        assert np.load(path).shape == (500_000,)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the workers in /proc")
def test_killed_worker_is_a_line_not_a_hang(long_corpus, tmp_path):
    process = start_long(long_corpus, tmp_path)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    result = finish(process)
    # Python's resource tracker may add a warning of its own, that semaphores were left to it
    assert result.returncode == 1
    assert result.stderr.startswith("fineweb.py: A worker process died")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("signal_number, kill", [(signal.SIGINT, os.killpg),
                                                 (signal.SIGTERM, os.kill)])
def test_ctrl_c_and_sigterm_say_one_line(long_corpus, tmp_path, signal_number, kill):
    process = start_long(long_corpus, tmp_path)
    kill(process.pid, signal_number)
    result = finish(process)
    assert result.returncode == 130
    assert result.stderr == ("\nStopped. The finished shards are kept, the same command continues "
                             "after them.\n")
    assert all(np.load(path).shape == (500_000,) for path in shards_of(tmp_path))


def test_ctrl_c_during_the_imports_says_nothing(tmp_path):
    (tmp_path / "filelock.py").write_text("print('importing', flush=True)\ninput()")
    process = start(env={"PYTHONPATH": str(tmp_path)}, stdin=subprocess.PIPE)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert (result.returncode, result.stderr) == (-signal.SIGINT, "")


def test_workers_ignore_ctrl_c_from_their_start_on(monkeypatch):
    handlers = []
    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start",
                        lambda process: handlers.append(signal.getsignal(signal.SIGINT)))
    before = signal.getsignal(signal.SIGINT)
    assert len(fineweb.start_workers(2, None)) == 2
    assert handlers == 2 * [signal.SIG_IGN] and signal.getsignal(signal.SIGINT) == before


# ------------------------------------------------------------------------------------------ output
def test_bars_on_a_terminal_and_lines_in_a_log(corpus, tmp_path):
    fcntl, pty, termios = (pytest.importorskip(name, reason="needs a Unix terminal")
                           for name in ("fcntl", "pty", "termios"))
    parent, child = pty.openpty()
    size = np.array([24, 100, 0, 0], np.uint16)  # lines, columns, pixels
    fcntl.ioctl(child, termios.TIOCSWINSZ, size.tobytes())
    process = start(*flags_for(corpus, tmp_path), stderr=child)
    os.close(child)
    terminal = b""
    while True:
        try:
            terminal += os.read(parent, 10_000)
        except OSError:  # what Linux says when the other end is closed
            break
    os.close(parent)
    lines = process.communicate()[0].splitlines()
    assert process.returncode == 0
    assert re.search(rb"all: .*tok/s", terminal)
    assert re.search(rb"shard: +\d+%\|.*/50.0k", terminal)
    assert sum(line.startswith("edufineweb_") for line in lines) == len(shards_of(tmp_path))
    assert not any("|" in line or "\r" in line for line in lines)


def closed_pipe():
    read, write = os.pipe()
    os.close(read)
    return {"stdout": write}


def full_device():
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    return {"stdout": os.open("/dev/full", os.O_WRONLY)}


def closed_descriptors():
    return {"preexec_fn": lambda: os.closerange(0, 3)}


@pytest.mark.parametrize("lose", [closed_pipe, full_device, closed_descriptors])
def test_a_lost_output_stops_nothing(corpus, whole, tmp_path, lose):
    lost = lose()
    result = make(corpus, tmp_path, "--nprocs=1", **lost)
    assert_made(result)
    assert digests(tmp_path) == digests(whole)
    if "stdout" in lost:
        os.close(lost["stdout"])


def test_the_exit_code_of_an_error_needs_no_output(tmp_path):
    result = finish(start(f"--source={tmp_path}", cwd=tmp_path, **closed_descriptors()))
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "")


def test_odd_paths_on_an_ascii_terminal(tmp_path):
    (tmp_path / "a::b").mkdir()
    write_lines(tmp_path / "a::b/x.jsonl.gz", ["one"])
    result = make(tmp_path / "a::b", tmp_path / "données", "--nprocs=1",
                  env={"PYTHONIOENCODING": "ascii"})
    assert_made(result)
    assert "donn\\xe9es/: 1 documents" in result.stdout


# ----------------------------------------------------------------------------------------- the hub
def test_hub_dataset_streams_to_the_same_tokens(hub, whole, tmp_path, monkeypatch):
    first_run = start("--encoding=bytes", f"--shard_size={SHARD}", "--max_shards=2", "--nprocs=2",
                      cwd=tmp_path, env=hub)
    assert_made(finish(first_run))
    out = tmp_path / "edu_fineweb10B"
    assert len(shards_of(out)) == 2
    file = pq.ParquetFile(pa.BufferReader(Hub.files["sample/10BT/000_00000.parquet"]))
    failures = ["one"]

    def fail_once(self, name, answer_file=Hub.answer_file):
        if f"bytes={text_offset(file, 8)}-" in self.headers.get("Range", "") and failures:
            failures.pop()
            return self.answer(b"", 500)
        return answer_file(self, name)
    monkeypatch.setattr(Hub, "answer_file", fail_once)  # the client's line on that is not shown
    monkeypatch.setattr(Hub, "revision", "c" * 40)  # a commit that touches none of these files
    Hub.log.clear()
    assert_made(make(DATASET, out, "--nprocs=3", env=hub))
    assert digests(out) == digests(whole) and not failures
    cached = sum(path.stat().st_size for path in Path(hub["HF_HOME"]).rglob("*") if path.is_file())
    assert cached < 20_000, "the corpus was copied to the disk"
    end = ends_of(out)[1]
    first_file = f"/datasets/{DATASET}/resolve/{Hub.revision}/sample/10BT/000_00000.parquet"
    ranges = [asked for _, path, asked in Hub.log if path == first_file and asked]
    starts = {int(re.match(r"bytes=(\d+)", asked)[1]) for asked in ranges}
    skipped = {text_offset(file, group) for group in range(end["row"] // 20)}
    assert end["row"] >= 40 and not starts & skipped, "finished documents were downloaded again"


def test_hub_names_that_do_not_exist(hub, tmp_path):
    result = make("nobody/nothing", tmp_path, env=hub)
    assert_refused(result, "source=nobody/nothing", "doesn't exist on the Hub")
    result = make(DATASET, tmp_path, "--remote_name=sample-10B", env=hub)
    assert_refused(result, "remote_name=sample-10B ", "Available: .*'sample-10BT'")


def test_hub_file_that_disappears(hub, tmp_path, monkeypatch):
    def answer_file(self, name, answer_file=Hub.answer_file):
        answer_file(self, "none" if "001_" in name else name)
    monkeypatch.setattr(Hub, "answer_file", answer_file)
    says = "10BT/001_00000.parquet cannot be read from row 1 on"
    assert_refused(make(DATASET, tmp_path, env=hub), says, "command continues")


def test_no_network(without_network):
    result = finish(without_network)
    assert_refused(result, "cannot be fetched from http://127.0.0.1:9", DATASET,
                   "HF_ENDPOINT=https://hf-mirror.com")
    assert "Asking http://127.0.0.1:9" in result.stdout


# --------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize("flag, says", [
    ("--shard_siz=5", "unrecognized arguments: --shard_siz"),
    ("--shard_size=1e8", "invalid int value: '1e8'"), ("--shard_size=1000", "=1000 .*1025"),
    ("--nprocs=-1", "nprocs=-1"), ("--encoding=gpt3", "--encoding: invalid choice: 'gpt3'")])
def test_bad_flags(monkeypatch, flag, says):
    monkeypatch.setattr(sys, "argv", ["fineweb.py", flag])
    with pytest.raises(SystemExit, match=f"fineweb.py: .*{says}"):
        fineweb.parse_args()


@pytest.mark.parametrize("constants, says", [
    ({"source": "/no/where"}, "source=/no/where is neither a folder nor the name of a hub dataset"),
    ({"source": "x" * 300}, "is neither a folder"), ({"source": __file__}, "is neither a folder"),
    ({"source": str(ROOT / "tests")}, "holds no .parquet, .jsonl, .jsonl.gz files"),
    ({"local_dir": __file__}, "local_dir=.* cannot be written .File exists"),
    ({"local_dir": "x" * 300}, "local_dir=x* cannot be written .File name too long")])
def test_bad_paths(tmp_path, constants, says):
    with refused(says):
        fineweb.run(fineweb.Config(**{"local_dir": tmp_path, **constants}))


def cut_parquet(folder):
    write_parquet(folder / "x.parquet", make_texts(100, seed=0))
    os.truncate(folder / "x.parquet", 3000)


def cut_gzip(folder):
    write_lines(folder / "x.jsonl.gz", make_texts(100, seed=0))
    os.truncate(folder / "x.jsonl.gz", 3000)


def table(**columns):
    return lambda folder: pq.write_table(pa.table(columns), folder / "x.parquet")


def lines(data):
    return lambda folder: (folder / "x.jsonl").write_bytes(data)


@pytest.mark.parametrize("write, says", [
    (cut_parquet, "x.parquet cannot be read from row 1 on"),
    (cut_gzip, r"x.jsonl.gz cannot be read from row 1 on \(EOFError"),
    (table(content=["a"]), "cannot be read from row 1 on .*text"),
    (table(text=[1]), "cannot be read from row 1 on .*int64"),
    (lines(b'{"text": "a"}\n\n{"text": "b\n'), "from row 3 on .*JSONDecodeError"),
    (lines(b'{"text": "\xff"}\n'), "from row 1 on .*UnicodeDecodeError"),
    (lines(b'{"text": ["b"]}\n'), "from row 1 on .*'text' is not a string")])
def test_damaged_documents_are_named(tmp_path, write, says):
    write(tmp_path)
    with refused(says):
        for batch in fineweb.read_batches(list(fineweb.find_files(str(tmp_path), "")), 0, 0):
            fineweb.read_texts(batch)


def test_documents_without_any_text(tmp_path):
    (tmp_path / "in").mkdir()
    lines(b'{"content": "b"}\n')(tmp_path / "in")
    result = make(tmp_path / "in", tmp_path / "out", "--nprocs=1")
    assert_refused(result, "no document with a 'text'")
    assert not shards_of(tmp_path / "out")


FILES = {"a.jsonl": 100, "b.jsonl": 200, "c.jsonl": 300}


def find_finished(folder, files=None, end=None, **settings):
    """What `find_finished` finds of a shard that is made of FILES; by now these are `files`."""
    np.save(folder / "x.npy", np.zeros(5, np.uint16))
    made = {"source": "texts", "remote_name": "", "shard_size": 5, "encoding": "bytes",
            "batch_bytes": fineweb.BATCH_BYTES, "file 0": "a.jsonl, 100 bytes",
            "file 1": "b.jsonl, 200 bytes", "file 2": "c.jsonl, 300 bytes"}
    end = end or {"file": 1, "row": 4, "used": 2, "left_out": 0}
    shards = [{"name": "x.npy", "tokens": 5, "documents": 1, **end}]
    manifest = {"settings": made, "shards": shards}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    cfg = fineweb.Config(**{"source": "texts", "remote_name": "", "shard_size": 5,
                            "encoding": "bytes", **settings})
    return fineweb.find_finished(folder, fineweb.settings_of(cfg, files or FILES))


@pytest.mark.parametrize("files", [
    FILES, FILES | {"c.jsonl": 4}, FILES | {"d.jsonl": 4}, FILES | {"b.jsonl": 4},
    {"a.jsonl": 100, "b.jsonl": 200}, {"/moved/a.jsonl": 100, "b.jsonl": 200, "bb.jsonl": 5}])
def test_files_not_yet_used_up_may_change(tmp_path, files):
    shard, = find_finished(tmp_path, files)
    assert shard.end == fineweb.Position(file=1, row=4, used=2)


@pytest.mark.parametrize("files, says", [
    (FILES | {"a.jsonl": 4}, "file 0 was a.jsonl, 100 bytes and is a.jsonl, 4 bytes. Undo"),
    ({"a.jsonl": 100}, "file 1 was b.jsonl and is absent"),
    ({"0.jsonl": 4, **FILES}, "file 0 was .* and is 0.jsonl, 4 bytes; file 1 was")])
def test_used_files_that_changed_are_refused(tmp_path, files, says):
    with refused(says):
        find_finished(tmp_path, files)


def test_a_file_after_a_short_last_shard_is_refused(tmp_path):
    end = {"file": 3, "row": 0, "used": 0, "left_out": 0}
    assert find_finished(tmp_path, end=end)
    with refused("file 3 was absent and is d.jsonl"):
        find_finished(tmp_path, FILES | {"d.jsonl": 4}, end=end)


def test_other_settings_are_refused_with_the_difference(corpus, whole, tmp_path):
    before = digests(whole)
    result = make(corpus, whole, shard_size=SHARD + 1)
    assert_refused(result, f"shard_size was {SHARD} and is {SHARD + 1}")
    assert digests(whole) == before
    with refused("source was texts and is x; remote_name was  and is y; shard_size .*; 1 more."):
        find_finished(tmp_path, source="x", remote_name="y", shard_size=6, encoding="gpt2")


@pytest.mark.parametrize("text", [
    "", "{", "{}", "[]", "null", "5", '{"settings": {}, "shards": [{"name": "x.npy"}]}',
    '{"settings": {}, "shards": null}', '{"settings": 5, "shards": []}',
    '{"settings": {}, "shards": [{"name": "x.npy", "tokens": "5", "documents": 1, "file": 1, '
    '"row": 0, "used": 1, "left_out": 0}]}'])
def test_damaged_manifests_are_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with refused("manifest.json is damaged"):
        fineweb.find_finished(tmp_path, {})


def test_foreign_shards_are_refused(tmp_path):
    np.save(tmp_path / "edufineweb_train_000001.npy", np.zeros(10, np.uint16))
    with refused("no manifest.json .* another --local_dir"):
        fineweb.find_finished(tmp_path, {})


def test_disk_full_leaves_only_whole_shards(corpus, whole, tmp_path):
    limit = limited("RLIMIT_FSIZE", 2 * SHARD)  # room for the tokens, but not for the header too
    result = make(corpus, tmp_path, preexec_fn=limit)
    assert_refused(result, f"local_dir={tmp_path} cannot be written .File too large", "make room")
    assert not shards_of(tmp_path)
    assert_made(make(corpus, tmp_path))
    assert digests(tmp_path) == digests(whole)


def test_the_limit_on_open_files_is_named(corpus, tmp_path):
    result = make(corpus, tmp_path, "--nprocs=30", preexec_fn=limited("RLIMIT_NOFILE", 20))
    assert_refused(result, "limit on open files .*ulimit -n .*--nprocs")
    says = str(fineweb.unreadable("x.jsonl", 0, OSError(24, "Too many open files")))
    assert says.startswith("The limit on open files")


def test_causes_are_cut_between_words():
    assert fineweb.brief(ValueError("two\n  lines")) == "ValueError: two lines"
    cause = fineweb.brief(ValueError("long-word " * 50))
    assert cause.endswith(" long-word ...") and len(cause) < 260


def test_vocabulary_out_of_reach(corpus, tmp_path):
    nowhere = "http://127.0.0.1:9"
    env = {"TIKTOKEN_CACHE_DIR": str(tmp_path), "HTTPS_PROXY": nowhere, "https_proxy": nowhere}
    result = make(corpus, tmp_path / "out", encoding="gpt2", env=env)
    assert_refused(result, "encoding=gpt2", "TIKTOKEN_CACHE_DIR")


def test_help_lists_every_constant_with_its_default():
    out = finish(start("--help")).stdout
    for name, value in vars(fineweb.Config()).items():
        assert re.search(rf"--{name} X(?s:.)*\[{re.escape(str(value))}\]", out), name
