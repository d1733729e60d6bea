"""With LoRA the adapters travel, and the receivers merge them. All nodes are in this process, and broadcast over gloo."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from weights_helpers import trained

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.transport.memory.board import Board
from asyncrl.weights import broadcast
from asyncrl.weights.broadcast import GeneratingNodes, Stripes, WeightReceiver
from asyncrl.weights.orders import Order, Orders
from asyncrl.weights.sync import WeightPublisher

SENDERS = ("rank 0", "rank 1")
Run = Callable[[Order], Awaitable[str | None]]


class Desk:
    """`Orders` as one node calls them, without a line."""

    def __init__(self, orders: Orders, name: str, runs: dict[str, Run]) -> None:
        self._orders, self._name, self._runs = orders, name, runs

    async def wrote(self, version: int, outputs: object) -> None:
        await self._orders.wrote(self._name, version)

    async def next(self, has: int) -> None:
        await self._orders.next(self._name, has)

    def on_order(self, run: Run) -> None:
        self._runs[self._name] = run


class Moved:
    """Workers that move at once."""

    async def update_weights(self, *to: object) -> None:
        return

    def reads(self, half: int) -> bool:
        return False

    async def wait_unread(self, half: int) -> None:
        raise AssertionError("no worker is pinned")


class CountedStripes(Stripes):
    """`carried`: the sizes of its broadcasts in bytes."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.carried = list[int]()

    def broadcast(self, order: Order, half: Tensor, *read: Callable[[int, int], Tensor]) -> str | None:
        self.carried.append(half.nbytes)
        return super().broadcast(order, half, *read)


class Nodes:
    """Training ranks with the same weights, and receivers."""

    def __init__(self, kind: str, stack: AsyncExitStack) -> None:
        self.cases = {name: trained(kind) for name in SENDERS}
        self.policy = self.cases["rank 0"].policy
        self._stack, self._store, self._runs = stack, dist.HashStore(), dict[str, Run]()
        orders = self._orders = Orders(SENDERS, ["a"], lambda node, order: self._runs[node](order), 20.0, print)
        self._publishers = dict[str, WeightPublisher]()
        task = asyncio.create_task(orders.run())
        stack.callback(task.cancel)

    async def _parts(self, name: str) -> tuple[Board, CountedStripes, ThreadLane, Desk]:
        lane = await self._stack.enter_async_context(ThreadLane("weights"))
        stripes = CountedStripes(name, self._store, torch.device("cpu"), 20.0)
        self._stack.push_async_callback(lane.run, stripes.close, name="close")
        weights = self.policy.weights
        digest = weights.layout_digest()
        board = await asyncio.to_thread(Board.create, weights.size, self.policy.dtype, digest)
        self._stack.push_async_callback(asyncio.to_thread, board.close)
        return board, stripes, lane, Desk(self._orders, name, self._runs)

    async def send_first(self, name: str) -> None:
        board, stripes, lane, desk = await self._parts(name)
        policy = self.cases[name].policy
        nodes = GeneratingNodes(board, stripes, lane, desk, policy.lora)
        own = await self._stack.enter_async_context(ThreadLane("cpu"))
        self._publishers[name] = WeightPublisher(policy, board, nodes, own, nodes.adapters)
        await nodes.update_weights(*await self._publishers[name].post_first())

    async def receiver(self, name: str) -> tuple[WeightReceiver, Board, CountedStripes]:
        """A receiver that has the first version."""
        board, stripes, lane, desk = await self._parts(name)
        assert self.policy.lora is not None
        lora = json.loads(json.dumps(self.policy.lora.describe()))
        receiver = WeightReceiver(board, Moved(), stripes, lane, desk, lora)
        await receiver.post_first()
        assert await receiver.next() == self.policy.version
        return receiver, board, stripes

    async def step(self) -> int:
        """All training ranks take the same step, and send it."""
        versions = [case.step() for case in self.cases.values()]
        await asyncio.gather(*(each.update_weights(versions[0]) for each in self._publishers.values()))
        return versions[0]

    def has(self, board: Board, receiver: WeightReceiver) -> bool:
        """Whether the receiver's half has the bits of the trainer's weights."""
        half = board.half(receiver.current.half)
        return torch.equal(half.view(torch.uint8), self.policy.weights.working.view(torch.uint8))


@asynccontextmanager
async def opened(kind: str) -> AsyncIterator[Nodes]:
    async with AsyncExitStack() as stack:
        yield Nodes(kind, stack)


@pytest.mark.parametrize("kind", ["lora bfloat16", "lora float32", "lora float64"])
async def test_receivers_merge_the_adapters_to_the_bits_of_the_trainer(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`b` comes after two versions, and needs weights that no other node has unmerged."""
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 1 << 13)
    async with opened(kind) as nodes:
        (a, board_a, stripes_a), *_ = await asyncio.gather(nodes.receiver("a"), *map(nodes.send_first, SENDERS))
        assert nodes.has(board_a, a)
        for _ in range(2):
            version, found = await asyncio.gather(nodes.step(), a.next())
            assert version == found and nodes.has(board_a, a)
        b, board_b, stripes_b = await nodes.receiver("b")
        assert nodes.has(board_b, b)
        for _ in range(3):
            version, found, found_b = await asyncio.gather(nodes.step(), a.next(), b.next())
            assert version == found == found_b
            assert nodes.has(board_a, a) and nodes.has(board_b, b)
        half, adapters = board_a.nbytes, nodes.policy.flat.master.nbytes
        assert stripes_a.carried == [half, *[adapters] * 6] and stripes_b.carried == [half, *[adapters] * 4]


async def test_a_broadcast_of_adapters_that_failed_is_repeated() -> None:
    async with opened("lora bfloat16") as nodes:
        (a, board, stripes), *_ = await asyncio.gather(nodes.receiver("a"), *map(nodes.send_first, SENDERS))
        right, failures = stripes.broadcast, ["bucket 1 was lost"]

        def fail_once(*given: object) -> str | None:
            return right(*given) or (failures.pop() if failures else None)  # type: ignore[arg-type]

        stripes.broadcast = fail_once  # type: ignore[method-assign]  # the fault
        version, found = await asyncio.gather(nodes.step(), a.next())
        assert version == found and nodes.has(board, a) and failures == []
        assert len(stripes.carried) == 4
