"""What every Triton kernel takes, in the configurations that the presets' models choose, and what it moves; no GPU needed.

    python benchmarks/compile_report.py [--targets 80 90 100] [--match TEXT] [--json FILE]

Compiles ahead of time and reads the binaries: registers, shared memory, stack (spilled registers among it), fp64 instructions,
and the share of a multiprocessor's warps that fit. Then the bytes that memory-bound kernels move, against the least possible.
A failure to compile, a stack, an fp64 instruction or 5 % of surplus traffic misses its target, but for sm_100, and for kernels
that say why they read more.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from pathlib import Path

import measure
from measure import entry
from rich.console import Console
from rich.table import Table

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # today's default, said aloud: Triton 3.9 warns of a change
if os.environ.pop("TRITON_INTERPRET", None):
    sys.exit("error: TRITON_INTERPRET is set; the interpreter compiles nothing, so unset it for this report")
try:
    from toolr0_kernels.gpu.variants import Compiled, all_variants, compiled
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}; type `pip install -e .` and `pip install triton`, or use launch/quickstart.sh")

GATED = (80, 90)
BY_VOCABULARY = ("linear_logprob", "linear_grpo_loss", "sample")  # rows times vocabulary passes 2^31


def compile_one(job: tuple[int, int]) -> Compiled | str:
    """In a process of its own. The variant's place in the list, since kernels cannot be sent."""
    index, target = job
    try:
        return compiled(all_variants()[index], target)
    except Exception as error:  # the compiler raises many kinds; each is a missed target with its first line
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", type=int, nargs="+", default=[80, 90, 100], choices=[80, 90, 100])
    parser.add_argument("--match", default="", help="only variants with this in their name")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    every = all_variants()
    chosen = [i for i, variant in enumerate(every) if args.match in variant.name]
    jobs = [(i, target) for i in chosen for target in args.targets if target in every[i].targets]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        results = dict(zip(jobs, pool.map(compile_one, jobs, chunksize=4)))
    rows = []
    table = Table(title="compiled ahead of time")
    for head in ("kernel", "target", "warps", "registers", "shared", "stack", "fp64", "occupancy"):
        table.add_column(head)
    for (i, target), result in results.items():
        variant, gate = every[i], "<= 0" if target in GATED else None
        wide = ">= 1" if gate and variant.name.startswith(BY_VOCABULARY) else None
        name = f"{variant.name}, sm_{target}"
        rows.append(entry(f"{name}: failures to compile", float(isinstance(result, str)), "count", None, gate))
        if isinstance(result, str):
            table.add_row(variant.name, f"sm_{target}", result)
            continue
        rows += [entry(f"{name}: stack", result.stack, "bytes", None, gate),
                 entry(f"{name}: fp64 instructions", result.fp64, "count", None, gate),
                 entry(f"{name}: 64-bit offsets", float(result.wide), "yes", None, wide),
                 entry(f"{name}: registers", result.registers, "count"),
                 entry(f"{name}: shared memory", result.shared, "bytes"),
                 entry(f"{name}: occupancy", result.occupancy, "of all warps")]
        table.add_row(variant.name, f"sm_{target}", str(variant.num_warps), str(result.registers), str(result.shared),
                      str(result.stack), str(result.fp64), f"{100 * result.occupancy:.0f} %")
    traffic = Table(title="bytes moved by kernels that memory bounds, counted from their loads and stores")
    for head in ("kernel", "on", "MB", "least, MB", "ratio", ""):
        traffic.add_column(head)
    for variant in (every[i] for i in chosen):
        if variant.moved:
            bound = None if variant.note else "<= 1.05"
            row = entry(f"{variant.name}: bytes moved", variant.moved, "bytes", variant.minimum, bound)
            rows.append(row)
            traffic.add_row(variant.name, variant.shape, f"{variant.moved / 1e6:.2f}", f"{variant.minimum / 1e6:.2f}",
                            f"{row['ratio']:.3f}", variant.note)
    console = Console(width=130)
    console.print(table)
    console.print(traffic)
    missed = [row for row in rows if row["met"] is False]
    for row in missed:
        print(f"MISSED {row['name']}: {row['ratio'] or row['value']:g} {row['target']}")
    print(f"{len(jobs)} compilations, {len(missed)} of {sum(row['target'] is not None for row in rows)} targets missed")
    measure.write(args.json, measure.environment("cpu", sys.argv[1:]), rows)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
