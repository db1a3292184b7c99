"""The records that flow through the loop; every stage is a function from one of these to the next.

Menus are kept in one normal form whatever a model wrote: a tool's `parameters` maps a parameter's name to a JSON
schema such as `{"type": "string", "description": "..."}`, and `required` names those that a call must give.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FAILURE_REASONS = (
    "empty",  # nothing but white space
    "too_long",  # over the parser's limit of characters
    "missing_block",  # one of the tagged blocks is absent or empty
    "missing_think",  # the think block is required and absent
    "extra_block",  # a block occurs twice
    "bad_json",  # a block that no relaxed loader reads
    "too_deep",  # nested beyond the parser's limit
    "placeholder",  # "..." or a prompt echo where a value should stand
    "bad_menu",  # the menu reads as JSON but is not a list of tools
    "duplicate_tool",  # a menu names one tool twice
    "duplicate_key",  # an object repeats a key
    "bad_calls",  # the answer reads as JSON but is not a list of calls
    "truncated",  # generation ended at its length limit
    "invalid",  # a gold call that its menu or its question does not support
    "off_spec",  # another menu size or number of calls than asked for
    "trivial",  # a question that needs no tool
    "example",  # a worked example of the prompts again
)


@dataclass(frozen=True)
class Tool:
    """One entry of a menu. parameters: name -> JSON schema of the value; required: names that a call must give."""

    name: str
    description: str = ""
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)
    required: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, obj: dict[str, Any]) -> Tool:
        return cls(obj["name"], obj.get("description", ""), obj.get("parameters", {}), tuple(obj.get("required", ())))

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "description": self.description, "parameters": self.parameters,
                "required": list(self.required)}


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool: its name and the arguments by parameter name."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, obj: dict[str, Any]) -> ToolCall:
        return cls(obj["name"], obj.get("arguments", {}))

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": self.arguments}


@dataclass(frozen=True)
class TaskSpec:
    """What the Generator is asked for: a domain, "single_turn" or "multi_turn", and two counts."""

    domain: str
    context: str
    n_tools: int
    n_calls: int


@dataclass(frozen=True)
class Task:
    """A question, the menu to answer it with, and the calls that answer it."""

    question: str
    tools: tuple[Tool, ...]
    gold: tuple[ToolCall, ...]
    spec: TaskSpec | None = None

    @classmethod
    def from_json(cls, obj: dict[str, Any]) -> Task:
        spec = obj.get("spec")
        return cls(obj["question"], tuple(map(Tool.from_json, obj["tools"])),
                   tuple(map(ToolCall.from_json, obj["gold"])), TaskSpec(**spec) if spec else None)

    def to_json(self) -> dict[str, Any]:
        return {"question": self.question, "tools": [tool.to_json() for tool in self.tools],
                "gold": [call.to_json() for call in self.gold], "spec": vars(self.spec) if self.spec else None}


@dataclass(frozen=True)
class Failure:
    """Why a text could not be read: a reason out of FAILURE_REASONS and a detail for people."""

    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt: the token ids to continue and the text they were made from."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Completion:
    """One sample. token_ids include the stop token and everything up to the end of a stop string; text has no special
    tokens; logprobs and entropies (nats) are those of the distribution sampled from; sampled is False where a caller put
    text in; finish_reason is "stop", "length" or "abort"."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    text: str | None = None
    sampled: tuple[bool, ...] | None = None
    entropies: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Reward:
    """A total and its named parts; a part that was not measured is absent."""

    total: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scored:
    """A completion with what it was asked and what it earned; the row that training and rollouts.jsonl consume."""

    prompt: Prompt
    completion: Completion
    reward: Reward
    group: int


def is_text(value: Any) -> bool:
    """Whether it is a string that can be printed and saved, which half of a surrogate pair (JSON's \\ud800) cannot."""
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value))
