"""Tests of hellaswag.py: its scores equal those of a plain loop, and its errors are one line."""
import json
import random
import shutil
import subprocess
import sys
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import ENV, ROOT, Started, device_type, need_gpus, one_line, shared
from safetensors.torch import load_file
from torch.nn import functional as F

import hellaswag
from fineweb import UserError, get_encoding, save_tokenizer
from train_gpt2 import GPT, GPTConfig

VOCAB = 300

def encode(text):
    """Return the numbers in a text as its tokens, and 0 for each word. It needs no vocabulary."""
    return [int(word) if word.isdigit() else 0 for word in text.split()]

def made_up(n=20, seed=0):
    """Return n questions of random ids. Some endings and contexts have a single token."""
    r = random.Random(seed)

    def text(longest):
        return " ".join(str(r.randrange(VOCAB)) for _ in range(r.randint(1, longest)))
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
def naive(logits, questions, encode, context_length):
    """Return the sums of losses (Q, 4), lengths (Q, 4) and which questions are truncated (Q,).

    One ending is scored at a time. All four endings get the same context.
    """
    sums, lengths, truncated = [], [], []
    for question in questions:
        context = encode(question["ctx"])
        endings = [encode(" " + text)[:context_length] for text in question["endings"]]
        n_excess = max(0, len(context) + max(map(len, endings)) - (context_length + 1))
        truncated.append(n_excess > 0)
        for ending in endings:
            idx = torch.tensor([context[n_excess:] + ending[:-1]])
            predicted = logits(idx)[0, -len(ending):].float()
            sums.append(F.cross_entropy(predicted, torch.tensor(ending), reduction="sum").item())
            lengths.append(len(ending))
    return torch.tensor(sums).double().view(-1, 4), torch.tensor(lengths).view(-1, 4), truncated

def ending_losses(model, prepared):
    """Return the sums of losses (Q, 4), as hellaswag.py computes them."""
    sums = torch.empty(len(prepared.labels) * 4, dtype=torch.float64)
    for numbers, *rows in prepared.batches:
        sums[numbers] = hellaswag.ending_losses(model, *rows)
    return sums.view(-1, 4)

def assert_same(model, questions, logits, encode=encode, context_length=1024):
    """Assert that losses per token equal those of a plain loop, and that the score follows."""
    sums, lengths, truncated = naive(logits, questions, encode, context_length)
    prepared = hellaswag.prepare(questions, model, encode)
    assert torch.equal(lengths, prepared.n_tokens)
    assert ((ending_losses(model, prepared) - sums) / lengths).abs().max() < 5e-5
    labels = torch.tensor([question["label"] for question in questions])
    acc = (sums.argmin(1) == labels).double().mean().item()
    acc_norm = ((sums / lengths).argmin(1) == labels).double().mean().item()
    losses = [means[label].item() for means, label in zip(sums / lengths, labels, strict=True)]
    loss = pytest.approx(sum(losses) / len(losses), abs=5e-5)
    total = len(questions)
    assert hellaswag.evaluate(model, prepared) == (acc, acc_norm, loss, total, sum(truncated))

@pytest.mark.parametrize("context_length, n_truncated", [(64, 0), (16, 17), (8, 19)])
def test_losses_and_score_equal_those_of_a_plain_loop(context_length, n_truncated):
    """Also if contexts are cut on the left, or endings on the right, to fit the model."""
    model, questions = gpt(context_length), made_up()
    logits = logits_of(model)
    assert sum(naive(logits, questions, encode, context_length)[2]) == n_truncated
    assert_same(model, questions, logits, context_length=context_length)

def test_a_function_is_scored_like_a_model():
    assert_same(logits_of(gpt()), made_up(), logits_of(gpt()))

def test_render_example_returns_four_padded_rows(gpt2_encoding):
    """Each row has the context and an ending, and the mask marks the ending."""
    data, tokens, mask, label = hellaswag.render_example(example())
    assert tokens.shape == mask.shape and len(tokens) == 4 and label == data["label"] == 3
    for row, on, ending in zip(tokens, mask, example()["endings"], strict=True):
        assert gpt2_encoding.decode(row[on.bool()].tolist()) == " " + ending
        assert row[:len(data["context"])].tolist() == gpt2_encoding.encode(example()["ctx"])
    assert len(hellaswag.gpt2_encode("<|endoftext|>")) > 1  # it is text

