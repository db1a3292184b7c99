"""A run's report: one HTML page with figures, plots, curricula and samples. The run may still be going.

    python launch/report.py runs/nano-20260101-120000        # writes report.html there
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    from toolr0_core import options
    from toolr0_core.report import write_report
except ModuleNotFoundError as error:
    sys.exit(f"error: this Python has no {error.name}; type `source .venv/bin/activate` in the repository, which "
             f"launch/setup.sh makes, or `pip install -e .`")


def main(argv: list[str]) -> int:
    parser = options.Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="the --out of launch/selfplay.py")
    try:
        print(write_report(parser.parse_args(argv).run))
    except (ValueError, OSError) as error:
        options.fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
