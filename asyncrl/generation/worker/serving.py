"""`Serving`: the interface of an engine in a worker process. `EmbeddedServing`: the embedded engine with that interface."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from asyncrl.generation.embedded.engine import EmbeddedEngine
from asyncrl.models.outputs import BOUNDS, bound_of, fixed_logprobs
from asyncrl.models.routing import has_experts
from asyncrl.types import Generation, GenerationRequest
from asyncrl.weights.sync import BoardEngine


class Serving(BoardEngine, Protocol):
    """An engine that a worker serves requests with."""

    @property
    def version(self) -> int:
        """Version of the weights that sample the next token."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine, or None."""
        ...

    async def generate(self, request: GenerationRequest) -> Generation: ...

    def end_session(self, session: str) -> None: ...

    def statistics(self) -> dict[str, float]: ...


class EmbeddedServing(EmbeddedEngine):
    """`EmbeddedEngine` of a policy that reads the board (models/reading.py)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.output_bound = bound_of(BOUNDS, self.policy.dtype, has_experts(self.policy.module))

    @property
    def version(self) -> int:
        return self.policy.version

    def move_to(self, half: Tensor, version: int) -> None:
        """Let the modules read the half in place. On a CPU the first step after the move packs the weights."""
        self.policy.flat.move_to(half)
        self.policy.version = version

    async def outputs(self) -> list[float]:
        return await self.lane.run(lambda: fixed_logprobs(self.policy), name="engine/outputs")
