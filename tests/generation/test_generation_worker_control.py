"""The control line: order, bounds, ends, and what garbage and a dead other side do to it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psutil
import pytest
import uvloop

from asyncrl.errors import TransportError
from asyncrl.generation.worker import control as room
from asyncrl.generation.worker.control import LONGEST, UNREAD, ControlLine

Pair = tuple[ControlLine, ControlLine]


def made() -> Pair:
    ours, theirs = socket.socketpair()
    return ControlLine(ours, "worker 0"), ControlLine(theirs, "the node")


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
async def raw() -> AsyncIterator[tuple[ControlLine, socket.socket]]:
    """The node's end, and the bare socket at the other."""
    ours, theirs = socket.socketpair()
    node = ControlLine(ours, "worker 0")
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
    sizes = [0, 1, 10, 3 << 20, 5, LONGEST - 100, 7, *range(200)]

    async def all_of(line: ControlLine) -> list[dict[str, Any]]:
        return [await line.receive() for _ in sizes]

    for number, size in enumerate(sizes):
        node.send({"n": number, "x": "x" * size})
        worker.send({"n": -number, "line": "a\nb\u2028\0é"})
    heard, answers = await asyncio.gather(all_of(worker), all_of(node))
    assert [(each["n"], len(each["x"])) for each in heard] == list(enumerate(sizes))
    assert answers == [{"n": -number, "line": "a\nb\u2028\0é"} for number in range(len(sizes))]
    node.close()
    worker.close()


async def test_drain_returns_once_the_other_side_has_read(pair: Pair) -> None:
    node, worker = pair
    await node.drain()
    node.send({"x": "x" * (4 << 20)})
    drained = asyncio.ensure_future(node.drain())
    await turns(5)
    assert not drained.done()
    await worker.receive()
    await drained


async def test_who_does_not_read_is_an_error_by_name_and_not_a_wait(pair: Pair) -> None:
    node, worker = pair
    block = {"x": "x" * (LONGEST - 100)}
    for _ in range(UNREAD // LONGEST):
        node.send(block)
    with pytest.raises(TransportError, match=r"worker 0 does not read its control line, [\d,]{10} bytes wait there"):
        for _ in range(2):
            node.send(block)
    for _ in range(UNREAD // LONGEST):
        assert await worker.receive() == block  # what was taken is not lost by that


async def test_a_message_that_is_too_long_is_refused_where_it_is_made(pair: Pair) -> None:
    node, worker = pair
    with pytest.raises(TransportError, match=r"a message of [\d,]+ bytes for worker 0; a control line takes at most"):
        node.send({"x": "x" * LONGEST})
    fits = {"x": "x" * (LONGEST - len('{"x":""}'))}
    node.send(fits)
    assert await worker.receive() == fits


async def test_what_comes_while_nobody_receives_is_bounded(raw: tuple[ControlLine, socket.socket]) -> None:
    node, theirs = raw
    line = b'{"x":"' + b"x" * 1000 + b'"}\n'
    loop = asyncio.get_running_loop()
    sent = 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5) as limit:
            while True:
                await loop.sock_sendall(theirs, line * 1000)
                sent += 1000
                if sent * len(line) > LONGEST:
                    limit.reschedule(loop.time() + 0.2)
    assert len(node._received) <= LONGEST + room._CHUNK
    for _ in range(sent):
        assert len((await node.receive())["x"]) == 1000


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


async def test_a_side_that_dies_in_the_middle_of_a_message_has_closed(
    raw: tuple[ControlLine, socket.socket],
) -> None:
    node, theirs = raw
    theirs.send(b'{"a":1}\n{"b":')
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
    "text": b"Traceback (most recent call last):\n",
    "no object": b"[1, 2]\n",
    "empty": b"\n",
    "bytes": b'\xff\xfe\x00{"a"\n',
    "two objects": b'{"a":1}{"b":2}\n',
    "deep": b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"\n",
}


@pytest.mark.parametrize("kind", GARBAGE)
async def test_garbage_is_an_error_that_shows_it(kind: str, raw: tuple[ControlLine, socket.socket]) -> None:
    node, theirs = raw
    theirs.send(GARBAGE[kind])
    with pytest.raises(TransportError) as caught:
        await node.receive()
    shown = repr(GARBAGE[kind].rstrip(b"\n")[:80])
    assert str(caught.value).startswith(f"worker 0 wrote into its control line what is no JSON object: {shown}")


async def test_a_line_without_an_end_is_an_error_and_not_all_of_memory(
    raw: tuple[ControlLine, socket.socket],
) -> None:
    node, theirs = raw
    endless = asyncio.ensure_future(
        asyncio.get_running_loop().sock_sendall(theirs, b"spam " * (2 * LONGEST // len(b"spam ")))
    )
    for _ in range(2):
        with pytest.raises(TransportError, match=r"worker 0 wrote a line of more than 16,777,216 bytes.*spam spam"):
            await node.receive()
    assert len(node._received) <= LONGEST + room._CHUNK
    endless.cancel()
    await asyncio.wait([endless])


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


@pytest.mark.parametrize("count", range(4))
async def test_a_drain_that_is_cancelled_changes_nothing(count: int, pair: Pair) -> None:
    node, worker = pair
    message = {"x": "x" * (2 << 20)}
    node.send(message)
    draining = asyncio.ensure_future(node.drain())
    await turns(count)
    draining.cancel()
    await asyncio.wait([draining])
    assert draining.cancelled()
    assert await worker.receive() == message
