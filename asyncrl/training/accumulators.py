"""What a step adds up besides gradients: counts, the loss, and metric sums, over microbatches and then over ranks.

All sums are float64. Metric names of a rank must be known without a microbatch: a rank may finish a step in which it
trained nothing, and the reduction over ranks needs the same table everywhere. They come from evaluating the loss once on
no tokens at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from asyncrl.algorithms.base import Loss, LossInputs, MetricSum, kind
from asyncrl.types import Normaliser

from .reducer import Reducer, sum_over_ranks

AGES = 9  # `mismatch_kl/by_age/0..7`, and 8 for everything older


def on_host(parts: Sequence[Tensor]) -> Tensor:
    """Flat and one after the other, float64: what lies on one device is copied at once, since the host waits for each copy."""
    flat = [part.detach().flatten().to(torch.float64) for part in parts]
    found: dict[torch.device, Iterator[Tensor]] = {}
    for device in {part.device for part in flat}:
        mine = [part for part in flat if part.device == device]
        found[device] = iter(torch.cat(mine).cpu().split([part.numel() for part in mine]))
    return torch.cat([next(found[part.device]) for part in flat])


def empty_metrics(loss: Loss, dtype: torch.dtype, device: torch.device) -> dict[str, Normaliser]:
    """Every metric of `loss` with its normaliser, in the order of their names."""
    none = torch.zeros(0, dtype=dtype, device=device)
    keep = torch.zeros(0, dtype=torch.bool, device=device) if loss.top_entropy_quantile < 1 else None
    inputs = LossInputs(
        logp_S=none,
        entropy_S=none,
        sampler_logp_S=none,
        advantage_S=none,
        sequence_S=torch.zeros(0, dtype=torch.int64, device=device),
        sequences=0,
        reference_logp_S=none if loss.needs_reference else None,
        keep_S=keep,
    )
    with torch.no_grad():
        found = loss(inputs).metrics
    return {name: found[name].normaliser for name in sorted(found)}


_IDENTITY = {"sum": 0.0, "min": float("inf"), "max": float("-inf")}


@dataclass(slots=True)
class Counts:
    """The first thing reduced at finish: one all-reduce of these, in float64."""

    sequences: float = 0.0
    tokens: float = 0.0
    microbatches: float = 0.0
    loss: float = 0.0
    extra: float = 0.0  # the term with a normaliser of its own
    skipped_sequences: float = 0.0  # of `sequences`: not run, as they cannot move a weight
    skipped_tokens: float = 0.0
    # Microbatches with token ids that the model lacks: such a step is not applied.
    outside: float = 0.0

    def measured(self) -> Counts:
        """The counts of what was run: means of metrics are over those."""
        return replace(
            self, sequences=self.sequences - self.skipped_sequences, tokens=self.tokens - self.skipped_tokens
        )

    def denominators(self, max_length: int) -> dict[Normaliser, float]:
        """What each kind of sum is divided by, where these are the counts of the whole step over all ranks."""
        sequences = max(self.sequences, 1.0)
        return {
            Normaliser.TOKENS: max(self.tokens, 1.0),
            Normaliser.SEQUENCES: sequences,
            Normaliser.SEQUENCES_X_MAX_LENGTH: sequences * max_length,
            Normaliser.MICROBATCHES: max(self.microbatches, 1.0),
            Normaliser.NONE: 1.0,
        }

    def over_ranks(self, reducer: Reducer, device: torch.device) -> Counts:
        """The sums over all ranks. This rank's own stay as they are: a finish that failed leaves the step open."""
        row = [self.sequences, self.tokens, self.microbatches, self.loss, self.extra]
        row += [self.skipped_sequences, self.skipped_tokens, self.outside]
        table = torch.tensor(row, dtype=torch.float64)
        return Counts(*sum_over_ranks(reducer, table, device).tolist())


