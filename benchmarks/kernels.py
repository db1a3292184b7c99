"""How fast are the kernels, against plain torch, torch.compile and other libraries, and against the machine's limits?

    python benchmarks/kernels.py [--kernel NAME ...] [--shape NAME|N,D,V ...] [--dtype float32|bfloat16]
        [--compare eager compile liger cce] [--memory] [--json FILE] [--plot FILE]

Results are checked before they are timed. Everything is timed in turns, so that other work on the machine hits all alike; a
ratio is one of medians. On a GPU: CUDA events, with the L2 cache overwritten before each call. --memory adds the growth of peak
memory; on a CPU each figure is of a fresh process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import measure
import torch
import torch.nn.functional as F
from measure import entry, limits, plot, times
from rich.console import Console
from rich.table import Table

try:
    import toolr0_kernels as ours
    from toolr0_kernels.dispatch import choose
    from toolr0_kernels.reference import truncate

    from toolr0_core.grpo import token_loss
except ModuleNotFoundError:
    sys.exit("error: toolr0_core is not installed; type `pip install -e .` in the repository, or use launch/quickstart.sh")

SHAPES = {"smollm2": (2048, 576, 49152), "qwen2.5-0.5b": (16384, 896, 151936), "qwen2.5-1.5b": (16384, 1536, 151936)}
TEMPERATURE = 0.7


@dataclass
class Case:
    """One kernel on one shape. `run`: what is timed by name, "ours" and "eager" among them; flops and bytes: the least that has
    to be done; `check` gives (ours, eager, exact) of a part of the shape; `targets`: (compared with, bound on the ratio)."""

    name: str
    run: dict[str, Callable]
    flops: float
    bytes: float
    check: Callable[[], list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]
    targets: list[tuple[str, str]] = field(default_factory=list)
    most_ms: float | None = None


# -- the kernels ---------------------------------------------------------------------------------------------------------------

def head_inputs(shape: tuple[int, int, int], dtype: torch.dtype, device: str):
    N, D, V = shape
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, D, generator=g), torch.randn(V, D, generator=g) * D ** -0.5
    return (hidden.to(device, dtype).requires_grad_(), weight.to(device, dtype).requires_grad_(),
            torch.randint(0, V, (N,), generator=g).to(device), torch.randn(N, generator=g).to(device),
            torch.rand(N, generator=g).to(device) / N)


def eager_logprob(hidden, weight, target):
    logits = F.linear(hidden, weight)
    every = ((logits if logits.dtype == torch.float64 else logits.float()) / TEMPERATURE).log_softmax(-1)
    return every.gather(1, target[:, None])[:, 0], -(every.exp() * every).sum(-1)


def scoring(label: str, shape, dtype, device: str, compare: list[str]) -> Case:
    hidden, weight, target, *_ = head_inputs(shape, dtype, device)
    hidden, weight = hidden.detach(), weight.detach()
    N, D, V = shape
    eager = torch.no_grad()(lambda: eager_logprob(hidden, weight, target))
    run = {"ours": torch.no_grad()(lambda: ours.linear_logprob(hidden, weight, target, TEMPERATURE, entropy=True)),
           "products": lambda: hidden @ weight.T, **rivals(compare, eager, eager_logprob, (hidden, weight, target))}

    def check():
        few = hidden[:128], weight, target[:128]
        exact = eager_logprob(few[0].double(), weight.double(), few[2])
        return list(zip(ours.linear_logprob(*few, TEMPERATURE, entropy=True), eager_logprob(*few), exact))

    return Case(f"scoring, {label}", run, 2 * N * V * D, dtype.itemsize * (N * D + V * D), torch.no_grad()(check),
                targets=[("products", "<= 1.15"), ("eager", "<= 0.8")] if label == "smollm2" else [],
                most_ms={"qwen2.5-1.5b": 15.0, "qwen2.5-0.5b": 11.0}.get(label))


def loss(label: str, shape, dtype, device: str, compare: list[str]) -> Case:
    hidden, weight, target, advantage, scale = head_inputs(shape, dtype, device)
    N, D, V = shape

    def backward(value):
        hidden.grad = weight.grad = None
        value.backward()

    def eager_loss(hidden, weight, target):
        logp, _ = eager_logprob(hidden, weight, target)
        return (token_loss(logp, None, advantage[: len(target)])[0] * scale[: len(target)]).sum()

    def products():
        with torch.no_grad():
            dlogits = hidden @ weight.T
            return dlogits @ weight, dlogits.T @ hidden

    def fused(hidden, weight, target):
        return ours.linear_grpo_loss(hidden, weight, target, advantage[: len(target)], scale[: len(target)],
                                     temperature=TEMPERATURE)[0]

    def check():
        def gradients(function, dtype):
            inputs = [x.detach().to(dtype).requires_grad_() for x in (hidden[:128], weight)]
            return torch.autograd.grad(function(*inputs, target[:128]), inputs)
        return list(zip(gradients(fused, dtype), gradients(eager_loss, dtype), gradients(eager_loss, torch.float64)))

    run = {"ours": lambda: backward(fused(hidden, weight, target)), "products": products,
           "eager": lambda: backward(eager_loss(hidden, weight, target))}
    run |= rivals([c for c in compare if c != "eager"], None, eager_loss, (hidden, weight, target), backward)
    if device != "cpu":
        run |= {name: f for name, f in libraries(hidden, weight, target, backward).items() if name.split()[0] in compare}
    return Case(f"loss forward + backward, {label}", run, 6 * N * V * D, dtype.itemsize * (3 * N * D + 2 * V * D),
                check, targets=[("products", "<= 1.2"), ("eager", "<= 0.8")] if label == "smollm2" else [],
                most_ms={"qwen2.5-1.5b": 38.0, "qwen2.5-0.5b": 24.0}.get(label))


def sampling(label: str, shape, dtype, device: str, compare: list[str], top_p: float) -> Case:
    S, V = 256, shape[2]
    logits = 2 * torch.randn(S, V, generator=torch.Generator().manual_seed(0)).to(device)
    seed = position = torch.arange(S, device=device)
    temperature, p = torch.full((S,), 0.8, device=device), torch.full((S,), top_p, device=device)

    def by_sorting(logits=logits):
        logp = (logits / 0.8).log_softmax(-1)
        logp = truncate(logp, torch.zeros_like(seed), p) if top_p < 1 else logp
        return torch.multinomial(logp.exp(), 1), logp

    def draw(impl="auto"):
        return ours.sample(logits, seed, position, temperature, None, p if top_p < 1 else None, impl)

    def check():
        """Log-probs of tokens; where a token differs, as it may at an edge of the sum, its row is left out."""
        (token, mine, _), (same, logp, _) = draw(), draw("torch")
        equal = token == same
        if equal.float().mean() < 0.98:
            raise SystemExit(f"error: sampling, {label}: {int((~equal).sum())} of {S} tokens differ from plain torch's")
        exact = by_sorting(logits.double())[1].gather(1, same[:, None])[:, 0]
        return [(mine[equal], logp[equal], exact[equal])]

    run = {"ours": draw,
           "eager": by_sorting, "a sort": lambda: logits.sort(-1, descending=True), "one reading": lambda: logits.sum(-1)}
    on_cpu = device == "cpu" and top_p < 1
    targets = [("a sort", "<= 0.1")] if on_cpu else [("one reading", "<= 1.3")] if device != "cpu" and top_p == 1 else []
    return Case(f"sampling 256 rows{f' with top-p {top_p}' if top_p < 1 else ''}, {label}", run, 0, 4 * S * V, check, targets)


def decoding(label: str, dtype, device: str, compare: list[str], page: int = 64) -> Case:
    S, H, K, E, longest = 64, 9, 3, 64, 1024
    g = torch.Generator().manual_seed(1)
    length = torch.randint(64, longest + 1, (S,), generator=g, dtype=torch.int32).to(device)
    M = longest // page
    table = torch.randperm(S * M, generator=g).view(S, M).int().to(device)
    q = torch.randn(S, H, E, generator=g).to(device, dtype)
    keys, values = (torch.randn(S * M, K, page, E, generator=g).to(device, dtype) for _ in range(2))
    padded_k, padded_v = (x[table.long()].transpose(1, 2).flatten(2, 3).contiguous() for x in (keys, values))
    mask = (torch.arange(longest, device=device) < length[:, None])[:, None, None]

    def padded(*cast):
        inputs = [x.to(*cast) for x in (q[:, :, None], padded_k, padded_v)]
        return F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True)[:, :, 0]

    def check():
        return [(ours.decode_attention(q, keys, values, table, length), padded(dtype), padded(torch.float64))]

    live, run = int(length.sum()), {"ours": lambda: ours.decode_attention(q, keys, values, table, length),
                                    "eager": lambda: padded(dtype)}
    return Case(f"decode attention, 64 sequences of 64-1024, pages of {page}", run, 4 * live * H * E,
                2 * live * K * E * dtype.itemsize, check, [("eager", "<= 0.55")] if device == "cpu" else [])


def rowwise(label: str, shape, dtype, device: str, compare: list[str]) -> list[Case]:
    """rms_norm, add + norm, rope and swiglu, forward and backward, where there are kernels of them: on a GPU."""
    if choose("rms_norm", "auto", torch.empty(0, device=device)) == "torch":
        return []
    N, D, _ = shape
    g = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(N, D, generator=g).to(device, dtype).requires_grad_() for _ in range(2))
    weight = torch.ones(D, device=device, dtype=dtype, requires_grad=True)
    q, k = (torch.randn(N, heads, 64, generator=g).to(device, dtype).requires_grad_() for heads in (D // 64, 2))
    angle = torch.rand(N, 32, generator=g).to(device)
    gate, up = (torch.randn(N, 3 * D, generator=g).to(device, dtype).requires_grad_() for _ in range(2))
    both = dict(rms_norm=(ours.rms_norm, (x, weight), 2), add_rms_norm=(ours.add_rms_norm, (x, residual, weight), 4),
                rope=(ours.rope, (q, k, angle.cos(), angle.sin()), 2), swiglu=(ours.swiglu, (gate, up), 3))
    cases = []
    for name, (function, inputs, arrays) in both.items():
        size = inputs[0].numel() + (inputs[1].numel() if name == "rope" else 0)

        def forward(impl="auto", function=function, inputs=inputs):
            out = function(*inputs, impl=impl)
            return out if isinstance(out, tuple) else (out,)

        def training(impl="auto", forward=forward, inputs=inputs):
            out = forward(impl)
            return torch.autograd.grad(out, [x for x in inputs if x.requires_grad], [torch.ones_like(x) for x in out])

        def check(forward=forward, training=training, function=function, inputs=inputs):
            exact = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
            values = function(*exact)
            values = values if isinstance(values, tuple) else (values,)
            grads = torch.autograd.grad(values, [x for x in exact if x.requires_grad], [torch.ones_like(x) for x in values])
            return list(zip((*forward(), *training()), (*forward("torch"), *training("torch")), (*values, *grads)))

        run = {"ours": torch.no_grad()(forward), "eager": torch.no_grad()(lambda f=forward: f("torch"))}
        cases.append(Case(f"{name} forward, {label}", run, 0, arrays * size * dtype.itemsize, check))
        run = {"ours": training, "eager": lambda f=training: f("torch")}
        cases.append(Case(f"{name} forward + backward, {label}", run, 0, arrays * size * dtype.itemsize, check))
    return cases


# -- what they are compared with -----------------------------------------------------------------------------------------------

def rivals(compare: list[str], eager: Callable | None, function: Callable, args: tuple, then: Callable = lambda x: x) -> dict:
    run = {}
    if "eager" in compare and eager:
        run["eager"] = eager
    if "compile" in compare:
        compiled = torch.compile(function)
        run["compile"] = (lambda: then(compiled(*args))) if eager is None else torch.no_grad()(lambda: compiled(*args))
    return run


def libraries(hidden, weight, target, backward: Callable) -> dict[str, Callable]:
    """Other projects' fused head and cross entropy, where they are installed: the same products and softmax, a mean as loss."""
    found = {}
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        found["liger (cross entropy)"] = lambda: backward(LigerFusedLinearCrossEntropyLoss()(weight, hidden, target))
    except ImportError:
        pass
    try:
        from cut_cross_entropy import linear_cross_entropy
        found["cce (cross entropy)"] = lambda: backward(linear_cross_entropy(hidden, weight, target))
    except ImportError:
        pass
    return found


