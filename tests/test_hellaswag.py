"""HellaSwag: packed scores are those of a plain loop, for any model; a mishap is one line."""
import datetime
import functools
import http.server
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, one_line, run_python, run_script, shared
from torch.nn import functional as F

import hellaswag
from hellaswag import HellaSwagError
from train_gpt2 import GPT, GPTConfig, get_encoding

VOCAB = 300


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small are not worth threads, which on a busy machine wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def encode(text):
    """A text's numbers are its tokens: made-up questions need no vocabulary. Words are 0."""
    return [int(word) if word.isdigit() else 0 for word in text.split()]


def ids(*numbers):
    return " ".join(map(str, numbers))


def test_tokenizers_that_put_a_space_in_front():
    """As Llama's: an ending is the tokens that it has within a text, and no lone space."""
    def encode(text):
        return re.findall("▁[^▁]*", "▁" + text.replace(" ", "▁"))
    context, endings = hellaswag.tokenize(dict(ctx="A dog", endings=["is here"] * 4), encode)
    assert context == ["▁A", "▁dog"] and endings == [["▁is", "▁here"]] * 4


def made_up(n=20, seed=0):
    """Questions of random ids. Some endings are a single token, some contexts too."""
    r = random.Random(seed)

    def text(longest):
        return ids(*(r.randrange(VOCAB) for _ in range(r.randint(1, longest))))
    return [{"ctx": text(40), "endings": [text(12) for _ in range(4)], "label": r.randrange(4)}
            for _ in range(n)]


def prepare(questions, model):
    return hellaswag.prepare(questions, model, encode)


def init(model):
    """Large random weights, so that a wrong position or mask shows."""
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model


def gpt(n_vocab=VOCAB, block_size=64):
    return init(GPT(GPTConfig(block_size=block_size, vocab_size=n_vocab + 20, n_layer=2, n_head=2,
                              n_embd=32, n_vocab=n_vocab)))


@torch.no_grad()
def naive(logits, questions, encode=encode):
    """Summed losses (Q, 4) and lengths (Q, 4) of a plain loop: one ending at a time, unpadded."""
    sums, lengths = [], []
    for question in questions:
        context, endings = hellaswag.tokenize(question, encode)
        for ending in endings:
            predicted = logits(torch.tensor([context + ending]))[0, len(context) - 1:-1].float()
            sums.append(F.cross_entropy(predicted, torch.tensor(ending), reduction="sum").item())
            lengths.append(len(ending))
    return torch.tensor(sums).double().view(-1, 4), torch.tensor(lengths).view(-1, 4)


def ending_losses(model, questions, encode=encode):
    """What hellaswag makes of the questions, (Q, 4) each, in their order."""
    numbered = [question | {"label": i} for i, question in enumerate(questions)]
    batches = hellaswag.prepare(numbered, model, encode).batches
    order = torch.cat([batch.labels for batch in batches]).argsort()
    sums, lengths = zip(*(hellaswag.ending_losses(model, batch) for batch in batches), strict=True)
    return torch.cat(sums)[order], torch.cat(lengths)[order]


def assert_same(model, questions, expected, tolerance=1e-5, encode=encode):
    """The losses per token are the expected ones, and the score is what follows from them."""
    sums, lengths = expected
    losses, counted = ending_losses(model, questions, encode)
    assert torch.equal(lengths, counted)
    assert ((losses - sums) / lengths).abs().max() < tolerance
    labels = torch.tensor([question["label"] for question in questions])
    acc = (sums.argmin(1) == labels).double().mean().item()
    acc_norm = ((sums / lengths).argmin(1) == labels).double().mean().item()
    score = hellaswag.evaluate(model, hellaswag.prepare(questions, model, encode))
    assert score == (acc, acc_norm, len(questions), 0)


# ------------------------------------------------------------------------------- exactness
def test_made_up_questions_score_as_in_a_plain_loop():
    model, questions = gpt(), made_up(40)
    assert_same(model, questions, naive(lambda idx: model(idx)[0], questions))


