"""Turn FineWeb-Edu, or documents of your own, into token shards.

    python fineweb.py                  # sample-10BT, 100 shards of 100 M tokens
    python fineweb.py --max_shards=10  # 1 B tokens; a later run can add shards
    python fineweb.py --source=my_texts --local_dir=my_shards  # a local folder

Documents are streamed and never stored. A shard is a one-dimensional array of
token ids in an .npy file: uint16, or uint32 if the encoding has more than
65,536 ids. Each document starts with <|endoftext|> and may continue in the next
shard. Shard 0 is for validation. You can stop the script at any moment. To
resume, repeat the command; the shards are the same as those of a run that was
never stopped.

The first half of this file holds the helpers that all three scripts share.
They are not in train_gpt2.py, because that file runs as __main__: if
hellaswag.py imported it, Python would load it a second time.
"""
import argparse
import dataclasses
import functools
import glob
import inspect
import itertools
import json
import logging
import os
import re
import shlex
import signal
import sys
import threading
import types
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import numpy as np
import tiktoken
from tqdm import tqdm

@dataclasses.dataclass(frozen=True)
class Config:
    """The settings. Each is also a flag, and --help prints the comments below.

    If local_dir already holds shards, more can be added only with the same shard_size and encoding.
    The source files that these shards were made from must still have the same names and sizes.
    """
    source: str = "HuggingFaceFW/fineweb-edu"  # a dataset on the Hugging Face Hub, or a folder
    remote_name: str = "sample-10BT"           # the hub dataset's configuration
    local_dir: str = "edu_fineweb10B"          # folder in which the shards are written
    shard_size: int = 100_000_000              # tokens per shard; a token takes 2 or 4 bytes
    max_shards: int = 0                        # total number of shards to make; 0 = no limit
    nprocs: int = 0                            # number of threads; 0 = one per CPU core
    encoding: str = "gpt2"                     # a tiktoken encoding, or bytes (needs no download)

# -------------------------------------------------------------- helpers that all scripts share
END_OF_TEXT = "<|endoftext|>"  # the special token at the start of each document

class UserError(Exception):
    """An error that the user can correct. main() prints its message instead of a traceback."""

def summary_of(error):
    """Return the first line of an exception's message, cut to 160 characters.

    If the message is empty, return the name of the exception's class.
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".: ")[:160]

@functools.cache
def encoding_arguments(name):
    """Return the arguments of tiktoken.Encoding for the encoding called `name`.

    To use a tokenizer of your own, add a case here. Raise UserError if the name is unknown.
    """
    if name == "bytes":
        return dict(
            name=name,
            pat_str=r"[\s\S]{1,128}",  # bytes never merge, so any way of splitting a text will do
            mergeable_ranks={bytes([i]): i for i in range(256)},
            special_tokens={END_OF_TEXT: 256})
    from tiktoken_ext.openai_public import ENCODING_CONSTRUCTORS
    if name not in ENCODING_CONSTRUCTORS:
        raise UserError(f"encoding={name} is unknown: choose bytes, "
                        f"{', '.join(ENCODING_CONSTRUCTORS)}.")
    return ENCODING_CONSTRUCTORS[name]()

@functools.cache  # hellaswag.py calls this for each text
def get_encoding(name, thread=0):
    """Return the tiktoken.Encoding called `name`. Raise UserError if it cannot be used.

    thread: a number that identifies a thread, which then gets an Encoding of its own. If threads
    share an Encoding, they also share the caches of its regular expression, which made two threads
    14% to 54% slower (tests/measured/tokenize.txt). Each further Encoding for GPT-2 takes 0.04 s
    and 11 MB.
    """
    try:
        return tiktoken.Encoding(**encoding_arguments(name))
    except (OSError, ValueError) as e:  # the download failed or was damaged
        raise UserError(f"The vocabulary of encoding={name} cannot be loaded ({summary_of(e)}): "
                        f"connect to the internet once, set TIKTOKEN_CACHE_DIR to a folder that "
                        f"contains it, or use --encoding=bytes.") from None

def encode(encoding, text, special=False):
    """Return the token ids of a text, as a one-dimensional array.

    special: whether to encode the characters <|endoftext|> in the text as the special token. By
    default, they are ordinary text.
    """
    encode_part = functools.partial(
        encoding.encode_to_numpy, allowed_special={END_OF_TEXT} if special else set(),
        disallowed_special=())
    try:
        return encode_part(text)
    except ValueError:
        # tiktoken refuses some texts, for example a million spaces before a letter. Encode such a
        # text in parts of at most 100,000 characters, but do not cut <|endoftext|>
        parts = re.findall(r"<\|endoftext\|>|(?:(?!<\|endoftext\|>)[\s\S]){1,100000}", text)
        return np.concatenate([encode_part(part) for part in parts])

def token_dtype(encoding):
    """Return the NumPy type in which the ids of an encoding are stored."""
    return np.uint16 if encoding.n_vocab <= 2**16 else np.uint32

def save_tokenizer(encoding, folder, context):
    """Save a transformers tokenizer that gives the same ids as a tiktoken encoding.

    context: the longest input of the model, in tokens.
    Raise ValueError if transformers' converter cannot handle the ids of this encoding.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter
    arguments = encoding_arguments(encoding.name)
    ranks = arguments["mergeable_ranks"]
    if [*sorted(ranks.values()), encoding.eot_token] != list(range(encoding.n_vocab)):
        raise ValueError(f"the ids of {encoding.name} have gaps, or {END_OF_TEXT} is not the last")
    converter = TikTokenConverter(pattern=arguments["pat_str"], extra_special_tokens=[END_OF_TEXT])
    converter.load_tiktoken_bpe = lambda path: ranks  # instead of reading them from a file
    PreTrainedTokenizerFast(
        tokenizer_object=converter.converted(), bos_token=END_OF_TEXT, eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT, model_max_length=context,
        clean_up_tokenization_spaces=False).save_pretrained(folder)

