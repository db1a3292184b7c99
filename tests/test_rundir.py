"""rundir: where a run can write, and what it makes of files that are damaged."""

import re

import pytest

from toolr0_core.curriculum import Candidate
from toolr0_core.presets import nano
from toolr0_core.records import Position
from toolr0_core.rundir import RunDir, check_file, check_out
from toolr0_core.schema import Task, TaskSpec, Tool, ToolCall


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


def write_run(out):
    """A run of two held-out tasks, one step and one task."""
    run = RunDir(out, writes=True)
    run.hold()
    run.write_config(nano())
    run.write_evaluation(0, [{"id": i, "group": "", "greedy": 1.0, "avg8": 0.5, "pass8": 1.0, "format": 1.0} for i in "ab"])
    tool = Tool("book_table", "books", {"city": {"type": "string"}}, ("city",))
    task = Task("Book a table in Oslo.", (tool,), (ToolCall("book_table", {"city": "Oslo"}),), TaskSpec("food", "single_turn", 1, 1))
    run.write_curriculum(1, [Candidate(task, 0.5)], [{"reason": "invalid"}])
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        run.append(name, Position(1, 0, 0), [{"reward": 0.5}])
    return run


def test_a_whole_run_is_gone_on_with_and_a_line_cut_short_is_left_out(tmp_path):
    run = write_run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"at": [1, 0')
    check_out(tmp_path, nano(), True, ["a", "b"])
    run.forget_from(Position(1, 0, 1))
    assert (tmp_path / "metrics.jsonl").read_text() == '{"at": [1, 0, 0], "reward": 0.5}\n'
    run.forget_from(Position(1, 0, 0))
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert run.read_curriculum(1)[0].p == 0.5 and len(run.read_evaluation(0)) == 2


def test_time_is_counted_over_the_processes_of_a_run(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    for start, end in ((1000.0, 1060.0), (5000.0, 5030.0)):
        now[0] = start
        run = RunDir(tmp_path, writes=True)
        run.hold()
        now[0] = end
        run.append("metrics.jsonl", Position(), [{}])
        run.lock.close()
    assert now[0] - run.started == 90
    for text in ("", "nan", "-5", "1e999", "9" * 4000, "x"):
        (tmp_path / ".seconds").write_text(text)
        run = RunDir(tmp_path, writes=True)
        run.hold()
        run.lock.close()
        assert run.started == now[0], text


LOG = ["{}", "[]", "", "null", "5", '{"at": null}', '{"at": ["a", "b", "c"]}', '{"at": [1, 9, 0]}', '{"at": [1, 2, 3, 4]}',
       '{"at": [1, 2, Infinity]}', "[" * 200_000, "9" * 5000, "\x00"]
OBJECT = ["[]", "", "null", "5", "{", "[" * 200_000, '{"a":' * 990 + "1" + "}" * 990]
ROW = ["{}", "[]", "", "null", '{"a": 1}', "[" * 200_000]


@pytest.mark.parametrize("name, text, remedy", [
    *[(name, text + "\n", "line 1 is .*; delete that line") for name in ("metrics.jsonl", "rollouts.jsonl") for text in LOG],
    *[("config.json", text, "damaged; put the file back") for text in OBJECT],
    *[("curriculum/iteration_1.jsonl", text + "\n", "line 1 is .*; put the file back") for text in [*ROW, (
        '{"p": 0.5, "task": {"question": "Book it.", "tools": [{"name": "book", "parameters": null}], "gold": []}}')]],
    ("curriculum/iteration_1.jsonl", '{"a": 1}', "line 1 is .*; put the file back"),
    *[("evaluations/iteration_0.jsonl", text + "\n", "line 1 is .*; put the file back") for text in [*ROW, (
        '{"id": "a", "group": "", "greedy": 2, "avg8": 0, "pass8": 0, "format": 0}')]],
    ("evaluations/iteration_0.jsonl", '{"id": "a", "group": "", "greedy": 1, "avg8": 0, "pass8": 0, "format": 0}\n',
     "has 1 rows, which are not those of the 2 held-out tasks; put back")])
def test_a_damaged_file_is_named_with_its_line_and_a_remedy(name, text, remedy, tmp_path):
    write_run(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path / name))}.*{remedy}") as caught:
        check_out(tmp_path, nano(), True, ["a", "b"])
    assert len(str(caught.value)) < 400
