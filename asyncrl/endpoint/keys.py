"""API keys of the endpoint. A key belongs to an episode, to a branch of an episode, or to requests of no episode."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import anyio

from asyncrl.environments.session import Session
from asyncrl.http.access import Access, Address, Refused, keys_of
from asyncrl.types import ChatAnswer

if TYPE_CHECKING:
    from aiohttp import web

ENDED = "the episode of this key has ended: its coroutine returned or failed; a request after its end would belong to no episode"
_KEY = re.compile(r"asyncrl-([0-9]{1,15})-[0-9a-f]{40}")
_VERSION = re.compile(r"^(/v1)+(?=/)")
# The answers to one request, by the index of the choice.
Answers = dict[int, ChatAnswer]


@dataclass(eq=False, slots=True)
class OpenKey:
    """A key whose episode has not ended, and the answers to its requests."""

    # None: the requests belong to no episode.
    session: Session | None
    branch: str
    requests: set[anyio.CancelScope] = field(default_factory=set)  # scopes of the running requests
    # Answers that are being sampled or sent, by `id(answers)`. The connection is None while they are being sampled.
    answering: dict[int, tuple[Answers, asyncio.Transport | None]] = field(default_factory=dict)
    # Sampled answers that no client got, by the digest of the request's path and body.
    undelivered: dict[bytes, list[Answers]] = field(default_factory=dict)
    delivered: OrderedDict[bytes, Answers] = field(default_factory=OrderedDict)  # sent answers, the oldest first


class EpisodeKeys(Access):
    """The keys of a run, and the checks of each request."""

    names_setting = "endpoint.names"

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._secret = secrets.token_bytes(32)
        self._open: dict[int, OpenKey] = {}
        self._issued = 0

    def url(self, port: int) -> str:
        return f"{self.origin(port)}/v1"

    def issue(self, session: Session | None, branch: str = "") -> str:
        """A new key for one branch of an episode. `session` None: for requests of no episode."""
        self._issued += 1
        self._open[self._issued] = OpenKey(session, branch)
        return self._key(self._issued)

    def end(self, session: Session) -> None:
        """Refuse the keys of a session from now on, and cancel their running requests. The session forgets answers that no client
        got."""
        for number, opened in [each for each in self._open.items() if each[1].session is session]:
            del self._open[number]
            for scope in list(opened.requests):
                scope.cancel()
            # A client may have a whole answer before the handler resumes from the write. The write buffer is then empty.
            unsent = [
                answers
                for answers, connection in opened.answering.values()
                if not connection or connection.is_closing() or connection.get_write_buffer_size()
            ]
            for answers in [*unsent, *chain(*opened.undelivered.values())]:
                for answer in answers.values():
                    session.forget(answer.generation)

    def check_key(self, request: web.BaseRequest) -> str:
        return self.find(request)[1]

    def find(self, request: web.BaseRequest) -> tuple[OpenKey, str]:
        """(the `OpenKey` of the request, path without key and `/v1`). Errors: Refused."""
        for key, path in keys_of(request):
            number = self._number(key)
            if number is None:
                continue
            opened = self._open.get(number)
            if opened is None:
                raise Refused(401, ENDED)
            return opened, _VERSION.sub("", path)
        raise Refused(
            401,
            "the request has no key, or a key of another run: send policy.api_key as `Authorization: Bearer KEY` or "
            "`x-api-key`; each episode has its own key",
        )

    def _key(self, number: int) -> str:
        digest = hmac.digest(self._secret, str(number).encode(), "sha256").hex()[:40]
        return f"asyncrl-{number}-{digest}"

    def _number(self, key: str) -> int | None:
        """The number of a key that this object issued; None for any other text. Compares in constant time."""
        match = _KEY.fullmatch(key)
        if match is None:
            return None
        number = int(match[1])
        return number if hmac.compare_digest(key, self._key(number)) else None