def test_real_questions_score_as_in_a_plain_loop(gpt2_encoding, monkeypatch):
    monkeypatch.setattr(hellaswag, "DATA", shared("hellaswag/hellaswag_val.jsonl"))
    model = gpt(n_vocab=50257, block_size=256)
    some = list(hellaswag.iterate_examples("val"))[::1500]
    expected = naive(lambda idx: model(idx)[0], some, hellaswag.gpt2_encode)
    assert_same(model, some, expected, encode=hellaswag.gpt2_encode)
    prepared = hellaswag.prepare(some, model)
    assert hellaswag.evaluate(model, some) == hellaswag.evaluate(model, prepared)


def test_render_example_pads_four_rows(gpt2_encoding):
    example = {"ctx": "A man sits on a roof. he", "label": 1,
               "endings": ["falls.", "sings a song.", "x", "y z"]}
    data, tokens, mask, label = hellaswag.render_example(example)
    assert tokens.shape == mask.shape and tokens.shape[0] == 4 and label == 1
    for row, on, ending in zip(tokens, mask, example["endings"], strict=True):
        assert gpt2_encoding.decode(row[on.bool()].tolist()) == " " + ending
        assert row[:len(data["context"])].tolist() == gpt2_encoding.encode(example["ctx"])
    model = gpt(n_vocab=50257)
    with torch.no_grad():
        losses = F.cross_entropy(model(tokens)[0][:, :-1].mT, tokens[:, 1:], reduction="none")
    sums, lengths = ending_losses(model, [example], hellaswag.gpt2_encode)
    assert torch.allclose((losses * mask[:, 1:]).sum(1).double(), sums[0])
    assert torch.equal(mask.sum(1), lengths[0])


@pytest.mark.parametrize("wrap", [lambda logits: logits, lambda logits: (logits, None)])
def test_any_function_from_ids_to_logits(wrap):
    model, questions = gpt(), made_up()
    expected = naive(lambda idx: model(idx)[0], questions)
    assert_same(lambda idx: wrap(model(idx)[0]), questions, expected)


def test_memory_is_bounded_whatever_the_questions(monkeypatch):
    monkeypatch.setattr(hellaswag, "CPU_BATCH", 256)
    model, questions, rows = gpt(), made_up(60), []
    sums, lengths = naive(lambda idx: model(idx)[0], questions)
    to_logits = model.to_logits
    monkeypatch.setattr(model, "to_logits", lambda x: rows.append(len(x)) or to_logits(x))
    assert (ending_losses(model, questions)[0] - sums).abs().max() < 1e-4
    assert max(rows) == 256 // 3
    assert sum(rows) == lengths.sum()  # nowhere but where an ending is predicted
    assert max(batch.tokens.numel() for batch in prepare(questions, model).batches) <= 256
    long = [question | {"ctx": "1 " * 5000} for question in questions]
    batches = prepare(long, lambda idx: None).batches
    assert max(batch.tokens.size(1) for batch in batches) <= hellaswag.LONGEST


def test_a_long_question_loses_the_left_of_its_context():
    few, six = [ids(7, 8), ids(9, 1, 2), ids(5)], ids(*range(20, 26))
    fits = {"ctx": ids(*range(11)), "endings": [six, *few], "label": 0}
    long = {"ctx": ids(*range(40)), "endings": [six, *few], "label": 0}
    long_ending = {"ctx": ids(3, 4, 5), "endings": [ids(*range(50, 80)), *few], "label": 0}
    model, questions = gpt(block_size=16), [fits, long, long_ending]
    prepared = prepare(questions, model)
    assert prepared.cut == hellaswag.evaluate(model, prepared).cut == 2

    # Of an ending's 16 tokens the last is predicted only; the plain loop reads it, too.
    wide, state = gpt(block_size=17), model.state_dict()
    state["transformer.wpe.weight"] = F.pad(state["transformer.wpe.weight"], (0, 0, 0, 1))
    wide.load_state_dict(state)
    by_hand = [fits, long | {"ctx": ids(*range(29, 40))},
               {"ctx": ids(5), "endings": [ids(*range(50, 66)), *few], "label": 0}]
    expected = naive(lambda idx: wide(idx)[0], by_hand)[0]
    assert torch.allclose(ending_losses(model, questions)[0], expected, atol=1e-4)


