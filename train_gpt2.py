"""GPT-2 in one file: the model, its data, its training, on a CPU or many GPUs.

    python train_gpt2.py               # no shards yet: a small GPT, Shakespeare
    python fineweb.py                  # FineWeb-Edu -> edu_fineweb10B/*.npy
    torchrun --standalone --nproc_per_node=8 train_gpt2.py    # GPT-2 (124M)
    tail -f log/log.txt                # <step> train|val|hella|minutes <value>

Edit the constants in Config (in SMALL for a text file, in FINETUNE for a text
and given weights), or give any of them as a flag (--max_lr=1e-3).
Ctrl-C saves and stops; the same command continues.

One idea makes the rest simple: the data of a step is a pure function of
(seed, step). So B and the number of GPUs decide speed and memory only, and
resuming means starting at a later step.
"""
import ast
import contextlib
import ctypes
import datetime
import importlib.util
import inspect
import json
import math
import os
import re
import shutil
import signal
import statistics
import sys
import threading
import time
import traceback
import zipfile
import zlib
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

# How long a waiting thread of OpenMP holds a core that others need; read when torch is loaded.
# A step of the quick start in ms, with this line and without it: alone 44 and 44, beside two busy
# processes 166 and 739 to 873 (tests/measured/step_cpu.txt).
os.environ["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", "10000")

import numpy as np  # noqa: E402
import tiktoken  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn as nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402

from fineweb import (  # noqa: E402
    UserError, encoding_parts, first_line, get_encoding, hugging_face_tokenizer, lock_folder,
    make_config, parse_flags, remove_parts, token_dtype, write_whole)

# ---- constants
@dataclass
class Config:
    """The full GPT-2 (124M) run with GPT-3's hyperparameters (Brown et al. 2020, table 2.1)."""
    data: str = "edu_fineweb10B"    # folder of .npy token shards, or a UTF-8 text file
    encoding: str = "gpt2"          # any of tiktoken's; or bytes, which needs no download
    shuffle: bool = True            # shards, and rows in a shard, in a new order each epoch
    seed: int = 1337                # decides initial weights, data order and samples
    # the batch: total_batch_size decides the training, B only memory and speed
    total_batch_size: int = 524288  # tokens per optimizer step, a multiple of T * processes
    B: int = 64                     # rows per forward pass of a process, at most
    T: int = 1024                   # tokens per row, the context
    # the model: 124M is 12/12/768, 350M 24/16/1024, 774M 36/20/1280, 1.5B 48/25/1600
    n_layer: int = 12               # blocks
    n_head: int = 12                # attention heads per block
    n_embd: int = 768               # width, a multiple of n_head
    dropout: float = 0.0            # share of activations set to 0 in training; GPT-2 had 0.1
    init_from: str = "scratch"      # or gpt2 ... gpt2-xl, a Hugging Face or run folder, a .pt
    # the optimizer: for these sizes GPT-3 used max_lr 6e-4, 3e-4, 2.5e-4, 2e-4
    optimizer: Literal["adamw", "muon"] = "adamw"  # Muon: for the matrices in the blocks
    max_lr: float = 6e-4            # learning rate after warmup
    muon_lr_ratio: float = 1.0      # Muon's learning rate divided by AdamW's
    min_lr: float = 6e-5            # learning rate at max_steps
    lr_shape: Literal["cosine", "linear"] = "cosine"  # of the way to min_lr
    warmup_steps: int = 715         # steps of linear warmup; 375 M tokens, as in GPT-3
    max_steps: int = 19073          # optimizer steps (10 B tokens); 0 = evaluate, sample
    epochs: float = 0.0             # passes over the data; above 0 they decide max_steps
    minutes: float = 0.0            # of training steps; above 0 they decide max_steps
    weight_decay: float = 0.1       # of matrices and embeddings, not of biases and gains
    grad_clip: float = 1.0          # largest norm of the gradient; 0 = no clipping
    # monitoring; 0 = never
    print_every: int = 1            # steps between lines on stdout; log.txt has every step
    eval_every: int = 250           # steps between validations
    val_tokens: int = 10485760      # tokens a validation reads, always the same ones
    hellaswag_every: int = 250      # steps between scores
    sample_every: int = 1000        # steps between samples, for which all other GPUs wait
    sample_prompt: str = "Hello, I'm a language model,"  # how samples begin
    sample_tokens: int = 64         # tokens that they add
    temperature: float = 1.0        # higher is more random, 0 takes the likeliest
    top_k: int = 50                 # draw from the k likeliest tokens; 0 = from all
    sample: int = 0                 # print so many samples, and do not train
    log_dir: str = "log"            # the run: log, checkpoints, curves, export
    save_every: int = 250           # steps between checkpoints; the newest two and the best stay
    keep_every: int = 5000          # steps between checkpoints that stay for good
    # the machine
    device: str = "auto"            # CUDA, else MPS, else CPU; or cuda:1, mps, cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of matrix products
    compile: Literal["auto", "True", "False"] = "auto"  # torch.compile on CUDA

# For a text file: a small GPT on bytes, for two CPU cores
SMALL = dict(
    encoding="bytes", total_batch_size=2048, B=32, T=64, n_layer=3, n_head=4, n_embd=128,
    optimizer="muon", max_lr=7e-3, muon_lr_ratio=2.0, min_lr=0.0, lr_shape="linear",
    warmup_steps=20, max_steps=1600, weight_decay=0.2, print_every=10, eval_every=400,
    val_tokens=131072, hellaswag_every=0, sample_every=800, sample_prompt="\n\n",
    sample_tokens=300, log_dir="log_small", compile="False")

# For a text file and given weights (init_from), which decide the model's constants and the encoding
FINETUNE = dict(
    max_lr=0.1,  # / n_embd, as Adam's best falls with the width (Yang et al. 2022): 1.3e-4 for gpt2
    T=1024,      # at most: it takes the largest power of two that fits the weights' context
    total_batch_size=2048, B=4, min_lr=0.0, lr_shape="linear", warmup_steps=10, epochs=4.0,
    eval_every=10, val_tokens=131072, hellaswag_every=0, sample_every=50, sample_prompt="\n",
    sample_tokens=100, save_every=10, keep_every=0, log_dir="log_finetune")

# ---- GPT-2
@dataclass
class GPTConfig:
    """What a GPT is made of. Constants that Config has, too, get their values from there."""
    block_size: int = 1024   # longest context, in tokens
    vocab_size: int = 50304  # rows of the embedding: n_vocab padded, for speed
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_vocab: int = 50257     # ids in use; the padding is never predicted
    dropout: float = 0.0     # on in train_step() only

def undrawn(layer):
    """The layer with a bias of 0, and weights of NaN, which GPT.init_weights() will draw: the seed
    of a draw is the parameter's full name, which exists only when the whole GPT is built. Weights
    that you set yourself are not NaN, and stay."""
    nn.init.constant_(layer.weight, math.nan)
    if getattr(layer, "bias", None) is not None:
        nn.init.zeros_(layer.bias)
    return layer

Norm = nn.LayerNorm  # all norms of the model: for another kind, edit this line

