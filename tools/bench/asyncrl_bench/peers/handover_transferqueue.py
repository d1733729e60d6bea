"""Handing groups over through TransferQueue's simple storage. Runs inside its own environment: `python ... JOB.json`.

`kv_batch_put` of 16 rows in one process, a note through a pipe, `async_kv_batch_get` in the other one's event loop, then the
rows are cleared. Rows have one length, so the columns are stacked: its fastest form. `TransferQueue.init` waits for ever,
without a word, where Ray has two processors to give: Ray is told of 16.
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
from handover_group import COLUMNS, IN_FLIGHT, MEMBERS, Notes, arrays, turns
from tensordict import TensorDict

PARTITION = "groups"


def keys(group: int) -> list[str]:
    return [f"{group}_{member}" for member in range(MEMBERS)]


async def take(notes: Notes, credit: Any) -> list[tuple[int, int]]:
    times = []
    while (note := await notes.next()) is not None:
        group, put = note
        rows = await tq.async_kv_batch_get(keys=keys(group), partition_id=PARTITION)
        held = {name: [row.numpy() for row in rows[name].unbind()] for name in COLUMNS}
        times.append((put, time.monotonic_ns()))
        assert [len(row) for row in held["tokens"]] == [len(row) for row in held["logprobs"]]
        await tq.async_kv_clear(keys=keys(group), partition_id=PARTITION)
        credit.release()
    return times


def consume(address: str, pipe: Any, credit: Any) -> None:
    ray.init(address=address, configure_logging=False)
    tq.init()
    pipe.send("ready")
    pipe.send(asyncio.run(take(Notes(pipe), credit)))


def main() -> None:
    asked = side.job()
    torch.set_num_threads(1)
    started = ray.init(num_cpus=16, include_dashboard=False, configure_logging=False, object_store_memory=1 << 30)
    tq.init()
    context = multiprocessing.get_context("spawn")
    credit = context.Semaphore(1 if asked["pace_s"] else IN_FLIGHT)
    ours, theirs = context.Pipe()
    process = context.Process(target=consume, args=(started.address_info["gcs_address"], theirs, credit), daemon=True)
    process.start()
    assert ours.recv() == "ready"
    data = arrays(asked["tokens"])
    for group in turns(asked, credit):
        stamp = time.monotonic_ns()
        fields = {name: torch.from_numpy(np.stack(column)) for name, column in data.items()}
        tq.kv_batch_put(keys=keys(group), partition_id=PARTITION, fields=TensorDict(fields, batch_size=MEMBERS))
        ours.send((group, stamp))
    ours.send(None)
    times = ours.recv()
    process.join()
    side.answer(
        {
            "times": times,
            "versions": {"TransferQueue": version("TransferQueue"), "ray": ray.__version__, "torch": torch.__version__},
        }
    )
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
