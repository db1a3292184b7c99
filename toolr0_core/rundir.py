"""A run on disk: where it stands, what it wrote, and how it goes on.

config.json, metrics.jsonl, rollouts.jsonl, curriculum/iteration_N.jsonl (selected, in training order) and
iteration_N.dropped.jsonl (with reasons), checkpoints/, hf/{generator,solver}/, summary.json.
Only rank 0 writes; every rank reads.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toolr0_core.config import Config
from toolr0_core.curriculum import Candidate
from toolr0_core.schema import Task


class Interrupted(Exception):
    """The user asked to stop; everything needed to go on is on disk."""


@dataclass(frozen=True)
class Position:
    """The next thing to do: this step of this phase of this iteration. phase "base" is the base model's evaluation."""

    iteration: int = 0
    phase: str = "evaluate"
    step: int = 0


class StopRequest:
    """Turns Ctrl-C and SIGTERM into a flag that the loop reads between steps; a second Ctrl-C ends at once."""

    def __init__(self):
        self.requested = False

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        def ask(signum, frame):
            if self.requested:
                raise KeyboardInterrupt
            self.requested = True
        former = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


def write_json(path: Path, obj: Any) -> None:
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(obj, indent=1, ensure_ascii=True) + "\n")
    part.replace(path)


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Whole or not at all; ASCII, so that no text of a model can break a line or an encoding."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("w") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=True) + "\n")
    part.replace(path)


def check_out(out: Path, config: Config, resume: bool) -> None:
    """Raises ValueError where this run cannot use `out`: not writable, another run's, or a resume of other settings."""
    stored = out / "config.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--out {out}: cannot write there ({error.strerror}); name a directory that you own") from error
    if not stored.exists():
        return
    if not resume:
        raise ValueError(f"--out {out}: holds a run already; go on with it by --resume auto, or name another directory")
    former, now = json.loads(stored.read_text()), json.loads(json.dumps(asdict(config)))
    changed = sorted(k for k in set(flat(former)) | set(flat(now)) if flat(former).get(k) != flat(now).get(k))
    changed = [k for k in changed if k != "out"]
    if changed:
        k = changed[0]
        raise ValueError(f"--resume: {out} was started with --{k} {flat(former).get(k)!r}, not {flat(now).get(k)!r}; "
                         f"give its settings again or name a new --out ({len(changed)} settings differ)")


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    out = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value and all(isinstance(k, str) and k.isidentifier() for k in value):
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out


def read_curriculum(out: Path, iteration: int) -> list[Candidate]:
    with (out / "curriculum" / f"iteration_{iteration}.jsonl").open() as file:
        return [Candidate(Task.from_json(row["task"]), row["p"]) for row in map(json.loads, file)]


def write_curriculum(out: Path, iteration: int, rows: Sequence[Candidate], dropped: Sequence[dict[str, Any]]) -> None:
    folder = out / "curriculum"
    write_jsonl(folder / f"iteration_{iteration}.dropped.jsonl", dropped)
    write_jsonl(folder / f"iteration_{iteration}.jsonl", [{"p": r.p, "task": r.task.to_json()} for r in rows])


__all__ = ["Interrupted", "Position", "StopRequest", "check_out", "read_curriculum", "replace", "write_curriculum"]
