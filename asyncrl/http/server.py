"""The HTTP server of a run: aiohttp's, with a bounded number of connections, behind the checks of `access.py`.

    kernel's queue ──▶ accepted below the limit ──▶ key, names ──▶ the handler of a method and path
                              │ at the limit for `GRACE_S`: connections without a request are closed;
                              ▼ if all have a request, a new connection waits until a connection ends

aiohttp itself closes a silent or slow connection: the headers of its next request must be complete within `IDLE_S`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import anyio
import orjson

from asyncrl.builds import install_command
from asyncrl.concurrency.offload import offload
from asyncrl.concurrency.supervisor import plain_task_group
from asyncrl.errors import ConfigError, LifecycleError

from .access import Access, Refused

try:
    from aiohttp import ClientPayloadError, web
    from aiohttp.http_exceptions import HttpProcessingError
except ImportError as error:
    raise ConfigError(
        f"the HTTP door needs aiohttp, which is not installed; {install_command('http')}, or push through shared memory "
        "(asyncrl.client)"
    ) from error

# Many, because environment servers open one connection for each request.
MOST_CONNECTIONS = 256
# Time limit from the connection, or from the last reply, to the headers of a request.
IDLE_S = 15.0
# If the limit is reached for this time, connections without a request are closed.
GRACE_S = 1.0
# Time limits: of a whole body, and of a pause between two pieces of a body.
BODY_S = 30.0
PAUSE_S = 5.0
# How long the server goes on reading a refused body. If the server stopped at once, the sender could miss the reply.
_LINGER_S = 1.0
# Time limit of requests that run when the server closes.
_SHUTDOWN_S = 5.0
# Pause before the next try to accept, when file descriptors or memory have run out: no event reports that some are free again.
_RETRY_S = 0.1
_BACKLOG = 128
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# aiohttp's errors for bytes that are not valid HTTP, and for a body that ends early.
_UNREADABLE = (HttpProcessingError, ClientPayloadError, web.RequestPayloadError)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
log = logging.getLogger("asyncrl.http")


def _is_shown(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    # uvloop raises this error for a reply to a client that has disconnected. asyncio raises no error.
    disconnected = isinstance(error, RuntimeError) and "the handler is closed" in str(error)
    # Anybody can send unreadable bytes, without a key and without end. aiohttp answers 400; its tracebacks would fill the log.
    return not disconnected and not isinstance(error, _UNREADABLE)


log.addFilter(_is_shown)


def most_connections(limit: int = MOST_CONNECTIONS) -> int:
    """`limit`, but at most a quarter of the file descriptors that this process may open; the run needs the others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if soft == resource.RLIM_INFINITY else max(1, min(limit, soft // 4))


def reply(code: int, **fields: Any) -> web.Response:
    """A reply with the HTTP status `code`. The body is `fields` as a JSON object."""
    return web.Response(status=code, body=orjson.dumps(fields), content_type="application/json")


def refusal(error: Refused, _: web.BaseRequest) -> web.Response:
    """The reply to a refused request."""
    return reply(error.status, status=error.state, message=str(error))


async def receive(request: web.BaseRequest, max_bytes: int, count: Callable[[int], None] = lambda _: None) -> bytearray:
    """The body, not decompressed. `count` is called with the size of each piece and may raise Refused.
    Errors: Refused if the body has more than `max_bytes` bytes (413), is slow (408), is cut off (400) or is invalid (400)."""
    too_long = Refused(413, f"the body has more than {max_bytes:,} bytes; send less in one request")
    if (request.content_length or 0) > max_bytes:
        raise too_long
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # With a size above 0, aiohttp would take `100 Continue` for the start of a reply, and could not reply to a later error.
        request.writer.output_size = 0
    body = bytearray()
    body_deadline = anyio.current_time() + BODY_S
    try:
        with anyio.fail_at(body_deadline) as scope:
            while True:
                scope.deadline = min(body_deadline, anyio.current_time() + PAUSE_S)
                piece = await request.content.readany()
                if not piece:
                    return body
                body += piece
                if len(body) > max_bytes:
                    raise too_long
                count(len(piece))
    except TimeoutError:
        message = f"the body was too slow: it did not arrive within {BODY_S:g} s, or paused for {PAUSE_S:g} s"
        raise Refused(408, message) from None
    except _UNREADABLE as error:
        raise Refused(400, f"the body is not what its headers say: {error}") from error


class _Connections(web.Server):
    """aiohttp's server, with a limit of open connections."""

    def __init__(self, handler: Handler, limit: int) -> None:
        super().__init__(
            handler,
            access_log=None,
            logger=log,
            # aiohttp would decompress a body before the key is checked.
            auto_decompress=False,
            # Cancels the handler of a client that disconnects: nobody would receive the tokens that the handler samples. If groups
            # of the request are not pushed yet, they are not pushed at all, because the client may send the request again.
            handler_cancellation=True,
            keepalive_timeout=IDLE_S,
            lingering_time=_LINGER_S,
        )
        self.free_connections = asyncio.Semaphore(limit)  # acquired by `HttpServer._accept`

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.free_connections.release()


class HttpServer:
    """`async with HttpServer(Access(address), routes) as server` listens at `server.url`; `routes` are handlers by method and path.

    `listen` may be called earlier, to get the URL: the kernel queues connections until `async with` accepts them.
    """

    def __init__(
        self,
        access: Access,
        routes: Mapping[tuple[str, str], Handler],
        *,
        refusal: Callable[[Refused, web.BaseRequest], web.Response] = refusal,
        connections: int = MOST_CONNECTIONS,
    ) -> None:
        self.url = ""
        self._access = access
        self._routes = routes
        self._refusal = refusal
        self._max_connections = connections
        # Connections whose request is being handled.
        self._busy: set[Any] = set()
        self._listening: list[socket.socket] = []
        # Shielded: even a cancelled run accepts connections until `__aexit__`, so that clients learn of the end of the run.
        self._accepting = anyio.CancelScope(shield=True)
        self._exit_stack = AsyncExitStack()

    def listen(self) -> str:
        """Listen at the address. Returns the URL. Errors: ConfigError."""
        if self.url:
            raise LifecycleError("an HttpServer can be opened only once; make a new HttpServer")
        host, port = self._access.address.host, self._access.address.port
        with ExitStack() as sockets:
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
                addresses = dict.fromkeys((family, address) for family, _, _, _, address in found)
                listening = [
                    sockets.enter_context(socket.create_server(address[:2], family=family, backlog=_BACKLOG))
                    for family, address in addresses
                ]
            except OSError as error:
                raise ConfigError(
                    f"the HTTP server cannot listen at {host}:{port}: {error}; choose another port"
                ) from error
            sockets.pop_all()
        names = [listener.getsockname()[:2] for listener in listening]
        self._access.add(address for address, _ in names)
        self._listening, self.url = listening, self._access.url(names[0][1])
        return self.url

    def stop_listening(self) -> None:
        """Close the sockets of `listen`. Does nothing after `__aenter__`, which takes over the sockets."""
        for listener in self._listening:
            listener.close()
        self._listening = []

    async def __aenter__(self) -> HttpServer:
        """Errors: ConfigError if the server cannot listen."""
        if not self._listening:
            # In a thread: the name of the host may have to be looked up.
            await offload(self.listen, "listen")
        listening, self._listening = self._listening, []
        async with AsyncExitStack() as stack:
            self._server = _Connections(self._answer, most_connections(self._max_connections))
            stack.push_async_callback(self._end_connections)
            for listener in listening:
                stack.enter_context(listener)
            tasks = await stack.enter_async_context(plain_task_group())
            tasks.start_soon(self._accept_all, listening)
            self._exit_stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close the port, then the connections."""
        self._accepting.cancel()
        await self._exit_stack.aclose()

    async def _end_connections(self) -> None:
        with anyio.CancelScope(shield=True):
            self._server.pre_shutdown()
            await self._server.shutdown(_SHUTDOWN_S)

    async def _accept_all(self, listening: list[socket.socket]) -> None:
        with self._accepting:
            async with anyio.create_task_group() as tasks:
                for listener in listening:
                    listener.setblocking(False)
                    tasks.start_soon(self._accept, listener)

    async def _accept(self, listening: socket.socket) -> None:
        server, loop = self._server, asyncio.get_running_loop()
        while True:
            await anyio.wait_readable(listening)
            with anyio.move_on_after(GRACE_S) as patience:
                await server.free_connections.acquire()
            if patience.cancelled_caught:
                for connection in server.connections:
                    if connection not in self._busy and connection.transport is not None:
                        connection.transport.abort()
                await server.free_connections.acquire()
            try:
                accepted, _ = listening.accept()
                accepted.setblocking(False)
                await loop.connect_accepted_socket(server, accepted)
            except OSError as error:
                server.free_connections.release()
                if error.errno in _OUT_OF_RESOURCES:
                    await anyio.sleep(_RETRY_S)
                # BlockingIOError and ConnectionError: the client has closed the connection already.
                elif not isinstance(error, BlockingIOError | ConnectionError):
                    raise

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self._busy.add(request.protocol)
        try:
            path = self._access.check(request)
            handler = self._routes.get((request.method, path))
            if handler is None:
                methods = [method for method, route in self._routes if route == path]
                raise Refused(405 if methods else 404, "no such method or path at this door", allow=methods)
            self._access.check_content(request)
            response = await handler(request)
        except Refused as error:
            response = self._refusal(error, request)
            if error.allow:
                response.headers["Allow"] = ", ".join(error.allow)
            # A refused client must neither hold a connection nor send the rest of its body.
            response.force_close()
        finally:
            self._busy.discard(request.protocol)
        if self._server.free_connections.locked():
            response.force_close()
        return response
