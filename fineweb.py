"""FineWeb-Edu to token shards: documents in, edu_fineweb10B/*.npy out.

    python fineweb.py                  # sample-10BT, 100 shards of 100 M tokens
    python fineweb.py --max_shards=10  # 1 B tokens; later runs go on from there
    python fineweb.py --source=my_texts --local_dir=my_shards   # a local folder
    HF_ENDPOINT=https://hf-mirror.com python fineweb.py         # from a mirror

Stopped at any moment, the same command goes on after the last finished shard;
the bytes depend neither on stops nor on nprocs. Documents are streamed: no copy
of the corpus lands on disk. A shard is a 1-D uint16 array, <|endoftext|> before
each document; documents run on across shards; shard 0 is for validation, the
last may be shorter. In this order: constants, documents, tokens, shards, run.
"""
import argparse
import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
from collections import deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import filelock
import fsspec
import numpy as np
import tiktoken
from tqdm import tqdm


# ------------------------------------------------------------------------------------------------- constants
@dataclasses.dataclass
class Config:
    """Each is also a flag. Only max_shards and nprocs may change while local_dir holds shards."""
    source: str = "HuggingFaceFW/fineweb-edu"  # hub dataset, or local folder of .parquet, .jsonl, .jsonl.gz files
    remote_name: str = "sample-10BT"           # the hub dataset's configuration: sample-100BT, sample-350BT ...
    local_dir: str = "edu_fineweb10B"          # folder the shards go to
    shard_size: int = 100_000_000              # tokens per shard, at 2 bytes each
    max_shards: int = 0                        # stop at this many shards, the validation shard included; 0 = never
    nprocs: int = 0                            # worker processes; 0 = one per core
    encoding: str = "gpt2"                     # "gpt2", or "bytes" (a token per byte, needs no download)


TEXT = "text"                # the column (parquet) or key (JSON) that holds a document
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
MIN_SHARD_SIZE = 1025        # tokens: a row of train_gpt2.py at T=1024 and the token after it
BATCH_BYTES = 8 << 20        # text handed to a worker at a time: half a second's work, so handing it over costs nothing
MAX_GROUP_BYTES = 64 << 20   # a parquet row group above this is cut into batches (FineWeb-Edu's hold 6 MB)
BATCHES_PER_WORKER = 3       # at work or waiting for their turn; with the two above it bounds the memory


class UserError(Exception):
    """Something the person at the keyboard can mend; its text is the one line they are shown."""


