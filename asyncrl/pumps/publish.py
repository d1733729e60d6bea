"""The publish pump: a new version out to every engine, then the slots of its step back to the ledger (edge 6).

Order for each version: every sink acknowledges, evaluation and checkpoint where they are due (both see exactly this
version: the train pump does not finish its next step before they are done), then the slots are released together.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from asyncrl.ports import WeightSink
from asyncrl.transport.queue import QueueReceiver

from .pipeline import Publication, Rooms


class PublishPump:
    def __init__(
        self,
        rooms: Rooms,
        publications: QueueReceiver[Publication],
        at_version: Callable[[int], Awaitable[None]],
    ) -> None:
        """`at_version(version)` does what is due at that version: evaluation, checkpoint."""
        self._rooms = rooms
        self._publications = publications
        self._at_version = at_version
        self._done_turn = rooms.ledger.turn  # turns below this one are published
        self._advanced = anyio.Event()

    async def published(self, turn: int) -> None:
        """Wait until every turn below `turn` is published, evaluated and checkpointed."""
        while self._done_turn < turn:
            await self._advanced.wait()

    async def run(self) -> None:
        """Ends after the last publication; `published` stays answered."""
        async with self._publications:
            async for publication in self._publications:
                await self._publish(publication)

    async def _publish(self, publication: Publication) -> None:
        rooms, version = self._rooms, publication.version
        with rooms.recorder.span("publish", track="publish pump", version=version):
            with rooms.recorder.wait("publish pump", f"version {version}", on="the engines", cause="publish"):
                started = anyio.current_time()
                async with anyio.create_task_group() as sinks:
                    for sink in rooms.sinks:
                        sinks.start_soon(self._hand_over, sink, version)
                rooms.recorder.observe("time/weight_sync", anyio.current_time() - started)
        await self._at_version(version)
        await rooms.ledger.release(publication.turn)
        self._done_turn = publication.turn + 1
        self._advanced.set()
        self._advanced = anyio.Event()

    async def _hand_over(self, sink: WeightSink, version: int) -> None:
        await anyio.lowlevel.checkpoint_if_cancelled()  # an engine that is being cancelled too would only say "closed"
        await sink.update_weights(version)
