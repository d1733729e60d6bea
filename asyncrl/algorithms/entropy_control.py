"""The controller of the entropy bonus: a coefficient that moves from step to step. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

COEFFICIENT_MAX = 1.0


@dataclass(frozen=True, slots=True)
class EntropyControl:
    """A coefficient that holds the mean entropy at `target` (nats): adaptive entropy control.

    He et al., "Skywork Open Reasoner 1" (arXiv:2505.22312), section 4.3; the numbers are TRL's. After each optimizer step the
    coefficient grows by `delta` where the mean entropy of the step was at most `target`, else it shrinks by `delta`, within
    [0, 1]; it begins at `coef`. The bonus acts in a step only if the entropy of the step before was at most
    `target`, so never in the first. The mean is over all scored tokens of the step on all ranks (in TRL over those that
    the top-entropy mask keeps). The state is part of the trainer's checkpoint.
    """

    coefficient: float  # after the last update
    target: float
    delta: float
    entropy: float = math.inf  # of the last step

    @property
    def applied(self) -> float:
        """What the bonus of the next step is multiplied by."""
        return self.coefficient if self.entropy <= self.target else 0.0

    def after(self, entropy: float) -> EntropyControl:
        """The state after a step with this mean entropy."""
        moved = self.coefficient + (self.delta if entropy <= self.target else -self.delta)
        return EntropyControl(min(max(moved, 0.0), COEFFICIENT_MAX), self.target, self.delta, entropy)