def one_of_two(rank, folder, expected):
    """Score on one of two ranks, of which rank 1 has a batch less; then break rank 1's model."""
    torch.set_num_threads(1)
    if device_type() == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device_type() == "cuda" else "gloo", rank=rank, world_size=2,
                            init_method=f"file://{folder}/store")
    hellaswag.CPU_BATCH = hellaswag.GPU_BATCH = 256
    model = gpt()
    hellaswag.iterate_examples = lambda split: iter(made_up(50)) if rank == 0 else 1 / 0
    prepared = hellaswag.prepare_on_all_ranks(model, encode)
    assert len(prepared.batches) % 2 == 1
    score = hellaswag.evaluate(model, prepared)
    assert score._replace(loss=0) == expected._replace(loss=0)
    assert score.loss == pytest.approx(expected.loss, rel=1e-6)
    if rank == 1:
        torch.nn.init.constant_(model.lm_head.weight, float("inf"))
    with pytest.raises(UserError, match="losses are not finite"):
        hellaswag.evaluate(model, prepared)
    hellaswag.iterate_examples = mock.Mock(side_effect=UserError("no network"))
    assert hellaswag.prepare_on_all_ranks(model, encode) is None
    dist.destroy_process_group()

def test_two_processes_get_the_score_of_one(tmp_path, monkeypatch):
    """Only rank 0 reads the questions. If a rank has a loss that is not finite, both say so."""
    need_gpus(2)
    monkeypatch.setattr(hellaswag, "CPU_BATCH", 256)
    monkeypatch.setattr(hellaswag, "GPU_BATCH", 256)
    expected = hellaswag.evaluate(gpt(), prepare(made_up(50), gpt()))
    torch.multiprocessing.start_processes(one_of_two, (str(tmp_path), expected), nprocs=2,
                                          start_method="forkserver")

# ----------------------------------------------------------------------------------- questions
def example(**changes):
    return {"ind": 1, "ctx": "A man is on a roof. he", "label": 3,
            "endings": ["falls off.", "sings.", "sleeps.", "is a roof."]} | changes

@pytest.fixture
def data(tmp_path, monkeypatch):
    """Let HellaSwag have three questions in a new file. Return its path."""
    monkeypatch.setattr(hellaswag, "DATA", tmp_path / "hellaswag/hellaswag_val.jsonl")
    monkeypatch.setattr(hellaswag, "TOTAL", 3)
    return hellaswag.DATA

def test_questions_are_in_file_order_with_labels_as_ints(data):
    """A Unicode line separator does not end a line. A damaged file is refused in one line."""
    questions = [example(), example(label="2", ctx="line\u2028separator"), example(label=0)]
    lines = [json.dumps(question, ensure_ascii=False).encode() for question in questions]
    data.parent.mkdir()
    data.write_bytes(b"\n".join(lines))
    got = list(hellaswag.iterate_examples("val"))
    assert [e["label"] for e in got] == [3, 2, 0] and got[0] == example()
    for last in (b"", b'{"ctx": "A ma', b"\xff\xfe", b'{"ctx": ""}'):
        data.write_bytes(b"\n".join([*lines[:2], last]))
        with pytest.raises(UserError, match=r"\A/.*\.jsonl is damaged \(.+\): delete it.*\Z"):
            hellaswag.iterate_examples("val")
    with pytest.raises(ValueError, match="split=train"):
        hellaswag.iterate_examples("train")

def test_questions_are_downloaded_once(data, tmp_path, monkeypatch, capsys):
    """They are kept in DATA with all their keys. A failed download is one line, and keeps nothing.
    """
    path, get = tmp_path / "hub.parquet", mock.Mock(side_effect=ConnectionError("no\nnetwork"))
    get.return_value = path
    monkeypatch.setattr("huggingface_hub.hf_hub_download", get)
    path.write_bytes(b"PAR1 not")
    for reason in ("no", "[Pp]arquet"):
        pattern = rf"\AHellaSwag .* http.* \(.*{reason}.*\): .*HF_ENDPOINT, .* at /.*\.jsonl\.\Z"
        with pytest.raises(UserError, match=pattern):
            hellaswag.iterate_examples("val")
        get.side_effect = None
    assert not data.exists() and capsys.readouterr().err == ""
    rows = [example(label=str(i), ctx_a="A man") for i in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    for _ in range(2):
        assert [e["label"] for e in hellaswag.iterate_examples("val")] == [0, 1, 2]
    assert get.call_count == 3 and get.call_args.kwargs["revision"] == "refs/convert/parquet"
    assert json.loads(data.read_text().splitlines()[0])["ctx_a"] == "A man"
    assert list(data.parent.iterdir()) == [data]

# -------------------------------------------------------------------------------- command line
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a tiny model of transformers, with GPT-2's vocabulary."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("hf") / "tiny"
    transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_positions=64, n_layer=2, n_head=2, n_embd=32)).save_pretrained(path)
    return path

THREE = [example(), example(label=1), example(ctx="A man is on a roof. " * 30)]

