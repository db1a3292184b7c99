"""Kernels under one signature each; `impl` chooses between implementations, "auto" the fastest that runs here."""

from toolr0_kernels.dispatch import linear_grpo_loss, linear_logprob

__all__ = ["linear_grpo_loss", "linear_logprob"]
