"""rundir: where a run can write."""

import pytest

from toolr0_core.presets import nano
from toolr0_core.rundir import check_file, check_out


@pytest.mark.parametrize("path, why", [("file", ""), ("file/out", "Not a directory"), ("x" * 300, "File name too long"),
                                       ("/proc/x", "No such file")])
def test_a_directory_that_cannot_be_made_is_named_and_nothing_is_left(path, why, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"^--out .* cannot be written \\({why}.*\\); name a place"):
        check_out(tmp_path / path, nano(), resume=False)
    check_out(tmp_path / "a" / "b", nano(), resume=False)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("path, why", [("", "Is a directory"), ("file/out", "Not a directory"), ("x" * 300, "File name too long"),
                                       ("a/b", "No such file"), ("/proc/x", "No such file")])
def test_a_file_that_cannot_be_written_is_named_and_nothing_is_left(path, why, tmp_path):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ValueError, match=f"^--json .* cannot be written \\({why}.*\\); name a place"):
        check_file("--json", tmp_path / path)
    check_file("--json", tmp_path / "file")
    check_file("--json", tmp_path / "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "kept")]
