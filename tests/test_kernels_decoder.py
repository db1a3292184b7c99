"""rms_norm, add_rms_norm, rope and swiglu: values and gradients against fp64."""

import os

import pytest
import torch
from toolr0_kernels import add_rms_norm, cpp, linear, rms_norm, rope, swiglu

from toolr0_core.model import ModelConfig, rope_frequencies


@pytest.fixture(params=["triton" if os.environ.get("TRITON_INTERPRET") == "1" else "torch"])
def impl(request):
    """Those with gradients; what C++ has is tested below."""
    return request.param


def make(*shapes, dtype=torch.float32):
    g = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(*shape, generator=g).to(dtype).requires_grad_() for shape in shapes]


def compare(function, exact, inputs, impl):
    """Values and gradients, no further from fp64 than a few roundings; upstream gradients are uneven."""
    def run(f, tensors):
        out = f(*tensors)
        out = out if isinstance(out, tuple) else (out,)
        upstream = [torch.linspace(-1, 2, x.numel()).view(x.shape).to(x.dtype) for x in out]
        return *out, *torch.autograd.grad(out, [t for t in tensors if t.requires_grad], upstream)
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    eps = torch.finfo(inputs[0].dtype).eps
    for mine, right in zip(run(lambda *x: function(*x, impl=impl), inputs), run(exact, wide), strict=True):
        assert mine.dtype == inputs[0].dtype and mine.shape == right.shape
        assert not len(right) or (mine.double() - right).abs().max() <= 8 * eps * max(1.0, right.abs().max().item())


def norm64(x, weight, eps=1e-6):
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(5, 37), (70, 64), (3, 1000), (1, 1), (2, 3, 64), (257, 128), (0, 64)])
def test_rms_norm(impl, shape, dtype):
    compare(rms_norm, norm64, make(shape, shape[-1:], dtype=dtype), impl)


@pytest.mark.parametrize("shape", [(5, 37), (70, 64), (3, 1000), (257, 128), (0, 64)])
def test_add_rms_norm(impl, shape):
    compare(add_rms_norm, lambda x, r, w: (norm64(x + r, w), x + r), make(shape, shape, shape[-1:]), impl)


def test_a_weight_that_is_not_contiguous(impl):
    x, wide = make((5, 16), (16, 3))
    assert torch.equal(rms_norm(x, wide[:, 0], impl=impl), rms_norm(x, wide[:, 0].contiguous(), impl=impl))


def test_the_norm_of_a_sum_in_half_precision_is_the_norm_of_what_was_rounded(impl):
    x, r, w = (t.detach() for t in make((9, 64), (9, 64), (64,), dtype=torch.float16))
    normed, total = add_rms_norm(x, r, w, impl=impl)
    assert torch.equal(total, x + r) and torch.equal(normed, rms_norm(total, w, impl=impl))


def rope64(q, k, cos, sin):
    def turn(x):
        pair = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1))
        return torch.cat(torch.view_as_real(pair * torch.complex(cos, sin)[:, None]).unbind(-1), -1)
    return turn(q), turn(k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("N, H, K, E", [(7, 9, 3, 64), (1, 1, 1, 2), (5, 14, 2, 64), (3, 2, 2, 24), (0, 2, 1, 8)])
def test_rope(impl, N, H, K, E, dtype):
    angle = torch.rand(N, E // 2, generator=torch.Generator().manual_seed(0)) * 100
    compare(rope, rope64, [*make((N, H, E), (N, K, E), dtype=dtype), angle.cos(), angle.sin()], impl)


def test_rope_of_views_into_a_fused_projection(impl):
    fused = torch.randn(6, 5, 16, generator=torch.Generator().manual_seed(0))
    angle = torch.rand(6, 8, generator=torch.Generator().manual_seed(1))
    out = rope(fused[:, :3], fused[:, 3:], angle.cos(), angle.sin(), impl=impl)
    apart = rope(fused[:, :3].clone(), fused[:, 3:].clone(), angle.cos(), angle.sin(), impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(out, apart))


def test_the_scaling_of_llama_3_reaches_the_rotation(impl):
    """Low frequencies are 8 times slower: at position 8 p they stand where unscaled ones stood at p."""
    scaling = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    plain, scaled = (rope_frequencies(ModelConfig(8, 64, 64, 1, 1, 1, 64, rope_theta=5e5, rope_scaling=s)) for s in (None, scaling))
    q = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(0))
    turned = [rope(q, q, (freq * p).cos()[None], (freq * p).sin()[None], impl=impl)[0]
              for freq, p in ((plain, 1000.0), (scaled, 8000.0))]
    slow = (plain / scaled - 8).abs() < 1e-3
    assert slow.sum() >= 8 and torch.allclose(turned[0].view(2, 32)[:, slow], turned[1].view(2, 32)[:, slow], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(5, 37), (3, 2000), (1, 1), (2, 3, 64), (0, 8)])
