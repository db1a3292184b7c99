"""The new keys and values of a step into the paged cache, on a GPU: both in one launch.

Traffic. Every number is read once and written once. One program is one row: its heads are a tile [K, E] that lies together in
the input and one stretch of E a head in the cache. A place that is not there is not written, since looking would wait.

Shape suffixes: S rows, P pages of B tokens, K key heads, E head size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from toolr0_kernels.gpu.variants import Variant, aligned


@triton.jit
def _write_kernel(k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, page_ptr, offset_ptr, P, K: tl.constexpr, B: tl.constexpr,
                  E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    page, offset = tl.load(page_ptr + row), tl.load(offset_ptr + row)
    head_K, col_E = tl.arange(0, BLOCK_K)[:, None], tl.arange(0, BLOCK_E)[None, :]
    heads = tl.where((page >= 0) & (page < P) & (offset >= 0) & (offset < B), K, 0)
    mask_KE = (head_K < heads) & (col_E < E)
    from_KE = row * K * E + head_K * E + col_E
    to_KE = ((page * K + head_K) * B + offset) * E + col_E
    tl.store(k_cache_ptr + to_KE, tl.load(k_ptr + from_KE, mask=mask_KE), mask=mask_KE)
    tl.store(v_cache_ptr + to_KE, tl.load(v_ptr + from_KE, mask=mask_KE), mask=mask_KE)


def write_kv(k_SKE: Tensor, v_SKE: Tensor, k_cache_PKBE: Tensor, v_cache_PKBE: Tensor, page_S: Tensor,
             offset_S: Tensor) -> None:
    """See dispatch.write_kv."""
    (S, K, E), (P, _, B, _) = k_SKE.shape, k_cache_PKBE.shape
    if S:
        sizes, warps = blocks(K, E)
        _write_kernel[(S,)](k_SKE, v_SKE, k_cache_PKBE, v_cache_PKBE, page_S.contiguous(), offset_S.contiguous(), P, K, B, E,
                            **sizes, num_warps=warps)


def blocks(K: int, E: int) -> tuple[dict[str, int], int]:
    """Block sizes and warps: four numbers or more a thread."""
    sizes = dict(BLOCK_K=triton.next_power_of_2(K), BLOCK_E=triton.next_power_of_2(E))
    return sizes, max(1, min(4, sizes["BLOCK_K"] * sizes["BLOCK_E"] // 128))


def variants() -> list[Variant]:
    heads = {"Qwen2.5-0.5B": (2, 64), "Qwen2.5-1.5B": (2, 128), "SmolLM2": (3, 64), "Llama-3.2-3B": (8, 128)}
    return [_variant(dtype, model, *shape) for dtype in ("bf16", "fp32") for model, shape in heads.items()]


def _variant(dtype: str, model: str, K: int, E: int, S: int = 256, B: int = 64) -> Variant:
    (sizes, warps), size = blocks(K, E), 2 if dtype == "bf16" else 4
    signature = {name: f"*{dtype}" for name in ("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr")}
    signature |= dict(page_ptr="*i64", offset_ptr="*i64", P="i32")
    constants = dict(K=K, B=B, E=E, **sizes)
    signature |= dict.fromkeys(constants, "constexpr")
    moved = S * (4 * K * E * size + 16)
    return Variant(f"write_kv, {dtype}, {model}", _write_kernel, signature, constants, aligned(*range(6)), warps, moved=moved,
                   minimum=moved, shape=f"{S} rows, {K} heads of {E}")
