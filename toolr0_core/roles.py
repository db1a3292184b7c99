"""What the two models do when they are asked: write tasks, answer them, judge them. All of it is spread over the ranks.

A request's random stream is named by what it is for, (seed, iteration, purpose, step, index), never by where it runs, so
the same run draws the same numbers on one rank or on eight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from toolr0_core import prompts, rewards
from toolr0_core.config import Config
from toolr0_core.distributed import World
from toolr0_core.grpo import Trainer
from toolr0_core.matching import calls_equal
from toolr0_core.model import Model
from toolr0_core.parse import parse_calls
from toolr0_core.presets import new_tokens
from toolr0_core.rng import fold
from toolr0_core.sampler import Sampler, SamplingParams
from toolr0_core.schema import Completion, Prompt, Task, TaskSpec, ToolCall
from toolr0_core.specs import Domain
from toolr0_core.tokenizer import Tokenizer

Request = tuple[list[int], SamplingParams]
ANSWER_END = "</tool_call_answer>"


@dataclass(frozen=True)
class Purpose:
    """Names the random streams of one batch of requests."""

    iteration: int
    name: str
    step: int = 0


class Player:
    """One model with its prompts: renders requests, samples them on all ranks, returns completions in request order.

    `master` holds the trained weights in fp32 where the sampling model is less exact than they are.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, config: Config, world: World, role: str):
        self.model, self.tokenizer, self.config, self.world = model, tokenizer, config, world
        self.sampler = Sampler(model, tokenizer, config.sampler.kv_gib or None, config.sampler.max_sequences)
        self.max_new_tokens = new_tokens(config, role)
        self.prefix = prompts.answer_prefix(config.prompts, role)
        self.master: dict[str, Tensor] | None = None

    # -- weights -----------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """The weights as exact as they are known, on the CPU."""
        return self.master or {name: value.detach().cpu() for name, value in self.model.state_dict().items()}

    def take(self, weights: dict[str, Tensor]) -> None:
        """Goes on from these weights, in place."""
        self.model.load_state_dict(weights)
        self.master = {k: v.clone() for k, v in weights.items()} if self.world.sharded else None

    def keep(self, trainer: Trainer) -> None:
        """Remembers what a trainer of this model has learned."""
        self.master = self.world.full_weights(trainer.trained) if self.world.sharded else None

    # -- requests ----------------------------------------------------------------------------------------------------

    def render(self, messages: list[dict[str, str]], prefix: str = "") -> Prompt:
        text = "\n".join(m["content"] for m in messages)
        return Prompt(tuple(self.tokenizer.render(messages, prefix=prefix)), text)

    def task_prompts(self, specs: Sequence[TaskSpec], domains: dict[str, Domain]) -> list[Prompt]:
        """The Generator's prompts for these specifications."""
        return [self.render(prompts.generator_messages(s, self.config.prompts, domains[s.domain].description), self.prefix)
                for s in specs]

    def answer_prompts(self, tasks: Sequence[Task]) -> list[Prompt]:
        """The Solver's prompts; one layout for training, probes and evaluation."""
        return [self.render(prompts.solver_messages(t.question, t.tools, self.config.prompts), self.prefix) for t in tasks]

    def sample(self, asked: Sequence[Prompt], purpose: Purpose, **changes) -> list[list[Completion]]:
        """n completions of every prompt; changes overrule the sampling parameters of rollouts."""
        s = self.config.sampler
        base = SamplingParams(temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, max_new_tokens=self.max_new_tokens,
                              stop_token_ids=tuple(self.tokenizer.stop_token_ids),
                              stop_strings=(ANSWER_END,) if s.stop_at_answer else ())
        base = replace(base, **changes)
        requests = [(list(p.token_ids), replace(base, seed=fold(self.config.seed, purpose.iteration, purpose.name,
                                                                purpose.step, i))) for i, p in enumerate(asked)]
        parts = _parts(requests, self.world.size)
        drawn = self.world.map_shards(self._generate, [request for _, request in parts], _tokens)
        out: list[list[Completion]] = [[] for _ in asked]
        for (i, _), completions in zip(parts, drawn):
            out[i] += completions
        return out

    def _generate(self, requests: list[Request]) -> list[list[Completion]]:
        return self.sampler.generate([ids for ids, _ in requests], [params for _, params in requests])

    def text(self, completion: Completion) -> str:
        """What the model wrote, with the beginning that was written for it."""
        return self.prefix + (completion.text or "")

    def success_rates(self, tasks: Sequence[Task], purpose: Purpose) -> list[float]:
        """Share of K samples whose calls all equal the gold calls: verification and difficulty in one."""
        c = self.config
        drawn = self.sample(self.answer_prompts(tasks), purpose, n=c.curriculum.probes,
                            temperature=c.curriculum.probe_temperature)
        return [sum(self.is_right(completion, task.gold) for completion in group) / len(group)
                for task, group in zip(tasks, drawn)]

    def is_right(self, completion: Completion, gold: Sequence[ToolCall]) -> bool:
        calls = parse_calls(self.text(completion), self.config.rewards.require_think)
        return isinstance(calls, tuple) and calls_equal(calls, gold, self.config.rewards.rule)

    def judgements(self, tasks: Sequence[Task], purpose: Purpose) -> list[int | None]:
        """Scores 1..5 by this model as judge, None where none can be read."""
        asked = [self.render(prompts.judge_messages(t.question, t.tools, t.gold, self.config.prompts)) for t in tasks]
        drawn = self.sample(asked, purpose, n=1, temperature=0.1, max_new_tokens=16)
        return [rewards.judge_score(group[0].text or "") for group in drawn]


def _tokens(request: Request) -> int:
    """What a request costs at its full length."""
    return len(request[0]) + request[1].n * request[1].max_new_tokens


def _parts(requests: Sequence[Request], ranks: int) -> list[tuple[int, Request]]:
    """Requests with their indices, the samples of a large one in several parts, where too few requests would leave ranks idle:
    none is more than about half of what a rank has to do."""
    fair, parts = sum(map(_tokens, requests)) / ranks, []
    for i, (ids, params) in enumerate(requests):
        count = 1 if ranks == 1 else min(params.n, math.ceil(2 * _tokens((ids, params)) / fair))
        ends = [params.n * k // count for k in range(count + 1)]
        parts += [(i, (ids, replace(params, n=b - a, first=a))) for a, b in zip(ends, ends[1:])]
    return parts
