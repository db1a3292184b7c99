"""Rows of one prompt with its completions, and micro-batches of them.

A prompt's completions share one copy of it: each attends to the prompt and to itself, its positions going on from the
prompt's end. For a prompt of 512 tokens with 8 completions of 256 that is 2,560 tokens instead of 6,144.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toolr0_core.attention import PackedAttention, Segment


@dataclass(frozen=True)
class Row:
    """A prompt and some of its completions; `members` are the caller's indices of these completions."""

    prompt: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]
    members: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.prompt) + sum(map(len, self.completions))


@dataclass(frozen=True)
class MicroBatch:
    """A packed stream of N tokens and, for each of its M completion tokens: the stream row whose hidden state predicts it
    (`source`), the token, which completion it is of (`member`) and its place in there (`place`)."""

    ids_N: Tensor
    positions_N: Tensor
    attend: PackedAttention
    source_M: Tensor
    target_M: Tensor
    member_M: Tensor
    place_M: Tensor


def make_rows(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], groups: Sequence[int],
              budget: int) -> list[Row]:
    """Rows of at most `budget` tokens; a group that does not fit in one is split, with the prompt in each part.

    Raises ValueError where one prompt with one completion is longer than the budget, where a group has several prompts, and
    where a prompt is empty: nothing would predict a completion's first token.
    """
    by_group: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        if completions[i]:
            by_group.setdefault(group, []).append(i)
    rows = []
    for members in by_group.values():
        prompt, part, size = tuple(prompts[members[0]]), [], 0
        for i in members:
            need = len(completions[i])
            if not prompt or tuple(prompts[i]) != prompt:
                raise ValueError(f"completion {i} has a prompt of {len(prompts[i])} tokens, the first of its group {groups[i]} "
                                 f"one of {len(prompt)}; a group shares one prompt, of one token or more")
            if len(prompt) + need > budget:
                raise ValueError(f"a prompt of {len(prompt)} tokens with a completion of {need} is longer than "
                                 f"grpo.micro_batch_tokens {budget}; raise it or lower max_new_tokens")
            if part and len(prompt) + size + need > budget:
                rows.append(Row(prompt, tuple(tuple(completions[j]) for j in part), tuple(part)))
                part, size = [], 0
            part.append(i)
            size += need
        rows.append(Row(prompt, tuple(tuple(completions[j]) for j in part), tuple(part)))
    return rows


def spread(rows: Sequence[Row], ranks: int) -> list[list[Row]]:
    """Rows dealt to ranks, longest first to the rank with the fewest tokens; the same answer on every rank."""
    ordered = sorted(rows, key=lambda r: (-r.tokens, r.members))
    return [[ordered[i] for i in share] for share in deal([row.tokens for row in ordered], ranks)]


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Indices dealt to ranks, the dearest first to the rank with the least so far; the same answer on every rank."""
    loads, shares = [0.0] * ranks, [[] for _ in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = loads.index(min(loads))
        loads[rank] += costs[i]
        shares[rank].append(i)
    return shares


def micro_batches(rows: Sequence[Row], budget: int) -> list[list[Row]]:
    """Rows in order of size, filled up to the token budget."""
    batches: list[list[Row]] = []
    size = 0
    for row in rows:
        if not batches or size + row.tokens > budget:
            batches.append([])
            size = 0
        batches[-1].append(row)
        size += row.tokens
    return batches


def collate(rows: Sequence[Row], device: torch.device | str) -> MicroBatch:
    """Packs rows into one stream: prompt, completion, completion, ..., prompt, ..."""
    ids, positions, segments, source, target, member, place = [], [], [], [], [], [], []
    for row in rows:
        start, length = len(ids), len(row.prompt)
        ids += row.prompt
        positions += range(length)
        segments.append(Segment(start, length))
        for index, completion in zip(row.members, row.completions):
            begin = len(ids)
            ids += completion
            positions += range(length, length + len(completion))
            segments.append(Segment(begin, len(completion), (start, length)))
            source += [start + length - 1, *range(begin, begin + len(completion) - 1)]
            target += completion
            member += [index] * len(completion)
            place += range(len(completion))
    tensors = [torch.tensor(x, dtype=torch.long, device=device) for x in (ids, positions, source, target, member, place)]
    return MicroBatch(tensors[0], tensors[1], PackedAttention(segments, device), *tensors[2:])
