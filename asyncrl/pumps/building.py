"""Building a step: from claimed rows to microbatches.

    rows ─▶ penalties ─▶ advantages ─▶ hook ─▶ minibatches ─▶ replay ─▶ masks ─▶ skipping ─▶ log-probs ─▶ packing

`StepBuilder.microbatches` calls the stages in this order. The stages write their results into columns of rows, which packing reads.
A stage that changes or replaces groups (penalties, replay, masks) returns new rows. The store keeps the rows of the claimed groups.

* As in Atropos: before the members of a group are compared, `reward.scale_adv_by_len` multiplies each reward by the length of its
  member. After the comparison a member with `set_advantage_to_zero` in its metadata (`SILENT`) gets the advantage 0.
* An estimator may need statistics of the whole step. Then each rank sends its rewards and lengths (never texts), sorts the rewards
  of all ranks by group id, and computes all advantages. So the bits of the advantages do not depend on which rank has which group.
* The groups of a step on all ranks, sorted by id, are cut into minibatches. So minibatches do not depend on the number of ranks.
  Their sizes differ by at most one group. A rank may hold no group of a minibatch.
* A group without a signal (all advantages are 0) keeps its place in the step and in the files of rollouts. A group of the replay
  buffer may be trained instead. The loss counts the replayed tokens; metrics of rewards, lengths and ages count the claimed group.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from asyncrl.algorithms.advantages import Estimator, GroupRewards
from asyncrl.algorithms.credit import only_last_turn, turn_advantages
from asyncrl.algorithms.kl import subtract_penalties
from asyncrl.algorithms.terms import without_overlong
from asyncrl.config.resolve import versions_per_batch
from asyncrl.data.packing import pack_groups
from asyncrl.data.store import ADVANTAGES, OLD, REFERENCE, TURN_ADVANTAGES, Column, Rows, copy_group
from asyncrl.errors import DataError
from asyncrl.ports import Trainer
from asyncrl.records.check import SILENT
from asyncrl.types import Float32Array, Group, Microbatch, Trajectory

from .hooks import MAX_FLOAT32
from .pipeline import Ports
from .step import GroupsFailed, Step, blame_groups

Advantages = dict[int, npt.NDArray[np.float64]]  # group id -> [G]
TurnAdvantages = list[npt.NDArray[np.float64]]  # G arrays [t]: one value for each of the member's t replies
_NO_LOGPROBS = np.zeros(0, np.float32)


class StepBuilder:
    """Makes the microbatches of a step, by the stages of the module docstring."""

    def __init__(self, ports: Ports, wait_published: Callable[[], Awaitable[None]], *, surveys: bool) -> None:
        """`wait_published` waits until the last step is published: a publish may run a collective, which every rank must run before
        the collectives of the next step. `surveys`: whether `Trainer.survey`, a collective, runs before each optimizer step."""
        self._ports = ports
        self._wait_published = wait_published
        self._reader = RewardReader.of(ports)
        # Whether the ranks compute advantages together, and cut a step into minibatches together. Both False if steps are streamed.
        self._compares = ports.ranks > 1 and ports.advantage.needs_whole_step
        self._divides = ports.ranks > 1 and ports.config.algorithm.minibatches > 1
        self._has_collectives = surveys or self._compares or self._divides

    async def microbatches(self, step: Step) -> list[Microbatch] | None:
        """The microbatches of the claimed groups that were not trained yet. If a batch takes several optimizer steps, the result is
        None and `step.parts` has the microbatches. Also None if this rank has nothing to train and no collective to join."""
        ports, rows = self._ports, step.untrained()
        if not (rows or self._has_collectives):
            return None
        penalised = await subtract_reward_penalty(ports, step, rows)
        if self._compares or self._divides:
            await self._wait_published()
        advantages = await compute_advantages(ports, self._reader, penalised, over_ranks=self._compares)
        turns = {each.group_id: self._reader.turn_advantages(each.group) for each in penalised}
        rows = await write_advantages(ports, rows, advantages, turns)
        parts = []
        for part in await minibatches(ports, rows):
            with ports.recorder.work("train pump", "mask"):
                part = mask_overlong(ports, replace_without_signal(ports, self._reader, step, part))
                part = mask_earlier_turns(ports, part)
                trained, skipped = split_skipped(ports, part)
            trained = await write_logprobs(ports, trained)
            with ports.recorder.work("train pump", "pack"):
                parts.append(pack_with_skipped(ports, trained, skipped))
        if versions_per_batch(ports.config) == 1:
            return parts[0]
        step.parts = parts
        return None


async def subtract_reward_penalty(ports: Ports, step: Step, rows: list[Rows]) -> list[Rows]:
    """The rows, with the KL to the reference subtracted from the rewards if configured. Only advantages use these rewards."""
    if ports.reward_penalty is None:
        return rows
    await write_logprob_column(ports, REFERENCE, rows)
    penalties = dict[tuple[int, int], float]()
    for batch in _pack(ports, rows, with_advantages=False):
        if batch.reference_logprobs is not None:
            batch_penalties, kl = ports.reward_penalty.penalties(batch, batch.reference_logprobs)
            penalties |= batch_penalties
            step.kl.append(kl)
    return [replace(group_rows, group=subtract_penalties(group_rows.group, penalties)) for group_rows in rows]


async def compute_advantages(ports: Ports, reader: RewardReader, rows: list[Rows], *, over_ranks: bool) -> Advantages:
    """The advantages of these rows. `over_ranks`: compare the groups of all ranks (a collective, which raises if a rank ended)."""
    groups = [group_rows.group for group_rows in rows]
    if over_ranks:
        parts = await ports.gather([(group.group_id, reader.group_rewards(group)) for group in groups])
        return _advantages_by_group(groups, advantages_of_rank(ports.advantage, parts, ports.train_rank))
    try:
        with ports.recorder.work("train pump", "advantages"):
            return reader.advantages(groups)
    except Exception as error:
        # An estimator of the whole step cannot be tried on one group, so no group can be blamed.
        if ports.advantage.needs_whole_step:
            raise
        raise GroupsFailed(
            _first_that_fails(rows, lambda group_rows: reader.advantages([group_rows.group])), error
        ) from error


async def write_advantages(
    ports: Ports, rows: list[Rows], advantages: Advantages, turns: Mapping[int, TurnAdvantages | None]
) -> list[Rows]:
    """Write the columns of advantages. `turns`: group id -> the advantages of each reply, if replies are compared. If the hook
    `after_advantages` changes the advantage of a member, all replies of the member get the new advantage."""
    for group_rows in rows:
        values, of_turns = advantages[group_rows.group_id], turns[group_rows.group_id]
        if not all((np.abs(each) <= MAX_FLOAT32).all() for each in (values, *(of_turns or ()))):
            error = DataError(f"its advantages are {values.tolist()}, beyond float32")
            raise GroupsFailed([group_rows.group_id], error)
        if ports.hooks.after_advantages is not None:
            with ports.recorder.watch("train pump", f"group {group_rows.group_id}", on="hook after_advantages"):
                # The hook may keep the group longer than the lease, so the hook gets a copy.
                group = copy_group(group_rows.group) if group_rows.leases else group_rows.group
                before, values = values, await ports.hooks.apply_after_advantages(group, values.copy())
            if of_turns is not None:
                changed = zip(of_turns, before, values, strict=True)
                of_turns = [own if old == new else np.full_like(own, new) for own, old, new in changed]
        ports.book.write(group_rows.group_id, ADVANTAGES, values)
        if of_turns is not None:
            ports.book.write(group_rows.group_id, TURN_ADVANTAGES, of_turns)
    return rows


async def minibatches(ports: Ports, rows: list[Rows]) -> list[list[Rows]]:
    """The rows of each minibatch, in order. A collective if there are several minibatches."""
    count = ports.config.algorithm.minibatches
    if count == 1:
        return [rows]
    ids = await ports.gather([group_rows.group_id for group_rows in rows])
    numbers = minibatches_of_rank(ids, ports.train_rank, count)
    return [[each for each, number in zip(rows, numbers, strict=True) if number == part] for part in range(count)]


def replace_without_signal(ports: Ports, reader: RewardReader, step: Step, rows: list[Rows]) -> list[Rows]:
    """Replace each group without a signal by a replayed group, if the replay buffer has a fresh enough group."""
    if ports.replay is None:
        return rows
    # A replayed group must be fresh enough for the last optimizer step of the batch.
    last_version, chosen = step.version + versions_per_batch(ports.config) - 1, []
    for group_rows in rows:
        if not _has_signal(group_rows):
            taken = {group.group_id for group in step.replayed.values()}
            replayed = ports.replay.draw(last_version, (ports.ledger.turn, group_rows.group_id), taken)
            if replayed is not None:
                step.replayed[group_rows.group_id] = replayed
                columns: dict[str, Column] = {ADVANTAGES: reader.advantages([replayed])[replayed.group_id]}
                if (of_turns := reader.turn_advantages(replayed)) is not None:
                    columns[TURN_ADVANTAGES] = of_turns
                group_rows = Rows(replayed, columns, claimed=True)
        chosen.append(group_rows)
    return chosen


def mask_overlong(ports: Ports, rows: list[Rows]) -> list[Rows]:
    """Mask the tokens of completions that were cut off or are too long, as `algorithm.mask` says."""
    mask = ports.config.algorithm.mask
    masked = partial(without_overlong, truncated=mask.truncated, longest=mask.longer_than)
    return [replace(group_rows, group=masked(group_rows.group)) for group_rows in rows]


def mask_earlier_turns(ports: Ports, rows: list[Rows]) -> list[Rows]:
    """With `algorithm.credit: last_turn`, mask the tokens of all replies but the last one of each episode. Columns of log-probs
    keep the values of the tokens that stay unmasked."""
    if ports.config.algorithm.credit != "last_turn":
        return rows
    masked = []
    for group_rows in rows:
        old = group_rows.group.trajectories
        new = tuple(map(only_last_turn, old))
        columns = dict(group_rows.columns)
        for name in {REFERENCE, OLD} & columns.keys():
            triples = zip(columns[name], old, new, strict=True)
            # `mask_overlong` keeps the values of a completion that it masks.
            columns[name] = [
                values[after.mask[before.mask]] if before.mask.any() else values[:0]
                for values, before, after in triples
            ]
        masked.append(replace(group_rows, group=replace(group_rows.group, trajectories=new), columns=columns))
    return masked


def _has_signal(rows: Rows) -> bool:
    return any(rows.columns[ADVANTAGES]) or any(map(np.any, rows.columns.get(TURN_ADVANTAGES, ())))


def split_skipped(ports: Ports, rows: list[Rows]) -> tuple[list[Rows], list[Rows]]:
    """(rows to train, rows to skip). `train.skip_zero_advantage` skips groups whose advantages are all 0, because they have no
    gradient. `config.checks` refuses this setting for a loss with terms that do not depend on advantages."""
    if not ports.config.train.skip_zero_advantage:
        return rows, []
    trained = [group_rows for group_rows in rows if _has_signal(group_rows)]
    return trained, [group_rows for group_rows in rows if not _has_signal(group_rows)]


async def write_logprobs(ports: Ports, rows: list[Rows]) -> list[Rows]:
    """Compute the log-probs that the loss reads. `REFERENCE`: of the reference model. `OLD`: of the policy before the first
    optimizer step of the batch, if further steps follow and `old_logprobs` is not `sampler`."""
    if ports.loss.needs_reference:
        await write_logprob_column(ports, REFERENCE, rows)
    algorithm = ports.config.algorithm
    if algorithm.old_logprobs != "sampler" and ports.loss.needs_old and versions_per_batch(ports.config) > 1:
        await write_logprob_column(ports, OLD, rows)
    return rows


def pack_with_skipped(ports: Ports, rows: list[Rows], skipped: list[Rows]) -> list[Microbatch]:
    """The microbatches of `rows`; then, if there are `skipped` rows, a microbatch without tokens for their counts."""
    try:
        batches = _pack(ports, rows)
    except Exception as error:
        raise GroupsFailed(_first_that_fails(rows, lambda group_rows: _pack(ports, [group_rows])), error) from error
    if ports.config.algorithm.old_logprobs == "sampler":
        batches = [replace(batch, old_logprobs=batch.sampler_logprobs) if batch.scored else batch for batch in batches]
    if skipped:
        batches.append(microbatch_of_counts([group_rows.group for group_rows in skipped]))
        ports.recorder.count("train/skipped_groups", len(skipped))
    return batches


async def write_logprob_column(ports: Ports, column: str, rows: Sequence[Rows]) -> None:
    """Compute the log-probs of the rows that lack this column."""
    missing = [group_rows for group_rows in rows if column not in group_rows.columns]
    model: Literal["policy", "reference"] = "reference" if column == REFERENCE else "policy"
    size = ports.config.train.tokens_per_microbatch
    columns = await logprob_columns(ports.trainer, [group_rows.group for group_rows in missing], size, model)
    for group_rows, values in zip(missing, columns, strict=True):
        if group_rows.group_id in ports.store and ports.store.rows(group_rows.group_id).columns is group_rows.columns:
            ports.book.write(group_rows.group_id, column, values)
        else:
            # The store has no replayed group. For a group that `mask_earlier_turns` has masked, the store has other columns.
            group_rows.columns[column] = values


async def logprob_columns(
    trainer: Trainer, groups: Sequence[Group], tokens_per_microbatch: int, model: Literal["policy", "reference"]
) -> list[list[Float32Array]]:
    """For each group a list [G] of arrays [s]: the log-probs of a member's s scored tokens. Errors: see `blame_groups`."""
    columns = [[_NO_LOGPROBS] * len(group.trajectories) for group in groups]
    index_of = {group.group_id: index for index, group in enumerate(groups)}
    for batch in pack_groups([(group, np.zeros(len(group.trajectories))) for group in groups], tokens_per_microbatch):
        if not batch.scored:
            continue
        with blame_groups(batch.group_ids.tolist()):
            logprobs_S = await trainer.compute_logprobs(batch, model)
        ends = np.cumsum(np.bincount(batch.sequence, minlength=batch.sequences))[:-1]
        parts = np.split(np.asarray(logprobs_S), ends)
        for group_id, member, part in zip(batch.group_ids.tolist(), batch.members.tolist(), parts, strict=True):
            columns[index_of[group_id]][member] = part
    return columns


