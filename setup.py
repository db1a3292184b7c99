"""Packages, their dependencies and the C++ ops. launch/setup.sh installs torch first: which build depends on the machine."""

import os
import platform
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, find_packages, setup

TORCH = Path(sysconfig.get_path("purelib")) / "torch"  # found, not imported: pip builds where torch cannot be imported


def cpp_ops() -> list[Extension]:
    """csrc/ over torch's stable ABI; optional: without a compiler, or without torch, the plain torch path runs."""
    if not (TORCH / "include").is_dir():
        print(f"no torch in {TORCH.parent}: the C++ ops are left out; install torch first for faster CPU kernels")
        return []
    flags = ["-std=c++17", "-O3", f"-march={os.environ.get('TOOLR0_MARCH', 'native')}", "-fno-math-errno",
             "-fno-trapping-math", "-fopenmp-simd"]
    if platform.machine() in ("x86_64", "AMD64"):
        flags.append("-mprefer-vector-width=512")
    return [Extension(
        "toolr0_kernels._C", sorted(glob("csrc/*.cpp")), depends=sorted(glob("csrc/*.h")),
        include_dirs=[str(TORCH / "include")], library_dirs=[str(TORCH / "lib")], libraries=["torch", "torch_cpu", "c10"],
        extra_compile_args=flags, language="c++",
        define_macros=[("Py_LIMITED_API", "0x030b0000"), ("TORCH_TARGET_VERSION", "0x020b000000000000")],
        py_limited_api=True, optional=True)]


setup(
    name="toolr0",
    version="0.1.0",
    description="Tool-R0 self-play from scratch in PyTorch: GRPO trainer, sampler, rewards, curriculum",
    python_requires=">=3.11",
    packages=[*find_packages(include=["toolr0_core", "toolr0_core.*"]), *find_packages("kernels")],
    package_dir={"toolr0_kernels": "kernels/toolr0_kernels"},
    ext_modules=cpp_ops(),
    package_data={"toolr0_core": ["assets/nano/*", "assets/everyday.json", "assets/report.html"]},
    install_requires=[
        "torch>=2.11",
        "numpy==2.4.6",
        "safetensors==0.8.0",
        "tokenizers>=0.23,<0.24",
        "jinja2==3.1.6",
        "datasketch==2.0.0",
        "rich==15.0.0",
        "tqdm==4.70.1",
        "huggingface_hub>=1.0",
        "gguf==0.19.0",
        "transformers>=5.20,<6",
    ],
    extras_require={
        "gpu": ["triton", "flash-attn"],
        "track": ["matplotlib==3.11.2"],
        "dev": ["pytest==9.2.0", "hypothesis==6.170.17", "ruff==0.17.6", "accelerate==1.15.0", "matplotlib==3.11.2",
                "triton>=3.6; sys_platform == 'linux'"],  # for its interpreter and its compiler, which need no GPU
    },
)
