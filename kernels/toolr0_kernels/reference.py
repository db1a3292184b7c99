"""Plain torch: what each kernel computes, and what runs where no kernel does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 1 << 28  # logits that exist at once, fp32


def linear_logprob(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float = 1.0,
                   entropy: bool = False, lse: bool = False, chunk_bytes: int = CHUNK_BYTES):
    """See dispatch.linear_logprob. Rows go in chunks; with several, a chunk's logits are recomputed in the backward."""
    rows = max(1, chunk_bytes // (4 * weight_VD.shape[0]))
    if len(target_N) <= rows:
        parts = [_chunk(hidden_ND, weight_VD, target_N, temperature)]
    else:
        parts = [checkpoint(_chunk, hidden, weight_VD, target, temperature, use_reentrant=False)
                 for hidden, target in zip(hidden_ND.split(rows), target_N.split(rows))]
    logp_N, entropy_N, lse_N = (torch.cat(x) for x in zip(*parts))
    out = (logp_N, *([entropy_N] if entropy else []), *([lse_N] if lse else []))
    return out if len(out) > 1 else logp_N


def _chunk(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    logits_NV = F.linear(hidden_ND, weight_VD).float() / temperature
    lse_N = logits_NV.logsumexp(-1)
    logp_N = logits_NV.gather(-1, target_N[:, None])[:, 0] - lse_N
    entropy_N = lse_N - (logits_NV.softmax(-1) * logits_NV).sum(-1)
    return logp_N, entropy_N, lse_N
