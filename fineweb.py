"""Turn FineWeb-Edu, or documents of your own, into token shards.

    python fineweb.py                  # sample-10BT, 100 shards of 100 M tokens
    python fineweb.py --max_shards=10  # 1 B tokens; a later run can add shards
    python fineweb.py --source=my_texts --local_dir=my_shards  # a local folder

Documents are streamed and never stored. A shard is a one-dimensional array of
token ids in an .npy file: uint16, or uint32 if the encoding has more than
65,536 ids. Each document starts with <|endoftext|> and may continue in the next
shard. Shard 0 is for validation. You can stop the script at any moment. To
resume, repeat the command; the shards are the same as without the interruption.

This file also holds the helpers that all three scripts share, so that there is
no fourth file. They are not in train_gpt2.py, because then this file and each
of its worker processes would have to import that script, and with it torch.
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
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_origin

import numpy as np
import tiktoken
from tqdm import tqdm

@dataclasses.dataclass(frozen=True)
class Config:
    """The settings. Each is also a flag, and --help prints the comments below.

    If local_dir already holds shards, more can be added only with the same shard_size and encoding.
    The source files that these shards were made from must still have the same names and sizes.
    """
    source: str = "HuggingFaceFW/fineweb-edu"  # hub dataset, or folder of parquet or jsonl files
    remote_name: str = "sample-10BT"           # the hub dataset's configuration
    local_dir: str = "edu_fineweb10B"          # folder in which the shards are written
    shard_size: int = 100_000_000              # tokens per shard; a token takes 2 or 4 bytes
    max_shards: int = 0                        # total number of shards to make; 0 = no limit
    nprocs: int = 0                            # number of worker processes; 0 = one per CPU core
    encoding: str = "gpt2"                     # a tiktoken encoding, or bytes (needs no download)

TEXT = "text"                # the parquet column or JSON key that holds a document's text
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
BATCH_BYTES = 2 << 20        # bytes of text per batch; with 64 KiB, tokenizing takes 15% longer

# --------------------------------------------------------------- what all three scripts share
# Errors, encodings (also in the form that transformers needs), safe file writes, folder locks and
# command-line flags. This section imports no heavy packages when it is loaded, so that worker
# processes start fast.
class UserError(Exception):
    """An error that the user can correct. main() prints its message instead of a traceback."""

def summary_of(error):
    """Return a line that says what an exception is about, at most 160 characters long.

    It is the first line of the exception's text, or the second one if the first is only a heading.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    only_a_heading = lines[0].endswith(":") and len(lines) > 1
    line = lines[1] if only_a_heading else lines[0]
    return textwrap.shorten(line.rstrip(".: "), width=160, placeholder=" ...")

def encoding_arguments(name):
    """Return the arguments of tiktoken.Encoding for the encoding called `name`.

    To use a tokenizer of your own, add a case here. Raise UserError if the name is unknown.
    """
    if name == "bytes":
        return dict(
            name=name,
            pat_str=r"(?s:.{1,128})",  # bytes never merge, so any way of splitting a text will do
            mergeable_ranks={bytes([i]): i for i in range(256)},
            special_tokens={"<|endoftext|>": 256})
    from tiktoken_ext.openai_public import ENCODING_CONSTRUCTORS
    if name not in ENCODING_CONSTRUCTORS:
        raise UserError(f"encoding={name} is unknown: choose bytes, "
                        f"{', '.join(ENCODING_CONSTRUCTORS)}.")
    return ENCODING_CONSTRUCTORS[name]()

@functools.lru_cache  # building GPT-2's encoding takes 0.2 s; hellaswag.py calls this for each text
def get_encoding(name):
    """Return the tiktoken.Encoding called `name`. Raise UserError if it cannot be used."""
    try:
        encoding = tiktoken.Encoding(**encoding_arguments(name))
    except (OSError, ValueError) as e:  # the download failed or was damaged
        raise UserError(f"The vocabulary of encoding={name} cannot be loaded ({summary_of(e)}): "
                        f"connect to the internet once, set TIKTOKEN_CACHE_DIR to a folder that "
                        f"contains it, or use --encoding=bytes.") from None
    if "<|endoftext|>" not in encoding.special_tokens_set:
        raise UserError(f"encoding={name} lacks the special token <|endoftext|>, which starts each "
                        f"document: add it in encoding_arguments().")
    return encoding

