"""Tests of loading Hugging Face weights, exporting models to Hugging Face, and sampling."""
import dataclasses
import json
import os
from unittest import mock

import pytest
import torch
from conftest import ROOT, TINY, Forked, one_line, read_log, write_text
from test_model import ids, shake

import train_gpt2 as t

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
safetensors = pytest.importorskip("safetensors.torch")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

pytestmark = pytest.mark.usefixtures("is_gpt2")
ODD_TEXT = ("Don't , stop . it's  \n\n\t \r\n naïve e\u0301 ﬁ 日本語 🙂👩‍👩‍👧 \u200b\u2028"
            "\ufeff\xa0\x85 \x00\x07\x1b[0m ١٢٣ ²½Ⅷ ſİ 'LL we'Ll 1234567 !?.. " + "x" * 300)

def hf_model(**constants):
    """Return a small GPT-2 from transformers, with random weights."""
    defaults = dict(vocab_size=257, n_positions=32, n_layer=2, n_head=2, n_embd=16)
    config = transformers.GPT2Config(**defaults | constants, bos_token_id=0, eos_token_id=0)
    return shake(transformers.GPT2LMHeadModel(config)).eval()

def our_model(n_vocab=257, block_size=32):
    """Return a small GPT of ours with random weights. The rows of its padding are zero."""
    model = shake(t.GPT(t.GPTConfig(block_size=block_size, n_layer=2,
                                    n_head=2, n_embd=16, n_vocab=n_vocab)))
    model.lm_head.weight.data[n_vocab:] = 0
    return model

@torch.no_grad()
def assert_same_logits(ours, theirs):
    """Assert that our model and one from transformers return logits that are equal to 1e-5."""
    a, b = ours(ids())[0], theirs(ids()).logits
    assert a.shape == b.shape == (4, 32, theirs.config.vocab_size)
    assert b.std() > 0.1  # otherwise 1e-5 would prove nothing
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)

def assert_same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)

@pytest.mark.parametrize("n_layer, n_head, n_vocab, dtype", [
    (12, 12, 257, torch.float32), (48, 25, 257, torch.bfloat16), (1, 8, 50257, torch.float32)])
def test_weights_of_every_shape_are_loaded(n_layer, n_head, n_vocab, dtype, tmp_path, request):
    """A loaded model has the same logits as the model in transformers and is always in float32.

    The cases cover the numbers of layers and heads of GPT-2 (124M) and GPT-2 XL, half precision,
    and GPT-2's vocabulary.
    """
    if n_vocab == 50257:
        request.getfixturevalue("gpt2_encoding")
    hf = hf_model(n_layer=n_layer, n_head=n_head, n_embd=2 * n_head, vocab_size=n_vocab).to(dtype)
    hf.save_pretrained(tmp_path, max_shard_size="100KB")
    model = t.GPT.from_pretrained(tmp_path, dropout=0.3)
    assert model.config == t.GPTConfig(
        block_size=32, n_vocab=n_vocab, n_layer=n_layer,
        n_head=n_head, n_embd=2 * n_head, dropout=0.3)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not model.lm_head.weight[n_vocab:].any()
    assert_same_logits(model, hf.float())

def test_weights_in_the_format_of_the_hub_are_loaded(tmp_path):
    """A model is loaded from a file in the format of GPT-2 on the hub.

    This format has no lm_head and no "transformer." in its names, and it contains attention masks.
    """
    hf = hf_model()
    hf.save_pretrained(tmp_path)
    weights = safetensors.load_file(tmp_path / "model.safetensors")
    weights = {key.removeprefix("transformer."): weight for key, weight in weights.items()}
    weights |= {f"h.{i}.attn.bias": torch.ones(1, 1, 32, 32).tril() for i in range(2)}
    safetensors.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert_same_logits(t.gpt_from_hugging_face(tmp_path), hf)

