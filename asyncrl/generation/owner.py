"""Base class of engines that run in this process: one owner task (`lifecycle.py`), a queue of requests, admission and delivery.

    generate() --> waiting --admit (by priority, while there is room)--> running --closures--> result to the caller
                      \\__ caller cancelled: removed at once __/   \\__ removed before the next closure __/

A request needs a free row and cache positions. Every row of the batch is as long as the batch's longest sequence (prompt +
max_tokens), and all rows together have at most `kv_positions`. Requests are admitted by `priority`, the smallest first, then by
arrival. While the first waiting request has no room, all others wait too, and a single sequence always fits. So every request is
admitted at some time, unless requests with smaller `priority` keep arriving.

A closure is a function that runs on the lane, the thread of the device. Only the owner task changes the running batch: between two
closures it removes aborted sequences, completes weight updates, admits requests and delivers results.

If a short prefill takes longer than a decode step (`prefill_steps` > 0), requests wait to share one prefill with others. Each
decode step of this wait loses a row step (one step of a row) for each free row that a request could use. A prefill costs
`prefill_steps` row steps for each running row. The wait ends when the loss reaches this cost. Without `_LONGEST_WAIT` the loss is
at most twice that of the best rule that knows all later requests (Dooley et al., "TCP dynamic acknowledgment delay", STOC 1998).

An engine may keep the cache of a finished request for the next request of its session (`_remove`). A kept cache counts as free:
`_admit` ignores kept caches, and the engine drops a kept cache if a running request needs the room.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from bisect import insort
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import anyio

from asyncrl.concurrency.lane import Lane
from asyncrl.errors import GenerationError
from asyncrl.types import Generation, GenerationRequest

from .lifecycle import TRACK, BaseEngine, WeightUpdate
from .requests import check_request

if TYPE_CHECKING:
    from asyncrl.telemetry.recorder import Recorder


# Limit of decode steps for which a request waits for others, so that the prefill of a single request does not wait for minutes.
_LONGEST_WAIT = 32


@dataclass(eq=False, slots=True)
class Job:
    """One request, and the future that its caller awaits. `slot`: the number that `_add` gave the request; -1: not running."""

    request: GenerationRequest
    future: asyncio.Future[Generation]
    slot: int = -1

    @property
    def positions(self) -> int:
        """Cache positions that the request needs: prompt + max_tokens."""
        return int(self.request.prompt_ids.size) + self.request.sampling.max_tokens


def kept_age_limit(setting: int, recompute: bool) -> int | None:
    """Largest age of a kept prefix, in versions; None: nothing is kept. `setting`: `engine.kept_prefix_max_age` (0: keep nothing).
    `recompute`: no sequence may use keys and values of older weights, so the largest age is 0."""
    return None if setting == 0 else 0 if recompute else setting


class OwnedEngine(BaseEngine):
    """See the module docstring. max_sequences: limit of running sequences. max_context: limit of prompt tokens + max_tokens.
    kv_positions: limit of the cache positions of all rows together; None: max_sequences x max_context."""

    # How many decode steps last as long as a short prefill. 0: a request is admitted as soon as there is room.
    prefill_steps = 0

    def __init__(
        self, lane: Lane, recorder: Recorder, *, max_sequences: int, max_context: int, kv_positions: int | None = None
    ) -> None:
        super().__init__()
        if kv_positions is None:
            kv_positions = max_sequences * max_context
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
        self._ended_sessions: list[str] = []
        self._updates: list[WeightUpdate] = []
        self._wake = anyio.Event()
        # Since `_waits_for_others` last returned False: free rows for requests, summed over steps; number of steps with such rows.
        self._lost_row_steps = 0
        self._waited_steps = 0
        self._tokens = 0
        self._decode_steps = 0
        self._finished_count = 0
        self._aborted_count = 0

    # -- implemented by subclasses ------------------------------------------------------------------------------------

    def check(self, request: GenerationRequest) -> None:
        """Errors: GenerationError for a request that cannot run. Subclasses may refuse more."""
        check_request(request, self.max_context)

    @abstractmethod
    async def _prepare(self) -> None:
        """Create the batch. The owner calls this first."""

    @abstractmethod
    def _add(self, job: Job) -> int:
        """Add the request to the batch, which has room for it. Returns the request's slot, a number that no running request has."""

    @abstractmethod
    def _remove(self, job: Job, finished: bool) -> None:
        """Remove the request from the batch. `finished`: the sequence is complete, so its cache may be kept; False: aborted."""

    def _end_session(self, session: str) -> None:
        """Drop the caches that are kept for the session, and keep no cache of its running requests. The default does nothing."""

    @abstractmethod
    async def _advance(self) -> list[tuple[Job, Generation]]:
        """Run one closure for the running batch. Returns the sequences that ended."""

    @abstractmethod
    async def _refresh(self) -> int:
        """Run one closure that reads the version of the weights. Returns the version."""

    # -- ports.Engine and ports.WeightSink ----------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `ports.Engine`. Errors: GenerationError, EngineClosed."""
        self._require_open()
        self.check(request)
        job = Job(request, asyncio.get_running_loop().create_future())
        insort(self._waiting, job, key=lambda queued: queued.request.priority)
        self._wake.set()
        try:
            return await job.future
        except asyncio.CancelledError:
            self._abort(job)
            raise

    async def update_weights(self, version: int) -> None:
        """Wait until all later tokens come from `version` or a newer version. Errors: GenerationError if the model has an older
        version. Engine and trainer share the model, so the caller must first wait for the end of the optimizer step."""
        self._require_open()
        update = WeightUpdate(version, asyncio.get_running_loop().create_future())
        self._updates.append(update)
        self._wake.set()
        await update.future

    def end_session(self, session: str) -> None:
        """See `ports.Engine`. The owner task drops the kept caches before it admits another request."""
        self._ended_sessions.append(session)
        self._wake.set()

    def statistics(self) -> dict[str, float]:
        """See `ports.Engine`. At present: `running` and `waiting` requests, `reserved_positions`. Since the engine was opened:
        `tokens`, `decode_steps`, `finished` and `aborted` requests."""
        return {
            "running": float(len(self._running)),
            "waiting": float(len(self._waiting)),
            "reserved_positions": float(len(self._running) * self._longest_running()),
            "tokens": float(self._tokens),
            "decode_steps": float(self._decode_steps),
            "finished": float(self._finished_count),
            "aborted": float(self._aborted_count),
        }

    # -- the owner ----------------------------------------------------------------------------------------------------

    def _abort(self, job: Job) -> None:
        """Remove a cancelled request: at once if it waits; if it runs, the owner task removes it before the next closure."""
        if job.slot >= 0:
            self._aborted.append(job)
            self._wake.set()
        elif job in self._waiting:
            self._waiting.remove(job)
            self._aborted_count += 1

    async def _run_owner(self) -> None:
        await self._prepare()
        while True:
            self._wake = anyio.Event()
            with self.recorder.work(TRACK, "admit"):
                self._remove_aborted()
                self._end_sessions()
                self._admit()
            if self._updates:
                await self._complete_updates()
            elif self._running:
                ended = await self._advance()
                with self.recorder.work(TRACK, "deliver"):
                    for job, generation in ended:
                        self._deliver(job, generation)
            else:
                with self.recorder.wait(TRACK, "a request", on="its callers", cause="requests"):
                    await self._wake.wait()

    def _remove_aborted(self) -> None:
        for job in self._aborted:
            # slot -1: the sequence was complete and was delivered before this removal.
            if job.slot >= 0:
                self._remove_running(job, finished=False)
                self._aborted_count += 1
        self._aborted.clear()

    def _end_sessions(self) -> None:
        for session in self._ended_sessions:
            self._end_session(session)
            for job in self._waiting:
                if job.request.session == session:
                    job.request = replace(job.request, session=None)
        self._ended_sessions.clear()

    def _count_step(self, rows: int) -> None:
        """Count a decode step that sampled `rows` tokens."""
        self._tokens += rows
        self._decode_steps += 1
        self.recorder.observe("engine/decode_batch", rows)
        self.recorder.count("engine/tokens", rows)

    def _count_reused(self, tokens: int, age: int) -> None:
        """Count a finished request that reused `tokens` cached tokens of its session. The oldest of these tokens was `age` versions
        old when the request sampled its first token."""
        self.recorder.count("engine/kept_prefix_hits")
        self.recorder.count("engine/kept_prefix_tokens_reused", tokens)
        self.recorder.observe("engine/kept_prefix_age", age)
        self.recorder.observe("engine/kept_prefix_age_max", age, reduce="max")

    async def _complete_updates(self) -> None:
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
                        f"asked for weights of version {update.version}, but the shared model has version {version}: "
                        "publish after the optimizer step has ended"
                    )
                )

    def _longest_running(self) -> int:
        # The watchdog asks for statistics on its own thread, so the dictionary may change meanwhile.
        return max((job.positions for job in list(self._running.values())), default=0)

    def _waits_for_others(self) -> bool:
        """Count lost row steps. Returns whether waiting requests shall wait for later requests. Called once before each closure."""
        free = min(len(self._waiting), self.max_sequences - len(self._running))
        self._lost_row_steps += free
        self._waited_steps += free > 0
        if self._lost_row_steps < self.prefill_steps * len(self._running) and self._waited_steps < _LONGEST_WAIT:
            return True
        self._lost_row_steps = self._waited_steps = 0
        return False

    def _admit(self) -> None:
        waits = self._waits_for_others()
        longest = self._longest_running() if self._waiting else 0
        while self._waiting and not waits and len(self._running) < self.max_sequences:
            longest = max(longest, self._waiting[0].positions)
            if (len(self._running) + 1) * longest > self.kv_positions:
                break
            # If `_add` raises, the engine ends with an error. The job is still in `_waiting`, so its caller gets the error.
            job = self._waiting[0]
            job.slot = self._add(job)
            self._running[job.slot] = self._waiting.pop(0)
        self.recorder.gauge("engine/running", len(self._running))
        self.recorder.gauge("engine/waiting", len(self._waiting))

    def _remove_running(self, job: Job, finished: bool) -> None:
        self._remove(job, finished)
        del self._running[job.slot]
        job.slot = -1

    def _deliver(self, job: Job, generation: Generation) -> None:
        self._remove_running(job, finished=True)
        self._finished_count += 1
        # The future is done if the caller was cancelled during the last closure.
        if not job.future.done():
            job.future.set_result(generation)

    def _take_futures(self) -> list[asyncio.Future[Any]]:
        jobs = [*self._running.values(), *self._waiting]
        self._running.clear()
        self._waiting.clear()
        futures: list[asyncio.Future[Any]] = [job.future for job in jobs]
        futures += [update.future for update in self._updates]
        self._updates = []
        return futures
