"""What a task and an answer earn (arXiv 2602.21320). Every constant is in RewardConfig."""

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
# what only our prompts say, or a question that names itself; words that users say too ("placeholder", "format") are no echo
_ECHOES = re.compile(r"task specification:|obeys the task specification|write a new task now|tool-calling task|"
                     r"domain: \S+, context:|\b(?:single|multi)_turn\b|number of tool(?:s in the menu| calls in the answer)|"
                     r"in the output format below|private design notes|the user's request: natural|generated user question|"
                     r"lorem ipsum|\A\W*(?:(?:the|your|a|user|user's) )*(?:question|request|query|task)(?: here| text)?\W*\Z",
                     re.IGNORECASE)
# scripts that set no spaces between words, or write particles onto them: Hebrew, Arabic, Thai to Burmese, Khmer, CJK, Hangul
_UNSPACED = re.compile("([\u0590-\u08ff\u0e00-\u109f\u1100-\u11ff\u1780-\u17ff\u1950-\u1aaf\u2e80-\U0003ffff])")
_ONES = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
         "eighteen nineteen").split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
NUMBER_WORDS = {**{n: w for n, w in enumerate(_ONES)}, **{20 + 10 * i: w for i, w in enumerate(_TENS)}}


# -- Solver --------------------------------------------------------------------------------------------------------------


def solver_reward(completion: str, gold: Sequence[ToolCall], config: RewardConfig | None = None) -> Reward:
    """Form plus accuracy, 0..2 with the paper's constants. Right is [] where gold is empty."""
    c = config or _DEFAULT
    calls = parse_calls(completion)
    answered = not (isinstance(calls, Failure) and calls.reason in ("empty", "missing_block", "too_long"))
    parsed = isinstance(calls, tuple)
    loaded = parsed or calls.reason == "bad_calls"  # JSON all right, only no list of calls
    parts = {"format": c.answer_tag * answered + c.answer_parses * loaded
             + c.answer_calls * (parsed and bool(calls) == bool(gold))}
    if c.accuracy:
        thought = not c.require_think or not isinstance(parse_calls(completion, require_think=True), Failure)
        parts["accuracy"] = accuracy(calls, gold, c) if parsed and thought else 0.0
    return Reward(sum(parts.values()), parts)


def accuracy(predicted: Sequence[ToolCall], gold: Sequence[ToolCall], config: RewardConfig | None = None) -> float:
    """Mean over gold calls of the score of its predicted call under the best assignment, less for surplus calls.

    1 exactly where `matching.calls_equal` holds. Cubic in the number of calls, which parse bounds.
    """
    c = config or _DEFAULT
    if not gold:
        return float(not predicted)
    if not predicted:
        return 0.0
    scores = [[call_score(p, g, c) for p in predicted] for g in gold]
    mean = sum(scores[i][j] for i, j in best_assignment(scores)) / len(gold)
    return mean / (1 + c.extra_call_penalty * max(0, len(predicted) - len(gold)))


def call_score(predicted: ToolCall, gold: ToolCall, config: RewardConfig) -> float:
    """name + F1 of the argument names + share of equal values among the shared names."""
    given, wanted = _arguments(predicted, config.rule), _arguments(gold, config.rule)
    shared, total = given.keys() & wanted.keys(), len(given) + len(wanted)
    keys = 2 * len(shared) / total if total else 1.0
    right = sum(values_equal(given[k], wanted[k], config.rule) for k in shared)
    values = right / len(shared) if shared else float(total == 0)
    return config.name_weight * (predicted.name == gold.name) + config.keys_weight * keys + config.values_weight * values


def _arguments(call: ToolCall, rule: str) -> dict[str, Any]:
    """What a call gives: under the lenient rule an argument that is null is absent, as in matching."""
    return {k: v for k, v in call.arguments.items() if v is not None} if rule == "lenient" else call.arguments


# -- Generator -----------------------------------------------------------------------------------------------------------


def generator_reward(completion: str, spec: TaskSpec | None, success_rate: float | None = None,
                     judge_score: int | None = None, config: RewardConfig | None = None) -> Reward:
    """Form, validity, difficulty and the judge's score; a term whose measurement is None is left out.

    Raises ValueError for a success rate outside 0..1 or a judge's score outside 1..5: a measurement that failed is None.
    """
    c = config or _DEFAULT
    if judge_score is not None and not 1 <= judge_score <= 5:
        raise ValueError(f"judge_score is {judge_score}; it has to be in 1..5, or None where the judge gave none")
    task = parse_task(completion, c.require_think)
    usable = isinstance(task, Task) and not is_placeholder(task.question)
    parts = {"format": 0.0 if is_placeholder_text(completion) else format_reward(completion, c),
             "validity": validity(task, c) if usable and _answers(task, spec, c.spec_validity) else 0.0}
    gated = usable and worth_probing(task, spec, c)
    if success_rate is not None and c.difficulty:
        difficulty = difficulty_reward(success_rate, math.inf, c.low, c.high, c.sigma)
        parts["difficulty"] = difficulty if gated else 0.0
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


def checks(task: Task, config: RewardConfig) -> dict[str, bool]:
    """Whether every gold call names a tool of the menu, gives what is required, and takes its values from the question.

    With strict_arguments "what is required" is exactly the tool's parameters. No call passes where none is right.
    """
    tools = {t.name: t for t in task.tools}
    menu = all(call.name in tools for call in task.gold)
    required = menu and all(_complete(call, tools[call.name], config) for call in task.gold)
    words = _Words(task.question)
    grounded = all(words.ground(v) for call in task.gold for v in call.arguments.values())
    return {"menu": menu, "required": required, "grounded": grounded}