def test_other_vocabularies_and_no_questions_are_refused():
    question = {"ctx": "299", "endings": ["1"] * 4, "label": 0}
    with pytest.raises(HellaSwagError, match="vocabulary of 200"):
        prepare([question], gpt(n_vocab=200))
    with pytest.raises(HellaSwagError, match="no HellaSwag questions"):
        prepare([], gpt())


def test_autocast_and_random_state():
    model, questions = gpt(), made_up()
    state = torch.random.get_rng_state(), random.getstate()
    plain = ending_losses(model, questions)[0]
    with torch.autocast("cpu", torch.bfloat16):
        low = ending_losses(model, questions)[0]
        expected = naive(lambda idx: model(idx)[0], questions)[0]
    assert torch.equal(state[0], torch.random.get_rng_state()) and state[1] == random.getstate()
    assert 0 < (low - plain).abs().max() < 3 and (low - expected).abs().mean() < 0.3
    assert all(p.grad is None for p in model.parameters()) and model.training


def test_compiled_models_score_the_same_and_are_not_compiled_anew():
    graphs = []

    def backend(graph, inputs):  # what follows the capture of a graph, a C++ compiler, adds nothing
        graphs.append(graph)
        return graph.forward
    model, questions = gpt(), made_up(30)
    for plain in (model, lambda idx: model(idx)[0]):
        compiled = torch.compile(plain, backend=backend)
        compiled(torch.zeros(1, 8, dtype=torch.int64))  # for the shape that training has
        assert len(graphs) == 1
        assert_same(compiled, questions, ending_losses(plain, questions))
        assert len(graphs) == 1
        graphs.clear()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_losses_that_are_not_finite_are_an_error(value):
    model = gpt()
    torch.nn.init.constant_(model.lm_head.weight, value)
    with pytest.raises(HellaSwagError, match="losses are not finite"):
        hellaswag.evaluate(model, prepare(made_up(), model))


def test_stop_abandons_the_evaluation(monkeypatch):
    monkeypatch.setattr(hellaswag, "CPU_BATCH", 256)
    model, asked = gpt(), []
    prepared = prepare(made_up(), model)
    score = hellaswag.evaluate(model, prepared, stop=lambda: bool(asked.append("never")))
    assert score == hellaswag.evaluate(model, prepared)
    assert len(asked) == len(prepared.batches) > 3
    scored, count_right = [], hellaswag.count_right

    def noted(model, batch):
        scored.append(batch)
        return count_right(model, batch)
    monkeypatch.setattr(hellaswag, "count_right", noted)
    assert hellaswag.evaluate(model, prepared, stop=lambda: len(scored) == 2) is None
    assert len(scored) == 2


# ---------------------------------------------------------------------------- transformers
@pytest.mark.parametrize("kind, packed", [("gpt2", True), ("gpt_neox", True), ("llama", True),
                                          ("granite", False)])
