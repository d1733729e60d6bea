"""Decides in the process of rank 0 which version of the weights is broadcast to which nodes, and when.

    a sender      wrote(v)     v is in a half of its board. Returns once all senders hold v and no older version is being sent
    a receiver    next(has)    a half of its board is free. Returns when the receiver has got a version newer than `has`
    rank 0        ask(order)   all senders and receivers of the order run this broadcast, and answer at its end

Senders are the training ranks, receivers the nodes that only generate. A board is memory for two versions, one in each half. Rank 0
sends an order once all senders hold a newer version than some receivers have, and each of these receivers has a free half. Until
then training goes on, and the next order has the newest version. Senders keep a version until `wrote` of the next version returns.

A failed broadcast is repeated in new process groups. A node is lost if it is disconnected, or if it does not answer within the
deadline after the first answer. The run goes on without a lost receiver. A lost sender ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import anyio

from asyncrl.distributed.connections import KeyValues, LineStore
from asyncrl.distributed.line import LineClient, LineServer
from asyncrl.errors import AsyncrlError, DivergenceError, RankLost

MOST_FAILURES = 3  # failed broadcasts in a row; a lost node resets the count


class Order(NamedTuple):
    """One broadcast, in JSON types. `group`: serial number of its set of process groups. `outputs`: see `PostedVersion`. `whole`:
    send all weights, even if the run trains only adapters, because the receivers have no weights yet."""

    version: int
    outputs: Sequence[float] | None
    group: int
    senders: Sequence[str]
    receivers: Sequence[str]
    whole: bool = False


class Orders:
    """See the module docstring. A node is known by its name on the line (`distributed/line.py`). Use it on one event loop."""

    def __init__(
        self,
        senders: Collection[str],
        receivers: Collection[str],
        ask: Callable[[str, Order], Awaitable[str | None]],
        deadline_s: float,
        on_lost: Callable[[str, str], None],
    ) -> None:
        """`receivers`: the nodes at the start; the first order waits for all of them. Receivers may come later. No order waits for
        such a receiver while its workers start. `ask(node, order)` returns None, or a sentence if the broadcast failed at the node.
        `deadline_s`: for a node's broadcast. `on_lost(node, sentence)` is called for each lost receiver."""
        self._written = dict.fromkeys(senders, -1)  # sender -> newest version that it holds
        self._versions = dict.fromkeys(receivers, -1)  # receiver -> newest version that it got
        self._initial = {*receivers}
        # Longer than `deadline_s`: if one node hangs, other nodes fail after `deadline_s` and need time to report that.
        self._ask, self._deadline_s, self._on_lost = ask, 1.5 * deadline_s, on_lost
        self._outputs: dict[int, Sequence[float] | None] = {}
        self._held = -1  # the newest version that all senders hold
        self._ready = set[str]()  # receivers with a free half
        # Receivers that came later, got their first version and have not called `next` again: their workers are starting.
        self._starting = set[str]()
        self._group, self._members = 0, list[str]()  # `Order.group` and its receivers; [] after a failure
        self._failures = 0  # in a row
        self._changed = asyncio.Event()
        self._error: RankLost | None = None

    async def wrote(self, node: str, version: int, outputs: Sequence[float] | None = None) -> None:
        """A sender holds `version`. `outputs`: log-probs of the fixed row (sync.py), only from rank 0. Errors: RankLost."""
        if outputs is not None:
            self._outputs[version] = outputs
        self._written[node] = max(self._written[node], version)
        if min(self._written.values()) > self._held:
            self._notify()
        await self._until(lambda: self._held >= version)

    async def next(self, node: str, has: int) -> None:
        """A receiver has a free half, and its workers have version `has`; -1: no version. Errors: RankLost; DivergenceError if a
        newer version than `has` was sent to this receiver."""
        sent = self._versions.get(node, -1)
        if has < sent:
            sentence = f"{node} has version {has} of the weights, but it was sent version {sent}"
            self.lose(node, sentence)
            raise DivergenceError(sentence)
        self._versions[node] = has
        self._starting.discard(node)
        self._ready.add(node)
        # Notify only if an order is now possible, because each notification makes all waiting tasks check their conditions.
        if has < self._held and self._next_receivers() is not None:
            self._notify()
        try:
            await self._until(lambda: self._versions.get(node, has + 1) > has)
        finally:
            self._ready.discard(node)
        if node not in self._versions:
            raise RankLost(f"{node} was given up while it waited for weights; see the output of rank 0")

    def lose(self, node: str, reason: str) -> None:
        """Give up a node. A lost receiver gets orders again if it calls `next` again. The loss of a sender ends `run`."""
        if node in self._written:
            self._error = self._error or RankLost(f"a rank that sends weights is lost: {reason}")
            self._notify()
        elif self._versions.pop(node, None) is not None:
            self._on_lost(node, reason)
            self._notify()

    async def run(self) -> None:
        """Send orders until cancelled. After an error of `run` all other calls raise RankLost, so that no node waits for ever."""
        try:
            await self._run()
        except Exception as error:
            self._error = error if isinstance(error, RankLost) else RankLost(f"rank 0 cannot send weights: {error!r}")
            self._notify()
            raise

    async def _run(self) -> None:
        while True:
            await self._until(lambda: min(self._written.values()) > self._held or self._next_receivers() is not None)
            self._held = min(self._written.values())
            self._outputs = {version: row for version, row in self._outputs.items() if version >= self._held}
            self._notify()
            if (receivers := self._next_receivers()) is not None:
                await self._broadcast(receivers)

    def _next_receivers(self) -> list[str] | None:
        """The receivers of the next order. None if no receiver needs `_held`, or a receiver of this order has no free half."""
        behind = [n for n, version in self._versions.items() if version < self._held and n not in self._starting]
        # Nodes without weights come first, in a separate order: they need all weights, other nodes perhaps only adapters.
        behind = [node for node in behind if self._versions[node] < 0] or behind
        return sorted(behind) if behind and self._ready.issuperset(behind) else None

    async def _broadcast(self, receivers: list[str]) -> None:
        if receivers != self._members:
            self._group, self._members = self._group + 1, receivers
        outputs, whole = self._outputs.get(self._held), self._versions[receivers[0]] < 0
        order = Order(self._held, outputs, self._group, sorted(self._written), receivers, whole)
        tasks = {node: asyncio.ensure_future(self._ask(node, order)) for node in (*order.senders, *receivers)}
        try:
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
            with anyio.move_on_after(self._deadline_s):
                await asyncio.wait(tasks.values())
            failures, lost = self._answers(order, tasks)
        finally:
            for task in tasks.values():
                task.cancel()
        for node in receivers:
            if not failures and node in self._versions:
                if self._versions[node] < 0 and node not in self._initial:
                    self._starting.add(node)
                self._versions[node] = order.version
                # `next` of this node returns soon, and its half is not free any more.
                self._ready.discard(node)
        for node, reason in lost.items():
            self.lose(node, f"{reason}; {failures[0]}" if failures else reason)
        self._notify()
        self._failures = self._failures + 1 if failures and not lost else 0
        if failures:
            self._members = []
        if self._failures == MOST_FAILURES:
            raise RankLost(
                f"version {order.version} of the weights could not be sent to {', '.join(receivers)}, in {MOST_FAILURES} attempts: "
                f"{failures[0]}"
            )

    def _answers(
        self, order: Order, tasks: Mapping[str, asyncio.Future[str | None]]
    ) -> tuple[list[str], dict[str, str]]:
        """(a sentence for each node at which the broadcast failed, lost node -> reason)."""
        failures, lost = list[str](), dict[str, str]()
        for node, task in tasks.items():
            if not task.done():
                lost[node] = (
                    f"{node} did not end the broadcast of version {order.version} within {self._deadline_s:g} s of the first node"
                )
            elif isinstance(error := task.exception(), RankLost):
                lost[node] = str(error)
            elif isinstance(error, AsyncrlError):
                failures.append(f"{node}: {error}")
            elif (sentence := task.result()) is not None:
                failures.append(f"{node}: {sentence}")
        return failures, lost

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while self._error is None and not condition():
            await self._changed.wait()
        if self._error is not None:
            raise self._error


