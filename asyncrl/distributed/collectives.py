"""Collectives over the ranks of one process group. They raise RankLost when a rank is lost, which torch's collectives do not:

    the lost rank is            gloo                             nccl
    killed                      the collective fails             the kernel waits for ever
    suspended, or cut off       the collective waits for ever    the kernel waits for ever

So each method starts its collective, and then waits until the collective ends or a rank is reported lost (`LostRank.report`). On
nccl the report also aborts all process groups. The abort ends every kernel that waits for the lost rank, also in a collective that
FSDP2 started. The output of such a kernel is garbage.

The methods block: call them on the lane, the thread of the device. All ranks of the group must call them in the same order.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..errors import LifecycleError, RankLost

# Timeout of a collective and of a call of torch's store. torch counts seconds in which the job was suspended, so a short timeout
# would end a run that was only suspended. The watchdog and the line (line.py) end a run that hangs.
NO_TIMEOUT = timedelta(days=30)
# Time between two checks of `LostRank.reason` while gloo waits. Gloo itself wakes the lane at the end of a collective.
_CHECK_EVERY = timedelta(seconds=0.1)
_PIECE_BYTES = 64 << 20
# On nccl nothing wakes the lane, so it polls. A pause is 3 % of the time that the lane has waited, within these bounds in seconds.
_PAUSE_SHARE, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.03, 20e-6, 0.01


@dataclass(slots=True)
class LostRank:
    """Why the ranks of a run cannot go on together. `reason`: a sentence that names the lost rank; None while no rank is lost."""

    reason: str | None = None
    # True after a report on nccl: no collective has a usable result any more.
    aborted: bool = False

    def report(self, reason: str) -> None:
        """Make all collectives of this rank raise RankLost from now on. Thread-safe, returns at once. Later calls do nothing."""
        if self.reason is not None:
            return
        self.reason = reason
        if dist.is_initialized() and dist.get_backend() == "nccl":
            self.aborted = True
            # In a thread, because the abort may wait for the device.
            threading.Thread(target=abort, name="asyncrl-abort", daemon=True).start()

    def check(self) -> None:
        """Errors: RankLost after a report."""
        if self.reason is not None:
            raise RankLost(self.reason)


def abort() -> None:
    """End all nccl collectives of this process, and forget all process groups."""
    # These errors mean that another thread is destroying the groups, which then need no abort.
    with contextlib.suppress(AssertionError, ValueError, RuntimeError):
        # Private to torch. The public `ProcessGroup.abort`, called for one group after another, can deadlock (pytorch#119797).
        dist.distributed_c10d._abort_process_group()


class Collectives:
    """Collectives over the ranks of one process group. `Collectives()`: for a single rank, without communication. Errors of all
    methods: RankLost if another rank is lost; LifecycleError."""

    # The index of this rank in the group, and the number of ranks in the group.
    rank: int = 0
    world_size: int = 1
    # None: the default group, with all ranks of the world.
    group: dist.ProcessGroup | None = None
    # Shared by all groups of a world.
    lost: LostRank

    @property
    def is_open(self) -> bool:
        """Whether the collectives may be called."""
        raise NotImplementedError

    def all_reduce_sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a small float64 tensor (mask sums, metrics) over the ranks, in place. Returns `values`."""
        if values.dtype != torch.float64:
            raise TypeError(f"sums over ranks must be float64, found {values.dtype}")
        return self.reduce_gradients_(values)

    def reduce_gradients_(self, flat: torch.Tensor, group: Any = None) -> torch.Tensor:
        """Sum the flat gradient buffer over the ranks, in place. Returns `flat`. `group`: takes the place of `self.group`."""
        if self._has_other_ranks():
            self._run(lambda: dist.all_reduce(flat, group=group or self.group, async_op=True))
        return flat

    def broadcast_(self, values: torch.Tensor) -> torch.Tensor:
        """Overwrite contiguous `values` with the values of rank 0 of the world, in pieces of 64 MiB. Returns `values`."""
        if self._has_other_ranks():
            for piece in values.view(-1).view(torch.uint8).split(_PIECE_BYTES):
                self._run(partial(dist.broadcast, piece, 0, group=self.group, async_op=True))
        return values

    def reduce_scatter_(self, own: torch.Tensor, values: torch.Tensor, group: Any) -> None:
        """Sum `values` over the ranks of `group`, and write this rank's part of the sum into `own`. The parts have equal sizes.
        `values` may be overwritten."""
        if not self._has_other_ranks():
            own.copy_(values)
        elif dist.get_backend(group) == "gloo":
            # gloo's own reduce-scatter is an all-reduce inside, too, but `_wait` cannot poll the `Work` of that call.
            self.reduce_gradients_(values, group)
            own.copy_(values.view(-1, own.numel())[dist.get_rank(group)])
        else:
            # `reduce_scatter_tensor` is the name before torch 2.13.
            reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            self._run(lambda: reduce_scatter(own, values, group=group, async_op=True))

    def all_gather_bytes(self, value: bytes) -> list[bytes]:
        """The values of all ranks, in rank order; lengths may differ. With nccl the bytes pass through the current CUDA device
        of the calling thread, which is the rank's device on the lane."""
        if not self._has_other_ranks():
            return [value]
        device = torch.device("cuda" if dist.get_backend(self.group) == "nccl" else "cpu")
        lengths = self.all_gather(torch.tensor([len(value)], device=device)).view(-1).tolist()
        # `frombuffer` needs a writable buffer that is not empty.
        padded = torch.frombuffer(bytearray(value.ljust(max(*lengths, 1), b"\0")), dtype=torch.uint8).to(device)
        gathered = self.all_gather(padded)
        return [tensor[:length].cpu().numpy().tobytes() for tensor, length in zip(gathered, lengths, strict=True)]

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """The `values` of all ranks, [ranks, ...]. `values` is contiguous, with one shape and dtype on all ranks."""
        gathered = values.new_empty(self.world_size, *values.shape)
        if not self._has_other_ranks():
            return gathered.copy_(values)
        # As bytes, because gloo does not know all dtypes.
        parts, own = list(gathered.view(self.world_size, -1).view(torch.uint8)), values.view(-1).view(torch.uint8)
        self._run(lambda: dist.all_gather(parts, own, group=self.group, async_op=True))
        return gathered

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        """Send `parts[r]` to each rank r. Element s of the result came from rank s. `parts` [ranks, ...] is contiguous."""
        received = torch.empty_like(parts)
        if not self._has_other_ranks():
            return received.copy_(parts)
        sent, written = parts.view(-1).view(torch.uint8), received.view(-1).view(torch.uint8)
        self._run(lambda: dist.all_to_all_single(written, sent, group=self.group, async_op=True))
        return received

    def _has_other_ranks(self) -> bool:
        """Whether a collective is needed. Errors: LifecycleError if a collective is needed, but the world is not open."""
        if self.world_size == 1:
            return False
        if not self.is_open:
            raise LifecycleError("a collective was called on a world that is not open; use `with world.open(device):`")
        return True

    def _run(self, start: Callable[[], Any]) -> None:
        """Run a collective to its end. `start` returns its `dist.Work`."""
        self.lost.check()
        try:
            self._wait(start())
        except RankLost:
            raise
        # dist.DistError is a RuntimeError. A call after an abort raises a ValueError.
        except (RuntimeError, ValueError) as error:
            # An earlier report names the lost rank, which torch's error does not.
            reason = self.lost.reason or (
                f"rank {self.rank} of {self.world_size}: a collective failed, most likely because another rank has ended or died; "
                "see the output of that rank"
            )
            raise RankLost(f"{reason} ({error})") from error

    def _wait(self, work: Any) -> None:
        on_nccl, started = dist.get_backend(self.group) == "nccl", time.monotonic()
        while not work.is_completed():
            if on_nccl:
                # `wait` with a timeout would abort the group at the timeout.
                pause = _PAUSE_SHARE * (time.monotonic() - started)
                time.sleep(min(max(pause, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))
            else:
                # Suppressed: the error of the timeout, and an error of the collective, which `work.wait()` below raises again.
                with contextlib.suppress(RuntimeError):
                    work.wait(_CHECK_EVERY)
            # Checked only after a wait, because the lost rank may have finished its part of this collective.
            if self.lost.reason is not None and not work.is_completed():
                # Never free the group: the destructor of a gloo group waits for its collectives, and so for the lost rank.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group or dist.group.WORLD))
                self.lost.check()
        work.wait()
        if self.lost.aborted:
            self.lost.check()
        if on_nccl and (error := work.exception()) is not None:
            raise RuntimeError(str(error))
