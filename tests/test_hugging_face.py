"""Tests of loading Hugging Face weights, exporting models to Hugging Face, and sampling."""
import dataclasses
import json
import os
import re
from pathlib import Path

import pytest
import torch
from conftest import (
    ROOT, Bomb, Training, assert_refused, ids, read_log, shake, succeed, write_text)

import fineweb
import train_gpt2 as t

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
safetensors = pytest.importorskip("safetensors.torch")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

ODD_TEXT = ("Don't , stop . it's  \n\n\t \r\n naïve e\u0301 ﬁ 日本語 🙂👩‍👩‍👧 \u200b\u2028"
            "\ufeff\xa0\x85 \x00\x07\x1b[0m ١٢٣ ²½Ⅷ ſİ 'LL we'Ll 1234567 !?.. " + "x" * 300)

def hf_model(**constants):
    """Return a small GPT-2 from transformers, with random weights."""
    defaults = dict(vocab_size=257, n_positions=32, n_layer=2, n_head=2, n_embd=16)
    config = transformers.GPT2Config(**defaults | constants, bos_token_id=0, eos_token_id=0)
    return shake(transformers.GPT2LMHeadModel(config)).eval()

def our_model(**constants):
    """Return a small GPT of ours, with random weights."""
    defaults = dict(block_size=32, n_layer=2, n_head=2, n_embd=16, vocab_size=257, encoding="bytes")
    return shake(t.GPT(t.GPTConfig(**defaults | constants), seed=1))

@torch.no_grad()
def assert_same_logits(ours, theirs):
    """Assert that our model and one from transformers return logits that are equal to 1e-4."""
    a, b = ours(ids())[0], theirs(ids()).logits
    assert a.shape == b.shape == (4, 32, theirs.config.vocab_size)
    assert b.std() > 0.1  # otherwise 1e-4 would prove nothing
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)

@pytest.mark.parametrize("n_layer, n_head, vocab_size, encoding, dtype", [
    (12, 12, 257, "bytes", torch.float32), (48, 25, 300, "mine", torch.bfloat16),
    (1, 8, 50257, "gpt2", torch.float32)])
def test_weights_of_every_shape_are_loaded(
        n_layer, n_head, vocab_size, encoding, dtype, tmp_path, request):
    """A loaded model has the same logits as the model in transformers and is always in float32.

    The cases cover the numbers of layers and heads of GPT-2 (124M) and GPT-2 XL, half precision,
    GPT-2's vocabulary, and one that belongs to no known encoding.
    """
    if encoding == "gpt2":
        request.getfixturevalue("gpt2_encoding")
    hf = hf_model(n_layer=n_layer, n_head=n_head, n_embd=2 * n_head, vocab_size=vocab_size)
    hf.to(dtype).save_pretrained(tmp_path, max_shard_size="100KB")
    model = t.GPT.from_pretrained(tmp_path, dropout=0.3, encoding="mine")
    assert model.config == t.GPTConfig(
        block_size=32, vocab_size=vocab_size, n_layer=n_layer, n_head=n_head, n_embd=2 * n_head,
        dropout=0.3, encoding=encoding)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not model.lm_head.weight[vocab_size:].any()
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
    assert_same_logits(t.GPT.from_pretrained(tmp_path), hf)

def test_an_exported_folder_can_be_loaded_and_used(tmp_path):
    """AutoModel, our own code and a pipeline can use the folder, with the same logits and weights.

    A pipeline without max_new_tokens stops at the end of the context, even if the default of 256
    tokens is larger.
    """
    model = our_model(block_size=64)
    t.save_hugging_face(model, tmp_path)
    again = t.GPT.from_pretrained(str(tmp_path)).state_dict()
    for name, weight in model.state_dict().items():
        n_rows = 257 if name in ("transformer.wte.weight", "lm_head.weight") else len(weight)
        assert torch.equal(again[name][:n_rows], weight[:n_rows]), name
    assert json.loads((tmp_path / "config.json").read_text())["n_ctx"] == 64  # for llama.cpp
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(hf.config, name) == getattr(hf.generation_config, name) == 256
    assert_same_logits(model, hf)
    pipe = transformers.pipeline("text-generation", model=str(tmp_path))
    made = pipe("To be", max_new_tokens=6, do_sample=False, return_tensors=True)
    expected = model.generate(torch.tensor([[*b"To be"]]), 6, temperature=0)
    n = len(made[0]["generated_token_ids"])  # smaller if the model ended the text
    assert list(made[0]["generated_token_ids"]) == expected[0].tolist()[:n]
    assert pipe("To be")[0]["generated_text"].startswith("To be")

