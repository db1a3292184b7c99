"""Packages, their dependencies and the C++ ops. launch/setup.sh installs torch first: which build depends on the machine."""

import os
import platform
import re
import shutil
import subprocess
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

TORCH = Path(sysconfig.get_path("purelib")) / "torch"  # found, not imported: pip builds where torch cannot be imported
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"))
ABI = dict(define_macros=[("Py_LIMITED_API", "0x030b0000"), ("TORCH_TARGET_VERSION", "0x020b000000000000")],
           include_dirs=[str(TORCH / "include")], language="c++", py_limited_api=True, optional=True)


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
        "toolr0_kernels._C", sorted(glob("csrc/*.cpp")), depends=sorted(glob("csrc/*.h")), library_dirs=[str(TORCH / "lib")],
        libraries=["torch", "torch_cpu", "c10"], extra_compile_args=flags, **ABI)]


def cuda_ops() -> list[Extension]:
    """csrc/cuda/, where torch is a CUDA build and nvcc is there; Triton runs otherwise. CUDA's runtime is linked in: torch's
    may be of another version."""
    if NVCC is None or not (TORCH / "lib" / "libtorch_cuda.so").exists():
        return []
    return [Extension(
        "toolr0_kernels._cuda", ["csrc/cuda/ops.cpp", *sorted(glob("csrc/cuda/*.cu"))],
        depends=sorted(glob("csrc/cuda/*.*h") + glob("csrc/*.h")), library_dirs=[str(TORCH / "lib")],
        libraries=["torch", "torch_cpu", "torch_cuda", "c10", "cudart_static", "rt", "dl", "pthread"],
        extra_compile_args=["-std=c++17", "-O3", "-DUSE_CUDA"], **ABI)]


class Build(build_ext):
    """.cu files go through nvcc, for Ampere and Hopper, and as PTX for what comes later."""

    def build_extension(self, ext: Extension) -> None:
        for source in [x for x in ext.sources if x.endswith(".cu")]:
            out = Path(self.build_temp, source).with_suffix(".cu.o")
            out.parent.mkdir(parents=True, exist_ok=True)
            self.spawn([NVCC, "-std=c++17", "-O3", "-Xcompiler", "-fPIC", "-gencode", "arch=compute_80,code=sm_80", "-gencode",
                        "arch=compute_90,code=[sm_90,compute_90]", "-c", source, "-o", str(out)])
            plan = subprocess.run([NVCC, "--dryrun", "-c", source], capture_output=True, text=True).stderr
            ext.extra_link_args += re.findall('"(-L[^"]+)"', plan)  # where this nvcc has the runtime
            ext.sources.remove(source)
            ext.extra_objects.append(str(out))
        super().build_extension(ext)


setup(
    name="toolr0",
    version="0.1.0",
    description="Tool-R0 self-play from scratch in PyTorch: GRPO trainer, sampler, rewards, curriculum",
    python_requires=">=3.11",
    packages=[*find_packages(include=["toolr0_core", "toolr0_core.*"]), *find_packages("kernels")],
    package_dir={"toolr0_kernels": "kernels/toolr0_kernels"},
    ext_modules=cpp_ops() + cuda_ops(),
    cmdclass={"build_ext": Build},
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
