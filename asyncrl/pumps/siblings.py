"""Context parallelism (`distributed.context`): the ranks of a set train each sequence together. One rank of the set is the leader.
The other ranks of the set are the leader's siblings. They repeat all calls of the leader's trainer on their own trainers.

    train pump ─▶ LeadingTrainer ─┬─▶ LaneTrainer of the leader           begin · microbatch x K · finish: in the same order
                                  └─▶ line (distributed/line.py) ─▶ SiblingPump ─▶ LaneTrainer of the sibling

Only the leader claims groups, builds microbatches and reports steps. The leader sends each call, microbatches included, to the
siblings before the leader's own trainer gets the call. So all ranks of a set join the same collectives in the same order. Siblings
send no answer: if the trainer of a rank raises, the rank leaves the run, and the collectives of the other ranks raise RankLost.

A publish runs collectives, too. So each call except `abort` and `end` waits until this rank has published the last step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any, Literal, TypeAlias, TypeVar

import anyio
import numpy as np

from asyncrl.algorithms.base import Loss
from asyncrl.concurrency.supervisor import spawn
from asyncrl.config.resolve import versions_per_batch
from asyncrl.distributed.line import LineClient, LineServer
from asyncrl.errors import RankLost
from asyncrl.transport.queues.queue import QueueSender
from asyncrl.types import Float32Array, Microbatch, StepResult

from .claims import Claims, drop_late
from .pipeline import Ports, Publication, put_item

T = TypeVar("T")
CALL = "trainer/call"
# ([name, argument, headers of the microbatches], bytes of the arrays of the microbatches).
_Call: TypeAlias = tuple[Any, Sequence[Any]]


def encode(batches: Sequence[Microbatch]) -> tuple[list[dict[str, Any]], list[memoryview]]:
    """(for each microbatch a header with its numbers, and with dtype and shape of its arrays; the bytes of all arrays)"""
    headers, buffers = list[dict[str, Any]](), list[memoryview]()
    for batch in batches:
        header = {each.name: getattr(batch, each.name) for each in fields(Microbatch)}
        for name, value in header.items():
            if isinstance(value, np.ndarray):
                header[name] = [value.dtype.str, value.shape]
                buffers.append(np.ascontiguousarray(value).view(np.uint8).reshape(-1).data)
        headers.append(header)
    return headers, buffers


def decode(headers: Sequence[Mapping[str, Any]], buffers: Sequence[Any]) -> list[Microbatch]:
    """The inverse of `encode`."""
    rest = iter(buffers)

    def value(entry: Any) -> Any:
        if not isinstance(entry, list):
            return entry
        # A copy, because torch warns about arrays that are not writable.
        return np.frombuffer(bytearray(next(rest)), np.dtype(entry[0])).reshape(entry[1])

    return [Microbatch(**{name: value(entry) for name, entry in header.items()}) for header in headers]


class LeadingTrainer:
    """Implements `ports.Trainer` at a leader: sends each call to the siblings, and makes the same call on this rank's trainer."""

    def __init__(self, ports: Ports, line: LineServer, siblings: Sequence[str]) -> None:
        """`ports`: with the leader's own trainer. `siblings`: their names on the line."""
        self._trainer, self._round, self._recorder = ports.trainer, ports.round, ports.recorder
        self._line, self._siblings = line, siblings
        # Waits until the publish of the last step has ended. `Graph` sets this function.
        self.wait_published: Callable[[], Awaitable[None]]
        # The loss from the last `survey`. If a step begins with it, each sibling begins with the loss from its own `survey`.
        self._surveyed: Loss | None = None

    @property
    def version(self) -> int:
        return self._trainer.version

    async def begin_train_step(self, loss: Loss) -> None:
        await self._call("begin", lambda: self._trainer.begin_train_step(loss), loss is self._surveyed)

    async def train_microbatch(self, batch: Microbatch) -> None:
        await self._call("microbatch", lambda: self._trainer.train_microbatch(batch), batches=[batch])

    async def finish_train_step(self) -> StepResult:
        return await self._call("finish", self._trainer.finish_train_step)

    async def abort_train_step(self) -> None:
        # A sibling whose trainer raised the same error has left the run.
        with suppress(RankLost):
            await self._send("abort")
        await self._trainer.abort_train_step()

    async def compute_logprobs(
        self, batch: Microbatch, model: Literal["policy", "reference"] = "policy"
    ) -> Float32Array:
        return await self._call(
            "logprobs", lambda: self._trainer.compute_logprobs(batch, model), model, batches=[batch]
        )

    async def survey(self, loss: Loss, batches: Sequence[Microbatch]) -> tuple[Loss, list[Microbatch]]:
        result = await self._call("survey", lambda: self._trainer.survey(loss, batches), batches=batches)
        self._surveyed = result[0]
        return result

    async def round(self, finishing: bool) -> bool:
        """`Ports.round` of the leader."""
        run_round = self._round
        assert run_round is not None
        return await self._call("round", lambda: run_round(finishing), finishing)

    async def end(self) -> None:
        """Notify the siblings that no call follows, so that they end their pumps."""
        await self._send("end")

    async def _call(
        self, name: str, call_own: Callable[[], Awaitable[T]], argument: Any = None, batches: Sequence[Microbatch] = ()
    ) -> T:
        """Send the call `name` to the siblings, then make the same call on this rank's trainer by `call_own`."""
        # Only the train pump makes calls, one after the other. So all ranks get the calls in the same order.
        await self.wait_published()
        # Shielded: a sibling runs each call that it got, and waits for this rank in the collectives of the call.
        with (
            self._recorder.watch("trainer", f"the call {name}", on=", ".join(self._siblings)),
            anyio.CancelScope(shield=True),
        ):
            await self._send(name, argument, batches)
            result = await call_own()
        return result

    async def _send(self, name: str, argument: Any = None, batches: Sequence[Microbatch] = ()) -> None:
        headers, buffers = encode(batches)
        for sibling in self._siblings:
            await self._line.tell(sibling, CALL, [name, argument, headers], buffers)


