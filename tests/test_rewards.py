"""rewards: the numbers of the paper and its code, worked out by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolr0_core.config import RewardConfig
from toolr0_core.matching import calls_equal
from toolr0_core.parse import parse_task
from toolr0_core.rewards import (
    accuracy,
    checks,
    difficulty_reward,
    generator_reward,
    is_placeholder,
    is_valid,
    judge_score,
    obeys,
    solver_reward,
    validity,
    width,
    worth_probing,
)
from toolr0_core.schema import Task, TaskSpec, Tool
from toolr0_core.schema import ToolCall as C

SPEC = TaskSpec("travel", "single_turn", 1, 1)
GOOD = ('<think>t</think><question>Book a hotel in Rome for 2 nights.</question><available_tools>[{"name":"book","parameters":'
        '{"city":"string","nights":"integer"}}]</available_tools><tool_call_answer>[{"name":"book","arguments":{"city":"Rome",'
        '"nights":2}}]</tool_call_answer>')


def answer(text, think="<think>t</think>"):
    return f"{think}<tool_call_answer>{text}</tool_call_answer>"


def score(predicted, gold):
    return accuracy([C(*p) for p in predicted], [C(*g) for g in gold])


@pytest.mark.parametrize("predicted, gold, expected", [
    ([("f", {"a": 1})], [("f", {"a": 1, "b": 2, "c": 3})], 0.2 + 0.3 * 0.5 + 0.5),  # .85: one sure argument of three
    ([("g", {"a": 1})], [("f", {"a": 1})], 0.8), ([("f", {"a": 1})] * 2, [("f", {"a": 1})], 1 / 1.25),
    ([("f", {"a": 1})] * 5, [("f", {"a": 1})], 0.5),
    ([("f", {"a": 1, "b": 2, "c": 3, "d": 4})], [("f", {"a": 1, "b": 2, "c": 3})], 0.2 + 0.3 * 6 / 7 + 0.5),
    ([("f", {"a": 1, "b": 2}), ("f", {"a": 5, "b": 5})], [("f", {"a": 1, "b": 9}), ("f", {"a": 1, "b": 2})], 0.75),
    ([("f", {})], [("f", {})], 1.0), ([], [], 1.0), ([("f", {})], [], 0.0), ([], [("f", {})], 0.0)])
def test_accuracy_of_the_spot_values(predicted, gold, expected):
    assert score(predicted, gold) == pytest.approx(expected)


values = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["1", "1.0", "x", " x", "[1]", ""]) | st.just([1])
calls = st.lists(st.builds(C, st.sampled_from("fg"), st.dictionaries(st.sampled_from("ab"), values, max_size=2)), max_size=3)


@given(calls, calls)
@settings(max_examples=400)
def test_full_accuracy_is_equality(predicted, gold):
    """The reward's best is what probes and evaluation call right: one rule."""
    a = accuracy(predicted, gold)
    assert 0 <= a <= 1 and (a > 1 - 1e-9) == calls_equal(predicted, gold)


@given(calls, calls, st.randoms())
def test_accuracy_ignores_the_order_of_calls(predicted, gold, random):
    shuffled = predicted[:]
    random.shuffle(shuffled)
    assert accuracy(shuffled, gold) == pytest.approx(accuracy(predicted, gold))


def test_every_surplus_call_counts_and_the_right_one_may_come_last():
    wrong = [("g", {"z": i}) for i in range(99)]
    assert score([*wrong, ("f", {"a": 1})], [("f", {"a": 1})]) == pytest.approx(1 / (1 + 0.25 * 99))


def test_a_second_gold_call_that_nobody_makes_costs_half():
    assert score([("a", {"x": 1})], [("a", {"x": 1}), ("b", {"y": 2})]) == pytest.approx(0.5)  # known fault 1


def test_null_arguments_are_absent_under_the_lenient_rule_only():
    strict = RewardConfig(rule="strict")
    assert score([("f", {"a": 1, "b": None})], [("f", {"a": 1})]) == pytest.approx(1.0)
    assert accuracy([C("f", {"a": 1, "b": None})], [C("f", {"a": 1})], strict) == pytest.approx(0.2 + 0.3 * 2 / 3 + 0.5)
    assert accuracy([C("f", {"a": "1"})], [C("f", {"a": 1})], strict) == pytest.approx(0.5)


