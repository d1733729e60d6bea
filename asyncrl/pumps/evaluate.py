"""The evaluate pump: held-out prompts through the same engine, environment and rewards, without slots or training.

The random numbers of a held-out prompt are the same at every version (its group id is -1 - its row), so two evaluations
differ by the weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import anyio
import numpy as np

from asyncrl.types import Generation, GenerationRequest, Prompt, Trajectory

from .pipeline import Rooms


class EvaluatePump:
    def __init__(self, rooms: Rooms, prompts: Sequence[Prompt], name: str) -> None:
        self._rooms = rooms
        self._name = name
        self.progress: tuple[int, int] | None = None  # (completions that are scored, all of them) while it runs
        limit = rooms.config.evaluate.limit
        self._prompts = [
            replace(prompt, group_id=-1 - row) for row, prompt in enumerate(prompts[:limit] if limit else prompts)
        ]

    def due(self, version: int, last: bool = False) -> bool:
        every = self._rooms.config.evaluate.every
        return every is not None and (last or version % every == 0)

    async def run(self, version: int) -> dict[str, float]:
        """Metrics `eval/{name}/avg@k`, `eval/{name}/pass@k`, per-component means and the mean length in tokens."""
        samples = self._rooms.config.evaluate.samples
        scored: dict[tuple[int, int], Trajectory] = {}
        self.progress = 0, len(self._prompts) * samples
        with (
            self._rooms.recorder.span("evaluate", track="evaluate", version=version),
            self._rooms.recorder.wait("evaluate pump", "held-out rollouts", on="engine", cause="evaluate"),
        ):
            async with anyio.create_task_group() as tasks:
                for row, prompt in enumerate(self._prompts):
                    for sample in range(samples):
                        tasks.start_soon(self._one, prompt, row, sample, scored)
        self.progress = None
        return self._metrics(scored, samples)

    async def _one(self, prompt: Prompt, row: int, sample: int, scored: dict[tuple[int, int], Trajectory]) -> None:
        rooms = self._rooms
        await anyio.lowlevel.checkpoint_if_cancelled()  # an engine that is being cancelled too would only say "closed"
        trajectory = await rooms.environment.run(prompt, sample, rooms.config.evaluate.samples, self._generate)
        if trajectory.reward is None:
            [trajectory] = await rooms.reward.score(prompt, [trajectory])
        scored[row, sample] = trajectory
        self.progress = len(scored), len(self._prompts) * rooms.config.evaluate.samples

    async def _generate(self, request: GenerationRequest) -> Generation:
        temperature = self._rooms.config.evaluate.temperature
        if temperature is not None:
            request = replace(request, sampling=replace(request.sampling, temperature=temperature))
        return await self._rooms.engine.generate(request)

    def _metrics(self, scored: dict[tuple[int, int], Trajectory], samples: int) -> dict[str, float]:
        rows = len(self._prompts)
        rewards = np.full((rows, samples), np.nan)
        components: dict[str, list[float]] = {}
        for (row, sample), trajectory in scored.items():
            if trajectory.reward is not None:
                rewards[row, sample] = trajectory.reward
            for name, value in trajectory.components.items():
                if value is not None:
                    components.setdefault(name, []).append(value)
        known = rewards[~np.isnan(rewards).all(axis=1)]
        prefix = f"eval/{self._name}"
        metrics = {f"{prefix}/{name}/mean": float(np.mean(values)) for name, values in components.items()}
        metrics[f"{prefix}/completions/mean_length"] = float(
            np.mean([trajectory.completion_length for trajectory in scored.values()])
        )
        if known.size:
            passed = np.nanmax(known, axis=1) >= self._rooms.config.evaluate.pass_reward
            metrics[f"{prefix}/avg@{samples}"] = float(np.nanmean(known))
            metrics[f"{prefix}/pass@{samples}"] = float(passed.mean())
        return metrics
