"""The body of a request, with a limit on everything: what was sent, what it unpacks to, its time, its depth, its objects.

A body of 117 KB can unpack to 180 MB of JSON, and that to 4 GB of Python objects. So the structure is counted before any object
is built, and what is longer than `SMALL` is read on a thread, by one request at a time. A thread alone does not keep the event
loop free: orjson holds the interpreter for as long as one call takes, a tenth of a second for 16 MiB. So the rows of numbers, which
are nearly all of a large body, are cut out of it and read one by one, and the loop gets its turn between two of them.
"""

from __future__ import annotations

import re
import secrets
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt
import orjson

from .access import Refused
from .library import Unreadable, web

MOST_BYTES = 1 << 27  # of one body, unpacked: a group of 64 x 32,768 tokens has some 70 MB
MOST_FIELDS_BYTES = 1 << 16  # of the bodies that are no groups
MOST_AT_ONCE = 1 << 29  # of all bodies whose groups wait for room; with more than that no other body is read
BODY_S = 15.0  # of a body that does not come; each `BODY_PACE` bytes of one that comes are a second more
BODY_PACE = 1 << 18  # 2 Mbit/s
SMALL = 1 << 18  # bytes; about 2 ms on the event loop
MOST_VALUES = 1 << 20  # lists, objects and strings: 100 bytes each, whatever they hold
MOST_DEPTH = 100  # what a group may have is checked there, and is less
MOST_BESIDES = 1 << 23  # bytes besides the rows of numbers: the longest that is read in one go
MOST_NUMBER = 32  # bytes of one number, comma and blanks included
Body = bytes | bytearray
_CUT = 1 << 12  # bytes from which a row of numbers is read by itself
_CHUNK = 1 << 18


class Bodies:
    """Reads what requests bring, and knows how much of it is held."""

    def __init__(self) -> None:
        self.held = 0
        self._less = anyio.Event()

    @contextmanager
    def counted(self) -> Iterator[Callable[[int], None]]:
        """Around a request: what it calls with its bytes, as often as they change. It raises Refused (503) where all together are
        far too much."""
        mine = 0

        def hold(size: int) -> None:
            nonlocal mine
            self.held, mine = self.held + size - mine, size
            if size and self.held > 2 * MOST_AT_ONCE:
                raise Refused(503, "too many requests wait for room in the ring; nothing was taken", state="full")

        try:
            yield hold
        finally:
            hold(0)
            self._less.set()
            self._less = anyio.Event()

    async def wait_for_room(self, seconds: float) -> None:
        """Errors: Refused (503) where there is none in this time."""
        with anyio.move_on_after(seconds):
            while self.held >= MOST_AT_ONCE:
                await self._less.wait()
            return
        raise Refused(503, "too many requests wait for room in the ring; nothing was taken", state="full")


async def receive(request: web.Request, most: int, hold: Callable[[int], None] = lambda size: None) -> Body:
    """The body as it was sent. Errors: Refused where it is too long (413), too slow (408) or cut off (400)."""
    parts = bytearray()
    if (request.content_length or 0) > most:
        raise _too_long(most)
    try:
        with anyio.fail_after(BODY_S) as scope:
            while part := await request.content.readany():
                parts += part
                scope.deadline += len(part) / BODY_PACE
                if len(parts) > most:
                    raise _too_long(most)
                hold(len(parts))
    except TimeoutError:
        raise Refused(408, f"the body was too slow: {BODY_S:g} s, and a second for each {BODY_PACE:,} bytes") from None
    except Unreadable as error:
        raise Refused(400, f"the body is not what its headers say: {error}") from error
    return parts  # not copied: 128 MiB would hold the loop for a tenth of a second


def unpack(body: Body, encoding: str, most: int = MOST_BYTES) -> Body:
    """Errors: Refused: it is not what it says (400), of an unknown encoding (415), or has more than `most` bytes (413)."""
    if encoding.lower() in ("", "identity"):
        return body
    if encoding.lower() not in ("gzip", "x-gzip"):
        raise Refused(415, f"Content-Encoding {encoding[:100]!r} is unknown here; use gzip or none")
    unpacker = zlib.decompressobj(wbits=31)
    try:
        unpacked = unpacker.decompress(body, most)
        if not unpacker.eof and unpacker.decompress(unpacker.unconsumed_tail, 1):
            raise _too_long(most)
    except zlib.error as error:
        raise Refused(400, f"the body is no gzip: {error}") from error
    if not unpacker.eof:
        raise Refused(400, "the gzip body is cut off")
    return unpacked


def _too_long(most: int) -> Refused:
    return Refused(413, f"the body has more than {most:,} bytes, unpacked; send fewer groups in one request")


