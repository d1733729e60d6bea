"""What a run needs beside its model, checked before anything is made, moved or loaded. Everything here blocks.

All that is wrong is told at once. The user's code runs only where nothing was: it may import torch, which takes seconds and which
nothing imports here. Reward functions, environment and hooks are loaded later, by a run before its model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path

import anyio

from asyncrl.builds import install
from asyncrl.checkpoint.store import require_whole_model
from asyncrl.config.hub import require_hub
from asyncrl.config.imports import check_address, installed, load_object
from asyncrl.config.resolve import resolve
from asyncrl.config.schema import Config, ModelConfig
from asyncrl.data.prompts import PromptSource
from asyncrl.data.prompts_files import Rows
from asyncrl.data.prompts_sources import IndexedRows, kind_of, load_rows, require_data_hub
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.generation.vllm.versions import require_vllm
from asyncrl.models.parameters.source import (
    directory_or_hub,
    is_address,
    is_builder,
    load_builder,
    model_source,
    name_of,
    require_unread,
    tokenizer_source,
)
from asyncrl.pumps.screen import OVERLONG
from asyncrl.rewards.pool import RewardPool

from . import method_trial
from .directory import RunDirectory

_COLUMN_ROWS = 20  # rows of a JSONL file may differ
_FORM_ROWS = 20_000  # prompts whose form is looked at: a fraction of a second
_columns: dict[str, list[str]] = {}  # of what was read
_read: dict[str, Rows] = {}  # what `check_inputs` read, until the run takes it


def check_start(config: Config, code: bool) -> None:
    """What a program looks at before it imports torch, which takes seconds: names, files, and the columns that rewards need (which
    a worker tells). `code`: what the user's code does here, too. A run leaves that to `check_code`: it may never end, and only
    then the watchdog sees it. Errors: as `check_inputs`."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    resolved = resolve(config, int(ranks) if ranks.isdecimal() else 1)
    if os.environ.get("RANK", "0") == "0":  # which may be moving the old run aside while others look
        RunDirectory(resolved).require_own()
    forget_rows()
    run_checks(_checks(resolved))
    if code:
        check_code(resolved)
        import_code(resolved)
    if code or (known_columns(resolved) and "torch" not in sys.modules):
        anyio.run(load_rewards, resolved)


def check_inputs(
    config: Config, prompts: bool = False, rewards: bool = False, environment: bool = False, hooks: bool = False
) -> None:
    """Files, functions and packages that the configuration names; True for what an embedding program brings itself.

    Errors: ConfigError or DataError; where several things are wrong, one ConfigError with a line each.
    """
    forget_rows()  # of an earlier attempt in this process
    run_checks(_checks(config, prompts, rewards, environment, hooks))
    check_code(config, prompts)


def check_code(config: Config, prompts: bool = False) -> None:
    """The part of `check_inputs` that may import torch, or never end: the user's code in this process, and the hub."""
    run_checks(_code_checks(config, prompts))


def check_prompts(config: Config) -> None:
    """The model's directory and the rows of `data.train` alone. Errors: as `check_inputs`."""
    if config.data.train is None:
        raise ConfigError("data.train is not set: there are no prompts to show")
    forget_rows()
    run_checks([*model_checks(config.model), partial(_check_rows, config, "data.train", config.data.train)])


def run_checks(checks: Iterable[Callable[[], object]]) -> None:
    """All of them. Errors: as `check_inputs`."""
    found: list[AsyncrlError] = []
    for check in checks:
        try:
            check()
        except AsyncrlError as error:
            found.append(error)
    if len(found) == 1:
        raise found[0]
    if found:
        raise ConfigError("\n".join(dict.fromkeys(str(error) for error in found)))


async def load_rewards(config: Config) -> None:
    """Load the reward functions as a run does, in a worker. After `check_inputs`. Errors: ConfigError; as `RewardPool`."""
    pool = RewardPool.from_config(config.reward.model_copy(update={"workers": 1}))
    pool.columns = known_columns(config)
    async with pool:
        check_components(config, [*pool.names, *(name_of(model) for model in config.reward.model)])


def check_components(config: Config, scored: Collection[str]) -> None:
    """That the components which settings name exist. `scored`: those of functions and models; an environment of the user's own may
    give more. Errors: ConfigError."""
    if config.rollout.environment != "single_turn":
        return
    filtered = [*scored, OVERLONG] if config.reward.overlong.cache is not None else scored
    named = {
        "rollout.filter.by": (config.rollout.filter.by, filtered),
        "evaluate.pass_by": (config.evaluate.pass_by, scored),
    }
    for setting, (chosen, known) in named.items():
        if chosen != "reward" and chosen not in known:
            raise ConfigError(
                f"{setting} is {chosen!r}; expected `reward` or one of the components: {', '.join(known) or 'none'}"
            )


def known_columns(config: Config) -> list[list[str]]:
    """The columns that rewards get, for each source of prompts that `check_inputs` has read: names that some of its first rows
    have. None where a hook may change them."""
    sources = (config.data.train, config.data.eval) if config.hooks is None else ()
    return [_columns[source] for source in sources if source in _columns]


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
    _columns.clear()