@dataclass(frozen=True, slots=True)
class RewardReader:
    """Reads the rewards of groups and computes advantages with the estimator. `weights`: reward component -> its weight."""

    estimator: Estimator
    weights: Mapping[str, float]
    scale_by_length: bool
    # Discount of the returns that are compared reply by reply. None: the rewards of episodes are compared.
    gamma: float | None = None

    @classmethod
    def of(cls, ports: Ports) -> RewardReader:
        algorithm = ports.config.algorithm
        gamma = algorithm.discount if algorithm.credit == "discounted" else None
        return cls(ports.advantage, ports.weights, ports.config.reward.scale_adv_by_len, gamma)

    def group_rewards(self, group: Group) -> GroupRewards:
        """The rewards of a group in the form that estimators take."""
        lengths = [int(t.mask.sum()) for t in group.trajectories]
        factors = lengths if self.scale_by_length else [1] * len(lengths)

        def scaled(values: Sequence[float | None]) -> list[float | None]:
            return [None if v is None else v * factor for v, factor in zip(values, factors, strict=True)]

        names = dict.fromkeys(name for t in group.trajectories for name in t.components)
        components = {name: scaled([t.components.get(name) for t in group.trajectories]) for name in names}
        return GroupRewards(scaled([t.reward for t in group.trajectories]), components, self.weights, lengths)

    def turn_advantages(self, group: Group) -> TurnAdvantages | None:
        """G arrays [t]: the advantage of each reply; 0 for a `SILENT` member. None if episodes are compared."""
        if self.gamma is None:
            return None
        members = group.trajectories
        if self.scale_by_length:
            members = tuple(_scaled(t, t.sampled_length) for t in members)
        found = turn_advantages(self.estimator, members, self.gamma)
        return [0 * values if t.metadata.get(SILENT) else values for t, values in zip(members, found, strict=True)]

    def has_signal(self, group: Group) -> bool:
        """Whether a member or, if replies are compared, a reply gets an advantage other than 0: see `Estimator.has_signal`."""
        if self.gamma is not None:
            # Without metadata no member is `SILENT`: the filters, which call this method, look at the rewards of all members.
            not_silent = tuple(replace(t, metadata={}) for t in group.trajectories)
            return any(map(np.any, self.turn_advantages(replace(group, trajectories=not_silent)) or ()))
        return self.estimator.has_signal(self.group_rewards(group))

    def advantages(self, groups: Sequence[Group]) -> Advantages:
        """Advantages by group id; if replies are compared, for each member the mean over its replies. If the estimator needs the
        whole step, `groups` must be all groups of the step."""
        if self.gamma is not None:
            found = {group.group_id: self.turn_advantages(group) or [] for group in groups}
            return {group_id: np.array([values.mean() for values in of_turns]) for group_id, of_turns in found.items()}
        return _advantages_by_group(groups, self.estimator.of_step([self.group_rewards(group) for group in groups]))


