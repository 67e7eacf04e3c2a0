"""Tests of fineweb.py: its shards, stopping and continuing, bad input, and the shared helpers."""
import dataclasses
import gzip
import hashlib
import io
import json
import random
import re
import shlex
import signal
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Started, one_line, shared, until

import fineweb
from fineweb import UserError, encode, get_encoding

SHARD = 50_000  # tokens
BYTES = get_encoding("bytes")
DATASET = "HuggingFaceFW/fineweb-edu"
ODD = ["<|endoftext|>", "a <|endoftext|> b <|fim_prefix|>", "\x00\x01\r\n\r", " " * 5000, "no end",
       "\u200b\u202e\ufeff z\u0351\u0313algo \u2028 \U0010ffff", "a" * 5000, "👩‍👩‍👧 中文",
       "no UTF-8 in parquet, half an emoji in JSON: \udce9.", "", None, "\n", "\n a\n\n\tb  c \r\n"]

def make_texts(n, seed):
    """Return n texts of 1 to 400 random words and line ends."""
    rng = random.Random(seed)
    words = "model token loss gradient Straße naïve 数据 🙂 the of and to in 3.14 \n \n\n".split(" ")
    return [" ".join(rng.choices(words, k=rng.randint(1, 400))) for _ in range(n)]

TEXTS = make_texts(450, seed=1) + ODD
TEXTS[270:270] = ODD

def parquet(**columns):
    """Return the content of a parquet file with row groups of 100 rows."""
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, row_group_size=100)
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

def naive(texts, encoding=BYTES):
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

def start(source, local_dir, *words, shard_size=SHARD, max_shards=0, **options):
    """Start fineweb.py, which makes small shards of bytes. Return the Started."""
    return Started("fineweb.py", f"--source={source}", f"--local_dir={local_dir}", "--threads=2",
                   f"--shard_size={shard_size}", f"--max_shards={max_shards}", "--encoding=bytes",
                   *words, **options)

def refused(match):
    """Expect a UserError of one line that matches."""
    return pytest.raises(UserError, match=rf"\A(?=[^\n]+\Z).*{match}")

@pytest.fixture
def make(capsys):
    """Return a function that makes shards in this process and returns what was printed."""
    def make(source, local_dir, **changes):
        cfg = dict(shard_size=SHARD, threads=2, encoding="bytes") | changes
        fineweb.make_shards(fineweb.Config(source=str(source), local_dir=str(local_dir), **cfg))
        return capsys.readouterr().out
    return make

@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Return a folder with all kinds of files, which hold TEXTS in reading order."""
    folder = tmp_path_factory.mktemp("corpus")
    write(folder / "a.parquet", parquet_of(TEXTS[:250]))
    write(folder / "b.jsonl", jsonl(TEXTS[250:300]))
    write(folder / "c.jsonl.gz", gzip.compress(jsonl(TEXTS[300:350])))
    write(folder / "deeper.parquet/d[1].parquet", parquet_of(TEXTS[350:]))
    return folder

@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """Return a folder with the shards of `corpus`, made by one run of fineweb.py."""
    folder = tmp_path_factory.mktemp("whole")
    done = start(corpus, folder)
    assert (done.wait(), done.err) == (0, "")
    return folder

# ------------------------------------------------------------------------------------- shards
def test_shards_equal_those_of_a_naive_tokenizer(whole):
    """Tokens, types, lengths, names and the documents in the manifest are as documented."""
    shards = [np.load(path, allow_pickle=False) for path in shards_of(whole)]
    assert all(shard.dtype == np.uint16 and shard.ndim == 1 for shard in shards)
    assert len(shards) > 6 and {len(shard) for shard in shards[:-1]} == {SHARD}
    np.testing.assert_array_equal(np.concatenate(shards), naive(TEXTS))
    manifest = json.loads((whole / "manifest.json").read_text())
    assert [entry["documents"] for entry in manifest["shards"]] == [sum(s == 256) for s in shards]
    assert manifest["settings"]["encoding"] == "bytes"
    names = {f"edufineweb_train_{i:06d}.npy" for i in range(1, len(shards))}
    names |= {"edufineweb_val_000000.npy", ".lock", "manifest.json"}
    assert {path.name for path in whole.iterdir()} == names

@pytest.mark.parametrize("threads", [1, 5, 0])
def test_shards_do_not_depend_on_the_number_of_threads(corpus, whole, tmp_path, make, threads):
    """They are byte-identical."""
    make(corpus, tmp_path, threads=threads)
    assert digests(tmp_path) == digests(whole)

def test_gpt2_tokens_of_real_documents(gpt2_encoding, tmp_path, make):
    """They equal those of a naive tokenizer, also beside a text that tiktoken refuses."""
    table = pq.read_table(shared("fineweb_standin") / "000_00000.parquet").slice(100, 300)
    texts = [*table["text"].to_pylist(), *ODD]
    write(tmp_path / "in/a.parquet", parquet_of([*texts, " " * 999_999 + "x", "after"]))
    make(tmp_path / "in", tmp_path / "out", encoding="gpt2")
    tokens, expected = tokens_of(tmp_path / "out"), naive(texts, gpt2_encoding)
    np.testing.assert_array_equal(tokens[:len(expected)], expected)
    rest = gpt2_encoding.decode(tokens[len(expected):].tolist())
    assert rest == "<|endoftext|>" + " " * 999_999 + "x<|endoftext|>after"

def test_an_encoding_with_more_than_65536_ids_is_stored_as_uint32(tmp_path, make, monkeypatch):
    """Its highest ids, the special tokens, are stored exactly."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared("tiktoken_cache")))
    write(tmp_path / "in/a.parquet", parquet_of(TEXTS[:100]))
    make(tmp_path / "in", tmp_path / "out", encoding="cl100k_base", shard_size=10_000)
    tokens = tokens_of(tmp_path / "out")
    assert tokens.dtype == np.uint32 and tokens[0] == 100257
    np.testing.assert_array_equal(tokens, naive(TEXTS[:100], get_encoding("cl100k_base")))

