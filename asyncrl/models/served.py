"""A policy that reads weights which another process writes: what a generation worker does at every new version."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .parameters.flat import ServedParameters
from .parameters.placed import PackedLayout, Placed
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


def read_copies(policy: PolicyModel, halves: Sequence[Tensor], packed: Sequence[Tensor], layout: PackedLayout) -> bool:
    """Whenever the policy is moved to one of `halves`, its products read the packed copies that lie in `packed` (bytes) at the same
    place in the sequence, and nothing is left to do before a move. False: this process lays copies out in another way, and goes on
    to make its own. On the lane, before the first move. Errors: ValueError for the copies of another model."""
    products, dtype = policy.products, policy.dtype
    shapes = [None if place is None else layout.forms[place[0]].shape for place in layout.places]
    wanted = [(sum(product.sizes), product.inputs) for product in products]
    if len(shapes) != len(wanted) or any(a not in (None, b) for a, b in zip(shapes, wanted, strict=True)):
        raise ValueError(f"packed copies of {len(shapes)} products of another model; this one has {len(wanted)}")
    for product in products:
        product.place({})  # what was packed to come so far is let go
    if not layout.is_native(dtype):
        return False
    placed = [layout.place(memory, dtype) for memory in packed]
    for number, product in enumerate(products):
        copies = dict[int, Placed]()
        for half, found in zip(halves, placed, strict=True):
            copy = found[number]
            if copy is not None:
                copies[half.data_ptr()] = copy
        product.place(copies)
    for half in halves:
        policy.weights.keep(half)
    return True
