"""The head in chunks of rows: matrix products by BLAS, and one kernel that passes over a chunk's rows of logits.

Logits of one chunk exist at a time, in one buffer that every chunk reuses. Scoring throws them away and, where a gradient is
wanted later, computes them again. Training does not: the weight of every token's loss is known before the forward, so dlogits
are written over the logits as soon as the row's log-sum-exp is known, and dX = dlogits W and dW += dlogits' X follow while they
are in the cache. That is three matrix products of 2 N V D operations, and one more where logits are computed again.

Shape suffixes: N rows, D hidden, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The row kernels of one implementation, on logits [C, V] in fp32, and how many bytes of logits a chunk has.

    logprob(logits, target, temperature) -> logp, entropy, lse
    logprob_backward(logits, target, lse, entropy, grad_logp, grad_entropy, grad_lse, temperature) -> dlogits
    grpo_loss_(logits, target, advantage, weight, old_logp, ref_logp, importance, clip_low, clip_high, beta, temperature, grad)
        -> [8, C]: token loss and STATS; with grad, the logits become the gradient of sum(weight * loss)
    """

    chunk_bytes: int
    logprob: Callable[..., tuple[Tensor, Tensor, Tensor]]
    logprob_backward: Callable[..., Tensor]
    grpo_loss_: Callable[..., Tensor]


STATS = ("ratio", "clipped_low", "clipped_high", "kl", "logp", "entropy", "lse")  # rows 1 to 7 of what grpo_loss_ returns


class LinearLogprob(torch.autograd.Function):
    """(logp, entropy, lse) of every row; the backward drops rows whose gradients are all 0."""

    @staticmethod
    def forward(ctx, hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float, rows: Rows):
        products = _Products(hidden_ND, weight_VD, rows)
        parts = [rows.logprob(products.logits(chunk), target_N[chunk], temperature) for chunk in products.chunks(len(target_N))]
        logp_N, entropy_N, lse_N = (torch.cat(x) for x in zip(*parts))
        ctx.save_for_backward(hidden_ND, weight_VD, target_N, entropy_N, lse_N)
        ctx.temperature, ctx.rows = temperature, rows
        return logp_N, entropy_N, lse_N

    @staticmethod
    def backward(ctx, *grads: Tensor):
        hidden_ND, weight_VD, target_N, entropy_N, lse_N = ctx.saved_tensors
        live_M = torch.stack(grads).ne(0).any(0).nonzero()[:, 0]
        target_M, entropy_M, lse_M, *grads = (x[live_M].contiguous() for x in (target_N, entropy_N, lse_N, *grads))
        products = _Products(hidden_ND[live_M], weight_VD, ctx.rows, *ctx.needs_input_grad[:2])
        for chunk in products.chunks(len(live_M)):
            products.backward(chunk, ctx.rows.logprob_backward(
                products.logits(chunk), target_M[chunk], lse_M[chunk], entropy_M[chunk], *(g[chunk] for g in grads),
                ctx.temperature))
        return *products.grads(live_M, len(target_N)), None, None, None


