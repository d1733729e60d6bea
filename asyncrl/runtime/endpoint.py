"""Opens the endpoint of a run (`policy.base_url`) at its first use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import anyio
import numpy as np

from asyncrl.concurrency.supervisor import plain_task_group
from asyncrl.environments.session import Agents, Session
from asyncrl.ports import Generate
from asyncrl.types import Prompt

if TYPE_CHECKING:
    from asyncrl.config.schema import Config
    from asyncrl.endpoint.endpoint import Endpoint


class LazyEndpoint:
    """The endpoint of a run, which does not exist until `open` is called."""

    def __init__(self, config: Config, agents: Agents, generate: Generate) -> None:
        self._config, self._agents, self._generate = config, agents, generate
        self._endpoint: Endpoint | None = None
        self._untrained_members = count(1)
        self._listening = anyio.Event()

    def open(self, session: Session | None, branch: str = "") -> tuple[str, str]:
        """(base URL, key) for a branch of the episode of `session`. `session=None`: for requests that belong to no episode and
        are not trained. Errors: ConfigError if the extra `http` is not installed, or if the endpoint cannot listen."""
        if self._endpoint is None:
            from asyncrl.endpoint.endpoint import Endpoint
            from asyncrl.http.access import Address

            chosen = self._config.endpoint
            self._endpoint = Endpoint(
                Address(chosen.host, chosen.port, names=chosen.names),
                self._config.run.name,
                untrained_session=self._untrained_session,
                max_context=self._agents.limits.max_context,
                count=self._agents.recorder.count,
            )
        address = self._endpoint.open(session, branch)
        # Wake `serve` only after `Endpoint.open` has succeeded: an error of `serve` would end the whole run.
        self._listening.set()
        return address

    def end(self, session: Session) -> None:
        """End the keys of an episode that has ended."""
        if self._endpoint is not None:
            self._endpoint.end(session)

    async def serve(self) -> None:
        """Waits for the first `open`, then answers requests."""
        await self._listening.wait()
        assert self._endpoint is not None
        await self._endpoint.serve()

    def _untrained_session(self) -> Session:
        # Each request gets a session with another member number, and so random numbers of its own.
        no_prompt, agents = Prompt(-1, np.zeros(0, np.int32), ""), replace(self._agents, end_session=None)
        return Session(no_prompt, next(self._untrained_members), 1, self._generate, agents)


@asynccontextmanager
async def lazy_endpoint(config: Config, agents: Agents, generate: Generate) -> AsyncIterator[LazyEndpoint]:
    """Lets `agents` open the endpoint. The endpoint closes at the end of the block."""
    endpoint = LazyEndpoint(config, agents, generate)
    agents.open_endpoint, agents.end_endpoint = endpoint.open, endpoint.end
    async with plain_task_group() as tasks:
        tasks.start_soon(endpoint.serve)
        try:
            yield endpoint
        finally:
            tasks.cancel_scope.cancel()
