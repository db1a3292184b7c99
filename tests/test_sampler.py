"""sampler and rng: against the plain forward pass, exact probabilities, and themselves in other batches."""

from dataclasses import replace

import pytest
import torch
from scipy_free import chi_square_p

from toolr0_core.rng import fold, uniform
from toolr0_core.sampler import Sampler, SamplingParams, truncate


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, ids):
        return "".join(chr(97 + i % 26) for i in ids)


def prompts_of(*lengths):
    g = torch.Generator().manual_seed(1)
    return [torch.randint(97, (n,), generator=g).tolist() for n in lengths]


def greedy_loop(model, prompt, n):
    ids = list(prompt)
    for _ in range(n):
        ids.append(model.logits(torch.tensor([ids]))[0, -1].argmax().item())
    return ids[len(prompt):]


@torch.no_grad()
def test_greedy_tokens_of_a_ragged_batch_equal_the_plain_loop(tiny):
    model, prompts = tiny(qk_norm=True), prompts_of(1, 7, 30, 2, 13, 7)
    out = Sampler(model, max_sequences=4).generate(prompts, SamplingParams(temperature=0, max_new_tokens=15))
    assert [list(c.token_ids) for (c,) in out] == [greedy_loop(model, p, 15) for p in prompts]
    assert {c.finish_reason for (c,) in out} == {"length"}


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"top_k": 5}, {"top_p": 0.7}, {"temperature": 0.6, "top_p": 0.9, "top_k": 20}])
def test_logprobs_are_those_of_the_distribution_sampled_from(tiny, changes):
    model, prompts = tiny(qkv_bias=True), prompts_of(3, 9, 4)
    params = SamplingParams(n=3, max_new_tokens=8, seed=5, **changes)
    for prompt, group in zip(prompts, Sampler(model).generate(prompts, params)):
        for c in group:
            logits = model.logits(torch.tensor([[*prompt, *c.token_ids]]))[0, len(prompt) - 1: -1]
            logp = (logits / params.temperature).log_softmax(-1)
            logp = truncate(logp, torch.full((8,), params.top_k), torch.full((8,), params.top_p))
            expected = logp.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
            assert torch.allclose(torch.tensor(c.logprobs), expected, atol=1e-4)


def test_truncation_of_a_known_distribution():
    p = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    keep = lambda k, mass: truncate(p, torch.tensor([k]), torch.tensor([mass])).exp()[0].tolist()  # noqa: E731
    assert keep(2, 1.0) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert keep(0, 0.74) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert keep(0, 0.4) == pytest.approx([1, 0, 0, 0])
    assert keep(3, 0.8) == pytest.approx([0.5 / 0.75, 0.25 / 0.75, 0, 0])  # the nucleus is taken of what top-k left


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"top_k": 4}, {"top_p": 0.8}, {"temperature": 1.7}])
def test_samples_follow_the_exact_distribution(tiny, changes):
    model = tiny(vocab_size=11)
    params = SamplingParams(n=4000, max_new_tokens=1, seed=3, **changes)
    (group,) = Sampler(model, max_sequences=4000).generate([[1, 2, 3]], params)
    logp = (model.logits(torch.tensor([[1, 2, 3]]))[0, -1:] / params.temperature).log_softmax(-1)
    exact = truncate(logp, torch.tensor([params.top_k]), torch.tensor([params.top_p])).exp()[0]
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in group]), minlength=11)
    assert counts[exact == 0].sum() == 0
    assert chi_square_p(counts[exact > 0].tolist(), (exact[exact > 0] * 4000).tolist()) > 1e-4


@torch.no_grad()
def test_a_sample_is_the_same_alone_and_in_any_batch(tiny):
    model, prompts = tiny(), prompts_of(5, 11, 3, 20)
    params = [SamplingParams(n=n, max_new_tokens=m, seed=fold(7, i)) for i, (n, m) in enumerate([(3, 9), (1, 12), (5, 4), (2, 9)])]
    together = Sampler(model).generate(prompts, params)
    reverse = Sampler(model, max_sequences=3).generate(prompts[::-1], params[::-1])[::-1]
    alone = [Sampler(model).generate([p], [s])[0] for p, s in zip(prompts, params)]
    ids = lambda groups: [[c.token_ids for c in g] for g in groups]  # noqa: E731
    assert ids(together) == ids(reverse) == ids(alone)
    assert len({c.token_ids for c in together[0]}) == 3  # samples of one prompt differ (known fault 21)
    assert ids(Sampler(model).generate(prompts, [replace(s, seed=s.seed + 1) for s in params])) != ids(together)


