"""The model is GPT-2, exactly, and learns."""
import math
import shutil

import pytest
import torch

import train_gpt2 as t

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = dict(block_size=32, vocab_size=384, n_layer=2, n_head=2, n_embd=32, n_vocab=257)


def tiny(**changes):
    torch.manual_seed(0)
    return t.GPT(t.GPTConfig(**TINY | changes))


def tokens(B=4, T=32, n_vocab=257, seed=0):
    return torch.randint(0, n_vocab, (B, T), generator=torch.Generator().manual_seed(seed))


def test_parameter_count_of_gpt2_small():
    with torch.device("meta"):
        assert t.GPT(t.GPTConfig(vocab_size=50257)).num_params() == 124_439_808


@pytest.mark.parametrize("shape", [
    dict(n_layer=2, n_head=2, n_embd=32), dict(n_layer=3, n_head=5, n_embd=40),
    dict(n_layer=1, n_head=1, n_embd=16, vocab_size=300, n_vocab=300)])
def test_logits_equal_transformers(shape):
    """Weights copied by hand, not by from_pretrained, so that this stands on its own."""
    transformers = pytest.importorskip("transformers")
    ours = tiny(**shape)
    with torch.no_grad():  # away from the initial zeros and ones, so that every bias and gain shows
        for p in ours.parameters():
            generator = torch.Generator().manual_seed(p.numel())
            p.add_(torch.randn(p.shape, generator=generator) * 0.05)
    c = ours.config
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.block_size, n_layer=c.n_layer, n_head=c.n_head,
        n_embd=c.n_embd, bos_token_id=None, eos_token_id=None)).eval()
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    state = {k: w.t() if k.endswith(transposed) else w for k, w in ours.state_dict().items()}
    assert set(state) == set(theirs.state_dict())
    theirs.load_state_dict(state)
    idx = tokens()
    with torch.no_grad():
        expected = theirs(idx).logits[..., :c.n_vocab]
        assert (ours(idx)[0] - expected).abs().max() < 1e-4


def test_initial_weights():
    model = tiny(n_layer=8, n_embd=128)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif p.dim() == 2:
            rows = p[:257] if "wte" in name else p
            expected = 0.02 / math.sqrt(2 * 8) if name.endswith("c_proj.weight") else 0.02
            assert abs(rows.std().item() / expected - 1) < 0.05, name
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not model.lm_head.weight[257:].any()


@pytest.mark.parametrize("width", [32, 128])
def test_initial_loss_is_that_of_a_guess(width):
    idx = tokens(16)
    _, loss = tiny(n_embd=width)(idx[:, :-1], idx[:, 1:])
    assert abs(loss.item() - math.log(257)) < 0.1


def test_padding_is_never_predicted():
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[257:] = 100.0  # whatever stands in the padding must not matter
    logits, loss = model(tokens(), tokens(seed=1))
    assert logits.shape == (4, 32, 257)
    assert abs(loss.item() - math.log(257)) < 0.1


def test_training_gets_the_loss_without_logits():
    """Logits that are returned would get a gradient of their own size in the compiled backward."""
    model, idx = tiny(), tokens(T=33)
    logits, loss = model(idx[:, :-1], idx[:, 1:])
    nothing, alone = model(idx[:, :-1], idx[:, 1:], return_logits=False)
    assert logits is not None and nothing is None and torch.equal(loss, alone)
    assert model(idx[:, :-1])[1] is None


def test_too_long_an_input_is_refused():
    with pytest.raises(ValueError, match="block_size=32"):
        tiny()(tokens(T=33))


def test_width_must_divide_into_heads():
    with pytest.raises(t.UserError, match="n_embd=32 is not divisible by n_head=5"):
        tiny(n_head=5)


