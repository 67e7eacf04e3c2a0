"""FineWeb-Edu to token shards: documents in, edu_fineweb10B/*.npy out, what train_gpt2.py reads.

    python fineweb.py                                           # sample-10BT: 100 shards of 100 M tokens, 20 GB
    python fineweb.py --max_shards=10                           # 1 B tokens first; later runs go on from there
    python fineweb.py --source=my_texts --local_dir=my_shards   # a folder of .parquet, .jsonl or .jsonl.gz files
    HF_ENDPOINT=https://hf-mirror.com python fineweb.py         # through a mirror of the Hugging Face hub

Stopped at any moment, the same command goes on after the last finished shard; the bytes depend neither on stops nor on
nprocs. Documents are streamed: no copy of the corpus lands on disk. A shard is a 1-D uint16 array: <|endoftext|> before
every document, documents run on across shards, shard 0 is for validation, the last may be shorter.
Top to bottom: constants, documents, tokens, the shards' folder, the run, command line.
"""
import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import gzip
import inspect
import io
import itertools
import json
import multiprocessing
import os
import posixpath
import re
import signal
import sys
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import tiktoken
from tqdm import tqdm


# ------------------------------------------------------------------------------------------------- constants
@dataclasses.dataclass(frozen=True)
class Config:
    """Each is also a flag. Only max_shards and nprocs may change while local_dir holds shards."""
    source: str = "HuggingFaceFW/fineweb-edu"  # a dataset on the Hugging Face hub, or a local folder
    remote_name: str = "sample-10BT"           # the hub dataset's configuration: sample-100BT, sample-350BT ...
    local_dir: str = "edu_fineweb10B"          # folder the shards go to
    shard_size: int = 100_000_000              # tokens per shard, at 2 bytes each
    max_shards: int = 0                        # stop at this many shards, the validation shard included; 0 = never
    nprocs: int = 0                            # worker processes; 0 = one per core
    encoding: str = "gpt2"                     # "gpt2", or "bytes" (a token per byte, needs no download)


TEXT = "text"                # the column (parquet) or key (JSON) that holds a document
SPLIT = "train"              # the split of a hub dataset
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
MANIFEST = "manifest.json"   # in local_dir: what the shards were made from, and where in the corpus each ends
MIN_SHARD_SIZE = 1025        # tokens: a row of train_gpt2.py at T=1024 and the token after it
BATCH_BYTES = 8 << 20        # text handed to a worker at a time: half a second's work, so handing it over costs nothing
MAX_GROUP_BYTES = 64 << 20   # a parquet row group above this is cut into batches (FineWeb-Edu's hold about 5 MB)
MAX_NPROCS = 61 if sys.platform == "win32" else 1024  # Windows waits for 63 things at most, two of them not workers
BATCHES_PER_WORKER = 3       # at work or waiting for their turn; with the two above it bounds the memory


class UserError(Exception):
    """Something the person at the keyboard can mend; its text is the one line they are shown."""


