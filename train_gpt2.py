"""Train GPT-2 from scratch, on a CPU or on one or more GPUs.

    python train_gpt2.py    # if no shards exist: train a small GPT on input.txt
    python fineweb.py       # write shards of FineWeb-Edu to edu_fineweb10B/
    torchrun --standalone --nproc_per_node=8 train_gpt2.py    # GPT-2 (124M)
    tail -f log/log.txt     # lines of the form "<step> <metric> <value>"

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
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import sys
import time
import zlib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, get_args

# Limit how long an idle OpenMP thread spins before it yields its core. This must be set before
# torch is imported. While two other processes are busy, a training step of the SMALL preset takes
# 166 ms with this limit and 739 to 873 ms without it (tests/measured/step_cpu.txt).
os.environ["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", "10000")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn as nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402

# fineweb.py tokenizes FineWeb-Edu. It also contains the helpers that all three scripts share
from fineweb import (  # noqa: E402
    UserError, encode, get_encoding, lock_folder, parse_flags, save_tokenizer, summary_of,
    token_dtype, write_whole)

# torchrun starts one process per GPU and gives each a number, its rank. Only rank 0 prints and
# writes files. (Slurm may set WORLD_SIZE but not RANK, in which case there is only one process)
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1

# ---- Constants. --help prints the comment at the end of each line
@dataclass(frozen=True)
class Config:
    """The settings: GPT-2 (124M) with GPT-3's hyperparameters (Brown et al. 2020, table 2.1).

    If edu_fineweb10B contains no shards, and no other `data` is chosen, input.txt is used.
    """
    data: str = "edu_fineweb10B"    # folder of .npy token shards, or a UTF-8 text file
    encoding: str = "gpt2"          # name of a tiktoken encoding, or bytes (needs no download)
    shuffle: bool = True            # shuffle the training data anew in each epoch
    seed: int = 1337                # determines the initial weights, data order and samples
    # The batch: total_batch_size affects training. B affects only memory and speed. If it does not
    # divide the rows per process, total_batch_size / T / processes, it is lowered until it does
    total_batch_size: int = 524288  # tokens per optimizer step, a multiple of T * processes
    B: int = 64                     # micro-batch size: rows per forward pass
    T: int = 1024                   # tokens per row (the context length)
    # The model: n_layer/n_head/n_embd is 12/12/768 for 124M, 24/16/1024 for 350M, 36/20/1280 for
    # 774M and 48/25/1600 for 1.5B
    n_layer: int = 12               # number of blocks
    n_head: int = 12                # attention heads per block
    n_embd: int = 768               # width of the model, a multiple of n_head
    dropout: float = 0.0            # fraction of activations set to 0 in training; GPT-2 used 0.1
    init_from: str = "scratch"      # scratch, gpt2 to gpt2-xl, a .pt file, a run's folder or export
    # The optimizer. GPT-3's max_lr is 6e-4 for 125M, 3e-4 for 350M, 2.5e-4 for 760M, 2e-4 for 1.3B
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: Muon in the blocks, AdamW elsewhere
    max_lr: float = 6e-4            # peak learning rate
    muon_lr_ratio: float = 1.0      # Muon's learning rate divided by AdamW's
    min_lr: float = 6e-5            # learning rate at max_steps
    lr_shape: Literal["cosine", "linear"] = "cosine"  # shape of the decay from max_lr to min_lr
    warmup_steps: int = 715         # steps of linear warmup (375 M tokens, as in GPT-3)
    max_steps: int = 19073          # optimizer steps (10 B tokens); 0 = only evaluate and sample
    epochs: float = 0.0             # passes over the data, which determine max_steps; 0 = off
    weight_decay: float = 0.1       # weight decay of matrices and embeddings
    grad_clip: float = 1.0          # clip the gradient norm to this; 0 = no clipping
    # Monitoring. For the settings that end in _every, 0 means never
    print_every: int = 1            # steps between lines on stdout; log.txt has every step
    eval_every: int = 250           # steps between validations, each of which also saves the run
    keep_every: int = 5000          # also keep the checkpoints at multiples of this
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

# For training on a text file: a small byte-level GPT, sized for two CPU cores
SMALL = dict(
    encoding="bytes", total_batch_size=2048, B=32, T=64, n_layer=3, n_head=4, n_embd=128,
    optimizer="muon", max_lr=7e-3, muon_lr_ratio=2.0, min_lr=0.0, lr_shape="linear",
    warmup_steps=20, max_steps=1600, weight_decay=0.2, print_every=10, eval_every=400,
    val_tokens=131072, hellaswag_every=0, sample_every=800, sample_prompt="\n\n",
    sample_tokens=300, log_dir="log_small", compile=False)

# For fine-tuning pretrained weights (init_from) on a text file
FINETUNE = dict(
    total_batch_size=2048, B=4, max_lr=1e-4, min_lr=0.0, lr_shape="linear", warmup_steps=10,
    epochs=4.0, eval_every=20, keep_every=0, val_tokens=131072, hellaswag_every=0, sample_every=50,
    sample_prompt="\n", sample_tokens=100, log_dir="log_finetune")
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

        return_logits=False returns None in place of the logits, which are still computed. Training
        uses it, because torch.compile allocates a gradient for every tensor that is
        returned. For the logits, this would be 13 GB at B=64.
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
        logits = self.lm_head(x)  # (B, T, number of rows of lm_head)
        # Give the padding a probability of 0. Masking before float() saves 6 GiB. Slicing the
        # padding off before the loss would make a compiled step 5% slower on an H100
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
            # Run the model eagerly, because a compiled one would be compiled again for each length
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
        source = best_checkpoint(source)  # `source` itself, unless it is the folder of a run
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
    and the order of the rows in each shard are random, and new in each epoch. Row numbers continue
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
        self.rows_in_shard = np.array([max(0, len(shard) - 1) // T for shard in shards])
        self.rows_per_epoch = int(self.rows_in_shard.sum())

    def locate(self, row):
        """Return the shard (its index) and the token at which a row begins. row: the row number."""
        # The comments give an example with row 765, T = 8, and shards of 30, 50 and 40 rows
        epoch, in_epoch = divmod(row, self.rows_per_epoch)     # row 45 of the 120 in epoch 6
        shard_order = order_of(len(self.shards), self.shuffle, self.seed, epoch)  # 2, 0, 1 (random)
        sizes = self.rows_in_shard[shard_order]                # 40, 30, 50
        n_before = sizes.cumsum() - sizes                      # the shards begin at 0, 40 and 70
        i = int(n_before.searchsorted(in_epoch, side="right")) - 1  # 1, since 40 <= 45 < 70
        shard = int(shard_order[i])                            # 0
        in_shard = in_epoch - int(n_before[i])                 # row 5 of the 30 in this shard
        row_order = order_of(int(sizes[i]), self.shuffle, self.seed, epoch, shard)
        start = int(row_order[in_shard]) * self.T              # 136, if row_order[5] is 17
        if self.shift:
            # The fractional parts of 0.618 * epoch are spread evenly between 0 and 1
            start = max(0, start - int(0.618 * epoch * self.T) % self.T)
        return shard, start

    def batch(self, row, B, device=torch.device("cpu")):
        """Return inputs x and targets y (x shifted by one token), both (B, T), on `device`.

        They are rows `row` to `row + B - 1`. Raise UserError if a token id is not in the
        vocabulary.
        """
        tokens = np.empty((B, self.T + 1), dtype=np.int64)  # torch cannot use uint16 as indices
        for b in range(B):
            shard, start = self.locate(row + b)
            tokens[b] = self.shards[shard][start:start + self.T + 1]
            lowest, highest = tokens[b].min(), tokens[b].max()
            if lowest < 0 or highest >= self.vocab_size:
                raise UserError(f"{getattr(self.shards[shard], 'filename', 'data')} contains ids "
                                f"from {lowest} to {highest}, but the encoding has the ids 0 to "
                                f"{self.vocab_size - 1}: set --encoding to the encoding that the "
                                "shard was made with.")
        tokens = torch.from_numpy(tokens)
        if device.type == "cuda":  # a copy from pinned memory does not block the CPU
            tokens = tokens.pin_memory()
        tokens = tokens.to(device, non_blocking=device.type == "cuda")
        # x and y overlap, so return copies. validation_loss() changes y in place
        return tokens[:, :-1].clone(), tokens[:, 1:].clone()

@lru_cache(maxsize=4)  # for each loader, holds the order of its shards and of a shard's rows
def order_of(n, shuffle, *key):
    """Return the numbers 0 ... n - 1 in order or, if `shuffle`, shuffled with `key` as the seed.

    RandomState gives the same result in every version of NumPy.
    """
    return np.random.RandomState(key).permutation(n) if shuffle else np.arange(n)

def find_shards(folder):
    """Return the training shards and the validation shards, as two sorted lists of paths."""
    return sorted(Path(folder).glob("*_train_*.npy")), sorted(Path(folder).glob("*_val_*.npy"))

def open_data(cfg, encoding):
    """Return the loaders for training and validation.

    encoding: a tiktoken.Encoding. If a text file contains the characters <|endoftext|>, they become
    the special token that separates documents.
    Raise UserError if the data is unreadable or too short, or if it needs a different encoding.
    """
    is_text = Path(cfg.data).is_file()
    if is_text:  # the last tenth is for validation
        try:
            text = Path(cfg.data).read_bytes().decode("utf-8")
        except UnicodeDecodeError as e:
            raise UserError(f"{cfg.data} is not UTF-8 ({e}): convert it to UTF-8.") from None
        tokens = encode(encoding, text, special=True).astype(token_dtype(encoding))
        cut = int(len(tokens) * 0.9)
        train, val = [tokens[:cut]], [tokens[cut:]]
    else:
        train, val = [[open_shard(path) for path in paths] for paths in find_shards(cfg.data)]
        if not (train and val):
            raise UserError(f"data={cfg.data} is neither a text file nor a folder with "
                            "*_train_*.npy and *_val_*.npy: run fineweb.py, or set a different "
                            "--data.")
        manifest = Path(cfg.data, "manifest.json")  # shards made by other scripts have none
        settings = json.loads(manifest.read_bytes())["settings"] if manifest.exists() else {}
        if settings.get("encoding", cfg.encoding) != cfg.encoding:
            raise UserError(f"The shards in {cfg.data}/ need --encoding={settings['encoding']}, "
                            f"not {cfg.encoding}.")
    train_loader = DataLoaderLite(train, cfg.T, encoding.n_vocab, seed=cfg.seed,
                                  shuffle=cfg.shuffle, shift=cfg.shuffle and is_text)
    val_loader = DataLoaderLite(val, cfg.T, encoding.n_vocab)
    if not (train_loader.rows_per_epoch and val_loader.rows_per_epoch):
        raise UserError(f"{cfg.data} is too short for T={cfg.T}: use more text, or a lower --T.")
    return train_loader, val_loader

def open_shard(path):
    """Return the token ids (N,) of a shard, memory-mapped. Raise UserError if it is damaged."""
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as e:
        raise UserError(f"{path} is not a complete shard ({summary_of(e)}): make it again."
                        ) from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise UserError(f"{path} has shape {tokens.shape} and type {tokens.dtype}: a shard needs "
                        "one dimension and integers, for example uint16.")
    return tokens

# ---- Learning rate and optimizers
def get_lr(step, cfg):
    """Return AdamW's learning rate at a step: linear warmup to max_lr, then decay to min_lr.

    train_step() scales the learning rates of all optimizers by the same factor, so Muon's is always
    muon_lr_ratio times AdamW's.
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

    params: matrices. dtype: the dtype in which newton_schulz() computes.
    """
    def __init__(self, params, lr, weight_decay=0.0, momentum=0.95, dtype=torch.float32):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            momentum, by_shape = group["momentum"], defaultdict(list)
            for p in group["params"]:
                if p.grad is None:  # not used in this step
                    continue
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                average = self.state[p]["momentum_buffer"]  # the running average of the gradient
                average.lerp_(p.grad, 1 - momentum)  # momentum * average + (1 - momentum) * grad
                # Nesterov momentum looks ahead: (1 - momentum) * grad + momentum * average
                ahead = p.grad.lerp(average, momentum).to(self.dtype)
                # c_attn stacks the matrices of query, key and value. Treat each one separately
                n = 3 if p.size(0) == 3 * p.size(1) else 1
                for weight, G in zip(p.chunk(n), ahead.chunk(n)):
                    if G.size(0) > G.size(1):  # wide matrices are cheaper, so transpose tall ones
                        weight, G = weight.mT, G.mT
                    by_shape[G.shape].append((weight, G))
            # Batch matrices of the same shape, so that there are fewer and larger operations
            for (_, longer_side), batch in by_shape.items():
                weights, matrices = zip(*batch)
                # Each weight is a view of p, so changing it in place changes p
                for weight, update in zip(weights, newton_schulz(torch.stack(matrices))):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(longer_side))

def configure_optimizers(model, cfg, muon_dtype=torch.float32):
    """Return [AdamW] or, with optimizer="muon", [AdamW, Muon].

    Muon updates the matrices in the blocks, and AdamW all other parameters. Frozen parameters
    (requires_grad=False) are left out. muon_dtype: the dtype in which Muon orthogonalizes.
    """
    matrices = [p for p in model.transformer.h.parameters() if p.dim() == 2 and p.requires_grad]
    for_muon = matrices if cfg.optimizer == "muon" else []
    taken = set(for_muon)
    others = [p for p in model.parameters() if p.requires_grad and p not in taken]
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
    questions: object = None      # HellaSwag, tokenized (hellaswag.Prepared), or None
    step: int = 0                 # number of steps taken
    best_loss: float = math.inf   # the lowest validation loss
    best_step: int | None = None  # the step at which it was found
    log: object = None            # log.txt, opened for appending; None except on rank 0
    seconds: list = field(default_factory=list)  # duration of each step since the last validation
    stop: bool = False            # set by Ctrl-C, SIGTERM and SIGHUP
    writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=1))
    last_save: object = None      # Future of the last save, which runs in the writer's thread

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
        # The last batch also has B rows, because otherwise the model would be compiled again.
        # Ignore its extra rows, from number n_rows on. In all other batches, this slice is empty
        y[n_rows - row:] = -100
        with run.autocast():
            _, loss = run.model(x, y, return_logits=False)
        n_targets = (y != -100).sum()
        sums += torch.stack((loss * n_targets, n_targets))
    if WORLD_SIZE > 1:
        dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()

def train_step(run):
    """Take one optimizer step. Return the loss, the gradient's norm, and whether to stop training.

    The loss is the mean over the whole batch. The norm is measured before clipping. The CPU waits
    for the GPU only once, at the end. (In float16, it also waits for GradScaler.)
    """
    cfg, rows = run.cfg, run.cfg.total_batch_size // run.cfg.T
    # The row numbers at which this rank's micro-batches begin. Ranks take turns, B rows at a time
    starts = range(run.step * rows + RANK * cfg.B, (run.step + 1) * rows, WORLD_SIZE * cfg.B)
    loss_of_step = torch.zeros((), device=run.device)
    run.ddp_model.train()
    for row in starts:
        x, y = run.train_loader.batch(row, cfg.B, run.device)
        torch.manual_seed(seed_from(cfg.seed, row))  # a resumed run repeats the dropout masks
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
    # If a float16 gradient overflows, GradScaler.step() skips the optimizer that it belongs to.
    # Skip the other one, too, because clipping by an infinite norm has corrupted all gradients
    overflowed = run.scaler.is_enabled() and not norm.isfinite()
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            peak = group.setdefault("initial_lr", group["lr"])  # set at step 0, then saved
            group["lr"] = peak * get_lr(run.step, cfg) / cfg.max_lr
        if not overflowed:
            run.scaler.step(optimizer)
        optimizer.zero_grad()
    run.scaler.update()  # after an overflow, this lowers the loss scale
    run.step += 1
    # Average over the processes. The norm is the same on all. If one received a signal, all stop
    sums = torch.stack((loss_of_step, norm, torch.full_like(norm, run.stop)))
    if WORLD_SIZE > 1:
        dist.all_reduce(sums)
    loss, norm, stopped = (sums / WORLD_SIZE).tolist()
    return loss, norm, stopped > 0

def due(every, run):
    """Return whether to act now: at multiples of `every` (0 = never), and after the last step."""
    return every > 0 and (run.step % every == 0 or run.step == run.cfg.max_steps)

def evaluate(run):
    """Do whatever is due: validate and save, score the model on HellaSwag, and print a sample.

    Save before HellaSwag and the sample, so that nothing is lost if these fail.
    """
    cfg, step = run.cfg, run.step
    if due(cfg.eval_every, run):
        loss = validation_loss(run)
        report(run, step, "val", loss)
        print0(f"{step:5d}/{cfg.max_steps} val {loss:.4f}")
        if run.seconds:
            report(run, step, "tok/s", cfg.total_batch_size / statistics.median_low(run.seconds))
            run.seconds = []
        # Do not save untrained weights, but do save pretrained ones, which may remain the best
        if step > 0 or cfg.init_from != "scratch":
            if loss < run.best_loss:
                run.best_loss, run.best_step = loss, step
            save(run)
    if due(cfg.hellaswag_every, run) and run.questions:
        import hellaswag
        with run.autocast():
            acc_norm = hellaswag.evaluate(run.model, run.questions).acc_norm
        report(run, step, "hella", acc_norm)
        print0(f"{step:5d}/{cfg.max_steps} hella {acc_norm:.4f}")
    # Do not sample before the first step, except in a run that only evaluates
    if due(cfg.sample_every, run) and (step > 0 or cfg.max_steps == 0) and RANK == 0:
        with run.autocast():
            text = sample_text(run.model, get_encoding(cfg.encoding), cfg, seed=cfg.seed + step)
        print0(f"--- sample at step {step} ---\n{text}\n---")

def train(run):
    """Train until max_steps is reached or a signal arrives, and then call finish().

    Steps are numbered from 0. Step n is the update from run.step == n to n + 1. In the log, `val`
    and `train` of step n are both computed with the weights before this update. A resumed run
    repeats the evaluations that are due at the step that was saved.
    """
    cfg, stopped = run.cfg, False
    while not stopped:
        evaluate(run)
        if run.step >= cfg.max_steps:
            break
        step, start = run.step, time.perf_counter()
        loss, norm, stopped = train_step(run)  # this adds 1 to run.step
        seconds = time.perf_counter() - start
        run.seconds.append(seconds)
        # In float16, the norm may be infinite: then train_step() has skipped the update
        if not (math.isfinite(loss) and (math.isfinite(norm) or run.scaler.is_enabled())):
            raise UserError(f"Step {step} has loss {loss:g} and gradient norm {norm:g}: the model "
                            "has diverged. Most often --max_lr is too high. A new run can begin "
                            "with the weights of an earlier step: set a different --log_dir and "
                            f"--init_from={cfg.log_dir}/checkpoint_....pt.")
        report(run, step, "train", loss)
        report(run, step, "norm", norm)
        if cfg.print_every and step % cfg.print_every == 0:
            left = round(statistics.median_low(run.seconds) * (cfg.max_steps - run.step))
            print0(f"{step:5d}/{cfg.max_steps} train {loss:.4f} lr {get_lr(step, cfg):.2e} norm "
                   f"{norm:.2f} {seconds * 1e3:.0f} ms {cfg.total_batch_size / seconds:,.0f} tok/s "
                   f"{datetime.timedelta(seconds=left)} left")
    finish(run, stopped)

def is_saved(run):
    """Wait for the save in progress, if any. Return whether this step has a checkpoint."""
    if run.last_save:
        run.last_save.result()
    return run.step in find_checkpoints(run.cfg.log_dir)

def finish(run, stopped):
    """Save the run, if evaluate() has not. Export the best checkpoint if the run is complete."""
    if not is_saved(run):
        save(run)
    if RANK == 0 and not is_saved(run):  # for example, the disk is full
        raise UserError(f"Step {run.step} is not saved in log_dir={run.cfg.log_dir}: free "
                        "some space, and repeat the command.")
    if stopped:
        print0(f"Stopped by a signal at step {run.step}. To resume the run, repeat the command.")
    elif RANK == 0:
        export(run.cfg.log_dir)
        print0("Done. To train longer, raise --max_steps. For a new run, choose a different "
               "--log_dir.\nFor samples: python train_gpt2.py --sample=3 --log_dir="
               f"{shlex.quote(run.cfg.log_dir)}")

# ---- Checkpoints. A run is resumed from the newest one. Samples, the export and init_from use the
# best one. Only plain values are loaded (weights_only=True): other Python objects could run code
def checkpoint_of(run):
    """Return everything that a checkpoint contains. restore() is its counterpart."""
    return {
        "step": run.step, "best_loss": run.best_loss, "best_step": run.best_step,
        "model": run.model.state_dict(), "gpt_config": asdict(run.model.config),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "scaler": run.scaler.state_dict(), "config": asdict(run.cfg),
        "train_tokens": sum(map(len, run.train_loader.shards))}

def restore(run, checkpoint):
    """Load what checkpoint_of() returned into the run. Raise UserError if it is a different run."""
    check_same_training(run, checkpoint)
    load_weights(run.model, checkpoint["model"], run.cfg.log_dir)
    for optimizer, saved in zip(run.optimizers, checkpoint["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    if checkpoint["scaler"]:  # it is empty if the scaler was disabled
        run.scaler.load_state_dict(checkpoint["scaler"])
    run.step, run.best_loss, run.best_step = (
        checkpoint[name] for name in ("step", "best_loss", "best_step"))

# Settings that may differ when a run is resumed. `data` may have been moved, but must have the same
# number of tokens. `epochs` only determines max_steps, which is checked separately. dtype and B may
# differ although they affect rounding and, in the case of B, dropout masks
MAY_CHANGE = {
    "data", "B", "epochs", "print_every", "eval_every", "keep_every", "val_tokens",
    "hellaswag_every", "sample_every", "sample_prompt", "sample_tokens", "temperature", "top_k",
    "sample", "log_dir", "device", "dtype", "compile"}

def check_same_training(run, checkpoint):
    """Raise UserError unless the data and the settings are those of the run in log_dir.

    max_steps may be larger, and the settings in MAY_CHANGE may differ.
    """
    # A setting that was added after the run began is assumed to have had its default value
    before = asdict(Config()) | checkpoint["config"] | {"train_tokens": checkpoint["train_tokens"]}
    now = asdict(run.cfg) | {"train_tokens": sum(map(len, run.train_loader.shards))}
    changed = {name for name in now if before[name] != now[name]} - MAY_CHANGE
    if now["max_steps"] > before["max_steps"]:
        changed.discard("max_steps")
    values = [f"{name} was {before[name]!r}, is {now[name]!r}" for name in sorted(changed)]
    if values:
        raise UserError(f"The run in {run.cfg.log_dir}/ is a different one: {'; '.join(values)}. "
                        "Undo this change, or choose a different --log_dir.")

def load_weights(model, weights, source):
    """Load a state_dict. source: where the weights come from, for the error message."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as e:  # its first line is a heading; all other lines name weights
        raise UserError(f"The weights in {source} do not fit the model in train_gpt2.py "
                        f"({str(e).splitlines()[-1].strip()[:160]}): use the code that they were "
                        "made for.") from None

