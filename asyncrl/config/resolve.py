"""`resolve` fills in presets and values derived from other settings, and checks the whole configuration. Pure and idempotent.

preset   max_staleness  streaming   meaning
sync     0              false       whole steps in prompt order; on CPUs reruns are bit-identical
one_off  1              false       whole steps, generated one step ahead
async    2              true        each group is trained as soon as it is complete
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from asyncrl.errors import ConfigError

from .check_losses import chosen_loss, warn_algorithm
from .checks import complaints
from .fields import get
from .schema import Config
from .schema_rollouts import RolloutConfig

AnySection = TypeVar("AnySection", bound=BaseModel)
# model.dtype -> the automatic algorithm.mismatch_gate, in nats per token. vLLM in bfloat16 was measured at 0.04.
MISMATCH = {"float32": 1e-3, "float64": 1e-3, "bfloat16": 0.1}
# Settings of `rollout` under which tokens are not sampled from the policy's distribution at the temperature.
_CHANGE_DISTRIBUTION = (
    "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words",
    "min_tokens",
)  # fmt: skip
PRESETS: dict[str, tuple[int, bool]] = {"sync": (0, False), "one_off": (1, False), "async": (2, True)}


def turns_bound(config: Config) -> int:
    """Largest age of a group in turns of the ledger (one per batch): `max_staleness + (weight_sync_interval - 1)`.

    With weight_sync_interval = k, an engine gets new weights every k steps, so its weights are up to k - 1 steps old.
    """
    return _max_staleness(config) + config.rollout.weight_sync_interval - 1


def slots(config: Config) -> int:
    """Groups that may exist in the pipeline at one time, over all ranks: `(turns_bound + 1) x groups_per_step`."""
    return (turns_bound(config) + 1) * config.rollout.groups_per_step


def versions_per_batch(config: Config) -> int:
    """Optimizer steps per batch: one per minibatch, in each of `updates_per_batch` passes."""
    return config.algorithm.updates_per_batch * config.algorithm.minibatches


def last_version(config: Config, base: int = 0, rows: int | None = None) -> int | None:
    """The policy version after the last batch that `train.max_steps` and `train.max_epochs` allow; None if neither setting gives a
    last batch. `base`: the version at turn 0. `rows`: the number of training prompts, if the run has prompts.

    The run may end earlier: at `train.time_limit_s`, and with `max_epochs` also if prompts are skipped or groups are dropped."""
    train, batches = config.train, config.train.max_steps
    # Prompts that reroll plays again make further groups, whose number is not known.
    if train.max_epochs is not None and rows is not None and config.reroll.start_fraction == 1:
        steps = prompts_of(train.max_epochs, rows) / config.rollout.groups_per_step
        of_epochs = max(1, math.ceil(steps) if train.partial_final_step else math.floor(steps))
        batches = of_epochs if batches is None else min(batches, of_epochs)
    return None if batches is None else batches * versions_per_batch(config) + base


def prompts_of(epochs: float, rows: int) -> int:
    """The number of prompts in `epochs` passes over `rows` prompts. Without 1e-9 a rounding error could add a prompt."""
    return math.ceil(epochs * rows - 1e-9)


def row_limit(config: Config) -> int:
    """The longest row in tokens: a prompt and its completion, or the context of an agent."""
    return config.rollout.max_context or config.data.max_prompt_tokens + config.rollout.max_tokens


def staleness_bound(config: Config) -> int:
    """Largest age, in policy versions, of a trained token: `u x turns_bound + (u - 1)` with u versions per batch.

    A batch is one turn of the ledger and u versions. If a token is sampled k turns before its batch, it is at most u k versions
    old at the first update of the batch, and u - 1 versions older at the last update.
    """
    updates = versions_per_batch(config)
    return updates * turns_bound(config) + (updates - 1)


def resolve(
    config: Config,
    world_size: int = 1,
    generating: int | None = None,
    *,
    embedding: bool = False,
    submitted: bool = False,
    own_environment: bool = False,
    own_rewards: bool = False,
) -> Config:
    """The configuration with presets and derived values filled in. Every contradiction is refused.

    `world_size`: trainer ranks. `generating`: ranks that generate; None: `world_size`. `embedding`: the program passes prompts and
    rewards to the Runtime and decides when to end, so data, reward functions and a limit of steps may be missing. `submitted`: no
    source of prompts is set. `own_environment`, `own_rewards`: the program passes an environment or reward functions.
    Errors: `ConfigError`, one line per contradiction.
    """
    staleness, streaming = PRESETS[config.preset]
    preset = {"rollout.max_staleness": staleness, "rollout.streaming": streaming}
    # `submitted` is true for every run without data. But a dry run without data makes its own prompts: no group is submitted.
    submits = submitted and config.train.kind == "torch"
    preset |= _overlong_limit(config, submits or own_environment or config.door.ring is not None)
    # The longest row must fit into a microbatch. `complaints` refuses a set value that is too small.
    if "tokens_per_microbatch" not in config.train.model_fields_set:
        tokens = max(config.train.tokens_per_microbatch, row_limit(config))
        config = with_values(config, {"train.tokens_per_microbatch": tokens})
    config = with_values(config, {name: value for name, value in preset.items() if get(config, name) is None})
    if problems := complaints(config, world_size, embedding, own_environment, own_rewards):
        raise ConfigError("\n".join(problems))

    loss = chosen_loss(config.algorithm)
    derived = {f"algorithm.{loss.section}.{name}": value for name, value in loss.derived().items()}
    if config.algorithm.old_logprobs == "sampler":
        # The clip is centred on the sampler's log-probs, so no second correction for the sampler is needed.
        derived["algorithm.importance.cap"] = None
    if config.algorithm.mismatch_gate == "auto":
        sampled_here = config.train.kind == "torch" and config.door.ring is None and not submitted
        # The gate remains "auto" while model.dtype is "auto": the dtype depends on the device, which is not known yet.
        derived["algorithm.mismatch_gate"] = MISMATCH.get(config.model.dtype, "auto") if sampled_here else None
    if config.engine.max_sequences is None:
        groups_of_rank = -(-slots(config) // (world_size if generating is None else max(1, generating)))
        derived["engine.max_sequences"] = groups_of_rank * config.rollout.group_size
    if config.engine.kept_prefix_max_age is None:
        max_age = 1 if config.engine.kv_after_update == "recompute" else max(1, staleness_bound(config))
        derived["engine.kept_prefix_max_age"] = 0 if config.preset == "sync" else max_age
    if config.evaluate.temperature is None:
        derived["evaluate.temperature"] = config.rollout.temperature
    return with_values(config, derived)


def warnings(config: Config, rows: int | None = None) -> list[str]:
    """Sentences about settings that are allowed but probably not intended. Takes a resolved configuration. `rows`: the number of
    training prompts, if known."""
    rollout, train = config.rollout, config.train
    sentences: list[str] = []
    default = RolloutConfig()
    changed = [name for name in _CHANGE_DISTRIBUTION if getattr(rollout, name) != getattr(default, name)]
    if changed:
        values = ", ".join(f"{name}={getattr(rollout, name)}" for name in changed)
        sentences.append(
            f"rollout.{values}: completions are not sampled from the policy's own distribution. The loss, algorithm.importance, "
            "old_logprobs=sampler and the mismatch gate use log-probs of the policy over the whole vocabulary at the sampling "
            "temperature: none of them corrects for the difference, and tokens that are never sampled are never explored. Leave "
            f"{', '.join(changed)} out unless this is intended"
        )
    sentences += warn_algorithm(config, staleness_bound(config))
    if (last := last_version(config, rows=rows)) is not None and train.warmup_steps >= last:
        sentences.append(
            f"train.warmup_steps={train.warmup_steps} is not below the {last} optimizer steps of the run: train.lr is never reached"
        )
    if train.schedule != "constant" and last is not None and (train.time_limit_s or train.max_epochs):
        sentences.append(
            f"train.schedule={train.schedule} ends at optimizer step {last}. The run ends earlier, at a higher rate, if "
            "train.time_limit_s is reached, or if prompts are skipped or groups are dropped under train.max_epochs"
        )
    if config.data.eval is not None and config.evaluate.every is None:
        sentences.append("data.eval is set but evaluate.every is not: nothing will be evaluated")
    return sentences


def _max_staleness(config: Config) -> int:
    setting = config.rollout.max_staleness
    return PRESETS[config.preset][0] if setting is None else setting


def with_values(section: AnySection, values: Mapping[str, Any]) -> AnySection:
    """A copy of `section` in which the settings with these dotted names have these values."""
    for name, value in values.items():
        first, _, inner_name = name.partition(".")
        new = with_values(getattr(section, first), {inner_name: value}) if inner_name else value
        section = section.model_copy(update={first: new})
    return section


def _overlong_limit(config: Config, outside: bool) -> Mapping[str, int]:
    """The derived reward.overlong.max_length, if the setting is needed and missing. `outside`: episodes are not played by
    `rollout.environment`. Errors: ConfigError if the limit cannot be derived."""
    overlong, environment = config.reward.overlong, config.rollout.environment
    if overlong.cache is None or overlong.max_length is not None:
        return {}
    if outside or environment != "single_turn":
        reason = "episodes are played outside of single_turn" if outside else f"rollout.environment is {environment}"
        raise ConfigError(
            f"reward.overlong.cache is set and {reason}: an episode may have several requests, and rollout.max_tokens limits only "
            "one request; set reward.overlong.max_length, in sampled tokens of a whole episode"
        )
    return {"reward.overlong.max_length": config.rollout.max_tokens}
