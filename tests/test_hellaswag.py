"""HellaSwag: scores are those of a plain loop, for any model; a mishap is one line."""
import datetime
import io
import json
import random
import shutil
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import one_line, run_python, shared
from torch.nn import functional as F

import hellaswag
from fineweb import UserError, get_encoding
from train_gpt2 import GPT, GPTConfig, save_hugging_face

VOCAB = 300
pytestmark = pytest.mark.usefixtures("one_thread")


def encode(text):
    """A text's numbers are its tokens: made-up questions need no vocabulary. Words are 0."""
    return [int(word) if word.isdigit() else 0 for word in text.split()]


def ids(numbers):
    return " ".join(map(str, numbers))


def made_up(n=20, seed=0):
    """Questions of random ids. Some endings are a single token, some contexts too."""
    r = random.Random(seed)

    def text(longest):
        return ids(r.randrange(VOCAB) for _ in range(r.randint(1, longest)))
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


def logits_of(model):
    """A function from ids to logits, which does not look like a model of ours."""
    return lambda idx: model(idx)[0]


@torch.no_grad()
def naive(logits, questions, encode=encode):
    """Summed losses (Q, 4) and lengths (Q, 4) of a plain loop: one ending at a time, unpadded."""
    sums, lengths = [], []
    for question in questions:
        context, endings = hellaswag.tokenize(question, encode)
        for ending in endings:
            predicted = logits(torch.tensor([context + ending[:-1]]))[0, len(context) - 1:].float()
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


def assert_same(model, questions, logits, encode=encode):
    """The losses per token are those of a plain loop; the score is what follows from them."""
    sums, lengths = naive(logits, questions, encode)
    losses, counted = ending_losses(model, questions, encode)
    assert torch.equal(lengths, counted)
    assert ((losses - sums) / lengths).abs().max() < 5e-5
    labels = torch.tensor([question["label"] for question in questions])
    acc = (sums.argmin(1) == labels).double().mean().item()
    acc_norm = ((sums / lengths).argmin(1) == labels).double().mean().item()
    score = hellaswag.evaluate(model, hellaswag.prepare(questions, model, encode))
    assert score == (acc, acc_norm, len(questions), 0)


# ------------------------------------------------------------------------------- exactness
def test_made_up_questions_score_as_in_a_plain_loop():
    model = gpt()
    assert_same(model, made_up(40), logits_of(model))             # packed
    assert_same(logits_of(model), made_up(40), logits_of(model))  # a row per ending


def test_real_questions_score_as_in_a_plain_loop(gpt2_encoding, monkeypatch):
    monkeypatch.setattr(hellaswag, "DATA", shared("hellaswag/hellaswag_val.jsonl"))
    model = gpt(n_vocab=50257, block_size=256)
    some = list(hellaswag.iterate_examples("val"))[::1500]
    assert_same(model, some, logits_of(model), hellaswag.gpt2_encode)


def test_render_example_pads_four_rows(gpt2_encoding):
    data, tokens, mask, label = hellaswag.render_example(example())
    assert tokens.shape == mask.shape and len(tokens) == 4 and label == 3
    for row, on, ending in zip(tokens, mask, example()["endings"], strict=True):
        assert gpt2_encoding.decode(row[on.bool()].tolist()) == " " + ending
        assert row[:len(data["context"])].tolist() == gpt2_encoding.encode(example()["ctx"])
    model = gpt(n_vocab=50257)
    with torch.no_grad():
        losses = F.cross_entropy(model(tokens)[0][:, :-1].mT, tokens[:, 1:], reduction="none")
    sums, _ = ending_losses(model, [example()], hellaswag.gpt2_encode)
    assert torch.allclose((losses * mask[:, 1:]).sum(1).double(), sums[0])


def test_another_transformers_model():
    t = pytest.importorskip("transformers")
    config = t.LlamaConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=64,
                           num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64)
    model = init(t.LlamaForCausalLM(config).eval())
    assert_same(model, made_up(8), lambda idx: model(idx).logits)


