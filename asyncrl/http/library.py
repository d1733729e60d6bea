"""aiohttp, or what to install."""

from __future__ import annotations

import logging

from asyncrl.builds import install
from asyncrl.errors import ConfigError

try:
    from aiohttp import ClientPayloadError, web
    from aiohttp.http_exceptions import HttpProcessingError
except ImportError as error:  # pragma: no cover - the whole point is to be importable only with the extra
    raise ConfigError(
        f"the HTTP door needs aiohttp, which is not installed; {install('http')}, or push through shared memory "
        "(asyncrl.client)"
    ) from error

Unreadable = (HttpProcessingError, ClientPayloadError, web.RequestPayloadError)  # the sender's fault

log = logging.getLogger("asyncrl.http")  # of aiohttp's server
# Anybody may send such bytes, without a key and for ever: they are answered 400, and fill no log with tracebacks.
log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], Unreadable)))

__all__ = ["Unreadable", "log", "web"]
