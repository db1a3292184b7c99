"""sample on a GPU: one token a row from logits, or from hidden states without logits in memory; its log-prob and the entropy.

Rule (toolr0_core/draw.py; every implementation follows it). One uniform a row, a hash of (seed, position): 64 bits of
SplitMix64, of which rng.uniform keeps the first 51. The token is the first whose cumulative mass, in vocabulary order, exceeds
u times the total. No Gumbel noise: that takes a hash for every entry of the vocabulary where this takes one, and it ties the
token to the noise that an implementation draws; here any implementation finds the same token, up to rounding of the masses.

Masses are integers where they are compared: floor(2^40 e^((x - m) / T)) in int64. Sums of integers do not depend on the order,
cumulative sums never fall, so a token of mass 0 is never drawn, and u * total < total holds as (bits * total) >> 64. A token
2^-40 times as likely as the most likely one counts as impossible.

Search in two levels. Kernel 1 leaves (m, s, t) (see rows.py) per row and tile of the vocabulary; kernel 2, one program a row,
merges them, draws a tile, looks at that tile alone again and draws the token in it. From logits the second look is one more
read of 4096 numbers of 151936: 1.03 times the traffic of reading the logits once. From hidden states it recomputes 128 logits,
128 x D weights, where logits of the row would have been 608 KB to write and to read.

Truncation (truncate.py) goes between the two kernels: it finds what is kept and rewrites the tiles' sums.

Shape suffixes: S rows, V vocabulary, D hidden, C tiles of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolr0_kernels.gpu.linear_logprob import tile_logits
from toolr0_kernels.gpu.rows import LN2, LOWEST
from toolr0_kernels.gpu.truncate import (
    SEARCH_BLOCK,
    first_true,
    key_of,
    mass_of,
    merge_tiles,
    scale_of,
    store_stats,
    truncate_kernel,
)
from toolr0_kernels.gpu.variants import Variant, aligned

LOGITS_TILE = 4096  # columns per tile where logits are in memory
HIDDEN_TILE = 128  # and where a tile is recomputed


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _share(seed, position, total):
    """floor(u * total) of the uniform of (seed, position); below total."""
    x = _mix(seed + position * -7046029254386353131)
    x = _mix(x ^ seed)
    return tl.umulhi(x.to(tl.uint64, bitcast=True), total.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)


@triton.jit(do_not_specialize=["S", "tiles"])
def _logits_stats_kernel(logits_ptr, stats_ptr, temperature_ptr, S, V, tiles, TILE: tl.constexpr):
    """m, s, t of one tile of one row of logits."""
    row = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    scale, _ = scale_of(tl.load(temperature_ptr + row))
    col_V = tile * TILE + tl.arange(0, TILE)
    x_V = tl.load(logits_ptr + row.to(tl.int64) * V + col_V, mask=col_V < V, other=-float("inf")).to(tl.float32)
    store_stats(stats_ptr, row, tile, S, tiles, x_V, col_V < V, scale)


@triton.jit(do_not_specialize=["S", "tiles"])
def _hidden_stats_kernel(hidden_ptr, weight_ptr, stats_ptr, temperature_ptr, S, V, D, tiles, EVEN_D: tl.constexpr,
                         BLOCK_S: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr):
    """m, s, t of one tile of BLOCK_S rows. Programs that share a tile of the weight follow each other."""
    blocks = tl.cdiv(S, BLOCK_S)
    tile = tl.program_id(0) // blocks
    first_row = tl.program_id(0) % blocks * BLOCK_S
    row_S = first_row + tl.arange(0, BLOCK_S)
    col_V = tile * TILE + tl.arange(0, TILE)
    scale_S, _ = scale_of(tl.load(temperature_ptr + row_S, mask=row_S < S, other=1.0))
    x_SV = tile_logits(hidden_ptr, weight_ptr, first_row, tile * TILE, S, V, D, EVEN_D, BLOCK_S, TILE, BLOCK_D)
    x_SV = tl.where(col_V[None, :] < V, x_SV, LOWEST)
    m_S = tl.max(x_SV, 1)
    d_SV = x_SV - m_S[:, None]
    p_SV = tl.exp2(d_SV * scale_S[:, None])
    place_S = stats_ptr + row_S.to(tl.int64) * tiles + tile
    plane = tl.cast(S, tl.int64) * tiles
    tl.store(place_S, m_S, mask=row_S < S)
    tl.store(place_S + plane, tl.sum(p_SV, 1), mask=row_S < S)
    tl.store(place_S + 2 * plane, tl.sum(p_SV * d_SV, 1), mask=row_S < S)


@triton.jit
def _tile_of_row(hidden_ptr, weight_ptr, row, first_col, V, D, TILE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Logits of one row and one tile, in fp32."""
    col_V = tl.minimum(tl.arange(0, TILE), V - 1 - first_col)
    hidden_ptr += row.to(tl.int64) * D
    weight_ptr += first_col.to(tl.int64) * D
    acc_V = tl.zeros((TILE,), tl.float32)
    for start in range(0, D, BLOCK_D):
        offset_D = start + tl.arange(0, BLOCK_D)
        h_D = tl.load(hidden_ptr + offset_D, mask=offset_D < D, other=0.0).to(tl.float32)
        w_VD = tl.load(weight_ptr + col_V[:, None] * D + offset_D[None, :], mask=offset_D[None, :] < D, other=0.0)
        acc_V += tl.sum(w_VD.to(tl.float32) * h_D[None, :], 1)
    return acc_V


