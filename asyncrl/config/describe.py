"""The configuration as text: the schema for `--help`, `config.yaml`, the diff of two, and what a resume may change."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from functools import reduce
from typing import Any

from asyncrl.algorithms.method import Setting
from asyncrl.errors import ConfigError

from .checks import SWITCHED
from .fields import knobs
from .methods import SETTINGS, about, settings_of, unread
from .resolve import PRESETS
from .schema import Config
from .text import dump

# What may change when a run goes on; every other setting would make the saved state wrong, for the reason below. A setting of a
# method says it itself (`fixed`). A sharded state is read as a whole, however it was cut when it was written.
_FREE = (
    "run resume checkpoint telemetry watchdog evaluate distributed.sharding dry_run threads door replay reroll generation "
    "model.device model.head_kernel data.eval reward.workers reward.concurrency reward.timeout_s reward.retries reward.on_error "
    "reward.worker_max_mib reward.worker_max_calls reward.batch reward.overlong rollout.late rollout.sync_warmup_steps "
    "rollout.filter rollout.streaming_min_groups rollout.temperature rollout.top_p rollout.top_k rollout.min_p "
    "rollout.repetition_penalty rollout.presence_penalty rollout.frequency_penalty rollout.logit_bias rollout.bad_words "
    "rollout.min_tokens rollout.max_tokens rollout.stop rollout.stop_token_ids rollout.ignore_eos rollout.max_failed_groups "
    "rollout.retries rollout.timeout_s engine.max_sequences engine.kv_positions engine.prefill_tokens engine.kv_after_update "
    "algorithm.mismatch_gate train.lr train.schedule train.warmup_steps train.min_lr_ratio train.weight_decay "
    "train.decay_norms_and_biases train.eps train.grad_clip train.tokens_per_microbatch train.gradient_checkpointing "
    "train.skip_zero_advantage train.max_steps train.max_epochs train.time_limit_s train.partial_final_step"
)
FREE_ON_RESUME = frozenset(_FREE.split())
_LEDGER = "the saved counts of groups, turns and versions belong to the old value"
_WEIGHTS = "the saved weights and optimizer state belong to the old value"
_CURVE = "the run would go on with another objective under the same name; start a new run from the checkpoint instead"
# A setting, or its section -> why it may not change.
_REASONS: Mapping[str, str] = {
    "seed": "all randomness is keyed by it",
    "data": "group ids and the saved place in the prompts would name other rows",
    "rollout.environment": _CURVE,
    **dict.fromkeys(("preset", "rollout", "algorithm.updates_per_batch", "algorithm.minibatches"), _LEDGER),
    **dict.fromkeys(("model", "engine", "train"), _WEIGHTS),
}


def help_text() -> str:
    """The schema: dotted name, type, default and sentence of every setting, and the presets."""
    lines = ["Configuration keys. In a YAML file they are nested; on the command line: a.b=value or --a.b value.", ""]
    section = ""
    for knob in knobs().values():
        head = knob.name.rpartition(".")[0]
        if head != section:
            section = head
            lines += ["", *_heading(head)]
        lines.append(f"{knob.name}  ({knob.expected}; default {short(knob.default)})")
        lines += textwrap.wrap(knob.text, 110, initial_indent="    ", subsequent_indent="    ")
        lines += [f"      {each.name}: {each.text}" for each in knob.items.values()]
    lines += ["", "Presets (fill in what is not given):"]
    for name, (staleness, streaming) in PRESETS.items():
        lines.append(
            f"    preset={name:8} rollout.max_staleness={staleness} rollout.streaming={str(streaming).lower()}"
        )
    return "\n".join(lines) + "\n"


def _heading(section: str) -> list[str]:
    """What a section belongs to, where not every run reads it."""
    if section in SWITCHED:
        return [f"[{section}: refused where {SWITCHED[section].off.partition(';')[0]}]"]
    said = about(section.removeprefix("algorithm."))
    return [f"[{section}: {said}]"] if said else []


def to_yaml(config: Config) -> str:
    """The text of `config.yaml`; `load_config` reads an equal configuration from it. Settings of losses and advantages that
    are not chosen are left out: a checked configuration has their defaults."""
    return dump(config.model_dump(exclude={"algorithm": {*unread(config.algorithm)}}))


def diff(old: Config, new: Config) -> dict[str, str]:
    """`old -> new` of every setting that differs, by its name in the order of the schema, without secrets."""
    before, after = _flat(old), _flat(new)
    pairs = {name: (before.get(name), after.get(name)) for name in {**before, **after}}
    return {name: f"{short(a)} -> {short(b)}" for name, (a, b) in pairs.items() if a != b}


def refusal(name: str, settings: Mapping[str, Setting] = SETTINGS) -> str | None:
    """Why this setting may not change on resume; None where it may."""
    section = name.partition(".")[0]
    if name in settings:
        return _CURVE if settings[name].fixed else None
    if {name, section, name.rpartition(".")[0]} & FREE_ON_RESUME:
        return None
    return _REASONS.get(name) or _REASONS.get(section, _CURVE)


def check_resume(old: Config, new: Config) -> list[str]:
    """Lines of the diff between the run's resolved configuration and the one it goes on with, both resolved.

    `resume` itself, which always differs, is left out.
    Errors: `ConfigError` that lists every change that would make the saved state wrong, with the reason.
    """
    changes, known = diff(old, new), settings_of(new.algorithm)
    reasons = {name: refusal(name, known) for name in changes}
    refused = [f"  {name}: {changes[name]} ({reason})" for name, reason in reasons.items() if reason is not None]
    if refused:
        raise ConfigError(
            "this run cannot be resumed with a configuration that differs in:\n" + "\n".join(refused) + "\n"
            "put these back, or start a run under another run.name"
        )
    return [f"{name}: {change}" for name, change in changes.items() if name != "resume"]


def _flat(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name, without secrets."""
    plain = config.model_dump()
    found = {}
    for name in knobs(type(config)):
        *sections, key = name.split(".")
        section = reduce(lambda tree, part: tree[part], sections, plain)
        if key in section:
            found[name] = section[key]
    return found


def short(value: Any) -> str:
    """A value of a setting in one line, as YAML has it."""
    if isinstance(value, (tuple, list)) and not any(isinstance(item, dict) for item in value):
        return f"[{', '.join(map(short, value))}]"
    return dump(value).removesuffix("\n").removesuffix("\n...").replace("\n", "; ")