class ServedOrders:
    """The `Orders` of rank 0, and the handlers of other nodes' calls. A task must run `orders.run`. `store`: for process groups."""

    def __init__(
        self,
        server: LineServer,
        senders: Collection[str],
        receivers: Collection[str],
        deadline_s: float,
        on_lost: Callable[[str, str], None],
    ) -> None:
        """See `Orders`. `server.name` is one of the senders. The caller must call `orders.lose` when the server loses a peer."""
        self.orders = Orders(senders, receivers, self._ask, deadline_s, on_lost)
        self._server = server
        self._model: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        server.on("weights/model", self._on_model)
        server.on("weights/wrote", self._on_wrote)
        server.on("weights/next", self._on_next)
        self._values = KeyValues()
        server.on("weights/store", self._values.answer)
        self.store = LineStore(partial(self._values.answer, server.name))

    def describe(self, model: Mapping[str, Any]) -> None:
        """Set what receivers need to start workers, in JSON types. `LineOrders.model` waits for this call and returns `model`."""
        self._model.set_result(model)

    async def wrote(self, version: int, outputs: Sequence[float] | None) -> None:
        await self.orders.wrote(self._server.name, version, outputs)

    async def next(self, has: int) -> None:
        await self.orders.next(self._server.name, has)

    def on_order(self, run: Callable[[Order], Awaitable[str | None]]) -> None:
        """Register `run(order)`, which runs this node's part of a broadcast. Register it before any other call."""
        self._run_own = run

    async def _ask(self, node: str, order: Order) -> str | None:
        # Delete the keys of earlier process groups, or they would pile up in a run whose nodes come and go.
        self._values.keep(f"weights/{order.group}/")
        if node == self._server.name:
            return await self._run_own(order)
        failure: str | None = (await self._server.ask(node, "weights/broadcast", tuple(order)))[0]
        return failure

    async def _on_model(self, *_: object) -> tuple[Mapping[str, Any], tuple[()]]:
        # `shield`: a cancelled call of one node must not cancel the future of all nodes.
        return await asyncio.shield(self._model), ()

    async def _on_wrote(self, node: str, version: int, _: object) -> None:
        await self.orders.wrote(node, version)

    async def _on_next(self, node: str, has: int, _: object) -> None:
        await self.orders.next(node, has)


class LineOrders:
    """As `ServedOrders`, on every node but rank 0: each call asks rank 0 over the line."""

    def __init__(self, client: LineClient) -> None:
        self._client = client
        self.store = LineStore(partial(client.ask, "weights/store"))

    async def model(self) -> Mapping[str, Any]:
        """The argument of rank 0's `describe`. Errors: RankLost."""
        model: Mapping[str, Any] = (await self._client.ask("weights/model"))[0]
        return model

    async def wrote(self, version: int, outputs: Sequence[float] | None) -> None:
        await self._client.ask("weights/wrote", version)

    async def next(self, has: int) -> None:
        await self._client.ask("weights/next", has)

    def on_order(self, run: Callable[[Order], Awaitable[str | None]]) -> None:
        async def handle(_: str, order: Sequence[Any], __: object) -> tuple[str | None, tuple[()]]:
            return await run(Order(*order)), ()

        self._client.on("weights/broadcast", handle)


OrderDesk: TypeAlias = ServedOrders | LineOrders  # a node's access to rank 0's `Orders`