def test_swiglu(impl, shape, dtype):
    compare(swiglu, lambda g, u: g * u / (1 + (-g).exp()), make(shape, shape, dtype=dtype), impl)


def test_swiglu_of_the_halves_of_one_matrix_and_of_large_gates(impl):
    both = torch.randn(4, 60, generator=torch.Generator().manual_seed(0)) * 100
    out = swiglu(both[:, :30], both[:, 30:], impl=impl)
    g, u = both.double().chunk(2, -1)
    assert (out.double() - g * torch.sigmoid(g) * u).abs().max() < 1e-5 * out.abs().max()


@pytest.mark.parametrize("call, message", [
    (lambda: rms_norm(torch.ones(2, 3), torch.ones(4)), r"x is \[2, 3\] and weight \[4\]; weight has to be x's last dimension"),
    (lambda: add_rms_norm(torch.ones(2, 3), torch.ones(2, 4), torch.ones(3)), r"x is \[2, 3\] .* and residual \[2, 4\]"),
    (lambda: swiglu(torch.ones(2, 3), torch.ones(3, 2)), r"gate is \[2, 3\] of torch.float32 and up \[3, 2\]"),
    (lambda: rope(torch.ones(2, 1, 3), torch.ones(2, 1, 3), torch.ones(2, 1), torch.ones(2, 1)), "one N and one even E"),
    (lambda: rope(torch.ones(2, 1, 4), torch.ones(2, 1, 4), torch.ones(2, 4), torch.ones(2, 4)), r"they have to be \[2, 2\]"),
])
def test_bad_arguments_are_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.skipif(cpp.problem is not None, reason=f"the C++ ops were not built: {cpp.problem}")
class TestCpp:
    """Forward passes, no further from fp64 than plain torch in fp32 and a few roundings."""

    @staticmethod
    def compare(function, *inputs):
        inputs = [x.detach() for x in inputs]
        out = [f if isinstance(f, tuple) else (f,) for f in (
            function(*inputs, impl="cpp"), function(*inputs, impl="torch"), function(*(x.double() for x in inputs), impl="torch"))]
        for mine, torchs, exact in zip(*out, strict=True):
            assert mine.shape == exact.shape and mine.dtype == torch.float32
            error, allowed = ((x.double() - exact).abs().max() if len(x) else 0.0 for x in (mine, torchs))
            assert error <= allowed + 4e-7 * (exact.abs().max() if len(exact) else 1)

    @pytest.mark.parametrize("shape", [(5, 37), (70, 64), (3, 1000), (1, 1), (2, 3, 64), (0, 64)])
    def test_norms(self, shape):
        x, residual, weight = make(shape, shape, shape[-1:])
        self.compare(rms_norm, x, weight)
        self.compare(add_rms_norm, x, residual, weight)

    @pytest.mark.parametrize("N, H, K, E", [(7, 9, 3, 64), (1, 1, 1, 2), (5, 14, 2, 64), (3, 2, 2, 24), (0, 2, 1, 8)])
    def test_rope(self, N, H, K, E):
        angle = torch.rand(N, E // 2, generator=torch.Generator().manual_seed(0)) * 100
        self.compare(rope, *make((N, H, E), (N, K, E)), angle.cos(), angle.sin())

    @pytest.mark.parametrize("shape", [(5, 37), (0, 3), (2, 3, 64), (513,)])
    def test_swiglu_also_where_the_exponential_overflows(self, shape):
        gate, up = make(shape, shape)
        self.compare(swiglu, 60 * gate, up)

    @pytest.mark.parametrize("M", [1, 2, 5, 6, 7, 13, 64])
    @pytest.mark.parametrize("K, N", [(1, 1), (15, 3), (16, 4), (37, 11), (130, 49), (576, 65)])
    def test_linear_of_few_rows(self, M, K, N):
        x, weight, bias = make((M, K), (N, K), (N,))
        self.compare(linear, x, weight)
        self.compare(linear, x, weight, bias)

    def test_a_row_is_the_same_to_the_last_bit_in_any_batch(self):
        x, weight = (t.detach() for t in make((33, 70), (29, 70)))
        whole = linear(x, weight, impl="cpp")
        assert all(torch.equal(linear(x[i: i + n], weight, impl="cpp"), whole[i: i + n]) for i, n in ((0, 1), (7, 5), (12, 13)))

    def test_auto_is_cpp_for_few_rows_without_gradients(self, monkeypatch):
        monkeypatch.delenv("TOOLR0_KERNELS", raising=False)
        x, weight = make((65, 70), (29, 70))
        assert linear(x, weight).requires_grad
        with torch.no_grad():
            assert torch.equal(linear(x[:64], weight), linear(x[:64], weight, impl="cpp"))
            assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))
