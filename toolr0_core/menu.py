"""A menu of tools from a file, and tools, calls and a model's text on a terminal. No torch here."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolr0_core.parse import parse_menu
from toolr0_core.schema import Failure, Tool, ToolCall

A_TOOL = ('a tool is {"name": ..., "description": ..., "parameters": {name: {"type": ...}}, "required": [names]}, bare or as '
          '{"type": "function", "function": {...}}')
TOOL_KEYS = ("name", "description", "parameters", "required", "strict")  # OpenAI's "strict" changes nothing here
# What a terminal obeys or what turns a line around: C0 without newline and tab, DEL and C1, the bidi marks, embeddings,
# overrides and isolates, the separators of lines and paragraphs, and surrogates, which cannot be printed at all.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def read_menu(path: Path) -> tuple[Tool, ...]:
    """The tools of a JSON file. Raises ValueError that names the entry and says what is legal."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"menu {path} cannot be read ({why}); give a JSON file with a list of tools") from None
    if not isinstance(entries, list) or not entries:
        what = "an empty list" if entries == [] else f"a {type(entries).__name__}"
        raise ValueError(f"menu {path} holds {what}; it has to be a JSON list of one tool or more; {A_TOOL}")
    tools = []
    for number, entry in enumerate(entries, 1):
        tool = _read_tool(entry)
        if isinstance(tool, str):
            raise ValueError(f"menu {path}, entry {number}: {tool}; {A_TOOL}")
        tools.append(tool)
    name, times = Counter(tool.name for tool in tools).most_common(1)[0]
    if times > 1:
        numbers = [str(i) for i, tool in enumerate(tools, 1) if tool.name == name]
        raise ValueError(f"menu {path}, entries {', '.join(numbers)} are all named {name[:40]!a}; each needs a name of its own")
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


# -- on a terminal -------------------------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """Text that a terminal shows and does not obey: control characters and marks of direction as \\x1b, \\u202e."""
    return UNSAFE.sub(lambda m: m[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """The same without line breaks and tabs."""
    return escaped(text).replace("\n", "\\n").replace("\t", "\\t")


def shown_tool(tool: Tool) -> str:
    """book_hotel(city: string, [nights: integer])  Books a room"""
    parameters = {name: f"{name}: {schema.get('type', 'string')}" for name, schema in tool.parameters.items()}
    listed = ", ".join(text if name in tool.required else f"[{text}]" for name, text in parameters.items())
    return one_line(f"{tool.name}({listed})  {tool.description}".rstrip())


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
