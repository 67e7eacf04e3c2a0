"""Print a table that compares finished runs, and say which differences exceed the noise.

    python tests/compare.py "log_*"                 # the baseline is the row of the first folder
    python tests/compare.py "log_plain_*" "log_*"   # the baseline is the first log_plain_* row

The script reads run.json and log.txt of each folder and nothing else.

Runs that differ only in their seed form one row. Two folders hold the same run if their seeds,
constants, data and code agree, and only the first of them is counted. A run that has not finished,
or that failed, is left out, and a line says why.

The noise of a run is the standard deviation of its last validation loss over seeds, pooled over
all rows that are comparable with the baseline. A row is comparable if it has the baseline's
encoding, val_tokens and length. Two rows have the same length if their runs took the same number of
steps, or the same number of tokens, or were given the same --minutes. Losses of short runs vary
more from seed to seed than losses of long ones, so rows of another length would change the noise.
They are shown, but they are left out of the noise and get no verdict.

A row is ahead of the baseline or behind it if Student's t-test (two-sided, 95 %) finds a
difference. Otherwise it is within the noise. If no comparable row has two seeds, there is no
verdict. A row that ends in (!) has a warning about its result, which is printed below the table.

If matplotlib is installed, compare.png shows the validation losses of all runs as thin lines, and
the mean of each row as a bold line.
"""
import glob
import importlib.util
import itertools
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

# ---- reading runs
@dataclass
class Row:
    """Runs that differ only in their seed."""
    shared: dict  # the constants that the runs share, and their "data" and "code"
    runs: dict = field(default_factory=dict)  # {seed: (folder, result)}

    @property
    def name(self):
        """The first folder of the row."""
        return next(iter(self.runs.values()))[0]

    def results(self, key):
        """Return the runs' values of one entry of the result, for example "val" or "steps"."""
        return [result[key] for _, result in self.runs.values()]

def code_of(run):
    """Return the checksum of a run's code, or "first+second" if other code continued the run."""
    checksums = [start["code"] for start in run["starts"]]
    return "+".join(f"{checksum:08x}" for checksum, _ in itertools.groupby(checksums))

def read_finished_run(folder):
    """Return (seed, shared, result) of the run in a folder. `shared` is that of the run's Row.

    Raise ValueError with the reason if the folder holds no finished run.
    """
    try:
        run = t.read_run_json(folder)
        result = run["result"] or {}
        shared = run["constants"] | {"data": run["data"], "code": code_of(run)}
        seed = shared.pop("seed")
        del shared["log_dir"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"it holds no run ({t.summary_of(e)})") from None
    if "failed" in result:
        raise ValueError(f"the run failed: {result['failed']}")
    if "val" not in result:
        raise ValueError("the run has no result yet")
    if shared.get("minutes"):  # max_steps then depends on speed, so it differs between seeds
        del shared["max_steps"]
    return seed, shared, result

def read_rows(patterns):
    """Return a list of Rows of all runs whose folders match the patterns, the baseline first."""
    rows, folders = {}, {}
    for pattern in patterns:
        matches = sorted(glob.glob(pattern))
        if not matches:
            print(f"No folder matches {pattern}.")
        folders |= dict.fromkeys(matches)
    for folder in folders:
        try:
            seed, shared, result = read_finished_run(folder)
        except ValueError as e:
            print(f"{folder} is left out: {e}.")
            continue
        row = rows.setdefault(json.dumps(shared, sort_keys=True), Row(shared))
        if seed in row.runs:
            print(f"{folder} is left out: {row.runs[seed][0]} is the same run "
                  "(seed, constants, data and code agree).")
        else:
            row.runs[seed] = folder, result
    return list(rows.values())

# ---- the table
def why_not_comparable(row, baseline):
    """Return why a row is not comparable with the baseline, or "" if it is."""
    if row.shared.get("encoding") != baseline.shared.get("encoding"):
        return "another encoding"
    if row.shared.get("val_tokens") != baseline.shared.get("val_tokens"):
        return "another val_tokens"  # so the losses are those of different texts
    minutes = row.shared.get("minutes")
    same_minutes = minutes and minutes == baseline.shared.get("minutes")
    same_number = any(set(row.results(key)) == set(baseline.results(key))
                      for key in ("steps", "tokens"))
    return "" if same_minutes or same_number else "another length"

def pooled_noise(losses):
    """Return the noise of a run and its degrees of freedom. The noise is infinite if these are 0.

    losses: a list for each row.
    """
    freedom = sum(len(values) - 1 for values in losses)
    squares = sum(np.var(values) * len(values) for values in losses)
    return (float(np.sqrt(squares / freedom)) if freedom else np.inf), freedom

def compared(row, baseline, noise, freedom):
    """Return the cell that compares a row's mean loss with the baseline's."""
    if row is baseline:
        return "the baseline"
    ours, theirs = row.results("val"), baseline.results("val")
    ahead = np.mean(theirs) - np.mean(ours)
    if reason := why_not_comparable(row, baseline):
        return f"{ahead:+.4f}, no verdict: {reason}"
    if freedom == 0:
        return f"{ahead:+.4f}, no verdict: one seed"
    t_95 = T_95[min(freedom, len(T_95)) - 1]
    allowed = t_95 * noise * np.sqrt(1 / len(ours) + 1 / len(theirs))
    verdict = "ahead" if ahead > allowed else "behind" if ahead < -allowed else "within noise"
    return f"{ahead:+.4f} +- {allowed:.4f}: {verdict}"

