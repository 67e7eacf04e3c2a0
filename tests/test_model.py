"""Tests of the model, which must be GPT-2, and of the optimizers, which must match their papers."""
import contextlib
import math
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

import train_gpt2 as t

def small(**changes):
    """Return a small GPT, with the same initial weights at each call."""
    torch.manual_seed(0)
    shape = dict(block_size=32, n_layer=2, n_head=2, n_embd=32, n_vocab=257)
    return t.GPT(t.GPTConfig(**shape | changes))

def seeded(seed=5):
    """Return a random generator with this seed."""
    return torch.Generator().manual_seed(seed)

def shake(model):
    """Add noise to all parameters, so that an error in any bias or gain changes the outputs."""
    for p in model.parameters():
        p.data += torch.randn(p.shape, generator=seeded(p.numel())) * 0.05
    return model

def ids(B=4, T=32, seed=0):
    """Return random token ids (B, T)."""
    return torch.randint(257, (B, T), generator=seeded(seed))

def test_parameters_of_gpt2_small(is_gpt2):
    """GPT-2 (124M) has 124,439,808 parameters, and its output matrix is the embedding."""
    with torch.device("meta"):
        model = t.GPT(t.GPTConfig())
    n_padding = 50304 - 50257  # rows of the embedding that belong to no token
    assert sum(p.numel() for p in model.parameters()) == 124_439_808 + n_padding * 768
    assert model.lm_head.weight is model.transformer.wte.weight

def test_initial_weights_and_loss():
    """Weights have the standard deviations of GPT-2, and the loss is about ln(n_vocab).

    Biases and the rows of the padding are zero.
    """
    model = small(n_layer=8, n_embd=128)
    assert abs(model(ids(16), ids(16, seed=1))[1].item() - math.log(257)) < 0.1
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif p.dim() == 2:
            expected = 0.02 / math.sqrt(2 * 8) if name.endswith("c_proj.weight") else 0.02
            assert abs(p[:257].std().item() / expected - 1) < 0.05, name
    assert not model.transformer.wte.weight[257:].any()

def test_a_token_attends_to_earlier_tokens_only():
    """A change of later tokens does not change the logits of earlier ones."""
    model, a = small(), ids()
    b = a.clone()
    b[:, 20:] = (b[:, 20:] + 1) % 257
    assert torch.equal(model(a)[0][:, :20], model(b)[0][:, :20])
    assert not torch.allclose(model(a)[0][:, 20:], model(b)[0][:, 20:])

def loss_and_gradients(model, loss):
    """Return a loss as a number, and {name: gradient} of the parameters."""
    model.zero_grad()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}

@pytest.mark.parametrize("left_out", [0, 40])
def test_the_padding_does_not_affect_the_loss(left_out):
    """Loss and gradients equal those of a model without padding, and the padding gets no gradient.

    Targets of -100 are left out of the mean.
    """
    model, idx, targets = shake(small()), ids(), ids(seed=1)
    model.lm_head.weight.data[257:] += 1  # the values in the padding must not matter
    targets.view(-1)[:left_out] = -100
    final = []  # the output of the last norm, (B, T, C)
    hook = model.transformer.ln_f.register_forward_hook(lambda *args: final.append(args[-1]))
    model(idx)
    hook.remove()
    logits = F.linear(final[0], model.lm_head.weight[:257]).flatten(0, 1)[left_out:]
    cut = F.cross_entropy(logits, targets.flatten()[left_out:])
    expected, expected_grads = loss_and_gradients(model, cut)
    nothing, loss = model(idx, targets, return_logits=False)
    logits, same = model(idx, targets)
    assert nothing is None and same == loss and logits.shape == model(idx)[0].shape == (4, 32, 257)
    loss, grads = loss_and_gradients(model, loss)
    assert loss == pytest.approx(expected, abs=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], atol=1e-6, rtol=1e-5)
    assert not grads["transformer.wte.weight"][257:].any()
    assert model(idx, torch.full_like(idx, -100))[1] == 0  # and not 0 / 0

def test_loss_is_computed_in_float32_under_autocast():
    """Under autocast, the residual stream is bfloat16, and the loss is computed in float32."""
    model, stream = small(), []
    exact = model(ids(), ids())[1]
    model.transformer.h[1].register_forward_pre_hook(lambda _, args: stream.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16), mock.patch.object(
            F, "cross_entropy", wraps=F.cross_entropy) as cross_entropy:
        loss = model(ids(), ids())[1]
    assert stream == [torch.bfloat16]  # float32 would take twice the memory
    assert cross_entropy.call_args.args[0].dtype == loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), abs=0.02) and loss.item() != exact.item()

