"""How a version of the weights gets from the trainer to the engines on its node.

An engine that shares the trainer's modules needs no transfer (`SharedWeights`). Workers read a weight board: two halves in host
memory or in a slab on a device (transport/memory/board.py). `WeightPublisher` is the trainer's end of the board, `WeightReader`
a worker's end. The fixed row (models/outputs.py) is 16 fixed tokens, whose log-probs must agree in trainer and workers.

    trainer's lane    _write     if the optimizer step has not cast the masters into the free half: copy the weights there.
                                 Compute the log-probs of the fixed row
    trainer's loop    _move      send version, half and log-probs to every worker
    worker's lane     move       copy the half, if it is on another device, bind the modules to the half, and answer
    worker's lane     _compare   compute the log-probs of the fixed row; a difference above the bound ends the run
    trainer's loop    _move      every worker has answered: the other half is free

A half is free while no worker can read it. A move that did not end (the caller was cancelled, or a worker raised) may leave workers
on both halves, so no half is free: the next update repeats that move before it writes. A pinned worker (held at its version) reads
the older half while other workers move. The next update waits until the pin has ended and this worker has left the older half.

The working copy of a bfloat16 model (the weights that its modules read) is a half of the board. Each optimizer step casts the
masters into the free half (`FlatParameters.target`); several steps without an update use the same half. While no half is free, the
step casts into other memory, and the next update copies from there. Three kinds of models are copied at every version: float32
models, because their modules read the masters; models with adapters, because a merge writes only some weights; and sharded models,
because their ranks gather all weights in one place.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import anyio
import torch
from torch import Tensor

from asyncrl.concurrency.lane import Lane
from asyncrl.errors import DivergenceError, LifecycleError
from asyncrl.models.outputs import Bound, Comparisons, fixed_logprobs
from asyncrl.models.policy import PolicyModel
from asyncrl.ports import WeightSink
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.memory.board import Board, DeviceWait, wait_for_device
from asyncrl.types import PostedVersion

OUTPUTS_SHARE = 0.01  # largest share of time for log-probs of the fixed row
_SAMPLED_POSITIONS = 65_536
_LARGEST = 1e18  # squares of larger weights overflow float32


def require_current(policy: PolicyModel, version: int) -> None:
    """Check that the policy is at `version` or later, that its modules read the flat buffer, and that a sample of the buffer
    is below `_LARGEST` and equal to the masters. Call it on the lane. Errors: DivergenceError."""
    if policy.version < version:
        raise DivergenceError(f"publish: the policy is at version {policy.version}, not yet at {version}")
    # With adapters `flat` has the trained parameters, `policy.weights` the engines' weights. Without adapters both are one object.
    flat, working = policy.flat, policy.weights.working
    strays = policy.weights.misplaced_parameters()
    if flat is not policy.weights:
        strays += flat.misplaced_parameters()
    if strays:
        raise DivergenceError(
            f"publish of version {version}: {strays[0]} ({len(strays)} in all) no longer reads the flat buffer; some code "
            "rebound the modules' parameters"
        )
    stride = max(working.numel() // _SAMPLED_POSITIONS, 1)
    sample = working[::stride].contiguous()
    # `<` is false for NaN, so NaN fails, too.
    if not bool((sample.abs() < _LARGEST).all()):
        error = DivergenceError(
            f"version {version} has weights that are NaN or infinite, or beyond {_LARGEST:g}, where squares overflow "
            "float32: the optimizer step to this version was too large; lower train.lr (or raise train.warmup_steps)"
        )
        error.unusable_weights = True
        raise error
    cast = sample if flat is policy.weights else flat.working[::stride]
    if flat.has_working_copy and not torch.equal(flat.master[::stride].to(cast.dtype), cast):
        raise DivergenceError(
            f"publish of version {version}: the modules' weights are not those that the optimizer has made"
        )


class SharedWeights:
    """A `WeightSink` for an engine on the trainer's lane that reads the trainer's modules."""

    def __init__(self, policy: PolicyModel, engine: WeightSink, lane: Lane) -> None:
        self._policy, self._engine, self._lane = policy, engine, lane

    async def update_weights(self, version: int) -> None:
        """See `WeightSink.update_weights`. Errors: those of `require_current`."""
        await self._lane.run(partial(require_current, self._policy, version), name="publish/check", priority=1)
        await self._engine.update_weights(version)


# -- the trainer's end of a board --------------------------------------------------------------------------------------


class BoardWorkers(Protocol):
    """The readers of a board. A pinned reader keeps its half until the pin has ended and the reader has moved."""

    async def update_weights(self, version: int, half: int, outputs: Sequence[float] | None) -> None:
        """Move to `version`, which is in `half`. Returns once every later token comes from `version`, except tokens of pinned
        workers. A call that failed may be repeated. `outputs`: the trainer's log-probs of the fixed row; None: no comparison."""
        ...

    def reads(self, half: int) -> bool:
        """Whether a pinned worker may read this half."""
        ...

    async def wait_unread(self, half: int) -> None:
        """Returns once no pinned worker reads this half."""
        ...