# ------------------------------------------------------------------- stopping and continuing
def test_a_later_run_adds_shards(corpus, whole, tmp_path, make):
    """It continues after several groups of a file, keeps finished shards, and prints the totals."""
    for max_shards, n in ((2, 2), (3, 3), (2, 3), (4, 4), (5, 5), (6, 6)):
        assert f"in {n} shards" in make(corpus, tmp_path, max_shards=max_shards)
        assert len(shards_of(tmp_path)) == n
    end = json.loads((tmp_path / "manifest.json").read_text())["shards"][3]["end"]
    assert end["file"] == 0 and end["document"] >= 2 * fineweb.GROUP
    tokens = tokens_of(whole)
    totals = f"{sum(tokens == 256):,} documents, {len(tokens):,} tokens in"
    assert totals in make(corpus, tmp_path, threads=1)
    shards_of(tmp_path)[4].unlink()
    make(corpus, tmp_path)
    make(corpus, tmp_path)  # the corpus is finished, and nothing is added
    assert digests(tmp_path) == digests(whole)

def test_killed_at_random_moments(corpus, tmp_path, make):
    """Repeated runs make the same shards as one run. Ctrl-C ends the script without a traceback."""
    make(corpus, tmp_path / "once", shard_size=5000)
    out, rng = tmp_path / "out", random.Random(1)
    for number in (signal.SIGINT, signal.SIGKILL, signal.SIGTERM):
        wanted = len(shards_of(out)) + rng.randint(1, 9)
        run = start(corpus, out, shard_size=5000)
        until(lambda: len(shards_of(out)) >= wanted or run.poll() is not None)
        run.kill(number)
        assert run.wait() in (-number, 0) and run.err == ""
    assert start(corpus, out, shard_size=5000).wait() == 0
    assert digests(out) == digests(tmp_path / "once") and not list(out.glob("*.part"))

def test_a_folder_in_use_is_refused(corpus, tmp_path, make):
    """Two runs would overwrite each other's shards."""
    lock = fineweb.lock_folder("local_dir", tmp_path)
    with refused(f"Another run uses {tmp_path}/.*local_dir"):
        make(corpus, tmp_path)
    lock.release()
    make(corpus, tmp_path)

def test_other_settings_and_changed_files_are_refused(tmp_path, make):
    """Files that no finished shard contains may change. The message names what is different."""
    source, out = tmp_path / "in", tmp_path / "out"
    for i in range(3):
        write(source / f"{i}.jsonl", jsonl(make_texts(60, seed=i)))
    make(source, out, max_shards=2)
    with refused("shard_size was 50000 and is 5000; encoding was bytes and is gpt2.*another"):
        make(source, out, shard_size=5000, encoding="gpt2")
    write(source / "2.jsonl", jsonl(make_texts(70, seed=5)))  # no shard contains it yet
    make(source, out)
    write(source / "3.jsonl", jsonl(["after a shorter last shard"]))
    with refused(r"\(file 3 was absent and is 3.jsonl, \d+ bytes\): undo this"):
        make(source, out)
    (out / "manifest.json").unlink()  # as if another script had made the shards
    with refused("shard_size was absent and is 50000; encoding.* another --local_dir"):
        make(source, out)

