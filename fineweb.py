"""FineWeb-Edu to token shards: documents in, edu_fineweb10B/*.npy out.

    python fineweb.py                  # sample-10BT, 100 shards of 100 M tokens
    python fineweb.py --max_shards=10  # 1 B tokens; a later run continues there
    python fineweb.py --source=my_texts --local_dir=my_shards   # a local folder
    HF_ENDPOINT=https://hf-mirror.com python fineweb.py         # from a mirror

Stopped at any moment, the same command continues after the last finished shard;
the bytes depend neither on stops nor on nprocs. A file that cannot be read
stops the run, too: repair it and run the same command. Documents are streamed:
no copy of the corpus is stored on disk. A shard is a 1-D uint16 array with
<|endoftext|> before each document. Documents may span shards. Shard 0 is for
validation, the last one may be shorter.
"""
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: no traceback

import argparse
import contextlib
import dataclasses
import errno
import functools
import gzip
import inspect
import io
import itertools
import json
import logging
import multiprocessing
import operator
import os
import re
import stat
import sys
import textwrap
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import filelock
import fsspec
import numpy as np
import tiktoken
from tqdm import tqdm


@dataclasses.dataclass
class Config:
    """Each is also a flag. Only max_shards and nprocs may change while local_dir holds shards."""
    source: str = "HuggingFaceFW/fineweb-edu"  # hub dataset, or folder of parquet or jsonl files
    remote_name: str = "sample-10BT"           # the hub dataset's configuration
    local_dir: str = "edu_fineweb10B"          # folder for the shards
    shard_size: int = 100_000_000              # tokens per shard, 2 bytes each
    max_shards: int = 0                        # number of shards, validation included; 0 = all
    nprocs: int = 0                            # worker processes; 0 = one per core
    encoding: str = "gpt2"                     # "gpt2", or "bytes" (a token per byte, no download)


TEXT = "text"                # the column (parquet) or key (JSON) that holds a document
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
HUB_NAME = re.compile(r"(\w[\w.-]{,95}/)?\w[\w.-]{,95}", re.ASCII)
MIN_SHARD_SIZE = 1025        # tokens: a row of train_gpt2.py at T=1024 and the token after it
BATCH_BYTES = 8 << 20        # text per batch: half a second of a worker's time
MAX_GROUP_BYTES = 64 << 20   # larger parquet row groups are cut (FineWeb-Edu's hold 6 MB)
BATCHES_PER_WORKER = 3       # in progress or queued; with the two above it bounds the memory
NPY_HEADER_BYTES = 128       # np.save's, for any 1-D array


class UserError(Exception):
    """A problem that the user can solve; its text is the one line that they see."""


def brief(error):
    """The error in at most 240 characters, cut between words."""
    text = textwrap.shorten(str(error), 240, placeholder=" ...", break_on_hyphens=False)
    return f"{type(error).__name__}: {text}"


def user_error(cause, text):
    """UserError(text) for an exception. If a limit on files or memory caused it, it says that."""
    if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
        text = ("The limit on open files is reached: raise it (ulimit -n 4096), or take a smaller "
                "--nprocs; the same command continues after the last finished shard.")
    if isinstance(cause, MemoryError):
        text = "Not enough memory: take a smaller --shard_size or --nprocs."
    return UserError(text)


# ----------------------------------------------------------------------------------- documents
class Batch(NamedTuple):
    """Documents that follow each other in a file.

    payload: the number of a parquet row group, which a worker reads; or a RecordBatch, a part of
    a row group that is larger than MAX_GROUP_BYTES; or bytes, lines of JSON.
    """
    file: int  # number of the file in reading order
    url: str   # its path or URL
    row: int   # row of the first document
    payload: object


def find_files(source, remote_name):
    """{path or URL: size in bytes} of the corpus in reading order. Raises UserError."""
    if os.path.isdir(source):
        files = find_local_files(source)
    else:
        files = find_hub_files(source, remote_name)
    if not files:
        raise UserError(f"source={source} holds no {', '.join(SUFFIXES)} files: point --source "
                        f"at a folder or dataset that does.")
    return files


def find_local_files(folder):
    """{path: size in bytes}, subfolders and symbolic links included. Raises UserError."""
    files = {}
    try:
        for path in sorted(map(Path, walk(folder))):
            status = path.stat()  # raises for a broken link, which may stand for a whole folder
            if not path.name.endswith(SUFFIXES):
                continue
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"{path} is not a regular file: remove it from the source.")
            files[str(path)] = status.st_size
    except OSError as e:
        raise user_error(e, f"{e.filename} cannot be read ({e.strerror}): make it readable, or "
                            f"remove it from the source.") from None
    return files