# A text that different tokenizers split differently. hugging_face_tokenizer() uses it to check that
# the tokenizer it has built agrees with tiktoken.
PROBE = "Don't stop . it's\n\n\t 'LL we'Ll naïve 日本 🙂  1234567 x=[1, 2];\r\n return !?\n \n"

def hugging_face_tokenizer(encoding, context):
    """Return a transformers tokenizer that gives the same ids as a tiktoken encoding.

    context: the longest input of the model, in tokens.
    Raise ValueError if the tokenizer that was built gives different ids.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode, generate_merges
    parts = encoding_arguments(encoding.name)
    letters = bytes_to_unicode()  # `tokenizers` represents each byte as one Unicode character
    vocabulary = {"".join(letters[byte] for byte in token): i
                  for token, i in parts["mergeable_ranks"].items()}
    # generate_merges() assumes that tokens with higher scores are merged first. In tiktoken, tokens
    # with lower ids are merged first, so use -id as the score.
    scores = {token: -i for token, i in vocabulary.items()}
    merges = generate_merges(vocabulary, scores)
    special_tokens = dict(parts["special_tokens"])
    # `tokenizers` does not allow unused ids, but cl100k_base has some. Add special tokens for them.
    used = {*vocabulary.values(), *special_tokens.values()}
    special_tokens |= {f"<|unused{i}|>": i for i in range(encoding.n_vocab) if i not in used}
    vocabulary |= special_tokens
    backend = Tokenizer(models.BPE(vocabulary, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if not merges:  # the bytes encoding has no merges, so a text need not be split before merging
        backend.pre_tokenizer = byte_level
    else:
        # In tiktoken's patterns, the + in {1,3}+ makes the quantifier possessive. `tokenizers`
        # would read this + as a repetition. Removing it does not change what the pattern matches.
        pattern = re.sub(r"(\{\d+,\d*\})\+", r"\1", parts["pat_str"])
        pieces = pre_tokenizers.Split(Regex(pattern), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([pieces, byte_level])
    backend.decoder = decoders.ByteLevel()
    in_order = sorted(special_tokens, key=special_tokens.get)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in in_order])
    if backend.encode(PROBE).ids != encoding.encode_ordinary(PROBE):
        raise ValueError(f"transformers has no {encoding.name} tokenizer that gives the same ids")
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=end, eos_token=end, unk_token=end,
        model_max_length=context, clean_up_tokenization_spaces=False)

def token_dtype(encoding):
    """Return the NumPy type in which the ids of an encoding are stored."""
    return np.uint16 if encoding.n_vocab <= 2**16 else np.uint32

def write_whole(path, write, verify=None):
    """Write a file so that `path` never holds a half-written file, not even after a power cut.

    write(file) writes the content to a temporary file, which is then flushed to the disk and
    renamed to `path`. If given, verify(path of the temporary file) is called before the file is
    renamed. If it raises an exception, `path` is left unchanged.
    """
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

def remove_unfinished(folder):
    """Delete the temporary files that write_whole() leaves behind when its process is killed.

    The caller must hold the folder's lock, because another process may be writing such a file.
    """
    for part in Path(folder).glob("*.*.part"):  # matches shard.npy.part, but not movie.part
        part.unlink()

def lock_folder(folder):
    """Lock a folder so that no other run uses it. Create it if needed. Return the lock.

    The caller must keep a reference to the lock. It is released when the object is deleted or when
    this process ends for any reason. Raise UserError if another process holds the lock. If the disk
    does not support locks, print a warning instead.
    """
    import filelock  # torch and datasets depend on it, so it is always installed
    lock = filelock.FileLock(Path(folder, ".lock"))
    try:
        lock.acquire(timeout=0)  # also creates the folder
    except filelock.Timeout:
        raise UserError(f"Another run uses {folder}/: wait until it has ended, or choose a "
                        f"different folder.") from None
    except (NotImplementedError, OSError) as e:  # some network disks do not support locks
        print(f"{folder}/ cannot be locked ({summary_of(e)}): make sure that no other run writes "
              f"to it.")
    return lock

def parse_flags(cls, doc, presets=None):
    """Parse the command line; return {name: text} of the flags that were given.

    cls: a dataclass. Each field is a flag, and --help prints the comment at the end of its line.
    doc: the text that --help prints above the flags.
    presets: {name: {field: value}}. --help prints these values after the default.
    Raise UserError for an unknown flag.
    """
    parser = argparse.ArgumentParser(description=doc, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    # {name: comment} of lines such as "    seed: int = 1337    # determines the initial weights"
    comments = dict(re.findall(r"^ +(\w+) *:[^#\n]*# *(.*)$", inspect.getsource(cls), re.M))
    for field in dataclasses.fields(cls):
        values = [repr(field.default)]
        for preset, constants in (presets or {}).items():
            if field.name in constants:
                values.append(f"in {preset} {constants[field.name]!r}")
        text = f"{comments.get(field.name, '')} [{', '.join(values)}]".replace("%", "%%")
        parser.add_argument(f"--{field.name}", default=argparse.SUPPRESS, help=text,
                            metavar="|".join(map(str, get_args(field.type))) or "X")

    def refuse(message):
        raise UserError(f"{message} (--help lists every flag).")
    parser.error = refuse
    return vars(parser.parse_args())

def make_config(cls, values):
    """Return cls(**values), with every value converted to the type of its field.

    cls: a dataclass whose fields all have defaults.
    values: {name: value}, where a value may be a string such as "1e3".
    Raise UserError for an unknown name, a missing or unsupported type, or an impossible value.
    """
    types = cls.__annotations__
    for name in vars(cls):  # this includes constants without a type, which an edit may have added
        if not name.startswith("_") and name not in types:
            raise UserError(f"{name} in Config lacks a type: write {name}: int = 1, for example.")
    for name in values:
        if name not in types:
            raise UserError(f"{name} is not a constant in Config: check its spelling.")
    converted = {}
    for name, kind in types.items():
        if kind not in (bool, int, float, str) and get_origin(kind) is not Literal:
            raise UserError(f"{name} in Config has the type {kind}: use bool, int, float, str or "
                            f"Literal.")
        value = values.get(name, getattr(cls, name))  # the class attribute is the field's default
        try:
            converted[name] = convert(value, kind)
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{name}={value}: it must be {describe_type(kind)}.") from None
    return cls(**converted)

def convert(value, kind):
    """Convert a value, or a string such as "1e3", to a type: bool, int, float, str or a Literal.

    Raise KeyError, TypeError or ValueError if that is impossible or a number is negative.
    """
    if kind is bool:
        return {"True": True, "False": False}[str(value).capitalize()]
    if kind in (int, float):
        number = float(value)
        if not 0 <= number < float("inf") or (kind is int and not number.is_integer()):
            raise ValueError
        return kind(number)
    if kind is str:
        return str(value)
    choices = {str(choice): choice for choice in get_args(kind)}  # the values that a Literal allows
    return choices[str(value)]

def describe_type(kind):
    """Return a description of a type's values for an error message."""
    if kind in (bool, int, float):
        return {bool: "True or False", int: "a whole number >= 0",
                float: "a finite number >= 0"}[kind]
    return str(kind)

