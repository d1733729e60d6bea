"""Checks the files, packages and code that the settings name, before a run makes or loads anything. Also reads the prompts.

Functions that read files or ask the hub are slow: call them on a thread. One error lists all problems. User code may take seconds
(`import torch`), so it runs only if the other checks find no problem. A run loads rewards, environment and hooks before its model.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import numpy as np

from asyncrl.algorithms.advantages import GroupRewards
from asyncrl.algorithms.base import Loss, LossInputs
from asyncrl.algorithms.registry import build_advantage, build_loss, loss_named
from asyncrl.builds import install_command
from asyncrl.checkpoint.store import require_intact_model
from asyncrl.config.hub import require_hub
from asyncrl.config.imports import check_address, installed, raised, user_code
from asyncrl.config.methods import flat_values
from asyncrl.config.resolve import resolve, row_limit
from asyncrl.config.schema import Config, ModelConfig
from asyncrl.data.prompts import PromptSource
from asyncrl.data.prompts_files import PromptRows
from asyncrl.data.prompts_sources import IndexedRows, kind_of, load_rows, require_data_hub
from asyncrl.data.texts import decode
from asyncrl.distributed.roles import Roles
from asyncrl.environments.loading import check_environment
from asyncrl.errors import AsyncrlError, ConfigError, GenerationError
from asyncrl.generation.requests import check_tokens, sampling_params
from asyncrl.generation.vllm.versions import require_vllm
from asyncrl.models.parameters.source import (
    directory_or_hub,
    is_builder,
    is_import_path,
    load_builder,
    model_source,
    refuse_unread_settings,
    reward_model_name,
    tokenizer_source,
)
from asyncrl.pumps.hooks import Hooks
from asyncrl.pumps.screen import OVERLONG
from asyncrl.rewards.pool import RewardPool, configured_rewards
from asyncrl.types import GenerationRequest, Prompt

from .directory import RunDirectory

if TYPE_CHECKING:
    from asyncrl.distributed.world import World  # imports torch

_COLUMN_ROWS = 20  # rows that are searched for columns
_CHECKED_ROWS = 20_000  # limit of checked rows of a file; takes under 1 s
# The batch on which a user's loss is tried: how many tokens of each sequence are in the loss.
_LENGTHS = (3, 0, 2, 4, 1)
# How this batch is split into microbatches. A microbatch is a tuple of indices of sequences.
_UNSPLIT = ((0, 1, 2, 3, 4),)
_SPLITS = (((4,), (3,), (2,), (1,), (0,)), ((3, 1), (), (0, 4, 2)))
# Source of prompts -> its rows and the names of their columns. The run uses these rows, so that no source is read twice.
_sources_read: dict[str, tuple[PromptRows, list[str]]] = {}


def check_start(config: Config, code: bool) -> None:
    """Check names, files, and the columns that reward functions need. Call before the import of torch, which takes seconds.
    `code`: also run user code in this process. A run sets `code` to False, and calls `check_code` later under its watchdog, because
    the code may hang. Errors: as `check_inputs`."""
    ranks = os.environ.get("WORLD_SIZE", "")
    setting = config.distributed
    roles = Roles.resolve(setting, int(ranks) if ranks.isdecimal() else Roles.ranks_named(setting))
    require_free_lanes(config, roles)
    resolved = resolve(config, len(roles.leaders), len(roles.generate))
    # Only on rank 0: while other ranks check, rank 0 may already be moving an old run aside.
    if os.environ.get("RANK", "0") == "0":
        RunDirectory(resolved).refuse_foreign()
    _sources_read.clear()
    _check_names(resolved)
    if code:
        check_code(resolved)
        import_code(resolved)
    # A run loads the reward functions later, too. This load reports their mistakes before the slow import of torch.
    if code or (known_columns(resolved) and "torch" not in sys.modules):
        anyio.run(load_rewards, resolved)


def require_free_lanes(config: Config, roles: Roles) -> None:
    """Refuses settings that deadlock: rank 0 evaluates, and waits for the reward model of another rank. The lane of that rank waits
    for rank 0 in a collective. Errors: ConfigError."""
    waiting = {*roles.generate} & {*roles.train[roles.context :]}
    if roles.differ and waiting and config.reward.model and config.data.eval is not None:
        raise ConfigError(
            f"reward.model and data.eval are set, and rank {min(waiting)} trains and generates: its reward model would score rows "
            "of an evaluation beside its trainer, which may wait for rank 0 until the evaluation ends; let no rank both train and "
            "generate (distributed.roles), or leave data.eval out"
        )


def check_inputs(config: Config, passed: Collection[str] = ()) -> None:
    """Check the files, functions and packages that the configuration names. `passed`: which of "prompts", "rewards", "environment"
    and "hooks" the program passes instead. Errors: ConfigError or DataError; several problems are lines of one ConfigError."""
    _sources_read.clear()
    _check_names(config, passed)
    check_code(config, passed)


def check_code(config: Config, passed: Collection[str] = ()) -> None:
    """The slow part of `check_inputs`: runs the user's code, which may import torch or hang, in this process, and asks the hub."""
    with Checks() as check:
        if config.train.kind == "torch" and is_builder(config.model):
            check(load_builder, str(config.model.path), "model.path")
        for reward_model in config.reward.model:
            if is_import_path(reward_model.path):
                check(load_builder, reward_model.path, "reward.model")
        for setting, source in _sources(config, passed, "code", "hub"):
            check(_read_rows, config, source, "environment" in passed, setting=setting)
        if ":" in config.algorithm.advantage:
            check(try_advantage, config)
        if ":" in config.algorithm.loss and config.train.kind == "torch":
            check(try_loss, config)


