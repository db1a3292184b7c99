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

Truncation (top-k, then top-p of what is left) needs no sorting: kernel T, one program a row, finds the last logit to be kept by
its distance from the maximum, an integer of 30 bits, three bits a pass over the row: first by counts (k), then by mass (p). It
stops as soon as a single entry is left to decide on. Ties keep the lower index. Then it rewrites the tiles' sums.

Shape suffixes: S rows, V vocabulary, D hidden, C tiles of the vocabulary; 8 the digits of a pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolr0_kernels.gpu.linear_logprob import tile_logits
from toolr0_kernels.gpu.rows import LN2, LOWEST, aligned
from toolr0_kernels.gpu.variants import Variant

LOGITS_TILE = 4096  # columns per tile where logits are in memory
HIDDEN_TILE = 128  # and where a tile is recomputed
SEARCH_BLOCK = 1024
KEY_BITS = tl.constexpr(30)
KEY_END = tl.constexpr(1 << 30)  # 64 bits below the maximum, where masses have long been 0


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


@triton.jit
def _scale(temperature):
    """log2(e) / T, and whether the row is greedy: then T is 1."""
    greedy = temperature == 0
    return 1.4426950408889634 / tl.where(greedy, 1.0, temperature), greedy


@triton.jit
def _mass(exponent):
    """2^exponent as a multiple of 2^-40."""
    return (tl.exp2(exponent) * 1099511627776.0).to(tl.int64)


@triton.jit
def _first_true(true, offset, BLOCK: tl.constexpr):
    return tl.min(tl.where(true, offset, BLOCK), 0)


@triton.jit
def _key(x, m, scale):
    """Distance from the maximum in units of 2^-24 bits: smaller is better."""
    return (tl.minimum((m - x) * scale, 63.99999) * 16777216.0).to(tl.int32)


@triton.jit(do_not_specialize=["S", "tiles"])
def _logits_stats_kernel(logits_ptr, stats_ptr, temperature_ptr, S, V, tiles, TILE: tl.constexpr):
    """m, s, t of one tile of one row of logits."""
    row = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    scale, _ = _scale(tl.load(temperature_ptr + row))
    col_V = tile * TILE + tl.arange(0, TILE)
    x_V = tl.load(logits_ptr + row.to(tl.int64) * V + col_V, mask=col_V < V, other=-float("inf")).to(tl.float32)
    _store_stats(stats_ptr, row, tile, S, tiles, x_V, col_V < V, scale)


@triton.jit
def _store_stats(stats_ptr, row, tile, S, tiles, x_V, kept_V, scale):
    """-inf is a logit like any other here: its mass is 0, and so is its part of the entropy."""
    m = tl.maximum(tl.max(x_V, 0), LOWEST)
    p_V = tl.where(kept_V, tl.exp2((x_V - m) * scale), 0.0)
    place = stats_ptr + row.to(tl.int64) * tiles + tile
    plane = tl.cast(S, tl.int64) * tiles
    tl.store(place, m)
    tl.store(place + plane, tl.sum(p_V, 0))
    tl.store(place + 2 * plane, tl.sum(p_V * tl.where(p_V == 0, 0.0, x_V - m), 0))


