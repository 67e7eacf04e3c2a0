"""Tests of loading Hugging Face weights, exporting models to Hugging Face, and sampling."""
import dataclasses
import json
import os
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Bomb, Forked, ids, read_log, shake, shared, succeed, write_text

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

@pytest.mark.parametrize("name", ["p50k_base", "cl100k_base"])
def test_a_model_may_be_exported_without_its_tokenizer(name, tmp_path, capsys, monkeypatch):
    """One line says that the encoding's ids do not fit into a tokenizer of transformers."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared("tiktoken_cache")))
    model = our_model(vocab_size=t.get_encoding(name).n_vocab, encoding=name)
    t.save_hugging_face(model, tmp_path)
    assert f"no tokenizer: the ids of {name} have gaps" in capsys.readouterr().out
    assert not (tmp_path / "tokenizer.json").exists()
    assert_same_logits(model, transformers.GPT2LMHeadModel.from_pretrained(tmp_path))

def save_checkpoint(path, model, **more):
    """Save a model in a checkpoint. more: entries to change."""
    torch.save({"model": model.state_dict(), "step": 3, "best_step": None, "best_loss": 9.0,
                "gpt_config": dataclasses.asdict(model.config)} | more, path)

def test_the_best_checkpoint_of_a_folder_is_used(tmp_path, capsys):
    """from_pretrained() and the export use the checkpoint with the lowest validation loss."""
    models = [our_model(block_size=size) for size in (16, 32, 64)]
    for step, model in enumerate(models, start=1):
        save_checkpoint(tmp_path / f"checkpoint_0000{step}.pt", model, step=step, best_step=2)
    for source, model in ((tmp_path, models[1]), (f"{tmp_path}/checkpoint_00003.pt", models[2])):
        loaded = t.GPT.from_pretrained(source, dropout=0.5)
        assert loaded.config == dataclasses.replace(model.config, dropout=0.5)
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    t.export(str(tmp_path))
    assert f"exported {tmp_path}/checkpoint_00002.pt to" in capsys.readouterr().out
    assert_same_logits(models[1], transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf"))

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

# Pairs: changes to config.json, or a function that damages the folder; a part of the message
BAD_FOLDERS = [
    (dict(n_layer=3), "it lacks transformer.h.2"), (dict(n_positions=40), "mismatched"),
    (lambda folder: (folder / "config.json").write_text("{"), "JSON"),
    (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    (lambda folder: os.truncate(folder / "model.safetensors", 5000), "")]

@pytest.mark.parametrize("change, expected", BAD_FOLDERS)
def test_a_bad_folder_is_reported_in_one_line(change, expected, tmp_path):
    """A folder that is damaged, or whose weights do not fit, is refused with the reason."""
    hf_model().save_pretrained(tmp_path)
    if callable(change):
        change(tmp_path)
    else:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(t.UserError, match=rf"init_from=.*{expected}") as e:
        t.GPT.from_pretrained(tmp_path)
    assert "\n" not in str(e.value)

def test_weights_of_another_model_are_loaded_and_a_line_says_how_much_it_differs(tmp_path, capsys):
    """A researcher may change the model and start from GPT-2's weights."""
    hf_model(activation_function="relu").save_pretrained(tmp_path)
    t.GPT.from_pretrained(tmp_path)
    assert re.fullmatch(r"!!! With the weights in .*, the logits differ .* by [\d.]+%: .*\n",
                        capsys.readouterr().out)

@pytest.mark.usefixtures("gpt2_encoding")
def test_another_tokenizer_with_as_many_ids_as_gpt2s_is_refused(tmp_path):
    """The model would otherwise be trained on tokens that mean something else to it."""
    hf_model(vocab_size=50257).save_pretrained(tmp_path)
    fineweb.save_tokenizer(fineweb.get_encoding("bytes"), tmp_path, context=32)
    with pytest.raises(t.UserError, match="The tokenizer in init_from=.* gives other ids than"):
        t.GPT.from_pretrained(tmp_path)

