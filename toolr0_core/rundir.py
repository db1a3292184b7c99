"""A run on disk and on the terminal: settings, metrics, rollouts, curricula, evaluations, summary.

Only rank 0 writes; every rank reads. What the files hold is records.py.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from toolr0_core.config import Config
from toolr0_core.curriculum import Candidate
from toolr0_core.records import (
    LOGS,
    PHASES,
    Position,
    candidate,
    flat,
    logged,
    outcome,
    read_object,
    whole_rows,
    write_json,
    write_jsonl,
)

SECONDS_BETWEEN_LINES = 30  # of progress in a log file
SECONDS = ".seconds"  # of the run so far, in its directory


class StopRequest:
    """Turns Ctrl-C and SIGTERM into a flag that the loop reads between steps; a second one ends at once."""

    def __init__(self):
        self.requested = False

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        def ask(signum, frame):
            if self.requested:
                raise KeyboardInterrupt
            self.requested = True
            if os.environ.get("RANK", "0") == "0":
                print("\nstopping after this step (again to stop at once)", file=sys.stderr, flush=True)

        former = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


class RunDir:
    """The run directory `out`, and the lines a person reads meanwhile."""

    def __init__(self, out: Path, writes: bool):
        self.out, self.writes = out, writes
        self.started = time.time()  # less what former processes of this run took

    # -- files -------------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Makes the directory this process's own until it ends, however it ends. Raises ValueError where another has it."""
        with _writing("--out", self.out):
            self.out.mkdir(parents=True, exist_ok=True)
            self.lock = (self.out / ".lock").open("a")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--out {self.out} is in use by another run; wait until that ends, or name another "
                             f"directory") from None
        except OSError:  # a file system without locks
            pass
        with suppress(OSError, ValueError, OverflowError):
            self.started -= max(0, int((self.out / SECONDS).read_text()))

    def keep_time(self) -> None:
        """Notes how long the run has taken, over all of its processes."""
        if self.writes:
            (self.out / SECONDS).write_text(f"{time.time() - self.started:.0f}\n")

    def write_config(self, config: Config) -> None:
        if self.writes:
            write_json(self.out / "config.json", asdict(config))

    def forget_from(self, position: Position) -> None:
        """Drops what was logged at or after this position, so that a resumed run logs no line twice."""
        for name in LOGS:
            path = self.out / name
            if self.writes and path.exists():
                write_jsonl(path, [row for at, row in whole_rows(path, logged) if at < position])

    def write_curriculum(self, iteration: int, rows: Sequence[Candidate], dropped: Sequence[dict[str, Any]]) -> None:
        if self.writes:
            folder = self.out / "curriculum"
            write_jsonl(folder / f"iteration_{iteration}.dropped.jsonl", dropped)
            write_jsonl(folder / f"iteration_{iteration}.jsonl", [{"p": r.p, "task": r.task.to_json()} for r in rows])

    def read_curriculum(self, iteration: int) -> list[Candidate]:
        """The rows of an iteration in training order."""
        return whole_rows(self.out / "curriculum" / f"iteration_{iteration}.jsonl", candidate)

    def write_evaluation(self, iteration: int, per_row: Sequence[dict[str, Any]]) -> None:
        if self.writes:
            write_jsonl(self.out / "evaluations" / f"iteration_{iteration}.jsonl", per_row)

    def read_evaluation(self, iteration: int) -> list[dict[str, Any]] | None:
        path = self.out / "evaluations" / f"iteration_{iteration}.jsonl"
        return whole_rows(path, outcome) if path.exists() else None

    def write_summary(self, summary: dict[str, Any]) -> None:
        if self.writes:
            write_json(self.out / "summary.json", summary)

    def append(self, name: str, position: Position, rows: Iterable[dict[str, Any]]) -> None:
        """Rows onto a JSONL file, each with where in the run it belongs."""
        if self.writes:
            at = [position.iteration, position.phase, position.step]
            with (self.out / name).open("a") as file:
                file.writelines(json.dumps({"at": at} | row) + "\n" for row in rows)
            self.keep_time()

    # -- terminal ----------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        if self.writes:
            print(text, flush=True)

    def log_step(self, position: Position, steps: int, left: float, metrics: dict[str, float]) -> None:
        """One line a step, rewards first, and the same in metrics.jsonl."""
        phase = PHASES[position.phase]
        self.append("metrics.jsonl", position, [{"iteration": position.iteration, "phase": phase, "step": position.step}
                                                | metrics])
        cells = [f"{name} {metrics[key]:{form}}" for name, key, form in COLUMNS[phase] if key in metrics]
        self.say(f"{position.iteration} {phase:9} {position.step + 1:3}/{steps} | {' '.join(cells)} | {clock(left)} left")

    def chunks(self, items: Sequence[Any], what: str, size: int) -> Iterator[Sequence[Any]]:
        """Parts of a long list, with progress and time left: a bar on a terminal, elsewhere a line now and then."""
        terminal, started = sys.stderr.isatty(), time.time()
        said = started
        with tqdm(total=len(items), desc=what, disable=not (self.writes and terminal), leave=False) as bar:
            for start in range(0, len(items), size):
                yield items[start: start + size]
                done, now = min(start + size, len(items)), time.time()
                bar.update(done - start)
                if not terminal and now - said > SECONDS_BETWEEN_LINES and done < len(items):
                    self.say(f"{what}: {done}/{len(items)} | {clock((now - started) / done * (len(items) - done))} left")
                    said = now


