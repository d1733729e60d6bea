"""One member of a group in the user's environment: within its time, and seen by the watchdog."""

from __future__ import annotations

from dataclasses import replace

import anyio

from asyncrl.errors import GenerationError
from asyncrl.ports import Environment, Generate
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Generation, GenerationRequest, Prompt, Trajectory


class Episodes:
    """The environment, as the pumps that play it use it."""

    def __init__(self, environment: Environment, recorder: Recorder, limit_s: float) -> None:
        """`limit_s`: of one episode, what it waits for the engine included."""
        self._environment = environment
        self._recorder = recorder
        self._limit_s = limit_s

    async def play(self, prompt: Prompt, member: int, group_size: int, generate: Generate, priority: int) -> Trajectory:
        """`priority`: of all its requests. Errors: GenerationError at the end of its time; those of the environment and of
        `generate`."""
        asked = open_requests = tokens = 0
        who = f"member {member} of group {prompt.group_id}"

        async def counted(request: GenerationRequest) -> Generation:
            nonlocal asked, open_requests, tokens
            asked, open_requests = asked + 1, open_requests + 1
            place.passes_to("the engine")
            try:
                generation = await generate(replace(request, priority=priority))
            finally:
                open_requests -= 1
                if not open_requests:
                    place.passes_to("the environment")
            tokens += len(generation.token_ids)
            return generation

        with (
            anyio.move_on_after(self._limit_s),
            self._recorder.watch(who, "its episode", on="the environment") as place,
        ):
            return await self._environment.run(prompt, member, group_size, counted)
        raise GenerationError(
            f"the episode of {who} did not end within rollout.timeout_s = {self._limit_s:g} s: it asked the engine "
            f"{asked} times and got {tokens} tokens"
        )
