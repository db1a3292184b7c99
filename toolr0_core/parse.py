"""Text -> task, calls, or the reason why not. Total: any text gives an answer, in bounded time and memory.

One relaxed loader reads JSON, Python literals and fenced blocks, for rewards, synthesis, verification and evaluation alike.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from toolr0_core.schema import Failure, Task, Tool, ToolCall

MAX_CHARS = 200_000
MAX_DEPTH = 32
MAX_DIGITS = 400  # of one number: beyond any float, under the limit of Python's int()
TASK_TAGS = ("think", "question", "available_tools", "tool_call_answer")
_FENCE = re.compile(r"\A```[A-Za-z]*\s*\n?(.*?)\s*```\Z", re.DOTALL)
_FAMILY = {"str": "string", "int": "integer", "float": "number", "double": "number", "bool": "boolean", "date": "string",
           "datetime": "string"}


class _Refused(ValueError):
    """Carries a Failure's reason out of a decoder hook."""


def parse_task(text: str, require_think: bool = True) -> Task | Failure:
    """The strict form: each of the four blocks exactly once, the menu and the answer readable."""
    found = blocks(text, require_think)
    if isinstance(found, Failure):
        return found
    tools = parse_menu(found["available_tools"])
    if isinstance(tools, Failure):
        return tools
    gold = parse_call_list(found["tool_call_answer"])
    if isinstance(gold, Failure):
        return gold
    return Task(found["question"], tools, gold)


def parse_calls(text: str, require_think: bool = False) -> tuple[ToolCall, ...] | Failure:
    """The calls in a Solver's last answer block; () where it answers that no call is right."""
    refused = _too_much(text)
    if refused:
        return refused
    if require_think and not _all_blocks(text, "think")[-1:]:
        return Failure("missing_think", "no non-empty <think> block")
    answers = _all_blocks(text, "tool_call_answer")
    if not answers or not answers[-1]:
        return Failure("missing_block", "no non-empty <tool_call_answer> block")
    return parse_call_list(answers[-1])


def blocks(text: str, require_think: bool = True) -> dict[str, str] | Failure:
    """The stripped content of the four blocks; think may be absent (then "") where it is not required."""
    refused = _too_much(text)
    if refused:
        return refused
    found = {}
    for tag in TASK_TAGS:
        contents = _all_blocks(text, tag)
        if len(contents) > 1:
            return Failure("extra_block", f"<{tag}> occurs {len(contents)} times")
        content = contents[0] if contents else ""
        if not content and (tag != "think" or require_think):
            return Failure("missing_think" if tag == "think" else "missing_block", f"no non-empty <{tag}> block")
        found[tag] = content
    return found


def _too_much(text: str) -> Failure | None:
    if len(text) > MAX_CHARS:
        return Failure("too_long", f"{len(text)} characters, over {MAX_CHARS}")
    return None if text.strip() else Failure("empty")


def _all_blocks(text: str, tag: str) -> list[str]:
    """Contents between <tag> and the next </tag>, found by one walk over the text, so that no input is quadratic."""
    low, out, at = _fold_ascii(text), [], 0
    while (start := low.find(f"<{tag}>", at)) >= 0:
        end = low.find(f"</{tag}>", start)
        if end < 0:
            break
        out.append(text[start + len(tag) + 2: end].strip())
        at = end + len(tag) + 3
    return out


def _fold_ascii(text: str) -> str:
    """Lower case of A-Z alone: str.lower changes the length of some texts, and indices with it."""
    return text.translate({c: c + 32 for c in range(65, 91)})


def load_relaxed(text: str) -> Any | Failure:
    """JSON, or a Python literal, or either with the other's null/None words, with or without a code fence."""
    refused = _too_much(text)
    if refused:
        return refused
    text = text.strip()
    fenced = _FENCE.match(text)
    text = fenced.group(1) if fenced else text
    depth = _depth(text)
    if depth > MAX_DEPTH:
        return Failure("too_deep", f"nested {depth} deep, over {MAX_DEPTH}")
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_int=_int, parse_constant=_refuse_constant)
    except _Refused as error:
        return Failure(*error.args)
    except (ValueError, RecursionError):
        pass
    try:
        return _literal(ast.parse(text.strip(), mode="eval").body)
    except _Refused as error:
        return Failure(*error.args)
    except (ValueError, SyntaxError, RecursionError, MemoryError, OverflowError) as error:
        return Failure("bad_json", f"{type(error).__name__}: {str(error)[:80]}")


def _depth(text: str) -> int:
    """Deepest nesting of brackets, strings ignored roughly: an upper bound is what the parsers need."""
    deepest = level = 0
    for c in text:
        if c in "[{(":
            level += 1
            deepest = max(deepest, level)
        elif c in "]})" and level:
            level -= 1
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise _Refused("duplicate_key", "an object repeats a key")
    return out


def _int(digits: str) -> int | float:
    if len(digits) > MAX_DIGITS:
        raise _Refused("bad_json", f"a number of {len(digits)} digits")
    return int(digits)


def _refuse_constant(name: str) -> Any:
    raise _Refused("bad_json", f"{name} is not a JSON value")


