"""A worker without a model: it speaks the whole protocol of `worker/server.py`, starts quickly, and misbehaves when told.

Its setup says {"token_s": seconds between two tokens, "die": {moment: how}}. Moments: "setup", "ready" (before it says so),
"bound" (told of its first version), "weights" (told of another), and "request". How:

    exit      an error that nobody catches          close     hang up, and go on
    kill      SIGKILL                               garbage   into the channel
    stop      SIGSTOP
    refuse    the request, as an engine would       hang      one closure of its lane runs and runs
    refused   it says that it cannot run this
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import pickle
import signal
import socket
import sys
from typing import Any

import numpy as np

from asyncrl.concurrency.channel import Channel
from asyncrl.concurrency.child import die_with_parent
from asyncrl.types import FinishReason, Generation, GenerationRequest


def tokens_of(request: GenerationRequest) -> list[int]:
    """What it answers, whoever runs it: of prompt and seed alone."""
    key = request.prompt_ids.tobytes() + str(request.seed & 0xFFFFFFFFFFFFFFFF).encode()
    words = hashlib.shake_128(key).digest(request.sampling.max_tokens)
    return [word % 97 for word in words]


class Light:
    def __init__(self, control: Channel, setup: dict[str, Any]) -> None:
        self.control = control
        self.token_s: float = setup["token_s"]
        self.deaths: dict[str, str] = setup["die"]
        self.version = -1
        self.running: dict[int, asyncio.Task[None]] = {}
        self.closure: list[Any] | None = None
        self.batches = 0  # of what the node sent together

    async def at(self, moment: str) -> None:
        how = self.deaths.get(moment)
        if how == "exit":
            raise RuntimeError(f"it was told to fail at {moment}")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "garbage":
            os.write(self.control._socket.fileno(), b"Warning: this is no JSON\n")
        if how == "close":
            self.control.close()
            await asyncio.Event().wait()
        if how == "refused":
            self.control.send({"refused": "engine.kv_positions is too large here"})
            await asyncio.Event().wait()
        if how == "hang":
            self.closure = ["engine/stuck", 1e6]
            await asyncio.Event().wait()

    async def take(self, message: dict[str, Any]) -> None:
        self.batches += 1
        for number, request in pickle.loads(message["data"])[0]:
            if request is None:
                if number in self.running:
                    self.running.pop(number).cancel()
            elif self.deaths.get("request") == "refuse" and request.seed % 2:
                self.control.send({"failed": number, "error": f"seed {request.seed} is odd"})
            else:
                await self.at("request")
                self.running[number] = asyncio.ensure_future(self.generate(number, request))

    async def generate(self, number: int, request: GenerationRequest) -> None:
        versions = []
        for _ in range(request.sampling.max_tokens):
            await asyncio.sleep(self.token_s)
            versions.append(self.version)
        tokens = np.array(tokens_of(request), np.int32)
        logprobs = np.full(tokens.size, -1, np.float32)
        answer = Generation(tokens, logprobs, logprobs, np.array(versions, np.int32), FinishReason.LENGTH)
        self.control.send({"sequence": number}, pickle.dumps(answer))
        del self.running[number]

    async def report(self) -> None:
        while True:
            statistics = {"running": len(self.running), "tokens": 1.0, "decode_steps": float(self.batches)}
            parcel: dict[str, Any] = {"busy": [], "idle": [], "counts": {}, "samples": {}}
            self.control.send({"report": {"statistics": statistics, "closure": self.closure, "parcel": parcel}})
            await asyncio.sleep(0.05)

    async def obey(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                message = await self.control.receive()
                if "requests" in message:
                    await self.take(message)
                    continue
                await self.at("bound" if self.version < 0 else "weights")
                self.version = message["weights"]
                self.control.send({"bound": self.version})


async def main(descriptor: int) -> None:
    control = Channel(socket.socket(fileno=descriptor), "the node")
    try:
        setup = (await control.receive())["setup"]
        light = Light(control, setup)
        await light.at("setup")
        reporting = asyncio.ensure_future(light.report())
        await light.at("ready")
        control.send({"ready": True})
        obeying = asyncio.ensure_future(light.obey())
        done, _ = await asyncio.wait([reporting, obeying], return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        control.close()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    asyncio.run(main(int(sys.argv[1])))
