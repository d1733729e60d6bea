"""What `door.http_host` and `door.http_key` may be: asked before a run loads its model, and by a door that opens without a run."""

from __future__ import annotations

import ipaddress
import re

_KEY = re.compile(r"[A-Za-z0-9._~-]{16,256}")  # a part of a URL as it is, and nothing that is guessed


def is_loopback(host: str) -> bool:
    """Only programs of this machine reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def key_problem(host: str, key: str | None) -> str | None:
    """What is wrong, in one sentence; None: nothing. `key` None is one that the door makes, "" is none at all."""
    if key is None or _KEY.fullmatch(key):
        return None
    if key:
        return (
            f"door.http_key has {len(key)} characters, or some that a URL cannot hold; expected 16 to 256 letters, digits or "
            "any of . _ ~ - (leave it out, and the run makes one)"
        )
    if is_loopback(host):
        return None
    return (
        f'door.http_key is "" and door.http_host {host}: without a key everybody who reaches that address could train this '
        "run; leave the key out, and the run makes one, or listen at 127.0.0.1"
    )
