"""Sends rank 0 the position of each training rank in its prompts. So without fsdp, rank 0 alone can write a checkpoint of the last
committed version, even if other ranks have died. A collective would hang: ranks of a stopped run may never join it.

    every rank   announce(version), at each version    rank 0 gets the RankState, without the replay buffer
    rank 0       announce(version, save_next=True)     all ranks save the next version
    every rank   gather(version), at a checkpoint      rank 0 also gets the replay buffer (fsdp: also the path of the rank's part)
    a rank that ends early
                 leave(version, signal)                rank 0 gets the rank's last version and the signal

The state is exact for a checkpoint of its version: groups that the rank takes later are not trained in this version, and a resumed
run plays them again. If a rank ended before it announced the last version, rank 0 has the rank's state at the version before.
The ledger of rank 0 knows the rank's groups in the step between the two versions: `after_step` computes the missing state.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import orjson

from asyncrl.concurrency import awake
from asyncrl.concurrency.offload import offload
from asyncrl.data.prompts import is_prompt, state_after
from asyncrl.distributed.line import LineClient, LineServer
from asyncrl.errors import CheckpointError

# From `Checkpointer.rank_state`: turn, prompts (the cursor), untrained (group ids), next_group, replay. For a sharded
# checkpoint also shard: path and SHA-256 of the rank's part, or the text of the error.
RankState = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """The last version of a rank that ended early, and the signal that stopped the rank."""

    version: int
    stopped_by: str | None  # the name of the signal; None: the rank failed


# A rank that ends early waits this long for the `EarlyEnd` of other ranks. A rank that is stuck in a collective sends none.
LEAVE_TIMEOUT_S = 2.0
GATHER_TIMEOUT_S = 15.0  # torchrun kills a stopped rank after 30 s
PARTS_TIMEOUT_S = 300.0  # other ranks of a sharded model write their parts first
_POSITION, _EARLY_END = "position", "early end"
_KEPT = 3  # newest versions of each rank


class Positions:
    """Rank 0 collects the positions of all training ranks; other ranks send theirs. `line`: the server of rank 0, or this rank's
    client of that server. Rank 0 must make its `Positions` before others connect. `numbers`: rank numbers of the training ranks.
    `rank`: this rank's index in `numbers`. All ranks in this class are such indices, except in error texts."""

    def __init__(self, line: LineServer | LineClient, rank: int, numbers: Sequence[int]) -> None:
        self._line = line
        self._rank, self._numbers = rank, numbers
        self._ranks = range(len(numbers))
        self._announced: int | None = None  # the newest version that this rank has announced
        self._stop_deadline = math.inf  # when all waits of `gather` end; set by `limit_waits`
        # On rank 0. For each rank: version -> (state, JSON of the replay buffer).
        self._states: list[dict[int, tuple[RankState, bytes | None]]] = [{} for _ in self._ranks]
        # On rank 0. Rank -> its state in the checkpoint that is resumed.
        self.resumed: Mapping[int, RankState] = {}
        self._early_ends: dict[int, EarlyEnd] = {}
        self._save_after: set[int] = set()  # the version that follows each of these is saved
        self._changed = asyncio.Event()
        if isinstance(line, LineServer):
            line.on(_POSITION, self._on_position)
            line.on(_EARLY_END, self._on_early_end)

    def limit_waits(self, timeout_s: float) -> None:
        """End all waits of `gather` within `timeout_s` from now: this run is being stopped."""
        self._stop_deadline = awake.now() + timeout_s
        self._notify()

    async def announce(self, version: int, state: RankState, *, save_next: bool = False) -> bool:
        """Call once per version, before any rank can finish the next step. Returns whether to save this version.
        Rank 0 decides one version ahead (`save_next`), so all ranks get the same answer. Errors: RankLost."""
        if self._rank == 0 and save_next:
            # No rank has asked yet whether to save the next version: each rank asks at that version, and its step needs this rank.
            self._save_after = {version, *sorted(self._save_after)[-_KEPT:]}
        save = await self._send(version, state)
        self._announced = version
        return save

    async def _send(self, version: int, state: RankState, *replay: bytes) -> bool:
        """Send rank 0 the state at `version`. Returns whether to save the version after the last announced version."""
        header = [self._rank, version, state, self._announced]
        if isinstance(self._line, LineServer):
            save, _ = await self._on_position("", header, replay)
        else:
            # Rank 0 might not handle a cancelled request.
            with anyio.CancelScope(shield=True):
                save, _ = await self._line.ask(_POSITION, header, replay)
        return save

    async def _on_position(self, peer: str, header: Any, buffers: Sequence[Any]) -> tuple[bool, tuple[()]]:
        rank, version, state, announced = header
        states = self._states[rank]
        replay = bytes(buffers[0]) if buffers else states.get(version, (None, None))[1]
        states[version] = state, replay
        if len(states) > _KEPT:
            del states[min(states)]
        self._notify()
        return announced in self._save_after, ()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def leave(
        self, version: int, stopped_by: str | None, wait_s: float = LEAVE_TIMEOUT_S
    ) -> tuple[dict[int, EarlyEnd], list[int]]:
        """Tell rank 0 that this rank ends at `version`, and wait up to `wait_s` for the other ranks to do the same.
        Returns the early ends of other ranks, and the ranks that seem to be lost."""
        header = [self._rank, version, stopped_by, wait_s]
        # Used if rank 0 does not answer: no early ends, and rank 0 is lost.
        answer: Sequence[Any] = (), [0]
        # A RuntimeError means that rank 0 is lost.
        with contextlib.suppress(RuntimeError), anyio.move_on_after(2 * wait_s + 1):
            if isinstance(self._line, LineServer):
                answer, _ = await self._on_early_end("", header, ())
            else:
                answer, _ = await self._line.ask(_EARLY_END, header)
        ends, lost = answer
        return {rank: EarlyEnd(*record) for rank, *record in ends if rank != self._rank}, lost

    async def _on_early_end(self, peer: str, header: Any, buffers: object) -> tuple[list[Any], tuple[()]]:
        rank, version, stopped_by, wait_s = header
        self._early_ends[rank] = EarlyEnd(version, stopped_by)
        self._notify()
        with anyio.move_on_after(wait_s):
            while len(self._early_ends) < len(self._ranks):
                await self._changed.wait()
        assert isinstance(self._line, LineServer)
        connected = [f"rank {self._numbers[self._rank]}"]
        connected += [name for name, silence_s in self._line.silences().items() if not silence_s]
        missing = [index for index in self._ranks if index not in self._early_ends]
        # A connected rank may only be slow. But if all missing ranks are connected, one of them hangs, and all are suspects.
        lost = [index for index in missing if f"rank {self._numbers[index]}" not in connected] or missing
        ends = [[index, record.version, record.stopped_by] for index, record in self._early_ends.items()]
        return [ends, lost], ()

    async def gather(
        self, version: int, state: RankState, *, sharded: bool, wait_s: float | None = None
    ) -> tuple[list[RankState], list[int]]:
        """Collect the states of all ranks for a checkpoint. Returns (states by rank, ranks that did not announce this version) on
        rank 0, and empty lists on other ranks.
        `wait_s`: how long rank 0 waits; None: `PARTS_TIMEOUT_S` if `sharded`, else `GATHER_TIMEOUT_S`. `sharded`: all ranks must
        call `gather`, after writing their parts. If not `sharded`, rank 0 uses the newest known state of a rank that did not
        announce the version, and no replay buffer for a rank that sent none. Errors: CheckpointError."""
        light = {name: value for name, value in state.items() if name != "replay"}
        with_replay = sharded or state["replay"] is not None
        replay = await offload(lambda: orjson.dumps(state["replay"]), "replay")
        if self._rank != 0:
            with contextlib.suppress(RuntimeError):  # rank 0 is lost
                await self._send(version, light, replay)
            return [], []
        await self._send(version, light, replay)
        if wait_s is None:
            wait_s = PARTS_TIMEOUT_S if sharded else GATHER_TIMEOUT_S
        failure = await self._wait(version, partial(self._lacking, version, with_replay), wait_s, sharded=sharded)
        missing = self._lacking(version, False)
        newest = [self._newest(rank, version) for rank in self._ranks]
        absent = [rank for rank in missing if newest[rank] is None]
        if failure and sharded:
            absent = self._lacking(version, True)
        if absent:
            raise CheckpointError(
                f"the checkpoint of version {version} was not written: not every rank announced its position in its prompts "
                f"(waited for {[self._numbers[rank] for rank in absent]}: {failure}); earlier checkpoints are unchanged"
            )
        received = [self._states[rank].get(version, (None, None))[1] if with_replay else None for rank in self._ranks]
        replays = await offload(lambda: [orjson.loads(each or b"null") for each in received[1:]], "replay")
        return [state, *({**(newest[rank] or {}), "replay": replays[rank - 1]} for rank in self._ranks[1:])], missing

    def _lacking(self, version: int, with_replay: bool) -> list[int]:
        """On rank 0: the ranks whose state at this version has not arrived. `with_replay`: also those without a replay buffer."""
        found = [states.get(version, (None, None)) for states in self._states]
        return [rank for rank, (state, replay) in enumerate(found) if state is None or (with_replay and replay is None)]

    def _newest(self, rank: int, version: int) -> RankState | None:
        """On rank 0: the state of a rank at this version. If the rank did not announce the version: its state at the version
        before, which each rank announces before it joins the last step. None: not known."""
        known = [each for each in self._states[rank] if each <= version]
        return self._states[rank][max(known)][0] if known else self.resumed.get(rank)

    async def _wait(
        self, version: int, lacking: Callable[[], list[int]], timeout_s: float, *, sharded: bool
    ) -> str | None:
        """Wait until `lacking` returns no rank, then return None. Returns a sentence after the timeout, or at once if all missing
        ranks (`sharded`: any rank) ended at another version."""
        started = awake.now()
        while missing := lacking():
            wrong = [rank for rank, record in self._early_ends.items() if record.version != version]
            if wrong and (sharded or {*wrong} >= {*missing}):
                return f"ranks {[self._numbers[rank] for rank in wrong]} ended at another version"
            left_s = min(started + timeout_s, self._stop_deadline) - awake.now()
            if left_s <= 0:
                stopped = ", and this run is being stopped" if self._stop_deadline < started + timeout_s else ""
                return f"nothing came for {awake.now() - started:.1f} s{stopped}"
            with anyio.move_on_after(min(1.0, left_s)):
                await self._changed.wait()
        return None


def after_step(before: RankState, trained: Collection[int], ranks: int) -> RankState:
    """The state of a rank after a step, if the rank died before it announced this state. `before`: its state before the step.
    `trained`: ids of the rank's groups in the step. `ranks`: number of ranks.
    A resumed run plays again all prompts that the rank took during the step and that are not in `trained`, even if their group was
    dropped. `reroll` plays none of `trained` again, even if the rewards are low: only the dead rank knew these rewards."""
    cursor = before["prompts"]
    after = None if cursor is None else state_after(cursor, trained)
    taken = () if cursor is None or after is None else range(cursor["position"], after["position"], ranks)
    return {
        "turn": before["turn"] + 1,
        "prompts": after,
        "untrained": sorted({*before["untrained"], *taken}.difference(trained)),
        "next_group": max([before["next_group"], *(group + ranks for group in trained if not is_prompt(group))]),
    }
