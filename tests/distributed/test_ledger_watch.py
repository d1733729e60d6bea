"""Hearing of changes: watchers that are far behind, announcements that are removed, changes that are heard late, forgeries."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch.distributed as dist

from asyncrl.distributed import watch
from asyncrl.distributed.reservation import Reservation
from asyncrl.distributed.sealed import SealedStore
from asyncrl.distributed.shared_books import SharedBooks
from asyncrl.distributed.store_ledger import StoreLedger
from asyncrl.errors import AsyncrlError, LedgerError, StoreForged
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Ticket

ROOT = Path(__file__).resolve().parents[2]
SECRET = b"of the test"


class Gated:
    """A connection whose clone, the watcher's, begins to wait only where the gate is open."""

    def __init__(self, store: Any, gate: threading.Event, inside: threading.Event, waits: bool = False) -> None:
        self._store, self._gate, self._inside, self._waits = store, gate, inside, waits

    def clone(self) -> Gated:
        return Gated(self._store.clone(), self._gate, self._inside, True)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if not self._waits:
            return self._store.wait(keys, timeout)  # type: ignore[no-any-return]  # any store
        assert self._gate.wait(60)
        self._inside.set()
        try:
            self._store.wait(keys, timeout)
        finally:
            self._inside.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Ranks:
    """Two ledgers over one store; `gate` holds up the watcher of the first."""

    def __init__(self) -> None:
        self.raw = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Event()  # past the gate
        self.recorder = Recorder(max_events=0)
        self.first: StoreLedger
        self.other: StoreLedger

    async def open(self, stack: AsyncExitStack) -> None:
        connections: list[Any] = [Gated(self.raw.clone(), self.gate, self.inside), self.raw.clone()]
        self.first, self.other = [
            await stack.enter_async_context(
                StoreLedger.over(
                    SealedStore(connection, "books of the test/", SECRET),
                    8,
                    3,
                    rank=rank,
                    ranks=2,
                    recorder=None if rank else self.recorder,
                )
            )
            for rank, connection in enumerate(connections)
        ]

    def set(self, key: str, value: bytes) -> None:
        """Somebody else's."""
        self.raw.set("books of the test/" + key, value.decode())

    def get(self, key: str) -> bytes:
        return bytes(self.raw.get("books of the test/" + key))


@asynccontextmanager
async def two_ranks() -> AsyncIterator[Ranks]:
    ranks = Ranks()
    async with AsyncExitStack() as stack:
        await ranks.open(stack)
        try:
            yield ranks
        finally:
            ranks.gate.set()


async def changes(ledger: StoreLedger, count: int, first: int) -> int:
    """Two for each group that comes and goes."""
    for number in range(first, first + count // 2):
        ticket = await ledger.admit(number)
        assert isinstance(ticket, Ticket)
        await ledger.end(ticket, "dropped", "test")
    return first + count // 2


async def heard(ledger: StoreLedger, number: int) -> None:
    with anyio.fail_after(30):  # half of the time after which a watcher looks again by itself
        while ledger.changes < number:
            await ledger.wait_changed(ledger.changes)


async def test_a_watcher_that_is_hundreds_of_changes_behind_waits_for_nothing_that_is_gone() -> None:
    async with two_ranks() as ranks:
        ranks.gate.clear()
        await changes(ranks.other, 700, 0)
        assert ranks.first.changes < ranks.other.changes
        ranks.gate.set()
        await heard(ranks.first, ranks.other.changes)


async def test_announcements_that_every_rank_is_past_are_removed() -> None:
    async with two_ranks() as ranks:
        ranks.gate.clear()
        number = await changes(ranks.other, 100, 0)
        assert ranks.raw.num_keys() > 100  # the first rank may still wait for any of them
        ranks.gate.set()
        await heard(ranks.first, ranks.other.changes)
        for _ in range(15):  # as the ranks of a run, both write
            number = await changes(ranks.first, 2, number)
            number = await changes(ranks.other, 2, number)
            await heard(ranks.first, ranks.other.changes)
        assert ranks.raw.num_keys() < 40


async def test_a_change_that_is_heard_late_is_counted_and_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "LATE_S", 0.1)
    async with two_ranks() as ranks:
        number = await changes(ranks.other, 2, 0)
        await heard(ranks.first, ranks.other.changes)
        ranks.recorder.take_counts(("ledger/",))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "asyncrl.distributed"):
            for turn in range(number, number + 2):
                assert await asyncio.to_thread(ranks.inside.wait, 30)  # the watcher waits for the next change
                ranks.gate.clear()
                ticket = await ranks.other.admit(turn)
                assert isinstance(ticket, Ticket)
                await heard(ranks.first, ranks.other.changes)  # of this one alone: the next is made after it
                await ranks.other.end(ticket, "dropped", "test")
                await anyio.sleep(0.5)
                ranks.gate.set()
                await heard(ranks.first, ranks.other.changes)
        counted = ranks.recorder.take_counts(("ledger/",))
        assert counted["ledger/late"] >= 2 and counted["ledger/late_s"] >= 0.8
        lines = [record.getMessage() for record in caplog.records if "rank 0 got change" in record.getMessage()]
        assert len(lines) == 1 and "after rank 1 made the change" in lines[0]


# -- somebody else writes into the store -----------------------------------------------------------------------------


