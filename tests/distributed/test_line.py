"""The line: requests and messages between processes, secrets, lost connections, ends that die or are stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import orjson
import psutil
import pytest
import warm
import zmq

from asyncrl.distributed import exchange
from asyncrl.distributed.connections import Connections
from asyncrl.distributed.exchange import Answer
from asyncrl.distributed.line import LineClient, LineServer
from asyncrl.errors import AsyncrlError, LedgerError, LifecycleError, RankLost, VersionAhead, WorkerDied

ROOT = Path(__file__).resolve().parents[2]
SECRET = "a secret of the test"


async def echo(peer: str, header: Any, buffers: Sequence[Any]) -> Answer:
    return [peer, header], buffers


@asynccontextmanager
async def two_ends(**options: Any) -> AsyncIterator[tuple[LineServer, LineClient]]:
    async with await LineServer(SECRET, **options).open() as server:
        server.on("echo", echo)
        async with LineClient(server.address, SECRET, "rank 1", **options) as client:
            client.on("echo", echo)
            yield server, client


# -- messages --------------------------------------------------------------------------------------------------------


async def test_both_ends_ask_and_tell() -> None:
    told: list[Any] = []

    async def tell(peer: str, header: Any, buffers: Sequence[Any]) -> None:
        told.append((peer, header, [bytes(buffer) for buffer in buffers]))

    async with two_ends() as (server, client):
        for end in (server, client):
            end.on("tell", tell)
        header, [buffer] = await client.ask("echo", {"a": 1}, [b"x"])
        assert header == ["rank 1", {"a": 1}] and bytes(buffer) == b"x"
        assert (await server.ask("rank 1", "echo", 2))[0] == ["rank 0", 2]
        await client.tell("tell", 3, [b"y", b""])
        await server.tell("rank 1", "tell", 4)
        await server.tell_all("tell", 5)
        await client.ask("echo")
        await server.ask("rank 1", "echo")
        assert server.peers == ["rank 1"]
        assert sorted(told, key=lambda each: int(each[1])) == [
            ("rank 1", 3, [b"y", b""]),
            ("rank 0", 4, []),
            ("rank 0", 5, []),
        ]
        with pytest.raises(RankLost, match="rank 7 is not connected"):
            await server.ask("rank 7", "echo")


async def test_large_buffers_arrive_bit_by_bit() -> None:
    sizes = (0, 1, 65_535, 65_536, 30_000_000)
    buffers = [random.Random(size).randbytes(size) for size in sizes]
    async with two_ends() as (_, client):
        _, received = await client.ask("echo", None, [*buffers[:-1], memoryview(buffers[-1])])
        assert [bytes(buffer) for buffer in received] == buffers


async def test_an_error_of_the_handler_has_the_same_class(caplog: pytest.LogCaptureFixture) -> None:
    made = {
        "LedgerError": LedgerError("no slot"),
        "VersionAhead": VersionAhead("version 7"),
        "WorkerDied": WorkerDied(1, 2, "ended", "its output"),
        "KeyError": KeyError("a bug"),
    }

    async def fails(peer: str, header: str, buffers: Sequence[Any]) -> Answer:
        raise made[header]

    async with two_ends() as (server, client):
        server.on("fails", fails)
        for name, error in made.items():
            with pytest.raises(AsyncrlError) as raised:
                await client.ask("fails", name)
            assert type(raised.value) is (type(error) if name in ("LedgerError", "VersionAhead") else AsyncrlError)
            assert str(error.args[0]) in str(raised.value)
        with pytest.raises(LifecycleError, match="rank 0 has no handler for 'unknown', which rank 1 sent"):
            await client.ask("unknown")
        await client.tell("fails", "LedgerError")
        await client.ask("echo")
    assert "rank 0 could not handle 'fails' of rank 1: LedgerError: no slot" in caplog.text
    assert "Traceback" in caplog.text, "a bug shows where it is"


async def test_a_slow_handler_blocks_no_other_and_messages_start_in_their_order() -> None:
    gate, started = asyncio.Event(), list[int]()

    async def slow(peer: str, header: int, buffers: Sequence[Any]) -> Answer:
        started.append(header)
        if not header:
            await gate.wait()
        return header, ()

    async with two_ends() as (server, client):
        server.on("slow", slow)
        first = asyncio.ensure_future(client.ask("slow", 0))
        await asyncio.sleep(0)
        for number in range(1, 100):
            await client.tell("slow", number)
        assert (await client.ask("slow", 100))[0] == 100 and not first.done()
        assert started == [*range(101)]
        gate.set()
        assert (await first)[0] == 0


async def test_calls_wait_for_the_window_and_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "WINDOW", 4)
    gate, handled = asyncio.Event(), list[int]()

    async def slow(peer: str, header: int, buffers: Sequence[Any]) -> None:
        await gate.wait()
        handled.append(header)

    async with two_ends() as (server, client):
        server.on("slow", slow)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(client.tell("slow", number)) for number in range(40)]
            await until(lambda: sum(task.done() for task in tasks) >= 4)
            await asyncio.sleep(0.05)
            assert sum(task.done() for task in tasks) == 4
            for task in tasks[20:30]:
                task.cancel()
            gate.set()
        await client.ask("slow", 40)
    assert handled == [*range(20), *range(30, 41)]


async def test_a_call_may_be_cancelled_at_every_await(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler is cancelled too, its place in the window comes back, and the line keeps nothing of it."""
    monkeypatch.setattr(exchange, "WINDOW", 3)
    running = 0

    async def slow(peer: str, header: int, buffers: Sequence[Any]) -> Answer:
        nonlocal running
        running += 1
        try:
            for _ in range(header):
                await asyncio.sleep(0.0005)
        finally:
            running -= 1
        return header, buffers

    async with two_ends() as (server, client):
        server.on("slow", slow)
        rng = random.Random(1)
        for _ in range(60):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(client.ask("slow", rng.randrange(4), [b"x"])) for _ in range(5)]
                for _ in range(rng.randrange(30)):
                    await asyncio.sleep(0.0001)
                for task in rng.sample(tasks, 3):
                    task.cancel()
            assert all(task.cancelled() or task.result()[0] in range(4) for task in tasks)
        with pytest.raises(TypeError):
            await client.ask("slow", object())
        await until(lambda: not client._exchange._sent and not running)
        assert (await client.ask("echo", 1))[0] == ["rank 1", 1]
        [link] = server._peers.values()
        assert client._exchange._window._value == 3 and len(link._answers) <= 1 and not link._running


