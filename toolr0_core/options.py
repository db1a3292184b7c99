"""The command line of every program, made from the Config dataclasses: `--group.name value`. No torch here.

A bad option is one line on stderr that says what is legal, and exit status 1.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NoReturn

from toolr0_core.config import Config
from toolr0_core.presets import PRESETS


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line with the nearest legal words."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            word = message.split()[2].split("=")[0]
            legal = [o for a in self._actions for o in a.option_strings]
            near = difflib.get_close_matches(word, legal, 3, 0.4)
            message = f"unknown option {word}; " + (f"did you mean {', '.join(near)}?" if near else "see --help")
        fail(message)


def fail(message: object) -> NoReturn:
    """One line, exit status 1; of several ranks, the first speaks."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
    raise SystemExit(1)


def leaves(config: Any, prefix: str = "") -> dict[str, tuple[Any, str]]:
    """Dotted name -> (value, help) of every setting of a nested dataclass."""
    out = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            out |= leaves(value, f"{prefix}{f.name}.")
        else:
            out[prefix + f.name] = (value, f.metadata.get("help", ""))
    return out


def with_values(config: Any, values: dict[str, Any]) -> Any:
    """The nested dataclass with these dotted settings replaced."""
    own = {k: v for k, v in values.items() if "." not in k}
    for group in {k.split(".", 1)[0] for k in values if "." in k}:
        inner = {k.split(".", 1)[1]: v for k, v in values.items() if k.startswith(group + ".")}
        own[group] = with_values(getattr(config, group), inner)
    return replace(config, **own)


def parse(argv: Sequence[str], description: str, add: Any = None) -> tuple[Config, argparse.Namespace]:
    """The Config that argv asks for, preset first, and the program's own options that `add(parser)` declared."""
    first = Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="nano")
    name = first.parse_known_args(argv)[0].preset
    if name not in PRESETS:
        fail(f"unknown preset {name!r}; presets are {', '.join(PRESETS)}")
    base = PRESETS[name]()
    parser = Parser(description=description, allow_abbrev=False,
                    formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110))
    if add:
        add(parser)
    groups: dict[str, Any] = {}
    for dotted, (value, text) in leaves(base).items():
        group = dotted.split(".")[0] if "." in dotted else "run"
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        groups[group].add_argument(f"--{dotted}", *_spellings(dotted), dest=dotted, type=reader(value), metavar=_kind(value),
                                   default=argparse.SUPPRESS, help=f"{text} [{_shown(value)}]".replace("%", "%%"))
    given = vars(parser.parse_args(argv))
    dotted_names = set(leaves(base))
    own = argparse.Namespace(**{k: v for k, v in given.items() if k not in dotted_names})
    return with_values(base, {k: v for k, v in given.items() if k in dotted_names}), own


def _spellings(dotted: str) -> list[str]:
    return [f"--{dotted.replace('_', '-')}"] if "_" in dotted else []


def _kind(value: Any) -> str:
    return {bool: "true|false", int: "N", float: "X", dict: "JSON"}.get(type(value), "TEXT")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else json.dumps(value) if isinstance(value, dict) else str(value)


def reader(value: Any) -> Callable[[str], Any]:
    """What turns an option's text into a value of this setting's type."""
    def whole(text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r:.80} is not a whole number") from None

    def number(text: str) -> float:
        try:
            found = float(text)
        except (ValueError, OverflowError):
            found = math.nan
        if not math.isfinite(found):
            raise argparse.ArgumentTypeError(f"{text!r:.80} is not a finite number")
        return found

    def boolean(text: str) -> bool:
        if text.lower() not in ("true", "false"):
            raise argparse.ArgumentTypeError(f"{text!r:.80} is neither true nor false")
        return text.lower() == "true"

    def mapping(text: str) -> dict:
        try:
            loaded = json.loads(text)
        except (ValueError, RecursionError):
            loaded = None
        if not isinstance(loaded, dict):
            raise argparse.ArgumentTypeError(f'{text!r:.80} is no JSON object, such as {{"2": 0.5}}')
        try:
            return {int(k): number(v) for k, v in loaded.items()}
        except (TypeError, ValueError):
            raise argparse.ArgumentTypeError(f"{text!r:.80} is no map of whole numbers to weights") from None

    return {bool: boolean, int: whole, float: number, dict: mapping}.get(type(value), str)
