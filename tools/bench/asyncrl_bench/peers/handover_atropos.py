"""Handing groups over through Atropos' HTTP API. Runs inside atroposlib's own environment: `python ... JOB.json`.

Its own server (`run-api`), an environment that posts `/scored_data`, a trainer that gets `/batch`, makes arrays of it and does
with them what every side does (way.py). In its favour: connections are kept, nothing is compressed (its own client compresses,
which takes longer than the rest), the trainer is told by a pipe when to ask (its own one asks once a second), and the versions,
for which it has no column, are known there.
"""

import asyncio
import json
import multiprocessing
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import side
from handover_group import IN_FLIGHT, MEMBERS, REWARDS, Notes, arrays, prompt_of, turns, versions_of
from way import Way

HEADERS = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
START_S = 120.0
MASKED = -100  # in the place of a token that is not trained


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


async def take(tokens: int, url: str, pipe: Any, credit: Any) -> None:
    way, notes = Way(MEMBERS, tokens, prompt_of(tokens), credit.release), Notes(pipe)
    async with way, aiohttp.ClientSession(headers=HEADERS) as session:
        pipe.send("ready")
        while isinstance(group := await notes.next(), int):
            async with session.get(f"{url}/batch") as reply:
                (found,) = json.loads(await reply.read())["batch"]
            columns = {
                "tokens": [np.array(row, np.int32) for row in found["tokens"]],
                "mask": [np.array(mask) != MASKED for mask in found["masks"]],
                "logprobs": [np.array(row, np.float32) for row in found["inference_logprobs"]],
                "versions": versions_of(group, tokens),
            }
            await way.handed(group, columns, found["scores"])
        await way.wait_cleared(len(group))
        pipe.send("cleared")
    pipe.send(way.result(group))


def consume(tokens: int, url: str, pipe: Any, credit: Any) -> None:
    asyncio.run(take(tokens, url, pipe, credit))


async def post(session: aiohttp.ClientSession, url: str, content: dict[str, Any]) -> Any:
    async with session.post(url, data=json.dumps(content).encode()) as reply:
        found = json.loads(await reply.read())
        if reply.status != 200:
            raise SystemExit(f"{url} answered {reply.status}: {found}")
        return found


async def produce(asked: dict[str, Any], url: str, pipe: Any, credit: Any) -> tuple[list[int], float]:
    """When each group was put, and the CPU time of all processes before the first one."""
    data, puts = arrays(asked["tokens"]), list[int]()
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        await register(session, asked, url)
        begun = side.cpu_seconds()
        for group in turns(asked, credit):
            puts.append(time.monotonic_ns())
            content = {
                "tokens": [a.tolist() for a in data["tokens"]],
                "masks": [np.where(m, t, MASKED).tolist() for m, t in zip(data["mask"], data["tokens"], strict=True)],
                "scores": REWARDS,
                "inference_logprobs": [a.tolist() for a in data["logprobs"]],
                "env_id": 0,
            }
            await post(session, f"{url}/scored_data", content)
            pipe.send(group)
    return puts, begun


async def register(session: aiohttp.ClientSession, asked: dict[str, Any], url: str) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            async with session.get(f"{url}/info"):
                break
        except aiohttp.ClientConnectionError:
            if time.monotonic() > end:
                raise SystemExit(f"run-api did not answer within {START_S} s") from None
            await asyncio.sleep(0.1)
    run = {"wandb_group": "", "wandb_project": "", "batch_size": MEMBERS, "max_token_len": asked["tokens"]}
    run |= {"checkpoint_dir": "", "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": asked["groups"]}
    await post(session, f"{url}/register", run)
    async with session.get(f"{url}/batch"):  # the trainer has started
        pass
    environment = {"max_token_length": asked["tokens"], "desired_name": "x", "weight": 1.0, "group_size": MEMBERS}
    assert (await post(session, f"{url}/register-env", environment))["env_id"] == 0


def main() -> None:
    asked = side.job()
    port = free_port()
    command = [str(Path(sys.executable).parent / "run-api"), "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr)
    try:
        context = multiprocessing.get_context("spawn")
        credit = context.Semaphore(1 if asked["pace_s"] else IN_FLIGHT)
        ours, theirs = context.Pipe()
        url = f"http://127.0.0.1:{port}"
        process = context.Process(target=consume, args=(asked["tokens"], url, theirs, credit), daemon=True)
        process.start()
        assert ours.recv() == "ready"
        puts, begun = asyncio.run(produce(asked, url, ours, credit))
        ours.send(puts)
        assert ours.recv() == "cleared"
        spent = side.cpu_seconds() - begun
        found = ours.recv()
        process.join()
    finally:
        server.terminate()
        server.wait()
    versions = {"atroposlib": version("atroposlib"), "uvicorn": version("uvicorn")}
    side.answer({**found, "cpu_s": spent, "versions": versions})


if __name__ == "__main__":
    main()
