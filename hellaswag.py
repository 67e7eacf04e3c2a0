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

So the context is computed once, and logits, a third of GPT-2's work, only where
they predict a token of an ending. The losses equal those of one row per ending,
which is how models other than ours are scored: few take positions and a mask.
"""
import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from fineweb import UserError, first_line, get_encoding, write_whole

DATA = Path(__file__).resolve().parent / "hellaswag" / "hellaswag_val.jsonl"
TOTAL = 10_042                      # questions in the validation split
CPU_BATCH, GPU_BATCH = 1024, 16384  # tokens per forward pass; logits for a third at a time


class Batch(NamedTuple):
    """Q questions in R rows of T tokens, with N ending tokens. All int64, on the CPU."""
    labels: torch.Tensor       # (Q,) the right ending
    tokens: torch.Tensor       # (R, T), padded with 0
    segments: torch.Tensor     # (R, T) 0 = context, 1 ... = which ending, -1 = padding
    predictions: torch.Tensor  # (N, 4) row, column, token that comes next, number of its ending


class Prepared(NamedTuple):
    batches: list  # of Batch
    cut: int       # questions whose context did not fit the model


class Score(NamedTuple):
    acc: float       # share of questions whose right ending has the lowest summed loss
    acc_norm: float  # ... the lowest mean loss per token
    total: int       # questions
    cut: int         # of them, those whose context was cut on the left to fit the model


# ---------------------------------------------------------------------------------- the data
def iterate_examples(split="val"):
    """HellaSwag's questions in file order, as dicts with ctx, endings (4 texts) and label (int).

    If DATA is missing, they are downloaded and saved there. Raises UserError.
    """
    assert split == "val", "HellaSwag is scored on its validation split"
    if not DATA.exists():
        download()
    try:
        lines = DATA.read_bytes().splitlines()
        return iter(checked([json.loads(line) for line in lines]))
    except (OSError, ValueError, KeyError) as e:
        raise UserError(f"{DATA} is damaged ({first_line(e)}): delete it, start again.") from None


def checked(examples):
    """The questions, their labels made ints (the hub has text). Raises ValueError, KeyError."""
    if len(examples) != TOTAL:
        raise ValueError(f"{len(examples):,} of {TOTAL:,} questions")
    for example in examples:
        example["label"] = int(example["label"])
        if example["label"] not in range(4):
            raise ValueError(f"a question has the label {example['label']}")
    return examples


def download():
    """Fetch the validation split from the hub; write it to DATA, a line of JSON per question."""
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    print(f"downloading HellaSwag (6 MB) from {hub}")
    try:
        from huggingface_hub import hf_hub_download, logging
        from pyarrow import parquet
        logging.set_verbosity_error()  # hide its lines on retries; a failure is reported below
        file = hf_hub_download("Rowan/hellaswag", "default/validation/0000.parquet",
                               repo_type="dataset", endpoint=hub,
                               revision="refs/convert/parquet")  # made by the hub from any main
        examples = checked(parquet.read_table(file).to_pylist())
        lines = [json.dumps(example).encode() + b"\n" for example in examples]
        write_whole(DATA, lambda file: file.writelines(lines))
    except Exception as e:  # the hub's client, HTTP and pyarrow have no common class
        reason = first_line(e.__cause__ or e)
        raise UserError(f"HellaSwag cannot be downloaded from {hub} ({reason}): go online, name a "
                        f"mirror in HF_ENDPOINT, or put the questions at {DATA}.") from None


# --------------------------------------------------------------------------- tokens and rows
def gpt2_encode(text):
    return get_encoding("gpt2").encode_ordinary(text)


def tokenize(example, encode=gpt2_encode):
    """A question's token ids, (context, [four endings]); encode: text -> ids."""
    # Some tokenizers begin every text with a token or a space of their own. So an ending is
    # encoded after a word, whose tokens are then dropped.
    start = len(encode("a"))
    return encode(example["ctx"]), [encode("a " + ending)[start:] for ending in example["endings"]]


def render_example(example):
    """A question in GPT-2's tokens, one padded row per ending: (data, tokens, mask, label).

    tokens and mask are (4, N) int64; the mask is 1 on an ending's tokens. For readers and for
    other tools: our own scoring packs the endings into one row.
    """
    context, endings = tokenize(example)
    tokens = [torch.tensor(context + ending) for ending in endings]
    mask = [torch.tensor([0] * len(context) + [1] * len(ending)) for ending in endings]
    data = {"context": context, "endings": endings, "label": example["label"]}
    tokens, mask = pad_sequence(tokens, batch_first=True), pad_sequence(mask, batch_first=True)
    return data, tokens, mask, example["label"]


