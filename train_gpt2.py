"""Train GPT-2 from scratch, on a CPU or on one or more GPUs.

    python train_gpt2.py --data=input.txt    # train a small GPT on Shakespeare
    python fineweb.py       # write shards of FineWeb-Edu to edu_fineweb10B/
    torchrun --standalone --nproc_per_node=8 train_gpt2.py    # GPT-2 (124M)
    tail -f log/log.txt     # lines of the form "<step> <metric> <value>"

To train on two machines, run this on each of them. They need no shared disk.
torchrun decides which one hosts rank 0, the process that prints and saves:

    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d
        --rdzv_endpoint=FIRST_MACHINE:29500 train_gpt2.py

To change a setting, edit the constants in Config, or pass a flag
(--max_lr=1e-3). Training on a text file uses the constants in SMALL or, if it
starts from pretrained weights (init_from), those in FINETUNE. Ctrl-C saves the
run and stops it. To resume the run, repeat the command.

One idea keeps the script simple: the data read at each step is a function of
(seed, step). Therefore, a checkpoint need not record what has been read, and,
apart from rounding and dropout masks, the micro-batch size B and the number of
GPUs affect only speed and memory.
"""
import contextlib
import ctypes
import datetime
import importlib.util
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import time
import zlib
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, get_args

# Limit how long an idle OpenMP thread spins before it yields its core. This must be set before
# torch is imported. While two other processes are busy, a training step of the SMALL preset takes
# 166 ms with this limit and 739 to 873 ms without it (tests/measured/step_cpu.txt).
os.environ["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", "10000")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel as DDP

# fineweb.py tokenizes FineWeb-Edu. It also contains the helpers that all three scripts share
from fineweb import (
    UserError, encode, get_encoding, has_other_ids, lock_folder, parse_flags, save_tokenizer,
    summary_of, write_whole)

# torchrun starts one process per GPU and gives each a number, its rank. Only rank 0 prints and
# writes files. (Slurm may set WORLD_SIZE but not RANK, in which case there is only one process)
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1

# ---- Constants. --help prints the comment at the end of each line
@dataclass(frozen=True)
class Config:
    """The settings: GPT-2 (124M) with GPT-3's hyperparameters (Brown et al. 2020, table 2.1).

    For text files, SMALL or FINETUNE (below) replaces some of them. If edu_fineweb10B contains no
    shards, and no other `data` is chosen, input.txt is used. (Under torchrun, or if there is a GPU,
    this is an error, because the user probably meant GPT-2.)
    """
    data: str = "edu_fineweb10B"    # folder of .npy token shards, or a UTF-8 text file
    encoding: str = "gpt2"          # name of a tiktoken encoding, or bytes (needs no download)
    shuffle: bool = True            # shuffle the training data anew in each epoch
    seed: int = 1337                # determines the initial weights, data order and samples
    # total_batch_size affects training, and B only memory and speed. In each step, a process reads
    # total_batch_size / T / processes rows. If B does not divide this number, B is lowered
    total_batch_size: int = 524288  # tokens per optimizer step, a multiple of T * processes
    B: int = 64                     # micro-batch size: rows per forward pass
    T: int = 1024                   # tokens per row (the context length)
    # The model: n_layer/n_head/n_embd is 12/12/768 for 124M, 24/16/1024 for 350M, 36/20/1280 for
    # 774M and 48/25/1600 for 1.5B
    n_layer: int = 12               # number of blocks
    n_head: int = 12                # attention heads per block
    n_embd: int = 768               # width of the model, a multiple of n_head
    dropout: float = 0.0            # fraction of activations set to 0 in training; GPT-2 used 0.1
    # With init_from, a run starts at step 0 with these weights. With branch_from, it continues
    # another run: it starts with the weights, optimizer state and step of this checkpoint. In the
    # folder of a run, init_from finds the best checkpoint, and branch_from the newest one
    init_from: str = "scratch"      # weights: scratch, gpt2 ... gpt2-xl, a folder or a .pt file
    branch_from: str = ""           # checkpoint to start from: a run's folder or a .pt file
    # The optimizer. GPT-3's max_lr is 6e-4 for 125M, 3e-4 for 350M, 2.5e-4 for 760M, 2e-4 for 1.3B
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: Muon in the blocks, AdamW elsewhere
    max_lr: float = 6e-4            # peak learning rate
    beta1: float = 0.9              # AdamW: decay rate of the mean of the gradient
    beta2: float = 0.95             # AdamW: decay rate of the mean of its square
    eps: float = 1e-8               # AdamW: added to the denominator, for stability
    muon_lr_ratio: float = 1.0      # Muon's learning rate divided by AdamW's
    muon_momentum: float = 0.95     # Muon: decay rate of the mean of the gradient
    min_lr: float = 6e-5            # learning rate at max_steps
    lr_shape: Literal["cosine", "linear", "wsd"] = "cosine"  # shape of the decay to min_lr
    decay_steps: int = 3800         # wsd only: number of final steps with a linear decay
    warmup_steps: int = 715         # steps of linear warmup (375 M tokens, as in GPT-3)
    max_steps: int = 19073          # optimizer steps (10 B tokens); 0 = only evaluate and sample
    epochs: float = 0.0             # passes over the data, overridden by a max_steps flag; 0 = off
    weight_decay: float = 0.1       # weight decay of matrices and embeddings
    grad_clip: float = 1.0          # clip the gradient norm to this; 0 = no clipping
    # Monitoring. For the settings that end in _every, 0 means never
    print_every: int = 1            # steps between lines on stdout; log.txt has every step
    eval_every: int = 250           # steps between validations, each of which also saves the run
    keep_every: int = 5000          # steps between checkpoints that are never deleted
    val_tokens: int = 10485760      # tokens per validation; each validation reads the same ones
    hellaswag_every: int = 250      # steps between evaluations on HellaSwag
    sample_every: int = 1000        # steps between samples; one GPU samples while the others wait
    sample_prompt: str = "Hello, I'm a language model,"  # prompt for the samples
    sample_tokens: int = 64         # number of tokens per sample, not counting the prompt
    temperature: float = 1.0        # higher is more random; 0 always takes the most likely token
    top_k: int = 50                 # sample from the k most likely tokens; 0 = from all
    sample: int = 0                 # print this many samples instead of training
    log_dir: str = "log"            # folder of the run: log, checkpoints, curves, export
    # The machine
    device: str = "auto"            # auto (CUDA, else MPS, else CPU), cuda, cuda:1, mps or cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # matrix multiplication dtype
    compile: Literal["auto", True, False] = "auto"  # use torch.compile; auto: on CUDA only

# For training on a text file or on shards of bytes: a small GPT, sized for two CPU cores
SMALL = dict(
    encoding="bytes", total_batch_size=2048, B=32, T=64, n_layer=3, n_head=4, n_embd=128,
    optimizer="muon", max_lr=7e-3, muon_lr_ratio=2.0, min_lr=0.0, lr_shape="linear",
    warmup_steps=20, max_steps=1600, weight_decay=0.2, print_every=10, eval_every=400,
    val_tokens=131072, hellaswag_every=0, sample_every=800, sample_prompt="\n\n",
    sample_tokens=300, log_dir="log_small", compile=False)

# For fine-tuning pretrained weights (init_from) on a text file
FINETUNE = dict(
    total_batch_size=2048, B=2, max_lr=1e-4, min_lr=0.0, lr_shape="linear", warmup_steps=10,
    epochs=4.0, eval_every=100, keep_every=0, val_tokens=131072, hellaswag_every=0,
    sample_every=100, sample_prompt="\n", sample_tokens=100, log_dir="log_finetune")
PRESETS = {"Config": {}, "SMALL": SMALL, "FINETUNE": FINETUNE}  # configure() selects one

# ---- GPT-2
@dataclass
class GPTConfig:
    """The hyperparameters of a model. The defaults are those of GPT-2 (124M)."""
    block_size: int = 1024  # longest context, in tokens
    vocab_size: int = 50257  # number of token ids
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0    # active in training mode, which only train_step() switches on
    encoding: str = "gpt2"  # name of the encoding that the token ids belong to

class CausalSelfAttention(nn.Module):
    """Multi-head attention in which each token attends to itself and to earlier tokens."""
    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key and value
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
                   for part in (q, k, v))  # (B, n_head, T, C // n_head) each
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))  # concatenate the heads

class MLP(nn.Module):
    """Widens the vector of each token fourfold, applies GELU, and projects the result back."""
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.gelu = nn.GELU(approximate="tanh")  # the approximation that GPT-2 was trained with
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))

class Block(nn.Module):
    """Attention and then the MLP. The output of each is added to x, the residual stream."""
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = x + self.dropout(self.attn(self.ln_1(x)))
        return x + self.dropout(self.mlp(self.ln_2(x)))

def seed_from(*key):
    """Return a seed that is derived from numbers and strings, as in seed_from(seed, name)."""
    return int(np.random.SeedSequence([
        zlib.crc32(part.encode()) if isinstance(part, str) else part for part in key
    ]).generate_state(1)[0])

