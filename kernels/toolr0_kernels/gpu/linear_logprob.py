"""linear_logprob on a GPU: log-prob, entropy and log-sum-exp of a linear head, and no logits in memory.

Formula. With x = hidden @ weight.T, T the temperature and m = max x, for every row

    s = sum_j e^((x_j - m) / T)     t = sum_j e^((x_j - m) / T) (x_j - m)     z = x[target]
    lse = m / T + log s     logp = (z - m) / T - log s     entropy = log s - t / (s T)

Nothing is subtracted but logits from the maximum of their own row, so a big constant added to all logits, or a model that is
sure, cancels nothing. s and t of two disjoint sets of columns merge by rescaling to the larger of the two maxima: that is
what makes one pass enough (online softmax), and what lets the vocabulary be split over programs.

Forward. A program multiplies BLOCK_N rows by `split` columns of the vocabulary, BLOCK_V at a time, keeps (m, s, t, z) of its
rows in registers and writes 16 bytes a row; a second, small kernel merges the splits in a fixed order (no atomics: equal
inputs give equal results). A split is a fixed number of columns, not a share of them, so that a row's result does not depend
on how many rows it came with (but for the tile: up to 64 rows have a smaller one).

Traffic. Eager torch writes and reads N x V logits several times: 16384 x 151936 in fp32 is 10 GB a pass, 2.3 ms on an H200.
Here, weight tiles are shared by GROUP row blocks that run at the same time: hidden of the group (16 x 128 rows, 6 MB at
D = 1536) stays in the L2 cache, and the weight is read from memory once per group: 8 times 467 MB at N = 16384, 0.9 ms, under
9.7 ms of tensor-core time. Tiles of 128 x 256 x 64 load 384 values a column of D for 32768 products: the largest that
accumulators leave room for (128 registers a thread with 8 warps), and less L2 traffic than two of 128 x 128.

Backward (chunked.py). Rows in chunks sized by bytes: logits of the chunk once more by cuBLAS, one kernel that turns a row's
logits into their gradient, two matrix products. The kernel sums the row again rather than use the forward's lse: 1 - p of a
sure model would be the difference of two roundings otherwise.

Shape suffixes: N rows, D hidden, V vocabulary, C splits of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolr0_kernels.chunked import LinearLogprob
from toolr0_kernels.gpu import rows
from toolr0_kernels.gpu.rows import (
    INTERPRETED,
    LN2,
    LOG2E,
    LOWEST,
    TWICE,
    gradient_of,
    merge_sums,
    row_block,
    row_sums,
    write_dlogits,
)
from toolr0_kernels.gpu.variants import Variant, aligned

SPLIT = 2048  # columns of the vocabulary per program
GROUP = 16  # row blocks that share weight tiles
MERGE_ROWS = 16
STAGES = 3


@triton.jit
def tile_logits(hidden_ptr, weight_ptr, first_row, first_col, N, V, D, EVEN_D: tl.constexpr,
                BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr):
    """BLOCK_N x BLOCK_V logits in fp32 from this row and column on; past the last one they repeat it (mask them).

    The first element's offset is an int64 scalar, the rest int32: 64-bit pointers for each load would cost 12 registers."""
    offset_D = tl.arange(0, BLOCK_D)
    row_N = tl.minimum(tl.arange(0, BLOCK_N), N - 1 - first_row)
    col_V = tl.minimum(tl.arange(0, BLOCK_V), V - 1 - first_col)
    hidden_ptr += tl.cast(first_row, tl.int64) * D
    weight_ptr += tl.cast(first_col, tl.int64) * D
    place_ND = row_N[:, None] * D + offset_D[None, :]
    place_DV = col_V[None, :] * D + offset_D[:, None]
    acc_NV = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for start in range(0, D, BLOCK_D):
        if EVEN_D:
            a_ND, b_DV = tl.load(hidden_ptr + place_ND), tl.load(weight_ptr + place_DV)
        else:
            inside_D = start + offset_D < D
            a_ND = tl.load(hidden_ptr + place_ND, mask=inside_D[None, :], other=0.0)
            b_DV = tl.load(weight_ptr + place_DV, mask=inside_D[:, None], other=0.0)
        if INTERPRETED:  # its dot is wrong for bf16
            a_ND, b_DV = a_ND.to(tl.float32), b_DV.to(tl.float32)
        acc_NV = tl.dot(a_ND, b_DV, acc_NV, input_precision="ieee")
        hidden_ptr += BLOCK_D
        weight_ptr += BLOCK_D
    return acc_NV


