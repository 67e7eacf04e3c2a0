"""Compare versions of the scripts: tune the learning rate of each, then train several seeds.

    python tests/experiment.py main rotary    # two git branches, tags or commits
    python tests/experiment.py HEAD .         # the last commit and the working tree
    python tests/experiment.py HEAD . --lr=0.5,1,2 --seeds=3 --data=edu_bytes --max_steps=3000

The first version is the baseline. Flags of train_gpt2.py (--name=value) apply to all versions.
Each version is trained once for each factor in --lr, which multiplies max_lr and min_lr. If the
best factor is at an edge of the list, the list is extended, at most twice. Then the version is
trained with its best factor and --seeds other seeds. Only these runs are compared.

Each GPU trains one run at a time, and so does a CPU. Ctrl-C saves the runs and stops them. To go
on, repeat the command. The folder --out holds the versions, their runs, and experiment.png.
"""
import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import compare
import filelock
import numpy as np
import torch
from tqdm import tqdm

t, ROOT = compare.t, Path(__file__).resolve().parent.parent
# The program of a run. It starts in the folder of a version, and multiplies the learning rates by a
# factor. When experiment.py closes the pipe or dies, os.read() returns, and the run saves and stops
TRAIN = """if True:
    import os, signal, sys, threading, train_gpt2 as t
    def stop_when_closed():
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=stop_when_closed, daemon=True).start()
    factor, cfg = float(sys.argv.pop(1)), t.configure(t.parse_flags(t.Config, "", t.PRESETS))
    sys.argv += [f"--{name}={getattr(cfg, name) * factor:.6g}" for name in ("max_lr", "min_lr")]
    t.export = lambda log_dir: None  # it would take seconds
    t.main()"""

def parse_arguments():
    """Return the arguments. `flags` are those of train_gpt2.py."""
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--lr", default="0.5,1,2")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=ROOT / "input.txt")
    parser.add_argument("--out", type=Path, default="experiment")
    args, flags = parser.parse_known_intermixed_args()
    args.lr, args.flags = sorted(set(map(float, args.lr.split(",")))), sorted(flags)
    args.data, args.out = args.data.expanduser().resolve(), args.out.expanduser().resolve()
    if len(args.versions) < 2 or args.seeds < 1 or args.lr[0] <= 0:
        raise ValueError("at least two versions, one seed and positive factors are needed")
    if not args.data.exists():
        raise ValueError(f"data={args.data} does not exist")
    return args

def git(*words):
    """Return what a git command prints. Raise ValueError if it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"git {words[0]} failed: {t.summary_of(done.stderr)}")
    return done.stdout.strip()

def identify(version):
    """Return the id of a commit or, for the working tree, of a git tree with its tracked files."""
    if version != ".":
        return git("rev-parse", f"{version}^{{commit}}")
    commit = "HEAD"
    if git("status", "--porcelain", "--untracked-files=no"):
        # This makes a commit that is on no branch, and changes nothing else
        commit = git("-c", "user.name=-", "-c", "user.email=-", "stash", "create")
    return git("rev-parse", f"{commit}^{{tree}}")

def prepare(args):
    """Copy the versions to --out, unless it holds them. Return the names of the copies."""
    ids, path = {}, args.out / "experiment.json"
    for version in args.versions:
        name = "working_tree" if version == "." else version.replace("/", "_")
        while name.lower() in ("runs", "tuning", *map(str.lower, ids)):
            name += "_2"
        ids[name] = identify(version)
    record = {"versions": ids, "flags": args.flags, "data": str(args.data), "lr": args.lr,
              "seeds": args.seeds}
    if not path.exists():
        args.out.mkdir(parents=True, exist_ok=True)
        for name, identity in ids.items():
            git("archive", f"--output={args.out / name}.zip", identity)
            shutil.unpack_archive(f"{args.out / name}.zip", args.out / name)
        t.write_whole(path, lambda file: file.write(json.dumps(record, indent=1).encode()))
    before = json.loads(path.read_text())
    for key, value in record.items():
        if before[key] != value:
            raise ValueError(f"{args.out}/ holds a different experiment: {key} was {before[key]}, "
                             f"is {value}. Undo this change, or choose a different --out")
    return list(ids)

# ---- The runs. A job is a tuple (version, factor, seed). Seed 0 is for tuning
def plan(version, args, losses):
    """Return the jobs of a version, as far as they follow from the losses of other jobs."""
    lr, tuning, best = list(args.lr), [], (version, args.lr[0], 0)
    for n_extended in range(3 if len(lr) > 1 else 0):
        tuning = [(version, factor, 0) for factor in lr]
        if any(losses.get(job) is None for job in tuning):  # not made yet, or failed
            return tuning
        best = min(tuning, key=losses.get)
        if n_extended < 2 and best == tuning[0]:
            lr.insert(0, lr[0] ** 2 / lr[1])
        elif n_extended < 2 and best == tuning[-1]:
            lr.append(lr[-1] ** 2 / lr[-2])
        else:
            break
    seeds = range(1, args.seeds + 1) if losses.get(best) != math.inf else ()
    return tuning + [(version, best[1], seed) for seed in seeds]

def folder_of(job, args):
    return args.out / ("runs" if job[2] else "tuning") / "{}_lr{:g}_seed{}".format(*job)

def state_of(folder):
    """Return a run's last loss (inf: it diverged, None: it has not ended) and its progress."""
    with suppress(OSError, ValueError, IndexError):
        steps = json.loads((folder / "config.json").read_text())["max_steps"]
        output = (folder / "output.txt").read_text(errors="replace").splitlines()
        metrics = t.read_metrics(folder)
        loss = metrics["val"].get(steps, math.inf if "diverged" in output[-1] else None)
        done = (max(metrics["train"], default=-1) + 1) / max(1, steps)
        return (math.inf if loss != loss else loss), done  # NaN differs from itself
    return None, 0.0

