"""parse: every text gives a task, calls or a reason, quickly."""

import json
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolr0_core.parse import (
    MAX_CALLS,
    MAX_CHARS,
    MAX_DEPTH,
    blocks,
    load_relaxed,
    parse_call_list,
    parse_calls,
    parse_menu,
    parse_task,
)
from toolr0_core.schema import FAILURE_REASONS, Failure, Task, ToolCall

MENU = '[{"name":"book","parameters":{"city":"string","n":"integer"}}]'
CALLS = '[{"name":"book","arguments":{"city":"Rome","n":2}}]'
TASK = (f"<think>t</think><question>q</question><available_tools>{MENU}</available_tools>"
        f"<tool_call_answer>{CALLS}</tool_call_answer>")


def short(text):
    return ascii(text)[:24]


def reason(result):
    assert isinstance(result, Failure), result
    assert result.reason in FAILURE_REASONS
    result.detail.encode("utf-8")  # it is printed and logged
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


@pytest.mark.parametrize("text", [
    TASK.replace("<think>t", "<think>then one <question> block"),  # else the question would be "block</think>..."
    TASK.replace("<question>q", "<question>limited to <question>9"), TASK + "<question>",
    TASK.replace("<question>q</question>", "").replace("<think>t", "<think><question>q</question>"),
    TASK.replace("q</question><available_tools>", "q<available_tools>").replace("</available_tools>", "</available_tools></question>")])
def test_a_block_begun_twice_or_inside_another_is_no_block(text):
    assert reason(parse_task(text)) == reason(blocks(text)) == "extra_block"


def test_text_around_the_blocks_and_stray_closing_tags_do_no_harm():
    assert blocks(f"Sure!\n{TASK}</think> done") == blocks(TASK)
    assert blocks(TASK.replace("</think>", ""), require_think=False)["think"] == ""  # begun for the model, never closed


def test_the_three_pieces_of_form_can_be_read_apart():
    found = blocks(TASK.replace(MENU, "no menu"))
    assert list(found) == ["think", "question", "available_tools", "tool_call_answer"]
    assert reason(parse_menu(found["available_tools"])) == "bad_json"
    assert isinstance(parse_call_list(found["tool_call_answer"]), tuple)


def test_think_is_optional_where_it_is_not_required_and_tags_ignore_case():
    assert isinstance(parse_task(TASK.replace("<think>t</think>", ""), require_think=False), Task)
    assert isinstance(parse_task(TASK.replace("question>", "QUESTION>")), Task)
    assert reason(parse_task(TASK.replace("think>", "thin\u212a>"))) == "missing_think"  # the Kelvin sign lowers to k
    assert parse_task("\u0130" * 9 + TASK) == parse_task(TASK)  # str.lower makes this letter longer


@pytest.mark.parametrize("text", [
    CALLS, f"```json\n{CALLS}\n```", f"```\n{CALLS}```", CALLS.replace('"', "'"), CALLS[1:-1],
    '[{"type":"function","function":{"name":"book","arguments":"{\\"city\\":\\"Rome\\",\\"n\\":2}"}}]',
    '[{"name":"book","parameters":{"city":"Rome","n":2}}]', '[{"tool_name":"book","city":"Rome","n":2}]',
    f"```json {CALLS} ```", f"```python\n{CALLS}", f"{CALLS}\n```", f"```tool_call2\n{CALLS}```",
    '{"name": "book", "arguments": "```json\\n{\'city\': \'Rome\', \'n\': 2}```"}', "({'name': 'book', 'args': {'city': 'Rome', 'n': 2}},)"])
def test_the_relaxed_loader_reads_every_common_form(text):
    assert parse_calls(answer(text)) == (ToolCall("book", {"city": "Rome", "n": 2}),)


def test_python_and_json_words_mix():
    calls = parse_calls(answer("[{'name': 'f', 'arguments': {'a': None, 'b': true, 'c': False, 'd': null, 'e': -1.5}}]"))
    assert calls == (ToolCall("f", {"a": None, "b": True, "c": False, "d": None, "e": -1.5}),)


@pytest.mark.parametrize("text, arguments", [
    ('{"name":"f","id":"42","type":"x"}', {"id": "42", "type": "x"}), ('{"name":"f","tool_name":"hammer"}', {"tool_name": "hammer"}),
    ('{"name":"f","function":{"x":1}}', {"function": {"x": 1}}), ('{"name":"f","arguments":""}', {}), ('{"name":"f","arguments":null}', {}),
    ('{"name":"f","arguments":{"arguments":"{}"}}', {"arguments": "{}"}), ('{"name":" f "}', {})])
