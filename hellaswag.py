"""HellaSwag (Zellers et al. 2019): which of four endings does a language model find the likeliest?

    python hellaswag.py                            # GPT-2 (124M), on the best device there is
    python hellaswag.py -m gpt2-xl -d cuda         # any causal language model of the Hugging Face hub
    python hellaswag.py -m log/hf --limit 1000     # a folder that train_gpt2.py exported, the first 1000 questions

In training, where it costs seconds:

    questions = prepare(iterate_examples("val"), model)         # once: tokens, packed and in batches
    score = evaluate(model, questions)                          # as often as wanted, on every rank
    score.acc, score.acc_norm                                   # by the endings' summed and mean loss

A question is one row: the context once, then its four endings, each at the positions that follow the context and
behind a mask through which it sees the context and itself. So the context is computed once, and the head, a third
of GPT-2's work, only where a token of an ending is predicted. The losses are those of four rows of their own.
"""
import argparse
import functools
import json
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
TOTAL = 10_042                        # questions in the validation split
HUB = dict(repo_id="Rowan/hellaswag", repo_type="dataset", filename="default/validation/0000.parquet",
           revision="refs/convert/parquet")  # the hub's own conversion; its main branch may hold a script instead
ENDINGS = 4
LONGEST = 2048                        # tokens of context and ending; bounds memory where a model could read more
# Memory does not depend on the questions: tokens of a forward pass, and rows of logits alive at once. On a CPU small
# ones stay in the cache, and logits below 32 MiB in memory that glibc reuses instead of mapping it anew each time.
TOKENS = {"cuda": 32768, "mps": 8192, "cpu": 1024}
HEAD_ROWS = {"cuda": 4096, "mps": 1024, "cpu": 156}
SAME_LOSS = {torch.float32: 1e-4}     # relative difference that rounding can make between packed and single rows
SAME_LOSS_LOW = 1e-2                  # and in 16 bits
KNOWN = (("GPT-2 (124M)", "0.2859 / 0.2955"), ("GPT-2 XL (1.5B)", "0.3842 / 0.4893"), ("GPT-3 (124M)", "  -    / 0.337"))


class HellaSwagError(Exception):
    """Something the person at the keyboard can mend; its text is the one line they are shown."""


