"""A port for ranks that are about to start, which nobody else on the machine is given meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Hold it until the ranks have ended.

    A port that is chosen and let go may be somebody else's when a rank listens at it, seconds later. This one stays bound: the
    kernel gives it to nobody who asks for any. Nobody listens here, so whoever binds this very port with SO_REUSEADDR, as torch's
    store does, gets it, and whoever connects before that is refused.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
