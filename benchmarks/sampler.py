"""The sampler against transformers' generate and against a naive loop with a KV cache, in turns within one run.

    python benchmarks/sampler.py [ragged] [probes] [nano] [linear] [--json FILE] [--threads N] [--repeats N] [--quick]

ragged   SmolLM2-135M, fp32: 32 prompts of 64-512 tokens, 16-128 new ones each, greedy, no stop token. generate runs a
         left-padded batch with SDPA to the longest; only the tokens asked for count.
probes   SmolLM2-135M: 16 prompts of 512 tokens, 8 samples of 64 tokens each; generate with num_return_sequences=8. One turn.
nano     a random model of nano's size, groups of 8: prompts of 80-110 tokens, samples that stop by chance (35 tokens on
         average, 120 at most), and samples of 60 tokens, against `naive` below.
linear   the same model with 64 rows: 4 and 16 times the requests, as a share of 4 and 16 times the time.

Times are medians over the turns. Memory of keys and values is the most that pages took at once, against the bytes of every
prompt once and of every sample's own tokens. --quick: tiny sizes on a random model, to see that the script runs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import measure
import torch
import torch.nn.functional as F
from measure import entry
from torch import Tensor

try:
    from toolr0_core.kv_cache import bytes_per_token
    from toolr0_core.model import Model, ModelConfig, load, rope_frequencies
    from toolr0_core.sampler import Sampler, SamplingParams
    from toolr0_core.weights import model_path
except ModuleNotFoundError:
    sys.exit("error: toolr0_core is not installed; type `pip install -e .` in the repository, or use launch/quickstart.sh")

STOPS = tuple(range(29))  # of 1024 equally likely tokens: 35 tokens on average


def random_model(device: str) -> Model:
    """0.94M parameters with a nearly flat distribution, so that a chosen share of the vocabulary stops at a known rate."""
    torch.manual_seed(0)
    model = Model(ModelConfig(1024, 128, 352, 4, 4, 4, 32))
    model.embed_tokens.weight.data.mul_(0.09)
    return model.to(device)


# -- baselines ---------------------------------------------------------------------------------------------------------------

@torch.no_grad()
def naive(model: Model, prompts: list[list[int]], limit: int, stops: tuple[int, ...]) -> int:
    """What one writes first: a left-padded rectangle, keys and values that grow by torch.cat, softmax and multinomial; every
    row runs until the last one has stopped. Returns how many tokens there are up to each row's stop."""
    c, S, T = model.config, len(prompts), max(map(len, prompts))
    x_ST, seen_ST = torch.zeros(S, T, dtype=torch.long), torch.zeros(S, T, dtype=torch.bool)
    for row, seen, prompt in zip(x_ST, seen_ST, prompts):
        row[T - len(prompt):], seen[T - len(prompt):] = torch.tensor(prompt), True
    position_ST, stop, freq = (seen_ST.cumsum(1) - 1).clamp(min=0), torch.tensor(stops or (-1,)), rope_frequencies(c)
    caches: list[tuple[Tensor, Tensor] | None] = [None] * len(model.layers)
    done_S, counted = torch.zeros(S, dtype=torch.bool), 0

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps) * weight

    for _ in range(limit):
        Q = x_ST.shape[1]
        angle = position_ST[:, None, :, None] * torch.cat((freq, freq))
        cos, sin = angle.cos(), angle.sin()
        mask = seen_ST[:, None, None, :] & torch.ones(Q, seen_ST.shape[1], dtype=torch.bool).tril(seen_ST.shape[1] - Q)
        mask = mask | (torch.eye(Q, dtype=torch.bool) if Q > 1 else mask)  # padding sees itself: no NaN
        h = F.embedding(x_ST, model.embed_tokens.weight)
        for i, layer in enumerate(model.layers):
            a, y = layer.self_attn, norm(h, layer.input_layernorm.weight)
            q, k, v = (F.linear(y, p.weight).view(S, Q, -1, c.head_dim).transpose(1, 2) for p in (a.q_proj, a.k_proj, a.v_proj))
            q, k = (z * cos + torch.cat((-z[..., c.head_dim // 2:], z[..., : c.head_dim // 2]), -1) * sin for z in (q, k))
            if caches[i] is not None:
                k, v = torch.cat((caches[i][0], k), 2), torch.cat((caches[i][1], v), 2)
            caches[i] = k, v
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            h = h + F.linear(attended.transpose(1, 2).reshape(S, Q, -1), a.o_proj.weight)
            y, m = norm(h, layer.post_attention_layernorm.weight), layer.mlp
            h = h + F.linear(F.silu(F.linear(y, m.gate_proj.weight)) * F.linear(y, m.up_proj.weight), m.down_proj.weight)
        logits_SV = F.linear(norm(h[:, -1], model.norm.weight), model.head_weight)
        x_ST = torch.multinomial(logits_SV.softmax(-1), 1)
        counted += int((~done_S).sum())
        done_S |= torch.isin(x_ST[:, 0], stop)
        if done_S.all():
            break
        position_ST, seen_ST = position_ST[:, -1:] + 1, F.pad(seen_ST, (0, 1), value=True)
    return counted


def generate(reference, prompts: list[list[int]], limit: int, **options) -> None:
    """transformers' generate on a left-padded batch, all rows to `limit`."""
    T = max(map(len, prompts))
    ids = torch.tensor([[0] * (T - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (T - len(p)) + [1] * len(p) for p in prompts])
    reference.generate(ids, attention_mask=mask, max_new_tokens=limit, min_new_tokens=limit, **options)


def smollm2():
    """Ours and transformers' model of the same weights."""
    from transformers import AutoModelForCausalLM
    path = model_path("smollm2-135m")
    reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", dtype=torch.float32)
    reference.generation_config.eos_token_id, reference.generation_config.pad_token_id = None, 0
    return load(path), reference.eval()


# -- cases -------------------------------------------------------------------------------------------------------------------

def turns(run: dict[str, Callable[[], int | None]], repeats: int) -> dict[str, tuple[float, int | None]]:
    """Median seconds of each, taken in turns, and what the last call returned."""
    taken, last = {name: [] for name in run}, {}
    for _ in range(repeats):
        for name, function in run.items():
            start = time.perf_counter()
            last[name] = function()
            taken[name].append(time.perf_counter() - start)
    return {name: (statistics.median(seconds), last[name]) for name, seconds in taken.items()}


def figures(name: str, sampler: Sampler) -> list[dict]:
    """What a call of generate says of itself."""
    s = sampler.stats
    return [entry(f"{name}: time to first token, median", statistics.median(s.first_token_seconds), "s"),
            entry(f"{name}: utilisation of the batch", s.utilisation, "share"),
            entry(f"{name}: host time a step", 1e3 * s.host_seconds / s.steps, "ms"),
            entry(f"{name}: keys and values, most at once", s.peak_kv_bytes / 2**20, "MiB")]


def ragged(args: argparse.Namespace) -> list[dict]:
    model, reference = smollm2()
    rng, sampler = random.Random(0), Sampler(model)
    prompts = [[rng.randrange(100, 40000) for _ in range(rng.randint(64, 512))] for _ in range(32)]
    limits = [rng.randint(16, 128) for _ in prompts]
    params = [SamplingParams(temperature=0, max_new_tokens=n) for n in limits]
    sampler.generate(prompts[:2], params[:2])
    times = turns({"ours": lambda: sampler.generate(prompts, params) and None,
                   "generate": lambda: generate(reference, prompts, max(limits), do_sample=False)}, max(1, args.repeats - 1))
    ours, theirs = (sum(limits) / times[name][0] for name in ("ours", "generate"))
    first, _ = turns({"": lambda: generate(reference, prompts, 1, do_sample=False)}, 1)[""]
    return [entry("ragged: SmolLM2, 32 prompts, generate as baseline", ours, "tok/s", theirs, ">= 2.5"),
            *figures("ragged", sampler), entry("ragged: generate's time to first token", first, "s")]


def probes(args: argparse.Namespace) -> list[dict]:
    model, reference = smollm2()
    rng, sampler = random.Random(1), Sampler(model)
    prompts = [[rng.randrange(100, 40000) for _ in range(512)] for _ in range(16)]
    params = SamplingParams(n=8, max_new_tokens=64)
    times = turns({"ours": lambda: sampler.generate(prompts, params) and None, "generate": lambda: generate(
        reference, prompts, 64, do_sample=True, num_return_sequences=8)}, 1)
    ours, theirs = (16 * 8 * 64 / times[name][0] for name in ("ours", "generate"))
    once = 16 * (512 + 8 * 64) * bytes_per_token(model.config, torch.float32) / 2**20
    own = entry("probes: keys and values, prompts counted once as baseline", sampler.stats.peak_kv_bytes / 2**20, "MiB", once)
    return [entry("probes: SmolLM2, 16 x 8 samples, generate as baseline", ours, "tok/s", theirs, ">= 5"), own,
            *figures("probes", sampler)]


def nano(args: argparse.Namespace) -> list[dict]:
    model, rng, rows = random_model("cpu"), random.Random(2), []
    for kind, stops, limit in (("stops by chance", STOPS, 120), ("60 tokens each", (), 60)):
        for sequences, bound in ((64, ">= 4"), (256, ">= 2")):
            if args.quick:
                sequences, limit = 16, 5
            prompts = [[rng.randrange(1024) for _ in range(rng.randint(80, 110))] for _ in range(sequences // 8)]
            sampler, params = Sampler(model, max_sequences=sequences), SamplingParams(n=8, max_new_tokens=limit,
                                                                                     stop_token_ids=stops)
            times = turns({
                "ours": lambda: sum(len(c.token_ids) for g in sampler.generate(prompts, params) for c in g),  # noqa: B023
                "naive": lambda: naive(model, [p for p in prompts for _ in range(8)], limit, stops)}, 2 + args.repeats)  # noqa: B023
            ours, theirs = (tokens / seconds for seconds, tokens in times.values())
            name = f"nano: {sequences} sequences, {kind}"
            rows += [entry(f"{name}, the naive loop as baseline", ours, "tok/s", theirs,
                           bound if stops and not args.quick else None), *figures(name, sampler)]
    return rows


def linear(args: argparse.Namespace) -> list[dict]:
    model, rng = random_model("cpu"), random.Random(3)
    base = 2 if args.quick else 32  # groups of 8 that fill 64 rows four times
    prompts = [[rng.randrange(1024) for _ in range(rng.randint(80, 110))] for _ in range(16 * base)]
    params = [SamplingParams(n=8, max_new_tokens=120, stop_token_ids=STOPS, seed=i) for i in range(len(prompts))]
    sampler = Sampler(model, max_sequences=64)

    def run(times: int) -> int:
        return sum(len(c.token_ids) for g in sampler.generate(prompts[: times * base], params[: times * base]) for c in g)

    run(1)
    seconds = {n: s for n, (s, _) in turns({n: lambda n=n: run(n) for n in (1, 4, 16)}, args.repeats).items()}
    bound = None if args.quick else "<= 1.15"
    return [entry(f"linear: {n} times the requests, {n} times the time as baseline", seconds[n], "s", n * seconds[1], bound)
            for n in (4, 16)]


CASES = {"ragged": ragged, "probes": probes, "nano": nano, "linear": linear}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES) + " [all]")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--repeats", type=int, default=3, help="turns; one less for ragged, one for probes")
    parser.add_argument("--quick", action="store_true", help="nano and linear in tiny sizes, without targets")
    args = parser.parse_args()
    wanted = args.cases or (["nano", "linear"] if args.quick else list(CASES))
    if unknown := [name for name in wanted if name not in CASES]:
        parser.error(f"{unknown[0]} is no case; take {', '.join(CASES)}")
    torch.set_num_threads(args.threads)
    rows = []
    for name in wanted:
        for row in CASES[name](args):
            rows.append(row)
            baseline = "" if row["baseline"] is None else f"   baseline {row['baseline']:10.2f}   ratio {row['ratio']:5.2f}"
            print(f"{row['name']:72} {row['value']:10.2f} {row['unit']:6}{baseline}", flush=True)
        measure.write(args.json, measure.environment("cpu", sys.argv[1:]), rows)
    measure.report(rows)


if __name__ == "__main__":
    main()