def prepare(examples, model, encode=gpt2_encode):
    """Batches of iterate_examples' dicts for a model, whose token ids encode(text) gives."""
    packed = hasattr(model, "hidden")  # a train_gpt2.GPT, compiled or not
    config = getattr(model, "config", None)
    length = getattr(config, "block_size", getattr(config, "max_position_embeddings", 1024))
    questions, cut = [], 0
    for example in examples:
        context, endings = tokenize(example, encode)
        endings = [ending[:length] for ending in endings]
        room = length + 1 - max(map(len, endings))  # an ending's last token is predicted, not read
        cut += len(context) > room
        context = context[-room:]
        rows = [(context, endings)] if packed else [(context, [ending]) for ending in endings]
        questions.append((example["label"], rows))
    budget = batch_tokens(model) if packed else batch_tokens(model) // 3  # logits for every token
    return Prepared([collate(group) for group in group_by_size(questions, budget)], cut)


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
    return groups


def collate(questions):
    """A Batch of questions (label, [(context, endings), ...]). See the drawing at the top."""
    tokens, segments, predictions = [], [], []
    labels, all_rows = [], []
    for label, rows in questions:
        labels.append(label)
        all_rows += rows
    for r, (context, endings) in enumerate(all_rows):
        row, segment = [*context], [0] * len(context)
        for i, ending in enumerate(endings):
            # The context's last token predicts an ending's first, each of its tokens the next.
            columns = [len(context) - 1, *range(len(row), len(row) + len(ending) - 1)]
            for column, target in zip(columns, ending, strict=True):
                predictions.append((r, column, target, r * len(endings) + i))
            row += ending[:-1]
            segment += [i + 1] * (len(ending) - 1)
        tokens.append(torch.tensor(row))
        segments.append(torch.tensor(segment))
    return Batch(labels=torch.tensor(labels),
                 tokens=pad_sequence(tokens, batch_first=True),
                 segments=pad_sequence(segments, batch_first=True, padding_value=-1),
                 predictions=torch.tensor(predictions))


# ----------------------------------------------------------------------------------- scoring
def device_of(model):
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return next((p.device for p in parameters), torch.device("cpu"))


def batch_tokens(model):
    return CPU_BATCH if device_of(model).type == "cpu" else GPU_BATCH


def attention_mask(segments):
    """The drawing at the top for each row: segments (R, T) -> bool (R, T, T)."""
    context = segments[:, None, :] == 0                  # (R, 1, T)
    same = segments[:, :, None] == segments[:, None, :]  # (R, T, T)
    return (context | same).tril()


def forward(model, tokens, segments):
    """Hidden states (R, T, C) and what makes logits (N, V) of (N, C); or logits and the identity.

    torch.compile() wraps the call of the model itself, which happens for other models than ours.
    It is kept eager, since each batch has another shape and would be compiled again.
    """
    if hasattr(model, "hidden"):
        mask = attention_mask(segments)
        # A token's position is how many stand before it in its own text. Padding gets 0.
        positions = (mask.sum(2) - 1) * (segments >= 0)
        return model.hidden(tokens, positions, mask[:, None]), model.to_logits
    with torch.compiler.set_stance("force_eager"):
        output = model(tokens)
    return getattr(output, "logits", output), lambda x: x


# Without cuDNN's attention, which takes up to half a second to plan for each new shape of a batch.
@sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
@torch.no_grad()
def ending_losses(model, batch):
    """For each ending of a batch, its summed loss in nats and its token count: (Q, 4) each."""
    device = device_of(model)
    x, to_logits = forward(model, batch.tokens.to(device), batch.segments.to(device))
    rows, columns, targets, endings = batch.predictions.unbind(1)  # (N,) each
    x, targets = x[rows.to(device), columns.to(device)], targets.to(device)
    n = batch_tokens(model) // 3  # at once, to bound the memory of logits
    losses = []
    for part, part_targets in zip(x.split(n), targets.split(n), strict=True):
        losses.append(F.cross_entropy(to_logits(part).float(), part_targets, reduction="none"))
    sums = endings.bincount(torch.cat(losses).cpu().double())
    return sums.view(-1, 4), endings.bincount().view(-1, 4)