class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a token attends to itself and to earlier tokens."""
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = undrawn(nn.Linear(config.n_embd, 3 * config.n_embd))  # query, key, value
        self.c_proj = undrawn(nn.Linear(config.n_embd, config.n_embd))
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
        self.c_fc = undrawn(nn.Linear(config.n_embd, 4 * config.n_embd))
        self.gelu = nn.GELU(approximate="tanh")  # the approximation that GPT-2 was trained with
        self.c_proj = undrawn(nn.Linear(4 * config.n_embd, config.n_embd))

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
            wte=undrawn(nn.Embedding(config.vocab_size, config.n_embd)),
            wpe=undrawn(nn.Embedding(config.block_size, config.n_embd)),
            h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            ln_f=Norm(config.n_embd)))
        self.dropout = nn.Dropout(config.dropout)
        self.lm_head = undrawn(nn.Linear(config.n_embd, config.vocab_size, bias=False))
        # The input embedding is also the output matrix: similar tokens are similar in both
        # roles, and 39 M parameters are saved (Press and Wolf 2017)
        self.lm_head.weight = self.transformer.wte.weight
        self.init_weights()
        self.eval()  # dropout is on in train_step() only

    @torch.no_grad()
    def init_weights(self):
        """Draw the weights that are NaN from Normal(0, 0.02).

        The 2 * n_layer projections that add to x have their std divided by that number's root,
        so that the variance does not grow with depth (GPT-2, section 2.3). A draw follows from
        torch's seed and the parameter's name: an added layer leaves the others' draws alone.
        """
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, p in self.named_parameters():  # lm_head.weight comes as transformer.wte.weight
            std = residual_std if name.endswith("c_proj.weight") else 0.02
            generator = torch.Generator().manual_seed(seed_from(torch.initial_seed(), name))
            draw = torch.empty(p.shape, device="cpu").normal_(std=std, generator=generator)
            p.copy_(torch.where(p.isnan(), draw.to(p.device), p))
        # No token and no gradient ever reaches the padding: it stays at 0
        self.transformer.wte.weight[self.config.n_vocab:] = 0

    @classmethod
    def from_pretrained(cls, name):
        """The GPT of gpt2 ... gpt2-xl, a Hugging Face or run folder, or a .pt file."""
        return load_weights(str(name))[0]

    def hidden(self, idx):
        """Final hidden states (B, T, C) of token ids idx (B, T)."""
        positions = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)  # (B, T, C)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # else float32, twice the bytes
        x = self.dropout(x)
        for block in self.transformer.h:
            x = block(x)
        return self.transformer.ln_f(x)

    def to_logits(self, x):
        """Logits (..., n_vocab) of hidden states (..., C): for loss, samples and scores."""
        # Multiply with the padding, as GPUs are slow on 50,257 columns, then drop it
        return self.lm_head(x)[..., :self.config.n_vocab].float()

    def forward(self, idx, targets=None, return_logits=True):
        """Logits (B, T, n_vocab) of idx (B, T), and the mean loss in nats of targets (B, T).

        Targets of -100 do not count. Validation has this loss, too: put a term that only training
        minimises, as a z-loss, under `if self.training`. return_logits=False saves a compiled model
        13 GB at B=64: its backward pass makes a gradient, of zeros, for each output not used.
        """
        logits = self.to_logits(self.hidden(idx))  # (B, T, n_vocab)
        loss = None
        if targets is not None:
            total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            loss = total / (targets >= 0).sum().clamp(min=1)  # 0 where no target counts
        return (logits if return_logits else None), loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Continue idx (B, T) by sampled tokens. Returns (B, T + max_new_tokens).

        temperature 0 takes the likeliest token; top_k=k draws from the k likeliest.
        """
        if temperature == 0:
            temperature, top_k = 1.0, 1
        for _ in range(max_new_tokens):
            context = idx[:, -self.config.block_size:]
            logits = self.to_logits(self.hidden(context)[:, -1])  # (B, n_vocab)
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
    order or in one drawn from (seed, epoch). With recut, a later epoch cuts its rows elsewhere.
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
        row 5 is the second of shard 0. With its rows in the order 1, 2, 0, that is its row 2.
        """
        epoch, row = divmod(row, self.rows_per_epoch)
        shard_order = permutation(self.shuffle, len(self.shards), self.seed, epoch)
        ends = self.rows_in_shard[shard_order].cumsum()  # 4, 7, 12
        i = int(ends.searchsorted(row, side="right"))    # 1
        number = int(shard_order[i])                     # 0
        rows = int(self.rows_in_shard[number])           # 3
        begin = int(ends[i]) - rows                      # 4
        row_order = permutation(self.shuffle, rows, self.seed, epoch, number)
        # With recut, rows begin `shift` tokens earlier (the first cannot), so that no epoch cuts
        # where another did: multiples of 0.618 T, modulo T, are far apart
        shift = int(0.618 * epoch * self.T) % self.T if self.recut else 0
        return number, max(0, int(row_order[row - begin]) * self.T - shift)

    def read(self, row, B):
        """B rows from number `row` on: (B, T + 1) int64, as torch has no uint16 math."""
        rows = np.empty((B, self.T + 1), dtype=np.int64)
        for b in range(B):
            number, start = self.locate(row + b)
            if number != self.open_number:
                self.open_number, self.tokens = number, open_shard(self.shards[number])
            rows[b] = self.tokens[start:start + self.T + 1]
            if rows[b].max() >= self.n_vocab:
                raise UserError(f"{self.shards[number]} holds id {rows[b].max()} of {self.n_vocab}:"
                                " name the --encoding that it was made with.")
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

def rows_before(cfg, step):
    """Rows that all steps before this one read. For a batch that grows, edit this alone."""
    return step * (cfg.total_batch_size // cfg.T)

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
    """Push the singular values x of wide matrices G (n, rows, columns) towards 1: a step makes
    a x + b x^3 + c x^5 of each (Jordan et al. 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315  # steep at 0, to lift small values
    X = G / G.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)  # no singular value above 1
    for _ in range(5):
        A = X @ X.mT                                    # (n, rows, rows)
        P = torch.baddbmm(A, A, A, beta=b, alpha=c)     # b A + c A^2
        X = torch.baddbmm(X, P, X, beta=a)              # a X + P X
    return X

class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized (Jordan et al. 2024). params: (name, matrix) pairs of the blocks.

    Few directions dominate a gradient matrix; Muon makes all equally long, so that rare ones
    are learned too. The factor 0.2 sqrt(longer side) makes its updates as large as AdamW's:
    both can share a learning rate (Liu et al. 2025, section 2.2).
    """
    def __init__(self, params, lr, weight_decay=0.0, momentum=0.95, dtype=torch.float32):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))
        self.dtype = dtype  # of Newton-Schulz

    def smoothed_gradient(self, p, momentum):
        """Nesterov momentum: with average = m average + (1 - m) g, it is (1 - m) g + m average."""
        if "momentum_buffer" not in self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        average = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(average, momentum).to(self.dtype)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            by_shape = defaultdict(list)  # equal matrices are a batch: fewer, larger products
            for name, p in zip(group["param_names"], group["params"]):  # torch splits the pairs
                if p.grad is None:  # frozen, or not used in this step
                    continue
                gradient = self.smoothed_gradient(p, group["momentum"])
                # query, key and value are a matrix each; a c_attn of another shape stays one
                n = 3 if "c_attn" in name and p.size(0) == 3 * p.size(1) else 1
                for weight, G in zip(p.chunk(n), gradient.chunk(n)):  # weight is a view of p
                    if G.size(0) > G.size(1):  # wide is cheaper
                        weight, G = weight.mT, G.mT
                    by_shape[G.shape].append((weight, G))
            for (_, columns), batch in by_shape.items():
                weights, gradients = zip(*batch)
                for weight, update in zip(weights, newton_schulz(torch.stack(gradients))):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(columns))

def configure_optimizers(raw_model, cfg, dtype=torch.float32):
    """[AdamW], or [AdamW, Muon], where Muon has the matrices in the blocks. A group's lr here is
    its peak: step_optimizers() multiplies it by get_lr() / max_lr."""
    in_blocks = raw_model.transformer.h.named_parameters() if cfg.optimizer == "muon" else []
    for_muon = [(name, p) for name, p in in_blocks if p.dim() == 2 and p.requires_grad]
    taken = {p for _, p in for_muon}
    others = [p for p in raw_model.parameters() if p.requires_grad and p not in taken]
    groups = [dict(params=[p for p in others if p.dim() >= 2], weight_decay=cfg.weight_decay),
              # biases and gains do not decay: towards 0 they would only distort the model
              dict(params=[p for p in others if p.dim() < 2], weight_decay=0.0)]
    # betas and eps as in GPT-3, appendix B; fused: in one kernel
    adamw = torch.optim.AdamW(groups, lr=cfg.max_lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    if not for_muon:
        return [adamw]
    return [adamw, Muon(for_muon, cfg.max_lr * cfg.muon_lr_ratio, cfg.weight_decay, dtype=dtype)]

# ---- training
@dataclass
class State:
    """What a checkpoint holds: ALL THAT LATER STEPS DEPEND ON, besides constants and data.

    raw_model, the GPT, is compiled in place: raw_model(x) runs compiled, .generate(x) does not.
    """
    raw_model: nn.Module
    optimizers: list
    scaler: torch.amp.GradScaler  # keeps float16 gradients in range; idle otherwise
    step: int = 0                 # steps done. An int, float or str that you add is saved, too
    minutes: float = 0.0          # that steps took; compiling, evaluation and saves do not count

    def __post_init__(self):  # later, each step and each checkpoint overwrite a group's lr
        self.peak_lrs = [[group["lr"] for group in opt.param_groups] for opt in self.optimizers]

    @property
    def eval_model(self):
        """The GPT that is validated, sampled, exported; if you average weights, return theirs."""
        return self.raw_model

    def state_dict(self):
        return {"step": self.step,
                "numbers": {name: value for name, value in vars(self).items()
                            if isinstance(value, (int, float, str))},  # step, minutes, your own
                "model": self.eval_model.state_dict(),
                "trained": self.raw_model.state_dict(),  # the same tensors, unless averaged
                "gpt_config": asdict(self.raw_model.config),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "optimizer_names": [type(optimizer).__name__ for optimizer in self.optimizers],
                "scaler": self.scaler.state_dict()}

    def load_state_dict(self, saved):  # each get() has a default for older checkpoints
        vars(self).update(saved.get("numbers", {"step": saved["step"]}))
        names = [type(optimizer).__name__ for optimizer in self.optimizers]
        if saved.get("optimizer_names", names) != names:
            raise ValueError(f"its optimizers are {saved['optimizer_names']}, here are {names}")
        self.eval_model.load_state_dict(saved["model"])
        self.raw_model.load_state_dict(saved.get("trained", saved["model"]))
        for optimizer, content in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(content)
        if saved["scaler"]:  # empty, unless it was in float16
            self.scaler.load_state_dict(saved["scaler"])

@dataclass
class Run:
    """What train() works with. NOTHING HERE OUTLIVES A RESTART: set_up() builds it anew."""
    cfg: Config
    state: State
    device: torch.device
    encoding: tiktoken.Encoding
    ddp_model: nn.Module          # raw_model; with several processes, in DDP
    autocast: partial             # autocast() is a context with matrix products in dtype
    train_loader: DataLoaderLite
    val_loader: DataLoaderLite
    tokens_per_byte: float        # of the validation text: turns nats per token into nats per byte
    hellaswag: object             # its questions as rows for the model, or None
    folder: "RunFolder"           # log.txt, checkpoints and the rest of log_dir
    signal_came: threading.Event = field(default_factory=threading.Event)  # to this process
    stopping: bool = False        # a signal came to any process
    validated_step: int = -1      # the last step that was validated here
    step_seconds: deque = field(default_factory=lambda: deque(maxlen=50))  # of the last steps
    unsaid: list = field(default_factory=list)  # "val 3.2924" and such, for stdout's next line

@torch.no_grad()
def validation_loss(run, loader, model=None):
    """Mean loss of eval_model, or another model, in nats per token over val_tokens tokens.

    Each process sums over its share of the rows: B and the number of processes do not matter.
    """
    cfg, model = run.cfg, model or run.state.eval_model
    rows = min(max(1, cfg.val_tokens // cfg.T), loader.rows_per_epoch)
    total, counted = torch.zeros(2, device=run.device)
    for row in range(rank() * cfg.B, rows, world_size() * cfg.B):
        x, y = loader.batch(row, cfg.B, run.device)
        y = y.clone()          # x is in the same memory
        y[rows - row:] = -100  # rows of the last batch that are past val_tokens do not count
        with run.autocast():
            _, loss = model(x, y, return_logits=False)
        total = total + loss * (y >= 0).sum()
        counted = counted + (y >= 0).sum()
    total, counted = sum_over_ranks(torch.stack((total, counted))).tolist()
    return total / counted

def train_step(run):
    """One optimizer step. Returns a loss, whose mean over all processes is the step's, and the
    gradient's norm before clipping, both on the device. Only in float16 does it wait for a GPU."""
    cfg, state, ddp_model = run.cfg, run.state, run.ddp_model
    # A step's rows are dealt out B at a time, to rank 0, rank 1, ..., and again to rank 0
    begin, end = rows_before(cfg, state.step), rows_before(cfg, state.step + 1)
    check_rows(cfg, state.step, end - begin)
    my_rows = range(begin + rank() * cfg.B, end, world_size() * cfg.B)  # each micro-step's first
    weighted_loss, counted_share = torch.zeros(2, device=run.device)
    ddp_model.train()
    for row in my_rows:
        # Dropout follows from the micro-step's first row (so what it drops depends on B, too)
        torch.manual_seed(seed_from(cfg.seed, row))
        x, y = run.train_loader.batch(row, cfg.B, run.device)
        # DDP averages the gradients over the processes during backward, which only the last
        # micro-step needs. no_sync() encloses the forward pass too, where DDP prepares it.
        context = contextlib.nullcontext()
        if world_size() > 1 and row != my_rows[-1]:
            context = ddp_model.no_sync()
        with context:
            with run.autocast():
                _, loss = ddp_model(x, y, return_logits=False)
            # Plain gradient accumulation: share is 1 / micro-steps. If you mask targets by -100, it
            # is less; then the sum of loss * share, divided by the sum of shares, is still the mean
            # over all targets that count.
            share = (y >= 0).sum() / (y.numel() * len(my_rows))
            state.scaler.scale(loss * share).backward()
        weighted_loss = weighted_loss + loss.detach() * share
        counted_share = counted_share + share
    ddp_model.eval()
    counted_share = sum_over_ranks(counted_share) / world_size()  # 1, but for masks
    # For noise that you may add below: the same on all ranks, so that their models stay equal
    torch.manual_seed(seed_from(cfg.seed, state.step, "update"))
    norm = step_optimizers(state, cfg, counted_share)
    state.step += 1
    return weighted_loss / counted_share, norm