# ----------------------------------------------------------------------------------- documents
# Find the files of the corpus and read their documents in batches, starting at any row. In this
# file, a row is a row of a parquet file or a line of a jsonl file, and holds one document. (In
# train_gpt2.py, a row is a sequence of T tokens.)
def find_files(source, remote_name):
    """Return [(path or URL, size in bytes)] of the corpus's files in reading order.

    Raise UserError if `source` is neither a local folder nor a dataset that can be reached.
    """
    if os.path.isdir(source):
        paths = [path for path in sorted(Path(source).rglob("*")) if path.is_file()]
        files = [(str(path), path.stat().st_size) for path in paths]
    else:
        files = find_hub_files(source, remote_name)
    return [(url, size) for url, size in files if url.endswith(SUFFIXES)]

def find_hub_files(source, remote_name):
    """Return [(URL, size in bytes)] of the files that `datasets` would stream.

    Raise UserError if the hub cannot be reached or does not have the dataset.
    """
    import datasets
    import fsspec
    logging.disable(logging.CRITICAL)  # the hub's client logs a line for each attempt
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    print(f"Asking {hub} for {source}, {remote_name} (takes half a minute without a network)")
    try:
        builder = datasets.load_dataset_builder(source, remote_name)
        urls = (builder.config.data_files or {}).get("train", [])
        return [(url, fsspec.url_to_fs(url)[0].size(url)) for url in urls]
    except Exception as e:  # its class depends on the HTTP library
        raise UserError(f"source={source} is not a folder here, and its remote_name={remote_name} "
                        f"cannot be fetched from {hub} ({summary_of(e)}): check both names and the "
                        f"network, or try a mirror: HF_ENDPOINT=https://hf-mirror.com.") from None

