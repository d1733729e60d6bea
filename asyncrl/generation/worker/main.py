"""The worker's program: `python -m asyncrl.generation.worker.main FD NODE`, started by exec, child of the node's process.

It is tied to the node before it loads anything that takes time; `server.py` is what it does.
"""

from __future__ import annotations

import asyncio
import gc
import sys

from asyncrl.concurrency.child import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    # Looking for garbage among what modules make, which stays, is a sixth of the time that loading takes.
    gc.disable()
    from asyncrl.generation.worker.server import main

    gc.enable()
    asyncio.run(main(int(sys.argv[1])))
