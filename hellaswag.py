"""HellaSwag (Zellers et al. 2019): which of four endings does a language model find the likeliest?

    python hellaswag.py                            # GPT-2 (124M), on the best device there is
    python hellaswag.py -m gpt2-xl -d cuda         # any causal language model of the Hugging Face hub
    python hellaswag.py -m log/hf --limit 1000     # a folder that training exported, the first 1000 questions

In training:  questions = prepare(iterate_examples("val"), model)     # once: tokens, packed and in batches
              score = evaluate(model, questions)                      # any time, on every rank
              score.acc, score.acc_norm                               # by the endings' summed and mean loss

A question is one row: the context, then its four endings, each at the positions that follow the context and behind a
mask through which it sees the context and itself. So the context is computed once, and the head, a third of GPT-2's
work, only where an ending's token is predicted. The losses are those of four rows of their own.
"""
import argparse
import functools
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
TOTAL, ENDINGS = 10_042, 4            # questions in the validation split, endings of each
HUB = dict(repo_id="Rowan/hellaswag", repo_type="dataset", filename="default/validation/0000.parquet",
           revision="refs/convert/parquet")  # the hub's own conversion, whatever form the main branch has
# These bound the memory. On a CPU small batches stay in its cache, and logits below 32 MiB in memory that glibc hands
# out again instead of mapping it anew.
LONGEST = 2048                        # tokens of context and ending, also for models that could read more
BUDGETS = {"cpu": (512, 156), "gpu": (32768, 4096)}  # tokens of a forward pass, rows of logits alive at once
BF16_SINCE = (8, 0)                   # compute capability that has bfloat16 in hardware
SAME_LOSS = 1e-3                      # nats by which rounding may change a token's loss in float32
KNOWN = "GPT-2 (124M) 0.2859 / 0.2955 · GPT-2 XL 0.3842 / 0.4893 · GPT-3 (124M) - / 0.337"  # acc / acc_norm


class HellaSwagError(Exception):
    """Something the person at the keyboard can mend; its text is the one line they are shown."""