def walk(folder, parents=()):
    """Yield the paths of the files in `folder` and below. Raises OSError."""
    real = os.path.realpath(folder)
    if real in parents:  # a link to a folder that contains it: its files are listed already
        return
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isdir(path):
            yield from walk(path, (*parents, real))
        else:
            yield path


def find_hub_files(source, remote_name):
    """{URL: size in bytes} of what `datasets` would stream. Raises UserError."""
    if os.path.exists(source) or not HUB_NAME.fullmatch(source):
        raise UserError(f"source={source} is neither a folder nor the name of a hub dataset: "
                        f"check the path.")
    import datasets
    datasets.disable_progress_bars()
    silence_hub_client()
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    print(f"Asking {hub} for the files of {source}, {remote_name} "
          f"(without a network, this takes half a minute)")
    try:
        builder = datasets.load_dataset_builder(source, remote_name)
        urls = (builder.config.data_files or {}).get("train", [])
        sizes = {url: fsspec.url_to_fs(url)[0].size(url) for url in urls}
    # which class a network error has depends on the HTTP library that the hub's client uses
    except Exception as e:
        raise UserError(f"source={source} is not a folder here, and its remote_name={remote_name} "
                        f"cannot be fetched from {hub} ({brief(e)}): check both names and the "
                        f"network, or try a mirror with "
                        f"HF_ENDPOINT=https://hf-mirror.com.") from None
    return {url: size for url, size in sizes.items() if url.endswith(SUFFIXES)}


def silence_hub_client():
    """Hide its lines on retries. If all of them fail, the exception is reported."""
    logging.disable(logging.CRITICAL)


def unreadable(url, row, error):
    return user_error(error, f"{url} cannot be read from row {row + 1} on ({brief(error)}): "
                             f"repair the file or the network; then the same command continues.")


def read_batches(urls, first_file, first_row):
    """Yield the Batches of `urls` from row `first_row` of file number `first_file` on.

    Raises UserError.
    """
    for file in range(first_file, len(urls)):
        url = urls[file]
        row = 0
        try:
            parts = read_parquet(url) if url.endswith(".parquet") else read_json(url)
            for payload, rows in parts:
                if file > first_file or row >= first_row:
                    yield Batch(file, url, row, payload)
                row += rows
        # ArrowInvalid, OSError, EOFError, zlib.error, and all that a network may raise
        except Exception as e:
            raise unreadable(url, row, e) from None


