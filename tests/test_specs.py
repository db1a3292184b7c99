"""specs and prompts."""

import collections
import json
import random

import pytest

from toolr0_core import prompts
from toolr0_core.config import PromptConfig, RewardConfig, SpecConfig
from toolr0_core.parse import parse_calls, parse_task
from toolr0_core.rewards import is_valid, obeys
from toolr0_core.schema import TaskSpec, Tool
from toolr0_core.specs import DOMAINS, load_domains, sample_spec, shape_shares


def test_specifications_follow_the_papers_shares():
    rng = random.Random(0)
    specs = [sample_spec(rng) for _ in range(20_000)]
    share = lambda test: sum(map(test, specs)) / len(specs)  # noqa: E731
    assert len(DOMAINS) == 32 == len({s.domain for s in specs})
    assert share(lambda s: s.context == "multi_turn") == pytest.approx(0.1, abs=0.01)
    assert share(lambda s: s.n_calls == 2) == pytest.approx(0.9 * 0.2, abs=0.01)
    assert all(s.n_calls == 1 for s in specs if s.context == "multi_turn")
    one = collections.Counter(s.n_tools for s in specs if s.n_calls == 1)
    two = collections.Counter(s.n_tools for s in specs if s.n_calls == 2)
    assert sorted(one) == list(range(2, 9)) and sorted(two) == [3, 4, 5]
    assert sum(one[m] for m in (2, 3, 4)) / one.total() == pytest.approx(0.4, abs=0.015)
    assert two[4] / two.total() == pytest.approx(0.4, abs=0.03)
    shares = shape_shares(SpecConfig())
    assert sum(shares.values()) == pytest.approx(1) and shares[2, 4] == pytest.approx(0.9 * 0.2 * 0.4)


def test_a_domain_file_replaces_names_and_weights(tmp_path):
    path = tmp_path / "domains.json"
    path.write_text(json.dumps({"a": {"weight": 3, "description": "things"}, "b": {"weight": 1}}))
    domains = load_domains(path)
    rng = random.Random(1)
    counts = collections.Counter(sample_spec(rng, SpecConfig(domains=str(path)), domains).domain for _ in range(4000))
    assert counts["a"] / 4000 == pytest.approx(0.75, abs=0.03) and domains["a"].description == "things"


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"a": 1}', '{"a": {"weight": -1}}', '{"a": {"weight": "x"}}',
                                     '{"a": {"weight": true}}', '{"a": {"weight": NaN}}'])
def test_a_bad_domain_file_is_one_sentence(content, tmp_path):
    path = tmp_path / "domains.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="domains.json") as error:
        load_domains(path)
    assert "\n" not in str(error.value)


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
    from toolr0_core.parse import parse_menu
    for form in ("full", "compact"):
        assert parse_menu(prompts.render_tools(tools, form)) == tools


def test_one_layout_of_the_solver_prompt():
    config = PromptConfig(form="compact")
    tools = (Tool("b", "", {"z": {"type": "boolean"}}, ("z",)),)
    user = prompts.solver_messages("Do b.", tools, config)[-1]["content"]
    assert user == '<question>Do b.</question><available_tools>[{"name":"b","parameters":{"z":"boolean"}}]</available_tools>'
    assert prompts.judge_messages("Do b.", tools, (), config)[-1]["content"].startswith(user)
    assert prompts.answer_prefix(PromptConfig(begin_answer=True)) == "<think>" and prompts.answer_prefix(config) == ""
