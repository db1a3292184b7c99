"""linear_logprob and linear_grpo_loss: values and gradients against fp64, and the inputs that broke other kernels."""

import math

import pytest
import torch
from toolr0_kernels import chunked, cpp, linear_grpo_loss, linear_logprob, reference


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


@pytest.fixture(params=["one row", "some rows", "all rows"])
def chunks(request, monkeypatch):
    """How many rows of logits exist at once, in every implementation."""
    size = {"one row": 1, "some rows": 4 * 37 * 5}.get(request.param)
    if size:
        monkeypatch.setattr(reference, "CHUNK_BYTES", size)
        monkeypatch.setattr(cpp, "CHUNK_BYTES", size)


@pytest.mark.parametrize("n, v", [(13, 37), (1, 37), (5, 1), (3, 1187), (7, 1024)])  # odd, one row, one entry, over a block, a block
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_fp64(impl, chunks, n, v, temperature):
    hidden, weight, target = inputs(n=n, v=v)
    out = linear_logprob(hidden, weight, target, temperature, entropy=True, lse=True, impl=impl)
    h64, w64, expected = plain(hidden, weight, target, temperature)
    assert all(x.dtype == torch.float32 and (x.double() - y).abs().max() < 1e-5 for x, y in zip(out, expected, strict=True))
    mix = torch.linspace(-1, 1, len(target))
    sum((x * mix).sum() for x in out).backward()
    sum((x * mix.double()).sum() for x in expected).backward()
    if v == 1:  # nothing to choose from: log-prob and entropy are 0, and lse is the logit
        assert torch.equal(out[0], torch.zeros(n)) and torch.equal(out[1], torch.zeros(n))
    assert gap(hidden.grad, h64.grad) < 1e-5 and gap(weight.grad, w64.grad) < 1e-5


def test_logits_of_one_chunk_exist_at_once(monkeypatch):
    """Rows of logits that are made, in the forward and again in the backward."""
    rows, chunk, product = [], reference._chunk, chunked.product
    monkeypatch.setattr(reference, "_chunk", lambda h, *rest: (rows.append(len(h)), chunk(h, *rest))[1])
    monkeypatch.setattr(chunked, "product", lambda a, b, *rest, **out: (  # of those, the ones that make logits
        rows.append(len(a)) if b.shape[1] == 37 else None, product(a, b, *rest, **out))[1])
    monkeypatch.setattr(reference, "CHUNK_BYTES", 4 * 37 * 5)
    monkeypatch.setattr(cpp, "CHUNK_BYTES", 4 * 37 * 5)
    for impl in ("torch", *(["cpp"] if cpp.problem is None else [])):
        rows.clear()
        linear_logprob(*inputs(), impl=impl).sum().backward()
        assert sorted(rows) == [3, 3, 5, 5, 5, 5], impl  # each twice: forward, recomputed


def test_what_is_asked_for_comes_in_the_documented_order(impl):
    hidden, weight, target = inputs()
    logp, entropy, lse = linear_logprob(hidden, weight, target, entropy=True, lse=True, impl=impl)
    assert torch.equal(linear_logprob(hidden, weight, target, impl=impl), logp)
    assert all(torch.equal(a, b) for a, b in zip(linear_logprob(hidden, weight, target, entropy=True, impl=impl), (logp, entropy)))
    assert all(torch.equal(a, b) for a, b in zip(linear_logprob(hidden, weight, target, lse=True, impl=impl), (logp, lse)))
    assert linear_logprob(hidden[:0], weight, target[:0], impl=impl).shape == (0,)


def test_an_unknown_implementation_is_one_sentence():
    hidden, weight, target = inputs()
    for call in (lambda: linear_logprob(hidden, weight, target, impl="cuda"),
                 lambda: linear_grpo_loss(hidden, weight, target, torch.ones(13), torch.ones(13), impl="cuda")):
        with pytest.raises(ValueError, match="impl is 'cuda'; it has to be one of auto, triton, cpp, torch"):
            call()


