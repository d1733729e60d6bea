"""Opens the ports of a run: ledger, engine, trainer, rewards. `real.py` and `workers.py` open the ports that need a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from importlib import import_module
from itertools import cycle
from typing import TYPE_CHECKING, Any, NoReturn, cast

from asyncrl.algorithms.registry import build_advantage, build_loss, build_reward_penalty
from asyncrl.concurrency.lane import SimulatedLane, ThreadLane
from asyncrl.concurrency.offload import offload
from asyncrl.config.methods import flat_values
from asyncrl.config.resolve import last_version, row_limit, turns_bound
from asyncrl.config.schema import Config
from asyncrl.data.prompts import FIRST_OUTSIDE_GROUP
from asyncrl.data.replay import ReplayBuffer
from asyncrl.data.store import Store
from asyncrl.data.texts import CompletionText
from asyncrl.distributed.ledger import LocalLedger
from asyncrl.distributed.line_ledger import LineLedger
from asyncrl.distributed.reservation import Reservation
from asyncrl.environments.chat import Chat
from asyncrl.environments.loading import is_episode, load_environment
from asyncrl.environments.policy import AgentEnvironment
from asyncrl.environments.session import Agents, EpisodeLimits
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.environments.tools import Toolbox
from asyncrl.errors import ConfigError, LifecycleError
from asyncrl.generation.dry_run import DryRunEngine
from asyncrl.generation.requests import sampling_params
from asyncrl.models.parameters.source import reward_model_name
from asyncrl.ports import Engine, Environment, Trainer, WeightSink
from asyncrl.pumps.book import GroupBook, GroupIds
from asyncrl.pumps.follow import EngineVersion, Remote
from asyncrl.pumps.graph import RoleParts
from asyncrl.pumps.metrics import decode_part, encode_part
from asyncrl.pumps.pipeline import Gather, Ports, gather_alone
from asyncrl.pumps.screen import OVERLONG
from asyncrl.pumps.siblings import CallQueue, LeadingTrainer
from asyncrl.pumps.travel import KIND, Arrivals, Departures
from asyncrl.records.check import Limits
from asyncrl.rewards.pool import RewardPool, configured_rewards
from asyncrl.training.dry_run import DryRunTrainer
from asyncrl.types import Messages

from .endpoint import lazy_endpoint
from .inputs import check_rewards, columns_of, import_code, known_columns

if TYPE_CHECKING:
    from .opened import OpenRun


async def open_ports(run: OpenRun) -> None:
    """Open ledger, reward workers, model, trainer and engine, each after the parts that it needs. Errors: ConfigError, and those of
    loading a model."""
    decided, config, stack = run.decided, run.config, run.stack
    dry, engine_kind = config.train.kind == "dry_run", config.engine.kind
    if dry != (engine_kind == "dry_run"):
        raise ConfigError(f"engine.kind={engine_kind}, train.kind={config.train.kind}: set both or neither to dry_run")
    ledger = await stack.enter_async_context(run.ledger or make_ledger(run))
    # Loading the model may take minutes. So import the user's code first: a mistake in this code ends the start at once.
    hooks = import_code(config, decided.environment, decided.hooks)
    world, pool = run.world, _make_pool(run)
    if world.generates:
        run.stages.show(f"starting reward workers: {config.reward.workers}")
        await stack.enter_async_context(pool)
        check_rewards(config, pool)
    trainer, engine, sinks = await (_open_dry(run) if dry else _open_real(run))
    gather = await _open_gather(run)
    environment, reward = await _environment_and_rewards(run, pool, trainer, engine)
    store = stack.enter_context(closing(Store(run.recorder)))
    replay, method_settings = config.replay, flat_values(config.algorithm)
    score_groups = _scores_groups(config, environment, pool)
    run.ports = Ports(
        config=config,
        recorder=run.recorder,
        ledger=ledger,
        store=store,
        engine=engine,
        environment=environment,
        reward=reward,
        trainer=trainer,
        sinks=sinks,
        loss=build_loss(config.algorithm.loss, **method_settings),
        reward_penalty=build_reward_penalty(**method_settings),
        advantage=build_advantage(config.algorithm.advantage, **method_settings),
        book=GroupBook(ledger, store),
        ids=GroupIds(_first_group(run), world.world_size),
        scores=bool(decided.rewards or config.reward.scores),
        calls_at_once=pool.calls_at_once(config.rollout.group_size if score_groups else 1),
        base=run.base,
        rank=world.rank,
        ranks=len(world.roles.leaders),
        train_rank=world.roles.leaders.index(world.rank) if world.leads else 0,
        generating=len(world.roles.generate),
        builds_steps=world.leads,
        generates=world.generates,
        follows=world.follows,
        gather=gather,
        round=run.round,
        score_groups=score_groups,
        weights=_reward_weights(run, reward),
        replay=ReplayBuffer(replay.size, replay.max_age, config.seed) if replay.size else None,
        hooks=hooks,
        limits=_limits(run),
        note=run.journal.live.note,
    )
    if isinstance(trainer, DryRunTrainer):
        trainer.meet_ranks = partial(gather, list[int]())
    await _open_role_parts(run)


def _scores_groups(config: Config, environment: Environment, pool: RewardPool) -> bool:
    """Whether one call of the reward functions scores all members of a group."""
    whole = any(function.whole_group for function in pool.functions)
    by_default = config.reward.batch == "auto" and (whole or isinstance(environment, SingleTurn))
    return config.rollout.keep_viable or by_default or config.reward.batch == "group"


async def _environment_and_rewards(
    run: OpenRun, pool: RewardPool, trainer: Trainer, engine: Engine
) -> tuple[Environment, RewardPool]:
    """The environment and the rewards of this rank. `pool`: open if the rank generates. Errors: ConfigError."""
    if not run.world.generates:
        absent = Absent(_configured_weights(run))
        return cast(Environment, absent), cast(RewardPool, absent)
    environment = _make_environment(run, pool, trainer)
    _add_models(run, pool, trainer)
    if run.agents is not None:
        run.endpoint = await run.stack.enter_async_context(lazy_endpoint(run.config, run.agents, engine.generate))
        if any(function.asks_policy for function in pool.functions):
            # A key of the endpoint allows only 256 requests at a time, so the calls of reward functions use eight keys in turn.
            pool.open_endpoint = cycle([run.endpoint.open(None) for _ in range(8)]).__next__
    roles, expected = run.world.roles, _configured_weights(run)
    if not set(roles.train) <= set(roles.generate) and expected.keys() != pool.weights.keys():
        raise ConfigError(
            f"reward functions are named {', '.join(pool.weights)}, and ranks that only train expect the names "
            f"{', '.join(expected)}; give each reward function a `name` (reward.functions)"
        )
    return environment, pool


async def _open_role_parts(run: OpenRun) -> None:
    """Open the parts that a rank needs if ranks have different roles."""
    if not run.world.roles.differ:
        return
    ports, world, epoch = run.ports, run.world, run.world.restart
    run.role_parts = RoleParts(run.dispatch, run.remote, run.engine_version)
    if world.generates:
        run.role_parts.departures = Departures(ports, run.connections.to, epoch)
        ports.depart = run.role_parts.departures.put
        run.stack.callback(run.role_parts.departures.discard)
    leader, *others = world.roles.siblings(world.rank) or (None,)
    if world.leads:
        run.role_parts.arrivals = Arrivals(ports, epoch)
        server = await run.connections.serve()
        server.on(KIND, run.role_parts.arrivals.take)
        await run.connections.announce(server)
        if others:
            run.role_parts.leading = LeadingTrainer(ports, server, [f"rank {rank}" for rank in others])
            ports.trainer, ports.round = run.role_parts.leading, ports.round and run.role_parts.leading.round
    elif leader is not None:
        run.role_parts.calls = CallQueue(await run.connections.to(leader), f"rank {leader}")
    if (siblings := world.siblings) is not None:
        # A barrier: the leader may send calls to its siblings only when they all are connected.
        await run.lanes[0].run(lambda: siblings.all_gather_bytes(b""), name="start/siblings")


def _first_group(run: OpenRun) -> int:
    """The first id for groups of a program or a door (door.py). Prompts of the run's data have ids below `FIRST_OUTSIDE_GROUP`."""
    rank = run.world.rank
    # A run whose ranks have different roles refuses submitted groups.
    if run.saved is None or run.world.roles.differ:
        return FIRST_OUTSIDE_GROUP + rank
    return run.saved.next_group(rank)


