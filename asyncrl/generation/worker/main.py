"""The worker's program: `python -m asyncrl.generation.worker.main FD PARENT`. FD: descriptor of the channel. PARENT: pid of
the rank that started the worker."""

from __future__ import annotations

import asyncio
import gc
import sys

from asyncrl.concurrency.child import die_with_parent

if __name__ == "__main__":
    # Before the slow imports, so that a worker never outlives its rank.
    die_with_parent(int(sys.argv[2]))
    # The imports create no garbage. Garbage collection would take a sixth of their time.
    gc.disable()
    from asyncrl.generation.worker.server import main

    gc.enable()
    asyncio.run(main(int(sys.argv[1])))
