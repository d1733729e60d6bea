"""One rank of a run under torchrun that also says what it trained and what it ended with (for the tests)."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import torch

from asyncrl import Runtime, load_config


async def main() -> None:
    groups: list[list[int]] = []
    async with Runtime(load_config([sys.argv[1]], sys.argv[2:])) as runtime:
        steps = runtime.steps()
        summary = await runtime.run()
        async for report in steps:
            groups.append([group.group_id for group in report.groups])
        policy = runtime.built.policy
        assert policy is not None
        weights = {name: tensor.clone() for name, tensor in policy.flat.named_masters()}
    files = {name: tensor.contiguous() for name, tensor in weights.items()}
    torch.save(
        {"version": summary.version, "weights": weights, "named": files, "groups": groups},
        Path(os.environ["RANK_WEIGHTS"]) / f"rank_{os.environ['RANK']}.pt",
    )
    if os.environ["RANK"] == "0":
        print(f"done: version {summary.version}")


asyncio.run(main())
