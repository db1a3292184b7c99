"""What each rank of test_distributed runs: `worker.py FOLDER` trains on frozen rollouts and leaves results; `worker.py` dies."""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from test_grpo import rollouts

from toolr0_core import distributed
from toolr0_core.config import GrpoConfig
from toolr0_core.grpo import Trainer
from toolr0_core.model import Model, ModelConfig

CASES = {  # settings of the model, of GRPO, of the rollouts
    "uneven": ({"tie_word_embeddings": False}, {"aggregation": "token"}, {"groups": 5, "lengths": (1, 40), "seed": 4}),
    "tied": ({"tie_word_embeddings": True}, {"checkpointing": True}, {"groups": 4, "flat": (1,)}),
    "ranks with nothing": ({}, {"beta": 0.3}, {"groups": 1, "size": 3}),
    "nothing at all": ({}, {}, {"groups": 2, "flat": (0, 1)}),
}


def tiny_model(**changes) -> Model:
    """A random model with spread-out logits, the same in every process; sizes that three ranks cannot share evenly."""
    torch.manual_seed(0)
    model = Model(ModelConfig(**{**dict(vocab_size=97, hidden_size=40, intermediate_size=70, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2, head_dim=10), **changes}))
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.normal_(0, 0.25)
    return model


def gradients(case: str, world: distributed.World) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Whole gradients of one update on frozen rollouts, and its statistics; KL is against weights that moved."""
    changes, options, drawn = CASES[case]
    rows, rewards = rollouts(**drawn)
    config = GrpoConfig(**{"beta": 0.0, "micro_batch_tokens": 60, "max_grad_norm": 1e9, **options})
    trainer = Trainer(tiny_model(**changes), config, world, lr=0.0, steps=5)
    if trainer.reference:
        with torch.no_grad():
            trainer.reference.norm.weight.mul_(1.3)
    stats = trainer.step(rows, rewards)
    return {n: world.whole(p.grad) for n, p in trainer.trained.named_parameters() if p.grad is not None}, stats


def train(world: distributed.World, folder: Path, steps: int, resume: bool = False) -> None:
    """SGD-like steps are not what is compared here: only that a phase goes on at another number of ranks."""
    model, (rows, rewards) = tiny_model(), rollouts()
    if resume:
        model.load_state_dict(load_file(folder / "weights"))
    trainer = Trainer(model, GrpoConfig(beta=0.1, max_grad_norm=1e9), world, lr=1e-4, steps=5)
    if resume:
        trainer.load_state(load_file(folder / "optimizer"), 2)
    for _ in range(steps):
        stats = trainer.step(rows, rewards)
    state, whole = trainer.state(), world.full_weights(trainer.trained)
    assert all(torch.equal(whole[n], p) for n, p in model.named_parameters())  # the sampling model has what was trained
    if world.main:
        save_file(state, folder / "optimizer")
        save_file(whole, folder / "weights")
        save_file({k: torch.tensor(v, dtype=torch.float64) for k, v in stats.items()}, folder / "stats")


def collectives(world: distributed.World) -> None:
    for n in (0, 1, 2, 7):  # fewer items than ranks, none at all
        assert world.map_shards(lambda xs: [x * x for x in xs], list(range(n))) == [x * x for x in range(n)]
    mine = {"a": torch.tensor(1.0 + world.rank), "b": torch.tensor(-1.0)}
    assert world.sum_dict(mine) == {"a": 6.0, "b": -3.0} and world.max_dict(mine) == {"a": 3.0, "b": -1.0}
    assert world.any(world.rank == 2) and not world.any(False)
    done = []
    world.on_main(lambda: done.append(1))
    assert len(done) == world.main

    def refuse():
        raise ValueError("the disk is full")

    try:
        world.on_main(refuse)
    except ValueError as error:
        assert "the disk is full" in str(error)
    else:
        raise AssertionError("a refusal of rank 0 has to reach every rank")


def main() -> None:
    torch.set_num_threads(1)
    world = distributed.setup(timeout_minutes=2)
    if len(sys.argv) == 1:
        world.map_shards(lambda xs: 1 // (world.rank - 1) and xs, [1, 2, 3])  # rank 1 fails, the others wait for it
    folder = Path(sys.argv[1])
    collectives(world)
    for case in CASES:
        grads, stats = gradients(case, world)
        if world.main:
            save_file(grads, folder / case)
            save_file({k: torch.tensor(v, dtype=torch.float64) for k, v in stats.items()}, folder / f"{case} stats")
    train(world, folder, steps=2)
    distributed.shutdown()


if __name__ == "__main__":
    main()
