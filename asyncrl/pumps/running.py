"""Running a step: begin, microbatches and rounds, finish, commit or abort; and its report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import anyio
import numpy as np

from asyncrl.algorithms.base import Loss
from asyncrl.data.store import ADVANTAGES, owned
from asyncrl.errors import DataError, DivergenceError, RankLost
from asyncrl.ports import Ledger, Trainer
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.queues.queue import QueueSender
from asyncrl.types import Group, Microbatch, StepResult

from .book import GroupBook
from .claims import Claims
from .failing import GroupsFailed, laid_to
from .metrics import COUNTED, Gather, StepPart, group_rows, step_metrics
from .minibatches import over_parts
from .pipeline import Publication, StepReport, hand_on
from .replaying import Replaying
from .reroll import Reroll
from .rounds import Rounds
from .step import Step


@dataclass(frozen=True, slots=True)
class RunningParts:
    """What running works with."""

    updates: int  # optimizer steps of a batch
    minibatches: int
    ranks: int
    gather: Gather
    loss: Loss
    penalised: bool  # the KL is taken off the rewards
    trainer: Trainer
    ledger: Ledger
    book: GroupBook
    recorder: Recorder
    counters: Counter[str]
    surveys: bool  # every rank says what the loss has to know of the whole step, before each optimizer step
    published: Callable[[], Awaitable[None]]  # until the last step is


class Running:
    """Owns the calls of the trainer in a step, and what is told of it afterwards."""

    def __init__(
        self,
        parts: RunningParts,
        claims: Claims,
        rounds: Rounds,
        replaying: Replaying,
        reroll: Reroll,
        on_step: Callable[[StepReport], None],
    ) -> None:
        self._parts = parts
        self._claims = claims
        self._rounds = rounds
        self._replaying = replaying
        self._reroll = reroll
        self._on_step = on_step

    def new_step(self) -> Step:
        """A step without groups, at the trainer's version."""
        return Step(version=self._parts.trainer.version, started=anyio.current_time())

    async def train(self, step: Step, batches: list[Microbatch]) -> None:
        """Begin where that was not done, and add these microbatches. Every rank comes here once before each optimizer
        step whose loss is surveyed, or none does: that is a collective."""
        if self._parts.surveys:
            if self._parts.ranks > 1:  # the publish has a collective too (time limit): in the same order on every rank
                await self._parts.published()
            with laid_to(step.group_ids):
                step.loss, batches = await self._parts.trainer.survey(self._parts.loss, batches)
        for batch in batches:
            await self.begin(step)
            with laid_to(batch.group_ids.tolist()):
                await self._parts.trainer.train_microbatch(batch)

    async def begin(self, step: Step) -> None:
        """Open the trainer's step, once."""
        if not step.begun:
            step.begun = True  # before the await: a cancelled begin may still have opened the step on the lane
            await self._parts.trainer.begin_train_step(step.loss or self._parts.loss)

    async def last_published(self) -> None:
        """Until the publish pump is done with the last step: evaluation and checkpoint read the weights of their version, so
        the next optimizer step must not come before; and it may have a collective, in the same order on every rank."""
        await self._parts.published()

    async def finish(self, step: Step, publications: QueueSender[Publication]) -> None:
        """The optimizer steps of the batch, the commit, the report, and the new version to the publish pump."""
        parts = self._parts
        turn = parts.ledger.turn
        with parts.recorder.wait("train pump", "the last publish", on="publish pump", cause="publish"):
            await self._parts.published()
        async with parts.book.moving:
            for update in range(parts.updates):
                if parts.updates > 1:
                    await self.train(step, step.parts[update % parts.minibatches])
                # Also where another rank did all the work of this step: the reduction needs everybody.
                await self.begin(step)
                with laid_to(step.group_ids):  # which of them, the trainer does not say
                    await self._rounds.last()
                step.results.append(await self._apply(step, update))
            with anyio.CancelScope(shield=True):  # the weights moved: the books follow, whatever happens now
                groups = await self._commit(step)
                every = [self._part(step, groups)]
                try:
                    # Every rank comes here once after each step that it committed: a collective, like the reduction before it.
                    # The next one (of the time limit, of the next step) is asked for only afterwards.
                    every = await self._parts.gather(every[0])
                finally:  # also where another rank is gone: a step that is committed has its line, of this rank's groups
                    self._tell(step, groups, every)
        await hand_on(publications, Publication(turn=turn, version=step.results[-1].version))

    async def close(self, step: Step) -> None:
        """A step that was not finished: committed and told of where it was applied, aborted where it was not."""
        if step.committed or not (step.rows or step.begun):
            return
        with anyio.CancelScope(shield=True):  # abort queues behind whatever the lane is doing
            if not step.applied:
                return await self._abort(step)
            groups = await self._commit(step)
            self._tell(step, groups, [self._part(step, groups)])  # the other ranks do not come to a gathering

    async def _apply(self, step: Step, update: int) -> StepResult:
        """The optimizer step. Not cancelled half-way: it may have moved the weights, and then its result is wanted."""
        trainer = self._parts.trainer
        before = trainer.version
        try:
            with (
                self._parts.recorder.span("train/finish", track="train pump", update=update),
                anyio.CancelScope(shield=True),
            ):
                result = await trainer.finish_train_step()
            step.begun = False
            return result
        except (DataError, DivergenceError) as error:
            if error.groups:
                raise GroupsFailed(error.groups, error) from error
            raise
        except RankLost:
            step.in_doubt = True
            raise
        finally:
            step.applied |= trainer.version > before  # also where it failed only afterwards

    async def _commit(self, step: Step) -> tuple[Group, ...]:
        """Its groups, which outlive their rows."""
        groups = tuple(owned(rows.group) if rows.leases else rows.group for rows in step.rows)
        if step.begun:  # a later update of the same batch was cut off
            await self._parts.trainer.abort_train_step()
            step.begun = False
        await self._parts.ledger.commit()
        step.committed = True
        self._reroll.step_over([rows.group for rows in step.rows])
        self._replaying.store(step.rows)  # before their rows are cleared
        self._parts.book.trained(rows.group_id for rows in step.rows)
        return groups

    async def _abort(self, step: Step) -> None:
        if step.begun:
            await self._parts.trainer.abort_train_step()
        if not step.in_doubt:
            await self._claims.give_back()

    def _tell(self, step: Step, groups: tuple[Group, ...], every: Sequence[StepPart]) -> None:
        """The report of a step that was committed, once each. `every`: the parts of all ranks, or of those that there are."""
        seconds = anyio.current_time() - step.started
        result = self._result(step)
        metrics = step_metrics(every, step.version, result, seconds)
        if len(every) < self._parts.ranks:
            metrics["train/ranks_reported"] = len(every)
        advantages = {rows.group_id: np.asarray(rows.columns[ADVANTAGES]) for rows in step.rows}
        self._on_step(StepReport(result.version, result, metrics, groups, advantages))

    def _result(self, step: Step) -> StepResult:
        """Of its last pass over the batch; of what there is of that, where it was cut off."""
        version = self._parts.trainer.version
        done = step.results[-self._parts.minibatches :]
        if not done:  # applied, and then the trainer failed
            return StepResult(version, math.nan, math.nan, math.nan, tokens=0, sequences=0, microbatches=0)
        return replace(over_parts(done), version=version)

    def _part(self, step: Step, groups: tuple[Group, ...]) -> StepPart:
        """This rank's part of the step, and what it counted since its last one."""
        parts = self._parts
        sums = parts.recorder.take_counts(COUNTED)
        sums |= self._replaying.sums(step.replayed) | self._reroll.sums(groups)
        sums["staleness/dropped"] = float(parts.counters["staleness/dropped"])
        return StepPart(
            group_rows(groups),
            sums,
            tuple(step.version - group.oldest_version for group in step.replayed.values()),
            sum(step.kl) if parts.penalised else None,
        )
