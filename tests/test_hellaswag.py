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
from hellaswag import HellaSwagError, Question
from train_gpt2 import GPT, GPTConfig

VOCAB = 300


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small are not worth threads, which on a busy machine only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made_up(n=20, seed=0, longest_context=40):
    """Questions of random ids: no vocabulary needed. Some endings are a single token, some contexts too."""
    r = random.Random(seed)
    ids = lambda a, b: [r.randrange(VOCAB) for _ in range(r.randint(a, b))]
    return [Question(ids(1, longest_context), [ids(1, 12) for _ in range(4)], r.randrange(4)) for _ in range(n)]


def gpt(n_vocab=VOCAB, block_size=64, seed=0):
    torch.manual_seed(seed)
    model = GPT(GPTConfig(block_size, n_vocab + 20, 2, 2, 32, n_vocab=n_vocab))  # with padding
    for p in model.parameters():  # large weights, so that a wrong position or mask shows
        torch.nn.init.normal_(p, std=0.2)
    return model


@torch.no_grad()
def naive(logits, questions):
    """(Q, 4): one ending at a time, unpadded."""
    return torch.stack([torch.stack([
        F.cross_entropy(logits(torch.tensor([q.context + e]))[0, len(q.context) - 1:-1].float(), torch.tensor(e),
                        reduction="sum") for e in q.endings]) for q in questions])


def same(model, questions, expected, packed, tolerance=1e-5):
    """Assert that the losses per token are the expected ones, and the score what follows from them."""
    prepared = hellaswag.prepare(questions, model)
    assert prepared.packed == packed
    losses = hellaswag.ending_losses(model, prepared)
    assert ((losses - expected) / prepared.lengths).abs().max() < tolerance
    labels = torch.tensor([q.label for q in questions])
    score = hellaswag.evaluate(model, prepared)
    assert (score.total, score.correct) == (len(questions), int((expected.argmin(1) == labels).sum()))
    assert score.correct_norm == int(((expected / prepared.lengths).argmin(1) == labels).sum())
    assert score.acc == score.correct / len(questions)
    assert score.acc_norm_stderr == pytest.approx((score.acc_norm * (1 - score.acc_norm) / len(questions)) ** 0.5)


# ----------------------------------------------------------------------------------------------------- exactness
def test_made_up_questions_score_as_in_a_plain_loop():
    model, questions = gpt(), made_up(40)
    same(model, questions, naive(lambda idx: model(idx)[0], questions), packed=True)


def test_real_questions_score_as_in_a_plain_loop(gpt2_encoding):
    examples = list(hellaswag.iterate_examples("val", shared("hellaswag/hellaswag_val.jsonl")))
    assert len(examples) == hellaswag.TOTAL
    model, some = gpt(n_vocab=50257, block_size=256), examples[::1000]
    rendered = [hellaswag.render_example(e) for e in some]
    with torch.no_grad():
        expected = torch.stack([naive_ending_losses(model, tokens, mask) for _, tokens, mask, _ in rendered])
    same(model, [hellaswag.tokenize(e) for e in some], expected, packed=True)
    assert hellaswag.evaluate(model, some) == hellaswag.evaluate(model, hellaswag.prepare(some, model))


def test_render_example_pads_four_rows(gpt2_encoding):
    example = {"ctx": "A man is sitting on a roof. he", "endings": ["falls.", "sings a song.", "x", "y z"], "label": 1}
    data, tokens, mask, label = hellaswag.render_example(example)
    assert tokens.shape == mask.shape and tokens.shape[0] == 4 and label == 1
    for row, on, ending in zip(tokens, mask, example["endings"]):
        assert gpt2_encoding.decode(row[on.bool()].tolist()) == " " + ending
        assert row[:len(data["context"])].tolist() == gpt2_encoding.encode_ordinary(example["ctx"])


def test_any_function_from_ids_to_logits():
    model, questions = gpt(), made_up()
    expected = naive(lambda idx: model(idx)[0], questions)
    same(lambda idx: model(idx)[0], questions, expected, packed=False)
    same(lambda idx: model(idx), questions, expected, packed=False)  # (logits, loss)


