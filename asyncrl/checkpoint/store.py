"""A directory of checkpoints. A save writes a temporary directory, fsyncs and renames it, and then removes old checkpoints.

    checkpoints/
      step_40/                 model and tokenizer of version 40 in Hugging Face format, for `from_pretrained`
        state/trainer.pt       masters (master weights), optimizer, step counts, reference model (state.py)
        state/run.json         version, turn, prompt cursors, untrained groups, replay buffers, configuration
        state/shard_1.pt       the rows of rank 1, if the model is sharded (shards.py)
        state/manifest.json    size and SHA-256 of every file; a load first checks all files (manifest.py)
      latest -> step_40        the checkpoint that a resume loads
      .tmp-...                 an unfinished save or removal; readers ignore the directory, and the next save removes it

Guarantees
- A directory with the name `step_N` is always complete, also after a kill or a power cut.
- A save that fails (full disk, no permission, a writer that raises) leaves earlier checkpoints unchanged, removes its temporary
  directory, and raises `CheckpointError` with the path and the cause. If only the change of `latest` failed, the new `step_N`
  stays, and the error says how to resume from `step_N`.
- A load of a damaged checkpoint raises. The error names the damaged files and the newest earlier checkpoint that is intact.
- A checkpoint is removed only after a newer checkpoint is in place. The checkpoint that `latest` names is never removed.

Only one process may write into a store. A lock runs the saves of that process one after another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from asyncrl.concurrency.offload import offload
from asyncrl.errors import CheckpointError

from .atomic import remove_tree, replace_directory, replace_link, sync_directory, sync_tree
from .manifest import MANIFEST, STATE, compare, write_manifest
from .shards import join_shards
from .state import TRAINER, Writer, read_tensors

logger = logging.getLogger("asyncrl.checkpoint")

LATEST = "latest"
_STEP = re.compile(r"step_(0|[1-9][0-9]*)")
_TEMPORARY = ".tmp-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk that was intact when it was loaded. `path` is a directory for `from_pretrained`."""

    version: int
    path: Path
    run: dict[str, Any]  # run.json; empty if there is no such file

    def trainer(self) -> dict[str, Any]:
        """The dictionary of trainer.pt with the rows of all ranks, tensors on the host. Blocks while it reads large files.
        Errors: `CheckpointError`."""
        return join_shards(self.path, read_tensors(self.path / STATE / TRAINER))


