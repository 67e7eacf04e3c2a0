"""HellaSwag (Zellers et al. 2019): which ending does a model find likeliest?

    python hellaswag.py                           # GPT-2 (124M), best device
    python hellaswag.py -m gpt2-xl -d cuda        # any causal LM of the hub
    python hellaswag.py -m log/hf --limit 1000    # what training exported

In training: score = evaluate(model, prepare(iterate_examples("val"), model))

A question is one packed row: the context, then its four endings, each at the
positions that follow the context and behind a mask through which it sees the
context and itself. So the context is computed once, and the head, a third of
GPT-2's work, only where an ending's token is predicted. The losses are those
of a row per ending, which models get that don't read packed rows.
"""
import argparse
import contextlib
import ctypes
import json
import math
import os
import random
import sys
import time
from collections import namedtuple
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

DATA = Path(__file__).resolve().parent / "hellaswag" / "hellaswag_val.jsonl"
TOTAL = 10_042  # questions in the validation split
PACKABLE = ("GPT2LMHeadModel", "GPTNeoXForCausalLM", "LlamaForCausalLM")  # tested to heed positions and 4-D masks
LONGEST = 1024  # tokens of context and ending, also for models that could read more: memory stays bounded
CPU_BATCH, GPU_BATCH = 1024, 16384  # tokens of a forward pass; a third as many have logits at once
Prepared = namedtuple("Prepared", "batches cut")       # [(labels (Q,), *collate()), ...], how many questions were cut
Score = namedtuple("Score", "acc acc_norm total cut")  # by summed loss, by mean loss, of how many questions


class HellaSwagError(Exception):
    """Something the person at the keyboard can mend; its text is the one line they are shown."""


def reason(error):
    """The first line of somebody else's error, short enough to stand in ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160].rstrip(".: ")


# -------------------------------------------------------------------------------------------------- the data
def iterate_examples(split="val"):
    """HellaSwag's questions in file order, fetched if need be, all checked: dicts with ctx, endings (4), label."""
    if split != "val":
        raise HellaSwagError(f'split="{split}" is not kept here: HellaSwag is scored on split="val".')
    examples, fetched = [], None if DATA.exists() else fetch()
    try:
        for line in fetched or DATA.read_bytes().splitlines():
            examples.append(checked(json.loads(line)))
        if len(examples) != TOTAL:
            raise ValueError(f"{len(examples):,} of {TOTAL:,} questions")
        if fetched:
            part = DATA.with_name(f"{DATA.name}.{os.getpid()}.part")
            DATA.parent.mkdir(exist_ok=True)
            part.write_text("\n".join(fetched))
            part.replace(DATA)
    except (OSError, ValueError, RecursionError) as e:  # ValueError: not UTF-8, not JSON, not a question
        raise HellaSwagError(f"HellaSwag is damaged in line {len(examples) + 1} ({reason(e)}): delete {DATA} and it is "
                             f"fetched anew.") from None
    return iter(examples)


def checked(example):
    """The question, its label made an int (the hub has text). Raises ValueError."""
    ctx, endings, label = map(example.get, ("ctx", "endings", "label")) if isinstance(example, dict) else [None] * 3
    if not (isinstance(endings, list) and len(endings) == 4 and all(s and isinstance(s, str) for s in (ctx, *endings))
            and str(label) in ("0", "1", "2", "3")):
        raise ValueError("a question has ctx, 4 endings and a label from 0 to 3")
    return example | {"label": int(label)}