def read_batches(urls, start_file, start_row):
    """Yield (file number, batch_start, texts) for each batch of the corpus.

    batch_start is the number of the batch's first row. A text is "" if its row has none. Start at
    row `start_row` of file `start_file`. Raise UserError if a file cannot be read.
    """
    import fsspec  # datasets and torch depend on it, so it is always installed
    for file_number in range(start_file, len(urls)):
        url = urls[file_number]
        first_row = start_row if file_number == start_file else 0  # the first row to read
        batch_start = first_row
        is_parquet = url.endswith(".parquet")
        read_rows = read_parquet_rows if is_parquet else read_lines
        text_of = parquet_text if is_parquet else json_text
        texts = []  # the texts of the current batch that have been decoded so far
        try:
            filesystem, path = fsspec.url_to_fs(url)
            # Reading waits for each request, so request 32 MiB at a time. "infer" unpacks .gz.
            with filesystem.open(path, block_size=32 << 20, compression="infer") as file:
                for raw_rows in read_rows(file, first_row):
                    for raw_row in raw_rows:
                        texts.append(text_of(raw_row))
                    yield file_number, batch_start, texts
                    batch_start += len(texts)
                    texts = []
        except Exception as e:  # ArrowInvalid, OSError, zlib.error, any network library's error
            # `texts` contains the rows of this batch that could be decoded. Reading or decoding the
            # next row failed. The message counts rows from 1, as text editors do
            failed_row = batch_start + len(texts) + 1
            raise UserError(f"{url} cannot be read from row {failed_row} on ({type(e).__name__}: "
                            f"{summary_of(e)}): repair the file or the network, and repeat the "
                            f"command to resume.") from None

