"""prompts: both forms, the specification in them, worked examples, one layout for the Solver."""

import json

import pytest

from toolr0_core import prompts
from toolr0_core.config import CurriculumConfig, PromptConfig, RewardConfig
from toolr0_core.curriculum import structural_filter
from toolr0_core.parse import parse_calls, parse_menu, parse_task
from toolr0_core.rewards import is_placeholder, is_valid, obeys, solver_reward
from toolr0_core.schema import Task, TaskSpec, Tool, ToolCall

ROOMS = Tool("book_room", "Books a room", {"city": {"type": "string", "description": "where"}, "day": {"type": "string"}}, ("city",))


def test_the_control_block_says_the_whole_specification():
    spec = TaskSpec("travel", "multi_turn", 7, 2)
    for form in ("full", "compact"):
        text = "".join(m["content"] for m in prompts.generator_messages(spec, PromptConfig(form=form), "hotels and flights"))
        assert all(str(x) in text for x in vars(spec).values())
        assert ("hotels and flights" in text) == (form == "full")
    for tag in ("think", "question", "available_tools", "tool_call_answer"):
        assert f"<{tag}>" in prompts.GENERATOR_FULL


@pytest.mark.parametrize("form", ["full", "compact"])
def test_worked_examples_obey_every_rule_that_is_applied_to_models(form):
    config = PromptConfig(form=form, generator_examples=2, solver_examples=2)
    turns = prompts.generator_messages(TaskSpec("math", "single_turn", 2, 1), config)
    answers = [m["content"] for m in turns if m["role"] == "assistant"]
    assert len(answers) == 2
    for text in answers:
        task = parse_task(text)
        assert is_valid(task, RewardConfig(strict_arguments=True)) and obeys(task, TaskSpec("", "", 2, 1))
    solved = [m["content"] for m in prompts.solver_messages("q", (), config) if m["role"] == "assistant"]
    assert [len(parse_calls(text, require_think=True)) for text in solved] == [1, 2]


def test_a_rendered_menu_reads_back_the_same():
    tools = (Tool("a", "does a", {"x": {"type": "string"}, "y": {"type": "integer"}}, ("x",)),
             Tool("b", "", {"z": {"type": "boolean"}}, ("z",)))
    for form in ("full", "compact"):
        assert parse_menu(prompts.render_tools(tools, form)) == tools


def test_one_layout_of_the_solver_prompt():
    config = PromptConfig(form="compact")
    tools = (Tool("b", "", {"z": {"type": "boolean"}}, ("z",)),)
    user = prompts.solver_messages("Do b.", tools, config)[-1]["content"]
    assert user == '<question>Do b.</question><available_tools>[{"name":"b","parameters":{"z":"boolean"}}]</available_tools>'
    assert prompts.judge_messages("Do b.", tools, (), config)[-1]["content"].startswith(user)
    for role in ("generator", "solver"):
        assert prompts.answer_prefix(PromptConfig(begin_answer=True), role) == "<think>" and prompts.answer_prefix(config, role) == ""


def test_the_compact_strings_are_those_that_the_embedded_model_was_pretrained_on():
    config = PromptConfig(form="compact")
    assert prompts.generator_messages(TaskSpec("travel", "single_turn", 3, 2), config, "unused") == [
        {"role": "system", "content": "Write one tool-calling task with its tools and its answer."},
        {"role": "user", "content": "domain: travel, context: single_turn, tools: 3, calls: 2"}]
    assert prompts.solver_messages("q", (), config)[0] == {
        "role": "system", "content": "Think briefly, then answer with a JSON list of tool calls."}


@pytest.mark.parametrize("tool, rendered", [
    (ROOMS, '[{"name":"book_room","description":"Books a room","parameters":{"city":"string","day":"string"},"required":["city"]}]'),
    (Tool("f", "", {"x": {"type": "integer"}}, ("x",)), '[{"name":"f","parameters":{"x":"integer"}}]'),
    (Tool("f", "", {}, ()), '[{"name":"f","parameters":{}}]')])
def test_compact_menus_leave_out_what_says_nothing(tool, rendered):
    assert prompts.render_tools((tool,), "compact") == rendered
    assert json.loads(prompts.render_tools((tool,), "full")) == [tool.to_json()]


def test_menus_in_other_scripts_stay_readable():
    assert "天気" in prompts.render_tools((Tool("weather", "天気を調べる", {}, ()),), "compact")


@pytest.mark.parametrize("form", ["full", "compact"])
def test_worked_examples_stand_before_the_real_turn_and_change_nothing_else(form):
    spec = TaskSpec("iot", "multi_turn", 5, 1)
    bare = prompts.generator_messages(spec, PromptConfig(form=form), "sensors")
    shown = prompts.generator_messages(spec, PromptConfig(form=form, generator_examples=2), "sensors")
    assert [m["role"] for m in shown] == ["system"] + ["user", "assistant"] * 2 + ["user"]
    assert shown[0] == bare[0] and shown[-1]["content"].startswith(bare[-1]["content"])
    solved = prompts.solver_messages("q", (ROOMS,), PromptConfig(form=form, solver_examples=2))
    assert [m["role"] for m in solved] == ["system"] + ["user", "assistant"] * 2 + ["user"]
    assert [solved[0], solved[-1]] == prompts.solver_messages("q", (ROOMS,), PromptConfig(form=form))


