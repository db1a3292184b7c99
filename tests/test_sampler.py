"""sampler: against the plain forward pass, transformers, exact probabilities, and itself in other batches."""

from dataclasses import replace

import pytest
import torch
import transformers
from scipy_free import chi_square_p
from toolr0_kernels.reference import truncate

from toolr0_core import sampler
from toolr0_core.kv_cache import PagePool
from toolr0_core.model import load
from toolr0_core.rng import fold
from toolr0_core.sampler import Sampler, SamplingParams


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
            assert torch.allclose(torch.tensor(c.logprobs), expected, atol=1e-5)


def test_truncation_of_a_known_distribution():
    p = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    keep = lambda k, mass: truncate(p, torch.tensor([k]), torch.tensor([mass])).exp()[0].tolist()  # noqa: E731
    assert keep(2, 1.0) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert keep(0, 0.74) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert keep(0, 0.4) == pytest.approx([1, 0, 0, 0])
    assert keep(3, 0.8) == pytest.approx([0.5 / 0.75, 0.25 / 0.75, 0, 0])  # the nucleus is taken of what top-k left


def test_truncation_that_is_off_drops_nothing_of_a_tail_lost_in_rounding():
    logp = torch.tensor([[30.0] + [0.0] * 9] * 2).log_softmax(-1)
    assert truncate(logp, torch.tensor([0, 4]), torch.tensor([1.0, 1.0])).isfinite().sum(-1).tolist() == [10, 4]


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


def page_bytes(page_size):
    return page_size * 2 * 2 * 2 * 12 * 4  # keys and values, layers, heads, their size, bytes


def test_a_memory_budget_only_makes_more_waves(tiny):
    model, prompts = tiny(), prompts_of(5, 6, 7)
    params = SamplingParams(n=2, max_new_tokens=6)
    small, whole = Sampler(model, kv_gib=6 * page_bytes(4) / 2**30, page_size=4), Sampler(model)  # 1 shared, 2 each, page 0
    ids = lambda sampler: [[c.token_ids for c in g] for g in sampler.generate(prompts, params)]  # noqa: E731
    assert ids(small) == ids(whole)
    assert small.stats.peak_pages == 5 and small.stats.slots == 6 and small.stats.utilisation < 0.5
    small.kv_gib *= 0.99
    with pytest.raises(ValueError, match="request 0: .* 1 shared and 2 x 2 pages of 4 tokens"):
        small.generate(prompts, params)


@torch.no_grad()
def test_keys_and_values_never_take_more_than_the_budget(tiny, monkeypatch):
    model, sizes = tiny(), []
    make = PagePool.__init__

    def watched(pool, *args):
        make(pool, *args)
        sizes.append(pool.k_LPKBE.nbytes + pool.v_LPKBE.nbytes)
    monkeypatch.setattr(PagePool, "__init__", watched)
    params = [SamplingParams(n=3, max_new_tokens=m, seed=m) for m in (40, 5, 11, 90, 33, 2, 64, 8) * 3]
    budget = 1e6
    sampler = Sampler(model, kv_gib=budget / 2**30, page_size=8)
    sampler.generate(prompts_of(*[5 + i % 5 for i in range(24)]), params)
    assert sum(sizes) <= budget and sampler.stats.page_bytes == page_bytes(8)
    assert 0.9 * budget < sampler.stats.peak_kv_bytes < budget and sampler.pages_in_use == 0


def test_no_requests_give_no_completions(tiny):
    assert Sampler(tiny()).generate([], SamplingParams()) == []


HF = dict(vocab_size=101, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6,
          num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=0,
          initializer_range=0.3)


@torch.no_grad()
@pytest.mark.parametrize("config", [transformers.LlamaConfig(**HF), transformers.Qwen2Config(**HF),
                                    transformers.Qwen3Config(**HF, head_dim=16)], ids=lambda c: c.model_type)
def test_greedy_tokens_equal_those_of_transformers(config, tmp_path):
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    reference.save_pretrained(tmp_path)
    prompts = [[t % 101 for t in p] for p in prompts_of(3, 17, 9, 1)]
    out = Sampler(load(tmp_path), max_sequences=2).generate(prompts, SamplingParams(temperature=0, max_new_tokens=20))
    for prompt, (c,) in zip(prompts, out):
        expected = reference.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                                      max_new_tokens=20, do_sample=False)
        assert list(c.token_ids) == expected[0, len(prompt):].tolist()


@torch.no_grad()
def test_a_queue_longer_than_the_batch_changes_nothing(tiny, monkeypatch):
    """Rows of many ages side by side: every limit, stop and length differs, and the batch refills again and again."""
    monkeypatch.setitem(sampler.PREFILL_TOKENS, "cpu", 40)
    model, rng = tiny(), torch.Generator().manual_seed(4)
    lengths = torch.randint(1, 30, (40,), generator=rng).tolist()
    prompts = prompts_of(*lengths)
    params = [SamplingParams(n=1 + i % 4, max_new_tokens=3 + 7 * i % 61, seed=i, temperature=(1, 0.7, 0)[i % 3],
                             top_k=(0, 9)[i % 2], top_p=(1, 0.9)[i % 5 == 0], stop_token_ids=tuple(range(i % 7)))
              for i in range(40)]
    finished = []
    together = Sampler(model, max_sequences=10).generate(prompts, params, progress=finished.append)
    assert sum(finished) == 40
    for prompt, p, group in zip(prompts, params, together):
        (alone,) = Sampler(model).generate([prompt], [p])
        assert [(c.token_ids, c.finish_reason) for c in group] == [(c.token_ids, c.finish_reason) for c in alone]
        for a, b in zip(group, alone):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
            assert len(a.token_ids) <= p.max_new_tokens
            assert (a.finish_reason == "stop") == (a.token_ids[-1] in p.stop_token_ids)


