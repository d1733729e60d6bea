"""What a rank other than 0 exchanges with rank 0 (`dispatch.py`): prompts, evaluations, counts, and versions of the weights.

The follow pump, on a rank that only generates, stands in for the train pump and the publish pump:

    consumes     versions that this rank's engine has (`EngineVersion`)
    produces     releases: the ledger releases the slots of a step when every rank that generates has the step's weights
    waits for    the next version; the end of the run
    is woken by  the receiver of weights; rank 0
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import anyio

from asyncrl.concurrency.supervisor import spawn
from asyncrl.data.prompts import PromptSource
from asyncrl.distributed.exchange import Answer
from asyncrl.distributed.line import LineClient
from asyncrl.errors import DataError, EngineClosed, RankLost, WorkerDied
from asyncrl.telemetry.samples import Samples
from asyncrl.types import Prompt

from .claims import drop_late
from .dispatch import ADMITTED, BEGUN, ENDED, EVALUATE, HERE, LEFT, NEXT, REPORT, TRAINED, VERSION
from .evaluate import EvaluatePump
from .metrics import COUNTED
from .pipeline import Ports


class EngineVersion:
    """Stands in for the trainer on a rank that only generates: its `version` is the version of the engine's weights."""

    def __init__(self, receive: Callable[[], Awaitable[int]]) -> None:
        """`receive()` waits until the engine has a version newer than the last result of `receive`, and returns that version."""
        self._receive = receive
        self.version = -1  # the engine has no weights yet

    async def next(self) -> int:
        """Wait until the engine has a newer version. Returns that version."""
        self.version = await self._receive()
        return self.version


class Remote:
    """The connection of a rank other than 0 to rank 0's `Dispatch`. Create a `Remote` before rank 0 can ask, then call `start`."""

    def __init__(self, line: LineClient, *, joins: bool = False) -> None:
        """`joins`: this rank joined a run that may have begun."""
        self._line, self.joins = line, joins
        self._started = asyncio.Event()
        self.trained = asyncio.Event()  # no step follows
        self.ended = asyncio.Event()
        self.last_version = -1  # the last version of the run; known when `ended` is set
        self.others_mean_s, self.generating_count = 0.0, 1  # see `rollout.Prompts`
        self._sent_version = -1  # newest version sent by rank 0 (`wait_sent_version`)
        self._version_arrived = asyncio.Event()
        line.on(VERSION, self._on_version)
        line.on(TRAINED, self._on_trained)
        line.on(ENDED, self._on_ended)
        line.on(EVALUATE, self._on_evaluate)

    def start(
        self,
        ports: Ports,
        prompts: PromptSource | None,
        evaluate: EvaluatePump | None,
        wait_version: Callable[[int], Awaitable[None]],
    ) -> None:
        """`prompts`: finds the prompt of a group id that rank 0 sends. `evaluate`: None without held-out prompts.
        `wait_version(v)` returns when the engine has version v."""
        self._ports, self._prompts, self._evaluate, self._wait_version = ports, prompts, evaluate, wait_version
        self._started.set()

    async def next(self, played_s: Sequence[float] = ()) -> Prompt | None:
        """The next prompt of rank 0's cursor. None if no prompt is left. Errors: DataError if the data of the ranks differ."""
        answer, _ = await self._line.ask(NEXT, {"played_s": [*played_s]})
        assert self._prompts is not None
        self.others_mean_s, self.generating_count = answer["others_mean_s"], answer["generating"]
        if answer["digest"] != self._prompts.digest:
            raise DataError(
                "the prompts of this rank are not those of rank 0 (their fingerprints differ); give all ranks the same data.train"
            )
        return None if answer["group"] is None else self._prompts.prompt_for(answer["group"])

    async def admitted(self) -> None:
        """Call after the ledger has admitted the group of the newest prompt."""
        await self._line.tell(ADMITTED, {})

    async def report(self, *, last: bool = False) -> None:
        """Send rank 0 the counts since the previous report. `last`: no step follows."""
        ports = self._ports
        samples: Mapping[str, Samples] = {}
        if ports.builds_steps:
            # The `StepPart` of each step has the counts of this rank. After the last step only this report can have them.
            counts = ports.recorder.take_counts(COUNTED) if last else {}
        else:
            counts, _, samples = ports.recorder.take_metrics()
            if ports.follows:
                # This rank is a sibling (siblings.py). Its leader sends the same counts of the trainer, which must not count twice.
                counts = {name: value for name, value in counts.items() if name.startswith(COUNTED)}
                samples = {}
        header = {
            "progress": [ports.engine.statistics().get("tokens", 0.0), ports.book.end_count],
            "reasons": dict(ports.book.reasons),
            "version": ports.trainer.version,
            "counts": counts,
            "samples": {name: entry.to_json() for name, entry in samples.items()},
        }
        # Shielded: the end of the pumps cancels this task. A report that is cut off would lose the counts for ever.
        with anyio.CancelScope(shield=True):
            await self._line.tell(REPORT, header)

    async def report_often(self) -> None:
        """Send reports until rank 0 is gone. Without reports the watchdog of rank 0 would call a long episode here a stall."""
        ports, limits = self._ports, self._ports.config.watchdog
        # If rank 0 is lost, the pumps raise the error.
        with suppress(RankLost):
            while True:
                await anyio.sleep(min(limits.interval_s, limits.stall_timeout_s / 4))
                if not ports.builds_steps:
                    ports.recorder.take_window()  # discarded: rank 0 cannot use times of another clock
                await self.report()

    async def arrive(self) -> None:
        """Notify rank 0 that this rank is connected."""
        await self._line.tell(HERE, {})

    async def begin(self) -> None:
        """Notify rank 0 that this rank, which joined the run, generates from now on."""
        await self._line.tell(BEGUN, {})

    async def leave(self) -> None:
        """Notify rank 0 that all pumps of this rank have ended, and wait until every group has ended in rank 0's ledger."""
        # Rank 0 may exit before its answer arrives here.
        with suppress(RankLost):
            await self.report(last=True)
            await self._line.ask(LEFT, {})

    async def wait_sent_version(self, version: int) -> int:
        """For `train.kind: dry_run`: wait until rank 0 has sent this version or a later one. Returns the newest sent version."""
        while self._sent_version < version:
            await self._version_arrived.wait()
        return self._sent_version

    async def _on_version(self, peer: str, header: Any, _: Sequence[Any]) -> None:
        self._sent_version = max(self._sent_version, header["version"])
        self._version_arrived.set()
        self._version_arrived = asyncio.Event()

    async def _on_trained(self, peer: str, header: Any, _: Sequence[Any]) -> None:
        self.trained.set()

    async def _on_ended(self, peer: str, header: Any, _: Sequence[Any]) -> None:
        self.last_version = header["version"]
        self.trained.set()
        self.ended.set()

    async def _on_evaluate(self, peer: str, header: Any, _: Sequence[Any]) -> Answer:
        await self._started.wait()
        await self._wait_version(header["version"])
        if self._evaluate is None:
            raise DataError("rank 0 has held-out prompts and this rank has none; give all ranks the same data.eval")
        try:
            return [list(sample) for sample in await self._evaluate.play(header["version"], header["rows"])], ()
        except WorkerDied as error:
            # This rank ends, and other ranks can play the rows.
            raise EngineClosed(str(error)) from error


