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
    """{path or URL: bytes} of the corpus in reading order. Raises UserError."""
    if os.path.isdir(source):
        files = {str(path): path.stat().st_size for path in sorted(Path(source).rglob("*")) if path.is_file()}
    else:
        files = find_hub_files(source, remote_name)
    if files := {url: size for url, size in files.items() if url.endswith(SUFFIXES)}:
        return files
    raise UserError(f"source={source} holds no {', '.join(SUFFIXES)} files: point --source at what does.")


def find_hub_files(source, remote_name):
    """{URL: bytes} of what `datasets` would stream for this dataset and configuration. Raises UserError."""
    import datasets
    datasets.disable_progress_bars()
    logging.disable(logging.WARNING)  # or ten lines on the hub client's retries bury the one below
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    print(f"Asking {hub} for the files of {source}, {remote_name} (without a network, half a minute)", flush=True)
    try:
        urls = (datasets.load_dataset_builder(source, remote_name).config.data_files or {}).get("train", [])
        return {url: fsspec.url_to_fs(url)[0].size(url) for url in urls}
    except Exception as e:  # a lost network has another class with each HTTP library that the hub's client moves to
        raise UserError(f"source={source} is no folder here, and its remote_name={remote_name} can't be had from {hub} "
                        f"({brief(e)}): check both names and the network, or try a mirror with "
                        f"HF_ENDPOINT=https://hf-mirror.com.") from None


def unreadable(url, row, error):
    return UserError(f"{url} can't be read from row {row + 1} on ({brief(error)}): mend the file or the network; the "
                     f"same command then goes on.")


def read_batches(urls, first_file, first_row):
    """Yield the Batches of `urls` from the one at row `first_row` of file number `first_file` on. Raises UserError."""
    for file, url in enumerate(urls[first_file:], start=first_file):
        row = 0
        try:
            for payload, rows in read_parquet(url) if url.endswith(".parquet") else read_json(url):
                if file > first_file or row >= first_row:
                    yield Batch(file, url, row, payload)
                row += rows
        except Exception as e:  # ArrowInvalid, OSError, EOFError, zlib.error ..., and all that a network may raise
            raise unreadable(url, row, e) from None


