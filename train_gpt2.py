"""GPT-2 in one file: the model, its data, its training, on a CPU or many GPUs.

    python train_gpt2.py               # no shards yet: a small GPT, Shakespeare
    python fineweb.py                  # FineWeb-Edu -> edu_fineweb10B/*.npy
    torchrun --standalone --nproc_per_node=8 train_gpt2.py    # GPT-2 (124M)
    tail -f log/log.txt                # <step> train|val|hella <value>

Edit the constants in Config (for a text file: in SMALL), or give any of them
as a flag (--max_lr=1e-3). Ctrl-C saves and stops; the same command continues.

One idea makes the rest simple: the data of a step is a pure function of
(seed, step). So B and the number of GPUs decide speed and memory only, and
resuming means starting at a later step.
"""
import contextlib
import datetime
import importlib.util
import json
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
import zipfile
import zlib
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel as DDP

from fineweb import (
    UserError, first_line, get_encoding, lock_folder, make_config, parse_flags, write_whole)


# ---- constants
@dataclass
class Config:
    """The full GPT-2 (124M) run with GPT-3's hyperparameters (Brown et al. 2020, table 2.1)."""
    data: str = "edu_fineweb10B"    # folder of .npy token shards, or a UTF-8 text file
    encoding: Literal["gpt2", "bytes"] = "gpt2"  # 50,257 tokens; or 257, without a download
    shuffle: bool = True            # shards, and rows in a shard, in a new order each epoch
    seed: int = 1337                # decides initial weights, data order and samples
    # the batch: total_batch_size decides the training, B only memory and speed
    total_batch_size: int = 524288  # tokens per optimizer step, a multiple of B * T * processes
    B: int = 64                     # rows per forward pass of a process
    T: int = 1024                   # tokens per row, the context
    # the model: 124M is 12/12/768, 350M 24/16/1024, 774M 36/20/1280, 1.5B 48/25/1600
    n_layer: int = 12               # blocks
    n_head: int = 12                # attention heads per block
    n_embd: int = 768               # width, a multiple of n_head
    dropout: float = 0.0            # share of activations set to 0 in training; GPT-2 had 0.1
    init_from: str = "scratch"      # or gpt2 ... gpt2-xl, a Hugging Face folder, a .pt file
    # the optimizer: for these sizes GPT-3 used max_lr 6e-4, 3e-4, 2.5e-4, 2e-4
    optimizer: Literal["adamw", "muon"] = "adamw"  # Muon: for the matrices in the blocks
    max_lr: float = 6e-4            # learning rate after warmup
    muon_lr_ratio: float = 1.0      # Muon's learning rate divided by AdamW's
    min_lr: float = 6e-5            # learning rate at max_steps
    lr_shape: Literal["cosine", "linear"] = "cosine"  # of the way to min_lr
    warmup_steps: int = 715         # steps of linear warmup; 375 M tokens, as in GPT-3
    max_steps: int = 19073          # optimizer steps; 10 B tokens / total_batch_size
    weight_decay: float = 0.1       # of matrices and embeddings, not of biases and gains
    grad_clip: float = 1.0          # largest norm of the gradient; 0 = no clipping
    # monitoring; 0 = never
    print_every: int = 1            # steps between lines on stdout; log.txt has every step
    eval_every: int = 250           # steps between validations
    val_tokens: int = 10485760      # tokens a validation reads, always the same ones
    hellaswag_every: int = 250      # steps between scores
    sample_every: int = 250         # steps between samples
    sample_prompt: str = "Hello, I'm a language model,"  # how samples begin
    sample_tokens: int = 64         # tokens that they add
    temperature: float = 1.0        # higher is more random, 0 takes the likeliest
    top_k: int = 50                 # draw from the k likeliest tokens; 0 = from all
    sample: int = 0                 # print so many samples, and do not train
    log_dir: str = "log"            # the run: log, checkpoints, curves, export
    save_every: int = 250           # steps between checkpoints, of which the newest two stay
    keep_every: int = 5000          # steps between checkpoints that stay for good
    # the machine
    device: str = "auto"            # CUDA, else MPS, else CPU; or cuda:1, mps, cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of products
    compile: Literal["auto", "True", "False"] = "auto"  # torch.compile on CUDA
    grad_comm: Literal["float32", "bfloat16"] = "float32"  # of gradients between GPUs


# For a text file: a small GPT on bytes, for two CPU cores
SMALL = dict(
    encoding="bytes", total_batch_size=2048, B=32, T=64, n_layer=3, n_head=4, n_embd=128,
    optimizer="muon", max_lr=7e-3, muon_lr_ratio=2.0, min_lr=0.0, lr_shape="linear",
    warmup_steps=20, max_steps=1600, weight_decay=0.2, print_every=10, eval_every=400,
    val_tokens=131072, hellaswag_every=0, sample_every=800, sample_prompt="\n\n",
    sample_tokens=300, log_dir="log_small", compile="False")


# ---- GPT-2
@dataclass
class GPTConfig:
    """What a GPT is made of. Those that Config has, too, are set there, by the same name."""
    block_size: int = 1024   # longest context, in tokens
    vocab_size: int = 50304  # rows of the embedding: n_vocab padded, for speed
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_vocab: int = 50257     # ids in use; the padding is never predicted
    dropout: float = 0.0     # on in train_step() only