def test_memory_is_bounded_whatever_the_questions(monkeypatch):
    monkeypatch.setattr(hellaswag, "BUDGETS", {"cpu": (256, 16)})
    model, questions, heads = gpt(), made_up(60), []
    expected = naive(lambda idx: model(idx)[0], questions)
    head = model.head
    monkeypatch.setattr(model, "head", lambda x: heads.append(len(x)) or head(x))
    same(model, questions, expected, packed=True)
    assert max(heads) == 16 and sum(heads) == 2 * sum(len(e) for q in questions for e in q.endings)
    assert max(batch[0].numel() for batch in hellaswag.prepare(questions, model).batches) <= 256


def test_a_long_question_loses_the_left_of_its_context():
    model = gpt(block_size=16)
    r = random.Random(1)
    ids = lambda n: [r.randrange(VOCAB) for _ in range(n)]
    fits, long, ending_long = (Question(ids(c), [ids(e), ids(2), ids(3), ids(1)], 0)
                               for c, e in ((11, 6), (40, 6), (5, 30)))
    prepared = hellaswag.prepare([fits, long, ending_long], model)
    assert prepared.cut == hellaswag.evaluate(model, prepared).cut == 2
    by_hand = [fits, long._replace(context=long.context[-11:]),
               Question(ending_long.context[-1:], [e[:16] for e in ending_long.endings], 0)]
    losses = hellaswag.ending_losses(model, prepared)
    assert torch.allclose(losses.float(), naive(lambda idx: model(idx[:, :17])[0] if idx.size(1) < 17 else
                                                model(idx[:, :16])[0].repeat(1, 2, 1)[:, :17], by_hand), atol=1e-3)


def test_padding_ids_and_other_vocabularies_are_refused():
    with pytest.raises(HellaSwagError, match="token 299.*ends at 199"):
        hellaswag.prepare([Question([299], [[1]] * 4, 0)], gpt(n_vocab=200))
    with pytest.raises(HellaSwagError, match="no HellaSwag questions"):
        hellaswag.evaluate(gpt(), [])


def test_autocast_compiled_and_random_state():
    model, questions = gpt(), made_up()
    plain = hellaswag.ending_losses(model, hellaswag.prepare(questions, model))
    state = torch.random.get_rng_state(), random.getstate()
    with torch.autocast("cpu", torch.bfloat16):
        low = hellaswag.ending_losses(model, hellaswag.prepare(questions, model))
        expected = naive(lambda idx: model(idx)[0], questions)
    assert torch.equal(state[0], torch.random.get_rng_state()) and state[1] == random.getstate()
    assert 0 < (low - plain).abs().max() < 3 and (low - expected).abs().mean() < 0.3
    assert all(p.grad is None for p in model.parameters()) and model.training


def test_compiled_models_score_the_same():
    model, questions = gpt(), made_up(30)
    compiled = torch.compile(model, backend="eager")  # what follows the graphs' capture, a C++ compiler, adds nothing
    compiled(torch.zeros(1, 8, dtype=torch.int64))  # really compiled, for the shape that training has
    expected = hellaswag.ending_losses(model, hellaswag.prepare(questions, model))
    torch._dynamo.utils.counters.clear()
    assert torch.equal(hellaswag.ending_losses(compiled, hellaswag.prepare(questions, compiled)), expected)
    assert not torch._dynamo.utils.counters["frames"]  # nothing is compiled anew for ragged batches


# ---------------------------------------------------------------------------------------------------- transformers
@functools.cache
def foreign(kind):
    """A tiny random transformers model: packable ones, and others that the packed row does not suit."""
    import transformers as t
    torch.manual_seed(0)
    small = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    config = {"llama": lambda: t.LlamaConfig(**small, num_key_value_heads=1),
              "bloom": lambda: t.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=2),  # ALiBi
              "granite": lambda: t.GraniteConfig(**small, logits_scaling=8.0)}[kind]()  # scales after the head
    model = t.AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