def test_compiled_models_score_the_same_and_are_not_compiled_anew():
    graphs = []

    def backend(graph, inputs):  # what follows the capture of a graph, a C++ compiler, adds nothing
        graphs.append(graph)
        return graph.forward
    model = gpt()
    for plain in (model, logits_of(model)):
        compiled = torch.compile(plain, backend=backend)
        graphs.clear()
        compiled(torch.zeros(1, 8, dtype=torch.int64))  # for the shape that training has
        assert_same(compiled, made_up(30), logits_of(model))
        assert len(graphs) == 1


def test_memory_is_bounded_whatever_the_questions(monkeypatch):
    monkeypatch.setattr(hellaswag, "CPU_BATCH", 768)
    model, questions, rows = gpt(), made_up(60), []
    sums, lengths = naive(logits_of(model), questions)
    to_logits = model.to_logits
    monkeypatch.setattr(model, "to_logits", lambda x: rows.append(len(x)) or to_logits(x))
    assert (ending_losses(model, questions)[0] - sums).abs().max() < 1e-4
    assert max(rows) == 256
    assert sum(rows) == lengths.sum()  # nowhere but where an ending is predicted
    assert max(batch.tokens.numel() for batch in prepare(questions, model).batches) <= 768
    batches = prepare(questions, logits_of(model)).batches  # logits for each of the tokens
    assert max(batch.tokens.numel() for batch in batches) <= 256


def test_a_long_question_loses_the_left_of_its_context():
    def question(context, ending):
        return {"ctx": ids(context), "endings": [ids(ending), "7 8", "9 1 2", "5"], "label": 0}
    six, short = range(20, 26), {"ctx": "3", "endings": [*"4567"], "label": 0}  # mostly padding
    questions = [question(range(11), six), short, question(range(40), six),
                 question([3, 4, 5], range(50, 80))]
    by_hand = [question(range(11), six), short, question(range(29, 40), six),
               question([5], range(50, 66))]
    model = gpt(block_size=16)
    assert hellaswag.evaluate(model, prepare(questions, model)).cut == 2
    expected = naive(logits_of(model), by_hand)[0]
    assert torch.allclose(ending_losses(model, questions)[0], expected, atol=1e-4)


def test_scoring_leaves_the_training_as_it_was():
    """It runs in the caller's autocast, draws nothing, and does without cuDNN and gradients."""
    model, questions = gpt(), made_up()
    state, seen = torch.random.get_rng_state(), set()
    model.transformer.wte.register_forward_hook(lambda *_: seen.add(
        (torch.backends.cuda.cudnn_sdp_enabled(), torch.is_grad_enabled())))
    plain = ending_losses(model, questions)[0]
    assert seen == {(False, False)} and torch.backends.cuda.cudnn_sdp_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        low = ending_losses(model, questions)[0]
        expected = naive(logits_of(model), questions)[0]
    assert torch.equal(state, torch.random.get_rng_state())
    assert 0 < (low - plain).abs().max() < 3 and (low - expected).abs().mean() < 0.3


def one_of_two(rank, store, expected):
    """A rank's score; and that each raises if rank 1's model is broken. Rank 1 has a batch less."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2,
                            timeout=datetime.timedelta(minutes=2))
    hellaswag.CPU_BATCH = 256
    model = gpt()
    prepared = prepare(made_up(50), model)
    assert len(prepared.batches) % 2 == 1
    assert hellaswag.evaluate(model, prepared) == expected
    if rank == 1:
        torch.nn.init.constant_(model.lm_head.weight, float("inf"))
    with pytest.raises(UserError, match="losses are not finite"):
        hellaswag.evaluate(model, prepared)
    dist.destroy_process_group()


def test_two_processes_are_one(tmp_path):
    method = "fork" if sys.platform == "linux" else "spawn"
    expected = hellaswag.evaluate(gpt(), prepare(made_up(50), gpt()))
    torch.multiprocessing.start_processes(one_of_two, (str(tmp_path / "store"), expected),
                                          nprocs=2, start_method=method)


# ------------------------------------------------------------------------------------ data
def example(**changes):
    return {"ind": 1, "ctx": "A man is on a roof. he", "label": 3,
            "endings": ["falls off.", "sings.", "sleeps.", "is a roof."]} | changes


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Function: put questions, dicts or raw lines, where HellaSwag is looked for."""
    monkeypatch.setattr(hellaswag, "DATA", tmp_path / "hellaswag" / "hellaswag_val.jsonl")
    monkeypatch.setattr(hellaswag, "TOTAL", 3)

    def put(*examples):
        lines = [e if isinstance(e, bytes) else json.dumps(e).encode() for e in examples]
        hellaswag.DATA.parent.mkdir()
        hellaswag.DATA.write_bytes(b"\n".join(lines) + b"\n")
    return put