Norm = nn.LayerNorm  # two in each block, and one at the end


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a token attends to itself and to earlier tokens."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key, value at once
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.dropout = config.dropout

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, head_dim)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
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
        self.ln_1 = Norm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = Norm(config.n_embd)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = x + self.dropout(self.attn(self.ln_1(x)))
        return x + self.dropout(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019, section 2.3), its parameters named as in OpenAI's weights."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            ln_f=Norm(config.n_embd)))
        self.dropout = nn.Dropout(config.dropout)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        # The input embedding is also the output matrix: similar tokens are similar in both
        # roles, and 39 M parameters are saved (Press and Wolf 2017)
        self.lm_head.weight = self.transformer.wte.weight
        self.init_weights()
        self.eval()  # dropout is on in train_step() only

    def init_weights(self):
        """Normal(0, 0.02) and zero biases, as in OpenAI's code, replacing modules' own.

        The 2 * n_layer projections that add to x have their std divided by that number's root,
        so that the variance does not grow with depth (GPT-2, section 2.3).
        """
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif name.endswith("weight") and p.dim() == 2:  # gains, 1-D, stay 1
                std = residual_std if name.endswith("c_proj.weight") else 0.02
                nn.init.normal_(p, std=std)
        with torch.no_grad():  # no gradient ever reaches the padding, so it stays at zero
            self.transformer.wte.weight[self.config.n_vocab:] = 0

    def hidden(self, idx):
        """Final hidden states (B, T, C) of token ids idx (B, T)."""
        positions = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)  # (B, T, C)
        if torch.is_autocast_enabled(x.device.type):  # the residual stream, too
            x = x.to(torch.get_autocast_dtype(x.device.type))
        x = self.dropout(x)
        for block in self.transformer.h:
            x = block(x)
        return self.transformer.ln_f(x)

    def to_logits(self, x):
        """Logits (..., vocab_size) of hidden states (..., C): for loss, samples and scores."""
        logits = self.lm_head(x).float()  # or a GPU would compute the loss in bfloat16
        # The padding gets no probability; kernels are slow on rows of 50,257
        padding = torch.arange(logits.size(-1), device=x.device) >= self.config.n_vocab
        return logits.masked_fill(padding, -1e30)

    def forward(self, idx, targets=None, return_logits=True):
        """Logits (B, T, n_vocab) of idx (B, T), and the mean loss in nats of targets (B, T).

        Targets of -100 do not count. Training asks for the loss alone: for returned logits a
        compiled model makes a gradient of zeros, 13 GB at B=64.
        """
        logits, loss = self.to_logits(self.hidden(idx)), None  # (B, T, vocab_size)
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return (logits[..., :self.config.n_vocab] if return_logits else None), loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Continue idx (B, T) by sampled tokens. Returns (B, T + max_new_tokens).

        temperature 0 takes the likeliest token; top_k=k draws from the k likeliest.
        """
        if temperature == 0:
            temperature, top_k = 1.0, 1
        for _ in range(max_new_tokens):
            context = idx[:, -self.config.block_size:]
            logits = self.to_logits(self.hidden(context)[:, -1])[:, :self.config.n_vocab]
            if top_k:
                kth_best = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < kth_best, -math.inf)
            probs = (logits / temperature).softmax(-1)
            token = torch.multinomial(probs, 1, generator=generator)      # (B, 1)
            idx = torch.cat((idx, token), dim=1)
        return idx


# ---- data
class DataLoaderLite:
    """Rows of T tokens out of shards. Which row has which number depends on the seed alone.

    Row i of a shard is its tokens i * T ... (i + 1) * T: T inputs, and the last target, with
    which the next row begins. Row numbers go on for ever: an epoch visits each row once, in file
    order or in one drawn from (seed, epoch). With recut, a later epoch's rows begin earlier.
    """

    def __init__(self, shards, T, seed=0, shuffle=False, n_vocab=2**16, recut=False):
        """shards: paths of .npy files, or arrays of token ids (N,)."""
        self.shards, self.T, self.n_vocab = shards, T, n_vocab
        self.seed, self.shuffle, self.recut = seed, shuffle, recut
        self.lengths = [len(open_shard(shard)) for shard in shards]
        self.rows_in_shard = np.array([max(0, length - 1) // T for length in self.lengths])
        self.rows_per_epoch = int(self.rows_in_shard.sum())
        self.open_number, self.tokens = None, None  # index and tokens of the open shard

    def locate(self, row):
        """The number of the shard that a row is in, and the token at which it begins there.

        Say there are shards of 3, 5 and 4 rows, T is 10, and this epoch visits shards 2, 0, 1:
        row 5 is the second of shard 0. With its rows in the order 1, 2, 0, that is row 2.
        """
        epoch, row = divmod(row, self.rows_per_epoch)
        shard_order = permutation(self.shuffle, len(self.shards), self.seed, epoch)
        ends = self.rows_in_shard[shard_order].cumsum()  # 4, 7, 12
        i = int(ends.searchsorted(row, side="right"))    # 1
        number = int(shard_order[i])                     # 0
        rows = int(self.rows_in_shard[number])           # 3
        begin = int(ends[i]) - rows                      # 4
        row_order = permutation(self.shuffle, rows, self.seed, epoch, number)
        earlier = int(0.618 * epoch * self.T) % self.T if self.recut else 0  # 0, then far apart
        return number, max(0, int(row_order[row - begin]) * self.T - earlier)

    def read(self, row, B):
        """B rows from number `row` on: (B, T + 1) int64, as torch has no uint16 math."""
        rows = np.empty((B, self.T + 1), dtype=np.int64)
        for b in range(B):
            number, start = self.locate(row + b)
            if number != self.open_number:
                self.open_number, self.tokens = number, open_shard(self.shards[number])
            rows[b] = self.tokens[start:start + self.T + 1]
            if rows[b].max() >= self.n_vocab:
                raise UserError(f"{self.shards[number]} holds ids of another --encoding.")
        return rows

    def batch(self, row, B, device=torch.device("cpu")):
        """The same rows on a device: inputs x and targets y, the tokens after them, (B, T)."""
        rows = torch.from_numpy(self.read(row, B))
        if device.type == "cuda":  # from pinned memory, the copy holds nothing up
            rows = rows.pin_memory()
        rows = rows.to(device, non_blocking=device.type == "cuda")
        return rows[:, :-1], rows[:, 1:]


@lru_cache(maxsize=4)  # the orders in use: those of all shards would need much memory
def permutation(shuffle, n, *key):
    """0 ... n - 1, shuffled by key or in order. RandomState is the same in every NumPy."""
    return np.random.RandomState(key).permutation(n) if shuffle else np.arange(n)


def first_row(cfg, step, micro_step):
    """The row at which this process begins a micro-step.

    A step's rows are dealt out B at a time, to rank 0, rank 1, ..., and again to rank 0.
    """
    return step * (cfg.total_batch_size // cfg.T) + (micro_step * world_size() + rank()) * cfg.B


# ---- optimizers
def get_lr(step, cfg):
    """Learning rate of a step: linear warmup to max_lr, then down to min_lr at max_steps."""
    if step < cfg.warmup_steps:
        return cfg.max_lr * (step + 1) / cfg.warmup_steps
    progress = min(1.0, (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps))
    remaining = 1 - progress
    if cfg.lr_shape == "cosine":
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    return cfg.min_lr + (cfg.max_lr - cfg.min_lr) * remaining


def newton_schulz(G):
    """Push the singular values of matrices G (n, rows, columns) towards 1 (Jordan et al. 2024).

    A step is X <- P X with A = X X^T and P = a I + b A + c A^2: a singular value x becomes
    a x + b x^3 + c x^5. With a wide X it costs less to change the square, A <- P A P, and apply
    Q, the product of their P, to X after three steps, then two: rounding (TF32) allows no more.
    """
    a, b, c = 3.4445, -4.7750, 2.0315  # steep at 0, to lift small values

    def polynomial(A):
        P = torch.baddbmm(A, A, A, beta=b, alpha=c)
        P.diagonal(dim1=-2, dim2=-1).add_(a)
        return P

    X = G / G.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)  # no singular value above 1
    for steps in (3, 2) if X.size(-2) < X.size(-1) else (1, 1, 1, 1, 1):
        A = X @ X.mT
        Q = P = polynomial(A)
        for _ in range(steps - 1):
            A = P @ A @ P
            P = polynomial(A)
            Q = P @ Q
        X = Q @ X
    return X


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized (Jordan et al. 2024), for the named matrices in the blocks.

    Few directions dominate a gradient matrix; Muon makes all equally long, so that rare ones
    are learned too. The factor 0.2 sqrt(longer side) makes its updates as large as AdamW's:
    both can share a learning rate (Liu et al. 2025, section 2.2).
    """

    def __init__(self, params, lr, weight_decay=0.0, momentum=0.95, dtype=torch.float32):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))
        self.dtype = dtype  # of Newton-Schulz

    def smoothed_gradient(self, p, momentum):
        """The gradient of p under Nesterov momentum."""
        if "momentum_buffer" not in self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        average = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(average, momentum).to(self.dtype)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            by_shape = defaultdict(list)  # equal matrices are a batch
            for name, p in zip(group["param_names"], group["params"]):
                gradient = self.smoothed_gradient(p, group["momentum"])
                # query, key and value are a matrix each; GQA's stay one
                n = 3 if "c_attn" in name and p.size(0) == 3 * p.size(1) else 1
                for weight, G in zip(p.chunk(n), gradient.chunk(n)):
                    if G.size(0) > G.size(1):  # wide is cheaper
                        weight, G = weight.mT, G.mT
                    by_shape[G.shape].append((weight, G))
            for (_, columns), batch in by_shape.items():
                weights, gradients = zip(*batch)
                for weight, update in zip(weights, newton_schulz(torch.stack(gradients))):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(columns))


