"""One rank of the distributed gradient test: `python training_rank.py RANK WORLD PORT OUT SHARES LOSS,LOSS...`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from training_helpers import MAX_LENGTH, everything, make_group, tiny_policy, with_columns

from asyncrl.algorithms.registry import build_loss
from asyncrl.config.schema import TrainConfig
from asyncrl.data.packing import pack_groups
from asyncrl.distributed.world import World
from asyncrl.pumps.building import counted_only
from asyncrl.training.trainer import TorchTrainer

GROUPS = 5
SILENT = (0, 3)  # all that rank 0 has where the shares are 1 and 4, and one of the other's


def groups() -> list:
    rng = np.random.default_rng(11)
    return [make_group(rng, i, masked=(0,) if i == 4 else ()) for i in range(GROUPS)]


def step(world: object, mine: list, name: str) -> dict:
    """Two steps with this rank's groups; everything that must be equal to the run with one rank.

    `name`: a loss; with `+` every term is on, the bonus in the second buffer; with `?` the step is surveyed first;
    with `=` the groups of `SILENT` have no advantages, and with `!` they are not run either."""
    policy = tiny_policy()
    silent = [group.group_id for group, _ in mine if group.group_id in SILENT and name[-1] in "!="]
    skipped = [group for group, _ in mine if group.group_id in silent and name.endswith("!")]
    mine = [(group, 0 * values if group.group_id in silent else values) for group, values in mine]
    mine = mine if not skipped else [pair for pair in mine if pair[0].group_id not in silent]
    name = name.rstrip("!=")
    config = TrainConfig(lr=0.01, grad_clip=0.05)
    loss = build_loss(name) if name.isidentifier() else everything(name[:-1], top=0.4 if name.endswith("?") else 1.0)
    second = name.endswith("+") and loss.extra_normaliser is not None
    trainer = TorchTrainer(policy, config, world, max_completion_length=MAX_LENGTH, second_buffer=second)
    results = []
    for _ in range(2):
        bound, batches = loss, [batch for group in mine for batch in pack_groups([group], 30)]
        if skipped:
            batches.append(counted_only(skipped))
        if not name.isidentifier():
            batches = [with_columns(batch) for batch in batches]
        if name.endswith("?"):
            bound, batches = trainer.survey(loss, batches, [trainer.compute_entropies(batch) for batch in batches])
        trainer.begin_train_step(bound)
        for batch in batches:
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
        mine = groups()[first : first + counts[int(rank)]]
        torch.save([step(world, mine, each) for each in name.split(",")], Path(out) / f"{rank}.pt")


if __name__ == "__main__":
    main()