@pytest.fixture(params=("bytes", "gpt2", "p50k_base", "cl100k_base"))
def encoding(request):
    """Return each of these encodings, or skip the test if one is not available offline."""
    try:
        t.encoding_arguments(request.param)  # the export also needs these files
        return t.get_encoding(request.param)
    except (OSError, ValueError, t.UserError) as e:
        pytest.skip(f"the encoding {request.param} is not available ({type(e).__name__})")

# <|endoftext|> is the last id of the encoding bytes, but not of p50k_base
@pytest.mark.parametrize("encoding", ["bytes", "p50k_base"], indirect=True)
def test_an_exported_folder_can_be_loaded_and_used(encoding, tmp_path):
    """AutoModel, our own code and a pipeline can use the folder, with the same logits and weights.

    A pipeline without max_new_tokens stops at the end of the context, even if the default of 256
    tokens is larger.
    """
    model = our_model(encoding.n_vocab, block_size=64)
    t.save_hugging_face(model, tmp_path, encoding)
    assert_same_weights(t.GPT.from_pretrained(str(tmp_path)), model)
    assert json.loads((tmp_path / "config.json").read_text())["n_ctx"] == 64  # for llama.cpp
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(hf.config, name) == getattr(hf.generation_config, name) == encoding.eot_token
    assert_same_logits(model, hf)
    pipe = transformers.pipeline("text-generation", model=str(tmp_path))
    made = pipe("To be", max_new_tokens=6, do_sample=False, return_tensors=True)
    expected = model.generate(torch.tensor([encoding.encode("To be")]), 6, temperature=0)
    n = len(made[0]["generated_token_ids"])  # smaller if the model ended the text
    assert list(made[0]["generated_token_ids"]) == expected[0].tolist()[:n]
    assert pipe("To be")[0]["generated_text"].startswith("To be")

def test_the_exported_tokenizer_equals_that_of_tiktoken(encoding, tmp_path):
    """Texts with unusual characters and special tokens get the same ids. Decoding restores them."""
    t.hugging_face_tokenizer(encoding, 32).save_pretrained(tmp_path)
    transformers.GPT2Config(n_layer=1).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == encoding.n_vocab
    assert tokenizer.eos_token_id == encoding.eot_token and tokenizer.model_max_length == 32
    plays = (ROOT / "input.txt").read_text()[:20_000]
    special = " x".join(sorted(encoding.special_tokens_set))
    for text in (ODD_TEXT, plays, f"<|endoftext|>{ODD_TEXT}{special} \n", "", "<|endof"):
        tokens = encoding.encode(text, allowed_special="all")
        assert tokenizer(text)["input_ids"] == tokens
        assert tokenizer.decode(tokens) == text
        for token in encoding.special_tokens_set:
            text = text.replace(token, "")
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text

def forked(cwd, **changes):
    """Start a run in the folder cwd, with log_dir=log. Return the Forked run.

    The given weights determine the model's shape and encoding, and `epochs` determines the number
    of steps.
    """
    constants = dict(data="text.txt", log_dir="log", T=32, total_batch_size=256, epochs=0.02,
                     save_every=1, eval_every=2, sample_every=4, val_tokens=2048)
    without = ("n_layer", "n_head", "n_embd", "encoding", "max_steps")
    return Forked(None, cwd=cwd, hide=["matplotlib"], without=without, **constants | changes)

