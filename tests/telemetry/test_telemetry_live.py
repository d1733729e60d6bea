"""The live view inside of somebody else's program: what cannot be written raises nothing."""

from __future__ import annotations

import io
import os
import pty

from asyncrl.telemetry.live import LiveView


def test_a_pipe_that_nobody_reads() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stream, LiveView("plain", 3, stream=stream) as view:
        for version in range(3):
            view.step(version, {"loss": 1.0})
            view.note("a note")


def test_a_terminal_that_is_closed() -> None:
    master, slave = pty.openpty()
    with open(slave, "w") as stream, LiveView("auto", 3, stream=stream) as view:
        os.close(master)
        for version in range(3):
            view.step(version, {"loss": 1.0})
            view.note("a note")


def test_a_stream_that_is_closed_and_one_that_lacks_characters() -> None:
    closed = io.StringIO()
    closed.close()
    with LiveView("plain", stream=closed) as view:
        view.note("nobody")
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with LiveView("plain", stream=narrow) as view:
        view.step(1, {"reward/mean": 0.5, "reward/std": 0.25, "own/turns": 3})
    assert "reward 0.500?0.250  own/turns 3.000" in narrow.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
