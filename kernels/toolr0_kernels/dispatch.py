"""The public functions: arguments are checked, an implementation is chosen, and it runs.

impl "auto" is Triton on NVIDIA GPUs (for top-k and top-p the CUDA op of csrc/cuda, where it was built), the C++ ops of csrc/ on
CPUs, plain torch anywhere else and for fp64; the variable TOOLR0_KERNELS names another one for every "auto". `describe` says in
one line what that means here.

Shape suffixes: N rows (tokens), S sequences, D hidden, V vocabulary, H query heads, K key/value heads, E head size, F half
of it, P pages of B tokens, M pages a sequence.
"""

from __future__ import annotations

import importlib
import importlib.util
import os

import torch
from torch import Tensor

from toolr0_kernels import checks, cpp, reference
from toolr0_kernels.chunked import product

IMPLEMENTATIONS = ("auto", "triton", "cpp", "torch")
FORWARD_ONLY = ("linear", "rms_norm", "rope", "swiglu")  # in C++
NO_TRITON = ("linear",)


def linear_logprob(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float = 1.0,
                   entropy: bool = False, lse: bool = False, impl: str = "auto") -> Tensor | tuple[Tensor, ...]:
    """log softmax(hidden @ weight.T / temperature)[target], fp32 [N] (fp64 of fp64), differentiable once, in hidden and weight.

    With entropy or lse, a tuple in the order logp, entropy, lse (all [N]). Raises ValueError for shapes that do not fit, a
    temperature that is not positive, an impl that is unknown or does not run here, and IndexError for a target outside the
    vocabulary; on a GPU such a row is NaN instead, since looking would wait for the device.
    """
    checks.head(hidden_ND, weight_VD, target_N, temperature)
    target_N, bad_N = checks.targets(target_N, len(weight_VD))
    which = choose("linear_logprob", impl, hidden_ND) if len(target_N) else "torch"
    out = _module(which, "linear_logprob").linear_logprob(hidden_ND.contiguous(), weight_VD.contiguous(), target_N, temperature,
                                                          entropy)
    out = [x if bad_N is None else x.masked_fill(bad_N, torch.nan)
           for x, wanted in zip(out, (True, entropy, lse)) if wanted]
    return tuple(out) if len(out) > 1 else out[0]


def linear_grpo_loss(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, advantage_N: Tensor, weight_N: Tensor,
                     old_logp_N: Tensor | None = None, ref_logp_N: Tensor | None = None, is_weight_N: Tensor | None = None,
                     beta: float = 0.0, clip_low: float | Tensor = 0.2, clip_high: float | Tensor = 0.2,
                     temperature: float = 1.0, impl: str = "auto") -> tuple[Tensor, dict[str, Tensor]]:
    """The scalar sum(weight * grpo.token_loss(linear_logprob(...), ...)), differentiable once, in hidden and weight alone.

    Rows of weight 0 are dropped exactly. Statistics are those of grpo.token_loss and "logp" and "entropy", each detached,
    fp32, [N]. Raises as linear_logprob does, and ValueError for a per-token input that is not [N].
    """
    checks.head(hidden_ND, weight_VD, target_N, temperature)
    per_row = dict(advantage_N=advantage_N, weight_N=weight_N, old_logp_N=old_logp_N, ref_logp_N=ref_logp_N,
                   is_weight_N=is_weight_N, clip_low=clip_low, clip_high=clip_high)
    checks.per_row(len(target_N), per_row)
    target_N, bad_N = checks.targets(target_N, len(weight_VD))
    which = choose("linear_grpo_loss", impl, hidden_ND) if len(target_N) else "torch"
    loss, stats = _module(which, "linear_grpo_loss").linear_grpo_loss(
        hidden_ND.contiguous(), weight_VD.contiguous(), target_N, advantage_N, weight_N, old_logp_N, ref_logp_N, is_weight_N,
        beta, clip_low, clip_high, temperature)
    return (loss if bad_N is None else torch.where(bad_N.any(), torch.nan, loss)), stats


