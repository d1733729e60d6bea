"""A policy that reads weights which another process writes: what a generation worker does at every new version."""

from __future__ import annotations

from torch import Tensor

from .parameters.flat import ServedParameters
from .policy import PolicyModel


def read_from_board(policy: PolicyModel, half: Tensor, version: int) -> None:
    """Every parameter becomes a view of `half`, laid out like `policy.weights`, and the policy is at `version`, in one step: no
    token is sampled from one and named after the other. Nothing is copied; the storage of before is let go. On the lane.

    `policy` is a served one (`PolicyModel(..., served=True)`). Packed copies are those that `pack_ahead` has made of this version,
    or they are made anew at their next use. Errors: ValueError for a buffer of another size, dtype or device."""
    served = policy.flat
    assert isinstance(served, ServedParameters), "a policy that is trained owns its weights"
    policy.forget_ahead(but=version)
    served.move_to(half)
    policy.version = version
