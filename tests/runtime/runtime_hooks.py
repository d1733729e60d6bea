"""Hooks of a user's for the tests of whole runs."""

from __future__ import annotations

from typing import Any

from asyncrl import Hooks


def fails(group: Any, advantages: Any) -> None:
    raise ValueError("of the test")


failing = Hooks(after_advantages=fails)
