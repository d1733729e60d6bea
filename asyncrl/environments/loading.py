"""Loads the environment of a run: `single_turn`, or a class of the user."""

from __future__ import annotations

import inspect
from typing import Any

from asyncrl.config.imports import load_object, user_code
from asyncrl.data.texts import CompletionText
from asyncrl.errors import ConfigError
from asyncrl.ports import Environment
from asyncrl.types import SamplingParams

from .single_turn import SingleTurn


def load_environment(
    address: str, *, tokenizer: Any, sampling: SamplingParams, seed: int, text: CompletionText | None = None
) -> Environment:
    """The environment at `address`: `single_turn`, or a class or factory `file.py:Class` or `module:Class`.

    The constructor may take any of `tokenizer`, `sampling`, `seed` and `text` (which decodes a completion as `reward.text` says).
    Instances need an `async def run`, which runs on the event loop. Code that blocks or computes for more than a few
    milliseconds belongs in a reward function.
    Errors: `ConfigError` with the address and the cause.
    """
    text = text or CompletionText(tokenizer)
    available: dict[str, Any] = {"tokenizer": tokenizer, "sampling": sampling, "seed": seed, "text": text}
    if address == "single_turn":
        return SingleTurn(**available)
    factory = load_object(address)
    if not callable(factory):
        raise ConfigError(f"environment {address!r} is of type {type(factory).__name__}; expected a class")
    parameters = inspect.signature(factory).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    missing = [p.name for p in parameters if _is_required(p) and p.name not in available]
    if missing:
        raise ConfigError(
            f"environment {address!r} requires {', '.join(map(repr, missing))}; a run passes only {', '.join(available)}"
        )
    names = {p.name for p in parameters}
    arguments = {name: value for name, value in available.items() if takes_all or name in names}
    with user_code(lambda error: ConfigError(f"environment {address!r} raised {type(error).__name__}: {error}")):
        environment = factory(**arguments)
    if not inspect.iscoroutinefunction(getattr(environment, "run", None)):
        raise ConfigError(f"environment {address!r} has no `async def run(self, prompt, member, group_size, generate)`")
    return environment  # type: ignore[no-any-return]  # has `run`, which was checked


def _is_required(parameter: inspect.Parameter) -> bool:
    named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    return named and parameter.default is parameter.empty