def test_a_token_sees_only_what_came_before():
    model, a = tiny(), tokens()
    b = a.clone()
    b[:, 20:] = (b[:, 20:] + 1) % 257
    assert torch.equal(model(a)[0][:, :20], model(b)[0][:, :20])
    assert not torch.allclose(model(a)[0][:, 20:], model(b)[0][:, 20:])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_batch_can_be_overfitted(optimizer):
    model, idx = tiny(n_embd=64), tokens(B=4, T=33)
    cfg = t.Config(optimizer=optimizer, weight_decay=0.0, max_lr=3e-3, min_lr=3e-4,
                   warmup_steps=5, max_steps=250)
    optimizers = t.configure_optimizers(model, cfg)
    for step in range(cfg.max_steps):
        _, loss = model(idx[:, :-1], idx[:, 1:])
        loss.backward()
        t.set_learning_rate(optimizers, cfg, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert loss.item() < 0.01


def test_learning_rate_at_the_corners():
    cfg = t.Config()
    assert t.get_lr(0, cfg) == pytest.approx(6e-4 / 715)
    assert t.get_lr(714, cfg) == pytest.approx(6e-4)
    assert t.get_lr(715, cfg) == pytest.approx(6e-4)
    assert t.get_lr((715 + 19073) // 2, cfg) == pytest.approx((6e-4 + 6e-5) / 2, rel=1e-3)
    assert t.get_lr(19073, cfg) == pytest.approx(6e-5)
    assert t.get_lr(10**6, cfg) == pytest.approx(6e-5)
    rates = [t.get_lr(s, cfg) for s in range(0, 19073, 50)]
    assert all(a > b for a, b in zip(rates[15:], rates[16:]))
    assert t.get_lr(0, t.Config(warmup_steps=0)) == pytest.approx(6e-4)
    linear = t.Config(lr_shape="linear")
    assert t.get_lr(714, linear) == pytest.approx(6e-4)
    assert t.get_lr(19073, linear) == pytest.approx(6e-5)
    quarter = 715 + (19073 - 715) // 4
    assert t.get_lr(quarter, linear) == pytest.approx(6e-4 - (6e-4 - 6e-5) / 4, rel=1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_parameter_has_its_place_in_the_optimizers(optimizer):
    model = tiny()
    names = {p: n for n, p in model.named_parameters()}
    optimizers = t.configure_optimizers(model, t.Config(optimizer=optimizer, weight_decay=0.1))
    where = {}
    for o in optimizers:
        for group in o.param_groups:
            for p in group["params"]:
                assert names[p] not in where
                where[names[p]] = (type(o).__name__, group["weight_decay"])
    assert set(where) == set(names.values())
    for name, (kind, decay) in where.items():
        matrix = model.get_parameter(name).dim() >= 2
        assert decay == (0.1 if matrix else 0.0), name
        in_muon = optimizer == "muon" and ".h." in name and matrix
        assert kind == ("Muon" if in_muon else "AdamW"), name
    adamw = optimizers[0].param_groups[0]
    assert adamw["betas"] == (0.9, 0.95) and adamw["eps"] == 1e-8 and adamw["fused"]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 0.02), (torch.bfloat16, 0.08)])
def test_our_muon_is_torchs(dtype, tolerance):
    """torch's computes in bfloat16 and one matrix at a time; ours all of a shape at once."""
    theirs = getattr(torch.optim, "Muon", None)
    if theirs is None:
        pytest.skip("this torch has no Muon")
    shapes = [(48, 24), (24, 48), (24, 24), (48, 24), (24, 96)]
    generator = torch.Generator().manual_seed(0)
    ours, copies = ([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes] for _ in "ab")
    a = t.Muon(ours, lr=0.1, weight_decay=0.1, dtype=dtype)
    b = theirs(copies, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for p, q in zip(ours, copies):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q in zip(ours, copies):
        assert (p - q).norm() / q.norm() < tolerance
        state = a.state[p]
        torch.testing.assert_close(state["momentum_buffer"], b.state[q]["momentum_buffer"])
        assert state.keys() == b.state[q].keys()


def test_newton_schulz_makes_singular_values_one():
    G = torch.randn(3, 40, 20, generator=torch.Generator().manual_seed(0))
    for X in (t.newton_schulz(G), t.newton_schulz(G.mT)):
        values = torch.linalg.svdvals(X)
        assert 0.5 < values.min() and values.max() < 1.5
    assert torch.equal(t.newton_schulz(torch.zeros(1, 4, 4)), torch.zeros(1, 4, 4))


def test_compiled_is_the_same_model():
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("torch.compile needs a C++ compiler and there is none")
    torch.compiler.reset()  # what earlier tests compiled would count as shapes seen before
    model, idx = tiny(), tokens(T=33)
    plain = model(idx[:, :-1], idx[:, 1:])[1]
    plain.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.compile()
    torch._dynamo.utils.counters.clear()
    loss = model(idx[:, :-1], idx[:, 1:], return_logits=False)[1]
    loss.backward()
    assert loss.item() == pytest.approx(plain.item(), abs=1e-5)
    assert all(torch.allclose(p.grad, g, atol=1e-5) for p, g in zip(model.parameters(), grads))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for length in range(5, 12):  # what evaluation and sampling do, at ragged shapes
        with torch.no_grad():
            model.forward(idx[:, :length], idx[:, 1:length + 1], return_logits=False)
            model.generate(idx[:1, :length], 3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs == 1


def test_bfloat16_autocast_is_near():
    model, idx = tiny(), tokens(T=33)
    with torch.no_grad():
        exact = model(idx[:, :-1], idx[:, 1:])[1]
        with torch.autocast("cpu", torch.bfloat16):
            rough = model(idx[:, :-1], idx[:, 1:])[1]
    assert rough.item() == pytest.approx(exact.item(), abs=0.02) and rough.item() != exact.item()


def test_flops_are_palms_count():
    model = t.GPT(t.GPTConfig(vocab_size=50257, block_size=64, n_layer=2, n_head=2, n_embd=32))
    N = model.num_params() - 64 * 32
    assert t.flops_per_token(model, 64) == 6 * N + 12 * 2 * 32 * 64
