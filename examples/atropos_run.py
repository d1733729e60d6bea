"""A run that Atropos environments feed over HTTP, and any process through shared memory: the quickstart's model.

A run from a file does the same with `door: {ring: atropos, http_port: 8000}`; here it is a program of its own, which also
saves the tokenizer for the environment.

pip install -e '.[http]'    # asyncrl[http] where it is no checkout
python examples/atropos_run.py        # then, in another terminal, what examples/atropos_env.py says
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import anyio

from asyncrl import Runtime, load_config
from asyncrl.http.access import Address
from asyncrl.http.atropos import serve
from asyncrl.transport.rings.record_ring import RecordRing

CONFIG = Path(__file__).with_name("agent_loop.yaml")


async def main(
    steps: int = 20, *, port: int = 8000, key: str | None = None, tokenizer: str = "runs/atropos_tokenizer"
) -> list[float]:
    """Train `steps` steps on what comes. `key` None: made anew. Returns the mean reward of every step."""
    rewards: list[float] = []
    config = load_config([CONFIG], ["rollout.groups_per_step=4", "run.name=atropos"])
    async with RecordRing("atropos") as ring, Runtime(config, write=False) as runtime:
        runtime.tokenizer.save_pretrained(tokenizer)  # the environment reads it from there
        reports = runtime.steps()
        async with anyio.create_task_group() as tasks:

            async def run_door(*, task_status: anyio.abc.TaskStatus[object]) -> None:
                await serve(runtime, ring, at=Address(port=port, key=key), task_status=task_status)

            door = await tasks.start(run_door)
            print(
                f"waiting for environments: --env.rollout_server_url {door.url} --env.tokenizer_name {tokenizer}",
                flush=True,
            )
            async for step in reports:
                rewards.append(step.metrics["reward/mean"])
                print(f"version {step.version}: reward {rewards[-1]:.3f}", flush=True)
                if len(rewards) == steps:
                    break
            tasks.cancel_scope.cancel()
    return rewards


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
