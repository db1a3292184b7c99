"""Kernels under one signature each; `impl` chooses between implementations, "auto" the fastest that runs here."""

from toolr0_kernels.dispatch import (
    add_rms_norm,
    decode_attention,
    describe,
    linear,
    linear_grpo_loss,
    linear_logprob,
    linear_sample,
    rms_norm,
    rope,
    sample,
    swiglu,
    write_kv,
)

__all__ = ["add_rms_norm", "decode_attention", "describe", "linear", "linear_grpo_loss", "linear_logprob", "linear_sample", "rms_norm",
           "rope", "sample", "swiglu", "write_kv"]
