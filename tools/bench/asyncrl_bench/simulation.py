"""A run with `distributed.roles` in one process and in virtual time: rank 0, further training ranks, and up to thousands of
generating nodes.

Real: all pumps, the ledger with its books at rank 0, the prompt cursor, `Dispatch`, `Orders`, groups that travel as records, the
trainer of dry runs, and the messages of the line with their numbers, windows and answers. Simulated: what takes time.

    a connection       a delay, and the bandwidth of the sender's link
    rank 0             its event loop handles one message after the other, each in the measured time (`MESSAGE_S`)
    training ranks     the same; a record takes `RECORD_S`
    a completion       seconds from a log-normal distribution, on one of the node's `seats`
    a broadcast        the bytes at the bandwidth, and a bucket for each level of a tree

A simulated token stands for a second of decoding.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import anyio
import numpy as np

from asyncrl.algorithms.registry import build_advantage, build_loss
from asyncrl.concurrency.lane import SimulatedLane
from asyncrl.concurrency.supervisor import Supervisor
from asyncrl.config.resolve import resolve
from asyncrl.config.schema import Config
from asyncrl.data.prompts import PromptSource
from asyncrl.data.store import Store
from asyncrl.distributed.line_ledger import LineLedger
from asyncrl.distributed.reservation import Reservation
from asyncrl.pumps.book import GroupBook, GroupIds
from asyncrl.pumps.dispatch import Dispatch
from asyncrl.pumps.follow import EngineVersion, Remote
from asyncrl.pumps.graph import Graph, RoleParts
from asyncrl.pumps.pipeline import Ports, StepReport
from asyncrl.pumps.travel import KIND, Arrivals, Departures
from asyncrl.runtime.build import Absent, ByteTokenizer
from asyncrl.telemetry.budget import lane_budget
from asyncrl.telemetry.recorder import Recorder
from asyncrl.training.dry_run import DryRunTrainer
from asyncrl.types import FinishReason, Prompt, Trajectory
from asyncrl.weights.orders import LineOrders, Order, ServedOrders

from .simulated_line import BUCKET_BYTES, BYTES_PER_S, Client, Process, Server
from .virtual_time import run_virtual

FINISH_S, SCORING_S, BIND_S = 0.5, 1.0, 0.05
LONGEST_S = 80
REPORTS_S = 30.0


@dataclass(frozen=True)
class Plan:
    """What is simulated. `training`: speed of the training ranks; at 1 they train what the nodes can generate."""

    nodes: int
    training: float = 1.0
    nodes_per_trainer: int = 16
    groups_per_node: int = 1  # in a step
    group_size: int = 2
    seats: int = 2  # completions of a node at a time
    max_staleness: int = 3
    median_s: float = 20.0  # of a completion
    sigma: float = 0.8
    warmup: int = 5  # steps before the measurement
    steps: int = 4
    ends: bool = False  # simulate the end of the run, too
    evaluate_every: int | None = None
    weights_bytes: float = 16e9
    seed: int = 0

    @property
    def trainers(self) -> int:
        return max(1, self.nodes // self.nodes_per_trainer)

    @property
    def groups_per_step(self) -> int:
        return self.groups_per_node * self.nodes

    @property
    def last_step(self) -> int | None:
        """In the last steps nodes have nothing left to generate, so these are not measured."""
        return self.warmup + self.steps + self.max_staleness + 1 if self.ends else None

    def length(self, group_id: int, member: int) -> int:
        """Seconds of a completion, and its tokens."""
        drawn = random.Random(self.seed << 48 ^ group_id << 8 ^ member).lognormvariate(0.0, self.sigma)
        return min(max(1, round(self.median_s * drawn)), LONGEST_S)

    @cached_property
    def mean_length(self) -> float:
        return float(np.mean([self.length(group_id, 255) for group_id in range(4_000)]))

    @property
    def ideal(self) -> float:
        """Tokens a second, if no seat and no training rank ever waits."""
        return min(1.0, self.training) * self.nodes * self.seats

    @property
    def train_token_s(self) -> float:
        step_s = self.groups_per_step * self.group_size * self.mean_length / (self.nodes * self.seats * self.training)
        return (step_s - FINISH_S) * self.trainers / (self.groups_per_step * self.group_size * self.mean_length)

    @property
    def broadcast_s(self) -> float:
        levels = math.ceil(math.log2(self.nodes + 1))
        return (self.weights_bytes + levels * BUCKET_BYTES) / BYTES_PER_S

    def config(self) -> Config:
        given: dict[str, Any] = {
            "preset": "async",
            "data": {"max_prompt_tokens": 8, "eval": "held out" if self.evaluate_every else None},
            "rollout": {
                "group_size": self.group_size,
                "groups_per_step": self.groups_per_step,
                "max_staleness": self.max_staleness,
                "max_tokens": LONGEST_S,
            },
            "engine": {"kind": "dry_run"},
            "train": {"kind": "dry_run", "max_steps": self.last_step, "tokens_per_microbatch": 1 << 14},
            "evaluate": {"every": self.evaluate_every},
            "watchdog": {"interval_s": REPORTS_S},
        }
        return resolve(Config.model_validate(given), self.trainers, self.nodes, embedding=True)


class Meeting:
    """A collective of the training ranks: all wait for the last one."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._parts, self._done = ranks, dict[int, Any](), anyio.Event()

    async def join(self, rank: int, part: Any = None) -> dict[int, Any]:
        parts, done = self._parts, self._done
        parts[rank] = part
        if len(parts) == self._ranks:
            self._parts, self._done = {}, anyio.Event()
            done.set()
        await done.wait()
        return parts


