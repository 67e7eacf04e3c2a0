"""Turn FineWeb-Edu, or documents of your own, into token shards.

    python fineweb.py                  # sample-10BT, 100 shards of 100 M tokens
    python fineweb.py --max_shards=11  # 1 B tokens; a later run can add shards
    python fineweb.py --source=my_texts --local_dir=my_shards  # a local folder

Documents are streamed and never stored. A shard is a one-dimensional array of
token ids in an .npy file: uint16, or uint32 if the encoding has more than
65,536 ids. Each document starts with <|endoftext|> and may continue in the next
shard. Shard 0 is for validation. You can stop the script at any moment. To
resume, repeat the command; the shards are the same as without the interruption.

The first half of this file holds the helpers that all three scripts share.
They are not in train_gpt2.py, because that file runs as __main__. A script that
imported it would load it a second time, with a second class UserError.
"""
import argparse
import dataclasses
import errno
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
import tempfile
import threading
import types
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
    threads: int = 0                           # 0 = one per CPU core, and at most 16
    encoding: str = "gpt2"                     # a tiktoken encoding, or bytes (needs no download)

# -------------------------------------------------------------- helpers that all scripts share
END_OF_TEXT = "<|endoftext|>"  # the special token at the start of each document

class UserError(SystemExit):
    """An error that the user can correct. `except Exception` does not catch it.

    If nothing catches it, Python prints its message without a traceback and exits with status 1.
    """

def summary_of(error):
    """Return the first line of an exception's message, or the name of its class if it is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".: ")[:160]

@functools.cache
def encoding_arguments(name):
    """Return the arguments of tiktoken.Encoding for the encoding called `name`.

    To use a tokenizer of your own, add a case here. Raise KeyError if the name is unknown.
    """
    if name == "bytes":
        return dict(
            name=name,
            pat_str=r"[\s\S]{1,128}",  # bytes never merge, so any way of splitting a text will do
            mergeable_ranks={bytes([i]): i for i in range(256)},
            special_tokens={END_OF_TEXT: 256})
    from tiktoken_ext.openai_public import ENCODING_CONSTRUCTORS
    return ENCODING_CONSTRUCTORS[name]()

@functools.cache  # hellaswag.py calls this for each text
def get_encoding(name, thread_id=None):
    """Return the tiktoken.Encoding called `name`. Raise UserError if it cannot be used.

    thread_id: only part of the cache's key, so that each thread gets its own Encoding (0.04 s and
    11 MB for GPT-2). Two threads that share one also share the caches of its regular expression,
    and are 14% to 54% slower (tests/measured/tokenize.txt).
    """
    try:
        return tiktoken.Encoding(**encoding_arguments(name))
    except (KeyError, OSError, ValueError) as e:  # unknown, or the download failed or was damaged
        raise UserError(f"encoding={name} cannot be loaded ({summary_of(e)}): choose one of "
                        f"{', '.join(tiktoken.list_encoding_names())}, connect to the internet "
                        f"once, set TIKTOKEN_CACHE_DIR to a folder with the vocabulary, or use "
                        f"--encoding=bytes.")

def encode(enc, text, special=False):
    """Return the ids of a text in a tiktoken.Encoding as an array, with the dtype of shards.

    special: whether the characters <|endoftext|> in the text become the special token. By default,
    they are ordinary text.
    """
    try:
        return enc.encode_to_numpy(
            text, allowed_special={END_OF_TEXT} if special else set(), disallowed_special=()
        ).astype(np.uint16 if enc.n_vocab <= 2**16 else np.uint32)
    except ValueError:
        # tiktoken refuses lone surrogates (for example half of an emoji): replace them
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        # It also refuses some texts, for example a million spaces before a letter. Encode such a
        # text in parts. A part is <|endoftext|>, or up to 100,000 characters that do not contain it
        return np.concatenate([encode(enc, part, special) for part in re.findall(
            r"<\|endoftext\|>|(?:(?!<\|endoftext\|>)[\s\S]){1,100000}", text)])

def save_tokenizer(enc, folder, context):
    """Save a transformers tokenizer that gives the same ids as a tiktoken.Encoding.

    context: the longest input of the model, in tokens.
    Raise ValueError if transformers' converter cannot handle the ids of this encoding.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter
    arguments = encoding_arguments(enc.name)
    if [*sorted(arguments["mergeable_ranks"].values()), enc.eot_token] != list(range(enc.n_vocab)):
        raise ValueError(f"the ids of {enc.name} have gaps, or {END_OF_TEXT} is not the last")
    converter = TikTokenConverter(pattern=arguments["pat_str"], extra_special_tokens=[END_OF_TEXT])
    converter.load_tiktoken_bpe = lambda path: arguments["mergeable_ranks"]  # not from a file
    PreTrainedTokenizerFast(
        tokenizer_object=converter.converted(), bos_token=END_OF_TEXT, eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT, model_max_length=context,
        clean_up_tokenization_spaces=False).save_pretrained(folder)
    # In version 5 of transformers, the class is called TokenizersBackend, and its old name is an
    # alias. Write the old name, because version 4 does not know the new one
    path = Path(folder, "tokenizer_config.json")
    path.write_text(path.read_text().replace(
        f'"{PreTrainedTokenizerFast.__name__}"', '"PreTrainedTokenizerFast"'))

