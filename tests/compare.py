"""Print a table that compares finished runs, and say which differences exceed the noise.

    python tests/compare.py "log_*"                 # the baseline is the row of the first folder
    python tests/compare.py "log_plain_*" "log_*"   # the baseline is the first log_plain_* row

Runs that differ only in their seed form one row. A row is compared with the baseline seed by seed:
runs with the same seed share the data, their order and the initial values of common parameters,
which usually removes most of the noise (small_models.txt). A row is within the noise if the 95 %
interval of the mean difference of the last validation losses over common seeds, that of Student's
paired t-test, contains 0. Otherwise, it is ahead or behind, unless chance alone gives such a
difference to one of so many rows: then it is unclear. A row gets no verdict if the two share fewer
than two seeds, or were validated on different amounts of text, or were trained neither for as many
steps nor on as many tokens. If encodings differ, all losses are in bits per byte.

In the folders of experiment.py, versions and the factors of their learning rates are those in the
folders' names. In other folders, the factor is max_lr divided by that of the baseline.
"""
import ast
import glob
import json
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt2 as t  # noqa: E402

CONSTANTS = {"Config", "SMALL", "FINETUNE"}  # in the script; config.json has their values
HEADINGS = ("version or first folder", "val", "standard deviation", "seeds",
            "difference from the baseline, 95 % interval", "verdict", "max_lr (factor)",
            "parameters", "ms per step (ratio)", "what differs")

@dataclass
class Row:
    """Runs that differ only in their seed."""
    name: str        # the version or the first folder
    factor: str      # by which experiment.py multiplied the learning rate, or ""
    constants: dict  # those that affect training
    code: list       # what code_of() returns for each copy of the script
    runs: dict = field(default_factory=dict)  # {seed: metrics, {metric: {step: value}}}

    @property
    def losses(self):
        """The last validation loss of each seed."""
        steps = self.constants["max_steps"]
        return {seed: metrics["val"][steps] for seed, metrics in self.runs.items()}

    @property
    def mean(self):
        return np.mean([*self.losses.values()])

    @property
    def ms(self):
        """The mean time per step in milliseconds. In each run, it is that of the median speed."""
        speeds = [np.median([*metrics["tok/s"].values()]) for metrics in self.runs.values()]
        return 1000 * self.constants["total_batch_size"] * np.mean(1 / np.array(speeds))

    @property
    def bytes_per_token(self):
        """The mean number of bytes of a validation token, or NaN if no log has it."""
        return next((n for metrics in self.runs.values()
                     for n in metrics["bytes_per_token"].values()), math.nan)

    def curve(self):
        """Return {number of tokens: validation losses of the runs}, where all have one."""
        logs = [metrics["val"] for metrics in self.runs.values()]
        return {step * self.constants["total_batch_size"]: [log[step] for log in logs]
                for step in sorted(set.intersection(*map(set, logs)))}

