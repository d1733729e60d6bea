"""A taskset and a harness of verifiers: the policy guesses until it is right, at most three times."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Guesses", "Guessing"]
asked = asyncio.Event()
# Ids of rollouts.
opened: set[str] = set()
closed: set[str] = set()


class Guess(vf.TaskData):
    secret: str
    fault: str = ""


class GuessTask(vf.Task[Guess]):
    async def setup(self, trace: Any, runtime: Any) -> None:
        opened.add(trace.id)

    @vf.reward
    async def right(self, trace: Any) -> float:
        said = [message.content for message in trace.branches[-1].messages if message.role == "assistant"]
        return float(said[-1] == self.data.secret) / len(said)

    @vf.metric
    async def guesses(self, trace: Any) -> float:
        return float(len([message for message in trace.branches[-1].messages if message.role == "assistant"]))


class Guesses(vf.Taskset[GuessTask]):
    def load(self) -> Iterable[GuessTask]:
        for fault in ("", "raises", "waits"):
            yield GuessTask(Guess(prompt="yes or no?", secret="yes", fault=fault), self.config.task)


class GuessingConfig(vf.HarnessConfig):
    pass


class Guessing(vf.Harness[GuessingConfig]):
    """Talks in this process, through the address that verifiers gives to each harness."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **_: Any
    ) -> vf.ProgramResult:
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _attempt in range(3):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                if data.fault == "raises":
                    raise ValueError("broken harness")
                if data.fault == "waits":
                    asked.set()
                    await asyncio.Event().wait()
                said = answer.choices[0].message.content
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "really?"}]
                if said == data.secret:
                    break
        return vf.ProgramResult(0, "", "")

    async def cleanup(self, trace: Any, runtime: Any) -> None:
        closed.add(trace.id)
