"""Weights that sampler and trainer share on one device: nothing moves, but the claim "the engine has version v" is proved.

The proof: a fixed sample of positions of the buffer that the engine's modules read must equal the trainer's masters, cast
to the matmul dtype; with adapters, merging them again must give what the modules read. A stale working copy (the silent
mismatch that other systems meet) is a `DivergenceError`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.concurrency.lane import Lane
from asyncrl.errors import DivergenceError
from asyncrl.models.policy import PolicyModel
from asyncrl.ports import WeightSink

SAMPLED_POSITIONS = 65_536


class SharedWeights:
    """A `WeightSink` around the engine's own: proof on the lane first, then the engine's acknowledgement."""

    def __init__(self, policy: PolicyModel, engine: WeightSink, lane: Lane) -> None:
        self._policy = policy
        self._engine = engine
        self._lane = lane
        size = policy.flat.master.numel()
        generator = torch.Generator().manual_seed(0)
        count = min(SAMPLED_POSITIONS, size)
        self._positions = torch.randint(size, (count,), generator=generator).to(policy.device)

    async def update_weights(self, version: int) -> None:
        """Errors: DivergenceError where the modules hold other weights than `version`'s."""
        await self._lane.run(lambda: self._prove(version), name="publish/prove", priority=1)
        await self._engine.update_weights(version)

    def _prove(self, version: int) -> None:
        flat = self._policy.flat
        if self._policy.version < version:
            raise DivergenceError(f"publish: the policy is at version {self._policy.version}, not yet at {version}")
        sent = flat.master[self._positions].to(flat.working.dtype)
        served = flat.working[self._positions]
        require_finite(served, version)
        wrong = int((sent != served).sum())
        if wrong:
            raise DivergenceError(
                f"publish of version {version}: {wrong} of {len(sent)} sampled weights of the engine differ from the trainer's"
            )
        weights = self._policy.weights
        start = weights.working.untyped_storage().data_ptr()
        if weights.parameters[0].untyped_storage().data_ptr() != start:
            raise DivergenceError(
                "publish: the modules no longer read the flat buffer; somebody replaced their parameters"
            )
        if self._policy.lora is not None and not self._policy.lora.merged_agrees(version):
            raise DivergenceError(
                f"publish of version {version}: merged weights of the engine are not the base with the trainer's adapters"
            )
        if not self._policy.packed_agrees():
            raise DivergenceError(
                f"publish of version {version}: a packed copy of the weights is older than the weights"
            )


def require_finite(weights: Tensor, version: int) -> None:
    """Errors: DivergenceError. Before anything is compared: NaN differs from itself."""
    if not bool(torch.isfinite(weights).all()):
        raise DivergenceError(
            f"version {version} has weights that are NaN or infinite: the step to it was too large; lower train.lr (or raise "
            "train.warmup_steps)"
        )
