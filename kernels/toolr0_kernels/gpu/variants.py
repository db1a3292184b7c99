"""Every kernel in the configurations that the presets' models choose, compiled without a GPU: what it takes, what it moves.

A family module's `variants()` lists its own; `compiled` compiles one and reads the binary. Without a GPU nothing can be timed,
but spilled registers, stack, fp64 instructions and surplus memory traffic show all the same.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

FAMILIES = ("linear_logprob", "linear_grpo_loss", "sample", "rms_norm", "rope", "swiglu", "decode_attention",
            "write_kv")
REGISTERS = 65536  # of a multiprocessor, in all these generations
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes a program may have
WARPS = {80: 64, 90: 64, 100: 64}  # that a multiprocessor can hold


@dataclass(frozen=True)
class Variant:
    """A kernel with all that decides its code. signature: type of each argument, such as "*bf16", "i32" or "constexpr"; attrs:
    hints as triton.compile takes them. moved: bytes that a launch on `shape` loads and stores, counted from the block sizes;
    minimum: what has to move, every input and output once; None for kernels that compute, or touch next to nothing. note: why
    it moves more. targets: the generations that this configuration is chosen on."""

    name: str
    fn: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    attrs: dict = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    moved: int | None = None
    minimum: int | None = None
    shape: str = ""
    note: str = ""
    targets: tuple[int, ...] = (80, 90, 100)


@dataclass(frozen=True)
class Compiled:
    """What one variant takes on one target. occupancy: the share of warps that a multiprocessor can hold of it; wide: whether
    it multiplies 64-bit integers, as every kernel that indexes rows times vocabulary has to."""

    registers: int
    shared: int
    stack: int
    fp64: int
    occupancy: float
    wide: bool


def all_variants() -> list[Variant]:
    return [v for family in FAMILIES for v in importlib.import_module(f"toolr0_kernels.gpu.{family}").variants()]


def aligned(*places: int) -> dict:
    """The hint that these arguments are divisible by 16."""
    return {(place,): [["tt.divisibility", 16]] for place in places}


def multiprocessors(device: torch.device | str) -> int:
    """Of the GPU; few under the interpreter, so that programs loop; an H200's for what is compiled without one ("meta")."""
    kind = torch.device(device).type
    return torch.cuda.get_device_properties(device).multi_processor_count if kind == "cuda" else 132 if kind == "meta" else 2


def compiled(variant: Variant, target: int) -> Compiled:
    """Compiles for sm_<target>; raises what the compiler raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn = variant.fn
    while not isinstance(fn, triton.JITFunction):
        fn = fn.fn
    source = ASTSource(fn, variant.signature, variant.constexprs, variant.attrs)
    kernel = triton.compile(source, target=GPUTarget("cuda", target, 32),
                            options={"num_warps": variant.num_warps, "num_stages": variant.num_stages})
    usage = _resources(kernel.asm["cubin"])
    shared, threads = kernel.metadata.shared, 32 * variant.num_warps
    registers = -(-usage["REG"] // 8) * 8  # they are given out in eights
    fit = min(REGISTERS // (registers * threads), SHARED[target] // max(shared, 1), WARPS[target] // variant.num_warps)
    return Compiled(usage["REG"], shared, usage["STACK"] + usage["LOCAL"], kernel.asm["ptx"].count(".f64"),
                    fit * variant.num_warps / WARPS[target],
                    re.search(r"arith\.muli [^\n]*i64", kernel.asm["ttir"]) is not None)


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local memory, from the cuobjdump that Triton ships."""
    import triton

    tool = next(Path(triton.__file__).parent.glob("backends/nvidia/bin/cuobjdump"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
