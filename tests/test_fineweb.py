"""Tests of fineweb.py: its shards, stopping and continuing, bad input, and the shared helpers."""
import contextlib
import dataclasses
import errno
import gzip
import hashlib
import http.server
import io
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import urllib.parse
from functools import partial
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import FORKS, Forked, shared, start_forkserver, until

import fineweb
from fineweb import UserError, encode, get_encoding

ROOT = Path(fineweb.__file__).resolve().parent
SHARD = 50_000  # tokens
BYTES = get_encoding("bytes")
DATASET = "HuggingFaceFW/fineweb-edu"
ODD = ["<|endoftext|>", "a <|endoftext|> b <|fim_prefix|>", "\x00\x01\r\n\r", " " * 5000, "no end",
       "\u200b\u202e\ufeff z\u0351\u0313algo \u2028 \U0010ffff", "a" * 5000, "👩‍👩‍👧 中文",
       "no UTF-8 in parquet, half an emoji in JSON: \udce9.", "", None, "\n"]
STOPPED = "\nStopped. Repeat the command to resume after the last finished shard.\n"

def make_texts(n, seed):
    """Return n texts of 1 to 400 random words."""
    rng = random.Random(seed)
    words = "model token loss gradient Straße naïve 数据 🙂 the of and to in 3.14 x_i".split()
    return [" ".join(rng.choices(words, k=rng.randint(1, 400))) for _ in range(n)]

TEXTS = make_texts(400, seed=1) + ODD
TEXTS[220:220] = ODD

def parquet(rows=20, **columns):
    """Return the content of a parquet file with `rows` rows per row group."""
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, row_group_size=rows)
    return file.getvalue()

def parquet_of(texts):
    """Return a parquet file with these texts. A lone surrogate becomes a byte that is not UTF-8."""
    texts = pa.array([text and text.encode(errors="surrogateescape") for text in texts])
    return parquet(text=texts.view(pa.string()), id=range(len(texts)))

def jsonl(texts):
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()

def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path

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
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in shards_of(folder)}

def flags(source, folder, **changes):
    """Return the command line for small shards of bytes."""
    constants = dict(source=source, local_dir=folder, shard_size=SHARD, threads=2,
                     encoding="bytes") | changes
    return [f"--{name}={value}" for name, value in constants.items()]

@contextlib.contextmanager
def start(*args, env=(), preexec_fn=None, **changes):
    """Start fineweb.py as a user does; return the Popen. Kill it at the end."""
    with subprocess.Popen(
            [sys.executable, str(ROOT / "fineweb.py"), *flags(*args, **changes)], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=preexec_fn,
            env=os.environ | {"PYTHONUNBUFFERED": ""} | dict(env)) as process:
        try:
            yield process
        finally:
            process.kill()

def finish(*args, **changes):
    """Run fineweb.py as a user does; return (exit status, stdout, stderr)."""
    with start(*args, **changes) as process:
        out, err = process.communicate(timeout=180)
    return process.returncode, out, err

class ForkedMain(Forked):
    """A run of fineweb.py in a forked process, which starts faster."""
    def __init__(self, *args, env=(), **changes):
        self.path = f"{Forked.outputs}/{next(Forked.numbers)}"
        self.process = FORKS.Process(
            target=run_main, args=(self.path, flags(*args, **changes), dict(env)))
        start_forkserver()
        self.process.start()

def run_main(path, words, env):
    """Do in the forked process what `python fineweb.py <words>` does."""
    for number, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{path}.{end}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(env)
    sys.argv = ["fineweb.py", *map(str, words)]
    # These packages read HF_ENDPOINT and the like when they are imported
    for name in [name for name in sys.modules if re.match("(huggingface_hub|datasets)\\b", name)]:
        del sys.modules[name]
    import datasets
    datasets.config.STREAMING_READ_RETRY_INTERVAL = 0  # seconds
    sys.exit(fineweb.main())

def run(*args, **changes):
    """Let a forked process run fineweb.py; return (exit status, stdout, stderr)."""
    process = ForkedMain(*args, **changes)
    return process.wait(), process.out, process.err

@pytest.fixture
def make(capsys):
    """Return a function that makes shards in this process and returns what was printed."""
    def make(source, local_dir, **changes):
        cfg = dict(source=str(source), local_dir=str(local_dir), shard_size=SHARD, threads=2,
                   encoding="bytes") | changes
        fineweb.make_shards(fineweb.Config(**cfg))
        return capsys.readouterr().out
    return make

