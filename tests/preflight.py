"""Check that this machine trains correctly, and estimate how long a run takes.

    python tests/preflight.py                     # before python train_gpt2.py
    python tests/preflight.py --data=my_shards    # before a run with these flags

The data of a step depends only on the seed and the step. So the same eight steps must give the same
losses with one process and with several, also if they are interrupted. Short runs of train_gpt2.py
are made in a temporary folder and compared. Exit status 1: at least one check has failed.
"""
import argparse
import os
import re
import shutil
import sys
import time
from pathlib import Path
from shlex import join
from statistics import median_low

import check
import numpy as np
import torch
from check import ROOT, Failed

sys.path.insert(0, str(ROOT))
import fineweb  # noqa: E402

STEPS, SAVED_AT, KILL_AT = 8, 4, 6
REMEDY = (". Run tests/check.py. If train_gpt2.py is not edited, the connection between the GPUs "
          "may be broken: try NCCL_P2P_DISABLE=1")

class Preflight:
    """The checks, which return a sentence or raise Failed, and what they have found."""
    def __init__(self, runs, known):
        self.runs, self.known, self.failed, self.several = runs, known, [], None

    def report(self, name, function, needed=True):
        """Make a check and print its line. Return whether it succeeded."""
        try:
            status, text = "ok", function()
        except Failed as e:
            status, text = "skipped", e
            if needed:
                status, text = "FAIL", f"{e}{REMEDY if name in ('all GPUs', 'resume') else ''}"
                self.failed.append(name)
        print(f"{name:13}{status:9}{text}", flush=True)
        return status == "ok"

    def build(self):
        """Build the run that was asked for, without training.

        If its data does not exist yet, use two small shards of input.txt.
        """
        data = Path(self.known.data or fineweb.Config.local_dir).expanduser()
        if not (data.is_file() or any(data.glob("*_train_*.npy"))):
            tokens = fineweb.encode(fineweb.get_encoding(self.known.encoding),
                                    (ROOT / "input.txt").read_text(encoding="utf-8"))
            for name, size in ("val_000000", 2**21), ("train_000001", 2**22):
                np.save(self.runs.folder / f"input_{name}.npy", np.resize(tokens, size))
            self.runs.flags += [f"--data={self.runs.folder}"]
        look = self.runs.run("build", look=True).reports[0]
        self.cfg, self.gpus, self.exact = look["cfg"], look["gpus"], look["device"] == "cpu"
        self.B, self.batch = self.cfg["B"], self.cfg["total_batch_size"]
        self.n = len(self.gpus) or 2
        self.runs.flags += [
            f"--max_steps={STEPS}", "--warmup_steps=2", f"--eval_every={SAVED_AT}",
            f"--val_tokens={min(self.cfg['val_tokens'], self.batch)}", "--sample_every=0",
            "--keep_every=0", "--print_every=0", "--dropout=0"]  # dropout masks depend on B

    def that_fits(self, run, *args):
        """Make a run. If memory runs out, halve B and repeat it."""
        try:
            return run(*args)
        except Failed as e:
            if self.B == 1 or not re.search("MemoryError|can't allocate memory", str(e)):
                raise
        self.B //= 2
        self.runs.flags += [f"--B={self.B}"]
        return self.that_fits(run, *args)

    def machine(self):
        """Describe the machine."""
        gpus, cuda = self.gpus, torch.version.cuda or "no CUDA"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return "; ".join([
            *(f"{gpus.count(gpu)} x {gpu}" for gpu in sorted(set(gpus))),
            f"torch {torch.__version__} ({cuda})", f"{os.cpu_count()} cores, {memory:.0f} GiB",
            f"{shutil.disk_usage('.').free / 1e9:.1f} GB of disk are free"])

    def speed(self, result):
        """Return the tokens per second, without the first two steps, which may compile."""
        return self.batch / median_low(result.reports[0]["seconds"][2:])

    def one_process(self):
        """Train with one process, and measure the effect of rounding."""
        start = time.perf_counter()
        self.base = base = self.that_fits(self.runs.run, "base")
        self.runs.timeout = 60 + 10 * (time.perf_counter() - start)
        first, last = base.log[0, "train"], base.log[STEPS - 1, "train"]
        if not last < first:
            raise Failed(f"the loss is {first:.4f} in step 0 and {last:.4f} in step {STEPS - 1}")
        self.allowed = check.rounding(base.log, self.runs.run("nudged", nudge=check.NUDGE).log)
        advice = "" if self.B == self.cfg["B"] else (
            f"; --B={self.cfg['B']} does not fit, so use --B={self.B}")
        return (f"the loss falls from {first:.4f} to {last:.4f}; first step "
                f"{base.reports[0]['seconds'][0]:.1f} s, then {self.speed(base):,.0f} tokens/s; "
                f"peak memory {base.reports[0]['peak'] / 2**30:.1f} GiB{advice}")

    def all_gpus(self):
        """Train with all processes, and compare them with each other and with one process."""
        result = self.that_fits(self.runs.several, self.n)
        if found := check.difference(self.base, result, self.allowed):
            raise Failed(found)
        self.several = result
        return (f"{self.n} processes have the losses and norms of one up to rounding "
                f"({check.limits(self.allowed)}), and equal weights; {self.speed(result):,.0f} "
                "tokens/s")

    def resume(self):
        """Kill a run with -9, resume it, and compare it with a run that was not interrupted."""
        n, reference = (self.n, self.several) if self.several else (1, self.base)
        killed, again = self.runs.resumed(KILL_AT, n)
        # Steps 4 and 5 were taken twice with the weights of the checkpoint, by the killed run and
        # by the resumed one. So they may differ as little as steps 0 and 1
        twice = {key: value for key, value in killed.log.items() if key[0] >= SAVED_AT}
        strict = {(step, name): self.allowed[step - SAVED_AT, name] for step, name in twice}
        allowed = None if self.exact else self.allowed | strict
        reference = check.Result(reference.log | twice, reference.reports)
        if found := check.difference(reference, again, allowed):
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
        tokens = cfg["max_steps"] * self.batch
        if cfg["eval_every"]:  # a validation has no backward pass, which is two thirds of a step
            tokens += cfg["max_steps"] // cfg["eval_every"] * cfg["val_tokens"] / 3
        minutes = tokens / self.speed(best) / 60
        text = f"{minutes / 60:.1f} hours" if minutes > 90 else f"{minutes:.1f} minutes"
        return (f"This machine trains correctly. `{join(words)}` will take about {text} for "
                f"{cfg['max_steps']:,} steps and their validations. Saves, HellaSwag and samples "
                "were not measured.")

def main():
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    for name, default in ("data", ""), ("encoding", "gpt2"), ("device", "auto"):
        parser.add_argument(f"--{name}", default=default)
    known, _ = parser.parse_known_args()
    if not known.data and (known.device == "cpu" or not torch.cuda.is_available()):
        known.data = os.path.relpath(ROOT / "input.txt")  # the quick start
        sys.argv.append(f"--data={known.data}")
    with check.temporary([*sys.argv[1:], "--hellaswag_every=0"], os.environ) as runs:
        preflight = Preflight(runs, known)
        try:
            preflight.build()
        except Failed as e:
            return f"preflight.py: the run cannot start: {e}"
        preflight.report("machine", preflight.machine)
        if preflight.report("one process", preflight.one_process):
            preflight.report("all GPUs", preflight.all_gpus, needed=preflight.n > 1)
            preflight.report("resume", preflight.resume)
        print(f"This machine is not ready: {', '.join(preflight.failed)} failed."
              if preflight.failed else preflight.last_line())
        return len(preflight.failed) > 0

if __name__ == "__main__":
    sys.exit(main())
