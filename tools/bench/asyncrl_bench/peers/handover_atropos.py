"""Handing groups over through Atropos' HTTP API. Runs inside atroposlib's own environment: `python ... JOB.json`.

Its own server (`run-api`), an environment that posts `/scored_data`, a trainer that gets `/batch` and makes arrays of it. In
its favour: connections are kept, nothing is compressed (its own client compresses, which takes longer than the rest), the
trainer is told by a pipe when to ask (its own one asks once a second), and the versions, for which it has no column, stay at home.
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
from handover_group import IN_FLIGHT, MEMBERS, Notes, arrays, turns

HEADERS = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
START_S = 120.0


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


async def take(url: str, notes: Notes, credit: Any) -> list[tuple[int, int]]:
    times = []
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        while await notes.next() is not None:
            async with session.get(f"{url}/batch") as reply:
                (group,) = json.loads(await reply.read())["batch"]
            held = [
                (np.array(tokens, np.int32), np.array(mask) != -100, np.array(logprobs, np.float32))
                for tokens, mask, logprobs in zip(
                    group["tokens"], group["masks"], group["inference_logprobs"], strict=True
                )
            ]
            times.append((group["group_overrides"]["put"], time.monotonic_ns()))
            assert len(held) == MEMBERS
            credit.release()
    return times


def consume(url: str, pipe: Any, credit: Any) -> None:
    pipe.send(asyncio.run(take(url, Notes(pipe), credit)))


async def post(session: aiohttp.ClientSession, url: str, content: dict[str, Any]) -> Any:
    async with session.post(url, data=json.dumps(content).encode()) as reply:
        found = json.loads(await reply.read())
        if reply.status != 200:
            raise SystemExit(f"{url} answered {reply.status}: {found}")
        return found


async def produce(asked: dict[str, Any], url: str, pipe: Any, credit: Any) -> None:
    data = arrays(asked["tokens"])
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        await register(session, asked, url)
        for _ in turns(asked, credit):
            put = time.monotonic_ns()
            tokens = [a.tolist() for a in data["tokens"]]
            content = {
                "tokens": tokens,
                "masks": tokens,  # every position is trained; -100 would stand where not
                "scores": [0.0] * MEMBERS,
                "inference_logprobs": [a.tolist() for a in data["logprobs"]],
                "group_overrides": {"put": put},
                "env_id": 0,
            }
            await post(session, f"{url}/scored_data", content)
            pipe.send("one more")


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
        process = context.Process(target=consume, args=(url, theirs, credit), daemon=True)
        process.start()
        asyncio.run(produce(asked, url, ours, credit))
        ours.send(None)
        times = ours.recv()
        process.join()
    finally:
        server.terminate()
        server.wait()
    side.answer({"times": times, "versions": {"atroposlib": version("atroposlib"), "uvicorn": version("uvicorn")}})


if __name__ == "__main__":
    main()
