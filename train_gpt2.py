"""Train GPT-2 in one file, on one CPU, one GPU, or many GPUs on many machines.

    python train_gpt2.py             # no shards yet: two minutes of Shakespeare
    python fineweb.py                # FineWeb-Edu -> edu_fineweb10B/*.npy
    torchrun --standalone --nproc_per_node=8 train_gpt2.py     # GPT-2 (124M)
    tail -f log/log.txt              # "<step> train|val|hella <value>"

Edit the constants in Config, or give any of them as a flag (--max_lr=1e-3).
Stop with Ctrl-C; the same command goes on from there. 0 means never for any
of the *_every. In this order: constants, model, Hugging Face, data, machine,
optimizer, evaluation, checkpoints, log, training, command line.
"""
import argparse
import contextlib
import copy
import dataclasses
import inspect
import io
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import timeit
import warnings
import zipfile
import zlib
from collections import namedtuple
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import hellaswag

# ------------------------------------------------------------------------------------------------- constants
FINEWEB_DIR = "edu_fineweb10B"  # what fineweb.py leaves; while it is missing, a bare command runs QUICK_START
HERE = Path(__file__).resolve().parent


@dataclass
class Config:
    """The full GPT-2 (124M) run with GPT-3's hyperparameters (Brown et al. 2020, table 2.1)."""
    data: str = FINEWEB_DIR          # folder of .npy token shards, or a UTF-8 text file (its last 10 % validates)
    encoding: str = "gpt2"           # "gpt2" (50,257 tokens) or "bytes" (256 + end of text, needs no download)
    shuffle: bool = True             # visit shards, and rows within a shard, in a fresh order each epoch
    seed: int = 1337                 # decides initial weights, data order and samples
    # the batch: total_batch_size decides the training; B and the number of processes only speed and memory
    total_batch_size: int = 524288   # tokens per optimizer step, 2**19; a multiple of B * T * processes
    B: int = 64                      # rows per forward pass and process; lower it when memory runs out
    T: int = 1024                    # tokens per row, the model's context
    # the model: 124M = 12/12/768, 350M = 24/16/1024, 774M = 36/20/1280, 1.5B = 48/25/1600 ...
    n_layer: int = 12                # blocks
    n_head: int = 12                 # attention heads per block
    n_embd: int = 768                # width, a multiple of n_head
    init_from: str = "scratch"       # "scratch"; gpt2, gpt2-medium, -large, -xl, any such folder or name; a .pt of ours
    # the optimizer: ... for which GPT-3 used max_lr 6e-4, 3e-4, 2.5e-4, 2e-4 (min_lr is a tenth of it)
    optimizer: str = "adamw"         # "adamw", or "muon": Muon for the blocks' matrices, AdamW for the rest
    max_lr: float = 6e-4             # learning rate after warmup
    muon_lr_ratio: float = 1.0       # Muon's learning rate over AdamW's, throughout
    min_lr: float = 6e-5             # learning rate at max_steps
    lr_shape: str = "cosine"         # the way from max_lr down to min_lr; "cosine" as GPT-3's, or "linear"
    warmup_steps: int = 715          # steps of linear warmup; 375 M tokens as in GPT-3
    max_steps: int = 19073           # optimizer steps; 10 B tokens / 524,288 = one epoch of sample-10BT
    weight_decay: float = 0.1        # on matrices and embeddings, not on biases and LayerNorms
    grad_clip: float = 1.0           # largest norm of the gradient; 0 = no clipping
    # watching it
    eval_every: int = 250            # steps between validations
    val_tokens: int = 10485760       # tokens a validation reads, the same ones each time
    hellaswag_every: int = 250       # steps between HellaSwag scores
    sample_every: int = 250          # steps between samples
    sample_prompt: str = "Hello, I'm a language model,"  # how samples begin
    sample_tokens: int = 64          # tokens a sample goes on for, one sample per process
    # keeping it
    log_dir: str = "log"             # log.txt, run.json, curves.png, checkpoints and the exported model
    save_every: int = 250            # steps between checkpoints (the newest two are kept)
    milestone_every: int = 5000      # steps between weights that are kept for good, model_<step>.pt
    resume: bool = True              # go on from the newest checkpoint in log_dir; False moves old results aside
    # the machine
    device: str = "auto"             # "auto" = the best there is; cuda, cuda:1, mps or cpu
    dtype: str = "auto"              # "auto" = what the device is fast in; bfloat16, float16 or float32
    compile: str = "auto"            # "auto" = torch.compile on CUDA where it works; True or False
    grad_comm: str = "float32"       # dtype in which DDP sends gradients; bfloat16 halves the traffic


# What differs in the quick start: a small GPT on the bytes of Shakespeare, for two plain CPU cores
QUICK_START = dict(data=str(HERE / "input.txt"), encoding="bytes", total_batch_size=2048, B=32, T=64, n_layer=3,
                   n_head=4, n_embd=128, optimizer="muon", max_lr=7e-3, muon_lr_ratio=2.0, min_lr=0.0, lr_shape="linear",
                   warmup_steps=20, max_steps=1300, weight_decay=0.2, eval_every=325, val_tokens=131072, hellaswag_every=0,
                   sample_every=650, sample_prompt="\n\n", sample_tokens=300, dtype="float32")

CHOICES = {"encoding": ("gpt2", "bytes"), "optimizer": ("adamw", "muon"), "lr_shape": ("cosine", "linear"),
           "dtype": ("auto", "bfloat16", "float16", "float32"), "compile": ("auto", "True", "False"),
           "grad_comm": ("float32", "bfloat16")}
ADAM_BETAS, ADAM_EPS = (0.9, 0.95), 1e-8  # GPT-3, appendix B
VOCAB_MULTIPLE = 128                      # the vocabulary is padded to a multiple: even tiles for the matmul units
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # Hugging Face keeps these as (in, out), we as (out, in)
VAL_FRACTION = 0.1                        # of a text file, from its end
TOP_K = 50                                # samples are drawn from the 50 likeliest tokens
RESULTS = ("log.txt", "run.json", "curves.png", "hf", "checkpoint_*.pt", "model_*.pt")  # what a run leaves in log_dir
CHECKPOINTS_KEPT = 2                      # should the newest turn out damaged, the one before it is there
IDS_CHECKED = 200_000_000                 # token ids looked at before training, spread over the shards
IDS_IN_FINGERPRINT = 4096                 # of each shard: enough to notice that data is another
# a run may go on with other values of these: they change speed, place, rounding or what is watched
FREE_TO_CHANGE = {"B", "eval_every", "val_tokens", "hellaswag_every", "sample_every", "sample_prompt", "sample_tokens",
                  "log_dir", "save_every", "milestone_every", "resume", "device", "dtype", "compile", "grad_comm"}
GPT2_124M = {"val": 3.2924, "hella": 0.2945}  # OpenAI's weights on FineWeb-Edu's validation shard and HellaSwag
GPT3_124M_HELLA = 0.337                       # Brown et al. 2020, table H.1
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312, "A10G": 70, "L40S": 362,
               "L4": 121, "RTX 5090": 209, "RTX 4090": 165, "RTX 3090": 71, "V100": 125, "T4": 65}  # dense 16-bit


class UserError(Exception):
    """Something the person at the keyboard can mend; its text is the one line they are shown."""

    def __init__(self, text, agreed=False):
        super().__init__(text)
        self.agreed = agreed  # every process raises it, so that one telling is enough


