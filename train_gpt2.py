"""Train GPT-2 from scratch, on a CPU or on many GPUs.

    python train_gpt2.py    # if no shards exist: train a small GPT on input.txt
    python fineweb.py       # write shards of FineWeb-Edu to edu_fineweb10B/
    torchrun --standalone --nproc_per_node=8 train_gpt2.py    # GPT-2 (124M)
    tail -f log/log.txt      # lines of the form "<step> <metric> <value>"

To change a setting, edit the constants in Config, or give a flag
(--max_lr=1e-3). Training on a text file uses the constants in SMALL or, with
existing weights (init_from), those in FINETUNE. Ctrl-C saves the run and stops
it. To resume the run, repeat the command.

One idea keeps the script simple: the data of a step is a pure function of
(seed, step). A run can therefore be resumed simply by continuing with the next
step, and the micro-batch size B and the number of GPUs affect only speed and
memory.
(Rounding errors depend on both. If dropout is above 0, the dropout masks depend
on B.)

Part one, up to the end of train(), is the code to read and change. Part two
sets up a run, and contains what long runs need in practice. The mark "Hint:"
stands before advice on a common change, and the mark "Only for edits:" before
an explanation that matters only in an edited copy of this file.
"""
import ast
import bisect
import contextlib
import copy
import ctypes
import datetime
import gc
import importlib.util
import inspect
import itertools
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
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

# Limit how long an idle OpenMP thread spins before it yields its core. This must be set before
# torch is imported. With two other busy processes running, a training step with the preset SMALL
# takes 166 ms with this limit and 739 to 873 ms without it. On an idle machine the limit makes no
# difference (tests/measured/step_cpu.txt).
os.environ["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", "10000")

import numpy as np  # noqa: E402
import tiktoken  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn as nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402

# fineweb.py tokenizes FineWeb-Edu. It also contains the helpers that all three scripts share
from fineweb import (  # noqa: E402
    UserError, encoding_arguments, get_encoding, hugging_face_tokenizer, lock_folder,
    make_config, parse_flags, remove_unfinished, summary_of, token_dtype, write_whole)

# ---- Constants. --help prints the comment at the end of each line
@dataclass(frozen=True)
class Config:
    """The full GPT-2 (124M) run with GPT-3's hyperparameters (Brown et al. 2020, table 2.1).

    If edu_fineweb10B contains no shards, and no other `data` is chosen, input.txt is used.
    """
    data: str = "edu_fineweb10B"    # folder of .npy token shards, or a UTF-8 text file
    encoding: str = "gpt2"          # name of a tiktoken encoding, or bytes (needs no download)
    shuffle: bool = True            # read training data in a random order, a new one in each epoch
    seed: int = 1337                # determines the initial weights, data order and samples
    # The batch: total_batch_size affects training. B affects only memory and speed, and is lowered
    # if it does not divide the number of rows that each process reads per step
    total_batch_size: int = 524288  # tokens per optimizer step, a multiple of T * processes
    B: int = 64                     # micro-batch size: rows per forward pass
    T: int = 1024                   # tokens per row (the context length)
    # The model: n_layer/n_head/n_embd is 12/12/768 for 124M, 24/16/1024 for 350M, 36/20/1280 for
    # 774M and 48/25/1600 for 1.5B
    n_layer: int = 12               # number of blocks
    n_head: int = 12                # attention heads per block
    n_embd: int = 768               # width of the model, a multiple of n_head
    dropout: float = 0.0            # fraction of activations set to 0 in training; GPT-2 used 0.1
    init_from: str = "scratch"      # scratch, gpt2 ... gpt2-xl, a folder (of a run or model), a .pt
    # The optimizer. GPT-3's max_lr is 6e-4 for 125M, 3e-4 for 350M, 2.5e-4 for 760M, 2e-4 for 1.3B
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: AdamW and, for matrices in blocks, Muon
    max_lr: float = 6e-4            # peak learning rate (0.1 / n_embd with the preset FINETUNE)
    muon_lr_ratio: float = 1.0      # Muon's learning rate divided by AdamW's
    min_lr: float = 6e-5            # learning rate at max_steps
    lr_shape: Literal["cosine", "linear"] = "cosine"  # shape of the decay from max_lr to min_lr
    warmup_steps: int = 715         # steps of linear warmup (375 M tokens, as in GPT-3)
    max_steps: int = 19073          # optimizer steps (10 B tokens); 0 = only evaluate and sample
    epochs: float = 0.0             # passes over the data; if above 0, they determine max_steps
    minutes: float = 0.0            # training time; if above 0, 20 trial steps determine max_steps
    weight_decay: float = 0.1       # weight decay of matrices and embeddings
    grad_clip: float = 1.0          # clip the gradient norm to this; 0 = no clipping
    # Monitoring. For the settings that end in _every, 0 means never
    print_every: int = 1            # steps between lines on stdout; log.txt has every step
    eval_every: int = 250           # steps between validations
    val_tokens: int = 10485760      # tokens per validation; each validation reads the same ones
    hellaswag_every: int = 250      # steps between evaluations on HellaSwag
    sample_every: int = 1000        # steps between samples; one GPU samples while the others wait
    sample_prompt: str = "Hello, I'm a language model,"  # prompt for the samples
    sample_tokens: int = 64         # number of tokens per sample, not counting the prompt
    temperature: float = 1.0        # higher is more random; 0 always takes the most likely token
    top_k: int = 50                 # sample from the k most likely tokens; 0 = from all
    sample: int = 0                 # print this many samples instead of training
    log_dir: str = "log"            # folder of the run: log, checkpoints, curves, export
    save_every: int = 250           # steps between checkpoints (the 2 newest and the best are kept)
    keep_every: int = 5000          # steps between checkpoints that are never deleted
    # The machine
    device: str = "auto"            # auto (CUDA, else MPS, else CPU), cuda, cuda:1, mps or cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # matrix multiplication dtype
    compile: Literal["auto", True, False] = "auto"  # use torch.compile; auto: on CUDA only

# For training on a text file: a small byte-level GPT, sized for two CPU cores
SMALL = dict(
    encoding="bytes", total_batch_size=2048, B=32, T=64, n_layer=3, n_head=4, n_embd=128,
    optimizer="muon", max_lr=7e-3, muon_lr_ratio=2.0, min_lr=0.0, lr_shape="linear",
    warmup_steps=20, max_steps=1600, weight_decay=0.2, print_every=10, eval_every=400,
    val_tokens=131072, hellaswag_every=0, sample_every=800, sample_prompt="\n\n",
    sample_tokens=300, log_dir="log_small", compile=False)

# For fine-tuning pretrained weights (init_from) on a text file. The weights determine the model's
# shape and the encoding. FINETUNE has no max_lr and no T, since good values depend on the model:
# max_lr is 0.1 / n_embd, and T is as long as the model allows, up to 1024. If you add max_lr or T
# here, your value is used instead. (With T=1024, a step has only two rows, so B is lowered to 2)
FINETUNE = dict(
    total_batch_size=2048, B=4, min_lr=0.0, lr_shape="linear", warmup_steps=10, epochs=4.0,
    eval_every=10, val_tokens=131072, hellaswag_every=0, sample_every=50, sample_prompt="\n",
    sample_tokens=100, save_every=10, keep_every=0, log_dir="log_finetune")

# ---- Initial weights. The initial values of a weight depend only on the seed and on its name (for
# example transformer.h.0.mlp.c_fc.weight), so adding a layer does not change the initial weights of
# the other layers. But a layer does not know its full name while it is being built. Therefore
# draw_later() stores the std of a layer's weight. When GPT.__init__ has built all layers,
# init_weights() draws the weights
#
# Only for edits: draw_later() also sets all elements of a weight to a mark, a large number that is
# different for each weight. init_weights() draws only elements that still have this value. So if
# you set some of them to 0, for example, before they are drawn, they remain 0. And if you multiply
# an undrawn weight, or copy it to another one, check_parameters() finds values that are far too
# large, and reports this
LOWEST_MARK = 2**17  # check_parameters() looks for numbers of about this size
MARKS = itertools.count(LOWEST_MARK)

def draw_later(layer, std=0.02):
    """Let init_weights() draw a layer's weight from Normal(0, std). Return the layer.

    Its bias is set to 0.
    """
    layer.weight.init_std, layer.weight.mark = std, next(MARKS)
    nn.init.constant_(layer.weight, layer.weight.mark)
    if getattr(layer, "bias", None) is not None:
        nn.init.zeros_(layer.bias)
    return layer

@torch.no_grad()
def init_weights(model, seed):
    """Draw the weights of all layers to which draw_later() was applied.

    The random numbers depend only on the seed and on the names of the weights.
    """
    for name, p in model.named_parameters():
        if hasattr(p, "init_std"):
            generator = torch.Generator().manual_seed(seed_from(seed, name))
            drawn = torch.empty(p.shape, device="cpu").normal_(std=p.init_std, generator=generator)
            p.copy_(torch.where(p == p.mark, drawn.to(p.device), p))

def seed_from(*key):
    """Return a seed that is derived from numbers and strings, as in seed_from(seed, name)."""
    numbers = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in key]
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])

# ---- GPT-2
@dataclass
class GPTConfig:
    """The constants of a model, with GPT-2's as defaults.

    For a new model, block_size is T in Config, n_vocab comes from the encoding, and all other
    constants have the values in Config. If training starts from existing weights, the weights
    determine all constants except dropout.
    """
    block_size: int = 1024  # longest context, in tokens
    n_vocab: int = 50257    # number of token ids
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0    # active in training mode, which only train_step() switches on

    @property
    def residual_std(self):
        """Initial std of the 2 * n_layer projections that add to the residual stream.

        It is smaller than for other weights, so that the variance of the stream does not grow with
        the number of layers (Radford et al. 2019, section 2.3).
        """
        return 0.02 / math.sqrt(2 * self.n_layer)

def padded(n_vocab):
    """Return the number of rows of the embedding and of the output layer.

    It is n_vocab rounded up to a multiple of 128 (50304 for GPT-2), because GPUs are faster with
    such sizes. The additional rows belong to no token. They are never used or predicted.
    """
    return math.ceil(n_vocab / 128) * 128

Norm = nn.LayerNorm  # the class of all norms in the model: edit this line to try a different one

class CausalSelfAttention(nn.Module):
    """Multi-head attention in which each token attends to itself and to earlier tokens."""
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = draw_later(nn.Linear(config.n_embd, 3 * config.n_embd))  # query, key, value
        self.c_proj = draw_later(nn.Linear(config.n_embd, config.n_embd), config.residual_std)
        # forward() only reads the probability of this module, self.dropout.p. (Only for edits: it
        # is a module, so that code which sets p of all nn.Dropout modules also changes this p)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, head_dim)
        dropout = self.dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))  # concatenate the heads

class MLP(nn.Module):
    """The part of a block that processes each token independently.

    It widens the token's vector fourfold, applies GELU, and narrows the vector again.
    """
    def __init__(self, config):
        super().__init__()
        self.c_fc = draw_later(nn.Linear(config.n_embd, 4 * config.n_embd))
        self.gelu = nn.GELU(approximate="tanh")  # the approximation that GPT-2 was trained with
        self.c_proj = draw_later(nn.Linear(4 * config.n_embd, config.n_embd), config.residual_std)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))

