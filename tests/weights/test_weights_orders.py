"""Rank 0's decisions: which version goes to whom, and when; failures, lost nodes and nodes that come later. No tensors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from asyncrl.distributed.line import LineServer
from asyncrl.errors import DivergenceError, RankLost
from asyncrl.weights.broadcast import Stripes, buckets
from asyncrl.weights.orders import MOST_FAILURES, Order, Orders, ServedOrders

SENDERS = ("rank 0", "rank 1")


class Nodes:
    """All nodes. `answers[node]`: what its part of the next broadcasts ends with; None is a success."""

    def __init__(self, receivers: list[str], deadline_s: float) -> None:
        self.sent: list[Order] = []
        self.lost: dict[str, str] = {}
        self.answers: dict[str, list[str | BaseException | asyncio.Event]] = {}
        self.orders = Orders(SENDERS, receivers, self._ask, deadline_s, self.lost.__setitem__)

    async def _ask(self, node: str, order: Order) -> str | None:
        if node == SENDERS[0]:
            self.sent.append(order)
        answer = self.answers[node].pop(0) if self.answers.get(node) else None
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            return None
        return answer

    async def write(self, version: int) -> None:
        await asyncio.gather(*(self.orders.wrote(node, version) for node in SENDERS))

    def versions(self) -> list[tuple[int, list[str]]]:
        return [(order.version, list(order.receivers)) for order in self.sent]


@asynccontextmanager
async def opened(*receivers: str, deadline_s: float = 5.0) -> AsyncIterator[Nodes]:
    nodes = Nodes(list(receivers), deadline_s)
    running = asyncio.create_task(nodes.orders.run())
    try:
        yield nodes
    finally:
        running.cancel()
        await asyncio.wait([running])


def later(call: Awaitable[None]) -> asyncio.Future[None]:
    return asyncio.ensure_future(call)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_an_order_waits_for_all_senders_and_for_a_free_half_of_each_receiver() -> None:
    async with opened("a", "b") as nodes:
        first = later(nodes.orders.next("a", -1))
        one = later(nodes.orders.wrote("rank 0", 0))
        await settle()
        assert not one.done() and nodes.sent == []
        await nodes.orders.wrote("rank 1", 0)
        await one
        for version in (1, 2):
            await nodes.write(version)
        assert nodes.sent == []  # b is not ready, and the senders went on
        await nodes.orders.next("b", -1)
        await first
        assert nodes.versions() == [(2, ["a", "b"])]


async def test_a_sender_gets_its_half_back_only_after_the_broadcast() -> None:
    async with opened("a") as nodes:
        nodes.answers["rank 1"] = [free := asyncio.Event()]
        await nodes.write(0)
        first = later(nodes.orders.next("a", -1))
        await settle()
        wrote = later(nodes.write(1))
        await settle()
        assert not wrote.done() and not first.done()
        free.set()
        await asyncio.gather(wrote, first)


async def test_a_node_that_comes_later_gets_the_version_that_is_there_in_a_group_of_its_own() -> None:
    async with opened("a") as nodes:
        await nodes.write(0)
        await nodes.orders.next("a", -1)
        await nodes.orders.next("b", -1)
        both = later(nodes.orders.next("a", 0)), later(nodes.orders.next("b", 0))
        await nodes.write(1)
        await asyncio.gather(*both)
        alone = later(nodes.orders.next("c", -1)), *(later(nodes.orders.next(node, 1)) for node in ("a", "b"))
        await nodes.write(2)
        await asyncio.gather(*alone)
    assert nodes.versions() == [(0, ["a"]), (0, ["b"]), (1, ["a", "b"]), (2, ["c"]), (2, ["a", "b"])]
    assert [order.group for order in nodes.sent] == [1, 2, 3, 4, 5]
    assert [order.whole for order in nodes.sent] == [True, True, False, True, False]


async def test_no_order_waits_for_a_node_that_starts_with_its_first_version() -> None:
    async with opened("a") as nodes:
        await nodes.write(0)
        await nodes.orders.next("a", -1)
        await nodes.orders.next("b", -1)
        for version in (1, 2):
            await nodes.write(version)
            await nodes.orders.next("a", version - 1)
        # Its workers serve now, and it gets the newest version.
        await nodes.orders.next("b", 0)
        both = later(nodes.orders.next("a", 2)), later(nodes.orders.next("b", 2))
        await nodes.write(3)
        await asyncio.gather(*both)
    assert nodes.versions() == [(0, ["a"]), (0, ["b"]), (1, ["a"]), (2, ["a"]), (2, ["b"]), (3, ["a", "b"])]
    assert nodes.lost == {}


async def test_a_failed_broadcast_is_repeated_in_a_new_group() -> None:
    async with opened("a", "b") as nodes:
        nodes.answers["b"] = ["bucket 1 failed"]
        await nodes.write(0)
        await asyncio.gather(nodes.orders.next("a", -1), nodes.orders.next("b", -1))
        assert nodes.versions() == [(0, ["a", "b"])] * 2 and [order.group for order in nodes.sent] == [1, 2]
        assert nodes.lost == {}


async def test_failures_without_a_lost_node_end_the_run() -> None:
    async with opened("a") as nodes:
        nodes.answers["a"] = ["bucket 1 of 2 from rank 0 of version 0 failed: reset"] * MOST_FAILURES
        await nodes.write(0)
        with pytest.raises(RankLost, match="could not be sent to a, in 3 attempts: a: bucket 1 of 2 from rank 0"):
            await nodes.orders.next("a", -1)
        with pytest.raises(RankLost, match="could not be sent"):
            await nodes.orders.wrote("rank 0", 1)


async def test_a_receiver_that_is_disconnected_or_late_is_lost_and_the_others_go_on() -> None:
    async with opened("a", "b", "c", deadline_s=0.2) as nodes:
        nodes.answers["b"], nodes.answers["a"] = [RankLost("b was killed")], ["bucket 2 failed"]
        nodes.answers["c"] = [asyncio.Event()]
        await nodes.write(0)
        first, *others = (later(nodes.orders.next(node, -1)) for node in ("a", "b", "c"))
        await first
        for other in others:
            with pytest.raises(RankLost, match="given up"):
                await other
        assert nodes.lost["b"] == "b was killed; a: bucket 2 failed"
        assert nodes.lost["c"].startswith("c did not end the broadcast of version 0 within 0.3 s of the first node")
        assert nodes.versions()[-1] == (0, ["a"])
        await nodes.orders.next("c", -1)  # it comes back
        assert nodes.versions()[-1] == (0, ["c"])


@pytest.mark.parametrize("answer", [RankLost("rank 1 was killed"), "late"])
async def test_a_lost_sender_ends_the_run_by_name(answer: RankLost | str) -> None:
    async with opened("a", deadline_s=0.2) as nodes:
        nodes.answers["rank 1"] = [asyncio.Event() if isinstance(answer, str) else answer]
        await nodes.write(0)
        with pytest.raises(RankLost, match="a rank that sends weights is lost: rank 1"):
            await nodes.orders.next("a", -1)


async def test_an_error_of_rank_0_reaches_all_who_wait() -> None:
    async with opened("a") as nodes:
        nodes.answers["a"] = [TypeError("no JSON")]
        await nodes.write(0)
        with pytest.raises(RankLost, match=r"rank 0 cannot send weights: TypeError\('no JSON'\)"):
            await nodes.orders.next("a", -1)


async def test_a_receiver_that_skipped_a_version_is_refused() -> None:
    async with opened("a") as nodes:
        await nodes.write(3)
        await nodes.orders.next("a", -1)
        with pytest.raises(DivergenceError, match="a has version 2 of the weights, but it was sent version 3"):
            await nodes.orders.next("a", 2)
        assert list(nodes.lost) == ["a"]


async def test_a_receiver_that_stops_waiting_is_in_no_order() -> None:
    async with opened("a", "b") as nodes:
        stopped = later(nodes.orders.next("a", -1))
        await settle()
        stopped.cancel()
        await asyncio.wait([stopped])
        await nodes.write(0)
        other = later(nodes.orders.next("b", -1))
        await settle()
        assert nodes.sent == []
        await asyncio.gather(nodes.orders.next("a", -1), other)


@pytest.mark.parametrize("senders", [1, 2, 3])
@pytest.mark.parametrize("total", [64, 640, 10_000_064])
def test_stripes_cover_every_byte_once(senders: int, total: int) -> None:
    rows = buckets(total, senders, 1 << 16)
    assert len(rows) == senders
    pieces = [piece for row in rows for piece in row]
    assert [start for start, _ in pieces] == [0, *(end for _, end in pieces[:-1])] and pieces[-1][1] == total
    assert all(0 < end - start <= 1 << 16 for start, end in pieces)


class Never:
    """A broadcast and its group on NCCL, whose peer is lost."""

    aborted = False

    def is_completed(self) -> bool:
        return False

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> Never:
        return self

    def abort(self) -> None:
        self.aborted = True


def test_a_broadcast_that_never_completes_on_nccl_is_aborted_and_named() -> None:
    stripes, never = Stripes("rank 2", dist.HashStore(), torch.device("cuda"), 0.1), Never()
    stripes._group, stripes._groups = 1, {"rank 0": never}
    failure = stripes.broadcast(Order(7, None, 1, ["rank 0"], ["rank 2"]), torch.zeros(1000))
    assert failure == "bucket 1 of 1 from rank 0 of version 7 failed: TimeoutError: nothing moved for 0.1 s"
    assert never.aborted and stripes._groups == {}


async def test_the_work_of_a_version_grows_with_the_receivers_and_not_with_their_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, notified, notify = [f"rank {number}" for number in range(2, 202)], list[None](), Orders._notify
    monkeypatch.setattr(Orders, "_notify", lambda self: (notified.append(None), notify(self))[1])
    async with opened(*names) as nodes:
        for version in range(3):
            waiting = [later(nodes.orders.next(name, version - 1)) for name in names]
            await nodes.write(version)
            await asyncio.gather(*waiting)
            # Each time all receivers look at their condition.
            assert len(notified) <= 5, f"version {version}"
            notified.clear()
    assert nodes.versions() == [(version, sorted(names)) for version in range(3)]


async def test_the_store_keeps_only_the_keys_of_the_newest_process_groups() -> None:
    desk = ServedOrders(LineServer("a secret of the tests"), ["rank 0"], [], 5.0, lambda node, reason: None)

    async def form(order: Order) -> None:
        await asyncio.to_thread(desk.store.set, f"weights/{order.group}/rank 0/0", "an address")

    desk.on_order(form)
    for group in (1, 2, 2, 3):
        await desk._ask("rank 0", Order(0, None, group, ["rank 0"], []))
    assert await asyncio.to_thread(desk.store.get, "weights/3/rank 0/0") == b"an address"
    for group in (1, 2):
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(desk.store.wait, [f"weights/{group}/rank 0/0"], timedelta(seconds=0.05))
