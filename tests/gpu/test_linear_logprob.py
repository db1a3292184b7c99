"""linear_logprob's Triton kernels against fp64, under the interpreter: fp32 and fp16 (bf16 stores truncate there)."""

import math

import pytest
import torch
from toolr0_kernels import chunked, reference
from toolr0_kernels.gpu import linear_logprob as gpu
from toolr0_kernels.gpu import rows

SHAPES = [(1, 1, 1), (13, 11, 37), (70, 40, 2111), (5, 64, 128 * 17)]  # rows, hidden, vocabulary


def inputs(n, d, v, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(n, d, generator=g), torch.randn(v, d, generator=g) / d ** 0.5
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), torch.randint(0, v, (n,), generator=g)


def formula(hidden, weight, target, temperature=1.0):
    """fp64 leaves, and log-prob, entropy and log-sum-exp from the definition."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = hidden @ weight.T / temperature
    logp = logits - logits.logsumexp(-1, keepdim=True)
    return hidden, weight, (logp[torch.arange(len(target)), target], -(logp.exp() * logp).sum(-1), logits.logsumexp(-1))


def error(x, y):
    return (x.double() - y.double()).abs().max().item() if y.numel() else 0.0


def gap(x, y):
    return ((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-12)).item()


def backward(outputs, upstream):
    sum((x * u.to(x.dtype)).sum() for x, u in zip(outputs, upstream)).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_as_near_to_fp64_as_those_of_torch(shape, dtype):
    hidden, weight, target = inputs(*shape, dtype)
    h64, w64, expected = formula(hidden, weight, target, 0.7)
    upstream = torch.randn(3, shape[0], generator=torch.Generator().manual_seed(1))
    ours = gpu.linear_logprob(hidden, weight, target, 0.7, entropy=True)
    backward(ours, upstream)
    backward(expected, upstream)
    h, w = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    theirs = reference.linear_logprob(h, w, target, 0.7, entropy=True)
    backward(theirs, upstream)
    for x, y, exact in zip(ours, theirs, expected, strict=True):
        assert x.dtype == torch.float32 and error(x, exact) <= error(y, exact) + 2e-6
    for x, y, exact in ((hidden, h, h64), (weight, w, w64)):
        assert x.grad.dtype == dtype and gap(x.grad, exact.grad) <= gap(y.grad, exact.grad) + 1e-6


def test_no_row_is_an_empty_result_and_no_gradient():
    hidden, weight, target = inputs(0, 7, 5)
    logp, entropy, lse = gpu.linear_logprob(hidden, weight, target)
    assert logp.shape == lse.shape == (0,) and entropy is None
    (logp.sum() + lse.sum()).backward()
    assert hidden.grad.shape == (0, 7) and not weight.grad.any()


def test_rows_do_not_know_which_rows_they_come_with():
    hidden, weight, target = inputs(70, 16, 2100)
    whole = gpu.linear_logprob(hidden, weight, target, entropy=True)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0))
    shuffled = gpu.linear_logprob(hidden[order], weight, target[order], entropy=True)
    head = gpu.linear_logprob(hidden[:3], weight, target[:3], entropy=True)
    assert all(torch.equal(x[order], y) and torch.equal(x[:3], z) for x, y, z in zip(whole, shuffled, head))


@pytest.mark.parametrize("constant", [0.0, 1000.0, -1000.0])
def test_a_constant_added_to_all_logits_changes_the_log_sum_exp_alone(constant):
    """hidden's last column is the constant, the weight's is 1; logits are small integers, so fp32 holds the sum exactly."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randint(-2, 3, (6, 5), generator=g).float(), torch.randint(-1, 2, (2500, 5), generator=g).float()
    hidden[:, -1], weight[:, -1] = constant, 1.0
    target = torch.arange(6)
    logp, entropy, lse = gpu.linear_logprob(hidden, weight, target, 0.5, entropy=True)
    _, _, expected = formula(hidden, weight, target, 0.5)
    assert error(logp, expected[0]) < 4e-6 and error(entropy, expected[1]) < 4e-6
    assert gap(lse, expected[2]) < 1e-6


