"""Equality of values, calls and call lists: the one rule that rewards, probes and evaluation share.

strict: JSON-typed equality. lenient: numbers by value, a string that is a short number is that number, strings after NFC
and white-space folding, strings that hold JSON are that JSON, null arguments are absent. NaN and infinity equal nothing.
Every function is total: it returns for any values that JSON or a Python literal can hold.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from toolr0_core.schema import ToolCall

RULES = ("strict", "lenient")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_MAX_DIGITS = 15  # longer digit strings are identifiers
_MAX_DEPTH = 32


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
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if not all(isinstance(x, int) or math.isfinite(x) for x in (a, b)):
        return False
    if not lenient:
        return type(a) is type(b) and a == b
    try:
        return a == b or math.isclose(float(a), float(b), rel_tol=1e-9, abs_tol=0.0)
    except OverflowError:  # an integer beyond every float
        return False


def _read(value: Any) -> Any:
    """What a string stands for under the lenient rule: a number, a list, an object, or itself with its spaces folded."""
    if not isinstance(value, str):
        return value
    text = " ".join(unicodedata.normalize("NFC", value).split())
    if _NUMBER.fullmatch(text):
        if sum(c.isdigit() for c in text) > _MAX_DIGITS:
            return text
        return float(text) if any(c in text for c in ".eE") else int(text)
    if text[:1] in "[{" and text[-1:] in "]}" and text.count("[") + text.count("{") <= _MAX_DEPTH:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text


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
    options = [[j for j, g in enumerate(gold) if call_equal(p, g, rule)] for p in predicted]
    owner: dict[int, int] = {}  # gold -> predicted, grown by augmenting paths

    def place(i: int) -> bool:
        frontier, came = [i], {}
        while frontier:
            p = frontier.pop()
            for j in options[p]:
                if j in came:
                    continue
                came[j] = p
                if j not in owner:
                    while True:  # walk back, handing each gold call over
                        p = came[j]
                        former = next((g for g, o in owner.items() if o == p), None)
                        owner[j] = p
                        if p == i:
                            return True
                        j = former
                frontier.append(owner[j])
        return False

    return all(place(i) for i in range(len(predicted)))


def best_assignment(score: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Pairs (row, column), each used at most once, with the greatest sum of scores: the Hungarian method, O(n^3)."""
    if not score or not score[0]:
        return []
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
    """One text for a list of calls: compact JSON with sorted keys, calls in their order."""
    return json.dumps([c.to_json() for c in calls], sort_keys=True, separators=(",", ":"), default=str)
