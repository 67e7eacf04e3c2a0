"""A run that check.py starts in a process of its own (see Laboratory.run() in check.py).

The process runs the edited train_gpt2.py, watches what training does, and then examines the trained
model. It writes its findings, including the notes, to report.json.
"""
import ast
import contextlib
import copy
import functools
import inspect
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import statistics
import sys
import threading
import time
import traceback
import warnings
import zlib
from collections import Counter, defaultdict, deque
from dataclasses import asdict, fields, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch

SCRIPTS = Path(__file__).resolve().parent.parent  # the folder of the scripts to check
GENERATOR = torch.Generator  # watch_seeds() replaces the class in torch
KILLED = 9  # exit status of a run that was to be killed
LOW_PRECISION = 5e-2  # the tolerance of logits that are computed in 16 bits
# To find out whether validation data is trained on: the shortest row in tokens, since shorter ones
# may be equal by chance, how many rows to compare, and in how many tokens of a file to search
SHORTEST_ROW, MOST_ROWS, MOST_TOKENS = 32, 320, 2**21

def be_a_run(job, env):
    """Do what `python train_gpt2.py` with the job's flags does, and write a report.

    env: environment variables to set.
    """
    os.environ.update(env)
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)  # main() in check.py has set it
    if hasattr(os, "setsid"):
        os.setsid()  # the user's Ctrl-C does not reach this process
    threading.Thread(target=end_with_check, daemon=True).start()
    for name, number in ((os.devnull, 1), (job["folder"] / f"err_{env.get('RANK', 0)}.txt", 2)):
        with open(name, "w") as file:
            os.dup2(file.fileno(), number)
    np.random.seed()  # a forked process would draw the same numbers as others
    sys.path[0] = str(job["scripts"])
    import train_gpt2 as t
    # If an edit starts processes, let them be those of an ordinary run
    multiprocessing.set_start_method(None, force=True)
    sys.modules["__main__"] = t
    # The committed version may lack a constant that the edit adds, and the other way round
    known = [constant.name for constant in fields(t.Config)]
    flags = [f"--{name}={value}" for name, value in job["flags"].items() if name in known]
    sys.argv = [t.__file__, *flags]
    train, drawn = t.train, watch_draws(t)
    t.train = lambda run: train_and_report(t, train, run, job | {"drawn": drawn})
    t.main()

def watch_draws(t):
    """Return {id of a model: {name: checksum}}, to which init_weights() adds what it has drawn."""
    checksums, original = {}, getattr(t, "init_weights", None)

    def init_weights(model, *args, **kwargs):
        original(model, *args, **kwargs)
        checksums[id(model)] = {name: crc_of(p) for name, p in model.named_parameters()}
    t.init_weights = init_weights
    return checksums

def end_with_check():
    """End this process when check.py ends, even if it is killed."""
    multiprocessing.parent_process().join()  # waits
    os._exit(1)

def train_and_report(t, train, run, job):
    """Train, and write what check.py wants to know into report.json.

    The job may contain: stop (take no step), nudge (change the initial weights by about this
    fraction), kill_at and kill_after (end the process during step kill_at, once the checkpoint of
    step kill_after exists), and examine (compare samples and validation with model(idx), and look
    for logits that depend on later tokens; the value is the tolerance of logits). It always
    contains drawn (what watch_draws() returned).
    """
    for name in ("transformers", "matplotlib"):  # skip the export and the plots, which take seconds
        sys.modules.setdefault(name, None)
    for i, p in enumerate(run.state.raw_model.parameters() if "nudge" in job else []):
        noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(p.device)
        scale = max(job["nudge"], torch.finfo(p.dtype).eps)  # an edit may have 16-bit weights
        p.data.copy_(p.data.float() * (1 + scale * noise))
    report = {"constants": asdict(run.cfg), "device": run.device.type, "step": run.state.step,
              "B_is_free": "B" in t.NOT_COMPARED,
              "eval_every_is_free": "eval_every" in t.NOT_COMPARED}
    drawn = job["drawn"].get(id(run.state.raw_model), {})
    report["initial"] = {name: (list(p.shape), crc_of(p), some_values(p), drawn.get(name))
                         for name, p in run.state.raw_model.named_parameters()}
    rows = watch_forward_passes(run, report)
    watched = Watched(t, run) if "examine" in job else None
    if "kill_at" in job:
        kill_during_step(run, job["kill_at"], job["kill_after"])
    unsaved = unsaved_values(t, run)
    if job.get("stop"):
        report["notes"] = (
            notes_about_schedules(t, run.cfg) + noted(notes_about_longer_runs, t, run.cfg)
            + noted(notes_about_epochs, t, run) + noted(notes_about_rows, run.train_loader)
            + noted(notes_about_muon, run.state) + noted(notes_about_code, inspect.getsource(t))
            + noted(notes_about_constants, t))
    else:
        train(run)
        warnings.simplefilter("ignore")  # only those of training are reported
    # Copies, since the hooks go on: later forward passes do not belong to training
    report, rows = dict(report), list(rows)
    report["tokens"] = getattr(run.state, "tokens", 0)
    report["attributes"] = sorted(vars(run.state))
    now = unsaved_values(t, run)
    report["changed"] = [name for name in now if now[name] != unsaved.get(name)]
    report["in_both"] = training_and_validation(t, run, run.val_loader, rows)
    if watched:
        report["trained"] = {name: crc_of(p) for name, p in run.state.raw_model.named_parameters()}
        report["first_update"] = watched.first_update
        report["muon"] = [name for name, p in run.state.raw_model.named_parameters()
                          if id(p) in parameters_of(run.state.optimizers, "Muon")]
        report["notes"] = watched.notes(t, run, report, rows)
        with torch.no_grad(), run.autocast():
            found = examine(run, tolerance=job["examine"])
        modes = noted(notes_about_modes, t, run, found["modes"], report["draws"])
        alone = noted(notes_about_rows_together, run) if report["B_is_free"] else []
        alone += noted(notes_about_alignment, t, run, train)
        notes = report["notes"] + found["notes"] + modes + alone
        report |= found | {"notes": notes}
    report["state_differs"] = differs_between_processes(run.state)
    if os.environ.get("RANK", "0") == "0":
        Path(job["folder"], "report.json").write_text(json.dumps(report))

def differs_between_processes(state):
    """Return the names of the attributes of State that are not the same in all processes."""
    if not torch.distributed.is_initialized():
        return []
    mine = {name: [crc_of(part) for _, part in tensors_of(value)] or repr(value)
            for name, value in state.state_dict().items()
            if name not in ("raw_model", "optimizers", "scaler", "minutes_trained")}
    everyones = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyones, mine)
    return [name for name in mine if any(other.get(name) != mine[name] for other in everyones)]

def watch_forward_passes(run, report):
    """Record in the report what forward passes do. Return a list, to which training adds rows.

    "draws": whether those with gradient draw from torch's generator; "draws_without_grad": whether
    the others do; "seeds": whether any of them seeds it. The rest is about those in training mode
    with gradient. "embedded": the number of token ids that the embedding got; "shifted": what
    share_of_shifted_rows() returned for some of these; "new_targets": (the number of rows whose
    targets are not part of the training data, the number of rows that were looked up); "ids": what
    count_ids() returned; "before_masks" and "before_targets": Counters of inputs with targets of
    -100 and with other targets. The list gets up to 16 rows (T,) of each of the first of these
    passes, as arrays of token ids.
    """
    # The hooks must not refer to `run`, because the script deletes it to end DDP
    get_state = torch.cuda.get_rng_state if run.device.type == "cuda" else torch.get_rng_state
    states, rows, loader = [], [], run.train_loader
    report |= {"draws": False, "draws_without_grad": False, "seeds": False, "embedded": 0,
               "shifted": [], "new_targets": (0, 0), "ids": (Counter(), Counter()),
               "before_masks": Counter(), "before_targets": Counter()}

    def before(model, args):
        states.append((get_state(), torch.initial_seed()))
        if trains(model) and len(rows) < MOST_ROWS and args:
            with contextlib.suppress(Exception):  # an edit may have other inputs
                rows.extend(row for row in args[0][:16].cpu().numpy() if row.ndim == 1)
                report["shifted"].append(share_of_shifted_rows(*args))
                new, looked_up = report["new_targets"]
                more_new, more = rows_of_new_targets(loader, *args)
                report["new_targets"] = (new + more_new, looked_up + more)
                report["ids"] = count_ids(*report["ids"], *args)
                x, y = args[0], args[1]
                report["before_masks"] = report["before_masks"] + Counter(x[y == -100].tolist())
                report["before_targets"] = report["before_targets"] + Counter(x[y >= 0].tolist())

    def after(model, args, outputs):
        state, seed = states.pop()
        if not torch.equal(state, get_state()):
            report["draws" if torch.is_grad_enabled() else "draws_without_grad"] = True
        report["seeds"] |= torch.initial_seed() != seed

    def count(embedding, args):
        if trains(embedding) and args and not args[0].is_floating_point():
            report["embedded"] += args[0].numel()
    run.state.raw_model.register_forward_pre_hook(before)
    run.state.raw_model.register_forward_hook(after)
    for name, module in run.state.raw_model.named_modules():
        if name == "transformer.wte":
            module.register_forward_pre_hook(count)
    return rows

def trains(module):
    """Return whether a forward pass of a module belongs to training.

    Gradients alone do not show this, because an edit may validate with gradients.
    """
    return module.training and torch.is_grad_enabled()

def share_of_shifted_rows(x, y=None, *args):
    """Return in which share of the rows most targets y are the tokens that follow in x (B, T)."""
    if not torch.is_tensor(y) or y.shape != x.shape or x.dim() != 2 or x.size(1) < 2:
        return 1.0  # an edit has other targets
    counted = y[:, :-1] >= 0
    agree = ((y[:, :-1] == x[:, 1:]) & counted).sum(1) >= 0.5 * counted.sum(1)  # (B,)
    return agree.float().mean().item()

def rows_of_new_targets(loader, x, y=None, *args):
    """Return how many rows of targets y (B, T) are not part of the training text, and of how many.

    Rows with ignored targets are not looked up, and neither are rows of shards or of a large text,
    because this would take long.
    """
    shard = loader.shards[0] if len(getattr(loader, "shards", ())) == 1 else None
    if not isinstance(shard, np.ndarray) or not torch.is_tensor(y) or y.dim() != 2:
        return 0, 0
    if len(shard) > MOST_TOKENS:
        return 0, 0
    rows = [row for row in y[:4].cpu().numpy() if len(row) >= SHORTEST_ROW and row.min() >= 0]
    return len(rows) - count_parts(rows, shard.astype(np.uint32)), len(rows)

def count_ids(inputs, targets, x, y, *args):
    """Return two Counters, to which the ids in x (B, T), except the first column, and y are added.
    """
    # The first token of a row is not a target in this row
    return inputs + Counter(x[:, 1:].flatten().tolist()), targets + Counter(y.flatten().tolist())

def training_and_validation(t, run, loader, rows):
    """Return what training and the validation with a loader have in common.

    {"files": names of shards in both, "rows": the number of training rows that were compared,
    "equal_rows": how many of them are part of the validation data, "only_val_rows": how many of
    these are not part of the training data (0 if this is a large corpus), "val_rows" and
    "equal_val_rows": how many validation rows were compared with the training data, and are part of
    it}. A row also counts if its reverse is part of the data. rows: arrays (T,) of token ids.
    """
    def paths(loader):
        return {str(shard) for shard in loader.shards if isinstance(shard, Path)}

    def first_tokens(loader):
        parts, n_missing = [], MOST_TOKENS
        for shard in loader.shards:
            parts.append(t.tokens_of_shard(shard)[:n_missing].astype(np.uint32))
            n_missing -= len(parts[-1])
            if n_missing == 0:
                break
        return np.concatenate(parts)
    rows, val_rows = [row for row in rows if len(row) >= SHORTEST_ROW], []
    files, training, validation = [], np.zeros(0, np.uint32), np.zeros(0, np.uint32)
    try:
        files = sorted(paths(run.train_loader) & paths(loader))
        training, validation = first_tokens(run.train_loader), first_tokens(loader)
        length = max(SHORTEST_ROW, run.cfg.T)
        starts = np.linspace(0, max(0, len(validation) - length), 50, dtype=int)
        val_rows = [validation[start:start + length] for start in starts]
    except Exception:  # an edit may have changed the loaders
        rows = []
    shards = getattr(run.train_loader, "shards", ())
    is_whole = len(shards) == 1 and 0 < len(training) < MOST_TOKENS
    count = count_parts_or_reversed
    foreign = [row for row in rows if is_whole and not count([row], training)]
    return {"files": files, "rows": len(rows), "equal_rows": count(rows, validation),
            "only_val_rows": count(foreign, validation), "val_rows": len(val_rows),
            "equal_val_rows": count(val_rows, training)}

def count_parts(rows, tokens):
    """Return how many of the rows, arrays of token ids, are part of `tokens` (uint32)."""
    text = tokens.tobytes()
    return sum(is_part(row.astype(np.uint32).tobytes(), text) for row in rows)

