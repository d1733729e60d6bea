"""The engine of a rank whose workers generate: it sends requests, returns generations, moves weights, and replaces dead workers.

    generate() --> router --> channel --> worker --> channel --> the caller's future
    update_weights(version, half) --> a message to each worker --> each worker answers between two closures
    pin(version) --> one worker keeps that version and answers only pinned requests (pin.py)

Guarantees
* A request is answered once. The engine takes every answer that a worker sent before the worker died. The unanswered requests of a
  dead worker go, with the same seeds, to other workers or to its *successor*, the worker that replaces it. A successor starts with
  the current weights. The successor of a pinned worker starts with the pinned weights. The keys and values that the dead worker
  kept for sessions are computed again.
* The engine kills a worker that sends nothing for `watchdog.loop_timeout_s`, or whose closure runs for `watchdog.lane_timeout_s`.
  While a worker starts, both limits are `stage_timeout_s`, but a silent worker without CPU time is killed after `loop_timeout_s`.
* Each of these ends the engine: `MOST_DEATHS` deaths of one worker without a finished sequence between them, a death during the
  first start, a process that the system refuses to start, wrong weights, and an engine that a worker cannot create. After the
  first start, a process that is refused with EAGAIN counts as a death.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio

from asyncrl.concurrency.offload import offload
from asyncrl.concurrency.supervisor import plain_task_group, spawn
from asyncrl.errors import GenerationError, WorkerDied
from asyncrl.generation.lifecycle import BaseEngine, WeightUpdate
from asyncrl.generation.requests import check_request, check_tokens
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Generation, GenerationRequest, PostedVersion

from .names import remove_orphaned_segments
from .peer import LEAVE_S, Peer, Setup
from .pin import Pin, Pins
from .router import RoutedJob, Router

logger = logging.getLogger("asyncrl.generation")

MOST_DEATHS = 3  # of one worker, without a finished sequence between them
# Seconds between two checks whether a worker hangs.
_WATCH_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of requests and of workers. Names with `_s` are time limits in seconds."""

    workers: int
    max_sequences: int  # of one worker
    max_context: int
    vocabulary: int
    has_tokenizer: bool
    start_s: float  # of a start
    silent_s: float  # without a message
    closure_s: float  # of one closure
    # In `preset: sync` the number of ranks, because the number of a group decides its rank and its worker. None in other presets.
    ranks: int | None = None

    @property
    def capacity(self) -> int:
        """Limit of requests at one worker: those that run, and a reserve that the worker starts when others have ended."""
        return self.max_sequences + max(2, self.max_sequences // 8)


class WorkerEngine(BaseEngine):
    """Implements `ports.Engine` and `BoardWorkers` (weights/sync.py). See the module docstring. setup: returns the `Setup` of a
    worker, by its number. show_stage: called with a text at each stage of a worker's start."""

    def __init__(
        self,
        limits: WorkerLimits,
        setup: Callable[[int], Setup],
        recorder: Recorder,
        *,
        show_stage: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self.limits = limits
        self.recorder = recorder
        self._setup = setup
        self._show_stage = show_stage
        by_group = None if limits.ranks is None else lambda group: group // limits.ranks % limits.workers
        self._router = Router(limits.capacity, by_group)
        self._peers: dict[int, Peer] = {}  # alive
        self._pins = Pins(self._router, self._peers, recorder, self._assign)
        self._updates: list[WeightUpdate] = []
        self._dead_statistics: dict[str, float] = {}  # sums over dead workers
        self._finishes: Counter[int] = Counter()  # number of finished sequences, by worker
        self._aborted = 0
        self._starting: list[asyncio.Future[None]] = []  # of the callers of `wait_until_serving`

    # -- the port

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one sequence; see `ports.Engine`. Errors: `GenerationError`, `EngineClosed`."""
        return await self._sample(request, pinned=False)

    async def _sample(self, request: GenerationRequest, pinned: bool) -> Generation:
        self._require_open()
        check_request(request, self.limits.max_context)
        # Plain types: a worker cannot unpickle a user's class, such as an Enum.
        s = request.sampling
        biases = {int(token): float(bias) for token, bias in s.logit_bias.items()}
        words = tuple(tuple(map(int, word)) for word in s.bad_words)
        stops, ids = tuple(map(str.__str__, s.stop)), tuple(map(int, s.stop_token_ids))
        sampling = replace(s, stop=stops, stop_token_ids=ids, bad_words=words, logit_bias=biases)
        request = replace(request, sampling=sampling)
        check_tokens(request, self.limits.vocabulary, self.limits.has_tokenizer)
        job = self._router.add(request, asyncio.get_running_loop().create_future(), pinned=pinned)
        self._assign()
        try:
            return await job.future
        except asyncio.CancelledError:
            self._abort(job)
            raise

    def end_session(self, session: str) -> None:
        """See `ports.Engine`. Every worker gets the message, because a session may have moved between workers."""
        self._router.end_session(session)
        for peer in self._peers.values():
            peer.end_session(session)

    def set_first_weights(self, version: int, half: int, outputs: Sequence[float] | None) -> None:
        """Set the weights that workers start with. The weight board must have them. Call this before opening the engine."""
        self._pins.newest = PostedVersion(version, half, outputs)

    async def update_weights(self, version: int, half: int, outputs: Sequence[float] | None) -> None:
        """Give workers this version, from this half of the weight board. Returns once every worker that is not pinned computes with
        the version, and the pinned worker has answered the requests that it got before the pin. A worker that is starting gets the
        version before its first request. After the return only a pinned or a starting worker may read the other half.

        `outputs`: log-probs that the trainer computes with the version (models/outputs.py); None: no comparison. A worker with
        other log-probs ends the engine with a DivergenceError, perhaps after the return."""
        self._require_open()
        repeated = self._pins.newest == (version, half, outputs)
        assert repeated or not self._pins.reads(half), "the half was written while a worker reads it"
        self._pins.newest = PostedVersion(version, half, outputs)
        update = WeightUpdate(version, asyncio.get_running_loop().create_future())
        self._updates.append(update)
        for peer in self._peers.values():
            if peer.ready and self._pins.of(peer.number) is None:
                peer.send_weights(version, half, outputs)
        self._answer_updates()
        await update.future

    def reads(self, half: int) -> bool:
        """Whether a pinned worker may read this half of the board."""
        return self._pins.reads(half)

    async def wait_unread(self, half: int) -> None:
        """Returns once no pinned worker reads this half of the board."""
        await self._pins.wait_unread(half)

    async def pin(self, version: int) -> Pin | None:
        self._require_open()
        return await self._pins.begin(version, self._sample)

    def statistics(self) -> dict[str, float]:
        """See `ports.Engine`: sums over the last reports of all workers. `waiting` includes requests that no worker has yet.
        `reserved_positions` sums prompt + max_tokens over the requests that workers have."""
        total = dict(self._dead_statistics)
        for peer in self._peers.values():
            for name, value in peer.statistics.items():
                total[name] = total.get(name, 0.0) + value
        running = total.get("running", 0.0)
        return total | {
            "running": running,
            "waiting": float(max(self._router.waiting + self._router.sent - running, 0.0)),
            "reserved_positions": float(self._router.reserved),
            "tokens": total.get("tokens", 0.0),
            "decode_steps": total.get("decode_steps", 0.0),
            "finished": float(self._finishes.total()),
            "aborted": float(self._aborted),
        }

    async def wait_until_serving(self) -> None:
        """Wait until every worker has started. Errors: GenerationError if a worker does not start."""
        self._require_open()
        future = asyncio.get_running_loop().create_future()
        self._starting.append(future)
        self._notify_starting()
        await future

    def _notify_starting(self) -> None:
        while self._starting and self._router.serving == self.limits.workers:
            future = self._starting.pop()
            if not future.done():
                future.set_result(None)

    # -- the task that owns the workers

    async def _run_owner(self) -> None:
        for name in await offload(remove_orphaned_segments, "sweep"):
            logger.info("removed %s, shared memory of the workers of a dead run", name)
        async with plain_task_group() as tasks:
            for number in range(self.limits.workers):
                spawn(tasks, f"worker {number}", self._run_worker, number)

    def _answer(self, number: int, answer: Generation | GenerationError) -> None:
        job = self._router.find(number)
        if job is None:
            return  # the caller was cancelled before this answer came
        worker = self._router.remove(job)
        assert worker is not None
        self._finishes[worker] += isinstance(answer, Generation)
        if not job.future.done():
            if isinstance(answer, Generation):
                job.future.set_result(answer)
            else:
                job.future.set_exception(answer)
        self._assign()
        self._answer_updates()

    def _assign(self) -> None:
        for job in self._router.assign():
            assert job.worker is not None
            self._peers[job.worker].put(job.number, job.request)

    def _abort(self, job: RoutedJob) -> None:
        worker = self._router.remove(job)
        self._aborted += 1
        if worker in self._peers:
            self._peers[worker].put(job.number, None)
            self._assign()
            self._answer_updates()

    # -- a worker and its successors

    async def _run_worker(self, number: int) -> None:
        deaths, first_start = 0, True
        while True:
            peer: Peer | None = None
            finished_before = self._finishes[number]
            try:
                self._peers[number] = peer = Peer(number, self._setup(number))
                try:
                    await self._serve(peer)
                finally:
                    self._retire(peer)
                    await peer.process.aclose(LEAVE_S)
            except (WorkerDied, BlockingIOError) as died:
                deaths = 1 if self._finishes[number] > finished_before else deaths + 1
                if first_start and (peer is None or not peer.ready):
                    raise
                if deaths >= MOST_DEATHS:
                    raise GenerationError(f"worker {number} died {deaths} times in a row: {died}") from died
                first_start = False
                logger.warning(
                    "%s\nit is started again (%d of at most %d times in a row)", died, deaths, MOST_DEATHS - 1
                )
                self.recorder.count("engine/worker_deaths")
                # EAGAIN: the system has too many processes. Some may end before the next try.
                if isinstance(died, BlockingIOError):
                    await anyio.sleep(_WATCH_S)

    async def _serve(self, peer: Peer) -> None:
        """Runs until the process has ended, then raises WorkerDied."""
        async with plain_task_group() as tasks:
            spawn(tasks, "watch over a worker", self._watch, peer)
            await peer.receive(self.recorder, self._on_message)

    def _on_message(self, peer: Peer, message: dict[str, Any]) -> None:
        if "report" in message:
            now = self.statistics()
            self.recorder.gauge("engine/running", now["running"])
            self.recorder.gauge("engine/waiting", now["waiting"])
        if "stage" in message:
            self._show_stage(f"worker {peer.number}: {message['stage']}")
        if "ready" in message:
            weights = self._pins.of(peer.number) or self._pins.newest
            assert weights is not None, "set_first_weights was not called before the workers started"
            peer.send_weights(*weights)
        # `bound`: from now on the worker samples with version `peer.version`.
        if "bound" in message:
            if not self._router.serves(peer.number):
                self._router.add_worker(peer.number)
                self._assign()
                self._notify_starting()
            self._pins.finish_ended_pin()
            self._answer_updates()
        if "sequence" in message:
            self._answer(int(message["sequence"]), pickle.loads(message["data"]))
        if "failed" in message:
            self._answer(int(message["failed"]), GenerationError(str(message["error"])))

    async def _watch(self, peer: Peer) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await anyio.sleep(_WATCH_S)
            # If the event loop was blocked, messages of the worker may be unread. The blocked time does not count as silence.
            if loop.time() - began > 2 * _WATCH_S:
                peer.last_message_at = min(loop.time(), peer.last_message_at + loop.time() - began)
                continue
            reason = peer.hang_reason(self.limits.start_s, self.limits.silent_s, self.limits.closure_s)
            if reason is not None:
                peer.kill(reason)
                return

    def _retire(self, peer: Peer) -> None:
        """A worker has ended or is being closed. Its requests go back to the router, which gives them to other workers."""
        del self._peers[peer.number]
        for name in ("tokens", "decode_steps", "prefill_tokens", "copied_tokens"):
            self._dead_statistics[name] = self._dead_statistics.get(name, 0.0) + peer.statistics.get(name, 0.0)
        self._router.remove_worker(peer.number)
        self._pins.finish_ended_pin()
        self._assign()
        # A process that runs may still read the old weights, so updates wait for its end.
        if peer.process.ended.done():
            self._answer_updates()

    # -- weights

    def _answer_updates(self) -> None:
        # Requests that the pinned worker got before the pin still get tokens of the pinned version, which is older.
        if self._pins.pinned_worker_has_earlier_requests:
            return
        moving = (
            peer for peer in self._peers.values() if peer.sent_version >= 0 and self._pins.of(peer.number) is None
        )
        oldest = min((peer.version for peer in moving), default=None)
        for update in [update for update in self._updates if oldest is None or oldest >= update.version]:
            self._updates.remove(update)
            if not update.future.done():
                update.future.set_result(None)

    def _take_futures(self) -> list[asyncio.Future[Any]]:
        futures: list[asyncio.Future[Any]] = [job.future for job in self._router.clear()]
        futures += [update.future for update in self._updates]
        futures += [*self._starting, *self._pins.take_waiting()]
        self._updates, self._starting = [], []
        return futures
