"""Tests of hellaswag.py: its scores equal those of a plain loop, and its errors are one line."""
import datetime
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import device_type, need_gpus, shared
from torch.nn import functional as F

import hellaswag
from fineweb import UserError, get_encoding, save_tokenizer
from train_gpt2 import GPT, GPTConfig

VOCAB = 300

def encode(text):
    """Return the numbers in a text as its tokens, and 0 for each word. It needs no vocabulary."""
    return [int(word) if word.isdigit() else 0 for word in text.split()]

def ids(numbers):
    return " ".join(map(str, numbers))

def made_up(n=20, seed=0):
    """Return n questions of random ids. Some endings and contexts have a single token."""
    r = random.Random(seed)

    def text(longest):
        return ids(r.randrange(VOCAB) for _ in range(r.randint(1, longest)))
    return [{"ctx": text(40), "endings": [text(12) for _ in range(4)], "label": r.randrange(4)}
            for _ in range(n)]

def prepare(questions, model):
    return hellaswag.prepare(questions, model, encode)

def gpt(block_size=64):
    """Return a GPT whose random weights are so large that a wrong position or mask shows."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=block_size, n_layer=2, n_head=2, n_embd=32, vocab_size=VOCAB))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model.to(device_type())

def logits_of(model):
    """Return the model as a plain function from ids to logits, both on the CPU."""
    return lambda idx: model(idx.to(device_type()))[0].to(idx.device)

@torch.no_grad()
def naive(logits, questions, encode=encode):
    """Return the sums of losses (Q, 4) and lengths (Q, 4), computed one ending at a time."""
    sums, lengths = [], []
    for question in questions:
        context = encode(question["ctx"])
        for text in question["endings"]:
            ending = encode(" " + text)
            predicted = logits(torch.tensor([context + ending[:-1]]))[0, len(context) - 1:].float()
            sums.append(F.cross_entropy(predicted, torch.tensor(ending), reduction="sum").item())
            lengths.append(len(ending))
    return torch.tensor(sums).double().view(-1, 4), torch.tensor(lengths).view(-1, 4)

def ending_losses(model, prepared):
    """Return the sums of losses (Q, 4), as hellaswag.py computes them."""
    sums = torch.empty(len(prepared.labels) * 4, dtype=torch.float64)
    for numbers, *rows in prepared.batches:
        sums[numbers] = hellaswag.ending_losses(model, *rows)
    return sums.view(-1, 4)

def assert_same(model, questions, logits, encode=encode):
    """Assert that losses per token equal those of a plain loop, and that the score follows."""
    sums, lengths = naive(logits, questions, encode)
    prepared = hellaswag.prepare(questions, model, encode)
    assert torch.equal(lengths, prepared.n_tokens)
    assert ((ending_losses(model, prepared) - sums) / lengths).abs().max() < 5e-5
    labels = torch.tensor([question["label"] for question in questions])
    acc = (sums.argmin(1) == labels).double().mean().item()
    acc_norm = ((sums / lengths).argmin(1) == labels).double().mean().item()
    assert hellaswag.evaluate(model, prepared) == (acc, acc_norm, len(questions), 0)

def test_losses_and_score_equal_those_of_a_plain_loop():
    """This holds for a train_gpt2.GPT and for a function from ids to logits."""
    model = gpt()
    assert_same(model, made_up(40), logits_of(model))
    assert_same(logits_of(model), made_up(40), logits_of(model))

def test_render_example_returns_four_padded_rows(gpt2_encoding):
    """Each row has the context and an ending, and the mask marks the ending."""
    data, tokens, mask, label = hellaswag.render_example(example())
    assert tokens.shape == mask.shape and len(tokens) == 4 and label == data["label"] == 3
    for row, on, ending in zip(tokens, mask, example()["endings"], strict=True):
        assert gpt2_encoding.decode(row[on.bool()].tolist()) == " " + ending
        assert row[:len(data["context"])].tolist() == gpt2_encoding.encode(example()["ctx"])
    assert len(hellaswag.gpt2_encode("<|endoftext|>")) > 1  # it is text

def test_all_questions_are_prepared_in_small_batches(gpt2_encoding, monkeypatch):
    """No batch has more than CPU_BATCH tokens, and padding adds less than 5 %."""
    monkeypatch.setattr(hellaswag, "DATA", shared("hellaswag") / "hellaswag_val.jsonl")
    prepared = hellaswag.prepare(hellaswag.iterate_examples("val"), len)
    sizes = [tokens.numel() for _, tokens, _ in prepared.batches]
    assert len(prepared.labels) == 10_042 and prepared.n_truncated == 0
    assert max(sizes) <= hellaswag.CPU_BATCH and sizes[0] > 0.7 * hellaswag.CPU_BATCH
    row_numbers = [number for numbers, *_ in prepared.batches for number in numbers]
    assert sorted(row_numbers) == list(range(4 * 10_042))
    used = sum((tokens.ne(0) | mask.ne(0)).sum().item() for _, tokens, mask in prepared.batches)
    assert sum(sizes) < 1.05 * used

def test_a_context_that_is_too_long_is_cut_on_the_left():
    """The rows then fill the model's context, and `n_truncated` counts such questions."""
    def question(context, ending):
        return {"ctx": ids(context), "endings": [ids(ending), "7 8", "9 1 2", "5"], "label": 0}
    six, short = range(20, 26), {"ctx": "3", "endings": [*"4567"], "label": 0}  # mostly padding
    questions = [question(range(11), six), short, question(range(40), six),
                 question([3, 4, 5], range(50, 80))]
    by_hand = [question(range(11), six), short, question(range(29, 40), six),
               question([5], range(50, 66))]
    model = gpt(block_size=16)
    prepared = prepare(questions, model)
    assert hellaswag.evaluate(model, prepared).n_truncated == 2
    expected = naive(logits_of(model), by_hand)[0]
    assert torch.allclose(ending_losses(model, prepared), expected, atol=1e-4)