class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019, section 2.3).

    Parameters have the same names as in Hugging Face's GPT-2, which stores some of them transposed.

    seed: determines the initial weights. The default is the last seed given to torch.manual_seed().
    """
    def __init__(self, config, seed=None):
        super().__init__()
        self.config = config
        # Pad the token embedding to a multiple of 128 rows (50304 for GPT-2), for speed on GPUs
        n_rows = math.ceil(config.vocab_size / 128) * 128
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(n_rows, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            ln_f=nn.LayerNorm(config.n_embd)))
        self.dropout = nn.Dropout(config.dropout)
        # The output layer shares the matrix of the input embedding, since similar tokens should
        # have similar vectors in both (Press and Wolf 2017). This saves 39 M parameters
        self.lm_head = nn.Linear(config.n_embd, n_rows, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self.init_weights(torch.initial_seed() if seed is None else seed)
        self.eval()  # only train_step() switches to training mode

    @torch.no_grad()
    def init_weights(self, seed):
        """Initialize all parameters. To initialize a parameter differently, edit this method.

        Matrices and embeddings are drawn from a normal distribution. The random numbers depend only
        on the seed and on the parameter's name, so they do not change when a layer is added
        elsewhere. Biases are set to 0. Other vectors keep the values that their module gives them,
        for example 1 for the gains of LayerNorm.
        """
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                p.zero_()
            elif p.dim() >= 2:
                std = 0.02
                if name.endswith("c_proj.weight"):
                    # Each block adds the outputs of two such projections to the residual stream,
                    # whose variance should not grow with n_layer (Radford et al. 2019, section 2.3)
                    std /= math.sqrt(2 * self.config.n_layer)
                generator = torch.Generator().manual_seed(seed_from(seed, name))
                p.copy_(torch.empty(p.shape, device="cpu").normal_(std=std, generator=generator))
        self.transformer.wte.weight[self.config.vocab_size:] = 0  # padding rows belong to no token

    def forward(self, idx, targets=None, return_logits=True):
        """Return the logits (B, T, vocab_size) of token ids idx (B, T), and the loss.

        The loss is the mean cross-entropy against targets (B, T), in nats per token, or None
        without targets. Targets of -100 are ignored. Validation also uses this loss, so a term that
        applies only in training (for example a z-loss) belongs under `if self.training`.

        return_logits=False returns None in place of the logits. Training uses it because
        torch.compile allocates a gradient for each tensor that is returned: 13 GB for the logits at
        B=64. (It saves no computation, since the loss needs the logits.)
        """
        positions = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)  # (B, T, C)
        if torch.is_autocast_enabled(x.device.type):
            # The embeddings are float32. Cast x to 16 bits. The blocks add 16-bit values to it, so
            # the whole residual stream stays in 16 bits, which halves the memory traffic
            x = x.to(torch.get_autocast_dtype(x.device.type))
        x = self.dropout(x)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        logits = self.lm_head(x)  # (B, T, number of rows of lm_head)
        # Give the padding rows a probability of 0. (For the loss, slicing them off would make a
        # compiled step 5% slower on an H100.) Masking before float() instead of after saves 6 GiB
        no_token = torch.arange(logits.size(-1), device=x.device) >= self.config.vocab_size
        logits = logits.masked_fill(no_token, -math.inf).float()
        loss = None if targets is None else F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        return (logits[..., :self.config.vocab_size] if return_logits else None), loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Append sampled tokens to the token ids idx (B, T). Return (B, T + max_new_tokens).

        top_k: sample from the k most likely tokens (None or 0: from all). A temperature of 0
        always selects the most likely token.
        """
        for _ in range(max_new_tokens):
            context = idx[:, -self.config.block_size:]
            # If set_up() has compiled the model, run it eagerly here, because otherwise it would be
            # compiled again for each length
            with torch.compiler.set_stance("force_eager"):
                logits = self(context)[0][:, -1]  # (B, vocab_size)
            if top_k:
                kth_best = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < kth_best, -math.inf)
            if temperature == 0:
                token = logits.argmax(-1, keepdim=True)  # (B, 1)
            else:
                probs = (logits / temperature).softmax(-1)
                token = torch.multinomial(probs, 1, generator=generator)
            idx = torch.cat((idx, token), dim=1)
        return idx

    @classmethod
    def from_pretrained(cls, source, dropout=0.0, encoding="gpt2"):
        """Return a GPT with the weights in `source`.

        source: gpt2 ... gpt2-xl or another GPT-2 on the hub, a Hugging Face folder, the folder of a
        run (its best checkpoint is used) or a .pt file.
        dropout: replaces the dropout with which the weights were trained.
        encoding: the encoding of Hugging Face weights. It is ignored if the vocabulary has 257 ids
        (the bytes and <|endoftext|>) or 50257 ids (GPT-2's).
        Raise UserError if the weights cannot be read or do not fit this class.
        """
        source = best_checkpoint(source) or source  # (None if source is not a run's folder)
        if not str(source).endswith(".pt"):
            return gpt_from_hugging_face(source, dropout, encoding)
        checkpoint = read_checkpoint(source)
        model = cls(replace(GPTConfig(**checkpoint["gpt_config"]), dropout=dropout))
        load_weights(model, checkpoint["model"], source)
        return model

# ---- Data
class DataLoaderLite:
    """Cuts shards into rows, and returns any row by its number.

    A row has T + 1 tokens. The model reads the first T tokens and predicts the last T. The rows of
    a shard begin at its tokens 0, T, 2 T and so on, so the last token of a row is also the first
    token of the next one.

    An epoch reads each row once, one shard after another. With `shuffle`, the order of the shards
    and the order of the rows in each shard are random, and new in each epoch. (A random order of
    all rows would make a network disk read all shards at once.) Row numbers continue
    from one epoch to the next: if the shards have 12 rows, then epoch 0 reads them as row numbers 0
    to 11, and epoch 1 reads them, in a different order, as row numbers 12 to 23.

    With `shift`, which is used for shuffled text files, each epoch cuts the text at different
    tokens, so that even a small text yields new rows: row i of a shard begins at token
    max(0, i T - offset), with an offset from 0 to T - 1 that differs between epochs.

    shards: arrays of token ids (N,), for example memory-mapped files.
    vocab_size: batch() raises UserError if a token id is vocab_size or larger.
    """
    def __init__(self, shards, T, vocab_size=2**32, seed=0, shuffle=False, shift=False):
        self.shards, self.T, self.vocab_size = shards, T, vocab_size
        self.seed, self.shuffle, self.shift = seed, shuffle, shift
        self.rows_in_shard = [max(0, len(shard) - 1) // T for shard in shards]
        self.rows_per_epoch = sum(self.rows_in_shard)

    def locate(self, number):
        """Return the shard (its index) and the token at which the row with this number begins."""
        epoch, row = divmod(number, self.rows_per_epoch)
        for shard in order_of(len(self.shards), self.shuffle, self.seed, epoch).tolist():
            n_rows = self.rows_in_shard[shard]
            if row < n_rows:
                break
            row -= n_rows  # it is in a later shard
        start = int(order_of(n_rows, self.shuffle, self.seed, epoch, shard)[row]) * self.T
        if self.shift:
            # Multiples of 0.618 T, modulo T, are spread evenly between 0 and T - 1
            start = max(0, start - int(0.618 * epoch * self.T) % self.T)
        return shard, start

    def batch(self, row, B, device=torch.device("cpu")):
        """Return inputs x and targets y (x shifted by one token), both (B, T), on `device`.

        They are rows `row` to `row + B - 1`. Raise UserError if a token id is not in the
        vocabulary.
        """
        # On a GPU, use pinned memory, because copying from it does not block the CPU
        on_gpu = device.type == "cuda"
        tokens = torch.empty((B, self.T + 1), dtype=torch.int64, pin_memory=on_gpu)
        for b in range(B):
            shard, start = self.locate(row + b)
            tokens.numpy()[b] = self.shards[shard][start:start + self.T + 1]
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise UserError(f"The data contains ids from {tokens.min()} to {tokens.max()}, but the "
                            f"encoding has the ids 0 to {self.vocab_size - 1}: set --encoding to "
                            "the encoding that the shards were made with.")
        tokens = tokens.to(device, non_blocking=on_gpu)
        # Return copies, since x and y overlap and the caller may change one of them
        return tokens[:, :-1].clone(), tokens[:, 1:].clone()

@lru_cache(maxsize=4)  # two loaders, each with an order of shards and an order of rows
def order_of(n, shuffle, *key):
    """Return the numbers 0 ... n - 1 in order or, if `shuffle`, shuffled with `key` as the seed.

    RandomState gives the same result in every version of NumPy.
    """
    return np.random.RandomState(key).permutation(n) if shuffle else np.arange(n)

def find_shards(folder):
    """Return the training shards and the validation shards, as two sorted lists of paths."""
    # Hidden files are left out, such as the ._*.npy files that macOS makes on other disks
    return [sorted(Path(folder).glob(f"[!.]*_{split}_*.npy")) for split in ("train", "val")]

def read_manifest(folder):
    """Return manifest.json of a folder of shards, or {} (shards of other scripts have none)."""
    path = Path(folder, "manifest.json")
    return json.loads(path.read_bytes()) if path.exists() else {}

def open_shards(folder, encoding):
    """Return the training shards and the validation shards of a folder, as two lists of arrays.

    Print a warning if manifest.json does not match the shards in the folder.
    """
    paths = find_shards(folder)
    if not all(paths):
        raise UserError(f"data={folder} is neither a text file nor a folder with *_train_*.npy and "
                        "*_val_*.npy: run fineweb.py, or set a different --data.")
    manifest = read_manifest(folder)
    needed = manifest.get("settings", {}).get("encoding", encoding)
    if needed != encoding:
        raise UserError(f"The shards in {folder}/ need --encoding={needed}, not {encoding}.")
    listed = {entry["name"] for entry in manifest.get("shards", [])}
    odd = listed ^ {path.name for path in paths[0] + paths[1]}
    if listed and odd:
        print0(f"!!! {folder}/manifest.json does not list the shards that are there. Missing or "
               f"not listed: {', '.join(sorted(odd))[:160]}")
    return [[open_shard(path) for path in part] for part in paths]

def open_data(cfg, enc):
    """Return the loaders for training and validation.

    enc: the tiktoken.Encoding for cfg.encoding. If a text file contains the characters
    <|endoftext|>, they become the special token that separates documents.
    Raise UserError if the data is unreadable or too short, or if it needs a different encoding.
    """
    is_text = Path(cfg.data).is_file()
    if is_text:  # the last tenth is for validation
        try:
            text = Path(cfg.data).read_bytes().decode("utf-8")
        except UnicodeDecodeError as e:
            raise UserError(f"{cfg.data} is not UTF-8 ({e}): convert it to UTF-8.") from None
        tokens = encode(enc, text, special=True)
        cut = int(len(tokens) * 0.9)
        train, val = [tokens[:cut]], [tokens[cut:]]
    else:
        train, val = open_shards(cfg.data, cfg.encoding)
    train_loader = DataLoaderLite(train, cfg.T, enc.n_vocab, seed=cfg.seed, shuffle=cfg.shuffle,
                                  shift=cfg.shuffle and is_text)
    val_loader = DataLoaderLite(val, cfg.T, enc.n_vocab)
    if not (train_loader.rows_per_epoch and val_loader.rows_per_epoch):
        raise UserError(f"{cfg.data} is too short for T={cfg.T}: use more text, or a lower --T.")
    return train_loader, val_loader

def open_shard(path):
    """Return the token ids (N,) of a shard, memory-mapped. Raise UserError if it is damaged."""
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"its shape is {tokens.shape} and its type {tokens.dtype}")
    except (OSError, ValueError, EOFError) as e:
        raise UserError(f"{path} is not a complete shard of integers ({summary_of(e)}): delete it, "
                        "and repeat the command that made it.") from None
    return tokens

