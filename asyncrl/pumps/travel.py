"""Whole groups travel from the rank that scored them to a training rank (`distributed.roles`), as records of schema v1.

    intake ─▶ Departures: assign ─▶ record over the line ─▶ Arrivals: check ─▶ arrive ─▶ store, ready ─▶ claims
                 ▲          │ rank 0: fewest tokens                             │ rank 0: the group moves
                 └ credits, rows cleared ◀───────── acknowledgement ◀─────────┘

Exactly once. The books of the ledger at rank 0 say which rank has a group. A training rank keeps a group only if rank 0 moves the
group in the books from the sender to that training rank. The training rank acknowledges a group when the rows are in its store. So
* a record that is sent twice is acknowledged and changes nothing: its rows are in the store, or the books no longer have the group;
* if the sender dies before the move, the group's prompt is played again elsewhere, and a record that comes later is refused;
* if the sender dies after the move, the group stays. If a training rank dies, the run restarts from its checkpoint.

Bounds. Each group that travels has a slot, so a training rank never has more groups than slots. A sender has `UNACKNOWLEDGED`
credits, and each group without an acknowledgement takes a credit. Further groups wait in the sender's store, and keep their slots.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio
import numpy as np

from asyncrl.concurrency.supervisor import spawn
from asyncrl.distributed.exchange import Buffer
from asyncrl.distributed.line import LineClient
from asyncrl.errors import DataError, LedgerError, RankLost, RecordError, RecordTooLarge
from asyncrl.records.check import check_trajectory
from asyncrl.records.read import read
from asyncrl.records.trajectories import draft_of, group_metadata, is_whole_group, json_bytes, trajectories_of
from asyncrl.records.write import plan
from asyncrl.transport.queues.queue import QueueReceiver, QueueSender, open_queue
from asyncrl.types import Group, Prompt, Ticket

from .pipeline import Ports

KIND = "group"
UNACKNOWLEDGED = 8
# The largest record of a group. 64 x 32,768 tokens have 40 MB, and with recorded routes of 48 layers twenty times as much.
MAX_BYTES = 1 << 30
# A number that no queue reaches, because each queued group has a slot.
_QUEUE_BOUND = 1 << 30
# Only senders with a rank below this number have a metric of their own, because each metric is a column of every step.
_NAMED_RANKS = 64

logger = logging.getLogger("asyncrl.pumps")


def tokens_of(group: Group) -> int:
    """The largest number of tokens that a forward of this group can have: each distinct prompt once, and every completion."""
    # Agents write their own prompts, so the members of a group may have different prompts.
    prompts = {t.tokens[: t.prompt_length].tobytes(): t.prompt_length for t in group.trajectories}
    return sum(prompts.values()) + sum(t.completion_length for t in group.trajectories)


def encode_group(group: Group, epoch: int) -> bytearray:
    """The record of a scored group. `epoch`: the attempt of the run. Training reads neither `extras` nor prompt columns, so entries
    that JSON cannot hold are left out. Errors: RecordError for other values that JSON cannot hold; RecordTooLarge."""
    prompt, first = group.prompt, group.trajectories[0]
    is_prefix = np.array_equal(prompt.ids, first.tokens[: first.prompt_length])
    metadata = {
        "prompt": prompt.prompt,
        "columns": _plain(prompt.columns),
        "epoch": prompt.epoch,
        "ids": None if is_prefix else prompt.ids.tolist(),
        "extras": [_plain(t.extras) for t in group.trajectories],
    }
    planned = plan(draft_of(group.group_id, group.trajectories, epoch, metadata))
    if planned.size > MAX_BYTES:
        raise RecordTooLarge(
            f"group {group.group_id} has {planned.size:,} bytes, and a group that travels has at most {MAX_BYTES:,}; reduce "
            "rollout.group_size or rollout.max_tokens"
        )
    return planned.record()


def decode_group(record: Buffer, ticket: Ticket, epoch: int) -> Group:
    """The group of a record. The arrays are views of `record`. Errors: RecordError; DataError for another or a partial group."""
    found = read(record)
    members = trajectories_of(found)
    if (found.epoch, found.group) != (epoch, ticket.group_id) or not is_whole_group(members):
        raise DataError(
            f"expected all members of group {ticket.group_id} of epoch {epoch}, found members {found.members.tolist()} of "
            f"{found.group_size} of group {found.group} of epoch {found.epoch}; a sender of an earlier attempt must join again"
        )
    metadata, first = group_metadata(found), members[0]
    ids = first.tokens[: first.prompt_length].copy() if metadata["ids"] is None else np.array(metadata["ids"], np.int32)
    prompt = Prompt(ticket.group_id, ids, metadata["prompt"], metadata["columns"], metadata["epoch"])
    pairs = zip(members, metadata["extras"], strict=True)
    return Group(ticket, prompt, tuple(replace(trajectory, extras=extras) for trajectory, extras in pairs))


class Departures:
    """Sends the groups that this rank has scored to training ranks.

    consumes     scored groups of the intake, by `put`
    produces     groups in the store of a training rank, or ready groups in this rank's own store
    waits for    credits; rank 0, which assigns a training rank; the acknowledgement
    is woken by  the score pump, the training ranks
    """

    def __init__(self, ports: Ports, connect: Callable[[int], Awaitable[LineClient]], epoch: int) -> None:
        """`connect(rank)`: the connection to the server of a training rank. `epoch`: the attempt of the run."""
        self._ports = ports
        self._connect = connect
        self._epoch = epoch
        edge: tuple[QueueSender[tuple[Group, float]], QueueReceiver[tuple[Group, float]]]
        edge = open_queue("departures", _QUEUE_BOUND, ports.recorder)
        self._queue_in, self._queue = edge
        self._credits = anyio.Semaphore(UNACKNOWLEDGED)

    def put(self, group: Group) -> None:
        """Send this group, whose rows are in the store and whose rewards are final. Returns at once."""
        self._queue_in.put_nowait((group, anyio.current_time()))

    def close(self) -> None:
        """Take no more groups: `run` ends after the last acknowledgement."""
        self._queue_in.close()

    def discard(self) -> None:
        """End the queue of a rank that may never have called `run`."""
        self._queue_in.close()
        self._queue.close()

    async def run(self) -> None:
        """Send groups until `close`. Errors: RankLost if a training rank is gone."""
        recorder = self._ports.recorder
        async with self._queue_in, self._queue, anyio.create_task_group() as sends:
            async for group, since in self._queue:
                with recorder.wait("departures", "a credit", on="training ranks", cause="slots"):
                    await self._credits.acquire()
                spawn(sends, f"departure of group {group.group_id}", self._send, group, anyio.current_time() - since)

    async def _send(self, group: Group, waited_s: float) -> None:
        ports, ticket = self._ports, group.ticket
        try:
            # From here on no other task of this rank can end the group, which another rank may get.
            if not ports.book.remove(ticket):
                return  # the group has ended
            if refusal := await self._deliver(group, waited_s):
                logger.warning("group %d does not travel and is dropped: %s", ticket.group_id, refusal)
                ports.book.add(ticket)
                await ports.book.end(ticket.group_id, "dropped", "did not travel")
        except BaseException:
            # So that `GroupBook.end_all` drops the group. After a move the ledger ignores this drop, except on rank 0.
            ports.book.add(ticket)
            raise
        finally:
            self._credits.release()

    async def _deliver(self, group: Group, waited_s: float) -> str:
        """Bring a group to the training rank that the ledger names. Returns the reason of a refusal, or ""."""
        ports, ticket = self._ports, group.ticket
        try:
            record = encode_group(group, self._epoch)
        except (RecordError, RecordTooLarge) as error:
            return str(error)
        rank = await ports.ledger.assign(ticket, tokens_of(group))
        if rank == ports.rank:
            await ports.ledger.arrive(ticket, rank)
            ports.book.add(ticket)
            ports.book.mark_ready(group)
            return ""
        line = await self._connect(rank)
        header = {"ticket": (ticket.group_id, ticket.oldest, ticket.deadline), "sender": ports.rank, "waited": waited_s}
        with ports.recorder.span("departure", track="departures", group=ticket.group_id, to=rank):
            answer, _ = await line.ask(KIND, header, (record,))
        if answer["ended"]:
            # The training has ended. The group stays live, because the last checkpoint at rank 0 saves the prompts of live groups.
            ports.book.add(ticket)
        elif not answer["refusal"]:
            ports.book.clear((ticket.group_id,))
        return str(answer["refusal"])


@dataclass(slots=True)
class _Arrival:
    group: Group
    sender: int
    # True: the group is stored here, or nobody needs it. False: the training has ended.
    accepted: asyncio.Future[bool]


class Arrivals:
    """Takes the groups that other ranks send to this training rank.

        consumes     records from the line, by `take`
        produces     ready rows in the store (edge 5 of graph.py)
        waits for    rank 0, which moves the group in its books
        is woken by  the line

    The line cancels `take` if the sender dies. No cancellation may come between the move of a group in the books and the writing of
    its rows. So `run`, which the line does not cancel, does both.
    """

    def __init__(self, ports: Ports, epoch: int) -> None:
        self._ports = ports
        self._epoch = epoch
        edge: tuple[QueueSender[_Arrival], QueueReceiver[_Arrival]]
        edge = open_queue("arrivals", _QUEUE_BOUND, ports.recorder)
        self._queue_in, self._queue = edge
        self._unanswered: set[asyncio.Future[bool]] = set()

    async def take(self, peer: str, header: Mapping[str, Any], buffers: Sequence[Buffer]) -> tuple[Any, tuple[()]]:
        """The handler of `KIND`. Returns when the group is stored or not needed here. Errors: RankLost if the sender is lost."""
        ports = self._ports
        try:
            group = decode_group(buffers[0], Ticket(*header["ticket"]), self._epoch)
            for trajectory in group.trajectories:
                check_trajectory(trajectory, ports.limits)
        except (DataError, RecordError) as error:
            return {"refusal": str(error), "ended": False}, ()
        arrival = _Arrival(group, header["sender"], asyncio.get_running_loop().create_future())
        self._unanswered.add(arrival.accepted)
        try:
            self._queue_in.put_nowait(arrival)
            accepted = await arrival.accepted
        except anyio.ClosedResourceError:
            accepted = False
        finally:
            self._unanswered.discard(arrival.accepted)
        if accepted:
            self._count(arrival.sender, len(buffers[0]), header["waited"])
        return {"refusal": "", "ended": not accepted}, ()

    def _count(self, sender: int, size: int, waited_s: float) -> None:
        count = self._ports.recorder.count
        count("travel/groups")
        count("travel/bytes", size)
        count("travel/credit_wait_s", waited_s)
        if sender < _NAMED_RANKS:
            count(f"travel/rank_{sender}/groups")

    async def run(self) -> None:
        """Store the groups that arrive, one after the other, until cancelled. Errors: those of the ledger."""
        try:
            async with self._queue_in, self._queue:
                async for arrival in self._queue:
                    # A cancellation must not come between the move and the rows.
                    with anyio.CancelScope(shield=True):
                        lost = await self._keep(arrival)
                    if not arrival.accepted.done():
                        arrival.accepted.set_exception(lost) if lost else arrival.accepted.set_result(True)
        finally:
            for accepted in self._unanswered:
                if not accepted.done():
                    accepted.set_result(False)

    async def _keep(self, arrival: _Arrival) -> RankLost | None:
        """Keep the group if this rank needs the group. Returns an error if rank 0 counts the sender as lost."""
        ports, group = self._ports, arrival.group
        # True if the record was sent twice. `run` handles one record at a time, so all rows of the first record are stored.
        if group.group_id in ports.store:
            return None
        try:
            moved = await ports.ledger.arrive(group.ticket, arrival.sender)
        except LedgerError as error:
            return RankLost(str(error))
        if moved:
            ports.book.add(group.ticket)
            ports.book.mark_ready(ports.store.put(group))
        return None


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that JSON can hold."""

    def fits(name: str, value: Any) -> bool:
        try:
            json_bytes({name: value}, name)
        except RecordError:
            return False
        return True

    return {name: value for name, value in values.items() if fits(name, value)}
