"""Output for people: text that cannot be written is dropped. Reward workers import this file: use the standard library only."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

# EPIPE: the reader of the pipe has ended (`| head`). EIO: the terminal was closed.
_READER_GONE = (errno.EPIPE, errno.EIO)


class LossyStream:
    """Wraps a text stream. Writes do not raise if the reader is gone or the disk is full. Characters that the encoding lacks are
    replaced."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write or drop `text`. Returns the length of `text` in both cases."""
        try:
            self._stream.write(text)
        except UnicodeEncodeError as error:
            # The error may name the codec "charmap", which knows other characters.
            encoding = self._stream.encoding or error.encoding
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._drop_if_reader_gone(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush. Raises no error. If the reader is gone, the buffered text is dropped. After other errors the text is kept."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._drop_if_reader_gone(error)

    def flush_last(self) -> None:
        """Flush; after an error drop the buffered text. Text that stays in the buffer makes the interpreter exit with code 120."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._redirect_to_null()
            self.flush()

    def _drop_if_reader_gone(self, error: Exception) -> None:
        if isinstance(error, OSError) and error.errno in _READER_GONE:
            self._redirect_to_null()

    def _redirect_to_null(self) -> None:
        """Redirect the file descriptor to /dev/null, because each later flush would fail again. C code and child processes then
        write to /dev/null, too."""
        with contextlib.suppress(OSError, ValueError):
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_standard_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that was closed when this process started. Without this call the next
    opened files would get the descriptors 0 to 2. Children would write into these files. libuv aborts if it closes such a file."""
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return
    # `os.open` returns the lowest free descriptor.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
        name = ("stdin", "stdout", "stderr")[descriptor]
        stream = os.fdopen(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.close(descriptor)


@contextlib.contextmanager
def lossy_output() -> Iterator[None]:
    """Make stdout and stderr lossy inside the block. Only for programs of asyncrl, because it changes the whole process."""
    open_standard_streams()
    originals = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream if stream is None else LossyStream(stream) for stream in originals)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, LossyStream):
                stream.flush_last()
        sys.stdout, sys.stderr = originals


def print_early(text: str) -> None:
    """Print a line on stderr, if this is rank 0 and torch is not imported yet. The import takes seconds without any output."""
    if "torch" not in sys.modules and os.environ.get("RANK", "0") == "0":
        print(f"asyncrl: {text}", file=sys.stderr, flush=True)