def read_parquet_rows(file, first_row):
    """Yield lists of texts, as bytes or None, starting at row `first_row` of a parquet file."""
    import pyarrow.parquet as pq
    # These two options reduce peak memory from 560 to 204 MB for a row group of 409 MB.
    parquet = pq.ParquetFile(file, buffer_size=BATCH_BYTES, pre_buffer=False)
    rows_to_skip = first_row
    for number in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(number)
        if rows_to_skip >= group.num_rows:  # skip the group without reading it
            rows_to_skip -= group.num_rows
            continue
        batch_rows = max(1, BATCH_BYTES * group.num_rows // group.total_byte_size)
        for part in parquet.iter_batches(batch_rows, row_groups=[number], columns=[TEXT]):
            n_skipped = min(rows_to_skip, len(part))
            rows_to_skip -= n_skipped
            if n_skipped < len(part):
                # A string column may hold bytes that are not UTF-8, so read it as bytes.
                yield part[TEXT][n_skipped:].cast("large_binary").to_pylist()

def parquet_text(content):
    """Return the text in a parquet row. content: UTF-8 bytes, or None, which gives ""."""
    return (content or b"").decode("utf-8", "replace")

def read_lines(file, first_row):
    """Yield lists of lines, as bytes, starting at line `first_row` of a jsonl file."""
    with io.BufferedReader(file, BATCH_BYTES) as lines:  # fsspec's own buffer takes 2 ms per line
        for _ in itertools.islice(lines, first_row):
            pass
        while block := lines.readlines(BATCH_BYTES):
            yield block

def json_text(line):
    """Return the text in a line of JSON, or "" if it has none.

    Replace lone surrogates (for example half of an emoji), which tiktoken does not accept.
    """
    row = json.loads(line) if line.strip() else {}
    text = row.get(TEXT) or ""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

# -------------------------------------------------------------------------------------- tokens
# Worker processes tokenize batches of documents. The main process reads and writes. Neither of
# Python's process pools is used: the workers of concurrent.futures keep running after the main
# process is killed, and multiprocessing.Pool waits forever for a worker that has died.
def tokenize(texts, encoding_name):
    """Return the tokens (n,) of a list of texts.

    The tokens of each text come after an <|endoftext|> token. If a text itself contains the
    characters "<|endoftext|>", they are encoded as ordinary text. Empty and blank texts are left
    out.
    """
    encoding = get_encoding(encoding_name)
    end_of_text = np.array([encoding.eot_token])
    parts = [end_of_text[:0]]  # concatenate() fails on an empty list
    for text in texts:
        if text.strip():
            parts += [end_of_text, encoding.encode_to_numpy(text, disallowed_special=())]
    return np.concatenate(parts, dtype=token_dtype(encoding), casting="unsafe")  # all ids fit

class Worker:
    """The main process's handle on a worker process, which runs answer_requests().

    The worker process ends when stop() is called or when the main process ends.
    """
    def __init__(self, encoding_name):
        context = multiprocessing.get_context("spawn")
        self.connection, far_end = context.Pipe()
        self.process = context.Process(target=answer_requests, args=(far_end, encoding_name))
        self.process.start()
        far_end.close()  # now only the worker holds it, so recv() fails if the worker dies

    def tokenize(self, texts):
        """Let the process tokenize a list of texts. Return their tokens (n,).

        Raise UserError if the process is dead.
        """
        try:
            self.connection.send(texts)
            return self.connection.recv()
        except (EOFError, OSError):
            raise UserError("A worker process died, probably because memory ran out: repeat the "
                            "command with a smaller --nprocs to resume.") from None

    def stop(self):
        """Kill the process."""
        self.process.kill()
        self.process.join()

def answer_requests(connection, encoding_name):
    """Run a worker process: receive lists of texts and send their tokens back.

    Return when the connection is closed, which also happens if the main process is killed.
    """
    while True:
        try:
            texts = connection.recv()
        except (EOFError, OSError):
            return
        tokens = tokenize(texts, encoding_name)
        try:
            connection.send(tokens)
        except OSError:
            return

# Ctrl-C sends SIGINT to every foreground process in the terminal, and a cluster may send SIGTERM to
# every process in a job. Only the main process acts on them: it ends, and then its workers end too.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

def end_at_once(signal_number, frame):
    """Handle Ctrl-C and SIGTERM: print one line and end the process, whatever it is doing.

    Raising KeyboardInterrupt is not safe. If it arrives while a library holds a lock, the lock
    may stay locked, and the process hangs during clean-up. No clean-up is needed here: finished
    shards are on the disk, the next run deletes a half-written file, the operating system releases
    the folder's lock, and workers end when the main process has ended.
    """
    try:
        os.write(2, b"\nStopped. Repeat the command to resume after the last finished shard.\n")
    finally:
        os._exit(130)

def start_workers(nprocs, encoding_name):
    """Return nprocs new Workers, which ignore STOP_SIGNALS (except on Windows).

    This process also ignores them while it starts the workers, a fraction of a second.
    """
    # Child processes inherit that a signal is ignored. signal.signal() returns the old handler
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    try:
        return [Worker(encoding_name) for _ in range(nprocs)]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)

