"""The sections about the run itself: its directory, what it leaves there, and who watches it. Part of the schema (`schema.py`)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import create_model, field_validator

from .section import LocalPath, Section, field


class CheckpointConfig(Section):
    """When checkpoints are written, and how many are kept."""

    every: int | None = field(None, "Write a checkpoint every n versions; left out: by time.", ge=1)
    every_s: float | None = field(
        600.0,
        "Where `every` is left out: write one when this many seconds have passed since the last, while training goes on; null: "
        "only the last version.",
        gt=0,
    )
    keep: int = field(2, "Checkpoints kept; older ones are removed after a newer one is complete. 0 keeps all.", ge=0)
    save_final: bool = field(True, "Write the last version when the run ends or is stopped by a signal.")


class WatchdogConfig(Section):
    """How long what may take before the watchdog ends the run."""

    interval_s: float = field(5.0, "How often the watchdog thread looks.", gt=0)
    stall_timeout_s: float = field(
        600.0, "End the run if nothing was generated, scored or trained for this long while it should.", gt=0
    )
    stage_timeout_s: float = field(
        1800.0, "End the run if one stage of its start (loading the model) or of its end takes longer than this.", gt=0
    )
    loop_timeout_s: float = field(
        60.0, "End the run if the event loop, or another rank, did not answer for this long.", gt=0
    )
    lane_timeout_s: float = field(600.0, "End the run if one closure holds a lane for longer than this.", gt=0)
    abort_grace_s: float = field(
        25.0, "How long an ordered shutdown may take before the process is ended hard (torchrun kills after 30).", gt=0
    )


_PROFILE: dict[str, Any] = {
    "from": (
        int | None,
        field(
            None,
            "First step of a profile: a range of the CUDA profiler API (`nsys profile -c cudaProfilerApi`), or without a GPU "
            "torch's profiler, written to profile/; null is off.",
            ge=1,
        ),
    ),
    "steps": (int, field(1, "Steps of it.", ge=1)),
}
# Made by a call, because `from` is a keyword.
ProfileConfig: Any = create_model("ProfileConfig", __base__=Section, __module__=__name__, **_PROFILE)


class TelemetryConfig(Section):
    """What a run tells about itself, and where."""

    trace: bool = field(True, "Write trace.json (opens in Perfetto).")
    trace_events: int = field(500_000, "Most events kept; later ones are counted, not stored.", ge=0)
    report: bool = field(True, "Write report.html at the end.")
    live: Literal["auto", "plain", "off"] = field("auto", "Live view on a terminal, plain lines elsewhere, or nothing.")
    sinks: tuple[Literal["wandb", "tensorboard", "mlflow"], ...] = field((), "More places for metrics.")
    profile: ProfileConfig = ProfileConfig()
    rollouts_per_step: int | None = field(None, "Trajectories written to rollouts/step_N.jsonl; all by default.", ge=0)


class RunConfig(Section):
    """The run directory."""

    name: str = field("run", "Name of the run directory: one part of a path.")
    dir: LocalPath = field("runs", "Where run directories live.")
    overwrite: bool = field(
        False,
        "At a job's first start: start anew where a run is, which is renamed; the newest two such are kept. See `resume`.",
    )

    @field_validator("name")
    @classmethod
    def _one_part(cls, name: str) -> str:
        """An empty name (an unset variable) is the directory of all runs, and one with a slash may lie within another run."""
        if not name.strip() or name in (".", "..") or "/" in name or "\0" in name:
            raise ValueError(
                "the name of one directory in run.dir, not empty and without a slash; run.dir says where it lies"
            )
        return name
