"""The evaluate pump: held-out prompts through the same engine, environment and rewards, without slots or training.

    consumes     held-out prompts, at each version that `evaluate.every` asks for
    produces     the metrics of the version, for its line
    waits for    the engine, which samples at this version alone; rewards
    is woken by  the publish pump, between a version's hand-over and the release of its slots

The random numbers of a held-out prompt are the same at every version (its group id is -1 - its row), so two evaluations
differ by the weights alone. `Evaluations` decides when: while no step moves the weights, or beside the steps that follow.

    at v, the engine can pin it ─▶ a task evaluates v ─────────────────▶ reports v, then v + 1, ... as far as they came
                                   steps; publish v + 1: it waits to report

Versions are reported in order, so that the lines of a run are in order. A checkpoint is written once all versions before it are
reported, so a run that goes on from it misses none. One evaluation at a time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import anyio
import numpy as np
from anyio.abc import TaskGroup

from asyncrl.concurrency.supervisor import plain_task_group, spawn
from asyncrl.errors import ConfigError
from asyncrl.ports import Engine, PinnedVersion, PinsVersions
from asyncrl.types import Generation, GenerationRequest, Prompt, Trajectory

from .metrics import logged
from .pipeline import Ports
from .rollout import EpisodeFailed, Episodes

# Takes the metrics of a version, or none where it was not evaluated.
Report: TypeAlias = Callable[[Mapping[str, float]], Awaitable[None]]
# Priorities are turns: the next optimizer step waits for an evaluation without a pin.
_BEFORE_ROLLOUTS = -1
# Of a pinned worker: others wait for the end of the rollouts that it had before.
_AFTER_ROLLOUTS = 1 << 30


class EvaluatePump:
    """See the module docstring. `name` is the part of the metrics' names that says what was evaluated."""

    def __init__(self, ports: Ports, prompts: Sequence[Prompt], name: str, newest: int = -1) -> None:
        """`newest`: the newest version that was evaluated, in an earlier life of the run."""
        self._ports = ports
        self._settings = settings = ports.config.evaluate
        self._episodes = Episodes(ports)
        self._name = name
        self.newest = newest
        self.progress: tuple[int, int] | None = None  # (completions that are scored, all of them) while it runs
        limit = settings.limit
        self._prompts = [
            replace(prompt, group_id=-1 - row) for row, prompt in enumerate(prompts[:limit] if limit else prompts)
        ]

    def due(self, version: int, last: bool = False) -> bool:
        """Whether `evaluate.every` asks for this version. `last`: it is the last one of the run."""
        every = self._settings.every
        return every is not None and (last or version % every == 0)

    async def run(self, version: int, pin: PinnedVersion | None = None) -> dict[str, float]:
        """Metrics `eval/{name}/avg@k`, `eval/{name}/pass@k`, per-component means, the mean length in tokens, and `missing`
        where episodes failed: the number of completions that are in none of the others. `pin` samples at this version while the
        engine goes on; None: the engine samples, and its weights stay meanwhile."""
        ports, samples, recorder = self._ports, self._settings.samples, self._ports.recorder
        sampler = ports.engine if pin is None else pin
        priority = _BEFORE_ROLLOUTS if pin is None else _AFTER_ROLLOUTS
        scored: dict[tuple[int, int], Trajectory] = {}
        self.progress = 0, len(self._prompts) * samples

        async def generate(request: GenerationRequest) -> Generation:
            if (temperature := self._settings.temperature) is not None:
                request = replace(request, sampling=replace(request.sampling, temperature=temperature))
            return await sampler.generate(request)

        async def play(prompt: Prompt, sample: int) -> Trajectory:
            # An engine that is cancelled with this task would raise EngineClosed, which hides the reason.
            await anyio.lowlevel.checkpoint_if_cancelled()
            return await self._episodes.play(prompt, sample, samples, generate, priority)

        who, what = "evaluate pump", "held-out rollouts"
        # Beside steps the device is not idle for it.
        waits: AbstractContextManager[object] = recorder.watch(who, what, on="engine")
        if pin is None:
            waits = recorder.wait(who, what, on="engine", cause="evaluate")
        try:
            with recorder.span("evaluate", track="evaluate", version=version), waits:
                async with plain_task_group() as tasks:
                    for row, prompt in enumerate(self._prompts):
                        spawn(tasks, f"evaluation of row {row}", self._row, row, prompt, play, scored)
        finally:
            self.progress = None
        self.newest = version
        return self._metrics(scored, samples)

    async def _row(
        self,
        row: int,
        prompt: Prompt,
        play: Callable[[Prompt, int], Awaitable[Trajectory]],
        scored: dict[tuple[int, int], Trajectory],
    ) -> None:
        """Play and score the completions of one prompt; those that failed are missing in `scored`."""
        ports, samples = self._ports, self._settings.samples
        played: dict[int, Trajectory] = {}

        async def score(together: Sequence[int]) -> None:
            missing = [sample for sample in together if played[sample].reward is None]
            if missing:
                found = await ports.reward.score(prompt, [played[sample] for sample in missing])
                played.update(zip(missing, found, strict=True))
            scored.update({(row, sample): played[sample] for sample in together})
            self.progress = len(scored), len(self._prompts) * samples

        async def one(sample: int) -> None:
            with suppress(EpisodeFailed):  # `Episodes` has logged why
                played[sample] = await play(prompt, sample)
                if not ports.score_groups:
                    await score([sample])

        async with plain_task_group() as members:
            for sample in range(samples):
                spawn(members, f"evaluation of row {row}", one, sample)
        if ports.score_groups and played:
            await score(sorted(played))

    def _metrics(self, scored: dict[tuple[int, int], Trajectory], samples: int) -> dict[str, float]:
        rows = len(self._prompts)
        rewards, judged = np.full((2, rows, samples), np.nan)
        by = self._settings.pass_by
        if scored and by != "reward" and not any(by in trajectory.components for trajectory in scored.values()):
            found = sorted({name for trajectory in scored.values() for name in trajectory.components})
            raise ConfigError(f"evaluate.pass_by is {by!r}; the held-out completions have: reward, {', '.join(found)}")
        components: dict[str, list[float]] = {}
        in_order = sorted(scored.items(), key=lambda item: item[0])  # sums are the same in any order of arrival
        for (row, sample), trajectory in in_order:
            if trajectory.reward is not None:
                rewards[row, sample] = trajectory.reward
            passing = trajectory.reward if by == "reward" else trajectory.components.get(by)
            if passing is not None:
                judged[row, sample] = passing
            for name, value in {**trajectory.components, **logged(trajectory)}.items():
                if value is not None:
                    components.setdefault(name, []).append(value)
        prefix = f"eval/{self._name}"
        metrics = {f"{prefix}/{name}/mean": float(np.mean(values)) for name, values in components.items()}
        if scored:
            lengths = [trajectory.sampled_length for trajectory in scored.values()]
            metrics[f"{prefix}/completions/mean_length"] = float(np.mean(lengths))
        if len(scored) < rewards.size:
            metrics[f"{prefix}/missing"] = float(rewards.size - len(scored))
        if not np.isnan(rewards).all():
            metrics[f"{prefix}/avg@{samples}"] = float(np.nanmean(rewards))
        if (known := judged[~np.isnan(judged).all(axis=1)]).size:
            passed = np.nanmax(known, axis=1) >= self._settings.pass_reward
            metrics[f"{prefix}/pass@{samples}"] = float(passed.mean())
        return metrics


