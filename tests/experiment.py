"""Compare versions of the scripts: tune the learning rate of each, then train several seeds.

    python tests/experiment.py main rotary    # two git branches, tags or commits
    python tests/experiment.py HEAD .         # the last commit and the working tree
    python tests/experiment.py HEAD . --lr=0.5,1,2 --seeds=3 --data=edu_bytes --max_steps=3000

The first version is the baseline. Flags of train_gpt2.py (--name=value) apply to all versions.
Each version is trained once for each factor in --lr, which multiplies max_lr and min_lr. While the
best factor is at an edge of the list, the list is extended, up to four times. Factors whose losses
are within 0.01 of the best one are tried with a second seed, and the best mean decides. With this
factor, the version is then trained with --seeds other seeds, which are compared.

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

t, ROOT = compare.t, Path(__file__).resolve().parent.parent
TUNING_SEEDS = 0, 1000  # the other seeds are 1, 2, ...
NOISE = 0.01  # nats per token
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
    parser.add_argument("--lr", default="0.5,1,2",
                        type=lambda text: sorted(set(map(float, text.split(",")))))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=ROOT / "input.txt")
    parser.add_argument("--out", type=Path, default="experiment")
    args, flags = parser.parse_known_intermixed_args()
    args.data, args.out = args.data.expanduser().resolve(), args.out.expanduser().resolve()
    args.flags = sorted(flags)
    if len(args.versions) < 2 or not 1 <= args.seeds < TUNING_SEEDS[1] or args.lr[0] <= 0:
        sys.exit("At least two versions, one seed and positive factors are needed.")
    if not args.data.exists():
        sys.exit(f"data={args.data} does not exist.")
    return args

def git(*words):
    """Return what a git command prints."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"git {words[0]} failed: {t.summary_of(done.stderr)}")
    return done.stdout.strip()

def identify(version):
    """Return the id of a commit or, for the working tree, of a git tree with its tracked files."""
    if version != ".":
        return git("rev-parse", f"{version}^{{commit}}")
    # If files were edited, this makes a commit that is on no branch, and changes nothing else
    commit = git("-c", "user.name=-", "-c", "user.email=-", "stash", "create")
    return git("rev-parse", f"{commit or 'HEAD'}^{{tree}}")

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
    if json.loads(path.read_text()) != record:
        sys.exit(f"{path} describes a different experiment: choose a different --out.")
    return list(ids)

# ---- The runs. A job is a tuple (version, factor, seed)
def is_tuning(job):
    return job[2] in TUNING_SEEDS

def plan(version, args, losses):
    """Return the jobs of a version, as far as they follow from the losses of other jobs."""
    lr, jobs, best = list(args.lr), [], args.lr[0]
    for _ in range(5 if len(lr) > 1 else 0):
        jobs = [(version, factor, 0) for factor in lr]
        if any(losses.get(job) is None for job in jobs):  # not made yet, or failed
            return jobs
        best = min(jobs, key=losses.get)[1]
        if best == lr[0]:
            lr.insert(0, lr[0] ** 2 / lr[1])
        elif best == lr[-1]:
            lr.append(lr[-1] ** 2 / lr[-2])
        else:
            break
    limit = min(map(losses.get, jobs), default=0.0) + NOISE
    close = [job[1] for job in jobs if losses[job] < limit]
    if len(close) > 1:
        jobs += [(version, factor, TUNING_SEEDS[1]) for factor in close]
        if any(losses.get(job) is None for job in jobs):
            return jobs
        best = min(close, key=lambda lr: sum(losses[version, lr, n] for n in TUNING_SEEDS))
    seeds = range(1, args.seeds + 1) if limit < math.inf else ()
    return jobs + [(version, best, seed) for seed in seeds]

def folder_of(job, args):
    return args.out / ("tuning" if is_tuning(job) else "runs") / "{}_lr{:g}_seed{}".format(*job)

def loss_of(job, args):
    """Return a run's last loss (inf: it diverged, None: it has not ended)."""
    folder = folder_of(job, args)
    with suppress(OSError, ValueError):
        steps = json.loads((folder / "config.json").read_text())["max_steps"]
        output = (folder / "output.txt").read_text(errors="replace")
        loss = t.read_metrics(folder)["val"].get(steps)
        # NaN differs from itself
        return math.inf if loss != loss or "diverged" in output[-500:] else loss
    return None