def test_scoring_leaves_the_training_as_it_was():
    """Scoring uses the caller's autocast, no random numbers, no gradients, and no compiled code.

    It does not use cuDNN's attention either, but enables it again.
    """
    model, prepared, seen = gpt(), prepare(made_up(), gpt()), set()
    state = torch.random.get_rng_state()
    model.register_forward_hook(lambda *_: seen.add(
        (torch.backends.cuda.cudnn_sdp_enabled(), torch.is_grad_enabled())))
    plain = ending_losses(model, prepared)
    assert seen == {(False, False)} and torch.backends.cuda.cudnn_sdp_enabled()
    with torch.autocast(device_type(), torch.bfloat16):
        low = ending_losses(model, prepared)
        expected = naive(logits_of(model), made_up())[0]
    assert torch.equal(state, torch.random.get_rng_state())
    assert 0 < (low - plain).abs().max() < 3 and (low - expected).abs().mean() < 0.3
    graphs = []
    compiled = torch.compile(gpt(), backend=lambda graph, _: graphs.append(graph) or graph.forward)
    assert hellaswag.evaluate(compiled, prepared) == hellaswag.evaluate(model, prepared)
    assert not graphs

def one_of_two(rank, folder, expected):
    """Score on one of two ranks, of which rank 1 has a batch less; then break rank 1's model."""
    torch.set_num_threads(1)
    backend = "gloo"
    if device_type() == "cuda":
        backend = "nccl"
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2,
                            timeout=datetime.timedelta(minutes=2))
    hellaswag.CPU_BATCH = hellaswag.GPU_BATCH = 256
    model = gpt()
    hellaswag.iterate_examples = lambda split: iter(made_up(50)) if rank == 0 else 1 / 0
    prepared = hellaswag.prepare_on_all_ranks(model, encode)
    assert len(prepared.batches) % 2 == 1
    assert hellaswag.evaluate(model, prepared) == expected
    if rank == 1:
        torch.nn.init.constant_(model.lm_head.weight, float("inf"))
    with pytest.raises(UserError, match="losses are not finite"):
        hellaswag.evaluate(model, prepared)
    hellaswag.iterate_examples = mock.Mock(side_effect=UserError("no network"))
    assert hellaswag.prepare_on_all_ranks(model, encode) is None
    dist.destroy_process_group()

