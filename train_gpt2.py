"""GPT-2 in one file: the model, its data, its training, on a CPU or many GPUs.

    python train_gpt2.py               # no shards yet: a small GPT, Shakespeare
    python fineweb.py                  # FineWeb-Edu -> edu_fineweb10B/*.npy
    torchrun --standalone --nproc_per_node=8 train_gpt2.py    # GPT-2 (124M)
    tail -f log/log.txt                # <step> train|val|hella <value>
    python train_gpt2.py --sample=3 --sample_prompt="ROMEO:"  # newest weights
    python -c "import train_gpt2 as t; t.draw_curves('log')"  # log/curves.png

Edit the constants in Config, or give any of them as a flag (--max_lr=1e-3).
Ctrl-C saves and stops; the same command then continues.

One idea makes the rest simple: the data of a step is a pure function of
(seed, step). So B and the number of GPUs decide speed and memory only, and
resuming means starting at a later step.

Part one is GPT-2 and its training: constants, model, data, optimizers,
validation, a step, the loop. Part two is what a long run needs: processes
and errors; device, dtype, compile; opening data; checkpoints and the log
folder; log and curves; samples and HellaSwag; Hugging Face; setting up;
command line.
"""
import argparse
import contextlib
import copy
import ctypes
import dataclasses
import datetime
import importlib.util
import inspect
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
import zipfile
import zlib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__":  # what has to be set before torch is loaded
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C meanwhile: no traceback
    # OpenMP's threads spin while they wait for each other. On a computer that is busy with
    # something else they wait long, and spin on the core that the awaited thread needs.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import hellaswag
from hellaswag import first_line


# --------------------------------------------------------------------------------- constants
@dataclass
class Config:
    """The full GPT-2 (124M) run with GPT-3's hyperparameters (Brown et al. 2020, table 2.1)."""
    data: str = "edu_fineweb10B"    # folder of .npy token shards, or a UTF-8 text file
    encoding: str = "gpt2"          # "gpt2" (50,257 tokens) or "bytes" (257, no download)
    shuffle: bool = True            # shards, and rows in a shard, in a new order each epoch
    seed: int = 1337                # decides initial weights, data order and samples
    # the batch: total_batch_size decides the training, B only memory and speed
    total_batch_size: int = 524288  # tokens per optimizer step, a multiple of B * T * processes
    B: int = 64                     # rows per forward pass on each process
    T: int = 1024                   # tokens per row, the context
    # the model: 124M is 12/12/768, 350M 24/16/1024, 774M 36/20/1280, 1.5B 48/25/1600
    n_layer: int = 12               # blocks
    n_head: int = 12                # attention heads per block
    n_embd: int = 768               # width, a multiple of n_head
    init_from: str = "scratch"      # or gpt2 ... gpt2-xl, a Hugging Face folder, a .pt file
    # the optimizer: for these sizes GPT-3 used max_lr 6e-4, 3e-4, 2.5e-4, 2e-4
    optimizer: str = "adamw"        # or "muon": Muon for the blocks' matrices, AdamW for the rest
    max_lr: float = 6e-4            # learning rate after warmup
    muon_lr_ratio: float = 1.0      # Muon's learning rate over AdamW's
    min_lr: float = 6e-5            # learning rate at max_steps
    lr_shape: str = "cosine"        # how it falls from max_lr to min_lr: "cosine" or "linear"
    warmup_steps: int = 715         # steps of linear warmup; 375 M tokens, as in GPT-3
    max_steps: int = 19073          # optimizer steps; 10 B tokens / total_batch_size
    weight_decay: float = 0.1       # on matrices and embeddings, not on biases and LayerNorms
    grad_clip: float = 1.0          # largest norm of the gradient; 0 = no clipping
    # monitoring; 0 = never
    eval_every: int = 250           # steps between validations
    val_tokens: int = 10485760      # tokens a validation reads, always the same ones
    hellaswag_every: int = 250      # steps between HellaSwag scores
    sample_every: int = 250         # steps between samples
    sample_prompt: str = "Hello, I'm a language model,"  # how samples begin
    sample_tokens: int = 64         # tokens that a sample adds to its prompt
    temperature: float = 1.0        # of samples: higher is more random, 0 takes the likeliest
    top_k: int = 50                 # samples draw from the k likeliest tokens; 0 = from all
    sample: int = 0                 # print this many samples of the newest weights, do not train
    # saving
    log_dir: str = "log"            # log.txt, run.json, curves.png, checkpoints, exported model
    save_every: int = 250           # steps between checkpoints; the newest two are kept
    milestone_every: int = 5000     # steps between weights that are kept for good
    resume: bool = True             # continue from log_dir; False moves its results to before_1/
    # the machine
    device: str = "auto"            # "auto" is CUDA, else MPS, else CPU; or cuda, cuda:1, mps, cpu
    dtype: str = "auto"             # "auto" is the fastest; or bfloat16, float16, float32
    compile: str = "auto"           # "auto" is torch.compile on CUDA; or True, False
    grad_comm: str = "float32"      # of gradients between GPUs; bfloat16 halves the traffic


# What differs while there are no shards: a small GPT on Shakespeare's bytes, for two CPU cores
QUICK_START = dict(
    data=str(Path(__file__).resolve().with_name("input.txt")), encoding="bytes",
    total_batch_size=2048, B=32, T=64, n_layer=3, n_head=4, n_embd=128,
    optimizer="muon", max_lr=7e-3, muon_lr_ratio=2.0, min_lr=0.0, lr_shape="linear",
    warmup_steps=20, max_steps=1300, weight_decay=0.2, eval_every=325, val_tokens=131072,
    hellaswag_every=0, sample_every=650, sample_prompt="\n\n", sample_tokens=300,
    dtype="float32")


# ------------------------------------------------------------------------------------- GPT-2
@dataclass
class GPTConfig:
    """The shape of a GPT. The defaults are GPT-2 (124M)."""
    block_size: int = 1024      # longest context, in tokens
    vocab_size: int = 50304     # rows of the embedding: 50,257 ids padded, for speed
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_vocab: int | None = None  # ids in use, None = all; the padding is never predicted

    def __post_init__(self):
        if self.n_vocab is None:
            self.n_vocab = self.vocab_size
        if self.n_embd % self.n_head:
            raise UserError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: "
                            f"change one, so that each head gets n_embd / n_head dimensions.")


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a token attends to itself and to earlier tokens."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key, value at once
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, mask=None):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, head_dim)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))  # concatenate the heads


class MLP(nn.Module):
    """What a token computes by itself: four times as wide, a GELU, and back."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.gelu = nn.GELU(approximate="tanh")  # the approximation that GPT-2 was trained with
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    """Attention, in which tokens exchange information, then the MLP. Both add to x."""

    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, mask=None):
        x = x + self.attn(self.ln_1(x), mask)
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019, section 2.3), its parameters named as in OpenAI's weights."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            ln_f=nn.LayerNorm(config.n_embd)))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        # The input embedding is also the output matrix: similar tokens are similar in both
        # roles, and 30 % of the parameters are saved (Press and Wolf 2017)
        self.lm_head.weight = self.transformer.wte.weight
        self.init_weights()

    def init_weights(self):
        """Normal(0, 0.02) and zero biases, as in OpenAI's code.

        2 * n_layer projections add to the residual stream. Their std is divided by the square
        root of that number, so that the variance of the sum does not grow with depth (GPT-2,
        section 2.3).
        """
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.dim() == 2:  # the gains of LayerNorms, 1-D, keep their initial 1
                std = residual_std if name.endswith("c_proj.weight") else 0.02
                nn.init.normal_(p, std=std)
        with torch.no_grad():  # no gradient ever reaches the padding, so it stays at zero
            self.transformer.wte.weight[self.config.n_vocab:] = 0

    def hidden(self, idx, positions=None, mask=None):
        """Final hidden states (B, T, C) of token ids idx (B, T).

        positions and mask are for HellaSwag alone, which packs several endings into a row:
        positions (B, T) says where in its own text a token stands, the boolean mask
        (B, 1, T, T) is True where a token may look.
        """
        if positions is None:
            T = idx.size(1)
            if T > self.config.block_size:
                raise ValueError(f"{T} tokens are more than block_size={self.config.block_size}")
            positions = torch.arange(T, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)  # (B, T, C)
        for block in self.transformer.h:
            x = block(x, mask)
        return self.transformer.ln_f(x)

    def to_logits(self, x):
        """Logits (..., n_vocab) of hidden states (..., C)."""
        logits = self.lm_head(x)                  # (..., vocab_size): this width is faster
        return logits[..., :self.config.n_vocab]  # a view: leaving out the padding is free

    def forward(self, idx, targets=None, return_logits=True):
        """Logits (B, T, n_vocab) of idx (B, T); with targets (B, T), also the mean loss in nats.

        Training asks for the loss alone: for logits that are returned a compiled model makes a
        gradient of zeros, 6.6 GB at B=64.
        """
        logits = self.to_logits(self.hidden(idx))
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return (logits if return_logits else None), loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Continue idx (B, T) by sampled tokens. Returns (B, T + max_new_tokens).

        temperature 0 takes the likeliest token, top_k draws from the k likeliest. generator
        (of idx's device) makes the draws, so that training's random state stays untouched.
        """
        if idx.dim() != 2 or idx.size(1) == 0:
            raise ValueError(f"idx must be (B, T) with T >= 1, not {tuple(idx.shape)}")
        if temperature < 0 or (top_k is not None and top_k < 1):
            raise ValueError(f"must be: temperature={temperature} >= 0 and top_k={top_k} >= 1")
        for _ in range(max_new_tokens):
            context = idx[:, -self.config.block_size:]
            logits = self.to_logits(self.hidden(context)[:, -1]).float()  # (B, n_vocab)
            token = draw_token(logits, temperature, top_k, generator)     # (B, 1)
            idx = torch.cat((idx, token), dim=1)
        return idx

    @classmethod
    def from_pretrained(cls, name):
        """The GPT-2 in a Hugging Face folder or on the hub: gpt2, gpt2-medium, ..."""
        return load_hugging_face(name)

    def save_pretrained(self, folder, encoding=None):
        """Write a folder that `transformers` loads; with an encoding, its tokenizer too."""
        save_hugging_face(self, folder, encoding)

    def num_params(self):
        return sum(p.numel() for p in self.parameters())


