"""Check that this machine trains correctly, and estimate how long a run takes.

    python tests/preflight.py                     # before python train_gpt2.py
    python tests/preflight.py --data=my_shards    # before a run with these flags

The data of a step depends only on the seed and the step. So the same eight steps must give the same
losses with one process and with several, also if they are interrupted. Short runs of train_gpt2.py
are made in a temporary folder and compared. Exit status 1: at least one check has failed.
"""
import argparse
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from shlex import join

import check
import numpy as np
import torch
from check import ROOT, Failed

sys.path.insert(0, str(ROOT))
import fineweb  # noqa: E402

STEPS, SAVED_AT, KILL_AT = 8, 4, 6
TOKENS = 10e9  # in FineWeb-Edu's sample-10BT
WAIT = 60      # seconds that a download may take
REMEDY = (". Run tests/check.py. If train_gpt2.py is not edited, the connection between the GPUs "
          "may be broken: try NCCL_P2P_DISABLE=1")

# ---- What may have to be downloaded
def answer(question, encoding):
    """Return a sentence about a vocabulary, HellaSwag or FineWeb-Edu, or raise an exception."""
    if question == "vocabulary":
        return f"{encoding} with {fineweb.get_encoding(encoding).n_vocab:,} ids"
    if question == "HellaSwag":
        import hellaswag
        if not hellaswag.DATA.exists():  # download them to another folder
            hellaswag.DATA = Path(os.environ["HF_HOME"], "hellaswag.jsonl")
        return f"{len(list(hellaswag.iterate_examples('val'))):,} questions"
    files = fineweb.find_files(fineweb.Config.source, fineweb.Config.remote_name)
    start = time.perf_counter()
    documents = itertools.islice(fineweb.open_stream(files[0][0]), 3000)
    texts = [fineweb.text_of(document["text"]) for document in documents]
    reading, start = time.perf_counter() - start, time.perf_counter()
    n = len(fineweb.tokenize(texts, encoding))
    seconds = max(reading, (time.perf_counter() - start) / os.cpu_count()) * TOKENS / n
    return (f"{len(files)} files, {sum(size for _, size in files) / 1e9:.1f} GB; fineweb.py needs "
            f"about {seconds / 3600:.1f} hours to make shards of them")

def ask(question, encoding, folder):
    """Return what answer() returns in a process of its own. Raise Failed if it fails."""
    command = [sys.executable, __file__, "--ask", question, encoding]
    env = os.environ | {"HF_HOME": f"{folder}/hub", "HF_HUB_DOWNLOAD_TIMEOUT": "10"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WAIT)
    except subprocess.TimeoutExpired:
        raise Failed(f"no answer within {WAIT} s") from None
    if done.returncode:  # the last line of a traceback is "class: message"
        raise Failed(f": {done.stderr.strip()}".splitlines()[-1].partition(": ")[2])
    return done.stdout.splitlines()[-1]

