"""From candidates to the rows that training consumes: filter, deduplicate, grade, select, order."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from toolr0_core.config import CurriculumConfig, RewardConfig
from toolr0_core.parse import parse_task
from toolr0_core.rewards import is_placeholder, is_valid, obeys, width
from toolr0_core.schema import Failure, Task, TaskSpec

BUCKETS = ("easy", "medium", "hard")
_TYPES = {"string", "integer", "number", "boolean"}
_BANNED_NAMES = {"tool", "function", "api", "call"}
# what a model answers without tools (the authors' words): always, and where the one call has no more than one argument
_TRIVIAL = re.compile(r"\b(?:capital of|define|explain|summarize|poem|joke)\b", re.IGNORECASE)
_TRIVIAL_ALONE = re.compile(r"\b(?:what|who|when|where)(?:'s| is| are| was| were)\b", re.IGNORECASE)
_DUMMY = re.compile(r"dummy|placeholder", re.IGNORECASE)


@dataclass(frozen=True)
class Candidate:
    """A task and p, the share of the Solver's K samples that solved it."""

    task: Task
    p: float


def structural_filter(text: str, spec: TaskSpec, config: CurriculumConfig, rewards: RewardConfig,
                      shown: Sequence[str] = ()) -> Task | Failure:
    """The task of a Generator's text, or the first rule it breaks; any script is welcome.

    shown: the questions of the prompts' worked examples, which are no new tasks.
    """
    task = parse_task(text, rewards.require_think)
    if isinstance(task, Failure):
        return task
    if repeats(task, shown):
        return Failure("example", "the question of a worked example")
    if is_placeholder(task.question) or width(task.question) < config.min_question:
        return Failure("placeholder", "a question too short or an echo of the prompt")
    if config.drop_trivial and is_trivial(task):
        return Failure("trivial", "a question that needs no tool")
    for tool in task.tools:
        if len(tool.name) <= 2 or tool.name.lower() in _BANNED_NAMES:
            return Failure("bad_menu", f"tool name {tool.name[:40]!r}")
        if len(tool.description) < config.min_description:
            return Failure("bad_menu", f"description of {tool.name[:40]!r} is shorter than {config.min_description}")
        if not tool.parameters or any(s.get("type") not in _TYPES for s in tool.parameters.values()):
            return Failure("bad_menu", f"{tool.name[:40]!r} has no flat typed parameters")
    if not task.gold:
        return Failure("bad_calls", "no call")
    if any(isinstance(value, (list, dict)) for call in task.gold for value in call.arguments.values()):
        return Failure("bad_calls", "an argument that is no plain value")
    if not is_valid(task, rewards):
        return Failure("invalid", "a gold call that its menu or question does not support")
    if config.require_spec and not obeys(task, spec):
        return Failure("off_spec", f"{len(task.tools)} tools and {len(task.gold)} calls")
    return Task(task.question, task.tools, task.gold, spec)


def is_trivial(task: Task) -> bool:
    """Whether a question asks for knowledge or prose instead of a tool, by words that stand in it."""
    alone = len(task.gold) == 1 and len(task.gold[0].arguments) <= 1
    return bool(_TRIVIAL.search(task.question) or (alone and _TRIVIAL_ALONE.search(task.question)))


def repeats(task: Task, shown: Sequence[str]) -> bool:
    """Whether its question is one of those shown but for case, digits, spacing and punctuation."""
    return _words(task.question) in map(_words, shown)


def _words(question: str) -> list[str]:
    return re.findall(r"[^\W_]+", re.sub(r"\d", "0", question.lower()))


def signature(task: Task) -> str:
    """Equal for tasks that differ only in digits, case or spacing of the question, or in argument values."""
    question = re.sub(r"\d", "0", " ".join(task.question.lower().split()))
    tools = "|".join(sorted(f"{t.name}({','.join(sorted(t.parameters))})" for t in task.tools))
    calls = "->".join(f"{c.name}({','.join(sorted(c.arguments))})" for c in task.gold)
    return hashlib.sha1("\x00".join((question, tools, calls)).encode("utf-8", "surrogatepass")).hexdigest()


def quality(task: Task) -> float:
    """Which of several equal tasks to keep (the authors' heuristic)."""
    return (min(1, len(task.question) / 220) + min(1, len(task.gold) / 3) + min(1, len(task.tools) / 4)
            - bool(_DUMMY.search(task.question)))


def deduplicate(tasks: Sequence[Task], near_duplicate: float = 0.85) -> list[Task]:
    """One task per signature, the best of it, in first-seen order; then one per MinHash neighbourhood (1: off)."""
    best: dict[str, Task] = {}
    for task in tasks:
        key = signature(task)
        if key not in best or quality(task) > quality(best[key]):
            best[key] = task
    unique = list(best.values())
    return _drop_near(unique, near_duplicate) if near_duplicate < 1 else unique


def _drop_near(tasks: list[Task], threshold: float) -> list[Task]:
    """Keeps the first of tasks whose shingles' Jaccard similarity reaches the threshold; MinHash only finds whom to ask."""
    from datasketch import MinHash, MinHashLSH

    index, kept, shingles = MinHashLSH(threshold=max(0.4, threshold - 0.2), num_perm=128), [], {}
    for i, task in enumerate(tasks):
        mine = _shingles(task)
        hashed = MinHash(num_perm=128, seed=1)
        hashed.update_batch(list(mine))
        if not any(_similar(mine, shingles[k], threshold) for k in index.query(hashed)):
            index.insert(str(i), hashed)
            shingles[str(i)] = mine
            kept.append(task)
    return kept


def _similar(a: set[bytes], b: set[bytes], threshold: float) -> bool:
    """Whether the Jaccard similarity reaches the threshold."""
    common = len(a & b)
    return common >= threshold * (len(a) + len(b) - common)


