"""The run directory: the files that a run writes, and the rules for a new run that finds an old run there.

runs/<name>/
  config.yaml          the resolved configuration
  .lock                while a run is alive: the pid and host of its process (DirectoryLock)
  job.json             the launcher's job and the number of its start, so that `resume: auto` recognises a restart of the same job
  metrics.jsonl        one line per policy version
  rollouts/step_N.jsonl, rollouts/rank_R/step_N.jsonl
  trace.json           opens in Perfetto
  nodes.json           the ranks of a run with several ranks (meeting.py)
  report.html
  workers/worker-N.log output of generation workers; in a folder rank_R/ per rank if there are several ranks
  checkpoints/step_N/  Hugging Face format, with the trainer's state in `state/`; `checkpoints/latest` links to the newest
runs/<name>.<when>/    an old run that `run.overwrite` moved aside; the newest two are kept

Guarantee: a run overwrites only files that a run wrote. `run.overwrite` never removes an old run that has any other file.
If `runs/<name>` is a link, the link is kept, and an old run moves beside the link's target.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import time
import weakref
from datetime import datetime
from pathlib import Path

import orjson

from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.concurrency.descriptors import Reserve, descriptor_advice
from asyncrl.config.describe import check_resume, to_yaml
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.config.text import parse_file
from asyncrl.distributed.launcher import restart_phrase, this_start
from asyncrl.errors import ConfigError, DirectoryLost
from asyncrl.telemetry.sinks import each_row

# Number of old runs that `run.overwrite` keeps. With checkpoints of a real model each takes gigabytes.
KEPT_ASIDE = 2
# `run.overwrite` writes this file, with the new name of the directory, into an old run. A directory without it is never removed.
MARK = ".moved-aside"
# The directories and files of a run, also those that earlier versions of asyncrl wrote.
FOLDERS = {"rollouts", "workers", "checkpoints", "profile", "tensorboard", "wandb"}
FILES = {
    "config.yaml", ".lock", "job.json", "metrics.jsonl", "metrics.discarded.jsonl", "trace.json", "nodes.json", "report.html",
    "sinks.json", "plan.txt", MARK,
}  # fmt: skip
# What a run writes into these files. They are empty if the run was killed before its write.
_CONTENTS = {".lock": rb'(\{"pid":\d+,"host":".*","since":".*\})?', MARK: rb"(.+\.\d{8}-\d{6}(-\d+)?)?"}
# EBADF: NFS may lock only descriptors that are open for writing, and a directory cannot be opened for writing.
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.EBADF)
_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


class RunDirectory:
    """The paths of one run's files, and the lock on the directory. The constructor writes nothing."""

    def __init__(self, config: Config) -> None:
        self.path = Path(config.run.dir) / config.run.name
        self.config_file = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.rollouts = self.path / "rollouts"
        self.trace = self.path / "trace.json"
        self.report = self.path / "report.html"
        self.workers = self.path / "workers"
        self.checkpoints = self.path / "checkpoints"
        # The target of `path` if `path` is a link, for example to a larger disk; else `path`.
        self.real = Path(os.path.realpath(self.path)) if self.path.is_symlink() else self.path
        self.lost = False  # whether the directory belongs to another run, or is gone
        self._lock = DirectoryLock(self.real)
        self.spare_descriptors = Reserve()
        # A sentence for the terminal, if this start is a launcher's restart of the same job; else None.
        self.restart: str | None = None
        # Whether the run resumes from a checkpoint. If there are several ranks, rank 0 decides (meeting.py).
        self.resumes = config.resume is True
        restart = restart_phrase(next(each_row(self.path / "job.json"), {}), this_start())
        if config.resume == "auto" and restart is not None:
            self.resumes = bool(CheckpointStore(self.checkpoints).versions())
            start = "its newest checkpoint" if self.resumes else "version 0: no checkpoint was written"
            self.restart = (
                f"{restart}: the run in {self.path} goes on from {start}; run.overwrite applies to first starts only"
            )

    def open(self, config: Config, *, is_first: bool = True) -> list[str]:
        """Lock and prepare the directory. Only rank 0 (`is_first`) locks and writes. Blocks.
        Returns sentences for the terminal: settings that a resume changes, and the new place of an old run.
        ConfigError: another run is alive in the directory; the directory holds a run and neither `resume` nor `run.overwrite` is
        set; there is nothing to resume from; the directory cannot be made or written."""
        try:
            if self.resumes and not self.config_file.exists():
                raise ConfigError(f"resume=true: {self.path} holds no run (no config.yaml); check run.dir and run.name")
            self.spare_descriptors.keep()
            # Other ranks check nothing more: rank 0 may be writing the files at this moment.
            return self._open(config) if is_first else []
        except OSError as error:
            raise ConfigError(unusable_message(self.path, error)) from error

    def close(self) -> None:
        """Unlock the directory for the next run, after all ranks have ended. May be called twice."""
        self.spare_descriptors.close()
        self._lock.release()

    def check_still_ours(self) -> None:
        """Call at each version and checkpoint. Blocks. Errors: DirectoryLost, once, if the directory was moved, removed or taken by
        another run. Nothing may be written afterwards: `path` may belong to another run."""
        if not self.lost and (reason := self._lock.find_loss()) is not None:
            self.lost = True
            raise DirectoryLost(
                f"{self.path} is no longer this run's: {reason}. This run writes nothing more; to go on, set run.dir and run.name "
                "to the directory with its newest checkpoint, and resume=true"
            )

    def refuse_foreign(self) -> None:
        """Errors: ConfigError for files that no run wrote and that a run would overwrite, and if `path` links to no directory."""
        if self.path.is_symlink() and not self.path.is_dir():
            raise ConfigError(
                f"{self.path} is a link to {self.real}, which is no directory; make that directory, or remove the link"
            )
        _refuse_foreign_content(self.path / MARK)
        if _name_in(self.config_file) is not None and self.checkpoints.is_dir():
            return
        names = sorted({"rollouts"} | FILES - {"plan.txt", *_CONTENTS})
        for path in (self.path / f"{name}{suffix}" for name in names for suffix in ("", ".partial")):
            # A run that was killed at its first start leaves `checkpoints`, and perhaps a partial file.
            if path.exists() and (path.suffix != ".partial" or not self.checkpoints.is_dir()):
                raise ConfigError(
                    f"{self.path} is not the directory of a run (config.yaml and checkpoints/), and a run would write over its "
                    f"{path.name}; choose another run.name or run.dir"
                )

    def _open(self, config: Config) -> list[str]:
        if self.path.is_symlink():
            # Before `acquire`, which would create the missing target of the link.
            self.refuse_foreign()
        warning = self._lock.acquire()
        lines = [line for line in (warning, self.restart) if line is not None]
        self.refuse_foreign()
        if self.resumes:
            lines += [f"resume: {change}" for change in check_resume(load_config([self.config_file]), config)]
        elif self.restart is None and self.holds_run():
            if not config.run.overwrite:
                raise ConfigError(
                    f"{self.path} already holds a run; resume the run with resume=true, move the run aside with "
                    "run.overwrite=true, or choose another run.name"
                )
            lines += self._move_aside(config.run.name)
        elif self.restart is None:
            # Remove files of a run that ended before its first step.
            for path in (self.metrics, self.trace, self.report):
                path.unlink(missing_ok=True)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        # A user may resume a run that was moved aside. If MARK stayed, a later `run.overwrite` could remove the resumed run.
        (self.path / MARK).unlink(missing_ok=True)
        # Fail now, and not at the first checkpoint.
        for folder in (self.checkpoints, self.rollouts):
            if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        # config.yaml first: `refuse_foreign` would take a job.json without a config.yaml for a file that no run wrote.
        for name, text in (("config.yaml", to_yaml(config)), ("job.json", orjson.dumps(this_start()).decode())):
            partial = self.path / f"{name}.partial"
            partial.write_text(text, encoding="utf-8")
            # `replace` is atomic: a kill must not leave half of a file, because the next start reads it.
            partial.replace(self.path / name)
        return lines

    def holds_run(self) -> bool:
        """Whether a step was committed here. A run that ended before its first step may be overwritten."""
        if CheckpointStore(self.checkpoints).versions() or any(self.rollouts.glob("step_*.jsonl")):
            return True
        return any(line.get("step") != 0 for line in each_row(self.metrics))

    def _move_aside(self, name: str) -> list[str]:
        """Rename the old run, and remove the oldest runs that were renamed before. Returns sentences for the terminal.
        Errors: ConfigError if the directory holds a run of another name, or a directory that the run did not make."""
        if (old_name := _name_in(self.config_file)) != name:
            raise ConfigError(
                f"{self.path} holds the run {old_name!r}, not {name!r}: run.overwrite does not move it; move it yourself"
            )
        if foreign := _foreign_paths(self.real, files=False):
            raise ConfigError(
                f"{self.path} holds {foreign}, which is another run or a directory or link that no run made: "
                "run.overwrite would move it, too; move it yourself, or choose another run.name"
            )
        pattern = re.compile(re.escape(self.real.name) + r"\.\d{8}-\d{6}(?:-\d+)?")
        found = (path for path in self.real.parent.iterdir() if pattern.fullmatch(path.name) and not path.is_symlink())
        # Oldest first. A directory without MARK is left out: a person may have given the directory such a name.
        moved_before = sorted(path for path in found if _text(path / MARK) == path.name)
        target = self.real.with_name(f"{self.real.name}.{datetime.now():%Y%m%d-%H%M%S-%f}")
        (self.real / MARK).write_text(target.name, encoding="utf-8")
        self.real.rename(target)
        self._lock.release()
        # Makes and locks a new directory. Raises ConfigError if another run, started at the same time, has locked it.
        self._lock.acquire()
        lines = [f"run.overwrite: the run that was here is now {target}; the newest {KEPT_ASIDE} such runs are kept"]
        for old in moved_before[: max(len(moved_before) + 1 - KEPT_ASIDE, 0)]:
            if foreign := _foreign_paths(old, files=True):
                lines.append(f"run.overwrite: the older run {old} is kept: no run made its {foreign}")
                continue
            shutil.rmtree(old)
            lines.append(f"run.overwrite: removed the older run {old}")
        return lines