@pytest.mark.parametrize("kind, packed", [("llama", True), ("bloom", False), ("granite", False)])
def test_other_transformers_models(kind, packed):
    pytest.importorskip("transformers")
    model, questions = foreign(kind), made_up(8)
    same(model, questions, naive(lambda idx: model(idx).logits, questions), packed, tolerance=5e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny GPT of ours with GPT-2's vocabulary, exported for transformers without a tokenizer."""
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("hf") / "tiny"
    gpt(n_vocab=50257).save_pretrained(path)
    return path


def test_transformers_and_ours_agree_on_the_same_weights(folder):
    ours, questions = gpt(n_vocab=50257), made_up()
    theirs = hellaswag.load_model(str(folder))
    same(theirs, questions, hellaswag.ending_losses(ours, hellaswag.prepare(questions, ours)), packed=True)


def test_a_models_own_tokenizer_is_used(tmp_path, folder, gpt2_encoding):
    assert hellaswag.load_encode(folder)[0] == gpt2_encoding.encode_ordinary  # none there
    gpt(n_vocab=50257).save_pretrained(tmp_path / "gpt2", gpt2_encoding)
    encode, start = hellaswag.load_encode(tmp_path / "gpt2")
    text = " Naïve roofs, 3 of them:\n  'tis <|it| done"
    assert encode(text) == gpt2_encoding.encode_ordinary(text) and list(start) == []


# ------------------------------------------------------------------------------------------------------- processes
def one_of_two(rank, store, out):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    questions = made_up(50)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        score = hellaswag.evaluate(gpt(), hellaswag.prepare(questions, gpt()))
    open(f"{out}{rank}", "w").write(json.dumps(list(score)))
    dist.destroy_process_group()


def test_two_processes_are_one(tmp_path, monkeypatch):
    monkeypatch.setattr(hellaswag, "BUDGETS", {"cpu": (256, 156)})
    torch.multiprocessing.start_processes(one_of_two, (str(tmp_path / "store"), str(tmp_path / "out")), nprocs=2,
                                          start_method="fork" if sys.platform == "linux" else "spawn")
    alone = list(hellaswag.evaluate(gpt(), made_up(50)))
    assert [json.loads((tmp_path / f"out{rank}").read_text()) for rank in range(2)] == [alone, alone]


# ------------------------------------------------------------------------------------------------------------ data
def example(**changes):
    return {"ind": 1, "ctx": "A man is on a roof. he", "endings": ["falls off.", "sings.", "sleeps.", "is a roof."],
            "label": 3} | changes


def lines(*examples):
    return b"".join(e if isinstance(e, bytes) else json.dumps(e).encode() + b"\n" for e in examples)


def test_questions_come_in_file_order_with_labels_as_numbers(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_bytes(lines(example(), example(label="2", ctx="line\u2028separator"), example(label=0)))
    got = list(hellaswag.iterate_examples("val", path))
    assert [e["label"] for e in got] == [3, 2, 0] and got[0] == example()


@pytest.mark.parametrize("bad", [b"\n", b'{"ctx": "A ma', b"\xff\xfe\n", b"[1]\n", b"[" * 100_000, example(label=4),
                                 example(label=None), example(label=True), example(ctx=""), example(ctx=5),
                                 example(endings=["a"] * 3), example(endings=["a", "b", "c", ""]),
                                 example(endings="abcd")])
def test_a_damaged_line_is_named(bad, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(lines(example(), example(), bad))
    with pytest.raises(HellaSwagError, match=r"bad\.jsonl is damaged in line 3 \(.*\): .*\.$") as e:
        hellaswag.iterate_examples("val", path)
    assert "\n" not in str(e.value) and len(str(e.value)) < 400


def test_the_file_beside_the_script_must_be_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(hellaswag, "DATA", tmp_path / "hellaswag_val.jsonl")
    hellaswag.DATA.write_bytes(lines(*[example()] * 3))
    with pytest.raises(HellaSwagError, match="3 of 10,042 questions: delete it"):
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
        one_line(first, "HellaSwag can't be fetched (", str(data))
    assert [p.name for p in data.parent.glob("*")] == (["hellaswag_val.jsonl"] if ok else [])  # no leftovers
    server.shutdown()


# ---------------------------------------------------------------------------------------------------- command line
def one_line(result, *parts):
    """Assert that a script ended with exit code 1 and one sentence on stderr that holds the parts."""
    assert result.returncode == 1, result.stderr
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr, result.stderr
    assert all(part in result.stderr for part in parts), result.stderr


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_bytes(lines(*[example(label=i % 4) for i in range(12)], example(ctx="A man is on a roof. " * 30)))
    return path


def test_command_line_scores_a_folder(folder, data, gpt2_encoding):
    result = run_script("hellaswag.py", "-m", folder, "-d", "cpu", "--data", data)
    assert result.returncode == 0, result.stderr
    examples = list(hellaswag.iterate_examples("val", data))
    score = hellaswag.evaluate(gpt(n_vocab=50257), examples)
    for part in (f"acc      {score.acc:.4f} +- {score.acc_stderr:.4f}", f"acc_norm {score.acc_norm:.4f}", "13 ques",
                 "examples/s", "1 question", "0.2859 / 0.2955", "0.3842 / 0.4893", "0.337"):
        assert part in result.stdout
    assert "acc_norm" in result.stderr and "warn" not in result.stderr.lower()  # the progress bar alone


@pytest.fixture
def refusal(monkeypatch, capsys):
    """Function: what `hellaswag.py <args>` refuses with, run in this process (loading torch anew takes seconds)."""
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["hellaswag.py", *map(str, args)])
        with pytest.raises(SystemExit) as e:
            hellaswag.main()
        assert isinstance(e.value.code, str) and "\n" not in e.value.code and capsys.readouterr().err == ""
        return e.value.code  # Python prints it to stderr and exits with code 1
    return run


def test_bad_command_lines_are_one_line(data, tmp_path, refusal):
    one_line(run_script("hellaswag.py", "--limit", 0, "--data", data), "--limit 0")
    assert "many" in refusal("--limit", "many") and "--help" in refusal("--what")
    assert "-d abacus" in refusal("-d", "abacus", "--data", data)
    assert "none can't be read (No such file" in refusal("--data", tmp_path / "none")
    data.write_bytes(data.read_bytes() + b'{"ctx": ')
    assert "damaged in line 14" in refusal("--data", data)


def test_bad_models_are_one_line(data, tmp_path, folder, gpt2_encoding, refusal):
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    one_line(run_script("hellaswag.py", "-m", "nobody/nothing", "--data", data, env=env), "-m nobody/nothing")
    load = functools.partial(refusal, "-d", "cpu", "--data", data, "-m")
    assert "t.export('log/model_19073.pt', 'hf')" in load("log/model_19073.pt")
    (tmp_path / "empty").mkdir()
    assert "empty can't be loaded" in load(tmp_path / "empty")
    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:len(weights) // 2])
    assert "broken can't be loaded" in load(broken)
    config = json.loads((broken / "config.json").read_text()) | {"n_layer": 3}
    (broken / "config.json").write_text(json.dumps(config))
    (broken / "model.safetensors").write_bytes(weights)
    assert "lacks transformer.h.2" in load(broken)
    gpt(n_vocab=VOCAB).save_pretrained(tmp_path / "small")
    assert "the model's vocabulary ends at 299" in load(tmp_path / "small")


def test_without_the_vocabulary_it_says_so(data, tmp_path, folder):
    env = {"TIKTOKEN_CACHE_DIR": str(tmp_path / "none"), "HTTPS_PROXY": "http://127.0.0.1:9"}
    one_line(run_script("hellaswag.py", "-m", folder, "--data", data, "-d", "cpu", env=env), "TIKTOKEN_CACHE_DIR")


def test_importing_and_help_do_nothing_heavy(tmp_path):
    script = tmp_path / "probe.py"
    script.write_text(f"import sys; sys.path.insert(0, {os.path.dirname(hellaswag.__file__)!r})\nimport hellaswag\n"
                      "print(sorted({'transformers', 'datasets', 'huggingface_hub', 'tiktoken'} & set(sys.modules)))")
    result = run_script(script)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_help_is_quick_and_retells_the_use(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hellaswag.py", "--help"])
    with pytest.raises(SystemExit) as e:
        hellaswag.main()
    assert e.value.code == 0 and "--limit" in capsys.readouterr().out
