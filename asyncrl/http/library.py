"""aiohttp, or what to install."""

from __future__ import annotations

from asyncrl.errors import ConfigError

try:
    from aiohttp import ClientPayloadError, web
    from aiohttp.http_exceptions import HttpProcessingError
except ImportError as error:  # pragma: no cover - the whole point is to be importable only with the extra
    raise ConfigError(
        "the HTTP door needs aiohttp, which is not installed; pip install 'asyncrl[http]', or push through shared memory "
        "(asyncrl.client)"
    ) from error

__all__ = ["ClientPayloadError", "HttpProcessingError", "web"]
