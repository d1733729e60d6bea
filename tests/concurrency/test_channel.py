"""The channel between a process and its child: order, ends, and what garbage and a dead other side do to it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psutil
import pytest
import uvloop

from asyncrl.concurrency.channel import Channel, decode, encode
from asyncrl.errors import TransportError

Pair = tuple[Channel, Channel]


def made() -> Pair:
    ours, theirs = socket.socketpair()
    return Channel(ours, "worker 0"), Channel(theirs, "the node")


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """The node's end and the worker's."""
    before = psutil.Process().num_fds()
    node, worker = made()
    yield node, worker
    node.close()
    worker.close()
    assert psutil.Process().num_fds() == before


@pytest.fixture
async def raw() -> AsyncIterator[tuple[Channel, socket.socket]]:
    """The node's end, and the bare socket at the other."""
    ours, theirs = socket.socketpair()
    node = Channel(ours, "worker 0")
    theirs.setblocking(False)
    yield node, theirs
    node.close()
    theirs.close()


def both_loops(test: Callable[[], Awaitable[None]]) -> Callable[..., None]:
    @pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
    def under(run: Callable[..., Any]) -> None:
        run(test())

    under.__name__, under.__doc__ = test.__name__, test.__doc__
    return under


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@both_loops
async def test_messages_arrive_whole_and_in_order_in_both_directions() -> None:
    """Some are larger than what a socket holds, and all are on their way at once."""
    node, worker = made()
    sizes = [0, 1, 10, 3 << 20, 5, 16 << 20, 7, *range(200)]

    async def all_of(channel: Channel) -> list[dict[str, Any]]:
        return [await channel.receive() for _ in sizes]

    for number, size in enumerate(sizes):
        node.send({"n": number, "x": "x" * size}, b"\0" * (size % 7))
        worker.send({"n": -number, "line": "a\nb\u2028\0é"})
    heard, answers = await asyncio.gather(all_of(worker), all_of(node))
    assert [(each["n"], len(each["x"]), len(each.get("data", b""))) for each in heard] == [
        (number, size, size % 7) for number, size in enumerate(sizes)
    ]
    assert answers == [{"n": -number, "line": "a\nb\u2028\0é"} for number in range(len(sizes))]
    node.close()
    worker.close()


def test_what_comes_byte_by_byte_is_taken_message_by_message() -> None:
    sent = [({"a": float("nan")}, b""), ({}, b"\0ACM1\n")]
    received, found = bytearray(), []
    for byte in b"".join(encode(*each) for each in sent):
        received.append(byte)
        while (message := decode(received)) is not None:
            found.append(message)
    assert found == [{"a": None}, {"data": b"\0ACM1\n"}] and not received


async def test_drain_returns_once_the_other_side_has_read(pair: Pair) -> None:
    node, worker = pair
    await node.drain()
    node.send({"x": "x" * (4 << 20)})
    drained = asyncio.ensure_future(node.drain())
    await turns(5)
    assert not drained.done()
    await worker.receive()
    await drained


# ---- ends


@both_loops
async def test_the_last_words_of_a_side_that_did_not_read_ours_arrive() -> None:
    """The kernel reports a reset for what it did not read, before the words; and a broken pipe for what we send then."""
    for meanwhile in (0, 1, 3):
        node, worker = made()
        node.send({"weights": 1})
        await node.drain()
        worker.send({"failed": "no such file"})
        worker.send({"failed": "really"})
        worker.close()
        for _ in range(meanwhile):
            node.send({"weights": 2})
        assert await node.receive() == {"failed": "no such file"}
        node.send({"weights": 3})
        assert await node.receive() == {"failed": "really"}
        with pytest.raises(EOFError, match="worker 0"):
            await node.receive()
        node.send({"weights": 4})
        await node.drain()
        node.close()


async def test_a_side_that_dies_in_the_middle_of_a_message_has_closed(raw: tuple[Channel, socket.socket]) -> None:
    node, theirs = raw
    theirs.send(encode({"a": 1}) + encode({"b": 2})[:-1])
    theirs.close()
    assert await node.receive() == {"a": 1}
    with pytest.raises(EOFError):
        await node.receive()


async def test_closing_ends_who_receives_and_who_drains(pair: Pair) -> None:
    node, _ = pair
    node.send({"x": "x" * (4 << 20)})
    waits = [asyncio.ensure_future(each) for each in (node.receive(), node.drain())]
    await turns(3)
    node.close()
    node.close()
    with pytest.raises(EOFError):
        await waits[0]
    await waits[1]
    node.send({"x": 1})


async def test_closing_is_heard_although_a_fork_has_a_copy_of_the_socket(pair: Pair) -> None:
    node, worker = pair
    copy = os.dup(node._socket.fileno())
    try:
        node.send({"a": 1})
        node.close()
        assert await worker.receive() == {"a": 1}
        async with asyncio.timeout(30):
            with pytest.raises(EOFError):
                await worker.receive()
    finally:
        os.close(copy)


# ---- garbage

GARBAGE = {
    "text": (b"Traceback (most recent call last):\n", "no message: b'Traceback"),
    "a line end": (b"\n", "no message"),
    "its first half is right": (b"ACM\n", "no message"),
    "no object": (encode({})[:4] + b"\1\0\0\0" + b"\0" * 8 + b"3", "no JSON object: b'3'"),
    "no JSON": (encode({})[:-1] + b"\xff", r"no JSON object: b'{\\xff'"),
    "all of memory": (encode({})[:4] + b"\xff" * 12, r"a message of [\d,]+ bytes"),
}


@pytest.mark.parametrize("kind", GARBAGE)
async def test_garbage_is_an_error_that_shows_it(kind: str, raw: tuple[Channel, socket.socket]) -> None:
    node, theirs = raw
    sent, words = GARBAGE[kind]
    theirs.send(sent)
    with pytest.raises(TransportError, match=f"worker 0 wrote into its channel .*{words}"):
        await node.receive()


# ---- cancellation


@pytest.mark.parametrize("count", range(6))
async def test_a_receive_that_is_cancelled_took_nothing(count: int, pair: Pair) -> None:
    """After 0, 1, 2, ... turns of the loop: the message is the result, or that of the next call."""
    node, worker = pair
    ends = set()
    for number in range(20):
        receiving = asyncio.ensure_future(worker.receive())
        await turns(number % 2)
        node.send({"n": number})
        await turns(count)
        receiving.cancel()
        await asyncio.wait([receiving])
        ends.add(receiving.cancelled())
        message = await worker.receive() if receiving.cancelled() else receiving.result()
        assert message == {"n": number}
    assert (count == 0) <= (True in ends)
    assert (count == 5) <= (False in ends)
