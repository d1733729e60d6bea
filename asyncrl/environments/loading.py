"""Loads the environment of a run: `single_turn`, or a coroutine function, a class or a factory of the user."""

from __future__ import annotations

import inspect
from typing import Any

from asyncrl.config.imports import load_object, user_code
from asyncrl.config.schema import Config
from asyncrl.data.texts import CompletionText
from asyncrl.errors import ConfigError
from asyncrl.ports import Environment

from .policy import AgentEnvironment
from .session import Agents
from .single_turn import SingleTurn

# Arguments that the class or factory of an environment may take.
_AVAILABLE = ("tokenizer", "sampling", "seed", "text")


def load_environment(address: str, agents: Agents, text: CompletionText) -> Environment:
    """Makes the environment at `address`: `single_turn`, `file.py:name` or `module:name`. `name` is a coroutine function
    `episode(task, policy)`, a class that implements `Environment`, or a function that returns an `Environment` (a factory).

    A class or factory may take any of `tokenizer`, `sampling`, `seed` and `text` (completion -> text, as `reward.text` says).
    The instance needs an `async def run`, which runs on the event loop. Code that blocks or computes for more than a few
    milliseconds belongs in a reward function or a tool.
    Errors: `ConfigError` with the address and the cause.
    """
    values = (agents.chat.tokenizer, agents.sampling, agents.seed, text)
    available = dict[str, Any](zip(_AVAILABLE, values, strict=True))
    if address == "single_turn":
        return SingleTurn(**available)
    factory = find_environment(address)
    if is_episode(factory):
        return AgentEnvironment(agents, factory)
    parameters = inspect.signature(factory).parameters.values()
    takes_all, names = any(p.kind is p.VAR_KEYWORD for p in parameters), {p.name for p in parameters}
    arguments = {name: value for name, value in available.items() if takes_all or name in names}
    with user_code(lambda error: ConfigError(f"environment {address!r} raised {type(error).__name__}: {error}")):
        environment = factory(**arguments)
    return _check_run(environment, f"environment {address!r}")  # type: ignore[no-any-return]  # has `run`


def find_environment(address: str) -> Any:
    """The coroutine function, class or factory at an address. Does not call it. Errors: ConfigError."""
    factory, name = load_object(address), f"environment {address!r}"
    kinds = "a coroutine function, a class or a factory"
    if is_episode(factory):
        return check_episode(factory, name)
    if not callable(factory):
        raise ConfigError(f"{name} is of type {type(factory).__name__}; expected {kinds}")
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError as error:
        raise ConfigError(f"{name}: {error}; expected {kinds}, with a signature") from error
    missing = [p.name for p in parameters if _is_required(p) and p.name not in _AVAILABLE]
    if {"task", "policy"} <= set(missing):
        raise ConfigError(f"{name} is not a coroutine function; write `async def episode(task, policy)`")
    if missing:
        raise ConfigError(f"{name} requires {', '.join(map(repr, missing))}; a run passes only {', '.join(_AVAILABLE)}")
    if isinstance(factory, type):
        _check_run(factory, name)
    return factory


def check_environment(config: Config, passed: Any = None) -> None:
    """Refuses an invalid environment. For a class, a factory or an instance also refuses settings that only coroutine functions
    use. `passed`: an object that the program passes in place of `rollout.environment`. Errors: ConfigError."""
    rollout, name = config.rollout, "the environment that the program passes"
    if passed is not None:
        found = check_episode(passed, name) if is_episode(passed) else _check_run(passed, name)
    elif rollout.environment == "single_turn":
        return
    else:
        found, name = find_environment(rollout.environment), f"environment {rollout.environment!r}"
    for setting in () if is_episode(found) else ("max_turns", "tool_timeout_s", "tool_max_chars"):
        if getattr(rollout, setting) != type(rollout).model_fields[setting].default:
            raise ConfigError(
                f"rollout.{setting} is for `async def episode(task, policy)`, but {name} is not a coroutine function and makes "
                "its own requests; remove the setting"
            )


def _check_run(environment: Any, name: str) -> Any:
    if not inspect.iscoroutinefunction(getattr(environment, "run", None)):
        raise ConfigError(f"{name} has no `async def run(self, prompt, member, group_size, generate)`")
    return environment


def is_episode(loaded: Any) -> bool:
    """Whether `loaded` is a coroutine function, or an instance whose `__call__` is a coroutine function."""
    # ruff's B004 is meant for `hasattr(x, "__call__")` as a test for callables. Here the method itself is needed.
    methods = (loaded,) if isinstance(loaded, type) else (loaded, getattr(loaded, "__call__", None))  # noqa: B004
    return any(map(inspect.iscoroutinefunction, methods))


def takes_policy(function: Any) -> bool:
    """Whether `function` is a coroutine function that requires exactly two arguments, as `episode(task, policy)` does."""
    parameters = inspect.signature(function).parameters.values()
    return is_episode(function) and sum(map(_is_required, parameters)) == 2


def check_episode(function: Any, name: str) -> Any:
    """Returns `function`. Errors: ConfigError if it is not a coroutine function of two arguments."""
    if not is_episode(function):
        raise ConfigError(f"{name} is {function!r:.80}; expected `async def episode(task, policy)`")
    try:
        inspect.signature(function).bind("task", "policy")
    except TypeError as error:
        raise ConfigError(f"{name}: {error}; expected `async def episode(task, policy)`") from error
    return function


def _is_required(parameter: inspect.Parameter) -> bool:
    is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return not is_variable and parameter.default is parameter.empty
