"""RUN_DIR -> RUN_DIR/report.html: one page with everything in it, readable without a network. No torch here.

A run that is still going or stopped early is reported as far as it got. What models wrote is hostile: jinja2 escapes it,
`visible` spells out what a reader would not see, lengths are bounded, and the page allows no script.
"""

from __future__ import annotations

import base64
import io
import json
import math
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from toolr0_core.curriculum import BUCKETS, bucket
from toolr0_core.evaluation import heldout
from toolr0_core.evaluation.statistics import mcnemar
from toolr0_core.presets import PRESETS
from toolr0_core.records import PHASES, UNREADABLE, candidate, flat, logged, outcome, read_object
from toolr0_core.rundir import clock

SHOWN_CHARACTERS = 3000  # of one text
SHOWN_TASKS = 2  # per bucket and iteration
PLOTTED = {"generator": ("reward", "format", "validity", "difficulty", "semantic"),
           "solver": ("reward", "format", "accuracy", "exact")}
CURRICULUM = ("candidates", "filtered", "verified", "selected", "rows", "p", "menu", "two_calls", "arguments")
HEALTH = ("entropy", "kl", "flat_groups", "truncated")


def write_report(run: Path) -> Path:
    """Writes the page and returns its path. Raises ValueError where `run` is no run directory, or matplotlib is missing."""
    if not (run / "config.json").is_file():
        raise ValueError(f"{run} is no run directory: it has no config.json; give the --out of launch/selfplay.py")
    page = _template().render(**collect(run))
    path = run / "report.html"
    part = path.with_name("report.html.part")
    part.write_text(page, encoding="utf-8", errors="backslashreplace")
    part.replace(path)
    return path


def collect(run: Path) -> dict[str, Any]:
    """What the template shows, by section."""
    config = read_object(run / "config.json", preset=is_string, seed=is_number)
    metrics = list(read_rows(run / "metrics.jsonl", measured))
    rounds = evaluations(run)
    curricula = [m for m in metrics if m.get("phase") == "curriculum"]
    steps = {role: [m for m in metrics if m.get("phase") == role] for role in PLOTTED}
    return {
        "config": config, "state": state(run, metrics), "changed": changed_settings(config),
        "rounds": rounds, "figures_plot": figures_plot(rounds) if rounds else None,
        "step_plots": {role: steps_plot(rows, PLOTTED[role]) for role, rows in steps.items() if rows},
        "curricula": curricula, "dropped_reasons": sorted({reason for m in curricula for reason in m.get("dropped", {})}),
        "tasks": {i: sample_tasks(path) for i, path in _numbered(run / "curriculum")},
        "rollouts": last_rollouts(run / "rollouts.jsonl")}


# -- reading -------------------------------------------------------------------------------------------------------------


