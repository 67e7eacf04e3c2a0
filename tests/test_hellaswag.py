"""HellaSwag: packed, batched scores are those of a plain loop, for every kind of model; bad input is one line."""
import functools
import http.server
import json
import os
import random
import shutil
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from bench import naive_ending_losses
from conftest import run_script, shared
from torch.nn import functional as F

import hellaswag
from hellaswag import HellaSwagError
from train_gpt2 import GPT, GPTConfig, get_encoding

VOCAB = 300


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small are not worth threads, which on a busy machine only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def encode(text):
    """A text's numbers are its tokens: made-up questions need no vocabulary."""
    return [int(word) for word in text.split()]


def made_up(n=20, seed=0, longest_context=40):
    """Questions of random ids. Some endings are a single token, some contexts too."""
    r = random.Random(seed)
    ids = lambda a, b: " ".join(str(r.randrange(VOCAB)) for _ in range(r.randint(a, b)))
    return [{"ctx": ids(1, longest_context), "endings": [ids(1, 12) for _ in range(4)], "label": r.randrange(4)}
            for _ in range(n)]


def prepare(questions, model):
    return hellaswag.prepare(questions, model, encode)


def gpt(n_vocab=VOCAB, block_size=64, seed=0):
    torch.manual_seed(seed)
    model = GPT(GPTConfig(block_size, n_vocab + 20, 2, 2, 32, n_vocab=n_vocab))  # with padding
    for p in model.parameters():  # large weights, so that a wrong position or mask shows
        torch.nn.init.normal_(p, std=0.2)
    return model


@torch.no_grad()
def naive(logits, questions, encode=encode):
    """Summed losses (Q, 4) and lengths: one ending at a time, unpadded."""
    tokens = [hellaswag.tokenize(q, encode) for q in questions]
    losses = [[F.cross_entropy(logits(torch.tensor([context + e]))[0, len(context) - 1:-1].float(), torch.tensor(e),
                               reduction="sum") for e in endings] for context, endings in tokens]
    return torch.tensor(losses, dtype=torch.float64), torch.tensor([[len(e) for e in endings] for _, endings in tokens])


def ending_losses(model, questions, encode=encode):
    """What hellaswag makes of the questions, (Q, 4) each, in their order."""
    numbered = [q | {"label": i} for i, q in enumerate(questions)]
    model, batches = getattr(model, "_orig_mod", model), hellaswag.prepare(numbered, model, encode).batches
    order = torch.cat([labels for labels, _, _ in batches]).argsort()
    return [torch.cat(x)[order] for x in zip(*(hellaswag.ending_losses(model, *rest) for _, *rest in batches))]


def same(model, questions, expected, tolerance=1e-5, encode=encode):
    """Assert that the losses per token are the expected ones, and the score what follows from them."""
    (sums, lengths), (losses, counted) = expected, ending_losses(model, questions, encode)
    assert torch.equal(lengths, counted) and ((losses - sums) / lengths).abs().max() < tolerance
    labels = torch.tensor([q["label"] for q in questions])
    accuracies = [(x.argmin(1) == labels).double().mean().item() for x in (sums, sums / lengths)]
    assert hellaswag.evaluate(model, hellaswag.prepare(questions, model, encode)) == (*accuracies, len(questions), 0)


# ----------------------------------------------------------------------------------------------------- exactness
def test_made_up_questions_score_as_in_a_plain_loop():
    model, questions = gpt(), made_up(40)
    same(model, questions, naive(lambda idx: model(idx)[0], questions))


def test_real_questions_score_as_in_a_plain_loop(gpt2_encoding, monkeypatch):
    monkeypatch.setattr(hellaswag, "DATA", shared("hellaswag/hellaswag_val.jsonl"))
    model, some = gpt(n_vocab=50257, block_size=256), list(hellaswag.iterate_examples("val"))[::1000]
    rendered = [hellaswag.render_example(e) for e in some]
    with torch.no_grad():
        sums = torch.stack([naive_ending_losses(model, tokens, mask) for _, tokens, mask, _ in rendered]).double()
    same(model, some, (sums, torch.stack([mask.sum(1) for _, _, mask, _ in rendered])), encode=hellaswag.gpt2_encode)
    assert hellaswag.evaluate(model, some) == hellaswag.evaluate(model, hellaswag.prepare(some, model))