async def test_closing_ends_calls_and_handlers_and_leaves_nothing() -> None:
    me = psutil.Process()
    before, descriptors = set(threading.enumerate()), me.num_fds()
    cancelled: list[str] = []

    async def forever(peer: str, header: Any, buffers: Sequence[Any]) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.append(peer)

    async with two_ends() as (server, client):
        for end in (server, client):
            end.on("forever", forever)
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(_error(client.ask("forever"))),
                group.create_task(_error(server.ask("rank 1", "forever"))),
            ]
            await client.ask("echo")
            await server.ask("rank 1", "echo")
            await client.aclose()
        assert [type(task.result()) for task in asked] == [LifecycleError, RankLost]
        with pytest.raises(LifecycleError):
            await client.tell("echo")
    assert sorted(cancelled) == ["rank 0", "rank 1"]
    # zmq's own threads end a moment after `term`.
    await until(lambda: me.num_fds() <= descriptors)
    assert {*threading.enumerate()} <= before


async def test_a_server_waits_for_clients_until_they_leave_and_names_the_others() -> None:
    async with await LineServer(SECRET, silence_s=0.5).open() as server, Wire(server.address) as wire:
        server.on("echo", echo)
        clients = [LineClient(server.address, SECRET, f"rank {rank}", silence_s=60.0) for rank in (1, 2)]
        async with clients[0], clients[1]:
            leaving = asyncio.ensure_future(server.leave(60.0))
            assert await clients[0].leave(60.0) == []
            assert (await clients[1].ask("echo", 1))[0] == ["rank 2", 1] and not leaving.done()
            # A goodbye suffices.
            await clients[1].aclose()
            assert await leaving == [] and await server.leave(60.0) == []
            async with LineClient(wire.address, SECRET, "rank 2", silence_s=60.0):
                assert await server.leave(0.0) == ["rank 2"], "it is back"
                wire.refuses = True
                wire.cut()
                with anyio.fail_after(30):
                    assert await server.leave(60.0) == ["rank 2"], "it is lost"
        closed = LineServer(SECRET)
        assert await closed.leave(60.0) == [] and await clients[0].leave(60.0) == []


