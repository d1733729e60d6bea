"""The name of a record ring of this process, of which nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture
def name() -> Iterator[str]:
    chosen = f"http-{os.getpid()}"
    yield chosen
    assert not [path for path in os.listdir("/dev/shm") if chosen in path]