# ---- The checks
class Preflight:
    """The checks, which return a sentence or raise Failed, and what they have found."""
    def __init__(self, runs, known):
        self.runs, self.known, self.folder, self.failed = runs, known, runs.folder, []
        self.several = self.no_vocabulary = None
        runs.show = lambda folder: self.show(f"{folder.name}: step " + str(sum(
            path.read_text().count(" norm ") for path in folder.glob("log.txt"))))

    def show(self, text):
        """Overwrite the last line of a terminal."""
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def report(self, name, function, *args, needed=True):
        """Make a check and print its line. Return whether it succeeded."""
        self.show(f"{name} ...")
        try:
            status, text = "ok", function(*args)
        except Failed as e:
            status, text = "skipped", e
            if needed:
                status, text = "FAIL", f"{e}{REMEDY if name in ('all GPUs', 'resume') else ''}"
                self.failed.append(name)
        self.show("")
        print(f"{status:8}{name:13}{text}", flush=True)
        return status == "ok"

    def build(self):
        """Build the run that was asked for, without training, on data that exists."""
        data = os.path.expanduser(self.known.data or fineweb.Config.local_dir)
        self.missing = not (os.path.isfile(data) or any(Path(data).glob("*_train_*.npy")))
        try:
            if self.missing:
                self.write_shards(self.known.encoding)
            look = self.runs.run("build", look=True).report
        except (Failed, fineweb.UserError) as e:
            if "TIKTOKEN_CACHE_DIR" not in str(e):  # another mistake
                raise
            self.no_vocabulary = True
            self.write_shards("bytes")
            look = self.runs.run("build", look=True).report
        self.look, self.cfg, self.exact = look, look["cfg"], look["device"] == "cpu"
        self.B, self.batch, gpus = self.cfg["B"], self.cfg["total_batch_size"], self.look["gpus"]
        self.n = 2 if self.exact else 1 if ":" in self.known.device else len(gpus)
        self.runs.flags += [
            f"--max_steps={STEPS}", "--warmup_steps=2", f"--eval_every={SAVED_AT}",
            f"--val_tokens={min(self.cfg['val_tokens'], self.batch)}", "--sample_every=0",
            "--keep_every=0", "--print_every=0", "--dropout=0"]  # dropout masks depend on B

    def write_shards(self, encoding):
        """Write two small shards of input.txt, and use them."""
        tokens = fineweb.encode(fineweb.get_encoding(encoding),
                                (ROOT / "input.txt").read_text(encoding="utf-8"))
        shards = self.folder / "shards"
        shards.mkdir(exist_ok=True)
        for name, size in ("val_000000", 2**21), ("train_000001", 2**22):
            np.save(shards / f"edufineweb_{name}.npy", np.resize(tokens, size).astype("uint32"))
        self.runs.flags += [f"--encoding={encoding}", f"--data={shards}"]

    def run(self, name, **job):
        """Make a run, and delete its folder. If memory runs out, halve B and repeat it."""
        try:
            result = self.runs.run(name, f"--B={self.B}", **job)
        except Failed as e:
            if "Out of memory" not in str(e) or self.B == 1:
                raise
            self.B //= 2
            return self.run(name, **job)
        if "kill_at" not in job:
            shutil.rmtree(self.folder / job.get("folder", name))
        return result

    def machine(self):
        """Describe the machine, and look whether its disks have room for the run."""
        cfg, gpus, cuda = self.cfg, self.look["gpus"], torch.version.cuda or "no CUDA"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        facts = [*(f"{gpus.count(gpu)} x {gpu}" for gpu in sorted(set(gpus))),
                 f"torch {torch.__version__} ({cuda})", f"{os.cpu_count()} cores, {memory:.0f} GiB"]
        # A checkpoint has the weights and two averages. While it is written, the newest, the best
        # and those at multiples of keep_every are kept
        size = 12 * sum(n for n, _ in self.look["first"].values())
        kept = 3 + (cfg["max_steps"] // cfg["keep_every"] if cfg["keep_every"] else 0)
        for name, folder, need in (("log_dir", self.known.log_dir, 5e8 + kept * size),
                                   ("data", self.known.data, 2 * TOKENS * self.missing)):
            folder = Path(folder).absolute()
            folder = next(parent for parent in (folder, *folder.parents) if parent.exists())
            free = shutil.disk_usage(folder).free
            facts.append(f"{name} has {free / 1e9:.1f} GB free and needs {need / 1e9:.1f} GB")
            if free < need:
                raise Failed(f"{'; '.join(facts)}: free some space, or choose a different {name}")
        return "; ".join(facts)

    def seconds(self, result):
        """Return the seconds per step, without the first two steps, which may compile."""
        return statistics.median_low(result.report["seconds"][2:])

    def speed(self, result):
        seconds = self.seconds(result)
        return f"{1e3 * seconds:.0f} ms per step, {self.batch / seconds:,.0f} tokens/s"

    def one_process(self):
        """Train with one process, and measure the effect of rounding."""
        start = time.perf_counter()
        self.base = base = self.run("one process")
        self.runs.timeout = 60 + 10 * (time.perf_counter() - start)
        first, last = base.log[0, "train"], base.log[STEPS - 1, "train"]
        if not last < first:
            raise Failed(f"the loss is {first:.4f} in step 0 and {last:.4f} in step {STEPS - 1}")
        self.allowed = check.rounding(base.log, self.run("rounding", nudge=check.NUDGE).log)
        B = self.cfg["B"]
        advice = f"; --B={B} does not fit, so use --B={self.B}" if self.B < B else ""
        return (f"the loss falls from {first:.4f} to {last:.4f}; first step "
                f"{base.report['seconds'][0]:.1f} s, then {self.speed(base)}; peak memory "
                f"{base.report['peak'] / 2**30:.1f} GiB{advice}")

    def all_gpus(self):
        """Train with all processes, and compare them with each other and with one process."""
        if self.n == 1:
            raise Failed("there is one GPU")
        result = self.run("all GPUs", processes=self.n)
        found = check.difference(self.base.log, result.log, self.allowed)
        for rank, report in enumerate(result.ranks):
            if different := check.difference_of_weights(result.report, report):
                found = f"after the last step, {different} between ranks 0 and {rank}"
        if found:
            raise Failed(found)
        self.several, scaling = result, ""
        if not self.exact:
            ratio = self.seconds(self.base) / self.seconds(result)
            scaling = f", {ratio / self.n:.0%} of perfect scaling"
        return (f"{self.n} processes have the losses and norms of one up to rounding "
                f"({check.limits(self.allowed, STEPS - 1)}), and equal weights; "
                f"{self.speed(result)}{scaling}")

    def resume(self):
        """Kill a run with -9, resume it, and compare it with a run that was not interrupted."""
        n, reference = (self.n, self.several) if self.several else (1, self.base)
        killed = self.run("resume", processes=n, kill_at=KILL_AT)
        again = self.run("resumed", processes=n, folder="resume")
        if len(again.report["seconds"]) != STEPS - SAVED_AT:
            raise Failed("the killed run did not go on at its checkpoint")
        # Steps 4 and 5 were taken twice with the weights of the checkpoint, by the killed run and
        # by the resumed one. So they may differ as little as steps 0 and 1
        twice = {key: value for key, value in killed.log.items() if key[0] >= SAVED_AT}
        strict = {(step, name): self.allowed[step - SAVED_AT, name] for step, name in twice}
        allowed = None if self.exact else self.allowed | strict
        if found := check.difference(reference.log | twice, again.log, allowed):
            raise Failed(f"{found}, without and with a kill in step {KILL_AT}")
        return (f"killed with -9 in step {KILL_AT} and resumed at step {SAVED_AT}, with the same "
                f"losses {'bit for bit' if self.exact else 'up to rounding'}")

    def last_line(self):
        """Return the command of the run, and how long it will take."""
        cfg, words, best = self.cfg, ["python"], self.base
        if self.several and not self.exact:
            best = self.several
            words = ["torchrun", "--standalone", f"--nproc_per_node={self.n}"]
        words += [os.path.relpath(ROOT / "train_gpt2.py"), *sys.argv[1:]]
        words += [f"--B={self.B}"] if self.B < cfg["B"] else []
        steps = cfg["max_steps"]
        if cfg["eval_every"]:  # a validation has no backward pass, which is two thirds of a step
            steps += steps // cfg["eval_every"] * cfg["val_tokens"] / self.batch / 3
        seconds = steps * self.seconds(best)
        text = (f"{seconds / 3600:.1f} hours" if seconds > 5400 else f"{seconds / 60:.0f} minutes"
                if seconds > 120 else f"{seconds:.0f} seconds")
        return (f"This machine trains correctly. `{join(words)}` will take about {text} for "
                f"{cfg['max_steps']:,} steps and their validations. Saves, HellaSwag and samples "
                "were not measured.")

def main():
    if sys.argv[1:2] == ["--ask"]:
        return print(answer(*sys.argv[2:]))
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    for name, default in ("data", ""), ("encoding", "gpt2"), ("device", "auto"), ("log_dir", "."):
        parser.add_argument(f"--{name}", default=default)
    known, _ = parser.parse_known_args()
    if not known.data and (known.device == "cpu" or not torch.cuda.is_available()):
        known.data = os.path.relpath(ROOT / "input.txt")  # the quick start
        sys.argv.append(f"--data={known.data}")
    flags = [word for word in sys.argv[1:] if not word.startswith("--branch_from=")]
    with check.temporary([*flags, "--hellaswag_every=0"], os.environ) as runs:
        preflight = Preflight(runs, known)
        report, folder = preflight.report, runs.folder
        try:
            preflight.build()
        except (Failed, fineweb.UserError) as e:
            return f"preflight.py: the run cannot start: {e}"
        report("machine", preflight.machine)
        report("vocabulary", ask, "vocabulary", known.encoding, folder,
               needed=preflight.no_vocabulary)
        report("FineWeb-Edu", ask, "FineWeb-Edu", "bytes" if preflight.no_vocabulary else
               known.encoding, folder, needed=preflight.missing)
        report("HellaSwag", ask, "HellaSwag", "", folder, needed=False)
        if report("one process", preflight.one_process):
            report("all GPUs", preflight.all_gpus, needed=preflight.n > 1)
            report("resume", preflight.resume)
        print(f"This machine is not ready: {', '.join(preflight.failed)} failed."
              if preflight.failed else preflight.last_line())
        return len(preflight.failed) > 0

if __name__ == "__main__":
    sys.exit(main())
