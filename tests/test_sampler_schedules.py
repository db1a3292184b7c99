"""sampler: random schedules against one sequence at a time through the plain forward pass.

Near ties are where rounding decides: a greedy margin under 1e-4, or a uniform within 1e-5 of where another token begins. A
sequence is compared up to its first one.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded_graphs import on_cpu
from toolr0_kernels import sample
from toolr0_kernels.reference import truncate

from toolr0_core.rng import fold, uniform
from toolr0_core.sampler import Sampler, SamplingParams

TOKEN_BYTES = 2 * 2 * 2 * 12 * 4  # keys and values, layers, heads, their size, fp32
BASES = torch.randint(97, (3, 40), generator=torch.Generator().manual_seed(2)).tolist()  # prompts are their beginnings


class Letters:
    """A tokenizer of one letter out of four a token."""

    def decode(self, ids):
        return "".join("abcd"[i % 4] for i in ids)


@dataclass
class Expected:
    """One sequence as it should be, up to the token `doubt`, which rounding decides."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    finish: str | None = None
    doubt: int | None = None

    def add(self, token, logprob, entropy, sampled):
        for column, value in zip((self.tokens, self.logprobs, self.entropies, self.sampled), (token, logprob, entropy, sampled)):
            column.append(value)


def in_doubt(logits_V, p, u):
    """Whether logits that differ by rounding could draw another token than these, or from another set."""
    ordered_V = logits_V.double().sort(descending=True).values
    if p.temperature == 0:
        return (ordered_V[0] - ordered_V[1] < 1e-4).item()
    logp_V = (logits_V.double() / p.temperature).log_softmax(-1)
    if p.top_k and ordered_V[p.top_k - 1] - ordered_V[p.top_k] < 1e-4:
        return True
    if p.top_p < 1:
        head = (ordered_V / p.temperature)[: p.top_k or None].softmax(-1).cumsum(-1)
        if (head - p.top_p).abs().min() < 1e-5:
            return True
    cdf_V = truncate(logp_V[None], torch.tensor([p.top_k]), torch.tensor([p.top_p]))[0].exp().cumsum(-1)
    return ((cdf_V - u).abs().min() < 1e-5).item()


@torch.no_grad()
def naive(model, prompt, p, k=0, answer=None) -> Expected:
    """Sample k of a request; answer(tokens so far) is what a stop puts in."""
    e, seed, fresh = Expected(), torch.tensor([fold(p.seed, k)]), 0
    while e.finish is None:
        logits_1V = model.logits(torch.tensor([[*prompt, *e.tokens]]))[:, -1]
        position = torch.tensor([len(e.tokens)])
        if e.doubt is None and in_doubt(logits_1V[0], p, uniform(seed, position)):
            e.doubt = len(e.tokens)
        drawn = sample(logits_1V, seed, position, torch.tensor([p.temperature], dtype=torch.float32), torch.tensor([p.top_k]),
                       torch.tensor([p.top_p], dtype=torch.float32), impl="torch")
        e.add(*(x.item() for x in drawn), True)
        left = p.max_new_tokens - len(e.tokens)
        text = Letters().decode(e.tokens[fresh:])
        if e.tokens[-1] in p.stop_token_ids or any(s in text for s in p.stop_strings):
            more = answer(len(e.tokens)) if answer and left else None
            if more is None:
                e.finish = "stop"
                break
            for token in more[:left]:
                e.add(token, 0.0, 0.0, False)
            fresh = len(e.tokens)
        if len(e.tokens) == p.max_new_tokens:
            e.finish = "length"
    return e


def check(expected: Expected, c):
    """A completion is what was expected, up to where rounding decides."""
    end = expected.doubt
    assert list(c.token_ids[:end]) == expected.tokens[:end]
    assert c.sampled is None or list(c.sampled[:end]) == expected.sampled[:end]
    assert list(c.logprobs[:end]) == pytest.approx(expected.logprobs[:end], abs=1e-4)
    assert list(c.entropies[:end]) == pytest.approx(expected.entropies[:end], abs=1e-4)
    assert len(c.token_ids) == len(c.logprobs) == len(c.entropies)
    if end is None:
        assert c.finish_reason == expected.finish and len(c.token_ids) == len(expected.tokens)


