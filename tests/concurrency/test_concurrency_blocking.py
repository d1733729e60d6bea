"""blockbuster is on in the tests of every room: what blocks is an error where asyncrl calls it in an event loop, and only there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from blockbuster import BlockingError

import asyncrl
from asyncrl.telemetry.sinks import discard_after


@pytest.fixture
def sleeps() -> Callable[[], None]:
    """As if a module of asyncrl had it."""
    names: dict[str, Callable[[], None]] = {}
    file = str(Path(asyncrl.__file__).with_name("concurrency") / "new.py")
    exec(compile("import time\ndef sleeps():\n    time.sleep(0)", file, "exec"), names)
    return names["sleeps"]


async def test_a_sleep_in_the_loop_is_an_error(sleeps: Callable[[], None], nothing_blocks: list[str]) -> None:
    with pytest.raises(BlockingError, match=r"time\.sleep"):
        sleeps()
    assert len(nothing_blocks) == 1  # whoever caught it: it fails the test at its end
    assert nothing_blocks.pop().startswith("time.sleep in ")
    await asyncio.to_thread(sleeps)
    time.sleep(0)  # noqa: ASYNC251 - of the test itself, not of asyncrl


async def test_a_file_that_is_read_in_the_loop_is_an_error(tmp_path: Path, nothing_blocks: list[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    with pytest.raises(BlockingError, match=r"os\.stat"):
        discard_after(path, 1)
    nothing_blocks.clear()
    assert await asyncio.to_thread(discard_after, path, 1) == 0
