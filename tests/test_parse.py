"""parse: every text gives a task, calls or a reason, quickly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolr0_core.parse import MAX_CHARS, parse_call_list, parse_calls, parse_menu, parse_task
from toolr0_core.schema import FAILURE_REASONS, Failure, Task, ToolCall

MENU = '[{"name":"book","parameters":{"city":"string","n":"integer"}}]'
CALLS = '[{"name":"book","arguments":{"city":"Rome","n":2}}]'
TASK = (f"<think>t</think><question>q</question><available_tools>{MENU}</available_tools>"
        f"<tool_call_answer>{CALLS}</tool_call_answer>")


def reason(result):
    assert isinstance(result, Failure), result
    assert result.reason in FAILURE_REASONS
    return result.reason


def answer(text):
    return f"<tool_call_answer>{text}</tool_call_answer>"


def test_the_four_blocks_make_a_task():
    task = parse_task(TASK)
    assert task.question == "q" and task.tools[0].required == ("city", "n")
    assert task.tools[0].parameters == {"city": {"type": "string"}, "n": {"type": "integer"}}
    assert task.gold == (ToolCall("book", {"city": "Rome", "n": 2}),)


@pytest.mark.parametrize("text, expected", [
    (TASK.replace("<think>t</think>", ""), "missing_think"), (TASK + "<question>again</question>", "extra_block"),
    (TASK.replace("</tool_call_answer>", ""), "missing_block"), (TASK.replace("q</question>", "</question>"), "missing_block"),
    (TASK.replace(MENU, "[]"), "bad_menu"), (TASK.replace(MENU, MENU[:-1] + "," + MENU[1:]), "duplicate_tool"),
    (TASK.replace('"n":2', '"n":2,"n":3'), "duplicate_key"), (TASK.replace(CALLS, '"x"'), "bad_calls"), ("", "empty"),
    (" \n", "empty"), ("x" * (MAX_CHARS + 1), "too_long")])
def test_what_is_wrong_is_named(text, expected):
    assert reason(parse_task(text)) == expected


def test_think_is_optional_where_it_is_not_required_and_tags_ignore_case():
    assert isinstance(parse_task(TASK.replace("<think>t</think>", ""), require_think=False), Task)
    assert isinstance(parse_task(TASK.replace("question>", "QUESTION>")), Task)


@pytest.mark.parametrize("text", [
    CALLS, f"```json\n{CALLS}\n```", f"```\n{CALLS}```", CALLS.replace('"', "'"), CALLS[1:-1],
    '[{"type":"function","function":{"name":"book","arguments":"{\\"city\\":\\"Rome\\",\\"n\\":2}"}}]',
    '[{"name":"book","parameters":{"city":"Rome","n":2}}]', '[{"tool_name":"book","city":"Rome","n":2}]'])
def test_the_relaxed_loader_reads_every_common_form(text):
    assert parse_calls(answer(text)) == (ToolCall("book", {"city": "Rome", "n": 2}),)


def test_python_and_json_words_mix():
    calls = parse_calls(answer("[{'name': 'f', 'arguments': {'a': None, 'b': true, 'c': False, 'd': null, 'e': -1.5}}]"))
    assert calls == (ToolCall("f", {"a": None, "b": True, "c": False, "d": None, "e": -1.5}),)


def test_no_call_is_an_answer_and_the_last_block_counts():
    assert parse_calls(answer("[]")) == ()
    assert parse_calls(answer("[]") + answer(CALLS))[0].name == "book"
    assert reason(parse_calls("<think>x</think>" + answer("[]").replace("</t", "<t"))) == "missing_block"
    assert reason(parse_calls(answer("[]"), require_think=True)) == "missing_think"


@pytest.mark.parametrize("value, legal", [('"..."', False), ('"wait... what"', True), ('["a", "..."]', False)])
def test_three_dots_are_a_placeholder_only_on_their_own(value, legal):
    result = parse_call_list(f'[{{"name":"f","arguments":{{"a":{value}}}}}]')
    assert isinstance(result, tuple) if legal else reason(result) == "placeholder"


@pytest.mark.parametrize("menu, required", [
    ('[{"name":"f","parameters":{"a":{"type":"string"},"b":{"type":"int"}},"required":["a"]}]', ("a",)),
    ('[{"name":"f","parameters":{"type":"object","properties":{"a":{"type":"string"},"b":{"type":"int"}},"required":["b"]}}]',
     ("b",)),
    ('[{"type":"function","function":{"name":"f","parameters":{"a":"string","b":"int"}}}]', ("a", "b")),
    ('[{"name":"f","parameters":{"a":{"type":"string"},"b":{"type":"int"}}}]', ())])
def test_menus_of_every_form_have_one_normal_form(menu, required):
    (tool,) = parse_menu(menu)
    assert tool.required == required and tool.parameters == {"a": {"type": "string"}, "b": {"type": "integer"}}


@pytest.mark.parametrize("text", [
    "[" * 10**6, "<think>" * 10**5, '{"a":' * 30_000, "9" * 10**6, answer("9" * 100_000), answer("[" * 90_000), "\ud800\x00\xff",
    answer("-" * 100_000 + "1"), answer("NaN"), answer("[NaN, Infinity]"), answer("1e999999"), "<question></think>" * 9000,
    answer('[{"name":"\ud800","arguments":{"\udfff":"\x00"}}]'), answer("(" * 25 + ")" * 25), answer("f'{x}'"), answer("1" * 5000),
    answer("__import__('os').system('true')"), answer("[x for x in ()]"), "İ" * 1000 + answer("[]")])
def test_hostile_texts_return(text):
    for result in (parse_calls(text), parse_task(text), parse_calls(text, True), parse_task(text, False), parse_menu(text)):
        assert isinstance(result, (tuple, Task)) or reason(result)


@given(st.text() | st.text(alphabet='[]{}",:\'<>/thinkquesao_lcr.0123456789-eE \n').map(answer))
def test_any_text_returns(text):
    for result in (parse_calls(text), parse_task(text), parse_task(TASK.replace(CALLS, text))):
        assert isinstance(result, (tuple, Task)) or reason(result)
