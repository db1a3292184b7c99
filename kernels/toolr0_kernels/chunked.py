"""The head in chunks of rows: matrix products by BLAS, and kernels that pass over a chunk's rows of logits.

Scoring keeps nothing of the logits; where a gradient is wanted later, they are computed once more, chunk by chunk. Training
does not need that: the weight of every token in the final sum is known before the forward, so a row's loss, its slope and its
dlogits follow from the row's logits while those are at hand, and dX = dlogits W and dW += dlogits' X while the chunk is in
memory. That is three matrix products of 2 N V D operations, where a backward of its own makes four. Rows of weight 0 take no
part in them.

What differs between implementations comes as functions: `score` (log-prob, entropy, log-sum-exp of hidden states), `dlogits`
and `loss` (both turn a chunk's logits into their gradient and return it, in place where they can).

Shape suffixes: N rows, L rows that have a gradient, D hidden, V vocabulary, K the rows of GIVEN or RESULTS.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

GIVEN = ("weight", "advantage", "is_weight", "low", "high", "old_logp", "ref_logp")  # rows of given_KN, fp32
RESULTS = ("loss", "ratio", "clipped_low", "clipped_high", "logp", "entropy", "kl")  # rows of results_KN, fp32
Score = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor | None, Tensor]]


class LinearLogprob(torch.autograd.Function):
    """score, with a gradient. dlogits(logits_LV, target_L, by_3L, temperature, half) -> the logits' gradient, where by_3L holds
    the upstream gradients of logp, entropy and lse; half: the dtype it may have."""

    @staticmethod
    def forward(ctx, hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float, entropy: bool, score: Score,
                dlogits: Callable, chunk_bytes: int):
        ctx.save_for_backward(hidden_ND, weight_VD, target_N)
        ctx.temperature, ctx.dlogits, ctx.chunk_bytes = temperature, dlogits, chunk_bytes
        ctx.set_materialize_grads(False)
        return score(hidden_ND, weight_VD, target_N, temperature, entropy)

    @staticmethod
    @once_differentiable
    def backward(ctx, *by: Tensor | None):
        hidden_ND, weight_VD, target_N = ctx.saved_tensors
        by_3N = torch.stack([torch.zeros_like(target_N, dtype=torch.float32) if x is None else x.float() for x in by])
        live_L = (by_3N != 0).any(0).nonzero()[:, 0]
        power = safe_power(by_3N)
        by_3L, target_L = by_3N[:, live_L] * power, target_N[live_L]

        def dlogits(logits_LV: Tensor, rows: slice) -> Tensor:
            return ctx.dlogits(logits_LV, target_L[rows], by_3L[:, rows].contiguous(), ctx.temperature, hidden_ND.dtype)

        d_hidden_LD, d_weight_VD = through_logits(hidden_ND[live_L], weight_VD, dlogits, ctx.chunk_bytes,
                                                  *ctx.needs_input_grad[:2])
        d_hidden_ND = None
        if d_hidden_LD is not None:
            d_hidden_ND = torch.zeros_like(hidden_ND)
            d_hidden_ND[live_L] = d_hidden_LD.div_(power).to(hidden_ND.dtype)
        d_weight_VD = None if d_weight_VD is None else torch.div(d_weight_VD, power, out=torch.empty_like(weight_VD))
        return d_hidden_ND, d_weight_VD, None, None, None, None, None, None


def linear_grpo_loss(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, advantage_N: Tensor, weight_N: Tensor,
                     old_logp_N: Tensor | None, ref_logp_N: Tensor | None, is_weight_N: Tensor | None, beta: float,
                     clip_low: float | Tensor, clip_high: float | Tensor, temperature: float, score: Score, loss: Callable,
                     chunk_bytes: int) -> tuple[Tensor, dict[str, Tensor]]:
    """See dispatch.linear_grpo_loss. loss(logits_LV, target_L, given_KL, results_KL, power, half, has_old, has_ref, beta,
    temperature) fills results and returns the gradient of power * sum(weight * loss)."""
    columns = (weight_N, advantage_N, 1.0 if is_weight_N is None else is_weight_N, 1 - clip_low, 1 + clip_high,
               0.0 if old_logp_N is None else old_logp_N, 0.0 if ref_logp_N is None else ref_logp_N)
    given_KN = torch.empty(len(GIVEN), len(target_N), dtype=torch.float32, device=hidden_ND.device)
    for column_N, value in zip(given_KN, columns):
        column_N.copy_(value.detach()) if isinstance(value, Tensor) else column_N.fill_(value)
    options = (old_logp_N is not None, ref_logp_N is not None, float(beta), temperature)
    if torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad):
        total, results_KN = _LinearGrpoLoss.apply(hidden_ND, weight_VD, target_N, given_KN, options, score, loss, chunk_bytes)
    else:
        results_KN = _without_gradient(hidden_ND.detach(), weight_VD.detach(), target_N, given_KN, options, score)
        total = _total(results_KN, given_KN)
    results = dict(zip(RESULTS, results_KN))
    return total, {name: results[name] for name in RESULTS[1:] if name != "kl" or ref_logp_N is not None}


class _LinearGrpoLoss(torch.autograd.Function):
    """(sum of weight * loss, results of every row); gradients are made in the forward and scaled in the backward."""

    @staticmethod
    def forward(ctx, hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, given_KN: Tensor, options: tuple, score: Score,
                loss: Callable, chunk_bytes: int):
        N = len(target_N)
        live_L, idle = live_first(given_KN[0])
        whole = len(live_L) == N
        hidden_LD, target_L, given_KL = (hidden_ND, target_N, given_KN) if whole else \
            (hidden_ND[live_L], target_N[live_L], given_KN.index_select(1, live_L))
        results_KL = torch.empty(len(RESULTS), len(target_L), dtype=torch.float32, device=hidden_ND.device)
        power = safe_power(given_KL[0])

        def dlogits(logits_LV: Tensor, rows: slice) -> Tensor:
            return loss(logits_LV, target_L[rows], given_KL[:, rows], results_KL[:, rows], power, hidden_ND.dtype, *options)

        d_hidden_LD, d_weight_VD = through_logits(hidden_LD, weight_VD, dlogits, chunk_bytes, *ctx.needs_input_grad[:2])
        results_KN = results_KL
        if not whole:
            results_KN = results_KL.new_empty(len(RESULTS), N)
            results_KN[:, live_L] = results_KL
            results_KN[:, idle] = _without_gradient(hidden_ND[idle], weight_VD, target_N[idle], given_KN[:, idle], options,
                                                    score)
        ctx.save_for_backward(d_hidden_LD, d_weight_VD, power, None if whole else live_L)
        ctx.like = hidden_ND.shape, hidden_ND.dtype, weight_VD.dtype
        ctx.mark_non_differentiable(results_KN)
        return _total(results_KL, given_KL), results_KN

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor, _):
        d_hidden_LD, d_weight_VD, power, live_L = ctx.saved_tensors
        shape, dtype, weight_dtype = ctx.like
        factor = upstream.float().view(1) / power  # never read by the host; [1], see safe_power
        d_hidden_ND = d_weight = None
        if d_hidden_LD is not None:
            d_hidden_LD = torch.mul(d_hidden_LD, factor, out=torch.empty_like(d_hidden_LD, dtype=dtype))
            d_hidden_ND = d_hidden_LD if live_L is None else d_hidden_LD.new_zeros(shape).index_copy_(0, live_L, d_hidden_LD)
        if d_weight_VD is not None:
            d_weight = torch.mul(d_weight_VD, factor, out=torch.empty_like(d_weight_VD, dtype=weight_dtype))
        return d_hidden_ND, d_weight, None, None, None, None, None, None


def _without_gradient(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, given_KN: Tensor, options: tuple,
                      score: Score) -> Tensor:
    """Results of these rows from their scores."""
    from toolr0_core.grpo import token_loss  # the one definition of the loss; grpo imports this package

    has_old, has_ref, beta, temperature = options
    logp_N, entropy_N, _ = score(hidden_ND, weight_VD, target_N, temperature, True)
    given = dict(zip(GIVEN, given_KN))
    loss_N, stats = token_loss(logp_N, given["old_logp"] if has_old else None, given["advantage"],
                               given["ref_logp"] if has_ref else None, beta, 1 - given["low"], given["high"] - 1,
                               given["is_weight"])
    results = {"loss": loss_N, "logp": logp_N, "entropy": entropy_N, "kl": torch.zeros_like(logp_N), **stats}
    return torch.stack([results[name] for name in RESULTS])


def live_first(weight_N: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the rows with weight, and of those without; the host looks once, at how many there are."""
    idle_N = weight_N == 0
    order_N, idle = idle_N.int().argsort(stable=True), int(idle_N.sum())
    return order_N[: len(order_N) - idle], order_N[len(order_N) - idle:]