def configure_optimizers(raw_model, cfg, dtype=torch.float32):
    """[AdamW], or [AdamW, Muon], where Muon has the matrices in the blocks."""
    blocks = raw_model.transformer.h.named_parameters() if cfg.optimizer == "muon" else []
    matrices = [(name, p) for name, p in blocks if p.dim() == 2]
    for_muon = {p for _, p in matrices}
    decayed = [p for p in raw_model.parameters() if p.dim() >= 2 and p not in for_muon]
    # biases and gains do not decay: towards 0 they would only distort the model
    plain = [p for p in raw_model.parameters() if p.dim() < 2]
    groups = [dict(params=decayed, weight_decay=cfg.weight_decay, lr_ratio=1.0),
              dict(params=plain, weight_decay=0.0, lr_ratio=1.0)]
    # betas and eps as in GPT-3, appendix B; fused: in one kernel
    adamw = torch.optim.AdamW(groups, lr=cfg.max_lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    if not matrices:
        return [adamw]
    group = dict(params=matrices, weight_decay=cfg.weight_decay, lr_ratio=cfg.muon_lr_ratio)
    return [adamw, Muon([group], lr=cfg.max_lr, dtype=dtype)]


# ---- training
@dataclass
class State:
    """All that the coming steps depend on, besides the constants and the data.

    raw_model, the GPT, is compiled in place: raw_model(x) runs compiled, .generate(x) does not.
    """
    raw_model: nn.Module
    optimizers: list
    scaler: torch.amp.GradScaler  # keeps float16 gradients in range; idle otherwise
    step: int = 0                 # optimizer steps done

    def state_dict(self):
        return {"step": self.step,
                "model": self.raw_model.state_dict(),
                "gpt_config": asdict(self.raw_model.config),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "scaler": self.scaler.state_dict()}

    def load_state_dict(self, saved):
        self.step = saved["step"]
        self.raw_model.load_state_dict(saved["model"])
        for optimizer, content in zip(self.optimizers, saved["optimizers"], strict=True):
            for old, new in zip(content["param_groups"], optimizer.param_groups):
                old |= new | {"params": old["params"]}  # betas and the like are the code's
            optimizer.load_state_dict(content)
        if saved["scaler"]:
            self.scaler.load_state_dict(saved["scaler"])


@dataclass
class Run:
    """What train() works with; set_up() builds it."""
    cfg: Config
    state: State
    device: torch.device
    encoding: tiktoken.Encoding
    ddp_model: nn.Module          # raw_model; with several processes, in DDP
    autocast: partial             # a context, products in dtype
    train_loader: DataLoaderLite
    val_loader: DataLoaderLite
    fingerprint: str              # of the data
    hellaswag: object             # what hellaswag_scorer() returns
    signal: threading.Event       # Ctrl-C or SIGTERM came to this process
    log: "Log"                    # log.txt, on rank 0
    thread: ThreadPoolExecutor    # saves, and draws curves
    saving: Future                # the last save; its result is its step, or -1
    drawing: Future               # the last one
    stopping: bool = False        # a signal came to a process


@torch.no_grad()
def validation_loss(run, loader, model=None):
    """Mean loss of raw_model, or another model, in nats per token over val_tokens tokens.

    Each process sums up its share of the rows: neither B nor how many there are matters.
    """
    cfg, model = run.cfg, model or run.state.raw_model
    rows = min(max(1, cfg.val_tokens // cfg.T), loader.rows_per_epoch)
    total = torch.zeros((), device=run.device)
    for row in range(rank() * cfg.B, rows, world_size() * cfg.B):
        x, y = loader.batch(row, cfg.B, run.device)
        y = y.clone()          # x is in the same memory
        y[rows - row:] = -100  # rows of the last batch that are past val_tokens do not count
        with run.autocast():
            _, loss = model(x, y, return_logits=False)
        total += loss * min(cfg.B, rows - row)
    return sum_over_ranks(total).item() / rows


def train_step(run):
    """One optimizer step on total_batch_size tokens.

    Returns the mean loss of this process's rows and the gradient's norm before clipping, on
    the device. Except in float16, nothing here waits for a GPU.
    """
    cfg, state, ddp_model = run.cfg, run.state, run.ddp_model
    micro_steps = cfg.total_batch_size // (cfg.B * cfg.T * world_size())
    mean_loss = torch.zeros((), device=run.device)
    ddp_model.train()
    for micro_step in range(micro_steps):
        row = first_row(cfg, state.step, micro_step)
        # What torch draws below, as for dropout, follows from the row
        torch.manual_seed(int(np.random.SeedSequence((cfg.seed, row)).generate_state(1)[0]))
        x, y = run.train_loader.batch(row, cfg.B, run.device)
        # DDP averages the gradients over the processes during backward, which only the last
        # micro-step needs. no_sync() encloses the forward pass too, where DDP prepares it.
        sync = contextlib.nullcontext()
        if world_size() > 1 and micro_step < micro_steps - 1:
            sync = ddp_model.no_sync()
        with sync:
            with run.autocast():
                _, loss = ddp_model(x, y, return_logits=False)
            # backward() adds to the gradients. The loss is a mean over B rows: divided by the
            # number of micro-steps, they add up to the gradient of the mean over all rows.
            state.scaler.scale(loss / micro_steps).backward()
        mean_loss += loss.detach() / micro_steps
    ddp_model.eval()
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = get_lr(state.step, cfg) * group["lr_ratio"]
        state.scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(state.raw_model.parameters(), cfg.grad_clip or math.inf)
    for optimizer in state.optimizers:
        if not state.scaler.is_enabled() or norm.isfinite():  # all optimizers step, or none
            state.scaler.step(optimizer)
        optimizer.zero_grad()
    state.scaler.update()
    state.step += 1
    return mean_loss, norm


def due(every, run):
    """Whether it is time: every so many steps (0 is never), and after the last one."""
    return every > 0 and (run.state.step % every == 0 or run.state.step == run.cfg.max_steps)


def train(run):
    """Save, evaluate, take a step; until max_steps, or until a signal."""
    cfg, state = run.cfg, run.state
    while not run.stopping:
        step = state.step
        if due(cfg.save_every, run) or due(cfg.keep_every, run):
            save(run)  # first, so that an evaluation that fails costs no steps
        if due(cfg.eval_every, run):
            report(run, step, "val", validation_loss(run, run.val_loader), "val loss")
        if due(cfg.hellaswag_every, run) and run.hellaswag:
            report(run, step, "hella", run.hellaswag(), "HellaSwag acc_norm")
        if due(cfg.eval_every, run) or due(cfg.hellaswag_every, run):
            draw(run)
        if due(cfg.sample_every, run) and (step > 0 or step == cfg.max_steps):
            print_samples(run)
        if step == cfg.max_steps:
            break
        start = time.perf_counter()
        loss, norm = train_step(run)
        report_step(run, loss, norm, start)
    finish(run)


# ==== part two: what a long run on real machines needs

# ---- processes: torchrun starts one for each GPU, and ends all when one fails
def rank():
    return int(os.environ.get("RANK", 0))


def world_size():  # Slurm may set it without RANK
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def print0(text):
    """Print from rank 0, in one piece: the thread that saves prints too."""
    if rank() == 0:
        with contextlib.suppress(OSError, RuntimeError):  # a full disk, or a signal amid a print
            print(f"{text}\n", end="", flush=True)


print0_once = lru_cache(print0)


def from_rank_0(value):
    values = [value]
    if world_size() > 1:
        dist.broadcast_object_list(values)
    return values[0]


def sum_over_ranks(tensor):
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def join_processes(device):
    # first, or its defaults keep the group alive, whose threads may abort the exit
    import torch.distributed.nn  # noqa: F401
    # torchrun's store outlives a restart: with a prefix, nobody finds addresses of the dead
    store = next(dist.rendezvous("env://"))[0]
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    gpu = device if device.type == "cuda" else None
    dist.init_process_group(backend="nccl" if gpu else "gloo", store=store, rank=rank(),
                            world_size=world_size(), device_id=gpu,
                            timeout=datetime.timedelta(hours=1))  # rank 0 checks and exports alone


def wrap_ddp(raw_model, cfg):
    if world_size() == 1:
        return raw_model
    # 25 MB, the default, would cut a compiled model into 14 graphs
    ddp_model = DDP(raw_model, gradient_as_bucket_view=True, bucket_cap_mb=100)
    if cfg.grad_comm == "bfloat16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
        ddp_model.register_comm_hook(None, lambda _, bucket: bf16_compress_hook(None, bucket))
    return ddp_model


def catch_signals():
    event = threading.Event()

    def receive(number, frame):
        event.set()
        print0("Stopping after this step and a save. Ctrl-\\ ends at once.")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, receive)
    return event


# ---- device, dtype, compile: "auto" takes what is fast here
def pick_device(name):
    if name == "auto":
        mps = torch.backends.mps.is_available() and world_size() == 1  # gloo has no MPS tensors
        name = "mps" if mps else "cpu"
        if torch.cuda.is_available():
            name = "cuda"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(f"device={name}: torch {torch.__version__} sees no GPU here.")
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32
    return device


def pick_dtype(choice, device):
    """The dtype of matrix products."""
    if choice != "auto":
        return getattr(torch, choice)
    if device.type == "cuda":  # is_bf16_supported() is true on V100 and T4 too, which emulate it
        new = torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if new else torch.float16
    cpu = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return torch.bfloat16 if cpu.get("avx512_bf16") or cpu.get("amx_bf16") else torch.float32


# Dense 16-bit TFLOP/s, summed in float32, from NVIDIA's data sheets
PEAK_TFLOPS = {"B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835,
               "H100": 989, "A100": 312, "A10G": 70, "L40S": 362, "L4": 121, "V100": 125, "T4": 65,
               "RTX 6000 Ada": 364, "RTX 5090": 209, "RTX 4090": 165, "RTX 3090": 71}


def peak_flops(device):
    """The GPU's peak in FLOP/s, 0 if unknown."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    words = set(gpu.replace("-", " ").split())
    found = [peak for name, peak in PEAK_TFLOPS.items() if words.issuperset(name.split())]
    return found[0] * 1e12 if found else 0


def flops_per_token(raw_model, T):
    """Forward and backward: 6 N + 12 * layers * width * context (PaLM, appendix B)."""
    c = raw_model.config
    N = sum(m.weight.numel() for m in raw_model.modules() if isinstance(m, nn.Linear))
    return 6 * N + 12 * c.n_layer * c.n_embd * T


# ---- opening data: damaged shards or other tokens would train a bad model
def padded(n_vocab):
    """n_vocab rounded up to a multiple of 128, which GPUs multiply faster."""
    return math.ceil(n_vocab / 128) * 128


def find_shards(folder):
    """Paths of shards to train on, and of those to validate on."""
    return sorted(Path(folder).glob("*_train_*.npy")), sorted(Path(folder).glob("*_val_*.npy"))


def open_shard(shard):
    """A .npy file memory-mapped, (N,) uint16; an array as it is."""
    if not isinstance(shard, Path):
        return shard
    try:
        tokens = np.load(shard, mmap_mode="r", allow_pickle=False)
        if tokens.dtype != np.uint16 or tokens.ndim != 1:
            raise ValueError(f"{tokens.dtype} {tokens.shape}, not 1-D uint16")
    except (ValueError, EOFError) as e:
        raise UserError(f"{shard} is no whole shard ({first_line(e)}): make it again.") from None
    return tokens


def open_data(cfg, encoding):
    train, val = find_shards(cfg.data)
    if Path(cfg.data).is_file():  # a text, its last tenth for validation
        try:
            text = Path(cfg.data).read_bytes().decode("utf-8")
        except UnicodeDecodeError as e:
            raise UserError(f"{cfg.data} is not UTF-8 ({e}): convert it.") from None
        tokens = encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
        cut = int(len(tokens) * 0.9)
        train, val = [tokens[:cut]], [tokens[cut:]]
    elif open_shard(val[0])[:4096].max() < 257 < encoding.n_vocab:
        raise UserError(f"{cfg.data} needs --encoding=bytes.")
    train_loader = DataLoaderLite(train, cfg.T, cfg.seed, cfg.shuffle, encoding.n_vocab,
                                  recut=cfg.shuffle and Path(cfg.data).is_file())
    val_loader = DataLoaderLite(val, cfg.T, n_vocab=encoding.n_vocab)
    if not (train_loader.rows_per_epoch and val_loader.rows_per_epoch):
        raise UserError(f"{cfg.data} is too short for T={cfg.T}: more text, or a lower --T.")
    return train_loader, val_loader


def fingerprint_of(loader):
    """What tells corpora apart: of a text its ids, of shards the first and last."""
    seen = []
    for shard, length in zip(loader.shards, loader.lengths):
        n = 4096 if isinstance(shard, Path) else length
        first, last = open_shard(shard)[:n], open_shard(shard)[-n:]
        seen.append((getattr(shard, "name", "text"), length, zlib.crc32(first), zlib.crc32(last)))
    crc = zlib.crc32(repr(seen).encode())
    return f"{sum(loader.lengths):,} tokens in {len(seen)} file(s) #{crc:08x}"


# ---- checkpoints, the log folder: against kills, full disks, damaged files, other runs
def save(run):
    """Begin to save; training waits only until the state is copied."""
    if rank() != 0:
        return
    if run.saving.result() != run.state.step:  # waits for the save before this one
        run.log.sync()
        content = copy_to_host(run.state.state_dict() | {  # plain, for weights_only=True
            "encoding": run.cfg.encoding, "constants": asdict(run.cfg), "data": run.fingerprint,
            "code": code_checksum()}, copies={})
        run.saving = run.thread.submit(write_checkpoint, content, run.cfg)


def copy_to_host(content, copies):
    """content with its tensors copied; a tensor that is in it twice, once."""
    if isinstance(content, dict):
        return {key: copy_to_host(value, copies) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [copy_to_host(value, copies) for value in content]
    if not torch.is_tensor(content):
        return content
    key = (content.data_ptr(), content.shape)
    if key not in copies:  # torch reuses freed pinned memory
        copies[key] = torch.empty_like(content, device="cpu", pin_memory=content.is_cuda)
        copies[key].copy_(content)
    return copies[key]


def write_checkpoint(content, cfg):
    """Write, verify, rename. Returns the step, or -1 if it failed."""
    step, start = content["step"], time.perf_counter()
    path = Path(cfg.log_dir, f"checkpoint_{step:05d}.pt")
    try:
        for name, tensor in content["model"].items():
            # NumPy's: torch's starts OpenMP threads, which would slow training
            if not np.isfinite(tensor.float().numpy()).all():
                raise UserError(f"{name} is not finite")
        write_whole(path, lambda file: torch.save(content, file), verify=read_checkpoint)
    except (OSError, RuntimeError, UserError) as e:
        while e.__context__:  # torch.save's RuntimeErrors hide an OSError
            e = e.__context__
        print0(f"!!! NOT SAVED at step {step}: {first_line(e)}. What was saved is still there.")
        return -1
    print0(f"{step:5d}/{cfg.max_steps} saved {path} in {time.perf_counter() - start:.1f} s")
    found = find_checkpoints(cfg.log_dir)
    for old in [old for old in found if old < step][1:]:  # two stay: the newest may be damaged
        if not cfg.keep_every or old % cfg.keep_every:
            with contextlib.suppress(OSError):
                found[old].unlink()
    return step


def find_checkpoints(folder):
    """{step: path} of a folder's checkpoints, newest first."""
    numbers = {path: path.stem[11:] for path in Path(folder).glob("checkpoint_*.pt")}
    found = {int(number): path for path, number in numbers.items() if number.isdecimal()}
    return dict(sorted(found.items(), reverse=True))


def newest_checkpoint(folder):
    """Path of the newest undamaged checkpoint, or None."""
    found = find_checkpoints(folder)
    for path in found.values():
        try:
            read_checkpoint(path)
            return path
        except UserError as e:
            print0(f"{e} Trying the one before it.")
    if found:
        raise UserError(f"Every checkpoint in {folder}/ is damaged: take another --log_dir.")
    return None


def read_checkpoint(path, mmap=True):
    """The content of a checkpoint. Checks the checksums, which torch ignores."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch's format
            if archive.testzip():
                raise ValueError("a checksum is wrong")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as e:  # a damaged file may raise anything
        raise UserError(f"{path} cannot be read as a checkpoint ({first_line(e)}).") from None


# A run may continue with other values of these
FREE_TO_CHANGE = set(
    "B print_every eval_every val_tokens hellaswag_every sample_every sample_prompt sample_tokens "
    "temperature top_k sample log_dir save_every keep_every device dtype compile grad_comm".split())


@lru_cache  # main() calls it first: the file may be edited while it trains
def code_checksum():
    """Of this file's code: not of its comments, nor of Config and SMALL, which are compared."""
    source = Path(__file__).read_text(encoding="utf-8")
    code = source[:source.index("class Config:")] + source[source.index("\n# ---- GPT-2"):]
    lines = [re.sub(r"(^|\s)#.*", "", line).rstrip() for line in code.splitlines()]
    return zlib.crc32("\n".join(filter(None, lines)).encode())


def check_same_training(saved, cfg, fingerprint):
    """Raise UserError if a checkpoint is of another training."""
    # a constant newer than the run had its default
    before = asdict(Config()) | saved["constants"] | {"data": saved["data"]}
    now = asdict(cfg) | {"data": fingerprint}
    changed = {name for name in now if before[name] != now[name]} - FREE_TO_CHANGE
    if cfg.max_steps > max(before["max_steps"], saved["step"]):
        changed.discard("max_steps")
        print0(f"max_steps was {before['max_steps']}, is {cfg.max_steps}: a new lr schedule.")
    values = [f"{name} was {before[name]!r}, is {now[name]!r}" for name in sorted(changed)]
    other_code = saved.get("code") != code_checksum()
    if other_code and saved["step"] >= cfg.max_steps:
        values.append("train_gpt2.py was edited since it finished")
    if values:
        raise UserError(f"The run in {cfg.log_dir}/ is another one: {'; '.join(values)}. Put that "
                        f"back, or take another --log_dir.")
    if other_code:
        print0(f"!!! train_gpt2.py was edited: from step {saved['step']} on, other code continues. "
               "For a fresh run, another --log_dir.")


def begin_run(cfg, step, lock, continues):
    """Note this start in run.json; unless it continues, rename what was left here. The Log."""
    folder, path = Path(cfg.log_dir), Path(cfg.log_dir, "run.json")
    starts = json.loads(path.read_text())["starts"] if continues and path.exists() else []
    for old in (folder / "log.txt", folder / "hf"):
        if old.exists() and (not continues or (old.name == "hf" and step < cfg.max_steps)):
            old.rename(folder / f"{old.name}_before_{time.strftime('%Y%m%d-%H%M%S')}")
    starts.append({"time": time.ctime(), "step": step, "command": sys.argv,
                   "code": code_checksum(), "torch": torch.__version__, "python": sys.version})
    text = json.dumps({"constants": asdict(cfg), "starts": starts}, indent=2)
    write_whole(path, lambda file: file.write(text.encode()))
    return Log(folder / "log.txt", step, lock)


class Log:
    """log.txt: lines are appended at once, since people tail it.

    At the start, what follows from a line of step `step` on is removed: those steps come again.
    """

    def __init__(self, path, step, lock):
        self.lock = lock  # of log_dir, held as long as something refers to it
        self.file = open(path, "ab", buffering=0)
        self.refused = b""  # what a full disk did not take
        kept = 0
        for line in path.read_bytes().splitlines(keepends=True):
            number = re.match(rb"(\d+) .+ [-\d.naif]+$", line)  # comments have none
            if not line.endswith(b"\n") or (number and int(number[1]) >= step):
                break
            kept += len(line)
        self.file.truncate(kept)

    def write(self, line):
        self.refused += line
        with contextlib.suppress(OSError):
            written = self.file.write(self.refused)
            self.refused = self.refused[written:]

    def sync(self):
        """Have all lines on the disk, before a later step's checkpoint is."""
        self.write(b"")
        with contextlib.suppress(OSError):
            os.fsync(self.file.fileno())


def finish(run):
    """End the run: save it, and after the last step leave log_dir/hf."""
    cfg, step = run.cfg, run.state.step
    save(run)
    if rank() == 0 and run.saving.result() != step:
        raise UserError(f"Step {step} is not saved: make room and start the same command again.")
    if run.stopping:
        print0(f"Stopped by a signal after {step} steps; the same command continues there.")
    elif rank() == 0:
        run.log.sync()
        try:
            folder = Path(cfg.log_dir, "hf")
            save_hugging_face(run.state.raw_model, folder, run.encoding)
            print0(f"exported to {folder}/, for transformers and hellaswag.py -m")
        except Exception as e:  # the model may be no GPT-2 any more, or transformers missing
            print0(f"Not exported: {e if isinstance(e, UserError) else first_line(e)}.")
        if cfg.max_steps:
            print0(f"Done. Samples: python train_gpt2.py --sample=3 --log_dir={cfg.log_dir}\n"
                   "To train on: a larger --max_steps.")


# ---- log, curves: log.txt is for notebooks, stdout for people
def report_step(run, loss, norm, start):
    """Report the step that began at time `start`; this waits for the GPU."""
    cfg, step = run.cfg, run.state.step - 1
    stop = torch.full_like(loss, run.signal.is_set())  # on the device: a copy would wait
    numbers = sum_over_ranks(torch.stack((loss, norm, stop))) / world_size()
    loss, norm, stop = numbers.tolist()
    run.stopping = stop > 0
    # float16's scaler skips infinite norms
    if not math.isfinite(loss) or not (math.isfinite(norm) or run.state.scaler.is_enabled()):
        raise UserError(f"Step {step} has loss {loss} and gradient norm {norm}: look at the "
                        "data, or start with a lower --max_lr in another --log_dir.")
    seconds, label, more = time.perf_counter() - start, "", ""
    if cfg.print_every and step % cfg.print_every == 0:
        left = datetime.timedelta(seconds=round(seconds * (cfg.max_steps - step - 1)))
        flops = flops_per_token(run.state.raw_model, cfg.T) * cfg.total_batch_size / world_size()
        peak, label = peak_flops(run.device), "loss"
        mfu = f" mfu {flops / seconds / peak:.0%}" if peak else ""
        if run.device.type == "cuda":
            mfu += f" {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        more = (f" lr {get_lr(step, cfg):.2e} norm {norm:.2f} {seconds * 1e3:.0f} ms "
                f"{cfg.total_batch_size / seconds:,.0f} tok/s{mfu} {left} left")
    report(run, step, "train", loss, label, more)


def report(run, step, stream, value, label="", more=""):
    """A line in log.txt, a point of a curve in curves.png; on stdout if it has a label."""
    if rank() == 0:
        run.log.write(f"{step} {stream} {value:.6f}\n".encode())
    if label:
        print0(f"{step:5d}/{run.cfg.max_steps} {label} {value:.4f}{more}")


def draw(run):
    """Draw in the background; one still waiting is dropped."""
    if rank() == 0:
        run.drawing.cancel()
        run.drawing = run.thread.submit(draw_curves, run.cfg.log_dir)


def draw_curves(folder):
    """Write curves.png if matplotlib is installed. An error is told once."""
    try:
        figure = plot(folder)
        write_whole(Path(folder, "curves.png"), lambda file: figure.savefig(file, dpi=120))
    except ImportError:
        pass
    except Exception as e:  # training goes on
        print0_once(f"curves.png is not drawn: {first_line(e)}")


def plot(folder):
    """log.txt against tokens: losses in one panel, each other stream in its own."""
    from matplotlib.figure import Figure  # not pyplot, which wants a display
    constants = json.loads(Path(folder, "run.json").read_text())["constants"]
    text, streams = Path(folder, "log.txt").read_text(), defaultdict(list)
    for step, stream, value in re.findall(r"^(\d+) (.+) (-?[\d.]+)$", text, re.M):
        tokens = int(step) * constants["total_batch_size"] / 1e6
        streams[stream].append((tokens, float(value)))
    panels = defaultdict(list)
    for name in streams:
        panels["loss, nats per token" if name in ("train", "val") else name].append(name)
    to_beat = {"val": 3.2924, "hella": 0.2945} if "fineweb" in constants["data"] else {}
    figure = Figure(figsize=(6.5, 3.7 * len(panels)), layout="constrained")
    for i, (title, names) in enumerate(panels.items()):
        axis = figure.add_subplot(len(panels), 1, i + 1)
        for name in names:
            n = 1 + len(streams[name]) // 200  # smoothed: each point is the mean of n
            points = streams[name][:len(streams[name]) // n * n]
            tokens, values = np.reshape(points, (-1, n, 2)).mean(axis=1).T
            axis.plot(tokens, values, label=f"{name}, now {values[-1]:.3f}")
            if name in to_beat:
                axis.axhline(to_beat[name], color="gray", label=f"GPT-2 124M: {to_beat[name]}")
            if name == "train":  # from where it has come down
                axis.set_ylim(top=1.05 * np.percentile(values, 95))
        axis.set(xlabel="million tokens", ylabel=title)
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
    return figure


# ---- samples and HellaSwag: of many shapes, so not compiled and without cuDNN's attention
@sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
def sample_text(raw_model, encoding, cfg, seed):
    """sample_prompt and how the model continues it."""
    device = next(raw_model.parameters()).device
    prompt = encoding.encode_ordinary(cfg.sample_prompt) or [encoding.eot_token]
    tokens = raw_model.generate(
        torch.tensor([prompt], device=device), cfg.sample_tokens, temperature=cfg.temperature,
        top_k=cfg.top_k, generator=torch.Generator(device).manual_seed(seed))
    return encoding.decode_bytes(tokens[0].tolist()).decode("utf-8", errors="backslashreplace")


def print_samples(run):
    if rank() == 0:
        cfg, state = run.cfg, run.state
        with run.autocast():
            text = sample_text(state.raw_model, run.encoding, cfg, seed=cfg.seed + state.step)
        print0(f"--- sample at step {state.step} ---\n{text}\n---")


def sample_only(cfg, device):
    """--sample=N: print N samples of the newest weights or of init_from."""
    name = newest_checkpoint(cfg.log_dir) if cfg.init_from == "scratch" else cfg.init_from
    if name is None:
        raise UserError(f"log_dir={cfg.log_dir} holds no weights: train, or take --init_from.")
    raw_model, encoding = load_weights(str(name), **model_constants(cfg))
    for i in range(cfg.sample):
        print0(sample_text(raw_model.to(device), encoding, cfg, seed=cfg.seed + i) + "\n---")


def hellaswag_scorer(cfg, raw_model, autocast):
    """A function that returns acc_norm, or None."""
    if not cfg.hellaswag_every:
        return None
    import hellaswag
    examples = []
    try:
        if cfg.encoding != "gpt2":
            raise UserError("it needs --encoding=gpt2.")
        if rank() == 0:
            examples = list(hellaswag.iterate_examples("val"))
    except UserError as e:
        print0(f"HellaSwag is off: {e}")
    questions = hellaswag.prepare(from_rank_0(examples), raw_model)

    def acc_norm():
        with autocast():
            return hellaswag.evaluate(raw_model, questions).acc_norm
    return acc_norm if questions.batches else None


# ---- Hugging Face: weights come from its GPT-2 and go to it if it computes what ours does
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # (in, out) there, (out, in) here


@torch.no_grad()
def check_same_function(ours, hf):
    """Raise ValueError if logits differ. On the CPU."""
    c = ours.config
    idx = ((8 - torch.arange(c.block_size)[None]) * 7919 - 1) % c.n_vocab  # with <|endoftext|>
    theirs = hf.float().eval()(idx).logits
    differences = (ours(idx)[0] - theirs).norm(dim=-1) / theirs.norm(dim=-1)  # (1, T)
    if not differences.max() < 1e-3:
        raise ValueError(f"logits differ by {differences.max():.1%}")


def load_hugging_face(name, **constants):
    """The GPT in a folder or repository; constants: what else GPTConfig has, as dropout."""
    import transformers
    transformers.logging.disable_progress_bar()
    try:
        hf, info = transformers.GPT2LMHeadModel.from_pretrained(name, output_loading_info=True)
        c = hf.config
        shape = dict(block_size=c.n_positions, vocab_size=padded(c.vocab_size), n_layer=c.n_layer,
                     n_head=c.n_head, n_embd=c.n_embd, n_vocab=c.vocab_size)
        raw_model = GPT(GPTConfig(**constants | shape))
        source, target = hf.state_dict(), raw_model.state_dict()
        strangers = info["missing_keys"] or source.keys() ^ target.keys()
        if strangers:
            raise ValueError(f"{min(strangers)} is not in both models")
        for key, p in target.items():
            weight = source[key].t() if key.endswith(TRANSPOSED) else source[key]
            p[:len(weight)] = weight  # the embedding is padded here
        check_same_function(raw_model, hf)
    except Exception as e:  # files and networks may raise anything
        raise UserError(f"{name} cannot be loaded as a GPT-2 ({first_line(e)}).") from None
    return raw_model


def save_hugging_face(raw_model, folder, encoding=None):
    """Write a folder that transformers loads, if it computes the same; with its tokenizer."""
    import transformers
    c, end_of_text = raw_model.config, raw_model.config.n_vocab - 1
    hf = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=c.n_vocab, n_positions=c.block_size, n_layer=c.n_layer, n_head=c.n_head,
        n_embd=c.n_embd, bos_token_id=end_of_text, eos_token_id=end_of_text,
        pad_token_id=end_of_text))
    hf.generation_config.max_length = c.block_size  # or a pipeline goes beyond it
    ours, weights = GPT(c), {}  # on the CPU, and not compiled
    ours.load_state_dict(raw_model.state_dict())
    for key, weight in ours.state_dict().items():
        if key in ("transformer.wte.weight", "lm_head.weight"):
            weight = weight[:c.n_vocab]
        weights[key] = weight.t() if key.endswith(TRANSPOSED) else weight
    try:
        hf.load_state_dict(weights)
        check_same_function(ours, hf)
        tokenizer = encoding and hugging_face_tokenizer(encoding, c.block_size)
    except (RuntimeError, ValueError) as e:
        raise UserError(f"transformers would compute something else ({first_line(e)})") from None
    transformers.logging.disable_progress_bar()
    hf.save_pretrained(folder, max_shard_size="50GB")
    if encoding:
        tokenizer.save_pretrained(folder)