@dataclass(slots=True)
class Metrics:
    """Named sums of the open step. Values stay on the device until finish: reading one would wait for the device."""

    normalisers: dict[str, Normaliser]
    values: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    extra: Tensor | None = None
    # [AGES, 3]: tokens, k3 sum, |difference| sum by age of the token.
    ages: Tensor | None = None
    # [3]: tokens, |difference| sum, largest, of sequences wholly of the current version.
    current: Tensor | None = None

    def add(self, metrics: Mapping[str, MetricSum]) -> None:
        """The metrics of one microbatch. Errors: ValueError for one that the loss does not report of an empty microbatch."""
        for name, metric in metrics.items():
            value = metric.value.detach().to(torch.float64)
            if name not in self.normalisers:
                raise ValueError(f"the loss reports {name!r} for this microbatch, but not for an empty one")
            if name not in self.values:
                self.values[name] = value
            elif kind(name) == "sum":
                self.values[name] = self.values[name] + value
            else:
                combine = torch.minimum if kind(name) == "min" else torch.maximum
                self.values[name] = combine(self.values[name], value)

    def add_loss(self, total: Tensor, extra: Tensor | None) -> None:
        """The loss of one microbatch: `LossSums.total` and `LossSums.extra`, 0-d."""
        value = total.detach().to(torch.float64)
        self.loss = value if self.loss is None else self.loss + value
        if extra is not None:
            value = extra.detach().to(torch.float64)
            self.extra = value if self.extra is None else self.extra + value

    def loss_sums(self) -> tuple[float, float]:
        """Both, so far, on the host: this waits for the device."""
        nothing = torch.zeros(())
        total, extra = on_host([nothing if each is None else each for each in (self.loss, self.extra)]).tolist()
        return total, extra

    def add_mismatch(
        self, trainer_S: Tensor, sampler_S: Tensor, age_S: Tensor, sequence_S: Tensor, sequences: int
    ) -> None:
        """All [S]; `age_S` int64, current version minus the token's. NaN sampler log-probs are left out."""
        known = ~sampler_S.isnan()
        difference = torch.where(known, trainer_S - sampler_S, 0.0).to(torch.float64)
        k3 = torch.expm1(difference) - difference
        columns = torch.stack([known.to(torch.float64), k3, difference.abs()], dim=1)
        table = columns.new_zeros(AGES, 3).index_add_(0, age_S.clamp(0, AGES - 1), columns)
        self.ages = table if self.ages is None else self.ages + table
        foreign = torch.zeros(sequences, dtype=torch.float64, device=age_S.device)
        foreign.index_add_(0, sequence_S, (age_S != 0).to(torch.float64))
        pure = (foreign == 0).index_select(0, sequence_S) & known
        distance = difference.abs() * pure
        current = torch.stack(
            [pure.sum().double(), distance.sum(), distance.max() if distance.numel() else distance.sum()]
        )
        if self.current is not None:
            current[:2] += self.current[:2]
            current[2] = torch.maximum(current[2], self.current[2])
        self.current = current

    def table(self) -> Tensor:
        """This rank's row: every number that is reduced over ranks, float64 on the host."""
        names, missing = sorted(self.normalisers), torch.zeros((), dtype=torch.float64)
        parts = [self.values.get(name, missing + _IDENTITY[kind(name)]) for name in names]
        parts.append(missing.new_zeros(AGES * 3) if self.ages is None else self.ages)
        parts.append(missing.new_zeros(3) if self.current is None else self.current)
        return on_host(parts)

    def reduce(
        self, reducer: Reducer, device: torch.device, denominators: Mapping[Normaliser, float]
    ) -> dict[str, float]:
        """Combine over ranks and divide. One all-reduce of [ranks, columns]: minimum and maximum cannot be summed."""
        row = self.table()
        rows = torch.zeros(reducer.world_size, row.numel(), dtype=torch.float64)
        rows[reducer.rank] = row
        rows = sum_over_ranks(reducer, rows, device)
        result: dict[str, float] = {}
        names = sorted(self.normalisers)
        for column, name in enumerate(names):
            values = rows[:, column]
            if kind(name) == "sum":
                result[name] = float(values.sum()) / denominators[self.normalisers[name]]
            else:
                best = float(values.min() if kind(name) == "min" else values.max())
                if best not in (_IDENTITY["min"], _IDENTITY["max"]):
                    result[name] = best
        rest = rows[:, len(names) :]
        ages = rest[:, : AGES * 3].sum(0).view(AGES, 3)
        for age in range(AGES):
            if ages[age, 0] > 0:
                result[f"mismatch_kl/by_age/{age}"] = float(ages[age, 1] / ages[age, 0])
        tokens, total = float(rest[:, -3].sum()), float(rest[:, -2].sum())
        if tokens > 0:
            result["mismatch/current_mean"] = total / tokens
            result["mismatch/current_max"] = float(rest[:, -1].max())
            result["mismatch/current_tokens"] = tokens
        return result
