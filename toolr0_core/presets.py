"""Presets: where the defaults of a run come from. Only this file and assets/ know one model from another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
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
    """The embedded model: minutes on a laptop CPU."""
    return Config(
        preset="nano",
        generator=PhaseConfig(steps=24, completions=96, lr=7e-4, max_new_tokens=200),
        solver=PhaseConfig(steps=40, completions=64, lr=5e-4, max_new_tokens=96),
        grpo=GrpoConfig(group_size=8, beta=0.0, schedule="constant", warmup=3, micro_batch_tokens=8192),
        sampler=SamplerConfig(max_new_tokens=200, max_sequences=512, stop_at_answer=True),
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


Rule = tuple[bool, str, object, str]  # holds, setting, its value, "it has to be ..."


def validate(config: Config) -> None:
    """Raises ValueError, in one sentence, for a setting that cannot work: the value, the rule, the remedy."""
    for ok, name, value, rule in (*_number_rules(config), *_phase_rules(config), *_share_rules(config), *_word_rules(config)):
        if not ok:
            raise ValueError(f"--{name} is {value}; it has to be {rule}")


def _number_rules(c: Config) -> Iterator[Rule]:
    """Settings with a lower bound, and some that need an explanation."""
    yield c.grpo.group_size >= 2, "grpo.group_size", c.grpo.group_size, "at least 2: an advantage is relative to a group"
    yield c.sampler.temperature > 0, "sampler.temperature", c.sampler.temperature, "above 0: rollouts have to differ"
    yield (c.curriculum.probe_temperature > 0, "curriculum.probe_temperature", c.curriculum.probe_temperature,
           "above 0: probes have to differ")
    yield (0 <= c.rewards.low <= c.rewards.high <= 1, "rewards.low", c.rewards.low,
           f"between 0 and rewards.high ({c.rewards.high}), which is at most 1")
    bounds = {
        "above 0": ("rewards.sigma", "curriculum.temperature", "grpo.max_grad_norm"),
        "at least 1": ("curriculum.probes", "curriculum.candidates", "curriculum.keep", "grpo.updates", "eval.samples",
                       "grpo.micro_batch_tokens", "sampler.max_new_tokens", "sampler.max_sequences"),
        "0 or more": ("iterations", "curriculum.again", "curriculum.min_question", "curriculum.min_description", "grpo.beta",
                      "grpo.clip_high", "grpo.weight_decay", "grpo.warmup", "sampler.top_k", "sampler.kv_gib", "eval.limit",
                      "prompts.generator_examples", "prompts.solver_examples", "rewards.extra_call_penalty")}
    for rule, names in bounds.items():
        for name in names:
            value = _get(c, name)
            yield {"above 0": value > 0, "at least 1": value >= 1, "0 or more": value >= 0}[rule], name, value, rule


def _phase_rules(c: Config) -> Iterator[Rule]:
    """Both roles' steps, batches and learning rates."""
    for name in ("generator", "solver"):
        phase = getattr(c, name)
        yield phase.steps >= 0, f"{name}.steps", phase.steps, "0 or more"
        yield phase.lr > 0, f"{name}.lr", phase.lr, "above 0"
        yield phase.max_new_tokens >= 0, f"{name}.max_new_tokens", phase.max_new_tokens, "0 (sampler.max_new_tokens) or more"
        yield (phase.completions > 0 and phase.completions % max(c.grpo.group_size, 1) == 0, f"{name}.completions",
               phase.completions, f"a multiple of grpo.group_size ({c.grpo.group_size})")


def _share_rules(c: Config) -> Iterator[Rule]:
    """Shares, and weights of menu sizes."""
    for name in ("specs.multi_turn", "specs.two_calls", "curriculum.easy", "curriculum.medium", "curriculum.hard"):
        yield 0 <= _get(c, name) <= 1, name, _get(c, name), "in [0, 1]"
    for name in ("sampler.top_p", "curriculum.near_duplicate"):
        yield 0 < _get(c, name) <= 1, name, _get(c, name), "in (0, 1]"
    for name in ("grpo.clip_low", "grpo.adam_beta1", "grpo.adam_beta2", "curriculum.min_p"):
        yield 0 <= _get(c, name) < 1, name, _get(c, name), "in [0, 1)"
    mix = c.curriculum.easy + c.curriculum.medium + c.curriculum.hard
    yield abs(mix - 1) < 1e-6, "curriculum.easy", c.curriculum.easy, f"such that easy + medium + hard is 1, not {mix:g}"
    for name in ("specs.one_call_menu", "specs.two_call_menu"):
        menu = _get(c, name)
        yield (min(menu, default=0) >= 1 and min(menu.values()) >= 0 < sum(menu.values()), name, menu,
               "menu sizes of at least 1 with weights of 0 or more, not all 0")


def _word_rules(c: Config) -> Iterator[Rule]:
    """Settings that are one of a few words."""
    words = {"grpo.scale": ("std", "batch", "none"), "grpo.aggregation": ("sequence", "token", "constant"),
             "grpo.schedule": ("linear", "constant"), "prompts.form": ("full", "compact"),
             "rewards.rule": ("lenient", "strict"), "rewards.format_reduce": ("sum", "mean"),
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