@torch.no_grad()
def test_stop_tokens_end_a_sequence_and_are_kept(tiny):
    model, prompts = tiny(), prompts_of(5, 6)
    free = [greedy_loop(model, p, 12) for p in prompts]
    stops = (free[0][0], free[1][4])  # the very first token of one, a later one of the other; also inside prompts
    out = Sampler(model).generate([[*stops, *prompts[0]][2:], prompts[1]], SamplingParams(
        temperature=0, max_new_tokens=12, stop_token_ids=stops))
    for tokens, (c,) in zip(free, out):
        cut = next(i for i, t in enumerate(tokens) if t in stops) + 1
        assert list(c.token_ids) == tokens[:cut] and c.finish_reason == "stop" and len(c.logprobs) == cut


@torch.no_grad()
def test_stop_strings_reach_across_tokens(tiny):
    model, (prompt,) = tiny(), prompts_of(4)
    tokens = greedy_loop(model, prompt, 12)
    text = Letters().decode(tokens)
    out = Sampler(model, Letters()).generate([prompt], SamplingParams(temperature=0, max_new_tokens=12, stop_strings=(text[3:6],)))
    end = text.index(text[3:6]) + 3
    assert out[0][0].text == text[:end] and list(out[0][0].token_ids) == tokens[:end] and out[0][0].finish_reason == "stop"


@torch.no_grad()
def test_new_weights_are_seen_at_once(tiny):
    model, prompts = tiny(), prompts_of(6)
    sampler, params = Sampler(model), SamplingParams(temperature=0, max_new_tokens=8)
    before = sampler.generate(prompts, params)
    for p in model.parameters():
        p.add_(torch.randn_like(p) * 0.2)
    assert sampler.generate(prompts, params) == Sampler(model).generate(prompts, params) != before  # known fault 20


def test_what_cannot_fit_is_refused_with_the_arithmetic(tiny):
    with pytest.raises(ValueError, match="5 tokens and 2 x 900 new"):
        Sampler(tiny(), kv_gib=1e-4).generate(prompts_of(5), SamplingParams(n=2, max_new_tokens=900))
    with pytest.raises(ValueError, match="empty prompt"):
        Sampler(tiny()).generate([[]], SamplingParams())
    for bad in ({"temperature": -1}, {"top_p": 0}, {"n": 0}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            SamplingParams(**bad)


def test_a_memory_budget_only_makes_more_waves(tiny):
    model, prompts = tiny(), prompts_of(5, 6, 7)
    params = SamplingParams(n=2, max_new_tokens=6)
    need = (7 + 2 * 6) * 2 * 2 * 2 * 12 * 4
    small, whole = Sampler(model, kv_gib=need / 2**30), Sampler(model)
    ids = lambda sampler: [[c.token_ids for c in g] for g in sampler.generate(prompts, params)]  # noqa: E731
    assert ids(small) == ids(whole)


def test_no_requests_give_no_completions(tiny):
    assert Sampler(tiny()).generate([], SamplingParams()) == []


def test_uniforms_are_uniform_and_depend_on_seed_and_position_alone():
    seeds, positions = torch.arange(40_000) * 977, torch.arange(40_000) % 13
    u = uniform(seeds, positions)
    assert 0 < u.min() and u.max() < 1
    counts = torch.histc(u, 20, 0, 1)
    assert chi_square_p(counts.tolist(), [2000.0] * 20) > 1e-4
    order = torch.randperm(40_000)
    assert torch.equal(uniform(seeds[order], positions[order]), u[order])
    pairs = torch.stack([uniform(seeds, positions), uniform(seeds, positions + 1)])
    assert abs(torch.corrcoef(pairs)[0, 1]) < 0.02


def test_fold_separates_its_keys():
    assert fold(1, "a") == fold(1, "a") != fold(1, "b") != fold(2, "b")
    assert len({fold(0), fold(0, 0), fold(0, "0"), fold(0, 0, 0), fold(0, "a", "b"), fold(0, "ab")}) == 6
    assert 0 <= fold(-5, "x") < 2**63