class Asking(Remote):
    """`Remote` that notes what the rollout pump waits for."""

    rank: Rank

    async def next(self, played_s: Sequence[float] = ()) -> Prompt | None:
        self.rank.waits_for = "rank 0"
        prompt = await super().next(played_s)
        self.rank.waits_for = ""
        return prompt

    async def admitted(self) -> None:
        await super().admitted()
        self.rank.waits_for = ""


class Rank:
    """A training rank or a generating node."""

    def __init__(self, world: World, number: int) -> None:
        plan = world.plan
        self.world, self.number, self.trains = world, number, number < plan.trainers
        self.process = Process(f"rank {number}", serial=self.trains)
        self.recorder = Recorder(asyncio.get_running_loop().time, max_events=0, nvtx=False)
        self.version, self.active, self.waits_for = -1, 0, ""
        self.barrier_s = 0.0
        self._seats = anyio.Semaphore(plan.seats)
        self._ordered, self._follows = 0, False
        self._clients: dict[int, Client] = {}
        self.server: Server | None = None
        self.client: Client | None = None
        if self.trains:
            self.server = Server(self.process)
            self.server.on_wait = world.on_wait
        if number:
            assert world.ranks[0].server is not None
            self.client = self._clients[0] = Client(self.process, world.ranks[0].server)

    async def open(self, stack: AsyncExitStack) -> None:
        world, plan = self.world, self.world.plan
        config, line = world.config, self.client or self.server
        assert line is not None
        self.ledger = await stack.enter_async_context(
            LineLedger(line, world.books, self.number, recorder=self.recorder)
        )
        store = Store()
        version: Any = EngineVersion(self.next) if not self.trains else None
        if self.trains:
            lane = await stack.enter_async_context(SimulatedLane("device", self.recorder))
            trainer = DryRunTrainer(lane, self.recorder, train_token_s=plan.train_token_s, finish_s=FINISH_S)
            trainer.meet_ranks = self._meet
        self.ports = Ports(
            config=config,
            recorder=self.recorder,
            ledger=self.ledger,
            store=store,
            engine=cast(Any, Absent() if self.trains else self),
            environment=cast(Any, self),
            reward=cast(Any, self),
            trainer=version or trainer,
            sinks=[self] if self.trains else [],
            loss=build_loss(config.algorithm.loss, old_logprobs="sampler", kl_coef=0.0),
            advantage=build_advantage(config.algorithm.advantage),
            book=GroupBook(self.ledger, store),
            ids=GroupIds(1 << 40, 1),
            rank=self.number,
            ranks=plan.trainers,
            train_rank=self.number if self.trains else 0,
            generating=plan.nodes,
            builds_steps=self.trains,
            generates=not self.trains,
            gather=cast(Any, self._gather),
            calls_at_once=2,
            score_groups=True,
        )
        parts = RoleParts(engine_version=version)
        if self.number == 0:
            parts.dispatch = world.dispatch
        else:
            parts.remote = self.remote
        if self.trains:
            assert self.server is not None
            parts.arrivals = Arrivals(self.ports, 0)
            self.server.on(KIND, parts.arrivals.take)
        else:
            parts.departures = Departures(self.ports, self._connect, 0)
            self.ports.depart = parts.departures.put
        self.graph = Graph(
            self.ports, world.prompts, world.held_out, self._at_version, self._on_step, self._catch_up, role_parts=parts
        )

    def meet(self) -> None:
        """Register what the other end may ask for."""
        if self.client is None:
            return
        self.remote = Asking(self.client)
        self.remote.rank = self
        self.desk: Any = LineOrders(self.client)
        self.desk.on_order(self.run_order)

    async def live(self) -> None:
        async with AsyncExitStack() as stack:
            await self.open(stack)
            async with Supervisor() as supervisor:
                if self.number == 0:
                    self.world.dispatch.start(self.world.prompts, self.ledger)
                    supervisor.start("orders", self.world.orders.orders.run)
                if self.trains:
                    supervisor.start("first weights", self.update_weights, 0)
                else:
                    await self.desk.next(-1)
                    self.version = self._ordered
                self.graph.start(supervisor)
                await self.graph.run(supervisor)
                if self.number:
                    await self.remote.leave()
                else:
                    await self._close_books()
                supervisor.cancel()

    async def _close_books(self) -> None:
        dispatch = self.world.dispatch
        await dispatch.wait_finished([rank.process.name for rank in self.world.ranks[1:]])
        for ticket in self.ledger.live_groups(everywhere=True):
            await self.ledger.end(ticket, "dropped", "the run ended first")
        self.world.ended = self.ledger.statistics()
        dispatch.dismiss()

    # -- training ranks

    async def _meet(self) -> None:
        began = anyio.current_time()
        await self.world.before_step.join(self.number)
        self.barrier_s += anyio.current_time() - began

    async def _gather(self, part: Any) -> list[Any]:
        parts = await self.world.gathered.join(self.number, part)
        # Only rank 0 writes metrics. The others read no more than their own part, which keeps the simulation fast.
        return [parts[rank] for rank in sorted(parts)] if self.number == 0 else [part]

    async def update_weights(self, version: int) -> None:
        """Of `WeightSink`."""
        await self.desk.wrote(version, None)

    async def _at_version(self, version: int, first: bool = False) -> None:
        async def report(metrics: Any) -> None:
            if metrics:
                self.world.evaluated.append(version)

        await self.graph.evaluate(version, report, first=first, last=self.graph.is_last_version())

    async def _catch_up(self, last: bool) -> None:
        if self.number == 0 and not last:
            await self._at_version(0, first=True)

    def _on_step(self, report: StepReport) -> None:
        self.world.on_step(self, report)

    async def run_order(self, order: Order) -> None:
        """This rank's part of a broadcast."""
        await anyio.sleep(self.world.plan.broadcast_s)
        self._ordered = order.version

    # -- generating nodes

    async def next(self) -> int:
        """For `EngineVersion`."""
        if self._follows:
            await self.desk.next(self.version)
            await anyio.sleep(BIND_S)
        self._follows, self.version = True, self._ordered
        return self.version

    def statistics(self) -> dict[str, float]:
        """Of `Engine`."""
        return {"tokens": float(self.active)}

    async def generate(self, request: Any) -> Any:
        raise NotImplementedError

    async def run(self, prompt: Prompt, member: int, group_size: int, generate: Any) -> Trajectory:
        """Of `Environment`: play a completion on one of the seats."""
        length = self.world.plan.length(prompt.group_id, member)
        if prompt.group_id < 0:
            length = 1 + length // 10
        async with self._seats:
            first = self.version
            self.active += 1
            try:
                await anyio.sleep(length)
            finally:
                self.active -= 1
        if prompt.group_id >= 0:
            self.world.generated[prompt.group_id] += length
        size = prompt.ids.size
        mask = np.arange(size + length) >= size
        versions = np.where(mask, self.version, -1).astype(np.int32)
        versions[size] = first
        zeros = np.zeros(size + length, np.float32)
        return Trajectory(
            prompt.group_id,
            member,
            group_size,
            size,
            # No two trajectories share sampled tokens, which packing would train once.
            np.where(mask, 2 + abs(prompt.group_id) * group_size + member, 1).astype(np.int32),
            mask,
            zeros,
            zeros,
            versions,
            1.0,
            FinishReason.STOP,
        )

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Of `Reward`."""
        await anyio.sleep(SCORING_S)
        return [replace(t, reward=float(t.member % 2)) for t in trajectories]

    async def _connect(self, number: int) -> Client:
        if number not in self._clients:
            server = self.world.ranks[number].server
            assert server is not None
            self._clients[number] = Client(self.process, server)
        return self._clients[number]


@dataclass
class Result:
    """`*_s` and `idle` are means over the ranks of the role, in the measured time. Ages are in versions."""

    seconds: float = 0.0
    tokens: int = 0
    ages: Counter[int] = field(default_factory=Counter)
    # Cause -> share of the seats, or of the training ranks' time.
    generating: dict[str, float] = field(default_factory=dict)
    training: dict[str, float] = field(default_factory=dict)
    load: float = 0.0  # of rank 0's event loop
    handled: Counter[str] = field(default_factory=Counter)  # messages at rank 0
    wall_s: float = 0.0


class World:
    """All ranks, and what is measured."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.config, self.result = plan, plan.config(), Result()
        size = plan.trainers + plan.nodes
        names = [f"rank {number}" for number in range(size)]
        self.books = Reservation(plan.groups_per_step, plan.max_staleness, ranks=size, trainers=range(plan.trainers))
        self.books.set_generating(range(plan.trainers, size))
        self.prompts = PromptSource([{"prompt": "a"}], ByteTokenizer(), self.config.data)
        rows = plan.nodes if plan.evaluate_every else 0
        self.held_out = [Prompt(-1 - row, np.ones(1, np.int32), "a") for row in range(rows)]
        self.generated: Counter[int] = Counter()  # group -> tokens, until it is trained
        self.tokens_trained = 0
        self.evaluated: list[int] = []
        self.before_step, self.gathered = Meeting(plan.trainers), Meeting(plan.trainers)
        self.ended: Any = None
        self.ranks: list[Rank] = []
        self.ranks = [self._add(number) for number in range(size)]
        first = self.ranks[0]
        assert first.server is not None
        # Before the other ranks ask.
        self.dispatch = Dispatch(first.server, first.recorder, names[plan.trainers :], in_order=False)
        senders, receivers = names[: plan.trainers], names[plan.trainers :]
        self.orders = ServedOrders(first.server, senders, receivers, 60.0, lambda node, reason: None)
        first.desk = self.orders
        first.desk.on_order(first.run_order)
        self.measured, self.seats = anyio.Event(), Counter[str]()
        self._steps: Counter[int] = Counter()
        self._began = 0.0

    def _add(self, number: int) -> Rank:
        rank = Rank(self, number)
        self.ranks.append(rank)
        rank.meet()
        return rank

    def on_wait(self, peer: str, state: str) -> None:
        """A node begins or ends to wait for a slot in the books."""
        self.ranks[int(peer.split()[1])].waits_for = state

    def on_step(self, rank: Rank, report: StepReport) -> None:
        plan, result = self.plan, self.result
        measured = plan.warmup < report.version <= plan.warmup + plan.steps
        for group in report.groups:
            tokens = sum(t.completion_length for t in group.trajectories)
            if self.generated.pop(group.group_id) != tokens:
                raise AssertionError(
                    f"group {group.group_id} was trained with {tokens} tokens, and others were generated"
                )
            self.tokens_trained += tokens
            age = report.version - 1 - min(t.oldest_version for t in group.trajectories)
            if age > plan.max_staleness:
                raise AssertionError(f"group {group.group_id} is {age} versions old")
            result.tokens += tokens * measured
            result.ages[age] += measured
        self._steps[report.version] += 1
        if self._steps[report.version] == plan.trainers:
            if report.version == plan.warmup:
                self._begin()
            elif report.version == plan.warmup + plan.steps:
                self._end()

    def _begin(self) -> None:
        first = self.ranks[0]
        self._began = anyio.current_time()
        self._before = first.process.busy, first.process.handled.copy()
        for rank in self.ranks[: self.plan.trainers]:
            rank.recorder.take_window()
            rank.barrier_s = 0.0

    def _end(self) -> None:
        plan, result, first = self.plan, self.result, self.ranks[0]
        busy, handled = self._before
        result.seconds = seconds = anyio.current_time() - self._began
        result.load = (first.process.busy - busy) / seconds
        result.handled = first.process.handled - handled
        training: dict[str, float] = defaultdict(float)
        for rank in self.ranks[: plan.trainers]:
            for name, share in lane_budget(rank.recorder.take_window(), "device").shares().items():
                training[name] += share
            training["idle/other ranks"] += rank.barrier_s / seconds
            # The pump waits for its next group meanwhile.
            training["idle/group"] -= rank.barrier_s / seconds
        result.training = {name: share / plan.trainers for name, share in training.items()}
        result.generating = {name: count / self.seats.total() for name, count in self.seats.items()}
        self.measured.set()

    async def sample(self) -> None:
        """Every second: what the free seats wait for."""
        nodes, generating = self.ranks[self.plan.trainers :], self.seats
        while not self.measured.is_set():
            await anyio.sleep(1.0)
            if not self._began:
                continue
            # No slot is free. Those that are not held for weights wait for the training.
            slots = "weights" if self.books.held else "training"
            for node in nodes:
                generating[slots if node.waits_for == "slots" else node.waits_for or "last of its groups"] += (
                    self.plan.seats - node.active
                )
                generating["busy"] += node.active

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.sample)
            for rank in self.ranks:
                tasks.start_soon(rank.live)
            if not self.plan.ends:
                await self.measured.wait()
                tasks.cancel_scope.cancel()


def simulate(plan: Plan) -> World:
    """Run the plan to its end. Errors: those of the run; AssertionError for a group that is too old, or has other tokens."""
    began = time.perf_counter()

    async def main() -> World:
        world = World(plan)
        await world.run()
        return world

    world = run_virtual(main)
    world.result.wall_s = time.perf_counter() - began
    return world