def count_right(model, batch):
    """Counts of a batch's questions, (4,): right by sum, right by mean, all, with nan or inf."""
    sums, lengths = ending_losses(model, batch)  # (Q, 4)
    right = sums.argmin(1) == batch.labels
    right_norm = (sums / lengths).argmin(1) == batch.labels
    broken = ~sums.isfinite().all(1)
    return torch.tensor([right.sum(), right_norm.sum(), len(sums), broken.sum()])


def evaluate(model, examples, progress=False):
    """The Score of a model, the same on every rank and for any number of ranks.

    model: a train_gpt2.GPT or, in eval(), a transformers causal language model, compiled or
    not; or a function from ids (B, T) to logits (B, T, V). It runs in the caller's autocast.
    examples: prepare()'s result, or what prepare() takes. progress: show a bar.
    Raises UserError, on every rank, if a loss is not finite.
    """
    questions = examples if isinstance(examples, Prepared) else prepare(examples, model)
    rank, world = 0, 1
    if dist.is_available() and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    counts = torch.zeros(4, dtype=torch.int64)  # see count_right()
    for batch in tqdm(questions.batches[rank::world], unit="batch", disable=not progress):
        counts += count_right(model, batch)
    if world > 1:
        counts = counts.to(device_of(model))  # NCCL takes no CPU tensors
        dist.all_reduce(counts)
    right, right_norm, total, broken = counts.tolist()
    if broken:
        raise UserError("HellaSwag: losses are not finite; are weights damaged, or dtype float16?")
    return Score(right / total, right_norm / total, total, questions.cut)


# ------------------------------------------------------------------------------ command line
def load_model(name, device):
    """A transformers causal LM in float32, by hub name or folder, and its encode()."""
    try:
        import transformers
        transformers.logging.set_verbosity_error()  # the error below says it in one line
        transformers.logging.disable_progress_bar()
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            name, use_safetensors=True, trust_remote_code=False, output_loading_info=True)
        if info["missing_keys"]:
            raise ValueError(f"it lacks {min(info['missing_keys'])}")
        encode = gpt2_encode
        if model.config.vocab_size != 50257:  # another vocabulary than GPT-2's
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            encode = tokenizer.encode
            if not encode("a"):  # a folder without a tokenizer gives one without tokens
                raise ValueError("it has no tokenizer")
        model.config.use_cache = False  # of no use here, and slow
        return model.float().to(device), encode
    except Exception as e:  # config, hub, HTTP, safetensors, tokenizers: no common class
        raise UserError(f"-m {name} cannot be loaded on -d {device} ({first_line(e)}): give a hub "
                        f"name like gpt2, or a folder like log/hf.") from None


def score(args):
    """Load, score and print as the command line asks."""
    examples = list(iterate_examples("val"))[:args.limit]
    model, encode = load_model(args.model, args.device)
    questions, device = prepare(examples, model, encode), model.device
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        result = evaluate(model, questions, progress=True)
    print(f"{args.model} on {device} in {'bfloat16' if bf16 else 'float32'}: {result.total:,} "
          f"questions ({result.cut:,} cut on the left to fit)")
    for name, p, which in (("acc", result.acc, "summed loss"),
                           ("acc_norm", result.acc_norm, "mean loss per token")):
        error = math.sqrt(p * (1 - p) / result.total)  # standard error of a share
        print(f"{name:<8} {p:.4f} +- {error:.4f}   (lowest {which} wins)")
    print("To compare (acc / acc_norm): GPT-2 (124M) 0.2859 / 0.2955, GPT-2 XL 0.3842 / 0.4893, "
          "GPT-3 (124M) - / 0.337")


def main():
    best = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    parser = argparse.ArgumentParser(description="\n\n".join(__doc__.split("\n\n")[:2]),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="gpt2",
                        help="name on the Hugging Face hub, or a folder (default: gpt2)")
    parser.add_argument("-d", "--device", default=best,
                        help=f"cuda, cuda:1, mps or cpu (default: {best})")
    parser.add_argument("--limit", type=int, default=TOTAL, metavar="N",
                        help="score the first N questions only")
    parser.error = lambda message: sys.exit(f"hellaswag.py: {message}; --help lists the options.")
    try:
        score(parser.parse_args())
    except UserError as e:
        sys.exit(f"hellaswag.py: {e}")


if __name__ == "__main__":
    main()