def make_ledger(run: OpenRun) -> Any:
    """The ledger of this rank, not open yet. On rank 0 make the ledger before `run.line` is opened."""
    config, world, rollout = run.config, run.world, run.config.rollout
    turn = run.saved.turn if run.saved else 0
    bounds = (rollout.groups_per_step, turns_bound(config), rollout.late, turn)
    if run.line is None:
        return LocalLedger(Reservation(*bounds, warmup=rollout.sync_warmup_steps), run.recorder)
    has_prompts = run.decided.rows is not None or config.data.train is not None
    # Whether ranks have equal shares of a step. Groups of a program or a door, unlike the run's prompts, may all reach one rank.
    by_rank = config.preset == "sync" and has_prompts and not world.roles.differ
    trainers = world.roles.leaders if world.roles.differ else ()
    # Whether a group's id determines its training rank. A rank replays its own groups, so without this a rerun could differ.
    by_id = config.preset == "sync" and config.replay.size > 0
    books = Reservation(*bounds, world.world_size, rollout.sync_warmup_steps, by_rank, trainers, by_id)
    books.set_generating(world.roles.generate)
    return LineLedger(run.line, books, world.rank, recorder=run.recorder, follows=world.follows)


async def _open_gather(run: OpenRun) -> Gather:
    """The `Gather` collective of the ranks that build steps, on the trainer's lane: all ranks need one order of collectives."""
    world, lane = run.world, run.lanes[0]
    if not world.leads or len(world.roles.leaders) == 1:
        return gather_alone
    if isinstance(lane, SimulatedLane):
        # A `SimulatedLane` runs its closures on the event loop, which must not block while a collective waits for other ranks.
        lane = await run.stack.enter_async_context(ThreadLane("collectives", run.recorder))
    ranks = world.leaders

    async def gather(part: Any) -> list[Any]:
        mine = encode_part(part)
        every = await lane.run(lambda: ranks.all_gather_bytes(mine), name="train/gather", priority=1)
        return [decode_part(each) for each in every]

    return gather