def test_questions_come_in_file_order_with_labels_as_numbers(data):
    data(example(), example(label="2", ctx="line\u2028separator"), example(label=0))
    got = list(hellaswag.iterate_examples("val"))
    assert [e["label"] for e in got] == [3, 2, 0] and got[0] == example()


@pytest.mark.parametrize("last", [
    (), (b'{"ctx": "A ma',), (b"\xff\xfe",), (example(label=4),), (example(label=""),),
    (b'{"ctx": ""}',), (example(), example())])
def test_damaged_questions_are_one_line(last, data):
    data(example(), example(), *last)
    with pytest.raises(UserError, match=r"^/.*\.jsonl is damaged \(.+\): delete it.*\Z"):
        hellaswag.iterate_examples("val")


@pytest.fixture
def fetch(hub, data, monkeypatch):
    """Function: iterate_examples() where the hub has n questions, or these bytes."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    huggingface_hub.logging.set_verbosity_warning()
    huggingface_hub.logging.enable_propagation()  # to caplog
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    hub.enter(monkeypatch)

    def start(n=3, content=None):
        rows, file = [example(label=str(i), ctx_a="A man") for i in range(n)], io.BytesIO()
        parquet.write_table(arrow.Table.from_pylist(rows), file)
        content = content or file.getvalue()
        hub.files["Rowan/hellaswag"] = {"default/validation/0000.parquet": content}
        return list(hellaswag.iterate_examples("val"))
    return start


def test_fetching_from_a_hub_that_is_busy_at_first(fetch, hub, capsys, caplog):
    hub.fail = lambda path, span: 503 if len(hub.log) <= 2 else None
    assert [e["label"] for e in fetch()] == [0, 1, 2]
    asked = len(hub.log)
    assert [e["label"] for e in hellaswag.iterate_examples("val")] == [0, 1, 2]
    assert len(hub.log) == asked > 2 and "refs/convert/parquet" in hub.log[0][1]  # fetched once
    assert json.loads(hellaswag.DATA.read_text().splitlines()[0])["ctx_a"] == "A man"
    assert list(hellaswag.DATA.parent.iterdir()) == [hellaswag.DATA]  # no leftovers
    out = capsys.readouterr().out
    assert out.startswith("downloading HellaSwag") and out.count("\n") == 1 and not caplog.records


@pytest.mark.parametrize("n, content, reason", [
    (2, None, "2 of 3 questions"), (3, b"PAR1 not", "[Pp]arquet"), (3, "missing", "404"),
    (3, "offline", "offline")])
def test_no_good_download_is_one_line(n, content, reason, fetch, hub, capsys, monkeypatch):
    hub.fail = lambda path, span: 404 if content == "missing" else None
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", content == "offline")
    pattern = fr"^HellaSwag .* http://127.* \(.*{reason}.*\): .*HF_ENDPOINT, .* at /.*\.jsonl\.\Z"
    with pytest.raises(UserError, match=pattern):
        fetch(n, content if isinstance(content, bytes) else None)
    assert not hellaswag.DATA.exists() and capsys.readouterr().err == ""


# ---------------------------------------------------------------------------- command line
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny GPT of ours with GPT-2's vocabulary, exported without a tokenizer."""
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("hf") / "tiny"
    save_hugging_face(gpt(n_vocab=50257), path)
    return path