def step_optimizers(state, cfg, counted_share):
    """Divide gradients by counted_share, clip them, step. Returns their norm before clipping."""
    for optimizer, lrs in zip(state.optimizers, state.peak_lrs):
        state.scaler.unscale_(optimizer)
        for group, lr in zip(optimizer.param_groups, lrs):
            group["lr"] = lr * get_lr(state.step, cfg) / cfg.max_lr
    gradients = [p.grad for p in state.raw_model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients) / counted_share
    longest = cfg.grad_clip or math.inf
    clip = (longest / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, clip / counted_share)  # in few kernels
    for optimizer in state.optimizers:
        # scaler.step() would skip only the optimizer whose own gradients overflowed: skip all
        if not state.scaler.is_enabled() or norm.isfinite():
            state.scaler.step(optimizer)
        optimizer.zero_grad()
    state.scaler.update()
    return norm

def due(every, run):
    """Whether it is time: every so many steps (0 is never), and after the last one."""
    return every > 0 and (run.state.step % every == 0 or run.state.step == run.cfg.max_steps)

def train(run):
    """Save, evaluate, take a step; until max_steps, or until a signal."""
    cfg, state = run.cfg, run.state
    while not run.stopping:
        step = state.step
        if due(cfg.save_every, run) or due(cfg.keep_every, run):
            run.folder.save(state)  # first, so that an evaluation that fails costs no steps
        if due(cfg.eval_every, run):
            validate(run)
        if due(cfg.hellaswag_every, run) and run.hellaswag:
            report(run, step, "hella", hellaswag_score(run))
        if due(cfg.eval_every, run) or due(cfg.hellaswag_every, run):
            print_line(run, step)
            run.folder.draw()
        if due(cfg.sample_every, run) and (step > 0 or cfg.max_steps == 0):  # not before a training
            print_sample(run)
        if step >= cfg.max_steps:
            break
        start = time.perf_counter()
        loss, norm = train_step(run)
        loss, norm, run.stopping = over_all_processes(run, loss, norm)  # waits for the GPU
        run.step_seconds.append(time.perf_counter() - start)
        if len(run.step_seconds) > 1:  # the first step of a start is mostly compiling
            state.minutes += run.step_seconds[-1] / 60
        check_step(run, loss, norm)
        report_step(run, loss, norm)
    finish(run)


# ==== part two: what a long run on real machines needs
# ---- command line and settings: choose a preset, say which, refuse what cannot work
PRESETS = {"Config": {}, "SMALL": SMALL, "FINETUNE": FINETUNE}