# ---- Learning rate and optimizers
def get_lr(step, cfg):
    """Return AdamW's learning rate at a step: linear warmup to max_lr, then decay to min_lr.

    With lr_shape="wsd" (warmup, stable, decay), the rate decays only in the last decay_steps steps.
    update_weights() scales the learning rates of all optimizers by the same factor, so Muon's is
    always muon_lr_ratio times AdamW's.
    """
    if step < cfg.warmup_steps:
        return cfg.max_lr * (step + 1) / cfg.warmup_steps
    wsd = cfg.lr_shape == "wsd"
    start = max(cfg.warmup_steps, cfg.max_steps - cfg.decay_steps) if wsd else cfg.warmup_steps
    progress = min(1.0, max(0, step - start) / max(1, cfg.max_steps - start))
    remaining = (0.5 * (1 + math.cos(math.pi * progress)) if cfg.lr_shape == "cosine"
                 else 1 - progress)
    return cfg.min_lr + (cfg.max_lr - cfg.min_lr) * remaining

def newton_schulz(G):
    """Push the singular values of wide matrices G (n, rows, columns) towards 1.

    Each iteration maps each singular value x to a * x + b * x^3 + c * x^5 (Jordan et al. 2024).
    """
    a, b, c = 3.4445, -4.7750, 2.0315  # the slope at 0 is steep, so small values grow quickly
    # No singular value exceeds the Frobenius norm. So after this line, none exceeds 1
    X = G / G.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        A = X @ X.mT                                    # (n, rows, rows)
        # torch.baddbmm computes beta * (1st argument) + alpha * (2nd @ 3rd) in one operation
        P = torch.baddbmm(A, A, A, beta=b, alpha=c)     # b * A + c * A @ A
        X = torch.baddbmm(X, P, X, beta=a)              # a * X + P @ X
    return X

