"""Weights in from Hugging Face, models out to it, text out of a model."""
import json
import os
import re
import resource
import shlex
import shutil
import sys

import pytest
import torch
from conftest import (
    ENV,
    ROOT,
    Forked,
    load,
    one_line,
    read_log,
    run_python,
    run_script,
    succeed,
    two_processes,
    write_text,
)

import train_gpt2 as t

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

pytestmark = pytest.mark.usefixtures("one_thread")
OFFLINE = {**ENV, "HF_HUB_OFFLINE": "1"}
SIZES = {"124M": (12, 12, 768), "350M": (24, 16, 1024), "774M": (36, 20, 1280),
         "1.5B": (48, 25, 1600)}
ODD_TEXT = ("Don't , stop . it's  \n\n\t \r\n naïve e\u0301 ﬁ 日本語 🙂👩‍👩‍👧 \u200b\u2028\ufeff\xa0\u3000\x85 "
            "\x00\x07\x1b[0m ١٢٣ ²½Ⅷ ſİ 'LL we'Ll 1234567 !?.. " + "x" * 300)


def shake(model, seed=0):
    """Give every parameter, biases and LayerNorms too, values that matter to the logits."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        std, mean = 0.02 if p.numel() > 2**20 else 0.15, float("ln_" in name and "weight" in name)
        p.data = torch.randn(p.shape, generator=generator) * std + mean
    if isinstance(model, t.GPT):
        model.transformer.wte.weight.data[model.config.n_vocab:] = 0
        model.lm_head.weight = model.transformer.wte.weight
    return model.eval()


def hf_model(**constants):
    defaults = dict(vocab_size=257, n_positions=32, n_layer=2, n_head=2, n_embd=16,
                    bos_token_id=256, eos_token_id=256)
    config = transformers.GPT2Config(**defaults | constants)
    return shake(transformers.GPT2LMHeadModel(config))


def our_model(seed=0, **constants):
    defaults = dict(block_size=32, vocab_size=384, n_layer=2, n_head=2, n_embd=16, n_vocab=257)
    return shake(t.GPT(t.GPTConfig(**defaults | constants)), seed)


def ids(*shape, n_vocab=257, seed=1):
    return torch.randint(n_vocab, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def assert_same_logits(ours, theirs, T=32):
    n_vocab = theirs.config.vocab_size
    idx = ids(2, T, n_vocab=n_vocab)
    a, b = ours(idx)[0], theirs(idx).logits
    assert a.shape == b.shape == (2, T, n_vocab)
    assert b.std() > 0.1  # else 1e-4 would prove nothing
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def assert_same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def edit_weights(folder, edit):
    from safetensors.torch import load_file, save_file
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


# --------------------------------------------------------------------------------- loading
@pytest.mark.parametrize("size", SIZES)
def test_loads_each_size_whole_and_sharded(size, tmp_path):
    """The layers and heads of the four GPT-2s, two dimensions a head instead of 64."""
    n_layer, n_head, n_embd = SIZES[size]
    hf = hf_model(n_layer=n_layer, n_head=n_head, n_embd=n_embd // 32)
    hf.save_pretrained(tmp_path / "whole")
    hf.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) == 1
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    for form in ("whole", "sharded"):
        model = t.GPT.from_pretrained(tmp_path / form)
        c = model.config
        assert (c.n_layer, c.n_head, c.n_embd) == (n_layer, n_head, n_embd // 32)
        assert (c.block_size, c.n_vocab, c.vocab_size) == (32, 257, 384)
        assert model.lm_head.weight is model.transformer.wte.weight
        assert_same_logits(model, hf)


def test_the_real_124m_in_and_out(tmp_path):
    hf = hf_model(n_layer=12, n_head=12, n_embd=768, n_positions=1024, vocab_size=50257)
    assert sum(p.numel() for p in hf.parameters()) == 124_439_808
    hf.save_pretrained(tmp_path / "in")
    model = t.GPT.from_pretrained(str(tmp_path / "in"))
    assert (model.config.n_vocab, model.config.vocab_size) == (50257, 50304)
    assert model.num_params() == 124_439_808 + (50304 - 50257) * 768
    assert_same_logits(model, hf, T=16)
    model.save_pretrained(tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same_weights(again, hf)


def test_loads_the_form_of_openais_own_checkpoint(tmp_path):
    """On the hub, gpt2's names lack "transformer.", it has attention masks and no lm_head."""
    hf = hf_model()
    hf.save_pretrained(tmp_path)

    def as_on_the_hub(w):
        for key in list(w):
            w[key.removeprefix("transformer.")] = w.pop(key)
        w.update({f"h.{i}.attn.bias": torch.ones(1, 1, 32, 32).tril() for i in range(2)})
    edit_weights(tmp_path, as_on_the_hub)
    assert_same_logits(t.GPT.from_pretrained(tmp_path), hf)


