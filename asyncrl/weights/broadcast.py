"""How a version of the weights gets from the training ranks (senders) to the nodes that only generate (receivers).

Each node has a weight board: two halves of memory, each for the weights of one version (sync.py).

    sender's loop     GeneratingNodes   a version is in a half of the sender's board: tell rank 0
    rank 0            Orders.run        once each receiver of an order has a free half: send the order to its senders and receivers
    sender's lane     Stripes           broadcast the sender's stripe of the half to all receivers, bucket by bucket
    receiver's lane   Stripes           receive the stripes of all senders into the free half of the receiver's board
    receiver's loop   WeightReceiver    move the receiver's workers to that half

Each sender has a stripe, a contiguous part of the half, and broadcasts it in a process group with all receivers. So no sender waits
for another sender, and senders receive nothing. Broadcasts run on a separate lane (thread) beside other work.

With LoRA only the masters of the adapters travel, and the receiver merges them into its free half (models/parameters/merge.py). A
node without weights first gets all weights, unmerged, and keeps a copy of each adapted weight.

An order may carry rank 0's log-probs of the fixed row (sync.py). Workers compare these with their own, to find misplaced bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.concurrency import awake
from asyncrl.concurrency.lane import Lane
from asyncrl.concurrency.supervisor import plain_task_group, spawn
from asyncrl.errors import first_line
from asyncrl.models.parameters.lora import LoraParameters
from asyncrl.models.parameters.merge import Merge
from asyncrl.transport.memory.board import Board
from asyncrl.transport.memory.words import fault
from asyncrl.types import PostedVersion

from .orders import Order, OrderDesk
from .sync import BoardOwner, BoardWorkers

BUCKET_BYTES = 64 << 20
_POLL_EVERY_S = 0.0002


def stripes(total: int, senders: int) -> list[tuple[int, int]]:
    """The (start, end) of each sender's stripe of `total` bytes. The sizes of the stripes differ by less than 128 bytes."""
    units = total // 64
    return list(pairwise([units * i // senders * 64 for i in range(senders)] + [total]))


def buckets(total: int, senders: int, size: int) -> list[list[tuple[int, int]]]:
    """For each sender, the (start, end) of each bucket in the sender's stripe. A bucket has at most `size` of the `total` bytes."""
    return [
        [(start, min(start + size, end)) for start in range(first, end, size)] for first, end in stripes(total, senders)
    ]


class Stripes:
    """A node's broadcasts in its process groups: a sender has one group, a receiver one for each sender. For one lane only."""

    def __init__(self, node: str, store: dist.Store, device: torch.device, deadline_s: float) -> None:
        """`store`: reachable from all nodes. `deadline_s`: for each bucket, and for forming a process group."""
        self._node, self._store, self._device, self._deadline_s = node, store, device, deadline_s
        self._group = 0  # `Order.group` of these process groups; 0: none
        # Sender -> ProcessGroupGloo or ProcessGroupNCCL, in the order of the senders.
        self._groups: dict[str, Any] = {}

    def broadcast(
        self,
        order: Order,
        half: Tensor,
        read: Callable[[int, int], Tensor] | None = None,
        whole_bytes: int | None = None,
    ) -> str | None:
        """A sender sends its stripe of `half`. A receiver gets all stripes into `half`. `read(start, end)` returns what is sent for
        `half[start:end]`. `whole_bytes`: size of all stripes, if `half` is one stripe. Returns None, or a sentence on failure."""
        action, options = "forming the process group", dist.BroadcastOptions()  # the root is rank 0, the sender
        # Sender -> (name of the broadcast in errors, the running broadcast, the memory that it reads or writes).
        works: dict[str, tuple[str, Any, Tensor]] = {}
        try:
            self._form_groups(order)
            data = half.view(torch.uint8)
            bucket_lists = buckets(whole_bytes or data.numel(), len(order.senders), BUCKET_BYTES)
            buckets_of = dict(zip(order.senders, bucket_lists, strict=True))
            first = next(iter(buckets_of[self._node]), (0, 0))[0] if whole_bytes else 0
            for number in range(max(map(len, bucket_lists)) + 1):
                for sender, group in self._groups.items():
                    if sender in works:
                        action, work, _ = works.pop(sender)
                        self._wait(work)
                    if number < len(buckets_of[sender]):
                        fault(f"weights.bucket.{number}")
                        action = f"bucket {number + 1} of {len(buckets_of[sender])} from {sender}"
                        start, end = buckets_of[sender][number]
                        piece = data[start - first : end - first]
                        if read is not None:
                            piece = read(start // half.itemsize, end // half.itemsize).view(torch.uint8)
                        works[sender] = action, group.broadcast([piece], options), piece
        except (RuntimeError, TimeoutError) as error:
            self.close()
            return f"{action} of version {order.version} failed: {first_line(error)}"
        return None

    def _form_groups(self, order: Order) -> None:
        if order.group == self._group:
            return
        self.close()
        timeout = timedelta(seconds=self._deadline_s)
        for sender in order.senders:
            nodes = [sender, *order.receivers]
            if self._node in nodes:
                store = dist.PrefixStore(f"weights/{order.group}/{sender}", self._store)
                rank, size = nodes.index(self._node), len(nodes)
                if self._device.type != "cuda":
                    self._groups[sender] = dist.ProcessGroupGloo(store, rank, size, timeout)
                else:
                    options = dist.ProcessGroupNCCL.Options()
                    options._timeout = timeout
                    self._groups[sender] = dist.ProcessGroupNCCL(store, rank, size, options)
        self._group = order.group

    def _wait(self, work: Any) -> None:
        """Wait for a broadcast, at most `deadline_s`: NCCL never completes a broadcast whose peer is lost."""
        if self._device.type != "cuda":
            # Raises after the timeout of the group.
            work.wait()
            return
        until = awake.now() + self._deadline_s
        while not work.is_completed():
            if awake.now() > until:
                raise TimeoutError(f"nothing moved for {self._deadline_s:g} s")
            time.sleep(_POLL_EVERY_S)
        if (error := work.exception()) is not None:
            raise RuntimeError(str(error))

    def close(self) -> None:
        """Abort the groups. Other nodes that wait in these groups get an error, on NCCL at the latest after `deadline_s`."""
        groups, self._groups, self._group = [*self._groups.values()], {}, 0
        # In parallel: on nccl the abort of one group may wait for the abort of another.
        with ThreadPoolExecutor(len(groups) or 1) as threads:
            list(threads.map(lambda group: group.abort(), groups))


class GeneratingNodes:
    """The generating nodes as the `BoardWorkers` of a training rank's board."""

    def __init__(
        self,
        board: Board,
        stripes: Stripes,
        lane: Lane,
        desk: OrderDesk,
        lora: LoraParameters | None = None,
        whole_bytes: int | None = None,
    ) -> None:
        """`lane`: runs only broadcasts. `lora`: the trained adapters; then `adapters[half]` is a buffer for their masters.
        `whole_bytes`: size of all weights, if the board has only the stripe of this node."""
        self._whole_bytes = whole_bytes
        self._board, self._stripes, self._lane, self._desk = board, stripes, lane, desk
        self._merge = None if lora is None else lora.merge
        self.adapters = [] if lora is None else [torch.empty_like(lora.master) for _ in (0, 1)]
        desk.on_order(self._on_order)

    async def update_weights(self, version: int, half: int, outputs: Sequence[float] | None) -> None:
        """Returns once no broadcast reads the other half of this board. The version is sent later, when the receivers have a free
        half. If a newer version comes before that, only the newer version is sent. Errors: RankLost."""
        await self._desk.wrote(version, outputs)

    def reads(self, half: int) -> bool:
        """Always False: other nodes read this board only during a broadcast, and `update_weights` waits for its end."""
        return False

    async def wait_unread(self, half: int) -> None:
        """Returns at once: see `reads`."""

    async def _on_order(self, order: Order) -> str | None:
        return await self._lane.run(partial(self._send, order), name="weights/send")

    def _send(self, order: Order) -> str | None:
        versions = [self._board.version(half) for half in (0, 1)]
        if order.version not in versions:
            return f"version {order.version} of the weights is to be sent, but the board holds {versions}"
        half = self._board.half(index := versions.index(order.version))
        if self._merge is None:
            return self._stripes.broadcast(order, half, whole_bytes=self._whole_bytes)
        failure = self._stripes.broadcast(order, half, partial(self._merge.unmerged, half)) if order.whole else None
        return failure or self._stripes.broadcast(order, self.adapters[index])


class WeightReceiver(BoardOwner):
    """Receives versions into the board of a generating node, and moves the node's workers to them."""

    def __init__(
        self,
        board: Board,
        workers: BoardWorkers,
        stripes: Stripes,
        lane: Lane,
        desk: OrderDesk,
        lora: Mapping[str, Any] | None = None,
    ) -> None:
        """`lane`: runs only broadcasts. `lora`: `LoraParameters.describe` of the trainer; None: no adapters."""
        super().__init__(board, workers)
        self._stripes, self._lane, self._desk = stripes, lane, desk
        self._lora = lora
        # With LoRA: the halves that hold all weights. A merge into any other half would not set weights that have no adapter.
        self._complete = set[int]()
        if lora is not None:
            dtype = torch.float64 if board.dtype == torch.float64 else torch.float32
            self._adapters = torch.empty(lora["elements"], dtype=dtype, device=board.half(0).device)
        self._half_for_order: int | None = 0  # the half for the next version; None: no half is free
        self._returned = -1  # the last result of `next`
        desk.on_order(self._on_order)

    async def post_first(self) -> PostedVersion:
        """Receive the first version, with which workers start. Errors: RankLost."""
        await self._desk.next(-1)
        assert self._announced is not None, "rank 0 answers after this node's broadcast"
        self._half_for_order, self._current, self._announced = None, self._announced, None
        self._free_other_half(1 - self._current.half)
        return self._current

    async def next(self) -> int:
        """Returns the next version once every worker has it. The first call returns the version of `post_first`; each later call
        receives a newer version. Do not call it again after a cancelled call. Errors: RankLost, and those of the workers."""
        if self._announced is None and self.current.version > self._returned:
            self._returned = self.current.version
            return self._returned
        if self._announced is None:
            self._half_for_order = await self._wait_for_half()
            # Rank 0 repeats an order that failed on another node, so the half stays free until rank 0 answers.
            await self._desk.next(self.current.version)
            self._half_for_order = None
        assert self._announced is not None, "rank 0 answers after this node's broadcast"
        await self._move(self._announced)
        self._returned = self.current.version
        return self._returned

    async def _on_order(self, order: Order) -> str | None:
        half = self._half_for_order
        if half is None:
            return "no half of the board is free"
        failure = await self._lane.run(partial(self._fill, order, half), name="weights/receive")
        if failure is None:
            self._announced = PostedVersion(order.version, half, order.outputs)
        return failure

    def _fill(self, order: Order, half: int) -> str | None:
        self._board.clear(half)
        weights, failure = self._board.half(half), None
        if order.whole or self._lora is None:
            failure = self._stripes.broadcast(order, weights)
        if self._lora is not None:
            failure = failure or self._stripes.broadcast(order, self._adapters)
        if failure is not None:
            return failure
        if self._lora is not None:
            if order.whole:
                self._merge = Merge.of(self._lora, weights)
            elif half not in self._complete:
                weights.copy_(self._board.half(1 - half))
            self._complete.add(half)
            self._merge.merge(self._adapters, weights)
        self._board.write(half, order.version)
        return None


class AllReaders:
    """Several readers of this rank's board, such as its workers and the generating nodes, as one `BoardWorkers`."""

    def __init__(self, *readers: BoardWorkers) -> None:
        self._readers = readers

    async def update_weights(self, version: int, half: int, outputs: Sequence[float] | None) -> None:
        """Returns once `BoardWorkers.update_weights` of each reader has returned."""
        async with plain_task_group() as tasks:
            for reader in self._readers:
                spawn(tasks, "hand-over of weights", reader.update_weights, version, half, outputs)

    def reads(self, half: int) -> bool:
        """Whether any reader may read this half."""
        return any(reader.reads(half) for reader in self._readers)

    async def wait_unread(self, half: int) -> None:
        """Returns once no reader reads this half."""
        for reader in self._readers:
            await reader.wait_unread(half)