class FollowPump:
    """See the module docstring."""

    def __init__(self, ports: Ports, remote: Remote, engine_version: EngineVersion) -> None:
        self._ports = ports
        self._remote = remote
        self._engine_version = engine_version
        self._released = ports.ledger.turn  # this rank has released all turns below this number
        self._begun = not remote.joins  # the ledger counts this rank as a rank that generates
        self._advanced = anyio.Event()

    async def wait_version(self, version: int) -> None:
        """Wait until the engine has this version or a later one."""
        while self._engine_version.version < version:
            await self._advanced.wait()

    async def wait_published(self, turn: int) -> None:
        """Wait until the engine has the weights of the turns below `turn`. A rank that joined waits instead until the ledger counts
        it among the ranks that generate, or until no step follows."""
        if self._remote.joins:
            while not (self._begun or self._remote.trained.is_set()):
                await self._advanced.wait()
            return
        while self._ports.turn_of(self._engine_version.version) < turn:
            await self._advanced.wait()

    async def run(self) -> None:
        """Ends when rank 0 has ended the run and this rank's engine has the last version."""
        async with anyio.create_task_group() as tasks:
            spawn(tasks, "versions", self._follow)
            await self._remote.trained.wait()
            self._notify()
            await self._remote.ended.wait()
            await self.wait_version(self._remote.last_version)
            tasks.cancel_scope.cancel()

    async def _follow(self) -> None:
        ports = self._ports
        while True:
            with ports.recorder.watch("follow pump", "the next version of the weights", on="rank 0"):
                version = await self._engine_version.next()
            # Shown only on a node that joined.
            ports.note(f"version {version} of the weights is here; groups played here: {ports.book.end_count}")
            # Report first: with the released slots rank 0 may complete a step, and the step's metrics should have these counts.
            await self._remote.report()
            turn = ports.turn_of(version) - 1
            if not self._begun:
                await self._begin(turn + 1)
            elif turn >= self._released:
                self._released = turn + 1
                await ports.ledger.release(turn)
            await drop_late(ports)
            self._notify()

    def _notify(self) -> None:
        self._advanced.set()
        self._advanced = anyio.Event()

    async def _begin(self, turn: int) -> None:
        self._begun = await self._ports.ledger.begin(turn)
        if self._begun:
            self._released = turn
            await self._remote.begin()
            self._ports.note("this node generates from now on")
