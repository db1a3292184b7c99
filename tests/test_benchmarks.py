"""benchmarks/*.py: that they run, and write what they say."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(tmp_path, *args):
    out = tmp_path / "out.json"
    done = subprocess.run([sys.executable, *args, "--json", out], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(out.read_text())["rows"]}


def test_the_sampler_benchmark_counts_what_was_drawn(tmp_path):
    rows = run(tmp_path, "benchmarks/sampler.py", "--quick", "--repeats", "1", "--threads", "1")
    assert len(rows) == 12 and all(row["value"] > 0 for row in rows.values())


def test_a_short_soak_leaves_nothing_behind(tmp_path):
    rows = run(tmp_path, "benchmarks/sampler_soak.py", "--requests", "60")
    assert rows["requests"]["value"] == 60 and rows["samples compared with the request alone"]["value"] > 0
    assert rows["pages left behind"]["value"] == rows["mismatches"]["value"] == rows["calls over the budget"]["value"] == 0