# ------------------------------------------------------------------------------ odd and bad input
def test_lines_of_other_programs(tmp_path, make):
    """A BOM, CRLF, blank lines and other keys are accepted. Invalid UTF-8 becomes U+FFFD."""
    lines = [b'\xef\xbb\xbf{"text": "a\xe2\x80\xa8\\nb", "x": 1}', b"", b"  ",
             b'{"y": 2, "text": "c"}', b'{"text": null}', b'{"text": "d \xff \\ud83d"}',
             b'{"text": " "}', b'{"text": "e"}']
    write(tmp_path / "in/a.jsonl", b"\r\n".join(lines * 400))
    write(tmp_path / "in/b.jsonl", b"")
    write(tmp_path / "in/c.parquet", parquet(text=pa.nulls(3)))
    make(tmp_path / "in", tmp_path / "out", shard_size=2000)
    texts = ["a\u2028\nb", "c", "d \ufffd \ufffd", "e"] * 400
    np.testing.assert_array_equal(tokens_of(tmp_path / "out"), naive(texts))

def test_files_that_are_read(tmp_path, make, monkeypatch):
    """Hidden files and other endings are left out; linked folders and ~ can be used."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["", "--source=~/.cache/in", "--local_dir=~/my $hards"])
    flags = fineweb.parse_flags(fineweb.Config, "")
    for name in ("a.jsonl", "b/c.jsonl", "b/.d.jsonl", ".ipynb_checkpoints/a.jsonl", "e.txt"):
        write(tmp_path / ".cache/in" / name, jsonl([name * 200]))
    write(tmp_path / "other/f.jsonl", jsonl(["f" * 2000]))
    (tmp_path / ".cache/in/z").symlink_to(tmp_path / "other")
    printed = make(**flags, shard_size=1025)
    tokens = naive(["a.jsonl" * 200, "b/c.jsonl" * 200, "f" * 2000])
    np.testing.assert_array_equal(tokens_of(tmp_path / "my $hards"), tokens)
    command = shlex.split(printed.splitlines()[-1].partition(": ")[2])
    data = f"--data={tmp_path}/my $hards"
    assert command == ["python", "train_gpt2.py", data, "--encoding=bytes"]

LINES = jsonl(["a"] * 70)

@pytest.mark.parametrize("name, data, says", [
    ("x.parquet", parquet(text=["a"])[:-9], "document 1 on"),
    ("x.parquet", parquet(content=["a"], id=[1]), "document 1 on .*text.*content.*id"),
    ("x.parquet", parquet(text=[1]), "document 1 on .*int64"),
    ("x.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], "document 1 on .*EOFError"),
    ("x.jsonl", LINES + b'\n{"text": "b\n', "document 72 on .*JSONDecodeError"),
    ("x.jsonl", LINES + b'{"text": 1.5}\n', "document 71 on .*Error")])
def test_a_bad_file_is_one_line(tmp_path, make, name, data, says):
    """The message names the file and the row, and what is wrong with it."""
    write(tmp_path / name, data)
    with refused(f"{name} cannot be read from {says}"):
        make(tmp_path, tmp_path / "out")

def test_a_corpus_of_one_shard_is_refused(tmp_path, make):
    """The same folder can be used with a smaller --shard_size, as the message says."""
    write(tmp_path / "in/a.jsonl", jsonl(["a" * 400] * 8))
    with refused("3,208 tokens.*nothing to train on.*smaller --shard_size"):
        make(tmp_path / "in", tmp_path / "out")
    make(tmp_path / "in", tmp_path / "out", shard_size=1100)
    assert len(tokens_of(tmp_path / "out")) == 3208

@pytest.mark.parametrize("word, says", [
    ("--shard_siz=5", "unrecognized arguments: --shard_siz"), ("--shard_size=99", "=99, .*1025"),
    ("--threads=-1", "threads=-1: they must be"), ("--threads=x", "threads.*'x'.*--help"),
    ("--encoding=gpt3", "encoding=gpt3 cannot be loaded .*gpt2, .*cl100k_base"),
    ("--local_dir=", "local_dir= cannot be used"),
    (f"--local_dir={__file__}", "local_dir=.* cannot be used .*exists")])
def test_a_bad_flag_is_one_line(corpus, tmp_path, word, says):
    """The message names the flag and says what its value must be."""
    run = start(corpus, tmp_path / "out", word)
    assert run.wait() == 1 and re.search(says, one_line(run.err))

def limit_file_size(fineweb, n_bytes):
    resource = pytest.importorskip("resource")
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))

def test_a_full_disk_leaves_only_whole_shards(corpus, whole, tmp_path, make):
    """The script says so in one line, and later the same command continues."""
    make(corpus, tmp_path, max_shards=2)
    run = start(corpus, tmp_path, arrange=[(limit_file_size, 2 * SHARD)])  # no room for the header
    assert run.wait() == 1
    one_line(run.err, f"local_dir={tmp_path} cannot be written")
    assert len(shards_of(tmp_path)) == 2 and not list(tmp_path.glob("*.part"))
    make(corpus, tmp_path)
    assert digests(tmp_path) == digests(whole)

def test_a_dataset_on_the_hub(corpus, whole, tmp_path, make, monkeypatch):
    """The hub returns the addresses of the files. An error is one line with the remedy."""
    urls = [str(path) for path in sorted(corpus.rglob("*.*")) if path.is_file()]
    load = Mock()
    load().config.data_files = {"train": [*urls, "README.md"]}
    monkeypatch.setattr("datasets.load_dataset_builder", load)
    make("a/b", tmp_path, remote_name="c")
    load.assert_called_with("a/b", "c")
    assert digests(tmp_path) == digests(whole)
    load.side_effect = ConnectionError("no network")
    with refused(r"source=a/b is not .*remote_name=c cannot be fetched from http.* \(no network\)"):
        make("a/b", tmp_path, remote_name="c")

# ----------------------------------------------------------------------------- shared helpers
def test_end_of_text_is_special_only_on_request():
    """Also in a text that has to be encoded in parts, which keep line ends and <|endoftext|>."""
    in_parts = Mock(n_vocab=257, encode_to_numpy=lambda part, **kwargs: (
        BYTES.encode_to_numpy(part, **kwargs) if len(part) <= 100_000 else int("x")))
    for text in ("", "a\n<|endoftext|>" * 300, "a\n<|endoftext|>\r\n" * 9_000 + "b\n" * 50_001):
        for special in (False, True):
            expected = BYTES.encode(text, allowed_special="all" if special else set(),
                                    disallowed_special=())
            for enc in (BYTES, in_parts):
                ids = encode(enc, text, special)
                assert ids.dtype == np.uint16 and ids.tolist() == expected

def test_a_missing_vocabulary_is_one_line(tmp_path, monkeypatch):
    """The message names the constant and the remedy."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("requests.get", Mock(side_effect=OSError("no network")))
    with refused(r"encoding=r50k_base cannot be loaded \(no network\): .*TIKTOKEN_CACHE_DIR"):
        get_encoding("r50k_base")