_WORDS = {"null": None, "true": True, "false": False}


def _literal(node: ast.AST) -> Any:
    """ast.literal_eval for lists, dicts and plain values, plus JSON's words; anything else is refused."""
    match node:
        case ast.Constant(value=value) if value is Ellipsis:
            raise _Refused("placeholder", "... stands where a value should")
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if not isinstance(value, bool):
            return -value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(e) for e in elements]
        case ast.Dict(keys=keys, values=values) if all(isinstance(k, ast.Constant) for k in keys):
            return _unique([(str(k.value), _literal(v)) for k, v in zip(keys, values)])
    raise _Refused("bad_json", f"{type(node).__name__} is not a plain value")


def parse_menu(text: str) -> tuple[Tool, ...] | Failure:
    """A non-empty list of tools with different names, in schema.Tool's normal form."""
    loaded = load_relaxed(text)
    if isinstance(loaded, Failure):
        return loaded
    if not isinstance(loaded, list) or not loaded:
        return Failure("bad_menu", "not a non-empty list")
    tools = []
    for entry in loaded:
        tool = _tool(entry)
        if isinstance(tool, Failure):
            return tool
        tools.append(tool)
    names = [t.name for t in tools]
    if len(set(names)) < len(names):
        return Failure("duplicate_tool", next(n for n in names if names.count(n) > 1)[:80])
    return tuple(tools)


def _tool(entry: Any) -> Tool | Failure:
    """One menu entry: bare or in OpenAI's wrapper; parameters as a flat map or a JSON schema."""
    if isinstance(entry, dict) and isinstance(entry.get("function"), dict):
        entry = entry["function"]
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"].strip():
        return Failure("bad_menu", "a tool without a name")
    parameters = entry.get("parameters")
    parameters = {} if parameters is None else parameters
    if not isinstance(parameters, dict):
        return Failure("bad_menu", f"parameters of {entry['name'][:40]} are no object")
    required = entry.get("required")
    if isinstance(parameters.get("properties"), dict):
        required = parameters.get("required") if required is None else required
        parameters = parameters["properties"]
    elif isinstance(parameters.get("required"), list):
        required = parameters["required"] if required is None else required
        parameters = {k: v for k, v in parameters.items() if k != "required"}
    flat = all(isinstance(v, str) for v in parameters.values())
    if required is None:  # the compact notation, name -> type, has no optional parameters
        required = list(parameters) if flat else []
    if not isinstance(required, list) or not all(isinstance(r, str) for r in required):
        return Failure("bad_menu", f"required of {entry['name'][:40]} is no list of names")
    schemas = {}
    for name, schema in parameters.items():
        if not isinstance(schema, (str, dict)):
            return Failure("bad_menu", f"parameter {name[:40]} has neither a type nor a schema")
        schema = {"type": schema} if isinstance(schema, str) else dict(schema)
        kind = schema.get("type", "string")
        schemas[name] = schema | {"type": _FAMILY.get(kind, kind) if isinstance(kind, str) else "string"}
    description = entry.get("description")
    return Tool(entry["name"].strip(), description if isinstance(description, str) else "", schemas, tuple(required))


def parse_call_list(text: str) -> tuple[ToolCall, ...] | Failure:
    """A list of calls, or one call; () for an empty list."""
    loaded = load_relaxed(text)
    if isinstance(loaded, Failure):
        return loaded
    if isinstance(loaded, dict):
        loaded = [loaded]
    if not isinstance(loaded, list):
        return Failure("bad_calls", f"a {type(loaded).__name__} is no list of calls")
    calls = []
    for entry in loaded:
        call = _call(entry)
        if isinstance(call, Failure):
            return call
        calls.append(call)
    return tuple(calls)


def _call(entry: Any) -> ToolCall | Failure:
    """One call: bare or in OpenAI's wrapper; arguments as an object, as a JSON string, or as all the other keys."""
    if entry == "...":
        return Failure("placeholder", "... stands where a call should")
    if isinstance(entry, dict) and isinstance(entry.get("function"), dict):
        entry = entry["function"]
    if not isinstance(entry, dict):
        return Failure("bad_calls", f"a {type(entry).__name__} is no call")
    name = entry.get("name", entry.get("tool_name"))
    if not isinstance(name, str) or not name.strip():
        return Failure("bad_calls", "a call without a name")
    key = next((k for k in ("arguments", "parameters", "args") if k in entry), None)
    if key is None:
        arguments = {k: v for k, v in entry.items() if k not in ("name", "tool_name", "type", "id")}
    else:
        arguments = entry[key]
    if isinstance(arguments, str):
        arguments = load_relaxed(arguments) if arguments.strip() else {}
        if isinstance(arguments, Failure):
            return arguments
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return Failure("bad_calls", f"arguments of {name[:40]} are no object")
    if _holds_placeholder(arguments):
        return Failure("placeholder", "... stands where a value should")
    return ToolCall(name.strip(), arguments)


def _holds_placeholder(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_placeholder(v) for v in value.values())
    if isinstance(value, list):
        return any(_holds_placeholder(v) for v in value)
    return value == "..."
