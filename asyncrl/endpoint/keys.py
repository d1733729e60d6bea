"""Keys of the endpoint: one for each episode, or branch of an episode. A key names the session to which a request belongs."""

from __future__ import annotations

import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import anyio

from asyncrl.environments.session import Session
from asyncrl.http.access import Access, Address, Refused, keys_of
from asyncrl.types import ChatAnswer

if TYPE_CHECKING:
    from aiohttp import web

# How many ended keys keep their reasons. A request with an older key gets a general reason.
_MOST_ENDED = 10_000
_KEY = re.compile(r"asyncrl-(\d{1,15})-[0-9a-f]{40}")
_VERSION = re.compile(r"^(/v1)+(?=/)")
# The answers to one request, by the index of the choice.
Answers = dict[int, ChatAnswer]


@dataclass(eq=False, slots=True)
class OpenEpisode:
    """The session of one key, and the answers to requests with this key."""

    # Returns the session of an episode. For requests of no episode each call makes a new session.
    session: Callable[[], Session]
    branch: str
    ended: str | None = None  # the reason
    requests: set[anyio.CancelScope] = field(default_factory=set)
    # Answers that are being sampled.
    answering: list[Answers] = field(default_factory=list)
    # Sampled answers that no client got, by the digest of the request's path and body.
    undelivered: dict[bytes, list[Answers]] = field(default_factory=dict)
    delivered: OrderedDict[bytes, Answers] = field(default_factory=OrderedDict)


class EpisodeKeys(Access):
    """The keys, and the checks of each request."""

    names_setting = "endpoint.names"

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._secret = secrets.token_bytes(32)
        self._open: dict[int, OpenEpisode] = {}
        self._ended: OrderedDict[int, str] = OrderedDict()
        self._issued = 0

    def url(self, port: int) -> str:
        return f"{self.origin(port)}/v1"

    def issue(self, session: Callable[[], Session], branch: str) -> str:
        """A new key for a session."""
        self._issued += 1
        self._open[self._issued] = OpenEpisode(session, branch)
        return self._key(self._issued)

    def end(self, key: str, reason: str) -> None:
        """Refuse the key from now on, cancel its open requests, and forget answers that no client got. Does nothing for a key that
        has ended."""
        number = self._number(key)
        episode = None if number is None else self._open.pop(number, None)
        if number is None or episode is None:
            return
        episode.ended = self._ended[number] = reason
        if len(self._ended) > _MOST_ENDED:
            self._ended.popitem(last=False)
        for scope in list(episode.requests):
            scope.cancel()
        for answers in [*episode.answering, *chain(*episode.undelivered.values())]:
            for answer in answers.values():
                episode.session().forget(answer.generation)

    def check_key(self, request: web.BaseRequest) -> str:
        return self.find(request)[1]

    def find(self, request: web.BaseRequest) -> tuple[OpenEpisode, str]:
        """(episode of the key, path without key and `/v1`). Errors: Refused."""
        for key, path in keys_of(request):
            number = self._number(key)
            if number is None:
                continue
            episode = self._open.get(number)
            if episode is None:
                raise Refused(401, ended_message(self._ended.get(number, "the reason is no longer known")))
            return episode, _VERSION.sub("", path)
        raise Refused(
            401,
            "the request has no key, or a key of another run: send policy.api_key as `Authorization: Bearer KEY` or "
            "`x-api-key`; each episode has its own key",
        )

    def _key(self, number: int) -> str:
        digest = hmac.digest(self._secret, str(number).encode(), "sha256").hex()[:40]
        return f"asyncrl-{number}-{digest}"

    def _number(self, key: str) -> int | None:
        """The number of a key that this object issued. Compares in constant time."""
        match = _KEY.fullmatch(key)
        if match is None:
            return None
        number = int(match[1])
        return number if hmac.compare_digest(key, self._key(number)) else None


def ended_message(reason: str) -> str:
    """The message for a request with the key of an ended episode."""
    return f"the episode of this key has ended: {reason}; a request after its end would belong to no episode"
