"""Runs as a table, each number with its noise. It reads run.json and log.txt, and nothing else.

    python tests/compare.py "log_*"                 # the first folder is the baseline
    python tests/compare.py "log_plain_*" "log_*"   # ... of the first pattern

Runs that differ in the seed alone are a row. The noise of a run is the spread of losses over seeds,
pooled over all rows. A row is ahead of the baseline or behind it where Student's t-test (two-sided,
95 %) finds a difference; else it is within the noise. Where no row has two seeds, nothing can be
said. With matplotlib, compare.png shows the rows' validation losses, and bold their means.
"""
import glob
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt2 as t  # noqa: E402

# Student's t for 1, 2, ... degrees of freedom; beyond ten it falls to 1.96, so 2.23 is safe
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)

def read_rows(patterns):
    """{what a row's runs have in common, as JSON: [(folder, result)]}; the baseline comes first."""
    rows = {}
    for folder in dict.fromkeys(path for p in patterns for path in sorted(glob.glob(p))):
        try:
            run = t.read_run(folder)
            result, codes = run["result"], {start["code"] for start in run["starts"]}
            common = run["constants"] | {"data": run["data"]}
            if common.get("minutes"):  # then max_steps is what fitted: another for each seed
                del common["max_steps"]
            common["code"] = "+".join(f"{code:08x}" for code in sorted(codes))
        except (OSError, ValueError, KeyError, TypeError) as e:
            print(f"{folder} is left out: it holds no run ({t.first_line(e)})")
            continue
        if "val" not in (result or {}):
            print(f"{folder} is left out: {(result or {}).get('failed', 'it has no result')}")
            continue
        seed, _ = common.pop("seed"), common.pop("log_dir")
        seeds = rows.setdefault(json.dumps(common, sort_keys=True), {})
        if seed in seeds:
            print(f"{folder} is left out: {seeds[seed][0]} is the same run")
            continue
        seeds[seed] = folder, result
    return {row: list(seeds.values()) for row, seeds in rows.items()}

def pooled_noise(losses):
    """(Standard deviation of a run, its degrees of freedom) of lists of losses; or (inf, 0)."""
    freedom = sum(len(values) - 1 for values in losses)
    squares = sum(np.var(values) * len(values) for values in losses)
    return (float(np.sqrt(squares / freedom)) if freedom else np.inf), freedom

def table(rows):
    """Lines of the table, the lowest mean loss first, and what its noise is."""
    losses = {row: [result["val"] for _, result in runs] for row, runs in rows.items()}
    noise, freedom = pooled_noise(losses.values())
    t_95 = T_95[min(freedom, len(T_95)) - 1]
    baseline = next(iter(rows))
    yield ("| val | bits per byte | spread | seeds | ahead of the baseline | steps | parameters "
           "| folder: what differs |")
    yield "|" + " --- |" * 8
    for row in sorted(rows, key=lambda row: np.mean(losses[row])):
        mean, n, (folder, result) = np.mean(losses[row]), len(losses[row]), rows[row][0]
        steps = np.mean([result["steps"] for _, result in rows[row]])
        ahead = np.mean(losses[baseline]) - mean
        allowed = t_95 * noise * np.sqrt(1 / n + 1 / len(losses[baseline]))
        verdict = "ahead" if ahead > allowed else "behind" if ahead < -allowed else "noise"
        against = f"{ahead:+.4f} +- {allowed:.4f}: {verdict}" if freedom else f"{ahead:+.4f}: ?"
        ours, theirs = json.loads(row), json.loads(baseline)
        differs = [f"{name}={ours.get(name)!r}" for name in sorted({*ours, *theirs})
                   if ours.get(name) != theirs.get(name)]
        bits = np.mean([result["bits_per_byte"] for _, result in rows[row]])
        spread = f"{np.std(losses[row], ddof=1):.4f}" if n > 1 else "-"
        yield (f"| {mean:.4f} | {bits:.4f} | {spread} | {n} | "
               f"{'the baseline' if row == baseline else against} | {steps:,.0f} | "
               f"{result['parameters']:,} | {folder}: {', '.join(differs) or '-'} |")
    yield (f"\nThe noise of a run is {noise:.4f}, pooled over the rows, with {freedom} degrees of "
           "freedom. By chance alone, one row in twenty is told as ahead or behind."
           if freedom else "\nNo row has two seeds: nothing can be said about noise.")

def draw(rows, path):
    """Validation losses of rows over tokens and over minutes of steps, without step 0; runs that
    lack one of these, as those of older code, are left out."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for number, runs in enumerate(rows.values()):
        curves = []
        for folder, result in runs:
            streams = t.read_streams(folder)
            minutes = dict(streams["minutes"])
            million = result["tokens"] / max(1, result["steps"]) / 1e6  # tokens in a step
            points = [(step * million, minutes[step], loss)
                      for step, loss in streams["val"] if minutes.get(step)]
            if points:
                curves.append(np.transpose(points))
        if not curves:
            continue
        n = min(len(losses) for *_, losses in curves)
        mean = np.mean([[values[:n] for values in curve] for curve in curves], axis=0)
        for i, axis in enumerate(axes):
            for curve in curves:
                axis.plot(curve[i], curve[2], color=f"C{number}", alpha=0.3)
            axis.plot(mean[i], mean[2], color=f"C{number}", linewidth=2, label=runs[0][0])
    axes[0].set(xlabel="million tokens", ylabel="validation loss, nats per token")
    axes[1].set(xlabel="minutes of steps")
    axes[1].legend(frameon=False)
    figure.savefig(path)

def main():
    rows = read_rows(sys.argv[1:])
    if not rows:
        sys.exit(f"compare.py: no finished run in {' '.join(sys.argv[1:]) or '(name folders)'}")
    print("\n".join(table(rows)))
    if importlib.util.find_spec("matplotlib"):
        draw(rows, "compare.png")

if __name__ == "__main__":
    main()
