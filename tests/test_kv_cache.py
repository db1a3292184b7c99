"""kv_cache: pages of every age against attention over their own history in fp64, and the counting of users."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolr0_core.kv_cache import PagePool, Span, bytes_per_token
from toolr0_core.model import ModelConfig

CONFIG = ModelConfig(vocab_size=7, hidden_size=24, intermediate_size=8, num_hidden_layers=2, num_attention_heads=6,
                     num_key_value_heads=2, head_dim=4)


def pool(pages=12, size=4, dtype=torch.float32):
    return PagePool(CONFIG, pages, size, torch.device("cpu"), dtype)


class History:
    """Sequences in a pool, and all of their keys and values besides."""

    def __init__(self, dtype, size):
        self.pool, self.dtype, self.rng = pool(64, size, dtype), dtype, torch.Generator().manual_seed(0)
        self.pages, self.kept = [], []  # kept: of each sequence and layer, its keys and values

    def numbers(self, n):
        return [torch.randn(n, heads, 4, generator=self.rng).to(self.dtype) for heads in (6, 2, 2)]

    def begin(self, pages):
        self.pages.append(pages)
        self.kept.append([(torch.empty(0, 2, 4, dtype=self.dtype),) * 2 for _ in range(2)])

    def extend(self, grown):
        """grown: {sequence: new tokens}, read at once."""
        spans = [Span(self.pages[i], len(self.kept[i][0][0]), [0] * n) for i, n in grown.items()]
        attend = self.pool.extend(spans)
        for layer in range(2):
            q, k, v = self.numbers(sum(grown.values()))
            out = attend(layer, q, k, v)
            for i, *parts in zip(grown, *(x.split(list(grown.values())) for x in (q, k, v, out))):
                self.check(i, layer, *parts)

    def check(self, i, layer, q, k, v, out):
        keys, values = (torch.cat((old, new)) for old, new in zip(self.kept[i][layer], (k, v)))
        self.kept[i][layer] = keys, values
        for t in range(len(q)):
            seen = len(keys) - len(q) + t + 1
            expected = attention(q[t], keys[:seen], values[:seen])
            bound = 1e-5 if self.dtype == torch.float32 else 2 * 2.0**-8 * values.float().abs().max()
            assert (out[t].double() - expected).abs().max() < bound

    def decode(self, rows):
        size, lengths = self.pool.page_size, [len(self.kept[i][0][0]) for i in rows]
        width = max(len(p) for p in self.pages)
        table = torch.tensor([[*self.pages[i], *[0] * (width - len(self.pages[i]))] for i in rows], dtype=torch.int32)
        page = torch.tensor([self.pages[i][n // size] for i, n in zip(rows, lengths)])
        at = torch.tensor(lengths)
        attend = self.pool.decode(page, at % size, table, (at + 1).int())
        for layer in range(2):
            q, k, v = self.numbers(len(rows))
            out = attend(layer, q, k, v)
            for place, i in enumerate(rows):
                self.check(i, layer, *(x[place: place + 1] for x in (q, k, v, out)))


def attention(q_HE, k_TKE, v_TKE):
    """One query over its whole history, in fp64."""
    k_HTE, v_HTE = (x.double().repeat_interleave(3, 1).transpose(0, 1) for x in (k_TKE, v_TKE))
    return ((k_HTE @ q_HE.double()[..., None]).mul(0.5).softmax(1) * v_HTE).sum(1)


@pytest.mark.parametrize("size", [1, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequences_of_every_age_attend_to_their_own_history(dtype, size):
    h = History(dtype, size)
    for need in (14, 9, 20):
        h.begin(h.pool.take(-(-need // size)))
    h.extend({0: 5, 1: 4, 2: 1})  # a page and more, a page, less
    h.decode([0, 1, 2])
    h.decode([2, 0])
    h.extend({1: 3, 2: 4})  # goes on from what decoding wrote
    h.begin(h.pool.take(-(-6 // size)))
    h.extend({0: 2, 3: 6, 2: 1})  # old and new ones in one pass
    h.decode([2, 1, 0])


def test_a_span_may_begin_with_pages_that_another_one_fills_in_the_same_pass():
    h = History(torch.float32, 4)
    shared = h.pool.take(2)
    h.begin(shared + h.pool.take(1))
    h.begin(shared + h.pool.take(1))
    attend = h.pool.extend([Span(h.pages[0], 0, [0] * 10), Span(h.pages[1], 8, [0] * 3)])
    for layer in range(2):
        q, k, v = h.numbers(13)
        out = attend(layer, q, k, v)
        h.check(0, layer, q[:10], k[:10], v[:10], out[:10])
        h.kept[1][layer] = k[:8], v[:8]
        h.check(1, layer, q[10:], k[10:], v[10:], out[10:])


def test_a_copied_page_goes_its_own_way():
    h = History(torch.float32, 4)
    h.begin(h.pool.take(2))
    h.extend({0: 6})
    shared, partial = h.pages[0]
    h.begin([shared, *h.pool.take(1)])
    h.pool.copy([partial], [h.pages[1][1]])
    h.kept[1] = list(h.kept[0])
    h.decode([0, 1])
    h.decode([1, 0])


def test_a_nan_among_hidden_keys_harms_only_its_own_row():
    p = pool()
    table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    x = torch.zeros(2, 2, 4)
    x[0] = torch.nan
    attend = p.decode(torch.tensor([1, 3]), torch.tensor([0, 0]), table, torch.tensor([1, 1], dtype=torch.int32))
    out = attend(0, torch.zeros(2, 6, 4), x, x)
    assert out[0].isnan().all() and not out[1].isnan().any()


def test_rows_without_a_sequence_give_zeros_and_write_to_page_0():
    p = pool()
    attend = p.decode(torch.tensor([0]), torch.tensor([3]), torch.tensor([[5]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    assert not attend(0, torch.ones(1, 6, 4), torch.ones(1, 2, 4), torch.ones(1, 2, 4)).any()
    assert p.k_LPKBE[0, 0].any() and not p.k_LPKBE[0, 1:].any() and 0 not in p.take(p.spare)


def test_a_page_is_free_when_its_last_user_is_gone():
    p = pool(5)
    a = p.take(2)
    p.use(a)
    p.drop(a)
    assert p.in_use == 2 and p.spare == 2
    p.drop(a)
    assert p.in_use == 0
    with pytest.raises(RuntimeError, match="more users"):
        p.drop(a[:1])


def test_what_nobody_uses_is_found_until_its_page_is_needed_the_oldest_first():
    p = pool(4)
    pages = p.take(3)
    for page, key in zip(pages, (b"1", b"12", b"123")):
        p.remember(page, key)
    assert p.find([b"1", b"12", b"124"]) == pages[:2] and p.find([b"2", b"12"]) == []
    p.drop(pages[1:])
    p.drop(pages[:1])
    assert p.find([b"1", b"12", b"123"]) == pages
    p.use(pages[:1])
    assert p.take(1) == [pages[1]]  # idle the longest
    assert p.find([b"1", b"12", b"123"]) == pages[:1] and p.in_use == 2
    p.reset()
    assert p.find([b"1"]) == [] and p.in_use == 0


def test_a_page_whose_beginning_was_taken_gives_way_to_the_one_that_is_computed_again():
    p = pool(4)
    first, second = p.take(2)
    p.remember(first, b"1")
    p.remember(second, b"12")
    p.drop([first, second])
    assert p.take(2) == [3, first] and p.find([b"1", b"12"]) == []  # `second` still holds b"12"
    p.remember(first, b"1")
    p.remember(3, b"12")
    assert p.find([b"1", b"12"]) == [first, 3] and p.take(1) == [second]
    p.drop([3])
    assert p.find([b"1", b"12"]) == [first, 3] and p.take(1) == [3] and p.find([b"1", b"12"]) == [first]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["take", "use", "drop", "remember"]), st.integers(0, 5)), max_size=60))
def test_counts_are_those_of_a_plain_book_whatever_happens(steps):
    p, book = pool(7), []  # book: one entry a user of a page
    for what, x in steps:
        if what == "take" and p.spare:
            new = p.take(1)
            assert new[0] not in book and new[0] != 0
            book += new
        elif book and what == "use":
            p.use([book[x % len(book)]])
            book.append(book[x % len(book)])
        elif book and what == "drop":
            p.drop([book.pop(x % len(book))])
        elif book and what == "remember" and book[x % len(book)] not in p.key_of:
            p.remember(book[x % len(book)], bytes([x % 3]))  # keys that come again
        assert p.in_use == len(set(book)) and p.spare == 6 - len(set(book))
        assert {page: key for key, page in p.page_of.items()} == p.key_of and set(p.idle) <= set(p.key_of)


def test_memory_of_a_token():
    assert bytes_per_token(CONFIG, torch.bfloat16) == 2 * 2 * 2 * 4 * 2  # keys and values, layers, heads, size, bytes
