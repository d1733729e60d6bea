"""One rank that tells the others its rewards: `python pumps_rank.py RANK WORLD PORT OUT SHARES`.

With OUT `leave` it leaves before the others hear from it.
"""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from asyncrl.algorithms.advantages import GroupRewards
from asyncrl.algorithms.registry import ADVANTAGES, build_advantage
from asyncrl.distributed.world import World
from asyncrl.pumps.building import advantages_of_rank
from asyncrl.pumps.metrics import decode_part, encode_part

Row = tuple[int, GroupRewards]
STEP_ADVANTAGES = [name for name, each in ADVANTAGES.items() if each.needs_whole_step]


def drawn(rng: np.random.Generator, group_id: int) -> Row:
    """A group of one to four members, some of them unscorable, some all equal."""
    members = int(rng.integers(1, 5))
    equal = rng.random() < 0.2

    def column() -> list[float | None]:
        values = rng.choice([0.0, 0.5, 1.0], members) if equal else rng.normal(0, 3, members)
        return [None if rng.random() < 0.2 else float(value) for value in values]

    lengths = rng.integers(0, 6, members).tolist()
    return group_id, GroupRewards(column(), {"a": column(), "b": column()}, {"a": 1.0, "b": 0.3}, lengths)


def step(seed: int, groups: int) -> list[Row]:
    """The groups of a step, in the order of their ids."""
    rng = np.random.default_rng(seed)
    return [drawn(rng, group_id) for group_id in sorted(rng.choice(100, groups, replace=False).tolist())]


def split(rows: list[Row], shares: list[int], seed: int) -> list[list[Row]]:
    """The groups on ranks, in any order of arrival: `shares[r]` of them on rank r."""
    order = np.random.default_rng(seed).permutation(len(rows)).tolist()
    ends = np.cumsum([0, *shares]).tolist()
    return [[rows[i] for i in order[first:last]] for first, last in pairwise(ends)]


def main() -> None:
    rank, size, port, out, shares = sys.argv[1:]
    counts = [int(count) for count in shares.split(",")]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = dict(zip(names, (rank, size, rank, size, "127.0.0.1", port), strict=True))
    os.environ.update(environ)  # torch's rendezvous reads it there
    with World.from_env().open(torch.device("cpu"), timeout_s=20) as world:
        found = []
        for seed in range(8):
            mine = split(step(seed, sum(counts)), counts, seed)[world.rank]
            if out == "leave" and world.rank == 1:
                return
            parts = [decode_part(each) for each in world.all_gather_bytes(encode_part(mine))]
            for name in STEP_ADVANTAGES:
                values = advantages_of_rank(build_advantage(name), parts, world.rank)
                found.append({group_id: value.tolist() for (group_id, _), value in zip(mine, values, strict=True)})
        torch.save(found, Path(out) / f"{rank}.pt")


if __name__ == "__main__":
    main()
