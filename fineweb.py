"""FineWeb-Edu to token shards: documents in, edu_fineweb10B/*.npy out.

    python fineweb.py                  # sample-10BT, 100 shards of 100 M tokens
    python fineweb.py --max_shards=10  # 1 B tokens; a later run continues there
    python fineweb.py --source=my_texts --local_dir=my_shards   # a local folder

Documents are streamed, never stored. A shard is a 1-D array of token ids with
<|endoftext|> before each document: uint16, or uint32 if the encoding has more
than 65,536 ids. Documents may span shards. Shard 0 is for validation. Stopped
at any moment, the same command goes on, to the same bytes.

The section below Config is what all three scripts share.
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
import textwrap
import threading
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import tiktoken
from tqdm import tqdm

@dataclasses.dataclass
class Config:
    """Each is also a flag. Only max_shards and nprocs may change while local_dir holds shards."""
    source: str = "HuggingFaceFW/fineweb-edu"  # hub dataset, or folder of parquet or jsonl files
    remote_name: str = "sample-10BT"           # the hub dataset's configuration
    local_dir: str = "edu_fineweb10B"          # folder for the shards
    shard_size: int = 100_000_000              # tokens per shard, of 2 bytes each (uint32: 4)
    max_shards: int = 0                        # number of shards, validation included; 0 = all
    nprocs: int = 0                            # worker processes; 0 = one per core
    encoding: str = "gpt2"                     # any of tiktoken's; bytes needs no download

TEXT = "text"                # the column (parquet) or key (JSON) that holds a document
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
BATCH_BYTES = 2 << 20        # text per batch; with 64 KiB, a corpus takes 15 % more time

# ---------------------------------------------------------------- what all three scripts share
class UserError(Exception):
    """A mistake that the user can correct; its text is the one line that is printed."""

def first_line(error):
    """What a library's error says first, cut between words to at most 160 characters."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = lines[1] if lines[0].endswith(":") and len(lines) > 1 else lines[0]  # a mere heading
    return textwrap.shorten(line.rstrip(".: "), width=160, placeholder=" ...")

def encoding_parts(name):
    """What a tiktoken.Encoding is made of. A tokenizer of your own is one more case here."""
    if name == "bytes":  # pat_str cuts texts before merging; bytes merge nothing, so any cut does
        return dict(name=name, pat_str=r"(?s:.{1,128})", special_tokens={"<|endoftext|>": 256},
                    mergeable_ranks={bytes([i]): i for i in range(256)})
    from tiktoken_ext.openai_public import ENCODING_CONSTRUCTORS
    if name not in ENCODING_CONSTRUCTORS:
        raise UserError(f"encoding={name} is none of bytes, {', '.join(ENCODING_CONSTRUCTORS)}.")
    return ENCODING_CONSTRUCTORS[name]()

@functools.lru_cache  # without it, 10,042 HellaSwag questions take 63 s of CPU, not 3
def get_encoding(name):
    """The tiktoken.Encoding with that name. Raises UserError."""
    try:
        encoding = tiktoken.Encoding(**encoding_parts(name))
    except (OSError, ValueError) as e:  # the download failed, or came damaged
        raise UserError(f"encoding={name} has no vocabulary ({first_line(e)}): go online once, "
                        f"point TIKTOKEN_CACHE_DIR to it, or take --encoding=bytes.") from None
    if "<|endoftext|>" not in encoding.special_tokens_set:
        raise UserError(f"encoding={name} lacks the special token <|endoftext|>: it begins texts.")
    return encoding

# Text on which tokenizers differ: hugging_face_tokenizer() compares its ids with tiktoken's
PROBE = "Don't stop . it's\n\n\t 'LL we'Ll naïve 日本 🙂  1234567 x=[1, 2];\r\n return !?\n \n"