class Block(nn.Module):
    """Attention, through which tokens exchange information, and then the MLP. Both add to x."""
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
    """GPT-2 (Radford et al. 2019, section 2.3).

    Parameters have the same names as in Hugging Face's GPT-2, where some matrices are transposed.

    seed: determines the initial weights. The default is the last seed given to torch.manual_seed().
    """
    def __init__(self, config, seed=None):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=draw_later(nn.Embedding(padded(config.n_vocab), config.n_embd)),
            wpe=draw_later(nn.Embedding(config.block_size, config.n_embd)),
            h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            ln_f=Norm(config.n_embd)))
        self.dropout = nn.Dropout(config.dropout)
        # The output layer shares the matrix of the input embedding, since similar tokens should
        # have similar vectors in both (Press and Wolf 2017). This saves 39 M parameters. To untie
        # the two, wrap this nn.Linear in draw_later(), and remove the line below it
        self.lm_head = nn.Linear(config.n_embd, padded(config.n_vocab), bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        init_weights(self, torch.initial_seed() if seed is None else seed)
        # Set the padding rows to 0. They get no gradient, because forward() masks their logits
        with torch.no_grad():
            self.transformer.wte.weight[config.n_vocab:] = 0
        self.eval()  # only train_step() switches to training mode

    def forward(self, idx, targets=None, return_logits=True):
        """Return the logits (B, T, n_vocab) of token ids idx (B, T), and the loss.

        The loss is the mean cross-entropy against targets (B, T), in nats per token. It is None if
        there are no targets. Targets of -100 are ignored. Validation also uses this loss, so put a
        term that only training should minimize (for example a z-loss) under `if self.training`.

        With return_logits=False, None is returned instead of the logits. A training step uses this
        option because torch.compile would otherwise allocate a gradient for the returned logits,
        13 GB at B=64.
        """
        positions = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)  # (B, T, C)
        if torch.is_autocast_enabled(x.device.type):
            # The embeddings are float32. Casting x to 16 bits halves the memory traffic
            x = x.to(torch.get_autocast_dtype(x.device.type))
        x = self.dropout(x)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        logits = self.lm_head(x)  # (B, T, padded(n_vocab))
        # Hint: if you change the logits, for example cap them, do it here.

        # The padding columns belong to no token. Mask them, so that their probability is 0 in the
        # loss. They are removed below, after the loss, because removing them here would make a
        # compiled step on an H100 5% slower. (Masking after float() would need 6 GiB more at B=64)
        padding = torch.arange(logits.size(-1), device=x.device) >= self.config.n_vocab
        logits = logits.masked_fill(padding, -math.inf).float()
        loss = None
        # Hint: if a loss uses the logits of all token ids, for example with label smoothing,
        # compute it from logits[..., :self.config.n_vocab]. With the padding, it would be infinite
        if targets is not None:
            total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            loss = total / (targets != -100).sum().clamp(min=1)  # 0 if all targets are ignored
        logits = logits[..., :self.config.n_vocab]  # remove the padding
        return (logits if return_logits else None), loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Append sampled tokens to the token ids idx (B, T). Return (B, T + max_new_tokens).

        With temperature 0, take the most likely token. With top_k=k, sample from the k most likely
        tokens.
        """
        if temperature == 0:
            temperature, top_k = 1.0, 1
        for _ in range(max_new_tokens):
            context = idx[:, -self.config.block_size:]
            # After model.compile(), self(context) runs compiled code. Run it eagerly here, because
            # otherwise it would be compiled again for each new length
            with torch.compiler.set_stance("force_eager"):
                logits = self(context)[0][:, -1]  # (B, n_vocab)
            if top_k:
                kth_best = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < kth_best, -math.inf)
            probs = (logits / temperature).softmax(-1)
            token = torch.multinomial(probs, 1, generator=generator)      # (B, 1)
            idx = torch.cat((idx, token), dim=1)
        return idx

    @classmethod
    def from_pretrained(cls, source, **constants):
        """Return a GPT with the weights in `source`.

        source: gpt2 ... gpt2-xl, a Hugging Face folder, a run's folder, a .pt file, or a Weights
        object (read_weights() in part two returns one).

        constants: constants of GPTConfig that replace those stored with the weights. The dropout
        with which the weights were trained is not kept: give dropout=0.1, for example.

        A parameter of the model keeps its initial value if there is no weight with its name. Raise
        UserError if the weights cannot be read, or if there is a weight for which the model has no
        parameter with the same name and shape.
        """
        return load_pretrained(cls, source, constants)  # in part two

# ---- The model to train
def build_model(cfg, gpt_config):
    """Return the GPT of a run, with initial weights. cfg: the Config of the run.

    If the model should have other weights, for example pretrained ones or those of a checkpoint,
    the caller loads them afterwards.

    To freeze parameters, set requires_grad=False before the return statement. A teacher model also
    belongs here: model.teacher = [GPT.from_pretrained("gpt2")]. Keep it in a list, so that PyTorch
    does not treat it as a part of the model, which would train and save the teacher, too. PyTorch
    then does not move it to the GPU either. So call self.teacher[0].to(idx.device) in GPT.forward.
    """
    torch.manual_seed(cfg.seed)  # Only for edits: for layers without draw_later()
    model = GPT(gpt_config, cfg.seed)
    return model

# ---- Data
class DataLoaderLite:
    """Cuts shards into rows, and returns any row by its number in the order of training.

    A row has T + 1 tokens. The model reads the first T tokens and predicts the last T. The rows of
    a shard begin at its tokens 0, T, 2 T and so on, so the last token of a row is also the first
    token of the next one. With `recut`, which is used for text files if they are shuffled, each
    epoch has a shift of 0 to T - 1 tokens, and rows begin that much earlier. (The first row of a
    shard still begins at token 0, and overlaps the second one.) So even a small text yields new
    rows in each epoch.

    An epoch reads each row once, one shard after another. With `shuffle`, both the order of the
    shards and the order of the rows in a shard are random, and are drawn from (seed, epoch). Row
    numbers count the rows that training reads, over all epochs. For example, if the shards have 12
    rows, then epoch 0 reads them as row numbers 0 to 11, and epoch 1 reads the same rows (or, with
    `recut`, shifted ones), in a different order, as row numbers 12 to 23.

    shards: paths of .npy files, or arrays of token ids (N,). An id of n_vocab or more raises
    UserError.
    """
    def __init__(self, shards, T, seed=0, shuffle=False, n_vocab=2**16, recut=False):
        self.shards, self.T, self.n_vocab = shards, T, n_vocab
        self.seed, self.shuffle, self.recut = seed, shuffle, recut
        # The number of tokens in each shard. (tokens_of_shard() maps a file into memory, so this
        # does not read the tokens)
        self.lengths = [len(tokens_of_shard(shard)) for shard in shards]
        self.rows_in_shard = np.array([max(0, length - 1) // T for length in self.lengths])
        self.rows_per_epoch = int(self.rows_in_shard.sum())
        # The index and the token ids of the shard from which the latest row was read. It is kept
        # open, since the next row is most often in the same shard
        self.open_shard, self.open_tokens = None, None

    def locate(self, row):
        """Return the shard (its index) and the token at which a row begins. row: the row number."""
        # The comments at the ends of the lines give an example: row number 765, where T is 8, and
        # shards 0, 1 and 2 have 30, 50 and 40 rows. (order_of(n, shuffle, *key) returns the numbers
        # 0 ... n - 1, shuffled with the random seed `key`. It caches its results)
        epoch, n_read_in_epoch = divmod(row, self.rows_per_epoch)  # 765 = 6 * 120 + 45, so 6 and 45
        shard_order = order_of(len(self.shards), self.shuffle, self.seed, epoch)  # 2, 0, 1 (random)
        ends = self.rows_in_shard[shard_order].cumsum()            # 40, 40 + 30, 40 + 30 + 50
        i = int(ends.searchsorted(n_read_in_epoch, side="right"))  # 1, since 40 <= 45 < 40 + 30
        shard = int(shard_order[i])                                # 0, since the order is 2, 0, 1
        n_rows = int(self.rows_in_shard[shard])                    # 30
        n_read_before_shard = int(ends[i]) - n_rows                # 70 - 30 = 40
        n_read_in_shard = n_read_in_epoch - n_read_before_shard    # 45 - 40 = 5
        # The order in which this epoch reads the 30 rows of shard 0. In the example, its element
        # with index 5 is 17. So the row to read is the one that begins at token 17 * T
        order_in_shard = order_of(n_rows, self.shuffle, self.seed, epoch, shard)
        start = int(order_in_shard[n_read_in_shard]) * self.T      # 17 * 8 = 136
        if self.recut:
            # Begin `shift` tokens earlier. For example, with T = 8 and shift = 3, rows begin at
            # tokens 0 (instead of -3), 5, 13 and so on. The factor 0.618, from the golden ratio,
            # makes the shifts of consecutive epochs very different
            shift = int(0.618 * epoch * self.T) % self.T
            start = max(0, start - shift)
        return shard, start

    def read(self, row, B):
        """Return the token ids of rows `row` to `row + B - 1` as an array (B, T + 1).

        The array is int64, because torch cannot use uint16 numbers as indices.
        """
        tokens = np.empty((B, self.T + 1), dtype=np.int64)
        for b in range(B):
            shard, start = self.locate(row + b)
            if shard != self.open_shard:
                self.open_shard, self.open_tokens = shard, tokens_of_shard(self.shards[shard])
            tokens[b] = self.open_tokens[start:start + self.T + 1]
            if tokens[b].max() >= self.n_vocab:
                raise UserError(f"{self.shards[shard]} contains the id {tokens[b].max()}, but the "
                                f"encoding has only {self.n_vocab} ids. Set --encoding to the "
                                "encoding that the shard was made with.")
        return tokens

    def batch(self, row, B, device=torch.device("cpu")):
        """Return inputs x and targets y (x shifted by one token), both (B, T), on `device`."""
        tokens = torch.from_numpy(self.read(row, B))
        if device.type == "cuda":  # a copy from pinned memory does not block the CPU
            tokens = tokens.pin_memory()
        tokens = tokens.to(device, non_blocking=device.type == "cuda")
        # x and y overlap, so return copies. validation_loss() changes y in place
        return tokens[:, :-1].clone(), tokens[:, 1:].clone()

# order_of() caches the four orders that locate() needs again and again: the order of the shards and
# the order of the rows in the current shard, for the training data and for the validation data. The
# orders of the rows in all shards would need too much memory
@lru_cache(maxsize=4)
def order_of(n, shuffle, *key):
    """Return the numbers 0 ... n - 1 in order or, if `shuffle`, shuffled with `key` as the seed.

    RandomState gives the same result in every version of NumPy.
    """
    return np.random.RandomState(key).permutation(n) if shuffle else np.arange(n)

def rows_before(cfg, step):
    """Return the total number of rows that the steps before `step` have read.

    To let the batch grow during training, edit this function. The script derives the data of each
    step, the tokens per second and the x axis of curves.png from it.
    """
    return step * (cfg.total_batch_size // cfg.T)

def rows_of_step(cfg, step):
    """Return the number of rows that a step reads."""
    return rows_before(cfg, step + 1) - rows_before(cfg, step)

# ---- Learning rate and optimizers
def get_lr(step, cfg):
    """Return the learning rate of a step: linear warmup to max_lr, then decay to min_lr.

    AdamW uses this learning rate. Muon uses muon_lr_ratio times this learning rate.
    """
    if step < cfg.warmup_steps:
        return cfg.max_lr * (step + 1) / cfg.warmup_steps
    progress = min(1.0, (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps))
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
        # torch.baddbmm(L, M, N, beta=p, alpha=q) returns p L + q M N
        A = X @ X.mT                                    # (n, rows, rows)
        P = torch.baddbmm(A, A, A, beta=b, alpha=c)     # b A + c A^2
        X = torch.baddbmm(X, P, X, beta=a)              # a X + P X
    return X

class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum for matrices (Jordan et al. 2024).

    A few directions dominate the gradient of a matrix. Muon gives all directions about the same
    magnitude, so that the model also learns from weak ones. The factor 0.2 sqrt(longer side) makes
    its updates as large as those of AdamW, so learning rates that suit AdamW also suit Muon, or
    are at least of the right order of magnitude (Liu et al. 2025, section 2.2).

    params: pairs (name, matrix). torch.optim.Optimizer stores the names in "param_names".
    dtype: the dtype in which newton_schulz() computes.
    """
    def __init__(self, params, lr, weight_decay=0.0, momentum=0.95, dtype=torch.float32):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))
        self.dtype = dtype

    def nesterov_momentum(self, p, momentum):
        """Update the running average of p's gradient, and look one step ahead.

        Return the value that the average would have if the next gradient were the same.
        """
        if "momentum_buffer" not in self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        average = self.state[p]["momentum_buffer"]
        # a.lerp(b, w) is (1 - w) * a + w * b
        average.lerp_(p.grad, 1 - momentum)     # momentum * average + (1 - momentum) * p.grad
        ahead = p.grad.lerp(average, momentum)  # (1 - momentum) * p.grad + momentum * average
        return ahead.to(self.dtype)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            by_shape = defaultdict(list)  # one batch per shape: fewer, larger operations
            for name, p in zip(group["param_names"], group["params"]):
                if p.grad is None:  # not used in this step
                    continue
                ahead = self.nesterov_momentum(p, group["momentum"])
                # c_attn stacks three matrices, for query, key and value. (Only for edits: a c_attn
                # with a different shape is treated as one matrix)
                n = 3 if "c_attn" in name and p.size(0) == 3 * p.size(1) else 1
                for weight, G in zip(p.chunk(n), ahead.chunk(n)):
                    if G.size(0) > G.size(1):  # wide matrices are cheaper, so transpose tall ones
                        weight, G = weight.mT, G.mT
                    by_shape[G.shape].append((weight, G))
            for shape, batch in by_shape.items():
                longer_side = shape[1]  # now all matrices are wide or square
                weights, matrices = zip(*batch)
                # Each weight is a view of p, so changing it in place changes p
                for weight, update in zip(weights, newton_schulz(torch.stack(matrices))):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(longer_side))

def configure_optimizers(raw_model, cfg, muon_dtype=torch.float32):
    """Return [AdamW] or, with optimizer="muon", [AdamW, Muon].

    Muon updates the matrices in the blocks, and AdamW all other parameters.

    raw_model: the GPT, without the DDP wrapper. muon_dtype: the dtype in which Muon orthogonalizes.
    """
    for_muon = []
    if cfg.optimizer == "muon":
        in_blocks = raw_model.transformer.h.named_parameters()
        for_muon = [(name, p) for name, p in in_blocks if p.dim() == 2 and p.requires_grad]
    taken = {p for _, p in for_muon}
    others = [p for p in raw_model.parameters() if p.requires_grad and p not in taken]
    groups = [dict(params=[p for p in others if p.dim() >= 2], weight_decay=cfg.weight_decay),
              # No decay for biases and gains: pulling them to 0 would only distort the model
              dict(params=[p for p in others if p.dim() < 2], weight_decay=0.0)]
    # betas and eps are as in GPT-3 (Brown et al. 2020, appendix B). With fused=True, one kernel
    # updates all parameters
    optimizers = [
        torch.optim.AdamW(groups, lr=cfg.max_lr, betas=(0.9, 0.95), eps=1e-8, fused=True)]
    if for_muon:
        optimizers.append(Muon(for_muon, lr=cfg.max_lr * cfg.muon_lr_ratio,
                               weight_decay=cfg.weight_decay, dtype=muon_dtype))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]  # step_optimizers() computes the lr of a step from it
    return optimizers

# ---- Training
@dataclass
class State:
    """The part of a run that a checkpoint saves, and that is restored when the run is resumed.

    Everything that later steps depend on, apart from constants and data, must be an attribute of
    this class. Hint: add your own attributes here, either as fields, like `tokens` below, or
    in a method __post_init__(). For example, this adds an average of the weights, which
    train_step() then has to update:

        def __post_init__(self):
            self.average = torch.optim.swa_utils.AveragedModel(self.raw_model)

    In a new run, __post_init__() is called after the initial weights have been drawn or the
    pretrained ones have been loaded. In a resumed run, it is also called, but afterwards all
    weights and all attributes, such as `average`, are replaced with those in the checkpoint.

    An attribute may be a number, a string, a tensor, a list or dict of these, an object with
    state_dict() and load_state_dict(), or a list of such objects. Any other type causes an error
    before the first step.

    raw_model is the GPT without the DDP wrapper. With torch.compile, build_run() compiles it in
    place: it remains the same object, and raw_model(idx) runs the compiled code.
    """
    raw_model: nn.Module
    optimizers: list
    scaler: torch.amp.GradScaler  # keeps float16 gradients in range; disabled for other dtypes
    step: int = 0                 # number of steps taken
    # Training time in minutes. The first step after the script was started or restarted does not
    # count, since the model may be compiled in it
    minutes_trained: float = 0.0
    tokens: int = 0               # number of tokens that the model has been trained on

    @property
    def eval_model(self):
        """The GPT that is validated and sampled from.

        A checkpoint also contains its weights, for samples, for the export and for --init_from.

        Hint: if an edit averages the weights, return the averaged model here. In the example
        above, this is self.average.module.
        """
        return self.raw_model

    # saved_form_of() and restore_state() in part two define how attributes are saved and restored
    def state_dict(self):
        return {name: saved_form_of(value) for name, value in vars(self).items()}

    def load_state_dict(self, saved):
        restore_state(self, saved)

@dataclass
class Run:
    """The objects that train() and train_step() use.

    Of these objects, only `state` is restored when a run is resumed. The others are built again.
    (With --minutes, trial steps determine max_steps. They use another Run.)
    """
    cfg: Config
    state: State
    device: torch.device
    encoding: tiktoken.Encoding
    ddp_model: nn.Module          # raw_model, wrapped in DDP if there are several processes
    autocast: partial             # returns torch.autocast's context manager for cfg.dtype
    train_loader: DataLoaderLite
    val_loader: DataLoaderLite
    tokens_per_byte: float        # of the validation text; converts nats per token to nats per byte
    hellaswag_data: object        # HellaSwag's questions; None if it is off or not available
    folder: "RunFolder | None"    # writes to log_dir; None in trial steps, which do not use train()
    signal_came: threading.Event = field(default_factory=threading.Event)  # Ctrl-C or SIGTERM
    validated_step: int = -1      # the step of the latest validation
    step_seconds: deque = field(default_factory=lambda: deque(maxlen=50))  # the last 50 durations
    warned_slow: bool = False     # whether warn_of_slow_steps() has printed its line

