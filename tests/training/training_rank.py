"""One rank of the distributed gradient test: `python training_rank.py RANK WORLD PORT OUT SHARES LOSS`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from training_helpers import MAX_LENGTH, make_group, tiny_policy

from asyncrl.algorithms.registry import build_loss
from asyncrl.config.schema import TrainConfig
from asyncrl.data.packing import pack_groups
from asyncrl.distributed.world import World
from asyncrl.training.trainer import TorchTrainer

GROUPS = 5


def groups() -> list:
    rng = np.random.default_rng(11)
    return [make_group(rng, i, masked=(0,) if i == 4 else ()) for i in range(GROUPS)]


def step(world: object, mine: list, name: str) -> dict:
    """Two steps with this rank's groups; everything that must be equal to the run with one rank."""
    policy = tiny_policy()
    config = TrainConfig(lr=0.01, grad_clip=0.05)
    trainer = TorchTrainer(policy, config, world, max_completion_length=MAX_LENGTH)
    results = []
    for _ in range(2):
        trainer.begin_train_step(build_loss(name))
        for group in mine:
            for batch in pack_groups([group], 30):
                trainer.train_microbatch(batch)
        result = trainer.finish_train_step()
        results.append(
            (result.version, result.loss, result.grad_norm, result.tokens, result.sequences, dict(result.metrics))
        )
    return {"results": results, "weights": policy.flat.master.clone(), "gradient": policy.flat.grad.clone()}


def main() -> None:
    rank, size, port, out, shares, name = sys.argv[1:]
    torch.set_num_threads(1)
    environ = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    import os

    os.environ.update(environ)
    counts = [int(c) for c in shares.split(",")]
    first = sum(counts[: int(rank)])
    with World.from_env(environ).open(torch.device("cpu"), timeout_s=120) as world:
        torch.save(step(world, groups()[first : first + counts[int(rank)]], name), Path(out) / f"{rank}.pt")


if __name__ == "__main__":
    main()
