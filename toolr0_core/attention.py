"""Attention behind one signature: `attend(layer, q_NHE, k_NKE, v_NKE) -> out_NHE` over a flat stream of N tokens.

Shape suffixes: N packed tokens, S segments, Q / T padded query / key length, H query heads, K key heads, E head size.

The model never knows how its tokens are laid out: training passes a `PackedAttention`, the sampler one that keeps keys
and values. A packed stream is a list of segments. A segment attends causally to itself and, before that, to everything
in its prefix segment: with the prompt as the prefix of each of its completions, a prompt is computed once for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """Tokens start..start+length of the stream; prefix is (start, length) of the segment it continues, or None."""

    start: int
    length: int
    prefix: tuple[int, int] | None = None


@dataclass(frozen=True)
class _Block:
    """Segments of one kind, padded to a rectangle: indices into the stream and the mask of what a query may see."""

    query_SQ: Tensor
    key_ST: Tensor
    mask_S1QT: Tensor | None  # None where plain causal attention is right
    valid_SQ: Tensor
    slot_M: Tensor  # where the valid queries stand in the stream


class PackedAttention:
    """Scaled dot-product attention over packed segments, computed as few padded rectangles.

    Segments without a prefix are never padded to those with one, nor to a length that is more than a quarter greater.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device | str = "cpu"):
        plain = [s for s in segments if s.prefix is None]
        shared = [s for s in segments if s.prefix is not None]
        self.blocks = [_block(group, device) for group in (*_alike(plain), shared) if group]

    def __call__(self, layer: int, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor) -> Tensor:
        out_NHE = torch.zeros_like(q_NHE)
        for block in self.blocks:
            q_SHQE = q_NHE[block.query_SQ].transpose(1, 2)
            k_SKTE = k_NKE[block.key_ST].transpose(1, 2)
            v_SKTE = v_NKE[block.key_ST].transpose(1, 2)
            out_SHQE = F.scaled_dot_product_attention(
                q_SHQE, k_SKTE, v_SKTE, attn_mask=block.mask_S1QT, is_causal=block.mask_S1QT is None,
                enable_gqa=q_NHE.shape[1] != k_NKE.shape[1])
            out_NHE = out_NHE.index_copy(0, block.slot_M, out_SHQE.transpose(1, 2)[block.valid_SQ])
        return out_NHE


def _alike(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Groups whose shortest segment has at least four fifths of the length of the longest."""
    groups: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda s: s.length, reverse=True):
        if not groups or segment.length < 0.8 * groups[-1][0].length:
            groups.append([])
        groups[-1].append(segment)
    return groups


def _block(segments: Sequence[Segment], device: torch.device | str) -> _Block:
    start_S1 = torch.tensor([[s.start] for s in segments])
    length_S1 = torch.tensor([[s.length] for s in segments])
    prefix_start_S1 = torch.tensor([[s.prefix[0] if s.prefix else 0] for s in segments])
    prefix_S1 = torch.tensor([[s.prefix[1] if s.prefix else 0] for s in segments])

    q_1Q = torch.arange(int(length_S1.max()))[None]
    valid_SQ = q_1Q < length_S1
    query_SQ = torch.where(valid_SQ, start_S1 + q_1Q, start_S1)  # padded queries repeat a real token

    t_1T = torch.arange(int((prefix_S1 + length_S1).max()))[None]
    own_ST = start_S1 + t_1T - prefix_S1
    key_ST = torch.where(t_1T < prefix_S1, prefix_start_S1 + t_1T, own_ST)
    key_ST = torch.where(t_1T < prefix_S1 + length_S1, key_ST, start_S1)

    mask_S1QT = None
    if bool(prefix_S1.any()):
        mask_S1QT = (t_1T[:, None] <= (prefix_S1 + q_1Q)[:, :, None])[:, None]  # row q sees the prefix and itself
    return _Block(query_SQ.to(device), key_ST.to(device), None if mask_S1QT is None else mask_S1QT.to(device),
                  valid_SQ.to(device), query_SQ[valid_SQ].to(device))


def batch_attention(batch: int, length: int, device: torch.device | str = "cpu") -> PackedAttention:
    """Attention of a plain batch of equal lengths, flattened to batch * length tokens."""
    return PackedAttention([Segment(b * length, length) for b in range(batch)], device)
