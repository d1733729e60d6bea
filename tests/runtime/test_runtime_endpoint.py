"""The endpoint in whole runs: what goes through `policy.base_url` is what the session records and what the engine sampled."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import numpy as np
import pytest

aiohttp = pytest.importorskip("aiohttp", reason="needs the extra [http]")

from runtime_agents import over_http, scored_here  # noqa: E402
from runtime_helpers import REAL, ROOT, embedded  # noqa: E402
from test_runtime_agents import of_agents  # noqa: E402

from asyncrl import Runtime, Trajectory, load_config  # noqa: E402
from asyncrl.errors import ConfigError  # noqa: E402


async def test_the_same_agent_gives_the_same_tokens_in_process_and_over_http(tmp_path: Path) -> None:
    found: list[list[Trajectory]] = []
    for episode in (scored_here, over_http):
        async with Runtime(embedded(tmp_path), write=False) as runtime:
            found.append(await runtime.play(episode, {"prompt": "a3="}, n=4))
    for one, other in zip(*found, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.mask.tolist() == other.mask.tolist()
        assert one.logprobs.tobytes() == other.logprobs.tobytes() and one.reward == other.reward


async def test_a_configured_agent_trains_over_http_and_its_port_closes_with_the_run(tmp_path: Path) -> None:
    async with Runtime(of_agents(tmp_path, "over_http"), write=False) as runtime:
        summary = await runtime.run()
        url, _ = runtime.endpoint()
        assert summary.books.failed == 0 and summary.version == 3
        opened = runtime._require_open("x").endpoint._endpoint._keys._open.values()
        assert [each.session for each in opened] == [None]
    with pytest.raises(OSError):
        await anyio.connect_tcp("127.0.0.1", urlsplit(url).port or 0)


async def test_an_endpoint_that_nobody_asks_for_does_not_exist(tmp_path: Path) -> None:
    async with Runtime(embedded(tmp_path), write=False) as runtime:
        await runtime.play(scored_here, {"prompt": "a3="}, n=2)
        assert runtime._require_open("x").endpoint._endpoint is None


async def test_a_port_that_is_taken_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with Runtime(embedded(tmp_path, REAL, f"endpoint.port={port}"), write=False) as runtime:
            with pytest.raises(ConfigError, match="choose another port"):
                runtime.endpoint()


async def test_a_request_of_no_episode_is_not_trained_and_gets_any_temperature(tmp_path: Path) -> None:
    async with Runtime(embedded(tmp_path), write=False) as runtime:
        url, key = runtime.endpoint()
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:

            async def ask(**more: Any) -> Any:
                async with http.post(
                    f"{url}/completions", json={"prompt": "a3=", "return_token_ids": True, **more}
                ) as reply:
                    assert reply.status == 200, await reply.text()
                    return (await reply.json())["choices"][0]["token_ids"]

            assert await ask(temperature=0) == await ask(temperature=0)
            assert len({tuple(await ask(temperature=2)) for _ in range(5)}) > 1


@pytest.mark.slow
async def test_200_sessions_record_what_was_sampled_byte_for_byte(tmp_path: Path) -> None:
    """Each client keeps what it was told: tokens and log-probs are those of the trajectory, and of no other episode."""
    config = load_config(
        [ROOT / "examples" / "quickstart.yaml"],
        [
            f"run.dir={tmp_path}", "data.train=null", "reward.functions=[]", "train.max_steps=null",
            "train.schedule=constant", "rollout.groups_per_step=1", "rollout.group_size=200", "data.max_prompt_tokens=40",
            "rollout.max_tokens=16",
        ],
    )  # fmt: skip
    told: dict[str, list[Any]] = {}

    async def episode(task: dict[str, Any], policy: Any) -> float:
        ids = policy.encode(task["prompt"])
        headers = {"Authorization": f"Bearer {policy.api_key}"}
        replies = told.setdefault(policy.api_key, [])
        async with aiohttp.ClientSession(headers=headers) as http:
            for _ in range(2):
                body = {"token_ids": ids, "sampling_params": {"logprobs": 1, "max_tokens": 12}}
                async with http.post(
                    policy.base_url.removesuffix("/v1") + "/inference/v1/generate", json=body
                ) as reply:
                    found = await reply.json()
                assert found["prompt_token_ids"] == ids
                choice = found["choices"][0]
                replies.append(choice)
                ids = [*ids, *choice["token_ids"]]
        policy.note("key", float(policy.api_key.split("-")[1]))
        return 0.0

    async with Runtime(config, write=False) as runtime:
        with anyio.fail_after(300):
            trajectories = await runtime.play(episode, {"prompt": "a3="}, n=200)
    assert len(trajectories) == len(told) == 200
    by_number = {int(key.split("-")[1]): replies for key, replies in told.items()}
    for trajectory in trajectories:
        replies = by_number[int(trajectory.extras["own/key"])]
        tokens = [token for choice in replies for token in choice["token_ids"]]
        logprobs = [each["logprob"] for choice in replies for each in choice["logprobs"]["content"]]
        versions = [v for choice in replies for version, count in choice["policy_versions"] for v in [version] * count]
        assert trajectory.branches is None and trajectory.tokens[trajectory.mask].tolist() == tokens
        assert trajectory.logprobs[trajectory.mask].tobytes() == np.array(logprobs, np.float32).tobytes()
        assert trajectory.versions[trajectory.mask].tolist() == versions
    assert len({trajectory.tokens.tobytes() for trajectory in trajectories}) > 50


async def test_an_episode_that_ends_cancels_the_requests_it_left(tmp_path: Path) -> None:
    statuses: list[Any] = []
    tasks: list[asyncio.Task[None]] = []

    async def late(url: str, key: str) -> None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:
            for _ in range(2):
                async with http.post(f"{url}/completions", json={"prompt": "a3=", "n": 8}) as reply:
                    statuses.append((reply.status, await reply.json()))

    async def episode(task: dict[str, Any], policy: Any) -> float:
        await policy.complete(task["prompt"])
        tasks.append(asyncio.create_task(late(policy.base_url, policy.api_key)))
        await asyncio.sleep(0.02)
        return 1.0

    async with Runtime(embedded(tmp_path), write=False) as runtime:
        [trajectory] = await runtime.play(episode, {"prompt": "a3="}, n=1)
        await asyncio.gather(*tasks)
        assert trajectory.reward == 1.0 and statuses[-1][0] == 401
        assert "its coroutine returned or failed" in statuses[-1][1]["error"]["message"]
