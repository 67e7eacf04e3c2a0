"""HellaSwag (Zellers et al. 2019): which ending does a model find likeliest?

    python hellaswag.py                           # GPT-2 (124M), best device
    python hellaswag.py -m gpt2-xl -d cuda        # any causal LM of the hub
    python hellaswag.py -m log/hf --limit 1000    # what training exported

In training:
    questions = prepare(iterate_examples("val"), model)    # once
    score = evaluate(model, questions)                     # on every rank
    score.acc, score.acc_norm    # by the endings' summed and mean loss

A question is one packed row: the context, then its four endings, each at the
positions that follow the context and behind a mask through which it sees the
context and itself. So the context is computed once, and the head, a third of
GPT-2's work, only where an ending's token is predicted. The losses are those
of a row per ending, which models get that don't read packed rows.
"""
import argparse
import json
import math
import os
import random
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional as F

DATA = Path(__file__).resolve().parent / "hellaswag" / "hellaswag_val.jsonl"
TOTAL = 10_042  # questions in the validation split
HUB = dict(repo_id="Rowan/hellaswag", repo_type="dataset", filename="default/validation/0000.parquet",
           revision="refs/convert/parquet")  # the hub's own conversion, whatever form the main branch has
PACKABLE = ("GPT2LMHeadModel", "GPTNeoXForCausalLM", "LlamaForCausalLM")  # tested to heed positions and 4-D masks
LONGEST = 1024  # tokens of context and ending, also for models that could read more: it bounds the memory, as do ...
CPU_BATCH, GPU_BATCH = 512, 16384  # tokens of a forward pass, four times the rows of logits alive; small = in the cache
KNOWN = "GPT-2 (124M) 0.2859 / 0.2955 · GPT-2 XL 0.3842 / 0.4893 · GPT-3 (124M) - / 0.337"  # acc / acc_norm


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
    if not DATA.exists():
        fetch()
    examples = []
    try:
        for line in DATA.read_bytes().splitlines():
            examples.append(checked(json.loads(line)))
        if len(examples) != TOTAL:
            raise ValueError(f"the file holds {len(examples):,} of {TOTAL:,} questions")
    except (OSError, ValueError, RecursionError) as e:  # ValueError: not UTF-8, not JSON, not a question
        raise HellaSwagError(f"{DATA} is damaged in line {len(examples) + 1} ({reason(e)}): delete it and it is "
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
    """Download the validation split to DATA: checked, then moved into place whole."""
    print(f"fetching HellaSwag ({HUB['repo_id']}, 6 MB) to {DATA}", flush=True)
    part = DATA.with_name(f"{DATA.name}.{os.getpid()}.part")
    try:
        from huggingface_hub import hf_hub_download, logging
        from pyarrow import parquet
        logging.set_verbosity_error()  # its retries end in the one line below
        rows = parquet.read_table(hf_hub_download(**HUB)).to_pylist()
        if len([checked(row) for row in rows]) != TOTAL:
            raise ValueError(f"{len(rows):,} of {TOTAL:,} questions came")
        DATA.parent.mkdir(exist_ok=True)
        part.write_text("".join(json.dumps(row) + "\n" for row in rows))
        part.replace(DATA)
    except Exception as e:  # the hub's client, its HTTP library, pyarrow, the disk: there is no list of their errors
        part.unlink(missing_ok=True)
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
    tokens, mask = torch.zeros(2, 4, len(context) + max(map(len, endings)), dtype=torch.int64)
    for row, on, ending in zip(tokens, mask, endings):
        row[:len(context) + len(ending)] = torch.tensor(context + ending)
        on[len(context):len(context) + len(ending)] = 1
    return {"context": context, "endings": endings, "label": example["label"]}, tokens, mask, example["label"]


def pack(context, endings):
    """One row, [(token, position, segment, token to predict), ...]: segment 0 is the context but for its last token;
    with that each ending, segments 1 ..., begins, since it predicts the ending's first."""
    *shared, last = context
    row = [(token, t, 0, 0) for t, token in enumerate(shared)]
    for segment, ending in enumerate(endings, start=1):
        tokens = zip([last, *ending], range(len(shared), len(shared) + len(ending)), ending)
        row += [(token, position, segment, target) for token, position, target in tokens]
    return row


class Prepared(NamedTuple):
    batches: list  # of (labels (Q,), rows as in pack(), padded with segment -1, (R, T, 4)), int64
    endings: int   # in a row: 4 in a packed one, else 1
    cut: int       # questions cut to fit the model's context


def prepare(examples, model, encode=gpt2_encode):
    """Tokenize, cut, pack, sort and batch iterate_examples' dicts, once for a model: what evaluate() works on."""
    model, questions, cut = getattr(model, "_orig_mod", model), [], 0  # _orig_mod: the plain one in a compiled one
    said = lambda name: getattr(getattr(model, "config", None), name, None) or math.inf
    vocabulary = min(said("n_vocab"), said("vocab_size"))
    limit = min(LONGEST, said("block_size"), said("max_position_embeddings"))
    packed = hasattr(model, "hidden") or type(model).__name__ in PACKABLE
    for example in examples:
        context, endings = tokenize(example, encode)
        if not (context and all(endings)) or max(map(max, (context, *endings))) >= vocabulary:
            raise HellaSwagError(f"The questions' tokens are not in the model's vocabulary of {vocabulary}: take a model "
                                 f"of GPT-2's vocabulary, or one with its tokenizer beside it.")
        room = max(1, limit + 1 - max(map(len, endings)))  # + 1: an ending's last token is predicted, never read
        cut += len(context) > room
        context, endings = context[-room:], [ending[:limit] for ending in endings]
        rows = [pack(context, endings)] if packed else [pack(context, [ending]) for ending in endings]
        questions.append((max(map(len, rows)) * len(rows), example["label"], rows))
    if not questions:
        raise HellaSwagError("There are no HellaSwag questions to score: give some examples.")
    budget, groups = batch_size(model) // (1 if packed else 4), [[]]  # unpacked, each token has its row of logits
    for question in sorted(questions, key=lambda question: question[0]):
        if groups[-1] and (len(groups[-1]) + 1) * question[0] > budget:
            groups.append([])
        groups[-1].append(question)
    random.Random(0).shuffle(groups)  # the running score would show the length, short questions being the harder
    return Prepared([collate(group) for group in groups], 4 if packed else 1, cut)


def collate(questions):
    rows = [row for _, _, rows in questions for row in rows]
    T = max(map(len, rows))
    return (torch.tensor([label for _, label, _ in questions]),
            torch.tensor([row + [(0, 0, -1, 0)] * (T - len(row)) for row in rows]))


# --------------------------------------------------------------------------------------------------- scoring
def device_of(model):
    return next(model.parameters()).device if isinstance(model, torch.nn.Module) else torch.device("cpu")


def batch_size(model):
    return CPU_BATCH if device_of(model).type == "cpu" else GPU_BATCH


def packed_hidden(model, tokens, positions, segments):
    """Final hidden states (R, T, C) of packed rows, and the head that makes logits of them."""
    seen = (segments[:, None] == 0) | (segments[:, None] == segments[:, :, None])  # the context, the own ending
    seen = seen.tril()[:, None]  # (R, 1, T, T)
    if hasattr(model, "hidden"):  # a train_gpt2.GPT
        return model.hidden(tokens, positions, seen), model.head
    bias = torch.zeros(seen.shape, dtype=model.dtype, device=seen.device).masked_fill(~seen, -math.inf)
    return model.base_model(tokens, position_ids=positions, attention_mask=bias)[0], model.get_output_embeddings()


@torch.no_grad()
def ending_losses(model, rows, endings):
    """Cross-entropy in nats of a batch's endings, summed over their tokens, and their lengths in tokens: (Q, 4) each."""
    tokens, positions, segments, targets = rows.to(device_of(model)).unbind(2)
    if endings > 1:
        x, head = packed_hidden(model, tokens, positions, segments)
    else:
        x, head = model(tokens), lambda logits: logits
        x = x if torch.is_tensor(x) else x[0]
    predicts = segments > 0
    some = batch_size(model) // 4
    losses = torch.cat([F.cross_entropy(head(part).float(), ids, reduction="none") for part, ids in
                        zip(x[predicts].split(some), targets[predicts].split(some))])  # (N,)
    whose = torch.arange(len(rows))[:, None] * endings + rows[..., 2] - 1
    whose = whose[rows[..., 2] > 0]  # (N,) of the batch's endings
    return [whose.bincount(weights).view(-1, 4) for weights in (losses.cpu().double(), None)]


class Score(NamedTuple):
    acc: float       # of the questions, by the endings' summed loss
    acc_norm: float  # by their mean loss per token
    total: int       # questions
    cut: int         # questions cut to fit the model's context


def evaluate(model, examples, progress=False):
    """The Score of a model, the same on every rank and for any number of ranks, in the caller's autocast.

    model: a train_gpt2.GPT or, in eval(), a transformers causal LM, compiled or not; or a function from ids (B, T) to
    logits (B, T, V). examples: prepare()'s result, or what prepare() takes. progress: a bar with the running acc_norm.
    """
    from tqdm import tqdm
    questions = examples if isinstance(examples, Prepared) else prepare(examples, model)
    model = getattr(model, "_orig_mod", model)  # the uncompiled one: every batch has another shape
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)
    counts = torch.zeros(3, dtype=torch.int64)  # right by sum, right by mean, questions
    with tqdm(questions.batches[rank::world], unit="batch", disable=not progress or rank > 0) as bar:
        for labels, rows in bar:
            sums, lengths = ending_losses(model, rows, questions.endings)
            counts += torch.stack([*((x.argmin(1) == labels).sum() for x in (sums, sums / lengths)), torch.tensor(len(labels))])
            bar.set_postfix_str(f"acc_norm {counts[1] / counts[2]:.4f}")
    if world > 1:
        counts = counts.to(device_of(model))  # NCCL takes no CPU tensors
        dist.all_reduce(counts)
    correct, correct_norm, total = counts.tolist()
    return Score(correct / total, correct_norm / total, total, questions.cut)