def refused(match):
    """Expect a UserError of one line that matches."""
    return pytest.raises(UserError, match=rf"\A(?=[^\n]+\Z).*{match}")

@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Return a folder with all kinds of files, which hold TEXTS in reading order."""
    folder = tmp_path_factory.mktemp("corpus")
    write(folder / "a.parquet", parquet_of(TEXTS[:150]))
    write(folder / "b.jsonl", jsonl(TEXTS[150:200]))
    write(folder / "c.jsonl.gz", gzip.compress(jsonl(TEXTS[200:250])))
    write(folder / "deeper.parquet/d[1].parquet", parquet_of(TEXTS[250:]))
    return folder

@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """Return a folder with the shards of `corpus`, made without a stop on an ASCII terminal."""
    folder = tmp_path_factory.mktemp("données à moi")
    status, out, err = finish(corpus, folder, env={"PYTHONIOENCODING": "ascii"})
    assert (status, err) == (0, "") and "donn\\xe9es" in out
    return folder

# ------------------------------------------------------------------------------------- shards
def test_shards_equal_those_of_a_naive_tokenizer(whole):
    """Tokens, types, lengths, names and the documents in the manifest are as documented."""
    shards = [np.load(path, allow_pickle=False) for path in shards_of(whole)]
    assert all(shard.dtype == np.uint16 and shard.ndim == 1 for shard in shards)
    assert len(shards) > 5 and {len(shard) for shard in shards[:-1]} == {SHARD}
    np.testing.assert_array_equal(np.concatenate(shards), naive(TEXTS, BYTES))
    manifest = json.loads((whole / "manifest.json").read_text())
    assert [entry["documents"] for entry in manifest["shards"]] == [sum(s == 256) for s in shards]
    names = {f"edufineweb_train_{i:06d}.npy" for i in range(1, len(shards))}
    names |= {"edufineweb_val_000000.npy", ".lock", "manifest.json"}
    assert {path.name for path in whole.iterdir()} == names

@pytest.mark.parametrize("threads", [1, 5, 0])
def test_shards_do_not_depend_on_the_number_of_threads(corpus, whole, tmp_path, make, threads):
    """They are byte-identical."""
    make(corpus, tmp_path, threads=threads)
    assert digests(tmp_path) == digests(whole)

def test_each_thread_has_an_encoding_of_its_own(monkeypatch):
    """Threads that share one are slower."""
    names, both = set(), threading.Barrier(2)
    def get(name, thread):
        names.add(thread)
        both.wait(60)  # for the other thread
        return get_encoding(name, thread)
    monkeypatch.setattr(fineweb, "get_encoding", get)
    jobs = fineweb.tokenize_all(((0, 0, ["text"]) for _ in range(8)), "bytes", threads=2)
    assert [job.result().tolist() for *_, job in jobs] == [[256, *b"text"]] * 8
    assert len(names) == 2
    assert get_encoding("bytes", 1) is get_encoding("bytes", 1) is not get_encoding("bytes", 2)

def test_gpt2_tokens_of_real_documents(gpt2_encoding, tmp_path, make):
    """With GPT-2's encoding, too, the shards equal those of a naive tokenizer."""
    table = pq.read_table(shared("fineweb_standin") / "000_00000.parquet").slice(100, 300)
    texts = table["text"].to_pylist() + ODD
    write(tmp_path / "in/slice.parquet", parquet_of(texts))
    make(tmp_path / "in", tmp_path / "out", encoding="gpt2")
    np.testing.assert_array_equal(tokens_of(tmp_path / "out"), naive(texts, gpt2_encoding))

