"""What a task and an answer earn (A5, A8; where sources disagree, method section 0). Every constant is in RewardConfig."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from toolr0_core.config import RewardConfig
from toolr0_core.matching import best_assignment, values_equal
from toolr0_core.parse import blocks, parse_call_list, parse_calls, parse_menu, parse_task
from toolr0_core.schema import Failure, Reward, Task, TaskSpec, Tool, ToolCall

_DEFAULT = RewardConfig()
_ECHOES = re.compile(r"task specification|number of tool|output format|private(ly)? (design|reasoning)|control block|"
                     r"\[?generated user question\]?|the user's request:|dummy|placeholder|lorem ipsum", re.IGNORECASE)
_ONES = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
         "eighteen nineteen").split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
NUMBER_WORDS = {**{n: w for n, w in enumerate(_ONES)}, **{20 + 10 * i: w for i, w in enumerate(_TENS)}}


# -- Solver --------------------------------------------------------------------------------------------------------------


def solver_reward(completion: str, gold: Sequence[ToolCall], config: RewardConfig | None = None) -> Reward:
    """Form plus accuracy, 0..2 with the paper's constants (A8). Right is [] where gold is empty."""
    c = config or _DEFAULT
    calls = parse_calls(completion)
    answered = not (isinstance(calls, Failure) and calls.reason in ("empty", "missing_block", "too_long"))
    parsed = isinstance(calls, tuple)
    parts = {"format": c.answer_tag * answered + c.answer_parses * parsed
             + c.answer_calls * (parsed and bool(calls) == bool(gold))}
    if c.accuracy:
        thought = not c.require_think or not isinstance(parse_calls(completion, require_think=True), Failure)
        parts["accuracy"] = accuracy(calls, gold, c) if parsed and thought else 0.0
    return Reward(sum(parts.values()), parts)


def accuracy(predicted: Sequence[ToolCall], gold: Sequence[ToolCall], config: RewardConfig | None = None) -> float:
    """Mean over gold calls of the score of its predicted call under the best assignment, less for surplus calls."""
    c = config or _DEFAULT
    if not gold:
        return float(not predicted)
    if not predicted:
        return 0.0
    predicted = predicted[:4 * len(gold) + 16]  # more cannot raise the score, and the assignment is cubic
    scores = [[call_score(p, g, c) for p in predicted] for g in gold]
    mean = sum(scores[i][j] for i, j in best_assignment(scores)) / len(gold)
    return mean / (1 + c.extra_call_penalty * max(0, len(predicted) - len(gold)))


def call_score(predicted: ToolCall, gold: ToolCall, config: RewardConfig) -> float:
    """name + F1 of the argument names + share of equal values among the shared names."""
    name = predicted.name == gold.name
    shared = predicted.arguments.keys() & gold.arguments.keys()
    total = len(predicted.arguments) + len(gold.arguments)
    keys = 2 * len(shared) / total if total else 1.0
    right = sum(values_equal(predicted.arguments[k], gold.arguments[k], config.rule) for k in shared)
    values = right / len(shared) if shared else float(total == 0)
    return config.name_weight * name + config.keys_weight * keys + config.values_weight * values


# -- Generator -----------------------------------------------------------------------------------------------------------


def generator_reward(completion: str, spec: TaskSpec | None, success_rate: float | None = None,
                     judge_score: int | None = None, config: RewardConfig | None = None) -> Reward:
    """Form, validity, difficulty and the judge's score; a term whose measurement is None is left out (section 0)."""
    c = config or _DEFAULT
    parts = {"format": format_reward(completion, c)}
    task = parse_task(completion, c.require_think)
    usable = isinstance(task, Task) and not is_placeholder(task.question)
    on_spec = not c.spec_validity or spec is None or (usable and obeys(task, spec))
    parts["validity"] = validity(task, c) if usable and on_spec else 0.0
    gated = usable and worth_probing(task, spec, c)
    if is_placeholder_text(completion):
        parts["format"] = 0.0
    if success_rate is not None and c.difficulty:
        parts["difficulty"] = difficulty_reward(success_rate, 8, c.low, c.high, c.sigma) if gated else 0.0
    if judge_score is not None:
        parts["semantic"] = (judge_score - 1) / 4 if gated else 0.0
    return Reward(sum(parts.values()), parts)


def format_reward(completion: str, config: RewardConfig) -> float:
    """Three indicators, all blocks, menu reads, gold reads: their sum (paper) or mean (code)."""
    found = blocks(completion, config.require_think)
    if isinstance(found, Failure):
        return 0.0
    total = 1 + isinstance(parse_menu(found["available_tools"]), tuple) + isinstance(
        parse_call_list(found["tool_call_answer"]), tuple)
    return total / 3 if config.format_reduce == "mean" else float(total)


