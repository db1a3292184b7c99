"""The C++ ops of csrc/ as implementations of the public functions, with what torch.compile and autograd need to know.

They compute in fp32 on the CPU; narrower inputs are widened first. Where they were not built, `problem` says why. `cuda_ops`:
whether sampling has its CUDA kernel (csrc/cuda) here.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, library

from toolr0_kernels import checks, chunked
from toolr0_kernels.chunked import LinearLogprob

try:
    import toolr0_kernels._C  # noqa: F401  registers torch.ops.toolr0
    problem = None
except ImportError as error:
    problem = str(error)

cuda_ops = False
if problem is None:
    with contextlib.suppress(ImportError):  # left out where torch or nvcc was missing
        import toolr0_kernels._cuda  # noqa: F401  adds to torch.ops.toolr0
        cuda_ops = torch._C._dispatch_has_kernel_for_dispatch_key("toolr0::sample", "CUDA")

HEAD_SIZES = (32, 64, 96, 128)  # that csrc/attention.cpp is compiled for
FEW_ROWS = 64  # up to which `linear` is faster than BLAS
CHUNK_BYTES = 1 << 27  # of logits: each chunk reads the whole head, so fewer and larger are faster


def linear_logprob(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float = 1.0,
                   entropy: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    return LinearLogprob.apply(hidden_ND, weight_VD, target_N, temperature, entropy, _score, _dlogits, CHUNK_BYTES)


def linear_grpo_loss(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, *args) -> tuple[Tensor, dict[str, Tensor]]:
    return chunked.linear_grpo_loss(hidden_ND, weight_VD, target_N, *args, _score, _loss, CHUNK_BYTES)


def _score(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float, _) -> tuple[Tensor, Tensor, Tensor]:
    """log-prob, entropy and log-sum-exp; the entropy comes for free."""
    out_3N = torch.empty(3, len(target_N))

    def keep(logits_LV: Tensor, rows: slice) -> Tensor:
        for column_N, value in zip(out_3N, torch.ops.toolr0.row_logprob(logits_LV, target_N[rows], temperature)):
            column_N[rows] = value
        return logits_LV

    chunked.through_logits(hidden_ND, weight_VD, keep, CHUNK_BYTES, False, False)
    return tuple(out_3N)


def _dlogits(logits_LV: Tensor, target_L: Tensor, by_3L: Tensor, temperature: float, _) -> Tensor:
    return torch.ops.toolr0.row_logprob_backward(logits_LV, target_L, *by_3L, temperature)


def _loss(logits_LV: Tensor, target_L: Tensor, given_KL: Tensor, results_KL: Tensor, power: Tensor, _, *options) -> Tensor:
    results_KL.copy_(torch.ops.toolr0.row_grpo_loss_(logits_LV, target_L, given_KL, power, *options))
    return logits_LV


def sample(logits_SV: Tensor, seed_S: Tensor, position_S: Tensor, temperature_S: Tensor, top_k_S: Tensor | None = None,
           top_p_S: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.toolr0.sample(logits_SV.float(), seed_S, position_S, temperature_S, top_k_S, top_p_S)


def linear_sample(hidden_SD: Tensor, weight_VD: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The logits do exist here: BLAS makes them faster than a fused loop would."""
    few = hidden_SD.dtype == torch.float32 and len(hidden_SD) <= FEW_ROWS
    return sample(linear(hidden_SD, weight_VD) if few else chunked.product(hidden_SD, weight_VD.T), *rows)


def decode_attention(q_SHE: Tensor, k_cache_PKBE: Tensor, v_cache_PKBE: Tensor, table_SM: Tensor, length_S: Tensor,
                     scale: float) -> Tensor:
    try:
        return torch.ops.toolr0.decode_attention(q_SHE, k_cache_PKBE, v_cache_PKBE, table_SM, length_S, scale)
    except RuntimeError:  # says the op, in passing; which one it is, in our words
        checks.pages(k_cache_PKBE, table_SM, length_S)
        raise


def linear(x: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    out = torch.ops.toolr0.linear(_rows(x), weight_FD.contiguous(), bias_F)
    return out.view(*x.shape[:-1], len(weight_FD))


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return torch.ops.toolr0.rms_norm(_rows(x), weight_D, eps).view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    normed, total = torch.ops.toolr0.add_rms_norm(_rows(x), _rows(residual), weight_D, eps)
    return normed.view(x.shape), total.view(x.shape)


def rope(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.toolr0.rope(*(x.contiguous() for x in inputs))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return torch.ops.toolr0.swiglu(gate.contiguous(), up.contiguous()).view(gate.shape)


def write_kv(k_SKE: Tensor, v_SKE: Tensor, k_cache_PKBE: Tensor, v_cache_PKBE: Tensor, page_S: Tensor,
             offset_S: Tensor) -> None:
    try:
        torch.ops.toolr0.write_kv_(k_SKE, v_SKE, k_cache_PKBE, v_cache_PKBE, page_S, offset_S)
    except RuntimeError:
        checks.places(k_cache_PKBE, page_S, offset_S)
        raise


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _register() -> None:
    """Shapes of the outputs, for torch.compile, and the gradient of row_logprob."""
    rows = lambda x: x.new_empty(x.shape[0])  # noqa: E731

    @library.register_fake("toolr0::row_logprob")
    def _(logits, target, temperature):
        return rows(logits), rows(logits), rows(logits)

    @library.register_fake("toolr0::row_logprob_backward")
    def _(logits, *args):
        return torch.empty_like(logits)

    @library.register_fake("toolr0::row_grpo_loss_")
    def _(logits, *args):
        return logits.new_empty(7, logits.shape[0])

    @library.register_fake("toolr0::sample")
    def _(logits, *args):
        return rows(logits).long(), rows(logits), rows(logits)

    @library.register_fake("toolr0::decode_attention")
    def _(q, *args):
        return torch.empty_like(q)

    @library.register_fake("toolr0::linear")
    def _(x, weight, bias):
        return x.new_empty(x.shape[0], weight.shape[0])

    @library.register_fake("toolr0::rms_norm")
    def _(x, *args):
        return torch.empty_like(x)

    @library.register_fake("toolr0::add_rms_norm")
    def _(x, *args):
        return torch.empty_like(x), torch.empty_like(x)

    @library.register_fake("toolr0::rope")
    def _(q, k, *args):
        return torch.empty_like(q), torch.empty_like(k)

    @library.register_fake("toolr0::swiglu")
    def _(gate, up):
        return gate.new_empty(gate.numel())

    @library.register_fake("toolr0::write_kv_")
    def _(*args):
        return None

    def setup(ctx, inputs, output):
        logits, target, ctx.temperature = inputs
        ctx.save_for_backward(logits, target)

    def backward(ctx, *grads):
        grads = [g.contiguous() for g in grads]
        return torch.ops.toolr0.row_logprob_backward(*ctx.saved_tensors, *grads, ctx.temperature), None, None

    library.register_autograd("toolr0::row_logprob", backward, setup_context=setup)


if problem is None:
    _register()
