"""How long do the judgements of many groups take, against those of one group? Medians over the repetitions.

    python tools/measure judge [--groups 32] [--size 8] [--seconds 0.5] [--repeat 5]

Each side has one reward worker. `function` is an `async def` function that sleeps. `judge` is a judge whose server, a process of
its own, answers after that time. `each alone` has a call for each completion, as for agents; otherwise a group is one call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import time
from typing import Any

import numpy as np
from commands import end, machine, start

from asyncrl.config.schema import RewardConfig
from asyncrl.rewards.calls import RewardSpec
from asyncrl.rewards.judge import Judge
from asyncrl.rewards.pool import RewardPool
from asyncrl.types import FinishReason, Prompt, Trajectory


async def sleeps(completions: list[str]) -> list[float]:
    """In a worker."""
    await asyncio.sleep(float(os.environ["MEASURE_SLEEP_S"]))
    return [0.5] * len(completions)


def serve(seconds: str) -> None:
    """In a child: prints its port, and answers every request after that time."""
    from aiohttp import web

    async def chat(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(float(seconds))
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": '{"score": 7}'}}]})

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", chat)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
        print(json.dumps(runner.addresses[0][1]), flush=True)
        await asyncio.Event().wait()

    asyncio.run(run())


def group(number: int, size: int) -> tuple[Prompt, list[Trajectory]]:
    """Completions of a thousand letters."""
    ids, reals = np.array([1, 2], dtype=np.int32), np.zeros(2, dtype=np.float32)
    columns: dict[str, Any] = {"tokens": ids, "mask": ids == 2, "versions": ids - 2}
    columns |= dict.fromkeys(("logprobs", "sampled_logprobs"), reals)
    fixed: dict[str, Any] = {"prompt_length": 1, "temperature": 1.0, "finish_reason": FinishReason.STOP}
    members = [
        Trajectory(group_id=number, member=member, group_size=size, completion="letters " * 125, **columns, **fixed)
        for member in range(size)
    ]
    return Prompt(group_id=number, ids=ids[:1], prompt="a question"), members


async def seconds_of(pool: RewardPool, groups: int, size: int, alone: bool) -> float:
    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for prompt, members in (group(number, size) for number in range(groups)):
            for part in [[member] for member in members] if alone else [members]:
                tasks.create_task(pool.score(prompt, part))
    return time.monotonic() - began


async def measure(options: argparse.Namespace, port: int) -> list[dict[str, Any]]:
    judge = Judge(f"http://127.0.0.1:{port}/v1", "The answer is long.")
    rows = []
    for name, function in (("function", f"{__file__}:sleeps"), ("judge", judge)):
        for alone in (False, True):
            async with RewardPool(RewardConfig(timeout_s=120), functions=[RewardSpec(function)]) as pool:
                await seconds_of(pool, 1, options.size, alone)
                times: dict[int, list[float]] = {1: [], options.groups: []}
                for _ in range(options.repeat):
                    for groups, found in times.items():
                        found.append(await seconds_of(pool, groups, options.size, alone))
            one, many = (statistics.median(found) for found in times.values())
            calls = "each alone" if alone else "a group"
            rows.append({"side": name, "calls": calls, "one_s": one, "many_s": many, "ratio": many / one})
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--size", type=int, default=8, help="completions of a group")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a judgement")
    parser.add_argument("--repeat", type=int, default=5)


def main(options: argparse.Namespace) -> int:
    os.environ["MEASURE_SLEEP_S"] = str(options.seconds)
    print(machine())
    server = start(__name__, "serve", options.seconds, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        rows = asyncio.run(measure(options, json.loads(server.stdout.readline())))
    finally:
        end([server])
    print(f"\n| | calls | 1 group, s | {options.groups} groups, s | ratio |\n|---|---|--:|--:|--:|")
    for row in rows:
        print(f"| {row['side']} | {row['calls']} | {row['one_s']:.3f} | {row['many_s']:.3f} | {row['ratio']:.2f} |")
    return 0
