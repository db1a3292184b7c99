"""csrc/cuda without a GPU: the kernels compile without spills, and their logic runs on the CPU (cuda_on_cpu/), block by block,
with random orders of the threads between barriers. What only a GPU shows is not tested here."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from sysconfig import get_path

import pytest
import torch
from toolr0_kernels import dispatch, sample

ROOT = Path(__file__).parents[1]
CUDA = ROOT / "csrc" / "cuda"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("source", sorted(CUDA.glob("*.cu")), ids=lambda path: path.name)
def test_kernels_compile_without_stack_or_spills(tmp_path, source, arch):
    done = subprocess.run(["nvcc", "-std=c++17", "-O3", f"-arch={arch}", "-Xptxas", "-v", "-c", source, "-o", tmp_path / "o"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert frames and set(frames) == {("0", "0", "0")}, done.stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on the PATH")
def test_the_binding_fits_the_stable_abi_of_torch():
    torch_headers = Path(torch.__file__).parent / "include"
    done = subprocess.run(["g++", "-std=c++17", "-fsyntax-only", "-DUSE_CUDA", "-DPy_LIMITED_API=0x030b0000",
                           "-DTORCH_TARGET_VERSION=0x020b000000000000", f"-I{torch_headers}", f"-I{get_path('include')}",
                           CUDA / "ops.cpp"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """sample_on_cpu(logits, seed, position, temperature, top_k, top_p): the kernel with blocks of 64 threads."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not on the PATH")
    path = tmp_path_factory.mktemp("cuda") / "sample.so"
    here = ROOT / "tests" / "cuda_on_cpu"
    subprocess.run(["g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-fno-strict-aliasing", "-DTOOLR0_THREADS=64",
                    "-fsanitize=alignment,bounds,shift", f"-I{here}", f"-I{CUDA}", here / "sample.cpp", "-o", path], check=True)
    library = ctypes.CDLL(str(path))

    def call(logits, *rows):
        S, V = logits.shape
        out = torch.full((S,), -1), torch.full((S,), 7.0), torch.full((S,), 7.0)
        pointers = [ctypes.c_void_p(x if x is None else x.data_ptr()) for x in (logits, *rows, *out)]
        assert library.sample_on_cpu(*pointers, ctypes.c_int64(S), ctypes.c_int64(V)) == 0
        return out
    return call


@pytest.fixture(autouse=True)
def _no_access_is_misaligned_or_out_of_bounds(capfd):
    yield
    assert "runtime error" not in capfd.readouterr().err


def rows(n, temperature=1.0, k=None, p=None):
    """seed, position, temperature, top_k, top_p of n rows."""
    return (torch.arange(n) * 7919 - 5, torch.arange(n) % 13, torch.full((n,), temperature),
            None if k is None else torch.full((n,), k), None if p is None else torch.full((n,), p))


