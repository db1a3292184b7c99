"""One dispatcher: which implementation of a kernel runs. Only plain torch exists so far."""

from __future__ import annotations

from torch import Tensor

from toolr0_kernels import reference

IMPLEMENTATIONS = ("auto", "torch")


def linear_logprob(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float = 1.0,
                   entropy: bool = False, lse: bool = False, impl: str = "auto") -> Tensor | tuple[Tensor, ...]:
    """log softmax(hidden @ weight.T / temperature)[target], fp32 [N], differentiable in hidden and weight.

    With entropy or lse, a tuple in the order logp, entropy, lse (all fp32 [N]). Raises ValueError for an unknown impl.
    """
    _check(impl)
    return reference.linear_logprob(hidden_ND, weight_VD, target_N, temperature, entropy, lse)


def linear_grpo_loss(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, advantage_N: Tensor, weight_N: Tensor,
                     old_logp_N: Tensor | None = None, ref_logp_N: Tensor | None = None, is_weight_N: Tensor | None = None,
                     beta: float = 0.0, clip_low: float | Tensor = 0.2, clip_high: float | Tensor = 0.2,
                     temperature: float = 1.0, impl: str = "auto") -> tuple[Tensor, dict[str, Tensor]]:
    """The scalar sum(weight * grpo.token_loss(linear_logprob(...), ...)), differentiable in hidden and weight.

    Statistics are those of grpo.token_loss and "logp" and "entropy", each detached, fp32, [N]. Raises ValueError for an
    unknown impl.
    """
    _check(impl)
    return reference.linear_grpo_loss(hidden_ND, weight_VD, target_N, advantage_N, weight_N, old_logp_N, ref_logp_N,
                                      is_weight_N, beta, clip_low, clip_high, temperature)


def _check(impl: str) -> None:
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}; it has to be one of {', '.join(IMPLEMENTATIONS)}")