class BoardOwner:
    """Moves workers from half to half of this process's board. A subclass writes each version into the free half."""

    def __init__(self, board: Board, workers: BoardWorkers) -> None:
        self._board, self._workers = board, workers
        self._current: PostedVersion | None = None
        self._is_free = False  # whether the half that is not current is free
        # The newest version on the board, if not all workers have moved to this version. None: all workers have moved.
        self._announced: PostedVersion | None = None

    @property
    def current(self) -> PostedVersion:
        """The version of the last completed move. Errors: LifecycleError before the first version."""
        if self._current is None:
            raise LifecycleError("nothing is on the weight board yet: `post_first` comes before the first worker")
        return self._current

    async def _wait_for_half(self) -> int:
        """Wait until no pinned worker reads the half that is not current, and return this half (0 or 1)."""
        half = 1 - self.current.half
        if not self._is_free:
            await self._workers.wait_unread(half)
            self._free_other_half(half)
        return half

    async def _move(self, to: PostedVersion) -> None:
        self._announced = to
        await self._workers.update_weights(*to)
        self._current, self._announced, self._is_free = to, None, False
        if not self._workers.reads(1 - to.half):
            self._free_other_half(1 - to.half)

    def _free_other_half(self, half: int) -> None:
        """Clear a half that nobody reads."""
        self._board.clear(half)
        self._is_free = True


class WeightPublisher(BoardOwner):
    """A `WeightSink` that writes a policy's weights to a board. Call `post_first` before the first worker starts."""

    def __init__(
        self,
        policy: PolicyModel,
        board: Board,
        workers: BoardWorkers,
        lane: Lane,
        adapters: Sequence[Tensor] = (),
        part: slice | None = None,
    ) -> None:
        """`board`: has the layout of `policy.weights`. `adapters`: for each half, a buffer for the adapters' masters, which
        `GeneratingNodes` sends. `part`: the elements that the board has; None: all. Errors: LifecycleError for another layout."""
        if board.layout != policy.weights.layout_digest():
            raise LifecycleError(
                f"the weight board has layout {board.layout}, the policy's weights have "
                f"{policy.weights.layout_digest()}: create it from `policy.weights`"
            )
        super().__init__(board, workers)
        self._policy, self._lane, self._adapters, self._part = policy, lane, adapters, part or slice(None)
        self._casts_into_halves = policy.flat is policy.weights and policy.flat.has_working_copy
        self._one_at_a_time = asyncio.Lock()
        self._computed_at, self._cost = -math.inf, 0.0  # start and length of the last `_fixed_row`, in seconds

    async def post_first(self) -> PostedVersion:
        """Write the policy's current version, with which workers start. Errors: DivergenceError."""
        async with self._one_at_a_time:
            self._current = await self._lane.run(self._write_first, name="publish/write", priority=1)
            self._free_other_half(1)
        return self._current

    async def update_weights(self, version: int) -> None:
        """See `WeightSink.update_weights`. Errors: those of `require_current` and of the workers."""
        async with self._one_at_a_time:
            if self._announced is not None:
                await self._move(self._announced)
            if self.current.version < version:
                half = await self._wait_for_half()
                self._is_free = False  # stays false if a cancellation stops the move
                write = partial(self._write, version, half)
                await self._move(await self._lane.run(write, name="publish/write", priority=1))

    async def wait_writable(self) -> None:
        """Wait for a running update. Then, if optimizer steps cast into halves and no move failed, wait for a free half."""
        async with self._one_at_a_time:
            if self._casts_into_halves and self._announced is None:
                await self._wait_for_half()

    def _write(self, version: int, half: int) -> PostedVersion:
        """Write the policy's current version to the half: `version` or a later version. Call it on the lane."""
        policy, board = self._policy, self._board
        require_current(policy, version)
        if self._casts_into_halves:
            policy.flat.target = None
        if self._adapters:
            self._adapters[half].copy_(policy.flat.master)
        is_in_half = policy.weights.working.data_ptr() == board.half(half).data_ptr()
        board.write(half, policy.version, None if is_in_half else policy.weights.working[self._part])
        return PostedVersion(policy.version, half, self._fixed_row())

    def _write_first(self) -> PostedVersion:
        first = self._write(self._policy.version, 0)
        if self._casts_into_halves:
            self._policy.flat.move_to(self._board.half(0))
        return first

    def _fixed_row(self) -> list[float] | None:
        """The trainer's log-probs of the fixed row; None if computing them would take more than `OUTPUTS_SHARE` of the time."""
        began = time.monotonic()
        if began - self._computed_at < self._cost / OUTPUTS_SHARE:
            return None
        logprobs = fixed_logprobs(self._policy)
        self._computed_at, self._cost = began, time.monotonic() - began
        return logprobs

    def _free_other_half(self, half: int) -> None:
        """Clear a half that nobody reads, and make the next optimizer step cast into this half."""
        super()._free_other_half(half)
        if self._casts_into_halves:
            self._policy.flat.target = self._board.half(half)

    def close(self) -> None:
        """Call it when no worker is left. Later optimizer steps cast in place; the policy's tensors keep their half mapped."""
        if self._casts_into_halves:
            self._policy.flat.target = self._policy.flat.working


