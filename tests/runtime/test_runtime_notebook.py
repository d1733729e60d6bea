"""A Runtime that one cell opens and another one closes, in a real kernel, as the documentation says."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from runtime_helpers import DRY, ROOT, embedded, feed
from support.pages import blocks

from asyncrl import NotebookRuntime
from asyncrl.errors import AsyncrlError, LifecycleError

PLAYER = """
import json, sys
import nbformat
from nbclient import NotebookClient

cells = json.load(sys.stdin)
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
json.dump(["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells], sys.stdout)
"""


def play(cells: list[str]) -> list[str]:
    """What each cell printed. A kernel of its own runs them, one after the other, each as a task of its own."""
    import json

    done = subprocess.run(
        [sys.executable, "-c", PLAYER], cwd=ROOT, input=json.dumps(cells), text=True, capture_output=True, timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "terminate called" not in done.stdout + done.stderr
    return list(json.loads(done.stdout))


@pytest.mark.slow
def test_the_cells_of_the_page_run_and_a_kernel_that_ends_with_another_runtime_open_ends_well() -> None:
    [block] = blocks("notebook")
    cells = re.split(r"^# .* cell$", block.text, flags=re.MULTILINE)[1:]
    assert len(cells) == 3
    opening = """
from asyncrl import NotebookRuntime, load_config
rt = await NotebookRuntime(load_config(["examples/agent_loop.yaml"]), write=False).open()
"""
    leaving = """
import asyncio, time
waiting = [asyncio.create_task(rt.generate("a9=", n=64)) for _ in range(8)]
await asyncio.sleep(0.3)
print("left")
"""
    _, trained, closed, _, left = play([*cells, opening, leaving])
    assert trained.strip() and closed.endswith("version 3\n") and left.endswith("left\n")


async def test_opened_and_closed_in_different_tasks(tmp_path: Path) -> None:
    runtime = NotebookRuntime(embedded(tmp_path, DRY), write=False)
    with pytest.raises(LifecycleError, match="was called before open"):
        await runtime.close()
    assert await asyncio.create_task(runtime.open()) is runtime
    with pytest.raises(LifecycleError, match="twice"):
        await runtime.open()
    await asyncio.create_task(feed(runtime, 3))
    await asyncio.create_task(runtime.close())
    assert runtime.summary().books.trained == 3
    await runtime.close()  # closing twice is fine


async def test_what_ends_the_training_is_said_at_once_and_raised_by_close(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = await NotebookRuntime(embedded(tmp_path, DRY), write=False).open()

    async def broken_publish(version: int) -> None:
        raise AsyncrlError("the disk is full")

    runtime.built.ports.sinks[0].update_weights = broken_publish  # type: ignore[method-assign]
    await feed(runtime, 2)
    assert runtime._holder is not None
    await asyncio.wait([runtime._holder])
    await asyncio.sleep(0)  # its callbacks
    assert "asyncrl: the training ended: AsyncrlError: the disk is full" in capsys.readouterr().err
    with pytest.raises(AsyncrlError, match="the disk is full"):
        await runtime.close()


async def test_a_configuration_that_cannot_open_is_told_by_open(tmp_path: Path) -> None:
    with pytest.raises(AsyncrlError, match="nowhere"):
        await NotebookRuntime(embedded(tmp_path, DRY, "rollout.environment=nowhere.py:Nothing"), write=False).open()


async def test_an_interrupted_opening_leaves_nothing(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    runtime = NotebookRuntime(embedded(tmp_path), write=False)
    opening = asyncio.create_task(runtime.open())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert asyncio.all_tasks() == before


def test_a_report_of_a_step_is_one_short_line(tmp_path: Path) -> None:
    async def program() -> str:
        runtime = await NotebookRuntime(embedded(tmp_path, DRY), write=False).open()
        steps = runtime.steps()
        await feed(runtime, 2)
        report = await anext(steps)
        await runtime.close()
        return repr(report)

    said = asyncio.run(program())
    assert re.match(r"StepReport\(version=1, reward=[\d.]+, loss=\S+, groups=2, tokens=\d+, metrics=\d+\)$", said), said
