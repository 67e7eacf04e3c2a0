"""Tests of README.md: commands, links, figures and examples must agree with this repository.

These tests read only text. They import neither torch nor the scripts, and they start no process.
"""
import ast
import re
import shlex
import types
from pathlib import Path
from typing import Literal, get_args

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MEASURED = ROOT / "tests" / "measured"
SOURCES = {name: (ROOT / name).read_text(encoding="utf-8")
           for name in ("train_gpt2.py", "fineweb.py", "hellaswag.py")}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```\n", re.M | re.S)
BLOCKS = FENCE.findall(README)                    # (language, text) of each block of code
TEXT = FENCE.sub("\n", README)                    # everything else
INLINE = re.findall(r"`([^`]+)`", re.sub(r"(?<!\n)\n(?!\n)", " ", TEXT))
HUB = {"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"}
INPUTS = {"my.txt", "my_texts"}                   # the reader's own files
# What the README's commands write into the clone, which the reader may have run before the tests
MADE_BY_COMMANDS = ("log*", "edu_fineweb10B", "my_shards", "hf_*", "compare.png")

# ---- flags of the scripts
def constants_of(name):
    """Return {constant: type} of the class Config in a script."""
    config = next(node for node in ast.parse(SOURCES[name]).body
                  if isinstance(node, ast.ClassDef) and node.name == "Config")
    return {line.target.id: eval(ast.unparse(line.annotation), {"Literal": Literal})
            for line in config.body if isinstance(line, ast.AnnAssign)}

def options_of(path):
    """Return the options that a script defines for argparse, or conftest.py for pytest."""
    text = (ROOT / path).read_text(encoding="utf-8")
    calls = re.findall(r"(?:add_argument|addoption)\(([^)]*)", text)
    return {option for call in calls for option in re.findall(r'"(--?[\w-]+)"', call)}

CONSTANTS = {name: constants_of(name) for name in ("train_gpt2.py", "fineweb.py")}
OPTIONS = {
    "hellaswag.py": options_of("hellaswag.py"),
    "tests/bench.py": options_of("tests/bench.py"),
    "tests/compare.py": set(),
    "tests/check.py": {"--steps", "--against"},
    "pytest": options_of("tests/conftest.py") | {"-q", "-rs", "-k"},
    "torchrun": {"--standalone", "--nproc_per_node", "--nnodes", "--rdzv_backend", "--rdzv_id",
                 "--rdzv_endpoint", "--max-restarts", "--shutdown-timeout"},
    "pip": {"-r", "--index-url"},
    "uv": {"-r", "--torch-backend", "--help"},
}
OTHER_PROGRAMS = {".", "cd", "git", "tail", "scontrol", "head", "kill"}

def check_constant(script, word):
    """Raise AssertionError if a script has no such flag, or if the value is impossible."""
    name, _, value = word.removeprefix("--").partition("=")
    if word == "--help":
        return
    assert name in CONSTANTS[script], f"{script} has no flag {word}"
    kind = CONSTANTS[script][name]
    if "$" in value or not value:
        return
    choices = [str(choice) for choice in get_args(kind)]
    if choices:
        assert value in choices, word
    elif kind in (int, float):
        number = float(value)
        assert kind is float or number.is_integer(), word

# ---- commands
def commands_in(text):
    """Return the commands in a bash script, each as a list of words."""
    text = text.replace("\\\n", " ")
    commands = []
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()<>")
        lexer.whitespace_split = True
        commands.append([])
        for word in lexer:
            if set(word) <= set(";&|()<>"):
                commands.append([])
            else:
                commands[-1].append(word)
    return [words for words in map(without_shell_words, commands) if words]

def without_shell_words(words):
    """Return a command without leading `do`, `srun` and assignments, or [] for `for` and `done`."""
    while words and (words[0] in ("do", "srun") or re.match(r"\w+=", words[0])):
        words = words[1:]
    return [] if words and words[0] in ("for", "done") else words

class Session:
    """A simulation of a reader who runs the commands of the README in order.

    made: the names of files and folders that exist at this point.
    """
    def __init__(self):
        names = {path.name for path in ROOT.iterdir()}
        self.made = INPUTS | {name for name in names if not any(
            Path(name).match(pattern) for pattern in MADE_BY_COMMANDS)}

    def run(self, words):
        """Check a command and record what it writes. Raise AssertionError if it cannot work."""
        program, arguments = words[0], words[1:]
        if program in ("python", "python3"):
            self.run_python(arguments)
        elif program == "torchrun":
            at = next((i for i, word in enumerate(arguments) if word.endswith(".py")), None)
            self.check_options("torchrun", arguments[:at])
            if at is not None:
                self.run_python(arguments[at:])
        elif program in OPTIONS:
            self.check_options(program, arguments)
            for previous, word in zip(arguments, arguments[1:]):
                if previous == "-r":
                    self.need(word)
        else:
            assert program in OTHER_PROGRAMS, f"unknown program {program}"
            if program == "tail":
                self.need(arguments[-1])

    def need(self, path):
        """Raise AssertionError if a path is not in the repository and no command has made it."""
        assert path.split("/")[0] in self.made, f"{path} does not exist at this point"

    def check_options(self, program, arguments):
        for word in arguments:
            if word.startswith("-"):
                assert word.split("=")[0] in OPTIONS[program], f"{program} has no option {word}"

    def run_python(self, arguments):
        if arguments[0] == "-m":
            assert arguments[1] == "venv"
        elif arguments[0] == "-c":
            compile(arguments[1], "README", "exec")
            for path in re.findall(r"'(log\w*/[^']*)'", arguments[1]):
                self.need(path)
        else:
            script, arguments = arguments[0], arguments[1:]
            assert (ROOT / script).exists(), f"{script} does not exist"
            if script in CONSTANTS:
                for word in arguments:
                    check_constant(script, word)
                flags = dict(word.removeprefix("--").split("=", 1) for word in arguments
                             if "=" in word)
                self.run_script(script, flags)
            else:
                self.check_options(script, arguments)
                self.run_other_script(script, arguments)

    def run_script(self, script, flags):
        if script == "fineweb.py":
            self.need(flags.get("source", "README.md"))
            self.made.add(flags.get("local_dir", "edu_fineweb10B"))
            return
        if flags.get("init_from") and flags["init_from"] not in HUB:
            self.need(flags["init_from"])
        if "sample" in flags:
            self.need(flags["log_dir"])
            return
        data = flags.get("data", "README.md")
        self.need(data)
        default = "log_small"
        if data.endswith(".txt") and "init_from" in flags:
            default = "log_finetune"
        elif not data.endswith(".txt") and "edu_fineweb10B" in self.made:
            default = "log"
        self.made.add(flags.get("log_dir", default).replace("$s", "1"))

    def run_other_script(self, script, arguments):
        if script == "hellaswag.py":
            model = arguments[arguments.index("-m") + 1]
            assert model in HUB or self.need(model) is None
        if script == "tests/compare.py":
            for pattern in arguments:
                assert any(Path(name).match(pattern) for name in self.made), pattern
        if script == "tests/bench.py":
            benches = re.search(r'BENCHES = "([\w ]+)"', (ROOT / script).read_text())[1].split()
            assert arguments[0] in ("guard", "gpu", "all", *benches), arguments[0]

def test_each_command_in_a_block_can_work_after_those_before_it():
    """Programs, flags and values exist. Files are in the repository or made by earlier commands."""
    session = Session()
    blocks = [text for language, text in BLOCKS if language == "bash"]
    assert len(blocks) >= 15
    for text in blocks:
        for words in commands_in(text):
            session.run(words)

def test_each_command_within_a_sentence_can_work():
    """Commands in a sentence are checked like those in blocks.

    They may use the folders of runs that other commands of the README make.
    """
    session, seen = Session(), 0
    session.made |= {"log", "log_small", "edu_fineweb10B", "tests"}
    for code in INLINE:
        if re.match(r"(python|pytest|torchrun|uv|OMP_NUM_THREADS=1) ", code):
            seen += 1
            for words in commands_in(code):
                session.run(words)
    assert seen >= 5

def test_each_flag_within_a_sentence_exists():
    seen = [word for code in INLINE if code.startswith("--") for word in code.split()]
    assert len(seen) >= 10
    for word in seen:
        name = word.removeprefix("--").split("=")[0]
        scripts = [script for script in CONSTANTS if name in CONSTANTS[script]]
        assert scripts, f"no script has the flag {word}"
        check_constant(scripts[0], word)

@pytest.mark.parametrize("command, reason", [
    ("python train_gpt2.py --max_step=3", "no flag"),
    ("python train_gpt2.py --n_layer=2.5", "n_layer"),
    ("python train_gpt2.py --optimizer=sgd", "optimizer"),
    ("python train_gpt2.py --data=corpus.txt", "does not exist"),
    ("python train_gpt2.py --sample=3 --log_dir=log_small", "does not exist"),
    ("python train.py", "does not exist"),
    ("pytest -q tests --gpu", "no option"),
    ("python tests/bench.py gard", "gard"),
    ("trochrun train_gpt2.py", "unknown program"),
])
def test_a_wrong_command_is_found(command, reason):
    """The tests above fail if the README contains a command like these."""
    [words] = commands_in(command)
    with pytest.raises(AssertionError, match=reason):
        Session().run(words)

def test_python_blocks_can_be_compiled():
    blocks = [text for language, text in BLOCKS if language == "python"]
    assert blocks
    for text in blocks:
        assert isinstance(compile(text, "README", "exec"), types.CodeType)

# ---- setting up
def setup_commands():
    lines = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]
    return [line for line in lines if "venv" in line]

def test_each_setup_command_does_everything_on_one_line():
    """Each line installs the requirements and then trains or tests.

    The line for the CPU build of torch comes before the line for the default build.
    """
    commands = setup_commands()
    assert len(commands) == 4
    for command in commands:
        assert "requirements.txt" in command
        assert command.endswith(("&& python train_gpt2.py", "&& pytest -q tests")), command
    assert "whl/cpu" in commands[0] and "whl" not in commands[1]
    assert "pip install -r requirements.txt matplotlib &&" in commands[1]
    assert "pip install -r requirements.txt pytest matplotlib &&" in commands[3]

def test_ci_installs_what_the_readme_installs():
    """The newcomer's part of .ci/run installs with the README's command, and with pip's -q."""
    ci = (ROOT / ".ci" / "run").read_text()
    [install] = re.findall(r"^pip install -q (-r requirements.txt pytest matplotlib)$", ci, re.M)
    assert f"pip install {install} && pytest -q tests" in setup_commands()[3]

# ---- form
def headings():
    return re.findall(r"^#+ (.+)$", TEXT, re.M)

def test_headings_that_other_texts_refer_to_exist():
    for name in ("Quick start", "Train GPT-2 (124M)", "Hardware", "Change the code", "Experiments",
                 "Run the tests"):
        assert name in headings()

def test_targets_of_links_exist():
    """Relative links and images lead to files, and links within the page lead to headings."""
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings()}
    links = re.findall(r"\]\(([^)\s]+)\)", TEXT)
    assert len(links) >= 20
    for link in links:
        if link.startswith("#"):
            assert link[1:] in anchors, link
        elif not link.startswith("https://"):
            assert (ROOT / link).exists(), link

