"""Packages and their dependencies. launch/setup.sh installs torch first: which build depends on the machine."""

from setuptools import find_packages, setup

setup(
    name="toolr0",
    version="0.1.0",
    description="Tool-R0 self-play from scratch in PyTorch: GRPO trainer, sampler, rewards, curriculum",
    python_requires=">=3.11",
    packages=[*find_packages(include=["toolr0_core", "toolr0_core.*"]), "toolr0_kernels"],
    package_dir={"toolr0_kernels": "kernels/toolr0_kernels"},
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
        "dev": ["pytest==9.2.0", "hypothesis==6.170.17", "ruff==0.17.6", "accelerate==1.15.0", "matplotlib==3.11.2"],
    },
)
