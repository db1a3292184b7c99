"""How the next tokens are drawn: temperature, top-k, top-p, and one counter-based uniform a token.

Shape suffixes: S running sequences (rows), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toolr0_core.rng import fold, uniform


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
                               ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
                               ("stop_strings", "" not in self.stop_strings, "without an empty string")):
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)}; it has to be {rule}")


@dataclass
class Settings:
    """What a draw needs to know of every row, on the device; `greedy` and `truncates`: whether any row is or does."""

    seed_S: Tensor
    drawn_S: Tensor  # tokens so far
    prompt_S: Tensor  # length of the prompt
    temperature_S: Tensor  # 1 for greedy rows
    greedy_S: Tensor
    top_k_S: Tensor
    top_p_S: Tensor
    greedy: bool
    truncates: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], samples: Iterable[int], drawn: Iterable[int], prompts: Iterable[int],
           device: torch.device | str) -> Settings:
        """One entry a row in each: its request's params, which sample it is, its tokens so far, its prompt's length."""
        greedy = [p.temperature == 0 for p in params]

        def tensor(values: Iterable, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.tensor(list(values), dtype=dtype, device=device)
        return cls(tensor(fold(p.seed, k) for p, k in zip(params, samples)), tensor(drawn), tensor(prompts),
                   tensor((p.temperature or 1 for p in params), torch.float32),
                   tensor(greedy, torch.bool), tensor(0 if p.temperature == 0 else p.top_k for p in params),
                   tensor((1 if p.temperature == 0 else p.top_p for p in params), torch.float32), any(greedy),
                   any(p.temperature > 0 and (p.top_k or p.top_p < 1) for p in params))


def draw(logits_SV: Tensor, s: Settings) -> tuple[Tensor, Tensor]:
    """The next token of every row and its log-prob; inverse CDF with one counter-based uniform each."""
    p_SV = (logits_SV / s.temperature_S[:, None]).softmax(-1)
    if s.truncates:
        p_SV = truncate(p_SV.log(), s.top_k_S, s.top_p_S).exp()
    cdf_SV = p_SV.cumsum(-1, dtype=torch.float64)
    u_S1 = (uniform(s.seed_S, s.drawn_S) * cdf_SV[:, -1])[:, None]
    token_S1 = torch.searchsorted(cdf_SV, u_S1, right=True).clamp_(max=p_SV.shape[1] - 1)  # out of range only for NaN
    if s.greedy:
        token_S1 = torch.where(s.greedy_S[:, None], logits_SV.argmax(-1, keepdim=True), token_S1)
    return token_S1[:, 0], p_SV.gather(1, token_S1).log()[:, 0]


def truncate(logp_SV: Tensor, top_k_S: Tensor, top_p_S: Tensor) -> Tensor:
    """Log-probs renormalised over the top k (0: all), then over the smallest set whose mass reaches top_p."""
    ordered, index = logp_SV.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logp_SV.shape[1], device=logp_SV.device)
    keep = (rank < top_k_S[:, None]) | (top_k_S[:, None] == 0)
    ordered = ordered.masked_fill(~keep, -torch.inf).log_softmax(-1)
    mass = ordered.exp()
    keep &= ((mass.cumsum(-1) - mass) < top_p_S[:, None]) | (top_p_S[:, None] >= 1)  # 1 is off, whatever the rounding
    ordered = ordered.masked_fill(~keep, -torch.inf).log_softmax(-1)
    return torch.empty_like(logp_SV).scatter_(1, index, ordered)