class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum for matrices (Jordan et al. 2024).

    A few directions dominate the gradient of a matrix. Muon gives all directions about the same
    magnitude, so that the model also learns from weak ones. The factor 0.2 sqrt(longer side) makes
    its updates about as large as those of AdamW (Liu et al. 2025, section 2.2).

    params: matrices, or groups of them. A matrix in a group with n_parts=3 consists of three
    matrices of the same shape, one below the other, which are treated separately.
    dtype: the dtype in which newton_schulz() computes. (torch.optim.Muon always uses bfloat16,
    which is slow on most CPUs, and processes the matrices one at a time.)
    """
    def __init__(self, params, lr, weight_decay=0.0, momentum=0.95, n_parts=1, dtype=torch.float32):
        super().__init__(params, dict(
            lr=lr, weight_decay=weight_decay, momentum=momentum, n_parts=n_parts))
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None):
        by_shape = defaultdict(list)
        for group in self.param_groups:
            momentum, n = group["momentum"], group["n_parts"]
            for p in group["params"]:
                if p.grad is None:  # not used in this step
                    continue
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                average = self.state[p]["momentum_buffer"]  # the running average of the gradient
                average.lerp_(p.grad, 1 - momentum)  # momentum * average + (1 - momentum) * grad
                # Nesterov momentum looks ahead: (1 - momentum) * grad + momentum * average
                ahead = p.grad.lerp(average, momentum).to(self.dtype)
                for weight, G in zip(p.chunk(n), ahead.chunk(n)):
                    if G.size(0) > G.size(1):  # wide matrices are cheaper, so transpose tall ones
                        weight, G = weight.mT, G.mT
                    by_shape[G.shape].append((group, weight, G))
        # Batch matrices of the same shape, so that there are fewer and larger operations
        for (_, longer_side), batch in by_shape.items():
            groups, weights, matrices = zip(*batch)
            updates = newton_schulz(torch.stack(matrices))
            # Each weight is a view of a parameter, so changing it in place changes the parameter
            for group, weight, update in zip(groups, weights, updates):
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(longer_side))

def configure_optimizers(model, cfg, muon_dtype=torch.float32):
    """Return [AdamW] or, with optimizer="muon", [AdamW, Muon].

    Muon updates the matrices in the blocks, and AdamW all other parameters. Frozen parameters
    (requires_grad=False) are left out. muon_dtype: the dtype in which Muon orthogonalizes.
    """
    matrices = {name: p for name, p in model.transformer.h.named_parameters()
                if p.dim() == 2 and p.requires_grad}
    for_muon = set(matrices.values()) if cfg.optimizer == "muon" else set()
    others = [p for p in model.parameters() if p.requires_grad and p not in for_muon]
    groups = [dict(params=[p for p in others if p.dim() >= 2], weight_decay=cfg.weight_decay),
              # No decay for biases and gains: pulling them to 0 would only distort the model
              dict(params=[p for p in others if p.dim() < 2], weight_decay=0.0)]
    # With fused=True, one kernel updates all parameters
    optimizers = [torch.optim.AdamW(groups, lr=cfg.max_lr, betas=(cfg.beta1, cfg.beta2),
                                    eps=cfg.eps, fused=True)]
    if for_muon:
        # c_attn.weight stacks the matrices of query, key and value
        stacked = [p for name, p in matrices.items() if name.endswith("c_attn.weight")]
        single = [p for name, p in matrices.items() if not name.endswith("c_attn.weight")]
        optimizers.append(Muon(
            [dict(params=stacked, n_parts=3), dict(params=single)],
            lr=cfg.max_lr * cfg.muon_lr_ratio, weight_decay=cfg.weight_decay,
            momentum=cfg.muon_momentum, dtype=muon_dtype))
    for group in itertools.chain.from_iterable(o.param_groups for o in optimizers):
        group["initial_lr"] = group["lr"]  # the peak, which update_weights() scales
    return optimizers

# ---- Training
@dataclass
class Run:
    """Everything that train() uses. It is built by set_up(), near the end of this file."""
    cfg: Config
    device: torch.device
    model: nn.Module              # the GPT; it is compiled in place if torch.compile is used
    ddp_model: nn.Module          # what train_step() calls: model, wrapped in DDP if needed
    optimizers: list
    scaler: torch.amp.GradScaler  # keeps float16 gradients in range; disabled for other dtypes
    autocast: partial             # returns torch.autocast's context manager for the run's dtype
    train_loader: DataLoaderLite
    val_loader: DataLoaderLite
    data_facts: dict              # what data_facts() returns. It must not change during the run
    hella: object = None          # HellaSwag's questions (a hellaswag.Prepared), or None
    step: int = 0                 # number of steps taken
    best_loss: float = math.inf   # the lowest validation loss
    best_step: int | None = None  # the step at which it was found
    train_s: float = 0.0          # seconds spent in training steps since step 0
    log: object = None            # log.txt, opened for appending; None except on rank 0
    # Duration of the latest steps. Their median is not affected by single slow steps
    seconds: deque = field(default_factory=lambda: deque(maxlen=100))
    next_batch: tuple | None = None  # x and y of the next step's first micro-batch
    signalled: bool = False       # this process has received Ctrl-C, SIGTERM or SIGHUP
    stop: bool = False            # a process was signalled, so all stop now
    writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=1))
    last_save: object = None      # Future of the last save; its result: was the file written?

@torch.no_grad()
def validation_loss(run):
    """Return the mean loss over val_tokens tokens of the validation data, in nats per token.

    The losses of all targets are summed over all processes before dividing, so the result does not
    depend on B or on the number of processes.
    """
    cfg, loader = run.cfg, run.val_loader
    n_rows = min(max(1, cfg.val_tokens // cfg.T), loader.rows_per_epoch)
    sums = torch.zeros(2, device=run.device)  # the sum of the losses, and the number of targets
    for row in range(RANK * cfg.B, n_rows, WORLD_SIZE * cfg.B):
        x, y = loader.batch(row, cfg.B, run.device)
        # The last batch also has B rows, because torch.compile would compile the model again for
        # fewer. Ignore the targets in its surplus rows. (In other batches, this selects no row)
        y[n_rows - row:] = -100
        with run.autocast():
            _, loss = run.model(x, y, return_logits=False)
        n_targets = (y != -100).sum()
        sums += torch.stack((loss * n_targets, n_targets))
    if WORLD_SIZE > 1:
        dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()

def train_step(run):
    """Take one optimizer step. Return the loss and the gradient's norm, measured before clipping.

    The loss is the mean over the whole batch. The CPU waits for the GPU only once, at the end. (In
    float16, it also waits for GradScaler.)
    """
    cfg, rows = run.cfg, run.cfg.total_batch_size // run.cfg.T
    # The row numbers at which this rank's micro-batches begin. Ranks take turns, B rows at a time
    starts = range(run.step * rows + RANK * cfg.B, (run.step + 1) * rows, WORLD_SIZE * cfg.B)
    loss_of_step = torch.zeros((), device=run.device)
    run.ddp_model.train()
    for row in starts:
        # The first micro-batch was read at the end of the previous step
        x, y = run.next_batch or run.train_loader.batch(row, cfg.B, run.device)
        run.next_batch = None
        # A resumed run draws the dropout masks that it would have drawn without the interruption
        torch.manual_seed(seed_from(cfg.seed, row))
        # DDP averages gradients over the processes. Only the last micro-batch needs that. The
        # forward pass must also be inside no_sync(), because it prepares the averaging
        only_accumulate = WORLD_SIZE > 1 and row != starts[-1]
        with run.ddp_model.no_sync() if only_accumulate else contextlib.nullcontext():
            with run.autocast():
                _, loss = run.ddp_model(x, y, return_logits=False)
            # Gradients of micro-batches are added up, so divide to get their mean
            run.scaler.scale(loss / len(starts)).backward()
        loss_of_step += loss.detach() / len(starts)
    run.ddp_model.eval()
    for optimizer in run.optimizers:
        run.scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), cfg.grad_clip or math.inf)
    update_weights(run, norm)
    run.step += 1
    # While the GPU computes, read the first batch of the next step. If this fails, the next step
    # reads it again and raises the error, so the step just taken is still logged
    with contextlib.suppress(UserError):
        run.next_batch = run.train_loader.batch(
            run.step * rows + RANK * cfg.B, cfg.B, run.device)
    # Average over the processes. (The norm is the same on each.) If one was signalled, all stop
    sums = torch.stack((loss_of_step, norm, torch.full_like(norm, run.signalled)))
    if WORLD_SIZE > 1:
        dist.all_reduce(sums)
    loss, norm, signalled = (sums / WORLD_SIZE).tolist()
    run.stop = signalled > 0
    return loss, norm

def update_weights(run, norm):
    """Let each optimizer take a step with the learning rate of run.step, and delete the gradients.

    norm: the norm of all gradients. If a float16 gradient has overflowed, it is not finite, and
    clipping, which divides by it, has destroyed all gradients. So no optimizer may take a step. (If
    only gradients of Muon's overflow, GradScaler itself would skip Muon and not AdamW.)
    """
    overflowed = run.scaler.is_enabled() and not norm.isfinite()
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * get_lr(run.step, run.cfg) / run.cfg.max_lr
        if not overflowed:
            run.scaler.step(optimizer)
        optimizer.zero_grad()
    run.scaler.update()  # after an overflow, this lowers the loss scale

def due(every, run):
    """Return whether to act now: at multiples of `every` (0 = never), and after the last step.

    After a signal, nothing is due; the resumed run does what was skipped.
    """
    return every > 0 and not run.stop and (
        run.step % every == 0 or run.step >= run.cfg.max_steps)

def untrained(run):
    """Return whether the weights are still random, so not worth saving or sampling from."""
    return run.step == 0 and run.cfg.init_from == "scratch"

def train(run):
    """Train until max_steps is reached or a signal arrives.

    Steps are numbered from 0. Step n is the update from run.step == n to n + 1. In the log, `val`
    and `train` of step n are both computed with the weights before this update. A resumed run
    repeats what is due at the step that was saved.
    """
    cfg = run.cfg
    while True:
        ended = run.stop or run.step >= cfg.max_steps
        if due(cfg.eval_every, run):
            validate(run)
        # Save before HellaSwag and the sample, so that nothing is lost if they fail
        save_due = due(cfg.eval_every, run) or due(cfg.keep_every, run)
        if ended or (save_due and not untrained(run)):
            save(run)
        if due(cfg.hellaswag_every, run) and run.hella:
            score_hellaswag(run)
        if due(cfg.sample_every, run) and (ended or not untrained(run)):
            print_sample(run)
        if ended:
            break
        step, start = run.step, time.perf_counter()
        loss, norm = train_step(run)  # this adds 1 to run.step
        seconds = time.perf_counter() - start
        run.seconds.append(seconds)
        run.train_s += seconds
        check_finite(run, f"Step {step} has loss {loss:g} and gradient norm {norm:g}", loss, norm)
        log_metric(run, step, "train", loss)
        log_metric(run, step, "norm", norm)
        if cfg.print_every and step % cfg.print_every == 0:
            left = round(np.median(run.seconds) * (cfg.max_steps - run.step))
            print0(f"{step:5d}/{cfg.max_steps} train {loss:.4f} lr {get_lr(step, cfg):.2e} norm "
                   f"{norm:.2f} {seconds * 1e3:.0f} ms {cfg.total_batch_size / seconds:,.0f} tok/s "
                   f"{datetime.timedelta(seconds=left)} left")
    finish(run)

def validate(run):
    """Log and print the validation loss and the speed, and note the best step.

    Raise UserError if the loss is not finite.
    """
    cfg, step, gpu_facts = run.cfg, run.step, ""
    loss = validation_loss(run)
    log_metric(run, step, "val", loss)
    log_metric(run, step, "train_s", run.train_s)
    if run.seconds:
        speed = cfg.total_batch_size / np.median(run.seconds)  # tokens per second
        log_metric(run, step, "tok/s", speed)
        if run.device.type == "cuda":
            flops = speed * flops_per_token(run.model, cfg.T) / WORLD_SIZE
            gpu_facts = (f" {flops / 1e12:.0f} TFLOP/s per GPU, peak "
                         f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    print0(f"{step:5d}/{cfg.max_steps} val {loss:.4f}{gpu_facts}")
    check_finite(run, f"The validation loss at step {step} is {loss:g}", loss)
    if loss < run.best_loss and not untrained(run):
        run.best_loss, run.best_step = loss, step

def check_finite(run, text, loss, norm=0.0):
    """Raise UserError, which begins with `text`, unless a loss and a gradient norm are finite."""
    # In float16, the norm may be infinite: then the update was skipped
    if not (math.isfinite(loss) and (math.isfinite(norm) or run.scaler.is_enabled())):
        raise UserError(f"{text}: the model has diverged. Most often --max_lr is too high. To go "
                        "on from an earlier step with another --max_lr, set a different --log_dir "
                        f"and --branch_from={run.cfg.log_dir}/checkpoint_....pt.")

def score_hellaswag(run):
    """Log and print the accuracy on HellaSwag."""
    import hellaswag
    try:
        with run.autocast():
            acc_norm = hellaswag.evaluate(run.model, run.hella).acc_norm
    except UserError as e:  # losses are not finite; this is the same on every rank
        print0(f"!!! {e}")
        return
    log_metric(run, run.step, "hella", acc_norm)
    print0(f"{run.step:5d}/{run.cfg.max_steps} hella {acc_norm:.4f}")

def print_sample(run):
    """Print a sample on rank 0."""
    if RANK == 0:
        with run.autocast():
            text = sample_text(run.model, get_encoding(run.cfg.encoding), run.cfg,
                               seed=run.cfg.seed + run.step)
        print0(f"--- sample at step {run.step} ---\n{text}\n---")

def finish(run):
    """Raise UserError if the last step is not saved. If the run is complete, export its best model.
    """
    if RANK != 0:
        return
    if not run.last_save.result():
        raise UserError(f"Step {run.step} is not saved in log_dir={run.cfg.log_dir}: free some "
                        "space, and repeat the command.")
    if run.stop:
        print0(f"Stopped by a signal at step {run.step}. To resume the run, repeat the command.")
    else:
        export(run.cfg.log_dir)
        print0("Done. To train longer, raise --max_steps. For a new run, choose a different "
               "--log_dir.\nFor samples: python train_gpt2.py --sample=3 --log_dir="
               f"{shlex.quote(run.cfg.log_dir)}")

# ---- Checkpoints. A run is resumed from the newest one. Samples, the export and init_from use the
# best one. Only plain values are loaded (weights_only=True): other Python objects could run code
def checkpoint_of(run):
    """Return everything that a checkpoint contains. restore() is its counterpart.

    It consists of nested dicts, so that share() can send it to other processes value by value. Of
    the optimizers, it contains the state of each parameter. If you use an optimizer that also keeps
    state elsewhere, for example in its groups, add this state here and in restore().
    """
    return {
        "step": run.step, "best_loss": run.best_loss, "best_step": run.best_step,
        "train_s": run.train_s, "model": run.model.state_dict(),
        "gpt_config": asdict(run.model.config),
        "optimizers": {key: optimizer.state[p] for optimizer in run.optimizers
                       for key, p in keys_and_parameters(run, optimizer) if p in optimizer.state},
        "scaler": run.scaler.state_dict(), "config": asdict(run.cfg),
        "data_facts": run.data_facts}

def keys_and_parameters(run, optimizer):
    """Return [(key, parameter)] of an optimizer in the order of its groups.

    A key, such as "AdamW transformer.wte.weight", names the state of a parameter in a checkpoint.
    """
    names = {p: name for name, p in run.model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [(f"{type(optimizer).__name__} {names.get(p, number)}", p)
            for number, p in enumerate(parameters)]

def restore(run, checkpoint, branch=False):
    """Load what checkpoint_of() returned into the run.

    branch: whether this is a new run that branches from the checkpoint's run.
    Raise UserError if the checkpoint does not fit the run.
    """
    cfg, before = run.cfg, checkpoint["config"] | checkpoint["data_facts"]
    run.step, run.train_s = checkpoint["step"], checkpoint["train_s"]
    if branch:
        print_branch_changes(run, before)
    else:
        check_same_run(run, before)
        run.best_loss, run.best_step = checkpoint["best_loss"], checkpoint["best_step"]
    load_weights(run.model, checkpoint["model"], cfg.branch_from if branch else cfg.log_dir)
    if cfg.optimizer == before["optimizer"]:
        saved, n_loaded = checkpoint["optimizers"], 0
        for optimizer in run.optimizers:
            # Load the state of each parameter, and keep the options in the groups, such as betas,
            # which the code has set. A state_dict numbers the parameters in this order
            state = {number: saved[key] for number, (key, p) in enumerate(
                keys_and_parameters(run, optimizer)) if key in saved}
            optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
            n_loaded += len(state)
        if n_loaded < len(saved):
            print0(f"!!! The optimizer states of {len(saved) - n_loaded} parameters are not used, "
                   "because the edited code does not train them with the same optimizer.")
    if checkpoint["scaler"]:  # it is empty if the scaler was disabled
        run.scaler.load_state_dict(checkpoint["scaler"])

def check_same_run(run, before):
    """Raise UserError if a resumed run has changed. Print if max_steps changes the learning rate.

    before: {name: value} of the settings and of data_facts() in the checkpoint.
    """
    changes = changed_settings(run, before)
    if changes:
        raise UserError(f"The run in {run.cfg.log_dir}/ is a different one: "
                        f"{'; '.join(changes.values())}. Undo this change, or choose a different "
                        "--log_dir.")
    lr_before, lr = (get_lr(run.step, replace(run.cfg, max_steps=steps))
                     for steps in (before["max_steps"], run.cfg.max_steps))
    if lr != lr_before:
        print0(f"!!! max_steps is {run.cfg.max_steps}, was {before['max_steps']}, so the learning "
               f"rate changes from {lr_before:.2e} to {lr:.2e} at step {run.step}.")

def print_branch_changes(run, before):
    """Print what differs between a run and the one that it branches from.

    before: {name: value} of the settings and of data_facts() in the checkpoint.
    """
    cfg, changes = run.cfg, changed_settings(run, before)
    changes.pop("branch_from", None)
    # With another total_batch_size, the run goes on at another row of the data
    row_before, row = (run.step * batch // cfg.T
                       for batch in (before["total_batch_size"], cfg.total_batch_size))
    if row != row_before:
        changes["rows"] = (f"{abs(row - row_before):,} rows of the data are "
                           f"{'skipped' if row > row_before else 'read again'}")
    if changes:
        print0(f"!!! Not as in branch_from: {'; '.join(changes.values())}.")

# Settings that may differ when a run is resumed. `data` may have been moved, but data_facts() must
# not differ. `epochs` only determines max_steps, which is checked separately. dtype and B may
# differ although they affect rounding and, in the case of B, dropout masks
MAY_CHANGE = {
    "data", "B", "epochs", "print_every", "eval_every", "keep_every", "hellaswag_every",
    "sample_every", "sample_prompt", "sample_tokens", "temperature", "top_k", "sample", "log_dir",
    "device", "dtype", "compile"}

def data_facts(train, val):
    """Return the numbers of tokens in two lists of shards, and a checksum of their first tokens."""
    return {"train_tokens": sum(map(len, train)), "validation_tokens": sum(map(len, val)),
            "data_checksum": zlib.crc32(np.concatenate([shard[:4096] for shard in train + val]))}

def changed_settings(run, before):
    """Return {name: message} for each setting or fact about the data that has changed.

    before: {name: value}. max_steps may be larger, and the settings in MAY_CHANGE may differ.
    """
    now = asdict(run.cfg) | run.data_facts
    # A setting that was added after the run began is assumed to have had its default value
    before = asdict(Config()) | before
    changed = {name for name in now if before[name] != now[name]} - MAY_CHANGE
    if now["max_steps"] > before["max_steps"]:
        changed.discard("max_steps")
    return {name: f"{name} was {before[name]!r}, is {now[name]!r}" for name in sorted(changed)}

def load_weights(model, weights, source):
    """Load a state_dict. source: where the weights come from, for the error message."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as e:  # its first line is a heading; all other lines name weights
        raise UserError(f"The weights in {source} do not fit {type(model).__name__} "
                        f"({str(e).splitlines()[-1].strip()[:160]}): use the code that they were "
                        "made for.") from None

def find_checkpoints(folder):
    """Return {step: path} of the checkpoints in a folder."""
    paths = {path.stem.removeprefix("checkpoint_"): path
             for path in Path(folder).glob("checkpoint_*.pt")}
    return {int(step): path for step, path in paths.items() if step.isdecimal()}

def newest_checkpoint(folder):
    """Return the path of the newest checkpoint in a folder, or None."""
    return max(find_checkpoints(folder).items(), default=(None, None))[1]

def best_checkpoint(folder):
    """Return the path of the checkpoint with the lowest validation loss in a folder, or None.

    If there were no validations, or if that checkpoint has been removed, return the newest one.
    """
    newest = newest_checkpoint(folder)
    best_step = read_checkpoint(newest)["best_step"] if newest else None
    return find_checkpoints(folder).get(best_step, newest)

def read_checkpoint(path):
    """Return the content of a checkpoint. Raise UserError if it cannot be read.

    The file is mapped into memory: tensors are only read when they are used.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if "gpt_config" not in checkpoint:
            raise ValueError("train_gpt2.py did not write it")
        return checkpoint
    except Exception as e:  # reading a damaged file may raise any exception
        raise UserError(f"{path} cannot be read as a checkpoint ({summary_of(e)}): check its name. "
                        "If it is damaged, delete it.") from None

def serialized(content):
    """Return an in-memory file with the bytes that torch.save() would write."""
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file

def check_loadable(checkpoint):
    """Raise UserError if a value in a checkpoint can be saved but not loaded again."""
    for key in checkpoint.keys() - {"model", "optimizers"}:
        try:
            torch.load(serialized(checkpoint[key]), weights_only=True)
        except Exception as e:  # pickling may raise any exception
            raise UserError(f"checkpoint_of() returns {key!r}, which cannot be saved and loaded "
                            f"again ({summary_of(e)}): use numbers, texts, dicts, lists and "
                            "tensors.") from None

def save(run):
    """Write a checkpoint in the background.

    Training waits for the previous save and for the copy in memory: 0.4 s for the 124M model on a
    CPU (tests/measured/save.txt).
    """
    if RANK != 0:
        return
    if run.last_save:
        run.last_save.result()
    try:
        content = serialized(checkpoint_of(run))
    except Exception as e:  # for example, memory is full: training goes on
        content = e  # write_checkpoint() prints it
    run.last_save = run.writer.submit(write_checkpoint, run.cfg, run.step, run.best_step, content)

def write_checkpoint(cfg, step, best_step, content):
    """Write a checkpoint, delete old ones, and plot the losses. Return whether it was written.

    content: the file in memory, or the exception raised while it was made.
    """
    path, start = Path(cfg.log_dir, f"checkpoint_{step:05d}.pt"), time.perf_counter()
    try:
        if isinstance(content, Exception):
            raise content
        write_whole(path, lambda file: file.write(content.getbuffer()))
    except Exception as e:  # for example, the disk is full
        print0(f"!!! NOT SAVED at step {step}: {summary_of(e)}")
        return False
    print0(f"{step:5d}/{cfg.max_steps} saved {path} in {time.perf_counter() - start:.1f} s")
    delete_old_checkpoints(cfg, step, best_step)
    with contextlib.suppress(Exception):  # the plot is optional: no error may end the run
        plot_curves(cfg.log_dir)
    return True

def delete_old_checkpoints(cfg, newest, best):
    """Keep the newest checkpoint, the best one, and those at multiples of their run's keep_every.

    If the best one could not be saved, keep all. newest, best: steps; best may be None.
    """
    found = find_checkpoints(cfg.log_dir)
    if best is not None and best not in found:
        return
    for step in found.keys() - {newest, best}:
        try:
            # An earlier checkpoint may have been saved with another keep_every
            keep_every = read_checkpoint(found[step])["config"]["keep_every"]
            if keep_every == 0 or step % keep_every != 0:
                found[step].unlink(missing_ok=True)
        except (OSError, UserError) as e:
            print0(f"!!! {found[step]} cannot be deleted: {summary_of(e)}")

# ---- Monitoring. log.txt gets every step; stdout gets only those that print_every selects
def print0(text):
    """Print text on rank 0 only."""
    if RANK == 0:
        # Write the line in a single call, so that it does not mix with one from the saving thread.
        # Ignore the errors caused by a full disk, a closed terminal, or a signal during a print
        with contextlib.suppress(OSError, RuntimeError):
            print(f"{text}\n", end="", flush=True)

def log_metric(run, step, metric, value):
    """Append a line "<step> <metric> <value>" to log.txt."""
    if run.log:
        text = str(value) if isinstance(value, int) else f"{value:.7g}"
        with contextlib.suppress(OSError):  # a full disk
            run.log.write(f"{step} {metric} {text}\n".encode())

def flops_per_token(model, T):
    """Return the operations per token of a forward and a backward pass.

    Each parameter takes 6, and attention to T tokens, counted without the causal mask, takes
    12 * n_layer * n_embd * T (Chowdhery et al. 2022, appendix B).
    """
    return (6 * sum(p.numel() for p in model.parameters())
            + 12 * model.config.n_layer * model.config.n_embd * T)

def read_metrics(folder):
    """Return {metric: {step: value}} from log.txt. If a step was repeated, its last line counts."""
    path, metrics = Path(folder, "log.txt"), defaultdict(dict)
    text = path.read_text(errors="replace") if path.exists() else ""
    for step, metric, value in re.findall(r"^(\d+) (\S+) (\S+)$", text, re.M):
        metrics[metric][int(step)] = float(value)
    return metrics

def plot_curves(folder):
    """Plot the losses in log.txt against the step, and save the figure as curves.png."""
    from matplotlib.figure import Figure  # not pyplot, which needs a display
    metrics, figure = read_metrics(folder), Figure(figsize=(6.5, 3.7), layout="constrained")
    axis = figure.add_subplot(xlabel="step", ylabel="loss, nats per token")
    for name in ("train", "val"):
        axis.plot(metrics[name].keys(), metrics[name].values(), linewidth=1, label=name)
    axis.legend(frameon=False)
    write_whole(Path(folder, "curves.png"), lambda file: figure.savefig(file, dpi=120))

# Use any attention kernel except cuDNN's, which spends up to 0.5 s planning for each new length
@sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
def sample_text(model, enc, cfg, seed):
    """Return sample_prompt and the model's continuation, which is cut off at <|endoftext|>."""
    device = next(model.parameters()).device
    prompt = encode(enc, cfg.sample_prompt, special=True).tolist() or [enc.eot_token]
    tokens = model.generate(
        torch.tensor([prompt], device=device), cfg.sample_tokens, temperature=cfg.temperature,
        top_k=cfg.top_k, generator=torch.Generator(device).manual_seed(seed))[0].tolist()
    if enc.eot_token in tokens[len(prompt):]:
        tokens = tokens[:tokens.index(enc.eot_token, len(prompt))]
    return enc.decode_bytes(tokens).decode("utf-8", errors="backslashreplace")

# ---- Hugging Face. A model is exported only if transformers computes the same logits
TIED = ("transformer.wte.weight", "lm_head.weight")  # the same matrix; ours has padding rows
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # (in, out) in Hugging Face's GPT-2

def converted(weights, n_rows):
    """Convert a state dict of our GPT into one of Hugging Face's GPT-2, or the other way round.

    In both directions, the same matrices are transposed, and the embedding gets n_rows rows: it is
    padded with zeros or cut. (F.pad() cuts if the number of rows to add is negative.)
    """
    return {key: F.pad(weight, (0, 0, 0, n_rows - len(weight))) if key in TIED
            else weight.t() if key.endswith(TRANSPOSED) else weight
            for key, weight in weights.items()}

def gpt_from_hugging_face(name, dropout, encoding):
    """Do what GPT.from_pretrained() does, for a Hugging Face folder or a model on the hub."""
    try:
        import transformers
        transformers.logging.disable_progress_bar()
        hf_model, info = transformers.GPT2LMHeadModel.from_pretrained(
            name, output_loading_info=True)
        if info["missing_keys"]:  # transformers has given these weights random values
            raise ValueError(f"it lacks {min(info['missing_keys'])}")
    except Exception as e:  # reading files and downloading may raise any exception
        raise UserError(f"init_from={name} is neither a .pt file nor a run's folder, and it cannot "
                        f"be loaded as a Hugging Face GPT-2 ({summary_of(e)}): check the name. "
                        "(To resume a run, repeat its command.)") from None
    c = hf_model.config
    # A vocabulary of 257 ids consists of the 256 bytes and <|endoftext|>
    encoding = {257: "bytes", 50257: "gpt2"}.get(c.vocab_size, encoding)
    if encoding == "gpt2" and has_other_ids(name, get_encoding(encoding)):
        raise UserError(f"The tokenizer in init_from={name} gives other ids than encoding="
                        f"{encoding}: use weights that were trained with this encoding.")
    model = GPT(GPTConfig(
        block_size=c.n_positions, vocab_size=c.vocab_size, n_layer=c.n_layer, n_head=c.n_head,
        n_embd=c.n_embd, dropout=dropout, encoding=encoding))
    load_weights(model, converted(hf_model.state_dict(), len(model.lm_head.weight)), name)
    if RANK == 0 and (differ := difference_of_logits(model, hf_model)) > 1e-3:
        print0(f"!!! With the weights in {name}, the logits differ from those of transformers by "
               f"{differ:.1%}: the GPT in train_gpt2.py is not this GPT-2.")
    return model

def export(log_dir):
    """Export the best model of a run to log_dir/hf, or print why this is not possible."""
    folder, path = Path(log_dir, "hf"), best_checkpoint(log_dir)
    try:
        save_hugging_face(GPT.from_pretrained(path), folder)
        print0(f"exported {path} to {folder}/, for transformers and hellaswag.py")
    except Exception as e:  # for example, transformers may be missing
        print0(f"Not exported: {summary_of(e)}.")

def save_hugging_face(model, folder):
    """Write a model, which must be on the CPU, and its tokenizer in Hugging Face's format.

    Raise UserError if transformers would return different logits.
    """
    import transformers
    transformers.logging.disable_progress_bar()
    c, end = model.config, get_encoding(model.config.encoding).eot_token
    hf_model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.block_size, n_layer=c.n_layer, n_head=c.n_head,
        n_embd=c.n_embd, bos_token_id=end, eos_token_id=end, pad_token_id=end,
        n_ctx=c.block_size))  # llama.cpp's converter requires n_ctx
    hf_model.generation_config.max_length = c.block_size  # otherwise a pipeline exceeds the context
    load_weights(hf_model, converted(model.state_dict(), c.vocab_size), "this run")
    differ = difference_of_logits(model, hf_model)
    if not differ < 1e-3:  # also true for NaN
        raise UserError(f"With the weights of this run, transformers' logits differ by "
                        f"{differ:.1%}: the GPT in train_gpt2.py is no longer a GPT-2")
    hf_model.save_pretrained(folder, max_shard_size="50GB")  # in one file
    try:
        save_tokenizer(get_encoding(c.encoding), folder, c.block_size)
    except ValueError as e:
        print0(f"The export has no tokenizer: {summary_of(e)}.")