def read_parquet(url):
    """Yield (a Batch's payload, its number of rows)."""
    parquet = open_parquet(url)
    for number in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(number)
        if group.total_byte_size <= MAX_GROUP_BYTES:
            yield number, group.num_rows
        else:
            rows = max(1, group.num_rows * BATCH_BYTES // group.total_byte_size)
            yield from ((part, len(part)) for part in parquet.iter_batches(rows, row_groups=[number], columns=[TEXT]))


def read_json(url):
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
    """In a worker: (batch's file, its row, tokens (n,) uint16, documents left out for want of text)."""
    texts, parts = read_texts(batch), [[]]
    with_text = [text for text in texts if text and not text.isspace()]
    for text in with_text:
        parts.append([encoding.eot_token])
        try:
            parts.append(encoding.encode_to_numpy(text))
        except ValueError:  # what looks like a special token, or a lone surrogate: this slower call takes them
            parts.append(encoding.encode_ordinary(text))
    tokens = np.concatenate(parts, dtype=np.uint16, casting="unsafe")  # ids are below 2**16
    return batch.file, batch.row, tokens, len(texts) - len(with_text)


def work(connection, encoding):
    """A worker process: answers batches until the parent is gone, by kill -9 too, since that ends the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process: the parent alone answers it
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            batch = connection.recv()
            try:
                answer = tokenize(batch, encoding)
            except UserError as e:
                answer = e
            connection.send(answer)


def tokenize_all(batches, nprocs, encoding):
    """Yield what tokenize makes of each batch, in order, by `nprocs` processes. Raises UserError."""
    # spawned, since a fork would copy the threads of the hub's client; each with a pipe of its own, since a worker
    # killed amid a message leaves a Pool's common queue locked, which then neither works nor ends
    spawn, idle = multiprocessing.get_context("spawn"), []
    for _ in range(nprocs):
        ours, theirs = spawn.Pipe()
        spawn.Process(target=work, args=(theirs, encoding), daemon=True).start()
        theirs.close()
        idle.append(ours)

    def ask_worker(batch):
        worker = idle.pop()
        worker.send(batch)
        answer = worker.recv()
        idle.append(worker)
        if isinstance(answer, UserError):
            raise answer
        return answer

    threads = ThreadPoolExecutor(nprocs)  # one to wait for each worker
    jobs = (threads.submit(ask_worker, batch) for batch in batches)
    try:
        window = deque(itertools.islice(jobs, BATCHES_PER_WORKER * nprocs))
        while window:
            yield window.popleft().result()
            window.extend(itertools.islice(jobs, 1))
    except (EOFError, ConnectionError):
        raise UserError("A worker process died, likely for want of memory: take a smaller --nprocs; the same command "
                        "goes on after the last finished shard.") from None
    finally:
        threads.shutdown(cancel_futures=True)


# ------------------------------------------------------------------------------------------------- shards
def load_shards(folder, settings):
    """The manifest's entries of the finished shards. Raises UserError for a folder made with other settings."""
    manifest = {"settings": {} if any(folder.glob("*.npy")) else settings, "shards": []}
    if (folder / "manifest.json").exists():
        try:
            manifest = json.loads((folder / "manifest.json").read_bytes())
        except ValueError:
            raise UserError(f"{folder}/manifest.json is damaged, so nobody knows how the shards were made: empty the "
                            f"folder, or take another local_dir.") from None
    made = manifest["settings"]
    if differing := [f"{name} {made.get(name, 'unknown')}, not {settings.get(name)}" for name in {**settings, **made}
                     if made.get(name) != settings.get(name)]:
        raise UserError(f"The shards in {folder}/ were made with other settings: {'; '.join(differing)[:400]}. "
                        f"Put that back, or take another --local_dir.")
    return [*itertools.takewhile(lambda shard: (folder / shard["name"]).exists(), manifest["shards"])]


def write_whole(path, write):
    """The file that `write` writes, under its name only once all of it is on the disk."""
    temporary = path.with_name(path.name + ".tmp")  # no reader of *.npy finds it; the next run writes it anew
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def save_shard(folder, settings, shards, tokens, eot, end):
    """Add `tokens`, (n,) uint16, that end at `end` (see cut_shards), to the folder and to `shards`."""
    name = f"edufineweb_{'train' if shards else 'val'}_{len(shards):06d}.npy"
    shards.append({"name": name, "tokens": len(tokens), "documents": int(np.count_nonzero(tokens == eot)), **end})
    # the manifest comes first: an entry without a shard counts for nothing, a shard without an entry is a dead end
    manifest = json.dumps({"settings": settings, "shards": shards}, indent=1).encode()
    write_whole(folder / "manifest.json", lambda file: file.write(manifest))
    # given a true file, np.save writes past Python and can't tell a full disk
    write_whole(folder / name, lambda file: np.save(SimpleNamespace(write=file.write), tokens))
    with tqdm.external_write_mode():  # clear of the bars, and at once, since people tail log files
        print(f"{name}: {len(tokens):,} tokens, {shards[-1]['documents']:,} documents", flush=True)


def cut_shards(results, shard_size, end, bars):
    """Yield (tokens, (n,) uint16; where they end) of each shard after `end`, from what tokenize_all yields."""
    # an end: `used` tokens after row `row` of file number `file`, `left_out` documents without text before that row
    shard, filled, used, left_out = np.empty(shard_size, dtype=np.uint16), 0, end["used"], end["left_out"]
    for file, row, tokens, without_text in results:
        while used < len(tokens):
            n = min(len(tokens) - used, shard_size - filled)
            shard[filled:filled + n] = tokens[used:used + n]
            used, filled = used + n, filled + n
            for bar in bars:
                bar.update(n)
            if filled == shard_size:
                yield shard, {"file": file, "row": row, "used": used, "left_out": left_out}
                filled = 0
        used, left_out = 0, left_out + without_text
    if filled:
        yield shard[:filled], {"file": file + 1, "row": 0, "used": 0, "left_out": left_out}


def make_shards(cfg, folder):
    """Make what `folder` lacks of the shards that `cfg` asks for, and sum up. Raises UserError."""
    start, files = time.perf_counter(), find_files(cfg.source, cfg.remote_name)
    settings = {name: getattr(cfg, name) for name in ("source", "remote_name", "shard_size", "encoding")}
    settings |= {"batch_bytes": BATCH_BYTES}  # a run goes on at the start of an earlier run's batch
    settings |= {f"file {i}": f"{os.path.basename(url)}, {size} bytes" for i, (url, size) in enumerate(files.items())}
    shards = load_shards(folder, settings)
    found, end = len(shards), shards[-1] if shards else {"file": 0, "row": 0, "used": 0, "left_out": 0}
    if end["file"] < len(files) and not 0 < cfg.max_shards <= found:
        encoding, batches = get_encoding(cfg.encoding), read_batches([*files], end["file"], end["row"])
        bar = functools.partial(tqdm, unit="tok", unit_scale=True, disable=None)  # None: on a terminal, not in a log
        results = tokenize_all(batches, cfg.nprocs or os.cpu_count(), encoding)
        with (bar(desc="all", initial=found * cfg.shard_size, total=cfg.max_shards * cfg.shard_size or None) as whole,
              bar(desc="shard", total=cfg.shard_size, leave=False) as part):
            for tokens, end in cut_shards(results, cfg.shard_size, end, (whole, part)):
                save_shard(folder, settings, shards, tokens, encoding.eot_token, end)
                part.reset()
                if len(shards) == cfg.max_shards:
                    break
    if not shards:
        raise UserError(f"source={cfg.source} has no document with a {TEXT!r}: no shard was made.")
    documents, tokens, made = (sum(shard[what] for shard in some) for what, some in (
        ("documents", shards), ("tokens", shards), ("tokens", shards[found:])))
    size, seconds = sum(path.stat().st_size for path in folder.iterdir()), time.perf_counter() - start
    print(f"{folder}/: {documents:,} documents, {tokens:,} tokens in {len(shards)} shards, {size / 1e9:.3f} GB; "
          f"{shards[-1]['left_out']:,} documents without text were left out.\n"
          f"This run: {made:,} tokens in {seconds:.1f} s, {made / seconds / 1e6:.2f} M tokens/s.")


# ------------------------------------------------------------------------------------------------- run
def parse_args():
    """Config from the constants above and the command line's flags."""
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(Config), re.M))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.error = lambda message: sys.exit(f"fineweb.py: {message} (--help lists every flag)")
    for field in dataclasses.fields(Config):
        parser.add_argument(f"--{field.name}", type=field.type, metavar="X", default=field.default,
                            choices=("gpt2", "bytes") if field.name == "encoding" else None,
                            help=f"{comments[field.name]} [%(default)s]")
    cfg = Config(**vars(parser.parse_args()))
    for name, least in {"shard_size": MIN_SHARD_SIZE, "max_shards": 0, "nprocs": 0}.items():
        if getattr(cfg, name) < least:
            parser.error(f"{name}={getattr(cfg, name)} is too small: take {least} or more")
    if os.path.isdir(cfg.source):  # the same folder, from wherever the command is given
        cfg.source = os.path.abspath(cfg.source)
    return cfg


def main():
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what clusters send gets the same answer as Ctrl-C
    cfg = parse_args()
    folder = Path(cfg.local_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / ".lock", timeout=0):
            make_shards(cfg, folder)
    except filelock.Timeout:
        sys.exit(f"fineweb.py: Another fineweb.py is at work in {folder}/: wait, or take another --local_dir.")
    except OSError as e:
        sys.exit(f"fineweb.py: local_dir={folder} can't be written ({e}): make room there, and the same command goes "
                 f"on after the last finished shard, or take another --local_dir.")
    except (UserError, MemoryError) as e:
        sys.exit(f"fineweb.py: {e}")
    except KeyboardInterrupt:
        print("\nStopped. The finished shards stand, the same command goes on after them.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
