"""Train GPT-2 from scratch, on a CPU or on one or more GPUs.

    python train_gpt2.py --data=input.txt    # train a small GPT on Shakespeare
    python fineweb.py       # write shards of FineWeb-Edu to edu_fineweb10B/
    torchrun --standalone --nproc_per_node=8 train_gpt2.py    # GPT-2 (124M)
    tail -f log/log.txt     # lines of the form "<step> <metric> <value>"

To change a setting, edit the constants in Config, or pass a flag
(--max_lr=1e-3). With a text file or --encoding=bytes, the preset SMALL
overrides some of them; with pretrained weights, FINETUNE does. Edit them there.

Ctrl-C saves the run and stops it. To resume the run, repeat the command. What
is loaded at the start depends on log_dir and init_from:

    start      log_dir holds         weights from    optimizer state, step
    new        no checkpoint         random (seed)   none, 0
    init_from  no checkpoint         init_from       none, 0
    resumed    the run's checkpoint  the checkpoint  from the checkpoint
    branched   a copied checkpoint   the checkpoint  from the checkpoint

To branch, that is, to continue a run with other settings, copy one of its
checkpoints to a new folder, and set log_dir to this folder.

To train on two machines, run this on each of them. Put log_dir on a disk that
they share, or copy the newest checkpoint to each machine before resuming:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=2 --max-restarts=3 \\
        --nproc_per_node=8 --rdzv_backend=c10d \\
        --rdzv_endpoint=FIRST_MACHINE:29500 train_gpt2.py

One idea keeps the script simple: the data read at each step is a function of
(seed, step). Therefore, a checkpoint need not record what has been read, and,
apart from rounding and dropout masks, the micro-batch size B and the number of
GPUs affect only speed and memory.

The file is in reading order: constants, GPT-2, data, optimizers, training, the
start. Read the rest when needed: checkpoints, log, Hugging Face, the machine.
"""
import contextlib
import ctypes
import datetime
import importlib.util
import io
import json
import math
import os
import re
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

# fineweb.py tokenizes FineWeb-Edu. It also contains the helpers that all three scripts share.
# UserError is a subclass of SystemExit: Python prints its message and exits with status 1
from fineweb import (
    UserError, encode, get_encoding, lock_folder, parse_flags, save_tokenizer, summary_of,
    write_whole)

# torchrun starts one process per GPU and gives each a number, its rank. Only rank 0 prints and
# writes files. (Slurm may set WORLD_SIZE but not RANK, in which case there is only one process)
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1

# ---- Constants. --help prints the comment at the end of each line
@dataclass(frozen=True)
class Config:
    """The settings: GPT-2 (124M) with GPT-3's hyperparameters (Brown et al. 2020, table 2.1)."""
    data: str = "edu_fineweb10B"    # folder of .npy token shards, or a UTF-8 text file
    encoding: str = "gpt2"          # name of a tiktoken encoding, or bytes (needs no download)
    shuffle: bool = True            # shuffle the training data anew in each epoch
    seed: int = 1337                # determines the initial weights, data order and samples
    # B affects only memory and speed. In each step, a process reads total_batch_size / T / (number
    # of processes) rows. configure() lowers B until it divides this number
    total_batch_size: int = 524288  # tokens per optimizer step, a multiple of T * processes
    B: int = 64                     # micro-batch size: rows per forward pass
    T: int = 1024                   # tokens per row (the context length)
    # The model: n_layer/n_head/n_embd is 12/12/768 for 124M, 24/16/1024 for 350M, 36/20/1280 for
    # 774M and 48/25/1600 for 1.5B
    n_layer: int = 12               # number of blocks
    n_head: int = 12                # attention heads per block
    n_embd: int = 768               # width of the model, a multiple of n_head
    dropout: float = 0.0            # fraction of activations set to 0 in training; GPT-2 used 0.1
    init_from: str = "scratch"      # weights: scratch, gpt2 ... gpt2-xl, a folder or a .pt file
    # The optimizer. GPT-3's max_lr is 6e-4 for 125M, 3e-4 for 350M, 2.5e-4 for 760M, 2e-4 for 1.3B.
    # For AdamW at widths 64 to 256, the best of the tried rates was near 6e-4 * 768 / n_embd
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: Muon in the blocks, AdamW elsewhere
    max_lr: float = 6e-4            # peak learning rate
    beta1: float = 0.9              # AdamW: decay rate of the mean of the gradient
    beta2: float = 0.95             # AdamW: decay rate of the mean of the squared gradient
    muon_lr_ratio: float = 1.0      # Muon's learning rate divided by AdamW's
    muon_momentum: float = 0.95     # Muon: decay rate of the mean of the gradient
    min_lr: float = 6e-5            # learning rate at max_steps
    lr_shape: Literal["cosine", "linear", "wsd"] = "cosine"  # shape of the decay to min_lr
    decay_steps: int = 3800         # wsd only: number of final steps with a linear decay
    warmup_steps: int = 715         # steps of linear warmup (375 M tokens, as in GPT-3)
    max_steps: int = 19073          # optimizer steps (10 B tokens); 0 = only evaluate and sample
    weight_decay: float = 0.1       # weight decay of matrices and embeddings
    grad_clip: float = 1.0          # clip the gradient norm to this; 0 = no clipping
    # Monitoring. For the settings that end in _every, 0 means never
    print_every: int = 1            # steps between lines on stdout; log.txt has every step
    eval_every: int = 250           # steps between validations, each of which also saves the run
    keep_every: int = 5000          # steps between checkpoints that are never deleted
    val_tokens: int = 10485760      # tokens per validation; each validation reads the same ones
    hellaswag_every: int = 250      # steps between evaluations on HellaSwag
    sample_every: int = 1000        # steps between samples
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

