"""The proof that modules, or a copy of their weights, hold version v: exact comparisons on the lane, at every version.

    do the modules read the flat buffer?    every parameter, by identity and address: a replaced or rebound one is found
    does that hold what the masters say?    positions of every parameter against the masters, cast to the matmul dtype. In float32
                                            the masters are that buffer, and the first proof is all there is to show; of a cut model
                                            it is this rank's rows; with adapters, the products are merged again
    are packed copies made of it?           what lay in the buffer when each was made, sampled; one of them by its output

Whatever is stale is a `DivergenceError`: a run that sampled from other weights than it trains would learn nonsense, silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from asyncrl.errors import DivergenceError
from asyncrl.models.parameters.flat import FlatWeights, ServedParameters
from asyncrl.models.policy import PolicyModel

SAMPLED_POSITIONS = 65_536
RUN = 16  # positions side by side, a cache line of float32: a look costs what its cache misses cost
LEAST_RUNS = 4  # of each parameter: a norm is one of a million
LARGEST = 1e18  # of a weight that any norm or optimizer can square
SAMPLED_ROWS = 4096  # positions of each parameter that is cut over the ranks


class Shards(Protocol):
    """The part of `distributed.fsdp.ShardedParameters` that the proof reads."""

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's rows of the master) for every parameter."""
        ...

    def local(self, full: Tensor) -> Tensor:
        """The rows of a whole parameter that are this rank's."""
        ...


class Proof:
    """See the module. Only the lane may call it; made it may be anywhere. Errors everywhere: DivergenceError."""

    def __init__(self, policy: PolicyModel, shards: Shards | None = None) -> None:
        """`shards`: where the masters lie, of a model that is cut over the ranks."""
        self._policy = policy
        self._shards = shards
        self._parameters = _identities(policy.module)

    # Drawn when they are first asked for, which is on the lane. An operation that torch shares among threads, run once on the
    # event loop's thread, leaves a pool of threads there. With more threads than cores libgomp's no longer spin, and the lane's
    # sleep between two operations: on two cores a decode step takes a fifth longer.

    @cached_property
    def _positions(self) -> Tensor:
        return _sample(self._policy.flat)

    @cached_property
    def _served_positions(self) -> Tensor:
        return self._positions if self._policy.lora is None else _sample(self._policy.weights)

    @torch.no_grad()
    def prove(self, version: int) -> None:
        """The modules compute with `version`, or a later one that the policy names."""
        self.modules(version)
        self.compare(self._policy.weights.working, version)
        self.packed(version)

    def modules(self, version: int) -> None:
        """They read the flat buffer, and the policy says that this is `version`, or a later one."""
        policy = self._policy
        if policy.version < version:
            raise DivergenceError(f"publish: the policy is at version {policy.version}, not yet at {version}")
        found = _identities(policy.module)
        strays = [name for name, identity in self._parameters.items() if found.get(name) != identity]
        strays += [name for name in found if name not in self._parameters]
        strays += policy.weights.strays()
        if policy.flat is not policy.weights:
            strays += policy.flat.strays()
        if strays:
            raise DivergenceError(
                f"publish of version {version}: {strays[0]} ({len(strays)} in all) no longer reads the flat buffer; somebody "
                "replaced or rebound the modules' parameters"
            )

    @torch.no_grad()
    def packed(self, version: int) -> None:
        """Packed copies of the weights are copies of these. Once they have been compared: of what is no number they never are."""
        if not self._policy.packed_agrees(version):
            raise DivergenceError(
                f"publish of version {version}: its packed copies are not those of the weights; something has changed these, or "
                "those, by a way of its own"
            )

    @torch.no_grad()
    def compare(self, served: Tensor, version: int) -> None:
        """`served`, laid out as the modules' buffer, holds what the masters say."""
        policy, flat = self._policy, self._policy.flat
        if self._shards is not None:
            self._compare_rows(self._shards, served, version)
            return
        found = served.index_select(0, self._served_positions)
        require_finite(found, version)
        if policy.lora is None:
            _require_equal(flat.master, self._positions, found, version)
            return
        _require_equal(flat.master, self._positions, flat.working.index_select(0, self._positions), version)
        _require_equal(policy.weights.working, self._served_positions, found, version)
        if not policy.lora.merged_agrees(version, served):
            raise DivergenceError(
                f"publish of version {version}: merged weights of the engine are not the base with the trainer's adapters"
            )

    def _compare_rows(self, shards: Shards, served: Tensor, version: int) -> None:
        """That all ranks hold the same was compared when the rows were gathered (training/sharded.py)."""
        whole = self._policy.flat
        assert isinstance(whole, ServedParameters)
        for name, master in shards.named_masters():
            sent, got = master.view(-1), shards.local(whole.named(name, served)).reshape(-1)
            stride = max(sent.numel() // SAMPLED_ROWS, 1)
            require_finite(got[::stride], version)
            wrong = int((sent[::stride].to(got.dtype) != got[::stride]).sum())
            if wrong:
                raise DivergenceError(
                    f"publish of version {version}: {wrong} sampled weights of {name} in the engine differ from the trainer's"
                )


def _identities(module: nn.Module) -> dict[str, int]:
    """Which parameter stands under each name; those of tied ones too. The policy keeps them, so no identity comes twice."""
    return {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}


def _sample(flat: FlatWeights) -> Tensor:
    """Positions of a flat buffer, ascending: of every parameter by its size, and some of the smallest, evenly spread."""
    found = []
    for offset, shape in zip(flat.offsets, flat.shapes, strict=True):
        size = torch.Size(shape).numel()
        runs = -(-size // RUN)
        count = min(max(size * SAMPLED_POSITIONS // (RUN * flat.numel), LEAST_RUNS), runs)
        starts = torch.linspace(0, runs - 1, count, dtype=torch.float64).long() * RUN
        positions = (starts[:, None] + torch.arange(RUN)).flatten()
        found.append(positions[positions < size] + offset)
    return torch.cat(found).to(flat.working.device)


def _require_equal(masters: Tensor, positions: Tensor, served: Tensor, version: int) -> None:
    wrong = int((masters.index_select(0, positions).to(served.dtype) != served).sum())
    if wrong:
        raise DivergenceError(
            f"publish of version {version}: {wrong} of {len(positions)} sampled weights of the engine differ from the trainer's"
        )


def require_finite(weights: Tensor, version: int) -> None:
    """Before anything is compared: NaN differs from itself, and packed copies of huge values look older than these."""
    if not bool((weights.abs() < LARGEST).all()):  # of NaN neither
        error = DivergenceError(
            f"version {version} has weights that are NaN or infinite, or beyond {LARGEST:g}, where squares are no float32 any "
            "more: the step to it was too large; lower train.lr (or raise train.warmup_steps)"
        )
        error.spoiled = True
        raise error
