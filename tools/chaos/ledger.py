"""The shared ledger of many ranks over one real store, some of whose watchers the machine leaves aside for hundreds of changes.

    python tools/chaos ledger                            # 64 ranks, some seconds, as in CI
    python tools/chaos ledger --seconds 500              # by hand
    python tools/chaos ledger --unsealed                 # what the authentication codes cost: compare `made_per_s`

All ranks live in this process, each with its ledger, its two threads and its own connections. In a round a few of them make many
changes and every other one makes one, as each does in a step; watchers are held up at random before they wait, some of them
until 300 changes and more than a second have passed, so that what they hear is late on any machine. Then nobody changes anything
more, and every rank has to hear of the last change soon.

One line of JSON is printed: the longest that this took, what was asked of the store for each change and of each watcher for
each time that it heard of one, the keys that were left, and what was counted as heard late. Exit 1 where a rank took longer than
the bound, or announcements were not removed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from asyncrl.distributed.sealed import SealedStore
from asyncrl.distributed.store_ledger import StoreLedger
from asyncrl.distributed.watch import LATE_S
from asyncrl.telemetry.recorder import Recorder

BOUND_S = 5.0  # 129 threads share an interpreter here: a rank alone hears within milliseconds
KEYS = 5000  # that may be left: announcements that somebody may still wait for
BEHIND = 300  # changes that pass while a slow watcher is held up
SLOW = 4  # such ranks
WRITERS = 4  # ranks that make most changes


@dataclass
class Round:
    made: int = 0  # changes, over all rounds
    over: bool = True
    held: set[object] = field(default_factory=set)  # watchers that are held up, and will be for a while yet
    asked: dict[str, Counter[str]] = field(default_factory=lambda: {"ledger": Counter(), "watch": Counter()})


class Held:
    """A connection that counts what it is asked, and whose waits may begin late: as of a thread that gets no processor."""

    def __init__(self, store: Any, now: Round, slow: bool, rng: random.Random, who: str = "ledger") -> None:
        self._store, self._now, self._slow, self._rng, self._who = store, now, slow, rng, who

    def clone(self) -> Held:
        """The watcher's."""
        return Held(self._store.clone(), self._now, self._slow, self._rng, "watch")

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._now.asked[self._who]["wait"] += 1
        if self._slow and self._rng.random() < 0.3:
            self._hold(self._now.made + BEHIND, time.monotonic() + 1.2 * LATE_S)
        elif self._rng.random() < 0.02:
            time.sleep(self._rng.random() * 0.05)
        self._store.wait(keys, timeout)

    def _hold(self, until: int, late: float) -> None:
        self._now.held.add(self)
        while time.monotonic() < late:
            time.sleep(0.001)
        self._now.held.discard(self)
        while self._now.made < until and not self._now.over:
            time.sleep(0.001)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def asked(*arguments: Any) -> Any:
            self._now.asked[self._who][name] += 1
            return call(*arguments)

        return asked


async def change(ledger: StoreLedger, numbers: range, now: Round, until: int) -> None:
    """Groups that come and go, each two changes, until so many were made; one of them in any case."""
    rng = random.Random(numbers.start)
    for number in numbers:
        ticket = await ledger.admit(number)
        assert ticket is not None
        now.made += 1
        await asyncio.sleep(rng.random() * 0.002)
        await ledger.end(ticket, "dropped", "stress")
        now.made += 1
        if now.made >= until:
            return


async def one_round(ledgers: list[StoreLedger], now: Round, first: int, changes: int) -> float:
    """The seconds after the last change in which every rank heard of it."""
    now.over = False
    until = now.made + changes
    async with asyncio.TaskGroup() as group:
        for rank, ledger in enumerate(reversed(ledgers)):
            numbers = range(first + rank * changes, first + (rank + 1) * changes)
            group.create_task(change(ledger, numbers if rank < WRITERS else numbers[:1], now, until))
    while now.held:  # noqa: ASYNC110  # by threads
        await asyncio.sleep(0.001)
    now.over = True
    last, started = max(ledger.changes for ledger in ledgers), time.monotonic()
    for ledger in ledgers:
        while ledger.changes < last:
            await ledger.wait_changed(ledger.changes)
    return time.monotonic() - started


async def stress(given: argparse.Namespace) -> dict[str, Any]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    secret = None if given.unsealed else b"of the stress"
    rng, now, recorder = random.Random(given.seed), Round(), Recorder(max_events=0)
    took: list[float] = []
    async with AsyncExitStack() as stack:
        ledgers = []
        for rank in range(given.ranks):
            held: Any = Held(store.clone(), now, rank < SLOW, random.Random(rng.random()))
            ledger = StoreLedger.over(
                SealedStore(held, "stress/", secret), given.ranks, 3, rank=rank, ranks=given.ranks, recorder=recorder
            )
            ledgers.append(await stack.enter_async_context(ledger))
        started = time.monotonic()
        while not took or time.monotonic() < started + given.seconds:
            first = len(took) * given.ranks * given.changes
            took.append(await one_round(ledgers, now, first, given.changes))
        seconds, heard = time.monotonic() - started, now.asked["watch"]["multi_get"]
        left = store.num_keys()
    counted = recorder.take_counts(("ledger/",))
    return {
        "ranks": given.ranks,
        "rounds": len(took),
        "changes": now.made,
        "made_per_s": round(now.made / (seconds - sum(took))),
        "longest_s": round(max(took), 2),
        "late": counted.get("ledger/late", 0),
        "asked_a_change": {name: round(n / now.made, 2) for name, n in now.asked["ledger"].items()},
        "asked_a_hearing": {name: round(n / max(heard, 1), 2) for name, n in now.asked["watch"].items()},
        "keys_left": left,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--changes", type=int, default=1000, help="in a round")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--unsealed", action="store_true", help="without authentication codes")


def main(given: argparse.Namespace) -> int:
    result = asyncio.run(stress(given))
    print(json.dumps(result))
    return int(result["longest_s"] > BOUND_S or result["keys_left"] > KEYS)