def hugging_face_tokenizer(encoding, context):
    """A tiktoken encoding as a transformers tokenizer. Raises ValueError."""
    from transformers import GPT2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode, generate_merges
    letters, ids = bytes_to_unicode(), {}
    for i in range(encoding.eot_token):
        token = encoding.decode_single_token_bytes(i)
        ids["".join(letters[byte] for byte in token)] = i
    scores = {token: -i for token, i in ids.items()}  # what has the lowest id is joined first
    tokenizer = GPT2Tokenizer(vocab=ids, merges=generate_merges(ids, scores),
                              model_max_length=context, clean_up_tokenization_spaces=False)
    text = Path(__file__).read_text(encoding="utf-8").replace("|>", "")
    if tokenizer.backend_tokenizer.encode(text).ids != encoding.encode_ordinary(text):
        raise ValueError(f"it has no {encoding.name} tokenizer")
    return tokenizer


def load_weights(name, **constants):
    """(GPT, its encoding) of a checkpoint or a Hugging Face name."""
    if not name.endswith(".pt"):
        raw_model = load_hugging_face(name, **constants)
        n_vocab = raw_model.config.n_vocab
        if n_vocab not in (257, 50257):
            raise UserError(f"{name} has {n_vocab} ids, of another tokenizer: take its .pt file.")
        return raw_model, get_encoding("bytes" if n_vocab == 257 else "gpt2")
    content = read_checkpoint(name)
    if content.get("code") != code_checksum():
        print0(f"!!! {name} was written by other code.")
    dropout = {"dropout": constants.get("dropout", 0.0)}  # of a training, not of weights
    raw_model = GPT(GPTConfig(**constants | content["gpt_config"] | dropout))
    raw_model.load_state_dict(content["model"])
    return raw_model, get_encoding(content["encoding"])