@torch.no_grad()
def difference_of_logits(model, hf_model):
    """Return the largest relative difference of two models' logits at any position.

    The models are a GPT and a Hugging Face GPT-2, both on the CPU.
    """
    c = model.config
    idx = torch.randint(c.vocab_size, (1, c.block_size), generator=torch.Generator().manual_seed(0))
    # Include <|endoftext|>, the last id, to notice an edit that stops attention at it
    idx[0, c.block_size // 2] = c.vocab_size - 1
    theirs = hf_model.float().eval()(idx).logits
    differences = (model(idx)[0] - theirs).norm(dim=-1) / theirs.norm(dim=-1)  # (1, T)
    return differences.max().item()

# ---- The machine. For device, dtype and compile, "auto" selects a fast option
def set_up_device(name):
    """Return the torch.device with this name ("auto" chooses one), prepared for training.

    Raise UserError if it cannot be used.
    """
    no_gpu_message = (f"torch {torch.__version__} sees no GPU: install the build of PyTorch for "
                      "your driver (pytorch.org), or a newer driver.")
    if name == "auto":
        mps = torch.backends.mps.is_available() and WORLD_SIZE == 1  # gloo cannot use MPS tensors
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
        if name == "cpu" and shutil.which("nvidia-smi"):
            print0(f"!!! Training on the CPU: {no_gpu_message}")
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        raise UserError(f"device={name} is unknown: use auto, cuda, cuda:1, mps or cpu.")
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"  # the rank among this machine's processes
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(f"device={name}: {no_gpu_message}")
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32
    if device.type == "cpu":
        # Make glibc keep freed memory for the next step. By default each array above 32 MB gets new
        # memory, which the operating system has to clear, and a step of the 124M model with 8 x 256
        # tokens in bfloat16 takes 1.5 to 2.2 times as long
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-4, 0)   # M_MMAP_MAX: no array gets a mapping of its own
            libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: freed memory is never returned to the system
    return device

