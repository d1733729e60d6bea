"""Checkpoints in a directory: written aside, made durable, renamed into place, old ones removed last.

    checkpoints/
      step_40/                 model and tokenizer in Hugging Face form (`from_pretrained` takes it as it is)
        state/trainer.pt       optimizer, schedule, random state          (state.py)
        state/run.json         version, turn, prompt cursor, counters, configuration
        state/shard_1.pt       the part of rank 1, where the model is cut (shards.py)
        state/manifest.json    size and SHA-256 of every file, compared before any is read (manifest.py)
      latest -> step_40        what a resume goes on from
      .tmp-...                 a save in progress, or what a killed one left: ignored, removed by the next save

Guarantees
- a directory named `step_N` is whole, at every moment and after a kill or a power cut;
- a save that fails (full disk, no permission, a writer that raises) changes nothing but its own temporary directory,
  which it removes, and raises `CheckpointError` with the path and the cause;
- of a file that is not what was written nothing is used: a load names it, and the newest earlier checkpoint that is whole;
- checkpoints are removed only after a newer one is in place, and never the one that `latest` names.

One process writes a store at a time; within it saves take turns.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.concurrency.offload import offload
from asyncrl.errors import CheckpointError

from .atomic import point_at, put_in_place, remove_tree, sync_directory, sync_tree
from .manifest import MANIFEST, STATE, compare, write_manifest
from .shards import joined
from .state import Writer, read_run, read_trainer

LATEST = "latest"
_STEP = re.compile(r"step_(0|[1-9][0-9]*)")
_TEMPORARY = ".tmp-"


@dataclass(frozen=True, slots=True)
class Saved:
    """What a save did."""

    version: int
    path: Path
    files: int  # the manifest included
    bytes: int
    removed: tuple[int, ...] = ()  # versions that retention removed
    # Old directories that could not be removed, and why; the save is complete.
    not_removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk; `path` is what `from_pretrained` takes."""

    version: int
    path: Path
    run: dict[str, Any]  # run.json; empty where the save wrote none
    verified: bool  # every byte; False: its manifest has sizes alone

    def trainer(self) -> dict[str, Any]:
        """The dictionary of trainer.pt, tensors on the host (blocking; large), with the parts of other ranks where it was cut.
        Errors: `CheckpointError`."""
        return joined(self.path, read_trainer(self.path))


