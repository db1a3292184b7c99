"""kv_cache: rows of every age against attention over their own history, in fp64, one row at a time."""

import pytest
import torch

from toolr0_core.kv_cache import KVCache, bytes_per_token, matmul_fp32
from toolr0_core.model import ModelConfig

CONFIG = ModelConfig(vocab_size=7, hidden_size=24, intermediate_size=8, num_hidden_layers=2, num_attention_heads=6,
                     num_key_value_heads=2, head_dim=4)


@pytest.fixture(autouse=True)
def nan_in_fresh_memory():
    """What is read before it is written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class History:
    """Every row's keys and values, in lists."""

    def __init__(self, dtype=torch.float32):
        self.cache, self.dtype, self.rows, self.rng = KVCache(CONFIG, "cpu", dtype), dtype, [], torch.Generator().manual_seed(0)

    def tokens(self, n):
        return [torch.randn(n, heads, 4, generator=self.rng).to(self.dtype) for heads in (6, 2, 2)]

    def rebuild(self, keep, lengths, counts, room):
        self.cache.rebuild(keep, lengths, counts, room)
        self.rows, prompts = [self.rows[i] for i in keep], []
        attend = self.cache.prefill(len(self.cache.lengths) - len(lengths), lengths) if lengths else None
        for layer in range(2 if lengths else 0):
            q, k, v = self.tokens(sum(lengths))
            out = attend(layer, q, k, v).split(lengths)
            prompts.append(list(zip(k.split(lengths), v.split(lengths))))
            for own_q, own_out, (own_k, own_v) in zip(q.split(lengths), out, prompts[-1]):
                assert close(own_out[-1], attention(own_q[-1], own_k, own_v), own_q[-1], own_k, own_v)
        for g, count in enumerate(counts):
            self.rows += [[prompts[layer][g] for layer in range(2)] for _ in range(count)]

    def decode(self):
        for layer in range(2):
            q, k, v = self.tokens(len(self.rows))
            out = self.cache.decode(layer, q, k, v)
            for i, row in enumerate(self.rows):
                keys, values = row[layer]
                row[layer] = torch.cat((keys, k[i: i + 1])), torch.cat((values, v[i: i + 1]))
                assert close(out[i], attention(q[i], *row[layer]), q[i], *row[layer])
        self.cache.advance()


def attention(q_HE, k_TKE, v_TKE):
    """One query over its whole history, in fp64."""
    k_HTE, v_HTE = (x.double().repeat_interleave(3, 1).transpose(0, 1) for x in (k_TKE, v_TKE))
    return ((k_HTE @ q_HE.double()[..., None]).mul(0.5).softmax(1) * v_HTE).sum(1)


def close(out, expected, q_HE, k_TKE, v_TKE):
    """Within 1e-5 in fp32; in bf16 no further off than twice what rounding the exact result costs."""
    bound = 1e-5 if out.dtype == torch.float32 else 2 * 2.0**-8 * v_TKE.float().abs().max()
    return (out.double() - expected).abs().max() < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_leave_join_and_grow_attend_to_their_own_history(dtype):
    h = History(dtype)
    h.rebuild([], [5, 3], [3, 2], room=2)  # two prompts of unlike lengths
    h.decode()
    h.decode()
    assert h.cache.full
    h.rebuild(range(5), [], [], room=3)  # only growth
    h.decode()
    h.rebuild([0, 2, 4], [9, 1], [1, 4], room=4)  # rows leave, groups join, prompts longer and shorter than all before
    h.decode()
    h.rebuild([1, 4, 5, 6, 7], [], [], room=2)  # a whole group leaves; ages differ
    h.decode()
    h.rebuild([2, 3], [2], [2], room=2)  # nobody is left of the first ones: their columns go
    assert h.cache.columns == 2
    h.decode()
    h.decode()


def test_equal_groups_keep_their_rectangle():
    h = History()
    h.rebuild([], [4, 4, 4], [2, 2, 2], room=3)
    for _ in range(3):
        h.decode()
    h.rebuild(range(6), [], [], room=1)
    h.decode()


def test_an_empty_cache_can_begin_again():
    h = History()
    h.rebuild([], [4], [2], room=1)
    h.decode()
    h.rebuild([], [], [], room=0)
    assert h.cache.columns == 0 and h.cache.lengths == []
    h.rebuild([], [2], [1], room=1)
    h.decode()


def test_a_nan_among_hidden_keys_harms_only_its_own_rows():
    cache = KVCache(CONFIG, "cpu", torch.float32)
    cache.rebuild([], [2, 2], [1, 1], 2)
    attend = cache.prefill(0, [2, 2])
    for layer in range(2):
        attend(layer, torch.zeros(4, 6, 4), torch.zeros(4, 2, 4), torch.zeros(4, 2, 4))
    x = torch.zeros(2, 2, 4)
    x[0] = torch.nan
    out = cache.decode(0, torch.zeros(2, 6, 4), x, x)
    assert out[0].isnan().all() and not out[1].isnan().any()


def test_memory_of_a_token():
    assert bytes_per_token(CONFIG, torch.bfloat16) == 2 * 2 * 2 * 4 * 2  # keys and values, layers, heads, size, bytes


def test_products_of_bf16_are_not_rounded_to_bf16():
    a, b = torch.randn(2, 3, 4, 64).bfloat16(), torch.randn(2, 3, 64, 5).bfloat16()
    out = matmul_fp32(a, b)
    assert out.dtype == torch.float32 and (out.double() - a.double() @ b.double()).abs().max() < 1e-4
