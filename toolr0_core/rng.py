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
    """A seed in 0..2^63-1 named by seed and keys; integers and strings never collide with each other."""
    text = "\x00".join([str(int(seed)), *(f"{type(k).__name__}:{k}" for k in keys)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def uniform(seed_B: Tensor, position_B: Tensor) -> Tensor:
    """fp32 uniforms [B] in the open interval (0, 1), a function of (seed, position) alone. Both int64."""
    x = _mix(seed_B + position_B * _GAMMA)
    x = _mix(x ^ seed_B)
    return ((x >> 40) & 0xFFFFFF).float().add_(0.5).mul_(2.0 ** -24).clamp_(max=1 - 2.0 ** -24)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on wrapping int64; `>>` of a signed integer keeps its sign, so the top bits are masked."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