@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_the_exported_tokenizer_equals_that_of_tiktoken(name, tmp_path, gpt2_encoding):
    """Texts with unusual characters and <|endoftext|> get the same ids. Decoding restores them."""
    enc = fineweb.get_encoding(name)
    fineweb.save_tokenizer(enc, tmp_path, context=32)
    # Version 4 of transformers does not know the name TokenizersBackend
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == enc.n_vocab and tokenizer.model_max_length == 32
    assert tokenizer.eos_token_id == enc.eot_token
    plays = (ROOT / "input.txt").read_text(encoding="utf-8")[:20_000]
    for text in (ODD_TEXT, plays, f"<|endoftext|>{ODD_TEXT}<|endoftext|> \n", "", "<|endof"):
        tokens = enc.encode(text, allowed_special="all")
        assert tokenizer(text)["input_ids"] == tokens
        assert tokenizer.decode(tokens) == text
        text = text.replace("<|endoftext|>", "")
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text

def save_checkpoint(path, model):
    torch.save({"model": model.state_dict(), "step": 3, "best_step": None, "best_loss": 9.0,
                "gpt_config": dataclasses.asdict(model.config)}, path)

@pytest.mark.parametrize("edit", ["scale", "end of text"])
@pytest.mark.usefixtures("gpt2_encoding")
def test_a_model_that_is_no_longer_gpt2_is_not_exported(edit, monkeypatch, tmp_path, capsys):
    """Nothing is written if transformers would compute other logits, and one line says so.

    This includes a model that differs only after <|endoftext|>.
    """
    def forward(self, idx, *args, **words):
        if edit == "scale":
            logits, loss = real(self, idx, *args, **words)
            return 1.01 * logits, loss
        return real(self, torch.where((idx == 50256).cumsum(1) > 0, 0, idx), *args, **words)
    real = t.GPT.forward
    monkeypatch.setattr(t.GPT, "forward", forward)
    save_checkpoint(tmp_path / "checkpoint_00003.pt", our_model(vocab_size=50257, encoding="gpt2"))
    t.export(str(tmp_path))
    assert "this run, transformers' logits differ by " in capsys.readouterr().out
    assert not (tmp_path / "hf").exists()

# {name of a mistake: (flags, parts of the message)}
BAD_SOURCES = {
    "another depth": (dict(init_from="start", n_layer=5), ["n_layer", "init_from"]),
    "context too short": (dict(init_from="start", T=64), ["T=64", "start", "32 tokens", "--T"]),
    "another encoding": (dict(init_from="start", encoding="gpt2"), ["bytes", "--encoding"]),
    "another vocabulary": (dict(init_from="other.pt"), ["other.pt", "300", "--encoding"]),
    "an unknown vocabulary": (dict(init_from="hf300"), ["hf300", "300", "--encoding"]),
    "weights of another model": (dict(init_from="extra.pt"), ["extra.pt do not fit", "new_gain"]),
    "a layer is missing": (dict(init_from="deeper"), ["deeper", "it lacks transformer.h.2"]),
    "a truncated file": (dict(init_from="truncated"), ["truncated is neither", "check the name"]),
    "damaged .pt": (dict(init_from="bad.pt"), ["bad.pt cannot be read", "delete it"]),
    "code in a pickle": (dict(init_from="bomb.pt"), ["bomb.pt cannot be read"]),
    "unreachable hub": (dict(init_from="gpt2-medium"), ["gpt2-medium is neither"]),
    "nothing to sample": (dict(sample=1, log_dir="none"), ["log_dir=none", "--init_from"])}

