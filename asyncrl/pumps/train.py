"""The train pump: takes ready rows and makes optimizer steps.

    consumes     rows of scored groups (edge 5), in the order that the ledger allows
    produces     one or several optimizer steps for each batch, a report, and a publication (edge 6)
    waits for    a group that the ledger lets it claim; the publish of the last step; the lane of the trainer
    is woken by  the score pump (a group became ready), the ledger (a group ended, a slot came free), the publish pump

    claims (claims.py)            building (building.py)                   this file
    ready rows, ledger's order ─▶ penalties, advantages, hook, replay, ──▶ begin · microbatch x K · rounds · finish
      ▲        late ones dropped  masks, log-probs, packing                │ applied               │ not applied
      └──────────────── given back ◀───────────────────────────────────────┼─────── abort ─────────┘
                                                                           ▼
                              commit: the ledger's next turn, rows cleared, leases ended ─▶ report ─▶ publish pump

The pump trains when the step is full. If steps are streamed, `rollout.streaming_min_groups` untrained claimed groups suffice.

A step that fails before its optimizer step is aborted, after the work that is already on the lane. Its groups are live again, and
their rows are still in the store. Two exceptions: the groups that made the step fail; all groups, if a rank was lost (step.py,
`in_doubt`). Once the first optimizer step of a batch was applied, its groups count as trained, even if something fails later.

Rounds. If memory is short, a microbatch under `distributed.sharding: fsdp` has collectives. Then all ranks must train a microbatch
at the same time, in a round. A claimed group takes one place of a step. If steps are streamed, round k of a step is due when
`k x places_per_round` places of the step are taken, over all ranks. The shared ledger counts the places, and the count only grows
within a step. So every rank joins every due round, in order, with its untrained claimed groups. A rank without such groups runs a
microbatch of weight 0. Example, 2 places a round:

    claimed   0  1  2  3  4  5  6  7  8 = full
    round           1     2     3     4, then further rounds until no rank has a microbatch left

While a rank waits in a round, its lane decodes nothing. This is no deadlock, because the other ranks can join without groups of
this rank: each rank joins when its lane is free and its publish of the last step has ended. Every rank must wait for that publish,
because a publish has collectives, too. If a rank dies or raises, the collective fails on the other ranks, at the latest when the
rank is reported lost.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import anyio
import numpy as np

from asyncrl.concurrency.supervisor import spawn
from asyncrl.config.resolve import versions_per_batch
from asyncrl.data.store import ADVANTAGES, copy_group
from asyncrl.errors import DataError, DivergenceError, RankLost
from asyncrl.transport.queues.queue import QueueSender
from asyncrl.types import ClaimState, Group, Microbatch, StepResult

from .building import StepBuilder
from .claims import Claims, drop_late
from .metrics import COUNTED, StepPart, group_rows, merge_results, step_metrics
from .pipeline import Ports, Publication, StepReport, put_item
from .screen import Reroll
from .step import FailedGroups, GroupsFailed, Step, blame_groups


class TrainPump:
    """See the module docstring."""

    def __init__(
        self,
        ports: Ports,
        claims: Claims,
        reroll: Reroll,
        wait_published: Callable[[int], Awaitable[None]],
        on_step: Callable[[StepReport], None],
    ) -> None:
        """`wait_published(turn)` waits until the publish pump has published every turn below `turn`. `on_step` is called with the
        report of each committed step."""
        rollout = ports.config.rollout
        self._ports = ports
        self._claims = claims
        self._reroll = reroll
        self._wait_published = wait_published
        self._on_step = on_step
        self._updates = versions_per_batch(ports.config)  # optimizer steps of a batch
        streams = bool(rollout.streaming) and self._updates == 1
        # Train when at least this many claimed groups are untrained. None: steps are not streamed; train when the step is full.
        self._streams_from = rollout.streaming_min_groups if streams else None
        # Whether the loss needs counts or entropies of the whole step. `Trainer.survey` exchanges them before each optimizer step.
        self._surveys = ports.loss.needs_whole_step and not streams
        # Each time that this many further places are claimed, over all ranks, a round is due. 0: no round is due before `_finish`.
        has_rounds = streams and ports.round is not None
        self._places_per_round = max(rollout.streaming_min_groups, 1) * ports.ranks if has_rounds else 0
        self._building = StepBuilder(ports, self._wait_last_published, surveys=self._surveys)
        self._failed_groups = FailedGroups(ports)
        self._too_old = 0.0  # groups dropped as too old, since the start of the run

    async def run(self, publications: QueueSender[Publication]) -> None:
        """Make steps until `Claims.finished`, or until no further group can come. Then close the edge to the publish pump."""
        async with publications, anyio.create_task_group() as tasks:
            spawn(tasks, "watch of the claims", self._claims.watch, self._ports.ledger.changes)
            while not self._claims.finished and await self._step(publications):
                pass
            tasks.cancel_scope.cancel()

    async def _wait_last_published(self) -> None:
        """Wait until the last step is published. A publish evaluates and checkpoints, and so reads the weights: it must end before
        the next optimizer step. Its collectives must run before those of the next step, on every rank."""
        await self._wait_published(self._ports.ledger.turn)

    async def _step(self, publications: QueueSender[Publication]) -> bool:
        """Make one step, or drop the groups that made it fail. Returns False if no further group can come."""
        step = Step(version=self._ports.trainer.version, started=anyio.current_time())
        failure: GroupsFailed | DivergenceError | None = None
        try:
            if not await self._fill(step):
                return False
            await self._finish(step, publications)
        except (GroupsFailed, DivergenceError) as error:
            # An applied step is committed in spite of the error, so its groups are not dropped.
            if step.applied:
                raise (error.cause if isinstance(error, GroupsFailed) else error) from None
            failure = error
        finally:
            try:
                await self._close(step)
            finally:
                if failure is not None:
                    await self._failed_groups.end(step, failure)
        return True

    async def _fill(self, step: Step) -> bool:
        """Claim and train until the step is full, or no further group can come. False: there is no step to finish."""
        claims, threshold = self._claims, self._streams_from
        while True:
            # Read before the claim, so that a change during the claim is not missed.
            changed = claims.changed
            full = await claims.claim_ready(step) is ClaimState.FULL
            if threshold is not None and (full or len(step.untrained()) >= threshold):
                await self._train_new(step)
            await self._join_rounds(step)
            if full:
                break
            if self._ports.ledger.finished:
                return False
            await drop_late(self._ports)
            await claims.wait(changed)
        if claims.has_too_few_groups:
            return False
        if threshold is None:
            # The rounding of sums must not depend on which group was ready first.
            step.rows.sort(key=lambda rows: rows.group_id)
            await self._train_new(step)
        return True

    async def _train_new(self, step: Step) -> None:
        batches = await self._building.microbatches(step)
        if batches is not None:
            await self._train(step, batches)

    async def _join_rounds(self, step: Step) -> None:
        """Join every round that is due, even if the step is full already, because every rank must join the same rounds."""
        ports = self._ports
        per_round = self._places_per_round
        while per_round and ports.ledger.statistics().claimed >= (step.rounds + 1) * per_round:
            await self._wait_last_published()
            await self._train_new(step)
            await self._begin(step)
            step.rounds += 1
            assert ports.round is not None
            with blame_groups(step.group_ids):
                await ports.round(False)

    async def _train(self, step: Step, batches: list[Microbatch]) -> None:
        """Begin the trainer's step, if needed, and add these microbatches. With `_surveys`, every rank must call this method once
        before each optimizer step, even without microbatches, because a survey is a collective."""
        trainer = self._ports.trainer
        if self._surveys:
            # A publish has a collective, for the time limit. On every rank this collective must run before the survey.
            if not self._ports.trains_alone:
                await self._wait_last_published()
            with blame_groups(step.group_ids):
                step.loss, batches = await trainer.survey(self._ports.loss, batches)
        for batch in batches:
            await self._begin(step)
            with blame_groups(batch.group_ids.tolist()):
                await trainer.train_microbatch(batch)

    async def _begin(self, step: Step) -> None:
        """Open the trainer's step, once."""
        if not step.begun:
            # Set before the await: `begin_train_step` may open the step on the lane even if the call is cancelled.
            step.begun = True
            await self._ports.trainer.begin_train_step(step.loss or self._ports.loss)

    async def _finish(self, step: Step, publications: QueueSender[Publication]) -> None:
        """Make the optimizer steps of the batch, commit and report the step, and send the new version to the publish pump."""
        ports = self._ports
        turn = ports.ledger.turn
        with ports.recorder.wait("train pump", "the last publish", on="publish pump", cause="publish"):
            await self._wait_last_published()
        async with ports.book.weights_lock:
            for update in range(self._updates):
                if self._updates > 1:
                    await self._train(step, step.parts[update % len(step.parts)])
                # A rank without work in this step begins too, because the reduction needs every rank.
                await self._begin(step)
                # The error of a round does not name the group that caused it, so all groups are blamed.
                with blame_groups(step.group_ids):
                    while ports.round is not None and not await ports.round(True):
                        pass
                step.results.append(await self._apply(step, update))
            # The weights have changed, so the step must be committed even if this task is cancelled.
            with anyio.CancelScope(shield=True):
                groups = await self._commit(step)
                with ports.recorder.work("train pump", "count"):
                    parts = [self._part(step, groups)]
                try:
                    # A collective. Every rank runs it once after each committed step, before the collectives of the publish.
                    parts = await ports.gather(parts[0])
                finally:
                    # If the gather has failed because another rank has ended, `parts` has only the part of this rank.
                    self._report(step, groups, parts)
        await put_item(publications, Publication(turn=turn, version=step.results[-1].version))

    async def _close(self, step: Step) -> None:
        """End a step that `_finish` has not committed: commit and report it if it was applied, else abort it."""
        if step.committed or not (step.rows or step.begun):
            return
        with anyio.CancelScope(shield=True):  # the cleanup must end, even if the lane is busy for long
            if step.applied:
                groups = await self._commit(step)
                self._report(step, groups, [self._part(step, groups)])  # no gather: other ranks may not join
                return
            if step.begun:
                await self._ports.trainer.abort_train_step()
            if not step.in_doubt:
                for ticket in await self._ports.ledger.rollback():
                    self._ports.book.unclaim(ticket)

    async def _apply(self, step: Step, update: int) -> StepResult:
        """Run the optimizer step. Shielded from cancellation, because if the weights have changed, the result is needed."""
        trainer = self._ports.trainer
        before = trainer.version
        try:
            with (
                self._ports.recorder.span("train/finish", track="train pump", update=update),
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
            step.applied |= trainer.version > before  # also after an error

    async def _commit(self, step: Step) -> tuple[Group, ...]:
        """Begin the ledger's next turn and clear the rows. Returns the groups, which stay valid after their leases end."""
        ports = self._ports
        groups = tuple(copy_group(rows.group) if rows.leases else rows.group for rows in step.rows)
        if step.begun:  # a later optimizer step began and was not applied
            await ports.trainer.abort_train_step()
            step.begun = False
        await ports.ledger.commit()
        step.committed = True
        self._reroll.on_step_commit([rows.group for rows in step.rows])
        # After the step, so that the step cannot draw its own groups. Before `clear`, which removes their rows.
        if ports.replay is not None:
            for rows in step.rows:
                ports.replay.add(rows.group, rows.columns[ADVANTAGES])
        ports.book.clear(rows.group_id for rows in step.rows)
        return groups

    def _report(self, step: Step, groups: tuple[Group, ...], parts: Sequence[StepPart]) -> None:
        """Call `on_step` for a committed step. `parts`: the parts of all ranks, or only the part of this rank."""
        result = self._result(step)
        metrics = step_metrics(parts, step.version, result, anyio.current_time() - step.started)
        if len(parts) < self._ports.ranks:
            metrics["train/ranks_reported"] = len(parts)
        advantages = {rows.group_id: np.asarray(rows.columns[ADVANTAGES]) for rows in step.rows}
        with self._ports.recorder.work("train pump", "report"):
            self._on_step(StepReport(result.version, result, metrics, groups, advantages))

    def _result(self, step: Step) -> StepResult:
        """The merged results of the last `minibatches` optimizer steps, which are one pass over the batch. After an error they may
        belong to two passes."""
        version = self._ports.trainer.version
        done = step.results[-self._ports.config.algorithm.minibatches :]
        if not done:  # the trainer applied a first optimizer step, then raised
            return StepResult(version, math.nan, math.nan, math.nan, tokens=0, sequences=0, microbatches=0)
        return replace(merge_results(done), version=version)

    def _part(self, step: Step, groups: tuple[Group, ...]) -> StepPart:
        """This rank's part of the metrics. `staleness/dropped` and `replay/evicted` count since the start of the run, other counts
        since the last step."""
        ports = self._ports
        sums = ports.recorder.take_counts(COUNTED) | self._reroll.sums(groups)
        self._too_old += sums.get("staleness/dropped", 0.0)
        sums["staleness/dropped"] = self._too_old
        if ports.replay is not None:
            sums["replay/groups"], sums["replay/size"] = float(len(step.replayed)), float(len(ports.replay))
            sums["replay/evicted"] = float(ports.replay.evicted)
            if replayed := [t for group in step.replayed.values() for t in group.trajectories]:
                sums["replay/tokens"] = float(sum(int(t.mask.sum()) for t in replayed))
        return StepPart(
            group_rows(groups),
            sums,
            tuple(step.version - group.oldest_version for group in step.replayed.values()),
            None if ports.reward_penalty is None else sum(step.kl),
        )
