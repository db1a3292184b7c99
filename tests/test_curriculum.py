"""curriculum: filter, duplicates, selection, order, by hand and by properties."""

import collections
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolr0_core.config import CurriculumConfig, RewardConfig, SpecConfig
from toolr0_core.curriculum import (
    BUCKETS,
    Candidate,
    bucket,
    deduplicate,
    order,
    select,
    shape,
    signature,
    statistics,
    structural_filter,
)
from toolr0_core.schema import Failure, Task, TaskSpec, Tool, ToolCall
from toolr0_core.specs import shape_shares

MENU = ('[{"name":"book_room","description":"Books a room","parameters":{"city":{"type":"string"},"day":{"type":"string"}},'
        '"required":["city"]}]')
GOOD = ("<think>t</think><question>Please book a room in Rome on Friday.</question><available_tools>" + MENU +
        '</available_tools><tool_call_answer>[{"name":"book_room","arguments":{"city":"Rome","day":"Friday"}}]</tool_call_answer>')
SPEC = TaskSpec("travel", "single_turn", 1, 1)


def task(question="Book a room in Rome.", calls=1, tools=2, domain="travel", value="Rome"):
    menu = tuple(Tool(f"tool_{i}", "", {"city": {"type": "string"}}, ("city",)) for i in range(tools))
    gold = tuple(ToolCall(f"tool_{i}", {"city": value}) for i in range(calls))
    return Task(question, menu, gold, TaskSpec(domain, "single_turn", tools, calls))


def filtered(text, **changes):
    return structural_filter(text, SPEC, CurriculumConfig(**changes), RewardConfig())


def test_a_good_task_passes_with_its_specification():
    assert filtered(GOOD).spec == SPEC


@pytest.mark.parametrize("old, new, reason", [
    ("book_room", "ab", "bad_menu"), ("book_room", "tool", "bad_menu"), ("Books a room", "B", "bad_menu"),
    ('"type":"string"', '"type":"array"', "bad_menu"), ("Please book a room in Rome on Friday.", "Rome, Friday", "placeholder"),
    ('"arguments":{"city":"Rome",', '"arguments":{', "invalid"), ('{"city":"Rome"', '{"city":"Oslo"', "invalid"),
    ("</question>", "", "missing_block")])
def test_what_is_dropped_has_a_reason(old, new, reason):
    text = GOOD.replace(old, new)
    assert text != GOOD and filtered(text).reason == reason


def test_fences_and_other_scripts_pass_as_they_do_in_the_reward():
    assert isinstance(filtered(GOOD.replace(MENU, f"```json\n{MENU}\n```")), Task)  # Tool-R0 fault 5
    chinese = GOOD.replace("Please book a room in Rome on Friday.", "请帮我在北京预订一个房间,日期是星期五。").replace("Rome", "北京")
    assert isinstance(filtered(chinese.replace('"Friday"', '"星期五"'), min_question=10), Task)  # fault 17


def test_spec_compliance_is_an_option():
    other = TaskSpec("travel", "single_turn", 3, 1)
    config = CurriculumConfig(require_spec=True)
    assert structural_filter(GOOD, other, config, RewardConfig()).reason == "off_spec"
    assert isinstance(structural_filter(GOOD, SPEC, config, RewardConfig()), Task)
    assert isinstance(filtered(GOOD), Task) and isinstance(filtered("\ud800"), Failure)


def test_signatures_ignore_digits_case_and_values():
    a, b = task("Book 12 seats on 2024-01-05", value="x"), task("book  34 seats on 1999-12-31", value="y")
    assert signature(a) == signature(b) != signature(task("Book 12 seats on 2024-01-5"))
    assert len(deduplicate([a, b])) == 1


def test_near_duplicates_go_but_other_values_stay():
    long = "Please book a quiet room for the whole family in Rome at the end of the next week"
    near = deduplicate([task(long + "."), task(long + "!"), task(long.replace("Rome", "Oslo"), value="Oslo")])
    assert len(near) == 2
    assert len(deduplicate([task(long + "."), task(long + "!")], 1.0)) == 2