class Answers:
    """An on_stop that is a function of (request, sample, tokens so far) alone, now or later: told at once, in a Future that
    is done, by a timer, or when somebody else asks (or, where nobody does, by a timer again)."""

    def __init__(self, salt: int, futures: bool):
        self.salt, self.futures, self.timers = salt, futures, []
        self.waiting: deque[tuple[Future, list[int] | None]] = deque()

    def answer(self, request, k, count):
        kind = fold(self.salt, request, k, count)
        return (None, [], [50], [kind % 97, 3, 96, 0, 41][: kind % 5 + 1])[kind // 7 % 4]

    def __call__(self, request, k, completion):
        answer = self.answer(request, k, len(completion.token_ids))
        assert completion.finish_reason == "stop" and completion.sampled[-1]
        self.tell()
        how = fold(self.salt, "how", request, k, len(completion.token_ids)) % 4 if self.futures else 0
        if how == 0:
            return answer
        future = Future()
        if how == 1:
            future.set_result(answer)
        else:
            self.waiting.append((future, answer))
            self.timers.append(threading.Timer((0.001, 0.02)[how - 2], self.tell))
            self.timers[-1].start()
        return future

    def tell(self):
        while True:
            try:
                future, answer = self.waiting.popleft()
            except IndexError:
                return
            future.set_result(answer)


@dataclass
class Schedule:
    model: dict
    prompts: list[list[int]]
    params: list[SamplingParams]
    page_size: int
    max_sequences: int
    spare: int | None
    look: int | None
    salt: int | None
    futures: bool

    def pages(self, i):
        """What request i needs at its full length: the prompt's full pages once, the rest for each sample; the last token
        of a sequence is never read."""
        shared = (len(self.prompts[i]) - 1) // self.page_size
        whole = -(-(len(self.prompts[i]) - 1 + self.params[i].max_new_tokens) // self.page_size)
        return shared + self.params[i].n * (whole - shared)

    @property
    def kv_gib(self):
        """Just enough for the largest request and the page that is nobody's, and `spare` pages more; or no limit."""
        most = 1 + max(self.pages(i) for i in range(len(self.prompts)))
        return None if self.spare is None else (most + self.spare) * self.page_size * TOKEN_BYTES / 2**30


@st.composite
def schedules(draw):
    page = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    edges = [n for n in (1, page - 1, page, page + 1, 2 * page, 2 * page + 1) if n]
    prompts, params = [], []
    for _ in range(draw(st.integers(1, 8))):
        prompt = draw(st.sampled_from(BASES))[: draw(st.sampled_from(edges) | st.integers(1, 33))]
        prompts.append([*prompt[:-1], draw(st.sampled_from([prompt[-1], 7]))])
        params.append(SamplingParams(
            n=draw(st.integers(1, 4)), max_new_tokens=draw(st.integers(1, 20)), seed=draw(st.integers(0, 99)),
            temperature=draw(st.sampled_from([0, 0.7, 1])), top_k=draw(st.sampled_from([0, 0, 3, 20])),
            top_p=draw(st.sampled_from([1, 1, 0.9, 0.5])), stop_token_ids=tuple(range(draw(st.sampled_from([0, 8, 30])))),
            stop_strings=draw(st.sampled_from([(), (), ("ab",), ("dc", "cad")]))))
    return Schedule(draw(st.sampled_from([dict(tie_word_embeddings=False), dict(qkv_bias=True, qk_norm=True)])), prompts, params,
                    page, draw(st.integers(1, 6)), draw(st.none() | st.integers(0, 8)), draw(st.sampled_from([None, None, 1, 3, 8])),
                    draw(st.none() | st.integers(0, 99)), draw(st.booleans()))


def put_in_and_read(c) -> int:
    """How many tokens were put into a sequence that went on behind them."""
    last = max((i for i, drawn in enumerate(c.sampled) if drawn), default=-1) if c.sampled else -1
    return sum(not drawn for drawn in (c.sampled or ())[: last + 1])


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedules())
def test_every_schedule_gives_the_sequences_of_the_plain_loop(tiny, s):
    model, answers, heard, held = tiny(**s.model), None if s.salt is None else Answers(s.salt, s.futures), {}, []
    sampler = Sampler(model, Letters(), kv_gib=s.kv_gib, max_sequences=s.max_sequences, page_size=s.page_size)
    with on_cpu(s.look) if s.look else nullcontext():  # as on a GPU: captured steps, and rows that have stopped wait
        out = sampler.generate(s.prompts, s.params, on_stop=answers, progress=lambda n: held.append(sampler.pages_in_use),
                               on_token=lambda i, k, token: heard.setdefault((i, k), []).append(token))
    for i, (prompt, p, group) in enumerate(zip(s.prompts, s.params, out)):
        assert len(group) == p.n
        for k, c in enumerate(group):
            check(naive(model, prompt, p, k, answers and (lambda count, i=i, k=k: answers.answer(i, k, count))), c)
            assert heard[i, k] == [t for t, drawn in zip(c.token_ids, c.sampled or [True] * len(c.token_ids)) if drawn]
    stats, everything = sampler.stats, [c for group in out for c in group]
    assert held[-1] == sampler.pages_in_use == 0 and len(held) == len(s.prompts)  # given back by the last row, not by the end
    assert stats.sampled == sum(map(len, heard.values()))
    assert stats.prefilled + stats.shared == sum(len(p) - 1 for p in s.prompts) + sum(map(put_in_and_read, everything))
    assert len(stats.first_token_seconds) == len(s.prompts) and all(0 < t <= stats.seconds for t in stats.first_token_seconds)
    assert stats.page_bytes == s.page_size * TOKEN_BYTES and 0 < stats.row_steps == stats.sampled
    assert stats.slots <= s.max_sequences and 0 < stats.utilisation <= 1
    assert s.kv_gib is None or stats.peak_kv_bytes <= s.kv_gib * 2**30
