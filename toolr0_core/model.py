"""One decoder for Qwen2/2.5, Qwen3, Llama 3.x and SmolLM2, the same code for sampler and trainer.

Shape suffixes: B sequences, T time, N packed tokens, D hidden, H query heads, K key/value heads, E head size,
F half of it (rotary pairs), V vocabulary.

Tokens come as one flat stream with their positions; `attend` says who sees whom (attention.py), so a padded batch, a
packed training row and a decoding step with a cache run through the same lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from toolr0_kernels import add_rms_norm, linear, rms_norm, rope, swiglu
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from toolr0_core.attention import batch_attention

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ModelConfig:
    """Architecture, in the words of Hugging Face's config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = field(default=None)  # Llama 3's four numbers, or None
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 32768


class Linear(nn.Linear):
    """x @ weight.T + bias."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight; the mean in fp32, as in every model of these families."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Inverse wavelengths [E/2] in fp32, with Llama 3's scaling of the low frequencies where the config asks for it."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    freq = 1.0 / (config.rope_theta ** exponent)
    if not config.rope_scaling:
        return freq
    s = config.rope_scaling
    low, high, original = s["low_freq_factor"], s["high_freq_factor"], s["original_max_position_embeddings"]
    wavelength = 2 * math.pi / freq
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * freq / s["factor"] + smooth * freq


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def forward(self, x_ND: Tensor, cos_NF: Tensor, sin_NF: Tensor, attend: Attend) -> Tensor:
        q_NHE = self.q_proj(x_ND).unflatten(-1, (-1, self.head_dim))
        k_NKE = self.k_proj(x_ND).unflatten(-1, (-1, self.head_dim))
        v_NKE = self.v_proj(x_ND).unflatten(-1, (-1, self.head_dim))
        if self.qk_norm:
            q_NHE, k_NKE = self.q_norm(q_NHE), self.k_norm(k_NKE)
        q_NHE, k_NKE = rope(q_NHE, k_NKE, cos_NF, sin_NF)
        return self.o_proj(attend(self.layer, q_NHE, k_NKE, v_NKE).flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_ND: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x_ND), self.up_proj(x_ND)))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_ND: Tensor, cos_NF: Tensor, sin_NF: Tensor, attend: Attend) -> Tensor:
        attended_ND = self.self_attn(self.input_layernorm(x_ND), cos_NF, sin_NF, attend)
        norm = self.post_attention_layernorm
        normed_ND, x_ND = add_rms_norm(attended_ND, x_ND, norm.weight, norm.eps)
        return x_ND + self.mlp(normed_ND)


class Model(nn.Module):
    """The decoder. Parameter names are Hugging Face's without the leading "model."; a tied head is no parameter."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.recompute = False  # activation checkpointing: a layer's activations are computed again in the backward pass
        self.frequencies: dict[torch.device, Tensor] = {}  # no buffer: fp32 whatever the parameters become
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix [V, D]: the embedding itself where the two are tied."""
        return self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def forward(self, ids_N: Tensor, positions_N: Tensor, attend: Attend,
                head: Callable[[Tensor, Tensor], Any] | None = None) -> Any:
        """Final hidden states [N, D], or head(hidden_ND, head_weight_VD) where a head is given.

        Head and loss belong inside this call so that FSDP has the root's parameters gathered when they run.
        """
        x_ND = self.embed_tokens(ids_N)
        cos_NF, sin_NF = self.rotary(positions_N)
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x_ND = checkpoint(layer, x_ND, cos_NF, sin_NF, attend, use_reentrant=False)
            else:
                x_ND = layer(x_ND, cos_NF, sin_NF, attend)
        hidden_ND = self.norm(x_ND)
        return hidden_ND if head is None else head(hidden_ND, self.head_weight)

    def rotary(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [N, E/2] of these positions, in fp32 whatever the model's dtype."""
        device = positions_N.device
        if device not in self.frequencies:
            self.frequencies[device] = rope_frequencies(self.config).to(device)
        angle_NF = positions_N.float()[:, None] * self.frequencies[device]
        return angle_NF.cos(), angle_NF.sin()

    def logits(self, ids_BT: Tensor) -> Tensor:
        """Logits [B, T, V] of a batch of equal lengths: the plain forward pass, for tests and readers."""
        B, T = ids_BT.shape
        positions_N = torch.arange(T, device=ids_BT.device).repeat(B)
        attend = batch_attention(B, T, ids_BT.device)
        return self(ids_BT.flatten(), positions_N, attend, F.linear).unflatten(0, (B, T))


def load(path_or_preset: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Model:
    """The model of a Hugging Face directory or of a preset's name (weights.py); dtype None keeps the file's."""
    from toolr0_core.weights import load_model

    return load_model(path_or_preset, device, dtype)