def tokenize_all(batches, nprocs, encoding_name):
    """Tokenize batches in nprocs worker processes.

    For each batch (file number, batch_start, texts), yield (file number, batch_start, tokens (n,)),
    in the order of the batches. At most 3 * nprocs batches are in memory. Raise UserError if a
    worker dies.
    """
    workers = start_workers(nprocs, encoding_name)
    idle_workers = deque(workers)  # a deque is thread-safe

    def tokenize_in_worker(file_number, batch_start, texts):
        worker = idle_workers.popleft()  # not empty: there are as many workers as threads
        try:
            return file_number, batch_start, worker.tokenize(texts)
        finally:
            idle_workers.append(worker)

    # A thread only sends a batch to a worker and waits for its tokens. Without threads, workers
    # would be idle while the main thread reads documents or writes a shard.
    threads = ThreadPoolExecutor(nprocs)
    jobs = deque()  # Futures of the results, in the order of the batches
    try:
        for batch in batches:
            jobs.append(threads.submit(tokenize_in_worker, *batch))
            if len(jobs) == 3 * nprocs:
                yield jobs.popleft().result()
        while jobs:
            yield jobs.popleft().result()
    finally:
        for worker in workers:
            worker.stop()  # recv() then fails in the thread that waits for it, so the thread ends
        threads.shutdown(cancel_futures=True)

# -------------------------------------------------------------------------------------- shards
# manifest.json lists the finished shards, where each ends in the corpus, and all inputs that
# determine their content. With it, a run resumes exactly where the last one stopped.
class Place(NamedTuple):
    """A point in the corpus, at which a shard ends and the next one starts.

    cut_shards() receives the tokens of whole batches of rows, and does not know where a row ends.
    So a Place names the first row of a batch, and counts tokens from there. For example, Place(2,
    300, 1200) means that the next shard is made by reading file 2 from row 300 on, and leaving out
    the first 1,200 tokens. The end of the corpus, where a shard that is not full ends, is
    Place(number of files, 0, 0).
    """
    file_number: int  # index of the file in reading order
    batch_start: int  # number of the first row of the batch
    offset: int       # number of tokens from there to the point

class Shard(NamedTuple):
    """A finished shard, as the manifest describes it."""
    name: str       # name of its file
    tokens: int     # number of tokens in it
    is_full: bool   # whether it has shard_size tokens; if not, the corpus ends with it
    documents: int  # number of documents that start in it
    end: Place

def inputs_of_shards(cfg, files, shards):
    """Return everything that determines the content of these Shards, as {name: value}.

    This is shard_size, the encoding, and the name and size of each file from which they were made.
    The manifest contains it, and find_finished() compares it with that of a later command.
    files: [(path or URL, size in bytes)] of the whole corpus
    """
    inputs = {"shard_size": cfg.shard_size, "encoding": cfg.encoding}
    if not shards:
        return inputs
    if shards[-1].is_full:
        n_files = shards[-1].end.file_number + 1  # up to the file in which this shard ends
    else:
        # The corpus ended with this shard. So it depends on all files: with another one, this shard
        # would be longer
        n_files = len(files)
    for number, (url, size) in enumerate(files[:n_files]):
        inputs[f"file {number}"] = f"{os.path.basename(url)}, {size} bytes"
    return inputs

def read_manifest(path):
    """Return the inputs and the Shards in a manifest. Raise UserError if it is damaged."""
    try:
        content = json.loads(path.read_bytes())
        # The names in manifests are older than those in this file: "settings" are the inputs, "row"
        # is batch_start, and "used" is the offset
        inputs = dict(content["settings"])
        shards = []
        for entry in content["shards"]:
            end = Place(int(entry["file"]), int(entry["row"]), int(entry["used"]))
            tokens = int(entry["tokens"])
            shards.append(Shard(str(entry["name"]), tokens, is_full=tokens == inputs["shard_size"],
                                documents=int(entry["documents"]), end=end))
        return inputs, shards
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path} cannot be read ({type(e).__name__}: {summary_of(e)}): restore it, "
                        f"or delete it together with all shards to make them again.") from None

