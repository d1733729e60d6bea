"""Tests that take no time of the machine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Any

from asyncrl_bench.virtual_time import run_virtual


def virtual(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test in virtual time: what waits for ever is an error that names it, not a hang."""

    @wraps(test)
    def run(**given: Any) -> None:
        run_virtual(partial(test, **given))  # type: ignore[arg-type]

    return run