def test_loads_half_precision_weights_as_float32(tmp_path):
    hf = hf_model().bfloat16()
    hf.save_pretrained(tmp_path)
    model = t.GPT.from_pretrained(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert_same_logits(model, hf.float())


def test_all_rows_are_used_and_padding_is_not(tmp_path):
    hf_model().save_pretrained(tmp_path)
    model = t.GPT.from_pretrained(tmp_path)
    wte = model.transformer.wte.weight
    assert wte.shape == (384, 16) and not wte[257:].any()
    wte.data[257:] = 100 * wte.data[:127]  # even padding gone mad is never predicted
    assert model(ids(1, 8))[0].shape == (1, 8, 257)
    many = model.generate(ids(64, 4), 20, temperature=1e4)
    assert many.max() <= 256 and len(many[:, 4:].unique()) > 200


def test_missing_transformers_is_a_line(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(t.UserError, match="transformers"):
        t.GPT.from_pretrained(tmp_path)
    with pytest.raises(ImportError):  # which export_at_end makes a line of
        our_model().save_pretrained(tmp_path)


# ------------------------------------------------------------------------------- exporting
@pytest.fixture(params=("bytes", "gpt2"))
def encoding(request):
    if request.param == "gpt2":
        return request.getfixturevalue("gpt2_encoding")
    return t.get_encoding("bytes")


def test_round_trip_is_bit_for_bit(tmp_path):
    model = our_model()
    model.save_pretrained(tmp_path / "hf")
    assert_same_weights(t.GPT.from_pretrained(tmp_path / "hf"), model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert_same_logits(model, theirs)


def test_exported_folder_just_works(encoding, tmp_path):
    model = our_model(n_vocab=encoding.n_vocab, vocab_size=t.padded(encoding.n_vocab))
    model.save_pretrained(tmp_path, encoding)
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json",
            "tokenizer_config.json"} <= set(os.listdir(tmp_path))
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(hf) is transformers.GPT2LMHeadModel
    assert hf.config.vocab_size == encoding.n_vocab == hf.get_input_embeddings().num_embeddings
    assert hf.generation_config.eos_token_id == hf.config.eos_token_id == encoding.eot_token
    assert_same_logits(model, hf)

    pipe = transformers.pipeline("text-generation", model=str(tmp_path))
    made = pipe("To be", max_new_tokens=6, do_sample=False, return_tensors=True)
    prompt = torch.tensor([encoding.encode("To be")])
    expected = model.generate(prompt, 6, temperature=0)[0].tolist()
    if encoding.eot_token in expected:
        expected = expected[:expected.index(encoding.eot_token) + 1]
    assert list(made[0]["generated_token_ids"]) == expected
    text = pipe("To be")[0]["generated_text"]  # 256 new tokens by default, beyond our context
    assert text.startswith("To be")


def test_tokenizer_equals_tiktokens(encoding, tmp_path):
    t.hugging_face_tokenizer(encoding, 32).save_pretrained(tmp_path)
    transformers.GPT2Config(n_layer=1).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == encoding.n_vocab
    assert tokenizer.eos_token_id == encoding.eot_token and tokenizer.model_max_length == 32
    plays = (ROOT / "input.txt").read_text()[:20_000]
    marked = f"<|endoftext|>{ODD_TEXT}<|endoftext|> <|endoftext|>\n"
    for text in (ODD_TEXT, plays, marked, "", "<|endof"):
        tokens = encoding.encode(text, allowed_special="all")
        assert tokenizer(text)["input_ids"] == tokens
        assert tokenizer.decode(tokens) == text
        plain = tokenizer.decode(tokens, skip_special_tokens=True)
        assert plain == text.replace("<|endoftext|>", "")


def test_export_replaces_its_own_files_only(tmp_path):
    """A slip in the folder's name must not cost a person what lies there."""
    (tmp_path / "model_00001.pt").write_text("precious")
    for seed in (0, 1):
        our_model(seed).save_pretrained(f"{tmp_path}/", t.get_encoding("bytes"))
    assert_same_weights(t.GPT.from_pretrained(tmp_path), our_model(1))
    assert (tmp_path / "model_00001.pt").read_text() == "precious"
    assert not tmp_path.with_name(tmp_path.name + ".part").exists()


@pytest.mark.parametrize("room", (5_000, 80_000), ids=("config.json only", "no tokenizer.json"))
def test_full_disk_is_an_oserror_and_the_old_export_stands(room, tmp_path):
    """finish() makes a line of OSError; a file size limit stands in for the disk."""
    old = our_model(0, n_embd=4)
    old.save_pretrained(tmp_path / "hf")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ranks = {bytes([i % 256]) + (b"" if i < 256 else bytes([i // 256])): i for i in range(4000)}
    encoding = t.tiktoken.Encoding("many", pat_str=".", mergeable_ranks=ranks,
                                   special_tokens={"<|endoftext|>": 4000})
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(OSError):
            our_model(1).save_pretrained(tmp_path / "hf", encoding)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_same_weights(t.GPT.from_pretrained(tmp_path / "hf"), old)


@pytest.mark.parametrize("content, error", [
    ("raise OSError(2, 'libgomp.so.1: cannot open')", "FileNotFoundError"),
    ("raise OSError(2, 'No such file', 'config.json')", "FileNotFoundError"),
    ("", "AttributeError")])
def test_a_broken_transformers_is_no_full_disk(text, tmp_path, content, error):
    """One that misses a library raises OSError, one with another interface anything: a line."""
    folder = tmp_path / "transformers"
    folder.mkdir()
    (folder / "__init__.py").write_text(content)
    done = run_script("train_gpt2.py", *tiny_flags(text, log_dir=tmp_path / "log", max_steps=1),
                      env=OFFLINE | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert f"not exported ({error}: " in done.stdout
    assert (tmp_path / "log" / "model_00001.pt").exists()


def test_samples_without_the_vocabulary_name_it(tmp_path, text):
    """Good weights are there; it is not they that are missing."""
    succeed(Forked(None, cwd=tmp_path, **tiny(text, max_steps=1)))
    path = tmp_path / "log" / "checkpoint_00001.pt"
    content = load(path)
    torch.save(content | {"encoding": "gpt2"}, path)
    (tmp_path / "log" / "model_00001.pt").unlink()
    env = {"TIKTOKEN_CACHE_DIR": str(tmp_path), "HTTPS_PROXY": "http://127.0.0.1:9",
           "https_proxy": "http://127.0.0.1:9"}
    sampling = Forked(None, cwd=tmp_path, env=env, sample=1, log_dir="log")
    assert sampling.wait() == 1
    one_line(sampling.err, "The GPT-2 vocabulary is not available")


def test_export_without_the_vocabulary_leaves_out_the_tokenizer(trained, monkeypatch, tmp_path,
                                                                capsys):
    def no_vocabulary(name):
        raise t.UserError("The GPT-2 vocabulary is not available.")
    monkeypatch.setattr(t, "get_encoding", no_vocabulary)
    t.export(trained.log_dir / "model_00004.pt", tmp_path / "hf")
    assert "vocabulary is not available. Exported without a tokenizer" in capsys.readouterr().out
    assert not (tmp_path / "hf" / "tokenizer.json").exists()
    expected = t.GPT.from_pretrained(trained.log_dir / "hf")
    assert_same_weights(t.GPT.from_pretrained(tmp_path / "hf"), expected)


# ------------------------------------------------------------------------------ generating
def naive(model, idx, n, temperature=1.0, top_k=None, generator=None):
    """What generate() does, spelled out."""
    for _ in range(n):
        logits = model(idx[:, -model.config.block_size:])[0][:, -1].float()
        if temperature == 0:
            token = logits.argmax(-1, keepdim=True)
        else:
            logits = logits / temperature
            if top_k:
                logits[logits < logits.topk(top_k).values[:, -1:]] = -torch.inf
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        idx = torch.cat((idx, token), dim=1)
    return idx


def seeded(seed=5, device="cpu"):
    return torch.Generator(device).manual_seed(seed)


NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
DEVICES = ("cpu", pytest.param("cuda", marks=NO_CUDA))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", (1, 20, 32, 45))
@torch.no_grad()
def test_generate_from_prompts_of_any_length(length, device):
    """Below, at and beyond block_size=32, to texts beyond it; greedy and sampled."""
    model, idx = our_model().to(device), ids(3, length).to(device)
    greedy = model.generate(idx, 40, temperature=0)
    assert torch.equal(greedy, naive(model, idx, 40, temperature=0))
    for options in (dict(), dict(top_k=5, temperature=1.7), dict(top_k=1000)):
        got = model.generate(idx, 40, generator=seeded(device=device), **options)
        options["top_k"] = min(options.get("top_k") or 257, 257)
        expected = naive(model, idx, 40, generator=seeded(device=device), **options)
        assert torch.equal(got, expected)


def test_generate_shapes_and_seeds():
    model, idx = our_model(), ids(3, 5)
    out = model.generate(idx, 7, generator=seeded())
    assert out.shape == (3, 12) and out.dtype == torch.int64 and torch.equal(out[:, :5], idx)
    assert torch.equal(model.generate(idx, 0), idx)
    assert torch.equal(out, model.generate(idx, 7, generator=seeded()))
    assert not torch.equal(out, model.generate(idx, 7, generator=seeded(6)))
    greedy = model.generate(idx, 7, temperature=0)
    assert torch.equal(model.generate(idx, 7, top_k=1), greedy)
    top = model(idx)[0][:, -1].topk(3).indices
    for _ in range(20):
        token = model.generate(idx, 1, top_k=3, temperature=5.0)[:, -1:]
        assert (token == top).any(1).all()


@pytest.mark.parametrize("idx, options", (
    (ids(1, 0), {}), (ids(5), {}), (ids(1, 2, 3), {}), (ids(1, 3), dict(temperature=-0.1)),
    (ids(1, 3), dict(top_k=0))))
def test_generate_refuses(idx, options):
    with pytest.raises(ValueError, match="must be"):
        our_model().generate(idx, 3, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_generate_leaves_training_alone(device):
    """Neither torch's random state, nor gradients, nor the mode changes."""
    model = our_model().to(device).train()
    idx = ids(2, 8).to(device)
    model(idx, idx)[1].backward()
    states = [torch.get_rng_state]
    if device == "cuda":
        states.append(torch.cuda.get_rng_state)
    before = [state() for state in states]
    grads = [p.grad.clone() for p in model.parameters()]
    out = model.generate(idx, 40, generator=seeded(device=device))
    assert all(torch.equal(state(), b) for state, b in zip(states, before))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads))
    assert model.training and not out.requires_grad


def test_generate_on_a_compiled_model():
    if not (shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")):
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    model, idx = our_model(n_layer=1), ids(2, 8)
    expected = model.generate(idx, 30, generator=seeded())
    model.compile()
    logits = model(idx)[0]  # compiled
    assert torch.equal(model.generate(idx, 30, generator=seeded()), expected)
    torch.testing.assert_close(model.forward(idx)[0], logits)
    assert torch.equal(torch.compile(model).generate(idx, 30, generator=seeded()), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_generate_under_bf16_autocast(device):
    model, idx = our_model().to(device), ids(2, 8).to(device)
    with torch.autocast(device, torch.bfloat16):
        out = model.generate(idx, 40, top_k=50, generator=seeded(device=device))
        first = model(idx)[0][:, -1]
    assert out.shape == (2, 48) and out.max() < 257
    assert first.dtype == torch.bfloat16  # so that the line above has tested something


# --------------------------------------------------------------------------------- samples
class Says(torch.nn.Module):
    """A model that generates what it is told."""

    def __init__(self, text):
        super().__init__()
        self.text, self.p = text, torch.nn.Parameter(torch.zeros(1))

    def generate(self, idx, *args, **options):
        return torch.tensor([idx[0].tolist() + list(self.text)])


def sample(text, prompt="> "):
    cfg = t.Config(sample_prompt=prompt)
    return t.sample_text(Says(text), t.get_encoding("bytes"), cfg, seed=1)


def test_samples_show_odd_bytes():
    text = "é🙂\n\ttext ".encode() + b"\xff\xc3 \x00\x1b[31m\r\x7f" + "\u2028\u202e".encode()
    shown = "> é🙂\n\ttext \\xff\\xc3 \\x00\\x1b[31m\\r\\x7f\\u2028\\u202e\\xe2\\x82"
    assert sample(text + bytes([0xE2, 0x82])) == shown


def test_sample_of_an_empty_prompt_begins_with_end_of_text():
    assert sample(b"text", prompt="") == "<|endoftext|>text"


# -------------------------------------------------------------------- by running the script
@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data"), 40_000)


def tiny(text, **changes):
    return dict(data=text, log_dir="log", T=32, B=4, total_batch_size=256, max_steps=4,
                save_every=1, eval_every=2, sample_every=4, val_tokens=2048, sample_tokens=40,
                warmup_steps=1) | changes


def tiny_flags(text, **changes):
    from conftest import flags
    return flags(**tiny(text, **changes))


def samples(stdout):
    """[(rank, step, text)] as they stand on stdout."""
    pattern = r"^--- sample of rank (\d+) at step (\d+) ---\n(.*?)\n---$"
    found = re.findall(pattern, stdout, re.M | re.S)
    return [(int(rank), int(step), text) for rank, step, text in found]


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """A run that began from a Hugging Face folder, with the model it began from."""
    folder = tmp_path_factory.mktemp("run")
    hf = hf_model(n_positions=48)
    hf.save_pretrained(folder / "start")
    run = Forked(None, cwd=folder, hide=[], **tiny(text, init_from="start",
                                                   sample_prompt="Grüße\a"))
    assert run.wait() == 0, run.err
    run.folder, run.log_dir, run.hf = folder, folder / "log", hf
    return run


def test_trains_from_a_folder(trained, text):
    """The first validation sees that model's loss; the end exports the last checkpoint."""
    cfg = t.Config(**dict(data=str(text), T=32, total_batch_size=256, val_tokens=2048))
    _, loader = t.open_data(cfg, t.get_encoding("bytes"))
    x, y = loader.batch(0, 64)
    with torch.no_grad():
        logits = trained.hf(x).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).item()
    assert abs(read_log(trained.log_dir)[0, "val"] - loss) < 1e-4
    last, _ = t.load_weights(str(trained.log_dir / "model_00004.pt"))
    assert last.config.block_size == 48
    assert not torch.equal(last.transformer.ln_f.bias, trained.hf.transformer.ln_f.bias)
    assert "exported to log/hf/" in trained.out
    assert_same_weights(t.GPT.from_pretrained(trained.log_dir / "hf"), last)
    transformers.AutoTokenizer.from_pretrained(trained.log_dir / "hf")


def test_samples_of_a_run(trained):
    shown = samples(trained.out)
    assert [(rank, step) for rank, step, _ in shown] == [(0, 0), (0, 4)]
    for _, _, text in shown:
        assert text.startswith("Grüße\\x07") and len(text) >= 40 / 4
        assert text.replace("\n", "").replace("\t", "").isprintable()


def test_resumes_without_the_folder_it_began_from(trained, text, tmp_path):
    log = shutil.copytree(trained.log_dir, tmp_path / "log")
    (log / "checkpoint_00004.pt").unlink()
    (log / "model_00004.pt").unlink()
    run = Forked(None, cwd=tmp_path, **tiny(text, init_from="start", sample_prompt="Grüße\a"))
    assert run.wait() == 0, run.err
    assert "continuing from log/checkpoint_00003.pt" in run.out
    weights = [load(folder / "model_00004.pt")["model"] for folder in (trained.log_dir, log)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.parametrize("name", ("model_00004.pt", "checkpoint_00004.pt"))
def test_starts_from_our_own_files(name, trained):
    cfg = t.Config(init_from=str(trained.log_dir / name), T=32, encoding="bytes")
    model = t.build_model(cfg, t.get_encoding("bytes"))
    assert_same_weights(model, t.GPT.from_pretrained(trained.log_dir / "hf"))


def test_documented_one_liner_exports_any_pt(trained, tmp_path):
    command = re.search(r'python -c ".*?"', t.export.__doc__).group()
    path = trained.log_dir / "checkpoint_00004.pt"
    command = command.replace("log/model_19073.pt", str(path))
    words = shlex.split(command.replace("'hf'", f"'{tmp_path}/hf'"))
    done = run_python(*words[2:], cwd=ROOT, env=OFFLINE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    expected = t.GPT.from_pretrained(trained.log_dir / "hf")
    assert_same_weights(t.GPT.from_pretrained(tmp_path / "hf"), expected)
    with pytest.raises(SystemExit, match=r"^nope.pt is damaged, or no .pt file of this script"):
        t.export("nope.pt", tmp_path / "hf")


def test_two_processes_print_their_samples_in_order_on_an_ascii_terminal(trained, text):
    statuses, runs = two_processes(None, cwd=trained.folder, ascii_stdout=True, **tiny(
        text, init_from=trained.log_dir / "model_00004.pt", max_steps=1, sample_every=1,
        sample_prompt="Grüße", log_dir="ascii"))
    assert statuses == [0, 0], [run.err for run in runs]
    shown = samples(runs[0].out)
    assert [(step, rank) for rank, step, _ in shown] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(text.startswith(r"Gr\xfc\xdfe") for _, _, text in shown)
    assert len({text for _, _, text in shown}) == 4


# ---------------------------------------------------------------- python train_gpt2.py --sample
def sampled(folder, *words, **constants):
    run = Forked(None, *words, cwd=folder, hide=[], sample=2, sample_tokens=20, **constants)
    assert run.wait() == 0 and not run.err, run.err
    return run.out


def test_samples_of_the_newest_weights(trained, tmp_path):
    """No data, no lock, nothing but the texts on stdout; the same seed is the same text."""
    before = {path: path.read_bytes() for path in trained.log_dir.glob("*.*")}
    out = sampled(trained.folder, data="nowhere", sample_prompt="ROMEO:")
    first, second = out.split("\n---\n")
    assert first.startswith("ROMEO:") and second.startswith("ROMEO:") and first != second
    assert sampled(trained.folder, data="nowhere", sample_prompt="ROMEO:") == out
    assert sampled(trained.folder, sample_prompt="ROMEO:", seed=2) != out
    assert sampled(trained.folder, sample_prompt="ROMEO:", temperature=0.1) != out
    assert {path: path.read_bytes() for path in trained.log_dir.glob("*.*")} == before
    other = shutil.copytree(trained.log_dir, tmp_path / "log")
    (other / "checkpoint_00004.pt").write_bytes(b"damaged")  # as is one being replaced
    assert sampled(tmp_path, sample_prompt="ROMEO:") == out  # of model_00004.pt


@pytest.mark.parametrize("name", ["log/hf", "log/model_00004.pt", "log/checkpoint_00004.pt"])
def test_samples_of_named_weights(trained, name):
    newest = sampled(trained.folder, sample_prompt="ROMEO:")
    named = sampled(trained.folder, init_from=name, sample_prompt="ROMEO:", log_dir="none",
                    encoding="gpt2")  # theirs counts
    assert named == newest
    assert not (trained.folder / "none").exists()


def test_greedy_samples_are_all_the_same(trained):
    first, second = sampled(trained.folder, temperature=0).rstrip("\n").split("\n---\n")
    assert first == second
    whole = sampled(trained.folder, top_k=0)
    assert whole != sampled(trained.folder, top_k=1)


def test_samples_beside_a_running_training(text, tmp_path):
    import signal
    changes = tiny(text, max_steps=20)
    run = Forked(None, cwd=tmp_path, arrange={"signal_at": (signal.SIGSTOP, 9)}, **changes)
    run.wait_for_stop()
    assert sampled(tmp_path, sample_prompt="x").startswith("x")
    run.go_on()
    assert run.wait() == 0, run.err


def test_nothing_to_sample_is_a_line(tmp_path):
    run = Forked(None, cwd=tmp_path, sample=1)
    assert run.wait() == 1
    one_line(run.err, "no weights in log_dir=log", "--init_from")
    run = Forked(None, cwd=tmp_path, sample=-1)
    assert run.wait() == 1
    one_line(run.err, "sample=-1")


# ------------------------------------------------------------------------------- bad input
def saved_hf(folder, change=lambda f: None, max_shard_size="1GB", **constants):
    hf_model(**constants).save_pretrained(folder, max_shard_size=max_shard_size)
    change(folder)


def cut(folder):
    os.truncate(folder / "model.safetensors", 5000)


def drop(*keys):
    return lambda folder: edit_weights(folder, lambda w: [w.pop(key) for key in keys])


def other_tokenizer(folder):
    """GPT-2's, with two letters swapped: the same size, other tokens."""
    t.hugging_face_tokenizer(t.get_encoding("bytes"), 32).save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["e"] = vocab["e"], vocab["a"]
    path.write_text(json.dumps(content))


def runs_code(folder):
    """A folder whose config.json asks for Python of its own to be run."""
    (folder / "own.py").write_text("open('ran', 'w')")
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "own.Own"})


BAD_FOLDERS = {  # name: (how to make it, what the line must hold)
    "another activation": (dict(activation_function="relu"), "activation_function=relu"),
    "another epsilon": (dict(layer_norm_epsilon=1e-6), "layer_norm_epsilon"),
    "another MLP": (dict(n_inner=20), "n_inner=20"),
    "another attention": (dict(scale_attn_weights=False), "scale_attn_weights"),
    "untied": (dict(tie_word_embeddings=False), "tie_word_embeddings=False"),
    "wrong shape": (dict(change=lambda f: edit_config(f, n_positions=40)),
                    "transformer.wpe.weight"),
    "wrong width": (dict(change=lambda f: edit_config(f, n_embd=8)),
                    "transformer.h.0.attn.c_attn.bias"),
    "missing tensors": (dict(change=drop("transformer.h.1.ln_1.bias", "transformer.wte.weight")),
                        "transformer.h.1.ln_1.bias, transformer.wte.weight"),
    "missing layers": (dict(change=lambda f: edit_config(f, n_layer=3)),
                       "transformer.h.2.attn.c_attn"),
    "missing shard": (dict(max_shard_size="10KB",
                           change=lambda f: sorted(f.glob("model-*"))[1].unlink()),
                      "model-00002"),
    "broken config.json": (dict(change=lambda f: (f / "config.json").write_text("{")), "JSON"),
    "ill-typed config.json": (dict(change=lambda f: edit_config(f, n_head="two")),
                              "cannot be loaded"),
    "no weights": (dict(change=lambda f: (f / "model.safetensors").unlink()), "no file named"),
    "cut safetensors": (dict(change=cut), "cannot be loaded"),
    "broken pytorch_model.bin": (
        dict(change=lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin")),
        "cannot be loaded"),
    "another vocabulary": (dict(vocab_size=300), "vocabulary of 300, encoding=bytes one of 257"),
    "another tokenizer": (dict(change=other_tokenizer), "a tokenizer of its own"),
    "code of its own": (dict(change=runs_code), "cannot be loaded"),
}
BAD_NAMES = {  # what differs: what the line must hold
    "no config.json": (dict(init_from="bare"), "cannot be loaded"),
    "context too short": (dict(init_from="start", T=64), "T=64"),
    "own file, context too short": (dict(init_from="log/model_00004.pt", T=64), "block_size=48"),
    "foreign .pt": (dict(init_from="foreign.pt"), "no .pt file of this script"),
    "garbage .pt": (dict(init_from="garbage.pt"), "no .pt file of this script"),
    "missing .pt": (dict(init_from="nowhere.pt"), "no .pt file of this script"),
    "missing folder": (dict(init_from="./nowhere"), "nowhere"),
    "offline": (dict(init_from="gpt2"), "go online"),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_bad_folder_is_a_line(name, text, tmp_path):
    options, expected = BAD_FOLDERS[name]
    saved_hf(tmp_path / "folder", **options)
    run = Forked(None, cwd=tmp_path, hide=[], **tiny(text, init_from="folder"))
    assert run.wait() == 1
    one_line(run.err, expected)
    assert not (tmp_path / "ran").exists()


def test_another_kind_of_model_is_a_line(text, tmp_path):
    llama = transformers.LlamaConfig(vocab_size=257, hidden_size=8, intermediate_size=16,
                                     num_hidden_layers=1, num_attention_heads=2)
    transformers.LlamaForCausalLM(llama).save_pretrained(tmp_path / "llama")
    run = Forked(None, cwd=tmp_path, hide=[], **tiny(text, init_from="llama"))
    assert run.wait() == 1
    one_line(run.err, "model_type=llama")


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_bad_name_is_a_line(name, trained, text):
    changes, expected = BAD_NAMES[name]
    (trained.folder / "bare").mkdir(exist_ok=True)
    torch.save({"model": hf_model().state_dict()}, trained.folder / "foreign.pt")
    (trained.folder / "garbage.pt").write_bytes(b"no zip" * 100)
    run = Forked(None, cwd=trained.folder, hide=[], **tiny(text, log_dir="bad", **changes))
    assert run.wait() == 1
    one_line(run.err, expected)


def test_unreachable_hub_is_a_line(text, tmp_path):
    """Nothing listens at that port. The hub's client retries for half a minute."""
    hurry = "import time, train_gpt2; time.sleep = lambda s: None; train_gpt2.main()"
    done = run_python(hurry, *tiny_flags(text, init_from="gpt2-medium"), cwd=tmp_path, env={
        "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path / "hub")})
    assert done.returncode == 1 and done.stdout == ""
    one_line(done.stderr, 'init_from="gpt2-medium" cannot be loaded', "go online")
