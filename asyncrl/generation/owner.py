"""What the engines of this process share: one owner task (`life.py`), waiting requests, admission and delivery.

    generate() --> waiting --admit (by priority, while there is room)--> running --closures--> result to the caller
                      \\_____ caller cancelled: taken out at once _____/  \\__ or at the next boundary __/

Room is a row, and positions of the cache: the rows of a batch are as long as its longest sequence (prompt + max_tokens), and
all of them together are within `kv_positions`. Among equal priorities the order is that of arrival. One sequence always fits,
and nobody overtakes the first that waits, so everybody is served before what comes with a larger `priority`.

Only the owner task touches the running batch. Between two closures on the lane the owner drops aborted
sequences, answers weight updates, admits and delivers.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio

from asyncrl.concurrency.lane import Lane
from asyncrl.errors import GenerationError
from asyncrl.types import Generation, GenerationRequest

from .life import WHO, EngineLife
from .requests import check_request

if TYPE_CHECKING:
    from asyncrl.telemetry.recorder import Recorder


@dataclass(eq=False, slots=True)
class Job:
    """One request and the future its caller waits for. `slot` is the engine's own number while it runs."""

    request: GenerationRequest
    future: asyncio.Future[Generation]
    slot: int = -1

    @property
    def room(self) -> int:
        """Positions that are reserved while it runs."""
        return int(self.request.prompt_ids.size) + self.request.sampling.max_tokens


@dataclass(eq=False, slots=True)
class _Update:
    version: int
    future: asyncio.Future[None]


class OwnedEngine(EngineLife):
    """Base of the engines in this process; see the module docstring. Subclasses fill in the batch."""

    def __init__(
        self, lane: Lane, recorder: Recorder, *, max_sequences: int, max_context: int, kv_positions: int | None = None
    ) -> None:
        super().__init__()
        if kv_positions is None:
            kv_positions = max_sequences * max_context
        if max_sequences < 1 or max_context < 2:
            raise ValueError(
                f"an engine needs room for one sequence of two tokens; got max_sequences={max_sequences}, "
                f"max_context={max_context}"
            )
        if kv_positions < max_context:
            raise ValueError(f"kv_positions is {kv_positions}, expected at least max_context = {max_context}")
        self.lane = lane
        self.recorder = recorder
        self.kv_positions = kv_positions
        self.max_sequences = max_sequences
        self.max_context = max_context
        self._waiting: list[Job] = []  # by priority, then arrival
        self._running: dict[int, Job] = {}  # by slot
        self._aborted: list[Job] = []
        self._updates: list[_Update] = []
        self._wake = anyio.Event()
        self._tokens = 0
        self._decode_steps = 0
        self._finished = 0
        self._aborts = 0

    # -- what a subclass gives ----------------------------------------------------------------------------------------

    def check(self, request: GenerationRequest) -> None:
        """Refuse what would disturb others once it runs. Subclasses may ask for more."""
        check_request(request, self.max_context)

    @abstractmethod
    async def _prepare(self) -> None:
        """What the owner does first, on the lane if it needs one."""

    @abstractmethod
    def _add(self, job: Job) -> int:
        """Take the request into the batch; there is room. Returns its slot."""

    @abstractmethod
    def _remove(self, job: Job) -> None:
        """Free what `_add` took."""

    @abstractmethod
    async def _advance(self) -> list[tuple[Job, Generation]]:
        """One closure on the lane for the running batch. Returns the sequences that ended."""

    @abstractmethod
    async def _refresh(self) -> int:
        """A closure that only notices the weights. Returns their version."""

    # -- the port -----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one sequence; see `ports.Engine`. Errors: `GenerationError`, `EngineClosed`."""
        self._require_open()
        self.check(request)
        job = Job(request, asyncio.get_running_loop().create_future())
        insort(self._waiting, job, key=lambda each: each.request.priority)
        self._wake.set()
        try:
            return await job.future
        except asyncio.CancelledError:
            self._abort(job)
            raise

    async def update_weights(self, version: int) -> None:
        """Returns once the model holds `version` or a later one and no closure that began before is still running.

        GenerationError: the model is still older. The weights are shared, so this call follows the optimizer step.
        """
        self._require_open()
        update = _Update(version, asyncio.get_running_loop().create_future())
        self._updates.append(update)
        self._wake.set()
        await update.future

    def statistics(self) -> dict[str, float]:
        """As `Engine.statistics`: `running`, `waiting` and `reserved_positions` now; `tokens`, `decode_steps`, `finished` and
        `aborted` sequences so far."""
        return {
            "running": float(len(self._running)),
            "waiting": float(len(self._waiting)),
            "reserved_positions": float(
                len(self._running) * max((job.room for job in self._running.values()), default=0)
            ),
            "tokens": float(self._tokens),
            "decode_steps": float(self._decode_steps),
            "finished": float(self._finished),
            "aborted": float(self._aborts),
        }

    # -- the owner ----------------------------------------------------------------------------------------------------

    def _abort(self, job: Job) -> None:
        """The caller gave up. A waiting request is gone at once, a running one at the next boundary."""
        if job.slot >= 0:
            self._aborted.append(job)
            self._wake.set()
        elif job in self._waiting:
            self._waiting.remove(job)
            self._aborts += 1

    async def _own(self) -> None:
        await self._prepare()
        while True:
            self._wake = anyio.Event()
            with self.recorder.work(WHO, "admit"):
                self._drop_aborted()
                self._admit()
            if self._updates:
                await self._answer_updates()
            elif self._running:
                ended = await self._advance()
                with self.recorder.work(WHO, "deliver"):
                    for job, generation in ended:
                        self._deliver(job, generation)
            else:
                with self.recorder.wait(WHO, "a request", on="its callers", cause="requests"):
                    await self._wake.wait()

    def _drop_aborted(self) -> None:
        for job in self._aborted:
            if job.slot >= 0:
                self._take_out(job)
                self._aborts += 1
        self._aborted.clear()

    async def _answer_updates(self) -> None:
        version = await self._refresh()
        updates, self._updates = self._updates, []
        for update in updates:
            if update.future.done():
                continue
            if version >= update.version:
                update.future.set_result(None)
            else:
                update.future.set_exception(
                    GenerationError(
                        f"asked for weights of version {update.version}, but the shared model holds version {version}: "
                        "publish after the optimizer step has ended"
                    )
                )

    def _admit(self) -> None:
        longest = max((job.room for job in self._running.values()), default=0) if self._waiting else 0
        while self._waiting and len(self._running) < self.max_sequences:
            longest = max(longest, self._waiting[0].room)
            if (len(self._running) + 1) * longest > self.kv_positions:
                break
            job = self._waiting.pop(0)
            job.slot = self._add(job)
            self._running[job.slot] = job
        self.recorder.gauge("engine/running", len(self._running))
        self.recorder.gauge("engine/waiting", len(self._waiting))

    def _take_out(self, job: Job) -> None:
        self._remove(job)
        del self._running[job.slot]
        job.slot = -1

    def _deliver(self, job: Job, generation: Generation) -> None:
        self._take_out(job)
        self._finished += 1
        if not job.future.done():  # done: its caller was cancelled while the last step ran
            job.future.set_result(generation)

    def _forget(self) -> list[asyncio.Future[Any]]:
        jobs = [*self._running.values(), *self._waiting]
        self._running.clear()
        self._waiting.clear()
        futures: list[asyncio.Future[Any]] = [job.future for job in jobs]
        futures += [update.future for update in self._updates]
        self._updates = []
        return futures