def brief(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"


# ------------------------------------------------------------------------------------------------- documents
# Documents that follow each other from row `row` of file number `file` on. `payload`: a parquet row group's number,
# so that workers do the reading; or a RecordBatch, from a row group too big for that; or bytes, lines of JSON.
Batch = namedtuple("Batch", "file url row payload")


def find_files(source, remote_name):
    """[(path or URL, bytes)] of the corpus in reading order. Raises UserError."""
    if os.path.isdir(source):
        files = [(str(path), path.stat().st_size) for path in sorted(Path(source).rglob("*")) if path.is_file()]
    else:
        files = find_hub_files(source, remote_name)
    files = [(url, size) for url, size in files if url.endswith(SUFFIXES)]
    if not files:
        raise UserError(f"source={source} holds no {', '.join(SUFFIXES)} files: point --source at what does.")
    return files


def find_hub_files(source, remote_name):
    """[(URL, bytes)] of what `datasets` would stream for this dataset and configuration. Raises UserError."""
    import datasets
    datasets.disable_progress_bars()
    logging.disable(logging.WARNING)  # or ten lines on the hub client's retries bury the one below
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    print(f"Asking {hub} for the files of {source}, {remote_name} (without a network, half a minute)", flush=True)
    try:
        urls = (datasets.load_dataset_builder(source, remote_name).config.data_files or {}).get("train", [])
        return [(url, fsspec.url_to_fs(url)[0].size(url)) for url in urls]
    except (ValueError, FileNotFoundError, RuntimeError) as e:
        raise UserError(f"source={source} is no folder here, and with remote_name={remote_name} not to be had from "
                        f"{hub} ({brief(e)}): check both names.") from None
    except Exception as e:  # a lost network has another class with each HTTP library that the hub's client moves to
        raise UserError(f"{hub} can't be reached for source={source} ({brief(e)}): check the network, try a mirror "
                        f"with HF_ENDPOINT=https://hf-mirror.com, or take a local folder.") from None


def unreadable(url, row, error):
    return UserError(f"{url} can't be read from row {row + 1} on ({brief(error)}): mend the file or the network; the "
                     f"same command then goes on.")


def read_batches(urls, first_file, first_row):
    """Yield the Batches of `urls` from the one at row `first_row` of file number `first_file` on. Raises UserError."""
    for file, url in enumerate(urls[first_file:], start=first_file):
        row = 0
        try:
            for payload, rows in parquet_batches(url) if url.endswith(".parquet") else json_batches(url):
                if file > first_file or row >= first_row:
                    yield Batch(file, url, row, payload)
                row += rows
        except Exception as e:  # damage is an ArrowInvalid, OSError, EOFError, zlib.error ...; the network, anything
            raise unreadable(url, row, e) from None


def parquet_batches(url):
    """Yield (a Batch's payload, its number of rows)."""
    parquet = open_parquet(url)
    for number in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(number)
        if group.total_byte_size <= MAX_GROUP_BYTES:
            yield number, group.num_rows
        else:
            rows = max(1, group.num_rows * BATCH_BYTES // group.total_byte_size)
            for piece in parquet.iter_batches(rows, row_groups=[number], columns=[TEXT]):
                yield piece, len(piece)


def json_batches(url):
    """Yield (a Batch's payload, its number of rows); every line is a row."""
    with fsspec.open(url, compression="infer", expand=False) as file:
        lines = io.BufferedReader(file)
        while block := lines.readlines(BATCH_BYTES):
            yield b"".join(block), len(block)


@functools.lru_cache(maxsize=1)
def open_parquet(url):
    import pyarrow.parquet as pq
    fs, path = fsspec.url_to_fs(url)
    # neither cache nor pre-buffering: the one downloads what is other workers' to read, the other holds big row groups
    return pq.ParquetFile(fs.open(path, cache_type="none"), pre_buffer=False, buffer_size=BATCH_BYTES,
                          page_checksum_verification=True)


def read_texts(batch):
    """The texts of a batch, None for a row without. Raises UserError with the file and row of what is damaged."""
    import pyarrow as pa
    row, rows, texts = batch.row, batch.payload, []
    try:
        if isinstance(rows, bytes):
            for row, line in enumerate(rows.split(b"\n"), start=batch.row):
                if line.strip():
                    texts.append(json.loads(line).get(TEXT))
                    if not isinstance(texts[-1], str | None):
                        raise TypeError(f"its {TEXT!r} is not a string")
            return texts
        if isinstance(rows, int):
            rows = open_parquet(batch.url).read_row_group(rows, [TEXT], use_threads=False)
        # as bytes, since not every parquet "string" is valid UTF-8
        return [text and text.decode("utf-8", "replace") for text in rows[TEXT].cast(pa.large_binary()).to_pylist()]
    except Exception as e:
        raise unreadable(batch.url, row, e) from None


# ------------------------------------------------------------------------------------------------- tokens
def get_encoding(name):
    """tiktoken's "gpt2", or "bytes": every byte a token, and <|endoftext|>. Raises UserError."""
    if name == "bytes":
        return tiktoken.Encoding(name="bytes", pat_str=r"(?s:.{1,128})",
                                 mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={"<|endoftext|>": 256})
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as e:  # requests' errors are OSErrors; a damaged download is a ValueError
        raise UserError(f"encoding={name}: its vocabulary can't be had ({brief(e)}): go online once, point "
                        f"TIKTOKEN_CACHE_DIR at a folder that has it, or take --encoding=bytes.") from None


def tokenize(batch, encoding):
    """(tokens, (n,) uint16, with <|endoftext|> before each document; documents left out for want of text)"""
    texts, parts = read_texts(batch), [[]]
    with_text = [text for text in texts if text and not text.isspace()]
    for text in with_text:
        parts.append([encoding.eot_token])
        try:
            parts.append(encoding.encode_to_numpy(text))
        except ValueError:  # what looks like a special token, or a lone surrogate: this slower call takes them
            parts.append(encoding.encode_ordinary(text))
    return np.concatenate(parts, dtype=np.uint16, casting="unsafe"), len(texts) - len(with_text)  # ids are < 2**16


def work(connection, encoding):
    """A worker process: answers each batch until the parent is gone, by kill -9 too, since that ends the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process: the parent alone answers it
    with contextlib.suppress(EOFError, OSError):
        while True:
            batch = connection.recv()
            try:
                connection.send(tokenize(batch, encoding))
            except UserError as e:
                connection.send(e)


def tokenize_all(batches, nprocs, encoding):
    """Yield (batch, tokens, documents left out) in the order of `batches`, by `nprocs` processes. Raises UserError."""
    spawn = multiprocessing.get_context("spawn")  # a fork would copy the threads of the hub's client amid their work
    idle = []
    for _ in range(nprocs):
        ours, theirs = spawn.Pipe()
        spawn.Process(target=work, args=(theirs, encoding), daemon=True).start()
        theirs.close()
        idle.append(ours)

    def ask_worker(batch):
        worker = idle.pop()
        worker.send(batch)
        answer = worker.recv()
        if isinstance(answer, UserError):
            raise answer
        idle.append(worker)
        return batch, *answer

    threads, window = ThreadPoolExecutor(nprocs), deque()  # a thread waits for each worker
    try:
        for batch in batches:
            window.append(threads.submit(ask_worker, batch))
            if len(window) == BATCHES_PER_WORKER * nprocs:
                yield window.popleft().result()
        while window:
            yield window.popleft().result()
    except (EOFError, ConnectionError):
        raise UserError("A worker process died, likely for want of memory: take a smaller --nprocs; the same command "
                        "goes on after the last finished shard.") from None
    finally:
        threads.shutdown(cancel_futures=True)


# ------------------------------------------------------------------------------------------------- shards
def load_shards(folder, settings):
    """The entries (see cut_shards) of the finished shards. Raises UserError for a folder made with other settings."""
    path = folder / "manifest.json"
    unknown = any(folder.glob("*.npy"))  # without a manifest, nobody knows what these were made from
    manifest = json.loads(path.read_bytes()) if path.exists() else {"settings": {} if unknown else settings, "shards": []}
    made = manifest["settings"]
    differing = [f"{name} {made.get(name, 'unknown')}, not {settings.get(name)}" for name in {**settings, **made}
                 if made.get(name) != settings.get(name)]
    if differing:
        raise UserError(f"The shards in {folder}/ were made with other settings: {'; '.join(differing)[:400]}. "
                        f"Put that back, or take another --local_dir.")
    return [*itertools.takewhile(lambda shard: (folder / shard["name"]).exists(), manifest["shards"])]


def write_whole(path, write):
    """The file that `write` writes, under its name only once all of it is on the disk."""
    temporary = path.with_name(path.name + ".tmp")  # no reader of *.npy finds it
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def cut_shards(results, shard_size, shards, eot, bars):
    """Yield (tokens, (n,) uint16; entry for the manifest) of each shard after `shards`, from tokenize_all's results.

    A shard ends `used` tokens after row `row` of file number `file`; `left_out` documents without text lie before it.
    """
    buffer, filled = np.empty(shard_size, dtype=np.uint16), 0


def make_shards(cfg, folder):
    """Make what `folder` lacks of the shards that `cfg` asks for; returns all the entries. Raises UserError."""
    files = find_files(cfg.source, cfg.remote_name)
    urls = [url for url, _ in files]
    settings = {"source": cfg.source, "remote_name": cfg.remote_name, "shard_size": cfg.shard_size,
                "encoding": cfg.encoding, "batch_bytes": BATCH_BYTES,
                **{f"file {i}": f"{os.path.basename(url)}, {size} bytes" for i, (url, size) in enumerate(files)}}
    shards = load_shards(folder, settings)