def write_manifest(cfg, files, shards):
    """Write the manifest of these Shards. Raise UserError if that fails."""
    entries = []
    for shard in shards:
        entries.append({"name": shard.name, "tokens": shard.tokens, "documents": shard.documents,
                        "file": shard.end.file_number, "row": shard.end.batch_start,
                        "used": shard.end.offset})
    manifest = {"settings": inputs_of_shards(cfg, files, shards), "shards": entries}
    content = json.dumps(manifest, indent=1).encode()
    write_into_local_dir(cfg, "manifest.json", lambda file: file.write(content))

def write_array(file, array):
    """Write the same bytes as np.save(). Raise OSError if the disk is full.

    np.save() may not notice this, because ndarray.tofile() does not report errors of buffered data.
    """
    header = np.lib.format.header_data_from_array_1_0(array)
    np.lib.format.write_array_header_1_0(file, header)
    file.write(array.data)

def write_into_local_dir(cfg, name, write):
    """Write a file in local_dir with write(file). Raise UserError if that fails."""
    try:
        write_whole(Path(cfg.local_dir, name), write)
    except OSError as e:
        raise UserError(f"local_dir={cfg.local_dir} cannot be written ({summary_of(e)}): free disk "
                        f"space or allow writing, and repeat the command to resume after the last "
                        f"finished shard.") from None

def find_finished(cfg, files):
    """Return the finished Shards in local_dir, after which this run continues.

    These are the shards in the manifest before the first one whose file is missing. A new folder
    has none.

    If the manifest is missing or lists different inputs, none of the shards can be used. Then raise
    UserError if there are training shards, and return [] if there is at most a validation shard, so
    that it is made again.
    """
    folder = Path(cfg.local_dir)
    manifest = folder / "manifest.json"
    has_training_shards = any(folder.glob("*_train_*.npy"))
    if not manifest.exists():
        if has_training_shards:
            raise UserError(f"The shards in {folder}/ have no manifest.json that says how they "
                            f"were made: restore it, or choose a different --local_dir.")
        return []
    inputs_before, shards = read_manifest(manifest)
    # What the manifest of these shards would contain if they had been made by this command
    inputs_now = inputs_of_shards(cfg, files, shards)
    changes = []
    for name in inputs_before | inputs_now:
        before = inputs_before.get(name, "absent")
        now = inputs_now.get(name, "absent")
        if before != now:
            changes.append(f"{name} was {before} and is {now}")
    if changes and has_training_shards:
        raise UserError(f"The shards in {folder}/ were made with different settings or files "
                        f"({'; '.join(changes[:3])}): undo this change, or choose a different "
                        f"--local_dir.")
    if changes:  # there are no training shards
        return []
    return list(itertools.takewhile(lambda shard: (folder / shard.name).exists(), shards))

def cut_shards(results, shard_size, dtype, start, n_files):
    """Cut tokens into shards; yield the tokens (n,) of each shard and the Place at its end.

    results: (file number, batch_start, tokens) for each batch, starting with the batch of `start`.
    start: the Place at which the first shard starts.
    n_files: the number of files.
    The yielded array is overwritten with the next shard.
    """
    buffer = np.empty(shard_size, dtype)
    filled = 0
    to_skip = start.offset  # number of tokens at the start of `results` that are in earlier shards
    # disable=None means: show the bar only on a terminal
    with tqdm(total=shard_size, unit="tok", unit_scale=True, disable=None) as bar:
        for file_number, batch_start, tokens in results:
            n_skipped = min(to_skip, len(tokens))
            to_skip -= n_skipped
            position = n_skipped  # the index of the next token to copy
            while position < len(tokens):
                part = tokens[position:position + shard_size - filled]
                buffer[filled:filled + len(part)] = part
                filled += len(part)
                position += len(part)
                bar.update(len(part))
                if filled == shard_size:
                    yield buffer, Place(file_number, batch_start, offset=position)
                    filled = 0
                    bar.reset()
    if filled:
        yield buffer[:filled], Place(n_files, 0, 0)

