"""Shared by tests: one thread (the suite runs on two cores), and tiny models of every family."""

import os
from pathlib import Path

import pytest
import torch
from toolr0_kernels import cpp

from toolr0_core.model import Model, ModelConfig


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _programs_find_the_packages():
    """Programs that tests start run without an install too."""
    root = Path(__file__).parents[1]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "kernels")])
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture
def tiny():
    """tiny(**changes) -> a random model with spread-out logits, the same for the same changes."""
    def make(**changes) -> Model:
        torch.manual_seed(0)
        settings = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
                        num_key_value_heads=2, head_dim=12)
        model = Model(ModelConfig(**{**settings, **changes}))
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim == 2:
                    p.normal_(0, 0.25)
        return model
    return make


@pytest.fixture(params=["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else ["torch", "cpp"])
def impl(request):
    """Every implementation of a kernel that this process can run; Triton's interpreter has one of its own."""
    if request.param == "cpp" and cpp.problem:
        pytest.skip(f"the C++ ops were not built: {cpp.problem}")
    return request.param
