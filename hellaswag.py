"""HellaSwag (Zellers et al. 2019): which of four endings is likeliest?

    python hellaswag.py                         # GPT-2 (124M), best device
    python hellaswag.py -m gpt2-xl -d cuda      # any causal LM on the hub
    python hellaswag.py -m log/hf --limit 1000  # what training exported

In Python: evaluate(model, prepare(iterate_examples("val"), model, encode))

One of the 10,042 questions; label is the number of the right ending:

    {"ctx": "A young man sits on a bed. the man", "label": 3, "endings": ["then wipes his face.",
     "gets up and walks towards the camera.", "lifts a shoe to his mouth.", "starts playing ..."]}

A row holds a question's context and one of its endings. The losses of the ending's tokens say how
likely the model finds it: the lowest sum is its answer for acc, the lowest mean for acc_norm.
GPT-2 (124M) has acc 0.2859 and acc_norm 0.2955, GPT-2 XL 0.3842 and 0.4893; guessing has 0.25.
Nothing is asked of a model but logits for ids.
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
CPU_BATCH, GPU_BATCH = 1024, 8192   # tokens per forward pass; 8192 have 1.6 GB of GPT-2's logits

class Prepared(NamedTuple):
    batches: list          # on the CPU: (row numbers (R,), tokens (R, T + 1), is_ending (R, T + 1))
    labels: torch.Tensor   # (Q,) the right ending
    lengths: torch.Tensor  # (Q, 4) tokens of each ending; row q * 4 + i is ending i of question q
    cut: int               # questions whose context did not fit the model

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
    if split != "val":
        raise ValueError(f"split={split}: HellaSwag is scored on its validation split, val")
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
        path = hf_hub_download("Rowan/hellaswag", "default/validation/0000.parquet",
                               repo_type="dataset", endpoint=hub,
                               revision="refs/convert/parquet")  # a branch that the hub makes
        examples = checked(parquet.read_table(path).to_pylist())
        lines = [json.dumps(example).encode() + b"\n" for example in examples]
        write_whole(DATA, lambda file: file.writelines(lines))
    except Exception as e:  # the hub's client, HTTP and pyarrow have no common class
        reason = first_line(e.__cause__ or e)
        raise UserError(f"HellaSwag cannot be downloaded from {hub} ({reason}): go online, name a "
                        f"mirror in HF_ENDPOINT, or put the questions at {DATA}.") from None

# --------------------------------------------------------------------------- tokens and rows
def gpt2_encode(text):
    """A text's ids in GPT-2's encoding; in a text, <|endoftext|> is text."""
    return get_encoding("gpt2").encode_ordinary(text)

def tokenize(example, encode=gpt2_encode):
    """A question's token ids, (context, [four endings]); encode: text -> ids."""
    # An ending is encoded after a word, whose tokens are dropped: some tokenizers begin every text
    # with a token or a space of their own. For GPT-2 it is the same as encode(" " + ending).
    start = len(encode("a"))
    return encode(example["ctx"]), [encode("a " + ending)[start:] for ending in example["endings"]]

def render_example(example):
    """A question in GPT-2's tokens, one padded row per ending: (data, tokens, mask, label).

    tokens and mask are (4, N) int64, the mask 1 on an ending's tokens. For notebooks, unused here.
    """
    context, endings = tokenize(example)
    data = {"context": context, "endings": endings, "label": example["label"]}
    tokens, mask = collate([(context, ending) for ending in endings])
    return data, tokens, mask, example["label"]

def collate(rows):
    """Rows (context, ending) padded with 0: tokens (R, N), and 1 on an ending's tokens (R, N)."""
    tokens = [torch.tensor(context + ending) for context, ending in rows]
    mask = [torch.tensor([0] * len(context) + [1] * len(ending)) for context, ending in rows]
    return pad_sequence(tokens, batch_first=True), pad_sequence(mask, batch_first=True)

def prepare(examples, model, encode=gpt2_encode):
    """iterate_examples' dicts as rows for a model, whose token ids encode(text) gives."""
    config = getattr(model, "config", None)
    context_size = getattr(config, "block_size", getattr(config, "max_position_embeddings", 1024))
    rows, labels, lengths, cut = [], [], [], 0
    for example in examples:
        context, endings = tokenize(example, encode)
        endings = [ending[:context_size] for ending in endings]
        room = context_size + 1 - max(map(len, endings))  # the last is predicted, not read
        cut += len(context) > room
        rows += [(context[-room:], ending) for ending in endings]
        labels.append(example["label"])
        lengths.append([len(ending) for ending in endings])
    batches = make_batches(rows, CPU_BATCH if device_of(model).type == "cpu" else GPU_BATCH)
    return Prepared(batches, torch.tensor(labels), torch.tensor(lengths), cut)