@torch.no_grad()
def validation_loss(run, loader, model=None):
    """Return the mean loss of eval_model over val_tokens tokens, in nats per token.

    Hint: `loader` may read a second validation set, and `model` may be a different model.

    The losses of all targets are summed over all processes before dividing, so the result does not
    depend on B or on the number of processes.
    """
    cfg, model = run.cfg, model or run.state.eval_model
    n_rows = min(max(1, cfg.val_tokens // cfg.T), loader.rows_per_epoch)
    total, counted = torch.zeros(2, device=run.device)
    for row in range(rank() * cfg.B, n_rows, world_size() * cfg.B):
        x, y = loader.batch(row, cfg.B, run.device)
        if row + cfg.B > n_rows:
            # batch() can always return cfg.B rows, because row numbers continue in the next epoch.
            # Ignore the targets of the surplus rows
            y[n_rows - row:] = -100
        with run.autocast():
            _, loss = model(x, y, return_logits=False)
        total = total + loss * (y != -100).sum()
        counted = counted + (y != -100).sum()
    total, counted = sum_over_ranks(torch.stack((total, counted))).tolist()
    return total / counted

def read_step(run):
    """Return this process's micro-batches of the next step: a list of (row, x, y).

    The rows of a step are dealt out B at a time: to rank 0, rank 1, ..., then to rank 0 again.
    Every micro-batch is full, since B divides the number of rows per process. row is the number of
    a micro-batch's first row, and x and y are (B, T). To mask targets (set them to -100) or to
    change inputs, edit this function.
    """
    cfg, step = run.cfg, run.state.step
    check_B_divides_rows(cfg, step)  # Only for edits: rows_before() may have been edited
    begin, end = rows_before(cfg, step), rows_before(cfg, step + 1)
    first_rows = range(begin + rank() * cfg.B, end, world_size() * cfg.B)
    return [(row, *run.train_loader.batch(row, cfg.B, run.device)) for row in first_rows]

def train_step(run):
    """Take one optimizer step. Return this process's part of the loss, and the gradient's norm.

    The loss of the step is the sum of these parts over all processes. The norm is measured before
    clipping, and is the same in all processes. Both values are tensors on the device, so that
    train() waits for the GPU only once per step. (In float16, this function also waits, since
    GradScaler has to know whether a gradient overflowed.)
    """
    cfg, state, ddp_model = run.cfg, run.state, run.ddp_model
    batches = read_step(run)
    # The number of targets in all processes. It is T * the number of rows. (Only for edits: it is
    # counted here, because read_step() may set some targets to -100, which do not count)
    n_targets = sum_over_ranks(sum((y != -100).sum() for _, _, y in batches))
    part_of_loss = torch.zeros((), device=run.device)  # the sum of `part` below
    ddp_model.train()
    for i, (row, x, y) in enumerate(batches):
        # The dropout mask depends only on the seed and on the number of the first row, so a resumed
        # run repeats it. (With dropout, a different B therefore changes the losses slightly)
        torch.manual_seed(seed_from(cfg.seed, row))
        # DDP averages gradients over the processes during the backward pass. Only the last
        # micro-batch needs that. Before it, gradients accumulate locally. The forward pass must
        # also be inside no_sync(), because DDP prepares the averaging in the forward pass
        only_accumulate = world_size() > 1 and i < len(batches) - 1
        with ddp_model.no_sync() if only_accumulate else contextlib.nullcontext():
            with run.autocast():
                _, loss = ddp_model(x, y, return_logits=False)
            # `loss` is the mean over this micro-batch's targets. The loss of the step, which is the
            # mean over all targets of the step, is a sum with one part for each micro-batch. (All
            # micro-batches have the same number of targets, unless some are masked)
            part = loss * ((y != -100).sum() / n_targets)
            # Gradients of micro-batches are added up, but DDP takes the mean over the processes,
            # not their sum. So multiply by world_size()
            state.scaler.scale(part * world_size()).backward()
        part_of_loss = part_of_loss + part.detach()
        state.tokens += x.numel() * world_size()
    ddp_model.eval()
    for optimizer in state.optimizers:
        state.scaler.unscale_(optimizer)
    # Only for edits: random numbers that are drawn from here on are the same in all processes
    torch.manual_seed(seed_from(cfg.seed, state.step, "update"))
    # Hint: change gradients here. Each p.grad is the exact gradient of the step's loss
    norm = nn.utils.clip_grad_norm_(state.raw_model.parameters(), cfg.grad_clip or math.inf)
    step_optimizers(state, cfg, norm)
    state.step += 1
    return part_of_loss, norm

def step_optimizers(state, cfg, norm):
    """Set the learning rates, update the weights, and clear the gradients."""
    # In float16, a gradient may overflow. Then no optimizer takes a step. (GradScaler.step() would
    # decide this for each optimizer by itself, so AdamW might take a step and Muon might not)
    overflowed = state.scaler.is_enabled() and not norm.isfinite()
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            # get_lr() / max_lr is a curve that rises to 1 and then falls. For AdamW, peak_lr is
            # max_lr, so lr is get_lr(). For Muon, lr is muon_lr_ratio times as high
            group["lr"] = group["peak_lr"] * get_lr(state.step, cfg) / cfg.max_lr
        if not overflowed:
            state.scaler.step(optimizer)
        optimizer.zero_grad()
    state.scaler.update()  # after an overflow, this lowers the loss scale

def due(every, run):
    """Return whether an action with the interval `every` (in steps, 0 = never) is due now.

    It is due at step 0, at each multiple of `every`, and after the last step.
    """
    return every > 0 and (run.state.step % every == 0 or run.state.step == run.cfg.max_steps)

def train(run):
    """Train until max_steps is reached or a signal arrives, and then call finish().

    Before each step, save and evaluate if this is due. Steps are counted from 0, so before step n,
    the model has taken n steps. In the log, `val` of step n is the validation loss of this model,
    and `train` of step n is its loss on the batch of step n.

    A resumed run begins at the step that was saved, and repeats the evaluations that are due then.
    (RunFolder.begin() has removed the lines about this step and later ones from the log.)
    """
    cfg, state = run.cfg, run.state
    stopped = False  # whether a process has received a signal
    while not stopped:
        step = state.step
        if due(cfg.save_every, run) or due(cfg.keep_every, run):
            # Save before evaluating, so that no steps are lost if the evaluation fails. (If this
            # step is already saved, or if it is step 0 of a run from scratch, save() does nothing.
            # Otherwise it also deletes older checkpoints that need not be kept, see
            # RunFolder.prune())
            check_ranks_have_same_weights(run)
            run.folder.save(state)
        if due(cfg.eval_every, run):
            validate(run)
        if due(cfg.hellaswag_every, run) and run.hellaswag_data:
            report(run, step, "hella", hellaswag_score(run), print_always=True)
        if due(cfg.eval_every, run) or due(cfg.hellaswag_every, run):
            run.folder.plot_in_background()
        # Do not sample before the first step, except in a run that only evaluates
        if due(cfg.sample_every, run) and (step > 0 or cfg.max_steps == 0):
            print_sample(run)
        if step >= cfg.max_steps:
            break
        start = time.perf_counter()
        part_of_loss, norm = train_step(run)
        # Each list has one value per process. The CPU waits for the GPU here
        parts, norms, signals = gather_from_ranks(part_of_loss, norm, run.signal_came.is_set())
        record_duration(run, time.perf_counter() - start)
        # train_step() has incremented state.step, so `step` is the step that was just taken.
        # check_step() ends the run if the loss has diverged, or if the norms are not equal
        check_step(run, step, loss=sum(parts), norms=norms)
        report_step(run, step, loss=sum(parts), norm=norms[0])
        stopped = any(signals)
    finish(run, stopped)


# ==== Part two: how a run is set up, and what long runs need in practice
#
# A command starts a new run, resumes the run in log_dir or, with --sample, prints samples. A new
# run and --sample may use the weights of a trained model. A resumed run continues from a
# checkpoint, which contains everything that later steps depend on
#
# How a run starts and ends:
#
#     main() calls run_command(), which calls
#         resolve_config()    sets the constants, and calls
#             find_start()        reads the weights or the checkpoint to start from
#         set_up()            opens the data, and calls
#             determine_max_steps()  with --minutes: takes trial steps with another Run
#             build_run()            builds what train() uses:
#                 build_model()         the model, with initial weights
#                 load_weights()        in a new run with init_from: the pretrained weights
#                 build_state()         the optimizers and State
#                 restore_checkpoint()  in a resumed run: all weights and the rest of State
#         train()             calls finish() at the end
#
# What a resumed run uses:
#
#     constants   those of the command, except that the checkpoint determines the constants of the
#                 model in a run with init_from, and max_steps in a run with `minutes`. If a
#                 constant that affects training differs from before, this is an error, unless it
#                 is max_steps and has grown (check_same_training)
#     data        that of the command. It must be the same as before (check_same_training)
#     code        that of today. A run that has steps left continues with edited code, and warns
#                 about it. A finished run, which is only evaluated again, refuses edited code
#                 (check_code_of_finished_run)
#     State       that of the checkpoint (restore_state). But a hyperparameter that was edited in
#                 the code, for example Muon's momentum (which is not in Config), has its new value
#                 (edited_hyperparameters)
#     log.txt     without the lines about steps that are repeated (truncate_and_open_log)
#
# Two short sections describe checkpoints and trained models. The next sections contain main() and
# the functions that it calls until train() begins. The sections after them contain what these
# functions and train() use: the machine, the data, reading weights, reading checkpoints, the run's
# folder, checks, monitoring and the end of a run

# ---- Checkpoints. A checkpoint is a dict, which is stored as a file in log_dir. checkpoint_of()
# makes it, with these entries:
#
#     state         State.state_dict(), from which a run is resumed
#     eval_model    State.eval_model.state_dict(): the weights for samples, for the export and for
#                   --init_from
#     gpt_config    the GPTConfig of the model, as a dict
#     encoding      the name of the encoding
#     constants     the run's Config, as a dict
#     data          the fingerprint of the training data
#     code          the checksum of the code (see code_checksum)
#
# A tensor that occurs twice, such as a weight that raw_model and eval_model share, is stored once.
# A run is resumed from its newest checkpoint. Samples, the export and --init_from also use the
# newest one, unless the validation loss has risen (see path_of_checkpoint_to_use)

# ---- Trained models, which come from a checkpoint or from Hugging Face (see read_weights)
@dataclass
class ModelSpec:
    """What is known about a trained model, apart from its weights."""
    source: str                # the file, folder or hub name that the model comes from
    # {name: value} of the constants in GPTConfig, without dropout, which belongs to the training
    # and not to the model. (Only for edits: the dict lacks constants that were added to GPTConfig
    # after the model was trained. gpt_config_of_run() then takes them from Config)
    model_constants: dict
    encoding_name: str | None  # None if it is unknown

@dataclass
class Weights:
    """The weights of a trained model."""
    spec: ModelSpec
    tensors: dict              # the state_dict of a GPT
    code: int | None = None    # checksum of the code that wrote them, or None if it is unknown

# ---- The start and the end of the program
def main():
    """Do what the command line asks. On a UserError, print its message and exit with status 1."""
    sys.stdout.reconfigure(errors="backslashreplace")  # samples may contain any character
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process: nothing to save yet
    code_checksum()  # it is computed now and cached, since the file may be edited during the run
    try:
        run_command(parse_flags(Config, __doc__, PRESETS))
        if dist.is_initialized():
            # The DDP model, which uses the process group, was deleted when run_command() returned
            dist.destroy_process_group()
    except Exception as error:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            error = UserError("Out of memory. Choose a smaller --B; it trains the same model.")
        if isinstance(error, UserError):
            print(f"train_gpt2.py: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
        if dist.is_initialized():
            os._exit(1)  # a normal exit would wait for other processes, which may wait for this one
        sys.exit(1)

def run_command(flags):
    """Train, or print samples. flags: {name: text} of the flags that were given."""
    # The device comes first, because it determines how processes communicate
    device = set_up_device(flags.get("device", Config.device))
    if "RANK" in os.environ:
        join_processes(device)
    cfg, start, opening_text = resolve_config(flags, device)
    if cfg.sample:
        sample_only(cfg, start, device)
        return
    print0(opening_text)
    run = set_up(cfg, start, device)
    del start  # the run does not need it any longer, so free its memory
    with contextlib.closing(run.folder):  # however train() ends, a save in progress is finished
        train(run)

# ---- The constants. After resolve_config(), only max_steps can still change: if it depends on
# `epochs` or `minutes`, set_up() computes it from the data or the speed of trial steps
PRESETS = {"SMALL": SMALL, "FINETUNE": FINETUNE}

def resolve_config(flags, device=torch.device("cpu")):
    """Return the Config, the StartingPoint, and the text to print first. flags: {name: text}.

    The value of a constant in Config comes from the last of these sources that has it:

    1. its default in Config;
    2. the preset. FINETUNE contains no max_lr and no T, but gets values that suit the model (see
       with_values_for_finetuning);
    3. the flags;
    4. the model in init_from or, with --sample, the one to sample from, if there is one. It
       determines the encoding and, for example, n_layer. Raise UserError if a flag has a different
       value.

    Finally, B is lowered if it does not divide a process's share of the batch.
    """
    flags = with_implied_flags(flags)
    data, note = choose_data(flags)
    preset_name = choose_preset(data, flags)
    # In a | b, values of b take precedence. Flags are text, which make_config() converts
    given = {"data": data} | PRESETS.get(preset_name, {}) | flags
    cfg = make_config(Config, given)
    start = find_start(cfg, device)
    spec = start.constants_from  # a ModelSpec, or None in a run from scratch
    if preset_name == "FINETUNE":
        cfg = with_values_for_finetuning(cfg, given, spec)
    values = values_from_weights(spec)  # source 4
    check_flags_against_weights(flags, cfg, values, spec)
    cfg = replace(cfg, **values)
    text = note + describe_preset(preset_name, cfg)
    if spec:
        text += "\n" + describe_values(spec.source, values)
    if not cfg.sample:
        check_config(cfg)
        cfg = replace(cfg, B=fitting_B(cfg))
    return cfg, start, text

def with_implied_flags(flags):
    """Return the flags. With --max_steps, add --epochs=0 and --minutes=0, if these are not given.

    Without this, `epochs` in the preset FINETUNE, for example, would override --max_steps.
    """
    if "max_steps" not in flags:
        return flags
    return {"epochs": "0", "minutes": "0"} | flags

def choose_data(flags):
    """Return the path of the training data, and a note to print.

    The note is "", unless input.txt takes the place of shards that do not exist.
    """
    data = flags.get("data", Config.data)
    was_chosen = "data" in flags or data != "edu_fineweb10B"  # by a flag or an edit to Config
    train_shards, _ = find_shards(data)
    if was_chosen or train_shards:
        return data, ""
    return str(Path(__file__).resolve().with_name("input.txt")), (
        "Quick start on Shakespeare, since edu_fineweb10B/ holds no shards.\n"
        "To train GPT-2 (124M), run python fineweb.py, and then this command again.\n\n")

def choose_preset(data, flags):
    """Return the name of the preset.

    It is SMALL for training on a text file, FINETUNE for fine-tuning pretrained weights on a text
    file, and "" for training on shards, which has no preset.
    """
    if not is_text(data):
        return ""
    return "SMALL" if flags.get("init_from", Config.init_from) == "scratch" else "FINETUNE"

# ---- What a command starts from
@dataclass
class StartingPoint:
    """What a command starts from. These attributes are set, and the others are None:

        a new run from scratch        -
        a resumed run from scratch    checkpoint
        a new run with init_from      constants_from and weights
        a resumed run with init_from  constants_from and checkpoint
        --sample                      constants_from and weights
    """
    # The model that determines constants in Config, for example n_layer. (In a run from scratch,
    # you determine them in Config. If you edit one before the run is resumed, check_same_training()
    # reports that it differs from the checkpoint)
    constants_from: ModelSpec | None = None
    weights: Weights | None = None   # to load into the model
    checkpoint: dict | None = None   # to restore State from

def find_start(cfg, device):
    """Return the StartingPoint of a command. Raise UserError if a file cannot be read."""
    if cfg.init_from == "resume":  # nanoGPT's way to resume a run
        raise UserError("init_from=resume is not needed: to resume a run, repeat its command with "
                        "the same --log_dir. Leave out --init_from=resume.")
    if cfg.sample:
        weights = read_weights_to_sample_from(cfg)
        return StartingPoint(weights.spec, weights)
    checkpoint = read_newest_checkpoint(cfg.log_dir, device)  # None in a new run
    if cfg.init_from == "scratch":
        return StartingPoint(checkpoint=checkpoint)
    if checkpoint:
        # init_from may not exist any longer. But the model in the checkpoint has the same constants
        spec = spec_in_checkpoint(checkpoint, cfg.log_dir)
        return StartingPoint(spec, checkpoint=checkpoint)
    weights = read_weights(cfg.init_from)
    return StartingPoint(weights.spec, weights)

def read_weights_to_sample_from(cfg):
    """Return the Weights in init_from or, if this constant is not set, those in log_dir."""
    if cfg.init_from != "scratch":
        return read_weights(cfg.init_from)
    if not find_checkpoints(cfg.log_dir):
        raise UserError(f"log_dir={cfg.log_dir} holds no weights to sample from: train first, or "
                        "set --init_from.")
    return read_weights(cfg.log_dir)

def read_newest_checkpoint(log_dir, device):
    """Return the content of the newest undamaged checkpoint, or None. Rank 0 chooses it."""
    path = path_of_newest_checkpoint(log_dir) if rank() == 0 else None
    if world_size() > 1:  # processes may see different files on a shared disk
        box = [path]
        dist.broadcast_object_list(box)  # replaces the list's element with that of rank 0
        path = box[0]
    if path is None:
        return None
    # Do not memory-map the file on a CPU: optimizers would go on using the mapped tensors, and on
    # Windows, RunFolder.prune() could not delete the file
    return read_checkpoint(path, mmap=device.type != "cpu")

# ---- Constants in Config that existing weights determine, and checks of all constants
def with_values_for_finetuning(cfg, given, spec):
    """Return a Config in which max_lr and T suit the fine-tuning of a model.

    given: {name: value} of the preset and the flags. If it contains max_lr or T, that value is
    kept. spec: the model's ModelSpec.
    """
    constants = spec.model_constants
    if "max_lr" not in given:
        # Adam's best learning rate falls as the width grows (Yang et al. 2022), so divide by the
        # width. For gpt2, the result is 1.3e-4
        cfg = replace(cfg, max_lr=0.1 / constants["n_embd"])
    if "T" not in given:
        # The largest power of two that fits into block_size, up to 1024
        cfg = replace(cfg, T=min(1024, 2 ** int(math.log2(constants["block_size"]))))
    return cfg

def values_from_weights(spec):
    """Return {name: value} of the constants in Config that a trained model determines.

    These are the encoding, if it is known, and all constants that are also in model_constants
    (n_layer, n_head and n_embd). T is not among them, since rows may be shorter than the model's
    block_size. Raise UserError if Config does not accept a value.

    spec: the model's ModelSpec. If it is None, the dict is empty.
    """
    if spec is None:
        return {}
    names = asdict(Config()).keys()
    values = {name: value for name, value in spec.model_constants.items() if name in names}
    if spec.encoding_name:
        values["encoding"] = spec.encoding_name
    converted = make_config(Config, values)  # checks their types. Other constants have defaults
    return {name: getattr(converted, name) for name in values}

def check_flags_against_weights(flags, cfg, values, spec):
    """Raise UserError if a flag has a different value than the weights.

    cfg: the Config with the values of the flags. values: from values_from_weights(spec).
    """
    for name in flags:
        if name in values and getattr(cfg, name) != values[name]:
            raise UserError(f"{name} is {values[name]} in the weights {spec.source}: leave out "
                            f"--{name}.")

def describe_values(source, values):
    """Return a line with the constants that weights determine. source: where they come from."""
    assignments = [f"{name}={value!r}" for name, value in values.items()]
    return f"weights   {source} sets {', '.join(assignments)}"

def describe_preset(preset_name, cfg):
    """Return a description of the preset: its name, the reason for it, and its values in cfg."""
    if not preset_name:
        return "settings  Config, since data is a folder of shards"
    added = ("max_lr", "T") if preset_name == "FINETUNE" else ()  # see with_values_for_finetuning()
    names = dict.fromkeys(["data", *added, *PRESETS[preset_name]])  # each one once
    values = " ".join(f"{name}={getattr(cfg, name)!r}" for name in names)
    reason = "a text file" if preset_name == "SMALL" else "a text file and weights are given"
    return f"settings  {preset_name} instead of Config, since data is {reason}:\n{values}"

def check_config(cfg):
    """Raise UserError if a constant has a value that cannot work.

    make_config() has already rejected negative numbers.
    """
    for name in ("total_batch_size", "B", "T", "n_layer", "n_head", "n_embd", "val_tokens"):
        if getattr(cfg, name) < 1:
            raise UserError(f"{name}={getattr(cfg, name)}: it must be 1 or more.")
    if cfg.dropout >= 1:
        raise UserError(f"dropout={cfg.dropout}: it must be below 1.")
    if cfg.seed >= 2**32:
        raise UserError(f"seed={cfg.seed}: it must be below 2**32.")
    if cfg.min_lr > cfg.max_lr or cfg.max_lr == 0:
        raise UserError(f"max_lr={cfg.max_lr} must be above 0, and not below min_lr={cfg.min_lr}.")
    if cfg.n_embd % cfg.n_head:
        raise UserError(f"n_embd={cfg.n_embd} is not a multiple of n_head={cfg.n_head}: change one "
                        "of them.")
    train, val = find_shards(cfg.data)
    if not is_text(cfg.data) and not (train and val):
        raise UserError(f"data={cfg.data} is neither a text file nor a folder with *_train_*.npy "
                        "and *_val_*.npy: run fineweb.py, or set a different --data.")
    smallest_batch = cfg.T * world_size()
    if cfg.total_batch_size % smallest_batch:
        fitting = max(1, round(cfg.total_batch_size / smallest_batch)) * smallest_batch
        raise UserError(f"total_batch_size={cfg.total_batch_size} is not a multiple of T * "
                        f"processes = {cfg.T} * {world_size()}: use for example "
                        f"--total_batch_size={fitting}.")

def fitting_B(cfg):
    """Return the largest B, at most cfg.B, that evenly divides a process's share of a batch."""
    rows = rows_of_step(cfg, 0) // world_size()
    rows = max(1, rows)  # Only for edits: if it is 0, check_B_divides_rows() will report this later
    return max(b for b in range(1, min(cfg.B, rows) + 1) if rows % b == 0)

# ---- Setting up a run. The log and the export in log_dir are not touched until the data, the
# checkpoint and the model have been checked
def set_up(cfg, start, device):
    """Return the Run for train(). cfg and start: what resolve_config() returned.

    Raise UserError if the data, the checkpoint and the code do not fit together.
    """
    encoding, checkpoint = get_encoding(cfg.encoding), start.checkpoint
    if start.constants_from:
        check_spec_fits(start.constants_from, cfg, encoding)
    loaders = open_data(cfg, encoding)
    fingerprint = fingerprint_of(loaders[0])
    # Lock the folder before any trial steps. If another run uses it, the command then fails at once
    lock = lock_run_folder(cfg.log_dir)
    cfg = replace(cfg, max_steps=determine_max_steps(cfg, start, device, loaders))
    if checkpoint:
        check_same_training(checkpoint, cfg, fingerprint)
        check_code_of_finished_run(checkpoint, cfg)
    folder = RunFolder(cfg, fingerprint, lock)
    run = build_run(cfg, start, device=device, loaders=loaders, folder=folder)
    catch_signals(run.signal_came)
    warnings = find_warnings(run, checkpoint)
    folder.begin(run.state.step, continues=bool(checkpoint), warnings=warnings)
    lines = [description(run, checkpoint), *(f"!!! {warning}" for warning in warnings)]
    print0("\n".join(lines))
    return run

def check_spec_fits(spec, cfg, encoding):
    """Raise UserError if the model in init_from does not fit the encoding or T.

    It must have as many token ids as the encoding, and a context of at least T tokens.

    spec: the model's ModelSpec.
    """
    n_vocab, block_size = spec.model_constants["n_vocab"], spec.model_constants["block_size"]
    if n_vocab != encoding.n_vocab or cfg.T > block_size:
        raise UserError(f"The model in init_from={cfg.init_from} has {n_vocab} tokens and a "
                        f"context of {block_size}, but encoding={cfg.encoding} has "
                        f"{encoding.n_vocab} and T={cfg.T}: change --encoding or --T.")

def determine_max_steps(cfg, start, device, loaders):
    """Return max_steps. If `minutes` or `epochs` is set, derive it from the speed or the data.

    A resumed run with `minutes` keeps the max_steps that was measured when it began. Raise
    UserError if this run had different `minutes`, or none.
    """
    if cfg.minutes and start.checkpoint:
        before = start.checkpoint["constants"]
        if before.get("minutes") != cfg.minutes:
            raise UserError(f"The newest checkpoint in {cfg.log_dir}/ was not written with "
                            f"minutes={cfg.minutes:g}, but with max_steps={before['max_steps']}: "
                            "leave out --minutes, or choose a different --log_dir.")
        return before["max_steps"]
    if cfg.minutes:
        return steps_that_fit(cfg, start, device, loaders)
    if cfg.epochs:
        train_loader, _ = loaders
        return steps_for_epochs(cfg, train_loader.rows_per_epoch)
    return cfg.max_steps

def steps_that_fit(cfg, start, device, loaders):
    """Return how many steps fit into cfg.minutes, given the median time of twenty trial steps.

    The trial steps use a separate Run, which has no folder and is discarded afterwards.
    """
    print0(f"Taking twenty trial steps to find out how many fit into {cfg.minutes:g} minutes")
    cfg_of_trial = replace(cfg, hellaswag_every=0)  # so that build_run() skips preparing HellaSwag
    run = build_run(cfg_of_trial, start, device, loaders)
    seconds = []
    for _ in range(20):
        before = time.perf_counter()
        part_of_loss, _ = train_step(run)
        part_of_loss.item()  # waits for the GPU
        seconds.append(time.perf_counter() - before)
    seconds = sum_over_ranks(torch.tensor(seconds, device=run.device)) / world_size()  # (20,)
    del run
    gc.collect()  # a compiled model is part of a reference cycle, which would keep its memory
    steps = int(60 * cfg.minutes / seconds.median().item())
    if steps <= cfg.warmup_steps:
        raise UserError(f"Only {steps} steps fit into minutes={cfg.minutes:g}, which is not more "
                        f"than warmup_steps={cfg.warmup_steps}: raise --minutes, or lower "
                        "--warmup_steps.")
    print0(f"{steps:,} steps fit into {cfg.minutes:g} minutes. To repeat this run on any machine, "
           f"use --max_steps={steps}")
    return steps

def steps_for_epochs(cfg, rows_per_epoch):
    """Return the number of steps in which the data is read cfg.epochs times."""
    # Search for the lowest number of steps that is enough. (If all steps read the same number of
    # rows, as in this file, a division would do. Only for edits: rows_before() may let the batch
    # grow, and may use cfg.max_steps)
    def is_enough(steps):
        return rows_before(replace(cfg, max_steps=steps), steps) >= cfg.epochs * rows_per_epoch
    limit = 1
    while not is_enough(limit):
        limit *= 2
    # bisect_left() finds the first True among is_enough(1), is_enough(2), ... is_enough(limit)
    return bisect.bisect_left(range(limit + 1), True, lo=1, key=is_enough)

def build_run(cfg, start, device, loaders, folder=None):
    """Return a Run with the model, the optimizers and everything else that train() uses.

    loaders: the training loader and the validation loader. folder: a RunFolder, or None for trial
    steps (see steps_that_fit).
    """
    train_loader, val_loader = loaders
    encoding = get_encoding(cfg.encoding)
    dtype, compiled = pick_dtype(cfg.dtype, device), pick_compile(cfg.compile, device)
    choose_attention_kernels(cfg, device, dtype)
    raw_model = build_model(cfg, gpt_config_of_run(cfg, start.constants_from)).to(device)
    if start.weights:
        load_weights(raw_model, start.weights)
    state = build_state(raw_model, cfg, dtype)
    if start.checkpoint:
        restore_checkpoint(state, start.checkpoint, cfg.log_dir)
    if compiled:
        raw_model.compile()
    return Run(
        cfg=cfg, state=state, device=device, encoding=encoding,
        ddp_model=wrap_in_ddp(raw_model), train_loader=train_loader, val_loader=val_loader,
        autocast=partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32),
        tokens_per_byte=tokens_per_byte(val_loader, encoding, cfg.val_tokens),
        hellaswag_data=prepared_hellaswag(cfg, state.eval_model, encoding), folder=folder)

def build_state(raw_model, cfg, dtype):
    """Return the State at step 0.

    Raise UserError if an edit to the model, the optimizers or State is invalid.
    """
    muon_dtype = dtype if dtype == torch.bfloat16 else torch.float32  # float16 would overflow
    optimizers = configure_optimizers(raw_model, cfg, muon_dtype)
    check_parameters(raw_model, optimizers)
    device = next(raw_model.parameters()).device
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    state = State(raw_model, optimizers, scaler)
    prepare_groups(state.optimizers)  # Only for edits: see the section "Edited hyperparameters"
    check_can_be_saved(state.state_dict())
    return state

def restore_checkpoint(state, checkpoint, log_dir):
    """Load the State that a checkpoint in log_dir contains into `state`.

    checkpoint: what read_checkpoint() returned. Raise UserError if it does not fit the code.
    """
    try:
        state.load_state_dict(checkpoint["state"])
    except (KeyError, RuntimeError, ValueError) as e:  # names, shapes or groups differ
        raise UserError(f"The run in {log_dir}/ does not fit train_gpt2.py ({summary_of(e)}): undo "
                        "the edit, or choose a different --log_dir.") from None

def wrap_in_ddp(raw_model):
    """Wrap the model in DDP if there are several processes; otherwise return it unchanged."""
    if world_size() == 1:
        return raw_model
    # torch.compile splits a model where DDP's buckets end. With the default of 25 MB per bucket,
    # there would be 14 graphs. Gradients are views of the buckets, so that they need not be copied
    return DDP(raw_model, bucket_cap_mb=100, gradient_as_bucket_view=True)

def description(run, checkpoint):
    """Return the lines that describe a run at its start."""
    cfg, state = run.cfg, run.state
    dtype, compiled = pick_dtype(cfg.dtype, run.device), pick_compile(cfg.compile, run.device)
    dtype_name = str(dtype).removeprefix("torch.")
    n_rows = rows_before(cfg, cfg.max_steps)
    n_parameters = sum(p.numel() for p in state.raw_model.parameters())
    groups = [f"{sum(p.numel() for p in group['params']):,} in {len(group['params'])} tensors by "
              f"{type(optimizer).__name__} with decay {group.get('weight_decay', 0.0)}"
              for optimizer in state.optimizers for group in optimizer.param_groups]
    entries = {
        "data": f"{cfg.data}: {run.folder.fingerprint}",
        "model": f"{n_parameters:,} parameters, init_from={cfg.init_from}: "
                 f"{state.raw_model.config}",
        "training": f"{cfg.max_steps:,} steps, {n_rows * cfg.T:,} tokens, "
                    f"{n_rows / run.train_loader.rows_per_epoch:.2f} epochs",
        "optimizer": "; ".join(groups),
        "machine": f"{world_size()} x {run.device.type}, {dtype_name}, compile={compiled}, "
                   f"B={cfg.B}",
        "log": f"{Path(cfg.log_dir, 'log.txt')}, from step {state.step} on"}
    lines = [f"{name:9} {text}" for name, text in entries.items()]
    if checkpoint and cfg.max_steps > checkpoint["constants"]["max_steps"]:
        lines.append(f"max_steps was {checkpoint['constants']['max_steps']}, is {cfg.max_steps}: "
                     "the learning rate, and everything else in the code that depends on "
                     "max_steps, follows a new schedule.")
    if 0 < cfg.max_steps <= state.step:
        lines.append("This run is finished. It is only validated, sampled and exported again.")
    return "\n".join(lines)

# ---- Processes and the machine. torchrun starts one process per GPU and gives each a number, its
# rank. For device, dtype and compile, "auto" selects a fast choice for this machine. If a GPU
# cannot be used, a message gives the reason
def rank():
    """Return this process's rank, counted from 0. Only rank 0 prints and writes files."""
    return int(os.environ.get("RANK", 0))

def world_size():
    """Return the number of processes that torchrun started.

    This also works before the process group exists. Slurm may set WORLD_SIZE, but not RANK. Then
    there is one process.
    """
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1

def sum_over_ranks(tensor):
    """Replace a tensor with its sum over all processes, and return it."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor

def print0(text):
    """Print text on rank 0 only."""
    if rank() == 0:
        # Write the text and the newline in a single call, because the saving thread also prints.
        # Ignore the OSError of a full disk, and the RuntimeError if a signal handler prints during
        # another print
        with contextlib.suppress(OSError, RuntimeError):
            print(f"{text}\n", end="", flush=True)

# The ending of two error messages. torch 2.14 is the last version with wheels for CUDA 12.6
OTHER_TORCH = ("a torch build that supports old GPUs and drivers: pip install 'torch<2.15' "
               "--index-url https://download.pytorch.org/whl/cu126")

def set_up_device(name):
    """Return the torch.device with this name ("auto" chooses one), prepared for training.

    Select a GPU and allow TF32 on it. On a CPU, speed up memory allocation. Raise UserError if the
    device cannot be used.
    """
    # When torch sees no GPU, the usual cause is a driver that is too old for the CUDA version that
    # torch was built for. torch.__version__ ends with this version (such as +cu130)
    no_gpu_message = (f"torch {torch.__version__} sees no GPU. Install a newer driver, or "
                      f"{OTHER_TORCH}")
    if name == "auto":
        mps = torch.backends.mps.is_available() and world_size() == 1  # gloo cannot use MPS tensors
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
        if name == "cpu" and shutil.which("nvidia-smi"):
            print0(f"!!! Training on the CPU: {no_gpu_message}")
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    if not re.fullmatch(r"cpu|mps|cuda:\d+", name):
        raise UserError(f"device={name} is unknown: use auto, cuda, cuda:1, mps or cpu.")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(f"device={name}: {no_gpu_message}")
        check_gpu(device)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32
    if device.type == "cpu":
        keep_freed_memory()
    return device

def check_gpu(device):
    """Raise UserError if the GPU does not exist, or if torch cannot use it."""
    if device.index >= torch.cuda.device_count():
        raise UserError(f"There is no {device}: torch sees {torch.cuda.device_count()} GPU(s), and "
                        "each process needs its own. Lower --nproc_per_node.")
    try:
        torch.ones(1, device=device).item()  # fails if torch has no code for this GPU
    except torch.AcceleratorError as e:
        raise UserError(f"torch {torch.__version__} fails on {torch.cuda.get_device_name(device)} "
                        f"({summary_of(e)}). If it is an old GPU, install {OTHER_TORCH}") from None

def keep_freed_memory():
    """Make glibc keep freed memory for the next step. Without glibc (macOS, Windows), do nothing.

    By default each array above 32 MB gets new memory, which the operating system has to clear.
    Without this setting, a CPU step of the 124M model with 8 x 256 tokens in bfloat16 takes 1.5 to
    2.2 times as long. Peak memory is 4.2 GB with it and 3.9 GB without it.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)   # M_MMAP_MAX: no array gets a mapping of its own
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: freed memory is never returned to the system

def join_processes(device):
    """Form the group of all processes that torchrun started."""
    # DDP(...) imports torch.distributed.nn. If this module is first imported while a process group
    # exists, it keeps a reference to the group, and Python may abort on exit. So import it now
    import torch.distributed.nn  # noqa: F401
    # Processes find each other's addresses in torchrun's store. If a process dies, torchrun may
    # start all of them again (--max-restarts), but its store remains. A prefix for each restart
    # keeps them from finding the addresses of dead processes
    store, _, _ = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    gpu = device if device.type == "cuda" else None
    dist.init_process_group(backend="nccl" if gpu else "gloo", store=store, rank=rank(),
                            world_size=world_size(), device_id=gpu,
                            timeout=datetime.timedelta(hours=1))  # others wait while rank 0 samples

def catch_signals(event):
    """Make Ctrl-C and SIGTERM set the event.

    Without torchrun, a second Ctrl-C ends the process at once.
    """
    # With torchrun, a process gets each Ctrl-C twice: from the terminal and from torchrun. So the
    # second signal does not mean that the user has pressed Ctrl-C again
    alone = "RANK" not in os.environ

    def receive(number, frame):
        if event.is_set() and number == signal.SIGINT and alone:
            print0("Ended at once. To resume from the last checkpoint, repeat the command.")
            os._exit(130)
        event.set()
        again = " Press Ctrl-C again to end at once." if alone else ""
        print0(f"Stopping after this step is finished and saved.{again}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, receive)

def pick_dtype(choice, device):
    """Return the dtype for matrix multiplications. "auto" selects the fastest one that is safe."""
    if choice != "auto":
        return getattr(torch, choice)
    if device.type == "cuda":
        # Do not call torch.cuda.is_bf16_supported(), which is also true on V100 and T4. They only
        # emulate bfloat16
        has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if has_bfloat16 else torch.float16
    cpu = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return torch.bfloat16 if cpu.get("avx512_bf16") or cpu.get("amx_bf16") else torch.float32

def pick_compile(choice, device):
    """Return whether to use torch.compile.

    It needs Triton, which needs a GPU with compute capability 7.0 or higher.
    """
    if choice != "auto":
        return choice
    has_triton = importlib.util.find_spec("triton") is not None  # often missing on Windows
    return (device.type == "cuda" and has_triton
            and torch.cuda.get_device_capability(device) >= (7, 0))

def choose_attention_kernels(cfg, device, dtype):
    """Disable kernels of scaled_dot_product_attention that are slow or wrong in this run."""
    # On a CPU in bfloat16, the backward pass of flash attention is slow for short rows: it takes
    # 11.8 ms of a step with the preset SMALL (T=64), while the math kernel takes 5.6 ms
    short = device.type == "cpu" and dtype == torch.bfloat16 and cfg.T < 256
    torch.backends.cuda.enable_flash_sdp(not short)  # despite its name, it also applies to CPUs
    # cuDNN's kernel, the fastest on H100 and newer, rounds a dropout of 0.1 to 1/16 in some cases
    torch.backends.cuda.enable_cudnn_sdp(cfg.dropout == 0)

# ---- Opening data. Damaged shards or a wrong encoding are reported, since training with them would
# ruin the model
def is_text(data):
    """Return whether `data` is a text file. Otherwise it is a folder of shards."""
    return Path(data).is_file()

def find_shards(folder):
    """Return the training shards and the validation shards, as two sorted lists of paths."""
    return sorted(Path(folder).glob("*_train_*.npy")), sorted(Path(folder).glob("*_val_*.npy"))

def tokens_of_shard(shard):
    """Return the token ids (N,) of a shard, which is a path or already an array.

    A file is memory-mapped. Raise UserError if it is damaged.
    """
    if not isinstance(shard, Path):
        return shard
    try:
        return np.load(shard, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as e:
        raise UserError(f"{shard} is not a complete shard ({summary_of(e)}): make it "
                        "again.") from None

def open_data(cfg, encoding):
    """Return the loaders for training and validation.

    Raise UserError if the data is unreadable, too short or needs a different encoding.
    """
    if is_text(cfg.data):  # the last tenth is for validation
        tokens = tokens_of_text(cfg.data, encoding)
        cut = int(len(tokens) * 0.9)
        train, val = [tokens[:cut]], [tokens[cut:]]
    else:
        train, val = find_shards(cfg.data)
        check_encoding_of_shards(cfg)
    train_loader = DataLoaderLite(train, cfg.T, cfg.seed, cfg.shuffle, encoding.n_vocab,
                                  recut=cfg.shuffle and is_text(cfg.data))
    val_loader = DataLoaderLite(val, cfg.T, n_vocab=encoding.n_vocab)
    if not (train_loader.rows_per_epoch and val_loader.rows_per_epoch):
        raise UserError(f"{cfg.data} is too short for T={cfg.T}: use more text, or a lower --T.")
    return train_loader, val_loader

def tokens_of_text(path, encoding):
    """Return the tokens (N,) of a text file. Raise UserError if it is not UTF-8."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as e:
        raise UserError(f"{path} is not UTF-8 ({e}): convert it to UTF-8.") from None
    return encoding.encode_to_numpy(text, disallowed_special=()).astype(token_dtype(encoding))

def check_encoding_of_shards(cfg):
    """Raise UserError if the shards' manifest names a different encoding.

    Without a manifest, nothing is checked.
    """
    manifest = Path(cfg.data, "manifest.json")
    if not manifest.exists():  # the shards were made by another script
        return
    made_with = json.loads(manifest.read_bytes())["settings"]["encoding"]
    if made_with != cfg.encoding:
        raise UserError(f"The shards in {cfg.data}/ need --encoding={made_with}, not "
                        f"{cfg.encoding}.")

def fingerprint_of(loader):
    """Return a line that identifies the corpus by its size and by a CRC-32.

    The CRC covers all ids of a text, and the first and last 4,096 ids of each shard.
    """
    parts = []
    for shard, length in zip(loader.shards, loader.lengths):
        n = 4096 if isinstance(shard, Path) else length  # a text is covered completely
        first, last = tokens_of_shard(shard)[:n], tokens_of_shard(shard)[-n:]
        parts.append((getattr(shard, "name", "text"), length, zlib.crc32(first), zlib.crc32(last)))
    crc = zlib.crc32(repr(parts).encode())
    return f"{sum(loader.lengths):,} tokens in {len(parts)} file(s) #{crc:08x}"

def tokens_per_byte(loader, encoding, val_tokens):
    """Return the number of tokens per byte of the validation text.

    It is measured on the first val_tokens targets, about as many as validation_loss() reads.
    <|endoftext|> counts as 0 bytes.
    """
    counts = np.zeros(encoding.n_vocab, dtype=np.int64)  # how often each id occurs
    n_wanted = val_tokens  # how many tokens are still to be counted
    for shard in loader.shards:
        # The first token of a shard is never a target
        targets = tokens_of_shard(shard)[1:1 + n_wanted]
        n_wanted -= len(targets)
        # Drop ids beyond the vocabulary. DataLoaderLite reports them when it reads their row
        counts += np.bincount(targets, minlength=len(counts))[:len(counts)]
    n_bytes = sum(counts[token] * len(encoding.decode_single_token_bytes(token))
                  for token in counts.nonzero()[0].tolist() if token != encoding.eot_token)
    return counts.sum() / max(1, n_bytes)

# ---- Reading and loading weights. They may come from an edited copy of this file, or from Hugging
# Face. So they may not fit the GPT in this file
def read_weights(name):
    """Return the Weights from a .pt file, a run's folder, a Hugging Face folder or the hub.

    Raise UserError if they cannot be read.
    """
    if name.endswith(".pt") or find_checkpoints(name):
        path = name if name.endswith(".pt") else str(path_of_checkpoint_to_use(name))
        weights = weights_in_checkpoint(read_checkpoint(path), path)
        if is_of_other_code(weights.code):
            print0(f"Note: {path} was written by different code.")
        return weights
    model = gpt_from_hugging_face(name)  # a GPT, of which only the config and the weights are used
    # 257 ids are 256 bytes and <|endoftext|>
    encoding_name = {257: "bytes", 50257: "gpt2"}.get(model.config.n_vocab)
    # All constants except dropout. (Only for edits: if you add a constant to GPTConfig, it does not
    # belong here, because transformers does not know it)
    known = ("block_size", "n_vocab", "n_layer", "n_head", "n_embd")
    model_constants = {key: getattr(model.config, key) for key in known}
    return Weights(ModelSpec(name, model_constants, encoding_name), model.state_dict())

def spec_in_checkpoint(checkpoint, source):
    """Return the ModelSpec of the model in a checkpoint. source: its file or folder."""
    model_constants = dict(checkpoint["gpt_config"])
    model_constants.pop("dropout", None)
    return ModelSpec(source, model_constants, checkpoint["encoding"])

def weights_in_checkpoint(checkpoint, source):
    """Return the Weights of eval_model in a checkpoint. source: its file or folder."""
    spec = spec_in_checkpoint(checkpoint, source)
    return Weights(spec, checkpoint["eval_model"], checkpoint.get("code"))

def gpt_config_of_run(cfg, spec=None):
    """Return the GPTConfig of the model that a command builds.

    spec: the ModelSpec that determines the constants. If it is None, cfg and its encoding determine
    them. Constants that the spec lacks also come from cfg. These are dropout and, in edited copies,
    constants that have been added to both Config and GPTConfig.
    """
    # n_layer, n_head, n_embd and dropout
    in_both = {name: getattr(cfg, name)
               for name in asdict(GPTConfig()).keys() & asdict(cfg).keys()}
    if spec is None:
        return GPTConfig(block_size=cfg.T, n_vocab=get_encoding(cfg.encoding).n_vocab, **in_both)
    return make_gpt_config(in_both | spec.model_constants, spec.source)

def make_gpt_config(constants, source):
    """Return GPTConfig(**constants). source: where the weights came from (for the error message).

    Raise UserError if GPTConfig lacks a constant.
    """
    if unknown := constants.keys() - asdict(GPTConfig()).keys():
        raise UserError(f"{source} was made with the constant {min(unknown)}, which GPTConfig in "
                        "train_gpt2.py lacks. Add it to GPTConfig, or use the code that the "
                        "weights were made with.")
    return GPTConfig(**constants)

def load_weights(model, weights):
    """Load weights into a model. A tensor that the weights lack keeps the model's values.

    Raise UserError if the model lacks one of the weights or has it in a different shape.
    """
    own, source = model.state_dict(), weights.spec.source
    if missing := own.keys() - weights.tensors.keys():
        print0(f"!!! {source} lacks {min(missing)}. {len(missing)} tensor(s) keep the "
               "initial values that the code gives them.")
    try:
        model.load_state_dict(own | weights.tensors)
    except RuntimeError as e:
        raise UserError(f"{source} does not fit the model in train_gpt2.py "
                        f"({summary_of(e)}): use the code that the weights were made with."
                        ) from None

def load_pretrained(cls, source, constants):
    """Return a model of class `cls` (GPT) with the weights in `source` (see from_pretrained)."""
    weights = source if isinstance(source, Weights) else read_weights(str(source))
    spec = weights.spec
    model = cls(make_gpt_config(spec.model_constants | constants, spec.source))
    load_weights(model, weights)
    return model

# ---- Making, finding and reading checkpoints. A file is read only if it is undamaged. Only plain
# values are loaded, because loading arbitrary Python objects could run code
def checkpoint_of(state, cfg, fingerprint):
    """Return a checkpoint of `state`."""
    return {
        "state": state.state_dict(), "eval_model": state.eval_model.state_dict(),
        "gpt_config": asdict(state.raw_model.config), "encoding": cfg.encoding,
        "constants": asdict(cfg), "data": fingerprint, "code": code_checksum()}

def saved_form_of(value):
    """Return the form in which a checkpoint stores an attribute of State."""
    if isinstance(value, torch.optim.Optimizer):
        return value.state_dict() | {"class": type(value).__name__}
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if isinstance(value, list):
        return [saved_form_of(part) for part in value]
    return value

def find_checkpoints(folder):
    """Return {step: path} of the checkpoints in a folder, the newest first."""
    paths = Path(folder).glob("checkpoint_*.pt")
    numbers = {path: path.stem.removeprefix("checkpoint_") for path in paths}
    found = {int(number): path for path, number in numbers.items() if number.isdecimal()}
    return dict(sorted(found.items(), reverse=True))

def path_of_newest_checkpoint(folder):
    """Return the path of the newest undamaged checkpoint, or None if there is no checkpoint.

    Raise UserError if all checkpoints are damaged.
    """
    return first_undamaged(list(find_checkpoints(folder).values()), folder)

def path_of_checkpoint_to_use(folder):
    """Return the path of the checkpoint to export, to sample from, or to start from (init_from).

    Normally, this is the newest checkpoint, even if it has not been validated yet. But if the last
    validation found a higher loss than an earlier one, the model has become worse. In that case,
    return the checkpoint with the lowest loss. (Only losses of existing checkpoints count.)

    Damaged checkpoints are skipped. Return None if there is no checkpoint.
    """
    found = find_checkpoints(folder)  # {step: path}, the newest first
    paths = list(found.values())
    points = read_metrics(folder)["val"]  # [(step, validation loss), ...], or [] if there are none
    losses = {step: loss for step, loss in points if step in found}
    if losses:
        last_validated = max(losses)             # the largest key
        best_step = min(losses, key=losses.get)  # the key with the lowest value
        if losses[last_validated] > losses[best_step]:
            paths.remove(found[best_step])
            paths.insert(0, found[best_step])
    return first_undamaged(paths, folder)

def first_undamaged(paths, folder):
    """Return the first path of an undamaged checkpoint, or None if there are no paths.

    (The content is not returned, because each process reads the file itself.)

    Raise UserError if all checkpoints are damaged.
    """
    for path in paths:
        try:
            read_checkpoint(path)  # raises UserError if it is damaged
            return path
        except UserError as e:
            print0(f"{e} Trying another checkpoint.")
    if paths:
        raise UserError(f"Every checkpoint in {folder}/ is damaged: choose a different --log_dir.")
    return None

def read_checkpoint(path, mmap=True):
    """Read a checkpoint. Unlike torch.load(), this also verifies the checksums in the file.

    mmap: whether to read tensors from the disk only when they are used. Raise UserError if the file
    is damaged or is not a checkpoint.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # the format that torch.save writes
            if archive.testzip():
                raise ValueError("a checksum is wrong")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        if "gpt_config" not in checkpoint:
            raise ValueError("this script did not write it")
    except Exception as e:  # reading a damaged file may raise any exception
        raise UserError(f"{path} cannot be read as a checkpoint ({summary_of(e)}).") from None
    return converted_to_todays_format(checkpoint)  # an older version may have written it

# ---- Restoring State from the entry "state" of a checkpoint
def restore_state(state, saved):
    """Restore State's attributes from `saved`, which state.state_dict() returned.

    An object with load_state_dict(), such as the model, is loaded in place. Any other attribute is
    set to its saved value. Raise ValueError if an attribute cannot be restored.
    """
    check_is_complete(saved, state)
    device = next(state.raw_model.parameters()).device
    for name, saved_value in saved.items():
        # Only for edits: train_step() may create an attribute, which a new State then lacks
        value = getattr(state, name, None)
        if is_stateful(value):
            load_object(value, saved_value)
        else:
            # If the attribute is a tensor now, stay on its device. Otherwise use the model's device
            setattr(state, name, moved(saved_value, getattr(value, "device", device)))

def check_is_complete(saved, state):
    """Raise ValueError if State has a tensor or an object that is not in `saved`.

    Such an attribute was added after the checkpoint was written, and would keep the value that it
    has in a new State. For example, an average of the weights would start from the initial weights,
    and not from the restored ones. (A number or a string that was added keeps its value.)
    """
    for name, value in vars(state).items():
        if name not in saved and (is_stateful(value) or has_tensors(value)):
            raise ValueError(f"the checkpoint does not contain State.{name}")

def load_object(value, saved_value):
    """Load what saved_form_of() returned into an object or a list of objects."""
    if isinstance(value, list):
        for part, saved_part in zip(value, saved_value, strict=True):
            load_object(part, saved_part)
    elif isinstance(value, torch.optim.Optimizer):
        load_optimizer(value, saved_value)
    elif saved_value:  # it is empty for a GradScaler that was disabled
        value.load_state_dict(saved_value)

def is_stateful(value):
    """Return whether a value has load_state_dict(), or is a list with such an object."""
    if isinstance(value, list):
        return any(is_stateful(part) for part in value)
    return hasattr(value, "load_state_dict")

def has_tensors(value):
    """Return whether a value is a tensor, or a list or dict that contains one."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(has_tensors(part) for part in value)
    return torch.is_tensor(value)

def moved(content, device):
    """Return nested content with its tensors on a device."""
    if isinstance(content, dict):
        return {key: moved(part, device) for key, part in content.items()}
    if isinstance(content, (list, tuple)):
        return type(content)(moved(part, device) for part in content)
    return content.to(device) if torch.is_tensor(content) else content

# ---- Edited hyperparameters. An optimizer group holds hyperparameters, such as momentum. A resumed
# run continues with the saved values, since training may have changed some of them. But if a value
# was edited in the code, the run continues with the new value. So that edits can be found, each
# group has an entry "initial": a copy of the values with which the code has built the group.
#
# For example, suppose that the code builds a group with momentum=0.95, and that training changes
# this to 0.97. Then a checkpoint has momentum=0.97, and its "initial" has momentum=0.95. If the
# code of the resumed run builds the group with 0.95, as before, the run continues with 0.97. But if
# it builds the group with 0.9, this differs from "initial", and the run continues with 0.9
def prepare_groups(optimizers):
    """Add an entry "initial" to each optimizer group that lacks it: a copy of its hyperparameters.

    Also add "peak_lr" to groups that were not built by configure_optimizers(). If train_step() adds
    an optimizer or a group, call this function again.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("peak_lr", group["lr"])
            if "initial" not in group:
                group["initial"] = {name: copy.deepcopy(value) for name, value in group.items()
                                    if name not in ("params", "param_names")}

def load_optimizer(optimizer, saved):
    """Load what saved_form_of() returned into an optimizer.

    Raise ValueError if an optimizer of a different class was saved.
    """
    class_name = type(optimizer).__name__
    if saved.get("class", class_name) != class_name:
        raise ValueError(f"the checkpoint has the state of {saved['class']}, but the code uses "
                         f"{class_name}")
    # load_state_dict() moves an optimizer's state to the device of the parameters. But tensors in
    # groups must be moved here
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = parameters[0].device if parameters else None
    groups = []
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        # Saved values take precedence over those of the code, except where the code was edited. (In
        # saved_group, "params" is a list of numbers, as optimizer.load_state_dict() expects)
        resumed = group | moved(saved_group, device)
        resumed |= edited_hyperparameters(group, saved_group)
        if "initial" in group:
            resumed["initial"] = group["initial"]  # for the comparison at the next restart
        groups.append(resumed)
    optimizer.load_state_dict(saved | {"param_groups": groups})

def edited_hyperparameters(group, saved_group):
    """Return {name: value} of the hyperparameters in `group` that were edited in the code.

    These are the ones whose values in the two entries "initial" differ. Tensors, which may be
    large, are not compared, and do not count as edited.

    group: an optimizer group as the code builds it now. saved_group: the same group in the
    checkpoint. If one of them has no "initial", nothing counts as edited. (Very old checkpoints do
    not have it, nor do optimizers that an edit has put into another attribute of State.)
    """
    before, now = saved_group.get("initial", {}), group.get("initial", {})
    edited = {}
    for name in before.keys() & now.keys():
        if not has_tensors([before[name], now[name]]) and before[name] != now[name]:
            edited[name] = group[name]
    return edited

# ---- The checksum of the code. It shows whether the code was edited after a checkpoint was written
@lru_cache
def code_checksum():
    """Return a CRC-32 of the source text that a run depends on, without comments.

    It covers three parts: this file without Config, SMALL and FINETUNE, whose values are compared
    one by one (see check_same_training); encoding_arguments() in fineweb.py, which determines the
    tokens of a text; and any module of your own that this file imports from its folder.
    """
    path = Path(__file__)
    lines = path.read_text(encoding="utf-8").splitlines()
    tree = ast.parse("\n".join(lines))
    for node in tree.body:
        name = ""
        if isinstance(node, ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Assign):
            name = ast.unparse(node.targets[0])
        if name in ("Config", "SMALL", "FINETUNE"):  # blank out its lines
            lines[node.lineno - 1:node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    lines += inspect.getsource(encoding_arguments).splitlines()
    for module in sorted(modules_beside(path, seen={path.stem, "fineweb", "hellaswag"})):
        lines += module.read_text(encoding="utf-8").splitlines()
    lines = [re.sub(r"(^|\s)#.*", "", line).rstrip() for line in lines]
    return zlib.crc32("\n".join(filter(None, lines)).encode())

def modules_beside(path, seen):
    """Return the .py files that a file imports from its own folder, directly or indirectly.

    seen: names of modules to leave out.
    """
    imported, found = set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # `from . import name` has no module
            imported |= {node.module or alias.name for alias in node.names}
    for name in imported - seen:
        module = path.with_name(f"{name}.py")
        if module.exists():
            found |= {module, *modules_beside(module, seen | {name})}
    return found

def is_of_other_code(checksum):
    """Return whether a checkpoint's code checksum is known and differs from the current one."""
    return checksum is not None and checksum != code_checksum()

# ---- Checks when a run is resumed. They keep a command from continuing a different run by mistake

# Constants that check_same_training() does not compare, because they do not affect training. (dtype
# and B affect rounding, and B also affects the dropout masks. epochs and minutes only determine
# max_steps, which is compared)
NOT_COMPARED = {
    "B", "epochs", "minutes", "print_every", "eval_every", "val_tokens", "hellaswag_every",
    "sample_every", "sample_prompt", "sample_tokens", "temperature", "top_k", "sample", "log_dir",
    "save_every", "keep_every", "device", "dtype", "compile"}

def check_same_training(checkpoint, cfg, fingerprint):
    """Raise UserError unless this command continues the run in log_dir.

    The data and all constants must be the same, except that max_steps may grow, and the constants
    in NOT_COMPARED may differ.
    """
    # A constant that was added after the run began is assumed to have had its default value
    before, now = asdict(Config()) | checkpoint["constants"], asdict(cfg)
    # The constant `data` is only a path. The entry "data" of a checkpoint is the fingerprint of the
    # data, so compare fingerprints instead
    before["data"], now["data"] = checkpoint["data"], fingerprint
    changed = {name for name in now if before[name] != now[name]} - NOT_COMPARED
    if cfg.max_steps > before["max_steps"]:
        changed.discard("max_steps")
    values = [f"{name} was {before[name]!r}, is {now[name]!r}" for name in sorted(changed)]
    if values:
        raise UserError(f"The run in {cfg.log_dir}/ is a different one: {'; '.join(values)}. Undo "
                        "this change, or choose a different --log_dir.")

def check_code_of_finished_run(checkpoint, cfg):
    """Raise UserError if the run in log_dir was finished by different code.

    The edited code would evaluate a model that it has not trained. (Edited code may continue a run
    that has steps left. find_warnings() reports this.)
    """
    no_steps_left = checkpoint["state"]["step"] >= cfg.max_steps
    if no_steps_left and is_of_other_code(checkpoint.get("code")):
        raise UserError(f"The run in {cfg.log_dir}/ is finished, and train_gpt2.py was edited "
                        "afterwards: undo the edit, or choose a different --log_dir.")

# ---- The run's folder. Killed runs and full disks do not damage it, and no run overwrites another
def lock_run_folder(log_dir):
    """Reserve log_dir for this run. Return a lock, which is held as long as it is referenced.

    Only rank 0 writes to log_dir, so only rank 0 takes the lock; the other processes get None.
    Raise UserError if another run uses log_dir.
    """
    return lock_folder(Path(log_dir)) if rank() == 0 else None

class RunFolder:
    """The files in log_dir. Only rank 0 writes them.

    One background thread writes checkpoints and plots.

    fingerprint: identifies the training data. lock: from lock_run_folder(); it is held for the
    lifetime of this object.
    """
    def __init__(self, cfg, fingerprint, lock=None):
        self.cfg, self.path = cfg, Path(cfg.log_dir)
        self.fingerprint, self.lock = fingerprint, lock
        self.starts = []          # for run.json: one dict per start, with its time, step and so on
        self.log = None           # log.txt, once begin() has opened it
        self.executor = ThreadPoolExecutor(max_workers=1)
        self.last_save = None     # Future of the latest save, kept after it has finished
        self.last_plot = None     # Future of the latest plot
        self.saved_step = None    # the step of the newest checkpoint, or None if there is none
        self.host_buffers = {}    # host memory of the latest save, reused by the next one

    def begin(self, step, continues, warnings=()):
        """Remove or rename outdated files, record this start in run.json, and open log.txt.

        step: the step from which this start continues. Lines about this step and later ones are
        removed from log.txt.
        continues: whether a run is resumed.
        """
        if rank() != 0:
            return
        remove_unfinished(self.path)  # files that a killed run was writing
        for other_step, path in find_checkpoints(self.path).items():
            # A resumed run starts from its newest undamaged checkpoint. So newer ones are damaged.
            # (A new run has no checkpoints)
            if other_step > step:
                self.set_aside(path.name)
        if not continues:  # there may be a log, if an earlier run ended before its first save
            self.set_aside("log.txt")
        if not continues or step < self.cfg.max_steps:
            self.set_aside("hf")  # the exported model, if there is one, becomes outdated
        if continues and (self.path / "run.json").exists():
            self.starts = read_run_json(self.path)["starts"]
        self.starts.append({
            "time": time.ctime(), "step": step, "command": sys.argv, "code": code_checksum(),
            "torch": torch.__version__, "python": sys.version, "warnings": list(warnings)})
        self.write_run()
        self.log = truncate_and_open_log(self.path / "log.txt", step)
        if continues:
            self.saved_step = step

    def set_aside(self, name):
        """Rename an outdated or damaged file or folder, if it exists, instead of overwriting it."""
        old = self.path / name
        if old.exists():
            old.rename(f"{old}_before_{time.strftime('%Y%m%d-%H%M%S')}")

    def close(self):
        """Wait for a save in progress, and close log.txt."""
        self.executor.shutdown()
        if self.log:
            self.log.close()

    def write_run(self, result=None):
        """Write run.json: constants, data, starts and, when the run ends or fails, the result."""
        text = json.dumps({"constants": asdict(self.cfg), "data": self.fingerprint,
                           "starts": self.starts, "result": result}, indent=2)
        if rank() == 0:
            write_whole(self.path / "run.json", lambda file: file.write(text.encode()))

    def save(self, state):
        """Save `state` in the background.

        Training waits only for the previous save and for the copy to host memory. Nothing is saved
        if this step has a checkpoint already, nor at step 0 of a run from scratch, since the seed
        determines the initial weights.
        """
        if rank() != 0:
            return
        # The previous save may still be running. It reads host_buffers, which copy_to_host() will
        # overwrite, and sets saved_step at its end. (If it fails, it prints why)
        self.wait_for_save()
        if state.step == self.saved_step or (state.step == 0 and self.cfg.init_from == "scratch"):
            return
        with contextlib.suppress(OSError):
            os.fsync(self.log.fileno())  # a step's log must be on disk before its checkpoint
        checkpoint = checkpoint_of(state, self.cfg, self.fingerprint)
        check_can_be_saved(checkpoint["state"])
        checkpoint, self.host_buffers = copy_to_host(checkpoint, self.host_buffers)
        self.last_save = self.executor.submit(self.write_checkpoint, checkpoint)

    def wait_for_save(self):
        """Wait until the latest save has finished. Return its error message, or ""."""
        return self.last_save.result() if self.last_save else ""

    def write_checkpoint(self, checkpoint):
        """Write and verify a checkpoint, then delete older ones that need not be kept.

        Return "", or an error message if the checkpoint cannot be written.
        """
        step, start = checkpoint["state"]["step"], time.perf_counter()
        path = self.path / f"checkpoint_{step:05d}.pt"
        try:
            # write_whole() verifies the new file before it gives the file its final name
            write_whole(path, lambda file: torch.save(checkpoint, file), verify=read_checkpoint)
        except (OSError, RuntimeError, UserError) as e:
            while e.__context__:  # torch.save raises a RuntimeError that hides an OSError
                e = e.__context__
            print0(f"!!! NOT SAVED at step {step}: {summary_of(e)}. Earlier checkpoints are kept.")
            return summary_of(e)
        self.saved_step, seconds = step, time.perf_counter() - start
        print0(f"{step:5d}/{self.cfg.max_steps} saved {path} in {seconds:.1f} s")
        self.prune(step)
        return ""

    def prune(self, step):
        """Delete checkpoints that need not be kept, now that the one for `step` has been written.

        Keep the two newest checkpoints, those at multiples of keep_every, and the one with the
        lowest validation loss.
        """
        found = find_checkpoints(self.path)  # {step: path}
        older = [other_step for other_step in found if other_step < step]  # the newest step first
        losses = {other_step: loss for other_step, loss in read_metrics(self.path)["val"]
                  if other_step in found}
        keep = {step, *older[:1]}  # the two newest
        if losses:
            keep.add(min(losses, key=losses.get))  # the one with the lowest loss
        every = self.cfg.keep_every
        keep |= {other_step for other_step in older if every and other_step % every == 0}
        for other_step in set(older) - keep:
            with contextlib.suppress(OSError):
                found[other_step].unlink()

    def plot_in_background(self):
        """Plot in the background if matplotlib is installed. Cancel a plot that is still queued."""
        if rank() == 0 and importlib.util.find_spec("matplotlib"):
            if self.last_plot:
                self.last_plot.cancel()
            self.last_plot = self.executor.submit(plot_curves, self.path)

def copy_to_host(content, old_buffers):
    """Return a copy of nested content with its tensors in host memory, and a dict of these tensors.

    The dict serves two purposes. Within this copy, it ensures that tied weights, which are the same
    tensor, are copied and saved only once. The next copy gets it as old_buffers, and uses its
    memory again, which is faster than allocating new memory. The keys of the dict are the address,
    shape, stride and dtype of the original tensors.

    old_buffers: the dict of the previous copy, or {}.
    """
    buffers = {}

    def copied(part):
        if isinstance(part, dict):
            return {key: copied(value) for key, value in part.items()}
        if isinstance(part, (list, tuple)):
            return (tuple if isinstance(part, tuple) else list)(map(copied, part))
        if isinstance(part, np.number):  # torch.load(weights_only=True) cannot load it
            return part.item()
        if not torch.is_tensor(part):
            return part
        key = (part.data_ptr(), part.shape, part.stride(), part.dtype)
        if key not in buffers:  # otherwise this tensor is tied to one that has been copied
            buffer = old_buffers.get(key)
            buffer = torch.empty_like(part, device="cpu") if buffer is None else buffer
            buffers[key] = buffer.copy_(part)
        return buffers[key]
    return copied(content), buffers

def truncate_and_open_log(path, step):
    """Open log.txt for appending, after removing the lines of `step` and of later steps.

    These steps will be repeated. Everything after the first such line is removed.
    """
    file = open(path, "ab", buffering=0)  # each line is visible at once
    kept = 0  # number of bytes
    for line in path.read_bytes().splitlines(keepends=True):
        is_complete = line.endswith(b"\n")  # a power cut may have left half a line
        # A line that does not match, for example a user's note, has no step
        match = re.match(rb"(\d+) .+ (-?[\d.]+(e-\d+)?|nan|-?inf)$", line)
        if not is_complete or (match and int(match[1]) >= step):
            break
        kept += len(line)
    file.truncate(kept)
    return file

def read_run_json(folder):
    """Return the content of a run's run.json."""
    return json.loads(Path(folder, "run.json").read_text())

def read_metrics(folder):
    """Return {metric: [(step, value), ...]} from a run's log.txt, as a defaultdict(list)."""
    path, metrics = Path(folder, "log.txt"), defaultdict(list)
    text = path.read_text(errors="replace") if path.exists() else ""
    # Leave out lines with nan or inf, which cannot be plotted
    for step, metric, value in re.findall(r"^(\d+) (.+) (-?[\d.]+(?:e-\d+)?)$", text, re.M):
        metrics[metric].append((int(step), float(value)))
    return metrics

# ---- Checks for easily made mistakes that would otherwise go unnoticed, most of them in edits
def check_parameters(raw_model, optimizers):
    """Raise UserError unless each parameter has an initial value and is in one optimizer group.

    A frozen parameter need not be in a group.
    """
    # {id of a parameter: the number of groups that contain it}
    n_groups = Counter(id(p) for optimizer in optimizers for group in optimizer.param_groups
                       for p in group["params"])
    for name, p in raw_model.named_parameters():
        largest = p.abs().max()
        if not largest.isfinite():
            raise UserError(f"{name} is not finite before the first step: initialize it.")
        # Divide by 1000, because an edit may have multiplied the mark, for example by 0.02
        if largest >= LOWEST_MARK / 1000:
            raise UserError(f"{name} has no initial values. Perhaps an edit changes it, or copies "
                            "it from another weight, before init_weights() has drawn it. Then "
                            "move this edit to the end of GPT.__init__. If its layer was created "
                            "after init_weights(), create it without draw_later(). A weight from "
                            "torch.empty() must be initialized.")
        if n_groups[id(p)] > 1 or (n_groups[id(p)] == 0 and p.requires_grad):
            raise UserError(f"{name} is in {n_groups[id(p)]} optimizer groups: put it into one in "
                            "configure_optimizers(), or freeze it (requires_grad=False).")

def check_B_divides_rows(cfg, step):
    """Raise UserError if the rows of a step are not a multiple of B * processes."""
    rows = rows_of_step(cfg, step)
    if rows < 1 or rows % (cfg.B * world_size()):
        raise UserError(f"Step {step} has {rows} rows. rows_before() must give each step a "
                        f"multiple of B * processes = {cfg.B} * {world_size()}. Edit it, or lower "
                        "--B.")

def check_can_be_saved(attributes):
    """Raise UserError if a checkpoint cannot store an attribute of State.

    attributes: what state.state_dict() returned.
    """
    for name, value in attributes.items():
        if (bad := unsavable_part(value)) is not None:
            raise UserError(f"State.{name} holds an object of type {type(bad).__name__}, which a "
                            "checkpoint cannot store. Use numbers, strings, tensors, lists of "
                            "these, dicts with numbers or strings as keys, or an object with "
                            "state_dict() and load_state_dict().")

def unsavable_part(content):
    """Return the first part of nested content that cannot be loaded with weights_only=True.

    Return None if there is no such part.
    """
    if isinstance(content, dict):
        for key in content:
            if not isinstance(key, (bool, int, float, str)):
                return key
        content = list(content.values())
    if isinstance(content, (list, tuple)):
        bad_parts = (unsavable_part(part) for part in content)
        return next((bad for bad in bad_parts if bad is not None), None)
    # A subclass of int or str, such as an Enum, cannot be loaded. So compare the exact type
    if content is None or type(content) in (bool, int, float, str, torch.dtype):
        return None
    # np.number is allowed, because copy_to_host() turns it into a Python number before the save
    return None if isinstance(content, (torch.Tensor, np.number)) else content

# ---- Monitoring. log.txt is for programs, stdout for people. Each step is checked before it is
# reported, and the weights before they are saved
def report(run, step, metric, value, note="", print_always=False):
    """Append a value to log.txt, which plot_curves() reads, and print it every print_every steps.

    note: text to print after the value. print_always: print it at any step.
    """
    # Only for edits: train_step() may call report(), even during the trial steps of
    # steps_that_fit(), which have no folder
    if run.folder is None:
        return
    write_log(run, step, metric, value)
    if print_always or (run.cfg.print_every and step % run.cfg.print_every == 0):
        print0(f"{step:5d}/{run.cfg.max_steps} {metric} {formatted(value, 4)}{note}")

def formatted(value, digits):
    """Return a number as text, in scientific notation if it is below 0.001."""
    return f"{value:.{digits}e}" if 0 < abs(value) < 1e-3 else f"{value:.{digits}f}"

def write_log(run, step, metric, value):
    """Append a line to log.txt."""
    if rank() == 0:
        with contextlib.suppress(OSError):  # a full disk
            run.folder.log.write(f"{step} {metric} {formatted(value, 6)}\n".encode())

def gather_from_ranks(part_of_loss, norm, signal_came):
    """Return three lists with one entry per process: its part of the loss, its norm, signal_came.

    signal_came: whether the process has received a signal.
    """
    # The CPU waits for the GPU in tolist(). full_like() creates the flag signal_came on the GPU,
    # since copying it there would make the CPU wait a second time
    mine = torch.stack((part_of_loss, norm, torch.full_like(part_of_loss, signal_came)))
    everyones = [mine.clone() for _ in range(world_size())]
    if world_size() > 1:
        dist.all_gather(everyones, mine)
    return torch.stack(everyones).T.tolist()

def record_duration(run, seconds):
    """Append the duration of a step to run.step_seconds.

    Also add it to State.minutes_trained, unless it is the first step after a start. That step may
    consist mostly of compilation.
    """
    is_first_step = not run.step_seconds
    if not is_first_step:
        run.state.minutes_trained += seconds / 60
    run.step_seconds.append(seconds)

def check_step(run, step, loss, norms):
    """If processes disagree or the model has diverged, write this to run.json and raise UserError.

    norms: the norm of the gradient in each process.
    """
    fail_if(problem_with_norms(step, norms), run)
    fail_if(problem_with_loss(run, step, loss, norms[0]), run)

def check_ranks_have_same_weights(run):
    """If the norms of the processes' weights differ, write this to run.json and raise UserError."""
    fail_if(problem_with_weights(run.state.raw_model), run)

def fail_if(problem, run):
    """If `problem` is not None, write this message to run.json and raise UserError."""
    if problem:
        run.folder.write_run({"failed": problem})
        raise UserError(problem)

def problem_with_norms(step, norms):
    """Return a message if the processes' gradients have different norms, or None."""
    # 1e-5 allows for rounding, since different kinds of GPU may add in a different order
    if max(norms) - min(norms) > 1e-5 * max(norms):
        return (f"In step {step} the gradients of the processes have norms from "
                f"{min(norms):.7g} to {max(norms):.7g}, so they would train different models. "
                "Whatever an edit adds to gradients must be the same in all processes, and a "
                "parameter that one of them does not use (for example an idle expert) needs a "
                "gradient of zeros.")
    return None

@torch.no_grad()
def problem_with_weights(raw_model):
    """Return a message if the processes have different weights, or None.

    They differ if, for example, each process decides from its own loss whether to skip a step.
    problem_with_norms() cannot detect this, because all processes have the same gradients.
    """
    if world_size() == 1:
        return None
    norm = nn.utils.get_total_norm(list(raw_model.parameters()))
    norms = [torch.empty_like(norm) for _ in range(world_size())]
    dist.all_gather(norms, norm)
    norms = torch.stack(norms).tolist()
    if max(norms) - min(norms) > 1e-5 * max(norms):  # allows for rounding
        return (f"The weights of the processes have norms from {min(norms):.7g} to "
                f"{max(norms):.7g}, so they train different models. Base the decision to "
                "skip an update on values that are the same in all processes.")
    return None

def problem_with_loss(run, step, loss, norm):
    """Return a message if the loss or the norm shows that the model has diverged, or None."""
    scaler = run.state.scaler
    # In float16 an infinite norm merely causes the step to be skipped. It is an error only once the
    # loss scale has fallen to 0
    norm_is_fine = math.isfinite(norm) or (scaler.is_enabled() and scaler.get_scale() > 0)
    if math.isfinite(loss) and abs(loss) < 1e4 and norm_is_fine:
        return None
    return (f"Step {step} has loss {loss:g} and gradient norm {norm:g}: the model "
            "has diverged. Most often --max_lr is too high. Other causes are the data (ids beyond "
            "the vocabulary, zeros), float16, an edit (for example one that uses or changes the "
            "padding's logits, which are -inf), or cuDNN's attention, which "
            "TORCH_CUDNN_SDPA_DEPRIORITIZED=1 avoids. To start again from before this step, use "
            f"--init_from={run.cfg.log_dir}/checkpoint_....pt and a different --log_dir.")

def report_step(run, step, loss, norm):
    """Report the loss and the gradient norm of a step."""
    cfg, seconds = run.cfg, run.step_seconds[-1]
    rate = rows_of_step(cfg, step) * cfg.T / seconds
    # Use the median, because some steps take longer: the first one, which may include compilation,
    # and those that wait for another program. (After two steps, median_low() returns the shorter of
    # the two durations. median() would return their mean)
    left = statistics.median_low(run.step_seconds) * (cfg.max_steps - step - 1)
    report(run, step, "train", loss,
           note=f" lr {get_lr(step, cfg):.2e} norm {norm:.2f} {seconds * 1e3:.0f} ms "
                f"{rate:,.0f} tok/s {datetime.timedelta(seconds=round(left))} left")
    write_log(run, step, "norm", norm)
    warn_of_slow_steps(run)

def warn_of_slow_steps(run):
    """Warn once if the median of the last 20 CPU steps is over twice the fastest of the last 50.

    OpenMP threads wait for each other. If one of them shares its core with another program, all of
    them wait. With two threads on two cores, one other busy process slows a step with the preset
    SMALL from 35 ms to 154 ms. With one thread, the step takes 56 ms (tests/measured/busy.txt).
    """
    threads, recent = torch.get_num_threads(), list(run.step_seconds)[-20:]
    if run.warned_slow or run.device.type != "cpu" or threads == 1 or len(recent) < 20:
        return
    slowdown = statistics.median(recent) / min(run.step_seconds)
    if slowdown > 2:
        run.warned_slow = True
        print0(f"Steps take {slowdown:.1f} times as long as the fastest one, probably because "
               "other programs use the same cores. Stop them, or press Ctrl-C and resume with "
               f"fewer threads: put OMP_NUM_THREADS={threads - 1} before the same command.")

def validate(run):
    """Report the validation loss and the training time in minutes."""
    loss, step = validation_loss(run, run.val_loader), run.state.step
    bits = loss * run.tokens_per_byte / math.log(2)
    report(run, step, "val", loss, note=f" ({bits:.4f} bits per byte)", print_always=True)
    write_log(run, step, "minutes", run.state.minutes_trained)
    run.validated_step = step

def find_warnings(run, checkpoint):
    """Return the warnings about this start of a run.

    There are two, both about edits: the model's loss is not the cross-entropy, and edited code
    continues the run. RunFolder stores them with the start in run.json. At the end, result_of()
    collects those of all starts.
    """
    warnings = [warning_about_loss(run)]
    if checkpoint and is_of_other_code(checkpoint.get("code")):
        warnings.append(f"train_gpt2.py was edited: from step {run.state.step} on, this run uses "
                        "different code.")
    return [warning for warning in warnings if warning]

@torch.no_grad()
def warning_about_loss(run):
    """Return a warning if the model's loss in eval mode is not the cross-entropy."""
    x, y = run.val_loader.batch(0, 1, run.device)
    with run.autocast(), torch.compiler.set_stance("force_eager"):  # do not compile for one row
        logits, loss = run.state.eval_model(x, y)
    excess = (loss - F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())).item()
    if abs(excess) > 1e-4 * max(1.0, loss.item()):
        return ("val is not the cross-entropy of the logits: on one row it differs by "
                f"{excess:+.6f}. Put a term that only training should minimize under "
                "`if self.training`.")

def plot_curves(folder):
    """Plot the values in log.txt against the number of tokens, and save the figure as curves.png.

    The losses share one panel. Every other name in log.txt, except minutes, has its own panel.
    """
    from matplotlib.figure import Figure  # not pyplot, which needs a display
    constants = read_run_json(folder)["constants"]
    cfg = Config(**{name: constants[name] for name in asdict(Config()).keys() & constants.keys()})
    unit = "byte" if cfg.encoding == "bytes" else "token"
    metrics, panels = read_metrics(folder), defaultdict(list)
    metrics.pop("minutes", None)
    for name in metrics:
        title = f"loss, nats per {unit}" if name in ("train", "val") else name
        panels[title].append(name)
    figure = Figure(figsize=(6.5, 3.7 * len(panels)), layout="constrained")
    for i, (title, names) in enumerate(panels.items()):
        axis = figure.add_subplot(len(panels), 1, i + 1)
        for name in names:
            points = np.array([(rows_before(cfg, step) * cfg.T / 1e6, value)
                               for step, value in metrics[name]])
            # For smoothing, replace every n points with their mean. Drop an incomplete last group
            n = 1 + len(points) // 200
            groups = points[:len(points) // n * n].reshape(-1, n, 2)
            tokens, values = groups.mean(axis=1).T
            axis.plot(tokens, values, label=f"{name}, now {formatted(values[-1], 3)}")
            if name == "train":  # cut off the high losses of the first steps
                axis.set_ylim(top=1.05 * np.percentile(values, 95))
        axis.set(xlabel="million tokens", ylabel=title)
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
    write_whole(Path(folder, "curves.png"), lambda file: figure.savefig(file, dpi=120))

# For samples, use any attention kernel except cuDNN's, which spends up to half a second planning
# for each new sequence length. (choose_attention_kernels() has chosen the kernels for training)
@sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
def sample_text(model, encoding, cfg, seed):
    """Return sample_prompt and the model's continuation, which stops at <|endoftext|>."""
    device = next(model.parameters()).device
    prompt = encoding.encode_ordinary(cfg.sample_prompt) or [encoding.eot_token]
    tokens = model.generate(
        torch.tensor([prompt], device=device), cfg.sample_tokens, temperature=cfg.temperature,
        top_k=cfg.top_k, generator=torch.Generator(device).manual_seed(seed))[0].tolist()
    if encoding.eot_token in tokens[len(prompt):]:
        tokens = tokens[:tokens.index(encoding.eot_token, len(prompt))]
    return encoding.decode_bytes(tokens).decode("utf-8", errors="backslashreplace")

def print_sample(run):
    """Print a sample from eval_model."""
    if rank() == 0:
        cfg, state = run.cfg, run.state
        with run.autocast():
            text = sample_text(state.eval_model, run.encoding, cfg, seed=cfg.seed + state.step)
        print0(f"--- sample at step {state.step} ---\n{text}\n---")

def sample_only(cfg, start, device):
    """Print cfg.sample samples from the model with the weights in `start`.

    They are computed in the dtype of the weights, float32, since speed does not matter here.
    """
    encoding = get_encoding(cfg.encoding)
    model = build_model(cfg, gpt_config_of_run(cfg, start.constants_from)).to(device)
    load_weights(model, start.weights)
    print0(f"Samples from {start.constants_from.source}:")
    for i in range(cfg.sample):
        print0(sample_text(model, encoding, cfg, seed=cfg.seed + i) + "\n---")

def prepared_hellaswag(cfg, model, encoding):
    """Return HellaSwag's questions as rows of tokens that fit the model's context.

    Return None if HellaSwag is switched off or not available.
    """
    if not cfg.hellaswag_every:
        return None
    import hellaswag  # here, since only this evaluation needs hellaswag.py
    return hellaswag.prepare_on_all_ranks(model, encoding.encode_ordinary)

def hellaswag_score(run):
    """Return eval_model's acc_norm on HellaSwag. evaluate() shares the work among the processes."""
    import hellaswag
    with run.autocast():
        return hellaswag.evaluate(run.state.eval_model, run.hellaswag_data).acc_norm

# ---- The end of a run: save the last step, export a model and record the result
def finish(run, stopped):
    """Save the last step. Unless a signal stopped the run, export a model and record the result."""
    cfg, step = run.cfg, run.state.step
    # Only for edits: if you add a `break` to train(), the last step may not have been validated
    if step < cfg.max_steps and not stopped and run.validated_step != step:
        validate(run)
    save_last_step(run)
    if stopped:
        print0(f"Stopped by a signal after {step} steps. To resume the run, repeat the command.")
    elif rank() == 0:
        export(run)
        print0(closing_words(cfg, step))
        result = result_of(run)
        run.folder.write_run(result)
        print_result(result)

def save_last_step(run):
    """Make sure that the run can be resumed from the current step. Raise UserError if it cannot."""
    check_ranks_have_same_weights(run)
    run.folder.save(run.state)
    error = run.folder.wait_for_save()
    if error:
        raise UserError(f"Step {run.state.step} is not saved ({error}): free some space, and "
                        "repeat the command.")

def closing_words(cfg, step):
    """Return what to tell the user at the end of a run."""
    if step < cfg.max_steps:  # Only for edits: if you add a `break` to train(), it may end early
        return (f"Ended after {step} of {cfg.max_steps} steps. To resume the run, repeat the "
                "command.")
    if cfg.max_steps == 0:
        return "Evaluated without training, since max_steps is 0."
    return (f"Done. For samples: python train_gpt2.py --sample=3 --log_dir={cfg.log_dir}\n"
            "To train longer, raise --max_steps.")

def result_of(run):
    """Return a run's result as {name: value}.

    It holds the last value of each metric in log.txt, and totals such as the number of tokens.
    """
    cfg, state, metrics = run.cfg, run.state, read_metrics(run.folder.path)
    result = {metric: points[-1][1] for metric, points in metrics.items()}
    if "val" in result:
        bits = result["val"] * run.tokens_per_byte / math.log(2)
        step, loss = min(metrics["val"], key=lambda point: point[1])
        result |= {"bits_per_byte": round(bits, 6), "lowest_val": loss, "lowest_step": step}
    result |= {"steps": state.step, "tokens": state.tokens,
               "parameters": sum(p.numel() for p in state.raw_model.parameters())}
    if run.step_seconds:
        tokens = rows_of_step(cfg, state.step - 1) * cfg.T
        result["tokens_per_second"] = round(tokens / statistics.median_low(run.step_seconds))
    if run.device.type == "cuda":
        result["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    warnings = [warning for entry in run.folder.starts for warning in entry.get("warnings", [])]
    warnings.append(warning_about_time(cfg, state, n_starts=len(run.folder.starts)))
    warnings = [warning for warning in dict.fromkeys(warnings) if warning]
    return result | ({"warnings": warnings} if warnings else {})

def warning_about_time(cfg, state, n_starts):
    """Return a warning if the training of a run with `minutes` was over 10% longer or shorter.

    Another program may have slowed the run down. Or an edit makes later steps slower, for example
    because the batch grows: the trial steps of steps_that_fit() are like the first steps of a run.
    """
    if not cfg.minutes or state.step < cfg.max_steps:
        return None
    ratio = state.minutes_trained / cfg.minutes
    # State.minutes_trained leaves out one step per start, which is n_starts / step of all steps.
    # Allow for this, too
    if abs(ratio - 1) < 0.1 + n_starts / state.step:
        return None
    return (f"Training took {state.minutes_trained:.3g} minutes instead of minutes="
            f"{cfg.minutes:g}, because its steps were {'slower' if ratio > 1 else 'faster'} than "
            "the trial steps. Compare this run with others at equal --max_steps, not at equal "
            "--minutes.")

def print_result(result):
    """Print a result, one name and value per line, followed by its warnings."""
    lines = [f"{name:17} {value}" for name, value in result.items() if name != "warnings"]
    print0("\n".join(lines + [f"!!! {warning}" for warning in result.get("warnings", [])]))

def export(run):
    """Export the model of path_of_checkpoint_to_use() to log_dir/hf.

    If that is not possible, print the reason.
    """
    path = run.folder.path
    try:
        checkpoint_path = path_of_checkpoint_to_use(path)
        if checkpoint_path:
            checkpoint = read_checkpoint(checkpoint_path)
        else:  # with max_steps=0, a new model has no checkpoint (see RunFolder.save)
            checkpoint = checkpoint_of(run.state, run.cfg, run.folder.fingerprint)
        weights = weights_in_checkpoint(checkpoint, str(checkpoint_path or "the model"))
        # Build the model in the same way as for training. (Only for edits: build_model() may add
        # something to the GPT, which GPT.from_pretrained() would leave out)
        model = build_model(run.cfg, run.state.raw_model.config)
        load_weights(model, weights)
        save_hugging_face(model, path / "hf", run.encoding)
        print0(f"exported {weights.spec.source} to {path / 'hf'}/, for transformers and "
               "hellaswag.py")
    except Exception as e:  # for example, transformers may be missing
        print0(f"Not exported: {summary_of(e)}.")

# ---- Hugging Face. A model is read or exported only if transformers computes the same logits.

# Hugging Face's GPT-2 stores these matrices as (in, out), and nn.Linear as (out, in)
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")

def gpt_from_hugging_face(name):
    """Return the GPT in a Hugging Face folder or hub repository.

    Raise UserError if it cannot be loaded or does not return the same logits as transformers.
    """
    try:
        import transformers
        transformers.logging.disable_progress_bar()
        hf_model, info = transformers.GPT2LMHeadModel.from_pretrained(
            name, output_loading_info=True)
        c = hf_model.config
        model = GPT(GPTConfig(block_size=c.n_positions, n_vocab=c.vocab_size, n_layer=c.n_layer,
                              n_head=c.n_head, n_embd=c.n_embd))
        source, target = hf_model.state_dict(), model.state_dict()
        if info["missing_keys"]:  # transformers has given these weights random values
            raise ValueError(f"it lacks {min(info['missing_keys'])}")
        if unknown := source.keys() - target.keys():
            raise ValueError(f"GPT in train_gpt2.py has no {min(unknown)}")
        for key, weight in source.items():
            weight = weight.t() if key.endswith(TRANSPOSED) else weight
            # target[key] shares its memory with the model. Only its first rows are overwritten,
            # since our embedding is padded
            target[key][:len(weight)].copy_(weight)
        check_same_logits(model, hf_model, end_of_text=c.vocab_size - 1)
    except Exception as e:  # reading files and downloading may raise any exception
        raise UserError(f"init_from={name} is neither a .pt file nor a run's folder, and it cannot "
                        f"be loaded as a Hugging Face GPT-2 ({summary_of(e)}): check the name."
                        ) from None
    return model

def save_hugging_face(model, folder, encoding=None):
    """Write the model and its tokenizer to a folder that transformers can load.

    Raise UserError if transformers would return different logits or token ids.
    """
    import transformers
    model = copy.deepcopy(model).to("cpu")  # check_same_logits() compares on the CPU
    c = model.config
    end = encoding.eot_token if encoding else c.n_vocab - 1
    hf_model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=c.n_vocab, n_positions=c.block_size, n_layer=c.n_layer, n_head=c.n_head,
        n_embd=c.n_embd, bos_token_id=end, eos_token_id=end, pad_token_id=end,
        n_ctx=c.block_size))  # llama.cpp's converter requires n_ctx
    hf_model.generation_config.max_length = c.block_size  # otherwise a pipeline exceeds the context
    weights = {}
    for key, weight in model.state_dict().items():
        if key in ("transformer.wte.weight", "lm_head.weight"):
            weight = weight[:c.n_vocab]
        weights[key] = weight.t() if key.endswith(TRANSPOSED) else weight
    try:
        hf_model.load_state_dict(weights)
        check_same_logits(model, hf_model, end)
        tokenizer = encoding and hugging_face_tokenizer(encoding, c.block_size)
    except (RuntimeError, ValueError) as e:
        raise UserError("transformers would give different results "
                        f"({summary_of(e)})") from None
    transformers.logging.disable_progress_bar()
    hf_model.save_pretrained(folder, max_shard_size="50GB")  # in one file
    if encoding:
        tokenizer.save_pretrained(folder)

@torch.no_grad()
def check_same_logits(ours, hf_model, end_of_text):
    """Raise ValueError if our model and a Hugging Face model return different logits.

    Both models must be on the CPU.
    """
    c = ours.config
    idx = torch.randint(c.n_vocab, (1, c.block_size), generator=torch.Generator().manual_seed(0))
    # Put an end-of-text token in the middle. If an edit stops attention there, the logits differ,
    # because transformers' model has no such rule
    idx[0, c.block_size // 2] = end_of_text
    theirs = hf_model.float().eval()(idx).logits
    differences = (ours(idx)[0] - theirs).norm(dim=-1) / theirs.norm(dim=-1)  # (1, T)
    if not differences.max() < 1e-3:  # also true for NaN
        raise ValueError(f"logits differ by {differences.max():.1%}")

# ---- Checkpoints from earlier versions of this script
def converted_to_todays_format(checkpoint):
    """Convert a checkpoint to the current format, and return it.

    A checkpoint has no version number. Its age is inferred from its entries. Each step converts one
    format to the next newer one, so the oldest checkpoints go through all steps.
    """
    if "model" in checkpoint:  # written on or before 23 November 2026
        checkpoint = convert_entries(checkpoint)
    if "state" not in checkpoint:  # written on or before 24 November 2026
        checkpoint = move_into_state(checkpoint)
    # This changes optimizer groups that were written on or before 25 November 2026
    rename_to_initial(checkpoint["state"].get("optimizers", []))
    # Until 27 November 2026, GPTConfig also contained the number of rows of the embedding, which is
    # padded(n_vocab)
    checkpoint["gpt_config"].pop("vocab_size", None)
    # Until the same day, State.minutes_trained was called minutes
    state = checkpoint["state"]
    if "minutes_trained" not in state:
        state["minutes_trained"] = state.pop("minutes", 0.0)
    return checkpoint

def convert_entries(checkpoint):
    """Rename entries of the oldest format, and add the number of tokens.

    In this format, there was no entry "state": each attribute of State was an entry of the
    checkpoint itself. This function does not change that. move_into_state() does.
    """
    checkpoint = dict(checkpoint)
    # "model" held the weights of eval_model. If an edit averaged the weights, there was another
    # entry, "trained", with those of raw_model
    checkpoint["eval_model"] = checkpoint.pop("model")
    checkpoint["raw_model"] = checkpoint.pop("trained", checkpoint["eval_model"])
    checkpoint |= checkpoint.pop("numbers", {})  # the numbers in State, such as `step`
    names = checkpoint.pop("optimizer_names", [])
    for optimizer, name in zip(checkpoint.get("optimizers", []), names):
        optimizer["class"] = name
    # Tokens were not counted yet
    checkpoint["tokens"] = checkpoint["step"] * checkpoint["constants"]["total_batch_size"]
    return checkpoint

def move_into_state(checkpoint):
    """Move the entries that are attributes of State into a new entry, "state"."""
    not_in_state = ("eval_model", "gpt_config", "encoding", "constants", "data", "code")
    state = {name: value for name, value in checkpoint.items() if name not in not_in_state}
    rest = {name: checkpoint[name] for name in not_in_state if name in checkpoint}
    return rest | {"state": state}

def rename_to_initial(optimizers):
    """Rename the entries "as_built" and "in_code" of optimizer groups to "initial"."""
    for optimizer in optimizers:
        for group in optimizer.get("param_groups", []):
            # A run that several versions have continued may have several of these entries. The
            # newest one, which is the last one in this list, counts
            entries = [group.pop(name) for name in ("as_built", "in_code", "initial")
                       if name in group]
            if entries:
                group["initial"] = entries[-1]

if __name__ == "__main__":
    main()
