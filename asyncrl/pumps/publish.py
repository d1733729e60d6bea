"""The publish pump gives each new version to every sink (such as an engine), and then releases the slots of the step.

    consumes     publications of the train pump (edge 6 of graph.py)
    produces     weights of the version in every engine; evaluation and checkpoint; slots for the next groups (edge 1)
    waits for    the acknowledgement of every sink; evaluation and checkpoint; the next publication
    is woken by  the train pump (a step was committed), the engines

Order for each version: every sink acknowledges it; evaluation and checkpoint run if they are due; the slots of the step are
released together. Evaluation and checkpoint see exactly this version, because the train pump applies its next optimizer step only
after them. An evaluation that runs on a worker pinned to the version (evaluate.py) does not delay the train pump.

With `rollout.weight_sync_interval: k` the sinks get the newest version every k steps. They also get the newest version after each
of the first `rollout.sync_warmup_steps` steps, after the last step, and if an evaluation needs it. The slots of a step stay
occupied until the sinks have its version. Therefore the ledger has slots for k - 1 more steps (`config.resolve.turns_bound`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from asyncrl.concurrency.supervisor import spawn
from asyncrl.errors import EngineClosed
from asyncrl.ports import BufferedSink, WeightSink
from asyncrl.transport.queues.queue import QueueReceiver

from .pipeline import Ports, Publication


class PublishPump:
    """See the module docstring."""

    def __init__(
        self, ports: Ports, at_version: Callable[[int], Awaitable[None]], at_start: Callable[[], Awaitable[None]]
    ) -> None:
        """`at_version(version)` evaluates and checkpoints if they are due; `at_start()` does so before the first step."""
        self._ports = ports
        self._at_version = at_version
        self._at_start = at_start
        # Turns below this number are published. The number is 1 too low until `at_start()` ends, so that `wait_published` waits.
        self._done_turn = ports.ledger.turn - 1
        self._synced_turn = ports.ledger.turn  # the engines have the weights of turns below this number
        # The newest publication, while engines lack its weights. None: the engines have the newest weights.
        self._unsynced: Publication | None = None
        self._advanced = anyio.Event()

    async def wait_published(self, turn: int) -> None:
        """Wait until every turn below `turn` is published, evaluated and checkpointed."""
        while self._done_turn < turn:
            await self._advanced.wait()

    async def run(self, publications: QueueReceiver[Publication]) -> None:
        """Publish until the train pump closes its end of the queue."""
        async with publications:
            await self._at_start()
            self._advance(self._done_turn + 1)
            async for publication in publications:
                await self._publish(publication)
            await self.sync(release=True)

    async def _publish(self, publication: Publication) -> None:
        ports = self._ports
        self._unsynced = publication
        rollout, unsynced_turns = ports.config.rollout, publication.turn + 1 - self._synced_turn
        if publication.turn < rollout.sync_warmup_steps or unsynced_turns >= rollout.weight_sync_interval:
            await self.sync()
        await self._at_version(publication.version)
        if self._unsynced is None:
            await ports.ledger.release(publication.turn)  # releases earlier turns too
        for sink in ports.sinks:
            if isinstance(sink, BufferedSink):
                await sink.wait_writable()
        self._advance(publication.turn + 1)

    def _advance(self, turn: int) -> None:
        self._done_turn = turn
        self._advanced.set()
        self._advanced = anyio.Event()

    async def sync(self, *, release: bool = False) -> None:
        """Give the newest version to every engine, if the engines do not have it. With `release`: then release the step's slots."""
        if (newest := self._unsynced) is None:
            return
        ports, version = self._ports, newest.version
        with ports.recorder.span("publish", track="publish pump", version=version):
            with ports.recorder.wait("publish pump", f"version {version}", on="the engines", cause="publish"):
                started = anyio.current_time()
                async with anyio.create_task_group() as sinks:
                    for sink in ports.sinks:
                        spawn(sinks, "hand-over of weights", self._hand_over, sink, version)
                ports.recorder.observe("time/weight_sync", anyio.current_time() - started)
        if self._unsynced is newest:  # False if another `sync` ended first
            self._synced_turn, self._unsynced = newest.turn + 1, None
            if release:  # no `await` in between: a cancellation would hold the slots
                await ports.ledger.release(newest.turn)

    async def _hand_over(self, sink: WeightSink, version: int) -> None:
        try:
            await anyio.lowlevel.checkpoint_if_cancelled()
            await sink.update_weights(version)
        except EngineClosed:
            # If this task was cancelled too, raise the cancellation instead.
            await anyio.lowlevel.checkpoint_if_cancelled()
            raise