# -- measuring -----------------------------------------------------------------------------------------------------------------

def check(case: Case, dtype: torch.dtype) -> None:
    """Ends the program where ours is further from fp64 than plain torch in the same dtype and a small tolerance."""
    for mine, eager, exact in case.check():
        ours_off, eager_off = ((x.double() - exact).norm() / exact.norm() for x in (mine, eager))
        if not ours_off <= 1.1 * eager_off + torch.finfo(dtype).eps:
            raise SystemExit(f"error: {case.name}: {ours_off:.2g} from fp64 in relative norm, plain torch {eager_off:.2g}")


def dtype_of(args: argparse.Namespace) -> torch.dtype:
    return getattr(torch, args.dtype or ("float32" if args.device == "cpu" else "bfloat16"))


def all_cases(args: argparse.Namespace, device: str) -> list[Callable[[], Case | list[Case]]]:
    """Makers of the cases that the options ask for, so that one case's memory is gone before the next is made."""
    dtype = dtype_of(args)
    makers: list[Callable] = []
    for name in args.shape or (["smollm2"] if device == "cpu" else ["qwen2.5-0.5b", "qwen2.5-1.5b"]):
        shape = SHAPES.get(name) or tuple(int(x) for x in name.split(","))
        common = (name, shape, dtype, device, args.compare)
        makers += [m for kernel, m in (
            ("scoring", lambda c=common: scoring(*c)), ("loss", lambda c=common: loss(*c)),
            ("sample", lambda c=common: sampling(*c, 0.9)), ("sample", lambda c=common: sampling(*c, 1.0)),
            ("rowwise", lambda c=common: rowwise(*c)),
        ) if kernel in args.kernel]
    if "decode" in args.kernel:
        makers += [lambda page=page: decoding("decode", dtype, device, args.compare, page) for page in (64, 16)]
    return makers


