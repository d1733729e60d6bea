"""The worker's program, which kills itself once: in the middle of what it makes ahead of a move, or, where there is nothing to
make, in the closure that moves. Where the file is that is named in `DIES_WHERE_THERE_IS`, which it removes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from asyncrl.concurrency.child import die_with_parent
from asyncrl.generation.worker import opening, server
from asyncrl.generation.worker.serving import EmbeddedServing


class Dying(EmbeddedServing):
    def prepare(self, half: Tensor, version: int) -> tuple[int, Iterator[None]]:
        count, pieces = super().prepare(half, version)
        return count, self._half_of(count, pieces)

    def move_to(self, half: Tensor, version: int) -> None:
        super().move_to(half, version)
        if version:
            die_once()

    def _half_of(self, count: int, pieces: Iterator[None]) -> Iterator[None]:
        for number, _ in enumerate(pieces):
            if number == count // 2:
                die_once()
            yield


def die_once() -> None:
    flag = Path(os.environ["DIES_WHERE_THERE_IS"])
    if flag.exists():
        flag.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    opening.EmbeddedServing = Dying  # type: ignore[misc]
    asyncio.run(server.main(int(sys.argv[1])))