def linear(x: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None, impl: str = "auto") -> Tensor:
    """x @ weight.T + bias over the last dimension. Differentiable, but for impl "cpp", which is made for few rows: "auto" takes
    it on a CPU for at most 64 of them where no gradient is wanted, and BLAS everywhere else."""
    checks.linear(x, weight_FD, bias_F)
    many = impl == "auto" and x.numel() > cpp.FEW_ROWS * x.shape[-1]
    which = "torch" if many else choose("linear", impl, x, wants_grad=_wants_grad(x, weight_FD))
    return _module(which, "linear").linear(x, weight_FD, bias_F)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float = 1e-6, impl: str = "auto") -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, in x's dtype; the mean in fp32. Differentiable."""
    checks.norm(x, weight_D)
    which = choose("rms_norm", impl, x, wants_grad=_wants_grad(x, weight_D))
    return _module(which, "rms_norm").rms_norm(x, weight_D.contiguous(), eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight_D: Tensor, eps: float = 1e-6,
                 impl: str = "auto") -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual) in one reading of both. Differentiable."""
    checks.norm(x, weight_D)
    checks.same(x=x, residual=residual)
    which = choose("rms_norm", impl, x, wants_grad=_wants_grad(x, residual, weight_D))
    return _module(which, "rms_norm").add_rms_norm(x, residual, weight_D.contiguous(), eps)


def rope(q_NHE: Tensor, k_NKE: Tensor, cos_NF: Tensor, sin_NF: Tensor, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """Queries and keys with the pairs (i, i + E/2) rotated; cos and sin, fp32, are of the angles, [N, E/2]. Differentiable
    in q and k."""
    checks.rope(q_NHE, k_NKE, cos_NF, sin_NF)
    which = choose("rope", impl, q_NHE, wants_grad=_wants_grad(q_NHE, k_NKE))
    return _module(which, "rope").rope(q_NHE, k_NKE, cos_NF, sin_NF)


def swiglu(gate: Tensor, up: Tensor, impl: str = "auto") -> Tensor:
    """silu(gate) * up. Differentiable."""
    checks.same(gate=gate, up=up)
    which = choose("swiglu", impl, gate, wants_grad=_wants_grad(gate, up))
    return _module(which, "swiglu").swiglu(gate, up)


@torch.no_grad()
def write_kv(k_SKE: Tensor, v_SKE: Tensor, k_cache_PKBE: Tensor, v_cache_PKBE: Tensor, page_S: Tensor, offset_S: Tensor,
             impl: str = "auto") -> None:
    """Puts the new key and value of every row at `offset` of its page, in place; page and offset are int64 [S].

    Rows have places of their own, but for what nobody reads. Raises ValueError for shapes that do not fit, and, on a CPU, for
    a place that is not there.
    """
    checks.write(k_SKE, v_SKE, k_cache_PKBE, v_cache_PKBE, page_S, offset_S)
    which = choose("write_kv", impl, k_SKE)
    if which != "cpp":  # which looks itself
        checks.places(k_cache_PKBE, page_S, offset_S)
    args = (k_SKE.contiguous(), v_SKE.contiguous(), k_cache_PKBE, v_cache_PKBE, page_S, offset_S)
    return _module(which, "write_kv").write_kv(*args)


@torch.no_grad()
def decode_attention(q_SHE: Tensor, k_cache_PKBE: Tensor, v_cache_PKBE: Tensor, table_SM: Tensor, length_S: Tensor,
                     scale: float | None = None, impl: str = "auto") -> Tensor:
    """Attention of one query per sequence over a paged cache, [S, H, E] in q's dtype; no gradient.

    table (int32): the pages of each sequence in order; length (int32): how many of their tokens count. Sequences may share
    pages, and entries past the length are never looked at; length 0 gives zeros. scale: E^-0.5 where None.
    Raises ValueError for shapes that do not fit, and, on a CPU, for a length or a page that is not there.
    """
    checks.decode(q_SHE, k_cache_PKBE, v_cache_PKBE, table_SM, length_S)
    which = choose("decode_attention", impl, q_SHE)
    if which != "cpp":  # which looks itself
        checks.pages(k_cache_PKBE, table_SM, length_S)
    scale = q_SHE.shape[-1] ** -0.5 if scale is None else scale
    args = (q_SHE.contiguous(), k_cache_PKBE, v_cache_PKBE, table_SM.contiguous(), length_S.contiguous(), scale)
    return _module(which, "decode_attention").decode_attention(*args)


@torch.no_grad()
def sample(logits_SV: Tensor, seed_S: Tensor, position_S: Tensor, temperature_S: Tensor, top_k_S: Tensor | None = None,
           top_p_S: Tensor | None = None, impl: str = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """The next token of every row (int64), its log-prob and the entropy of the distribution it was drawn from (fp32).

    Inverse CDF in vocabulary order with the uniform that rng.uniform(seed, position) names, so that a row's token depends on
    its own logits, seed and position alone, and is the same in every implementation but for near ties of the sum.
    temperature 0 is the argmax, with log-prob and entropy at temperature 1. top_k (int64, 0: off) keeps the k likeliest, the
    lower index first among equals; top_p (1: off) then the smallest set whose renormalised mass reaches it. A row with NaN
    has log-prob NaN.
    """
    checks.sample(logits_SV, seed_S, position_S, temperature_S, top_k_S, top_p_S)
    which = choose("sample", impl, logits_SV, truncated=top_k_S is not None or top_p_S is not None)
    rows = [x if x is None else x.contiguous() for x in (seed_S, position_S, temperature_S, top_k_S, top_p_S)]
    return _module(which, "sample").sample(logits_SV.contiguous(), *rows)


@torch.no_grad()
def linear_sample(hidden_SD: Tensor, weight_VD: Tensor, seed_S: Tensor, position_S: Tensor, temperature_S: Tensor,
                  top_k_S: Tensor | None = None, top_p_S: Tensor | None = None,
                  impl: str = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """sample(hidden @ weight.T, ...) with logits in fp32; without truncation, Triton needs no logits in memory."""
    checks.head(hidden_SD, weight_VD, seed_S, 1.0)
    if top_k_S is not None or top_p_S is not None:
        logits_SV = linear(hidden_SD, weight_VD) if hidden_SD.dtype == torch.float32 else product(hidden_SD, weight_VD.T)
        return sample(logits_SV, seed_S, position_S, temperature_S, top_k_S, top_p_S, impl)
    checks.sample(hidden_SD, seed_S, position_S, temperature_S, None, None)
    which = choose("linear_sample", impl, hidden_SD)
    inputs = [x.contiguous() for x in (hidden_SD, weight_VD, seed_S, position_S, temperature_S)]
    return _module(which, "sample").linear_sample(*inputs)


def choose(kernel: str, impl: str, x: Tensor, truncated: bool = False, wants_grad: bool = False) -> str:
    """The implementation that runs `kernel` on x: what impl names, or what "auto" means for x. truncated: with top-k or top-p,
    where the CUDA op comes before Triton; wants_grad: a gradient may be asked for, which some of the C++ ops do not have."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}; it has to be one of {', '.join(IMPLEMENTATIONS)}")
    if impl != "auto":
        why = _missing(kernel, impl, x, wants_grad)
        if why:
            raise ValueError(f"impl {impl!r} cannot run {kernel} here: {why}; use auto or torch")
        return impl
    wanted = os.environ.get("TOOLR0_KERNELS") or "auto"
    if wanted not in IMPLEMENTATIONS:
        raise ValueError(f"TOOLR0_KERNELS is {wanted!r}; it has to be one of {', '.join(IMPLEMENTATIONS)}")
    order = (wanted,) if wanted != "auto" else ("cpp", "triton") if truncated and x.is_cuda else ("triton", "cpp")
    return next((name for name in order if name == "torch" or not _missing(kernel, name, x, wants_grad)), "torch")


