"""The rollout pump: prompts in, trajectories out. One slot per group, admitted by the ledger.

    consumes     prompts of the cursor, one for each slot (edge 1)
    produces     played trajectories, one by one or a whole group (edge 3)
    waits for    a slot; episodes, which wait for the engine (edge 2); a free scorer
    is woken by  the publish pump (slots come free), the engine, the score pump

A group's members play in a task group of their own. A member that fails, its retries included, ends the whole
group: its slot goes back at once, to another prompt, and its rows are forgotten. More than `rollout.max_failed_groups` such
groups end the run.
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
from anyio.abc import TaskGroup

from asyncrl.concurrency.supervisor import spawn
from asyncrl.config.imports import is_interrupt
from asyncrl.config.resolve import slots
from asyncrl.data.prompts import PromptSource
from asyncrl.errors import AsyncrlError, ConfigError, DataError, EngineClosed, GenerationError
from asyncrl.ports import Generate
from asyncrl.records.check import check_trajectory
from asyncrl.transport.queues.queue import QueueSender
from asyncrl.types import Generation, GenerationRequest, Prompt, Ticket, Trajectory

from .pipeline import Ports, Scoring, hand_on

# Of failed groups, that are named where the budget is used up.
_CAUSES = 3
# Of failures that are logged; each is counted.
MOST_KINDS = 50
# Of a traceback.
_LAST_LINES = 3
# Other errors of ours, such as a divergence, are the run's.
_OF_EPISODES = (GenerationError, ConfigError, DataError)
# The next attempt would fail too; a coroutine that is closed must not wait.
_UNMENDABLE = (ConfigError, GeneratorExit)
logger = logging.getLogger("asyncrl.pumps")


class RolloutPump:
    """See the module docstring."""

    def __init__(self, ports: Ports, prompts: PromptSource, scoring: QueueSender[Scoring]) -> None:
        self._ports = ports
        self._episodes = Episodes(ports)
        self._prompts = prompts
        self._scoring = scoring
        # Of several ranks each plays its share of the slots: else the first to start would take all into its queue.
        self._playing = None if ports.ranks == 1 else anyio.Semaphore(-(-slots(ports.config) // ports.ranks))
        self._over_budget = False
        # The id of the prompt that was taken from the cursor and waits for its slot: a checkpoint keeps it. It stays after a
        # cancellation: the cursor is past the prompt, and nobody played it.
        self.in_hand: int | None = None

    async def run(self) -> None:
        """Ends when the prompts, or the steps that need them, ran out and every group is handed on."""
        together: list[tuple[Ticket, Prompt]] = []
        async with self._scoring, anyio.create_task_group() as groups:
            while (admitted := await self._admit()) is not None:
                together.append(admitted)
                if not self._ports.ledger.due():
                    self._start(groups, together)
            self._start(groups, together)
            await self._ports.ledger.exhaust()

    def _start(self, groups: TaskGroup, together: list[tuple[Ticket, Prompt]]) -> None:
        """These groups enter the engine in the same turn of the loop, so that reruns of `sync` batch them alike on each rank."""
        for ticket, prompt in together:
            spawn(groups, f"rollout group {ticket.group_id}", self._play, ticket, prompt)
        together.clear()

    async def _admit(self) -> tuple[Ticket, Prompt] | None:
        """The next group, as soon as it has a slot. None: no more are needed, or there are no more prompts.

        It must be played at once, and not wait until other groups have their slots (but for those that are `due`, which get theirs
        at once): the step may wait for this very group. Where the slots of a whole step come free together, the admissions after
        the first do not yield, so the groups of that step still enter the engine in the same turn of the loop.
        """
        if self._playing is not None:
            with self._ports.recorder.wait("rollout pump", "its own groups", on="the engine", cause="slots"):
                await self._playing.acquire()
        prompt = self._prompts.next() if await self._wanted() else None
        if prompt is None:
            return None
        with self._ports.recorder.wait("rollout pump", "a slot", on="publish pump", cause="slots"):
            self.in_hand = prompt.group_id
            ticket = await self._ports.ledger.admit(prompt.group_id)
        self.in_hand = None
        assert ticket is not None, "a fresh group always gets a ticket"
        self._ports.book.open(ticket)
        return ticket, prompt

    async def _wanted(self) -> bool:
        """Whether another group is needed to reach `max_steps`; waits while that depends on groups that may still fail."""
        max_steps = self._ports.config.train.max_steps
        if max_steps is None:
            return True
        ledger = self._ports.ledger
        limit = (max_steps - ledger.first_turn) * self._ports.config.rollout.groups_per_step
        while True:
            seen = ledger.changes
            books = ledger.statistics()
            if books.admitted - books.dropped - books.failed < limit:
                return True
            if books.live == 0:
                return False
            with self._ports.recorder.wait("rollout pump", "the last groups", on="train pump", cause="group"):
                await ledger.wait_changed(seen)

    async def _play(self, ticket: Ticket, prompt: Prompt) -> None:
        ports = self._ports
        done: dict[int, Trajectory] = {}
        try:
            if ports.hooks.before_group is not None:
                with ports.recorder.watch("rollout pump", f"group {ticket.group_id}", on="hook before_group"):
                    prompt = await ports.hooks.prompt(prompt)
            async with anyio.create_task_group() as members:
                for member in range(ports.config.rollout.group_size):
                    name = f"member {member} of group {ticket.group_id}"
                    spawn(members, name, self._member, ticket, prompt, member, done)
        except* EpisodeFailed as failures:
            await self._failed(ticket, failures)
        else:
            if ports.score_groups:
                await hand_on(self._scoring, Scoring(ticket, prompt, tuple(done[member] for member in sorted(done))))
        finally:
            if self._playing is not None:
                self._playing.release()

    async def _member(self, ticket: Ticket, prompt: Prompt, member: int, done: dict[int, Trajectory]) -> None:
        """Play one member, check it, and hand it on or put it into `done`. Errors: as `Episodes.play`."""
        ports, group_id = self._ports, prompt.group_id
        group_size = ports.config.rollout.group_size
        with ports.recorder.span("rollout", track="rollout", group=group_id, member=member):
            # The engine serves the group with the earliest deadline first: the second round of an old group before the first
            # round of a new one.
            trajectory = await self._episodes.play(prompt, member, group_size, ports.engine.generate, ticket.deadline)
        try:
            if (trajectory.group_id, trajectory.member, trajectory.group_size) != (group_id, member, group_size):
                raise GenerationError(
                    f"the environment was asked for member {member} of {group_size} of group {group_id} and returned "
                    f"member {trajectory.member} of {trajectory.group_size} of group {trajectory.group_id}"
                )
            check_trajectory(trajectory, ports.limits)
        except DataError as error:
            raise EpisodeFailed from GenerationError(
                f"the environment returned a trajectory of group {group_id} that cannot be trained: {error}"
            )
        except Exception as error:
            # A bug of the environment, which would return the same again.
            raise EpisodeFailed from error
        if ports.score_groups:
            done[member] = trajectory
        else:
            await hand_on(self._scoring, Scoring(ticket, prompt, (trajectory,)))

    async def _failed(self, ticket: Ticket, failures: BaseExceptionGroup[EpisodeFailed]) -> None:
        """The group's slot goes to another prompt, within the budget. Errors: GenerationError once that is used up."""
        book, rollout = self._ports.book, self._ports.config.rollout
        error = failures.exceptions[0].__cause__
        assert error is not None
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        await book.end(ticket.group_id, "failed", f"{type(error).__name__}: {error}"[:200])
        limit, asked = rollout.max_failed_groups, "rollout.max_failed_groups"
        if limit is None:
            asked += ", left out, is a tenth of all groups and at least those of a step, and"
            limit = max(rollout.groups_per_step, self._ports.ledger.statistics().admitted // 10)
        if book.failed > limit and not self._over_budget:
            # Groups that fail in the same moment would raise the same error again.
            self._over_budget = True
            causes = [f"{count} of {reason.removeprefix('failed: ')}" for reason, count in book.reasons.items()]
            raise GenerationError(
                f"group {ticket.group_id} failed in the environment ({type(error).__name__}: {error}), as {book.failed} groups "
                f"did; {asked} allows {limit} such groups in a run. The last causes: {'; '.join(causes[-_CAUSES:])}"
            ) from error


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
    """The environment, as everybody who plays it uses it: within its time, seen by the watchdog, and again where it failed.

    Whatever the environment raises is a failure of this episode alone, SystemExit and the like included. It is played again up to
    `rollout.retries` times, by a new call of `run` with the random numbers of the first: a run of `sync` that is repeated is the
    same, and no member gets a completion that was chosen because it does not fail. `rollout.timeout_s` covers the retries of an
    episode and its waits for the engine.
    """

    def __init__(self, ports: Ports) -> None:
        self._environment = ports.environment
        self._recorder = ports.recorder
        self._limit_s = ports.config.rollout.timeout_s
        self._retries = ports.config.rollout.retries
        # The kinds of failures that were logged.
        self._logged = ports.logged

    async def play(self, prompt: Prompt, member: int, group_size: int, generate: Generate, priority: int) -> Trajectory:
        """Play one member. `priority`: of all its requests. Errors: EpisodeFailed; EngineClosed and others that end the run."""
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
        """The error that the episode failed with. Raises `error` where it is no failure: the run or this episode is stopped."""
        if isinstance(error, EngineClosed) or (isinstance(error, AsyncrlError) and not isinstance(error, _OF_EPISODES)):
            # Where this task was cancelled together with the engine, the cancellation is raised.
            await anyio.lowlevel.checkpoint_if_cancelled()
            raise error
        if is_interrupt(error):
            raise error
        if not isinstance(error, asyncio.CancelledError):
            return error
        if anyio.current_effective_deadline() == -math.inf:
            raise error
        # The run did not cancel it: the environment awaited a task of its own that was cancelled. A task group would take
        # the CancelledError for an ordinary end, and the group's slot would be lost without an error.
        failure = GenerationError(f"the episode was cancelled from inside the environment {error}")
        failure.__cause__ = error
        return failure

    def _log(self, who: str, failure: BaseException) -> None:
        """Log the first failure of each kind: a class of errors, raised at one line."""
        frames = traceback.extract_tb(failure.__traceback__)
        kind = type(failure).__name__, f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        if kind in self._logged or len(self._logged) >= MOST_KINDS:
            return
        self._logged.add(kind)
        lines = "".join(traceback.format_exception(failure)[-_LAST_LINES:]).rstrip()
        logger.warning("%s failed in the environment; later failures of this kind are only counted\n%s", who, lines)
