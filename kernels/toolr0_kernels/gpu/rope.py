"""Rotary embeddings of queries and keys on a GPU, both in one launch, forward and backward.

Formula. The pair (a, b) of numbers i and i + E/2 of a head turns by the angle t of its token and i:

    a' = a cos t - b sin t     b' = b cos t + a sin t

The gradient turns back: the same kernel with -sin. Angles come as tables of cos and sin in fp32, [N, E/2], made once for all
layers (so Llama 3's scaling of frequencies is in them), and are read by every head of a token from the L1 cache.

Traffic. Every number of q and k is read once and written once, and the tables once. One program is one token: its heads are
a tile [heads, E/2], and both halves of a pair are in the same thread. Inputs may be strided views of a fused projection.

Shape suffixes: N tokens, H query heads, K key heads, E head size, F = E/2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from toolr0_kernels.gpu.variants import Variant, aligned


@triton.jit
def _rotate(x_ptr, out_ptr, stride_head, H, F, cos_F, sin_F, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr):
    """All heads of one token; out is contiguous."""
    head_H, col_F = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_F)
    mask_HF = (head_H[:, None] < H) & (col_F[None, :] < F)
    from_HF = head_H[:, None] * stride_head + col_F[None, :]
    a_HF = tl.load(x_ptr + from_HF, mask=mask_HF, other=0.0).to(tl.float32)
    b_HF = tl.load(x_ptr + from_HF + F, mask=mask_HF, other=0.0).to(tl.float32)
    to_HF = head_H[:, None] * (2 * F) + col_F[None, :]
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + to_HF, (a_HF * cos_F[None, :] - b_HF * sin_F[None, :]).to(dtype), mask=mask_HF)
    tl.store(out_ptr + to_HF + F, (b_HF * cos_F[None, :] + a_HF * sin_F[None, :]).to(dtype), mask=mask_HF)


@triton.jit
def _rope_kernel(q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, H, K, F, q_token, q_head, k_token, k_head,
                 BACK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_F: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    col_F = tl.arange(0, BLOCK_F)
    cos_F = tl.load(cos_ptr + token * F + col_F, mask=col_F < F, other=0.0)
    sin_F = tl.load(sin_ptr + token * F + col_F, mask=col_F < F, other=0.0)
    if BACK:
        sin_F = -sin_F
    _rotate(q_ptr + token * q_token, q_out_ptr + token * H * 2 * F, q_head, H, F, cos_F, sin_F, BLOCK_H, BLOCK_F)
    _rotate(k_ptr + token * k_token, k_out_ptr + token * K * 2 * F, k_head, K, F, cos_F, sin_F, BLOCK_K, BLOCK_F)


def blocks(H: int, K: int, F: int) -> tuple[dict[str, int], int]:
    """Block sizes and warps: four numbers or more a thread."""
    sizes = dict(BLOCK_H=triton.next_power_of_2(H), BLOCK_K=triton.next_power_of_2(K), BLOCK_F=triton.next_power_of_2(F))
    return sizes, max(1, min(8, sizes["BLOCK_H"] * sizes["BLOCK_F"] // 128))


def _launch(q_NHE: Tensor, k_NKE: Tensor, cos_NF: Tensor, sin_NF: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    q_NHE, k_NKE = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_NHE, k_NKE))
    (N, H, E), K = q_NHE.shape, k_NKE.shape[1]
    out = torch.empty(q_NHE.shape, dtype=q_NHE.dtype, device=q_NHE.device), \
        torch.empty(k_NKE.shape, dtype=k_NKE.dtype, device=k_NKE.device)
    sizes, warps = blocks(H, K, E // 2)
    if N:
        _rope_kernel[(N,)](q_NHE, k_NKE, cos_NF, sin_NF, *out, H, K, E // 2, q_NHE.stride(0), q_NHE.stride(1), k_NKE.stride(0),
                           k_NKE.stride(1), back, **sizes, num_warps=warps)
    return out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_NHE: Tensor, k_NKE: Tensor, cos_NF: Tensor, sin_NF: Tensor):
        ctx.save_for_backward(cos_NF, sin_NF)
        return _launch(q_NHE, k_NKE, cos_NF, sin_NF, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq_NHE: Tensor, dk_NKE: Tensor):
        return *_launch(dq_NHE, dk_NKE, *ctx.saved_tensors, back=True), None, None


def rope(q_NHE: Tensor, k_NKE: Tensor, cos_NF: Tensor, sin_NF: Tensor) -> tuple[Tensor, Tensor]:
    return _Rope.apply(q_NHE, k_NKE, cos_NF.float().contiguous(), sin_NF.float().contiguous())


def variants() -> list[Variant]:
    heads = {"Qwen2.5-0.5B": (14, 2, 64), "Qwen2.5-1.5B": (12, 2, 128), "SmolLM2": (9, 3, 64), "Llama-3.2-3B": (24, 8, 128)}
    return [_variant(dtype, model, *shape, back) for dtype in ("bf16", "fp32") for model, shape in heads.items()
            for back in (False, True)]


def _variant(dtype: str, model: str, H: int, K: int, E: int, back: bool, N: int = 16384) -> Variant:
    (sizes, warps), size = blocks(H, K, E // 2), 2 if dtype == "bf16" else 4
    names = ("q_ptr", "k_ptr", "cos_ptr", "sin_ptr", "q_out_ptr", "k_out_ptr")
    signature = {name: "*fp32" if name in ("cos_ptr", "sin_ptr") else f"*{dtype}" for name in names}
    signature |= {name: "i32" for name in ("H", "K", "F", "q_token", "q_head", "k_token", "k_head")}
    signature |= dict.fromkeys(("BACK", *sizes), "constexpr")
    moved = N * (2 * (H + K) * E * size + 2 * (E // 2) * 4)
    return Variant(f"rope {'backward' if back else 'forward'}, {dtype}, {model}", _rope_kernel, signature,
                   dict(BACK=back, **sizes), aligned(*range(6), *range(8, 13)), warps, moved=moved, minimum=moved,
                   shape=f"{N} tokens, {H} and {K} heads of {E}")
