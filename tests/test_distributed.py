"""distributed: three gloo processes do what one does, with any share of the work, and none waits for ever."""

import os
import subprocess
import sys
from pathlib import Path

import distributed_worker
import pytest
import torch
from distributed_worker import tiny_model
from safetensors.torch import load_file
from test_grpo import ONE, rollouts

from toolr0_core import distributed
from toolr0_core.config import GrpoConfig
from toolr0_core.grpo import Trainer


def launch(*arguments, timeout=120):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=3", "--rdzv-backend=c10d",
               "--rdzv-endpoint=localhost:0", distributed_worker.__file__, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # so that the launcher ends its ranks too; killed, it would leave them waiting
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> Path:
    """The folder in which three ranks left their results."""
    folder = tmp_path_factory.mktemp("three")
    done = launch(folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", distributed_worker.CASES)
def test_three_ranks_have_the_gradients_and_figures_of_one(three, case):
    """Frozen rollouts, uneven groups, ranks with nothing, a tied head (faults 11, 12)."""
    expected, figures = distributed_worker.gradients(case, ONE)
    got, stats = load_file(three / case), load_file(three / f"{case} stats")
    assert got.keys() == expected.keys() and (case == "nothing at all") == (not got)
    assert ("lm_head.weight" in got) == (case == "uneven")  # a tied head is one parameter, with the sum of both uses
    for name, gradient in expected.items():
        assert (got[name] - gradient).norm() < 1e-5 * gradient.norm().clamp(min=1e-6), name
    assert {k: v.item() for k, v in stats.items()} == pytest.approx(figures, rel=1e-4, abs=1e-6)
    assert case != "ranks with nothing" or figures["kl"] > 1e-3


@pytest.mark.slow
def test_a_phase_begun_by_three_ranks_goes_on_with_one(three):
    model = tiny_model()
    model.load_state_dict(load_file(three / "weights"))
    config, (rows, rewards) = GrpoConfig(beta=0.1, max_grad_norm=1e9), rollouts()
    trainer = Trainer(model, config, ONE, lr=1e-4, steps=5)
    trainer.load_state(load_file(three / "optimizer"), 2)
    stats = trainer.step(rows, rewards)
    straight = Trainer(tiny_model(), config, ONE, lr=1e-4, steps=5)
    for _ in range(3):
        expected = straight.step(rows, rewards)
    assert expected["kl"] > 0 and stats == pytest.approx(expected, rel=1e-2, abs=1e-6)


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_of_them():
    done = launch(timeout=60)  # far less than the group's time-out
    assert done.returncode != 0 and "ZeroDivisionError" in done.stderr


def test_one_process_is_a_world_of_one_without_a_group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    world = distributed.setup()
    assert (world.rank, world.size, world.sharded, world.main) == (0, 1, False, True)
    model = tiny_model()
    assert world.trainable(model, None) is model and not torch.distributed.is_initialized()
    assert world.map_shards(lambda xs: xs[::-1], [1, 2]) == [2, 1] and world.any(True)
    assert world.sum_dict({"a": torch.tensor(2.0)}) == world.max_dict({"a": torch.tensor(2.0)}) == {"a": 2.0}
    with pytest.raises(ValueError, match="full"):
        world.on_main(lambda: (_ for _ in ()).throw(ValueError("full")))


def test_more_processes_than_gpus_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="process 2 has no GPU, this machine has 2; .* --nproc_per_node=2"):
        distributed.setup()
