"""Functions of the user that run between the stages of a run.

    prompt ──before_group──▶ rollouts ──▶ rewards ──after_rewards──▶ filters ──▶ advantages ──after_advantages──▶ training

Hooks are plain or async functions and run on the event loop: code that blocks or computes for more than a few milliseconds
belongs in a reward function. A hook that returns `None` changes nothing. If a hook raises, or returns a value of the wrong form, a
`HookError` ends the run, or the call of `generate`, `submit` or `play` that ran the hook. Each rank calls hooks for its own groups.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, TypeVar

import anyio
import numpy as np
import numpy.typing as npt

from asyncrl.config.imports import is_interrupt, load_object, raised
from asyncrl.errors import ConfigError, DataError, HookError
from asyncrl.records.check import Limits, check_trajectory
from asyncrl.types import Group, Prompt

T = TypeVar("T")
Maybe: TypeAlias = T | Awaitable[T | None] | None
Numbers: TypeAlias = npt.NDArray[np.float64]
# Larger advantages would overflow the float32 column of a microbatch.
MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Hooks:
    """Pass a `Hooks` object: `Runtime(config, hooks=Hooks(after_rewards=f))`. Or name it in the settings: `hooks: file.py:name`."""

    # Called before a group is sampled. May return another prompt of the same group id.
    before_group: Callable[[Prompt], Maybe[Prompt]] | None = None
    # Called after all members are scored, before the filters. May return a group with other rewards (`dataclasses.replace`).
    after_rewards: Callable[[Group], Maybe[Group]] | None = None
    # Called before a group is trained, with the group and its advantages [G] (read-only). May return other advantages.
    after_advantages: Callable[[Group, Numbers], Maybe[npt.ArrayLike]] | None = None

    @classmethod
    def load(cls, address: str) -> Hooks:
        """The hooks at an address `file.py:name`. Errors: ConfigError."""
        found = load_object(address)
        if not isinstance(found, Hooks):
            raise ConfigError(f"hooks is {address!r}, a {type(found).__name__}; expected an asyncrl.Hooks")
        return found

    def check(self) -> Hooks:
        """Returns `self`. Errors: ConfigError for a hook that cannot be called."""
        for name, hook in ((field.name, getattr(self, field.name)) for field in fields(self)):
            if hook is not None and not callable(hook):
                raise ConfigError(f"hooks: {name} is a {type(hook).__name__}; expected a function")
        return self

    async def apply_before_group(self, prompt: Prompt) -> Prompt:
        """The prompt to sample from. Errors: HookError."""
        new = await self._call("before_group", prompt)
        if new is None:
            return prompt
        if not isinstance(new, Prompt) or new.group_id != prompt.group_id:
            raise self._wrong_answer("before_group", new, f"None or a Prompt of group {prompt.group_id}")
        return new

    async def apply_after_rewards(self, group: Group, limits: Limits) -> Group:
        """The group that filters and training get. Errors: HookError."""
        new = await self._call("after_rewards", group)
        if new is None:
            return group
        if not isinstance(new, Group) or (new.ticket, len(new.trajectories)) != (group.ticket, len(group.trajectories)):
            wanted = f"None or the Group {group.group_id} with {len(group.trajectories)} trajectories"
            raise self._wrong_answer("after_rewards", new, wanted)
        for trajectory in new.trajectories:
            try:
                check_trajectory(trajectory, limits)
            except DataError as error:
                raise self._wrong_answer("after_rewards", new, f"trajectories that can be trained ({error})") from None
        return new

    async def apply_after_advantages(self, group: Group, advantages: Numbers) -> Numbers:
        """The advantages [G] to train with. Errors: HookError."""
        read_only = advantages.view()
        read_only.flags.writeable = False
        new = await self._call("after_advantages", group, read_only)
        if new is None:
            return advantages
        try:
            values = np.array(new, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            values = np.zeros(0)
        if values.shape != advantages.shape or not (np.abs(values) <= MAX_FLOAT32).all():
            raise self._wrong_answer("after_advantages", new, f"None or {advantages.size} finite float32 numbers")
        return values

    async def _call(self, name: str, *arguments: Any) -> Any:
        hook = getattr(self, name)
        if hook is None:
            return None
        try:
            result = hook(*arguments)
            return await result if inspect.isawaitable(result) else result
        except asyncio.CancelledError as error:
            if anyio.current_effective_deadline() == -math.inf:  # this task is cancelled
                raise
            # A task group ignores a CancelledError that leaves a task: the group of trajectories would silently disappear.
            raise HookError(f"hook {name} ({_title(hook)}) cancelled itself: {error}".removesuffix(": ")) from None
        except BaseException as error:
            if is_interrupt(error):
                raise
            raise HookError(f"hook {name} ({_title(hook)}) failed: {raised(error)}") from error

    def _wrong_answer(self, name: str, answer: Any, wanted: str) -> HookError:
        return HookError(
            f"hook {name} ({_title(getattr(self, name))}) returned {repr(answer)[:200]}; expected {wanted}"
        )


def _title(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
