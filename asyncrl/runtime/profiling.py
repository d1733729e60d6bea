"""`telemetry.profile`: what the device's thread does in a few steps of a run, and nothing else of it.

    GPU    the CUDA profiler API is started and stopped: the range of `nsys profile -c cudaProfilerApi`
    CPU    torch's profiler, into `profile/rank_N.json` of the run directory (opens in Perfetto, chrome://tracing)

Steps are policy versions, as in `metrics.jsonl`. The range goes from the publish of the version before `from` to that of the
last step; what is generated meanwhile lies in it, too, whichever step will train it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.concurrency.offload import offload
from asyncrl.config.resolve import versions_per_batch
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

from .directory import RunDirectory

PRIORITY = 2  # on the lane: before what waits there


class _State(Enum):
    WAITING = "waiting"
    OPEN = "open"
    OVER = "over"


class StepProfiler:
    """`at` every version, `close` before the lane is closed. Without `telemetry.profile.from` both do nothing."""

    def __init__(
        self,
        config: Config,
        lane: Any,
        device: torch.device,
        directory: RunDirectory | None,
        rank: int,
        note: Callable[[str], None],
    ) -> None:
        """`directory`: None where nothing is written. Errors: ConfigError where there is nothing to profile with."""
        settings = config.telemetry.profile
        first: int | None = getattr(settings, "from")
        self._state = _State.OVER if first is None else _State.WAITING
        self._first = first or 0
        self._last = self._first + settings.steps - 1
        self._per_turn = versions_per_batch(config)
        self._lane, self._device, self._note = lane, device, note
        self._profile: profile | None = None
        self._file = None if directory is None else directory.path / "profile" / f"rank_{rank}.json"
        if first is None:
            return
        if not isinstance(lane, ThreadLane):
            raise ConfigError(
                "telemetry.profile.from asks for what the device does, and a dry run has none; leave it out"
            )
        if self._file is None and device.type != "cuda":
            raise ConfigError("telemetry.profile writes into the run directory: a Runtime with write=False has none")

    async def at(self, version: int) -> None:
        """The weights are at `version`."""
        if self._state is _State.OPEN and version >= self._last:
            await self._stop(version)
        if self._state is not _State.WAITING:
            return
        if version >= self._last:
            self._state = _State.OVER
            self._note(
                f"telemetry.profile: the run goes on at version {version}; {self._steps} are over: nothing to profile"
            )
        elif version + self._per_turn >= self._first:  # the next step
            self._state = _State.OPEN
            await self._lane.run(self._start, name="profile/start", priority=PRIORITY)

    async def close(self, version: int) -> None:
        """The run ends at `version`: what was recorded until here is kept."""
        if self._state is _State.WAITING:
            self._state = _State.OVER
            self._note(
                f"telemetry.profile: the run ended at version {version}, before {self._steps}: nothing was profiled"
            )
        elif self._state is _State.OPEN:
            await self._stop(version)

    @property
    def _steps(self) -> str:
        return f"steps {self._first} to {self._last}"

    def _start(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.profiler.start()
        else:  # on the lane's thread, which is the one that it watches
            self._profile = profile(activities=[ProfilerActivity.CPU])
            self._profile.start()

    async def _stop(self, version: int) -> None:
        self._state = _State.OVER
        await self._lane.run(self._end, name="profile/stop", priority=PRIORITY)
        done, file = self._profile, self._file
        if done is None:
            self._note(f"telemetry.profile: the range of the CUDA profiler API is closed at version {version}")
            return
        assert file is not None

        def write() -> None:
            file.parent.mkdir(exist_ok=True)
            done.export_chrome_trace(str(file))

        await offload(write, "profile")
        self._profile = None
        self._note(f"telemetry.profile: {self._steps}, until version {version}, lie in {file}")

    def _end(self) -> None:
        if self._profile is not None:
            self._profile.stop()
        else:
            torch.cuda.synchronize(self._device)  # what was launched belongs to the range
            torch.cuda.profiler.stop()
