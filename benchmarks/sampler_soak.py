"""Does the sampler leave anything behind? Thousands of requests of every kind through one Sampler.

    python benchmarks/sampler_soak.py [--requests 10000] [--json FILE] [--seed N]

A random model of nano's size, whose weights change between calls; prompts of 1-200 tokens, half of them with shared
beginnings; 1-8 samples of 1-60 tokens, all kinds of sampling, stop tokens and stop strings; text put in at once and from other
threads; calls of 1-400 requests, some of which fail first. 12 MiB of keys and values, so that requests wait for pages. Every
50th request is sampled again alone, in a fresh Sampler. Memory is the process's resident size after each call, its drift the
slope over the second half.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import measure
import torch
from measure import entry
from sampler import random_model
from toolr0_kernels import sample

from toolr0_core.model import Model
from toolr0_core.rng import fold
from toolr0_core.sampler import Sampler, SamplingParams
from toolr0_core.schema import Completion

OPTIONS = dict(kv_gib=12 / 1024, max_sequences=64, page_size=16)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, ids):
        return "".join(LETTERS[i % 26] for i in ids)


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    params: SamplingParams


def requests(rng: random.Random, count: int, beginnings: list[list[int]]) -> list[Request]:
    """Requests of random shape; their seeds are different."""
    made = []
    for _ in range(count):
        size = rng.randint(1, 200)
        kept = rng.randint(0, size) if rng.random() < 0.5 else 0
        prompt = rng.choice(beginnings)[:kept] + [rng.randrange(1024) for _ in range(size - kept)]
        string = "".join(rng.choices(LETTERS, k=rng.randint(1, 3)))
        made.append(Request(prompt, SamplingParams(
            n=rng.randint(1, 8), max_new_tokens=rng.randint(1, 60), temperature=rng.choice([0, 0.7, 1, 1.3]),
            top_k=rng.choice([0, 0, 5, 50]), top_p=rng.choice([1, 1, 0.9, 0.5]), seed=rng.getrandbits(62),
            stop_token_ids=tuple(rng.sample(range(1024), rng.choice([0, 10, 60]))),
            stop_strings=(string,) if rng.random() < 0.3 else ())))
    return made


class Tools:
    """An on_stop: text that depends on the request's seed, the sample and its tokens so far, told at once or by a thread.
    After `limit` questions it fails."""

    def __init__(self, requests: list[Request], threads: ThreadPoolExecutor, limit: int | None = None):
        self.requests, self.threads, self.limit, self.asked = requests, threads, limit, 0

    def __call__(self, request: int, k: int, completion: Completion) -> list[int] | None | Future:
        self.asked += 1
        if self.limit is not None and self.asked > self.limit:
            raise InterruptedError
        kind = fold(self.requests[request].params.seed, k, len(completion.token_ids))
        answer = None if kind % 3 == 0 else [fold(kind, i) % 1024 for i in range(kind // 3 % 12)]
        return self.threads.submit(self.slow, answer, kind // 36 % 5) if kind // 180 % 4 == 0 else answer

    @staticmethod
    def slow(answer: list[int] | None, milliseconds: int) -> list[int] | None:
        time.sleep(milliseconds / 1e3)
        return answer


class Soak:
    """One sampler and what its calls have added up to."""

    def __init__(self, seed: int, threads: ThreadPoolExecutor):
        self.rng, self.threads, self.model = random.Random(seed), threads, random_model("cpu")
        self.weights = [p.detach().clone() for p in self.model.parameters()]
        self.sampler = Sampler(self.model, Letters(), **OPTIONS)
        self.beginnings = [[self.rng.randrange(1024) for _ in range(200)] for _ in range(20)]
        self.count: Counter[str] = Counter()
        self.memory: list[tuple[float, float, float]] = []  # thousands of requests, MiB, objects

    def call(self, size: int) -> None:
        if self.rng.random() < 0.2:
            self.change_weights()
        batch = requests(self.rng, size, self.beginnings)
        tools = Tools(batch, self.threads) if self.rng.random() < 0.7 else None
        if tools and self.rng.random() < 0.1:
            self.fail(batch)
        held: list[int] = []
        out = generate(self.sampler, batch, tools, lambda n: held.append(self.sampler.pages_in_use))
        stats = self.sampler.stats
        self.count["left"] += held[-1] + self.sampler.pages_in_use
        self.count["over"] += stats.peak_kv_bytes > OPTIONS["kv_gib"] * 2**30
        self.count["samples"] += sum(map(len, out))
        self.count["tokens"] += stats.sampled
        self.count["shared"] += stats.shared
        self.count["prefilled"] += stats.prefilled
        for i in range(-self.count["requests"] % 50, size, 50):
            self.compare(batch[i], out[i], tools is not None)
        self.count["requests"] += size
        gc.collect()
        self.memory.append((self.count["requests"] / 1e3, resident_mib(), len(gc.get_objects())))

    @torch.no_grad()
    def change_weights(self) -> None:
        g = torch.Generator().manual_seed(self.rng.getrandbits(62))
        for p, first in zip(self.model.parameters(), self.weights):
            p.copy_(first * (1 + 0.1 * torch.randn(first.shape, generator=g)))

    def fail(self, batch: list[Request]) -> None:
        """The same call, in the middle of which on_stop raises."""
        try:
            generate(self.sampler, batch, Tools(batch, self.threads, limit=self.rng.randrange(len(batch))))
        except InterruptedError:
            self.count["errors"] += 1
        self.count["left"] += self.sampler.pages_in_use

    def compare(self, request: Request, group: list[Completion], put_in: bool) -> None:
        """With the request alone, as a first request."""
        tools = Tools([request], self.threads) if put_in else None
        (alone,) = generate(Sampler(self.model, Letters(), **OPTIONS), [request], tools)
        for k, (a, b) in enumerate(zip(group, alone)):
            self.count["compared"] += 1
            if (a.token_ids, a.finish_reason, a.sampled) != (b.token_ids, b.finish_reason, b.sampled):
                at = next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids)) if x != y), None)
                tie = at is not None and near_tie(self.model, request, k, a.token_ids[:at])
                self.count["near ties" if tie else "mismatches"] += 1


def generate(sampler: Sampler, batch: list[Request], tools: Tools | None, progress=None) -> list[list[Completion]]:
    return sampler.generate([r.prompt for r in batch], [r.params for r in batch], on_stop=tools, progress=progress)


@torch.no_grad()
def near_tie(model: Model, request: Request, k: int, tokens: tuple[int, ...]) -> bool:
    """Whether logits that differ by rounding draw different tokens behind these."""
    p, rows = request.params, 200
    logits_1V = model.logits(torch.tensor([[*request.prompt, *tokens]]))[0, -1:]
    noisy_RV = logits_1V + 1e-5 * torch.randn(rows, logits_1V.shape[1])
    seed, position, top_k = (torch.full((rows,), x) for x in (fold(p.seed, k), len(tokens), p.top_k))
    temperature, top_p = (torch.full((rows,), float(x)) for x in (p.temperature, p.top_p))
    return len(sample(noisy_RV, seed, position, temperature, top_k, top_p)[0].unique()) > 1


def resident_mib() -> float:
    """Of this process, as Linux tells it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def drift(memory: list[tuple[float, float, float]], column: int) -> float:
    """Slope of a column of `memory` over its second half, per 1,000 requests."""
    half = [row for row in memory if row[0] >= memory[-1][0] / 2]
    return statistics.linear_regression([row[0] for row in half], [row[column] for row in half]).slope


