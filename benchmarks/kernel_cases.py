"""What benchmarks/kernels.py runs: each kernel on one shape, what it is compared with, and what it has to equal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

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
    run |= rivals(compare, None, eager_loss, (hidden, weight, target), backward)
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


def sampling_fused(label: str, shape, dtype, device: str, compare: list[str]) -> list[Case]:
    """From hidden states, where there is a kernel that makes no logits: on a GPU."""
    if choose("linear_sample", "auto", torch.empty(0, device=device)) != "triton":
        return []
    hidden, weight, *_ = (x.detach() for x in head_inputs((256, *shape[1:]), dtype, device))
    seed = position = torch.arange(256, device=device)
    temperature = torch.full((256,), 0.8, device=device)

    def check():
        (token, mine, _), (same, logp, _) = (ours.linear_sample(hidden, weight, seed, position, temperature, impl)
                                             for impl in ("auto", "torch"))
        exact = (hidden.double() @ weight.double().T / 0.8).log_softmax(-1).gather(1, same[:, None])[:, 0]
        equal = token == same
        if equal.float().mean() < 0.98:
            raise SystemExit(f"error: sampling from hidden states, {label}: {int((~equal).sum())} of 256 tokens differ")
        return [(mine[equal], logp[equal], exact[equal])]

    def eager():
        return torch.multinomial(((hidden @ weight.T).float() / 0.8).softmax(-1), 1)

    run = {"ours": lambda: ours.linear_sample(hidden, weight, seed, position, temperature), "eager": eager,
           "products": lambda: hidden @ weight.T}
    return [Case(f"sampling 256 rows from hidden states, {label}", run, 2 * 256 * shape[1] * shape[2],
                 dtype.itemsize * shape[1] * shape[2], check)]


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
                2 * live * K * E * dtype.itemsize, check,  # small pages are for comparison: the page is ours to choose
                [("eager", "<= 0.55")] if device == "cpu" and page == 64 else [])


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
    if eager:
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