def code_of(path):
    """Return the code in a copy of the script, without constants, comments and docstrings."""
    tree = ast.parse(path.read_bytes())
    kept = []
    for node in tree.body:
        names = [getattr(target, "id", "") for target in getattr(node, "targets", [])]
        if not CONSTANTS & {getattr(node, "name", ""), *names}:
            kept.append(node)
    tree.body = kept
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            node.body = [part for part in node.body if not (
                isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
    return ast.dump(tree)

def read_run(folder):
    """Return (version, factor, seed, constants, code, metrics). Raise ValueError without a run."""
    try:
        constants = json.loads(Path(folder, "config.json").read_text())
        # If the run was continued with edited code, there are several copies
        code = [code_of(path) for path in sorted(Path(folder).glob("train_gpt2_*.py"))]
    except (OSError, ValueError, SyntaxError) as e:
        raise ValueError(f"it holds no run ({t.summary_of(e)})") from None
    metrics = t.read_metrics(folder)
    if not math.isfinite(metrics["val"].get(constants["max_steps"], math.nan)):
        raise ValueError(f"step {constants['max_steps']} has no finite validation loss")
    # Constants that do not affect the result, such as B, need not be equal in a row
    ignored = t.MAY_CHANGE - {"data", "dtype"} | {"seed"}
    kept = {name: value for name, value in constants.items() if name not in ignored}
    match = re.fullmatch(r"(.+)_lr(.+)_seed\d+", Path(folder).name)
    return *(match.groups() if match else ("", "")), constants["seed"], kept, code, metrics

def read_rows(folders):
    """Return a list of Rows of all finished runs in these folders, the baseline first."""
    rows = {}
    for folder in folders:
        try:
            version, factor, seed, constants, code, metrics = read_run(folder)
        except ValueError as e:
            print(f"{folder} is left out: {e}.")
            continue
        key = json.dumps([version, constants, code], sort_keys=True)
        row = rows.setdefault(key, Row(version or str(folder), factor, constants, code))
        row.runs.setdefault(seed, metrics)
    rows = list(rows.values())
    if len({row.constants["encoding"] for row in rows}) > 1:
        print("Encodings differ, so losses are in bits per byte, not in nats per token.")
        for row in rows:
            row.constants["val_tokens"] *= row.bytes_per_token
            for metrics in row.runs.values():
                scale = 1 / math.log(2) / row.bytes_per_token
                metrics["val"] = {step: loss * scale for step, loss in metrics["val"].items()}
    return rows

def why_not_comparable(row, baseline):
    """Return why a row is not comparable with the baseline, or "" if it is."""
    a, b = row.constants, baseline.constants
    # If encodings differ, these are bytes. NaN, if they are not known, is not close to anything
    if not math.isclose(a["val_tokens"], b["val_tokens"], rel_tol=0.05):
        return "another amount of validation text"
    lengths = ((c["max_steps"], c["max_steps"] * c["total_batch_size"]) for c in (a, b))
    return "" if any(x == y for x, y in zip(*lengths)) else "another length"

def student(freedom):
    """Return rising values of |t|, and the chance that Student's t is farther from 0 than each."""
    n = 10_000
    angles = (np.arange(n) + 0.5) * np.pi / 2 / n  # t = sqrt(freedom) * tan(angle)
    density = np.cos(angles) ** (freedom - 1)
    within = np.cumsum(density) - density / 2
    return np.sqrt(freedom) * np.tan(angles), 1 - within / density.sum()

def compared(rows):
    """Return the cells of each Row: its difference from the first Row, and the verdict.

    Verdicts are corrected by Holm's method, because it finds more effects than wider intervals do:
    the smallest of n p-values must be at most 0.05 / n, the next one at most 0.05 / (n - 1), etc.
    """
    cells, chances, losses = [("-", "the baseline")], {}, rows[0].losses
    for row in rows[1:]:
        pairs = [loss - losses[seed] for seed, loss in row.losses.items() if seed in losses]
        difference = np.mean(pairs or row.mean - rows[0].mean)
        cell, verdict = f"{difference:+.4f}", "ahead" if difference < 0 else "behind"
        reason = why_not_comparable(row, rows[0])
        if reason or len(pairs) < 2:
            verdict = f"none: {reason or 'fewer than two common seeds'}"
        else:
            error = max(1e-9, np.std(pairs, ddof=1) / np.sqrt(len(pairs)))
            values, chance = student(len(pairs) - 1)
            cell += f" +- {error * np.interp(-0.05, -chance, values):.4f}"
            chances[len(cells)] = np.interp(abs(difference) / error, values, chance)
        cells.append((cell, verdict))
    n_left = len(chances)
    for i in sorted(chances, key=chances.get):
        if n_left and chances[i] <= 0.05 / n_left:
            n_left -= 1
        else:
            n_left = 0  # Holm's method ends at the first difference that is too small
            cells[i] = cells[i][0], "within noise" if chances[i] > 0.05 else "unclear"
    return cells

def what_differs(row, baseline):
    """Return a text that lists the constants that differ from the baseline's, and "code"."""
    a, b = row.constants, baseline.constants
    changed = [f"{name}={a.get(name)!r}" for name in sorted(a.keys() | b.keys())
               if a.get(name) != b.get(name)]
    return ", ".join(changed + ["code"] * (row.code != baseline.code)) or "-"

def line(*cells):
    """Return a line of a table."""
    return f"| {' | '.join(cells)} |"

def table(rows):
    """Yield the lines of the table, with the lowest mean loss first, and a note."""
    baseline, cells = rows[0], compared(rows)
    yield from (line(*HEADINGS), "|" + " --- |" * len(HEADINGS))
    for i, row in sorted(enumerate(rows), key=lambda item: item[1].mean):
        losses = [*row.losses.values()]
        spread = f"{np.std(losses, ddof=1):.4f}" if len(losses) > 1 else "-"
        max_lr = row.constants["max_lr"]
        sizes = [n for metrics in row.runs.values() for n in metrics["parameters"].values()]
        factor = row.factor or f"{max_lr / baseline.constants['max_lr']:.3g}"
        yield line(row.name, f"{row.mean:.4f}", spread, str(len(losses)), *cells[i],
                   f"{max_lr:.3g} ({factor})", f"{sizes[-1]:,.0f}" if sizes else "-",
                   f"{row.ms:.1f} ({row.ms / baseline.ms:.2f})", what_differs(row, baseline))
    yield ("\nIf no row differed from the baseline, the chance of any verdict of ahead or behind "
           "would be at most 5 %.")

def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.stdout.reconfigure(errors="replace")  # a folder's name may contain any character
    matches = sum([sorted(glob.glob(pattern)) for pattern in sys.argv[1:]], [])
    rows = read_rows(dict.fromkeys(matches))
    if not rows:
        sys.exit(f"compare.py: there is no finished run in {' '.join(sys.argv[1:])}.")
    print("\n".join(table(rows)))

if __name__ == "__main__":
    main()