def reason(error):
    """The first line of somebody else's error, short enough to stand in ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160].rstrip(".: ")


# -------------------------------------------------------------------------------------------------- the data
def iterate_examples(split="val", path=None):
    """HellaSwag's validation questions in file order: dicts with ctx, endings (4 strings), label (int) and more.

    Reads hellaswag/hellaswag_val.jsonl beside this script, fetched first if it is not there; or `path`, which may
    hold fewer questions. All are checked before the first is given. Raises HellaSwagError.
    """
    if split != "val":
        raise HellaSwagError(f'split="{split}" is not kept here: HellaSwag is scored on split="val".')
    if path is None and not DATA.exists():
        fetch()
    return iter(read_examples(Path(path or DATA), None if path else TOTAL))


def read_examples(path, total=None):
    """All questions of a .jsonl file, checked; total: how many there must be. Raises HellaSwagError."""
    remedy = "delete it and it is fetched anew" if path == DATA else "give another file"
    examples = []
    try:
        for line in path.read_bytes().splitlines():
            examples.append(checked(json.loads(line)))
    except OSError as e:
        raise HellaSwagError(f"{path} can't be read ({e.strerror}): {remedy}.") from None
    except (ValueError, RecursionError) as e:  # not UTF-8, not JSON, not a question
        raise HellaSwagError(f"{path} is damaged in line {len(examples) + 1} ({reason(e)}): {remedy}.") from None
    if not examples or total not in (None, len(examples)):
        raise HellaSwagError(f"{path} has {len(examples):,} of {total or 'some':,} questions: {remedy}.")
    return examples


def checked(example):
    """The question, its label made an int (the hub has text). Raises ValueError."""
    ctx, endings, label = map(example.get, ("ctx", "endings", "label")) if isinstance(example, dict) else [None] * 3
    if not (ctx and isinstance(ctx, str) and isinstance(endings, list) and len(endings) == ENDINGS
            and all(e and isinstance(e, str) for e in endings) and str(label) in map(str, range(ENDINGS))):
        raise ValueError(f"a question has ctx, {ENDINGS} endings and a label from 0 to {ENDINGS - 1}")
    return example | {"label": int(label)}


def fetch():
    """Download the validation split to DATA: checked, then moved into place whole. Raises HellaSwagError."""
    print(f"fetching HellaSwag ({HUB['repo_id']}, 6 MB) to {DATA}", flush=True)
    part = DATA.with_name(f"{DATA.name}.{os.getpid()}.part")
    try:
        from huggingface_hub import hf_hub_download, logging
        from pyarrow import parquet
        logging.set_verbosity_error()  # its retries end in the one line below
        rows = parquet.read_table(hf_hub_download(**HUB)).to_pylist()
        DATA.parent.mkdir(exist_ok=True)
        with open(part, "w", encoding="utf-8") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)
            f.flush()
            os.fsync(f.fileno())
        read_examples(part, TOTAL)
        os.replace(part, DATA)
    except Exception as e:  # the hub's client, its HTTP library, pyarrow, the disk: there is no list of their errors
        raise HellaSwagError(f"HellaSwag can't be fetched ({reason(e)}): go online, name a mirror in HF_ENDPOINT, or "
                             f"put the file at {DATA}.") from None
    finally:
        part.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------- tokens and rows
@functools.cache
def gpt2_encode():
    """GPT-2's function from text to token ids. Raises HellaSwagError if its vocabulary can't be had."""
    import tiktoken
    try:
        return tiktoken.get_encoding("gpt2").encode_ordinary
    except (OSError, ValueError) as e:  # requests' errors are OSErrors; a damaged download is a ValueError
        raise HellaSwagError(f"The GPT-2 vocabulary can't be had ({type(e).__name__}): go online once, or point "
                             f"TIKTOKEN_CACHE_DIR at a folder that holds it.") from None


class Question(NamedTuple):
    context: list  # token ids
    endings: list  # four lists of token ids
    label: int     # the right ending


def tokenize(example, encode=None, start=()):
    """The Question in one of iterate_examples' dicts. encode: text -> ids, by default GPT-2's; start: ids before it."""
    encode = encode or gpt2_encode()
    return Question([*start, *encode(example["ctx"])], [encode(" " + e) for e in example["endings"]], example["label"])


def render_example(example):
    """A question as four padded rows: (data, tokens (4, N) int64, mask (4, N) int64 with 1 on endings, label)."""
    context, endings, label = question = tokenize(example)
    tokens, mask = torch.zeros(2, ENDINGS, len(context) + max(map(len, endings)), dtype=torch.int64)
    for i, ending in enumerate(endings):
        tokens[i, :len(context) + len(ending)] = torch.tensor(context + ending)
        mask[i, len(context):len(context) + len(ending)] = 1
    return question._asdict(), tokens, mask, label


def cut(question, limit):
    """The question, its context cut from the left so that with any ending it fits in `limit` tokens. An ending that
    leaves no room for a token of context loses its own end."""
    endings = [ending[:limit] for ending in question.endings]
    room = limit + 1 - max(map(len, endings))  # + 1: an ending's last token is predicted, never read
    return Question(question.context[-room:], endings, question.label)


def rows_of(number, question, packed):
    """Rows (context, [(4 * number + i, ending i), ...]): one with all endings, or one for each."""
    endings = list(enumerate(question.endings, start=ENDINGS * number))
    return [(question.context, endings)] if packed else [(question.context, [ending]) for ending in endings]


def row_length(row):
    return len(row[0]) + sum(len(ending) - 1 for _, ending in row[1])


def collate(rows):
    """A batch of R rows padded to T tokens, with N tokens in their endings, as int64 tensors: (tokens, positions,
    segments (0 context, 1 ... endings, -1 padding), each (R, T); sources (where in R * T a token is predicted),
    targets (which), endings (whose, 4 * question + ending), each (N,))."""
    T = max(map(row_length, rows))
    cells, predictions = [], []
    for r, (context, endings) in enumerate(rows):
        n, row = len(context), [(token, t, 0) for t, token in enumerate(context)]
        for segment, (number, ending) in enumerate(endings, start=1):
            sources = (n - 1, *range(len(row), len(row) + len(ending) - 1))  # the context's end predicts the first
            predictions += [(r * T + source, token, number) for source, token in zip(sources, ending)]
            row += [(token, n + t, segment) for t, token in enumerate(ending[:-1])]
        cells.append(row + [(0, 0, -1)] * (T - len(row)))
    return *torch.tensor(cells).unbind(2), *torch.tensor(predictions).unbind(1)


class Prepared(NamedTuple):
    batches: list          # of collate()
    labels: torch.Tensor   # (Q,) the right endings
    lengths: torch.Tensor  # (Q, 4) tokens of the endings
    packed: bool           # a row a question; else a row an ending
    cut: int               # questions cut to fit the model's context


def prepare(examples, model):
    """Tokenize, cut, sort and pack questions, once for a model (or its like) and all ranks: what evaluate() works on.

    examples: iterate_examples' dicts (encoded as GPT-2 does), or Questions. Raises HellaSwagError.
    """
    whole = [q if isinstance(q, Question) else tokenize(q) for q in examples]
    if not whole:
        raise HellaSwagError("There are no HellaSwag questions to score: give some examples.")
    said = {k: getattr(getattr(model, "config", None), k, None) or math.inf
            for k in ("block_size", "max_position_embeddings", "n_vocab", "vocab_size")}
    largest = max(max(ids) for q in whole for ids in (q.context, *q.endings))
    if largest >= (vocabulary := min(said["n_vocab"], said["vocab_size"])):
        raise HellaSwagError(f"The questions hold token {largest}, the model's vocabulary ends at {vocabulary - 1}: "
                             f"take a model of GPT-2's vocabulary, or put its own tokenizer beside it.")
    questions = [cut(q, min(LONGEST, said["block_size"], said["max_position_embeddings"])) for q in whole]
    packed = can_pack(getattr(model, "_orig_mod", model), max(questions, key=lambda q: len(q.context)))
    _, tokens, logits = budget_of(model)
    budget = tokens if packed else logits  # unpacked, each token has its row of logits
    groups = [[]]
    for row in sorted((row for i, q in enumerate(questions) for row in rows_of(i, q, packed)), key=row_length):
        if groups[-1] and (len(groups[-1]) + 1) * row_length(row) > budget:
            groups.append([])
        groups[-1].append(row)
    random.Random(0).shuffle(groups)  # the running score would show the length, short questions being the harder
    return Prepared([collate(group) for group in groups], torch.tensor([q.label for q in questions]),
                    torch.tensor([[len(ending) for ending in q.endings] for q in questions]), packed,
                    sum(a != b for a, b in zip(whole, questions)))


# --------------------------------------------------------------------------------------------------- scoring
def budget_of(model):
    """(device of a model, tokens of a forward pass there, rows of logits at once)."""
    parameter = next(model.parameters(), None) if hasattr(model, "parameters") else None
    device = torch.device("cpu") if parameter is None else parameter.device
    return device, *BUDGETS["cpu" if device.type == "cpu" else "gpu"]


def trunk_and_head(model, packed):
    """(trunk(tokens, positions, mask) -> (R, T, C), head((N, C)) -> logits (N, V)) of a train_gpt2.GPT or transformers
    causal LM; for unpacked rows, of anything that maps ids to logits, alone or first in a tuple."""
    def logits(tokens, positions, mask):
        out = model(tokens)
        return out if torch.is_tensor(out) else out[0]

    def transformers_trunk(tokens, positions, mask):
        dtype = next(model.parameters()).dtype  # a mask to be added is what all its attentions understand
        bias = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        return model.base_model(input_ids=tokens, position_ids=positions, attention_mask=bias, use_cache=False)[0]

    if not packed:
        return logits, lambda x: x
    if hasattr(model, "hidden"):
        return model.hidden, model.head
    return transformers_trunk, model.get_output_embeddings()


def can_pack(model, question):
    """Whether a packed row gives the losses of single rows. Some transformers models ignore positions or masks (ALiBi,
    state spaces) or change the logits after the head, so they are tried on a question."""
    if hasattr(model, "hidden") or not hasattr(model, "get_output_embeddings"):
        return hasattr(model, "hidden")
    with torch.autocast(budget_of(model)[0].type, enabled=False):
        single = token_losses(model, collate(rows_of(0, question, False)), False)
        try:
            packed = token_losses(model, collate(rows_of(0, question, True)), True)
        except Exception:  # whatever a foreign model says to arguments it does not know
            return False
    return torch.allclose(packed, single, atol=SAME_LOSS)


@torch.no_grad()
def token_losses(model, batch, packed):
    """Cross-entropy, nats, of the tokens of a batch's endings: (N,) float32."""
    device, _, rows = budget_of(model)
    trunk, head = trunk_and_head(model, packed)
    tokens, positions, segments, sources, targets, _ = (t.to(device) for t in batch)
    mask = (segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None])  # the context, the own ending
    x = trunk(tokens, positions, mask.tril()[:, None]).flatten(0, 1)[sources]  # (N, C)
    return torch.cat([F.cross_entropy(head(part).float(), ids, reduction="none")
                      for part, ids in zip(x.split(rows), targets.split(rows))])