@pytest.mark.parametrize("name", BAD_SOURCES)
def test_a_bad_source_is_reported_in_one_line(name, monkeypatch):
    """Weights that do not exist, are damaged or do not fit are refused, and the line says why."""
    hf_model().save_pretrained("start")
    hf_model(vocab_size=300).save_pretrained("hf300")
    for folder in ("deeper", "truncated"):
        hf_model().save_pretrained(folder)
    config = json.loads(Path("deeper/config.json").read_text())
    Path("deeper/config.json").write_text(json.dumps(config | dict(n_layer=3)))
    os.truncate("truncated/model.safetensors", 5000)
    save_checkpoint("other.pt", our_model(vocab_size=300))
    larger = our_model()
    larger.new_gain = torch.nn.Parameter(torch.ones(1))
    save_checkpoint("extra.pt", larger)
    torch.save(Bomb(Path("the bomb went off")), "bomb.pt")
    Path("bad.pt").write_text("half a file")
    given, expected = BAD_SOURCES[name]
    given = dict(data=ROOT / "input.txt", encoding="bytes", T=32, device="cpu") | given
    assert_refused(monkeypatch, [f"--{key}={value}" for key, value in given.items()], *expected)
    assert not Path("the bomb went off").exists()

def test_a_run_starts_from_a_hugging_face_folder(tmp_path, capsys):
    """The first validation loss is that of the given model, and the trained model is exported.

    The run can be resumed when the folder that it started from is gone. Samples write no file, and
    are determined by the settings.
    """
    write_text(tmp_path)
    hf = hf_model(n_positions=48)
    hf.save_pretrained(tmp_path / "start")

    def run(max_steps):
        return succeed(Training(
            cwd=tmp_path, without=("n_layer", "n_head", "n_embd"), hide=["matplotlib"],
            data="text.txt", log_dir="log/", T=32, val_tokens=2048, init_from="start",
            sample_every=2, sample_prompt="Grüße", max_steps=max_steps)).out
    out = run(max_steps=2)
    cfg = t.Config(data=f"{tmp_path}/text.txt", T=32)
    x, y = t.open_data(cfg, t.get_encoding("bytes"))[1].batch(0, 64)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(hf(x).logits.flatten(0, 1), y.flatten())
    assert read_log(tmp_path / "log")[0, "val"] == pytest.approx(loss.item(), abs=1e-4)
    for words in ("FINETUNE", "exported log/checkpoint_00002.pt to log/hf/",
                  "--- sample at step 2 ---\nGrüße"):
        assert words in out
    os.rename(tmp_path / "start", tmp_path / "gone")
    out = run(max_steps=3)
    assert "exported log/checkpoint_00003.pt" in out and "from step 2 on" in out
    last = t.GPT.from_pretrained(tmp_path / "log")
    assert (last.config.block_size, last.config.encoding) == (48, "bytes")
    exported = t.GPT.from_pretrained(tmp_path / "log" / "hf").state_dict()
    assert torch.equal(exported["transformer.ln_f.bias"], last.transformer.ln_f.bias)

    def sampled(**changes):
        cfg = t.Config(sample=2, sample_prompt="Oh", log_dir=f"{tmp_path}/log")
        t.print_samples(t.replace(cfg, **changes), torch.device("cpu"))
        return re.split(r"\n(?:---\n)?(?=Oh)", capsys.readouterr().out)
    capsys.readouterr()
    files = sorted(tmp_path.rglob("*"))
    first, *texts = sampled()
    assert first == f"Samples from {tmp_path}/log/checkpoint_00003.pt:"
    assert len(texts) == 2 and texts[0] != texts[1]
    assert sampled(init_from=f"{tmp_path}/log/hf", log_dir="none")[1:] == texts
    for name, value in (("seed", 5), ("temperature", 0.1), ("top_k", 1), ("sample_tokens", 5)):
        assert sampled(**{name: value})[1:] != texts, name
    assert sorted(tmp_path.rglob("*")) == files
