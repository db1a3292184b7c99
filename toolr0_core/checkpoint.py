"""Checkpoints: a directory of safetensors and JSON, written aside, checked by hash, renamed into place; nothing is pickled."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

TENSORS, STATE = "tensors.safetensors", "state.json"
KEEP = 2
T = TypeVar("T")


def check_space(folder: Path, size: int, keep: int = KEEP) -> None:
    """Raises ValueError where the disk cannot hold one more checkpoint of `size` bytes beside the `keep` that stay."""
    there = next(p for p in (folder, *folder.parents) if p.is_dir())
    copies = 1 + max(0, keep - len(_by_age(folder)))
    free, need = shutil.disk_usage(there).free, copies * (size + 2**20)
    if free < need:
        wants = "a checkpoint needs" if copies == 1 else f"{copies} checkpoints need"
        raise ValueError(f"{folder}: {free / 2**20:,.0f} MiB are free and {wants} {need / 2**20:,.0f}; make room, then go on "
                         f"with --resume auto")


def save(folder: Path, name: str, tensors: dict[str, Tensor], state: dict[str, Any], keep: int = KEEP) -> Path:
    """Writes folder/name whole or not at all, then drops all but the newest `keep` of those that can be read.

    Raises ValueError where the disk cannot hold it; what stood there before stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    check_space(folder, sum(t.numel() * t.element_size() for t in tensors.values()), keep=0)
    part = folder / f".{name}.part"
    for stale in (part, *folder.glob(".*.part")):  # also of a save that was killed
        shutil.rmtree(stale, ignore_errors=True)
    try:
        part.mkdir()
        save_file({k: t.detach().contiguous() for k, t in tensors.items()}, part / TENSORS)
        record = {"sha256": _digest(part / TENSORS), "order": _next_order(folder), "state": state}
        (part / STATE).write_text(json.dumps(record))
        for path in (part / TENSORS, part / STATE, part):
            _fsync(path)
        final = _swap_in(part, folder / name)
    except (OSError, SafetensorError) as error:  # a full disk comes as either, after whoever meets it
        shutil.rmtree(part, ignore_errors=True)
        raise ValueError(f"{folder}: the checkpoint {name} could not be written ({error}); the former one is "
                         f"whole: make room, then go on with --resume auto") from error
    for old in [p for p in _by_age(folder) if _order(p) != math.inf][keep:]:  # damaged ones do not crowd out whole ones
        shutil.rmtree(old)
    return final


def latest(folder: Path, read: Callable[[dict[str, Any]], T] = dict) -> tuple[dict[str, Tensor], T] | None:
    """The newest whole checkpoint as (tensors, read(state)), None where there is none; a damaged one, such as one whose state
    `read` refuses by a ValueError or KeyError, is named and skipped."""
    for path in _by_age(folder):
        try:
            record = _record(path)
            state = read(record["state"])
            if _digest(path / TENSORS) != record["sha256"]:
                raise ValueError("its tensors do not match their hash")
            return load_file(path / TENSORS), state
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            print(f"checkpoint {path} is damaged and skipped: {error}", file=sys.stderr)
    return None


def _swap_in(part: Path, final: Path) -> Path:
    """Renames part to final. What stood there steps aside first, since a directory cannot be renamed over, under a name that
    `latest` still finds."""
    aside = final.with_name(f".{final.name}.former")
    shutil.rmtree(aside, ignore_errors=True)
    if final.exists():
        final.rename(aside)
    part.rename(final)
    _fsync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)
    return final


def _fsync(path: Path) -> None:
    """Waits until a file, or a directory's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _by_age(folder: Path) -> list[Path]:
    """Checkpoints, newest first; one without a readable order counts as the newest, so that it gets named."""
    found = [p for p in folder.glob("*") if p.is_dir() and p.suffix != ".part"] if folder.is_dir() else []
    return sorted(found, key=_order, reverse=True)


def _order(path: Path) -> float:
    try:
        return _record(path)["order"]
    except (OSError, ValueError):
        return math.inf


def _record(path: Path) -> dict[str, Any]:
    """What a checkpoint's STATE says. Raises OSError or ValueError where it is damaged."""
    try:
        record = json.loads((path / STATE).read_text())
    except RecursionError:
        record = None
    types = {"sha256": str, "order": int, "state": dict}
    if not (isinstance(record, dict) and all(type(record.get(key)) is kind for key, kind in types.items())):
        raise ValueError(f"its {STATE} does not hold {', '.join(types)}")
    return record


def _next_order(folder: Path) -> int:
    return 1 + max((o for o in map(_order, _by_age(folder)) if o != math.inf), default=0)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