async def test_an_end_that_is_disconnected_is_named_until_it_is_back() -> None:
    async with await LineServer(SECRET).open() as server, Wire(server.address) as wire:
        async with LineClient(wire.address, SECRET, "rank 1") as client:
            assert client.silent() == server.silent() == []
            wire.refuses = True
            wire.cut()
            await until(lambda: bool(client.silent() and server.silent()))
            assert server.silent() == ["rank 1 has given no sign of life for 0 s"]
            assert client.silent() == ["rank 0 has given no sign of life for 0 s"]
            wire.refuses = False
            await until(lambda: client.silent() == server.silent() == [])
        assert server.silent() == client.silent() == []


async def test_an_error_while_the_loss_of_one_end_is_handled_hides_no_other_loss() -> None:
    lost = list[str]()

    def on_end(peer: str, error: RankLost | None) -> None:
        lost.append(peer)
        raise ValueError("of the test")

    async with await LineServer(SECRET, silence_s=0.5, on_end=on_end).open() as server, Wire(server.address) as wire:
        clients = [LineClient(wire.address, SECRET, f"rank {rank}", silence_s=60.0) for rank in (1, 2)]
        async with clients[0], clients[1]:
            wire.refuses = True
            wire.cut()
            await until(lambda: sorted(lost) == ["rank 1", "rank 2"])
            server.on_end = None


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not condition():  # noqa: ASYNC110  # of threads and processes
            await asyncio.sleep(0.001)


async def _error(call: Any) -> BaseException | None:
    try:
        await call
    except Exception as error:
        return error
    return None


# -- secrets ---------------------------------------------------------------------------------------------------------


async def test_without_the_secret_there_is_no_connection_and_the_server_logs_each_address_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # The first bytes of a zmq client without encryption.
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    async with two_ends() as (server, client):
        host, _, port = server.address.removeprefix("tcp://").rpartition(":")
        for first_bytes, is_seen in ((greeting, True), (greeting, False), (b"GET / HTTP/1.0\r\n\r\n" * 20, False)) * 2:
            with socket.create_connection((host, int(port)), 30) as stranger, contextlib.suppress(ConnectionResetError):
                if is_seen:
                    await until(lambda: [*server._connections.values()] == ["127.0.0.1"] * 2)
                stranger.sendall(first_bytes)
                # Block the event loop until zmq's thread has closed the connection.
                while stranger.recv(1000):
                    pass
            await until(lambda: len(server._connections) == 1)
        with pytest.raises(RankLost, match=r"rank 2 could not connect to rank 0 .* another ASYNCRL_SECRET"):
            async with LineClient(server.address, SECRET + "s", "rank 2", silence_s=1.0):
                pass
        assert (await client.ask("echo", 1))[0] == ["rank 1", 1] and server.peers == ["rank 1"]
    known, unknown = [each.getMessage() for each in caplog.records if "refused" in each.getMessage()]
    assert "from 127.0.0.1, which does not know the secret" in known and "ASYNCRL_SECRET" in known
    assert "from an unknown address, which does not know the secret" in unknown


