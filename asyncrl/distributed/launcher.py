"""The launcher of this rank, torchrun: a rank does not outlive it.

torchrun stops its ranks when it is stopped itself, but not always: killed it cannot, and one that is stopped while it starts them
forgets those that it has started. What is left behind would train on in a run directory that the next life of the run wants.

    launcher ends  ->  the kernel sends this rank SIGTERM: nothing was begun, and it ends, or it is shut down in good order
    it had ended before this rank asked for that  ->  `tied` says so: where its store was nobody listens, or the rank is an orphan

The one gap: a launcher on another machine than its store, that ends in the tenths of a second before its ranks have asked, under a
process manager that adopts orphans in the place of process 1. Linux alone has the signal.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..concurrency.child import signal_at_parents_end
from ..errors import PlatformError

_STORE_ANSWERS_S = 5.0
_PROCESS = secrets.token_hex(8)  # a number alone comes again in a new container


@dataclass(frozen=True, slots=True)
class Launcher:
    """The process that started this one. `tied` makes it."""

    pid: int

    @property
    def has_ended(self) -> bool:
        """Whether it is gone."""
        return os.getppid() != self.pid

    def untie(self) -> None:
        """A shutdown is in progress, with a deadline of its own: a launcher that ends now must not cut it short."""
        signal_at_parents_end(0)


def tied(environ: Mapping[str, str] | None = None) -> Launcher | None:
    """From now on this rank gets SIGTERM when its launcher ends. None where it was not started by torchrun (or what uses its agent,
    such as `accelerate launch`). Before anything that takes long. Errors: PlatformError, it has ended already."""
    env = os.environ if environ is None else environ
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    launcher = Launcher(os.getppid())
    signal_at_parents_end(signal.SIGTERM)
    if launcher.has_ended or (launcher.pid == 1 and not _is_python(1)):
        raise PlatformError("torchrun ended while it started this rank, which ends with it; start the run again")
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        _require_store(env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", ""))
    return launcher


def this_start(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """This process, and which start of which job it is. A run directory has that of its run, as JSON, for `restarted`."""
    env = os.environ if environ is None else environ
    ids = {"torchrun": env.get("TORCHELASTIC_RUN_ID"), "SLURM": env.get("SLURM_JOB_ID")}
    restarts = {"torchrun": env.get("TORCHELASTIC_RESTART_COUNT"), "SLURM": env.get("SLURM_RESTART_COUNT")}
    jobs = {name: [job, int(restarts[name] or 0)] for name, job in ids.items() if job is not None}
    # torchrun makes a directory of its own for each of its lives: <directory>/attempt_N/<local rank>/error.json
    agent = str(Path(env.get("TORCHELASTIC_ERROR_FILE") or "/").parent.parent.parent)
    return {"process": f"{os.getpid()} {_PROCESS}", "agent": agent, "jobs": jobs}


def restarted(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """In words, how `now` restarts the job whose start was `before`; None where it does not: a second run of one process."""
    for name, (job, number) in now["jobs"].items() if now["process"] != before.get("process") else ():
        old, last = before.get("jobs", {}).get(name, (None, 0))
        # One torchrun has one job; where the nodes of a job change, its first rank may get another torchrun.
        own = name == "torchrun" and now["agent"] == before.get("agent") != "/"
        if own or (job == old != "none" and number > last):
            return f"restart {number} of this job by {name}"
    return None


def _is_python(pid: int) -> bool:
    """torchrun itself is process 1 of many containers; else that is who adopts orphans."""
    with contextlib.suppress(OSError):
        return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
    return False


def _require_store(address: str, port: str) -> None:
    """Of one that cannot be reached for other reasons the meeting of the ranks says more."""
    try:
        socket.create_connection((address, int(port)), _STORE_ANSWERS_S).close()
    except ConnectionRefusedError:
        raise PlatformError(
            "torchrun ended while it started this rank, which ends with it: nobody listens any more where its store was "
            f"({address}:{port}); start the run again"
        ) from None
    except (OSError, ValueError):
        return
