"""The evaluate pump: held-out prompts through the same engine, environment and rewards, without slots or training.

The random numbers of a held-out prompt are the same at every version (its group id is -1 - its row), so two evaluations
differ by the weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import anyio
import numpy as np

from asyncrl.concurrency.supervisor import spawn
from asyncrl.config.schema import EvaluateConfig
from asyncrl.ports import Engine, Generate, PinnedVersion, Reward
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Generation, GenerationRequest, Prompt, Trajectory

from .episode import Episodes

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


class EvaluatePump:
    """See the module docstring. `name` is the part of the metrics' names that says what was evaluated."""

    def __init__(self, parts: EvaluateParts, prompts: Sequence[Prompt], name: str) -> None:
        self._parts = parts
        self._name = name
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
        """Metrics `eval/{name}/avg@k`, `eval/{name}/pass@k`, per-component means and the mean length in tokens. `pin`: what
        samples at this version while the rest goes on; None: the engine does, and nobody moves it meanwhile."""
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
                async with anyio.create_task_group() as tasks:
                    for row, prompt in enumerate(self._prompts):
                        for sample in range(samples):
                            play = partial(self._one, prompt, row, sample, generate, priority)
                            spawn(tasks, f"evaluation of row {row}", play, scored)
        finally:
            self.progress = None
        return self._metrics(scored, samples)

    async def _one(
        self,
        prompt: Prompt,
        row: int,
        sample: int,
        generate: Generate,
        priority: int,
        scored: dict[tuple[int, int], Trajectory],
    ) -> None:
        parts = self._parts
        await anyio.lowlevel.checkpoint_if_cancelled()  # an engine that is being cancelled too would only say "closed"
        samples = parts.settings.samples
        trajectory = await parts.environment.play(prompt, sample, samples, generate, priority)
        if trajectory.reward is None:
            [trajectory] = await parts.reward.score(prompt, [trajectory])
        scored[row, sample] = trajectory
        self.progress = len(scored), len(self._prompts) * parts.settings.samples

    async def _generate(self, generate: Generate, request: GenerationRequest) -> Generation:
        temperature = self._parts.settings.temperature
        if temperature is not None:
            request = replace(request, sampling=replace(request.sampling, temperature=temperature))
        return await generate(request)

    def _metrics(self, scored: dict[tuple[int, int], Trajectory], samples: int) -> dict[str, float]:
        rows = len(self._prompts)
        rewards = np.full((rows, samples), np.nan)
        components: dict[str, list[float]] = {}
        in_order = sorted(scored.items(), key=lambda item: item[0])  # sums do not know who was faster
        for (row, sample), trajectory in in_order:
            if trajectory.reward is not None:
                rewards[row, sample] = trajectory.reward
            for name, value in trajectory.components.items():
                if value is not None:
                    components.setdefault(name, []).append(value)
        known = rewards[~np.isnan(rewards).all(axis=1)]
        prefix = f"eval/{self._name}"
        metrics = {f"{prefix}/{name}/mean": float(np.mean(values)) for name, values in components.items()}
        metrics[f"{prefix}/completions/mean_length"] = float(
            np.mean([trajectory.sampled_length for trajectory in scored.values()])
        )
        if known.size:
            passed = np.nanmax(known, axis=1) >= self._parts.settings.pass_reward
            metrics[f"{prefix}/avg@{samples}"] = float(np.nanmean(known))
            metrics[f"{prefix}/pass@{samples}"] = float(passed.mean())
        return metrics
