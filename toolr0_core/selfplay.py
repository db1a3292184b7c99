"""Tool-R0's self-play: train the Generator, build a curriculum with it, train the Solver on that, again.

Each iteration (arXiv 2602.21320, algorithm 1; the hand-over as in its authors' code):
  1. generator: GRPO; a task earns for form, validity and being solved by the frozen Solver sometimes, not always;
  2. curriculum: the frozen Generator writes candidates; filter, deduplicate, grade by K probes, select, order;
  3. solver: GRPO on these tasks, easy to hard; an answer earns for form and for agreeing with the task's own gold calls;
  4. evaluate: held-out figures. The next iteration goes on from both models.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from toolr0_core import checkpoint, curriculum, rewards, specs
from toolr0_core.config import Config
from toolr0_core.evaluation import heldout
from toolr0_core.grpo import Trainer
from toolr0_core.parse import parse_task
from toolr0_core.presets import new_tokens
from toolr0_core.prompts import shown_questions
from toolr0_core.records import PHASES, Position
from toolr0_core.rng import fold
from toolr0_core.roles import Player, Purpose
from toolr0_core.rundir import RunDir, StopRequest
from toolr0_core.schema import Completion, Failure, Prompt, Reward, Scored, Task, TaskSpec
from toolr0_core.weights import export_model


class Interrupted(Exception):
    """The user asked to stop; what is needed to go on is on disk."""


class SelfPlay:
    """A run: two players, where it stands, and its directory."""

    def __init__(self, config: Config, generator: Player, solver: Player, rows: list[heldout.Row], run: RunDir,
                 source: Path, stop: StopRequest):
        self.config, self.heldout, self.run, self.source, self.stop = config, rows, run, source, stop
        self.players = {"generator": generator, "solver": solver}
        self.generator, self.solver, self.world = generator, solver, generator.world
        self.domains, self.shown = specs.load_domains(config.specs.domains), shown_questions(config.prompts)
        self.position, self.optimizer = Position(), {}

    def play(self) -> dict[str, Any]:
        """Every phase from where the run directory says; returns the summary."""
        self._restore()
        while self.position.iteration <= self.config.iterations:
            getattr(self, f"{PHASES[self.position.phase]}_phase")()
            for player in self.players.values():
                player.sampler.release()
            self.position, self.optimizer = self.position.next_phase(), {}
            self._save()
        return self.summary()

    # -- 1. Generator ------------------------------------------------------------------------------------------------

    def generator_phase(self) -> None:
        if self.config.ablate == "frozen-generator":
            return
        group, phase = self.config.grpo.group_size, self.config.generator
        for trainer in self._training("generator"):
            asked_for = self.specs("generator", self.position.step, phase.completions // group)
            asked = self.generator.task_prompts(asked_for, self.domains)
            drawn = self.generator.sample(asked, self.purpose("generator", self.position.step), n=group)
            earned, extra = self.score_tasks(asked_for, drawn)
            self._learn(trainer, asked, drawn, earned, extra)

    def score_tasks(self, asked_for: list[TaskSpec], drawn: list[list[Completion]]) -> tuple[list[Reward], dict[str, float]]:
        """Rewards of what the Generator wrote, and figures; only tasks that pass the gates cost probes and judgements."""
        c, step = self.config.rewards, self.position.step
        texts = [(spec, self.generator.text(x)) for spec, group in zip(asked_for, drawn) for x in group]
        tasks = [parse_task(text, c.require_think) for _, text in texts]
        probed = [i for i, ((spec, _), task) in enumerate(zip(texts, tasks))
                  if isinstance(task, Task) and rewards.worth_probing(task, spec, c)
                  and not curriculum.repeats(task, self.shown)]
        asked = [tasks[i] for i in probed]
        rates = dict(zip(probed, self.solver.success_rates(asked, self.purpose("probe", step)))) if c.difficulty else {}
        scores = dict(zip(probed, self.solver.judgements(asked, self.purpose("judge", step)))) if c.judge else {}
        earned = [rewards.generator_reward(text, spec, rates.get(i, 0.0) if c.difficulty else None, scores.get(i), c)
                  for i, (spec, text) in enumerate(texts)]
        parsed = [(spec, task) for (spec, _), task in zip(texts, tasks) if isinstance(task, Task)]
        extra = {"valid": len(probed) / len(texts), "p": _mean(rates.values()),
                 "obeys": _mean(rewards.obeys(task, spec) for spec, task in parsed),
                 "judge_unread": sum(score is None for score in scores.values())}
        return earned, extra | {f"task_{k}": v for k, v in curriculum.statistics(asked).items()}

    # -- 2. curriculum -----------------------------------------------------------------------------------------------

    def curriculum_phase(self) -> None:
        """Candidates of the frozen Generator, graded by the frozen Solver, in curriculum/iteration_N.jsonl."""
        c, iteration = self.config.curriculum, self.position.iteration
        wanted = specs.shape_shares(self.config.specs) if c.shape_quotas else None
        asked_for = self.specs("synthesis", 0, c.candidates)
        tasks, good, dropped = self.verified(asked_for, [])
        if wanted and c.again:
            more = self.lacking(good, wanted, round(c.again * c.candidates))
            asked_for += more
            for have, new in zip((tasks, good, dropped), self.verified(more, good)):
                have += new
        selected = curriculum.select(good, c.keep, fold(self.config.seed, iteration, "select"), c, wanted)
        solver = self.config.solver
        rows = curriculum.order(selected, solver.steps * (solver.completions // self.config.grpo.group_size))
        self.run.write_curriculum(iteration, rows, dropped)
        figures = {"candidates": len(asked_for), "filtered": len(tasks), "verified": len(good),
                   "selected": len(selected), "rows": len(rows), "p": _mean(g.p for g in selected),
                   "buckets": Counter(curriculum.bucket(g.p) for g in selected),
                   "dropped": Counter(d["reason"] for d in dropped)}
        figures |= curriculum.statistics([g.task for g in selected])
        self.run.append("metrics.jsonl", self.position, [{"iteration": iteration, "phase": "curriculum"} | figures])
        self.run.say(f"{iteration} curriculum    | {len(asked_for)} candidates, {len(tasks)} well-formed and valid, "
                     f"{len(good)} of them different and solved by the Solver, {len(selected)} kept for {len(rows)} rows")
        if not rows:
            why = ", ".join(f"{n} {reason}" for reason, n in figures["dropped"].most_common())
            self.run.say(f"{iteration} curriculum    | no task survived ({why}): the Solver's phase is skipped")

    def verified(self, asked_for: list[TaskSpec], known: list[curriculum.Candidate]
                 ) -> tuple[list[Task], list[curriculum.Candidate], list[dict[str, Any]]]:
        """Tasks that the Generator writes for these specifications and that pass the filter; of them, those that are new
        and that the Solver solves at times; and what was dropped, with reasons."""
        c, old = self.config.curriculum, [g.task for g in known]
        tasks, dropped = self.synthesise(asked_for, len(known))
        unique = {id(task) for task in curriculum.deduplicate([*old, *tasks], c.near_duplicate)}
        graded = self.grade([task for task in tasks if id(task) in unique], len(known))
        good = [g for g in graded if g.p > c.min_p]
        dropped += [{"reason": "duplicate", "task": task.to_json()} for task in tasks if id(task) not in unique]
        dropped += [{"reason": "never solved", "p": g.p, "task": g.task.to_json()} for g in graded if g.p <= c.min_p]
        return tasks, good, dropped

    def lacking(self, good: list[curriculum.Candidate], wanted: dict[tuple[int, int], float], n: int) -> list[TaskSpec]:
        """n more specifications, of the shapes that are short of their share of what could be kept."""
        have, goal = Counter(curriculum.shape(g.task) for g in good), min(self.config.curriculum.keep, len(good))
        gaps = {s: max(0.0, share * goal - have[s]) for s, share in wanted.items()}
        if not any(gaps.values()):
            return []
        shapes = random.Random(fold(self.config.seed, self.position.iteration, "lacking")).choices(
            list(gaps), list(gaps.values()), k=n)
        return [replace(spec, n_calls=calls, n_tools=tools, context="single_turn")
                for spec, (calls, tools) in zip(self.specs("synthesis again", 0, n), shapes)]

    def synthesise(self, asked_for: list[TaskSpec], step: int) -> tuple[list[Task], list[dict[str, Any]]]:
        """The tasks that pass the structural filter, and what does not, with reasons."""
        c, tasks, dropped = self.config.curriculum, [], []
        for part in self.run.chunks(list(enumerate(asked_for)), "synthesis", 128 * self.world.size):
            self._check_stop()
            asked = self.generator.task_prompts([spec for _, spec in part], self.domains)
            drawn = self.generator.sample(asked, self.purpose(f"synthesis {step}", part[0][0]), n=1,
                                          temperature=c.temperature)
            for (_, spec), (completion,) in zip(part, drawn):
                text = self.generator.text(completion)
                task = curriculum.structural_filter(text, spec, c, self.config.rewards, self.shown)
                if isinstance(task, Failure):
                    dropped.append({"reason": task.reason, "detail": task.detail, "text": text})
                else:
                    tasks.append(task)
        return tasks, dropped

    def grade(self, tasks: list[Task], step: int) -> list[curriculum.Candidate]:
        """Tasks with the share of the frozen Solver's K samples that agree with their gold calls."""
        graded = []
        for part in self.run.chunks(list(enumerate(tasks)), "probes", 64 * self.world.size):
            self._check_stop()
            rates = self.solver.success_rates([task for _, task in part], self.purpose(f"verify {step}", part[0][0]))
            graded += [curriculum.Candidate(task, p) for (_, task), p in zip(part, rates)]
        return graded

    # -- 3. Solver ---------------------------------------------------------------------------------------------------

    def solver_phase(self) -> None:
        rows = self.run.read_curriculum(self.position.iteration)
        if not rows:
            return
        group, phase = self.config.grpo.group_size, self.config.solver
        per_step = phase.completions // group
        for trainer in self._training("solver"):
            start = self.position.step * per_step
            tasks = [row.task for row in rows[start: start + per_step]]
            asked = self.solver.answer_prompts(tasks)
            drawn = self.solver.sample(asked, self.purpose("solver", self.position.step), n=group)
            answers = [(task, completion) for task, group_ in zip(tasks, drawn) for completion in group_]
            earned = [rewards.solver_reward(self.solver.text(x), task.gold, self.config.rewards) for task, x in answers]
            exact = _mean(self.solver.is_right(x, task.gold) for task, x in answers)
            self._learn(trainer, asked, drawn, earned, {"exact": exact})

    # -- 4. held-out figures -----------------------------------------------------------------------------------------

    def evaluate_phase(self) -> None:
        """The Solver on the held-out tasks, greedily and at temperature 1, with the same draws in every iteration."""
        iteration = self.position.iteration
        if self.heldout:
            asked = self.solver.answer_prompts([row.task for row in self.heldout])
            greedy = self._answers(asked, "greedy", n=1, temperature=0.0)
            sampled = self._answers(asked, "sampled", n=self.config.eval.samples, temperature=1.0, top_p=1.0, top_k=0)
            per_row = heldout.outcomes(self.heldout, [texts[0] for texts in greedy], sampled, self.config.rewards)
            self.run.write_evaluation(iteration, per_row)
            figures = heldout.summarise(per_row)
            self.run.append("metrics.jsonl", self.position, [{"iteration": iteration, "phase": "evaluate"} | figures])
            shown = " ".join(f"{name} {figures[name]['value']:.3f}" for name in heldout.FIGURES)
            self.run.say(f"{iteration} evaluate      | {shown} (n = {figures['n']})")
        if iteration:
            for role, player in self.players.items():
                weights = player.weights()
                if self.run.writes:
                    export_model(weights, player.model.config, self.source, self.run.out / "hf" / role,
                                 player.model.embed_tokens.weight.dtype)

    def _answers(self, asked: list[Prompt], what: str, **changes) -> list[list[str]]:
        texts: list[list[str]] = []
        for part in self.run.chunks(asked, f"held-out, {what}", 64 * self.world.size):
            self._check_stop()
            drawn = self.solver.sample(part, Purpose(0, f"evaluate {what}", len(texts)), **changes)
            texts += [[self.solver.text(completion) for completion in group] for group in drawn]
        return texts

    def summary(self) -> dict[str, Any]:
        """Base, iterations and gains over the base with paired intervals; which iteration is best by avg8."""
        found = [(i, self.run.read_evaluation(i)) for i in range(self.config.iterations + 1)]
        found = [(i, rows) for i, rows in found if rows]
        figures = [{"iteration": i} | heldout.summarise(rows) | ({"gain": heldout.gains(found[0][1], rows)} if i else {})
                   for i, rows in found]
        skipped = [i for i in range(1, self.config.iterations + 1) if not self.run.read_curriculum(i)]
        out = {"base": figures[0] if figures else None, "iterations": figures[1:], "final": figures[-1] if figures else None,
               "best": max(figures, key=lambda f: f["avg8"]["value"])["iteration"] if figures else None,
               "skipped_solver_phases": skipped, "seconds": time.time() - self.run.started}
        self.run.write_summary(out)
        return out

    # -- shared ------------------------------------------------------------------------------------------------------

    def purpose(self, name: str, step: int) -> Purpose:
        return Purpose(self.position.iteration, name, step)

    def specs(self, purpose: str, step: int, n: int) -> list[TaskSpec]:
        streams = [fold(self.config.seed, self.position.iteration, f"spec {purpose}", step, i) for i in range(n)]
        return [specs.sample_spec(random.Random(s), self.config.specs, self.domains) for s in streams]

    def _training(self, role: str) -> Iterator[Trainer]:
        """A trainer for this role's phase, once for each step that is left; afterwards the role keeps what was learned."""
        phase, player = getattr(self.config, role), self.players[role]
        if self.config.ablate == "shared-weights":
            other = self.players["solver" if role == "generator" else "generator"]
            player.take(other.weights())
        trainer = Trainer(player.model, self.config.grpo, self.world, phase.lr, phase.steps, self.config.sampler.temperature,
                          new_tokens(self.config, role), player.master)
        if self.optimizer:
            trainer.load_state(self.optimizer, self.position.step)
        self.began = time.time(), self.position.step
        for step in range(self.position.step, phase.steps):
            self.position = Position(self.position.iteration, self.position.phase, step)
            yield trainer
            if self.world.any(self.stop.requested):
                self.position = Position(self.position.iteration, self.position.phase, step + 1)
                player.keep(trainer)
                self._save(trainer)
                raise Interrupted
        player.keep(trainer)

    def _learn(self, trainer: Trainer, asked: list[Prompt], drawn: list[list[Completion]], earned: list[Reward],
               extra: dict[str, float]) -> None:
        """One GRPO step on this step's completions, and its lines in the logs."""
        c, role = self.config, PHASES[self.position.phase]
        pairs = [(group, prompt, completion) for group, (prompt, completions) in enumerate(zip(asked, drawn))
                 for completion in completions]
        rows = [Scored(prompt, completion, reward, group) for (group, prompt, completion), reward in zip(pairs, earned)]
        totals = [reward.total for reward in earned]
        if c.rewards.shuffle:
            random.Random(fold(c.seed, self.position.iteration, f"shuffle {role}", self.position.step)).shuffle(totals)
        stats = trainer.step(rows, totals)
        parts = {name: _mean(r.parts[name] for r in earned if name in r.parts) for r in earned[:1] for name in r.parts}
        (began, first), step, steps = self.began, self.position.step, getattr(c, role).steps
        left = (time.time() - began) / (step + 1 - first) * (steps - step - 1)
        self.run.log_step(self.position, steps, left, {"reward": _mean(totals)} | parts | extra | stats)
        self.run.append("rollouts.jsonl", self.position, [
            {"group": row.group, "prompt": row.prompt.text, "text": self.players[role].text(row.completion),
             "finish": row.completion.finish_reason, "reward": total} | row.reward.parts for row, total in zip(rows, totals)])

    def _check_stop(self) -> None:
        """Between the chunks of a phase that starts over on resume."""
        if self.world.any(self.stop.requested):
            self._save()
            raise Interrupted

    def _save(self, trainer: Trainer | None = None) -> None:
        tensors: dict[str, Tensor] = {f"{role}/{k}": v for role, p in self.players.items() for k, v in p.weights().items()}
        if trainer:
            tensors |= {f"optimizer/{k}": v for k, v in trainer.state().items()}
        if self.run.writes:
            at = self.position
            checkpoint.save(self.run.out / "checkpoints", at.name, tensors, {"at": [at.iteration, at.phase, at.step]})
        self.world.barrier()

    def _restore(self) -> None:
        found = checkpoint.latest(self.run.out / "checkpoints", lambda state: Position.read(state["at"]))
        if found:
            tensors, self.position = found
            for role, player in self.players.items():
                player.take(_under(tensors, role))
            self.optimizer = _under(tensors, "optimizer")
            self.run.say(f"going on at iteration {self.position.iteration}, {PHASES[self.position.phase]}, "
                         f"step {self.position.step}")
        self.run.forget_from(self.position)


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix + "/"): v for k, v in tensors.items() if k.startswith(prefix + "/")}


def _mean(values: Iterable[float]) -> float:
    values = [float(v) for v in values]
    return sum(values) / len(values) if values else 0.0