def find_checkpoints(folder):
    """Return {step: path} of the checkpoints in a folder."""
    texts = {path.stem.removeprefix("checkpoint_"): path
             for path in Path(folder).glob("checkpoint_*.pt")}
    return {int(text): path for text, path in texts.items() if text.isdecimal()}

def best_checkpoint(source):
    """Return the path of the best checkpoint if `source` is the folder of a run, else `source`.

    The best checkpoint has the lowest validation loss. In a run without validations, it is the
    newest one.
    """
    found = find_checkpoints(source)
    if not found:
        return source
    newest = found[max(found)]
    return found.get(read_checkpoint(newest)["best_step"], newest)

def read_checkpoint(path):
    """Return the content of a checkpoint. Raise UserError if it cannot be read."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if "gpt_config" not in checkpoint:
            raise ValueError("train_gpt2.py did not write it")
        return checkpoint
    except Exception as e:  # reading a damaged file may raise any exception
        raise UserError(f"{path} cannot be read as a checkpoint ({summary_of(e)}): if it is "
                        "damaged, delete it.") from None

def save(run):
    """Write a checkpoint in the background.

    Training waits only for the previous save and for the copy to host memory.
    """
    if RANK == 0:
        if run.last_save:
            run.last_save.result()
        run.last_save = run.writer.submit(write_checkpoint, run.cfg, to_host(checkpoint_of(run)))

def to_host(content):
    """Return a copy of nested dicts and lists with their tensors in host memory."""
    if torch.is_tensor(content):
        return content.detach().to("cpu", copy=True)
    if isinstance(content, dict):
        return {key: to_host(value) for key, value in content.items()}
    if isinstance(content, list):
        return [to_host(value) for value in content]
    return content

def write_checkpoint(cfg, checkpoint):
    """Write a checkpoint, delete older ones that need not be kept, and plot the losses.

    Keep the newest checkpoint, the best one, and those at multiples of keep_every.
    """
    step, start = checkpoint["step"], time.perf_counter()
    path = Path(cfg.log_dir, f"checkpoint_{step:05d}.pt")
    try:
        write_whole(path, lambda file: torch.save(checkpoint, file))
    except (OSError, RuntimeError) as e:
        # If the disk is full, torch.save() raises a RuntimeError while it handles the OSError
        print0(f"!!! NOT SAVED at step {step}: {summary_of(e.__context__ or e)}")
        return
    print0(f"{step:5d}/{cfg.max_steps} saved {path} in {time.perf_counter() - start:.1f} s")
    found, best = find_checkpoints(cfg.log_dir), checkpoint["best_step"]
    if best is None or best in found:  # if the best could not be saved, keep all others
        for other in found.keys() - {step, best}:
            if cfg.keep_every == 0 or other % cfg.keep_every != 0:  # it is not a multiple
                found[other].unlink(missing_ok=True)
    with contextlib.suppress(Exception):  # the plot is optional: no error may end the run
        plot_curves(cfg.log_dir)

# ---- Monitoring. log.txt gets every step; stdout gets only those that print_every selects
def print0(text):
    """Print text on rank 0 only."""
    if RANK == 0:
        # Write the line in a single call, so that it does not mix with one from the saving thread.
        # Ignore the errors caused by a full disk, a closed terminal, or a signal during a print
        with contextlib.suppress(OSError, RuntimeError):
            print(f"{text}\n", end="", flush=True)

def report(run, step, metric, value):
    """Append a line "<step> <metric> <value>" to log.txt."""
    if run.log:
        with contextlib.suppress(OSError):  # a full disk
            run.log.write(f"{step} {metric} {value:.7g}\n".encode())

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
def sample_text(model, encoding, cfg, seed):
    """Return sample_prompt and the model's continuation, which stops at <|endoftext|>."""
    device = next(model.parameters()).device
    prompt = encode(encoding, cfg.sample_prompt, special=True).tolist() or [encoding.eot_token]
    tokens = model.generate(
        torch.tensor([prompt], device=device), cfg.sample_tokens, temperature=cfg.temperature,
        top_k=cfg.top_k, generator=torch.Generator(device).manual_seed(seed))[0].tolist()
    if encoding.eot_token in tokens[len(prompt):]:
        tokens = tokens[:tokens.index(encoding.eot_token, len(prompt))]
    return encoding.decode_bytes(tokens).decode("utf-8", errors="backslashreplace")

