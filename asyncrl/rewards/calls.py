"""What a reward function is, what it is called with and what came back: the values around a call, no processes here."""

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
    """One reward function in TRL's form, sync or async, by import path or as a callable (sent by cloudpickle):

        def f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns) -> list[float | None]

    All arguments are passed by name, and only those that the signature takes. Each is a list with one entry per
    completion: `completions` strings (or `[{"role": "assistant", "content": ...}]` for conversational prompts),
    `completion_ids` lists of token ids, `generation_prompt` what the template wrote behind the last message (it may open <think>),
    and every other column of the row. The entries of a column are one object.
    `trainer_state` has `global_step`, `max_steps` (None: without end) and `epoch`; `log_metric(name, value)` and
    `log_extra(column, values)` log a number of the call, and a value of each completion, as `NAME/name` and `NAME/column`.
    None means "does not apply to this completion". `name` is the function's own by default.
    """

    function: str | RewardFunction
    weight: float = 1.0
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call gave, one entry per completion."""

    scores: list[float | None]
    # Completions by number, and what stood there instead of a score.
    wrong: Sequence[tuple[int, str]] = ()
    extras: Mapping[str, list[Any]] = field(default_factory=dict)  # what the function logged, by name


@dataclass(frozen=True, slots=True)
class LoadedFunction:
    """A function as the workers reported it."""

    index: int
    name: str
    accepts: Sequence[str] | None  # None: every column (`**kwargs`)
    asynchronous: bool

    def select(self, arguments: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """What the function's signature takes: nothing else travels to the worker."""
        return {k: v for k, v in arguments.items() if self.accepts is None or k in self.accepts}


def arguments_of(prompt: Prompt, trajectories: Sequence[Trajectory], generation_prompt: str) -> dict[str, list[Any]]:
    """TRL's arguments by name; a column of the row never replaces one that we set."""
    arguments: dict[str, list[Any]] = {name: [value] * len(trajectories) for name, value in prompt.columns.items()}
    arguments["prompts"] = [prompt.prompt] * len(trajectories)
    arguments["completions"] = [t.completion for t in trajectories]
    arguments["completion_ids"] = [t.tokens[t.prompt_length :].tolist() for t in trajectories]
    arguments["generation_prompt"] = [generation_prompt] * len(trajectories)
    return arguments


def with_scores(
    trajectory: Trajectory,
    scores: Mapping[str, float | None],
    weights: Mapping[str, float],
    recorder: Recorder,
    extras: Mapping[str, Any] | None = None,
) -> Trajectory:
    """The trajectory with these components and extras, the weighted sum of the components added to the reward that it has. Errors:
    ValueError for one that is infinite."""
    for name, value in scores.items():
        if value is not None:
            recorder.observe(f"reward/{name}/mean", value)
    reward = combine_components(scores, weights)
    if trajectory.reward is not None:
        reward = trajectory.reward + (reward or 0.0)
    components, others = {**trajectory.components, **scores}, {**trajectory.extras, **(extras or {})}
    return replace(trajectory, reward=reward, components=components, extras=others)


def source_of(spec: RewardSpec) -> str | bytes:
    """What travels to a worker: the import path, or the function itself by cloudpickle. Errors: ConfigError where it cannot."""
    if isinstance(spec.function, str):
        return spec.function
    try:
        return bytes(cloudpickle.dumps(spec.function))
    except Exception as error:  # whatever the pickling of a user's object may raise
        raise ConfigError(f"reward function {spec.function!r} cannot be sent to a worker: {error}") from error


def remote_text(reply: dict[str, str]) -> str:
    """The message and traceback of an error reply."""
    traceback = reply["traceback"].rstrip()
    return reply["message"] + (f"\n--- in the worker ---\n{traceback}" if traceback else "")
