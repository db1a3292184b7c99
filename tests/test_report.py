"""report: a page from a run directory as RunDir writes it; runs that are not finished; text of models that means harm."""

import base64
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from toolr0_core import report
from toolr0_core.curriculum import Candidate
from toolr0_core.evaluation import heldout
from toolr0_core.options import parse
from toolr0_core.records import Position
from toolr0_core.rundir import RunDir
from toolr0_core.schema import Task, TaskSpec, Tool, ToolCall

ROOT = Path(__file__).parents[1]
HARM = '</pre><script>alert(1)</script><img src=x onerror="f()">" \' & {{ 7 * 7 }} \x1b[31m \u202e \ud800 \x00'


def outcome(i, greedy, group="seen"):
    return {"id": str(i), "group": group, "greedy": float(greedy), "avg8": greedy / 2, "pass8": 1.0, "format": 1.0}


def task(question="Book a table in Oslo.", name="book_table"):
    tool = Tool(name, "books", {"city": {"type": "string"}, "hour": {"type": "integer"}}, ("city",))
    return Task(question, (tool,), (ToolCall(name, {"city": "Oslo"}),), TaskSpec("food", "single_turn", 1, 1))


def play(out, text="fine", steps=3, finish=True):
    """A run directory of one iteration, with this text wherever a model or a user could have put it."""
    run = RunDir(out, writes=True)
    out.mkdir()
    run.write_config(parse(["--preset", "nano", "--solver.steps", "7", "--model", text], "")[0])
    base, after = [outcome(i, i == 0, text) for i in range(5)], [outcome(i, i > 1, text) for i in range(5)]
    run.write_evaluation(0, base)
    for step in range(steps):
        for phase, parts in ((0, {"validity": 0.5}), (2, {"exact": 0.25})):
            at = Position(1, phase, step)
            run.append("metrics.jsonl", at, [{"iteration": 1, "phase": ("generator", "", "solver")[phase], "step": step,
                                              "reward": step / 2, "entropy": float("nan")} | parts])
            run.append("rollouts.jsonl", at, [{"group": 0, "prompt": text, "text": f"{text} at step {step}, {word}", "finish": "stop",
                                               "reward": reward} for word, reward in (("middling", 1), ("good", 2.5), ("bad", 0.125))])
    run.append("metrics.jsonl", Position(1, 1), [{"iteration": 1, "phase": "curriculum", "candidates": 9, "filtered": 8, "verified": 7,
                                                  "selected": 6, "rows": 5, "p": 0.5, "buckets": {"easy": 2, "medium": 3},
                                                  "dropped": {"invalid": 4, text: 1}}])
    run.write_curriculum(1, [Candidate(task(text + str(i), text), p) for i, p in enumerate((1.0, 1.0, 1.0, 0.5, 0.125, 0.125, 0.125))], [])
    if finish:
        run.write_evaluation(1, after)
        run.write_summary({"best": 1, "seconds": 3723, "skipped_solver_phases": []})
    return report.write_report(out).read_text(encoding="utf-8")


