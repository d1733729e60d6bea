"""The rollout pump: makes trajectories from prompts. The ledger admits one group per slot.

    consumes     prompts of the cursor, one for each slot (edge 1 of graph.py)
    produces     played trajectories, one by one or a whole group (edge 3)
    waits for    a slot; episodes, which wait for the engine (edge 2); a free scorer
    is woken by  the ledger (a slot came free), the engine, the score pump

Each group has its own task group for its members. A member that fails in all its attempts ends the whole group: the group's
slot goes to another prompt, and its trajectories are dropped. With `rollout.keep_viable` the other members of the group are
trained instead, if there are at least two. More than `rollout.max_failed_groups` failed groups end the run.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import re
import struct
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from asyncrl.concurrency.isolated import CancelledItself, run_isolated
from asyncrl.concurrency.supervisor import leaves, spawn
from asyncrl.config.imports import is_interrupt, is_machinery, place_of, raised
from asyncrl.config.resolve import slots
from asyncrl.data.prompts import PromptSource
from asyncrl.errors import AsyncrlError, ConfigError, DataError, EngineClosed, GenerationError, PlatformError
from asyncrl.ports import Generate
from asyncrl.records.check import check_trajectory
from asyncrl.transport.queues.queue import QueueSender
from asyncrl.types import Generation, GenerationRequest, Group, Prompt, Ticket, Trajectory

from .pace import Pace
from .pipeline import Ports, put_item

# With `rollout.keep_viable`: members that a group needs to be trained. A single reward cannot be compared with another reward.
_FEWEST_MEMBERS = 2
_NAMED_CAUSES = 3  # in the error about too many failed groups
MAX_LOGGED_KINDS = 50  # further kinds of failures are only counted
# Of a long traceback this many entries are logged from its start, and as many from its end.
_LOGGED_ENTRIES = 5
# Errors of asyncrl that fail only the episode. Their subclass `EngineClosed` and all other errors of asyncrl end the run.
_EPISODE_ERRORS = (GenerationError, DataError)
_NUMBERS = re.compile(r"[\w-]*\d[\w.-]*")
logger = logging.getLogger("asyncrl.pumps")


class Prompts(Protocol):
    """The prompts of a rollout pump: from this rank's cursor (`OwnPrompts`) or rank 0's (`dispatch.Dispatch`, `follow.Remote`)."""

    @property
    def others_mean_s(self) -> float:
        """Mean duration of a group on the other ranks. 0: unknown."""
        ...

    @property
    def generating_count(self) -> int:
        """The number of ranks that generate, as known at the last call of `next`."""
        ...

    async def next(self, played_s: Sequence[float]) -> Prompt | None:
        """The next prompt; None if no prompt is left. `played_s`: seconds of each group that was played since the last call."""
        ...

    async def admitted(self) -> None:
        """Called when the ledger has admitted the group of the newest prompt."""
        ...


class OwnPrompts:
    """The prompts of this rank's cursor. No method yields to other tasks."""

    others_mean_s = 0.0

    def __init__(self, source: PromptSource, generating: int) -> None:
        self._source, self.generating_count = source, generating

    async def next(self, played_s: Sequence[float]) -> Prompt | None:
        return self._source.next()

    async def admitted(self) -> None:
        return


