"""What benchmarks share: timing in turns, the machine's limits, rows of JSON with their targets, a plot under the roof."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch


def once(function: Callable, device: str, flush: torch.Tensor | None) -> float:
    """Milliseconds of one call."""
    if device == "cpu":
        start = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - start)
    flush.zero_()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def times(run: dict[str, Callable], device: str, repeats: int) -> dict[str, tuple[float, float]]:
    """Median and spread (half the distance of the quartiles, as a share of the median) of each, taken in turns."""
    flush = torch.empty(2**28, dtype=torch.int8, device=device) if device != "cpu" else None
    taken: dict[str, list[float]] = {name: [] for name in run}
    for turn in range(repeats + 1):
        for name, function in run.items():
            ms = once(function, device, flush)
            if turn:  # the first call warms up
                taken[name].append(ms)
    quartiles = {name: statistics.quantiles(ms, n=4) if len(ms) > 1 else [ms[0]] * 3 for name, ms in taken.items()}
    return {name: (q[1], (q[2] - q[0]) / 2 / q[1]) for name, q in quartiles.items()}


def limits(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """This machine's bytes a second (reading; copying on a GPU) and flops a second of a large product, as torch has them."""
    x = torch.randn(2**25 if device == "cpu" else 2**29, device=device)
    y = torch.empty_like(x)
    a = torch.randn(4096 if device != "cpu" else 1024, 4096, device=device, dtype=dtype)
    run = {"memory": (lambda: x.sum()) if device == "cpu" else (lambda: y.copy_(x)), "product": lambda: a @ a.T}
    ms = times(run, device, 7)
    moved = x.numel() * 4 * (1 if device == "cpu" else 2)
    return moved / ms["memory"][0] * 1e3, 2 * a.shape[0] ** 2 * a.shape[1] / ms["product"][0] * 1e3


def entry(name: str, value: float, unit: str, baseline: float | None = None, target: str | None = None) -> dict:
    """One row of the JSON; `met` compares the ratio, or the value where there is no baseline, with the target."""
    ratio = value / baseline if baseline else None
    figure, met = ratio if ratio is not None else value, None
    if target:
        sign, bound = target.split()
        met = figure <= float(bound) if sign == "<=" else figure >= float(bound)
    return {"name": name, "value": value, "unit": unit, "baseline": baseline, "ratio": ratio, "target": target, "met": met}


def environment(device: str, options: list[str]) -> dict:
    """What a figure depends on, for the head of the JSON."""
    name = torch.cuda.get_device_name() if device != "cpu" else platform.processor() or platform.machine()
    return {"device": name, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__,
            "python": platform.python_version(), "date": time.strftime("%F"), "options": options}


def report(rows: list[dict]) -> None:
    """A line for each row with a target, and for each share."""
    for row in rows:
        if row["target"]:
            figure = row["ratio"] if row["ratio"] is not None else row["value"]
            print(f"{'met   ' if row['met'] else 'MISSED'} {row['name']}: {figure:.3f} {row['target']}")
        elif row["unit"] == "share":
            print(f"       {row['name']}: {row['value']:.2f}")


def write(path: Path | None, environment: dict, rows: list[dict]) -> None:
    if path:
        path.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


def plot(points: list[tuple[str, float, float]], peaks: tuple[float, float], path: Path) -> None:
    """Achieved operations a second over operations a byte, under the roof of the two limits."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    low, high = min(p[1] for p in points) / 3, max(p[1] for p in points) * 3
    grid = [low * (high / low) ** (i / 100) for i in range(101)]
    axes.plot(grid, [min(peaks[1], x * peaks[0]) / 1e9 for x in grid], color="black", label="limit of this machine")
    for name, intensity, rate in points:
        axes.plot(intensity, rate / 1e9, "o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="operations per byte that has to move", ylabel="10⁹ operations per second",
             title="Kernels under the roof")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