def brief(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"


# ------------------------------------------------------------------------------------------------- documents
class Batch(NamedTuple):
    """Consecutive documents of a file; where it can be, a mere reference, so that workers do the reading."""
    file: int        # number of the file in the corpus
    path: str
    row: int         # number of the first document in the file
    payload: object  # a parquet row group's number, a RecordBatch out of one too big for that, or bytes of JSON lines
    share: float     # of the corpus' bytes, up to the end of this batch


def find_files(source, remote_name):
    """(fsspec file system, [(path, bytes)]) of the corpus in reading order. Raises UserError."""
    from fsspec.core import url_to_fs
    if os.path.isdir(source):
        fs, folder = url_to_fs(os.path.abspath(source))
        paths = sorted(path for path in fs.find(folder) if path.endswith(SUFFIXES))
    elif re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", source):
        urls = find_urls(source, remote_name)
        fs = url_to_fs(urls[0])[0]
        paths = [url_to_fs(url)[1] for url in urls if url.endswith(SUFFIXES)]
    else:
        raise UserError(f"source={source} is neither a folder here nor the name of a dataset on the hub.")
    if not paths:
        raise UserError(f"source={source} holds no {', '.join(SUFFIXES)} files: point --source at what does.")
    return fs, [(path, fs.size(path)) for path in paths]


def find_urls(source, remote_name):
    """URLs of the files that `datasets` would stream for this dataset and configuration. Raises UserError."""
    import datasets
    import huggingface_hub
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    huggingface_hub.utils.logging.set_verbosity_error()  # or ten lines on its retries bury the one below
    hub = huggingface_hub.constants.ENDPOINT
    say(f"Asking {hub} for the files of {source}, {remote_name} (without a network, half a minute)")
    try:
        files = datasets.load_dataset_builder(source, remote_name).config.data_files
    except datasets.exceptions.DatasetNotFoundError as e:
        raise UserError(f"source={source} is no folder here, and not to be had from {hub}: {brief(e)}") from None
    except (ValueError, FileNotFoundError, RuntimeError) as e:
        raise UserError(f"remote_name={remote_name} of source={source} can't be read: {brief(e)}") from None
    except Exception as e:  # a lost network has another class with each HTTP library that huggingface_hub moves to
        raise UserError(f"{hub} can't be reached for source={source} ({brief(e)}): check the network, try a mirror "
                        f"with HF_ENDPOINT=https://hf-mirror.com, or take a local folder.") from None
    if not files or SPLIT not in files:
        raise UserError(f"source={source}, remote_name={remote_name} has no {SPLIT!r} split, only {[*(files or ())]}.")
    return files[SPLIT]


def read_batches(fs, files, file, row):
    """Yield the Batches of `files` ([(path, bytes)]) from row `row` of file number `file` on."""
    sizes = [size for _, size in files]
    for number in range(file, len(files)):
        path, size = files[number]
        batches = parquet_batches if path.endswith(".parquet") else json_batches
        for first, payload, share in batches(fs, path, row if number == file else 0):
            yield Batch(number, path, first, payload, (sum(sizes[:number]) + share * size) / sum(sizes))


def parquet_batches(fs, path, row):
    """Yield (first row, row group's number or RecordBatch, share of the file) from row `row` on."""
    parquet = open_parquet(fs, path)
    end = 0
    for number in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(number)
        first, end = end, end + group.num_rows
        if row <= first and group.total_byte_size <= MAX_GROUP_BYTES:
            yield first, number, end / parquet.metadata.num_rows
        elif row < end:
            rows = max(1, group.num_rows * BATCH_BYTES // group.total_byte_size)
            pieces = parquet.iter_batches(rows, row_groups=[number], columns=[TEXT], use_threads=False)
            while (piece := readable(path, first, next, pieces, None)) is not None:
                skip = max(row - first, 0)
                if skip < len(piece):
                    yield first + skip, piece.slice(skip), (first + len(piece)) / parquet.metadata.num_rows
                first += len(piece)


def json_batches(fs, path, row):
    """Yield (first row, bytes of whole lines, share of the file) from row `row` on; every line is a row."""
    with fs.open(path, "rb") as raw:
        lines = gzip.open(raw) if path.endswith(".gz") else io.BufferedReader(raw)
        readable(path, 0, deque, itertools.islice(lines, row), 0)  # skips what the finished shards hold
        while block := readable(path, row, lines.readlines, BATCH_BYTES):
            yield row, b"".join(block), raw.tell() / fs.size(path)
            row += len(block)


@functools.lru_cache(maxsize=1)
def open_parquet(fs, path):
    """The parquet file, its footer read. Raises UserError where it is damaged or has no such texts."""
    import pyarrow.parquet as pq
    # no cache: it reads ahead, and what follows a row group is another worker's, so would be downloaded for nothing;
    # no pre-buffering: it would hold a big row group whole
    parquet = readable(path, 0, lambda: pq.ParquetFile(fs.open(path, "rb", cache_type="none"), pre_buffer=False,
                                                       buffer_size=BATCH_BYTES, page_checksum_verification=True))
    types = {field.name: str(field.type) for field in parquet.schema_arrow}
    if types.get(TEXT) not in ("string", "large_string"):
        raise UserError(f"{path} has no column {TEXT!r} of strings; it has {types}.")
    return parquet


def readable(path, row, read, *args):
    """read(*args); whatever goes wrong there becomes a UserError with the file and the row."""
    try:
        return read(*args)
    except Exception as e:  # damage is an ArrowInvalid, OSError, EOFError, zlib.error ...; the network see find_urls
        raise UserError(f"{path} can't be read from row {row + 1} on ({brief(e)}): mend the file or the network; the "
                        f"same command then goes on.") from None


def read_documents(fs, batch):
    """The texts of a batch, str or None each. Raises UserError with file and row of what is damaged."""
    import pyarrow as pa
    if isinstance(batch.payload, bytes):
        lines = enumerate(batch.payload.split(b"\n"), start=batch.row + 1)
        return [read_line(batch.path, row, line) for row, line in lines if line.strip()]
    table = batch.payload
    if isinstance(table, int):
        read_row_group = open_parquet(fs, batch.path).read_row_group
        table = readable(batch.path, batch.row, lambda: read_row_group(batch.payload, [TEXT], use_threads=False))
    # as bytes, since not every parquet "string" is valid UTF-8
    return [text and text.decode("utf-8", "replace") for text in table[TEXT].cast(pa.large_binary()).to_pylist()]


def read_line(path, row, line):
    """The text of a line of JSON, None where it has none. Raises UserError."""
    try:
        text = json.loads(line).get(TEXT)
    except (ValueError, AttributeError, RecursionError) as e:
        raise UserError(f"{path}, row {row} is not a JSON object ({brief(e)}): mend or delete that line.") from None
    if not isinstance(text, str | None):
        raise UserError(f"{path}, row {row} has a {TEXT!r} that is not a string: mend or delete that line.")
    return text


# ------------------------------------------------------------------------------------------------- tokens
WORKER_DIED = "A worker process died, likely for want of memory: take a smaller --nprocs; the same command goes on."
worker = SimpleNamespace()  # a worker process' own encoding and file system, set once by start_worker


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


def encode(encoding, text):
    """Tokens of `text`, (n,); what looks like a special token is ordinary text here."""
    if "<|endoftext|>" not in text:  # which tiktoken 0.9's encode_to_numpy takes for the special token in any case
        with contextlib.suppress(UnicodeEncodeError):  # a lone surrogate, from JSON: encode_ordinary replaces it
            return encoding.encode_to_numpy(text, disallowed_special=())
    return np.array(encoding.encode_ordinary(text), dtype=np.uint32)


def tokenize(batch):
    """In a worker: (tokens, (n,) uint16, <|endoftext|> before each document; documents left out for want of text)."""
    texts = read_documents(worker.fs, batch)
    eot = np.array([worker.encoding.eot_token])
    parts = [(eot, encode(worker.encoding, text)) for text in texts if text and not text.isspace()]
    tokens = np.concatenate([eot[:0], *itertools.chain(*parts)], dtype=np.uint16, casting="unsafe")  # ids are < 2**16
    return tokens, len(texts) - len(parts)


def start_worker(encoding, fs):
    def exit_with_parent():
        multiprocessing.parent_process().join()  # returns when the parent is gone, by kill -9 too
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process: the parent alone answers it
    threading.Thread(target=exit_with_parent, daemon=True).start()
    worker.encoding, worker.fs = encoding, fs


def wait_for(result, workers):
    """The value of a future; ends the program where a worker was killed while it sent one.

    Then the pool, and so its shutdown too, would wait for the rest of the message for ever.
    """
    while True:
        try:
            return result.result(timeout=1)
        except concurrent.futures.TimeoutError:
            if not all(process.is_alive() for process in workers):
                print(f"fineweb.py: {WORKER_DIED}", file=sys.stderr, flush=True)
                os._exit(1)


def tokenize_all(batches, nprocs, encoding, fs):
    """Yield (batch, tokens, documents left out) in the order of `batches`, by `nprocs` processes. Raises UserError."""
    # spawned on every system: a fork would copy the hub client's threads and sockets in the midst of their work
    pool = ProcessPoolExecutor(nprocs, multiprocessing.get_context("spawn"), start_worker, (encoding, fs))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited, so that no worker answers Ctrl-C even while ...
    for _ in range(nprocs):
        pool.submit(os.getpid)  # ... it starts, which it does at its first job
    signal.signal(signal.SIGINT, before)
    workers = multiprocessing.active_children()
    window = deque()  # results in order; no more than this wait, however fast the workers are
    try:
        for batch in batches:
            window.append((batch, pool.submit(tokenize, batch)))
            if len(window) == BATCHES_PER_WORKER * nprocs:
                batch, result = window.popleft()
                yield batch, *wait_for(result, workers)
        for batch, result in window:
            yield batch, *wait_for(result, workers)
    except BrokenProcessPool:
        raise UserError(WORKER_DIED) from None
    finally:
        pool.shutdown(cancel_futures=True)


# ------------------------------------------------------------------------------------------------- the shards' folder
def load_shards(folder, settings):
    """[{"name", "tokens", "documents", "end"}] of the finished shards, in order. Raises UserError.

    "end": a shard ends `tokens` tokens after the start of row `row` of file number `file`, and `left_out` documents
    without text lie before that row. Refuses a folder that was made with other settings, and clears a kill's leftovers.
    """
    path = folder / MANIFEST
    if not path.exists() and any(folder.glob("*.npy")):
        raise UserError(f"{folder}/ holds .npy files but no {MANIFEST} to say what they were made from: move them "
                        f"away, or take another --local_dir.")
    try:
        manifest = json.loads(path.read_bytes()) if path.exists() else {"settings": settings, "shards": []}
        made, shards = manifest["settings"], manifest["shards"]
        differing = [f"{name} {made.get(name)}, not {settings.get(name)}" for name in {**made, **settings}
                     if made.get(name) != settings.get(name)]
        files = [folder / shard["name"] for shard in shards]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{path} is damaged ({brief(e)}): delete {folder}/ and start anew.") from None
    if differing:
        raise UserError(f"The shards in {folder}/ were made from something else: {'; '.join(differing)[:400]}. "
                        f"Put that back, or take another --local_dir.")
    for file in files:
        if not file.exists() and temporary(file).exists():  # killed before the last step of save_shard
            os.replace(temporary(file), file)
    for leftover in folder.glob("*.tmp"):
        leftover.unlink()
    return shards[:sum(1 for _ in itertools.takewhile(Path.exists, files))]


def temporary(path):
    return path.with_name(path.name + ".tmp")  # a name that no reader of *.npy finds


def write_temporary(path, *chunks):
    """Bytes to the disk, under the name that os.replace then turns into `path`. Raises UserError, leaving nothing."""
    try:
        with open(temporary(path), "wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        temporary(path).unlink(missing_ok=True)
        raise UserError(f"{path} can't be written ({e.strerror}): make room there; the same command then goes on after "
                        f"the last finished shard.") from None


def save_shard(folder, settings, shards, tokens, eot, end):
    """Add `tokens`, (n,) uint16, to the folder and to `shards`, whole or not at all. Raises UserError.

    `end` says where they end, see load_shards. The manifest comes before the shard's name: load_shards can give a
    finished shard its name, but for one that has a name and no entry it would not know where to go on.
    """
    name = f"edufineweb_{'train' if shards else 'val'}_{len(shards):06d}.npy"
    header = io.BytesIO()  # np.save itself can't tell a full disk, since it writes past Python's file object
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(tokens))
    write_temporary(folder / name, header.getvalue(), tokens.data)
    documents = int(np.count_nonzero(tokens == eot))
    shards.append({"name": name, "tokens": len(tokens), "documents": documents, "end": end})
    write_temporary(folder / MANIFEST, json.dumps({"settings": settings, "shards": shards}, indent=1).encode())
    os.replace(temporary(folder / MANIFEST), folder / MANIFEST)
    os.replace(temporary(folder / name), folder / name)
    say(f"{name}: {len(tokens):,} tokens, {documents:,} documents")


def lock(folder):
    """The lock that keeps a second fineweb.py out of `folder`, which is made if need be. Raises UserError."""
    import filelock  # comes with datasets
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = filelock.FileLock(folder / ".lock")
        held.acquire(timeout=0)
    except filelock.Timeout:
        raise UserError(f"Another fineweb.py is at work in {folder}/: wait, or take another --local_dir.") from None
    except OSError as e:
        raise UserError(f"local_dir={folder} can't be written ({e.strerror}): take another --local_dir.") from None
    return held


# ------------------------------------------------------------------------------------------------- the run
def cut_shards(results, shard_size, end, progress):
    """Yield (tokens of a shard, (n,) uint16, and where it ends) from the results of tokenize_all after `end`."""
    shard, filled = np.empty(shard_size, dtype=np.uint16), 0
    used, left_out = end["tokens"], end["left_out"]  # `used`: tokens of the batch at hand that already are in shards
    for batch, tokens, without_text in results:
        while used < len(tokens):
            n = min(len(tokens) - used, shard_size - filled)
            shard[filled:filled + n] = tokens[used:used + n]
            used, filled = used + n, filled + n
            progress(n, batch.share)
            if filled == shard_size:
                yield shard, {"file": batch.file, "row": batch.row, "tokens": used, "left_out": left_out}
                filled = 0
        used, left_out = 0, left_out + without_text
    if filled:
        yield shard[:filled], {"file": batch.file + 1, "row": 0, "tokens": 0, "left_out": left_out}


def make_shards(cfg, folder):
    """Make what `folder` lacks of the shards that `cfg` asks for. Raises UserError.

    Returns all the shards' entries (see load_shards) and the number of tokens made now.
    """
    fs, files = find_files(cfg.source, cfg.remote_name)
    root = posixpath.commonpath([posixpath.dirname(path) for path, _ in files])  # on the hub it holds the revision
    settings = {"source": cfg.source, "remote_name": cfg.remote_name, "shard_size": cfg.shard_size,
                "encoding": cfg.encoding, **{f"{posixpath.relpath(path, root)}, bytes": size for path, size in files}}
    shards = load_shards(folder, settings)
    end = shards[-1]["end"] if shards else {"file": 0, "row": 0, "tokens": 0, "left_out": 0}
    if end["file"] == len(files) or 0 < cfg.max_shards <= len(shards):
        return shards, 0
    found = len(shards)
    encoding = get_encoding(cfg.encoding)
    batches = read_batches(fs, files, end["file"], end["row"])
    bar = functools.partial(tqdm, unit="tok", unit_scale=True, disable=None)  # None: on a terminal, not in a log file
    with contextlib.closing(tokenize_all(batches, cfg.nprocs, encoding, fs)) as results, \
            bar(desc="corpus", initial=len(shards) * cfg.shard_size) as whole, \
            bar(desc="shard", total=cfg.shard_size, leave=False) as part:
        def progress(n, share):
            whole.total = min((whole.n + n) / share, cfg.max_shards * cfg.shard_size or float("inf"))
            whole.update(n)
            part.update(n)

        for tokens, end in cut_shards(results, cfg.shard_size, end, progress):
            save_shard(folder, settings, shards, tokens, encoding.eot_token, end)
            part.reset()
            if len(shards) == cfg.max_shards:
                break
    if not shards:
        raise UserError(f"source={cfg.source} has no document with a {TEXT!r}: no shard was made.")
    return shards, sum(shard["tokens"] for shard in shards[found:])


# ------------------------------------------------------------------------------------------------- command line
class Parser(argparse.ArgumentParser):
    def error(self, message):
        sys.exit(f"fineweb.py: {message} (--help lists every flag)")


def parse_args():
    """Config from the constants above and the command line's flags. Raises UserError for a value no run could use."""
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(Config), re.M))
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    for field in dataclasses.fields(Config):
        parser.add_argument(f"--{field.name}", type=field.type, metavar="X", default=field.default,
                            help=f"{comments[field.name]} [%(default)s]")
    cfg = Config(**vars(parser.parse_args()))
    if cfg.shard_size < MIN_SHARD_SIZE:
        raise UserError(f"shard_size={cfg.shard_size} is less than a row of training: take {MIN_SHARD_SIZE} or more.")
    if cfg.max_shards < 0 or not 0 <= cfg.nprocs <= MAX_NPROCS:
        raise UserError(f"max_shards={cfg.max_shards} must be 0 or more, nprocs={cfg.nprocs} from 0 to {MAX_NPROCS}.")
    if cfg.encoding not in ("gpt2", "bytes"):
        raise UserError(f'encoding="{cfg.encoding}" is not known: take "gpt2" or "bytes".')
    if not cfg.nprocs:
        cores = getattr(os, "process_cpu_count", os.cpu_count)()  # the former, of Python 3.13, knows of limits
        cfg = dataclasses.replace(cfg, nprocs=min(cores, MAX_NPROCS))
    if os.path.isdir(cfg.source):  # the same folder, from wherever the command is given
        cfg = dataclasses.replace(cfg, source=os.path.abspath(cfg.source), remote_name="")
    return cfg


