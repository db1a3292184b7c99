"""What a variant says it moves is what its kernel loads and stores, counted while the interpreter runs it.

Each address counts once per load or store: lanes that ask for the same one get it together.
"""

import numpy as np
import pytest
import torch
from toolr0_kernels.gpu import decode_attention, rms_norm, rope, swiglu, write_kv
from triton.runtime.interpreter import InterpreterBuilder


@pytest.fixture
def counted(monkeypatch):
    """counted() -> bytes since the last call."""
    total = [0]
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def addresses(pointers, mask):
        return len(np.unique(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]))

    def counting_load(self, pointers, mask, *rest):
        result = load(self, pointers, mask, *rest)
        total[0] += addresses(pointers, mask) * result.data.itemsize
        return result

    def counting_store(self, pointers, value, mask, *rest):
        total[0] += addresses(pointers, mask) * value.data.itemsize
        return store(self, pointers, value, mask, *rest)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counting_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", counting_store)

    def read():
        bytes_, total[0] = total[0], 0
        return bytes_
    return read


@pytest.mark.parametrize("N, D", [(3, 700), (101, 700), (130, 64)])
@pytest.mark.parametrize("add", [False, True])
def test_norms(counted, N, D, add):
    x, residual, weight = (torch.randn(shape, requires_grad=True) for shape in ((N, D), (N, D), (D,)))
    y = rms_norm.add_rms_norm(x, residual, weight) if add else (rms_norm.rms_norm(x, weight),)
    assert counted() == rms_norm._variant("fp32", D, add, False, N, "cpu").moved
    torch.autograd.backward(y, [torch.ones_like(t) for t in y])
    assert counted() == rms_norm._variant("fp32", D, add, True, N, "cpu").moved


@pytest.mark.parametrize("N, H, K, E", [(1, 3, 1, 64), (37, 3, 1, 64), (5, 24, 8, 128)])
def test_rope(counted, N, H, K, E):
    q, k = (torch.randn(N, heads, E, requires_grad=True) for heads in (H, K))
    out = rope.rope(q, k, torch.randn(N, E // 2), torch.randn(N, E // 2))
    assert counted() == rope._variant("fp32", "a model", H, K, E, False, N).moved
    torch.autograd.backward(out, [torch.ones_like(t) for t in out])
    assert counted() == rope._variant("fp32", "a model", H, K, E, True, N).moved


def test_swiglu(counted):
    gate, up = (torch.randn(3, 4999, requires_grad=True) for _ in range(2))
    y = swiglu.swiglu(gate, up)
    assert counted() == swiglu._variant("fp32", 4999, False, 3).moved
    y.backward(torch.ones_like(y))
    assert counted() == swiglu._variant("fp32", 4999, True, 3).moved


@pytest.mark.parametrize("S, H, K, E, B, length", [(2, 2, 1, 64, 16, 256), (3, 6, 3, 80, 128, 128), (1, 2, 2, 32, 16, 640)])
def test_decode_attention(counted, S, H, K, E, B, length):
    M = length // B
    table = torch.arange(S * M, dtype=torch.int32).view(S, M)
    q, k, v = torch.randn(S, H, E), torch.randn(S * M, K, B, E), torch.randn(S * M, K, B, E)
    decode_attention.decode_attention(q, k, v, table, torch.full((S,), length, dtype=torch.int32))
    assert counted() == sum(v.moved for v in decode_attention._variants("fp32", "a model", H, K, E, S, length, B, "cpu"))


@pytest.mark.parametrize("S, K, E", [(3, 2, 64), (5, 3, 40)])
def test_write_kv(counted, S, K, E):
    caches = torch.zeros(S, K, 16, E), torch.zeros(S, K, 16, E)
    write_kv.write_kv(torch.randn(S, K, E), torch.randn(S, K, E), *caches, torch.arange(S), torch.arange(S))
    assert counted() == write_kv._variant("fp32", "a model", K, E, S, 16).moved
