"""Print a table that compares finished runs, and say which differences exceed the noise.

    python tests/compare.py "log_*"                 # the baseline is the row of the first folder
    python tests/compare.py "log_plain_*" "log_*"   # the baseline is the first log_plain_* row

config.json, log.txt and the copies of train_gpt2.py in each folder are read, and nothing else.

Runs that differ only in their seed form one row. A run that has not finished is left out, and a
line says so. A second table shows how differences from the baseline change during training.

A row is ahead of the baseline or behind it if the 95 % interval of their difference, which is that
of Student's t-test, excludes 0. Otherwise it is within the noise, the standard deviation of the last
validation loss over seeds, pooled over these two rows only: another row, one of whose runs has
failed to learn, does not change a verdict. A row gets no verdict if neither of the two rows has two
seeds, or if they have another encoding, other val_tokens, or neither as many steps nor as many
tokens.

In the folders of experiment.py, versions and the factors of their learning rates are those in the
folders' names. In other folders, the factor is max_lr divided by that of the baseline.
"""
import ast
import glob
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt2 as t  # noqa: E402

# Critical values of Student's t for 1, 2, ..., 10 degrees of freedom. With more degrees of freedom
# the value falls slowly to 1.96, so 2.23 is a safe choice there
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
CONSTANTS = {"Config", "SMALL", "FINETUNE"}  # in the script; config.json has their values
HEADINGS = ("version or first folder", "val", "standard deviation", "seeds",
            "difference from the baseline, 95 % interval", "verdict", "max_lr (factor)",
            "parameters", "ms per step (ratio)", "what differs")
VERDICTS = ("ahead", "behind", "within noise")
MAX_COLUMNS = 8  # of the second table

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
        """The last validation losses."""
        return [metrics["val"][self.constants["max_steps"]] for metrics in self.runs.values()]

    @property
    def ms(self):
        """The mean time per step in milliseconds. In each run, it is that of the median speed."""
        speeds = [[*metrics["tok/s"].values()] or [np.nan] for metrics in self.runs.values()]
        return 1000 * self.constants["total_batch_size"] * np.mean(
            [1 / np.median(values) for values in speeds])

    def curve(self, metric):
        """Return {number of tokens: values of the runs} for the steps where all have the metric."""
        logs = [metrics[metric] for metrics in self.runs.values()]
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
    """Return (version or "", factor or "", seed, constants, code, metrics) of the run in a folder.

    Raise ValueError with the reason if the folder holds no finished run.
    """
    try:
        constants = json.loads(Path(folder, "config.json").read_text())
        # If the run was continued with edited code, there are several copies
        code = [code_of(path) for path in sorted(Path(folder).glob("train_gpt2_*.py"))]
        if not code:
            raise ValueError("no copy of train_gpt2.py")
    except (OSError, ValueError, SyntaxError) as e:
        raise ValueError(f"it holds no run ({t.summary_of(e)})") from None
    metrics = t.read_metrics(folder)
    if constants["max_steps"] not in metrics["val"]:
        raise ValueError(f"step {constants['max_steps']} has not been validated")
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
        if seed in row.runs:
            print(f"{folder} is left out: it is the same run as seed {seed} of {row.name}.")
        row.runs.setdefault(seed, metrics)
    return list(rows.values())

def why_not_comparable(row, baseline):
    """Return why a row is not comparable with the baseline, or "" if it is."""
    a, b = row.constants, baseline.constants
    for name in ("encoding", "val_tokens"):
        if a[name] != b[name]:
            return f"another {name}"
    lengths = ((c["max_steps"], c["max_steps"] * c["total_batch_size"]) for c in (a, b))
    return "" if any(x == y for x, y in zip(*lengths)) else "another length"

def pooled_noise(a, b):
    """Return the noise of a run of two Rows, and its degrees of freedom, which may be 0."""
    freedom = len(a.losses) + len(b.losses) - 2
    squares = sum(np.var(row.losses) * len(row.losses) for row in (a, b))
    return float(np.sqrt(squares / max(1, freedom))), freedom

def compared(row, baseline):
    """Return two cells: the difference from the baseline with its interval, and the verdict."""
    if row is baseline:
        return "-", "the baseline"
    difference = np.mean(row.losses) - np.mean(baseline.losses)
    noise, freedom = pooled_noise(row, baseline)
    if reason := why_not_comparable(row, baseline) or ("" if freedom else "one seed"):
        return f"{difference:+.4f}", f"none: {reason}"
    t_95 = T_95[min(freedom, len(T_95)) - 1]
    allowed = t_95 * noise * np.sqrt(1 / len(row.losses) + 1 / len(baseline.losses))
    verdict = "within noise" if abs(difference) <= allowed else (
        "ahead" if difference < 0 else "behind")
    return f"{difference:+.4f} +- {allowed:.4f}", verdict

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
    """Yield the lines of both tables, with the lowest mean loss first, and the notes."""
    baseline = rows[0]
    rows = sorted(rows, key=lambda row: np.mean(row.losses))
    yield from (line(*HEADINGS), "|" + " --- |" * len(HEADINGS))
    for row in rows:
        spread = f"{np.std(row.losses, ddof=1):.4f}" if len(row.losses) > 1 else "-"
        max_lr = row.constants["max_lr"]
        sizes = [n for metrics in row.runs.values() for n in metrics["parameters"].values()]
        factor = row.factor or f"{max_lr / baseline.constants['max_lr']:.3g}"
        yield line(row.name, f"{np.mean(row.losses):.4f}", spread, str(len(row.losses)),
                   *compared(row, baseline), f"{max_lr:.3g} ({factor})",
                   f"{sizes[-1]:,.0f}" if sizes else "-",
                   f"{row.ms:.1f} ({row.ms / baseline.ms:.2f})", what_differs(row, baseline))
    n = sum(compared(row, baseline)[1] in VERDICTS for row in rows)
    yield (f"\nIf no row differed from the baseline, chance alone would still give {0.05 * n:.2g} "
           f"verdicts of\nahead or behind (5 % of {n}).")
    yield from differences_by_step(rows, baseline)

def differences_by_step(rows, baseline):
    """Yield the lines of a table with the mean differences at some of the validations."""
    batch, reference = baseline.constants["total_batch_size"], baseline.curve("val")
    after = [n for n in reference if n > 0]
    if not after or len(rows) == 1:
        return
    indices = np.linspace(0, len(after) - 1, MAX_COLUMNS).round().astype(int)
    after = [after[i] for i in np.unique(indices)]
    yield "\n" + line("difference after step", *(str(n // batch) for n in after))
    yield "|" + " --- |" * (len(after) + 1)
    for row in rows:
        curve = row.curve("val")
        if row is not baseline:
            yield line(row.name, *(f"{np.mean(curve[n]) - np.mean(reference[n]):+.4f}"
                                   if n in curve else "-" for n in after))

def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.stdout.reconfigure(errors="replace")  # a folder's name may contain any character
    folders = {}
    for pattern in sys.argv[1:]:
        matches = sorted(glob.glob(pattern))
        if not matches:
            print(f"No folder matches {pattern}.")
        folders |= dict.fromkeys(matches)
    rows = read_rows(folders)
    if not rows:
        sys.exit(f"compare.py: there is no finished run in {' '.join(sys.argv[1:])}.")
    print("\n".join(table(rows)))

if __name__ == "__main__":
    main()