# ---- setting up, and the command line: all is checked before files of a run change
def check_config(cfg):
    if not Path(cfg.data).is_file() and not all(find_shards(cfg.data)):
        raise UserError(f"data={cfg.data} is no text, and no folder with *_train_*.npy and "
                        "*_val_*.npy: run fineweb.py, or name another --data.")
    if cfg.total_batch_size % (cfg.B * cfg.T * world_size()):
        raise UserError(f"total_batch_size={cfg.total_batch_size} is not a multiple of B * T * "
                        f"processes = {cfg.B} * {cfg.T} * {world_size()}: change one of them.")
    if cfg.min_lr > cfg.max_lr:
        raise UserError(f"min_lr={cfg.min_lr} is above max_lr={cfg.max_lr}: lower it, too.")


def model_constants(cfg):
    return {name: value for name, value in asdict(cfg).items()
            if name in GPTConfig.__dataclass_fields__}


def build_model(cfg, encoding, saved=None):
    """The GPT to train: new, init_from's, or for a checkpoint's weights."""
    torch.manual_seed(cfg.seed)
    constants = model_constants(cfg)
    if saved:
        return GPT(GPTConfig(**constants | saved["gpt_config"]))
    if cfg.init_from == "scratch":
        return GPT(GPTConfig(block_size=cfg.T, vocab_size=padded(encoding.n_vocab),
                             n_vocab=encoding.n_vocab, **constants))
    raw_model, _ = load_weights(cfg.init_from, **constants)
    c = raw_model.config
    if c.n_vocab != encoding.n_vocab or cfg.T > c.block_size:
        raise UserError(f"init_from={cfg.init_from} has {c.n_vocab} tokens and a context of "
                        f"{c.block_size}: change encoding or T.")
    return raw_model


