"""Every setting with its default; presets are functions that return one Config. No torch here.

The defaults are the paper's (arXiv 2602.21320), or those of its authors' code where the paper is silent.
"""

from __future__ import annotations

from dataclasses import dataclass, field


def option(default, help: str):
    """A dataclass field with its line of --help; mutable defaults are copied per instance."""
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class SpecConfig:
    """Task specifications."""

    domains: str = option("", "JSON file {name: {\"weight\": w, \"description\": text}}; empty: the built-in domains")
    multi_turn: float = option(0.1, "share of multi-turn contexts")
    two_calls: float = option(0.2, "share of single-turn tasks that ask for two calls")
    one_call_menu: dict = option({2: 0.4 / 3, 3: 0.4 / 3, 4: 0.4 / 3, 5: 0.15, 6: 0.15, 7: 0.15, 8: 0.15},
                                 "menu size -> weight, tasks of one call")
    two_call_menu: dict = option({3: 0.3, 4: 0.4, 5: 0.3}, "menu size -> weight, tasks of two calls")


@dataclass(frozen=True)
class PromptConfig:
    """Prompt texts."""

    form: str = option("full", "full: the paper's prompts; compact: short ones for small models")
    generator_examples: int = option(0, "worked examples before the Generator's turn, as chat turns")
    solver_examples: int = option(0, "worked examples before the Solver's turn, as chat turns")
    examples: str = option("full", "full: worked examples that think; short: one tool, one argument, no thinking, for models "
                           "too small to keep more in form")
    begin_answer: bool = option(False, "begin both roles' answers for the model: <think>, or what short examples begin with")


@dataclass(frozen=True)
class RewardConfig:
    """Every constant of the Generator's and the Solver's rewards."""

    format_reduce: str = option("sum", "the Generator's three format indicators: sum (paper) or mean (code)")
    menu_weight: float = option(0.4, "validity: every gold call names a tool of the menu")
    required_weight: float = option(0.4, "validity: every required argument is given")
    grounded_weight: float = option(0.2, "validity: every argument value occurs in the question")
    strict_arguments: bool = option(False, "gold calls must give exactly the tool's parameters")
    spec_gate: bool = option(False, "the difficulty term needs the asked menu size and number of calls")
    spec_validity: bool = option(False, "and so does validity: without them it is 0")
    validity_gate: bool = option(False, "the difficulty term needs full validity")
    difficulty: bool = option(True, "use the difficulty term; off is the ablation no-difficulty")
    low: float = option(0.25, "lower edge of the band of success rates that earns 1")
    high: float = option(0.75, "upper edge of that band")
    sigma: float = option(0.12, "width of the Gaussian outside the band")
    judge: bool = option(True, "score tasks with the frozen Solver as judge (the semantic term)")
    require_think: bool = option(True, "an answer without a think block earns no accuracy")
    answer_tag: float = option(0.3, "Solver format: a non-empty answer block")
    answer_parses: float = option(0.3, "Solver format: the relaxed loader reads it")
    answer_calls: float = option(0.4, "Solver format: at least one call, or none where none is right")
    name_weight: float = option(0.2, "accuracy of a call: its name")
    keys_weight: float = option(0.3, "accuracy of a call: F1 of its argument names")
    values_weight: float = option(0.5, "accuracy of a call: share of equal values")
    extra_call_penalty: float = option(0.25, "accuracy is divided by 1 + this per surplus call")
    rule: str = option("lenient", "equality of values: lenient or strict")
    accuracy: bool = option(True, "use the accuracy term; off is the control that rewards format alone")
    shuffle: bool = option(False, "a control: deal the rewards of a step out at random")


