"""Tests of the model, which must be GPT-2, and of the optimizers, which must match their papers."""
import contextlib
import math

import pytest
import torch
from conftest import ids, seeded, shake, small, stub_run
from torch import nn
from torch.nn import functional as F

import train_gpt2 as t

def test_parameters_of_gpt2_small():
    """GPT-2 (124M) has 124,439,808 parameters, and its output matrix is the embedding."""
    with torch.device("meta"):
        model = t.GPT(t.GPTConfig())
    n_padding = 50304 - 50257  # rows of the embedding that belong to no token
    assert sum(p.numel() for p in model.parameters()) == 124_439_808 + n_padding * 768
    assert model.lm_head.weight is model.transformer.wte.weight

@pytest.mark.parametrize("width, std", [(64, 0.02 * 12**0.5), (768, 0.02)])
def test_initial_weights_and_loss(width, std):
    """The standard deviations fit the width, and are those of GPT-2 at its width of 768.

    The variance of the logits is 0.3 at any width, so the loss is about ln(vocab_size) + 0.15.
    """
    model = small(n_layer=2 if width == 768 else 8, n_embd=width, vocab_size=50257)
    loss = model(ids(), ids(seed=1))[1].item()
    assert loss == pytest.approx(math.log(50257) + 0.15, abs=0.1)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            scale = math.sqrt(2 * model.config.n_layer) if name.endswith("c_proj.weight") else 1
            assert p[:50257].std().item() == pytest.approx(std / scale, rel=0.05), name
        else:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name
    assert not model.transformer.wte.weight[50257:].any()

def test_initial_weights_depend_on_the_seed_and_their_name_only(monkeypatch):
    """An added layer does not change the initial weights of other layers, which all differ."""
    class WiderBlock(t.Block):
        def __init__(self, config):
            super().__init__(config)
            self.gate = nn.Linear(config.n_embd, 5)
            self.scale = nn.Parameter(torch.full((5,), 7.0))

    plain, other = small().state_dict(), t.GPT(small().config, seed=1).state_dict()
    monkeypatch.setattr(t, "Block", WiderBlock)
    wider = small().state_dict()
    assert all(torch.equal(wider[name], weight) for name, weight in plain.items())
    firsts = {name: weight[0, 0].item() for name, weight in plain.items() if weight.dim() == 2}
    del firsts["lm_head.weight"]  # the same matrix as wte
    assert len(set(firsts.values())) == len(firsts)
    assert not torch.equal(other["transformer.wpe.weight"], plain["transformer.wpe.weight"])
    assert wider["transformer.h.1.gate.weight"].std().item() == pytest.approx(0.098, rel=0.2)
    assert not wider["transformer.h.1.gate.bias"].any()
    assert (wider["transformer.h.1.scale"] == 7).all()
    # Another value would change the initial weights and dropout masks of every run
    assert t.seed_from(1337, "transformer.wte.weight") == 1706717008

def test_a_token_attends_to_earlier_tokens_only():
    """A change of later tokens does not change the logits of earlier ones."""
    model, a = shake(small()), ids()
    b = a.clone()
    b[:, 20] = (b[:, 20] + 1) % 257
    before, after = model(a)[0], model(b)[0]
    assert torch.equal(before[:, :20], after[:, :20])
    assert ((before - after)[:, 20:].abs().amax(-1) > 1e-4).all()  # all later tokens attend to it

def loss_and_gradients(model, loss):
    """Return a loss as a number, and {name: gradient} of the parameters."""
    model.zero_grad()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}

def test_the_padding_does_not_affect_the_loss():
    """Loss and gradients equal those of a model without padding, and the padding gets no gradient.

    Targets of -100 are left out of the mean.
    """
    model, idx, targets = shake(small()), ids(), ids(seed=1)
    model.lm_head.weight.data[257:] += 1  # the values in the padding must not matter
    targets.view(-1)[:40] = -100
    final = []  # the output of the last norm, (B, T, C)
    hook = model.transformer.ln_f.register_forward_hook(lambda *args: final.append(args[-1]))
    logits, same = model(idx, targets)
    hook.remove()
    cut = F.linear(final[0], model.lm_head.weight[:257])
    torch.testing.assert_close(logits, cut)
    expected = F.cross_entropy(cut.flatten(0, 1)[40:], targets.flatten()[40:])
    expected, expected_grads = loss_and_gradients(model, expected)
    nothing, loss = model(idx, targets, return_logits=False)
    assert nothing is None and loss == same and model(idx)[1] is None
    loss, grads = loss_and_gradients(model, loss)
    assert loss == pytest.approx(expected, abs=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], atol=1e-6, rtol=1e-5)
    assert not grads["transformer.wte.weight"][257:].any()