def test_other_projects_and_papers_have_a_link():
    for part in ("github.com/karpathy/nanoGPT", "github.com/karpathy/build-nanogpt",
                 "youtube.com/watch?v=l8pRSuU81PU", "HuggingFaceFW/fineweb-edu", "1905.07830",
                 "kellerjordan.github.io/posts/muon", "github.com/openai/tiktoken",
                 "docs.astral.sh/uv"):
        assert part in README, part

def test_lines_have_at_most_100_columns():
    """Rows of tables and the setup commands may be longer, since they cannot be wrapped."""
    for line in README.splitlines():
        if not line.startswith("|") and line not in setup_commands():
            assert len(line) <= 100, line

def test_names_in_the_section_change_the_code_are_in_the_scripts():
    section = re.search(r"^## Change the code\n(.*?)^### ", TEXT, re.M | re.S)[1]
    sources = "\n".join(SOURCES.values())
    names = re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*)?`", section)
    assert len(names) >= 30
    for name in names:
        if name.split(".")[0] not in ("wandb", "writer", "p", "python"):
            last = name.split(".")[-1]
            assert re.search(rf"\b{last}\b", sources), name

# ---- figures
# A number with a unit, or with a decimal point
NUMBER = re.compile(r"(?<![\w.+/-])(\d[\d,]*(?:\.\d+)?(?:e-\d+)?)"
                    r"(?: ?(%|(?:ms|s|GB|MB|kB|M|nats|steps|tokens|parameters)\b))?(?![\w/]|\.\d)")

def numbers_in(text):
    """Return the numbers in a measured file. A time such as 1m7.6s is also given in seconds."""
    numbers = [float(number.replace(",", ""))
               for number in re.findall(r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", text)]
    return numbers + [60 * int(minutes) + float(seconds)
                      for minutes, seconds in re.findall(r"(\d+)m([\d.]+)s", text)]

def rounds_to(number, text, unit):
    """Return whether a measured number is `text` when it is rounded.

    A number in seconds may have been measured in ms, and a number in millions as a plain number.
    """
    digits = len(text.partition("e")[0].partition(".")[2])
    exponent = int(text.partition("e")[2] or 0)
    allowed = 0.501 * 10.0 ** (exponent - digits)
    scales = (1, 1000) if unit == "s" else (1, 1e6) if unit == "M" else (1,)
    return any(abs(number / scale - float(text)) <= allowed for scale in scales)

def missing_figures(text):
    """Return the figures in a text that are in none of the measured files that it links to."""
    files = re.findall(r"\(tests/measured/(\w+\.txt)\)", text)
    measured = [number for name in files for number in numbers_in((MEASURED / name).read_text())]
    text = re.sub(r"\]\([^)]*\)|`[^`]*`", "", text)
    found = [(number.replace(",", ""), unit) for number, unit in NUMBER.findall(text)
             if unit or "." in number]
    return [f"{number} {unit}" for number, unit in found
            if not any(rounds_to(one, number, unit) for one in measured)]

def quotations():
    """Return the sentences and the rows of tables that link to a measured file."""
    parts = []
    for paragraph in re.split(r"\n\s*\n|\n(?=[|-])", TEXT):
        joined = " ".join(paragraph.split())
        parts += [joined] if joined.startswith("|") else re.split(r"(?<=[.:?]) (?=[A-Z`*])", joined)
    return [part for part in parts if "(tests/measured/" in part and ".txt)" in part]

def test_figures_are_in_the_files_that_they_link_to():
    quoted = quotations()
    assert len(quoted) >= 15
    missing = {part: numbers for part in quoted if (numbers := missing_figures(part))}
    assert not missing

def test_a_wrong_figure_is_found():
    """missing_figures() returns wrong figures and no others, and rounding follows the digits."""
    link = "([guard.txt](tests/measured/guard.txt))"
    assert missing_figures(f"A step takes 1234.5 ms, and a save 98.76 s {link}.") == [
        "1234.5 ms", "98.76 s"]
    assert missing_figures(f"There are 10,042 questions in 9 files {link}.") == []
    assert numbers_in("real 1m7.613s")[-1] == 67.613
    assert rounds_to(2358, "2.4", "s") and not rounds_to(2358, "2.3", "s")
    assert rounds_to(1.9e-6, "1.9e-6", "") and not rounds_to(2.1e-6, "1.9e-6", "")

def test_the_example_of_a_comparison_is_the_measured_table():
    rows = re.findall(r"^\| \d\.\d{4} \|.*$", TEXT, re.M)
    measured = (MEASURED / "experiments.txt").read_text().splitlines()
    assert len(rows) == 3 and set(rows) <= set(measured)

def test_the_output_of_the_quick_start_is_in_the_measured_file():
    """first_run.txt contains each line about a step and the text that the model generated."""
    measured = (MEASURED / "first_run.txt").read_text().splitlines()
    shown = [line for language, text in BLOCKS if not language for line in text.splitlines()
             if re.match(r" *\d+/1600 ", line)]
    assert len(shown) >= 4
    for line in shown:
        assert any(one.startswith(line) for one in measured), line
    generated = BLOCKS[0][1].splitlines()
    assert len(generated) >= 5 and set(generated) <= set(measured)