class RolloutPump:
    """Plays groups until no more are needed."""

    def __init__(self, ports: Ports, prompts: Prompts, scoring: QueueSender[Group]) -> None:
        self._ports = ports
        self._groups = GroupPlayer(ports)
        self._prompts = prompts
        self._scoring = scoring
        # Each rank plays at most its share of the slots. Otherwise the first rank to start would take all slots.
        self._pace = Pace(self._share(ports.generating), lambda: ports.ledger.statistics().admitted)
        # The group id of the prompt that was taken from the cursor and waits for its slot. A checkpoint saves this id. A
        # cancellation must not clear the id: nobody has played this prompt, and the cursor does not return it again.
        self.waiting_prompt: int | None = None

    async def run(self) -> None:
        """Play groups until the prompts end, or `max_steps` needs no more groups. Returns after the last trajectory is sent."""
        admitted: list[tuple[Ticket, Prompt]] = []
        async with self._scoring, anyio.create_task_group() as groups:
            while (group := await self._admit()) is not None:
                admitted.append(group)
                if not self._ports.ledger.due():
                    self._start(groups, admitted)
            self._start(groups, admitted)
            await self._ports.ledger.exhaust()

    def _share(self, ranks: int) -> int:
        return -(-slots(self._ports.config) // ranks)

    def _start(self, groups: TaskGroup, admitted: list[tuple[Ticket, Prompt]]) -> None:
        """Start all these groups without an `await`, so that with `preset: sync` a repeated run has equal batches of requests."""
        for ticket, prompt in admitted:
            spawn(groups, f"rollout group {ticket.group_id}", self._play, ticket, prompt)
        admitted.clear()

    async def _admit(self) -> tuple[Ticket, Prompt] | None:
        """Take the next prompt and wait for its slot. None: no more groups are needed, or there are no more prompts.

        The caller must play the admitted group at once, because the open step may wait for it. Exception: while `Ledger.due`
        counts further groups, the caller may admit these first. Their slots are free, so no admission waits for a step.
        """
        with self._ports.recorder.wait("rollout pump", "its own groups", on="the engine", cause="slots"):
            await self._pace.begin()
        prompt = await self._prompts.next(self._pace.take_played()) if await self._needs_group() else None
        if prompt is None:
            return None
        self._pace.others_mean_s = self._prompts.others_mean_s
        self._pace.set_max_playing(self._share(self._prompts.generating_count))
        with self._ports.recorder.wait("rollout pump", "a slot", on="publish pump", cause="slots"):
            self.waiting_prompt = prompt.group_id
            ticket = await self._ports.ledger.admit(prompt.group_id)
        self.waiting_prompt = None
        assert ticket is not None, "a fresh group always gets a ticket"
        self._ports.book.add(ticket)
        await self._prompts.admitted()
        return ticket, prompt

    async def _needs_group(self) -> bool:
        """Whether `max_steps` needs another group. If the admitted groups are enough, waits until one of them fails or is dropped
        (True), or until none is live (False)."""
        max_steps = self._ports.config.train.max_steps
        if max_steps is None:
            return True
        ledger = self._ports.ledger
        needed = (max_steps - ledger.first_turn) * self._ports.config.rollout.groups_per_step
        while True:
            seen = ledger.changes
            counts = ledger.statistics()
            if counts.admitted - counts.dropped - counts.failed < needed:
                return True
            if counts.live == 0:
                return False
            with self._ports.recorder.wait("rollout pump", "the last groups", on="train pump", cause="group"):
                await ledger.wait_changed(seen)

    async def _play(self, ticket: Ticket, prompt: Prompt) -> None:
        began, seconds = anyio.current_time(), 0.0
        send_member = None if self._ports.score_groups else lambda part: put_item(self._scoring, part)
        try:
            group = await self._groups.play(ticket, prompt, self._ports.config.rollout.group_size, send_member)
            if group is not None:
                seconds = anyio.current_time() - began
                if group.trajectories:
                    await put_item(self._scoring, group)
        finally:
            self._pace.end(seconds)


class GroupPlayer:
    """Plays the members of groups, and ends the groups that fail."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._episodes = Episodes(ports)
        self._raised_too_many_failed = False

    async def play(
        self, ticket: Ticket, prompt: Prompt, size: int, send: Callable[[Group], Awaitable[None]] | None = None
    ) -> Group | None:
        """Play and check `size` members. With `send` each member is sent, in a `Group` of its own, as soon as it has ended, and the
        result has no trajectories. Without `send` the result has the members that did not fail. None: the group has failed. Errors:
        GenerationError if more groups failed than the run allows."""
        ports = self._ports
        played: dict[int, Trajectory] = {}
        lost: list[EpisodeFailed] = []
        failed = False
        try:
            if ports.hooks.before_group is not None:
                with ports.recorder.watch("rollout pump", f"group {ticket.group_id}", on="hook before_group"):
                    prompt = await ports.hooks.apply_before_group(prompt)

            async def play_member(member: int) -> None:
                try:
                    trajectory = await self._play_member(ticket, prompt, member, size)
                except EpisodeFailed as failure:
                    lost.append(failure)
                    if not ports.config.rollout.keep_viable or size - len(lost) < _FEWEST_MEMBERS:
                        raise
                    return
                if send is None:
                    played[member] = trajectory
                else:
                    await send(Group(ticket, prompt, (trajectory,)))

            async with anyio.create_task_group() as members:
                for member in range(size):
                    spawn(members, f"member {member} of group {ticket.group_id}", play_member, member)
        except* EpisodeFailed:
            failed = True
        if failed:
            await self._end_failed(ticket, lost[0])
            return None
        trajectories = tuple(played[member] for member in sorted(played))
        if lost:
            ports.recorder.count("rollout/lost_members", len(lost))
            count = len(trajectories)
            trajectories = tuple(replace(t, member=n, group_size=count) for n, t in enumerate(trajectories))
        return Group(ticket, prompt, trajectories)

    async def _play_member(self, ticket: Ticket, prompt: Prompt, member: int, group_size: int) -> Trajectory:
        ports, group_id = self._ports, prompt.group_id
        with ports.recorder.span("rollout", track="rollout", group=group_id, member=member):
            # The deadline is the `priority`, and the engine serves the smallest first: an old group comes before a new group.
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
            # The environment did not return the trajectory that it was asked for. A retry would not mend this bug.
            raise EpisodeFailed from error
        return trajectory

    async def _end_failed(self, ticket: Ticket, failure: EpisodeFailed) -> None:
        """End a failed group, which releases its slot. Errors: GenerationError if more groups failed than the run allows."""
        book, rollout = self._ports.book, self._ports.config.rollout
        error = failure.__cause__
        assert error is not None
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        # Numbers and ids differ from episode to episode. Without them the failures of one kind have one count.
        words = _NUMBERS.sub("#", str(error)[:300])
        await book.end(ticket.group_id, "failed", f"{type(error).__name__}: {words}"[:200])
        limit, setting = rollout.max_failed_groups, "rollout.max_failed_groups"
        failed = self._ports.ledger.statistics().failed  # of all ranks
        if limit is None:
            setting += " (not set: a tenth of all groups, and at least the groups of one step)"
            limit = max(rollout.groups_per_step, self._ports.ledger.statistics().admitted // 10)
        if failed > limit and not self._raised_too_many_failed:
            # Other groups of the rollout pump that fail before the run has ended must not raise this error again.
            self._raised_too_many_failed = True
            failures = [pair for pair in book.reasons.most_common() if pair[0].startswith("failed: ")]
            where = " on this rank" if failed > book.failed else ""
            causes = [f"{count} of {reason.removeprefix('failed: ')}" for reason, count in failures[:_NAMED_CAUSES]]
            raise GenerationError(
                f"group {ticket.group_id} failed in the environment ({raised(error)}). {failed} groups have failed; "
                f"{setting} allows {limit} such groups in a run. The commonest causes{where}: {'; '.join(causes)}. "
                f"To go on in spite of such failures, set rollout.max_failed_groups to more, or rollout.keep_viable to true"
            ) from error


class EpisodeFailed(Exception):
    """An episode failed in all its attempts. `__cause__` is the error of the last attempt."""


def request_seed(seed: int, number: int) -> int:
    """The seed of request `number` of an episode. Request 0 gets `seed` itself. A later request gets a hash of `seed` and `number`,
    in [0, 2**64). So an environment may pass its episode's seed with every request: each request has its own random numbers."""
    if not number:
        return seed
    packed = struct.pack("<QQ", seed % (1 << 64), number)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"asyncrl-request").digest(), "little")