def count_parts_or_reversed(rows, tokens):
    """Return how many of the rows are part of `tokens` as they are or in reverse order."""
    return sum(bool(count_parts([row, row[::-1]], tokens)) for row in rows)

def is_part(ids, text):
    """Return whether ids occur in a text. Both are the bytes of an array of uint32."""
    place = text.find(ids)
    while place > 0 and place % 4:  # not at the beginning of an id
        place = text.find(ids, place + 1)
    return place >= 0

def kill_during_step(run, step, saved):
    """End this process in the given step, once the checkpoint of the step `saved` exists."""
    state, checkpoint = run.state, Path(run.cfg.log_dir, f"checkpoint_{saved:05d}.pt")

    def kill(model, args):
        if state.step == step and torch.is_grad_enabled():
            end = time.monotonic() + 300
            while not checkpoint.exists() and time.monotonic() < end:
                time.sleep(0.01)
            os._exit(KILLED)  # like kill -9, this neither closes files nor waits for threads
    run.state.raw_model.register_forward_pre_hook(kill)

# ---- Notes. They state facts that are often, but not always, mistakes
class Watched:
    """What notes() needs to know about a training run. Create it before training starts."""
    def __init__(self, t, run):
        self.loaders = watch_validation(t)
        self.nonzero, self.magnitudes, self.with_zeros = watch_gradients(run)
        self.factors = watch_learning_rates(t, run)
        self.overwritten = watch_overwritten_rates(t)
        self.between = watch_average(run.state)
        self.clipped, self.factors_of_clipping, self.norms, self.measured = watch_clipping(
            t, run.state)
        self.divergences = watch_divergences()
        self.seeds = watch_seeds(run.state)
        self.optimizers = list(run.state.optimizers)
        self.integers, self.first_step = integers_of(run.state), run.state.step
        self.samples, self.averages = watch_weights(run.state)
        self.first_update = watch_first_update(t, run)
        self.buffers = {name: crc_of(b) for name, b in run.state.raw_model.named_buffers()}

    def notes(self, t, run, report, rows):
        """Return notes on the training. rows: those that watch_forward_passes() returned."""
        state, model = run.state, run.state.raw_model
        were_watched = state.optimizers == self.optimizers and all(
            isinstance(optimizer, torch.optim.Optimizer) for optimizer in self.optimizers)
        with_gradient = self.nonzero if were_watched else report["initial"]
        notes = [
            *noted(notes_about_parameters, state, report["initial"], with_gradient),
            *noted(notes_about_counters, self.integers, state, state.step - self.first_step),
            *noted(notes_about_zeros, self.with_zeros & self.nonzero.keys()),
            *noted(notes_about_elements, model, self.nonzero),
            *noted(notes_about_magnitudes, self.magnitudes),
            *noted(notes_about_factors, self.factors),
            *noted(notes_about_overwritten_rates, self.overwritten),
            *noted(notes_about_shared_parameters, model),
            *noted(notes_about_second_weights, state),
            *noted(notes_about_attributes, model, report["changed"]),
            *noted(notes_about_decay, state),
            *noted(notes_about_gains, state, report["initial"]),
            *noted(notes_about_tables, state),
            *noted(notes_about_position_buffers, model),
            *noted(notes_about_learning_rates, state),
            *noted(notes_about_depth, t, run),
            *noted(notes_about_groups, state.optimizers),
            *noted(notes_about_copies, state),
            *noted(notes_about_zero_attributes, state),
            *noted(notes_about_padding, model),
            *noted(notes_about_average, state, self.samples),
            *noted(notes_about_uneven_average, self.samples, self.averages),
            *([] if noted(notes_about_copies, state) else self.between),
            *noted(notes_about_buffers, state, self.buffers),
            *noted(notes_about_clipping, state, self.clipped, self.norms),
            *noted(notes_about_small_gradients, self.factors_of_clipping),
            *noted(notes_about_clipped_norms, self.measured),
            *noted(notes_about_divergences, self.divergences),
            *noted(notes_about_seeds, self.seeds),
            *noted(notes_about_repeated_rows, rows),
            *noted(notes_about_shifts, report["shifted"]),
            *noted(notes_about_new_targets, *report["new_targets"]),
            *noted(notes_about_ids, run.encoding, *report["ids"]),
            *noted(notes_about_masks, run.encoding, report["before_masks"],
                   report["before_targets"]),
            *noted(notes_about_forward, t, run),
            *noted(notes_about_positions, t, run),
            *noted(notes_about_auxiliary_gradients, run, self.nonzero),
            *noted(notes_about_near_copies, t, run)]
        for loader in self.loaders:
            if loader is not run.val_loader:
                both = training_and_validation(t, run, loader, rows)
                notes += noted(notes_about_validation, both)
        return notes

def noted(function, *args):
    """Return the notes that a function returns, or [] if it raises an error.

    An edit may have changed anything that the function looks at, and must not stop the check.
    """
    try:
        return function(*args)
    except Exception:
        return []

def watch_validation(t):
    """Return a list, to which each call of validation_loss() adds the loader that it reads."""
    loaders, original = [], getattr(t, "validation_loss", None)
    kind, read_ids = getattr(t, "DataLoaderLite", None), set()
    original_read = getattr(kind, "read", None)

    def read(self, *args, **kwargs):
        read_ids.add(id(self))
        return original_read(self, *args, **kwargs)

    def validation_loss(*args, **kwargs):
        read_ids.clear()
        loss = original(*args, **kwargs)
        for value in (*args, *kwargs.values()):
            # An edit may return a value that it has kept, without reading the loader
            is_unread = original_read and type(value) is kind and id(value) not in read_ids
            if hasattr(value, "shards") and not is_unread and value not in loaders:
                loaders.append(value)
        return loss
    if original_read:
        kind.read = functools.wraps(original_read)(read)
    if original:
        t.validation_loss = functools.wraps(original)(validation_loss)
    return loaders

def watch_clipping(t, state):
    """Return a set and three lists that are filled during training.

    The set gets the ids of the parameters that are given to clip_grad_norm_(). The first list gets
    the factor by which each call multiplies gradients. The second list gets a pair
    for each step that calls it several times, with different parameters: the norm that train_step()
    returns, and the norm of the gradients of all these parameters together. Steps with other norms
    than the usual one (norm_type), or in which a gradient is not finite, are left out. The third
    list gets the functions that compute a norm of gradients after clip_grad_norm_() has changed
    them, and before an optimizer uses them.
    """
    clipped, factors, norms, measured, calls = set(), [], [], [], []
    window = contextlib.ExitStack()  # the time in which gradients are clipped and not yet used
    before_each_step(state, lambda optimizer: window.close())
    clip, step = torch.nn.utils.clip_grad_norm_, getattr(t, "train_step", None)

    def clip_grad_norm_(parameters, *args, **kwargs):
        parameters = [parameters] if torch.is_tensor(parameters) else list(parameters)
        clipped.update(map(id, parameters))
        window.close()
        norm = clip(parameters, *args, **kwargs)
        is_usual = (args[1] if len(args) > 1 else kwargs.get("norm_type", 2.0)) == 2.0
        if norm > 0:
            factors.append(min(1.0, float((args[0] if args else kwargs["max_norm"]) / norm)))
            if factors[-1] < 0.99:
                window.enter_context(WatchNorms(parameters, measured))
        calls.append((list(map(id, parameters)), norm if is_usual else math.nan))
        return norm

    def train_step(*args, **kwargs):
        calls.clear()
        with window:
            result = step(*args, **kwargs)
        ids = [one for of_call, _ in calls for one in of_call]
        with contextlib.suppress(Exception):  # an edit may return something else
            _, returned = result
            pair = float(returned), math.hypot(*(float(norm) for _, norm in calls))
            if len(calls) > 1 and len(ids) == len(set(ids)) and all(map(math.isfinite, pair)):
                norms.append(pair)
        return result
    torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
    for name in [name for name, value in vars(t).items() if value is clip]:  # it was imported
        setattr(t, name, clip_grad_norm_)
    if step:
        t.train_step = functools.wraps(step)(train_step)
    return clipped, factors, norms, measured

class WatchNorms(torch.overrides.TorchFunctionMode):
    """Appends to `measured` the names of functions that compute a norm of these gradients."""
    NAMES = {"norm", "linalg_norm", "linalg_vector_norm", "_foreach_norm", "square", "pow"}

    def __init__(self, parameters, measured):
        super().__init__()
        self.gradients, self.measured = set(), measured
        with contextlib.suppress(RuntimeError):  # some kinds of tensors have no data_ptr()
            self.gradients = {p.grad.data_ptr() for p in parameters if p.grad is not None}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in self.NAMES and args:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            with contextlib.suppress(RuntimeError):
                if any(torch.is_tensor(tensor) and tensor.data_ptr() in self.gradients
                       for tensor in tensors):
                    self.measured.append(name)
        return func(*args, **kwargs or {})

def watch_seeds(state):
    """Return {seed: set of steps}, to which seeds of torch's and NumPy's generators are added."""
    seeds, seed_default = defaultdict(set), torch.manual_seed
    default_rng = np.random.default_rng

    class Generator(torch.Generator):
        def manual_seed(self, seed):
            note(seed)
            return super().manual_seed(seed)

    def manual_seed(seed):
        note(seed)
        return seed_default(seed)

    class RandomState(np.random.RandomState):
        def __init__(self, seed=None):
            super().__init__(seed)
            note(seed)

    def seeded_default_rng(seed=None):
        note(seed)
        return default_rng(seed)

    def note(seed):
        if isinstance(seed, int):  # order_of() uses a tuple
            seeds[seed].add(state.step)
    torch.Generator, torch.manual_seed = Generator, manual_seed
    np.random.RandomState, np.random.default_rng = RandomState, seeded_default_rng
    return seeds

def watch_gradients(run):
    """Return what optimizers find in each step, as two dicts and a set.

    The first is {name: where a gradient was not 0 in some step, as a bool tensor}. The second is,
    for large parameters, {name: how many different absolute values other than 0 the gradient had
    in the first step}. The set has the names of parameters whose gradient was a tensor of zeros in
    some step after one in which it was not, or in the fourth or a later step. (With zero
    initialization, it takes some steps until all parameters get a gradient.)
    """
    names = {id(p): name for name, p in run.state.raw_model.named_parameters()}
    nonzero, with_zeros, magnitudes = {}, set(), {}
    state, first_step = run.state, run.state.step

    def look(optimizer):
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = names.get(id(p))
                if name is None or p.grad is None:
                    continue
                if p.grad.any():
                    if name not in nonzero:
                        values = p.grad.flatten()[:2**16].abs()
                        if values.count_nonzero() >= 1000:
                            magnitudes[name] = len(values[values > 0].unique())
                    nonzero[name] = nonzero.get(name, False) | (p.grad != 0)
                elif name in nonzero or state.step >= first_step + 3:
                    with_zeros.add(name)
    before_each_step(state, look)
    return nonzero, magnitudes, with_zeros

def before_each_step(state, look):
    """Call look(optimizer) before each step of each optimizer.

    Ignore an error in it, since an edit may have changed anything that it looks at.
    """
    def hook(optimizer, args, kwargs):
        with contextlib.suppress(Exception):
            look(optimizer)
    for optimizer in state.optimizers:
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.register_step_pre_hook(hook)

def watch_learning_rates(t, run):
    """Return {group: factors}, to which each step adds a group's lr divided by the scheduled one.

    A group is named by its optimizer's class and its number.
    """
    state, cfg, factors = run.state, run.cfg, defaultdict(set)

    def look(optimizer):
        for i, group in enumerate(optimizer.param_groups):
            scheduled = group["peak_lr"] * t.get_lr(state.step, cfg) / cfg.max_lr
            if scheduled > 0:
                name = f"group {i} of {type(optimizer).__name__}"
                factors[name].add(round(float(group["lr"]) / scheduled, 9))
    before_each_step(state, look)
    return factors

def watch_overwritten_rates(t):
    """Return a set, to which training adds the names of optimizers with a change without effect.

    This is a change of lr before a step, if step_optimizers() then sets the scheduled lr.
    """
    names, original = set(), getattr(t, "step_optimizers", None)
    set_by_step = {}  # {id of a group: (the group, the lr that the latest step has set)}

    def rates_to_be_replaced(state, cfg, *args):
        """Return (name of the optimizer, group, scheduled lr) of each group with a changed lr."""
        found = []
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                unchanged = group["peak_lr"] if state.step == 0 else group["lr"]
                _, lr = set_by_step.get(id(group), (group, unchanged))
                if group["lr"] != lr:
                    scheduled = group["peak_lr"] * t.get_lr(state.step, cfg) / cfg.max_lr
                    found.append((type(optimizer).__name__, group, scheduled))
        return found

    def remember(state, *args):
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                set_by_step[id(group)] = group, group["lr"]

    def step_optimizers(*args, **kwargs):
        changed = noted(rates_to_be_replaced, *args)
        result = original(*args, **kwargs)
        names.update(name for name, group, scheduled in changed if group["lr"] == scheduled)
        noted(remember, *args)
        return result
    if original:  # otherwise an edit has replaced it
        t.step_optimizers = functools.wraps(original)(step_optimizers)
    return names

