"""Keys and values of the sequences being sampled: each prompt's once, each sample's own in a rectangle behind it.

Shape suffixes: R groups (a prompt and its samples), P padded prompt length, S running sequences (rows), C columns,
n most rows of a group, K key/value heads, G query heads per key head, E head size, N packed tokens.

All rows write at the same column, whatever their age: a row knows the column where its own tokens start, and a bias hides
what is before. So a step writes one slice, rows may join and leave at any time, and positions do not matter, since
rotary embeddings are in the keys already. Rows of a group read the prompt's keys in one matrix product; their own keys
are a second one, and one softmax runs over both.

Attention reads the whole rectangle, columns that are still empty too: out of main memory, a batched product of contiguous
matrices is three times as fast as one of slices (measured on a CPU). So the rectangle grows by small steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from toolr0_core.attention import PackedAttention, Segment
from toolr0_core.model import Attend, ModelConfig


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Memory of one token's keys and values over all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize


class KVCache:
    """`rebuild` lets rows leave and groups join, `prefill` fills their prompts, `decode` and `advance` make a step."""

    def __init__(self, config: ModelConfig, device: torch.device | str, dtype: torch.dtype):
        self.device, self.columns = torch.device(device), 0  # columns: how many hold keys
        self.lengths: list[int] = []  # of each group's prompt
        self.group: list[int] = []  # of each row
        self.start: list[int] = []  # of each row: the column of its first own token
        K, E, layers = config.num_key_value_heads, config.head_dim, range(config.num_hidden_layers)
        self.prompt_k, self.prompt_v, self.k, self.v = (
            [torch.empty(0, K, 0, E, device=device, dtype=dtype) for _ in layers] for _ in range(4))

    @property
    def full(self) -> bool:
        return self.columns == self.k[0].shape[2]

    def rebuild(self, rows: Sequence[int], lengths: Sequence[int], counts: Sequence[int], room: int) -> None:
        """Keeps these rows (indices, ascending) and the groups they are of; appends groups of counts[i] rows, with
        prompts of lengths[i] tokens that prefill has to fill; leaves room for this many more columns."""
        groups = sorted({self.group[i] for i in rows})
        first = min((self.start[i] for i in rows), default=self.columns)  # columns before it hide from every row
        width = self.columns - first
        place = {g: i for i, g in enumerate(groups)}
        self.group = [place[self.group[i]] for i in rows]
        self.group += [len(groups) + i for i, count in enumerate(counts) for _ in range(count)]
        self.start = [self.start[i] - first for i in rows] + [width] * sum(counts)
        self.lengths = [self.lengths[g] for g in groups] + list(lengths)
        P = max(self.lengths, default=0)
        for cache, index, shape, low, filled in (
                (self.prompt_k, groups, (len(self.lengths), P), 0, P), (self.prompt_v, groups, (len(self.lengths), P), 0, P),
                (self.k, rows, (len(self.group), width + room), first, width),
                (self.v, rows, (len(self.group), width + room), first, width)):
            index = torch.tensor(index, device=self.device, dtype=torch.long)
            cache[:] = [_move(old, index, shape, low, filled) for old in cache]
        self.columns = width
        self._index()

    def _index(self) -> None:
        """Tensors of what the lists say: the bias of every row, and the rows' places in a rectangle of groups."""
        lengths, starts = (torch.tensor(x) for x in ([self.lengths[g] for g in self.group], self.start))
        self.P, C = self.prompt_k[0].shape[2], self.k[0].shape[2]
        column_C = torch.arange(C)
        own_SC = (column_C < starts[:, None]) | (column_C >= self.columns)
        hidden_SC = torch.cat((torch.arange(self.P) >= lengths[:, None], own_SC), 1)
        self.bias_S11C = torch.zeros(hidden_SC.shape).masked_fill(hidden_SC, -torch.inf)[:, None, None].to(self.device)
        ranks, seen = [], [0] * len(self.lengths)
        for g in self.group:
            ranks.append(seen[g])
            seen[g] += 1
        self.n = max(seen, default=0)
        slots = [g * self.n + rank for g, rank in zip(self.group, ranks)]
        self.slot_S = None if len(slots) == len(seen) * self.n else torch.tensor(slots, device=self.device)

    def prefill(self, first: int, lengths: Sequence[int]) -> Attend:
        """The `attend` for the packed prompts of groups first, first + 1, ..., which have these lengths."""
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        packed = PackedAttention([Segment(s, n) for s, n in zip(starts, lengths)], self.device)
        group_N = torch.arange(first, first + len(lengths)).repeat_interleave(torch.tensor(lengths)).to(self.device)
        token_N = torch.cat([torch.arange(n) for n in lengths]).to(self.device)

        def attend(layer: int, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor) -> Tensor:
            self.prompt_k[layer].transpose(1, 2)[group_N, token_N] = k_NKE
            self.prompt_v[layer].transpose(1, 2)[group_N, token_N] = v_NKE
            return packed(layer, q_NHE, k_NKE, v_NKE)
        return attend

    def decode(self, layer: int, q_SHE: Tensor, k_SKE: Tensor, v_SKE: Tensor) -> Tensor:
        """The `attend` of one new token for every row. Scores, weights and sums are fp32."""
        k_SKCE, v_SKCE = self.k[layer], self.v[layer]
        k_SKCE[:, :, self.columns], v_SKCE[:, :, self.columns] = k_SKE, v_SKE
        if layer == 0:
            self.bias_S11C[..., self.P + self.columns] = 0
        q_SKGE = (q_SHE * q_SHE.shape[-1] ** -0.5).unflatten(1, (k_SKE.shape[1], -1))
        shared = self._by_row(matmul_fp32(self._by_group(q_SKGE), self.prompt_k[layer].transpose(-1, -2)), q_SKGE)
        scores_SKGC = torch.cat((shared, matmul_fp32(q_SKGE, k_SKCE.transpose(-1, -2))), -1)
        scores_SKGC += self.bias_S11C
        shared, own = scores_SKGC.softmax(-1).to(q_SHE.dtype).split((self.P, k_SKCE.shape[2]), -1)
        out = self._by_row(matmul_fp32(self._by_group(shared), self.prompt_v[layer]), q_SKGE) + matmul_fp32(own, v_SKCE)
        return out.to(q_SHE.dtype).flatten(1, 2)

    def advance(self) -> None:
        """The column that decode wrote in every layer now counts."""
        self.columns += 1

    def _by_group(self, x_SKGX: Tensor) -> Tensor:
        """Rows gathered under their groups: [R, K, n * G, X], zeros where a group has fewer than n rows."""
        R, shape = len(self.lengths), x_SKGX.shape[1:]
        if self.slot_S is not None:
            x_SKGX = x_SKGX.new_zeros(R * self.n, *shape).index_copy_(0, self.slot_S, x_SKGX)
        return x_SKGX.view(R, self.n, *shape).transpose(1, 2).flatten(2, 3)

    def _by_row(self, x_RKnX: Tensor, like_SKGX: Tensor) -> Tensor:
        """The inverse: [S, K, G, X]."""
        K, G = like_SKGX.shape[1:3]
        x = x_RKnX.unflatten(2, (self.n, G)).transpose(1, 2).reshape(-1, K, G, x_RKnX.shape[-1])
        return x if self.slot_S is None else x[self.slot_S]


def _move(old: Tensor, index: Tensor, shape: tuple[int, int], low: int, filled: int) -> Tensor:
    """A cache of `shape` (rows, columns): first old's rows `index` from column low on, then empty rows. Zeros wherever a
    masked column may be read: a weight of 0 times a value that happens to be NaN is NaN."""
    if old.shape[0] == len(index) == shape[0] and old.shape[2] == shape[1] and low == 0:
        return old  # nobody leaves, nobody joins
    new = old.new_empty(shape[0], old.shape[1], shape[1], old.shape[3])
    kept = old[:, :, low: low + filled]
    kept = kept if len(index) == len(old) else kept.index_select(0, index)
    new[: len(index), :, : kept.shape[2]] = kept
    new[: len(index), :, kept.shape[2]:] = 0
    new[len(index):] = 0
    return new


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for matrices or equal batches of them, with an fp32 result whatever the dtype of the two."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        flat = torch.bmm(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]), out_dtype=torch.float32)
        return flat.view(*a.shape[:-1], b.shape[-1])
    return a.float() @ b.float()