async def test_an_empty_secret_and_a_used_port_are_refused() -> None:
    with pytest.raises(LifecycleError, match="needs the secret"):
        LineServer("")
    async with await LineServer(SECRET).open() as server:
        with pytest.raises(OSError, match="cannot listen"):
            await LineServer(SECRET).open(port=int(server.address.rpartition(":")[2]))
    with pytest.raises(LifecycleError, match="not connected"):
        await LineClient(server.address, SECRET, "rank 1").ask("echo")


# -- connections that break, ends that die ---------------------------------------------------------------------------


class Wire:
    """A TCP connection between client and server that can be cut, with the bytes that are under way."""

    def __init__(self, address: str) -> None:
        self._port = int(address.rpartition(":")[2])
        self._writers: set[asyncio.StreamWriter] = set()
        self.cuts = 0
        self.refuses = False

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        self.cut()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            return writer.close()
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, far_writer}
        await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer), return_exceptions=True)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(300):
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    def cut(self) -> None:
        self.cuts += bool(self._writers)
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


async def test_a_message_that_is_lost_with_its_connection_is_handled_once_and_in_its_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "WINDOW", 8)
    handled: dict[str, list[int]] = {"rank 0": [], "rank 1": []}

    async def count(peer: str, header: int, buffers: Sequence[Any]) -> Answer:
        handled[peer].append(header)
        await asyncio.sleep(0.001 * (header % 5))
        return header, buffers

    async with await LineServer(SECRET).open() as server, Wire(server.address) as wire:
        server.on("count", count)
        async with LineClient(wire.address, SECRET, "rank 1") as client:
            client.on("count", count)

            async def cut() -> None:
                rng = random.Random(1)
                while True:
                    await asyncio.sleep(rng.random() * 0.3)
                    wire.cut()

            cutting = asyncio.ensure_future(cut())
            body = random.Random(1).randbytes(3000)
            number = 0
            with anyio.fail_after(120):
                while wire.cuts < 12:
                    numbers = range(number, number + 20)
                    answers = await asyncio.gather(
                        *(client.ask("count", each, [body]) for each in numbers),
                        *(server.ask("rank 1", "count", each, [body]) for each in numbers),
                    )
                    assert [header for header, _ in answers] == [*numbers, *numbers]
                    assert all(bytes(buffer) == body for _, [buffer] in answers)
                    number += 20
            cutting.cancel()
    assert handled == {"rank 0": [*range(number)], "rank 1": [*range(number)]}


async def test_old_messages_of_a_client_that_is_back_stop_no_others(caplog: pytest.LogCaptureFixture) -> None:
    """They were not read, because the server was stopped or busy. zmq gives their connection another name, in any bytes."""
    async with two_ends() as (server, client):
        hello = orjson.dumps((exchange.HELLO, "a session", 0, 0, "", {"protocol": 1, "again": False, "machine": ""}))
        with zmq.Context() as context, context.socket(zmq.DEALER) as old, context.socket(zmq.DEALER) as new:
            for each in (old, new):
                # Nothing here yields to the server.
                each.linger, each.routing_id, each.curve_serverkey = 0, b"rank 2", server._server_keys[0]
                each.curve_publickey, each.curve_secretkey = zmq.curve_keypair()
                each.connect(server.address)
                for _ in range(50):
                    each.send(hello)
                time.sleep(0.3)  # noqa: ASYNC251
                if each is old:
                    each.close()
                    time.sleep(0.2)  # noqa: ASYNC251
            await client.ask("echo")
            await until(lambda: server.peers == ["rank 1", "rank 2"])
    assert not caplog.text