def say(line):
    with tqdm.external_write_mode():  # clear of the bars, and at once, since people tail log files
        print(line, flush=True)


def summarize(folder, shards, made, seconds):
    documents, tokens = (sum(shard[what] for shard in shards) for what in ("documents", "tokens"))
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}/: {documents:,} documents, {tokens:,} tokens in {len(shards)} shards, {size / 1e9:.3f} GB; "
          f"{shards[-1]['end']['left_out']:,} documents without text were left out.")
    print(f"This run: {made:,} tokens in {seconds:.1f} s, {made / seconds / 1e6:.2f} M tokens/s.")
    if len(shards) == 1:
        print("All of it is for validation: to train on it, take a smaller --shard_size or a greater --max_shards.")


def main():
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what clusters send gets the same answer as Ctrl-C
    start = time.perf_counter()
    try:
        cfg = parse_args()
        held = lock(folder := Path(cfg.local_dir))
        shards, made = make_shards(cfg, folder)
        held.release()
    except UserError as e:
        sys.exit(f"fineweb.py: {e}")
    except MemoryError:
        sys.exit(f"fineweb.py: The memory does not suffice: lower shard_size={cfg.shard_size} or nprocs={cfg.nprocs}.")
    except KeyboardInterrupt:
        print("\nStopped. The finished shards stand, the same command goes on after them.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    summarize(folder, shards, made, time.perf_counter() - start)


if __name__ == "__main__":
    main()