def try_loss(config: Config) -> None:
    """Check that sum and gradient of the loss are finite, and the same for every split of a batch into microbatches.
    Errors: ConfigError."""
    name, values = config.algorithm.loss, flat_values(config.algorithm)
    own = {setting.flat for setting in loss_named(name).settings()}
    loss = build_loss(name, **{flat: value for flat, value in values.items() if flat in own})
    subject = f"algorithm.loss is {name!r}, which was tried on a small batch"
    for with_old in (False, True):
        with user_code(lambda error: ConfigError(f"{subject}: {raised(error)}")):
            expected, *results = (_value_and_gradient(loss, split, with_old) for split in (_UNSPLIT, *_SPLITS))
        if not np.isfinite(expected).all():
            count = int((~np.isfinite(expected[1:])).sum())
            raise ConfigError(
                f"{subject}: its sum is {expected[0]:g}, and {count} numbers of its gradient are not finite; a sampler log-prob "
                "may be NaN; where the policy trains on its own data the ratio is 1, so do not divide by the ratio's logarithm"
            )
        for result in results:
            # The tolerance allows a loss that computes in float32.
            same = np.isclose(result, expected, rtol=1e-5, atol=1e-6)
            if not same.all():
                quantity = "gradient" if same[0] else "sum"
                raise ConfigError(
                    f"{subject}: the {quantity} of the batch changes if the batch is cut into microbatches (sums {result[0]:g}, "
                    f"{expected[0]:g}); return a loss per token that depends on no other sequence: the trainer divides once, by "
                    "`normaliser`"
                )


