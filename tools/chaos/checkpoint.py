"""Bit rot: flips one bit at a time in every file of a checkpoint, and counts what loads all the same.

    python tools/chaos checkpoint                          # of two steps of the quickstart, 60 places in each file
    python tools/chaos checkpoint --flips 2000 runs/mine   # of the newest checkpoint of a run (a copy is attacked)

Besides, every file is cut by its last byte, and removed. Loading is what `resume=true` does: the newest checkpoint, with all of
its state. Prints a table; exits 1 where anything loaded, or where the error does not name the file.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from commands import EXAMPLES, table

from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.errors import CheckpointError
from asyncrl.main import main as run


@dataclass
class Outcome:
    """Of one file."""

    places: int = 0
    loaded: int = 0  # although it was damaged
    unnamed: int = 0  # refused, by an error that does not name the file


def attack(checkpoint: Path, flips: int, seed: int = 0) -> dict[str, Outcome]:
    """By file. The checkpoint (a directory `step_N`, alone with its `latest` or the newest beside others) is as before after it."""
    chance = random.Random(seed)
    found = {}
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        name = path.relative_to(checkpoint).as_posix()
        outcome = found[name] = Outcome()
        content = path.read_bytes()
        try:
            for _ in range(flips):
                damaged = bytearray(content)
                damaged[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
                path.write_bytes(damaged)
                judge(checkpoint, name, outcome)
            path.write_bytes(content[:-1])
            judge(checkpoint, name, outcome)
            path.unlink()
            judge(checkpoint, name, outcome)
        finally:
            path.write_bytes(content)
    return found


def judge(checkpoint: Path, name: str, outcome: Outcome) -> None:
    outcome.places += 1
    try:
        loaded = CheckpointStore(checkpoint.parent).load_latest()
        assert loaded is not None and loaded.path == checkpoint
        loaded.trainer()
        outcome.loaded += 1
    except CheckpointError as error:
        outcome.unnamed += name not in str(error)


def copy_of(run: Path, folder: Path) -> Path:
    store = CheckpointStore(run / "checkpoints")
    version = store.latest_version()
    if version is None:
        sys.exit(f"there is no checkpoint in {store.directory}")
    return Path(shutil.copytree(store.path(version), folder / f"step_{version}"))


def small_run(folder: Path) -> Path:
    """Two steps of the quickstart."""
    settings = [f"run.dir={folder}", "train.max_steps=2", "telemetry.live=off"]
    if code := run([str(EXAMPLES / "quickstart.yaml"), *settings]):
        sys.exit(code)
    return folder / "quickstart"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", type=Path, help="a run directory; default: two steps of the quickstart")
    parser.add_argument("--flips", type=int, default=60, help="places in each file")
    parser.add_argument("--seed", type=int, default=0)


def main(given: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        found = attack(copy_of(given.run or small_run(place), place), given.flips, given.seed)
    rows = ((name, each.places, each.loaded, each.unnamed) for name, each in found.items())
    print("\n".join(table(("file", "attacked", "loaded", "file not named"), rows)))
    return 1 if any(each.loaded or each.unnamed for each in found.values()) else 0