def _limits(run: OpenRun) -> Limits:
    policy, config = run.policy, run.config
    # A trajectory is not split over microbatches, so a longer trajectory would need more memory than was predicted.
    total = max(row_limit(config), config.train.tokens_per_microbatch)
    if (model := run.model_description) is not None:
        return Limits(max_tokens=total, vocabulary=model["vocabulary"], routes=tuple(model["routes"] or ()) or None)
    if policy is None:
        return Limits(max_tokens=total)
    shape = policy.routing.shape if config.algorithm.router_replay and policy.routing is not None else None
    routes = None if shape is None else (shape.layers, shape.k, shape.experts)
    return Limits(max_tokens=total, vocabulary=int(policy.config.get_text_config().vocab_size), routes=routes)


def _make_pool(run: OpenRun) -> RewardPool:
    pool = RewardPool(run.config.reward, run.recorder, run.decided.rewards)
    # Hooks may add columns, so the columns are known only if there are no hooks.
    if run.decided.hooks is None and run.config.hooks is None:
        rows = run.decided.rows
        pool.columns = known_columns(run.config) + ([] if rows is None else [columns_of(rows, run.config)])
    return pool


def _add_models(run: OpenRun, pool: RewardPool, trainer: Trainer) -> None:
    """Add the reward models, and the progress of the run, to the pool. Errors: ConfigError if two rewards have the same name."""
    last = last_version(run.config, run.base, run.decided.row_count)
    pool.progress = lambda: {"global_step": trainer.version, "max_steps": last}
    if run.reward_models:
        weights = [each.weight for each in run.config.reward.model]
        pool.add_models(list(zip(run.reward_models, weights, strict=True)), run.lanes[0])