def main():
    sys.stdout.reconfigure(errors="backslashreplace")  # samples hold any character
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C just ends: nothing is to be saved yet
    code_checksum()  # for checkpoints; cached now, as the file may be edited while it trains
    try:
        cfg, first_lines = choose_settings(parse_flags(Config, __doc__, PRESETS))
        device = pick_device(cfg.device)
        if "RANK" in os.environ:
            join_processes(device)
        if cfg.sample:
            sample_only(cfg, device)
        else:
            print0(first_lines)
            check_config(cfg)
            run = set_up(cfg, device)
            with contextlib.closing(run.folder):  # whatever ends train(), a save is finished
                train(run)
            del run  # DDP holds the process group: it goes first, or Python may abort at its exit
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            error = UserError("Out of memory: a smaller --B trains the same model.")
        if isinstance(error, UserError):
            print(f"train_gpt2.py: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
        if dist.is_initialized():
            os._exit(1)  # a normal exit would wait for others, which may wait for this one
        sys.exit(1)

def is_text(data):  # else it is a folder of shards
    return Path(data).is_file()

def choose_settings(flags):
    """The constants that apply, and the first lines, which name them."""
    data, note = flags.get("data", Config.data), ""
    unedited = "data" not in flags and data == "edu_fineweb10B"
    if unedited and not find_shards(data)[0]:
        data = str(Path(__file__).resolve().with_name("input.txt"))
        note = ("Quick start on Shakespeare: edu_fineweb10B/ holds no shards.\n"
                "For GPT-2 (124M): python fineweb.py, and the same command again.\n\n")
    init_from = flags.get("init_from", Config.init_from)
    preset_name = "Config"
    if is_text(data):
        preset_name = "SMALL" if init_from == "scratch" else "FINETUNE"
    preset, decided = PRESETS[preset_name], {}
    if init_from != "scratch":
        log_dir = flags.get("log_dir", preset.get("log_dir", Config.log_dir))
        # A run that continues has weights of its own
        config, encoding, _ = read_weights(log_dir if find_checkpoints(log_dir) else init_from)
        decided = {key: value for key, value in config.items() if key in asdict(Config())}
        decided |= {"encoding": encoding} if encoding else {}
        for constant in flags.keys() & decided.keys():
            if str(flags[constant]) != str(decided[constant]):
                raise UserError(f"init_from={init_from} decides {constant}: leave out --{constant}")
        if preset_name == "FINETUNE":  # after the check, as flags may differ from these
            decided["T"] = min(preset["T"], 2 ** int(math.log2(config["block_size"])))
            decided["max_lr"] = preset["max_lr"] / config["n_embd"]
    if "max_steps" in flags:  # else these would decide it
        preset = preset | {"epochs": 0.0, "minutes": 0.0}
    cfg = make_config(Config, {"data": data} | preset | decided | flags)
    if preset_name == "Config":
        return cfg, "settings  Config, as data is not a text file"
    values = " ".join(f"{constant}={getattr(cfg, constant)!r}" for constant in preset | decided)
    weights = " and weights are given" if preset_name == "FINETUNE" else ""
    return cfg, (f"{note}settings  {preset_name}, not Config, as data is a text file{weights}:\n"
                 f"{values}")

def check_config(cfg):
    """Raise UserError for constants that make no training; lower B to one that fits a step."""
    for name in ("total_batch_size", "B", "T", "n_layer", "n_head", "n_embd", "val_tokens"):
        if getattr(cfg, name) < 1:
            raise UserError(f"{name}={getattr(cfg, name)}: it must be 1 or more.")
    if cfg.min_lr > cfg.max_lr or cfg.max_lr == 0:
        raise UserError(f"max_lr={cfg.max_lr} must be above 0, and not below min_lr={cfg.min_lr}.")
    if cfg.n_embd % cfg.n_head:
        raise UserError(f"n_embd={cfg.n_embd} is no multiple of n_head={cfg.n_head}: change one.")
    if not is_text(cfg.data) and not all(find_shards(cfg.data)):
        raise UserError(f"data={cfg.data} is no text, and no folder with *_train_*.npy and "
                        "*_val_*.npy: run fineweb.py, or name another --data.")
    together = cfg.T * world_size()
    if cfg.total_batch_size % together:
        fitting = max(1, round(cfg.total_batch_size / together)) * together
        raise UserError(f"total_batch_size={cfg.total_batch_size} is no multiple of T * processes "
                        f"= {cfg.T} * {world_size()}: take --total_batch_size={fitting}, say.")
    rows = max(1, rows_before(cfg, 1) // world_size())
    cfg.B = max(b for b in range(1, min(cfg.B, rows) + 1) if rows % b == 0)

def check_rows(cfg, step, rows):  # rows of this step: an edited rows_before() may give bad ones
    if rows < 1 or rows % (cfg.B * world_size()):
        raise UserError(f"Step {step} has {rows} rows: rows_before() must give each step a "
                        f"multiple of B * processes = {cfg.B} * {world_size()}, or B be lower.")

# ---- processes: torchrun starts one for each GPU, and ends all when one fails
def rank():
    return int(os.environ.get("RANK", 0))

def world_size():  # Slurm may set it without RANK
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1

def seed_from(*key):
    """A seed that follows from numbers and names: what is random is a function of them."""
    numbers = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in key]
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])

def print0(text):
    """Print from rank 0, in one piece: the thread that saves prints too."""
    if rank() == 0:
        with contextlib.suppress(OSError, RuntimeError):  # a full disk, or a signal amid a print
            print(f"{text}\n", end="", flush=True)

def sum_over_ranks(tensor):  # in place, and returned
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor

def join_processes(device):
    # Now, while there is no group: functions of torch.distributed.nn keep the group of the time of
    # their import as a default. Imported later, by DDP, they keep ours, and Python's exit may abort
    import torch.distributed.nn  # noqa: F401
    # Processes find each other's addresses in torchrun's store, which outlives a restart: with a
    # prefix for each restart, nobody finds addresses of the dead
    store, _, _ = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    gpu = device if device.type == "cuda" else None
    dist.init_process_group(backend="nccl" if gpu else "gloo", store=store, rank=rank(),
                            world_size=world_size(), device_id=gpu,
                            timeout=datetime.timedelta(hours=1))  # rank 0 checks and exports alone