class CheckpointStore:
    """Saves and loads the checkpoints of one directory. A save removes all but the newest `keep` checkpoints; 0: removes none."""

    def __init__(self, directory: str | os.PathLike[str], keep: int = 2) -> None:
        self.directory = Path(directory)
        self._keep = keep
        self._save_lock = threading.Lock()

    def path(self, version: int) -> Path:
        """The directory of the checkpoint of this version, whether it exists or not."""
        return self.directory / f"step_{version}"

    def versions(self) -> list[int]:
        """Versions of the checkpoints in this directory, ascending, including damaged checkpoints."""
        try:
            names = [entry.name for entry in os.scandir(self.directory) if entry.is_dir(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be read: {error}") from error
        return sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))

    def latest_version(self) -> int | None:
        """The version that `latest` names; the highest version if this link is missing or broken; None without a checkpoint."""
        versions = self.versions()
        with contextlib.suppress(OSError):
            match = _STEP.fullmatch(os.readlink(self.directory / LATEST))
            if match and int(match[1]) in versions:
                return int(match[1])
        return versions[-1] if versions else None

    def save(self, version: int, *writers: Writer) -> None:
        """Write a checkpoint, and replace an older checkpoint of this version. Blocks. Each writer writes its files into the same
        temporary directory. Errors: `CheckpointError`; earlier checkpoints are unchanged."""
        with self._save_lock:
            token = f"{os.getpid()}-{os.urandom(4).hex()}"
            temporary = self.directory / f"{_TEMPORARY}step_{version}-{token}"
            replaced = self.directory / f"{_TEMPORARY}old-{token}"
            action = "create"
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._remove_leftovers()
                temporary.mkdir()
                action = "write"
                digests: dict[str, str] = {}
                for writer in writers:
                    digests.update(writer(temporary) or {})
                write_manifest(temporary, sync_tree(temporary), digests)
                sync_directory(temporary / STATE)
                sync_directory(temporary)
                action = "rename into place"
                replace_directory(temporary, self.path(version), replaced)
                action = f"point {self.directory / LATEST} at"
                replace_link(
                    self.directory / LATEST, f"step_{version}", self.directory / f"{_TEMPORARY}{LATEST}-{token}"
                )
            except BaseException as error:
                # Build the message before the cleanup, because the message reports the free space of the disk.
                failure = self._failure(action, version, error) if isinstance(error, Exception) else None
                # An error of the cleanup must not hide `error`. The next save removes the temporary directory.
                with contextlib.suppress(OSError):
                    remove_tree(temporary)
                if failure is not None:
                    raise failure from error
                raise
            self._remove_old(version, replaced)

    async def save_in_thread(self, version: int, *writers: Writer) -> None:
        """Run `save` on a new thread. The writers must own their tensors (host copies), because training continues.
        A cancelled caller waits until the save ends. An error of the save is raised instead of the cancellation."""
        await offload(lambda: self.save(version, *writers), "checkpoint")

    def load(self, version: int) -> Checkpoint:
        """The checkpoint of one version. Compares every file with the manifest. Errors: `CheckpointError`."""
        path = self.path(version)
        if not path.is_dir():
            found = ", ".join(map(str, self.versions())) or "none"
            raise CheckpointError(f"there is no checkpoint {path}; versions found in {self.directory}: {found}")
        comparison = compare(path)
        if comparison.faults:
            intact = (v for v in reversed(self.versions()) if v < version and not compare(self.path(v)).faults)
            raise CheckpointError(f"the checkpoint {path} is {comparison}; {self.resume_advice(next(intact, None))}")
        run = path / STATE / "run.json"
        return Checkpoint(version, path, orjson.loads(run.read_bytes()) if run.exists() else {})

    def load_latest(self) -> Checkpoint | None:
        """The checkpoint of `latest_version`, or None if the store is empty. Errors: `CheckpointError`."""
        version = self.latest_version()
        return None if version is None else self.load(version)

    def resume_advice(self, intact: int | None) -> str:
        """A text for the user: how to resume if `latest` names a damaged checkpoint, or does not name the newest checkpoint.
        `intact`: the version of the checkpoint to resume from; None if no checkpoint is intact."""
        if intact is None:
            return "no earlier checkpoint here is intact; run.overwrite=true starts the run anew"
        latest = self.directory / LATEST
        link = shlex.quote(str(latest))
        # If `latest` is a directory, `ln` would make the link inside of the directory.
        first = (
            f"remove the directory {link}, which must be a link, "
            if latest.is_dir() and not latest.is_symlink()
            else ""
        )
        return f"step_{intact} is intact: {first}run `ln -sfn step_{intact} {link}`, then resume=true continues from it"

    def _failure(self, action: str, version: int, error: Exception) -> CheckpointError:
        free = existing = ""
        with contextlib.suppress(OSError, CheckpointError):  # a second error would hide `error`
            free = f" ({shutil.disk_usage(self.directory).free / 2**20:.1f} MiB free on that disk)"
            latest = self.latest_version()
            existing = (
                "; the run has no checkpoint yet" if latest is None else f"; the latest checkpoint is step_{latest}"
            )
        if action.startswith("point"):
            existing += f"; {self.resume_advice(version)}"
        reason, cause = f"{type(error).__name__}: {error}", _root_cause(error)
        if cause is not None:
            reason += f" after {type(cause).__name__}: {cause}"
        return CheckpointError(f"could not {action} the checkpoint {self.path(version)}: {reason}{free}{existing}")

    def _remove_leftovers(self) -> None:
        """Remove temporary directories and links of killed saves. The caller must hold the lock: no other save may be running."""
        for entry in list(os.scandir(self.directory)):
            if entry.name.startswith(_TEMPORARY):
                remove_tree(Path(entry.path))

    def _remove_old(self, version: int, replaced: Path) -> None:
        """Remove the replaced directory and all but the newest `keep` checkpoints.

        Failures are logged and not raised, because the save itself has succeeded. Checkpoints above `version` stay, and do not
        count in `keep`: after a resume from an older checkpoint the run has not yet reached their versions again.
        """
        try:
            candidates = [v for v in self.versions() if v <= version]
        except CheckpointError as error:
            logger.warning("old checkpoints stay: %s", error)
            return
        outdated = [v for v in candidates[: -self._keep] if v != version] if self._keep else []
        # A user may have created a step_N without a manifest. Only asyncrl's checkpoints are removed.
        outdated = [v for v in outdated if (self.path(v) / MANIFEST).exists()]
        # None stands for the directory `replaced`, which already has a temporary name.
        for number in [None, *outdated]:
            path = replaced if number is None else self.path(number)
            try:
                if number is not None:
                    # Rename first, so that a kill in the middle of the removal does not leave an incomplete step_N.
                    renamed = self.directory / f"{_TEMPORARY}gone-{number}-{os.urandom(4).hex()}"
                    os.rename(path, renamed)
                    path = renamed
                remove_tree(path)
            except OSError as error:
                logger.warning("an old checkpoint could not be removed; remove %s by hand: %s", path, error)
        with contextlib.suppress(OSError):
            sync_directory(self.directory)


def _root_cause(error: BaseException) -> OSError | None:
    """The `OSError` that caused `error`: torch.save raises another error on a full disk. None if `error` is an `OSError`."""
    cause = error.__cause__ or error.__context__
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return None if isinstance(error, OSError) else cause


def require_intact_model(directory: Path, setting: str) -> None:
    """Compare the model and tokenizer files in `directory` with the manifest, if `directory` is a checkpoint of asyncrl.
    `setting`: the setting that named the directory. Errors: `CheckpointError` for damaged files."""
    checkpoint = directory.resolve()  # `directory` may be the link `latest`
    if not (checkpoint / MANIFEST).exists():
        return
    comparison = compare(checkpoint, state=False)
    if comparison.faults:
        raise CheckpointError(
            f"{setting}: the checkpoint {directory} is {comparison}; name another checkpoint (the command "
            f"`asyncrl check {shlex.quote(str(checkpoint.parent))}` lists the intact ones). If you changed these files on "
            f"purpose, remove the file {MANIFEST}"
        )