@dataclass(frozen=True)
class CurriculumConfig:
    """Synthesis, filter, verification, selection."""

    candidates: int = option(10_000, "tasks synthesised per iteration")
    keep: int = option(2_000, "tasks selected per iteration")
    probes: int = option(8, "Solver samples per task that verify it and measure its difficulty")
    temperature: float = option(0.7, "sampling temperature of synthesis")
    probe_temperature: float = option(0.7, "sampling temperature of probes")
    easy: float = option(0.2, "share of easy tasks (p > 0.75)")
    medium: float = option(0.5, "share of medium tasks")
    hard: float = option(0.3, "share of hard tasks (0 < p < 0.25)")
    min_p: float = option(0.0, "drop tasks whose success rate is not above this")
    min_question: int = option(25, "fewest characters of a question; Chinese, Japanese and Korean ones count twice")
    min_description: int = option(5, "fewest characters of a tool's description")
    drop_trivial: bool = option(True, "drop questions that need no tool: define, explain, a poem, one-word lookups")
    require_spec: bool = option(False, "drop tasks that miss the asked menu size or number of calls")
    shape_quotas: bool = option(True, "balance menu sizes and numbers of calls in selection")
    again: float = option(0.0, "more candidates, as a share, of the shapes that the first ones leave short")
    near_duplicate: float = option(0.85, "MinHash Jaccard similarity over which two tasks are one")


@dataclass(frozen=True)
class SamplerConfig:
    """Sampling during training."""

    max_new_tokens: int = option(2048, "length limit of a completion")
    max_sequences: int = option(256, "sequences decoded at once on a rank")
    kv_gib: float = option(0.0, "memory for keys and values in GiB; 0: nine tenths of what is free")
    temperature: float = option(1.0, "temperature of rollouts")
    top_p: float = option(1.0, "nucleus of rollouts")
    top_k: int = option(0, "top-k of rollouts; 0: off")
    stop_at_answer: bool = option(False, "end a completion at </tool_call_answer>, for models that do not stop")


@dataclass(frozen=True)
class GrpoConfig:
    """The algorithm (GRPO, arXiv 2402.03300) and its optimiser."""

    group_size: int = option(4, "completions per prompt")
    beta: float = option(0.001, "weight of the KL term; 0: no reference model")
    clip_low: float = option(0.2, "ratio may fall to 1 - this")
    clip_high: float = option(0.2, "ratio may rise to 1 + this")
    scale: str = option("std", "advantages divided by: std (of the group), batch, none")
    aggregation: str = option("sequence", "mean of token losses: sequence, token, constant")
    updates: int = option(1, "optimiser steps per batch of rollouts")
    mask_truncated: bool = option(False, "leave completions that hit the length limit out of the loss")
    max_grad_norm: float = option(1.0, "gradient clipping")
    weight_decay: float = option(0.0, "AdamW weight decay")
    adam_beta1: float = option(0.9, "AdamW beta 1")
    adam_beta2: float = option(0.999, "AdamW beta 2")
    schedule: str = option("linear", "learning rate: linear (to 0) or constant")
    warmup: int = option(0, "steps of linear warm-up")
    micro_batch_tokens: int = option(16_384, "tokens of one forward and backward on a rank")
    checkpointing: bool = option(False, "recompute activations in the backward pass")


@dataclass(frozen=True)
class PhaseConfig:
    """One role's training phase."""

    steps: int = option(50, "optimiser steps per iteration")
    completions: int = option(24, "completions per step over all ranks")
    lr: float = option(1e-6, "learning rate")
    max_new_tokens: int = option(0, "length limit of this role; 0: sampler.max_new_tokens")


@dataclass(frozen=True)
class EvalConfig:
    """The held-out figures of base and every iteration."""

    data: str = option("", "held-out tasks, uniform JSONL; empty: the preset's, if it ships some")
    limit: int = option(0, "use the first rows only; 0: all")
    samples: int = option(8, "samples per task at temperature 1 (avg8, pass8)")


@dataclass(frozen=True)
class Config:
    """A whole run."""

    preset: str = option("nano", "where the other defaults come from")
    model: str = option("", "directory of the base model; empty: the preset's")
    out: str = option("", "run directory")
    seed: int = option(0, "names every random stream of the run")
    iterations: int = option(3, "rounds of Generator, curriculum, Solver")
    ablate: str = option("", "shared-weights, frozen-generator or no-difficulty")
    dtype: str = option("", "float32 or bfloat16; empty: bfloat16 on GPUs, float32 on CPUs")
    generator: PhaseConfig = field(default_factory=PhaseConfig)
    solver: PhaseConfig = field(default_factory=lambda: PhaseConfig(completions=32))
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    specs: SpecConfig = field(default_factory=SpecConfig)
    prompts: PromptConfig = field(default_factory=PromptConfig)
    rewards: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