def test_an_encoding_with_more_than_65536_ids_is_stored_as_uint32(tmp_path, make, monkeypatch):
    """Its highest ids, the special tokens, are stored exactly."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared("tiktoken_cache")))
    write(tmp_path / "in/a.parquet", parquet_of(TEXTS))
    make(tmp_path / "in", tmp_path / "out", encoding="cl100k_base", shard_size=20_000)
    tokens = tokens_of(tmp_path / "out")
    assert tokens.dtype == np.uint32 and tokens[0] == 100257
    np.testing.assert_array_equal(tokens, naive(TEXTS, get_encoding("cl100k_base")))

# ------------------------------------------------------------------- stopping and continuing
def test_a_later_run_adds_shards(corpus, whole, tmp_path, make):
    """It continues anywhere in each kind of file, keeps finished shards, and prints the totals."""
    out = tmp_path / "out"
    for max_shards, n in ((2, 2), (3, 3), (2, 3), (4, 4), (5, 5), (6, 6)):
        assert f"in {n} shards" in make(corpus, out, max_shards=max_shards)
        assert len(shards_of(out)) == n
    (tmp_path / "moved").symlink_to(corpus)
    tokens = tokens_of(whole)
    printed = make(tmp_path / "moved", out, threads=1)
    assert f"{sum(tokens == 256):,} documents, {len(tokens):,} tokens in" in printed
    shards_of(out)[4].unlink()
    make(corpus, out)
    make(corpus, out)  # the corpus is finished, and nothing is added
    assert digests(out) == digests(whole)

def test_killed_at_random_moments(corpus, tmp_path, make):
    """Runs that are killed and repeated make the same shards as one that is not."""
    make(corpus, tmp_path / "once", shard_size=5000)
    out, rng = tmp_path / "out", random.Random(1)
    for _ in range(3):
        wanted = len(shards_of(out)) + rng.randint(1, 9)
        forked = ForkedMain(corpus, out, shard_size=5000)
        until(lambda: len(shards_of(out)) >= wanted or forked.process.exitcode is not None)
        forked.process.kill()
        forked.wait()
    make(corpus, out, shard_size=5000)
    assert digests(out) == digests(tmp_path / "once") and not list(out.glob("*.part"))

@pytest.mark.parametrize("number, status, says", [(signal.SIGINT, 130, STOPPED),
                                                  (signal.SIGTERM, -signal.SIGTERM, "")])
def test_signals_end_the_script_at_once(tmp_path, make, number, status, says):
    """Until then, no other run can use the folder, and output is not held back."""
    write(tmp_path / "in/0.parquet", parquet_of(make_texts(100, seed=0) * 60))
    for i in range(1, 80):
        (tmp_path / f"in/{i}.parquet").symlink_to("0.parquet")
    out = tmp_path / "out"
    with start(tmp_path / "in", out) as process:
        assert process.stdout.readline().startswith("edufineweb_val_000000.npy: 50,000 tokens, ")
        with refused("Another run uses .*/out/.*local_dir"):
            make(tmp_path / "in", out)
        process.send_signal(number)
        assert (process.communicate(timeout=60)[1], process.returncode) == (says, status)
    assert {len(np.load(path)) for path in shards_of(out)} == {SHARD}

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
        write(source / f"{i}.jsonl", jsonl(make_texts(50, seed=i)))
    make(source, out, max_shards=2)
    with refused("shard_size was 50000 and is 5000; encoding was bytes and is gpt2.*another"):
        make(source, out, shard_size=5000, encoding="gpt2")
    write(source / "2.jsonl", jsonl(make_texts(60, seed=5)))  # no shard contains it yet
    make(source, out)
    write(source / "3.jsonl", jsonl(["after a shorter last shard"]))
    with refused(r"\(file 3 was absent and is 3.jsonl, \d+ bytes\): undo this"):
        make(source, out)

def test_training_shards_without_a_manifest_are_kept(corpus, tmp_path, make):
    """They were made by another script."""
    (tmp_path / "edufineweb_train_000001.npy").touch()
    with refused("shard_size was absent and is 50000; encoding.* another --local_dir"):
        make(corpus, tmp_path)

# ------------------------------------------------------------------------------ odd and bad input
def test_lines_of_other_programs(tmp_path, make):
    """A BOM, CRLF, blank lines and other keys are accepted. Invalid UTF-8 becomes U+FFFD."""
    lines = [b'\xef\xbb\xbf{"text": "a\xe2\x80\xa8b", "x": 1}', b"", b"  ",
             b'{"y": 2, "text": "c"}', b'{"text": null}', b'{"text": "d \xff \\ud83d"}',
             b'{"text": " "}', b'{"text": "e"}']
    write(tmp_path / "in/a.jsonl", b"\r\n".join(lines * 400))
    write(tmp_path / "in/b.jsonl", b"")
    write(tmp_path / "in/c.parquet", parquet(text=pa.nulls(3)))
    make(tmp_path / "in", tmp_path / "out", shard_size=2000)
    texts = ["a\u2028b", "c", "d \ufffd \ufffd", "e"] * 400
    np.testing.assert_array_equal(tokens_of(tmp_path / "out"), naive(texts, BYTES))

def test_hidden_files_and_other_endings_are_not_read(tmp_path, make):
    """This also holds for hidden folders and for files with other endings."""
    source = tmp_path / ".cache/in"  # hidden folders above the source do not matter
    for name in ("a.jsonl", ".b.jsonl", "._c.jsonl", ".ipynb_checkpoints/a-checkpoint.jsonl"):
        write(source / name, jsonl(make_texts(60, seed=1)))
    for name in ("d.JSONL", "notes.txt"):
        write(source / name, b"?")
    make(source, tmp_path / "out")
    tokens = naive(make_texts(60, seed=1), BYTES)
    np.testing.assert_array_equal(tokens_of(tmp_path / "out"), tokens)

def test_linked_folders_are_read_once(tmp_path, make):
    """Folders are read in the order of their real paths, and loops end."""
    source, other, texts = tmp_path / "in[1]", tmp_path / "other", make_texts(4, seed=0)
    for path, text in zip((source / "c/1.jsonl", source / "d/2.jsonl", other / "3.jsonl",
                           other / "x/4.jsonl"), texts, strict=True):
        write(path, jsonl([text]))
    (source / "b").mkdir()
    for link, target in (("a", other), ("b/c", source / "d"), ("d/up", source), ("z", other / "x"),
                         ("b/self", source / "b"), ("gone", tmp_path / "nothing"), (".e", other)):
        (source / link).symlink_to(target)
    make(source, tmp_path / "out", shard_size=1025)
    np.testing.assert_array_equal(tokens_of(tmp_path / "out"), naive(texts, BYTES))

def test_a_local_folder_needs_no_cache(corpus, whole, tmp_path):
    """HF_HOME may be a folder that cannot be made, as with HOME=/ in a container."""
    write(tmp_path / "file", b"")
    status, out, err = run(corpus, tmp_path / "out", env={"HF_HOME": str(tmp_path / "file/hf")})
    assert (status, err) == (0, "") and digests(tmp_path / "out") == digests(whole)

LINES = jsonl(["a"] * 70)

@pytest.mark.parametrize("name, data, says", [
    ("x.parquet", parquet(text=["a"])[:-9], "document 1 on"),
    ("x.parquet", parquet(content=["a"], id=[1]), "document 1 on .*text.*content.*id"),
    ("x.parquet", parquet(text=[1]), "document 1 on .*int64"),
    ("x.parquet", parquet(text=[["a"]]), "document 1 on .*list"),
    ("x.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], "document 1 on .*EOFError"),
    ("x.jsonl", LINES + b'\n{"text": "b\n', "document 72 on .*JSONDecodeError"),
    ("x.jsonl", LINES + b'{"content": "b", "id": 1}\n', "document 71 on .*KeyError: 'text'"),
    ("x.jsonl", LINES + b'{"text": 1.5}\n', "document 71 on .*Error"),
    ("x.jsonl", LINES + b'["text"]\n', "document 71 on .*Error"),
    ("x.jsonl", LINES + b"7\n", "document 71 on .*Error")])
def test_a_bad_file_is_one_line(tmp_path, make, name, data, says):
    """The message names the file and the row, and what is wrong with it."""
    write(tmp_path / name, data)
    with refused(f"{name} cannot be read from {says}"):
        make(tmp_path, tmp_path / "out")

def test_a_text_that_tiktoken_refuses_is_tokenized(gpt2_encoding, tmp_path, make):
    """The documents beside it keep their tokens."""
    texts = ["before", " " * 999_999 + "x", "after"]
    write(tmp_path / "in/a.jsonl", jsonl(texts))
    make(tmp_path / "in", tmp_path / "out", encoding="gpt2", shard_size=500_000)
    tokens = tokens_of(tmp_path / "out").tolist()
    assert gpt2_encoding.decode(tokens) == "".join("<|endoftext|>" + text for text in texts)
    assert tokens[-2:] == [50256, *gpt2_encoding.encode_ordinary("after")]

def test_a_corpus_of_one_shard_is_refused(tmp_path, make):
    """The same folder can be used with a smaller --shard_size, as the message says."""
    write(tmp_path / "in/a.jsonl", jsonl(["a" * 400] * 8))
    with refused("3,208 tokens.*nothing to train on.*smaller --shard_size"):
        make(tmp_path / "in", tmp_path / "out")
    make(tmp_path / "in", tmp_path / "out", shard_size=1100)
    assert len(tokens_of(tmp_path / "out")) == 3208
    with refused(r" 0 tokens.*Use more text in .parquet, .jsonl"):
        make(ROOT / "tests", tmp_path / "none")

@pytest.mark.parametrize("change, says", [
    ({"shard_siz": 5}, "unrecognized arguments: --shard_siz"), ({"shard_size": 99}, "=99, .*1025"),
    ({"threads": "-1"}, "threads=-1: they must be"), ({"threads": "x"}, "threads.*'x'.*--help"),
    ({"encoding": "gpt3"}, "encoding=gpt3 cannot be loaded .*gpt2, .*cl100k_base"),
    ({"local_dir": ""}, "local_dir= cannot be used"),
    ({"local_dir": __file__}, "local_dir=.* cannot be used .*exists")])
def test_a_bad_flag_is_one_line(corpus, tmp_path, change, says):
    """The message names the flag and says what its value must be."""
    status, out, err = run(corpus, tmp_path / "out", **change)
    assert status == 1 and re.fullmatch(rf"fineweb\.py: .*{says}.*\n", err), err

def test_a_full_disk_leaves_only_whole_shards(corpus, whole, tmp_path, make):
    """The script says so in one line, and later the same command continues."""
    resource = pytest.importorskip("resource", reason="needs setrlimit")
    make(corpus, tmp_path, max_shards=2)
    status, out, err = finish(corpus, tmp_path, preexec_fn=lambda: resource.setrlimit(
        resource.RLIMIT_FSIZE, [2 * SHARD] * 2))  # too little for the header
    assert status == 1 and re.fullmatch(r"fineweb\.py: local_dir=.* cannot be written .*\n", err)
    assert len(shards_of(tmp_path)) == 2 and not list(tmp_path.glob("*.part"))
    make(corpus, tmp_path)
    assert digests(tmp_path) == digests(whole)

def test_paths_are_expanded_and_can_be_pasted(corpus, tmp_path, monkeypatch, make):
    """~ is the home folder, and the printed command is valid in a shell."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "in").symlink_to(corpus)
    printed = make("~/in", "~/my $hards", encoding="bytes")
    command = shlex.split(printed.splitlines()[-1].partition(": ")[2])
    data = f"--data={tmp_path}/my $hards"
    assert command == ["python", "train_gpt2.py", data, "--encoding=bytes"]
    assert len(shards_of(tmp_path / "my $hards")) > 5