def read_rows(path: Path, check: Callable[[Any], object]) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file, none where there is no file; lines that cannot be read (one is being written), and rows that
    `check` refuses, are left out."""
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    row = json.loads(line)
                    check(row)
                except UNREADABLE:
                    continue
                yield row


def measured(row: Any) -> None:
    """Refuses what is no row of metrics.jsonl, or one of a curriculum with figures that are not numbers."""
    at, _ = logged(row)
    counts = [n for key in ("buckets", "dropped") for n in row.get(key, {}).values()]
    figures = [row["iteration"], row.get("step", 0), *(row.get(key, 0) for key in CURRICULUM)]
    if row["phase"] != PHASES[at.phase] or not all(map(is_number, counts + figures)):
        raise ValueError("no measurement")


def rollout(row: Any) -> None:
    """Refuses what is no row of rollouts.jsonl."""
    logged(row)
    if not (is_number(row["reward"]) and all(is_string(row[key]) for key in ("prompt", "text", "finish"))):
        raise ValueError("no rollout")


def task(row: Any) -> None:
    """Refuses what is no row of a curriculum, or has a key less than a whole one."""
    domain = candidate(row).task.spec
    if "spec" not in row["task"] or domain and not is_string(domain.domain):
        raise ValueError("no task")


def is_string(value: Any) -> bool:
    return isinstance(value, str)


def is_number(value: Any) -> bool:
    """Of a size that can be drawn and printed; not NaN."""
    return type(value) in (int, float) and abs(value) < 1e15


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """(N, iteration_N.jsonl) by N."""
    found = [(path.name.removeprefix("iteration_").removesuffix(".jsonl"), path) for path in folder.glob("iteration_*.jsonl")]
    return sorted((int(number), path) for number, path in found if number.isdecimal() and len(number) < 7)


def state(run: Path, metrics: Sequence[dict[str, Any]]) -> str:
    """One line on how far the run is."""
    if (run / "summary.json").is_file():
        summary = read_object(run / "summary.json", seconds=is_number, best=lambda value: value is None or is_number(value),
                              skipped_solver_phases=lambda value: isinstance(value, list))
        best = f"; best by avg8: iteration {summary['best']}" if summary["best"] is not None else ""
        skipped = summary["skipped_solver_phases"]
        return (f"finished in {clock(summary['seconds'])}{best}"
                + (f"; no task survived in iterations {', '.join(map(str, skipped))}" if skipped else ""))
    if not metrics:
        return "nothing logged yet"
    last = metrics[-1]
    step = f", step {last['step'] + 1}" if "step" in last else ""
    return f"not finished: last heard of in iteration {last.get('iteration')}, {last.get('phase')}{step}"


def changed_settings(config: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Setting -> (value, the preset's) where they differ."""
    if config.get("preset") not in PRESETS:
        return {}
    usual = flat(json.loads(json.dumps(asdict(PRESETS[config["preset"]]()))))
    return {k: (v, usual.get(k)) for k, v in flat(config).items() if v != usual.get(k) and k not in ("out", "preset")}


def evaluations(run: Path) -> list[dict[str, Any]]:
    """Held-out figures of the base and each iteration, with gains over the base on the same rows."""
    rounds: list[dict[str, Any]] = []
    base: list[dict[str, Any]] = []
    for iteration, path in _numbered(run / "evaluations"):
        rows = list(read_rows(path, outcome))
        if not rows:
            continue
        figures = {"iteration": iteration} | heldout.summarise(rows)
        base = base or rows
        if rounds and [r["id"] for r in rows] == [r["id"] for r in base]:
            lost, won, p = mcnemar(*([r["greedy"] for r in rows_] for rows_ in (base, rows)))
            figures |= {"gain": heldout.gains(base, rows), "mcnemar": {"lost": lost, "won": won, "p": p}}
        rounds.append(figures)
    return rounds


def sample_tasks(path: Path) -> list[dict[str, Any]]:
    """A few rows of a curriculum from each bucket, easy ones first."""
    out: dict[str, list[dict[str, Any]]] = {name: [] for name in BUCKETS}
    for row in read_rows(path, task):
        name = bucket(row["p"])
        if name and len(out[name]) < SHOWN_TASKS and row["task"] not in [r["task"] for r in out[name]]:
            out[name].append(row | {"bucket": name})
    return [row for rows in out.values() for row in rows]


def last_rollouts(path: Path) -> list[dict[str, Any]]:
    """The best and the worst completion of each role's last logged step."""
    last: dict[str, list[dict[str, Any]]] = {}
    for row in read_rows(path, rollout):
        rows = last.setdefault(PHASES[row["at"][1]], [])
        if rows and rows[0]["at"] != row["at"]:
            rows.clear()
        rows.append(row)
    out = []
    for role, rows in last.items():
        ordered = sorted(rows, key=lambda r: r["reward"])
        out += [{"role": role, "which": which} | row for which, row in (("best", ordered[-1]), ("worst", ordered[0]))]
    return out


# -- plots ---------------------------------------------------------------------------------------------------------------