def join_processes(device):
    """Form the group of all processes that torchrun started."""
    # The processes find each other through a key-value store in torchrun. If one of them dies,
    # torchrun may start all of them again (--max-restarts), with the same store, in which they must
    # not find the addresses of dead processes. So they put a new prefix before each key
    # torch adds a prefix with the number of restarts, which may differ between machines, so fix it
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    store, *_ = next(dist.rendezvous("env://"))
    gpu = device if device.type == "cuda" else None
    dist.init_process_group(
        backend="nccl" if gpu else "gloo", store=dist.PrefixStore(agree_on_prefix(store), store),
        rank=RANK, world_size=WORLD_SIZE, device_id=gpu, timeout=datetime.timedelta(hours=1))

def agree_on_prefix(store):
    """Return a random string that is the same in all processes and different after each restart.

    The store still holds what processes before a restart have written, so a fixed key for the
    string will not do. Therefore:

    1. Each rank except 0 chooses a random key, stores this key under its rank, and waits for a
       value under the random key.
    2. Rank 0 chooses the string, looks up the random key of each rank, and stores the string there.
    3. A key that rank 0 has found may be that of a dead process. So it repeats step 2 until all
       other ranks have added themselves to the readers of its string.
    """
    if RANK != 0:
        key = os.urandom(8).hex()
        store.set(f"key of rank {RANK}", key)
        prefix = store.get(key).decode()  # waits until the key exists
        store.add(f"readers of {prefix}", 1)
        return prefix
    prefix = os.urandom(8).hex()
    while store.add(f"readers of {prefix}", 0) < WORLD_SIZE - 1:  # adding 0 returns the number
        for rank in range(1, WORLD_SIZE):
            store.set(store.get(f"key of rank {rank}").decode(), prefix)
        time.sleep(0.05)
    return prefix

