"""Weights for engines in other processes: each version is proved, written into the half of the board that nobody reads, and proved
there; then the readers are told.

    lane: proof of the modules -> copy with checksums into the free half -> that half against the masters
    readers: (version, half) -> all of them have left the other half, which is free from then on

A half is free only while no reader can look at it. A move that was not seen to its end (cancelled, or an error of the readers)
leaves some on one half and some on the other: nothing is written then, and the next update first asks for that move again.
A pinned reader stays on the older half when the others move: that half is free once it has left, and the next update waits.

Where the trainer has a working copy (bfloat16), that copy *is* a half. The optimizer's closure casts the masters into the free one,
with the checksums of what it puts there, and lets the modules read it there, as often as steps follow each other without an
update. After a move that was not seen to its end there is no free half: the closure casts into memory of its own, and the next
update copies that. (So it would while a reader is pinned; who waits for `settled` first saves that memory.) It is copied
always in float32, where the modules read the masters; with adapters, whose merge writes a part of the weights alone; and of a cut
model, whose ranks gather into one place.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from asyncrl.concurrency.lane import Lane
from asyncrl.errors import DivergenceError, LifecycleError
from asyncrl.models.outputs import fixed_logprobs
from asyncrl.models.policy import PolicyModel
from asyncrl.transport.memory.board import Board
from asyncrl.transport.memory.checksum import Sums
from asyncrl.types import PostedVersion

from .proof import Proof, Shards

OUTPUTS_SHARE = 0.001  # of the run's time, that may be spent on computing outputs to compare


class BoardReaders(Protocol):
    """The engines that read the board."""

    async def update_weights(self, version: int, half: int, outputs: Sequence[float] | None) -> None:
        """Returns once every token that is sampled from now on comes from `version`, which lies in `half`, and nobody reads the
        other half, unless it is pinned. May be asked for the same again, where the first time did not end well. `outputs`: what
        the trainer computes with it (models/outputs.py); None: not asked this time."""
        ...

    def reads(self, half: int) -> bool:
        """Whether a pinned one may look at that half."""
        ...

    async def left(self, half: int) -> None:
        """Returns once no pinned one does."""
        ...


class PostedWeights:
    """A `WeightSink`. `post_first` before any reader starts."""

    def __init__(
        self,
        policy: PolicyModel,
        board: Board,
        engine: BoardReaders,
        lane: Lane,
        shards: Shards | None = None,
    ) -> None:
        """`board`: of the layout of `policy.weights`. `shards`: as in `SharedWeights`. Errors: LifecycleError, another layout."""
        if board.layout != policy.weights.layout_digest():
            raise LifecycleError(
                f"the weight board has layout {board.layout}, the policy's weights have "
                f"{policy.weights.layout_digest()}: create it from `policy.weights`"
            )
        self._policy, self._board = policy, board
        self._engine, self._lane = engine, lane
        self._proof = Proof(policy, shards)
        self._current: PostedVersion | None = None  # all readers have left the other half
        self._announced: PostedVersion | None = None  # told, and not yet answered by all
        in_place = policy.flat is policy.weights and policy.flat.has_working_copy
        self._halves = {half: board.half(half) for half in (0, 1)} if in_place else {}
        # The half that a refresh may write; None: there is none. The lane takes it back before a version is named, and only a move
        # that all readers have answered gives one: a closure never sees one that is not free.
        self._free: int | None = None
        self._sums: Callable[[], Sums] | None = None  # of what `_cast` has put into a half last
        self._one_at_a_time = asyncio.Lock()
        self._asked, self._cost = -math.inf, 0.0  # the last time that outputs were computed, and how long that took

    @property
    def current(self) -> PostedVersion:
        """What a reader that starts now begins with: what all others have. Errors: LifecycleError before `post_first`."""
        if self._current is None:
            raise LifecycleError("nothing is on the weight board yet: `post_first` comes before the first reader")
        return self._current

    async def post_first(self) -> PostedVersion:
        """The policy's present version, for readers that start afterwards. Errors: DivergenceError, LifecycleError (twice)."""
        async with self._one_at_a_time:
            if self._current is not None:
                raise LifecycleError("the weight board has its first version already")
            self._current = await self._lane.run(self._post_first_on_lane, name="publish/write", priority=1)
        return self._current

    def close(self) -> None:
        """Once no reader is left: the trainer goes on in the half where its weights are, which lasts as long as they do."""
        self._policy.flat.cast = None
        self._halves.clear()

    async def update_weights(self, version: int) -> None:
        """Errors: DivergenceError where modules or board hold other weights than `version`'s; those of the readers."""
        async with self._one_at_a_time:
            if self._announced is not None:
                await self._move(self._announced)
            if self.current.version < version:
                await self._leave()
                await self._move(await self._write(version, 1 - self.current.half))

    async def settled(self) -> None:
        """Returns once the next optimizer step has a half to cast into, where it casts into halves."""
        async with self._one_at_a_time:
            if self._halves and self._announced is None:
                await self._leave()

    async def _leave(self) -> None:
        """Returns once nobody reads the half of before. (What a cancelled write has taken of it stays taken.)"""
        half = 1 - self.current.half
        if self._engine.reads(half):
            await self._engine.left(half)
            self._free = half

    async def _move(self, to: PostedVersion) -> None:
        self._announced = to
        await self._engine.update_weights(*to)
        self._current, self._announced = to, None
        self._free = None if self._engine.reads(1 - to.half) else 1 - to.half

    async def _write(self, version: int, half: int) -> PostedVersion:
        """What was written: the policy may be further than what is asked for, and the board must not lie."""
        return await self._lane.run(lambda: self._write_on_lane(version, half), name="publish/write", priority=1)

    def _post_first_on_lane(self) -> PostedVersion:
        flat = self._policy.flat
        first = self._write_on_lane(self._policy.version, 0)
        if self._halves:
            flat.move_to(self._halves[0])
            flat.cast = self._cast
        self._free = 1
        return first

    def _cast(self, master: Tensor) -> Tensor:
        """What the optimizer's closure does with the masters."""
        half, working = self._free, self._policy.weights.working
        if half is not None:
            self._sums = self._board.cast(half, master, torch.get_num_threads())
            return self._halves[half]
        if any(working is each for each in self._halves.values()):
            working = torch.empty_like(working)
        return working.copy_(master)

    def _write_on_lane(self, version: int, half: int) -> PostedVersion:
        policy, board = self._policy, self._board
        self._proof.modules(version)
        self._free = None
        working = policy.weights.working
        if self._sums is not None and working is self._halves.get(half):
            board.complete(half, policy.version, self._sums)
        else:
            board.write(half, policy.version, working, torch.get_num_threads())
        try:
            self._proof.compare(board.half(half), policy.version)
            if board.version(half) != policy.version:
                raise DivergenceError(
                    f"publish of version {policy.version}: half {half} of the weight board says that it holds version "
                    f"{board.version(half)}"
                )
            self._proof.packed(policy.version)
        except BaseException:
            board.clear(half)
            raise
        return PostedVersion(policy.version, half, self._outputs())

    def _outputs(self) -> list[float] | None:
        """At every version where that takes less than `OUTPUTS_SHARE` of the time between them, else as often as it does."""
        began = time.monotonic()
        if began - self._asked < self._cost / OUTPUTS_SHARE:
            return None
        found = fixed_logprobs(self._policy)
        self._asked, self._cost = began, time.monotonic() - began
        return found
