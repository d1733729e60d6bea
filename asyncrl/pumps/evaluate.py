"""The evaluate pump: plays held-out prompts with the engine, environment and rewards of the run, without slots or training.

    consumes     held-out prompts, at each version that `evaluate.every` selects, and at the last version
    produces     metrics, for the line of the version in metrics.jsonl
    waits for    the engine, or its pinned worker, whose weights stay at this version; rewards
    is woken by  the publish pump, after a version is published and before its slots are released

The random numbers of a held-out prompt are the same at every version, because its group id is always -1 - row. So two
evaluations differ only by the weights. Only one evaluation runs at a time. `Evaluations` runs an evaluation in one of two ways:

    the engine cannot pin version v, or the run begins or ends with v ──▶ the training waits until v is evaluated and reported
    all other cases ──▶ the engine pins v. A task evaluates v during later steps. It reports v, then versions published meanwhile

If ranks have different roles (`distributed.roles`), rank 0 spreads the prompts over the ranks that generate (`dispatch.py`), and
the training waits for their answers.

Versions are reported in order, so the lines of metrics.jsonl are in order. A checkpoint is written after all earlier versions were
reported, so a run that resumes from the checkpoint misses no report.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import anyio
import numpy as np
from anyio.abc import TaskGroup

from asyncrl.concurrency.supervisor import plain_task_group, spawn
from asyncrl.errors import ConfigError
from asyncrl.ports import Engine, PinnedVersion, PinsVersions
from asyncrl.telemetry.records import Cause
from asyncrl.types import Generation, GenerationRequest, Prompt, Trajectory

from .metrics import logged_numbers
from .pipeline import Ports
from .rollout import EpisodeFailed, Episodes


class Sample(NamedTuple):
    """What metrics need of one scored completion of a held-out prompt: JSON values, because ranks send them to each other."""

    row: int  # index of the held-out prompt
    number: int  # index of the completion among those of this prompt
    reward: float | None
    components: dict[str, float | None]
    # The result of `logged_numbers`.
    logged: dict[str, float]
    length: int  # sampled tokens


# Plays and scores the completions of some rows with the weights of a version.
Play: TypeAlias = Callable[[int, Sequence[int]], Awaitable[list[Sample]]]
# Plays these rows on all ranks that generate. The last argument plays rows on this rank.
Spread: TypeAlias = Callable[[int, Sequence[int], Play], Awaitable[list[Sample]]]
# Called with the metrics of a version. They are empty if the version was not evaluated.
Report: TypeAlias = Callable[[Mapping[str, float]], Awaitable[None]]
# Values of `priority`. The engine serves the smallest first. A rollout has its deadline as `priority`. Without a pin the training
# waits for the evaluation, so the evaluation comes first. With a pin the training waits for rollouts, so the evaluation comes last.
_BEFORE_ROLLOUTS = -1
_AFTER_ROLLOUTS = 1 << 30


class EvaluatePump:
    """Evaluates a version on held-out prompts. `name`: the name of the environment, for the names of metrics."""

    def __init__(
        self, ports: Ports, prompts: Sequence[Prompt], name: str, newest: int = -1, spread: Spread | None = None
    ) -> None:
        """`newest`: the newest version that was evaluated before a resume; -1: none. `spread`: None if this rank plays all
        prompts."""
        self._ports = ports
        self._settings = ports.config.evaluate
        self._episodes = Episodes(ports)
        self._name = name
        self._spread = spread
        self.newest = newest
        self.progress: tuple[int, int] | None = None  # (scored, all) completions while an evaluation runs
        self._prompts = [replace(prompt, group_id=-1 - row) for row, prompt in enumerate(prompts)]

    def due(self, version: int, last: bool = False) -> bool:
        """Whether `evaluate.every` selects this version, or the run ends with it (`last`). False if `evaluate.every` is None."""
        every = self._settings.every
        return every is not None and (last or version % every == 0)

    async def run(self, version: int, pin: PinnedVersion | None = None) -> dict[str, float]:
        """Evaluate a version. With `pin` the pinned worker samples, and the engine may get later versions. Without `pin` the
        engine samples, and the caller must not change its weights. Returns `eval/{name}/avg@k` and `eval/{name}/pass@k` with k
        samples per prompt, the mean of each reward component, and the mean length in tokens. If episodes failed,
        `eval/{name}/missing` is their number; the other metrics leave failed episodes out."""
        samples, recorder = self._settings.samples, self._ports.recorder
        rows = range(len(self._prompts))
        self.progress = 0, len(rows) * samples
        # With a pin the device trains meanwhile, so the recorder counts no idle time of the device.
        cause: Cause | None = "evaluate" if pin is None else None
        try:
            with (
                recorder.span("evaluate", track="evaluate", version=version),
                recorder.wait("evaluate pump", "held-out rollouts", on="the engine", cause=cause),
            ):
                if self._spread is None:
                    scored = await self.play(version, rows, pin)
                else:
                    scored = await self._spread(version, rows, self.play)
        finally:
            self.progress = None
        self.newest = version
        return self._metrics(scored, samples)

    async def play(self, version: int, rows: Sequence[int], pin: PinnedVersion | None = None) -> list[Sample]:
        """Play and score these rows on this rank, whose engine has `version`. The result lacks failed completions."""
        ports, samples = self._ports, self._settings.samples
        sampler = ports.engine if pin is None else pin
        priority = _BEFORE_ROLLOUTS if pin is None else _AFTER_ROLLOUTS
        scored: list[Sample] = []

        async def generate(request: GenerationRequest) -> Generation:
            if (temperature := self._settings.temperature) is not None:
                request = replace(request, sampling=replace(request.sampling, temperature=temperature))
            return await sampler.generate(request)

        async def play_episode(prompt: Prompt, number: int) -> Trajectory:
            # If this task and the engine are cancelled together, raise the cancellation and not EngineClosed.
            await anyio.lowlevel.checkpoint_if_cancelled()
            return await self._episodes.play(prompt, number, samples, generate, priority)

        async with plain_task_group() as tasks:
            for row in rows:
                spawn(tasks, f"evaluation of row {row}", self._evaluate_row, row, play_episode, scored)
        return scored

    async def _evaluate_row(
        self, row: int, play_episode: Callable[[Prompt, int], Awaitable[Trajectory]], scored: list[Sample]
    ) -> None:
        """Play and score the completions of one prompt. Failed completions get no entry in `scored`."""
        ports, samples, prompt = self._ports, self._settings.samples, self._prompts[row]
        played: dict[int, Trajectory] = {}

        async def score(finished: Sequence[int]) -> None:
            unscored = [number for number in finished if played[number].reward is None]
            if unscored:
                rewarded = await ports.reward.score(prompt, [played[number] for number in unscored])
                played.update(zip(unscored, rewarded, strict=True))
            scored.extend(_sample(row, number, played[number]) for number in finished)
            if self.progress is not None:
                self.progress = self.progress[0] + len(finished), self.progress[1]

        async def play_and_score(number: int) -> None:
            with suppress(EpisodeFailed):  # `Episodes` has logged the failure
                played[number] = await play_episode(prompt, number)
                if not ports.score_groups:
                    await score([number])

        async with plain_task_group() as members:
            for number in range(samples):
                spawn(members, f"evaluation of row {row}", play_and_score, number)
        if ports.score_groups and played:
            await score(sorted(played))

    def _metrics(self, scored: Sequence[Sample], samples: int) -> dict[str, float]:
        rows = len(self._prompts)
        # NaN: the completion failed, or has no such value.
        rewards, pass_values = np.full((rows, samples), np.nan), np.full((rows, samples), np.nan)
        pass_by = self._settings.pass_by
        names = {name for sample in scored for name in sample.components}
        if scored and pass_by != "reward" and pass_by not in names:
            raise ConfigError(f"evaluate.pass_by is {pass_by!r}; expected one of: reward, {', '.join(sorted(names))}")
        components: dict[str, list[float]] = {name: [] for name in names}
        # Sorted, so that the rounding of the sums does not depend on the order of arrival.
        for sample in sorted(scored, key=lambda sample: (sample.row, sample.number)):
            if sample.reward is not None:
                rewards[sample.row, sample.number] = sample.reward
            pass_value = sample.reward if pass_by == "reward" else sample.components.get(pass_by)
            if pass_value is not None:
                pass_values[sample.row, sample.number] = pass_value
            for name, value in {**sample.components, **sample.logged}.items():
                if value is not None:
                    components.setdefault(name, []).append(value)
        prefix = f"eval/{self._name}"
        metrics = {f"{prefix}/{name}/mean": float(np.mean(values)) for name, values in components.items() if values}
        # Shows that a reward function, such as a judge, gave no score to some completions. Left out if it scored all.
        shares = {f"{prefix}/{name}/applicable": len(components[name]) / len(scored) for name in names}
        metrics.update({name: share for name, share in shares.items() if share < 1})
        if scored:
            metrics[f"{prefix}/completions/mean_length"] = float(np.mean([sample.length for sample in scored]))
        if len(scored) < rewards.size:
            metrics[f"{prefix}/missing"] = float(rewards.size - len(scored))
        if not np.isnan(rewards).all():
            metrics[f"{prefix}/avg@{samples}"] = float(np.nanmean(rewards))
        if (rows_with_value := pass_values[~np.isnan(pass_values).all(axis=1)]).size:
            passed = np.nanmax(rows_with_value, axis=1) >= self._settings.pass_reward
            metrics[f"{prefix}/pass@{samples}"] = float(passed.mean())
        return metrics


def _sample(row: int, number: int, trajectory: Trajectory) -> Sample:
    components = {name: None if value is None else float(value) for name, value in trajectory.components.items()}
    reward = None if trajectory.reward is None else float(trajectory.reward)
    return Sample(row, number, reward, components, logged_numbers(trajectory), trajectory.sampled_length)


class Evaluations:
    """Decides which versions are evaluated, evaluates them, and reports all versions in order."""

    def __init__(self, pump: EvaluatePump | None, engine: Engine | None, sync: Callable[[], Awaitable[None]]) -> None:
        """`pump`: None without held-out prompts, and if rank 0 decides for this rank. `engine`: used to pin versions if it can;
        None: no version is pinned. `sync`: gives every engine the newest published weights."""
        self._pump = pump
        self._pinning_engine = engine if isinstance(engine, PinsVersions) else None
        self._sync = sync
        # Not set while a pinned evaluation runs. Reports of later versions wait in `_delayed_reports` for its end.
        self._reported = anyio.Event()
        self._reported.set()
        self._delayed_reports: list[Callable[[], Awaitable[None]]] = []
        self.unfinished: list[int] = []  # versions whose evaluation is due or running

    @property
    def progress(self) -> tuple[int, int] | None:
        """(scored completions, all completions) of the running evaluation; None if there is none."""
        return None if self._pump is None else self._pump.progress

    def is_behind(self, version: int, last: bool) -> bool:
        """Whether an evaluation that was due up to `version` is missing. `last`: `version` is the last version of the run."""
        pump = self._pump
        return pump is not None and any(pump.due(earlier, last) for earlier in range(pump.newest + 1, version + 1))

    async def wait_reported(self) -> None:
        """Wait until every version that was given to `evaluate` is reported. If no report is missing, does not yield to other
        tasks, so that the live view shows the next evaluation from its start."""
        if not self._reported.is_set():
            await self._reported.wait()

    async def evaluate(self, version: int, report: Report, *, last: bool, beside: TaskGroup | None) -> None:
        """If this version is due, evaluate it and call `report` with its metrics. If it is not due, call `report` with empty
        metrics. `report` is called after the reports of all earlier versions. `last`: this version is the last version of the run.
        `beside`: if the engine pins the version, the evaluation runs in this task group, and this method does not wait for it."""
        if self._pump is None or not self._pump.due(version, last):
            if self._reported.is_set():
                await report({})
            else:
                self._delayed_reports.append(partial(report, {}))
            return
        self.unfinished.append(version)
        await self.wait_reported()
        # With `rollout.weight_sync_interval` the engines may have older weights.
        await self._sync()
        engine = None if beside is None else self._pinning_engine
        pin = None if engine is None else await engine.pin(version)
        if beside is None or pin is None:
            metrics = await self._pump.run(version)
            self.unfinished.remove(version)
            await report(metrics)
            return
        self._reported = anyio.Event()
        spawn(beside, f"evaluation of version {version}", self._run_pinned, self._pump, version, pin, report)

    async def _run_pinned(self, pump: EvaluatePump, version: int, pin: PinnedVersion, report: Report) -> None:
        try:
            metrics = await pump.run(version, pin)
        finally:
            pin.end()
        self.unfinished.remove(version)
        await report(metrics)
        while self._delayed_reports:
            await self._delayed_reports.pop(0)()
        self._reported.set()