@triton.jit(do_not_specialize=["S", "tiles"])
def _hidden_stats_kernel(hidden_ptr, weight_ptr, stats_ptr, temperature_ptr, S, V, D, tiles, EVEN_D: tl.constexpr,
                         BLOCK_S: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr):
    """m, s, t of one tile of BLOCK_S rows. Programs that share a tile of the weight follow each other."""
    blocks = tl.cdiv(S, BLOCK_S)
    tile = tl.program_id(0) // blocks
    first_row = tl.program_id(0) % blocks * BLOCK_S
    row_S = first_row + tl.arange(0, BLOCK_S)
    col_V = tile * TILE + tl.arange(0, TILE)
    scale_S, _ = _scale(tl.load(temperature_ptr + row_S, mask=row_S < S, other=1.0))
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
def _merge(stats_ptr, row, S, tiles, scale, BLOCK_C: tl.constexpr):
    """m of every tile; maximum, s and t of the row; and the tiles' masses as integers."""
    tile_C = tl.arange(0, BLOCK_C)
    place_C = stats_ptr + row.to(tl.int64) * tiles + tile_C
    plane = tl.cast(S, tl.int64) * tiles
    m_C = tl.load(place_C, mask=tile_C < tiles, other=LOWEST)
    s_C = tl.load(place_C + plane, mask=tile_C < tiles, other=0.0)
    t_C = tl.load(place_C + 2 * plane, mask=tile_C < tiles, other=0.0)
    m = tl.max(tl.where(s_C == 0, LOWEST, m_C), 0)  # s is 0 where truncation left nothing
    shrink_C = tl.where(s_C == 0, 0.0, tl.exp2((m_C - m) * scale))
    mass_C = (shrink_C * s_C * 1099511627776.0).to(tl.int64)
    return m_C, m, tl.sum(shrink_C * s_C, 0), tl.sum(shrink_C * (t_C + (m_C - m) * s_C), 0), mass_C


@triton.jit
def _search(logits_ptr, V, m, scale, goal, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """(edge, ties): entries with a key below edge, and the first `ties` of those at it, are the smallest set of the best
    entries whose mass (or number) reaches the goal."""
    digit_8 = tl.arange(0, 8)
    below = tl.zeros((), tl.int64)
    prefix, shift, alone = tl.zeros((), tl.int32), tl.full((), KEY_BITS, tl.int32), tl.zeros((), tl.int32)
    while (shift > 0) & (alone == 0):
        sum_B8 = tl.zeros((BLOCK, 8), tl.int64)
        inside_B = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, V, BLOCK):
            col_B = start + tl.arange(0, BLOCK)
            key_B = _key(tl.load(logits_ptr + col_B, mask=col_B < V, other=-float("inf")).to(tl.float32), m, scale)
            in_B = (col_B < V) & ((key_B >> shift) == prefix)
            inside_B += in_B.to(tl.int32)
            if BY_MASS:
                one_B = tl.where(in_B, _mass(key_B.to(tl.float32) * -5.9604644775390625e-08), 0)  # 2^-24
            else:
                one_B = in_B.to(tl.int64)
            at_B8 = ((key_B >> (shift - 3)) & 7)[:, None] == digit_8[None, :]
            sum_B8 += tl.where(at_B8, one_B[:, None], 0)
        if tl.sum(inside_B, 0) == 1:
            alone += 1
        else:
            sum_8 = tl.sum(sum_B8, 0)
            digit = tl.minimum(_first_true(below + tl.cumsum(sum_8, 0) >= goal, digit_8, 8), 7)
            below += tl.sum(tl.where(digit_8 < digit, sum_8, 0), 0)
            prefix = prefix * 8 + digit
            shift -= 3
    unit = tl.maximum(_mass(prefix.to(tl.float32) * -5.9604644775390625e-08), 1) if BY_MASS else 1
    ties = (goal - below + unit - 1) // unit
    return tl.where(alone != 0, (prefix + 1) << shift, prefix), tl.where(alone != 0, 0, ties)