@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a finished run that started from a Hugging Face folder.

    run.folder is the folder it ran in, and run.hf is the model from transformers.
    """
    folder = tmp_path_factory.mktemp("run")
    write_text(folder)
    hf = hf_model(n_positions=48)
    hf.save_pretrained(folder / "start")
    run = forked(folder, init_from="start", sample_prompt="Grüße", log_dir="log/")
    assert run.wait() == 0, run.err
    run.folder, run.hf = folder, hf
    return run

def test_a_run_starts_from_a_hugging_face_folder(trained):
    """The first validation loss is that of the given model, and the last checkpoint is exported.

    When the run continues, the folder that it started from is not needed.
    """
    cfg = t.Config(data=f"{trained.folder}/text.txt", T=32)
    x, y = t.open_data(cfg, t.get_encoding("bytes"))[1].batch(0, 64)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(trained.hf(x).logits.flatten(0, 1), y.flatten())
    assert abs(read_log(trained.folder / "log")[0, "val"] - loss.item()) < 1e-4
    weights = t.read_weights(f"{trained.folder}/log/checkpoint_00004.pt")
    last = t.GPT.from_pretrained(weights)
    assert (last.config.block_size, weights.spec.encoding_name) == (48, "bytes")
    assert not torch.equal(last.transformer.ln_f.bias, trained.hf.transformer.ln_f.bias)
    assert_same_weights(t.gpt_from_hugging_face(trained.folder / "log" / "hf"), last)
    given = {"data": f"{trained.folder}/text.txt", "log_dir": f"{trained.folder}/log"}
    assert t.resolve_config(given | {"init_from": "gone"})[0].n_embd == 16  # from log/
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained.folder / "log" / "hf")
    assert tokenizer("Grüße")["input_ids"] == [*"Grüße".encode()]  # the folder is complete
    for words in ("FINETUNE", "init_from=start", "4 steps, 1,024 tokens, 0.02 epochs",
                  "exported log/checkpoint_00004.pt to log/hf/", "sample at step 4 ---\nGrüße"):
        assert words in trained.out
    assert "//" not in trained.out

def test_samples_are_drawn_from_the_newest_weights(trained):
    """Sampling needs no data, writes no file, and names the file of the weights.

    The same settings give the same texts. Another seed, temperature or top_k gives other texts.
    """
    def sampled(name="log/checkpoint_00004.pt", **changes):
        run = forked(trained.folder, **dict(data="nowhere", sample=2, sample_prompt="Oh") | changes)
        assert run.wait() == 0, run.err
        said, _, texts = run.out.partition("\n")
        assert said == f"Samples from {name}:"
        return texts
    before = {path: path.read_bytes() for path in trained.folder.glob("log/*.*")}
    out = sampled()
    first, second, _ = out.split("\n---\n")
    assert first.startswith("Oh") and second.startswith("Oh") and first != second
    assert sampled() == out
    assert all(sampled(**{name: value}) != out
               for name, value in (("seed", 2), ("temperature", 0.1), ("top_k", 1)))
    for name, file in (("log/hf", "log/hf"), *[(x, "log/checkpoint_00004.pt") for x in (
            "log/checkpoint_00004.pt", "log")]):
        assert sampled(file, init_from=name, log_dir="none") == out
    assert {path: path.read_bytes() for path in trained.folder.glob("log/*.*")} == before
    assert not (trained.folder / "none").exists()
    assert sampled(sample_prompt="").startswith("<|endoftext|>")

def test_samples_of_unusual_texts(monkeypatch):
    """Bytes that are not valid UTF-8 are escaped. A sample ends where the model ends the text.

    A special token in a prompt is encoded as ordinary text.
    """
    monkeypatch.setattr(t.GPT, "generate", generate := mock.Mock())
    cfg = t.Config(sample_prompt="<|endoftext|>", sample_tokens=7, temperature=0.5, top_k=3)
    for made, text in (([195, 97, 195, 169], "\\xc3aé"),
                       ([*b"<|endoftext|>ab", 256, 97], "<|endoftext|>ab")):  # 256 ends the text
        generate.return_value = torch.tensor([made])
        assert t.sample_text(our_model(), t.get_encoding("bytes"), cfg, seed=1) == text
    assert generate.call_args.args[0].tolist() == [[*b"<|endoftext|>"]]
    assert generate.call_args.args[1] == 7

# Pairs: changes to config.json, or a function that damages the folder; a part of the message
BAD_FOLDERS = [
    (dict(activation_function="relu"), "logits differ by"),
    (dict(n_layer=3), "it lacks transformer.h.2.*"), (dict(n_positions=40), "mismatched"),
    (lambda folder: (folder / "config.json").write_text("{"), "JSON"),
    (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    (lambda folder: os.truncate(folder / "model.safetensors", 5000), "")]

@pytest.mark.parametrize("change, expected", BAD_FOLDERS)
def test_a_bad_folder_is_reported_in_one_line(change, expected, tmp_path):
    """A folder that is damaged, or whose model is not GPT-2, is refused with the reason."""
    hf_model().save_pretrained(tmp_path)
    if callable(change):
        change(tmp_path)
    else:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(t.UserError, match=rf"cannot be loaded .*{expected}") as e:
        t.gpt_from_hugging_face(tmp_path)
    assert "\n" not in str(e.value)

def save_checkpoint(path, model, **more):
    """Save a model in a checkpoint that was written by other code. Add the tensors in `more`."""
    torch.save({"eval_model": model.state_dict() | more, "encoding": "bytes", "code": 7,
                "gpt_config": dataclasses.asdict(model.config), "state": {}}, path)

def test_weights_can_be_loaded_into_a_model_with_added_parameters(tmp_path, monkeypatch, capsys):
    """Added parameters, such as LoRA for GPT-2, keep their initial values, and a line says so.

    If the source is the folder of a run, its checkpoint with the lowest validation loss is loaded.
    """
    def __init__(self, config):
        real(self, config)
        self.gate = torch.nn.Parameter(torch.full((config.width,), 0.5))
    real, model = t.CausalSelfAttention.__init__, our_model()
    for step, saved in enumerate((our_model(block_size=16), model, our_model(block_size=64))):
        save_checkpoint(tmp_path / f"checkpoint_0000{step}.pt", saved)
    (tmp_path / "log.txt").write_text("0 val 3.0\n1 val 2.0\n2 val 2.5\n")
    wider = dataclasses.make_dataclass("Wider", [("width", int, 4)], bases=(t.GPTConfig,))
    monkeypatch.setattr(t, "GPTConfig", wider)
    monkeypatch.setattr(t.CausalSelfAttention, "__init__", __init__)
    weights = t.GPT.from_pretrained(tmp_path, width=5).state_dict()
    best = tmp_path / "checkpoint_00001.pt"
    assert f"!!! {best} lacks transformer.h.0.attn.gate. 2 tensor" in capsys.readouterr().out
    assert weights["transformer.h.1.attn.gate"].tolist() == [0.5] * 5
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())

# {name of a mistake: (changed constants, parts of the message)}
BAD_NAMES = {
    "context too short": (dict(init_from="start", T=64), ["start has 257", "48", "T=64"]),
    "another vocabulary": (dict(init_from="other.pt"), ["other.pt", "300"]),
    "weights of another model": (dict(init_from="extra.pt"), ["extra.pt does not fit", "new_gain"]),
    "damaged .pt": (dict(init_from="bad.pt"), ["train_gpt2.py: bad.pt cannot be read", "zip"]),
    "unreachable hub": (dict(init_from="gpt2-medium"), ["gpt2-medium is neither", "connect to"]),
    "neither here nor there": (dict(init_from="gtp2"),
                               ["gtp2 is neither a .pt file nor a run", "Hugging Face"]),
    "nanoGPT's word for continuing": (dict(init_from="resume"), ["resume is not needed", "log_d"]),
    "nothing to sample": (dict(sample=1), ["log_dir=bad holds no weights", "--init_from"])}

@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_bad_name_is_reported_in_one_line(name, trained):
    """Weights that do not exist, are damaged or do not fit are refused, and the line says why."""
    changes, expected = BAD_NAMES[name]
    save_checkpoint(trained.folder / "other.pt", our_model(n_vocab=300))
    save_checkpoint(trained.folder / "extra.pt", our_model(), new_gain=torch.ones(1))
    (trained.folder / "bad.pt").write_text("half a file")
    run = forked(trained.folder, **dict(log_dir="bad") | changes)
    assert run.wait() == 1
    one_line(run.err.splitlines(keepends=True)[-1], *expected)  # after a progress bar
    reported = {path for path in ("extra.pt", "other.pt")
                if f"Note: {path} was written by different code." in run.out}
    given = {"weights of another model": {"extra.pt"}, "another vocabulary": {"other.pt"}}
    assert reported == given.get(name, set())