def _reward_weights(run: OpenRun, reward: RewardPool) -> dict[str, float]:
    """Name of a reward component -> weight. Errors: ConfigError if two components have the same name."""
    weights, overlong = dict(reward.weights), run.config.reward.overlong
    if overlong.cache is not None:
        if OVERLONG in weights:
            raise ConfigError(
                f"a reward function is named {OVERLONG!r}, as the component of reward.overlong.cache; give it another `name`"
            )
        weights[OVERLONG] = overlong.weight
    return weights


def _configured_weights(run: OpenRun) -> dict[str, float]:
    """Name of a reward component -> weight, from the configuration. Loads no reward function."""
    reward = run.config.reward
    specs = configured_rewards(reward, run.decided.rewards)
    weights = {name: w for each in specs for name, w in each.weights(each.name or _name(each.function)).items()}
    return weights | {reward_model_name(each): each.weight for each in reward.model}


def _name(function: Any) -> str:
    """A function's name. For an import path its last part, although the function there may have another `__name__`."""
    if isinstance(function, str):
        return function.replace(":", ".").rpartition(".")[2]
    return str(getattr(function, "__name__", type(function).__name__))


def _make_environment(run: OpenRun, pool: RewardPool, trainer: Trainer) -> Environment:
    config, tokenizer = run.config, run.tokenizer
    chosen, arguments = config.reward.text.model_dump(), config.data.chat_template_kwargs
    text = CompletionText(tokenizer, **chosen, arguments=arguments, recorder=run.recorder)
    pool.generation_prompt = text.generation_prompt
    rollout = config.rollout
    toolbox = Toolbox(rollout.tool_timeout_s, rollout.tool_max_chars, run.recorder)
    run.stack.callback(toolbox.close)
    run.agents = Agents(
        chat=Chat(tokenizer, config.data, recorder=run.recorder),
        sampling=sampling_params(rollout, tokenizer),
        seed=config.seed,
        limits=EpisodeLimits.of(config),
        toolbox=toolbox,
        recorder=run.recorder,
        version=lambda: trainer.version,
        scores=bool(run.decided.rewards or config.reward.scores),
        column=config.data.prompt_column,
        end_session=lambda session: run.ports.engine.end_session(session),
    )
    passed: Any = run.decided.environment
    if passed is not None:
        return AgentEnvironment(run.agents, passed) if is_episode(passed) else passed
    return load_environment(rollout.environment, run.agents, text)


async def _open_real(run: OpenRun) -> tuple[Trainer, Engine, Sequence[WeightSink]]:
    # transformers takes seconds to import. A thread imports it: the loop must not block. `train.kind: dry_run` does not need it.
    run.stages.show("importing transformers")
    real = await offload(lambda: import_module("asyncrl.runtime.real"), "import")
    return await real.open_real(run)  # type: ignore[no-any-return]  # loaded by name


