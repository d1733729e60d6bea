"""One member of a group in the user's environment: within its time, seen by the watchdog, and played again where it failed.

Whatever the environment raises is a failure of this episode alone, SystemExit and the like included. It is played again up to
`rollout.retries` times, by a new call of `run` with the random numbers of the first: a run of `sync` that is repeated is the
same, and no member gets a completion that was chosen because it does not fail.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import math
import struct
import traceback
from dataclasses import replace

import anyio

from asyncrl.config.imports import is_interrupt
from asyncrl.errors import AsyncrlError, ConfigError, DataError, EngineClosed, GenerationError
from asyncrl.ports import Environment, Generate
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Generation, GenerationRequest, Prompt, Trajectory

MOST_KINDS = 50  # of failures that are logged; each is counted
_LAST_LINES = 3  # of a traceback
_OF_EPISODES = (GenerationError, ConfigError, DataError)  # other errors of ours, such as a divergence, are the run's
_UNMENDABLE = (ConfigError, GeneratorExit)  # the next attempt would fail too; a coroutine that is closed must not wait
logger = logging.getLogger("asyncrl.pumps")


class EpisodeFailed(Exception):
    """An episode failed, its retries included; the cause says how."""


def request_seed(seed: int, number: int) -> int:
    """Of the request `number` of an episode, in [0, 2**64): the environment's own `seed` for the first, else a hash of both.
    An environment that gives each request the seed of its episode gets other random numbers in each round."""
    if not number:
        return seed
    packed = struct.pack("<QQ", seed % (1 << 64), number)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"asyncrl-request").digest(), "little")


class Episodes:
    """The environment, as everybody who plays it uses it."""

    def __init__(
        self, environment: Environment, recorder: Recorder, limit_s: float, retries: int, logged: set[tuple[str, str]]
    ) -> None:
        """`limit_s`: of one episode, its retries and what it waits for the engine included. `logged`: the kinds of failures
        that were."""
        self._environment = environment
        self._recorder = recorder
        self._limit_s = limit_s
        self._retries = retries
        self._logged = logged

    async def play(self, prompt: Prompt, member: int, group_size: int, generate: Generate, priority: int) -> Trajectory:
        """`priority`: of all its requests. Errors: EpisodeFailed; EngineClosed and what else ends the run."""
        asked = open_requests = tokens = 0
        who = f"member {member} of group {prompt.group_id}"

        async def counted(request: GenerationRequest) -> Generation:
            nonlocal asked, open_requests, tokens
            seed = request_seed(request.seed, next(numbers))
            request = replace(request, priority=priority, seed=seed, group=prompt.group_id)
            asked, open_requests = asked + 1, open_requests + 1
            place.passes_to("the engine")
            try:
                generation = await generate(request)
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
            for attempt in itertools.count():
                numbers = itertools.count()  # of the requests, in the order of their calls
                try:
                    return await self._environment.run(prompt, member, group_size, counted)
                except BaseException as error:
                    failure = await self._failure(error)
                self._log(who, failure)
                if attempt == self._retries or isinstance(failure, _UNMENDABLE):
                    raise EpisodeFailed from failure
                await anyio.lowlevel.checkpoint_if_cancelled()
                self._recorder.count("rollout/retries")
        raise EpisodeFailed from GenerationError(
            f"the episode of {who} did not end within rollout.timeout_s = {self._limit_s:g} s: it asked the engine "
            f"{asked} times and got {tokens} tokens"
        )

    async def _failure(self, error: BaseException) -> BaseException:
        """What the episode failed with. Raises `error` where it is none: the run is being stopped, or this episode."""
        if isinstance(error, EngineClosed) or (isinstance(error, AsyncrlError) and not isinstance(error, _OF_EPISODES)):
            # Cancelled together with the engine: that is the reason then.
            await anyio.lowlevel.checkpoint_if_cancelled()
            raise error
        if is_interrupt(error):
            raise error
        if not isinstance(error, asyncio.CancelledError):
            return error
        if anyio.current_effective_deadline() == -math.inf:
            raise error
        # Nobody here asked for it: the environment awaited something of its own that was cancelled. A task group would
        # take that for an ordinary end, and the group's slot would be lost without a word.
        failure = GenerationError(f"the episode was cancelled from inside the environment {error}")
        failure.__cause__ = error
        return failure

    def _log(self, who: str, failure: BaseException) -> None:
        """The first of each kind: a class of errors, raised at one line."""
        frames = traceback.extract_tb(failure.__traceback__)
        kind = type(failure).__name__, f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        if kind in self._logged or len(self._logged) >= MOST_KINDS:
            return
        self._logged.add(kind)
        lines = "".join(traceback.format_exception(failure)[-_LAST_LINES:]).rstrip()
        logger.warning("%s failed in the environment; later failures of this kind are only counted\n%s", who, lines)
