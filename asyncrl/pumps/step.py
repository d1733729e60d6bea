"""One optimizer step in the making: what the three parts of the train pump tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.algorithms.base import Loss
from asyncrl.data.store import ADVANTAGES, Rows
from asyncrl.types import Group, Microbatch, StepResult


@dataclass(slots=True)
class Step:
    """`rows` are claimed; `begun` says whether the trainer has an open step."""

    version: int  # at which the first microbatch is trained
    started: float  # on the loop's clock
    rows: list[Rows] = field(default_factory=list)
    replayed: dict[int, Group] = field(default_factory=dict)  # by the id of the group whose place it takes
    # Kept only where a batch takes several optimizer steps: one list for each of its `minibatches`.
    parts: list[list[Microbatch]] = field(default_factory=lambda: [[]])
    results: list[StepResult] = field(default_factory=list)  # of its optimizer steps, as they are applied
    loss: Loss | None = None  # bound to this step, where the loss has to know the whole of it
    kl: list[float] = field(default_factory=list)  # sum of the KL per microbatch, where it is taken off the rewards
    rounds: int = 0  # that this rank joined while the step filled (rounds.py)
    begun: bool = False
    applied: bool = False  # the weights have moved by it: from then on it can only be committed
    committed: bool = False
    # Another rank left during the optimizer step: it may have applied it there. Its groups are given back to nobody: if that rank
    # has applied it, they are trained.
    in_doubt: bool = False

    @property
    def group_ids(self) -> list[int]:
        """Of the claimed groups."""
        return [rows.group_id for rows in self.rows]

    def untrained(self) -> list[Rows]:
        """Claimed, and not yet given to the trainer: they have no advantages."""
        return [rows for rows in self.rows if ADVANTAGES not in rows.columns]
