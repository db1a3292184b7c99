"""Tool-R0's self-play: train the Generator, build a curriculum with it, train the Solver on that, again.

Each iteration (arXiv 2602.21320, algorithm 1; the hand-over as in the authors' code, A9):
  1. generator: GRPO; a task earns for form, validity and being solved by the frozen Solver sometimes, not always;
  2. curriculum: the frozen Generator writes candidates; filter, deduplicate, grade by K probes, select, order;
  3. solver: GRPO on these tasks, easy to hard; an answer earns for form and for agreeing with the task's own gold calls;
  4. evaluate: held-out figures. The next iteration goes on from both models.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from toolr0_core import curriculum, rewards
from toolr0_core.config import Config, PhaseConfig
from toolr0_core.evaluation import heldout
from toolr0_core.grpo import Trainer, group_advantages
from toolr0_core.parse import parse_task
from toolr0_core.rng import fold
from toolr0_core.roles import Player, Purpose
from toolr0_core.schema import Completion, Failure, Prompt, Reward, Scored, Task, TaskSpec
from toolr0_core.specs import sample_spec

PHASES = ("generator", "curriculum", "solver", "evaluate")


class SelfPlay:
    """The state of a run: two players, and where it stands."""

    def __init__(self, config: Config, generator: Player, solver: Player, run):
        self.config, self.run = config, run
        self.generator, self.solver = generator, solver
        self.world = generator.world

    # -- 1. Generator ------------------------------------------------------------------------------------------------

    def generator_phase(self, iteration: int) -> None:
        phase = self.config.generator
        if self.config.ablate == "frozen-generator":
            return
        with self.phase_trainer(self.generator, phase, iteration, "generator") as trainer:
            for step in self.run.steps(trainer, "generator", iteration, phase.steps):
                specs = self.specs(iteration, "generator", step, phase.completions // self.config.grpo.group_size)
                asked = self.generator.task_prompts(specs)
                drawn = self.generator.sample(asked, Purpose(iteration, "generator", step), n=self.config.grpo.group_size)
                texts = [[self.generator.text(c) for c in group] for group in drawn]
                scored, extra = self.score_tasks(specs, texts, iteration, step)
                self.learn(trainer, asked, drawn, texts, scored, extra, phase, iteration, "generator", step)

    def score_tasks(self, specs: list[TaskSpec], texts: list[list[str]], iteration: int, step: int):
        """Rewards of what the Generator wrote; only tasks that pass the gates cost probes and judgements."""
        c = self.config.rewards
        flat = [(spec, text) for spec, group in zip(specs, texts) for text in group]
        tasks = [parse_task(text, c.require_think) for _, text in flat]
        probed = [i for i, ((spec, _), task) in enumerate(zip(flat, tasks))
                  if isinstance(task, Task) and rewards.worth_probing(task, spec, c)]
        asked = [tasks[i] for i in probed]
        rates, scores = {}, {}
        if c.difficulty:
            rates = dict(zip(probed, self.solver.success_rates(asked, Purpose(iteration, "probe", step))))
        if c.judge:
            scores = dict(zip(probed, self.solver.judgements(asked, Purpose(iteration, "judge", step))))
        result = [rewards.generator_reward(text, spec, rates.get(i, 0.0) if c.difficulty else None, scores.get(i), c)
                  for i, (spec, text) in enumerate(flat)]
        extra = {f"task_{key}": value for key, value in curriculum.statistics(asked).items()}
        extra |= {"valid": len(probed) / len(flat), "p": _mean(rates.values()),
                  "judge_unread": sum(score is None for score in scores.values())}
        return _regroup(result, texts), extra

    # -- 2. curriculum -----------------------------------------------------------------------------------------------

    def curriculum_phase(self, iteration: int) -> None:
        """Candidates of the frozen Generator, graded by the frozen Solver, in curriculum/iteration_N.jsonl."""
        c = self.config.curriculum
        specs = self.specs(iteration, "synthesis", 0, c.candidates)
        dropped: list[dict[str, Any]] = []
        tasks = []
        for chunk in self.run.chunks(specs, "synthesis", iteration, size=max(256, self.world.size * 64)):
            start = len(tasks) + len(dropped)
            drawn = self.generator.sample(self.generator.task_prompts(chunk), Purpose(iteration, "synthesis", start),
                                          n=1, temperature=c.temperature)
            for spec, (completion,) in zip(chunk, drawn):
                text = self.generator.text(completion)
                task = curriculum.structural_filter(text, spec, c, self.config.rewards)
                if isinstance(task, Failure):
                    dropped.append({"reason": task.reason, "detail": task.detail, "text": text})
                else:
                    tasks.append(task)
        unique = curriculum.deduplicate(tasks, c.near_duplicate)
        kept = {id(task) for task in unique}
        dropped += [{"reason": "duplicate", "task": task.to_json()} for task in tasks if id(task) not in kept]
        graded = []
        for chunk in self.run.chunks(unique, "probes", iteration, size=max(64, self.world.size * 16)):
            rates = self.solver.success_rates(chunk, Purpose(iteration, "verify", len(graded)))
            graded += [curriculum.Candidate(task, p) for task, p in zip(chunk, rates)]
        good = [g for g in graded if g.p > c.min_p]
        dropped += [{"reason": "never solved", "task": g.task.to_json()} for g in graded if g.p <= c.min_p]
        selected = curriculum.select(good, c.keep, fold(self.config.seed, iteration, "select"), c)
        rows = curriculum.order(selected, self.rows_consumed()) if selected else []
        self.run.write_curriculum(iteration, rows, dropped)
        counts = {"candidates": len(specs), "parsed": len(tasks), "unique": len(unique), "verified": len(good),
                  "selected": len(selected), "rows": len(rows), "p": _mean(g.p for g in selected),
                  "buckets": Counter(curriculum.bucket(g.p) for g in selected),
                  "dropped": Counter(d["reason"] for d in dropped)}
        self.run.log("curriculum", iteration, counts | curriculum.statistics([g.task for g in selected]))

    def rows_consumed(self) -> int:
        return self.config.solver.steps * (self.config.solver.completions // self.config.grpo.group_size)

    # -- 3. Solver ---------------------------------------------------------------------------------------------------

    def solver_phase(self, iteration: int) -> None:
        rows = self.run.read_curriculum(iteration)
        if not rows:
            return self.run.skipped(iteration)
        phase, group = self.config.solver, self.config.grpo.group_size
        per_step = phase.completions // group
        with self.phase_trainer(self.solver, phase, iteration, "solver") as trainer:
            for step in self.run.steps(trainer, "solver", iteration, phase.steps):
                tasks = [row.task for row in rows[step * per_step: (step + 1) * per_step]]
                asked = self.solver.answer_prompts(tasks)
                drawn = self.solver.sample(asked, Purpose(iteration, "solver", step), n=group)
                texts = [[self.solver.text(c) for c in answers] for answers in drawn]
                scored = [[rewards.solver_reward(text, task.gold, self.config.rewards) for text in answers]
                          for task, answers in zip(tasks, texts)]
                exact = [self.solver.is_right(c, task.gold) for task, answers in zip(tasks, drawn) for c in answers]
                self.learn(trainer, asked, drawn, texts, scored, {"exact": _mean(exact)}, phase, iteration, "solver", step)

    # -- 4. held-out figures -----------------------------------------------------------------------------------------

    def evaluate_phase(self, iteration: int) -> None:
        """The Solver on the held-out tasks: greedy, and samples at temperature 1; iteration 0 is the base model."""
        rows = self.run.heldout
        if not rows:
            return
        asked = self.solver.answer_prompts([row.task for row in rows])
        texts = {}
        for kind, changes in (("greedy", {"n": 1, "temperature": 0.0}),
                              ("sampled", {"n": self.config.eval.samples, "temperature": 1.0, "top_p": 1.0, "top_k": 0})):
            texts[kind] = []
            for chunk in self.run.chunks(asked, f"held-out, {kind}", iteration, size=max(128, self.world.size * 32)):
                purpose = Purpose(0, f"evaluate {kind}", len(texts[kind]))  # the same draws for every iteration
                texts[kind] += [[self.solver.text(c) for c in group] for group in self.solver.sample(chunk, purpose, **changes)]
        self.run.evaluated(iteration, heldout.score(rows, [g[0] for g in texts["greedy"]], texts["sampled"],
                                                    self.config.rewards))

    # -- shared ------------------------------------------------------------------------------------------------------

    def specs(self, iteration: int, purpose: str, step: int, n: int) -> list[TaskSpec]:
        return [sample_spec(random.Random(fold(self.config.seed, iteration, f"spec {purpose}", step, i)), self.config.specs)
                for i in range(n)]

    def learn(self, trainer: Trainer, asked: list[Prompt], drawn: list[list[Completion]], texts: list[list[str]],
              scored: list[list[Reward]], extra: dict[str, float], phase: PhaseConfig, iteration: int, role: str,
              step: int) -> None:
        """One GRPO step on this step's completions, and its line in the logs."""
        c = self.config
        rows = [Scored(prompt, completion, reward, group) for group, (prompt, completions, earned)
                in enumerate(zip(asked, drawn, scored)) for completion, reward in zip(completions, earned)]
        totals = [row.reward.total for row in rows]
        if c.rewards.shuffle:
            random.Random(fold(c.seed, iteration, f"shuffle {role}", step)).shuffle(totals)
        stats = trainer.step(rows, totals)
        parts = {name: _mean(row.reward.parts[name] for row in rows if name in row.reward.parts)
                 for name in sorted({name for row in rows for name in row.reward.parts})}
        self.run.log_step(role, iteration, step, {"reward": _mean(totals), **parts, **extra, **stats})
        self.run.log_rollouts(role, iteration, step, rows, [text for group in texts for text in group])
