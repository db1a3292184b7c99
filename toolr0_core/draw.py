"""How the next tokens are drawn: temperature, top-k, top-p, and one counter-based uniform a token.

Shape suffixes: S running sequences (rows), D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolr0_kernels import linear_sample, sample
from toolr0_kernels.chunked import product
from torch import Tensor


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


def draw(hidden_SD: Tensor, weight_VD: Tensor, seed_S: Tensor, drawn_S: Tensor, temperature_S: Tensor,
         top_k_S: Tensor | None = None, top_p_S: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The next token of every row, its log-prob and the entropy of the distribution it is drawn from (temperature 0: greedy).

    Inverse CDF with one counter-based uniform each, named by the seed and by how many tokens the row has drawn. top_k and
    top_p are None where no row truncates: then a GPU needs no logits in memory. Logits are fp32: rounded to bf16 they would
    cost up to 0.02 nats a token.
    """
    if top_k_S is None:
        return linear_sample(hidden_SD, weight_VD, seed_S, drawn_S, temperature_S)
    return sample(product(hidden_SD, weight_VD.T), seed_S, drawn_S, temperature_S, top_k_S, top_p_S)