def test_bf16_operands_give_fp32_logits(impl):
    """Logits rounded to bf16 would be off by 0.02 nats and more; products of bf16 numbers in fp32 are not."""
    hidden, weight, target = inputs(n=64, d=128, v=512, dtype=torch.bfloat16)
    h64, w64, (expected, *_) = plain(hidden, weight, target)
    logp = linear_logprob(hidden, weight, target, impl=impl)
    assert (logp.double() - expected).abs().max() < 1e-4
    logp.sum().backward()
    expected.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16 and gap(hidden.grad, h64.grad) < 1e-2 and gap(weight.grad, w64.grad) < 1e-2


@pytest.mark.parametrize("margin", [8.0, 14.0])
def test_the_true_class_gradient_survives_a_sure_model_in_bf16(impl, margin):
    """p - 1 with p near 1, formed in bf16, would be off by 20 % and more (fault 13)."""
    hidden = torch.zeros(1, 16, dtype=torch.bfloat16)
    hidden[0, 0] = margin
    weight = torch.zeros(32, 16, dtype=torch.bfloat16)
    weight[5, 0] = 1.0
    hidden.requires_grad_()
    linear_logprob(hidden, weight, torch.tensor([5]), impl=impl).sum().backward()
    p = math.exp(margin) / (math.exp(margin) + 31)
    assert hidden.grad[0, 0].item() == pytest.approx(1 - p, rel=1e-2)


@pytest.mark.parametrize("case", ["on policy", "off policy", "everything"])
def test_the_loss_and_its_gradients_equal_the_formula_in_fp64(impl, chunks, case):
    hidden, weight, target = inputs(n=23, d=7, v=37)
    g = torch.Generator().manual_seed(1)
    advantage, scale = torch.randn(23, generator=g), torch.rand(23, generator=g)
    h64, w64, (logp, entropy, _) = plain(hidden, weight, target, 0.7)
    noise = torch.randn(23, generator=g) * 0.3
    old = None if case == "on policy" else (logp.detach() + noise).float()
    full = case == "everything"
    ref, importance = ((logp.detach() - noise).float(), torch.rand(23, generator=g)) if full else (None, None)
    options = dict(beta=0.3 if full else 0.0, clip_low=0.1, clip_high=torch.full((23,), 0.25), temperature=0.7)
    loss, stats = linear_grpo_loss(hidden, weight, target, advantage, scale, old, ref, importance, **options, impl=impl)

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


def test_an_importance_weight_scales_the_policy_term_and_nothing_else(impl):
    """Half the tokens at 0.5 (fault 17); the KL term does not know."""
    hidden, weight, target = inputs(n=8)
    advantage, scale, half = torch.ones(8), torch.ones(8), torch.tensor([0.5, 1.0] * 4)
    loss, _ = linear_grpo_loss(hidden, weight, target, advantage, scale, is_weight_N=half, impl=impl)
    assert loss.item() == pytest.approx(-6.0)
    ref = linear_logprob(hidden, weight, target).detach() - 1.0
    loss, _ = linear_grpo_loss(hidden, weight, target, 0 * advantage, scale, ref_logp_N=ref, is_weight_N=half, beta=1.0, impl=impl)
    assert loss.item() == pytest.approx(8 * math.exp(-1), rel=1e-5)


def everything(n=24, d=9, v=37, seed=2):
    """Inputs of every kind for the loss, off-policy and with a reference."""
    hidden, weight, target = inputs(n, d, v, seed)
    g = torch.Generator().manual_seed(seed)
    logp = linear_logprob(hidden, weight, target, impl="torch").detach()
    return [hidden, weight, target, torch.randn(n, generator=g), torch.rand(n, generator=g),
            logp + 0.3 * torch.randn(n, generator=g), logp + 0.3 * torch.randn(n, generator=g), torch.rand(n, generator=g)]


