"""`asyncrl check RUN`: compares the files of checkpoints with recorded sizes and checksums. Takes no lock: the run may be alive."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = """\
asyncrl check RUN: compare the files of each checkpoint with sizes and SHA-256 in its manifest. Prints a line per checkpoint.
RUN is a run directory (`runs/NAME`, or NAME for short) or a checkpoint (`runs/NAME/checkpoints/step_N`). The run may be alive.
Exit codes: 0, 5 if a checkpoint is damaged or cannot be read, 2 for wrong arguments.
"""
INTACT, DAMAGED, REMOVED = "intact", "damaged", "removed meanwhile"


def main(arguments: Sequence[str]) -> int:
    """Print one line per checkpoint. Returns the exit code, see `USAGE`."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(USAGE, end="")
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2

    from asyncrl.errors import CheckpointError

    name = Path(arguments[0])
    directory = next((path for path in (name, "runs" / name) if path.is_dir()), None)
    try:
        if directory is not None and (directory / "checkpoints").is_dir():
            return _check_all(directory / "checkpoints")
        checkpoint = directory and directory.resolve()
        if checkpoint and (
            re.match(r"step_\d+$", checkpoint.name) or (checkpoint / "state" / "manifest.json").exists()
        ):
            return CheckpointError.exit_code if _check(checkpoint) == DAMAGED else 0
        if directory is not None and any(directory.glob("step_*")):
            return _check_all(directory)
    except (CheckpointError, OSError) as error:
        print(f"asyncrl check: {error}", file=sys.stderr)
        return CheckpointError.exit_code
    print(f"asyncrl check: {name} is neither a run directory nor a checkpoint (step_N) of a run", file=sys.stderr)
    return 2


def _check_all(directory: Path) -> int:
    from asyncrl.checkpoint.store import CheckpointStore
    from asyncrl.errors import CheckpointError

    store = CheckpointStore(directory)
    versions = store.versions()
    if not versions:
        print(f"{directory}: no checkpoint yet")
    results = {version: _check(store.path(version)) for version in versions}
    latest = store.latest_version()
    if latest is not None and results.get(latest) == DAMAGED:
        earlier = [version for version in versions if version < latest and results[version] == INTACT]
        print(f"resume=true fails: step_{latest} is damaged; {store.resume_advice(earlier[-1] if earlier else None)}")
    return CheckpointError.exit_code if DAMAGED in results.values() else 0


def _check(checkpoint: Path) -> str:
    """Compare one checkpoint and print its line. Returns INTACT, DAMAGED, or REMOVED if the run has just deleted it."""
    from asyncrl.checkpoint.manifest import compare_during_run

    comparison = compare_during_run(checkpoint)
    print(f"{checkpoint}: {comparison or REMOVED}", flush=True)
    if comparison is None:
        return REMOVED
    return DAMAGED if comparison.faults else INTACT
