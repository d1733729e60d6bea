"""The owner's side of the record rings: many producers in other processes, one consumer in this event loop.

    async with RecordRing("my-run") as ring:
        async for delivery in ring:                 # a leased record: views of shared memory
            ...                                     # buffer it; when its group was trained or dropped:
            delivery.release()

Guarantees
* A record whose `put` returned is delivered to this owner or, if this owner ends first, to the next owner. `release`
  removes the record. A new owner first delivers all unreleased records, of each ring the oldest first, and then new records.
* An owner delivers a member (epoch, group, member) once and counts duplicates. It remembers about 131,072 released members.
* Damaged records are counted and skipped. An unfinished record of a dead producer is counted. The ring of a dead producer
  is removed when its records are released. A stopped producer (SIGSTOP) is not dead and keeps its ring.
* No busy polling: the loop's selector waits for eventfds (records), pidfds and connections (deaths).
* Each producer has its own segment `NAME.ring-...`, which only the producer and the owner map. So a producer that
  damages its ring damages no other ring. A damaged ring is renamed to `NAME.damaged-...` and kept for inspection until
  `asyncrl shm clear NAME --drop-records`. Its producer gets a new ring. If opening the `RecordRing` fails, no record is removed.
* `end_intake` and `close` detach all producers. `close` keeps rings with records for the next owner.

The segment NAME has no data. Its lock marks the owner. The secret in its header leads producers to the owner's socket.
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
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import anyio

from ...concurrency.shield import record_wait
from ...errors import ArenaOwned, LifecycleError, OutOfMemory, RecordError, SegmentDamaged, TransportError
from ...records.read import Record
from ..memory.segment import Segment, locked, new_part, parts_of, path_of
from . import attachment
from .link import Link, ProducerListener
from .ring import ring_bytes
from .types import Delivery, RingSettings, RingStatistics, SeenMembers

if TYPE_CHECKING:
    from ...telemetry.recorder import Recorder

_REMEMBERED_MEMBERS = 1 << 17  # released members kept to detect duplicates
# Takes the place of a slot in `_ready`: the producer has ended. It is queued after the producer's records.
_PRODUCER_END = -1


class RecordRing:
    """See the module. Open it with `async with`, close it in the same loop, and use one consumer."""

    def __init__(self, name: str, settings: RingSettings | None = None) -> None:
        self.name = name
        self.settings = settings or RingSettings()
        # Called with the id of a producer that has ended, when all its records were taken.
        self.on_producer_end: Callable[[bytes], None] | None = None
        # Messages about damaged rings, and a callback for each new message.
        self.damage: list[str] = []
        self.on_damage: Callable[[str], None] | None = None
        self.recorder: Recorder | None = None
        self._seen = SeenMembers(_REMEMBERED_MEMBERS)
        self._counts = RingStatistics()
        self._links: dict[bytes, Link] = {}
        self._damaged_links: list[Link] = []  # found damaged while open; their records may be in use
        self._ready: deque[tuple[Link, int, int]] = deque()  # link, slot, sequence
        self._wake = asyncio.Event()  # wakes the consumer
        self._segment: Segment | None = None  # NAME itself
        self._version = -1  # of the policy; -1: none was published
        self._listener: ProducerListener | None = None  # None before opening and after `end_intake`
        self._data_event = -1  # eventfd that producers write after a put
        self._failure: Exception | None = None  # raised by a callback of the loop
        self._state = "new"

    # -- opening and closing

    async def __aenter__(self) -> RecordRing:
        if self._state != "new":
            raise LifecycleError(f"record ring {self.name!r} was opened before; make a new RecordRing")
        self._loop = asyncio.get_running_loop()
        try:
            self._open()
        except BaseException:
            self._close_all(keep_name=self._segment is not None and self._segment.adopted)
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def _open(self) -> None:
        for name in parts_of(self.name, "damaged"):
            self._note_damage(
                f"{path_of(name)} is damaged and kept until `asyncrl shm clear {self.name} --drop-records`"
            )
        self._segment = segment = self._acquire_name()
        self._data_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Listen before reading the rings: `_complete_put` in producer.py relies on this order.
        self._listener = ProducerListener(
            self._loop, attachment.listen(segment), self._counts, self._run_callback, self._on_hello
        )
        self._loop.add_reader(self._data_event, self._run_callback, self._on_data)
        replayed = []
        for name in parts_of(self.name, "ring"):
            link = self._adopt_ring(name)
            if link is not None:
                self._links[link.producer] = link
                replayed += [(sequence, link, slot) for slot, sequence in link.reader.replay()]
        replayed.sort(key=itemgetter(0))
        self._ready.extend((link, slot, sequence) for sequence, link, slot in replayed)
        self._counts.replayed = len(replayed)
        for link in list(self._links.values()):
            self._watch(link)
            # A producer may have closed its ring while the ring had no owner.
            self._announce_end(link)
        self._state = "open"

    def _acquire_name(self) -> Segment:
        """Adopt or create the segment NAME. Errors: ArenaOwned, OutOfMemory; TransportError for another layout version or user."""
        while True:
            try:
                return Segment.adopt(self.name)
            except FileNotFoundError:
                pass
            except SegmentDamaged as error:
                with contextlib.suppress(FileNotFoundError), locked(self.name):
                    self._rename_damaged(self.name, str(error))
                continue
            try:
                return Segment.create(self.name, 0)
            except TransportError as error:
                if isinstance(error, ArenaOwned | OutOfMemory):
                    raise
                # Another owner came after our `adopt` and has died since: adopt its segment.

    def _adopt_ring(self, name: str) -> Link | None:
        """Adopt the ring of an earlier owner. Returns None if it was just removed or is damaged; a damaged ring is renamed."""
        try:
            link = Link(Segment.adopt(name))
        except FileNotFoundError:
            return None
        except ArenaOwned:
            raise
        except TransportError as error:
            self._rename_damaged(name, str(error))
            return None
        return link

    def _rename_damaged(self, name: str, reason: str) -> None:
        """Rename a damaged segment, so that no owner reads records from it."""
        new_name = new_part(self.name, "damaged")
        with contextlib.suppress(FileNotFoundError):  # another process removed the name
            os.rename(path_of(name), path_of(new_name))
        self._note_damage(
            f"{path_of(name)} is damaged: {reason}. It was renamed to {path_of(new_name)} and is kept, with the records that may "
            f"lie in it, until `asyncrl shm clear {self.name} --drop-records`. Other rings go on"
        )

    def _note_damage(self, message: str) -> None:
        self.damage.append(message)
        if self.on_damage is not None:
            self.on_damage(message)

    def end_intake(self) -> None:
        """Refuse new records: waiting puts raise now. Earlier records can still be taken and released. Calling twice is fine."""
        if self._listener is None:
            return
        for link in list(self._links.values()):
            self._poll_ring(link)
        for link in self._links.values():
            # No poll after the seal: a `put` that sees the seal stores its record again, so the record could be delivered twice.
            link.segment.seal()
            link.disconnect(self._loop)
        self._close_listener()

    def close(self) -> bool:
        """Close all rings. Returns whether rings with records, or damaged rings, were kept. A second call returns False."""
        if self._state != "open":
            self._state = "closed"
            return False
        self.end_intake()
        for producer, link in list(self._links.items()):
            if not (link.reader.poll() or link.reader.outstanding or link.reader.lost):
                del self._links[producer]
                link.close(self._loop, unlink=True)
        return self._close_all(keep_name=False)

    def _close_all(self, *, keep_name: bool) -> bool:
        """Close everything. `keep_name`: keep the segment NAME even if no ring is left. Returns whether NAME was kept."""
        self._state = "closed"
        self._wake.set()
        for link in (*self._links.values(), *self._damaged_links):
            link.close(self._loop, unlink=False)
        self._close_listener()
        if self._data_event >= 0:
            self._loop.remove_reader(self._data_event)
            os.close(self._data_event)
        if self._segment is None:
            return False
        keep_name = keep_name or bool(parts_of(self.name, "ring", "damaged"))
        self._segment.close(unlink=not keep_name)
        return keep_name

    # -- records

    def get_nowait(self) -> Delivery:
        """The next record. Errors: anyio.WouldBlock if none is ready, anyio.ClosedResourceError, TransportError after a failure."""
        while True:
            self._check_open()
            if not self._ready:
                raise anyio.WouldBlock
            link, slot, sequence = self._ready.popleft()
            if slot == _PRODUCER_END:
                if self.on_producer_end is not None:
                    self.on_producer_end(link.producer)
                continue
            try:
                record = link.reader.take(slot, sequence)
            except RecordError:
                self._counts.torn += 1
                self._release(link, slot, sequence)
                continue
            members = tuple(record.members.tolist())
            fresh = self._seen.add((record.epoch, record.group), members)
            self._counts.duplicates += len(members) - len(fresh)
            if fresh:
                self._counts.records += 1
                return Delivery(partial(self._on_release, link, slot), record, fresh)
            self._release(link, slot, sequence)

    def get(self) -> Coroutine[Any, Any, Delivery]:
        """Wait for a record. A cancelled `get` has taken no record. Errors: as `get_nowait`, without WouldBlock."""
        return self._next(anyio.ClosedResourceError)

    def __aiter__(self) -> RecordRing:
        return self

    def __anext__(self) -> Coroutine[Any, Any, Delivery]:
        return self._next(StopAsyncIteration)

    async def _next(self, end_error: type[Exception]) -> Delivery:
        # `get` and `__anext__` return this coroutine and do not await it: one more coroutine would cost time at each record.
        while True:
            if self._ready or self._state != "open" or self._failure is not None:
                try:
                    return self.get_nowait()
                except anyio.WouldBlock:  # only duplicates, torn records and ends were ready
                    pass
                except anyio.ClosedResourceError:
                    raise end_error from None
            with record_wait(self.recorder, "a record", f"a producer of ring {self.name}", None):
                self._wake.clear()
                await self._wake.wait()

    def publish_version(self, version: int) -> None:
        """Publish the policy version to all producers."""
        self._check_open()
        self._version = version
        for link in self._links.values():
            link.publish_version(version)

    def statistics(self) -> RingStatistics:
        """The current counts over all rings."""
        counts, readers = self._counts, [link.reader for link in self._links.values()]
        return replace(
            counts,
            torn=counts.torn + sum(reader.lost for reader in readers),
            skipped_slots=counts.skipped_slots + sum(reader.skipped_slots for reader in readers),
            outstanding=sum(reader.outstanding for reader in readers),
            producers=sum(link.connection is not None for link in self._links.values()),
            rings=len(readers),
            damaged=len(self.damage),
        )

    # -- internals

    def _check_open(self) -> None:
        if self._state == "new":
            raise LifecycleError(f"record ring {self.name!r} is not open: `async with RecordRing(...) as ring`")
        if self._state == "closed":
            raise anyio.ClosedResourceError
        if self._failure is not None:
            text = f"record ring {self.name!r} failed: {self._failure!r}; open a new RecordRing"
            raise TransportError(text) from self._failure

    def _on_release(self, link: Link, slot: int, record: Record) -> None:
        if self._state != "open":
            return  # the next owner delivers the record again
        self._seen.remove((record.epoch, record.group), tuple(record.members.tolist()))
        self._counts.released += 1
        self._release(link, slot, record.sequence)

    def _release(self, link: Link, slot: int, sequence: int) -> None:
        link.reader.release(slot, sequence)
        if link.space_event is not None:
            os.eventfd_write(link.space_event, 1)
        self._free_if_ended(link)

    def _run_callback(self, callback: Callable[..., None], *arguments: object) -> None:
        """Run a callback of the loop. Keep its exception for the consumer, because the loop would only log it."""
        try:
            callback(*arguments)
        except Exception as error:
            self._failure = self._failure or error
            self._wake.set()

    def _on_data(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._data_event)
        for link in list(self._links.values()):
            self._poll_ring(link)

    def _poll_ring(self, link: Link) -> None:
        if self._listener is None:  # after `end_intake`
            return
        for slot, sequence in link.reader.poll():
            self._ready.append((link, slot, sequence))
            self._wake.set()
        if link.reader.lost and self._links.get(link.producer) is link:
            # Records found earlier can still be taken. The producer will attach again and get a new ring.
            self._drop_link(link)
            self._damaged_links.append(link)
            link.close_descriptors(self._loop)
            reason = f"accepted records of producer {link.producer.hex()} have no valid descriptors"
            self._rename_damaged(link.segment.name, reason)

    def _drop_link(self, link: Link) -> None:
        """Remove a link from `_links`, and add its reader's counts to `_counts`."""
        self._counts.skipped_slots += link.reader.skipped_slots
        self._counts.torn += link.reader.lost
        del self._links[link.producer]

    # -- producers

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _on_hello(self, connection: socket.socket) -> None:
        assert self._listener is not None
        try:
            message, fds = attachment.receive(connection)
            for fd in fds:
                os.close(fd)
            link = self._admit(connection, message)
        except BlockingIOError:
            return
        except (EOFError, OSError):
            self._listener.reject(connection)
            return
        except TransportError as error:
            self._counts.refused += 1
            with contextlib.suppress(OSError):
                attachment.send(connection, {"error": str(error)[:2000]})
            self._listener.reject(connection)
            return
        except Exception:
            self._listener.reject(connection)  # with an open connection the producer would wait
            raise
        self._listener.hand_over(connection)
        link.connect(self._loop, connection, partial(self._run_callback, self._on_connection))
        self._poll_ring(link)  # records that were put while the ring had no owner

    def _admit(self, connection: socket.socket, message: dict[str, object]) -> Link:
        """Answer a hello with the producer's earlier ring or a new ring. Errors: TransportError, whose text is the answer."""
        producer = attachment.producer_id(message)
        link = self._links.get(producer)
        is_new = link is None
        if link is None:
            link = self._new_link(producer, attachment.peer(connection)[0])
        answer = {"ring": link.segment.name, "fresh": is_new}
        attachment.send(connection, answer, [self._data_event, link.open_space_event()])
        return link

    def _new_link(self, producer: bytes, pid: int) -> Link:
        """A new ring for a producer. Errors: OutOfMemory; TransportError if the producer has died meanwhile."""
        settings = self.settings
        size = ring_bytes(settings.slots, settings.payload_bytes)
        used = sum(len(link.segment.data) for link in self._links.values())
        if used + size > settings.total_bytes:
            raise OutOfMemory(
                f"no room for one more producer: {len(self._links)} have a ring, together {used:,} of {settings.total_bytes:,} "
                f"bytes, and one more takes {size:,}; raise door.ring_mib or lower door.producer_mib"
            )
        name = new_part(self.name, "ring")
        self._links[producer] = link = Link.create(name, producer, pid, settings.slots, settings.payload_bytes)
        try:
            link.publish_version(self._version)
            self._watch(link)
        except BaseException:  # an unwatched producer could die unnoticed
            self._links.pop(producer).close(self._loop, unlink=True)
            raise
        if link.dead:
            raise TransportError("the producer died while it attached; start it again")
        return link

    def _watch(self, link: Link) -> None:
        if not link.watch_process(self._loop, partial(self._run_callback, self._on_death)):
            self._on_death(link)

    def _on_connection(self, link: Link) -> None:
        """The connection became readable: the producer closed it or died, because a producer sends nothing after its hello."""
        connection = link.connection
        if connection is None:
            return
        try:
            if connection.recv(1):
                return
        except BlockingIOError:
            return  # there is nothing to read
        except ConnectionError:
            pass
        link.disconnect(self._loop)
        self._poll_ring(link)
        if link.ended():
            self._announce_end(link)
        elif not link.memory.pid:
            # The producer is in another pid namespace: only the end of its connection shows its death.
            self._on_death(link)

    def _on_death(self, link: Link) -> None:
        """The producer's process has ended. The poll below is the last poll: no put can follow."""
        link.dead = True
        link.close_descriptors(self._loop)
        self._poll_ring(link)
        if not link.closed_by_producer:
            self._counts.deaths += 1
            self._counts.half_written += link.memory.has_unfinished_put()
        self._announce_end(link)

    def _announce_end(self, link: Link) -> None:
        """If the producer has ended, queue its end after its last record, and free its ring if all records were released."""
        if link.ended() and not link.end_announced:
            link.end_announced = True
            self._ready.append((link, _PRODUCER_END, 0))
            self._wake.set()
        self._free_if_ended(link)

    def _free_if_ended(self, link: Link) -> None:
        if link.reader.outstanding or not link.ended() or self._links.get(link.producer) is not link:
            return
        if self._listener is None:  # the ring may hold records for the next owner
            return
        self._drop_link(link)
        link.close(self._loop, unlink=True)
        self._counts.reclaimed += 1