def share(content, device):
    """Return rank 0's value in all processes, with tensors on `device`.

    content: on rank 0, a tensor, another value, or a dict of such values and dicts. The values of a
    dict are sent one by one, since sending a whole checkpoint at once would need far more memory.
    On the other ranks, `content` is ignored.
    """
    box = [dict.fromkeys(content) if isinstance(content, dict) else content]  # first, only the keys
    if WORLD_SIZE > 1:
        dist.broadcast_object_list(box)  # replaces the list's element with that of rank 0
    if isinstance(box[0], dict):
        return {key: share(content[key] if RANK == 0 else None, device) for key in box[0]}
    return box[0].to(device, copy=True) if torch.is_tensor(box[0]) else box[0]

def check_processes_agree(run, dtype, start):
    """Raise UserError, on every rank, if the processes have different code, data or settings.

    start: the step at which the run starts. Another machine's log_dir may hold older checkpoints or
    none, but if it holds a newer one, rank 0 has read the wrong checkpoint.
    """
    may_differ = ("data", "log_dir", "device", "compile")
    mine = {"the script's checksum": zlib.crc32(Path(__file__).read_bytes()),
            **run.data_facts,
            **{name: value for name, value in asdict(run.cfg).items() if name not in may_differ},
            "dtype": str(dtype),  # instead of the setting, which may be auto
            # It is above `start` only if this machine has a newer checkpoint
            "the newest step": max([start, *find_checkpoints(run.cfg.log_dir).keys()])}
    all_ranks = [mine] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(all_ranks, mine)
    for rank, theirs in enumerate(all_ranks):
        values = [f"{name} is {value} on rank 0, and {theirs.get(name)} on rank {rank}"
                  for name, value in all_ranks[0].items() if theirs.get(name) != value]
        if values:
            raise UserError(f"The processes disagree: {'; '.join(values[:3])}. Use the same "
                            "script, data, settings and kind of GPU everywhere, and copy the "
                            "newest checkpoint to the log_dir of rank 0's machine.")

def pick_dtype(choice, device):
    """Return the dtype for matrix multiplications. "auto" selects the fastest one that is safe."""
    if choice != "auto":
        return getattr(torch, choice)
    if device.type == "cuda":
        # (torch.cuda.is_bf16_supported() is also true on V100 and T4, which only emulate bfloat16)
        return (torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0)
                else torch.float16)
    cpu = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return torch.bfloat16 if cpu.get("avx512_bf16") or cpu.get("amx_bf16") else torch.float32

def pick_compile(choice, device):
    """Return whether to use torch.compile. Triton needs compute capability 7.0 or higher."""
    return choice if choice != "auto" else (
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0)
        and importlib.util.find_spec("triton") is not None)  # often missing on Windows

def choose_attention_kernels(cfg, device, dtype):
    """Disable kernels of scaled_dot_product_attention that are slow or wrong in this run."""
    # On a CPU in bfloat16, the backward pass of flash attention is slow for short rows: it takes
    # 11.8 ms of a step with the preset SMALL (T=64), while the math kernel takes 5.6 ms
    short = device.type == "cpu" and dtype == torch.bfloat16 and cfg.T < 256
    torch.backends.cuda.enable_flash_sdp(not short)  # despite its name, it also applies to CPUs
    # cuDNN's kernel, the fastest on H100 and newer, rounds a dropout of 0.1 to 1/16 in some cases
    torch.backends.cuda.enable_cudnn_sdp(cfg.dropout == 0)

# ---- The start: build a Run from the command-line flags, and train
#
# run                      | weights and shape of the model   | optimizer state and step
# new run                  | random (seed), Config            | none, 0
# new run with init_from   | those in init_from               | none, 0
# new run with branch_from | those in the checkpoint          | those in the checkpoint
# resumed run              | those in its newest checkpoint   | those in its newest checkpoint
#
# The settings that Config shares with GPTConfig and that loaded weights determine: n_layer, n_head,
# n_embd and encoding. A setting that you add to both is included
MODEL_SETTINGS = {f.name for f in fields(GPTConfig) if hasattr(Config, f.name)} - {"dropout"}

def configure(flags):
    """Return the Config for command-line flags, {name: value}.

    Flags override the preset, which overrides Config. Raise UserError for an invalid value.
    """
    data, preset, note = os.path.expanduser(flags.get("data", Config.data)), "Config", ""
    # If no other `data` was chosen, by a flag or by editing Config, fall back to input.txt
    if "data" not in flags and data == "edu_fineweb10B" and not find_shards(data)[0]:
        data = str(Path(__file__).resolve().with_name("input.txt"))
        for_gpus = "RANK" in os.environ or torch.cuda.is_available() or shutil.which("nvidia-smi")
        if for_gpus and not flags.get("sample"):
            raise UserError("edu_fineweb10B/ holds no shards. To train GPT-2 (124M), first run "
                            "python fineweb.py. To train a small model on Shakespeare, add "
                            f"--data={shlex.quote(data)}.")
        note = ("Quick start on Shakespeare, since edu_fineweb10B/ holds no shards.\n"
                "To train GPT-2 (124M), run python fineweb.py, and repeat this command.\n\n")
    # SMALL for a text or shards of bytes, FINETUNE for pretrained weights and a text, else Config
    is_text = os.path.isfile(data)
    if is_text or read_manifest(data).get("settings", {}).get("encoding") == "bytes":
        preset = "SMALL"
    if flags.get("init_from", Config.init_from) != "scratch":
        preset = "FINETUNE" if is_text else "Config"
    cfg = Config(**(PRESETS[preset] | flags | {"data": data}))
    paths = ("init_from", "branch_from", "log_dir")  # in --log_dir=~/log, shells do not expand ~
    # --max_steps replaces the epochs of FINETUNE
    cfg = replace(cfg, epochs=0.0 if "max_steps" in flags else cfg.epochs,
                  **{name: os.path.expanduser(getattr(cfg, name)) for name in paths})
    check_values(cfg, flags)
    if not cfg.sample:
        print0(f"{note}settings  {preset}; flags: {', '.join(flags) or 'none'}")
    return cfg

def check_values(cfg, flags):
    """Raise UserError if a setting has a value that would be ignored or misunderstood."""
    at_least_1 = ("total_batch_size", "B", "T", "n_layer", "n_head", "n_embd", "val_tokens")
    for setting in fields(cfg):
        name, value, choices = setting.name, getattr(cfg, setting.name), get_args(setting.type)
        if choices and value not in choices:
            raise UserError(f"{name}={value}: choose one of {', '.join(map(str, choices))}.")
        lowest = 1 if name in at_least_1 else 0
        if setting.type in (int, float) and not lowest <= value < math.inf:
            raise UserError(f"{name}={value}: it must be at least {lowest}.")
    if cfg.min_lr > cfg.max_lr or cfg.max_lr == 0:
        raise UserError(f"max_lr={cfg.max_lr} must be above 0, and not below min_lr={cfg.min_lr}.")
    if cfg.branch_from or cfg.init_from != "scratch":
        for name in flags.keys() & (MODEL_SETTINGS - {"encoding"}):
            raise UserError(f"--{name} contradicts init_from or branch_from, because the weights "
                            "determine the shape of the model: leave it out.")
    if cfg.branch_from and cfg.init_from != "scratch":
        raise UserError("init_from contradicts branch_from: leave one of them out.")
    if cfg.n_embd % cfg.n_head:
        raise UserError(f"n_embd={cfg.n_embd} must be a multiple of n_head={cfg.n_head}.")

def build_model(cfg, checkpoint=None):
    """Return the GPT of a run. Raise UserError if init_from cannot be read.

    checkpoint: the one from which the run is resumed or branches, or None. If it is given, it
    determines the model's shape. The weights are random until restore() loads those in it.
    """
    if checkpoint:
        return GPT(replace(GPTConfig(**checkpoint["gpt_config"]), dropout=cfg.dropout))
    if cfg.init_from != "scratch":
        return GPT.from_pretrained(cfg.init_from, cfg.dropout, cfg.encoding)
    return GPT(GPTConfig(
        block_size=cfg.T, vocab_size=get_encoding(cfg.encoding).n_vocab, dropout=cfg.dropout,
        **{name: getattr(cfg, name) for name in MODEL_SETTINGS}), cfg.seed)

def with_model_settings(cfg, model):
    """Return the Config with the encoding and the shape of a model whose weights were loaded.

    If T is longer than the model's context, it is lowered if it is a default (in Config or SMALL).
    Raise UserError if it is not, or if the encoding has a different number of ids.
    """
    c = model.config
    if cfg.T > c.block_size and cfg.T not in (Config.T, SMALL["T"]):
        raise UserError(f"T={cfg.T} is longer than the context of the weights in "
                        f"{cfg.branch_from or cfg.init_from}: set --T={c.block_size}, or less.")
    if get_encoding(c.encoding).n_vocab != c.vocab_size:
        raise UserError(f"The weights in {cfg.init_from} have {c.vocab_size} token ids, but "
                        f"encoding={c.encoding} has a different number: set --encoding.")
    return replace(cfg, T=min(cfg.T, c.block_size),
                   **{name: getattr(c, name) for name in MODEL_SETTINGS})

