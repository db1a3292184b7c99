"""Text -> task, calls, or the reason why not. Total: any text gives an answer, in bounded time and memory.

One relaxed loader reads JSON, Python literals and fenced blocks, for rewards, synthesis, verification and evaluation alike.
What it returns can be written as JSON again: NaN, infinities, numbers beyond every float and halves of surrogate pairs are
refused as bad_json.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections import Counter
from typing import Any

from toolr0_core.schema import Failure, Task, Tool, ToolCall, is_text

MAX_CHARS = 200_000
MAX_DEPTH = 32
MAX_CALLS = 128  # of one answer: pairing calls is cubic
TASK_TAGS = ("think", "question", "available_tools", "tool_call_answer")
_ASCII_LOWER = {c: c + 32 for c in range(ord("A"), ord("Z") + 1)}
_STRING = re.compile(r'"(?:[^"\\]|\\.?)*+"?|\'(?:[^\'\\]|\\.?)*+\'?', re.DOTALL)  # always matches at a quote, so linear
_DOTS = re.compile(r"(?:\A|[\[({,:])\s*\.\.\.\s*(?:[\])},]|\Z)")  # an ellipsis where a value or an element should stand
_WORDS = {"null": None, "true": True, "false": False}
_KINDS = {"str": "string", "int": "integer", "float": "number", "double": "number", "bool": "boolean", "date": "string",
          "datetime": "string"}
_SCHEMA_KEYS = {"type", "properties", "required", "description", "title", "additionalProperties", "$schema", "$defs"}


class _Refused(Exception):
    """Carries a Failure's reason and detail out of the depths of a decoder."""


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
    low = text.translate(_ASCII_LOWER)
    if require_think and not any(text[a:b].strip() for a, b in _spans(low, "think")):
        return Failure("missing_think", "no non-empty <think> block")
    start, end = next(reversed(_spans(low, "tool_call_answer")), (0, 0))
    if not text[start:end].strip():
        return Failure("missing_block", "no non-empty <tool_call_answer> block")
    return parse_call_list(text[start:end])


def blocks(text: str, require_think: bool = True) -> dict[str, str] | Failure:
    """The stripped content of the four blocks, none inside another; think may be absent (then "") where it is optional."""
    refused = _too_much(text)
    if refused:
        return refused
    low, spans = text.translate(_ASCII_LOWER), {}
    for tag in TASK_TAGS:
        if low.count(f"<{tag}>") > 1:  # even unclosed: which of them begins the block would be a guess
            return Failure("extra_block", f"<{tag}> occurs {low.count(f'<{tag}>')} times")
        start, end = next(iter(_spans(low, tag)), (0, 0))
        if not text[start:end].strip() and (tag != "think" or require_think):
            return Failure("missing_think" if tag == "think" else "missing_block", f"no non-empty <{tag}> block")
        spans[tag] = (start, end)
    in_order = sorted(span for span in spans.values() if span != (0, 0))
    if any(former[1] > later[0] for former, later in zip(in_order, in_order[1:])):
        return Failure("extra_block", "a block inside another")
    return {tag: text[start:end].strip() for tag, (start, end) in spans.items()}


def _too_much(text: str) -> Failure | None:
    if len(text) > MAX_CHARS:
        return Failure("too_long", f"{len(text)} characters, over {MAX_CHARS}")
    return None if text.strip() else Failure("empty")


def _spans(low: str, tag: str) -> list[tuple[int, int]]:
    """Where the contents of <tag>...</tag> stand, from the last opening before each closing; one walk, linear.

    `low` has A-Z lowered and nothing else: str.lower changes the length of some texts, and indices with it.
    """
    opening, closing, out, at = f"<{tag}>", f"</{tag}>", [], 0
    while (end := low.find(closing, at)) >= 0:
        start = low.rfind(opening, at, end)
        if start >= 0:
            out.append((start + len(opening), end))
        at = end + len(closing)
    return out


# -- The relaxed loader --------------------------------------------------------------------------------------------------


def load_relaxed(text: str) -> Any | Failure:
    """JSON, or a Python literal, or either with the other's null/None words, with or without a code fence."""
    refused = _too_much(text)
    if refused:
        return refused
    text = _unfence(text)
    if nesting(text) > MAX_DEPTH:
        return Failure("too_deep", f"nested {nesting(text)} deep, over {MAX_DEPTH}")
    try:
        return _checked(_decode(text))
    except _Refused as error:
        return Failure(*error.args)


def _unfence(text: str) -> str:
    """Without the code fence around it, or the half of one that generation left."""
    text = text.strip()
    if text.startswith("```"):
        text = re.sub(r"\A```\w*", "", text)
    return text.removesuffix("```").strip()


def nesting(text: str) -> int:
    """Deepest nesting of brackets outside quoted strings; exact for JSON, a close guess for anything else."""
    deepest = level = 0
    for c in _STRING.sub("", text):
        if c in "[{(":
            level += 1
            deepest = max(deepest, level)
        elif c in "]})" and level:
            level -= 1
    return deepest


