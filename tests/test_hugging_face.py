"""Issue 6: weights in from Hugging Face, models out to it, text out of a model."""
import contextlib
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys

import pytest
import torch

import train_gpt2 as t
from conftest import ROOT, run_script

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

ENV = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
SIZES = {"124M": (12, 12, 768), "350M": (24, 16, 1024), "774M": (36, 20, 1280), "1.5B": (48, 25, 1600)}
ODD_TEXT = ("Don't , stop . it's  \n\n\t \r\n naïve e\u0301 ﬁ 日本語 🙂👩‍👩‍👧 \u200b\u2028\ufeff\xa0\u3000\x85 "
            "\x00\x07\x1b[0m ١٢٣ ²½Ⅷ ſİ 'LL we'Ll 1234567 !?.. " + "x" * 300)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """These models are too small for two, and the processes started here have one each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def shake(model, seed=0):
    """Give every parameter, biases and LayerNorms too, values that matter to the logits."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        std, mean = 0.02 if p.numel() > 2**20 else 0.15, float("ln_" in name and "weight" in name)
        p.data = torch.randn(p.shape, generator=generator) * std + mean
    if isinstance(model, t.GPT):
        for head in (model.transformer.wte, model.lm_head):
            head.weight.data[model.config.n_vocab:] = 0
    return model.eval()


def hf_model(**constants):
    defaults = dict(vocab_size=257, n_positions=32, n_layer=2, n_head=2, n_embd=16, bos_token_id=256, eos_token_id=256)
    return shake(transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**defaults, **constants})))


def our_model(seed=0, **constants):
    defaults = dict(block_size=32, vocab_size=384, n_layer=2, n_head=2, n_embd=16, n_vocab=257)
    return shake(t.GPT(t.GPTConfig(**{**defaults, **constants})), seed)


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