@pytest.mark.parametrize("known", [True, False])
async def test_a_client_that_gets_the_descriptor_of_a_dead_one_counts_as_connected(known: bool) -> None:
    """The server is busy. When it learns that the old connection has ended, the new one has its descriptor already."""
    ended, fillers = list[str](), list[int]()
    server = LineServer(SECRET, silence_s=1.0, on_end=lambda peer, lost: ended.append(peer))
    async with await server.open(), LineClient(server.address, SECRET, "rank 1"):
        with zmq.Context() as context, context.socket(zmq.DEALER) as old, context.socket(zmq.DEALER) as new:

            def sockets() -> set[int]:
                entries = Path("/proc/self/fd").iterdir()
                return {int(each.name) for each in entries if "socket:" in str(each.resolve())}

            def connect(client: zmq.Socket[bytes], name: str) -> int:
                """Connect, and yield nothing to the server. Returns the server's descriptor, which is above the client's."""
                before = sockets()
                client.linger, client.routing_id, client.curve_serverkey = 0, name.encode(), server._server_keys[0]
                client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
                client.connect(server.address)
                hello = {"protocol": 1, "again": False, "machine": ""}
                client.send(orjson.dumps((exchange.HELLO, name, 0, 0, "", hello)))
                while len(sockets() - before) < 2:
                    time.sleep(0.01)
                time.sleep(0.3)  # for the message: the server must not read, so nothing tells
                return max(sockets() - before)

            descriptor = connect(old, "rank 2")
            if known:
                await until(lambda: "rank 2" in server.peers)
            old.close()
            time.sleep(0.3)  # noqa: ASYNC251
            # A new descriptor is the lowest free one. Leave one for the new client. In a fifth of the runs zmq's threads take it.
            while (filler := os.open(os.devnull, os.O_RDONLY)) < descriptor:
                fillers.append(filler)
            os.close(filler)
            os.close(fillers.pop())
            connect(new, "rank 3")
            await until(lambda: bool(ended))
            assert ended == ["rank 2"] and server.silences() == {"rank 1": 0.0, "rank 3": 0.0}
    for filler in fillers:
        os.close(filler)


async def test_a_peer_that_was_given_up_cannot_come_back_unnoticed() -> None:
    ended: list[tuple[str, RankLost | None]] = []
    cancelled = asyncio.Event()

    async def forever(peer: str, header: Any, buffers: Sequence[Any]) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    server = LineServer(SECRET, silence_s=0.5, on_end=lambda *end: ended.append(end))
    async with await server.open() as server, Wire(server.address) as wire:
        server.on("forever", forever)
        server.on("echo", echo)
        async with LineClient(wire.address, SECRET, "rank 1", silence_s=60.0) as client:
            asked = asyncio.ensure_future(_error(client.ask("forever")))
            await asyncio.sleep(0)
            await client.ask("echo")
            wire.refuses = True
            wire.cut()
            with anyio.fail_after(30):
                await cancelled.wait()
            [(peer, lost)] = ended
            assert peer == "rank 1" and "rank 1 has given no sign of life for" in str(lost) and server.peers == []
            wire.refuses = False
            with anyio.fail_after(30):
                error = await asked
            assert isinstance(error, RankLost) and "rank 0 has given up rank 1" in str(error)
            with pytest.raises(RankLost, match="given up"):
                await client.ask("forever")
        async with LineClient(server.address, SECRET, "rank 1"):
            assert server.peers == ["rank 1"], "a new process of this name may come"
        await until(lambda: len(ended) > 1)
    assert ended[1:] == [("rank 1", None)]


async def test_a_peer_that_was_given_up_is_told_at_its_next_message() -> None:
    """Its own connection never broke."""
    async with two_ends() as (server, client):
        server._end(server._peers["rank 1"], RankLost("rank 1 has given no sign of life"))
        with anyio.fail_after(30):
            assert "rank 0 has given up rank 1" in str(await _error(client.ask("echo")))


async def test_lines_to_training_ranks_have_the_silence_of_the_line_to_rank_0() -> None:
    async with await LineServer(SECRET, silence_s=7.0).open() as server:
        first = Connections(server, 0, SECRET)
        async with (
            LineClient(server.address, SECRET, "rank 1", silence_s=7.0) as line,
            Connections(line, 1, SECRET) as rank,
        ):
            serving = await rank.serve()
            await rank.announce(serving)
            async with first:
                assert (serving.silence_s, (await first.to(1)).silence_s) == (7.0, 7.0)