def hugging_face_tokenizer(encoding, context):
    """A tiktoken encoding as a transformers tokenizer. Raises ValueError."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode, generate_merges
    parts, letters = encoding_parts(encoding.name), bytes_to_unicode()  # a letter for each byte
    ids = {"".join(letters[byte] for byte in token): i
           for token, i in parts["mergeable_ranks"].items()}
    scores = {token: -i for token, i in ids.items()}  # the highest is merged first: the lowest id
    merges = generate_merges(ids, scores)
    special = {i: token for token, i in parts["special_tokens"].items()}
    for i in set(range(encoding.n_vocab)) - set(ids.values()):  # special, or cl100k_base's unused
        token = special.setdefault(i, f"<|unused{i}|>")
        ids[token] = i
    backend = Tokenizer(models.BPE(ids, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if merges:  # bytes need no pieces
        # tiktoken's patterns have a possessive + after each }, as in \p{L}++ and {1,3}+. Drop it:
        # to the library tokenizers, {1,3}+ is a repeat of {1,3}
        pieces = pre_tokenizers.Split(Regex(parts["pat_str"].replace("}+", "}")), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([pieces, backend.pre_tokenizer])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(special[i], normalized=False) for i in sorted(special)])
    if backend.encode(PROBE).ids != encoding.encode_ordinary(PROBE):
        raise ValueError(f"it has no {encoding.name} tokenizer")
    end = special[encoding.eot_token]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=end, eos_token=end, unk_token=end,
        model_max_length=context, clean_up_tokenization_spaces=False)

def token_dtype(encoding):
    """The NumPy type that its ids are stored in."""
    return np.uint16 if encoding.n_vocab <= 2**16 else np.uint32

def write_whole(path, write, verify=None):
    """write(file) under a temporary name, flush it to the disk, verify(its path), rename it."""
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(part, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if verify:
            verify(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)

def remove_parts(folder):
    """Delete what write_whole() left in a locked folder when its process was killed."""
    for part in Path(folder).glob("*.*.part"):  # shard.npy.part, not somebody's movie.part
        part.unlink()

def lock_folder(folder):
    """Have `folder` alone: keep what this returns, as long as need be. Raises UserError."""
    import filelock  # torch and datasets depend on it
    lock = filelock.FileLock(Path(folder, ".lock"))
    try:
        lock.acquire(timeout=0)  # the system frees it, however this process ends
    except filelock.Timeout:
        raise UserError(f"Another run uses {folder}/: wait, or name another folder.") from None
    except (NotImplementedError, OSError) as e:  # some network disks have no locks
        print(f"{folder}/ cannot be locked ({first_line(e)}): no other run may write there.")
    return lock

def parse_flags(cls, doc, presets=None):
    """{name: text} of the flags given. --help shows the comments in cls, defaults, and presets."""
    parser = argparse.ArgumentParser(description=doc, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    help_texts = dict(re.findall(r"^ +(\w+) *:[^#\n]*# *(.*)$", inspect.getsource(cls), re.M))
    for field in dataclasses.fields(cls):
        values = [repr(field.default)]
        for preset, constants in (presets or {}).items():
            if field.name in constants:
                values.append(f"in {preset} {constants[field.name]!r}")
        text = f"{help_texts.get(field.name)} [{', '.join(values)}]".replace("%", "%%")
        parser.add_argument(f"--{field.name}", default=argparse.SUPPRESS, help=text,
                            metavar="|".join(map(str, get_args(field.type))) or "X")

    def refuse(message):
        raise UserError(f"{message} (--help lists every flag).")
    parser.error = refuse
    return vars(parser.parse_args())

def make_config(cls, values):
    """cls(**values), each value as its annotation says. Raises UserError."""
    for name in [*vars(cls), *values]:  # a constant without a type is no field, and has no flag
        if not name.startswith("_") and name not in cls.__annotations__:
            raise UserError(f"{name} is mistyped, or lacks a type in Config ({name}: int = 1).")
    values = {field.name: field.default for field in dataclasses.fields(cls)} | values
    must_be = {bool: "True or False", int: "a whole number >= 0", float: "a finite number >= 0"}
    for name, kind in cls.__annotations__.items():
        value = values[name]
        try:
            values[name] = typed(value, kind)
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{name}={value}: it must be {must_be.get(kind, kind)}.") from None
    return cls(**values)

def typed(value, kind):
    """`value`, perhaps a text as 1e3, as one of `kind`; KeyError or ValueError if it is none."""
    if kind is bool:
        return {"True": True, "False": False}[str(value).capitalize()]
    if kind in (int, float):
        number = float(value)
        if not 0 <= number < float("inf") or (kind is int and not number.is_integer()):
            raise ValueError
        return kind(number)
    if kind is str:
        return str(value)
    return {str(choice): choice for choice in get_args(kind)}[str(value)]  # a Literal; or KeyError

# ----------------------------------------------------------------------------------- documents
def find_files(source, remote_name):
    """[(path or URL, size in bytes)] of the corpus in reading order. Raises UserError."""
    if os.path.isdir(source):
        paths = [path for path in sorted(Path(source).rglob("*")) if path.is_file()]
        files = [(str(path), path.stat().st_size) for path in paths]
    else:
        files = find_hub_files(source, remote_name)
    return [(url, size) for url, size in files if url.endswith(SUFFIXES)]

def find_hub_files(source, remote_name):
    """[(URL, size in bytes)] of what `datasets` would stream. Raises UserError."""
    import datasets
    import fsspec
    logging.disable(logging.CRITICAL)  # the hub client's lines on each new attempt
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    print(f"Asking {hub} for {source}, {remote_name} (half a minute, if there is no network)")
    try:
        builder = datasets.load_dataset_builder(source, remote_name)
        urls = (builder.config.data_files or {}).get("train", [])
        return [(url, fsspec.url_to_fs(url)[0].size(url)) for url in urls]
    except Exception as e:  # which class it has depends on the client's HTTP library
        raise UserError(f"source={source} is not a folder here, and its remote_name={remote_name} "
                        f"cannot be fetched from {hub} ({first_line(e)}): check both names and the "
                        f"network, or try a mirror: HF_ENDPOINT=https://hf-mirror.com.") from None

def read_batches(urls, start):
    """Yield (file, row, texts): batches of rows from the place `start` on. Raises UserError."""
    import fsspec  # datasets and torch depend on it
    for file in range(start["file"], len(urls)):
        url = urls[file]
        row = start["row"] if file == start["file"] else 0
        read = read_parquet if url.endswith(".parquet") else read_json
        try:
            fs, path = fsspec.url_to_fs(url)
            # 32 MiB a request, as each is waited for; .gz is unpacked
            with fs.open(path, block_size=32 << 20, compression="infer") as opened:
                for texts in read(opened, row):
                    yield file, row, texts
                    row += len(texts)
        except Exception as e:  # ArrowInvalid, OSError, zlib.error, and all that a network raises
            raise UserError(f"{url} cannot be read from row {row + 1} on ({type(e).__name__}: "
                            f"{first_line(e)}): repair it; the same command continues.") from None

def read_parquet(file, first):
    """Yield lists of texts, None where there is none, from row number `first` on."""
    import pyarrow.parquet as pq
    # a row group of 409 MB takes 204 MB of memory with these two, 560 without
    parquet = pq.ParquetFile(file, buffer_size=BATCH_BYTES, pre_buffer=False)
    for number in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(number)
        if first >= group.num_rows:
            first -= group.num_rows
            continue
        batch_rows = max(1, BATCH_BYTES * group.num_rows // group.total_byte_size)
        for part in parquet.iter_batches(batch_rows, row_groups=[number], columns=[TEXT]):
            rows = part[TEXT][first:].cast("large_binary").to_pylist()  # need not be UTF-8
            yield [text and text.decode("utf-8", "replace") for text in rows]
            first = max(0, first - len(part))  # rows still to skip

def read_json(file, first):
    """Yield lists of texts, "" for none, from line `first` on. No lone surrogates, for tiktoken."""
    with io.BufferedReader(file, BATCH_BYTES) as lines:  # fsspec's own reading takes 2 ms a line
        for _ in itertools.islice(lines, first):
            pass
        while block := lines.readlines(BATCH_BYTES):
            texts = []
            try:
                for line in block:
                    row = json.loads(line) if line.strip() else {}
                    text = row.get(TEXT) or ""
                    texts.append(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
            finally:  # if a line is bad, first yield the good ones before it, so that
                yield texts  # read_batches() names the right row; then the error goes on

# -------------------------------------------------------------------------------------- tokens
def tokenize(texts, name):
    """The tokens of a list of texts, (n,). "<|endoftext|>" begins each; in a text it is text."""
    encoding = get_encoding(name)
    end_of_text = np.array([encoding.eot_token])
    parts = [end_of_text[:0]]  # concatenate wants an array, even if there is no text
    for text in texts:
        if text and text.strip():
            parts += [end_of_text, encoding.encode_to_numpy(text, disallowed_special=())]
    return np.concatenate(parts, dtype=token_dtype(encoding), casting="unsafe")  # each id fits

def start_worker():
    """In a new worker: end with the parent, be it by kill -9."""
    def end_with_parent():
        multiprocessing.parent_process().join()
        os._exit(1)
    threading.Thread(target=end_with_parent, daemon=True).start()

def tokenize_all(batches, nprocs, name):
    """Yield `batches` with tokens for texts, in order, by `nprocs` processes. Raises UserError."""
    executor = ProcessPoolExecutor(nprocs, multiprocessing.get_context("spawn"), start_worker)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which workers inherit
    for _ in range(nprocs):
        executor.submit(os.getpid)  # a job starts a worker
    signal.signal(signal.SIGINT, handler)
    jobs = ((file, row, executor.submit(tokenize, texts, name)) for file, row, texts in batches)
    try:
        waiting = list(itertools.islice(jobs, 3 * nprocs))  # no more are in memory
        while waiting:
            file, row, future = waiting.pop(0)
            yield file, row, future.result()
            waiting.extend(itertools.islice(jobs, 1))
    except BrokenProcessPool:
        raise UserError("A worker process died, probably for lack of memory: take a smaller "
                        "--nprocs; the same command continues.") from None
    finally:
        executor.shutdown(cancel_futures=True)

# -------------------------------------------------------------------------------------- shards
def settings_of(cfg, files):
    """All that determines the shards made of `files`, [(path or URL, size)], by name."""
    settings = {"shard_size": cfg.shard_size, "encoding": cfg.encoding}
    for number, (url, size) in enumerate(files):
        settings[f"file {number}"] = f"{os.path.basename(url)}, {size} bytes"
    return settings

def find_finished(folder, cfg, files):
    """(manifest's entries of finished shards, []); or ([], texts on what is not as it was)."""
    manifest = folder / "manifest.json"
    content = json.loads(manifest.read_bytes()) if manifest.exists() else {}
    before, shards = content.get("settings", {}), content.get("shards", [])
    files_used = shards[-1]["file"] + 1 if shards else 0  # the others may change
    now = settings_of(cfg, files[:files_used])
    changes = [f"{name} was {before.get(name, 'unknown')} and is {now.get(name, 'absent')}"
               for name in {**before, **now} if before.get(name) != now.get(name)]
    if changes:
        return [], changes
    return list(itertools.takewhile(lambda entry: (folder / entry["name"]).exists(), shards)), []

def forget_settings(folder, changes):
    """Forget a lone validation shard, which a short text leaves. UserError if there are more."""
    if any(folder.glob("*train*.npy")):
        raise UserError(f"The shards in {folder}/ were made with other settings or files "
                        f"({'; '.join(changes[:3])}): undo that, or take another --local_dir.")
    (folder / "manifest.json").unlink(missing_ok=True)  # or it would describe the next shard 0

def cut_shards(results, shard_size, dtype, start, n_files):
    """Yield for each shard after `start`: its tokens (n,), and the place where they end.

    A place: the number of a file, a row in it, and how many tokens from that row on were used; the
    last is file n_files. The next shard overwrites the tokens.
    """
    shard = np.empty(shard_size, dtype)
    filled, used = 0, start["used"]
    with tqdm(total=shard_size, unit="tok", unit_scale=True, disable=None) as bar:  # on a terminal
        for file, row, tokens in results:
            while used < len(tokens):
                part = tokens[used:used + shard_size - filled]
                shard[filled:filled + len(part)] = part
                filled += len(part)
                used += len(part)
                bar.update(len(part))
                if filled == shard_size:
                    yield shard, {"file": file, "row": row, "used": used}
                    filled = 0
                    bar.reset()
            # `used` becomes 0. Only after a restart, which reads from another row on, and so cuts
            # batches elsewhere, it may exceed this one: then the rest of it is skipped in the next
            used -= len(tokens)
    if filled:
        yield shard[:filled], {"file": n_files, "row": 0, "used": 0}

def add_shards(cfg, folder, files, shards):
    """Make the shards that follow `shards`, and append their entries. Raises UserError, OSError."""
    encoding = get_encoding(cfg.encoding)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    start = shards[-1] if shards else {"file": 0, "row": 0, "used": 0}  # entries hold places
    batches = read_batches([url for url, size in files], start)
    results = tokenize_all(batches, cfg.nprocs or cores, cfg.encoding)
    cut = cut_shards(results, cfg.shard_size, token_dtype(encoding), start, len(files))
    # whatever ends this, they are closed, the last one first: no file or process stays
    with contextlib.closing(batches), contextlib.closing(results), contextlib.closing(cut):
        for tokens, end in cut:
            name = f"edufineweb_{'train' if shards else 'val'}_{len(shards):06d}.npy"
            documents = int(np.count_nonzero(tokens == encoding.eot_token))
            shards.append({"name": name, "tokens": len(tokens), "documents": documents, **end})
            manifest = {"settings": settings_of(cfg, files[:end["file"] + 1]), "shards": shards}
            content = json.dumps(manifest, indent=1).encode()
            # into a real file, np.save writes by ndarray.tofile(), which misses a full disk
            write_whole(folder / name,
                        lambda file: np.save(SimpleNamespace(write=file.write), tokens))
            write_whole(folder / "manifest.json", lambda file: file.write(content))
            # without its lock: Ctrl-C amid taking it would be an error of tqdm's
            tqdm.write(f"{name}: {len(tokens):,} tokens, {documents:,} documents", nolock=True)
            if len(shards) == cfg.max_shards:
                break

def make_shards(cfg):
    """Make the shards that `cfg` asks for and local_dir lacks. Raises UserError, OSError."""
    if cfg.shard_size < 1025:  # a row of train_gpt2.py at T=1024 and the token after it
        raise UserError(f"shard_size={cfg.shard_size}: take 1025 tokens or more.")
    files = find_files(cfg.source, cfg.remote_name)
    folder = Path(cfg.local_dir)
    lock = lock_folder(folder)  # noqa: F841  held as long as it is referred to
    remove_parts(folder)
    shards, changes = find_finished(folder, cfg, files)
    if changes:
        forget_settings(folder, changes)  # in a new folder all is changed, and nothing forgotten
    found = len(shards)
    corpus_is_done = found > 0 and shards[-1]["file"] == len(files)
    if not corpus_is_done and (cfg.max_shards == 0 or found < cfg.max_shards):
        add_shards(cfg, folder, files, shards)
    tokens = sum(entry["tokens"] for entry in shards)
    if len(shards) < 2:
        raise UserError(f"source={cfg.source} has {tokens:,} tokens ({TEXT!r} in its "
                        f"{', '.join(SUFFIXES)} files): beside a validation shard of "
                        f"{cfg.shard_size:,} there is nothing to train on. Take more text or "
                        f"--max_shards, or --shard_size={tokens // 10 + 1} for ten shards.")
    documents = sum(entry["documents"] for entry in shards)
    made = sum(entry["tokens"] for entry in shards[found:])
    print(f"{folder}/: {documents:,} documents, {tokens:,} tokens in {len(shards)} shards\n"
          f"This run: {made:,} tokens\n"
          f"Train on it: python train_gpt2.py --data={folder} --encoding={cfg.encoding}")

# -------------------------------------------------------------------------------- command line
def main():
    """The exit status: None, a message or a number."""
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)  # as stderr is
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clusters send it: like Ctrl-C
    try:
        cfg = make_config(Config, parse_flags(Config, __doc__))
        make_shards(cfg)
    except UserError as e:
        return f"fineweb.py: {e}"
    except OSError as e:
        return (f"fineweb.py: local_dir={cfg.local_dir} cannot be written ({first_line(e)}): make "
                f"room, and the same command continues after the last finished shard.")
    except KeyboardInterrupt:
        print("\nStopped. The same command continues after the last whole shard.", file=sys.stderr)
        return 130

if __name__ == "__main__":
    sys.exit(main())