# ----------------------------------------------------------------------------------------------------- model
@dataclass
class GPTConfig:
    block_size: int = 1024           # longest context
    vocab_size: int = 50304          # rows of the embedding, padding included
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_vocab: int | None = None       # ids in use (None = all); the rows beyond are padding and never predicted
    tied: bool = True                # lm_head shares the embedding's weights, as OpenAI's models do

    def __post_init__(self):
        if self.n_embd % self.n_head:
            raise UserError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: "
                            f"change one of them so that each head gets n_embd / n_head dimensions.")
        self.n_vocab = self.n_vocab or self.vocab_size


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a token sees itself and what came before it."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key and value in one matmul
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, mask=None, cache=None):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, heads, T, C / heads)
                   for t in self.c_attn(x).split(C, dim=2))
        if cache is not None:  # a list of this layer's [k, v] of the tokens before x; empty at first
            if cache:
                k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
            cache[:] = k, v
        # A single query may see every key; is_causal would align it with the first one.
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and T > 1)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.gelu = nn.GELU(approximate="tanh")  # the approximation GPT-2 was trained with
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, mask=None, cache=None):
        x = x + self.attn(self.ln_1(x), mask, cache)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019, section 2.3), its parameters named as in OpenAI's and Hugging Face's weights."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            ln_f=nn.LayerNorm(config.n_embd)))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.transformer.wte.weight
        self.init_weights()

    def init_weights(self):
        """Normal(0, 0.02), zero biases; projections into the residual stream, to which 2 * n_layer of them add,
        smaller by 1 / sqrt(2 * n_layer) so that its variance does not grow with depth (GPT-2 paper, section 2.3)."""
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.dim() == 2:
                residual = name.endswith("c_proj.weight")
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.n_layer) if residual else 0.02)
        with torch.no_grad():
            for table in {self.transformer.wte.weight, self.lm_head.weight}:
                table[self.config.n_vocab:] = 0  # padding: no gradient ever reaches it, so zero it stays

    def hidden(self, idx, positions=None, mask=None, cache=None):
        """Final hidden states (B, T, C) of the tokens idx (B, T).

        positions: (T,) or (B, T) ids, by default those that follow the cache. mask: bool, broadcastable to
        (B, 1, T, T), True where a token may look, by default causal. cache: one list per layer, filled with the
        keys and values of all tokens so far.
        """
        if positions is None:
            past = cache[0][0].size(2) if cache and cache[0] else 0
            if (end := past + idx.size(1)) > self.config.block_size:
                raise ValueError(f"{end} tokens are more than the context, block_size={self.config.block_size}")
            positions = torch.arange(past, end, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)  # (B, T, C)
        for i, block in enumerate(self.transformer.h):
            x = block(x, mask, cache[i] if cache else None)
        return self.transformer.ln_f(x)

    def head(self, x):
        """Logits (..., n_vocab) of hidden states (..., C). The matmul has the padded, faster width; the slice is
        a view, so padding costs nothing and can never be predicted."""
        return self.lm_head(x)[..., :self.config.n_vocab]

    def forward(self, idx, targets=None):
        """idx, targets: (B, T) int64. Returns logits (B, T, n_vocab) and the mean cross-entropy in nats, or None."""
        logits = self.head(self.hidden(idx))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Continue idx (B, T) by max_new_tokens sampled tokens; returns (B, T + max_new_tokens).

        temperature 0 takes the likeliest token; top_k keeps the k likeliest. Draws come from `generator` (of idx's
        device), so with one given, torch's global random state stays untouched. Beyond block_size the oldest tokens
        are dropped. Raises ValueError for an empty idx, a negative temperature or a top_k below 1.
        """
        if idx.dim() != 2 or idx.size(1) == 0:
            raise ValueError(f"idx must be (B, T) with T >= 1, not {tuple(idx.shape)}")
        if temperature < 0 or (top_k is not None and top_k < 1):
            raise ValueError(f"temperature must be >= 0 and top_k >= 1, not {temperature} and {top_k}")
        cache, fresh = [[] for _ in self.transformer.h], idx[:, -self.config.block_size:]
        for _ in range(max_new_tokens):
            logits = self.head(self.hidden(fresh, cache=cache)[:, -1]).float()  # (B, n_vocab)
            if temperature == 0:
                token = logits.argmax(-1, keepdim=True)
            else:
                logits /= temperature
                if top_k is not None:
                    kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                    logits[logits < kth] = -math.inf
                token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            idx = torch.cat((idx, token), dim=1)
            if cache[0][0].size(2) < self.config.block_size:
                fresh = token
            else:  # every position moves when the window slides, so what is cached no longer holds
                cache, fresh = [[] for _ in self.transformer.h], idx[:, -self.config.block_size:]
        return idx

    @classmethod
    def from_pretrained(cls, name):
        """The GPT-2 in a Hugging Face folder or on the hub (gpt2, gpt2-medium, ...), its vocabulary padded.

        Raises UserError where it can't be had, is not a GPT-2, or lacks tensors.
        """
        hf = read_hugging_face(name)
        c = hf.config
        model = cls(GPTConfig(c.n_positions, padded(c.vocab_size), c.n_layer, c.n_head, c.n_embd, c.vocab_size,
                              c.tie_word_embeddings))
        source = hf.state_dict()
        with torch.no_grad():
            for key, p in model.state_dict().items():
                w = source[key].t() if key.endswith(CONV1D) else source[key]
                p[:len(w)] = w  # only the embedding has more rows than the source: padding
        return model

    def save_pretrained(self, folder, encoding=None):
        """Write a Hugging Face folder: config.json, model.safetensors, generation_config.json, and with a tiktoken
        encoding its tokenizer. Files there are replaced once the new ones are whole. Needs `transformers`."""
        transformers, folder, part = quiet_transformers(), Path(folder), Path(f"{Path(folder)}.part")
        c, eot = self.config, self.config.n_vocab - 1  # <|endoftext|> is the last id of both encodings
        hf = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=c.n_vocab, n_positions=c.block_size, n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd,
            tie_word_embeddings=c.tied, bos_token_id=eot, eos_token_id=eot, pad_token_id=eot))
        if c.block_size <= 256:  # a pipeline's new tokens unless told otherwise: beyond the context it would crash
            hf.generation_config.max_length = c.block_size
        state = {k: w[:c.n_vocab] if k in ("transformer.wte.weight", "lm_head.weight") else w
                 for k, w in self.state_dict().items()}
        hf.load_state_dict({k: w.t().contiguous() if k.endswith(CONV1D) else w for k, w in state.items()})
        shutil.rmtree(part, ignore_errors=True)
        try:
            hf.save_pretrained(part, max_shard_size="50GB")  # one file
            if encoding:
                hugging_face_tokenizer(encoding, c.block_size).save_pretrained(part)
        except Exception as e:  # safetensors and tokenizers have errors of their own for a full disk
            raise (OSError(str(e)) if "os error" in str(e).lower() else e) from None
        folder.mkdir(parents=True, exist_ok=True)
        for file in part.iterdir():
            os.replace(file, folder / file.name)
        part.rmdir()

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, T):
        """Forward + backward FLOPs a token: 6 N + 12 * layers * width * context (PaLM, appendix B)."""
        c = self.config
        return 6 * (self.num_params() - self.transformer.wpe.weight.numel()) + 12 * c.n_layer * c.n_embd * T


# ---------------------------------------------------------------------------------------------- Hugging Face
def padded(n_vocab):
    return math.ceil(n_vocab / VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def quiet_transformers():
    """The module without its notices and progress bars; what goes wrong, our own errors say in a line."""
    import huggingface_hub
    import transformers
    huggingface_hub.utils.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def read_hugging_face(name):
    """transformers' GPT2LMHeadModel. Raises UserError for whatever is no whole GPT-2."""
    try:
        transformers = quiet_transformers()
        c = transformers.AutoConfig.from_pretrained(name)
        hf, info = None, {}
        if c.model_type == "gpt2":
            hf, info = transformers.GPT2LMHeadModel.from_pretrained(name, output_loading_info=True,
                                                                    ignore_mismatched_sizes=True)
    except Exception as e:  # there is no list of what a foreign or broken file, or a network, may set off in there
        reason = " ".join(f"{type(e).__name__} {e}".split())
        raise UserError(f'init_from="{name}" can\'t be loaded ({reason[:160]}): give a Hugging '
                        f"Face folder, go online (HF_ENDPOINT names a mirror), or --init_from=scratch.") from None
    for key, ours in (("model_type", "gpt2"), ("activation_function", "gelu_new"), ("layer_norm_epsilon", 1e-5),
                      ("n_inner", None), ("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        theirs = getattr(c, key)
        if theirs != ours and not (key == "n_inner" and theirs == 4 * c.n_embd):
            raise UserError(f"{name} is not a GPT-2: its config.json says {key}={theirs}, not {ours}.")
    wrong = [key[0] if isinstance(key, tuple) else key for key in info["mismatched_keys"]]
    for what, keys in (("of another shape than its config.json says", wrong), ("missing", info["missing_keys"])):
        if keys:
            more = f" and {len(keys) - 12} more" if len(keys) > 12 else ""
            raise UserError(f"{name} is not a whole GPT-2; {what}: {', '.join(sorted(keys)[:12])}{more}.")
    return hf


def hugging_face_tokenizer(encoding, context):
    """A tiktoken encoding as a transformers tokenizer with the same ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2TokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    letters = bytes_to_unicode()  # a printable character for each byte: how these files spell tokens
    ids = {"".join(letters[b] for b in encoding.decode_single_token_bytes(i)): i for i in range(encoding.eot_token)}
    # of all neighbours that make a token, tiktoken joins those that make the lowest id first
    merges = [(t[:i], t[i:]) for t in ids for i in range(1, len(t)) if t[:i] in ids and t[i:] in ids]
    tokenizer = Tokenizer(models.BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # its regex is GPT-2's
    tokenizer.decoder = decoders.ByteLevel()
    return GPT2TokenizerFast(tokenizer_object=tokenizer, model_max_length=context, clean_up_tokenization_spaces=False)


# ------------------------------------------------------------------------------------------------------ data
def get_encoding(name):
    """tiktoken's "gpt2", or "bytes": every byte a token, and <|endoftext|>. Raises UserError."""
    if name == "bytes":
        return tiktoken.Encoding(name="bytes", pat_str=r"(?s:.{1,128})",
                                 mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={"<|endoftext|>": 256})
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as e:  # requests' errors are OSErrors; a damaged download is a ValueError
        raise UserError(f"The GPT-2 vocabulary can't be had ({type(e).__name__}): go online once, point "
                        f"TIKTOKEN_CACHE_DIR at a folder that holds it, or train with --encoding=bytes.") from None


def shown(text):
    """Text that is safe to print: control characters, which could confuse a terminal, are escaped."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def load_text(path, encoding):
    """Token ids (N,) uint16 of a UTF-8 text file."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as e:
        raise UserError(f"{path} can't be read ({e.strerror}): point --data elsewhere.") from None
    except UnicodeDecodeError as e:
        raise UserError(f"{path} is not UTF-8 text (byte {e.start}): convert it, or point --data elsewhere.") from None
    return np.array(encoding.encode_ordinary(text), dtype=np.uint16)


def open_shard(path):
    """A shard memory-mapped, (N,) uint16. Raises UserError for a file that is none."""
    try:
        shard = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as e:  # a damaged header may set off anything in NumPy's parser
        raise UserError(f"{path} is not a whole .npy file ({type(e).__name__} {' '.join(str(e).split())[:100]}): delete it and run fineweb.py again.") from None
    if getattr(shard, "ndim", 0) != 1 or shard.dtype != np.uint16:
        raise UserError(f"{path} holds {getattr(shard, 'dtype', 'several')} {getattr(shard, 'shape', 'arrays')}, "
                        f"not one 1-D uint16 array: delete it and run fineweb.py again.")
    return shard


def check_ids(shard, n_vocab, name):
    if len(shard) and (worst := int(shard.max())) >= n_vocab:
        raise UserError(f"{name} holds token {worst}, but the encoding has {n_vocab}: "
                        f"it was made with another --encoding, or is damaged.")


class DataLoaderLite:
    """Rows of T tokens out of shards, in an order that is a pure function of (seed, row number).

    Each shard is cut into rows of T + 1 tokens, the last shared with the next row. Row numbers go on for ever:
    an epoch visits each row once, shuffled from (seed, epoch) or in file order. There is no state to save: any
    process can ask for any rows at any time.
    """

    def __init__(self, shards, T, seed=0, shuffle=False, n_vocab=2**16):
        """shards: paths of .npy files, or arrays of ids (N,); a shard is opened when its first row is asked for."""
        self.shards, self.T, self.seed, self.shuffle, self.n_vocab = shards, T, seed, shuffle, n_vocab
        self.names = [s.name if isinstance(s, Path) else f"text #{zlib.crc32(s):08x}" for s in shards]
        arrays = [self._array(i) for i in range(len(shards))]
        self.tokens = sum(len(a) for a in arrays)
        self.rows = np.array([max(0, len(a) - 1) // T for a in arrays])  # in each shard
        self.rows_per_epoch = int(self.rows.sum())
        for i, array in enumerate(arrays):
            check_ids(array[:IDS_CHECKED // len(shards)], n_vocab, self.names[i])
        crc = zlib.crc32(repr([(n, len(a), zlib.crc32(a[:IDS_IN_FINGERPRINT])) for n, a in zip(self.names, arrays)]).encode())
        self.fingerprint = f"{self.tokens:,} tokens in {len(shards)} file(s) #{crc:08x}"  # is it the same data?
        self._order = lru_cache(4)(self._permutation)  # of the epochs and the shards being read, no more:
        self._shard = lru_cache(2)(self._array)        # mappings and orders of all would add up

    def _array(self, i):
        return open_shard(self.shards[i]) if isinstance(self.shards[i], Path) else self.shards[i]

    def _permutation(self, n, *key):
        """The order of n shards, key (epoch,), or of the n rows of a shard, key (epoch, shard)."""
        # RandomState's stream is frozen by NumPy's policy, so the order outlives upgrades
        return np.random.RandomState((self.seed, *key)).permutation(n) if self.shuffle else np.arange(n)

    def _locate(self, row):
        """(epoch, shard, place in the shard's order) of a row number."""
        epoch, k = divmod(row, self.rows_per_epoch)
        order = self._order(len(self.rows), epoch)
        ends = self.rows[order].cumsum()
        i = int(ends.searchsorted(k, side="right"))
        return epoch, int(order[i]), k - int(ends[i] - self.rows[order[i]])

    def read(self, row, B):
        """The B rows from number `row` on, (B, T + 1) int64 (torch has no arithmetic for uint16)."""
        tokens = np.empty((B, self.T + 1), dtype=np.int64)
        filled = 0
        while filled < B:  # once for each shard that has some of these rows
            epoch, i, place = self._locate(row + filled)
            shard, rows = self._shard(i), self._order(self.rows[i], epoch, i)[place:place + B - filled]
            for b, r in enumerate(rows, start=filled):
                tokens[b] = shard[r * self.T:(r + 1) * self.T + 1]
            filled += len(rows)
            check_ids(tokens[filled - len(rows):filled], self.n_vocab, self.names[i])
        return tokens

    def batch(self, row, B, device=torch.device("cpu")):
        """The same rows on a device as inputs x and targets y, both (B, T) int64."""
        tokens = torch.from_numpy(self.read(row, B))
        if device.type == "cuda":  # from pinned memory the copy does not hold up the host
            tokens = tokens.pin_memory().to(device, non_blocking=True)
        else:
            tokens = tokens.to(device)
        return tokens[:, :-1], tokens[:, 1:]


def open_data(cfg, encoding):
    """Loaders of training and validation rows. Raises UserError with what is wrong with the data."""
    path = Path(cfg.data)
    if path.is_dir():
        train, val = (sorted(path.glob(f"*_{split}_*.npy")) for split in ("train", "val"))
        if not train or not val:
            raise UserError(f"{path}/ holds no shards named *_{'val' if train else 'train'}_*.npy: "
                            f"make some with fineweb.py --local_dir={path}, or point --data elsewhere.")
    elif path.is_file():
        tokens = load_text(path, encoding)
        cut = int(len(tokens) * (1 - VAL_FRACTION))
        train, val = [tokens[:cut]], [tokens[cut:]]
    else:
        raise UserError(f"There is no data at {path}: run fineweb.py, or point --data at a folder of shards "
                        f"or at a text file.")
    train = DataLoaderLite(train, cfg.T, cfg.seed, cfg.shuffle, encoding.n_vocab)
    val = DataLoaderLite(val, cfg.T, n_vocab=encoding.n_vocab)
    for split, loader, wanted in (("training", train, cfg.total_batch_size // cfg.T), ("validation", val, 1)):
        if loader.rows_per_epoch < wanted:
            raise UserError(f"{path} has {loader.rows_per_epoch} {split} rows of T={cfg.T} tokens, fewer than the "
                            f"{wanted} needed at once: lower --T or --total_batch_size, or give more text.")
    if cfg.val_tokens < cfg.T:
        raise UserError(f"val_tokens={cfg.val_tokens} is less than one row of T={cfg.T} tokens: raise --val_tokens.")
    return train, val


# --------------------------------------------------------------------------------------------------- machine
Place = namedtuple("Place", "rank local_rank world device")  # this process among all, and what it computes on


def say(place, *words):
    """Print from rank 0. A full disk or a closed pipe behind stdout is no reason for a run to die."""
    if place.rank == 0:
        with contextlib.suppress(OSError, ValueError):
            print(*words, flush=True)


def pick_device(name, local_rank):
    """torch.device for the constant `device`; "auto" takes this process's GPU, else MPS, else the CPU."""
    if name == "auto":
        mps = torch.backends.mps.is_available() and "RANK" not in os.environ  # gloo can't add up MPS tensors
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", local_rank)
        torch.empty(1, device=device)  # is it really there?
        if device.type == "cuda":
            torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as e:  # torch built without CUDA says so by AssertionError
        reason = str(e).splitlines()[0]
        raise UserError(f'device="{name}" can\'t be used here ({reason}): take --device=auto or --device=cpu.') from None
    return device


def join_processes(cfg):
    """Take this process's place among those torchrun started (RANK, LOCAL_RANK, WORLD_SIZE); alone without it."""
    rank, local_rank, world = (int(os.environ.get(k, d)) for k, d in
                               (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
    device = pick_device(cfg.device, local_rank)
    if device.type == "cpu":
        hellaswag.keep_freed_memory()
    if "RANK" in os.environ:
        # Imported later, by DDP, its functions' defaults (group=WORLD) would hold the group beyond its end, and gloo's
        # threads, still alive at the interpreter's exit, now and then abort the process.
        from torch.distributed import nn as _  # noqa: F401
        # torchrun's store outlives a restart: without a prefix, workers would look for their dead forerunners' addresses
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), next(dist.rendezvous("env://"))[0])
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=world,
                                device_id=device if device.type == "cuda" else None)
    return Place(rank, local_rank, world, device)


def agree(place, fn, *args):
    """fn(*args) on every process; if it raises UserError on one, all raise it, so that none waits for the others."""
    result, error = None, None
    try:
        result = fn(*args)
    except UserError as e:
        error = str(e)
    errors = [error]
    if place.world > 1:
        errors = [None] * place.world
        dist.all_gather_object(errors, error)
    for error in filter(None, errors):
        raise UserError(error, agreed=True)
    return result


def from_rank0(place, value):
    """Rank 0's value, on every rank."""
    box = [value]
    if place.world > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def block_seconds(gpt_config, dtype, rows, T):
    """Seconds a CPU needs for one block, forward and backward, on (rows, T) tokens; the best of five."""
    block, x = Block(gpt_config), torch.randn(rows, T, gpt_config.n_embd)

    def once():
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            block(x).sum().backward()
    return min(timeit.repeat(once, number=1, repeat=5))


def pick_dtype(cfg, gpt_config, device, saved):
    """(dtype of the matmuls, the reason in words) for the constant `dtype`."""
    if cfg.dtype != "auto":
        return getattr(torch, cfg.dtype), "as asked"
    if saved and saved["device"] == device.type == "cpu":  # a measurement made anew might decide otherwise
        return getattr(torch, saved["dtype"]), "as this run began"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        # is_bf16_supported() says yes to emulation too; the hardware has it from Ampere, 8.0, on
        if major >= 8:
            return torch.bfloat16, f"compute capability {major}.{minor} has it in hardware"
        if cfg.optimizer == "muon":
            return torch.float32, f"compute capability {major}.{minor} has no bfloat16, and Muon no loss scaling"
        return torch.float16, f"with loss scaling; compute capability {major}.{minor} has no bfloat16"
    if device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        with torch.random.fork_rng(devices=[]):
            rows = max(1, min(cfg.B, 2048 // cfg.T))
            slow, fast = (block_seconds(gpt_config, d, rows, cfg.T) for d in (torch.float32, torch.bfloat16))
        if fast < 0.8 * slow:  # well beyond noise, so that the next start decides the same
            return torch.bfloat16, f"measured {slow / fast:.1f}x as fast as float32 on this CPU"
        return torch.float32, f"bfloat16 measured only {slow / fast:.1f}x as fast on this CPU"
    return torch.float32, "no bfloat16 in this CPU's hardware" if device.type == "cpu" else "the only one tried there"


def pick_compile(choice, device):
    """(whether to torch.compile, the reason in words) for the constant `compile`."""
    if choice == "False" or (choice == "auto" and device.type != "cuda"):
        return False, "as asked" if choice == "False" else "auto compiles on CUDA only"
    try:  # the real thing on a toy: finds missing compilers, missing Triton and GPUs too old for it
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
        return True, "the first step takes a minute longer"
    except Exception as e:  # whatever goes wrong in there, the reason is told and training can do without
        reason = f"torch.compile does not work here ({str(e).strip().splitlines()[0][:100]})"
        if choice == "auto":
            return False, reason
        raise UserError(f"{reason}: install a C++ compiler (and Triton for CUDA), or take --compile=False.") from None


# ------------------------------------------------------------------------------------ optimizer and schedule
def get_lr(step, cfg):
    """Learning rate of a step: linear warmup to max_lr, then down to min_lr at max_steps."""
    if step < cfg.warmup_steps:
        return cfg.max_lr * (step + 1) / cfg.warmup_steps
    progress = min(1.0, (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps))
    remaining = 1 - progress if cfg.lr_shape == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return cfg.min_lr + (cfg.max_lr - cfg.min_lr) * remaining


def newton_schulz_fp32(grad, coefficients, steps, eps):
    """What torch.optim.Muon does to a gradient (Jordan 2024), in float32: push its singular values towards 1.

    torch computes this in bfloat16, which CPUs without AVX512-BF16 emulate (100 times slower, measured) and which
    turns the last bit of a gradient, different for another number of processes, into one 1/256 of a weight's step.
    Each step multiplies X by P = a I + b A + c A^2, where A = X X^T (X^T X if X is tall). P is symmetric, so the next
    A is P A P: all happens on the shorter side's square, and X, up to four times as long, is met only at the two ends.
    Good for Muon's 5 steps: each makes A's rounding errors 12 times as large, and from 7 on they take over.
    """
    a, b, c = coefficients
    X = grad / grad.norm().clamp(min=eps)
    tall = X.size(0) > X.size(1)
    A = X.T @ X if tall else X @ X.T
    for step in range(steps):
        A = P @ A @ P if step else A
        P = torch.mm(A, A).mul_(c).add_(A, alpha=b)
        P.diagonal().add_(a)
        product = P @ product if step else P
    return X @ product if tall else product @ X


def configure_optimizers(model, cfg, device):
    """The optimizers of a training: [AdamW], or [AdamW, Muon] where Muon has the blocks' matrices."""
    blocks = set(model.transformer.h.parameters()) if cfg.optimizer == "muon" else set()
    matrices = [p for p in model.parameters() if p.dim() >= 2 and p in blocks]
    decayed = [p for p in model.parameters() if p.dim() >= 2 and p not in blocks]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [dict(params=decayed, weight_decay=cfg.weight_decay), dict(params=plain, weight_decay=0.0)]
    optimizers = [torch.optim.AdamW(groups, lr=cfg.max_lr, betas=ADAM_BETAS, eps=ADAM_EPS, fused=True)]
    if matrices:
        if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 8:  # see above; there's no other way in
            torch.optim._muon._zeropower_via_newtonschulz = newton_schulz_fp32
        optimizers.append(torch.optim.Muon(matrices, lr=cfg.max_lr, weight_decay=cfg.weight_decay,
                                           adjust_lr_fn="match_rms_adamw"))
    return optimizers


# ------------------------------------------------------------------------------------------------ evaluation
def total_over_ranks(place, *values):
    """Sums of numbers (or 0-d tensors) over all processes, as Python floats; one device synchronisation."""
    totals = torch.stack([v.float() if torch.is_tensor(v) else torch.full((), float(v), device=place.device)
                          for v in values])  # full() fills on the device; a copy from the host would wait for it
    if place.world > 1:
        dist.all_reduce(totals)  # SUM: gloo has no AVG
    return totals.tolist()


@torch.no_grad()
def validation_loss(model, loader, cfg, place, autocast):
    """Mean loss, nats a token, over the first val_tokens tokens; the same for any B and number of processes."""
    rows = min(cfg.val_tokens // cfg.T, loader.rows_per_epoch)
    total = torch.zeros((), device=place.device)
    for row in range(place.rank * cfg.B, rows, place.world * cfg.B):
        B = min(cfg.B, rows - row)
        forward = model if B == cfg.B else model.forward  # a ragged last batch is not worth compiling for
        with autocast():
            total += forward(*loader.batch(row, B, place.device))[1] * B
    return total_over_ranks(place, total)[0] / rows


def load_hellaswag(cfg, place, model):
    """HellaSwag's questions ready to be scored, read by one process for all; None, with the reason said, if off."""
    if not cfg.hellaswag_every:
        return None
    examples, off = None, None if cfg.encoding == "gpt2" else f"its questions need encoding=gpt2, not {cfg.encoding}"
    if place.rank == 0 and not off:
        try:
            examples = list(hellaswag.iterate_examples("val"))
        except hellaswag.HellaSwagError as e:
            off = str(e)
    if off:
        say(place, f"{'HellaSwag':<10} off: {off}")
    examples = from_rank0(place, examples)
    return hellaswag.prepare(examples, model) if examples else None


@torch.no_grad()
def print_samples(run):
    """One sample from each process, printed whole and in order by rank 0.

    Each draws from a generator of its own: training's random state is as if no sample had been taken.
    """
    cfg, place, encoding = run.cfg, run.place, run.encoding
    generator = torch.Generator(device=place.device).manual_seed(hash((cfg.seed, run.state.step, place.rank)) % 2**63)
    prompt = encoding.encode_ordinary(cfg.sample_prompt) or [encoding.eot_token]
    with run.autocast():
        tokens = run.state.model.generate(torch.tensor([prompt], device=place.device), cfg.sample_tokens, top_k=TOP_K,
                                          generator=generator)[0].tolist()
    texts = [shown(encoding.decode_bytes(tokens).decode("utf-8", errors="backslashreplace"))]
    if place.world > 1:
        texts *= place.world
        dist.all_gather_object(texts, texts[place.rank])
    for rank, text in enumerate(texts):
        say(place, f"--- sample of rank {rank} at step {run.state.step} ---\n{text}\n---")


# ----------------------------------------------------------------------------------------------- checkpoints
@dataclass
class State:
    """All that the steps to come depend on, besides the constants and the data."""
    model: GPT
    optimizers: list
    scaler: torch.amp.GradScaler
    step: int = 0                    # optimizer steps done
    best_val: float = math.inf
    last_val: float = math.inf


class Damaged(Exception):
    """A file that is not a whole checkpoint of ours; its text is the reason."""


def write_whole(path, write):
    """write(file) under a temporary name, flushed to the disk, then renamed: path is all there or as it was."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def weights(state, cfg):
    """What a .pt of ours holds at the least: plain tensors and plain values, for torch.load(weights_only=True)."""
    return {"step": state.step, "model": state.model.state_dict(), "gpt_config": asdict(state.model.config),
            "encoding": cfg.encoding, "best_val": state.best_val, "last_val": state.last_val,
            "constants": asdict(cfg), "versions": versions()}


def save_checkpoint(run):
    """Write checkpoint_<step>.pt and delete those beyond the newest CHECKPOINTS_KEPT. Raises OSError, RuntimeError."""
    state = run.state
    content = weights(state, run.cfg) | {
        "optimizers": [o.state_dict() for o in state.optimizers], "scaler": state.scaler.state_dict(),
        "fingerprint": run.train_loader.fingerprint, "dtype": run.dtype, "device": run.place.device.type}
    path = Path(run.cfg.log_dir, f"checkpoint_{state.step:05d}.pt")
    write_whole(path, lambda f: torch.save(content, f))
    for old in checkpoints(path.parent, state.step)[CHECKPOINTS_KEPT:]:
        old.unlink()
    return path


def checkpoints(log_dir, last=math.inf):
    """Paths of the checkpoints up to step `last`, the newest first."""
    steps = {int(p.stem[11:]): p for p in log_dir.glob("checkpoint_*.pt") if p.stem[11:].isdecimal()}
    return [steps[step] for step in sorted(steps, reverse=True) if step <= last]


def unpickled(path):
    """What torch.save() wrote, unverified: tensors memory-mapped, on the CPU wherever they were, and no code run."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def read_checkpoint(path):
    """The content of a .pt of ours, memory-mapped. Raises Damaged; never runs code that the file may hold."""
    try:
        with zipfile.ZipFile(path) as z:  # torch's format is a zip; torch itself skips the checksums in it
            if bad := z.testzip():
                raise ValueError(f"wrong checksum of {bad}")
        content = dict(unpickled(path))
        GPTConfig(**content["gpt_config"]), content["model"], content["encoding"]
    except Exception as e:  # there is no list of what a foreign or broken file may set off in zipfile and torch
        raise Damaged(" ".join(f"{type(e).__name__} {e}".split())[:120]) from None
    return content


def newest_checkpoint(log_dir):
    """Path of the newest good checkpoint, or None where there is none; names the damaged ones. Raises UserError."""
    paths = checkpoints(log_dir)
    for path in paths:
        try:
            if "optimizers" in read_checkpoint(path):
                return path
            raise Damaged("weights alone")
        except Damaged as e:
            print(f"{path} is damaged ({e}): trying the one before it", flush=True)
    if paths:
        raise UserError(f"No checkpoint in {log_dir}/ is whole: put a good one there, or start anew with --resume=False.")
    return None


def load_checkpoint(path, cfg, fingerprint):
    """The content of the checkpoint to go on from. Raises UserError if the constants now make another training."""
    try:
        saved = unpickled(path)  # rank 0 has verified it
    except OSError:
        raise UserError(f"{path} is not to be seen from every machine: log_dir must be on a disk they share.") from None
    was, now = saved["constants"] | {"data": saved["fingerprint"]}, asdict(cfg) | {"data": fingerprint}
    if changed := [f"{k} was {was[k]!r}, is {now[k]!r}" for k in now.keys() & was.keys() - FREE_TO_CHANGE
                   if was[k] != now[k]]:
        raise UserError(f"The run in {cfg.log_dir}/ was made with other constants: {'; '.join(sorted(changed))}. Put them "
                        f"back, or take another --log_dir, or set that run aside with --resume=False.")
    return saved


def set_aside(log_dir):
    """Move an earlier run's results into log_dir/before_<n>/: nothing is ever overwritten."""
    results = [p for pattern in RESULTS for p in log_dir.glob(pattern)]
    if results:
        aside = next(p for n in range(1, 10**9) if not (p := log_dir / f"before_{n}").exists())
        aside.mkdir()
        for p in results:
            p.rename(aside / p.name)
        print(f"the earlier results in {log_dir}/ are now in {aside}/", flush=True)


@contextlib.contextmanager
def writing(log_dir):
    """Around what writes to log_dir before training: an OSError in there becomes a UserError."""
    try:
        yield
    except OSError as e:
        raise UserError(f"log_dir={log_dir} can't be written ({e.strerror}): make it so, or take another.") from None


def prepare_log_dir(place, cfg):
    """Take log_dir for this run. Returns (its lock, the checkpoint to go on from or None). Raises UserError."""
    if place.rank != 0:
        return None, None
    from filelock import FileLock, Timeout  # comes with torch
    log_dir = Path(cfg.log_dir)
    resume = cfg.resume or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # torchrun after a crash
    with writing(log_dir):
        log_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(log_dir / ".lock")
        try:
            lock.acquire(timeout=0)  # the system frees it when this process ends, however it ends
        except Timeout:
            raise UserError(f"Another run is at work in {log_dir}/: wait for its end, or take another --log_dir.") from None
        for part in log_dir.glob("*.pt.part"):  # of saves that a kill cut short
            part.unlink()
        path = newest_checkpoint(log_dir) if resume else None
    if path and cfg.data != QUICK_START["data"] == unpickled(path)["constants"]["data"]:
        path = None  # the quick start is over: open_log sets it aside for the real thing
    return lock, path


def restore(state, saved):
    """Load a checkpoint's content into the optimizers and counters; the model was built from it."""
    for optimizer, content in zip(state.optimizers, saved["optimizers"]):
        optimizer.load_state_dict(copy.deepcopy(content))  # else it would live in the checkpoint's mapping
    if saved["scaler"] and state.scaler.is_enabled():
        state.scaler.load_state_dict(saved["scaler"])
    state.step, state.best_val, state.last_val = saved["step"], saved["best_val"], saved["last_val"]


def from_weights(content):
    """The GPT in a .pt of ours, read_checkpoint's result."""
    model = GPT(GPTConfig(**content["gpt_config"]))
    model.load_state_dict(content["model"])
    return model


def export(pt, folder):
    """A .pt of ours to a Hugging Face folder: python -c "import train_gpt2 as t; t.export('log/model_19073.pt', 'hf')" """
    content, encoding = read_checkpoint(pt), None
    try:
        encoding = get_encoding(content["encoding"])
    except UserError as e:
        print(f"exporting without a tokenizer. {e}")
    from_weights(content).save_pretrained(folder, encoding)


def build_model(cfg, encoding, saved):
    """The model to train: a checkpoint's, from scratch, Hugging Face's or a .pt's. Raises UserError."""
    torch.manual_seed(cfg.seed)
    if saved:
        model = from_weights(saved)
    elif cfg.init_from == "scratch":
        model = GPT(GPTConfig(cfg.T, padded(encoding.n_vocab), cfg.n_layer, cfg.n_head, cfg.n_embd, encoding.n_vocab))
    elif cfg.init_from.endswith(".pt"):
        try:
            model = from_weights(read_checkpoint(cfg.init_from))
        except (Damaged, RuntimeError) as e:  # RuntimeError: its tensors do not fit its own gpt_config
            raise UserError(f"init_from={cfg.init_from} is no whole .pt of ours ({' '.join(str(e).split())[:160]}).") from None
    else:
        model = GPT.from_pretrained(cfg.init_from)
    if model.config.n_vocab != encoding.n_vocab:
        raise UserError(f"init_from={cfg.init_from} has a vocabulary of {model.config.n_vocab}, encoding={cfg.encoding} "
                        f"one of {encoding.n_vocab}: they must match.")
    if cfg.T > model.config.block_size:
        raise UserError(f"T={cfg.T} is above the model's context, block_size={model.config.block_size}: lower --T.")
    return model


# ------------------------------------------------------------------------------------------------------- log
class Log:
    """log.txt: one "<step> <stream> <value>" a line, there as soon as written. Lines that a full disk refuses
    wait in memory and are written when there is room again."""

    def __init__(self, path, step):
        """Open path, cut back to the lines before `step`; a line that a kill cut short goes too."""
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if re.fullmatch(rb"\d+ \w+ \S+\n", line) and int(line.split()[0]) < step]
        write_whole(path, lambda f: f.writelines(kept))
        self.file = open(path, "ab", buffering=0)
        self.pending = b""

    def write(self, step, stream, value):
        self.pending += f"{step} {stream} {value:.6f}\n".encode()
        with contextlib.suppress(OSError):
            self.pending = self.pending[self.file.write(self.pending):]

    def sync(self):
        """Have every line on the disk, or raise OSError: a checkpoint must not outlive the lines before it."""
        while self.pending:
            self.pending = self.pending[self.file.write(self.pending):]
        os.fsync(self.file.fileno())


def versions():
    return {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__,
            "tiktoken": tiktoken.__version__}


def git_commit():
    """The commit this file is checked out at, "-dirty" behind it if files were changed since; None outside git."""
    try:
        return subprocess.run(["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
                              capture_output=True, text=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def open_log(cfg, place, head, step):
    """On rank 0: note this start of the run in run.json and open log.txt. Raises UserError."""
    if place.rank != 0:
        return None
    path, starts = Path(cfg.log_dir, "run.json"), []
    with contextlib.suppress(OSError, ValueError, KeyError):
        starts = json.loads(path.read_text())["starts"] if step else []
    starts.append({"time": time.strftime("%Y-%m-%d %H:%M:%S %z"), "step": step, "command": sys.argv,
                   "processes": place.world, "commit": git_commit(), "versions": versions(), "said": head})
    text = json.dumps({"constants": asdict(cfg), "starts": starts}, indent=2)
    with writing(cfg.log_dir):
        if step == 0 and (not cfg.resume or list(path.parent.glob("*.pt"))):
            set_aside(path.parent)
        write_whole(path, lambda f: f.write(text.encode()))
        return Log(Path(cfg.log_dir, "log.txt"), step)


def draw_curves(cfg):
    """log_dir/curves.png from log.txt: losses and HellaSwag against tokens. Needs matplotlib."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state
    streams = {"train": [], "val": [], "hella": []}
    for step, stream, value in re.findall(r"^(\d+) (\w+) (\S+)\n", Path(cfg.log_dir, "log.txt").read_text(), re.M):
        streams[stream].append((int(step) * cfg.total_batch_size / 1e6, float(value)))
    hella, gpt2 = int(len(streams["hella"]) > 0), cfg.encoding == "gpt2"  # other encodings' losses do not compare
    figure = Figure(figsize=(6 + 6 * hella, 4.5), layout="constrained")
    panels = figure.subplots(1, 1 + hella, squeeze=False)[0]
    for panel, stream, label, style in ((0, "train", "train loss", dict(alpha=0.4)), (0, "val", "val loss", dict(marker="o")),
                                        (hella, "hella", "HellaSwag", dict(marker="o"))):
        if points := streams[stream]:
            panels[panel].plot(*zip(*points), label=f"{label}, now {points[-1][1]:.3f}", ms=3, **style)
    for panel, value, label, drawn in ((0, GPT2_124M["val"], "GPT-2 124M, val", gpt2), (1, GPT2_124M["hella"], "GPT-2 124M",
                                       hella), (1, GPT3_124M_HELLA, "GPT-3 124M", hella)):
        if drawn:
            panels[panel].axhline(value, ls="--" if "GPT-2" in label else ":", c="gray", label=f"{label}: {value}")
    panels[0].set(title="Loss", ylabel="nats per token")
    if hella:
        panels[1].set(title="HellaSwag", ylabel="acc_norm (chance is 0.25)")
    for panel in panels:
        panel.set(xlabel="tokens seen (millions)", xlim=(0, None))
        panel.grid(alpha=0.3)
        panel.legend(*panel.get_legend_handles_labels())  # given, an empty list is no warning
    write_whole(Path(cfg.log_dir, "curves.png"), lambda f: figure.savefig(f, dpi=100))


# -------------------------------------------------------------------------------------------------- training
def duration(seconds):
    """Seconds as people say them: "1d02h", "2m05s", "9s"."""
    m, s = divmod(int(seconds), 60)
    h, m = divmod(m, 60)
    d, h = divmod(h, 24)
    return f"{d}d{h:02d}h" if d else f"{h}h{m:02d}m" if h else f"{m}m{s:02d}s" if m else f"{s}s"


def peak_flops(device):
    """Dense 16-bit peak of this GPU in FLOP/s from the vendors' data sheets, or None."""
    words = set(re.split(r"[\s-]+", torch.cuda.get_device_name(device))) if device.type == "cuda" else set()
    return next((tflops * 1e12 for key, tflops in PEAK_TFLOPS.items() if set(key.split()) <= words), None)


def check_constants(cfg, world):
    """Raises UserError for constants that make no sense, naming those and a way out."""
    for name, choices in CHOICES.items():
        if getattr(cfg, name) not in choices:
            raise UserError(f'{name}="{getattr(cfg, name)}" is not known: take one of {", ".join(choices)}.')
    for name in ("B", "T", "total_batch_size", "n_layer", "n_head", "n_embd", "max_steps", "val_tokens"):
        if getattr(cfg, name) < 1:
            raise UserError(f"{name}={getattr(cfg, name)} must be at least 1.")
    if not 0 <= cfg.seed < 2**32:
        raise UserError(f"seed={cfg.seed} must be from 0 to {2**32 - 1}.")
    if (cfg.optimizer, cfg.dtype) == ("muon", "float16"):
        raise UserError('optimizer="muon" has no loss scaling, which dtype="float16" needs: take another of the two.')
    per_pass = cfg.B * cfg.T * world
    if cfg.total_batch_size % per_pass:
        near, B = max(1, round(cfg.total_batch_size / per_pass)) * per_pass, smaller_B(cfg, world)
        raise UserError(f"total_batch_size={cfg.total_batch_size} is not a multiple of B * T * processes = {cfg.B} * "
                        f"{cfg.T} * {world} = {per_pass}; the nearest that is: --total_batch_size={near}"
                        + (f", or keep it with --B={B}." if B else "."))


def smaller_B(cfg, world):
    """The largest B below the constant's with which total_batch_size divides, so that it is the same training."""
    return next((B for B in range(cfg.B - 1, 0, -1) if cfg.total_batch_size % (B * cfg.T * world) == 0), None)


def micro_steps(cfg, world):
    """Forward and backward passes per process and optimizer step (gradient accumulation)."""
    return cfg.total_batch_size // (cfg.B * cfg.T * world)


Run = namedtuple("Run", "cfg place encoding train_loader val_loader state model autocast dtype hella log lock")


def set_up(cfg, place):
    """Check everything that can be wrong, then build all that a run needs; None if the run is finished already."""
    agree(place, check_constants, cfg, place.world)
    encoding = agree(place, get_encoding, cfg.encoding)
    train_loader, val_loader = agree(place, open_data, cfg, encoding)
    lock, path = agree(place, prepare_log_dir, place, cfg)
    path = from_rank0(place, path)
    saved = agree(place, load_checkpoint, path, cfg, train_loader.fingerprint) if path else None
    if saved and saved["step"] >= cfg.max_steps:
        say(place, f"The run in {cfg.log_dir}/ is finished: {saved['step']} steps, last val loss {saved['last_val']:.4f}. "
                   f"For another take a new --log_dir, or set this one aside with --resume=False.")
        return None
    raw = agree(place, build_model, cfg, encoding, saved).to(place.device)
    dtype, dtype_reason = from_rank0(place, pick_dtype(cfg, raw.config, place.device, saved))
    compiled, compile_reason = agree(place, pick_compile, cfg.compile, place.device)
    if place.device.type == "cuda":
        warnings.filterwarnings("ignore", message="Please use the new API settings to control TF32")  # inductor's is the old
        torch.set_float32_matmul_precision("high")  # TF32 for whatever stays in float32
    state = State(raw, configure_optimizers(raw, cfg, place.device),
                  torch.amp.GradScaler(place.device.type, enabled=dtype == torch.float16))
    if saved:
        restore(state, saved)
    if compiled:
        raw.compile()  # from here on raw(x) runs compiled; raw.forward(x), .hidden and .generate do not
    head = describe(cfg, place, raw, train_loader, val_loader) | {
        "dtype": f"{str(dtype)[6:]}: {dtype_reason}", "compile": f"{'on' if compiled else 'off'}: {compile_reason}",
        "log": f"{cfg.log_dir}/log.txt" + (f", going on from {path}" if saved else "")}
    for key, text in head.items():
        say(place, f"{key:<10} {text}")
    log = agree(place, open_log, cfg, place, head, state.step)
    return Run(cfg, place, encoding, train_loader, val_loader, state, wrap_ddp(raw, cfg, place),
               partial(torch.autocast, place.device.type, dtype, enabled=dtype != torch.float32),
               str(dtype)[6:], load_hellaswag(cfg, place, raw), log, lock)


def describe(cfg, place, model, train_loader, val_loader):
    """What the first lines on stdout say about a run, {heading: text}."""
    def count(n, word):
        return f"{n:,} {word}{'' if n == 1 else 'es' if word.endswith('s') else 's'}"
    device, c = place.device, model.config
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else count(torch.get_num_threads(), "thread")
    tokens = cfg.max_steps * cfg.total_batch_size
    return {
        "versions": ", ".join(f"{k} {v}" for k, v in versions().items()),
        "data": f"{cfg.data}: {train_loader.tokens:,} tokens to train on, {val_loader.tokens:,} to validate",
        "model": f"{model.num_params():,} parameters: {count(c.n_layer, 'layer')}, {count(c.n_head, 'head')}, "
                 f"{c.n_embd} wide, context {c.block_size}, vocabulary {c.n_vocab:,}",
        "batch": f"{cfg.total_batch_size:,} tokens = {count(cfg.B, 'row')} x {cfg.T} tokens x "
                 f"{count(place.world, 'process')} x {count(micro_steps(cfg, place.world), 'accumulation step')}",
        "training": f"{count(cfg.max_steps, 'step')} of {cfg.optimizer}: {tokens / 1e6:,.1f} M tokens, "
                    f"{tokens / cfg.T / train_loader.rows_per_epoch:.2f} epochs",
        "device": f"{device.type} ({chip})"}


def wrap_ddp(raw, cfg, place):
    """raw under DistributedDataParallel, which averages gradients over processes while backward still runs."""
    if place.world == 1:
        return raw
    model = DDP(raw, device_ids=[place.device.index] if place.device.type == "cuda" else None,
                gradient_as_bucket_view=True)
    if cfg.grad_comm == "bfloat16":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        # by way of a lambda: under its own name DDP refuses the hook with gloo, which can do it
        model.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
    return model


def train_step(run, signals=()):
    """One optimizer step on total_batch_size tokens.

    Returns (mean loss, gradient norm before clipping, how many signals all processes got).
    """
    cfg, place, state, model = run.cfg, run.place, run.state, run.model
    passes = micro_steps(cfg, place.world)
    loss_sum = torch.zeros((), device=place.device)
    for micro in range(passes):
        row = state.step * (cfg.total_batch_size // cfg.T) + (micro * place.world + place.rank) * cfg.B
        x, y = run.train_loader.batch(row, cfg.B, place.device)
        # Gradients travel with the last backward only; DDP decides that in forward, so no_sync holds both.
        alone = isinstance(model, DDP) and micro < passes - 1
        with model.no_sync() if alone else contextlib.nullcontext():
            with run.autocast():
                loss = model(x, y)[1]
            state.scaler.scale(loss / passes).backward()
        loss_sum += loss.detach()
    for optimizer in state.optimizers:
        state.scaler.unscale_(optimizer)
        for group in optimizer.param_groups:
            group["lr"] = get_lr(state.step, cfg) * (cfg.muon_lr_ratio if isinstance(optimizer, torch.optim.Muon) else 1)
    norm = nn.utils.clip_grad_norm_(state.model.parameters(), cfg.grad_clip or math.inf)
    for optimizer in state.optimizers:
        state.scaler.step(optimizer)
        optimizer.zero_grad()
    state.scaler.update()
    loss, norm, stops = total_over_ranks(place, loss_sum / passes, norm, len(signals))  # the one wait for the GPU
    return loss / place.world, norm / place.world, int(stops)


def due(every, run):
    return every > 0 and (run.state.step % every == 0 or run.state.step == run.cfg.max_steps)


def report(run, stream, value, text):
    """A line in log.txt for notebooks and a richer one on stdout for people."""
    if run.log:
        run.log.write(run.state.step, stream, value)
    say(run.place, f"{run.state.step:5d}/{run.cfg.max_steps} {text}")


def look(run):
    """Validation, HellaSwag, samples and the picture, where they are due."""
    cfg, state = run.cfg, run.state
    if due(cfg.eval_every, run):
        state.last_val = validation_loss(state.model, run.val_loader, cfg, run.place, run.autocast)
        state.best_val = min(state.best_val, state.last_val)
        report(run, "val", state.last_val, f"val loss {state.last_val:.4f} (best {state.best_val:.4f})")
    if run.hella and due(cfg.hellaswag_every, run):
        with run.autocast():
            score = hellaswag.evaluate(state.model, run.hella)
        report(run, "hella", score.acc_norm, f"HellaSwag acc_norm {score.acc_norm:.4f}, {score.total:,} questions")
    if due(cfg.sample_every, run) and (state.step or cfg.init_from != "scratch"):  # before any training: noise
        print_samples(run)
    if run.log and (due(cfg.eval_every, run) or due(cfg.hellaswag_every, run)):
        try:
            draw_curves(cfg)
        except ImportError:
            pass
        except Exception as e:  # a picture, by an optional package, is never the reason a run dies
            say(run.place, f"no curves.png this time: {type(e).__name__} {e}")


def save(run, leaving=False):
    """Checkpoint, and where due the weights to keep and the export. A full disk costs a loud line and not the run,
    unless it is leaving: then UserError."""
    cfg, state, start = run.cfg, run.state, time.perf_counter()
    last = state.step == cfg.max_steps
    try:
        run.log.sync()
        if last or due(cfg.milestone_every, run):
            write_whole(Path(cfg.log_dir, f"model_{state.step:05d}.pt"), lambda f: torch.save(weights(state, cfg), f))
        if last:
            export_at_end(run)
        path = save_checkpoint(run)  # after all else: a kill before it makes the next start do all of it again
        say(run.place, f"{state.step:5d}/{cfg.max_steps} saved {path} in {time.perf_counter() - start:.1f} s")
    except (OSError, RuntimeError) as e:  # torch's writer makes a RuntimeError of a full disk
        cause = e if isinstance(e, OSError) else e.__context__ or e
        reason = f"{cfg.log_dir}/ could not be written at step {state.step} ({' '.join(str(cause).split())[:100]})"
        if last or leaving:
            raise UserError(f"{reason}: make room and start the same command again; it goes on from the last save.") from None
        say(run.place, f"!!! NOT SAVED: {reason}. The last checkpoint stands; make room before the next one.")


def export_at_end(run):
    """log_dir/hf, the model for transformers; without that package, a line says how to make it elsewhere."""
    folder = Path(run.cfg.log_dir, "hf")
    try:
        run.state.model.save_pretrained(folder, run.encoding)
        say(run.place, f"exported to {folder}/, for transformers' AutoModelForCausalLM.from_pretrained")
    except OSError:  # a full disk: save() says so, and the next start does it again
        raise
    except Exception as e:  # an optional package is never the reason that a run can't end
        say(run.place, f"not exported ({type(e).__name__} {e}): see export() in train_gpt2.py for later")


def train(run):
    """Look, save and step until max_steps, or until a signal asks to stop."""
    cfg, place, state = run.cfg, run.place, run.state
    signals, first, began = [], state.step, None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.append(number))
    flops, peak = state.model.flops_per_token(cfg.T), peak_flops(place.device)
    while True:
        look(run)
        if run.log and state.step > first and any((state.step == cfg.max_steps, due(cfg.save_every, run),
                                                   due(cfg.milestone_every, run))):
            save(run)
        if state.step == cfg.max_steps:
            return
        start = time.perf_counter()
        loss, norm, stops = train_step(run, signals)
        if not math.isfinite(loss) or not (math.isfinite(norm) or state.scaler.is_enabled()):
            raise UserError(f"The loss of step {state.step} is {loss} and its gradient's norm {norm}: look at the data, or "
                            f"start anew with a lower --max_lr in another --log_dir. What was saved stands.", agreed=True)
        now = time.perf_counter()
        began = began or now  # the first step, with its compilation, says nothing about the time left
        rate = cfg.total_batch_size / (now - start)
        mfu = f" mfu {rate * flops / peak / place.world:.0%}" if peak else ""
        each = (now - began) / (state.step - first) if state.step > first else now - start
        report(run, "train", loss, f"loss {loss:.4f} lr {get_lr(state.step, cfg):.2e} norm {norm:.2f} "
                                   f"{(now - start) * 1e3:.0f} ms {rate:,.0f} tok/s{mfu} {duration(each * (cfg.max_steps - state.step - 1))} left")
        state.step += 1
        if stops and state.step < cfg.max_steps:
            if run.log:
                save(run, leaving=True)
            say(place, f"Stopped by a signal before step {state.step}; the same command goes on from there.")
            return


# ------------------------------------------------------------------------------------------------ command line
def boolean(text):
    if text not in ("True", "False"):
        raise argparse.ArgumentTypeError(f"takes True or False, not {text!r}")
    return text == "True"


def parse_args():
    """(Config, whether this is the quick start) from the constants above and the command line's flags."""
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(Config), re.M))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    for field in dataclasses.fields(Config):
        parser.add_argument(f"--{field.name}", type=boolean if field.type is bool else field.type, metavar="X",
                            default=argparse.SUPPRESS, help=f"{comments[field.name]} [{field.default}]".replace("%", "%%"))
    parser.error = lambda message: sys.exit(f"train_gpt2.py: {message} (--help lists every flag)"
                                            if os.environ.get("RANK", "0") == "0" else 1)
    flags = vars(parser.parse_args())
    quick = "data" not in flags and Config.data == FINEWEB_DIR and not Path(FINEWEB_DIR).exists()
    cfg = Config(**{**(QUICK_START if quick else {}), **flags})
    if quick and "B" not in flags:  # the same command on more processes: fewer rows for each
        cfg.B = max(1, cfg.B // int(os.environ.get("WORLD_SIZE", 1)))
    return cfg, quick


def main():
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what the terminal's encoding lacks is escaped
    cfg, quick = parse_args()
    place = run = problem = None
    alone = True  # in what goes wrong, as far as the other processes know
    try:
        place = join_processes(cfg)
        if quick:
            say(place, f"Quick start: there are no shards in {FINEWEB_DIR}/ yet, so this trains a small GPT on the\n"
                       f"bytes of input.txt. For the real thing: python fineweb.py, then the same command\n"
                       f"again (8 GPUs: torchrun --standalone --nproc_per_node=8 train_gpt2.py).\n")
        if run := set_up(cfg, place):
            train(run)
        alone = False
    except UserError as e:
        alone = not e.agreed
        problem = e.args[0] if alone or place.rank == 0 else 1
    except torch.OutOfMemoryError:
        B = smaller_B(cfg, place.world)
        problem = f"The GPU is out of memory with B={cfg.B}: " + (
            f"--B={B} trains the same model in less." if B else "lower --T, or the model's size.")
    except KeyboardInterrupt:  # train() has handlers of its own
        problem = "Stopped before the first step."
    finally:
        run = None  # DDP first: as the last to hold the group, it would take it down without letting gloo's threads end
        if dist.is_initialized() and not (alone and place.device.type == "cuda"):
            dist.destroy_process_group()
    if problem and dist.is_initialized():  # alone under NCCL: its orderly end would wait for the others for ever
        print(f"train_gpt2.py: {problem}", file=sys.stderr, flush=True)
        os._exit(1)
    if problem:
        sys.exit(problem if problem == 1 else f"train_gpt2.py: {problem}")


if __name__ == "__main__":
    main()