def test_two_processes_get_the_score_of_one(tmp_path):
    """Only rank 0 reads the questions. If a rank has a loss that is not finite, both say so."""
    need_gpus(2)
    expected = hellaswag.evaluate(gpt(), prepare(made_up(50), gpt()))
    torch.multiprocessing.start_processes(one_of_two, (str(tmp_path), expected), nprocs=2,
                                          start_method="forkserver")

def test_training_goes_on_without_questions(monkeypatch, capsys):
    """One line gives the reason."""
    monkeypatch.setattr(hellaswag, "iterate_examples", mock.Mock(side_effect=UserError("no data")))
    assert hellaswag.prepare_on_all_ranks(gpt(), encode) is None
    assert capsys.readouterr().out == "HellaSwag is off: no data\n"

# ----------------------------------------------------------------------------------- questions
def example(**changes):
    return {"ind": 1, "ctx": "A man is on a roof. he", "label": 3,
            "endings": ["falls off.", "sings.", "sleeps.", "is a roof."]} | changes

@pytest.fixture
def data(tmp_path, monkeypatch):
    """Return a function that writes questions (dicts, or raw lines) to hellaswag.DATA."""
    monkeypatch.setattr(hellaswag, "DATA", tmp_path / "hellaswag" / "hellaswag_val.jsonl")
    monkeypatch.setattr(hellaswag, "TOTAL", 3)

    def put(*examples):
        lines = [e if isinstance(e, bytes) else json.dumps(e, ensure_ascii=False).encode()
                 for e in examples]
        hellaswag.DATA.parent.mkdir()
        hellaswag.DATA.write_bytes(b"\n".join(lines) + b"\n")
    return put

def test_questions_are_in_file_order_with_labels_as_ints(data):
    """A Unicode line separator does not end a line, and no other split is offered."""
    data(example(), example(label="2", ctx="line\u2028separator"), example(label=0))
    got = list(hellaswag.iterate_examples("val"))
    assert [e["label"] for e in got] == [3, 2, 0] and got[0] == example()
    with pytest.raises(ValueError, match="split=train"):
        hellaswag.iterate_examples("train")

@pytest.mark.parametrize("last", [
    (), (b'{"ctx": "A ma',), (b"\xff\xfe",), (example(label=""),), (b'{"ctx": ""}',),
    (example(), example())])
def test_a_damaged_file_is_one_line(last, data):
    """The message names the file and says to delete it."""
    data(example(), example(), *last)
    with pytest.raises(UserError, match=r"^/.*\.jsonl is damaged \(.+\): delete it.*\Z"):
        hellaswag.iterate_examples("val")

@pytest.fixture
def fetch(data, monkeypatch, tmp_path):
    """Return a function that calls iterate_examples() with a stand-in for the hub.

    The stand-in has three questions or the given bytes, or raises an error (side_effect=...).
    """
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def start(content=None, **words):
        rows, file = [example(label=str(i), ctx_a="A man") for i in range(3)], io.BytesIO()
        parquet.write_table(arrow.Table.from_pylist(rows), file)
        (tmp_path / "hub.parquet").write_bytes(content or file.getvalue())
        get = mock.Mock(return_value=tmp_path / "hub.parquet", **words)
        monkeypatch.setattr("huggingface_hub.hf_hub_download", get)
        return list(hellaswag.iterate_examples("val")), get
    return start

def test_questions_are_downloaded_once(fetch, capsys):
    """They are written to DATA with all their keys, and nothing else is left there."""
    got, get = fetch()
    assert [e["label"] for e in got] == [0, 1, 2]
    assert list(hellaswag.iterate_examples("val")) == got
    get.assert_called_once()
    assert get.call_args.kwargs["revision"] == "refs/convert/parquet"
    assert json.loads(hellaswag.DATA.read_text().splitlines()[0])["ctx_a"] == "A man"
    assert list(hellaswag.DATA.parent.iterdir()) == [hellaswag.DATA]
    assert capsys.readouterr().out.startswith("downloading HellaSwag")

