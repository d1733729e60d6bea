"""A whole run around the pumps, in virtual time, with knobs, a log of what happened and books that are audited all the time.

    house = live(Plan(groups_per_step=2, prompts=8, rollout_s=lambda group, member: 3.0 if group == 5 else 1.0))
    assert house.error is None and house.trained() == [[0, 1], ...]

Real: ledger, stash, packing, queues, supervisor, lane, dry-run trainer (and dry-run engine where `engine=True`).
Fake, because their time and their failures are the subject: environment, reward, the engines that take new weights.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import anyio
import numpy as np

from asyncrl.algorithms.registry import build_advantage, build_loss
from asyncrl.concurrency.clock import run_virtual
from asyncrl.concurrency.lane import SimulatedLane
from asyncrl.concurrency.supervisor import Supervisor
from asyncrl.config.resolve import resolve, slots
from asyncrl.config.schema import Config
from asyncrl.data.stash import Stash
from asyncrl.distributed.ledger import LocalLedger
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.generation.dry_run import DryRunEngine
from asyncrl.pumps.graph import Graph
from asyncrl.pumps.pipeline import GroupBook, Rooms, StepReport
from asyncrl.telemetry.recorder import Recorder
from asyncrl.training.dry_run import DryRunTrainer
from asyncrl.types import (
    ClaimState,
    FinishReason,
    LedgerStatistics,
    Microbatch,
    Prompt,
    SamplingParams,
    StepResult,
    Ticket,
    Trajectory,
)

TOKENS = 4  # of a scripted completion
PROMPT_TOKENS = 2
Seconds = Callable[[int, int], float]  # (group, member) -> seconds
Failure = Callable[[int, int], BaseException | None]


class Event(NamedTuple):
    at: float
    what: str
    groups: tuple[int, ...] = ()
    version: int = -1


def _nothing(group: int, member: int) -> None:
    return None


@dataclass(frozen=True)
class Plan:
    """What happens in the house. Times in virtual seconds, `trainer_fails[("finish", 2)]`: the second such call."""

    preset: str = "async"
    groups_per_step: int = 2
    group_size: int = 2
    max_staleness: int | None = None
    streaming: bool | None = None
    late: str = "wait"
    prompts: int | None = None  # None: endless
    max_steps: int | None = None
    time_limit_s: float | None = None
    partial_final_step: bool = True
    max_failed_groups: int = 0
    updates_per_batch: int = 1
    old_logprobs: str = "recompute"
    workers: int = 2
    tokens_per_microbatch: int = 64
    rollout_s: Seconds = lambda group, member: 1.0
    reward_s: Seconds = lambda group, member: 0.0
    fails: Failure = _nothing
    reward_fails: Failure = _nothing
    reward: Callable[[int, int], float | None] = lambda group, member: float((group + member) % 3)
    publish_s: Callable[[int, int], float] = lambda version, sink: 0.0
    publish_fails: Mapping[int, Exception] = field(default_factory=dict)  # by version
    sinks: int = 1
    trainer_fails: Mapping[tuple[str, int], BaseException] = field(default_factory=dict)
    advantage: Callable[[Sequence[float | None]], Any] | None = None
    train_token_s: float = 0.001
    finish_s: float = 0.01
    engine: bool = False  # tokens from the dry-run engine instead of the script
    held_out: int = 0
    evaluate_every: int | None = None
    evaluation_s: float = 1.0

    def config(self) -> Config:
        given = Config.model_validate(
            {
                "preset": self.preset,
                "data": {"max_prompt_tokens": PROMPT_TOKENS, "eval": "held out" if self.held_out else None},
                "rollout": {
                    "group_size": self.group_size,
                    "groups_per_step": self.groups_per_step,
                    "max_staleness": self.max_staleness,
                    "streaming": self.streaming,
                    "late": self.late,
                    "max_tokens": TOKENS,
                    "max_failed_groups": self.max_failed_groups,
                },
                "reward": {"workers": self.workers},
                "engine": {"kind": "dry_run"},
                "algorithm": {"updates_per_batch": self.updates_per_batch, "old_logprobs": self.old_logprobs},
                "train": {
                    "kind": "dry_run",
                    "max_steps": self.max_steps,
                    "time_limit_s": self.time_limit_s,
                    "partial_final_step": self.partial_final_step,
                    "tokens_per_microbatch": self.tokens_per_microbatch,
                },
                "evaluate": {"every": self.evaluate_every},
            }
        )
        return resolve(given, embedding=True)


def make_prompt(group_id: int) -> Prompt:
    return Prompt(group_id, np.arange(1, 1 + PROMPT_TOKENS, dtype=np.int32), f"prompt {group_id}")


def make_trajectory(
    group_id: int, member: int, group_size: int, versions: Sequence[int], reward: float | None = None
) -> Trajectory:
    """PROMPT_TOKENS of prompt, then one sampled token per version."""
    length = PROMPT_TOKENS + len(versions)
    mask = np.arange(length) >= PROMPT_TOKENS
    return Trajectory(
        group_id=group_id,
        member=member,
        group_size=group_size,
        prompt_length=PROMPT_TOKENS,
        tokens=np.arange(1, 1 + length, dtype=np.int32),
        mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        sampled_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=np.array([-1] * PROMPT_TOKENS + list(versions), np.int32),
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        reward=reward,
    )


class Prompts:
    """The prompt cursor: group ids 0, 1, 2, ... up to `count`."""

    def __init__(self, count: int | None) -> None:
        self.count = count
        self.delivered = 0

    def next(self) -> Prompt | None:
        if self.count is not None and self.delivered >= self.count:
            return None
        self.delivered += 1
        return make_prompt(self.delivered - 1)


class ScriptedEnvironment:
    """TOKENS tokens spread evenly over `plan.rollout_s`; each carries the version its engine has at that moment."""

    def __init__(self, house: House) -> None:
        self.house = house

    async def run(self, prompt: Prompt, member: int, group_size: int, generate: Any) -> Trajectory:
        house, group = self.house, prompt.group_id
        seconds = house.plan.rollout_s(group, member) if group >= 0 else house.plan.evaluation_s
        engine = house.sinks[(group + member) % len(house.sinks)]
        house.note("rollout starts", group, version=engine.version)
        versions = []
        for _ in range(TOKENS):
            versions.append(engine.version)
            await anyio.sleep(seconds / TOKENS)
        failure = house.plan.fails(group, member)
        if failure is not None:
            raise failure
        house.note("rollout ends", group, version=versions[0])
        return make_trajectory(group, member, group_size, versions)


class ScriptedReward:
    def __init__(self, house: House) -> None:
        self.house = house

    async def __aenter__(self) -> ScriptedReward:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        plan, scored = self.house.plan, []
        for trajectory in trajectories:
            group, member = trajectory.group_id, trajectory.member
            await anyio.sleep(plan.reward_s(group, member))
            failure = plan.reward_fails(group, member)
            if failure is not None:
                raise failure
            scored.append(replace(trajectory, reward=plan.reward(group, member)))
        return scored


class Replica:
    """A WeightSink: an engine with weights of its own, which it takes over after `plan.publish_s`."""

    def __init__(self, house: House, index: int, version: int = 0) -> None:
        self.house, self.index, self.version = house, index, version

    async def update_weights(self, version: int) -> None:
        await anyio.sleep(self.house.plan.publish_s(version, self.index))
        if version in self.house.plan.publish_fails:
            raise self.house.plan.publish_fails[version]
        self.house.note("weights taken", version=version)
        self.version = version


class RecordingTrainer:
    """The dry-run trainer with a log, a tap on every microbatch, and failures on request."""

    def __init__(self, house: House, inner: DryRunTrainer) -> None:
        self.house, self.inner = house, inner
        self.calls: dict[str, int] = {}
        self.open = False  # whether the real state machine has an open step
        self.old_logprobs_given: list[bool] = []

    @property
    def version(self) -> int:
        return self.inner.version

    def _called(self, call: str, groups: Iterable[int] = ()) -> None:
        self.calls[call] = self.calls.get(call, 0) + 1
        self.house.note(call, *groups, version=self.version)
        failure = self.house.plan.trainer_fails.get((call, self.calls[call]))
        if failure is not None:
            raise failure

    async def begin_train_step(self, loss: Any) -> None:
        self._called("begin")
        await self.inner.begin_train_step(loss)

    async def train_microbatch(self, batch: Microbatch) -> None:
        groups = list(dict.fromkeys(batch.group_ids.tolist()))
        self.old_logprobs_given.append(batch.old_logprobs is not None)
        self._called("microbatch", groups)
        self.house.tokens_trained.append((self.version, batch))
        await self.inner.train_microbatch(batch)

    async def finish_train_step(self) -> StepResult:
        self._called("finish")
        result = await self.inner.finish_train_step()
        self.house.note("finished", version=result.version)
        return result

    async def abort_train_step(self) -> None:
        self._called("abort")
        await self.inner.abort_train_step()

    async def compute_logprobs(self, batch: Microbatch, model: Any = "policy") -> Any:
        self._called("logprobs", dict.fromkeys(batch.group_ids.tolist()))
        return await self.inner.compute_logprobs(batch, model)

    @property
    def step_open(self) -> bool:
        return self.inner._open is not None


class RecordingStash(Stash):
    def __init__(self, house: House, max_groups: int) -> None:
        super().__init__(max_groups)
        self.house = house

    def clear(self, group_ids: Iterable[int]) -> None:
        ids = tuple(group_ids)
        self.house.note("clear", *ids)
        super().clear(ids)


class AuditedLedger(LocalLedger):
    """The local ledger; its books are added up after every transition, and every ending is written down."""

    def __init__(self, house: House, config: Config) -> None:
        rollout = config.rollout
        assert rollout.max_staleness is not None
        super().__init__(rollout.groups_per_step, rollout.max_staleness, late=rollout.late)
        self.house = house
        self.admissions: Counter[int] = Counter()  # by group id; an embedding program may submit one again
        self.endings: dict[int, list[str]] = {}  # by group id: every way in which it ended
        self._claims: list[int] = []

    async def admit(self, group_id: int, oldest: int | None = None) -> Ticket | None:
        ticket = await super().admit(group_id, oldest)
        if ticket is not None:
            self.admissions[group_id] += 1
            self.house.note("admit", group_id)
        return ticket

    async def claim(self, ready: Sequence[Ticket]) -> tuple[ClaimState, Ticket | None]:
        state, ticket = await super().claim(ready)
        if ticket is not None:
            self._claims.append(ticket.group_id)
            self.house.note("claim", ticket.group_id)
        return state, ticket

    async def commit(self) -> int:
        turn = await super().commit()
        for group_id in self._claims:
            self.endings.setdefault(group_id, []).append("trained")
        self.house.note("commit", *self._claims)
        self._claims = []
        return turn

    async def rollback(self) -> list[Ticket]:
        self._claims = []
        self.house.note("rollback")
        return await super().rollback()

    async def release(self, turn: int) -> None:
        await super().release(turn)
        self.house.note("release", version=turn)

    async def end(self, ticket: Ticket, outcome: Any, reason: str) -> None:
        await super().end(ticket, outcome, reason)
        self.endings.setdefault(ticket.group_id, []).append(outcome)
        self.house.note(outcome, ticket.group_id)

    def _changed(self) -> None:
        super()._changed()
        self.audit()

    def audit(self) -> LedgerStatistics:
        books, held = self.statistics(), self._books.slots.held
        assert held == books.live + books.claimed + books.held, f"slots lost or invented: {held} held, {books}"
        assert held <= books.slots, books
        ended = books.trained + books.dropped + books.failed
        assert books.admitted == books.live + books.claimed + books.held + ended, books
        return books


class House:
    """One life of the pumps. Made by `live`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.config = plan.config()
        self.log: list[Event] = []
        self.tokens_trained: list[tuple[int, Microbatch]] = []  # (trainer's version then, batch)
        self.reports: list[StepReport] = []
        self.evaluations: dict[int, dict[str, float]] = {}
        self.error: BaseException | None = None
        self.ended_at = 0.0
        self.ticks = 0
        self.quiescent_points = 0
        self.sinks: list[Replica] = []

    # -- what a test reads -----------------------------------------------------------------------------------------

    def note(self, what: str, *groups: int, version: int = -1) -> None:
        self.log.append(Event(asyncio.get_running_loop().time(), what, groups, version))

    def events(self, *what: str) -> list[Event]:
        return [event for event in self.log if event.what in what]

    def names(self, *what: str) -> list[str]:
        return [event.what for event in self.events(*what)]

    def trained(self) -> list[list[int]]:
        """Group ids of every committed step, in the order of their first microbatch."""
        return [[group.group_id for group in report.groups] for report in self.reports]

    @property
    def books(self) -> LedgerStatistics:
        return self.ledger.statistics()

    # -- life ------------------------------------------------------------------------------------------------------

    async def build(self, stack: AsyncExitStack) -> None:
        plan, config = self.plan, self.config
        recorder = Recorder(asyncio.get_running_loop().time, max_events=0, nvtx=False)
        self.ledger = await stack.enter_async_context(AuditedLedger(self, config))
        lane = await stack.enter_async_context(SimulatedLane("device", recorder))
        self.trainer = RecordingTrainer(
            self, DryRunTrainer(lane, recorder, train_token_s=plan.train_token_s, finish_s=plan.finish_s)
        )
        self.sinks = [Replica(self, index) for index in range(plan.sinks)]
        engine = DryRunEngine(
            lane,
            recorder,
            max_sequences=config.engine.max_sequences or 1,
            max_context=PROMPT_TOKENS + TOKENS,
            version_source=lambda: self.trainer.version,
            decode_step_s=0.25,
        )
        environment: Any = ScriptedEnvironment(self)
        if plan.engine:
            await stack.enter_async_context(engine)
            environment = SingleTurn(_NoWords(), SamplingParams(max_tokens=TOKENS), config.seed)
        self.stash = RecordingStash(self, slots(config))
        self.book = GroupBook(self.ledger, self.stash)
        algorithm = config.algorithm
        self.rooms = Rooms(
            config=config,
            recorder=recorder,
            ledger=self.ledger,
            stash=self.stash,
            engine=engine,
            environment=environment,
            reward=await stack.enter_async_context(ScriptedReward(self)),
            trainer=self.trainer,
            sinks=[engine] if plan.engine else self.sinks,
            loss=build_loss(algorithm.loss, old_logprobs=algorithm.old_logprobs),
            advantage=plan.advantage or build_advantage(algorithm.advantage),
            book=self.book,
        )
        self.prompts = Prompts(plan.prompts)
        held_out = [make_prompt(row) for row in range(plan.held_out)]
        self.graph = Graph(self.rooms, self.prompts, held_out, self._at_version, self.reports.append)  # type: ignore[arg-type]

    async def _at_version(self, version: int) -> None:
        """As the runtime does it: an evaluation where one is due."""
        before = self.trainer.version
        metrics = await self.graph.evaluate(version, self.graph.nothing_left())
        if metrics:
            assert before == self.trainer.version == version, "the weights moved during an evaluation"
            self.note("evaluated", version=version)
            self.evaluations[version] = metrics

    async def run(self, body: Callable[[House, Supervisor], Any] | None = None) -> None:
        """Open, run, close, in the runtime's order. `body` embeds: it takes the place of the configured run."""
        async with AsyncExitStack() as stack:
            await self.build(stack)
            try:
                async with Supervisor() as supervisor:
                    self.graph.start(supervisor)
                    if body is not None:
                        await body(self, supervisor)
                    else:
                        await self._at_version(0)
                        await self.graph.run(supervisor)
                        assert self.books.live == self.books.claimed == 0, "a run leaves no group behind"
                    await self.graph.drain()
            finally:
                with anyio.CancelScope(shield=True):
                    await self.book.end_all("closed")
                self.ended_at = asyncio.get_running_loop().time()

    def check_quiescent(self) -> None:
        """Nothing is ready to run: the pumps' own book and the ledger's agree, and the open step is the claimed one."""
        self.quiescent_points += 1
        books = self.ledger.audit()
        live = [ticket.group_id for ticket in self.ledger.live_groups() if ticket.group_id in self.book]
        assert self.book.live() == live and len(live) == books.live, (self.book.live(), live, books)
        stash = self.stash.statistics()
        assert stash.waiting_groups + stash.whole_groups <= books.live + books.claimed

    def check_over(self) -> None:
        """After every end, good or bad: no open step, every admitted group ended exactly once or waits for its publish."""
        books = self.ledger.audit()
        assert books.live == books.claimed == 0, f"groups left behind: {books}"
        assert self.book.live() == []
        assert not self.trainer.step_open, "a train step is still open"
        endings = Counter({group: len(ends) for group, ends in self.ledger.endings.items()})
        assert endings == self.ledger.admissions, "an admitted group ended twice, or never"
        stash = self.stash.statistics()
        assert stash.waiting_groups == stash.whole_groups == 0, f"rows left in the stash: {stash}"
        applied = -(-self.trainer.version // self.config.algorithm.updates_per_batch)  # a batch cut off half-way counts
        assert applied == books.turn, "an applied optimizer step is not in the ledger's books"
        if self.error is None:
            assert books.held == 0, "a published step kept its slots"


class _NoWords:
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return ""


def live(
    plan: Plan,
    *,
    body: Callable[[House, Supervisor], Any] | None = None,
    cancel_at_tick: int | None = None,
    native_cancel: bool = False,
) -> House:
    """The whole life of a house in virtual time. An error that ends the run is in `house.error`; a deadlock raises.

    cancel_at_tick: cancel the run in that iteration of the event loop, through a cancel scope around it or, with
    `native_cancel`, by `Task.cancel` as a signal handler or a foreign loop does.
    """
    house = House(plan)

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        process_events, select = loop._process_events, loop.select
        opened = False

        def tick(events: Any) -> None:  # once per iteration of the loop, after everything ready has run
            process_events(events)
            house.ticks += 1
            if house.ticks == cancel_at_tick:
                task.cancel() if native_cancel else scope.cancel()

        def quiescent(timeout: float | None) -> Any:  # where the loop would wait
            if opened and timeout is not None and timeout > 0 and hasattr(house, "graph"):
                house.check_quiescent()
            return select(timeout)

        loop._process_events, loop.select = tick, quiescent
        opened = True
        with anyio.CancelScope() as scope:
            try:
                await house.run(body)
            except asyncio.CancelledError as error:
                house.error = error
                if not native_cancel:
                    raise
            except Exception as error:
                house.error = error
        if cancel_at_tick is None:
            others = asyncio.all_tasks() - {task}
            assert not others, f"tasks left behind: {others}"

    run_virtual(main)
    if hasattr(house, "graph"):
        house.check_over()
    return house
