"""The positions of all training ranks in their prompts, exchanged through the ranks' store. So rank 0 alone can write a checkpoint
of the last committed version, even if other ranks have died. A collective would hang: ranks of a stopped run may never join.

    who          call                                      key in the store        value
    every rank   announce(version), at each version        {version}/{rank}        RankState without the replay buffer
    rank 0       announce(version, save_next=True)         {version}/save          all ranks save the next version
    every rank   gather(version), at a checkpoint          {version}/{rank}/part   replay buffer; the rank's part is written
    a rank that ends early
                 leave(version, signal)                    ended/{rank}            its last version; the signal

The announced state is exact for a checkpoint of that version: later groups of the rank were not trained, and a resumed run plays
them again. If a rank died before it announced the last version, rank 0 has the state at the version before. The rank's groups in
the step between the two versions are in the shared ledger (`after_step`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from asyncrl.concurrency import awake
from asyncrl.data.prompts import is_prompt, state_after
from asyncrl.distributed.ranks_store import RankStore
from asyncrl.errors import CheckpointError

# `Checkpointer.rank_state` makes it: turn, prompts (the cursor), untrained (group ids), next_group, replay.
RankState = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Departure:
    """The record of a rank that ended early."""

    version: int
    stopped_by: str | None  # the name of a signal; None: the rank failed


# A rank that ends early waits this long for the records of other ranks. A rank that is stuck in a collective writes no record.
LEAVE_TIMEOUT_S = 2.0
GATHER_TIMEOUT_S = 15.0  # torchrun kills a stopped rank after 30 s
PARTS_TIMEOUT_S = 300.0  # other ranks of a sharded model write their parts first


class Positions:
    """Not thread-safe: one thread at a time. Every method but `hurry` blocks. `store`: a connection for this object alone. `rank`:
    this rank's place in `names`, the ranks that train. All ranks here are such places. Only messages have the names."""

    def __init__(self, store: RankStore, rank: int, names: Sequence[int]) -> None:
        self._store = store
        self._rank, self._names = rank, names
        self._ranks = range(len(names))
        # Versions whose keys of this rank are in the store, oldest first.
        self._announced: list[int] = []
        # On rank 0: rank -> its newest state that rank 0 has read.
        self._known: dict[int, RankState] = {}
        self._stop_deadline = math.inf  # of all waits; set by `hurry`

    def hurry(self, timeout_s: float) -> None:
        """End all waits for other ranks within `timeout_s` from now: this run is being stopped. Thread-safe."""
        self._stop_deadline = awake.now() + timeout_s

    def start(self, states: Mapping[int, RankState]) -> None:
        """`states`: rank -> its state in the checkpoint that is resumed."""
        self._known = dict(states)

    def announce(self, version: int, state: RankState, *, save_next: bool = False) -> bool:
        """Call once per version, before any rank can finish the next step. Returns whether to save this version.
        Rank 0 decides this one version ahead (`save_next`), so all ranks get the same answer. Errors: RuntimeError (no store)."""
        save = bool(self._announced) and self._read(f"{self._announced[-1]}/save") is not None
        if self._rank == 0 and self._announced:
            # All ranks have written the keys of the previous version, and delete them only after a later step.
            self._read_states(self._announced[-1])
        self._set(version, state)
        if self._rank == 0 and save_next:
            self._store.set(f"{version}/save", "true")
            # `get` returns after the store has the key. No rank can read the key too early: this rank joins the next step later.
            self._store.get(f"{version}/save")
        while len(self._announced) > 2:
            old = self._announced.pop(0)
            keys = [self._key(old, self._rank), self._part_key(old, self._rank)]
            for key in keys if self._rank else [*keys, f"{old}/save"]:
                self._store.delete_key(key)
        return save

    def leave(self, version: int, stopped_by: str | None, wait_s: float = LEAVE_TIMEOUT_S) -> dict[int, Departure]:
        """Write that this rank ends at `version`, and wait up to `wait_s` for the other ranks to do the same.
        Returns the departures of other ranks. From their versions a rank whose collective failed knows whether the other ranks
        finished the step."""
        try:
            self._store.set(f"ended/{self._rank}", orjson.dumps([version, stopped_by]).decode())
            others = [f"ended/{rank}" for rank in self._ranks if rank != self._rank]
            self._store.poll(others, wait_s)
        except RuntimeError:  # no store
            return {}
        return self._departures()

    def announce_last(self, version: int, state: RankState) -> None:
        """Announce a version that the other ranks reached without this rank, after `leave`."""
        with contextlib.suppress(RuntimeError):  # no store
            self._set(version, state)

    def _departures(self) -> dict[int, Departure]:
        records = {rank: self._read(f"ended/{rank}") for rank in self._ranks if rank != self._rank}
        return {rank: Departure(*record) for rank, record in records.items() if record is not None}

    def gather(
        self, version: int, state: RankState, *, sharded: bool, wait_s: float | None = None
    ) -> tuple[list[RankState], list[int]]:
        """Collect the states of all ranks for a checkpoint. Returns (states by rank, ranks that did not announce this version) on
        rank 0, and empty lists on other ranks.
        `sharded`: all ranks must call `gather`, after writing their parts. Otherwise rank 0 waits up to `wait_s`. Then it uses
        the newest known state of a rank that did not announce the version, and no replay buffer of a rank that sent none.
        Errors: CheckpointError."""
        light = {name: value for name, value in state.items() if name != "replay"}
        has_parts = sharded or state["replay"] is not None
        timeout_s = wait_s or (PARTS_TIMEOUT_S if sharded else GATHER_TIMEOUT_S)
        keys = [self._key(version, rank) for rank in self._ranks]
        keys += [self._part_key(version, rank) for rank in self._ranks if has_parts]
        failure = None
        try:
            self._set(version, light)
            self._store.set(self._part_key(version, self._rank), orjson.dumps(state["replay"]))
            if self._rank == 0:
                self._wait(keys, timeout_s, version if sharded else None)
        except RuntimeError as error:  # base class of DistStoreError and DistNetworkError
            failure = error
        if self._rank != 0:
            return [], []
        if failure is not None and sharded:
            raise CheckpointError(
                self._unwritten_message(version, self._ranks_without_part(version), failure)
            ) from failure
        announced = {rank: self._read(self._key(version, rank)) for rank in self._ranks if rank != 0}
        missing = [rank for rank, rank_state in announced.items() if rank_state is None]
        # A missing rank has announced the previous version, because it joined the last step after that announcement.
        if missing:
            for earlier in sorted(number for number in self._announced if number < version):
                self._read_states(earlier)
        if unknown := [rank for rank in missing if rank not in self._known]:
            raise CheckpointError(self._unwritten_message(version, unknown, failure)) from failure
        states = [state]
        for rank, rank_state in announced.items():
            replay = self._read(self._part_key(version, rank)) if has_parts else None
            newest = self._known[rank] if rank_state is None else rank_state
            states.append({**newest, "replay": replay})
        return states, missing

    def _wait(self, keys: list[str], timeout_s: float, version: int | None) -> None:
        """Wait for keys of other ranks. `version`: the version at which the other ranks must be; None: any.
        Errors: RuntimeError after the timeout, or if a rank has ended at another version."""
        started = awake.now()
        while not self._store.poll(keys, min(1.0, max(0.0, self._deadline(started, timeout_s) - awake.now()))):
            wrong_ranks = [rank for rank, departure in self._departures().items() if departure.version != version]
            if version is not None and wrong_ranks:
                raise RuntimeError(f"ranks {[self._names[rank] for rank in wrong_ranks]} ended at another version")
            if awake.now() >= (deadline := self._deadline(started, timeout_s)):
                stopped = "" if deadline == started + timeout_s else ", and this run is being stopped"
                raise RuntimeError(f"nothing came for {awake.now() - started:.1f} s{stopped}")

    def _deadline(self, started: float, timeout_s: float) -> float:
        # Read again after each poll: `hurry` may be called meanwhile.
        return min(started + timeout_s, self._stop_deadline)

    def _ranks_without_part(self, version: int) -> list[int]:
        """Ranks that have not written their part. All ranks if there is no store."""
        try:
            return [rank for rank in self._ranks if not self._store.check([self._part_key(version, rank)])]
        except RuntimeError:
            return list(self._ranks)

    def _unwritten_message(self, version: int, ranks: list[int], error: BaseException | None) -> str:
        return (
            f"the checkpoint of version {version} was not written: not every rank announced its position in its prompts "
            f"(waited for {[self._names[rank] for rank in ranks]}: {error}); earlier checkpoints are unchanged"
        )

    def _key(self, version: int, rank: int) -> str:
        return f"{version}/{rank}"

    def _part_key(self, version: int, rank: int) -> str:
        return f"{version}/{rank}/part"

    def _set(self, version: int, state: RankState) -> None:
        self._store.set(self._key(version, self._rank), orjson.dumps(state))
        if version not in self._announced:
            self._announced.append(version)

    def _read_states(self, version: int) -> None:
        for rank in self._ranks:
            if rank != 0 and (state := self._read(self._key(version, rank))) is not None:
                self._known[rank] = state

    def _read(self, key: str) -> Any:
        """The value of a key. None if there is no such key or no store."""
        try:
            return orjson.loads(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError:
            return None


def after_step(before: RankState, trained: Collection[int], ranks: int) -> RankState:
    """The state of a rank that died between a step and its announcement. `before`: the state before the step. `trained`: ids of
    the rank's groups in the step. `ranks`: number of ranks.
    A resumed run plays all other prompts that the rank took during the step again, even if their group was dropped. Failed prompts
    of the step are not played again (`reroll`): only the dead rank knew the rewards."""
    cursor = before["prompts"]
    after = None if cursor is None else state_after(cursor, trained)
    taken = () if cursor is None or after is None else range(cursor["position"], after["position"], ranks)
    return {
        "turn": before["turn"] + 1,
        "prompts": after,
        "untrained": sorted({*before["untrained"], *taken}.difference(trained)),
        "next_group": max([before["next_group"], *(group + ranks for group in trained if not is_prompt(group))]),
    }
