"""Score causal language models on HellaSwag (Zellers et al. 2019).

    python hellaswag.py                         # GPT-2 (124M), fastest device
    python hellaswag.py -m gpt2-xl -d cuda      # any causal LM on the hub
    python hellaswag.py -m log/hf --limit 1000  # your own model

In Python, with a function that returns the model's token ids for a text, as a list:

    evaluate(model, prepare(iterate_examples("val"), model, text_to_ids))

HellaSwag (arXiv:1905.07830) asks which of four endings best completes a text. Its validation split
has 10,042 questions such as this one, where "label" is the index of the correct ending:

    {"ctx": "A young man sits on a bed. the man", "label": 3, "endings": ["then wipes his face.",
     "gets up and walks towards the camera.", "lifts a shoe to his mouth.", "starts playing ..."]}

Each question gives four rows of tokens, each with the context and one of the endings. The model's
cross-entropy loss is computed for each token of an ending. The model's answer is the ending with
the lowest sum of losses (acc) or with the lowest mean loss per token (acc_norm). GPT-2 (124M)
scores 0.2859 (acc) and 0.2955 (acc_norm), GPT-2 XL 0.3842 and 0.4893, and random guessing 0.25.
"""
import argparse
import json
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

from fineweb import UserError, get_encoding, refuse_flag, summary_of, write_whole

DATA = Path(__file__).resolve().parent / "hellaswag" / "hellaswag_val.jsonl"
TOTAL = 10_042    # questions in the validation split
CPU_BATCH = 1024  # tokens per forward pass on a CPU
GPU_BATCH = 8192  # tokens per forward pass on a GPU; GPT-2's logits for them take 1.6 GB

class Prepared(NamedTuple):
    """Q questions, tokenized for one model by prepare().

    Each question gives four rows, each of which is the context followed by one of the endings. Row
    4 * q + i has ending i of question q. A batch has R rows of similar length, padded to the length
    N of the longest one.
    """
    batches: list           # (row numbers, tokens (R, N), mask (R, N)) of each batch
    labels: torch.Tensor    # (Q,) the index of the correct ending
    n_tokens: torch.Tensor  # (Q, 4) the number of tokens in each ending
    n_truncated: int        # the number of questions whose context was truncated to fit

class Score(NamedTuple):
    """The result of evaluate()."""
    acc: float        # fraction of questions whose correct ending has the lowest sum of losses
    acc_norm: float   # fraction whose correct ending has the lowest mean loss per token
    loss: float       # mean over questions of the correct ending's mean loss per token, in nats
    total: int        # number of questions
    n_truncated: int  # number of questions whose context was truncated to fit

# ----------------------------------------------------------------------------------- questions
# Download the questions once, and check their number each time they are read
def iterate_examples(split="val"):
    """Return an iterator over HellaSwag's questions in file order, after counting them.

    Each question is a dict with at least "ctx" (text), "endings" (4 texts) and "label" (int). If
    DATA is missing, they are first downloaded and saved there. Raise UserError if that fails or if
    DATA is damaged, and ValueError if the split is not "val".
    """
    if split != "val":
        raise ValueError(f"split={split}: HellaSwag is scored on its validation split, val")
    if not DATA.exists():
        download()
    try:
        examples = [json.loads(line) for line in DATA.read_bytes().splitlines()]
        for example in examples:
            example["label"] = int(example["label"])  # on the hub, labels are strings
        if len(examples) != TOTAL:
            raise ValueError(f"{len(examples):,} of {TOTAL:,} questions")
    except (OSError, ValueError, KeyError) as e:
        raise UserError(f"{DATA} is damaged ({summary_of(e)}): delete it, and it will be "
                        f"downloaded again.")
    return iter(examples)

def download():
    """Download the validation split from the hub and write it to DATA, one question per line.

    Raise UserError if that fails.
    """
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    print(f"downloading HellaSwag (6 MB) from {hub}")
    try:
        from huggingface_hub import hf_hub_download, logging
        from pyarrow import parquet
        logging.set_verbosity_error()  # do not log retries; a failure raises UserError below
        path = hf_hub_download("Rowan/hellaswag", "default/validation/0000.parquet",
                               repo_type="dataset", endpoint=hub,
                               revision="refs/convert/parquet")  # a branch that the hub creates
        examples = parquet.read_table(path).to_pylist()
        write_whole(DATA, lambda file: file.writelines(
            json.dumps(example).encode() + b"\n" for example in examples))
    except Exception as e:  # errors of the hub's client, HTTP and pyarrow have no common class
        raise UserError(f"HellaSwag cannot be downloaded from {hub} "
                        f"({summary_of(e.__cause__ or e)}): connect to the internet, name a mirror "
                        f"in HF_ENDPOINT, or put the questions at {DATA}.")