@pytest.mark.parametrize("content, error, reason", [
    (b"PAR1 not", None, "[Pp]arquet"), (None, ConnectionError("no\nnetwork"), "no")])
def test_a_failed_download_is_one_line(content, error, reason, fetch, capsys):
    """The message gives the reason and the remedies, and nothing is written."""
    pattern = fr"^HellaSwag .* https?://.* \(.*{reason}.*\): .*HF_ENDPOINT, .* at /.*\.jsonl\.\Z"
    with pytest.raises(UserError, match=pattern):
        fetch(content, side_effect=error)
    assert not hellaswag.DATA.exists() and capsys.readouterr().err == ""

# -------------------------------------------------------------------------------- command line
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a tiny model of transformers, with GPT-2's vocabulary."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_positions=64, n_layer=2, n_head=2, n_embd=32))
    path = tmp_path_factory.mktemp("hf") / "tiny"
    model.save_pretrained(path)
    return path

@pytest.fixture
def main(data):
    """Return a function that runs `hellaswag.py <args>` in this process, on the tests' device.

    There are three questions, and the last one is too long for the tiny model.
    """
    data(example(), example(label=1), example(ctx="A man is on a roof. " * 30))

    def run(*args):
        hellaswag.main(["-d", device_type(), *map(str, args)])
    return run

def test_transformers_scores_are_those_of_a_plain_loop(folder, gpt2_encoding, tmp_path):
    """This holds for 25 real questions. Weights in float16 are scored in float32."""
    lines = (shared("hellaswag") / "hellaswag_val.jsonl").read_text("utf-8").splitlines()
    questions = [json.loads(line) for line in lines if len(line) < 400][:25]
    model, text_to_ids = hellaswag.load_model(str(folder), "cpu")
    assert text_to_ids == hellaswag.gpt2_encode
    assert_same(model, questions, lambda idx: model(idx).logits, gpt2_encoding.encode_ordinary)
    model.half().save_pretrained(tmp_path)
    assert hellaswag.load_model(str(tmp_path), "cpu")[0].dtype == torch.float32

def test_command_line_scores_a_folder(folder, main, gpt2_encoding, capsys, monkeypatch):
    """It prints what evaluate() returns, with standard errors, and only a progress bar besides."""
    monkeypatch.setenv("HOME", str(folder.parent))
    main("-m", "~/tiny")
    out, err = capsys.readouterr()
    model = hellaswag.load_model(str(folder), device_type())[0]
    score = hellaswag.evaluate(model, list(hellaswag.iterate_examples("val")))
    error = (score.acc * (1 - score.acc) / 3) ** 0.5
    for part in (f"acc      {score.acc:.4f} +- {error:.4f}", f"acc_norm {score.acc_norm:.4f}",
                 "3 questions (1 of them with a truncated", "0.2859 / 0.2955"):
        assert part in out
    assert "batch" in err and "warn" not in err.lower()  # the progress bar alone
    main("-m", folder, "--limit", 2)
    assert "2 questions (0 of them with a" in capsys.readouterr().out

@pytest.mark.parametrize("limit", ["0", "-3", "many", "1.5"])
def test_a_limit_that_is_no_number_of_questions_is_one_line(main, limit):
    """The message names the option and the value."""
    with pytest.raises(SystemExit, match=rf"\Ahellaswag\.py: .*--limit.*{limit}.*--help.*\Z"):
        main(f"--limit={limit}")

