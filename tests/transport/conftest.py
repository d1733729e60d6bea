from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A shared-memory name of this test alone; fails the test if something is left under it."""
    chosen = f"test-{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**9}"
    yield chosen
    left = [path for path in Path("/dev/shm").iterdir() if chosen in path.name]
    for path in left:
        path.unlink()
    assert not left, f"left in shared memory: {left}"
