"""matching: the rule of equality, against hand-written truths."""

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolr0_core.matching import best_assignment, calls_equal, canonical, values_equal
from toolr0_core.schema import ToolCall as C

plain = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x, max_size=3)
                     | st.dictionaries(st.text(max_size=4), x, max_size=3), max_leaves=6)


@pytest.mark.parametrize("a, b, strict, lenient", [
    (5, 5, True, True), (5, "5", False, True), (5, 5.0, False, True), ("5", "5.0", False, True), (7, "007", False, False),
    (True, 1, False, False), (True, "true", False, False), ("a  b ", "a b", False, True), ("Paris", "paris", False, False),
    (float("nan"), float("nan"), False, False), (float("inf"), float("inf"), False, False),
    ("1234567890123456", 1234567890123456, False, False), ("1e3", 1000, False, True), ("[1, 2]", [1, 2], False, True),
    ([1, 2], [2, 1], False, False), ({"a": 1, "b": None}, {"a": 1}, False, True), (1.0, 1.0 + 1e-12, False, True),
    (10**400, 1.0, False, False), (10**400, 10**400, True, True), (10**400, 10**400 + 1, False, False),
    (10**12, 10**12 + 1.0, False, False), (1e12, 1e12 + 1, False, False), (602214076 * 10**15, 6.02214076e23, False, True),
    (0.1 + 0.2, 0.3, False, True), ("40.70", 40.7, False, True), (1.5, 1.5 + 1e-8, False, False), (0.0, 1e-300, False, False),
    ("5", True, False, False), ("5.0", True, False, False), (0, False, False, False), ("", 0, False, False), ("+5", 5, False, False),
    ("007", "007", True, True), ("007", "7", False, False), (".5", 0.5, False, False), (" 5 ", 5, False, True), ("1,000", 1000, False, False),
    ("\u0665", 5, False, False), ("123456789012345", 123456789012345, False, True), ("1e999", "1e999", True, True),
    ("1e999", float("inf"), False, False), ("[NaN]", "[NaN]", True, True), ("[1e999]", "[1e999]", True, True),
    ('{"a": [-1e999, 1]}', '{"a":  [-1e999, 1]}', False, True), ("[1e999]", "[-1e999]", False, False), ("[-Infinity]",) * 2 + (True,) * 2,
    ('["[1e999]"]', ["[1e999]"], False, True), ("[1, 2", "[1, 2", True, True),
    ('{"a": [1, "x  y"]}', {"a": ["1", "x y"]}, False, True), (str([[i, i] for i in range(40)]), [[i, i] for i in range(40)], False, True),
    ("[" * 10**5, "[" * 10**5, True, True), ("[" * 500 + "]" * 500, "[" * 500 + "]" * 500, True, True), ({"a": None}, {}, False, True),
    ([None], [], False, False), ({"a": 1}, {"a": 1, "b": 2}, False, False), ({}, [], False, False), ((1, 2), [1, 2], True, True),
    ("\u00e9", "e\u0301", False, True), ("-0", 0, False, True), ("", None, False, False)], ids=lambda x: ascii(x)[:20])
def test_spot_values_of_both_rules(a, b, strict, lenient):
    assert values_equal(a, b, "strict") is strict and values_equal(b, a, "strict") is strict
    assert values_equal(a, b, "lenient") is lenient and values_equal(b, a, "lenient") is lenient


@given(plain, plain)
def test_any_values_compare_symmetrically_without_raising(a, b):
    for rule in ("strict", "lenient"):
        assert values_equal(a, b, rule) == values_equal(b, a, rule)


def test_an_unknown_rule_is_named():
    with pytest.raises(ValueError, match="loose"):
        values_equal(1, 1, "loose")


def test_calls_match_in_any_order_unless_order_counts():
    a, b = C("a", {"x": 1}), C("b", {"y": 2})
    assert calls_equal([b, a], [a, b]) and not calls_equal([b, a], [a, b], ordered=True)
    assert not calls_equal([a], [a, b])  # the first call alone is never enough (known fault 1)
    assert not calls_equal([a, a], [a, b])
    assert calls_equal([], [])


