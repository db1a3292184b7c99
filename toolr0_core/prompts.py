"""Every prompt text, once: the paper's (`full`) and short ones for small models (`compact`), with the same tags.

Functions return chat messages, a list of {"role", "content"}; the tokenizer's chat template does the rest. One layout of
the Solver's prompt serves probes, judging, training and evaluation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from toolr0_core.config import PromptConfig
from toolr0_core.schema import TaskSpec, Tool, ToolCall

Messages = list[dict[str, str]]

GENERATOR_COMPACT = "Write one tool-calling task with its tools and its answer."
SOLVER_COMPACT = "Think briefly, then answer with a JSON list of tool calls."
JUDGE_COMPACT = "Rate the tool-calling task from 1 (bad) to 5 (perfect). Answer with one digit."

GENERATOR_FULL = """You are an expert author of tool-calling tasks. Think privately, step by step, and design one realistic, \
non-trivial task that can only be answered by calling tools. Then write it down in the output format below.

{control}

Rules:
1. The menu holds exactly the stated number of tools, each with a name of its own.
2. The answer is a JSON list of exactly the stated number of calls, and every call names a tool of the menu.
3. The task stays inside the domain.
4. A multi_turn context means that the question contains a short User/Agent transcript under the heading "Conversation".
5. Arguments are flat: strings, numbers and booleans only.
6. Every argument value of the answer occurs in the question.

Output exactly four blocks and nothing else:
<think>your private design notes</think>
<question>the user's request: natural, no bullet points, no placeholders, with the exact values</question>
<available_tools>a JSON list of tools, each {{"name": ..., "description": ..., "parameters": {{name: {{"type": ..., \
"description": ...}}}}, "required": [names]}}</available_tools>
<tool_call_answer>a JSON list of calls, each {{"name": ..., "arguments": {{...}}}}</tool_call_answer>"""
CONTROL_FULL = """Task specification:
- Domain: {domain}{about}
- Context: {context}
- Number of tools in the menu: {n_tools}
- Number of tool calls in the answer: {n_calls}"""
GENERATOR_FULL_USER = "Write a new task now that obeys the task specification."

SOLVER_FULL = """A conversation between a user and an assistant who can call tools. The assistant first reasons about the \
request inside <think> </think> tags, then answers with a JSON list of calls, each {"name": ..., "arguments": {...}}, inside \
<tool_call_answer> </tool_call_answer> tags. It uses only the tools it is given, with values from the request; where no tool \
fits, the list is empty."""

JUDGE_FULL = """You are a strict quality controller of tool-calling tasks. Judge two things: is the question realistic, \
specific and clear (critical), and does the answer really solve it with the given tools?
5: perfect. 4: minor issues. 3: vague or too simple. 2: generic, a placeholder or nonsense. 1: unrelated, or a template error.
A question that reads like an instruction for writing tasks gets 2 at most. Answer with a single integer from 1 to 5."""


def generator_messages(spec: TaskSpec, config: PromptConfig, description: str = "") -> Messages:
    """What the Generator is asked for this specification; description explains the domain in the full form.

    Worked examples are chat turns before the real one; each user turn then carries the specification of its own task.
    """
    examples = _examples(config, "generator")
    if config.form == "compact":
        system = GENERATOR_COMPACT
    else:
        system = GENERATOR_FULL.format(control=_control(spec, description))
    turns = [_turn("system", system)]
    for e in examples:
        asked = TaskSpec(e["domain"], "single_turn", len(e["tools"]), len(e["calls"]))
        turns += [_turn("user", _order(asked, "", config)), _turn("assistant", _written(e, config))]
    return [*turns, _turn("user", _order(spec, description, config))]


def _control(spec: TaskSpec, description: str) -> str:
    return CONTROL_FULL.format(**vars(spec), about=f" ({description})" if description else "")


def _order(spec: TaskSpec, description: str, config: PromptConfig) -> str:
    """The user turn that asks for a task."""
    if config.form == "compact":
        return f"domain: {spec.domain}, context: {spec.context}, tools: {spec.n_tools}, calls: {spec.n_calls}"
    if not config.generator_examples:
        return GENERATOR_FULL_USER
    return f"{GENERATOR_FULL_USER}\n\n{_control(spec, description)}"


def _examples(config: PromptConfig, role: str) -> Sequence[dict]:
    """The worked examples that a role is shown."""
    examples, n = EXAMPLES[config.examples][role], getattr(config, f"{role}_examples")
    if not 0 <= n <= len(examples):
        raise ValueError(f"--prompts.{role}_examples is {n}; it has to be between 0 and {len(examples)}")
    return examples[:n]


def shown_questions(config: PromptConfig) -> list[str]:
    """The questions of all worked examples in the prompts, which are no new tasks."""
    return [e["question"] for role in ("generator", "solver") for e in _examples(config, role)]


def solver_messages(question: str, tools: Sequence[Tool], config: PromptConfig) -> Messages:
    """What the Solver is asked: the question and the menu."""
    turns = [_turn("system", SOLVER_COMPACT if config.form == "compact" else SOLVER_FULL)]
    for e in _examples(config, "solver"):
        turns += [_turn("user", _request(e["question"], _tools(e), config)), _turn("assistant", _thought(e) + _answer(e))]
    return [*turns, _turn("user", _request(question, tools, config))]


def judge_messages(question: str, tools: Sequence[Tool], calls: Sequence[ToolCall], config: PromptConfig) -> Messages:
    """What the judge is asked about a task."""
    answer = json.dumps([c.to_json() for c in calls], ensure_ascii=False)
    return [_turn("system", JUDGE_COMPACT if config.form == "compact" else JUDGE_FULL),
            _turn("user", f"{_request(question, tools, config)}\n<tool_call_answer>{answer}</tool_call_answer>")]


def answer_prefix(config: PromptConfig, role: str) -> str:
    """What is written for the model at the start of a task ("generator") or of an answer ("solver")."""
    return BEGINNINGS[config.examples][role] if config.begin_answer else ""


def render_tools(tools: Sequence[Tool], form: str) -> str:
    """The menu as one line of JSON. Compact: name -> type, a description where there is one, `required` where it is not
    every parameter."""
    return json.dumps([_compact_tool(t) if form == "compact" else t.to_json() for t in tools],
                      ensure_ascii=False, separators=(",", ":") if form == "compact" else None)


def _compact_tool(tool: Tool) -> dict:
    out: dict = {"name": tool.name}
    if tool.description:
        out["description"] = tool.description
    out["parameters"] = {p: s.get("type", "string") for p, s in tool.parameters.items()}
    if set(tool.required) != set(tool.parameters):
        out["required"] = list(tool.required)
    return out


def _request(question: str, tools: Sequence[Tool], config: PromptConfig) -> str:
    menu = render_tools(tools, config.form)
    if config.form == "compact":
        return f"<question>{question}</question><available_tools>{menu}</available_tools>"
    return f"User request:\n{question}\n\nAvailable tools (JSON):\n{menu}"


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _tools(example: dict) -> tuple[Tool, ...]:
    return tuple(Tool(name, description, {p: {"type": t} for p, t in parameters.items()}, tuple(parameters))
                 for name, description, parameters in example["tools"])


def _thought(example: dict) -> str:
    return f"<think>{example['think']}</think>" if "think" in example else ""


def _answer(example: dict) -> str:
    calls = [{"name": name, "arguments": arguments} for name, arguments in example["calls"]]
    return f"<tool_call_answer>{json.dumps(calls, ensure_ascii=False)}</tool_call_answer>"


def _written(example: dict, config: PromptConfig) -> str:
    """The assistant's turn of a Generator example, a line a block."""
    menu = render_tools(_tools(example), config.form)
    thought = f"{_thought(example)}\n" if "think" in example else ""
    return (f"{thought}<question>{example['question']}</question>\n"
            f"<available_tools>{menu}</available_tools>\n{_answer(example)}")


