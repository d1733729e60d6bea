"""Ends this rank when its launcher, torchrun, ends.

A torchrun that gets SIGTERM stops its ranks, unless it is still starting ranks: then the ranks that run already go on. A torchrun
that gets SIGKILL stops no rank. A rank that goes on would write to a run directory that the next start needs.

    the launcher ends after `tie_to_launcher`     ->  the kernel sends this rank SIGTERM, which shuts it down
    the launcher ended before `tie_to_launcher`   ->  the call raises if torchrun's store is gone or this rank is an orphan

One case is missed: the launcher is on another machine than its store, ends in the tenths of a second before the call, and
another process than process 1 adopts orphans. Only Linux has the signal at the end of a parent.
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
_PROCESS = secrets.token_hex(8)  # identifies this process: a new container may reuse its id


@dataclass(frozen=True, slots=True)
class Launcher:
    """The process that started this one. `tie_to_launcher` makes it."""

    pid: int

    @property
    def has_ended(self) -> bool:
        return os.getppid() != self.pid

    def untie(self) -> None:
        """Ignore the launcher's end from now on: a shutdown is running, and a second SIGTERM would cut the shutdown short."""
        signal_at_parents_end(0)


def tie_to_launcher(environ: Mapping[str, str] | None = None) -> Launcher | None:
    """Make the kernel send this rank SIGTERM when its launcher ends. Call this before slow imports. None if neither torchrun nor a
    program with torchrun's agent (`accelerate launch`) started this rank. Errors: PlatformError if the launcher has ended."""
    env = os.environ if environ is None else environ
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    launcher = Launcher(os.getppid())
    signal_at_parents_end(signal.SIGTERM)
    if launcher.has_ended or (launcher.pid == 1 and not _is_python(1)):
        raise PlatformError("torchrun ended while it started this rank, so this rank ends too; start the run again")
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        _require_store(env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", ""))
    return launcher


def this_start(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """This process, its job, and the number of the job's start, in JSON types. A run directory stores them for `restart_phrase`."""
    env = os.environ if environ is None else environ
    ids = {"torchrun": env.get("TORCHELASTIC_RUN_ID"), "SLURM": env.get("SLURM_JOB_ID")}
    restarts = {"torchrun": env.get("TORCHELASTIC_RESTART_COUNT"), "SLURM": env.get("SLURM_RESTART_COUNT")}
    jobs = {name: [job, int(restarts[name] or 0)] for name, job in ids.items() if job is not None}
    # Each torchrun process makes its own directory: <directory>/attempt_N/<local rank>/error.json
    agent = str(Path(env.get("TORCHELASTIC_ERROR_FILE") or "/").parent.parent.parent)
    return {"process": f"{os.getpid()} {_PROCESS}", "agent": agent, "jobs": jobs}


def restart_phrase(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """A phrase for how the start `now` restarts the job of the start `before`; None for another job or the same process."""
    if now["process"] == before.get("process"):
        return None
    same_agent = now["agent"] == before.get("agent") and now["agent"] != "/"
    for name, (job, number) in now["jobs"].items():
        old_job, old_number = before.get("jobs", {}).get(name, (None, 0))
        # One torchrun has one job. If the nodes of a job change, another torchrun may start the first rank.
        is_restart = job == old_job and job != "none" and number > old_number
        if is_restart or (name == "torchrun" and same_agent):
            return f"restart {number} of this job by {name}"
    return None


def _is_python(pid: int) -> bool:
    """Whether process `pid` is Python. In many containers process 1 is torchrun itself; else process 1 adopts orphans."""
    with contextlib.suppress(OSError):
        return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
    return False


def _require_store(address: str, port: str) -> None:
    """Errors: PlatformError if nobody listens there. The rendezvous of the ranks reports other failures in more detail."""
    try:
        socket.create_connection((address, int(port)), _STORE_ANSWERS_S).close()
    except ConnectionRefusedError:
        raise PlatformError(
            "torchrun ended while it started this rank, so this rank ends too: nobody listens at the address of torchrun's store "
            f"({address}:{port}); start the run again"
        ) from None
    except (OSError, ValueError):
        return