def make_batches(rows, batch_tokens):
    """Prepared.batches of these rows (context, ending), the longest first.

    Rows of similar length are a batch: in file order, padding would add 25 % to HellaSwag's tokens
    in batches of CPU_BATCH, and 42 % in those of GPU_BATCH.
    """
    sizes = [len(context) + len(ending) for context, ending in rows]
    numbers = sorted(range(len(rows)), key=sizes.__getitem__)
    batches = []
    while numbers:
        n = max(1, batch_tokens // sizes[numbers[-1]])  # the last is the longest
        tokens, is_ending = collate([rows[i] for i in numbers[-n:]])
        batches.append((numbers[-n:], tokens, is_ending))
        del numbers[-n:]
    return batches

def prepare_for_training(model, encode):
    """prepare() on all questions, which rank 0 gets for all; None, and a line, if it cannot."""
    found = [[]]  # in a list, which broadcast_object_list() fills
    if ranks()[0] == 0:
        try:
            found = [list(iterate_examples("val"))]
        except UserError as e:
            print(f"HellaSwag is off: {e}", flush=True)
    if ranks()[1] > 1:
        dist.broadcast_object_list(found)
    return prepare(found[0], model, encode) if found[0] else None

# ------------------------------------------------------------------------------------ scoring
def ranks():
    """(This process's rank, the number of processes)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1

def device_of(model):
    """Where a model's weights are; the CPU, if it is a function."""
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return next((p.device for p in parameters), torch.device("cpu"))

# All but cuDNN's attention, for speed: it plans up to half a second for each shape of a batch.
@sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
@torch.no_grad()
def ending_losses(model, tokens, is_ending):
    """The summed loss in nats of each row's ending, (R,) float64."""
    device = device_of(model)
    tokens = tokens.to(device)
    mask = is_ending[:, 1:].to(device) == 1  # (R, T)
    # Eager, for speed: a compiled model would be compiled again for each shape of a batch.
    with torch.compiler.set_stance("force_eager"):
        output = model(tokens[:, :-1])
    # Ours gives (logits, loss), transformers' an object, a function logits alone, (R, T, V).
    logits = output[0] if type(output) is tuple else getattr(output, "logits", output)
    losses = F.cross_entropy(logits[mask].float(), tokens[:, 1:][mask], reduction="none")
    rows, losses = mask.nonzero()[:, 0].cpu(), losses.cpu().double()  # MPS has no float64
    return rows.bincount(weights=losses, minlength=len(tokens))  # sums by row

def evaluate(model, examples, progress=False):
    """The Score of a model, the same on every rank and for any number of ranks.

    model: a train_gpt2.GPT or, in eval(), a transformers causal language model, compiled or
    not; or a function from ids (B, T) to logits (B, T, V). It runs in the caller's autocast.
    examples: prepare()'s result, or what prepare() takes. progress: show a bar.
    Raises UserError, on every rank, if a loss is not finite.
    """
    questions = examples if isinstance(examples, Prepared) else prepare(examples, model)
    rank, world = ranks()
    sums = torch.zeros(questions.lengths.numel(), dtype=torch.float64)
    batches = tqdm(questions.batches[rank::world], unit="batch", disable=not progress)
    for numbers, tokens, is_ending in batches:
        sums[numbers] = ending_losses(model, tokens, is_ending)
    if world > 1:
        sums = sums.to(device_of(model))  # NCCL takes no CPU tensors
        dist.all_reduce(sums)
    sums = sums.cpu().view(-1, 4)  # (Q, 4)
    if not sums.isfinite().all():
        raise UserError("HellaSwag: losses are not finite; are weights damaged, or dtype float16?")
    right = (sums.argmin(1) == questions.labels).double()
    right_norm = ((sums / questions.lengths).argmin(1) == questions.labels).double()
    return Score(right.mean().item(), right_norm.mean().item(), len(sums), questions.cut)

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
        if model.config.vocab_size != 50257:  # another tokenizer than GPT-2's
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            encode = tokenizer.encode
            if not encode("a"):  # for a folder without one, transformers makes an empty one
                raise ValueError("it has no tokenizer")
        model.config.use_cache = False  # for memory: 5 GB of GPT-2 XL's keys and values a batch
        return model.float().to(device), encode
    except Exception as e:  # config, hub, HTTP, safetensors, tokenizers: no common class
        raise UserError(f"-m {name} cannot be loaded on -d {device} ({first_line(e)}): give a hub "
                        f"name like gpt2, or a folder like log/hf.") from None

def score(args):
    """Load, score and print as the command line asks."""
    examples = list(iterate_examples("val"))[:args.limit]
    model, encode = load_model(args.model, args.device)
    # No autocast, as published scores are float32's: GPT-2's logits are near -35, where bfloat16
    # has steps of 1/4. TF32, for speed on a GPU, rounds what goes into products, not the logits.
    torch.set_float32_matmul_precision("high")
    result = evaluate(model, prepare(examples, model, encode), progress=True)
    print(f"{args.model} on {model.device} in float32: {result.total:,} questions "
          f"({result.cut:,} cut on the left to fit)")
    for name, share, what in (("acc", result.acc, "summed loss"),
                              ("acc_norm", result.acc_norm, "mean loss per token")):
        standard_error = math.sqrt(share * (1 - share) / result.total)
        print(f"{name:<8} {share:.4f} +- {standard_error:.4f}   (lowest {what} wins)")
    print("To compare (acc / acc_norm): GPT-2 (124M) 0.2859 / 0.2955, GPT-2 XL 0.3842 / 0.4893, "
          "GPT-3 (124M) - / 0.337")

def main():
    """Do what the command line says, or end with one line that says why not."""
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