async def both_end(ranks: Ranks, error: type[AsyncrlError], text: str) -> None:
    """The next transition of a rank, and what the other waits for."""
    raised: list[BaseException] = []

    async def waits() -> None:
        try:
            await ranks.first.wait_changed(ranks.first.changes)
        except AsyncrlError as found:
            raised.append(found)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(waits)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(error, match=text):
                await ranks.other.admit(1000)
            ranks.set(f"change/{ranks.first.changes + 1}", b"0" * 32 + b"1 0.0")  # wakes the watcher of the first
    assert [type(each) for each in raised] == [StoreForged]


@pytest.mark.parametrize("code", ["of another state", "of another key"])
async def test_books_that_somebody_else_wrote_end_every_rank_with_the_name_of_the_key(code: str) -> None:
    async with two_ranks() as ranks:
        await changes(ranks.other, 2, 0)
        await heard(ranks.first, ranks.other.changes)
        forged = ranks.get("change/1")
        if code == "of another state":
            state = json.loads(ranks.get("books")[32:])
            state["books"]["turn"] = 7
            forged = ranks.get("books")[:32] + json.dumps(state).encode()
        ranks.set("books", forged)
        await both_end(ranks, StoreForged, "books of the test/books in the ranks' store was not written by a rank")


@pytest.mark.parametrize("who", ["wrote", "read"])
async def test_an_older_state_of_the_books_is_not_believed(who: str) -> None:
    """It has the right code: whoever changed or saw something since knows."""
    async with two_ranks() as ranks:
        number = await changes(ranks.other, 2, 0)
        old = ranks.get("books")
        await changes(ranks.other, 2, number)
        await ranks.first.exhaust()
        ranks.set("books", old)
        with pytest.raises(LedgerError, match=r"went back from change [45] to 2"):
            await (ranks.other.admit(1000) if who == "wrote" else ranks.first.admit(1000))


def test_a_change_of_ones_own_that_is_lost_is_noticed_though_others_went_on() -> None:
    store, told = SealedStore(dist.HashStore(), "", SECRET), (lambda: 1, lambda number, books: None)
    first, other = [SharedBooks(store, rank, 5.0, *told) for rank in range(2)]
    for each in (first, other):
        each.join(Reservation(2, 1, ranks=2))
    old = store.get("books")
    other.transact(lambda books: books.admit(1, None, 1))
    store.set("books", old)
    first.transact(lambda books: books.admit(2, None, 0))
    first.transact(lambda books: books.admit(3, None, 0))
    with pytest.raises(LedgerError, match="does not hold change 1 of rank 1"):
        other.transact(lambda books: books.admit(4, None, 1))


@pytest.mark.parametrize("behind", [0, 2])
async def test_a_rank_that_finds_the_books_broken_tells_those_who_wait(behind: int) -> None:
    """Also where its own watcher is changes behind and has not come to the one that the others wait for."""
    async with two_ranks() as ranks:
        await changes(ranks.other, 2, 0)
        await heard(ranks.first, ranks.other.changes)
        watch = ranks.other._watch
        assert watch is not None
        with anyio.fail_after(30):
            while watch.awaited <= ranks.other.changes:  # told by a thread to nobody
                await anyio.lowlevel.checkpoint()
        watch.awaited -= behind  # as it was before it heard of them; only read now, its thread waits
        ranks.set("books", b"nonsense")
        with anyio.fail_after(30):
            await ranks.other.aclose()
            assert not watch._thread.is_alive()  # closing goes on without one that does not end in time
            with pytest.raises(StoreForged, match="books of the test/books"):
                await ranks.first.wait_changed(ranks.first.changes)


async def test_an_announcement_without_a_change_ends_who_waited_for_it() -> None:
    """Instead of a loop that asks the store as fast as it can."""
    async with two_ranks() as ranks:
        await changes(ranks.other, 2, 0)
        await heard(ranks.first, ranks.other.changes)
        forged = SealedStore(ranks.raw.clone(), "books of the test/", SECRET)
        forged.set("change/3", "1 0.0")
        with anyio.fail_after(30), pytest.raises(LedgerError, match="change 3 of the shared ledger was announced, but"):
            await ranks.first.wait_changed(ranks.first.changes)


async def test_books_that_were_deleted_end_a_transition(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the moment between reading and writing them: else it would try again for a minute."""
    async with two_ranks() as ranks:
        await changes(ranks.other, 2, 0)
        encode = ranks.other._shared._encode

        def deleted(*state: Any) -> bytes:
            ranks.raw.delete_key("books of the test/books")
            return encode(*state)

        monkeypatch.setattr(ranks.other._shared, "_encode", deleted)
        with anyio.fail_after(30), pytest.raises(LedgerError, match="was removed: another program deletes keys"):
            await ranks.other.admit(1000)
        ranks.set("books", b"")  # closing asks for it once more


@pytest.mark.slow
def test_64_ranks_hear_of_every_change_however_slow_their_watchers_are() -> None:
    command = [sys.executable, str(ROOT / "tools" / "chaos"), "ledger", "--seconds", "1", "--changes", "500"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["ranks"] == 64 and result["changes"] >= 500 and result["longest_s"] < 5
    assert "got change" in done.stderr and result["late"] > 0  # the slow ones were behind, and that was seen
    asked = result["asked_a_change"]
    assert (
        asked["multi_set"] < 1.2
        and asked.get("delete_key", 0) < 1.2
        and set(result["asked_a_hearing"])
        == {
            "wait",
            "multi_get",
        }
    )


def environment() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
