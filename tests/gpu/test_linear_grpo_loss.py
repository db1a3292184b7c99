"""linear_grpo_loss's Triton kernel against the formula in fp64, under the interpreter: fp32 and fp16 (bf16 truncates there)."""

import math

import pytest
import torch
from toolr0_kernels import chunked, reference
from toolr0_kernels.gpu import linear_grpo_loss as gpu
from toolr0_kernels.gpu import rows

CASES = {"on policy": (), "off policy": ("old",), "on policy with reference": ("ref",), "everything": ("old", "ref", "is")}


def inputs(n=23, d=7, v=29, dtype=torch.float32, case="everything", seed=0):
    """Leaves and a dict of arguments: a fifth of the rows has weight 0, some ratios are clipped on either side."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(v, d, generator=g) / d ** 0.5).to(dtype).requires_grad_()
    target = torch.randint(0, v, (n,), generator=g)
    logp = (hidden.double() @ weight.double().T / 0.7).log_softmax(-1)[torch.arange(n), target].detach().float()
    scale = torch.rand(n, generator=g) / n
    scale[::5] = 0
    kw = dict(target_N=target, advantage_N=torch.randn(n, generator=g), weight_N=scale, temperature=0.7, clip_low=0.1,
              clip_high=torch.full((n,), 0.25))
    noise = torch.randn(3, n, generator=g)
    if "old" in CASES[case]:
        kw["old_logp_N"] = logp + 0.3 * noise[0]
    if "ref" in CASES[case]:
        kw |= dict(ref_logp_N=logp + noise[1], beta=0.3)
    if "is" in CASES[case]:
        kw["is_weight_N"] = noise[2].abs()
    return hidden, weight, kw


def formula(hidden, weight, target_N, advantage_N, weight_N, old_logp_N=None, ref_logp_N=None, is_weight_N=None, beta=0.0,
            clip_low=0.2, clip_high=0.2, temperature=1.0):
    """fp64 leaves, the loss of every row and logp and entropy, from the definitions in the design."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logps = (hidden @ weight.T / temperature).log_softmax(-1)
    logp = logps[torch.arange(len(target_N)), target_N]
    a = advantage_N.double()
    ratio = (logp - (logp.detach() if old_logp_N is None else old_logp_N.double())).exp()
    high, low = ratio.detach() > 1 + clip_high, ratio.detach() < 1 - clip_low
    used = torch.where((a > 0) & high, 1 + torch.as_tensor(clip_high).double(), torch.where((a < 0) & low, 1 - clip_low, ratio))
    each = -used * a * (1 if is_weight_N is None else is_weight_N.double())
    if ref_logp_N is not None:
        d = (ref_logp_N.double() - logp).clamp(-20, 20)
        each = each + beta * (d.exp() - d - 1)
    return hidden, weight, (weight_N.double() * each).sum(), logp, -(logps.exp() * logps).sum(-1)


def gap(x, y):
    return ((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-12)).item()


def gradients(function, hidden, weight, kw, upstream=3.0):
    h, w = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    loss, stats = function(h, w, **kw)
    (upstream * loss).backward()
    return loss, stats, h.grad, w.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_loss_statistics_and_gradients_are_as_near_to_fp64_as_those_of_torch(case, dtype):
    hidden, weight, kw = inputs(case=case, dtype=dtype)
    loss, stats, d_hidden, d_weight = gradients(gpu.linear_grpo_loss, hidden, weight, kw)
    theirs, their_stats, their_hidden, their_weight = gradients(reference.linear_grpo_loss, hidden, weight, kw)
    h64, w64, expected, logp, entropy = formula(hidden, weight, **kw)
    (3.0 * expected).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert gap(stats["logp"], logp) < 1e-6 and gap(stats["entropy"], entropy) < 1e-6
    assert d_hidden.dtype == d_weight.dtype == dtype
    assert gap(d_hidden, h64.grad) <= 1.5 * gap(their_hidden, h64.grad) + 2e-6
    assert gap(d_weight, w64.grad) <= 1.5 * gap(their_weight, w64.grad) + 2e-6  # in fp16 both are roundings, and chance
    assert set(stats) == set(their_stats) and not any(x.requires_grad for x in stats.values())
    for name, value in their_stats.items():  # of all rows, also those of weight 0
        assert stats[name].dtype == torch.float32 and torch.allclose(stats[name], value, rtol=1e-5, atol=3e-6), name


def test_the_case_clips_on_both_sides():
    """What the comparison above is worth."""
    hidden, weight, kw = inputs()
    _, stats = gpu.linear_grpo_loss(hidden, weight, **kw)
    live = kw["weight_N"] > 0
    assert stats["clipped_low"][live].any() and stats["clipped_high"][live].any()
    assert ((stats["ratio"] > 1.25) & (kw["advantage_N"] < 0))[live].any()  # beyond a bound, and yet not clipped
    assert ((stats["ratio"] < 0.9) & (kw["advantage_N"] > 0))[live].any()


