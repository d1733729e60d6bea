"""What a worker asks of its engine beside generating (`Serving`), and the embedded engine that answers it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from asyncrl.generation.embedded.engine import EmbeddedEngine
from asyncrl.models.outputs import BOUNDS, Bound, bound_of, fixed_logprobs
from asyncrl.models.routing import has_experts
from asyncrl.models.served import read_from_board
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Generation, GenerationRequest


class Serving(Protocol):
    """An engine whose weights lie on a weight board. `bound`: of how far its outputs may be off the trainer's.
    `longest_slice_s`: seconds that a slice of a preparation may take between two steps, where more of them would be needed."""

    recorder: Recorder
    bound: Bound
    longest_slice_s: float

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

    def prepare(self, half: Tensor, version: int) -> tuple[int, Iterator[None]]:
        """What can be done before a move to `half`, which is `version`, while every token still comes from the weights of before:
        about so many pieces, each on the lane, between two closures. It may be left at any place: then the move does all of it, or
        another preparation begins anew."""
        ...

    def move_to(self, half: Tensor, version: int) -> None:
        """Every later token comes from the weights in `half`, which are `version`, and nobody reads the other half. On the lane,
        between two closures."""
        ...

    async def outputs(self) -> list[float]:
        """Log-probs of the fixed row (models/outputs.py), computed with the weights that it samples from."""
        ...


class EmbeddedServing(EmbeddedEngine):
    """`EmbeddedEngine` of a policy that reads the board (models/reading.py).

    packs_ahead: the packed weights of the next version are made beside those that are in use, which takes their memory twice; else
    the first products after a move make them.
    """

    def __init__(self, *args: Any, packs_ahead: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self.bound = bound_of(BOUNDS, self.policy.dtype, has_experts(self.policy.module))
        self.longest_slice_s = math.inf  # the answer comes after twelve
        self._packs_ahead = packs_ahead
        self._moved = False

    @property
    def version(self) -> int:
        """See Serving."""
        return self.policy.version

    def prepare(self, half: Tensor, version: int) -> tuple[int, Iterator[None]]:
        """See Serving."""
        if not self._packs_ahead:
            return 0, iter(())
        return self.policy.pieces_ahead, self.policy.pack_ahead(half, version)

    def move_to(self, half: Tensor, version: int) -> None:
        """See Serving: the modules read the half where it lies."""
        read_from_board(self.policy, half, version)
        if self._packs_ahead and not self._moved:  # nobody is served yet: the place of the next copies is made now
            self.policy.make_room_ahead()
        self._moved = True

    async def outputs(self) -> list[float]:
        """See Serving."""
        return await self.lane.run(lambda: fixed_logprobs(self.policy), name="engine/outputs")