def read_parquet(url):
    """Yield (a Batch's payload, its number of rows)."""
    parquet = open_parquet(url)
    for number in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(number)
        if group.total_byte_size <= MAX_GROUP_BYTES:
            yield number, group.num_rows
            continue
        rows = max(1, group.num_rows * BATCH_BYTES // group.total_byte_size)
        for part in parquet.iter_batches(rows, row_groups=[number], columns=[TEXT]):
            yield part, len(part)


def read_json(url):
    """Yield (a Batch's payload, its number of rows); every line is a row."""
    with open_file(url) as file:
        lines = io.BufferedReader(file, BATCH_BYTES)
        if url.endswith(".gz"):
            lines = io.BufferedReader(gzip.GzipFile(fileobj=lines))
        while block := lines.readlines(BATCH_BYTES):
            yield b"".join(block), len(block)


def open_file(url):
    """The file at a path or URL, to read bytes from."""
    if "://" not in url:
        return open(url, "rb")
    fs, path = fsspec.url_to_fs(url)
    return fs.open(path, cache_type="none")  # a cache would download what other workers read


@functools.lru_cache(maxsize=1)
def open_parquet(url):
    import pyarrow.parquet as pq
    # pre-buffering would hold all of a large row group in memory
    return pq.ParquetFile(open_file(url), pre_buffer=False, buffer_size=BATCH_BYTES,
                          page_checksum_verification=True)


def read_texts(batch):
    """The texts of a Batch, None for a row without one. Raises UserError with file and row."""
    return parse_lines(batch) if isinstance(batch.payload, bytes) else read_column(batch)


def parse_lines(batch):
    """read_texts for lines of JSON."""
    texts = []
    for row, line in enumerate(batch.payload.split(b"\n"), start=batch.row):
        if not line.strip():
            continue
        try:
            text = json.loads(line).get(TEXT)
            if not isinstance(text, str | None):
                raise TypeError(f"its {TEXT!r} is not a string")
        except Exception as e:  # ValueError, TypeError, AttributeError (no object), RecursionError
            raise unreadable(batch.url, row, e) from None
        texts.append(text)
    return texts


def read_column(batch):
    """read_texts for parquet."""
    import pyarrow as pa
    table = batch.payload
    try:
        if isinstance(table, int):
            table = open_parquet(batch.url).read_row_group(table, [TEXT], use_threads=False)
        column = table[TEXT].cast(pa.large_binary())  # not every parquet "string" is valid UTF-8
    except Exception as e:  # as in read_batches
        raise unreadable(batch.url, batch.row, e) from None
    return [text and text.decode("utf-8", "replace") for text in column.to_pylist()]


# -------------------------------------------------------------------------------------- tokens
class Result(NamedTuple):
    """What a worker makes of a Batch."""
    file: int           # the batch's
    row: int            # the batch's
    tokens: np.ndarray  # (n,) uint16
    left_out: int       # documents without text


def get_encoding(name):
    """tiktoken's "gpt2", or "bytes": every byte a token, and <|endoftext|>. Raises UserError."""
    if name == "bytes":
        return tiktoken.Encoding(name="bytes", pat_str=r"(?s:.{1,128})",
                                 mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={"<|endoftext|>": 256})
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as e:  # no network (requests' are OSErrors); a damaged download
        raise UserError(f"encoding={name}: its vocabulary cannot be fetched ({brief(e)}): go "
                        f"online once, point TIKTOKEN_CACHE_DIR at a folder that has it, or take "
                        f"--encoding=bytes.") from None


MAX_ENCODE_CHARS = 500_000  # text for tiktoken at a time; the last word may run over
# A whitespace character before another character. Not \s: Python counts four control characters
# as whitespace, tiktoken does not.
WORD_START = re.compile(r"[^\S\x1c-\x1f](?=[\S\x1c-\x1f])")


def encode(encoding, text):
    """Token ids of `text`, (n,) uint16; "<|endoftext|>" in it is plain text.

    tiktoken panics at 999,999 or more whitespace characters in a row before another character: its
    engine for regular expressions overflows. So a long text is encoded in parts, cut in front of
    the last whitespace character before a word. The ids stay those of the whole text: GPT-2's
    pattern begins a token at that character in any case, and the whitespace in front of it is one
    piece for the pattern, just as at the end of a text.
    """
    parts = [np.empty(0, dtype=np.uint16)]
    start = 0
    while start < len(text):
        cut = WORD_START.search(text, start + MAX_ENCODE_CHARS)
        end = cut.start() if cut else len(text)
        part = text[start:end]
        try:
            parts.append(encoding.encode_to_numpy(part, disallowed_special=()))
        except UnicodeEncodeError:  # a lone surrogate, which this slower call replaces
            parts.append(encoding.encode_ordinary(part))
        start = end
    return np.concatenate(parts, dtype=np.uint16, casting="unsafe")  # ids are below 2**16


def tokenize(batch, encoding):
    """The Result for a Batch."""
    texts = read_texts(batch)
    with_text = [text for text in texts if text and not text.isspace()]
    end_of_text = np.array([encoding.eot_token], dtype=np.uint16)
    parts = [end_of_text[:0]]
    for text in with_text:
        parts += [end_of_text, encode(encoding, text)]
    return Result(batch.file, batch.row, np.concatenate(parts), len(texts) - len(with_text))


def work(connection, encoding):
    """A worker process: answers each Batch with a Result or UserError until the parent is gone.

    Even kill -9 of the parent closes the connection, which ends the worker.
    """
    silence_hub_client()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            batch = connection.recv()
            try:
                answer = tokenize(batch, encoding)
            except UserError as e:
                answer = e
            connection.send(answer)


def start_workers(nprocs, encoding):
    """The connections to `nprocs` new worker processes. Raises UserError."""
    spawn = multiprocessing.get_context("spawn")  # a fork would copy the hub client's threads
    connections = []
    # Ctrl-C reaches every process of a terminal, but only the parent shall handle it. Workers
    # started while it is ignored inherit that.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for _ in range(nprocs):
            ours, theirs = spawn.Pipe()
            spawn.Process(target=work, args=(theirs, encoding), daemon=True).start()
            theirs.close()
            connections.append(ours)
    except OSError as e:
        raise user_error(e, f"{nprocs} worker processes cannot be started ({brief(e)}): take a "
                            f"smaller --nprocs.") from None
    finally:
        signal.signal(signal.SIGINT, handler)
    return connections


def ask_worker(idle, batch):
    """The Result for `batch` from one of the `idle` workers. Raises what went wrong there."""
    worker = idle.pop()
    worker.send(batch)
    answer = worker.recv()
    idle.append(worker)
    if isinstance(answer, UserError):
        raise answer
    return answer


def tokenize_all(batches, nprocs, encoding):
    """Yield the Results for `batches`, in order, by `nprocs` processes. Raises UserError.

    Not by a multiprocessing.Pool: its workers share one queue, and one that is killed in the
    middle of a message leaves the queue locked, so that the Pool neither works nor ends. Here
    each worker has a connection of its own, and a thread of the parent waits for its answer.
    """
    idle = start_workers(nprocs, encoding)
    threads = ThreadPoolExecutor(nprocs)
    jobs = (threads.submit(ask_worker, idle, batch) for batch in batches)
    try:
        window = deque(itertools.islice(jobs, BATCHES_PER_WORKER * nprocs))
        while window:
            yield window.popleft().result()
            window.extend(itertools.islice(jobs, 1))
    except (EOFError, ConnectionError):
        raise UserError("A worker process died, probably for lack of memory: take a smaller "
                        "--nprocs; the same command continues after the last finished "
                        "shard.") from None
    finally:
        threads.shutdown(cancel_futures=True)


# -------------------------------------------------------------------------------------- shards
@dataclasses.dataclass
class Position:
    """Where in the corpus a shard ends: after `used` tokens of a batch."""
    file: int = 0      # the batch's
    row: int = 0       # the batch's
    used: int = 0
    left_out: int = 0  # documents without text before the batch


@dataclasses.dataclass
class Shard:
    """A shard's entry in manifest.json."""
    name: str
    tokens: int
    documents: int
    end: Position

    def to_json(self):
        return {"name": self.name, "tokens": self.tokens, "documents": self.documents,
                **dataclasses.asdict(self.end)}

    @classmethod
    def from_json(cls, entry):
        """Raises KeyError and TypeError for what to_json has not made."""
        end = {f.name: operator.index(entry[f.name]) for f in dataclasses.fields(Position)}
        return cls(name=str(entry["name"]), tokens=operator.index(entry["tokens"]),
                   documents=operator.index(entry["documents"]), end=Position(**end))


def settings_of(cfg, files):
    """All that determines the shards, by name: the constants and the files."""
    settings = {"source": cfg.source, "remote_name": cfg.remote_name,
                "shard_size": cfg.shard_size, "encoding": cfg.encoding,
                "batch_bytes": BATCH_BYTES}  # a Position counts from a batch's start
    for i, (url, size) in enumerate(files.items()):
        settings[f"file {i}"] = f"{os.path.basename(url)}, {size} bytes"
    return settings


def settings_until(end, settings):
    """The part of `settings` that determines the shards up to Position `end`.

    Of the file in which the last shard ends, only the name: its unused part may have been repaired
    since, and continue_after() checks the used part. Later files do not count.
    """
    used = dict(settings)
    files = [name for name in settings if name.startswith("file ")]
    for name in files[end.file:end.file + 1]:
        used[name] = str(settings[name]).rsplit(",", 1)[0]
    for name in files[end.file + 1:]:
        del used[name]
    return used


def read_manifest(path):
    """(settings, Shards) of a manifest.json. Raises UserError."""
    try:
        manifest = json.loads(path.read_bytes())
        return dict(manifest["settings"]), [Shard.from_json(entry) for entry in manifest["shards"]]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged, so it is unknown how the shards were made: empty "
                        f"the folder, or take another --local_dir.") from None