@triton.jit(do_not_specialize=["N", "splits"])  # a 1 would become a constant without .to
def _partial_kernel(hidden_ptr, weight_ptr, target_ptr, partial_ptr, N, V, scale, splits, D,
                    EVEN_D: tl.constexpr, ENTROPY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
                    BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr):
    """m, s, t, z of BLOCK_N rows over one split. Programs run through GROUP row blocks, then splits, then groups."""
    program = tl.program_id(0)
    per_group = GROUP * splits
    first = program // per_group * GROUP
    members = tl.minimum(tl.cdiv(N, BLOCK_N) - first, GROUP)
    split = program % per_group // members
    first_row = (first + program % per_group % members) * BLOCK_N
    row_N = first_row + tl.arange(0, BLOCK_N)
    target_N = tl.load(target_ptr + row_N, mask=row_N < N, other=0).to(tl.int32)

    m_N = tl.full((BLOCK_N,), LOWEST, tl.float32)
    s_N = tl.zeros((BLOCK_N,), tl.float32)
    t_N = tl.zeros((BLOCK_N,), tl.float32)
    z_N = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, V), BLOCK_V):
        col_V = start + tl.arange(0, BLOCK_V)
        x_NV = tile_logits(hidden_ptr, weight_ptr, first_row, start, N, V, D, EVEN_D, BLOCK_N, BLOCK_V, BLOCK_D)
        x_NV = tl.where(col_V[None, :] < V, x_NV, LOWEST)
        z_N += tl.sum(tl.where(col_V[None, :] == target_N[:, None], x_NV, 0.0), 1)
        m_N, s_N, t_N = merge_sums(m_N, s_N, t_N, x_NV, scale, 1, ENTROPY)

    place_N = partial_ptr + split.to(tl.int64) * N + row_N
    plane = splits.to(tl.int64) * N
    tl.store(place_N, m_N, mask=row_N < N)
    tl.store(place_N + plane, s_N, mask=row_N < N)
    tl.store(place_N + 2 * plane, z_N, mask=row_N < N)
    if ENTROPY:
        tl.store(place_N + 3 * plane, t_N, mask=row_N < N)