class Evaluations:
    """See the module docstring."""

    def __init__(self, pump: EvaluatePump | None, engine: Engine, sync: Callable[[], Awaitable[None]]) -> None:
        """`pump`: None where there are no held-out prompts. `sync`: gives every engine the newest published weights."""
        self._pump = pump
        self._pins = engine if isinstance(engine, PinsVersions) else None
        self._sync = sync
        # Set while no evaluation runs beside the steps.
        self._reported = anyio.Event()
        self._reported.set()
        self._later: list[Callable[[], Awaitable[None]]] = []
        # Versions that are to be evaluated, and were not yet.
        self.unfinished: list[int] = []

    @property
    def progress(self) -> tuple[int, int] | None:
        """(completions that are scored, all of them) of the evaluation that runs now."""
        return None if self._pump is None else self._pump.progress

    def owes(self, version: int, last: bool) -> bool:
        """Whether an evaluation that was due until this version is missing; of the `last` version its own is."""
        pump = self._pump
        return pump is not None and any(pump.due(each, last) for each in range(pump.newest + 1, version + 1))

    async def all_reported(self) -> None:
        """Wait until every version that came to `at` was reported. Does not yield where all were: the live view then shows the next
        evaluation from its first moment."""
        if not self._reported.is_set():
            await self._reported.wait()

    async def at(self, version: int, report: Report, *, last: bool, beside: TaskGroup | None) -> None:
        """Calls `report` with the metrics of this version, with none where it is not due, once all versions before it are reported.
        Returns then; with `beside`, where a part of the engine can stay at this version, at once. `last`: it is the last version of
        the run."""
        if self._pump is None or not self._pump.due(version, last):
            if self._reported.is_set():
                await report({})
            else:
                self._later.append(partial(report, {}))
            return
        self.unfinished.append(version)
        await self.all_reported()
        # The engines may hold older weights: `rollout.weight_sync_interval`.
        await self._sync()
        pin = None if beside is None or self._pins is None else await self._pins.pin(version)
        if beside is None or pin is None:
            metrics = await self._pump.run(version)
            self.unfinished.remove(version)
            return await report(metrics)
        self._reported = anyio.Event()
        spawn(beside, f"evaluation of version {version}", self._beside, self._pump, version, pin, report)

    async def _beside(self, pump: EvaluatePump, version: int, pin: PinnedVersion, report: Report) -> None:
        try:
            metrics = await pump.run(version, pin)
        finally:
            pin.end()
        self.unfinished.remove(version)
        await report(metrics)
        while self._later:
            await self._later.pop(0)()
        self._reported.set()
