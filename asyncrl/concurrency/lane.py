"""Lanes: the one OS thread that owns a device. (Protocol first; the implementations follow below.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Lane(Protocol):
    """Runs closures one at a time, highest priority first, in submission order within a priority.

    A closure cannot be cancelled: a caller that is cancelled waits (shielded) until its closure ended, then the
    cancellation is raised. An exception of the closure, BaseException included, is raised in the caller.
    """

    name: str

    async def run(self, fn: Callable[[], T], *, name: str, priority: int = 0, cost: float = 0.0) -> T:
        """`name` labels the span; `cost` is the simulated duration in seconds, used by the simulated lane alone."""
        ...
