"""Plain torch: what each kernel computes, and what runs where no kernel does.

Shape suffixes: N rows (completion tokens), D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 1 << 28  # logits that exist at once, fp32


def linear_logprob(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float = 1.0,
                   entropy: bool = False, lse: bool = False, chunk_bytes: int = CHUNK_BYTES) -> Tensor | tuple[Tensor, ...]:
    """See dispatch.linear_logprob. Rows go in chunks; with several, a chunk's logits are recomputed in the backward."""
    rows = max(1, chunk_bytes // (4 * weight_VD.shape[0]))
    if len(target_N) <= rows:
        parts = [_chunk(hidden_ND, weight_VD, target_N, temperature, entropy)]
    else:
        parts = [checkpoint(_chunk, hidden, weight_VD, target, temperature, entropy, use_reentrant=False)
                 for hidden, target in zip(hidden_ND.split(rows), target_N.split(rows))]
    logp_N, lse_N, *entropy_N = (torch.cat(x) for x in zip(*parts))
    out = (logp_N, *entropy_N, *([lse_N] if lse else []))
    return out if len(out) > 1 else logp_N


def linear_grpo_loss(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, advantage_N: Tensor, weight_N: Tensor,
                     old_logp_N: Tensor | None = None, ref_logp_N: Tensor | None = None, is_weight_N: Tensor | None = None,
                     beta: float = 0.0, clip_low: float | Tensor = 0.2, clip_high: float | Tensor = 0.2,
                     temperature: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """See dispatch.linear_grpo_loss."""
    from toolr0_core.grpo import token_loss  # the one definition of the loss; grpo imports this package

    logp_N, entropy_N = linear_logprob(hidden_ND, weight_VD, target_N, temperature, entropy=True)
    loss_N, stats = token_loss(logp_N, old_logp_N, advantage_N, ref_logp_N, beta, clip_low, clip_high, is_weight_N)
    return (weight_N * loss_N).sum(), stats | {"logp": logp_N.detach(), "entropy": entropy_N.detach()}


def _chunk(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, ...]:
    """log-prob, log-sum-exp and, where asked for, entropy of these rows."""
    logits_NV = _LinearFp32.apply(hidden_ND, weight_VD) if hidden_ND.dtype in (torch.bfloat16, torch.float16) \
        else F.linear(hidden_ND, weight_VD).float()
    logits_NV = logits_NV / temperature
    lse_N = logits_NV.logsumexp(-1)
    logp_N = logits_NV.gather(-1, target_N[:, None])[:, 0] - lse_N
    if not entropy:
        return logp_N, lse_N
    surprise_NV = lse_N[:, None] - logits_NV  # no term is negative; lse - mean logit would cancel
    return logp_N, lse_N, (logits_NV.softmax(-1) * surprise_NV).sum(-1)


class _LinearFp32(torch.autograd.Function):
    """Half-precision operands, fp32 logits, as the sampler has them: rounded logits cost up to 0.02 nats a token. The backward
    products run in the operands' dtype."""

    @staticmethod
    def forward(ctx, hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD)
        if hidden_ND.is_cuda:
            return torch.mm(hidden_ND, weight_VD.T, out_dtype=torch.float32)
        return hidden_ND.float() @ weight_VD.float().T

    @staticmethod
    def backward(ctx, grad_NV: Tensor) -> tuple[Tensor, Tensor]:
        hidden_ND, weight_VD = ctx.saved_tensors
        grad_NV = grad_NV.to(hidden_ND.dtype)
        return grad_NV @ weight_VD, grad_NV.T @ hidden_ND
