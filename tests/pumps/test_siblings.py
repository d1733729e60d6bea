"""A leader sends the calls of its trainer to its siblings: whatever is cancelled, all of them make the same calls in one order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

from asyncrl.config.schema import Config
from asyncrl.pumps.building import microbatch_of_counts
from asyncrl.pumps.claims import Claims
from asyncrl.pumps.pipeline import Publication
from asyncrl.pumps.siblings import CALL, CallQueue, LeadingTrainer, SiblingPump, decode, encode
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.queues.queue import QueueReceiver, QueueSender, open_queue
from asyncrl.types import Microbatch

BATCH = replace(
    microbatch_of_counts([]),
    tokens=np.arange(5),
    advantages=np.array([0.5, -1.0], np.float32),
    routes=np.arange(20, dtype=np.int16).reshape(5, 2, 2),
    keep=np.array([True, False]),
    skipped_tokens=7,
)


async def pauses(count: int) -> None:
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


class Trainer:
    """Notes each call that it has made, as a lane does: a call that has begun is made, and takes a while."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.version = 0

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            with anyio.CancelScope(shield=True):
                await pauses(3)
            self.made.append(name)
            self.version += name == "finish_train_step"
            return (arguments[0], []) if name == "survey" else name

        return call


class Line:
    """Between a leader and its siblings, in one process."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.handlers: dict[str, Any] = {}

    def on(self, kind: str, handler: Any) -> None:
        self.handlers[kind] = handler

    async def tell(self, peer: str, kind: str, header: Any, buffers: Sequence[Any]) -> None:
        assert kind == CALL
        await pauses(2)
        self.sent.append(f"{peer}: {header[0]}")
        if self.handlers:
            await self.handlers[kind](peer, header, [bytes(buffer) for buffer in buffers])


def leading(trainer: Trainer, line: Line, siblings: Sequence[str]) -> LeadingTrainer:
    ports: Any = SimpleNamespace(trainer=trainer, round=None, recorder=Recorder())
    made = LeadingTrainer(ports, line, siblings)
    made.wait_published = lambda: pauses(2)
    return made


def test_a_microbatch_arrives_as_it_was_sent() -> None:
    headers, buffers = encode([BATCH, replace(BATCH, tokens=np.zeros(0, np.int64), routes=None)])
    found = decode(headers, [bytes(buffer) for buffer in buffers])
    assert len(found) == 2
    for one, other in zip(found, (BATCH, replace(BATCH, tokens=np.zeros(0, np.int64), routes=None)), strict=True):
        for name in (field.name for field in fields(Microbatch)):
            mine, theirs = getattr(one, name), getattr(other, name)
            assert type(mine) is type(theirs), name
            if isinstance(mine, np.ndarray):
                assert mine.dtype == theirs.dtype and mine.shape == theirs.shape and mine.flags.writeable, name
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("ticks", range(16))
async def test_a_call_that_is_cancelled_is_made_by_all_or_by_none(ticks: int) -> None:
    trainer, line = Trainer(), Line()
    leader = leading(trainer, line, ["rank 1", "rank 2"])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leader.train_microbatch, BATCH)
        await pauses(ticks)
        tasks.cancel_scope.cancel()
    assert line.sent in ([], ["rank 1: microbatch", "rank 2: microbatch"])
    assert trainer.made == ["train_microbatch"] * (len(line.sent) // 2)
    await leader.abort_train_step()
    assert trainer.made[-1] == "abort_train_step" and line.sent[-2:] == ["rank 1: abort", "rank 2: abort"]


class Ledger:
    """The part of a ledger that a sibling needs."""

    turn = changes = 0

    async def commit(self) -> None:
        await pauses(2)
        self.turn += 1

    async def wait_changed(self, seen: int) -> int:
        await anyio.sleep_forever()
        raise AssertionError


def ports_of(trainer: Trainer, ledger: Ledger, updates: int) -> Any:
    config = Config.model_validate({"algorithm": {"updates_per_batch": updates}})
    book = SimpleNamespace(on_ready=lambda callback: None)
    return SimpleNamespace(
        config=config,
        recorder=Recorder(),
        trainer=trainer,
        ledger=ledger,
        loss="the loss",
        round=None,
        book=book,
        turn_of=lambda version: version // updates,
    )


@pytest.mark.parametrize("updates", [1, 2])
async def test_a_sibling_makes_the_calls_commits_and_publishes(updates: int) -> None:
    """In the leader's order; no call is made before the publish of the last step has ended."""
    own, trainer, line, ledger = Trainer(), Trainer(), Line(), Ledger()
    calls = CallQueue(line, "rank 0")
    leader, ports = leading(own, line, ["rank 1"]), ports_of(trainer, ledger, updates)
    waited: list[int] = []

    async def wait_published(turn: int) -> None:
        assert turn == ledger.turn
        waited.append(turn)

    pump = SiblingPump(ports, calls, Claims(ports), wait_published)
    edge: tuple[QueueSender[Publication], QueueReceiver[Publication]] = open_queue("publications", 8)
    sender, receiver = edge
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run, sender)
        for _ in range(2 * updates):
            await leader.survey("the loss", [BATCH])  # type: ignore[arg-type]  # it is only handed on
            await leader.begin_train_step("the loss")  # type: ignore[arg-type]
            await leader.train_microbatch(BATCH)
            await leader.compute_logprobs(BATCH, "reference")
            await leader.finish_train_step()
        await leader.begin_train_step("the loss")  # type: ignore[arg-type]
        await leader.abort_train_step()
        await leader.end()
    assert trainer.made == own.made and trainer.version == 2 * updates and ledger.turn == 2
    async with receiver:
        assert [item async for item in receiver] == [Publication(0, updates), Publication(1, 2 * updates)]
    assert len(waited) == len(trainer.made) - 1


@pytest.mark.parametrize("ticks", range(14))
async def test_a_sibling_that_is_cancelled_has_committed_the_steps_that_it_made(ticks: int) -> None:
    trainer, line, ledger = Trainer(), Line(), Ledger()
    calls, ports = CallQueue(line, "rank 0"), ports_of(trainer, ledger, 1)
    pump = SiblingPump(ports, calls, Claims(ports), lambda turn: pauses(2))
    edge: tuple[QueueSender[Publication], QueueReceiver[Publication]] = open_queue("publications", 8)
    await line.tell("rank 1", CALL, ["finish", None, []], ())
    async with edge[0], edge[1], anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run, edge[0])
        await pauses(ticks)
        tasks.cancel_scope.cancel()
    assert ledger.turn == trainer.version == len(trainer.made)
