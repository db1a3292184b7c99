"""sample's Triton kernels against the reference (same seed and position: the same token) and exact probabilities."""

import pytest
import torch
from toolr0_kernels import reference
from toolr0_kernels.gpu import sample as gpu
from toolr0_kernels.reference import truncate

from toolr0_core.rng import uniform


def inputs(rows, v, seed=0, spread=3.0):
    g = torch.Generator().manual_seed(seed)
    logits, keys = spread * torch.randn(rows, v, generator=g), torch.randint(0, 2 ** 62, (rows,), generator=g)
    temperature = torch.rand(rows, generator=g) + 0.3
    temperature[::7] = 0
    top_k, top_p = torch.randint(1, max(2, v // 3), (rows,), generator=g), torch.rand(rows, generator=g)
    top_k[::3], top_p[::4] = 0, 1.0
    return logits, (keys, torch.arange(rows) * 3, temperature), (top_k, top_p)


def exact(logits, temperature, top_k=None, top_p=None):
    """fp64 log-probs [S, V], after truncation; greedy rows at temperature 1 and whole."""
    greedy = temperature == 0
    logp = (logits.double() / torch.where(greedy, 1.0, temperature).double()[:, None]).log_softmax(-1)
    if top_k is None:
        return logp
    return truncate(logp, torch.where(greedy, 0, top_k), torch.where(greedy, 1.0, top_p.double()))


def check(drawn, logits, keys, truncation=(), atol=2e-6):
    """Tokens of the reference, but where u is within rounding of the boundary between two; log-prob, entropy. Returns the misses."""
    seed, position, temperature = keys
    token, logp, entropy = drawn
    assert token.dtype == torch.int64 and logp.dtype == entropy.dtype == torch.float32
    expected, *_ = reference.sample(logits, *keys, *truncation)
    wanted = exact(logits, temperature, *truncation)
    misses = 0
    for row in (token != expected).nonzero()[:, 0].tolist():
        cdf = wanted[row].exp().cumsum(0)
        misses += 1
        assert (cdf - uniform(seed, position)[row]).abs().min() < 1e-6, f"row {row}: {token[row]}, not {expected[row]}"
    assert torch.allclose(logp.double(), wanted.gather(1, token[:, None])[:, 0], rtol=1e-5, atol=atol)
    assert torch.allclose(entropy.double(), -(wanted.exp() * wanted).nan_to_num(0.0).sum(-1), rtol=1e-5, atol=2 * atol)
    return misses


@pytest.mark.parametrize(("v", "tile"), [(1, 16), (97, 16), (4999, 4096)])
@pytest.mark.parametrize("truncated", [False, True])
def test_the_token_is_that_of_the_reference(v, tile, truncated, monkeypatch):
    monkeypatch.setattr(gpu, "LOGITS_TILE", tile)
    logits, keys, truncation = inputs(24, v)
    assert check(gpu.sample(logits, *keys, *(truncation if truncated else ())), logits, keys, truncation * truncated) <= 1


@pytest.mark.parametrize(("rows", "d", "v"), [(3, 7, 5), (40, 33, 1031)])
def test_from_hidden_states_the_same_without_logits(rows, d, v):
    _, keys, _ = inputs(rows, v)
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(rows, d, generator=g), torch.randn(v, d, generator=g) * 0.5
    logits = (hidden.double() @ weight.double().T).float()
    assert check(gpu.linear_sample(hidden, weight, *keys), logits, keys, atol=2e-5) <= 1  # logits of 30 and more


def test_half_precision_hidden_states_keep_fp32_logits():
    _, keys, _ = inputs(20, 300)
    g = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(20, 64, generator=g).half(), (torch.randn(300, 64, generator=g) * 0.3).half()
    assert check(gpu.linear_sample(hidden, weight, *keys), (hidden.double() @ weight.double().T).float(), keys, atol=2e-5) <= 1


@pytest.mark.parametrize("truncation", [(), (6, 0.9)])
def test_frequencies_are_the_probabilities(truncation, monkeypatch):
    """Chi-square at its 99.9 % point; nothing outside the kept set is ever drawn."""
    monkeypatch.setattr(gpu, "LOGITS_TILE", 8)
    n = 60 if truncation else 200
    logits = torch.tensor([0.3, -2.0, 1.0, 0.1, -0.5, 0.8, -30.0, 0.9, -1.0]).expand(n, 9).contiguous()
    extra = (torch.full((n,), truncation[0]), torch.full((n,), truncation[1])) if truncation else ()
    temperature = torch.full((n,), 0.8)
    token, _, _ = gpu.sample(logits, torch.arange(n) * 7919, torch.zeros(n, dtype=torch.long), temperature, *extra)
    p = exact(logits[:1], temperature[:1], *(x[:1] for x in extra))[0].exp()
    kept = p > 1e-6
    counts = token.bincount(minlength=9).double()
    assert counts[~kept].sum() == 0
    assert ((counts - n * p)[kept] ** 2 / (n * p[kept])).sum() < {4: 18.5, 5: 20.5, 7: 24.3}[int(kept.sum()) - 1]


def test_a_draw_does_not_know_its_batch_or_slot():
    logits, keys, truncation = inputs(12, 50)
    order = torch.tensor([5, 11, 2])
    whole = gpu.sample(logits, *keys, *truncation)
    some = gpu.sample(logits[order], *(x[order] for x in (*keys, *truncation)))
    assert all(torch.equal(x[order], y) for x, y in zip(whole, some))
    hidden, weight = torch.randn(12, 16), torch.randn(200, 16)
    whole = gpu.linear_sample(hidden, weight, *keys)
    some = gpu.linear_sample(hidden[order], weight, *(x[order] for x in keys))
    assert all(torch.equal(x[order], y) for x, y in zip(whole, some))


def test_ties_keep_the_lower_index(monkeypatch):
    monkeypatch.setattr(gpu, "LOGITS_TILE", 4)  # ties in three tiles
    logits = torch.tensor([[0.0, 2, 1, 2, 2, -0.0, 2, 1, 0]])
    one = torch.ones(1)
    for top_k, top_p, kept in ((2, 1.0, [1, 3]), (5, 1.0, [1, 2, 3, 4, 6]), (0, 0.3, [1, 3]), (3, 0.5, [1, 3]), (0, 1e-6, [1])):
        seen = {int(gpu.sample(logits, torch.tensor([s]), torch.tensor([1]), one, torch.tensor([top_k]),
                               torch.tensor([top_p]))[0]) for s in range(6)}
        _, _, entropy = gpu.sample(logits, torch.tensor([1]), torch.tensor([1]), one, torch.tensor([top_k]),
                                   torch.tensor([top_p]))
        p = exact(logits, one, torch.tensor([top_k]), torch.tensor([top_p]))[0].exp()
        assert p.nonzero()[:, 0].tolist() == kept and seen <= set(kept) and len(seen) > (len(kept) > 1)
        assert entropy.item() == pytest.approx(-(p[kept] * p[kept].log()).sum().item(), abs=1e-5)
    assert gpu.sample(logits, torch.tensor([1]), torch.tensor([1]), torch.zeros(1))[0].item() == 1  # greedy


def test_impossible_and_broken_logits(monkeypatch):
    """-inf is never drawn; a NaN makes the log-prob NaN, with a token in range, and harms no other row."""
    monkeypatch.setattr(gpu, "LOGITS_TILE", 8)
    logits, keys, truncation = inputs(16, 21)
    logits[:, ::2] = -torch.inf
    logits[3, 4], logits[9, 20], logits[7] = torch.nan, torch.nan, torch.nan
    for extra in ((), truncation):
        token, logp, entropy = gpu.sample(logits, *keys, *extra)
        broken = torch.zeros(16, dtype=torch.bool).index_fill(0, torch.tensor([3, 7, 9]), True)
        assert ((token >= 0) & (token < 21)).all() and (token[~broken] % 2 == 1).all()
        assert logp[broken].isnan().all() and logp[~broken].isfinite().all() and entropy[~broken].isfinite().all()


def test_no_row_and_constants_do_not_matter():
    logits, keys, _ = inputs(8, 33)
    logits = (logits * 4).round() / 4
    token, logp, entropy = gpu.sample(logits, *keys)
    assert all(torch.equal(x, y) for x, y in zip((token, logp, entropy), gpu.sample(logits + 4096, *keys)))
    empty = gpu.sample(logits[:0], *(x[:0] for x in keys), torch.zeros(0, dtype=torch.long), torch.zeros(0))
    assert [x.shape for x in empty] == [(0,)] * 3
    assert gpu.linear_sample(torch.zeros(0, 4), torch.zeros(9, 4), *(x[:0] for x in keys))[0].shape == (0,)
