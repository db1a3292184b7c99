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
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}; it has to be one of {', '.join(IMPLEMENTATIONS)}")
    return reference.linear_logprob(hidden_ND, weight_VD, target_N, temperature, entropy, lse)
