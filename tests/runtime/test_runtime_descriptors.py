"""Without a free descriptor: the start says so, the last checkpoint is written from the reserve, and the first error comes out."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_helpers import DRY, config_of, write_yaml

from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.concurrency.offload import offload
from asyncrl.errors import CheckpointError, LifecycleError
from asyncrl.main import main
from asyncrl.runtime.runtime import Runtime


@contextlib.contextmanager
def at_most(free: int) -> Iterator[None]:
    """So many descriptors beside those that are open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each) for each in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + free, hard))
    try:
        with eaten(free):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def eaten(left: int = 0) -> Iterator[None]:
    held: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(left):
            os.close(held.pop())
        yield
    finally:
        for each in held:
            os.close(each)


@pytest.mark.parametrize("free", [0, 3, 12])
def test_the_start_says_what_is_missing_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free: int
) -> None:
    monkeypatch.chdir(tmp_path)
    file = str(write_yaml(tmp_path, DRY))
    with at_most(free):
        assert main([file]) == 2
    said = capsys.readouterr().err
    assert "oo many open files" in said and "`ulimit -n 4096`" in said and "Traceback" not in said


class Planted(Exception):
    pass


@pytest.mark.parametrize(("settings", "ends"), [((), Planted), (("checkpoint.every=1",), CheckpointError)])
async def test_the_last_checkpoint_has_descriptors_of_its_own(
    tmp_path: Path, settings: tuple[str, ...], ends: type[Exception]
) -> None:
    with pytest.raises(ends) as caught, contextlib.ExitStack() as stack:
        async with Runtime(config_of(tmp_path, "train.max_steps=100", *settings)) as runtime:

            async def use_up() -> None:
                async for report in steps:
                    if report.version == 2:
                        await offload(lambda: stack.enter_context(at_most(0)), "leak")
                    elif report.version == 5:
                        raise Planted

            steps = runtime.steps()
            runtime.start("a leak", use_up)
            await runtime.run()
    assert caught.value.__notes__[0] == ("in a leak" if ends is Planted else "in checkpoint")
    assert ends is Planted or "`ulimit -n 4096`" in caught.value.__notes__[-1]
    assert CheckpointStore(tmp_path / "runs/run/checkpoints").latest_version() == runtime.version >= 2


async def test_what_closing_raises_is_a_note_of_the_error_that_ended_the_run(tmp_path: Path) -> None:
    mine = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        async with Runtime(config_of(tmp_path, base=DRY)) as runtime:
            closed = runtime.built.lanes[0].aclose

            async def fails() -> None:
                await closed()
                raise LifecycleError("the lane did not close")

            runtime.built.lanes[0].aclose = fails
            raise mine
    assert caught.value is mine and mine.__notes__ == ["and at the end: LifecycleError: the lane did not close"]
