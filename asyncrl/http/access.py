"""Who may use an HTTP door: the key, and what keeps web pages out.

A page that somebody reads on this machine can send requests to 127.0.0.1. It cannot know the key; nor can it send JSON to
another origin without asking (Content-Type), hide where it comes from (Origin), or take a name that is ours (Host, by which
DNS rebinding is told). All four are checked, before a byte of the body is read.

The key stands in the URL as the first part of the path, because a client of Atropos knows a base URL and nothing else; a
client that can send headers may use `Authorization: Bearer KEY` instead.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from asyncrl.config.checks import is_loopback, key_problem
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from aiohttp import web


LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Address:
    """Where an HTTP door listens, and who may come in."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    key: str | None = None  # None: made anew; "": none, on loopback only
    # By which clients call this machine, besides `host` and its own name.
    names: tuple[str, ...] = ()


class Refused(Exception):
    """A request that is answered with `status` and the reason."""

    def __init__(self, status: int, message: str, *, state: str = "refused") -> None:
        super().__init__(message)
        self.status = status
        self.state = state


class Access:
    """The checks of one door. Errors: ConfigError for a key that is none."""

    def __init__(self, address: Address) -> None:
        if problem := key_problem(address.host, address.key):
            raise ConfigError(problem)
        self._host = address.host.lower()
        self.key = secrets.token_urlsafe(24) if address.key is None else address.key
        self._names = {self._host, *(name.lower() for name in address.names)}
        self._any_address = self._host in ("0.0.0.0", "::")
        if self._any_address or is_loopback(self._host):
            self._names.update(LOCAL)
        if self._any_address:
            self._names.add(socket.gethostname().lower())

    def add(self, addresses: Iterable[str]) -> None:
        """What the door is bound to, once it is."""
        self._names.update(addresses)

    def url(self, port: int) -> str:
        """What a client is given as its base URL."""
        host = socket.gethostname() if self._any_address else self._host
        return f"http://{f'[{host}]' if ':' in host else host}:{port}{f'/{self.key}' if self.key else ''}"

    def check(self, request: web.BaseRequest) -> None:
        """Check Host, Origin and key of the request. Errors: Refused."""
        host = self._check_host(request.headers.getall("Host", []))
        for origin in request.headers.getall("Origin", []):
            if origin.lower() != f"http://{host}".lower():
                raise Refused(403, "a web page of another origin may not use this door; send no Origin header")
        if not self._has_key(request):
            raise Refused(
                401,
                "this request has no key, or not that of this run: use the whole URL that the run printed when it started "
                "(http://HOST:PORT/KEY), or the header `Authorization: Bearer KEY`; door.http_key sets it",
            )
        if (request.method == "POST" or request.body_exists) and request.content_type.lower() != "application/json":
            raise Refused(415, "Content-Type has to be application/json")

    def _check_host(self, given: list[str]) -> str:
        try:
            (host,) = given
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            raise Refused(400, "a request has one Host header, which names this door") from None
        if name in self._names or (self._any_address and _is_address(name)):
            return host
        raise Refused(
            421,
            f"Host is {name[:100]!r}, which is no name of this door; expected {', '.join(sorted(self._names))} (the run's "
            "door.http_names adds others)",
        )

    def _has_key(self, request: web.BaseRequest) -> bool:
        if not self.key:
            return True
        kind, _, bearer = request.headers.get("Authorization", "").partition(" ")
        given = bearer.strip() if kind.lower() == "bearer" else request.path[1:].partition("/")[0]
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self.key.encode())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
