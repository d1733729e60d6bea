"""The run directory: what a run leaves behind, and what a new run may do with an old one.

runs/<name>/
  config.yaml          as resolved
  .lock                while a run is alive: whose it is (lock.py)
  job.json             which start of which job runs here: under `resume: auto` a restart of the job goes on
  metrics.jsonl        one line a policy version
  rollouts/step_N.jsonl
  trace.json           opens in Perfetto
  profile/rank_N.json  where telemetry.profile asks for it on a CPU
  report.html
  workers/worker-N.log what they print, where generation has processes of its own; rank_R/ of each rank, where there are several
  checkpoints/step_N/  Hugging Face format, `state/` beside the model; `checkpoints/latest` points at the newest
runs/<name>.<when>/    a run that `run.overwrite` moved aside; the newest two are kept

Guarantees: what no run of this name wrote is never overwritten, moved or removed. Where `runs/<name>` is a link to a directory, the
link stays; the old run lies beside the directory that it names.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from itertools import count
from pathlib import Path

import orjson

from asyncrl.checkpoint.shards import SHARDS
from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.concurrency.descriptors import Reserve, none_left, way_out
from asyncrl.config.describe import check_resume, to_yaml
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.config.text import parse_file
from asyncrl.distributed.launcher import restarted, this_start
from asyncrl.errors import ConfigError, DirectoryLost
from asyncrl.telemetry.sinks import each_row

from .lock import DirectoryLock

# Runs that `run.overwrite` moved aside and keeps: one with checkpoints of a real model takes gigabytes.
KEPT_ASIDE = 2
# A file in such a run, with its name: a directory without that file is never removed.
MARK = ".moved-aside"
FOLDERS = {"rollouts", "workers", "checkpoints", "profile", "tensorboard", "wandb"}  # of a run


class RunDirectory:
    """The paths of one run's files, and the lock on them. Made without writing anything."""

    def __init__(self, config: Config) -> None:
        self._at(Path(config.run.dir) / config.run.name)
        # Where it really lies: a link to a larger disk stays one.
        self.real = Path(os.path.realpath(self.path)) if self.path.is_symlink() else self.path
        # What happened to the directory while the run was alive; the last checkpoint then goes to `path`.
        self.lost = ""
        self._config = config
        self._lock = DirectoryLock(self.real)
        self._owner: bytes | None = None
        self._beside: Path | None = None
        self.reserve = Reserve()
        # A line for people where a launcher starts its job again.
        self.restart: str | None = None
        # Whether the run goes on from a checkpoint. Of several ranks the first one decides (opening.py).
        self.goes_on = config.resume is True
        if config.resume == "auto" and (restart := restarted(next(each_row(self.path / "job.json"), {}), this_start())):
            self.goes_on = bool(CheckpointStore(self.checkpoints).versions())
            where = "its newest checkpoint" if self.goes_on else "version 0: no checkpoint was written"
            self.restart = f"{restart}: the run in {self.path} goes on from {where}; run.overwrite is for first starts"

    def _at(self, path: Path) -> None:
        self.path = path
        self.config_file = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.rollouts = self.path / "rollouts"
        self.trace = self.path / "trace.json"
        self.report = self.path / "report.html"
        self.workers = self.path / "workers"
        self.checkpoints = self.path / "checkpoints"

    def open(self, config: Config, *, leader: bool = True) -> list[str]:
        """Lock it and make it ready. Returns lines for people: what a resume changes, where an old run lies now. Blocks.

        ConfigError: another run is alive in it; it holds a run and neither `resume` nor `run.overwrite` is set;
        nothing to resume from; it cannot be made or written. Only the leader (rank 0) locks and writes.
        """
        try:
            if self.goes_on and not self.config_file.exists():
                raise ConfigError(f"resume=true: {self.path} holds no run (no config.yaml); check run.dir and run.name")
            self.reserve.keep()
            # The leader checks and writes; reading what it may be writing now proves nothing.
            return self._open(config) if leader else []
        except OSError as error:
            raise ConfigError(unusable(self.path, error)) from error

    def close(self) -> None:
        """Unlock it for the next run, after all ranks have ended. May be called twice."""
        self.reserve.spend()
        if self._beside is not None:
            shutil.rmtree(self._beside, ignore_errors=True)
        self._lock.release()

    def look(self) -> None:
        """Before a write: check that the directory is still this run's. Blocks. Errors: DirectoryLost, once. From then on the
        directory of another run is left alone: the last checkpoint goes to where this one lies now, or into a new one."""
        if self.lost or (found := self._lock.lost()) is None:
            return
        before, (self.lost, now) = self.path, found
        self._at(now or self.real.with_name(f"{self.real.name}.{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"))
        if now is None:
            self.path.mkdir()
            self.config_file.write_text(to_yaml(self._config), encoding="utf-8")
        raise DirectoryLost(
            f"{before} is no longer this run's: {self.lost}. The last checkpoint goes to {self.path}: go on there with "
            f"run.dir={self.path.parent} run.name={self.path.name} resume=true"
        )

    def join(self) -> None:
        """On rank > 0, once rank 0 has opened the directory: remember whose it is. Blocks."""
        with contextlib.suppress(OSError):  # Only with fsdp must all ranks see the directory.
            self._owner = self._lock.path.read_bytes()

    def shards(self, rank: int) -> Path:
        """Where rank > 0 writes its part of a checkpoint: into this run's directory, or beside the directory of another run."""
        with contextlib.suppress(OSError):
            if self._owner is None or self._lock.path.read_bytes() == self._owner:
                return self.checkpoints / SHARDS
        self._beside = self.real.with_name(f"{self.real.name}.rank_{rank}-{os.getpid()}")
        return self._beside

    def require_own(self) -> None:
        """Errors: ConfigError where no run wrote what would be written over, and for a link to nothing."""
        if self.path.is_symlink() and not self.path.is_dir():
            raise ConfigError(
                f"{self.path} is a link to {self.real}, which is no directory; make that, or remove the link"
            )
        if _name_in(self.config_file) is not None and self.checkpoints.is_dir():
            return
        for each in (self.config_file, self.metrics, self.rollouts, self.trace, self.report):
            if each.exists():
                raise ConfigError(
                    f"{self.path} is not the directory of a run (config.yaml and checkpoints/), and a run would write over its "
                    f"{each.name}; choose another run.name or run.dir"
                )

    def _open(self, config: Config) -> list[str]:
        if self.path.is_symlink():
            self.require_own()  # a link to nothing would be filled
        unlocked = self._lock.acquire()
        lines = [line for line in (unlocked, self.restart) if line is not None]
        self.require_own()
        if self.goes_on:
            lines += [f"resume: {change}" for change in check_resume(load_config([self.config_file]), config)]
        elif self.restart is None and self.holds_run():
            if not config.run.overwrite:
                raise ConfigError(
                    f"{self.path} holds a run already; go on from it with resume=true, move it aside with "
                    "run.overwrite=true, or choose another run.name"
                )
            lines += self._move_aside(config.run.name)
        elif self.restart is None:  # what a run leaves that ended before its first step
            for left in (self.metrics, self.trace, self.report):
                left.unlink(missing_ok=True)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        (self.path / MARK).unlink(missing_ok=True)  # a run that was moved aside, and that somebody goes on with
        # Else the first checkpoint would fail.
        for folder in (self.checkpoints, self.rollouts):
            if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        for name, text in (("job.json", orjson.dumps(this_start()).decode()), ("config.yaml", to_yaml(config))):
            partial = self.path / f"{name}.partial"
            partial.write_text(text, encoding="utf-8")
            # The next start reads the file, so a kill must not leave half of it.
            partial.replace(self.path / name)
        return lines

    def holds_run(self) -> bool:
        """Whether a step was committed here: what ended before is no run, and does not stand in the way of one."""
        if CheckpointStore(self.checkpoints).versions() or any(self.rollouts.glob("step_*.jsonl")):
            return True
        return any(line.get("step") != 0 for line in each_row(self.metrics))

    def _move_aside(self, name: str) -> list[str]:
        """The old run is renamed; of those that were renamed before, the oldest are removed. Errors: ConfigError for a run of
        another name, and where a directory lies in it that is not the run's."""
        if (held := _name_in(self.config_file)) != name:
            raise ConfigError(
                f"{self.path} holds the run {held!r}, not {name!r}: run.overwrite does not move it; do that yourself"
            )
        if others := _others(self.real):
            raise ConfigError(
                f"{self.path} holds {others}, which is another run or a directory or link that no run made: "
                "run.overwrite would move it, too; move it yourself, or choose another run.name"
            )
        before = self._aside()
        stamp = time.strftime("%Y%m%d-%H%M%S")
        names = (f"{self.real.name}.{stamp}" + (f"-{again}" if again > 1 else "") for again in count(1))
        target = next(path for path in map(self.real.with_name, names) if not os.path.lexists(path))
        (self.real / MARK).write_text(target.name, encoding="utf-8")
        self.real.rename(target)
        self._lock.release()
        self._lock.acquire()  # of a new directory; whoever was faster has it
        lines = [f"run.overwrite: the run that was here is now {target}; the newest {KEPT_ASIDE} such runs are kept"]
        for _, old in before[: max(len(before) + 1 - KEPT_ASIDE, 0)]:
            if others := _others(old):
                lines.append(f"run.overwrite: {old}, an older one, stays: no run made its {others}")
                continue
            shutil.rmtree(old)
            lines.append(f"run.overwrite: removed {old}, an older one")
        return lines

    def _aside(self) -> list[tuple[tuple[str, int], Path]]:
        """Runs that `_move_aside` renamed, and nobody else, oldest first, each with its time and number."""
        name = re.compile(re.escape(self.real.name) + r"\.(\d{8}-\d{6})(?:-(\d+))?")
        found = [(match, each) for each in self.real.parent.iterdir() if (match := name.fullmatch(each.name))]
        ours = [(match, each) for match, each in found if not each.is_symlink() and _text(each / MARK) == each.name]
        return sorted(((match[1], int(match[2] or 1)), each) for match, each in ours)


def _others(folder: Path) -> str:
    """Directories in that of a run which are not its own: other runs, links, and what somebody put there."""
    found = (each for each in folder.iterdir() if each.is_dir())
    return ", ".join(
        sorted(
            each.name
            for each in found
            if each.name not in FOLDERS or each.is_symlink() or (each / "config.yaml").exists()
        )
    )


def _text(file: Path) -> str | None:
    """The text of a small file; None where there is no file, or no text in it."""
    try:
        return file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnicodeDecodeError):
        return None


def _name_in(config_file: Path) -> str | None:
    """The name of the run that wrote this configuration; None where no run can have written it."""
    try:
        tree, _ = parse_file(_text(config_file) or "", str(config_file))
        name = tree["run"]["name"]
    except (ConfigError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None


def unusable(path: Path, error: OSError) -> str:
    """Why a run directory cannot be made or written, and what to do."""
    if none_left(error):
        return way_out()
    reason = error.strerror or str(error)
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        reason = "a file stands where a directory is needed"
    return (
        f"the run directory {path} cannot be used: {reason} ({error.filename or path}); make room or give permission there, "
        "or choose another run.dir or run.name"
    )