def test_a_compiled_model_computes_the_same():
    """torch.compile changes neither loss nor gradients nor samples, and compiles one graph.

    Sampling compiles nothing, for any length of the text.
    """
    torch.compiler.reset()
    model, idx = small(), ids(T=33)
    plain, grads = loss_and_gradients(model, model(idx[:, :-1], idx[:, 1:])[1])
    texts = [model.generate(idx[:1, :n], 3, temperature=0) for n in range(5, 9)]
    model.compile(backend="aot_eager")  # torch.compile without a C++ compiler
    torch._dynamo.utils.counters.clear()
    compiled = model(idx[:, :-1], idx[:, 1:], return_logits=False)[1]
    loss, compiled_grads = loss_and_gradients(model, compiled)
    assert loss == pytest.approx(plain, abs=1e-5)
    assert all(torch.allclose(compiled_grads[name], grads[name], atol=1e-5) for name in grads)
    for text in texts:
        assert torch.equal(model.generate(text[:, :-3], 3, temperature=0), text)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1

def naive(model, idx, n, temperature, top_k, generator=None):
    """Append n sampled tokens to idx, in the simplest way."""
    for _ in range(n):
        logits = model(idx[:, -32:])[0][:, -1]
        worst = logits.topk(top_k).values[:, -1:]
        probs = logits.masked_fill(logits < worst, -math.inf).div(temperature).softmax(-1)
        idx = torch.cat((idx, torch.multinomial(probs, 1, generator=generator)), dim=1)
    return idx

@pytest.mark.parametrize("length", (1, 20, 32, 45))
@torch.no_grad()
def test_generate_from_prompts_of_any_length(length):
    """generate() equals a simple loop for prompts shorter and longer than the context of 32."""
    model, idx = shake(small()), ids(3, length)
    assert torch.equal(model.generate(idx, 40, temperature=0), naive(model, idx, 40, 1.0, 1))
    for top_k, temperature in ((0, 1.0), (5, 1.7), (300, 0.5)):  # 300 is more than n_vocab
        expected = naive(model, idx, 40, temperature, min(top_k or 257, 257), seeded())
        assert torch.equal(model.generate(idx, 40, temperature, top_k, seeded()), expected)

def test_generate_does_not_affect_training():
    """Sampling does not change torch's random state. Its generator decides the text."""
    model, idx = shake(small()), ids(2, 8)
    state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        a, b, c = (model.generate(idx, 40, generator=seeded(seed)) for seed in (5, 5, 6))
    assert torch.equal(a, b) and not torch.equal(a, c) and not a.requires_grad
    assert torch.equal(torch.get_rng_state(), state)

def stub_run(model, cfg, rows, optimizers=None, float16=False):
    """Return a Run with the attributes that train_step() uses. Each micro-step reads all `rows`."""
    optimizers = optimizers or t.configure_optimizers(model, cfg)
    t.prepare_groups(optimizers)
    state = t.State(model, optimizers, torch.amp.GradScaler("cpu", enabled=float16))
    run = mock.MagicMock(cfg=cfg, state=state, ddp_model=model, device=torch.device("cpu"))
    run.train_loader.batch.return_value = rows[:, :-1], rows[:, 1:]
    return run

@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_batch_can_be_overfitted(optimizer):
    cfg = t.Config(optimizer=optimizer, weight_decay=0.0, max_lr=1e-2, min_lr=1e-3, T=32, B=4,
                   total_batch_size=128, warmup_steps=5, max_steps=80)
    run = stub_run(small(n_embd=64), cfg, ids(T=33))
    for _ in range(cfg.max_steps):
        loss, _ = t.train_step(run)
    assert loss.item() < 0.01