def draw_token(logits, temperature, top_k, generator):
    """One token id (B, 1) for each row of logits (B, n_vocab)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None:
        kth_best = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth_best, -math.inf)
    probs = (logits / temperature).softmax(-1)
    return torch.multinomial(probs, 1, generator=generator)


# -------------------------------------------------------------------------------------- data
class DataLoaderLite:
    """Rows of T tokens out of shards. Which row has which number depends on the seed alone.

    Row i of a shard is its tokens i * T ... (i + 1) * T: T inputs, and one token more as the
    last target, with which the next row begins. Row numbers have no upper limit: an epoch
    visits each row once, in file order or in an order drawn from (seed, epoch). So there is no
    state to save, and any process can read any row.
    """

    def __init__(self, shards, T, seed=0, shuffle=False, n_vocab=2**16):
        """shards: paths of .npy files, or arrays of token ids (N,)."""
        self.shards, self.T, self.n_vocab = shards, T, n_vocab
        self.seed, self.shuffle = seed, shuffle
        self.lengths = [len(open_shard(shard)) for shard in shards]
        self.rows_in_shard = np.array([max(0, length - 1) // T for length in self.lengths])
        self.rows_per_epoch = int(self.rows_in_shard.sum())
        self.open_number, self.tokens = None, None  # index and tokens of the open shard

    def locate(self, row):
        """The number of the shard that a row is in, and the token at which it begins there."""
        epoch, row = divmod(row, self.rows_per_epoch)
        shard_order = permutation(self.shuffle, len(self.shards), self.seed, epoch)
        ends = self.rows_in_shard[shard_order].cumsum()  # the rows at which the shards end
        i = int(ends.searchsorted(row, side="right"))
        number = int(shard_order[i])
        rows = int(self.rows_in_shard[number])
        begin = int(ends[i]) - rows
        row_order = permutation(self.shuffle, rows, self.seed, epoch, number)
        return number, int(row_order[row - begin]) * self.T

    def open(self, number, row):
        """Open the shard that `row` is in; have it and the next one read ahead."""
        self.tokens = open_shard(self.shards[number], self.lengths[number])
        self.open_number = number
        next_number, _ = self.locate(row + int(self.rows_in_shard[number]))  # a shard further on
        read_ahead([self.shards[number], self.shards[next_number]])

    def read(self, row, B):
        """B rows from number `row` on: (B, T + 1) int64, as torch has no uint16 math."""
        rows = np.empty((B, self.T + 1), dtype=np.int64)
        for b in range(B):
            number, start = self.locate(row + b)
            if number != self.open_number:
                self.open(number, row + b)
            rows[b] = self.tokens[start:start + self.T + 1]
            check_ids(rows[b], self.n_vocab, self.shards[number])
        return rows

    def batch(self, row, B, device=torch.device("cpu")):
        """The same rows on a device: inputs x and targets y, the tokens after them, (B, T)."""
        rows = torch.from_numpy(self.read(row, B))
        if device.type == "cuda":  # from pinned memory, the copy does not hold up the host
            rows = rows.pin_memory().to(device, non_blocking=True)
        else:
            rows = rows.to(device)
        return rows[:, :-1], rows[:, 1:]


@lru_cache(maxsize=4)  # the orders in use: those of all shards would need much memory
def permutation(shuffle, n, *key):
    """0 ... n - 1, shuffled by key or in order. RandomState is the same in every NumPy."""
    return np.random.RandomState(key).permutation(n) if shuffle else np.arange(n)


def first_row(cfg, step, micro_step):
    """The number of the row at which this process begins a micro-step.

    A step takes the next total_batch_size / T rows. They are dealt out B at a time: to rank 0,
    rank 1, ..., and again to rank 0 for its next micro-step. The same rows make the same
    gradient, however large B is and however many processes there are.
    """
    rows_per_step = cfg.total_batch_size // cfg.T
    return step * rows_per_step + (micro_step * world_size() + rank()) * cfg.B


# -------------------------------------------------------------------------------- optimizers
def get_lr(step, cfg):
    """Learning rate of a step: linear warmup to max_lr, then down to min_lr at max_steps."""
    if step < cfg.warmup_steps:
        return cfg.max_lr * (step + 1) / cfg.warmup_steps
    progress = (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps)
    progress = min(1.0, progress)
    remaining = 1 - progress
    if cfg.lr_shape == "cosine":
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    return cfg.min_lr + (cfg.max_lr - cfg.min_lr) * remaining


def newton_schulz(G):
    """Push the singular values of matrices G (n, rows, columns) towards 1 (Jordan et al. 2024).

    A step is X <- P X with A = X X^T and P = a I + b A + c A^2: a singular value x becomes
    a x + b x^3 + c x^5, and the singular vectors stay. Instead of X we update the smaller square
    A <- P A P and the product Q <- P Q, and multiply X by Q at the end. A tall X takes X^T X and
    X Q. In bfloat16 rounding destroys A's small values after three steps: it is computed again.
    """
    a, b, c = 3.4445, -4.7750, 2.0315  # steep at 0: five steps lift small values as well

    def polynomial(A):
        P = torch.baddbmm(A, A, A, beta=b, alpha=c)
        P.diagonal(dim1=-2, dim2=-1).add_(a)
        return P

    tall = G.size(-2) > G.size(-1)
    X = G / G.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)  # no singular value above 1
    for more_steps in ((2, 1) if G.dtype == torch.bfloat16 else (4,)):  # 3 + 2 steps, or 5
        A = X.mT @ X if tall else X @ X.mT
        P = Q = polynomial(A)
        for _ in range(more_steps):
            A = P @ A @ P
            P = polynomial(A)
            Q = P @ Q
        X = X @ Q if tall else Q @ X
    return X


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized (Jordan et al. 2024), for the matrices in the blocks.

    Few directions dominate a gradient matrix. Muon makes all of them equally long, so that
    rare ones are learned too. The factor 0.2 sqrt(longer side) makes its updates as large as
    AdamW's, so that both can share a learning rate (Liu et al. 2025, section 2.2).
    """

    def __init__(self, params, lr, weight_decay, momentum=0.95, dtype=torch.float32):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))
        self.dtype = dtype  # of Newton-Schulz

    def smoothed_gradient(self, p, momentum):
        """The gradient of p under Nesterov momentum."""
        if "momentum_buffer" not in self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        average = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(average, momentum)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr = group["lr"]
            by_shape = defaultdict(list)  # the equal matrices of all layers are one batch
            for p in group["params"]:
                by_shape[p.shape].append(p)
            for shape, params in by_shape.items():
                grads = [self.smoothed_gradient(p, group["momentum"]) for p in params]
                updates = newton_schulz(torch.stack(grads).to(self.dtype))
                for p, update in zip(params, updates):
                    p.mul_(1 - lr * group["weight_decay"])
                    p.add_(update, alpha=-lr * 0.2 * math.sqrt(max(shape)))


def configure_optimizers(raw_model, cfg, dtype=torch.float32):
    """[AdamW], or [AdamW, Muon] where Muon has the matrices in the blocks."""
    matrices, decayed, plain = [], [], []
    in_blocks = set(raw_model.transformer.h.parameters())
    for p in raw_model.parameters():
        if p.dim() < 2:  # biases and gains: towards 0 they would only distort the model
            plain.append(p)
        elif p in in_blocks and cfg.optimizer == "muon":
            matrices.append(p)
        else:
            decayed.append(p)
    groups = [dict(params=decayed, weight_decay=cfg.weight_decay),
              dict(params=plain, weight_decay=0.0)]
    # betas and eps as in GPT-3, appendix B; fused is one kernel for all parameters
    adamw = torch.optim.AdamW(groups, lr=cfg.max_lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    if not matrices:
        return [adamw]
    return [adamw, Muon(matrices, lr=cfg.max_lr, weight_decay=cfg.weight_decay, dtype=dtype)]


def set_learning_rate(optimizers, cfg, step):
    for optimizer in optimizers:
        ratio = cfg.muon_lr_ratio if isinstance(optimizer, Muon) else 1.0
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step, cfg) * ratio


