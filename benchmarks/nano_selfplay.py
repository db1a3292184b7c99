"""Does self-play teach the embedded model anything, and is it self-play that does? Seeds times variants, one table.

    python benchmarks/nano_selfplay.py --json benchmarks/results/nano_selfplay.json

Variants share every other setting: `full`; `shuffled`, rewards dealt out at random; `format`, the Solver's reward for form
alone; `frozen`, a Generator that is not trained. A run that is in --runs already is read, not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import measure
from measure import entry
from rich.console import Console
from rich.table import Table

from toolr0_core.assets import grammar
from toolr0_core.evaluation import heldout
from toolr0_core.presets import PRESETS
from toolr0_core.specs import shape_shares

ROOT = Path(__file__).parents[1]
VARIANTS = {"full": [], "frozen": ["--ablate", "frozen-generator"], "format": ["--rewards.accuracy", "false"],
            "shuffled": ["--rewards.shuffle", "true"]}


def play(runs: Path, variant: str, seed: int, threads: int, extra: list[str]) -> Path:
    """One run in a process of its own; its directory."""
    out = runs / f"{variant}-{seed}"
    if not (out / "summary.json").exists():
        command = [sys.executable, str(ROOT / "launch" / "selfplay.py"), "--preset", "nano", "--out", str(out),
                   "--seed", str(seed), "--resume", "auto", *VARIANTS[variant], *extra]
        log = runs / f"{variant}-{seed}.log"
        with log.open("w") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            code = subprocess.run(command, stdout=file, stderr=file, env=environment).returncode
        if code not in (0, 3):
            raise SystemExit(f"error: {' '.join(command)} ended with {code}; see {log}")
    return out


def shapes(out: Path, iterations: int) -> dict[str, float]:
    """Mean shape of the kept tasks of all iterations, counted once each."""
    kept = {}
    for i in range(1, iterations + 1):
        for line in (out / "curriculum" / f"iteration_{i}.jsonl").read_text().splitlines():
            task = json.loads(line)["task"]
            kept[i, task["question"]] = task
    n, calls = max(len(kept), 1), sum(len(t["gold"]) for t in kept.values())
    return {"tasks": len(kept), "menu": sum(len(t["tools"]) for t in kept.values()) / n,
            "two_calls": sum(len(t["gold"]) > 1 for t in kept.values()) / n,
            "arguments": sum(len(c["arguments"]) for t in kept.values() for c in t["gold"]) / max(calls, 1)}


def asked() -> dict[str, float]:
    """The shape that the specifications ask for; arguments as the grammar's own tools have them."""
    shares = shape_shares(PRESETS["nano"]().specs)
    tools = [parameters for menu in grammar.TOOLS.values() for parameters in menu.values()]
    return {"menu": sum(size * share for (_, size), share in shares.items()),
            "two_calls": sum(share for (calls, _), share in shares.items() if calls > 1),
            "arguments": sum(map(len, tools)) / len(tools)}


def rows_of(out: Path) -> list[list[dict]]:
    files = sorted((out / "evaluations").glob("iteration_*.jsonl"), key=lambda p: int(p.stem.split("_")[1]))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in files]


def results(out: Path, name: str, full: bool) -> list[dict]:
    per = rows_of(out)
    summary = json.loads((out / "summary.json").read_text())
    rows = []
    for figure in ("avg8", "greedy"):
        base, last = (sum(r[figure] for r in rows_) / len(rows_) for rows_ in (per[0], per[-1]))
        gain = heldout.gains(per[0], per[-1])[figure]
        rows += [entry(f"{name} {figure}", last, "share", base),
                 entry(f"{name} {figure} gain", gain["value"], "share", None, ">= 0.2" if full else None),
                 entry(f"{name} {figure} gain, lower end", gain["low"], "share", None, ">= 0.1" if full else None)]
        late = heldout.gains(per[1], per[-1])[figure]
        rows.append(entry(f"{name} {figure}, last against first iteration, upper end", late["high"], "share", None,
                          ">= 0" if full else None))
    for i, rows_ in enumerate(per):
        rows.append(entry(f"{name} avg8 after {i} iterations", sum(r["avg8"] for r in rows_) / len(rows_), "share"))
    for group in ("unseen tool", "unseen pair"):
        base, last = (sum(r["avg8"] for r in rows_ if r["group"] == group) / sum(r["group"] == group for r in rows_)
                      for rows_ in (per[0], per[-1]))
        rows.append(entry(f"{name} avg8, {group}s", last, "share", base))
    for key, want in asked().items():
        got = shapes(out, len(per) - 1)[key]
        rows.append(entry(f"{name} kept {key} against asked, distance", abs(got / want - 1), "share", None,
                          "<= 0.3333" if full else None))
    rows.append(entry(f"{name} time", summary["seconds"] / 60, "min", None, None))
    return rows


