"""checkpoint: whole or not at all."""

import json
import shutil
from collections import namedtuple

import pytest
import torch

from toolr0_core import checkpoint


def tensors(value=1.0):
    return {"a/w": torch.full((3, 2), value), "b": torch.arange(4)}


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
    lambda p: (p / "state.json").write_text(json.dumps({"order": 2}))])
def test_a_damaged_one_is_named_and_skipped(damage, tmp_path, capsys):
    checkpoint.save(tmp_path, "old", tensors(1), {"step": 1})
    damage(checkpoint.save(tmp_path, "new", tensors(2), {"step": 2}))
    assert checkpoint.latest(tmp_path)[1] == {"step": 1}
    assert str(tmp_path / "new") in capsys.readouterr().err


def test_a_full_disk_is_seen_before_writing(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, "old", tensors(), {})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "total used free")(10, 10, 5))
    with pytest.raises(ValueError, match="0 MiB are free .* make room"):
        checkpoint.save(tmp_path, "new", tensors(), {})
    assert [p.name for p in tmp_path.iterdir()] == ["old"]


def test_a_disk_that_fills_up_while_saving_leaves_the_former_one(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, "same", tensors(1), {"step": 1})

    def fill(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", fill)
    with pytest.raises(ValueError, match="No space left .* --resume auto"):
        checkpoint.save(tmp_path, "same", tensors(2), {"step": 2})
    assert checkpoint.latest(tmp_path)[1] == {"step": 1} and [p.name for p in tmp_path.iterdir()] == ["same"]
