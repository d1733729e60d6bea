"""One reward worker as the pool sees it: requests and their replies, wear, end.

The process that is started here is the worker's guard (concurrency/guard.py); the worker is its child. When the guard has ended,
nothing is left of the worker and of what it had started, and the guard's exit status is the worker's.

    {"id": n} + pickle            pool -> worker    load the functions, or call one (by cloudpickle)
    {"id": n, "cancel": true}     pool -> worker    end the coroutine of that request; the reply says that it has ended
    {"id": n, "grown": bytes, "answer": ..., "error": ...}
                                  worker -> pool    one of the two; `grown`: memory gained since the first calls of its functions

Columns arrive as exactly the Python objects they were, and a callable object travels by value. Replies are JSON: what a worker
writes cannot run code in the run.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import cloudpickle

from asyncrl.concurrency.child import ChildProcess
from asyncrl.errors import ConfigError, RewardCrash, RewardTimeout, TransportError

from .calls import LoadedFunction, RewardSpec, remote_text

MODULE = "asyncrl.rewards.worker"
# Between the end of the channel and the end of the process; twice that, and it is killed.
_EXIT_GRACE_S = 1.0
# For the exit handlers of a worker that was sent home, before it is killed.
_LEAVE_GRACE_S = 2.0
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class WorkerDiedError(Exception):
    """The process ended in the middle of a request; `status` says how, in words."""

    def __init__(self, pid: int, status: str) -> None:
        super().__init__(f"worker {pid} {status}")
        self.pid = pid
        self.status = status


@dataclass(eq=False, slots=True)
class RewardCall:
    """One call of a reward function, from when it waits for a worker on. `alone`: no other call begins in its worker meanwhile."""

    what: str
    alone: bool
    # Has its deadline.
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class RewardWorker:
    """States: running, leaving (`hang_up`, `kill`), ended. `kill`, or `hang_up`, and the end of `ended` must follow."""

    def __init__(self, folder: str, mark: str) -> None:
        """Starts it in `folder`. `load` comes first. Errors: OSError."""
        self._loop = asyncio.get_running_loop()
        self._last_id = 0
        # By request; None: there will be none.
        self._replies: dict[int, asyncio.Future[dict[str, Any] | None]] = {}
        # How it ended, where its exit status does not say so.
        self._status = ""
        self._grown = 0
        self._forgiven = (0, 0)
        self.mark = mark
        # Which of the pool's places it fills; replacements keep it.
        self.place = 0
        # False as soon as it may not take another request.
        self.usable = True
        # It closed its end: it is dead or dying, though its guard is still busy with what it started.
        self.hung_up = False
        # It fills its place; not until its functions are loaded, and no longer once its successor does.
        self.serving = False
        # That it was given and has not ended; and those, when it died.
        self.calls: set[RewardCall] = set()
        self.died_with: frozenset[RewardCall] = frozenset()
        # The call because of which the pool killed it, in words.
        self.killed_for = ""
        self.worn = False
        # For the keeper of its place: it has ended, or is worn.
        self.attention = asyncio.Event()
        environment = os.environ | _THREADS
        self._child = ChildProcess(
            "reward worker", MODULE, environment=environment, folder=folder, mark=mark, notify=self._on_news
        )
        # The guard's, until the worker has said its own.
        self.pid = self._child.pid
        self.ended = self._child.ended
        self.ended.add_done_callback(lambda _: self._on_end())

    @property
    def guard_was_killed(self) -> bool:
        """Perhaps; the worker by itself looks the same. Nobody may have ended what it had started."""
        return self._child.exit_code == -signal.SIGKILL

    @property
    def wear(self) -> tuple[int, int]:
        """Calls, and bytes gained since the first calls of its functions; since `forgive`, if there was one."""
        # The first request loads the functions.
        calls = self._last_id - 1 - len(self._replies)
        return calls - self._forgiven[0], self._grown - self._forgiven[1]

    def forgive(self) -> None:
        """Count its wear from here on."""
        self.worn = False
        calls, grown = self.wear
        self._forgiven = (self._forgiven[0] + calls, self._forgiven[1] + grown)

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
            LoadedFunction(i, spec.name or found["name"], found["accepts"], found["asynchronous"])
            for i, (spec, found) in enumerate(zip(specs, reply["answer"]["functions"], strict=True))
        ]

    def send(self, request: dict[str, Any]) -> int:
        """Returns the number of the request, for `reply` and `cancel`."""
        data = cloudpickle.dumps(request, protocol=5)
        self._last_id += 1
        reply = self._replies[self._last_id] = self._loop.create_future()
        if self.hung_up:
            reply.set_result(None)
        else:
            self._child.channel.send({"id": self._last_id}, data)
        return self._last_id

    def cancel(self, number: int) -> None:
        """End the coroutine of this request."""
        self._child.channel.send({"id": number, "cancel": True})

    async def reply(self, number: int) -> dict[str, Any]:
        """Wait for the reply to this request. It may be waited for again after a cancellation. Errors: `WorkerDiedError`."""
        await asyncio.wait([reply := self._replies[number]])
        del self._replies[number]
        if (found := reply.result()) is None:
            raise WorkerDiedError(self.pid, self._status or await self._last_words())
        return found

    def hang_up(self) -> None:
        """An idle worker ends by itself, and is killed where it does not."""
        self.usable = False
        self._child.hang_up(_LEAVE_GRACE_S)

    def kill(self) -> None:
        """The worker and everything that it started is killed, by its guard. Twice is fine."""
        self.usable = False
        self._child.kill()
        self._on_hang_up()

    def _on_news(self) -> None:
        """A reply to a request that is not open is discarded."""
        try:
            while (message := self._child.channel.take()) is not None:
                self._grown = int(message["grown"])
                reply = self._replies.get(message["id"])
                if reply is not None and not reply.done():
                    reply.set_result(message)
        except EOFError:
            self._on_hang_up()
            # Where it goes on without its socket, nothing can be heard from it any more.
            self._child.hang_up(2 * _EXIT_GRACE_S)
        except (TransportError, KeyError, TypeError, ValueError):
            self._status = "wrote bytes into the protocol's socket that are not ours"
            self.kill()

    def _on_hang_up(self) -> None:
        if self.hung_up:
            return
        self.hung_up, self.usable, self.died_with = True, False, frozenset(self.calls)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_result(None)

    async def _last_words(self) -> str:
        await asyncio.wait([self.ended], timeout=_EXIT_GRACE_S)
        return self._child.status if self.ended.done() else "closed the protocol's socket"

    def _on_end(self) -> None:
        self._on_hang_up()
        self.attention.set()
