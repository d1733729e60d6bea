"""An open endpoint over sessions whose engine replies with given texts, and a client without a library of its own."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import anyio
from environments_chat import Script, session_of

from asyncrl.endpoint.endpoint import Endpoint
from asyncrl.environments.session import Session
from asyncrl.http.access import Address
from asyncrl.types import Generation, GenerationRequest

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "How is the weather in Bonn?"}]}
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Bonn"}}\n</tool_call>'


class Held:
    """An engine whose replies wait for `free`. `asked` is set when a request has arrived."""

    def __init__(self, script: Script) -> None:
        self.script, self.free, self.asked = script, anyio.Event(), anyio.Event()
        self.running = 0

    async def __call__(self, request: GenerationRequest) -> Generation:
        self.running += 1
        self.asked.set()
        try:
            await self.free.wait()
        finally:
            self.running -= 1
        return await self.script(request)


@dataclass
class Opened:
    endpoint: Endpoint
    session: Session
    url: str
    key: str
    http: aiohttp.ClientSession
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def origin(self) -> str:
        return self.url.removesuffix("/v1")

    async def post(self, path: str, body: Any, key: str | None = None, **headers: str) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.key if key is None else key}", **headers}
        async with self.http.post(self.origin + path, json=body, headers=headers) as reply:
            text = await reply.text()
            return reply.status, await reply.json() if reply.content_type == "application/json" else text


@contextlib.asynccontextmanager
async def opened(
    engine: Any, family: str = "qwen2_5", address: Address | None = None, **limits: Any
) -> AsyncIterator[Opened]:
    counts: Counter[str] = Counter()
    session = session_of(family, engine, **limits)
    endpoint = Endpoint(
        address or Address(port=0),
        "policy",
        untrained_session=lambda: session_of(family, engine, **limits),
        max_context=5000,
        count=lambda name, number: counts.update({name: number}),
    )
    async with anyio.create_task_group() as tasks, aiohttp.ClientSession() as http:
        tasks.start_soon(endpoint.serve)
        url, key = endpoint.open(session)
        yield Opened(endpoint, session, url, key, http, counts)
        tasks.cancel_scope.cancel()
