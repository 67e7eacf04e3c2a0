"""Print a table that compares finished runs, and say which differences exceed the noise.

    python tests/compare.py "log_*"                 # the baseline is the row of the first folder
    python tests/compare.py "log_plain_*" "log_*"   # the baseline is the first log_plain_* row

config.json, log.txt and the copies of train_gpt2.py in each folder are read, and nothing else.

Runs that differ only in their seed form one row. A run that has not finished is left out, and a
line says so.

The noise of a run is the standard deviation of its last validation loss over seeds, pooled over
all rows that are comparable with the baseline: those with its encoding, its val_tokens, and as many
steps or tokens. Losses of shorter runs vary more from seed to seed, so rows of another length would
change the noise. They are shown, but get no verdict.

A row is ahead of the baseline or behind it if Student's t-test (two-sided, 95 %) finds a
difference. Otherwise it is within the noise. By chance alone, about one row in twenty is reported
as ahead or behind. If no comparable row has two seeds, there is no verdict.
"""
import ast
import glob
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt2 as t  # noqa: E402

# Critical values of Student's t for 1, 2, ..., 10 degrees of freedom. With more degrees of freedom
# the value falls slowly to 1.96, so 2.23 is a safe choice there
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
CONSTANTS = ("Config", "SMALL", "FINETUNE")  # in the script; config.json has their values

@dataclass
class Row:
    """Runs that differ only in their seed."""
    constants: dict  # those that the runs share
    code: list       # what code_of() returns for each of the runs' copies of the script
    runs: dict = field(default_factory=dict)  # {seed: (folder, validation loss, ms per step)}

    @property
    def name(self):
        """The first folder of the row."""
        return next(iter(self.runs.values()))[0]

    @property
    def losses(self):
        return [loss for _, loss, _ in self.runs.values()]

def code_of(path):
    """Return the code in a copy of the script, without constants, comments and docstrings."""
    tree = ast.parse(path.read_bytes())
    kept = []
    for node in tree.body:
        names = [getattr(target, "id", "") for target in getattr(node, "targets", [])]
        if not set(CONSTANTS) & {getattr(node, "name", ""), *names}:
            kept.append(node)
    tree.body = kept
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            node.body = [part for part in node.body if not is_text(part)]
    return ast.dump(tree)

def is_text(node):
    """Return whether a statement is a string, such as a docstring."""
    value = getattr(node, "value", None) if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)

def read_run(folder):
    """Return (seed, constants, code, loss, ms per step) of the finished run in a folder.

    Raise ValueError with the reason if the folder holds no finished run.
    """
    try:
        constants = json.loads(Path(folder, "config.json").read_text())
        # If the run was continued with edited code, there are several copies
        copies = [*sorted(Path(folder).glob("train_gpt2_before_*.py")),
                  Path(folder, "train_gpt2.py")]
        code = [code_of(path) for path in copies]
    except (OSError, ValueError, SyntaxError) as e:
        raise ValueError(f"it holds no run ({t.summary_of(e)})") from None
    metrics = t.read_metrics(folder)
    if constants["max_steps"] not in metrics["val"]:
        raise ValueError(f"step {constants['max_steps']} has not been validated")
    seed = constants["seed"]
    # Constants that do not affect the result, such as B, need not be equal in a row
    ignored = t.MAY_CHANGE - {"data", "val_tokens", "dtype"} | {"seed"}
    constants = {name: value for name, value in constants.items() if name not in ignored}
    speeds = list(metrics["tok/s"].values())
    ms = 1000 * constants["total_batch_size"] / np.median(speeds) if speeds else np.nan
    return seed, constants, code, metrics["val"][constants["max_steps"]], ms

