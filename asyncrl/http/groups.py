"""What environments post: the bytes of a request become groups, groups go into the ring, and both are counted."""

from __future__ import annotations

import hashlib
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import orjson

from asyncrl.client import AsyncClient, Scored
from asyncrl.concurrency.offload import offload
from asyncrl.errors import DataError, RecordError, RecordTooLarge, TransportError
from asyncrl.records.check import Limits

from .access import Refused
from .scored_data import read_group
from .server import receive, reply, web

# Bytes of one body, unpacked: a group of 64 x 32,768 tokens has some 70 MB.
MOST_BYTES = 1 << 27
# Bodies that are read into groups or wait for room in the ring.
MOST_BODIES = 16
# Bytes of all bodies, as they were sent, that are received or wait.
MOST_HELD = 1 << 31
# Of one body. Lists, objects and texts take some 100 bytes each, numbers 40.
MOST_OBJECTS = 1 << 20
MOST_VALUES = 1 << 24
# Of one request, and of one group.
MOST_GROUPS = 1024
MOST_MEMBERS = 4096
# Requests that are remembered until they come again.
MOST_INTERRUPTED = 1024
# Characters of a reason: it may repeat what was sent.
MOST_SAID = 1000
# Of the example that people look at.
_SHOWN_TOKENS = 1 << 14
_SHOWN = ("tokens", "masks", "scores", "inference_logprobs", "messages")


class Spread:
    """The rings of all ranks of this machine as one. Pushes each group, whole, into the ring that holds the fewest records, in turn
    where they hold equally many: an HTTP request does not name the rank that trains its group."""

    def __init__(self, clients: Sequence[AsyncClient]) -> None:
        if not clients:
            raise ValueError("an HTTP door needs the client of at least one ring")
        self._clients = list(clients)

    @property
    def policy_version(self) -> int:
        """The newest of any rank; they differ for a moment only. 0 before there is one."""
        return max(0, *(client.policy_version for client in self._clients))

    @property
    def records_held(self) -> int:
        """Accepted and not yet trained or dropped."""
        return sum(client.statistics().records_held for client in self._clients)

    async def push(self, group: int, scored: Sequence[Scored], *, timeout: float) -> None:
        """As `AsyncClient.push`. Where every ring is full it waits for the one it chose: they empty step by step together."""
        client = min(self._clients, key=lambda client: client.statistics().records_held)
        self._clients.remove(client)
        # The next group looks at the others first.
        self._clients.append(client)
        await client.push(group, scored, timeout=timeout)


@dataclass(frozen=True, slots=True)
class Posted:
    """One group of a request, or why it cannot be trained. `shown`: its first members."""

    group: list[Scored] | None
    refusal: str
    environment: int | None
    shown: dict[str, Any]


def unpack(body: bytes | bytearray, encoding: str) -> bytes | bytearray:
    """Errors: Refused: it is not what it says (400), of an unknown encoding (415), or has too many bytes (413)."""
    if encoding.lower() in ("", "identity"):
        return body
    if encoding.lower() not in ("gzip", "x-gzip"):
        raise Refused(415, f"Content-Encoding {encoding[:100]!r} is unknown here; use gzip or none")
    unpacker = zlib.decompressobj(wbits=31)
    try:
        unpacked = unpacker.decompress(body, MOST_BYTES)
        if not unpacker.eof and unpacker.decompress(unpacker.unconsumed_tail, 1):
            raise Refused(
                413, f"the body has more than {MOST_BYTES:,} bytes, unpacked; send fewer groups in one request"
            )
    except zlib.error as error:
        raise Refused(400, f"the body is no gzip: {error}") from error
    if not unpacker.eof:
        raise Refused(400, "the gzip body is cut off")
    return unpacked


def read_groups(body: bytes | bytearray, limits: Limits, version: int) -> list[Posted]:
    """In their order. `version`: the policy version now. Errors: Refused: no JSON (400), or too much of it (413)."""
    # Before any object is built: 100 KB of gzip may become gigabytes of objects.
    if sum(map(body.count, (b"[", b"{", b'"'))) > MOST_OBJECTS or body.count(b",") > MOST_VALUES:
        raise Refused(
            413,
            f"the body has more than {MOST_OBJECTS:,} brackets and quotes, or {MOST_VALUES:,} values; send fewer groups",
        )
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"the body is no JSON (NaN and Infinity are none): {error}") from error
    items: list[Any] = payload if isinstance(payload, list) else [payload]
    if len(items) > MOST_GROUPS:
        raise Refused(413, f"the request has {len(items):,} groups; send at most {MOST_GROUPS:,} at a time")
    found = []
    for item in items:
        try:
            found.append(_read(item, limits, version))
        except DataError as error:
            found.append(Posted(None, str(error), None, {}))
        except RecursionError:
            found.append(Posted(None, "the group is nested too deep", None, {}))
    return found


def _read(item: Any, limits: Limits, version: int) -> Posted:
    tokens = item.get("tokens") if isinstance(item, Mapping) else None
    if isinstance(tokens, list) and len(tokens) > MOST_MEMBERS:
        raise DataError(f"the group has {len(tokens):,} members; at most {MOST_MEMBERS:,} are compared with each other")
    group = read_group(item, limits, version)
    environment = item.get("env_id")
    return Posted(group, "", environment if isinstance(environment, int) else None, _shown(item, group))


