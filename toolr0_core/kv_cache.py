"""Keys and values of the sequences being sampled, in pages that sequences share.

A page holds B tokens of one sequence in every layer. It counts its users: the samples of a prompt use the prompt's full pages
together, and so do prompts that begin alike. A page that nobody uses any more keeps its contents until it is needed for others,
and a prompt that begins with the same tokens finds it again, until `forget`.

Shape suffixes: L layers, P pages of B tokens, S running sequences, M pages a sequence, N packed tokens, R spans, Q / T padded
query / key length, H query heads, K key/value heads, E head size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from toolr0_kernels import decode_attention, write_kv
from torch import Tensor

from toolr0_core.attention import PackedAttention, Segment
from toolr0_core.model import Attend, ModelConfig

PAGE_SIZE = 64  # tokens
GATHERED_TOKENS = 1 << 16  # of keys that one attention over earlier pages copies out of them


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Memory of one token's keys and values over all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize


@dataclass(frozen=True)
class Span:
    """Tokens that go on from `start` tokens which are in these pages already; the pages have room for them."""

    pages: Sequence[int]
    start: int
    tokens: Sequence[int]


class PagePool:
    """Pages of keys and values, and who uses them. Page 0 is nobody's: rows without a sequence write there."""

    def __init__(self, config: ModelConfig, pages: int, page_size: int, device: torch.device, dtype: torch.dtype):
        shape = (config.num_hidden_layers, pages, config.num_key_value_heads, page_size, config.head_dim)
        self.k_LPKBE, self.v_LPKBE = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))  # zeros: never NaN
        self.pages, self.page_size, self.device, self.dtype = pages, page_size, device, dtype
        self.reset()

    def reset(self) -> None:
        """Nobody uses anything, and what the pages hold is forgotten."""
        self.users = [0] * self.pages
        self.blank = list(range(self.pages - 1, 0, -1))  # unused, of no interest; the last one is taken next
        self.idle: OrderedDict[int, None] = OrderedDict()  # unused, with contents that can be found; the oldest goes first
        self.page_of: dict[bytes, int] = {}  # all tokens from the start of a prompt to the end of a page -> that page
        self.key_of: dict[int, bytes] = {}

    @property
    def spare(self) -> int:
        """How many pages can be taken."""
        return len(self.blank) + len(self.idle)

    @property
    def in_use(self) -> int:
        return self.pages - 1 - self.spare

    def take(self, n: int) -> list[int]:
        """n pages with one user each; their contents are anything but NaN."""
        taken = []
        for _ in range(n):
            if self.blank:
                page = self.blank.pop()
            else:
                page, _ = self.idle.popitem(last=False)
                del self.page_of[self.key_of.pop(page)]
            self.users[page] = 1
            taken.append(page)
        return taken

    def use(self, pages: Iterable[int]) -> None:
        """One more user of each."""
        for page in pages:
            if not self.users[page]:
                del self.idle[page]
            self.users[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One user less of each."""
        for page in pages:
            self.users[page] -= 1
            if self.users[page] < 0:
                raise RuntimeError(f"page {page} of the KV cache is dropped by more users than it has")
            if not self.users[page] and page in self.key_of:
                self.idle[page] = None
            elif not self.users[page]:
                self.blank.append(page)

    def remember(self, page: int, key: bytes) -> None:
        """The page ends what `key` holds: every token from the start of the sequence on. Another page that did is forgotten: it
        can be there still when an earlier page of its sequence has been taken."""
        old = self.page_of.get(key)
        if old is not None:
            del self.key_of[old]
            if not self.users[old]:
                del self.idle[old]
                self.blank.append(old)
        self.page_of[key], self.key_of[page] = page, key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the longest known beginning; keys are of one page, of two, and so on."""
        found = []
        for key in keys:
            if key not in self.page_of:
                break
            found.append(self.page_of[key])
        return found

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """The contents of pages to others, one to one."""
        source_C, target_C = (torch.tensor(x, device=self.device) for x in (source, target))
        for cache_LPKBE in (self.k_LPKBE, self.v_LPKBE):
            for cache_PKBE in cache_LPKBE:
                cache_PKBE[target_C] = cache_PKBE[source_C]

    # -- attention -----------------------------------------------------------------------------------------------------

    def _write(self, layer: int, page_N: Tensor, offset_N: Tensor, k_NKE: Tensor, v_NKE: Tensor) -> None:
        write_kv(k_NKE, v_NKE, self.k_LPKBE[layer], self.v_LPKBE[layer], page_N, offset_N)

    def decode(self, page_S: Tensor, offset_S: Tensor, table_SM: Tensor, seen_S: Tensor) -> Attend:
        """The `attend` of one new token for every row: it is written to its page, then the row sees `seen` tokens."""
        def attend(layer: int, q_SHE: Tensor, k_SKE: Tensor, v_SKE: Tensor) -> Tensor:
            self._write(layer, page_S, offset_S, k_SKE, v_SKE)
            return decode_attention(q_SHE, self.k_LPKBE[layer], self.v_LPKBE[layer], table_SM, seen_S)
        return attend

    def extend(self, spans: Sequence[Span]) -> Attend:
        """The `attend` of the packed tokens of spans. One may begin with pages that another one of them fills: every layer
        writes all keys before any are read."""
        lengths = [len(s.tokens) for s in spans]
        at = [sum(lengths[:i]) for i in range(len(spans))]
        position_N = torch.cat([torch.arange(s.start, s.start + n) for s, n in zip(spans, lengths)])
        page_N = torch.cat([torch.tensor(s.pages)[torch.arange(s.start, s.start + n) // self.page_size]
                            for s, n in zip(spans, lengths)]).to(self.device)
        offset_N = (position_N % self.page_size).to(self.device)
        fresh = [Segment(a, n) for s, a, n in zip(spans, at, lengths) if not s.start]
        packed = PackedAttention(fresh, self.device)
        later = [_Later.of(part, self.page_size, self.device) for part in _parts(
            [(s, a) for s, a in zip(spans, at) if s.start])]

        def attend(layer: int, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor) -> Tensor:
            self._write(layer, page_N, offset_N, k_NKE, v_NKE)
            out_NHE = packed(layer, q_NHE, k_NKE, v_NKE)
            for part in later:
                part(self.k_LPKBE[layer], self.v_LPKBE[layer], q_NHE, out_NHE)
            return out_NHE
        return attend


@dataclass(frozen=True)
class _Later:
    """Spans with earlier tokens, as rectangles: padded queries, all pages of each span, and the mask between them."""

    table_RM: Tensor
    query_RQ: Tensor  # places in the stream
    mask_R1QT: Tensor
    valid_RQ: Tensor
    slot_X: Tensor  # the places of the valid queries

    @classmethod
    def of(cls, spans: Sequence[tuple[Span, int]], page_size: int, device: torch.device) -> _Later:
        """Of spans and where their tokens begin in the stream."""
        ends = [s.start + len(s.tokens) for s, _ in spans]
        M = -(-max(ends) // page_size)
        table_RM = torch.tensor([[*s.pages[:M], *[0] * (M - len(s.pages))] for s, _ in spans])
        start_R1, length_R1, at_R1 = (torch.tensor(x)[:, None] for x in (
            [s.start for s, _ in spans], [len(s.tokens) for s, _ in spans], [a for _, a in spans]))
        query_1Q = torch.arange(int(length_R1.max()))[None]
        valid_RQ = query_1Q < length_R1
        query_RQ = torch.where(valid_RQ, at_R1 + query_1Q, at_R1)  # padded queries repeat a real token
        mask_R1QT = (torch.arange(M * page_size) <= (start_R1 + query_1Q)[:, :, None])[:, None]
        return cls(*(x.to(device) for x in (table_RM, query_RQ, mask_R1QT, valid_RQ, query_RQ[valid_RQ])))

    def __call__(self, k_PKBE: Tensor, v_PKBE: Tensor, q_NHE: Tensor, out_NHE: Tensor) -> None:
        k_RKTE, v_RKTE = (cache[self.table_RM].transpose(1, 2).flatten(2, 3) for cache in (k_PKBE, v_PKBE))
        q_RHQE = q_NHE[self.query_RQ].transpose(1, 2)
        out_RHQE = F.scaled_dot_product_attention(q_RHQE, k_RKTE, v_RKTE, attn_mask=self.mask_R1QT,
                                                  enable_gqa=q_RHQE.shape[1] != k_RKTE.shape[1])
        out_NHE[self.slot_X] = out_RHQE.transpose(1, 2)[self.valid_RQ]


def _parts(spans: Sequence[tuple[Span, int]]) -> Iterable[list[tuple[Span, int]]]:
    """Consecutive spans whose rectangle of keys has GATHERED_TOKENS at most, or one that has more."""
    part, longest = [], 0
    for span in spans:
        longest = max(longest, span[0].start + len(span[0].tokens))
        if part and longest * (len(part) + 1) > GATHERED_TOKENS:
            yield part
            part, longest = [], span[0].start + len(span[0].tokens)
        part.append(span)
    if part:
        yield part
