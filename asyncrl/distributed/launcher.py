"""Ends this rank when its launcher, torchrun, ends.

torchrun stops its ranks when it is stopped, with two exceptions. A killed torchrun stops no rank. A torchrun that is stopped while
it starts ranks does not stop those it has started. Such a rank would still write to a run directory that the next start needs.

    it ends after `tie_to_launcher`   ->  the kernel sends this rank SIGTERM, which shuts it down
    it ended before `tie_to_launcher` ->  that raises: nobody listens at the address of its store, or this rank is an orphan

One case is not found: the launcher is on another machine than its store, ends in the tenths of a second before the call,
and another process than process 1 adopts orphans. Only Linux has this signal.
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
_PROCESS = secrets.token_hex(8)  # a new container may reuse the process id


@dataclass(frozen=True, slots=True)
class Launcher:
    """The process that started this one. `tie_to_launcher` makes it."""

    pid: int

    @property
    def has_ended(self) -> bool:
        return os.getppid() != self.pid

    def untie(self) -> None:
        """Ignore the launcher's end from now on: a shutdown is running, and a second SIGTERM would cut it short."""
        signal_at_parents_end(0)


def tie_to_launcher(environ: Mapping[str, str] | None = None) -> Launcher | None:
    """Make the kernel send this rank SIGTERM when its launcher ends. None where neither torchrun nor a program with its agent, such
    as `accelerate launch`, started it. To be called before slow imports. Errors: PlatformError where the launcher has ended."""
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
    """This process, its job, and the number of the job's start, in JSON types. A run directory stores it for `restarted`."""
    env = os.environ if environ is None else environ
    ids = {"torchrun": env.get("TORCHELASTIC_RUN_ID"), "SLURM": env.get("SLURM_JOB_ID")}
    restarts = {"torchrun": env.get("TORCHELASTIC_RESTART_COUNT"), "SLURM": env.get("SLURM_RESTART_COUNT")}
    jobs = {name: [job, int(restarts[name] or 0)] for name, job in ids.items() if job is not None}
    # torchrun makes a directory of its own for each of its lives: <directory>/attempt_N/<local rank>/error.json
    agent = str(Path(env.get("TORCHELASTIC_ERROR_FILE") or "/").parent.parent.parent)
    return {"process": f"{os.getpid()} {_PROCESS}", "agent": agent, "jobs": jobs}


def restarted(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """A phrase for how the start `now` restarts the job of the start `before`; None for another job or the same process."""
    for name, (job, number) in now["jobs"].items() if now["process"] != before.get("process") else ():
        old, last = before.get("jobs", {}).get(name, (None, 0))
        # One torchrun has one job. Where the nodes of a job change, another torchrun may start the first rank.
        own = name == "torchrun" and now["agent"] == before.get("agent") != "/"
        if own or (job == old != "none" and number > last):
            return f"restart {number} of this job by {name}"
    return None


def _is_python(pid: int) -> bool:
    """Whether process `pid` is Python: in many containers process 1 is torchrun itself, else it is the one that adopts orphans."""
    with contextlib.suppress(OSError):
        return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
    return False


def _require_store(address: str, port: str) -> None:
    """Errors: PlatformError where nobody listens. The rendezvous of the ranks reports other failures in more detail."""
    try:
        socket.create_connection((address, int(port)), _STORE_ANSWERS_S).close()
    except ConnectionRefusedError:
        raise PlatformError(
            "torchrun ended while it started this rank, which ends with it: nobody listens any more where its store was "
            f"({address}:{port}); start the run again"
        ) from None
    except (OSError, ValueError):
        return
