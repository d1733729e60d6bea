"""Building a step: from claimed rows to microbatches.

    rows ─▶ penalty (KL to the reference) ─▶ advantages ─▶ hook ─▶ replay ─▶ masks ─▶ log-probs as columns ─▶ packing

Each stage writes its column into the rows; packing reads them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from asyncrl.algorithms.base import Loss
from asyncrl.algorithms.kl import RewardPenalty, lowered
from asyncrl.algorithms.masks import without_overlong
from asyncrl.config.schema import AlgorithmConfig
from asyncrl.data.packing import pack_groups
from asyncrl.data.store import ADVANTAGES, OLD, REFERENCE, Rows, owned
from asyncrl.errors import DataError
from asyncrl.ports import Trainer
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Group, Microbatch

from .book import GroupBook
from .failing import GroupsFailed
from .hooks import Hooks
from .metrics import Gather
from .minibatches import part_of_each
from .reference import logprob_columns
from .replaying import Replaying
from .signal import Advantages, RewardReader, counted_only
from .step import Step

FLOAT32 = float(np.finfo(np.float32).max)  # the largest that a microbatch can hold


@dataclass(frozen=True, slots=True)
class BuildingParts:
    """What building works with."""

    algorithm: AlgorithmConfig
    tokens_per_microbatch: int
    skips_zero_advantage: bool  # `resolve` allows it only where it changes no gradient
    updates: int  # optimizer steps of a batch
    ranks: int
    rank: int
    gather: Gather
    loss: Loss
    reader: RewardReader
    penalty: RewardPenalty | None  # KL to the reference, taken off the rewards
    trainer: Trainer
    book: GroupBook
    hooks: Hooks
    recorder: Recorder


class Building:
    """See the module docstring."""

    def __init__(
        self, parts: BuildingParts, replaying: Replaying, published: Callable[[], Awaitable[None]], *, surveys: bool
    ) -> None:
        """`published`: until the last step is, which may have a collective, too: in the same order on every rank.
        `surveys`: every rank comes along before each optimizer step, also one without groups."""
        self._parts = parts
        self._replaying = replaying
        self._published = published
        several = parts.ranks > 1
        self._compares = (
            several and parts.reader.estimator.needs_whole_step
        )  # never where steps are streamed (`resolve`)
        self._divides = several and parts.algorithm.minibatches > 1
        self._all_come = surveys or self._compares or self._divides

    async def microbatches(self, step: Step) -> list[Microbatch] | None:
        """Of the claimed groups that were not trained yet. Where a batch takes several updates, they are in `step.parts`
        instead. None: there is nothing to train now, and no rank expects this one to come along."""
        fresh = step.untrained()
        if not (fresh or self._all_come):
            return None
        await self._weigh(step, fresh)
        chosen = self._replaying.chosen(fresh, step.replayed, step.version)
        if self._parts.updates == 1:
            return await self._pack(chosen)
        if self._divides:
            await self._published()
        count = self._parts.algorithm.minibatches
        numbers = await part_of_each([rows.group for rows in fresh], count, self._parts.gather, self._parts.rank)
        step.parts = [
            await self._pack([rows for rows, number in zip(chosen, numbers, strict=True) if number == part])
            for part in range(count)
        ]
        return None

    async def _weigh(self, step: Step, fresh: Sequence[Rows]) -> None:
        parts = self._parts
        groups = await self._less_penalties(step, fresh)
        advantages: Advantages
        if self._compares:
            await self._published()
            advantages = await parts.reader.advantages_over_ranks(groups, parts.gather, parts.rank)
        else:
            advantages = self._advantages(groups)
        for rows in fresh:
            values = advantages[rows.group_id]
            if not (np.abs(values) <= FLOAT32).all():
                raise GroupsFailed([rows.group_id], DataError(f"its advantages are {values.tolist()}, beyond float32"))
            if parts.hooks.after_advantages is not None:  # what the user's own code keeps must outlive the lease
                with parts.recorder.watch("train pump", f"group {rows.group_id}", on="hook after_advantages"):
                    values = await parts.hooks.weighed(owned(rows.group) if rows.leases else rows.group, values)
            parts.book.write(rows.group_id, ADVANTAGES, values)

    def _advantages(self, groups: Sequence[Group]) -> Advantages:
        reader = self._parts.reader
        try:
            return reader.advantages(groups)
        except Exception as error:
            if reader.estimator.needs_whole_step:  # a group alone says nothing
                raise
            raise GroupsFailed(_first_that_fails(groups, lambda g: reader.advantages([g])), error) from error

    async def _less_penalties(self, step: Step, fresh: Sequence[Rows]) -> list[Group]:
        """The groups with the KL to the reference taken off their rewards, where that is asked for."""
        groups = [rows.group for rows in fresh]
        penalty = self._parts.penalty
        if penalty is None:
            return groups
        await self._fill(REFERENCE, fresh, groups)
        penalties = dict[tuple[int, int], float]()
        zeros = [(group, np.zeros(len(group.trajectories))) for group in groups]
        for batch in pack_groups(zeros, self._parts.tokens_per_microbatch, [rows.columns for rows in fresh]):
            if batch.reference_logprobs is not None:
                found, kl = penalty(batch, batch.reference_logprobs)
                penalties |= found
                step.kl.append(kl)
        return [lowered(group, penalties) for group in groups]

    async def _pack(self, chosen: Sequence[Rows]) -> list[Microbatch]:
        parts, algorithm = self._parts, self._parts.algorithm
        truncated, longest = algorithm.mask.truncated, algorithm.mask.longer_than
        masked = [without_overlong(rows.group, truncated=truncated, longest=longest) for rows in chosen]
        moves = [not parts.skips_zero_advantage or any(rows.columns[ADVANTAGES]) for rows in chosen]
        rows = [each for each, kept in zip(chosen, moves, strict=True) if kept]
        groups = [group for group, kept in zip(masked, moves, strict=True) if kept]
        if parts.loss.needs_reference:
            await self._fill(REFERENCE, rows, groups)
        if algorithm.old_logprobs != "sampler" and parts.updates > 1 and parts.loss.needs_old:
            await self._fill(OLD, rows, groups)  # once, before the first update of the batch
        batches = self._packed(groups, rows)
        if algorithm.old_logprobs == "sampler":
            batches = [
                replace(batch, old_logprobs=batch.sampler_logprobs) if batch.scored else batch for batch in batches
            ]
        without = [group for group, kept in zip(masked, moves, strict=True) if not kept]
        if without:
            batches.append(counted_only(without))
            parts.recorder.count("train/skipped_groups", len(without))
        return batches

    def _packed(self, groups: Sequence[Group], rows: Sequence[Rows]) -> list[Microbatch]:
        size = self._parts.tokens_per_microbatch
        found = [(group, each.columns[ADVANTAGES], each.columns) for group, each in zip(groups, rows, strict=True)]
        try:
            return pack_groups([one[:2] for one in found], size, [columns for *_, columns in found])
        except Exception as error:
            columns = {group.group_id: (weights, column) for group, weights, column in found}

            def alone(group: Group) -> object:
                weights, column = columns[group.group_id]
                return pack_groups([(group, weights)], size, [column])

            raise GroupsFailed(_first_that_fails(groups, alone), error) from error

    async def _fill(self, column: str, rows: Sequence[Rows], groups: Sequence[Group]) -> None:
        """Compute the column of those that lack it. `groups`: theirs, as they are trained."""
        lacking = [(each, group) for each, group in zip(rows, groups, strict=True) if column not in each.columns]
        model: Literal["policy", "reference"] = "reference" if column == REFERENCE else "policy"
        size = self._parts.tokens_per_microbatch
        found = await logprob_columns(self._parts.trainer, [group for _, group in lacking], size, model)
        for (each, _), values in zip(lacking, found, strict=True):
            if each.group_id in self._parts.book.store:
                self._parts.book.write(each.group_id, column, values)
            else:  # from the replay buffer
                each.columns[column] = values


def _first_that_fails(groups: Sequence[Group], alone: Callable[[Group], object]) -> list[int]:
    """Of groups that failed together the first one that fails by itself; all where none does."""
    for group in groups:
        try:
            alone(group)
        except Exception:
            return [group.group_id]
    return [group.group_id for group in groups]
