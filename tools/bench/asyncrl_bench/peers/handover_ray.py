"""Handing groups over through Ray's object store. Runs inside Ray's own environment: `python handover_ray.py JOB.json`.

`ray.put` in the driver, an asynchronous actor takes the reference as an argument: Ray maps the arrays into the actor without
a copy. Ray is told of more processors than there are, so that nothing waits for one.
"""

import os
import time
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
import side
from handover_group import IN_FLIGHT, arrays, turns


@ray.remote
class Consumer:
    async def take(self, group: dict[str, Any], put: int) -> tuple[int, int]:
        assert len(group["tokens"]) == len(group["versions"])
        return put, time.monotonic_ns()


def main() -> None:
    asked = side.job()
    ray.init(num_cpus=8, include_dashboard=False, configure_logging=False, object_store_memory=1 << 30)
    consumer = Consumer.remote()  # type: ignore[attr-defined]
    data = arrays(asked["tokens"])
    times: list[Any] = []
    waiting: list[Any] = []
    for _ in turns(asked):
        if asked["pace_s"] or len(waiting) == IN_FLIGHT:
            times += ray.get(waiting[:1])
            del waiting[:1]
        stamp = time.monotonic_ns()
        waiting.append(consumer.take.remote(ray.put(data), stamp))
    times += ray.get(waiting)
    side.answer({"times": times, "versions": {"ray": ray.__version__}})
    ray.shutdown()


if __name__ == "__main__":
    main()
