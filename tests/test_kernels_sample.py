"""sample and linear_sample: against a draw written from the definition in fp64, exact distributions, and odd rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy_free import chi_square_p
from toolr0_kernels import cpp, linear_sample, sample

from toolr0_core.rng import uniform


def settings_of(n, temperature=1.0, k=None, p=None):
    """seed, position, temperature, top_k, top_p of n rows."""
    return (torch.arange(n) * 7919, torch.arange(n) % 13, torch.full((n,), temperature),
            None if k is None else torch.full((n,), k), None if p is None else torch.full((n,), p))


def exact(logits, temperature, k, p):
    """The distribution after truncation, by sorting Python numbers: top k by rank, then the smallest set that reaches p."""
    z = [float(x) / temperature for x in logits]
    mass = [math.exp(x - max(z)) for x in z]
    order = sorted(range(len(z)), key=lambda i: (-logits[i], i))
    order = order[:k] if k else order
    total, kept, before = math.fsum(mass[i] for i in order), [], 0.0
    for i in order:
        if p < 1 and before >= p * total:
            break
        kept.append(i)
        before += mass[i]
    total = math.fsum(mass[i] for i in kept)
    out = [0.0] * len(z)
    for i in kept:
        out[i] = mass[i] / total
    return out


def entropy(p):
    return -math.fsum(x * math.log(x) for x in p if x > 0)


@pytest.mark.parametrize("v", [1, 5, 211, 1024, 1187, 2500])
@pytest.mark.parametrize("temperature, k, p", [(1.0, None, None), (0.7, 5, None), (1.3, None, 0.9), (0.8, 40, 0.6), (1.0, 9999, 1.0)])
def test_tokens_log_probs_and_entropies_are_those_of_the_definition(impl, v, temperature, k, p):
    """One uniform, inverse CDF in vocabulary order. A token may only differ where the uniform is at its edge."""
    logits = torch.randn(17, v, generator=torch.Generator().manual_seed(v)) * 3
    seed, position, *rest = settings_of(17, temperature, k, p)
    token, logp, h = sample(logits, seed, position, *rest, impl=impl)
    assert token.dtype == torch.int64 and logp.dtype == h.dtype == torch.float32
    for i, u in enumerate(uniform(seed, position).tolist()):
        q = exact(logits[i].tolist(), temperature, k or 0, p or 1.0)
        cdf = torch.tensor(q, dtype=torch.float64).cumsum(0)
        edge = (cdf - u * cdf[-1]).abs().min() < 1e-6
        assert edge or token[i] == int((cdf > u * cdf[-1]).nonzero()[0])
        assert logp[i].item() == pytest.approx(math.log(q[token[i]]), abs=2e-5)
        assert h[i].item() == pytest.approx(entropy(q), abs=2e-5)


@pytest.mark.parametrize("k, p", [(None, None), (4, None), (None, 0.7), (6, 0.8)])
def test_samples_follow_the_exact_distribution(impl, k, p):
    n, logits = 20000, torch.tensor([0.3, -1.0, 2.0, 1.2, 0.0, 2.0, -3.0, 1.0, 0.9])
    token, *_ = sample(logits.repeat(n, 1), *settings_of(n, 0.9, k, p), impl=impl)
    q = exact(logits.tolist(), 0.9, k or 0, p or 1.0)
    counts = torch.bincount(token, minlength=9).tolist()
    assert all(c == 0 for c, x in zip(counts, q) if x == 0)
    pairs = [(c, n * x) for c, x in zip(counts, q) if x > 0]
    assert chi_square_p([c for c, _ in pairs], [x for _, x in pairs]) > 1e-3


def test_a_row_is_the_same_alone_and_in_any_batch(impl):
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(0))
    args = settings_of(9, 0.8, 20, 0.9)
    whole = sample(logits, *args, impl=impl)
    for i in range(9):
        alone = sample(logits[i: i + 1], *(x[i: i + 1] for x in args), impl=impl)
        assert all(torch.equal(a, b[i: i + 1]) for a, b in zip(alone, whole))


def test_temperature_0_is_the_first_of_the_largest_at_temperature_1(impl):
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    token, logp, h = sample(logits, *settings_of(2, 0.0, 1, 0.1), impl=impl)  # what truncates is off
    q = [exact(row.tolist(), 1.0, 0, 1.0) for row in logits]
    assert token.tolist() == [1, 0]
    assert logp.tolist() == pytest.approx([math.log(q[0][1]), math.log(q[1][0])], abs=1e-6)
    assert h.tolist() == pytest.approx([entropy(x) for x in q], abs=1e-6)


def test_equal_logits_are_kept_from_the_lower_index(impl):
    token, logp, _ = sample(torch.zeros(200, 50), *settings_of(200, 1.0, 3), impl=impl)
    assert set(token.tolist()) == {0, 1, 2} and logp.tolist() == pytest.approx([math.log(1 / 3)] * 200, abs=1e-6)


def test_masked_entries_are_never_drawn_and_nan_is_not_hidden(impl):
    logits = torch.full((100, 40), -torch.inf)
    logits[:, [3, 17, 39]] = torch.tensor([1.0, 1.0, 1.0])
    token, logp, h = sample(logits, *settings_of(100), impl=impl)
    assert set(token.tolist()) == {3, 17, 39} and logp.tolist() == pytest.approx([math.log(1 / 3)] * 100, abs=1e-6)
    logits[0, 5] = torch.nan
    token, logp, _ = sample(logits, *settings_of(100), impl=impl)
    assert logp[0].isnan() and 0 <= token[0] < 40 and logp[1:].isfinite().all()


@pytest.mark.parametrize("k, p", [(3, None), (None, 0.5), (3, 0.5)])
def test_nan_is_not_hidden_by_truncation(impl, k, p):
    logits = torch.zeros(1, 8)
    logits[0, 3] = torch.nan
    token, logp, _ = sample(logits, *settings_of(1, 1.0, k, p), impl=impl)
    assert logp.isnan().all() and 0 <= token < 8


def test_a_uniform_next_to_1_draws_the_last_token_that_has_mass(impl):
    """seed 0 at this position is 1 - 2^-52."""
    logits = 2 * torch.randn(1, 49153, generator=torch.Generator().manual_seed(0))
    logits[0, 0], logits[0, -1] = -torch.inf, -90.0
    token, logp, _ = sample(logits, torch.tensor([0]), torch.tensor([4261466477168588050]), torch.ones(1), impl=impl)
    assert token >= 49150 and logp.isfinite()


def test_no_row_is_no_token(impl):
    assert [len(x) for x in sample(torch.zeros(0, 7), *settings_of(0), impl=impl)] == [0, 0, 0]


def test_drawing_from_hidden_states_is_drawing_from_their_logits(impl):
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 24, generator=g), torch.randn(301, 24, generator=g)
    args = settings_of(9, 0.9)[:3]
    args[2][3] = 0.0  # a greedy one among them
    expected = sample(hidden @ weight.T, *args, impl="torch")
    out = linear_sample(hidden, weight, *args, impl=impl)
    assert torch.equal(out[0], expected[0])
    assert torch.allclose(out[1], expected[1], atol=1e-5) and torch.allclose(out[2], expected[2], atol=1e-5)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(-6, 6), min_size=1, max_size=60), st.integers(0, 70), st.floats(0.01, 1.0), st.integers(0, 2**62))
def test_ties_in_any_number_are_cut_as_defined(values, k, p, seed):
    """C++ finds the kept set without sorting. Masses at the edge of p are left to rounding."""
    if cpp.problem:
        pytest.skip(f"the C++ ops were not built: {cpp.problem}")
    q, near = (exact([float(x) for x in values], 1.0, k, p * (1 + e)) for e in (0.0, 1e-5))
    if q != near or q != exact([float(x) for x in values], 1.0, k, p * (1 - 1e-5)):
        return
    token, logp, h = sample(torch.tensor([values], dtype=torch.float32), torch.tensor([seed]), torch.tensor([0]), torch.ones(1),
                            torch.tensor([k]), torch.tensor([p]), impl="cpp")
    assert q[token] > 0 and logp.item() == pytest.approx(math.log(q[token]), abs=1e-5)
    assert h.item() == pytest.approx(entropy(q), abs=1e-5)


@pytest.mark.parametrize("change, message", [
    (dict(logits_SV=torch.zeros(2, 0)), r"logits are \[2, 0\] of torch.float32; they have to be floats, \[S, V\] with at least one entry"),
    (dict(seed_S=torch.zeros(2)), r"seed is \[2\] of torch.float32; it has to be \[2\] of torch.int64"),
    (dict(temperature_S=torch.tensor([1.0, -1.0])), r"temperature is -1 in a row; it has to be 0 \(greedy\) or from 1e-6 to 1e6"),
    (dict(temperature_S=torch.tensor([1.0, math.nan])), "temperature is nan in a row"),
    (dict(top_k_S=torch.tensor([3, -1])), r"top_k is -1 in a row; it has to be 0 \(off\) or more"),
    (dict(top_p_S=torch.tensor([0.5, 0.0])), r"top_p is 0 in a row; it has to be above 0 \(1: off\)"),
])
def test_bad_arguments_are_one_sentence(impl, change, message):
    good = dict(logits_SV=torch.zeros(2, 5), seed_S=torch.tensor([1, 2]), position_S=torch.tensor([0, 0]),
                temperature_S=torch.ones(2), top_k_S=None, top_p_S=None)
    sample(**good, impl=impl)
    with pytest.raises(ValueError, match=message):
        sample(**{**good, **change}, impl=impl)