def test_no_argument_is_lost(text, arguments):
    assert parse_call_list(text) == (ToolCall("f", arguments),)


@pytest.mark.parametrize("text", [
    '[{"name":"f","arguments":{"a":1,"a":2}}]', "[{'name':'f','arguments':{'a':1,'a':1}}]",
    '[{"name":"f","arguments":"{\\"a\\":1,\\"a\\":2}"}]', '[{"name":"f","name":"f"}]', '[{"name":"f","arguments":{"a":[{"b":1,"b":1}]}}]'])
def test_a_repeated_key_is_found_at_any_depth(text):
    assert reason(parse_call_list(text)) == "duplicate_key"
    assert reason(parse_menu(text.replace("arguments", "parameters"))) in ("duplicate_key", "bad_menu")


@pytest.mark.parametrize("text, expected", [
    ("1", "bad_calls"), ("[1]", "bad_calls"), ("[[]]", "bad_calls"), ("null", "bad_calls"), ('[{"arguments":{}}]', "bad_calls"),
    ('[{"name":"  "}]', "bad_calls"), ('[{"name":["f"]}]', "bad_calls"), ('[{"name":"f","arguments":[1]}]', "bad_calls"),
    ('[{"name":"f","arguments":"x y"}]', "bad_json"), ("I call f(x=1).", "bad_json"), ("f(x=1)", "bad_json"), ("{1, 2}", "bad_json"),
    ("b'f'", "bad_json"), ("[1j]", "bad_json"), ("{b'k': 1}", "bad_json"), ("{**{}}", "bad_json"), ("-True", "bad_json"),
    ("[" + "{'name': 'f'}," * MAX_CALLS + "]", None), ("[" + "{'name': 'f'}," * (MAX_CALLS + 1) + "]", "bad_calls")], ids=short)
def test_what_is_no_list_of_calls_is_named(text, expected):
    assert isinstance(parse_call_list(text), tuple) if expected is None else reason(parse_call_list(text)) == expected


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "nan", "9" * 400, "-" + "9" * 4299, "9" * 5000, "0x" + "f" * 9000], ids=short)
def test_numbers_that_no_file_could_hold_are_refused(number):
    assert reason(parse_call_list(f'[{{"name":"f","arguments":{{"a":[{number}]}}}}]')) == "bad_json"
    assert reason(parse_call_list(f"[{{'name':'f','arguments':{{'a':[{number}]}}}}]")) == "bad_json"


def test_long_numbers_that_a_float_reaches_are_exact():
    assert parse_call_list(f'[{{"name":"f","n":{"9" * 300}}}]')[0].arguments == {"n": 10**300 - 1}


@pytest.mark.parametrize("opening, closing", ["[]", "()", ('{"a":', "}"), ("{'a':(", ")}")])
def test_nesting_is_counted_exactly_and_not_inside_strings(opening, closing):
    levels = 2 if len(opening) == 6 else 1
    deep = MAX_DEPTH // levels
    assert not isinstance(load_relaxed(opening * deep + "1" + closing * deep), Failure)
    assert reason(load_relaxed(opening * (deep + 1) + "1" + closing * (deep + 1))) == "too_deep"
    assert load_relaxed(json.dumps([opening] * 99)) == [opening] * 99
    assert load_relaxed(repr([f"it's {opening}"] * 99)) == [f"it's {opening}"] * 99
    hidden = '["""a"b""",' + "[" * 60 + "]" * 60 + "]"  # quotes that mislead the count before decoding
    assert reason(load_relaxed(hidden)) == "too_deep"


def test_what_the_python_compiler_would_warn_about_is_read_in_silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse_call_list(r"[{'name': 'f', 'pattern': '\d'}]") == (ToolCall("f", {"pattern": r"\d"}),)


def test_the_last_complete_block_counts_whatever_stands_before_it():
    mention = "<think>the <tool_call_answer> tags</think>"
    assert parse_calls(mention + answer("[]")) == () == parse_calls("</tool_call_answer>" + answer("[]") + "</tool_call_answer>")
    assert reason(parse_calls(mention)) == reason(parse_calls("<tool_call_answer>[]")) == "missing_block"
    assert reason(parse_calls(answer(CALLS) + answer(" "))) == "missing_block"


def test_an_empty_think_block_is_no_thought():
    for thought in ("", "<think></think>", "<think> \n</think>", "<think>begun"):
        assert reason(parse_calls(thought + answer("[]"), require_think=True)) == "missing_think"
    assert parse_calls("<think>x</think>" + answer("[]"), require_think=True) == ()