def is_finished(path, shard):
    """Whether the file at `path` is there in its full size."""
    return path.exists() and path.stat().st_size == NPY_HEADER_BYTES + 2 * shard.tokens


def find_finished(folder, settings):
    """The Shards in `folder` that are finished. Raises UserError for those of other settings."""
    path = folder / "manifest.json"
    if not path.exists():
        if any(folder.glob("*.npy")):
            raise UserError(f"{folder}/ holds .npy files, but no manifest.json that tells how "
                            f"they were made: take another --local_dir.")
        return []
    made, shards = read_manifest(path)
    finished = list(itertools.takewhile(lambda s: is_finished(folder / s.name, s), shards))
    if len(finished) < len(shards):
        print(f"{shards[len(finished)].name} is missing or incomplete: it and all shards after it "
              f"are made again.")
    end = finished[-1].end if finished else Position()
    check_settings(folder, settings_until(end, made), settings_until(end, settings))
    return finished


def check_settings(folder, made, now):
    """Raise UserError if the shards were `made` with other settings than those of `now`."""
    changes = [f"{name} was {made.get(name, 'absent')} and is {now.get(name, 'absent')}"
               for name in {**now, **made} if made.get(name) != now.get(name)]
    if len(changes) > 3:
        changes[3:] = [f"{len(changes) - 3} more"]
    if changes:
        raise UserError(f"The shards in {folder}/ were made with other settings or files: "
                        f"{'; '.join(changes)}. Undo that, or take another --local_dir.")


