"""A real server of OpenEnv, played and trained by a run: a session for each episode, which the server closes in every case."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("openenv", reason="needs openenv: python tools/adapters.py openenv")

import uvicorn
from adapters_helpers import cancel_play, chat_model, open_run, turns_of
from from_openenv import from_openenv
from openenv.core import GenericEnvClient
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

# The server's own libraries warn of each other.
pytestmark = pytest.mark.filterwarnings("ignore")
counts = {"opened": 0, "closed": 0}
asked, released = asyncio.Event(), asyncio.Event()


def build(seed: int) -> tuple[Any, Any]:
    return chat_model(seed, ["left", "right"])


class Said(Action):
    message: str


class Seen(Observation):
    text: str = ""


class Maze(Environment[Said, Seen, State]):  # type: ignore[misc]
    """Two doors in turn. The right one is worth 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.doors, self.fault, self.is_open = 0, "", False

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Seen:
        self.doors, self.fault = 0, options.get("fault", "")
        self.is_open = True
        counts["opened"] += 1
        return Seen(text="left or right?", done=False, reward=0.0)

    async def step_async(self, action: Said, timeout_s: float | None = None, **_: Any) -> Seen:
        if self.fault == "raises":
            raise ValueError("broken maze")
        if self.fault == "waits":
            asked.set()
            await released.wait()
        self.doors += 1
        return Seen(text="and now?", done=self.doors == 2, reward=float(action.message == "right"))

    def step(self, action: Said, timeout_s: float | None = None, **_: Any) -> Seen:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State(step_count=self.doors)

    def close(self) -> None:
        counts["closed"] += self.is_open
        self.is_open = False


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    app = create_fastapi_app(Maze, Said, Seen, max_concurrent_envs=64)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
        serve = asyncio.create_task(server.serve([listening]))
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        await serve


async def test_a_server_of_openenv_trains_a_step_and_every_session_is_closed() -> None:
    async with serving() as url, open_run(f"{__file__}:build", "rollout.max_tokens=2") as runtime:
        episode = from_openenv(lambda: GenericEnvClient(base_url=url), lambda seen: seen["text"])
        groups = [await runtime.play(episode, {"question": 1}, n=8) for _ in range(2)]
        assert await runtime.play(episode, {"reset": {"fault": "raises"}}, n=2) == []
        await cancel_play(runtime, episode, {"reset": {"fault": "waits"}}, asked.is_set)
        released.set()
        while counts["closed"] < counts["opened"]:  # noqa: ASYNC110  the server says nothing of it
            await asyncio.sleep(0.01)
        summary = await runtime.finish()
    # Of two members that fail, the second may be cancelled before it has an environment.
    assert counts["opened"] == counts["closed"] in (18, 19)
    for trajectory in [*groups[0], *groups[1]]:
        said = [m["content"] for m in trajectory.completion if m["role"] == "assistant"]
        assert turns_of(trajectory) == len(said) == 2 and trajectory.reward == said.count("right")
        assert "and now?" in runtime.tokenizer.decode(trajectory.tokens)
    assert len({t.reward for group in groups for t in group}) > 1
    assert summary.version == 1 and summary.books.failed == 1 and summary.books.dropped == 1