def execute(job, gpu, args, pipe):
    """Make a run, unless it has ended. Return its loss or the last line of its errors, as text."""
    folder, line = folder_of(job, args), "diverged"
    command = [sys.executable, "-c", TRAIN, str(job[1]), "--keep_every=0", *args.flags, *gpu,
               f"--data={args.data}", f"--log_dir={folder}", f"--seed={job[2]}",
               "--hellaswag_every=0", "--sample_every=0"]
    folder.mkdir(parents=True, exist_ok=True)
    # Wait until a run that a killed experiment.py has left behind is saved
    with suppress(NotImplementedError), filelock.FileLock(folder / ".lock"):
        pass
    if state_of(folder)[0] is None:
        with open(folder / "output.txt", "ab", buffering=0) as output:
            # In a session of its own, a run does not get the terminal's Ctrl-C
            done = subprocess.run(command, cwd=args.out / job[0], stdin=pipe, stdout=output,
                                  stderr=subprocess.PIPE, start_new_session=True, text=True)
            line = (done.stderr.strip() or f"stopped (status {done.returncode})").splitlines()[-1]
            output.write(done.stderr.encode())
    loss, _ = state_of(folder)
    if loss is not None:
        for path in t.find_checkpoints(folder).values():
            path.unlink()
    return line if loss in (None, math.inf) else f"val {loss:.4f}"

def run_all(args):
    """Make the runs that are missing. Return {job: loss}, with None for runs that have failed."""
    gpus = [[f"--device=cuda:{i}"] for i in range(torch.cuda.device_count())]
    if not gpus or any(flag.startswith("--device=") for flag in args.flags):
        gpus = [[]]
    losses, running, before = {}, {}, 0.0  # running: {Future: (job, its GPU)}
    read_end, write_end = os.pipe()
    with (ThreadPoolExecutor(len(gpus)) as pool, open(write_end, "wb") as pipe,
          tqdm(disable=None, bar_format="{bar} {n:.1f}/{total} runs, {remaining} left") as bar):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: pipe.close())
        while True:
            plans = [plan(version, args, losses) for version in args.names]
            for job in sorted(sum(plans, []), key=lambda job: job[2]):
                if gpus and not pipe.closed and job not in losses | dict(running.values()):
                    gpu = gpus.pop(0)
                    before += state_of(folder_of(job, args))[1]
                    running[pool.submit(execute, job, gpu, args, read_end)] = job, gpu
            if not running:
                break
            done = sum(state_of(folder_of(job, args))[1] for job, _ in running.values())
            bar.n, bar.initial = len(losses) + done, before
            # A plan that ends with seed 0 lacks the runs that will be compared
            bar.total = sum(len(jobs) + (0 if jobs[-1][2] else args.seeds) for jobs in plans)
            bar.refresh()
            for future in wait(running, timeout=5, return_when=FIRST_COMPLETED).done:
                job, gpu = running.pop(future)
                gpus.append(gpu)
                losses[job], _ = state_of(folder_of(job, args))
                bar.write(f"{folder_of(job, args).name}: {future.exception() or future.result()}")
        if pipe.closed:
            raise ValueError("stopped. To go on, repeat the command")
    return losses

def draw(rows, path):
    """Draw the losses of Rows against tokens and training time: means, and ranges over seeds."""
    from matplotlib.figure import Figure  # not pyplot, which needs a display
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    axes[0].set(xlabel="tokens", ylabel="validation loss, nats per token")
    axes[1].set(xlabel="seconds of training")
    for row in rows:
        val, seconds = row.curve("val"), row.curve("train_s")
        tokens = [n for n in val if n in seconds and n > 0]
        losses = np.array([val[n] for n in tokens]).reshape(len(tokens), len(row.runs))
        for axis, x in zip(axes, (tokens, [np.mean(seconds[n]) for n in tokens])):
            axis.plot(x, losses.mean(1), label=row.name)
            axis.fill_between(x, losses.min(1), losses.max(1), alpha=0.2)
    axes[0].legend(frameon=False)
    t.write_whole(path, lambda file: figure.savefig(file, dpi=120))

def report(args, losses):
    """Print the table, and draw the figure. Raise ValueError if runs have failed."""
    runs = [job for version in args.names for job in plan(version, args, losses)
            if job[2] and losses[job] not in (None, math.inf)]
    if not runs or runs[0][0] != args.names[0]:
        raise ValueError("no run of the baseline has succeeded, so nothing can be compared")
    for version, factor in dict.fromkeys(job[:2] for job in runs):
        tried = [job[1] for job in losses if job[0] == version and job[2] == 0] or [0]
        if factor in (min(tried), max(tried)):
            print(f"{version}: a factor beyond {factor:g} may be better, so extend --lr.")
    rows = compare.read_rows([folder_of(job, args) for job in runs])
    print("", *compare.table(rows), "", sep="\n")
    try:
        draw(rows, args.out / "experiment.png")
    except ImportError:
        print("experiment.png is not drawn, because matplotlib is not installed.")
    if len(runs) < len(args.names) * args.seeds:
        raise ValueError("some runs have failed (see above). To try them again, repeat the command")

def main():
    sys.stdout.reconfigure(errors="replace", line_buffering=True)
    try:
        args = parse_arguments()
        args.names = prepare(args)
        report(args, run_all(args))
    except (ValueError, OSError) as e:
        sys.exit(f"experiment.py: {e}.")

if __name__ == "__main__":
    main()
