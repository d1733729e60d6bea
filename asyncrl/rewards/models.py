"""Reward models beside the reward functions, behind the same port: scored in batches on the lane that owns their device.

    score ──▶ functions in their workers (pool.py) ──▶ each model: texts, then batches, a closure each ──▶ components, reward

A closure a batch: decoding and training go on in between, and the loop waits for none of them. A batch holds what one call
of `score` brings: the completions of a group, or one (`reward.batch`).

`on_error` means the same as for functions, for each text by itself where it is the text that is at fault (too long, or scored
as no finite number), for the whole call where the model raised. Counted as `reward/{name}/errors`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal, Protocol, TypeVar

from asyncrl.concurrency.lane import Lane
from asyncrl.errors import ConfigError, LifecycleError, RewardError
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Messages, Prompt, Trajectory

from .calls import with_scores
from .pool import RewardPool

logger = logging.getLogger("asyncrl.rewards")

T = TypeVar("T")
Text = list[int]


class TextModel(Protocol):
    """What is asked of a reward model (models/reward_model.py), on the lane."""

    name: str
    longest: int

    def text(self, prompt: str | Messages, completion: str | Messages) -> Text:
        """Prompt and completion as the model's token ids. Errors: RewardError where messages cannot be rendered."""
        ...

    def batches(self, texts: Sequence[Text]) -> Iterable[list[int]]:
        """Which texts, by number, go into one forward."""
        ...

    def scores(self, texts: Sequence[Text]) -> list[float]:
        """One score a text, in one forward."""
        ...


class ModelRewards:
    """Implements `ports.Reward` with models after the functions of `pool`, which is open as long as this is used."""

    def __init__(
        self,
        pool: RewardPool,
        models: Sequence[tuple[TextModel, float]],
        lane: Lane,
        on_error: Literal["fail", "none", "zero"],
        recorder: Recorder,
    ) -> None:
        """`models`: each with its weight. Errors: ConfigError where two components have one name."""
        names = [model.name for model, _ in models]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"{len(twice)} reward models are named {twice[0]!r}; give them a `name` each")
        if both := set(names) & set(pool.weights):
            raise ConfigError(
                f"a reward function and a reward model are both named {min(both)!r}; give one another `name`"
            )
        self._pool = pool
        self._models = tuple(model for model, _ in models)
        self._weights = {model.name: weight for model, weight in models}
        self._lane = lane
        self._on_error = on_error
        self._recorder = recorder

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each component, functions first, by name."""
        return self._pool.weights | self._weights

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """As `RewardPool.score`, with the models' components too. Errors: as there."""
        scored = await self._pool.score(prompt, trajectories)
        if not scored:
            return scored
        with self._recorder.timed("time/reward"):
            columns = {model.name: await self._column(model, prompt, scored) for model in self._models}
        rows = [{name: column[i] for name, column in columns.items()} for i in range(len(scored))]
        return [with_scores(t, row, self._weights, self._recorder) for t, row in zip(scored, rows, strict=True)]

    async def _column(self, model: TextModel, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[float | None]:
        """The scores of one model, `on_error` applied. Errors: RewardError."""
        where = f"reward model {model.name!r} (group {prompt.group_id})"
        found: list[float | None] = [None] * len(trajectories)
        try:
            texts = await self._run(
                model, lambda: [model.text(prompt.prompt, t.completion) for t in trajectories], "texts"
            )
            fitting = [place for place, text in enumerate(texts) if 0 < len(text) <= model.longest]
            for batch in model.batches([texts[place] for place in fitting]):
                places = [fitting[i] for i in batch]
                work = partial(model.scores, [texts[place] for place in places])
                for place, score in zip(places, await self._run(model, work, "scores"), strict=True):
                    found[place] = score
        except LifecycleError:  # the lane is closed: the run ends
            raise
        except Exception as error:  # whatever a module raises
            reason = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
            return [self._failed(model, f"{where} failed: {reason}", error)] * len(trajectories)
        return [
            score
            if score is not None and math.isfinite(score)
            else self._failed(model, _why(where, model, text, score))
            for score, text in zip(found, texts, strict=True)
        ]

    def _failed(self, model: TextModel, reason: str, cause: Exception | None = None) -> float | None:
        if self._on_error == "fail":
            raise RewardError(reason) from cause
        logger.warning("%s; counted as %s", reason, "not applicable" if self._on_error == "none" else "0")
        self._recorder.count(f"reward/{model.name}/errors")
        return None if self._on_error == "none" else 0.0

    async def _run(self, model: TextModel, work: Callable[[], T], what: str) -> T:
        with self._recorder.wait("score pump", f"reward model {model.name!r}", on="lane", cause="reward"):
            return await self._lane.run(work, name=f"reward/{what}/{model.name}")


def _why(where: str, model: TextModel, text: Text, score: float | None) -> str:
    if score is not None:
        return f"{where} gave {score}; expected a finite number"
    if not text:
        return f"{where} was given a text without a token"
    return (
        f"{where}: a text has {len(text)} of its tokens, and it takes {model.longest}; texts are never cut: lower "
        "rollout.max_tokens, raise `max_tokens` of the reward model where it allows more, or set reward.on_error=none"
    )
