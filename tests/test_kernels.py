"""toolr0_kernels: values and gradients against fp64, in chunks and whole, and the inputs that broke other kernels."""

import math

import pytest
import torch
from toolr0_kernels import linear_grpo_loss, linear_logprob, reference


def inputs(n=13, d=11, v=37, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(n, d, generator=g).to(dtype), torch.randn(v, d, generator=g).to(dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, v, (n,), generator=g)


def plain(hidden, weight, target, temperature=1.0):
    """log-prob, entropy and log-sum-exp in fp64, from the definition."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = hidden @ weight.T / temperature
    logp = logits - logits.exp().sum(-1, keepdim=True).log()
    return hidden, weight, (logp[torch.arange(len(target)), target], -(logp.exp() * logp).sum(-1), logits.exp().sum(-1).log())


def gap(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 37 * 5, reference.CHUNK_BYTES])  # one row, five rows, all rows at once
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_fp64(chunk_bytes, temperature):
    hidden, weight, target = inputs()
    out = reference.linear_logprob(hidden, weight, target, temperature, chunk_bytes=chunk_bytes)
    h64, w64, expected = plain(hidden, weight, target, temperature)
    assert all(x.dtype == torch.float32 and gap(x, y) < 1e-6 for x, y in zip(out, expected, strict=True))
    mix = torch.linspace(-1, 1, len(target))
    sum((x * mix).sum() for x in out).backward()
    sum((x * mix.double()).sum() for x in expected).backward()
    assert gap(hidden.grad, h64.grad) < 1e-5 and gap(weight.grad, w64.grad) < 1e-5


def test_logits_of_one_chunk_exist_at_once(monkeypatch):
    """Shapes of what is multiplied, in the forward and again in the backward."""
    shapes, chunk = [], reference._chunk
    monkeypatch.setattr(reference, "_chunk", lambda h, *rest: (shapes.append(len(h)), chunk(h, *rest))[1])
    hidden, weight, target = inputs()
    reference.linear_logprob(hidden, weight, target, chunk_bytes=4 * 37 * 5)[0].sum().backward()
    assert sorted(shapes) == [3, 3, 5, 5, 5, 5]  # each twice: forward, recomputed


def test_what_is_asked_for_comes_in_the_documented_order():
    hidden, weight, target = inputs()
    logp, entropy, lse = linear_logprob(hidden, weight, target, entropy=True, lse=True)
    assert torch.equal(linear_logprob(hidden, weight, target), logp)
    assert all(torch.equal(a, b) for a, b in zip(linear_logprob(hidden, weight, target, entropy=True), (logp, entropy)))
    assert all(torch.equal(a, b) for a, b in zip(linear_logprob(hidden, weight, target, lse=True), (logp, lse)))
    assert linear_logprob(hidden[:0], weight, target[:0]).shape == (0,)


def test_an_unknown_implementation_is_one_sentence():
    hidden, weight, target = inputs()
    for call in (lambda: linear_logprob(hidden, weight, target, impl="cuda"),
                 lambda: linear_grpo_loss(hidden, weight, target, torch.ones(13), torch.ones(13), impl="cuda")):
        with pytest.raises(ValueError, match="impl is 'cuda'; it has to be one of auto, triton, cpp, torch"):
            call()


def test_bf16_operands_give_fp32_logits():
    """Logits rounded to bf16 would be off by 0.02 nats and more; products of bf16 numbers in fp32 are not."""
    hidden, weight, target = inputs(n=64, d=128, v=512, dtype=torch.bfloat16)
    h64, w64, (expected, *_) = plain(hidden, weight, target)
    logp = linear_logprob(hidden, weight, target)
    assert (logp.double() - expected).abs().max() < 1e-4
    logp.sum().backward()
    expected.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16 and gap(hidden.grad, h64.grad) < 1e-2 and gap(weight.grad, w64.grad) < 1e-2


@pytest.mark.parametrize("margin", [8.0, 14.0])
def test_the_true_class_gradient_survives_a_sure_model_in_bf16(margin):
    """p - 1 with p near 1, formed in bf16, would be off by 20 % and more (fault 13)."""
    hidden = torch.zeros(1, 16, dtype=torch.bfloat16)
    hidden[0, 0] = margin
    weight = torch.zeros(32, 16, dtype=torch.bfloat16)
    weight[5, 0] = 1.0
    hidden.requires_grad_()
    linear_logprob(hidden, weight, torch.tensor([5])).sum().backward()
    p = math.exp(margin) / (math.exp(margin) + 31)
    assert hidden.grad[0, 0].item() == pytest.approx(1 - p, rel=1e-2)


@pytest.mark.parametrize("case", ["on policy", "off policy", "everything"])
def test_the_loss_and_its_gradients_equal_the_formula_in_fp64(case):
    hidden, weight, target = inputs(n=23, d=7, v=29)
    g = torch.Generator().manual_seed(1)
    advantage, scale = torch.randn(23, generator=g), torch.rand(23, generator=g)
    h64, w64, (logp, entropy, _) = plain(hidden, weight, target, 0.7)
    noise = torch.randn(23, generator=g) * 0.3
    old = None if case == "on policy" else (logp.detach() + noise).float()
    full = case == "everything"
    ref, importance = ((logp.detach() - noise).float(), torch.rand(23, generator=g)) if full else (None, None)
    options = dict(beta=0.3 if full else 0.0, clip_low=0.1, clip_high=torch.full((23,), 0.25), temperature=0.7)
    loss, stats = linear_grpo_loss(hidden, weight, target, advantage, scale, old, ref, importance, **options)

    ratio = (logp - (logp.detach() if old is None else old.double())).exp()
    policy = torch.where(advantage > 0, torch.where(ratio > 1.25, 1.25, ratio), torch.where(ratio < 0.9, 0.9, ratio)) * advantage
    each = -policy * (1 if importance is None else importance.double())
    if ref is not None:
        each = each + 0.3 * ((ref.double() - logp).exp() - (ref.double() - logp) - 1)
    expected = (scale.double() * each).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    assert gap(hidden.grad, h64.grad) < 1e-5 and gap(weight.grad, w64.grad) < 1e-5
    assert gap(stats["logp"], logp.detach()) < 1e-6 and gap(stats["entropy"], entropy.detach()) < 1e-6
    assert set(stats) == {"ratio", "clipped_low", "clipped_high", "logp", "entropy"} | ({"kl"} if full else set())
    assert not any(value.requires_grad for value in stats.values())


def test_an_importance_weight_scales_the_policy_term_and_nothing_else():
    """Half the tokens at 0.5 (fault 17); the KL term does not know."""
    hidden, weight, target = inputs(n=8)
    advantage, scale, half = torch.ones(8), torch.ones(8), torch.tensor([0.5, 1.0] * 4)
    loss, _ = linear_grpo_loss(hidden, weight, target, advantage, scale, is_weight_N=half)
    assert loss.item() == pytest.approx(-6.0)
    ref = linear_logprob(hidden, weight, target).detach() - 1.0
    loss, _ = linear_grpo_loss(hidden, weight, target, 0 * advantage, scale, ref_logp_N=ref, is_weight_N=half, beta=1.0)
    assert loss.item() == pytest.approx(8 * math.exp(-1), rel=1e-5)
