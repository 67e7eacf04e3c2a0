"""HellaSwag (Zellers et al. 2019): which of four endings is likeliest?

    python hellaswag.py                         # GPT-2 (124M), best device
    python hellaswag.py -m gpt2-xl -d cuda      # any causal LM on the hub
    python hellaswag.py -m log/hf --limit 1000  # what training exported

In training: evaluate(model, prepare(iterate_examples("val"), model))

A row per ending would compute a question's context four times. Here a question
is packed into one row: the context, then its endings. Each ending takes the
positions that follow the context, and the attention mask lets it see the
context and itself. For a context c of two tokens and two endings A and B of
three, whose last tokens are only predicted and therefore not in the row:

    position        c  c  A  A  B  B     x: the row's token attends to the column's
           0     c  x
           1     c  x  x
           2     A  x  x  x
           3     A  x  x  x  x
           2     B  x  x        x
           3     B  x  x        x  x

So the context is computed once. Logits, a third of GPT-2's work, are computed
only where they predict a token of an ending. The losses equal those of one row
per ending. Models that cannot take packed rows are scored that way.
"""
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: no traceback

import argparse
import contextlib
import io
import json
import math
import os
import random
import sys
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

DATA = Path(__file__).resolve().parent / "hellaswag" / "hellaswag_val.jsonl"
TOTAL = 10_042          # questions in the validation split
LONGEST_TEXT = 10_000   # characters; real ones have a few hundred
LONGEST = 1024          # most tokens of context and ending for any model: bounds the memory
CPU_BATCH, GPU_BATCH = 1024, 16384  # tokens per forward pass; logits for a third at a time
PACKABLE = ("GPT2Model", "GPTNeoXModel", "LlamaModel")  # tested: position_ids, 4-D masks
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


class HellaSwagError(Exception):
    """A problem that the user can solve; its text is the one line that they see."""


class Batch(NamedTuple):
    """Q questions in R rows of T tokens, with N ending tokens. All int64, on the CPU."""
    labels: torch.Tensor     # (Q,) the right ending
    tokens: torch.Tensor     # (R, T), padded with 0
    positions: torch.Tensor  # (R, T)
    segments: torch.Tensor   # (R, T) 0 = context, 1 ... = which ending, -1 = padding
    rows: torch.Tensor       # (N,) the row that predicts an ending's token
    columns: torch.Tensor    # (N,) the column that predicts it
    targets: torch.Tensor    # (N,) that token
    endings: torch.Tensor    # (N,) the number of its ending, from 0 to 4 Q - 1


class Prepared(NamedTuple):
    batches: list  # of Batch
    cut: int       # questions whose context did not fit the model


class Score(NamedTuple):
    acc: float       # share of questions whose right ending has the lowest summed loss
    acc_norm: float  # ... the lowest mean loss per token
    total: int       # questions
    cut: int         # of them, those whose context was cut on the left to fit the model