_TRAINING = (("loss", "loss", "+.4f"), ("grad", "grad_norm", "6.2f"), ("kl", "kl", ".4f"), ("entropy", "entropy", ".3f"),
             ("gap", "logp_gap", ".0e"), ("flat", "flat_groups", ".2f"), ("cut", "truncated", ".2f"), ("len", "length", "5.1f"))
COLUMNS = {
    "generator": (("reward", "reward", "6.3f"), ("format", "format", ".2f"), ("validity", "validity", ".2f"),
                  ("difficulty", "difficulty", ".2f"), ("semantic", "semantic", ".2f"), ("valid", "valid", ".2f"),
                  ("p", "p", ".2f"), *_TRAINING),
    "solver": (("reward", "reward", "6.3f"), ("format", "format", ".2f"), ("accuracy", "accuracy", ".2f"),
               ("exact", "exact", ".2f"), *_TRAINING)}


def clock(seconds: float) -> str:
    """H:MM:SS"""
    seconds = max(0, round(seconds))
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def check_out(out: Path, config: Config, resume: bool, ids: Sequence[str] = ()) -> None:
    """Raises ValueError where this run cannot use `out`: not writable, another run's, a resume with other settings or held-out
    tasks than those with these ids, or damaged.

    Leaves nothing behind.
    """
    with _writing("--out", out):
        with suppress(FileNotFoundError):
            out.stat()  # for a name that cannot be
        tempfile.TemporaryFile(dir=nearest(out)).close()
    stored = out / "config.json"
    if not stored.exists():
        if (out / "checkpoints").exists():  # of which settings nobody can tell
            raise ValueError(f"--out {out} has checkpoints but no config.json, so it cannot be gone on with; put the run's "
                             f"config.json back, or name another directory")
        return
    if not resume:
        raise ValueError(f"--out {out} holds a run already; go on with it by --resume auto, or name another directory")
    former, now = map(flat, (read_object(stored), json.loads(json.dumps(asdict(config)))))
    changed = sorted(k for k in former.keys() | now.keys() if former.get(k) != now.get(k) and k != "out")
    if changed:
        k = changed[0]
        raise ValueError(f"--resume: {out} was started with --{k} {former.get(k)!r}, not {now.get(k)!r} "
                         f"(settings that differ: {len(changed)}); give it those it was started with, or name a new --out")
    for name in LOGS:
        if (out / name).exists():
            whole_rows(out / name, logged)
    for path in sorted(out.glob("curriculum/iteration_*.jsonl")):
        if path.suffixes == [".jsonl"]:  # not those that were dropped
            whole_rows(path, candidate)
    for path in sorted(out.glob("evaluations/iteration_*.jsonl")):
        found = whole_rows(path, outcome)
        if [row["id"] for row in found] != list(ids):
            raise ValueError(f"{path} has {len(found)} rows, which are not those of the {len(ids)} held-out tasks; put back "
                             f"what was there, or begin again in another --out")


def check_file(option: str, path: Path) -> None:
    """Raises ValueError where a file could not be written later on. Leaves nothing behind."""
    with _writing(option, path):
        try:
            path.stat()
        except FileNotFoundError:
            tempfile.TemporaryFile(dir=path.parent).close()
        else:
            path.open("a").close()


def nearest(path: Path) -> Path:
    """The path, or the first of its parents that is there."""
    return next(p for p in (path, *path.parents) if os.path.lexists(p))


@contextmanager
def _writing(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written ({error.strerror}); name a place that is yours to write") from None


