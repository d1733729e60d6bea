"""Sums of a step over microbatches and then over ranks: counts, the loss, and metrics. All sums are float64.

The reduction needs the same table of metrics on every rank, also on a rank that trained no microbatch. So `empty_metrics` takes
the names of the metrics from an evaluation of the loss on zero tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace

import torch
from torch import Tensor

from asyncrl.algorithms.base import Loss, LossInputs, MetricSum, reduction_of
from asyncrl.distributed.collectives import Collectives
from asyncrl.types import Normaliser

AGES = 9  # number of age classes, in versions: 0 to 7, and 8 or more


def sum_over_ranks(world: Collectives, table: Tensor, device: torch.device) -> Tensor:
    """The sum of a float64 CPU tensor over ranks, on the CPU. `device`: the device of the process group."""
    tensor = table if world.world_size == 1 else table.to(device)
    world.all_reduce_sum_(tensor)
    return tensor.cpu()


def empty_metrics(loss: Loss, dtype: torch.dtype, device: torch.device) -> dict[str, Normaliser]:
    """Metric name -> normaliser for all metrics of `loss`, sorted by name."""
    empty = torch.zeros(0, dtype=dtype, device=device)
    keep = torch.zeros(0, dtype=torch.bool, device=device) if loss.top_entropy_quantile < 1 else None
    inputs = LossInputs(
        logp_S=empty,
        entropy_S=empty,
        sampler_logp_S=empty,
        advantage_S=empty,
        sequence_S=torch.zeros(0, dtype=torch.int64, device=device),
        sequences=0,
        reference_logp_S=empty if loss.needs_reference else None,
        keep_S=keep,
    )
    with torch.no_grad():
        metrics = loss(inputs).metrics
    return {name: metrics[name].normaliser for name in sorted(metrics)}


# The value of a metric on a rank without microbatches, by reduction. It does not change the result.
_IDENTITY = {"sum": 0.0, "min": float("inf"), "max": float("-inf")}


@dataclass(slots=True)
class Counts:
    """Counts and the loss of one step. `finish_train_step` sums them over ranks by one all-reduce."""

    sequences: float = 0.0
    tokens: float = 0.0
    microbatches: float = 0.0
    loss: float = 0.0
    kept: float = 0.0  # only in `survey`: tokens that `Microbatch.keep` selects
    # The part of `sequences` and `tokens` that is not run, because its gradient is zero.
    skipped_sequences: float = 0.0
    skipped_tokens: float = 0.0
    # Microbatches with token ids that the model lacks. If the count is above 0, the step fails.
    unknown_ids: float = 0.0

    def without_skipped(self) -> Counts:
        """The counts without the skipped parts. Metrics are divided by these counts, because skipped tokens add to no metric."""
        return replace(
            self, sequences=self.sequences - self.skipped_sequences, tokens=self.tokens - self.skipped_tokens
        )

    def denominators(self, max_length: int) -> dict[Normaliser, float]:
        """The denominator for each normaliser. `self` must be the counts of the whole step over all ranks."""
        sequences = max(self.sequences, 1.0)
        return {
            Normaliser.TOKENS: max(self.tokens, 1.0),
            Normaliser.SEQUENCES: sequences,
            Normaliser.SEQUENCES_X_MAX_LENGTH: sequences * max_length,
            Normaliser.MICROBATCHES: max(self.microbatches, 1.0),
            Normaliser.NONE: 1.0,
        }

    def over_ranks(self, world: Collectives, device: torch.device) -> Counts:
        """The sums over all ranks. Does not change `self`: if `finish_train_step` fails later, the step stays open."""
        return Counts(*sum_over_ranks(world, torch.tensor(astuple(self), dtype=torch.float64), device).tolist())


@dataclass(slots=True)
class Metrics:
    """This rank's metrics of the open step, by name. They stay on the device until finish: a read would wait for the device."""

    normalisers: dict[str, Normaliser]
    values: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    # [AGES, 2], by age of the token: number of tokens, sum of k3 (`add_mismatch`).
    ages: Tensor | None = None
    # [3], over sequences that only the current version has sampled: number of tokens, sum and maximum of |difference|.
    current: Tensor | None = None

    def add(self, metrics: Mapping[str, MetricSum]) -> None:
        """Adds the metrics of one microbatch. Errors: ValueError for a metric that `empty_metrics` did not find."""
        for name, metric in metrics.items():
            value = metric.value.detach().to(torch.float64)
            if name not in self.normalisers:
                text = f"the loss reports the metric {name!r} for this microbatch, but not for an empty one"
                raise ValueError(f"{text}; report the same metrics for every microbatch")
            if name not in self.values:
                self.values[name] = value
            elif reduction_of(name) == "sum":
                self.values[name] = self.values[name] + value
            else:
                combine = torch.minimum if reduction_of(name) == "min" else torch.maximum
                self.values[name] = combine(self.values[name], value)

    def add_loss(self, total: Tensor) -> None:
        """Adds `LossSums.total` (0-d) of one microbatch."""
        value = total.detach().to(torch.float64)
        self.loss = value if self.loss is None else self.loss + value

    def loss_sum(self) -> float:
        """The sum over the microbatches that ran. Waits for the device."""
        return 0.0 if self.loss is None else float(self.loss)

    def add_mismatch(
        self, trainer_S: Tensor, sampler_S: Tensor, age_S: Tensor, sequence_S: Tensor, sequences: int
    ) -> None:
        """Adds the differences between trainer and sampler log-probs, and the estimator k3 = r - 1 - log r of their KL divergence
        (r: ratio of the probabilities). Tokens with a NaN sampler log-prob are left out. `age_S`: int64, in versions."""
        known = ~sampler_S.isnan()
        difference = torch.where(known, trainer_S - sampler_S, 0.0).to(torch.float64)
        k3 = torch.expm1(difference) - difference
        columns = torch.stack([known.to(torch.float64), k3], dim=1)
        table = columns.new_zeros(AGES, 2).index_add_(0, age_S.clamp(0, AGES - 1), columns)
        self.ages = table if self.ages is None else self.ages + table
        old_tokens = torch.zeros(sequences, dtype=torch.float64, device=age_S.device)
        old_tokens.index_add_(0, sequence_S, (age_S != 0).to(torch.float64))
        is_current = (old_tokens == 0).index_select(0, sequence_S) & known
        distance = difference.abs() * is_current
        largest = distance.max() if distance.numel() else distance.new_zeros(())
        current = torch.stack([is_current.sum().double(), distance.sum(), largest])
        if self.current is not None:
            current[:2] += self.current[:2]
            current[2] = torch.maximum(current[2], self.current[2])
        self.current = current

    def table(self) -> Tensor:
        """All values of this rank, float64 [columns] on the CPU: metrics by name, then `ages`, then `current`."""
        names, zero = sorted(self.normalisers), torch.zeros((), dtype=torch.float64)
        parts = [self.values.get(name, zero + _IDENTITY[reduction_of(name)]) for name in names]
        parts.append(zero.new_zeros(AGES * 2) if self.ages is None else self.ages)
        parts.append(zero.new_zeros(3) if self.current is None else self.current)
        # Joined on the device first, because each copy to the host waits for the device.
        device = next((part.device for part in parts if part.device.type != "cpu"), torch.device("cpu"))
        return torch.cat([part.detach().flatten().to(device, torch.float64) for part in parts]).cpu()

    def reduce(
        self, world: Collectives, device: torch.device, denominators: Mapping[Normaliser, float], checksums: Tensor
    ) -> tuple[dict[str, float], Tensor]:
        """(the metrics over all ranks, the checksums of all ranks [ranks, n]). `checksums`: of this rank, float64 [n] on the CPU.
        A collective: one all-reduce of a table [ranks, columns]. Each rank fills only its row, so a sum keeps minima and maxima."""
        row = torch.cat([self.table(), checksums])
        rows = torch.zeros(world.world_size, row.numel(), dtype=torch.float64)
        rows[world.rank] = row
        widths = [len(row) - len(checksums), len(checksums)]
        rows, all_checksums = sum_over_ranks(world, rows, device).split(widths, dim=1)
        result: dict[str, float] = {}
        names = sorted(self.normalisers)
        for column, name in enumerate(names):
            values = rows[:, column]
            if reduction_of(name) == "sum":
                result[name] = float(values.sum()) / denominators[self.normalisers[name]]
            else:
                extreme = float(values.min() if reduction_of(name) == "min" else values.max())
                # A metric that has no value on any rank is left out.
                if extreme != _IDENTITY[reduction_of(name)]:
                    result[name] = extreme
        mismatch = rows[:, len(names) :]
        ages = mismatch[:, : AGES * 2].sum(0).view(AGES, 2)
        for age in range(AGES):
            if ages[age, 0] > 0:
                result[f"mismatch_kl/by_age/{age}"] = float(ages[age, 1] / ages[age, 0])
        tokens, total = float(mismatch[:, -3].sum()), float(mismatch[:, -2].sum())
        if tokens > 0:
            result["mismatch/current_mean"] = total / tokens
            result["mismatch/current_max"] = float(mismatch[:, -1].max())
            result["mismatch/current_tokens"] = tokens
        return result, all_checksums
