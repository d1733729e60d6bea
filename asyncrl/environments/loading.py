"""Environments by name: `single_turn`, or the user's own class by its address."""

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
    """`single_turn`, or `file.py:Class` / `module:Class`: a class (or factory) whose instances have `async def run`.

    It is called with those of `tokenizer`, `sampling`, `seed` and `text` (of a completion, by `reward.text`) that its
    signature takes, by name. It runs on the event loop: what blocks or computes for more than a few milliseconds belongs into a
    reward function.
    Errors: `ConfigError` that names the address and the cause.
    """
    text = text or CompletionText(tokenizer)
    offered: dict[str, Any] = {"tokenizer": tokenizer, "sampling": sampling, "seed": seed, "text": text}
    if address == "single_turn":
        return SingleTurn(**offered)
    factory = load_object(address)
    if not callable(factory):
        raise ConfigError(f"environment {address!r} is a {type(factory).__name__}, not a class")
    parameters = inspect.signature(factory).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    missing = [p.name for p in parameters if _must_be_given(p) and p.name not in offered]
    if missing:
        raise ConfigError(
            f"environment {address!r} asks for {', '.join(map(repr, missing))}; it can be given {', '.join(offered)}"
        )
    names = {p.name for p in parameters}
    with user_code(lambda error: ConfigError(f"environment {address!r} raised {type(error).__name__}: {error}")):
        environment = factory(**{k: v for k, v in offered.items() if takes_all or k in names})
    run = getattr(environment, "run", None)
    if not inspect.iscoroutinefunction(run):
        raise ConfigError(f"environment {address!r} has no `async def run(self, prompt, member, group_size, generate)`")
    return environment  # type: ignore[no-any-return]  # checked by its form


def _must_be_given(parameter: inspect.Parameter) -> bool:
    named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    return named and parameter.default is parameter.empty
