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

from .book import GroupBook
from .building import Building, BuildingParts
from .claims import ClaimRules, Claims
from .episode import Episodes
from .evaluate import EvaluateParts
from .failing import Failing
from .hooks import Hooks, StoreWatch
from .intake import GroupIds, Intake, IntakeParts
from .metrics import Gather, alone
from .pipeline import StepReport
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
class Ports:
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
    calls_at_once: int | None = None  # of reward functions; None: one a worker
    score_groups: bool = False  # all members of a group in one call of the reward functions, once the last one is done
    weights: Mapping[str, float] = field(default_factory=dict)  # of reward components, by name; 1 where none is given
    reward_penalty: RewardPenalty | None = None  # KL to the reference, taken off the rewards
    replay: ReplayBuffer | None = None
    hooks: Hooks = field(default_factory=Hooks)
    store_watch: StoreWatch | None = None
    limits: Limits = field(default_factory=Limits)  # of trajectories from anywhere
    counters: Counter[str] = field(default_factory=Counter)
    logged: set[tuple[str, str]] = field(default_factory=set)  # the kinds of failed episodes that were
    note: Callable[[str], None] = lambda text: None  # a line for people, on the live view

    @property
    def reader(self) -> RewardReader:
        """How this run reads rewards."""
        return RewardReader(self.advantage, self.weights, self.config.reward.scale_adv_by_len)

    @property
    def wants_reference(self) -> bool:
        """Whether somebody asks for log-probs of the reference: the loss, or a penalty on the rewards."""
        return self.loss.needs_reference or self.reward_penalty is not None


def make_reroll(ports: Ports, prompts: PromptSource | None) -> Reroll:
    """Which prompts are played again. The steps of the run are those of `train.max_steps`, else what `train.max_epochs` comes
    to."""
    config, train = ports.config, ports.config.train
    steps: float | None = train.max_steps
    if steps is None and train.max_epochs is not None and prompts is not None:
        steps = train.max_epochs * len(prompts) / config.rollout.groups_per_step
    rules = RerollRules(config.reroll, config.reward.overlong, steps, ports.ledger, ports.recorder, ports.counters)
    return Reroll(rules, prompts)


def make_intake(ports: Ports, reroll: Reroll) -> Intake:
    """The intake, with its filters and the reference's log-probs ahead of the step."""
    config, algorithm = ports.config, ports.config.algorithm
    parts = IntakeParts(
        recorder=ports.recorder,
        ledger=ports.ledger,
        book=ports.book,
        reward=ports.reward,
        scores=ports.scores,
        hooks=ports.hooks,
        limits=ports.limits,
        overlong=config.reward.overlong,
        version=lambda: ports.trainer.version,
        versions_per_turn=versions_per_batch(config),
        turns_bound=turns_bound(config),
        counters=ports.counters,
    )
    screen = Screen(config.rollout, config.reward.overlong, ports.ledger, ports.reader, ports.counters, ports.recorder)
    wanted = ports.wants_reference and algorithm.kl.reference_ahead and ports.score_groups
    ahead = ReferenceAhead(ports.trainer, ports.book, config.train.tokens_per_microbatch, wanted=wanted)
    return Intake(parts, screen, ahead, ports.ids, reroll.saw)


def rollout_parts(ports: Ports) -> RolloutParts:
    """What the rollout pump gets."""
    config = ports.config
    # Of several ranks each plays its share of the slots: else the first to start would take all into its queue.
    at_once = None if ports.ranks == 1 else -(-slots(config) // ports.ranks)
    return RolloutParts(
        recorder=ports.recorder,
        ledger=ports.ledger,
        book=ports.book,
        engine=ports.engine,
        environment=episodes(ports),
        hooks=ports.hooks,
        limits=ports.limits,
        rollout=config.rollout,
        max_steps=config.train.max_steps,
        at_once=at_once,
        whole_groups=ports.score_groups,
    )


def episodes(ports: Ports) -> Episodes:
    """The environment, as everybody who plays it uses it."""
    rollout = ports.config.rollout
    return Episodes(ports.environment, ports.recorder, rollout.timeout_s, rollout.retries, ports.logged)


def evaluate_parts(ports: Ports) -> EvaluateParts:
    """What the evaluate pump gets."""
    settings, whole = ports.config.evaluate, ports.score_groups
    return EvaluateParts(ports.recorder, episodes(ports), ports.engine, ports.reward, settings, whole)


def publish_parts(ports: Ports) -> PublishParts:
    """What the publish pump gets."""
    rollout = ports.config.rollout
    return PublishParts(
        ports.recorder, ports.ledger, ports.sinks, rollout.weight_sync_interval, rollout.sync_warmup_steps
    )


def make_claims(ports: Ports) -> Claims:
    """The claims, with the fewest groups that make a step."""
    config = ports.config
    least = 1 if config.train.partial_final_step else config.rollout.groups_per_step
    rules = ClaimRules(
        least=max(least, config.algorithm.minibatches),  # every batch is the same number of versions
        drops_late=config.rollout.late == "drop",
        max_steps=config.train.max_steps,
    )
    return Claims(ports.ledger, ports.book, rules, ports.recorder, ports.counters)


def building_parts(ports: Ports) -> BuildingParts:
    """What the building of a step gets."""
    config, algorithm = ports.config, ports.config.algorithm
    return BuildingParts(
        algorithm=algorithm,
        tokens_per_microbatch=config.train.tokens_per_microbatch,
        skips_zero_advantage=bool(config.train.skip_zero_advantage),
        updates=versions_per_batch(config),
        ranks=ports.ranks,
        rank=ports.rank,
        gather=ports.gather,
        loss=ports.loss,
        reader=ports.reader,
        penalty=ports.reward_penalty,
        trainer=ports.trainer,
        book=ports.book,
        hooks=ports.hooks,
        recorder=ports.recorder,
    )


def make_train(
    ports: Ports,
    claims: Claims,
    reroll: Reroll,
    published: Callable[[int], Awaitable[None]],
    on_step: Callable[[StepReport], None],
) -> TrainPump:
    """`published(turn)` waits until the publish pump is done with that turn."""
    config, algorithm, rollout = ports.config, ports.config.algorithm, ports.config.rollout
    updates = versions_per_batch(config)
    streams = bool(rollout.streaming) and updates == 1
    surveys = ports.loss.needs_whole_step and not streams and not needs_second_buffer(algorithm)
    every = max(rollout.streaming_min_groups, 1) * ports.ranks if streams else None
    rounds = Rounds(ports.round, ports.ledger, every)
    replaying = Replaying(ports.replay, ports.ledger, ports.reader, updates)

    async def last_published() -> None:
        await published(ports.ledger.turn)

    running = RunningParts(
        updates=updates,
        minibatches=algorithm.minibatches,
        ranks=ports.ranks,
        gather=ports.gather,
        loss=ports.loss,
        penalised=ports.reward_penalty is not None,
        trainer=ports.trainer,
        ledger=ports.ledger,
        book=ports.book,
        recorder=ports.recorder,
        counters=ports.counters,
        surveys=surveys,
        published=last_published,
    )
    return TrainPump(
        claims,
        Building(building_parts(ports), replaying, last_published, surveys=surveys),
        Running(running, claims, rounds, replaying, reroll, on_step),
        rounds,
        Failing(ports.book, ports.recorder, ports.note, alone=ports.ranks == 1),
        streams_from=rollout.streaming_min_groups if streams else None,
    )
