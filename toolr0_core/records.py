"""The files of a run directory: their rows, written whole or not at all and read with care.

JSON lines are ASCII, so that no text of a model can break a line or an encoding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from toolr0_core.curriculum import Candidate
from toolr0_core.evaluation.heldout import FIGURES
from toolr0_core.schema import Task

PHASES = ("generator", "curriculum", "solver", "evaluate")
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # what damaged JSON comes to
LOGS = ("metrics.jsonl", "rollouts.jsonl")
T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Position:
    """The next thing to do: this step of this phase (an index into PHASES) of this iteration; iteration 0 is the base."""

    iteration: int = 0
    phase: int = PHASES.index("evaluate")
    step: int = 0

    def next_phase(self) -> Position:
        last = self.phase + 1 == len(PHASES)
        return Position(self.iteration + last, 0 if last else self.phase + 1)

    @classmethod
    def read(cls, at: Any) -> Position:
        """The position of a log's row or a checkpoint's state. Raises ValueError for what is none."""
        if not (isinstance(at, list) and len(at) == 3 and all(type(n) is int and n >= 0 for n in at) and at[1] < len(PHASES)):
            raise ValueError(f"'at' is {str(at)[:40]}, not an iteration, a phase and a step")
        return cls(*at)

    @property
    def name(self) -> str:
        return f"iteration_{self.iteration}-{PHASES[self.phase]}-{self.step}"


def write_json(path: Path, obj: Any) -> None:
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(obj, indent=1) + "\n")
    part.replace(path)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    part.replace(path)


def whole_rows(path: Path, read: Callable[[Any], T]) -> list[T]:
    """What `read` makes of each row of a JSONL file; a last line of a log that a crash cut short is left out."""
    lines, out = path.read_text(encoding="utf-8", errors="backslashreplace").split("\n"), []
    if path.name in LOGS or not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            out.append(read(json.loads(line)))
        except UNREADABLE:
            remedy = "delete that line" if path.name in LOGS else "put the file back as it was, or begin again in another --out"
            raise ValueError(f"{path}, line {number} is {line[:40]!r}, which no run writes there; {remedy}") from None
    return out


def logged(row: Any) -> tuple[Position, dict[str, Any]]:
    """A row of metrics.jsonl or rollouts.jsonl and where it belongs. This and the next two raise UNREADABLE for other rows."""
    return Position.read(row["at"]), row


def candidate(row: Any) -> Candidate:
    """A row of a curriculum."""
    found = Candidate(Task.from_json(row["task"]), row["p"])
    texts = [found.task.question, *(x for tool in found.task.tools for x in (tool.name, tool.description)),
             *(call.name for call in found.task.gold)]
    maps = [x for tool in found.task.tools for x in (tool.parameters, *tool.parameters.values())]
    maps += [call.arguments for call in found.task.gold]
    if not (is_share(found.p) and all(isinstance(x, str) for x in texts) and all(isinstance(x, dict) for x in maps)):
        raise ValueError("no task and its success rate")
    return found


def outcome(row: Any) -> dict[str, Any]:
    """What a held-out task came to."""
    if not (isinstance(row["id"], str) and isinstance(row["group"], str) and all(is_share(row[name]) for name in FIGURES)):
        raise ValueError("no outcome of a held-out task")
    return row


def is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1


def read_object(path: Path, **checks: Callable[[Any], bool]) -> dict[str, Any]:
    """The object that a run wrote into a JSON file, whose entries pass these checks. Raises ValueError with the file's name."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        flat(value)  # as deep as Python reads it
        if all(check(value[key]) for key, check in checks.items()):
            return value
    except UNREADABLE:
        pass
    raise ValueError(f"{path} is damaged; put the file back as it was, or give another directory")


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    out = {}
    for key, value in tree.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out