# For a text file or --encoding=bytes: a small GPT, sized for two CPU cores
SMALL = dict(
    encoding="bytes", total_batch_size=2048, B=32, T=64, n_layer=3, n_head=4, n_embd=128,
    optimizer="muon", max_lr=7e-3, muon_lr_ratio=2.0, min_lr=0.0, lr_shape="linear",
    warmup_steps=20, max_steps=1650, weight_decay=0.2, print_every=10, eval_every=330,
    val_tokens=131072, hellaswag_every=0, sample_every=825, sample_prompt="\n\n",
    sample_tokens=300, log_dir="log_small", compile=False)

# For fine-tuning pretrained weights (init_from)
FINETUNE = dict(
    total_batch_size=2048, B=2, max_lr=1e-4, min_lr=0.0, lr_shape="linear", warmup_steps=10,
    max_steps=600, eval_every=100, keep_every=0, val_tokens=131072, hellaswag_every=0,
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
    """GPT-2 (Radford et al. 2019, section 2.3), with the parameter names of Hugging Face's GPT-2.

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

        Random numbers depend only on the seed and the parameter's name, so they do not change when
        a layer is added elsewhere. Biases are set to 0. Other vectors keep the values that their
        module gives them, for example 1 for the gains of LayerNorm.
        """
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                p.zero_()
            elif p.dim() >= 2:
                # 0.02 fits a width of 768. The outputs of a matrix grow with std * sqrt(n_embd), so
                # other widths get another std, for example 0.049 (128) or 0.0139 (1600). BLOOM used
                # almost the same, sqrt(1 / (3 n_embd)) (Smith et al. 2022); GPT-2 always used 0.02
                std = 0.02 * math.sqrt(768 / self.config.n_embd)
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
        encoding: the encoding of Hugging Face weights. It is ignored if the vocabulary has 257 ids
        (the bytes and <|endoftext|>) or 50257 ids (GPT-2's).
        Raise UserError if the weights cannot be read or do not fit this class.
        """
        source = best_checkpoint(source) or source  # (None if source is not a run's folder)
        if not str(source).endswith(".pt"):
            return gpt_from_hugging_face(source, dropout, encoding)
        checkpoint = read_checkpoint(source, "cpu")
        model = cls(replace(checkpoint["gpt_config"], dropout=dropout))
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
    all rows would make a network disk read all shards at once.) Row numbers continue from one epoch
    to the next: if the shards have 12 rows, epoch 1 reads them as row numbers 12 to 23.

    With `shift`, which is used for shuffled text files, each epoch cuts the text at different
    tokens, so that even a small text yields new rows: they begin at tokens max(0, i T - offset),
    with an offset from 0 to T - 1 that differs between epochs.

    shards: arrays of token ids (N,), for example memory-mapped files.
    vocab_size: batch() raises UserError if a token id is vocab_size or larger.
    """
    def __init__(self, shards, T, vocab_size=2**32, seed=0, shuffle=False, shift=False):
        self.shards, self.T, self.vocab_size = shards, T, vocab_size
        self.seed, self.shuffle, self.shift = seed, shuffle, shift
        self.rows_in_shard = [max(0, len(shard) - 1) // T for shard in shards]
        self.rows_per_epoch = sum(self.rows_in_shard)

    def locate(self, row):
        """Return the shard (its index) and the token at which the row with this number begins."""
        epoch, rest = divmod(row, self.rows_per_epoch)
        for shard in order_of(len(self.shards), self.shuffle, self.seed, epoch).tolist():
            n_rows = self.rows_in_shard[shard]
            if rest < n_rows:
                break
            rest -= n_rows  # the row is in a later shard
        start = int(order_of(n_rows, self.shuffle, self.seed, epoch, shard)[rest]) * self.T
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
    """Return the numbers 0 ... n - 1 in order or, if `shuffle`, shuffled with `key` as the seed."""
    # RandomState gives the same result in every version of NumPy
    return np.random.RandomState(key).permutation(n) if shuffle else np.arange(n)

def open_data(cfg, enc):
    """Return the loaders for training and validation. enc: the tiktoken.Encoding of the run.

    In a text file, the characters <|endoftext|> become the special token that separates documents.
    Raise UserError if the data is unreadable or too short, or if it needs a different encoding.
    """
    is_text = os.path.isfile(cfg.data)
    if is_text:  # the last tenth is for validation
        try:
            text = Path(cfg.data).read_bytes().decode("utf-8")
        except UnicodeDecodeError as e:
            raise UserError(f"{cfg.data} is not UTF-8 ({e}): convert it to UTF-8.")
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

def open_shards(folder, encoding):
    """Return the training shards and the validation shards of a folder, as two lists of arrays.

    Raise UserError if there are none, if one is damaged, or if they need a different encoding.
    """
    # Hidden files are left out, such as the ._*.npy files that macOS makes on other disks
    train, val = (sorted(Path(folder).glob(f"[!.]*_{split}_*.npy")) for split in ("train", "val"))
    if not (train and val):
        raise UserError(f"data={folder} holds no shards (*_train_*.npy and *_val_*.npy): make them "
                        "with python fineweb.py, or train a small model with --data=input.txt.")
    manifest = Path(folder, "manifest.json")
    if manifest.exists():  # Shards made by other scripts have no manifest
        needed = json.loads(manifest.read_bytes())["settings"]["encoding"]
        if needed != encoding:
            raise UserError(f"The shards in {folder}/ need --encoding={needed}, not {encoding}.")
    return list(map(open_shard, train)), list(map(open_shard, val))

def open_shard(path):
    """Return the token ids (N,) of a shard, memory-mapped. Raise UserError if it is damaged."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as e:
        raise UserError(f"{path} is not a complete shard ({summary_of(e)}): delete it, and repeat "
                        "the command that made it.")

def data_facts(train, val):
    """Return the number of tokens in two lists of shards, and a checksum of their first tokens."""
    return {"data_tokens": sum(map(len, train + val)),
            "data_checksum": zlib.crc32(np.concatenate([shard[:4096] for shard in train + val]))}

# ---- Learning rate and optimizers
def get_lr(step, cfg):
    """Return AdamW's learning rate at a step: linear warmup to max_lr, then decay to min_lr.

    With lr_shape="wsd" (warmup, stable, decay), the rate decays only in the last decay_steps steps.
    Muon's learning rate is muon_lr_ratio times as large.
    """
    if step < cfg.warmup_steps:
        return cfg.max_lr * (step + 1) / cfg.warmup_steps
    start = cfg.warmup_steps  # first step of the decay
    if cfg.lr_shape == "wsd":
        start = max(start, cfg.max_steps - cfg.decay_steps)
    progress = min(1.0, max(0, step - start) / max(1, cfg.max_steps - start))
    remaining = 1 - progress
    if cfg.lr_shape == "cosine":
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
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
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                average = state["momentum_buffer"]  # the running average of the gradient
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
    (requires_grad=False) are left out. The learning rates are the peaks, which update_weights()
    scales. muon_dtype: the dtype in which Muon orthogonalizes.
    """
    # No decay for biases and gains: pulling them to 0 would only distort the model
    decay, no_decay = dict(params=[]), dict(params=[], weight_decay=0)
    # c_attn.weight stacks the matrices of query, key and value
    stacked, single = dict(params=[], n_parts=3), dict(params=[])
    for name, p in model.named_parameters():
        group = decay if p.dim() >= 2 else no_decay
        if cfg.optimizer == "muon" and ".h." in name and p.dim() == 2:
            group = stacked if name.endswith("c_attn.weight") else single
        if p.requires_grad:
            group["params"].append(p)
    # With fused=True, one kernel updates all parameters
    optimizers = [torch.optim.AdamW(
        [decay, no_decay], lr=cfg.max_lr, betas=(cfg.beta1, cfg.beta2),
        weight_decay=cfg.weight_decay, fused=True)]
    if cfg.optimizer == "muon":
        optimizers.append(Muon(
            [stacked, single], lr=cfg.max_lr * cfg.muon_lr_ratio, weight_decay=cfg.weight_decay,
            momentum=cfg.muon_momentum, dtype=muon_dtype))
    return optimizers

# ---- Training
@dataclass
class Run:
    """Everything that train() uses. set_up() builds it."""
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
    questions: object = None      # HellaSwag's questions (a hellaswag.Prepared), or None
    step: int = 0                 # number of steps taken
    best_loss: float = math.inf   # the lowest validation loss
    best_step: int | None = None  # step of the lowest validation loss
    train_s: float = 0.0          # seconds of all steps, except for the first one of each process
    log: object = None            # log.txt, opened for appending; None except on rank 0
    # Duration of the latest steps. Their median is not affected by single slow steps
    seconds: deque = field(default_factory=lambda: deque(maxlen=100))
    signalled: bool = False       # this process has received Ctrl-C, SIGTERM or SIGHUP
    stop: bool = False            # a process was signalled, so all stop now
    writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=1))
    last_save: object = None      # Future of the last save; it returns whether that succeeded

@torch.no_grad()
def validation_loss(run):
    """Return the mean loss over val_tokens tokens of the validation data, in nats per token.

    The losses of all targets are summed over all processes before dividing, so the result does not
    depend on B or on the number of processes.
    """
    cfg, n_rows = run.cfg, validation_rows(run)
    sums = torch.zeros(2, device=run.device)  # the sum of the losses, and the number of targets
    for row in range(RANK * cfg.B, n_rows, WORLD_SIZE * cfg.B):
        x, y = run.val_loader.batch(row, cfg.B, run.device)
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

def validation_rows(run):
    """Return the number of rows that a validation reads: val_tokens tokens, or all that exist."""
    return min(max(1, run.cfg.val_tokens // run.cfg.T), run.val_loader.rows_per_epoch)

def train_step(run):
    """Take one optimizer step. Return the loss and the gradient's norm, measured before clipping.

    The CPU waits for the GPU only once, at the end. (In float16, it also waits for GradScaler.)
    """
    cfg, rows = run.cfg, run.cfg.total_batch_size // run.cfg.T
    # The row numbers at which this rank's micro-batches begin. Ranks take turns, B rows at a time
    starts = range(run.step * rows + RANK * cfg.B, (run.step + 1) * rows, WORLD_SIZE * cfg.B)
    loss_of_step = torch.zeros((), device=run.device)
    run.ddp_model.train()
    for row in starts:
        x, y = run.train_loader.batch(row, cfg.B, run.device)
        # A resumed run draws the dropout masks that it would have drawn without the interruption
        torch.manual_seed(seed_from(cfg.seed, row))
        # DDP averages gradients over the processes, but only after the last micro-batch. The
        # forward pass must also be inside no_sync(), because DDP prepares the averaging there
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
    # Average over the processes. (The norm is the same on each.) If one was signalled, all stop
    sums = torch.stack((loss_of_step, norm, torch.full_like(norm, run.signalled)))
    if WORLD_SIZE > 1:
        dist.all_reduce(sums)
    loss, norm, signalled = (sums / WORLD_SIZE).tolist()
    run.stop = signalled > 0
    return loss, norm

def update_weights(run, norm):
    """Let each optimizer take a step with the learning rate of run.step, and delete the gradients.

    norm: the norm of all gradients. It is not finite if a float16 gradient has overflowed. Clipping
    has then destroyed all gradients, so no optimizer may take a step. (GradScaler itself would skip
    only the optimizer whose gradients overflowed.)
    """
    overflowed = run.scaler.is_enabled() and not norm.isfinite()
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            # initial_lr is the peak, the learning rate that configure_optimizers() has chosen
            group["lr"] = (group.setdefault("initial_lr", group["lr"])
                           * get_lr(run.step, run.cfg) / run.cfg.max_lr)
        if not overflowed:
            run.scaler.step(optimizer)
        optimizer.zero_grad()
    run.scaler.update()  # after an overflow, this lowers the loss scale

def due(every, run):
    """Return whether to act now: at multiples of `every` (0 = never), and after the last step."""
    return every > 0 and (run.step % every == 0 or run.step >= run.cfg.max_steps)

def train(run):
    """Train until max_steps is reached or a signal arrives.

    Step n is the update from run.step == n to n + 1. In the log, `val` and `train` of step n are
    both computed with the weights before this update. After a signal, the run is only saved, and
    what is due at this step is left to the resumed run.
    """
    cfg = run.cfg
    while not run.stop:
        ended = run.step >= cfg.max_steps
        has_trained = run.step > 0
        if due(cfg.eval_every, run):
            validate(run)
        # Save before HellaSwag and the sample, so that nothing is lost if they fail
        if ended or (has_trained and (due(cfg.eval_every, run) or due(cfg.keep_every, run))):
            save(run)
        if due(cfg.hellaswag_every, run) and run.questions:
            score_hellaswag(run)
        if due(cfg.sample_every, run) and (ended or has_trained):
            print_sample(run)
        if ended:
            break
        step, start = run.step, time.perf_counter()
        loss, norm = train_step(run)  # this adds 1 to run.step
        seconds = time.perf_counter() - start
        if run.seconds:  # not the first step of a process, which may compile the model
            run.train_s += seconds
        run.seconds.append(seconds)
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
    """Log and print the validation loss and the speed. Note the best step."""
    cfg, step = run.cfg, run.step
    loss = validation_loss(run)
    log_metric(run, step, "val", loss)
    log_metric(run, step, "train_s", run.train_s)
    if run.seconds:
        log_metric(run, step, "tok/s", cfg.total_batch_size / np.median(run.seconds))
    print0(f"{step:5d}/{cfg.max_steps} val {loss:.4f}")
    check_finite(run, f"The validation loss at step {step} is {loss:g}", loss)
    if loss < run.best_loss and step > 0:  # at step 0, nothing has been trained
        run.best_loss, run.best_step = loss, step

def check_finite(run, text, loss, norm=0.0):
    """Raise UserError, which begins with `text`, unless a loss and a gradient norm are finite."""
    # In float16, the norm may be infinite: then the update was skipped
    if not (math.isfinite(loss) and (math.isfinite(norm) or run.scaler.is_enabled())):
        raise UserError(f"{text}: the model has diverged. Most often, --max_lr is too high. To "
                        f"continue from an earlier step with a lower --max_lr, copy a checkpoint "
                        f"from {run.cfg.log_dir}/ to a new folder, and set --log_dir to it.")

def score_hellaswag(run):
    """Log and print the accuracy on HellaSwag, and the loss of the correct endings."""
    import hellaswag
    with run.autocast():
        score = hellaswag.evaluate(run.model, run.questions)
    log_metric(run, run.step, "hella", score.acc_norm)
    log_metric(run, run.step, "hella_loss", score.loss)
    print0(f"{run.step:5d}/{run.cfg.max_steps} hella {score.acc_norm:.4f} loss {score.loss:.4f}")

def print_sample(run):
    """Print a sample. All processes compute it, since they would otherwise wait for rank 0."""
    with run.autocast():
        text = sample_text(run.model, run.cfg, seed=run.cfg.seed + run.step)
    print0(f"--- sample at step {run.step} ---\n{text}\n---")

def finish(run):
    """Save a run that was stopped, or export a complete one. Raise UserError if it is not saved."""
    cfg = run.cfg
    if run.stop:
        save(run)
    if RANK == 0 and not run.last_save.result():
        raise UserError(f"Step {run.step} is not saved in log_dir={cfg.log_dir}: free some space, "
                        "and repeat the command.")
    if run.stop:
        print0(f"Stopped by a signal at step {run.step}. To resume the run, repeat the command.")
    elif RANK == 0:
        export(cfg.log_dir)
        log_metric(run, run.step, "complete", 1)  # set_up() looks for this line
        print0("Done. To train longer, raise --max_steps. For a new run, choose a different "
               f"--log_dir.\nFor samples: python train_gpt2.py --sample=3 --data={cfg.data} "
               f"--log_dir={cfg.log_dir}")

# ---- The start: settle the settings, build a Run, and train
def configure(flags):
    """Return the final Config for command-line flags, {name: value}.

    Flags override the preset, which overrides Config. The preset follows from init_from, data and
    encoding, as set by flags or in Config: FINETUNE for pretrained weights, otherwise SMALL for a
    text file or bytes. Raise UserError for an invalid value.
    """
    cfg, preset = Config(**flags), "Config"
    if cfg.init_from != "scratch":
        preset = "FINETUNE"
    elif os.path.isfile(cfg.data) or cfg.encoding == "bytes":
        preset = "SMALL"
    cfg = Config(**(PRESETS[preset] | flags))
    check_values(cfg)
    if preset == "FINETUNE" and flags.keys() & {"n_layer", "n_head", "n_embd"}:
        raise UserError("init_from determines n_layer, n_head and n_embd: leave them out.")
    smallest = cfg.T * WORLD_SIZE
    rows_per_process, rest = divmod(cfg.total_batch_size, smallest)
    if rest:
        raise UserError(f"total_batch_size={cfg.total_batch_size} is not a multiple of T * "
                        f"processes = {smallest}: use another multiple, for example "
                        f"{max(1, cfg.total_batch_size // (8 * smallest)) * 8 * smallest}.")
    print0(f"settings  {preset}; flags: {', '.join(flags) or 'none'}")
    sizes = range(1, min(cfg.B, rows_per_process) + 1)
    return replace(cfg, B=max(B for B in sizes if rows_per_process % B == 0))

def check_values(cfg):
    """Raise UserError if a setting has a value that would be ignored or misunderstood."""
    for setting in fields(cfg):
        value, choices = getattr(cfg, setting.name), get_args(setting.type)
        if choices and value not in choices:
            raise UserError(f"{setting.name}={value}: choose one of "
                            f"{', '.join(map(str, choices))}.")
    for name in ("total_batch_size", "B", "T", "n_layer", "n_head", "n_embd", "val_tokens"):
        if getattr(cfg, name) < 1:
            raise UserError(f"{name}={getattr(cfg, name)}: it must be at least 1.")
    if cfg.n_embd % cfg.n_head:
        raise UserError(f"n_embd={cfg.n_embd} must be a multiple of n_head={cfg.n_head}.")
    if cfg.max_lr <= 0 or cfg.max_lr < cfg.min_lr:
        raise UserError(f"max_lr={cfg.max_lr} must be above 0, and not below min_lr={cfg.min_lr}.")

def build_model(cfg, checkpoint=None):
    """Return the GPT of a run. Its `config` holds the shape, the context and the encoding.

    checkpoint: the newest one in log_dir, or None. It determines the shape, and restore() loads its
    weights. Raise UserError if init_from cannot be read, or if T or encoding do not fit the model.
    """
    if checkpoint:
        model = GPT(replace(checkpoint["gpt_config"], dropout=cfg.dropout))
    elif cfg.init_from != "scratch":
        model = GPT.from_pretrained(cfg.init_from, cfg.dropout, cfg.encoding)
    else:
        # A setting that you add to Config and to GPTConfig is passed on, too
        shared = {f.name: getattr(cfg, f.name) for f in fields(GPTConfig) if hasattr(cfg, f.name)}
        model = GPT(GPTConfig(**shared, block_size=cfg.T,
                              vocab_size=get_encoding(cfg.encoding).n_vocab), cfg.seed)
    c = model.config
    if (cfg.T > c.block_size or cfg.encoding != c.encoding
            or get_encoding(cfg.encoding).n_vocab != c.vocab_size):
        raise UserError(
            f"The weights in {cfg.log_dir if checkpoint else cfg.init_from} have a context of "
            f"{c.block_size} tokens and {c.vocab_size} ids of encoding={c.encoding}, which do not "
            f"fit T={cfg.T} and encoding={cfg.encoding}: set --T and --encoding.")
    return model

def set_up(cfg, device):
    """Return the Run for train(). If log_dir holds a checkpoint, the run continues from it.

    If the run is complete, exit: an edited script would evaluate weights that it has not trained.
    """
    enc = get_encoding(cfg.encoding)
    train_loader, val_loader = open_data(cfg, enc)
    newest = newest_checkpoint(cfg.log_dir)
    checkpoint = read_checkpoint(newest, device) if newest else None
    model = build_model(cfg, checkpoint).to(device)
    dtype, compiled = pick_dtype(cfg.dtype, device), pick_compile(cfg.compile, device)
    choose_attention_kernels(cfg, device, dtype)
    muon_dtype = dtype if dtype == torch.bfloat16 else torch.float32  # float16 would overflow
    run = Run(
        cfg=cfg, device=device, model=model, ddp_model=model,
        optimizers=configure_optimizers(model, cfg, muon_dtype),
        scaler=torch.amp.GradScaler(device.type, enabled=dtype == torch.float16),
        autocast=partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32),
        train_loader=train_loader, val_loader=val_loader,
        data_facts=data_facts(train_loader.shards, val_loader.shards))
    check_processes_agree(run, dtype, checkpoint)
    if checkpoint:
        restore(run, checkpoint)
    if run.step >= cfg.max_steps and run.step in read_metrics(cfg.log_dir)["complete"]:
        print0(f"The run in {cfg.log_dir}/ is complete at step {run.step}. To train longer, raise "
               "--max_steps. For a new run, choose a different --log_dir.")
        sys.exit()
    if RANK == 0:
        start_log(run)
    if compiled:
        model.compile()
    if WORLD_SIZE > 1:
        # torch.compile begins a new graph where a bucket of DDP ends. With buckets of 25 MB (the
        # default), there would be 14 graphs. gradient_as_bucket_view avoids copying the gradients
        run.ddp_model = DDP(model, bucket_cap_mb=100, gradient_as_bucket_view=True)
    if cfg.hellaswag_every:
        import hellaswag
        run.questions = hellaswag.prepare_on_all_ranks(model, enc.encode_ordinary)
    print_summary(run, dtype, compiled)
    stop_on_signals(run)
    return run

def check_processes_agree(run, dtype, checkpoint):
    """Raise UserError, on every rank, if processes differ in code, data, settings or checkpoint."""
    # Paths may differ between machines. Compare the dtype in use, since the setting may be auto
    cfg = replace(run.cfg, data="", log_dir="", dtype=str(dtype))
    mine = asdict(cfg) | run.data_facts | {
        "the script's checksum": zlib.crc32(Path(__file__).read_bytes()),
        "the step of the checkpoint": checkpoint and checkpoint["step"],
        "its train_s": checkpoint and checkpoint["train_s"]}  # tells two saves of a step apart
    all_ranks = [mine] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(all_ranks, mine)
    for rank, theirs in enumerate(all_ranks):
        for name, value in all_ranks[0].items():
            if theirs.get(name) != value:
                raise UserError(
                    f"{name} is {value} on rank 0, and {theirs.get(name)} on rank {rank}: use the "
                    "same script, data, settings and kind of GPU everywhere, and put log_dir on a "
                    "shared disk, or copy the newest checkpoint to each machine.")

def print_summary(run, dtype, compiled):
    """Print the machine, the model, and the amount of training."""
    cfg, n_tokens = run.cfg, run.cfg.max_steps * run.cfg.total_batch_size
    gpu = f" ({torch.cuda.get_device_name(run.device)})" if run.device.type == "cuda" else ""
    print0(f"machine   {WORLD_SIZE} x {run.device.type}{gpu}, torch {torch.__version__}, {dtype}, "
           f"compile={compiled}\n"
           f"model     {sum(p.numel() for p in run.model.parameters()):,} parameters, trained by "
           f"{' and '.join(type(optimizer).__name__ for optimizer in run.optimizers)}\n"
           f"training  {cfg.max_steps:,} steps ({cfg.warmup_steps:,} of warmup), {n_tokens:,} "
           f"tokens, {n_tokens / cfg.T / run.train_loader.rows_per_epoch:,.2f} epochs, B={cfg.B}; "
           f"{Path(cfg.log_dir, 'log.txt')}, from step {run.step} on")

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

def print_samples(cfg, device):
    """Print cfg.sample samples from init_from or, if it is "scratch", from the run in log_dir."""
    source = best_checkpoint(cfg.log_dir) if cfg.init_from == "scratch" else cfg.init_from
    if not source:
        raise UserError(f"log_dir={cfg.log_dir} has no checkpoint: train, or set --init_from.")
    model = GPT.from_pretrained(source, encoding=cfg.encoding).to(device)
    print0(f"Samples from {source}:")
    for i in range(cfg.sample):
        print0(sample_text(model, cfg, seed=cfg.seed + i) + "\n---")

def main():
    """Train or, with --sample, print samples. Python prints the message of a UserError."""
    sys.stdout.reconfigure(errors="backslashreplace")  # samples may contain any character
    cfg = configure(parse_flags(Config, __doc__, PRESETS))
    device = set_up_device(cfg.device)
    if cfg.sample:
        return print_samples(cfg, device)
    if "RANK" in os.environ:  # torchrun started this process
        if (os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
                and os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"):
            print0("!!! Restarts by torchrun may hang. To avoid this, start it with "
                   "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.")
        gpu = device if device.type == "cuda" else None
        dist.init_process_group("nccl" if gpu else "gloo", device_id=gpu,
                                timeout=datetime.timedelta(hours=1))
    # The lock is held as long as it is referenced
    lock = lock_folder("log_dir", cfg.log_dir) if RANK == 0 else None  # noqa: F841
    train(set_up(cfg, device))
    if dist.is_initialized():
        dist.destroy_process_group()

# ---- Checkpoints. A run is resumed from the newest one. Samples, the export and init_from use the
# best one. Only plain values are loaded (weights_only=True): other Python objects could run code
def checkpoint_of(run):
    """Return everything that a checkpoint contains. restore() is its counterpart.

    For each optimizer, it maps the names of the model's parameters to their states, or to None. If
    you use an optimizer that also keeps state elsewhere, for example in its groups, add this state
    here and in restore(), which gets all tensors on the run's device.
    """
    names, parameters = zip(*run.model.named_parameters())
    return {
        "step": run.step, "best_loss": run.best_loss, "best_step": run.best_step,
        "train_s": run.train_s, "model": run.model.state_dict(),
        "gpt_config": asdict(run.model.config),
        "optimizers": [dict(zip(names, map(optimizer.state.get, parameters)))
                       for optimizer in run.optimizers],
        "scaler": run.scaler.state_dict(), "config": asdict(run.cfg),
        "data_facts": run.data_facts, "folder": os.path.abspath(run.cfg.log_dir)}

# Settings that may differ when a run is resumed. `data` may have been moved, but data_facts() must
# not differ. dtype and B may differ although they affect rounding and, for B, dropout masks
MAY_CHANGE = {
    "data", "B", "print_every", "eval_every", "hellaswag_every", "sample_every", "sample_prompt",
    "sample_tokens", "temperature", "top_k", "log_dir", "device", "dtype", "compile"}

def restore(run, checkpoint):
    """Load what checkpoint_of() returned into the run.

    Settings and data may differ from those in the checkpoint if it was written in another folder.
    Raise UserError if the checkpoint does not fit the run.
    """
    cfg, now = run.cfg, asdict(run.cfg) | run.data_facts
    # A setting that was added after the run began is assumed to have had its default value
    before = asdict(Config()) | checkpoint["config"] | checkpoint["data_facts"]
    changed = {name for name in now if now[name] != before[name]} - MAY_CHANGE
    changes = "; ".join(f"{name} was {before[name]}, is {now[name]}" for name in sorted(changed))
    refused = changed - {"max_steps"}
    if checkpoint["folder"] != os.path.abspath(cfg.log_dir):  # it was copied, so this is a branch
        refused = changed & {f.name for f in fields(GPTConfig)} - {"dropout"}
    if refused:
        raise UserError(
            f"The checkpoint in {cfg.log_dir}/ has other settings ({changes}): undo this, or copy "
            "the checkpoint to a new folder, and set --log_dir to it, to go on there with these "
            "settings. (The shape of the model and the encoding cannot be changed.)")
    if changes:
        print0(f"!!! These settings differ from the checkpoint: {changes}.")
    run.step, run.train_s = checkpoint["step"], checkpoint["train_s"]
    # The best checkpoint of a branch may be elsewhere, and its losses may be for other data
    if (checkpoint["best_step"] in find_checkpoints(cfg.log_dir)
            and not {"T", "val_tokens", *run.data_facts} & changed):
        run.best_loss, run.best_step = checkpoint["best_loss"], checkpoint["best_step"]
    load_weights(run.model, checkpoint["model"], cfg.log_dir)
    for optimizer, states in zip(run.optimizers, checkpoint["optimizers"]):
        own = {p for group in optimizer.param_groups for p in group["params"]}
        optimizer.state.update((p, states[name]) for name, p in run.model.named_parameters()
                               if p in own and states.get(name))
    if checkpoint["scaler"]:  # it is empty if the scaler was disabled
        run.scaler.load_state_dict(checkpoint["scaler"])

def load_weights(model, weights, source):
    """Load a state_dict. source: where the weights come from, for the error message."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as e:  # its first line is a heading; all other lines name weights
        raise UserError(f"The weights in {source} do not fit {type(model).__name__} "
                        f"({str(e).splitlines()[-1].strip()[:160]}): use the code that they were "
                        "made for.")

def find_checkpoints(folder):
    """Return {step: path} of the checkpoints in a folder."""
    return {int(path.stem[11:]): path for path in Path(folder).glob("checkpoint_*.pt")
            if path.stem[11:].isdecimal()}

def newest_checkpoint(folder):
    """Return the path of the newest checkpoint in a folder, or None."""
    return max(find_checkpoints(folder).items(), default=(None, None))[1]

def best_checkpoint(folder):
    """Return the path of the checkpoint with the lowest validation loss in a folder, or None.

    If there were no validations, or if that checkpoint has been removed, return the newest one.
    """
    newest = newest_checkpoint(folder)
    best_step = read_checkpoint(newest, "cpu")["best_step"] if newest else None
    return find_checkpoints(folder).get(best_step, newest)

def read_checkpoint(path, device):
    """Return the content of a checkpoint: a GPTConfig, and everything else as in checkpoint_of().

    All tensors are loaded to `device`. Raise UserError if the file cannot be read.
    """
    try:
        checkpoint = torch.load(path, map_location=device, weights_only=True)
        return checkpoint | {"gpt_config": GPTConfig(**checkpoint["gpt_config"])}
    except Exception as e:  # reading a damaged file may raise any exception
        raise UserError(f"{path} cannot be read as a checkpoint ({summary_of(e)}): check its name. "
                        "If it is damaged, delete it.")

def save(run):
    """Write a checkpoint in the background, from a copy in memory."""
    if RANK != 0:
        return
    # Wait for the previous save. If it failed, or if there was none, read the new file back
    read_back = not (run.last_save and run.last_save.result())
    content = io.BytesIO()
    torch.save(checkpoint_of(run), content)  # 0.4 s for 124M on a CPU (tests/measured/save.txt)
    run.last_save = run.writer.submit(
        write_checkpoint, run.cfg, run.step, run.best_step, content, read_back)

def write_checkpoint(cfg, step, best_step, content, read_back):
    """Write a checkpoint, delete old ones, and plot the losses. Return whether this succeeded.

    content: the file in memory. read_back: whether to read the new file before old ones are
    deleted. This fails if checkpoint_of() returns a value that cannot be loaded again.
    """
    path = Path(cfg.log_dir, f"checkpoint_{step:05d}.pt")
    try:
        write_whole(path, lambda file: file.write(content.getbuffer()))
        if read_back:
            read_checkpoint(path, "cpu")
    except (Exception, UserError) as e:  # for example, the disk is full
        print0(f"!!! NOT SAVED at step {step}: {summary_of(e)}")
        return False
    print0(f"{step:5d}/{cfg.max_steps} saved {path}")
    for old, old_path in find_checkpoints(cfg.log_dir).items():
        is_multiple = cfg.keep_every and old % cfg.keep_every == 0
        if old not in (step, best_step) and not is_multiple:
            with contextlib.suppress(OSError):
                old_path.unlink()
    with contextlib.suppress(Exception):  # the plot is optional: no error may end the run
        plot_curves(cfg.log_dir)
    return True

# ---- Monitoring. log.txt gets every step; stdout gets only those that print_every selects
def print0(text):
    """Print text on rank 0 only."""
    if RANK == 0:
        # A single call, so that the line does not mix with one from the saving thread. Ignore
        # errors caused by a full disk, a closed terminal, or a signal during a print
        with contextlib.suppress(OSError, RuntimeError):
            print(f"{text}\n", end="", flush=True)

def log_metric(run, step, metric, value):
    """Append a line "<step> <metric> <value>" to log.txt."""
    if run.log:
        text = str(value) if isinstance(value, int) else f"{value:.7g}"
        with contextlib.suppress(OSError):  # a full disk
            run.log.write(f"{step} {metric} {text}\n".encode())

def read_metrics(folder):
    """Return {metric: {step: value}} from log.txt."""
    path, metrics = Path(folder, "log.txt"), defaultdict(dict)
    text = path.read_text(errors="replace") if path.exists() else ""
    for step, metric, value in re.findall(r"^(\d+) (\S+) (\S+)$", text, re.M):
        metrics[metric][int(step)] = float(value)
    return metrics

def start_log(run):
    """Open log.txt, and write config.json and a copy of this script, in log_dir.

    The run repeats everything from run.step on, so log.txt is cut off there. The first time that
    this removes lines, the previous content is kept in log_before.txt. A copy of the script is
    named after the step from which it trained the run, such as train_gpt2_00500.py.
    """
    folder = Path(run.cfg.log_dir)
    log, log_before = folder / "log.txt", folder / "log_before.txt"
    content = log.read_bytes() if log.exists() else b""
    # If this is another program's log, remove all of it. Also remove an incomplete last line
    match = re.search(rb"\A(?!\d+ )|^%d " % run.step, content, re.M)
    cut = match.start() if match else content.rfind(b"\n") + 1
    if cut < len(content) and not log_before.exists():
        write_whole(log_before, lambda file: file.write(content))
    run.log = open(log, "ab", buffering=0)
    run.log.truncate(cut)
    if cut == 0:
        log_metric(run, run.step, "parameters", sum(p.numel() for p in run.model.parameters()))
        log_metric(run, run.step, "bytes_per_token", bytes_per_token(run))
    write_whole(folder / "config.json", lambda file: file.write(
        json.dumps(asdict(run.cfg), indent=1).encode()))
    code = Path(__file__).read_bytes()
    copies = sorted(folder.glob("train_gpt2_*.py"))
    if not copies or copies[-1].read_bytes() != code:
        copy = folder / f"train_gpt2_{run.step:05d}.py"
        write_whole(copy, lambda file: file.write(code))
        print0(f"code      {copy}, used from step {run.step} on")

def bytes_per_token(run):
    """Return the mean number of bytes per target in a validation. <|endoftext|> counts as 0."""
    enc, (_, y) = get_encoding(run.cfg.encoding), run.val_loader.batch(0, validation_rows(run))
    return len(enc.decode_bytes(y[y != enc.eot_token].tolist())) / y.numel()

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
def sample_text(model, cfg, seed):
    """Return sample_prompt and the model's continuation of it, as text."""
    enc, device = get_encoding(model.config.encoding), next(model.parameters()).device
    prompt = encode(enc, cfg.sample_prompt, special=True).tolist() or [enc.eot_token]
    tokens = model.generate(
        torch.tensor([prompt], device=device), cfg.sample_tokens, temperature=cfg.temperature,
        top_k=cfg.top_k, generator=torch.Generator(device).manual_seed(seed))
    return enc.decode(tokens[0].tolist())

# ---- Hugging Face. A model is exported only if transformers computes the same logits
TIED = ("transformer.wte.weight", "lm_head.weight")  # the same matrix; ours has padding rows
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # (in, out) in Hugging Face's GPT-2

def converted(weights, n_rows):
    """Convert a state dict of our GPT into one of Hugging Face's GPT-2, or the other way round.

    n_rows: the rows of the embedding in the result. (A negative number makes F.pad() remove rows.)
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
                        f"be loaded as a Hugging Face GPT-2 ({summary_of(e)}): check the name.")
    c = hf_model.config
    # A vocabulary of 257 ids consists of the 256 bytes and <|endoftext|>
    encoding = {257: "bytes", 50257: "gpt2"}.get(c.vocab_size, encoding)
    model = GPT(GPTConfig(
        block_size=c.n_positions, vocab_size=c.vocab_size, n_layer=c.n_layer, n_head=c.n_head,
        n_embd=c.n_embd, dropout=dropout, encoding=encoding))
    load_weights(model, converted(hf_model.state_dict(), len(model.lm_head.weight)), name)
    return model

def export(log_dir):
    """Export the best model of a run to log_dir/hf, or print why this is not possible."""
    folder, path = Path(log_dir, "hf"), best_checkpoint(log_dir)
    try:
        save_hugging_face(GPT.from_pretrained(path), folder)
        print0(f"exported {path} to {folder}/, for transformers and hellaswag.py")
    except (Exception, UserError) as e:  # for example, transformers may be missing
        print0(f"The export to {folder}/ has failed, or has no tokenizer ({summary_of(e)}). To try "
               "again, delete the line \"complete\" from log.txt, and repeat the command.")

def save_hugging_face(model, folder):
    """Write a model (on the CPU) for transformers. Raise UserError if its logits would differ."""
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
    save_tokenizer(get_encoding(c.encoding), folder, c.block_size)

@torch.no_grad()
def difference_of_logits(model, hf_model):
    """Return the largest relative difference of the logits of a GPT and a GPT2LMHeadModel."""
    c = model.config
    idx = torch.arange(c.block_size)[None] * 97 % c.vocab_size  # (1, T)
    # Include <|endoftext|>, the last id, to detect an edit that blocks attention across documents
    idx[0, c.block_size // 2] = c.vocab_size - 1
    theirs = hf_model.eval()(idx).logits
    return ((model(idx)[0] - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max().item()

# ---- The machine. For device, dtype and compile, "auto" selects a fast option
def set_up_device(name):
    """Return the torch.device called `name`, prepared for training, or raise UserError."""
    no_gpu_message = (f"torch {torch.__version__} sees no GPU: install the build of PyTorch for "
                      "your driver (pytorch.org), or a newer driver.")
    if name == "auto":
        # gloo cannot use MPS tensors
        name = ("cuda" if torch.cuda.is_available() else
                "mps" if torch.backends.mps.is_available() and WORLD_SIZE == 1 else "cpu")
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
        # Make glibc keep freed memory for the next step. By default, the operating system clears
        # new memory for each array above 32 MB, and a step of the 124M model with 8 x 256 tokens in
        # bfloat16 takes 1.5 to 2.2 times as long
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-4, 0)   # M_MMAP_MAX: no array gets a mapping of its own
            libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: freed memory is never returned to the system
    return device

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
    """Return whether to use torch.compile. It needs Triton, which is often missing on Windows."""
    return choice if choice != "auto" else (
        device.type == "cuda" and importlib.util.find_spec("triton") is not None)

def choose_attention_kernels(cfg, device, dtype):
    """Disable kernels of scaled_dot_product_attention that are slow or wrong in this run."""
    # On a CPU in bfloat16, flash attention is slow for short rows: in a step with SMALL (T=64), its
    # backward pass takes 11.8 ms, and the math kernel's takes 5.6 ms. (This switch affects CPUs)
    torch.backends.cuda.enable_flash_sdp(
        device.type != "cpu" or dtype != torch.bfloat16 or cfg.T >= 256)
    # cuDNN's kernel, the fastest on H100 and newer, rounds a dropout of 0.1 to 1/16 in some cases
    torch.backends.cuda.enable_cudnn_sdp(cfg.dropout == 0)

if __name__ == "__main__":
    main()
