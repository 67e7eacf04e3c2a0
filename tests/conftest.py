"""Shared by all tests: the path to the scripts, the shared data when it is there, small helpers."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("GPT2_SHARED", ROOT.parent / "shared"))
sys.path.insert(0, str(ROOT))


def run_script(*args, cwd=None, env=None, timeout=120):
    """Run `python <script> ...` as its user would; returns the CompletedProcess with text output."""
    command = [sys.executable, str(ROOT / args[0]), *map(str, args[1:])]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **(env or {})}, timeout=timeout,
                          capture_output=True, text=True, encoding="utf-8", errors="replace")


@pytest.fixture(scope="session")
def gpt2_encoding():
    """tiktoken's GPT-2 encoding, or a skip that says why it is not to be had."""
    import tiktoken
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as e:  # tiktoken raises whatever its download raised: requests', OSError, ...
        pytest.skip(f"GPT-2 vocabulary not at hand ({type(e).__name__}); set TIKTOKEN_CACHE_DIR")


def shared(name):
    """Path of `name` in the shared data, or a skip when this machine has none."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"no shared data at {path}")
    return path