def against(full: list[Path], other: list[Path], variant: str) -> list[dict]:
    """What self-play gains over another variant: per task the mean over the same seeds, then the paired interval."""
    target, rows = ">= 0.1" if variant in ("format", "shuffled") else None, []
    ours, theirs = (_mean_rows([rows_of(out)[-1] for out in outs]) for outs in (full, other))
    for group in ("", "unseen tool", "unseen pair"):
        pick = [i for i, row in enumerate(ours) if group in ("", row["group"])]
        gain = heldout.gains([theirs[i] for i in pick], [ours[i] for i in pick])["avg8"]
        name = f"full over {variant}, avg8{', ' + group + 's' if group else ''}"
        rows += [entry(name, gain["value"], "share"), entry(f"{name}, upper end", gain["high"], "share"),
                 entry(f"{name}, lower end", gain["low"], "share", None, None if group else target)]
    return rows


def _mean_rows(seeds: list[list[dict]]) -> list[dict]:
    """Rows of the same tasks, each figure as its mean over the seeds."""
    return [rows[0] | {f: sum(row[f] for row in rows) / len(rows) for f in heldout.FIGURES} for rows in zip(*seeds)]


def commit() -> str:
    """The commit that is measured, with a mark where the working tree differs from it."""
    done = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=8"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def cells(out: Path, rows: list[dict]) -> list[str]:
    """The printed table's cells of one run."""
    def row(key: str) -> dict:
        return next(r for r in rows if r["name"].endswith(key))

    def pair(key: str) -> str:
        return f"{row(key)['value']:.3f} ({row(key)['baseline']:.3f})"

    per = rows_of(out)
    gain, shape = heldout.gains(per[0], per[-1])["avg8"], shapes(out, len(per) - 1)
    return [pair(" avg8"), pair(" greedy"),
            f"{gain['value']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]", pair("unseen tools"), pair("unseen pairs"),
            f"{shape['menu']:.2f}, {shape['two_calls']:.2f}, {shape['arguments']:.2f}", f"{row(' time')['value']:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "nano_selfplay")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--threads", type=int, default=1, help="threads of each")
    parser.add_argument("--json", type=Path)
    args, extra = parser.parse_known_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    jobs = [(variant, seed) for variant in args.variants for seed in args.seeds]
    with ThreadPoolExecutor(args.jobs) as pool:
        outs = list(pool.map(lambda job: play(args.runs, *job, args.threads, extra), jobs))
    table = Table(title="held-out figures after the last iteration (base in brackets)")
    for head in ("variant", "seed", "avg8", "greedy", "avg8 gain [95 %]", "unseen tools", "unseen pairs",
                 "menu, two calls, arguments", "min"):
        table.add_column(head)
    rows = []
    for (variant, seed), out in zip(jobs, outs):
        mine = results(out, f"{variant}, seed {seed}:", variant == "full")
        rows += mine
        table.add_row(variant, str(seed), *cells(out, mine))
    found = {variant: [out for (v, _), out in zip(jobs, outs) if v == variant] for variant in args.variants}
    rows += [row for v in args.variants if "full" in found and v != "full" for row in against(found["full"], found[v], v)]
    Console(width=150).print(table)
    print("asked:", {k: round(v, 2) for k, v in asked().items()})
    for row in rows:
        if row["name"].startswith("full over") and not row["target"]:
            print(f"       {row['name']}: {row['value']:+.3f}")
        if row["target"]:
            print(f"{'met   ' if row['met'] else 'MISSED'} {row['name']}: {row['value']:.3f} {row['target']}")
    if args.json:
        environment = {"commit": commit(), **measure.environment("cpu", extra), "threads": args.threads, "jobs": args.jobs,
                       "variants": args.variants, "seeds": args.seeds}
        measure.write(args.json, environment, rows)


if __name__ == "__main__":
    main()