def watch_first_update(t, run):
    """Return {name: the RMS of a parameter's first update, divided by the learning rate}.

    Elements without a gradient, such as positions that shorter rows do not use, are left out, and
    so are parameters that have only such elements. The dict is filled in the second step.
    """
    state, first, before, sizes = run.state, run.state.step, {}, {}

    def look(optimizer):
        if state.step == first and not before:
            before.update({name: (p.detach().clone(), p.grad != 0)
                           for name, p in state.raw_model.named_parameters()
                           if p.grad is not None and p.grad.any()})
        if state.step == first + 1 and not sizes:
            rate = t.get_lr(first, run.cfg)
            for name, p in state.raw_model.named_parameters():
                if name in before:
                    old, used = before[name]
                    change = (p.detach().float() - old.float())[used]
                    sizes[name] = change.square().mean().sqrt().item() / rate
    before_each_step(state, look)
    return sizes

def watch_divergences():
    """Return a set, to which kl_div() adds shapes that reduction="batchmean" does not fit."""
    shapes, original = set(), torch.nn.functional.kl_div

    @functools.wraps(original)
    def kl_div(input, *args, **kwargs):
        reduction = kwargs.get("reduction", args[3] if len(args) > 3 else "mean")
        if reduction == "batchmean" and input.dim() > 2:
            shapes.add(tuple(input.shape))
        return original(input, *args, **kwargs)
    torch.nn.functional.kl_div = kl_div
    return shapes

def notes_about_divergences(shapes):
    """Return a note if kl_div() divides by the number of rows, and not by that of tokens."""
    return [f"kl_div(reduction=\"batchmean\") gets a tensor of shape {shape}, and divides by its "
            f"first dimension only, {shape[0]}. For the mean over tokens, flatten the tensor to "
            "(tokens, ids) first." for shape in sorted(shapes)[:1]]

def watch_weights(state):
    """Return two dicts {step: a sample of the weights before this step}, filled during training.

    The first one is for raw_model, and the second one for eval_model, if it is a different model.
    """
    samples, averages = {}, {}

    def look(optimizer):
        if state.step not in samples:
            samples[state.step] = sample_of_weights(state.raw_model)
            if state.eval_model is not state.raw_model:
                averages[state.step] = sample_of_weights(state.eval_model)
    before_each_step(state, look)
    return samples, averages

def sample_of_weights(model):
    """Return {name: a few elements of this parameter (n,), in float64 on the CPU}."""
    return {name: p.detach().flatten()[:64].double().cpu() for name, p in model.named_parameters()}

def watch_average(state):
    """Return a list, to which a note is added if eval_model changes between two optimizers' steps.

    Then it is not only updated after the last one.
    """
    notes, before = [], {}  # {step: checksum of eval_model} when the first optimizer takes its step

    def look(optimizer):
        if state.eval_model is not state.raw_model and not notes:
            now = crc_of(next(state.eval_model.parameters()))
            if before.setdefault(state.step, now) != now:
                notes.append("eval_model changes between the steps of two optimizers, so it is "
                             "updated several times per step. Update it after step_optimizers().")
    before_each_step(state, look)
    return notes

def notes_about_epochs(t, run):
    """Return a note if two epochs read the data in the same order although it is shuffled."""
    loader, n = run.train_loader, min(64, run.train_loader.rows_per_epoch)
    if not run.cfg.shuffle or n < 4:
        return []
    orders = []
    for epoch in (0, 1):
        places = [loader.locate(epoch * loader.rows_per_epoch + row) for row in range(n)]
        # With `recut`, all pieces of an epoch are shifted, so compare the order only
        orders.append(sorted(range(n), key=places.__getitem__))
    if orders[0] != orders[1]:
        return []
    return ["epochs 0 and 1 read the training data in the same order, although `shuffle` is True. "
            "Derive the seed of the order from the epoch, too."]

def notes_about_rows(loader):
    """Return a note if an epoch does not read each row once. Look at six epochs."""
    n = min(20_000, loader.rows_per_epoch)
    for epoch in range(6):
        first = epoch * loader.rows_per_epoch
        n_different = len({loader.locate(row) for row in range(first, first + n)})
        if n_different < 0.99 * n:
            return [f"the first {n:,} rows of epoch {epoch} are only {n_different:,} different "
                    "places in the training data, so some data is read several times, and some "
                    "not at all."]
    return []

def notes_about_muon(state):
    """Return a note on matrices c_attn that Muon does not split into query, key and value."""
    notes = []
    for optimizer in state.optimizers:
        for group in optimizer.param_groups if type(optimizer).__name__ == "Muon" else []:
            names = group.get("param_names", [])
            notes += [f"Muon treats {name}, {tuple(p.shape)}, as one matrix, which leads to a "
                      "higher loss. Use separate layers for query, key and value."
                      for name, p in zip(names, group["params"])
                      if name.endswith("c_attn.weight") and p.size(0) != 3 * p.size(1)]
    return notes[:1]

def notes_about_thirds(state, x):
    """Return a note if Muon splits c_attn.weight, but not into query, key and value.

    x: token ids (B, T).
    """
    names = [name for optimizer in state.optimizers if type(optimizer).__name__ == "Muon"
             for group in optimizer.param_groups for name in group["param_names"]]
    model = state.raw_model
    for name, p in model.named_parameters():
        if not name.endswith("h.0.attn.c_attn.weight") or p.size(0) != 3 * p.size(1):
            continue
        with torch.enable_grad(), WatchDimensions() as watch:
            model(x)
            gradient, = torch.autograd.grad(watch.queries[0].float().square().sum(), p)
        used = sum(third.any().item() for third in gradient.chunk(3))
        if used > 1 and any(name.endswith(of_muon) for of_muon in names):
            return [f"queries depend on {used} of the three thirds of {name}. Unless you have "
                    "changed Muon.step(), it treats each third as a matrix of its own, for query, "
                    "key and value. Change Muon.step(), or the order in which attention splits the "
                    "output of c_attn."]
    return []

def notes_about_longer_runs(t, cfg):
    """Return a note if the rows of a step depend on max_steps."""
    longer, steps = replace(cfg, max_steps=2 * cfg.max_steps), range(0, cfg.max_steps + 1, 10)
    if all(t.rows_before(cfg, step) == t.rows_before(longer, step) for step in steps[:2000]):
        return []
    return ["rows_before() depends on max_steps. If a finished run is continued with a higher "
            "max_steps, it reads rows twice or leaves rows out."]

def notes_about_schedules(t, cfg):
    """Return notes on the batch sizes and the learning rates of a run with this Config."""
    notes, steps = [], range(cfg.max_steps)
    try:
        # An edited rows_before() may take long, since it may add up the rows of all earlier steps
        sizes = [t.rows_of_step(cfg, step) * cfg.T for step in steps[:20_000]]
        if len(set(sizes)) > 1:
            notes.append("the number of tokens per step varies. In a run of "
                         f"{cfg.max_steps} steps, it is {sizes[0]:,} at first, {sizes[-1]:,} at "
                         f"the end, and at most {max(sizes):,}, in step {sizes.index(max(sizes))}.")
            if max(sizes) > 2 * max(sizes[0], sizes[-1]):
                notes[-1] += (" If this is a mistake: rows_before() must return the sum over all "
                              "earlier steps, which is not step * (rows of this step).")
        rates = [t.get_lr(step, cfg) for step in steps]
        if rates and rates[-1] - cfg.min_lr > 0.1 * abs(cfg.max_lr - cfg.min_lr):
            notes.append(f"the learning rate is {rates[-1]:.2e} in the last step, {steps[-1]}, but "
                         f"min_lr is {cfg.min_lr:.2e}.")
        if rates and min(rates) < 0:
            notes.append(f"the learning rate is negative in step {rates.index(min(rates))} "
                         f"({min(rates):.2e}).")
        jumps = [step for step in steps[cfg.warmup_steps + 1:]
                 if abs(rates[step] - rates[step - 1]) > 0.2 * max(rates)]
        if jumps:
            notes.append(f"the learning rate jumps from {rates[jumps[0] - 1]:.2e} in step "
                         f"{jumps[0] - 1} to {rates[jumps[0]]:.2e} in step {jumps[0]}.")
    except Exception:  # an edit may have given these functions other arguments
        pass
    return notes

def notes_about_code(source):
    """Return notes on the text of train_gpt2.py. Part one ends with train()."""
    notes, tree = [], ast.parse(source)
    train = next((node for node in tree.body
                  if isinstance(node, ast.FunctionDef) and node.name == "train"), None)
    if train is None:
        return []
    defaults = {node.attr: node.lineno for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Config"
                and node.lineno <= train.end_lineno}
    for name, line in defaults.items():
        notes.append(f"Config.{name} in line {line} is the default, not the value that this run "
                     f"uses. Use cfg.{name}.")
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any("Module" in ast.unparse(b) for b in node.bases):
            notes += [f"no call of {node.name}() passes `{name}`, so it always has its default."
                      for name in arguments_never_passed(tree, node)]
    names = sorted(kept_in_loop(train) - {"stopped"})
    if names:
        notes.append(f"train() keeps {', '.join(names)} from one step to the next in local "
                     "variables, which a restart forgets. Make them attributes of State.")
    return notes

def notes_about_constants(t):
    """Return a note on constants of Config that no code reads, not even a module of an edit."""
    script = Path(t.__file__)
    files = [script, *t.modules_beside(script, seen={script.stem, "fineweb", "hellaswag"})]
    unread = constants_never_read([ast.parse(file.read_text(encoding="utf-8")) for file in files])
    if not unread:
        return []
    return [f"no code reads {', '.join(sorted(unread))} of Config, so it has no effect. (GPTConfig "
            "gets a constant of Config only if it has one with the same name.)"]

def constants_never_read(trees):
    """Return the names of Config's fields that the code of some modules does not mention.

    A field is mentioned as an attribute or in a string, such as "lr_head" or f"lr_{part}", but not
    in a docstring. trees: what ast.parse() returned, with Config in the first.
    """
    config = next((node for node in trees[0].body
                   if isinstance(node, ast.ClassDef) and node.name == "Config"), None)
    names = {node.target.id for node in (config.body if config else ())
             if isinstance(node, ast.AnnAssign)}
    used, docstrings = set(), set()
    for node in itertools.chain.from_iterable(map(ast.walk, trees)):  # parents come first
        if isinstance(node, ast.Expr):
            docstrings.add(node.value)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.Constant) and node not in docstrings:
            used |= set(re.findall(r"\w+", str(node.value)))
    prefixes = tuple(word for word in used if word.endswith("_") and len(word) > 2)
    return {name for name in names - used if not name.startswith(prefixes)}

