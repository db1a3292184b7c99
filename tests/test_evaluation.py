"""evaluation: intervals by published numbers, held-out scoring by hand; the grammar that the held-out tasks come from."""

import json
import random
import re

import pytest

from toolr0_core.assets import documents, grammar
from toolr0_core.config import RewardConfig
from toolr0_core.evaluation import heldout
from toolr0_core.evaluation.statistics import mcnemar, mean_interval, paired_difference, wilson
from toolr0_core.parse import parse_calls, parse_task
from toolr0_core.presets import ASSETS
from toolr0_core.rewards import is_valid, obeys
from toolr0_core.schema import Task

ROW = {"id": "r", "question": "q", "tools": [{"name": "f", "description": "", "parameters": {}, "required": []}],
       "gold": [[{"name": "f", "arguments": {"a": 1}}], [{"name": "f", "arguments": {"a": 2}}]], "meta": {"group": "g"}}
RIGHT = '<tool_call_answer>[{"name":"f","arguments":{"a":"2"}}]</tool_call_answer>'
WRONG = '<tool_call_answer>[{"name":"f","arguments":{"a":3}}]</tool_call_answer>'


def test_wilson_by_published_values():
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998, table I
    assert wilson(0, 0) == (0.0, 1.0)


def test_paired_interval_by_hand():
    mean, low, high = paired_difference([0, 0, 1, 0], [1, 0, 1, 1])
    assert mean == 0.5 and high - mean == pytest.approx(1.959964 * (1 / 3) ** 0.5 / 2, abs=1e-6) == pytest.approx(mean - low)
    assert mean_interval([]) == (0.0, 0.0, 0.0)


def test_mean_interval_agrees_with_a_bootstrap():
    rng = random.Random(0)
    shares = [rng.choice([0, 0, 0.125, 0.5, 0.875, 1]) for _ in range(400)]
    means = sorted(sum(rng.choices(shares, k=400)) / 400 for _ in range(2000))
    mean, low, high = mean_interval(shares)
    assert (mean, low, high) == pytest.approx((sum(shares) / 400, means[50], means[1949]), abs=0.005)


def test_mcnemar_by_hand():
    before, after = [1] * 2 + [0] * 8 + [1, 0, 0], [0] * 2 + [1] * 8 + [1, 0, 0]
    assert mcnemar(before, after) == (2, 8, pytest.approx(2 * (1 + 10 + 45) / 1024))
    assert mcnemar([0, 1], [0, 1]) == (0, 0, 1.0) and mcnemar([0], [1]) == (0, 1, 1.0)
    assert mcnemar([0] * 3000, [1] * 3000)[2] == 0.0  # 2^-2999 underflows, and nothing raises


def test_equal_shares_are_not_certain():
    rows = [{"group": "", "greedy": 0.0, "avg8": 0.0, "pass8": 0.0, "format": 1.0} for _ in range(10)]
    figures = heldout.summarise(rows)
    assert (figures["avg8"]["low"], figures["avg8"]["high"]) == pytest.approx((0, 0.2775), abs=1e-4)
    assert (figures["format"]["low"], figures["format"]["high"]) == pytest.approx((0.7225, 1), abs=1e-4)


def test_held_out_figures_by_hand(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(ROW | {"id": str(i)}) for i in range(2)) + "\n")
    rows = heldout.load(path)
    per_row = heldout.outcomes(rows, [RIGHT, WRONG], [[RIGHT, WRONG], [WRONG, "nothing"]], RewardConfig(require_think=False))
    assert [(r["greedy"], r["avg8"], r["pass8"], r["format"]) for r in per_row] == [(1, 0.5, 1, 1), (0, 0, 0, 0.5)]
    figures = heldout.summarise(per_row)
    assert figures["n"] == 2 and figures["avg8"]["value"] == 0.25 and figures["groups"]["g"]["greedy"]["value"] == 0.5
    assert (figures["greedy"]["low"], figures["greedy"]["high"]) == pytest.approx(wilson(1, 2))
    assert heldout.gains(per_row, [per_row[0]] * 2)["avg8"]["value"] == 0.25