def test_transformers_models(kind, packed):
    """Granite scales logits after its head: one of those that a packed row does not suit."""
    t = pytest.importorskip("transformers")
    config = t.AutoConfig.for_model(
        kind, vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64)
    model, questions = init(t.AutoModelForCausalLM.from_config(config).eval()), made_up(8)
    expected = naive(lambda idx: model(idx).logits, questions)
    assert hellaswag.reads_packed(model) == packed
    assert_same(model, questions, expected, tolerance=5e-5)
    compiled = torch.compile(model, backend="eager")
    assert hellaswag.reads_packed(compiled) == packed
    assert torch.equal(ending_losses(compiled, questions)[0], ending_losses(model, questions)[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny GPT of ours with GPT-2's vocabulary, exported without a tokenizer."""
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("hf") / "tiny"
    gpt(n_vocab=50257).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def bytes_folder(tmp_path_factory):
    """A tiny GPT of ours with the byte vocabulary, exported with its tokenizer."""
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("hf") / "bytes"
    gpt(n_vocab=257).save_pretrained(path, get_encoding("bytes"))
    return path


def test_transformers_and_ours_agree_on_the_same_weights(folder):
    ours, questions = gpt(n_vocab=50257), made_up()
    theirs, text_to_ids = hellaswag.load_model(str(folder), "cpu")
    assert hellaswag.reads_packed(theirs) and text_to_ids == hellaswag.gpt2_encode
    assert_same(theirs, questions, ending_losses(ours, questions))


def test_another_vocabulary_comes_with_its_tokenizer(bytes_folder):
    text_to_ids = hellaswag.load_model(str(bytes_folder), "cpu")[1]
    question = {"ctx": "ab", "endings": ["c", "d", "e", "f g"], "label": 0}
    endings = [[32, 99], [32, 100], [32, 101], [32, 102, 32, 103]]
    assert hellaswag.tokenize(question, text_to_ids) == ([97, 98], endings)
    assert hellaswag.tokenize(question, lambda text: [1, *text.encode()]) == ([1, 97, 98], endings)


def test_a_folders_tokenizer_goes_before_gpt2s(folder, bytes_folder, tmp_path):
    both = shutil.copytree(folder, tmp_path / "both")
    for file in bytes_folder.glob("tokenizer*"):
        shutil.copy(file, both)
    text_to_ids = hellaswag.load_model(str(both), "cpu")[1]
    assert text_to_ids("ab c") == [97, 98, 32, 99]


# ------------------------------------------------------------------------------- processes
def one_of_two(rank, store, out):
    """A rank's score, what becomes of it if rank 1 wants to stop, and if rank 1's model is broken.

    Rank 1, with a batch less, does so when it has none left.
    """
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2,
                            timeout=datetime.timedelta(minutes=2))
    torch.set_num_threads(1)
    hellaswag.CPU_BATCH = 256
    model, asked = gpt(), []
    prepared = prepare(made_up(50), model)
    assert len(prepared.batches) % 2 == 1

    def stop():
        asked.append(rank)
        wishes = torch.tensor(rank == 1 and len(asked) > len(prepared.batches) // 2).int()
        dist.all_reduce(wishes)
        return wishes.item() > 0
    results = [hellaswag.evaluate(model, prepared),
               hellaswag.evaluate(model, prepared, stop=stop), len(asked)]
    if rank == 1:
        torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    try:
        hellaswag.evaluate(model, prepared)
    except HellaSwagError as e:
        results.append(str(e))
    Path(f"{out}{rank}").write_text(json.dumps(results))
    dist.destroy_process_group()


def test_two_processes_are_one(tmp_path):
    method = "fork" if sys.platform == "linux" else "spawn"
    torch.multiprocessing.start_processes(
        one_of_two, (str(tmp_path / "store"), str(tmp_path / "out")), nprocs=2,
        start_method=method)
    results = [json.loads((tmp_path / f"out{rank}").read_text()) for rank in range(2)]
    assert results[0] == results[1]
    score, stopped, asked, error = results[0]
    assert score == list(hellaswag.evaluate(gpt(), prepare(made_up(50), gpt())))
    assert stopped is None and asked > 1
    assert "not finite" in error


# ------------------------------------------------------------------------------------ data
def example(**changes):
    return {"ind": 1, "ctx": "A man is on a roof. he", "label": 3,
            "endings": ["falls off.", "sings.", "sleeps.", "is a roof."]} | changes


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Function: put questions, dicts or raw lines, where HellaSwag is looked for."""
    monkeypatch.setattr(hellaswag, "DATA", tmp_path / "hellaswag_val.jsonl")

    def put(*examples):
        lines = [e if isinstance(e, bytes) else json.dumps(e).encode() for e in examples]
        hellaswag.DATA.write_bytes(b"\n".join(lines) + b"\n")
        monkeypatch.setattr(hellaswag, "TOTAL", len(examples))
    return put


def test_questions_come_in_file_order_with_labels_as_numbers(data):
    data(example(), example(label="2", ctx="line\u2028separator"), example(label=0))
    got = list(hellaswag.iterate_examples("val"))
    assert [e["label"] for e in got] == [3, 2, 0] and got[0] == example()
    with pytest.raises(HellaSwagError, match="train"):
        hellaswag.iterate_examples("train")


@pytest.mark.parametrize("bad", [
    b"", b'{"ctx": "A ma', b"\xff\xfe", b"[1]", b"[" * 100_000, example(label=4),
    example(label=True), example(ctx=""), example(endings=["a"] * 3),
    example(endings=["a", "b", "c", ""]), example(endings="abcd"),
    example(ctx="a" + " " * 20_000)])
def test_a_damaged_line_is_named(bad, data):
    data(example(), example(), bad)
    pattern = r"damaged in line 3 of .*hellaswag_val\.jsonl \(.*\): delete .*\.$"
    with pytest.raises(HellaSwagError, match=pattern) as e:
        hellaswag.iterate_examples("val")
    assert "\n" not in str(e.value) and len(str(e.value)) < 400


def test_the_file_must_be_whole(data, monkeypatch):
    data(*[example()] * 3)
    monkeypatch.setattr(hellaswag, "TOTAL", 10_042)
    with pytest.raises(HellaSwagError, match=r"line 4 .*\(3 of 10,042 questions\): delete"):
        hellaswag.iterate_examples("val")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/no/where", path)])
def test_what_is_no_file_is_one_line(make, data):
    make(hellaswag.DATA)
    with pytest.raises(HellaSwagError, match=r"hellaswag_val.jsonl is not a file: move it away"):
        hellaswag.iterate_examples("val")


def test_a_file_that_cannot_be_read_is_one_line(monkeypatch):
    monkeypatch.setattr(hellaswag, "DATA", Path("/proc/self/mem"))
    if not hellaswag.DATA.is_file():
        pytest.skip("no /proc here")
    with pytest.raises(HellaSwagError, match=r"/proc/self/mem cannot be read \(Input/output"):
        hellaswag.iterate_examples("val")


class StandInHub(http.server.BaseHTTPRequestHandler):
    """What huggingface_hub asks of a hub for one file; class attributes say which."""
    protocol_version, content, busy, asked = "HTTP/1.1", b"", 0, []
    file = "/refs%2Fconvert%2Fparquet/default/validation/0000.parquet"

    def do_GET(self, body=True):
        self.asked.append((self.command, self.path))
        found = self.path.endswith(self.file)
        content = self.content if found else b"no such thing"
        status = 503 if len(self.asked) <= self.busy else 200 if found else 404
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hash(content):x}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if body:
            self.wfile.write(content)

    def do_HEAD(self):
        self.do_GET(body=False)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Function: start a StandInHub that has `n` questions. HellaSwag is missing, to be fetched."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    servers = []

    def start(n=3, **attributes):
        rows = [example(label=str(i), ctx_a="A man", ctx_b="he") for i in range(n)]
        parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "hub.parquet")
        attributes = {"asked": [], "content": (tmp_path / "hub.parquet").read_bytes(), **attributes}
        handler = type("Hub", (StandInHub,), attributes)
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[0].serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{servers[0].server_port}/")
        return handler
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    huggingface_hub.logging.set_verbosity_warning()  # whatever was set in this process before
    monkeypatch.setattr(hellaswag, "DATA", tmp_path / "hellaswag" / "hellaswag_val.jsonl")
    monkeypatch.setattr(hellaswag, "TOTAL", 3)
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("busy", [0, 2])
def test_fetching_from_a_hub(busy, hub, capsys, caplog):
    """A hub that is too busy at first is asked again, without a line about it."""
    handler = hub(busy=busy)
    assert [e["label"] for e in hellaswag.iterate_examples("val")] == [0, 1, 2]
    asked = len(handler.asked)
    assert [e["label"] for e in hellaswag.iterate_examples("val")] == [0, 1, 2]
    assert len(handler.asked) == asked > busy  # fetched once
    assert json.loads(hellaswag.DATA.read_text().splitlines()[0])["ctx_a"] == "A man"
    assert list(hellaswag.DATA.parent.iterdir()) == [hellaswag.DATA]  # no leftovers
    out = capsys.readouterr().out
    assert out.startswith("downloading HellaSwag") and out.count("\n") == 1
    assert not caplog.records


@pytest.mark.parametrize("give, message", [
    (dict(n=2), r"damaged in line 3 of the download \(2 of 3 questions\): try again"),
    (dict(content=b"PAR1 not"), r"downloaded from http://127.* \(.*[Pp]arquet.*\): check"),
    (dict(file="/another"), r"downloaded from .* \(.*404.*\): check .* put the questions at ")])
def test_a_hub_that_gives_nothing_good_is_one_line(give, message, hub):
    hub(**give)
    with pytest.raises(HellaSwagError, match=message) as e:
        hellaswag.iterate_examples("val")
    assert "\n" not in str(e.value) and not hellaswag.DATA.parent.exists()


def test_what_cannot_be_kept_is_scored_from_memory(hub, capsys):
    hub()
    hellaswag.DATA.parent.write_text("a file where the folder should be")
    assert [e["label"] for e in hellaswag.iterate_examples("val")] == [0, 1, 2]
    line = capsys.readouterr().out.splitlines()[1]
    assert "not kept at" in line and "(File exists): it is scored from memory" in line


def test_someone_elses_errors_are_cut_between_words():
    line = hellaswag.first_line(ValueError("sixteen letters. " * 20 + "\nanother line"))
    assert 100 < len(line) < 160 and set(line.split()) == {"sixteen", "letters.", "..."}
    assert hellaswag.first_line(ValueError()) == "ValueError"


# ---------------------------------------------------------------------------- command line
@pytest.fixture
def questions(data):
    data(*[example(label=i % 4) for i in range(12)], example(ctx="A man is on a roof. " * 30))


@pytest.fixture
def main(monkeypatch):
    """Function: `hellaswag.py <args>` in this process (loading torch anew takes seconds)."""
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["hellaswag.py", *map(str, args)])
        hellaswag.main()
    return run


def test_command_line_scores_a_folder(folder, questions, gpt2_encoding, main, capsys):
    main("-m", folder, "-d", "cpu")
    out, err = capsys.readouterr()
    score = hellaswag.evaluate(gpt(n_vocab=50257), list(hellaswag.iterate_examples("val")))
    error = (score.acc * (1 - score.acc) / 13) ** 0.5
    for part in (f"acc      {score.acc:.4f} +- {error:.4f}", f"acc_norm {score.acc_norm:.4f}",
                 "13 questions (1 cut", "examples/s", "0.2859 / 0.2955", "0.3842 / 0.4893",
                 "0.337"):
        assert part in out
    assert out.isascii()
    assert "acc_norm" in err and "warn" not in err.lower()  # the progress bar alone


@pytest.fixture
def refusal(main, capsys):
    """Function: what `hellaswag.py <args>` refuses with."""
    def run(*args):
        with pytest.raises(SystemExit) as e:
            main(*args)
        assert isinstance(e.value.code, str) and "\n" not in e.value.code
        assert capsys.readouterr().err == ""
        return e.value.code  # Python prints it to stderr and exits with code 1
    return run


def test_bad_command_lines_are_one_line(questions, refusal, folder):
    many = refusal("--limit", "many")
    assert "many" in many and "--help" in many and "--help" in refusal("--what")
    assert "at least one" in refusal("--limit", 0, "-m", folder, "-d", "cpu")
    for device in ("abacus", "meta"):
        assert f"-d {device} is not a device" in refusal("-d", device, "-m", folder)
    hellaswag.DATA.write_bytes(hellaswag.DATA.read_bytes() + b'{"ctx": ')
    assert "damaged in line 14" in refusal()


def test_bad_models_are_one_line(questions, tmp_path, folder, gpt2_encoding, refusal, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    load = functools.partial(refusal, "-d", "cpu", "-m")
    for name in ("nobody/nothing", "log/model_19073.pt", "x" * 300):
        assert f"-m {name} is not a folder, and from the hub cannot be loaded" in load(name)
    (tmp_path / "empty").mkdir()
    assert "empty is a folder that cannot be loaded" in load(tmp_path / "empty")
    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:len(weights) // 2])
    assert "broken is a folder that cannot be loaded" in load(broken)
    config = json.loads((broken / "config.json").read_text()) | {"n_layer": 3}
    (broken / "config.json").write_text(json.dumps(config))
    (broken / "model.safetensors").write_bytes(weights)
    assert "it lacks transformer.h.2" in load(broken)
    gpt(n_vocab=VOCAB).save_pretrained(tmp_path / "small")  # without a tokenizer
    small = load(tmp_path / "small")
    assert "vocabulary of 300" in small or "cannot be loaded" in small


def test_a_folders_python_is_not_run(questions, tmp_path, folder, refusal, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda prompt: "y")  # were anybody asked
    theirs = shutil.copytree(folder, tmp_path / "theirs")
    (theirs / "code.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')")
    config = json.loads((theirs / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (theirs / "config.json").write_text(json.dumps(config | {"model_type": "theirs"}))
    assert "theirs needs Python code of its own" in refusal("-d", "cpu", "-m", theirs)
    (theirs / "config.json").write_text(json.dumps(config))  # a GPT-2 needs none of it
    hellaswag.load_model(str(theirs), "cpu")
    assert not (tmp_path / "was_run").exists()


def test_without_the_vocabulary_it_says_so(questions, monkeypatch, refusal, folder):
    import tiktoken

    def get_encoding(name):
        raise OSError("no network")
    monkeypatch.setattr(tiktoken, "get_encoding", get_encoding)
    assert "TIKTOKEN_CACHE_DIR" in refusal("-m", folder, "-d", "cpu")


def gpu_is_full():
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("fail, message", [
    (gpu_is_full, "cpu has too little memory for"),
    (lambda: torch.empty(2**60), "cpu has too little memory for"),
    (lambda: signal.raise_signal(signal.SIGINT), "hellaswag.py: stopped.")])
def test_memory_and_ctrl_c_are_one_line(fail, message, questions, refusal, folder, gpt2_encoding,
                                        monkeypatch):
    monkeypatch.setattr(hellaswag, "evaluate", lambda *args, **kwargs: fail())
    assert message in refusal("-m", folder, "-d", "cpu")


OFFLINE = """
import sys
from pathlib import Path
import hellaswag
hellaswag.DATA = Path(sys.argv[1])
try:
    hellaswag.iterate_examples("val")
except hellaswag.HellaSwagError as e:
    sys.exit(f"hellaswag.py: {e}")
"""


def test_offline_is_one_line_and_nothing_else(tmp_path):
    pytest.importorskip("huggingface_hub")
    pytest.importorskip("pyarrow")
    data = tmp_path / "hellaswag" / "hellaswag_val.jsonl"
    done = run_python(OFFLINE, data, env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")})
    assert done.returncode == 1 and not data.parent.exists()
    one_line(done.stderr, "cannot be downloaded from", data)


def test_a_mistake_on_the_command_line_exits_with_one_line():
    done = run_script("hellaswag.py", "--limit", "many")
    assert (done.returncode, done.stdout) == (1, "")
    one_line(done.stderr, "many", "--help")


def test_ctrl_c_while_importing_is_quiet(tmp_path):
    (tmp_path / "torch.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    result = subprocess.run([sys.executable, ROOT / "hellaswag.py"], capture_output=True,
                            env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, b"", b"")


def test_importing_does_nothing_heavy():
    heavy = "{'transformers', 'datasets', 'huggingface_hub', 'tiktoken'}"
    probe = f"import sys, hellaswag; print({heavy} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("set()\n", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_lost_output_changes_nothing(folder, questions, gpt2_encoding, tmp_path):
    """Three commands at once, each of which loses other output."""
    program, name = tmp_path / "hellaswag.py", shutil.copytree(folder, tmp_path / "mod\u00e8le")
    source = (ROOT / "hellaswag.py").read_text()
    program.write_text(source.replace("TOTAL = 10_042", "TOTAL = 13"))
    (tmp_path / "hellaswag").mkdir()
    shutil.copy(hellaswag.DATA, tmp_path / "hellaswag")

    def start(*args, **options):
        return subprocess.Popen([sys.executable, program, *args], **options,
                                env={**os.environ, "PYTHONIOENCODING": "ascii"})
    read, closed_pipe = os.pipe()
    os.close(read)
    with open("/dev/full", "w") as full:
        scores = start("-d", "cpu", "-m", name, stdout=subprocess.PIPE, stderr=closed_pipe)
        helps = start("--help", stdout=full, stderr=subprocess.PIPE)
        helps_nobody = start("--help", preexec_fn=lambda: os.closerange(1, 3))
    os.close(closed_pipe)
    out = scores.communicate()[0].decode()
    assert scores.returncode == 0 and r"mod\xe8le on cpu" in out and "acc_norm" in out
    assert helps.communicate()[1] == b"" and helps.returncode == 0
    assert helps_nobody.wait() == 0
