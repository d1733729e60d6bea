"""`RewardWorker`, the pool's handle on a worker process: sends requests, takes replies, counts calls and memory, ends the process.

This module starts the worker's guard (concurrency/guard.py), and the guard starts the worker as its child. Before the guard ends,
it kills the worker and every process that the worker started. The guard exits with the exit status of the worker.

    {"id": n} + cloudpickle       pool -> worker    load the functions, or call one of them
    {"id": n, "cancel": true}     pool -> worker    cancel the coroutine of request n. When it has ended, the worker replies
    {"id": n, "grown": bytes, "answer": ..., "error": ...}
                                  worker -> pool    `answer` or `error`; `grown`: memory gained since the functions' first calls

Requests are pickled, so columns arrive as equal Python objects, and callables without an import path can be sent. Replies are JSON,
so a worker cannot run code in the run's process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import cloudpickle

from asyncrl.concurrency.child import ChildProcess
from asyncrl.errors import ConfigError, RewardCrash, RewardTimeout, TransportError

from .calls import LoadedFunction, RewardSpec, remote_text

MODULE = "asyncrl.rewards.worker"
# If the worker closed the channel: how long an error waits for the exit status. After twice this time the worker is killed.
_EXIT_GRACE_S = 1.0
# After `hang_up` the worker has this time for its exit handlers. Then it is killed.
_LEAVE_GRACE_S = 2.0
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class WorkerDiedError(Exception):
    """The worker ended before it replied. `status` says how, such as "exited with status 1"."""

    def __init__(self, pid: int, status: str) -> None:
        super().__init__(f"worker {pid} {status}")
        self.pid = pid
        self.status = status


@dataclass(eq=False, slots=True)
class RewardCall:
    """A call that waits for a worker, or runs in one. `alone`: while the call runs, its worker begins no other call."""

    what: str
    alone: bool
    size: int  # the number of completions
    # True: the call is sent again after a crash that other calls may have caused. It begins in a worker without other calls.
    isolated: bool = False
    # The deadline of this scope is the deadline of the call.
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class RewardWorker:
    """One worker process, and its guard. The pool must call `hang_up` or `kill`, and then await `ended`."""

    def __init__(self, folder: str) -> None:
        """Starts the process in the working directory `folder`. The first request must be `load`. Errors: OSError."""
        self._loop = asyncio.get_running_loop()
        self._last_id = 0
        # Replies by the number of the request. The result None means that the worker died first.
        self._replies: dict[int, asyncio.Future[dict[str, Any] | None]] = {}
        # If the worker was killed because it broke the protocol: what it did. Its exit status does not say so.
        self._status = ""
        self._grown = 0  # bytes gained since the first calls of the functions
        self._wear_start = (0, 0)  # (calls, bytes) at the last `reset_wear`
        # A future. The pool sets its result when the worker is worn (`pool.py`), and then starts a successor.
        self.worn = self._loop.create_future()
        # The worker's number in the pool. A successor gets the number of the worker that it replaces.
        self.slot = 0
        # True: the channel is closed, so the worker takes no requests. The guard may still be killing the worker and its processes.
        self.hung_up = False
        # True after the load of its functions, until a successor replaces the worn worker. It stays True if the worker dies.
        self.serving = False
        self.calls: set[RewardCall] = set()  # the running calls
        self.died_with: frozenset[RewardCall] = frozenset()  # the calls that ran when the channel was closed
        # Why the pool killed the worker: a clause about the call that was the cause. Empty if no call was the cause.
        self.kill_reason = ""
        environment = os.environ | _THREADS
        self._child = ChildProcess(
            "reward worker", MODULE, environment=environment, folder=folder, guarded=True, notify=self._on_readable
        )
        self.pid = self._child.pid  # of the guard; `load` sets that of the worker
        self.ended = self._child.ended
        self.ended.add_done_callback(lambda _: self._on_hang_up())

    @property
    def wear(self) -> tuple[int, int]:
        """(calls that have ended, bytes gained), both since the last `reset_wear`."""
        # The first request is no call: it loads the functions.
        calls = self._last_id - 1 - len(self._replies)
        return calls - self._wear_start[0], self._grown - self._wear_start[1]

    def reset_wear(self) -> None:
        """Count calls and bytes from 0 again."""
        calls, grown = self.wear
        self._wear_start = (self._wear_start[0] + calls, self._wear_start[1] + grown)
        self.worn = self._loop.create_future()

    async def load(self, specs: Sequence[RewardSpec], request: dict[str, Any], limit_s: float) -> list[LoadedFunction]:
        """Load the functions. Errors: `ConfigError`, `RewardCrash`, `RewardTimeout`."""
        sources = ", ".join(s.function if isinstance(s.function, str) else repr(s.function) for s in specs)
        try:
            with anyio.fail_after(limit_s):
                reply = await self.reply(self.send(request))
        except TimeoutError:
            raise RewardTimeout(
                f"reward worker {self.pid} did not load {sources} within {limit_s:.0f} s: it is stopped, or stuck in an import"
            ) from None
        except WorkerDiedError as died:
            raise RewardCrash(
                f"reward worker {died.pid} {died.status} while it loaded {sources}; what it wrote is on stderr"
            ) from None
        if "error" in reply:
            raise ConfigError(f"reward functions {sources}: {remote_text(reply['error'])}")
        self.pid = reply["answer"]["pid"]
        return [
            LoadedFunction(**loaded | {"index": i, "name": spec.name or loaded["name"], "spec": spec})
            for i, (spec, loaded) in enumerate(zip(specs, reply["answer"]["functions"], strict=True))
        ]

    def send(self, request: dict[str, Any]) -> int:
        """Send a request. Returns its number, for `reply` and `cancel`."""
        data = cloudpickle.dumps(request, protocol=5)
        self._last_id += 1
        reply = self._replies[self._last_id] = self._loop.create_future()
        if self.hung_up:
            reply.set_result(None)
        else:
            self._child.channel.send({"id": self._last_id}, data)
        return self._last_id

    def cancel(self, number: int) -> None:
        """Ask the worker to cancel the coroutine of this request."""
        self._child.channel.send({"id": number, "cancel": True})

    async def reply(self, number: int) -> dict[str, Any]:
        """Wait for the reply to this request. After a cancelled wait the caller may wait again. Errors: `WorkerDiedError`."""
        await asyncio.wait([reply := self._replies[number]])
        del self._replies[number]
        if (message := reply.result()) is None:
            raise WorkerDiedError(self.pid, self._status or await self._exit_status())
        return message

    def hang_up(self) -> None:
        """Close the channel, which ends an idle worker. A worker that does not end is killed."""
        self._on_hang_up()
        self._child.hang_up(_LEAVE_GRACE_S)

    def kill(self) -> None:
        """Make the guard kill the worker and every process of the worker. A second call does nothing."""
        self._child.kill()
        self._on_hang_up()

    def _on_readable(self) -> None:
        """Take replies from the channel. A reply to an unknown request, or to a request that has its result, is ignored."""
        try:
            while (message := self._child.channel.take()) is not None:
                self._grown = int(message["grown"])
                reply = self._replies.get(message["id"])
                if reply is not None and not reply.done():
                    reply.set_result(message)
        except EOFError:
            self._on_hang_up()
            # A worker that closed its end of the channel can send no reply, so it is killed if it goes on.
            self._child.hang_up(2 * _EXIT_GRACE_S)
        except (TransportError, KeyError, TypeError, ValueError):
            self._status = "wrote bytes that are no message into the protocol's socket"
            self.kill()

    def _on_hang_up(self) -> None:
        if self.hung_up:
            return
        self.hung_up, self.died_with = True, frozenset(self.calls)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_result(None)

    async def _exit_status(self) -> str:
        with anyio.move_on_after(_EXIT_GRACE_S):
            await asyncio.wait([self.ended])
        return self._child.status if self.ended.done() else "closed the protocol's socket"
