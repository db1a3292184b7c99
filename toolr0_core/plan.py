"""What --dry-run prints: the arithmetic of a step, memory, and the first prompt of each role. No weights are read."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from toolr0_core import prompts, specs
from toolr0_core.config import Config
from toolr0_core.evaluation.heldout import Row
from toolr0_core.kv_cache import PAGE_SIZE, bytes_per_token
from toolr0_core.model import Model, ModelConfig
from toolr0_core.presets import check_budget, new_tokens
from toolr0_core.prompts import GENERATOR_EXAMPLES
from toolr0_core.rng import fold
from toolr0_core.schema import Tool
from toolr0_core.tokenizer import Tokenizer
from toolr0_core.weights import read_config


def show_plan(config: Config, source: Path, tokenizer: Tokenizer, world_size: int | None = None) -> None:
    """Prints the plan for this many ranks."""
    world = world_size or int(os.environ.get("WORLD_SIZE", 1))
    messages, lengths = first_prompts(config), check_prompts(config, tokenizer)
    print(f"preset {config.preset}, model {source}, seed {config.seed}, {config.iterations} iterations, "
          f"{counted(world, 'rank')}")
    for role, length in lengths.items():
        phase, group = getattr(config, role), config.grpo.group_size
        groups = phase.completions // group
        print(f"{role}: {phase.steps} steps of {phase.completions} completions = {groups} prompts x {group}, "
              f"{groups / world:.1f} prompts a rank; prompts of about {length} tokens, up to {new_tokens(config, role)} new; "
              f"lr {phase.lr:g}, {config.grpo.schedule}")
    c = config.curriculum
    solver_rows = config.solver.steps * (config.solver.completions // config.grpo.group_size)
    more = f" and up to {round(c.again * c.candidates)} of scarce shapes" if c.again and c.shape_quotas else ""
    print(f"curriculum: {c.candidates} candidates{more}, {c.probes} probes each, up to {c.keep} kept; "
          f"the Solver consumes {solver_rows} rows")
    for line in memory(config, source, world, max(lengths.values())):
        print(line)
    for role, turns in messages.items():
        print(f"\n--- first prompt of the {role} ---")
        for turn in turns:
            print(f"[{turn['role']}] {turn['content']}")


def counted(n: int, what: str) -> str:
    """1 rank, 3 ranks"""
    return f"{n} {what}{'s' * (n != 1)}"


def first_prompts(config: Config) -> dict[str, list[dict[str, str]]]:
    return {"generator": first_generator_prompt(config), "solver": first_solver_prompt(config)}


def check_prompts(config: Config, tokenizer: Tokenizer) -> dict[str, int]:
    """Tokens of each role's first prompt. Raises ValueError for bad domains, or where a sequence is over the budget."""
    lengths = {role: len(tokenizer.render(messages, prefix=prompts.answer_prefix(config.prompts, role)))
               for role, messages in first_prompts(config).items()}
    for role, length in lengths.items():
        check_budget(config, role, length)
    return lengths


def check_heldout(config: Config, rows: Sequence[Row], source: Path, tokenizer: Tokenizer) -> None:
    """Raises ValueError for a held-out task that leaves the model no place for an answer."""
    positions, new = read_config(source).max_position_embeddings, new_tokens(config, "solver")
    prefix = prompts.answer_prefix(config.prompts, "solver")
    for row in rows:
        asked = prompts.solver_messages(row.task.question, row.task.tools, config.prompts)
        length = len(tokenizer.render(asked, prefix=prefix))
        if length + new > positions:
            raise ValueError(f"eval.data {config.eval.data}: row {row.id[:80]!r} has a prompt of {length} tokens; the model "
                             f"has {positions} positions, {new} of them for the answer, so shorten that row or leave it out")


def memory(config: Config, source: Path, world: int, prompt_tokens: int) -> list[str]:
    """Per rank: two sampling models, fp32 master weights with Adam's moments and gradients over the ranks, keys and values."""
    architecture = read_config(source)
    count, dtype, sharded = _size(config, architecture, world)
    s = config.sampler
    tokens = s.max_sequences * (prompt_tokens // max(config.grpo.group_size, 1) + s.max_new_tokens + PAGE_SIZE)
    parts = {
        "two models that sample": 2 * count * dtype.itemsize,
        "KL reference": count * dtype.itemsize if config.grpo.beta else 0,
        "master weights, gradients, Adam": (16 if sharded else 12) * count // world,
        "keys and values": min(bytes_per_token(architecture, dtype) * tokens, (s.kv_gib or math.inf) * 2**30),
        "activations and logits": config.grpo.micro_batch_tokens * dtype.itemsize * (
            architecture.num_hidden_layers * (12 * architecture.hidden_size + 4 * architecture.intermediate_size))
        + 3 * 4 * min(config.grpo.micro_batch_tokens * architecture.vocab_size, 2**28 // 4)}
    lines = [f"memory a rank, estimated, for {count:,} parameters in {str(dtype).removeprefix('torch.')}:"]
    lines += [f"  {size / 2**30:8.2f} GiB  {name}" for name, size in parts.items() if size]
    return [*lines, f"  {sum(parts.values()) / 2**30:8.2f} GiB  in all"]


def checkpoint_bytes(config: Config, source: Path, world: int) -> int:
    """Both players' weights as a checkpoint keeps them: exact where training is sharded, else as they sample."""
    count, dtype, sharded = _size(config, read_config(source), world)
    return 2 * count * (4 if sharded else dtype.itemsize)


def _size(config: Config, architecture: ModelConfig, world: int) -> tuple[int, torch.dtype, bool]:
    """Parameters of a model, the type it samples in, and whether its training is sharded."""
    with torch.device("meta"):
        count = sum(p.numel() for p in Model(architecture).parameters())
    cuda = torch.cuda.is_available()
    return count, getattr(torch, config.dtype or ("bfloat16" if cuda else "float32")), world > 1 or cuda


def first_generator_prompt(config: Config) -> list[dict[str, str]]:
    domains = specs.load_domains(config.specs.domains)
    spec = specs.sample_spec(random.Random(fold(config.seed, 1, "spec generator", 0, 0)), config.specs, domains)
    return prompts.generator_messages(spec, config.prompts, domains[spec.domain].description)


def first_solver_prompt(config: Config) -> list[dict[str, str]]:
    """For an example task, since the real ones are yet to be invented."""
    example = GENERATOR_EXAMPLES[0]
    tools = [Tool(name, text, {p: {"type": t} for p, t in parameters.items()}, tuple(parameters))
             for name, text, parameters in example["tools"]]
    return prompts.solver_messages(example["question"], tools, config.prompts)
