"""Keys and values of one wave of sampling: each prompt's once, each sample's own behind it.

Shape suffixes: R requests, n samples per request, P padded prompt length, T padded suffix length, K key/value heads,
G query heads per key head, E head size, N packed tokens.

The samples of a request read the same prompt keys in one matrix product; their own keys are a second one, and one softmax
runs over both. Rectangles all the way: a request whose samples have all finished is dropped by `keep`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolr0_core.attention import PackedAttention, Segment
from toolr0_core.model import ModelConfig


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Memory of one token's keys and values over all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize


class KVCache:
    """Filled by `prefill` (an `attend` for the packed prompts), then read and extended by `decode` (one for each step)."""

    def __init__(self, config: ModelConfig, prompt_lengths: list[int], n: int, new_tokens: int, device, dtype):
        self.config, self.n, self.lengths = config, n, prompt_lengths
        R, P, K, E = len(prompt_lengths), max(prompt_lengths), config.num_key_value_heads, config.head_dim
        layers = range(config.num_hidden_layers)
        self.prompt_k = [torch.zeros(R, K, P, E, device=device, dtype=dtype) for _ in layers]
        self.prompt_v = [torch.zeros(R, K, P, E, device=device, dtype=dtype) for _ in layers]
        self.k = [torch.empty(R * n, K, new_tokens, E, device=device, dtype=dtype) for _ in layers]
        self.v = [torch.empty(R * n, K, new_tokens, E, device=device, dtype=dtype) for _ in layers]
        length_R1 = torch.tensor(prompt_lengths, device=device)[:, None]
        valid_RP = torch.arange(P, device=device)[None] < length_R1
        self.slots_N = valid_RP.flatten().nonzero()[:, 0]
        self.bias_R11P = torch.zeros(R, 1, 1, P, device=device).masked_fill_(~valid_RP[:, None, None], -torch.inf)
        starts = [0]
        for length in prompt_lengths:
            starts.append(starts[-1] + length)
        self.packed = PackedAttention([Segment(s, n) for s, n in zip(starts, prompt_lengths)], device)
        self.step = 0

    def prefill(self, layer: int, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor) -> Tensor:
        for cache, new in ((self.prompt_k, k_NKE), (self.prompt_v, v_NKE)):
            R, K, P, E = cache[layer].shape
            rows = torch.zeros(R * P, K, E, device=new.device, dtype=new.dtype).index_copy_(0, self.slots_N, new)
            cache[layer] = rows.view(R, P, K, E).transpose(1, 2).contiguous()
        return self.packed(layer, q_NHE, k_NKE, v_NKE)

    def decode(self, layer: int, q_SHE: Tensor, k_SKE: Tensor, v_SKE: Tensor) -> Tensor:
        """One new token for each of the S = R * n sequences."""
        n, t = self.n, self.step + 1
        S, H, E = q_SHE.shape
        R, K, P, _ = self.prompt_k[layer].shape
        G = H // K
        self.k[layer][:, :, self.step], self.v[layer][:, :, self.step] = k_SKE, v_SKE
        q_SKGE = (q_SHE * E ** -0.5).view(S, K, G, E)
        q_RKxE = q_SKGE.view(R, n, K, G, E).transpose(1, 2).reshape(R, K, n * G, E)
        shared = (q_RKxE @ self.prompt_k[layer].transpose(-1, -2)).float() + self.bias_R11P
        shared = shared.view(R, K, n, G, P).transpose(1, 2).reshape(S, K, G, P)
        own = (q_SKGE @ self.k[layer][:, :, :t].transpose(-1, -2)).float()
        weights = torch.cat((shared, own), -1).softmax(-1).to(q_SHE.dtype)
        w_RKxP = weights[..., :P].view(R, n, K, G, P).transpose(1, 2).reshape(R, K, n * G, P)
        out = (w_RKxP @ self.prompt_v[layer]).view(R, K, n, G, E).transpose(1, 2).reshape(S, K, G, E)
        return (out + weights[..., P:] @ self.v[layer][:, :, :t]).reshape(S, H, E)

    def keep(self, request_R: Tensor) -> None:
        """Drops all but these requests (indices into the present ones)."""
        sequences = (request_R[:, None] * self.n + torch.arange(self.n, device=request_R.device)).flatten()
        self.bias_R11P = self.bias_R11P[request_R]
        for cache in (self.prompt_k, self.prompt_v):
            cache[:] = [x[request_R] for x in cache]
        for cache in (self.k, self.v):
            cache[:] = [torch.cat((x[sequences, :, :self.step], x.new_empty(len(sequences), *x[0, :, self.step:].shape)), 2)
                        for x in cache]
