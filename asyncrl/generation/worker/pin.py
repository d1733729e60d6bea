"""A *pinned* worker keeps one version of the weights while the other workers move to later versions.

After `Pins.begin` the worker finishes its earlier requests, and gets only pinned requests, those of `Pin.generate`. If the worker
dies, its successor starts with the pinned version. `Pin.end` sends the newest version. When the worker has bound the newest version
(computes with it) or has died, the trainer may overwrite the half of the weight board (shared memory) that has the pinned version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from asyncrl.errors import DivergenceError
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Generation, GenerationRequest, PostedVersion

from .peer import Peer
from .router import Router

Sample = Callable[[GenerationRequest, bool], Awaitable[Generation]]  # the flag: whether the request is pinned


@dataclass(eq=False, slots=True)
class Pin:
    """A worker that keeps one version of the weights: implements `ports.PinnedVersion`."""

    worker: int  # number of the worker and of its successors
    weights: PostedVersion
    sample: Sample
    on_end: Callable[[], None]
    ended: bool = False

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample with the pinned version; after `end` with any version. Errors: DivergenceError for a token of a wrong version."""
        if self.ended:
            return await self.sample(request, False)
        generation, version = await self.sample(request, True), self.weights.version
        wrong = set(generation.versions.tolist()) - {version}
        if wrong and not self.ended:
            raise DivergenceError(f"worker {self.worker} is pinned to version {version} and sampled with {min(wrong)}")
        return generation

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self.on_end()


class Pins:
    """The pins of an engine: at most one at a time. Only `wait_unread` and `begin` wait."""

    def __init__(
        self, router: Router, peers: Mapping[int, Peer], recorder: Recorder, on_unpinned: Callable[[], None]
    ) -> None:
        """`peers`: the living workers, by number. `on_unpinned`: called when the worker may take other requests again."""
        self._router, self._peers, self._recorder, self._on_unpinned = router, peers, recorder, on_unpinned
        self._pin: Pin | None = None  # stays after its end until `finish_ended_pin`
        self._waiting: list[asyncio.Future[None]] = []  # calls of `wait_unread`
        self.newest: PostedVersion | None = None  # the version that the other workers were sent last

    async def begin(self, version: int, sample: Sample) -> Pin | None:
        """Wait for the end of an earlier pin. Then pin the worker with the fewest reserved tokens among those that have bound
        `version`. None: fewer than two have bound it, `version` is not the newest, or another pin began meanwhile."""
        if self._pin is not None:
            await self.wait_unread(self._pin.weights.half)
        numbers = [number for number in self._peers if self._router.serves(number)]
        candidates = [number for number in numbers if self._peers[number].version == version]
        if self._pin is not None or self.newest is None or self.newest.version != version or len(candidates) < 2:
            return None
        self._pin = Pin(self._router.pin(candidates), self.newest, sample, self._end)
        return self._pin

    def of(self, worker: int) -> PostedVersion | None:
        """The version that this worker must keep; None: the worker moves to the newest version."""
        pin = self._pin
        return pin.weights if pin is not None and pin.worker == worker and not pin.ended else None

    @property
    def pinned_worker_has_earlier_requests(self) -> bool:
        """Whether the pinned worker still has requests that it got before the pin."""
        return self._pin is not None and not self._pin.ended and self._router.unpinned_on_pinned_worker > 0

    def reads(self, half: int) -> bool:
        """Whether a pinned worker is possibly reading this half."""
        return self._pin is not None and self._pin.weights.half == half

    async def wait_unread(self, half: int) -> None:
        """Wait until no pinned worker reads this half."""
        while self._pin is not None and self.reads(half):
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            holder = f"a worker that is pinned to version {self._pin.weights.version}"
            with self._recorder.wait("the engines", holder, on="evaluate pump", cause="evaluate"):
                await future

    def finish_ended_pin(self) -> None:
        """Unpin the worker of an ended pin, if the worker has bound the newest weights, is dead or is starting."""
        pin, newest = self._pin, self.newest
        if pin is None or not pin.ended or newest is None:
            return
        peer = self._peers.get(pin.worker)
        # The worker gets no ordinary requests before it has bound the newest weights.
        if peer is not None and peer.sent_version >= 0 and peer.version < newest.version:
            return
        self._pin = None
        self._router.unpin()
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting = []
        self._on_unpinned()

    def take_waiting(self) -> list[asyncio.Future[None]]:
        """Remove and return the futures of `wait_unread`."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def _end(self) -> None:
        assert self._pin is not None and self.newest is not None
        peer = self._peers.get(self._pin.worker)
        # A worker that is starting is sent the newest version when it is ready.
        if peer is not None and 0 <= peer.sent_version < self.newest.version:
            peer.send_weights(*self.newest)
        self.finish_ended_pin()
