"""Sampled tokens a second of concurrent sessions: through `policy.base_url` against the policy in the process.

    for each repetition:   in the process  ->  over HTTP      the same run, the quickstart's model, requests of a fixed length

The client is in the run's own event loop, as an agent's is, so its work counts, too. All rewards are 0, so that no step
trains. The order turns with every repetition.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median
from typing import Any

from asyncrl import Runtime, load_config

from .command import Bench, Measured, Place, child_options, option, turned

EXAMPLES = Path(__file__).parents[3] / "examples"


def measure(place: Place) -> Measured:
    options = place.options
    own = {"model.path": f"{EXAMPLES}/quickstart_model.py:build", "model.dtype": "float32", "threads": 1}
    rollout = {
        "group_size": options.sessions,
        "groups_per_step": 1,
        "max_tokens": options.max_tokens,
        "ignore_eos": "true",
    }
    own |= {f"rollout.{name}": value for name, value in rollout.items()}
    config = load_config([], [f"{name}={value}" for name, value in (own | {"checkpoint.save_final": "false"}).items()])
    rates = asyncio.run(_rates(place, config))
    ratio = median(over / within for within, over in zip(rates["in the process"], rates["over HTTP"], strict=True))
    place.write(tokens_per_s=rates, ratio=ratio)
    lines = [f"{side:16}{median(values):10.1f} tokens/s" for side, values in rates.items()]
    return Measured([*lines, f"ratio           {ratio:10.3f}"])


async def _rates(place: Place, config: Any) -> dict[str, list[float]]:
    import aiohttp
    import orjson

    options = place.options
    rates: dict[str, list[float]] = {"in the process": [], "over HTTP": []}
    async with (
        Runtime(config, write=False) as runtime,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        times: list[float] = []

        def timed(episode: Any) -> Any:
            # A group waits for a slot before its first request.
            async def play(task: Any, policy: Any) -> float:
                times.append(time.perf_counter())
                await episode(task, policy)
                times.append(time.perf_counter())
                return 0.0

            return play

        async def within(task: Any, policy: Any) -> None:
            for _ in range(options.requests):
                await policy.complete(task["prompt"])

        async def over(task: Any, policy: Any) -> None:
            headers = {"Authorization": f"Bearer {policy.api_key}", "Content-Type": "application/json"}
            body = orjson.dumps({"prompt": task["prompt"], "return_token_ids": True})
            for _ in range(options.requests):
                async with http.post(f"{policy.base_url}/completions", data=body, headers=headers) as reply:
                    orjson.loads(await reply.read())["choices"][0]["token_ids"]

        episodes = {"in the process": within, "over HTTP": over}
        for repetition in range(-1, options.repetitions):
            for side in turned(episodes, repetition):
                times.clear()
                played = await runtime.play(timed(episodes[side]), {"prompt": "a3="})
                rate = sum(each.sampled_length for each in played) / (max(times) - min(times))
                # The first round opens the endpoint and warms both sides up.
                if repetition >= 0:
                    rates[side].append(rate)
                    place.say(f"{side}: {rate:.0f} tokens/s")
    return rates


BENCH = Bench(
    "endpoint",
    __doc__,
    "2 sessions",
    (
        option("--sessions", 64, "concurrent episodes", 2),
        option("--requests", 4, "of each episode", 2),
        option("--max-tokens", 128, "of each request", 8),
        option("--repetitions", 3, "of both sides; medians are shown", 1),
        *child_options("bench_endpoint"),
    ),
    measure,
)
