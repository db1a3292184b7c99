"""Attention of one new token per sequence over a paged cache, on a GPU.

Formula. out = softmax(scale q K') V over the keys and values that a sequence's pages hold. Parts of a sequence are summed
apart, each relative to its own largest score m: l = sum e^(s - m) and a = sum e^(s - m) v; they merge by rescaling to the
largest of their m, in a fixed order.

Traffic. Every live key and value is read once, 2 length E numbers a sequence and key head, and that is nearly all: it is
what bounds the kernel. So the H / K query heads of a key head share its loads (padded to 16 rows, the smallest that tensor
cores take: products are free here), and long sequences are split, since S x K programs alone leave most multiprocessors idle
at small batches. A split is a stretch of the sequence; each writes (m, l, a) of its query heads, little next to what it read.

Programs run in the order of sequences. Samples of one prompt, which share its pages, belong next to each other: they then read
the same keys at the same time, and all but the first find them in the L2 cache. That is all there is to prefix sharing here.

Shape suffixes: S sequences, H query heads, K key heads, G = H / K, E head size, B tokens of a page, M pages of a table row,
T tokens of a tile, C splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolr0_kernels.gpu.rows import INTERPRETED, LOG2E, LOWEST
from toolr0_kernels.gpu.variants import Variant, aligned, multiprocessors

TILE = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 32}  # tokens; 64 of 128 fp32 numbers spill
SHORTEST = 256  # tokens: a sequence has at most one split for each


@triton.jit
def _split_kernel(q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, partial_ptr, sums_ptr, M, scale, split_tokens, splits,
                  K: tl.constexpr, G: tl.constexpr, E: tl.constexpr, B: tl.constexpr, BLOCK_G: tl.constexpr,
                  BLOCK_E: tl.constexpr, TILE: tl.constexpr):
    """a, m and l of the G query heads of one key head over one split of one sequence."""
    program = tl.program_id(0)
    split, head, sequence = program % splits, program // splits % K, (program // splits // K).to(tl.int64)
    length = tl.load(length_ptr + sequence)
    row_G, col_E, place_T = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E), tl.arange(0, TILE)
    inside_E = col_E < E
    q_at = (sequence * K + head) * G * E
    mask_GE = (row_G[:, None] < G) & inside_E[None, :]
    q_GE = tl.load(q_ptr + q_at + row_G[:, None] * E + col_E[None, :], mask=mask_GE, other=0.0)

    m_G = tl.full((BLOCK_G,), LOWEST, tl.float32)
    l_G = tl.zeros((BLOCK_G,), tl.float32)
    a_GE = tl.zeros((BLOCK_G, BLOCK_E), tl.float32)
    end = tl.minimum((split + 1) * split_tokens, length)
    for start in range(split * split_tokens, end, TILE):
        token_T = start + place_T
        live_T = token_T < end
        page_T = tl.load(table_ptr + sequence * M + token_T // B, mask=live_T, other=0).to(tl.int64)
        at_T = ((page_T * K + head) * B + token_T % B) * E
        mask_TE = live_T[:, None] & inside_E[None, :]
        k_TE = tl.load(k_ptr + at_T[:, None] + col_E[None, :], mask=mask_TE, other=0.0)
        v_TE = tl.load(v_ptr + at_T[:, None] + col_E[None, :], mask=mask_TE, other=0.0)
        a, b = q_GE, k_TE
        if INTERPRETED:  # its dot is wrong for bf16
            a, b = a.to(tl.float32), b.to(tl.float32)
        s_GT = tl.dot(a, tl.trans(b), input_precision="ieee") * scale
        s_GT = tl.where(live_T[None, :], s_GT, LOWEST)
        new_G = tl.maximum(m_G, tl.max(s_GT, 1))
        p_GT = tl.where(live_T[None, :], tl.exp2(s_GT - new_G[:, None]), 0.0)
        shrink_G = tl.exp2(m_G - new_G)
        l_G = l_G * shrink_G + tl.sum(p_GT, 1)
        a, b = p_GT.to(v_TE.dtype), v_TE
        if INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        a_GE = tl.dot(a, b, a_GE * shrink_G[:, None], input_precision="ieee")
        m_G = new_G

    row = (sequence * K + head) * G + row_G  # query head of all sequences
    tl.store(partial_ptr + (row[:, None] * splits + split) * E + col_E[None, :], a_GE, mask=mask_GE)
    tl.store(sums_ptr + (row * splits + split) * 2, m_G, mask=row_G < G)
    tl.store(sums_ptr + (row * splits + split) * 2 + 1, l_G, mask=row_G < G)


@triton.jit
def _merge_kernel(partial_ptr, sums_ptr, out_ptr, splits, E: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr):
    """The splits of one query head of one sequence; a sequence without tokens has zeros."""
    row = tl.program_id(0).to(tl.int64)
    split_C, col_E = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_E)
    here_C = split_C < splits
    m_C = tl.load(sums_ptr + (row * splits + split_C) * 2, mask=here_C, other=LOWEST)
    l_C = tl.load(sums_ptr + (row * splits + split_C) * 2 + 1, mask=here_C, other=0.0)
    shrink_C = tl.exp2(m_C - tl.max(m_C, 0))
    a_CE = tl.load(partial_ptr + (row * splits + split_C[:, None]) * E + col_E[None, :],
                   mask=here_C[:, None] & (col_E[None, :] < E), other=0.0)
    mass = tl.sum(l_C * shrink_C, 0)
    out_E = tl.sum(a_CE * shrink_C[:, None], 0) / tl.where(mass == 0, 1.0, mass)
    tl.store(out_ptr + row * E + col_E, out_E.to(out_ptr.dtype.element_ty), mask=col_E < E)


def split_of(S: int, K: int, longest: int, tile: int, processors: int) -> tuple[int, int]:
    """How many splits, and tokens of each: enough programs for every multiprocessor twice, one for each SHORTEST at most."""
    wanted = min(triton.cdiv(2 * processors, max(1, S * K)), triton.cdiv(longest, SHORTEST))
    tokens = triton.cdiv(triton.cdiv(max(longest, 1), max(1, wanted)), tile) * tile
    return triton.cdiv(max(longest, 1), tokens), tokens


def decode_attention(q_SHE: Tensor, k_cache_PKBE: Tensor, v_cache_PKBE: Tensor, table_SM: Tensor, length_S: Tensor,
                     scale: float | None = None) -> Tensor:
    """See dispatch.decode_attention. The host reads no lengths: splits are those of the longest sequence a table holds."""
    (S, H, E), (_, K, B, _) = q_SHE.shape, k_cache_PKBE.shape
    out_SHE, M = torch.empty_like(q_SHE), table_SM.shape[1]
    if not S:
        return out_SHE
    tile = TILE[q_SHE.dtype]
    splits, tokens = split_of(S, K, M * B, tile, multiprocessors(q_SHE.device))
    partial = torch.empty(S * H, splits, E, dtype=torch.float32, device=q_SHE.device)
    sums = torch.empty(S * H, splits, 2, dtype=torch.float32, device=q_SHE.device)
    factor, sizes = (E ** -0.5 if scale is None else scale) * LOG2E.value, blocks(H // K, E)
    _split_kernel[(S * K * splits,)](q_SHE, k_cache_PKBE, v_cache_PKBE, table_SM, length_S, partial, sums, M, factor, tokens,
                                     splits, K, H // K, E, B, **sizes, TILE=tile, num_warps=4)
    _merge_kernel[(S * H,)](partial, sums, out_SHE, splits, E, triton.next_power_of_2(splits), sizes["BLOCK_E"], num_warps=1)
    return out_SHE


def blocks(G: int, E: int) -> dict[str, int]:
    return dict(BLOCK_G=max(16, triton.next_power_of_2(G)), BLOCK_E=max(16, triton.next_power_of_2(E)))


def variants() -> list[Variant]:
    models = {"Qwen2.5-0.5B": (14, 2, 64), "Qwen2.5-1.5B": (12, 2, 128), "SmolLM2": (9, 3, 64), "Llama-3.2-3B": (24, 8, 128)}
    return [v for dtype in ("bf16", "fp32") for model, shape in models.items() for v in _variants(dtype, model, *shape)]


def _variants(dtype: str, model: str, H: int, K: int, E: int, S: int = 256, length: int = 1024, B: int = 64,
              device: str = "meta") -> list[Variant]:
    size, G = 2 if dtype == "bf16" else 4, H // K
    tile = TILE[torch.bfloat16 if dtype == "bf16" else torch.float32]
    splits, _ = split_of(S, K, length, tile, multiprocessors(device))
    sizes = blocks(G, E)
    signature = {name: f"*{dtype}" for name in ("q_ptr", "k_ptr", "v_ptr")}
    signature |= dict(table_ptr="*i32", length_ptr="*i32", partial_ptr="*fp32", sums_ptr="*fp32", M="i32", scale="fp32",
                      split_tokens="i32", splits="i32")
    constants = dict(K=K, G=G, E=E, B=B, **sizes, TILE=tile)
    signature |= dict.fromkeys(constants, "constexpr")
    cache = 2 * S * K * length * E * size
    queries, lookups = S * H * E * size, S * K * (-(-length // tile) * max(1, tile // B) + splits) * 4  # by every key head
    partials = S * H * splits * (E + 2) * 4
    split = Variant(f"decode_attention split, {dtype}, {model}", _split_kernel, signature, constants, aligned(*range(7)), 4,
                    moved=cache + splits * queries + lookups + partials,
                    minimum=cache + 2 * queries + S * (-(-length // B) + 1) * 4,
                    shape=f"{S} sequences of {length}, {H} and {K} heads of {E}")
    constants = dict(E=E, BLOCK_C=triton.next_power_of_2(splits), BLOCK_E=sizes["BLOCK_E"])
    signature = dict(partial_ptr="*fp32", sums_ptr="*fp32", out_ptr=f"*{dtype}", splits="i32")
    signature |= dict.fromkeys(constants, "constexpr")
    name = f"decode_attention merge, {dtype}, {model}"
    moved = partials + queries
    return [split, Variant(name, _merge_kernel, signature, constants, aligned(0, 1, 2), 1, moved=moved, minimum=moved,
                           shape=f"{S} sequences, {splits} splits")]
