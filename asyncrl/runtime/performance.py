"""Metrics of speed: the shares of the device's rate that a step reached, and a profile of a few steps.

The profile (`telemetry.profile`) is of the device's thread alone:

    GPU    the CUDA profiler API is started and stopped: the range of `nsys profile -c cudaProfilerApi`
    CPU    torch's profiler, into `profile/rank_N.json` of the run directory (opens in Perfetto, chrome://tracing)
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.concurrency.offload import offload
from asyncrl.config.check_losses import needs_reference
from asyncrl.config.resolve import versions_per_batch
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.pumps.pipeline import StepReport

if TYPE_CHECKING:
    # transformers takes seconds to import, and a dry run needs none
    from asyncrl.models.policy import PolicyModel

# Dense bfloat16 products on tensor cores, TFLOP/s, from NVIDIA's data sheets (which print twice that, for sparse ones).
# The first match counts. A MIG slice is a part of a card and has no entry: what it reaches is measured.
_PEAK_TFLOPS = (
    (r"\bMIG\b", None),
    (r"\bH200 NVL\b", 835.5),
    (r"\bH200\b", 989.4),
    (r"\bH100 NVL\b", 835.5),
    (r"\bH100 PCIe\b", 756.0),
    (r"\bH100\b", 989.4),
    (r"\bA100\b", 312.0),
)


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """FLOP/s of one device in the matmul dtype. `gemm`: reached by the product of two large square matrices at the start of the
    run. `peak`: stated by the maker; where that is not known, as on every CPU, the same as `gemm`."""

    gemm: float
    peak: float

    def shares(self, flop: float, seconds: float) -> dict[str, float]:
        """The metrics of a step that needed `flop` and took `seconds`."""
        return {"perf/limit_share": flop / seconds / self.gemm, "perf/mfu": flop / seconds / self.peak}


def measure_rates(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    """On the lane. A 1024^3 product on a CPU, some 70 ms on two cores; 8192^3 elsewhere. The best of six, or of as many as half a
    second has room for: where bfloat16 has no instructions one takes two seconds."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device).to(dtype)
    best, until = float("inf"), time.perf_counter() + 0.5
    for number in range(6):
        if number and time.perf_counter() > until:
            break
        started = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    gemm = 2.0 * size**3 / best
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return DeviceRates(gemm, stated_peak(name, dtype) or gemm)


def stated_peak(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of a card by its name as torch gives it, or None. Only for bfloat16: nothing else runs at a stated rate here."""
    found = [tflops for pattern, tflops in _PEAK_TFLOPS if re.search(pattern, name)]
    if dtype != torch.bfloat16 or not found or found[0] is None:
        return None
    return found[0] * 1e12


def needed_flop(report: StepReport, policy: PolicyModel, config: Config) -> float:
    """FLOP that the groups of a step needed.

    2 per parameter of a matrix product and token forward, 4 backward. Tokens of completions are sampled once (2) and
    trained once per update (6; 4 with adapters, whose own few products are left out); a prompt is prefilled and trained
    once per group, and needs no head; a reference model costs one forward more (2). Attention over the context, norms,
    softmax and the optimizer are left out, so the shares that stand on this number are a little too low.
    """
    head = policy.head.weight.numel()
    trajectories = [trajectory for group in report.groups for trajectory in group.trajectories]
    prompts = sum(group.prompt.ids.size for group in report.groups)
    completions = sum(trajectory.tokens.size - trajectory.prompt_length for trajectory in trajectories)
    scored = sum(int(trajectory.mask.sum()) for trajectory in trajectories)
    trained = 4.0 if config.model.lora.rank else 6.0
    passes = 2.0 + trained * config.algorithm.updates_per_batch + (2.0 if needs_reference(config.algorithm) else 0.0)
    return passes * ((policy.matmul_parameters - head) * (prompts + completions) + head * scored)


class StepProfiler:
    """`at` every version, `close` before the lane is closed. Without `telemetry.profile.from` both do nothing.

    Steps are policy versions, as in `metrics.jsonl`. The profile begins at the publish of the version before `from` and ends at
    that of the last step: what is generated meanwhile lies in it, too, whichever step will train it.
    """

    def __init__(
        self,
        config: Config,
        lane: Any,
        device: torch.device,
        folder: Path | None,
        rank: int,
        note: Callable[[str], None],
    ) -> None:
        """`folder`: of the run; None where nothing is written. Errors: ConfigError where there is nothing to profile with."""
        settings = config.telemetry.profile
        first: int | None = getattr(settings, "from")
        self._wanted, self._open = first is not None, False
        # Versions between which the profile lies.
        self._begins = (first or 0) - versions_per_batch(config)
        self._ends = (first or 0) + settings.steps - 1
        self._steps = f"steps {first} to {self._ends}"
        self._lane, self._device, self._note = lane, device, note
        self._file = None if folder is None else folder / "profile" / f"rank_{rank}.json"
        self._profile: profile | None = None
        if self._wanted and not isinstance(lane, ThreadLane):
            raise ConfigError(
                "telemetry.profile.from asks for what the device does, and a dry run has none; leave it out"
            )
        if self._wanted and self._file is None and device.type != "cuda":
            raise ConfigError("telemetry.profile writes into the run directory: a Runtime with write=False has none")

    async def at(self, version: int) -> None:
        """The weights are at `version`."""
        if self._open and version >= self._ends:
            await self._stop(version)
        elif self._wanted and not self._open and self._begins <= version < self._ends:
            self._open = True
            await self._lane.run(self._begin, name="profile/start", priority=2)

    async def close(self, version: int) -> None:
        """The run ends at `version`: what was recorded until here is kept."""
        if self._open:
            await self._stop(version)
        elif self._wanted:
            self._note(
                f"telemetry.profile: nothing was profiled: the run, which ends at version {version}, had none of "
                f"{self._steps}"
            )

    def _begin(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.profiler.start()
        else:
            # torch's profiler watches the thread that starts it, which is the lane's.
            self._profile = profile(activities=[ProfilerActivity.CPU])
            self._profile.start()

    def _end(self) -> None:
        if self._profile is not None:
            self._profile.stop()
        else:
            # What was launched belongs to the range.
            torch.cuda.synchronize(self._device)
            torch.cuda.profiler.stop()

    async def _stop(self, version: int) -> None:
        self._wanted = self._open = False
        await self._lane.run(self._end, name="profile/stop", priority=2)
        if self._profile is None:
            self._note(f"telemetry.profile: the range of the CUDA profiler API is closed at version {version}")
            return
        done, file, self._profile = self._profile, self._file, None
        assert file is not None

        def write() -> None:
            file.parent.mkdir(exist_ok=True)
            done.export_chrome_trace(str(file))

        await offload(write, "profile")
        self._note(f"telemetry.profile: {self._steps}, until version {version}, lie in {file}")
