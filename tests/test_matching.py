"""matching: the rule of equality, against hand-written truths."""

import itertools

import pytest
from hypothesis import given
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
    (10**400, 1.0, False, False), ("\u00e9", "e\u0301", False, True), ("-0", 0, False, True), ("", None, False, False)])
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
    # lenient equality is not transitive: null is absent, so p1 fits both golds and p2 only one
    p1, p2 = C("f", {"a": "5"}), C("f", {"a": 5})
    g1, g2 = C("f", {"a": 5, "b": None}), C("f", {"a": "5.0"})
    assert calls_equal([p1, p2], [g1, g2])


@given(st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=1, max_size=4))
def test_assignment_equals_exhaustive_search(score):
    n, m = len(score), 3
    best = max(sum(score[i][j] for i, j in zip(rows, columns)) for k in [min(n, m)]
               for rows in itertools.permutations(range(n), k) for columns in itertools.combinations(range(m), k))
    pairs = best_assignment(score)
    assert len({i for i, _ in pairs}) == len({j for _, j in pairs}) == min(n, m)
    assert sum(score[i][j] for i, j in pairs) == pytest.approx(best)


def test_canonical_ignores_key_order():
    assert canonical([C("f", {"a": 1, "b": 2})]) == canonical([C("f", {"b": 2, "a": 1})])
