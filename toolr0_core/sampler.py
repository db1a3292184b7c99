"""The sampler: continuous batching over a paged KV cache.

Requests wait in a queue, longest prompts first. One is admitted when a row and pages for its full length are free, so nothing
that has started ever has to make room. Its prompt is read once: all full pages are shared by its samples, and with prompts that
begin alike; a page that the prompt fills in part is copied for each. A sequence always has all but its last token in the cache,
and a step reads that last one: the first step of every sample reads the prompt's last token, and text that on_stop puts in is
read like a prompt, but for its last token. Rows that end leave after the step (batch.py), others take their places.

A draw depends on (seed, sample, position) alone, so tokens do not depend on what else is in the batch.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from toolr0_core.batch import Batch
from toolr0_core.kv_cache import PAGE_SIZE, PagePool, Span, bytes_per_token
from toolr0_core.model import Model
from toolr0_core.rng import fold
from toolr0_core.sampling_params import SamplingParams
from toolr0_core.schema import Completion
from toolr0_core.stop_strings import StopStrings

PREFILL_TOKENS = {"cpu": 2048, "cuda": 8192}  # of prompts read in one forward pass: on a CPU, what its caches hold is faster
REFILL_SHARE = 8  # one row in so many has to be free before others join, since joining costs a forward pass

More = Sequence[int] | None
OnStop = Callable[[int, int, Completion], "More | futures.Future[More]"]


@dataclass
class Stats:
    """What one call of generate did."""

    slots: int = 0  # rows that could run at once
    steps: int = 0
    row_steps: int = 0  # running rows, summed over the steps
    sampled: int = 0  # tokens drawn
    prefilled: int = 0  # prompt and put-in tokens computed
    shared: int = 0  # prompt tokens found in pages of other prompts instead
    peak_pages: int = 0
    page_bytes: int = 0
    seconds: float = 0.0
    host_seconds: float = 0.0  # outside the forward passes
    first_token_seconds: list[float] = field(default_factory=list)  # of each request, from the call on

    @property
    def utilisation(self) -> float:
        return self.row_steps / max(1, self.steps * self.slots)

    @property
    def peak_kv_bytes(self) -> int:
        return self.peak_pages * self.page_bytes


@dataclass(frozen=True)
class _Request:
    index: int
    prompt: Sequence[int]
    params: SamplingParams


@dataclass(eq=False)
class _Row:
    """One sequence as far as it has got. While it runs, its new tokens are in the run's buffers, not here."""

    request: _Request
    sample: int
    pages: list[int]
    last: int  # its last token, not yet read
    length: int  # tokens read
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    put_in: set[int] = field(default_factory=set)  # where tokens stand that were put in
    unread: list[int] = field(default_factory=list)  # tokens to read before it runs on
    record: int = -1  # its line of the buffers


