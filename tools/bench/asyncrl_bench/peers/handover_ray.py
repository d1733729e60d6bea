"""Handing groups over through Ray's object store. Runs inside Ray's own environment: `python handover_ray.py JOB.json`.

`ray.put` in the driver, an asynchronous actor takes the reference as an argument: Ray maps the arrays into the actor without
a copy, and the actor does with them what every side does (way.py). Ray is told of more processors than there are, so that nothing
waits for one.
"""

import os
import time
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import asyncio

import ray
import side
from handover_group import IN_FLIGHT, MEMBERS, REWARDS, arrays, prompt_of, turns, versions_of
from way import Way


@ray.remote
class Consumer:
    def __init__(self, tokens: int) -> None:
        self._way = Way(MEMBERS, tokens, prompt_of(tokens))
        self._open, self._over = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Takes groups from `ready` to `end`."""
        async with self._way:
            self._open.set()
            await self._over.wait()

    async def ready(self) -> None:
        await self._open.wait()

    async def take(self, group: int, data: dict[str, Any], rewards: list[float]) -> None:
        """Returns when the group was trained and cleared."""
        await self._way.handed(group, data, rewards)
        await self._way.wait_cleared(group + 1)

    async def end(self, puts: list[int]) -> dict[str, Any]:
        found: dict[str, Any] = self._way.result(puts)
        self._over.set()
        return found


def main() -> None:
    asked = side.job()
    ray.init(num_cpus=8, include_dashboard=False, configure_logging=False, object_store_memory=1 << 30)
    consumer = Consumer.remote(asked["tokens"])  # type: ignore[attr-defined]
    running = consumer.run.remote()
    ray.get(consumer.ready.remote())
    data = arrays(asked["tokens"])
    puts: list[int] = []
    waiting: list[Any] = []
    begun = side.cpu_seconds()
    for group in turns(asked):
        if asked["pace_s"] or len(waiting) == IN_FLIGHT:
            ray.get(waiting[:1])
            del waiting[:1]
        given = data | {"versions": versions_of(group, asked["tokens"])}
        puts.append(time.monotonic_ns())
        waiting.append(consumer.take.remote(group, ray.put(given), REWARDS))
    ray.get(waiting)
    spent = side.cpu_seconds() - begun
    found = ray.get(consumer.end.remote(puts))
    ray.get(running)
    side.answer({**found, "cpu_s": spent, "versions": {"ray": ray.__version__}})
    ray.shutdown()


if __name__ == "__main__":
    main()
