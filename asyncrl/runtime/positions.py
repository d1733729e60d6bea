"""Where every rank is in its prompts. Ranks exchange this through their store and not by a collective: a run that is being stopped
may have ranks that will never join one.

    every rank   announce(version) at each version     ->  {version}/{rank}        its cursor and its untrained groups
    rank 0       announce(version, save_next=True)     ->  {version}/save          every rank saves the version after it
                 gather(version) at a save             ->  {version}/{rank}/whole  its part is written; its replay buffer
    rank 0       gather(version): the books of all ranks
    a rank whose run is cut short, before it leaves the others:
                 leave(version, signal)                ->  ended/{rank}            the version it ends at, and what stopped it

So rank 0 can write a checkpoint of the last committed version without anybody's help, whatever became of the others. What they
announced at that version is exact: what they did since was not trained, and comes again after a resume. Of a rank that died before
it announced the version, rank 0 has the books of the version before, and the shared ledger has its groups in the step between them
(`after_step`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from asyncrl.concurrency import awake
from asyncrl.data.prompts import is_prompt, with_handed_out
from asyncrl.distributed.sealed import SealedStore
from asyncrl.errors import CheckpointError

Books = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Departure:
    """What a rank wrote before it left the others."""

    version: int
    stopped_by: str | None  # a signal's name; None where it was not stopped, but failed


# In which the other ranks end, unless they are in a collective that this rank will never join.
LEAVE_TIMEOUT_S = 2.0
# Must lie within the 30 s that torchrun leaves to a rank that is stopped.
GATHER_TIMEOUT_S = 15.0
# Of a sharded model: the other ranks write their parts first.
PARTS_TIMEOUT_S = 300.0


class Positions:
    """Used by one thread at a time; every method blocks. `store` is nobody else's connection."""

    def __init__(self, store: SealedStore, rank: int, ranks: int) -> None:
        self._store = store
        self._rank = rank
        self._ranks = range(ranks)
        # Versions whose keys of this rank are in the store, oldest first.
        self._announced: list[int] = []
        # By rank, on rank 0: its books at the newest version of which rank 0 has read them.
        self._known: dict[int, Books] = {}
        self._until = math.inf  # nobody is waited for any longer than to this moment

    def hurry(self, patience_s: float) -> None:
        """This run is being stopped: from now on every wait for other ranks ends within `patience_s`. From any thread."""
        self._until = awake.now() + patience_s

    def start(self, books: Mapping[int, Books]) -> None:
        """`books`: by rank, of the checkpoint that the run goes on from."""
        self._known = dict(books)

    def announce(self, version: int, books: Books, *, save_next: bool = False) -> bool:
        """Once per version, before the next step is finished anywhere. Returns whether this version is to be saved, which
        rank 0 decides a version ahead (`save_next`): all ranks get the same answer. Errors: RuntimeError, the store is gone."""
        save = bool(self._announced) and self._read(f"{self._announced[-1]}/save") is not None
        if self._rank == 0 and self._announced:
            # Every rank announced that version before it joined the step after it, and keeps it until the next step is finished.
            self._learn(self._announced[-1])
        self._set(version, books)
        if self._rank == 0 and save_next:
            self._store.set(f"{version}/save", "true")
            # The answer proves that the key is there before this rank joins the next step.
            self._store.get(f"{version}/save")
        while len(self._announced) > 2:
            old = self._announced.pop(0)
            keys = [self._key(old, self._rank), self._key(old, self._rank, whole=True)]
            for key in keys if self._rank else [*keys, f"{old}/save"]:
                self._store.delete_key(key)
        return save

    def leave(self, version: int, stopped_by: str | None, wait_s: float = LEAVE_TIMEOUT_S) -> dict[int, Departure]:
        """Write where this rank ends, and wait for the others to do the same: a rank whose connection closes in a collective
        cannot know whether the others had its part. Returns the departures of those that have ended by then. Blocks for `wait_s`
        where one of them is in a collective that this rank will not join."""
        try:
            self._store.set(f"ended/{self._rank}", orjson.dumps([version, stopped_by]).decode())
            others = [f"ended/{rank}" for rank in self._ranks if rank != self._rank]
            self._store.poll(others, wait_s)
        except RuntimeError:  # the store is gone
            return {}
        return self._departures()

    def announce_last(self, version: int, books: Books) -> None:
        """At a version that the others reached without this rank, which announces nothing afterwards."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._set(version, books)

    def _departures(self) -> dict[int, Departure]:
        found = {rank: self._read(f"ended/{rank}") for rank in self._ranks if rank != self._rank}
        return {rank: Departure(*each) for rank, each in found.items() if each is not None}

    def gather(
        self, version: int, books: Books, *, sharded: bool, wait_s: float | None = None
    ) -> tuple[list[Books], list[int]]:
        """(books by rank, ranks that did not announce this version). Empty on every rank but the first.

        `sharded`: every rank must come here, once its part is written. Otherwise, of a rank that did not announce the version
        within `wait_s` the newest known books are returned, and of one whose replay buffer is missing no buffer.
        Errors: CheckpointError.
        """
        light = {name: value for name, value in books.items() if name != "replay"}
        whole = sharded or books["replay"] is not None
        patience_s = wait_s or (PARTS_TIMEOUT_S if sharded else GATHER_TIMEOUT_S)
        keys = [self._key(version, rank) for rank in self._ranks]
        keys += [self._key(version, rank, whole=True) for rank in self._ranks if whole]
        lost = None
        try:
            self._set(version, light)
            self._store.set(self._key(version, self._rank, whole=True), orjson.dumps(books["replay"]))
            if self._rank == 0:
                self._wait(keys, patience_s, version if sharded else None)
        except RuntimeError as error:  # DistStoreError and DistNetworkError are
            lost = error
        if self._rank != 0:
            return [], []
        if lost is not None and sharded:
            raise CheckpointError(self._failure(version, self._without_part(version), lost)) from lost
        found = {rank: self._read(self._key(version, rank)) for rank in self._ranks if rank != 0}
        missing = [rank for rank, each in found.items() if each is None]
        # They have written the version before: no rank comes to this one without that.
        if missing:
            for earlier in sorted(each for each in self._announced if each < version):
                self._learn(earlier)
        if unknown := [rank for rank in missing if rank not in self._known]:
            raise CheckpointError(self._failure(version, unknown, lost)) from lost
        everybody = [books]
        for rank, own in found.items():
            replay = self._read(self._key(version, rank, whole=True)) if whole else None
            everybody.append({**(self._known[rank] if own is None else own), "replay": replay})
        return everybody, missing

    def _wait(self, keys: list[str], patience_s: float, version: int | None) -> None:
        """`version`: at which the others must be, too; None: whichever. Errors: RuntimeError at the end of the patience."""
        started = awake.now()
        while not self._store.poll(keys, min(1.0, max(0.0, self._deadline(started, patience_s) - awake.now()))):
            elsewhere = [rank for rank, each in self._departures().items() if each.version != version]
            if version is not None and elsewhere:
                raise RuntimeError(f"ranks {elsewhere} ended at another version")
            if awake.now() >= (deadline := self._deadline(started, patience_s)):
                stopped = "" if deadline == started + patience_s else ", and this run is being stopped"
                raise RuntimeError(f"nothing came for {awake.now() - started:.1f} s{stopped}")

    def _deadline(self, started: float, patience_s: float) -> float:
        return min(started + patience_s, self._until)

    def _without_part(self, version: int) -> list[int]:
        """Ranks that have not written theirs; all where the store is gone."""
        try:
            return [rank for rank in self._ranks if not self._store.check([self._key(version, rank, whole=True)])]
        except RuntimeError:
            return list(self._ranks)

    def _failure(self, version: int, ranks: list[int], error: BaseException | None) -> str:
        return (
            f"the checkpoint of version {version} was not written: not every rank announced where it is in its prompts "
            f"(waited for {ranks}: {error}); earlier checkpoints are as they were"
        )

    def _key(self, version: int, rank: int, whole: bool = False) -> str:
        return f"{version}/{rank}" + ("/whole" if whole else "")

    def _set(self, version: int, books: Books) -> None:
        self._store.set(self._key(version, self._rank), orjson.dumps(books))
        if version not in self._announced:
            self._announced.append(version)

    def _learn(self, version: int) -> None:
        for rank in self._ranks:
            if rank != 0 and (found := self._read(self._key(version, rank))) is not None:
                self._known[rank] = found

    def _read(self, key: str) -> Any:
        """None: it is not there, or the store is gone."""
        try:
            return orjson.loads(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError:
            return None


def after_step(before: Books, trained: Collection[int], ranks: int) -> Books:
    """The books of a rank that died after a step, before it announced the version. `before`: its books before that step.
    `trained`: its groups in the step.

    All other prompts that it took meanwhile are played again, also where their group was dropped. A prompt of the step of which
    every completion failed is not: its rewards went with the rank.
    """
    cursor = before["prompts"]
    after = None if cursor is None else with_handed_out(cursor, trained)
    passed = () if cursor is None or after is None else range(cursor["position"], after["position"], ranks)
    return {
        "turn": before["turn"] + 1,
        "prompts": after,
        "untrained": sorted({*before["untrained"], *passed}.difference(trained)),
        "next_group": max([before["next_group"], *(group + ranks for group in trained if not is_prompt(group))]),
    }
