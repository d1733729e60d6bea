"""Writes `rollouts/step_N.jsonl`: the trajectories of a step, one per line, for people and for `report.html`. Each rank writes the
trajectories that it trained: rank 0 into `rollouts/`, rank R into `rollouts/rank_R/`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ..types import Group, Trajectory
from .trace import dump

Advantages = Mapping[tuple[int, int], float]  # (group_id, member) -> advantage
Decode = Callable[[list[int]], str]  # token ids -> text with its special tokens


class RolloutWriter:
    """Writes the trajectories of each step on one rank. `limit`: how many per step; 0 writes no file, None writes all.

    `resume_step`: the version of the resumed checkpoint. Rank 0 first moves the files of later steps, of all ranks, to
    `rollouts/discarded/`. `decode`: if given, each line has `rendered_prompt`, the text of the prompt's token ids."""

    def __init__(
        self,
        run_dir: Path,
        limit: int | None = None,
        resume_step: int | None = None,
        decode: Decode | None = None,
        rank: int = 0,
    ) -> None:
        self.directory = run_dir / "rollouts" / (f"rank_{rank}" if rank else "")
        self._decode = decode
        self._limit = limit
        self.directory.mkdir(parents=True, exist_ok=True)
        if resume_step is not None and rank == 0:
            self._discard_after(resume_step)

    def path(self, step: int) -> Path:
        """The file of one step."""
        return self.directory / f"step_{step}.jsonl"

    def write(self, step: int, groups: Sequence[Group], trained_version: int, advantages: Advantages) -> None:
        """Write `step_{step}.jsonl` atomically. A file of the same step is replaced. Errors: OSError.

        `step`: the policy version after the update. `trained_version`: the version before the update, from which `staleness` is
        counted. Takes about 10 us per trajectory of a few hundred characters.
        """
        if self._limit == 0:
            return
        path = self.path(step)
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            for group, trajectory, rendered in islice(self._lines(groups), self._limit):
                file.write(
                    dump({"step": step, **row(group, trajectory, trained_version, advantages), **rendered}) + b"\n"
                )
        os.replace(partial, path)

    def _lines(self, groups: Sequence[Group]) -> Iterator[tuple[Group, Trajectory, dict[str, str]]]:
        for group in groups:
            # Agents write their own prompts, which may differ within a group.
            rendered: dict[bytes, dict[str, str]] = {}
            for trajectory in group.trajectories:
                ids = trajectory.tokens[: trajectory.prompt_length]
                if self._decode is not None and (key := ids.tobytes()) not in rendered:
                    rendered[key] = {"rendered_prompt": self._decode(ids.tolist())}
                yield group, trajectory, rendered.get(ids.tobytes(), {})

    def _discard_after(self, step: int) -> None:
        for path in [*self.directory.glob("step_*.jsonl"), *self.directory.glob("rank_*/step_*.jsonl")]:
            match = re.fullmatch(r"step_(\d+)\.jsonl", path.name)
            if match and int(match.group(1)) > step:
                discarded = self.directory / "discarded" / path.relative_to(self.directory)
                discarded.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, discarded)


def row(group: Group, trajectory: Trajectory, trained_version: int, advantages: Advantages) -> dict[str, Any]:
    """One line of the file, as a dictionary. Lengths are in tokens. `versions`: lowest and highest policy version; -1: unknown."""
    oldest, newest = trajectory.oldest_version, trajectory.newest_version
    line: dict[str, Any] = {
        "group_id": trajectory.group_id,
        "member": trajectory.member,
        "epoch": group.prompt.epoch,
        "prompt": group.prompt.prompt,
        "completion": trajectory.completion,
        "reward": trajectory.reward,
        "components": dict(trajectory.components),
        **({"extras": dict(trajectory.extras)} if trajectory.extras else {}),
        "versions": {"min": oldest, "max": newest},
        "trained_version": trained_version,
        "staleness": trained_version - oldest if oldest >= 0 else 0,
        "prompt_length": trajectory.prompt_length,
        "completion_length": trajectory.completion_length,
        "trained_tokens": int(trajectory.mask.sum()),
        "finish_reason": str(trajectory.finish_reason),
        "advantage": advantages.get((trajectory.group_id, trajectory.member)),
    }
    if trajectory.turns is not None:
        line["turns"] = int(trajectory.turns.size)
    if trajectory.branches is not None:
        line["branches"] = len(trajectory.branches)
        line["longest_path"] = trajectory.longest_path
    if trajectory.turn_rewards is not None:
        line["turn_rewards"] = list(trajectory.turn_rewards)
    if trajectory.metadata:
        line["metadata"] = dict(trajectory.metadata)
    return line
