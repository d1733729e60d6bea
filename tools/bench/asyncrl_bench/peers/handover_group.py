"""The group that every side of `asyncrl bench transport` hands over, and when: numpy and the standard library only.

Scripts beside this one run inside a peer's environment and import it; asyncrl's own sides do too.
"""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

MEMBERS = 16
IN_FLIGHT = 3  # groups on the way at full speed, of every side: with fewer less arrives, with more p50 is a queue
LEAST = 5  # groups of a run, however long they take
PATIENCE_S = 120.0  # for a hand-over; the slowest peer takes some seconds for the largest group
COLUMNS = {"tokens": np.int32, "mask": np.bool_, "logprobs": np.float32, "versions": np.int32}


def arrays(tokens: int) -> dict[str, list[Any]]:
    """16 members' columns, each an array of its own."""
    source = np.random.default_rng(0)
    return {
        "tokens": [source.integers(0, 50_000, tokens, np.int32) for _ in range(MEMBERS)],
        "mask": [np.ones(tokens, bool) for _ in range(MEMBERS)],
        "logprobs": [-source.random(tokens, np.float32) for _ in range(MEMBERS)],
        "versions": [np.zeros(tokens, np.int32) for _ in range(MEMBERS)],
    }


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
    """Notes of the producer in the consumer's event loop: a pipe that is read when something lies in it."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    async def next(self) -> Any:
        if not self._pipe.poll():
            loop = asyncio.get_running_loop()
            there: asyncio.Future[None] = loop.create_future()
            loop.add_reader(self._pipe.fileno(), _wake, there)
            try:
                await there
            finally:
                loop.remove_reader(self._pipe.fileno())
        return self._pipe.recv()


def _wake(there: "asyncio.Future[None]") -> None:
    if not there.done():
        there.set_result(None)
