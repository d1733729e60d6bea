"""The owner's side of the record rings: many producers in other processes, one consumer in this event loop.

    async with RecordRing("my-run") as ring:
        async for delivery in ring:                 # a leased record: views of shared memory
            ...                                     # stash it; when its group was trained or dropped:
            delivery.release()

Guarantees
* A record that some `put` returned for is delivered, to this owner or, if that one dies first, to the next: it leaves the
  ring by `release` only. A new owner gets everything that was not released, oldest first, then what is new.
* A member is delivered once: duplicates by (epoch, group, member) are released and counted.
* Torn or damaged records are counted and skipped. What a dead producer had begun and not put is counted; its ring is freed
  once its records were released. A stopped producer is not dead: its ring waits for it.
* Waiting costs nothing: eventfds for records, pidfds and the connections for deaths, all in the loop's own selector.
* Each producer has a segment of its own, `NAME.ring-...`, that nobody else maps but the owner: who scribbles there damages no other
  ring. A damaged one is renamed to `NAME.damaged-...` and kept for people to look at, until `asyncrl shm clear NAME
  --drop-records`; its producer gets another. An opening that fails removes nothing.
* `end_intake` lets producers go. So does `close`, which keeps the rings with records for the next owner.

The segment NAME itself holds nothing: its lock says who the owner is, and its header where the owner listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from ...errors import ArenaOwned, LifecycleError, OutOfMemory, RecordError, SegmentDamaged, TransportError
from ...records.read import Record
from .. import rendezvous
from ..memory.segment import Segment, locked, new_part, parts_of, path_of
from ..queues.queue import record_wait, wait_for_wake, wake_all, wake_one
from .link import Link, Reception
from .ring import ring_bytes
from .types import CameBefore, Damage, Delivery, RingSettings, RingStatistics

if TYPE_CHECKING:
    from ...telemetry.recorder import Recorder

_REMEMBERED = 1 << 17  # released members that are remembered against duplicates
# In the place of a slot: the producer is gone, and all that it put was taken.
_GONE = -1


class RecordRing:
    """See the module. Opened by `async with`, closed in the same loop; one consumer."""

    def __init__(self, name: str, settings: RingSettings | None = None) -> None:
        self.name = name
        self.settings = settings or RingSettings()
        self.on_gone: Callable[[bytes], None] | None = None  # a producer closed or died, and all that it put was taken
        self.damage = Damage()
        self.recorder: Recorder | None = None
        self._known = CameBefore(_REMEMBERED)
        self._counts = RingStatistics()
        self._links: dict[bytes, Link] = {}
        # Set aside by this owner, which may still hold records of them.
        self._aside: list[Link] = []
        self._ready: deque[tuple[Link, int, int]] = deque()
        self._getters: deque[asyncio.Future[None]] = deque()
        self._segment: Segment | None = None  # of the name itself
        self._version = -1
        self._reception: Reception | None = None  # None: the intake has not begun, or ended
        self._data = -1  # eventfd: something was put
        self._failure: Exception | None = None  # of a callback of the loop
        self._state = "new"

    # -- life

    async def __aenter__(self) -> RecordRing:
        if self._state != "new":
            raise LifecycleError(f"record ring {self.name!r} was opened before; make a new one")
        self._loop = asyncio.get_running_loop()
        try:
            self._open()
        except BaseException:
            self._let_go_of_all(keep=self._segment is not None and self._segment.adopted)
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def _open(self) -> None:
        for name in parts_of(self.name, "damaged"):
            self.damage.add(f"{path_of(name)} is damaged and kept until `asyncrl shm clear {self.name} --drop-records`")
        self._segment = segment = self._own_name()
        self._data = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Before the look at the rings, see `ProducerCore.advance`.
        self._reception = Reception(self._loop, rendezvous.listen(segment), self._counts, self._call, self._on_hello)
        self._loop.add_reader(self._data, self._call, self._on_data)
        found = []
        for name in parts_of(self.name, "ring"):
            link = self._adopt(name)
            if link is not None:
                self._links[link.producer] = link
                found += [(sequence, link, slot) for slot, sequence in link.reader.replay()]
        found.sort(key=lambda one: one[0])
        self._ready.extend((link, slot, sequence) for sequence, link, slot in found)
        self._counts.replayed = len(found)
        for link in list(self._links.values()):
            self._watch(link)
            # It may have closed in good order while nobody owned its ring.
            self._announce_if_gone(link)
        segment.keep_at_exit(True)
        self._state = "open"

    def _own_name(self) -> Segment:
        """The segment of the name, adopted or made. Errors: ArenaOwned, OutOfMemory."""
        while True:
            try:
                return Segment.adopt(self.name)
            except FileNotFoundError:
                pass
            except SegmentDamaged as error:
                with contextlib.suppress(FileNotFoundError), locked(self.name):
                    self._set_aside(self.name, str(error))
                continue
            try:
                return Segment.create(self.name, 0)
            except TransportError as error:
                if isinstance(error, ArenaOwned | OutOfMemory):
                    raise
                # Its owner died between the two tries: adopt it.

    def _adopt(self, name: str) -> Link | None:
        """The ring of an earlier owner. None where it is damaged, or went just now; a damaged one is set aside."""
        try:
            link = Link(Segment.adopt(name))
        except FileNotFoundError:
            return None
        except ArenaOwned:
            raise
        except TransportError as error:
            self._set_aside(name, str(error))
            return None
        link.segment.keep_at_exit(True)
        return link

    def _set_aside(self, name: str, reason: str) -> None:
        """Rename a damaged segment, so that no owner looks for records in it."""
        aside = new_part(self.name, "damaged")
        with contextlib.suppress(FileNotFoundError):  # somebody removed the name
            os.rename(path_of(name), path_of(aside))
        self.damage.add(
            f"{path_of(name)} is damaged: {reason}. It was renamed to {path_of(aside)} and is kept, with the records that may "
            f"lie in it, until `asyncrl shm clear {self.name} --drop-records`. Other rings go on"
        )

    def end_intake(self) -> None:
        """Let nothing more in: a `put` that waits raises now. What is here can be taken and released. Twice is fine."""
        if self._reception is None:
            return
        for link in list(self._links.values()):
            self._gather(link)
        for link in self._links.values():
            # Who stores a head from here on sees the seal, and may put the record again elsewhere: it is left to the next owner.
            link.segment.seal()
            link.disconnect(self._loop)
        self._close_reception()

    def close(self) -> bool:
        """Stop. True where records were left for the next owner, or a damaged ring. Twice is fine."""
        if self._state != "open":
            self._state = "closed"
            return False
        self.end_intake()
        for producer, link in list(self._links.items()):
            if not link.holds_records():
                del self._links[producer]
                link.close(self._loop, unlink=True)
        return self._let_go_of_all(keep=False)

    def _let_go_of_all(self, *, keep: bool) -> bool:
        """`keep`: the name stays also where no ring is left. Returns whether it stays."""
        self._state = "closed"
        wake_all(self._getters)
        for link in (*self._links.values(), *self._aside):
            link.close(self._loop, unlink=False)
        self._close_reception()
        if self._data >= 0:
            self._loop.remove_reader(self._data)
            os.close(self._data)
        if self._segment is None:
            return False
        keep = keep or bool(parts_of(self.name, "ring", "damaged"))
        self._segment.close(unlink=not keep)
        return keep

    # -- records

    def get_nowait(self) -> Delivery:
        """Errors: anyio.WouldBlock where nothing is there, anyio.ClosedResourceError."""
        while True:
            self._check_open()
            if not self._ready:
                raise anyio.WouldBlock
            link, slot, sequence = self._ready.popleft()
            if slot == _GONE:
                if self.on_gone is not None:
                    self.on_gone(link.producer)
                continue
            try:
                record = link.reader.take(slot, sequence)
            except RecordError:
                self._counts.torn += 1
                self._release(link, slot, sequence)
                continue
            members = tuple(record.members.tolist())
            fresh = self._known.fresh((record.epoch, record.group), members)
            self._counts.duplicates += len(members) - len(fresh)
            if fresh:
                self._counts.records += 1
                return Delivery(partial(self._on_release, link, slot), record, fresh)
            self._release(link, slot, sequence)

    def get(self) -> Coroutine[Any, Any, Delivery]:
        """Wait for a record. A cancelled get took nothing. Errors: anyio.ClosedResourceError."""
        return self._next(anyio.ClosedResourceError)

    def __aiter__(self) -> RecordRing:
        return self

    def __anext__(self) -> Coroutine[Any, Any, Delivery]:
        return self._next(StopAsyncIteration)

    async def _next(self, ended: type[Exception]) -> Delivery:
        """One coroutine for both: each more is resumed at every record."""
        while True:
            if self._ready or self._state != "open" or self._failure is not None:
                try:
                    return self.get_nowait()
                except anyio.WouldBlock:  # of what was there nothing was new
                    pass
                except anyio.ClosedResourceError:
                    raise ended from None
            if self.recorder is None:
                await wait_for_wake(self._getters)
            else:
                with record_wait(self.recorder, "a record", f"a producer of ring {self.name}", "group"):
                    await wait_for_wake(self._getters)

    def publish_version(self, version: int) -> None:
        """Let every producer know the policy version."""
        self._check_open()
        self._version = version
        for link in self._links.values():
            link.memory.owner.store(1, version + 1)

    def statistics(self) -> RingStatistics:
        """A snapshot, over all rings."""
        counts, readers = self._counts, [link.reader for link in self._links.values()]
        return replace(
            counts,
            torn=counts.torn + sum(reader.lost for reader in readers),
            passed_over=counts.passed_over + sum(reader.passed_over for reader in readers),
            outstanding=sum(reader.outstanding for reader in readers),
            producers=sum(link.connection is not None for link in self._links.values()),
            rings=len(readers),
            damaged=self.damage.count,
        )

    # -- inside

    def _check_open(self) -> None:
        if self._state == "new":
            raise LifecycleError(f"record ring {self.name!r} is not open: `async with RecordRing(...) as ring`")
        if self._state == "closed":
            raise anyio.ClosedResourceError
        if self._failure is not None:
            raise TransportError(f"record ring {self.name!r} cannot go on: {self._failure!r}") from self._failure

    def _on_release(self, link: Link, slot: int, record: Record) -> None:
        if self._state != "open":
            return  # the next owner gets it again
        self._known.leave((record.epoch, record.group), tuple(record.members.tolist()))
        self._counts.released += 1
        self._release(link, slot, record.sequence)

    def _release(self, link: Link, slot: int, sequence: int) -> None:
        link.reader.release(slot, sequence)
        if link.space is not None:
            os.eventfd_write(link.space, 1)
        self._free_if_done(link)

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        """From the loop, which would log an error of ours and go on: who takes records gets it instead of waiting for ever."""
        try:
            callback(*arguments)
        except Exception as error:
            self._failure = self._failure or error
            wake_all(self._getters)

    def _on_data(self) -> None:
        try:  # noqa: SIM105 - `suppress` is a third of what this costs
            os.eventfd_read(self._data)
        except BlockingIOError:
            pass
        for link in list(self._links.values()):
            self._gather(link)

    def _gather(self, link: Link) -> None:
        if self._reception is None:  # the intake ended
            return
        for slot, sequence in link.reader.poll():
            self._ready.append((link, slot, sequence))
            wake_one(self._getters)
        if link.reader.lost and self._links.get(link.producer) is link:
            # What was found in it can be taken; its producer attaches again, and gets another ring.
            self._forget(link)
            self._aside.append(link)
            link.leave(self._loop)
            reason = f"accepted records of producer {link.producer.hex()} are not where they belong"
            self._set_aside(link.segment.name, reason)

    def _forget(self, link: Link) -> None:
        """What its reader counted stays."""
        self._counts.passed_over += link.reader.passed_over
        self._counts.torn += link.reader.lost
        del self._links[link.producer]

    # -- producers come and go

    def _close_reception(self) -> None:
        if self._reception is not None:
            self._reception.close()
            self._reception = None

    def _on_hello(self, connection: socket.socket) -> None:
        assert self._reception is not None
        try:
            message, fds = rendezvous.receive(connection)
            for fd in fds:
                os.close(fd)
            link = self._admit(connection, message)
        except BlockingIOError:
            return
        except (EOFError, OSError):
            self._reception.dismiss(connection)
            return
        except TransportError as error:
            self._counts.refused += 1
            with contextlib.suppress(OSError):
                rendezvous.send(connection, {"error": str(error)[:2000]})
            self._reception.dismiss(connection)
            return
        except Exception:
            self._reception.dismiss(connection)  # the producer waits for an answer, which will not come
            raise
        self._reception.let_in(connection)
        link.connect(self._loop, connection, partial(self._call, self._on_connection))
        self._gather(link)  # what was put while nobody owned the ring

    def _admit(self, connection: socket.socket, message: dict[str, object]) -> Link:
        """The ring of this producer: the one it had, or a new one. Answers it. Errors: TransportError to send back."""
        producer = rendezvous.introduced(message)
        link = self._links.get(producer)
        fresh = link is None
        if link is None:
            link = self._new_link(producer, rendezvous.peer(connection)[0])
        answer = {"ring": link.segment.name, "fresh": fresh}
        rendezvous.send(connection, answer, [self._data, link.open_space()])
        return link

    def _new_link(self, producer: bytes, pid: int) -> Link:
        """Errors: OutOfMemory; TransportError where the producer has died meanwhile."""
        s = self.settings
        size, used = ring_bytes(s.slots, s.ring_bytes), sum(len(link.segment.data) for link in self._links.values())
        if used + size > s.size:
            raise OutOfMemory(
                f"no room for one more producer: {len(self._links)} have a ring, together {used:,} of {s.size:,} bytes, and one "
                f"more takes {size:,} (door.ring_mib, door.producer_mib)"
            )
        name = new_part(self.name, "ring")
        self._links[producer] = link = Link.create(name, producer, pid, s.slots, s.ring_bytes)
        try:
            link.memory.owner.store(1, self._version + 1)
            self._watch(link)
        except BaseException:  # its death would not be noticed
            self._links.pop(producer).close(self._loop, unlink=True)
            raise
        if link.dead:
            raise TransportError("the producer died while it attached")
        link.segment.keep_at_exit(True)
        return link

    def _watch(self, link: Link) -> None:
        if not link.watch(self._loop, partial(self._call, self._on_death)):
            self._on_death(link)

    def _on_connection(self, link: Link) -> None:
        """The producer closed its end, or died: a producer never speaks here."""
        connection = link.connection
        if connection is None:
            return
        with contextlib.suppress(BlockingIOError, ConnectionError):
            if connection.recv(1):
                return
        link.disconnect(self._loop)
        self._gather(link)
        if link.ended():
            self._announce_if_gone(link)
        elif link.invisible:
            self._on_death(link)

    def _on_death(self, link: Link) -> None:
        """The process is gone: nothing will be stored any more, so this look is the last."""
        link.died(self._loop)
        self._gather(link)
        if not link.closed_well:
            self._counts.deaths += 1
            self._counts.half_written += link.memory.unpublished()
        self._announce_if_gone(link)

    def _announce_if_gone(self, link: Link) -> None:
        """Behind its last record, so that who takes records hears of it in order."""
        if link.ended() and not link.gone:
            link.gone = True
            self._ready.append((link, _GONE, 0))
            wake_one(self._getters)
        self._free_if_done(link)

    def _free_if_done(self, link: Link) -> None:
        if link.reader.outstanding or not link.ended() or self._links.get(link.producer) is not link:
            return
        if self._reception is None:  # the intake ended: what was not looked at may lie in it
            return
        self._forget(link)
        link.close(self._loop, unlink=True)
        self._counts.reclaimed += 1