def _value_and_gradient(loss: Loss, split: tuple[tuple[int, ...], ...], with_old: bool) -> Any:
    """[1 + 2 S] the sum over the microbatches, then its gradients with respect to log-probs and entropies. S: loss tokens."""
    import torch

    noise = torch.randn(5, sum(_LENGTHS), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logp_S, entropy_S = -noise[0].abs(), noise[1].abs()
    sampler_S, old_S, reference_S = logp_S + 0.3 * noise[2:]
    sampler_S[4] = float("nan")  # some samplers give no log-prob
    advantage_S = torch.tensor([1.3, 0.0, -0.4, 0.9, -0.7]).double().repeat_interleave(torch.tensor(_LENGTHS))
    leaves = logp_S.requires_grad_(), entropy_S.requires_grad_()
    tokens = torch.arange(len(logp_S)).split(_LENGTHS)  # of each sequence, along S
    value = torch.zeros((), dtype=torch.float64)
    for rows in split:
        index = torch.cat([tokens[row] for row in rows]) if rows else torch.zeros(0, dtype=torch.int64)
        inputs = LossInputs(
            logp_S=logp_S[index],
            entropy_S=entropy_S[index] if loss.needs_entropy_grad else entropy_S[index].detach(),
            sampler_logp_S=sampler_S[index],
            advantage_S=advantage_S[index],
            sequence_S=torch.arange(len(rows)).repeat_interleave(torch.tensor([_LENGTHS[row] for row in rows]).long()),
            sequences=len(rows),
            old_logp_S=old_S[index] if with_old else None,
            reference_logp_S=reference_S[index] if loss.needs_reference else None,
        )
        total = loss(inputs).total
        total.backward()
        value += total.detach()
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return torch.cat([value[None], *gradients]).numpy()


def try_advantage(config: Config) -> None:
    """Check that every advantage is finite, and is 0 for a member without a reward. Errors: ConfigError."""
    name, size = config.algorithm.advantage, config.rollout.group_size
    estimator = build_advantage(name, **flat_values(config.algorithm))
    rewards = [1.0, 0.0, None, 0.5] * size
    # The `defaultdict`s have every component that an advantage may read.
    groups = [
        GroupRewards(values, defaultdict(values.copy), defaultdict(lambda: 1.0), [3] * size)
        for values in (rewards[:size], [0.5] * size, [None] * size)
    ]
    subject = f"algorithm.advantage is {name!r}"
    with user_code(lambda error: ConfigError(f"{subject}, which was tried on a few rewards: {raised(error)}")):
        results = [*zip(groups, estimator.of_step(groups), strict=True)]
    for group, values_G in results:
        no_reward = np.array([reward is None for reward in group.rewards])
        fits = isinstance(values_G, np.ndarray) and values_G.shape == (size,) and values_G.dtype.kind in "fiub"
        if not (fits and np.isfinite(values_G).all()) or values_G[no_reward].any():
            raise ConfigError(
                f"{subject}, which returned {values_G!r} for the rewards {group.rewards}; expected a numpy array with a finite "
                "number for each member, 0 where the reward is None (asyncrl.as_rewards turns None into NaN)"
            )


def check_prompts(config: Config) -> None:
    """The part of `check_inputs` that `asyncrl prompts` needs: the model's directory and the rows of `data.train`."""
    if config.data.train is None:
        raise ConfigError("data.train is not set: there are no prompts to show")
    _sources_read.clear()
    with Checks() as check:
        check(check_model_source, config.model)
        check(_read_rows, config, config.data.train, setting="data.train")


class Checks:
    """`with Checks() as check: check(function, argument, ...)` runs all checks. At the end of the block a single error is raised as
    it is; several errors become one ConfigError with a line each."""

    def __init__(self) -> None:
        self._errors: list[AsyncrlError] = []

    def __enter__(self) -> Checks:
        return self

    def __call__(self, check: Callable[..., object], *arguments: Any, setting: str = "") -> None:
        """`setting`: is put in front of the error's message."""
        try:
            check(*arguments)
        except AsyncrlError as error:
            self._errors.append(type(error)(f"{setting}: {error}") if setting else error)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and len(self._errors) == 1:
            raise self._errors[0]
        if kind is None and self._errors:
            raise ConfigError("\n".join(dict.fromkeys(str(error) for error in self._errors)))


async def load_rewards(config: Config) -> None:
    """Load the reward functions in a reward worker, as a run does. Call after `check_inputs`. Errors: those of `RewardPool`."""
    pool = RewardPool(config.reward.model_copy(update={"workers": 1}))
    pool.columns = known_columns(config)
    async with pool:
        check_rewards(config, pool)


def check_rewards(config: Config, pool: RewardPool) -> None:
    """Check an open pool against the settings. Errors: ConfigError."""
    check_components(config, [*pool.weights, *(reward_model_name(model) for model in config.reward.model)])
    whole = next((function.name for function in pool.functions if function.whole_group), None)
    if whole is not None and config.reward.batch == "trajectory":
        raise ConfigError(
            f"reward function {whole!r} compares the completions of a group (`whole_group`), but reward.batch is trajectory: each "
            "call would have one completion; set reward.batch to auto or group"
        )


def check_components(config: Config, scored: Collection[str]) -> None:
    """Check that the reward components named in settings exist. `scored`: the components of reward functions and reward models.
    Does nothing for an environment other than single_turn, because it may add components. Errors: ConfigError."""
    if config.rollout.environment != "single_turn":
        return
    filterable = [*scored, OVERLONG] if config.reward.overlong.cache is not None else scored
    choices = {
        "rollout.filter.by": (config.rollout.filter.by, filterable),
        "evaluate.pass_by": (config.evaluate.pass_by, scored),
    }
    for setting, (chosen, components) in choices.items():
        if chosen != "reward" and chosen not in components:
            raise ConfigError(
                f"{setting} is {chosen!r}; expected `reward` or one of the components: {', '.join(components) or 'none'}"
            )


def known_columns(config: Config) -> list[list[str]]:
    """For each source of prompts that `check_inputs` has read: the columns of its first rows, without the prompt's column. Empty if
    the configuration has hooks, which may change the columns."""
    sources = (config.data.train, config.data.eval) if config.hooks is None else ()
    return [_sources_read[source][1] for source in sources if source in _sources_read]


def import_code(config: Config, environment: Any = None, hooks: Hooks | None = None) -> Hooks:
    """Import and check the user's environment and hooks on this thread. Returns the hooks. `environment`, `hooks`: the program's
    objects, which replace the configured ones. Errors: ConfigError."""
    check_environment(config, environment)
    return (hooks or (Hooks() if config.hooks is None else Hooks.load(config.hooks))).check()


def rows_of(source: str) -> PromptRows:
    """As `load_rows`, but rows that `check_inputs` has read are not read again."""
    return _sources_read[source][0] if source in _sources_read else load_rows(source)


def row_count(config: Config, passed: PromptRows | None = None) -> int | None:
    """The number of training prompts. `passed`: rows that the program passed instead of `data.train`. Returns None without rows."""
    rows = rows_of(config.data.train) if passed is None and config.data.train is not None else passed
    return None if rows is None else len(rows)


def _check_names(config: Config, passed: Collection[str] = ()) -> None:
    """Check files, addresses of code, and packages, without running user code."""
    with Checks() as check:
        if config.train.kind == "torch":
            check(check_model_source, config.model)
        for path in (reward_model.path for reward_model in config.reward.model):
            if is_import_path(path):
                check(check_address, path, setting="reward.model")
            else:
                check(lambda path: _check_model(directory_or_hub(path, "reward.model"), "reward.model"), path)
        for setting, source in _sources(config, passed, "file"):
            check(_read_rows, config, source, "environment" in passed, setting=setting)
        for setting, source in _sources(config, passed, "code"):
            check(check_address, source, setting=setting)
        for setting, source in _sources(config, passed, "hub"):
            check(require_data_hub, source, setting=setting)
        for function in () if "rewards" in passed else config.reward.functions:
            check(check_address, function.function, setting="reward.functions")
        check(configured_rewards, config.reward)
        if "environment" not in passed and config.rollout.environment != "single_turn":
            check(check_address, config.rollout.environment, setting="rollout.environment")
        if "hooks" not in passed and config.hooks is not None:
            check(check_address, config.hooks, setting="hooks")
        for reason, package, extra in _packages(config):
            check(_check_package, reason, package, extra)
        if config.generation.engine == "vllm":
            check(require_vllm)


def check_model_source(model: ModelConfig) -> None:
    """Check `model.path` and `model.tokenizer`. Errors: as `check_inputs`."""
    with Checks() as check:
        check(refuse_unread_settings, model)
        if is_builder(model):
            check(check_address, str(model.path), setting="model.path")
            return
        check(lambda: _check_model(model_source(model), "model.path"))
        if model.tokenizer:
            check(lambda: _check_model(tokenizer_source(model), "model.tokenizer"))


def _sources(config: Config, passed: Collection[str], *kinds: str) -> list[tuple[str, str]]:
    """(setting, value) of the sources of prompts that the run reads and that are of these `kinds` (`kind_of`)."""
    data = config.data
    train = None if "prompts" in passed else data.train
    used = {"data.train": train, "data.eval": data.eval if config.evaluate.every else None}
    return [(setting, source) for setting, source in used.items() if source is not None and kind_of(source) in kinds]


def _check_model(source: str, setting: str) -> None:
    require_hub(source, setting)
    require_intact_model(Path(source), setting)


def _rows_may_lack_prompt(config: Config, environment_passed: bool = False) -> bool:
    """Whether agents play the episodes: their rows may lack a prompt. `environment_passed`: the program passes an environment."""
    return environment_passed or config.rollout.environment != "single_turn"


def _read_rows(config: Config, source: str, own_environment: bool = False) -> None:
    """Read and check the rows of a source, and keep the rows for the run."""
    rows = load_rows(source)
    is_cheap = not isinstance(rows, IndexedRows)  # IndexedRows call user code for each row
    # The constructor checks that there are rows, and that the first row has a prompt.
    prompts = PromptSource(rows, None, config.data, for_agents=_rows_may_lack_prompt(config, own_environment))
    prompts.check_first_rows(_CHECKED_ROWS if is_cheap else 1)
    _sources_read[source] = rows, columns_of(rows, config)


def columns_of(rows: PromptRows, config: Config) -> list[str]:
    """Names of the columns in the first rows, without the column of the prompt."""
    count = min(len(rows), 1 if isinstance(rows, IndexedRows) else _COLUMN_ROWS)
    names = {str(name): None for index in range(count) for name in rows[index]}
    return [name for name in names if name != config.data.prompt_column]


def _packages(config: Config) -> Iterator[tuple[str, str, str]]:
    """(the reason why a package is needed, the package, the extra that installs the package)."""
    for sink in config.telemetry.sinks:
        yield f"telemetry.sinks has {sink!r}", sink, sink
    if "mlflow" in config.telemetry.sinks and os.environ.get("MLFLOW_TRACKING_URI", "sqlite:").startswith("sqlite:"):
        for package in ("sqlalchemy", "alembic"):
            yield "telemetry.sinks has 'mlflow', whose store is an SQLite file", package, "mlflow"
    if config.train.kind == "torch" and config.model.lora.rank:
        yield "model.lora.rank is set", "peft", "lora"  # peft writes the files of adapters
    if config.train.kind == "torch" and config.model.head_kernel == "liger":
        yield "model.head_kernel is liger", "liger_kernel", "liger"
    if config.door.http_port is not None:
        yield "door.http_port is set", "aiohttp", "http"


def _check_package(reason: str, package: str, extra: str) -> None:
    if not installed(package):
        raise ConfigError(f"{reason}, and the package {package} is not installed: `{install_command(extra)}`")


class PromptLengths(NamedTuple):
    """The number of tokens of the longest prompt. `how`: a phrase that says how the number was found."""

    longest: int
    how: str
    notes: tuple[str, ...] = ()  # sentences about the rendered prompts


def measure_prompts(config: Config, passed: PromptRows | None = None, own_environment: bool = False) -> PromptLengths:
    """Measure the run's prompts with its tokenizer. With `rollout.max_context`, or if the prompts are unknown before the run, the
    result is the most that the settings allow. If only a sample is measured, a longer prompt may come: it waits for room in the
    cache. `passed`: rows of the program. `own_environment`: the program passes an environment. Errors: DataError, ConfigError."""
    limit = row_limit(config) - config.rollout.max_tokens
    _check_sampling(config)
    if config.rollout.max_context is not None:
        return PromptLengths(limit, "rollout.max_context - rollout.max_tokens")
    if _rows_may_lack_prompt(config, own_environment):
        return PromptLengths(limit, "data.max_prompt_tokens: the environment writes prompts of its own")
    if passed is None and config.data.train is None:
        return PromptLengths(limit, "data.max_prompt_tokens: the prompts arrive during the run")
    from asyncrl.models.loading import load_tokenizer_of  # transformers takes seconds to import

    tokenizer = load_tokenizer_of(config.model)
    sources = [] if passed is None else [passed]
    if passed is None and config.data.train is not None:
        sources.append(rows_of(config.data.train))
    if config.evaluate.every and config.data.eval is not None:
        sources.append(rows_of(config.data.eval))
    # `overlong: refuse` must not raise here: `load_prompts` raises the error later.
    cut = {} if config.data.overlong == "skip" else {"overlong": "cut"}
    prompts = [PromptSource(rows, tokenizer, config.data.model_copy(update=cut)) for rows in sources]
    longest, measured = zip(*(source.longest() for source in prompts), strict=True)
    total = sum(len(source) for source in prompts)
    sample = "" if sum(measured) == total else ", a sample; a longer prompt waits for room"
    notes = tuple(line for source in prompts for line in source.notes())
    return PromptLengths(max(1, *longest), f"the longest of {sum(measured)} of {total} prompts{sample}", notes)


def _check_sampling(config: Config) -> None:
    """Check the tokens that settings of `rollout` name, without the model's weights. Errors: ConfigError."""
    if not (config.rollout.logit_bias or config.rollout.bad_words or config.rollout.stop_token_ids):
        return
    from asyncrl.models.loading import describe_module, load_tokenizer_of

    sampling = sampling_params(config.rollout, load_tokenizer_of(config.model))
    vocabulary = int(describe_module(config.model).config.get_text_config().vocab_size)
    request = GenerationRequest(np.zeros(1, np.int32), sampling, 0)
    try:
        check_tokens(request, vocabulary, has_tokenizer=True)
    except GenerationError as error:
        raise ConfigError(f"rollout.logit_bias, bad_words, stop_token_ids: {error}") from error


def first_prompts(config: Config, count: int) -> tuple[list[tuple[Prompt, str]], list[str]]:
    """(the first `count` prompts of a run, each with the decoded text of its token ids; sentences for the terminal).
    Call after `check_prompts`. Errors: ConfigError, DataError."""
    assert config.data.train is not None
    from asyncrl.models.loading import load_tokenizer_of

    tokenizer = load_tokenizer_of(config.model)
    rows = rows_of(config.data.train)
    agents = _rows_may_lack_prompt(config)
    source = PromptSource(rows, tokenizer, config.data, seed=config.seed, max_epochs=1, for_agents=agents)
    shown = [(prompt, decode(tokenizer, prompt.ids.tolist())) for prompt in islice(iter(source.next, None), count)]
    return shown, source.notes()


def load_prompts(
    config: Config, tokenizer: Any, world: World, passed: PromptRows | None, own_environment: bool = False
) -> tuple[PromptSource | None, list[Prompt], list[str]]:
    """(the cursor over the training prompts, the held-out prompts, sentences for the terminal). The cursor is None if groups are
    submitted by a program or through `door.ring`, and on a rank above 0 that does not generate. `passed`: the program's rows,
    instead of `data.train`. Errors: DataError, also for over-long prompts under `overlong: refuse`."""
    rows = passed
    if rows is None and config.data.train is not None:
        rows = rows_of(config.data.train)
    elif rows is None and config.train.kind == "dry_run" and config.door.ring is None:
        rows = load_rows([{"prompt": f"dry-run prompt number {number}"} for number in range(256)])
    # If roles differ, only the cursor of rank 0 moves. Rank 0 sends group ids, and generating ranks read the prompts of these ids.
    one_cursor, needed = world.roles.differ, world.generates or world.is_first
    agents = _rows_may_lack_prompt(config, own_environment)
    prompts: PromptSource | None = None
    held_out: list[Prompt] = []
    notes: list[str] = []
    if rows is not None and needed:
        prompts = PromptSource(
            rows,
            tokenizer,
            config.data,
            seed=config.seed,
            rank=0 if one_cursor else world.rank,
            world_size=1 if one_cursor else world.world_size,
            max_epochs=config.train.max_epochs,
            for_agents=agents,
        )
        if config.data.overlong == "refuse":
            prompts.check_all()
        else:
            # Only for `notes` below, which counts the prompts that this call measures.
            prompts.longest()
        notes = prompts.notes()
    if config.data.eval is not None and config.evaluate.every is not None:
        eval_rows, data = rows_of(config.data.eval), config.data.model_copy(update={"shuffle": False})
        source = PromptSource(eval_rows, tokenizer, data, seed=config.seed, max_epochs=1, for_agents=agents)
        held_out = list(iter(source.next, None))[: config.evaluate.limit]
        notes += source.notes()
    _sources_read.clear()
    return prompts, held_out, list(dict.fromkeys(notes))