# ---- Hugging Face. A model is imported or exported only if transformers computes the same logits
TIED = ("transformer.wte.weight", "lm_head.weight")  # the same matrix; ours has padding rows
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # (in, out) in Hugging Face's GPT-2

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
                        f"be loaded as a Hugging Face GPT-2 ({summary_of(e)}): check the name."
                        ) from None
    c = hf_model.config
    # A vocabulary of 257 ids consists of the 256 bytes and <|endoftext|>
    model = GPT(GPTConfig(
        block_size=c.n_positions, vocab_size=c.vocab_size, n_layer=c.n_layer, n_head=c.n_head,
        n_embd=c.n_embd, dropout=dropout,
        encoding={257: "bytes", 50257: "gpt2"}.get(c.vocab_size, encoding)))
    weights = {}
    for key, weight in hf_model.state_dict().items():
        if key in TIED:  # add our padding rows
            weight = F.pad(weight, (0, 0, 0, len(model.lm_head.weight) - c.vocab_size))
        weights[key] = weight.t() if key.endswith(TRANSPOSED) else weight
    load_weights(model, weights, name)
    check_same_logits(model, hf_model, f"init_from={name}")
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

    Raise UserError or RuntimeError if transformers would return different logits.
    """
    import transformers
    transformers.logging.disable_progress_bar()
    c, end = model.config, get_encoding(model.config.encoding).eot_token
    hf_model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.block_size, n_layer=c.n_layer, n_head=c.n_head,
        n_embd=c.n_embd, bos_token_id=end, eos_token_id=end, pad_token_id=end,
        n_ctx=c.block_size))  # llama.cpp's converter requires n_ctx
    hf_model.generation_config.max_length = c.block_size  # otherwise a pipeline exceeds the context
    weights = {}
    for key, weight in model.state_dict().items():
        if key in TIED:  # remove our padding rows
            weight = weight[:c.vocab_size]
        weights[key] = weight.t() if key.endswith(TRANSPOSED) else weight
    hf_model.load_state_dict(weights)
    check_same_logits(model, hf_model, "this run")
    hf_model.save_pretrained(folder, max_shard_size="50GB")  # in one file
    try:
        save_tokenizer(get_encoding(c.encoding), folder, c.block_size)
    except ValueError as e:
        print0(f"The export has no tokenizer: {summary_of(e)}.")

@torch.no_grad()
def check_same_logits(model, hf_model, source):
    """Raise UserError if two models on the CPU, ours and a Hugging Face one, do not agree.

    source: where their weights come from, for the error message.
    """
    c = model.config
    idx = torch.randint(c.vocab_size, (1, c.block_size), generator=torch.Generator().manual_seed(0))
    # Include <|endoftext|>, the last id, to detect an edit that blocks attention across documents
    idx[0, c.block_size // 2] = c.vocab_size - 1
    theirs = hf_model.float().eval()(idx).logits
    differences = (model(idx)[0] - theirs).norm(dim=-1) / theirs.norm(dim=-1)  # (1, T)
    if not differences.max() < 1e-3:  # also true for NaN
        raise UserError(f"With the weights of {source}, transformers' logits differ by "
                        f"{differences.max():.1%}: the GPT in train_gpt2.py is not this GPT-2.")

# ---- The machine. For device, dtype and compile, "auto" selects a fast option
def set_up_device(name):
    """Return the torch.device with this name ("auto" chooses one), prepared for training.

    Raise UserError if it cannot be used.
    """
    # If torch sees no GPU, the driver is usually too old for the CUDA version that torch was built
    # for (the suffix of torch.__version__, such as +cu130). The last torch for CUDA 12.6 is 2.14
    no_gpu_message = (f"torch {torch.__version__} sees no GPU. Install a newer driver, or a torch "
                      "build that supports old GPUs and drivers: pip install 'torch<2.15' "
                      "--index-url https://download.pytorch.org/whl/cu126")
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
    # If a process dies, torchrun may start all of them again (--max-restarts). A prefix for each
    # restart keeps them from finding the addresses of dead processes in torchrun's store
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store, *_ = next(dist.rendezvous("env://"))  # a key-value store that all processes can reach
    gpu = device if device.type == "cuda" else None
    dist.init_process_group(
        backend="nccl" if gpu else "gloo", store=dist.PrefixStore(restart, store), rank=RANK,
        world_size=WORLD_SIZE, device_id=gpu, timeout=datetime.timedelta(hours=1))

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
def configure(flags):
    """Return the Config for command-line flags, {name: value}.

    Flags override the preset, which overrides Config. Raise UserError for an invalid value.
    """
    data, preset, note = os.path.expanduser(flags.get("data", Config.data)), "Config", ""
    # If no other `data` was chosen, by a flag or by editing Config, fall back to input.txt
    if "data" not in flags and data == "edu_fineweb10B" and not find_shards(data)[0]:
        data = str(Path(__file__).resolve().with_name("input.txt"))
        note = ("Quick start on Shakespeare, since edu_fineweb10B/ holds no shards.\n"
                "To train GPT-2 (124M), run python fineweb.py, and repeat this command.\n\n")
    if os.path.isfile(data):
        from_scratch = flags.get("init_from", Config.init_from) == "scratch"
        preset = "SMALL" if from_scratch else "FINETUNE"
    cfg = Config(**(PRESETS[preset] | flags | {"data": data}))
    if "max_steps" in flags:
        cfg = replace(cfg, epochs=0.0)  # --max_steps overrides `epochs`
    cfg = replace(cfg, init_from=os.path.expanduser(cfg.init_from),  # shells leave ~ after =
                  log_dir=os.path.expanduser(cfg.log_dir))
    check_values(cfg)
    if not cfg.sample:
        print0(f"{note}settings  {preset}; flags: {', '.join(flags) or 'none'}")
    return cfg

def check_values(cfg):
    """Raise UserError if a setting has an invalid value."""
    at_least_1 = ("total_batch_size", "B", "T", "n_layer", "n_head", "n_embd", "val_tokens")
    limits = dict.fromkeys(at_least_1, (1, math.inf)) | {"dropout": (0, 1), "seed": (0, 2**32)}
    for setting in fields(cfg):
        name, value, choices = setting.name, getattr(cfg, setting.name), get_args(setting.type)
        if choices and value not in choices:
            raise UserError(f"{name}={value}: choose one of {', '.join(map(str, choices))}.")
        lowest, limit = limits.get(name, (0, math.inf))
        if setting.type in (int, float) and not lowest <= value < limit:
            raise UserError(f"{name}={value}: it must be at least {lowest} and below {limit}.")
    if cfg.min_lr > cfg.max_lr or cfg.max_lr == 0:
        raise UserError(f"max_lr={cfg.max_lr} must be above 0, and not below min_lr={cfg.min_lr}.")
    if cfg.n_embd % cfg.n_head:
        raise UserError(f"n_embd={cfg.n_embd} must be a multiple of n_head={cfg.n_head}.")
    if cfg.init_from == "resume":  # nanoGPT's way to resume a run
        raise UserError("To resume a run, repeat the command without --init_from=resume.")

def build_model(cfg, checkpoint=None):
    """Return the GPT of a run. Raise UserError if init_from cannot be read.

    checkpoint: the one from which the run is resumed, or None. If it is given, init_from is not
    read again, and the model is left with random weights until restore() loads its weights.
    """
    if cfg.init_from == "scratch":
        config = GPTConfig(
            block_size=cfg.T, vocab_size=get_encoding(cfg.encoding).n_vocab, n_layer=cfg.n_layer,
            n_head=cfg.n_head, n_embd=cfg.n_embd, dropout=cfg.dropout, encoding=cfg.encoding)
        return GPT(config, cfg.seed)
    if checkpoint:
        return GPT(replace(GPTConfig(**checkpoint["gpt_config"]), dropout=cfg.dropout))
    return GPT.from_pretrained(cfg.init_from, cfg.dropout, cfg.encoding)

def with_model_settings(model, cfg, flags):
    """Return the Config with the encoding and the sizes of a model that was loaded from init_from.

    Raise UserError if a flag contradicts them, or if the encoding has a different number of ids.
    """
    c = model.config
    shape = dict(encoding=c.encoding, n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd,
                 T=min(cfg.T, c.block_size))
    for name, value in shape.items():
        if name in flags and flags[name] != value:
            raise UserError(f"--{name}={flags[name]} contradicts the weights in init_from="
                            f"{cfg.init_from}, which allow {name}={value}: leave out --{name}.")
    if get_encoding(c.encoding).n_vocab != c.vocab_size:
        raise UserError(f"The weights in init_from={cfg.init_from} have {c.vocab_size} token ids, "
                        f"but encoding={c.encoding} has a different number: set --encoding.")
    return replace(cfg, **shape)

def with_batch_and_steps(cfg, rows_per_epoch):
    """Return the Config with B lowered to divide the batch, and max_steps computed from epochs.

    Raise UserError if total_batch_size cannot be divided among the processes.
    """
    smallest_batch = cfg.T * WORLD_SIZE
    if cfg.total_batch_size % smallest_batch:
        # If possible, suggest a multiple of 8 rows per process, so that B can be 8 and not only 1
        unit = smallest_batch * min(8, max(1, cfg.total_batch_size // smallest_batch))
        near = unit * max(1, round(cfg.total_batch_size / unit))
        raise UserError(f"total_batch_size={cfg.total_batch_size} is not a multiple of T * "
                        f"processes = {smallest_batch}: try --total_batch_size={near}.")
    rows = cfg.total_batch_size // cfg.T
    max_steps = math.ceil(cfg.epochs * rows_per_epoch / rows) if cfg.epochs else cfg.max_steps
    return replace(cfg, max_steps=max_steps, B=max(
        B for B in range(1, cfg.B + 1) if rows // WORLD_SIZE % B == 0))

def prepare_log_dir(run, resumed):
    """Write config.json and a copy of this script, open log.txt, and print what will run.

    The log of a run that was never saved is replaced.
    """
    cfg, n_tokens = run.cfg, run.cfg.max_steps * run.cfg.total_batch_size
    print0(f"{cfg}\nmodel     {sum(p.numel() for p in run.model.parameters()):,} parameters\n"
           f"training  {cfg.max_steps:,} steps (warmup {cfg.warmup_steps:,}), {n_tokens:,} tokens, "
           f"{n_tokens / cfg.T / run.train_loader.rows_per_epoch:.2g} epochs\n"
           f"log       {Path(cfg.log_dir, 'log.txt')}, from step {run.step} on")
    if RANK != 0:
        return
    folder, code = Path(cfg.log_dir), Path(__file__).read_bytes()
    copy = folder / "train_gpt2.py"
    if resumed and copy.exists() and copy.read_bytes() != code:
        if run.step == cfg.max_steps:  # the new code would only evaluate and export old weights
            raise UserError(f"The run in {folder}/ has taken all steps, and the script was edited: "
                            f"choose a different --log_dir. (To go on anyway, delete {copy}.)")
        print0(f"!!! train_gpt2.py was edited: from step {run.step} on, the new code is used.")
        before = folder / f"train_gpt2_before_{run.step:05d}.py"
        if not before.exists():  # otherwise, it holds the code that trained up to this step
            copy.rename(before)
    write_whole(copy, lambda file: file.write(code))
    write_whole(folder / "config.json",
                lambda file: file.write(json.dumps(asdict(cfg), indent=1).encode()))
    run.log = open(folder / "log.txt", "ab" if resumed else "wb", buffering=0)

def stop_on_signals(run):
    """Make Ctrl-C, SIGTERM and SIGHUP finish the current step, save the run, and end training.

    A second signal ends the process at once, except under torchrun, which sends each Ctrl-C twice.
    """
    def receive(number, frame):
        run.stop = True
        print0("Stopping after this step is finished and saved.")
        if "RANK" not in os.environ:
            signal.signal(number, signal.SIG_DFL)
    # (Windows has no SIGHUP, and nohup makes a process ignore it)
    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, receive)

def set_up(cfg, flags, device):
    """Return the Run for train(). If log_dir holds a checkpoint, the run continues from it."""
    found = find_checkpoints(cfg.log_dir)  # {step: path}
    checkpoint = read_checkpoint(found[max(found)]) if found else None
    model = build_model(cfg, checkpoint)
    cfg = cfg if cfg.init_from == "scratch" else with_model_settings(model, cfg, flags)
    encoding = get_encoding(cfg.encoding)
    train_loader, val_loader = open_data(cfg, encoding)
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
        train_loader=train_loader, val_loader=val_loader)
    if checkpoint:
        restore(run, checkpoint)
    if compiled:
        model.compile()
    if WORLD_SIZE > 1:
        # torch.compile begins a new graph where a bucket of DDP ends. With buckets of 25 MB (the
        # default), there would be 14 graphs. gradient_as_bucket_view avoids copying the gradients
        run.ddp_model = DDP(model, bucket_cap_mb=100, gradient_as_bucket_view=True)
    if cfg.hellaswag_every:
        import hellaswag
        run.questions = hellaswag.prepare_on_all_ranks(model, encoding.encode_ordinary)
    print0(f"machine   {WORLD_SIZE} x {device.type}, {dtype}, compile={compiled}")
    prepare_log_dir(run, resumed=checkpoint is not None)
    stop_on_signals(run)
    return run

def print_samples(cfg, flags, device):
    """Print cfg.sample samples from init_from or, if it is "scratch", from the run in log_dir."""
    if cfg.init_from == "scratch":
        cfg = replace(cfg, init_from=cfg.log_dir)
        if not find_checkpoints(cfg.log_dir):
            raise UserError(f"log_dir={cfg.log_dir} has no weights: train, or set --init_from.")
    source = best_checkpoint(cfg.init_from)
    model = GPT.from_pretrained(source, encoding=cfg.encoding).to(device)
    cfg = with_model_settings(model, cfg, flags)
    print0(f"Samples from {source}:")
    for i in range(cfg.sample):
        print0(sample_text(model, get_encoding(cfg.encoding), cfg, seed=cfg.seed + i) + "\n---")

def run_command():
    """Train, or print samples."""
    flags = parse_flags(Config, __doc__, PRESETS)
    cfg = configure(flags)
    device = set_up_device(cfg.device)
    if "RANK" in os.environ:  # torchrun started this process
        join_processes(device)
    if cfg.sample:
        print_samples(cfg, flags, device)
        return
    # The lock is held as long as it is referenced
    lock = lock_folder("log_dir", cfg.log_dir) if RANK == 0 else None  # noqa: F841
    run = set_up(cfg, flags, device)
    with run.writer:  # if train() fails, a save in progress is still finished
        train(run)

def main():
    """Do what the command line asks. On a UserError, print its message and exit with status 1."""
    with contextlib.suppress(AttributeError):  # a notebook's stdout has no reconfigure()
        sys.stdout.reconfigure(errors="backslashreplace")  # samples may contain any character
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until set_up(), Ctrl-C ends the process
    try:
        run_command()
        if dist.is_initialized():
            # The DDP model, which uses the process group, was deleted when run_command() returned
            dist.destroy_process_group()
    except Exception as error:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            error = UserError("Out of memory. Choose a smaller --B; it trains the same model.")
        if isinstance(error, UserError):
            print(f"train_gpt2.py: {error}", file=sys.stderr, flush=True)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
        if dist.is_initialized():
            os._exit(1)  # a normal exit would wait for other processes, which may wait for this one
        sys.exit(1)

if __name__ == "__main__":
    main()
