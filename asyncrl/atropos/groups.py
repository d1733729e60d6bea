"""Receives groups from environment servers: parses the body of a request into groups, and pushes the groups into the rings."""

from __future__ import annotations

import hashlib
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import orjson

from asyncrl.client import AsyncClient, Scored
from asyncrl.concurrency.offload import offload
from asyncrl.errors import DataError, RecordError, RecordTooLarge, TransportError
from asyncrl.http.access import Refused
from asyncrl.http.server import receive, reply, web
from asyncrl.records.check import Limits

from .scored_data import read_group

# Limit for the bytes of one body, before and after decompression. A group of 64 x 32,768 tokens has about 70 MB.
MAX_BODY_BYTES = 1 << 27
# Limit of complete bodies that are parsed or whose groups wait for room in a ring.
MAX_BODIES = 16
# Limit for the bytes of all bodies, before decompression, until their requests are answered.
MAX_HELD_BYTES = 1 << 31
# Limits for one body. A list, an object or a text takes about 100 bytes of memory, a number 40.
MAX_OBJECTS = 1 << 20
MAX_VALUES = 1 << 24
MAX_GROUPS = 1024
# Requests with pushed groups that were cut off or got 503. They are remembered, because the sender repeats them.
MAX_INTERRUPTED = 1024
MAX_REASON_CHARACTERS = 1000  # because a reason may quote the request
_NO_MORE = "the run ends and accepts no more groups"
# (members, number of the environment) of a group that can be trained, or the reason why a group cannot be trained.
ReceivedGroup = tuple[list[Scored], int | None] | str


class RankRings:
    """The rings of all ranks on this machine. An HTTP request does not choose the rank that trains its group, so each group is
    pushed into the ring that holds the fewest records. Rings with equally many records take turns."""

    def __init__(self, clients: Sequence[AsyncClient]) -> None:
        self._clients = list(clients)

    @property
    def policy_version(self) -> int:
        """The newest policy version that a rank has published; 0 before the first version. Ranks may briefly differ."""
        return max(0, *(client.policy_version for client in self._clients))

    @property
    def records_held(self) -> int:
        """The number of records in all rings: accepted, and not trained or dropped yet."""
        return sum(client.statistics().records_held for client in self._clients)

    async def push(self, group: int, scored: Sequence[Scored], *, timeout: float) -> None:
        """`AsyncClient.push` into the emptiest ring. If this ring is full, the call waits for this ring only: all ranks train a
        step together, so no other ring has room earlier."""
        client = min(self._clients, key=lambda client: client.statistics().records_held)
        # `min` returns the first of several equal rings. Move this ring to the end, so that equal rings take turns.
        self._clients.remove(client)
        self._clients.append(client)
        await client.push(group, scored, timeout=timeout)


def decompress(body: bytes | bytearray, encoding: str) -> bytes | bytearray:
    """The decoded body. Errors: Refused with status 400 (not gzip), 413 (too many bytes) or 415 (unknown encoding)."""
    if encoding.lower() in ("", "identity"):
        return body
    if encoding.lower() not in ("gzip", "x-gzip"):
        raise Refused(415, f"Content-Encoding {encoding[:100]!r} is not supported; use gzip or none")
    decompressor = zlib.decompressobj(wbits=31)
    try:
        decompressed = decompressor.decompress(body, MAX_BODY_BYTES)
        if not decompressor.eof and decompressor.decompress(decompressor.unconsumed_tail, 1):
            raise Refused(
                413, f"the body has more than {MAX_BODY_BYTES:,} bytes after decompression; send fewer groups"
            )
    except zlib.error as error:
        raise Refused(400, f"the body is not valid gzip data: {error}") from error
    # A second gzip member would be lost in silence.
    if not decompressor.eof or decompressor.unused_data:
        raise Refused(400, "the gzip body is incomplete, or goes on after its first member; send one member")
    return decompressed


def read_groups(body: bytes | bytearray, limits: Limits, version: int) -> list[ReceivedGroup]:
    """The groups of a body. `version`: the newest policy version. Errors: Refused with status 400 (not JSON) or 413 (too large)."""
    # Count before any object is made: 100 KB of gzip may become gigabytes of objects.
    if sum(map(body.count, (b"[", b"{", b'"'))) > MAX_OBJECTS or body.count(b",") > MAX_VALUES:
        most = f"{MAX_OBJECTS:,} brackets and quotes, or {MAX_VALUES:,} values"
        raise Refused(413, f"the body has more than {most}; send fewer groups")
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"the body is not valid JSON (which has no NaN and no Infinity): {error}") from error
    items: list[Any] = payload if isinstance(payload, list) else [payload]
    if len(items) > MAX_GROUPS:
        raise Refused(413, f"the request has {len(items):,} groups; send at most {MAX_GROUPS:,} at a time")
    groups: list[ReceivedGroup] = []
    for item in items:
        try:
            members = read_group(item, limits, version)
            groups.append((members, item["env_id"] if type(item.get("env_id")) is int else None))
        # Numbers that are nested too deeply raise RecursionError.
        except (DataError, RecursionError) as error:
            groups.append(str(error))
    return groups


@dataclass(slots=True)
class AtroposStatistics:
    """Counts of an HTTP door."""

    groups: int = 0  # accepted groups
    refused: int = 0  # refused groups, and requests that were refused as a whole
    last_refusal: str = ""


