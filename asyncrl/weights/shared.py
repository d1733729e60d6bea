"""Weights that sampler and trainer share on one device: nothing moves, but the claim "the engine has version v" is proved."""

from __future__ import annotations

from asyncrl.concurrency.lane import Lane
from asyncrl.models.policy import PolicyModel
from asyncrl.ports import WeightSink

from .proof import Proof, Shards


class SharedWeights:
    """A `WeightSink` around the engine's own: proof on the lane first, then the engine's acknowledgement. No collective."""

    def __init__(self, policy: PolicyModel, engine: WeightSink, lane: Lane, shards: Shards | None = None) -> None:
        """`shards`: of a trainer whose masters are cut over the ranks; its optimizer step has gathered them into `policy`."""
        self._proof = Proof(policy, shards)
        self._engine = engine
        self._lane = lane

    async def update_weights(self, version: int) -> None:
        """Errors: DivergenceError where the modules hold other weights than `version`'s."""
        await self._lane.run(lambda: self._proof.prove(version), name="publish/prove", priority=1)
        await self._engine.update_weights(version)
