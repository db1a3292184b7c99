"""Plain torch: what each kernel computes, and what runs where no kernel does.

Shape suffixes: N rows (tokens), S sequences, D hidden, V vocabulary, H query heads, K key/value heads, E head size, F half
of it, P pages of B tokens, M pages a sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from toolr0_core.rng import uniform
from toolr0_kernels.chunked import live_first

CHUNK_BYTES = 1 << 28  # logits that exist at once, fp32


def linear_logprob(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float = 1.0,
                   entropy: bool = True) -> tuple[Tensor, Tensor | None, Tensor]:
    """logp, entropy where asked for, lse (dispatch.linear_logprob). Rows go in chunks; with several, a chunk's logits are
    recomputed in the backward."""
    rows = max(1, CHUNK_BYTES // (4 * weight_VD.shape[0]))
    if len(target_N) <= rows:
        parts = [_chunk(hidden_ND, weight_VD, target_N, temperature, entropy)]
    else:
        parts = [checkpoint(_chunk, hidden, weight_VD, target, temperature, entropy, use_reentrant=False)
                 for hidden, target in zip(hidden_ND.split(rows), target_N.split(rows))]
    logp_N, lse_N, *entropy_N = (torch.cat(x) for x in zip(*parts))
    return logp_N, entropy_N[0] if entropy else None, lse_N


def linear_grpo_loss(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, advantage_N: Tensor, weight_N: Tensor,
                     old_logp_N: Tensor | None = None, ref_logp_N: Tensor | None = None, is_weight_N: Tensor | None = None,
                     beta: float = 0.0, clip_low: float | Tensor = 0.2, clip_high: float | Tensor = 0.2,
                     temperature: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """See dispatch.linear_grpo_loss. Rows of weight 0 are taken out first: 0 times NaN would be NaN."""
    from toolr0_core.grpo import token_loss  # the one definition of the loss; grpo imports this package

    def run(index_L: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        pick = lambda x: x.detach()[index_L] if isinstance(x, Tensor) and x.ndim else x  # noqa: E731
        logp_L, entropy_L, _ = linear_logprob(hidden_ND[index_L], weight_VD, target_N[index_L], temperature)
        loss_L, stats = token_loss(logp_L, *map(pick, (old_logp_N, advantage_N, ref_logp_N)), beta, pick(clip_low),
                                   pick(clip_high), pick(is_weight_N))
        return (pick(weight_N) * loss_L).sum(), stats | {"logp": logp_L.detach(), "entropy": entropy_L.detach()}

    live, idle = live_first(weight_N)
    loss, stats = run(live)
    with torch.no_grad():
        _, rest = run(idle)
    back_N = torch.cat((live, idle)).argsort()
    return loss, {name: torch.cat((stats[name], rest[name]))[back_N] for name in stats}


def _chunk(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, ...]:
    """log-prob, log-sum-exp and, where asked for, entropy of these rows."""
    logits_NV = _linear(hidden_ND, weight_VD) / temperature
    lse_N = logits_NV.logsumexp(-1)
    logp_N = logits_NV.gather(-1, target_N[:, None])[:, 0] - lse_N
    if not entropy:
        return logp_N, lse_N
    surprise_NV = lse_N[:, None] - logits_NV  # no term is negative; lse - mean logit would cancel
    return logp_N, lse_N, (logits_NV.softmax(-1) * surprise_NV).sum(-1)


def _linear(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """Logits in fp32, or in fp64 where the operands are."""
    if hidden_ND.dtype in (torch.bfloat16, torch.float16):
        return _LinearFp32.apply(hidden_ND, weight_VD)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        return F.linear(hidden_ND, weight_VD)


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


def sample(logits_SV: Tensor, seed_S: Tensor, position_S: Tensor, temperature_S: Tensor, top_k_S: Tensor | None = None,
           top_p_S: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """See dispatch.sample: inverse CDF with one counter-based uniform a row, in fp64 sums."""
    greedy_S1 = (temperature_S == 0)[:, None]
    below_SV = _wide(logits_SV) - logits_SV.amax(-1, keepdim=True)  # exact, whatever is added to all logits
    logp_SV = (below_SV / torch.where(temperature_S == 0, 1.0, temperature_S)[:, None]).log_softmax(-1)
    if top_k_S is not None or top_p_S is not None:
        off_S = torch.zeros_like(position_S)
        top_k_S = off_S if top_k_S is None else top_k_S.masked_fill(greedy_S1[:, 0], 0)
        top_p_S = off_S + 1.0 if top_p_S is None else top_p_S.masked_fill(greedy_S1[:, 0], 1.0)
        logp_SV = truncate(logp_SV, top_k_S, top_p_S)
    p_SV = logp_SV.exp()
    cdf_SV = p_SV.cumsum(-1, dtype=torch.float64)
    u_S1 = (uniform(seed_S, position_S) * cdf_SV[:, -1])[:, None]
    token_S1 = torch.searchsorted(cdf_SV, u_S1, right=True).clamp_(max=p_SV.shape[1] - 1)  # out of range only for NaN
    token_S1 = torch.where(greedy_S1, logits_SV.argmax(-1, keepdim=True), token_S1)
    entropy_S = -(p_SV * logp_SV.clamp(min=torch.finfo(torch.float32).min)).sum(-1)  # 0 log 0 is 0
    return token_S1[:, 0], logp_SV.gather(1, token_S1)[:, 0], entropy_S


def truncate(logp_SV: Tensor, top_k_S: Tensor, top_p_S: Tensor) -> Tensor:
    """Log-probs renormalised over the top k (0: all), then over the smallest set whose mass reaches top_p."""
    ordered, index = logp_SV.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logp_SV.shape[1], device=logp_SV.device)
    keep = (rank < top_k_S[:, None]) | (top_k_S[:, None] == 0)
    ordered = ordered.masked_fill(~keep, -torch.inf).log_softmax(-1)
    mass = ordered.exp()
    keep &= ((mass.cumsum(-1) - mass) < top_p_S[:, None]) | (top_p_S[:, None] >= 1)  # 1 is off, whatever the rounding
    ordered = ordered.masked_fill(~keep, -torch.inf).log_softmax(-1)
    return torch.empty_like(logp_SV).scatter_(1, index, ordered)


def linear_sample(hidden_SD: Tensor, weight_VD: Tensor, seed_S: Tensor, position_S: Tensor,
                  temperature_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See dispatch.linear_sample; the logits do exist here."""
    return sample(_linear(hidden_SD, weight_VD), seed_S, position_S, temperature_S)


