"""The train pump: rows that are ready in, optimizer steps out (edges 5 and 6).

    claims (claims.py)            building (building.py)              running (running.py)
    ready rows, ledger's order ─▶ penalty, advantages, hook, replay, ─▶ begin · microbatch x K · rounds · finish
      ▲        late ones dropped   masks, log-probs, packing             │ applied                │ not applied
      └──────────────── given back ◀─────────────────────────────────────┼──────── abort ─────────┘
                                                                         ▼
                            commit: the ledger's next turn, rows cleared, leases ended ─▶ report ─▶ publish pump

Never waits to fill a microbatch; where steps are streamed, what is claimed is trained while later groups are still generated.

A step whose optimizer step was not applied is aborted, after the work that is already on the lane: its groups are live
again and their rows are still in the store, but for those that it failed on (failing.py). Once it was applied (once, where a
batch is used for several updates), its groups count as trained, whatever fails or is cancelled afterwards: no group is ever
trained in two steps.
"""

from __future__ import annotations

import anyio

from asyncrl.concurrency.supervisor import spawn
from asyncrl.errors import DivergenceError
from asyncrl.transport.queues.queue import QueueSender
from asyncrl.types import ClaimState

from .building import Building
from .claims import Claims
from .failing import Failing, GroupsFailed, laid_to
from .pipeline import Publication
from .rounds import Rounds
from .running import Running
from .step import Step


class TrainPump:
    """See the module docstring."""

    def __init__(
        self,
        claims: Claims,
        building: Building,
        running: Running,
        rounds: Rounds,
        failing: Failing,
        *,
        streams_from: int | None,
    ) -> None:
        """`streams_from`: so many claimed groups are trained before the step is full; None: steps are not streamed."""
        self._claims = claims
        self._building = building
        self._running = running
        self._rounds = rounds
        self._failing = failing
        self._streams_from = streams_from

    async def run(self, publications: QueueSender[Publication]) -> None:
        """Step after step, until there is none any more; then the publish pump's edge is closed."""
        async with publications, anyio.create_task_group() as tasks:
            spawn(tasks, "watch of the claims", self._claims.watch, self._claims.seen)
            while not self._claims.finished and await self._step(publications):
                pass
            tasks.cancel_scope.cancel()

    async def _step(self, publications: QueueSender[Publication]) -> bool:
        """False if nothing can come any more."""
        step = self._running.new_step()
        failure: GroupsFailed | DivergenceError | None = None
        try:
            if not await self._fill(step):
                return False
            await self._running.finish(step, publications)
        except (GroupsFailed, DivergenceError) as error:
            if step.applied:  # it is committed: whose fault it was is no longer the question
                raise (error.cause if isinstance(error, GroupsFailed) else error) from None
            failure = error
        finally:
            try:
                await self._running.close(step)
            finally:
                if failure is not None:
                    await self._failing.step_failed(step, failure)
        return True

    async def _fill(self, step: Step) -> bool:
        """Claim and train until the step is full, or nothing more can come. False: there is no step to finish."""
        least = self._streams_from
        while True:
            changed = self._claims.changed  # taken before the claim: a change during it is not slept over
            full = await self._claims.claim_ready(step) is ClaimState.FULL
            if least is not None and (full or len(step.untrained()) >= least):
                await self._train_new(step)
            await self._join_rounds(step)
            if full:
                break
            if self._claims.exhausted:
                return False
            await self._claims.drop_late()
            await self._claims.wait(changed)
        if self._claims.too_few:
            return False
        if least is None:
            step.rows.sort(key=lambda rows: rows.group_id)  # the sums do not depend on who was faster
            await self._train_new(step)
        return True

    async def _train_new(self, step: Step) -> None:
        batches = await self._building.microbatches(step)
        if batches is not None:
            await self._running.train(step, batches)

    async def _join_rounds(self, step: Step) -> None:
        """Also where the step turns out to be full: every rank joins the same number of rounds."""
        while self._rounds.due(step.rounds):
            await self._running.last_published()
            await self._train_new(step)
            await self._running.begin(step)
            step.rounds += 1
            with laid_to(step.group_ids):
                await self._rounds.join()