def test_render_example_pads_four_rows(gpt2_encoding):
    example = {"ctx": "A man is sitting on a roof. he", "endings": ["falls.", "sings a song.", "x", "y z"], "label": 1}
    data, tokens, mask, label = hellaswag.render_example(example)
    assert tokens.shape == mask.shape and tokens.shape[0] == 4 and label == 1
    for row, on, ending in zip(tokens, mask, example["endings"]):
        assert gpt2_encoding.decode(row[on.bool()].tolist()) == " " + ending
        assert row[:len(data["context"])].tolist() == gpt2_encoding.encode_ordinary(example["ctx"])


@pytest.mark.parametrize("wrap", [lambda logits: logits, lambda logits: (logits, None)])
def test_any_function_from_ids_to_logits(wrap):
    model, questions = gpt(), made_up()
    same(lambda idx: wrap(model(idx)[0]), questions, naive(lambda idx: model(idx)[0], questions))


def test_memory_is_bounded_whatever_the_questions(monkeypatch):
    monkeypatch.setattr(hellaswag, "CPU_BATCH", 256)
    model, questions, heads = gpt(), made_up(60), []
    expected = naive(lambda idx: model(idx)[0], questions)
    head = model.head
    monkeypatch.setattr(model, "head", lambda x: heads.append(len(x)) or head(x))
    assert (ending_losses(model, questions)[0] - expected[0]).abs().max() < 1e-4
    assert max(heads) == 256 // 3 and sum(heads) == expected[1].sum()  # nowhere but where an ending is predicted
    assert max(rows[..., 0].numel() for _, rows, _ in prepare(questions, model).batches) <= 256
    long = [q | {"ctx": "1 " * 5000} for q in questions]
    assert max(rows.size(1) for _, rows, _ in prepare(long, lambda idx: None).batches) <= hellaswag.LONGEST


def test_a_long_question_loses_the_left_of_its_context():
    model, ids = gpt(block_size=16), lambda *numbers: " ".join(map(str, numbers))
    few = [ids(7, 8), ids(9, 1, 2), ids(5)]
    fits, long = ({"ctx": ids(*range(n)), "endings": [ids(*range(20, 26)), *few], "label": 0} for n in (11, 40))
    ending_long = {"ctx": ids(3, 4, 5), "endings": [ids(*range(50, 80)), *few], "label": 0}
    questions = [fits, long, ending_long]
    assert prepare(questions, model).cut == hellaswag.evaluate(model, prepare(questions, model)).cut == 2
    wide = gpt(block_size=17)  # of an ending's 16 tokens, the last is predicted only; the plain loop reads it too
    wide.transformer.load_state_dict(model.transformer.state_dict() | {"wpe.weight": torch.cat(
        (model.transformer.wpe.weight, torch.zeros(1, 32)))})
    by_hand = [fits, long | {"ctx": ids(*range(29, 40))},
               {"ctx": ids(5), "endings": [ids(*range(50, 66)), *few], "label": 0}]
    assert torch.allclose(ending_losses(model, questions)[0], naive(lambda idx: wide(idx)[0], by_hand)[0], atol=1e-4)


def test_other_vocabularies_are_refused():
    question = {"ctx": "299", "endings": ["1"] * 4, "label": 0}
    with pytest.raises(HellaSwagError, match="vocabulary of 200"):
        prepare([question], gpt(n_vocab=200))
    with pytest.raises(HellaSwagError, match="no HellaSwag questions"):
        prepare([], gpt())


def test_autocast_and_random_state():
    model, questions = gpt(), made_up()
    plain, state = ending_losses(model, questions)[0], (torch.random.get_rng_state(), random.getstate())
    with torch.autocast("cpu", torch.bfloat16):
        low, expected = ending_losses(model, questions)[0], naive(lambda idx: model(idx)[0], questions)[0]
    assert torch.equal(state[0], torch.random.get_rng_state()) and state[1] == random.getstate()
    assert 0 < (low - plain).abs().max() < 3 and (low - expected).abs().mean() < 0.3
    assert all(p.grad is None for p in model.parameters()) and model.training