def _foreign_paths(run: Path, *, files: bool) -> str:
    """Comma-separated names in `run` that no run made: directories, links to directories, other runs; with `files` also files."""

    def is_foreign(path: Path) -> bool:
        own = FOLDERS if path.is_dir() else FILES
        is_own = path.name.removesuffix(".partial") in own and not path.is_symlink()
        return not is_own or (path / "config.yaml").exists()

    return ", ".join(sorted(path.name for path in run.iterdir() if (files or path.is_dir()) and is_foreign(path)))


def _refuse_foreign_content(path: Path) -> None:
    """Errors: ConfigError for a file of `_CONTENTS` that no run wrote."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
        if path.is_symlink() or not re.fullmatch(_CONTENTS[path.name], path.read_bytes(), re.DOTALL):
            raise ConfigError(
                f"{path.parent} has a {path.name} that no run wrote, and a run would write over it or remove it; move it away, or "
                "choose another run.name or run.dir"
            )


def _text(file: Path) -> str | None:
    """The text of a small file, or None if there is no file or the bytes are no UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnicodeDecodeError):
        return None


def _name_in(config_file: Path) -> str | None:
    """The run.name in a run's config.yaml, or None if no run can have written this file."""
    try:
        tree, _ = parse_file(_text(config_file) or "", str(config_file))
        name = tree["run"]["name"]
    except (ConfigError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None


def unusable_message(path: Path, error: OSError) -> str:
    """The error message for a run directory that cannot be made or written."""
    if advice := descriptor_advice(error):
        return advice
    reason = error.strerror or str(error)
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        reason = "there is a file where a directory is needed"
    return (
        f"the run directory {path} cannot be used: {reason} ({error.filename or path}); make room or give permission there, "
        "or choose another run.dir or run.name"
    )


class DirectoryLock:
    """The lock of rank 0 on a run directory. The kernel releases the lock when the process ends or dies.

    The process takes two `flock` locks. The lock on the directory survives the removal of files. The lock on the file `.lock` is
    also seen by other machines on a shared file system, and the file names the holder. A run removes the file at its end; after a
    kill the file remains, unlocked. On a file system without locks, and after a directory is moved, removed or replaced, only
    `find_loss` protects the runs from each other: a run calls it at each version and checkpoint."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.path = directory / ".lock"
        self._descriptors: list[int] = []  # of the directory and of the file; empty: unlocked
        self._content = b""  # what this run wrote into `.lock`

    def acquire(self) -> str | None:
        """Take the lock, or fail at once. Returns a warning if the file system cannot lock the file `.lock`; else None.
        Errors: ConfigError that names the holder, or a foreign `.lock`; OSError if the directory or the file cannot be made."""
        warning: str | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_descriptors)
            # Repeated if the holder moved the directory, or removed the file, between our `open` and our `flock`.
            while not self._names_open_files():
                self._close_descriptors()
                self._directory.mkdir(parents=True, exist_ok=True)
                create = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
                for path, flags in ((self._directory, os.O_DIRECTORY), (self.path, create)):
                    self._descriptors.append(os.open(path, flags, 0o666))
                    warning = None
                    try:
                        fcntl.flock(self._descriptors[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        raise ConfigError(
                            f"{self._directory} is in use by another run: {self._holder()}; wait for its end, stop it, or "
                            "choose another run.name"
                        ) from None
                    except OSError as error:
                        if error.errno not in _UNSUPPORTED:
                            raise
                        # Only the file's warning is kept: the file's lock refuses a second run even if the directory is unlocked.
                        warning = f"{self._directory} cannot be locked ({error.strerror}): start no second run there; "
                        warning += "the first run would end"
            _refuse_foreign_content(self.path)
            _held.add(self)
            since = time.strftime("%Y-%m-%d %H:%M:%S %z")
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "mark": os.urandom(8).hex()}
            self._content = orjson.dumps(holder)
            os.ftruncate(self._descriptors[1], 0)
            os.pwrite(self._descriptors[1], self._content, 0)
            undo.pop_all()
        return warning

    def find_loss(self) -> str | None:
        """What happened to the directory. None if it is still this run's, or if it is not locked. Needs no free descriptor."""
        if not self._descriptors or (self._names_open_files() and self._is_unchanged()):
            return None
        current = self._directory.stat() if self._directory.exists() else None
        if current is None or not os.path.samestat(os.fstat(self._descriptors[0]), current):
            return "it was moved or removed"
        # Another run would have made a new `.lock`. Without `.lock` the directory is still this run's.
        return f"another run writes there ({self._holder()})" if self.path.exists() else None

    def release(self) -> None:
        """Remove the file `.lock` and release the locks. May be called twice."""
        if self._descriptors:
            # `dir_fd`: the directory may have been moved. Remove the file before the unlock: afterwards another run may lock it.
            with contextlib.suppress(OSError):
                if self._is_unchanged():
                    os.unlink(self.path.name, dir_fd=self._descriptors[0])
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _names_open_files(self) -> bool:
        """Whether the paths still name the directory and the file that are open."""
        with contextlib.suppress(OSError, ValueError):
            pairs = zip(self._descriptors, (self._directory, self.path), strict=True)
            return all(os.path.samestat(os.fstat(descriptor), path.stat()) for descriptor, path in pairs)
        return False

    def _is_unchanged(self) -> bool:
        return os.pread(self._descriptors[-1], 4096, 0) == self._content

    def _holder(self) -> str:
        try:
            holder = orjson.loads(self.path.read_bytes())
            return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
        except (FileNotFoundError, orjson.JSONDecodeError, KeyError, TypeError):
            return "a process that has only just begun"
        except OSError as error:
            return f"{self.path} cannot be read: {error.strerror}"


def _close_in_child() -> None:
    """Close a forked child's copies of the descriptors. Open copies would keep the lock after the end of the run."""
    for lock in list(_held):
        lock._close_descriptors()


os.register_at_fork(after_in_child=_close_in_child)
