"""silu(gate) * up on a GPU, forward and backward.

Formula. With s = 1 / (1 + e^-g): y = g s u, dg = dy u s (1 + g (1 - s)), du = dy g s; in fp32, rounded once.

Traffic. Forward: two arrays read, one written; eager torch writes and reads silu(gate) besides. Backward: three read, two
written, and nothing saved but the inputs. A program is a stretch of one row, so that gate and up may be the halves of one
matrix, as a fused projection leaves them.

Shape suffixes: N rows, F columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from toolr0_kernels.gpu.variants import Variant, aligned

BLOCK = 1024
WARPS = 4


@triton.jit
def _swiglu_kernel(gate_ptr, up_ptr, dy_ptr, out_ptr, d_up_ptr, gate_row, up_row, F, per_row, BACK: tl.constexpr,
                   BLOCK: tl.constexpr):
    """BLOCK columns of one row; with BACK, out is the gradient of gate. dy and results are contiguous."""
    row = (tl.program_id(0) // per_row).to(tl.int64)
    col = tl.program_id(0) % per_row * BLOCK + tl.arange(0, BLOCK)
    mask = col < F
    gate = tl.load(gate_ptr + row * gate_row + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + col, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    place = row * F + col
    dtype = out_ptr.dtype.element_ty
    if BACK:
        dy = tl.load(dy_ptr + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + place, (dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(dtype), mask=mask)
        tl.store(d_up_ptr + place, (dy * gate * sigmoid).to(dtype), mask=mask)
    else:
        tl.store(out_ptr + place, (gate * sigmoid * up).to(dtype), mask=mask)


def _launch(gate_NF: Tensor, up_NF: Tensor, dy_NF: Tensor | None) -> list[Tensor]:
    """y, or the gradients of gate and up."""
    (N, F), back = gate_NF.shape, dy_NF is not None
    out = [torch.empty(N, F, dtype=gate_NF.dtype, device=gate_NF.device) for _ in range(1 + back)]
    per_row = triton.cdiv(F, BLOCK)
    if N and F:
        _swiglu_kernel[(N * per_row,)](gate_NF, up_NF, dy_NF if back else gate_NF, out[0], out[-1], gate_NF.stride(0),
                                       up_NF.stride(0), F, per_row, back, BLOCK, num_warps=WARPS)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_NF: Tensor, up_NF: Tensor):
        ctx.save_for_backward(gate_NF, up_NF)
        return _launch(gate_NF, up_NF, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_NF: Tensor):
        return tuple(_launch(*ctx.saved_tensors, dy_NF.contiguous()))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    rows = [x.reshape(-1, x.shape[-1]) for x in (gate, up)]
    return _SwiGLU.apply(*(x if x.stride(-1) == 1 else x.contiguous() for x in rows)).view(gate.shape)


def variants() -> list[Variant]:
    return [_variant(dtype, F, back) for dtype in ("bf16", "fp32") for F in (4864, 8960) for back in (False, True)]


def _variant(dtype: str, F: int, back: bool, N: int = 16384) -> Variant:
    size = 2 if dtype == "bf16" else 4
    signature = {name: f"*{dtype}" for name in ("gate_ptr", "up_ptr", "dy_ptr", "out_ptr", "d_up_ptr")}
    signature |= dict(gate_row="i32", up_row="i32", F="i32", per_row="i32", BACK="constexpr", BLOCK="constexpr")
    moved = (5 if back else 3) * N * F * size
    return Variant(f"swiglu {'backward' if back else 'forward'}, {dtype}, F={F}", _swiglu_kernel, signature,
                   dict(BACK=back, BLOCK=BLOCK), aligned(0, 1, 2, 3, 4, 5, 6, 7), WARPS, moved=moved, minimum=moved,
                   shape=f"{N} rows of {F}")
