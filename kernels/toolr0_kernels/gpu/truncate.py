"""The masses that sample.py draws by, and truncation: top-k, then top-p of what is left, without sorting.

Formula. With m the row's maximum, an entry's key is floor(2^24 (m - x) log2(e) / T), at most 2^30 - 1 (2^-64 of the maximum's
probability), and its mass floor(2^40 2^(-key / 2^24)): integers both, so sums are exact and ties tie. Kept are the entries with
key < edge, and the first ones, in vocabulary order, of those at it: the smallest set of the best entries that holds k of them,
then the smallest whose mass reaches top_p of the mass so far.

Traffic. The edge is found from its highest bits down, three at a time: each pass over the row sums what its eight candidates
hold, and the search ends when one entry is left to decide on, usually after 6 or 7 passes of 10. A pass of 608 KB comes from
the L2 cache in part. Sorting the row would move it as often and keep 12 bytes for each entry besides. One program is one row,
and three bits a pass balance the eight comparisons an entry takes against the read.

Shape suffixes: S rows, V vocabulary, C tiles of the vocabulary, B a block of a pass, 8 the digits of a pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from toolr0_kernels.gpu.rows import LOWEST

SEARCH_BLOCK = 1024
KEY_BITS = tl.constexpr(30)
KEY_END = tl.constexpr(1 << 30)  # 64 bits below the maximum, where masses have long been 0


@triton.jit
def scale_of(temperature):
    """log2(e) / T, and whether the row is greedy: then T is 1."""
    greedy = temperature == 0
    return 1.4426950408889634 / tl.where(greedy, 1.0, temperature), greedy


@triton.jit
def mass_of(exponent):
    """2^exponent as a multiple of 2^-40."""
    return (tl.exp2(exponent) * 1099511627776.0).to(tl.int64)


@triton.jit
def first_true(true, offset, BLOCK: tl.constexpr):
    return tl.min(tl.where(true, offset, BLOCK), 0)


@triton.jit
def key_of(x, m, scale):
    """Distance from the maximum in units of 2^-24 bits: smaller is better."""
    return (tl.minimum((m - x) * scale, 63.99999) * 16777216.0).to(tl.int32)


@triton.jit
def store_stats(stats_ptr, row, tile, S, tiles, x_V, kept_V, scale):
    """-inf is a logit like any other here: its mass is 0, and so is its part of the entropy."""
    m = tl.maximum(tl.max(x_V, 0), LOWEST)
    p_V = tl.where(kept_V, tl.exp2((x_V - m) * scale), 0.0)
    place = stats_ptr + row.to(tl.int64) * tiles + tile
    plane = tl.cast(S, tl.int64) * tiles
    tl.store(place, m)
    tl.store(place + plane, tl.sum(p_V, 0))
    tl.store(place + 2 * plane, tl.sum(p_V * tl.where(p_V == 0, 0.0, x_V - m), 0))


@triton.jit
def merge_tiles(stats_ptr, row, S, tiles, scale, BLOCK_C: tl.constexpr):
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
            key_B = key_of(tl.load(logits_ptr + col_B, mask=col_B < V, other=-float("inf")).to(tl.float32), m, scale)
            in_B = (col_B < V) & ((key_B >> shift) == prefix)
            inside_B += in_B.to(tl.int32)
            if BY_MASS:
                one_B = tl.where(in_B, mass_of(key_B.to(tl.float32) * -5.9604644775390625e-08), 0)  # 2^-24
            else:
                one_B = in_B.to(tl.int64)
            at_B8 = ((key_B >> (shift - 3)) & 7)[:, None] == digit_8[None, :]
            sum_B8 += tl.where(at_B8, one_B[:, None], 0)
        if tl.sum(inside_B, 0) == 1:
            alone += 1
        else:
            sum_8 = tl.sum(sum_B8, 0)
            digit = tl.minimum(first_true(below + tl.cumsum(sum_8, 0) >= goal, digit_8, 8), 7)
            below += tl.sum(tl.where(digit_8 < digit, sum_8, 0), 0)
            prefix = prefix * 8 + digit
            shift -= 3
    unit = tl.maximum(mass_of(prefix.to(tl.float32) * -5.9604644775390625e-08), 1) if BY_MASS else 1
    ties = (goal - below + unit - 1) // unit
    return tl.where(alone != 0, (prefix + 1) << shift, prefix), tl.where(alone != 0, 0, ties)


@triton.jit(do_not_specialize=["S", "tiles"])
def truncate_kernel(logits_ptr, stats_ptr, temperature_ptr, top_k_ptr, top_p_ptr, key_ptr, last_ptr, S, V, tiles,
                     TILE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr):
    """The edge of one row, the last column kept of those at it, and the sums of its tiles over what is kept."""
    row = tl.program_id(0)
    scale, greedy = scale_of(tl.load(temperature_ptr + row))
    top_k, top_p = tl.load(top_k_ptr + row).to(tl.int64), tl.load(top_p_ptr + row)
    _, m, s, _, _ = merge_tiles(stats_ptr, row, S, tiles, scale, BLOCK_C)
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
                key_B = key_of(tl.load(logits_ptr + col_B, mask=col_B < V, other=-float("inf")).to(tl.float32), m, scale)
                mass_B = mass_of(key_B.to(tl.float32) * -5.9604644775390625e-08)
                sum_B += tl.where((col_B < V) & (key_B < edge), mass_B, 0)
            total = tl.sum(sum_B, 0) + ties * mass_of(edge.to(tl.float32) * -5.9604644775390625e-08)
            goal = tl.minimum(tl.maximum((total.to(tl.float32) * top_p).to(tl.int64), 1), total)
            edge, ties = _search(logits_ptr, V, m, scale, goal, True, BLOCK)
        seen = tl.zeros((), tl.int64)
        for tile in range(tiles):
            col_V = tile * TILE + tl.arange(0, TILE)
            x_V = tl.load(logits_ptr + col_V, mask=col_V < V, other=-float("inf")).to(tl.float32)
            key_V = key_of(x_V, m, scale)
            tie_V = ((key_V == edge) & (col_V < V)).to(tl.int32)
            tie_V = tl.where(seen + tl.cumsum(tie_V, 0) <= ties, tie_V, 0)
            last = tl.maximum(last, tl.max(tl.where(tie_V != 0, col_V, -1), 0))
            seen += tl.sum((key_V == edge).to(tl.int32), 0)
            store_stats(stats_ptr, row, tile, S, tiles, x_V, (col_V < V) & ((key_V < edge) | (tie_V != 0)), scale)
    tl.store(key_ptr + row, edge)
    tl.store(last_ptr + row, last)