def _total(results_KN: Tensor, given_KN: Tensor) -> Tensor:
    weight_N = given_KN[0]
    return torch.where(weight_N != 0, weight_N * results_KN[0], 0.0).sum()


def safe_power(by: Tensor) -> Tensor:
    """A power of two, fp32 [1], that brings the largest of these factors near 1, where fp16 gradients of logits do not
    underflow. Not a scalar: torch would turn one into fp16 where it meets fp16."""
    return torch.exp2(-by.abs().max().log2().floor().clamp(-100, 100)).view(1) if by.numel() else by.new_ones(1)


def through_logits(hidden_ND: Tensor, weight_VD: Tensor, dlogits: Callable[[Tensor, slice], Tensor], chunk_bytes: int,
                   d_hidden: bool, d_weight: bool) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden and weight in fp32, chunk by chunk, with dlogits(logits, rows) the logits' gradient. Whoever calls
    scales the results, and rounds them once."""
    (N, D), V = hidden_ND.shape, weight_VD.shape[0]
    hidden_ND, weight_VD = widened(hidden_ND), widened(weight_VD)
    step = max(1, chunk_bytes // (4 * V))
    step -= step % 128 if step > 128 else 0
    logits_CV = hidden_ND.new_empty(min(step, N), V, dtype=torch.float32)  # every chunk's
    d_hidden_ND = hidden_ND.new_empty(N, D, dtype=torch.float32) if d_hidden else None
    d_weight_VD = weight_VD.new_zeros(V, D, dtype=torch.float32) if d_weight and not N else None
    for start in range(0, N, step):
        rows = slice(start, min(start + step, N))
        d_NV = dlogits(product(hidden_ND[rows], weight_VD.T, out=logits_CV[: rows.stop - start]), rows)
        if d_hidden:
            product(d_NV, weight_VD, out=d_hidden_ND[rows])
        if d_weight:  # the first chunk's product is the sum so far: no filling with zeros
            d_weight_VD = product(d_NV.T, hidden_ND[rows], d_weight_VD, d_weight_VD)
    return d_hidden_ND, d_weight_VD


def widened(x: Tensor) -> Tensor:
    """fp32 on a CPU, whose half-precision products are slower, and not summed in fp32."""
    return x if x.is_cuda else x.float()


def product(a: Tensor, b: Tensor, total: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """total + a @ b with fp32 sums and an fp32 result, written to out (which may be total)."""
    dtype = {"out_dtype": torch.float32} if a.dtype != torch.float32 and a.is_cuda else {}
    a, b = widened(a), widened(b)
    return torch.mm(a, b, **dtype, out=out) if total is None else torch.addmm(total, a, b, **dtype, out=out)