def test_main_runs_in_a_notebook(corpus, tmp_path, monkeypatch):
    """There, stdout has no reconfigure()."""
    monkeypatch.setattr(signal, "signal", Mock())
    monkeypatch.setattr("logging.disable", Mock())
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.delattr(sys.stdout, "reconfigure", raising=False)
    words = flags(corpus, tmp_path, max_shards=2)
    assert fineweb.main(words) is None and "2 shards" in sys.stdout.getvalue()

def close_stdout_pipe():
    """Let stdout be a pipe that nobody reads any more, as after `| head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)

@pytest.mark.parametrize("close", [
    close_stdout_pipe, partial(os.close, 1), partial(os.close, 2), partial(os.closerange, 0, 3)])
def test_closed_streams_do_not_stop_the_work(corpus, whole, tmp_path, close):
    """Nothing is said about the disk."""
    status, out, err = finish(corpus, tmp_path, preexec_fn=close)
    assert (status, err) == (0, "") and digests(tmp_path) == digests(whole)

@pytest.mark.parametrize("usable, asked, used", [(2, 0, 2), (96, 0, 16), (2, 40, 40)])
def test_threads_for_the_cores_that_may_be_used(corpus, tmp_path, make, monkeypatch, usable, asked,
                                                used):
    """By default, at most 16, because more do not help."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(usable)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    add = Mock(return_value=[{"tokens": 1, "documents": 1}] * 2)
    monkeypatch.setattr(fineweb, "add_shards", add)
    make(corpus, tmp_path, threads=asked)
    assert add.call_args.args[0].threads == used

