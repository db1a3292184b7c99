"""curriculum: filter, duplicates, selection, order, by hand and by properties."""

import collections
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolr0_core import curriculum
from toolr0_core.config import CurriculumConfig, RewardConfig, SpecConfig
from toolr0_core.curriculum import (
    BUCKETS,
    Candidate,
    bucket,
    deduplicate,
    order,
    repeats,
    select,
    shape,
    signature,
    statistics,
    structural_filter,
)
from toolr0_core.schema import FAILURE_REASONS, Failure, Task, TaskSpec, Tool, ToolCall
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


@pytest.mark.parametrize("shown, again", [
    ("Please book a room in Rome on Friday.", True), ("please  book a room in ROME, on Friday!", True),
    ("Please book a room in Oslo on Friday.", False), ("Please book a room in Rome.", False)])
def test_a_worked_example_again_is_no_new_task(shown, again):
    result = structural_filter(GOOD, SPEC, CurriculumConfig(), RewardConfig(), ["Another one.", shown])
    assert (isinstance(result, Failure) and result.reason == "example") == again


def test_an_example_with_other_digits_is_still_that_example():
    assert repeats(task("Wake me at 7."), ["Wake me at 8."]) and not repeats(task("Wake me at 7."), ["Wake me at 10."])
    assert repeats(task("请在星期五叫醒我。"), ["请在星期五叫醒我"]) and not repeats(task("请在星期五叫醒我"), ["请在星期六叫醒我"])


def test_fences_and_other_scripts_pass_as_they_do_in_the_reward():
    assert isinstance(filtered(GOOD.replace(MENU, f"```json\n{MENU}\n```")), Task)  # Tool-R0 fault 5
    chinese = GOOD.replace("Please book a room in Rome on Friday.", "请帮我在北京预订一个房间,日期是星期五。").replace("Rome", "北京")
    assert isinstance(filtered(chinese.replace('"Friday"', '"星期五"'), min_question=10), Task)  # fault 17


def test_every_reason_of_the_filter_is_of_the_closed_set():
    texts = [GOOD.replace(old, new) for old, new in [
        ("book_room", "ab"), ("Rome on", "Oslo on"), ("Please book a room", "Explain a poem on a room"), ("</think>", ""),
        ('"Friday"}', '["Friday"]}')]]
    reasons = {filtered(text).reason for text in [*texts, "", "x" * 300_000]} | {
        structural_filter(GOOD, TaskSpec("travel", "single_turn", 3, 1), CurriculumConfig(require_spec=True), RewardConfig()).reason}
    assert {"trivial", "invalid", "off_spec", "bad_calls", "too_long", "empty"} <= reasons <= set(FAILURE_REASONS)


@pytest.mark.parametrize("question, arguments, trivial", [
    ("What is the capital of France, please?", 2, True), ("Tell me a joke about a cat in Rome.", 2, True), ("Who is the mayor of Rome?", 1, True),
    ("Who is the mayor of Rome?", 2, False), ("Where's my parcel from Rome?", 1, True), ("Predefine a room in Rome", 1, False),
    ("Book a room in Rome.", 1, False)])
def test_questions_that_need_no_tool(question, arguments, trivial):
    call = ToolCall("f", dict.fromkeys("abc"[:arguments], "Rome"))
    assert curriculum.is_trivial(Task(question, (), (call,))) is trivial


def test_trivial_questions_pass_where_the_option_is_off():
    text = GOOD.replace("Please book", "Explain how to book")
    assert filtered(text).reason == "trivial" and isinstance(filtered(text, drop_trivial=False), Task)


def test_a_short_question_in_chinese_is_no_short_question():
    chinese = GOOD.replace("Please book a room in Rome on Friday.", "请帮我预订星期五的北京酒店房间").replace('"Rome"', '"北京"')
    assert isinstance(filtered(chinese.replace('"Friday"', '"星期五"')), Task)  # 15 characters, by default 25 are asked for


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