def _scaled(t: Trajectory, factor: float) -> Trajectory:
    """The trajectory with its rewards multiplied by `factor`."""
    turns = None if t.turn_rewards is None else tuple(reward * factor for reward in t.turn_rewards)
    return replace(t, reward=None if t.reward is None else t.reward * factor, turn_rewards=turns)


def advantages_of_rank(
    estimator: Estimator, parts: Sequence[Sequence[tuple[int, GroupRewards]]], rank: int
) -> list[npt.NDArray[np.float64]]:
    """Advantages [G] of each group of `parts[rank]`, from the statistics of all parts. `parts`: for each rank, the pairs (group id,
    rewards) of its groups."""
    keys = [(group_id, r, i) for r, part in enumerate(parts) for i, (group_id, _) in enumerate(part)]
    # Every rank needs the same order, because the rounding of sums depends on the order.
    keys.sort()
    values = estimator.of_step([parts[r][i][1] for _, r, i in keys])
    own_values = {i: value for (_, r, i), value in zip(keys, values, strict=True) if r == rank}
    return [own_values[i] for i in range(len(parts[rank]))]


def minibatches_of_rank(ids: Sequence[Sequence[int]], rank: int, count: int) -> list[int]:
    """The minibatch, from 0 to `count` - 1, of each group of `ids[rank]`. `ids`: for each rank, its group ids in any order."""
    keys = sorted((group_id, r, i) for r, rank_ids in enumerate(ids) for i, group_id in enumerate(rank_ids))
    own_numbers = {i: position * count // len(keys) for position, (_, r, i) in enumerate(keys) if r == rank}
    return [own_numbers[i] for i in range(len(ids[rank]))]


def microbatch_of_counts(groups: Sequence[Group]) -> Microbatch:
    """A microbatch without tokens, which adds the counts of skipped `groups` to the denominators of the loss."""
    none, floats = np.zeros(0, np.int64), np.zeros(0, np.float32)
    trajectories = [t for group in groups for t in group.trajectories]
    return Microbatch(
        tokens=none,
        positions=none,
        node_length=none,
        node_parent=none,
        member_sequence=none,
        member_node=none,
        source=none,
        target=none,
        sequence=none,
        sampler_logprobs=floats,
        temperature=floats,
        advantages=floats,
        versions=np.zeros(0, np.int32),
        group_ids=none,
        members=none,
        skipped_tokens=sum(int(t.mask.sum()) for t in trajectories),
        skipped_sequences=len(trajectories),
    )


def _advantages_by_group(groups: Sequence[Group], values: Sequence[npt.NDArray[np.float64]]) -> Advantages:
    result: Advantages = {}
    for group, advantage_G in zip(groups, values, strict=True):
        silent_G = np.array([bool(t.metadata.get(SILENT)) for t in group.trajectories])
        result[group.group_id] = np.where(silent_G, 0.0, advantage_G)
    return result


def _pack(ports: Ports, rows: Sequence[Rows], *, with_advantages: bool = True) -> list[Microbatch]:
    """The microbatches of these rows. `with_advantages=False`: advantages are not known yet, so all advantages are 0."""
    groups = [
        (each.group, each.columns[ADVANTAGES] if with_advantages else np.zeros(len(each.group.trajectories)))
        for each in rows
    ]
    return pack_groups(groups, ports.config.train.tokens_per_microbatch, [each.columns for each in rows])


def _first_that_fails(rows: Sequence[Rows], try_group: Callable[[Rows], object]) -> list[int]:
    """The id of the first group for which `try_group` raises; if there is none, the ids of all groups."""
    for group_rows in rows:
        try:
            try_group(group_rows)
        except Exception:
            return [group_rows.group_id]
    return [group_rows.group_id for group_rows in rows]