class Tags(HTMLParser):
    """Every tag and attribute name of a page, and its visible text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text = set(), set(), ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        self.text += " "

    def handle_data(self, data):
        self.text += data


def test_a_finished_run_with_its_figures(tmp_path):
    page = " ".join(Tags(play(tmp_path / "run")).text.split())
    assert "finished in 1:02:03; best by avg8: iteration 1" in page
    gain = heldout.gains([outcome(i, i == 0) for i in range(5)], [outcome(i, i > 1) for i in range(5)])
    assert heldout.interval_text(gain["greedy"], "+.3f") in page and "+.400" in page
    assert "1, 3, 0.62" in page  # lost, won, McNemar's p = 2 * (1 + 4) / 16
    assert "fine (n = 5)" in page
    assert "1 9 8 7 6 5 0.50 2 3 0" in page and "invalid 4" in page
    assert re.search(r"--solver.steps 7 \d+ ", page + " ") and "--seed" not in page.split("Settings")[1]
    assert "fine(city: string, hour?: integer) → fine(city=\"Oslo\")" in page


def test_samples_are_some_of_each_bucket_and_the_ends_of_the_last_step(tmp_path):
    page = " ".join(Tags(play(tmp_path / "run")).text.split())
    assert [f"fine{i}" in page for i in range(7)] == [True, True, False, True, True, True, False]
    assert page.index("fine0") < page.index("fine3") < page.index("fine4")
    for words in ("Generator, best: reward 2.500", "Solver, worst: reward 0.125", "at step 2, good", "at step 2, bad"):
        assert words in page
    assert "middling" not in page and "at step 1" not in page


def test_a_page_is_complete_in_itself(tmp_path):
    page = play(tmp_path / "run")
    images = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]*)"', page)
    assert len(images) == page.count("<img") == 3
    for image in images:
        assert ElementTree.fromstring(base64.b64decode(image)).tag.endswith("svg")
    assert "http" not in re.sub(r'data:[^"]*|http-equiv', "", page) and "default-src 'none'" in page


def test_harmful_text_stays_text(tmp_path):
    calm, harmed = play(tmp_path / "calm"), play(tmp_path / "harmed", HARM)
    assert (Tags(harmed).tags, Tags(harmed).attributes) == (Tags(calm).tags, Tags(calm).attributes)
    assert "<script" not in harmed and harmed.count("<img") == 3 and "{{ 7 * 7 }}" in harmed
    assert not set(harmed) & set("\x1b\u202e\ud800\x00") and "\\u202e \\ud800 \\x00" in harmed


def test_long_texts_are_cut_and_say_so(tmp_path):
    page = play(tmp_path / "run", "long " * 100_000, steps=1)
    assert len(page) < 400_000 and "(500,000 characters)" in page


def test_text_in_any_script_is_shown_as_it_is():
    assert report.visible("北京\u3000São Paulo\n") == "北京\u3000São Paulo\n"


def test_a_run_that_is_still_going_is_reported_as_far_as_it_got(tmp_path):
    out = tmp_path / "run"
    play(out, finish=False)
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"at": [1, 2, 3], "iteration": 1, "pha')  # a line that is being written
    (out / "rollouts.jsonl").unlink()
    page = " ".join(Tags(report.write_report(out).read_text()).text.split())
    assert "not finished: last heard of in iteration 1, curriculum" in page
    assert "base .200" in page and "iteration 1 .6" not in page


def test_a_run_that_has_only_begun_is_reported(tmp_path):
    RunDir(tmp_path, writes=True).write_config(parse(["--preset", "qwen2.5-0.5b"], "")[0])
    page = Tags(report.write_report(tmp_path).read_text()).text
    assert "nothing logged yet" in page and "No figures yet" in page and "Those of the preset." in page


def test_what_is_no_run_directory_is_one_line(tmp_path):
    for argv, words in ([str(tmp_path)], "no config.json"), ([], "RUN_DIR"), ([str(tmp_path), "--nope"], "unknown option --nope"):
        done = subprocess.run([sys.executable, ROOT / "launch" / "report.py", *argv], capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and words in done.stderr
    assert not list(tmp_path.iterdir())


DEEP = '{"a":' * 900 + "1" + "}" * 900
NUMBERS = ("null", '"text"', '"\\ud800"', "NaN", "1e999", "9" * 400, "[]", "{}", DEEP)
AT = '"at": [1, 2, 9]'
STEP = '"iteration": 1, "phase": "solver", "step": 9'
ROWS = {
    "metrics.jsonl": [f'{{{AT}, "iteration": {n}, "phase": "solver", "step": 9}}' for n in NUMBERS]
    + [f'{{{AT}, "iteration": 1, "phase": "solver", "step": {n}}}' for n in NUMBERS] + [f'{{{AT}, {STEP}, "reward": {n}}}' for n in NUMBERS]
    + [f'{{"at": [1, 1, 0], "iteration": 1, "phase": "curriculum", "{key}": {n}}}'
       for key in ("candidates", "p", "menu", "buckets", "dropped") for n in NUMBERS]
    + ['{"at": [1, 1, 0], "iteration": 1, "phase": "curriculum", "dropped": {"\\ud800": 1}}', f'{{{STEP}}}'],
    "rollouts.jsonl": [f'{{{AT}, "prompt": "p", "text": "t", "finish": "stop", "reward": {n}}}' for n in NUMBERS]
    + [f'{{{AT}, "prompt": "p", "text": "t", "reward": 1}}', '{"prompt": "p", "text": "t", "finish": "stop", "reward": 1}'],
    "curriculum/iteration_1.jsonl": [f'{{"p": {n}, "task": {json.dumps(task().to_json())}}}' for n in NUMBERS]
    + [json.dumps({"p": 0.5, "task": task().to_json() | change}) for change in (
        {"tools": None}, {"tools": [{"name": "book"}]}, {"tools": [{}]}, {"gold": None}, {"gold": [{"name": 1}]}, {"spec": [1]},
        {"question": None}, {"gold": [{"name": "book", "arguments": {"a": json.loads(DEEP)}}]})] + ['{"p": 0.5}'],
    "evaluations/iteration_1.jsonl": [f'{{"id": "0", "group": "", "greedy": {n}, "avg8": 0, "pass8": 0, "format": 0}}' for n in NUMBERS]
    + ['{"id": "0"}'],
    "evaluations/iteration_99999999999999999999.jsonl": [json.dumps(outcome(0, True))]}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_no_run_writes_do_not_stop_a_report(name, tmp_path):
    play(tmp_path / "run")
    for row in [*ROWS[name], "{}", "[]", "null", "5", "", "[" * 200_000, '{"at": [1, 9, 0]}', '{"at": ["a", 0, 0]}']:
        with (tmp_path / "run" / name).open("a") as file:
            file.write(row + "\n")
    page = report.write_report(tmp_path / "run").read_text()
    assert "finished in 1:02:03" in page


@pytest.mark.parametrize("name", ["config.json", "summary.json"])
@pytest.mark.parametrize("text", ["[]", "null", "5", "", "{", "{}", "[" * 200_000, '{"preset": [], "seed": 0}', '{"seconds": "x"}',
                                  '{"preset": "nano", "seed": "\\ud800"}', '{"seconds": 1e999, "best": 1, "skipped_solver_phases": []}'])
def test_a_damaged_file_is_one_line_with_its_name(name, text, tmp_path):
    play(tmp_path / "run")
    (tmp_path / "run" / name).write_text(text)
    with pytest.raises(ValueError, match=f"^{tmp_path}/run/{name} is damaged; put the file back"):
        report.write_report(tmp_path / "run")


def test_without_matplotlib_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="matplotlib is not installed; type `pip install"):
        play(tmp_path / "run")
    assert not (tmp_path / "run" / "report.html").exists()


def test_the_program_writes_the_page_and_names_it(tmp_path):
    play(tmp_path / "run")
    (tmp_path / "run" / "report.html").unlink()
    code = "import sys, runpy; sys.argv = sys.argv[1:]; import atexit; atexit.register(lambda: print('torch' in sys.modules)); " \
           "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, ROOT / "launch" / "report.py", tmp_path / "run"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines() == [str(tmp_path / "run" / "report.html"), "False"], done.stderr
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
