"""The environment servers of an HTTP door: their registration, the door's answers to `/status-env`, and the end of the run.

Atropos has no message for the end of a run. A server ends by itself once `current_step + queue_size * group_size // batch_size`
exceeds its number of steps. It ends with a stack trace if its requests fail. So a closing door keeps answering
`/status-env` for up to `LINGER_S`, with a queue of `OVER` groups, which ends every server.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import anyio

from asyncrl.concurrency import awake

# The smallest weight that `/status-env` answers, as in Atropos. With weight 0 an environment would produce nothing.
LEAST_WEIGHT = 0.01
# The number of steps that is announced for a run without `train.max_steps`: -1 would end the environment server.
NO_END = 1 << 31
# The `queue_size` that ends an environment server.
OVER = 1 << 52
LINGER_S = 2.0  # a server asks about ten times a second
# One more registration removes the environment that was silent for longest.
MOST_ENVIRONMENTS = 1024
FORGET_S = 3600.0  # of silence


@dataclass(slots=True)
class _Environment:
    weight: float  # the registered weight times the longest context
    seen_at: float  # time of the last request (`awake.now`)
    asked_status: bool = False
    knows_over: bool = False  # got an answer with `OVER`


class Environments:
    """The registered environments."""

    def __init__(self) -> None:
        # By number. The environment that was silent for longest is first.
        self._all: dict[int, _Environment] = {}
        self._next = 0
        self.over = False
        self._all_know_over = anyio.Event()

    def __len__(self) -> int:
        return len(self._all)

    def register(self, fields: dict[str, Any]) -> tuple[int, str]:
        """Returns (number, name). No number is used twice. Errors: TypeError, ValueError."""
        weight = float(1.0 if fields.get("weight") is None else fields["weight"])
        context = float(fields.get("max_token_length") or 1)
        if not math.isfinite(weight * context):
            raise ValueError(f"weight is {weight} and max_token_length {context}; expected finite numbers")
        now, number, self._next = awake.now(), self._next, self._next + 1
        for known in list(self._all):
            if len(self._all) >= MOST_ENVIRONMENTS or self._all[known].seen_at < now - FORGET_S:
                del self._all[known]
        self._all[number] = _Environment(context * max(weight, 0.0), now)
        return number, f"{fields.get('desired_name') or 'env'}_{number}"

    def touch(self, number: Any) -> _Environment | None:
        """Note a request of this environment. Returns the environment; None if no environment has this number."""
        environment = self._all.pop(number, None) if isinstance(number, int) else None
        if environment is not None:
            environment.seen_at = awake.now()
            self._all[number] = environment
        return environment

    def disconnect(self, number: Any) -> bool:
        """Returns False if there is no such environment."""
        known = self.touch(number) is not None
        if known:
            del self._all[number]
        return known

    def status(self, number: Any, version: int, held: deque[tuple[int | None, int]]) -> dict[str, Any]:
        """The answer to `/status-env`. `held`: (environment, sequences) of each accepted group that is not trained yet.

        An unknown environment (forgotten, or registered with an earlier run) gets weight 1, like a single environment."""
        environment = self.touch(number)
        total = sum(known.weight for known in self._all.values())
        weight = 1.0 if environment is None or total <= 0 else environment.weight / total
        own_groups = [] if environment is None else [sequences for owner, sequences in held if owner == number]
        largest = max((sequences for _, sequences in held), default=1)
        size = max(own_groups, default=largest)
        if environment is not None:
            environment.asked_status, environment.knows_over = True, self.over
        if self.over and not self._any_unaware():
            self._all_know_over.set()
        return {
            "current_step": version,
            "queue_size": OVER if self.over else sum(sequences for _, sequences in held) // size,
            "unallocated_fraction": 1.0,
            "self_queue_size": sum(own_groups) // size,
            "max_group_size": largest,
            "env_weight": min(1.0, max(LEAST_WEIGHT, weight)),
        }

    async def announce_over(self) -> None:
        """Announce the end of the run. Waits until every connected environment that asks for the status has got `OVER`, but at most
        `LINGER_S`: a server that died never asks again."""
        self.over = True
        if self._any_unaware():
            with anyio.move_on_after(LINGER_S):
                await self._all_know_over.wait()

    def _any_unaware(self) -> bool:
        return any(known.asked_status and not known.knows_over for known in self._all.values())