# ------------------------------------------------------------------------------------ tokens
# Turn questions into rows of tokens, and rows of similar length into batches
def gpt2_encode(text):
    """Return the ids of a text in GPT-2's encoding, with "<|endoftext|>" as ordinary text."""
    return get_encoding("gpt2").encode_ordinary(text)

def question_to_ids(example, text_to_ids=gpt2_encode):
    """Return the token ids of a question: (context, [4 endings]), all of them lists."""
    # An ending continues the context, so its ids should be those of " " + ending. But some
    # tokenizers put a start token or a space before each text. So encode "a " + ending, and drop as
    # many ids as "a" alone has
    n_dropped = len(text_to_ids("a"))
    return text_to_ids(example["ctx"]), [text_to_ids("a " + ending)[n_dropped:]
                                         for ending in example["endings"]]

def join_and_pad(rows):
    """Join contexts and endings, pad with 0, and return (tokens, mask), both (R, N) int64.

    In `tokens`, each row is a context and its ending. In `mask`, 1 marks the tokens of the ending.
    rows: pairs (context, ending) of token ids.
    """
    tokens = [torch.tensor(context + ending) for context, ending in rows]
    mask = [torch.tensor([0] * len(context) + [1] * len(ending)) for context, ending in rows]
    return pad_sequence(tokens, batch_first=True), pad_sequence(mask, batch_first=True)

def render_example(example):
    """Tokenize a question with GPT-2's encoding, to look at it.

    Return (data, tokens (4, N), mask (4, N), label). data is a dict with the token ids of the
    context and the endings, and the label. For tokens and mask, see join_and_pad().
    """
    context, endings = question_to_ids(example)
    data = {"context": context, "endings": endings, "label": example["label"]}
    return data, *join_and_pad([(context, ending) for ending in endings]), example["label"]

def prepare(examples, model, text_to_ids=gpt2_encode):
    """Tokenize questions for a model. Return a Prepared.

    examples: dicts like those from iterate_examples().
    text_to_ids: a function from a text to a list of the model's token ids.
    The model's context length is block_size or max_position_embeddings in its config, or 1024 if
    the config has neither. The model's device determines the size of a batch.
    """
    config = getattr(model, "config", None)
    # Most models in transformers call the context length max_position_embeddings
    block_size = getattr(config, "block_size", getattr(config, "max_position_embeddings", 1024))
    rows, labels, n_tokens, n_truncated = [], [], [], 0
    for example in examples:
        context, endings = question_to_ids(example, text_to_ids)
        endings = [ending[:block_size] for ending in endings]
        n_tokens.append([len(ending) for ending in endings])
        # A row has at most block_size + 1 tokens, because its last token is only a target. Truncate
        # the context, which all four rows share, from the left. At least one token of it is left,
        # because an ending has at most block_size tokens
        room_for_context = block_size + 1 - max(map(len, endings))
        n_truncated += len(context) > room_for_context
        rows += [(context[-room_for_context:], ending) for ending in endings]
        labels.append(example["label"])
    batch_tokens = CPU_BATCH if device_of(model).type == "cpu" else GPU_BATCH
    return Prepared(make_batches(rows, batch_tokens), torch.tensor(labels), torch.tensor(n_tokens),
                    n_truncated)