def test_form_without_substance_earns_less_than_any_right_answer():
    gold = [C("f", {"a": 1})]
    wrong = solver_reward(answer('[{"name":"zzz","arguments":{"q":0}}]'), gold)  # known fault 8
    assert wrong.parts == pytest.approx({"format": 1.0, "accuracy": 0.0})


def test_solver_format_terms():
    gold = [C("f", {"a": 1})]
    assert solver_reward("nothing", gold).parts == {"format": 0.0, "accuracy": 0.0}
    assert solver_reward(answer("not json"), gold).parts["format"] == pytest.approx(0.3)
    assert solver_reward(answer("[]"), gold).parts == pytest.approx({"format": 0.6, "accuracy": 0.0})
    assert solver_reward(answer("[1, 2]"), gold).parts == pytest.approx({"format": 0.6, "accuracy": 0.0})  # JSON, but no call
    assert solver_reward(answer("[...]"), gold).parts["format"] == pytest.approx(0.3)
    assert solver_reward(answer('[{"name":"f","arguments":{"a":1}}]'), gold).total == pytest.approx(2.0)


def test_no_call_as_the_right_answer_earns_everything():
    assert solver_reward(answer("[]"), []).total == pytest.approx(2.0)
    assert solver_reward(answer('[{"name":"f","arguments":{}}]'), []).parts == pytest.approx({"format": 0.6, "accuracy": 0.0})


def test_accuracy_needs_a_think_block_only_where_it_is_required():
    text = answer('[{"name":"f","arguments":{"a":1}}]', think="")
    assert solver_reward(text, [C("f", {"a": 1})]).parts["accuracy"] == 0.0
    assert solver_reward(text, [C("f", {"a": 1})], RewardConfig(require_think=False)).parts["accuracy"] == pytest.approx(1.0)


@pytest.mark.parametrize("p, expected", [(0, 0), (1 / 8, 0.581), (2 / 8, 1), (4 / 8, 1), (6 / 8, 1), (7 / 8, 0.581), (1, 0.114)])
def test_difficulty_of_the_band_pass(p, expected):
    assert difficulty_reward(p) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("text, expected", [
    ("4", 4), ("Score: 3", 3), ("Score: 10", None), ("0/5", None), ("", None), ("five", 5), ("I would say two", 2), ("4.5", None),
    ("-3", None), ("7", None), ("5!", 5), ("**4**", 4), ("4/5", 4), ("Rating: 4 out of 5", 4), ("10/5", None), ("3/10", None),
    ("The 2 criteria are met. Score: 5", 5), ("The 2 criteria are met: 5", None), ("5, as both of the 2 criteria hold", 5),
    ("3 or 4", None), ("1-5", None), ("on a scale of 1 to 5: 3", 3), ("No one would ask this", None), ("one", 1), ("Score - 4", 4),
    ("score -4", None), ("\u0664", None), ("9" * 5000, None), ("\x00\ud800", None)], ids=lambda x: ascii(x)[:24])
def test_judge_scores(text, expected):
    assert judge_score(text) == expected


def test_generator_total_is_the_plain_sum_and_none_leaves_a_term_out():
    assert generator_reward(GOOD, SPEC).parts == pytest.approx({"format": 3.0, "validity": 1.0})
    full = generator_reward(GOOD, SPEC, success_rate=0.5, judge_score=4)
    assert full.parts == pytest.approx({"format": 3.0, "validity": 1.0, "difficulty": 1.0, "semantic": 0.75})
    assert full.total == pytest.approx(5.75)
    assert generator_reward(GOOD, SPEC, config=RewardConfig(format_reduce="mean")).parts["format"] == pytest.approx(1.0)


def test_an_invalid_task_has_no_difficulty():
    broken = generator_reward(GOOD.replace("</question>", ""), SPEC, 0.5, 5)
    assert broken.parts == {"format": 0.0, "validity": 0.0, "difficulty": 0.0, "semantic": 0.0}


def test_an_empty_answer_is_no_task_where_calls_are_asked_for():
    """Every check passes for no calls, and the filter drops such tasks: a Generator that writes [] must not be paid."""
    empty = GOOD[: GOOD.index("<tool_call_answer>")] + "<tool_call_answer>[]</tool_call_answer>"
    reward = generator_reward(empty, SPEC, 0.5, 5)
    assert reward.parts == {"format": 3.0, "validity": 0.0, "difficulty": 0.0, "semantic": 0.0}
    assert not worth_probing(parse_task(empty), SPEC, RewardConfig())
    assert generator_reward(empty, TaskSpec("travel", "single_turn", 1, 0), 0.5).parts["validity"] == pytest.approx(1.0)