def first_line(error):
    """The first line of a library's error, cut between words to at most 160 characters."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return textwrap.shorten(lines[0].rstrip(".: "), width=160, placeholder=" ...")


# ---------------------------------------------------------------------------------- the data
def iterate_examples(split="val"):
    """HellaSwag's questions in file order, as dicts with ctx, endings (4 texts) and label (int).

    All are checked first. If DATA is missing, they are downloaded and saved there.
    """
    if split != "val":
        raise HellaSwagError(f'split="{split}" is not supported: HellaSwag is scored on "val".')
    if os.path.lexists(DATA):
        return iter(parse(read_lines(), DATA, "delete it, and it is downloaded again"))
    lines = download()
    examples = parse(lines, "the download", "try again, or name a mirror in HF_ENDPOINT")
    keep(lines)
    return iter(examples)


def read_lines():
    if not os.path.isfile(DATA):  # reading a pipe would wait forever
        raise HellaSwagError(f"{DATA} is not a file: move it away, and HellaSwag is downloaded.")
    try:
        return DATA.read_bytes().splitlines()
    except OSError as e:
        raise HellaSwagError(f"{DATA} cannot be read ({e.strerror}): change its permissions, "
                             f"or delete it, and it is downloaded again.") from None


def parse(lines, source, way_out):
    """The questions in lines of JSON. Raises HellaSwagError unless all are there and whole."""
    examples = []
    try:
        for line in lines:
            examples.append(checked(json.loads(line)))
        if len(examples) != TOTAL:
            raise ValueError(f"{len(examples):,} of {TOTAL:,} questions")
    except (ValueError, RecursionError) as e:  # ValueError: not UTF-8, not JSON, not a question
        raise HellaSwagError(f"HellaSwag is damaged in line {len(examples) + 1} of {source} "
                             f"({first_line(e)}): {way_out}.") from None
    return examples


def checked(example):
    """The question, its label made an int (the hub has text). Raises ValueError."""
    if not isinstance(example, dict) or not isinstance(example.get("endings"), list):
        raise ValueError("a question has a list of endings")
    texts = [example.get("ctx"), *example["endings"]]
    if len(texts) != 5 or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("a question has a ctx and 4 endings, none of them empty")
    if max(map(len, texts)) > LONGEST_TEXT:  # a million blanks make tiktoken panic
        raise ValueError(f"a text has more than {LONGEST_TEXT:,} characters")
    if str(example.get("label")) not in ("0", "1", "2", "3"):
        raise ValueError("a question has a label from 0 to 3")
    return example | {"label": int(example["label"])}


def download():
    """The validation split from the hub, a line of JSON for each question."""
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    print(f"downloading HellaSwag (6 MB) from {hub}")
    try:
        from huggingface_hub import hf_hub_download, logging
        from pyarrow import parquet
        logging.set_verbosity_error()  # hide its lines on retries; a failure is reported below
        file = hf_hub_download("Rowan/hellaswag", "default/validation/0000.parquet",
                               repo_type="dataset", endpoint=hub,
                               revision="refs/convert/parquet")  # made by the hub from any main
        return [json.dumps(row) for row in parquet.read_table(file).to_pylist()]
    except Exception as e:  # the hub's client, HTTP and pyarrow have no common class
        while e.__cause__:  # the root cause is shorter and says more
            e = e.__cause__
        raise HellaSwagError(f"HellaSwag cannot be downloaded from {hub} ({first_line(e)}): check "
                             f"the network, name a mirror in HF_ENDPOINT, or put the questions "
                             f"at {DATA}.") from None


def keep(lines):
    """Put the questions at DATA, whole or not at all. Where that fails, say so and go on."""
    part = DATA.with_name(f"{DATA.name}.{os.getpid()}.part")
    try:
        DATA.parent.mkdir(exist_ok=True)
        part.write_text("\n".join(lines))
        part.replace(DATA)
    except OSError as e:
        print(f"HellaSwag is not kept at {DATA} ({e.strerror}): it is scored from memory.")
        with contextlib.suppress(OSError):
            part.unlink()


# --------------------------------------------------------------------------- tokens and rows
def gpt2_encode(text):
    import tiktoken
    try:
        return tiktoken.get_encoding("gpt2").encode_ordinary(text)
    except (OSError, ValueError) as e:  # requests' are OSErrors; a damaged file is a ValueError
        raise HellaSwagError(f"GPT-2's vocabulary cannot be loaded ({type(e).__name__}): go "
                             f"online once, or point TIKTOKEN_CACHE_DIR at a folder that "
                             f"has it.") from None


def tokenize(example, encode=gpt2_encode):
    """A question's token ids, (context, [four endings]); encode: text -> ids."""
    # Some tokenizers begin every text with a token or a space of their own. So an ending is
    # encoded after a word, whose tokens are then dropped.
    start = len(encode("a"))
    return encode(example["ctx"]), [encode("a " + ending)[start:] for ending in example["endings"]]


def render_example(example):
    """A question in GPT-2's tokens, one padded row per ending: (data, tokens, mask, label).

    tokens and mask are (4, N) int64; the mask is 1 on an ending's tokens. This is the plain
    form, for readers and for other tools: our own scoring packs the endings into one row.
    """
    context, endings = tokenize(example)
    tokens = [torch.tensor(context + ending) for ending in endings]
    mask = [torch.tensor([0] * len(context) + [1] * len(ending)) for ending in endings]
    data = {"context": context, "endings": endings, "label": example["label"]}
    return (data, pad_sequence(tokens, batch_first=True), pad_sequence(mask, batch_first=True),
            example["label"])


def prepare(examples, model, encode=gpt2_encode):
    """iterate_examples' dicts as batches for a model, for any number of evaluate() calls.

    encode: text -> token ids of the model's vocabulary. Raises HellaSwagError if an id is not
    in it, or if there is no question.
    """
    vocabulary, length = limits(model)
    packed = reads_packed(model)
    questions, cut = [], 0
    for example in examples:
        context, endings = tokenize(example, encode)
        check_tokens([context, *endings], vocabulary)
        shorter, endings = cut_to_fit(length, context, endings)
        cut += len(shorter) < len(context)
        rows = [(shorter, endings)] if packed else [(shorter, [ending]) for ending in endings]
        questions.append((example["label"], rows))
    if not questions:
        raise HellaSwagError("There are no HellaSwag questions to score: give at least one.")
    budget = batch_tokens(model) if packed else batch_tokens(model) // 3  # logits for every token
    return Prepared([collate(group) for group in group_by_size(questions, budget)], cut)


