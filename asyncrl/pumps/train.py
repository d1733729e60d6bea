"""The train pump: whole groups in, optimizer steps out (edges 5 and 6).

One step: claim groups from the ledger, advantages for each, pack what is ready (never wait to fill), lazily begin,
`train_microbatch` while later groups are still being generated; when the step is full, or nothing more can come, finish
once, commit, clear the step's rows once, hand the new version to the publish pump.

A step whose optimizer step was not applied is aborted, after the work that is already on the lane: its groups are live
again and their rows are still in the store. Once it was applied (once, where a batch is used for several updates), its
groups count as trained, whatever fails or is cancelled afterwards: no group is ever trained in two steps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import anyio
import numpy as np
import numpy.typing as npt

from asyncrl.algorithms.base import Loss
from asyncrl.algorithms.kl import lowered
from asyncrl.algorithms.masks import without_overlong
from asyncrl.config.check_losses import needs_second_buffer
from asyncrl.config.resolve import versions_per_batch
from asyncrl.data.packing import pack_groups
from asyncrl.transport.queues.queue import QueueReceiver, QueueSender
from asyncrl.types import ClaimState, Group, Microbatch, StepResult, Ticket

from .metrics import COUNTED, StepPart, check_mismatch, group_rows, step_metrics
from .minibatches import over_parts, part_of_each
from .pipeline import Publication, Rooms, StepReport, hand_on
from .reference import ReferenceAhead
from .replaying import Replaying
from .reroll import Reroll
from .rounds import Rounds
from .signal import Advantages, advantages_over_ranks, counted_only, step_advantages

Chosen: TypeAlias = tuple[Group, npt.NDArray[np.float64]]  # what is trained, with its advantages [G]


@dataclass(slots=True)
class _Step:
    """The step being assembled. `groups` are claimed; `begun` says whether the trainer has an open step."""

    groups: list[Group] = field(default_factory=list)
    advantages: dict[int, npt.NDArray[np.float64]] = field(default_factory=dict)
    replayed: dict[int, Group] = field(default_factory=dict)  # by the id of the group whose place it takes
    # Kept only where a batch takes several optimizer steps: one list for each of its `minibatches`.
    parts: list[list[Microbatch]] = field(default_factory=lambda: [[]])
    begun: bool = False
    rounds: int = 0  # that this rank joined while the step filled (rounds.py)
    applied: bool = False  # the weights have moved by it: from then on it can only be committed
    committed: bool = False
    loss: Loss | None = None  # bound to this step, where the loss has to know the whole of it
    kl: list[float] = field(default_factory=list)  # sum of the KL per microbatch, where it is taken off the rewards
    version: int = 0  # at which the first microbatch is trained
    started: float = 0.0


class TrainPump:
    def __init__(
        self,
        rooms: Rooms,
        groups: QueueReceiver[Group],
        publications: QueueSender[Publication],
        published: Callable[[int], Awaitable[None]],
        on_step: Callable[[StepReport], None],
        reroll: Reroll,
        reference: ReferenceAhead,
    ) -> None:
        """`published(turn)` waits until the publish pump is done with that turn: evaluation and checkpoint read the
        weights of their version, so the next optimizer step must not come before."""
        self._rooms = rooms
        self._groups = groups
        self._publications = publications
        self._published = published
        self._on_step = on_step
        self._reroll = reroll
        self._reference = reference
        self._ready: dict[int, Group] = {}  # whole groups without a place, in arrival order
        self._changed = anyio.Event()
        self._stop_requested = False
        self._stop_turn: int | None = None
        config = rooms.config
        self._per_turn = versions_per_batch(config)
        self._replaying = Replaying(rooms)
        self._min_groups = config.rollout.streaming_min_groups
        self._streaming = bool(config.rollout.streaming) and self._per_turn == 1
        every = max(self._min_groups, 1) * rooms.ranks
        self._rounds = Rounds(rooms.round, rooms.ledger, every if self._streaming else None)
        in_two_buffers = needs_second_buffer(config.algorithm)
        self._surveys = rooms.loss.needs_whole_step and not self._streaming and not in_two_buffers

    @property
    def _compares(self) -> bool:
        """Whether advantages need the rewards of other ranks; never where steps are streamed (`resolve`)."""
        return self._rooms.ranks > 1 and self._rooms.advantage.needs_whole_step

    @property
    def _divides(self) -> bool:
        """Whether the parts of the batch need the groups of other ranks; such a step is never streamed."""
        return self._rooms.ranks > 1 and self._rooms.config.algorithm.minibatches > 1

    @property
    def stopping(self) -> bool:
        return self._stop_requested or (self._stop_turn is not None and self._rooms.ledger.turn >= self._stop_turn)

    def stop_at(self, turn: int) -> None:
        """Begin no step of this turn or a later one."""
        self._stop_turn = turn

    def stop_after_step(self) -> None:
        """End after the step in progress (time limit): whatever is not in it is dropped by the runtime."""
        self._stop_requested = True
        self._notify()

    async def run(self) -> None:
        async with self._groups, self._publications, anyio.create_task_group() as tasks:
            tasks.start_soon(self._receive)
            tasks.start_soon(self._watch_ledger, self._rooms.ledger.changes)
            while not self._finished() and await self._step():
                pass
            tasks.cancel_scope.cancel()

    def _finished(self) -> bool:
        limit = self._rooms.config.train.max_steps
        return self.stopping or (limit is not None and self._rooms.ledger.turn >= limit)

    # -- what wakes the pump ---------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        async for group in self._groups:
            if group.group_id in self._rooms.book:  # else it was dropped for its age on its way here
                self._ready[group.group_id] = group
                self._notify()

    async def _watch_ledger(self, seen: int) -> None:
        """`seen` was taken before the first claim: a change between that and the start of this task is not missed."""
        while True:
            seen = await self._rooms.ledger.wait_changed(seen)
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _wait_for_change(self, changed: anyio.Event) -> None:
        recorder = self._rooms.recorder
        with recorder.timed("time/wait_for_group"):
            with recorder.wait("train pump", "a claimable group", on="score pump", cause="group"):
                await changed.wait()

    # -- one step --------------------------------------------------------------------------------------------------

    async def _step(self) -> bool:
        """True if a step was committed; False if nothing can come any more."""
        step = _Step(version=self._rooms.trainer.version, started=anyio.current_time())
        try:
            if not await self._fill(step):
                return False
            await self._finish(step)
            return True
        finally:
            if not step.committed and (step.groups or step.begun):
                with anyio.CancelScope(shield=True):  # abort queues behind whatever the lane is doing
                    await (self._commit(step) if step.applied else self._abort(step))

    async def _fill(self, step: _Step) -> bool:
        """Claim and train until the step is full, or nothing more can come. False: there is no step to finish."""
        while True:
            changed = self._changed  # taken before the claim: a change during it is not slept over
            state = await self._claim_ready(step)
            if self._streaming and (state is ClaimState.FULL or self._untrained(step) >= self._min_groups):
                await self._train_new(step)
            await self._join_rounds(step)
            if state is ClaimState.FULL:
                if self._too_short():
                    return False
                break
            if self._rooms.ledger.finished:
                return False
            if self._rooms.config.rollout.late == "drop":
                await self._drop_expired()
            await self._wait_for_change(changed)
        if not self._streaming:
            step.groups.sort(key=lambda group: group.group_id)  # the sums do not depend on who was faster
            await self._train_new(step)
        return True

    async def _join_rounds(self, step: _Step) -> None:
        """Also where the step turns out to be full: every rank joins the same number of rounds."""
        while self._rounds.due(step.rounds):
            await self._published(self._rooms.ledger.turn)
            await self._train_new(step)
            await self._begin(step)
            step.rounds += 1
            await self._rounds.join()

    async def _claim_ready(self, step: _Step) -> ClaimState:
        rooms = self._rooms
        while True:
            state, ticket = await rooms.ledger.claim([group.ticket for group in self._ready.values()])
            if ticket is None:
                return state
            group = self._ready.pop(ticket.group_id)
            rooms.book.claimed(ticket)
            step.groups.append(group)

    def _too_short(self) -> bool:
        config, claimed = self._rooms.config, self._rooms.ledger.statistics().claimed
        least = 1 if config.train.partial_final_step else config.rollout.groups_per_step
        return claimed < max(least, config.algorithm.minibatches)  # every batch is the same number of versions

    async def _drop_expired(self) -> None:
        for ticket in self._rooms.ledger.expired():
            if await self._rooms.book.end(ticket.group_id, "dropped", "past its deadline"):
                self._ready.pop(ticket.group_id, None)
                self._rooms.counters["staleness/dropped"] += 1

    def _untrained(self, step: _Step) -> int:
        return len(step.groups) - len(step.advantages)

    async def _train_new(self, step: _Step) -> None:
        """Pack and train the claimed groups that were not trained yet. Where that takes a collective, a rank without any
        comes along."""
        fresh = [group for group in step.groups if group.group_id not in step.advantages]
        if not (fresh or self._surveys or self._compares or self._divides):
            return
        advantages = await self._advantages(await self._less_penalties(step, fresh))
        for group in fresh:
            step.advantages[group.group_id] = await self._rooms.hooks.weighed(group, advantages[group.group_id])
        chosen = self._replaying.chosen(fresh, step.advantages, step.replayed, step.version)
        if self._per_turn > 1:
            step.parts = await self._parts(fresh, chosen)
            return
        batches = [await self._with_columns(batch) for batch in self._pack(chosen)]
        for batch in await self._survey(step, batches):
            await self._train(step, batch)

    async def _parts(self, groups: list[Group], chosen: list[Chosen]) -> list[list[Microbatch]]:
        """The microbatches of each part of the batch. `chosen`: what is trained in the place of each of `groups`."""
        if self._divides:
            await self._published(self._rooms.ledger.turn)  # which may be a collective, too: see `_survey`
        numbers = await part_of_each(self._rooms, groups)
        parts = []
        for part in range(self._rooms.config.algorithm.minibatches):
            mine = [each for each, number in zip(chosen, numbers, strict=True) if number == part]
            parts.append([await self._with_columns(batch) for batch in self._pack(mine)])
        return parts

    async def _advantages(self, groups: list[Group]) -> Advantages:
        rooms = self._rooms
        if self._compares:
            await self._published(rooms.ledger.turn)  # which may be a collective, too: see `_survey`
            return await advantages_over_ranks(rooms, groups)
        return step_advantages(rooms.advantage, groups, rooms.weights, rooms.config.reward.scale_adv_by_len)

    def _pack(self, groups: list[Chosen]) -> list[Microbatch]:
        config = self._rooms.config
        truncated, longest = config.algorithm.mask_truncated, config.algorithm.mask_longer_than
        filtered = [
            (without_overlong(group, truncated=truncated, longest=longest), advantages) for group, advantages in groups
        ]
        skips = config.train.skip_zero_advantage  # `resolve` allows it only where it changes no gradient
        batches = pack_groups(
            [(group, values) for group, values in filtered if values.any() or not skips],
            config.train.tokens_per_microbatch,
        )
        without = [group for group, values in filtered if skips and not values.any()]
        if without:
            batches.append(counted_only(without))
            self._rooms.recorder.count("train/skipped_groups", len(without))
        return batches

    async def _less_penalties(self, step: _Step, groups: list[Group]) -> list[Group]:
        """The groups with the KL to the reference taken off their rewards, where that is asked for."""
        penalty = self._rooms.reward_penalty
        if penalty is None:
            return groups
        penalties = dict[tuple[int, int], float]()
        size = self._rooms.config.train.tokens_per_microbatch
        for batch in pack_groups([(group, np.zeros(len(group.trajectories))) for group in groups], size):
            if batch.scored == 0:
                continue
            found, kl = penalty(batch, await self._reference.column(batch))
            penalties |= found
            step.kl.append(kl)
        return [lowered(group, penalties) for group in groups]

    async def _survey(self, step: _Step, batches: list[Microbatch]) -> list[Microbatch]:
        """Every rank comes here once before each optimizer step, or none does: it is a collective."""
        if self._surveys:
            if self._rooms.ranks > 1:  # the publish has a collective too (time limit): in the same order on every rank
                await self._published(self._rooms.ledger.turn)
            step.loss, batches = await self._rooms.trainer.survey(self._rooms.loss, batches)
        return batches

    async def _with_columns(self, batch: Microbatch) -> Microbatch:
        rooms = self._rooms
        if batch.scored == 0:  # nothing that a column could stand beside
            return batch
        if rooms.loss.needs_reference:
            batch = replace(batch, reference_logprobs=await self._reference.column(batch))
        if rooms.config.algorithm.old_logprobs == "sampler":
            return replace(batch, old_logprobs=batch.sampler_logprobs)
        if self._per_turn > 1 and rooms.loss.needs_old:  # taken once, before the first update of the batch
            batch = replace(batch, old_logprobs=await rooms.trainer.compute_logprobs(batch, "policy"))
        return batch

    async def _train(self, step: _Step, batch: Microbatch) -> None:
        await self._begin(step)
        await self._rooms.trainer.train_microbatch(batch)

    async def _begin(self, step: _Step) -> None:
        if not step.begun:
            step.begun = True  # before the await: a cancelled begin may still have opened the step on the lane
            await self._rooms.trainer.begin_train_step(step.loss or self._rooms.loss)

    async def _finish(self, step: _Step) -> None:
        rooms = self._rooms
        turn = rooms.ledger.turn
        with rooms.recorder.wait("train pump", "the last publish", on="publish pump", cause="publish"):
            await self._published(turn)
        results = []
        parts = rooms.config.algorithm.minibatches
        for update in range(self._per_turn):
            if self._per_turn > 1:
                for batch in await self._survey(step, step.parts[update % parts]):
                    await self._train(step, batch)
            await self._begin(step)  # where another rank did all the work of this step: the reduction needs everybody
            await self._rounds.last()
            results.append(await self._apply(step, update))
        result = over_parts(results[-parts:])
        with anyio.CancelScope(shield=True):  # the weights moved: the books follow, whatever happens now
            await self._commit(step)
            await self._report(step, result)
        for each in results:
            check_mismatch(each, rooms.config.algorithm.mismatch_gate)
        await hand_on(self._publications, Publication(turn=turn, version=result.version))

    async def _apply(self, step: _Step, update: int) -> StepResult:
        """The optimizer step. Not cancelled half-way: it may have moved the weights, and then its result is wanted."""
        trainer = self._rooms.trainer
        before = trainer.version
        try:
            with (
                self._rooms.recorder.span("train/finish", track="train pump", update=update),
                anyio.CancelScope(shield=True),
            ):
                result = await trainer.finish_train_step()
            step.begun = False
            return result
        finally:
            step.applied |= trainer.version > before  # also where it failed only afterwards

    async def _commit(self, step: _Step) -> None:
        if step.begun:  # a later update of the same batch was cut off
            await self._rooms.trainer.abort_train_step()
            step.begun = False
        await self._rooms.ledger.commit()
        step.committed = True
        self._reroll.step_over(step.groups)
        self._reference.keep_only(self._rooms.book.live())
        self._replaying.store(step.groups, step.advantages)  # before their rows are freed
        self._rooms.book.trained(group.group_id for group in step.groups)

    async def _report(self, step: _Step, result: StepResult) -> None:
        """Every rank comes here once after each step that it committed: the gathering is a collective, like the reduction
        before it. The next one (of the time limit, of the next step) is asked for only afterwards."""
        seconds = anyio.current_time() - step.started
        parts = await self._rooms.gather(self._part(step))
        metrics = step_metrics(parts, step.version, result, seconds)
        self._on_step(StepReport(result.version, result, metrics, tuple(step.groups), step.advantages))

    def _part(self, step: _Step) -> StepPart:
        """This rank's part of the step, and what it counted since its last one."""
        rooms = self._rooms
        sums = rooms.recorder.take_counts(COUNTED)
        sums |= self._replaying.sums(step.replayed) | self._reroll.sums(step.groups)
        sums["staleness/dropped"] = float(rooms.counters["staleness/dropped"])
        return StepPart(
            group_rows(step.groups),
            sums,
            tuple(step.version - group.oldest_version for group in step.replayed.values()),
            None if rooms.reward_penalty is None else sum(step.kl),
        )

    async def _abort(self, step: _Step) -> None:
        if step.begun:
            await self._rooms.trainer.abort_train_step()
        returned: list[Ticket] = await self._rooms.ledger.rollback()
        groups = {group.group_id: group for group in step.groups}
        for ticket in returned:
            if ticket.group_id in groups:
                self._rooms.book.reopen(ticket)
                self._ready[ticket.group_id] = groups[ticket.group_id]
