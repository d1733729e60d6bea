"""Reward functions, their arguments and their results as plain values. `pool.py` runs the processes that call the functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import cloudpickle

from asyncrl.algorithms.advantages import combine_components
from asyncrl.errors import ConfigError
from asyncrl.types import Prompt, Trajectory

RewardFunction: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One reward function in TRL's form, sync or async. `function` is an import path or a callable, which cloudpickle serialises.

        def f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns) -> list[float | None]

    Arguments are passed by keyword, and only if the signature accepts them. `trainer_state` has `global_step`, `epoch` and
    `max_steps` (None: no limit). `log_metric(name, value)` logs a number of the call as `NAME/name`, where NAME is the function's
    name. `log_extra(column, values)` logs a value per completion as `NAME/column`. The following are lists with one entry per
    completion: `prompts`, `completions` (strings, or the messages after a conversational prompt), `completion_ids` (token ids),
    `generation_prompt` (the text of the chat template after the last message), and the columns of the dataset's row. A column's
    value is the same object in all entries, so a function must not change it.
    The run passes further arguments only if the signature names them. Lists: `num_turns` (number of the policy's replies),
    `tool_calls` (in OpenAI's form), `notes` (the values of `policy.note` by name). Strings: `base_url` and `api_key` of an endpoint
    where the policy itself answers. These answers are not trained.

    A score is a number, or None if the function does not apply to this completion. In place of a number the function may return:
    a list with a reward for each reply, whose sum is the score; a mapping with `score` and other values to log; an exception,
    which is an error of this completion alone. With `components` (name -> weight) the function returns, in place of each number,
    a mapping with these names. Each value is a component `NAME/name` of the reward. `name` None: the function's own name.
    `timeout_s`: seconds of one call; None: the pool's setting."""

    function: str | RewardFunction
    weight: float = 1.0
    name: str | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    timeout_s: float | None = None

    def weights(self, name: str) -> dict[str, float]:
        """Name of each component -> its weight in the reward. `name`: the name of the function."""
        if not self.components:
            return {name: self.weight}
        return {f"{name}/{part}": self.weight * weight for part, weight in self.components.items()}


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one call of a reward function. Inner lists have one entry per completion."""

    scores: list[list[float | None]]  # one list for each component
    # For each component and completion: the rewards of its replies, or None if the function gave one number.
    by_turn: Sequence[list[list[float] | None]]
    # (index of the component, index of the completion, text of the value) for each value that is not a score.
    invalid: Sequence[tuple[int, int, str]] = ()
    extras: Mapping[str, list[Any]] = field(default_factory=dict)  # name -> logged values


@dataclass(frozen=True, slots=True)
class LoadedFunction:
    """A function as described by the worker that loaded it."""

    index: int  # the function's number in the worker
    name: str
    # Names of the parameters, and whether the function also takes all other columns (`**kwargs`).
    parameters: Sequence[str]
    takes_kwargs: bool
    asynchronous: bool
    whole_group: bool  # see `forms.whole_group`
    spec: RewardSpec

    @property
    def asks_policy(self) -> bool:
        """Whether the function takes the address of the policy's endpoint."""
        return not {"base_url", "api_key"}.isdisjoint(self.parameters)

    def select(self, arguments: dict[str, Any], by_name: dict[str, Any]) -> dict[str, Any]:
        """What the worker gets: the `arguments` that the signature accepts, and those of `by_name` that the signature names."""
        accepted = {k: v for k, v in arguments.items() if self.takes_kwargs or k in self.parameters}
        return accepted | {k: v for k, v in by_name.items() if k in self.parameters}


def trl_arguments(
    prompt: Prompt, trajectories: Sequence[Trajectory], generation_prompt: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two dictionaries of the arguments that are lists: the first for named parameters and `**columns`, the second for named
    parameters only. A column of the row cannot replace another argument."""
    arguments: dict[str, Any] = {name: [value] * len(trajectories) for name, value in prompt.columns.items()}
    arguments["prompts"] = [prompt.prompt] * len(trajectories)
    arguments["completions"] = [t.completion for t in trajectories]
    arguments["completion_ids"] = [t.completion_ids.tolist() for t in trajectories]
    arguments["generation_prompt"] = [generation_prompt] * len(trajectories)
    by_name: dict[str, Any] = {"num_turns": [1 if t.turns is None else int(t.turns.size) for t in trajectories]}
    messages = [[] if isinstance(t.completion, str) else t.completion for t in trajectories]
    by_name["tool_calls"] = [[call for each in m for call in each.get("tool_calls") or ()] for m in messages]
    by_name["notes"] = [{k[4:]: v for k, v in t.extras.items() if k.startswith("own/")} for t in trajectories]
    return arguments, by_name


def with_scores(
    trajectory: Trajectory,
    scores: Mapping[str, float | None],
    weights: Mapping[str, float],
    extras: Mapping[str, Any] | None = None,
    by_turn: Mapping[str, list[float] | None] | None = None,
) -> Trajectory:
    """A copy of the trajectory with further components (`scores`) and extras. The scores' weighted sum is added to the reward.
    `by_turn`: component -> a reward for each reply; None: only the score was given. Errors: ValueError for an infinite score."""
    reward = combine_components(scores, weights)
    if trajectory.reward is not None:
        reward = trajectory.reward + (reward or 0.0)
    components, all_extras = {**trajectory.components, **scores}, {**trajectory.extras, **(extras or {})}
    turn_rewards = trajectory.turn_rewards
    for name, parts in (by_turn or {}).items():
        if parts is not None:
            earlier = turn_rewards or [0.0] * len(parts)
            turn_rewards = tuple(sum_ + weights[name] * part for sum_, part in zip(earlier, parts, strict=True))
    return replace(trajectory, reward=reward, components=components, extras=all_extras, turn_rewards=turn_rewards)


def function_source(spec: RewardSpec) -> str | bytes:
    """The import path, or the function pickled by cloudpickle. Errors: ConfigError if the function cannot be pickled."""
    if isinstance(spec.function, str):
        return spec.function
    try:
        return bytes(cloudpickle.dumps(spec.function))
    # Pickling a user's object may raise any exception.
    except Exception as error:
        advice = "give its import path (module:name or file.py:name)"
        raise ConfigError(f"reward function {spec.function!r} cannot be pickled: {error}; {advice}") from error


def remote_text(reply: dict[str, str]) -> str:
    """The message and traceback of an error reply."""
    traceback = reply["traceback"].rstrip()
    return reply["message"] + (f"\n--- in the worker ---\n{traceback}" if traceback else "")