def ask_three_questions(hellaswag):
    """Let HellaSwag have three questions, of which the last one is too long for the tiny model."""
    hellaswag.iterate_examples = lambda split: iter(THREE)

def start(*words):
    return Started("hellaswag.py", "-d", device_type(), *words, arrange=[(ask_three_questions,)])

def test_transformers_scores_are_those_of_a_plain_loop(folder, gpt2_encoding, tmp_path):
    """This holds for 25 real questions. Weights in float16 are scored in float32."""
    lines = (shared("hellaswag") / "hellaswag_val.jsonl").read_text("utf-8").splitlines()
    questions = [json.loads(line) for line in lines if len(line) < 400][:25]
    model, text_to_ids = hellaswag.load_model(str(folder), "cpu")
    assert text_to_ids == hellaswag.gpt2_encode
    assert_same(model, questions, lambda idx: model(idx).logits, gpt2_encoding.encode_ordinary, 64)
    model.half().save_pretrained(tmp_path)
    assert hellaswag.load_model(str(tmp_path), "cpu")[0].dtype == torch.float32

def test_command_line_scores_a_folder(folder, gpt2_encoding):
    """It prints what evaluate() returns, with standard errors, and only a progress bar besides."""
    score = hellaswag.evaluate(hellaswag.load_model(str(folder), device_type())[0], THREE)
    error = (score.acc * (1 - score.acc) / 3) ** 0.5
    run = start("-m", folder)
    assert run.wait() == 0 and "batch" in run.err and "warn" not in run.err.lower()
    for part in (f"acc      {score.acc:.4f} +- {error:.4f}", f"acc_norm {score.acc_norm:.4f}",
                 f"loss     {score.loss:.4f}", "3 questions (1 of them with a truncated"):
        assert part in run.out
    run = start("-m", folder, "--limit", 2)
    assert run.wait() == 0 and "2 questions (0 of them with a" in run.out
    run = start("--limit=0")
    assert run.wait() == 1 and one_line(run.err, "--limit=0")

def test_a_model_with_another_vocabulary_is_loaded_with_its_tokenizer(tmp_path):
    """Endings are encoded as continuations, also by tokenizers that put a token before a text."""
    config = transformers.GPT2Config(vocab_size=257, n_layer=1, n_head=1, n_embd=8)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="it has no tokenizer"):
        hellaswag.load_model(str(tmp_path), "cpu")
    save_tokenizer(get_encoding("bytes"), tmp_path, 64)
    text_to_ids = hellaswag.load_model(str(tmp_path), "cpu")[1]
    question = {"ctx": "ab", "endings": ["c", "d", "e", "f g"]}
    endings = [[32, 99], [32, 100], [32, 101], [32, 102, 32, 103]]
    assert hellaswag.question_to_ids(question, text_to_ids) == ([97, 98], endings)
    with_start = hellaswag.question_to_ids(question, lambda text: [1, *text.encode()])
    assert with_start == ([1, 97, 98], endings)

def test_bad_models_are_one_line(tmp_path, folder, monkeypatch, capsys):
    """A model is refused if its name is unknown, if it is a pickle, or if a layer has no weights.
    For a checkpoint, the message says how to export it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    pickle, layer = (shutil.copytree(folder, tmp_path / name) for name in "ab")
    torch.save(load_file(pickle / "model.safetensors"), pickle / "pytorch_model.bin")
    (pickle / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    (layer / "config.json").write_text(json.dumps(config | {"n_layer": 3}))
    capsys.readouterr()
    for name, reason in (("nobody/nothing", ""), (pickle, ""), (layer, "lacks transformer.h.2")):
        pattern = rf"\A-m {name} cannot be loaded on -d cpu (?=[^\n]+\Z).*{reason}"
        with pytest.raises(UserError, match=pattern):
            hellaswag.load_model(str(name), "cpu")
    with pytest.raises(UserError, match="--init_from=a/b.pt --max_steps=0 .*-m exported/hf"):
        hellaswag.load_model("a/b.pt", "cpu")
    assert capsys.readouterr().err == ""

def test_importing_does_nothing(tmp_path):
    """Importing the scripts imports no heavy package and writes no file."""
    code = ("import sys, fineweb\n"
            "print({'torch', 'pyarrow', 'fsspec', 'filelock', 'datasets'} & {*sys.modules})\n"
            "import train_gpt2, hellaswag\nprint({'transformers', 'datasets', 'huggingface_hub', "
            "'pyarrow', 'matplotlib'} & {*sys.modules})")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, text=True, timeout=180, capture_output=True,
        env=ENV | {"PYTHONPATH": str(ROOT), "SIMULATED_GPUS": "0"})
    assert (done.stdout, done.stderr) == ("set()\nset()\n", "") and not list(tmp_path.iterdir())
