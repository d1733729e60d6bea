"""Reward functions, their arguments and their results as plain values. The processes that call them are in `pool.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import cloudpickle

from asyncrl.algorithms.advantages import combine_components
from asyncrl.errors import ConfigError
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Prompt, Trajectory

RewardFunction: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One reward function in TRL's form, sync or async. `function` is an import path or a callable, which cloudpickle serialises.

        def f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns) -> list[float | None]

    The score None means "does not apply to this completion". `name` is the function's own name by default.
    Arguments are passed by keyword, and only if the signature accepts them. `trainer_state` has `global_step`, `epoch` and
    `max_steps` (or None). `log_metric(name, value)` logs a number of the call as `NAME/name`. `log_extra(column, values)` logs a
    value per completion as `NAME/column`. All other arguments are lists with one entry per completion:
    `completions` (strings, or `[{"role": "assistant", "content": ...}]` for conversational prompts), `completion_ids` (token ids),
    `generation_prompt` (the text of the chat template after the last message), and the columns of the row. A column's value is the
    same object in all entries, so a function must not change it."""

    function: str | RewardFunction
    weight: float = 1.0
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one call of a reward function. Lists have one entry per completion."""

    scores: list[float | None]
    # (index of the completion, text of the value) for each value that is not a score.
    invalid: Sequence[tuple[int, str]] = ()
    # Columns that the function logged by `log_extra`.
    extras: Mapping[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadedFunction:
    """A function as described by the worker that loaded it."""

    # The function's number in the worker.
    index: int
    name: str
    # Names of the arguments. None: every column (`**kwargs`).
    accepts: Sequence[str] | None
    asynchronous: bool

    def select(self, arguments: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """The arguments that the signature accepts. Only these are sent to the worker."""
        return {k: v for k, v in arguments.items() if self.accepts is None or k in self.accepts}


def trl_arguments(prompt: Prompt, trajectories: Sequence[Trajectory], generation_prompt: str) -> dict[str, list[Any]]:
    """The list arguments of `RewardSpec` by name. Columns of the row cannot replace the other arguments."""
    arguments: dict[str, list[Any]] = {name: [value] * len(trajectories) for name, value in prompt.columns.items()}
    arguments["prompts"] = [prompt.prompt] * len(trajectories)
    arguments["completions"] = [t.completion for t in trajectories]
    arguments["completion_ids"] = [t.completion_ids.tolist() for t in trajectories]
    arguments["generation_prompt"] = [generation_prompt] * len(trajectories)
    return arguments


def with_scores(
    trajectory: Trajectory,
    scores: Mapping[str, float | None],
    weights: Mapping[str, float],
    recorder: Recorder,
    extras: Mapping[str, Any] | None = None,
) -> Trajectory:
    """A copy of the trajectory with the scores as components, with the extras, and with the weighted sum of the scores added to
    the reward. Errors: ValueError for an infinite score."""
    for name, value in scores.items():
        if value is not None:
            recorder.observe(f"reward/{name}/mean", value)
    reward = combine_components(scores, weights)
    if trajectory.reward is not None:
        reward = trajectory.reward + (reward or 0.0)
    components, all_extras = {**trajectory.components, **scores}, {**trajectory.extras, **(extras or {})}
    return replace(trajectory, reward=reward, components=components, extras=all_extras)


def function_source(spec: RewardSpec) -> str | bytes:
    """The import path, or the function pickled by cloudpickle. Errors: ConfigError if the function cannot be pickled."""
    if isinstance(spec.function, str):
        return spec.function
    try:
        return bytes(cloudpickle.dumps(spec.function))
    # Pickling a user's object may raise any exception.
    except Exception as error:
        raise ConfigError(f"reward function {spec.function!r} cannot be pickled: {error}; name its path") from error


def remote_text(reply: dict[str, str]) -> str:
    """The message and traceback of an error reply."""
    traceback = reply["traceback"].rstrip()
    return reply["message"] + (f"\n--- in the worker ---\n{traceback}" if traceback else "")