def test_a_large_pool_made_from_one_template_is_compared_quickly():
    """What a collapsed Generator writes; comparing all pairs would take minutes. Operations are counted, not seconds."""
    pool = [task(f"Please book a quiet room for the whole family at the sea, number {'abcdefghij'[i % 10]}{i}", value=f"v{i}")
            for i in range(400)]
    pool = [Task(f"{t.question} {chr(97 + i % 26)}{chr(97 + i // 26)}", t.tools, t.gold, t.spec) for i, t in enumerate(pool)]
    compared, real = [], curriculum._similar
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curriculum, "_similar", lambda *a: compared.append(1) or real(*a))
        assert len(deduplicate(pool)) == len(pool)
    assert len(compared) < len(pool)


def test_the_better_of_equal_tasks_is_kept():
    short, long = task("Book 1 room."), task("Book 1  room.")
    dummy = task("Use dummy 1 to book a room in Rome for two of us.")
    assert deduplicate([short, task("book 2 room.", value="other"), long])[0] is long
    assert curriculum.quality(dummy) < curriculum.quality(short)


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


def test_one_scarce_task_does_not_cost_the_others_their_place():
    wanted = {(1, 2): 0.8, (2, 3): 0.2}
    pool = [Candidate(task(f"q{i}", 1, 2), 0.5) for i in range(1000)] + [Candidate(task("r", 2, 3), 0.5)]
    assert len(select(pool, 400, 0, CurriculumConfig(), wanted)) == 100  # a quarter, where three quarters of .2 would leave 6
    assert len(select(pool, 400, 0, CurriculumConfig(shape_quotas=False), wanted)) == 400


def test_shapes_that_nobody_asked_for_come_last():
    wanted = {(1, 2): 0.5, (1, 3): 0.5}
    pool = [Candidate(task(f"q{i}", 1, 2), 0.5) for i in range(30)] + [Candidate(task(f"r{i}", 1, 4), 0.5) for i in range(30)]
    chosen = select(pool, 40, 0, CurriculumConfig(), wanted)
    assert [shape(x.task) for x in chosen] == [(1, 2)] * 30 + [(1, 4)] * 10


def test_ten_thousand_candidates_are_selected_and_ordered_with_their_shares():
    rng, wanted = random.Random(3), shape_shares(SpecConfig())
    pool = [Candidate(task(f"q{i}", calls, tools, rng.choice("abcdefgh")), rng.randint(0, 8) / 8)
            for i, (calls, tools) in enumerate(rng.choices(list(wanted), k=10_000))]
    chosen = select(pool, 2_000, 0, CurriculumConfig(), wanted)
    shapes = collections.Counter(shape(x.task) for x in chosen)
    assert len(chosen) == 2_000 and all(abs(shapes[s] / 2_000 - share) < 0.005 for s, share in wanted.items())
    rows = order(chosen, 400)
    assert len({id(x) for x in rows}) == 400
    assert [sum(bucket(x.p) == b for x in rows) for b in BUCKETS] == pytest.approx([80, 200, 120], abs=4)
    for start in range(0, 400, 100):  # domains are balanced inside each stretch
        assert len({x.task.spec.domain for x in rows[start: start + 100]}) == 8


@pytest.mark.parametrize("n", [48, 96, 240, 600])
def test_rows_that_come_grouped_by_domain_do_not_stay_grouped(n):
    """Known fault 6: an "easy to hard" set that was really grouped by domain."""
    pool = [Candidate(task(f"{d}{p}{i}", domain=d), p) for d in "abcd" for p in (1.0, 0.5, 0.125) for i in range(20)]
    rows = order(pool, n)
    levels = collections.Counter(bucket(x.p) for x in rows)
    assert set(levels.values()) == {n // 3}
    for start in range(0, n, 8):
        assert len({x.task.spec.domain for x in rows[start: start + 8]}) == 4


def test_rows_nobody_solved_are_not_ordered_and_do_not_shorten_the_rest():
    solved, unsolved = Candidate(task("a"), 0.5), Candidate(task("b"), 0.0)
    assert order([solved, unsolved], 3) == [solved] * 3 and order([unsolved], 3) == []


def test_within_a_bucket_rows_get_harder():
    pool = [Candidate(task(f"q{i}"), (i % 8 + 1) / 8) for i in range(64)]
    stretches = [x.p for x in order(pool, 64)]
    assert stretches == sorted(stretches, reverse=True)


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