SOLVER_EXAMPLES = (
    {"question": "Put 3 bags of rice on my shopping list, please.",
     "tools": (("add_item", "Add an item to a shopping list", {"item": "string", "quantity": "integer"}),
               ("remove_item", "Take an item off a shopping list", {"item": "string"})),
     "think": "The user wants to add rice, 3 bags, so I use add_item.",
     "calls": (("add_item", {"item": "rice", "quantity": 3}),)},
    {"question": "Convert 250 US dollars to euros and tell me the time in Lisbon.",
     "tools": (("convert_currency", "Convert an amount", {"amount": "number", "source": "string", "target": "string"}),
               ("local_time", "Current time in a city", {"city": "string"})),
     "think": "Two things are asked: convert_currency for the dollars, local_time for Lisbon.",
     "calls": (("convert_currency", {"amount": 250, "source": "US dollars", "target": "euros"}),
               ("local_time", {"city": "Lisbon"}))},
)
GENERATOR_EXAMPLES = (
    {"domain": "travel", "question": "Find me a hotel in Lisbon for 3 nights, please.",
     "tools": (("search_hotels", "Search for hotels in a city", {"city": "string", "nights": "integer"}),
               ("search_trains", "Search for trains to a city", {"city": "string", "day": "string"})),
     "think": "The request: find a hotel, with city and nights.",
     "calls": (("search_hotels", {"city": "Lisbon", "nights": 3}),)},
    {"domain": "scheduling", "question": "Remind me to call Maria on Friday at 9.",
     "tools": (("create_reminder", "Create a reminder", {"text": "string", "day": "string", "hour": "integer"}),
               ("delete_reminder", "Delete a reminder", {"text": "string"})),
     "think": "The request: make a reminder, with text, day and hour.",
     "calls": (("create_reminder", {"text": "call Maria", "day": "Friday", "hour": 9}),)},
)
# A very small model copies what examples have in common, so these have as much in common as can be: "Please", one tool
# called after what is asked, one argument with one name, and its value, one word, at the question's end.
SHORT_GENERATOR_EXAMPLES = (
    {"domain": "travel", "question": "Please find a hotel in Lisbon.", "tools": (("find_hotel", "", {"query": "string"}),),
     "calls": (("find_hotel", {"query": "Lisbon"}),)},
    {"domain": "entertainment", "question": "Please play a song by Adele.", "tools": (("play_song", "", {"query": "string"}),),
     "calls": (("play_song", {"query": "Adele"}),)},
)
SHORT_SOLVER_EXAMPLES = (
    {"question": "Please show the weather in Bergen.", "tools": (("show_weather", "", {"query": "string"}),),
     "calls": (("show_weather", {"query": "Bergen"}),)},
)
EXAMPLES = {"full": {"generator": GENERATOR_EXAMPLES, "solver": SOLVER_EXAMPLES},
            "short": {"generator": SHORT_GENERATOR_EXAMPLES, "solver": SHORT_SOLVER_EXAMPLES}}
BEGINNINGS = {"full": {"generator": "<think>", "solver": "<think>"},  # of every example's answer
              "short": {"generator": "<question>Please", "solver": '<tool_call_answer>[{"name": "'}}