def set_up(cfg, device):
    """Check everything, then build what train() needs."""
    check_config(cfg)
    torch.empty(2**25 - 2**16, dtype=torch.uint8)  # once freed, glibc keeps memory between steps
    encoding = get_encoding(cfg.encoding)
    train_loader, val_loader = open_data(cfg, encoding)
    fingerprint = fingerprint_of(train_loader)
    lock = path = None
    if rank() == 0:
        lock = lock_folder(cfg.log_dir)
        path = newest_checkpoint(cfg.log_dir)
    path, saved = from_rank_0(path), {}  # a shared disk may show ranks different files
    if path:  # not mapped on a CPU: there AdamW keeps the tensors it is given
        saved = read_checkpoint(path, mmap=device.type != "cpu")
        check_same_training(saved, cfg, fingerprint)
    raw_model = build_model(cfg, encoding, saved).to(device)
    dtype, compiled = pick_dtype(cfg.dtype, device), cfg.compile == "True"
    if cfg.compile == "auto" and device.type == "cuda":  # Windows often has no Triton; P100 is 6.0
        triton = importlib.util.find_spec("triton")
        compiled = bool(triton) and torch.cuda.get_device_capability(device) >= (7, 0)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    bf16 = dtype == torch.bfloat16  # in float16, Muon's products would overflow
    if bf16 and device.type == "cpu":  # flash's backward is slow there on short rows
        torch.backends.cuda.enable_flash_sdp(cfg.T >= 256)
    optimizers = configure_optimizers(raw_model, cfg, dtype if bf16 else torch.float32)
    state = State(raw_model, optimizers, scaler)
    if saved:
        state.load_state_dict(saved)
    log = begin_run(cfg, state.step, lock, continues=bool(saved)) if rank() == 0 else None
    if compiled:
        raw_model.compile()
    saving, drawing = Future(), Future()
    saving.set_result(state.step)
    autocast = partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32)
    run = Run(
        cfg=cfg, state=state, device=device, encoding=encoding, autocast=autocast,
        ddp_model=wrap_ddp(raw_model, cfg), train_loader=train_loader,
        val_loader=val_loader, fingerprint=fingerprint,
        hellaswag=hellaswag_scorer(cfg, raw_model, autocast), signal=catch_signals(), log=log,
        thread=ThreadPoolExecutor(max_workers=1), saving=saving, drawing=drawing)
    describe(run, dtype, compiled)
    return run


