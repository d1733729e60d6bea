"""Checks the values of a configuration. Every error message names the value, the reason and a remedy.

Each check yields error messages. `complaints` runs all checks. Checks of losses and advantages are in `check_losses.py`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from asyncrl.algorithms import registry
from asyncrl.algorithms.registry import advantage_named
from asyncrl.types import LOWEST_TEMPERATURE

from .check_losses import check_losses, chosen_loss, chosen_terms
from .fields import config_fields, get
from .methods import SETTINGS
from .schema import Config
from .text import one_line

# `door.http_key` has at least 16 characters, so that nobody can guess the key. The characters need no escape in a URL.
_KEY = re.compile(r"[A-Za-z0-9._~-]{16,256}")


class Switch(NamedTuple):
    """When the settings of a section have an effect. A changed setting of a section that is off is an error."""

    # Error text: why the section has no effect, and a remedy.
    off_message: str
    # Keys in the section that are never refused. The section is on if one of them does not have its default.
    switches: tuple[str, ...] = ()
    # If given, this function and not `switches` decides whether the section is on.
    is_on: Callable[[Config], bool] | None = None


SWITCHED: Mapping[str, Switch] = {
    "model.lora": Switch("model.lora.rank is 0: there are no adapters; set it", ("rank",)),
    "reward.overlong": Switch("reward.overlong.cache is not set: there is no component `overlong`; set it", ("cache",)),
    "rollout.filter": Switch(
        "no filter is on; set rollout.filter.dynamic_sampling, min_mean_reward or max_mean_reward",
        ("dynamic_sampling", "min_mean_reward", "max_mean_reward"),
    ),
    "door": Switch("door.ring is not set: there is no door; set it", ("ring",)),
    "replay": Switch("replay.size is 0: no group is replayed; set it", ("size",)),
    "reroll": Switch("reroll.start_fraction is 1: no prompt is played again; set it", ("start_fraction",)),
    "telemetry.profile": Switch("telemetry.profile.from is not set: there is no profile; set it", ("from",)),
    "generation": Switch(
        "generation.placement is shared: there are no workers; set it to worker",
        ("placement", "engine"),
        lambda config: config.generation.placement != "shared",
    ),
    "dry_run": Switch(
        "neither engine.kind nor train.kind is dry_run; set one of the two",
        is_on=lambda config: "dry_run" in (config.engine.kind, config.train.kind),
    ),
}
# (setting, the setting whose value is the upper bound, reason)
_AT_MOST = (
    ("rollout.min_tokens", "rollout.max_tokens", "no completion is longer"),
    ("rollout.streaming_min_groups", "rollout.groups_per_step", "a step has no more groups"),
    ("algorithm.minibatches", "rollout.groups_per_step", "a batch is cut between its groups"),
    ("rollout.filter.min_mean_reward", "rollout.filter.max_mean_reward", "no group could be between them"),
    (
        "reward.overlong.cache",
        "reward.overlong.max_length",
        "the punishment grows over the last `cache` tokens of the longest episode (single_turn: rollout.max_tokens)",
    ),
)


def complaints(
    config: Config, world_size: int, embedding: bool, own_environment: bool = False, own_rewards: bool = False
) -> list[str]:
    """All errors of a configuration whose presets are applied. `embedding`: a program of the user passes prompts and rewards, and
    ends the run. `own_environment`, `own_rewards`: the program passes an environment or reward functions."""
    errors = [text for check in _CHECKS for text in check(config)]
    errors += _check_unread(config, embedding)
    errors += _check_ranks(config, world_size)
    return errors if embedding else [*errors, *_check_run(config, own_environment, own_rewards)]


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine can connect to the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def key_problem(host: str, key: str | None) -> str | None:
    """An error message about the key, or None if the key is good. `key`: None means that the run makes a key, "" means no key."""
    if key is None or _KEY.fullmatch(key):
        return None
    if key:
        return (
            f"door.http_key has {len(key)} characters, or some that need escapes in a URL; expected 16 to 256 letters, digits or "
            "any of . _ ~ - (leave it out, and the run makes one)"
        )
    if is_loopback(host):
        return None
    return (
        f'door.http_key is "" and door.http_host {host}: without a key everybody who can connect to that address could train this '
        "run; leave the key out, and the run makes one, or listen at 127.0.0.1"
    )


def _check_unread(config: Config, embedding: bool) -> Iterator[str]:
    """Refuses a setting that the user changed and that has no effect."""
    default = type(config)()
    changed = [name for name in config_fields() if get(config, name) != get(default, name)]
    for name in changed:
        if reason := _unread_reason(config, name, changed, embedding):
            shown = "given" if name == "door.http_key" else one_line(get(config, name))
            yield f"{name} is {shown} but {reason}, or leave {name} out"


def _unread_reason(config: Config, name: str, changed: Collection[str], embedding: bool) -> str | None:
    """Why this setting has no effect, and a remedy. None if no rule here applies. `changed`: names of all changed settings."""
    section, _, key = name.rpartition(".")
    switch, algorithm = SWITCHED.get(section), config.algorithm
    if switch is not None:
        turned_on = any(f"{section}.{each}" in changed for each in switch.switches)
        is_on = switch.is_on(config) if switch.is_on else turned_on
        # A program that embeds the run may open a ring itself (`runtime.door.serve`).
        has_effect = is_on or key in switch.switches or (embedding and section == "door" and key != "http_port")
        return None if has_effect else switch.off_message
    if name == "algorithm.discount" and algorithm.credit != "discounted":
        return f"algorithm.credit is {algorithm.credit}, which discounts nothing; use credit=discounted"
    if name not in SETTINGS:
        return None
    loss, losses = chosen_loss(algorithm), registry.readers().get(SETTINGS[name].flat, ())
    if losses and name not in {setting.dotted for setting in loss.settings()}:
        remedy = loss.instead.get(name) or f"use loss={' or '.join(losses)}"
        return f"loss is {algorithm.loss}, which does not read it; {remedy}"
    for term in chosen_terms(algorithm):
        if SETTINGS[name] in term.settings() and key not in term.switches:
            if term.section == "importance" and algorithm.old_logprobs == "sampler":
                return "old_logprobs is sampler, so there are no importance weights; set old_logprobs=recompute"
            return None if term.on else term.off
    for advantage, estimator in registry.ADVANTAGES.items():
        method = estimator.settings
        if method and SETTINGS[name] in method.settings() and algorithm.advantage != advantage:
            return f"advantage is {algorithm.advantage}, which does not read it; use advantage={advantage}"
    return None


def _check_preset(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if config.preset != "sync":
        return
    if rollout.max_staleness:
        yield (
            f"rollout.max_staleness is {rollout.max_staleness} but preset is sync, which means 0; "
            "use preset=one_off or preset=async, or leave max_staleness out"
        )
    if config.engine.kept_prefix_max_age:
        yield (
            f"engine.kept_prefix_max_age is {config.engine.kept_prefix_max_age} but preset is sync, where every turn computes its "
            "whole history: the content of the cache depends on how long tools take; use preset=async (with "
            "rollout.max_staleness=0 for no staleness), or leave kept_prefix_max_age out"
        )
    if rollout.streaming:
        yield (
            "rollout.streaming is true but preset is sync, which trains whole steps in prompt order so that reruns are "
            "bit-identical; use preset=async (with rollout.max_staleness=0 for no staleness), or leave streaming out"
        )


def _check_rollout(config: Config) -> Iterator[str]:
    rollout, engine = config.rollout, config.engine.kind
    in_workers = config.generation.placement == "worker" or _has_roles(config)
    kept_age = config.engine.kept_prefix_max_age
    if kept_age is not None and kept_age > 1 and config.engine.kv_after_update == "recompute":
        yield (
            f"engine.kept_prefix_max_age is {kept_age} but engine.kv_after_update is recompute, where no cached key or value "
            "is older than the weights; leave kept_prefix_max_age out, or set kv_after_update=keep"
        )
    if rollout.weight_sync_interval > 1 and engine == "embedded" and not in_workers:
        yield (
            f"rollout.weight_sync_interval is {rollout.weight_sync_interval} but generation.placement is "
            f"{config.generation.placement}, and an engine on the trainer's device samples from the trainer's weights: "
            "they change with every step and are never sent; leave the interval at 1, and set algorithm.updates_per_batch for "
            "several steps per batch, or set generation.placement=worker"
        )
    if rollout.weight_sync_interval > 1 and config.preset == "sync":
        yield (
            f"rollout.weight_sync_interval is {rollout.weight_sync_interval} but preset is sync, which means staleness 0; "
            "use preset=one_off or preset=async"
        )
    if rollout.keep_viable and config.reward.batch == "trajectory":
        yield (
            "rollout.keep_viable is true but reward.batch is trajectory: a completion would be scored before the run knows which "
            "members of its group remain; leave reward.batch out"
        )
    if "" in rollout.stop:
        yield "rollout.stop has an empty string, which would end every completion at its first token; take it out"
    if not all(-100 <= bias <= 100 for bias in rollout.logit_bias.values()):
        yield f"rollout.logit_bias is {rollout.logit_bias}; expected numbers from -100 to 100"
    for name, limit, reason in _AT_MOST:
        value, most = get(config, name), get(config, limit)
        if value is not None and most is not None and value > most:
            yield f"{name} is {value}; expected at most {limit} = {most}: {reason}"


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
            f"replay.size is {config.replay.size} but algorithm.kl.place is reward: a replayed group keeps the penalty "
            "that was computed when the group was first trained; set kl.place=loss"
        )
    if algorithm.old_logprobs == "recompute" and terms.importance.cap is None:
        yield (
            f"replay.size is {config.replay.size} but algorithm.importance.cap is null: replayed tokens would be trained as "
            "if the current weights had sampled them; set importance.cap, or old_logprobs=sampler"
        )


def _check_skip(config: Config) -> Iterator[str]:
    """A group with advantages of 0 may be skipped only if each term of the loss is a multiple of the advantage."""
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
    true_reasons = [reason for reason, is_true in reasons.items() if is_true]
    if true_reasons:
        yield (
            f"train.skip_zero_advantage is true, but tokens without an advantage matter here: {'; '.join(true_reasons)}; "
            "leave skip_zero_advantage out, or switch these terms off"
        )


def _check_lengths(config: Config) -> Iterator[str]:
    data, rollout = config.data, config.rollout
    whole, names = data.max_prompt_tokens + rollout.max_tokens, "data.max_prompt_tokens + rollout.max_tokens"
    longest = rollout.max_context or whole
    if longest < whole:
        yield (
            f"rollout.max_context is {longest}; expected at least {names} = {data.max_prompt_tokens} + {rollout.max_tokens} = "
            f"{whole}, so that the longest prompt gets a reply; raise rollout.max_context, or lower a setting of the sum"
        )
    elif config.train.tokens_per_microbatch < longest:
        as_sum = f"{names} = {data.max_prompt_tokens} + {rollout.max_tokens}"
        named = as_sum if rollout.max_context is None else "rollout.max_context"
        yield (
            f"train.tokens_per_microbatch is {config.train.tokens_per_microbatch}; expected at least {named} = {longest}, so that "
            "one sequence fits; raise tokens_per_microbatch, or lower this limit"
        )
    positions = config.engine.kv_positions
    if positions is not None and positions < longest:
        yield f"engine.kv_positions is {positions}; expected at least {longest}, so that one sequence fits; raise it"


def _check_algorithm(config: Config) -> Iterator[str]:
    algorithm, rollout = config.algorithm, config.rollout
    if rollout.group_size == 1 and (problem := alone_problem(config)):
        yield f"rollout.group_size is 1; {problem}"
    of_step = advantage_named(config.algorithm.advantage).needs_whole_step
    if rollout.group_size == 1 and rollout.filter.dynamic_sampling and (of_step or rollout.filter.by != "reward"):
        yield (
            "rollout.filter.dynamic_sampling is true but rollout.group_size is 1: one member never differs, so each group would be "
            "dropped; leave dynamic_sampling out"
        )
    # With several optimizer steps per batch, training waits for the whole batch.
    streaming = bool(rollout.streaming) and algorithm.updates_per_batch * algorithm.minibatches == 1
    yield from check_losses(config, streaming)
    if algorithm.credit == "discounted" and advantage_named(algorithm.advantage).needs_whole_step:
        yield (
            f"algorithm.credit is discounted but advantage is {algorithm.advantage}, whose statistics span the episodes of a step, "
            "not the t-th replies of one group; use an advantage of a group, such as grpo, or another credit"
        )


def alone_problem(config: Config) -> str | None:
    """Why a group of one member would train nothing, for an error message. None if it would train something."""
    advantage = config.algorithm.advantage
    if advantage_named(advantage).alone or config.train.kind != "torch":
        return None
    return f"advantage {advantage} compares the completions of one prompt and would always be 0; expected at least 2"


def _check_lora(config: Config) -> Iterator[str]:
    lora = config.model.lora
    nothing_named = not (lora.target_modules or lora.target_parameters)
    if lora.rank and (nothing_named or ("all-linear" in lora.target_modules and len(lora.target_modules) > 1)):
        yield (
            f"model.lora.target_modules is {list(lora.target_modules)}; expected all-linear alone, or names of layers, like "
            "[q_proj, v_proj]"
        )


def _check_parts(config: Config) -> Iterator[str]:
    kinds = {"engine": config.engine.kind, "train": config.train.kind}
    needs_model = [name for name, kind in kinds.items() if kind != "dry_run"]
    if needs_model and config.model.path is None:
        dry_run = " and ".join(f"{name}.kind=dry_run" for name in needs_model)
        yield f"model.path is not set; expected a directory or a hub id (or {dry_run} for a run without a model)"
    if config.engine.kind == "embedded" and config.train.kind == "dry_run":
        yield (
            "engine.kind is embedded but train.kind is dry_run, which has no model for the engine to sample from; "
            "set engine.kind=dry_run or train.kind=torch"
        )
    if config.algorithm.router_replay and "dry_run" in (config.engine.kind, config.train.kind):
        yield (
            "algorithm.router_replay is true but engine.kind or train.kind is dry_run, without experts; leave router_replay out"
        )
    if config.reward.model and config.train.kind == "dry_run":
        yield (
            f"reward.model is {config.reward.model[0].path} but train.kind is dry_run, which has no device to score on; leave "
            "reward.model out, or set train.kind=torch"
        )
    if 0 < (config.evaluate.temperature or 0) < LOWEST_TEMPERATURE:
        yield (
            f"evaluate.temperature is {config.evaluate.temperature}; expected {LOWEST_TEMPERATURE:g} or more, or 0: greedy"
        )
    for name in ("every", "limit"):
        if (value := getattr(config.evaluate, name)) is not None and config.data.eval is None:
            yield f"evaluate.{name} is {value} but data.eval is not set; name held-out prompts or leave evaluate.{name} out"
    if config.resume is True and config.run.overwrite:
        yield (
            "resume and run.overwrite are both true: resume continues the earlier run, overwrite starts a new run; choose one"
        )


def _check_deadlines(config: Config) -> Iterator[str]:
    stall, reward = config.watchdog.stall_timeout_s, config.reward
    limits = [("watchdog.interval_s", config.watchdog.interval_s, "raise stall_timeout_s or lower interval_s")]
    if reward.functions:
        limits.append(("reward.timeout_s", reward.timeout_s, "one slow reward would end the run as stalled"))
    if reward.judge:
        tries = "the time of all tries of a judge, with a minute between two tries (reward.timeout_s, reward.retries)"
        limits.append((tries, reward.judge_deadline_s, "a slow judge would end the run as stalled"))
    for name, limit, reason in limits:
        if stall <= limit:
            yield f"watchdog.stall_timeout_s is {stall}; expected more than {name} = {limit:g}: {reason}"


def _check_ranks(config: Config, world_size: int) -> list[str]:
    if config.rollout.groups_per_step < world_size:
        return [
            f"rollout.groups_per_step is {config.rollout.groups_per_step}; expected at least the number of ranks that train, "
            f"{world_size}: fewer groups than ranks leave a rank without work in every step; raise it or start fewer ranks"
        ]
    return []


def _check_run(config: Config, own_environment: bool, own_rewards: bool) -> Iterator[str]:
    train, rollout = config.train, config.rollout
    asks_once = rollout.environment == "single_turn" and not own_environment
    dry_run = train.kind == "dry_run"
    asks_policy = any(judge.url == "policy" for judge in config.reward.judge)
    if asks_policy and rollout.max_context is None:
        yield (
            "reward.judge has url policy, and rollout.max_context is not set: the judge reads the prompt, the answer and about 300 "
            "tokens of instructions, which are more than the policy's own context; set rollout.max_context"
        )
    # `max_context` has an effect if producers send long rows of agents, or if a judge asks the policy.
    limits = ["max_turns", "tool_timeout_s", "tool_max_chars"]
    limits += [] if config.door.ring is not None or asks_policy else ["max_context"]
    for name in limits if asks_once else ():
        if getattr(rollout, name) != type(rollout).model_fields[name].default:
            yield (
                f"rollout.{name} is {getattr(rollout, name)} but rollout.environment is single_turn, which asks once for each "
                f"completion; leave {name} out, or set rollout.environment to an agent"
            )
    if train.max_steps is None and train.max_epochs is None and train.time_limit_s is None:
        yield "the run has no end: set at least one of train.max_steps, train.max_epochs, train.time_limit_s"
    if config.reroll.start_fraction < 1 and train.max_steps is None and train.max_epochs is None:
        yield (
            f"reroll.start_fraction is {config.reroll.start_fraction}, a part of the run's steps, whose number is not known; set "
            "train.max_steps or train.max_epochs"
        )
    if train.schedule != "constant" and train.max_steps is None and train.max_epochs is None:
        yield (
            f"train.schedule is {train.schedule}, which depends on the last step; set train.max_steps or train.max_epochs, or use "
            "train.schedule=constant"
        )
    if train.schedule != "constant" and train.max_epochs is not None and config.reroll.start_fraction < 1:
        yield (
            f"train.schedule is {train.schedule}, which depends on the last step, and reroll plays prompts again, so the last step "
            "of train.max_epochs is not known; end the run by train.max_steps alone, or use train.schedule=constant"
        )
    if dry_run or config.door.ring is not None:
        return
    if config.data.train is None:
        yield (
            "data.train is not set; expected the training prompts: a file (JSONL, JSON, CSV, parquet), a `datasets` directory, "
            "a hub id or `file.py:function`; or door.ring, through which other processes bring groups"
        )
    if asks_once and not (config.reward.scores or own_rewards):
        yield (
            "reward.functions is empty; expected at least one `file.py:function` or `module:function`, a reward.judge or a "
            "reward.model (or an environment of your own that sets the reward)"
        )


def _check_generation(config: Config) -> Iterator[str]:
    if config.generation.placement == "worker" and config.engine.kind == "dry_run":
        yield (
            "generation.placement is worker but engine.kind is dry_run, which has no model that a worker could load; leave the "
            "placement out (dry_run.shared_device=false simulates a second device)"
        )
    if config.generation.engine != "vllm":
        if config.generation.tensor_parallel > 1:
            yield (
                f"generation.tensor_parallel is {config.generation.tensor_parallel} but generation.engine is "
                f"{config.generation.engine}, and only vllm takes more than 1; set generation.engine=vllm, or leave "
                "tensor_parallel out"
            )
        return
    if config.generation.placement == "shared":
        yield (
            "generation.engine is vllm but generation.placement is shared: vLLM runs in workers; set placement "
            "to worker (also with one GPU, which trainer and worker then share), or engine to embedded"
        )
    if config.engine.kind == "dry_run":
        yield "generation.engine is vllm but engine.kind is dry_run, which samples from no model; leave generation.engine out"
    if config.model.dtype == "float64":
        yield "generation.engine is vllm but model.dtype is float64; use float32 or bfloat16, or generation.engine=embedded"
    if config.algorithm.router_replay:
        yield "generation.engine is vllm but algorithm.router_replay is true; only generation.engine=embedded records routes"


def _check_door(config: Config) -> Iterator[str]:
    """Checks the settings of the door for groups from outside, and conflicts with other settings."""
    door = config.door
    if door.producer_mib >= door.ring_mib:
        yield (
            f"door.producer_mib is {door.producer_mib} and door.ring_mib {door.ring_mib}: no producer would fit; expected a "
            "ring_mib above producer_mib times the number of producers"
        )
    if door.timeout_s is None and door.on_timeout != "drop":
        yield f"door.on_timeout is {door.on_timeout} but door.timeout_s is null, so no group ever times out; set timeout_s"
    if door.ring is None:
        return
    if problem := key_problem(door.http_host, door.http_key):
        yield problem
    if door.http_port is not None and config.algorithm.router_replay:
        yield (
            f"door.http_port is {door.http_port} but algorithm.router_replay is true, and groups that are posted bring no routes "
            "of experts; leave one of the two out, or push groups with asyncrl.client, whose trajectories hold routed_experts"
        )
    for name, value in (("data.train", config.data.train), ("train.max_epochs", config.train.max_epochs)):
        if value is not None:
            yield (
                f"door.ring is {door.ring} and {name} is {value}: groups come from other processes or from prompts, not from "
                "both; leave one of the two out"
            )
    if config.reroll.start_fraction < 1:
        yield "reroll plays prompts again, but a run with door.ring has no prompts; leave reroll.start_fraction out"
    if config.evaluate.every is not None and not config.reward.scores and config.rollout.environment == "single_turn":
        yield "evaluate.every is set but reward.functions is empty: nothing would score the held-out completions"


def _check_distributed(config: Config) -> Iterator[str]:
    """Checks `distributed.sharding`. training/sharded.py also refuses a model that has a module for each expert."""
    if config.distributed.sharding != "fsdp":
        return
    prefix = "distributed.sharding is fsdp and "
    if config.train.kind == "dry_run":
        yield prefix + "train.kind is dry_run, which has no weights to shard; use distributed.sharding=replicate"
    if config.model.lora.rank:
        yield (
            prefix
            + f"model.lora.rank is {config.model.lora.rank}: adapters are small, and their frozen base weights are "
            "not sharded; use distributed.sharding=replicate"
        )


def _has_roles(config: Config) -> bool:
    """Whether a rank only trains or only generates, ranks share sequences, or a node may join. Then all engines run in workers."""
    if config.distributed.listen is not None or config.distributed.context > 1:
        return True
    train, generate = config.distributed.roles.train, config.distributed.roles.generate
    return isinstance(train, int) or isinstance(generate, int) or {*(train or ())} != {*(generate or ())}


def _check_roles(config: Config) -> Iterator[str]:
    """Checks settings that give ranks different roles. `distributed/roles.py` compares the roles with the number of ranks."""
    listen, context = config.distributed.listen, config.distributed.context
    if not _has_roles(config):
        return
    name = "distributed.roles" if listen is None else "distributed.listen"
    name = name if context == 1 else "distributed.context"
    if context > 1 and config.train.kind == "dry_run":
        yield (
            f"distributed.context is {context} and train.kind is dry_run, which has no model whose sequences ranks could share; "
            "leave distributed.context out"
        )
    prefix = f"{name} is set and "
    if listen is not None:
        host, _, port = listen.rpartition(":")
        if not (host and re.fullmatch(r"\d{1,5}", port) and int(port) < 1 << 16):
            yield f"distributed.listen is {listen!r}; expected HOST:PORT, such as 10.0.0.5:29600"
        elif host in ("0.0.0.0", "[::]", "*"):
            yield f"distributed.listen is {listen!r}: give the address by which nodes reach the machine of rank 0"
    if config.door.ring is not None:
        yield prefix + (
            f"door.ring is {config.door.ring}: other programs generate the groups, so no rank generates; leave {name} out"
        )
    if config.generation.placement == "shared":
        yield f"with {name} every engine runs in workers, but generation.placement is shared; use generation.placement=auto"
    if config.reroll.start_fraction < 1:
        yield prefix + (
            f"reroll.start_fraction is {config.reroll.start_fraction}: the rank with the prompt cursor does not see the rewards "
            "of all ranks; leave one of the two out"
        )


_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    _check_preset, _check_rollout, _check_generation, _check_replay, _check_skip, _check_lengths, _check_algorithm, _check_lora,
    _check_parts, _check_deadlines, _check_door, _check_distributed, _check_roles,
)  # fmt: skip
