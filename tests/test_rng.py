"""rng: the stream's statistics, its independence of batches, and pinned values (a run must repeat after an upgrade)."""

import subprocess
import sys

import torch
from scipy_free import chi_square_p

from toolr0_core.rng import fold, uniform


def test_uniforms_are_uniform_and_depend_on_seed_and_position_alone():
    seeds, positions = torch.arange(40_000) * 977, torch.arange(40_000) % 13
    u = uniform(seeds, positions)
    assert 0 < u.min() and u.max() < 1
    assert chi_square_p(torch.histc(u, 20, 0, 1).tolist(), [2000.0] * 20) > 1e-4
    order = torch.randperm(40_000)
    assert torch.equal(uniform(seeds[order], positions[order]), u[order])


def test_streams_of_neighbouring_seeds_and_positions_do_not_correlate():
    seeds, positions = torch.arange(40_000), torch.zeros(40_000, dtype=torch.long)
    first = uniform(seeds, positions)
    for other in (uniform(seeds + 1, positions), uniform(seeds, positions + 1), uniform(seeds + 1, positions - 1)):
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 0.02
    one = uniform(torch.full((40_000,), 5), torch.arange(40_000))  # along one stream too
    assert abs(torch.corrcoef(torch.stack([one[1:], one[:-1]]))[0, 1]) < 0.02
    assert chi_square_p(torch.histc(one, 20, 0, 1).tolist(), [2000.0] * 20) > 1e-4


def _uniform_in_plain_integers(seed: int, position: int) -> float:
    """The definition, in arithmetic modulo 2^64."""
    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)
    seed %= 2**64
    return ((mix(mix((seed + position * 0x9E3779B97F4A7C15) % 2**64) ^ seed) >> 13) * 2 + 1) / 2**52


def test_wrapping_signed_arithmetic_equals_the_unsigned_definition():
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 123456789012345678]
    positions = [0, 1, 2, 4095, 2**40, 7]
    expected = [_uniform_in_plain_integers(s, p) for s, p in zip(seeds, positions)]
    assert uniform(torch.tensor(seeds), torch.tensor(positions)).tolist() == expected


def test_the_largest_uniform_stays_below_any_total():
    largest = torch.tensor(1 - 2.0**-52, dtype=torch.float64)
    totals = torch.tensor([1.0, 1 + 2**-52, 2 - 2**-52, 0.3, 1e-30], dtype=torch.float64)
    assert (largest * totals < totals).all()


def test_fold_separates_its_keys():
    assert fold(1, "a") == fold(1, "a") != fold(1, "b") != fold(2, "b")
    keys = [(0,), (0, 0), (0, "0"), (0, 0, 0), (0, "a", "b"), (0, "ab"), (0, "a', 'b"), (0, "a\x00str:b")]
    assert len({fold(*k) for k in keys}) == len(keys)
    assert fold(0, "\ud800") != fold(0, "?")
    assert 0 <= fold(-5, "x") < 2**63


def test_fold_takes_numbers_of_any_integer_type_for_the_same():
    assert fold(3, 4) == fold(torch.tensor(3), torch.tensor(4))


def test_fold_never_changes():
    assert fold(0) == 7210762507766007076 and fold(7, 1, "solver", 3) == 8439200484932024610


def test_importing_rng_imports_no_torch():
    subprocess.run([sys.executable, "-c", "import toolr0_core.rng, sys; assert 'torch' not in sys.modules"], check=True)
