"""JSON replies."""

from __future__ import annotations

from typing import Any

import orjson

from .library import web


def reply(code: int, **fields: Any) -> web.Response:
    """The fields as a JSON object."""
    return web.Response(status=code, body=orjson.dumps(fields), content_type="application/json")
