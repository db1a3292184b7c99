"""What the kernels of the head share: sums over logits that merge, and one row's logits into their gradient.

Formula. For logits x of a row, T the temperature and m = max x: s = sum e^((x - m) / T), t = sum e^((x - m) / T) (x - m). Two
disjoint sets of logits merge by rescaling to the larger of their maxima. With p = softmax(x / T), d logp[target] / dx =
(1[target] - p) / T, d lse / dx = p / T, d entropy / dx = -p (log p + entropy) / T.

Traffic of a row kernel (one program a row): the logits are read twice, since a row of 151936 in fp32, 608 KB, fits no
multiprocessor's memory, and their gradient is written once: in place in fp32, or in half precision into a second buffer that
the matrix products take as it is. The second read runs backwards and finds in the L2 cache what the first read last.

The chunk is sized by bytes, not rows: each one reads and writes the fp32 gradient of the weight (933 MB twice for 151936 x
1536, 0.4 ms on an H200), so chunks are few, and a chunk of 3456 rows keeps the products near the peak of the tensor cores.

Shape suffixes: N rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK_BYTES = 2 << 30  # fp32 logits that exist at once
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
TWICE = "a row is read twice: a long one fits no multiprocessor"
LOWEST = tl.constexpr(-1e30)  # "no logit": finite, so that 0 * (LOWEST - m) is 0 and not NaN


@triton.jit
def merge_sums(m, s, t, x, scale, axis: tl.constexpr, ENTROPY: tl.constexpr):
    """(m, s, t) after the logits x; `scale` is log2(e) / T, since the GPU's exponential is that of 2."""
    m_new = tl.maximum(m, tl.max(x, axis))
    d = x - (m_new if axis == 0 else m_new[:, None])
    p = tl.exp2(d * scale)
    shrink = tl.exp2((m - m_new) * scale)
    if ENTROPY:
        t = shrink * (t + (m - m_new) * s) + tl.sum(p * tl.maximum(d, LOWEST), axis)  # 0 times -inf is NaN
    s = shrink * s + tl.sum(p, axis)
    return m_new, s, t


@triton.jit
def row_sums(row_ptr, V, scale, BLOCK_V: tl.constexpr):
    """m, s, t of one row of logits in memory. The next block is asked for before this one is summed."""
    offset_V = tl.arange(0, BLOCK_V)
    m, s, t = tl.full((), LOWEST, tl.float32), tl.full((), 0, tl.float32), tl.full((), 0, tl.float32)
    x_V = tl.load(row_ptr + offset_V, mask=offset_V < V, other=LOWEST)
    for start in range(0, V, BLOCK_V):
        next_V = start + BLOCK_V + offset_V
        ahead_V = tl.load(row_ptr + next_V, mask=next_V < V, other=LOWEST)
        m, s, t = merge_sums(m, s, t, x_V, scale, 0, True)
        x_V = ahead_V
    return m, s, t


@triton.jit
def write_dlogits(row_ptr, out_ptr, target, V, scale, m, s, entropy, by_logp, by_entropy, by_lse, ALL: tl.constexpr,
                  BLOCK_V: tl.constexpr):
    """by_logp (1[target] - p) and, with ALL, + p (by_lse - by_entropy (log p + entropy)); `by_*` carry the 1 / T. From the
    row's end to its start: the blocks that were read last are those that the L2 cache still holds."""
    offset_V = tl.arange(0, BLOCK_V)
    inverse = 1.0 / s
    log_s = tl.log2(s)
    for back in range(0, V, BLOCK_V):
        col_V = (tl.cdiv(V, BLOCK_V) - 1) * BLOCK_V - back + offset_V
        d_V = (tl.load(row_ptr + col_V, mask=col_V < V, other=LOWEST) - m) * scale
        p_V = tl.exp2(d_V) * inverse
        dx_V = by_logp * (tl.where(col_V == target, 1.0, 0.0) - p_V)
        if ALL:
            dx_V += p_V * (by_lse - by_entropy * ((d_V - log_s) * LN2 + entropy))
        tl.store(out_ptr + col_V, dx_V.to(out_ptr.dtype.element_ty), mask=col_V < V)


def row_block(V: int) -> tuple[int, int]:
    """BLOCK_V and warps of a kernel with one program a row. With 32 warps one row per multiprocessor is on its way, 80 MB
    in all at V = 151936, so that the second read finds a good part of it in the L2 cache; with 8 rows it would find none."""
    return (16384, 32) if V > 4096 else (4096, 8)


def gradient_of(logits_LV: Tensor, dtype: torch.dtype) -> Tensor:
    """Where the logits' gradient goes: over them, or in half precision, as the products that follow take it."""
    return logits_LV if dtype == torch.float32 else torch.empty_like(logits_LV, dtype=dtype)