def continue_after(shard, path, url, results):
    """Yield `results`, of which the first is the batch in which `shard` ends.

    path: of the shard; url: of the file that holds the batch. Raises UserError if the shard does
    not end with what the batch holds: to go on then would leave out documents or repeat them.
    """
    end = shard.end
    count = min(end.used, shard.tokens)
    known = np.fromfile(path, dtype=np.uint16, offset=path.stat().st_size - 2 * count)
    first = next(results, None)
    begins_there = first is not None and (first.file, first.row) == (end.file, end.row)
    if not begins_there or not np.array_equal(first.tokens[end.used - count:end.used], known):
        raise UserError(f"{url} does not hold, from row {end.row + 1} on, the documents with "
                        f"which {shard.name} ends: restore that file, or delete the shard to "
                        f"make it again, or take another --local_dir.")
    yield first
    yield from results


def cut_shards(results, shard_size, end, files, bars):
    """Yield (tokens, (n,) uint16; Position at their end) of each shard after Position `end`.

    files: how many there are. The last Position is behind all of them, even if the last are empty.
    """
    shard = np.empty(shard_size, dtype=np.uint16)
    filled = 0
    used = end.used
    left_out = end.left_out
    for result in results:
        while used < len(result.tokens):
            n = min(len(result.tokens) - used, shard_size - filled)
            shard[filled:filled + n] = result.tokens[used:used + n]
            used += n
            filled += n
            for bar in bars:
                bar.update(n)
            if filled == shard_size:
                yield shard, Position(result.file, result.row, used, left_out)
                filled = 0
        used = 0
        left_out += result.left_out
    if filled:
        yield shard[:filled], Position(file=files, left_out=left_out)


def write_whole(path, write):
    """Make a file by `write(file)`, under its name only once all of it is on the disk."""
    temporary = path.with_name(path.name + ".tmp")  # not found as *.npy; the next run replaces it
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def save_shard(folder, settings, shards, tokens):
    """Write the manifest of `shards`, and the last of them, `tokens`, (n,) uint16."""
    shard = shards[-1]
    entries = [each.to_json() for each in shards]
    manifest = json.dumps({"settings": settings, "shards": entries}, indent=1).encode()
    # the manifest first: without its entry a shard could not be continued, while an entry
    # without its shard counts for nothing
    write_whole(folder / "manifest.json", lambda file: file.write(manifest))
    # into a real file, np.save writes by ndarray.tofile(), which misses a full disk
    write_whole(folder / shard.name,
                lambda file: np.save(SimpleNamespace(write=file.write), tokens))
    with tqdm.external_write_mode():  # clear of the bars
        print(f"{shard.name}: {shard.tokens:,} tokens, {shard.documents:,} documents")


def open_bars(cfg, found):
    """Progress bars, on a terminal but not in a log: for the whole corpus and for a shard."""
    bar = functools.partial(tqdm, unit="tok", unit_scale=True, disable=None)
    total = cfg.max_shards * cfg.shard_size or None
    return (bar(desc="all", initial=found * cfg.shard_size, total=total),
            bar(desc="shard", total=cfg.shard_size, leave=False))


