"""Batched sampling with a KV cache: every prompt is read once for all of its samples, sequences stop when they like.

Shape suffixes: R requests, S = R * n sequences, D hidden, V vocabulary.

A draw depends on (seed, sample, position) alone, so tokens do not depend on what else is in the batch. Requests run in
waves of at most `max_sequences` sequences, longest prompts first; inside a wave, requests that are done are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from toolr0_core.kv_cache import KVCache, bytes_per_token
from toolr0_core.model import Model
from toolr0_core.rng import fold, uniform
from toolr0_core.schema import Completion


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. temperature 0 is greedy; top_k 0 and top_p 1 are off; seed names the stream."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self):
        for name, ok, rule in (("n", self.n >= 1, "at least 1"), ("temperature", self.temperature >= 0, "0 or more"),
                               ("top_p", 0 < self.top_p <= 1, "in (0, 1]"), ("top_k", self.top_k >= 0, "0 or more"),
                               ("max_new_tokens", self.max_new_tokens >= 1, "at least 1")):
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)}; it has to be {rule}")


@dataclass(frozen=True)
class _Request:
    index: int
    prompt: list[int]
    params: SamplingParams


class Sampler:
    """Samples from `model` as its weights are at each call of generate; nothing is cached between calls."""

    def __init__(self, model: Model, tokenizer=None, kv_gib: float | None = None, max_sequences: int | None = None):
        self.model, self.tokenizer = model, tokenizer
        self.kv_gib, self.max_sequences = kv_gib, max_sequences or 256

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams],
                 progress: Callable[[int], None] | None = None) -> list[list[Completion]]:
        """n completions of each prompt, in request order. One params for all has its seed folded with the index.

        Raises ValueError for an empty prompt or a request that cannot fit in kv_gib at its full length.
        """
        if isinstance(params, SamplingParams):
            params = [replace(params, seed=fold(params.seed, i)) for i in range(len(prompts))]
        requests = [_Request(i, list(p), s) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]
        results: list[list[Completion]] = [[] for _ in requests]
        for wave in self._waves(requests):
            for request, completions in zip(wave, _Wave(self, wave).run()):
                results[request.index] = completions
            if progress:
                progress(len(wave))
        return results

    def _waves(self, requests: list[_Request]) -> list[list[_Request]]:
        """Like with like: by samples, then by prompt length, as many together as sequences and memory allow."""
        waves: list[list[_Request]] = []
        for request in sorted(requests, key=lambda r: (r.params.n, len(r.prompt), r.params.max_new_tokens), reverse=True):
            if not request.prompt:
                raise ValueError(f"request {request.index} has an empty prompt; it needs at least one token")
            if self._kv_bytes([request]) > self._budget():
                raise ValueError(
                    f"request {request.index}: a prompt of {len(request.prompt)} tokens and {request.params.n} x "
                    f"{request.params.max_new_tokens} new ones need {self._kv_bytes([request]) / 2**30:.3f} GiB of keys and "
                    f"values, more than the {self._budget() / 2**30:.3f} GiB of sampler.kv_gib; raise it or ask for less")
            fits = waves and (sum(r.params.n for r in waves[-1]) + request.params.n <= self.max_sequences
                              and self._kv_bytes([*waves[-1], request]) <= self._budget())
            if fits:
                waves[-1].append(request)
            else:
                waves.append([request])
        return waves

    def _budget(self) -> float:
        return self.kv_gib * 2**30 if self.kv_gib else float("inf")

    def _kv_bytes(self, wave: list[_Request]) -> int:
        """Rectangles, as KVCache allocates them."""
        n, prompt = max(r.params.n for r in wave), max(len(r.prompt) for r in wave)
        tokens = len(wave) * (prompt + n * max(r.params.max_new_tokens for r in wave))
        return tokens * bytes_per_token(self.model.config, self.model.embed_tokens.weight.dtype)


class _Wave:
    """Requests that run together; sequence s belongs to request s // n and is its sample s % n."""

    def __init__(self, sampler: Sampler, requests: list[_Request]):
        self.model, self.tokenizer, self.requests = sampler.model, sampler.tokenizer, requests
        self.n = max(r.params.n for r in requests)
        self.device = self.model.embed_tokens.weight.device
        rows = [r.params for r in requests for _ in range(self.n)]
        sample = [k for _ in requests for k in range(self.n)]
        tensor = lambda values, dtype=None: torch.tensor(values, device=self.device, dtype=dtype)  # noqa: E731
        self.seed_S = tensor([fold(p.seed, k) for p, k in zip(rows, sample)])
        self.temperature_S = tensor([p.temperature for p in rows], torch.float32)
        self.top_k_S, self.top_p_S = tensor([p.top_k for p in rows]), tensor([p.top_p for p in rows], torch.float32)
        self.limit_S = tensor([p.max_new_tokens for p in rows])
        self.truncates = any(p.top_k or p.top_p < 1 for p in rows)
        self.greedy = any(p.temperature == 0 for p in rows)
        width = max(1, max(len(p.stop_token_ids) for p in rows))
        self.stop_SW = tensor([[*p.stop_token_ids, *[-1] * (width - len(p.stop_token_ids))] for p in rows])
        self.strings = any(p.stop_strings for p in rows)
        self.done_S = tensor([k >= r.params.n for r in requests for k in range(self.n)])
        self.alive_S = torch.arange(len(rows), device=self.device)  # which sequence each running row is

    def run(self) -> list[list[Completion]]:
        steps = int(self.limit_S.max())
        lengths = [len(r.prompt) for r in self.requests]
        cache = KVCache(self.model.config, lengths, self.n, steps, self.device, self.model.embed_tokens.weight.dtype)
        S = len(self.seed_S)
        self.tokens_ST = torch.zeros(S, steps, dtype=torch.long, device=self.device)
        self.logp_ST = torch.zeros(S, steps, device=self.device)
        self.length_S = torch.zeros(S, dtype=torch.long, device=self.device)
        self.stopped_S = torch.zeros(S, dtype=torch.bool, device=self.device)
        position_S = torch.tensor(lengths, device=self.device).repeat_interleave(self.n)
        logits = self._prefill(cache, lengths)
        for t in range(steps):
            token = self._draw(logits, t)
            if self._finish(token, t) or t + 1 == steps:
                break
            row = self._compact(cache)
            if row is not None:
                token, position_S = token[row], position_S[row]
            logits = self.model(token, position_S + t, cache.decode, F.linear)
            cache.step += 1
        return self._completions()

    def _prefill(self, cache: KVCache, lengths: list[int]) -> Tensor:
        ids = torch.tensor([t for r in self.requests for t in r.prompt], device=self.device)
        positions = torch.cat([torch.arange(length, device=self.device) for length in lengths])
        last = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        logits = self.model(ids, positions, cache.prefill, lambda hidden, weight: F.linear(hidden[last], weight))
        return logits.repeat_interleave(self.n, 0)

    def _draw(self, logits_SV: Tensor, t: int) -> Tensor:
        """The next token of every running row; inverse CDF with one counter-based uniform each."""
        rows = self.alive_S
        temperature = self.temperature_S[rows]
        hot = torch.where(temperature > 0, temperature, 1.0)
        logp = (logits_SV.float() / hot[:, None]).log_softmax(-1)
        if self.truncates:
            logp = truncate(logp, self.top_k_S[rows], self.top_p_S[rows])
        cdf = logp.exp().cumsum(-1)
        u = uniform(self.seed_S[rows], torch.full_like(rows, t)) * cdf[:, -1]
        token = torch.searchsorted(cdf, u[:, None], right=True)[:, 0].clamp_(max=logp.shape[1] - 1)
        if self.greedy:
            token = torch.where(temperature > 0, token, logits_SV.argmax(-1))
        self.tokens_ST[rows, t] = token
        self.logp_ST[rows, t] = logp.gather(1, token[:, None])[:, 0]
        return token

    def _finish(self, token: Tensor, t: int) -> bool:
        """Marks what ends with this token; True where nothing runs any more."""
        rows = self.alive_S
        running = ~self.done_S[rows]
        self.length_S[rows[running]] = t + 1
        stop = (self.stop_SW[rows] == token[:, None]).any(-1)
        if self.strings:
            stop |= self._at_stop_string(rows, running, t)
        self.stopped_S[rows] |= stop & running
        self.done_S[rows] |= stop | (self.limit_S[rows] <= t + 1)
        return bool(self.done_S[rows].all())

    def _at_stop_string(self, rows: Tensor, running: Tensor, t: int) -> Tensor:
        """Looks for stop strings in the text of the last tokens; a string of c characters is at most c tokens and a half
        decoded one long, so a window of that many tokens cannot miss one that ends here."""
        found = []
        for s, run in zip(rows.tolist(), running.tolist()):
            strings = self.requests[s // self.n].params.stop_strings if run else ()
            window = max((len(x.encode()) for x in strings), default=0) + 4
            text = self.tokenizer.decode(self.tokens_ST[s, max(0, t + 1 - window): t + 1].tolist()) if strings else ""
            found.append(any(x in text for x in strings))
        return torch.tensor(found, device=self.device)

    def _compact(self, cache: KVCache) -> Tensor | None:
        """Once a quarter of the running requests is done, drops them; the rows that stay, or None."""
        done_R = self.done_S[self.alive_S].view(-1, self.n).all(-1)
        if done_R.sum() * 4 < len(done_R):
            return None
        request = (~done_R).nonzero()[:, 0]
        cache.keep(request)
        row = (request[:, None] * self.n + torch.arange(self.n, device=self.device)).flatten()
        self.alive_S = self.alive_S[row]
        return row

    def _completions(self) -> list[list[Completion]]:
        tokens, logp = self.tokens_ST.tolist(), self.logp_ST.tolist()
        lengths, stopped = self.length_S.tolist(), self.stopped_S.tolist()
        out = []
        for r, request in enumerate(self.requests):
            group = []
            for s in range(r * self.n, r * self.n + request.params.n):
                ids = tokens[s][: lengths[s]]
                text = self.tokenizer.decode(ids) if self.tokenizer else None
                group.append(Completion(tuple(ids), tuple(logp[s][: lengths[s]]), "stop" if stopped[s] else "length", text))
            out.append(group)
        return out


def truncate(logp_SV: Tensor, top_k_S: Tensor, top_p_S: Tensor) -> Tensor:
    """Log-probs renormalised over the top k (0: all), then over the smallest set whose mass reaches top_p."""
    ordered, index = logp_SV.sort(dim=-1, descending=True)
    rank = torch.arange(logp_SV.shape[1], device=logp_SV.device)
    keep = (rank < top_k_S[:, None]) | (top_k_S[:, None] == 0)
    ordered = ordered.masked_fill(~keep, -torch.inf).log_softmax(-1)
    mass = ordered.exp()
    keep &= (mass.cumsum(-1) - mass) < top_p_S[:, None]
    ordered = ordered.masked_fill(~keep, -torch.inf).log_softmax(-1)
    return torch.empty_like(logp_SV).scatter_(1, index, ordered)
