"""One rank of a run under torchrun that also says what it trained and what it ended with (for the tests)."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import torch
from torch.distributed import distributed_c10d

from asyncrl import Runtime, load_config
from asyncrl.distributed.launcher import tie_to_launcher
from asyncrl.main import open_doors, open_ring
from asyncrl.runtime import real


def refuse(*_: object) -> None:
    """Every collective of objects comes here: what another rank says must not be able to run code."""
    raise AssertionError("an object was pickled for the other ranks, or unpickled")


async def main() -> None:
    groups: list[list[int]] = []
    rows: list[list[tuple[float | None, int, int]]] = []  # by step: reward, completion and sampled tokens
    metrics: list[dict[str, float]] = []
    config = load_config([sys.argv[1]], sys.argv[2:])
    async with open_ring(config) as ring, Runtime(config) as runtime:
        steps = runtime.steps()
        if ring is not None:
            runtime.announce()
            runtime.start("door", open_doors, runtime, ring)
        summary = await runtime.run()
        async for report in steps:
            groups.append([group.group_id for group in report.groups])
            trained = [t for group in report.groups for t in group.trajectories]
            rows.append([(t.reward, t.completion_length, int(t.mask.sum())) for t in trained])
            metrics.append(dict(report.metrics))
        policy = runtime.built.policy
        assert policy is not None
        weights = {name: tensor.clone() for name, tensor in policy.flat.named_masters()}
    files = {name: tensor.contiguous() for name, tensor in weights.items()}
    torch.save(
        {
            "version": summary.version,
            "weights": weights,
            "named": files,
            "groups": groups,
            "rows": rows,
            "metrics": metrics,
        },
        Path(os.environ["RANK_WEIGHTS"]) / f"rank_{os.environ['RANK']}.pt",
    )
    if os.environ["RANK"] == "0":
        print(f"done: version {summary.version}")


if "ROUNDS" in os.environ:  # as with less memory
    real.cut_model = lambda config, device, world, placement: real.Cut(world.world_size)
tie_to_launcher()  # as `asyncrl.main` is
distributed_c10d._object_to_tensor = distributed_c10d._tensor_to_object = refuse
asyncio.run(main())