def make_batches(rows, batch_tokens):
    """Group rows into Prepared.batches of at most batch_tokens tokens, including padding.

    rows: pairs (context, ending) of token ids. Rows of similar length share a batch. If they were
    batched in file order, padding would increase the total number of tokens by 25% with CPU_BATCH
    and by 42% with GPU_BATCH. The longest rows come first, so that memory runs out in the first
    batch or never.
    """
    sizes = [len(context) + len(ending) for context, ending in rows]
    remaining = sorted(range(len(rows)), key=sizes.__getitem__, reverse=True)  # row numbers
    batches = []
    while remaining:
        longest = sizes[remaining[0]]
        n_rows = max(1, batch_tokens // longest)
        row_numbers, remaining = remaining[:n_rows], remaining[n_rows:]
        batches.append((row_numbers, *join_and_pad([rows[number] for number in row_numbers])))
    return batches

def prepare_on_all_ranks(model, text_to_ids):
    """Return all questions as a Prepared, the same on every rank, or None if they are unavailable.

    Only rank 0 reads or downloads them. If that fails, it prints the reason.
    """
    rank, n_ranks = rank_and_world_size()
    box = [None]
    if rank == 0:
        try:
            box[0] = list(iterate_examples("val"))
        except UserError as e:
            print(f"HellaSwag is off: {e}", flush=True)
    if n_ranks > 1:
        dist.broadcast_object_list(box)  # replaces the list's element with that of rank 0
    return prepare(box[0], model, text_to_ids) if box[0] else None

# ------------------------------------------------------------------------------------ scoring
# Compute the loss of each ending. A model only has to return logits for token ids
def rank_and_world_size():
    """Return this process's rank and the number of processes; (0, 1) without a process group.

    This does not read torchrun's variables, which may be set although no process group exists.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1

def device_of(model):
    """Return the device of a model's weights; the CPU if the model is a plain function."""
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return next((p.device for p in parameters), torch.device("cpu"))

# Use any attention kernel except cuDNN's, which spends up to half a second planning for each new
# batch shape
@sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
@torch.no_grad()
def ending_losses(model, tokens, mask):
    """For each of R rows, return the total loss of its ending, in nats: (R,) float64.

    tokens, mask: (R, N), as in Prepared.batches.
    """
    device = device_of(model)
    tokens = tokens.to(device)
    targets = tokens[:, 1:]  # (R, N - 1)
    in_ending = mask[:, 1:].to(device) == 1  # (R, N - 1), whether a target is in the ending
    # If the model has been compiled, run it eagerly here. Otherwise it would be compiled again for
    # each new batch shape, which takes longer
    with torch.compiler.set_stance("force_eager"):
        output = model(tokens[:, :-1])
    # A train_gpt2.GPT returns (logits, loss). A transformers model returns an object with logits,
    # and a plain function returns the logits (R, N - 1, V) themselves
    logits = output[0] if isinstance(output, tuple) else getattr(output, "logits", output)
    # The rows and positions of the n targets that belong to an ending, both (n,)
    rows, positions = in_ending.nonzero(as_tuple=True)
    token_losses = F.cross_entropy(logits[rows, positions].float(), targets[rows, positions],
                                   reduction="none")
    sums = torch.zeros(len(tokens), dtype=torch.float64)  # on the CPU, since MPS has no float64
    return sums.index_add_(0, rows.cpu(), token_losses.cpu().double())

def evaluate(model, examples, progress=False):
    """Return the model's Score. It is the same on every rank and for any number of ranks.

    model: a train_gpt2.GPT, a transformers causal language model in eval() mode, or a function
    from ids (B, T) to logits (B, T, V). A compiled model is run eagerly. The caller chooses the
    precision with torch.autocast.
    examples: the questions, tokenized by prepare() (a Prepared). For a model with GPT-2's encoding,
    dicts like those from iterate_examples() also work.
    progress: show a progress bar.
    Raise UserError, on every rank, if a loss is not finite.
    """
    prepared = examples if isinstance(examples, Prepared) else prepare(examples, model)
    rank, n_ranks = rank_and_world_size()
    sums = torch.zeros(4 * len(prepared.labels), dtype=torch.float64)  # one for each row
    for row_numbers, tokens, mask in tqdm(prepared.batches[rank::n_ranks], unit="batch",
                                          disable=not progress):
        sums[row_numbers] = ending_losses(model, tokens, mask)
    if n_ranks > 1:  # each rank has the sums of its own rows, and 0 elsewhere
        sums = sums.to(device_of(model))  # NCCL does not accept CPU tensors
        dist.all_reduce(sums)
    sums = sums.cpu().view(-1, 4)  # (Q, 4)
    if not sums.isfinite().all():
        raise UserError("HellaSwag: some losses are not finite. Check the weights; if the dtype is "
                        "float16, use another one, or train with --hellaswag_every=0.")
    acc = (sums.argmin(1) == prepared.labels).double().mean().item()
    means = sums / prepared.n_tokens
    acc_norm = (means.argmin(1) == prepared.labels).double().mean().item()
    loss = means.gather(1, prepared.labels[:, None]).mean().item()
    return Score(acc, acc_norm, loss, len(sums), prepared.n_truncated)

# ------------------------------------------------------------------------------ command line
# Score a model from the Hugging Face Hub or from an exported folder
def load_model(name, device):
    """Return a transformers causal language model in float32, and a function from text to ids.

    name: the model's name on the hub, or a folder. Raise UserError if it cannot be loaded.
    """
    if name.endswith(".pt"):
        raise UserError(f"-m {name} is a checkpoint: export it with python train_gpt2.py "
                        f"--init_from={name} --max_steps=0 --log_dir=exported, and the --data, "
                        f"--encoding and --T of its run. Then use -m exported/hf.")
    try:
        import transformers
        transformers.logging.set_verbosity_error()  # the UserError below is enough
        transformers.logging.disable_progress_bar()
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            name, use_safetensors=True, trust_remote_code=False, output_loading_info=True)
        if info["missing_keys"]:
            raise ValueError(f"it lacks {min(info['missing_keys'])}")
        text_to_ids = gpt2_encode
        if model.config.vocab_size != 50257:
            text_to_ids = transformers.AutoTokenizer.from_pretrained(
                name, trust_remote_code=False).encode
            if not text_to_ids("a"):  # transformers makes an empty tokenizer if there is none
                raise ValueError("it has no tokenizer")
        model.config.use_cache = False  # saves memory: 5 GB of keys and values with GPT-2 XL
        return model.float().to(device).eval(), text_to_ids
    except Exception as e:  # errors of the hub, HTTP, safetensors, ... have no common class
        raise UserError(f"-m {name} cannot be loaded on -d {device} ({summary_of(e)}): give the "
                        f"name of a model on the hub, such as gpt2, or a folder, such as log/hf.")

