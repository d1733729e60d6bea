"""What tests of models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asyncrl.transport.memory.board import Board


@pytest.fixture
def boards() -> Iterator[list[Board]]:
    opened: list[Board] = []
    yield opened
    for board in opened:
        board.close()
