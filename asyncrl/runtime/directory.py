"""The run directory: what a run leaves behind, and what a new run may do with an old one.

runs/<name>/
  config.yaml          as resolved
  metrics.jsonl        one line a policy version
  rollouts/step_N.jsonl
  trace.json           opens in Perfetto
  profile/rank_N.json  where telemetry.profile asks for it on a CPU
  report.html
  workers/worker-N.log what they print, where generation has processes of its own; rank_R/ of each rank, where there are several
  checkpoints/step_N/  Hugging Face format, `state/` beside the model; `checkpoints/latest` points at the newest
runs/<name>.<when>/    a run that `run.overwrite` moved aside; the newest two are kept
runs/.<name>.lock      while a run is alive (lock.py)
"""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.config.describe import check_resume, to_yaml
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.telemetry.sinks import each_row

from .lock import DirectoryLock

KEPT_ASIDE = 2  # runs that `run.overwrite` moved aside; a run with checkpoints of a real model takes gigabytes


class RunDirectory:
    """The paths of one run's files, and the lock on them. Made without touching the disk."""

    def __init__(self, config: Config) -> None:
        self.path = Path(config.run.dir) / config.run.name
        self.config_file = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.rollouts = self.path / "rollouts"
        self.trace = self.path / "trace.json"
        self.report = self.path / "report.html"
        self.workers = self.path / "workers"
        self.checkpoints = self.path / "checkpoints"
        self._lock = DirectoryLock(self.path)

    def open(self, config: Config, *, leader: bool = True) -> list[str]:
        """Lock it and make it ready. Returns lines for people: what a resume changes, where an old run lies now. Blocks.

        ConfigError: another run is alive in it; it holds a run and neither `resume` nor `run.overwrite` says what to do;
        nothing to resume from; it cannot be made or written. Only the leader (rank 0) locks and writes.
        """
        try:
            if config.resume and not self.config_file.exists():
                raise ConfigError(f"resume=true: {self.path} holds no run (no config.yaml); check run.dir and run.name")
            # The leader checks and writes; reading what it may be writing now proves nothing.
            return self._open(config) if leader else []
        except OSError as error:
            raise ConfigError(unusable(self.path, error)) from error

    def close(self) -> None:
        """Let the next run have it. Twice is fine."""
        self._lock.release()

    def _open(self, config: Config) -> list[str]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unlocked = self._lock.acquire()
        lines = [] if unlocked is None else [unlocked]
        if config.resume:
            lines += [f"resume: {change}" for change in check_resume(load_config([self.config_file]), config)]
        elif self.holds_run():
            if not config.run.overwrite:
                raise ConfigError(
                    f"{self.path} holds a run already; go on from it with resume=true, move it aside with "
                    "run.overwrite=true, or choose another run.name"
                )
            lines += self._move_aside()
        else:  # what a run leaves that ended before its first step
            for left in (self.metrics, self.trace, self.report):
                left.unlink(missing_ok=True)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        partial = self.config_file.with_name("config.yaml.partial")
        partial.write_text(to_yaml(config))
        partial.replace(self.config_file)  # a kill in between must not leave half of it: `resume` reads it
        return lines

    def holds_run(self) -> bool:
        """Whether a step was committed here: what ended before is no run, and does not stand in the way of one."""
        if CheckpointStore(self.checkpoints).versions() or any(self.rollouts.glob("step_*.jsonl")):
            return True
        return any(line.get("step") != 0 for line in each_row(self.metrics))

    def _move_aside(self) -> list[str]:
        """The old run is renamed; of those that were renamed before, the oldest are removed."""
        before = self._aside()
        stamp = time.strftime("%Y%m%d-%H%M%S")
        again = 1 + max((number for (when, number), _ in before if when == stamp), default=0)
        target = self.path.with_name(f"{self.path.name}.{stamp}" + (f"-{again}" if again > 1 else ""))
        self.path.rename(target)
        lines = [f"run.overwrite: the run that was here is now {target}; the newest {KEPT_ASIDE} such runs are kept"]
        for _, old in before[: max(len(before) + 1 - KEPT_ASIDE, 0)]:
            shutil.rmtree(old)
            lines.append(f"run.overwrite: removed {old}, an older one")
        return lines

    def _aside(self) -> list[tuple[tuple[str, int], Path]]:
        """Runs of this name that were moved aside, oldest first, each with its time and number."""
        name = re.compile(re.escape(self.path.name) + r"\.(\d{8}-\d{6})(?:-(\d+))?")
        found = [(match, each) for each in self.path.parent.iterdir() if (match := name.fullmatch(each.name))]
        return sorted(((match[1], int(match[2] or 1)), each) for match, each in found)


def unusable(path: Path, error: OSError) -> str:
    """Why a run directory cannot be made or written, and what to do."""
    reason = error.strerror or str(error)
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        reason = "a file stands where a directory is needed"
    return (
        f"the run directory {path} cannot be used: {reason} ({error.filename or path}); make room or give permission there, "
        "or choose another run.dir or run.name"
    )
