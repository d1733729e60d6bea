"""The first request of a worker: load the functions, and say what their signatures take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import orjson

from asyncrl.errors import ConfigError, RewardCrash, RewardTimeout

from .calls import LoadedFunction, RewardSpec, remote_text
from .process import WorkerDiedError, WorkerProcess
from .wire import Kind


async def load(
    process: WorkerProcess, specs: Sequence[RewardSpec], request: dict[str, Any], limit_s: float
) -> list[LoadedFunction]:
    """Load the functions in a new worker. Errors: `ConfigError`, `RewardCrash`, `RewardTimeout`."""
    sources = ", ".join(s.function if isinstance(s.function, str) else repr(s.function) for s in specs)
    try:
        with anyio.fail_after(limit_s):
            kind, body = await process.reply(process.send(Kind.INIT, request))
    except TimeoutError:
        raise RewardTimeout(
            f"reward worker {process.pid} did not load {sources} within {limit_s:.0f} s: it is stopped, or stuck in an import"
        ) from None
    except WorkerDiedError as died:
        raise RewardCrash(
            f"reward worker {died.pid} {died.status} while it loaded {sources}; what it wrote is on stderr"
        ) from None
    reply = orjson.loads(body)
    if kind is Kind.ERROR:
        raise ConfigError(f"reward functions {sources}: {remote_text(reply)}")
    process.pid = reply["pid"]
    return [
        LoadedFunction(i, spec.name or found["name"], found["accepts"], found["asynchronous"])
        for i, (spec, found) in enumerate(zip(specs, reply["functions"], strict=True))
    ]
