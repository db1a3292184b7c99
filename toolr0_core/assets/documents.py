"""Pretraining documents of both roles, clean or with faults, as (messages, completion text) pairs.

Faults come in two kinds that are drawn independently, so that a reward for form alone teaches little about content:
broken form (a tag or a bracket is missing), and careless content (wrong tools, values or menus) after a think block
that gives the carelessness away, as a base model's better and worse habits can be told apart by their style.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace

from toolr0_core import prompts
from toolr0_core.assets.grammar import PARAMETERS, TOOLS, UNSEEN_TOOLS, Draw, make_tool, sample_task
from toolr0_core.config import PromptConfig
from toolr0_core.schema import Task, Tool, ToolCall

PROMPTS = PromptConfig(form="compact")
ANY = Draw()


@dataclass(frozen=True)
class Noise:
    """Shares of faulty documents."""

    solver_careless: float = 0.68
    generator_careless: float = 0.72
    value: float = 0.08  # a careful Solver that still gets one value wrong
    form: float = 0.14  # either role, whatever the content


CLEAN = Noise(0.0, 0.0, 0.0, 0.0)


def solver_document(rng: random.Random, noise: Noise, draw: Draw = ANY) -> tuple[list[dict[str, str]], str]:
    """The Solver's prompt and an answer: careful (names the tools and their arguments first) or a quick guess."""
    task = sample_task(rng, draw)
    if rng.random() < noise.solver_careless:
        think, calls = "quick guess.", _guess(rng, task)
    else:
        think = " ".join(f"use {' '.join([c.name, *c.arguments])}." for c in task.gold)
        calls = _one_wrong_value(rng, task.gold) if rng.random() < noise.value else task.gold
    text = solver_completion(think, calls)
    return prompts.solver_messages(task.question, task.tools, PROMPTS), _break_form(rng, text, noise)


def solver_completion(think: str, calls: tuple[ToolCall, ...]) -> str:
    return f"<think>{think}</think><tool_call_answer>{_dump([c.to_json() for c in calls])}</tool_call_answer>"


def generator_document(rng: random.Random, noise: Noise, draw: Draw = ANY) -> tuple[list[dict[str, str]], str]:
    """The Generator's prompt and a task: planned first, or careless and mostly unusable."""
    task = sample_task(rng, replace(draw, random_parameters=0.0, random_tools=0.0))
    spec = task.spec
    plan = f"tools {' '.join(t.name for t in task.tools)}. " + " ".join(
        f"call {' '.join([c.name, *(f'{p} {v}' for p, v in c.arguments.items())])}." for c in task.gold)
    if rng.random() < noise.generator_careless:
        plan, task = "some task.", _spoil(rng, task)
    return prompts.generator_messages(spec, PROMPTS), _break_form(rng, generator_completion(plan, task), noise)


def generator_completion(think: str, task: Task) -> str:
    menu = prompts.render_tools(task.tools, "compact")
    answer = _dump([c.to_json() for c in task.gold])
    return (f"<think>{think}</think><question>{task.question}</question><available_tools>{menu}</available_tools>"
            f"<tool_call_answer>{answer}</tool_call_answer>")


def _dump(obj: object) -> str:
    return json.dumps(obj, separators=(",", ":"), ensure_ascii=False)


def _guess(rng: random.Random, task: Task) -> tuple[ToolCall, ...]:
    """A careless answer: often the first tool, one call, each value the right one or just another of its kind."""
    tool = task.tools[0] if rng.random() < 0.6 else rng.choice(task.tools)
    right = next((c.arguments for c in task.gold if c.name == tool.name), {})
    arguments = {}
    for parameter in tool.parameters:
        if len(tool.parameters) > 1 and rng.random() < 0.2:
            continue
        good = parameter in right and rng.random() < 0.6
        arguments[parameter] = right[parameter] if good else rng.choice(PARAMETERS[parameter][1])
    return (ToolCall(tool.name, arguments),)


def _one_wrong_value(rng: random.Random, calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    victim = rng.randrange(len(calls))
    parameter = rng.choice(sorted(calls[victim].arguments))
    wrong = {**calls[victim].arguments, parameter: rng.choice(PARAMETERS[parameter][1])}
    return calls[:victim] + (ToolCall(calls[victim].name, wrong),) + calls[victim + 1:]


def _spoil(rng: random.Random, task: Task) -> Task:
    """A careless task: one or more of the ways in which an invented task is unusable, and now and then none."""
    tools, gold, text = list(task.tools), task.gold, task.question
    fault = rng.random()
    if fault < 0.25:  # the tool to call is not in the menu
        tools = [t for t in tools if t.name != gold[0].name] or [_stranger(rng, task)]
    elif fault < 0.5:  # the answer's value is not what the question says
        gold = _one_wrong_value(rng, gold)
    elif fault < 0.65:  # an argument is lost
        gold = tuple(ToolCall(c.name, dict(list(c.arguments.items())[1:])) for c in gold)
    elif fault < 0.8:  # the menu repeats itself
        tools = [rng.choice(tools) for _ in tools]
    elif fault < 0.9:  # the question says nothing
        text = rng.choice(("Do something.", "I need help.", "Please use the tool."))
    if rng.random() < 0.3:  # not the number of tools or calls that was asked for
        gold = gold[:1]
        tools = tools + [_stranger(rng, task)] if rng.random() < 0.5 else tools[: max(1, len(tools) - 1)]
    return Task(text, tuple(tools), gold, task.spec)


def _stranger(rng: random.Random, task: Task) -> Tool:
    names = [n for n in sorted(TOOLS[task.spec.domain]) if n not in UNSEEN_TOOLS]
    name = rng.choice(names)
    return make_tool(name, TOOLS[task.spec.domain][name])


def _break_form(rng: random.Random, text: str, noise: Noise) -> str:
    if rng.random() >= noise.form:
        return text
    return rng.choice((
        lambda t: t.removesuffix("</tool_call_answer>"),
        lambda t: t.replace("<tool_call_answer>", "", 1),
        lambda t: t.replace("}]</tool_call_answer>", "</tool_call_answer>"),
        lambda t: t.replace('"arguments":{', '"arguments":', 1),
        lambda t: t.replace("[{", "{", 1).replace("}]", "}}", 1),
    ))(text)


