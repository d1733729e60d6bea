"""Text for people: where it cannot be written it is dropped. Standard library only (reward workers import it)."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

# `| head`, a `tee` that was stopped; a terminal that was closed.
_NOBODY_READS = (errno.EPIPE, errno.EIO)


class Lossy:
    """A text stream around another one that raises neither where nobody reads any more, nor where a disk is full, nor for
    characters that its encoding lacks (those are replaced)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or drop. The length of `text` in either case."""
        try:
            self._stream.write(text)
        except UnicodeEncodeError as error:
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(text.encode(error.encoding, "replace").decode(error.encoding))
        except (OSError, ValueError) as error:  # ValueError: closed
            self._give_up(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush, or drop what was buffered if nobody reads any more."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._give_up(error)

    def flush_last(self) -> None:
        """Flush, or drop what was buffered. The interpreter flushes again at its exit, and makes a failure exit code 120."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._lead_nowhere()
            self.flush()

    def _give_up(self, error: Exception) -> None:
        if isinstance(error, OSError) and error.errno in _NOBODY_READS:
            self._lead_nowhere()

    def _lead_nowhere(self) -> None:
        """Lead what is buffered, and what C code or children write, to /dev/null: else each later flush fails again."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_standard_streams() -> None:
    """stdin, stdout and stderr that were closed when this process started lead nowhere from now on. Else what is opened next gets
    their numbers: libuv aborts the process when it closes one of them, and children write into it."""
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
        name = ("stdin", "stdout", "stderr")[descriptor]
        stream = os.fdopen(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.close(descriptor)


@contextlib.contextmanager
def lossy_output() -> Iterator[None]:
    """stdout and stderr of this process, inside. For programs of ours, not inside of somebody else's."""
    open_standard_streams()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream if stream is None else Lossy(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, Lossy):
                stream.flush_last()
        sys.stdout, sys.stderr = before


def say_early(text: str) -> None:
    """A line of the first rank on what takes seconds because it imports torch. Where torch is imported already, nothing."""
    if "torch" not in sys.modules and os.environ.get("RANK", "0") == "0":
        print(f"asyncrl: {text}", file=sys.stderr, flush=True)
