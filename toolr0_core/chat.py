"""What a chat on a terminal needs besides a model: a menu of tools from a file, text that streams, text that is safe to print.
No torch here."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolr0_core.config import Config, PhaseConfig, PromptConfig, RewardConfig, SamplerConfig
from toolr0_core.parse import parse_menu
from toolr0_core.presets import PRESETS, validate
from toolr0_core.schema import Failure, Tool, ToolCall

A_TOOL = ('a tool is {"name": ..., "description": ..., "parameters": {name: {"type": ...}}, "required": [names]}, bare or as '
          '{"type": "function", "function": {...}}')
TOOL_KEYS = ("name", "description", "parameters", "required", "strict")  # OpenAI's "strict" changes nothing here
# What a terminal obeys or what turns a line around: C0 without newline and tab, DEL and C1, the bidi marks, embeddings,
# overrides and isolates, the separators of lines and paragraphs, and surrogates, which cannot be printed at all.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


# -- a menu from a file ------------------------------------------------------------------------------------------------


def read_menu(path: Path) -> tuple[Tool, ...]:
    """The tools of a JSON file. Raises ValueError that names the entry and says what is legal."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"--tools {path} cannot be read ({why}); give a JSON file with a list of tools") from None
    if not isinstance(entries, list) or not entries:
        what = "an empty list" if entries == [] else f"a {type(entries).__name__}"
        raise ValueError(f"--tools {path} holds {what}; it has to be a JSON list of one tool or more; {A_TOOL}")
    tools = []
    for number, entry in enumerate(entries, 1):
        tool = _read_tool(entry)
        if isinstance(tool, str):
            raise ValueError(f"--tools {path}, entry {number}: {tool}; {A_TOOL}")
        tools.append(tool)
    name, times = Counter(tool.name for tool in tools).most_common(1)[0]
    if times > 1:
        numbers = [str(i) for i, tool in enumerate(tools, 1) if tool.name == name]
        raise ValueError(f"--tools {path}, entries {', '.join(numbers)} are all named {name[:40]!a}; give each tool its own name")
    return tuple(tools)


def _read_tool(entry: Any) -> Tool | str:
    """The tool of one entry, or what is wrong with it. Stricter than what models write is read: a person can mend a file."""
    found = parse_menu(json.dumps([entry]))
    if isinstance(found, Failure):
        return found.detail if found.reason == "bad_menu" else f"{found.reason}, {found.detail}"
    own = entry.get("function", entry)
    unknown = [key for key in own if key not in TOOL_KEYS]
    if unknown:
        return f"the tool has {unknown[0][:40]!a}"
    if not isinstance(own.get("description", ""), str):
        return f"the description of {found[0].name[:40]!a} is no text"
    strangers = [name for name in found[0].required if name not in found[0].parameters]
    return f"it requires {strangers[0][:40]!a}, which is not one of its parameters" if strangers else found[0]


# -- text for a terminal -----------------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """Text that a terminal shows and does not obey: control characters and marks of direction as \\x1b, \\u202e."""
    return UNSAFE.sub(lambda m: m[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """The same without line breaks and tabs."""
    return escaped(text).replace("\n", "\\n").replace("\t", "\\t")


class TextStream:
    """Tokens one at a time -> text as soon as it is certain: all pieces together are the text of all tokens.

    A character's bytes may come in several tokens, and half a character decodes as U+FFFD, so these are held back at the end.
    All tokens are decoded at every step, since what a token says may depend on those before it (a space at the beginning).
    """

    def __init__(self, decode):
        self.decode, self.tokens, self.text, self.given = decode, [], "", 0

    def push(self, token: int) -> str:
        """What this token makes certain."""
        self.tokens.append(token)
        self.text = self.decode(self.tokens)
        return self._upto(len(self.text.rstrip("\ufffd")))

    def rest(self) -> str:
        """What was held back, where no token follows."""
        return self._upto(len(self.text))

    def _upto(self, end: int) -> str:
        piece = self.text[self.given: end]
        self.given = max(self.given, end)
        return piece


def shown_tool(tool: Tool) -> str:
    """book_hotel(city: string, [nights: integer])  Books a room"""
    parameters = [(f"{name}: {schema.get('type', 'string')}", name in tool.required) for name, schema in tool.parameters.items()]
    return one_line(f"{tool.name}({', '.join(p if needed else f'[{p}]' for p, needed in parameters)})  {tool.description}".rstrip())


def shown_call(call: ToolCall) -> str:
    """book_hotel(city="Oslo", nights=3)"""
    arguments = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items())
    return one_line(f"{call.name}({arguments})")


def problems(call: ToolCall, menu: Sequence[Tool]) -> list[str]:
    """What keeps this call from being made."""
    tool = next((t for t in menu if t.name == call.name), None)
    if tool is None:
        return ["not in the menu"]
    return ([f"lacks {one_line(name)}" for name in tool.required if name not in call.arguments]
            + [f"has no parameter {one_line(name)}" for name in call.arguments if name not in tool.parameters])


# -- whose prompts a model knows ---------------------------------------------------------------------------------------


def locate(model: str, role: str, preset: str) -> tuple[str, Config]:
    """What to load for --model, and the Config that the model was or will be trained with.

    A run directory stands for its hf/solver (or another role's); a preset's name for the preset's model. A directory of
    neither has the paper's settings, unless a preset is named. Raises ValueError.
    """
    path = Path(model)
    if not path.is_dir():
        config = PRESETS.get(model, Config)()
    elif (run := _run_of(path.resolve())) is None:
        config = Config()
    else:
        config = read_run(run)
        if run == path.resolve():
            path = path / "hf" / (role or "solver")
            if not path.is_dir():
                raise ValueError(f"--model {model} is a run without hf/{path.name}; wait until its first iteration is done, or "
                                 f"give a model's directory")
            return str(path), PRESETS[preset]() if preset else config
    if role:
        raise ValueError(f"--role is {role!r}; it chooses between the models of a run directory, which --model {model} is not; "
                         f"leave it out")
    return model, PRESETS[preset]() if preset else config


def _run_of(folder: Path) -> Path | None:
    """The run that this directory is, or whose hf/ROLE it is."""
    for place in (folder, folder.parents[1] if len(folder.parents) > 1 and folder.parent.name == "hf" else folder):
        try:
            if "grpo" in json.loads((place / "config.json").read_text(encoding="utf-8")):
                return place
        except (OSError, ValueError, TypeError, RecursionError):
            pass
    return None


def read_run(run: Path) -> Config:
    """The settings that asking a run's models needs. Raises ValueError where they are damaged."""
    path = run / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        config = replace(PRESETS[raw["preset"]](), prompts=PromptConfig(**raw["prompts"]), sampler=SamplerConfig(**raw["sampler"]),
                         rewards=RewardConfig(**raw["rewards"]), generator=PhaseConfig(**raw["generator"]),
                         solver=PhaseConfig(**raw["solver"]))
        validate(config)
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is no settings of a run ({type(error).__name__}: {error}); put the file back as it was, or give "
                         f"--model another directory") from None
    return config
