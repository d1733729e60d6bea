"""Handing groups over through TransferQueue's simple storage. Runs inside its own environment: `python ... JOB.json`.

`kv_batch_put` of 16 rows in one process, a note through a pipe, `async_kv_batch_get` in the other one's event loop, which does
with them what every side does (way.py); then the rows are cleared. Rows have one length, so the columns are stacked: its fastest
form. `TransferQueue.init` waits for ever, without a word, where Ray has two processors to give: Ray is told of 16.
"""

import asyncio
import multiprocessing
import os
import time
from importlib.metadata import version
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import numpy as np
import ray
import side
import torch
import transfer_queue as tq
from handover_group import COLUMNS, IN_FLIGHT, MEMBERS, REWARDS, Notes, arrays, prompt_of, turns, versions_of
from tensordict import TensorDict
from way import Way

PARTITION = "groups"


def keys(group: int) -> list[str]:
    return [f"{group}_{member}" for member in range(MEMBERS)]


async def take(tokens: int, pipe: Any, credit: Any) -> None:
    way, notes = Way(MEMBERS, tokens, prompt_of(tokens), credit.release), Notes(pipe)
    async with way:
        pipe.send("ready")
        while isinstance(group := await notes.next(), int):
            rows = await tq.async_kv_batch_get(keys=keys(group), partition_id=PARTITION)
            held = {name: [row.numpy() for row in rows[name].unbind()] for name in COLUMNS}
            await way.handed(group, held, rows["rewards"].tolist())
            await tq.async_kv_clear(keys=keys(group), partition_id=PARTITION)
        await way.wait_cleared(len(group))
        pipe.send("cleared")
    pipe.send(way.result(group))


def consume(address: str, tokens: int, pipe: Any, credit: Any) -> None:
    ray.init(address=address, configure_logging=False)
    tq.init()
    asyncio.run(take(tokens, pipe, credit))


def main() -> None:
    asked = side.job()
    torch.set_num_threads(1)
    started = ray.init(num_cpus=16, include_dashboard=False, configure_logging=False, object_store_memory=1 << 30)
    tq.init()
    context = multiprocessing.get_context("spawn")
    credit = context.Semaphore(1 if asked["pace_s"] else IN_FLIGHT)
    ours, theirs = context.Pipe()
    given = (started.address_info["gcs_address"], asked["tokens"], theirs, credit)
    process = context.Process(target=consume, args=given, daemon=True)
    process.start()
    assert ours.recv() == "ready"
    data, puts = arrays(asked["tokens"]), list[int]()
    begun = side.cpu_seconds()
    for group in turns(asked, credit):
        given = data | {"versions": versions_of(group, asked["tokens"])}
        puts.append(time.monotonic_ns())
        fields = {name: torch.from_numpy(np.stack(column)) for name, column in given.items()}
        fields["rewards"] = torch.tensor(REWARDS)
        tq.kv_batch_put(keys=keys(group), partition_id=PARTITION, fields=TensorDict(fields, batch_size=MEMBERS))
        ours.send(group)
    ours.send(puts)
    assert ours.recv() == "cleared"
    spent = side.cpu_seconds() - begun
    found = ours.recv()
    process.join()
    side.answer(
        {
            **found,
            "cpu_s": spent,
            "versions": {"TransferQueue": version("TransferQueue"), "ray": ray.__version__, "torch": torch.__version__},
        }
    )
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