class Episodes:
    """Plays episodes of the environment, with a time limit and retries. The watchdog sees the episodes that run.

    An exception of the environment, also SystemExit, fails only its episode. EngineClosed and all errors of asyncrl outside
    `_EPISODE_ERRORS` end the run. A failed episode is played again up to `rollout.retries` times, by a new call of
    `Environment.run`. All attempts have the same random numbers. So a repeated run with `preset: sync` gives the same result, and
    retries do not favour completions that succeed. `rollout.timeout_s` includes the retries and the waits for the engine.
    """

    def __init__(self, ports: Ports) -> None:
        self._environment = ports.environment
        self._recorder = ports.recorder
        self._limit_s = ports.config.rollout.timeout_s
        self._retries = ports.config.rollout.retries
        self._logged = ports.logged

    async def play(self, prompt: Prompt, member: int, group_size: int, generate: Generate, priority: int) -> Trajectory:
        """Play one member. Its requests get `priority`. Errors: EpisodeFailed; errors that end the run, such as EngineClosed."""
        sent = unanswered = tokens = 0
        name = f"member {member} of group {prompt.group_id}"

        async def generate_counted(request: GenerationRequest) -> Generation:
            nonlocal sent, unanswered, tokens
            # A session has given each request its own seed, which does not depend on the order of parallel requests.
            seed = request.seed if request.session else request_seed(request.seed, next(request_numbers))
            request = replace(request, priority=priority, seed=seed, group=prompt.group_id)
            sent, unanswered = sent + 1, unanswered + 1
            watched.change_actor("the engine")
            try:
                generation = await generate(request)
            finally:
                unanswered -= 1
                if not unanswered:
                    watched.change_actor("the environment")
            tokens += len(generation.token_ids)
            return generation

        async def attempt_episode() -> Trajectory:
            watched.task = asyncio.current_task()
            return await self._environment.run(prompt, member, group_size, generate_counted)

        with (
            anyio.move_on_after(self._limit_s),
            self._recorder.watch(name, "its episode", on="the environment") as watched,
        ):
            for attempt in itertools.count():
                request_numbers = itertools.count()
                try:
                    return await run_isolated(attempt_episode, name)
                except BaseException as error:
                    failure = await self._failure(error)
                self._log(name, failure)
                # A coroutine that gets GeneratorExit must not await.
                if attempt == self._retries or isinstance(failure, GeneratorExit):
                    raise EpisodeFailed from failure
                await anyio.lowlevel.checkpoint_if_cancelled()
                self._recorder.count("rollout/retries")
        raise EpisodeFailed from GenerationError(
            f"the episode of {name} did not end within rollout.timeout_s = {self._limit_s:g} s: it asked the engine "
            f"{sent} times and got {tokens} tokens"
        )

    async def _failure(self, error: BaseException) -> BaseException:
        """Returns the error with which the episode failed. Raises the error instead if it ends the run or cancels this episode."""
        for leaf in leaves(error):
            fails_episode = isinstance(leaf, _EPISODE_ERRORS) and not isinstance(leaf, EngineClosed)
            if fails_episode or not isinstance(leaf, AsyncrlError):
                continue
            # If this task was cancelled together with the engine, raise the cancellation instead.
            await anyio.lowlevel.checkpoint_if_cancelled()
            if isinstance(leaf, ConfigError | PlatformError):
                # The user sees no traceback of these errors, so the message says where the error was raised.
                raise type(leaf)(f"{leaf}{place_of(leaf)}") from leaf
            raise leaf
        if is_interrupt(error) or isinstance(error, asyncio.CancelledError):
            raise error
        if isinstance(error, CancelledItself):
            # The environment awaited a task of its own that was cancelled.
            failure = GenerationError(f"the episode cancelled itself: {error}".removesuffix(": "))
            failure.__cause__ = error.__cause__
            return failure
        return error

    def _log(self, name: str, failure: BaseException) -> None:
        """Log the first failure of each kind. A kind is an error class and the line that raised the error."""
        frames = traceback.extract_tb(failure.__traceback__)
        kind = type(failure).__name__, f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        if kind in self._logged or len(self._logged) >= MAX_LOGGED_KINDS:
            return
        self._logged.add(kind)
        trace = failure.__traceback__
        while trace is not None and is_machinery(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        lines = traceback.format_exception(type(failure), failure, trace or failure.__traceback__, chain=False)
        if len(lines) > 2 * _LOGGED_ENTRIES:
            lines[_LOGGED_ENTRIES:-_LOGGED_ENTRIES] = ["  ...\n"]
        words = "%s failed in the environment; later failures of this kind are only counted\n%s"
        logger.warning(words, name, "".join(lines).rstrip())