def test_no_call_is_an_answer_and_the_last_block_counts():
    assert parse_calls(answer("[]")) == ()
    assert parse_calls(answer("[]") + answer(CALLS))[0].name == "book"
    assert reason(parse_calls("<think>x</think>" + answer("[]").replace("</t", "<t"))) == "missing_block"
    assert reason(parse_calls(answer("[]"), require_think=True)) == "missing_think"


@pytest.mark.parametrize("value, legal", [('"..."', False), ('"wait... what"', True), ('["a", "..."]', False)])
def test_three_dots_are_a_placeholder_only_on_their_own(value, legal):
    result = parse_call_list(f'[{{"name":"f","arguments":{{"a":{value}}}}}]')
    assert isinstance(result, tuple) if legal else reason(result) == "placeholder"


@pytest.mark.parametrize("text, expected", [
    ('[{"name":"...","arguments":{}}]', "placeholder"), ('[{"name":"f","arguments":{...}}]', "placeholder"), ("[...]", "placeholder"),
    ('[{"name":"f","arguments":{"a":1, ...}}]', "placeholder"), ("...", "placeholder"), ('"..."', "placeholder"),
    ('[{"name":"f","arguments":{"a":...}}, ... ]', "placeholder"), ('["...", {"name":"f"}]', "placeholder"),
    ("Let me see... no.", "bad_json"), ('[{"name":"f", a: "1, ...]"}]', "bad_json")])
def test_echoes_of_a_template_are_placeholders(text, expected):
    assert reason(parse_call_list(text)) == expected


def test_a_menu_with_a_placeholder_is_an_echo_too():
    assert reason(parse_menu(MENU.replace('"book"', '"book","description":"..."'))) == "placeholder"


@pytest.mark.parametrize("menu, required", [
    ('[{"name":"f","parameters":{"a":{"type":"string"},"b":{"type":"int"}},"required":["a"]}]', ("a",)),
    ('[{"name":"f","parameters":{"type":"object","properties":{"a":{"type":"string"},"b":{"type":"int"}},"required":["b"]}}]',
     ("b",)),
    ('[{"type":"function","function":{"name":"f","parameters":{"a":"string","b":"int"}}}]', ("a", "b")),
    ('[{"name":"f","parameters":{"a":{"type":"string"},"b":{"type":"int"}}}]', ()),
    ('[{"name":"f","parameters":{"a":"string","b":"int"},"required":[]}]', ()),
    ('[{"name":"f","parameters":{"a":"string","b":{"type":"int"}}}]', ()),
    ('[{"name":"f","parameters":{"a":"string","b":"int","required":["a"]}}]', ("a",)),
    ('[{"name":"f","parameters":{"a":"string","b":"int","required":["a"]},"required":["b"]}]', ("b",)),
    ('[{"name":"f","parameters":{"type":"object","properties":{"a":"string","b":"int"}}}]', ()),
    ('[{"name":"f","parameters":{"properties":{"a":{"type":"String"},"b":{"type":["null","int"]}},"required":["a"]}}]', ("a",)),
    ('[{"name":"f","parameters":{"a":{},"b":" Integer "}}]', ())])
def test_menus_of_every_form_have_one_normal_form(menu, required):
    (tool,) = parse_menu(menu)
    assert tool.required == required and tool.parameters == {"a": {"type": "string"}, "b": {"type": "integer"}}


def test_parameters_may_be_called_like_words_of_the_schema_language():
    (tool,) = parse_menu('[{"name":"f","parameters":{"properties":{"type":"string"},"type":{"type":"string"},"city":{"type":"string"}}}]')
    assert set(tool.parameters) == {"properties", "type", "city"}
    (tool,) = parse_menu('[{"name":"f","parameters":{"type":"string","required":"boolean"}}]')
    assert tool.required == ("type", "required")


@pytest.mark.parametrize("parameters", ["null", "{}", '{"type":"object"}', '{"type":"object","properties":{}}',
                                        '{"type":"object","required":[]}'])
def test_a_tool_may_have_no_parameters(parameters):
    (tool,) = parse_menu(f'[{{"name":"f","parameters":{parameters}}}]')
    assert tool.parameters == {} and tool.required == ()


@pytest.mark.parametrize("menu", ["[]", "{}", '{"name":"f"}', "[1]", '[{"name":""}]', '[{"name":"f","parameters":[]}]',
                                  '[{"name":"f","parameters":{"a":1}}]', '[{"name":"f","parameters":{},"required":"a"}]',
                                  '[{"name":"f","parameters":{"type":"object","properties":{},"required":true}}]'])
def test_what_is_no_menu_is_named(menu):
    assert reason(parse_menu(menu)) == "bad_menu"