def write_whole(path, write):
    """Write a file so that `path` never holds a half-written file, not even after a power cut.

    write(file) writes the content to a temporary file, which is flushed to the disk and renamed.
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

    The caller must keep a reference to the lock. It is released when the object is deleted or this
    process ends. Raise UserError if the folder cannot be used or another process holds the lock.
    name: the name of the setting, for error messages.
    """
    import filelock  # torch and datasets depend on it, so it is always installed
    lock = filelock.FileLock(Path(folder, ".lock"))
    try:
        os.makedirs(folder, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise UserError(f"Another run uses {folder}/: wait until it has ended, or choose a "
                        f"different {name}.")
    except (NotImplementedError, OSError) as e:
        # Some network disks do not support locks. Old versions of filelock then raise
        # NotImplementedError, which has no errno
        no_locks = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
        if isinstance(e, OSError) and e.errno not in no_locks:
            raise UserError(f"{name}={folder} cannot be used ({summary_of(e)}): choose a folder in "
                            f"which files can be written.")
        print(f"{folder}/ cannot be locked: make sure that no other run uses it.")
    return lock

def refuse_flag(message):
    """Raise UserError for a wrong command line. This replaces argparse's parser.error()."""
    raise UserError(f"{message} (--help lists every flag).")

def parse_flags(cls, doc, presets=None):
    """Parse the command line; return {name: value} of the flags that were given.

    cls: a dataclass. Each field of type int, float, str, bool or Literal is a flag, and --help
    prints the comment at the end of its line. A text that begins with ~/ becomes a path in the home
    folder, because shells do not expand ~ in --log_dir=~/log.
    doc: the text that --help prints above the flags.
    presets: {name: {field: value}}. --help prints these values after the default.
    Raise UserError for an unknown flag or a value of the wrong type.
    """
    parser = argparse.ArgumentParser(description=doc, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    # {name: comment} of lines such as "    seed: int = 1337    # determines the initial weights"
    comments = dict(re.findall(r"^ +(\w+) *:[^#\n]*# *(.*)$", inspect.getsource(cls), re.M))
    for field in dataclasses.fields(cls):
        values = [repr(field.default)] + [
            f"in {preset} {constants[field.name]!r}"
            for preset, constants in (presets or {}).items() if field.name in constants]
        choices = (True, False) if field.type is bool else get_args(field.type) or None
        convert = os.path.expanduser if field.type is str else field.type
        # Where there are choices, "true" and "false", in upper or lower case, are converted to bool
        parser.add_argument(
            f"--{field.name}", default=argparse.SUPPRESS, choices=choices,
            help=f"{comments.get(field.name, '')} [{', '.join(values)}]".replace("%", "%%"),
            metavar="|".join(map(str, choices or ["X"])),
            type=(lambda word: {"true": True, "false": False}.get(word.lower(), word))
            if choices else convert)
    parser.error = refuse_flag
    return vars(parser.parse_args())

# ----------------------------------------------------------------------------------- documents
# Find and read the corpus. A row of a parquet file or a line of a jsonl file is a document
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
GROUP = 64  # documents that are read and tokenized together

def find_files(source, remote_name):
    """Return [(path or URL, size in bytes)] of the corpus's files in reading order.

    Files that end in none of SUFFIXES, and hidden files and folders, are left out. Linked folders
    are read. Raise UserError if `source` is neither a local folder nor a dataset on the hub.
    """
    if os.path.isdir(source):
        folder = Path(source).resolve()
        names = glob.glob("**/*", root_dir=folder, recursive=True)  # none of them is hidden
        paths = sorted(folder / name for name in names if name.endswith(SUFFIXES))
        return [(str(path), path.stat().st_size) for path in paths if path.is_file()]
    import datasets
    import fsspec  # datasets depends on it, so it is always installed
    try:
        builder = datasets.load_dataset_builder(source, remote_name)
        return [(url, fsspec.url_to_fs(url)[0].size(url))
                for url in (builder.config.data_files or {}).get("train", [])
                if url.endswith(SUFFIXES)]
    except Exception as e:  # its class depends on the HTTP library
        raise UserError(f"source={source} is not a folder here, and its remote_name={remote_name} "
                        f"cannot be fetched from {datasets.config.HF_ENDPOINT} ({summary_of(e)}): "
                        f"check the network, the names, and HF_ENDPOINT.")

def open_stream(url):
    """Return an IterableDataset with the documents of a file, dicts with the key "text".

    In a parquet file, the value is None or the text as bytes, which need not be valid UTF-8. In
    other files, it is a whole line, which text_of() parses. (The "json" format of `datasets` does
    not accept lines with different keys.)
    """
    import datasets
    datasets.config.TORCH_AVAILABLE = False  # else it imports torch: 2 s and 150 MB
    datasets.config.STREAMING_READ_MAX_RETRIES = 5  # with the default, 20, it may wait 20 minutes
    options = dict(path="text", encoding_errors="replace") if not url.endswith(".parquet") else (
        dict(path="parquet", columns=["text"], batch_size=GROUP,
             features=datasets.Features(text=datasets.Value("large_binary"))))
    # `datasets` makes a cache, which streaming does not use. Its default location may be read-only
    with tempfile.TemporaryDirectory() as cache:
        return datasets.load_dataset(data_files=glob.escape(url), split="train", streaming=True,
                                     cache_dir=cache, **options)

def text_of(value):
    """Return the text of a document, or "" if it is empty. value: see open_stream().

    Raise an exception if a line is not a JSON object whose "text" is a string or null.
    """
    if not isinstance(value, str):  # from a parquet file
        return (value or b"").decode("utf-8", "replace")
    document = json.loads(value.strip("\ufeff \t\n\v\f\r") or '{"text": ""}')
    return "" + (document["text"] or "")  # raise TypeError if it is not a string

def read_groups(urls, start):
    """Yield (number of the file, number of the first document, texts) for each group of documents.

    start: the position of the first group: {"file": number, "document": number}. Raise UserError if
    a file cannot be read.
    """
    for number in range(start["file"], len(urls)):
        n_read = start["document"] if number == start["file"] else 0  # documents read so far
        try:
            for group in open_stream(urls[number]).skip(n_read).iter(batch_size=GROUP):
                document, texts = n_read, []
                for value in group["text"]:
                    texts.append(text_of(value))
                    n_read += 1  # here, because the message below names the document
                yield number, document, texts
        except Exception as e:  # ArrowInvalid, OSError, zlib.error, any network library's error
            raise UserError(f"{urls[number]} cannot be read from document {n_read + 1} on "
                            f"({type(e).__name__}: {' '.join(str(e).split())[:160]}): repair the "
                            f"file or the network, and repeat the command to resume.")

# ------------------------------------------------------------------------------------- shards
# Tokenize groups in threads and cut their tokens into shards. manifest.json lists the finished
# shards, the position in the corpus where each of them ends, and the settings. For example,
# {"file": 2, "document": 320, "used": 1200} is the position 1,200 tokens into the group that begins
# at document 320 of file 2. A resumed run starts at the last such position
def tokenize(texts, encoding):
    """Return the tokens (n,) of a list of texts, with an <|endoftext|> token before each text.

    The characters "<|endoftext|>" in a text are encoded as ordinary text. Blank texts are skipped.
    """
    enc = get_encoding(encoding, threading.get_ident())
    parts = [np.insert(encode(enc, text), 0, enc.eot_token) for text in texts if text.strip()]
    # np.concatenate() needs at least one array, and all texts may be blank
    return np.concatenate([encode(enc, ""), *parts])

def tokenize_all(groups, encoding, threads):
    """Tokenize groups in the given number of threads. tiktoken releases the GIL while it works.

    For each group, yield (file number, first document, Future of its tokens), in the order of the
    groups. At most 3 * threads groups are in memory.
    """
    jobs = []
    with ThreadPoolExecutor(threads) as pool:
        for number, document, texts in groups:
            jobs.append((number, document, pool.submit(tokenize, texts, encoding)))
            if len(jobs) == 3 * threads:
                yield jobs.pop(0)
        yield from jobs

def cut_shards(jobs, shard_size, dtype, start, n_files):
    """Cut tokens into shards. For each one, yield its tokens (n,) and the position where it ends.

    jobs: what tokenize_all() yields. The first shard begins at start["used"] in the first group.
    n_files: the number of files. The end of the corpus is recorded as document 0 of file n_files.
    The yielded array is overwritten with the next shard.
    """
    # filled: tokens in `shard` so far. used: tokens of the current group that are already in shards
    shard, filled, used = np.empty(shard_size, dtype), 0, start["used"]
    # With disable=None, tqdm shows the progress only on a terminal
    for number, document, job in tqdm(jobs, unit=" documents", unit_scale=GROUP, disable=None):
        tokens = job.result()
        while used < len(tokens):
            part = tokens[used:used + shard_size - filled]
            shard[filled:filled + len(part)] = part
            filled += len(part)
            used += len(part)
            if filled == shard_size:
                yield shard, {"file": number, "document": document, "used": used}
                filled = 0
        used = 0
    if filled:
        yield shard[:filled], {"file": n_files, "document": 0, "used": 0}

def manifest_of(cfg, files, shards):
    """Return the content of manifest.json: "settings" and "shards" in JSON, as bytes.

    The settings are everything that determines the content of the shards: shard_size, the encoding,
    and the names and sizes of the files up to the one in which the last shard ends.
    files: [(path or URL, size in bytes)] of the whole corpus. shards: the entries of the shards.
    """
    used_files = files[:shards[-1]["end"]["file"] + 1] if shards else []
    return json.dumps({
        "settings": {"shard_size": cfg.shard_size, "encoding": cfg.encoding} | {
            f"file {number}": f"{os.path.basename(url)}, {size} bytes"
            for number, (url, size) in enumerate(used_files)},
        "shards": shards}, indent=1).encode()

def find_finished(cfg, files):
    """Return the manifest's entries for the shards in local_dir that need not be made again.

    If a shard was deleted, it and all later shards are made again. The validation shard is also
    made again if there are no training shards. Raise UserError if the settings have changed.
    """
    path = Path(cfg.local_dir, "manifest.json")
    if not any(path.parent.glob("*_train_*.npy")):
        return []
    before, shards = ([json.loads(path.read_bytes())[key] for key in ("settings", "shards")]
                      if path.exists() else ({}, []))  # so all settings differ
    now = json.loads(manifest_of(cfg, files, shards))["settings"]
    changes = [f"{name} was {before.get(name, 'absent')} and is {now.get(name, 'absent')}"
               for name in before | now if before.get(name) != now.get(name)]
    if changes:
        raise UserError(f"The shards in {path.parent}/ were made with different settings or files "
                        f"({'; '.join(changes[:3])}): undo this, or choose another --local_dir.")
    return list(itertools.takewhile(lambda entry: path.with_name(entry["name"]).exists(), shards))

def add_shards(cfg, files, shards):
    """Make the shards that are missing. Return the manifest's entries for all shards.

    shards: the entries of finished shards. Raise OSError if a shard cannot be written.
    """
    enc, manifest = get_encoding(cfg.encoding), Path(cfg.local_dir, "manifest.json")
    start = shards[-1]["end"] if shards else {"file": 0, "document": 0, "used": 0}
    jobs = tokenize_all(read_groups([url for url, size in files], start), cfg.encoding, cfg.threads)
    new_shards = cut_shards(jobs, shard_size=cfg.shard_size, dtype=encode(enc, "").dtype,
                            start=start, n_files=len(files))
    n_missing = max(0, cfg.max_shards - len(shards)) if cfg.max_shards else None  # None: no limit
    for tokens, end in itertools.islice(new_shards, n_missing):
        # Use build-nanogpt's file names, whatever the corpus is
        name = f"edufineweb_{'train' if shards else 'val'}_{len(shards):06d}.npy"
        # np.save() writes to a real file from C, and does not notice a full disk. So pass an object
        # that has only write()
        write_whole(manifest.with_name(name),
                    lambda file: np.save(types.SimpleNamespace(write=file.write), tokens))
        shards = [*shards, {"name": name, "tokens": len(tokens), "documents": int(
            np.count_nonzero(tokens == enc.eot_token)), "end": end}]
        write_whole(manifest, lambda file: file.write(manifest_of(cfg, files, shards)))
        tqdm.write(f"{name}: {len(tokens):,} tokens, {shards[-1]['documents']:,} documents")
    return shards

def make_shards(cfg):
    """Make the shards that `cfg` asks for and local_dir lacks, and print the totals.

    Raise UserError for anything that the user can correct.
    """
    # train_gpt2.py reads T + 1 tokens at a time, and T is 1024 by default
    if cfg.shard_size < 1025 or cfg.max_shards < 0 or cfg.threads < 0:
        raise UserError(f"shard_size={cfg.shard_size}, max_shards={cfg.max_shards}, threads="
                        f"{cfg.threads}: they must be at least 1025, 0 and 0.")
    # The thread that reads documents supplies 26 M tokens/s, and each of the others tokenizes about
    # 2 M tokens/s, so more than 16 do not help
    cfg = dataclasses.replace(cfg, threads=cfg.threads or min(16, os.cpu_count()))
    files = find_files(cfg.source, cfg.remote_name)
    lock = lock_folder("local_dir", cfg.local_dir)  # noqa: F841  lasts until this function returns
    try:
        shards = add_shards(cfg, files, find_finished(cfg, files))
    except OSError as e:
        raise UserError(f"local_dir={cfg.local_dir} cannot be written ({summary_of(e)}): free disk "
                        f"space or allow writing, and repeat the command to resume.")
    tokens = sum(entry["tokens"] for entry in shards)
    if len(shards) < 2:
        raise UserError(f"{cfg.local_dir}/ holds {tokens:,} tokens, at most a validation shard, so "
                        f"there is nothing to train on. Use more text in {', '.join(SUFFIXES)} "
                        f"files, a larger --max_shards, or a smaller --shard_size.")
    print(f"{cfg.local_dir}/: {sum(entry['documents'] for entry in shards):,} documents, "
          f"{tokens:,} tokens in {len(shards)} shards\nTo train on them: python train_gpt2.py "
          f"{shlex.quote(f'--data={cfg.local_dir}')} --encoding={cfg.encoding}")

# -------------------------------------------------------------------------------- command line
def main():
    """Make the shards that the command line asks for."""
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)  # like stderr
    # Let Ctrl-C end the process at once. If Python raised KeyboardInterrupt while a library holds a
    # lock, the process might hang during clean-up. No clean-up is needed: finished shards are on
    # the disk, the next run replaces a half-written file, and the system releases the folder's lock
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # tqdm's default lock is a semaphore, which macOS would report as leaked after Ctrl-C
    tqdm.set_lock(threading.RLock())
    logging.disable(logging.CRITICAL)  # `datasets` logs a line for each attempt to reach the hub
    # --help omits the docstring's last paragraph, which is for readers of the code
    make_shards(Config(**parse_flags(Config, __doc__.rpartition("\n\n")[0])))

if __name__ == "__main__":
    main()
