"""The Triton kernels without a GPU: under the interpreter, and compiled ahead of time. Each in a process of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(importlib.util.find_spec("triton") is None,
                                                   reason="triton is not installed: there is none for this platform")]


def run(*command, **env):
    return subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                          capture_output=True, text=True, timeout=600)


def test_under_the_interpreter_the_kernels_equal_their_references():
    """The tests that other implementations pass, with impl "triton", and the kernels' own: sampling has only those, with few
    rows, since the interpreter runs a program a row."""
    done = run("-m", "pytest", "-p", "no:cacheprovider", "tests/test_kernels.py", "tests/test_kernels_decode.py",
               "tests/test_kernels_decoder.py", "tests/gpu", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


def test_every_configuration_compiles_without_spills_or_fp64_and_moves_no_more_than_it_has_to(tmp_path):
    done = run("benchmarks/compile_report.py", "--targets", "80", "90", "--json", tmp_path / "report.json")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert all(row["met"] for row in rows if row["target"]) and sum("stack" in row["name"] for row in rows) > 100
