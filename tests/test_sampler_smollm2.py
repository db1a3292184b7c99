"""sampler on the real SmolLM2-135M: greedy tokens of a ragged batch against transformers."""

from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from toolr0_core import model, smollm2, tokenizer
from toolr0_core.sampler import Sampler, SamplingParams

NEW = 16
TIE = 1e-4  # the two largest logits: rounding may choose either


@pytest.fixture(scope="module")
def folder():
    try:
        return smollm2.directory()
    except ValueError as error:
        pytest.skip(f"no network and no cached wheel: {error}")


@pytest.fixture(scope="module")
def reference(folder):
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None  # it goes on, as the sampler does without stop tokens
    return reference


@pytest.fixture(scope="module")
def ours(folder):
    return model.load(folder)


@pytest.fixture(scope="module")
def prompts(folder):
    """32 prompts of 5 to 200 tokens: pieces of a text, of lengths that are short more often than long; every third begins as
    the others of its kind do."""
    ids = tokenizer.load(folder).encode((Path(__file__).parents[1] / "LICENSE").read_text())
    g = torch.Generator().manual_seed(0)
    lengths = (5 * 40 ** torch.rand(32, generator=g) ** 1.5).int().tolist()
    starts = torch.randint(len(ids) - 200, (32,), generator=g).tolist()
    prompts = [ids[s: s + n] for s, n in zip(starts, [*lengths[:-2], 5, 200])]
    return [[*ids[:70], *p][:200] if i % 3 == 0 else p for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(reference):
    """expected(prompt, tokens) -> the largest logit at each token less that token's, and the margin of the two largest: one
    forward pass over all."""
    @cache
    @torch.no_grad()
    def gaps(prompt, tokens):
        logits_TV = reference(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1: -1]
        first_T, second_T = logits_TV.topk(2).values.unbind(-1)
        return first_T - logits_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0], first_T - second_T
    return gaps


@pytest.mark.slow
@pytest.mark.parametrize("order, max_sequences, page_size", [(1, 32, 64), (-1, 5, 16), (-1, 32, 16)])
def test_every_token_of_a_ragged_batch_is_the_likeliest_one(ours, prompts, expected, order, max_sequences, page_size):
    sampler, near_ties = Sampler(ours, max_sequences=max_sequences, page_size=page_size), 0
    out = sampler.generate(prompts[::order], SamplingParams(temperature=0, max_new_tokens=NEW))[::order]
    for prompt, (completion,) in zip(prompts, out):
        assert len(completion.token_ids) == NEW
        gap_T, margin_T = expected(tuple(prompt), completion.token_ids)
        assert (gap_T[margin_T >= TIE] == 0).all() and (gap_T < TIE).all()
        near_ties += (margin_T < TIE).sum().item()
    assert near_ties <= 0.01 * NEW * len(prompts)
    assert sampler.stats.shared >= 64 * 3 and sampler.pages_in_use == 0


@pytest.mark.slow
@torch.no_grad()
def test_greedy_tokens_equal_those_of_generate(ours, prompts, reference, expected):
    some = sorted(prompts, key=len)[::6]
    out = Sampler(ours, max_sequences=4).generate(some, SamplingParams(temperature=0, max_new_tokens=NEW))
    for prompt, (completion,) in zip(some, out):
        tokens = reference.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                                    max_new_tokens=NEW, do_sample=False)[0, len(prompt):].tolist()
        margin_T = expected(tuple(prompt), tuple(tokens))[1]
        end = next((i for i, m in enumerate(margin_T.tolist()) if m < TIE), NEW)
        assert list(completion.token_ids)[:end] == tokens[:end] and end > 1