def read_rows(patterns):
    """Return a list of Rows of all runs whose folders match the patterns, the baseline first."""
    rows, folders = [], {}
    for pattern in patterns:
        matches = sorted(glob.glob(pattern))
        if not matches:
            print(f"No folder matches {pattern}.")
        folders |= dict.fromkeys(matches)
    for folder in folders:
        try:
            seed, constants, code, loss, ms = read_run(folder)
        except ValueError as e:
            print(f"{folder} is left out: {e}.")
            continue
        row = next((row for row in rows if (row.constants, row.code) == (constants, code)), None)
        if row is None:
            row = Row(constants, code)
            rows.append(row)
        if seed in row.runs:
            print(f"{folder} is left out: it is the same run as {row.runs[seed][0]}.")
        else:
            row.runs[seed] = folder, loss, ms
    return rows

def why_not_comparable(row, baseline):
    """Return why a row is not comparable with the baseline, or "" if it is."""
    a, b = row.constants, baseline.constants
    for name in ("encoding", "val_tokens"):
        if a[name] != b[name]:
            return f"another {name}"
    lengths = ((c["max_steps"], c["max_steps"] * c["total_batch_size"]) for c in (a, b))
    return "" if any(x == y for x, y in zip(*lengths)) else "another length"

def pooled_noise(rows):
    """Return the noise of a run and its degrees of freedom. With none, the noise is infinite."""
    freedom = sum(len(row.losses) - 1 for row in rows)
    squares = sum(np.var(row.losses) * len(row.losses) for row in rows)
    return (float(np.sqrt(squares / freedom)) if freedom else np.inf), freedom

def compared(row, baseline, noise, freedom):
    """Return the cell that compares a row's mean loss with the baseline's."""
    if row is baseline:
        return "the baseline"
    difference = np.mean(row.losses) - np.mean(baseline.losses)
    if reason := why_not_comparable(row, baseline):
        return f"{difference:+.4f}, no verdict: {reason}"
    if freedom == 0:
        return f"{difference:+.4f}, no verdict: one seed"
    t_95 = T_95[min(freedom, len(T_95)) - 1]
    allowed = t_95 * noise * np.sqrt(1 / len(row.losses) + 1 / len(baseline.losses))
    verdict = "within noise" if abs(difference) <= allowed else (
        "ahead" if difference < 0 else "behind")
    return f"{difference:+.4f} +- {allowed:.4f}: {verdict}"

def differences(row, baseline):
    """Return a text that lists the constants that differ from the baseline's, and "code"."""
    names = sorted(row.constants.keys() | baseline.constants.keys())
    changed = [f"{name}={row.constants.get(name)!r}" for name in names
               if row.constants.get(name) != baseline.constants.get(name)]
    return ", ".join(changed + ["code"] * (row.code != baseline.code)) or "-"

def table(rows):
    """Yield the lines of the table, with the lowest mean loss first, and of the note below it."""
    baseline = rows[0]
    comparable = [row for row in rows if not why_not_comparable(row, baseline)]
    noise, freedom = pooled_noise(comparable)
    yield ("| val | standard deviation over seeds | seeds | minus the baseline | ms per step "
           "| first folder: what differs |")
    yield "|" + " --- |" * 6
    for row in sorted(rows, key=lambda row: np.mean(row.losses)):
        spread = f"{np.std(row.losses, ddof=1):.4f}" if len(row.losses) > 1 else "-"
        ms = np.mean([ms for *_, ms in row.runs.values()])
        yield (f"| {np.mean(row.losses):.4f} | {spread} | {len(row.losses)} "
               f"| {compared(row, baseline, noise, freedom)} | {ms:.1f} "
               f"| {row.name}: {differences(row, baseline)} |")
    yield ""
    yield (f"The noise of a run is {noise:.4f}, with {freedom} degrees of freedom." if freedom else
           "No row comparable with the baseline has two seeds, so nothing can be said about noise.")

def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    rows = read_rows(sys.argv[1:])
    if not rows:
        sys.exit(f"compare.py: there is no finished run in {' '.join(sys.argv[1:])}.")
    print("\n".join(table(rows)))

if __name__ == "__main__":
    main()