async def _open_dry(run: OpenRun) -> tuple[Trainer, Engine, Sequence[WeightSink]]:
    config, costs, world = run.config, run.config.dry_run, run.world
    version = run.saved.version if run.saved else world.joined.version if world.joined else 0
    train_lane = await run.stack.enter_async_context(SimulatedLane("device", run.recorder))
    run.lanes, run.tokenizer, engine_lane = (train_lane,), ChatBytes(), train_lane
    if not costs.shared_device and world.trains and world.generates:
        engine_lane = await run.stack.enter_async_context(SimulatedLane("generation", run.recorder))
        run.lanes = (train_lane, engine_lane)
    trainer = DryRunTrainer(
        train_lane, run.recorder, train_token_s=costs.train_token_s, finish_s=costs.finish_s, version=version
    )
    # There are no weights to send: `Dispatch` sends the number of each version to the ranks that only generate.
    sinks: list[WeightSink] = [] if run.dispatch is None else [run.dispatch]
    if not world.generates:
        return trainer, Absent(), sinks
    assert config.engine.max_sequences is not None
    versions = DryVersions(version, run.remote)
    versions.engine = engine = DryRunEngine(
        engine_lane,
        run.recorder,
        max_sequences=config.engine.max_sequences,
        max_context=row_limit(config),
        kv_positions=config.engine.kv_positions,
        version_source=lambda: versions.version,
        decode_step_s=costs.decode_step_s,
        length_sigma=costs.length_sigma,
        seed=config.seed,
    )
    await run.stack.enter_async_context(engine)
    if world.trains:
        return trainer, engine, [versions, *sinks]
    run.engine_version = EngineVersion(versions.next)
    # On a rank without a trainer only `trainer.version` is read.
    return cast(Trainer, run.engine_version), engine, sinks


class ByteTokenizer:
    """For runs without a model: a token is a byte of UTF-8, so prompts have plausible lengths. The zero byte is the EOS token."""

    chat_template: str | None = None
    eos_token_id, eos_token = 0, "\0"
    all_special_ids, all_special_tokens = [eos_token_id], [eos_token]

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        """Bytes that are no UTF-8 become U+FFFD."""
        return bytes(int(t) % 256 for t in token_ids).decode(errors="replace")

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return self.decode([token_id])

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.encode(token)[0]


class ChatBytes(ByteTokenizer):
    """The tokenizer of `train.kind: dry_run`: a ByteTokenizer whose chat template writes only the first letter of each role."""

    chat_template = "role[0] content"

    def apply_chat_template(self, messages: Messages, *, add_generation_prompt: bool = False, **options: Any) -> str:
        text = self.eos_token.join(f"{message['role'][0]}{message['content']}" for message in messages)
        ending = "" if options.get("continue_final_message") else self.eos_token
        return text + ending + ("a" if add_generation_prompt else "")


class DryVersions:
    """Holds the version from which a `DryRunEngine` samples. A rank that trains calls `update_weights` (a `WeightSink`).
    A rank that only generates calls `next`."""

    engine: WeightSink  # set later: making the engine needs this object

    def __init__(self, version: int, remote: Remote | None) -> None:
        """`version`: the version at the start. `remote`: brings versions from rank 0; needed for `next`."""
        self.version, self._remote = version, remote
        self._next_was_called = False

    async def update_weights(self, version: int) -> None:
        self.version = version
        await self.engine.update_weights(version)

    async def next(self) -> int:
        """The first call returns the version at the start. Each later call waits for a newer version, and returns the newest."""
        version = self.version
        if self._next_was_called:
            assert self._remote is not None
            version = await self._remote.wait_sent_version(version + 1)
        self._next_was_called = True
        await self.update_weights(version)
        return version


class Absent:
    """Stands in for the engine, the environment and the rewards on a rank that only trains (`distributed.roles`)."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: name of a reward component -> weight; None: this object stands in for the engine."""
        self.weights = weights or {}

    async def __aenter__(self) -> Absent:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return

    def statistics(self) -> dict[str, float]:
        return {}

    def end_session(self, session: str) -> None:
        return

    async def generate(self, request: Any) -> NoReturn:
        raise LifecycleError("this rank only trains (distributed.roles): it has no engine, environment or rewards")

    run = score = generate