def usable_cores():
    """Cores that this process may use: in a Slurm job, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def add_shards(cfg, folder, settings, urls, shards):
    """Make the shards that follow `shards`, and append their entries. Raises UserError."""
    start = shards[-1].end if shards else Position()
    encoding = get_encoding(cfg.encoding)
    batches = read_batches(urls, start.file, start.row)
    results = tokenize_all(batches, cfg.nprocs or usable_cores(), encoding)
    if shards:
        path = folder / shards[-1].name
        results = continue_after(shards[-1], path, urls[start.file], results)
    all_bar, shard_bar = open_bars(cfg, len(shards))
    with all_bar, shard_bar:
        bars = (all_bar, shard_bar)
        for tokens, end in cut_shards(results, cfg.shard_size, start, len(urls), bars):
            name = f"edufineweb_{'train' if shards else 'val'}_{len(shards):06d}.npy"
            documents = int(np.count_nonzero(tokens == encoding.eot_token))
            shards.append(Shard(name, len(tokens), documents, end))
            save_shard(folder, settings, shards, tokens)
            shard_bar.reset()
            if len(shards) == cfg.max_shards:
                break


def make_shards(cfg, folder):
    """Make the shards that `cfg` asks for and `folder` lacks; print totals. Raises UserError."""
    start = time.perf_counter()
    files = find_files(cfg.source, cfg.remote_name)
    settings = settings_of(cfg, files)
    shards = find_finished(folder, settings)
    found = len(shards)
    enough = 0 < cfg.max_shards <= found
    corpus_is_done = found > 0 and shards[-1].end.file == len(files)
    if not enough and not corpus_is_done:
        add_shards(cfg, folder, settings, list(files), shards)
    if not shards:
        raise UserError(f"source={cfg.source} has no document with a {TEXT!r}: no shard was made.")
    print_summary(folder, shards, found, time.perf_counter() - start)


def print_summary(folder, shards, found, seconds):
    """The totals of all `shards` and the speed of this run; `found` shards are of earlier runs."""
    documents = sum(shard.documents for shard in shards)
    tokens = sum(shard.tokens for shard in shards)
    made = sum(shard.tokens for shard in shards[found:])
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}/: {documents:,} documents, {tokens:,} tokens in {len(shards)} shards, "
          f"{size / 1e9:.3f} GB; {shards[-1].end.left_out:,} documents without text were left out.")
    print(f"This run: {made:,} tokens in {seconds:.1f} s, {made / seconds / 1e6:.2f} M tokens/s.")


# -------------------------------------------------------------------------------- command line
class Output(io.FileIO):
    """A descriptor for output that drops what cannot be written: pipe closed, disk full."""

    def write(self, data):
        try:
            return super().write(data) or len(data)  # None: a full pipe that does not block
        except OSError:
            return len(data)


def protect(stream, descriptor):
    """stdout or stderr, rewrapped: lost output stops nothing, unencodable text is escaped."""
    if stream is None:  # it was closed: no file opened later may have its descriptor
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        os.set_inheritable(descriptor, True)
    encoding = stream.encoding if stream else "utf-8"
    file = io.BufferedWriter(Output(descriptor, "w", closefd=False))
    return io.TextIOWrapper(file, encoding, errors="backslashreplace", line_buffering=True)


def parse_args():
    """Config from the constants above and the command line's flags."""
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(Config), re.M))
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: sys.exit(f"fineweb.py: {message} (--help lists every flag)")
    for field in dataclasses.fields(Config):
        parser.add_argument(f"--{field.name}", type=field.type, metavar="X", default=field.default,
                            choices=("gpt2", "bytes") if field.name == "encoding" else None,
                            help=f"{comments[field.name]} [%(default)s]")
    cfg = Config(**vars(parser.parse_args()))
    for name, least in {"shard_size": MIN_SHARD_SIZE, "max_shards": 0, "nprocs": 0}.items():
        if getattr(cfg, name) < least:
            parser.error(f"{name}={getattr(cfg, name)} is too small: take {least} or more")
    if os.path.isdir(cfg.source):  # the same folder, from any current directory
        cfg.source = os.path.abspath(cfg.source)
    return cfg


def run(cfg):
    """Make the shards, as the only process in local_dir. Raises UserError."""
    folder = Path(cfg.local_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / ".lock", timeout=0):
            make_shards(cfg, folder)
    except filelock.Timeout:
        raise UserError(f"Another fineweb.py is running in {folder}/: wait for it, or take "
                        f"another --local_dir.") from None
    except MemoryError as e:
        raise user_error(e, "") from None
    except OSError as e:
        raise user_error(e, f"local_dir={folder} cannot be written ({e.strerror or e}): make room "
                            f"there or take another --local_dir; the same command continues after "
                            f"the last finished shard.") from None


def main():
    sys.stdout = protect(sys.stdout, 1)
    sys.stderr = protect(sys.stderr, 2)
    cfg = parse_args()
    try:
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # clusters send it: like Ctrl-C
        run(cfg)
    except UserError as e:
        sys.exit(f"fineweb.py: {e}")
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends it at once
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        print("\nStopped. The finished shards are kept, the same command continues after them.",
              file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
