"""The one test of significance that tests need."""

from collections.abc import Sequence

import torch


def chi_square_p(observed: Sequence[float], expected: Sequence[float]) -> float:
    """p-value of Pearson's test with len - 1 degrees of freedom."""
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    freedom = torch.tensor((len(observed) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)).item()