class Score(NamedTuple):
    total: int         # questions
    correct: int       # by the endings' summed loss
    correct_norm: int  # by their mean loss per token
    cut: int           # questions cut to fit the model's context

    acc = property(lambda self: self.correct / max(1, self.total))
    acc_norm = property(lambda self: self.correct_norm / max(1, self.total))
    acc_stderr = property(lambda self: (self.acc * (1 - self.acc) / max(1, self.total)) ** 0.5)
    acc_norm_stderr = property(lambda self: (self.acc_norm * (1 - self.acc_norm) / max(1, self.total)) ** 0.5)


def count(sums, questions, done=slice(None)):
    """The Score by endings' summed losses (Q, 4); done: which of the questions to count."""
    sums, lengths, labels = sums[done], questions.lengths[done], questions.labels[done]
    return Score(len(labels), *(int((x.argmin(1) == labels).sum()) for x in (sums, sums / lengths)), questions.cut)


def ending_losses(model, questions, progress=False):
    """Summed cross-entropy, nats, of each ending's tokens after its context: (Q, 4) float64, the same on every rank."""
    from tqdm import tqdm
    model = getattr(model, "_orig_mod", model)  # the uncompiled one: every batch has another shape
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)
    sums = torch.zeros(questions.lengths.numel(), dtype=torch.float64)
    with tqdm(questions.batches[rank::world], unit="batch", disable=not progress or rank > 0) as bar:
        for batch in bar:
            sums.index_add_(0, batch[-1], token_losses(model, batch, questions.packed).double().cpu())
            if progress:
                losses = sums.view(-1, ENDINGS)
                bar.set_postfix_str(f"acc_norm {count(losses, questions, (losses > 0).all(1)).acc_norm:.4f}")
    if world > 1:
        sums = sums.to(budget_of(model)[0])  # NCCL takes no CPU tensors
        dist.all_reduce(sums)
    return sums.cpu().view(-1, ENDINGS)


