"""evaluation: intervals by published numbers, held-out scoring by hand; the grammar that the held-out tasks come from."""

import json
import random

import pytest

from toolr0_core.assets import documents, grammar
from toolr0_core.config import RewardConfig
from toolr0_core.evaluation import heldout
from toolr0_core.evaluation.statistics import mean_interval, paired_difference, wilson
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


def test_held_out_figures_by_hand(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(ROW | {"id": str(i)}) for i in range(2)) + "\n")
    rows = heldout.load(path)
    per_row = heldout.outcomes(rows, [RIGHT, WRONG], [[RIGHT, WRONG], [WRONG, "nothing"]], RewardConfig(require_think=False))
    assert [(r["greedy"], r["avg8"], r["pass8"], r["format"]) for r in per_row] == [(1, 0.5, 1, 1), (0, 0, 0, 0.5)]
    figures = heldout.summarise(per_row)
    assert figures["n"] == 2 and figures["avg8"]["value"] == 0.25 and figures["groups"]["g"]["greedy"] == 0.5
    assert (figures["greedy"]["low"], figures["greedy"]["high"]) == pytest.approx(wilson(1, 2))
    assert heldout.gains(per_row, [per_row[0]] * 2)["avg8"]["value"] == 0.25


@pytest.mark.parametrize("line", ["{", "{}", '{"id": 1, "question": "q", "tools": 3, "gold": [[]]}', "[]",
                                  '{"id": 1, "question": "q", "tools": [], "gold": []}'])
def test_a_bad_row_is_named_by_file_and_line(line, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + line + "\n")
    with pytest.raises(ValueError, match="rows.jsonl, line 2"):
        heldout.load(path)


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
