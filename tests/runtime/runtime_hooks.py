"""Hooks of a user's for the tests of whole runs."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from asyncrl import Hooks


def fails(group: Any, advantages: Any) -> None:
    raise ValueError("of the test")


async def wait_for_gate(prompt: Any) -> None:
    """From group GATE_FROM on, until the test has made the file GATE."""
    while prompt.group_id >= int(os.environ["GATE_FROM"]) and not os.path.exists(os.environ["GATE"]):  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.02)


waiting = Hooks(before_group=wait_for_gate)
failing = Hooks(after_advantages=fails)