@torch.no_grad()
def test_greedy_logprobs_are_of_the_plain_distribution_whatever_the_truncation(tiny):
    model, (prompt,) = tiny(), prompts_of(6)
    ((c,),) = Sampler(model).generate([prompt], SamplingParams(temperature=0, top_k=1, top_p=0.1, max_new_tokens=5))
    logp = model.logits(torch.tensor([[*prompt, *c.token_ids]]))[0, len(prompt) - 1: -1].log_softmax(-1)
    assert c.logprobs == pytest.approx(logp.max(-1).values.tolist(), abs=1e-5)


@torch.no_grad()
def test_a_prompt_is_read_once_for_all_its_samples(tiny):
    model, seen = tiny(), []
    model.embed_tokens.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    Sampler(model).generate(prompts_of(20, 10), SamplingParams(n=8, max_new_tokens=3))
    assert seen == [28, 16, 16, 16]  # the last token of a prompt is every sample's first step


@torch.no_grad()
def test_ended_rows_leave_and_cost_no_more(tiny):
    model, seen = tiny(), []
    model.embed_tokens.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    params = [SamplingParams(n=4, max_new_tokens=m) for m in (2, 2, 2, 30)]
    Sampler(model).generate(prompts_of(5, 5, 5, 5), params)
    assert seen == [16] + [16] * 2 + [4] * 28


def test_bf16_stays_near_fp32(tiny):
    """Scores and logits are fp32: the error is that of the bf16 forward pass, against the same weights in fp32."""
    exact, prompts = tiny().to(torch.bfloat16).float(), prompts_of(12, 5)
    half = tiny().to(torch.bfloat16)
    gap = []
    for prompt, group in zip(prompts, Sampler(half).generate(prompts, SamplingParams(n=4, max_new_tokens=12))):
        for c in group:
            logits = exact.logits(torch.tensor([[*prompt, *c.token_ids]]))[0, len(prompt) - 1: -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
            gap += (torch.tensor(c.logprobs) - expected).abs().tolist()
    assert sum(gap) / len(gap) < 0.03


def test_a_model_that_computes_nan_is_named(tiny):
    model = tiny()
    model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan
    for temperature in (0, 1):
        with pytest.raises(FloatingPointError, match="not finite"):
            Sampler(model).generate(prompts_of(4), SamplingParams(temperature=temperature, max_new_tokens=3))


def test_what_the_model_cannot_read_is_refused(tiny):
    for bad in (97, -1):
        with pytest.raises(ValueError, match=f"request 1 has the token {bad}"):
            Sampler(tiny()).generate([[1, 2], [5, bad, 7]], SamplingParams())
    with pytest.raises(ValueError, match="tokenizer"):
        Sampler(tiny()).generate([[1]], SamplingParams(stop_strings=("x",)))


def test_samples_drawn_in_parts_are_those_drawn_together(tiny):
    """Which is how several ranks share a request (roles._parts)."""
    model, (prompt,) = tiny(), prompts_of(6)
    params = SamplingParams(n=5, max_new_tokens=9, seed=4)
    (whole,) = Sampler(model).generate([prompt], [params])
    parts = Sampler(model).generate([prompt] * 2, [replace(params, n=2), replace(params, n=3, first=2)])
    assert [c.token_ids for c in whole] == [c.token_ids for group in parts for c in group]


def test_prompts_that_begin_alike_share_their_pages_within_a_call(tiny):
    model, base = tiny(), prompts_of(40)[0]
    prompts = [base[:33], base[:33] + [5, 6], base[:20] + [7] * 20]
    sampler = Sampler(model, page_size=8)
    out = sampler.generate(prompts, SamplingParams(n=2, max_new_tokens=5))
    assert sampler.stats.shared == 16 + 32 and sampler.stats.prefilled == 39 + 2 + 16  # the longest is read first
    alone = Sampler(model).generate(prompts, SamplingParams(n=2, max_new_tokens=5))
    assert [[c.token_ids for c in g] for g in out] == [[c.token_ids for c in g] for g in alone]
    sampler.generate(prompts[:1], SamplingParams(max_new_tokens=1))
    assert sampler.stats.shared == 0  # another call, perhaps with other weights


def test_entropies_are_those_of_the_distribution_sampled_from(tiny):
    model, (prompt,) = tiny(), prompts_of(6)
    for changes in ({}, {"top_k": 5}, {"temperature": 0}):
        ((c,),) = Sampler(model).generate([prompt], SamplingParams(max_new_tokens=6, **changes))
        logp = model.logits(torch.tensor([[*prompt, *c.token_ids]]))[0, len(prompt) - 1: -1].detach().log_softmax(-1)
        logp = truncate(logp, torch.full((6,), changes.get("top_k", 0)), torch.ones(6))
        assert c.entropies == pytest.approx(torch.distributions.Categorical(logits=logp).entropy().tolist(), abs=1e-4)
