"""Access control of an HTTP door (a server of the run, for other programs): a key, and checks against requests of web pages.

A web page in a browser on this machine can send requests to 127.0.0.1. These checks refuse such requests before the body is read:
* Key: the page does not know it.
* Content-Type must be JSON. To another origin a browser sends JSON only after a preflight request, which the door refuses.
* Origin: a browser sends the origin of the page. Host: after DNS rebinding a browser sends the host name of the page.

The key is the first part of the URL's path, because a client of Atropos is configured with a base URL only. Clients that can send
headers may use `Authorization: Bearer KEY` or `x-api-key: KEY` instead.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Iterable, Sequence
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
    """The address, the key and the host names of an HTTP door."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    key: str | None = None  # None: a random key; "": no key, on loopback only
    names: tuple[str, ...] = ()  # further host names that clients may use


class Refused(Exception):
    """Ends a request with the HTTP status `status`. The default reply is the JSON `{"status": state, "message": message}`."""

    def __init__(self, status: int, message: str, *, state: str = "refused", allow: Sequence[str] = ()) -> None:
        """`allow`: the methods that the path takes, for the header Allow of status 405."""
        super().__init__(message)
        self.status = status
        self.state = state
        self.allow = allow


class Access:
    """The access checks of one door. `names_setting`: the setting that adds host names. Errors: ConfigError for an invalid key."""

    names_setting = "door.http_names"

    def __init__(self, address: Address) -> None:
        if problem := key_problem(address.host, address.key):
            raise ConfigError(problem)
        self.address = address
        self._host = address.host.lower()
        self.key = secrets.token_urlsafe(24) if address.key is None else address.key
        self._names = {self._host, *(name.lower() for name in address.names)}
        self._is_wildcard = self._host in ("0.0.0.0", "::")
        if self._is_wildcard or is_loopback(self._host):
            self._names.update(LOCAL)
        if self._is_wildcard:
            self._names.add(socket.gethostname().lower())

    def add(self, addresses: Iterable[str]) -> None:
        """Accept these addresses as Host. The server calls `add` with the addresses of its sockets."""
        self._names.update(addresses)

    def origin(self, port: int) -> str:
        """The URL for clients, without the key and without a path."""
        host = socket.gethostname() if self._is_wildcard else self._host
        # A URL needs brackets around an IPv6 address.
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def url(self, port: int) -> str:
        """The base URL for clients, with the key."""
        return f"{self.origin(port)}/{self.key}" if self.key else self.origin(port)

    def check(self, request: web.BaseRequest) -> str:
        """Check Host, Origin and key of the request. Returns the path without the key. Errors: Refused."""
        host = self._check_host(request.headers.getall("Host", []))
        for origin in request.headers.getall("Origin", []):
            if origin.lower() != f"http://{host}".lower():
                raise Refused(403, "the request comes from a web page of another origin; send no Origin header")
        return self.check_key(request)

    def check_content(self, request: web.BaseRequest) -> None:
        """Errors: Refused if a POST request, or another request with a body, has a Content-Type that is not JSON."""
        if (request.method == "POST" or request.body_exists) and request.content_type.lower() != "application/json":
            raise Refused(415, f"Content-Type is {request.content_type[:100]!r}; send application/json")

    def check_key(self, request: web.BaseRequest) -> str:
        """Returns the path without the key. Errors: Refused."""
        if not self.key:
            return request.path
        for key, path in keys_of(request):
            if hmac.compare_digest(key.encode("utf-8", "surrogateescape"), self.key.encode()):
                return path
        raise Refused(
            401,
            "the request has no key, or a wrong key: use the complete URL that the run printed at its start "
            "(http://HOST:PORT/KEY), or the header `Authorization: Bearer KEY`; the setting door.http_key sets the key",
        )

    def _check_host(self, headers: list[str]) -> str:
        try:
            (host,) = headers
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            raise Refused(400, "the request needs exactly one valid Host header") from None
        if name in self._names or (self._is_wildcard and _is_address(name)):
            return host
        raise Refused(
            421,
            f"Host is {name[:100]!r}; expected one of {', '.join(sorted(self._names))}. The setting {self.names_setting} "
            "adds names",
        )


def keys_of(request: web.BaseRequest) -> list[tuple[str, str]]:
    """Two possible keys, each with the path without that key: the first part of the path, and the key of a header ("" if none)."""
    first, slash, rest = request.path[1:].partition("/")
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    header = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    return [(first, slash + rest), (header, request.path)]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
