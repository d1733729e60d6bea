"""What a run needs beside its model, checked before anything is made, moved or loaded. Everything here blocks.

All that is wrong is told at once. Reward functions, environment and hooks are loaded by
`load_code`, and by a run before its model.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from asyncrl.checkpoint.store import require_whole_model
from asyncrl.config.imports import load_object, split_address
from asyncrl.config.schema import Config
from asyncrl.data.prompts import PromptSource
from asyncrl.data.prompts_files import Rows
from asyncrl.data.prompts_sources import load_rows
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.models.parameters.source import directory_or_hub, is_address, is_builder, model_source, tokenizer_source
from asyncrl.rewards.pool import RewardPool

_read: dict[str, Rows] = {}  # what `check_inputs` read, until the run takes it


def check_inputs(
    config: Config, prompts: bool = False, rewards: bool = False, environment: bool = False, hooks: bool = False
) -> None:
    """Files, functions and packages that the configuration names; True for what an embedding program brings itself.

    Errors: ConfigError or DataError; where several things are wrong, one ConfigError with a line each.
    """
    found: list[AsyncrlError] = []
    for check in _checks(config, prompts, rewards, environment, hooks):
        try:
            check()
        except AsyncrlError as error:
            found.append(error)
    if len(found) == 1:
        raise found[0]
    if found:
        raise ConfigError("\n".join(dict.fromkeys(str(error) for error in found)))


async def load_code(config: Config) -> None:
    """Load environment and reward functions as a run does, these in a worker. Errors: ConfigError; as `RewardPool`."""
    import_code(config)
    async with RewardPool.from_config(config.reward.model_copy(update={"workers": 1})):
        pass


def import_code(config: Config, environment: bool = False, hooks: bool = False) -> None:
    """Import the user's environment and hooks, on this thread; True as in `check_inputs`. Errors: ConfigError."""
    if not environment and config.rollout.environment != "single_turn":
        load_object(config.rollout.environment)
    if not hooks and config.hooks is not None:
        load_object(config.hooks)


def rows_of(source: str) -> Rows:
    """As `load_rows`; what `check_inputs` has read is not read again."""
    return _read[source] if source in _read else load_rows(source)


def forget_rows() -> None:
    """The run has what it needs."""
    _read.clear()


def _checks(
    config: Config, prompts: bool, rewards: bool, environment: bool, hooks: bool
) -> Iterator[Callable[[], object]]:
    model = config.model
    if config.train.kind == "torch" and is_builder(model):
        yield lambda: load_object(str(model.path))
    elif config.train.kind == "torch":
        yield lambda: require_whole_model(Path(model_source(model)), "model.path")
        if model.tokenizer:
            yield lambda: require_whole_model(Path(tokenizer_source(model)), "model.tokenizer")
    for judge in config.reward.model:
        if is_address(judge.path):
            yield partial(load_object, judge.path)
        else:
            yield partial(_check_judge, judge.path)
    sources = {
        "data.train": None if prompts else config.data.train,
        "data.eval": config.data.eval if config.evaluate.every else None,
    }
    for setting, source in sources.items():
        if source is not None:
            yield partial(_check_rows, config, setting, source)
    for function in () if rewards else config.reward.functions:
        yield partial(_check_file, "reward.functions", function.function)
    if not environment and config.rollout.environment != "single_turn":
        yield lambda: _check_file("rollout.environment", config.rollout.environment)
    if not hooks and config.hooks is not None:
        yield lambda: _check_file("hooks", str(config.hooks))
    for sink in config.telemetry.sinks:
        yield partial(_check_sink, sink)


def _check_judge(path: str) -> None:
    require_whole_model(Path(directory_or_hub(path, "reward.model")), "reward.model")


def _check_rows(config: Config, setting: str, source: str) -> None:
    """Also what a function returns or a hub holds: the run reads it anyway, and takes it from here."""
    try:
        rows = load_rows(source)
        PromptSource(rows, None, config.data)  # that there are rows, and that the first one has a prompt
    except AsyncrlError as error:
        raise type(error)(f"{setting}: {error}") from error
    _read[source] = rows


def _check_file(setting: str, address: str) -> None:
    """It is loaded later: a reward by its workers, environment and hooks on the loop's thread."""
    place, _ = split_address(address)
    if place.endswith(".py") and not Path(place).expanduser().is_file():
        raise ConfigError(f"{setting}: there is no file {place} (of {address!r}; looked from {Path.cwd()})")


def _check_sink(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"telemetry.sinks has {name!r}, and that package is not installed: `pip install 'asyncrl[{name}]'`"
        )
