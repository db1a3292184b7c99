"""Presets: where the defaults of a run come from. Only this file and assets/ know one model from another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from toolr0_core.config import (
    Config,
    CurriculumConfig,
    EvalConfig,
    GrpoConfig,
    PhaseConfig,
    PromptConfig,
    RewardConfig,
    SamplerConfig,
    SpecConfig,
)

ASSETS = Path(__file__).parent / "assets" / "nano"


def paper(name: str) -> Config:
    """The paper's settings (A6, A7; section 0): what Config's own defaults are."""
    return Config(preset=name)


def nano() -> Config:
    """The embedded model: minutes on a laptop CPU."""
    return Config(
        preset="nano",
        generator=PhaseConfig(steps=24, completions=96, lr=7e-4, max_new_tokens=200),
        solver=PhaseConfig(steps=40, completions=64, lr=5e-4, max_new_tokens=96),
        grpo=GrpoConfig(group_size=8, beta=0.0, schedule="constant", warmup=3, micro_batch_tokens=8192),
        sampler=SamplerConfig(max_new_tokens=200, max_sequences=512),
        curriculum=CurriculumConfig(candidates=512, again=0.75, keep=256, min_question=8, min_description=0, require_spec=True),
        specs=SpecConfig(domains=str(ASSETS / "domains.json"), multi_turn=0.0, two_calls=0.2,
                         one_call_menu={2: 1, 3: 1, 4: 1}, two_call_menu={3: 1, 4: 1}),
        prompts=PromptConfig(form="compact"),
        rewards=RewardConfig(format_reduce="mean", strict_arguments=True, spec_gate=True, spec_validity=True,
                             validity_gate=True, judge=False, require_think=False),
        eval=EvalConfig(data=str(ASSETS / "heldout.jsonl")))


def smollm2() -> Config:
    """SmolLM2-135M-Instruct: a real instruct model that never uses the formats without worked examples."""
    return Config(
        preset="smollm2-135m",
        iterations=1,
        generator=PhaseConfig(steps=10, completions=16, lr=1e-6, max_new_tokens=320),
        solver=PhaseConfig(steps=10, completions=16, lr=1e-6, max_new_tokens=96),
        grpo=GrpoConfig(group_size=4, micro_batch_tokens=2048),
        sampler=SamplerConfig(max_new_tokens=320, max_sequences=64, temperature=0.8, stop_at_answer=True),
        curriculum=CurriculumConfig(candidates=64, keep=32, min_question=12, shape_quotas=False),
        specs=SpecConfig(multi_turn=0.0, two_calls=0.0, one_call_menu={2: 1}),
        prompts=PromptConfig(form="compact", generator_examples=2, solver_examples=1, begin_answer=True),
        rewards=RewardConfig(require_think=False))


PRESETS: dict[str, Callable[[], Config]] = {
    "nano": nano, "smollm2-135m": smollm2,
    **{name: (lambda name=name: paper(name)) for name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "llama-3.2-3b")}}


def validate(config: Config) -> None:
    """Raises ValueError, in one sentence, for a number that cannot work: the value, the rule, the remedy."""
    c = config
    rules = [
        (c.grpo.group_size >= 2, "grpo.group_size", c.grpo.group_size, "at least 2: an advantage is relative to a group"),
        (c.iterations >= 0, "iterations", c.iterations, "0 or more"),
        (0 <= c.rewards.low <= c.rewards.high <= 1, "rewards.low", c.rewards.low,
         f"between 0 and rewards.high ({c.rewards.high}), which is at most 1"),
        (c.rewards.sigma > 0, "rewards.sigma", c.rewards.sigma, "above 0"),
        (c.curriculum.probes >= 1, "curriculum.probes", c.curriculum.probes, "at least 1"),
        (c.curriculum.candidates >= 1, "curriculum.candidates", c.curriculum.candidates, "at least 1"),
        (c.curriculum.keep >= 1, "curriculum.keep", c.curriculum.keep, "at least 1"),
        (0 < c.curriculum.near_duplicate <= 1, "curriculum.near_duplicate", c.curriculum.near_duplicate, "in (0, 1]"),
        (abs(c.curriculum.easy + c.curriculum.medium + c.curriculum.hard - 1) < 1e-6, "curriculum.easy", c.curriculum.easy,
         "such that easy + medium + hard is 1"),
        (c.grpo.beta >= 0, "grpo.beta", c.grpo.beta, "0 or more"),
        (0 <= c.grpo.clip_low < 1, "grpo.clip_low", c.grpo.clip_low, "in [0, 1)"),
        (c.grpo.clip_high >= 0, "grpo.clip_high", c.grpo.clip_high, "0 or more"),
        (c.grpo.updates >= 1, "grpo.updates", c.grpo.updates, "at least 1"),
        (c.sampler.temperature > 0, "sampler.temperature", c.sampler.temperature, "above 0: rollouts have to differ"),
        (0 < c.sampler.top_p <= 1, "sampler.top_p", c.sampler.top_p, "in (0, 1]"),
        (c.sampler.top_k >= 0, "sampler.top_k", c.sampler.top_k, "0 or more"),
        (c.sampler.max_new_tokens >= 1, "sampler.max_new_tokens", c.sampler.max_new_tokens, "at least 1"),
        (c.sampler.max_sequences >= 1, "sampler.max_sequences", c.sampler.max_sequences, "at least 1"),
        (c.eval.samples >= 1, "eval.samples", c.eval.samples, "at least 1"),
        (0 <= c.specs.multi_turn <= 1, "specs.multi_turn", c.specs.multi_turn, "in [0, 1]"),
        (0 <= c.specs.two_calls <= 1, "specs.two_calls", c.specs.two_calls, "in [0, 1]"),
    ]
    for name, phase in (("generator", c.generator), ("solver", c.solver)):
        rules += [
            (phase.steps >= 0, f"{name}.steps", phase.steps, "0 or more"),
            (phase.lr > 0, f"{name}.lr", phase.lr, "above 0"),
            (phase.completions > 0 and phase.completions % max(c.grpo.group_size, 1) == 0, f"{name}.completions",
             phase.completions, f"a multiple of grpo.group_size ({c.grpo.group_size})")]
    words = [("grpo.scale", c.grpo.scale, ("std", "batch", "none")),
             ("grpo.aggregation", c.grpo.aggregation, ("sequence", "token", "constant")),
             ("grpo.schedule", c.grpo.schedule, ("linear", "constant")),
             ("prompts.form", c.prompts.form, ("full", "compact")),
             ("rewards.rule", c.rewards.rule, ("lenient", "strict")),
             ("rewards.format_reduce", c.rewards.format_reduce, ("sum", "mean")),
             ("dtype", c.dtype, ("", "float32", "bfloat16")),
             ("ablate", c.ablate, ("", "shared-weights", "frozen-generator", "no-difficulty"))]
    rules += [(value in legal, name, repr(value), f"one of {', '.join(filter(None, legal))}") for name, value, legal in words]
    for ok, name, value, rule in rules:
        if not ok:
            raise ValueError(f"--{name} is {value}; it has to be {rule}")


def resolve(config: Config) -> Config:
    """The config with what its ablation changes in other settings."""
    if config.ablate == "no-difficulty":
        return replace(config, rewards=replace(config.rewards, difficulty=False))
    return config


def new_tokens(config: Config, role: str) -> int:
    """The length limit of a role's completions."""
    return getattr(config, role).max_new_tokens or config.sampler.max_new_tokens


def check_budget(config: Config, role: str, prompt_tokens: int) -> None:
    """Raises ValueError where a micro-batch cannot hold one prompt with one completion of full length."""
    longest = prompt_tokens + new_tokens(config, role)
    if config.grpo.micro_batch_tokens < longest:
        raise ValueError(f"--grpo.micro_batch_tokens is {config.grpo.micro_batch_tokens}; the {role}'s longest sequence is "
                         f"{longest} tokens ({prompt_tokens} of prompt), so it has to be at least that")