# {name of a mistake: (flags, parts of the message)}
BAD_SOURCES = {
    "another depth": (dict(init_from="start", n_layer=5), ["--n_layer contradicts init_from"]),
    "context too short": (dict(init_from="start", T=48), ["T=48", "start", "--T=32"]),
    "two sources": (dict(init_from="start", branch_from="log"),
                    ["init_from contradicts branch_from"]),
    "another vocabulary": (dict(init_from="other.pt"), ["other.pt have 300", "--encoding"]),
    "an unknown vocabulary": (dict(init_from="hf300", encoding="bytes"),
                              ["hf300 have 300", "--encoding"]),
    "weights of another model": (dict(init_from="extra.pt"), ["extra.pt do not fit", "new_gain"]),
    "damaged .pt": (dict(init_from="bad.pt"), ["bad.pt cannot be read", "delete it"]),
    "code in a pickle": (dict(init_from="bomb.pt"), ["bomb.pt cannot be read"]),
    "unreachable hub": (dict(init_from="gpt2-medium"), ["gpt2-medium is neither"]),
    "nanoGPT's word for resuming": (dict(init_from="resume"), ["resume", "repeat its command"]),
    "nothing to sample": (dict(sample=1, log_dir="none"), ["log_dir=none", "--init_from"])}

@pytest.mark.parametrize("name", BAD_SOURCES)
def test_a_bad_source_is_reported_in_one_line(name):
    """Weights that do not exist, are damaged or do not fit are refused, and the line says why."""
    hf_model().save_pretrained("start")
    hf_model(vocab_size=300).save_pretrained("hf300")
    save_checkpoint("other.pt", our_model(vocab_size=300))
    larger = our_model()
    larger.new_gain = torch.nn.Parameter(torch.ones(1))
    save_checkpoint("extra.pt", larger)
    torch.save(Bomb(Path("the bomb went off")), "bomb.pt")
    Path("bad.pt").write_text("half a file")
    given, expected = BAD_SOURCES[name]
    with pytest.raises(t.UserError) as e:
        cfg = t.configure(given | dict(data=str(ROOT / "input.txt")))
        if cfg.sample:
            t.print_samples(cfg, torch.device("cpu"))
        t.with_model_settings(cfg, t.build_model(cfg))
    assert "\n" not in str(e.value)
    assert all(part in str(e.value) for part in expected), e.value
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
        forked = Forked(
            cwd=tmp_path, without=("n_layer", "n_head", "n_embd", "encoding"), hide=["matplotlib"],
            data="text.txt", log_dir="log/", T=32, val_tokens=2048, init_from="start",
            sample_every=2, sample_prompt="Grüße", max_steps=max_steps)
        return succeed(forked).out
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
        named, *texts = re.split(r"\n(?:---\n)?(?=Oh)", capsys.readouterr().out)
        return named, texts
    capsys.readouterr()
    files = sorted(tmp_path.rglob("*"))
    named, texts = sampled()
    assert named == f"Samples from {tmp_path}/log/checkpoint_00003.pt:"
    assert len(texts) == 2 and texts[0] != texts[1]
    for source in (f"{tmp_path}/log", f"{tmp_path}/log/hf"):
        assert sampled(init_from=source, log_dir="none")[1] == texts
    for name, value in (("seed", 5), ("temperature", 0.1), ("top_k", 1), ("sample_tokens", 5)):
        assert sampled(**{name: value})[1] != texts, name
    assert sorted(tmp_path.rglob("*")) == files

def test_samples_of_unusual_texts(monkeypatch):
    """Bytes that are not valid UTF-8 are escaped. A sample ends where the model ends the text.

    <|endoftext|> in a prompt is the special token, and it is the prompt if there is none.
    """
    cfg, prompts = t.Config(sample_prompt="<|endoftext|>a", sample_tokens=7, top_k=3), []
    for made, text in (([256, 97, 195, 97, 195, 169], "<|endoftext|>a\\xc3aé"),
                       ([256, 97, 98, 256, 97], "<|endoftext|>ab")):  # 256 ends the text
        monkeypatch.setattr(t.GPT, "generate", lambda self, idx, n, **words: prompts.append(
            (idx.tolist(), n, words["top_k"])) or torch.tensor([made]))  # noqa: B023
        assert t.sample_text(our_model(), t.get_encoding("bytes"), cfg, seed=1) == text
    for prompt in ("", "\udce9"):  # the second one is what Python makes of an é in Latin-1
        t.sample_text(our_model(), t.get_encoding("bytes"), t.Config(sample_prompt=prompt), seed=1)
    assert prompts == [([[256, 97]], 7, 3), ([[256, 97]], 7, 3), ([[256]], 64, 50),
                       ([[239, 191, 189]], 64, 50)]
