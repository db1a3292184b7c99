"""Which implementation runs, and what torch has to know of the C++ ops."""

import pytest
import torch
from toolr0_kernels import cpp, describe, linear_logprob, rms_norm
from toolr0_kernels.dispatch import choose
from torch import library

built = pytest.mark.skipif(cpp.problem is not None, reason=f"the C++ ops were not built: {cpp.problem}")


@built
def test_auto_is_cpp_on_a_cpu_and_torch_for_fp64_and_where_there_is_no_cpp(monkeypatch):
    monkeypatch.delenv("TOOLR0_KERNELS", raising=False)
    x = torch.zeros(2)
    assert choose("sample", "auto", x) == "cpp" and choose("sample", "auto", x.double()) == "torch"
    assert choose("rms_norm", "auto", x) == "cpp" and choose("rms_norm", "auto", x, wants_grad=True) == "torch"
    assert describe("cpu") == "kernels: cpp (the device is cpu)"


def test_the_environment_overrides_auto_alone(monkeypatch):
    monkeypatch.setenv("TOOLR0_KERNELS", "torch")
    assert choose("sample", "auto", torch.zeros(2)) == "torch" and describe("cpu") == "kernels: torch (TOOLR0_KERNELS=torch)"
    monkeypatch.setenv("TOOLR0_KERNELS", "fast")
    with pytest.raises(ValueError, match="TOOLR0_KERNELS is 'fast'; it has to be one of auto, triton, cpp, torch"):
        choose("sample", "auto", torch.zeros(2))
    assert choose("sample", "torch", torch.zeros(2)) == "torch"


@built
@pytest.mark.parametrize("call, message", [
    (lambda: rms_norm(torch.ones(3).half(), torch.ones(3).half(), impl="cpp"), "impl 'cpp' cannot run rms_norm here: the C\\+\\+ version is fp32"),
    (lambda: rms_norm(torch.ones(3), torch.ones(3), impl="triton"), "Triton runs on NVIDIA GPUs and this tensor is on cpu"),
    (lambda: linear_logprob(torch.ones(1, 2).double(), torch.ones(3, 2).double(), torch.tensor([0]), impl="cpp"), "it has no fp64"),
])
def test_what_cannot_run_says_why(monkeypatch, call, message):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=message):
        call()


def test_without_the_extension_torch_runs_and_one_line_says_what_is_slower(monkeypatch):
    monkeypatch.delenv("TOOLR0_KERNELS", raising=False)
    monkeypatch.setattr(cpp, "problem", "no module named _C")
    assert linear_logprob(torch.ones(1, 2), torch.ones(3, 2), torch.tensor([0])).item() == pytest.approx(-1.0986, abs=1e-4)
    line = describe("cpu")
    assert line.startswith("kernels: torch") and "no module named _C" in line and "slower" in line and "\n" not in line


@built
def test_torch_knows_the_ops():
    """opcheck: schemas, fake tensors, autograd, and what torch.compile asks for."""
    ops, g = torch.ops.toolr0, torch.Generator().manual_seed(0)
    logits, target, row = torch.randn(5, 37, generator=g), torch.randint(0, 37, (5,)), torch.rand(5, generator=g)
    ints = torch.arange(5)
    check = library.opcheck
    check(ops.row_logprob.default, (logits.clone().requires_grad_(), target, 0.7))
    check(ops.row_logprob_backward.default, (logits, target, row, row, row, 0.7))
    check(ops.row_grpo_loss_.default, (logits.clone(), target, torch.rand(7, 5, generator=g), torch.ones(1), True, True, 0.1, 0.7))
    check(ops.sample.default, (logits, ints, ints, row, ints, row))
    pages = torch.randn(3, 1, 4, 32, generator=g)
    check(ops.decode_attention.default, (torch.randn(2, 2, 32, generator=g), pages, pages, torch.zeros(2, 1, dtype=torch.int32),
                                         torch.tensor([4, 2], dtype=torch.int32), 0.2))
    x, weight, heads = torch.randn(3, 6, generator=g), torch.randn(6, generator=g), torch.randn(3, 2, 6, generator=g)
    check(ops.rms_norm.default, (x, weight, 1e-6))
    check(ops.add_rms_norm.default, (x, x, weight, 1e-6))
    check(ops.rope.default, (heads, heads[:, :1].contiguous(), x[:, :3].contiguous(), x[:, 3:].contiguous()))
    check(ops.swiglu.default, (x, x))
    check(ops.linear.default, (x, torch.randn(5, 6, generator=g), torch.randn(5, generator=g)))
    places = torch.tensor([0, 2])
    check(ops.write_kv_.default, (torch.randn(2, 1, 32), torch.randn(2, 1, 32), pages.clone(), pages.clone(), places, places))


@built
def test_the_gradient_of_row_logprob_equals_autograd_in_fp64():
    logits, target = torch.randn(6, 41, generator=torch.Generator().manual_seed(0), requires_grad=True), torch.arange(6)
    mix = torch.linspace(-1, 2, 18).view(3, 6)
    (torch.stack(torch.ops.toolr0.row_logprob(logits, target, 0.7)) * mix).sum().backward()
    x = logits.detach().double().requires_grad_()
    p = (x / 0.7).log_softmax(-1)
    out = torch.stack((p[torch.arange(6), target], -(p.exp() * p).sum(-1), (x / 0.7).logsumexp(-1)))
    (out * mix).sum().backward()
    assert (logits.grad - x.grad).abs().max() < 1e-6


@built
@pytest.mark.slow
def test_offsets_beyond_2_to_the_31_are_right():
    """14,136 rows of 151,936 (fault 15): 8.6 GB of zeros that no page of memory stands behind, and a last row with numbers."""
    logits = torch.zeros(14136, 151936)
    logits[-1] = torch.randn(151936, generator=torch.Generator().manual_seed(0))
    target = torch.full((14136,), 7)
    many, one = torch.ops.toolr0.row_logprob(logits, target, 1.0), torch.ops.toolr0.row_logprob(logits[-1:], target[-1:], 1.0)
    assert all(torch.equal(a[-1:], b) for a, b in zip(many, one))