def reason(error):
    """The first line of an error from somebody else's code, short enough to stand in ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


# ------------------------------------------------------------------------------------------------- questions
def iterate_examples(split="val", path=None):
    """HellaSwag's validation questions in file order: dicts with ctx, endings (4 strings), label (int) and more.

    Reads hellaswag/hellaswag_val.jsonl beside this script, fetched from the hub if it is not there, or `path`,
    which may hold fewer questions. All are checked before the first is given. Raises HellaSwagError.
    """
    if split != "val":
        raise HellaSwagError(f'split="{split}" is not kept here: HellaSwag is scored on split="val".')
    if path is None and not DATA.exists():
        fetch()
    return iter(read_examples(Path(path or DATA), TOTAL if path is None else None))


def read_examples(path, total):
    """All questions of a .jsonl file, checked; total: how many there must be, None = any. Raises HellaSwagError."""
    remedy = "delete it and it will be fetched anew" if path == DATA else "give another file"
    examples = []
    try:
        with open(path, "rb") as f:
            for number, line in enumerate(f, start=1):
                examples.append(checked(line))
    except OSError as e:
        raise HellaSwagError(f"{path} can't be read ({e.strerror}): {remedy}.") from None
    except (ValueError, RecursionError) as e:  # not JSON, not UTF-8, not a question
        raise HellaSwagError(f"{path} is damaged in line {number} ({reason(e)}): {remedy}.") from None
    if len(examples) != (total or len(examples)) or not examples:
        raise HellaSwagError(f"{path} is incomplete with {len(examples):,} of {total or 'some':,} questions: {remedy}.")
    return examples


def checked(line):
    """The question in a line of JSON, its label an int. Raises ValueError with what is wrong."""
    example = json.loads(line)
    if not isinstance(example, dict):
        raise ValueError("not a JSON object")
    context, endings, label = (example.get(k) for k in ("ctx", "endings", "label"))
    if not isinstance(context, str) or not context:
        raise ValueError("no text under ctx")
    if not isinstance(endings, list) or len(endings) != ENDINGS or not all(isinstance(e, str) and e for e in endings):
        raise ValueError(f"not {ENDINGS} texts under endings")
    if str(label) not in map(str, range(ENDINGS)):  # the hub's file has it as text
        raise ValueError(f"label is {label!r}, not 0 to {ENDINGS - 1}")
    return example | {"label": int(label)}


def fetch():
    """Download the validation split to DATA: checked, then moved into place whole. Raises HellaSwagError."""
    print(f"{DATA.name} is not there yet: fetching {HUB['repo_id']} (6 MB)", flush=True)
    part = DATA.with_name(f"{DATA.name}.{os.getpid()}.part")
    try:
        import huggingface_hub
        import pyarrow.parquet
        huggingface_hub.utils.logging.set_verbosity_error()  # its retries end in the one line below
        rows = pyarrow.parquet.read_table(huggingface_hub.hf_hub_download(**HUB)).to_pylist()
        DATA.parent.mkdir(exist_ok=True)
        with open(part, "w", encoding="utf-8") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)
            f.flush()
            os.fsync(f.fileno())
        read_examples(part, TOTAL)
        os.replace(part, DATA)
    except HellaSwagError as e:
        raise HellaSwagError(f"What the hub gave is not HellaSwag: {e}") from None
    except Exception as e:  # from the hub's client, its HTTP library, pyarrow or the disk; there is no list of them
        raise HellaSwagError(f"HellaSwag can't be fetched ({reason(e)}): go online, name a mirror in HF_ENDPOINT, "
                             f"or put the file at {DATA}.") from None
    finally:
        part.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------- tokens
@functools.cache
def gpt2_encoder():
    """Function from text to GPT-2's token ids. Raises HellaSwagError if the vocabulary can't be had."""
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


def tokenize(example, encode=None):
    """The Question in one of iterate_examples' dicts; encode: text -> ids, by default GPT-2's."""
    encode = encode or gpt2_encoder()
    return Question(encode(example["ctx"]), [encode(" " + ending) for ending in example["endings"]], example["label"])


def render_example(example):
    """A question as four padded rows: (data, tokens (4, N) int64, mask (4, N) with 1 on endings, label)."""
    context, endings, label = question = tokenize(example)
    N = len(context) + max(map(len, endings))
    tokens, mask = torch.zeros(ENDINGS, N, dtype=torch.int64), torch.zeros(ENDINGS, N, dtype=torch.int64)
    for i, ending in enumerate(endings):
        tokens[i, :len(context) + len(ending)] = torch.tensor(context + ending)
        mask[i, len(context):len(context) + len(ending)] = 1
    return question._asdict(), tokens, mask, label


def cut(question, limit):
    """The question with its context cut from the left, so that context and any ending fit in `limit` tokens. An
    ending that leaves no room for a token of context loses its own end."""
    endings = [ending[:limit] for ending in question.endings]
    room = limit + 1 - max(map(len, endings))  # + 1: an ending's last token is predicted, never read
    return Question(question.context[-room:], endings, question.label)


# --------------------------------------------------------------------------------------------------- batches
class Batch(NamedTuple):
    """Q questions in rows padded to length T, and the N tokens of their endings."""
    tokens: torch.Tensor     # (rows, T) int64
    positions: torch.Tensor  # (rows, T) int64, restarted at each ending
    segments: torch.Tensor   # (rows, T) int64: 0 context, 1.. endings, -1 padding
    source: torch.Tensor     # (N,) where in the flattened rows a token is predicted
    targets: torch.Tensor    # (N,) its id
    ending: torch.Tensor     # (N,) whose it is: 4 * question + ending
    labels: torch.Tensor     # (Q,)


class Prepared(NamedTuple):
    """What evaluate() works on; made by prepare(), for models of one context length, vocabulary and device."""
    batches: list
    packed: bool             # one row a question; else a row for each ending
    total: int               # questions
    cut: int                 # of them too long for the model, so cut from the left


def collate(questions, packed):
    """The Batch of some Questions."""
    rows, source, targets, whose = [], [], [], []
    groups = [range(ENDINGS)] if packed else [[i] for i in range(ENDINGS)]
    T = max(row_length(question, group) for question in questions for group in groups)
    for number, (context, endings, _) in enumerate(questions):
        for group in groups:
            start, after = len(rows) * T, len(context)
            tokens, positions, segments = list(context), list(range(after)), [0] * after
            for segment, i in enumerate(group, start=1):
                # the context's last token predicts an ending's first; the ending's last predicts nothing
                source += [start + after - 1, *range(start + len(tokens), start + len(tokens) + len(endings[i]) - 1)]
                targets += endings[i]
                whose += [ENDINGS * number + i] * len(endings[i])
                tokens += endings[i][:-1]
                positions += range(after, after + len(endings[i]) - 1)
                segments += [segment] * (len(endings[i]) - 1)
            pad = T - len(tokens)
            rows.append((tokens + [0] * pad, positions + [0] * pad, segments + [-1] * pad))
    return Batch(*torch.tensor(rows).unbind(1), *map(torch.tensor, (source, targets, whose)),
                 torch.tensor([question.label for question in questions]))


def row_length(question, group=range(ENDINGS)):
    """Tokens in the row of a question with a group of its endings."""
    return len(question.context) + sum(len(question.endings[i]) - 1 for i in group)


def prepare(examples, model, encode=None):
    """Tokenize, cut, sort and pack questions for a model: Prepared, what evaluate() can use again and again.

    examples: iterate_examples' dicts, or Questions. encode: text -> ids, by default GPT-2's. The batches do not
    depend on the number of processes, and so neither do the totals. Raises HellaSwagError.
    """
    model = getattr(model, "_orig_mod", model)
    questions = [q if isinstance(q, Question) else tokenize(q, encode) for q in examples]
    if not questions:
        raise HellaSwagError("There are no questions to score: give some examples.")
    limit, device = context_length(model), device_of(model)
    whole, questions = questions, [cut(question, limit) for question in questions]
    packed = can_pack(model, max(questions, key=row_length))
    budget = of_device(TOKENS if packed else HEAD_ROWS, device)
    groups, full = [], 0
    for question in sorted(questions, key=row_length):
        size = row_length(question) if packed else ENDINGS * max(row_length(question, [i]) for i in range(ENDINGS))
        full += 1
        if full * size > budget or not groups:
            groups, full = [*groups, []], 1
        groups[-1].append(question)
    random.Random(0).shuffle(groups)  # short questions are the harder ones: the running accuracy should not show it
    return Prepared([collate(group, packed) for group in groups], packed, len(questions),
                    sum(a != b for a, b in zip(whole, questions)))


# --------------------------------------------------------------------------------------------------- scoring
def device_of(model):
    parameter = next(model.parameters(), None) if hasattr(model, "parameters") else None
    return torch.device("cpu") if parameter is None else parameter.device


def of_device(table, device):
    return table.get(device.type, table["cpu"])


def context_length(model):
    """The most tokens a model reads, LONGEST if it does not say or can read more."""
    config = getattr(model, "config", None)
    said = [getattr(config, name, None) for name in ("block_size", "max_position_embeddings", "n_positions")]
    return min(n for n in (LONGEST, *said) if isinstance(n, int) and n > 0)


def trunk_and_head(model, packed):
    """(trunk(tokens, positions, mask) -> (rows, T, C), head((N, C)) -> logits (N, V)) of a train_gpt2.GPT or of a
    transformers causal LM; for unpacked rows of anything that maps ids to logits, as the first of a tuple or alone."""
    def logits(tokens, positions, mask):
        out = model(tokens)
        return out if torch.is_tensor(out) else out[0]

    def transformers_trunk(tokens, positions, mask):
        dtype = next(model.parameters()).dtype
        bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
        return model.base_model(input_ids=tokens, position_ids=positions, attention_mask=bias, use_cache=False)[0]

    if not packed:
        return logits, lambda x: x
    return (model.hidden, model.head) if hasattr(model, "hidden") else (transformers_trunk, model.get_output_embeddings())


def can_pack(model, question):
    """Whether a model scores a packed row as it does the endings one by one. Of transformers models some do not:
    they know no positions or masks of ours (ALiBi, state spaces), or scale the logits after the head. They are tried
    on a question."""
    if hasattr(model, "hidden") or not hasattr(model, "get_output_embeddings"):
        return hasattr(model, "hidden")
    device, dtype = device_of(model), next(model.parameters()).dtype
    with torch.autocast(device.type, enabled=False):
        single = ending_losses(model, collate([question], False), False)
        try:
            packed = ending_losses(model, collate([question], True), True)
        except Exception:  # whatever a foreign model says to arguments it does not know
            return False
    return torch.allclose(packed, single, rtol=SAME_LOSS.get(dtype, SAME_LOSS_LOW))


@torch.no_grad()
def ending_losses(model, batch, packed):
    """Summed cross-entropy of each ending's tokens after the context, nats: (Q, 4) float64 on the CPU."""
    device = device_of(model)
    trunk, head = trunk_and_head(model, packed)
    tokens, positions, segments, source, targets = (t.to(device) for t in batch[:5])
    mask = (segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None])
    mask = mask.tril()[:, None]  # (rows, 1, T, T): the context and the own ending, up to oneself
    x = trunk(tokens, positions, mask).flatten(0, 1)[source]  # (N, C)
    rows = of_device(HEAD_ROWS, device)
    losses = [F.cross_entropy(head(part).float(), ids, reduction="none")
              for part, ids in zip(x.split(rows), targets.split(rows))]
    sums = torch.zeros(ENDINGS * len(batch.labels), dtype=torch.float64)
    return sums.index_add_(0, batch.ending, torch.cat(losses).double().cpu()).view(-1, ENDINGS)