def run(args, impl, upstream=1.0, **options):
    """Loss, statistics and gradients."""
    hidden, weight = (x.detach().clone().requires_grad_() for x in args[:2])
    loss, stats = linear_grpo_loss(hidden, weight, *args[2:], beta=0.1, temperature=0.8, impl=impl, **options)
    (loss * upstream).backward()
    return loss.detach(), stats, hidden.grad, weight.grad


def test_the_order_of_tokens_does_not_matter(impl):
    args, order = everything(), torch.randperm(24, generator=torch.Generator().manual_seed(0))
    loss, stats, dhidden, dweight = run(args, impl)
    moved = [args[0][order], args[1], *(x[order] for x in args[2:])]
    loss2, stats2, dhidden2, dweight2 = run(moved, impl)
    assert loss2.item() == pytest.approx(loss.item(), rel=1e-5) and gap(dweight2, dweight) < 1e-6
    assert gap(dhidden2, dhidden[order]) < 1e-6 and gap(stats2["logp"], stats["logp"][order]) < 1e-6


def test_parts_of_a_batch_add_up(impl):
    args = everything()
    whole = run(args, impl)
    parts = [run([args[0][s], args[1], *(x[s] for x in args[2:])], impl) for s in (slice(0, 7), slice(7, 24))]
    assert sum(p[0] for p in parts).item() == pytest.approx(whole[0].item(), rel=1e-5)
    assert gap(sum(p[3] for p in parts), whole[3]) < 1e-6 and gap(torch.cat([p[2] for p in parts]), whole[2]) < 1e-6


def test_rows_of_weight_0_change_nothing_and_still_have_statistics(impl):
    """Exactly nothing: their advantage may be NaN, and their hidden state of any size."""
    args = everything()
    loss, stats, dhidden, dweight = run(args, impl)
    padded = [torch.cat((args[0].detach(), 50 * torch.ones(3, 9))), args[1],
              *(torch.cat((x, x[:3])) for x in args[2:])]
    padded[4][-3:] = 0
    loss2, stats2, dhidden2, dweight2 = run(padded, impl)
    assert loss2.item() == pytest.approx(loss.item(), rel=1e-6) and torch.equal(dhidden2[-3:], torch.zeros(3, 9))
    assert gap(dweight2, dweight) < 1e-6 and gap(dhidden2[:-3], dhidden) < 1e-6
    assert len(stats2["logp"]) == 27 and stats2["logp"].isfinite().all() and stats2["entropy"].isfinite().all()


def test_nothing_to_learn_is_a_loss_of_0_with_gradients_of_0(impl):
    args = everything()
    args[4] = torch.zeros(24)
    loss, _, dhidden, dweight = run(args, impl)
    assert loss == 0 and not dhidden.any() and not dweight.any()
    loss, stats, dhidden, dweight = run([args[0][:0], args[1], *(x[:0] for x in args[2:])], impl)
    assert loss == 0 and dhidden.shape == (0, 9) and not dweight.any() and stats["logp"].shape == (0,)


def test_an_upstream_gradient_scales_both_gradients(impl):
    once, half = run(everything(), impl), run(everything(), impl, upstream=-0.5)
    assert gap(half[2], -0.5 * once[2]) < 1e-6 and gap(half[3], -0.5 * once[3]) < 1e-6


def test_a_constant_added_to_all_logits_changes_no_log_prob(impl):
    hidden, weight, target = inputs()
    with torch.no_grad():
        plus, ones = torch.cat((hidden, 500 * torch.ones(13, 1)), 1), torch.cat((weight, torch.ones(37, 1)), 1)
        logp, entropy = linear_logprob(hidden, weight, target, entropy=True, impl=impl)
        logp2, entropy2 = linear_logprob(plus, ones, target, entropy=True, impl=impl)
    assert (logp - logp2).abs().max() < 2e-4 and (entropy - entropy2).abs().max() < 2e-4  # logits of 500 have 3e-5 between them