def test_pairing_is_optimal_where_the_first_fit_fails():
    # lenient equality is not transitive: the middle value fits both others, which do not fit each other
    low, middle, high = (C("f", {"a": 1.5 * (1 + k * 8e-10)}) for k in range(3))
    assert calls_equal([middle, low], [low, high]) and calls_equal([low, middle], [high, low])
    assert not calls_equal([low, low], [middle, high])
    assert not calls_equal([middle, low], [low, high], rule="strict")


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=5))
@settings(max_examples=300)
def test_pairing_equals_exhaustive_search(pairs):
    predicted, gold = ([C("f", {"a": 1.5 * (1 + k * 8e-10)}) for k in side] for side in zip(*pairs)) if pairs else ([], [])
    fits = any(all(calls_equal([p], [g]) for p, g in zip(order, gold)) for order in itertools.permutations(predicted))
    assert calls_equal(predicted, gold) == fits


def test_many_calls_are_paired_too():
    calls = [C("f", {"a": i // 2}) for i in range(100)]
    assert calls_equal(calls[::-1], calls)
    assert not calls_equal(calls[:-1] + calls[:1], calls)


def test_names_match_to_the_letter_and_null_arguments_are_absent():
    assert not calls_equal([C("F", {})], [C("f", {})])
    crossed = [C("a", {"x": 2}), C("b", {"x": 1})]
    assert not calls_equal(crossed, [C("a", {"x": 1}), C("b", {"x": 2})]) and not calls_equal([C("a")], [C("b")], ordered=True)
    assert calls_equal([C("f", {"a": 1, "b": None})], [C("f", {"a": 1})])
    assert not calls_equal([C("f", {"a": 1, "b": None})], [C("f", {"a": 1})], rule="strict")


def test_integers_that_python_will_not_print_compare():
    assert values_equal(10**5000, 10**5000) and not values_equal(10**5000, 0.5) and not values_equal("9" * 5000, 10**5000)


def test_values_of_any_depth_are_answered():
    deep = 1
    for _ in range(50_000):
        deep = [deep]
    assert not values_equal(deep, deep) and not values_equal(deep, 1)
    within_parse = json.loads("[" * 32 + "1" + "]" * 32)
    assert values_equal({"a": within_parse}, {"a": within_parse}) and values_equal(json.dumps(within_parse), within_parse)
    while isinstance(deep, list):  # taken apart here: freeing it at once would recurse as deep
        deep = deep[0]


@given(st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=1, max_size=4))
def test_assignment_equals_exhaustive_search(score):
    n, m = len(score), 3
    best = max(sum(score[i][j] for i, j in zip(rows, columns)) for k in [min(n, m)]
               for rows in itertools.permutations(range(n), k) for columns in itertools.combinations(range(m), k))
    pairs = best_assignment(score)
    assert pairs == sorted(pairs) and len({i for i, _ in pairs}) == len({j for _, j in pairs}) == min(n, m)
    assert sum(score[i][j] for i, j in pairs) == pytest.approx(best)


def test_assignment_of_hand_made_scores():
    assert best_assignment([[0.75, 0.5], [1.0, 0.5]]) == [(0, 1), (1, 0)]  # greedy: 1.25; best: 1.5
    assert best_assignment([[1.0], [2.0], [3.0]]) == [(2, 0)] and best_assignment([[1.0, 2.0, 3.0]]) == [(0, 2)]
    assert best_assignment([]) == best_assignment([[]]) == best_assignment([[], []]) == []


def test_a_large_assignment_finds_the_planted_permutation():
    n, rng = 60, random.Random(0)
    planted = rng.sample(range(n), n)
    score = [[0.9 * rng.random() + (planted[i] == j) for j in range(n)] for i in range(n)]
    for i in range(n):
        score[i][planted[i]] = 1.0  # no other pair has more, so no other permutation has
    assert best_assignment(score) == list(enumerate(planted))


@pytest.mark.parametrize("score", [[[float("nan")]], [[float("-inf"), 1.0]], [[1.0, 2.0], [1.0]]])
def test_scores_that_have_no_best_assignment_are_refused(score):
    with pytest.raises(ValueError, match="full matrix"):
        best_assignment(score)


def test_canonical_ignores_key_order():
    assert canonical([C("f", {"a": 1, "b": 2})]) == canonical([C("f", {"b": 2, "a": 1})])
    assert canonical([C("f", {"b": {"d": 1, "c": [True]}})]) == '[{"arguments":{"b":{"c":[true],"d":1}},"name":"f"}]'
    assert canonical([C("f", {"a": 5})]) != canonical([C("f", {"a": "5"})]) and canonical([]) == "[]"