def write_whole(path, write):
    """Write a file so that `path` never holds a half-written file, not even after a power cut.

    write(file) writes the content to a temporary file, which is then flushed to the disk and
    renamed to `path`.
    """
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(part, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)

def lock_folder(name, folder):
    """Lock a folder so that no other run uses it. Create it if needed. Return the lock.

    The caller must keep a reference to the lock, which is released when the object is deleted or
    when this process ends for any reason.
    name: the name of the setting, for error messages.
    Raise UserError if the folder cannot be used or another process holds the lock.
    """
    import filelock  # torch and datasets depend on it, so it is always installed
    lock = filelock.FileLock(Path(folder, ".lock"))
    try:
        os.makedirs(folder, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise UserError(f"Another run uses {folder}/: wait until it has ended, or choose a "
                        f"different {name}.") from None
    except NotImplementedError:  # some network disks do not support locks
        print(f"{folder}/ cannot be locked: make sure that no other run uses it.")
    except OSError as e:
        raise UserError(f"{name}={folder} cannot be used ({summary_of(e)}): choose a folder in "
                        f"which files can be written.") from None
    return lock

def parse_flags(cls, doc, presets=None):
    """Parse the command line; return {name: value} of the flags that were given.

    cls: a dataclass. Each field of type int, float, str, bool or Literal is a flag, and --help
    prints the comment at the end of its line.
    doc: the text that --help prints above the flags.
    presets: {name: {field: value}}. --help prints these values after the default.
    Raise UserError for an unknown flag or a value of the wrong type.
    """
    parser = argparse.ArgumentParser(description=doc, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    # {name: comment} of lines such as "    seed: int = 1337    # determines the initial weights"
    comments = dict(re.findall(r"^ +(\w+) *:[^#\n]*# *(.*)$", inspect.getsource(cls), re.M))
    for field in dataclasses.fields(cls):
        values = [f"in {preset} {constants[field.name]!r}"
                  for preset, constants in (presets or {}).items() if field.name in constants]
        text = f"{comments.get(field.name, '')} [{', '.join([repr(field.default), *values])}]"
        choices = (True, False) if field.type is bool else get_args(field.type) or None
        # If there are choices, "true" and "false", in upper or lower case, are converted to bool
        parser.add_argument(
            f"--{field.name}", default=argparse.SUPPRESS, help=text.replace("%", "%%"),
            choices=choices, metavar="|".join(map(str, choices or ["X"])),
            type=(lambda text: {"true": True, "false": False}.get(text.lower(), text)) if choices
            else field.type)

    def refuse(message):
        raise UserError(f"{message} (--help lists every flag).")
    parser.error = refuse
    return vars(parser.parse_args())

# ----------------------------------------------------------------------------------- documents
# Find the files of the corpus and stream their documents. Each row of a parquet file and each line
# of a jsonl file holds one document, and both are called rows here
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
BATCH = 64  # rows that are read and tokenized together

def find_files(source, remote_name):
    """Return [(path or URL, size in bytes)] of the corpus's files in reading order.

    Hidden files and folders are left out. If a local folder also has files that end in none of
    SUFFIXES, their names are printed.
    Raise UserError if `source` is neither a local folder nor a dataset that can be reached.
    """
    if os.path.isdir(source):
        paths = [path for path in sorted(Path(source).rglob("*")) if path.is_file()
                 and "/." not in f"/{path.relative_to(source).as_posix()}"]
        if others := [path.name for path in paths if not path.name.endswith(SUFFIXES)]:
            print(f"Only {', '.join(SUFFIXES)} files are read, not {', '.join(others)[:160]}")
        return [(str(path), path.stat().st_size) for path in paths if path.name.endswith(SUFFIXES)]
    import datasets
    import fsspec  # datasets depends on it, so it is always installed
    try:
        builder = datasets.load_dataset_builder(source, remote_name)
        urls = (builder.config.data_files or {}).get("train", [])
        return [(url, fsspec.url_to_fs(url)[0].size(url)) for url in urls if url.endswith(SUFFIXES)]
    except Exception as e:  # its class depends on the HTTP library
        raise UserError(f"source={source} is not a folder here, and its remote_name={remote_name} "
                        f"cannot be fetched from {datasets.config.HF_ENDPOINT} ({summary_of(e)}): "
                        f"check both names and the network, or try a mirror: "
                        f"HF_ENDPOINT=https://hf-mirror.com.") from None

def open_stream(url):
    """Return an IterableDataset with the rows of a file. A row is a dict with the key "text".

    In a parquet file, row["text"] is None or the text as bytes, because a column of strings may
    hold bytes that are not UTF-8. In other files, it is a whole line, which text_of() parses. (The
    "json" format of `datasets` does not accept lines with different keys.)
    """
    import datasets
    datasets.config.TORCH_AVAILABLE = False  # else it imports torch: 2 s and 150 MB
    datasets.config.STREAMING_READ_MAX_RETRIES = 5  # with the default, 20, it may wait 20 minutes
    file_format, options = "text", dict(encoding_errors="replace")
    if url.endswith(".parquet"):
        file_format, options = "parquet", dict(
            columns=["text"], batch_size=BATCH,
            features=datasets.Features({"text": datasets.Value("large_binary")}))
    return datasets.load_dataset(file_format, data_files=glob.escape(url), split="train",
                                 streaming=True, **options)

def text_of(value):
    """Return the text of a document, or "" if it is empty.

    value: row["text"] from open_stream().
    Raise ValueError if a line is not a JSON object whose "text" is a string or null.
    """
    if not isinstance(value, str):  # from a parquet file
        return (value or b"").decode("utf-8", "replace")
    # A blank line is an empty document
    document = json.loads(value.strip("\ufeff \t\n\v\f\r") or '{"text": ""}')
    if not (isinstance(document, dict) and "text" in document
            and isinstance(document["text"], str | None)):
        found = [*document] if isinstance(document, dict) else document
        raise ValueError(f"a string with the key 'text' is needed, and there is {found}")
    # Replace lone surrogates (for example half of an emoji), which tiktoken does not accept
    return (document["text"] or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")

def read_batches(urls, start):
    """Yield (file number, number of the first row, texts) for each batch of rows.

    start: where to start, as {"file": number of a file, "row": number of a row in it}.
    Raise UserError if a file cannot be read.
    """
    for number in range(start["file"], len(urls)):
        row = start["row"] if number == start["file"] else 0
        try:
            for batch in open_stream(urls[number]).skip(row).iter(batch_size=BATCH):
                first_row, texts = row, []
                for value in batch["text"]:
                    texts.append(text_of(value))
                    row += 1  # one at a time, because the message below names the row
                yield number, first_row, texts
        except Exception as e:  # ArrowInvalid, OSError, zlib.error, any network library's error
            raise UserError(f"{urls[number]} cannot be read from row {row + 1} on "
                            f"({type(e).__name__}: {' '.join(str(e).split())[:160]}): repair the "
                            f"file or the network, and repeat the command to resume.") from None

# ------------------------------------------------------------------------------------- shards
# Tokenize batches in threads and cut their tokens into shards. manifest.json lists the finished
# shards, the position in the corpus where each of them ends, and the settings that determine their
# content. For example, {"file": 2, "row": 320, "used": 1200} is the position 1,200 tokens into the
# batch that begins at row 320 of file 2. A resumed run starts at the last recorded position
def tokenize(texts, encoding_name):
    """Return the tokens (n,) of a list of texts, with an <|endoftext|> token before each text.

    If a text itself contains the characters "<|endoftext|>", they are encoded as ordinary text.
    Blank texts are skipped.
    """
    encoding = get_encoding(encoding_name, threading.get_ident())
    parts = [np.insert(encode(encoding, text), 0, encoding.eot_token)
             for text in texts if text.strip()]
    # The empty array is for batches in which all texts are blank
    return np.concatenate([np.empty(0, int), *parts]).astype(token_dtype(encoding))

def tokenize_all(batches, encoding_name, nprocs):
    """Tokenize batches in nprocs threads. tiktoken releases the GIL while it works.

    For each batch, yield (file number, first row, Future of its tokens), in the order of the
    batches. At most 3 * nprocs batches are in memory.
    """
    jobs = deque()
    with ThreadPoolExecutor(nprocs) as threads:
        for number, row, texts in batches:
            jobs.append((number, row, threads.submit(tokenize, texts, encoding_name)))
            if len(jobs) == 3 * nprocs:
                yield jobs.popleft()
        yield from jobs

def cut_shards(jobs, shard_size, dtype, start, n_files):
    """Cut tokens into shards. For each one, yield its tokens (n,) and the position where it ends.

    jobs: what tokenize_all() yields, beginning with the batch in which the first shard begins.
    start: the position where the first shard begins.
    n_files: the number of files. The end of the corpus is recorded as row 0 of file n_files.
    The yielded array is overwritten with the next shard.
    """
    shard = np.empty(shard_size, dtype)
    # filled: how many tokens are in `shard`. used: how many tokens of the current batch are already
    # in shards
    filled, used = 0, start["used"]
    # disable=None means: show the progress only on a terminal
    for number, row, job in tqdm(jobs, unit=" documents", unit_scale=BATCH, disable=None):
        tokens = job.result()
        while used < len(tokens):
            part = tokens[used:used + shard_size - filled]
            shard[filled:filled + len(part)] = part
            filled += len(part)
            used += len(part)
            if filled == shard_size:
                yield shard, {"file": number, "row": row, "used": used}
                filled = 0
        used = 0
    if filled:
        yield shard[:filled], {"file": n_files, "row": 0, "used": 0}

def settings_of(cfg, files, shards):
    """Return the "settings" of the manifest: everything that determines the content of `shards`.

    The result is a dict with shard_size, the encoding, and the name and size of each file from
    which the shards were made.
    files: [(path or URL, size in bytes)] of the whole corpus. shards: entries of the manifest.
    """
    # The shards were made from the files up to the one in which the last shard ends
    used_files = files[:shards[-1]["file"] + 1] if shards else []
    return {"shard_size": cfg.shard_size, "encoding": cfg.encoding} | {
        f"file {number}": f"{os.path.basename(url)}, {size} bytes"
        for number, (url, size) in enumerate(used_files)}

def find_finished(cfg, files):
    """Return the manifest's entries for the shards in local_dir that need not be made again.

    If a shard was deleted, it and all later shards are made again.
    Raise UserError if the settings have changed. But if there is only a validation shard, return
    [], so that it is made again. (A run whose shard_size is larger than the corpus leaves only it.)
    """
    folder = Path(cfg.local_dir)
    if not any(folder.glob("*.npy")):  # the first run
        return []
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        shards = manifest["shards"]
        before, now = manifest["settings"], settings_of(cfg, files, shards)
        reasons = [f"{name} was {before.get(name, 'absent')} and is {now.get(name, 'absent')}"
                   for name in before | now if before.get(name) != now.get(name)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        reasons = [f"manifest.json, which says how they were made, cannot be read: {summary_of(e)}"]
    if not reasons:
        return list(itertools.takewhile(lambda entry: (folder / entry["name"]).exists(), shards))
    if any(folder.glob("*_train_*.npy")):
        raise UserError(f"The shards in {folder}/ were made with different settings or files "
                        f"({'; '.join(reasons[:3])}): undo this change, or choose a different "
                        f"--local_dir.")
    return []

def write_manifest(cfg, files, shards):
    """Write manifest.json: the entries of these shards, and the settings they were made with."""
    content = json.dumps({"settings": settings_of(cfg, files, shards), "shards": shards}, indent=1)
    write_whole(Path(cfg.local_dir, "manifest.json"), lambda file: file.write(content.encode()))

def add_shards(cfg, files, shards):
    """Make the remaining shards. Return the manifest's entries for all shards, old and new.

    shards: the entries of those that are finished. Raise UserError if a file cannot be read, and
    OSError if a shard cannot be written.
    """
    encoding = get_encoding(cfg.encoding)
    # An entry of the manifest also has the position where its shard ends
    start = shards[-1] if shards else {"file": 0, "row": 0, "used": 0}
    write_manifest(cfg, files, shards)  # the old one may list shards that were deleted
    jobs = tokenize_all(read_batches([url for url, size in files], start), cfg.encoding,
                        nprocs=cfg.nprocs or os.cpu_count())
    new_shards = cut_shards(jobs, shard_size=cfg.shard_size, dtype=token_dtype(encoding),
                            start=start, n_files=len(files))
    n_missing = max(0, cfg.max_shards - len(shards)) if cfg.max_shards else None  # None: no limit
    for tokens, end in itertools.islice(new_shards, n_missing):
        # Use build-nanogpt's file names, whatever the corpus is
        name = f"edufineweb_{'train' if shards else 'val'}_{len(shards):06d}.npy"
        # np.save() writes to a real file from C, and does not notice a full disk. So give it an
        # object whose only attribute is the file's write() method
        write_whole(Path(cfg.local_dir, name),
                    lambda file: np.save(types.SimpleNamespace(write=file.write), tokens))
        shards = [*shards, {"name": name, "tokens": len(tokens), "documents": int(
            np.count_nonzero(tokens == encoding.eot_token)), **end}]
        write_manifest(cfg, files, shards)
        tqdm.write(f"{name}: {len(tokens):,} tokens, {shards[-1]['documents']:,} documents")
    return shards

def make_shards(cfg):
    """Make the shards that `cfg` asks for and local_dir lacks, and print the totals.

    Raise UserError for anything that the user can correct.
    """
    # train_gpt2.py reads T + 1 tokens at a time, and T is 1024 by default
    for name, lowest in (("shard_size", 1025), ("max_shards", 0), ("nprocs", 0)):
        if getattr(cfg, name) < lowest:
            raise UserError(f"{name}={getattr(cfg, name)}: it must be {lowest} or more.")
    cfg = dataclasses.replace(cfg, source=os.path.expanduser(cfg.source),
                              local_dir=os.path.expanduser(cfg.local_dir))
    files = find_files(cfg.source, cfg.remote_name)
    lock = lock_folder("local_dir", cfg.local_dir)  # noqa: F841  lasts until this function returns
    try:
        shards = add_shards(cfg, files, find_finished(cfg, files))
    except OSError as e:
        raise UserError(f"local_dir={cfg.local_dir} cannot be written ({summary_of(e)}): free disk "
                        f"space or allow writing, and repeat the command to resume after the last "
                        f"finished shard.") from None
    tokens = sum(entry["tokens"] for entry in shards)
    if len(shards) < 2:
        raise UserError(f"{cfg.local_dir}/ holds {tokens:,} tokens, at most a validation shard, so "
                        f"there is nothing to train on. Use more text in {', '.join(SUFFIXES)} "
                        f"files, a larger --max_shards, or a smaller --shard_size.")
    print(f"{cfg.local_dir}/: {sum(entry['documents'] for entry in shards):,} documents, "
          f"{tokens:,} tokens in {len(shards)} shards\nTo train on them: python train_gpt2.py "
          f"{shlex.quote(f'--data={cfg.local_dir}')} --encoding={cfg.encoding}")

# -------------------------------------------------------------------------------- command line
def end_at_once(signal_number, frame):
    """Handle Ctrl-C and SIGTERM: print one line and end the process, whatever it is doing.

    Raising KeyboardInterrupt is not safe. If it arrives while a library holds a lock, the lock
    may stay locked, and the process hangs during clean-up. No clean-up is needed here: finished
    shards are on the disk, the next run replaces a half-written file, and the operating system
    releases the folder's lock.
    """
    os.write(2, b"\nStopped. Repeat the command to resume after the last finished shard.\n")
    os._exit(128 + signal_number)

def main():
    """Do what the command line asks. Return the exit status: None or an error message."""
    if hasattr(sys.stdout, "reconfigure"):  # not in a notebook
        sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)  # like stderr
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, end_at_once)
    logging.disable(logging.CRITICAL)  # `datasets` logs a line for each attempt to reach the hub
    # tqdm's default lock is a semaphore, which Python may report as leaked after end_at_once(). An
    # RLock avoids this
    tqdm.set_lock(threading.RLock())
    try:
        # Leave the docstring's last paragraph out of --help. It is for readers of the code
        cfg = Config(**parse_flags(Config, __doc__.rpartition("\n\n")[0]))
        # Work in another thread, so that this one can handle signals at once. It could not do so
        # during a call that waits for the network
        ThreadPoolExecutor(1).submit(make_shards, cfg).result()
    except UserError as e:
        return f"fineweb.py: {e}"

if __name__ == "__main__":
    sys.exit(main())
