"""Held-out figures of a Solver: greedy exact match, avg8, pass8 and format rate, on rows of the uniform form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolr0_core.config import RewardConfig
from toolr0_core.evaluation.statistics import mean_interval, paired_difference, wilson
from toolr0_core.matching import calls_equal
from toolr0_core.parse import parse_calls
from toolr0_core.schema import Task, Tool, ToolCall

FIGURES = ("greedy", "avg8", "pass8", "format")


@dataclass(frozen=True)
class Row:
    """One held-out task; any of the golds may be met."""

    id: str
    task: Task
    golds: tuple[tuple[ToolCall, ...], ...]
    group: str


def load(path: str | Path, limit: int = 0) -> list[Row]:
    """Rows of a uniform JSONL file. Raises ValueError naming the file, line and reason of one that cannot be read."""
    rows = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"eval.data {path}: {error.strerror}; give a uniform JSONL file") from None
    for number, line in enumerate(lines[: limit or None], 1):
        try:
            obj = json.loads(line)
            golds = tuple(tuple(map(ToolCall.from_json, gold)) for gold in obj["gold"])
            task = Task(obj["question"], tuple(map(Tool.from_json, obj["tools"])), golds[0])
            rows.append(Row(str(obj["id"]), task, golds, obj.get("meta", {}).get("group", "")))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"eval.data {path}, line {number}: {type(error).__name__} {error}; rows need id, question, "
                             f"tools and gold, a list of alternatives") from None
    return rows


def outcomes(rows: Sequence[Row], greedy: Sequence[str], sampled: Sequence[Sequence[str]],
             config: RewardConfig) -> list[dict[str, Any]]:
    """What every row came to: greedy 0 or 1, avg8 the share of right samples, pass8 0 or 1, format the share that reads."""
    def right(row: Row, text: str) -> bool:
        calls = parse_calls(text, config.require_think)
        return isinstance(calls, tuple) and any(calls_equal(calls, gold, config.rule) for gold in row.golds)

    out = []
    for row, text, texts in zip(rows, greedy, sampled, strict=True):
        hits = [right(row, t) for t in texts]
        reads = [isinstance(parse_calls(t, config.require_think), tuple) for t in texts]
        out.append({"id": row.id, "group": row.group, "greedy": float(right(row, text)), "avg8": sum(hits) / len(hits),
                    "pass8": float(any(hits)), "format": sum(reads) / len(reads)})
    return out


def summarise(per_row: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each figure with its 95 % interval: Wilson's for those of 0 and 1, the normal one of the mean for shares."""
    out: dict[str, Any] = {"n": len(per_row)}
    for name in FIGURES:
        values = [r[name] for r in per_row]
        value, low, high = mean_interval(values)
        low, high = max(0.0, low), min(1.0, high)
        if name in ("greedy", "pass8"):
            low, high = wilson(sum(values), len(values))
        out[name] = {"value": value, "low": low, "high": high}
    groups = sorted({r["group"] for r in per_row} - {""})
    if groups:
        out["groups"] = {g: {name: mean_interval([r[name] for r in per_row if r["group"] == g])[0] for name in FIGURES}
                         | {"n": sum(r["group"] == g for r in per_row)} for g in groups}
    return out


def gains(base: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Paired differences to the base model on the same rows."""
    return {name: dict(zip(("value", "low", "high"), paired_difference([r[name] for r in base], [r[name] for r in after])))
            for name in FIGURES}


def print_table(summary: dict[str, Any]) -> None:
    """Base and iterations with 95 % intervals, and the gain over the base in paired ones."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"held-out tasks (n = {summary['base']['n']}), 95 % intervals")
    for head in ("", "greedy exact", "avg8 (T = 1)", "pass@8", "format", "avg8 over base (paired)"):
        table.add_column(head, justify="left" if not head else "right", no_wrap=True)
    for figures in (summary["base"], *summary["iterations"]):
        cells = [f"{figures[f]['value']:.3f} [{figures[f]['low']:.3f}, {figures[f]['high']:.3f}]" for f in FIGURES]
        gain = figures.get("gain", {}).get("avg8")
        cells.append(f"{gain['value']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]" if gain else "")
        table.add_row("base" if not figures["iteration"] else f"iteration {figures['iteration']}", *cells)
    Console(width=None if Console().is_terminal else 140).print(table)
