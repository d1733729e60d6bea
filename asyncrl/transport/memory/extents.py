"""A first-fit allocator of extents: numbers only, it touches no memory. Its owner rebuilds it from what lies in shared memory."""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 64


class Extents:
    """Free extents of `size` bytes, kept sorted and merged; everything is rounded up to 64 bytes.

    First fit: low addresses are used again soonest, while they are still in the cache. The extent that was given back last is
    kept aside, for whoever asks for as much next.
    """

    def __init__(self, size: int) -> None:
        self.size = size & -ALIGNMENT
        self.used = 0
        self._aside: tuple[int, int] | None = None  # start, rounded size; free, and in neither list
        self._starts: list[int] = [0] if self.size else []
        self._sizes: list[int] = [self.size] if self.size else []

    @property
    def largest(self) -> int:
        """Bytes of the largest free extent."""
        self._merge()
        return max(self._sizes, default=0)

    def allocate(self, size: int) -> int | None:
        """The offset of `size` free bytes, now taken; None where no free extent is long enough."""
        size = _rounded(size)
        aside = self._aside
        if aside is not None and aside[1] == size:
            self._aside = None
            self.used += size
            return aside[0]
        self._merge()
        for index, free in enumerate(self._sizes):
            if free >= size:
                start = self._starts[index]
                self._cut(index, start, size)
                return start
        return None

    def reserve(self, start: int, size: int) -> bool:
        """Take exactly this extent (found in shared memory after a crash). False where it is not wholly free."""
        size = _rounded(size)
        self._merge()
        index = bisect_left(self._starts, start + 1) - 1
        if start % ALIGNMENT or index < 0 or start + size > self._starts[index] + self._sizes[index]:
            return False
        self._cut(index, start, size)
        return True

    def free(self, start: int, size: int) -> None:
        """Give back what `allocate` or `reserve` gave, in any order."""
        size = _rounded(size)
        if self._aside is not None:
            self._merge()
        starts = self._starts
        index = bisect_left(starts, start)
        before = index and starts[index - 1] + self._sizes[index - 1] > start
        if before or (index < len(starts) and start + size > starts[index]):
            raise AssertionError(f"extent {start}+{size} was given back twice")
        self.used -= size
        self._aside = (start, size)

    def _merge(self) -> None:
        """What is kept aside goes to the others."""
        if self._aside is None:
            return
        (start, size), self._aside = self._aside, None
        index = bisect_left(self._starts, start)
        self._starts.insert(index, start)
        self._sizes.insert(index, size)
        if index + 1 < len(self._starts) and start + size == self._starts[index + 1]:
            self._sizes[index] += self._sizes.pop(index + 1)
            self._starts.pop(index + 1)
        if index and self._starts[index - 1] + self._sizes[index - 1] == start:
            self._sizes[index - 1] += self._sizes.pop(index)
            self._starts.pop(index)

    def _cut(self, index: int, start: int, size: int) -> None:
        """Take `size` bytes at `start` out of free extent `index`; what is left before and behind stays free."""
        whole_start, whole_size = self._starts.pop(index), self._sizes.pop(index)
        self.used += size
        for left_start, left_end in ((start + size, whole_start + whole_size), (whole_start, start)):
            if left_end > left_start:
                self._starts.insert(index, left_start)
                self._sizes.insert(index, left_end - left_start)


def _rounded(size: int) -> int:
    return max(ALIGNMENT, (size + ALIGNMENT - 1) & -ALIGNMENT)
