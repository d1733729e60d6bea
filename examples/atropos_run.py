"""Train the quickstart's model on groups that arrive over HTTP (Atropos environments) or through shared memory.

    pip install -e '.[http]'
    python examples/atropos_run.py

Without a checkout, install `asyncrl[http]`. Then start `examples/atropos_env.py` in another terminal, as its docstring
says. A configuration file does the same with `door: {ring: atropos, http_port: 8000}`. This program also saves the
tokenizer for the environment.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import anyio

from asyncrl import Runtime, load_config
from asyncrl.atropos.door import serve
from asyncrl.http.access import Address
from asyncrl.transport.rings.record_ring import RecordRing

CONFIG = Path(__file__).with_name("agent_loop.yaml")


async def main(
    steps: int = 20, *, port: int = 8000, key: str | None = None, tokenizer: str = "runs/atropos_tokenizer"
) -> list[float]:
    """Train `steps` steps on the groups that arrive. Returns the mean reward of each step.

    `key`: the key that clients must send; None: a new random key. `tokenizer`: the folder for the tokenizer.
    """
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
