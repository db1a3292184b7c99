"""Intervals of proportions and of paired differences. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z95 = 1.959963984540054


def wilson(k: float, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of k successes in n trials, in 0..1; (0, 1) where n is 0."""
    if n == 0:
        return 0.0, 1.0
    p, zz = k / n, z * z
    middle = (p + zz / (2 * n)) / (1 + zz / n)
    half = z / (1 + zz / n) * math.sqrt(p * (1 - p) / n + zz / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(values: Sequence[float], z: float = Z95) -> tuple[float, float, float]:
    """Mean and normal interval of the mean of independent values, such as each task's share of right samples."""
    n = len(values)
    mean = sum(values) / n if n else 0.0
    if n < 2:
        return mean, mean, mean
    error = z * math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return mean, mean - error, mean + error


def paired_difference(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """Mean of after - before on the same tasks, with its 95 % interval."""
    return mean_interval([b - a for a, b in zip(before, after, strict=True)])


def mcnemar(before: Sequence[float], after: Sequence[float]) -> tuple[int, int, float]:
    """Tasks lost, tasks won, and the two-sided p-value of McNemar's exact test; outcomes are 0 or 1 on the same tasks."""
    pairs = list(zip(before, after, strict=True))
    lost, won = pairs.count((1, 0)), pairs.count((0, 1))
    n = lost + won
    tail = sum(math.comb(n, i) for i in range(min(lost, won) + 1))  # whole numbers: no underflow for any n
    return lost, won, min(1.0, 2 * tail / 2**n)