@pytest.mark.parametrize("form", ["full", "compact"])
def test_an_example_answers_the_specification_of_its_own_turn(form):
    """A control block for 5 tools before an answer with 2 would teach to ignore the block."""
    turns = prompts.generator_messages(TaskSpec("iot", "single_turn", 5, 1), PromptConfig(form=form, generator_examples=2))
    words = ("domain: {}", "tools: {}") if form == "compact" else ("Domain: {}", "tools in the menu: {}")
    domains = set()
    for ask, answer in zip(turns[1:-1:2], turns[2::2]):
        task = parse_task(answer["content"])
        example = next(e for e in prompts.GENERATOR_EXAMPLES if e["question"] == task.question)
        assert all(w.format(x) in ask["content"] for w, x in zip(words, (example["domain"], len(task.tools))))
        domains.add(example["domain"])
    assert len(domains) == 2 and words[1].format(5) in turns[-1]["content"]


def test_examples_pass_the_filter_and_earn_the_full_reward():
    turns = prompts.generator_messages(TaskSpec("math", "single_turn", 2, 1), PromptConfig(generator_examples=2))
    for m in turns[2::2]:
        assert isinstance(structural_filter(m["content"], TaskSpec("", "", 2, 1), CurriculumConfig(require_spec=True), RewardConfig()), Task)
    for example in prompts.SOLVER_EXAMPLES:
        gold = [ToolCall(*call) for call in example["calls"]]
        answers = [m["content"] for m in prompts.solver_messages("q", (), PromptConfig(solver_examples=2)) if m["role"] == "assistant"]
        assert max(solver_reward(text, gold).total for text in answers) == pytest.approx(2.0)


def test_short_examples_obey_the_rules_too_and_begin_as_answers_are_begun():
    config, spec = PromptConfig("compact", 2, 1, "short", begin_answer=True), TaskSpec("math", "single_turn", 1, 1)
    rules = CurriculumConfig(require_spec=True, min_question=12, min_description=0), RewardConfig(require_think=False)
    written = [m["content"] for m in prompts.generator_messages(spec, config) if m["role"] == "assistant"]
    tasks = [structural_filter(text, spec, *rules) for text in written]
    assert [len(call.arguments) for task in tasks for call in task.gold] == [1, 1]
    answered = [m["content"] for m in prompts.solver_messages("q", (), config) if m["role"] == "assistant"]
    assert len(parse_calls(answered[0])) == len(answered) == 1
    for role, texts in (("generator", written), ("solver", answered)):
        assert all(text.startswith(prompts.answer_prefix(config, role)) and "<think>" not in text for text in texts)
    shown = prompts.shown_questions(config)
    assert len(shown) == 3 and {t.question for t in tasks} < set(shown)
    assert [structural_filter(text, spec, *rules, shown).reason for text in written] == ["example", "example"]
    with pytest.raises(ValueError, match="prompts.solver_examples is 2; it has to be between 0 and 1"):
        prompts.solver_messages("q", (), PromptConfig(examples="short", solver_examples=2))


@pytest.mark.parametrize("n", [-1, 3])
def test_a_number_of_examples_that_there_are_not_is_named(n):
    with pytest.raises(ValueError, match=rf"prompts.generator_examples is {n}; it has to be between 0 and 2"):
        prompts.generator_messages(TaskSpec("math", "single_turn", 2, 1), PromptConfig(generator_examples=n))
    with pytest.raises(ValueError, match="prompts.solver_examples"):
        prompts.solver_messages("q", (), PromptConfig(solver_examples=n))


def test_braces_in_domains_and_questions_are_text():
    spec = TaskSpec("{domain}", "single_turn", 2, 1)
    assert "{domain} ({n_tools})" in prompts.generator_messages(spec, PromptConfig(), "{n_tools}")[0]["content"]
    assert "{question}" in prompts.solver_messages("{question}", (ROOMS,), PromptConfig())[-1]["content"]


@pytest.mark.parametrize("form", ["full", "compact"])
def test_what_the_prompts_say_is_no_question(form):
    """Copying a line of its prompt into the question block earns a Generator nothing."""
    lines = [line for m in prompts.generator_messages(TaskSpec("travel", "multi_turn", 4, 1), PromptConfig(form=form))
             for line in m["content"].splitlines()]
    echoes = [x for x in lines if re_ask(x)]
    assert len(echoes) >= 2 and all(is_placeholder(x) for x in echoes)


def re_ask(line):
    """Lines that a model takes for a request: the user turns, the counts, the question's description."""
    return line.startswith(("Write", "domain:", "- Number of tool", "- Context", "<question>"))