def test_rows_with_one_target_add_their_gradients(impl):
    hidden, weight, _ = inputs()
    target = torch.full((13,), 4)
    linear_logprob(hidden, weight, target, impl=impl).sum().backward()
    h64, w64, (expected, *_) = plain(hidden, weight, target)
    expected.sum().backward()
    assert gap(weight.grad, w64.grad) < 1e-6


def test_logits_of_minus_infinity_have_no_mass_and_nan_is_not_hidden(impl):
    hidden = torch.tensor([[1.0], [math.nan]])
    weight = torch.tensor([[1.0], [-math.inf], [2.0]])
    logp, entropy = linear_logprob(hidden, weight, torch.tensor([2, 0]), entropy=True, impl=impl)
    p = math.exp(2) / (math.exp(2) + math.exp(1))
    assert logp[0].item() == pytest.approx(math.log(p)) and logp[1].isnan()
    if impl != "torch":  # 0 log 0 is NaN in plain torch
        assert entropy[0].item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))


@pytest.mark.parametrize("offset", [100.0, 1000.0, 30000.0])
def test_a_sure_model_with_large_logits_has_the_right_gradient(impl, offset):
    """1 - p is 8.4e-6, and a log-sum-exp in fp32 would be off by more."""
    if impl == "torch":
        pytest.skip("plain torch rounds the log-sum-exp: that is why the kernels do not")
    weight = torch.tensor([[offset + 12.0], [offset], [offset - 1.0]], requires_grad=True)
    linear_logprob(torch.ones(1, 1), weight, torch.tensor([0]), impl=impl).sum().backward()
    p = torch.tensor([12.0, 0.0, -1.0], dtype=torch.float64).softmax(0)
    assert torch.allclose(weight.grad[:, 0].double(), torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64) - p, rtol=1e-2, atol=1e-12)  # 1 + 8.4e-6 in fp32


def test_equal_logits_of_any_size_share_the_gradient(impl):
    """At 1e6 a log-sum-exp in fp32 is a multiple of 1/16."""
    if impl == "torch":
        pytest.skip("plain torch rounds the log-sum-exp: that is why the kernels do not")
    weight = torch.full((3, 1), 1e6, requires_grad=True)
    linear_logprob(torch.ones(1, 1), weight, torch.tensor([0]), impl=impl).sum().backward()
    assert weight.grad[:, 0].tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3], rel=1e-5)


@pytest.mark.parametrize("place", [5, 6])  # old_logp, ref_logp
def test_nan_among_the_log_probs_reaches_the_gradient(impl, place):
    """So that the trainer's look at the gradient norm sees it."""
    args = everything()
    args[place][3] = math.nan
    loss, _, dhidden, _ = run(args, impl)
    assert loss.isnan() and (dhidden[3].isnan().all() or (impl, place) == ("torch", 6))  # torch's clamp passes NaN no gradient


def test_what_a_row_of_weight_0_holds_does_not_matter(impl):
    args = everything()
    args[4][3] = 0
    expected = run(args, impl)
    args[3][3], args[5][3] = math.nan, -500.0
    for mine, right in zip(run(args, impl)[::2], expected[::2]):
        assert torch.equal(mine, right)


def test_more_rows_than_a_grid_dimension_may_have(impl):
    """65,537 rows (fault 16): the last one counts too."""
    if impl == "triton":
        pytest.skip("the interpreter would take minutes; the grid's shape is checked where kernels are compiled")
    hidden, weight, target = inputs(n=65537, d=3, v=5)
    with torch.no_grad():
        logp = linear_logprob(hidden, weight, target, impl=impl)
        assert torch.allclose(logp[-1:], linear_logprob(hidden[-1:], weight, target[-1:], impl=impl), atol=1e-6)