def figures_plot(rounds: Sequence[dict[str, Any]]) -> str:
    """Held-out figures over iterations, with their intervals; an image as a data URI."""
    figure = _figure(6.5, 3.2)
    axes = figure.add_subplot()
    for i, name in enumerate(heldout.FIGURES):
        x = [r["iteration"] + 0.04 * (i - 1.5) for r in rounds]  # side by side, so that no bar hides another
        found = [r[name] for r in rounds]
        errors = [[max(0.0, f["value"] - f["low"]) for f in found], [max(0.0, f["high"] - f["value"]) for f in found]]
        axes.errorbar(x, [f["value"] for f in found], errors, marker="o", markersize=4, capsize=3, label=name)
    axes.set(xlabel="iteration (0: base)", ylabel="share of held-out tasks", ylim=(0, 1.02),
             xticks=[r["iteration"] for r in rounds])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return _data_uri(figure)


def steps_plot(rows: Sequence[dict[str, Any]], rewards: Sequence[str]) -> str:
    """A role's reward with its parts, and beside it the training's health, over the steps of all iterations."""
    figure = _figure(11, 3)
    starts = [i for i, row in enumerate(rows) if i and row.get("iteration") != rows[i - 1].get("iteration")]
    for place, names, title in ((1, rewards, "reward and its parts"), (2, HEALTH, "health")):
        axes = figure.add_subplot(1, 2, place)
        for name in names:
            values = [_number(row.get(name)) for row in rows]
            if not all(map(math.isnan, values)):
                axes.plot(values, label=name, linewidth=2 if name == "reward" else 1, marker="." if len(rows) < 3 else "")
        for start in starts:
            axes.axvline(start - 0.5, color="gray", linestyle=":", linewidth=1)
        axes.set(title=title, xlabel="step (dotted: next iteration)")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))  # beside the curves, not over them
    return _data_uri(figure)


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure  # not pyplot: no global state
    except ImportError:
        raise ValueError("matplotlib is not installed; type `pip install -e '.[track]'` in the repository") from None
    return Figure((width, height), layout="constrained")


def _data_uri(figure: Any) -> str:
    image = io.BytesIO()
    figure.savefig(image, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(image.getvalue()).decode("ascii")


def _number(value: Any) -> float:
    return float(value) if is_number(value) else math.nan


# -- text ----------------------------------------------------------------------------------------------------------------


def visible(text: Any) -> str:
    """Bounded text in which control, bidirectional and lone surrogate characters are spelled out, such as \\u202e."""
    text = str(text)
    cut = text[:SHOWN_CHARACTERS]
    kept = "".join(c if c.isprintable() or c in "\n\t" or unicodedata.category(c) == "Zs"
                   else c.encode("unicode_escape").decode("ascii") for c in cut)
    return kept + (f" … ({len(text):,} characters)" if len(text) > len(cut) else "")


def tool_line(tool: dict[str, Any]) -> str:
    """book_table(city: string, hour?: integer)"""
    required = tool.get("required", [])
    given = (f"{name}{'' if name in required else '?'}: {schema.get('type', 'any') if isinstance(schema, dict) else schema}"
             for name, schema in tool.get("parameters", {}).items())
    return f"{tool.get('name')}({', '.join(given)})"


def call_line(call: dict[str, Any]) -> str:
    """book_table(city="Oslo", hour=7)"""
    given = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.get("arguments", {}).items())
    return f"{call.get('name')}({', '.join(given)})"


def _template() -> Any:
    env = Environment(loader=FileSystemLoader(Path(__file__).parent / "assets"), autoescape=True, undefined=StrictUndefined,
                      trim_blocks=True, lstrip_blocks=True)
    env.filters |= {"visible": visible, "tool": tool_line, "call": call_line}
    env.globals |= {"interval": heldout.interval_text, "figure_names": heldout.FIGURES, "buckets": BUCKETS}
    return env.get_template("report.html")