def memory_of(maker_index: int, name: str, argv: list[str], queue) -> None:
    """In a fresh process: by how many bytes peak resident memory grows while one call runs."""
    args = options(argv)
    case = all_cases(args, "cpu")[maker_index]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    case.run[name]()
    queue.put(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


def memory(index: int, name: str, case: Case, device: str, argv: list[str]) -> float:
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case.run[name]()
        return torch.cuda.max_memory_allocated() - before
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=memory_of, args=(index, name, argv, queue))
    process.start()
    process.join()
    return queue.get() if process.exitcode == 0 else float("nan")


# -- results -------------------------------------------------------------------------------------------------------------------

def rows_of(case: Case, ms: dict[str, tuple[float, float]], peaks: tuple[float, float], device: str) -> list[dict]:
    mine = ms["ours"][0]
    rows = [entry(f"{case.name}: {name}", value, "ms", ms["eager"][0] if name != "eager" else None)
            for name, (value, _) in ms.items()]
    rows += [entry(f"{case.name}: ours over {against}", mine, "ms", ms[against][0], bound)
             for against, bound in case.targets if against in ms]
    if case.most_ms and device != "cpu":
        rows.append(entry(f"{case.name}: ours", mine, "ms", None, f"<= {case.most_ms}"))
    bandwidth = case.bytes / mine * 1e3 / peaks[0]
    bounds = {"decode": ">= 0.7", "rms_norm": ">= 0.8", "add_rms_norm": ">= 0.8", "rope": ">= 0.8", "swiglu": ">= 0.8"}
    target = bounds.get(case.name.split()[0]) if device != "cpu" else None
    rows.append(entry(f"{case.name}: share of the memory's bandwidth", bandwidth, "share", None, target))
    if case.flops and case.bytes * 30 < case.flops:
        rows.append(entry(f"{case.name}: share of the product's rate", case.flops / mine * 1e3 / peaks[1], "share"))
    return rows


