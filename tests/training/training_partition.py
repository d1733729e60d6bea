"""One rank that trains whatever part of a step it is told: `python training_partition.py RANK WORLD PORT OUT`.

A line on stdin: `{"name": loss, "seed": n, "where": [[rank, microbatch], ...]}`, a place for each sequence of the step. The
answer is the file `OUT/RANK.pt`, then a line on stdout. Behind the name of a loss: `?` surveys the step first, with a mask of top
entropy; `=` leaves the loss its own terms alone and group 0 no advantages; `!` does not run that group either.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from training_helpers import MAX_LENGTH, everything, make_group, make_trees, tiny_policy, train_step, with_columns

from asyncrl.algorithms.registry import build_loss
from asyncrl.config.schema import TrainConfig
from asyncrl.data.packing import pack_groups
from asyncrl.distributed.world import World
from asyncrl.models.policy import PolicyModel
from asyncrl.pumps.building import microbatch_of_counts
from asyncrl.training.trainer import TorchTrainer
from asyncrl.types import Group, Microbatch

GROUPS, SIZE = 3, 3
SEQUENCES = GROUPS * SIZE


def groups(seed: int) -> list[Any]:
    """Group 1 has a fully masked member. In group 2 members have branches, and share sampled tokens."""
    rng = np.random.default_rng(seed)
    lines = [make_group(rng, i, size=SIZE, masked=(2,) if i == 1 else (), holes=i == 0) for i in range(GROUPS - 1)]
    return [*lines, make_trees(rng, GROUPS - 1, SIZE)]


def part(seed: int, where: list[list[int]], rank: int, name: str = "") -> list[Microbatch]:
    """The microbatches of this rank: sequence `g x SIZE + m` is member m of group g, wherever it is put."""
    found: list[Microbatch] = []
    counted: list[Group] = []
    for chunk in sorted({chunk for owner, chunk in where if owner == rank}):
        pieces = []
        for g, (group, advantages) in enumerate(groups(seed)):
            members = [m for m in range(SIZE) if where[g * SIZE + m] == [rank, chunk]]
            if members:
                chosen = replace(group, trajectories=tuple(group.trajectories[m] for m in members))
                silent = g == 0 and name[-1:] in ("=", "!")
                if silent and name.endswith("!"):
                    counted.append(chosen)
                else:
                    pieces.append((chosen, advantages[members] * (not silent)))
        found += pack_groups(pieces, 10_000)
    return [with_columns(microbatch) for microbatch in found] + ([microbatch_of_counts(counted)] if counted else [])


@cache
def policy() -> PolicyModel:
    """One for all steps: at a learning rate of 0 none of them moves it."""
    return tiny_policy()


def step(world: Any, name: str, microbatches: list[Microbatch]) -> dict[str, Any]:
    """One step through the split train step, every term of the loss on."""
    surveyed, plain = name.endswith("?"), name[-1:] in ("=", "!")
    name = name.rstrip("?=!")
    loss = build_loss(name) if plain else everything(name, top=0.4 if surveyed else 1.0)
    policy().version = 0
    trainer = TorchTrainer(policy(), TrainConfig(lr=0.0, grad_clip=None), world, max_completion_length=MAX_LENGTH)
    result = train_step(trainer, microbatches, loss)
    numbers = {**result.metrics, "loss": result.loss, "tokens": result.tokens, "sequences": result.sequences}
    return {"gradient": trainer.policy.flat.grad.clone(), "numbers": numbers}


def main() -> None:
    rank, size, port, out = sys.argv[1:]
    torch.set_num_threads(1)
    os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    with World.from_env(os.environ).open(torch.device("cpu"), timeout_s=120) as world:
        for line in sys.stdin:
            asked = json.loads(line)
            mine = part(asked["seed"], asked["where"], int(rank), asked["name"])
            torch.save(step(world, asked["name"], mine), Path(out) / f"{rank}.pt")
            print("done", flush=True)


if __name__ == "__main__":
    main()