def test_loss_is_computed_in_float32_under_autocast():
    """Under autocast, the residual stream is bfloat16, and the loss is computed in float32."""
    model, stream = small(), []
    exact = model(ids(), ids())[1]
    model.transformer.h[1].register_forward_pre_hook(lambda _, args: stream.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(ids(), ids())
    assert stream == [torch.bfloat16]  # float32 would take twice the memory
    assert logits.dtype == loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), abs=0.02) and loss.item() != exact.item()

def naive(model, idx, n, temperature, top_k, generator=None):
    """Append n sampled tokens to idx, in the simplest way."""
    for _ in range(n):
        logits = model(idx[:, -32:])[0][:, -1]
        worst = logits.topk(top_k).values[:, -1:]
        probs = logits.masked_fill(logits < worst, -math.inf).div(temperature).softmax(-1)
        idx = torch.cat((idx, torch.multinomial(probs, 1, generator=generator)), dim=1)
    return idx

@pytest.mark.parametrize("length", (1, 32, 45))
@torch.no_grad()
def test_generate_from_prompts_of_any_length(length):
    """generate() equals a simple loop for prompts shorter and longer than the context of 32.

    With a generator, it does not change torch's random state.
    """
    model, idx = shake(small()), ids(3, length)
    assert torch.equal(model.generate(idx, 40, temperature=0), naive(model, idx, 40, 1.0, 1))
    state = torch.get_rng_state()
    for top_k, temperature in ((0, 1.0), (5, 1.7), (300, 0.5)):  # 300 is more than vocab_size
        expected = naive(model, idx, 40, temperature, min(top_k or 257, 257), seeded(5))
        assert torch.equal(model.generate(idx, 40, temperature, top_k, seeded(5)), expected)
    assert torch.equal(torch.get_rng_state(), state)

def test_dropout_is_applied_to_the_embedding_the_attention_and_both_branches(monkeypatch):
    """Here, dropout scales what it gets, so the logits show each place. In eval mode, it is off."""
    def attention(*args, dropout_p, real=F.scaled_dot_product_attention, **words):
        seen.append(dropout_p)
        return real(*args, **words)
    seen, idx, model = [], ids(), shake(small(dropout=0.1))
    expected = model(idx)[0]
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: (1 + self.p * self.training) * x)
    assert torch.equal(model(idx)[0], expected) and seen == [0.0, 0.0]
    parts = model.train().transformer
    x = 1.1 * (parts.wte(idx) + parts.wpe(torch.arange(32)))
    for block in parts.h:
        x = x + 1.1 * block.attn(block.ln_1(x))
        x = x + 1.1 * block.mlp(block.ln_2(x))
    torch.testing.assert_close(model(idx)[0], model.lm_head(parts.ln_f(x))[..., :257])
    assert seen[2:] == [0.1] * 4

def test_micro_batches_processes_and_steps_have_different_dropout_masks(monkeypatch):
    """A seed belongs to a row number, so two runs with the same B have the same masks."""
    seeds, cfg = [], t.Config(B=4, T=32, total_batch_size=8 * 32 * 2, dropout=0.1)
    monkeypatch.setattr(t, "WORLD_SIZE", 2)
    monkeypatch.setattr(t.dist, "all_reduce", lambda sums: None)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(seed))
    for rank in (0, 1):
        monkeypatch.setattr(t, "RANK", rank)
        run = stub_run(small(dropout=0.1), cfg, ids(T=33))
        run.ddp_model.no_sync = contextlib.nullcontext
        for _ in range(2):
            t.train_step(run)
    assert len(set(seeds)) == len(seeds) == 2 * 2 * 2

@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_batch_can_be_overfitted(optimizer):
    cfg = t.Config(optimizer=optimizer, weight_decay=0.0, max_lr=1e-2, min_lr=1e-3, T=32, B=4,
                   total_batch_size=128, warmup_steps=5, max_steps=80)
    run = stub_run(small(n_embd=64), cfg, ids(T=33))
    for _ in range(cfg.max_steps):
        loss, _ = t.train_step(run)
    assert loss < 0.01

def test_learning_rate_of_wsd_is_constant_until_the_last_steps():
    """A run that branches before the decay and is longer has the same learning rate until then."""
    cfg = t.Config(lr_shape="wsd", decay_steps=1000, min_lr=0.0)
    expected = {0: 6e-4 / 715, 714: 6e-4, 715: 6e-4, 18073: 6e-4, 18573: 3e-4, 19072: 6e-7,
                19073: 0}
    assert {n: t.get_lr(n, cfg) for n in expected} == pytest.approx(expected, rel=1e-3)
    assert t.get_lr(19073, t.replace(cfg, max_steps=30000)) == 6e-4
    short = t.replace(cfg, max_steps=1000)  # the decay begins after warmup
    assert t.get_lr(715, short) == 6e-4 > t.get_lr(716, short) > 5.9e-4