def test_compiled_models_score_the_same():
    model, questions = gpt(), made_up(30)
    compiled = torch.compile(model, backend="eager")  # what follows the graphs' capture, a C++ compiler, adds nothing
    compiled(torch.zeros(1, 8, dtype=torch.int64))  # really compiled, for the shape that training has
    torch._dynamo.utils.counters.clear()
    scores = [hellaswag.evaluate(m, prepare(questions, m)) for m in (compiled, model)]
    assert scores[0] == scores[1]
    assert torch.equal(ending_losses(compiled, questions)[0], ending_losses(model, questions)[0])
    assert not torch._dynamo.utils.counters["frames"]  # nothing is compiled anew for ragged batches


# ---------------------------------------------------------------------------------------------------- transformers
@pytest.mark.parametrize("kind, packed", [("gpt2", True), ("gpt_neox", True), ("llama", True), ("granite", False)])
def test_transformers_models(kind, packed):
    """Granite scales logits after its head, as one of those that a packed row does not suit."""
    t = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(t.AutoConfig.for_model(
        kind, vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    questions = made_up(8)
    assert hellaswag.reads_packed(model) == packed
    same(model, questions, naive(lambda idx: model(idx).logits, questions), tolerance=5e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny GPT of ours with GPT-2's vocabulary, exported for transformers without a tokenizer."""
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("hf") / "tiny"
    gpt(n_vocab=50257).save_pretrained(path)
    return path


def test_transformers_and_ours_agree_on_the_same_weights(folder):
    ours, questions = gpt(n_vocab=50257), made_up()
    theirs, text_to_ids = hellaswag.load_model(str(folder), "cpu")
    assert hellaswag.reads_packed(theirs) and text_to_ids == hellaswag.gpt2_encode
    same(theirs, questions, ending_losses(ours, questions))


def test_another_vocabulary_comes_with_its_tokenizer(tmp_path):
    pytest.importorskip("transformers")
    gpt(n_vocab=257).save_pretrained(tmp_path / "bytes", get_encoding("bytes"))
    text_to_ids = hellaswag.load_model(str(tmp_path / "bytes"), "cpu")[1]
    question = {"ctx": "ab", "endings": ["c", "d", "e", "f g"], "label": 0}
    assert hellaswag.tokenize(question, text_to_ids) == ([97, 98], [[32, 99], [32, 100], [32, 101], [32, 102, 32, 103]])
    with_start = lambda text: [1, *text.encode()]
    assert hellaswag.tokenize(question, with_start)[0] == [1, 97, 98]
    assert hellaswag.tokenize(question, with_start)[1] == hellaswag.tokenize(question, text_to_ids)[1]


# ------------------------------------------------------------------------------------------------------- processes
def one_of_two(rank, store, out):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    hellaswag.CPU_BATCH = 256
    score = hellaswag.evaluate(gpt(), prepare(made_up(50), gpt()))
    open(f"{out}{rank}", "w").write(json.dumps(score))
    dist.destroy_process_group()


def test_two_processes_are_one(tmp_path):
    torch.multiprocessing.start_processes(one_of_two, (str(tmp_path / "store"), str(tmp_path / "out")), nprocs=2,
                                          start_method="fork" if sys.platform == "linux" else "spawn")
    alone = list(hellaswag.evaluate(gpt(), prepare(made_up(50), gpt())))
    assert [json.loads((tmp_path / f"out{rank}").read_text()) for rank in range(2)] == [alone, alone]


# ------------------------------------------------------------------------------------------------------------ data
def example(**changes):
    return {"ind": 1, "ctx": "A man is on a roof. he", "endings": ["falls off.", "sings.", "sleeps.", "is a roof."],
            "label": 3} | changes


def lines(*examples):
    return b"".join(e if isinstance(e, bytes) else json.dumps(e).encode() + b"\n" for e in examples)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Function: put questions where HellaSwag is looked for."""
    monkeypatch.setattr(hellaswag, "DATA", tmp_path / "hellaswag_val.jsonl")

    def put(*examples):
        hellaswag.DATA.write_bytes(lines(*examples))
        monkeypatch.setattr(hellaswag, "TOTAL", len(examples))
    return put


def test_questions_come_in_file_order_with_labels_as_numbers(data):
    data(example(), example(label="2", ctx="line\u2028separator"), example(label=0))
    got = list(hellaswag.iterate_examples("val"))
    assert [e["label"] for e in got] == [3, 2, 0] and got[0] == example()
    with pytest.raises(HellaSwagError, match="train"):
        hellaswag.iterate_examples("train")


@pytest.mark.parametrize("bad", [b"\n", b'{"ctx": "A ma', b"\xff\xfe\n", b"[1]\n", b"[" * 100_000, example(label=4),
                                 example(label=True), example(ctx=""), example(endings=["a"] * 3),
                                 example(endings=["a", "b", "c", ""]), example(endings="abcd")])
def test_a_damaged_line_is_named(bad, data):
    data(example(), example(), bad)
    with pytest.raises(HellaSwagError, match=r"damaged in line 3 \(.*\): delete .*hellaswag_val\.jsonl and .*\.$") as e:
        hellaswag.iterate_examples("val")
    assert "\n" not in str(e.value) and len(str(e.value)) < 400


def test_the_file_must_be_whole(data, monkeypatch):
    data(*[example()] * 3)
    monkeypatch.setattr(hellaswag, "TOTAL", 10_042)
    with pytest.raises(HellaSwagError, match=r"line 4 \(3 of 10,042 questions\): delete"):
        hellaswag.iterate_examples("val")


class StandInHub(http.server.BaseHTTPRequestHandler):
    """What huggingface_hub asks of a hub for one file; class attributes say which."""
    protocol_version, content, asked = "HTTP/1.1", b"", []

    def do_GET(self, body=True):
        self.asked.append((self.command, self.path))
        found = self.path.endswith("/resolve/refs%2Fconvert%2Fparquet/default/validation/0000.parquet")
        content = self.content if found else b"no such thing"
        self.send_response(200 if found else 404)
        for name, value in (("Content-Length", len(content)), ("ETag", f'"{hash(content):x}"'),
                            ("X-Repo-Commit", "0" * 40), ("Accept-Ranges", "bytes")):
            self.send_header(name, str(value))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def do_HEAD(self):
        self.do_GET(body=False)

    def log_message(self, *args):
        pass


FETCH = """
import sys; sys.path.insert(0, {root!r})
import hellaswag; from pathlib import Path
hellaswag.DATA = Path({data!r}); hellaswag.TOTAL = 3
try: print([e["label"] for e in hellaswag.iterate_examples("val")])
except hellaswag.HellaSwagError as e: sys.exit(f"hellaswag.py: {{e}}")
"""


@pytest.mark.parametrize("give, ok", [("parquet", True), ("too few", False), ("nonsense", False), ("offline", False)])
def test_fetching_from_a_hub(give, ok, tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [example(label=str(i), ctx_a="A man", ctx_b="he") for i in range(3 if give == "parquet" else 2)]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "hub.parquet")
    hub = type("Hub", (StandInHub,), {"asked": [], "content": b"PAR1 not" if give == "nonsense" else
                                      (tmp_path / "hub.parquet").read_bytes()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    data = tmp_path / "hellaswag" / "hellaswag_val.jsonl"
    script = tmp_path / "fetch.py"
    script.write_text(FETCH.format(root=os.path.dirname(hellaswag.__file__), data=str(data)))
    env = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "*",
           "HF_HUB_OFFLINE": "1" if give == "offline" else "0"}
    first, asked = run_script(script, env=env), len(hub.asked)
    if ok:
        again = run_script(script, env=env)
        assert first.returncode == 0 and first.stdout.endswith("[0, 1, 2]\n"), first.stderr
        assert again.stdout == "[0, 1, 2]\n" and len(hub.asked) == asked > 0  # fetched once
        assert json.loads(data.read_text().splitlines()[0])["ctx_a"] == "A man"
    else:
        assert first.returncode == 1 and not data.exists()
        one_line(first, "HellaSwag", "of 3 questions" if give == "too few" else "can't be fetched (", str(data))
    assert [p.name for p in data.parent.glob("*")] == (["hellaswag_val.jsonl"] if ok else [])  # no leftovers
    server.shutdown()


# ---------------------------------------------------------------------------------------------------- command line
def one_line(result, *parts):
    """Assert that a script ended with exit code 1 and one sentence on stderr that holds the parts."""
    assert result.returncode == 1, result.stderr
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr, result.stderr
    assert all(part in result.stderr for part in parts), result.stderr


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
    model = gpt(n_vocab=50257)
    score = hellaswag.evaluate(model, list(hellaswag.iterate_examples("val")))
    error = (score.acc * (1 - score.acc) / 13) ** 0.5
    for part in (f"acc      {score.acc:.4f} +- {error:.4f}", f"acc_norm {score.acc_norm:.4f}", "13 questions (1 cut",
                 "examples/s", "0.2859 / 0.2955", "0.3842 / 0.4893", "0.337"):
        assert part in out
    assert "acc_norm" in err and "warn" not in err.lower()  # the progress bar alone


@pytest.fixture
def refusal(main, capsys):
    """Function: what `hellaswag.py <args>` refuses with."""
    def run(*args):
        with pytest.raises(SystemExit) as e:
            main(*args)
        assert isinstance(e.value.code, str) and "\n" not in e.value.code and capsys.readouterr().err == ""
        return e.value.code  # Python prints it to stderr and exits with code 1
    return run


def test_bad_command_lines_are_one_line(questions, refusal, folder):
    one_line(run_script("hellaswag.py", "--limit", "many"), "many", "--help")
    assert "--help" in refusal("--what") and "at least one" in refusal("--limit", 0, "-m", folder, "-d", "cpu")
    assert "on abacus" in refusal("-d", "abacus", "-m", folder)
    hellaswag.DATA.write_bytes(hellaswag.DATA.read_bytes() + b'{"ctx": ')
    assert "damaged in line 14" in refusal()


def test_bad_models_are_one_line(questions, tmp_path, folder, gpt2_encoding, refusal, monkeypatch):
    import huggingface_hub
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    load = functools.partial(refusal, "-d", "cpu", "-m")
    assert "-m nobody/nothing can't be loaded" in load("nobody/nothing")
    assert "model_19073.pt can't be loaded" in load("log/model_19073.pt")
    (tmp_path / "empty").mkdir()
    assert "empty can't be loaded" in load(tmp_path / "empty")
    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:len(weights) // 2])
    assert "broken can't be loaded" in load(broken)
    config = json.loads((broken / "config.json").read_text()) | {"n_layer": 3}
    (broken / "config.json").write_text(json.dumps(config))
    (broken / "model.safetensors").write_bytes(weights)
    assert "it lacks transformer.h.2" in load(broken)
    gpt(n_vocab=VOCAB).save_pretrained(tmp_path / "small")
    assert any(part in load(tmp_path / "small") for part in ("vocabulary of 300", "can't be loaded"))  # no tokenizer


def test_without_the_vocabulary_it_says_so(questions, monkeypatch, refusal, folder):
    import tiktoken
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: (_ for _ in ()).throw(OSError("no network")))
    assert "TIKTOKEN_CACHE_DIR" in refusal("-m", folder, "-d", "cpu")


def test_importing_and_help_do_nothing_heavy(tmp_path):
    script = tmp_path / "probe.py"
    script.write_text(f"import sys; sys.path.insert(0, {os.path.dirname(hellaswag.__file__)!r})\nimport hellaswag\n"
                      "print(sorted({'transformers', 'datasets', 'huggingface_hub', 'tiktoken'} & set(sys.modules)))")
    result = run_script(script)
    assert (result.stdout, result.stderr) == ("[]\n", "")