def arguments_never_passed(tree, node):
    """Return the arguments of a class's __init__ that default to 0, None or False, in each call.

    Return [] if the class is never called, or called with *args or **kwargs.
    """
    init = next((part for part in node.body
                 if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)
    calls = [call for call in ast.walk(tree)
             if isinstance(call, ast.Call) and ast.unparse(call.func) == node.name]
    if init is None or not calls:
        return []
    names = [argument.arg for argument in init.args.args[1:]]  # without self
    passed = set()
    for call in calls:
        keywords = [keyword.arg for keyword in call.keywords]
        if None in keywords or any(isinstance(part, ast.Starred) for part in call.args):
            return []
        passed |= {*names[:len(call.args)], *keywords}
    with_default = names[len(names) - len(init.args.defaults):]
    # A default such as 4 is probably meant as a constant
    return [name for name, default in zip(with_default, init.args.defaults)
            if name not in passed and ast.unparse(default) in ("0", "0.0", "None", "False")]

def kept_in_loop(function):
    """Return the names of local variables that the while loop of a function changes.

    A variable is left out if its value before the loop comes from state, run, cfg or a clock.
    """
    kept = set()
    loops = [node for node in function.body if isinstance(node, ast.While)]
    for node in function.body[:function.body.index(loops[0])] if loops else []:
        targets, value = [], getattr(node, "value", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = zip(target.elts, value.elts)
            kept |= {ast.unparse(name) for name, start in pairs
                     if names_in(start).isdisjoint({"state", "run", "cfg", "time"})}
    return kept & changed_names(loops[0]) if loops else set()

def names_in(node):
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}

def changed_names(loop):
    """Return the names that a loop assigns, or whose content it changes, such as by append()."""
    names = {node.id for node in ast.walk(loop)
             if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(loop):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            names.add(ast.unparse(node.value))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):  # x.append(y)
            names.add(ast.unparse(node.value.func).rpartition(".")[0])
    return names

def notes_about_parameters(state, initial, with_gradient):
    """Return notes on parameters that no optimizer has, or that got no gradient.

    initial: {name: (shape, checksum, ...)} before training. with_gradient: names of the parameters
    that have got a gradient.
    """
    notes, unused, decayed, left_out = [], [], [], []
    owned = {id(p) for optimizer in state.optimizers for group in optimizer.param_groups
             for p in group["params"]}
    for name, p in state.raw_model.named_parameters():
        if p.requires_grad and id(p) not in owned:
            left_out.append(name)
        elif p.requires_grad and name in initial and name not in with_gradient:
            (unused if crc_of(p) == initial[name][1] else decayed).append(name)
    if left_out:
        notes.append(f"at the end of training, no optimizer has {', '.join(left_out[:4])} "
                     f"({len(left_out)} in all). Perhaps these parameters were replaced, or "
                     "unfrozen, after configure_optimizers().")
    if unused:
        notes.append(f"{', '.join(unused[:4])} got no gradient in any step ({len(unused)} "
                     "in all). They are not used, they are detached, or they are multiplied by "
                     "something that is 0.")
    if decayed:
        notes.append(f"{', '.join(decayed[:4])} got no gradient in any step, but changed, for "
                     f"example by weight decay ({len(decayed)} in all). They are not used, "
                     "they are detached, or they only affect something constant, such as a softmax "
                     "over one element. To freeze parameters, set requires_grad=False.")
    return notes

def notes_about_zeros(names):
    """Return a note on parameters whose gradient is 0 in some steps but not in others."""
    if not names:
        return []
    some = ", ".join(sorted(map(str, names))[:4])
    return [f"the gradient of {some} is 0 in some steps ({len(names)} in all). The "
            "optimizer still changes such parameters then, by weight decay and momentum. To keep "
            "a parameter unchanged in a step, set p.grad = None."]

def notes_about_magnitudes(magnitudes):
    """Return a note if the gradient of a matrix has only a few different absolute values.

    magnitudes: see watch_gradients().
    """
    few = [name for name, number in magnitudes.items() if number <= 8]
    if not few:
        return []
    return [f"the elements of the gradient of {few[0]} have only {magnitudes[few[0]]} different "
            f"absolute value(s) ({len(few)} such parameters). Perhaps an operation without a "
            "gradient, such as round(), is applied to it, so that only a common factor is trained."]

def notes_about_factors(factors):
    """Return a note if a group's lr is always the same multiple of the scheduled one, but not 1.

    factors: see watch_learning_rates().
    """
    return [f"in each step, the learning rate of {name} is {min(values):g} times the one that its "
            "schedule gives. If this factor should accumulate, note that step_optimizers() sets lr "
            "anew in each step." for name, values in factors.items()
            if max(values) - min(values) < 1e-6 and abs(min(values) - 1) > 1e-6]

def notes_about_overwritten_rates(names):
    """Return a note if learning rates were changed without an effect.

    names: those of the optimizers (see watch_overwritten_rates).
    """
    if not names:
        return []
    return [f"the learning rates of {', '.join(sorted(names))} are changed before a step, but then "
            "step_optimizers() sets them from peak_lr and get_lr(), so the change has no effect. "
            "Change them in step_optimizers(), after it has set them, or edit peak_lr or get_lr()."]

def notes_about_shared_parameters(model):
    """Return a note on parameters that have several names, except the tied embedding."""
    names = defaultdict(list)
    for name, p in model.named_parameters(remove_duplicate=False):
        names[id(p)].append(name)
    shared = [of_one for of_one in names.values()
              if len(of_one) > 1 and set(of_one) != {"transformer.wte.weight", "lm_head.weight"}]
    if not shared:
        return []
    return [f"{', '.join(shared[0][:4])} are the same parameter. If they should be different ones, "
            "create each of them: [f()] * n repeats one object, but [f() for _ in range(n)] "
            "creates n objects."]

def notes_about_second_weights(state):
    """Return a note if an optimizer's state holds weights that are similar to those of the model.

    This is not noted if eval_model is a different model, which then may have these weights.
    """
    if state.eval_model is not state.raw_model:
        return []
    names = {id(p): name for name, p in state.raw_model.named_parameters() if p.dim() > 1}
    for optimizer in state.optimizers:
        for p, values in optimizer.state.items():
            for key, value in values.items():
                if id(p) not in names or not torch.is_tensor(value) or value.shape != p.shape:
                    continue
                cosine = torch.cosine_similarity(p.detach().flatten(), value.flatten(), dim=0)
                if cosine > 0.9:
                    return [f"{type(optimizer).__name__} keeps {key!r}, which is similar to the "
                            f"weights (of {names[id(p)]}, for example). If validation, samples and "
                            "the export should use other weights than training, return them in "
                            "State.eval_model."]
    return []

def notes_about_elements(model, nonzero):
    """Return a note on matrices in which most elements never got a gradient, except embeddings.

    nonzero: see watch_gradients().
    """
    embeddings = {id(module.weight) for module in model.modules()
                  if isinstance(module, torch.nn.Embedding)}
    shares = {name: nonzero[name].float().mean().item() for name, p in model.named_parameters()
              if p.dim() > 1 and name in nonzero and id(p) not in embeddings}
    sparse = [name for name, share in shares.items() if share < 0.5]
    if not sparse:
        return []
    return [f"only {shares[sparse[0]]:.1%} of the elements of {sparse[0]} got a gradient other "
            f"than 0 ({len(sparse)} such parameters). Perhaps an operation without a gradient is "
            "applied to it, such as round()."]

def notes_about_attributes(model, changed):
    """Return notes on tensors in the model's modules that are neither parameters nor buffers.

    changed: names of values that training has changed. Such a value is usually computed in
    forward().
    """
    notes = []
    for module in model.modules():
        for name, value in vars(module).items():
            label = f"self.{name} in {type(module).__name__}"
            if not name.startswith("_") and is_left_out(value) and label not in changed:
                notes.append(f"{label} holds a tensor that is neither a parameter nor a buffer of "
                             "the model, so it is neither trained nor saved, nor moved to the GPU. "
                             "Use nn.Parameter, nn.ParameterList, nn.ModuleList or, for a "
                             "constant, register_buffer().")
    return list(dict.fromkeys(notes))[:4]  # modules of the same class give the same note

def notes_about_decay(state):
    """Return a note on biases and gains that have weight decay."""
    decayed = {id(p) for optimizer in state.optimizers for group in optimizer.param_groups
               if group.get("weight_decay") for p in group["params"]}
    names = [name for name, p in state.raw_model.named_parameters()
             if p.dim() < 2 and p.requires_grad and id(p) in decayed]
    if not names:
        return []
    return [f"{len(names)} parameters with fewer than two dimensions are in a group with weight "
            f"decay, for example {', '.join(names[:4])}. Usually, biases and the gains of norms "
            "have none."]

def notes_about_gains(state, initial):
    """Return a note on gains with several dimensions that are treated as weight matrices.

    initial: {name: (shape, checksum, some values, ...)} of initial weights.
    """
    treated = {}  # {id of a parameter: what happens to it}
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            is_muon = type(optimizer).__name__ == "Muon"
            what = "is orthogonalized by Muon" if is_muon else "has weight decay"
            if is_muon or group.get("weight_decay"):
                treated |= {id(p): what for p in group["params"]}
    for name, p in state.raw_model.named_parameters():
        values = initial[name][2] if name in initial else []
        if id(p) in treated and p.dim() >= 2 and len(values) == 1 and values[0] != 0:
            return [f"{name}, {tuple(p.shape)}, {treated[id(p)]}, like a weight matrix, although "
                    f"all of its elements were {values[0]:g} before the first step, as those of a "
                    "gain. configure_optimizers() treats all parameters with two dimensions as "
                    "matrices. Give a gain one dimension, or treat it there like those of norms."]
    return []

def parameters_of(optimizers, class_name):
    """Return the ids of the parameters that optimizers of a class update."""
    return {id(p) for optimizer in optimizers if type(optimizer).__name__ == class_name
            for group in optimizer.param_groups for p in group["params"]}

def notes_about_tables(state):
    """Return a note if Muon updates an embedding."""
    by_muon = parameters_of(state.optimizers, "Muon")
    names = [f"{name}.weight" for name, module in state.raw_model.named_modules()
             if isinstance(module, torch.nn.Embedding) and id(module.weight) in by_muon]
    if not names:
        return []
    return [f"Muon updates {names[0]}, which is an nn.Embedding, because it is in a block and has "
            "two dimensions. Muon treats it as one matrix, but the rows of an embedding are "
            "independent of each other. Usually, AdamW updates embeddings: see "
            "configure_optimizers()."]

def notes_about_position_buffers(model):
    """Return a note if a buffer with one row per position has nearly the same rows."""
    for name, buffer in model.named_buffers():
        if buffer.dim() == 2 and len(buffer) == model.config.block_size and buffer.numel():
            columns = buffer.detach().float()
            varies = columns.amax(0) - columns.amin(0) > 0.01 * columns.abs().max()
            n = int(varies.sum())
            if 0 < n < 0.1 * len(varies):
                return [f"the buffer {name} has one row for each of {len(buffer)} positions, but "
                        f"only {n} of its {len(varies)} columns are different at different "
                        "positions. If it encodes positions, check its frequencies."]
    return []

def notes_about_learning_rates(state):
    """Return a note if only some optimizers give the blocks several learning rates."""
    in_blocks = {id(p) for name, p in state.raw_model.named_parameters()
                 if name.startswith("transformer.h.")}
    numbers = {}  # {class: (how many learning rates it has in the blocks, how many parameters)}
    for optimizer in state.optimizers:
        rates, count = set(), 0
        for group in optimizer.param_groups:
            if n := sum(id(p) in in_blocks for p in group["params"]):
                rates.add(float(group["peak_lr"]))
                count += n
        numbers[type(optimizer).__name__] = len(rates), count
    several = [name for name, (n, _) in numbers.items() if n > 1]
    single = [(name, count) for name, (n, count) in numbers.items() if n == 1 and count > 1]
    if not several or not single:
        return []
    name, count = single[0]
    return [f"in the blocks, {several[0]} has {numbers[several[0]][0]} learning rates, but {name}, "
            f"which trains {count} of their parameters, has only one. Perhaps the edit does not "
            f"reach the groups of {name}."]

def notes_about_depth(t, run, n_layer=12):
    """Return a note if hyperparameters of the blocks are in order here, but not in a deep model.

    In order means that they rise or fall from block to block. For example, if code looks for "h.1"
    in names of parameters, it also finds h.10 and h.11, but a small model has no such blocks.
    """
    config, notes = run.state.raw_model.config, []
    if config.n_layer >= n_layer or config.n_layer < 2:
        return []
    deep = t.build_model(run.cfg, replace(config, n_layer=n_layer))
    here = hyperparameters_of_blocks(run.state.raw_model, run.state.optimizers, "peak_lr")
    there = hyperparameters_of_blocks(
        deep, t.configure_optimizers(deep, replace(run.cfg, n_layer=n_layer)), "lr")
    for key, values in there.items():
        if key in here and is_in_order(here[key]) and not is_in_order(values):
            name, hyperparameter = key
            by_block = ", ".join(f"{i}: {value:.2g}" for i, value in enumerate(values))
            notes.append(f"with n_layer={n_layer}, {name} has these values of {hyperparameter} in "
                         f"the blocks: {by_block}. Perhaps code that looks for the name of a "
                         "block, such as h.1, also finds h.10. (Look for \"h.1.\" instead.)")
    return notes[:1]

def hyperparameters_of_blocks(model, optimizers, lr):
    """Return {(name of a parameter in a block, hyperparameter): its values in all blocks}.

    lr: the entry of a group that holds the highest value of its learning rate.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    found = defaultdict(dict)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if match := re.fullmatch(r"transformer\.h\.(\d+)\.(.+)", names.get(id(p), "")):
                    block, name = int(match[1]), match[2]
                    found[name, "lr"][block] = float(group[lr])
                    found[name, "weight_decay"][block] = float(group.get("weight_decay", 0))
    return {key: [values[block] for block in sorted(values)] for key, values in found.items()}

def is_in_order(values):
    """Return whether numbers never rise or never fall, apart from rounding."""
    changes = [b - a for a, b in itertools.pairwise(values) if not math.isclose(a, b)]
    return all(change > 0 for change in changes) or all(change < 0 for change in changes)

def notes_about_groups(optimizers):
    """Return notes on hyperparameters of optimizer groups that training changes much, except lr."""
    notes = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            before = group.get("initial", group)
            for name in before.keys() - {"lr", "initial"}:
                if is_far(before[name], group.get(name)):
                    notes.append(f"training changes {name} in a parameter group of "
                                 f"{type(optimizer).__name__} from {before[name]:.4g} to "
                                 f"{group.get(name):.4g} ({len(group['params'])} parameters). If "
                                 "it is computed from its own earlier value (*=), factors "
                                 "accumulate.")
    return list(dict.fromkeys(notes))[:4]

def is_far(before, after):
    """Return whether two floats of the same sign differ by more than a factor of ten."""
    if not isinstance(before, float) or not isinstance(after, float) or before * after <= 0:
        return False
    return not 0.1 <= after / before <= 10

def notes_about_copies(state):
    """Return notes on attributes of State that hold the weights of raw_model, and not a copy."""
    weights = {p.data_ptr() for p in state.raw_model.parameters()}
    return [f"State.{name} holds the weights of raw_model themselves, so it changes with them. To "
            "keep earlier weights, copy them with clone()."
            for name, content in state.state_dict().items()
            if name not in ("raw_model", "optimizers", "scaler")
            and any(part.data_ptr() in weights for _, part in tensors_of(content))]

def notes_about_padding(model):
    """Return a note if the rows of wte that pad the vocabulary are not 0 at the end of training."""
    padding = model.transformer.wte.weight[model.config.n_vocab:]
    if not padding.any():
        return []
    return [f"the {len(padding)} rows of transformer.wte.weight that only pad the vocabulary are "
            "not 0 at the end of training. Perhaps the loss uses the logits of these rows: leave "
            "them out (logits[..., :config.n_vocab])."]

def notes_about_zero_attributes(state):
    """Return notes on attributes of State whose tensors are all 0 at the end of training."""
    tensors = {name: [tensor for _, tensor in tensors_of(content)
                      # One number, or an integer, may count events that have not happened
                      if tensor.is_floating_point() and tensor.numel() > 1]
               for name, content in state.state_dict().items()
               if name not in ("raw_model", "optimizers", "scaler")}
    return [f"all elements of State.{name} are 0 at the end of training. Check that it is updated."
            for name, parts in tensors.items() if parts and not any(part.any() for part in parts)]

def integers_of(state):
    """Return {name: value} of the integers in State that an edit has added."""
    return {name: value for name, value in vars(state).items()
            if type(value) is int and name not in ("step", "tokens")}

def notes_about_counters(before, state, steps):
    """Return notes on integers in State that grow by more than 1 per step.

    before: what integers_of() returned before the first of these steps.
    """
    return [f"State.{name} grows from {before.get(name, 0)} to {value} in {steps} steps. If it "
            "counts steps or updates, it is counted more than once per step."
            for name, value in integers_of(state).items() if value - before.get(name, 0) > steps]

def notes_about_average(state, samples):
    """Return notes on an eval_model that is not a proper average of raw_model's weights.

    samples: what watch_weights() returned.
    """
    if state.eval_model is state.raw_model:
        return []
    averaged, own = [{p.dtype for p in model.parameters()}
                     for model in (state.eval_model, state.raw_model)]
    for dtype in averaged - own:
        if dtype in (torch.bfloat16, torch.float16):
            return [f"eval_model has weights in {str(dtype).removeprefix('torch.')}. If it is an "
                    "average, each update changes it by less than the rounding of this dtype, so "
                    "it may stop changing. Keep averages in float32."]
    samples = samples | {state.step: sample_of_weights(state.raw_model)}
    samples = [torch.cat(list(sample.values())) for sample in samples.values()]
    average = torch.cat(list(sample_of_weights(state.eval_model).values()))
    shares = shares_in_average(samples, average)
    if not shares:
        return []
    total, initial, last = sum(shares), shares[0], shares[-1]
    if last > 0.9:
        return ["eval_model has almost the same weights as raw_model at the end. If it should be "
                "an average, check that it has begun, that it copies weights (clone()), and that "
                "its two factors (such as decay and 1 - decay) are not exchanged."]
    if abs(total - 1) > 0.01:
        return [f"eval_model is a weighted sum of the model's weights after different steps, but "
                f"the factors add up to {total:.3g} instead of 1."]
    if initial > 0.01 and abs(shares[1]) < 0.1 * initial and abs(initial - last) < 0.2 * last:
        return [f"eval_model is an average in which the initial weights have a share of "
                f"{initial:.0%}, but those after the first step have none. If the average begins "
                "later, its first value should be a copy of the weights at that time."]
    return []

def shares_in_average(samples, average):
    """Return a list of factors such that `average` is the sum of factor * sample.

    samples: list of tensors (N,). average: (N,). Return None if there are no such factors, for
    example because the average does not consist of these samples.
    """
    matrix = torch.stack(samples, dim=1)  # (N, samples)
    if len(average) != len(matrix) or len(average) < len(samples):
        return None
    factors = torch.linalg.lstsq(matrix, average[:, None], driver="gelsd").solution  # (samples, 1)
    error = (matrix @ factors - average[:, None]).norm()
    moved = (matrix[:, 0] - matrix[:, -1]).norm()
    return factors.flatten().tolist() if error < 1e-3 * moved else None

def notes_about_uneven_average(samples, averages):
    """Return a note if a step moves some weights of eval_model further than others.

    samples, averages: what watch_weights() returned.
    """
    if len(averages) < 2:
        return []
    *_, before, after = averages  # the last two steps
    moved = {}  # {name: which part of the way to the weight in raw_model a running average moved}
    for name, old in averages[before].items():
        way, change = samples[after][name] - old, averages[after][name] - old
        # The numbers have been rounded, at best to float32
        if change.norm() > 1e3 * torch.finfo(torch.float32).eps * old.norm():
            part = (change @ way / (way @ way)).item()
            if (change - part * way).norm() < 0.01 * way.norm():
                moved[name] = part
    usual = statistics.median(moved.values()) if moved else 0.0
    others = [name for name, part in moved.items() if not math.isclose(part, usual, rel_tol=0.1)]
    if not others or not 0 < usual < 1:
        return []
    return [f"one step moves eval_model by {usual:.2g} of the way to the weights of raw_model, but "
            f"{others[0]} by {moved[others[0]]:.2g}. Check that it is updated once per step. "
            "(state_dict() contains a tied weight twice, but parameters() contains it once.)"]

def notes_about_buffers(state, begin):
    """Return a note if training changes a buffer of raw_model, but not the one of eval_model.

    begin: {name: checksum} of the buffers before training.
    """
    if state.eval_model is state.raw_model:
        return []
    mine, averaged = [{name: crc_of(b) for name, b in model.named_buffers()}
                      for model in (state.raw_model, state.eval_model)]
    left = [name for name in mine if mine[name] != begin.get(name) == averaged.get(name)]
    if not left:
        return []
    return [f"training changes the buffer {left[0]} of raw_model, but eval_model still has its "
            "initial value. If validation uses it, copy it when you update the average."]

def notes_about_seeds(seeds):
    """Return a note if a generator gets the same seed in many steps. seeds: {seed: steps}."""
    often = [seed for seed, steps in seeds.items() if len(steps) > 3]
    if not often:
        return []
    return [f"a random generator is seeded with {often[0]} at {len(seeds[often[0]])} values of "
            "State.step, so it yields the same random numbers each time. If they should differ, "
            "derive the seed from the step too: seed_from(cfg.seed, state.step). (In validation, "
            "they should be the same.)"]

def notes_about_repeated_rows(rows):
    """Return a note if training reads rows several times. rows: arrays (T,) of token ids."""
    times = Counter(row.tobytes() for row in rows if len(row) >= SHORTEST_ROW)
    repeated = sum(n - 1 for n in times.values())
    if repeated <= 0.05 * len(rows):  # a text may repeat itself
        return []
    return [f"{repeated} of the first {len(rows)} rows that the model is trained on are "
            "repetitions of other rows. If an edit uses the same rows twice, as SAM does, check "
            "that their gradients should be added up, and which of the losses is reported. "
            "Otherwise check read_step()."]

def notes_about_new_targets(new, looked_up):
    """Return a note if targets of training do not occur in the training text.

    new: the number of rows whose targets do not. looked_up: the number of rows.
    """
    if new <= 0.05 * looked_up:
        return []
    return [f"the targets of {new} of {looked_up} rows are not part of the training text. If an "
            "edit puts noise into the inputs, check that it leaves the targets as they are."]

def notes_about_ids(encoding, inputs, targets):
    """Return a note on an id that is never a target. inputs, targets: Counters, see count_ids()."""
    never = [token for token, n in inputs.most_common() if n >= 20 and not targets[token]]
    if not never:
        return []
    return [f"the token {encoding.decode_single_token_bytes(never[0])} (id {never[0]}) occurs "
            f"{inputs[never[0]]} times in the inputs of the first steps, but never as a target, so "
            "the model does not learn to predict it. If targets are masked, check which ones "
            f"({len(never)} such tokens)."]

def notes_about_masks(encoding, before_masks, before_targets):
    """Return a note if all targets after a certain id are masked, and no others.

    before_masks, before_targets: Counters of the inputs with masked and with other targets.
    """
    if sum(before_masks.values()) < 20 or len(before_masks) > 1:
        return []
    token, = before_masks
    if before_targets[token]:
        return []
    text = encoding.decode_single_token_bytes(token)
    return [f"targets are masked only where the input is {text} (id {token}). So the model learns "
            "to predict this token, but not what follows it. If it is meant to be the other way "
            "round, mask the targets that are equal to the token (in y, not in x)."]

def notes_about_alignment(t, run, train):
    """Return notes on metrics that do not compare predictions with the next token.

    Three models that know the text are validated. The right metrics of the one that predicts the
    next token are unlike those of the others. Metrics that are similar for all three describe
    something else. train: train() in the script.
    """
    right = metrics_if_known(t, run, train, ahead=1)
    if not right.keys() - {"val", "minutes"}:
        return []
    repeating, later = [metrics_if_known(t, run, train, ahead) for ahead in (0, 2)]
    notes = []
    for name in sorted(right.keys() - {"val", "minutes"}):
        values = repeating[name], right[name], later[name]
        unlike = odd_one_out([math.copysign(math.log1p(abs(value)), value) for value in values])
        if unlike in (0, 2):
            what = "repeats its input" if unlike == 0 else "predicts the token after the next one"
            notes.append(f"{name} is {right[name]:.4g} for a model that predicts each next token "
                         f"with certainty, but {values[unlike]:.4g} for a model that {what}. "
                         "Perhaps it compares logits with the wrong tokens: logits[:, i] belong to "
                         "the target y[:, i].")
        elif unlike == 1 and name.startswith("acc") and not any(
                math.isclose(right[name], best, abs_tol=1e-4) for best in (1.0, 100.0)):
            notes.append(f"{name} is {right[name]:.4g}, not 1, for a model that predicts each next "
                         "token with certainty. Check what it counts.")
    return notes

def odd_one_out(values):
    """Return the index of the value that is far from the two others, or None.

    values: log(1 + x) of metrics x, so the distance is 0.69 for an accuracy of 1 or 0.
    """
    for i, value in enumerate(values):
        others = [other for j, other in enumerate(values) if j != i]
        distance = min(abs(value - other) for other in others)
        if distance > 0.4 and max(others) - min(others) < 0.3 * distance:
            return i
    return None

def metrics_if_known(t, run, train, ahead):
    """Return {metric: value} that train() reports after the last step if eval_model knows the text.

    ahead: the token that the model predicts with certainty. 1 is the next token, and 0 is the
    token that it has just read.
    """
    values, known, batch = {}, {}, t.DataLoaderLite.batch

    def remember(loader, *args, **kwargs):
        x, y = batch(loader, *args, **kwargs)
        known["x"], known[0], known[1] = x.clone(), x.clone(), y.clone()
        known[2] = torch.cat((y[:, 1:], y[:, -1:]), dim=1)
        return x, y

    def forward(idx, targets=None, return_logits=True):
        if not torch.equal(idx, known["x"]):
            raise ValueError("these are not the tokens of the last batch")
        logits = torch.zeros(*idx.shape, run.encoding.n_vocab, device=idx.device)
        logits.scatter_(-1, known[ahead].clamp(min=0)[..., None], 50.0)  # it may be masked
        loss = None
        if targets is not None:
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss

    def record(run, step, metric, value, *args, **kwargs):
        values[metric] = float(value)
    at_the_end = replace(run.cfg, max_steps=run.state.step)  # then train() takes no step
    attributes = dict(vars(run.state))  # an edit of train() may change them
    with (mock.patch.object(t.DataLoaderLite, "batch", remember), torch.no_grad(),
          mock.patch.object(run.state.eval_model, "forward", forward),
          mock.patch.object(run, "cfg", at_the_end), mock.patch.object(run, "folder", mock.Mock()),
          mock.patch.multiple(t, report=record, write_log=record, finish=mock.Mock(),
                              print_sample=mock.Mock())):
        train(run)
    vars(run.state).clear()
    vars(run.state).update(attributes)
    return values

def notes_about_forward(t, run):
    """Return a note if a forward pass of a new model in eval mode changes its parameters."""
    model = t.build_model(run.cfg, run.state.raw_model.config).to(run.device)
    before = {name: crc_of(p) for name, p in model.named_parameters()}
    with torch.no_grad():
        model(run.val_loader.batch(0, 1, run.device)[0])
    changed = [name for name, p in model.named_parameters() if crc_of(p) != before[name]]
    if not changed:
        return []
    return [f"a forward pass changes parameters, even in eval mode: {changed[0]} ({len(changed)} "
            "in all). Perhaps it writes to p.data, for example rounded values. Only optimizers "
            "should change parameters, so use a changed copy in the forward pass."]

def notes_about_near_copies(t, run):
    """Return a note if training data contains validation text, apart from case and spaces.

    Fifty pieces of validation text are looked up in the first training shard or text.
    """
    training, validation = [t.tokens_of_shard(loader.shards[0])[:MOST_TOKENS]
                            for loader in (run.train_loader, run.val_loader)]
    length = max(SHORTEST_ROW, run.cfg.T)
    starts = np.linspace(0, max(0, len(validation) - length), 50, dtype=int)

    def simplified(tokens):
        return "".join(run.encoding.decode(tokens.tolist()).lower().split())
    text = simplified(training)
    pieces = [simplified(validation[start:start + length])[4:-4] for start in starts]
    found = sum(bool(piece) and piece in text for piece in pieces)
    if found <= 0.2 * len(pieces):  # a text may repeat itself
        return []
    return [f"{found} of {len(pieces)} pieces of validation text are part of the training data, "
            "apart from upper and lower case and spaces, so val is too low."]

def notes_about_positions(t, run):
    """Return notes on how a new model with one layer uses the positions of tokens.

    With more layers, the causal mask alone tells a model something about positions.
    """
    config = replace(run.state.raw_model.config, n_layer=1)
    model = t.GPT(config, run.cfg.seed).to(run.device)
    x, _ = run.val_loader.batch(0, 8, run.device)
    return (noted(notes_about_order, model, x[:1]) + noted(notes_about_distance, model, x)
            + noted(notes_about_rotation, model, x[:1, :1].expand(1, x.size(1))))

def notes_about_order(model, x):
    """Return a note if the order of earlier tokens has no influence. x: token ids (B, T)."""
    reversed_order, other = x.clone(), x.clone()
    reversed_order[:, :-1] = x[:, :-1].flip(1)
    other[:, :-1] = x[:, -1:]
    with torch.no_grad():
        logits, turned, changed = (model(ids)[0][:, -1].float()
                                   for ids in (x, reversed_order, other))
    influence = (changed - logits).abs().max().item()
    if influence < 1e-5 or (turned - logits).abs().max().item() > 1e-4 * influence:
        return []
    return ["in a model with one layer, the order of the earlier tokens has no influence on the "
            "logits at the last one. If the model should know positions, check that they are used "
            "along the right dimension."]

def notes_about_distance(model, x):
    """Return a note if distant tokens have more influence than close ones. x: token ids (B, T)."""
    embedded, T = [], x.size(1)
    hook = model.transformer.wte.register_forward_hook(
        lambda module, args, output: embedded.append(output))
    try:
        logits = model(x)[0][:, -1].float()  # (B, n_vocab)
    finally:
        hook.remove()
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(logits.shape, generator=generator).to(logits.device)
    gradient, = torch.autograd.grad((logits * direction).sum(), embedded[0])  # (B, T, C)
    influence = gradient.float().norm(dim=-1).mean(dim=0)  # (T,)
    distant, close = influence[:T // 4].mean(), influence[-1 - T // 4:-1].mean()
    if not distant > 3 * close:
        return []
    return [f"in a new model, the first quarter of a row has {distant / close:.1f} times as much "
            "influence on the logits at the last token as the last quarter. If attention should "
            "prefer close tokens, check the sign of its bias."]

def notes_about_rotation(model, x):
    """Return a note if queries and keys are changed at each position, but not by a rotation.

    x: token ids (1, T) that are all the same. After a rotation, as in RoPE, the product of a query
    and a key then depends only on their distance. Positions that are added to the embeddings are
    left out. (If they are not removed, there is no note.)
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and name != "transformer.wte":
            module.weight.data.zero_()
    inputs = []
    hook = model.transformer.h[0].register_forward_pre_hook(lambda m, args: inputs.append(args[0]))
    try:
        with WatchDimensions() as watch, torch.no_grad():
            model(x)
    finally:
        hook.remove()
    if not watch.attention or (inputs[0] - inputs[0][:, :1]).abs().max() > 1e-6:
        return []
    # A factor per position, such as a temperature that grows with it, is left out
    q, k = (torch.nn.functional.normalize(x.double(), dim=-1) for x in watch.attention[0])
    products = q @ k.mT  # (1, heads, T, T)
    # A convolution or a shift may change the first tokens of a row
    products = products[..., x.size(1) // 4:, x.size(1) // 4:]
    change = (products[..., 1:, 1:] - products[..., :-1, :-1]).abs().max()
    if not change > 1e-2 * products.abs().max():
        return []
    return ["the angle between a query and a key depends on more than the distance of their "
            "positions: it changes if both are moved by one position. If this should be rotary "
            "position embedding, check that the angles and the pairs of dimensions have the same "
            "layout, and that queries and keys are rotated alike."]

def notes_about_auxiliary_gradients(run, nonzero):
    """Return a note on layers that eval mode uses, but that only additional losses train.

    For example, the router of a mixture of experts, if its output only selects experts.
    nonzero: see watch_gradients().
    """
    model, names = run.state.raw_model, []
    x, y = run.val_loader.batch(0, 2, run.device)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    logits, loss = model(x, y)
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    for (name, p), gradient in zip(parameters.items(), gradients):
        if gradient is None and name in nonzero:
            with torch.no_grad():
                p.neg_()
                try:
                    if not torch.equal(model(x, y)[0], logits):
                        names.append(name)
                finally:
                    p.neg_()
    if not names:
        return []
    return [f"{', '.join(names[:4])} got gradients in training, and the logits in eval mode depend "
            f"on them, but their loss has no gradient for them ({len(names)} parameters). So only "
            "additional terms train them. A router, for example, also learns from the loss if the "
            "output of each expert is multiplied by its gate."]

def notes_about_shifts(shares):
    """Return a note if rows of training have targets that are not the next tokens.

    shares: what share_of_shifted_rows() returned for some forward passes.
    """
    if min(shares, default=1.0) == 1.0:
        return []
    return [f"in a forward pass of training, only {min(shares):.0%} of the rows have targets that "
            "are the tokens that follow in their inputs. If read_step() changes or cuts x and y, "
            "check that each target is still the token after its input."]

def notes_about_clipping(state, clipped, norms):
    """Return notes on gradients that are not clipped, and on a wrong norm in the log.

    clipped, norms: what watch_clipping() returned.
    """
    notes, trained = [], [p for p in state.raw_model.parameters() if p.requires_grad]
    left = sum(id(p) not in clipped for p in trained)
    if clipped and left:
        notes.append(f"{left} of {len(trained)} trained parameters are not given to "
                     "clip_grad_norm_(), so it does not clip their gradients, and they are not "
                     "part of the norm that it returns.")
    wrong = [pair for pair in norms if not math.isclose(*pair, rel_tol=1e-2)]
    if wrong and not left:  # an edit may have computed the norm of all gradients by itself
        notes.append(f"train_step() returns {wrong[0][0]:.4g} as the norm of the gradient. The "
                     "norm of the gradients in all calls of clip_grad_norm_() together is "
                     f"{wrong[0][1]:.4g}.")
    return notes

def notes_about_small_gradients(factors):
    """Return a note if clipping makes most gradients much smaller.

    factors: what watch_clipping() returned.
    """
    if len(factors) < 4 or not statistics.median(factors) < 0.1:
        return []
    return [f"clip_grad_norm_() multiplies gradients by {statistics.median(factors):.2g} (the "
            "median of all calls). Updates by AdamW and Muon hardly show this. Check its max_norm."]

def notes_about_clipped_norms(measured):
    """Return a note on norms of gradients that clip_grad_norm_() has changed.

    measured: what watch_clipping() returned.
    """
    if not measured:
        return []
    return ["after clip_grad_norm_() has made the gradients smaller, a norm of them is computed. "
            "If it is a metric, compute it before clip_grad_norm_() is called."]

def notes_about_validation(both):
    """Return a note if validation reads training data. both: from training_and_validation()."""
    if both["equal_val_rows"] > 0.2 * both["val_rows"]:
        return ["validation_loss() also reads data on which the model is trained: "
                f"{both['equal_val_rows']} of {both['val_rows']} rows of one of its loaders are "
                "part of the training data. This is right only if the metric is meant to show the "
                "loss on training data."]
    if both["equal_rows"] > 0.05 * both["rows"]:
        return ["validation_loss() also reads data on which the model is trained: "
                f"{both['equal_rows']} of {both['rows']} training rows are part of it."]
    return []

@contextlib.contextmanager
def buffers_restored(model):
    """At the end, restore the buffers of a model, which a forward pass in training may change."""
    before = {name: b.clone() for name, b in model.named_buffers()}
    try:
        yield
    finally:
        for name, b in model.named_buffers():
            if name in before and before[name].shape == b.shape and not b.equal(before[name]):
                with torch.no_grad():
                    b.copy_(before[name])

def notes_about_targets(model, x, y):
    """Return a note if training predicts a target from inputs that come after it.

    Such inputs contain the target. For example, targets.roll(-1, 1) moves the first target to the
    end of the row. x, y: inputs and targets (B, T). The model must be in training mode.
    """
    embedding, outputs = getattr(getattr(model, "transformer", None), "wte", None), []
    if embedding is None or (y[:, 0] < 0).any():  # an edit may ignore the first targets
        return []
    hook = embedding.register_forward_hook(lambda module, args, output: outputs.append(output))
    gradients, other = [], y.clone()
    other[:, 0] = (y[:, 0] + 1) % (int(y.max()) + 1)
    try:
        for targets in (y, y, other):
            torch.manual_seed(0)
            outputs.clear()
            with buffers_restored(model):
                loss = model(x, targets)[1]
                gradients.append(torch.autograd.grad(loss, outputs[0])[0].float())  # (B, T, C)
    finally:
        hook.remove()
    if (gradients[0] - gradients[1]).norm() > 1e-4 * gradients[0].norm():
        return []  # the model draws random numbers from a generator of its own
    # Only the first input may have an influence on how well the first target is predicted. (A loss
    # that selects tokens, for example the hardest ones, changes at other places in each row)
    change = (gradients[0] - gradients[2]).norm(dim=-1)  # (B, T)
    in_each_row = (change > 1e-3 * change.max()).all(dim=0)  # (T,)
    places = in_each_row[1:].nonzero().flatten() + 1
    if not len(places):
        return []
    return [f"the training loss compares the first target of a row with predictions from later "
            f"inputs (at position {places[0]} and perhaps others), which contain that "
            "target. If roll() shifts the targets, leave out those that it moves from one end of "
            "the row to the other."]

def notes_about_modes(t, run, gap, draws_random):
    """Return a note if the model adds less to the residual stream in training than in eval mode.

    gap: by how much the logits of the two modes differ. draws_random: whether the model draws
    random numbers in training, as in stochastic depth. Then the mean of many draws is compared.
    """
    if not gap or getattr(run.cfg, "dropout", 0):
        return []
    # In a new model, blocks depend less on each other
    model = t.build_model(run.cfg, run.state.raw_model.config).to(run.device)
    x = run.val_loader.batch(0, 8, run.device)[0][:, :32]
    ends = {}
    model.transformer.h[0].register_forward_pre_hook(
        lambda module, args: ends.update(first=args[0]))
    model.transformer.ln_f.register_forward_pre_hook(lambda module, args: ends.update(last=args[0]))

    def added(seed):
        torch.manual_seed(seed)
        model(x)
        return ends["last"] - ends["first"]
    with torch.no_grad():
        in_eval = added(0)
        model.train()
        draws = [added(seed) for seed in range(200)]
        if not draws_random and all(torch.equal(draw, draws[0]) for draw in draws):
            return [f"logits in training mode and in eval mode differ by up to {gap:.2g}, although "
                    "the model draws no random numbers. Validation, samples and the export use the "
                    "model in eval mode."]
    mean = sum(draws) / len(draws)
    ratio = ((mean * in_eval).sum() / in_eval.square().sum()).item()
    if not ratio < 0.92:  # 0.95 to 1 if branches are dropped and scaled up
        return []
    return [f"in training mode, the blocks of a new model add on average only {ratio:.0%} of what "
            "they add in eval mode. If training drops parts of the model at random, check that it "
            "scales up those that are left."]

def notes_in_training_mode(model, x, y, leaks):
    """Return notes on the training loss of inputs and targets (B, T).

    leaks: whether logits depend on later tokens, which would also change the gradients that
    notes_about_targets() looks at.
    """
    with torch.enable_grad():
        return (noted(notes_about_dimensions, model, x, y) + noted(notes_about_loss, model, x, y)
                + ([] if leaks else noted(notes_about_targets, model, x, y))
                + noted(notes_about_derivatives, model, x, y))

def notes_about_derivatives(model, x, y):
    """Return a note if the gradient of the training loss is not its derivative.

    For example, a detach() may hide an influence from the gradient. Each parameter (all at once in
    a large model) is moved a little along its gradient, and the change of the loss is measured. A
    copy of the model computes this in float64.
    """
    model = copy.deepcopy(model).double()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    one_by_one = sum(p.numel() for _, p in named) < 5_000_000
    groups = [[pair] for pair in named] if one_by_one else [named]
    with float64(x.device):
        def loss():
            torch.manual_seed(0)  # the same dropout masks each time
            with buffers_restored(model):
                return model(x, y)[1]
        model.zero_grad()
        start = loss()
        start.backward()
        with torch.no_grad():
            if loss() != start:  # it depends on something else, such as a counter
                return []
            factors = {group[0][0]: factor_of_derivative([p for _, p in group], loss)
                       for group in groups}
    wrong = {name: factor for name, factor in factors.items() if factor is not None}
    if not wrong:
        return []
    name = max(wrong, key=lambda name: abs(wrong[name] - 1))
    others = f" This concerns {len(wrong)} of {len(factors)} parameters." if one_by_one else ""
    return ["the gradient is not the derivative of the training loss: if "
            f"{name if one_by_one else 'the model'} moves along its gradient, the loss changes "
            f"{wrong[name]:.3g} times as fast as the gradient says.{others} Usual reasons are "
            "detach(), .data, no_grad() or item() in forward(), and a wrong backward(). If this is "
            "meant (for example a straight-through estimator or a stopped gradient), it is as it "
            "should be."]

@contextlib.contextmanager
def float64(device):
    """Let a model with float64 weights compute everything in float64."""
    with torch.autocast(device.type, enabled=False), WithoutFloat32():
        yield

class WithoutFloat32(torch.overrides.TorchFunctionMode):
    """Replaces float() and dtype=float32, which GPT.forward() or an edit may use, by float64."""
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "float":
            func = torch.Tensor.double
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {name: torch.float64 if value is torch.float32 else value
                  for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)

def notes_about_rows_together(run):
    """Return a note if the training loss of two rows is not the mean over their targets.

    In float64, this shows a term over a micro-batch that is too small for the promise about B.
    """
    model = copy.deepcopy(run.state.raw_model).double().train()
    x, y = run.val_loader.batch(0, 2, run.device)

    def loss(*rows):
        with buffers_restored(model):
            return model(x[list(rows)], y[list(rows)])[1].item()
    with torch.no_grad(), float64(run.device):
        alone, together = [loss(0), loss(1)], loss(0, 1)
        if any([loss(0), loss(1), loss(0, 1)] != [*alone, together] for _ in range(8)):
            return []  # it draws random numbers
        # A row and its copy have the loss of this row, up to rounding
        noise = max(abs(loss(0, 0) - alone[0]), abs(loss(1, 1) - alone[1]))
    n = (y != -100).sum(1).tolist()
    mean = (n[0] * alone[0] + n[1] * alone[1]) / sum(n)
    if not abs(together - mean) > 100 * noise + 1e-11 * abs(mean):
        return []
    return [f"the training loss of two rows together is {together:.10g}, but the mean of their "
            f"losses, over all targets, is {mean:.10g}. So the loss has a term over the rows of a "
            "micro-batch, such as mean() ** 2 instead of (... ** 2).mean(), and it depends on B."]

def factor_of_derivative(parameters, loss):
    """Return how fast the loss changes along the gradient, divided by what the gradient says.

    Return None if the factor is about 1 or cannot be measured.
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm = sum(p.grad.square().sum() for p in parameters) ** 0.5
    size = sum(p.square().sum() for p in parameters) ** 0.5
    if not norm > 1e-6:
        return None

    def change(step):
        """Return the change of the loss per unit, divided by the norm of the gradient."""
        def move(distance):
            for p in parameters:
                p.add_(p.grad, alpha=distance / norm)
        move(step)
        ahead = loss()
        move(-2 * step)
        behind = loss()
        move(step)
        return ((ahead - behind) / (2 * step * norm)).item()
    step = 1e-5 * (size if size > 0 else 1.0)
    factor, other = change(step), change(10 * step)
    # If the two differ, rounding or a jump of the loss matters, for example a different top-k
    steady = abs(factor - other) < 0.1 * abs(factor - 1)
    return factor if abs(factor - 1) > 0.02 and steady else None

class WatchDimensions(torch.overrides.TorchFunctionMode):
    """Records operations that normalize over a dimension other than the last one.

    It also records attention that cannot become sharp. found: {description: None}. attention:
    pairs (q, k) of scaled_dot_product_attention(), without gradients. queries: q, with gradients.
    targets: those of cross_entropy().
    """
    DEFAULTS = {"normalize": 1, "softmax": None, "log_softmax": None, "logsumexp": None}

    def __init__(self):
        super().__init__()
        self.found, self.attention, self.queries, self.targets = {}, [], [], []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        x = args[0] if args else None
        if name == "scaled_dot_product_attention" and len(args) > 1:
            self.found |= dict.fromkeys(notes_about_attention(*args[:2], kwargs.get("scale")))
            is_causal = kwargs.get("is_causal", args[5] if len(args) > 5 else False)
            self.found |= dict.fromkeys(notes_about_causal_mask(*args[:2], is_causal))
            self.attention.append((args[0].detach(), args[1].detach()))
            self.queries.append(args[0])
        if name == "cross_entropy":
            target = kwargs["target"] if len(args) < 2 else args[1]
            self.targets.append((target, sums_of(kwargs["input"] if x is None else x)))
        if name in self.DEFAULTS and torch.is_tensor(x) and x.dim() > 1:
            position = 2 if name == "normalize" else 1  # of dim, in args
            dim = kwargs.get("dim", args[position] if len(args) > position else self.DEFAULTS[name])
            place = places_in_scripts("".join(traceback.format_stack()))
            if isinstance(dim, int) and dim % x.dim() != x.dim() - 1 and place:
                self.found[f"{name}() works over dimension {dim} of a tensor of shape "
                           f"{tuple(x.shape)} ({place[-1]}). Check that this is the right "
                           "dimension."] = None
        return func(*args, **kwargs)

def notes_about_attention(q, k, scale):
    """Return a note if the norms of queries and keys are constant and too small for attention.

    q, k: (..., head_dim). scale: the factor of the products q k, or None for 1 / sqrt(head_dim).
    """
    norms = [x.detach().float().norm(dim=-1) for x in (q, k)]
    scale = q.size(-1) ** -0.5 if scale is None else float(scale)
    largest = scale * norms[0].max().item() * norms[1].max().item()
    vary = any((norm.max() - norm.min() > 1e-2 * norm.max()).item() for norm in norms)
    if vary or largest >= 1:
        return []
    return [f"queries and keys are normalized, and their products are at most {largest:.2g} after "
            "scaling. So attention is almost uniform. Give scaled_dot_product_attention() a "
            "larger scale."]

def notes_about_causal_mask(q, k, is_causal):
    """Return a note if is_causal does not let each token attend to itself. q, k: (..., T, dim)."""
    if not is_causal or k.size(-2) <= q.size(-2):
        return []
    return [f"scaled_dot_product_attention() gets is_causal=True with {q.size(-2)} queries and "
            f"{k.size(-2)} keys. Query i then attends to the first i + 1 keys, so keys that are "
            "added in front hide the token itself. Give attn_mask instead."]

class WatchSelections(torch.overrides.TorchFunctionMode):
    """Records in `used` which functions are called that select some of several values."""
    NAMES = {"topk", "kthvalue", "sort", "argsort", "argmax", "argmin"}

    def __init__(self):
        super().__init__()
        self.used = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in self.NAMES and torch.is_tensor(args[0]) and args[0].is_floating_point():
            self.used.add(name)
        return func(*args, **kwargs or {})

def selections(model, x, y):
    """Return the names of functions in the training loss that select some of several values.

    Because of rounding, topk(), for example, may select another expert. x, y: (B, T).
    """
    with WatchSelections() as watch, buffers_restored(model):
        model(x, y)
    return sorted(watch.used)

def notes_about_dimensions(model, x, y):
    """Return notes on softmax() and so on over unusual dimensions, on attention and on targets."""
    torch.manual_seed(0)
    with WatchDimensions() as watch:
        model(x, y)
    return list(watch.found) + noted(notes_about_second_targets, model, x, y, watch.targets)

def sums_of(logits):
    """Return numbers that are the same for logits in another shape or order, or with padding."""
    logits = logits.detach().double()
    logits = logits[logits.isfinite()]  # those of the padding are -inf
    return logits.numel(), f"{logits.sum():.6e}", f"{logits.square().sum():.6e}"

def notes_about_second_targets(model, x, y, targets):
    """Return a note if cross-entropies of different logits predict the same tokens.

    x: token ids (B, T). y: the next tokens (B, T). targets: for each call of cross_entropy() in
    model(x, y), its targets and sums_of() its logits.
    """
    def are_next_tokens(part, depends_on_last_token):
        rows = part.reshape(len(y), -1)
        n = rows.size(1)
        # y, or y without the last tokens of each row. Without the first ones, these are the next
        # tokens only if the logits lack the first ones too, and not the last ones
        return torch.equal(rows, y[:, :n]) or (
            depends_on_last_token and torch.equal(rows, y[:, y.size(1) - n:]))
    changed = x.clone()
    changed[:, -1] = torch.where(x[:, -1] == 0, 1, 0)
    torch.manual_seed(0)
    with WatchDimensions() as watch, buffers_restored(model):
        model(changed, y)
    n = len({sums for (part, sums), (_, sums_of_changed) in zip(targets, watch.targets, strict=True)
             if part.numel() > 0 == part.numel() % len(y)
             and are_next_tokens(part, sums != sums_of_changed)})
    if n < 2:
        return []
    return [f"in one forward pass of training, {n} cross-entropies have the next tokens as their "
            "targets. If one of them should predict tokens further ahead, compare its "
            "logits[:, :-1] with targets[:, 1:]."]

def term_of_loss(model, x, y):
    """Return a model's loss minus the cross-entropy of its logits. x, y: (B, T)."""
    with buffers_restored(model):
        logits, loss = model(x, y)
    cross_entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
    return (loss - cross_entropy).item()

def notes_about_loss(model, x, y):
    """Return a note if additional terms make up much of the training loss.

    x, y: inputs and targets (B, T). The model must be in training mode.
    """
    logits, loss = model(x, y)
    cross_entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
    ratio = (loss / cross_entropy).item()
    if 0.5 <= ratio <= 1.5:
        return []
    return [f"the training loss of two rows is {loss.item():.4g}, but their cross-entropy is "
            f"{cross_entropy.item():.4g}. If an additional term should be smaller, check that it "
            "is a mean over all tokens."]

def is_left_out(value):
    """Return whether a module's attribute is or contains a tensor that torch does not know of.

    Modules in a list count only if they got gradients, since a teacher is also kept in a list.
    """
    if isinstance(value, (list, tuple)):
        return any(map(is_left_out, value))
    if isinstance(value, torch.nn.Module):
        return any(p.grad is not None for p in value.parameters())
    return torch.is_tensor(value) and value.is_floating_point()

# ---- What an edit keeps outside of State. It is named when a promise is broken
KEPT = (bool, int, float, str, bytes, list, dict, set, tuple, deque, np.ndarray, np.generic,
        random.Random, np.random.RandomState, np.random.Generator)

def unsaved_values(t, run):
    """Return {name: fingerprint} of values that a checkpoint does not hold."""
    values = {"the generator of the module random": fingerprint(random.getstate()),
              "the generator of numpy.random": fingerprint(np.random.get_state())}
    usual = {*vars(torch.nn.Module()), *vars(torch.optim.SGD([torch.zeros(1)], lr=0.1))}
    for thing in (*run.state.raw_model.modules(), *run.state.optimizers):
        for name in vars(thing).keys() - usual:
            label = f"self.{name} in {type(thing).__name__}"
            values.setdefault(label, []).append(fingerprint(getattr(thing, name)))
        for name in vars(type(thing)).keys() - {"__dict__", "__weakref__"}:  # of the class
            values[f"{type(thing).__name__}.{name}"] = fingerprint(getattr(type(thing), name, None))
    for name in vars(run.train_loader).keys() - {"open_shard", "open_tokens"}:
        values[f"{name} in the training loader"] = fingerprint(getattr(run.train_loader, name))
    for name in vars(run).keys() - {"validated_step", "step_seconds", "warned_slow"}:
        values[f"run.{name}"] = fingerprint(getattr(run, name))
    for name in vars(t).keys() - {"__builtins__"}:
        values[f"the global {name}"] = fingerprint(getattr(t, name))
    return values

def fingerprint(value):
    """Return a checksum of a tensor, generator, number or container, or None for other objects."""
    if isinstance(value, GENERATOR):
        value = value.get_state()
    if torch.is_tensor(value):
        return crc_of(value)
    if not isinstance(value, KEPT):
        return None
    if isinstance(value, (list, tuple)) and any(isinstance(p, torch.nn.Module) for p in value):
        return None  # for example a teacher
    try:
        return zlib.crc32(pickle.dumps(value))
    except Exception:  # pickle raises errors of many kinds
        return None

# ---- How samples and the validation loss of the trained model agree with model(idx)
def examine(run, tolerance):
    """Return what check.py wants to know about the trained model.

    {"samples": a problem or None, "drawn": token ids, "later": see leak_problem() and
    length_problem(), "notes": texts, "val_data": see validation_data(), "cross_entropy": loss,
    "later_in_training": as "later", in training mode, "modes": how far the logits in training mode
    are from those in eval mode, "training_term": loss in training mode minus the cross-entropy of
    the logits, or None, "selections": see selections()}

    An edited generate() or forward() may raise anything, so errors become texts.
    """
    model, T = run.state.eval_model, run.cfg.T
    if any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters()):
        tolerance = max(tolerance, LOW_PRECISION)
    x, y = run.val_loader.batch(0, 2, run.device)
    report = examine_samples(model, x, T, tolerance) | {"notes": []}
    drawn = noted(notes_about_drawn_tokens, model, run.device)
    try:
        report["later"] = (leak_problem(model, x, tolerance / 10)
                           or length_problem(model, x, tolerance))
        if tolerance < 1e-3:  # 16-bit rounding can hide a small influence
            report["notes"] = noted(notes_about_context, model, x)
    except Exception as e:
        report["later"] = f"{type(e).__name__}: {e}"
    report["val_data"] = validation_data(run)
    try:
        report["cross_entropy"] = cross_entropy(run, model)
    except Exception as e:
        report["cross_entropy"] = f"{type(e).__name__}: {e}"
    raw_model, report["modes"] = run.state.raw_model, 0.0
    try:
        logits = raw_model(x)[0].float()
        raw_model.train()  # late, because a forward pass may change buffers
        gap = 0.0
        for _ in range(8):  # by chance, random numbers may change nothing in one pass
            with buffers_restored(raw_model):
                gap = max(gap, (raw_model(x)[0].float() - logits).abs().max().item())
        report["later_in_training"] = leak_problem(raw_model, x, tolerance / 10)
        report["modes"] = gap if gap > tolerance * max(1.0, logits.abs().max().item()) else 0.0
    except Exception as e:
        report["later_in_training"] = f"{type(e).__name__}: {e}"
    try:
        report["training_term"] = term_of_loss(raw_model, x, y)
    except Exception:
        report["training_term"] = None
    report["selections"] = noted(selections, raw_model, x, y)
    leaks = any(isinstance(report[name], list) for name in ("later", "later_in_training"))
    report["notes"] += drawn + notes_in_training_mode(raw_model, x, y, leaks)
    raw_model.eval()
    report["notes"] += noted(notes_about_thirds, run.state, x)
    report["samples"] = report["samples"] or sample_problem_if_sharpened(model, x, T, tolerance)
    return report

def examine_samples(model, x, T, tolerance):
    """Return {"samples": a problem or None, "drawn": token ids}. x: token ids (B, T)."""
    n, problem, drawn = min(12, T // 2), None, []
    try:
        for prompt in (x[:, :T // 4], x[:, n // 2:]):  # the second continuation exceeds the context
            problem = problem or sample_problem(model, prompt, n, T, tolerance)
        for _ in range(2):
            torch.manual_seed(0)
            # A high temperature shows an edit that leaves out unlikely tokens
            drawn.append(model.generate(x[:1, :1].repeat(8, 1), 64, temperature=1.5).tolist())
        if drawn[0] != drawn[1]:
            problem = problem or ["generate() returns other tokens although the seed is the same",
                                  "Its random numbers should come from torch's generator."]
    except Exception as e:
        place = "\n".join(places_in_scripts(traceback.format_exc())[-1:])
        problem = ["generate() stops with an error", f"{place}\n{type(e).__name__}: {e}"]
    return {"samples": problem, "drawn": drawn[-1:]}

def sample_problem(model, prompt, n, T, tolerance):
    """Return [what is wrong, where] if greedy tokens are not the arg max of model(idx), or None.

    prompt: token ids (B, length). n: the number of tokens to append.
    """
    block_size = getattr(model.config, "block_size", T)
    idx = model.generate(prompt, n, temperature=0)
    for i in range(prompt.size(1), idx.size(1)):
        logits = model(idx[:, max(0, i - block_size):i])[0][:, -1].float()  # (B, n_vocab)
        for token, row in zip(idx[:, i].tolist(), logits):
            best = row.max().item()
            if best - row[token].item() > tolerance * max(1.0, abs(best)):  # more than a tie
                return ["generate(temperature=0) differs from the arg max of model(idx)",
                        f"After {i} tokens generate() appends token {token}, but the arg max is "
                        f"{row.argmax().item()}."]
    return None

def notes_about_drawn_tokens(model, device):
    """Return a note if generate() draws a token less often than one that is less likely.

    For this, forward() is replaced by a function that returns fixed logits.
    """
    n, n_vocab, calls = 1000, model.config.n_vocab, []
    chances = {n_vocab * 4 // 5: 0.5, n_vocab * 2 // 5: 0.3, n_vocab - 1: 0.15, 3: 0.05}
    logits = torch.full((n_vocab,), -20.0, device=device)
    for token, chance in chances.items():
        logits[token] = math.log(chance)

    def forward(idx, *args, **kwargs):
        calls.append(idx)
        return logits.expand(*idx.shape, -1), None
    model.forward = forward
    try:
        prompts = torch.zeros((n, 1), dtype=torch.int64, device=device)
        tokens = model.generate(prompts, 1, generator=GENERATOR(device).manual_seed(0))[:, -1]
    finally:
        del model.forward
    counts = [(tokens == token).sum().item() for token in chances]
    others = n - sum(counts)
    is_usual = others < 0.02 * n and all(more + 0.05 * n > less
                                         for more, less in itertools.pairwise(counts))
    if is_usual or not calls:  # an edited generate() may not call forward()
        return []
    return [f"if four tokens have probabilities of 50%, 30%, 15% and 5%, generate() draws them "
            f"{', '.join(map(str, counts))} times in {n} tries, and other tokens {others} times. "
            "Perhaps it applies a mask to the wrong tokens, for example one of sorted "
            "probabilities to unsorted ones."]

def sample_problem_if_sharpened(model, x, T, tolerance):
    """Multiply the model's matrices by 4, and return what sample_problem() returns.

    After a few steps a token depends little on those before it, so a wrong context (for example in
    a key-value cache) may not change the arg max. With larger weights it does. x: ids (B, T).
    """
    for p in model.parameters():
        if p.dim() >= 2:
            p.mul_(4)
    try:
        if not model(x)[0].isfinite().all():
            return None
        # The second half of the continuation is beyond the context. Rounding has larger effects
        problem = sample_problem(model, x[:, T // 2:], T, T, 10 * tolerance)
    except Exception:  # the unchanged model has been sampled without an error
        return None
    return problem and [problem[0], f"{problem[1]} (All weights were multiplied by 4 for this.)"]

def leak_problem(model, x, tolerance):
    """Return [what is wrong, where] if logits depend on later tokens, or None.

    Return a text instead if this cannot be checked. x: token ids (B, T).
    """
    T = x.size(1)

    def logits_of(idx):
        torch.manual_seed(0)  # a model that draws random numbers gets the same ones each time
        return model(idx)[0].float()  # (B, T, n_vocab)
    logits, again = logits_of(x), logits_of(x)
    limit = tolerance * max(1.0, logits.abs().max().item())
    if not (logits - again).abs().max() <= limit:  # in an edit that counts calls, for example
        return "model(idx) gives different logits when it is called again with the same tokens"
    # If tokens see the later ones of their own group only, a change that starts between two groups
    # does not show it
    for start in filter(None, (T // 2, 1, T // 3, T - 1)):
        changed = x.clone()
        changed[:, start:] = (x[:, start:] + 1) % logits.size(-1)
        gaps = (logits_of(changed) - logits)[:, :start].abs().amax(dim=(0, 2))  # one per position
        positions = (gaps > limit).nonzero().flatten().tolist()
        if positions:
            return ["logits change with later tokens", (
                f"When the tokens from position {start} on are changed, the logits at "
                f"{len(positions)} of the {start} positions before them change, the first at "
                f"position {positions[0]}, by up to {gaps.max().item():.2g}. Only rounding, "
                f"{limit:.1g}, is allowed.")]
    return None

def length_problem(model, x, tolerance):
    """Return [what is wrong, where] if logits differ when later tokens are cut off, or None.

    x: token ids (B, T).
    """
    logits = model(x)[0].float()
    if not torch.equal(logits, model(x)[0].float()):
        return None  # random numbers would differ for rows of another length
    limit = tolerance * max(1.0, logits.abs().max().item())
    for n in (x.size(1) // 2, x.size(1) // 2 + 1, x.size(1) - 1):
        gap = (model(x[:, :n])[0].float() - logits[:, :n]).abs().max().item()
        if not gap <= limit:
            return ["logits depend on the number of tokens in a row", (
                f"For the first {n} of {x.size(1)} tokens, model(x[:, :{n}]) differs from "
                f"model(x)[:, :{n}] by up to {gap:.2g}, so samples do not come from the model that "
                f"was validated. Only rounding, {limit:.1g}, is allowed.")]
    return None

def notes_about_context(model, x):
    """Return a note if some of the last four tokens have no influence on the logits at all.

    x: token ids (B, T).
    """
    if x.size(1) < 8:
        return []
    last, changed = x.size(1) - 1, x.repeat(4, 1, 1)  # (4, B, T)
    for distance in range(4):
        changed[distance, :, last - distance] += 1
        changed[distance, :, last - distance] %= int(x.max()) + 1
    logits = model(x)[0][:, -1]
    unseen = [distance for distance in range(4)
              if torch.equal(model(changed[distance])[0][:, -1], logits)]
    if not unseen:
        return []
    others = x.clone()
    others[:, :last] = (others[:, :last] + 1) % (int(x.max()) + 1)
    if torch.equal(model(others)[0][:, -1], logits):
        return [f"of the {last + 1} tokens in a row, the logits at the last one do not depend on "
                "any earlier one, so attention has no effect."]
    return [f"of the {last + 1} tokens in a row, the logits at the last one do not depend on token "
            f"{', '.join(str(last - distance) for distance in unseen)} (counted from 0). If they "
            "should, check the attention mask."]

def validation_data(run):
    """Return the source of the validation data and checksums of its rows, or None.

    Of a large corpus, only the first million tokens are included.
    """
    try:
        n_rows = min(run.val_loader.rows_per_epoch, max(1, 2**20 // run.cfg.T))
        batch = run.val_loader.batch(0, n_rows, run.device)
        source = [run.cfg.T, run.cfg.encoding, Path(run.cfg.data).name]
        return [source, [crc_of(part) for part in batch]]
    except Exception:  # an edit may give batch() other arguments
        return None

def cross_entropy(run, model):
    """Return the mean cross-entropy of the logits over the rows that validation reads."""
    cfg, loader = run.cfg, run.val_loader
    rows = min(max(1, cfg.val_tokens // cfg.T), loader.rows_per_epoch)
    total, counted = 0.0, 0
    for row in range(0, rows, cfg.B):
        x, y = loader.batch(row, min(cfg.B, rows - row), run.device)
        logits = model(x)[0].flatten(0, 1).float()
        if logits.size(1) != run.encoding.n_vocab:
            raise ValueError(f"there are {logits.size(1)} logits per token, but the encoding has "
                             f"{run.encoding.n_vocab} ids")
        total += torch.nn.functional.cross_entropy(logits, y.flatten(), reduction="sum").item()
        counted += (y >= 0).sum().item()
    return total / max(1, counted)

# ---- Helpers that check.py uses, too
def places_in_scripts(text):
    """Return the lines of the user's code in a traceback, for example "x.py, line 7, in f: ..."."""
    names = [path.name for path in SCRIPTS.glob("*.py")]
    places = re.findall(r'^  File "(.+)", (line \d+.*)\n    (.+)', text, re.M)
    return [f"{Path(path).name}, {place}: {code.strip()}" for path, place, code in places
            if Path(path).name in names]

def tensors_of(content, name=""):
    """Yield (name, tensor) for all tensors in a checkpoint, for example ("state.mean", ...)."""
    if torch.is_tensor(content):
        yield name, content
    elif isinstance(content, (dict, list, tuple)):
        parts = content.items() if isinstance(content, dict) else enumerate(content)
        for key, part in parts:
            yield from tensors_of(part, f"{name}.{key}" if name else str(key))

def crc_of(tensor):
    """Return a checksum of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return zlib.crc32(flat.view(torch.uint8).numpy()) if flat.numel() else 0

def some_values(tensor):
    """Return up to eight values of a tensor, spread over it, or only one if all are equal."""
    flat = tensor.detach().flatten().float()
    if not flat.numel() or (flat == flat[0]).all():
        return flat[:1].tolist()
    # Not every n-th value, which would all be in the same column of a matrix
    return flat[torch.linspace(0, flat.numel() - 1, min(8, flat.numel())).long()].tolist()
