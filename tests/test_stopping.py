"""Ctrl-C where no step can be finished, and a run directory that lost its settings."""

import importlib.util
from pathlib import Path

import pytest

from toolr0_core.presets import nano
from toolr0_core.rundir import check_out

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


def test_checkpoints_without_settings_are_no_fresh_directory(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for resume in (False, True):
        with pytest.raises(ValueError, match="checkpoints but no config.json"):
            check_out(tmp_path, nano(), resume)