def _shingles(task: Task, size: int = 5) -> set[bytes]:
    """Runs of characters of the question and the menu's names, marked with the gold values.

    Near-equal texts with other values are other tasks, for copying the value is what is learned: the mark leaves them
    nothing in common, so that a pool made from one template is compared in linear time.
    """
    values = repr([sorted(map(str, call.arguments.values())) for call in task.gold])
    mark = hashlib.sha1(values.encode("utf-8", "surrogatepass")).digest()[:8]
    text = f"{task.question.lower()} {' '.join(sorted(t.name for t in task.tools))}"
    return {mark + text[j: j + size].encode("utf-8", "surrogatepass") for j in range(max(1, len(text) - size + 1))}


def bucket(p: float, low: float = 0.25, high: float = 0.75) -> str | None:
    """easy (p > high), medium, hard (0 < p < low); None for p = 0, a label nobody confirms."""
    if p <= 0:
        return None
    return "easy" if p > high else "medium" if p >= low else "hard"


def shape(task: Task) -> tuple[int, int]:
    """Calls and tools: what a specification asks for, and what vanishes from a pool unless selection balances it."""
    return len(task.gold), len(task.tools)


def select(candidates: Sequence[Candidate], n: int, seed: int, config: CurriculumConfig | None = None,
           wanted: dict[tuple[int, int], float] | None = None) -> list[Candidate]:
    """Up to n candidates, one at a time: of the shape that lags its share most, then the bucket, then the domain.

    wanted: share of each shape (specs.shape_shares); None, or shape_quotas off, balances none. Where shapes are balanced,
    others come last, and where a number of calls is scarce fewer than n are taken, so that it keeps most of its share
    (`supported`).
    """
    c = config or CurriculumConfig()
    pool = [x for x in candidates if bucket(x.p)]
    random.Random(seed).shuffle(pool)
    wanted = wanted if c.shape_quotas else None
    supply: dict[tuple, dict[str, dict[str, list[Candidate]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for x in pool:
        supply[shape(x.task) if wanted else ()][bucket(x.p)][_domain(x)].append(x)
    shapes, levels = wanted or {(): 1.0}, {"easy": c.easy, "medium": c.medium, "hard": c.hard}
    chosen: list[Candidate] = []
    by_shape, by_level, by_domain = Counter(), Counter(), Counter()
    for _ in range(supported(pool, n, wanted) if wanted else min(len(pool), n)):
        s = max(supply, key=lambda k: (k in shapes, shapes.get(k, 0) * (len(chosen) + 1) - by_shape[k]))
        level = max(supply[s], key=lambda k: levels[k] * (len(chosen) + 1) - by_level[k])
        domain = min(supply[s][level], key=lambda k: by_domain[k])
        x = supply[s][level][domain].pop()
        chosen.append(x)
        for counter, key in ((by_shape, s), (by_level, level), (by_domain, domain)):
            counter[key] += 1
        for tree, key in ((supply[s][level], domain), (supply[s], level), (supply, s)):
            if not tree[key]:
                del tree[key]
    return chosen


def supported(pool: Sequence[Candidate], n: int, wanted: dict[tuple[int, int], float]) -> int:
    """How many of n rows leave each number of calls that occurs with three quarters of its share.

    At least a quarter of what there is, and 16: one lone two-call task must not cost a phase its other rows.
    """
    have, shares = Counter(len(x.task.gold) for x in pool), Counter()
    for (calls, _), share in wanted.items():
        shares[calls] += share
    there_is = min(len(pool), n)
    limits = [int(have[calls] / (0.75 * share)) for calls, share in shares.items() if have[calls]]
    return min(there_is, max(min(limits, default=there_is), there_is // 4, 16))


def _domain(candidate: Candidate) -> str:
    return candidate.task.spec.domain if candidate.task.spec else ""


def order(selected: Sequence[Candidate], n_consumed: int) -> list[Candidate]:
    """Exactly n_consumed rows, easy to hard, every stretch with the domains in their shares, whatever the order they came in;
    a row comes again only when all have come as often. Rows that were never solved (p = 0) have no place and are left out.
    """
    rows = [x for x in selected if bucket(x.p)]
    if not rows:
        return []
    rounds, extra = divmod(n_consumed, len(rows))
    picked = rows * rounds + _spread(rows, lambda x: (bucket(x.p), _domain(x)))[:extra]
    spread = _spread(picked, lambda x: (x.p, _domain(x)))
    return sorted(spread, key=lambda x: (BUCKETS.index(bucket(x.p)), -x.p))  # stable: equal p stay spread


def _spread(rows: Sequence[Candidate], group: Callable[[Candidate], Hashable]) -> list[Candidate]:
    """The rows so that each beginning, and each stretch, holds every group about in its share."""
    groups = defaultdict(list)
    for x in rows:
        groups[group(x)].append(x)
    placed = [((i + 0.5) / len(g), k, x) for k, g in enumerate(groups.values()) for i, x in enumerate(g)]
    return [x for _, _, x in sorted(placed, key=lambda t: t[:2])]


def statistics(tasks: Sequence[Task]) -> dict[str, float]:
    """What collapses first when a Generator games its reward: menu size, calls, arguments, repeated questions."""
    n, calls = max(len(tasks), 1), sum(len(t.gold) for t in tasks)
    return {"menu": sum(len(t.tools) for t in tasks) / n, "two_calls": sum(len(t.gold) > 1 for t in tasks) / n,
            "arguments": sum(len(c.arguments) for t in tasks for c in t.gold) / max(calls, 1),
            "duplicates": 1 - len({signature(t) for t in tasks}) / n if tasks else 0.0}
