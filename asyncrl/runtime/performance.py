"""Metrics of speed (a step's share of the device's FLOP/s), and a profile of a few steps.

The profile (`telemetry.profile`) records only the lane, the thread that uses the device:

    GPU    starts and stops the CUDA profiler API, for `nsys profile -c cudaProfilerApi`
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
    # This module imports transformers, which takes seconds, and which a dry run does not need.
    from asyncrl.models.policy import PolicyModel

# TFLOP/s of dense bfloat16 products on tensor cores: half of the numbers in NVIDIA's data sheets, which are for sparse products.
# The first match counts. A MIG slice, a part of a card, has no stated peak.
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
    """FLOP/s of one device in the matmul dtype. `gemm`: measured at the start of the run with products of a square matrix.
    `peak`: stated by the manufacturer; equal to `gemm` if there is no such number, as for every CPU."""

    gemm: float
    peak: float

    def shares(self, flop: float, seconds: float) -> dict[str, float]:
        """The metrics of a step with `flop` operations in `seconds`."""
        return {"perf/limit_share": flop / seconds / self.gemm, "perf/mfu": flop / seconds / self.peak}


def measure_rates(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    """Measure the rates, with products of 512^3 on a CPU (1024^3 with more than four threads) and 8192^3 on a GPU. Call on the
    lane. The best of six products counts. After half a second no further product is made: emulated bfloat16 takes seconds."""
    size = 8192
    if device.type == "cpu":
        size = 512 if torch.get_num_threads() <= 4 else 1024
    matrix = torch.randn(size, size, device=device).to(dtype)
    best, deadline = float("inf"), time.perf_counter() + 0.5
    for number in range(6):
        if number and time.perf_counter() > deadline:
            break
        started = time.perf_counter()
        matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    gemm = 2.0 * size**3 / best
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return DeviceRates(gemm, stated_peak(name, dtype) or gemm)


def stated_peak(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s in the data sheet of the card that torch calls `name`. None for other dtypes than bfloat16 and for unknown cards."""
    matches = [tflops for pattern, tflops in _PEAK_TFLOPS if re.search(pattern, name)]
    if dtype != torch.bfloat16 or not matches or matches[0] is None:
        return None
    return matches[0] * 1e12


def needed_flop(report: StepReport, policy: PolicyModel, config: Config) -> float:
    """Floating-point operations that the groups of a step needed.
    A token costs 2 per parameter of a matrix product in the forward pass and 4 in the backward pass. Sampling is one forward (2).
    Each update is a forward and a backward (6; 4 with adapters). A reference model is one more forward (2). A prompt counts once
    per group, without the head. Attention over the context, norms, softmax, the products of adapters and the optimizer are not
    counted, so the shares of the rates are a little too low."""
    head = policy.head.weight.numel()
    trajectories = [trajectory for group in report.groups for trajectory in group.trajectories]
    prompts = sum(group.prompt.ids.size for group in report.groups)
    completions = sum(trajectory.tokens.size - trajectory.prompt_length for trajectory in trajectories)
    scored = sum(int(trajectory.mask.sum()) for trajectory in trajectories)
    update = 4.0 if config.model.lora.rank else 6.0
    reference = 2.0 if needs_reference(config.algorithm) else 0.0
    per_parameter = 2.0 + update * config.algorithm.updates_per_batch + reference
    return per_parameter * ((policy.matmul_parameters - head) * (prompts + completions) + head * scored)


class StepProfiler:
    """Profiles the steps of `telemetry.profile`. Call `at` at every version, and `close` before the lane is closed.
    Steps are policy versions, as in `metrics.jsonl`. The profile begins when the last version before `from` is published, and
    ends when the version of the last step is published. It includes all work of the lane between these two moments."""

    def __init__(
        self,
        config: Config,
        lane: Any,
        device: torch.device,
        folder: Path | None,
        rank: int,
        note: Callable[[str], None],
    ) -> None:
        """`folder`: the run directory, or None if the run writes no files. Errors: ConfigError if no profile can be made."""
        settings = config.telemetry.profile
        first: int | None = getattr(settings, "from")
        self._pending, self._recording = first is not None, False
        self._first_version = (first or 0) - versions_per_batch(config)
        self._last_version = (first or 0) + settings.steps - 1
        self._steps = f"steps {first} to {self._last_version}"
        self._lane, self._device, self._note = lane, device, note
        self._file = None if folder is None else folder / "profile" / f"rank_{rank}.json"
        self._profile: profile | None = None
        if self._pending and not isinstance(lane, ThreadLane):
            raise ConfigError(
                "telemetry.profile.from is set, and a dry run has no device to profile; leave telemetry.profile.from out"
            )
        if self._pending and self._file is None and device.type != "cuda":
            raise ConfigError("telemetry.profile writes into the run directory: a Runtime with write=False has none")

    async def at(self, version: int) -> None:
        """Start the profile if `version`, just published, is the profile's first version; stop the profile at its last version."""
        if self._recording and version >= self._last_version:
            await self._stop(version)
        elif self._pending and not self._recording and self._first_version <= version < self._last_version:
            self._recording = True
            await self._lane.run(self._begin, name="profile/start", priority=2)

    async def close(self, version: int) -> None:
        """Stop and save a profile that is still recording at the end of the run, at `version`."""
        if self._recording:
            await self._stop(version)
        elif self._pending:
            self._note(
                f"telemetry.profile: nothing was profiled: the run ended at version {version} and had none of {self._steps}"
            )

    def _begin(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.profiler.start()
        else:
            # torch's profiler records the thread that calls `start`: the lane.
            self._profile = profile(activities=[ProfilerActivity.CPU])
            self._profile.start()

    def _end(self) -> None:
        if self._profile is not None:
            self._profile.stop()
        else:
            # The profiler must record the end of all kernels that were launched.
            torch.cuda.synchronize(self._device)
            torch.cuda.profiler.stop()

    async def _stop(self, version: int) -> None:
        self._pending = self._recording = False
        await self._lane.run(self._end, name="profile/stop", priority=2)
        if self._profile is None:
            self._note(f"telemetry.profile: the range of the CUDA profiler API is closed at version {version}")
            return
        recorded, file, self._profile = self._profile, self._file, None
        assert file is not None

        def write() -> None:
            file.parent.mkdir(exist_ok=True)
            recorded.export_chrome_trace(str(file))

        await offload(write, "profile")
        self._note(f"telemetry.profile: wrote {self._steps}, until version {version}, to {file}")
