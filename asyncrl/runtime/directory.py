"""The run directory: what a run leaves behind, and what a new run may do with an old one.

runs/<name>/
  config.yaml          as resolved
  metrics.jsonl        one line a policy version
  rollouts/step_N.jsonl
  trace.json           opens in Perfetto
  profile/rank_N.json  where telemetry.profile asks for it on a CPU
  report.html
  checkpoints/step_N/  Hugging Face format, `state/` beside the model; `checkpoints/latest` points at the newest
"""

from __future__ import annotations

import time
from pathlib import Path

from asyncrl.config.describe import check_resume, to_yaml
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError


class RunDirectory:
    def __init__(self, config: Config) -> None:
        self.path = Path(config.run.dir) / config.run.name
        self.config_file = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.trace = self.path / "trace.json"
        self.report = self.path / "report.html"
        self.checkpoints = self.path / "checkpoints"

    def open(self, config: Config, *, leader: bool = True) -> list[str]:
        """Make it ready. Returns the lines of the difference to the resumed run's configuration.

        ConfigError: it holds a run and neither `resume` nor `run.overwrite` says what to do; or nothing to resume from.
        Only the leader (rank 0) writes.
        """
        if config.resume and not self.config_file.exists():
            raise ConfigError(f"resume=true: {self.path} holds no run (no config.yaml); check run.dir and run.name")
        if not leader:
            return []  # the leader checks and writes; reading what it may be writing now proves nothing
        changes: list[str] = []
        if config.resume:
            changes = check_resume(load_config([self.config_file]), config)
        elif self.config_file.exists():
            if not config.run.overwrite:
                raise ConfigError(
                    f"{self.path} holds a run already; go on from it with resume=true, move it aside with "
                    "run.overwrite=true, or choose another run.name"
                )
            self._move_aside()
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        partial = self.config_file.with_name("config.yaml.partial")
        partial.write_text(to_yaml(config))
        partial.replace(self.config_file)  # a kill in between must not leave half of it: `resume` reads it
        return changes

    def _move_aside(self) -> None:
        """An old run is renamed, never deleted."""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self.config_file.stat().st_mtime))
        target = self.path.with_name(f"{self.path.name}.{stamp}")
        number = 1
        while target.exists():
            number += 1
            target = self.path.with_name(f"{self.path.name}.{stamp}-{number}")
        self.path.rename(target)