def main():
    """Score the model that the command line names, and print the result."""
    sys.stdout.reconfigure(errors="backslashreplace")  # the name may contain any character
    best = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    parser = argparse.ArgumentParser(description="\n\n".join(__doc__.split("\n\n")[:2]),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="gpt2", type=os.path.expanduser,
                        help="a model on the Hugging Face hub, or a folder (default: gpt2)")
    parser.add_argument("-d", "--device", default=best,
                        help=f"device, for example cuda, cuda:1, mps or cpu (default: {best})")
    parser.add_argument("--limit", type=int, default=TOTAL, metavar="N",
                        help="score only the first N questions (default: all)")
    parser.error = refuse_flag
    args = parser.parse_args()
    if args.limit < 1:
        raise UserError(f"--limit={args.limit}: it must be at least 1.")
    # Like the published scores, these scores are computed in float32, but with TF32 on GPUs that
    # have it. TF32 is faster, and rounds only the inputs of matrix multiplications. bfloat16 would
    # also round the logits: GPT-2's logits are near -35, where adjacent bfloat16 numbers differ
    # by 1/4. train_gpt2.py scores in the dtype of training, which is less precise
    torch.set_float32_matmul_precision("high")
    examples = list(iterate_examples("val"))[:args.limit]
    model, text_to_ids = load_model(args.model, args.device)
    result = evaluate(model, prepare(examples, model, text_to_ids), progress=True)
    print(f"{args.model} on {model.device} in float32: {result.total:,} questions "
          f"({result.n_truncated:,} of them with a truncated context)")
    for name, accuracy, criterion in (("acc", result.acc, "lowest sum of losses"),
                                      ("acc_norm", result.acc_norm, "lowest mean loss per token")):
        standard_error = (accuracy * (1 - accuracy) / result.total) ** 0.5
        print(f"{name:<8} {accuracy:.4f} +- {standard_error:.4f}   ({criterion})")
    print(f"loss     {result.loss:.4f}   (mean per token of the correct ending, in nats)\n"
          "To compare (acc / acc_norm): GPT-2 (124M) 0.2859 / 0.2955, GPT-2 XL 0.3842 / 0.4893, "
          "GPT-3 (125M) - / 0.337")

if __name__ == "__main__":
    main()
