"""rewards: the numbers of the paper and its code, worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolr0_core.config import RewardConfig
from toolr0_core.parse import parse_task
from toolr0_core.rewards import (
    accuracy,
    difficulty_reward,
    generator_reward,
    is_valid,
    judge_score,
    obeys,
    solver_reward,
    validity,
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


def test_solver_format_terms():
    gold = [C("f", {"a": 1})]
    assert solver_reward("nothing", gold).parts == {"format": 0.0, "accuracy": 0.0}
    assert solver_reward(answer("not json"), gold).parts["format"] == pytest.approx(0.3)
    assert solver_reward(answer("[]"), gold).parts == pytest.approx({"format": 0.6, "accuracy": 0.0})
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
    ("-3", None), ("7", None), ("5!", 5)])
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
    ("a and b", ["a", "b"], True), ("a", ["a", "b"], False), ("twenty", 20, True), ("x", float("nan"), False)])
def test_grounding_in_any_script(question, value, grounded):
    task = make(f"Please do this: {question}", {"a": value})
    assert validity(task, RewardConfig()) == pytest.approx(1.0 if grounded else 0.8)


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
