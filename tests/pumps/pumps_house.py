"""A whole run around the pumps, in virtual time, with knobs, a log of what happened and books that are audited all the time.

    house = live(Plan(groups_per_step=2, prompts=8, rollout_s=lambda group, member: 3.0 if group == 5 else 1.0))
    assert house.error is None and house.trained() == [[0, 1], ...]

Real: ledger, stash, store, packing, queues, supervisor, lane, dry-run trainer (and dry-run engine where `engine=True`).
Fake, because their time and their failures are the subject: environment, reward, the engines that take new weights.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import anyio
from pumps_plan import (
    PROMPT_TOKENS,
    TOKENS,
    Event,
    Plan,
    Prompts,
    Replica,
    ScriptedEnvironment,
    ScriptedReward,
    make_prompt,
)
from pumps_recording import AuditedLedger, RecordingBook, RecordingTrainer

from asyncrl.algorithms.advantages import Estimator
from asyncrl.algorithms.registry import build_advantage, build_loss
from asyncrl.concurrency.lane import SimulatedLane
from asyncrl.concurrency.supervisor import Supervisor
from asyncrl.data.replay import ReplayBuffer
from asyncrl.data.store import Store
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.generation.dry_run import DryRunEngine
from asyncrl.pumps.book import GroupIds
from asyncrl.pumps.graph import Graph, RoleParts
from asyncrl.pumps.pipeline import Ports, StepReport
from asyncrl.telemetry.recorder import Recorder
from asyncrl.training.dry_run import DryRunTrainer
from asyncrl.types import LedgerStatistics, Microbatch, SamplingParams
from asyncrl_bench.virtual_time import run_virtual


class CountingRecorder(Recorder):
    """Also keeps the sums of all counts."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.counted: Counter[str] = Counter()

    def count(self, name: str, by: float = 1) -> None:
        super().count(name, by)
        self.counted[name] += int(by)


class CountingStore(Store):
    """Also counts the calls that have cleared rows."""

    clears = 0

    def clear(self, group_ids: Iterable[int], *, release: bool = True) -> int:
        rows = super().clear(group_ids, release=release)
        self.clears += bool(rows)
        return rows


class House:
    """One life of the pumps. Made by `live`."""

    def __init__(
        self,
        plan: Plan,
        ports: Mapping[str, Any] | None = None,
        role_parts: Callable[[House], RoleParts | None] = lambda house: None,
    ) -> None:
        """`ports`: of the rank, others than those made here. `role_parts`: makes the parts of a rank with a role."""
        self.plan = plan
        self.role_parts = role_parts
        self.brought = ports or {}
        self.config = plan.config()
        self.log: list[Event] = []
        self.tokens_trained: list[tuple[int, Microbatch]] = []  # (trainer's version then, batch)
        self.reports: list[StepReport] = []
        self.reward_calls: list[tuple[tuple[int, int], ...]] = []  # (group, member) of the trajectories of each call
        self.evaluations: dict[int, dict[str, float]] = {}
        self.error: BaseException | None = None
        self.ended_at = 0.0
        self.ticks = 0
        self.quiescent_points = 0
        self.sinks: list[Replica] = []
        self.pinned = False  # the engine pins versions: steps may go on beside an evaluation

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
        recorder = CountingRecorder(asyncio.get_running_loop().time, max_events=0, nvtx=False)
        self.counted = recorder.counted
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
        self.store = CountingStore()
        self.book = RecordingBook(self, self.ledger, self.store)
        algorithm = config.algorithm
        self.ports = Ports(
            config=config,
            recorder=recorder,
            ledger=self.ledger,
            store=self.store,
            engine=engine,
            environment=environment,
            reward=await stack.enter_async_context(ScriptedReward(self)),
            trainer=self.trainer,
            sinks=[engine] if plan.engine else self.sinks,
            loss=build_loss(
                algorithm.loss,
                old_logprobs=algorithm.old_logprobs,
                kl_coef=algorithm.kl.coef,
                top_entropy_quantile=algorithm.top_entropy.quantile,
            ),
            advantage=Estimator("scripted", plan.advantage) if plan.advantage else build_advantage(algorithm.advantage),
            book=self.book,
            ids=GroupIds(1 << 40, 1),
            score_groups=plan.score_groups,
            replay=ReplayBuffer(config.replay.size, config.replay.max_age) if config.replay.size else None,
        )
        self.ports = replace(self.ports, **self.brought)
        self.prompts: Any = plan.cursor() if plan.cursor else Prompts(plan.prompts)
        held_out = [make_prompt(row) for row in range(plan.held_out)]
        at = self._at_version, self.reports.append, self._catch_up
        self.graph = Graph(self.ports, self.prompts, held_out, *at, role_parts=self.role_parts(self))  # type: ignore[arg-type]

    async def _catch_up(self, last: bool) -> None:
        """As the runtime does it."""
        version = self.trainer.version
        if not last or self.graph.evaluations.is_behind(version, last):
            await self._at_version(version, last)

    async def _at_version(self, version: int, missed: bool = False) -> None:
        """As the runtime does it: an evaluation where one is due, or one that was `missed` at the end."""
        before = self.trainer.version

        async def tell(metrics: Mapping[str, float]) -> None:
            self.note("told", version=version)
            if metrics:
                same = before == self.trainer.version == version
                assert same or self.pinned, "the weights moved during an evaluation"
                self.note("evaluated", version=version)
                self.evaluations[version] = dict(metrics)

        first, last = missed or version == 0, missed or self.graph.is_last_version()
        await self.graph.evaluate(version, tell, first=first, last=last)

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
        assert sorted(self.book.tickets) == live and len(live) == books.live, (self.book.tickets, live, books)
        held, size = self.store.statistics(), self.config.rollout.group_size
        assert self.graph.intake.incomplete + held.rows // size <= books.live + books.claimed
        assert held.claimed == books.claimed * size, "the store's claims and the open step differ"

    def check_over(self) -> None:
        """After every end, good or bad: no open step, every admitted group ended exactly once or waits for its publish."""
        books = self.ledger.audit()
        assert books.live == books.claimed == 0, f"groups left behind: {books}"
        assert not self.book.tickets
        assert not self.trainer.step_open, "a train step is still open"
        endings = Counter({group: len(ends) for group, ends in self.ledger.endings.items()})
        assert endings == self.ledger.admissions, "an admitted group ended twice, or never"
        store = self.store.statistics()
        assert store.rows == 0, f"rows left in the store: {store}"
        applied = -(-self.trainer.version // self.plan.versions)  # a batch cut off half-way counts
        assert applied == books.turn, "an applied optimizer step is not in the ledger's books"
        assert len(self.reports) == books.turn, "an applied step went unreported, or was reported twice"
        told = [report.version for report in self.reports]
        assert told == sorted(set(told)) and (told or [0])[-1] == self.trainer.version, (told, self.trainer.version)
        if self.error is None:
            assert books.held == 0, "a published step kept its slots"


class _NoWords:
    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return ""


def live(
    plan: Plan,
    *,
    body: Callable[[House, Supervisor], Any] | None = None,
    ports: Mapping[str, Any] | None = None,
    role_parts: Callable[[House], RoleParts | None] = lambda house: None,
    cancel_at_tick: int | None = None,
    native_cancel: bool = False,
) -> House:
    """The whole life of a house in virtual time. An error that ends the run is in `house.error`; a deadlock raises.

    cancel_at_tick: cancel the run in that iteration of the event loop, through a cancel scope around it or, with
    `native_cancel`, by `Task.cancel` as a signal handler or a foreign loop does.
    """
    house = House(plan, ports, role_parts)

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