def test_several_chunks_and_several_blocks_of_the_vocabulary(monkeypatch):
    hidden, weight, kw = inputs(n=7, d=5, v=9001)
    monkeypatch.setattr(rows, "CHUNK_BYTES", 4 * 9001 * 2)  # two rows at a time
    monkeypatch.setattr(gpu, "row_block", lambda V: (4096, 8))
    loss, _, d_hidden, d_weight = gradients(gpu.linear_grpo_loss, hidden, weight, kw)
    h64, w64, expected, _, _ = formula(hidden, weight, **kw)
    (3.0 * expected).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert gap(d_hidden, h64.grad) < 1e-5 and gap(d_weight, w64.grad) < 1e-5


def test_rows_of_weight_0_are_dropped_exactly(monkeypatch):
    """They hold NaN here; multiplied by 0 it would be NaN. Their statistics are still there."""
    hidden, weight, kw = inputs()
    with torch.no_grad():
        hidden[5] = math.nan
    multiplied = []
    inner = chunked.product
    monkeypatch.setattr(chunked, "product", lambda a, b, *rest, **kw: (multiplied.append(tuple(a.shape)), inner(a, b, *rest, **kw))[1])
    loss, stats, d_hidden, d_weight = gradients(gpu.linear_grpo_loss, hidden, weight, kw)
    live = kw["weight_N"] > 0
    kept = {k: v[live] if isinstance(v, torch.Tensor) else v for k, v in kw.items()}
    alone = gradients(gpu.linear_grpo_loss, hidden[live], weight, kept)
    assert multiplied[0] == (int(live.sum()), 7) and loss.isfinite()
    assert torch.equal(loss, alone[0]) and torch.equal(d_hidden[live], alone[2]) and torch.equal(d_weight, alone[3])
    assert not d_hidden[~live].any() and stats["logp"][5].isnan() and stats["logp"][0].isfinite()


@pytest.mark.parametrize("n", [0, 4])
def test_all_rows_masked_or_none_there_is_loss_0_and_gradient_0(n):
    hidden, weight, kw = inputs(n=n)
    kw["weight_N"] = torch.zeros(n)
    loss, stats, d_hidden, d_weight = gradients(gpu.linear_grpo_loss, hidden, weight, kw)
    assert loss.item() == 0 and not d_hidden.any() and not d_weight.any() and stats["ratio"].shape == (n,)


def test_without_gradients_the_same_numbers_and_no_logits(monkeypatch):
    hidden, weight, kw = inputs()
    loss, stats = gpu.linear_grpo_loss(hidden, weight, **kw)
    monkeypatch.setattr(chunked, "through_logits", None)
    with torch.no_grad():
        again, same = gpu.linear_grpo_loss(hidden, weight, **kw)
    assert again.item() == pytest.approx(loss.item(), rel=1e-5) and not again.requires_grad and set(same) == set(stats)
    assert all(torch.allclose(same[k], stats[k], atol=1e-5) for k in stats)


def test_beyond_the_clamp_the_divergence_has_no_gradient():
    hidden, weight, kw = inputs(n=4, case="on policy with reference")
    kw |= dict(weight_N=torch.ones(4), advantage_N=torch.zeros(4))
    kw["ref_logp_N"] = kw["ref_logp_N"] + torch.tensor([30.0, -30.0, 2.0, -2.0])
    loss, stats, d_hidden, _ = gradients(gpu.linear_grpo_loss, hidden, weight, kw)
    h64, _, expected, _, _ = formula(hidden, weight, **kw)
    (3.0 * expected).backward()
    assert not d_hidden[:2].any() and gap(d_hidden[2:], h64.grad[2:]) < 1e-5
    assert stats["kl"][:2].tolist() == pytest.approx([math.exp(20) - 21, math.exp(-20) + 19], rel=1e-5)


def test_a_positive_advantage_raises_the_log_prob_and_the_divergence_falls():
    """Signs (faults 1 and 2): one step down the loss."""
    for case, advantage in (("on policy", 1.0), ("on policy with reference", 0.0)):
        hidden, weight, kw = inputs(case=case)
        kw |= dict(advantage_N=torch.full((23,), advantage), weight_N=torch.ones(23))
        _, stats, d_hidden, _ = gradients(gpu.linear_grpo_loss, hidden, weight, kw)
        _, after = gpu.linear_grpo_loss(hidden.detach() - 0.01 * d_hidden, weight.detach(), **kw)
        assert (after["logp"] > stats["logp"]).all() if advantage else after["kl"].sum() < stats["kl"].sum()


def test_a_second_backward_and_a_frozen_weight():
    hidden, weight, kw = inputs()
    loss, _ = gpu.linear_grpo_loss(hidden, weight, **kw)
    first = torch.autograd.grad(loss, (hidden, weight), torch.tensor(1e-3), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight), torch.tensor(1e-3))
    assert all(torch.equal(x, y) for x, y in zip(first, second))
    gpu.linear_grpo_loss(hidden, weight.detach(), **kw)[0].backward()
    assert gap(hidden.grad * 1e-3, first[0]) < 1e-6 and weight.grad is None
