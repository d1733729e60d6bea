"""The fraction of a GPU's peak FLOP/s that a step reaches, and the range of steps for `nsys profile -c cudaProfilerApi`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from asyncrl.concurrency.lane import Lane
from asyncrl.config.check_losses import needs_reference
from asyncrl.config.resolve import versions_per_batch
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.pumps.pipeline import StepReport

if TYPE_CHECKING:
    # `models.policy` imports transformers, which takes seconds, and which `train.kind: dry_run` does not need.
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
    (r"\bB200\b", 2250.0),
    (r"\bL40S\b", 362.0),
)


def stated_peak(name: str, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s in the data sheet of the GPU that torch calls `name`. None for an unknown GPU, or a dtype other than bfloat16."""
    tflops = next((tflops for pattern, tflops in _PEAK_TFLOPS if re.search(pattern, name)), None)
    return None if dtype != torch.bfloat16 or tflops is None else tflops * 1e12


def needed_flop(report: StepReport, policy: PolicyModel, config: Config) -> float:
    """Floating-point operations that the groups of a step needed.
    A token costs 2 per parameter of a matrix product in the forward pass and 4 in the backward pass. Sampling is one forward (2).
    Each update is a forward and a backward (6; 4 with adapters). A reference model is one more forward (2). A prompt counts once
    per group, without the head. Attention over the context, norms, softmax, the optimizer and the products of adapters are not
    counted, so the fraction of the peak is a little too low."""
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
    """Opens the range of the CUDA profiler API for the steps of `telemetry.profile`. Call `at` at every version, and `close` before
    the lane is closed. Steps are policy versions, as in `metrics.jsonl`. The range begins when the last version before `from` is
    published, and ends when the version of the last step is published. It includes all work between these two moments."""

    def __init__(self, config: Config, lane: Lane, device: torch.device, note: Callable[[str], None]) -> None:
        """Errors: ConfigError if there is no GPU to profile."""
        settings = config.telemetry.profile
        first: int | None = getattr(settings, "from")
        self._pending, self._recording = first is not None, False
        self._first_version = (first or 0) - versions_per_batch(config)
        self._last_version = (first or 0) + settings.steps - 1
        self._steps = f"steps {first} to {self._last_version}"
        self._lane, self._device, self._note = lane, device, note
        if self._pending and device.type != "cuda":
            raise ConfigError(
                "telemetry.profile.from is set, and this run computes on no GPU; leave telemetry.profile.from out: "
                "trace.json has the stages of a run"
            )

    async def at(self, version: int) -> None:
        """Call when `version` has been published. Opens the range at its first version, and closes it at its last version."""
        if self._recording and version >= self._last_version:
            await self._stop(version)
        elif self._pending and not self._recording and self._first_version <= version < self._last_version:
            self._recording = True
            await self._lane.run(torch.cuda.profiler.start, name="profile/start", priority=2)

    async def close(self, version: int) -> None:
        """At the end of the run, at `version`: close a range that is still open, or note that nothing was profiled."""
        if self._recording:
            await self._stop(version)
        elif self._pending:
            self._note(
                f"telemetry.profile: nothing was profiled: the run ended at version {version} and had none of {self._steps}"
            )

    def _end(self) -> None:
        # The GPU may still run kernels that were launched. Without the wait the profile would lack their ends.
        torch.cuda.synchronize(self._device)
        torch.cuda.profiler.stop()

    async def _stop(self, version: int) -> None:
        self._pending = self._recording = False
        await self._lane.run(self._end, name="profile/stop", priority=2)
        self._note(f"telemetry.profile: the range of the CUDA profiler API is closed at version {version}")
