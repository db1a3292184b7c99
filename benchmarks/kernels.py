"""How fast are the kernels, against plain torch, torch.compile and other libraries, and against the machine's limits?

    python benchmarks/kernels.py [--kernel NAME ...] [--shape NAME|N,D,V ...] [--dtype float32|bfloat16]
        [--compare compile liger cce] [--memory] [--json FILE] [--plot FILE]

Results are checked before they are timed. Everything is timed in turns, so that other work on the machine hits all alike; a
ratio is one of medians. On a GPU: CUDA events, with the L2 cache overwritten before each call. --memory adds the growth of peak
memory; on a CPU each figure is of a fresh process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path

import measure
import torch
from kernel_cases import SHAPES, Case, decoding, loss, ours, rowwise, sampling, sampling_fused, scoring
from measure import entry, limits, plot, times
from rich.console import Console
from rich.table import Table


def check(case: Case, dtype: torch.dtype) -> None:
    """Ends the program where ours is further from fp64 than plain torch in the same dtype and a small tolerance."""
    for mine, eager, exact in case.check():
        ours_off, eager_off = ((x.double() - exact).norm() / exact.norm() for x in (mine, eager))
        if not ours_off <= 1.1 * eager_off + torch.finfo(dtype).eps:
            raise SystemExit(f"error: {case.name}: {ours_off:.2g} from fp64 in relative norm, plain torch {eager_off:.2g}")


def dtype_of(args: argparse.Namespace) -> torch.dtype:
    return getattr(torch, args.dtype or ("float32" if args.device == "cpu" else "bfloat16"))


def all_cases(args: argparse.Namespace, device: str) -> list[Callable[[], Case | list[Case]]]:
    """Makers of the cases that the options ask for, so that one case's memory is gone before the next is made."""
    dtype = dtype_of(args)
    makers: list[Callable] = []
    for name in args.shape or (["smollm2"] if device == "cpu" else ["qwen2.5-0.5b", "qwen2.5-1.5b"]):
        shape = SHAPES.get(name) or tuple(int(x) for x in name.split(","))
        common = (name, shape, dtype, device, args.compare)
        makers += [m for kernel, m in (
            ("scoring", lambda c=common: scoring(*c)), ("loss", lambda c=common: loss(*c)),
            ("sample", lambda c=common: sampling(*c, 0.9)), ("sample", lambda c=common: sampling(*c, 1.0)),
            ("sample", lambda c=common: sampling_fused(*c)), ("rowwise", lambda c=common: rowwise(*c)),
        ) if kernel in args.kernel]
    if "decode" in args.kernel:
        makers += [lambda page=page: decoding("decode", dtype, device, args.compare, page) for page in (64, 16)]
    return makers


def memory_of(maker_index: int, name: str, argv: list[str], queue) -> None:
    """In a fresh process: by how many bytes resident memory grows, at its peak, while one call runs (Linux tells)."""
    args = options(argv)
    case = all_cases(args, "cpu")[maker_index]()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew at what is resident now
    before = peak_resident()
    case.run[name]()
    queue.put(peak_resident() - before)


def peak_resident() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


def memory(index: int, name: str, case: Case, device: str, argv: list[str]) -> float:
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case.run[name]()
        return torch.cuda.max_memory_allocated() - before
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=memory_of, args=(index, name, argv, queue))
    process.start()
    process.join()
    return queue.get() if process.exitcode == 0 else float("nan")


# -- results -------------------------------------------------------------------------------------------------------------------