# ------------------------------------------------------------------------------------------------- loading
@pytest.mark.parametrize("tied", (True, False), ids=("tied", "untied"))
@pytest.mark.parametrize("size", SIZES)
def test_loads_each_size_whole_and_sharded(size, tied, tmp_path):
    """The layers and heads of the four GPT-2s, two dimensions a head instead of 64."""
    n_layer, n_head, n_embd = SIZES[size]
    hf = hf_model(n_layer=n_layer, n_head=n_head, n_embd=n_embd // 32, tie_word_embeddings=tied)
    hf.save_pretrained(tmp_path / "whole")
    hf.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) == 1
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    for form in ("whole", "sharded"):
        model = t.GPT.from_pretrained(tmp_path / form)
        c = model.config
        assert (c.n_layer, c.n_head, c.n_embd, c.block_size, c.tied) == (n_layer, n_head, n_embd // 32, 32, tied)
        assert (c.n_vocab, c.vocab_size) == (257, 384)
        assert (model.lm_head.weight is model.transformer.wte.weight) == tied
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
    assert_same_weights(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"), hf)


def test_loads_the_form_of_openais_own_checkpoint(tmp_path):
    """On the hub, gpt2's names lack "transformer.", it holds the attention masks too and no lm_head."""
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


# ------------------------------------------------------------------------------------------------ exporting
@pytest.fixture(params=("bytes", "gpt2"))
def encoding(request):
    return t.get_encoding("bytes") if request.param == "bytes" else request.getfixturevalue("gpt2_encoding")


@pytest.mark.parametrize("tied", (True, False), ids=("tied", "untied"))
def test_round_trip_is_bit_for_bit(tied, tmp_path):
    model = our_model(tied=tied)
    model.save_pretrained(tmp_path / "hf")
    assert_same_weights(t.GPT.from_pretrained(tmp_path / "hf"), model)
    assert_same_logits(model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf"))


def test_exported_folder_just_works(encoding, tmp_path):
    model = our_model(n_vocab=encoding.n_vocab, vocab_size=t.padded(encoding.n_vocab))
    model.save_pretrained(tmp_path, encoding)
    files = {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert files <= set(os.listdir(tmp_path))
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(hf) is transformers.GPT2LMHeadModel and hf.config.vocab_size == encoding.n_vocab
    assert hf.get_input_embeddings().weight.shape[0] == encoding.n_vocab
    assert hf.generation_config.eos_token_id == hf.config.eos_token_id == encoding.eot_token
    assert_same_logits(model, hf)

    pipe = transformers.pipeline("text-generation", model=str(tmp_path))
    text = pipe("To be", max_new_tokens=6, do_sample=False, return_tensors=True)[0]["generated_token_ids"]
    expected = model.generate(torch.tensor([encoding.encode("To be")]), 6, temperature=0)[0].tolist()
    end = expected.index(encoding.eot_token) + 1 if encoding.eot_token in expected else None
    assert list(text) == expected[:end]
    assert pipe("To be")[0]["generated_text"].startswith("To be")  # its 256 new tokens by default are beyond our context


def test_tokenizer_equals_tiktokens(encoding, tmp_path):
    t.hugging_face_tokenizer(encoding, 32).save_pretrained(tmp_path)
    transformers.GPT2Config(n_layer=1).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == encoding.n_vocab and tokenizer.eos_token_id == encoding.eot_token
    assert tokenizer.model_max_length == 32
    plays = (ROOT / "input.txt").read_text()[:20_000]
    for text in (ODD_TEXT, plays, f"<|endoftext|>{ODD_TEXT}<|endoftext|> <|endoftext|>\n", "", "<|endof"):
        tokens = encoding.encode(text, allowed_special="all")
        assert tokenizer(text)["input_ids"] == tokens
        assert tokenizer.decode(tokens) == text
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text.replace("<|endoftext|>", "")


def test_export_replaces_its_own_files_only(tmp_path):
    """A slip in the folder's name must not cost a person what lies there."""
    (tmp_path / "model_00001.pt").write_text("precious")
    for seed in (0, 1):
        our_model(seed).save_pretrained(f"{tmp_path}/", t.get_encoding("bytes"))
    assert_same_weights(t.GPT.from_pretrained(tmp_path), our_model(1))
    assert (tmp_path / "model_00001.pt").read_text() == "precious"
    assert not tmp_path.with_name(tmp_path.name + ".part").exists()


@pytest.mark.parametrize("room", (5_000, 80_000), ids=("for config.json", "all but tokenizer.json"))
def test_full_disk_is_an_oserror_and_the_old_export_stands(room, tmp_path):
    """save() makes a line of OSError; a file size limit stands in for the disk."""
    old = our_model(0, n_embd=4)
    old.save_pretrained(tmp_path / "hf")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    encoding = t.tiktoken.Encoding("many", pat_str=".", special_tokens={"<|endoftext|>": 4000}, mergeable_ranks={
        bytes([i % 256]) + (b"" if i < 256 else bytes([i // 256])) : i for i in range(4000)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(OSError):
            our_model(1).save_pretrained(tmp_path / "hf", encoding)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_same_weights(t.GPT.from_pretrained(tmp_path / "hf"), old)


def test_export_without_the_vocabulary(monkeypatch, tmp_path, capsys):
    model = our_model()
    torch.save(t.weights(t.State(model, [], None), t.Config(encoding="gpt2")), tmp_path / "model.pt")

    def no_vocabulary(name):
        raise t.UserError("The GPT-2 vocabulary can't be had.")
    monkeypatch.setattr(t, "get_encoding", no_vocabulary)
    t.export(tmp_path / "model.pt", tmp_path / "hf")
    assert "without a tokenizer" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path / "hf")) == ["config.json", "generation_config.json", "model.safetensors"]
    assert_same_logits(model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf"))


# ----------------------------------------------------------------------------------------------- generating
def naive(model, idx, n, temperature=1.0, top_k=None, generator=None):
    """What generate() does, recomputing everything for each token."""
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


DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", (1, 20, 32, 45))
@torch.no_grad()
def test_cache_changes_nothing(length, device):
    """From prompts below, at and beyond block_size=32, to texts beyond it; greedy and sampled."""
    model, idx = our_model().to(device), ids(3, length).to(device)
    assert torch.equal(model.generate(idx, 40, temperature=0), naive(model, idx, 40, temperature=0))
    for options in (dict(), dict(top_k=5, temperature=1.7), dict(top_k=1000)):
        got = model.generate(idx, 40, generator=seeded(device=device), **options)
        options["top_k"] = min(options.get("top_k") or 257, 257)
        assert torch.equal(got, naive(model, idx, 40, generator=seeded(device=device), **options))


def test_each_token_costs_one_position(monkeypatch):
    model, widths, hidden = our_model(), [], t.GPT.hidden
    monkeypatch.setattr(t.GPT, "hidden", lambda self, idx, **k: widths.append(idx.size(1)) or hidden(self, idx, **k))
    model.generate(ids(1, 10), 20)
    assert widths == [10] + [1] * 19


def test_generate_shapes_and_seeds():
    model, idx = our_model(), ids(3, 5)
    out = model.generate(idx, 7, generator=seeded())
    assert out.shape == (3, 12) and out.dtype == torch.int64 and torch.equal(out[:, :5], idx)
    assert torch.equal(model.generate(idx, 0), idx)
    assert torch.equal(out, model.generate(idx, 7, generator=seeded()))
    assert not torch.equal(out, model.generate(idx, 7, generator=seeded(6)))
    assert torch.equal(model.generate(idx, 7, top_k=1), model.generate(idx, 7, temperature=0))
    top = model(idx)[0][:, -1].topk(3).indices
    for draw in range(20):
        token = model.generate(idx, 1, top_k=3, temperature=5.0)[:, -1:]
        assert (token == top).any(1).all()


@pytest.mark.parametrize("idx, options", (
    (ids(1, 0), {}), (ids(5), {}), (ids(1, 2, 3), {}), (ids(1, 3), dict(temperature=-0.1)), (ids(1, 3), dict(top_k=0))))
def test_generate_refuses(idx, options):
    with pytest.raises(ValueError, match="must be"):
        our_model().generate(idx, 3, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_generate_leaves_training_alone(device):
    """Neither torch's random state, nor gradients, nor the mode changes."""
    model = our_model().to(device).train()
    idx = ids(2, 8).to(device)
    model(idx, idx)[1].backward()
    before = torch.get_rng_state(), torch.cuda.get_rng_state() if device == "cuda" else None
    grads = [p.grad.clone() for p in model.parameters()]
    out = model.generate(idx, 40, generator=seeded(device=device))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert device == "cpu" or torch.equal(torch.cuda.get_rng_state(), before[1])
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


# -------------------------------------------------------------------------------------------------- samples
class Says:
    """A model that generates what it is told."""
    def __init__(self, text):
        self.text = text

    def generate(self, idx, *args, **kwargs):
        return torch.tensor([idx[0].tolist() + list(self.text)])


def print_sample(text, prompt="> "):
    run = t.Run(*[None] * len(t.Run._fields))._replace(
        cfg=t.Config(sample_prompt=prompt), place=t.Place(0, 0, 1, torch.device("cpu")), encoding=t.get_encoding("bytes"),
        state=t.State(Says(text), [], None, step=7), autocast=contextlib.nullcontext)
    t.print_samples(run)


def test_samples_show_odd_bytes(capsys):
    print_sample("é🙂\n\ttext ".encode() + b"\xff\xc3 \x00\x1b[31m\r\x7f" + "\u2028\u202e".encode() + bytes([0xE2, 0x82]))
    expected = "> é🙂\n\ttext \\xff\\xc3 \\x00\\x1b[31m\\r\\x7f\\u2028\\u202e\\xe2\\x82"
    assert capsys.readouterr().out == f"--- sample of rank 0 at step 7 ---\n{expected}\n---\n"


def test_sample_of_an_empty_prompt_begins_with_end_of_text(capsys):
    print_sample(b"text", prompt="")
    assert "\n<|endoftext|>text\n---" in capsys.readouterr().out


# ------------------------------------------------------------------------------------- by running the script
@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes((ROOT / "input.txt").read_bytes()[:40_000])
    return path


def flags(text, **constants):
    constants = dict(data=text, log_dir="log", encoding="bytes", T=32, B=4, total_batch_size=256, max_steps=4, save_every=1,
                     eval_every=2, sample_every=4, val_tokens=2048, sample_tokens=40, hellaswag_every=0, warmup_steps=1,
                     device="cpu", dtype="float32", milestone_every=0, optimizer="adamw") | constants
    return [f"--{name}={value}" for name, value in constants.items()]


def samples(stdout):
    """[(rank, step, text)] as they stand on stdout."""
    return [(int(r), int(s), text) for r, s, text in
            re.findall(r"^--- sample of rank (\d+) at step (\d+) ---\n(.*?)\n---$", stdout, re.M | re.S)]


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """A run that began from a Hugging Face folder: its log_dir, stdout, and the model it began from."""
    folder = tmp_path_factory.mktemp("run")
    hf = hf_model(n_positions=48)
    hf.save_pretrained(folder / "start")
    run = run_script("train_gpt2.py", *flags(text, init_from="start", sample_prompt="Grüße\a"), cwd=folder, env=ENV)
    assert run.returncode == 0, run.stderr
    return folder, run.stdout, hf


def test_trains_from_a_folder(trained, text):
    """The first validation sees that model's loss; in the end there is an export of the last checkpoint."""
    folder, stdout, hf = trained
    _, loader = t.open_data(t.Config(data=text, T=32, total_batch_size=256, val_tokens=2048), t.get_encoding("bytes"))
    x, y = loader.batch(0, 64)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(hf(x).logits.flatten(0, 1), y.flatten()).item()
    step, stream, value = (folder / "log/log.txt").read_text().splitlines()[0].split()
    assert (step, stream) == ("0", "val") and abs(float(value) - loss) < 1e-4
    last = t.from_weights(t.read_checkpoint(folder / "log/model_00004.pt"))
    assert last.config.block_size == 48
    assert not torch.equal(last.transformer.ln_f.bias, hf.transformer.ln_f.bias)
    assert "exported to log/hf/" in stdout
    assert_same_weights(t.GPT.from_pretrained(folder / "log/hf"), last)
    transformers.AutoTokenizer.from_pretrained(folder / "log/hf")


def test_samples_of_a_run(trained):
    shown = samples(trained[1])
    assert [(rank, step) for rank, step, _ in shown] == [(0, 0), (0, 4)]
    for _, _, text in shown:
        assert text.startswith("Grüße\\x07") and len(text) >= 40 / 4 and text.replace("\n", "").replace("\t", "").isprintable()


def test_resumes_without_the_folder_it_began_from(trained, text, tmp_path):
    log = tmp_path / "log"
    shutil.copytree(trained[0] / "log", log)
    (log / "checkpoint_00004.pt").unlink()
    (log / "model_00004.pt").unlink()
    run = run_script("train_gpt2.py", *flags(text, init_from="start", sample_prompt="Grüße\a"), cwd=tmp_path, env=ENV)
    assert run.returncode == 0 and "going on from log/checkpoint_00003.pt" in run.stdout, run.stderr
    assert_same_weights(*(t.from_weights(t.read_checkpoint(p / "log/model_00004.pt")) for p in (trained[0], tmp_path)))


@pytest.mark.parametrize("name", ("model_00004.pt", "checkpoint_00004.pt"))
def test_starts_from_our_own_files(name, trained):
    path = trained[0] / "log" / name
    model = t.build_model(t.Config(init_from=str(path), T=32, encoding="bytes"), t.get_encoding("bytes"), None)
    assert_same_weights(model, t.GPT.from_pretrained(trained[0] / "log/hf"))


def test_documented_one_liner_exports_any_pt(trained, tmp_path):
    command = re.search(r'python -c ".*?"', t.export.__doc__).group()
    path = trained[0] / "log/checkpoint_00004.pt"
    words = shlex.split(command.replace("log/model_19073.pt", str(path)).replace("'hf'", f"'{tmp_path}/hf'"))
    run = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, env={**os.environ, **ENV}, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert_same_weights(t.GPT.from_pretrained(tmp_path / "hf"), t.GPT.from_pretrained(trained[0] / "log/hf"))


def test_two_processes_print_their_samples_in_order_on_an_ascii_terminal(trained, text, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", ROOT / "train_gpt2.py",
               *flags(text, init_from=trained[0] / "log/model_00004.pt", max_steps=1, sample_every=1, sample_prompt="Grüße")]
    run = subprocess.run(command, cwd=tmp_path, env={**os.environ, **ENV, "PYTHONIOENCODING": "ascii"}, timeout=120,
                         capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
    shown = samples(run.stdout.decode("ascii"))
    assert [(step, rank) for rank, step, _ in shown] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(text.startswith(r"Gr\xfc\xdfe") for _, _, text in shown)
    assert len({text for _, _, text in shown}) == 4


# ------------------------------------------------------------------------------------------------ bad input
def bad_inputs(folder, log):
    """{name: (flags that differ, what the one line must hold)}"""
    def hf(name, change=lambda f: None, **constants):
        hf_model(**constants).save_pretrained(folder / name)
        change(folder / name)
        return folder / name

    def cut(f):
        os.truncate(f / "model.safetensors", 5000)

    def drop(*keys):
        return lambda f: edit_weights(f, lambda w: [w.pop(key) for key in keys])
    llama = transformers.LlamaConfig(vocab_size=257, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
                                     num_attention_heads=2)
    transformers.LlamaForCausalLM(llama).save_pretrained(folder / "llama")
    (folder / "bare").mkdir()
    torch.save({"model": hf_model().state_dict()}, folder / "foreign.pt")
    (folder / "garbage.pt").write_bytes(b"no zip" * 100)
    bin_folder = hf("bin", lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"))
    shard = folder / "shard"
    hf_model().save_pretrained(shard, max_shard_size="10KB")
    sorted(shard.glob("model-*"))[1].unlink()
    return {
        "another model": (dict(init_from=folder / "llama"), "model_type=llama"),
        "another activation": (dict(init_from=hf("relu", activation_function="relu")), "activation_function=relu"),
        "another epsilon": (dict(init_from=hf("eps", layer_norm_epsilon=1e-6)), "layer_norm_epsilon"),
        "another MLP": (dict(init_from=hf("inner", n_inner=20)), "n_inner=20"),
        "another attention": (dict(init_from=hf("scale", scale_attn_weights=False)), "scale_attn_weights"),
        "wrong shape": (dict(init_from=hf("wpe", lambda f: edit_config(f, n_positions=40))), "transformer.wpe.weight"),
        "wrong width": (dict(init_from=hf("width", lambda f: edit_config(f, n_embd=8))), "transformer.h.0.attn.c_attn.bias"),
        "missing tensors": (dict(init_from=hf("holes", drop("transformer.h.1.ln_1.bias", "transformer.wte.weight"))),
                            "transformer.h.1.ln_1.bias, transformer.wte.weight"),
        "missing head": (dict(init_from=hf("head", drop("lm_head.weight"), tie_word_embeddings=False)), "lm_head.weight"),
        "missing layers": (dict(init_from=hf("layers", lambda f: edit_config(f, n_layer=3))), "transformer.h.2.attn.c_attn"),
        "missing shard": (dict(init_from=shard), "model-00002"),
        "no config.json": (dict(init_from=folder / "bare"), "can't be loaded"),
        "broken config.json": (dict(init_from=hf("json", lambda f: (f / "config.json").write_text("{"))), "JSON"),
        "ill-typed config.json": (dict(init_from=hf("type", lambda f: edit_config(f, n_head="two"))), "can't be loaded"),
        "no weights": (dict(init_from=hf("none", lambda f: (f / "model.safetensors").unlink())), "no file named"),
        "cut safetensors": (dict(init_from=hf("cut", cut)), "can't be loaded (SafetensorError"),
        "broken pytorch_model.bin": (dict(init_from=bin_folder), "can't be loaded"),
        "another vocabulary": (dict(init_from=hf("vocab", vocab_size=300)), "vocabulary of 300, encoding=bytes one of 257"),
        "context too short": (dict(init_from=hf("short"), T=64), "T=64"),
        "own file, context too short": (dict(init_from=log / "model_00004.pt", T=64), "block_size=48"),
        "foreign .pt": (dict(init_from=folder / "foreign.pt"), "no whole .pt of ours"),
        "garbage .pt": (dict(init_from=folder / "garbage.pt"), "no whole .pt of ours"),
        "missing .pt": (dict(init_from=folder / "nowhere.pt"), "no whole .pt of ours"),
        "missing folder": (dict(init_from=folder / "nowhere"), "nowhere"),
        "offline": (dict(init_from="gpt2"), "go online")}


FORKS = """
import json, os, sys, traceback, runpy, transformers, transformers.models.gpt2.modeling_gpt2, train_gpt2
for name, words in json.load(open("cases.json")).items():
    if pid := os.fork():
        os.waitpid(pid, 0)
        continue
    for fd, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}.{stream}", os.O_WRONLY | os.O_CREAT), fd)
    code, sys.argv = 0, ["train_gpt2.py", *words]
    try:
        train_gpt2.main()
    except SystemExit as e:  # as the interpreter does at its end
        code = e.code if isinstance(e.code, int) else bool(e.code) * 1
        print(e.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    open(f"{name}.code", "w").write(str(code))
    os._exit(0)
"""


def test_bad_input_is_a_line(trained, text, tmp_path):
    """One process imports, and forks for each case: 25 imports of torch and transformers would take minutes."""
    (tmp_path / "inputs").mkdir()
    cases = bad_inputs(tmp_path / "inputs", trained[0] / "log")
    (tmp_path / "cases.json").write_text(json.dumps({name: flags(text, **changes) for name, (changes, _) in cases.items()}))
    subprocess.run([sys.executable, "-c", FORKS], cwd=tmp_path, timeout=120, check=True, env={
        **os.environ, **ENV, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hub")})
    wrong = {}
    for name, (_, expected) in cases.items():
        code, err = (tmp_path / f"{name}.code").read_text(), (tmp_path / f"{name}.err").read_text()
        if code == "0" or err.count("\n") != 1 or expected not in err or not err.startswith("train_gpt2.py: "):
            wrong[name] = (code, err)
    assert not wrong, "\n\n".join(f"{k}: exit code {code}\n{err}" for k, (code, err) in wrong.items())


def test_unreachable_hub_is_a_line(text, tmp_path):
    """Nothing listens at that port. The hub's client retries for half a minute, which no test needs to sit out."""
    hurry = "import time, train_gpt2; time.sleep = lambda s: None; train_gpt2.main()"
    run = subprocess.run([sys.executable, "-c", hurry, *flags(text, init_from="gpt2-medium")], cwd=tmp_path, timeout=120,
                         capture_output=True, text=True, env={
                             **os.environ, **ENV, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "0",
                             "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub")})
    assert run.returncode == 1 and run.stdout == ""
    assert re.fullmatch(r'train_gpt2.py: init_from="gpt2-medium" can\'t be loaded .*go online.*\n', run.stderr)
