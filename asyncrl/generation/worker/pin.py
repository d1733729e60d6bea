"""A worker that stays at a version while the others go on to later ones.

pin ──▶ pinned requests alone, and what it had before ──▶ end ──▶ sent the newest version ────▶ bound: like any other
        one that dies: its successor begins with the pinned version                              (or dead)
'─────────────── nobody may write into its half ──────────────────────────────────────────────────────'
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

Sample = Callable[[GenerationRequest, bool], Awaitable[Generation]]  # the flag: a pinned request


@dataclass(eq=False, slots=True)
class Pin:
    """A worker that keeps one version of the weights: implements `ports.PinnedVersion`."""

    worker: int  # its number: a successor takes its place
    weights: PostedVersion
    sample: Sample
    on_end: Callable[[], None]
    ended: bool = False

    async def generate(self, request: GenerationRequest) -> Generation:
        """As `PinnedVersion.generate`. Errors: DivergenceError for a token of another version."""
        if self.ended:
            return await self.sample(request, False)
        generation, version = await self.sample(request, True), self.weights.version
        others = set(generation.versions.tolist()) - {version}
        if others and not self.ended:
            raise DivergenceError(f"worker {self.worker} is pinned to version {version} and sampled with {min(others)}")
        return generation

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self.on_end()


class Pins:
    """The pin of an engine, one at a time. Nothing here waits but `left` and `begin`."""

    def __init__(
        self, router: Router, peers: Mapping[int, Peer], recorder: Recorder, moved_on: Callable[[], None]
    ) -> None:
        """`peers`: those alive, by number. `moved_on`: called once a pin is over, whose worker then is like any other."""
        self._router, self._peers, self._recorder, self._moved_on = router, peers, recorder, moved_on
        self._pin: Pin | None = None  # until its worker has moved on
        self._leaving: list[asyncio.Future[None]] = []  # who waits for that
        self.newest: PostedVersion | None = None  # what the other workers were sent last

    async def begin(self, version: int, sample: Sample) -> Pin | None:
        """As `ports.PinsVersions.pin`: of the workers that have bound it, that with the fewest reserved tokens."""
        if self._pin is not None:
            await self.left(self._pin.weights.half)
        able = [number for number, peer in self._peers.items() if peer.bound == version and self._router.serves(number)]
        if self._pin is not None or self.newest is None or self.newest.version != version or len(able) < 2:
            return None
        self._pin = Pin(self._router.pin(able), self.newest, sample, self._end)
        return self._pin

    def of(self, worker: int) -> PostedVersion | None:
        """What that worker stays at; None: it goes where the others go."""
        pin = self._pin
        return pin.weights if pin is not None and pin.worker == worker and not pin.ended else None

    @property
    def has_others(self) -> bool:
        """Whether the worker that stays has requests of before, which are not pinned."""
        return self._pin is not None and not self._pin.ended and self._router.unpinned_at_pinned > 0

    def reads(self, half: int) -> bool:
        """Whether a pinned worker may look at that half."""
        return self._pin is not None and self._pin.weights.half == half

    async def left(self, half: int) -> None:
        """Returns once none does."""
        while self._pin is not None and self.reads(half):
            future = asyncio.get_running_loop().create_future()
            self._leaving.append(future)
            what = f"a worker that is pinned to version {self._pin.weights.version}"
            with self._recorder.wait("the engines", what, on="evaluate pump", cause="evaluate"):
                await future

    def settle(self) -> None:
        """A pin that has ended is over once its worker has bound the newest weights, or is dead."""
        pin, newest = self._pin, self.newest
        if pin is None or not pin.ended or newest is None:
            return
        peer = self._peers.get(pin.worker)
        if peer is not None and peer.target >= 0 and peer.bound < newest.version:
            return  # it moves; until it is there it gets no requests
        self._pin = None
        self._router.unpin()
        for future in self._leaving:
            if not future.done():
                future.set_result(None)
        self._leaving = []
        self._moved_on()

    def forget(self) -> list[asyncio.Future[None]]:
        """Everybody who waits; nobody does any more."""
        waiting, self._leaving = self._leaving, []
        return waiting

    def _end(self) -> None:
        assert self._pin is not None and self.newest is not None
        peer = self._peers.get(self._pin.worker)
        # Else it is there, or is sent it when it is ready.
        if peer is not None and 0 <= peer.target < self.newest.version:
            peer.send_weights(*self.newest)
        self.settle()
