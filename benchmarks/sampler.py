"""How many tokens a second does the sampler draw? A random model of nano's size, prompts of 80 tokens, groups of 8.

    python benchmarks/sampler.py [--json FILE] [--device cuda]

`equal` rows draw 60 tokens each; `ragged` rows stop by chance, 35 tokens on average, 120 at most, prompts of 40-110.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import measure
import torch
from measure import entry

try:
    from toolr0_core.model import Model, ModelConfig
    from toolr0_core.sampler import Sampler, SamplingParams
except ModuleNotFoundError:
    sys.exit("error: toolr0_core is not installed; type `pip install -e .` in the repository, or use launch/quickstart.sh")


def random_model(device: str) -> Model:
    """0.94M parameters with a nearly flat distribution, so that a chosen share of the vocabulary stops at a known rate."""
    torch.manual_seed(0)
    model = Model(ModelConfig(1024, 128, 352, 4, 4, 4, 32))
    model.embed_tokens.weight.data.mul_(0.09)
    return model.to(device)


def rate(model: Model, lengths: list[int], rows: int, params: SamplingParams, repeats: int = 3) -> float:
    """Tokens per second, the best of a few calls."""
    prompts = [torch.randint(1024, (n,)).tolist() for n in lengths]
    sampler, best = Sampler(model, max_sequences=rows), 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        out = sampler.generate(prompts, params)
        best = max(best, sum(len(c.token_ids) for group in out for c in group) / (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, rows = random_model(args.device), []
    equal = SamplingParams(n=8, max_new_tokens=60)
    ragged = SamplingParams(n=8, max_new_tokens=120, stop_token_ids=tuple(range(29)))
    for name, batch, lengths, params, target in (
            *((f"equal, {b} rows", b, [80] * (b // 8), equal, 4000 if b == 256 else None) for b in (64, 256, 512)),
            ("ragged, 1024 samples, 256 rows", 256, torch.randint(40, 110, (128,)).tolist(), ragged, None)):
        value = rate(model, lengths, batch, params)
        rows.append(entry(name, round(value), "tok/s", None, target and f">= {target}"))
        print(f"{name:32} {value:8.0f} tok/s" + (f"   target {rows[-1]['target']}" if target else ""), flush=True)
    measure.write(args.json, measure.environment(args.device, sys.argv[1:]), rows)


if __name__ == "__main__":
    main()
