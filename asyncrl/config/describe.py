"""The configuration as text: `--help`, `config.yaml`, the diff of two configurations, and which settings a resume may change."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from functools import reduce
from typing import Any

from asyncrl.algorithms.method import Setting
from asyncrl.errors import ConfigError

from .checks import SWITCHED
from .fields import config_fields
from .methods import SETTINGS, about, settings_of, unread_sections
from .resolve import PRESETS
from .schema import Config
from .text import dump, one_line

# Settings and sections that a resume may change. Any other change is refused (`refusal` has the reason). For settings of losses,
# advantages and terms `Setting.fixed` decides. distributed.sharding may change, since every rank reads the full state.
_FREE = (
    "run resume checkpoint telemetry watchdog evaluate distributed.sharding dry_run threads door endpoint replay reroll generation "
    "model.device model.head_kernel data.eval reward.workers reward.concurrency reward.timeout_s reward.retries reward.on_error "
    "reward.worker_max_mib reward.worker_max_calls reward.batch reward.overlong rollout.late rollout.sync_warmup_steps "
    "rollout.filter rollout.streaming_min_groups rollout.temperature rollout.top_p rollout.top_k rollout.min_p "
    "rollout.repetition_penalty rollout.presence_penalty rollout.frequency_penalty rollout.logit_bias rollout.bad_words "
    "rollout.min_tokens rollout.max_tokens rollout.stop rollout.stop_token_ids rollout.ignore_eos rollout.max_failed_groups "
    "rollout.keep_viable rollout.tool_timeout_s rollout.tool_max_chars rollout.retries rollout.timeout_s rollout.max_turns "
    "rollout.max_context engine.max_sequences engine.kv_positions engine.prefill_tokens engine.kv_after_update "
    "engine.kept_prefix_max_age algorithm.mismatch_gate train.lr train.schedule train.warmup_steps train.min_lr_ratio "
    "train.weight_decay train.decay_norms_and_biases train.eps train.grad_clip train.tokens_per_microbatch "
    "train.gradient_checkpointing train.skip_zero_advantage train.max_steps train.max_epochs train.time_limit_s "
    "train.partial_final_step distributed.roles distributed.listen distributed.context"
)
FREE_ON_RESUME = frozenset(_FREE.split())
_LEDGER = "the saved counts of groups, turns and versions belong to the old value"
_WEIGHTS = "the saved weights and optimizer state belong to the old value"
_OBJECTIVE = (
    "the run would go on with another objective under the same name; start a new run from the checkpoint instead"
)
# A setting, or its section -> why it may not change.
_REASONS: Mapping[str, str] = {
    "seed": "all random numbers of the run are derived from the seed",
    "data": "group ids and the saved position in the prompts would name other rows",
    "rollout.environment": _OBJECTIVE,
    **dict.fromkeys(("preset", "rollout", "algorithm.updates_per_batch", "algorithm.minibatches"), _LEDGER),
    **dict.fromkeys(("model", "engine", "train"), _WEIGHTS),
}


def help_text() -> str:
    """The text of `--help`: dotted name, type, default and description of every setting, then the presets."""
    lines = ["Configuration keys. In a YAML file they are nested; on the command line: a.b=value or --a.b value.", ""]
    section = ""
    for field in config_fields().values():
        section_of_field = field.name.rpartition(".")[0]
        if section_of_field != section:
            section = section_of_field
            lines += ["", *_heading(section)]
        lines.append(f"{field.name}  ({field.expected}; default {one_line(field.default)})")
        lines += textwrap.wrap(field.text, 110, initial_indent="    ", subsequent_indent="    ")
        lines += [f"      {item.name}: {item.text}" for item in field.items.values()]
    lines += ["", "Presets (fill in what is not given):"]
    for name, (staleness, streaming) in PRESETS.items():
        lines.append(
            f"    preset={name:8} rollout.max_staleness={staleness} rollout.streaming={str(streaming).lower()}"
        )
    return "\n".join(lines) + "\n"


def _heading(section: str) -> list[str]:
    """At most one line, in brackets. It says when the settings of the section are refused, or what the term of the section does."""
    if section in SWITCHED:
        return [f"[{section}: refused if {SWITCHED[section].off_message.partition(';')[0]}]"]
    description = about(section.removeprefix("algorithm."))
    return [f"[{section}: {description}]"] if description else []


def to_yaml(config: Config) -> str:
    """The text of `config.yaml`. `load_config` reads an equal configuration from that text, but without secrets.

    Sections of losses and advantages that are not chosen are omitted: in a checked configuration they have only defaults."""
    return dump(config.model_dump(exclude={"algorithm": {*unread_sections(config.algorithm)}}))


def diff(old: Config, new: Config) -> dict[str, str]:
    """Dotted name -> `old -> new`, for every setting that differs, in the order of the schema, without secrets."""
    before, after = _flat(old), _flat(new)
    pairs = {name: (before.get(name), after.get(name)) for name in {**before, **after}}
    return {name: f"{one_line(a)} -> {one_line(b)}" for name, (a, b) in pairs.items() if a != b}


def refusal(name: str, settings: Mapping[str, Setting] = SETTINGS) -> str | None:
    """The reason why a resume may not change this setting, or None. `settings`: the settings of methods, by dotted name."""
    section = name.partition(".")[0]
    if name in settings:
        return _OBJECTIVE if settings[name].fixed else None
    if {name, section, name.rpartition(".")[0]} & FREE_ON_RESUME:
        return None
    return _REASONS.get(name) or _REASONS.get(section, _OBJECTIVE)


def check_resume(old: Config, new: Config) -> list[str]:
    """Compares the resolved configuration of a saved run with that of its resume. Returns one line per changed setting, except for
    `resume` itself. Errors: `ConfigError` that lists every refused change with the reason."""
    changes, method_settings = diff(old, new), settings_of(new.algorithm)
    reasons = {name: refusal(name, method_settings) for name in changes}
    refused = [f"  {name}: {changes[name]} ({reason})" for name, reason in reasons.items() if reason is not None]
    if refused:
        raise ConfigError(
            "this run cannot be resumed with a configuration that differs in:\n" + "\n".join(refused) + "\n"
            "set these to their old values, or start a new run under another run.name"
        )
    return [f"{name}: {change}" for name, change in changes.items() if name != "resume"]


def _flat(config: Config) -> dict[str, Any]:
    """Dotted name -> value of every setting, without secrets."""
    nested, values = config.model_dump(), {}
    for name in config_fields(type(config)):
        *sections, key = name.split(".")
        section = reduce(lambda tree, part: tree[part], sections, nested)
        # `model_dump` leaves secrets out.
        if key in section:
            values[name] = section[key]
    return values