class CheckpointStore:
    """`keep`: checkpoints kept, the newest; 0 keeps all."""

    def __init__(self, directory: str | os.PathLike[str], keep: int = 2) -> None:
        if keep < 0:
            raise CheckpointError(f"keep is {keep}; expected 0 (all) or more")
        self.directory = Path(directory)
        self._keep = keep
        self._turn = threading.Lock()

    def path(self, version: int) -> Path:
        """Where the checkpoint of this version lies, or would lie."""
        return self.directory / f"step_{version}"

    def versions(self) -> list[int]:
        """Versions of the whole checkpoints here, ascending."""
        try:
            names = [entry.name for entry in os.scandir(self.directory) if entry.is_dir(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be read: {error}") from error
        return sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))

    def latest_version(self) -> int | None:
        """The version that `latest` names; the highest one where the link is missing or names nothing; None if "
        "empty."""
        versions = self.versions()
        with contextlib.suppress(OSError):
            match = _STEP.fullmatch(os.readlink(self.directory / LATEST))
            if match and int(match[1]) in versions:
                return int(match[1])
        return versions[-1] if versions else None

    def save(self, version: int, *writers: Writer) -> Saved:
        """Write a checkpoint: each of `writers` puts its files into the temporary directory it is given. Blocks.

        Saving a version again replaces it. Errors: `CheckpointError`; earlier checkpoints are as they were.
        """
        with self._turn:
            token = f"{os.getpid()}-{os.urandom(4).hex()}"
            temporary = self.directory / f"{_TEMPORARY}step_{version}-{token}"
            aside = self.directory / f"{_TEMPORARY}old-{token}"
            what = "create"
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._remove_leftovers()
                temporary.mkdir()
                what = "write"
                digests: dict[str, str] = {}
                for writer in writers:
                    digests.update(writer(temporary) or {})
                sizes = _finish(temporary, digests)
                what = "rename into place"
                put_in_place(temporary, self.path(version), aside)
                what = f"point {self.directory / LATEST} at"
                point_at(self.directory / LATEST, f"step_{version}", self.directory / f"{_TEMPORARY}{LATEST}-{token}")
            except BaseException as error:
                failure = self._failure(what, version, error) if isinstance(error, Exception) else None
                self._clean(temporary)  # after the message, which tells how full the disk was
                if failure is not None:
                    raise failure from error
                raise
            removed, not_removed = self._retain(version, aside)
        return Saved(version, self.path(version), len(sizes), sum(sizes.values()), removed, not_removed)

    async def save_in_thread(self, version: int, *writers: Writer) -> Saved:
        """`save` on a thread of its own. The writers must own what they write (host copies).

        A cancelled caller waits until the write ended, then the cancellation goes on; a failed write is raised first.
        """
        return await offload(lambda: self.save(version, *writers), "checkpoint")

    def load(self, version: int) -> Checkpoint:
        """The checkpoint of one version, every file compared with the manifest. Errors: `CheckpointError`."""
        path = self.path(version)
        if not path.is_dir():
            found = ", ".join(map(str, self.versions())) or "none"
            raise CheckpointError(f"there is no checkpoint {path}; versions found in {self.directory}: {found}")
        compared = compare(path)
        if compared.faults:
            whole = (v for v in reversed(self.versions()) if v < version and not compare(self.path(v)).faults)
            raise CheckpointError(f"the checkpoint {path} is {compared}; {self.way_out(next(whole, None))}")
        run = read_run(path) if (path / STATE / "run.json").exists() else {}
        return Checkpoint(version, path, run, compared.has_checksums)

    def load_latest(self) -> Checkpoint | None:
        """The checkpoint that `latest` names, or None where there is none at all. Errors: `CheckpointError`."""
        version = self.latest_version()
        return None if version is None else self.load(version)

    def way_out(self, earlier: int | None) -> str:
        """How a run goes on from this version, which is whole, where the one that `latest` names is not."""
        if earlier is None:
            return "no earlier one here is whole; run.overwrite=true starts anew"
        link = shlex.quote(str(self.directory / LATEST))
        return f"step_{earlier} is whole: `ln -sfn step_{earlier} {link}`, and resume=true goes on from there"

    def _failure(self, what: str, version: int, error: Exception) -> CheckpointError:
        place = self.path(version)
        free = earlier = ""
        with contextlib.suppress(OSError, CheckpointError):  # `error` is what counts
            free = f" ({shutil.disk_usage(self.directory).free / 2**20:.1f} MiB free there)"
            kept = self.latest_version()
            earlier = "; there is no earlier one" if kept is None else f"; step_{kept} is there"
        reason = " after ".join(f"{type(e).__name__}: {e}" for e in (error, _root(error)) if e is not None)
        return CheckpointError(f"could not {what} the checkpoint {place}: {reason}{free}{earlier}")

    def _remove_leftovers(self) -> None:
        """Temporary directories and links of killed saves. Those of a live one cannot be here: saves take turns."""
        for entry in list(os.scandir(self.directory)):
            if entry.name.startswith(_TEMPORARY):
                remove_tree(Path(entry.path))

    def _clean(self, temporary: Path) -> None:
        # The error under way matters more than one of cleaning up; the next save removes what stays.
        with contextlib.suppress(OSError):
            remove_tree(temporary)

    def _retain(self, version: int, aside: Path) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Remove what was replaced and all but the newest `keep`. Failures are reported, not raised: the save stands.

        Higher versions than the one just written belong to a future that was given up; they do not count and stay.
        """
        try:
            older = [v for v in self.versions() if v <= version]
        except CheckpointError as error:
            return (), (str(error),)
        doomed = [v for v in older[: -self._keep] if v != version] if self._keep else []
        # A directory of that name without a manifest was put there by somebody else.
        doomed = [v for v in doomed if (self.path(v) / MANIFEST).exists()]
        removed, not_removed = [], []
        for number in [None, *doomed]:
            path = aside if number is None else self.path(number)
            try:
                if number is not None:
                    hidden = self.directory / f"{_TEMPORARY}gone-{number}-{os.urandom(4).hex()}"
                    os.rename(path, hidden)  # a kill in the middle of the removal leaves no half step_N
                    path = hidden
                    removed.append(number)
                remove_tree(path)
            except OSError as error:
                not_removed.append(f"{path}: {error}")
        with contextlib.suppress(OSError):
            sync_directory(self.directory)
        return tuple(removed), tuple(not_removed)


def _root(error: BaseException) -> OSError | None:
    """The operating system's error behind another one; torch.save raises an unrelated one while it cleans up."""
    behind = error.__cause__ or error.__context__
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__cause__ or behind.__context__
    return None if isinstance(error, OSError) else behind


def require_whole_model(directory: Path, setting: str) -> None:
    """What a run starts from, where that is one of our checkpoints: model and tokenizer against the manifest.

    `setting`: what names the directory. Errors: `CheckpointError`.
    """
    place = directory.resolve()  # it may be `latest`
    if not (place / MANIFEST).exists():
        return
    found = compare(place, state=False)
    if found.faults:
        raise CheckpointError(
            f"{setting}: the checkpoint {directory} is {found}; name another one (`asyncrl check {shlex.quote(str(place.parent))}` "
            f"says which are whole). If it was changed on purpose, remove its {MANIFEST}"
        )


def _finish(directory: Path, digests: Mapping[str, str]) -> dict[str, int]:
    """Make everything durable and write the manifest; sizes of all files, the manifest included."""
    sizes = sync_tree(directory)
    manifest = write_manifest(directory, sizes, digests)
    sync_directory(directory / STATE)
    sync_directory(directory)
    return {**sizes, MANIFEST: manifest}
