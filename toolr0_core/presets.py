"""Presets: where the defaults of a run come from. Only this file and assets/ know one model from another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

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
    """The paper's settings: what Config's own defaults are."""
    return Config(preset=name)


def nano() -> Config:
    """The embedded model: minutes on a laptop CPU.

    A falling rate and a KL of 0.04 keep later iterations from wandering: rows go from easy to hard, the hardest have the most
    wrong labels, and at a constant rate without a reference these had the last word.
    """
    return Config(
        preset="nano",
        generator=PhaseConfig(steps=24, completions=96, lr=1.2e-3, max_new_tokens=200),
        solver=PhaseConfig(steps=40, completions=64, lr=5e-4, max_new_tokens=96),
        grpo=GrpoConfig(group_size=8, beta=0.04, schedule="linear", warmup=3, micro_batch_tokens=8192),
        sampler=SamplerConfig(max_new_tokens=200, max_sequences=512, stop_at_answer=True),
        curriculum=CurriculumConfig(candidates=512, again=0.75, keep=256, min_question=8, min_description=0, require_spec=True),
        specs=SpecConfig(domains=str(ASSETS / "domains.json"), multi_turn=0.0, two_calls=0.2,
                         one_call_menu={2: 1, 3: 1, 4: 1}, two_call_menu={3: 1, 4: 1}),
        prompts=PromptConfig(form="compact"),
        rewards=RewardConfig(format_reduce="mean", strict_arguments=True, spec_gate=True, spec_validity=True,
                             validity_gate=True, judge=False, require_think=False),
        eval=EvalConfig(data=str(ASSETS / "heldout.jsonl")))


def smollm2() -> Config:
    """SmolLM2-135M-Instruct: a real instruct model that keeps the formats only by copying: short examples, everyday domains."""
    return Config(
        preset="smollm2-135m",
        iterations=1,
        generator=PhaseConfig(steps=10, completions=16, lr=1e-6, max_new_tokens=112),
        solver=PhaseConfig(steps=10, completions=16, lr=1e-6, max_new_tokens=64),
        grpo=GrpoConfig(group_size=4, micro_batch_tokens=2048),
        sampler=SamplerConfig(max_new_tokens=112, max_sequences=64, temperature=0.8, stop_at_answer=True),
        curriculum=CurriculumConfig(candidates=64, keep=32, temperature=0.5, min_question=12, min_description=0,
                                    shape_quotas=False),
        specs=SpecConfig(domains=str(ASSETS.parent / "everyday.json"), multi_turn=0.0, two_calls=0.0, one_call_menu={1: 1}),
        prompts=PromptConfig(form="compact", generator_examples=2, solver_examples=1, examples="short", begin_answer=True),
        rewards=RewardConfig(require_think=False))


PRESETS: dict[str, Callable[[], Config]] = {
    "nano": nano, "smollm2-135m": smollm2,
    **{name: (lambda name=name: paper(name)) for name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "llama-3.2-3b")}}


Rule = tuple[bool, str, object, str]  # holds, setting, its value, "it has to be ..."
MANY = 10**7  # of anything that is counted
BOUNDS: dict[tuple[float, float], tuple[str, ...]] = {  # beyond them, something overflows, underflows or never ends
    (0, MANY): ("iterations", "generator.steps", "solver.steps", "generator.max_new_tokens", "solver.max_new_tokens",
                "curriculum.min_question", "curriculum.min_description", "grpo.warmup", "sampler.top_k", "eval.limit",
                "prompts.generator_examples", "prompts.solver_examples"),
    (1, MANY): ("generator.completions", "solver.completions", "curriculum.probes", "curriculum.candidates", "curriculum.keep",
                "grpo.updates", "grpo.micro_batch_tokens", "eval.samples", "sampler.max_new_tokens", "sampler.max_sequences"),
    (2, MANY): ("grpo.group_size",),  # an advantage is relative to a group
    (1e-12, 1): ("generator.lr", "solver.lr"),
    (1e-3, 100): ("sampler.temperature", "curriculum.temperature", "curriculum.probe_temperature", "rewards.sigma"),
    (1e-3, 1): ("sampler.top_p", "curriculum.near_duplicate"),
    (0, 1): ("specs.multi_turn", "specs.two_calls", "curriculum.easy", "curriculum.medium", "curriculum.hard",
             "grpo.weight_decay"),
    (0, 100): ("curriculum.again",),
    (1e-6, 10**6): ("grpo.max_grad_norm",),
    (0, 10**6): ("grpo.beta", "grpo.clip_high", *(f"rewards.{name}" for name in (
        "menu_weight", "required_weight", "grounded_weight", "answer_tag", "answer_parses", "answer_calls", "name_weight",
        "keys_weight", "values_weight", "extra_call_penalty")))}


def validate(config: Config) -> None:
    """Raises ValueError, in one sentence, for a setting that cannot work: the value, the rule, the remedy."""
    for ok, name, value, rule in chain(_number_rules(config), _share_rules(config), _word_rules(config)):
        if not ok:
            raise ValueError(f"--{name} is {value!s:.80}; it has to be {rule}")


def _number_rules(c: Config) -> Iterator[Rule]:
    """Settings with bounds, and some that need an explanation."""
    for (low, high), names in BOUNDS.items():
        for name in names:
            yield low <= _get(c, name) <= high, name, _get(c, name), f"from {low} to {high:,}"
    yield (0 <= c.rewards.low <= c.rewards.high <= 1, "rewards.low", c.rewards.low,
           f"between 0 and rewards.high ({c.rewards.high}), which is at most 1")
    kv_gib = c.sampler.kv_gib
    yield kv_gib == 0 or 1e-3 <= kv_gib <= 10**6, "sampler.kv_gib", kv_gib, "0 (what fits) or from 0.001 to 1,000,000"
    for name in ("generator.completions", "solver.completions"):
        yield (_get(c, name) % c.grpo.group_size == 0, name, _get(c, name),
               f"a multiple of grpo.group_size ({c.grpo.group_size})")


def _share_rules(c: Config) -> Iterator[Rule]:
    """Shares, and weights of menu sizes."""
    for name in ("grpo.clip_low", "grpo.adam_beta1", "grpo.adam_beta2", "curriculum.min_p"):
        yield 0 <= _get(c, name) < 1, name, _get(c, name), "in [0, 1)"
    mix = c.curriculum.easy + c.curriculum.medium + c.curriculum.hard
    yield abs(mix - 1) < 1e-6, "curriculum.easy", c.curriculum.easy, f"such that easy + medium + hard is 1, not {mix:g}"
    for name in ("specs.one_call_menu", "specs.two_call_menu"):
        menu = _get(c, name)
        yield (menu and all(1 <= n <= 1000 and 0 <= weight <= 10**6 for n, weight in menu.items()) and any(menu.values()), name,
               menu, "menu sizes from 1 to 1,000 with weights from 0 to 1,000,000, not all 0")


def _word_rules(c: Config) -> Iterator[Rule]:
    """Settings that are one of a few words."""
    words = {"grpo.scale": ("std", "batch", "none"), "grpo.aggregation": ("sequence", "token", "constant"),
             "grpo.schedule": ("linear", "constant"), "prompts.form": ("full", "compact"),
             "prompts.examples": ("full", "short"), "rewards.rule": ("lenient", "strict"),
             "rewards.format_reduce": ("sum", "mean"),
             "dtype": ("", "float32", "bfloat16"), "ablate": ("", "shared-weights", "frozen-generator", "no-difficulty")}
    for name, legal in words.items():
        yield _get(c, name) in legal, name, repr(_get(c, name)), f"one of {', '.join(filter(None, legal))}"


def _get(config: Config, dotted: str) -> Any:
    return attrgetter(dotted)(config)


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