def describe(run, dtype, compiled):
    cfg, model = run.cfg, run.state.raw_model
    epochs = cfg.max_steps * cfg.total_batch_size / cfg.T / run.train_loader.rows_per_epoch
    flops = flops_per_token(model, cfg.T) * cfg.total_batch_size
    print0(f"data      {cfg.data}: {run.fingerprint}\n"
           f"model     {sum(p.numel() for p in model.parameters()):,} parameters, "
           f"init_from={cfg.init_from}: {model.config}\n"
           f"training  {cfg.max_steps:,} steps of {cfg.total_batch_size:,} tokens, {epochs:.2f} "
           f"epochs; a step is {flops / 1e12:,.2g} TFLOP\n"
           f"machine   {world_size()} x {run.device.type}, {str(dtype)[6:]}, compile={compiled}\n"
           f"log       {Path(cfg.log_dir, 'log.txt')}, from step {run.state.step} on")
    if 0 < cfg.max_steps <= run.state.step:
        print0("This run is finished: validation, samples and export again.")


def choose_settings(flags):
    """The constants that apply, and the first lines, which name them."""
    data, lines = flags.get("data", Config.data), ""
    if "data" not in flags and data == "edu_fineweb10B" and not find_shards(data)[0]:
        data = str(Path(__file__).resolve().with_name("input.txt"))
        lines = ("Quick start, a small GPT on Shakespeare: edu_fineweb10B/ holds no shards.\n"
                 "For GPT-2 (124M): python fineweb.py, and the same command again.\n\n")
    small = SMALL if Path(data).is_file() else {}
    cfg = make_config(Config, {"data": data} | small | flags)
    if cfg.init_from != "scratch":
        decided = model_constants(cfg).keys() - {"dropout"}
        for name in flags.keys() & decided:
            raise UserError(f"init_from={cfg.init_from} decides {name}: leave out --{name}.")
        small = {name: value for name, value in small.items() if name not in decided}
    if not small:
        return cfg, "settings  Config, as data is not a text file"
    values = " ".join(f"{name}={getattr(cfg, name)!r}" for name in small)
    return cfg, f"{lines}settings  SMALL, not Config, as data is a text file:\n{values}"


def main():
    sys.stdout.reconfigure(errors="backslashreplace")  # samples hold any character
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to save
    try:
        code_checksum()
        cfg, lines = choose_settings(parse_flags(Config, __doc__, SMALL))
        device = pick_device(cfg.device)
        if "RANK" in os.environ:
            join_processes(device)
        if cfg.sample:
            sample_only(cfg, device)
        else:
            print0(lines)
            run = set_up(cfg, device)
            with run.thread:  # whatever ends train(), a save in progress is finished
                train(run)
            del run  # holds DDP and its group
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            error = UserError("Out of memory: a smaller --B trains the same model.")
        if re.match("Error.* loading state|loaded state|zip|GPTConfig", str(error)):
            error = UserError(f"These weights are of other code ({first_line(error)}): put that "
                              f"back, or take another --log_dir.")
        if isinstance(error, UserError):
            print(f"train_gpt2.py: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
            if "torch._" in type(error).__module__:  # no compiler, say
                print("train_gpt2.py: --compile=False does without compiling.", file=sys.stderr)
        if dist.is_initialized():
            os._exit(1)  # a normal exit would wait for others, which may wait for this one
        sys.exit(1)


if __name__ == "__main__":
    main()
