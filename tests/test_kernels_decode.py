"""decode_attention: against fp64 attention over keys and values that are not in pages. write_kv: places by hand."""

import pytest
import torch
from toolr0_kernels import cpp, decode_attention, write_kv


def cache(lengths, K=2, B=4, E=64, seed=0, spare=3):
    """Keys and values of sequences [T, K, E] each, the same in pages of a shuffled cache, and the table."""
    g = torch.Generator().manual_seed(seed)
    keys, values = ([torch.randn(n, K, E, generator=g) for n in lengths] for _ in range(2))
    pages = [-(-n // B) for n in lengths]
    order = torch.randperm(sum(pages) + spare, generator=g).tolist()
    k_cache, v_cache = (torch.full((len(order), K, B, E), torch.nan) for _ in range(2))  # what is not written may be anything
    table = torch.full((len(lengths), max([*pages, 1]) + 1), -1, dtype=torch.int32)
    for s, n in enumerate(lengths):
        for m in range(pages[s]):
            page = table[s, m] = order.pop()
            part = slice(m * B, min((m + 1) * B, n))
            k_cache[page, :, : part.stop - part.start] = keys[s][part].transpose(0, 1)
            v_cache[page, :, : part.stop - part.start] = values[s][part].transpose(0, 1)
    return keys, values, k_cache, v_cache, table


def expected(q, keys, values, scale):
    """fp64, one sequence and query head at a time."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for s in range(q.shape[0]):
        for h in range(q.shape[1]):
            k, v = (x[s][:, h * x[s].shape[1] // q.shape[1]].double() for x in (keys, values))
            if len(k):
                out[s, h] = (k @ q[s, h].double() * scale).softmax(0) @ v
    return out


@pytest.mark.parametrize("H, K, E", [(9, 3, 64), (14, 2, 64), (2, 2, 128), (3, 1, 32), (12, 1, 96)])
@pytest.mark.parametrize("B", [4, 16])
def test_equals_fp64_attention_at_ragged_lengths(impl, H, K, E, B):
    lengths = [1, B - 1, B, B + 1, 0, 37]
    keys, values, k_cache, v_cache, table = cache(lengths, K, B, E)
    q = torch.randn(len(lengths), H, E, generator=torch.Generator().manual_seed(1))
    length = torch.tensor(lengths, dtype=torch.int32)
    out = decode_attention(q, k_cache, v_cache, table, length, impl=impl)
    assert out.dtype == torch.float32 and (out.double() - expected(q, keys, values, E ** -0.5)).abs().max() < 2e-6
    out = decode_attention(q, k_cache, v_cache, table, length, scale=0.5, impl=impl)
    assert (out.double() - expected(q, keys, values, 0.5)).abs().max() < 2e-5  # sharper


@pytest.mark.parametrize("E", [16, 40, 80])
def test_head_sizes_that_have_no_c_code_run_in_torch(E):
    keys, values, k_cache, v_cache, table = cache([5, 9], E=E)
    q = torch.randn(2, 4, E, generator=torch.Generator().manual_seed(1))
    out = decode_attention(q, k_cache, v_cache, table, torch.tensor([5, 9], dtype=torch.int32))
    assert (out.double() - expected(q, keys, values, E ** -0.5)).abs().max() < 2e-6
    if cpp.problem is None:
        with pytest.raises(ValueError, match=f"head size {E}"):
            decode_attention(q, k_cache, v_cache, table, torch.tensor([5, 9], dtype=torch.int32), impl="cpp")


def test_sequences_may_share_pages(impl):
    """Two samples of one prompt: the same first pages, a page of their own each."""
    _, _, k_cache, v_cache, table = cache([8, 3, 3])
    shared = torch.stack((torch.cat((table[0, :2], table[1, :1])), torch.cat((table[0, :2], table[2, :1]))))
    copies = torch.cat((k_cache, k_cache[table[0, :2].long()])), torch.cat((v_cache, v_cache[table[0, :2].long()]))
    apart = shared.clone()
    apart[1, :2] = torch.tensor([len(k_cache), len(k_cache) + 1])
    q, length = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(1)), torch.tensor([11, 11], dtype=torch.int32)
    assert torch.equal(decode_attention(q, k_cache, v_cache, shared, length, impl=impl),
                       decode_attention(q, *copies, apart, length, impl=impl))


def test_a_large_score_leaves_the_others_nothing(impl):
    keys, values, k_cache, v_cache, table = cache([6])
    k_cache *= 100
    q = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(1))
    out = decode_attention(q, k_cache, v_cache, table, torch.tensor([6], dtype=torch.int32), impl=impl)
    assert (out.double() - expected(q, [100 * keys[0]], values, 64 ** -0.5)).abs().max() < 1e-4


def test_scores_of_minus_infinity_leave_the_others_everything(impl):
    """The whole first page, even."""
    q, k, v = torch.full((1, 1, 32), 1e20), torch.full((2, 1, 1, 32), -1e20), torch.randn(2, 1, 1, 32)
    k[1] = 1.0
    out = decode_attention(q, k, v, torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32), impl=impl)
    assert torch.equal(out[0], v[1, 0])


def test_no_sequence_is_no_output(impl):
    _, _, k_cache, v_cache, table = cache([4])
    out = decode_attention(torch.zeros(0, 2, 64), k_cache, v_cache, table[:0], torch.zeros(0, dtype=torch.int32), impl=impl)
    assert out.shape == (0, 2, 64)


@pytest.mark.parametrize("change, message", [
    (dict(q=torch.zeros(1, 3, 64)), r"they have to be \[S, H, E\] and twice \[pages, K, B, E\] with H a multiple of K"),
    (dict(length=torch.tensor([13], dtype=torch.int32)), "lengths go from 13 to 13; 3 pages of 4 hold 0 to 12"),
    (dict(length=torch.tensor([-1], dtype=torch.int32)), "lengths go from -1 to -1"),
    (dict(table=torch.full((1, 3), 99, dtype=torch.int32)), "page numbers go from 99 to 99; the cache has 0..4"),
    (dict(length=torch.tensor([8])), "they have to be int32"),
    (dict(q=torch.zeros(1, 4, 64, dtype=torch.float16)), "they have to be of one dtype"),
])
def test_bad_arguments_are_one_sentence(impl, change, message):
    _, _, k_cache, v_cache, table = cache([8])
    good = dict(q=torch.zeros(1, 4, 64), k=k_cache, v=v_cache, table=table, length=torch.tensor([8], dtype=torch.int32))
    decode_attention(*good.values(), impl=impl)
    with pytest.raises(ValueError, match=message):
        decode_attention(*{**good, **change}.values(), impl=impl)


@pytest.mark.parametrize("S, K, E", [(3, 2, 5), (1, 1, 64), (5, 3, 40)])
def test_write_kv_puts_every_row_in_its_place_and_refuses_others(impl, S, K, E):
    k, v = torch.randn(S, K, E), torch.randn(S, K, E)
    caches = torch.zeros(4, K, 6, E), torch.zeros(4, K, 6, E)
    page, offset = torch.tensor([3, 0, 3, 1, 2])[:S], torch.tensor([5, 0, 1, 1, 5])[:S]
    write_kv(k, v, *caches, page, offset, impl=impl)
    for cache, x in zip(caches, (k, v)):
        assert torch.equal(cache[page, :, offset], x) and (cache != 0).sum() == x.numel()
    for bad in ((page + 4, offset), (page, offset - 6)):
        with pytest.raises(ValueError, match="the cache has 0.."):
            write_kv(k, v, *caches, *bad, impl=impl)
    write_kv(k[:0], v[:0], *caches, page[:0], offset[:0], impl=impl)
