"""How the next tokens are drawn: temperature, top-k, top-p, and one counter-based uniform a token.

Shape suffixes: S running sequences (rows), D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from toolr0_kernels import linear_sample, sample
from torch import Tensor

from toolr0_core.kv_cache import matmul_fp32
from toolr0_core.rng import fold


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
    """What a draw needs to know of every row, on the device."""

    seed_S: Tensor
    drawn_S: Tensor  # tokens so far
    prompt_S: Tensor  # length of the prompt
    temperature_S: Tensor  # 0: greedy
    top_k_S: Tensor | None  # None where no row truncates
    top_p_S: Tensor | None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], samples: Iterable[int], drawn: Iterable[int], prompts: Iterable[int],
           device: torch.device | str) -> Settings:
        """One entry a row in each: its request's params, which sample it is, its tokens so far, its prompt's length."""
        def tensor(values: Iterable, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.tensor(list(values), dtype=dtype, device=device)

        truncates = any(p.temperature > 0 and (p.top_k or p.top_p < 1) for p in params)
        return cls(tensor(fold(p.seed, k) for p, k in zip(params, samples)), tensor(drawn), tensor(prompts),
                   tensor((p.temperature for p in params), torch.float32),
                   tensor(p.top_k for p in params) if truncates else None,
                   tensor((p.top_p for p in params), torch.float32) if truncates else None)


def draw(logits_SV: Tensor, s: Settings) -> tuple[Tensor, Tensor]:
    """The next token of every row and its log-prob; inverse CDF with one counter-based uniform each."""
    return sample(logits_SV, s.seed_S, s.drawn_S, s.temperature_S, s.top_k_S, s.top_p_S)[:2]


def draw_from_hidden(hidden_SD: Tensor, weight_VD: Tensor, s: Settings) -> tuple[Tensor, Tensor]:
    """The same of final hidden states and the head's matrix, on a GPU without logits in memory where no row truncates."""
    if s.top_k_S is not None:
        return draw(head(hidden_SD, weight_VD), s)
    return linear_sample(hidden_SD, weight_VD, s.seed_S, s.drawn_S, s.temperature_S)[:2]


def head(hidden_SD: Tensor, weight_VD: Tensor) -> Tensor:
    """Logits [S, V] in fp32: rounded to bf16 they would cost up to 0.02 nats a token."""
    return matmul_fp32(hidden_SD, weight_VD.T)
