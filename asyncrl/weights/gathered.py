"""Weights of a sharded trainer: the optimizer's closure gathered them into the engine's modules, and here it is proved.

The proof: this rank's rows of the masters, cast to the matmul dtype, must equal what the engine's modules hold there, at a
fixed sample of positions. That all ranks hold the same was compared when they were gathered (training/sharded.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from asyncrl.concurrency.lane import Lane
from asyncrl.errors import DivergenceError
from asyncrl.models.parameters.flat import ServedParameters
from asyncrl.models.policy import PolicyModel
from asyncrl.ports import WeightSink

from .shared import require_finite

SAMPLED_POSITIONS = 4096  # of each parameter


class Shards(Protocol):
    """The part of `distributed.fsdp.ShardedParameters` that the proof reads."""

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's rows of the master) for every parameter."""
        ...

    def local(self, full: Tensor) -> Tensor:
        """The rows of a whole parameter that are this rank's."""
        ...


class GatheredWeights:
    """A `WeightSink` around the engine's own: proof on the lane first, then the engine's acknowledgement. No collective."""

    def __init__(self, policy: PolicyModel, shards: Shards, engine: WeightSink, lane: Lane) -> None:
        assert isinstance(policy.flat, ServedParameters)
        self._policy, self._served = policy, policy.flat
        self._shards = shards
        self._engine = engine
        self._lane = lane

    async def update_weights(self, version: int) -> None:
        """Errors: DivergenceError where the modules hold other weights than `version`'s."""
        await self._lane.run(lambda: self._prove(version), name="publish/prove", priority=1)
        await self._engine.update_weights(version)

    @torch.no_grad()
    def _prove(self, version: int) -> None:
        if self._policy.version < version:
            raise DivergenceError(f"publish: the policy is at version {self._policy.version}, not yet at {version}")
        for name, master in self._shards.named_masters():
            sent, served = master.view(-1), self._shards.local(self._served.named(name)).reshape(-1)
            stride = max(sent.numel() // SAMPLED_POSITIONS, 1)
            require_finite(served[::stride], version)
            wrong = int((sent[::stride].to(served.dtype) != served[::stride]).sum())
            if wrong:
                raise DivergenceError(
                    f"publish of version {version}: {wrong} sampled weights of {name} in the engine differ from the trainer's"
                )
        weights = self._policy.weights
        if weights.parameters[0].untyped_storage().data_ptr() != weights.working.untyped_storage().data_ptr():
            raise DivergenceError(
                "publish: the modules no longer read the flat buffer; somebody replaced their parameters"
            )
        if not self._policy.packed_agrees():
            raise DivergenceError(
                f"publish of version {version}: a packed copy of the weights is older than the weights"
            )