def test_measurements_that_failed_are_never_rewards():
    for p in (float("nan"), -0.1, 1.1, float("inf")):
        with pytest.raises(ValueError, match="success rate"):
            difficulty_reward(p)
        with pytest.raises(ValueError, match="success rate"):
            generator_reward(GOOD, SPEC, p)
    for judged in (0, 6):
        with pytest.raises(ValueError, match="judge_score"):
            generator_reward(GOOD, SPEC, 0.5, judged)


def test_a_success_among_more_than_eight_probes_counts():
    assert difficulty_reward(1 / 16) == 0.0 and difficulty_reward(1 / 16, k=16) == pytest.approx(0.2950, abs=5e-4)
    assert generator_reward(GOOD, SPEC, 1 / 16).parts["difficulty"] == pytest.approx(0.2950, abs=5e-4)
    assert generator_reward(GOOD, SPEC, 0.0).parts["difficulty"] == 0.0


def test_duplicate_tools_and_keys_are_invalid():
    tools = '[{"name":"book","parameters":{}},{"name":"book","parameters":{}}]'
    menu = GOOD[: GOOD.index("[{")] + tools + GOOD[GOOD.index("</available_tools>"):]
    for text in (menu, GOOD.replace('"nights":2', '"nights":2,"nights":2')):
        assert generator_reward(text, SPEC, 0.5).parts == {"format": 2.0, "validity": 0.0, "difficulty": 0.0}


@pytest.mark.parametrize("question, echo", [
    ("Generated user question", True), ("[your question here]", True), ("<the user's request>", True), ("lorem ipsum dolor sit", True),
    ("   a   ", True), ("short", True), ("Convert clip.mov with the output format mp4.", False),
    ("Set the placeholder text of the search box to Find me.", False), ("Update the number of tools in the shed to 5.", False),
    ("订两张北京票", False), ("Write a new task called Rent into my planner.", False)])
def test_placeholders_are_echoes_and_not_words_that_users_say(question, echo):
    assert is_placeholder(question) is echo


def test_a_placeholder_question_earns_nothing_at_all():
    text = GOOD.replace("Book a hotel in Rome for 2 nights.", "[your question here]")
    assert generator_reward(text, SPEC, 0.5, 5).parts == {"format": 0.0, "validity": 0.0, "difficulty": 0.0, "semantic": 0.0}


def test_width_counts_wide_characters_twice():
    assert [width(x) for x in ("abc", "é", "北京", "ｱ", "")] == [3, 1, 4, 1, 0]


def test_checks_are_told_apart():
    task = make("the city is Rome", {"city": "Oslo"}, ("city", "day"))
    assert checks(task, RewardConfig()) == {"menu": True, "required": False, "grounded": False}
    free = RewardConfig(grounded_weight=0.0)  # a weight of 0 takes a check out of the total, not out of what is valid
    assert validity(make("the city is Rome", {"city": "Oslo"}), free) == pytest.approx(0.8)
    assert not is_valid(make("the city is Rome", {"city": "Oslo"}), free)


@given(st.text(min_size=1), st.text(), st.text())
def test_a_value_between_spaces_of_the_question_is_grounded(value, before, after):
    task = make(f"{before} {value} {after}", {"a": value})
    assert checks(task, RewardConfig())["grounded"] or not value.strip() or not _visible(value)


def _visible(value):
    """Whether folding leaves anything of it: a lone zero-width or unassigned character is no word and may fold away."""
    import unicodedata
    folded = unicodedata.normalize("NFKC", value).casefold()
    return unicodedata.normalize("NFKC", f" {value} ").casefold() == f" {folded} " and bool(folded.strip())


def test_gates_stop_difficulty_and_probes():
    gate = RewardConfig(validity_gate=True, spec_gate=True)
    ungrounded = GOOD.replace('"city":"Rome"', '"city":"Oslo"')
    assert generator_reward(ungrounded, SPEC, 0.5, config=gate).parts["difficulty"] == 0.0
    assert generator_reward(ungrounded, SPEC, 0.5).parts["difficulty"] == 1.0
    off = TaskSpec("travel", "single_turn", 3, 1)
    assert generator_reward(GOOD, off, 0.5, config=gate).parts["difficulty"] == 0.0
    assert generator_reward(GOOD, off, config=gate).parts["validity"] == 1.0
    assert generator_reward(GOOD, off, config=RewardConfig(spec_validity=True)).parts["validity"] == 0.0
    assert not worth_probing(parse_task(GOOD), off, gate) and worth_probing(parse_task(GOOD), SPEC, gate)
    assert obeys(parse_task(GOOD), SPEC) and not obeys(parse_task(GOOD), off)


