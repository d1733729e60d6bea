"""The line between processes of a run, over TCP: `ask` sends a request and returns its answer, `tell` sends a message.

    LineClient (DEALER)  --ask, tell-->  LineServer (ROUTER)  --handlers, each in a task of its own
                         <--ask, tell--                       (both ends may ask, tell and have handlers)

Encryption and authentication: CURVE. The key pair of the server is derived from the run's secret, and the public key is never sent.
So only a client with the secret can connect, and only a server with the secret can answer.

A connection may break and come back: no message is lost or handled twice, and handlers start in order (`exchange.py`). An end
that was disconnected for `silence_s` is lost: every call that waits for this end raises RankLost. Time in which the waiting process
was suspended does not count (`concurrency/awake.py`).

A message is a frame of JSON [operation, session, number, lowest unanswered number, kind, header], then raw buffers. Messages of
`tell` are answered, too, but `tell` does not wait for the answer. At most `exchange.WINDOW` messages to one peer are unanswered;
further calls wait. A session is the random id of one `LineClient`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

import anyio
import orjson
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from ..concurrency import awake
from ..concurrency.offload import offload
from ..concurrency.shield import wait_shielded
from ..errors import LifecycleError, RankLost
from .exchange import BYE, HELLO, TELL, WELCOME, Answer, Buffer, Exchange, Handler

SILENCE_S = 20.0  # default of `silence_s`
_PROTOCOL = 1
_LEAVE = "leave"
_LINGER_MS = 1000  # for the last messages of an end that closes
_TICK_S = 0.25  # between two checks of `silence_s`
# At most this many messages are read before other callbacks of the event loop run.
_AT_ONCE = 200
# Plain ints: combining members of zmq's enumerations takes longer than a call of `recv` or `send`.
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
# Buffers of this size or more are sent without a copy.
_MIN_UNCOPIED_BYTES = 1 << 16
_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)

logger = logging.getLogger("asyncrl.distributed")


class _End:
    """The socket of a server or client. Only the thread of its event loop may use it."""

    # LineServer and LineClient define these.
    _exchanges: Callable[[], Iterable[Exchange]]
    _receive: Callable[[list[zmq.Frame]], None]
    _on_event: Callable[[int, int], None]
    _lose: Callable[[Exchange, str], None]

    def __init__(self, secret: str, name: str, silence_s: float) -> None:
        if not secret:
            raise LifecycleError("the line needs the secret of the run, found an empty one")
        self.name, self.silence_s = name, silence_s
        private = z85.encode(blake2b(secret.encode(), digest_size=32, person=b"asyncrl line").digest())
        self._server_keys = zmq.curve_public(private), private
        self._handlers: dict[str, Handler] = {}
        self._socket: zmq.Socket[bytes] | None = None
        self._events: deque[Any] = deque()
        self._read_scheduled = False
        self._watch: asyncio.Task[None] | None = None  # loses peers after `silence_s`
        self._ended: dict[Exchange, asyncio.Task[None]] = {}  # ended exchanges whose handlers still run
        self._closed = False

    def on(self, kind: str, handler: Handler) -> None:
        """Register the handler of messages of this kind. Each message is handled in its own task."""
        self._handlers[kind] = handler

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = opened = self._context.socket(kind)
        # In ms: a tenth of `silence_s`. zmq's I/O thread sends and answers heartbeats: neither a busy loop nor the GIL delays them.
        opened.heartbeat_ivl = opened.heartbeat_timeout = round(100 * self.silence_s)
        # 0: no limit. `exchange.WINDOW` bounds the queues, and a full queue of zmq would drop messages.
        opened.sndhwm = opened.rcvhwm = 0
        opened.linger = _LINGER_MS
        self._monitor = opened.get_monitor_socket(_EVENTS)
        self._loop.add_reader(opened.FD, self._read)
        self._loop.add_reader(self._monitor.FD, self._read_events)
        # Read once now: zmq signals only messages that arrive after a first read.
        self._loop.call_soon(self._read_events)
        self._read_soon()
        return opened

    async def aclose(self) -> None:
        """Say goodbye to the other ends, cancel the handlers and close the socket. A second call does nothing."""
        if self._closed or self._socket is None:
            self._closed = True
            return
        for exchange in self._exchanges():
            if exchange.error is None:
                exchange.send(BYE)
            exchange.end(LifecycleError(f"{self.name} closed the line while a call waited for {exchange.peer}"))
        for exchange in self._ended:
            exchange.cancel()
        self._closed = True
        self._loop.remove_reader(self._socket.FD)
        self._loop.remove_reader(self._monitor.FD)
        if self._watch is not None:
            self._watch.cancel()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        if (cancelled := await wait_shielded(self._loop.create_task(self._wait_closed()))) is not None:
            raise cancelled

    async def _wait_closed(self) -> None:
        await asyncio.gather(*(exchange.wait_ended() for exchange in self._exchanges()), *self._ended.values())
        # In a thread: `term` waits for the last messages, at most for the linger time.
        await offload(self._context.term, "close the line")

    def _read(self) -> None:
        self._read_scheduled = False
        for _ in range(_AT_ONCE):
            if self._closed or self._socket is None:
                return
            try:
                frames = [self._socket.recv(_NOBLOCK, copy=False)]
            except zmq.Again:
                return
            while frames[-1].more:
                frames.append(self._socket.recv(copy=False))
            try:
                self._receive(frames)
            except BaseException:
                # zmq does not signal again for the messages that are still queued.
                self._read_soon()
                raise
        self._read_soon()

    def _read_soon(self) -> None:
        """Schedule `_read`. zmq signals only once for several messages, and a call of `send` may consume the signal."""
        if not self._read_scheduled:
            self._read_scheduled = True
            self._loop.call_soon(self._read)

    def _read_events(self) -> None:
        with contextlib.suppress(zmq.Again):
            while not self._closed:
                self._events.append(parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK)))
        while self._events and not self._closed:
            event = self._events.popleft()
            self._on_event(event["event"], event["value"])
        self._on_event(0, 0)

    def _send(self, frames: Sequence[Buffer]) -> None:
        if self._closed or self._socket is None:
            return
        # zmq.Again or EHOSTUNREACH: the peer is disconnected. `Exchange.resend` repeats asks and tells when the peer is back.
        with contextlib.suppress(zmq.ZMQError):
            for frame in frames[:-1]:
                self._socket.send(frame, _MORE, copy=len(frame) < _MIN_UNCOPIED_BYTES)
            self._socket.send(frames[-1], _NOBLOCK, copy=len(frames[-1]) < _MIN_UNCOPIED_BYTES)
        self._read_soon()

    @property
    def peers(self) -> list[str]:
        """Names of the peers that have connected and have neither said goodbye nor been lost."""
        return [exchange.peer for exchange in self._exchanges() if exchange.error is None]

    def silent(self) -> list[str]:
        """A sentence for each peer that is disconnected now. Thread-safe."""
        now = awake.now()
        down = [(exchange.peer, exchange.down_since) for exchange in list(self._exchanges())]
        return [
            f"{peer} has given no sign of life for {now - since:.0f} s" for peer, since in down if since is not None
        ]

    def _set_down(self, exchange: Exchange) -> None:
        if exchange.error is None and exchange.down_since is None:
            exchange.down_since = awake.now()
        if self._watch is None or self._watch.done():
            self._watch = self._loop.create_task(self._watch_exchanges())

    async def _watch_exchanges(self) -> None:
        while any(exchange.down_since is not None for exchange in self._exchanges()):
            await asyncio.sleep(_TICK_S)
            now = awake.now()
            for exchange in list(self._exchanges()):
                if exchange.down_since is not None and now - exchange.down_since > self.silence_s:
                    try:
                        self._lose(exchange, f"has given no sign of life for {now - exchange.down_since:.0f} s")
                    except Exception:
                        # An error of `on_end` must not end this task, which also watches the other exchanges.
                        logger.exception("%s could not handle the loss of %s", self.name, exchange.peer)


class LineServer(_End):
    """The server's end: listens at one address for any number of clients. `async with` opens and closes it.

    name: for error texts ("rank 0"). on_end: called for each peer that ends: (peer, None) after a goodbye, else (peer, RankLost).
    """

    def __init__(
        self,
        secret: str,
        name: str = "rank 0",
        *,
        silence_s: float = SILENCE_S,
        on_end: Callable[[str, RankLost | None], None] | None = None,
    ) -> None:
        super().__init__(secret, name, silence_s)
        self.address = ""
        self.on_end = on_end
        self._server_id = secrets.token_hex(8)  # clients notice a restart by this id
        self._peers: dict[str, Exchange] = {}
        self.machines: dict[str, str] = {}  # client -> its machine, kept after the client's end
        self._connections: dict[int, str] = {}  # descriptor -> address of the peer, or "" until it is known
        self._greeted: dict[int, str] = {}  # descriptor -> name of the peer
        self._refused: set[str] = set()  # addresses whose refusal was logged
        self._refusing = False  # a handshake failed; the next event names its connection
        self._left: set[str] = set()  # clients that called `leave` or said goodbye
        self._changed = asyncio.Event()  # set when a client leaves or is lost
        self.on(_LEAVE, self._on_leave)

    def silences(self) -> dict[str, float]:
        """Client -> seconds since its connection broke, 0 while it is connected. Clients that have ended are not in the result."""
        now = awake.now()
        down = {peer: exchange.down_since for peer, exchange in self._peers.items()}
        return {peer: 0.0 if since is None else now - since for peer, since in down.items()}

    async def open(self, host: str = "127.0.0.1", port: int = 0) -> LineServer:
        """Listen, and set `address`. Port 0: any free port. Errors: OSError if the address is not of this machine, or is in use."""
        opened = self._open(zmq.ROUTER)
        try:
            opened.ipv6 = ":" in host
            opened.router_mandatory = opened.router_handover = True
            opened.curve_server, opened.curve_secretkey = True, self._server_keys[1]
            bracketed = f"[{host}]" if ":" in host else host
            opened.bind(f"tcp://{bracketed}:{port or '*'}")
        except zmq.ZMQError as error:
            await self.aclose()
            raise OSError(error.errno, f"cannot listen at {host}:{port}: {error}") from error
        self.address = str(opened.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")
        return self

    async def __aenter__(self) -> LineServer:
        return self if self.address else await self.open()

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def ask(self, peer: str, kind: str, header: Any = None, buffers: Sequence[Buffer] = ()) -> Answer:
        """As `LineClient.ask`, to the client `peer`."""
        return await self._exchange_with(peer).ask(kind, header, buffers)

    async def tell(self, peer: str, kind: str, header: Any = None, buffers: Sequence[Buffer] = ()) -> None:
        """As `LineClient.tell`, to the client `peer`."""
        await self._exchange_with(peer).tell(kind, header, buffers)

    async def tell_all(self, kind: str, header: Any = None, buffers: Sequence[Buffer] = ()) -> None:
        """`tell` every client. Clients that end during the call are no error."""
        tells = [exchange.tell(kind, header, buffers) for exchange in self._peers.values()]
        for result in await asyncio.gather(*tells, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, RankLost):
                raise result

    def give_up(self, peer: str, error: RankLost) -> None:
        """End the exchange with a client, send the client the error, and call `on_end`. Does nothing if the client has ended."""
        if (exchange := self._peers.get(peer)) is not None:
            self._dismiss(peer.encode(), exchange.session, str(error))
            self._end(exchange, error)

    def forget(self, peer: str) -> None:
        """Free what the server keeps about a client that has ended. Only for a name that no later client will have."""
        self.machines.pop(peer, None)
        self._left.discard(peer)

    async def leave(self, timeout_s: float) -> list[str]:
        """Call it before `aclose`: wait until each client has called `leave`, said goodbye or been lost. Returns the lost
        clients, and the clients that did none of the three within `timeout_s`. From now on `on_end` is not called."""
        self.on_end = None
        waiting = {*self._peers}
        with anyio.move_on_after(timeout_s, shield=True):
            while self._peers.keys() & (waiting := waiting - self._left):
                await self._changed.wait()
        return sorted(waiting - self._left)

    async def _on_leave(self, peer: str, header: Any, buffers: Any) -> None:
        self._set_left(peer)

    def _set_left(self, *peers: str) -> None:
        self._left.update(peers)
        self._changed.set()
        self._changed = asyncio.Event()

    def _exchange_with(self, peer: str) -> Exchange:
        exchange = self._peers.get(peer)
        if exchange is None:
            raise RankLost(f"{peer} is not connected to {self.name}: it never came, or has ended; see its output")
        return exchange

    def _exchanges(self) -> Iterable[Exchange]:
        return self._peers.values()

    def _receive(self, frames: list[zmq.Frame]) -> None:
        identity, head = bytes(frames[0].buffer), frames[1]
        if identity.startswith(b"\0"):
            # zmq gives this identity to a connection that the client has replaced: the client sends the messages again.
            return
        peer, message = identity.decode(), orjson.loads(head.buffer)
        operation, session = message[:2]
        if operation == HELLO:
            return self._on_hello(identity, int(head.get(zmq.SRCFD)), session, message[5])
        exchange = self._peers.get(peer)
        if exchange is None or exchange.session != session:
            # Refuse, because a client whose connection never broke would wait for ever without an answer.
            return self._dismiss(identity, session, self._refusal(peer))
        if operation == BYE:
            self._end(exchange, None)
        else:
            exchange.receive(message, [frame.buffer for frame in frames[2:]])

    def _on_hello(self, identity: bytes, connection: int, session: str, hello: dict[str, Any]) -> None:
        # First read older events: they may be about an earlier connection with the same descriptor.
        self._read_events()
        peer = identity.decode()
        exchange = self._peers.get(peer)
        if hello["protocol"] != _PROTOCOL:
            return self._dismiss(identity, session, f"{self.name} has another version of asyncrl; install one version")
        if exchange is None or exchange.session != session:
            if hello["again"]:
                return self._dismiss(identity, session, self._refusal(peer))
            if exchange is not None:
                self._lose(exchange, "was replaced by another process of this name")
            transmit = lambda frames: self._send([identity, *frames])  # noqa: E731
            exchange = self._peers[peer] = Exchange(self.name, peer, session, self._handlers, transmit)
            self.machines[peer] = hello["machine"]
            self._left.discard(peer)
        exchange.connection, exchange.down_since = connection, None
        # The earlier connection with this descriptor has ended.
        earlier_peer = self._greeted.get(connection)
        self._greeted[connection] = peer
        if earlier_peer not in (None, peer) and earlier_peer in self._peers:
            self._set_down(self._peers[earlier_peer])
        exchange.send(WELCOME, header=self._server_id)
        exchange.resend()
        # This connection may have ended already.
        if connection not in self._connections:
            self._set_down(exchange)

    def _refusal(self, peer: str) -> str:
        return f"{self.name} has given up {peer}, or another process has its name"

    def _dismiss(self, identity: bytes, session: str, reason: str) -> None:
        self._send([identity, orjson.dumps((BYE, session, 0, 0, "", reason))])

    def _on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._connections[value] = ""
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._refusing = True
        elif event == zmq.EVENT_DISCONNECTED:
            address, peer = self._connections.pop(value, "") or "an unknown address", self._greeted.pop(value, "")
            # Warn only about a refused connection. A connection that broke may be that of a rank.
            refused, self._refusing = self._refusing, False
            exchange = self._peers.get(peer)
            if exchange is not None and exchange.connection == value:
                self._set_down(exchange)
            # Read the HELLO that the peer may have sent before it disconnected. Not before the `pop`s: the next message may be the
            # HELLO of a new connection with the same descriptor, which the `pop`s would remove.
            self._read()
            if refused and address not in self._refused:
                self._refused.add(address)
                text = (
                    "%s refused a connection from %s, which does not know the secret of this run; if it is a node of this run, "
                    "set ASYNCRL_SECRET to the same value there"
                )
                logger.warning(text, self.name, address)
        elif event == 0:
            # All events are read, so no descriptor in this table was closed and reused for another connection.
            for descriptor, address in self._connections.items():
                if not address:
                    self._connections[descriptor] = _peer_address(descriptor)

    def _lose(self, exchange: Exchange, reason: str) -> None:
        lost = RankLost(f"{exchange.peer} {reason}: it was killed, stopped, or its machine is gone; see its output")
        self._end(exchange, lost)

    def _end(self, exchange: Exchange, lost: RankLost | None) -> None:
        # After a goodbye the handlers of the peer's messages run to their end.
        exchange.end(lost or RankLost(f"{exchange.peer} has left {self.name}"), cancel=lost is not None)
        self._ended[exchange] = self._loop.create_task(exchange.wait_ended())
        self._ended[exchange].add_done_callback(lambda _: self._ended.pop(exchange))
        if self._peers.get(exchange.peer) is exchange:
            del self._peers[exchange.peer]
        self._set_left(*(() if lost else (exchange.peer,)))
        if self.on_end is not None:
            self.on_end(exchange.peer, lost)
        elif lost is not None:
            logger.warning("%s", lost)


class LineClient(_End):
    """A client's end: connects to one `LineServer`. `async with` waits for the connection, and closes it.

    name: unique among the clients of the server ("rank 3"). server: name of the server in error texts. on_end: called once when
    the server ends or is lost.
    """

    def __init__(
        self,
        address: str,
        secret: str,
        name: str,
        *,
        server: str = "rank 0",
        silence_s: float = SILENCE_S,
        on_end: Callable[[RankLost], None] | None = None,
    ) -> None:
        super().__init__(secret, name, silence_s)
        self.address = address if "://" in address else f"tcp://{address}"
        self._server, self.on_end = server, on_end
        self._exchange = Exchange(name, server, secrets.token_hex(8), self._handlers, self._send)
        self._server_id: str | None = None  # None before the first connection
        self._dismissed = False  # the server has sent BYE
        self._welcomed: asyncio.Future[None] | None = None  # done at the first connection
        self._probe: asyncio.Task[None] | None = None  # runs `_check_ended`

    async def __aenter__(self) -> LineClient:
        """Errors: RankLost after `silence_s` without a connection."""
        opened = self._open(zmq.DEALER)
        self._welcomed = self._loop.create_future()
        opened.ipv6 = "[" in self.address
        opened.routing_id = self.name.encode()
        opened.curve_publickey, opened.curve_secretkey = zmq.curve_keypair()
        opened.curve_serverkey = self._server_keys[0]
        try:
            opened.connect(self.address)
            self._set_down(self._exchange)
            await self._welcomed
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
        await super().aclose()

    async def ask(self, kind: str, header: Any = None, buffers: Sequence[Buffer] = ()) -> Answer:
        """Send a request and wait for its answer. A cancelled call cancels the handler, too. Change the buffers only after the
        answer, and never after a cancelled call. Errors: those of the handler, RankLost, LifecycleError outside `async with`."""
        self._check_open(kind)
        return await self._exchange.ask(kind, header, buffers)

    async def tell(self, kind: str, header: Any = None, buffers: Sequence[Buffer] = ()) -> None:
        """Send a message without waiting for its handler. Waits only while `WINDOW` messages are unanswered. The buffers must never
        change, because they may be sent again. Errors: RankLost, LifecycleError."""
        self._check_open(kind)
        await self._exchange.tell(kind, header, buffers)

    def post(self, kind: str, header: Any = None) -> None:
        """As `tell`, without waiting: for a cancelled caller that undoes its request. Does nothing if the server is lost."""
        with contextlib.suppress(RankLost, LifecycleError):
            self._exchange.post(TELL, kind, header)

    async def leave(self, timeout_s: float) -> list[str]:
        """Call it before `aclose`: `LineServer.leave` waits for this call. Returns []. From now on `on_end` is not called."""
        self.on_end = None
        with contextlib.suppress(RankLost, LifecycleError), anyio.move_on_after(timeout_s, shield=True):
            await self.ask(_LEAVE)
        return []

    def _check_open(self, kind: str) -> None:
        if self._server_id is None and self._exchange.error is None:
            raise LifecycleError(f"{self.name} is not connected: send {kind!r} inside `async with`")

    def _exchanges(self) -> Iterable[Exchange]:
        return (self._exchange,)

    def _receive(self, frames: list[zmq.Frame]) -> None:
        message = orjson.loads(frames[0].buffer)
        operation, session, header = message[0], message[1], message[5]
        exchange = self._exchange
        if session != exchange.session:
            return
        if operation == BYE:
            self._dismissed = True
            self._lose(exchange, f"refuses this end: {header}" if header else "has ended")
        elif operation == WELCOME:
            if self._server_id not in (None, header):
                return self._lose(exchange, "was restarted")
            self._server_id = header
            exchange.down_since = None
            if self._welcomed is not None and not self._welcomed.done():
                self._welcomed.set_result(None)
        else:
            exchange.receive(message, [frame.buffer for frame in frames[1:]])

    def _on_event(self, event: int, value: int) -> None:
        if self._exchange.error is not None:
            return
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            again, machine = self._server_id is not None, socket.gethostname()
            hello = {"protocol": _PROTOCOL, "again": again, "machine": machine}
            self._exchange.send(HELLO, header=hello)
            self._exchange.resend()
        elif event == zmq.EVENT_DISCONNECTED:
            self._set_down(self._exchange)
        elif event == zmq.EVENT_CLOSED and self._server_id is not None and self._probe is None:
            self._probe = self._loop.create_task(self._check_ended())

    async def _check_ended(self) -> None:
        """If the server's machine refuses a new connection, the server has ended. End the exchange now, not after `silence_s`."""
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), 1.0)
            writer.close()
        except ConnectionRefusedError:
            self._lose(self._exchange, "has ended or died: nothing listens at its address any more")
        except (OSError, TimeoutError):
            return
        finally:
            self._probe = None

    def _lose(self, exchange: Exchange, reason: str) -> None:
        if exchange.error is not None:
            return
        lost = RankLost(f"{self.name} lost {self._server} at {self.address}, which {reason}; see its output")
        if self._server_id is None and not self._dismissed:
            lost = RankLost(
                f"{self.name} could not connect to {self._server} at {self.address}: {self._server} does not run there, or "
                "has another ASYNCRL_SECRET"
            )
        exchange.end(lost)
        if self._welcomed is not None and not self._welcomed.done():
            self._welcomed.set_exception(lost)
        if self.on_end is not None:
            self.on_end(lost)


def _peer_address(descriptor: int) -> str:
    """The IP address of the other end; "" if zmq has closed the descriptor."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            return str(connection.getpeername()[0])
    except OSError:
        return ""
