"""What a worker asks of the engine that it serves with, and the embedded one as such."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from asyncrl.generation.embedded.engine import EmbeddedEngine
from asyncrl.models.outputs import BOUNDS, fixed_logprobs
from asyncrl.models.served import read_from_board
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Generation, GenerationRequest


class Serving(Protocol):
    """An engine whose weights lie on a weight board. `bound`: nats that its outputs may be off the trainer's, on average."""

    recorder: Recorder
    bound: float

    @property
    def version(self) -> int:
        """Of the weights that the next token is sampled with."""
        ...

    @property
    def failed(self) -> bool:
        """Whether an error ended it."""
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """As `ports.Engine.generate`."""
        ...

    def statistics(self) -> dict[str, float]:
        """As `ports.Engine.statistics`."""
        ...

    def move_to(self, half: Tensor, version: int) -> None:
        """Every later token comes from the weights in `half`, which are `version`, and nobody reads the other half. On the lane,
        between two closures."""
        ...

    async def outputs(self) -> list[float]:
        """Log-probs of the fixed row (models/outputs.py), computed with the weights that it samples from."""
        ...


class EmbeddedServing(EmbeddedEngine):
    """`EmbeddedEngine` of a policy that was loaded to be served (models/loading.py, `load_reader`)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.bound = BOUNDS[self.policy.dtype]

    @property
    def version(self) -> int:
        """See Serving."""
        return self.policy.version

    def move_to(self, half: Tensor, version: int) -> None:
        """See Serving: the modules read the half where it lies."""
        read_from_board(self.policy, half, version)

    async def outputs(self) -> list[float]:
        """See Serving."""
        return await self.lane.run(lambda: fixed_logprobs(self.policy), name="engine/outputs")