class Score(NamedTuple):
    """Counts of questions: all, right by summed loss, right by mean loss per token, cut for their length."""
    total: int
    correct: int
    correct_norm: int
    cut: int = 0

    @property
    def acc(self):
        return self.correct / self.total

    @property
    def acc_norm(self):
        return self.correct_norm / self.total

    def stderr(self, accuracy):
        """Standard error of an accuracy over `total` questions."""
        return (accuracy * (1 - accuracy) / self.total) ** 0.5


@torch.no_grad()
def evaluate(model, examples, progress=False):
    """The Score of a model on questions, the same on every rank and for any number of ranks.

    model: train_gpt2.GPT, a transformers causal LM in eval(), compiled or not, or a function from ids (B, T) to
    logits (B, T, V). examples: prepare()'s result, or what prepare() takes. Runs in the caller's autocast, draws no
    random numbers; progress shows a bar with the running accuracy on rank 0. Raises HellaSwagError.
    """
    model = getattr(model, "_orig_mod", model)  # not the compiled one: each batch has another shape
    prepared = examples if isinstance(examples, Prepared) else prepare(examples, model)
    distributed = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    counts = torch.zeros(3, dtype=torch.int64)  # total, correct, correct_norm
    from tqdm import tqdm
    batches = prepared.batches[rank::world]
    with tqdm(total=sum(len(b.labels) for b in batches), unit="question", disable=not progress or rank > 0) as bar:
        for batch in batches:
            sums = ending_losses(model, batch, prepared.packed)
            means = sums / torch.bincount(batch.ending).view(-1, ENDINGS)
            right = [(losses.argmin(1) == batch.labels).sum() for losses in (sums, means)]
            counts += torch.stack([torch.tensor(len(batch.labels)), *right])
            bar.set_postfix_str(f"acc_norm {counts[2] / counts[0]:.4f}", refresh=False)
            bar.update(len(batch.labels))
    if distributed:
        counts = counts.to(device_of(model))  # NCCL has no CPU tensors
        dist.all_reduce(counts)
    return Score(*counts.tolist(), prepared.cut)