def test_many_rows_of_a_small_vocabulary_have_the_right_gradient_of_the_head(impl):
    """8,192 rows and 32 entries (fault 18): every entry's gradient is a sum over all rows."""
    if impl == "triton":
        pytest.skip("the interpreter would take minutes")
    hidden, weight, target = inputs(n=8192, d=16, v=32)
    linear_logprob(hidden, weight, target, impl=impl).sum().backward()
    h64, w64, (expected, *_) = plain(hidden, weight, target)
    expected.sum().backward()
    assert gap(weight.grad, w64.grad) < 1e-5 and gap(hidden.grad, h64.grad) < 1e-5


def test_fp64_is_exact():
    """No implementation but plain torch has fp64, and auto knows."""
    args = [x.detach().double() if x.is_floating_point() else x for x in everything()]
    h64, w64, (logp, *_) = plain(args[0], args[1], args[2], 0.8)
    loss, stats, dhidden, dweight = run(args, "auto")
    assert (stats["logp"] - logp).abs().max() < 1e-10 and stats["logp"].dtype == torch.float64
    advantage, scale, old, ref, importance = args[3:]
    ratio = (logp - old).exp()
    policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * importance
    expected = (scale * (policy + 0.1 * ((ref - logp).exp() - (ref - logp) - 1))).sum()
    expected.backward()
    assert abs(loss - expected) < 1e-10 and (dhidden - h64.grad).abs().max() < 1e-10 and (dweight - w64.grad).abs().max() < 1e-10


@pytest.mark.parametrize("change, message", [
    (dict(hidden_ND=torch.zeros(3, 5)), r"hidden is \[3, 5\] and weight \[7, 4\]; they have to be \[N, D\] and \[V, D\]"),
    (dict(weight_VD=torch.zeros(0, 4)), "the vocabulary needs at least one entry"),
    (dict(target_N=torch.tensor([1, 2])), r"there are \[2\] targets for 3 rows of hidden"),
    (dict(target_N=torch.tensor([1.0, 2.0, 0.0])), "targets are torch.float32; they have to be torch.int64"),
    (dict(hidden_ND=torch.zeros(3, 4, dtype=torch.bfloat16)), "hidden is torch.bfloat16 and weight torch.float32"),
    (dict(temperature=0.0), "temperature is 0.0; it has to be a number from 1e-6 to 1e6"),
    (dict(temperature=math.nan), "temperature is nan"),
    (dict(hidden_ND=torch.zeros(3, 4, device="meta")), "hidden is on meta; weight is on cpu; target is on cpu"),
])
def test_bad_arguments_are_one_sentence(impl, change, message):
    good = dict(hidden_ND=torch.zeros(3, 4), weight_VD=torch.zeros(7, 4), target_N=torch.tensor([0, 6, 3]))
    linear_logprob(**good, impl=impl)
    with pytest.raises(ValueError, match=message):
        linear_logprob(**{**good, **change}, impl=impl)


@pytest.mark.parametrize("target", [-1, 7])
def test_a_target_outside_the_vocabulary_is_named(impl, target):
    with pytest.raises(IndexError, match=f"target 1 is {target}; it has to be in 0..6"):
        linear_logprob(torch.zeros(3, 4), torch.zeros(7, 4), torch.tensor([0, target, 3]), impl=impl)


def test_a_per_token_input_of_another_length_is_named(impl):
    args = everything()
    args[5] = args[5][:5]
    with pytest.raises(ValueError, match=r"old_logp_N is \[5\]; it has to be \[24\], one value a row"):
        run(args, impl)


def test_views_that_are_not_contiguous_are_made_so(impl):
    hidden, weight, target = inputs()
    expected = linear_logprob(hidden, weight, target, impl=impl)
    wide = torch.stack((hidden.detach(), hidden.detach()), 1)[:, 0]
    assert not wide.is_contiguous()
    assert torch.equal(linear_logprob(wide, weight.detach().T.contiguous().T, target, impl=impl), expected)