def test_a_model_with_another_vocabulary_is_loaded_with_its_tokenizer(tmp_path):
    """Endings are encoded as continuations, also by tokenizers that put a token before a text."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=257, n_layer=1, n_head=1, n_embd=8)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    save_tokenizer(get_encoding("bytes"), tmp_path, 64)
    text_to_ids = hellaswag.load_model(str(tmp_path), "cpu")[1]
    question = {"ctx": "ab", "endings": ["c", "d", "e", "f g"]}
    endings = [[32, 99], [32, 100], [32, 101], [32, 102, 32, 103]]
    assert hellaswag.question_to_ids(question, text_to_ids) == ([97, 98], endings)
    with_start = hellaswag.question_to_ids(question, lambda text: [1, *text.encode()])
    assert with_start == ([1, 97, 98], endings)

def test_another_tokenizer_with_as_many_ids_as_gpt2_is_used(folder, gpt2_encoding, tmp_path):
    """A folder with GPT-2's own tokenizer is scored with tiktoken, which is faster."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    save_tokenizer(get_encoding("gpt2"), copy, 64)
    assert hellaswag.load_model(str(copy), "cpu")[1] == hellaswag.gpt2_encode
    content = json.loads((copy / "tokenizer.json").read_text("utf-8"))
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {token: 50255 - number for token, number in vocab.items()}
    (copy / "tokenizer.json").write_text(json.dumps(content))
    text_to_ids = hellaswag.load_model(str(copy), "cpu")[1]
    assert text_to_ids("a house") == [50255 - i for i in gpt2_encoding.encode("a house")]

def test_the_result_is_printed_to_any_stdout(folder, main, gpt2_encoding, tmp_path, monkeypatch):
    """Characters that it lacks are escaped. Without stderr, there is no progress bar."""
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", None)
    main("-m", shutil.copytree(folder, tmp_path / "模型"))
    stdout.flush()
    printed = stdout.buffer.getvalue()
    assert rb"\u6a21\u578b on" in printed and b"acc_norm 0." in printed

def test_bad_models_are_one_line(tmp_path, folder, main, monkeypatch, capsys):
    """A model is refused if its name is unknown, if it is a pickle, if a layer has no weights, if
    it has no tokenizer, or if it comes with Python code, which is not run."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("builtins.input", lambda prompt: "y")  # in case the user is asked
    transformers = pytest.importorskip("transformers")
    pickle, layer, code = (shutil.copytree(folder, tmp_path / name) for name in "abc")
    load_file = pytest.importorskip("safetensors.torch").load_file
    torch.save(load_file(pickle / "model.safetensors"), pickle / "pytorch_model.bin")
    (pickle / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    (layer / "config.json").write_text(json.dumps(config | {"n_layer": 3}))
    small = transformers.GPT2Config(vocab_size=300, n_layer=1, n_head=1, n_embd=8)
    transformers.GPT2LMHeadModel(small).save_pretrained(tmp_path / "small")
    (code / "code.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')")
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (code / "config.json").write_text(json.dumps({"model_type": "new", "auto_map": auto_map}))
    capsys.readouterr()
    for name, reason in (("nobody/nothing", ""), (pickle, ""), (layer, "lacks transformer.h.2"),
                         (tmp_path / "small", "no tokenizer"), (code, "")):
        with pytest.raises(SystemExit) as e:
            main("-m", name)
        pattern = rf"hellaswag\.py: -m {name} cannot be loaded on -d {device_type()} .*{reason}.*"
        assert re.fullmatch(pattern, e.value.code)
    assert capsys.readouterr().err == "" and not (tmp_path / "was_run").exists()

def test_importing_does_nothing(tmp_path):
    """Importing the scripts imports no heavy package and writes no file."""
    code = ("import sys, fineweb\n"
            "print({'torch', 'pyarrow', 'fsspec', 'filelock', 'datasets'} & {*sys.modules})\n"
            "import train_gpt2, hellaswag\nprint({'transformers', 'datasets', 'huggingface_hub', "
            "'pyarrow', 'matplotlib'} & {*sys.modules})")
    root = Path(hellaswag.__file__).resolve().parent
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True, timeout=180,
                          capture_output=True, env=os.environ | {
                              "PYTHONPATH": str(root), "SIMULATED_GPUS": "0"})
    assert (done.stdout, done.stderr) == ("set()\nset()\n", "") and not list(tmp_path.iterdir())
