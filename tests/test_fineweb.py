"""fineweb.py as its user runs it: same bytes as a naive tokenizer, stops and kills, a stand-in hub, bad input."""
import gzip
import hashlib
import http.server
import json
import os
import random
import re
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
from conftest import ROOT, run_script, shared

import fineweb

SHARD = 50_000  # tokens
DATASET, CONFIGURATION = "HuggingFaceFW/fineweb-edu", "sample-10BT"
ODD = ["<|endoftext|>", "a <|endoftext|> b <|fim_prefix|>", "\u200b\u202e\ufeff z\u0351\u0313algo \U0010ffff",
       "👩‍👩‍👧 中文", "\x00\x01\r\n\r", " " * 5000, "a" * 5000, "no end"]


# ------------------------------------------------------------------------------------------------- helpers
def make_texts(n, seed):
    rng = random.Random(seed)
    words = "model token loss gradient attention layer Straße naïve 数据 🙂 the of and to in 3.14 x_i".split()
    return [" ".join(rng.choices(words, k=rng.randint(1, 400))) for _ in range(n)]


def write_parquet(path, texts, rows=20):
    """Like FineWeb-Edu's files: text among other columns, in row groups."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = [f"<urn:uuid:{i}>" for i in range(len(texts))]
    table = pa.table({"text": pa.array(texts, pa.string()), "id": ids})
    pq.write_table(table, path, row_group_size=rows, compression="zstd", write_page_checksum=True)


def write_lines(path, texts):
    lines = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


def text_offset(file, group):
    """Where in a parquet file the texts of a row group begin."""
    column = file.metadata.row_group(group).column(0)
    return column.dictionary_page_offset or column.data_page_offset


def naive(texts, encoding):
    """The ten-line tokenizer that fineweb.py has to agree with, byte for byte."""
    tokens = []
    for text in texts:
        if text and text.strip():
            tokens.append(encoding.eot_token)
            tokens.extend(encoding.encode_ordinary(text))
    return np.array(tokens, dtype=np.uint16)


def make(source, local_dir, *flags, script="fineweb.py", encoding="bytes", shard_size=SHARD, **kwargs):
    return run_script(script, f"--source={source}", f"--local_dir={local_dir}", f"--shard_size={shard_size}",
                      f"--encoding={encoding}", *flags, **kwargs)


def shards_of(folder):
    return sorted(Path(folder).glob("*.npy"), key=lambda path: path.stem[-6:])


def tokens_of(folder):
    return np.concatenate([np.load(path, allow_pickle=False) for path in shards_of(folder)])


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in shards_of(folder)}


def assert_made(result):
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def assert_refused(result, *patterns):
    """One line on stderr that says all of `patterns`, exit code 1, no traceback."""
    assert result.returncode == 1, result.stderr
    assert result.stderr.startswith("fineweb.py: ") and result.stderr.count("\n") == 1, result.stderr
    for pattern in patterns:
        assert re.search(pattern, result.stderr), result.stderr


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
    """A run that finds no hub, begun early: the hub's client tries for half a minute before it gives up."""
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path_factory.mktemp("hf"))}
    process = subprocess.Popen([sys.executable, ROOT / "fineweb.py", "--encoding=bytes"], env=env, text=True,
                               cwd=tmp_path_factory.mktemp("offline"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


# ------------------------------------------------------------------------------------------------- the format
def test_shards_are_what_a_naive_tokenizer_makes(texts, whole, tmp_path):
    expected = naive(texts, fineweb.get_encoding("bytes"))
    shards = [np.load(path, allow_pickle=False) for path in shards_of(whole)]
    assert [path.name for path in shards_of(whole)] == [
        "edufineweb_val_000000.npy", *(f"edufineweb_train_{i:06d}.npy" for i in range(1, len(shards)))]
    assert all(shard.dtype == np.uint16 and shard.ndim == 1 for shard in shards)
    assert len(shards) > 5 and {len(shard) for shard in shards[:-1]} == {SHARD} and 0 < len(shards[-1]) <= SHARD
    np.testing.assert_array_equal(np.concatenate(shards), expected)
    np.save(tmp_path / "again.npy", shards[-1])
    assert (tmp_path / "again.npy").read_bytes() == shards_of(whole)[-1].read_bytes()
    assert sorted(path.name for path in whole.iterdir() if path.suffix != ".npy") == [".lock", "manifest.json"]


@pytest.mark.parametrize("nprocs", [1, 3])
def test_number_of_workers_changes_no_byte(corpus, whole, tmp_path, nprocs):
    assert_made(make(corpus, tmp_path, f"--nprocs={nprocs}"))
    assert digests(tmp_path) == digests(whole)


def test_gpt2_tokens_of_a_slice_of_the_standin(gpt2_encoding, tmp_path):
    table = pq.read_table(shared("fineweb_standin") / "000_00000.parquet").slice(100, 300)
    texts = table["text"].to_pylist() + ODD
    write_parquet(tmp_path / "in/slice.parquet", texts, rows=64)
    assert_made(make(tmp_path / "in", tmp_path / "out", "--nprocs=2", encoding="gpt2", shard_size=100_000))
    np.testing.assert_array_equal(tokens_of(tmp_path / "out"), naive(texts, gpt2_encoding))
    assert np.load(tmp_path / "out/edufineweb_val_000000.npy")[0] == 50256


def test_summary_counts_documents_and_those_without_text(tmp_path):
    (tmp_path / "in").mkdir()
    lines = [{"text": "one"}, {"text": ""}, {"text": None}, {"id": 4}, {"text": " \n\t"}, {"text": "two \ud800 odd"}]
    (tmp_path / "in/x.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    write_parquet(tmp_path / "in/y.parquet", ["three", "", None, "  "])
    result = make(tmp_path / "in", tmp_path / "out")
    assert_made(result)
    assert "3 documents, " in result.stdout and "7 documents without text were left out" in result.stdout
    expected = naive(["one", "two \ufffd odd", "three"], fineweb.get_encoding("bytes"))
    np.testing.assert_array_equal(tokens_of(tmp_path / "out"), expected)
    size = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert f"{len(expected)} tokens in 1 shards, {size / 1e9:.3f} GB" in result.stdout
    assert re.search(r"[\d.]+ M tokens/s", result.stdout)


def test_parquet_strings_that_are_not_utf8(tmp_path):
    (tmp_path / "in").mkdir()
    bad = b"caf\xe9 \xed\xa0\x80"  # Latin-1, and a surrogate
    pq.write_table(pa.table({"text": pa.array([bad], pa.binary()).view(pa.string())}), tmp_path / "in/x.parquet")
    assert_made(make(tmp_path / "in", tmp_path / "out"))
    assert tokens_of(tmp_path / "out")[1:].astype(np.uint8).tobytes().decode() == bad.decode("utf-8", "replace")


@pytest.mark.parametrize("limit", [1, 1 << 40])
def test_reading_starts_at_any_batch_and_cuts_big_row_groups(corpus, texts, monkeypatch, limit):
    monkeypatch.setattr(fineweb, "MAX_GROUP_BYTES", limit)
    monkeypatch.setattr(fineweb, "BATCH_BYTES", 5000)
    urls = [*fineweb.find_files(str(corpus), "")]
    batches = [*fineweb.read_batches(urls, 0, 0)]
    starts = {0: 0, 1: 150, 2: 200, 3: 250}
    assert {batch.file for batch in batches} == {*starts} and len(batches) > 20
    for batch in batches:
        found = fineweb.read_texts(batch)
        first = starts[batch.file] + batch.row
        assert found == texts[first:first + len(found)]
    for i in (0, 1, 7, len(batches) // 2, len(batches) - 1):
        assert [*fineweb.read_batches(urls, batches[i].file, batches[i].row)] == batches[i:]


def test_only_a_bounded_number_of_batches_is_under_way(corpus):
    urls = [*fineweb.find_files(str(corpus), "")]
    taken = []
    batches = (taken.append(batch) or batch for batch in fineweb.read_batches(urls, 0, 0))
    for used, result in enumerate(fineweb.tokenize_all(batches, 1, fineweb.get_encoding("bytes")), start=1):
        assert len(taken) < used + fineweb.BATCHES_PER_WORKER
        assert result[:2] == (taken[used - 1].file, taken[used - 1].row)
    assert used == len(taken) > 10


# ------------------------------------------------------------------------------------------------- stops
def test_stopping_early_and_going_on(corpus, whole, tmp_path):
    for flags, n in (("--max_shards=1", 1), ("--max_shards=3", 3), ("--max_shards=2", 3)):
        result = make(corpus, tmp_path, flags, "--nprocs=1")
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


def test_finished_shards_are_not_read_again(tmp_path):
    for i in range(3):
        write_parquet(tmp_path / f"in/{i}.parquet", make_texts(100, seed=i))
    assert_made(make(tmp_path / "in", tmp_path / "once"))
    assert_made(make(tmp_path / "in", tmp_path / "out", "--max_shards=6"))
    end = json.loads((tmp_path / "out/manifest.json").read_text())["shards"][-1]
    assert end["file"] > 0
    first = tmp_path / "in/0.parquet"
    first.write_bytes(bytes(first.stat().st_size))  # as large as before, but nobody could read it
    assert_made(make(tmp_path / "in", tmp_path / "out"))
    assert digests(tmp_path / "out") == digests(tmp_path / "once")


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
    for steps in (1, 2, 3, 4, 8):  # of a shard's four: write the manifest, name it, write the shard, name it
        stood = {path: path.stat().st_ino for path in shards_of(out)}
        result = make(corpus, out, "--nprocs=1", script=script, env={"STEPS": str(steps)})
        assert result.returncode == -signal.SIGKILL
        assert digests(out).items() <= digests(whole).items()
        assert all(path.stat().st_ino == inode for path, inode in stood.items()), "a finished shard was made again"
    result = make(corpus, out, "--nprocs=2")
    assert_made(result)
    assert f"This run: {len(tokens_of(whole)) - SHARD:,} tokens" in result.stdout  # the last kill left one shard
    assert digests(out) == digests(whole)
    assert not [*out.glob("*.tmp")]


@pytest.fixture(scope="module")
def long_corpus(tmp_path_factory):
    """Enough documents for a few seconds of work."""
    folder = tmp_path_factory.mktemp("long")
    for i in range(4):
        write_parquet(folder / f"{i}.parquet", make_texts(100, seed=i) * 60, rows=100)
    return folder


def begin(source, out):
    """fineweb.py in a process group of its own, once it has made a shard and is in the midst of its work."""
    process = subprocess.Popen(
        [sys.executable, ROOT / "fineweb.py", f"--source={source}", f"--local_dir={out}", "--shard_size=500000",
         "--encoding=bytes", "--nprocs=2"],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    assert process.stdout.readline().startswith("edufineweb_val_000000.npy: 500,000 tokens")
    return process


def workers_of(process):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the workers in /proc")
def test_kill_9_leaves_no_worker_behind_and_workers_are_spawned(long_corpus, tmp_path):
    process = begin(long_corpus, tmp_path)
    assert_refused(make(long_corpus, tmp_path, shard_size=500_000), "Another fineweb.py is at work")
    workers = workers_of(process)
    assert len(workers) == 2
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)
    for path in shards_of(tmp_path):
        assert np.load(path).shape == (500_000,)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the workers in /proc")
def test_killed_worker_is_a_line_not_a_hang(long_corpus, tmp_path):
    process = begin(long_corpus, tmp_path)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    _, stderr = process.communicate(timeout=20)
    # Python's resource tracker may add a warning of its own, that semaphores were left to it
    assert process.returncode == 1
    assert stderr.startswith("fineweb.py: A worker process died") and "Traceback" not in stderr


@pytest.mark.parametrize("signal_number, everyone", [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_ctrl_c_and_sigterm_say_one_line(long_corpus, tmp_path, signal_number, everyone):
    process = begin(long_corpus, tmp_path)
    (os.killpg if everyone else os.kill)(process.pid, signal_number)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert stderr.strip() == "Stopped. The finished shards stand, the same command goes on after them."
    assert all(np.load(path).shape == (500_000,) for path in shards_of(tmp_path))


def test_bars_on_a_terminal_and_lines_in_a_log(corpus, tmp_path):
    fcntl, pty, termios = (pytest.importorskip(name, reason="needs a Unix terminal") for name in
                           ("fcntl", "pty", "termios"))
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, np.array([24, 100, 0, 0], np.uint16).tobytes())  # lines, columns, pixels
    process = subprocess.Popen(
        [sys.executable, ROOT / "fineweb.py", f"--source={corpus}", f"--local_dir={tmp_path}", f"--shard_size={SHARD}",
         "--encoding=bytes"], stdout=subprocess.PIPE, stderr=child, text=True)
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
    assert re.search(rb"all: .*tok/s", terminal) and re.search(rb"shard: +\d+%\|.*/50.0k", terminal)
    assert sum(line.startswith("edufineweb_") for line in lines) == len(shards_of(tmp_path))
    assert not any("|" in line or "\r" in line for line in lines)


# ------------------------------------------------------------------------------------------------- the hub
class Hub(http.server.BaseHTTPRequestHandler):
    """As much of huggingface.co as `datasets` asks for, over the files in `Hub.files`; `log` keeps what was asked."""
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

    def answer_file(self, name):
        if name not in self.files:
            return self.answer(b"", 404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
        data, headers = self.files[name], {"ETag": f'"{self.entry(name)["oid"]}"', "X_Repo_Commit": self.revision}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            start, end = int(asked[1]), int(asked[2]) + 1
            return self.answer(data[start:end], 206, Content_Range=f"bytes {start}-{end - 1}/{len(data)}", **headers)
        return self.answer(data, **headers)

    def entry(self, name):
        data = self.files[name]
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def answer_tree(self, folder, recursive):
        prefix, entries = folder and folder + "/", {}
        for name in sorted(name for name in self.files if name.startswith(prefix)):
            child = prefix + name[len(prefix):].split("/")[0]
            if name == child or recursive:
                entries[name] = self.entry(name)
            if name != child:
                entries[child] = {"type": "directory", "path": child, "size": 0, "oid": "b" * 40}
        self.answer(json.dumps(list(entries.values())).encode(), 200 if entries else 404)

    def do_GET(self):
        address = urllib.parse.urlparse(self.path)
        path = urllib.parse.unquote(address.path)
        self.log.append((self.command, path, self.headers.get("Range")))
        if asked := re.fullmatch(rf"/datasets/{DATASET}/resolve/\w+/(.*)", path):
            self.answer_file(asked[1])
        elif asked := re.fullmatch(rf"/api/datasets/{DATASET}/tree/\w+/?(.*)", path):
            self.answer_tree(asked[1], "recursive=true" in address.query.lower())
        elif re.fullmatch(rf"/api/datasets/{DATASET}(/revision/\w+)?", path):
            self.answer(json.dumps({"_id": "1", "id": DATASET, "sha": self.revision, "private": False, "tags": [],
                                    "downloads": 0, "likes": 0, "siblings": []}).encode())
        else:
            self.answer(b"", 404, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")

    do_HEAD = do_GET

    def do_POST(self):  # paths-info: what is known of these paths
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.log.append((self.command, self.path, None))
        paths = json.loads(asked)["paths"] if asked.startswith("{") else urllib.parse.parse_qs(asked)["paths"]
        self.answer(json.dumps([self.entry(path) for path in paths if path in self.files]).encode())


@pytest.fixture(scope="module")
def hub(texts, tmp_path_factory):
    """Environment that sends the hub's clients to a stand-in on loopback, with the dataset's real names."""
    folder = tmp_path_factory.mktemp("hub")
    for i, part in enumerate((texts[:200], texts[200:])):
        write_parquet(folder / f"sample/10BT/{i:03d}_00000.parquet", part)
    write_parquet(folder / "data/CC-MAIN-2013-20/train-00000.parquet", ["another configuration"])
    (folder / "README.md").write_text("""---
configs:
- config_name: default
  data_files: [{split: train, path: data/*/*}]
- config_name: sample-10BT
  data_files: [{split: train, path: sample/10BT/*}]
---
""")
    Hub.files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path_factory.mktemp("hf"))}
    server.shutdown()


def test_hub_dataset_streams_to_the_same_tokens(hub, whole, tmp_path):
    result = run_script("fineweb.py", "--encoding=bytes", f"--shard_size={SHARD}", "--max_shards=2", "--nprocs=2",
                        cwd=tmp_path, env=hub)
    assert_made(result)
    out = tmp_path / "edu_fineweb10B"
    assert len(shards_of(out)) == 2
    Hub.log.clear()
    Hub.revision = "c" * 40  # a commit that touches none of these files, between the two runs
    assert_made(make(DATASET, out, "--nprocs=3", env=hub))
    assert digests(out) == digests(whole)
    cached = sum(path.stat().st_size for path in Path(hub["HF_HOME"]).rglob("*") if path.is_file())
    assert cached < 20_000, "the corpus was copied to the disk"
    end = json.loads((out / "manifest.json").read_text())["shards"][1]
    first = f"/datasets/{DATASET}/resolve/{Hub.revision}/sample/10BT/000_00000.parquet"
    groups = [(int(asked.split("=")[1].split("-")[0])) for _, path, asked in Hub.log if path == first and asked]
    file = pq.ParquetFile(pa.BufferReader(Hub.files["sample/10BT/000_00000.parquet"]))
    skipped = [text_offset(file, group) for group in range(end["row"] // 20)]
    assert end["row"] >= 40 and not set(groups) & set(skipped), "what finished shards hold was downloaded again"


def test_hub_names_that_do_not_exist(hub, tmp_path):
    assert_refused(make("nobody/nothing", tmp_path, env=hub), "source=nobody/nothing", "doesn't exist on the Hub")
    result = make(DATASET, tmp_path, "--remote_name=sample-10B", env=hub)
    assert_refused(result, "remote_name=sample-10B ", "Available: .*'sample-10BT'")


def test_hub_file_gone_in_the_midst(hub, tmp_path, monkeypatch):
    answer_file = Hub.answer_file
    monkeypatch.setattr(Hub, "answer_file", lambda self, name: answer_file(self, "none" if "001_" in name else name))
    assert_refused(make(DATASET, tmp_path, env=hub), "10BT/001_00000.parquet can't be read from row 1 on", "goes on")


def test_no_network(without_network):
    stdout, stderr = without_network.communicate(timeout=60)
    result = subprocess.CompletedProcess([], without_network.returncode, stdout, stderr)
    assert_refused(result, "can't be had from http://127.0.0.1:9", DATASET, "HF_ENDPOINT=https://hf-mirror.com")
    assert "Asking http://127.0.0.1:9" in stdout


# ------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize("flag, says", [
    ("--shard_siz=5", "unrecognized arguments: --shard_siz"), ("--shard_size=1e8", "invalid int value: '1e8'"),
    ("--shard_size=1000", "shard_size=1000 .*1025"), ("--nprocs=-1", "nprocs=-1"),
    ("--encoding=gpt3", "--encoding: invalid choice: 'gpt3'"), ("--source=/no/where", "source=/no/where is no folder"),
    ("--source={tmp}", "holds no .parquet, .jsonl, .jsonl.gz files"),
    ("--local_dir={tmp}/file", "local_dir=.*file can't be written")])
def test_bad_constants(tmp_path, flag, says):
    (tmp_path / "file").write_text("")
    assert_refused(run_script("fineweb.py", flag.format(tmp=tmp_path), cwd=tmp_path), says)


def damaged_parquet(folder):
    write_parquet(folder / "x.parquet", make_texts(100, seed=0))
    data = bytearray((folder / "x.parquet").read_bytes())
    start = text_offset(pq.ParquetFile(folder / "x.parquet"), 2)
    data[start + 100:start + 200] = bytes(100)
    (folder / "x.parquet").write_bytes(data)


def cut_parquet(folder):
    write_parquet(folder / "x.parquet", make_texts(100, seed=0))
    (folder / "x.parquet").write_bytes((folder / "x.parquet").read_bytes()[:3000])


def cut_gzip(folder):
    write_lines(folder / "x.jsonl.gz", make_texts(100, seed=0))
    (folder / "x.jsonl.gz").write_bytes((folder / "x.jsonl.gz").read_bytes()[:3000])


def table(**columns):
    return lambda folder: pq.write_table(pa.table(columns), folder / "x.parquet")


def lines(data):
    return lambda folder: (folder / "x.jsonl").write_bytes(data)


@pytest.mark.parametrize("spoil, says", [
    (damaged_parquet, "x.parquet can't be read from row 41 on"),
    (cut_parquet, "x.parquet can't be read from row 1 on"),
    (cut_gzip, r"x.jsonl.gz can't be read from row 1 on \(EOFError"),
    (table(content=["a"]), "can't be read from row 1 on .*text"),
    (table(text=[1]), "can't be read from row 1 on .*int64"),
    (lines(b'{"text": "a"}\n\n{"text": "b\n'), "x.jsonl can't be read from row 3 on .*JSONDecodeError"),
    (lines(b'{"text": "\xff"}\n'), "x.jsonl can't be read from row 1 on .*UnicodeDecodeError"),
    (lines(b'{"text": ["b"]}\n'), "x.jsonl can't be read from row 1 on .*'text' is not a string"),
    (lines(b'{"content": "b"}\n'), "no document with a 'text'")])
def test_damaged_documents_are_named(tmp_path, spoil, says):
    (tmp_path / "in").mkdir()
    spoil(tmp_path / "in")
    assert_refused(make(tmp_path / "in", tmp_path / "out", "--nprocs=1"), says)
    assert not shards_of(tmp_path / "out")


def test_other_settings_are_refused_with_the_difference(corpus, whole):
    before = digests(whole)
    assert_refused(make(corpus, whole, shard_size=SHARD + 1), f"shard_size {SHARD}, not {SHARD + 1}")
    assert_refused(make(corpus, whole, encoding="gpt2"), "encoding bytes, not gpt2")
    assert digests(whole) == before


def test_a_corpus_that_changed_is_refused(tmp_path):
    write_parquet(tmp_path / "in/a.parquet", ["one"])
    assert_made(make(tmp_path / "in", tmp_path / "out"))
    write_parquet(tmp_path / "in/b.parquet", ["two"])
    assert_refused(make(tmp_path / "in", tmp_path / "out"), r"file 1 unknown, not b.parquet, \d+ bytes")


def test_foreign_shards_are_refused(corpus, tmp_path):
    np.save(tmp_path / "edufineweb_train_000001.npy", np.zeros(10, np.uint16))
    assert_refused(make(corpus, tmp_path), f"source unknown, not {corpus}", "another --local_dir")


def test_disk_full_leaves_only_whole_shards(corpus, whole, tmp_path):
    pytest.importorskip("resource", reason="plays a full disk with setrlimit")
    script = tmp_path / "small_disk.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport fineweb\nif __name__ == '__main__':\n"
                      f"    import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2 * {SHARD}, 2 * {SHARD}))\n"
                      f"    fineweb.main()\n")  # a file may have all of its tokens, but not the header as well
    result = make(corpus, tmp_path / "out", script=script)
    assert_refused(result, "out can't be written .*File too large", "make room")
    assert not shards_of(tmp_path / "out")
    assert_made(make(corpus, tmp_path / "out"))
    assert digests(tmp_path / "out") == digests(whole)


def test_vocabulary_out_of_reach(corpus, tmp_path):
    nowhere = "http://127.0.0.1:9"
    env = {"TIKTOKEN_CACHE_DIR": str(tmp_path), "HTTPS_PROXY": nowhere, "https_proxy": nowhere}
    assert_refused(make(corpus, tmp_path / "out", encoding="gpt2", env=env), "encoding=gpt2", "TIKTOKEN_CACHE_DIR")


def test_help_lists_every_constant_with_its_default():
    out = run_script("fineweb.py", "--help").stdout
    for name, value in vars(fineweb.Config()).items():
        assert re.search(rf"--{name} X(?s:.)*\[{re.escape(str(value))}\]", out), name