class GroupReceiver:
    """Handles requests to `/scored_data` and `/scored_data_list`. The caller closes the rings."""

    def __init__(self, rings: RankRings, limits: Limits, wait_s: float, touch: Callable[[int | None], object]) -> None:
        """`wait_s`: longest wait of a request for room, in s. `touch`: gets the environment's number of each accepted group."""
        self._rings = rings
        self._limits = limits
        self._wait_s = wait_s
        self._touch = touch
        self._bodies = anyio.Semaphore(MAX_BODIES)
        self._held_bytes = 0
        self._read_lock = anyio.Lock()
        self._accepted: deque[tuple[int | None, int]] = deque()  # see `held`
        # Digest of a request -> indices of its groups that were pushed before it was cut off or got 503.
        self._interrupted: OrderedDict[bytes, set[int]] = OrderedDict()
        self._pushing: set[anyio.CancelScope] = set()
        self._next_group = 0
        self.ended = False
        self.statistics = AtroposStatistics()

    @property
    def waiting(self) -> int:
        """The number of groups that wait for room in a ring."""
        return len(self._pushing)

    def end(self) -> None:
        """Answer waiting and future requests with status 503, because the run ends."""
        self.ended = True
        for scope in self._pushing:
            scope.cancel()

    async def post(self, request: web.BaseRequest) -> web.Response:
        """Push the groups of a request. Status 200: all accepted; 422: some refused; 503: no room, or the run ends."""
        held_bytes = 0

        def count(size: int) -> None:
            nonlocal held_bytes
            held_bytes += size
            self._held_bytes += size
            if self._held_bytes > MAX_HELD_BYTES:
                raise Refused(503, "the bodies of all requests are too large together; send again later", state="full")

        try:
            # Receive before `acquire`, so that slow bodies cannot block complete bodies.
            body = await receive(request, MAX_BODY_BYTES, count)
            deadline = anyio.current_time() + self._wait_s
            try:
                with anyio.fail_at(deadline):
                    await self._bodies.acquire()
            except TimeoutError:
                message = "too many requests wait for room in the ring, so no group was accepted; send again later"
                raise Refused(503, message, state="full") from None
            try:
                encoding, version = request.headers.get("Content-Encoding", ""), self._rings.policy_version

                def read() -> tuple[bytes, list[ReceivedGroup]]:
                    decompressed = decompress(body, encoding)
                    return hashlib.blake2b(decompressed).digest(), read_groups(decompressed, self._limits, version)

                # Parse one body at a time: parsing two at the same time saves no time and takes twice the memory.
                async with self._read_lock:
                    digest, groups = await offload(read, "http-body")
                return await self._push_all(request, digest, groups, deadline)
            finally:
                self._bodies.release()
        except Refused as error:
            self._count_refusal(str(error))
            raise
        finally:
            self._held_bytes -= held_bytes

    async def _push_all(
        self, request: web.BaseRequest, digest: bytes, groups: list[ReceivedGroup], deadline: float
    ) -> web.Response:
        """Push the groups and make the reply. `digest`: of the request's body, so that a repeated request is recognized."""
        refused: list[dict[str, Any]] = []
        # A repeated request: skip the groups that were pushed the first time.
        pushed = self._interrupted.pop(digest, set())
        try:
            for index, group in enumerate(groups):
                if index in pushed:
                    continue
                try:
                    obstacle = await self._push(group, deadline)
                except (RecordError, RecordTooLarge) as error:
                    self._count_refusal(str(error))
                    refused.append({"index": index, "message": str(error)[:MAX_REASON_CHARACTERS]})
                    continue
                if obstacle:
                    return reply(503, status="full", message=obstacle)
                pushed.add(index)
            if request.transport is not None and not request.transport.is_closing():
                pushed = set()  # the request was not interrupted
        finally:  # also if the client has disconnected
            if pushed:
                self._interrupted[digest] = pushed
                while len(self._interrupted) > MAX_INTERRUPTED:
                    self._interrupted.popitem(last=False)
        accepted = len(groups) - len(refused)
        if refused:
            message = "; ".join(str(refusal["message"]) for refusal in refused)[:MAX_REASON_CHARACTERS]
            return reply(422, status="refused", message=message, groups_processed=accepted, refused=refused)
        return reply(200, status="received", groups_processed=accepted)

    async def _push(self, group: ReceivedGroup, deadline: float) -> str:
        """Push a group. Returns "", or the reason why the request gets status 503. Errors: RecordError, RecordTooLarge."""
        if self.ended:
            return _NO_MORE
        if isinstance(group, str):
            raise RecordError(group)
        members, environment = group
        number, self._next_group = self._next_group, self._next_group + 1
        scope = anyio.CancelScope()
        self._pushing.add(scope)
        try:
            with scope:
                await self._rings.push(number, members, timeout=max(0.0, deadline - anyio.current_time()))
        except (RecordError, RecordTooLarge):  # subclasses of TransportError
            raise
        except TransportError as error:  # the ring is full, or the run has ended
            return str(error)
        finally:
            self._pushing.discard(scope)
        if scope.cancelled_caught:
            return _NO_MORE
        self.statistics.groups += 1
        self._touch(environment)
        self._accepted.append((environment, len(members)))
        self.held()  # removes old entries of `_accepted`
        return ""

    def _count_refusal(self, reason: str) -> None:
        self.statistics.refused += 1
        self.statistics.last_refusal = reason[:MAX_REASON_CHARACTERS]

    def held(self) -> deque[tuple[int | None, int]]:
        """(number of the environment, number of members) of the newest accepted groups, as many as the rings hold records. Removes
        older entries."""
        held = self._rings.records_held
        while len(self._accepted) > held:
            self._accepted.popleft()
        return self._accepted