# ---------------------------------------------------------------------------------------------- command line
def pick_device(name):
    """torch.device by name; None = the best there is. Raises HellaSwagError."""
    name = name or ("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as e:  # torch built without CUDA says so by AssertionError
        raise HellaSwagError(f"-d {name} can't be used here ({reason(e)}): take -d cpu, or leave it out.") from None


def load_model(name):
    """(model in float32, encode or None for GPT-2's) from a hub name or a Hugging Face folder. Raises HellaSwagError."""
    if name.endswith(".pt"):
        raise HellaSwagError(f"{name} is a checkpoint; export it first, then give -m hf: "
                             f"python -c \"import train_gpt2 as t; t.export('{name}', 'hf')\"")
    if Path(name).is_dir() and not Path(name, "config.json").exists():
        raise HellaSwagError(f"{name} is a folder without a model (no config.json): give -m a Hugging Face folder.")
    try:
        import huggingface_hub
        import transformers
        transformers.logging.set_verbosity_error()  # what it would say, the errors below say in a line
        huggingface_hub.utils.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        huggingface_hub.utils.enable_progress_bars()  # of downloads, not of loading
        model, info = transformers.AutoModelForCausalLM.from_pretrained(name, use_safetensors=True,
                                                                        output_loading_info=True)
    except Exception as e:  # config, hub, HTTP, safetensors and any model's own code; there is no list of them
        raise HellaSwagError(f"-m {name} is no causal language model that can be loaded ({reason(e)}): give a hub name "
                             f"such as gpt2 (HF_ENDPOINT names a mirror) or a Hugging Face folder.") from None
    if info["missing_keys"]:
        raise HellaSwagError(f"-m {name} lacks {len(info['missing_keys'])} tensors, {sorted(info['missing_keys'])[0]} "
                             f"for one: it is not a whole model.")
    return model.float().eval(), None