def limits(model):
    """How many token ids and how many positions a model has, as far as its config says."""
    def said(name):
        return getattr(getattr(model, "config", None), name, None) or math.inf
    return (min(said("n_vocab"), said("vocab_size")),
            min(said("block_size"), said("max_position_embeddings"), LONGEST))


def check_tokens(texts, vocabulary):
    """Raise HellaSwagError unless each text has tokens, all of the vocabulary."""
    if not all(texts) or max(map(max, texts)) >= vocabulary:
        raise HellaSwagError(f"The questions' tokens are not in the model's vocabulary of "
                             f"{vocabulary}: take a model with GPT-2's vocabulary, or one with "
                             f"its tokenizer beside it.")


def cut_to_fit(length, context, endings):
    """Drop the context's oldest tokens until it fits `length` together with any ending.

    Of an ending longer than `length`, its first `length` tokens stay, after one of context.
    """
    longest = max(map(len, endings))
    room = max(1, length + 1 - longest)  # + 1: an ending's last token is predicted, never read
    return context[-room:], [ending[:length] for ending in endings]


def size(question):
    """Tokens of a question's rows, padded to the longest of them."""
    label, rows = question
    return len(rows) * max(len(context) + sum(map(len, endings)) for context, endings in rows)


def group_by_size(questions, budget):
    """Groups of questions of similar size, each of at most `budget` tokens with its padding."""
    questions = sorted(questions, key=size)
    groups = []
    while questions:
        n = max(1, budget // size(questions[-1]))  # the last is the longest
        groups.append(questions[-n:])
        del questions[-n:]
    random.Random(0).shuffle(groups)  # short ones are harder: sorted, the bar would drift
    return groups


def collate(questions):
    """A Batch of questions (label, [(context, endings), ...]). See the drawing at the top."""
    tokens, positions, segments = [], [], []  # a tensor for each row
    predictions = []                          # (row, column, target, ending)
    all_rows = [row for _, rows in questions for row in rows]
    for r, (context, endings) in enumerate(all_rows):
        row, position, segment = [*context], [*range(len(context))], [0] * len(context)
        for i, ending in enumerate(endings):
            # The context's last token predicts an ending's first, each of its tokens the next.
            columns = [len(context) - 1, *range(len(row), len(row) + len(ending) - 1)]
            for column, target in zip(columns, ending, strict=True):
                predictions.append((r, column, target, r * len(endings) + i))
            row += ending[:-1]
            position += range(len(context), len(context) + len(ending) - 1)
            segment += [i + 1] * (len(ending) - 1)
        tokens.append(torch.tensor(row))
        positions.append(torch.tensor(position))
        segments.append(torch.tensor(segment))
    return Batch(torch.tensor([label for label, _ in questions]),
                 pad_sequence(tokens, batch_first=True),
                 pad_sequence(positions, batch_first=True),
                 pad_sequence(segments, batch_first=True, padding_value=-1),
                 *torch.tensor(predictions).unbind(1))


# ----------------------------------------------------------------------------------- scoring
def device_of(model):
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return next((p.device for p in parameters), torch.device("cpu"))


def batch_tokens(model):
    return CPU_BATCH if device_of(model).type == "cpu" else GPU_BATCH


def reads_packed(model):
    """Whether it is a train_gpt2.GPT, compiled or not, or a transformers model known to work."""
    return (hasattr(model, "hidden")
            or type(getattr(model, "base_model", None)).__name__ in PACKABLE)


def attention_mask(segments):
    """The drawing at the top for each row: segments (R, T) -> bool (R, 1, T, T)."""
    context = segments[:, None, :] == 0                      # (R, 1, T)
    same = segments[:, :, None] == segments[:, None, :]      # (R, T, T)
    return (context | same).tril()[:, None]


def forward(model, tokens, positions, segments):
    """Hidden states (R, T, C), and the function that turns (N, C) of them into logits (N, V).

    For a model that does not take packed rows: its logits (R, T, V), and the identity.
    torch.compile() wraps the call of the model itself, which happens only there. It is kept
    eager, since each batch has another shape and would be compiled again.
    """
    if not reads_packed(model):
        with torch.compiler.set_stance("force_eager"):
            logits = model(tokens)
        return logits if torch.is_tensor(logits) else logits[0], lambda x: x
    mask = attention_mask(segments)
    if hasattr(model, "hidden"):
        return model.hidden(tokens, positions, mask), model.to_logits
    bias = torch.zeros(mask.shape, dtype=model.dtype, device=mask.device)
    bias.masked_fill_(~mask, -math.inf)
    x = model.base_model(tokens, position_ids=positions, attention_mask=bias, use_cache=False)[0]
    return x, model.get_output_embeddings()


@torch.no_grad()
def ending_losses(model, batch):
    """For each ending of a batch, its summed loss in nats and its token count: (Q, 4) each."""
    on_device = Batch(*(x.to(device_of(model)) for x in batch))
    x, to_logits = forward(model, on_device.tokens, on_device.positions, on_device.segments)
    x = x[on_device.rows, on_device.columns]  # (N, C)
    n = batch_tokens(model) // 3  # at once, to bound the memory of logits
    losses = []
    for part, targets in zip(x.split(n), on_device.targets.split(n), strict=True):
        losses.append(F.cross_entropy(to_logits(part).float(), targets, reduction="none"))
    sums = batch.endings.bincount(torch.cat(losses).cpu().double())
    return sums.view(-1, 4), batch.endings.bincount().view(-1, 4)


def count_right(model, batch):
    """Counts of a batch's questions, (4,): right by sum, right by mean, all, with nan or inf."""
    sums, lengths = ending_losses(model, batch)  # (Q, 4)
    right = sums.argmin(1) == batch.labels
    right_norm = (sums / lengths).argmin(1) == batch.labels
    broken = ~sums.isfinite().all(1)
    return torch.tensor([right.sum(), right_norm.sum(), len(sums), broken.sum()])


def evaluate(model, examples, progress=False, stop=None):
    """The Score of a model, the same on every rank and for any number of ranks.

    model: a train_gpt2.GPT or, in eval(), a transformers causal language model, compiled or
    not; or a function from ids (B, T) to logits (B, T, V). It runs in the caller's autocast.
    examples: prepare()'s result, or what prepare() takes. progress: show a bar.
    stop: a function without arguments, called before each batch and equally often on every
    rank, so it may use a collective. It must return the same on every rank. After True, the
    evaluation ends and returns None.
    Raises HellaSwagError, on every rank, if a loss is not finite.
    """
    questions = examples if isinstance(examples, Prepared) else prepare(examples, model)
    rank, world = 0, 1
    if dist.is_available() and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    mine = questions.batches[rank::world]
    rounds = math.ceil(len(questions.batches) / world)  # rank 0's; others may have one batch less
    counts = torch.zeros(4, dtype=torch.int64)  # see count_right()
    bar = tqdm(range(rounds), unit="batch", disable=not progress or rank > 0)
    for i in bar:
        if stop is not None and stop():
            return None
        if i < len(mine) and counts[3] == 0:  # skip the rest once a loss is not finite
            counts += count_right(model, mine[i])
            bar.set_postfix_str(f"acc_norm {counts[1] / counts[2]:.4f}")
    if world > 1:
        counts = counts.to(device_of(model))  # NCCL takes no CPU tensors
        dist.all_reduce(counts)
    right, right_norm, total, broken = counts.tolist()
    if broken:
        raise HellaSwagError("HellaSwag cannot be scored: the model's losses are not finite (nan "
                             "or inf). Its weights are damaged, or too large for its dtype.")
    return Score(right / total, right_norm / total, total, questions.cut)


# ------------------------------------------------------------------------------ command line
def check_device(name):
    try:
        torch.ones(2, device=name).sum().item()  # fails without the device, or code for it
    except (RuntimeError, AssertionError) as e:  # AssertionError: torch built without CUDA
        if out_of_memory(e):
            raise
        raise HellaSwagError(f"-d {name} is not a device that PyTorch can use here: take -d cpu, "
                             f"or leave -d out.") from None


def load_model(name, device):
    """A transformers causal LM, float32 and in eval(), by hub name or folder, and its encode()."""
    try:
        import transformers
        from huggingface_hub import logging
        transformers.logging.set_verbosity_error()  # the error below says it in one line
        transformers.logging.disable_progress_bar()
        logging.set_verbosity_error()
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            name, use_safetensors=True, trust_remote_code=False, output_loading_info=True)
        if info["missing_keys"]:
            raise ValueError(f"it lacks {min(info['missing_keys'])}")
        encode = gpt2_encode
        if has_tokenizer(name) or model.config.vocab_size != 50257:  # GPT-2's size
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            encode = tokenizer.encode
        return model.float().eval().to(device), encode
    except Exception as e:  # config, hub, HTTP, safetensors, tokenizers: no common class
        if out_of_memory(e):
            raise
        if "trust_remote_code" in str(e):
            raise HellaSwagError(f"-m {name} needs Python code of its own, which is not run here: "
                                 f"give a model that transformers itself knows.") from None
        what = "is a folder that" if os.path.isdir(name) else "is not a folder, and from the hub"
        raise HellaSwagError(f"-m {name} {what} cannot be loaded as a causal language model "
                             f"({first_line(e)}): give a hub name like gpt2, or a folder "
                             f"with config.json and model.safetensors like log/hf.") from None