# --------------------------------------------------------------------------------- a local hub
class HubRequest(http.server.BaseHTTPRequestHandler):
    """Answer like huggingface.co, as far as `datasets` needs it.

    The server has files: {path: bytes}; spans: the Range header of each request; and fail: a
    function of (path, Range header or None) that returns an HTTP status, or None.
    """
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path, span = urllib.parse.unquote(self.path.partition("?")[0]), self.headers.get("Range")
        if status := self.server.fail(path, span):
            return self.answer(b"", status)
        asked = re.fullmatch(
            rf"/(?:api/)?datasets/{DATASET}(?:/(resolve|tree|revision)/[^/]+/?(.*))?", path)
        if not asked:
            return self.answer(b"", 404, X_Error_Code="RepoNotFound")
        kind, name = asked.groups()
        if kind == "resolve":
            return self.answer_file(name, span)
        if kind == "tree":
            recursive = "recursive=true" in self.path.lower()
            return self.answer_tree(f"{name}/" if name else "", recursive)
        self.answer({"_id": "1", "id": DATASET, "sha": "a" * 40, "private": False, "tags": [],
                     "downloads": 0, "likes": 0, "siblings": []})

    do_HEAD = do_GET

    def do_POST(self):
        """Answer a paths-info request."""
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        form = json.loads(text) if text.startswith("{") else urllib.parse.parse_qs(text)
        self.answer([self.entry(name) for name in form["paths"] if name in self.server.files])

    def answer(self, content, status=200, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**headers, "Content_Length": len(body)}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.close_connection = self.server.cut(status)
            self.wfile.write(body[:len(body) // 2] if self.close_connection else body)

    def entry(self, name):
        content = self.server.files[name]
        return {"type": "file", "path": name, "size": len(content),
                "oid": hashlib.sha1(content).hexdigest()}

    def answer_tree(self, prefix, recursive):
        entries = {}
        for name in sorted(self.server.files):
            child = prefix + name.removeprefix(prefix).split("/")[0]
            if name.startswith(prefix) and (recursive or name == child):
                entries[name] = self.entry(name)
            if name.startswith(prefix) and name != child:
                entries[child] = {"type": "directory", "path": child, "size": 0, "oid": "b" * 40}
        self.answer(list(entries.values()), 200 if entries else 404)

    def answer_file(self, name, span):
        if name not in self.server.files:
            return self.answer(b"", 404, X_Error_Code="EntryNotFound")
        content = self.server.files[name]
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Accept_Ranges": "bytes",
                   "X_Repo_Commit": "a" * 40}
        if not span:
            return self.answer(content, **headers)
        first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", span).groups()
        part = content[int(first):int(last) + 1 if last else None]
        place = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        self.answer(part, 206, Content_Range=place, **headers)

    def log_message(self, *args):
        pass

@pytest.fixture
def hub(corpus, tmp_path_factory):
    """Start a hub that has `corpus` as FineWeb-Edu's sample-10BT."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), HubRequest) as server:
        server.daemon_threads = True
        server.handle_error = lambda *args: None
        server.fail, server.cut = lambda path, span: None, lambda status: False
        server.files = {f"sample/10BT/{path.relative_to(corpus)}": path.read_bytes()
                        for path in corpus.rglob("*.*") if path.is_file()}
        server.files["README.md"] = (
            b"---\nconfigs: [{config_name: default, data_files: data/**}, "
            b"{config_name: sample-10BT, data_files: sample/10BT/**}]\n---")
        server.files["data/CC-MAIN-2013-20/1.jsonl"] = b"another"
        server.env = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "NO_PROXY": "*",
                      "HF_HOME": str(tmp_path_factory.mktemp("hf")), "HF_HUB_OFFLINE": "0"}
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()

@pytest.mark.parametrize("trouble", [None, 429, "cut"])
def test_a_dataset_on_the_hub_gives_the_same_shards(hub, whole, tmp_path, trouble):
    """It is not stored. Requests that fail are repeated, also while a run continues."""
    fails_now = iter([False, True])  # the second request for a part of a file fails
    if trouble == "cut":
        hub.cut = lambda status: status == 206 and next(fails_now, False)
    elif trouble:
        hub.fail = lambda path, span: trouble if span and next(fails_now, False) else None
    for max_shards in (2, 0):
        status, out, err = run(DATASET, tmp_path, env=hub.env, max_shards=max_shards)
        assert (status, err) == (0, "")
    assert digests(tmp_path) == digests(whole) and (not trouble or next(fails_now, None) is None)
    cached = [path.stat().st_size for path in Path(hub.env["HF_HOME"]).rglob("*") if path.is_file()]
    assert sum(cached) < 20_000, "the corpus was copied to the disk"

def test_an_unreachable_hub_or_file_is_one_line(hub, tmp_path):
    """The message names the dataset or the file, and the remedy."""
    for source, env in (("nobody/nothing", {}), (DATASET, {"HF_HUB_OFFLINE": "1"})):
        status, out, err = run(source, tmp_path / "out", env=hub.env | env)
        assert status == 1 and not (tmp_path / "out").exists()
        assert re.fullmatch(rf"fineweb\.py: source={source} .* cannot be fetched from .*\n", err)
    hub.fail = lambda path, span: 404 if span and "/d[1].par" in path else None
    status, out, err = run(DATASET, tmp_path / "out", env=hub.env)
    assert re.fullmatch(r"fineweb\.py: .*/d\[1\].parquet cannot be read .*\n", err), err

def test_ctrl_c_during_a_download(hub, tmp_path):
    """Ctrl-C ends the script while it waits for the hub, without a line of any library."""
    # In a file of more than 5 MB, the second request is made by a thread of pyarrow
    texts = [random.randbytes(50_000).hex() for _ in range(150)]
    hub.files["sample/10BT/0.parquet"] = parquet_of(texts)
    asked, answer, n_answered = threading.Event(), threading.Event(), iter([1])
    hub.fail = lambda path, span: span and not next(n_answered, 0) and (
        asked.set(), answer.wait()) and None
    forked = ForkedMain(DATASET, tmp_path, env=hub.env)
    assert asked.wait(120)
    os.kill(forked.process.pid, signal.SIGINT)
    assert (forked.wait(), forked.err) == (130, STOPPED)
    answer.set()

# ----------------------------------------------------------------------------- shared helpers
def test_end_of_text_is_special_only_on_request():
    """Also in a text that has to be encoded in parts, which keep line ends and <|endoftext|>."""
    for text in ("a\n<|endoftext|>" * 300, "a\n<|endoftext|>\r\n" * 9_000 + "b\n" * 50_001):
        for special in (False, True):
            expected = BYTES.encode(text, allowed_special="all" if special else set(),
                                    disallowed_special=())
            in_parts = Mock(n_vocab=257, encode_to_numpy=Mock(side_effect=lambda part, **kwargs: (
                BYTES.encode_to_numpy(part, **kwargs) if len(part) <= 100_000 else int("x"))))
            for enc in (BYTES, in_parts):
                ids = encode(enc, text, special)
                assert ids.dtype == np.uint16 and ids.tolist() == expected
    assert encode(BYTES, "").shape == (0,)

@pytest.fixture
def hf_folder(tmp_path, gpt2_encoding):
    """Return a function that makes a folder with a tokenizer: GPT-2's, or one with edited JSON."""
    pytest.importorskip("transformers")
    fineweb.save_tokenizer(get_encoding("gpt2"), tmp_path, context=1024)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    path = tmp_path / "tokenizer.json"

    def edit(change):
        content = json.loads(path.read_text("utf-8"))
        change(content)
        path.write_text(json.dumps(content))
        return tmp_path
    return edit

def reverse_ids(content):
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {token: 50255 - number for token, number in vocab.items()}

def split_digits(content):
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": True}, content["pre_tokenizer"]]}

def test_another_tokenizer_with_as_many_ids_is_noticed(hf_folder, tmp_path):
    """It may have other ids, or cut texts at other places. A folder may have no tokenizer."""
    gpt2 = get_encoding("gpt2")
    assert not fineweb.has_other_ids(hf_folder(len), gpt2)
    assert fineweb.has_other_ids(str(tmp_path), BYTES)
    assert fineweb.has_other_ids(str(hf_folder(split_digits)), gpt2)
    fineweb.save_tokenizer(gpt2, tmp_path, context=1024)
    assert fineweb.has_other_ids(hf_folder(reverse_ids), gpt2)
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    assert not fineweb.has_other_ids(tmp_path, gpt2)

def test_the_hub_is_not_asked_for_the_tokenizer_of_gpt2(monkeypatch):
    """A tokenizer that cannot be loaded does not count as another one."""
    load = Mock(side_effect=OSError("no network"))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
    for name in ("gpt2", "openai-community/gpt2-xl", "somebody/gpt2"):
        assert not fineweb.has_other_ids(name, BYTES)
    assert [call.kwargs["local_files_only"] for call in load.mock_calls] == [True, True, False]

def test_a_missing_vocabulary_is_one_line(tmp_path, monkeypatch):
    """The message names the constant and the remedy."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("requests.get", Mock(side_effect=OSError("no network")))
    with refused(r"encoding=r50k_base cannot be loaded \(no network\): .*TIKTOKEN_CACHE_DIR"):
        get_encoding("r50k_base")

def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """write_whole() keeps the earlier content if writing fails, and leaves no other file."""
    flushed, path = [], tmp_path / "new/folder/a.txt"
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(
        (os.fstat(fd).st_size, path.exists())))
    fineweb.write_whole(path, lambda file: file.write(b"earlier"))
    assert flushed == [(7, False)]
    with pytest.raises(ZeroDivisionError):
        fineweb.write_whole(path, lambda file: (file.write(b"half"), 1 / 0))
    assert path.read_bytes() == b"earlier" and list(path.parent.iterdir()) == [path]

@pytest.mark.parametrize("error", [NotImplementedError(), OSError(errno.ENOTSUP, "no locks"),
                                   OSError(errno.EOPNOTSUPP, "no locks"),
                                   OSError(errno.ENOLCK, "no locks")])
def test_a_disk_without_locks_can_be_used(tmp_path, monkeypatch, capsys, error):
    """A line warns that the folder is not locked."""
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=error))
    lock = fineweb.lock_folder("log_dir", str(tmp_path / "a/b"))
    assert "/a/b/ cannot be locked" in capsys.readouterr().out and not lock.is_locked

@dataclasses.dataclass(frozen=True)
class Example:
    steps: int = 12  # 100 % of it
    rate: float = 1e-3
    name: str = "a"
    fast: bool = True  # whether to hurry
    compile: Literal["auto", True, False] = "auto"

def parse(*words):
    presets = {"SMALL": {"steps": 7}, "FINETUNE": {"steps": 9}}
    return fineweb.parse_flags(Example, "doc", presets, words)

def test_flags_have_the_types_of_their_constants(monkeypatch):
    """True and False are accepted in any case, and only flags that were given are returned."""
    assert parse() == {}
    given = parse("--steps=20", "--rate=2", "--name=true", "--fast=false", "--compile=FALSE")
    assert given == {"steps": 20, "rate": 2.0, "name": "true", "fast": False, "compile": False}
    assert [type(value) for value in given.values()] == [int, float, str, bool, bool]
    assert parse("--compile=auto", "--fast=True") == {"compile": "auto", "fast": True}
    monkeypatch.setattr(sys, "argv", ["x.py", "--steps=3"])
    assert fineweb.parse_flags(Example, "doc") == {"steps": 3}

@pytest.mark.parametrize("word, says", [
    ("--steps=1.5", "--steps.*'1.5'"), ("--rate=x", "--rate.*'x'"), ("--fast=yes", "--fast.*'yes'"),
    ("--compile=no", "--compile.*'no'.*auto"), ("--step=1", "--step=1"), ("--steps", "--steps"),
    ("word", "word")])
def test_a_bad_flag_is_named(capsys, word, says):
    """The message is one sentence, without a list of all flags."""
    with refused(rf"{says}.*--help"):
        parse(word)
    assert capsys.readouterr() == ("", "")

def test_help_has_comments_defaults_and_presets(capsys):
    """--help prints each constant's comment, its default, and its value in each preset."""
    with pytest.raises(SystemExit):
        parse("--help")
    out = " ".join(capsys.readouterr().out.split())
    assert "100 % of it [12, in SMALL 7, in FINETUNE 9]" in out
    assert "whether to hurry [True]" in out and "--compile auto|True|False" in out

def test_git_keeps_the_bytes_of_input_txt(tmp_path):
    """Git may convert line ends on Windows, and the losses depend on every byte."""
    def git(*words):
        subprocess.run(["git", "-c", "core.autocrlf=true", *words], cwd=tmp_path, check=True,
                       capture_output=True)
    git("init", "-q", "a")
    for name in ("input.txt", ".gitattributes"):
        (tmp_path / "a" / name).write_bytes((ROOT / name).read_bytes())
    git("-C", "a", "add", ".")
    git("-C", "a", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a")
    git("clone", "-q", "a", "b")
    assert (tmp_path / "b/input.txt").read_bytes() == (ROOT / "input.txt").read_bytes()
    assert (tmp_path / "b/input.txt").stat().st_size == 756_814
