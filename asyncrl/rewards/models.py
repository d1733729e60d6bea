"""Reward models, which score completions on the thread that owns their device, after the reward functions.

    score ──▶ functions in their workers (pool.py) ──▶ each model: tokenize texts, then run batches ──▶ components, reward

Every batch is one closure on the device's thread, so decoding and training can run between two batches. A batch holds texts of
one call of `score`: the completions of a group, or a single one (`reward.batch`).

With `reward.on_error: fail` a text that is too long or has no finite score raises `RewardError`. Otherwise the setting names its
score. If the model raises, this holds for all texts of the call. The metric `reward/{name}/errors` counts both cases.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from asyncrl.concurrency.lane import Lane
from asyncrl.errors import ConfigError, LifecycleError, RewardError
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Prompt, Trajectory

from .calls import with_scores
from .pool import RewardPool

if TYPE_CHECKING:
    from asyncrl.models.reward_model import RewardModel

logger = logging.getLogger("asyncrl.rewards")

T = TypeVar("T")
# A tokenized prompt with its completion.
TokenIds = list[int]


class ModelRewards:
    """Implements `ports.Reward` by the functions of `pool`, then the models. `pool` must stay open while `score` is called."""

    def __init__(
        self, pool: RewardPool, models: Sequence[tuple[RewardModel, float]], lane: Lane, recorder: Recorder
    ) -> None:
        """`models`: pairs of a model and its weight. Errors: ConfigError if two components have the same name."""
        names = [model.name for model, _ in models]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"{len(repeated)} reward models are named {repeated[0]!r}; give each its own `name`")
        if shared := set(names) & set(pool.weights):
            raise ConfigError(f"a reward function and a reward model are both named {min(shared)!r}; change one `name`")
        self._pool = pool
        self._models = tuple(model for model, _ in models)
        self._weights = {model.name: weight for model, weight in models}
        self._lane = lane
        self._recorder = recorder

    @property
    def weights(self) -> dict[str, float]:
        """Component name -> weight, functions first."""
        return self._pool.weights | self._weights

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """`RewardPool.score`, then a component for each model. Errors: those of `RewardPool.score`."""
        scored = await self._pool.score(prompt, trajectories)
        if not scored:
            return scored
        with self._recorder.timed("time/reward"):
            columns = {model.name: await self._column(model, prompt, scored) for model in self._models}
        rows = [{name: column[i] for name, column in columns.items()} for i in range(len(scored))]
        return [with_scores(t, row, self._weights) for t, row in zip(scored, rows, strict=True)]

    async def _column(
        self, model: RewardModel, prompt: Prompt, trajectories: Sequence[Trajectory]
    ) -> list[float | None]:
        """The scores of one model, after `on_error`. Errors: RewardError."""
        label = f"reward model {model.name!r} (group {prompt.group_id})"
        scores: list[float | None] = [None] * len(trajectories)
        try:
            texts = await self._run(
                model, lambda: [model.tokenize(prompt.prompt, t.completion) for t in trajectories], "texts"
            )
            valid = [index for index, text in enumerate(texts) if 0 < len(text) <= model.longest]
            for batch in model.batches([texts[index] for index in valid]):
                indices = [valid[i] for i in batch]
                work = partial(model.scores, [texts[index] for index in indices])
                for index, value in zip(indices, await self._run(model, work, "scores"), strict=True):
                    scores[index] = value
        except Exception as error:
            # LifecycleError: the device's thread is closed, since the run ends.
            if isinstance(error, LifecycleError):
                raise
            reason = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
            failure = RewardError(f"{label} failed: {reason}")
            failure.__cause__ = error
            return [self._pool.default_score(model.name, failure)] * len(trajectories)
        for index, text in enumerate(texts):
            score = scores[index]
            if score is None or not math.isfinite(score):
                failure = RewardError(_reason(label, model, text, score))
                scores[index] = self._pool.default_score(model.name, failure)
        return scores

    async def _run(self, model: RewardModel, work: Callable[[], T], stage: str) -> T:
        with self._recorder.wait("score pump", f"reward model {model.name!r}", on="lane", cause="reward"):
            return await self._lane.run(work, name=f"reward/{stage}/{model.name}")


def _reason(label: str, model: RewardModel, text: TokenIds, score: float | None) -> str:
    if score is not None:
        return f"{label} gave {score}; expected a finite number"
    if not text:
        return f"{label} was given a text without a token; check its tokenizer and the completion"
    return (
        f"{label}: a text has {len(text)} tokens, but the model takes at most {model.longest}, and texts are never cut; lower "
        "rollout.max_tokens, raise `max_tokens` of the reward model if it allows more, or set reward.on_error=none"
    )