def linear(x: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias."""
    return F.linear(x, weight_FD, bias_F)


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float = 1e-6) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps); the mean in fp32, as in every model of the families that model.py knows."""
    x32 = _wide(x_ND)
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight_D * x32.to(x_ND.dtype)


def _wide(x: Tensor) -> Tensor:
    """fp32 for what is narrower."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def add_rms_norm(x_ND: Tensor, residual_ND: Tensor, weight_D: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    total_ND = x_ND + residual_ND
    return rms_norm(total_ND, weight_D, eps), total_ND


def rope(q_NHE: Tensor, k_NKE: Tensor, cos_NF: Tensor, sin_NF: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates pairs (i, i + E/2), the layout of Hugging Face's weights; cos and sin hold the angles of half a head."""
    def rotate(x: Tensor) -> Tensor:
        first, second = _wide(x).chunk(2, dim=-1)
        cos, sin = cos_NF[:, None], sin_NF[:, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
    return rotate(q_NHE), rotate(k_NKE)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


def write_kv(k_SKE: Tensor, v_SKE: Tensor, k_cache_PKBE: Tensor, v_cache_PKBE: Tensor, page_S: Tensor,
             offset_S: Tensor) -> None:
    """See dispatch.write_kv."""
    k_cache_PKBE[page_S, :, offset_S] = k_SKE
    v_cache_PKBE[page_S, :, offset_S] = v_SKE


def decode_attention(q_SHE: Tensor, k_cache_PKBE: Tensor, v_cache_PKBE: Tensor, table_SM: Tensor, length_S: Tensor,
                     scale: float | None = None) -> Tensor:
    """See dispatch.decode_attention: every sequence's pages gathered into a rectangle, the rest masked."""
    S, H, E = q_SHE.shape
    K, B = k_cache_PKBE.shape[1:3]
    used_SM = torch.arange(table_SM.shape[1], device=q_SHE.device) * B < length_S[:, None]
    pages_SM = table_SM.where(used_SM, 0).long()
    k_SKTE, v_SKTE = (_wide(cache[pages_SM].transpose(1, 2).flatten(2, 3)) for cache in (k_cache_PKBE, v_cache_PKBE))
    hidden_ST = torch.arange(k_SKTE.shape[2], device=q_SHE.device) >= length_S[:, None]
    q_SKGE = _wide(q_SHE).unflatten(1, (K, H // K)) * (E ** -0.5 if scale is None else scale)
    scores_SKGT = (q_SKGE @ k_SKTE.transpose(-1, -2)).masked_fill(hidden_ST[:, None, None], -torch.inf)
    weights_SKGT = scores_SKGT.softmax(-1).masked_fill(hidden_ST[:, None, None], 0)  # no key: zeros, not NaN
    v_SKTE = v_SKTE.masked_fill(hidden_ST[:, None, :, None], 0)  # what is masked may be NaN
    return (weights_SKGT @ v_SKTE).flatten(1, 2).to(q_SHE.dtype)