def options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kernels = ["scoring", "loss", "sample", "decode", "rowwise"]
    parser.add_argument("--kernel", nargs="+", default=kernels, choices=kernels)
    parser.add_argument("--shape", nargs="+", help=f"{', '.join(SHAPES)}, or N,D,V")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    others = ["eager", "compile", "liger", "cce"]
    parser.add_argument("--compare", nargs="*", default=others, choices=others)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--memory", action="store_true", help="also the growth of peak memory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args(argv)


def main() -> None:
    argv = sys.argv[1:]
    args = options(argv)
    device, console = args.device, Console(width=130)
    environment = measure.environment(device, argv)
    console.print(*(f"{k} {v}" for k, v in environment.items()), ours.describe(device), sep=", ")
    peaks = limits(device, dtype_of(args))
    console.print(f"limits, measured: memory {peaks[0] / 1e9:.0f} GB/s, products {peaks[1] / 1e12:.2f} TFLOP/s")
    rows, points = [entry("limit: memory", peaks[0] / 1e9, "GB/s"), entry("limit: products", peaks[1] / 1e12, "TFLOP/s")], []
    table = Table()
    for head in ("kernel", "implementation", "ms", "spread", "of eager", *(["peak memory, MB"] if args.memory else [])):
        table.add_column(head)
    for index, make in enumerate(all_cases(args, device)):
        made = make()
        for case in made if isinstance(made, list) else [made]:
            check(case, dtype_of(args))
            ms = times(case.run, device, args.repeats)
            rows += rows_of(case, ms, peaks, device)
            points += [(case.name, case.flops / case.bytes, case.flops / ms["ours"][0] * 1e3)] if case.flops else []
            extra = {n: memory(index, n, case, device, argv) for n in ("ours", "eager")} if args.memory and case.flops else {}
            if extra.get("eager"):
                bound = "<= 0.125" if "scoring" in case.name else "<= 0.25" if "loss" in case.name else None
                rows.append(entry(f"{case.name}: peak memory", extra["ours"] / 1e6, "MB", extra["eager"] / 1e6, bound))
            for n, (value, spread) in ms.items():
                table.add_row(case.name, n, f"{value:.2f}", f"{100 * spread:.0f} %", f"{value / ms['eager'][0]:.3f}",
                              *([f"{extra[n] / 1e6:.0f}" if n in extra else ""] if args.memory else []))
    console.print(table)
    measure.report(rows)
    measure.write(args.json, environment, rows)
    if args.plot:
        plot(points, peaks, args.plot)


if __name__ == "__main__":
    main()