def read_json(body: Body, longest: int | None) -> Any:
    """`longest`: numbers in a row of a group. Errors: Refused: no JSON (400), or more of it than there may be (413, 400)."""
    structure = _structure(body)
    start = re.compile(rb"[ \t\r\n]*").match(body)
    level = (
        4 if body[(head := start.end() if start else 0) : head + 1] == b"[" else 3
    )  # of a row, by the brackets around its numbers
    most = MOST_NUMBER * (longest or MOST_BYTES) + _CUT
    cuts: list[tuple[int, int]] = []
    marker, besides, at = secrets.token_hex(8), [], 0
    for first, end in _rows(structure, level):
        if end - first > most:
            raise Refused(413, f"a row of numbers has {end - first:,} bytes; the run takes at most {longest} tokens")
        besides += [body[at:first], f'"{marker}{len(cuts)}"'.encode()]
        cuts.append((first, end))
        at = end
    besides.append(body[at:])
    if sum(map(len, besides)) > MOST_BESIDES:
        raise Refused(413, f"there are more than {MOST_BESIDES:,} bytes besides the rows of numbers; send fewer groups")
    try:
        payload = orjson.loads(b"".join(besides))
        left = {f"{marker}{i}": span for i, span in enumerate(cuts)}
        if left:
            _fill(payload, level - 2, left, memoryview(body))
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"the body is no JSON (NaN and Infinity are none): {error}") from error
    if left:
        raise Refused(400, "the body is no JSON, or an object in it has one name twice")
    return payload


def _fill(value: Any, levels: int, left: dict[str, tuple[int, int]], body: memoryview) -> None:
    """Puts the rows back that were cut out, so many levels below. Errors: orjson.JSONDecodeError."""
    if not isinstance(value, list | dict):
        return
    for key, below in value.items() if isinstance(value, dict) else enumerate(value):
        if levels:
            _fill(below, levels - 1, left, body)
        elif isinstance(below, str) and (span := left.pop(below, None)) is not None:
            value[key] = orjson.loads(body[slice(*span)])


@dataclass(frozen=True, slots=True)
class _Structure:
    """The brackets of a body that stand outside of strings, in order."""

    at: npt.NDArray[np.int64]
    opens: npt.NDArray[np.bool_]
    depth: npt.NDArray[np.int64]  # behind it
    quotes: npt.NDArray[np.int64]  # before it


def _rows(structure: _Structure, level: int) -> list[tuple[int, int]]:
    """Where the long lists of numbers are that stand `level` deep: (first byte, behind the last)."""
    at, opens, quotes = structure.at, structure.opens, structure.quotes
    leaf = opens[:-1] & ~opens[1:] & (structure.depth[:-1] == level) & (quotes[:-1] == quotes[1:])
    found = np.flatnonzero(leaf & (np.diff(at) >= _CUT))
    return list(zip(at[found].tolist(), (at[found + 1] + 1).tolist(), strict=True))


def _structure(body: Body) -> _Structure:
    """Errors: Refused where it would make more objects (413), or deeper ones (400), than a group has."""
    at, opens, before = [], [], []
    quotes = values = start = 0
    while start < len(body):
        chunk = body[start : start + _CHUNK]
        if chunk.endswith(b"\\") and (len(chunk) - len(chunk.rstrip(b"\\"))) % 2:
            chunk = body[start : start + len(chunk) + 1]  # what it escapes belongs to it
        # Pairs of backslashes first: what is left before a quote escapes it. The length stays.
        text = np.frombuffer(chunk.replace(b"\\\\", b"__").replace(b'\\"', b"__"), np.uint8)
        counts = np.cumsum(text == ord('"'), dtype=np.int64) + quotes
        kinds = text | 0x20  # [ is { then, and ] is }
        found = np.flatnonzero((kinds == ord("{")) | (kinds == ord("}")))
        found = found[counts[found] % 2 == 0]
        opening = kinds[found] == ord("{")
        at.append(found + start)
        opens.append(opening)
        before.append(counts[found])
        values += (found.size + int(counts[-1]) - quotes) // 2  # both come in pairs
        if values > MOST_VALUES:
            raise Refused(413, f"the body has more than {MOST_VALUES:,} lists, objects and strings; send fewer groups")
        quotes = int(counts[-1])
        start += len(chunk)
    is_open = np.concatenate([*opens, np.zeros(0, np.bool_)])
    depth = np.cumsum(np.where(is_open, 1, -1))
    if depth.max(initial=0) > MOST_DEPTH:
        raise Refused(400, f"the body is nested more than {MOST_DEPTH} levels deep")
    empty = np.zeros(0, np.int64)
    return _Structure(np.concatenate([*at, empty]), is_open, depth, np.concatenate([*before, empty]))
