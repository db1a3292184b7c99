"""checkpoint: whole or not at all."""

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest
import torch

from toolr0_core import checkpoint


def tensors(value=1.0):
    return {"a/w": torch.full((3, 2), value), "b": torch.arange(4)}


def change(path, **state):
    """Another state beside the same tensors."""
    record = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(record | {"state": state}))


def test_the_newest_comes_back_and_old_ones_go(tmp_path):
    for i in range(4):
        checkpoint.save(tmp_path, f"step{i}", tensors(i), {"step": i}, keep=2)
    found, state = checkpoint.latest(tmp_path)
    assert state == {"step": 3} and found["a/w"][0, 0] == 3 and torch.equal(found["b"], torch.arange(4))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step2", "step3"]


def test_none_where_there_is_none(tmp_path):
    assert checkpoint.latest(tmp_path) is None and checkpoint.latest(tmp_path / "absent") is None


@pytest.mark.parametrize("damage", [
    lambda p: (p / "tensors.safetensors").write_bytes(b"x"), lambda p: (p / "tensors.safetensors").unlink(),
    lambda p: (p / "state.json").write_text("{"), lambda p: (p / "state.json").unlink(),
    lambda p: (p / "state.json").write_text(json.dumps({"order": 2})),
    *(lambda p, text=text: (p / "state.json").write_text(text)
      for text in ("[1]", "null", "{}", '{"order": Infinity}', '{"order": null}', "[" * 200_000, "9" * 5000)),
    lambda p: change(p, step=None), lambda p: change(p), lambda p: change(p, step=[1])])
def test_a_damaged_one_is_named_and_skipped(damage, tmp_path, capsys):
    checkpoint.save(tmp_path, "old", tensors(1), {"step": 1})
    damage(checkpoint.save(tmp_path, "new", tensors(2), {"step": 2}))
    assert checkpoint.latest(tmp_path, lambda state: int(str(state["step"])))[1] == 1
    assert str(tmp_path / "new") in capsys.readouterr().err


def test_a_full_disk_is_seen_before_writing(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, "old", tensors(), {})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "total used free")(10, 10, 5))
    with pytest.raises(ValueError, match="0 MiB are free .* make room"):
        checkpoint.save(tmp_path, "new", tensors(), {})
    assert [p.name for p in tmp_path.iterdir()] == ["old"]


def test_space_is_there_for_what_is_kept_and_one_more(tmp_path, monkeypatch):
    free = 5 * 2**20 // 2
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "total used free")(10, 10, free))
    folder = tmp_path / "yet" / "to come"
    with pytest.raises(ValueError, match="2 MiB are free and 3 checkpoints need 3; make room"):
        checkpoint.check_space(folder, 10)
    assert not list(tmp_path.iterdir())
    checkpoint.save(folder, "old", tensors(), {})
    checkpoint.check_space(folder, 10)


def test_a_disk_that_fills_up_while_saving_leaves_the_former_one(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, "same", tensors(1), {"step": 1})

    def fill(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", fill)
    with pytest.raises(ValueError, match="No space left .* --resume auto"):
        checkpoint.save(tmp_path, "same", tensors(2), {"step": 2})
    assert checkpoint.latest(tmp_path)[1] == {"step": 1} and [p.name for p in tmp_path.iterdir()] == ["same"]


def test_a_disk_that_is_really_full_is_one_sentence_and_leaves_nothing_half_written(tmp_path):
    """The writer of safetensors reports a failed write by an exception of its own, so the limit here is the system's."""
    program = f"""
import pathlib, resource, signal, torch
from toolr0_core import checkpoint
folder = pathlib.Path({str(tmp_path)!r})
checkpoint.save(folder, "old", {{"w": torch.ones(3)}}, {{"step": 1}})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    checkpoint.save(folder, "new", {{"w": torch.ones(100_000)}}, {{"step": 2}})
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert done.returncode == 0 and "could not be written" in done.stdout and "--resume auto" in done.stdout, done.stderr
    assert checkpoint.latest(tmp_path)[1] == {"step": 1} and [p.name for p in tmp_path.iterdir()] == ["old"]


def test_damaged_ones_do_not_crowd_out_a_new_one(tmp_path):
    for name in ("a", "b", "c"):
        checkpoint.save(tmp_path, name, tensors(), {"name": name}, keep=2)
        if name != "c":
            (tmp_path / name / "state.json").write_text("{")
    assert checkpoint.latest(tmp_path)[1] == {"name": "c"}


def test_a_crash_while_swapping_loses_nothing(tmp_path, monkeypatch):
    """Between the two renames the former checkpoint stands under another name; it is still found, and later replaced."""
    checkpoint.save(tmp_path, "same", tensors(1), {"step": 1})
    rename = checkpoint.Path.rename

    def crash(self, target):
        if self.suffix == ".part":
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(checkpoint.Path, "rename", crash)
        checkpoint.save(tmp_path, "same", tensors(2), {"step": 2})
    assert checkpoint.latest(tmp_path)[1] == {"step": 1}
    checkpoint.save(tmp_path, "same", tensors(3), {"step": 3})
    assert checkpoint.latest(tmp_path)[1] == {"step": 3} and [p.name for p in tmp_path.iterdir()] == ["same"]


def test_what_a_killed_save_left_is_cleared(tmp_path):
    (tmp_path / ".other.part").mkdir()
    checkpoint.save(tmp_path, "new", tensors(), {})
    assert [p.name for p in tmp_path.iterdir()] == ["new"]