def execute(job, gpu, args, pipe):
    """Make a run, unless it has ended. Return its loss, and this or its last error as text."""
    folder, line = folder_of(job, args), "diverged"
    command = [sys.executable, "-c", TRAIN, str(job[1]), "--keep_every=0", *args.flags, *gpu,
               f"--data={args.data}", f"--log_dir={folder}", f"--seed={job[2]}",
               "--hellaswag_every=0", "--sample_every=0"]
    folder.mkdir(parents=True, exist_ok=True)
    # Wait until a run that a killed experiment.py has left behind is saved
    with suppress(NotImplementedError), filelock.FileLock(folder / ".lock"):
        pass
    if loss_of(job, args) is None:
        with open(folder / "output.txt", "ab", buffering=0) as output:
            # In a session of its own, a run does not get the terminal's Ctrl-C
            done = subprocess.run(command, cwd=args.out / job[0], stdin=pipe, stdout=output,
                                  stderr=subprocess.PIPE, start_new_session=True, text=True)
            line = (done.stderr.strip() or f"stopped (status {done.returncode})").splitlines()[-1]
            output.write(done.stderr.encode())
    loss = loss_of(job, args)
    if loss is not None:
        for path in t.find_checkpoints(folder).values():
            path.unlink()
    return loss, line if loss in (None, math.inf) else f"val {loss:.4f}"

def run_all(args):
    """Make the runs that are missing. Return {job: loss}, with None for runs that have failed."""
    gpus = [[f"--device=cuda:{i}"] for i in range(torch.cuda.device_count())]
    if not gpus or any(flag.startswith("--device=") for flag in args.flags):
        gpus = [[]]
    losses, running = {}, {}  # running: {Future: (job, its GPU)}
    read_end, write_end = os.pipe()
    with ThreadPoolExecutor(len(gpus)) as pool, open(write_end, "wb") as pipe:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: pipe.close())
        while True:
            jobs = sum([plan(version, args, losses) for version in args.names], [])
            for job in sorted(jobs, key=lambda job: (not is_tuning(job), job[2])):
                if gpus and not pipe.closed and job not in losses | dict(running.values()):
                    gpu = gpus.pop(0)
                    running[pool.submit(execute, job, gpu, args, read_end)] = job, gpu
            if not running:
                break
            for future in wait(running, timeout=1, return_when=FIRST_COMPLETED).done:
                job, gpu = running.pop(future)
                gpus.append(gpu)
                losses[job], line = future.result()
                print(f"{folder_of(job, args).name}: {line} ({len(losses)} of {len(jobs)} or more)")
        if pipe.closed:
            sys.exit("Stopped. To go on, repeat the command.")
    return losses

def draw(rows, path):
    """Draw the losses of Rows against the number of tokens: means, and ranges over seeds."""
    from matplotlib.figure import Figure  # not pyplot, which needs a display
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="tokens", ylabel="validation loss")
    for row in rows:
        curve = {n: losses for n, losses in row.curve().items() if n > 0}
        axes.plot(curve.keys(), [np.mean(losses) for losses in curve.values()], label=row.name)
        axes.fill_between(curve.keys(), [min(losses) for losses in curve.values()],
                          [max(losses) for losses in curve.values()], alpha=0.2)
    axes.legend(frameon=False)
    t.write_whole(path, lambda file: figure.savefig(file, dpi=120))

def report(args, losses):
    """Print the table, and draw the figure."""
    runs = [job for version in args.names for job in plan(version, args, losses)
            if not is_tuning(job) and losses[job] not in (None, math.inf)]
    if not runs or runs[0][0] != args.names[0]:
        sys.exit("No run of the baseline has succeeded, so nothing can be compared.")
    rows = compare.read_rows([folder_of(job, args) for job in runs])
    print("", *compare.table(rows), "", sep="\n")
    with suppress(ImportError):
        draw(rows, args.out / "experiment.png")
    if len(runs) < len(args.names) * args.seeds:
        sys.exit("Some runs have failed (see above). To try them again, repeat the command.")

def main():
    sys.stdout.reconfigure(errors="replace", line_buffering=True)
    args = parse_arguments()
    args.names = prepare(args)
    report(args, run_all(args))

if __name__ == "__main__":
    main()