@dataclasses.dataclass(frozen=True)
class Example:
    steps: int = 12  # 100 % of it
    rate: float = 1e-3
    name: str = "a"
    fast: bool = True  # whether to hurry
    compile: Literal["auto", True, False] = "auto"

@pytest.fixture
def parse(monkeypatch):
    """Return a function that parses the flags of Example."""
    def parse(*words):
        monkeypatch.setattr("sys.argv", ["x.py", *words])
        presets = {"SMALL": {"steps": 7}, "FINETUNE": {"steps": 9}}
        return fineweb.parse_flags(Example, "doc", presets)
    return parse

def test_flags_have_the_types_of_their_constants(parse):
    """True and False are accepted in any case, and only flags that were given are returned."""
    assert parse() == {}
    given = parse("--steps=20", "--rate=2", "--name=true", "--fast=false", "--compile=FALSE")
    assert given == {"steps": 20, "rate": 2.0, "name": "true", "fast": False, "compile": False}
    assert [type(value) for value in given.values()] == [int, float, str, bool, bool]
    assert parse("--compile=auto", "--fast=True") == {"compile": "auto", "fast": True}
    for word, says in (("--steps=1.5", "'1.5'"), ("--fast=yes", "'yes'"), ("--compile=no", "auto"),
                       ("--step=1", "--step=1"), ("word", "word")):
        with refused(rf"{says}.*--help"):
            parse(word)

def test_help_has_comments_defaults_and_presets(parse, capsys):
    """--help prints each constant's comment, its default, and its value in each preset."""
    with pytest.raises(SystemExit):
        parse("--help")
    out = " ".join(capsys.readouterr().out.split())
    assert "100 % of it [12, in SMALL 7, in FINETUNE 9]" in out
    assert "whether to hurry [True]" in out and "--compile auto|True|False" in out