def with_batch_and_steps(cfg, rows_per_epoch):
    """Return the Config with B lowered to divide the batch, and max_steps computed from epochs.

    Raise UserError if total_batch_size cannot be divided among the processes.
    """
    smallest = cfg.T * WORLD_SIZE
    rows_per_process, rest = divmod(cfg.total_batch_size, smallest)
    if rest:
        raise UserError(f"total_batch_size={cfg.total_batch_size} is not a multiple of T * "
                        f"processes = {smallest}. Use a multiple of {8 * smallest}, so that B can "
                        f"be 8, or at least of {smallest}.")
    max_steps = math.ceil(cfg.epochs * rows_per_epoch / (cfg.total_batch_size // cfg.T))
    return replace(cfg, max_steps=max_steps or cfg.max_steps, B=max(
        B for B in range(1, min(cfg.B, rows_per_process) + 1) if rows_per_process % B == 0))

def print_summary(run, dtype, compiled):
    """Print the machine, the settings, and the amount of training."""
    cfg, n_tokens = run.cfg, run.cfg.max_steps * run.cfg.total_batch_size
    gpu = f" ({torch.cuda.get_device_name(run.device)})" if run.device.type == "cuda" else ""
    parts = [f"{sum(p.numel() for p in run.model.parameters()):,} parameters"]
    for optimizer in run.optimizers:
        dims = [p.dim() for group in optimizer.param_groups for p in group["params"]]
        n_vectors = sum(dim < 2 for dim in dims)
        parts.append(f"{type(optimizer).__name__} trains {len(dims) - n_vectors} matrices and "
                     f"{n_vectors} vectors")
    print0(f"machine   {WORLD_SIZE} x {run.device.type}{gpu}, torch {torch.__version__}, {dtype}, "
           f"compile={compiled}\n{cfg}\n"
           f"model     {'; '.join(parts)}\n"
           f"training  {cfg.max_steps:,} steps (warmup {cfg.warmup_steps:,}), {n_tokens:,} tokens, "
           f"{n_tokens / cfg.T / run.train_loader.rows_per_epoch:.2g} epochs\n"
           f"log       {Path(cfg.log_dir, 'log.txt')}, from step {run.step} on")
    if 0 < cfg.max_steps < cfg.warmup_steps:
        print0(f"!!! max_steps is below warmup_steps={cfg.warmup_steps}, so the learning rate does "
               "not reach max_lr.")

def start_log_dir(run, resumed):
    """Write config.json and a copy of this script, and open log.txt, in log_dir.

    A copy is named after the step from which it trained the run, such as train_gpt2_00500.py. Raise
    UserError if the code of a complete run was edited, or if a new run would replace files of
    another program. The files of a run without a checkpoint are replaced. But its log is renamed if
    it has more than three validations, which shows that checkpoints have been removed.
    """
    folder, code = Path(run.cfg.log_dir), Path(__file__).read_bytes()
    config, log = folder / "config.json", folder / "log.txt"
    copies = sorted(folder.glob("train_gpt2_[0-9][0-9][0-9][0-9][0-9]*.py"),
                    key=lambda path: (len(path.name), path.name))  # sorted by step
    if not resumed:
        before = [path.read_bytes() if path.exists() else b"" for path in (config, log)]
        if any(before) and b'"total_batch_size"' not in before[0]:
            raise UserError(f"log_dir={folder} holds a log.txt or config.json of another program: "
                            "choose a different --log_dir.")
        if len(re.findall(rb"^\d+ val ", before[1], re.M)) > 3:
            os.replace(log, folder / "log_before.txt")
            print0(f"!!! {folder}/ holds the log of a run, but no checkpoint. The log is now "
                   "log_before.txt, and a new run begins.")
        while copies:
            copies.pop().unlink()
    last_code = copies[-1].read_bytes() if copies else None
    if last_code not in (None, code):
        if run.step == run.cfg.max_steps:  # it would only evaluate and export old weights
            raise UserError(f"The run in {folder}/ has taken all steps, and the script was edited: "
                            f"choose a different --log_dir. (To go on, delete {copies[-1]}.)")
        print0(f"!!! train_gpt2.py was edited: from step {run.step} on, the new code is used.")
    write_whole(config, lambda file: file.write(json.dumps(asdict(run.cfg), indent=1).encode()))
    if last_code != code:
        write_whole(folder / f"train_gpt2_{run.step:05d}.py", lambda file: file.write(code))
    run.log = open(log, "ab" if resumed else "wb", buffering=0)
    log_metric(run, run.step, "parameters", sum(p.numel() for p in run.model.parameters()))

def stop_on_signals(run):
    """Make Ctrl-C, SIGTERM and SIGHUP finish the current step, save the run, and end training.

    A second signal ends the process at once, except under torchrun, which sends each Ctrl-C twice.
    """
    def receive(number, frame):
        run.signalled = True
        print0("Stopping after this step is finished and saved.")
        if "RANK" not in os.environ:
            signal.signal(number, signal.SIG_DFL)
    # (Windows has no SIGHUP, and nohup makes a process ignore it)
    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, receive)

def set_up(cfg, device):
    """Return the Run for train(). If log_dir holds a checkpoint, the run continues from it.

    Rank 0 reads the checkpoint, and the others get it from there, so they need no shared disk.
    """
    source = newest_checkpoint(cfg.log_dir)
    resumed = share(source is not None, device)  # whether rank 0 has a checkpoint
    if cfg.branch_from and not resumed:
        source = newest_checkpoint(cfg.branch_from) or cfg.branch_from
    checkpoint = share(read_checkpoint(source) if source and RANK == 0 else None, device)
    model = build_model(cfg, checkpoint)
    if cfg.branch_from or cfg.init_from != "scratch":
        cfg = with_model_settings(cfg, model)  # otherwise, restore() compares the settings
    enc = get_encoding(cfg.encoding)
    train_loader, val_loader = open_data(cfg, enc)
    cfg = with_batch_and_steps(cfg, train_loader.rows_per_epoch)
    dtype, compiled = pick_dtype(cfg.dtype, device), pick_compile(cfg.compile, device)
    choose_attention_kernels(cfg, device, dtype)
    model.to(device)
    muon_dtype = dtype if dtype == torch.bfloat16 else torch.float32  # float16 would overflow
    run = Run(
        cfg=cfg, device=device, model=model, ddp_model=model,
        optimizers=configure_optimizers(model, cfg, muon_dtype),
        scaler=torch.amp.GradScaler(device.type, enabled=dtype == torch.float16),
        autocast=partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32),
        train_loader=train_loader, val_loader=val_loader,
        data_facts=data_facts(train_loader.shards, val_loader.shards))
    check_processes_agree(run, dtype, checkpoint["step"] if checkpoint else 0)
    if checkpoint:
        restore(run, checkpoint, branch=not resumed)
    if RANK == 0:
        check_loadable(checkpoint_of(run))
        start_log_dir(run, resumed)
    if compiled:
        model.compile()
    if WORLD_SIZE > 1:
        # torch.compile begins a new graph where a bucket of DDP ends. With buckets of 25 MB (the
        # default), there would be 14 graphs. gradient_as_bucket_view avoids copying the gradients
        run.ddp_model = DDP(model, bucket_cap_mb=100, gradient_as_bucket_view=True)
    if cfg.hellaswag_every:
        import hellaswag
        run.hella = hellaswag.prepare_on_all_ranks(model, enc.encode_ordinary)
    print_summary(run, dtype, compiled)
    stop_on_signals(run)
    return run

def print_samples(cfg, device):
    """Print cfg.sample samples from init_from or, if it is "scratch", from the run in log_dir."""
    folder = cfg.log_dir if cfg.init_from == "scratch" else cfg.init_from
    checkpoint = best_checkpoint(folder)
    if not checkpoint and cfg.init_from == "scratch":
        raise UserError(f"log_dir={folder} has no weights: train, or set --init_from.")
    source = checkpoint or folder
    model = GPT.from_pretrained(source, encoding=cfg.encoding).to(device)
    cfg = with_model_settings(cfg, model)
    enc = get_encoding(cfg.encoding)
    print0(f"Samples from {source}:")
    for i in range(cfg.sample):
        print0(sample_text(model, enc, cfg, seed=cfg.seed + i) + "\n---")

def run_command(argv):
    """Train, or print samples. argv: the flags, or None to use the command line."""
    cfg = configure(parse_flags(Config, __doc__, PRESETS, argv))
    device = set_up_device(cfg.device)
    if "RANK" in os.environ:  # torchrun started this process
        join_processes(device)
    if cfg.sample:
        print_samples(cfg, device)
        return
    # The lock is held as long as it is referenced
    lock = lock_folder("log_dir", cfg.log_dir) if RANK == 0 else None  # noqa: F841
    run = set_up(cfg, device)
    with run.writer:  # if train() fails, a save in progress is still finished
        train(run)

def main(argv=None):
    """Do what the flags ask. On a UserError, print its message and exit with status 1.

    argv: the flags as a list, such as ["--max_steps=20"], or None to use the command line.
    """
    with contextlib.suppress(AttributeError):  # a notebook's stdout has no reconfigure()
        sys.stdout.reconfigure(errors="backslashreplace")  # samples may contain any character
    status = 0
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)  # until set_up() has ended
    try:
        run_command(argv)
    except Exception as error:
        status = 1
        if (isinstance(error, (torch.OutOfMemoryError, MemoryError))
                or "can't allocate memory" in str(error)):  # torch's RuntimeError on a CPU
            error = UserError("Out of memory. Choose a smaller --B; it trains the same model.")
        elif "by peer" in str(error):  # part of gloo's error message
            error = UserError("The connection to another process is lost: see its message.")
        if isinstance(error, UserError):
            print(f"train_gpt2.py: {error}", file=sys.stderr, flush=True)
        else:
            sys.excepthook(type(error), error, error.__traceback__)  # print the traceback
    if dist.is_initialized():
        # Exit at once. A normal exit may wait for processes that wait for this one, and a thread of
        # gloo may abort it
        os._exit(status)
    signal.signal(signal.SIGINT, handler)  # for notebooks
    if status:
        sys.exit(status)

if __name__ == "__main__":
    main()
