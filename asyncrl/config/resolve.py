"""The one pure function that fills in what is derived and checks the configuration as a whole.

    preset   max_staleness  streaming   meaning
    sync     0              false       whole steps in prompt order, bit-identical reruns
    one_off  1              false       whole steps, one step behind
    async    2              true        every group is trained as it arrives

`resolve` may be applied again to its own result and changes nothing then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from asyncrl.errors import ConfigError

from .check_losses import chosen_loss, warn_algorithm
from .checks import complaints
from .fields import get
from .schema import Config
from .schema_rollouts import RolloutConfig

Model = TypeVar("Model", bound=BaseModel)
# Nats on average; vLLM in bfloat16 is 0.04 off.
MISMATCH = {"float32": 1e-3, "float64": 1e-3, "bfloat16": 0.1}
# Of `rollout`: what makes the distribution that is drawn from another one than the policy's at the temperature.
_DRAWN = (
    "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words",
    "min_tokens",
)  # fmt: skip
PRESETS: dict[str, tuple[int, bool]] = {"sync": (0, False), "one_off": (1, False), "async": (2, True)}


def turns_bound(config: Config) -> int:
    """Largest age of a group in turns of the ledger: `max_staleness + (weight_sync_interval - 1)`.

    An engine that takes new weights every k steps samples from weights that are up to k - 1 steps behind already.
    """
    return _max_staleness(config) + config.rollout.weight_sync_interval - 1


def slots(config: Config) -> int:
    """Groups that may exist in the pipeline at one time, over all ranks: `(turns_bound + 1) x groups_per_step`."""
    return (turns_bound(config) + 1) * config.rollout.groups_per_step


def versions_per_batch(config: Config) -> int:
    """Optimizer steps that a batch is good for: one for each of its parts, in each pass over it."""
    return config.algorithm.updates_per_batch * config.algorithm.minibatches


def row_limit(config: Config) -> int:
    """Most tokens of a row: of a prompt and its completion."""
    return config.data.max_prompt_tokens + config.rollout.max_tokens


def staleness_bound(config: Config) -> int:
    """Largest age, in policy versions, of a trained token: `u x turns_bound + (u - 1)` with u versions per batch.

    A batch is one turn of the ledger and u versions: a group admitted k turns ago was sampled at most u k versions
    before the first update of its batch, and the last update of the batch comes u - 1 versions later.
    """
    updates = versions_per_batch(config)
    return updates * turns_bound(config) + (updates - 1)


def resolve(
    config: Config,
    world_size: int = 1,
    *,
    embedding: bool = False,
    submitted: bool = False,
    own_environment: bool = False,
) -> Config:
    """The configuration with presets and derived values filled in, checked as a whole.

    `world_size`: trainer ranks. `embedding`: the caller's own loop brings prompts and rewards and decides when to end,
    so data, reward functions and a limit of steps may be missing. `submitted`: it brings whole groups, sampled by whomever.
    `own_environment`: it brings an environment.
    Errors: `ConfigError`, one line per contradiction.
    """
    staleness, streaming = PRESETS[config.preset]
    preset = {"rollout.max_staleness": staleness, "rollout.streaming": streaming}
    # A dry run without data has prompts of its own.
    submits = submitted and config.train.kind == "torch"
    outside = submits or own_environment or config.door.ring is not None
    preset |= _overlong_limit(config, outside)
    config = _with(config, {name: value for name, value in preset.items() if get(config, name) is None})
    if found := complaints(config, world_size, embedding):
        raise ConfigError("\n".join(found))

    loss = chosen_loss(config.algorithm)
    derived = {f"algorithm.{loss.section}.{name}": value for name, value in loss.derived().items()}
    if config.algorithm.old_logprobs == "sampler":
        # The clip itself is around the sampler's log-probs.
        derived["algorithm.importance.cap"] = None
    if config.algorithm.mismatch_gate == "auto":
        sampled_here = config.train.kind == "torch" and config.door.ring is None and not submitted
        # dtype auto: the device has not decided yet (runtime/decided.py).
        derived["algorithm.mismatch_gate"] = MISMATCH.get(config.model.dtype, "auto") if sampled_here else None
    if config.engine.max_sequences is None:
        groups_of_rank = -(-slots(config) // world_size)
        derived["engine.max_sequences"] = groups_of_rank * config.rollout.group_size
    if config.evaluate.temperature is None:
        derived["evaluate.temperature"] = config.rollout.temperature
    return _with(config, derived)


def warnings(config: Config) -> list[str]:
    """What is allowed but seldom meant, one sentence each, for the start of a run. Takes a resolved configuration."""
    rollout, train = config.rollout, config.train
    found: list[str] = []
    default = RolloutConfig()
    if drawn := [f"{name}={value}" for name in _DRAWN if (value := getattr(rollout, name)) != getattr(default, name)]:
        found.append(
            f"rollout.{', '.join(drawn)}: completions are drawn from another distribution than that of the policy, whose log-probs "
            "over the whole vocabulary at the sampling temperature are what the loss, algorithm.importance, "
            "old_logprobs=sampler and the mismatch gate take: none of them corrects for it, and what is never sampled is never "
            "explored. Leave it out unless this is meant"
        )
    found += warn_algorithm(config, staleness_bound(config))
    if train.max_steps is not None and train.warmup_steps >= train.max_steps:
        found.append(
            f"train.warmup_steps={train.warmup_steps} is not shorter than max_steps={train.max_steps}: lr is never "
            "reached"
        )
    if config.data.eval is not None and config.evaluate.every is None:
        found.append("data.eval is set but evaluate.every is not: nothing will be evaluated")
    return found


def _max_staleness(config: Config) -> int:
    given = config.rollout.max_staleness
    return PRESETS[config.preset][0] if given is None else given


def _with(section: Model, values: Mapping[str, Any]) -> Model:
    """A copy that has these values under their dotted names."""
    for name, value in values.items():
        first, _, rest = name.partition(".")
        below = _with(getattr(section, first), {rest: value}) if rest else value
        section = section.model_copy(update={first: below})
    return section


def _overlong_limit(config: Config, outside: bool) -> Mapping[str, int]:
    """`outside`: the run does not play the episodes, or not by its own environment."""
    overlong, where = config.reward.overlong, config.rollout.environment
    if overlong.cache is None or overlong.max_length is not None:
        return {}
    if outside or where != "single_turn":
        what = "episodes are played outside of single_turn" if outside else f"rollout.environment is {where}"
        raise ConfigError(
            f"reward.overlong.cache is set and {what}: an episode may have several requests, and rollout.max_tokens is the limit "
            "of one; set reward.overlong.max_length, in sampled tokens of a whole episode"
        )
    return {"reward.overlong.max_length": config.rollout.max_tokens}