def rows_of(case: Case, ms: dict[str, tuple[float, float]], peaks: tuple[float, float], device: str) -> list[dict]:
    mine = ms["ours"][0]
    rows = [entry(f"{case.name}: {name}", value, "ms", ms["eager"][0] if name != "eager" else None)
            for name, (value, _) in ms.items()]
    rows += [entry(f"{case.name}: ours over {against}", mine, "ms", ms[against][0], bound)
             for against, bound in case.targets if against in ms]
    if case.most_ms and device != "cpu":
        rows.append(entry(f"{case.name}: ours", mine, "ms", None, f"<= {case.most_ms}"))
    bandwidth = case.bytes / mine * 1e3 / peaks[0]
    bounds = {"decode": ">= 0.7", "rms_norm": ">= 0.8", "add_rms_norm": ">= 0.8", "rope": ">= 0.8", "swiglu": ">= 0.8"}
    target = bounds.get(case.name.split()[0]) if device != "cpu" else None
    rows.append(entry(f"{case.name}: share of the memory's bandwidth", bandwidth, "share", None, target))
    if case.flops and case.bytes * 30 < case.flops:
        rows.append(entry(f"{case.name}: share of the product's rate", case.flops / mine * 1e3 / peaks[1], "share"))
    return rows


def shape_name(text: str) -> str:
    sizes = text.split(",")
    if text not in SHAPES and not (len(sizes) == 3 and all(size.isdigit() and int(size) > 0 for size in sizes)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; it has to be {', '.join(SHAPES)}, or rows,hidden,vocabulary")
    return text


def options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kernels = ["scoring", "loss", "sample", "decode", "rowwise"]
    parser.add_argument("--kernel", nargs="+", default=kernels, choices=kernels)
    parser.add_argument("--shape", nargs="+", type=shape_name, help=f"{', '.join(SHAPES)}, or N,D,V")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    others = ["compile", "liger", "cce"]
    parser.add_argument("--compare", nargs="*", default=others, choices=others, help="beside plain torch; where installed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--memory", action="store_true", help="also the growth of peak memory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    for name in ("json", "plot"):
        path = getattr(args, name)
        if path and not path.parent.is_dir():
            parser.error(f"--{name} {path}: there is no folder {path.parent}; make it first")
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch sees no GPU here; leave it out, or use --device cpu")
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: it has to be 1 or more")
    return args


def main() -> None:
    argv = sys.argv[1:]
    args = options(argv)
    device, console = args.device, Console(width=130)
    environment = measure.environment(device, argv)
    console.print(*(f"{k} {v}" for k, v in environment.items()), ours.describe(device), sep=", ")
    peaks = limits(device, dtype_of(args))
    console.print(f"limits, measured: memory {peaks[0] / 1e9:.0f} GB/s, products {peaks[1] / 1e12:.2f} TFLOP/s")
    rows, points = [entry("limit: memory", peaks[0] / 1e9, "GB/s"), entry("limit: products", peaks[1] / 1e12, "TFLOP/s")], []
    table = Table()
    for head in ("kernel", "implementation", "ms", "spread", "of eager", *(["peak memory, MB"] if args.memory else [])):
        table.add_column(head)
    for index, make in enumerate(all_cases(args, device)):
        made = make()
        for case in made if isinstance(made, list) else [made]:
            check(case, dtype_of(args))
            ms = times(case.run, device, args.repeats)
            rows += rows_of(case, ms, peaks, device)
            points += [(case.name, case.flops / case.bytes, case.flops / ms["ours"][0] * 1e3)] if case.flops else []
            extra = {n: memory(index, n, case, device, argv) for n in ("ours", "eager")} if args.memory and case.flops else {}
            if extra.get("eager"):
                bound = "<= 0.125" if "scoring" in case.name else "<= 0.25" if "loss" in case.name else None
                rows.append(entry(f"{case.name}: peak memory", extra["ours"] / 1e6, "MB", extra["eager"] / 1e6, bound))
            for n, (value, spread) in ms.items():
                table.add_row(case.name, n, f"{value:.2f}", f"{100 * spread:.0f} %", f"{value / ms['eager'][0]:.3f}",
                              *([f"{extra[n] / 1e6:.0f}" if n in extra else ""] if args.memory else []))
    console.print(table)
    measure.report(rows)
    measure.write(args.json, environment, rows)
    if args.plot and points:
        plot(points, peaks, args.plot)


if __name__ == "__main__":
    main()
