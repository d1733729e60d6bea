"""Builds the ports of a run from its configuration: the one place that knows which class stands behind which port."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from asyncrl.algorithms.registry import build_advantage, build_loss, build_reward_penalty
from asyncrl.concurrency.lane import SimulatedLane
from asyncrl.concurrency.offload import offload
from asyncrl.config.methods import numbers
from asyncrl.config.resolve import row_limit, turns_bound, versions_per_batch
from asyncrl.config.schema import Config
from asyncrl.data.replay import ReplayBuffer
from asyncrl.data.store import Store, store_metrics
from asyncrl.data.texts import CompletionText
from asyncrl.distributed.ledger import LocalLedger
from asyncrl.distributed.store_ledger import StoreLedger
from asyncrl.distributed.world import World
from asyncrl.environments.loading import load_environment
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.errors import ConfigError, LedgerError
from asyncrl.generation.dry_run import DryRunEngine
from asyncrl.generation.requests import sampling_params
from asyncrl.ports import Environment
from asyncrl.pumps.book import GroupBook, GroupIds
from asyncrl.pumps.hooks import Hooks, StoreWatch
from asyncrl.pumps.metrics import packed, unpacked
from asyncrl.pumps.pipeline import Gather, Ports, alone
from asyncrl.pumps.screen import OVERLONG
from asyncrl.records.check import Limits
from asyncrl.rewards.models import ModelRewards
from asyncrl.rewards.pool import RewardPool, RewardSpec
from asyncrl.training.dry_run import DryRunTrainer

from .dry import ByteTokenizer, OwnWeights
from .inputs import check_components, columns_of, import_code, known_columns
from .parts import Parts, Site
from .performance import DeviceRates

if TYPE_CHECKING:
    from asyncrl.models.policy import PolicyModel
    from asyncrl.training.trainer import TorchTrainer

    from .gate import Verdict


@dataclass(frozen=True, slots=True)
class Overrides:
    """What an embedding program brings as objects instead of configuration."""

    rewards: Sequence[RewardSpec] = ()
    environment: Environment | None = None
    hooks: Hooks | None = None


@dataclass(slots=True)
class Built:
    """What was built for this rank. None where a dry run has no such part."""

    ports: Ports
    lanes: tuple[Any, ...]  # ThreadLane | SimulatedLane: what the watchdog looks at
    tokenizer: Any
    policy: PolicyModel | None
    core: TorchTrainer | None
    rates: DeviceRates | None
    verdict: Verdict | None
    placed: str


async def any_rank(mine: bool, world: World, lane: Any, device: torch.device) -> bool:
    """Whether it is so on any rank. A collective, on the lane of the trainer, whose collectives it must not cross."""
    said = torch.tensor([float(mine)], dtype=torch.float64, device=device)
    total: float = await lane.run(lambda: float(world.all_reduce_sum_(said)), name="publish/time", priority=1)
    return total > 0


class Builder:
    """Opens everything that has to be closed on one exit stack, in dependency order."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.config, self.world, self.recorder = site.config, site.world, site.recorder
        self.stack, self.say = site.stack, site.say

    async def build(self, overrides: Overrides, turn: int, version: int, first_group: int) -> Built:
        """`turn`, `version`: where a resumed run goes on. `first_group`: the first id for groups without a prompt of ours."""
        dry = self.config.train.kind == "dry_run"
        if dry != (self.config.engine.kind == "dry_run"):
            raise ConfigError(
                f"engine.kind={self.config.engine.kind} with train.kind={self.config.train.kind}: both are dry_run or none is"
            )
        ledger = await self.stack.enter_async_context(self._ledger(turn))
        # Before the model, which may take minutes: what cannot be imported is told at once.
        import_code(self.config, overrides.environment is not None, overrides.hooks is not None)
        self.say(f"starting reward workers: {self.config.reward.workers}")
        functions = await self.stack.enter_async_context(self._functions(overrides))
        parts = await (self._dry(version) if dry else self._real())
        reward = self._reward(functions, parts)
        text = self._text(parts.tokenizer)
        functions.generation_prompt = text.generation_prompt
        environment = overrides.environment or load_environment(
            self.config.rollout.environment,
            tokenizer=parts.tokenizer,
            sampling=sampling_params(self.config.rollout, parts.tokenizer),
            seed=self.config.seed,
            text=text,
        )
        address = self.config.hooks
        hooks = (overrides.hooks or (Hooks() if address is None else Hooks.load(address))).check()
        watch = None if hooks.on_store is None else self.stack.enter_context(StoreWatch(hooks.on_store))
        store = self.stack.enter_context(Store([store_metrics(self.recorder), *([watch] if watch else [])]))
        algorithm, replay = self.config.algorithm, self.config.replay
        given = numbers(algorithm)
        ports = Ports(
            config=self.config,
            recorder=self.recorder,
            ledger=ledger,
            store=store,
            engine=parts.engine,
            environment=environment,
            reward=reward,
            trainer=parts.trainer,
            sinks=parts.sinks,
            loss=build_loss(algorithm.loss, **given),
            reward_penalty=build_reward_penalty(**given),
            advantage=build_advantage(algorithm.advantage, **given),
            book=GroupBook(ledger, store),
            ids=GroupIds(first_group, self.world.world_size),
            scores=bool(overrides.rewards or self.config.reward.functions or parts.reward_models),
            calls_at_once=functions.calls_at_once,
            ranks=self.world.world_size,
            rank=self.world.rank,
            gather=self._gather(parts.lanes[0]),
            round=parts.round,
            score_groups=self._scores_groups(environment),
            weights=self._weights(reward),
            replay=ReplayBuffer(replay.size, replay.max_age, self.config.seed) if replay.size else None,
            hooks=hooks,
            store_watch=watch,
            limits=_limits(self.config, parts.policy),
        )
        found = parts.policy, parts.core, parts.rates, parts.verdict, parts.placed
        return Built(ports, parts.lanes, parts.tokenizer, *found)

    def _gather(self, lane: Any) -> Gather:
        """On the lane of the trainer, whose collectives it must not cross."""
        world = self.world
        if world.world_size == 1:
            return alone

        async def gather(part: Any) -> list[Any]:
            mine = packed(part)
            every = await lane.run(lambda: world.all_gather_bytes(mine), name="train/gather", priority=1)
            return [unpacked(each) for each in every]

        return gather

    def _text(self, tokenizer: Any) -> CompletionText:
        config = self.config
        chosen, arguments = config.reward.text.model_dump(), config.data.chat_template_kwargs
        return CompletionText(tokenizer, **chosen, arguments=arguments, recorder=self.recorder)

    def _scores_groups(self, environment: Environment) -> bool:
        batch = self.config.reward.batch
        return isinstance(environment, SingleTurn) if batch == "auto" else batch == "group"

    def _weights(self, reward: RewardPool | ModelRewards) -> dict[str, float]:
        """Of every component of the reward, by name. Errors: ConfigError where two have one name, or a setting names one that
        nobody gives."""
        weights = reward.weights
        if self.config.reward.overlong.cache is not None:
            if OVERLONG in weights:
                raise ConfigError(
                    f"a reward function is named {OVERLONG!r}, as the component of reward.overlong.cache; give it another "
                    "`name`"
                )
            weights[OVERLONG] = self.config.reward.overlong.weight
        check_components(self.config, reward.weights)
        return weights

    def _ledger(self, turn: int) -> Any:
        rollout = self.config.rollout
        numbers = (rollout.groups_per_step, turns_bound(self.config), rollout.late, turn)
        if self.world.world_size == 1:
            return LocalLedger(*numbers, recorder=self.recorder, warmup=rollout.sync_warmup_steps)
        return StoreLedger.over(
            self.world.store("ledger"),
            *numbers,
            rank=self.world.rank,
            ranks=self.world.world_size,
            warmup=rollout.sync_warmup_steps,
            by_rank=self.config.preset == "sync" and (self.site.rows is not None or self.config.data.train is not None),
            recorder=self.recorder,
        )

    def _functions(self, overrides: Overrides) -> RewardPool:
        pool = RewardPool.from_config(self.config.reward, self.recorder, overrides.rewards)
        if overrides.hooks is None and self.config.hooks is None:
            rows = self.site.rows
            given = [] if rows is None else [columns_of(rows, self.config)]
            pool.columns = known_columns(self.config) + given
        return pool

    def _reward(self, functions: RewardPool, parts: Parts) -> RewardPool | ModelRewards:
        """The functions, and the reward models beside them. Errors: ConfigError where two have one name."""
        most, each = self.config.train.max_steps, versions_per_batch(self.config)
        last = None if most is None else most * each
        functions.progress = lambda: {"global_step": parts.trainer.version, "max_steps": last}
        reward = self.config.reward
        if not parts.reward_models:
            return functions
        models = [(model, each.weight) for model, each in zip(parts.reward_models, reward.model, strict=True)]
        return ModelRewards(functions, models, parts.lanes[0], reward.on_error, self.recorder)

    async def _dry(self, version: int) -> Parts:
        config, costs = self.config, self.config.dry_run
        train_lane = await self.stack.enter_async_context(SimulatedLane("device", self.recorder))
        engine_lane = train_lane
        if not costs.shared_device:
            engine_lane = await self.stack.enter_async_context(SimulatedLane("generation", self.recorder))
        trainer = DryRunTrainer(
            train_lane, self.recorder, train_token_s=costs.train_token_s, finish_s=costs.finish_s, version=version
        )
        assert config.engine.max_sequences is not None
        weights = OwnWeights(version) if config.rollout.weight_sync_interval > 1 else None
        engine = DryRunEngine(
            engine_lane,
            self.recorder,
            max_sequences=config.engine.max_sequences,
            max_context=row_limit(config),
            kv_positions=config.engine.kv_positions,
            version_source=lambda: trainer.version if weights is None else weights.version,
            decode_step_s=costs.decode_step_s,
            length_sigma=costs.length_sigma,
            seed=config.seed,
        )
        await self.stack.enter_async_context(engine)
        lanes = (train_lane,) if engine_lane is train_lane else (train_lane, engine_lane)
        if weights is not None:
            weights.engine = engine
        return Parts(engine, trainer, (weights or engine,), lanes, ByteTokenizer())

    async def _real(self) -> Parts:
        # Models and transformers are not loaded for a dry run; importing them takes seconds, which the loop does not wait.
        self.say("importing transformers")
        real = await offload(lambda: import_module("asyncrl.runtime.real"), "import")
        return await real.open_real(self.site)  # type: ignore[no-any-return]  # loaded by name


def _limits(config: Config, policy: PolicyModel | None) -> Limits:
    if policy is None:
        return Limits()
    shape = policy.routing.shape if config.algorithm.router_replay and policy.routing is not None else None
    routes = None if shape is None else (shape.layers, shape.k, shape.experts)
    return Limits(vocabulary=int(policy.config.get_text_config().vocab_size), routes=routes)


def check_books(ports: Ports) -> None:
    """Invariant 2, at the end of a run: every admitted group ended exactly once, and took its rows with it."""
    books, store = ports.ledger.statistics(), ports.store.statistics()
    ended = books.trained + books.dropped + books.failed
    if books.live or books.claimed or books.held or books.admitted != ended or store.rows or store.bytes:
        raise LedgerError(f"the books do not add up at the end of the run: {books}, rows of groups: {store}")
