"""What the consumer of a ring does with a record, the same as in a run: the one place where `bench transport` names that way.

Measured from the lease until the group is whole in the stash, and what is here is all of it: whoever changes how a run takes
records in changes it here.
"""

from __future__ import annotations

import time

from asyncrl.data.stash import Stash
from asyncrl.records.trajectories import trajectories_of
from asyncrl.transport.rings.record_ring import Delivery


class Arrival:
    def __init__(self) -> None:
        self._stash: Stash[int] = Stash(1024)

    def take(self, delivery: Delivery) -> int:
        """The whole group, whose arrays stay in the ring until the delivery is released. Monotonic ns when it was cut."""
        record = delivery.record
        trajectories = trajectories_of(record, copy=False)
        cut = time.monotonic_ns()
        if self._stash.add_whole(trajectories, record.group, lease=delivery, epoch=record.epoch) is None:
            raise AssertionError(f"group {record.group} is not whole")
        return cut