@triton.jit(do_not_specialize=["S", "tiles"])
def _pick_kernel(logits_ptr, weight_ptr, stats_ptr, seed_ptr, position_ptr, temperature_ptr, key_ptr, last_ptr, token_ptr,
                 logp_ptr, entropy_ptr, S, V, D, tiles, FROM_LOGITS: tl.constexpr, TRUNCATED: tl.constexpr, TILE: tl.constexpr,
                 BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr):
    """One row: a tile by its mass, then a token of the tile. Greedy: the first tile with the maximum, the first token in it."""
    row = tl.program_id(0)
    scale, greedy = scale_of(tl.load(temperature_ptr + row))
    m_C, m, s, t, mass_C = merge_tiles(stats_ptr, row, S, tiles, scale, BLOCK_C)
    tile_C = tl.arange(0, BLOCK_C)
    upto_C = tl.cumsum(mass_C, 0)
    aim = _share(tl.load(seed_ptr + row), tl.load(position_ptr + row), tl.sum(mass_C, 0))
    tile = tl.where(greedy, first_true(m_C == m, tile_C, BLOCK_C), first_true(upto_C > aim, tile_C, BLOCK_C))
    tile = tl.minimum(tile, tiles - 1)  # past the end only for NaN
    chosen_C = tile_C == tile
    mass = tl.sum(tl.where(chosen_C, mass_C, 0), 0)
    aim -= tl.sum(tl.where(chosen_C, upto_C, 0), 0) - mass

    offset_V = tl.arange(0, TILE)
    col_V = tile * TILE + offset_V
    if FROM_LOGITS:
        x_V = tl.load(logits_ptr + row.to(tl.int64) * V + col_V, mask=col_V < V, other=-float("inf")).to(tl.float32)
    else:
        x_V = _tile_of_row(logits_ptr, weight_ptr, row, tile * TILE, V, D, TILE, BLOCK_D)
    kept_V = col_V < V
    if TRUNCATED:
        key_V = key_of(x_V, m, scale)
        edge = tl.load(key_ptr + row)
        kept_V = kept_V & ((key_V < edge) | ((key_V == edge) & (col_V <= tl.load(last_ptr + row))))
    top = tl.max(tl.where(kept_V, x_V, LOWEST), 0)
    mass_V = tl.where(kept_V, mass_of((x_V - top) * scale), 0)
    upto_V = tl.cumsum(mass_V, 0)
    total = tl.sum(mass_V, 0)
    # the tile's mass was rounded at another scale (or recomputed): the same share of this total, and below it
    aim = tl.minimum((aim.to(tl.float32) / tl.maximum(mass, 1).to(tl.float32) * total.to(tl.float32)).to(tl.int64), total - 1)
    place = tl.where(greedy, first_true(kept_V & (x_V == top), offset_V, TILE), first_true(upto_V > aim, offset_V, TILE))
    token = tl.minimum(tile * TILE + place, V - 1)
    x = tl.sum(tl.where(col_V == token, x_V, 0.0), 0)
    log_s = tl.log2(s)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logp_ptr + row, ((x - m) * scale - log_s) * LN2)
    tl.store(entropy_ptr + row, (log_s - t / s * scale) * LN2)