@pytest.mark.parametrize("micro_steps, processes, grad_clip", [(1, 2, 0.1), (4, 1, 0.1), (4, 2, 0)])
def test_a_step_moves_by_the_clipped_gradient(monkeypatch, micro_steps, processes, grad_clip):
    """A step moves the weights by the clipped gradient of the mean loss over all targets.

    In each micro-batch, 40 targets are masked and do not count. The returned norm is the norm
    before clipping. Processes exchange gradients in the last micro-step only.
    """
    model, x, y = shake(small()).train(), ids(), ids(seed=1)
    y.view(-1)[:40] = -100
    loss, grads = loss_and_gradients(model, model(x, y)[1])
    norm = math.sqrt(sum(grad.square().sum().item() for grad in grads.values()))
    model.zero_grad()
    cfg = t.Config(B=4, T=32, total_batch_size=128 * micro_steps * processes, grad_clip=grad_clip,
                   max_lr=0.5)
    sgd = torch.optim.SGD(model.parameters(), lr=1.5 * cfg.warmup_steps)  # lr 1.5 in step 0
    before = {name: p.clone() for name, p in model.named_parameters()}
    monkeypatch.setattr(t, "world_size", lambda: processes)
    monkeypatch.setattr(t, "sum_over_ranks", lambda counted: processes * counted)
    model.no_sync = mock.Mock(side_effect=contextlib.nullcontext)
    run = stub_run(model, cfg, ids(), [sgd])
    run.train_loader.batch.return_value = x, y
    part, norm_of_step = t.train_step(run)
    assert model.no_sync.call_count == (micro_steps - 1) * (processes - 1)
    # The parts of the loss are equal, since both processes would read the same batches
    assert part.item() * processes == pytest.approx(loss, rel=1e-4)
    assert norm_of_step.item() == pytest.approx(norm, rel=1e-4)
    factor = 1.5 * min(1.0, grad_clip / norm if grad_clip else 1.0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(before[name] - p, factor * grads[name], atol=1e-6, rtol=1e-3)
        assert p.grad is None

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
    model.transformer.h[0].experts = torch.nn.Parameter(torch.zeros(2, 3, 3))  # not a matrix
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

@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 0.02), (torch.bfloat16, 0.08)])
def test_our_muon_computes_the_same_as_that_of_torch(dtype, tolerance):
    """To save memory, our Muon casts matrices to its dtype before it stacks them.

    It does not change a parameter that has no gradient.
    """
    shapes = [(48, 24), (24, 48), (24, 24), (48, 24), (24, 96), (72, 24)]
    ours, copies = ([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes] for _ in "ab")
    unused = torch.nn.Parameter(torch.ones(24, 24))
    a = t.Muon(zip("abcdefg", [*ours, unused]), lr=0.1, weight_decay=0.9, dtype=dtype)
    b = torch.optim.Muon(copies, lr=0.1, weight_decay=0.9, adjust_lr_fn="match_rms_adamw")
    generator = seeded()
    for _ in range(3):
        for p, q in zip(ours, copies, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        with mock.patch.object(torch, "stack", wraps=torch.stack) as stack:
            a.step()
        assert {matrix.dtype for call in stack.mock_calls for matrix in call.args[0]} == {dtype}
        b.step()
    for p, q in zip(ours, copies, strict=True):
        assert (p - q).norm() / q.norm() < tolerance
    assert (unused == 1).all()

def test_muon_treats_query_key_and_value_as_three_matrices():
    """The update of c_attn equals the updates of three separate matrices.

    If c_attn were one matrix, a large gradient of the value would leave little for query and key.
    """
    def after_a_step(grad):
        p = torch.nn.Parameter(torch.ones_like(grad))
        p.grad = grad
        t.Muon([("attn.c_attn.weight", p)], lr=0.1, weight_decay=0.1).step()
        return p
    grad = torch.randn(72, 24, generator=seeded())
    grad[48:] *= 100
    torch.testing.assert_close(after_a_step(grad), torch.cat([*map(after_a_step, grad.chunk(3))]))

def test_newton_schulz_makes_singular_values_about_one():
    """The singular vectors do not change, and a matrix of zeros remains zero."""
    G = torch.randn(3, 40, 20, generator=seeded()) * torch.tensor([1e-3, 1, 1e3]).view(3, 1, 1)
    U, _, Vh = torch.linalg.svd(G, full_matrices=False)
    for X in (t.newton_schulz(G), t.newton_schulz(G.mT).mT):
        assert torch.linalg.matrix_norm(X - U @ Vh, 2).max() < 0.4  # same vectors
    assert torch.equal(t.newton_schulz(torch.zeros(1, 4, 4)), torch.zeros(1, 4, 4))