def has_tokenizer(name):
    """Whether a folder or repository has a tokenizer of its own.

    Where it has none, transformers fails or makes an empty one, depending on its version.
    """
    from huggingface_hub import snapshot_download
    folder = name
    if not os.path.isdir(name):
        folder = snapshot_download(name, allow_patterns=TOKENIZER_FILES)
    return any(Path(folder, file).exists() for file in TOKENIZER_FILES)


def out_of_memory(error):
    """Whether memory ran out. On a CPU and on MPS, only the text of torch's error tells."""
    text = str(error)
    return isinstance(error, MemoryError) or "out of memory" in text or "allocate memory" in text


def score(args):
    """Load, score and print as the command line asks."""
    check_device(args.device)
    examples = list(iterate_examples("val"))[:max(0, args.limit)]
    model, encode = load_model(args.model, args.device)
    questions, device = prepare(examples, model, encode), model.device
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    start = time.perf_counter()
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        result = evaluate(model, questions, progress=True)
    speed = result.total / (time.perf_counter() - start)
    print(f"{args.model} on {device} in {'bfloat16' if bf16 else 'float32'}: {result.total:,} "
          f"questions ({result.cut:,} cut on the left to the model's context), "
          f"{speed:.1f} examples/s")
    print_accuracy("acc", result.acc, result.total, "summed loss")
    print_accuracy("acc_norm", result.acc_norm, result.total, "mean loss per token")
    print("To compare (acc / acc_norm): GPT-2 (124M) 0.2859 / 0.2955, GPT-2 XL 0.3842 / 0.4893, "
          "GPT-3 (124M) - / 0.337")


