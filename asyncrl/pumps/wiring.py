"""Which pump gets what: every port of a rank, and from them the few that each pump works with.

Only this module and `graph.py` see all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.algorithms.advantages import Estimator
from asyncrl.algorithms.base import Loss
from asyncrl.algorithms.kl import RewardPenalty
from asyncrl.config.check_losses import needs_second_buffer
from asyncrl.config.resolve import slots, turns_bound, versions_per_batch
from asyncrl.config.schema import Config
from asyncrl.data.prompts import PromptSource
from asyncrl.data.replay import ReplayBuffer
from asyncrl.data.store import Store
from asyncrl.ports import Engine, Environment, Ledger, Reward, Trainer, WeightSink
from asyncrl.records.check import Limits
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.queues.queue import QueueSender

from .book import GroupBook
from .building import Building, BuildingParts
from .claims import ClaimRules, Claims
from .evaluate import EvaluateParts
from .hooks import Hooks, StoreWatch
from .intake import GroupIds, Intake, IntakeParts
from .metrics import Gather, alone
from .pipeline import Publication, StepReport
from .publish import PublishParts
from .reference import ReferenceAhead
from .replaying import Replaying
from .reroll import Reroll, RerollRules
from .rollout import RolloutParts
from .rounds import Round, Rounds
from .running import Running, RunningParts
from .screen import Screen
from .signal import RewardReader
from .train import TrainPump


@dataclass(slots=True)
class Rooms:
    """Everything of one rank behind its ports."""

    config: Config
    recorder: Recorder
    ledger: Ledger
    store: Store
    engine: Engine
    environment: Environment
    reward: Reward
    trainer: Trainer
    sinks: Sequence[WeightSink]
    loss: Loss
    advantage: Estimator
    book: GroupBook
    ids: GroupIds
    ranks: int = 1
    rank: int = 0
    gather: Gather = alone
    round: Round | None = None  # of a trainer whose microbatches are collectives (rounds.py)
    scores: bool = True  # the run has reward functions or models
    score_groups: bool = False  # all members of a group in one call of the reward functions, once the last one is done
    weights: Mapping[str, float] = field(default_factory=dict)  # of reward components, by name; 1 where none is given
    reward_penalty: RewardPenalty | None = None  # KL to the reference, taken off the rewards
    replay: ReplayBuffer | None = None
    hooks: Hooks = field(default_factory=Hooks)
    store_watch: StoreWatch | None = None
    limits: Limits = field(default_factory=Limits)  # of trajectories from anywhere
    counters: Counter[str] = field(default_factory=Counter)

    @property
    def reader(self) -> RewardReader:
        return RewardReader(self.advantage, self.weights, self.config.reward.scale_adv_by_len)

    @property
    def wants_reference(self) -> bool:
        return self.loss.needs_reference or self.reward_penalty is not None


def make_reroll(rooms: Rooms, prompts: PromptSource | None) -> Reroll:
    config, train = rooms.config, rooms.config.train
    steps: float | None = train.max_steps
    if steps is None and train.max_epochs is not None and prompts is not None:
        steps = train.max_epochs * len(prompts) / config.rollout.groups_per_step
    rules = RerollRules(config.reroll, steps, rooms.ledger, rooms.recorder, rooms.counters)
    return Reroll(rules, prompts)


def make_intake(rooms: Rooms, reroll: Reroll) -> Intake:
    config, algorithm = rooms.config, rooms.config.algorithm
    parts = IntakeParts(
        recorder=rooms.recorder,
        ledger=rooms.ledger,
        book=rooms.book,
        reward=rooms.reward,
        scores=rooms.scores,
        hooks=rooms.hooks,
        limits=rooms.limits,
        shaping=config.reward,
        max_tokens=config.rollout.max_tokens,
        versions_per_turn=versions_per_batch(config),
        turns_bound=turns_bound(config),
        counters=rooms.counters,
    )
    screen = Screen(config.rollout, rooms.ledger, rooms.reader, rooms.counters, rooms.recorder)
    wanted = rooms.wants_reference and algorithm.kl.reference_ahead and rooms.score_groups
    ahead = ReferenceAhead(rooms.trainer, rooms.book, config.train.tokens_per_microbatch, wanted=wanted)
    return Intake(parts, screen, ahead, rooms.ids, reroll.saw)


def rollout_parts(rooms: Rooms) -> RolloutParts:
    config = rooms.config
    # Of several ranks each plays its share of the slots: else the first to start would take all into its queue.
    at_once = None if rooms.ranks == 1 else -(-slots(config) // rooms.ranks)
    return RolloutParts(
        recorder=rooms.recorder,
        ledger=rooms.ledger,
        book=rooms.book,
        engine=rooms.engine,
        environment=rooms.environment,
        hooks=rooms.hooks,
        limits=rooms.limits,
        rollout=config.rollout,
        max_steps=config.train.max_steps,
        at_once=at_once,
        whole_groups=rooms.score_groups,
    )


def evaluate_parts(rooms: Rooms) -> EvaluateParts:
    return EvaluateParts(rooms.recorder, rooms.environment, rooms.engine, rooms.reward, rooms.config.evaluate)


def publish_parts(rooms: Rooms) -> PublishParts:
    rollout = rooms.config.rollout
    return PublishParts(
        rooms.recorder, rooms.ledger, rooms.sinks, rollout.weight_sync_interval, rollout.sync_warmup_steps
    )


def make_claims(rooms: Rooms) -> Claims:
    config = rooms.config
    least = 1 if config.train.partial_final_step else config.rollout.groups_per_step
    rules = ClaimRules(
        least=max(least, config.algorithm.minibatches),  # every batch is the same number of versions
        drops_late=config.rollout.late == "drop",
        max_steps=config.train.max_steps,
    )
    return Claims(rooms.ledger, rooms.book, rules, rooms.recorder, rooms.counters)


def building_parts(rooms: Rooms) -> BuildingParts:
    config, algorithm = rooms.config, rooms.config.algorithm
    return BuildingParts(
        algorithm=algorithm,
        tokens_per_microbatch=config.train.tokens_per_microbatch,
        skips_zero_advantage=bool(config.train.skip_zero_advantage),
        updates=versions_per_batch(config),
        ranks=rooms.ranks,
        rank=rooms.rank,
        gather=rooms.gather,
        loss=rooms.loss,
        reader=rooms.reader,
        penalty=rooms.reward_penalty,
        trainer=rooms.trainer,
        book=rooms.book,
        hooks=rooms.hooks,
        recorder=rooms.recorder,
    )


def make_train(
    rooms: Rooms,
    claims: Claims,
    reroll: Reroll,
    publications: QueueSender[Publication],
    published: Callable[[int], Awaitable[None]],
    on_step: Callable[[StepReport], None],
) -> TrainPump:
    """`published(turn)` waits until the publish pump is done with that turn."""
    config, algorithm, rollout = rooms.config, rooms.config.algorithm, rooms.config.rollout
    updates = versions_per_batch(config)
    streams = bool(rollout.streaming) and updates == 1
    surveys = rooms.loss.needs_whole_step and not streams and not needs_second_buffer(algorithm)
    every = max(rollout.streaming_min_groups, 1) * rooms.ranks if streams else None
    rounds = Rounds(rooms.round, rooms.ledger, every)
    replaying = Replaying(rooms.replay, rooms.ledger, rooms.reader, updates)

    async def last_published() -> None:
        await published(rooms.ledger.turn)

    running = RunningParts(
        updates=updates,
        minibatches=algorithm.minibatches,
        mismatch_gate=algorithm.mismatch_gate,
        ranks=rooms.ranks,
        gather=rooms.gather,
        loss=rooms.loss,
        penalised=rooms.reward_penalty is not None,
        trainer=rooms.trainer,
        ledger=rooms.ledger,
        book=rooms.book,
        recorder=rooms.recorder,
        counters=rooms.counters,
        surveys=surveys,
        published=last_published,
    )
    return TrainPump(
        claims,
        Building(building_parts(rooms), replaying, last_published, surveys=surveys),
        Running(running, claims, rounds, replaying, reroll, publications, on_step),
        rounds,
        publications,
        streams_from=rollout.streaming_min_groups if streams else None,
    )
