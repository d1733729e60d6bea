"""`asyncrl check RUN`: whether the checkpoints of a run are what was written. The run may be alive: nothing is locked."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = """\
asyncrl check RUN: compare every file of every checkpoint with its size and SHA-256; a line each. RUN is a run directory
(`runs/NAME`, or NAME for short) or one checkpoint (`runs/NAME/checkpoints/step_N`, or `latest` there). It may be alive.
Exit codes: 0, 5 where a checkpoint is damaged, 2 where there is no such run or checkpoint.
"""
WHOLE, DAMAGED, GONE = "whole", "damaged", "removed meanwhile"


def main(arguments: Sequence[str]) -> int:
    """One line for each checkpoint. Returns the exit code: 0, 5 where one is damaged, 2 where there is nothing to check."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(USAGE, end="")
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2

    from asyncrl.errors import CheckpointError

    given = Path(arguments[0])
    place = next((path for path in (given, "runs" / given) if path.is_dir()), None)
    try:
        if place is not None and (place / "checkpoints").is_dir():
            return _check_all(place / "checkpoints")
        if place is not None and _is_checkpoint(place.resolve()):
            return CheckpointError.exit_code if _check(place.resolve()) == DAMAGED else 0
        if place is not None and any(place.glob("step_*")):
            return _check_all(place)
    except (CheckpointError, OSError) as error:
        print(f"asyncrl check: {error}", file=sys.stderr)
        return CheckpointError.exit_code
    print(f"asyncrl check: {given} is neither a run directory nor a checkpoint of one (step_N)", file=sys.stderr)
    return 2


def _check_all(directory: Path) -> int:
    from asyncrl.checkpoint.store import CheckpointStore
    from asyncrl.errors import CheckpointError

    store = CheckpointStore(directory)
    versions = store.versions()
    if not versions:
        print(f"{directory}: no checkpoint yet")
    found = {version: _check(store.path(version)) for version in versions}
    latest = store.latest_version()
    if latest is not None and found.get(latest) == DAMAGED:
        earlier = [version for version in versions if version < latest and found[version] == WHOLE]
        print(f"resume=true would go on from step_{latest}; {store.way_out(earlier[-1] if earlier else None)}")
    return CheckpointError.exit_code if DAMAGED in found.values() else 0


def _check(checkpoint: Path) -> str:
    """Says what it finds, too."""
    from asyncrl.checkpoint.manifest import compare_alive

    compared = compare_alive(checkpoint)
    print(f"{checkpoint}: {compared or GONE}", flush=True)
    return GONE if compared is None else DAMAGED if compared.faults else WHOLE


def _is_checkpoint(place: Path) -> bool:
    return re.fullmatch(r"step_\d+", place.name) is not None or (place / "state" / "manifest.json").exists()
