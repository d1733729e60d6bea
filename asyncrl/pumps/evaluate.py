"""The evaluate pump: held-out prompts through the same engine, environment and rewards, without slots or training.

The random numbers of a held-out prompt are the same at every version (its group id is -1 - its row), so two evaluations
differ by the weights alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import anyio
import numpy as np

from asyncrl.concurrency.supervisor import plain_task_group, spawn
from asyncrl.config.schema import EvaluateConfig
from asyncrl.errors import ConfigError
from asyncrl.ports import Engine, Generate, PinnedVersion, Reward
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Generation, GenerationRequest, Prompt, Trajectory

from .episode import EpisodeFailed, Episodes
from .metrics import logged

_BEFORE_ROLLOUTS = -1  # their priorities are turns: the next optimizer step waits for an evaluation
_AFTER_ROLLOUTS = 1 << 30  # those that a pinned worker had before, whose end others wait for


@dataclass(frozen=True, slots=True)
class EvaluateParts:
    """What the evaluate pump works with."""

    recorder: Recorder
    environment: Episodes
    engine: Engine
    reward: Reward
    settings: EvaluateConfig
    score_groups: bool  # the completions of a row in one call of the reward functions, once the last one is done


class EvaluatePump:
    """See the module docstring. `name` is the part of the metrics' names that says what was evaluated."""

    def __init__(self, parts: EvaluateParts, prompts: Sequence[Prompt], name: str, newest: int = -1) -> None:
        """`newest`: the newest version that was evaluated, in an earlier life of the run."""
        self._parts = parts
        self._name = name
        self.newest = newest
        self.progress: tuple[int, int] | None = None  # (completions that are scored, all of them) while it runs
        limit = parts.settings.limit
        self._prompts = [
            replace(prompt, group_id=-1 - row) for row, prompt in enumerate(prompts[:limit] if limit else prompts)
        ]

    def due(self, version: int, last: bool = False) -> bool:
        """Whether `evaluate.every` asks for this version. `last`: it is the last one of the run."""
        every = self._parts.settings.every
        return every is not None and (last or version % every == 0)

    async def run(self, version: int, pin: PinnedVersion | None = None) -> dict[str, float]:
        """Metrics `eval/{name}/avg@k`, `eval/{name}/pass@k`, per-component means, the mean length in tokens, and `missing`
        where episodes failed: so many completions are in none of the others. `pin`: what samples at this version while the
        rest goes on; None: the engine does, and nobody moves it meanwhile."""
        samples, recorder = self._parts.settings.samples, self._parts.recorder
        scored: dict[tuple[int, int], Trajectory] = {}
        self.progress = 0, len(self._prompts) * samples
        generate = partial(self._generate, self._parts.engine.generate if pin is None else pin.generate)
        priority = _BEFORE_ROLLOUTS if pin is None else _AFTER_ROLLOUTS
        who, what = "evaluate pump", "held-out rollouts"
        # Beside steps nobody is idle for it.
        waits: AbstractContextManager[object] = recorder.watch(who, what, on="engine")
        if pin is None:
            waits = recorder.wait(who, what, on="engine", cause="evaluate")
        try:
            with recorder.span("evaluate", track="evaluate", version=version), waits:
                async with plain_task_group() as tasks:
                    for row, prompt in enumerate(self._prompts):
                        play = partial(self._play, prompt, generate, priority)
                        spawn(tasks, f"evaluation of row {row}", self._row, row, prompt, play, scored)
        finally:
            self.progress = None
        self.newest = version
        return self._metrics(scored, samples)

    async def _row(
        self,
        row: int,
        prompt: Prompt,
        play: Callable[[int], Awaitable[Trajectory]],
        scored: dict[tuple[int, int], Trajectory],
    ) -> None:
        parts, samples = self._parts, self._parts.settings.samples
        played: dict[int, Trajectory] = {}

        async def score(together: Sequence[int]) -> None:
            missing = [sample for sample in together if played[sample].reward is None]
            if missing:
                found = await parts.reward.score(prompt, [played[sample] for sample in missing])
                played.update(zip(missing, found, strict=True))
            scored.update({(row, sample): played[sample] for sample in together})
            self.progress = len(scored), len(self._prompts) * samples

        async def one(sample: int) -> None:
            try:
                played[sample] = await play(sample)
            except EpisodeFailed:
                return  # a missing completion; `Episodes` has logged why
            if not parts.score_groups:
                await score([sample])

        async with plain_task_group() as members:
            for sample in range(samples):
                spawn(members, f"evaluation of row {row}", one, sample)
        if parts.score_groups and played:
            await score(sorted(played))

    async def _play(self, prompt: Prompt, generate: Generate, priority: int, sample: int) -> Trajectory:
        await anyio.lowlevel.checkpoint_if_cancelled()  # an engine that is being cancelled too would only say "closed"
        return await self._parts.environment.play(prompt, sample, self._parts.settings.samples, generate, priority)

    async def _generate(self, generate: Generate, request: GenerationRequest) -> Generation:
        temperature = self._parts.settings.temperature
        if temperature is not None:
            request = replace(request, sampling=replace(request.sampling, temperature=temperature))
        return await generate(request)

    def _metrics(self, scored: dict[tuple[int, int], Trajectory], samples: int) -> dict[str, float]:
        rows = len(self._prompts)
        rewards, judged = np.full((2, rows, samples), np.nan)
        by = self._parts.settings.pass_by
        if scored and by != "reward" and not any(by in trajectory.components for trajectory in scored.values()):
            found = sorted({name for trajectory in scored.values() for name in trajectory.components})
            raise ConfigError(f"evaluate.pass_by is {by!r}; the held-out completions have: reward, {', '.join(found)}")
        components: dict[str, list[float]] = {}
        in_order = sorted(scored.items(), key=lambda item: item[0])  # sums do not know who was faster
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
            passed = np.nanmax(known, axis=1) >= self._parts.settings.pass_reward
            metrics[f"{prefix}/pass@{samples}"] = float(passed.mean())
        return metrics
