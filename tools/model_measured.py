"""What became of one row of the sweep: numbers, and a status in one word."""

from __future__ import annotations

from dataclasses import dataclass, field

NATS, RELATIVE = 1e-4, 1e-4  # most that log-probs and gradients may differ


@dataclass(slots=True)
class Measured:
    """What became of one row. status: right, WRONG, refused, inner error, not buildable."""

    name: str
    kind: str = ""  # class of the model
    path: str = ""
    status: str = "right"
    logprobs: float | None = None  # nats, largest difference
    gradients: float | None = None  # relative, largest of a tensor
    parameter: str = ""  # where
    sampler: float | None = None  # nats
    updated: float | None = None  # nats, with new weights on the way
    checkpointing: str = ""
    remark: str = ""
    notes: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """`WRONG` where a number is too large, or none."""
        apart = []
        for label, value in (
            ("log-probs", self.logprobs), ("sampler", self.sampler), ("sampler after update", self.updated)
        ):  # fmt: skip
            if value is None or not value <= NATS:
                apart.append(f"{label} {value:.2g} nats")
        if self.gradients is None or not self.gradients <= RELATIVE:
            apart.append(f"gradients {self.gradients:.2g} ({self.parameter})")
        if self.checkpointing.startswith("WRONG"):
            apart.append(f"checkpointing {self.checkpointing.removeprefix('WRONG ')}")
        if apart:
            self.status, self.remark = "WRONG", ", ".join(apart)
