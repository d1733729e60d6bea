"""Where `model.path` and `model.tokenizer` point, told without loading anything: no torch, no transformers, no network."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.config.imports import is_interrupt, load_object, raised
from asyncrl.config.schema import ModelConfig
from asyncrl.config.schema_rollouts import RewardModelConfig
from asyncrl.errors import AsyncrlError, ConfigError


def is_builder(config: ModelConfig) -> bool:
    """Whether `model.path` names a function that builds the model."""
    return is_address(config.path or "")


def require_unread(config: ModelConfig) -> None:
    """Errors: ConfigError for settings that a model built by a function does not read."""
    unread = [name for name in ("tokenizer", "gguf_file", "random_init") if getattr(config, name)]
    if is_builder(config) and unread:
        raise ConfigError(
            f"model.{unread[0]} is {getattr(config, unread[0])}, and model.path names a function ({config.path}), which returns "
            f"model and tokenizer by itself; leave model.{unread[0]} out, or do in that function what it asks for"
        )


def is_address(path: str) -> bool:
    """Whether it is `file.py:name` or `module:name`, and no directory or hub id."""
    return ".py:" in path or (":" in path and "/" not in path and not Path(path).exists())


def name_of(config: RewardModelConfig) -> str:
    """As in metrics: the last part of the path, unless the configuration has another."""
    last = config.path.rpartition(":")[2] if is_address(config.path) else Path(config.path).name
    return config.name or last


def load_builder(path: str, setting: str) -> Callable[[int], Any]:
    """The function at `path`, which is not called. Errors: ConfigError where it is none, or does not take a seed alone."""
    found = load_object(path)
    wanted = "expected a function that takes a seed and returns (model, tokenizer)"
    if not callable(found):
        raise ConfigError(f"{setting}: {path} is of type {type(found).__name__}; {wanted}")
    try:
        inspect.signature(found).bind(0)
    except TypeError as error:
        raise ConfigError(f"{setting}: {path} cannot be called with a seed ({error}); {wanted}") from error
    except ValueError:  # written in C: the call itself says what is wrong
        pass
    return found  # type: ignore[no-any-return]  # callable, as was just seen


def call_builder(path: str, seed: int, setting: str) -> Any:
    """What the function at `path` makes of the seed. Errors: ConfigError, with file, line and cause of what it raised."""
    builder = load_builder(path, setting)
    try:
        return builder(seed)
    except AsyncrlError:
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise ConfigError(f"{setting}: {path} raised {raised(error)}") from error


def model_source(config: ModelConfig) -> str:
    """The directory or hub id of the model. Errors: ConfigError where it is neither, or lacks what is asked for."""
    if config.path is None:
        raise ConfigError("model.path is not set; name a directory or hub id of a Hugging Face causal language model")
    source = directory_or_hub(config.path, "model.path")
    place = Path(source)
    if config.gguf_file and place.is_dir() and not (place / config.gguf_file).is_file():
        found = sorted(p.name for p in place.glob("*.gguf"))
        raise ConfigError(f"model.gguf_file: no {config.gguf_file!r} in {config.path!r}; GGUF files there: {found}")
    if not config.gguf_file and place.is_dir() and not (place / "config.json").is_file():
        raise ConfigError(f"model.path: no model configuration in {config.path!r}: it holds no config.json")
    return source


def tokenizer_source(config: ModelConfig) -> str:
    """The directory or hub id of the tokenizer; the model's own by default. Errors: ConfigError."""
    return directory_or_hub(config.tokenizer, "model.tokenizer") if config.tokenizer else model_source(config)


def directory_or_hub(given: str, setting: str) -> str:
    """A directory as it is opened, or a hub id. Errors: ConfigError where it looks like a path and is no directory: the hub is
    not asked for that."""
    path = Path(given)
    if path.is_dir():
        return given
    first, slash, _ = given.partition("/")
    beside = bool(slash) and Path(first).is_dir()  # `runs/model`, where there is a `runs`
    looks_local = path.is_absolute() or given.startswith((".", "~")) or given.count("/") > 1 or beside or path.exists()
    if looks_local and not path.is_dir():
        found = "is a file" if path.exists() else f"does not exist (looked from {Path.cwd()})"
        raise ConfigError(f"{setting}: there is no directory {given!r}: it {found}; name a directory or a hub id")
    return given
