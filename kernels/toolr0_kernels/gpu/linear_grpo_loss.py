"""linear_grpo_loss on a GPU: GRPO's loss of a linear head and its gradients, with the logits of one chunk of rows in memory.

Formula (grpo.token_loss is the definition). With logp and entropy as in linear_logprob.py, A the advantage, r = e^(logp - old)
(1 where old is not given), w the importance weight, d = ref - logp:

    loss = -min(r A, clip(r) A) w + beta (e^d - d - 1)
    slope = d loss / d logp = (0 where clipped, else -r A w) + (beta (1 - e^d) where |d| <= 20, else 0)
    d loss / d x = slope (1[target] - softmax(x / T)) / T

Clipped: r above its bound with A > 0, or below it with A < 0. On-policy the loss is -A and its slope is -A all the same.

Why the gradients are formed in the forward. The weight of every token in the final sum is known before it, so a row's loss,
slope and dlogits follow from the row's logits while those are at hand: three matrix products (logits, dX, dW) and no second
computation of the logits, against four with a backward of its own. The backward only multiplies by the upstream gradient.

Traffic per chunk (rows.py): logits written by the product, read twice by the row kernel (once from memory, in part from the
L2 cache the second time), dlogits written once and read by two products. One program is one row: the slope needs the whole
row's sum before the first gradient, and a row is enough work for a multiprocessor. Rows of weight 0 are sorted out before:
they get their statistics from the fused scoring kernel and take no part in the products, so that 0 times NaN cannot happen.

In fp16, dlogits are held at a scale where the largest weight is near 1 (token weights are about 1e-5, and fp16 ends at 6e-8);
a slope beyond 65504, which takes ref - logp > 11, is infinite there and so are the gradients. bf16 has no such bounds.

Shape suffixes: N rows, L rows of weight other than 0, D hidden, V vocabulary, K the rows of GIVEN or RESULTS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolr0_kernels import chunked
from toolr0_kernels.chunked import GIVEN, RESULTS
from toolr0_kernels.gpu import rows
from toolr0_kernels.gpu.linear_logprob import score
from toolr0_kernels.gpu.rows import LN2, LOG2E, TWICE, gradient_of, row_block, row_sums, write_dlogits
from toolr0_kernels.gpu.variants import Variant, aligned

ALL_NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["N", "has_old", "has_ref"])
def _loss_kernel(logits_ptr, out_ptr, target_ptr, given_ptr, results_ptr, power_ptr, N, V, has_old, has_ref, beta, scale,
                 BLOCK_V: tl.constexpr):
    """One row: sums, loss and slope, gradient of its logits (in place where out is logits). Columns are N apart."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    target = tl.load(target_ptr + row)
    z = tl.load(logits_ptr + target)  # before the barriers of the sums: in place, other threads write here after them
    m, s, t = row_sums(logits_ptr, V, scale, BLOCK_V)
    logp = ((z - m) * scale - tl.log2(s)) * LN2

    given_ptr += row
    weight, advantage, is_weight = tl.load(given_ptr), tl.load(given_ptr + N), tl.load(given_ptr + 2 * N)
    low, high = tl.load(given_ptr + 3 * N), tl.load(given_ptr + 4 * N)
    old = tl.load(given_ptr + 5 * N, mask=has_old != 0, other=0.0)
    ratio = tl.where(has_old != 0, tl.exp2((logp - old) * LOG2E), 1.0)
    clipped = tl.minimum(tl.maximum(ratio, low, propagate_nan=ALL_NAN), high, propagate_nan=ALL_NAN)
    clipped_low = (ratio < low) & (advantage < 0)
    clipped_high = (ratio > high) & (advantage > 0)
    loss = -tl.minimum(ratio * advantage, clipped * advantage, propagate_nan=ALL_NAN) * is_weight
    slope = tl.where(clipped_low | clipped_high, 0.0, -ratio * advantage * is_weight)

    d = tl.where(has_ref != 0, tl.load(given_ptr + 6 * N, mask=has_ref != 0, other=0.0) - logp, 0.0)
    near = tl.minimum(tl.maximum(d, -20.0, propagate_nan=ALL_NAN), 20.0, propagate_nan=ALL_NAN)
    grown = tl.exp2(near * LOG2E)
    kl = grown - near - 1.0
    loss += beta * kl
    slope += tl.where((d < -20.0) | (d > 20.0), 0.0, beta * (1.0 - grown))

    results_ptr += row
    tl.store(results_ptr, loss)
    tl.store(results_ptr + N, ratio)
    tl.store(results_ptr + 2 * N, clipped_low.to(tl.float32))
    tl.store(results_ptr + 3 * N, clipped_high.to(tl.float32))
    tl.store(results_ptr + 4 * N, logp)
    tl.store(results_ptr + 5 * N, (tl.log2(s) - t / s * scale) * LN2)
    tl.store(results_ptr + 6 * N, kl)
    by_logp = slope * weight * tl.load(power_ptr) * (scale * LN2)  # scale * ln 2 is 1 / T
    write_dlogits(logits_ptr, out_ptr + row * V, target, V, scale, m, s, 0.0, by_logp, 0.0, 0.0, False, BLOCK_V)


def linear_grpo_loss(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, advantage_N: Tensor, weight_N: Tensor,
                     old_logp_N: Tensor | None = None, ref_logp_N: Tensor | None = None, is_weight_N: Tensor | None = None,
                     beta: float = 0.0, clip_low: float | Tensor = 0.2, clip_high: float | Tensor = 0.2,
                     temperature: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """The scalar sum(weight * token loss), differentiable in hidden and weight, and the statistics of every row."""
    return chunked.linear_grpo_loss(hidden_ND, weight_VD, target_N, advantage_N, weight_N, old_logp_N, ref_logp_N, is_weight_N,
                                    beta, clip_low, clip_high, temperature, score, loss, rows.CHUNK_BYTES)


def loss(logits_LV: Tensor, target_L: Tensor, given_KL: Tensor, results_KL: Tensor, power: Tensor, half: torch.dtype,
         has_old: bool, has_ref: bool, beta: float, temperature: float) -> Tensor:
    """Fills results; the logits' gradient, times power. given and results are columns of wider tensors."""
    out_LV, V = gradient_of(logits_LV, half), logits_LV.shape[1]
    block_V, warps = row_block(V)
    _loss_kernel[(len(logits_LV),)](logits_LV, out_LV, target_L, given_KL, results_KL, power, given_KL.stride(0), V,
                                    int(has_old), int(has_ref), beta, LOG2E.value / temperature, block_V, num_warps=warps)
    return out_LV


def variants() -> list[Variant]:
    return [_variant(dtype, size, V) for dtype, size in (("bf16", 2), ("fp16", 2), ("fp32", 4)) for V in (151936, 50257, 4096)]


def _variant(dtype: str, size: int, V: int) -> Variant:
    block_V, warps = row_block(V)
    signature = dict(logits_ptr="*fp32", out_ptr=f"*{dtype}", target_ptr="*i64", given_ptr="*fp32", results_ptr="*fp32",
                     power_ptr="*fp32", N="i32", V="i32", has_old="i32", has_ref="i32", beta="fp32", scale="fp32",
                     BLOCK_V="constexpr")
    least = V * (4 + size) + (len(GIVEN) + len(RESULTS) + 4) * 4
    return Variant(f"linear_grpo_loss, {dtype}, V={V}", _loss_kernel, signature, dict(BLOCK_V=block_V),
                   aligned(*range(6), *([7] if V % 16 == 0 else [])), warps, moved=least + V * 4, minimum=least,
                   shape="one row", note=TWICE)
