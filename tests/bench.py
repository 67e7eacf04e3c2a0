"""Benchmarks: both sides in one run, medians, a ratio. Nothing here asserts a time.

    python tests/bench.py ladder | step | loader | tokenize | hellaswag | save | all
"""
import argparse
import os
import platform
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("GPT2_SHARED", ROOT.parent / "shared"))
sys.path.insert(0, str(ROOT))


def median_seconds(fn, repeats=5, warmup=1):
    """Median wall time of fn() in seconds, after `warmup` calls that are not counted."""
    for _ in range(warmup):
        fn()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def machine():
    """One line that says where and with what the figures were measured."""
    import torch
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (f"{time.strftime('%Y-%m-%d')} · {gpu} · {os.cpu_count()} cores ({platform.machine()}) · "
            f"Python {platform.python_version()} · torch {torch.__version__}")


BENCHES = {}  # name -> function; filled below each bench


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=[*BENCHES, "all"])
    which = parser.parse_args().which
    print(machine())
    for name in BENCHES if which == "all" else [which]:
        print(f"\n## {name}")
        BENCHES[name]()


if __name__ == "__main__":
    main()
