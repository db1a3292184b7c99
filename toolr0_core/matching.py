"""Equality of values, calls and call lists: the one rule that rewards, probes and evaluation share.

strict: JSON-typed equality. lenient: numbers by value, a string that is a short number is that number, strings after NFC
and white-space folding, strings that hold JSON are that JSON, null arguments are absent. NaN and infinity equal nothing.
Equality is total: it answers for any values that JSON or a Python literal can hold, and is False beyond a depth.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

from toolr0_core.parse import MAX_DEPTH, nesting
from toolr0_core.schema import ToolCall

RULES = ("strict", "lenient")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_MAX_DIGITS = 15  # longer digit strings are identifiers
_MAX_DEPTH = 4 * MAX_DEPTH  # arguments may be text that holds JSON, and their values too
_EXACT = 2**53  # floats hold every whole number up to here


def values_equal(a: Any, b: Any, rule: str = "lenient") -> bool:
    """Whether two argument values are the same under the rule; raises ValueError for an unknown rule."""
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}; it has to be strict or lenient")
    return _equal(a, b, rule == "lenient", 0)


def _equal(a: Any, b: Any, lenient: bool, depth: int) -> bool:
    if depth > _MAX_DEPTH:
        return False
    if lenient:
        a, b = _read(a), _read(b)
    if isinstance(a, bool) or isinstance(b, bool):
        return isinstance(a, bool) and isinstance(b, bool) and a == b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return _numbers_equal(a, b, lenient)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y, lenient, depth + 1) for x, y in zip(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        if lenient:
            a, b = ({k: v for k, v in d.items() if v is not None} for d in (a, b))
        return a.keys() == b.keys() and all(_equal(a[k], b[k], lenient, depth + 1) for k in a)
    return type(a) is type(b) and a == b


def _numbers_equal(a: int | float, b: int | float, lenient: bool) -> bool:
    if not all(isinstance(x, int) or math.isfinite(x) for x in (a, b)):
        return False
    if not lenient:
        return type(a) is type(b) and a == b
    if _is_whole(a) and _is_whole(b):
        return a == b
    try:
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=0.0)
    except OverflowError:  # an integer beyond every float
        return False


def _is_whole(x: int | float) -> bool:
    return isinstance(x, int) or (x.is_integer() and abs(x) <= _EXACT)


def _read(value: Any) -> Any:
    """What a string stands for under the lenient rule: a number, a list, an object, or itself with its spaces folded."""
    if not isinstance(value, str):
        return value
    text = " ".join(unicodedata.normalize("NFC", value).split())
    if _NUMBER.fullmatch(text):
        number = float(text) if any(c in text for c in ".eE") else text
        if sum(c.isdigit() for c in text) > _MAX_DIGITS or number in (math.inf, -math.inf):
            return text
        return int(text) if number is text else number
    if text[:1] in ("[", "{") and text[-1:] in ("]", "}") and nesting(text) <= MAX_DEPTH:
        try:
            return json.loads(text, parse_float=_finite, parse_constant=_finite)
        except (ValueError, RecursionError):
            return text
    return text


def _finite(text: str) -> float:
    if math.isfinite(number := float(text)):
        return number
    raise ValueError(f"{text} is no number that equals itself")


def call_equal(a: ToolCall, b: ToolCall, rule: str = "lenient") -> bool:
    """Same name to the letter, same argument names, equal values."""
    return a.name == b.name and values_equal(a.arguments, b.arguments, rule)


def calls_equal(predicted: Sequence[ToolCall], gold: Sequence[ToolCall], rule: str = "lenient",
                ordered: bool = False) -> bool:
    """Whether the calls can be paired one to one so that each pair is equal; in order where order counts."""
    if len(predicted) != len(gold):
        return False
    if ordered:
        return all(call_equal(p, g, rule) for p, g in zip(predicted, gold))
    if Counter(p.name for p in predicted) != Counter(g.name for g in gold):
        return False
    return _each_has_its_own([[j for j, g in enumerate(gold) if call_equal(p, g, rule)] for p in predicted])


def _each_has_its_own(options: list[list[int]]) -> bool:
    """Whether every row can have one of its options for itself: augmenting paths, at most rows * pairs steps.

    A first fit would not do: within its tolerance, equality is not transitive.
    """
    owner: dict[int, int] = {}  # column -> row
    owned: dict[int, int] = {}  # row -> column
    for row in range(len(options)):
        frontier, reached, free = [row], {}, None  # reached: column -> the row that would take it
        while frontier and free is None:
            taker = frontier.pop()
            for column in options[taker]:
                if column in reached:
                    continue
                reached[column] = taker
                if column not in owner:
                    free = column
                    break
                frontier.append(owner[column])
        if free is None:
            return False
        while free is not None:  # hand over along the path; the row that began it owned nothing
            taker = reached[free]
            owner[free], owned[taker], free = taker, free, owned.get(taker)
    return True


def best_assignment(score: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Pairs (row, column), each used at most once, with the greatest sum of scores: the Hungarian method, O(n^3).

    min(rows, columns) pairs, by row. Raises ValueError where rows differ in length or a score is not finite.
    """
    if not score or not score[0]:
        return []
    if any(len(row) != len(score[0]) for row in score) or not all(math.isfinite(x) for row in score for x in row):
        raise ValueError("scores have rows of different lengths or values that are not finite; give a full matrix of numbers")
    transposed = len(score) > len(score[0])
    cost = [[-x for x in row] for row in (zip(*score) if transposed else score)]
    n, m = len(cost), len(cost[0])
    u, v, match = [0.0] * (n + 1), [0.0] * (m + 1), [0] * (m + 1)
    for i in range(1, n + 1):
        match[0], j = i, 0
        least, way, used = [math.inf] * (m + 1), [0] * (m + 1), [False] * (m + 1)
        while match[j]:
            used[j] = True
            row, delta, following = match[j], math.inf, 0
            for k in range(1, m + 1):
                if used[k]:
                    continue
                slack = cost[row - 1][k - 1] - u[row] - v[k]
                if slack < least[k]:
                    least[k], way[k] = slack, j
                if least[k] < delta:
                    delta, following = least[k], k
            for k in range(m + 1):
                if used[k]:
                    u[match[k]] += delta
                    v[k] -= delta
                else:
                    least[k] -= delta
            j = following
        while j:
            match[j] = match[way[j]]
            j = way[j]
    pairs = [(match[k] - 1, k - 1) for k in range(1, m + 1) if match[k]]
    return sorted((b, a) for a, b in pairs) if transposed else sorted(pairs)


def canonical(calls: Sequence[ToolCall]) -> str:
    """One text for a list of calls as `parse` gives them: compact JSON with sorted keys, calls in their order."""
    return json.dumps([c.to_json() for c in calls], sort_keys=True, separators=(",", ":"), default=str)