class Sampler:
    """Samples from `model` as its weights are at each call of generate; no keys are used in more than one call.

    tokenizer: anything with decode(ids) -> str, needed for stop strings and for Completion.text. kv_gib bounds the memory of
    keys and values (None: nine tenths of what is free), max_sequences the rows that run at once, page_size the tokens of a
    page. What a call has allocated is kept for the next one, until `release`. `stats` tells what the last call did.
    """

    def __init__(self, model: Model, tokenizer=None, kv_gib: float | None = None, max_sequences: int | None = None,
                 page_size: int = PAGE_SIZE):
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}; a page holds at least 1 token")
        self.model, self.tokenizer, self.page_size = model, tokenizer, page_size
        self.kv_gib, self.max_sequences = kv_gib, max_sequences or 256
        self.stops: dict[tuple[str, ...], StopStrings] = {}  # of the last call
        self.stats = Stats()
        self.release()

    def release(self) -> None:
        """Gives the memory of keys and values back."""
        self.pool: PagePool | None = None
        self.batch: Batch | None = None

    @property
    def pages_in_use(self) -> int:
        return self.pool.in_use if self.pool else 0

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams],
                 on_stop: OnStop | None = None, progress: Callable[[int], None] | None = None,
                 on_token: Callable[[int, int, int], None] | None = None) -> list[list[Completion]]:
        """n completions of each prompt, in request order. One params for all has its seed folded with the index.

        Log-probs and entropies are of the distribution sampled from, after temperature and truncation; greedy ones are of the
        plain distribution at temperature 1. on_stop(request, sample, completion so far) is asked when a sequence meets a stop
        token or string and has room left: None ends it, token ids are put in, and sampling goes on; a Future of either lets
        the sequence wait, its keys kept, while others run. Put-in tokens count against max_new_tokens, cannot stop a sequence
        and have log-prob 0. progress(n): n more requests are done. on_token(request, sample, token): one was drawn.
        Raises ValueError for an empty prompt, an id outside the vocabulary, stop strings without a tokenizer or a request
        that cannot fit in kv_gib at its full length, FloatingPointError where the model computes NaN.
        """
        if isinstance(params, SamplingParams):
            params = [replace(params, seed=fold(params.seed, i)) for i in range(len(prompts))]
        requests = [_Request(i, p, s) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]
        self.stats = Stats(first_token_seconds=[math.nan] * len(requests))
        if not requests:
            return []
        budget = self._budget()
        for request in requests:
            self._check(request, budget)
        self._allocate(requests, budget)
        self.stops = {strings: self.stops.get(strings) or StopStrings(strings, self.tokenizer, self.model.config.vocab_size)
                      for strings in {r.params.stop_strings for r in requests} if strings}
        try:
            return _Run(self, requests, on_stop, progress, on_token).run()
        finally:
            self.pool.reset()

    # -- memory --------------------------------------------------------------------------------------------------------

    @property
    def page_bytes(self) -> int:
        return self.page_size * bytes_per_token(self.model.config, self.model.embed_tokens.weight.dtype)

    def pages(self, request: _Request) -> tuple[int, int]:
        """Pages that the prompt fills, shared by all samples, and pages of each sample's own. The last token is never read."""
        read = len(request.prompt) - 1
        full = read // self.page_size
        return full, -(-(read + request.params.max_new_tokens) // self.page_size) - full

    def _budget(self) -> float:
        """Bytes that keys and values may take."""
        if self.kv_gib:
            return self.kv_gib * 2**30
        device, held = self.model.embed_tokens.weight.device, self.pool.pages * self.page_bytes if self.pool else 0
        return 0.9 * (_free_bytes(device) + held)

    def _check(self, request: _Request, budget: float) -> None:
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
        full, own = self.pages(request)
        need = 1 + full + p.n * own
        if need * self.page_bytes > budget:
            have = f"sampler.kv_gib is {self.kv_gib:g}" if self.kv_gib else f"{budget / 2**30:.3g} GiB are free"
            raise ValueError(
                f"request {index}: a prompt of {len(prompt)} tokens and {p.n} x {p.max_new_tokens} new ones need {full} shared "
                f"and {p.n} x {own} pages of {self.page_size} tokens and a spare one, {need * self.page_bytes / 2**30:.3g} GiB "
                f"of keys and values, and {have}; ask for less or make room")

    def _allocate(self, requests: Sequence[_Request], budget: float) -> None:
        """Pages and columns for these requests; those of the last call where they do."""
        sizes = [(*self.pages(r), r.params.n) for r in requests]
        samples = sum(n for *_, n in sizes)
        slots = min(self.max_sequences, samples)
        at_once = slots * max(full + own for full, own, _ in sizes) + max(full + n * own for full, own, n in sizes)
        need = 1 + min(at_once, sum(full + n * own for full, own, n in sizes))
        pages = int(min(need, budget // self.page_bytes))
        weight, pool, batch = self.model.embed_tokens.weight, self.pool, self.batch
        if not pool or (pool.device, pool.dtype) != (weight.device, weight.dtype) or pool.pages < pages \
                or pool.page_size != self.page_size or pool.pages * self.page_bytes > budget:
            self.release()
            pool = batch = None
            self.pool = PagePool(self.model.config, pages, self.page_size, weight.device, weight.dtype)
        width = max(full + own for full, own, _ in sizes)
        stops = max(1, max(len(r.params.stop_token_ids) for r in requests))
        if not batch or batch.host["table"].shape[1] < width or batch.host["stops"].shape[1] < stops \
                or not slots <= batch.slots <= self.max_sequences:
            self.batch = Batch(slots, width, stops, weight.device)
        self.batch.keep(np.arange(0))


class _Run:
    """One call of generate. `rows` are those of the batch, in its order."""

    def __init__(self, sampler: Sampler, requests: list[_Request], on_stop: OnStop | None, progress, on_token):
        self.sampler, self.model, self.pool, self.batch = sampler, sampler.model, sampler.pool, sampler.batch
        self.on_stop, self.progress, self.on_token = on_stop, progress, on_token
        self.queue = deque(sorted(requests, key=lambda r: (len(r.prompt), r.params.max_new_tokens), reverse=True))
        self.results: list[list[Completion | None]] = [[None] * r.params.n for r in requests]
        self.slots = min(sampler.max_sequences, self.batch.slots, sum(r.params.n for r in requests))
        self.rows: list[_Row] = []
        self.ready: deque[_Row] = deque()  # have pages, wait for a row
        self.waiting: list[tuple[futures.Future, _Row]] = []  # for on_stop
        longest = max(r.params.max_new_tokens for r in requests)
        self.buffers = {name: np.empty((self.slots, longest), x.dtype) for name, x in self.batch.results.items()}
        self.records = list(range(self.slots))
        self.stats, self.began = sampler.stats, time.perf_counter()
        self.stats.slots, self.stats.page_bytes = self.slots, sampler.page_bytes

    def run(self) -> list[list[Completion]]:
        while self.rows or self.ready or self.queue or self.waiting:
            self._resume()
            self._refill()
            if self.rows:
                before = self.batch.host["drawn"][: len(self.rows)].copy()
                self._timed(self.batch.run, self.model, self.pool)
                self._look(before)
            elif self.waiting:  # nothing else can run, or for want of pages
                futures.wait([future for future, _ in self.waiting], return_when=futures.FIRST_COMPLETED)
        self.stats.seconds = time.perf_counter() - self.began
        self.stats.host_seconds += self.stats.seconds
        return self.results

    def _timed(self, forward: Callable, *args) -> None:
        start = time.perf_counter()
        forward(*args)
        self.stats.host_seconds -= time.perf_counter() - start

    # -- rows join -----------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Rows whose Future is there go on."""
        done = [x for x in self.waiting if x[0].done()]
        self.waiting = [x for x in self.waiting if x not in done]
        for future, row in done:
            self._go_on(row, future.result())

    def _refill(self) -> None:
        """Fills free rows, if they are worth a forward pass of prompts."""
        free = self.slots - len(self.rows)
        if self.rows and free * REFILL_SHARE < self.slots:
            return
        spans, copies, joining = [], [], []
        while len(joining) < free and (self.ready or self.queue and self._admit(spans, copies)):
            row = self.ready.popleft()
            if row.unread:
                spans.append(Span(row.pages, row.length, row.unread))
                row.length, row.unread = row.length + len(row.unread), []
            joining.append(row)
        for chunk in _chunks(spans, PREFILL_TOKENS.get(self.batch.device.type, PREFILL_TOKENS["cuda"])):
            self._timed(self._read, chunk)
        if copies:
            self._timed(self.pool.copy, *zip(*copies))
        for row in joining:
            self._join(row)
        if joining:
            self.batch.push()

    def _admit(self, spans: list[Span], copies: list[tuple[int, int]]) -> bool:
        """Takes a request off the queue if there are pages for all of it: its samples are ready once the spans are read and
        the pages copied."""
        request, pool, B = self.queue[0], self.pool, self.pool.page_size
        full, own = self.sampler.pages(request)
        tokens = np.array(request.prompt, np.int32).tobytes()
        keys = [tokens[: 4 * B * (i + 1)] for i in range(full)]
        found = pool.find(keys)
        n, revived = request.params.n, sum(not pool.users[page] for page in found)
        if full - len(found) + n * own > pool.spare - revived:
            return False
        self.queue.popleft()
        pool.use(found)
        shared = found + pool.take(full - len(found))
        for page, key in zip(shared[len(found):], keys[len(found):]):
            pool.remember(page, key)
        for _ in range(n - 1):
            pool.use(shared)
        rows = [_Row(request, k, shared + pool.take(own), request.prompt[-1], len(request.prompt) - 1) for k in range(n)]
        start, read = len(found) * B, len(request.prompt) - 1
        if read > start:
            spans.append(Span(rows[0].pages, start, request.prompt[start:read]))
        if read % B:
            copies += [(rows[0].pages[full], row.pages[full]) for row in rows[1:]]
        self.ready.extend(rows)
        self.stats.shared += start
        self.stats.peak_pages = max(self.stats.peak_pages, pool.in_use)
        return True

    def _read(self, spans: Sequence[Span]) -> None:
        """Fills pages with the keys and values of these tokens."""
        device = self.batch.device
        ids_N = torch.tensor([t for s in spans for t in s.tokens], device=device)
        positions_N = torch.cat([torch.arange(s.start, s.start + len(s.tokens)) for s in spans]).to(device)
        self.model(ids_N, positions_N, self.pool.extend(spans))
        self.stats.prefilled += len(ids_N)

    def _join(self, row: _Row) -> None:
        p = row.request.params
        row.record = self.records.pop()
        self.rows.append(row)
        self.batch.add(row.pages, p.stop_token_ids, token=row.last, length=row.length, drawn=len(row.tokens),
                       limit=p.max_new_tokens, seed=fold(p.seed, p.first + row.sample), temperature=p.temperature,
                       top_k=p.top_k, top_p=p.top_p, record=row.record)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _look(self, before_S: np.ndarray) -> None:
        """Takes what was drawn since the last look; rows that have stopped leave. before: tokens each row had then."""
        self.batch.pull()
        S, host, results = len(self.rows), self.batch.host, self.batch.results
        drawn_S, record_S = host["drawn"][:S], host["record"][:S]
        count_S, stopped_S = drawn_S - before_S, ~host["alive"][:S]
        for t in range(int(count_S.max())):
            rows = np.flatnonzero(count_S > t)
            for name, buffer in self.buffers.items():
                buffer[record_S[rows], before_S[rows] + t] = results[name][t, rows]
            if np.isnan(results["logprobs"][t, rows]).any():
                raise FloatingPointError("the model's logits are not finite; its weights hold NaN or infinity, or overflow")
        string_S = self._find_strings(before_S, drawn_S)
        count_S, stopped_S = drawn_S - before_S, stopped_S | string_S
        self._count(before_S, count_S)
        if self.on_token:
            for row, first, last in zip(self.rows, before_S.tolist(), drawn_S.tolist()):
                for token in self.buffers["tokens"][row.record, first:last].tolist():
                    self.on_token(row.request.index, row.sample, token)
        if stopped_S.any():
            left = [(self._leave(i), bool(string_S[i])) for i in np.flatnonzero(stopped_S)]
            keep = np.flatnonzero(~stopped_S)
            self.rows = [self.rows[i] for i in keep]
            self.batch.keep(keep)
            self.batch.push()
            for row, at_string in left:
                self._stop(row, at_string)

    def _find_strings(self, before_S: np.ndarray, drawn_S: np.ndarray) -> np.ndarray:
        """Which rows have come to the end of a stop string; what was drawn behind it is taken back."""
        of, found_S = {}, np.zeros(len(drawn_S), bool)
        for i, row in enumerate(self.rows):
            if row.request.params.stop_strings:
                of.setdefault(row.request.params.stop_strings, []).append(i)
        tokens, length_S = self.buffers["tokens"], self.batch.host["length"]
        for strings, rows in of.items():
            strings = self.sampler.stops[strings]
            for i in rows:
                line, start = tokens[self.rows[i].record], len(self.rows[i].tokens)
                for at in before_S[i] + np.flatnonzero(strings.may_end(line[before_S[i]: drawn_S[i]])):
                    if strings.end(line[start: at + 1].tolist()):
                        length_S[i] -= drawn_S[i] - (at + 1)
                        drawn_S[i], found_S[i] = at + 1, True
                        break
        return found_S

    def _count(self, before_S: np.ndarray, count_S: np.ndarray) -> None:
        self.stats.steps += int(count_S.max())
        self.stats.row_steps += int(count_S.sum())
        self.stats.sampled += int(count_S.sum())
        if (before_S == 0).any():
            now = time.perf_counter() - self.began
            for i in np.flatnonzero(before_S == 0):
                index = self.rows[i].request.index
                if math.isnan(self.stats.first_token_seconds[index]):
                    self.stats.first_token_seconds[index] = now

    # -- rows leave ----------------------------------------------------------------------------------------------------

    def _leave(self, i: int) -> _Row:
        """The batch's i-th row with all of its tokens; its place in the buffers is free again."""
        row = self.rows[i]
        new = slice(len(row.tokens), int(self.batch.host["drawn"][i]))
        for name, buffer in self.buffers.items():
            getattr(row, name).extend(buffer[row.record, new].tolist())
        row.last, row.length = row.tokens[-1], int(self.batch.host["length"][i])
        self.records.append(row.record)
        return row

    def _stop(self, row: _Row, at_string: bool) -> None:
        """Ends the row, unless on_stop has something to put in."""
        p = row.request.params
        if not at_string and row.last not in p.stop_token_ids:
            return self._end(row, "length")
        if not self.on_stop or len(row.tokens) >= p.max_new_tokens:
            return self._end(row, "stop")
        more = self.on_stop(row.request.index, row.sample, self._completion(row, "stop"))
        if isinstance(more, futures.Future):
            self.waiting.append((more, row))
        else:
            self._go_on(row, more)

    def _go_on(self, row: _Row, more: More) -> None:
        if more is None:
            return self._end(row, "stop")
        more = list(more)[: row.request.params.max_new_tokens - len(row.tokens)]
        row.unread = [row.last, *more][:-1]
        row.put_in.update(range(len(row.tokens), len(row.tokens) + len(more)))
        row.tokens += more
        row.logprobs += [0.0] * len(more)
        row.entropies += [0.0] * len(more)
        row.last = row.tokens[-1]
        if len(row.tokens) >= row.request.params.max_new_tokens:
            self._end(row, "length")
        else:
            self.ready.appendleft(row)

    def _end(self, row: _Row, reason: str) -> None:
        self.pool.drop(row.pages)
        group = self.results[row.request.index]
        group[row.sample] = self._completion(row, reason)
        if self.progress and None not in group:
            self.progress(1)

    def _completion(self, row: _Row, reason: str) -> Completion:
        tokenizer = self.sampler.tokenizer
        text = tokenizer.decode(row.tokens) if tokenizer else None
        sampled = tuple(i not in row.put_in for i in range(len(row.tokens))) if self.on_stop else None
        return Completion(tuple(row.tokens), tuple(row.logprobs), reason, text, sampled, tuple(row.entropies))


def _chunks(spans: Sequence[Span], most: int) -> Iterable[list[Span]]:
    """Consecutive spans of at most so many tokens together, or one that is longer."""
    chunk, tokens = [], 0
    for span in spans:
        if chunk and tokens + len(span.tokens) > most:
            yield chunk
            chunk, tokens = [], 0
        chunk.append(span)
        tokens += len(span.tokens)
    if chunk:
        yield chunk


def _free_bytes(device: torch.device) -> int:
    """Memory that could be allocated now."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    except OSError:  # not Linux
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
