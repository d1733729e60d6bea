"""What environments post: a request becomes groups, groups go into the ring, and both are counted."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio

from asyncrl.concurrency.offload import offload
from asyncrl.errors import RecordError, RecordTooLarge, TransportError
from asyncrl.records.check import Limits

from .access import Refused
from .body import MOST_BYTES, SMALL, Bodies, Body, receive, unpack
from .library import web
from .posted import Posted, read_groups
from .replies import reply
from .spread import Spread

MOST_INTERRUPTED = 1024  # requests remembered until they come again
MOST_SAID = 1000  # characters of a reason: it may repeat what was sent


@dataclass(slots=True)
class AtroposStatistics:
    """What came through the door so far."""

    groups: int = 0  # accepted
    without_logprobs: int = 0  # of them: trained at ratio 1
    refused: int = 0
    full: int = 0  # requests answered 503
    last_refusal: str = ""


class Groups:
    """Everything behind `/scored_data`. The rings stay the caller's."""

    def __init__(self, rings: Spread, limits: Limits, wait_s: float, hear: Callable[[int | None], None]) -> None:
        """`hear`: told of the environment of each group that was accepted."""
        self._rings = rings
        self._limits = limits
        self._wait_s = wait_s
        self._hear = hear
        self._bodies = Bodies()
        self._reading = anyio.Lock()  # of large bodies: two at a time take no less time, and twice the memory
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

    async def post(self, request: web.Request) -> web.Response:
        """200 where all were accepted, 422 where some cannot be trained, 503 where there is no room. Errors: Refused."""
        with self._bodies.counted() as hold:
            await self._bodies.wait_for_room(self._wait_s)
            try:
                body = await receive(request, MOST_BYTES, hold)
                encoding = request.headers.get("Content-Encoding", "")
                key, groups, size = await self._read(body, encoding)
                del body
                hold(size)
            except Refused as error:
                if error.status != 503:
                    self._refuse(str(error))
                raise
            return await self._take(key, groups)

    async def _read(self, body: Body, encoding: str) -> tuple[bytes, list[Posted], int]:
        """(what tells the same request from another, its groups, its unpacked bytes)."""
        limits, version = self._limits, max(self._rings.policy_version, 0)

        def read(most: int) -> tuple[bytes, list[Posted], int]:
            unpacked = unpack(body, encoding, most)
            return hashlib.blake2b(unpacked).digest(), read_groups(unpacked, limits, version), len(unpacked)

        if len(body) <= SMALL:
            try:
                return read(SMALL)
            except Refused as error:
                if error.status != 413:
                    raise
        async with self._reading:
            return await offload(lambda: read(MOST_BYTES), "http-body")

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
                    self.statistics.full += 1
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
                await self._rings.push(number, group.scored, timeout=self._wait_s)
        except (RecordError, RecordTooLarge):
            raise
        except TransportError as error:  # full, or nobody owns the ring
            return str(error)
        finally:
            self._pushing.discard(scope)
        if scope.cancelled_caught:
            return "the run ends; nothing was taken"
        self.statistics.groups += 1
        self.statistics.without_logprobs += not group.with_logprobs
        self._hear(posted.environment)
        self._accepted.append((posted.environment, len(group.scored)))
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
