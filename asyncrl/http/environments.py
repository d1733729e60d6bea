"""The environment servers of an HTTP door: who registered, what each is told about the queue, and that the run is over.

Atropos has no word for the end of a run: a server ends by itself once `current_step + queue_size * group_size // batch_size`
exceeds its number of steps, and with a stack trace where nobody answers any more. So where the door closes it answers
`/status-env` a little longer, with a queue that is long enough for that.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import anyio

from asyncrl.concurrency import awake

LEAST_WEIGHT = 0.01  # as Atropos: no environment starves
# Announced as the number of steps where none is configured: -1 would end the environment server.
NO_END = 1 << 31
OVER = 1 << 52  # groups in the queue, as told at the end
LINGER_S = 2.0  # a server asks about ten times a second
MOST_ENVIRONMENTS = 1024  # then the one that was silent for longest goes
# Of silence; one that comes back is answered as one that is alone.
FORGET_S = 3600.0
_MOST_NAME = 100  # characters


@dataclass(slots=True)
class _Environment:
    name: str
    weight: float  # its weight times its longest context
    heard: float  # when it last said anything (`awake.now`)
    connected: bool = True
    asks: bool = False  # since it registered
    told: bool = False  # that the run is over


class Environments:
    """Who registered, by number in the order of registration. Numbers are not used again."""

    def __init__(self) -> None:
        self._all: dict[int, _Environment] = {}
        self._next = 0
        self.over = False
        self._told = anyio.Event()

    def __len__(self) -> int:
        return len(self._all)

    def register(self, fields: dict[str, Any]) -> tuple[int, str]:
        """(number, name). Errors: TypeError, ValueError."""
        name = str(fields.get("desired_name") or "env")
        if len(name) > _MOST_NAME:
            raise ValueError(f"desired_name has {len(name):,} characters; at most {_MOST_NAME}")
        weight = float(1.0 if fields.get("weight") is None else fields["weight"])
        context = float(fields.get("max_token_length") or 1)
        if not math.isfinite(weight * context):
            raise ValueError(f"weight is {weight} and max_token_length {context}; expected finite numbers")
        self._forget()
        same = [one.name.rpartition("_") for one in self._all.values()]
        suffix = max((int(number) + 1 for known, _, number in same if known == name), default=0)
        number, self._next = self._next, self._next + 1
        self._all[number] = _Environment(f"{name}_{suffix}", context * max(weight, 0.0), awake.now())
        return number, self._all[number].name

    def _forget(self) -> None:
        """What has been silent for too long, and what there is no room for beside the one that comes."""
        since = awake.now() - FORGET_S
        self._all = {number: one for number, one in self._all.items() if one.heard >= since}
        while len(self._all) >= MOST_ENVIRONMENTS:
            del self._all[min(self._all, key=lambda number: (self._all[number].connected, self._all[number].heard))]

    def hear(self, number: int | None) -> None:
        """It sent a group."""
        self._find(number)

    def disconnect(self, number: Any) -> bool:
        """False: no such environment."""
        environment = self._find(number)
        if environment is not None:
            environment.connected = False
        return environment is not None

    def status(self, number: Any, version: int, held: deque[tuple[int | None, int]]) -> dict[str, Any]:
        """`held`: (environment, sequences) of the groups that wait. One that registered with an earlier run is answered as
        one that is alone."""
        environment = self._find(number)
        total = sum(one.weight for one in self._all.values() if one.connected)
        weight = 1.0 if environment is None or total <= 0 else environment.weight / total
        own = [] if environment is None else [sequences for owner, sequences in held if owner == number]
        size = max(own, default=max((sequences for _, sequences in held), default=1))
        if environment is not None:
            environment.asks, environment.told = True, self.over
        if self.over and not self._left():
            self._told.set()
        return {
            "current_step": version,
            "queue_size": OVER if self.over else sum(sequences for _, sequences in held) // size,
            "unallocated_fraction": 1.0,
            "self_queue_size": sum(own) // size,
            "max_group_size": max((sequences for _, sequences in held), default=1),
            "env_weight": min(1.0, max(LEAST_WEIGHT, weight)),
        }

    async def say_over(self) -> None:
        """Until all who ask know it, `LINGER_S` at most: one that died did not say so."""
        self.over = True
        if self._left():
            with anyio.move_on_after(LINGER_S):
                await self._told.wait()

    def _left(self) -> bool:
        return any(one.connected and one.asks and not one.told for one in self._all.values())

    def _find(self, number: Any) -> _Environment | None:
        environment = self._all.get(number) if isinstance(number, int) else None
        if environment is not None:
            environment.heard = awake.now()
        return environment
