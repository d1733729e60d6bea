"""The one pure function that fills in what is derived and checks the configuration as a whole.

    preset   max_staleness  streaming   meaning
    sync     0              false       whole steps in prompt order, bit-identical reruns
    one_off  1              false       whole steps, one step behind
    async    2              true        every group is trained as it arrives

`resolve` may be applied again to its own result and changes nothing then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from asyncrl.algorithms.registry import advantage_named
from asyncrl.errors import ConfigError
from asyncrl.types import LOWEST_TEMPERATURE

from .check_distributed import check_distributed
from .check_door import check_door
from .check_generation import check_generation
from .check_losses import check_losses, chosen_loss, chosen_terms, warn_algorithm
from .check_rewards import check_rewards
from .check_unread import check_unread
from .methods import sections, unread
from .schema import Config
from .schema_rollouts import RolloutConfig

MISMATCH = {"float32": 1e-3, "float64": 1e-3, "bfloat16": 0.1}  # nats on average; vLLM in bfloat16 is 0.04 off
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


def staleness_bound(config: Config) -> int:
    """Largest age, in policy versions, of a trained token: `u x turns_bound + (u - 1)` with u versions per batch.

    A batch is one turn of the ledger and u versions: a group admitted k turns ago was sampled at most u k versions
    before the first update of its batch, and the last update of the batch comes u - 1 versions later.
    """
    updates = versions_per_batch(config)
    return updates * turns_bound(config) + (updates - 1)


def row_limit(config: Config) -> int:
    """Most tokens of a row: of a prompt and its completion."""
    return config.data.max_prompt_tokens + config.rollout.max_tokens


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
    _, streaming = PRESETS[config.preset]
    rollout: dict[str, Any] = {}
    if config.rollout.max_staleness is None:
        rollout["max_staleness"] = _max_staleness(config)
    if config.rollout.streaming is None:
        rollout["streaming"] = streaming
    config = _with(config, "rollout", rollout)
    submits = submitted and config.train.kind == "torch"  # a dry run without data has prompts of its own
    outside = submits or own_environment or config.door.ring is not None
    config = _with_overlong_limit(config, outside)

    complaints = [text for check in _CHECKS for text in check(config)]
    complaints += check_unread(config, embedding)
    complaints += _check_ranks(config, world_size)
    if not embedding:
        complaints += _check_run(config)
    if complaints:
        raise ConfigError("\n".join(complaints))

    algorithm: dict[str, Any] = {}
    loss = chosen_loss(config.algorithm)
    algorithm |= {
        name: sections()[name]() for name in unread(config.algorithm)
    }  # an earlier version derived some of them
    section = getattr(config.algorithm, loss.section, None)
    if section is not None:
        algorithm[loss.section] = section.model_copy(update=dict(loss.derived()))
    if config.algorithm.old_logprobs == "sampler":  # the clip itself is around the sampler's log-probs
        importance: Any = config.algorithm.importance
        algorithm["importance"] = importance.model_copy(update={"cap": None})
    if config.algorithm.mismatch_gate == "auto":
        sampled_here = config.train.kind == "torch" and config.door.ring is None and not submitted
        bound = MISMATCH.get(config.model.dtype, "auto")  # dtype auto: no device has settled it (runtime/device.py)
        algorithm["mismatch_gate"] = bound if sampled_here else None
    config = _with(config, "algorithm", algorithm)
    if config.engine.max_sequences is None:
        groups_of_rank = -(-slots(config) // world_size)
        config = _with(config, "engine", {"max_sequences": groups_of_rank * config.rollout.group_size})
    if config.evaluate.temperature is None:
        config = _with(config, "evaluate", {"temperature": config.rollout.temperature})
    return config


def warnings(config: Config) -> list[str]:
    """What is allowed but seldom meant, one sentence each, for the start of a run. Takes a resolved configuration."""
    rollout, train = config.rollout, config.train
    found: list[str] = []
    if drawn := [f"{name}={value}" for name in _DRAWN if (value := getattr(rollout, name)) != _default(name)]:
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


def _default(name: str) -> Any:
    return RolloutConfig.model_fields[name].default


def _max_staleness(config: Config) -> int:
    given = config.rollout.max_staleness
    return PRESETS[config.preset][0] if given is None else given


def _with(
    config: Config, section: Literal["rollout", "engine", "algorithm", "evaluate"], values: dict[str, Any]
) -> Config:
    if not values:
        return config
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def _with_overlong_limit(config: Config, outside: bool) -> Config:
    """With `reward.overlong.max_length`. `outside`: the run does not play the episodes, or not by its own environment."""
    overlong, where = config.reward.overlong, config.rollout.environment
    if overlong.cache is None or overlong.max_length is not None:
        return config
    if outside or where != "single_turn":
        what = "episodes are played outside of single_turn" if outside else f"rollout.environment is {where}"
        raise ConfigError(
            f"reward.overlong.cache is set and {what}: an episode may have several requests, and rollout.max_tokens is the limit "
            "of one; set reward.overlong.max_length, in sampled tokens of a whole episode"
        )
    limited = overlong.model_copy(update={"max_length": config.rollout.max_tokens})
    return config.model_copy(update={"reward": config.reward.model_copy(update={"overlong": limited})})


def _check_preset(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if config.preset != "sync":
        return
    if rollout.max_staleness:
        yield (
            f"rollout.max_staleness is {rollout.max_staleness} but preset is sync, which means 0; "
            "use preset=one_off or preset=async, or leave max_staleness out"
        )
    if rollout.streaming:
        yield (
            "rollout.streaming is true but preset is sync, which trains whole steps in prompt order so that reruns are "
            "bit-identical; use preset=async (with rollout.max_staleness=0 if no age is wanted), or leave streaming out"
        )


def _check_rollout(config: Config) -> Iterator[str]:
    rollout, engine = config.rollout, config.engine.kind
    if rollout.weight_sync_interval > 1 and engine == "embedded" and config.generation.placement != "worker":
        yield (
            f"rollout.weight_sync_interval is {rollout.weight_sync_interval} but generation.placement is "
            f"{config.generation.placement}, and an engine that shares the trainer's device samples from its own weights: "
            "they move with every step and are never handed over; leave the interval at 1, and set algorithm.updates_per_batch for "
            "several steps per batch, or set generation.placement=worker"
        )
    if rollout.weight_sync_interval > 1 and config.preset == "sync":
        yield (
            f"rollout.weight_sync_interval is {rollout.weight_sync_interval} but preset is sync, which means age 0; "
            "use preset=one_off or preset=async"
        )
    low, high = rollout.filter.min_mean_reward, rollout.filter.max_mean_reward
    if low is not None and high is not None and low > high:
        yield f"rollout.filter.min_mean_reward is {low} and max_mean_reward is {high}: no group can be between them; swap them"
    if "" in rollout.stop:
        yield "rollout.stop has an empty string, which would end every completion at its first token; take it out"
    cache, longest = config.reward.overlong.cache, config.reward.overlong.max_length
    if cache is not None and longest is not None and cache > longest:
        yield (
            f"reward.overlong.cache is {cache}; expected at most reward.overlong.max_length = {longest} (single_turn: "
            "rollout.max_tokens): it is the part of the longest episode over which the punishment grows"
        )
    if not all(-100 <= bias <= 100 for bias in rollout.logit_bias.values()):
        yield f"rollout.logit_bias is {rollout.logit_bias}; expected numbers from -100 to 100"
    if rollout.min_tokens > rollout.max_tokens:
        yield f"rollout.min_tokens is {rollout.min_tokens}; expected at most rollout.max_tokens = {rollout.max_tokens}"
    if rollout.streaming_min_groups > rollout.groups_per_step:
        yield (
            f"rollout.streaming_min_groups is {rollout.streaming_min_groups}; expected at most rollout.groups_per_step = "
            f"{rollout.groups_per_step}, the groups of a whole step"
        )


def _check_replay(config: Config) -> Iterator[str]:
    if not config.replay.size:
        return
    algorithm = config.algorithm
    terms = chosen_terms(algorithm)
    if advantage_named(algorithm.advantage).needs_whole_step:
        yield (
            f"replay.size is {config.replay.size} but algorithm.advantage is {algorithm.advantage}, whose statistics span "
            "the step that sampled a group; use an estimator of the group: grpo, dr_grpo, rloo"
        )
    if terms.kl.on and not terms.kl.in_loss:
        yield (
            f"replay.size is {config.replay.size} but algorithm.kl.place is reward: the penalty of a replayed group is that of "
            "the weights which first trained it; set kl.place=loss"
        )
    if algorithm.old_logprobs == "recompute" and terms.importance.cap is None:
        yield (
            f"replay.size is {config.replay.size} but algorithm.importance.cap is null: replayed tokens would be trained as "
            "if the weights of today had sampled them; set importance.cap, or old_logprobs=sampler"
        )


def _check_skip(config: Config) -> Iterator[str]:
    """A group without advantages moves no weight only where every term of the loss is a multiple of the advantage."""
    if not config.train.skip_zero_advantage:
        return
    terms = chosen_terms(config.algorithm)
    entropy, top = terms.entropy, terms.top_entropy.quantile
    reasons = {
        f"kl.coef={terms.kl.coef} in the loss": terms.kl.in_loss,
        f"entropy.coef={entropy.coef}": entropy.coef > 0,
        f"entropy.target={entropy.target}": entropy.target is not None,
        f"top_entropy.quantile={top}, taken over all tokens": top < 1,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        yield (
            f"train.skip_zero_advantage is true, but tokens without an advantage matter here: {'; '.join(found)}; leave it "
            "out, or switch that off"
        )


def _check_lengths(config: Config) -> Iterator[str]:
    longest = row_limit(config)
    if config.train.tokens_per_microbatch < longest:
        yield (
            f"train.tokens_per_microbatch is {config.train.tokens_per_microbatch}; expected at least data.max_prompt_tokens + "
            f"rollout.max_tokens = {config.data.max_prompt_tokens} + {config.rollout.max_tokens} = {longest}, so that one "
            "sequence fits; raise it or lower those"
        )
    room = config.engine.kv_positions
    if room is not None and room < longest:
        yield f"engine.kv_positions is {room}; expected at least the same {longest}, so that one sequence fits; raise it"


def _check_algorithm(config: Config) -> Iterator[str]:
    algorithm, rollout = config.algorithm, config.rollout
    if rollout.group_size == 1 and not advantage_named(algorithm.advantage).alone and config.train.kind == "torch":
        yield (
            f"rollout.group_size is 1; advantage {algorithm.advantage} compares the completions of one prompt and would "
            "always be 0; expected at least 2"
        )
    streaming = bool(rollout.streaming) and versions_per_batch(config) == 1  # several updates need the whole batch
    yield from check_losses(config, streaming)
    if algorithm.minibatches > rollout.groups_per_step:
        yield (
            f"algorithm.minibatches is {algorithm.minibatches}; expected at most rollout.groups_per_step = "
            f"{rollout.groups_per_step}: a batch is cut between its groups"
        )


def _check_lora(config: Config) -> Iterator[str]:
    lora = config.model.lora
    if lora.rank and lora.dropout:
        yield (
            f"model.lora.dropout is {lora.dropout}; expected 0: dropout in an RL policy is refused, the sampler's log-probs "
            "would be those of another model"
        )
    every = "all-linear" in lora.target_modules
    if lora.rank and (not (lora.target_modules or lora.target_parameters) or (every and len(lora.target_modules) > 1)):
        yield (
            f"model.lora.target_modules is {list(lora.target_modules)}; expected all-linear alone, or names of layers, like "
            "[q_proj, v_proj]"
        )


def _check_parts(config: Config) -> Iterator[str]:
    needs_model = [
        name for name, kind in (("engine", config.engine.kind), ("train", config.train.kind)) if kind != "dry_run"
    ]
    if needs_model and config.model.path is None:
        without = " and ".join(f"{name}.kind=dry_run" for name in needs_model)
        yield f"model.path is not set; expected a directory or a hub id (or {without} for a run without a model)"
    if config.engine.kind == "embedded" and config.train.kind == "dry_run":
        yield (
            "engine.kind is embedded but train.kind is dry_run: that engine samples from the trainer's own model; "
            "set engine.kind=dry_run or train.kind=torch"
        )
    if config.algorithm.router_replay and "dry_run" in (config.engine.kind, config.train.kind):
        yield (
            "algorithm.router_replay is true but engine.kind or train.kind is dry_run, which has no experts; leave it out"
        )
    if 0 < (config.evaluate.temperature or 0) < LOWEST_TEMPERATURE:
        yield (
            f"evaluate.temperature is {config.evaluate.temperature}; expected {LOWEST_TEMPERATURE:g} or more, or 0: greedy"
        )
    if config.evaluate.every is not None and config.data.eval is None:
        yield (
            f"evaluate.every is {config.evaluate.every} but data.eval is not set; name held-out prompts or leave "
            "evaluate.every out"
        )
    if config.resume is True and config.run.overwrite:
        yield (
            "resume and run.overwrite are both true: one goes on from the run directory, the other starts "
            "anew; choose one"
        )


def _check_deadlines(config: Config) -> Iterator[str]:
    watchdog = config.watchdog
    if watchdog.stall_timeout_s <= watchdog.interval_s:
        yield (
            f"watchdog.stall_timeout_s is {watchdog.stall_timeout_s}; expected more than watchdog.interval_s = "
            f"{watchdog.interval_s}: a stall cannot be noticed sooner than the thread looks"
        )
    if config.reward.functions and watchdog.stall_timeout_s <= config.reward.timeout_s:
        yield (
            f"watchdog.stall_timeout_s is {watchdog.stall_timeout_s}; expected more than reward.timeout_s = "
            f"{config.reward.timeout_s}: one slow reward would end the run as stalled"
        )


def _check_ranks(config: Config, world_size: int) -> list[str]:
    if world_size < 1:
        return [f"world_size is {world_size}; expected at least 1"]
    if config.rollout.groups_per_step < world_size:
        return [
            f"rollout.groups_per_step is {config.rollout.groups_per_step}; expected at least the number of ranks, "
            f"{world_size}: fewer groups than ranks leave a rank without work in every step; raise it or start fewer ranks"
        ]
    return []


def _check_run(config: Config) -> Iterator[str]:
    train = config.train
    dry_run = train.kind == "dry_run"
    if train.max_steps is None and train.max_epochs is None and train.time_limit_s is None:
        yield "the run has no end: set at least one of train.max_steps, train.max_epochs, train.time_limit_s"
    if config.reroll.start_fraction < 1 and train.max_steps is None and train.max_epochs is None:
        yield (
            f"reroll.start_fraction is {config.reroll.start_fraction}, a part of the run, but only time_limit_s ends it; set "
            "train.max_steps or train.max_epochs"
        )
    if train.schedule != "constant" and train.max_steps is None and train.max_epochs is None:
        yield (
            f"train.schedule is {train.schedule}, which needs to know the last step; set train.max_steps or "
            "train.max_epochs, "
            "or use schedule=constant"
        )
    if dry_run or config.door.ring is not None:
        return
    if config.data.train is None:
        yield (
            "data.train is not set; expected a JSONL or parquet file or a `datasets` directory with the training "
            "prompts, or door.ring, through which other processes bring groups"
        )
    if not (config.reward.functions or config.reward.model) and config.rollout.environment == "single_turn":
        yield (
            "reward.functions is empty; expected at least one `file.py:function` or `module:function`, or a reward.model "
            "(or an environment of your own that sets the reward)"
        )


_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    _check_preset,
    _check_rollout,
    check_generation,
    _check_replay,
    _check_skip,
    _check_lengths,
    _check_algorithm,
    _check_lora,
    _check_parts,
    _check_deadlines,
    check_door,
    check_distributed,
    check_rewards,
)