def validity(task: Task, config: RewardConfig) -> float:
    """The weighted sum of `checks`."""
    passed = checks(task, config)
    return (config.menu_weight * passed["menu"] + config.required_weight * passed["required"]
            + config.grounded_weight * passed["grounded"])


def is_valid(task: Task, config: RewardConfig) -> bool:
    """Whether every check passes and the question asks for something."""
    return not is_placeholder(task.question) and all(checks(task, config).values())


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
    return _answers(task, spec, config.spec_gate)


def _answers(task: Task, spec: TaskSpec | None, exactly: bool) -> bool:
    """Whether a task answers its specification: with calls where calls are asked for, or exactly.

    Every check of validity passes for no calls, so an empty answer would be the easiest task to write.
    """
    if spec is None:
        return True
    return obeys(task, spec) if exactly else bool(task.gold) or spec.n_calls == 0


def is_placeholder(question: str) -> bool:
    """An echo of the prompt or a text too short to ask for anything."""
    return width(question.strip()) < 8 or bool(_ECHOES.search(question[:4000]))


def width(text: str) -> int:
    """Length in columns: characters of Chinese, Japanese and Korean count twice, as they say about twice as much."""
    return len(text) if text.isascii() else sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def is_placeholder_text(completion: str) -> bool:
    found = blocks(completion, require_think=False)
    return isinstance(found, dict) and is_placeholder(found["question"])


def difficulty_reward(p: float, k: float = 8, low: float = 0.25, high: float = 0.75, sigma: float = 0.12) -> float:
    """1 inside [low, high], Gaussian outside, 0 below 1/k: a task that is never solved teaches nothing.

    p is the share of k samples that solved it; k may be infinite where p > 0 is known to mean one at least.
    Raises ValueError where p is not in 0..1, NaN included.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"the success rate is {p}; it has to be in 0..1, and a probe that did not run has none")
    if p == 0 or p < 1 / k - 1e-9:
        return 0.0
    edge = min(max(p, low), high)
    return math.exp(-((p - edge) ** 2) / (2 * sigma ** 2))


def judge_score(text: str) -> int | None:
    """The judge's 1..5: what it labels as its score, begins with, or gives as the only number; else None.

    A number of another range, and two numbers of which none is labelled or first, are unreadable rather than a guess.
    """
    text = re.sub(r"\b1 ?(?:-|\u2013|to) ?5\b|(?:/|\bout of) ?5\b", " ", text[:200].casefold())  # the scale is no score
    text = re.sub(r"\A\W*one\W*\Z|\b(?:two|three|four|five)\b", lambda m: str(_ONES.index(re.sub(r"\W", "", m.group()))), text)
    number = r"(-?\d+(?:[.,/]\d+)?)"
    found = (re.search(rf"\b(?:score|rating|grade|answer)(?: is)?(?:[^\w-]|-(?!\d))*{number}", text)
             or re.match(rf"[^\w-]*{number}(?! ?(?:or|to|-) ?\d)", text))
    numbers = [found.group(1)] if found else re.findall(rf"(?<![\w.]){number}", text)
    return int(numbers[0]) if len(numbers) == 1 and numbers[0] in ("1", "2", "3", "4", "5") else None


class _Words:
    """A question's words, for grounding a call's values."""

    def __init__(self, question: str):
        self.raw, self.text = _folded(question), f" {_normal(question)} "
        self.words = set(self.text.split())

    def ground(self, value: Any) -> bool:
        """Whether a value occurs as whole words; booleans and None always do, a list where all of its elements do."""
        if value is None or isinstance(value, bool):
            return True
        if isinstance(value, (list, tuple)):
            return all(self.ground(v) for v in value)
        if isinstance(value, dict):
            return all(self.ground(v) for v in value.values())
        return any(self._holds(v) for v in _variants(value)) or self._holds_symbols(value)

    def _holds(self, words: str) -> bool:
        return f" {words} " in self.text if " " in words else words in self.words

    def _holds_symbols(self, value: Any) -> bool:
        """For a value without a letter or digit, such as + or a currency's sign."""
        return isinstance(value, str) and not _normal(value) and bool(value.strip()) and _folded(value.strip()) in self.raw


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _normal(text: str) -> str:
    """Words with one space between: NFKC, case folded, digits of any script as 0-9, anything but letters, marks and
    numbers a separator, and each letter a word where a script sets no spaces."""
    kept = "".join(c if unicodedata.category(c)[0] in "LM" else str(unicodedata.decimal(c, c)) if c.isnumeric() else " "
                   for c in _folded(text))
    return " ".join(_UNSPACED.sub(r" \1 ", kept).split())


def _variants(value: str | int | float) -> set[str]:
    """The ways a question may write a value: as it is, as a whole number, with commas, in cents, as a word."""
    try:
        text = str(value)
    except ValueError:  # an integer beyond Python's limit of digits
        return set()
    out = {_normal(text)}
    try:
        number = float(text)
    except ValueError:
        number = next((n for n, w in NUMBER_WORDS.items() if w == text.strip().lower()), None)
    if number is None or not math.isfinite(number):
        return out
    if number == int(number):
        number = int(number)
        out.add(NUMBER_WORDS.get(number, ""))
    forms = (f"{number}", f"{number:,}", f"{number:.2f}", f"{number:,.2f}")
    return out | {_normal(form) for form in forms if float(form.replace(",", "")) == number}