def _decode(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError):  # RecursionError: of a caller that is deep itself
        pass
    if _DOTS.search(_STRING.sub("''", text)):
        raise _Refused("placeholder", "... stands where a value should")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes and the like are the model's affair
            return _literal(ast.parse(text, mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError, OverflowError) as error:
        raise _Refused("bad_json", f"{type(error).__name__}: {str(error)[:80]}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise _Refused("duplicate_key", "an object repeats a key")
    return out


def _literal(node: ast.AST) -> Any:
    """ast.literal_eval for lists, dicts and plain values, plus JSON's words; anything else is refused."""
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if not isinstance(value, bool):
            return -value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(e) for e in elements]
        case ast.Dict(keys=keys, values=values) if all(isinstance(getattr(k, "value", None), str) for k in keys):
            return _unique([(k.value, _literal(v)) for k, v in zip(keys, values)])
    raise _Refused("bad_json", f"{type(node).__name__} is not a plain value")


def _checked(value: Any, depth: int = 0) -> Any:
    """The value, if all of it is plain: not too deep, no placeholder, nothing that JSON cannot write."""
    if depth > MAX_DEPTH:
        raise _Refused("too_deep", f"nested over {MAX_DEPTH} deep")
    if isinstance(value, str):
        if value == "...":
            raise _Refused("placeholder", "... stands where a value should")
        if not is_text(value):
            raise _Refused("bad_json", "half of a surrogate pair")
    elif isinstance(value, (list, dict)):
        for element in value:
            _checked(element, depth + 1)
        for element in value.values() if isinstance(value, dict) else ():
            _checked(element, depth + 1)
    elif isinstance(value, (int, float)) and not _is_finite(value):
        raise _Refused("bad_json", "a number that is not finite, or beyond every float")
    return value


def _is_finite(number: int | float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer beyond every float, which Python may even refuse to print
        return False


# -- Menus and calls -----------------------------------------------------------------------------------------------------


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
    name, times = Counter(tool.name for tool in tools).most_common(1)[0]
    return Failure("duplicate_tool", f"{times} times {name[:40]!a}") if times > 1 else tuple(tools)


def _tool(entry: Any) -> Tool | Failure:
    """One menu entry: bare or in OpenAI's wrapper; parameters as a flat map or a JSON schema."""
    entry = _unwrapped(entry)
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"].strip():
        return Failure("bad_menu", "a tool without a name")
    given = entry.get("parameters")
    given = {} if given is None else given
    if not isinstance(given, dict):
        return Failure("bad_menu", f"parameters of {entry['name'][:40]!a} are no object")
    parameters, required = _parameters(given)
    required = required if entry.get("required") is None else entry["required"]
    if not isinstance(required, list) or not all(isinstance(r, str) for r in required):
        return Failure("bad_menu", f"required of {entry['name'][:40]!a} is no list of names")
    if not all(isinstance(schema, (str, dict)) for schema in parameters.values()):
        return Failure("bad_menu", f"a parameter of {entry['name'][:40]!a} has neither a type nor a schema")
    schemas = {name: _schema(schema) for name, schema in parameters.items()}
    description = entry.get("description")
    return Tool(entry["name"].strip(), description if isinstance(description, str) else "", schemas, tuple(required))


def _unwrapped(entry: Any) -> Any:
    """The tool or call inside {"type": "function", "function": {...}}; anything else as it is."""
    if isinstance(entry, dict) and isinstance(entry.get("function"), dict) and not entry.keys() & {"name", "tool_name"}:
        return entry["function"]
    return entry


def _parameters(given: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Schemas or type names by parameter, and what is required unless the tool itself says."""
    is_schema = isinstance(given.get("properties"), dict) or given.get("type") == "object"
    if is_schema and given.keys() <= _SCHEMA_KEYS:  # else "properties" and "type" are parameters like the others
        properties, required = given.get("properties"), given.get("required")
        return properties if isinstance(properties, dict) else {}, [] if required is None else required
    if isinstance(given.get("required"), list):
        return {name: schema for name, schema in given.items() if name != "required"}, given["required"]
    # the compact notation, name -> type, has no optional parameters
    return given, list(given) if all(isinstance(schema, str) for schema in given.values()) else []


def _schema(given: str | dict[str, Any]) -> dict[str, Any]:
    """A parameter's schema with one type out of JSON schema's names where it is known by another."""
    schema = {"type": given} if isinstance(given, str) else given
    kind = schema.get("type")
    if isinstance(kind, list):  # such as ["integer", "null"]
        kind = next((k for k in kind if isinstance(k, str) and k != "null"), None)
    kind = kind.strip().lower() if isinstance(kind, str) else "string"
    return schema | {"type": _KINDS.get(kind, kind)}


def parse_call_list(text: str) -> tuple[ToolCall, ...] | Failure:
    """A list of calls, or one call; () for an empty list."""
    loaded = load_relaxed(text)
    if isinstance(loaded, Failure):
        return loaded
    if isinstance(loaded, dict):
        loaded = [loaded]
    if not isinstance(loaded, list):
        return Failure("bad_calls", f"a {type(loaded).__name__} is no list of calls")
    if len(loaded) > MAX_CALLS:
        return Failure("bad_calls", f"{len(loaded)} calls, over {MAX_CALLS}")
    calls = []
    for entry in loaded:
        call = _call(entry)
        if isinstance(call, Failure):
            return call
        calls.append(call)
    return tuple(calls)


def _call(entry: Any) -> ToolCall | Failure:
    """One call: bare or in OpenAI's wrapper; arguments as an object, as a JSON string, or as all the other keys."""
    entry = _unwrapped(entry)
    if not isinstance(entry, dict):
        return Failure("bad_calls", f"a {type(entry).__name__} is no call")
    name_key = "name" if "name" in entry else "tool_name"
    name = entry.get(name_key)
    if not isinstance(name, str) or not name.strip():
        return Failure("bad_calls", "a call without a name")
    key = next((k for k in ("arguments", "parameters", "args") if k in entry), None)
    arguments = {k: v for k, v in entry.items() if k != name_key} if key is None else entry[key]
    if isinstance(arguments, str):
        arguments = load_relaxed(arguments) if arguments.strip() else {}
        if isinstance(arguments, Failure):
            return arguments
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return Failure("bad_calls", f"arguments of {name[:40]!a} are no object")
    return ToolCall(name.strip(), arguments)
