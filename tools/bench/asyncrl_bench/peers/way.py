"""What every side of `asyncrl bench transport` does with a group that was handed to it: what a run does, to the end.

    the ring's door ──serve──▶ leases, gathering ─╮
                                                  ├─▶ intake ─▶ store ─▶ rewards ─▶ claim ─▶ advantages ─▶ packing ─▶ microbatch
    any other way ──`handed`──▶ Runtime.submit's ─╯   rows, lease                                                       │ stamp
                                                      ▲                                                              commit
                                                      ╰───────────────── cleared: rows gone, lease ended ◀──────────────╯

The parts are asyncrl's own, put together as a Runtime does it; only the trainer, which notes the microbatches and computes nothing,
is of this module. A step is one group, and a microbatch holds all of it. So the sides differ in the transport alone.

It needs no torch, and also runs inside a peer's environment, where asyncrl comes from the checkout beside what the peer brings.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from typing import Any, Literal, cast

import anyio

from asyncrl.algorithms.registry import build_advantage, build_loss
from asyncrl.concurrency.supervisor import Supervisor
from asyncrl.config.load import load_config
from asyncrl.config.methods import flat_values
from asyncrl.config.resolve import resolve, turns_bound
from asyncrl.config.schema import Config
from asyncrl.data.store import Store
from asyncrl.distributed.ledger import LocalLedger
from asyncrl.distributed.reservation import Reservation
from asyncrl.pumps.book import GroupBook, GroupIds
from asyncrl.pumps.graph import Graph
from asyncrl.pumps.intake import Intake
from asyncrl.pumps.pipeline import Ports, StepReport
from asyncrl.records.check import Limits
from asyncrl.runtime.build import ByteTokenizer
from asyncrl.runtime.program import as_group
from asyncrl.runtime.progress import rare_collections
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import FinishReason, Microbatch, StepResult, Trajectory

AGE = 8  # versions that a group may be old, more than are ever on the way: none becomes too old, and all are looked at for it


class Microbatches:
    """A `ports.Trainer` that notes when the microbatch of a group was there, and what it held."""

    def __init__(self) -> None:
        self.version = 0
        self.packed_ns: dict[int, int] = {}  # by group id
        self.packed_tokens = self.scored_tokens = self.sequences = self.batches = 0

    async def begin_train_step(self, loss: Any) -> None:
        pass

    async def train_microbatch(self, batch: Microbatch) -> None:
        now = time.monotonic_ns()
        for group_id in dict.fromkeys(batch.group_ids.tolist()):
            self.packed_ns[group_id] = now
        self.packed_tokens += batch.tokens.size
        self.scored_tokens += batch.scored
        self.sequences += batch.sequences
        self.batches += 1

    async def finish_train_step(self) -> StepResult:
        self.version += 1
        return StepResult(self.version, 0.0, 0.0, 0.0, tokens=0, sequences=0, microbatches=1)

    async def abort_train_step(self) -> None:
        pass

    async def compute_logprobs(self, batch: Microbatch, model: Literal["policy", "reference"] = "policy") -> Any:
        return batch.sampler_logprobs

    async def survey(self, loss: Any, batches: Sequence[Microbatch]) -> tuple[Any, list[Microbatch]]:
        return loss, list(batches)


class Way:
    """Open it with `async with`; it has what `asyncrl.runtime.door.serve` asks of a Runtime."""

    def __init__(self, members: int, tokens: int, prompt: int, cleared: Callable[[], object] = lambda: None) -> None:
        """`prompt`: of the `tokens` of each member, those of the prompt. `cleared`: after each group, its lease has ended."""
        self.config = config_of(members, tokens, prompt)
        self.recorder = Recorder(max_events=0)
        self.limits, self.tokenizer = Limits(), ByteTokenizer()
        self.handed_ns: dict[int, int] = {}  # by group id; of the ring's whoever stamps its deliveries
        self._prompt = prompt
        self._cleared = cleared
        self._trainer = Microbatches()
        self._listeners: list[Any] = []
        self._refused: list[str] = []
        self._ended = 0  # groups
        self._changed = anyio.Event()

    async def __aenter__(self) -> Way:
        config, self._stack = self.config, AsyncExitStack()
        rollout, given = config.rollout, flat_values(config.algorithm)
        books = Reservation(rollout.groups_per_step, turns_bound(config), rollout.late)
        ledger = LocalLedger(books, self.recorder)
        self._ledger = await self._stack.enter_async_context(ledger)
        self._store = self._stack.enter_context(closing(Store(self.recorder)))
        ports = Ports(
            config=config,
            recorder=self.recorder,
            ledger=ledger,
            store=self._store,
            engine=cast("Any", None),  # nothing is sampled, and every group brings its rewards
            environment=cast("Any", None),
            reward=cast("Any", None),
            trainer=self._trainer,
            sinks=(),
            loss=build_loss(config.algorithm.loss, **given),
            advantage=build_advantage(config.algorithm.advantage, **given),
            book=GroupBook(ledger, self._store),
            ids=GroupIds(0, 1),
            scores=False,
            limits=self.limits,
        )
        self._graph = Graph(ports, None, [], self._at_version, self._on_step, self._at_version)
        self._stack.enter_context(rare_collections())
        supervisor = await self._stack.enter_async_context(Supervisor())
        self._graph.start(supervisor)
        self._supervisor = supervisor
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool | None:
        if error is None:
            await self._graph.drain()
        self._supervisor.cancel()  # a door that still serves
        rows = self._store.statistics()
        swallowed = await self._stack.__aexit__(kind, error, traceback)
        if error is None and (rows.rows or self._refused):
            raise AssertionError(f"rows are left: {rows}; refused: {self._refused}")
        return swallowed

    # -- groups in

    async def handed(self, group: int, columns: Mapping[str, Any], rewards: Any) -> None:
        """A group that lies here as arrays, a row a member: from now on as `Runtime.submit`."""
        self.handed_ns[group] = time.monotonic_ns()
        members, prompt = as_group(self.tokenizer, trajectories(group, columns, self._prompt), rewards)
        if not await self._graph.submit(members, prompt):
            raise AssertionError(f"group {group} was not taken")

    def serve(self, serve: Callable[..., Awaitable[object]], *arguments: Any) -> None:
        """Run the door `serve(runtime, *arguments)` beside the pumps, until the block ends."""
        self._supervisor.start("door", serve, self, *arguments)

    async def wait_cleared(self, groups: int) -> None:
        """Until so many groups were cleared. Errors: AssertionError where one was refused."""
        while self._ended < groups:
            if self._refused:
                raise AssertionError(f"refused: {self._refused}")
            await self._changed.wait()

    # -- what came of it

    def result(self, puts: Sequence[int]) -> dict[str, Any]:
        """`times`: (put, in hand, in its microbatch) of each group in ns; and what its microbatches held.

        `puts`: when each group was put. Errors: AssertionError where another number of groups came through."""
        packed, books = self._trainer.packed_ns, self._ledger.statistics()
        trained = books.trained + books.held  # the slot of the last one may still be on its way back
        if sorted(packed) != list(range(len(puts))) or trained != len(puts):
            raise AssertionError(f"{len(puts)} groups were put, {len(packed)} packed: {books}")
        held = self._trainer
        return {
            "times": [(put, self.handed_ns[group], packed[group]) for group, put in enumerate(puts)],
            "packed": {
                "groups": trained,
                "microbatches": held.batches,
                "sequences": held.sequences,
                "packed_tokens": held.packed_tokens,
                "scored_tokens": held.scored_tokens,
            },
        }

    # -- what a door asks of a Runtime

    @property
    def version(self) -> int:
        return self._trainer.version

    @property
    def intake(self) -> Intake:
        return self._graph.open_intake()

    def listen(self, listener: Any) -> None:
        self._listeners.append(listener)

    def note(self, text: str) -> None:
        self._refused.append(text)
        self._wake()

    async def _at_version(self, version: int) -> None:
        pass

    def _on_step(self, report: StepReport) -> None:
        for listener in self._listeners:
            listener.push(report)
        self.recorder.drain()
        self.recorder.take_window()
        for _ in report.groups:
            self._ended += 1
            self._cleared()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def config_of(members: int, tokens: int, prompt: int) -> Config:
    settings = [
        "engine.kind=dry_run",
        "train.kind=dry_run",
        f"train.tokens_per_microbatch={members * tokens}",
        "rollout.groups_per_step=1",
        f"rollout.group_size={members}",
        f"rollout.max_staleness={AGE}",
        f"rollout.max_tokens={tokens - prompt}",
        f"data.max_prompt_tokens={prompt}",
    ]
    return resolve(load_config([], settings), embedding=True, submitted=True)


def trajectories(group: int, columns: Mapping[str, Any], prompt: int) -> list[Trajectory]:
    """Of arrays as they came; nothing is copied."""
    size = len(columns["tokens"])
    return [
        Trajectory(
            group_id=group,
            member=member,
            group_size=size,
            prompt_length=prompt,
            tokens=columns["tokens"][member],
            mask=columns["mask"][member],
            logprobs=columns["logprobs"][member],
            sampled_logprobs=columns["logprobs"][member],
            versions=columns["versions"][member],
            temperature=1.0,
            finish_reason=FinishReason.STOP,
        )
        for member in range(size)
    ]
