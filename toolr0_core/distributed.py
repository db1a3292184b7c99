"""Several processes as one: the only file that calls torch.distributed.

Started by torchrun, the ranks form a process group (NCCL on GPUs, gloo on CPUs); started plainly, there is one rank and no
group. Everything above this file sees a World and is written once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from toolr0_core.model import Model
from toolr0_core.packing import deal


@dataclass(frozen=True)
class World:
    """This process among the others. `sharded`: parameters are split by FSDP2 (several ranks, or any GPU)."""

    rank: int
    size: int
    device: torch.device
    sharded: bool

    @property
    def main(self) -> bool:
        return self.rank == 0

    def map_shards(self, work: Callable[[list], list], items: Sequence[Any],
                   cost: Callable[[Any], float] = lambda item: 1.0) -> list[Any]:
        """work(items), each rank doing its share of the cost; all results, in the order of items, on every rank."""
        if self.size == 1:
            return work(list(items)) if items else []
        places = deal([cost(item) for item in items], self.size)
        mine = [items[i] for i in places[self.rank]]
        shares: list[Any] = [None] * self.size
        dist.all_gather_object(shares, work(mine) if mine else [])
        done = {i: result for place, share in zip(places, shares) for i, result in zip(place, share, strict=True)}
        return [done[i] for i in range(len(items))]

    def sum_dict(self, values: dict[str, Tensor]) -> dict[str, float]:
        """Sums over ranks, in one reduction and one host read; every rank has the same names."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max_dict(self, values: dict[str, Tensor]) -> dict[str, float]:
        """The same with the largest of all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: dict[str, Tensor], op: dist.ReduceOp) -> dict[str, float]:
        names = sorted(values)
        total = torch.stack([values[n].double() for n in names])
        if self.size > 1:
            dist.all_reduce(total, op)
        return dict(zip(names, total.tolist()))

    def any(self, flag: bool) -> bool:
        """True where it is on any rank."""
        if self.size == 1:
            return flag
        tensor = torch.tensor([float(flag)], device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return bool(tensor.item())

    def on_main(self, work: Callable[[], None]) -> None:
        """work() on rank 0 alone, before anyone goes on; a ValueError of it is raised on every rank."""
        problem: list[str | None] = [None]
        if self.main:
            try:
                work()
            except ValueError as error:
                problem = [str(error)]
        if self.size > 1:
            dist.broadcast_object_list(problem, device=self.device)
        if problem[0]:
            raise ValueError(problem[0])

    def item(self, value: Tensor) -> float:
        """A scalar that FSDP may have made a DTensor."""
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).item()

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def trainable(self, model: Model, weights: dict[str, Tensor] | None, checkpointing: bool = False) -> torch.nn.Module:
        """What the optimiser trains: the model itself on one CPU rank, else a sharded fp32 copy with bf16 compute on GPUs.

        weights: the fp32 weights to start from where they are more exact than the model's. A tied head is one parameter
        in the root's unit. Gradients are summed, never averaged: the loss weights are global already.
        """
        if not self.sharded:
            model.recompute = checkpointing
            return model.requires_grad_(True)
        trained = Model(model.config).to(self.device)
        trained.recompute = checkpointing
        trained.load_state_dict({k: v.float() for k, v in (weights or model.state_dict()).items()})
        policy = MixedPrecisionPolicy(param_dtype=model.embed_tokens.weight.dtype, reduce_dtype=torch.float32)
        for module in (*trained.layers, trained):
            fully_shard(module, mp_policy=policy)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        return trained

    def full_weights(self, trained: torch.nn.Module) -> dict[str, Tensor]:
        """All parameters, whole, in the optimiser's precision, on the CPU of every rank."""
        return {name: self.whole(p) for name, p in trained.state_dict().items()}

    def whole(self, value: Tensor) -> Tensor:
        """A copy on the CPU of what may be sharded."""
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().cpu().clone()

    def like(self, value: Tensor, parameter: Tensor) -> Tensor:
        """A whole tensor, sharded as the parameter is."""
        if not hasattr(parameter, "device_mesh"):
            return value.to(parameter.device)
        return distribute_tensor(value.to(self.device), parameter.device_mesh, parameter.placements)

    @torch.no_grad()
    def copy_weights(self, trained: torch.nn.Module, model: Model) -> None:
        """Writes the trained weights into the sampling model, in place, in its dtype."""
        if trained is model:
            return
        for target, source in zip(model.parameters(), trained.parameters(), strict=True):
            target.copy_(source.full_tensor() if hasattr(source, "full_tensor") else source)


def setup(timeout_minutes: int = 30) -> World:
    """The World of this process, from torchrun's environment where there is one."""
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda and local >= torch.cuda.device_count():
        raise ValueError(f"process {local} has no GPU, this machine has {torch.cuda.device_count()}; start one process per "
                         f"GPU, with --nproc_per_node={torch.cuda.device_count()}")
    if cuda:
        torch.cuda.set_device(device)
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if cuda and not launched:  # FSDP's mixed precision needs a group, if only of one
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        launched = True
    if not launched or (not cuda and os.environ["WORLD_SIZE"] == "1"):
        return World(0, 1, device, False)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=timeout_minutes))
    return World(dist.get_rank(), dist.get_world_size(), device, True)


def sampling_dtype(world: World, asked: str) -> torch.dtype:
    """The dtype of sampling and of matrix products in training; master weights are fp32 in any case."""
    return getattr(torch, asked or ("bfloat16" if world.device.type == "cuda" else "float32"))


def shutdown() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