def make(question, arguments, required=(), second=None):
    tools = (Tool("f", "", {k: {"type": "string"} for k in {**arguments, **dict.fromkeys(required)}}, tuple(required)),)
    return Task(question, tools, (C("f", arguments), *([second] if second else [])))


@pytest.mark.parametrize("question, value, grounded", [
    ("in Rome", "Rome", True), ("in Romeo", "Rome", False), ("five people", 5, True), ("5 people", "five", True),
    ("1,200 euros", 1200, True), ("1200 euros", 1200.0, True), ("3 rooms", 3.0, True), ("3.5 km", 3.5, True),
    ("nothing", True, True), ("nothing", None, True), ("nothing", "", False), ("飞往北京的航班", "北京", True), ("飞往北京", "上海", False),
    ("билет в Москва", "Москва", True), ("in São Paulo", "sao paulo", False), ("in São Paulo", "são paulo", True),
    ("a and b", ["a", "b"], True), ("a", ["a", "b"], False), ("twenty", 20, True), ("x", float("nan"), False),
    ("请订3个房间", 3, True), ("请订13个房间", 3, False), ("用iPhone拍照", "iPhone", True), ("서울에서 출발", "서울", True), ("ไปกรุงเทพพรุ่งนี้", "กรุงเทพ", True),
    ("טיסה לירושלים", "ירושלים", True), ("أريد ٥ تذاكر", 5, True), ("in Straße", "STRASSE", True), ("Ｔｏｋｙｏ　へ", "tokyo", True),
    ("it costs $12.50", 12.5, True), ("pay 1,250.50 euros", 1250.5, True), ("pay 1250.50 euros", 1250.5, True), ("pay 1250.5 euros", "1250.50", True), ("5 + 3", "+", True), ("5 - 3", "+", False), ("in €", "€", True),
    ("x", "  ", False), ("about -5 degrees", -5, True), ("nineteen", 19, True), ("seventy", "70", True), ("15 people", 5, False),
    ("10000000 items", 10**7, True), ("x", 1e308, False), ("1e3 or so", "1e3", True), ("a x", {"k": "x"}, True)],
    ids=lambda x: ascii(x)[:24])
def test_grounding_in_any_script(question, value, grounded):
    task = make(f"Please do this: {question}", {"a": value})
    assert validity(task, RewardConfig()) == pytest.approx(1.0 if grounded else 0.8)


def test_an_integer_that_python_will_not_print_is_not_grounded():
    assert not checks(make("a long question", {"a": 10**5000}), RewardConfig())["grounded"]


def test_required_is_enforced_for_every_call():
    config = RewardConfig()
    assert validity(make("a long question", {}, required=("city",)), config) == pytest.approx(0.6)
    second = C("f", {})
    assert validity(make("the city is Rome", {"city": "Rome"}, ("city",), second), config) == pytest.approx(0.6)
    assert validity(make("the city is Rome", {"city": "Rome"}, ("city",), C("g", {})), config) == pytest.approx(0.2)


def test_strict_arguments_refuse_missing_and_surplus_ones():
    tool = Tool("f", "", {"a": {"type": "string"}, "b": {"type": "string"}}, ())
    task = Task("a is x and b is y", (tool,), (C("f", {"a": "x"}),))
    assert is_valid(task, RewardConfig()) and not is_valid(task, RewardConfig(strict_arguments=True))


@given(st.text(), st.text())
def test_any_text_earns_a_finite_reward(text, inside):
    for t in (text, answer(inside), GOOD.replace("Rome", inside)):
        for reward in (solver_reward(t, [C("f", {"a": 1})]), generator_reward(t, SPEC, 0.5, 3)):
            assert math.isfinite(reward.total) and 0 <= reward.total <= 6


def test_form_alone_is_a_control():
    reward = solver_reward(answer("[]"), [C("f", {})], RewardConfig(accuracy=False))
    assert set(reward.parts) == {"format"}