@pytest.mark.parametrize("p, expected", [(0, None), (1 / 8, "hard"), (0.25, "medium"), (0.75, "medium"), (7 / 8, "easy"), (1, "easy")])
def test_buckets(p, expected):
    assert bucket(p) == expected


candidates = st.lists(st.builds(
    lambda p, calls, tools, domain, i: Candidate(task(f"question {i}", calls, max(tools, calls), domain), p / 8), st.integers(0, 8),
    st.integers(1, 2), st.integers(2, 4), st.sampled_from("abc"), st.integers(0, 10**6)), max_size=60)


@given(candidates, st.integers(1, 50), st.integers(0, 5))
def test_selection_takes_distinct_solved_tasks_and_repeats_itself(pool, n, seed):
    wanted = shape_shares(SpecConfig(multi_turn=0.0, one_call_menu={2: 1, 3: 1, 4: 1}, two_call_menu={3: 1, 4: 1}))
    for quotas in (None, wanted):
        chosen = select(pool, n, seed, CurriculumConfig(), quotas)
        assert len({id(x) for x in chosen}) == len(chosen) <= n and all(x.p > 0 for x in chosen)
        assert chosen == select(pool, n, seed, CurriculumConfig(), quotas)
        assert bool(chosen) == any(x.p > 0 for x in pool)
        if quotas is None:
            assert len(chosen) == min(n, sum(x.p > 0 for x in pool))


def test_selection_keeps_the_mix_and_the_shapes_where_supply_allows():
    rng = random.Random(0)
    wanted = shape_shares(SpecConfig(multi_turn=0.0, one_call_menu={2: 1, 3: 1, 4: 1}, two_call_menu={3: 1, 4: 1}))
    pool = [Candidate(task(f"q{i}", calls, tools, rng.choice("abcd")), rng.randint(1, 8) / 8)
            for i, (calls, tools) in enumerate(rng.choices([(1, 2), (1, 3), (1, 4), (2, 3), (2, 4)], [5, 4, 3, 1, 1], k=1000))]
    chosen = select(pool, 200, 1, CurriculumConfig(), wanted)
    assert len(chosen) == 200
    shapes = collections.Counter(shape(x.task) for x in chosen)
    assert all(abs(shapes[s] / 200 - share) < 0.02 for s, share in wanted.items())
    levels = collections.Counter(bucket(x.p) for x in chosen)
    assert [round(levels[b] / 200, 1) for b in BUCKETS] == [0.2, 0.5, 0.3]
    domains = collections.Counter(x.task.spec.domain for x in chosen)
    assert max(domains.values()) - min(domains.values()) < 20


def test_scarce_calls_limit_the_selection_so_that_they_keep_three_quarters_of_their_share():
    wanted = {(1, 2): 0.8, (2, 3): 0.2}
    pool = [Candidate(task(f"q{i}", 1, 2), 0.5) for i in range(100)] + [Candidate(task(f"r{i}", 2, 3), 0.5) for i in range(10)]
    chosen = select(pool, 100, 0, CurriculumConfig(), wanted)
    assert len(chosen) == 66 and sum(shape(x.task) == (2, 3) for x in chosen) == 10


@given(candidates, st.integers(0, 90))
def test_order_consumes_every_row_evenly_from_easy_to_hard(pool, n):
    rows = order([x for x in pool if bucket(x.p)], n)
    if not any(bucket(x.p) for x in pool):
        assert rows == []
        return
    assert len(rows) == n
    levels = [BUCKETS.index(bucket(x.p)) for x in rows]
    assert levels == sorted(levels)
    uses = collections.Counter(map(id, rows))
    everyone = [uses[id(x)] for x in pool if bucket(x.p)]
    assert max(everyone) - min(everyone) <= 1  # no row twice while others remain


def test_statistics_by_hand():
    tasks = [task(calls=1, tools=2), task("another", calls=2, tools=4)]
    assert statistics(tasks) == {"menu": 3.0, "two_calls": 0.5, "arguments": 1.0, "duplicates": 0.0}
    assert statistics([]) == {"menu": 0.0, "two_calls": 0.0, "arguments": 0.0, "duplicates": 0.0}
