"""How a request is sampled."""

from __future__ import annotations

from dataclasses import dataclass


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