def test_groups_are_reported_apart_with_intervals(capsys, monkeypatch):
    rows = [{"group": g, "greedy": v, "avg8": v / 2, "pass8": 1.0, "format": 1.0} for g, v in [("[red]x", 1.0), ("y", 0.0)] * 2]
    base = {"iteration": 0} | heldout.summarise(rows)
    assert base["groups"]["[red]x"] == {"n": 2} | {name: base["groups"]["[red]x"][name] for name in heldout.FIGURES}
    assert (base["groups"]["[red]x"]["greedy"]["low"], base["groups"]["[red]x"]["greedy"]["high"]) == pytest.approx(wilson(2, 2))
    later = base | {"iteration": 1, "gain": heldout.gains(rows, rows)}
    heldout.print_table({"base": base, "iterations": [later, later | {"iteration": 2}]})
    printed = capsys.readouterr().out
    for words in ("[red]x (n = 2)", "y (n = 2)", ".500 [.150, .850]", "+.000 [+.000, +.000]", "1.000 [.510, 1.000]"):
        assert words in printed
    assert (printed.count("base "), printed.count("iteration 1"), printed.count("iteration 2")) == (4, 1, 3)
    heldout.print_table({"base": base, "iterations": []})  # a run that stopped after the base
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes a terminal of the captured output
    heldout.print_table({"base": base, "iterations": [later]})
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert ".500 [" not in printed and ".500 " in printed and "+.000 [+.000, +.000]" in printed


def test_a_menu_may_be_json_schema_and_a_question_any_text(tmp_path):
    schema = {"type": "object", "properties": {"a": {"type": "integer", "description": "d"}, "b": {"type": "string"}}, "required": ["a"]}
    row = ROW | {"question": "one\u2028two\x85three", "tools": [{"name": "f", "description": "d", "parameters": schema}], "meta": None}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n\n" + json.dumps(ROW), encoding="utf-8")
    first, second = heldout.load(path)
    assert first.task.question == "one\u2028two\x85three" and first.group == "" and second.group == "g"
    assert first.task.tools[0].parameters == schema["properties"] and first.task.tools[0].required == ("a",)
    assert len(heldout.load(path, limit=1)) == 1


@pytest.mark.parametrize("content, why", [(b"", "no rows"), (b"\n\n", "no rows"), (b"\xff\xfe", "not UTF-8"), (None, "No such file")])
def test_a_file_without_rows_is_an_error(content, why, tmp_path):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"rows.jsonl: {why}"):
        heldout.load(path)


@pytest.mark.parametrize("line", ["{", "{}", "3", "[" * 100_000, '{"id": 1, "question": "q", "tools": 3, "gold": [[]]}', "[]",
                                  '{"id": 1, "question": "q", "tools": [], "gold": []}',
                                  *(json.dumps(ROW | bad) for bad in (
                                      {"question": None}, {"tools": [{"name": 3}]}, {"tools": ROW["tools"] * 2}, {"gold": []},
                                      {"gold": [{"name": "f"}]}, {"gold": [[{"name": "f", "arguments": [1]}]]}, {"gold": [[3]]},
                                      *({key: "half \ud800"} for key in ("id", "question", "note")), {"meta": {"group": "\udfff"}},
                                      {"gold": [[{"name": "f", "arguments": {"\ud800": 1}}]]}))])
def test_a_bad_row_is_named_by_file_and_line(line, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + line + "\n")
    with pytest.raises(ValueError, match="rows.jsonl, line 2: .* a row is an object with") as error:
        heldout.load(path)
    assert str(error.value).encode()


def test_held_out_tasks_need_what_pretraining_never_showed():
    rows = heldout.load(ASSETS / "heldout.jsonl")
    assert len(rows) >= 400 and len({r.task.question for r in rows}) == len(rows)
    for row in rows:
        calls = row.task.gold
        unseen_tool = any(c.name in grammar.UNSEEN_TOOLS for c in calls)
        unseen_pair = any(grammar.is_unseen_pair(c.name, p, v) for c in calls for p, v in c.arguments.items())
        assert unseen_tool if row.group == "unseen tool" else unseen_pair and not unseen_tool


def test_pretraining_never_shows_an_unseen_tool_or_pair():
    rng, draw = random.Random(0), grammar.Draw(random_parameters=0.8, random_tools=0.5, two_calls=0.35)
    for _ in range(2000):
        task = grammar.sample_task(rng, draw)
        assert not grammar.UNSEEN_TOOLS & {t.name for t in task.tools}
        assert not any(grammar.is_unseen_pair(c.name, p, v) for c in task.gold for p, v in c.arguments.items())


def test_clean_documents_are_right_and_noise_is_not():
    rng, config = random.Random(0), RewardConfig(strict_arguments=True)
    for _ in range(200):
        task = parse_task(documents.generator_document(rng, documents.CLEAN)[1])
        assert isinstance(task, Task) and is_valid(task, config) and len(task.gold) <= len(task.tools)
        assert isinstance(parse_calls(documents.solver_document(rng, documents.CLEAN)[1], True), tuple)
    noisy = [parse_task(documents.generator_document(rng, documents.Noise())[1]) for _ in range(400)]
    assert 0.3 < sum(isinstance(t, Task) and is_valid(t, config) for t in noisy) / 400 < 0.6
    spec = grammar.sample_task_spec(rng)
    assert obeys(grammar.sample_task(rng, spec=spec), spec)