SERVER = """
import asyncio, sys
from asyncrl.concurrency import awake
from asyncrl.distributed.line import LineServer

async def main():
    async def never(*message):
        await asyncio.Event().wait()
    async def echo(peer, header, buffers):
        return header, buffers
    with awake.on_loop(asyncio.get_running_loop()):
        async with await LineServer(sys.argv[1], silence_s=float(sys.argv[2])).open() as server:
            server.on("never", never)
            server.on("echo", echo)
            print(server.address, flush=True)
            await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""
CLIENT = """
import asyncio, sys
from asyncrl.concurrency import awake
from asyncrl.distributed.line import LineClient

async def main():
    with awake.on_loop(asyncio.get_running_loop()):
        async with LineClient(sys.argv[1], sys.argv[2], "rank 1", silence_s=float(sys.argv[3])) as client:
            asyncio.ensure_future(client.ask("never"))
            for number in range(10 ** 9):
                assert (await client.ask("echo", number))[0] == number
                print(number, flush=True)
                await asyncio.sleep(0.05)

asyncio.run(main())
"""


@asynccontextmanager
async def started(program: str, *arguments: object) -> AsyncIterator[subprocess.Popen[str]]:
    process = warm.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)


async def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    with anyio.fail_after(60):
        return (await asyncio.to_thread(process.stdout.readline)).strip()


@pytest.mark.parametrize(
    ("number", "silence_s", "reason"),
    [(signal.SIGKILL, 60.0, "has ended or died"), (signal.SIGSTOP, 1.0, "has given no sign of life for")],
)
async def test_a_server_that_is_killed_or_stopped_is_named(number: int, silence_s: float, reason: str) -> None:
    ended: list[RankLost] = []
    async with started(SERVER, SECRET, silence_s) as process:
        address = await line_of(process)
        async with LineClient(address, SECRET, "rank 1", silence_s=silence_s, on_end=ended.append) as client:
            waiting = asyncio.ensure_future(_error(client.ask("never")))
            await client.ask("echo", 1, [bytes(100_000)])
            began = time.monotonic()
            os.kill(process.pid, number)
            with anyio.fail_after(20):
                error = await waiting
            assert time.monotonic() - began < 20
            assert isinstance(error, RankLost) and f"rank 1 lost rank 0 at {address}, which {reason}" in str(error)
            with pytest.raises(RankLost, match=reason):
                await client.ask("echo")
            assert ended == [error]


async def test_a_client_that_is_killed_is_named() -> None:
    ended: asyncio.Queue[tuple[str, RankLost | None]] = asyncio.Queue()
    async with await LineServer(SECRET, silence_s=1.0, on_end=lambda *end: ended.put_nowait(end)).open() as server:
        server.on("echo", lambda peer, header, buffers: asyncio.sleep(0, (header, buffers)))
        async with started(CLIENT, server.address, SECRET, 60) as process:
            await line_of(process)
            process.kill()
            with anyio.fail_after(30):
                peer, lost = await ended.get()
    assert peer == "rank 1" and "rank 1 has given no sign of life" in str(lost) and "killed" in str(lost)


async def test_a_job_that_was_suspended_as_a_whole_goes_on() -> None:
    """For longer than the silence after which an end counts as lost."""
    async with started(SERVER, SECRET, 1.5) as server:
        async with started(CLIENT, await line_of(server), SECRET, 1.5) as client:
            await line_of(client)
            for process in (server, client):
                os.kill(process.pid, signal.SIGSTOP)
            await asyncio.sleep(4.0)
            for process in (client, server):
                os.kill(process.pid, signal.SIGCONT)
            before = int(await line_of(client))
            while int(await line_of(client)) < before + 40:
                pass
            assert client.poll() is None


async def test_an_address_where_nothing_listens_is_an_error_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    began = time.monotonic()
    with pytest.raises(
        RankLost, match=f"rank 3 could not connect to rank 9 at tcp://{address}: rank 9 does not run there"
    ):
        async with LineClient(address, SECRET, "rank 3", server="rank 9", silence_s=0.5):
            pass
    assert time.monotonic() - began < 20