def fetch():
    """The validation split, a line of JSON for each question."""
    print(f"fetching HellaSwag (6 MB) to {DATA}", flush=True)
    try:
        from huggingface_hub import hf_hub_download, logging
        from pyarrow import parquet
        logging.set_verbosity_error()  # its retries end in the one line below
        file = hf_hub_download("Rowan/hellaswag", "default/validation/0000.parquet", repo_type="dataset",
                               revision="refs/convert/parquet")  # the hub's own, whatever form the main branch has
        return [json.dumps(row) for row in parquet.read_table(file).to_pylist()]
    except Exception as e:  # the hub's client, its HTTP library, pyarrow: there is no list of their errors
        raise HellaSwagError(f"HellaSwag can't be fetched ({reason(e)}): go online, name a mirror in HF_ENDPOINT, or "
                             f"put the file at {DATA}.") from None


# ------------------------------------------------------------------------------------------- tokens and rows
def gpt2_encode(text):
    import tiktoken
    try:
        return tiktoken.get_encoding("gpt2").encode_ordinary(text)
    except (OSError, ValueError) as e:  # requests' errors are OSErrors; a damaged download is a ValueError
        raise HellaSwagError(f"The GPT-2 vocabulary can't be had ({type(e).__name__}): go online once, or point "
                             f"TIKTOKEN_CACHE_DIR at a folder that holds it.") from None


def tokenize(example, encode=gpt2_encode):
    """A question's token ids, (context, [four endings]); encode: text -> ids."""
    start = len(encode(""))  # some tokenizers begin every text with a token of their own
    return encode(example["ctx"]), [encode(" " + ending)[start:] for ending in example["endings"]]


def render_example(example):
    """A question as four padded rows: (data, tokens (4, N) int64, mask (4, N) int64 with 1 on endings, label)."""
    context, endings = tokenize(example)
    tokens = pad_sequence([torch.tensor(context + ending) for ending in endings], batch_first=True)
    mask = pad_sequence([torch.tensor([0] * len(context) + [1] * len(ending)) for ending in endings], batch_first=True)
    return {"context": context, "endings": endings, "label": example["label"]}, tokens, mask, example["label"]


def collate(rows):
    """A batch of R rows [(context, endings), ...] as int64 tensors: (token, position, segment: 0 = context, 1 ... =
    endings, -1 = padding) (R, T, 3), and (in which row, where, token, in which ending) of what is predicted (N, 4)."""
    cells, predictions = [], []
    for r, (context, endings) in enumerate(rows):
        row = [(token, t, 0) for t, token in enumerate(context)]
        for i, ending in enumerate(endings):
            sources = (len(context) - 1, *range(len(row), len(row) + len(ending)))  # the context predicts the first
            predictions += [(r, at, token, r * len(endings) + i) for at, token in zip(sources, ending)]
            row += [(token, len(context) + t, i + 1) for t, token in enumerate(ending[:-1])]
        cells.append(row)
    T = max(map(len, cells))
    return torch.tensor([row + [(0, 0, -1)] * (T - len(row)) for row in cells]), torch.tensor(predictions)