# ---------------------------------------------------------------------------------- training
class State:
    """All that the coming steps depend on, besides the constants and the data.

    What state_dict() returns is what a checkpoint holds.
    """

    def __init__(self, raw_model, optimizers, scaler):
        self.step = 0                 # optimizer steps done
        self.raw_model = raw_model    # the GPT itself, without DDP around it
        self.optimizers = optimizers
        self.scaler = scaler          # keeps float16 gradients in range; idle otherwise

    def state_dict(self):
        return {"step": self.step,
                "model": self.raw_model.state_dict(),
                "gpt_config": asdict(self.raw_model.config),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "scaler": self.scaler.state_dict()}

    def load_state_dict(self, saved):
        self.step = saved["step"]
        self.raw_model.load_state_dict(saved["model"])
        for optimizer, content in zip(self.optimizers, saved["optimizers"]):
            optimizer.load_state_dict(copy.deepcopy(content))  # it keeps the tensors it is given
        if saved["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(saved["scaler"])


@torch.no_grad()
def validation_loss(run):
    """Mean loss in nats per token over the first val_tokens tokens; None if a stop is requested.

    Each process sums up its share of the rows, so that neither B nor the number of processes
    changes the result.
    """
    cfg, raw_model = run.cfg, run.state.raw_model
    rows = min(cfg.val_tokens // cfg.T, run.val_loader.rows_per_epoch)
    total = torch.zeros((), device=run.device)
    for first in range(0, rows, world_size() * cfg.B):  # equally often on every rank
        if run.stop.requested_on_any_rank():
            return None
        row = first + rank() * cfg.B
        B = min(cfg.B, rows - row)
        if B > 0:  # at the end some ranks may have no rows left
            x, y = run.val_loader.batch(row, B, run.device)
            # .forward is not compiled: a smaller last batch is not worth compiling for
            forward = raw_model if B == cfg.B else raw_model.forward
            with run.autocast():
                _, loss = forward(x, y, return_logits=False)
            total += loss * B
    return sum_over_ranks(total).item() / rows


def train_step(run):
    """One optimizer step on total_batch_size tokens.

    Returns the mean loss of this process's rows and the norm of the gradient before clipping,
    both on the device: nothing in here waits for a GPU.
    """
    cfg, state, ddp_model = run.cfg, run.state, run.ddp_model
    micro_steps = cfg.total_batch_size // (cfg.B * cfg.T * world_size())
    mean_loss = torch.zeros((), device=run.device)
    for micro_step in range(micro_steps):
        x, y = run.train_loader.batch(first_row(cfg, state.step, micro_step), cfg.B, run.device)
        # DDP averages the gradients over the processes during backward. Only the last
        # micro-step needs it. no_sync() encloses the forward pass too, where DDP prepares it.
        sync = contextlib.nullcontext()
        if world_size() > 1 and micro_step < micro_steps - 1:
            sync = ddp_model.no_sync()
        with sync:
            with run.autocast():
                _, loss = ddp_model(x, y, return_logits=False)
            # backward() adds to the gradients. The loss is a mean over B rows; divided by the
            # number of micro-steps, they add up to the mean over all rows, as of one batch.
            loss = loss / micro_steps
            state.scaler.scale(loss).backward()
        mean_loss += loss.detach()
    set_learning_rate(state.optimizers, cfg, state.step)
    for optimizer in state.optimizers:
        state.scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(state.raw_model.parameters(), cfg.grad_clip or math.inf)
    for optimizer in state.optimizers:
        state.scaler.step(optimizer)
        optimizer.zero_grad()
    state.scaler.update()
    state.step += 1
    return mean_loss, norm


def due(every, run):
    """Whether what happens every so many steps is due: never if 0, else after the last one too."""
    step = run.state.step
    return every > 0 and (step % every == 0 or step == run.cfg.max_steps)


def train(run):
    """Save, evaluate, take a step; until max_steps, or until a signal requests a stop."""
    cfg, state = run.cfg, run.state
    with run.background:  # on any exit, wait for the save in progress
        while True:
            if due(cfg.save_every, run) or due(cfg.milestone_every, run):
                save(run)  # first, so that an evaluation that fails costs no steps
            if due(cfg.eval_every, run):
                report_evaluation(run, "val", validation_loss(run), "val loss")
            if due(cfg.hellaswag_every, run):
                report_evaluation(run, "hella", hellaswag_accuracy(run), "HellaSwag acc_norm")
            if due(cfg.sample_every, run):
                print_samples(run)
            if state.step == cfg.max_steps or run.stop.agreed:
                break
            start = time.perf_counter()
            loss, norm = train_step(run)
            report_step(run, loss, norm, start)
        finish(run)


# =============================================================================================
# Part two: what a long run on real machines needs
# =============================================================================================

# ----------------------------------------------------------------------- processes and errors
# torchrun starts one process per GPU. If one of them fails and the others go on, they wait for
# it for ever. So processes agree on errors, and rank 0 prints them, in one line.
class UserError(Exception):
    """A mistake that the user can correct. The text is the one line that is printed."""


def rank():
    return int(os.environ.get("RANK", 0))


def world_size():
    # Slurm may set WORLD_SIZE without RANK
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def print0(text):
    """Print from rank 0, in one piece, since the background thread prints too."""
    if rank() == 0:
        print(f"{text}\n", end="", flush=True)


def gather(value):
    """The values of all ranks, on every rank."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def sum_over_ranks(tensor):
    """The tensor, added up over all processes in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def told_once(text):
    """A UserError that all processes raise at the same point; rank 0 alone prints it."""
    return UserError(text if rank() == 0 else "")


@contextlib.contextmanager
def all_ranks_agree():
    """If this block fails on any process, all processes raise the same UserError at its end.

    No collective operation may stand inside: the process that failed would not take part.
    """
    problem = None
    try:
        yield
    except (UserError, OSError) as error:
        problem = explain(error)
        if problem is None:
            raise
    problems = [problem for problem in gather(problem) if problem]
    if problems:
        raise told_once(problems[0])


def join_processes(cfg):
    """Join the process group, if torchrun started this process. Returns its device."""
    if "RANK" not in os.environ:
        return pick_device(cfg.device, local_rank=0)
    device = pick_device(cfg.device, int(os.environ.get("LOCAL_RANK", 0)))
    # Imported now: DDP would do so after the group is made, and the defaults of this module's
    # functions (group=WORLD) would keep it alive; its threads could then abort Python's exit.
    from torch.distributed import nn as _  # noqa: F401
    try:
        store, _, _ = next(dist.rendezvous("env://"))
    except ValueError as e:
        raise UserError(f"RANK is set, but {e}: use torchrun, or unset RANK.") from None
    # torchrun's store outlives a restart. Without a prefix for each start, a restarted process
    # would find the addresses of those that died.
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    gpu = device if device.type == "cuda" else None
    dist.init_process_group(backend="nccl" if gpu else "gloo", store=store, rank=rank(),
                            world_size=world_size(), device_id=gpu)
    return device


def wrap_ddp(raw_model, cfg, device):
    """raw_model in DDP, which averages gradients over processes while backward still runs."""
    if world_size() == 1:
        return raw_model
    device_ids = [device.index] if device.type == "cuda" else None
    ddp_model = DDP(raw_model, device_ids=device_ids, gradient_as_bucket_view=True)
    if cfg.grad_comm == "bfloat16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
        # in a lambda, since DDP rejects this hook's name with gloo, where it works
        ddp_model.register_comm_hook(None, lambda _, bucket: bf16_compress_hook(None, bucket))
    return ddp_model


class StopRequest:
    """Ctrl-C or SIGTERM: the current step is finished and saved, then all processes end."""

    def __init__(self, device):
        self.device = device
        self.received = False  # by this process
        self.agreed = False    # by all processes, which then leave after the same step
        signal.signal(signal.SIGINT, self.receive)
        signal.signal(signal.SIGTERM, self.receive)

    def receive(self, number, frame):
        self.received = True

    def flag(self):
        """1.0 or 0.0, made on the device: a copy from the host would wait for the device."""
        return torch.full((), float(self.received), device=self.device)

    def requested_on_any_rank(self):
        """Whether any process got a signal. All processes must ask at the same point."""
        if world_size() == 1:
            self.agreed = self.received
        elif not self.agreed:
            self.agreed = sum_over_ranks(self.flag()).item() > 0
        return self.agreed


def smaller_B(cfg):
    """The next smaller B for the same total_batch_size, or None."""
    smaller = [B for B in range(1, cfg.B) if cfg.total_batch_size % (B * cfg.T * world_size()) == 0]
    return smaller[-1] if smaller else None


def explain(error, cfg=None):
    """The one line for an error that its user can do something about; None for a bug of ours."""
    if isinstance(error, (UserError, hellaswag.HellaSwagError)):
        return str(error)
    if isinstance(error, OSError) and error.filename:
        return (f"{error.filename} cannot be used ({error.strerror}): check the disk and the "
                f"permissions, or change data or log_dir.")
    if isinstance(error, KeyboardInterrupt):  # train() has handlers of its own
        return "Stopped before anything was trained."
    of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    if of_memory or re.search("can't allocate memory|out of memory", str(error)):  # CPU, MPS
        B = smaller_B(cfg)
        advice = f"--B={B} trains the same model in less" if B else "lower --T or the model"
        return f"Out of memory with B={cfg.B}: {advice}."
    if re.search("Connection (closed|reset) by peer", str(error)):
        return f"Rank {rank()} lost its connection to another process: see that one's error."
    return None


# -------------------------------------------------------------------- device, dtype, compile
# "auto" takes what is fast on this machine, and the first lines of a run say why. What was
# asked for and cannot work is refused before anything is trained.
def pick_device(name, local_rank):
    """The torch.device of this process. "auto": its GPU, else MPS, else the CPU."""
    if name == "auto":
        mps = torch.backends.mps.is_available() and world_size() == 1  # gloo has no MPS tensors
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    if world_size() > 1 and name not in ("cuda", "cpu"):
        raise UserError(f"device={name} is for one process: take --device=cuda, where each "
                        f"process has its own GPU, or --device=cpu.")
    if name == "cuda" and local_rank >= torch.cuda.device_count() > 0:
        raise UserError(f"This machine has {torch.cuda.device_count()} GPUs, fewer than the "
                        f"processes on it: lower --nproc_per_node, or take --device=cpu.")
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", local_rank)
        torch.ones(2, device=device).sum().item()  # fails without the device, or code for it
    except (RuntimeError, AssertionError) as e:  # AssertionError: a torch built without CUDA
        advice = "take --device=auto or --device=cpu"
        if "no kernel image" in str(e):
            advice = ("take --device=cpu, or a torch that has code for it: pip install torch "
                      "--index-url https://download.pytorch.org/whl/cu126")
        raise UserError(f'device="{name}" cannot be used by torch {torch.__version__} '
                        f"({first_line(e)}): {advice}.") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 for what stays in float32
        warnings.filterwarnings("ignore", message="Please use the new API settings to control")
    elif device.type == "cpu":
        keep_freed_memory()
    return device


def keep_freed_memory():
    """Have glibc's malloc keep freed memory instead of giving it back to the system.

    Otherwise arrays above 32 MiB, such as logits, are mapped and page-faulted again at every
    step, which was almost a third of GPT-2 (124M)'s step on a CPU.
    """
    if sys.platform == "linux":
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # as in malloc.h
        with contextlib.suppress(AttributeError):  # a C library without mallopt
            ctypes.CDLL(None).mallopt(M_MMAP_MAX, 0)
            ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, -1)


def cpu_has_bfloat16():
    """Whether this CPU multiplies bfloat16 in hardware, at twice the speed of float32."""
    if hasattr(torch.cpu, "get_capabilities"):  # in newer versions of torch
        flags = [name for name, value in torch.cpu.get_capabilities().items() if value is True]
    else:
        path = Path("/proc/cpuinfo")  # on Linux
        flags = path.read_text().split() if path.exists() else []
    return "avx512_bf16" in flags or "amx_bf16" in flags


def pick_dtype(cfg, device):
    """The dtype of the matrix products, and the reason in words."""
    if cfg.dtype != "auto":
        return getattr(torch, cfg.dtype), "as asked"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        gpu = f"compute capability {major}.{minor}"
        if major >= 8:  # is_bf16_supported() is true for emulation too, which is slow
            return torch.bfloat16, f"{gpu} has it in hardware"
        if cfg.optimizer == "muon":
            return torch.float32, f"{gpu} has no bfloat16, and Muon no loss scaling"
        return torch.float16, f"with loss scaling; {gpu} has no bfloat16"
    if device.type == "cpu" and cpu_has_bfloat16():
        return torch.bfloat16, "this CPU has it in hardware"
    return torch.float32, f"no bfloat16 known in this {device.type}'s hardware"


def pick_compile(choice, device):
    """Whether to use torch.compile, and the reason in words."""
    if choice == "False":
        return False, "as asked"
    if choice == "auto" and device.type != "cuda":
        return False, "auto compiles on CUDA only"
    try:  # a trivial function tells whether a compiler and Triton are there and know this GPU
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
        return True, "the first step takes a minute longer"
    except Exception as e:  # of any type; training can do without
        reason = f"torch.compile does not work here ({first_line(e)})"
    if choice == "auto":
        return False, reason
    raise UserError(f"{reason}: install a C++ compiler, for CUDA also Triton, "
                    f"or take --compile=False.")


def attention_kernel(gpt_config, device, dtype):
    """Which attention torch chooses for this model, from the name of its backward pass."""
    shape = (1, gpt_config.n_head, gpt_config.block_size, gpt_config.n_embd // gpt_config.n_head)
    q = torch.zeros(shape, device=device, dtype=dtype, requires_grad=True)
    name = F.scaled_dot_product_attention(q, q, q, is_causal=True).grad_fn.name()
    found = re.match(r"ScaledDotProduct(\w+?)Attention", name)
    return found[1] if found else "unfused"


# Dense 16-bit TFLOP/s. From NVIDIA's data sheets of these cards and, for RTX 3090, 4090 and 5090,
# its architecture white papers (float32 accumulate); sparse figures halved. A10G: AWS
PEAK_TFLOPS = {
    "GB200": 2500, "B200": 2250, "GH200": 989, "H200 NVL": 835, "H200": 989, "H100 PCIe": 756,
    "H100 NVL": 835, "H100": 989, "A100": 312, "A10G": 70, "A6000": 155, "L40S": 362, "L4": 121,
    "RTX 6000 Ada": 364, "RTX 5090": 209, "RTX 4090": 165, "RTX 3090": 71, "V100": 125, "T4": 65}


def peak_flops(device):
    """The GPU's peak in FLOP/s, or None where it is not known."""
    if device.type == "cuda":
        words = set(re.split(r"[\s-]+", torch.cuda.get_device_name(device)))
        for name, tflops in PEAK_TFLOPS.items():
            if words.issuperset(name.split()):
                return tflops * 1e12
    return None


def describe_device(device):
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"{device.type} ({torch.get_num_threads()} threads)"


def flops_per_token(raw_model, T):
    """Forward and backward: 6 N + 12 * layers * width * context (PaLM, appendix B)."""
    c = raw_model.config
    N = raw_model.num_params() - raw_model.transformer.wpe.weight.numel()
    return 6 * N + 12 * c.n_layer * c.n_embd * T


# ------------------------------------------------------------------ opening and checking data
# A damaged shard, tokens of another vocabulary or text in another encoding would train a bad
# model without a word. They are refused before the first step, each by its name.
def get_encoding(name):
    """tiktoken's "gpt2", or "bytes": every byte is a token, and <|endoftext|>."""
    if name == "bytes":
        return tiktoken.Encoding(name="bytes", pat_str=r"(?s:.{1,128})",
                                 mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={"<|endoftext|>": 256})
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as e:  # the download failed, or came damaged
        raise UserError(f"The GPT-2 vocabulary is not available ({type(e).__name__}): go online "
                        f"once, set TIKTOKEN_CACHE_DIR to a folder that holds it, or use "
                        f"--encoding=bytes.") from None


# a whitespace character before another one; to tiktoken \x1c ... \x1f are not whitespace
BEFORE_WORD = re.compile(r"[^\S\x1c-\x1f](?=[\S\x1c-\x1f])")


def encode(encoding, text):
    """Token ids of a text, as encoding.encode_ordinary() has them.

    tiktoken panics at 999,999 whitespace characters in a row that a word follows. So a long text
    is encoded in parts, cut before a whitespace character before a word: there GPT-2's pattern
    begins a token in any case, and the ids stay those of the whole text.
    """
    ids, start = [], 0
    while start < len(text):
        cut = BEFORE_WORD.search(text, start + 500_000)
        end = cut.start() if cut else len(text)
        ids += encoding.encode_ordinary(text[start:end])
        start = end
    return ids


def padded(n_vocab):
    """n_vocab rounded up to a multiple of 128, which GPUs multiply faster."""
    return math.ceil(n_vocab / 128) * 128


def open_shard(shard, length=None):
    """A .npy file memory-mapped, (N,) uint16; an array as it is. length: what N must be."""
    if not isinstance(shard, Path):
        return shard
    if not shard.is_file():  # to open a FIFO would block
        raise UserError(f"{shard} is missing or not a file: put it back, or change data.")
    try:
        tokens = np.load(shard, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise  # explain() has the line for it
    except Exception as e:  # a damaged header may raise anything in NumPy's parser
        raise UserError(f"{shard} is not a complete .npy file ({first_line(e)}): delete it and run "
                        f"fineweb.py again.") from None
    if getattr(tokens, "dtype", None) != np.uint16 or tokens.ndim != 1:
        kind = f"{getattr(tokens, 'dtype', 'several')} {getattr(tokens, 'shape', 'arrays')}"
        raise UserError(f"{shard} holds {kind}, not one 1-D uint16 array: delete it and run "
                        f"fineweb.py again.")
    if length is not None and len(tokens) != length:
        raise UserError(f"{shard} was replaced: it had {length:,} tokens when the run began and "
                        f"has {len(tokens):,}. Put it back and start the same command again.")
    return tokens


def read_ahead(shards):
    """Prefetch shards into the page cache, in a thread, as that may be slow.

    On a network disk each page that is missing costs milliseconds, and a batch has many.
    """
    def prefetch():
        for shard in shards:
            if isinstance(shard, Path):
                with contextlib.suppress(OSError), open(shard, "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
    if hasattr(os, "posix_fadvise"):  # not on macOS and Windows
        threading.Thread(target=prefetch, daemon=True).start()


def check_ids(tokens, n_vocab, shard):
    worst = int(tokens.max(initial=0))
    if worst >= n_vocab:
        name = shard.name if isinstance(shard, Path) else "The text"
        raise UserError(f"{name} holds token {worst}, but the encoding has {n_vocab}: "
                        f"it was made with another --encoding, or is damaged.")


def check_shards(loader):
    """Check the first ids of each shard, 200 M in all. Returns the data's fingerprint.

    A run is resumed on the same data only: the same names, lengths and first 4,096 ids.
    """
    seen = []
    for shard, length in zip(loader.shards, loader.lengths):
        tokens = open_shard(shard, length)
        check_ids(tokens[:200_000_000 // len(loader.shards)], loader.n_vocab, shard)
        is_file = isinstance(shard, Path)
        name = shard.name if is_file else f"text #{zlib.crc32(shard):08x}"
        seen.append((name, length, zlib.crc32(tokens[:4096])))
    crc = zlib.crc32(repr(seen).encode())
    return f"{sum(loader.lengths):,} tokens in {len(seen)} file(s) #{crc:08x}"


def find_data(path, encoding):
    """Shards to train on and to validate on; a text keeps its last tenth for validation."""
    if path.is_dir():
        train, val = sorted(path.glob("*_train_*.npy")), sorted(path.glob("*_val_*.npy"))
        if train and val:
            return train, val
        raise UserError(f"{path}/ holds no shards named *_{'val' if train else 'train'}_*.npy: "
                        f"run fineweb.py --local_dir={path}, or point --data elsewhere.")
    if not path.is_file():
        raise UserError(f"There is no data at {path}: run fineweb.py, or point --data at a "
                        f"folder of shards or at a text file.")
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as e:
        raise UserError(f"{path} is not UTF-8 text (byte {e.start}): convert it, or point "
                        f"--data elsewhere.") from None
    tokens = np.array(encode(encoding, text), dtype=np.uint16)
    cut = int(len(tokens) * 0.9)
    return [tokens[:cut]], [tokens[cut:]]


def open_data(cfg, encoding):
    """The loaders of training and of validation rows."""
    train_shards, val_shards = find_data(Path(cfg.data), encoding)
    train_loader = DataLoaderLite(train_shards, cfg.T, seed=cfg.seed, shuffle=cfg.shuffle,
                                  n_vocab=encoding.n_vocab)
    val_loader = DataLoaderLite(val_shards, cfg.T, n_vocab=encoding.n_vocab)
    rows, val_rows = train_loader.rows_per_epoch, val_loader.rows_per_epoch
    if rows < cfg.total_batch_size // cfg.T or val_rows < 1:
        raise UserError(f"{cfg.data} has {rows} training and {val_rows} validation rows of "
                        f"T={cfg.T} tokens; {cfg.total_batch_size // cfg.T} and 1 are needed: "
                        f"lower --T or --total_batch_size, or give more text.")
    return train_loader, val_loader


# ---------------------------------------------------------------- checkpoints, the log folder
# A run may be killed at any moment, the disk may fill up, a file may be damaged. So files are
# written atomically and verified, and an earlier run's results are never overwritten.
def write_whole(path, write, verify=None):
    """write(file) under a temporary name, flush it to the disk, verify(its path), rename it."""
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)  # it may have been deleted
    try:
        with open(part, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if verify:
            verify(part)
        os.replace(part, path)
    except (OSError, RuntimeError) as e:
        cause = e if isinstance(e, OSError) else e.__context__  # torch.save's RuntimeError hides it
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, str(path)) from None
        raise
    finally:
        part.unlink(missing_ok=True)


def read_checkpoint(path, verify=True):
    """The content of a .pt file of this script, memory-mapped, on the CPU.

    Pickled code is never run. verify: compare its checksums, which torch ignores.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch's format
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise ValueError("it was compressed, which torch does not notice")
            wrong = archive.testzip() if verify else None
            if wrong:
                raise ValueError(f"wrong checksum of {wrong}")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        missing = {"step", "model", "gpt_config", "encoding"} - content.keys()
        if missing:
            raise ValueError(f"it has no {min(missing)}")
    except Exception as e:  # a damaged or foreign file may raise anything in zipfile and torch
        raise UserError(f"{path} is damaged, or no .pt file of this script ({first_line(e)}): "
                        f"use another one.") from None
    return content


def config_from(content):
    """The GPTConfig in the content of a .pt file."""
    gpt_config = dict(content["gpt_config"])
    if not gpt_config.pop("tied", True):  # in files of earlier versions
        raise UserError("A .pt file with an untied lm_head is no longer supported.")
    return GPTConfig(**gpt_config)


def model_from(content):
    """The GPT in the content of a .pt file."""
    raw_model = GPT(config_from(content))
    raw_model.load_state_dict(content["model"])
    return raw_model


def checkpoint_paths(folder, kind="checkpoint"):
    """[(step, path)] of a folder's checkpoints, or of its milestones ("model"); newest first."""
    found = []
    for path in Path(folder).glob(f"{kind}_*.pt"):
        step = path.stem.removeprefix(f"{kind}_")
        if step.isdecimal():
            found.append((int(step), path))
    return sorted(found, reverse=True)


def newest_checkpoint(folder):
    """Path of the newest undamaged checkpoint, or None. Names the damaged ones."""
    paths = checkpoint_paths(folder)
    for _, path in paths:
        try:
            if "optimizers" in read_checkpoint(path):
                return path
            print0(f"{path} is damaged: it holds weights alone. Trying the one before it.")
        except UserError as e:
            print0(f"{e} Trying the one before it.")
    if paths:
        raise UserError(f"Every checkpoint in {folder}/ is damaged: put a good one there, or "
                        f"start again from step 0 with --resume=False.")
    return None


# A run may continue with other values of these: they change speed, place or what is watched
FREE_TO_CHANGE = {
    "B", "eval_every", "val_tokens", "hellaswag_every", "sample_every", "sample_prompt",
    "sample_tokens", "temperature", "top_k", "sample", "log_dir", "save_every",
    "milestone_every", "resume", "device", "dtype", "compile", "grad_comm"}


def load_checkpoint(path, cfg, fingerprint):
    """The content of a verified checkpoint. Raises UserError if it is of another training."""
    if not path.exists():  # rank 0 has verified it
        raise UserError(f"{path} is not seen by every process: log_dir must be on a disk that "
                        f"all machines share.")
    saved = read_checkpoint(path, verify=False)
    before = saved["constants"] | {"data": saved["fingerprint"]}
    now = asdict(cfg) | {"data": fingerprint}
    changed = []
    for name in sorted(now.keys() & before.keys() - FREE_TO_CHANGE):
        if before[name] != now[name]:
            changed.append(f"{name} was {before[name]!r}, is {now[name]!r}")
    if changed:
        raise UserError(f"The run in {cfg.log_dir}/ was made with other constants: "
                        f"{'; '.join(changed)}. Put them back, or take another --log_dir, "
                        f"or set that run aside with --resume=False.")
    return saved


class RunFolder:
    """log_dir and what is in it. Rank 0 of one run at a time owns it."""
    RESULTS = ("checkpoint_*.pt", "model_*.pt", "log.txt", "run.json", "curves.png", "hf")

    def __init__(self, cfg):
        from filelock import FileLock, Timeout  # torch depends on it
        self.path = Path(cfg.log_dir)
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(self.path / ".lock")
        try:
            self.lock.acquire(timeout=0)  # the system frees it, however this process ends
        except Timeout:
            raise UserError(f"Another run is using {self.path}/: wait until it ends, or "
                            f"take another --log_dir.") from None
        for part in self.path.glob("*.pt.part"):  # of saves that a kill cut short
            part.unlink()

    def find_checkpoint(self, cfg):
        """(path of the checkpoint to continue from or None, whether its run is finished)."""
        path = newest_checkpoint(self.path) if cfg.resume or self.restarted() else None
        if path is None:
            return None, False
        saved = read_checkpoint(path, verify=False)
        quick_start_data = QUICK_START["data"]
        if saved["constants"]["data"] == quick_start_data and cfg.data != quick_start_data:
            return None, False  # the quick start is over: begin() sets it aside
        kept = self.path / f"model_{cfg.max_steps:05d}.pt"  # what a run writes last of all
        return path, kept.exists() and saved["step"] >= cfg.max_steps

    def restarted(self):
        """Whether torchrun restarted, after a crash, the run that was begun here last."""
        starts = self.earlier_starts()
        return (os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and bool(starts)
                and starts[-1].get("torchrun") == os.environ.get("TORCHELASTIC_RUN_ID"))

    def begin(self, cfg, banner, step):
        """Set an earlier run aside, note this start in run.json, open log.txt."""
        if step == 0:
            self.set_aside()
        self.describe_run(cfg, banner, step)
        self.open_log(step)

    def set_aside(self):
        """Move the results of an earlier run into before_<n>/, if it took a step."""
        results = [path for pattern in self.RESULTS for path in self.path.glob(pattern)]
        only_begun = {path.name for path in results} <= {"log.txt", "run.json"}
        if only_begun and not read_log(self.path)["train"]:
            return
        n = 1
        while (self.path / f"before_{n}").exists():
            n += 1
        aside = self.path / f"before_{n}"
        aside.mkdir()
        for path in results:
            path.rename(aside / path.name)
        print0(f"the earlier results in {self.path}/ are now in {aside}/")

    def describe_run(self, cfg, banner, step):
        """run.json: the constants, and for each start what was run with what, and when."""
        starts = self.earlier_starts() if step > 0 else []
        starts.append({"time": time.strftime("%Y-%m-%d %H:%M:%S %z"), "step": step,
                       "command": sys.argv, "torchrun": os.environ.get("TORCHELASTIC_RUN_ID"),
                       "processes": world_size(), "commit": git_commit(),
                       "versions": versions(), "said": banner})
        text = json.dumps({"constants": asdict(cfg), "starts": starts}, indent=2)
        write_whole(self.path / "run.json", lambda file: file.write(text.encode()))

    def earlier_starts(self):
        """What run.json says about them; [] if it is missing or damaged."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            starts = json.loads((self.path / "run.json").read_text())["starts"]
            return [start for start in starts if isinstance(start, dict)]
        return []

    def open_log(self, step):
        """Open log.txt, without the lines from `step` on and without an incomplete line."""
        self.lines, path = [], self.path / "log.txt"
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                if re.fullmatch(rb"\d+ \w+ \S+\n", line) and int(line.split()[0]) < step:
                    self.lines.append(line)
        self.rewrite_log()

    def rewrite_log(self):
        path = self.path / "log.txt"
        write_whole(path, lambda file: file.writelines(self.lines))
        self.log_file = open(path, "ab", buffering=0)

    def log(self, step, stream, value):
        """A line in log.txt, unbuffered, since people tail it."""
        self.lines.append(f"{step} {stream} {value:.6f}\n".encode())
        with contextlib.suppress(OSError):  # sync_log() writes what a full disk refuses now
            self.log_file.write(self.lines[-1])

    def sync_log(self):
        """Have all lines on the disk: log.txt must hold every step before a checkpoint."""
        path = self.path / "log.txt"
        if not path.exists() or path.stat().st_size != sum(map(len, self.lines)):
            self.rewrite_log()
        os.fsync(self.log_file.fileno())


def save(run):
    """Begin to save the state as it is now; rank 0 writes it in the background.

    Training waits only until the state is copied into host memory, 1.5 GB for GPT-2 (124M).
    The copy's memory is used again by the next save.
    """
    flush_reports(run)  # ends the run here if the last loss is not finite
    if rank() != 0 or run.state.step == run.saved_step:
        return
    wait_for_save(run)
    content = checkpoint_content(run)
    try:
        content = copy_to_host(content, run.host_copies)
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        run.saving = run.background.submit(write_checkpoint, run, content)
    except (RuntimeError, MemoryError):  # no memory for the copy: training waits for the disk
        run.host_copies.clear()
        run.saving = run.background.submit(write_checkpoint, run, content)
        run.saving.exception()  # waits
    run.saved_step = run.state.step


def wait_for_save(run):
    """Wait for the save in progress. Returns None, or why it failed."""
    problem = run.saving.result() if run.saving else None
    run.saving = None
    if problem:
        run.saved_step = None
    return problem


def copy_to_host(content, copies):
    """content with its tensors copied into those of `copies`, shared ones once."""
    if isinstance(content, dict):
        return {key: copy_to_host(value, copies) for key, value in content.items()}
    if isinstance(content, list):
        return [copy_to_host(value, copies) for value in content]
    if not torch.is_tensor(content):
        return content
    key = (content.data_ptr(), content.shape)
    if key not in copies:
        copies[key] = torch.empty_like(content, device="cpu", pin_memory=content.is_cuda)
    return copies[key].copy_(content, non_blocking=content.is_cuda)


def checkpoint_content(run):
    """Plain tensors and plain values, which torch.load(weights_only=True) reads."""
    return run.state.state_dict() | {
        "encoding": run.cfg.encoding, "constants": asdict(run.cfg), "versions": versions(),
        "fingerprint": run.fingerprint}


def write_checkpoint(run, content):
    """In the background: write, verify, rename. Returns None, or why it failed."""
    folder, cfg, step, start = run.folder, run.cfg, content["step"], time.perf_counter()
    path = folder.path / f"checkpoint_{step:05d}.pt"
    try:
        for name, tensor in content["model"].items():
            if not tensor.isfinite().all():
                raise UserError(f"{name} is not finite")
        folder.sync_log()
        if cfg.milestone_every and step % cfg.milestone_every == 0 and step < cfg.max_steps:
            write_weights(folder, content)
        write_whole(path, lambda file: torch.save(content, file), verify=read_checkpoint)
        kept = [old for old_step, old in checkpoint_paths(folder.path) if old_step <= step]
        for old in kept[2:]:  # two remain, in case the newest turns out to be damaged
            old.unlink()
    except (OSError, UserError) as e:
        advice = " Make room before the next save." if isinstance(e, OSError) else ""
        print0(f"!!! NOT SAVED at step {step}: {first_line(e)}. The last checkpoint in "
               f"{folder.path}/ is still there.{advice}")
        return first_line(e)
    print0(f"{step:5d}/{cfg.max_steps} saved {path} in {time.perf_counter() - start:.1f} s")
    return None


def write_weights(folder, content):
    """model_<step>.pt, kept for good: a checkpoint without what only training needs."""
    content = {k: v for k, v in content.items() if k not in ("optimizers", "scaler")}
    path = folder.path / f"model_{content['step']:05d}.pt"
    write_whole(path, lambda file: torch.save(content, file))


def finish(run):
    """End the run: save it, and after the last step export it."""
    flush_reports(run)
    cfg, step = run.cfg, run.state.step
    with all_ranks_agree():
        if rank() == 0:
            save(run)
            problem = wait_for_save(run)
            run.folder.sync_log()
            if problem:
                raise UserError(f"Step {step} could not be saved in {cfg.log_dir}/ ({problem}): "
                                f"make room, and start the same command again.")
            if not run.stop.agreed:
                export_at_end(run)
                write_weights(run.folder, checkpoint_content(run))
    if run.stop.agreed:
        print0(f"Stopped by a signal after {step} steps; the same command continues there.")
    else:
        print0(f"Done. To see what it writes: python train_gpt2.py --sample=3 "
               f"--log_dir={cfg.log_dir}")


# -------------------------------------------------------------------------------- log, curves
# log.txt is for notebooks, stdout for people, curves.png plots both. None of them makes the GPU
# wait, and an error while plotting never ends a run.
def report_step(run, loss, norm, start):
    """Report the step that was launched at time `start`; loss and norm are on the device.

    To read a number from a GPU is to wait until it is computed, and a GPU with nothing else to
    do idles meanwhile. So on a GPU each step is reported when the next one was launched, unless
    a save or an evaluation comes before that.
    """
    cfg, on_gpu = run.cfg, run.device.type == "cuda"
    numbers = sum_over_ranks(torch.stack((loss, norm, run.stop.flag())))
    numbers = numbers.to("cpu", non_blocking=on_gpu)
    computed = torch.cuda.Event() if on_gpu else None
    if on_gpu:
        computed.record()
    run.unreported.append((run.state.step - 1, start, numbers, computed))
    intervals = (cfg.save_every, cfg.milestone_every, cfg.eval_every, cfg.hellaswag_every,
                 cfg.sample_every)
    step_is_next = not any(due(every, run) for every in intervals)
    flush_reports(run, keep=1 if on_gpu and step_is_next else 0)


def flush_reports(run, keep=0):
    """Report all steps that were launched but for the last `keep`."""
    while len(run.unreported) > keep:
        step, start, numbers, computed = run.unreported.pop(0)
        if computed:
            computed.synchronize()
        loss, norm, stops = (numbers / world_size()).tolist()
        run.stop.agreed = run.stop.agreed or stops > 0
        # float16: the scaler skips a step with an infinite norm and halves its scale
        scaler = run.state.scaler
        skipped = not math.isfinite(norm) and scaler.is_enabled() and scaler.get_scale() > 1e-3
        if not math.isfinite(loss) or not (math.isfinite(norm) or skipped):
            raise told_once(f"The loss of step {step} is {loss} and its gradient's norm {norm}: "
                            f"look at the data, or start again with a lower --max_lr in another "
                            f"--log_dir. What was saved is still there.")
        run.step_ends.append(time.perf_counter())
        report(run, "train", loss, step_line(run, step, loss, norm, start), step)


def step_line(run, step, loss, norm, start):
    """What stdout says about a step."""
    cfg, ends = run.cfg, run.step_ends
    seconds = per_step = ends[-1] - start
    if len(ends) > 1:
        seconds = ends[-1] - max(start, ends[-2])  # a GPU begins it when the one before ends
        per_step = (ends[-1] - ends[0]) / (len(ends) - 1)  # evaluations too, but no compilation
    left = datetime.timedelta(seconds=round(per_step * (cfg.max_steps - step - 1)))
    rate, mfu = cfg.total_batch_size / seconds, ""
    if peak_flops(run.device):
        flops = rate * flops_per_token(run.state.raw_model, cfg.T) / world_size()
        mfu = f" mfu {flops / peak_flops(run.device):.0%}"
    return (f"loss {loss:.4f} lr {get_lr(step, cfg):.2e} norm {norm:.2f} {seconds * 1e3:.0f} ms "
            f"{rate:,.0f} tok/s{mfu} {left} left")


def report(run, stream, value, text, step=None):
    """A line in log.txt, and a more detailed one on stdout.

    Steps count from 0; what is evaluated before step n has the number n.
    """
    step = run.state.step if step is None else step
    if run.folder:
        run.folder.log(step, stream, value)
    print0(f"{step:5d}/{run.cfg.max_steps} {text}")


def report_evaluation(run, stream, value, label):
    """Report an evaluation and draw the curves; value: None if it was interrupted."""
    if value is not None:
        report(run, stream, value, f"{label} {value:.4f}")
        if run.folder:
            run.background.submit(draw_curves_if_possible, run.folder.path)


def read_log(folder):
    """{stream: [(step, value), ...]} of the log.txt in a folder."""
    streams, path = defaultdict(list), Path(folder, "log.txt")
    text = path.read_text() if path.exists() else ""
    for step, stream, value in re.findall(r"^(\d+) (\w+) (\S+)\n", text, re.MULTILINE):
        streams[stream].append((int(step), float(value)))
    return streams


def draw_curves(folder):
    """<folder>/curves.png of a running or finished run: losses and HellaSwag against tokens."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state
    from matplotlib.ticker import EngFormatter
    constants = json.loads(Path(folder, "run.json").read_text())["constants"]
    streams = read_log(folder)
    panels = 2 if streams["hella"] else 1
    figure = Figure(figsize=(6 * panels, 4.5), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]

    def plot(axis, stream, label, **style):
        if streams[stream]:
            steps, values = np.array(streams[stream]).T
            axis.plot(steps * constants["total_batch_size"], values, markersize=3,
                      label=f"{label}, now {values[-1]:.3f}", **style)

    def baseline(axis, value, label, linestyle="--"):
        axis.axhline(value, color="gray", linestyle=linestyle, label=f"{label}: {value}")

    axes[0].set(title="Loss", ylabel="nats per token")
    plot(axes[0], "train", "training", alpha=0.4)
    plot(axes[0], "val", "validation", marker="o")
    if constants["encoding"] == "gpt2":  # losses of other encodings do not compare
        baseline(axes[0], 3.2924, "GPT-2 124M, validation")
    if streams["hella"]:
        axes[1].set(title="HellaSwag", ylabel="acc_norm (chance is 0.25)")
        plot(axes[1], "hella", "HellaSwag", marker="o")
        baseline(axes[1], 0.2945, "GPT-2 124M")
        baseline(axes[1], 0.337, "GPT-3 124M", linestyle=":")  # Brown et al. 2020, table H.1
    for axis in axes:
        axis.set(xlabel="tokens seen", xlim=(0, None))
        axis.xaxis.set_major_formatter(EngFormatter())  # 500 k, 2 M, 10 G
        axis.grid(alpha=0.3)
        if axis.get_lines():
            axis.legend()
    write_whole(Path(folder, "curves.png"), lambda file: figure.savefig(file, dpi=100))


def draw_curves_if_possible(folder):
    """In the background; matplotlib is optional, and an error in it ends no run."""
    try:
        draw_curves(folder)
    except ImportError:
        pass
    except Exception as e:
        print0(f"no curves.png this time: {type(e).__name__} {first_line(e)}")


def versions():
    return {"python": platform.python_version(), "torch": str(torch.__version__),
            "numpy": np.__version__, "tiktoken": tiktoken.__version__}


def git_commit():
    """The commit of this file, with "-dirty" if files were changed since; None outside git."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always",
               "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


# ---------------------------------------------------------------------- samples and HellaSwag
# Both change nothing about the training: samples draw from generators of their own, and neither
# runs the compiled model, which would be compiled again for every new shape.
def printable(text):
    """text with control characters, which could confuse a terminal, escaped."""
    def shown(c):
        return c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode()
    return "".join(map(shown, text))


def sample_text(raw_model, encoding, cfg, seed):
    """sample_prompt and how the model continues it."""
    device = next(raw_model.parameters()).device
    prompt = encode(encoding, cfg.sample_prompt) or [encoding.eot_token]
    tokens = raw_model.generate(
        torch.tensor([prompt], device=device), cfg.sample_tokens, temperature=cfg.temperature,
        top_k=cfg.top_k or None, generator=torch.Generator(device).manual_seed(seed))
    text = encoding.decode_bytes(tokens[0].tolist())
    return printable(text.decode("utf-8", errors="backslashreplace"))


def print_samples(run):
    """One sample from each process, printed whole and in order by rank 0."""
    step = run.state.step
    untrained = step == 0 and run.cfg.init_from == "scratch"
    if untrained or run.stop.agreed:
        return
    seed = hash((run.cfg.seed, step, rank())) % 2**63
    with run.autocast():
        text = sample_text(run.state.raw_model, run.encoding, run.cfg, seed)
    for number, sample in enumerate(gather(text)):
        print0(f"--- sample of rank {number} at step {step} ---\n{sample}\n---")


def load_hellaswag(cfg, raw_model):
    """HellaSwag's questions, ready to be scored; if it is off, None, and rank 0 says why."""
    if not cfg.hellaswag_every:
        return None
    examples, reason = None, None
    if cfg.encoding != "gpt2":
        reason = f"its questions need encoding=gpt2, not {cfg.encoding}"
    elif rank() == 0:  # one process fetches them for all
        try:
            examples = list(hellaswag.iterate_examples("val"))
        except hellaswag.HellaSwagError as e:
            reason = str(e)
    if reason:
        print0(f"{'HellaSwag':<10} off: {reason}")
    examples = gather(examples)[0]
    return hellaswag.prepare(examples, raw_model) if examples else None


def hellaswag_accuracy(run):
    """acc_norm of the model as it is; None if HellaSwag is off or a stop was requested."""
    if run.hellaswag is None or run.stop.agreed:
        return None
    with run.autocast():
        score = hellaswag.evaluate(run.state.raw_model, run.hellaswag,
                                   stop=run.stop.requested_on_any_rank)
    return score.acc_norm if score else None


def sample_only(cfg, device):
    """--sample=N: print N samples of the newest weights. Nothing is trained or locked."""
    check_config(cfg)
    if cfg.init_from == "scratch":
        raw_model, encoding = newest_weights(cfg.log_dir)
    else:
        raw_model, encoding = load_weights(cfg.init_from)
    raw_model.to(device)
    dtype, _ = pick_dtype(cfg, device)
    for i in range(cfg.sample):
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            text = sample_text(raw_model, encoding, cfg, seed=cfg.seed + i)
        print0(text if i == 0 else f"---\n{text}")


def newest_weights(folder):
    """(GPT, its encoding) of the newest undamaged .pt in a folder, checkpoint or milestone."""
    paths = checkpoint_paths(folder) + checkpoint_paths(folder, "model")
    for _, path in sorted(paths, reverse=True):
        try:
            content = read_checkpoint(path)
        except UserError:  # damaged, or just deleted by a run that trains
            continue
        return model_from(content), get_encoding(content["encoding"])
    raise UserError(f"There are no weights in log_dir={folder}: train first, or name some with "
                    f"--init_from.")


# ------------------------------------------------------------------------------- Hugging Face
# Weights come from transformers' GPT-2 and go to it. A model that computes something else than
# ours is rejected in one line; an export replaces an older one only when it is complete.
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # (in, out) there, (out, in) here


def quiet_transformers():
    """The package without its notices and progress bars: errors are ours to print."""
    import huggingface_hub
    import transformers
    huggingface_hub.utils.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def load_hugging_face(name):
    """The GPT in a Hugging Face folder or repository."""
    hf = read_hugging_face(name)
    c, source = hf.config, hf.state_dict()
    raw_model = GPT(GPTConfig(
        block_size=c.n_positions, vocab_size=padded(c.vocab_size), n_layer=c.n_layer,
        n_head=c.n_head, n_embd=c.n_embd, n_vocab=c.vocab_size))
    with torch.no_grad():
        for key, p in raw_model.state_dict().items():
            weight = source[key].t() if key.endswith(TRANSPOSED) else source[key]
            p[:len(weight)] = weight  # the embedding alone has more rows here: the padding
    return raw_model


def read_hugging_face(name):
    """transformers' GPT2LMHeadModel, if it is one that computes what our GPT does."""
    ours = {"model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
            "n_inner": None, "scale_attn_weights": True, "tie_word_embeddings": True,
            "scale_attn_by_inverse_layer_idx": False}
    try:
        transformers = quiet_transformers()
        c = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        differing = [key for key, value in ours.items() if getattr(c, key, None) != value]
        if "n_inner" in differing and c.n_inner == 4 * c.n_embd:
            differing.remove("n_inner")
        if differing:
            key = differing[0]
            raise UserError(f"{name} is not a GPT-2 like ours: its config.json says "
                            f"{key}={getattr(c, key, None)}, not {ours[key]}.")
        hf, info = transformers.GPT2LMHeadModel.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=True)
    except UserError:
        raise
    except Exception as e:  # foreign files and networks may raise anything in there
        raise UserError(f'init_from="{name}" cannot be loaded ({first_line(e)}): give a Hugging '
                        f"Face folder, go online (HF_ENDPOINT names a mirror), "
                        f"or take --init_from=scratch.") from None
    wrong = [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]]
    wrong = sorted([*wrong, *info["missing_keys"]])
    if wrong:
        more = f" and {len(wrong) - 12} more" if len(wrong) > 12 else ""
        raise UserError(f"{name} is not a complete GPT-2: missing, or of another shape than its "
                        f"config.json says: {', '.join(wrong[:12])}{more}.")
    return hf


def check_tokenizer(name, encoding):
    """Raise UserError if a Hugging Face folder has a tokenizer that is not `encoding`."""
    probe = "Hello, I'm a language model: naïve 日本, 1234\n\n  x"
    try:
        tokenizer = quiet_transformers().AutoTokenizer.from_pretrained(
            name, trust_remote_code=False)
        tokens = tokenizer.encode(probe, add_special_tokens=False)
    except Exception:  # it has none, or one that nothing here can read
        return
    # where there is none, newer versions of transformers make an empty one
    if len(tokenizer) > 1 and tokens != encode(encoding, probe):
        raise UserError(f"{name} has a tokenizer of its own, other than encoding="
                        f"{encoding.name}: its weights were trained with other tokens.")


def save_hugging_face(raw_model, folder, encoding=None):
    """Write config.json, model.safetensors, generation_config.json; with encoding a tokenizer.

    Files of these names are replaced once all new ones are whole. Needs `transformers`.
    """
    transformers = quiet_transformers()
    c, end_of_text = raw_model.config, raw_model.config.n_vocab - 1  # the last id
    hf = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=c.n_vocab, n_positions=c.block_size, n_layer=c.n_layer, n_head=c.n_head,
        n_embd=c.n_embd, bos_token_id=end_of_text, eos_token_id=end_of_text,
        pad_token_id=end_of_text))
    if c.block_size <= 256:  # a pipeline's default of 256 new tokens is beyond this context
        hf.generation_config.max_length = c.block_size
    weights = {}
    for key, weight in raw_model.state_dict().items():
        if key in ("transformer.wte.weight", "lm_head.weight"):
            weight = weight[:c.n_vocab]
        weights[key] = weight.t().contiguous() if key.endswith(TRANSPOSED) else weight
    hf.load_state_dict(weights)
    folder, part = Path(folder), Path(f"{Path(folder)}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        hf.save_pretrained(part, max_shard_size="50GB")  # in one file
        if encoding:
            hugging_face_tokenizer(encoding, c.block_size).save_pretrained(part)
    except Exception as e:  # safetensors and tokenizers have errors of their own for a full disk
        if isinstance(e, OSError) or "os error" in str(e).lower():
            raise OSError(0, first_line(e), str(part)) from None
        raise
    folder.mkdir(parents=True, exist_ok=True)
    for file in part.iterdir():
        os.replace(file, folder / file.name)
    part.rmdir()


def hugging_face_tokenizer(encoding, context):
    """A tiktoken encoding as a transformers tokenizer with the same ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2TokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    letters = bytes_to_unicode()  # a printable letter for each byte, as in these files
    ids = {}
    for i in range(encoding.eot_token):
        token = encoding.decode_single_token_bytes(i)
        ids["".join(letters[byte] for byte in token)] = i
    merges = []  # tiktoken joins those neighbours first whose result has the lowest id
    for token in ids:
        for cut in range(1, len(token)):
            if token[:cut] in ids and token[cut:] in ids:
                merges.append((token[:cut], token[cut:]))
    tokenizer = Tokenizer(models.BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # GPT-2's regex
    tokenizer.decoder = decoders.ByteLevel()
    return GPT2TokenizerFast(tokenizer_object=tokenizer, model_max_length=context,
                             clean_up_tokenization_spaces=False)


def export_at_end(run):
    """Leave log_dir/hf; where transformers is missing or fails, say how to make it later."""
    folder = run.folder.path / "hf"
    try:
        save_hugging_face(run.state.raw_model, folder, run.encoding)
    except Exception as e:  # an optional package may raise anything
        if isinstance(e, OSError) and str(e.filename).startswith(str(folder)):
            raise  # the disk: the same command exports once there is room
        print0(f"not exported ({type(e).__name__}: {first_line(e)}): "
               f"export() in train_gpt2.py does it later")
    else:
        print0(f"exported to {folder}/, for transformers' AutoModelForCausalLM.from_pretrained")


def export(pt, folder):
    """A .pt file to a Hugging Face folder:

    python -c "import train_gpt2 as t; t.export('log/model_19073.pt', 'hf')"
    """
    try:
        content = read_checkpoint(pt)
        raw_model = model_from(content)
    except UserError as e:
        sys.exit(str(e))
    try:
        encoding = get_encoding(content["encoding"])
    except UserError as e:
        encoding = None
        print0(f"{e} Exported without a tokenizer.")
    raw_model.save_pretrained(folder, encoding)


# ------------------------------------------------------------------------------- setting up
# Everything that can be wrong is checked before the first step, and before log_dir is touched.
CHOICES = {
    "encoding": ("gpt2", "bytes"), "optimizer": ("adamw", "muon"),
    "lr_shape": ("cosine", "linear"), "compile": ("auto", "True", "False"),
    "dtype": ("auto", "bfloat16", "float16", "float32"), "grad_comm": ("float32", "bfloat16")}
AT_LEAST_1 = {"total_batch_size", "B", "T", "n_layer", "n_head", "n_embd", "max_steps"}


def check_config(cfg):
    """Raise UserError for constants that make no sense, and suggest some that do."""
    for name, value in asdict(cfg).items():
        least = 1 if name in AT_LEAST_1 else 0
        if name in CHOICES and value not in CHOICES[name]:
            raise UserError(f'{name}="{value}" is not known: '
                            f"take one of {', '.join(CHOICES[name])}.")
        if isinstance(value, (int, float)) and not (value >= least and math.isfinite(value)):
            raise UserError(f"{name}={value} is out of range: it must be {least} or more.")
    if cfg.seed >= 2**32:
        raise UserError(f"seed={cfg.seed} is out of range: it must be below {2**32}.")
    if cfg.val_tokens < cfg.T:
        raise UserError(f"val_tokens={cfg.val_tokens} is less than a row of T={cfg.T} tokens: "
                        f"raise --val_tokens.")
    if cfg.optimizer == "muon" and cfg.dtype == "float16":
        raise UserError("optimizer=muon has no loss scaling, which dtype=float16 needs: "
                        "change one of the two.")
    per_pass = cfg.B * cfg.T * world_size()
    if cfg.total_batch_size % per_pass:
        nearest = max(1, round(cfg.total_batch_size / per_pass)) * per_pass
        or_B = f", or keep it with --B={smaller_B(cfg)}" if smaller_B(cfg) else ""
        raise UserError(f"total_batch_size={cfg.total_batch_size} is not a multiple of B * T * "
                        f"processes = {cfg.B} * {cfg.T} * {world_size()} = {per_pass}; the "
                        f"nearest that is: --total_batch_size={nearest}{or_B}.")


def load_weights(name, encoding=None):
    """(GPT, its encoding) of a .pt file, or of a Hugging Face folder or repository.

    encoding: the one to be used, where that is known.
    """
    if name.endswith(".pt"):
        content = read_checkpoint(name)
        return model_from(content), encoding or get_encoding(content["encoding"])
    raw_model = load_hugging_face(name)
    encoding = encoding or get_encoding("bytes" if raw_model.config.n_vocab == 257 else "gpt2")
    check_tokenizer(name, encoding)
    return raw_model, encoding


def build_model(cfg, encoding, saved=None):
    """The GPT to train: init_from's, one from scratch, or one of a checkpoint's shape."""
    torch.manual_seed(cfg.seed)
    if saved:
        return GPT(config_from(saved))  # State loads the weights, with all else
    if cfg.init_from == "scratch":
        return GPT(GPTConfig(
            block_size=cfg.T, vocab_size=padded(encoding.n_vocab), n_layer=cfg.n_layer,
            n_head=cfg.n_head, n_embd=cfg.n_embd, n_vocab=encoding.n_vocab))
    raw_model, _ = load_weights(cfg.init_from, encoding)
    c = raw_model.config
    if c.n_vocab != encoding.n_vocab:
        raise UserError(f"init_from={cfg.init_from} has a vocabulary of {c.n_vocab}, "
                        f"encoding={cfg.encoding} one of {encoding.n_vocab}: they must match.")
    if cfg.T > c.block_size:
        raise UserError(f"T={cfg.T} is above the context of init_from={cfg.init_from}, "
                        f"block_size={c.block_size}: lower --T.")
    return raw_model


def set_up(cfg, device):
    """Check everything, then build what train() needs. None if the run in log_dir is finished."""
    with all_ranks_agree():
        check_config(cfg)
        encoding = get_encoding(cfg.encoding)
        train_loader, val_loader = open_data(cfg, encoding)
        check_shards(val_loader)
        fingerprint = check_shards(train_loader)
        folder = RunFolder(cfg) if rank() == 0 else None
        found = folder.find_checkpoint(cfg) if folder else None
    path, finished = gather(found)[0]
    with all_ranks_agree():
        saved = load_checkpoint(path, cfg, fingerprint) if path else None
        raw_model = build_model(cfg, encoding, saved).to(device)
        compiled, compile_reason = pick_compile(cfg.compile, device)
    if finished:
        print0(f"The run in {cfg.log_dir}/ is finished, after {saved['step']} steps. To train "
               f"another, take a new --log_dir, or set this one aside with --resume=False.")
        return None
    dtype, dtype_reason = pick_dtype(cfg, device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    state = State(raw_model, configure_optimizers(raw_model, cfg, dtype), scaler)
    if saved:
        state.load_state_dict(saved)
    banner = describe(cfg, raw_model, train_loader, val_loader) | {
        "device": describe_device(device),
        "dtype": f"{str(dtype).removeprefix('torch.')}: {dtype_reason}",
        "attention": attention_kernel(raw_model.config, device, dtype),
        "compile": f"{'on' if compiled else 'off'}: {compile_reason}",
        "log": f"{cfg.log_dir}/log.txt" + (f", continuing from {path}" if path else "")}
    for heading, text in banner.items():
        print0(f"{heading:<10} {text}")
    with all_ranks_agree():
        if folder:
            folder.begin(cfg, banner, state.step)
    if compiled:
        raw_model.compile()  # raw_model(x) runs compiled from here on, .forward and .hidden do not
    return SimpleNamespace(
        cfg=cfg, device=device, encoding=encoding, state=state,
        train_loader=train_loader, val_loader=val_loader, fingerprint=fingerprint,
        ddp_model=wrap_ddp(raw_model, cfg, device),
        autocast=partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32),
        hellaswag=load_hellaswag(cfg, raw_model),  # its questions; None if it is off
        folder=folder,                             # on rank 0
        stop=StopRequest(device),
        background=ThreadPoolExecutor(max_workers=1),  # saves, and draws curves
        saving=None,            # the save in progress
        saved_step=state.step,  # the step of the last save, or of the start
        host_copies={},         # buffers into which a save copies the state's tensors
        unreported=[],          # steps that were launched and not yet reported
        step_ends=[])           # end times of the reported ones


def describe(cfg, raw_model, train_loader, val_loader):
    """The first lines of a run, {heading: text}."""
    c, tokens = raw_model.config, cfg.max_steps * cfg.total_batch_size
    micro_steps = cfg.total_batch_size // (cfg.B * cfg.T * world_size())
    has_matplotlib = importlib.util.find_spec("matplotlib")
    return {
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "data": f"{cfg.data}: {sum(train_loader.lengths):,} tokens to train on, "
                f"{sum(val_loader.lengths):,} to validate on",
        "model": f"{raw_model.num_params():,} parameters: {c.n_layer} layers, {c.n_head} heads, "
                 f"{c.n_embd} wide, context {c.block_size}, vocabulary {c.n_vocab:,}",
        "batch": f"{cfg.total_batch_size:,} tokens: B={cfg.B} rows x T={cfg.T} tokens x "
                 f"{world_size()} process(es) x {micro_steps} micro-step(s)",
        "training": f"{cfg.max_steps:,} steps of {cfg.optimizer}: {tokens / 1e6:,.1f} M tokens, "
                    f"{tokens / cfg.T / train_loader.rows_per_epoch:.2f} epochs",
        "curves": f"{cfg.log_dir}/curves.png" if has_matplotlib else "off: no matplotlib here"}


# ------------------------------------------------------------------------------ command line
def boolean(text):
    if text not in ("True", "False"):
        raise argparse.ArgumentTypeError(f"takes True or False, not {text!r}")
    return text == "True"


def parse_args():
    """Config of the constants and the flags, and whether this is the quick start."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False)
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(Config), re.M))
    for field in dataclasses.fields(Config):
        text = f"{comments[field.name]} [{field.default}]".replace("%", "%%")
        parser.add_argument(f"--{field.name}", type=boolean if field.type is bool else field.type,
                            metavar="X", default=argparse.SUPPRESS, help=text)

    def refuse(message):
        raise told_once(f"{message} (--help lists every flag).")
    parser.error = refuse
    flags = vars(parser.parse_args())
    no_data_named = "data" not in flags and Config.data == "edu_fineweb10B"
    quick_start = no_data_named and not Path(Config.data).exists()
    cfg = Config(**{**(QUICK_START if quick_start else {}), **flags})
    if quick_start and "B" not in flags:  # the same command on more processes: fewer rows each
        cfg.B = max(1, cfg.B // world_size())
    return cfg, quick_start


def run_script(cfg, quick_start):
    """Sample, or set up and train."""
    device = join_processes(cfg)
    if cfg.sample:
        return sample_only(cfg, device)
    if quick_start:
        print0("Quick start: there are no shards yet, so this trains a small GPT on the bytes of\n"
               "input.txt. For the real thing: python fineweb.py, then the same command again\n"
               "(8 GPUs: torchrun --standalone --nproc_per_node=8 train_gpt2.py).\n")
    run = set_up(cfg, device)
    if run:
        train(run)


def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # output that cannot be written, or not in the terminal's encoding, must not end a run
    sys.stdout, sys.stderr = hellaswag.lossy(sys.stdout), hellaswag.lossy(sys.stderr)
    cfg = None
    try:
        cfg, quick_start = parse_args()
        run_script(cfg, quick_start)
        if dist.is_initialized():
            dist.destroy_process_group()
    except (Exception, KeyboardInterrupt) as error:
        end_process(error, cfg)


def end_process(error, cfg):
    """Print what went wrong, in one line where the user can do something, and exit with 1."""
    line = explain(error, cfg)
    if line is None:
        traceback.print_exc()
    elif line:
        print(f"train_gpt2.py: {line}", file=sys.stderr, flush=True)
    if dist.is_initialized():
        os._exit(1)  # a normal exit would wait for other processes, which may wait for this one
    sys.exit(1)


if __name__ == "__main__":
    main()