def sample(logits_SV: Tensor, seed_S: Tensor, position_S: Tensor, temperature_S: Tensor, top_k_S: Tensor | None = None,
           top_p_S: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Token (int64), its log-prob and the entropy (fp32) of every row, of the distribution after truncation."""
    (S, V), device = logits_SV.shape, logits_SV.device
    tiles = triton.cdiv(V, LOGITS_TILE)
    stats = torch.empty(3, S, tiles, dtype=torch.float32, device=device)
    edge_S, last_S = torch.empty(2, S, dtype=torch.int32, device=device)
    truncated = top_k_S is not None or top_p_S is not None
    if S:
        temperature_S = temperature_S.float()
        _logits_stats_kernel[(S * tiles,)](logits_SV, stats, temperature_S, S, V, tiles, LOGITS_TILE, num_warps=8)
        if truncated:
            top_k_S = torch.zeros(S, dtype=torch.int64, device=device) if top_k_S is None else top_k_S.long()
            top_p_S = torch.ones(S, dtype=torch.float32, device=device) if top_p_S is None else top_p_S.float()
            truncate_kernel[(S,)](logits_SV, stats, temperature_S, top_k_S, top_p_S, edge_S, last_S, S, V, tiles, LOGITS_TILE,
                                   triton.next_power_of_2(tiles), SEARCH_BLOCK, num_warps=8)
    return _pick(logits_SV, None, stats, seed_S, position_S, temperature_S, edge_S, last_S, V, 1, truncated)


def linear_sample(hidden_SD: Tensor, weight_VD: Tensor, seed_S: Tensor, position_S: Tensor,
                  temperature_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`sample` of hidden @ weight.T, whose logits never exist together."""
    (S, D), V, device = hidden_SD.shape, weight_VD.shape[0], hidden_SD.device
    tiles = triton.cdiv(V, HIDDEN_TILE)
    stats = torch.empty(3, S, tiles, dtype=torch.float32, device=device)
    if S:
        temperature_S = temperature_S.float()
        block_S, block_D, warps = rows_of(S, D, hidden_SD.element_size())
        _hidden_stats_kernel[(triton.cdiv(S, block_S) * tiles,)](hidden_SD, weight_VD, stats, temperature_S, S, V, D, tiles,
                                                                 D % block_D == 0, block_S, HIDDEN_TILE, block_D,
                                                                 num_warps=warps, num_stages=3)
    return _pick(hidden_SD, weight_VD, stats, seed_S, position_S, temperature_S, seed_S, seed_S, V, D, False)


def _pick(source: Tensor, weight_VD: Tensor | None, stats: Tensor, seed_S: Tensor, position_S: Tensor, temperature_S: Tensor,
          edge_S: Tensor, last_S: Tensor, V: int, D: int, truncated: bool) -> tuple[Tensor, Tensor, Tensor]:
    _, S, tiles = stats.shape
    token_S = torch.empty(S, dtype=torch.int64, device=stats.device)
    logp_S, entropy_S = torch.empty(2, S, dtype=torch.float32, device=stats.device)
    if S:
        from_logits = weight_VD is None
        _pick_kernel[(S,)](source, source if from_logits else weight_VD, stats, seed_S, position_S, temperature_S, edge_S,
                           last_S, token_S, logp_S, entropy_S, S, V, D, tiles, from_logits, truncated,
                           LOGITS_TILE if from_logits else HIDDEN_TILE, triton.next_power_of_2(tiles),
                           pick_width(D, source.element_size()), num_warps=8)
    return token_S, logp_S, entropy_S


def rows_of(S: int, D: int, element_size: int) -> tuple[int, int, int]:
    """BLOCK_S, BLOCK_D, warps: up to 128 rows share one reading of the weight, which is what bounds decoding."""
    if element_size == 4 or D % 64:
        return 32, 32, 8
    return (16, 64, 4) if S <= 16 else (64, 64, 4) if S <= 64 else (128, 64, 8)


def pick_width(D: int, element_size: int) -> int:
    """Columns of D that a tile's second computation has on their way at once; few where loads are narrow."""
    return (512 if D % 16 == 0 else 128) // element_size


def variants() -> list[Variant]:
    out = []
    for dtype, size in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
        for V in (151936, 50257):
            tiles = triton.next_power_of_2(triton.cdiv(V, LOGITS_TILE))
            moved, common = LOGITS_TILE * size + 16, dict(TILE=LOGITS_TILE, BLOCK_C=tiles)
            out += [_variant(f"logits' sums, {dtype}, V={V}", _logits_stats_kernel, dtype, V, 1, dict(TILE=LOGITS_TILE), 8,
                             moved=moved, minimum=moved, shape="one tile"),
                    _variant(f"truncation, {dtype}, V={V}", truncate_kernel, dtype, V, 1, dict(common, BLOCK=SEARCH_BLOCK), 8)]
            out += [_variant(f"pick from logits, {dtype}, V={V}, truncated={truncated}", _pick_kernel, dtype, V, 1,
                             dict(common, FROM_LOGITS=True, TRUNCATED=truncated, BLOCK_D=pick_width(1, size)), 8)
                    for truncated in (False, True)]
        for D in (1536, 100):
            for block_S, block_D, warps in dict.fromkeys(rows_of(S, D, size) for S in (1, 64, 256)):
                out.append(_variant(f"hidden's sums, {block_S}x{HIDDEN_TILE}x{block_D}, {dtype}, D={D}", _hidden_stats_kernel,
                                    dtype, 151936, D, dict(EVEN_D=D % block_D == 0, BLOCK_S=block_S, TILE=HIDDEN_TILE,
                                                           BLOCK_D=block_D), warps))
            tiles = triton.next_power_of_2(triton.cdiv(151936, HIDDEN_TILE))
            out.append(_variant(f"pick from hidden, {dtype}, D={D}", _pick_kernel, dtype, 151936, D,
                                dict(FROM_LOGITS=False, TRUNCATED=False, TILE=HIDDEN_TILE, BLOCK_C=tiles,
                                     BLOCK_D=pick_width(D, size)), 8))
    return out


def _variant(name: str, kernel: object, dtype: str, V: int, D: int, constexprs: dict, warps: int,
             **bytes_moved: object) -> Variant:
    """Types by name; D of 1 is a constant to Triton, as it is at run time."""
    types = {name: f"*{dtype}" for name in ("logits_ptr", "hidden_ptr", "weight_ptr")}
    types |= {name: "*fp32" for name in ("stats_ptr", "temperature_ptr", "top_p_ptr", "logp_ptr", "entropy_ptr")}
    types |= {name: "*i64" for name in ("seed_ptr", "position_ptr", "top_k_ptr", "token_ptr")}
    types |= {"key_ptr": "*i32", "last_ptr": "*i32", "S": "i32", "V": "i32", "D": "i32", "tiles": "i32"}
    if D == 1 and "D" in kernel.arg_names:
        constexprs = {"D": 1, **constexprs}
    signature = {name: "constexpr" if name in constexprs else types[name] for name in kernel.arg_names}
    even = [i for i, name in enumerate(kernel.arg_names) if name.endswith("_ptr") or (name == "V" and V % 16 == 0)
            or (name == "D" and D % 16 == 0)]
    return Variant(f"sample, {name}", kernel, signature, constexprs, aligned(*even), warps, **bytes_moved)