@pytest.fixture
def main(data, monkeypatch):
    """Function: `hellaswag.py -d cpu <args>` in this process, of two questions and a long one."""
    data(example(), example(label=1), example(ctx="A man is on a roof. " * 30))

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["hellaswag.py", "-d", "cpu", *map(str, args)])
        hellaswag.main()
    return run


def test_command_line_scores_a_folder(folder, main, gpt2_encoding, capsys):
    main("-m", folder)
    out, err = capsys.readouterr()
    score = hellaswag.evaluate(gpt(n_vocab=50257), list(hellaswag.iterate_examples("val")))
    error = (score.acc * (1 - score.acc) / 3) ** 0.5
    for part in (f"acc      {score.acc:.4f} +- {error:.4f}", f"acc_norm {score.acc_norm:.4f}",
                 "3 questions (1 cut", "0.2859 / 0.2955"):
        assert part in out
    assert "batch" in err and "warn" not in err.lower()  # the progress bar alone
    main("-m", folder, "--limit", 2)
    assert "2 questions (0 cut" in capsys.readouterr().out


def test_transformers_and_ours_agree_on_the_same_weights(folder):
    theirs, text_to_ids = hellaswag.load_model(str(folder), "cpu")
    assert text_to_ids == hellaswag.gpt2_encode
    assert_same(theirs, made_up(), logits_of(gpt(n_vocab=50257)))


def test_another_vocabulary_comes_with_its_tokenizer(tmp_path):
    pytest.importorskip("transformers")
    save_hugging_face(gpt(n_vocab=257), tmp_path, get_encoding("bytes"))
    text_to_ids = hellaswag.load_model(str(tmp_path), "cpu")[1]
    question = {"ctx": "ab", "endings": ["c", "d", "e", "f g"]}
    endings = [[32, 99], [32, 100], [32, 101], [32, 102, 32, 103]]
    assert hellaswag.tokenize(question, text_to_ids) == ([97, 98], endings)
    assert hellaswag.tokenize(question, lambda text: [1, *text.encode()]) == ([1, 97, 98], endings)


def test_bad_models_are_one_line(tmp_path, folder, main, monkeypatch, capsys):
    """No such; a pickle; a layer without weights; no tokenizer; Python code of its own."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("builtins.input", lambda prompt: "y")  # were anybody asked
    pickle, layer, code = (shutil.copytree(folder, tmp_path / name) for name in "abc")
    load_file = pytest.importorskip("safetensors.torch").load_file
    torch.save(load_file(pickle / "model.safetensors"), pickle / "pytorch_model.bin")
    (pickle / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    (layer / "config.json").write_text(json.dumps(config | {"n_layer": 3}))
    save_hugging_face(gpt(), tmp_path / "small")
    (code / "code.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')")
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (code / "config.json").write_text(json.dumps({"model_type": "new", "auto_map": auto_map}))
    for name, reason in (("nobody/nothing", ""), (pickle, ""), (layer, "lacks transformer.h.2"),
                         (tmp_path / "small", "no tokenizer"), (code, "")):
        with pytest.raises(SystemExit) as e:
            main("-m", name)
        one_line(f"{e.value.code}\n", f"-m {name} cannot be loaded on -d cpu", reason)
    assert capsys.readouterr().err == "" and not (tmp_path / "was_run").exists()


def test_importing_loads_nothing_heavy_and_a_mistake_is_one_line():
    code = ("import sys, hellaswag; sys.argv = ['hellaswag.py', '--limit', 'many']\n"
            "print({'transformers', 'datasets', 'huggingface_hub', 'pyarrow'} & set(sys.modules))\n"
            "hellaswag.main()")
    done = run_python(code)
    assert (done.returncode, done.stdout) == (1, "set()\n")
    one_line(done.stderr, "many", "--help")