def check(got, logits, *args):
    expected = sample(logits, *args, impl="torch")
    assert torch.equal(got[0], expected[0])
    for a, b in zip(got[1:], expected[1:]):
        assert torch.allclose(a, b, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("v", [1, 5, 211, 1024, 2500])
@pytest.mark.parametrize("temperature, k, p", [(1.0, None, None), (0.7, 5, None), (1.3, None, 0.9), (0.8, 40, 0.6),
                                               (0.05, 100, 0.999), (1.0, 9999, 1.0)])
def test_the_kernel_draws_what_torch_draws(on_cpu, v, temperature, k, p):
    """Five rows of an odd V begin at every alignment. At temperature 0.05 nearly all entries are in the histogram's last bin."""
    logits, args = torch.randn(5, v, generator=torch.Generator().manual_seed(v)) * 3, rows(5, temperature, k, p)
    check(on_cpu(logits, *args), logits, *args)


@pytest.mark.parametrize("v, k", [(300, 3), (2500, 65), (2500, 2400)])
def test_ties_of_more_entries_than_a_block_holds_are_cut_at_the_exact_index(on_cpu, v, k):
    """Rows of zeros of both signs, and of two values: the key's bits, and then the index, have to tell them apart."""
    logits = torch.zeros(40, v)
    logits[::2, ::3] = -0.0
    logits[1::2, 1::2] = -0.5
    args = rows(40, 1.0, k, 0.97)
    check(on_cpu(logits, *args), logits, *args)


def test_top_p_after_top_k_when_a_search_has_overwritten_the_histogram(on_cpu):
    logits = torch.randint(0, 4, (20, 1000), generator=torch.Generator().manual_seed(0)).float()
    for p in (0.1, 0.5, 0.9):
        args = rows(20, 0.9, 700, p)
        check(on_cpu(logits, *args), logits, *args)


def test_top_p_ends_where_its_mass_is_reached_exactly(on_cpu):
    token, logp, entropy = on_cpu(torch.zeros(40, 4), *rows(40, 1.0, None, 0.5))
    assert set(token.tolist()) == {0, 1} and torch.allclose(logp, torch.full((40,), 0.5).log()) and torch.allclose(entropy, -logp)


def test_masked_entries_are_never_drawn_and_greedy_is_the_first_of_the_largest(on_cpu):
    logits = torch.randn(12, 211, generator=torch.Generator().manual_seed(1))
    logits[:, torch.arange(211) % 7 != 3] = -torch.inf
    logits[4, [10, 17]] = 9.0
    seed, position, temperature, k, p = rows(12, 1.0, 50, 0.99)
    temperature[3:6] = 0.0
    args = seed, position, temperature, k, p
    got = on_cpu(logits, *args)
    check(got, logits, *args)
    assert got[0][4] == 10 and (got[0][:3] % 7 == 3).all()


def test_places_outside_of_a_row_are_no_entries_where_its_minus_infinities_fill_a_block(on_cpu):
    """The fifth best is -inf, one of 64 of a row that ends within a vector."""
    logits, args = torch.full((4, 67), -torch.inf), rows(4, 1.0, 5)
    logits[:, 5:8] = torch.tensor([1.0, 2.0, 3.0])
    check(on_cpu(logits, *args), logits, *args)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_a_distribution_shows_in_its_row_alone(on_cpu, bad):
    logits, args = torch.randn(3, 211, generator=torch.Generator().manual_seed(2)), rows(3, 1.0, 20, 0.9)
    logits[1, 100] = bad
    got = on_cpu(logits, *args)
    assert got[1][1].isnan() and got[2][1].isnan() and 0 <= got[0][1] < 211
    check([x[::2] for x in got], logits[::2], *(x[::2] for x in args))
    logits[1] = -torch.inf
    got = on_cpu(logits, *args)
    assert got[1][1].isnan() and 0 <= got[0][1] < 211


def test_a_row_is_the_same_in_any_order_of_the_threads(on_cpu):
    """The block that runs first has another order than one that runs later."""
    logits, args = torch.randn(1, 2500, generator=torch.Generator().manual_seed(3)).repeat(6, 1), rows(6, 1.0, 300, 0.8)
    args = tuple(x[:1].repeat(6) for x in args)
    for x in on_cpu(logits, *args):
        assert (x == x[0]).all()


def test_auto_on_a_gpu_is_the_op_for_truncated_rows_where_it_was_built(monkeypatch):
    monkeypatch.delenv("TOOLR0_KERNELS", raising=False)
    x = torch.empty(2, 3, device="meta")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(dispatch.cpp, "cuda_ops", True)
    assert dispatch.choose("sample", "auto", x, truncated=True) == "cpp"
    assert dispatch.choose("sample", "auto", x) == dispatch.choose("linear_sample", "auto", x, truncated=True) == "triton"
    monkeypatch.setattr(dispatch.cpp, "cuda_ops", False)
    assert dispatch.choose("sample", "auto", x, truncated=True) == "triton"
    with pytest.raises(ValueError, match="the CUDA op was not built"):
        dispatch.choose("sample", "cpp", x)
