"""Reward functions, their arguments and their results as plain values. The processes that call them are in `pool.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import cloudpickle

from asyncrl.algorithms.advantages import combine_components
from asyncrl.errors import ConfigError
from asyncrl.types import Prompt, Trajectory

from .forms import BY_NAME

RewardFunction: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One reward function in TRL's form, sync or async. `function` is an import path or a callable, which cloudpickle serialises.

        def f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns) -> list[float | None]

    Arguments are passed by keyword, and only if the signature accepts them. `trainer_state` has `global_step`, `epoch` and
    `max_steps` (or None). `log_metric(name, value)` logs a number of the call as `NAME/name`. `log_extra(column, values)` logs a
    value per completion as `NAME/column`. All other arguments are lists with one entry per completion:
    `completions` (strings, or the messages after a conversational prompt), `completion_ids` (token ids), `generation_prompt` (the
    text of the chat template after the last message), and the columns of the row. A column's value is the same object in all
    entries, so a function must not change it. A function whose signature names them also gets `num_turns` (replies of the policy),
    `tool_calls` (in OpenAI's form) and `notes` (the values of `policy.note` by name); and `base_url` and `api_key`, two strings:
    the policy itself behind an OpenAI-compatible endpoint, whose answers are not trained.

    A score is a number, or None: the function does not apply to this completion. A list has the reward of each reply of an episode,
    and their sum is the score. A mapping has the score as `score`, and other values to log. With `components` (name -> weight) a
    mapping has these names, and each is a component `NAME/name` of the reward. An exception in place of a score is an
    error of this completion alone. `name`: by default the function's own. `timeout_s`: of one call; None: that of the pool."""

    function: str | RewardFunction
    weight: float = 1.0
    name: str | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    timeout_s: float | None = None

    def weights(self, name: str) -> dict[str, float]:
        """Weight of each component, by the name of the component. `name`: the name of the function."""
        if not self.components:
            return {name: self.weight}
        return {f"{name}/{part}": self.weight * weight for part, weight in self.components.items()}


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one call of a reward function. Inner lists have one entry per completion."""

    # One list for each component.
    scores: list[list[float | None]]
    # For each component and completion: the rewards of its replies, or None if the function gave one number.
    by_turn: Sequence[list[list[float] | None]]
    # (number of the component, index of the completion, text of the value) for each value that is not a score.
    invalid: Sequence[tuple[int, int, str]] = ()
    # Columns that the function logged by `log_extra`.
    extras: Mapping[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadedFunction:
    """A function as described by the worker that loaded it."""

    # The function's number in the worker.
    index: int
    name: str
    # Names of the arguments, and whether the function takes every other column, too (`**kwargs`).
    named: Sequence[str]
    takes_all: bool
    asynchronous: bool
    # Needs all completions of a group in one call (`forms.whole_group`).
    whole_group: bool
    spec: RewardSpec

    @property
    def asks_policy(self) -> bool:
        """Whether the function takes the address of the policy's endpoint."""
        return not {"base_url", "api_key"}.isdisjoint(self.named)

    def select(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments that the signature accepts. Only these are sent to the worker."""
        return {k: v for k, v in arguments.items() if k in self.named or (self.takes_all and k not in BY_NAME)}


def trl_arguments(prompt: Prompt, trajectories: Sequence[Trajectory], generation_prompt: str) -> dict[str, Any]:
    """The list arguments of `RewardSpec` by name. Columns of the row cannot replace the other arguments."""
    arguments: dict[str, Any] = {name: [value] * len(trajectories) for name, value in prompt.columns.items()}
    arguments["prompts"] = [prompt.prompt] * len(trajectories)
    arguments["completions"] = [t.completion for t in trajectories]
    arguments["completion_ids"] = [t.completion_ids.tolist() for t in trajectories]
    arguments["generation_prompt"] = [generation_prompt] * len(trajectories)
    arguments["num_turns"] = [1 if t.turns is None else int(t.turns.size) for t in trajectories]
    messages = [[] if isinstance(t.completion, str) else t.completion for t in trajectories]
    arguments["tool_calls"] = [[call for each in m for call in each.get("tool_calls") or ()] for m in messages]
    prefix = "own/"
    arguments["notes"] = [
        {k.removeprefix(prefix): v for k, v in t.extras.items() if k.startswith(prefix)} for t in trajectories
    ]
    return arguments


def with_scores(
    trajectory: Trajectory,
    scores: Mapping[str, float | None],
    weights: Mapping[str, float],
    extras: Mapping[str, Any] | None = None,
    by_turn: Mapping[str, list[float] | None] | None = None,
) -> Trajectory:
    """A copy of the trajectory with the scores as components, with the extras, and with the weighted sum of the scores added to
    the reward. `by_turn`: the rewards of replies whose sum is a score. Errors: ValueError for an infinite score."""
    reward = combine_components(scores, weights)
    if trajectory.reward is not None:
        reward = trajectory.reward + (reward or 0.0)
    components, all_extras = {**trajectory.components, **scores}, {**trajectory.extras, **(extras or {})}
    turn_rewards = trajectory.turn_rewards
    for name, parts in (by_turn or {}).items():
        if parts is not None:
            before = turn_rewards or [0.0] * len(parts)
            turn_rewards = tuple(sum_ + weights[name] * part for sum_, part in zip(before, parts, strict=True))
    return replace(trajectory, reward=reward, components=components, extras=all_extras, turn_rewards=turn_rewards)


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