def catch_signals(event):
    """From now on, Ctrl-C and SIGTERM set the event. A second Ctrl-C ends at once."""
    alone = "RANK" not in os.environ  # torchrun passes Ctrl-C on, so each process gets it twice

    def receive(number, frame):
        if event.is_set() and number == signal.SIGINT and alone:
            print0("Ended at once. The last checkpoint stays; the same command continues there.")
            os._exit(130)
        event.set()
        again = " Ctrl-C again ends at once." if alone else ""
        print0(f"Stopping after this step and a save.{again}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, receive)

# ---- the machine: "auto" takes what is fast here; a GPU that cannot be used is named
# 2.14 is the last torch with wheels for CUDA 12.6
OTHER_TORCH = ("another torch, as pip install 'torch<2.15' --index-url "
               "https://download.pytorch.org/whl/cu126, which has code for old GPUs and drivers")

def pick_device(name):
    """The torch.device of a name, ready to use. Raises UserError if it cannot be used."""
    # torch's version ends in its CUDA, as +cu130: most often that is newer than the driver's
    no_gpu = f"torch {torch.__version__} sees no GPU: install a newer driver, or {OTHER_TORCH}."
    if name == "auto":
        mps = torch.backends.mps.is_available() and world_size() == 1  # gloo has no MPS tensors
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
        if name == "cpu" and shutil.which("nvidia-smi"):
            print0(f"!!! Training on the CPU: {no_gpu}")
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    if not re.fullmatch(r"cpu|mps|cuda:\d+", name):
        raise UserError(f"device={name} is unknown: cuda, cuda:1, mps or cpu.")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(f"device={name}: {no_gpu}")
        check_gpu(device)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32
    if device.type == "cpu":
        keep_freed_memory()
    return device

def check_gpu(device):
    """Raise UserError if there is no such GPU, or torch cannot use it."""
    if device.index >= torch.cuda.device_count():
        raise UserError(f"There is no {device}: torch sees {torch.cuda.device_count()} GPU(s), and "
                        "each process needs its own: lower --nproc_per_node.")
    try:
        torch.ones(1, device=device).item()  # fails where torch has no code for this GPU
    except torch.AcceleratorError as e:
        raise UserError(f"torch {torch.__version__} fails on {torch.cuda.get_device_name(device)} "
                        f"({first_line(e)}). If it is an old one, install {OTHER_TORCH}.") from None

def keep_freed_memory():
    """Have glibc keep freed memory for the next step; elsewhere (macOS, Windows, musl) nothing.

    Else each array above 32 MB is new memory, whose pages the kernel clears. A step of the 124M
    on a CPU, 8 x 256 tokens in bfloat16: 2.0 s, without this 3.1 to 4.4; memory 4.2 and 3.9 GB.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)   # M_MMAP_MAX: no array gets a mapping of its own
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: nothing is given back

def pick_dtype(choice, device):  # of matrix products
    if choice != "auto":
        return getattr(torch, choice)
    if device.type == "cuda":  # is_bf16_supported() is true on V100 and T4 too, which emulate it
        new = torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if new else torch.float16
    cpu = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return torch.bfloat16 if cpu.get("avx512_bf16") or cpu.get("amx_bf16") else torch.float32

def pick_compile(choice, device):
    # Windows often has no Triton, which needs compute capability 7.0
    fast = (device.type == "cuda" and importlib.util.find_spec("triton") is not None
            and torch.cuda.get_device_capability(device) >= (7, 0))
    return fast if choice == "auto" else choice == "True"

def set_attention(cfg, device, dtype):
    # In bfloat16 on a CPU flash's backward pass is slow on short rows: 11.8 ms at T=64, without 5.6
    short = device.type == "cpu" and dtype == torch.bfloat16 and cfg.T < 256
    torch.backends.cuda.enable_flash_sdp(not short)  # despite its name, for CPUs, too
    # cuDNN's, the fastest on H100 and newer, rounds a dropout of 0.1 to 1/16 in some kernels
    torch.backends.cuda.enable_cudnn_sdp(cfg.dropout == 0)

# ---- opening data: damaged shards or other tokens would train a bad model
def padded(n_vocab):  # to a multiple of 128, which GPUs multiply faster
    return math.ceil(n_vocab / 128) * 128

def find_shards(folder):  # to train on, and to validate on
    return sorted(Path(folder).glob("*_train_*.npy")), sorted(Path(folder).glob("*_val_*.npy"))

def open_shard(shard):
    """A .npy file memory-mapped, (N,) uint16 or uint32; an array as it is."""
    if not isinstance(shard, Path):
        return shard
    try:
        tokens = np.load(shard, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as e:
        raise UserError(f"{shard} is no whole shard ({first_line(e)}): make it again.") from None
    return tokens

def open_data(cfg, encoding):
    """The loaders to train and to validate with. Raises UserError."""
    if is_text(cfg.data):  # its last tenth is for validation
        tokens = read_text(cfg.data, encoding)
        cut = int(len(tokens) * 0.9)
        train, val = [tokens[:cut]], [tokens[cut:]]
    else:
        train, val = find_shards(cfg.data)
        check_encoding_of_shards(cfg)
    train_loader = DataLoaderLite(train, cfg.T, cfg.seed, cfg.shuffle, encoding.n_vocab,
                                  recut=cfg.shuffle and is_text(cfg.data))
    val_loader = DataLoaderLite(val, cfg.T, n_vocab=encoding.n_vocab)
    if not (train_loader.rows_per_epoch and val_loader.rows_per_epoch):
        raise UserError(f"{cfg.data} is too short for T={cfg.T}: more text, or a lower --T.")
    return train_loader, val_loader

def read_text(path, encoding):  # its tokens (N,)
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as e:
        raise UserError(f"{path} is not UTF-8 ({e}): convert it.") from None
    return encoding.encode_to_numpy(text, disallowed_special=()).astype(token_dtype(encoding))

def check_encoding_of_shards(cfg):  # those of other scripts have no manifest
    manifest, made_with = Path(cfg.data, "manifest.json"), cfg.encoding
    if manifest.exists():
        made_with = json.loads(manifest.read_bytes())["settings"]["encoding"]
    if made_with != cfg.encoding:
        raise UserError(f"Shards in {cfg.data}/ need --encoding={made_with}, not {cfg.encoding}.")

def fingerprint_of(loader):
    """What tells corpora apart: of a text its ids, of shards the first and last."""
    seen = []
    for shard, length in zip(loader.shards, loader.lengths):
        n = 4096 if isinstance(shard, Path) else length
        first, last = open_shard(shard)[:n], open_shard(shard)[-n:]
        seen.append((getattr(shard, "name", "text"), length, zlib.crc32(first), zlib.crc32(last)))
    crc = zlib.crc32(repr(seen).encode())
    return f"{sum(loader.lengths):,} tokens in {len(seen)} file(s) #{crc:08x}"

def tokens_per_byte(loader, encoding, val_tokens):
    """Tokens per byte of the text that validation reads; ids beyond the vocabulary do not count."""
    counts = np.zeros(encoding.n_vocab, dtype=np.int64)  # of each token
    for shard in loader.shards:
        tokens = open_shard(shard)[1:1 + val_tokens - counts.sum()]  # targets begin at 1
        counts += np.bincount(tokens, minlength=len(counts))[:len(counts)]
    n_bytes = sum(counts[token] * len(encoding.decode_single_token_bytes(token))
                  for token in counts.nonzero()[0].tolist() if token != encoding.eot_token)
    return counts.sum() / max(1, n_bytes)

# ---- the run's folder: against kills, full disks, damaged files, and other runs in its place
# A run may continue with other values of these; epochs are compared as the max_steps they make
FREE_TO_CHANGE = {
    "B", "print_every", "eval_every", "val_tokens", "hellaswag_every", "sample_every",
    "sample_prompt", "sample_tokens", "temperature", "top_k", "sample", "log_dir", "save_every",
    "keep_every", "device", "dtype", "compile", "epochs"}

class RunFolder:
    """log_dir, which rank 0 alone writes; checkpoints and pictures by a thread of its own."""
    def __init__(self, cfg, fingerprint):
        self.cfg, self.path, self.fingerprint = cfg, Path(cfg.log_dir), fingerprint  # of the data
        self.starts, self.log = [], None             # for run.json; log.txt: begin() fills both
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.saving, self.drawing = None, None       # the last save, the last picture
        self.saved_step, self.failure = -1, ""       # the step that needs no save; why one failed
        self.host_copies = {}                        # tensors of the last save
        if rank() == 0:
            self.lock = lock_folder(self.path)       # held as long as something refers to it
            remove_parts(self.path)                  # of saves that were killed

    def close(self):
        self.thread.shutdown()  # waits for a save in progress
        if self.log:
            self.log.close()

    def begin(self, step, continues):
        """Rename another run's log.txt and hf, or an outdated hf; note this start; open log.txt."""
        if rank() != 0:
            return
        for name in ("hf", "log.txt"):
            old = self.path / name  # hf, the export, is outdated if its run trains on
            if old.exists() and (not continues or (name == "hf" and step < self.cfg.max_steps)):
                old.rename(f"{old}_before_{time.strftime('%Y%m%d-%H%M%S')}")
        if continues and (self.path / "run.json").exists():
            self.starts = read_run(self.path)["starts"]
        self.starts.append({
            "time": time.ctime(), "step": step, "command": sys.argv, "code": code_checksum(),
            "torch": torch.__version__, "python": sys.version})
        self.write_run()
        self.log = open_log(self.path / "log.txt", step)
        if continues or self.cfg.init_from == "scratch":
            self.saved_step = step  # needs no save: it was loaded, or the seed draws it again

    def write_run(self, result=None):
        """Write run.json: constants, data, starts and, at the end, the run's result."""
        text = json.dumps({"constants": asdict(self.cfg), "data": self.fingerprint,
                           "starts": self.starts, "result": result}, indent=2)
        if rank() == 0:
            write_whole(self.path / "run.json", lambda file: file.write(text.encode()))

    def save(self, state):
        """Begin to save a step, unless it is saved; training waits only until it is copied."""
        if rank() != 0 or self.wait_until_saved(state.step):  # waits for the save before it
            return
        with contextlib.suppress(OSError):  # the log of these steps, before their checkpoint
            os.fsync(self.log.fileno())
        content = self.copy_to_host(state.state_dict() | {  # plain types, for weights_only=True
            "encoding": self.cfg.encoding, "constants": asdict(self.cfg), "data": self.fingerprint,
            "code": code_checksum()})
        self.saving = self.thread.submit(self.write_checkpoint, content)

    def wait_until_saved(self, step):
        """Wait for a save in progress, which reads host_copies; return whether `step` is saved."""
        if self.saving:
            self.saving.result()
        return self.saved_step == step

    def copy_to_host(self, content):
        """content with its tensors copied; one that is in it twice, as tied weights are, once."""
        old_copies, self.host_copies = self.host_copies, {}
        def copied(part):
            if isinstance(part, dict):
                return {key: copied(value) for key, value in part.items()}
            if isinstance(part, (list, tuple)):
                return [copied(value) for value in part]
            if not torch.is_tensor(part):  # weights_only=True reads no numbers of NumPy's
                return part.item() if isinstance(part, np.number) else part
            # finds a tied tensor's copy, and, as weights stay in place, the memory of the last save
            key = (part.data_ptr(), part.shape, part.stride(), part.dtype)
            if key not in self.host_copies:
                memory = old_copies.get(key)
                memory = torch.empty_like(part, device="cpu") if memory is None else memory
                self.host_copies[key] = memory.copy_(part)
            return self.host_copies[key]
        return copied(content)

    def write_checkpoint(self, content):
        """Write, verify, rename; then delete those that need not stay."""
        step, start = content["step"], time.perf_counter()
        path = self.path / f"checkpoint_{step:05d}.pt"
        try:
            write_whole(path, lambda file: torch.save(content, file), verify=read_checkpoint)
        except (OSError, RuntimeError, UserError) as e:
            while e.__context__:  # torch.save's RuntimeErrors hide an OSError
                e = e.__context__
            self.failure = first_line(e)
            print0(f"!!! NOT SAVED at step {step}: {self.failure}. What was saved is still there.")
            return
        self.saved_step, seconds = step, time.perf_counter() - start
        print0(f"{step:5d}/{self.cfg.max_steps} saved {path} in {seconds:.1f} s")
        self.prune(step)

    def prune(self, step):  # before it only the newest, the best and keep_every's stay
        found = find_checkpoints(self.path)
        older = [old for old in found if old < step]
        losses = {old: loss for old, loss in read_streams(self.path)["val"] if old in found}
        stay = {*older[:1], min(losses, key=losses.get, default=None)}  # the newest and the best
        for old in set(older) - stay:
            if not self.cfg.keep_every or old % self.cfg.keep_every:
                with contextlib.suppress(OSError):
                    found[old].unlink()

    def draw(self):
        """Draw in the background, if matplotlib is installed; a picture that waits is dropped."""
        if rank() == 0 and importlib.util.find_spec("matplotlib"):
            if self.drawing:
                self.drawing.cancel()
            self.drawing = self.thread.submit(draw_curves, self.path)

def open_log(path, step):
    """log.txt to append to, without the lines from `step` on, as these steps come again."""
    file = open(path, "ab", buffering=0)  # for tail -f
    kept = 0  # bytes
    for line in path.read_bytes().splitlines(keepends=True):
        number = re.match(rb"(\d+) .+ (-?[\d.]+|nan|-?inf)$", line)  # None: a note of yours
        if not line.endswith(b"\n") or (number and int(number[1]) >= step):
            break
        kept += len(line)
    file.truncate(kept)
    return file

def read_run(folder):  # run.json
    return json.loads(Path(folder, "run.json").read_text())

def read_streams(folder):  # {stream: [(step, value)]} of log.txt
    path, streams = Path(folder, "log.txt"), defaultdict(list)
    text = path.read_text(errors="replace") if path.exists() else ""
    for step, stream, value in re.findall(r"^(\d+) (.+) (-?[\d.]+)$", text, re.M):
        streams[stream].append((int(step), float(value)))
    return streams

def find_checkpoints(folder):  # {step: path}, newest first
    paths = Path(folder).glob("checkpoint_*.pt")
    numbers = {path: path.stem.removeprefix("checkpoint_") for path in paths}
    found = {int(number): path for path, number in numbers.items() if number.isdecimal()}
    return dict(sorted(found.items(), reverse=True))

def newest_checkpoint(folder):  # that is undamaged; None if there is none
    found = find_checkpoints(folder)
    for path in found.values():
        try:
            read_checkpoint(path)
            return path
        except UserError as e:
            print0(f"{e} Trying the one before it.")
    if found:
        raise UserError(f"Every checkpoint in {folder}/ is damaged: take another --log_dir.")

def best_checkpoint(folder):  # the newest; if val rose again, the one where it was lowest
    newest, found = newest_checkpoint(folder), find_checkpoints(folder)
    losses = {step: loss for step, loss in read_streams(folder)["val"] if step in found}
    best, last_validated = min(losses, key=losses.get, default=None), max(losses, default=None)
    return newest if best == last_validated else found[best]  # val still falls: the newest

def read_checkpoint(path, mmap=True):
    """The content of a checkpoint. Checks the checksums, which torch ignores."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch's format
            if archive.testzip():
                raise ValueError("a checksum is wrong")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as e:  # a damaged file may raise anything
        raise UserError(f"{path} cannot be read as a checkpoint ({first_line(e)}).") from None

@lru_cache  # main() calls it first: the file may be edited while it trains
def code_checksum():
    """Crc32 of this file and encoding_parts(), without comments, Config, SMALL and FINETUNE."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    for node in ast.parse("\n".join(lines)).body:
        names = [ast.unparse(target) for target in getattr(node, "targets", [])]
        if {"Config", "SMALL", "FINETUNE"}.intersection([getattr(node, "name", ""), *names]):
            lines[node.lineno - 1:node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    lines += inspect.getsource(encoding_parts).splitlines()
    lines = [re.sub(r"(^|\s)#.*", "", line).rstrip() for line in lines]
    return zlib.crc32("\n".join(filter(None, lines)).encode())

def is_of_other_code(saved):
    return saved.get("code", code_checksum()) != code_checksum()

def check_same_training(saved, cfg, fingerprint):
    """Raise UserError if a checkpoint is of another training than cfg's on data like this."""
    # constants that the run did not know had their defaults; data by content, not by path
    before = asdict(Config()) | saved["constants"] | {"data": saved["data"]}
    now = asdict(cfg) | {"data": fingerprint}
    changed = {name for name in now if before[name] != now[name]} - FREE_TO_CHANGE
    if not cfg.minutes:  # a run begun by minutes may go on by --max_steps
        changed.discard("minutes")
    if cfg.max_steps > before["max_steps"]:
        changed.discard("max_steps")
        print0(f"max_steps was {before['max_steps']}, is {cfg.max_steps}: a new lr schedule.")
    values = [f"{name} was {before[name]!r}, is {now[name]!r}" for name in sorted(changed)]
    if is_of_other_code(saved) and saved["step"] >= cfg.max_steps:  # its result is the old code's
        values.append("train_gpt2.py was edited since it finished")
    if values:
        raise UserError(f"The run in {cfg.log_dir}/ is another one: {'; '.join(values)}. Put that "
                        f"back, or take another --log_dir.")

# ---- setting up: data, checkpoint and model are checked before files of a run change
def set_up(cfg, device):  # what train() works with; raises UserError
    encoding = get_encoding(cfg.encoding)
    train_loader, val_loader = open_data(cfg, encoding)
    if cfg.epochs:
        cfg.max_steps = 1
        while rows_before(cfg, cfg.max_steps) < cfg.epochs * train_loader.rows_per_epoch:
            cfg.max_steps += 1
    dtype, compiled = pick_dtype(cfg.dtype, device), pick_compile(cfg.compile, device)
    set_attention(cfg, device, dtype)
    folder = RunFolder(cfg, fingerprint_of(train_loader))
    newest, saved = [newest_checkpoint(folder.path) if rank() == 0 else None], {}
    if world_size() > 1:  # a shared disk may show ranks different files
        dist.broadcast_object_list(newest)  # fills the list
    if newest[0]:
        # not mapped on a CPU: AdamW keeps these tensors, and Windows deletes no file that is mapped
        saved = read_checkpoint(newest[0], mmap=device.type != "cpu")
        if cfg.minutes:  # reckoned when the run began
            cfg.max_steps = saved["constants"]["max_steps"]
        check_same_training(saved, cfg, folder.fingerprint)
    raw_model = build_model(cfg, encoding, saved).to(device)
    state = build_state(raw_model, cfg, dtype, saved)
    if compiled:
        raw_model.compile()
    autocast = partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32)
    ddp_model = raw_model
    if world_size() > 1:  # 25 MB a bucket, the default, would cut a compiled model into 14 graphs
        ddp_model = DDP(raw_model, bucket_cap_mb=100, gradient_as_bucket_view=True)  # no copies
    run = Run(
        cfg=cfg, state=state, device=device, encoding=encoding, autocast=autocast,
        ddp_model=ddp_model, train_loader=train_loader, val_loader=val_loader,
        tokens_per_byte=tokens_per_byte(val_loader, encoding, cfg.val_tokens),
        hellaswag=hellaswag_questions(cfg, state.eval_model, encoding),
        folder=folder)
    if cfg.minutes and not saved:
        cfg.max_steps = steps_that_fit(run)
    catch_signals(run.signal_came)
    folder.begin(state.step, continues=bool(saved))
    describe(run, dtype, compiled)
    warn_of_other_loss(run)
    if is_of_other_code(saved):
        print0(f"!!! train_gpt2.py was edited: from step {state.step} on, other code continues.")
    return run

def model_constants(cfg):
    return {key: value for key, value in asdict(cfg).items() if key in asdict(GPTConfig())}

def build_model(cfg, encoding, saved=None):
    """The GPT to train: new, with init_from's weights, or of a checkpoint's shape."""
    torch.manual_seed(cfg.seed)
    constants = model_constants(cfg)
    if saved:
        raw_model = GPT(GPTConfig(**constants | saved["gpt_config"] | {"dropout": cfg.dropout}))
    elif cfg.init_from == "scratch":
        raw_model = GPT(GPTConfig(block_size=cfg.T, vocab_size=padded(encoding.n_vocab),
                                  n_vocab=encoding.n_vocab, **constants))
    else:
        raw_model, _ = load_weights(cfg.init_from, **constants)
        c = raw_model.config
        if c.n_vocab != encoding.n_vocab or cfg.T > c.block_size:
            raise UserError(f"init_from={cfg.init_from} has {c.n_vocab} tokens and a context of "
                            f"{c.block_size}: change encoding or T.")
        read_weights.cache_clear()  # or every process would hold them twice
    # To freeze parts, set requires_grad=False here, where new and continued runs pass
    return raw_model

def build_state(raw_model, cfg, dtype, saved):
    """A new State, or a checkpoint's. Raises UserError."""
    muon_dtype = dtype if dtype == torch.bfloat16 else torch.float32  # float16 would overflow
    optimizers = configure_optimizers(raw_model, cfg, muon_dtype)
    check_parameters(raw_model, optimizers)
    device = next(raw_model.parameters()).device
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    state = State(raw_model, optimizers, scaler)
    if saved:
        try:
            state.load_state_dict(saved)
        except (KeyError, RuntimeError, ValueError) as e:  # other names, shapes, groups
            raise UserError(f"The run in {cfg.log_dir}/ does not fit train_gpt2.py ({first_line(e)}"
                            "): put the code back, or take another --log_dir.") from None
    return state

def check_parameters(raw_model, optimizers):
    """Raise UserError for a parameter without values, without an optimizer, or with two."""
    times = Counter(id(p) for optimizer in optimizers for group in optimizer.param_groups
                    for p in group["params"])
    for name, p in raw_model.named_parameters():
        if not p.isfinite().all():
            raise UserError(f"{name} is not finite before the first step: give it values.")
        if times[id(p)] > 1 or (times[id(p)] == 0 and p.requires_grad):
            raise UserError(f"{name} is in {times[id(p)]} groups of optimizers: give it to one in "
                            "configure_optimizers(), or freeze it (requires_grad=False).")

def steps_that_fit(run):
    """How many steps fit into cfg.minutes, by the median of twenty, which are taken back again."""
    print0(f"Taking twenty steps, to see how many fit into {run.cfg.minutes:g} minutes ...")
    cfg, before, seconds = run.cfg, run.folder.copy_to_host(run.state.state_dict()), []
    for _ in range(20):
        start = time.perf_counter()
        loss, _ = train_step(run)
        loss.item()  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    run.state.load_state_dict(before)
    run.unsaid.clear()
    seconds = sum_over_ranks(torch.tensor(seconds, device=run.device)) / world_size()  # (20,)
    steps = int(60 * cfg.minutes / seconds.median().item())
    if steps <= cfg.warmup_steps:
        raise UserError(f"Only {steps} steps fit into minutes={cfg.minutes:g}, and warmup_steps="
                        f"{cfg.warmup_steps}: more --minutes, or fewer --warmup_steps.")
    print0(f"{steps:,} steps fit into {cfg.minutes:g} minutes; the same again: --max_steps={steps}")
    return steps

def describe(run, dtype, compiled):
    cfg, model, rows = run.cfg, run.state.raw_model, rows_before(run.cfg, 1)
    epochs = rows_before(cfg, cfg.max_steps) / run.train_loader.rows_per_epoch
    groups = [f"{sum(p.numel() for p in group['params']):,} in {len(group['params'])} tensors by "
              f"{type(optimizer).__name__} with decay {group.get('weight_decay', 0.0)}"
              for optimizer in run.state.optimizers for group in optimizer.param_groups]
    print0(f"data      {cfg.data}: {run.folder.fingerprint}\n"
           f"model     {sum(p.numel() for p in model.parameters()):,} parameters, "
           f"init_from={cfg.init_from}: {model.config}\n"
           f"training  {cfg.max_steps:,} steps of {rows * cfg.T:,} tokens, {epochs:.2f} epochs\n"
           f"trained   {'; '.join(groups)}\n"
           f"machine   {world_size()} x {run.device.type}, {str(dtype)[6:]}, "
           f"compile={compiled}, B={cfg.B}\n"
           f"log       {Path(cfg.log_dir, 'log.txt')}, from step {run.state.step} on")
    if 0 < cfg.max_steps <= run.state.step:
        print0("This run is finished: validation, samples and export again.")

# ---- watching: log.txt is for notebooks, stdout for people
def report(run, step, stream, value):
    """A line in log.txt, a point in curves.png, and a word on stdout where a line is printed."""
    if rank() == 0 and run.folder.log:  # not in steps_that_fit()
        with contextlib.suppress(OSError):  # a full disk
            run.folder.log.write(f"{step} {stream} {value:.6f}\n".encode())
    run.unsaid.append(f"{stream} {value:.4f}")

def print_line(run, step, more=""):  # what was reported of a step
    if run.unsaid:
        print0(f"{step:5d}/{run.cfg.max_steps} {' '.join(run.unsaid)}{more}")
    run.unsaid.clear()

def over_all_processes(run, loss, norm):
    """(Mean loss, norm, whether a signal came to one). Waits for the GPU; norms must be equal."""
    signal_came = torch.full_like(loss, run.signal_came.is_set())  # no copy from the host
    mine = torch.stack((loss, norm, signal_came))
    everyones = [mine.clone() for _ in range(world_size())]
    if world_size() > 1:
        dist.all_gather(everyones, mine)
    losses, norms, signals = torch.stack(everyones).T.tolist()
    # 1e-5 allows for rounding: GPUs of different kinds may sum up in another order
    if max(norms) - min(norms) > 1e-5 * max(norms):
        raise UserError(f"In step {run.state.step - 1} gradients have norms from {min(norms):.7g} "
                        f"to {max(norms):.7g}: processes changed them differently, and would train "
                        "different models. What is added to gradients must be the same on "
                        "all; parameters without a gradient, as of an idle expert, need zeros.")
    return sum(losses) / len(losses), norms[0], max(signals) > 0

def check_step(run, loss, norm):  # whether the run still learns
    scaler = run.state.scaler  # in float16 an infinite norm only skips a step, until its scale is 0
    norm_is_fine = math.isfinite(norm) or (scaler.is_enabled() and scaler.get_scale() > 0)
    if math.isfinite(loss) and abs(loss) < 1e4 and norm_is_fine:
        return
    failure = (
        f"Step {run.state.step - 1} has loss {loss:g} and gradient norm {norm:g}. Most often "
        "--max_lr is too high; it may also be the data (ids beyond the vocabulary, zeros), float16,"
        " an edit, or cuDNN's attention, which TORCH_CUDNN_SDPA_DEPRIORITIZED=1 avoids. To go on "
        f"from before it: --init_from={run.cfg.log_dir}/checkpoint_....pt, another --log_dir.")
    run.folder.write_run({"failed": failure})
    raise UserError(failure)

def report_step(run, loss, norm):
    cfg, step, seconds = run.cfg, run.state.step - 1, run.step_seconds[-1]
    report(run, step, "train", loss)
    if not cfg.print_every or step % cfg.print_every:
        run.unsaid.clear()
        return
    rate = (rows_before(cfg, step + 1) - rows_before(cfg, step)) * cfg.T / seconds
    more = f" lr {get_lr(step, cfg):.2e} norm {norm:.2f} {seconds * 1e3:.0f} ms {rate:,.0f} tok/s"
    # by the median, since a step may have waited for another program
    left = statistics.median(run.step_seconds) * (cfg.max_steps - step - 1)
    print_line(run, step, f"{more} {datetime.timedelta(seconds=round(left))} left")

def validate(run):  # returns the loss
    loss = validation_loss(run, run.val_loader)
    report(run, run.state.step, "val", loss)
    run.unsaid[-1] += f" ({loss * run.tokens_per_byte / math.log(2):.4f} bits per byte)"
    report(run, run.state.step, "minutes", run.state.minutes)
    run.validated_step = run.state.step
    return loss

@torch.no_grad()
def warn_of_other_loss(run):  # if "val" is not the cross-entropy
    x, y = run.val_loader.batch(0, 1, run.device)
    with run.autocast(), torch.compiler.set_stance("force_eager"):  # not to compile for one row
        logits, loss = run.state.eval_model(x, y)
    more = (loss - F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())).item()
    if abs(more) > 1e-4 * max(1.0, loss.item()):
        print0(f"!!! val is not the cross-entropy of the logits: on one row it is {more:+.6f} "
               "apart. A term that only training minimises belongs under `if self.training`.")

