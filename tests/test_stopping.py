"""Ctrl-C where no step can be finished; a run directory that is in use, or that lost its settings."""

import importlib.util
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolr0_core.presets import nano
from toolr0_core.rundir import RunDir, check_out

PROGRAM = Path(__file__).parents[1] / "launch" / "selfplay.py"


def test_ctrl_c_at_once_is_one_line_and_130(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("selfplay_program", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)

    def interrupted(config, own):
        raise KeyboardInterrupt
    monkeypatch.setattr(program, "run", interrupted)
    assert program.main(["--out", "x"]) == 130
    assert "--resume auto" in capsys.readouterr().err


@pytest.mark.parametrize("library", ["numpy", "libtorch"])
def test_ctrl_c_while_modules_are_imported_is_one_line_and_130(library, tmp_path):
    process = subprocess.Popen([sys.executable, PROGRAM, "--out", tmp_path / "out"], stderr=subprocess.PIPE, text=True)
    while library not in Path(f"/proc/{process.pid}/maps").read_text() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and len(error.strip().splitlines()) == 1 and "--resume auto" in error


def test_checkpoints_without_settings_are_no_fresh_directory(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for resume in (False, True):
        with pytest.raises(ValueError, match="checkpoints but no config.json"):
            check_out(tmp_path, nano(), resume)


def test_a_directory_has_one_run_at_a_time(tmp_path):
    first = RunDir(tmp_path / "out", writes=True)
    first.hold()
    with pytest.raises(ValueError, match="out is in use by another run; wait"):
        RunDir(tmp_path / "out", writes=True).hold()
    first.lock.close()  # as the end of its process would
    RunDir(tmp_path / "out", writes=True).hold()
