"""Self-play by Tool-R0: a Generator invents tool-calling tasks and a Solver learns them.

    python launch/selfplay.py --preset nano --out runs/nano
    torchrun --nproc_per_node=4 launch/selfplay.py --preset qwen2.5-1.5b --out runs/qwen
"""

from __future__ import annotations

import os
import signal
import sys

STOPPED = "\nstopped at once; go on with the same command and --resume auto"


def stop_at_once(*_) -> None:
    """Ctrl-C until the run listens: one line, whatever is being imported."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, f"{STOPPED}\n".encode())
    os._exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, stop_at_once)

import copy  # noqa: E402
import json  # noqa: E402
from pathlib import Path  # noqa: E402

try:
    from toolr0_core import options, presets
except ModuleNotFoundError:
    sys.exit("error: this Python has no toolr0_core; type `source .venv/bin/activate` in the repository, which launch/setup.sh "
             "makes, or `pip install -e .`")


def add_options(parser) -> None:
    parser.add_argument("--resume", choices=["auto"], help="go on from the last checkpoint in --out, if there is one")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, and stop")
    parser.add_argument("--json", metavar="FILE", help="write summary.json there too")


def main(argv: list[str]) -> int:
    config, own = options.parse(argv, __doc__.splitlines()[0], add_options)
    try:
        return run(config, own)
    except (ValueError, OSError, FloatingPointError) as error:
        options.fail(error)
    except KeyboardInterrupt:  # a second Ctrl-C
        print(STOPPED, file=sys.stderr)
        return 130


def run(config, own) -> int:
    config = presets.resolve(config)
    presets.validate(config)
    if not config.out and not own.dry_run:
        raise ValueError("--out is missing; name the directory for this run, such as runs/first")
    out = Path(config.out)
    from toolr0_kernels import describe

    from toolr0_core import checkpoint, distributed, model, tokenizer
    from toolr0_core.evaluation import heldout
    from toolr0_core.plan import check_heldout, check_prompts, checkpoint_bytes, counted, show_plan
    from toolr0_core.roles import Player
    from toolr0_core.rundir import RunDir, StopRequest, check_file, check_out
    from toolr0_core.selfplay import Interrupted, SelfPlay
    from toolr0_core.weights import check_model, model_path

    if own.json and Path(own.json).parent != out:  # which may be yet to be made
        check_file("--json", Path(own.json))
    source = model_path(config.model or config.preset, weights=not own.dry_run)
    check_model(source, weights=not own.dry_run)
    text = tokenizer.load(source)
    check_prompts(config, text)
    rows = heldout.load(config.eval.data, config.eval.limit) if config.eval.data else []
    check_heldout(config, rows, source, text)

    def check() -> None:
        check_out(out, config, own.resume == "auto", [row.id for row in rows])
        checkpoint.check_space(out / "checkpoints", checkpoint_bytes(config, source, int(os.environ.get("WORLD_SIZE", 1))))

    if own.dry_run:
        if config.out:
            check()
        if os.environ.get("RANK", "0") == "0":
            show_plan(config, source, text)
        return 0
    world = distributed.setup()
    rundir = RunDir(out, writes=world.main)
    world.on_main(rundir.hold)
    world.on_main(check)
    if own.resume and not (out / "config.json").exists():
        rundir.say(f"nothing to go on with in {out}: a new run begins")
    rundir.write_config(config)
    rundir.say(f"{config.preset}, seed {config.seed}, {counted(config.iterations, 'iteration')}, "
               f"{counted(world.size, 'rank')}; everything goes to {out}")
    rundir.say(describe(world.device))
    base = model.load(source, world.device, distributed.sampling_dtype(world, config.dtype))
    players = [Player(m, text, config, world, role) for m, role in ((base, "generator"), (copy.deepcopy(base), "solver"))]
    with StopRequest().listening() as stop:
        game = SelfPlay(config, *players, rows, rundir, source, stop)
        try:
            summary = game.play()
        except Interrupted:
            rundir.say(f"stopped; go on with the same command, --out {out} and --resume auto")
            return 130
        finally:
            rundir.keep_time()
            distributed.shutdown()
    if world.main:
        finish(summary, out, own.json)
    return 3 if summary["skipped_solver_phases"] else 0


def finish(summary: dict, out: Path, copy_to: str | None) -> None:
    from toolr0_core.evaluation.heldout import print_table
    from toolr0_core.report import write_report
    from toolr0_core.rundir import clock

    if summary["base"]:
        print_table(summary)
    if copy_to:
        Path(copy_to).write_text(json.dumps(summary, indent=1) + "\n")
    print(f"{clock(summary['seconds'])} in all; the run is in {out}")
    try:
        print(f"as a page: {write_report(out)}")
    except (ValueError, OSError) as error:  # the run is whole without it
        print(f"no report: {error}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