def add_shards(cfg, files, finished):
    """Make the shards that come after `finished`, and return them as Shards.

    Raise UserError if a document cannot be read, a file cannot be written, or a worker dies.
    """
    encoding = get_encoding(cfg.encoding)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    start = finished[-1].end if finished else Place(0, 0, 0)
    shards = list(finished)
    # If shard files are missing, the old manifest still lists them, so replace it.
    write_manifest(cfg, files, shards)
    batches = read_batches([url for url, size in files], start.file_number, start.batch_start)
    results = tokenize_all(batches, cfg.nprocs or cores, cfg.encoding)
    cut = cut_shards(results, shard_size=cfg.shard_size, dtype=token_dtype(encoding), start=start,
                     n_files=len(files))
    # However this block ends, the generators are closed (the last one first), so that no file stays
    # open and no worker keeps running.
    with contextlib.closing(batches), contextlib.closing(results), contextlib.closing(cut):
        for tokens, end in cut:
            # These names are those of build-nanogpt, whatever the corpus is
            name = f"edufineweb_{'train' if shards else 'val'}_{len(shards):06d}.npy"
            documents = int(np.count_nonzero(tokens == encoding.eot_token))
            write_into_local_dir(cfg, name, lambda file: write_array(file, tokens))
            shards.append(Shard(name, len(tokens), is_full=len(tokens) == cfg.shard_size,
                                documents=documents, end=end))
            write_manifest(cfg, files, shards)
            tqdm.write(f"{name}: {len(tokens):,} tokens, {documents:,} documents")
            if len(shards) == cfg.max_shards:
                break
    return shards[len(finished):]

def make_shards(cfg):
    """Make the shards that `cfg` asks for and local_dir lacks, and print the totals.

    Raise UserError for anything that the user can correct.
    """
    if cfg.shard_size < 1025:  # train_gpt2.py reads T + 1 tokens at a time; T=1024 by default
        raise UserError(f"shard_size={cfg.shard_size}: it must be 1025 or more.")
    files = find_files(cfg.source, cfg.remote_name)
    folder = Path(cfg.local_dir)
    lock = lock_folder(folder)  # noqa: F841  the lock lasts until this function returns
    remove_unfinished(folder)
    finished = find_finished(cfg, files)
    corpus_is_done = bool(finished) and not finished[-1].is_full
    made = []
    if not corpus_is_done and (cfg.max_shards == 0 or len(finished) < cfg.max_shards):
        made = add_shards(cfg, files, finished)
    shards = finished + made
    tokens = sum(shard.tokens for shard in shards)
    if len(shards) < 2:
        raise UserError(f"source={cfg.source} has {tokens:,} tokens ({TEXT!r} in its "
                        f"{', '.join(SUFFIXES)} files): with a validation shard of "
                        f"{cfg.shard_size:,} there is nothing to train on. Use more text, a larger "
                        f"--max_shards, or --shard_size={tokens // 10 + 1} for ten shards.")
    documents = sum(shard.documents for shard in shards)
    print(f"{folder}/: {documents:,} documents, {tokens:,} tokens in {len(shards)} shards\n"
          f"This run: {sum(shard.tokens for shard in made):,} tokens\n"
          f"To train on them: python train_gpt2.py --data={folder} --encoding={cfg.encoding}")

# -------------------------------------------------------------------------------- command line
def main():
    """Do what the command line asks. Return the exit status: None or an error message."""
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)  # like stderr
    for signal_number in STOP_SIGNALS:
        signal.signal(signal_number, end_at_once)
    # tqdm's default lock is a semaphore, which Python may report as leaked after end_at_once(). An
    # RLock avoids this.
    tqdm.set_lock(threading.RLock())
    for_users = __doc__.rpartition("\n\n")[0]  # the last paragraph is for readers of the code
    try:
        make_shards(make_config(Config, parse_flags(Config, for_users)))
    except UserError as e:
        return f"fineweb.py: {e}"

if __name__ == "__main__":
    sys.exit(main())
