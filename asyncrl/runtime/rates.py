"""How fast the device of a run could be: the yardsticks of `perf/limit_share` and `perf/mfu`, and the FLOP a step needed."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from asyncrl.config.check_losses import needs_reference
from asyncrl.config.schema import Config
from asyncrl.pumps.pipeline import StepReport

if TYPE_CHECKING:
    from asyncrl.models.policy import PolicyModel  # transformers takes seconds, and a dry run needs none

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
class Rates:
    """FLOP/s of one device in the matmul dtype."""

    gemm: float  # reached by the product of two large square matrices when the run started
    peak: float  # stated by the maker; where that is not known (every CPU), the same as `gemm`

    def metrics(self, flop: float, seconds: float) -> dict[str, float]:
        """Shares of both that `flop` in `seconds` are. NaN where the step took no time."""
        rate = flop / seconds if seconds > 0 else math.nan
        return {"perf/limit_share": rate / self.gemm, "perf/mfu": rate / self.peak}


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """On the lane. A 1024^3 product on a CPU, some 70 ms on two cores; 8192^3 elsewhere. The best of six, or of as many as half a
    second has room for: where bfloat16 has no instructions one takes two seconds."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device).to(dtype)
    best = float("inf")
    until = time.perf_counter() + 0.5
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
    return Rates(gemm, stated_peak(name, dtype) or gemm)


def stated_peak(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of a card by its name as torch gives it, or None. Only for bfloat16: nothing else runs at a stated rate here."""
    if dtype != torch.bfloat16:
        return None
    for pattern, tflops in _PEAK_TFLOPS:
        if re.search(pattern, name):
            return None if tflops is None else tflops * 1e12
    return None


def needed_flop(report: StepReport, policy: PolicyModel | None, config: Config) -> float:
    """FLOP that the groups of a step needed; NaN for a dry run.

    2 per parameter of a matrix product and token forward, 4 backward. Tokens of completions are sampled once (2) and
    trained once per update (6; 4 with adapters, whose own few products are left out); a prompt is prefilled and trained
    once per group, and needs no head; a reference model costs one forward more (2). Attention over the context, norms,
    softmax and the optimizer are left out, so the shares that stand on this number are a little too low.
    """
    if policy is None:
        return math.nan
    head = policy.head.weight.numel()
    trajectories = [trajectory for group in report.groups for trajectory in group.trajectories]
    prompts = sum(group.prompt.ids.size for group in report.groups)
    completions = sum(trajectory.tokens.size - trajectory.prompt_length for trajectory in trajectories)
    scored = sum(int(trajectory.mask.sum()) for trajectory in trajectories)
    trained = 4.0 if config.model.lora.rank else 6.0
    passes = 2.0 + trained * config.algorithm.updates_per_batch + (2.0 if needs_reference(config.algorithm) else 0.0)
    return passes * ((policy.matmul_parameters - head) * (prompts + completions) + head * scored)
