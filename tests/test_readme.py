"""Tests of README.md: its commands, links and examples must agree with this repository."""
import re
import shlex
from pathlib import Path
from typing import get_args

from torch.distributed.run import get_args_parser

import fineweb
import train_gpt2

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```\n", re.M | re.S)
BLOCKS = FENCE.findall(README)  # (language, text) of each block of code
TEXT = FENCE.sub("\n", README)  # everything else
INLINE = re.findall(r"`([^`]+)`", TEXT)
CONFIGS = {"train_gpt2.py": train_gpt2.Config, "fineweb.py": fineweb.Config}

def commands():
    """Return the commands in blocks and sentences, each as a list of words."""
    lines = [line for language, text in BLOCKS if language == "bash"
             for line in text.replace("\\\n", " ").splitlines()]
    lines += [code for code in INLINE if re.match(r"(python|pip|pytest|torchrun|\w+=\S+) ", code)]
    parts = [part for line in lines for part in re.split(r"&&|;", line)]
    return [words for part in parts if (words := shlex.split(part, comments=True))]

def check_flag(script, word):
    """Raise AssertionError if a script has no such flag, or if the value is of another type."""
    name, _, value = word.removeprefix("--").partition("=")
    fields = CONFIGS[script].__dataclass_fields__
    assert name in fields, f"{script} has no flag {word}"
    kind = fields[name].type
    if choices := get_args(kind):
        assert value in map(str, choices), word
    elif kind in (int, float) and not value.startswith("$"):
        kind(value)  # raises ValueError

def check_command(words):
    """Raise an error if a command names a file, flag or option that does not exist."""
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if "torchrun" in words:
        options = words[words.index("torchrun") + 1:at]
        get_args_parser().parse_args([*options, "train_gpt2.py"])  # exits with status 2
    if at is None:
        return
    script, flags = words[at], [word for word in words[at + 1:] if word.startswith("-")]
    source = (ROOT / script).read_text(encoding="utf-8")
    for flag in set(flags) - {"--help"}:
        if script in CONFIGS:
            check_flag(script, flag)
        elif f'"{flag.partition("=")[0]}"' not in source:
            assert "flags" in source, f"{script} has no option {flag}"
            check_flag("train_gpt2.py", flag)  # it passes them on

def test_each_command_and_each_flag_exists():
    found = commands()
    assert {"python", "torchrun", "pip", "pytest"} <= {words[0] for words in found}
    for words in found:
        check_command(words)
    flags = [word for code in INLINE if code.startswith("--") for word in code.split()]
    assert len(flags) > 10
    for word in set(flags) - {"--device=cuda", "--nproc_per_node"}:  # also of pytest, torchrun
        name = word.removeprefix("--").partition("=")[0]
        script = next((script for script in CONFIGS
                       if name in CONFIGS[script].__dataclass_fields__), None)
        if script is None:
            check_command(["torchrun", word, "train_gpt2.py"])
        elif "=" in word:
            check_flag(script, word)

def test_targets_of_links_and_named_files_exist():
    """Relative links and images lead to files, and links within the page lead to headings."""
    headings = re.findall(r"^#+ (.+)$", TEXT, re.M)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    links = re.findall(r"\]\(([^)\s]+)\)", TEXT)
    assert len(links) >= 12
    for link in links:
        if link.startswith("#"):
            assert link[1:] in anchors, link
        elif not link.startswith("https://"):
            assert (ROOT / link).exists(), link
    for path in re.findall(r"`((?:tests/)?\w+\.(?:py|txt))`", TEXT):
        found = (ROOT / path).exists() or (ROOT / "tests" / path).exists()
        assert found or path in ("my.txt", "log.txt"), path

def test_names_in_the_section_on_changes_are_in_the_scripts():
    section = re.search(r"^### Change the code\n(.*?)^After", TEXT, re.M | re.S)[1]
    sources = "".join((ROOT / name).read_text(encoding="utf-8") for name in CONFIGS)
    rows = "".join(re.findall(r"^\| .*", section, re.M))
    names = re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*)?`", rows)
    assert len(names) > 15
    for name in names:
        assert name.endswith(".py") or re.search(rf"(class|def) {name.split('.')[-1]}\b", sources)

def test_lines_have_at_most_100_columns():
    """Rows of tables may be longer, since they cannot be wrapped."""
    for line in README.splitlines():
        assert line.startswith("|") or len(line) <= 100, line
