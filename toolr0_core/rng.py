"""Counter-based random numbers: a draw is a function of its keys, so it does not depend on batch, slot, rank or order.

`fold` names streams on the host (BLAKE2b, any keys); `uniform` draws on the device (SplitMix64's finaliser, vectorised).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def fold(seed: int, *keys: int | str) -> int:
    """A seed in 0..2^63-1 named by seed and keys; different keys, 5 and "5" too, are different texts to the hash."""
    text = repr((int(seed), *(k if isinstance(k, str) else int(k) for k in keys)))
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") >> 1


def uniform(seed_B: Tensor, position_B: Tensor) -> Tensor:
    """fp64 uniforms [B] in the open interval (0, 1), a function of (seed, position) alone. Both int64.

    They are the odd multiples of 2^-52, so that u * total < total for every fp64 total: a search in a cumulative sum that
    ends at total always finds an entry, and one with mass of its own.
    """
    x = _mix(seed_B + position_B * _GAMMA)
    x = _mix(x ^ seed_B)
    return (((x >> 13) & 0x7FFFFFFFFFFFF).double() + 0.5) * 2.0 ** -51


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on wrapping int64; `>>` of a signed integer keeps its sign, so the top bits are masked."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