@pytest.mark.parametrize("margin", [8.0, 14.0, 40.0])
def test_a_sure_model_has_the_right_entropy_and_gradient(margin):
    """1 - p formed in fp32 from one row of logits (fault 13); the entropy is not a difference of large numbers."""
    hidden, weight = torch.zeros(1, 16), torch.zeros(3000, 16)
    hidden[0, 0], weight[5, 0] = margin, 1.0
    hidden.requires_grad_()
    logp, entropy, _ = gpu.linear_logprob(hidden, weight, torch.tensor([5]), entropy=True)
    rest = 2999 * math.exp(-margin)
    assert logp.item() == pytest.approx(-math.log1p(rest), rel=1e-4, abs=3e-6)
    assert entropy.item() == pytest.approx(math.log1p(rest) + margin * rest / (1 + rest), rel=1e-4, abs=3e-6)
    logp.sum().backward()
    assert hidden.grad[0, 0].item() == pytest.approx(rest / (1 + rest), rel=1e-3, abs=1e-7)


def test_duplicate_targets_add_up_and_rows_without_gradient_are_left_out(monkeypatch):
    hidden, weight, _ = inputs(9, 8, 33)
    target = torch.tensor([4] * 9)
    with torch.no_grad():
        hidden[3] = math.nan  # a row that would poison the weight's gradient, were it multiplied by 0
    multiplied = []
    inner = chunked.product
    monkeypatch.setattr(chunked, "product", lambda a, b, *rest, **kw: (multiplied.append(tuple(a.shape)), inner(a, b, *rest, **kw))[1])
    upstream = torch.tensor([1.0, 0, 2, 0, 0, -1, 0.5, 0, 0])
    logp, _, _ = gpu.linear_logprob(hidden, weight, target)
    assert logp[3].isnan() and not logp[[0, 1, 2, 4]].isnan().any()
    live = upstream != 0
    logp[live].backward(upstream[live])
    h64, w64, (expected, *_) = formula(hidden[live], weight, target[live])
    expected.backward(upstream[live].double())
    assert multiplied == [(4, 8), (4, 33), (33, 4)]
    assert gap(hidden.grad[live], h64.grad) < 1e-6 and gap(weight.grad, w64.grad) < 1e-6 and not hidden.grad[~live].any()


def test_chunks_of_rows_add_up(monkeypatch):
    hidden, weight, target = inputs(11, 6, 29)
    monkeypatch.setattr(rows, "CHUNK_BYTES", 4 * 29 * 3)  # three rows at a time
    h64, w64, expected = formula(hidden, weight, target)
    backward(gpu.linear_logprob(hidden, weight, target, entropy=True)[:2], torch.ones(3, 11))
    backward(expected[:2], torch.ones(3, 11))
    assert gap(hidden.grad, h64.grad) < 1e-5 and gap(weight.grad, w64.grad) < 1e-5


def test_small_upstream_gradients_do_not_underflow_in_fp16():
    """Token weights are about 1e-6 and gradients of logits smaller still, but that of hidden is not: the weight is large."""
    hidden, weight, target = inputs(8, 16, 64)
    hidden, weight = (hidden / 256).detach().half().requires_grad_(), (weight * 256).detach().half().requires_grad_()
    logp, _, _ = gpu.linear_logprob(hidden, weight, target)
    d_hidden, = torch.autograd.grad(logp, hidden, torch.full((8,), 1e-6))
    h64, _, (expected, *_) = formula(hidden, weight, target)
    expected.backward(torch.full((8,), 1e-6, dtype=torch.float64))
    assert gap(d_hidden, h64.grad) < 2e-3


def test_only_what_needs_a_gradient_gets_one():
    hidden, weight, target = inputs(4, 6, 9)
    gpu.linear_logprob(hidden.detach(), weight, target)[0].sum().backward()
    both = weight.grad.clone()
    weight.grad = None
    gpu.linear_logprob(hidden, weight.detach(), target)[0].sum().backward()
    assert weight.grad is None and hidden.grad.any() and both.any()