class CallQueue:
    """On a sibling: the calls of its leader that were not run yet, in order."""

    def __init__(self, line: LineClient, leader: str) -> None:
        """`line`: to the leader. `leader`: the leader's name."""
        self.leader = leader
        # Holds at most the calls of one step, because the leader waits for this rank at the end of each step.
        self._calls = asyncio.Queue[_Call]()
        line.on(CALL, self._on_call)

    async def _on_call(self, peer: str, header: Any, buffers: Sequence[Any]) -> None:
        self._calls.put_nowait((header, buffers))

    async def next(self) -> _Call:
        """Wait for the next call."""
        return await self._calls.get()


class SiblingPump:
    """Stands in for the train pump on a sibling.

    consumes     the calls of the leader's trainer
    produces     the same calls on this rank's trainer; publications (edge 6 of graph.py)
    waits for    the next call; its own publish of the last step
    is woken by  the leader
    """

    def __init__(
        self, ports: Ports, calls: CallQueue, claims: Claims, wait_published: Callable[[int], Awaitable[None]]
    ) -> None:
        """`wait_published(turn)` waits until this rank has published every turn below `turn`."""
        self._ports, self._calls, self._claims, self._wait_published = ports, calls, claims, wait_published
        self._updates = 0  # applied optimizer steps of the open batch
        self._surveyed = ports.loss

    async def run(self, publications: QueueSender[Publication]) -> None:
        """Run the calls of the leader until its `end`. Errors: those of the calls; RankLost if a training rank is lost."""
        recorder = self._ports.recorder
        async with publications, anyio.create_task_group() as tasks:
            # Without this watch nothing would raise if a rank is lost while this rank waits for a call.
            spawn(tasks, "watch of the claims", self._claims.watch, self._ports.ledger.changes)
            while True:
                with recorder.watch("sibling pump", "the next call of the trainer", on=self._calls.leader):
                    (name, argument, headers), buffers = await self._calls.next()
                if name == "end":
                    break
                await self._run_call(name, argument, decode(headers, buffers), publications)
            tasks.cancel_scope.cancel()

    async def _run_call(
        self, name: str, argument: Any, batches: list[Microbatch], publications: QueueSender[Publication]
    ) -> None:
        ports, trainer = self._ports, self._ports.trainer
        if name == "abort":
            self._updates = 0
            return await trainer.abort_train_step()
        await self._wait_published(ports.turn_of(trainer.version))
        match name:
            case "begin":
                await trainer.begin_train_step(self._surveyed if argument else ports.loss)
            case "microbatch":
                await trainer.train_microbatch(batches[0])
            case "logprobs":
                await trainer.compute_logprobs(batches[0], argument)
            case "survey":
                self._surveyed, _ = await trainer.survey(ports.loss, batches)
            case "round":
                assert ports.round is not None
                await ports.round(argument)
            case "finish":
                await self._finish(publications)

    async def _finish(self, publications: QueueSender[Publication]) -> None:
        """Make an optimizer step. After the last optimizer step of a batch, commit the step: every training rank commits it."""
        ports = self._ports
        turn = ports.ledger.turn
        # The weights change, so the step must be committed even if this task is cancelled.
        with anyio.CancelScope(shield=True):
            await ports.trainer.finish_train_step()
            self._updates = (self._updates + 1) % versions_per_batch(ports.config)
            if self._updates:
                return
            await ports.ledger.commit()
        # This rank may generate, too, so its groups may be past their deadline.
        await drop_late(ports)
        await put_item(publications, Publication(turn=turn, version=ports.trainer.version))