@triton.jit(do_not_specialize=["S", "tiles"])
def _truncate_kernel(logits_ptr, stats_ptr, temperature_ptr, top_k_ptr, top_p_ptr, key_ptr, last_ptr, S, V, tiles,
                     TILE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr):
    """The edge of one row, the last column kept of those at it, and the sums of its tiles over what is kept."""
    row = tl.program_id(0)
    scale, greedy = _scale(tl.load(temperature_ptr + row))
    top_k, top_p = tl.load(top_k_ptr + row).to(tl.int64), tl.load(top_p_ptr + row)
    _, m, s, _, _ = _merge(stats_ptr, row, S, tiles, scale, BLOCK_C)
    logits_ptr += row.to(tl.int64) * V
    edge = tl.full((), KEY_END, tl.int32)
    ties = tl.zeros((), tl.int64)
    last = tl.full((), -1, tl.int32)
    by_count = (top_k > 0) & (top_k < V)
    if ((greedy == 0) & (s == s)) & (by_count | (top_p < 1)):  # s is NaN where a logit is
        if by_count:
            edge, ties = _search(logits_ptr, V, m, scale, top_k, False, BLOCK)
        if top_p < 1:
            sum_B = tl.zeros((BLOCK,), tl.int64)
            for start in range(0, V, BLOCK):
                col_B = start + tl.arange(0, BLOCK)
                key_B = _key(tl.load(logits_ptr + col_B, mask=col_B < V, other=-float("inf")).to(tl.float32), m, scale)
                mass_B = _mass(key_B.to(tl.float32) * -5.9604644775390625e-08)
                sum_B += tl.where((col_B < V) & (key_B < edge), mass_B, 0)
            total = tl.sum(sum_B, 0) + ties * _mass(edge.to(tl.float32) * -5.9604644775390625e-08)
            goal = tl.minimum(tl.maximum((total.to(tl.float32) * top_p).to(tl.int64), 1), total)
            edge, ties = _search(logits_ptr, V, m, scale, goal, True, BLOCK)
        seen = tl.zeros((), tl.int64)
        for tile in range(tiles):
            col_V = tile * TILE + tl.arange(0, TILE)
            x_V = tl.load(logits_ptr + col_V, mask=col_V < V, other=-float("inf")).to(tl.float32)
            key_V = _key(x_V, m, scale)
            tie_V = ((key_V == edge) & (col_V < V)).to(tl.int32)
            tie_V = tl.where(seen + tl.cumsum(tie_V, 0) <= ties, tie_V, 0)
            last = tl.maximum(last, tl.max(tl.where(tie_V != 0, col_V, -1), 0))
            seen += tl.sum((key_V == edge).to(tl.int32), 0)
            _store_stats(stats_ptr, row, tile, S, tiles, x_V, (col_V < V) & ((key_V < edge) | (tie_V != 0)), scale)
    tl.store(key_ptr + row, edge)
    tl.store(last_ptr + row, last)


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
    scale, greedy = _scale(tl.load(temperature_ptr + row))
    m_C, m, s, t, mass_C = _merge(stats_ptr, row, S, tiles, scale, BLOCK_C)
    tile_C = tl.arange(0, BLOCK_C)
    upto_C = tl.cumsum(mass_C, 0)
    aim = _share(tl.load(seed_ptr + row), tl.load(position_ptr + row), tl.sum(mass_C, 0))
    tile = tl.where(greedy, _first_true(m_C == m, tile_C, BLOCK_C), _first_true(upto_C > aim, tile_C, BLOCK_C))
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
        key_V = _key(x_V, m, scale)
        edge = tl.load(key_ptr + row)
        kept_V = kept_V & ((key_V < edge) | ((key_V == edge) & (col_V <= tl.load(last_ptr + row))))
    top = tl.max(tl.where(kept_V, x_V, LOWEST), 0)
    mass_V = tl.where(kept_V, _mass((x_V - top) * scale), 0)
    upto_V = tl.cumsum(mass_V, 0)
    total = tl.sum(mass_V, 0)
    # the tile's mass was rounded at another scale (or recomputed): the same share of this total, and below it
    aim = tl.minimum((aim.to(tl.float32) / tl.maximum(mass, 1).to(tl.float32) * total.to(tl.float32)).to(tl.int64), total - 1)
    place = tl.where(greedy, _first_true(kept_V & (x_V == top), offset_V, TILE), _first_true(upto_V > aim, offset_V, TILE))
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
            _truncate_kernel[(S,)](logits_SV, stats, temperature_S, top_k_S, top_p_S, edge_S, last_S, S, V, tiles, LOGITS_TILE,
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
                    _variant(f"truncation, {dtype}, V={V}", _truncate_kernel, dtype, V, 1, dict(common, BLOCK=SEARCH_BLOCK), 8)]
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