@pytest.mark.parametrize("shape, quarter", [("linear", 0.75), ("cosine", 0.5 + 0.5**1.5)])
def test_learning_rate_at_points_of_its_schedule(shape, quarter):
    """The learning rate is right at both ends of warmup and decay, and during the decay.

    quarter: the fraction of the decay that remains after a quarter of its steps.
    """
    cfg, fall = t.Config(lr_shape=shape), 19073 - 715
    expected = {0: 6e-4 / 715, 714: 6e-4, 715: 6e-4, 715 + fall // 2: 3.3e-4, 19073: 6e-5,
                715 + fall // 4: 6e-5 + quarter * 5.4e-4, 10**6: 6e-5}
    assert {n: t.get_lr(n, cfg) for n in expected} == pytest.approx(expected, rel=1e-3)
    assert t.get_lr(0, t.Config(warmup_steps=0)) == pytest.approx(6e-4)

@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_trainable_parameter_is_in_one_group_of_an_optimizer(optimizer):
    """Muon, if it is chosen, gets the matrices in the blocks, and AdamW gets all others.

    Only parameters with two or more dimensions decay. Frozen parameters are in no group.
    """
    model = small()
    model.transformer.h[0].experts = nn.Parameter(torch.zeros(2, 3, 3))  # not a matrix
    model.transformer.wpe.requires_grad_(False)
    model.transformer.h[1].mlp.requires_grad_(False)
    optimizers = t.configure_optimizers(model, t.Config(optimizer=optimizer, muon_lr_ratio=2.0))
    found = [(p, type(o).__name__, group["weight_decay"], group["lr"] / 6e-4)
             for o in optimizers for group in o.param_groups for p in group["params"]]
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    assert sorted(names[p] for p, *_ in found) == sorted(names.values())  # each of them once
    for p, kind, decay, ratio in found:
        in_muon = optimizer == "muon" and ".h." in names[p] and p.dim() == 2
        expected = ("Muon" if in_muon else "AdamW", 0.1 * (p.dim() >= 2), 1.0 + in_muon)
        assert (kind, decay, ratio) == expected, names[p]
    adamw = optimizers[0].param_groups[0]
    assert (adamw["betas"], adamw["eps"], adamw["fused"]) == ((0.9, 0.95), 1e-8, True)
    cfg = t.Config(optimizer="muon", beta1=0.8, beta2=0.9, muon_momentum=0.7)
    groups = [o.param_groups[0] for o in t.configure_optimizers(model, cfg)]
    assert groups[0]["betas"] == (0.8, 0.9) and groups[1]["momentum"] == 0.7

@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 0.02), (torch.bfloat16, 0.08)])
def test_our_muon_computes_the_same_as_that_of_torch(monkeypatch, dtype, tolerance):
    """Matrices are orthogonalized in the dtype that was chosen. A parameter without gradient stays.

    torch's Muon computes in bfloat16, so the results differ by rounding.
    """
    shapes = [(48, 24), (24, 48), (24, 24), (48, 24), (24, 96)]
    ours, copies = ([nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in "ab")
    unused, seen = nn.Parameter(torch.ones(24, 24)), set()
    a = t.Muon([*ours, unused], lr=0.1, weight_decay=0.9, dtype=dtype)
    b = torch.optim.Muon(copies, lr=0.1, weight_decay=0.9, adjust_lr_fn="match_rms_adamw")
    real, generator = t.newton_schulz, seeded(5)
    monkeypatch.setattr(t, "newton_schulz", lambda G: seen.add(G.dtype) or real(G))
    for _ in range(3):
        for p, q in zip(ours, copies, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q in zip(ours, copies, strict=True):
        assert (p - q).norm() / (q - 1).norm() < tolerance
    assert (unused == 1).all() and seen == {dtype}

def test_muon_treats_query_key_and_value_as_three_matrices():
    """The update of c_attn equals the updates of three separate matrices. No other one is cut.

    If c_attn were one matrix, a large gradient of the value would leave little for query and key.
    """
    def after_a_step(grad):
        p = nn.Parameter(torch.ones_like(grad))
        p.grad = grad
        t.Muon([p], lr=0.1, weight_decay=0.1).step()
        return p
    model = small(n_layer=1, n_embd=24)
    model.transformer.h[0].mlp.c_up = nn.Linear(24, 72)  # it has the shape of c_attn
    cfg = t.Config(optimizer="muon", max_lr=0.1, muon_lr_ratio=1.0)
    muon = t.configure_optimizers(model, cfg)[1]
    parameters = {name: p for name, p in model.transformer.h.named_parameters() if p.dim() == 2}
    assert len(parameters) == 5
    for p in parameters.values():
        p.data.fill_(1)
        p.grad = torch.randn(p.shape, generator=seeded(5))
        p.grad[len(p) * 2 // 3:] *= 100
    muon.step()
    for name, p in parameters.items():
        parts = p.grad.chunk(3) if name == "0.attn.c_attn.weight" else [p.grad]
        torch.testing.assert_close(p, torch.cat([*map(after_a_step, parts)]))
