"""Checks `model.path` and `model.tokenizer`, and calls a function that `model.path` names. Imports no torch, uses no network."""

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
    return is_import_path(config.path or "")


def refuse_unread_settings(config: ModelConfig) -> None:
    """Errors: ConfigError if `model.path` names a function, and a setting is given that has no effect on such a model."""
    unread = [name for name in ("tokenizer", "gguf_file", "random_init") if getattr(config, name)]
    if is_builder(config) and unread:
        raise ConfigError(
            f"model.{unread[0]} is {getattr(config, unread[0])}, but model.path names a function ({config.path}), which returns "
            f"model and tokenizer by itself; leave model.{unread[0]} out, or implement the setting in the function"
        )


def is_import_path(path: str) -> bool:
    """Whether `path` is `file.py:name` or `module:name`, rather than a directory or a hub id."""
    return ".py:" in path or (":" in path and "/" not in path and not Path(path).exists())


def reward_model_name(config: RewardModelConfig) -> str:
    """The name in metrics: `config.name`, or the last part of the path if no name is set."""
    last = config.path.rpartition(":")[2] if is_import_path(config.path) else Path(config.path).name
    return config.name or last


def load_builder(path: str, setting: str) -> Callable[[int], Any]:
    """Imports the function at `path`. Errors: ConfigError, naming `setting`, for a function that does not take one seed."""
    builder = load_object(path)
    expected = "expected a function that takes a seed and returns (model, tokenizer)"
    if not callable(builder):
        raise ConfigError(f"{setting}: {path} is of type {type(builder).__name__}; {expected}")
    try:
        inspect.signature(builder).bind(0)
    except TypeError as error:
        raise ConfigError(f"{setting}: {path} cannot be called with a seed ({error}); {expected}") from error
    except ValueError:
        # Functions written in C may have no signature. If the function takes no seed, its call fails.
        pass
    return builder  # type: ignore[no-any-return]  # callable() is true


def call_builder(path: str, seed: int, setting: str) -> Any:
    """The result of the function at `path` for `seed`. Errors: AsyncrlErrors of the function; ConfigError for its other errors."""
    builder = load_builder(path, setting)
    try:
        return builder(seed)
    except BaseException as error:
        if isinstance(error, AsyncrlError) or is_interrupt(error):
            raise
        raise ConfigError(f"{setting}: {path} raised {raised(error)}") from error


def model_source(config: ModelConfig) -> str:
    """The directory or hub id of the model. Errors: ConfigError if the directory or a file in it is missing."""
    if config.path is None:
        raise ConfigError("model.path is not set; name a directory or hub id of a Hugging Face causal language model")
    source = directory_or_hub(config.path, "model.path")
    directory = Path(source)
    if config.gguf_file and directory.is_dir() and not (directory / config.gguf_file).is_file():
        names = sorted(path.name for path in directory.glob("*.gguf"))
        raise ConfigError(f"model.gguf_file: no {config.gguf_file!r} in {config.path!r}; its GGUF files are {names}")
    if not config.gguf_file and directory.is_dir() and not (directory / "config.json").is_file():
        raise ConfigError(f"model.path: no model configuration in {config.path!r}: config.json is missing")
    return source


def tokenizer_source(config: ModelConfig) -> str:
    """The directory or hub id of the tokenizer; by default that of the model. Errors: ConfigError."""
    return directory_or_hub(config.tokenizer, "model.tokenizer") if config.tokenizer else model_source(config)


def directory_or_hub(source: str, setting: str) -> str:
    """Returns `source`, a directory or a hub id. Errors: ConfigError if `source` looks like a local path and is no directory,
    since a misspelled path must not become a request to the hub."""
    path = Path(source)
    if path.is_dir():
        return source
    first, slash, _ = source.partition("/")
    # `runs/model` is local if the directory `runs` exists.
    parent_exists = bool(slash) and Path(first).is_dir()
    path_like = path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1
    if path_like or parent_exists or path.exists():
        problem = f"there is no directory {source!r}: it does not exist (looked from {Path.cwd()})"
        problem = f"{source!r} is not a directory: it is a file" if path.exists() else problem
        raise ConfigError(f"{setting}: {problem}; name a directory or a hub id")
    return source