def linear_grpo_loss(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, advantage_N: Tensor, weight_N: Tensor,
                     old_logp_N: Tensor | None, ref_logp_N: Tensor | None, is_weight_N: Tensor | None, beta: float,
                     clip_low: float | Tensor, clip_high: float | Tensor, temperature: float,
                     rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
    """See dispatch.linear_grpo_loss."""
    per_row = [None if x is None else torch.as_tensor(x, dtype=torch.float32, device=hidden_ND.device).detach()
               .expand(len(target_N)).contiguous()
               for x in (advantage_N, weight_N, old_logp_N, ref_logp_N, is_weight_N, clip_low, clip_high)]
    loss, stats_8N = _LinearGrpoLoss.apply(hidden_ND, weight_VD, target_N, per_row, beta, temperature, rows)
    stats = dict(zip(STATS, stats_8N[1:]))
    return loss, {name: stats[name] for name in STATS if name != "lse" and (name != "kl" or ref_logp_N is not None)}


class _LinearGrpoLoss(torch.autograd.Function):
    """(sum of weight * loss, statistics [8, N]); gradients are made in the forward and scaled in the backward."""

    @staticmethod
    def forward(ctx, hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, per_row: list[Tensor | None], beta: float,
                temperature: float, rows: Rows):
        weight_N, N = per_row[1], len(target_N)
        stats_8N = hidden_ND.new_empty(8, N, dtype=torch.float32)
        wanted = ctx.needs_input_grad[:2]
        for live in (True, False):
            index_M = (weight_N != 0 if live else weight_N == 0).nonzero()[:, 0]
            grad = live and any(wanted)
            products = _Products(hidden_ND[index_M], weight_VD, rows, *(w and live for w in wanted))
            target_M, *per_row_M = (None if x is None else x[index_M] for x in (target_N, *per_row))
            for chunk in products.chunks(len(index_M)):
                logits = products.logits(chunk)
                stats_8N[:, index_M[chunk]] = rows.grpo_loss_(
                    logits, target_M[chunk], *(None if x is None else x[chunk] for x in per_row_M), beta, temperature, grad)
                if grad:
                    products.backward(chunk, logits)
            if live:
                ctx.save_for_backward(*(g for g in products.grads(index_M, N) if g is not None))
        ctx.wanted = wanted
        ctx.mark_non_differentiable(stats_8N)
        return torch.where(weight_N == 0, 0, weight_N * stats_8N[0]).sum(), stats_8N

    @staticmethod
    def backward(ctx, grad: Tensor, _):
        saved = iter(ctx.saved_tensors)
        return *(next(saved) * grad if wanted else None for wanted in ctx.wanted), None, None, None, None, None


class _Products:
    """The matrix products of a head: logits of a chunk, and what a chunk's dlogits add to the gradients."""

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, rows: Rows, dhidden: bool = False, dweight: bool = False):
        self.dtypes = hidden_ND.dtype, weight_VD.dtype
        self.hidden_ND, self.weight_VD = hidden_ND.float(), weight_VD.float()
        self.size = max(1, rows.chunk_bytes // (4 * len(weight_VD)))
        self.buffer = hidden_ND.new_empty(min(self.size, len(hidden_ND)), len(weight_VD), dtype=torch.float32)
        self.dhidden_ND = torch.empty_like(self.hidden_ND) if dhidden else None
        self.dweight_VD = torch.zeros_like(self.weight_VD) if dweight else None

    def chunks(self, rows: int) -> list[slice]:
        return [slice(i, min(i + self.size, rows)) for i in range(0, rows, self.size)]

    def logits(self, chunk: slice) -> Tensor:
        return torch.mm(self.hidden_ND[chunk], self.weight_VD.T, out=self.buffer[: chunk.stop - chunk.start])

    def backward(self, chunk: slice, dlogits_CV: Tensor) -> None:
        if self.dhidden_ND is not None:
            torch.mm(dlogits_CV, self.weight_VD, out=self.dhidden_ND[chunk])
        if self.dweight_VD is not None:
            self.dweight_VD.addmm_(dlogits_CV.T, self.hidden_ND[chunk])

    def grads(self, index_M: Tensor, rows: int) -> tuple[Tensor | None, Tensor | None]:
        """Of all rows, those outside index_M 0, in the operands' dtypes."""
        dhidden_ND = self.dhidden_ND
        if dhidden_ND is not None:
            dhidden_ND = dhidden_ND.to(self.dtypes[0])
            if len(index_M) != rows:
                dhidden_ND = dhidden_ND.new_zeros(rows, dhidden_ND.shape[1]).index_copy_(0, index_M, dhidden_ND)
        return dhidden_ND, None if self.dweight_VD is None else self.dweight_VD.to(self.dtypes[1])
