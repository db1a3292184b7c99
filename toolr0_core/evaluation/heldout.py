"""Held-out figures of a Solver: greedy exact match, avg8, pass8 and format rate, on rows of the uniform form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from toolr0_core.config import RewardConfig
from toolr0_core.evaluation.statistics import mean_interval, paired_difference, wilson
from toolr0_core.matching import calls_equal
from toolr0_core.parse import parse_calls, parse_menu
from toolr0_core.schema import Failure, Task, ToolCall, is_text

FIGURES = ("greedy", "avg8", "pass8", "format")


@dataclass(frozen=True)
class Row:
    """One held-out task; any of the golds may be met."""

    id: str
    task: Task
    golds: tuple[tuple[ToolCall, ...], ...]
    group: str


def load(path: str | Path, limit: int = 0) -> list[Row]:
    """Rows of a uniform JSONL file, the first `limit` of them (0: all). Raises ValueError with file, line and reason."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")  # not splitlines: a question may hold a U+2028
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ValueError(f"eval.data {path}: {why}; give a uniform JSONL file") from None
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if limit and len(rows) == limit:
            break
        if line.strip():
            try:
                rows.append(_row(json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"eval.data {path}, line {number}: {error}; a row is an object with id, question, tools and "
                                 f"gold, a list of alternatives that are lists of calls") from None
    if not rows:
        raise ValueError(f"eval.data {path}: no rows; give a uniform JSONL file")
    return rows


def _row(obj: Any) -> Row:
    """The row of one line's object. Raises ValueError with what is wrong."""
    if not isinstance(obj, dict):
        raise ValueError("not an object")
    if not is_text(json.dumps(obj, ensure_ascii=False)):
        raise ValueError("half of a surrogate pair, which cannot be printed")
    for key in ("id", "question", "tools", "gold"):
        if key not in obj:
            raise ValueError(f"{key} is missing")
    question, golds, tools = obj["question"], obj["gold"], parse_menu(json.dumps(obj["tools"]))
    if not isinstance(question, str):
        raise ValueError("question is not a text")
    if isinstance(tools, Failure):
        raise ValueError(f"tools: {tools.reason}, {tools.detail}")
    if not isinstance(golds, list) or not golds or not all(isinstance(g, list) and all(map(_is_call, g)) for g in golds):
        raise ValueError("gold is not a list, with one entry or more, of lists of calls with a name and a map of arguments")
    calls = tuple(tuple(map(ToolCall.from_json, gold)) for gold in golds)
    meta = obj.get("meta")
    group = meta.get("group", "") if isinstance(meta, dict) else ""
    return Row(str(obj["id"]), Task(question, tools, calls[0]), calls, str(group))


def _is_call(obj: Any) -> bool:
    return isinstance(obj, dict) and isinstance(obj.get("name"), str) and isinstance(obj.get("arguments", {}), dict)


def outcomes(rows: Sequence[Row], greedy: Sequence[str], sampled: Sequence[Sequence[str]],
             config: RewardConfig) -> list[dict[str, Any]]:
    """What every row came to: greedy 0 or 1, avg8 the share of right samples, pass8 0 or 1, format the share that reads."""
    def judge(row: Row, text: str) -> tuple[bool, bool]:
        """Whether the text is right, and whether it reads as calls at all."""
        calls = parse_calls(text, config.require_think)
        reads = isinstance(calls, tuple)
        return reads and any(calls_equal(calls, gold, config.rule) for gold in row.golds), reads

    out = []
    for row, text, texts in zip(rows, greedy, sampled, strict=True):
        hits, reads = zip(*(judge(row, t) for t in texts))
        out.append({"id": row.id, "group": row.group, "greedy": float(judge(row, text)[0]), "avg8": sum(hits) / len(hits),
                    "pass8": float(any(hits)), "format": sum(reads) / len(reads)})
    return out


def summarise(per_row: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all rows, and under "groups" those of each group of rows, where rows name groups."""
    groups = sorted({r["group"] for r in per_row} - {""})
    by_group = {g: _figures([r for r in per_row if r["group"] == g]) for g in groups}
    return _figures(per_row) | ({"groups": by_group} if groups else {})


def _figures(per_row: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each figure with its 95 % interval: Wilson's for those of 0 and 1, the normal one of the mean for shares."""
    out: dict[str, Any] = {"n": len(per_row)}
    for name in FIGURES:
        values = [r[name] for r in per_row]
        value, low, high = mean_interval(values)
        if name in ("greedy", "pass8") or len(set(values)) < 2:  # equal shares do not make a figure certain
            low, high = wilson(sum(values), len(values))
        out[name] = {"value": value, "low": max(0.0, low), "high": min(1.0, high)}
    return out


def gains(base: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Paired differences to the base model on the same rows."""
    return {name: dict(zip(("value", "low", "high"), paired_difference([r[name] for r in base], [r[name] for r in after])))
            for name in FIGURES}


def print_table(summary: dict[str, Any]) -> None:
    """Base and iterations with 95 % intervals, the gain over the base in paired ones, and groups of tasks apart.

    A terminal too narrow for all of that gets the interval of the gain alone.
    """
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 140)
    cell = _cell if console.width >= 120 else _short_cell
    table = Table(title=f"held-out tasks (n = {summary['base']['n']}): exact match, 95 % intervals", box=box.SIMPLE_HEAD)
    for head in ("", "greedy", "avg8", "pass@8", "format", "avg8 over base"):
        table.add_column(head, justify="right" if head else "left")
    rounds = [summary["base"], *summary["iterations"]]
    for figures in rounds:
        table.add_row(_round(figures), *map(partial(cell, figures), FIGURES), _gain(figures))
    for group in summary["base"].get("groups", {}):
        table.add_section()
        table.add_row(f"{escape(group)} (n = {summary['base']['groups'][group]['n']})")
        for figures in rounds[:: max(1, len(rounds) - 1)]:  # base and last
            table.add_row(f"  {_round(figures)}", *map(partial(cell, figures["groups"][group]), FIGURES))
    console.print(table)


def _round(figures: dict[str, Any]) -> str:
    return f"iteration {figures['iteration']}" if figures["iteration"] else "base"


def _cell(figures: dict[str, Any], name: str) -> str:
    return interval_text(figures[name], ".3f")


def _short_cell(figures: dict[str, Any], name: str) -> str:
    return interval_text(figures[name], ".3f").split(" ")[0]


def _gain(figures: dict[str, Any]) -> str:
    return interval_text(figures["gain"]["avg8"], "+.3f") if "gain" in figures else ""


def interval_text(figure: dict[str, float], form: str) -> str:
    """.416 [.381, .451]"""
    value, low, high = (f"{figure[k]:{form}}".replace("0.", ".", 1) for k in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"