@triton.jit(do_not_specialize=["N", "splits"])
def _merge_kernel(partial_ptr, logp_ptr, entropy_ptr, lse_ptr, N, scale, splits, ENTROPY: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """The splits of BLOCK_N rows into log-prob, entropy and log-sum-exp."""
    row_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split_C = tl.arange(0, BLOCK_C)
    mask_CN = (split_C[:, None] < splits) & (row_N[None, :] < N)
    place_CN = partial_ptr + split_C.to(tl.int64)[:, None] * N + row_N[None, :]
    plane = splits.to(tl.int64) * N
    m_CN = tl.load(place_CN, mask=mask_CN, other=LOWEST)
    s_CN = tl.load(place_CN + plane, mask=mask_CN, other=0.0)
    z_N = tl.sum(tl.load(place_CN + 2 * plane, mask=mask_CN, other=0.0), 0)  # all but the target's split hold 0

    m_N = tl.max(m_CN, 0)
    d_CN = m_CN - m_N[None, :]
    shrink_CN = tl.exp2(d_CN * scale)
    mask_N = row_N < N
    s_N = tl.where(mask_N, tl.sum(shrink_CN * s_CN, 0), 1.0)
    log_s_N = tl.log2(s_N)
    tl.store(logp_ptr + row_N, ((z_N - m_N) * scale - log_s_N) * LN2, mask=mask_N)
    tl.store(lse_ptr + row_N, (m_N * scale + log_s_N) * LN2, mask=mask_N)
    if ENTROPY:
        t_CN = tl.load(place_CN + 3 * plane, mask=mask_CN, other=0.0)
        t_N = tl.sum(shrink_CN * (t_CN + d_CN * s_CN), 0)
        tl.store(entropy_ptr + row_N, (log_s_N - t_N / s_N * scale) * LN2, mask=mask_N)


@triton.jit
def _dlogits_kernel(logits_ptr, out_ptr, target_ptr, by_logp_ptr, by_entropy_ptr, by_lse_ptr, V, scale, BLOCK_V: tl.constexpr):
    """One row of logits into the gradient of its logits; in place where out is logits."""
    row = tl.program_id(0).to(tl.int64)
    m, s, t = row_sums(logits_ptr + row * V, V, scale, BLOCK_V)
    entropy = (tl.log2(s) - t / s * scale) * LN2
    write_dlogits(logits_ptr + row * V, out_ptr + row * V, tl.load(target_ptr + row), V, scale, m, s, entropy,
                  tl.load(by_logp_ptr + row), tl.load(by_entropy_ptr + row), tl.load(by_lse_ptr + row), True, BLOCK_V)


def linear_logprob(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float = 1.0,
                   entropy: bool = False) -> tuple[Tensor, Tensor | None, Tensor]:
    """log-prob, entropy (None unless asked for) and log-sum-exp, fp32 [N]; differentiable in hidden and weight."""
    return LinearLogprob.apply(hidden_ND, weight_VD, target_N, temperature, entropy, score, dlogits, rows.CHUNK_BYTES)


def dlogits(logits_LV: Tensor, target_L: Tensor, by_3L: Tensor, temperature: float, half: torch.dtype) -> Tensor:
    """The logits' gradient, given those of logp, entropy and lse; in place for fp32."""
    out_LV, V = gradient_of(logits_LV, half), logits_LV.shape[1]
    block_V, warps = row_block(V)
    _dlogits_kernel[(len(logits_LV),)](logits_LV, out_LV, target_L, *(by_3L / temperature), V, LOG2E.value / temperature,
                                       block_V, num_warps=warps)
    return out_LV


def score(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float,
          entropy: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """The forward alone."""
    (N, D), V = hidden_ND.shape, weight_VD.shape[0]
    logp_N, entropy_N, lse_N = torch.empty(3, N, dtype=torch.float32, device=hidden_ND.device)
    if N:
        block_N, block_V, block_D, warps = tile(N, D, hidden_ND.element_size(), is_hopper(hidden_ND.device))
        splits, scale = triton.cdiv(V, SPLIT), LOG2E.value / temperature
        partial = torch.empty(3 + entropy, splits, N, dtype=torch.float32, device=hidden_ND.device)
        _partial_kernel[(triton.cdiv(N, block_N) * splits,)](
            hidden_ND, weight_VD, target_N, partial, N, V, scale, splits, D, D % block_D == 0, entropy, block_N, block_V,
            block_D, SPLIT, GROUP, num_warps=warps, num_stages=STAGES)
        block_C = triton.next_power_of_2(splits)
        _merge_kernel[(triton.cdiv(N, MERGE_ROWS),)](partial, logp_N, entropy_N, lse_N, N, scale, splits, entropy,
                                                     MERGE_ROWS, block_C)
    return logp_N, entropy_N if entropy else None, lse_N


def tile(N: int, D: int, element_size: int, hopper: bool) -> tuple[int, int, int, int]:
    """BLOCK_N, BLOCK_V, BLOCK_D, warps. fp32 has no tensor cores (and no TF32: it would not be fp32), and an odd D no wide
    loads: small tiles. Before Hopper, operands pass through registers, and 128 x 256 would spill."""
    if element_size == 4 or D % 64:
        return 64, 64, 32, 8
    if N <= 64:
        return 64, 128, 64, 4
    return (128, 256, 64, 8) if hopper else (128, 128, 64, 8)


def is_hopper(device: torch.device) -> bool:
    """Whether this is a GPU of that generation or a later one."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def variants() -> list[Variant]:
    out = []
    for dtype, size in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
        out += [_partial_variant(dtype, tile(N, D, size, hopper), (90,) if hopper else (80, 90), entropy, D)
                for N, D, hopper in ((9999, 1536, True), (9999, 1536, False), (64, 1536, False), (9999, 100, False),
                                     (9999, 48, False)) for entropy in (True, False)]
        out += [_dlogits_variant(dtype, size, V) for V in (151936, 50257, 4096)]
    constexprs = dict(ENTROPY=True, BLOCK_N=MERGE_ROWS, BLOCK_C=triton.next_power_of_2(triton.cdiv(151936, SPLIT)))
    signature = dict(partial_ptr="*fp32", logp_ptr="*fp32", entropy_ptr="*fp32", lse_ptr="*fp32", N="i32", scale="fp32",
                     splits="i32", **dict.fromkeys(constexprs, "constexpr"))
    out.append(Variant("linear_logprob merge", _merge_kernel, signature, constexprs, aligned(0, 1, 2, 3)))
    return list({variant.name: variant for variant in out}.values())  # in fp32 several are the same


def _partial_variant(dtype: str, chosen: tuple[int, int, int, int], targets: tuple[int, ...], entropy: bool, D: int) -> Variant:
    block_N, block_V, block_D, warps = chosen
    constexprs = dict(EVEN_D=D % block_D == 0, ENTROPY=entropy, BLOCK_N=block_N, BLOCK_V=block_V, BLOCK_D=block_D, SPLIT=SPLIT,
                      GROUP=GROUP)
    signature = dict(hidden_ptr=f"*{dtype}", weight_ptr=f"*{dtype}", target_ptr="*i64", partial_ptr="*fp32", N="i32", V="i32",
                     scale="fp32", splits="i32", D="i32", **dict.fromkeys(constexprs, "constexpr"))
    name = f"linear_logprob {block_N}x{block_V}x{block_D}, {dtype}, {'with' if entropy else 'no'} entropy, D={D}"
    return Variant(name, _partial_kernel, signature, constexprs, aligned(0, 1, 2, 3, *([5, 8] if D % 16 == 0 else [])), warps,
                   STAGES, targets=targets)


def _dlogits_variant(dtype: str, size: int, V: int) -> Variant:
    block_V, warps = row_block(V)
    signature = dict(logits_ptr="*fp32", out_ptr=f"*{dtype}", target_ptr="*i64", by_logp_ptr="*fp32", by_entropy_ptr="*fp32",
                     by_lse_ptr="*fp32", V="i32", scale="fp32", BLOCK_V="constexpr")
    least = V * (4 + size) + 5 * 4
    return Variant(f"linear_logprob backward, {dtype}, V={V}", _dlogits_kernel, signature, dict(BLOCK_V=block_V),
                   aligned(*range(6), *([6] if V % 16 == 0 else [])), warps, moved=least + V * 4, minimum=least,
                   shape="one row", note=TWICE)