def _shown(item: Mapping[str, Any], group: list[Scored]) -> dict[str, Any]:
    members = size = 0
    while members < len(group) and (not members or size < _SHOWN_TOKENS):
        size += len(group[members].tokens)
        members += 1
    columns = {name: item.get(name) for name in _SHOWN}
    shown = {name: column[:members] if isinstance(column, list) else [] for name, column in columns.items()}
    return shown | {"env_id": item.get("env_id")}


@dataclass(slots=True)
class AtroposStatistics:
    """What came through the door so far."""

    groups: int = 0  # accepted
    refused: int = 0
    last_refusal: str = ""


class Groups:
    """Everything behind `/scored_data`. The rings stay the caller's."""

    def __init__(self, rings: Spread, limits: Limits, wait_s: float, touch: Callable[[int | None], None]) -> None:
        """`touch`: is called with the environment of each group that was accepted."""
        self._rings = rings
        self._limits = limits
        self._wait_s = wait_s
        self._touch = touch
        self._bodies = anyio.Semaphore(MOST_BODIES)
        self._held = 0
        self._reading = anyio.Lock()
        self._accepted: deque[tuple[int | None, int]] = deque()  # (environment, sequences) of the newest groups
        self._interrupted: OrderedDict[bytes, set[int]] = OrderedDict()
        self._pushing: set[anyio.CancelScope] = set()
        self._next_group = 0
        self.latest: dict[str, Any] = {}
        self.over = False
        self.statistics = AtroposStatistics()

    @property
    def waiting(self) -> int:
        """Groups that wait for room."""
        return len(self._pushing)

    def end(self) -> None:
        """The run ends: who waits is answered 503, as is who comes."""
        self.over = True
        for scope in self._pushing:
            scope.cancel()

    async def post(self, request: web.BaseRequest) -> web.Response:
        """200 where all were accepted, 422 where some cannot be trained, 503 where there is no room. Errors: Refused."""
        sizes: list[int] = []

        def count(size: int) -> None:
            sizes.append(size)
            self._held += size
            if self._held > MOST_HELD:
                raise Refused(503, "the bodies of all requests are too large together; send again later", state="full")

        try:
            # A body that never ends must not take one of the places in which whole bodies wait.
            body = await receive(request, MOST_BYTES, count)
            try:
                with anyio.fail_after(self._wait_s):
                    await self._bodies.acquire()
            except TimeoutError:
                message = "too many requests wait for room in the ring; nothing was taken"
                raise Refused(503, message, state="full") from None
            try:
                return await self._take(*await self._read(request, body))
            finally:
                self._bodies.release()
        except Refused as error:
            self._refuse(str(error))
            raise
        finally:
            self._held -= sum(sizes)

    async def _read(self, request: web.BaseRequest, body: bytearray) -> tuple[bytes, list[Posted]]:
        """What tells the same request from another, and its groups."""
        encoding = request.headers.get("Content-Encoding", "")
        limits, version = self._limits, self._rings.policy_version

        def read() -> tuple[bytes, list[Posted]]:
            unpacked = unpack(body, encoding)
            return hashlib.blake2b(unpacked).digest(), read_groups(unpacked, limits, version)

        # Two bodies at a time take no less time, and twice the memory.
        async with self._reading:
            return await offload(read, "http-body")

    async def _take(self, key: bytes, groups: list[Posted]) -> web.Response:
        refused: list[dict[str, Any]] = []
        done = self._interrupted.pop(key, set())  # when it came before
        try:
            for index, posted in enumerate(groups):
                if index in done:
                    continue
                try:
                    full = await self._push(posted)
                except (RecordError, RecordTooLarge) as error:
                    self._refuse(str(error))
                    refused.append({"index": index, "message": str(error)[:MOST_SAID]})
                    continue
                if full:
                    return reply(503, status="full", message=full)
                done.add(index)
            done = set()
        finally:  # also where the sender left
            if done:
                self._interrupted[key] = done
                while len(self._interrupted) > MOST_INTERRUPTED:
                    self._interrupted.popitem(last=False)
        accepted = len(groups) - len(refused)
        if refused:
            message = "; ".join(str(one["message"]) for one in refused)[:MOST_SAID]
            return reply(422, status="refused", message=message, groups_processed=accepted, refused=refused)
        return reply(200, status="received", groups_processed=accepted)

    async def _push(self, posted: Posted) -> str:
        """Empty where it was accepted, else why there is no room. Errors: RecordError, RecordTooLarge."""
        if self.over:
            return "the run ends; nothing was taken"
        group = posted.group
        if group is None:
            raise RecordError(posted.refusal)
        number, self._next_group = self._next_group, self._next_group + 1
        scope = anyio.CancelScope()
        self._pushing.add(scope)
        try:
            with scope:
                await self._rings.push(number, group, timeout=self._wait_s)
        except (RecordError, RecordTooLarge):
            raise
        except TransportError as error:  # full, or nobody owns the ring
            return str(error)
        finally:
            self._pushing.discard(scope)
        if scope.cancelled_caught:
            return "the run ends; nothing was taken"
        self.statistics.groups += 1
        self._touch(posted.environment)
        self._accepted.append((posted.environment, len(group)))
        self.latest = posted.shown
        self.held()
        return ""

    def _refuse(self, reason: str) -> None:
        self.statistics.refused += 1
        self.statistics.last_refusal = reason[:MOST_SAID]

    def held(self) -> deque[tuple[int | None, int]]:
        """The groups that were accepted and are not trained or dropped: as many as the ring still holds, the newest."""
        held = self._rings.records_held
        while len(self._accepted) > held:
            self._accepted.popleft()
        return self._accepted
