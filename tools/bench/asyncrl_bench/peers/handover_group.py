"""The group that every side of `asyncrl bench transport` hands over, and when: numpy and the standard library only.

Scripts beside this one run inside a peer's environment and import it; asyncrl's own sides do too.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

MEMBERS = 16
IN_FLIGHT = 3  # groups on the way at full speed, of every side: with fewer less arrives, with more p50 is a queue
LEAST = 5  # groups of a run, however long they take
PATIENCE_S = 120.0  # for a hand-over; the slowest peer takes some seconds for the largest group
COLUMNS = {"tokens": np.int32, "mask": np.bool_, "logprobs": np.float32, "versions": np.int32}


REWARDS = [float(member % 2) for member in range(MEMBERS)]


def prompt_of(tokens: int) -> int:
    """Of the `tokens` of a trajectory, those of the prompt, which all 16 share."""
    return tokens // 16


def arrays(tokens: int) -> dict[str, list[Any]]:
    """16 members' columns, each an array of its own; what a run may train."""
    source = np.random.default_rng(0)
    prompt = prompt_of(tokens)
    mask = np.arange(tokens) >= prompt
    ids = source.integers(0, 50_000, (MEMBERS, tokens), np.int32)
    ids[:, :prompt] = ids[0, :prompt]
    return {
        "tokens": [row.copy() for row in ids],
        "mask": [mask.copy() for _ in range(MEMBERS)],
        "logprobs": [np.where(mask, -source.random(tokens, np.float32), np.float32(0)) for _ in range(MEMBERS)],
        "versions": versions_of(0, tokens),
    }


def versions_of(group: int, tokens: int) -> list[Any]:
    """Of each member's tokens. The run has a new version with every group; one that is sure to be there already when `group` is
    put: no more than IN_FLIGHT are on the way."""
    rows = [np.full(tokens, max(0, group - IN_FLIGHT), np.int32) for _ in range(MEMBERS)]
    for row in rows:
        row[: prompt_of(tokens)] = -1
    return rows


def footprint(tokens: int) -> int:
    """Bytes of one group."""
    return MEMBERS * tokens * sum(np.dtype(kind).itemsize for kind in COLUMNS.values())


def turns(job: dict[str, Any], credit: Any = None) -> Iterator[int]:
    """Group numbers, each when its hand-over is due, until the job's number of groups or of seconds is over.

    Paced: one every `pace_s` at most, and only when the last one arrived (`credit`): what is timed is a hand-over, not a
    queue before it. A late one is not made up for. Full speed: as `credit`, or the side's own bound, allows.
    """
    due = time.monotonic()
    end = due + job["seconds"]
    for group in range(job["groups"]):
        if group >= LEAST and time.monotonic() > end:
            return
        if credit is not None and not credit.acquire(timeout=PATIENCE_S):
            raise SystemExit(f"group {group}: no earlier one arrived within {PATIENCE_S} s; the consumer died")
        if job["pace_s"]:
            due = max(due + job["pace_s"], time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
        yield group


class Notes:
    """What comes through a pipe, in the event loop of who waits for it: read when something lies in it."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    async def next(self) -> Any:
        await readable(self._pipe)
        return self._pipe.recv()


async def readable(pipe: Any) -> None:
    if not pipe.poll():
        loop = asyncio.get_running_loop()
        there: asyncio.Future[None] = loop.create_future()
        loop.add_reader(pipe.fileno(), _wake, there)
        try:
            await there
        finally:
            loop.remove_reader(pipe.fileno())
            os.set_blocking(pipe.fileno(), True)  # uvloop changed it, and a large message comes in parts


def _wake(there: "asyncio.Future[None]") -> None:
    if not there.done():
        there.set_result(None)