def evaluate(model, examples, progress=False):
    """The Score of a model, the same on every rank and for any number of ranks.

    model: a train_gpt2.GPT or, in eval(), a transformers causal LM, compiled or not; or a function from ids (B, T) to
    logits (B, T, V). examples: prepare()'s result, or what prepare() takes. Runs in the caller's autocast and draws no
    random numbers. progress: a bar with the running acc_norm, on rank 0. Raises HellaSwagError.
    """
    questions = examples if isinstance(examples, Prepared) else prepare(examples, model)
    return count(ending_losses(model, questions, progress), questions)


# ---------------------------------------------------------------------------------------------- command line
def pick_device(name):
    """torch.device by name; None = the best there is. Raises HellaSwagError."""
    name = name or ("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as e:  # torch built without CUDA says so by AssertionError
        raise HellaSwagError(f"-d {name} can't be used here ({reason(e)}): take -d cpu, or leave it out.") from None


def load_model(name):
    """A transformers causal LM, float32 and in eval(), from a hub name or a folder. Raises HellaSwagError."""
    if name.endswith(".pt"):
        raise HellaSwagError(f"-m {name} is a checkpoint: make a folder of it and take -m hf; python -c "
                             f"\"import train_gpt2 as t; t.export('{name}', 'hf')\" does.")
    try:
        import transformers
        from huggingface_hub import logging
        transformers.logging.set_verbosity_error()  # what it would say, the errors below say in a line
        transformers.logging.disable_progress_bar()
        logging.set_verbosity_error()
        model, info = transformers.AutoModelForCausalLM.from_pretrained(name, use_safetensors=True,
                                                                        output_loading_info=True)
    except Exception as e:  # config, hub, HTTP, safetensors, a model's own code: there is no list of their errors
        raise HellaSwagError(f"-m {name} can't be loaded as a causal language model ({reason(e)}): give a hub name "
                             f"such as gpt2 (HF_ENDPOINT names a mirror) or a Hugging Face folder.") from None
    if info["missing_keys"]:
        raise HellaSwagError(f"-m {name} lacks {min(info['missing_keys'])}: it is not a whole model.")
    return model.float().eval()


def load_encode(name):
    """(encode, start) for tokenize() from a model's own tokenizer; GPT-2's where it has none."""
    from transformers import AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        if len(tokenizer) > 1:  # transformers 5 makes up an empty one
            return functools.partial(tokenizer.encode, add_special_tokens=False), tokenizer("").input_ids
    except Exception:  # as above; a tokenizer that is missing is no error
        pass
    return gpt2_encode(), ()


def run(args):
    if args.limit is not None and args.limit < 1:
        raise HellaSwagError(f"--limit {args.limit} leaves no question: give 1 or more, or leave it out.")
    device, examples = pick_device(args.device), list(iterate_examples("val", args.data))[:args.limit]
    model, (encode, start) = load_model(args.model).to(device), load_encode(args.model)
    questions = prepare([tokenize(example, encode, start) for example in examples], model)
    bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= BF16_SINCE
    began = time.perf_counter()
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        score = evaluate(model, questions, progress=True)
    seconds = time.perf_counter() - began
    print(f"{args.model} on {device} in {'bfloat16' if bf16 else 'float32'}: {score.total:,} questions, "
          f"{score.total / seconds:.1f} examples/s")
    if score.cut:
        print(f"{score.cut:,} questions were longer than the model's context and cut from the left")
    print(f"acc      {score.acc:.4f} +- {score.acc_stderr:.4f}   (endings by summed loss)")
    print(f"acc_norm {score.acc_norm:.4f} +- {score.acc_norm_stderr:.4f}   (by mean loss per token)")
    print(f"known    {KNOWN}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="gpt2", help="hub name or Hugging Face folder (gpt2)")
    parser.add_argument("-d", "--device", help="cuda, cuda:1, mps or cpu (the best there is)")
    parser.add_argument("--limit", type=int, metavar="N", help="score the first N questions only")
    parser.add_argument("--data", metavar="FILE", help=f"other questions than {DATA.parent.name}/{DATA.name}")
    parser.error = lambda message: sys.exit(f"hellaswag.py: {message}; --help lists what there is.")
    try:
        run(parser.parse_args())
    except HellaSwagError as e:
        sys.exit(f"hellaswag.py: {e}")
    except KeyboardInterrupt:
        sys.exit("hellaswag.py: stopped.")


if __name__ == "__main__":
    main()