@pytest.mark.parametrize("text", ["```" + " " * 190_000 + "x", "```\n" * 40_000, '"\\' * 90_000, '\\"' * 90_000, "'" * 190_001,
                                  "[" + " " * 190_000, ", ..." * 30_000, "( ..." * 30_000, "'" + "\\" * 190_001, "1+" * 90_000 + "1",
                                  "a" + "()" * 90_000, "lambda:" * 25_000 + "1", "f(" * 32 + "1 1" + ")" * 32, "[" + "-1," * 60_000 + "]",
                                  "[" + ",".join(f'{{"name":"{i}"}}' for i in range(12_000)) + ',{"name":"11999"}]',
                                  "[" + '{"name":"f"},' * 14_000 + '{"name":"f"}]', "1 if 1 else " * 16_000 + "1", "f'{" * 9 + "x" + "}'" * 9], ids=short)
def test_texts_that_are_costly_for_pattern_matchers_and_parsers_return(text):
    for result in (parse_menu(text), parse_call_list(text), parse_call_list(f'[{{"name":"f","arguments":{json.dumps(text[:9000])}}}]')):
        assert isinstance(result, tuple) or reason(result)


@pytest.mark.parametrize("text", ["<tool_call_answer>" * 10**4, "</tool_call_answer>" * 10**4, "<think></think>" * 10**4,
                                  ("<question>" * 5 + "</question>") * 3000, "<" * 190_000], ids=short)
def test_many_tags_return(text):
    for result in (parse_calls(text), parse_calls(text, True), parse_task(text), parse_task(TASK.replace("t</think>", text[:90_000]))):
        assert reason(result)


names = st.text(min_size=1, max_size=6).map(str.strip).filter(lambda s: s and s != "...")
texts = st.text(max_size=6).filter(lambda s: s != "...")
plain = st.recursive(st.none() | st.booleans() | st.integers(-10**300, 10**300) | st.floats(allow_nan=False, allow_infinity=False) | texts,
                     lambda x: st.lists(x, max_size=3) | st.dictionaries(texts, x, max_size=3), max_leaves=6)


@given(st.lists(st.builds(ToolCall, names, st.dictionaries(texts, plain, max_size=3)), max_size=3))
@settings(max_examples=150)
def test_whatever_is_written_is_read_back(calls):
    bare = [c.to_json() for c in calls]
    wrapped = [{"type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}} for c in calls]
    for text in (json.dumps(bare), json.dumps(bare, ensure_ascii=False, indent=1), repr(bare), f"```json\n{json.dumps(bare)}\n```",
                 json.dumps(wrapped)):
        assert parse_call_list(text) == tuple(calls)


@pytest.mark.parametrize("text", [
    "[" * 10**6, "<think>" * 10**5, '{"a":' * 30_000, "9" * 10**6, answer("9" * 100_000), answer("[" * 90_000), "\ud800\x00\xff",
    answer("-" * 100_000 + "1"), answer("NaN"), answer("[NaN, Infinity]"), answer("1e999999"), "<question></think>" * 9000,
    answer('[{"name":"\ud800","arguments":{"\udfff":"\x00"}}]'), answer("(" * 25 + ")" * 25), answer("f'{x}'"), answer("1" * 5000),
    answer("__import__('os').system('true')"), answer("[x for x in ()]"), "İ" * 1000 + answer("[]")], ids=short)
def test_hostile_texts_return(text):
    for result in (parse_calls(text), parse_task(text), parse_calls(text, True), parse_task(text, False), parse_menu(text)):
        assert isinstance(result, (tuple, Task)) or reason(result)


pieces = st.sampled_from([*"[]{}(),:'\"-.\\ \n", "...", "null", "None", "NaN", "1e999", "0xff", '"\\ud800"', '"name":', "'arguments':", "```",
                          '"f"', "'f'", '"parameters"', '"required"', "12", "```json", "function"])


@given(st.lists(pieces, max_size=30).map("".join) | st.text(max_size=30))
@settings(max_examples=400)
def test_what_is_read_can_be_written_as_json_and_printed(text):
    for result in (load_relaxed(text), load_relaxed(f"[{text}]"), load_relaxed(f"{{'a': [{text}], 'b': 1}}")):
        if not isinstance(result, Failure):
            json.dumps(result, allow_nan=False, ensure_ascii=False).encode("utf-8")
        else:
            assert reason(result)


@given(st.text() | st.text(alphabet='[]{}",:\'<>/thinkquesao_lcr.0123456789-eE \n').map(answer))
def test_any_text_returns(text):
    for result in (parse_calls(text), parse_task(text), parse_task(TASK.replace(CALLS, text))):
        assert isinstance(result, (tuple, Task)) or reason(result)
