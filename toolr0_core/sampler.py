"""Batched sampling with a KV cache: every prompt is read once for all of its samples, sequences stop when they like.

Shape suffixes: S running sequences (rows), N packed prompt tokens, D hidden, V vocabulary.

A draw depends on (seed, sample, position) alone, so tokens do not depend on what else is in the batch. Requests wait in a
queue, longest prompts first, while `max_sequences` rows run; rows that ended leave, and waiting requests take their places,
whenever a quarter of the rows has ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from toolr0_core.draw import SamplingParams, Settings, draw, draw_from_hidden, head
from toolr0_core.kv_cache import KVCache, bytes_per_token
from toolr0_core.model import Model
from toolr0_core.rng import fold
from toolr0_core.schema import Completion

PREFILL_TOKENS = 8192  # of prompts read in one forward pass

OnStop = Callable[[int, int, Completion], Sequence[int] | None]


@dataclass(frozen=True)
class _Request:
    index: int
    prompt: Sequence[int]
    params: SamplingParams


@dataclass
class _Row:
    """One sequence as far as it has got."""

    request: _Request
    sample: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    forced: deque[int] = field(default_factory=deque)  # put in by on_stop and not yet consumed
    put_in: set[int] = field(default_factory=set)  # where tokens stand that were put in
    fresh: int = 0  # stop strings are looked for in the tokens from here on

    def force(self) -> int:
        """Takes the next token that was put in."""
        self.put_in.add(len(self.tokens))
        self.tokens.append(self.forced.popleft())
        self.logprobs.append(0.0)
        self.fresh = len(self.tokens)
        return self.tokens[-1]


class Sampler:
    """Samples from `model` as its weights are at each call of generate; nothing is cached between calls.

    tokenizer: anything with decode(ids) -> str, needed for stop strings and for Completion.text. kv_gib bounds the memory
    of keys and values, max_sequences the rows that run at once, though a request's samples always run together.
    """

    def __init__(self, model: Model, tokenizer=None, kv_gib: float | None = None, max_sequences: int | None = None):
        self.model, self.tokenizer = model, tokenizer
        self.kv_gib, self.max_sequences = kv_gib, max_sequences or 256
        self.pieces: dict[int, str] = {}

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams],
                 on_stop: OnStop | None = None, progress: Callable[[int], None] | None = None) -> list[list[Completion]]:
        """n completions of each prompt, in request order. One params for all has its seed folded with the index.

        Log-probs are of the distribution sampled from, after temperature and truncation; greedy ones are of the plain
        distribution at temperature 1. on_stop(request, sample, completion so far) is asked when a sequence meets a stop
        token or string and has room left: None ends it, token ids are put in, and sampling goes on; put-in tokens count
        against max_new_tokens, cannot stop a sequence and have log-prob 0. progress(n): n more requests are done.
        Raises ValueError for an empty prompt, an id outside the vocabulary, stop strings without a tokenizer or a request
        that cannot fit in kv_gib at its full length, FloatingPointError where the model computes NaN.
        """
        if isinstance(params, SamplingParams):
            params = [replace(params, seed=fold(params.seed, i)) for i in range(len(prompts))]
        requests = [_Request(i, p, s) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]
        for request in requests:
            self._check(request)
        return _Run(self, requests, on_stop, progress).run()

    def _check(self, request: _Request) -> None:
        index, prompt, p = request.index, request.prompt, request.params
        vocab = self.model.config.vocab_size
        if not len(prompt):
            raise ValueError(f"request {index} has an empty prompt; it needs at least one token")
        outside = next((t for t in prompt if not 0 <= t < vocab), None)
        if outside is not None:
            raise ValueError(f"request {index} has the token {outside}; the model's vocabulary is 0..{vocab - 1}, so use the "
                             f"tokenizer that belongs to it")
        if p.stop_strings and self.tokenizer is None:
            raise ValueError(f"request {index} has stop strings {p.stop_strings}; give Sampler a tokenizer, or none of them")
        need = self.kv_bytes(1, len(prompt), p.n, p.max_new_tokens)
        if need > self.kv_budget:
            raise ValueError(
                f"request {index}: a prompt of {len(prompt)} tokens and {p.n} x {p.max_new_tokens} new ones need "
                f"{need / 2**30:.3f} GiB of keys and values, more than the {self.kv_budget / 2**30:.3f} GiB of "
                f"sampler.kv_gib; raise it or ask for less")

    def at_stop_string(self, row: _Row) -> bool:
        """Whether the row's last token completes a stop string, in whatever tokens it is written.

        Most tokens are out at once: a string can only end in a token whose own text has its last character, or has
        part of a character (U+FFFD), or where decoding may swallow white space. Else the last tokens are decoded together,
        as many as hold the longest string and a little more.
        """
        strings = row.request.params.stop_strings
        tail = self._piece(row.tokens[-1])
        if not any(s[-1] in tail or s[-1].isspace() or "\ufffd" in tail for s in strings):
            return False
        start, size, wanted = len(row.tokens), 0, max(len(s.encode("utf-8", "replace")) for s in strings) + 4
        while start > row.fresh and size < wanted:  # a piece never has more characters than its tokens have bytes
            start -= 1
            size += len(self._piece(row.tokens[start]))
        text = self.tokenizer.decode(row.tokens[start:])
        return any(s in text for s in strings)

    def _piece(self, token: int) -> str:
        """The text of one token by itself, remembered."""
        if token not in self.pieces:
            self.pieces[token] = self.tokenizer.decode([token])
        return self.pieces[token]

    @property
    def kv_budget(self) -> float:
        return self.kv_gib * 2**30 if self.kv_gib else math.inf

    def kv_bytes(self, groups: int, prompt: int, rows: int, columns: int) -> int:
        """Memory of the two rectangles that KVCache allocates; bytes."""
        return (groups * prompt + rows * columns) * bytes_per_token(self.model.config, self.model.embed_tokens.weight.dtype)


class _Run:
    """One call of generate. `rows`, `settings` and the cache's rows are aligned."""

    def __init__(self, sampler: Sampler, requests: list[_Request], on_stop: OnStop | None, progress):
        self.sampler, self.model, self.on_stop, self.progress = sampler, sampler.model, on_stop, progress
        self.queue = deque(sorted(requests, key=lambda r: (len(r.prompt), r.params.max_new_tokens), reverse=True))
        self.results: list[list[Completion | None]] = [[None] * r.params.n for r in requests]
        self.rows: list[_Row] = []
        weight = self.model.embed_tokens.weight
        self.device = weight.device
        self.cache = KVCache(self.model.config, weight.device, weight.dtype)

    def run(self) -> list[list[Completion]]:
        token_S = torch.empty(0, dtype=torch.long, device=self.device)
        while self.rows or self.queue:
            ended = sum(row.finish is not None for row in self.rows)
            if ended * 4 >= len(self.rows) or self.cache.full:
                token_S = self._reform(token_S)
                continue
            positions_S = self.settings.prompt_S + self.settings.drawn_S - 1
            drawn = self.model(token_S, positions_S, self.cache.decode, partial(draw_from_hidden, s=self.settings))
            self.cache.advance()
            token_S = self._take(self.rows, *drawn)
            self.settings.drawn_S += 1
        return self.results

    # -- rows leave and join -------------------------------------------------------------------------------------------

    def _reform(self, token_S: Tensor) -> Tensor:
        """Drops the rows that have ended, admits what fits of the queue and draws its first tokens; the tokens of all."""
        keep = [i for i, row in enumerate(self.rows) if row.finish is None]
        old = [self.rows[i] for i in keep]
        admitted = self._admit(old)
        new = [_Row(request, k) for request in admitted for k in range(request.params.n)]
        self.rows = old + new
        longest = max((len(r.tokens) for r in self.rows), default=0)
        left = max((r.request.params.max_new_tokens - len(r.tokens) for r in self.rows), default=0)
        room = min(_room(longest), left)
        self.cache.rebuild(keep, [len(r.prompt) for r in admitted], [r.params.n for r in admitted], room)
        token_S = token_S[torch.tensor(keep, device=self.device, dtype=torch.long)]
        if new:
            logits_SV = self._prefill(admitted)
            token_S = torch.cat((token_S, self._take(new, *draw(logits_SV, self._settings(new)))))
        self.settings = self._settings(self.rows)
        return token_S

    def _admit(self, rows: list[_Row]) -> list[_Request]:
        """Takes requests off the queue as long as rows and memory allow; a request always fits where nothing runs."""
        running = {row.request.index: row.request for row in rows}
        prompt = max((len(r.prompt) for r in running.values()), default=0)
        columns = max((r.params.max_new_tokens for r in running.values()), default=0)
        n_rows, admitted = len(rows), []
        while self.queue:
            request = self.queue[0]
            prompt, columns = max(prompt, len(request.prompt)), max(columns, request.params.max_new_tokens)
            n_rows += request.params.n
            groups, spare = len(running) + len(admitted), _room(columns) if rows else 0  # rows of unlike ages waste some
            fits = n_rows <= self.sampler.max_sequences and self.sampler.kv_budget >= self.sampler.kv_bytes(
                groups + 1, prompt, n_rows, columns + spare)
            if groups and not fits:
                break
            admitted.append(self.queue.popleft())
        return admitted

    def _prefill(self, admitted: list[_Request]) -> Tensor:
        """Reads the prompts of the cache's last groups, a few thousand tokens at a time; logits of all their rows."""
        logits, first = [], len(self.cache.lengths) - len(admitted)
        for chunk in _chunks(admitted):
            lengths = [len(r.prompt) for r in chunk]
            ids_N = torch.tensor([t for r in chunk for t in r.prompt], device=self.device)
            positions_N = torch.cat([torch.arange(n) for n in lengths]).to(self.device)
            last = torch.tensor(lengths, device=self.device).cumsum(0) - 1
            logits.append(self.model(ids_N, positions_N, self.cache.prefill(first, lengths),
                                     lambda hidden_ND, weight_VD, last=last: head(hidden_ND[last], weight_VD)))
            first += len(chunk)
        return torch.cat(logits).repeat_interleave(torch.tensor([r.params.n for r in admitted], device=self.device), 0)

    def _settings(self, rows: list[_Row]) -> Settings:
        return Settings.of([r.request.params for r in rows], [r.sample for r in rows], [len(r.tokens) for r in rows],
                           [len(r.request.prompt) for r in rows], self.device)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _take(self, rows: list[_Row], token_S: Tensor, logp_S: Tensor) -> Tensor:
        """Gives every row its token, ends those that are done; the tokens to go on with."""
        tokens, logprobs, forced = token_S.tolist(), logp_S.tolist(), False
        if math.isnan(sum(logprobs)):
            raise FloatingPointError("the model's logits are not finite; its weights hold NaN or infinity, or overflow")
        for i, row in enumerate(rows):
            if row.finish is not None:
                continue
            if row.forced:
                forced, tokens[i] = True, row.force()
            else:
                row.tokens.append(tokens[i])
                row.logprobs.append(logprobs[i])
                params = row.request.params
                if tokens[i] in params.stop_token_ids or params.stop_strings and self.sampler.at_stop_string(row):
                    self._stop(row)
            if row.finish is None and len(row.tokens) >= row.request.params.max_new_tokens:
                self._end(row, "length")
        return torch.tensor(tokens, device=self.device) if forced else token_S

    def _stop(self, row: _Row) -> None:
        """Ends the row, unless on_stop has something to put in."""
        more = None
        if self.on_stop and len(row.tokens) < row.request.params.max_new_tokens:
            more = self.on_stop(row.request.index, row.sample, self._completion(row, "stop"))
        if more is None:
            self._end(row, "stop")
        else:
            row.forced.extend(more)
            row.fresh = len(row.tokens)

    def _end(self, row: _Row, reason: str) -> None:
        row.finish = reason
        group = self.results[row.request.index]
        group[row.sample] = self._completion(row, reason)
        if self.progress and None not in group:
            self.progress(1)

    def _completion(self, row: _Row, reason: str) -> Completion:
        tokenizer = self.sampler.tokenizer
        text = tokenizer.decode(row.tokens) if tokenizer else None
        sampled = tuple(i not in row.put_in for i in range(len(row.tokens))) if self.on_stop else None
        return Completion(tuple(row.tokens), tuple(row.logprobs), reason, text, sampled)


def _room(columns: int) -> int:
    """By how many columns the cache grows: few, since all are read, yet in proportion, since growing copies it."""
    return max(16, columns // 4)


def _chunks(requests: list[_Request]) -> Iterable[list[_Request]]:
    """Consecutive requests of at most PREFILL_TOKENS together, or one that is longer."""
    chunk, tokens = [], 0
    for request in requests:
        if chunk and tokens + len(request.prompt) > PREFILL_TOKENS:
            yield chunk
            chunk, tokens = [], 0
        chunk.append(request)
        tokens += len(request.prompt)
    yield chunk