def differences(row, baseline):
    """Return a text that lists the constants, data and code that differ from the baseline's."""
    names = sorted({*row.shared, *baseline.shared})
    changed = [name for name in names if row.shared.get(name) != baseline.shared.get(name)]
    return ", ".join(f"{name}={row.shared.get(name)!r}" for name in changed) or "-"

def unit_of(rows):
    """Return the unit of the rows' losses."""
    encodings = {row.shared.get("encoding") for row in rows}
    if encodings == {"bytes"}:
        return "nats per byte"
    return "nats per token (bytes: per byte)" if "bytes" in encodings else "nats per token"

def warnings_of(row):
    """Yield the warnings of a row's results.

    Texts that differ only in their numbers, as they do between seeds, are one warning.
    """
    found = {}
    for _, result in row.runs.values():
        for text in result.get("warnings", []):
            found.setdefault(re.sub(r"[-+]?\d[\d.]*(e[-+]\d+)?", "", text), []).append(text)
    for texts in found.values():
        yield f"(!) {row.name} ({len(texts)} of {len(row.runs)} runs): {texts[0]}"

def table_row(row, baseline, noise, freedom):
    """Return one line of the table."""
    losses = row.results("val")
    mark = " (!)" if any(warnings_of(row)) else ""
    cells = [
        f"{np.mean(losses):.4f}",
        f"{np.mean(row.results('bits_per_byte')):.4f}",
        f"{np.std(losses, ddof=1):.4f}" if len(losses) > 1 else "-",
        f"{len(losses)}",
        compared(row, baseline, noise, freedom),
        f"{np.mean(row.results('steps')):,.0f}",
        f"{row.results('parameters')[0]:,}",
        f"{row.name}: {differences(row, baseline)}{mark}"]
    return f"| {' | '.join(cells)} |"

def table(rows):
    """Yield the lines of the table, with the lowest mean loss first, and of the notes below it."""
    baseline = rows[0]
    reasons = {row.name: why_not_comparable(row, baseline) for row in rows}
    pooled = [row.results("val") for row in rows if not reasons[row.name]]
    noise, freedom = pooled_noise(pooled)
    yield (f"| val, {unit_of(rows)} | bits per byte | standard deviation over seeds | seeds "
           "| ahead of the baseline by | steps | parameters | first folder: what differs |")
    yield "|" + " --- |" * 8
    for row in sorted(rows, key=lambda row: np.mean(row.results("val"))):
        yield table_row(row, baseline, noise, freedom)
    yield ""
    for row in rows:
        yield from warnings_of(row)
    if freedom:
        yield (f"The noise of a run is {noise:.4f}, pooled over {len(pooled)} row(s) of the "
               f"baseline's encoding, val_tokens and length, with {freedom} degrees of freedom. "
               "By chance alone, about one row in twenty is reported as ahead or behind.")
    else:
        yield ("No row comparable with the baseline has two seeds, so nothing can be "
               "said about noise.")
    if left_out := [f"{name} ({reason})" for name, reason in reasons.items() if reason]:
        yield f"Left out of the noise, and without a verdict: {', '.join(left_out)}."

# ---- the figure
def curve_of(folder, result):
    """Return an array (3, N) with the million tokens, minutes and loss of each validation.

    Step 0 is left out. N is 0 for runs of older code, whose logs contain no minutes.
    """
    metrics = t.read_metrics(folder)
    minutes = dict(metrics["minutes"])
    million_per_step = result["tokens"] / max(1, result["steps"]) / 1e6  # the mean of all steps
    points = [(step * million_per_step, minutes[step], loss)
              for step, loss in metrics["val"] if minutes.get(step)]
    return np.reshape(points, (-1, 3)).T

def draw(rows, path):
    """Plot the validation losses against tokens and against minutes of training steps."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for number, row in enumerate(rows):
        curves = [curve_of(folder, result) for folder, result in row.runs.values()]
        curves = [curve for curve in curves if curve.size]
        if not curves:
            continue
        n = min(curve.shape[1] for curve in curves)
        mean = np.mean([curve[:, :n] for curve in curves], axis=0)
        for x, axis in enumerate(axes):
            for curve in curves:
                axis.plot(curve[x], curve[2], color=f"C{number}", alpha=0.3)
            axis.plot(mean[x], mean[2], color=f"C{number}", linewidth=2, label=row.name)
    axes[0].set(xlabel="million tokens", ylabel=f"validation loss, {unit_of(rows)}")
    axes[1].set(xlabel="minutes of training steps")
    axes[1].legend(frameon=False)
    figure.savefig(path)

def main():
    patterns = sys.argv[1:]
    if not patterns:
        sys.exit(__doc__)
    rows = read_rows(patterns)
    if not rows:
        sys.exit(f"compare.py: there is no finished run in {' '.join(patterns)}.")
    print("\n".join(table(rows)))
    if importlib.util.find_spec("matplotlib"):
        draw(rows, "compare.png")

if __name__ == "__main__":
    main()