def _checks(
    config: Config, prompts: bool = False, rewards: bool = False, environment: bool = False, hooks: bool = False
) -> Iterator[Callable[[], object]]:
    """Of names alone: nothing of the user's runs."""
    if config.train.kind == "torch":
        yield from model_checks(config.model)
    for judge in config.reward.model:
        yield partial(_check_judge, judge.path)
    for setting, source in _sources(config, prompts, "file"):
        yield partial(_check_rows, config, setting, source)
    for setting, source in _sources(config, prompts, "code"):
        yield partial(_check_name, check_address, setting, source)
    for setting, source in _sources(config, prompts, "hub"):
        yield partial(_check_name, require_data_hub, setting, source)
    for function in () if rewards else config.reward.functions:
        yield partial(_check_name, check_address, "reward.functions", function.function)
    if not environment and config.rollout.environment != "single_turn":
        yield partial(_check_name, check_address, "rollout.environment", config.rollout.environment)
    if not hooks and config.hooks is not None:
        yield partial(_check_name, check_address, "hooks", config.hooks)
    for setting, package, extra in _packages(config):
        yield partial(_check_package, setting, package, extra)
    if config.generation.engine == "vllm":
        yield require_vllm


def model_checks(model: ModelConfig) -> Iterator[Callable[[], object]]:
    """Of what `model.path` and `model.tokenizer` name."""
    yield lambda: require_unread(model)
    if is_builder(model):
        yield partial(_check_name, check_address, "model.path", str(model.path))
        return
    yield lambda: _check_model(model_source(model), "model.path")
    if model.tokenizer:
        yield lambda: _check_model(tokenizer_source(model), "model.tokenizer")


def _code_checks(config: Config, prompts: bool) -> Iterator[Callable[[], object]]:
    if config.train.kind == "torch" and is_builder(config.model):
        yield lambda: load_builder(str(config.model.path), "model.path")
    for judge in config.reward.model:
        if is_address(judge.path):
            yield partial(load_builder, judge.path, "reward.model")
    for setting, source in _sources(config, prompts, "code", "hub"):
        yield partial(_check_rows, config, setting, source)
    if ":" in config.algorithm.advantage:
        yield partial(method_trial.try_advantage, config)
    if ":" in config.algorithm.loss and config.train.kind == "torch":
        yield partial(method_trial.try_loss, config)


def _sources(config: Config, prompts: bool, *kinds: str) -> list[tuple[str, str]]:
    """Settings that name rows of these kinds which the run reads, with their values."""
    data = config.data
    named = {"data.train": None if prompts else data.train, "data.eval": data.eval if config.evaluate.every else None}
    return [(setting, source) for setting, source in named.items() if source is not None and kind_of(source) in kinds]


def _check_judge(path: str) -> None:
    if is_address(path):
        _check_name(check_address, "reward.model", path)
    else:
        _check_model(directory_or_hub(path, "reward.model"), "reward.model")


def _check_model(source: str, setting: str) -> None:
    require_hub(source, setting)
    require_whole_model(Path(source), setting)


def _check_rows(config: Config, setting: str, source: str) -> None:
    """Also what a function returns or a hub holds: the run reads it anyway, and takes it from here."""
    try:
        rows = load_rows(source)
        cheap = not isinstance(rows, IndexedRows)  # those are made anew whenever they are asked for
        prompts = PromptSource(rows, None, config.data)  # that there are rows, and that the first one has a prompt
        prompts.check_forms(_FORM_ROWS if cheap else 1)
    except AsyncrlError as error:
        raise type(error)(f"{setting}: {error}") from error
    _read[source], _columns[source] = rows, columns_of(rows, config)


def columns_of(rows: Rows, config: Config) -> list[str]:
    """Names that some of the first rows have, apart from the prompt's."""
    count = min(len(rows), 1 if isinstance(rows, IndexedRows) else _COLUMN_ROWS)
    names = {str(name): None for index in range(count) for name in rows[index]}
    return [name for name in names if name != config.data.prompt_column]


def _check_name(check: Callable[[str], object], setting: str, value: str) -> None:
    """`check` of a setting's value, which errors then name."""
    try:
        check(value)
    except AsyncrlError as error:
        raise type(error)(f"{setting}: {error}") from error


def _packages(config: Config) -> Iterator[tuple[str, str, str]]:
    """(what is asked for, the package that it needs, the extra that brings it)."""
    for sink in config.telemetry.sinks:
        yield f"telemetry.sinks has {sink!r}", sink, sink
    if "mlflow" in config.telemetry.sinks and os.environ.get("MLFLOW_TRACKING_URI", "sqlite:").startswith("sqlite:"):
        for package in ("sqlalchemy", "alembic"):
            yield "telemetry.sinks has 'mlflow', whose store is an SQLite file", package, "mlflow"
    if config.train.kind == "torch" and config.model.lora.rank:
        yield "model.lora.rank is set", "peft", "lora"  # the adapters are written in its form
    if config.train.kind == "torch" and config.model.head_kernel == "liger":
        yield "model.head_kernel is liger", "liger_kernel", "liger"
    if config.door.http_port is not None:
        yield "door.http_port is set", "aiohttp", "http"


def _check_package(setting: str, package: str, extra: str) -> None:
    if not installed(package):
        raise ConfigError(f"{setting}, and the package {package} is not installed: `{install(extra)}`")
