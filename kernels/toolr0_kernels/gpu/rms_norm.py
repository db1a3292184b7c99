"""rms_norm and add + rms_norm on a GPU, forward and backward.

Formula. With r = 1 / sqrt(mean(x^2) + eps), h = x r rounded to x's dtype: y = w h. With g = w dy:

    dx = r (g - h mean(g h))     dw = sum over rows of dy h

add_rms_norm first forms s = x + residual, rounded as the unfused sum would be, and norms that; the gradient that comes in
through s is added to dx, which is then the gradient of x and of the residual alike.

Traffic. Forward: x is read once and y written once (with the sum: two read, two written), 4 bytes a number in bf16 and nothing
else but 4 bytes a row for r, which saves the backward a reduction. A row, up to 8192 numbers, stays in registers between its
sum of squares and its result; short rows (64 or 128 numbers in a QK norm) go several at a time, so that there is enough to load
at once. Backward: x and dy read, dx written. A few programs a multiprocessor walk over all rows, each over a stretch, so that
the weight is read once a program and not once a row, and dw is summed in registers: each program writes one partial row, and
torch adds those up, in the same order every time; no atomics.

Shape suffixes: N rows, D their length, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from toolr0_kernels.gpu.variants import Variant, aligned, multiprocessors

TILE = 2048  # numbers that a program of short rows holds
FORWARD, BACKWARD = 4, 2  # programs a multiprocessor


@triton.jit
def _forward_kernel(x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, rstd_ptr, N, D, blocks, eps, ADD: tl.constexpr,
                    ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """`blocks` blocks of ROWS rows: x (+ residual) in, y, the sum and 1 / rms out."""
    col_D = tl.arange(0, BLOCK_D)
    weight_D = tl.load(weight_ptr + col_D, mask=col_D < D, other=0.0).to(tl.float32)
    first = tl.program_id(0).to(tl.int64) * blocks * ROWS
    for block in range(0, blocks):
        row_R = first + block * ROWS + tl.arange(0, ROWS)
        place_RD = row_R[:, None] * D + col_D[None, :]
        mask_RD = (row_R[:, None] < N) & (col_D[None, :] < D)
        x_RD = tl.load(x_ptr + place_RD, mask=mask_RD, other=0.0).to(tl.float32)
        if ADD:
            x_RD += tl.load(residual_ptr + place_RD, mask=mask_RD, other=0.0).to(tl.float32)
            rounded_RD = x_RD.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + place_RD, rounded_RD, mask=mask_RD)
            x_RD = rounded_RD.to(tl.float32)
        rstd_R = 1.0 / tl.sqrt(tl.sum(x_RD * x_RD, 1) / D + eps)
        h_RD = (x_RD * rstd_R[:, None]).to(y_ptr.dtype.element_ty).to(tl.float32)
        tl.store(y_ptr + place_RD, (h_RD * weight_D[None, :]).to(y_ptr.dtype.element_ty), mask=mask_RD)
        tl.store(rstd_ptr + row_R, rstd_R, mask=row_R < N)


@triton.jit
def _backward_kernel(x_ptr, weight_ptr, rstd_ptr, dy_ptr, dsum_ptr, dx_ptr, partial_ptr, N, D, blocks, ADD: tl.constexpr,
                     ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """`blocks` blocks of ROWS rows: their dx, and one row of what they add to dw."""
    col_D = tl.arange(0, BLOCK_D)
    weight_D = tl.load(weight_ptr + col_D, mask=col_D < D, other=0.0).to(tl.float32)
    dw_D = tl.zeros((BLOCK_D,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * blocks * ROWS
    for block in range(0, blocks):
        row_R = first + block * ROWS + tl.arange(0, ROWS)
        place_RD = row_R[:, None] * D + col_D[None, :]
        mask_RD = (row_R[:, None] < N) & (col_D[None, :] < D)
        rstd_R = tl.load(rstd_ptr + row_R, mask=row_R < N, other=0.0)
        x_RD = tl.load(x_ptr + place_RD, mask=mask_RD, other=0.0).to(tl.float32)
        dy_RD = tl.load(dy_ptr + place_RD, mask=mask_RD, other=0.0).to(tl.float32)
        h_RD = x_RD * rstd_R[:, None]
        g_RD = dy_RD * weight_D[None, :]
        dx_RD = rstd_R[:, None] * (g_RD - h_RD * (tl.sum(g_RD * h_RD, 1) / D)[:, None])
        if ADD:
            dx_RD += tl.load(dsum_ptr + place_RD, mask=mask_RD, other=0.0).to(tl.float32)
        tl.store(dx_ptr + place_RD, dx_RD.to(dx_ptr.dtype.element_ty), mask=mask_RD)
        dw_D += tl.sum(dy_RD * h_RD.to(x_ptr.dtype.element_ty).to(tl.float32), 0)
    tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * D + col_D, dw_D, mask=col_D < D)


def tile(D: int) -> tuple[int, int, int]:
    """ROWS, BLOCK_D and warps of a program."""
    block_D = triton.next_power_of_2(D)
    rows = max(1, TILE // block_D)
    return rows, block_D, 32 if block_D == 8192 else max(4, block_D * rows // 512)


def share(N: int, rows: int, a_processor: int, device: torch.device | str) -> tuple[int, int]:
    """Programs, and blocks of rows for each: `a_processor` programs a multiprocessor, or as many as there are blocks."""
    total = triton.cdiv(N, rows)
    blocks = max(1, triton.cdiv(total, a_processor * multiprocessors(device)))
    return triton.cdiv(total, blocks), blocks


class _RMSNorm(torch.autograd.Function):
    """(y, sum); without a residual the sum is x itself."""

    @staticmethod
    def forward(ctx, x: Tensor, residual: Tensor | None, weight_D: Tensor, eps: float):
        x_ND, D = x.reshape(-1, x.shape[-1]).contiguous(), x.shape[-1]
        N, add = len(x_ND), residual is not None
        y_ND, rstd_N = torch.empty_like(x_ND), x_ND.new_empty(N, dtype=torch.float32)
        sum_ND = torch.empty_like(x_ND) if add else x_ND
        residual_ND = residual.reshape(-1, D).contiguous() if add else x_ND
        rows, block_D, warps = tile(D)
        programs, blocks = share(N, rows, FORWARD, x.device)
        if N:
            _forward_kernel[(programs,)](x_ND, residual_ND, weight_D, y_ND, sum_ND, rstd_N, N, D, blocks, eps, add, rows,
                                         block_D, num_warps=warps)
        ctx.save_for_backward(sum_ND, weight_D, rstd_N)
        ctx.add = add
        ctx.set_materialize_grads(False)
        return y_ND.view(x.shape), sum_ND.view(x.shape) if add else None

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor | None, dsum: Tensor | None):
        x_ND, weight_D, rstd_N = ctx.saved_tensors
        if dy is None:
            return dsum, dsum if ctx.add else None, None, None
        N, D = x_ND.shape
        dy_ND, dx_ND = dy.reshape(N, D).contiguous(), torch.empty_like(x_ND)
        dsum_ND = dy_ND if dsum is None else dsum.reshape(N, D).contiguous()
        rows, block_D, warps = tile(D)
        programs, blocks = share(N, rows, BACKWARD, x_ND.device)
        partial_PD = x_ND.new_empty(programs, D, dtype=torch.float32)
        if N:
            _backward_kernel[(programs,)](x_ND, weight_D, rstd_N, dy_ND, dsum_ND, dx_ND, partial_PD, N, D, blocks,
                                          dsum is not None, rows, block_D, num_warps=warps)
        dx = dx_ND.view(dy.shape)
        return dx, dx if ctx.add else None, partial_PD.sum(0).to(weight_D.dtype), None


def rms_norm(x: Tensor, weight_D: Tensor, eps: float = 1e-6) -> Tensor:
    return _RMSNorm.apply(x, None, weight_D, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight_D: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    return _RMSNorm.apply(x, residual, weight_D, eps)


def variants() -> list[Variant]:
    return [_variant(dtype, D, add, backward) for dtype in ("bf16", "fp32") for D in (64, 896, 1536, 8192)
            for add in (False, True) for backward in (False, True)]


def _variant(dtype: str, D: int, add: bool, backward: bool, N: int = 16384,
             device: str = "meta") -> Variant:
    (rows, block_D, warps), size = tile(D), 2 if dtype == "bf16" else 4
    programs, _ = share(N, rows, BACKWARD if backward else FORWARD, device)
    if backward:
        names = dict(x_ptr=dtype, weight_ptr=dtype, rstd_ptr="fp32", dy_ptr=dtype, dsum_ptr=dtype, dx_ptr=dtype,
                     partial_ptr="fp32")
        arrays, scalars, weights = 4 if add else 3, dict(N="i32", D="i32", blocks="i32"), programs * D * 4
    else:
        names = dict(x_ptr=dtype, residual_ptr=dtype, weight_ptr=dtype, y_ptr=dtype, sum_ptr=dtype, rstd_ptr="fp32")
        arrays, scalars, weights = 4 if add else 2, dict(N="i32", D="i32", blocks="i32", eps="fp32"), 0
    once = arrays * N * D * size + 4 * N + D * size
    signature = {k: f"*{v}" for k, v in names.items()} | scalars
    signature |= dict(ADD="constexpr", ROWS="constexpr", BLOCK_D="constexpr")
    return Variant(f"{'add_' if add else ''}rms_norm {'backward' if backward else 'forward'}, {dtype}, D={D}",
                   _backward_kernel if backward else _forward_kernel, signature, dict(ADD=add, ROWS=rows, BLOCK_D=block_D),
                   aligned(*range(len(names)), len(names) + 1), warps, moved=once + (programs - 1) * D * size + weights,
                   minimum=once + (D * 4 if backward else 0), shape=f"{N} rows of {D}")