def print_accuracy(name, p, n, how):
    error = math.sqrt(p * (1 - p) / n)  # standard error of a share p of n
    print(f"{name:<8} {p:.4f} +- {error:.4f}   (lowest {how} wins)")


class LossyFile(io.FileIO):
    """A descriptor for output that drops what cannot be written: pipe closed, disk full."""

    def write(self, data):
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def lossy(stream):
    """stdout or stderr, rewrapped: output that cannot be written is dropped without an error.

    Characters that its encoding lacks are escaped.
    """
    if stream is None:  # closed before Python started; the descriptor must not become a file's
        return open(os.devnull, "w")
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:  # not a file, as in a notebook
        return stream
    raw = LossyFile(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=stream.encoding,
                            errors="backslashreplace", line_buffering=True)


def main():
    best = "cpu"
    if torch.cuda.is_available():
        best = "cuda"
    elif torch.backends.mps.is_available():
        best = "mps"
    parser = argparse.ArgumentParser(description="\n\n".join(__doc__.split("\n\n")[:2]),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="gpt2",
                        help="name on the Hugging Face hub, or a folder (default: gpt2)")
    parser.add_argument("-d", "--device", default=best,
                        help=f"cuda, cuda:1, mps or cpu (default: {best})")
    parser.add_argument("--limit", type=int, default=TOTAL, metavar="N",
                        help="score the first N questions only")
    parser.error = lambda message: sys.exit(f"hellaswag.py: {message}; --help lists the options.")
    args = parser.parse_args()
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        score(args)
    except (HellaSwagError, KeyboardInterrupt) as e:
        sys.exit(f"hellaswag.py: {str(e) or 'stopped.'}")
    except Exception as e:  # a failed mmap, for one, is an OSError or a SafetensorError
        if not out_of_memory(e):
            raise
        sys.exit(f"hellaswag.py: {args.device} has too little memory for {args.model}: take a "
                 f"smaller model with -m, or another device with -d.")


if __name__ == "__main__":
    sys.stdout, sys.stderr = lossy(sys.stdout), lossy(sys.stderr)
    main()