def validity(task: Task, config: RewardConfig) -> float:
    """Weighted: every gold call names a tool, gives what is required, and takes its values from the question (A5.2).

    With strict_arguments "what is required" is exactly the tool's parameters. No call is valid where none is right.
    """
    tools = {t.name: t for t in task.tools}
    menu = all(call.name in tools for call in task.gold)
    required = menu and all(_complete(call, tools[call.name], config) for call in task.gold)
    words = _Words(task.question)
    grounded = all(words.ground(v) for call in task.gold for v in call.arguments.values())
    return config.menu_weight * menu + config.required_weight * required + config.grounded_weight * grounded


def is_valid(task: Task, config: RewardConfig) -> bool:
    return not is_placeholder(task.question) and math.isclose(
        validity(task, config), config.menu_weight + config.required_weight + config.grounded_weight)


def _complete(call: ToolCall, tool: Tool, config: RewardConfig) -> bool:
    if config.strict_arguments:
        return set(call.arguments) == set(tool.parameters)
    return set(tool.required) <= set(call.arguments)


def obeys(task: Task, spec: TaskSpec) -> bool:
    """Whether the menu's size and the number of calls are those asked for."""
    return len(task.tools) == spec.n_tools and len(task.gold) == spec.n_calls


def worth_probing(task: Task, spec: TaskSpec | None, config: RewardConfig) -> bool:
    """Whether the gates before the difficulty term let a task through: only then do probes cost anything."""
    if is_placeholder(task.question) or (config.validity_gate and not is_valid(task, config)):
        return False
    return not (config.spec_gate and spec is not None and not obeys(task, spec))


def is_placeholder(question: str) -> bool:
    """An echo of the prompt or a text too short to ask for anything (A4)."""
    return len(question.strip()) < 8 or bool(_ECHOES.search(question[:4000]))


def is_placeholder_text(completion: str) -> bool:
    found = blocks(completion, require_think=False)
    return isinstance(found, dict) and is_placeholder(found["question"])


def difficulty_reward(p: float, k: int = 8, low: float = 0.25, high: float = 0.75, sigma: float = 0.12) -> float:
    """1 inside [low, high], Gaussian outside, 0 below 1/k: a task that is never solved teaches nothing (A5.3)."""
    if p < 1 / k - 1e-9:
        return 0.0
    edge = min(max(p, low), high)
    return math.exp(-((p - edge) ** 2) / (2 * sigma ** 2))


def judge_score(text: str) -> int | None:
    """The judge's 1..5: the first whole number of the text, if it is one of these; else None."""
    number = re.search(r"(?<![\w.])-?\d+(?:[.,]\d+)?", text[:200])
    if number:
        return int(number.group()) if number.group() in ("1", "2", "3", "4", "5") else None
    words = {w: i for i, w in enumerate("one two three four five".split(), 1)}
    return next((words[w] for w in re.findall(r"[a-z]+", text[:200].lower()) if w in words), None)


class _Words:
    """A question's words, for grounding: NFKC, case folded, anything but letters, marks and digits a separator."""

    def __init__(self, question: str):
        self.text = f" {_normal(question)} "

    def ground(self, value: Any) -> bool:
        """Whether a value occurs as whole words; booleans and None always do, a list where all of its elements do."""
        if value is None or isinstance(value, bool):
            return True
        if isinstance(value, (list, tuple)):
            return all(self.ground(v) for v in value)
        if isinstance(value, dict):
            return all(self.ground(v) for v in value.values())
        return any(v and self._holds(v) for v in _variants(value))

    def _holds(self, words: str) -> bool:
        if f" {words} " in self.text:
            return True
        # scripts that write without spaces have no word borders to ask for
        return any(ord(c) > 0x2E7F for c in words) and words in self.text


def _normal(text: str) -> str:
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join("".join(c if unicodedata.category(c)[0] in "LMN" else " " for c in folded).split())


def _variants(value: str | int | float) -> set[str]:
    """The ways a question may write a value: as it is, as a whole number, with commas, as a word (A5.2)."""
    try:
        text = str(value)
    except ValueError:  # an integer beyond Python's limit of digits
        return set()
    out = {_normal(text)}
    try:
        number = float(text)
    except ValueError:
        number = next((n for n, w in NUMBER_WORDS.items() if w == text.strip().lower()), None)
    if number is not None and math.isfinite(number) and number == int(number):
        whole = int(number)
        out |= {_normal(str(whole)), NUMBER_WORDS.get(whole, "")}
        if abs(whole) >= 1000:
            out.add(_normal(f"{whole:,}"))
    return out
