"""Fixtures of the tests of whole runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def name() -> Iterator[str]:
    """Of a ring. The test leaves nothing of it in shared memory."""
    chosen = f"ring-of-{os.getpid()}"
    yield chosen
    left = [each for each in os.listdir("/dev/shm") if chosen in each]
    for each in left:
        os.unlink(f"/dev/shm/{each}")
    assert not left