# -- a worker's end ----------------------------------------------------------------------------------------------------


class BoardEngine(Protocol):
    """An engine whose weights lie on a weight board. `output_bound`: largest allowed error of its log-probs of the fixed row."""

    recorder: Recorder
    output_bound: Bound

    def move_to(self, half: Tensor, version: int) -> None:
        """Bind the modules to `half`, which holds `version`: later tokens come from `version`, and later closures do not read the
        other half. Called on the lane between two closures."""
        ...

    async def outputs(self) -> list[float]:
        """Log-probs of the fixed row (models/outputs.py), computed with the weights that the engine samples from."""
        ...


class WeightReader:
    """Moves a worker's engine to the newest version that the trainer's process has announced."""

    def __init__(
        self, board: Board, engine: BoardEngine, lane: Lane, send: Callable[[Mapping[str, Any]], None]
    ) -> None:
        """`send` sends the trainer's process `{"bound": version}` after each move. `{"wrong": sentence}` ends the run."""
        self._board, self._engine, self._lane, self._send = board, engine, lane, send
        self._comparisons = Comparisons(engine.output_bound)
        self._half = -1  # the half that the engine reads; -1: none
        self._moving: PostedVersion | None = None
        self._next: PostedVersion | None = None
        self._has_next = anyio.Event()

    def set_target(self, target: PostedVersion) -> None:
        """Make `run` move to `target` next. Has no effect if a move to the same version and half is running."""
        if self._moving is None or self._moving[:2] != target[:2]:
            self._next = target
            self._has_next.set()

    async def run(self) -> None:
        """Move to each target until cancelled. Targets that come during a move replace each other."""
        while True:
            await self._has_next.wait()
            self._has_next = anyio.Event()
            while self._next is not None:
                self._moving, self._next = self._next, None
                await self.move(*self._moving)
                self._moving = None

    async def move(self, version: int, half: int, outputs: Sequence[float] | None) -> None:
        """Fetch the half if this worker reads copies, bind the version between two closures of the lane, and answer. Then compare
        the log-probs of the fixed row with those of the trainer (`outputs`)."""
        if self._board.reads_copies and half != self._half:
            fetch = partial(self._board.fetch, half)
            await wait_for_device(await self._lane.run(fetch, name="engine/fetch", priority=1))
        found, reads_end = await self._lane.run(partial(self._bind, version, half), name="engine/bind", priority=1)
        if found != version:
            self._send({"wrong": f"the board holds version {found} where version {version} was announced"})
            return
        # Later closures use the new version, but earlier closures may have launched GPU work that still reads the other half. Wait
        # for that work, because the trainer may overwrite the other half after the answer. Later closures run meanwhile.
        await wait_for_device(reads_end)
        self._send({"bound": version})
        if outputs is not None:
            await self._compare(version, outputs)

    def _bind(self, version: int, half: int) -> tuple[int | None, DeviceWait]:
        """Bind the half if it holds `version`. Returns (the version in the half, a wait for the reads of the other half)."""
        found = self._board.version(half)
        if found == version:
            self._engine.move_to(self._board.half(half), version)
            self._half = half
        return found, self._board.reads_ended()

    async def _compare(self, version: int, outputs: Sequence[float]) -> None:
        # JSON has no NaN, so NaN arrives as None.
        theirs = [math.nan if logprob is None else logprob for logprob in outputs]
        distance, fault = self._comparisons.compare(await self._engine.outputs(), theirs)
        self._engine.recorder.observe("weights/outputs_nats", distance, reduce="max")
        if fault is not None:
            self._send({"wrong": f"with the weights of version {version} the worker computes {fault}"})
