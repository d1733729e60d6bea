"""The worker's program, which kills itself once, in the closure that moves: where the file is that is named in
`DIES_WHERE_THERE_IS`, which it removes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from torch import Tensor

from asyncrl.concurrency.child import die_with_parent
from asyncrl.generation.embedded.engine import EmbeddedEngine
from asyncrl.generation.worker import opening, server


class Dying(EmbeddedEngine):
    def move_to(self, half: Tensor, version: int) -> None:
        super().move_to(half, version)
        if version:
            die_once()


def die_once() -> None:
    flag = Path(os.environ["DIES_WHERE_THERE_IS"])
    if flag.exists():
        flag.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    opening.EmbeddedEngine = Dying  # type: ignore[misc]
    asyncio.run(server.main(int(sys.argv[1])))