def describe(device: torch.device | str) -> str:
    """One line: what "auto" runs on this device, and why."""
    device = torch.device(device)
    wanted = os.environ.get("TOOLR0_KERNELS") or "auto"
    chosen = choose("linear_logprob", "auto", torch.empty(0, device=device))
    why = f"TOOLR0_KERNELS={wanted}" if wanted != "auto" else f"the device is {device.type}"
    slower = ""
    if wanted not in ("auto", chosen):
        slower = f"; {wanted} cannot run: {_missing('linear_logprob', wanted, torch.empty(0, device=device))}"
    if chosen == "torch" and wanted == "auto":
        name = "cpp" if device.type == "cpu" else "triton"
        missing = _missing("linear_logprob", name, torch.empty(0, device=device))
        slower = f"; {name} would be faster, but {missing}: log-probs, loss, sampling and decoding run slower"
    return f"kernels: {chosen} ({why}{slower})"


def _missing(kernel: str, impl: str, x: Tensor, wants_grad: bool = False) -> str | None:
    """Why this implementation cannot run, or None."""
    if impl == "torch":
        return None
    if x.dtype == torch.float64:
        return "it has no fp64"
    if impl == "cpp":
        if kernel in FORWARD_ONLY and (wants_grad or x.dtype != torch.float32):
            return f"the C++ version is fp32 without gradients, not {x.dtype}{' with them' if wants_grad else ''}"
        if kernel == "write_kv" and x.dtype != torch.float32:
            return f"the C++ version is fp32, not {x.dtype}"
        if kernel == "decode_attention" and (x.dtype != torch.float32 or x.shape[-1] not in cpp.HEAD_SIZES):
            return f"the C++ version is fp32 with head size {cpp.HEAD_SIZES}, not {x.dtype} with head size {x.shape[-1]}"
        if x.is_cuda and kernel == "sample":
            return None if cpp.cuda_ops else "the CUDA op was not built; `pip install -e .` with CUDA's torch and nvcc does"
        if x.device.type != "cpu":
            return f"the C++ ops run on the CPU and this tensor is on {x.device}"
        return cpp.problem and f"the C++ ops were not built ({cpp.problem}); `pip install -e .` with a C++ compiler builds them"
    if kernel in NO_TRITON:
        return "it has no Triton version"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not x.is_cuda and not interpreted:
        return f"Triton runs on NVIDIA GPUs and this tensor is on {x.device}"
    return None if importlib.util.find_spec("triton") else "the package triton is not installed"


def _wants_grad(*inputs: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def _module(which: str, family: str):
    return {"cpp": cpp, "torch": reference}.get(which) or importlib.import_module(f"toolr0_kernels.gpu.{family}")