def draw_curves(folder):
    """curves.png of log.txt against tokens: losses in one panel, each other stream in its own."""
    from matplotlib.figure import Figure  # not pyplot, which wants a display
    cfg = Config(**read_run(folder)["constants"])
    streams, panels = read_streams(folder), defaultdict(list)
    streams.pop("minutes", None)
    for name in streams:
        panels["loss, nats per token" if name in ("train", "val") else name].append(name)
    figure = Figure(figsize=(6.5, 3.7 * len(panels)), layout="constrained")
    for i, (title, names) in enumerate(panels.items()):
        axis = figure.add_subplot(len(panels), 1, i + 1)
        for name in names:
            n = 1 + len(streams[name]) // 200  # smoothed: each point is the mean of n
            points = [(rows_before(cfg, step) * cfg.T / 1e6, value)
                      for step, value in streams[name][:len(streams[name]) // n * n]]
            tokens, values = np.reshape(points, (-1, n, 2)).mean(axis=1).T
            axis.plot(tokens, values, label=f"{name}, now {values[-1]:.3f}")
            if name == "train":  # cuts the high first steps off
                axis.set_ylim(top=1.05 * np.percentile(values, 95))
        axis.set(xlabel="million tokens", ylabel=title)
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
    write_whole(Path(folder, "curves.png"), lambda file: figure.savefig(file, dpi=120))

# All but cuDNN's attention, which plans up to half a second for each new length of a sample
@sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
def sample_text(model, encoding, cfg, seed):
    """sample_prompt and how the model continues it, up to where it ends the text."""
    device = next(model.parameters()).device
    prompt = encoding.encode_ordinary(cfg.sample_prompt) or [encoding.eot_token]
    tokens = model.generate(
        torch.tensor([prompt], device=device), cfg.sample_tokens, temperature=cfg.temperature,
        top_k=cfg.top_k, generator=torch.Generator(device).manual_seed(seed))[0].tolist()
    if encoding.eot_token in tokens[len(prompt):]:
        tokens = tokens[:tokens.index(encoding.eot_token, len(prompt))]
    return encoding.decode_bytes(tokens).decode("utf-8", errors="backslashreplace")

def print_sample(run):
    if rank() == 0:
        cfg, state = run.cfg, run.state
        with run.autocast():
            text = sample_text(state.eval_model, run.encoding, cfg, seed=cfg.seed + state.step)
        print0(f"--- sample at step {state.step} ---\n{text}\n---")

def sample_only(cfg, device):
    """--sample=N: print N samples of the weights in log_dir, or of init_from's."""
    name = best_checkpoint(cfg.log_dir) if cfg.init_from == "scratch" else cfg.init_from
    if name is None:
        raise UserError(f"log_dir={cfg.log_dir} holds no weights: train, or take --init_from.")
    model, encoding = load_weights(str(name), **model_constants(cfg))
    encoding = encoding or get_encoding(cfg.encoding)
    print0(f"Samples of {name}:")
    for i in range(cfg.sample):
        print0(sample_text(model.to(device), encoding, cfg, seed=cfg.seed + i) + "\n---")

def hellaswag_questions(cfg, model, encoding):
    if cfg.hellaswag_every:
        import hellaswag
        return hellaswag.prepare_for_training(model, encoding.encode_ordinary)

def hellaswag_score(run):  # acc_norm
    import hellaswag
    with run.autocast():
        return hellaswag.evaluate(run.state.eval_model, run.hellaswag).acc_norm

# ---- the end of a run: its last step saved, its best weights exported, its result
def finish(run):
    """End the run: save it and, unless a signal came, leave its best weights in log_dir/hf."""
    cfg, step = run.cfg, run.state.step
    left_early = step < cfg.max_steps and not run.stopping  # by a break that you added to train()
    if left_early and run.validated_step != step:
        validate(run)
        print_line(run, step)
    run.folder.save(run.state)
    if rank() == 0 and not run.folder.wait_until_saved(step):
        raise UserError(f"Step {step} is not saved ({run.folder.failure}): make room, and the same "
                        "command continues.")
    if run.stopping:
        print0(f"Stopped by a signal after {step} steps; the same command continues there.")
    elif rank() == 0:
        export(run)
        if left_early:
            print0(f"Left after {step} of {cfg.max_steps} steps; the same command continues there.")
        elif cfg.max_steps:
            print0(f"Done. Samples: python train_gpt2.py --sample=3 --log_dir={cfg.log_dir}\n"
                   "To train on: a larger --max_steps.")
        show_result(run)

def show_result(run):
    """Print the result, with each stream's last value, and keep it in run.json."""
    cfg, state, streams = run.cfg, run.state, read_streams(run.folder.path)
    result = {stream: points[-1][1] for stream, points in streams.items()}
    if "val" in result:
        bits = result["val"] * run.tokens_per_byte / math.log(2)
        step, loss = min(streams["val"], key=lambda point: point[1])
        result |= {"bits_per_byte": round(bits, 6), "lowest_val": loss, "lowest_step": step}
    result |= {"steps": state.step, "tokens": rows_before(cfg, state.step) * cfg.T,
               "parameters": sum(p.numel() for p in state.raw_model.parameters())}
    if run.step_seconds:
        tokens = result["tokens"] - rows_before(cfg, state.step - 1) * cfg.T  # of the last step
        result["tokens_per_second"] = round(tokens / statistics.median(run.step_seconds))
    if run.device.type == "cuda":
        result["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    run.folder.write_run(result)
    print0("\n".join(f"{name:17} {value}" for name, value in result.items()))

def export(run):
    """Leave the best weights in log_dir/hf; a model that is no GPT-2 any more only gets a line."""
    path = run.folder.path
    try:
        model, best = run.state.eval_model, best_checkpoint(path)
        if best:  # None if nothing is saved: a new model with max_steps=0
            model, _ = load_weights(str(best), **model_constants(run.cfg))
        save_hugging_face(model, path / "hf", run.encoding)
        print0(f"exported {best or 'the model'} to {path / 'hf'}/, for transformers, hellaswag.py")
    except Exception as e:  # transformers may be missing, too
        print0(f"Not exported: {first_line(e)}.")

# ---- Hugging Face: weights come from its GPT-2 and go to it if it computes what ours does
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # (in, out) there, (out, in) here

@lru_cache(maxsize=1)  # settings and model ask for the same
def read_weights(name):
    """({constant of GPTConfig: value}, the encoding's name or None, a state_dict) of a .pt file, a
    run's folder, a Hugging Face folder, or a name on the hub. Raises UserError."""
    if name.endswith(".pt") or find_checkpoints(name):
        path = name if name.endswith(".pt") else best_checkpoint(name)
        content = read_checkpoint(path)
        if is_of_other_code(content):
            print0(f"!!! {path} was written by other code.")
        config, encoding, weights = content["gpt_config"], content["encoding"], content["model"]
    else:
        raw_model = load_hugging_face(name)
        config, weights = asdict(raw_model.config), raw_model.state_dict()
        encoding = {257: "bytes", 50257: "gpt2"}.get(config["n_vocab"])
    config.pop("dropout", None)  # of a training, not of weights
    return config, encoding, weights

def load_weights(name, **constants):
    """(GPT, its encoding) of what read_weights() reads; constants: what it lacks, as dropout."""
    config, encoding, weights = read_weights(name)
    raw_model = GPT(GPTConfig(**constants | config))
    own = raw_model.state_dict()
    if missing := own.keys() - weights.keys():
        print0(f"!!! {name} lacks {min(missing)}: {len(missing)} tensor(s) begin as in the code.")
    try:
        raw_model.load_state_dict(own | weights)
    except RuntimeError as e:  # other names, other shapes
        raise UserError(f"{name} does not fit train_gpt2.py ({first_line(e)}).") from None
    return raw_model, get_encoding(encoding) if encoding else None

@torch.no_grad()
def check_same_function(ours, hf, end_of_text):  # on the CPU; ValueError if logits differ
    c = ours.config
    idx = torch.randint(c.n_vocab, (1, c.block_size), generator=torch.Generator().manual_seed(0))
    idx[0, c.block_size // 2] = end_of_text  # a model edited to mask across texts then differs
    theirs = hf.float().eval()(idx).logits
    differences = (ours(idx)[0] - theirs).norm(dim=-1) / theirs.norm(dim=-1)  # (1, T)
    if not differences.max() < 1e-3:  # NaN, too
        raise ValueError(f"logits differ by {differences.max():.1%}")

def load_hugging_face(name):
    """The GPT in a folder or repository of transformers."""
    try:
        import transformers
        transformers.logging.disable_progress_bar()
        hf, info = transformers.GPT2LMHeadModel.from_pretrained(name, output_loading_info=True)
        c = hf.config
        raw_model = GPT(GPTConfig(
            block_size=c.n_positions, vocab_size=padded(c.vocab_size), n_layer=c.n_layer,
            n_head=c.n_head, n_embd=c.n_embd, n_vocab=c.vocab_size))
        source, target = hf.state_dict(), raw_model.state_dict()
        if unmatched := sorted([*info["missing_keys"], *source.keys() - target.keys()]):
            raise ValueError(f"{unmatched[0]} is not in both models")
        for key, weight in source.items():
            weight = weight.t() if key.endswith(TRANSPOSED) else weight
            target[key][:len(weight)] = weight  # written into raw_model; its embedding is longer
        check_same_function(raw_model, hf, end_of_text=c.vocab_size - 1)
    except Exception as e:  # files and networks may raise anything
        raise UserError(f"init_from={name} is no .pt file, no run's folder, and cannot be loaded as "
                        f"a GPT-2 of Hugging Face, as gpt2 is ({first_line(e)}).") from None
    return raw_model

def save_hugging_face(raw_model, folder, encoding=None):
    """Write a folder that transformers loads, if it computes the same; with its tokenizer."""
    import transformers
    c = raw_model.config
    end = encoding.eot_token if encoding else c.n_vocab - 1
    hf = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=c.n_vocab, n_positions=c.block_size, n_layer=c.n_layer, n_head=c.n_head,
        n_embd=c.n_embd, bos_token_id=end, eos_token_id=end, pad_token_id=end,
        n_ctx=c.block_size))  # which llama.cpp's converter asks for
    hf.generation_config.max_length = c.block_size  # or a pipeline goes beyond it
    ours, weights = GPT(c), {}  # on the CPU, and not compiled
    ours.load_state_dict(raw_model.state_dict())
    for key, weight in ours.state_dict().items():
        if key in ("transformer.wte.weight", "lm_head.weight"):
            weight = weight[:c.n_vocab]
        weights[key] = weight.t() if key.endswith(TRANSPOSED) else weight
    try:
        hf.load_state_dict(weights)
        check_same_function(ours, hf, end)
        tokenizer = encoding and hugging_face_tokenizer(encoding, c.block_size)
    except (RuntimeError, ValueError) as e:
        raise UserError(f"transformers would compute something else ({first_line(e)})") from None
    transformers.logging.disable_progress_bar()
    hf.save_pretrained(folder, max_shard_size="50GB")  # in one file
    if encoding:
        tokenizer.save_pretrained(folder)

if __name__ == "__main__":
    main()
