"""Ends this rank when its launcher, torchrun, ends.

At a SIGTERM torchrun stops its ranks. If the SIGTERM comes while torchrun starts ranks, the started ranks go on. At a SIGKILL of
torchrun all ranks go on. A rank that goes on would write to the run directory that the next start of the job needs.

    the launcher ends after `tie_to_launcher`     ->  the kernel sends this rank SIGTERM, which shuts it down
    the launcher ended before `tie_to_launcher`   ->  the call raises if torchrun's store is gone or this rank is an orphan

The call misses one case: torchrun ended just before the call, a process other than process 1 adopts orphans, and torchrun's store
is on another machine or does not exist. Linux only: macOS sends no signal at the end of a parent.
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

_STORE_TIMEOUT_S = 5.0
_PROCESS = secrets.token_hex(8)  # identifies this process: a new container may reuse its pid


@dataclass(frozen=True, slots=True)
class Launcher:
    """The process that started this process, as `tie_to_launcher` found it."""

    pid: int

    @property
    def has_ended(self) -> bool:
        return os.getppid() != self.pid

    def untie(self) -> None:
        """Ignore the launcher's end from now on: a shutdown is running, and a second SIGTERM would cut the shutdown short."""
        signal_at_parents_end(0)


def tie_to_launcher(environ: Mapping[str, str] | None = None) -> Launcher | None:
    """Make the kernel send this rank SIGTERM when its launcher ends. Call this before slow imports. Returns None if the launcher is
    neither torchrun nor a program with torchrun's agent (`accelerate launch`). Errors: PlatformError if the launcher has ended."""
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
    """This process, and its torchrun and SLURM jobs with their restart counts, in JSON types, for a file of the run directory."""
    env = os.environ if environ is None else environ
    ids = {"torchrun": env.get("TORCHELASTIC_RUN_ID"), "SLURM": env.get("SLURM_JOB_ID")}
    restarts = {"torchrun": env.get("TORCHELASTIC_RESTART_COUNT"), "SLURM": env.get("SLURM_RESTART_COUNT")}
    jobs = {name: [job, int(restarts[name] or 0)] for name, job in ids.items() if job is not None}
    # Each torchrun process makes its own directory: <directory>/attempt_N/<local rank>/error.json
    agent = str(Path(env.get("TORCHELASTIC_ERROR_FILE") or "/").parent.parent.parent)
    return {"process": f"{os.getpid()} {_PROCESS}", "agent": agent, "jobs": jobs}


def restart_phrase(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """A phrase such as `restart 2 of this job by SLURM`; None if `now` is no restart of the job of `before`."""
    if now["process"] == before.get("process"):
        return None
    same_agent = now["agent"] == before.get("agent") and now["agent"] != "/"
    for name, (job, number) in now["jobs"].items():
        old_job, old_number = before.get("jobs", {}).get(name, (None, 0))
        # The same torchrun process is always the same job. Another torchrun process may restart rank 0: then an equal id shows
        # the same job. The default id "none" shows nothing, because many jobs have it.
        is_restart = job == old_job and job != "none" and number > old_number
        if is_restart or (name == "torchrun" and same_agent):
            return f"restart {number} of this job by {name}"
    return None


def _is_python(pid: int) -> bool:
    """Whether process `pid` runs Python. Process 1 is torchrun itself in many containers; elsewhere process 1 adopts orphans."""
    with contextlib.suppress(OSError):
        return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
    return False


def _require_store(address: str, port: str) -> None:
    """Errors: PlatformError if no process listens at the address. The rendezvous of the ranks reports other failures in detail."""
    try:
        socket.create_connection((address, int(port)), _STORE_TIMEOUT_S).close()
    except ConnectionRefusedError:
        raise PlatformError(
            "torchrun ended while it started this rank, so this rank ends too: nobody listens at the address of torchrun's store "
            f"({address}:{port}); start the run again"
        ) from None
    except (OSError, ValueError):
        return