# ---------------------------------------------------------------------------------------------- command line
def load_model(name):
    """A transformers causal LM, float32 and in eval(), by hub name or folder, and the encode() for its vocabulary."""
    try:
        import transformers
        from huggingface_hub import logging
        transformers.logging.set_verbosity_error()  # what it would say, the errors below say in a line
        transformers.logging.disable_progress_bar()
        logging.set_verbosity_error()
        model, info = transformers.AutoModelForCausalLM.from_pretrained(name, use_safetensors=True,
                                                                        output_loading_info=True)
        own = model.config.vocab_size != 50257  # not GPT-2's
        encode = transformers.AutoTokenizer.from_pretrained(name).encode if own else gpt2_encode
    except Exception as e:  # config, hub, HTTP, safetensors, a model's own code: there is no list of their errors
        raise HellaSwagError(f"-m {name} can't be loaded as a causal language model ({reason(e)}): give a hub name "
                             f"such as gpt2 (HF_ENDPOINT names a mirror) or a folder such as log/hf.") from None
    if info["missing_keys"]:
        raise HellaSwagError(f"-m {name} lacks {min(info['missing_keys'])}: it is not a whole model.")
    return model.float().eval(), encode


def run(args):
    if args.limit is not None and args.limit < 1:
        raise HellaSwagError(f"--limit {args.limit} leaves no question: give 1 or more, or leave it out.")
    try:
        device = torch.empty(1, device=args.device).device
    except (RuntimeError, AssertionError) as e:  # torch built without CUDA says so by AssertionError
        raise HellaSwagError(f"-d {args.device} can't be used here ({reason(e)}): take -d cpu, or leave it out.") from None
    examples = list(iterate_examples("val"))[:args.limit]
    model, encode = load_model(args.model)
    questions = prepare(examples, model.to(device), encode)
    bf16, began = device.type == "cuda" and torch.cuda.is_bf16_supported(False), time.perf_counter()
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        score = evaluate(model, questions, progress=True)
    print(f"{args.model} on {device} in {'bfloat16' if bf16 else 'float32'}: {score.total:,} questions, "
          f"{score.total / (time.perf_counter() - began):.1f} examples/s")
    if score.cut:
        print(f"{score.cut:,} questions were longer than the model's context and cut from the left")
    for name, p, loss in (("acc", score.acc, "summed loss"), ("acc_norm", score.acc_norm, "mean loss per token")):
        print(f"{name:<8} {p:.4f} +- {math.sqrt(p * (1 - p) / score.total):.4f}   (endings by {loss})")
    print(f"known    {KNOWN}")


def main():
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="gpt2", help="hub name or Hugging Face folder (gpt2)")
    parser.add_argument("-d", "--device", default=best, help=f"cuda, cuda:1, mps or cpu (here: {best})")
    parser.add_argument("--limit", type=int, metavar="N", help="score the first N questions only")
    parser.error = lambda message: sys.exit(f"hellaswag.py: {message}; --help lists what there is.")
    try:
        run(parser.parse_args())
    except HellaSwagError as e:
        sys.exit(f"hellaswag.py: {e}")
    except KeyboardInterrupt:
        sys.exit("hellaswag.py: stopped.")


if __name__ == "__main__":
    main()