def prepare(examples, model, encode=gpt2_encode):
    """Tokenize, cut, pack, sort and batch iterate_examples' dicts, once for a model: what evaluate() works on."""
    model, questions, cut = getattr(model, "_orig_mod", model), [], 0  # _orig_mod: the plain one in a compiled one
    said = lambda name: getattr(getattr(model, "config", None), name, None) or math.inf
    vocabulary = min(said("n_vocab"), said("vocab_size"))
    limit = min(LONGEST, said("block_size"), said("max_position_embeddings"))
    for example in examples:
        context, endings = tokenize(example, encode)
        if not (context and all(endings)) or max(map(max, (context, *endings))) >= vocabulary:
            raise HellaSwagError(f"The questions' tokens are not in the model's vocabulary of {vocabulary}: take a "
                                 f"model of GPT-2's vocabulary, or one with its tokenizer beside it.")
        room = max(1, limit + 1 - max(map(len, endings)))  # + 1: an ending's last token is predicted, never read
        cut += len(context) > room
        context, endings = context[-room:], [ending[:limit] for ending in endings]
        rows = [(context, part) for part in ([endings] if reads_packed(model) else [[ending] for ending in endings])]
        size = len(rows) * max(len(context) + sum(map(len, part)) for _, part in rows)  # in tokens
        questions.append((size, example["label"], rows))
    if not questions:
        raise HellaSwagError("There are no HellaSwag questions to score: give at least one.")
    budget = device_and_batch(model)[1] // (1 if reads_packed(model) else 3)  # unpacked, each token has its logits
    questions.sort()
    groups = []
    while questions:  # as many as fit, padded to their longest
        n = max(1, budget // questions[-1][0])
        groups.append(questions[-n:])
        del questions[-n:]
    random.Random(0).shuffle(groups)  # the running score would show the length, short questions being the harder
    return Prepared([(torch.tensor([label for _, label, _ in group]),
                      *collate([row for _, _, rows in group for row in rows])) for group in groups], cut)


# --------------------------------------------------------------------------------------------------- scoring
def keep_freed_memory():
    """Have glibc's malloc keep what this process frees; elsewhere, nothing. Arrays above 32 MiB, like logits, otherwise
    come from the system anew at every step, page by page: a quarter of GPT-2 (124M)'s training step on a CPU. The price
    is memory, there 4.9 GB at the peak instead of 4.1 (both measured)."""
    if sys.platform == "linux":
        mmap_max, trim_threshold = -4, -1  # the numbers of M_MMAP_MAX and M_TRIM_THRESHOLD in malloc.h
        with contextlib.suppress(AttributeError):  # a C library without mallopt
            ctypes.CDLL(None).mallopt(mmap_max, 0)
            ctypes.CDLL(None).mallopt(trim_threshold, -1)


def device_and_batch(model):
    device = next(model.parameters()).device if isinstance(model, torch.nn.Module) else torch.device("cpu")
    return device, CPU_BATCH if device.type == "cpu" else GPU_BATCH


def reads_packed(model):
    return hasattr(model, "hidden") or type(model).__name__ in PACKABLE  # hidden: a train_gpt2.GPT


def hidden_and_head(model, tokens, positions, segments):
    """What a model makes of rows, (R, T, C), and its head, (N, C) -> (N, V); unpacked: logits, identity."""
    if not reads_packed(model):
        logits = model(tokens)
        return logits if torch.is_tensor(logits) else logits[0], lambda x: x
    seen = ((segments[:, None] == 0) | (segments[:, None] == segments[:, :, None])).tril()[:, None]  # (R, 1, T, T)
    if hasattr(model, "hidden"):
        return model.hidden(tokens, positions, seen), model.head
    bias = torch.zeros(seen.shape, dtype=model.dtype, device=seen.device).masked_fill(~seen, -math.inf)
    x = model.base_model(tokens, position_ids=positions, attention_mask=bias, use_cache=False)[0]
    return x, model.get_output_embeddings()


@torch.no_grad()
def ending_losses(model, rows, predictions):
    """Cross-entropy in nats of a batch's endings, summed over their tokens, and how many these are: (Q, 4) each."""
    device, batch = device_and_batch(model)
    r, source, targets, _ = predictions.to(device).unbind(1)
    x, head = hidden_and_head(model, *rows.to(device).unbind(2))
    losses = torch.cat([F.cross_entropy(head(part).float(), ids, reduction="none") for part, ids in
                        zip(x[r, source].split(batch // 3), targets.split(batch // 3))])  # (N,)
    return [predictions[:, 3].bincount(weights).view(-1, 4) for weights in (losses.cpu().double(), None)]


def evaluate(model, examples, progress=False):
    """The Score of a model, the same on every rank and for any number of ranks, in the caller's autocast.

    model: a train_gpt2.GPT or, in eval(), a transformers causal LM, compiled or not; or a function from ids (B, T) to
    logits (B, T, V). examples: prepare()'s result, or what prepare() takes. progress: a bar with the running acc_norm.
    """
    questions = examples if isinstance(examples, Prepared) else prepare(examples, model)
    model = getattr(model, "_orig_mod", model)  # the uncompiled one: every batch has another shape
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)
    counts = torch.zeros(3, dtype=torch.int64)  # right by sum, right by mean, questions
    bar = tqdm(questions.batches[rank::world], unit="batch", disable=not progress or rank > 0)
    for labels, rows, predictions in bar:
        sums, lengths = ending_losses(model, rows, predictions)  # (Q, 4)
        right = [(losses.argmin(1) == labels).sum() for losses in (sums, sums / lengths)]
        counts += torch.tensor([*right, len(labels)])
        bar.set_postfix_str(f"acc_norm {counts[1] / counts[2]:.4f}")
    if world > 1:
        counts = counts.to(device_and_batch(model)[0])  # NCCL takes no CPU tensors
        dist.all_reduce(counts)
    correct, correct_norm, total = counts.tolist()
    return Score(correct / total, correct_norm / total, total, questions.cut)


# ---------------------------------------------------------------------------------------------- command line
def load_model(name, device):
    """A transformers causal LM, float32 and in eval(), by hub name or folder, and the encode() for its vocabulary."""
    try:
        import transformers
        from huggingface_hub import logging
        transformers.logging.set_verbosity_error()  # what it would say, the errors below say in a line
        transformers.logging.disable_progress_bar()
        logging.set_verbosity_error()
        torch.empty(1, device=device)  # is there such a device?
        load = transformers.AutoModelForCausalLM.from_pretrained
        model, info = load(name, use_safetensors=True, output_loading_info=True)
        if info["missing_keys"]:
            raise ValueError(f"it lacks {min(info['missing_keys'])}")
        gpt2 = model.config.vocab_size == 50257
        encode = gpt2_encode if gpt2 else transformers.AutoTokenizer.from_pretrained(name).encode
        return model.float().eval().to(device), encode
    except Exception as e:  # config, hub, HTTP, safetensors, a model's own code: there is no list of their errors
        raise HellaSwagError(f"-m {name} can't be loaded as a causal language model on {device} ({reason(e)}): give a "
                             f"hub name like gpt2, or a folder like log/hf, and -d a device that is here.") from None


def score(args):
    if args.device == "cpu":
        keep_freed_memory()
    examples = list(iterate_examples("val"))[:max(0, args.limit)]
    model, encode = load_model(args.model, args.device)
    questions, device = prepare(examples, model, encode), model.device
    bf16, began = device.type == "cuda" and torch.cuda.is_bf16_supported(False), time.perf_counter()
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        result = evaluate(model, questions, progress=True)
    speed = result.total / (time.perf_counter() - began)
    print(f"{args.model} on {device} in {'bfloat16' if bf16 else 'float32'}: {result.total:,} questions "
          f"({result.cut:,} cut on the left to the model's context), {speed:.1f} examples/s")
    for name, p, loss in (("acc", result.acc, "summed loss"), ("acc_norm", result.acc_norm, "mean loss per token")):
        print(f"{name:<8} {p:.4f} +- {math.sqrt(p * (1 - p) / result.total):.4f}   (endings by {loss})")
    print("known    GPT-2 (124M) 0.2859 / 0.2955 · GPT-2 XL 0.3842 / 0.4893 · GPT-3 (124M) - / 0.337")


def main():
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="gpt2", help="hub name or Hugging Face folder (gpt2)")
    parser.add_argument("-d", "--device", default=best, help=f"cuda, cuda:1, mps or cpu ({best})")
    parser.add_argument("--limit", type=int, default=TOTAL, metavar="N", help="score the first N questions only")
    parser.error = lambda message: sys.exit(f"hellaswag.py: {message}; --help lists what there is.")
    try:
        score(parser.parse_args())
    except (HellaSwagError, KeyboardInterrupt) as e:
        sys.exit(f"hellaswag.py: {str(e) or 'stopped.'}")


if __name__ == "__main__":
    main()