def rows(soak: Soak, minutes: float) -> list[dict]:
    count = soak.count
    return [*(entry(name, count[key], "", None, target) for name, key, target in (
                ("requests", "requests", None), ("samples", "samples", None), ("tokens", "tokens", None),
                ("errors thrown by on_stop", "errors", None), ("samples compared with the request alone", "compared", None),
                ("near ties among them", "near ties", None), ("mismatches", "mismatches", "<= 0"),
                ("pages left behind", "left", "<= 0"), ("calls over the budget", "over", "<= 0"))),
            entry("calls", len(soak.memory), ""),
            entry("prompt tokens found in pages of others", count["shared"] / (count["shared"] + count["prefilled"]), "share"),
            entry("resident memory at the end", round(soak.memory[-1][1], 1), "MiB"),
            entry("memory drift per 1,000 requests", round(drift(soak.memory, 1), 3), "MiB", None, "<= 1"),
            entry("drift of Python objects per 1,000 requests", round(drift(soak.memory, 2), 1), ""),
            entry("minutes", round(minutes, 2), "min")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="30 at least")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    args = parser.parse_args()
    if args.requests < 30:
        parser.error(f"--requests is {args.requests}; it has to be 30 or more, so that there are calls to fit a slope to")
    torch.set_num_threads(args.threads)
    start = time.perf_counter()
    with ThreadPoolExecutor(4) as threads:
        soak, left = Soak(args.seed, threads), args.requests
        while left:
            size = min(left, int(min(400, args.requests / 10) ** soak.rng.random()))  # small calls as often as large ones
            soak.call(size)
            left -= size
            print(f"\r{soak.count['requests']:6} requests, {soak.memory[-1][1]:.0f} MiB", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    out = rows(soak, (time.perf_counter() - start) / 60)
    for row in out:
        print(f"{row['name']:42} {row['value']:10.6g} {row['unit']}")
    measure.report(out)
    measure.write(args.json, measure.environment("cpu", sys.argv[1:]), out)


if __name__ == "__main__":
    main()
