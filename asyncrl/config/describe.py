"""The configuration as text: the schema for `--help`, `config.yaml`, the diff of two, and what a resume may change."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from asyncrl.algorithms.method import Setting
from asyncrl.errors import ConfigError

from .check_unread import SWITCHED
from .fields import Knob, get, item_of, knobs
from .methods import SETTINGS, about, settings_of, unread
from .resolve import PRESETS
from .schema import Config
from .text import dump

# What may change when a run goes on, and what would make the saved state wrong. A setting of a method says it itself (`fixed`);
# every other knob matches exactly one pattern of the two tables (a test holds it so); the reason is what the refusal says.
# A sharded state is read as a whole, however it was cut when it was written.
_FREE = (
    "run.* resume checkpoint.* telemetry.* watchdog.* evaluate.* distributed.sharding dry_run.* threads "
    "model.device model.head_kernel data.eval reward.workers reward.concurrency reward.timeout_s reward.retries "
    "reward.on_error reward.worker_max_mib reward.worker_max_calls reward.batch reward.overlong.* rollout.late "
    "rollout.sync_warmup_steps rollout.filter.* rollout.streaming_min_groups rollout.temperature rollout.top_p "
    "rollout.top_k rollout.min_p rollout.repetition_penalty rollout.presence_penalty rollout.frequency_penalty "
    "rollout.logit_bias rollout.bad_words rollout.min_tokens rollout.max_tokens rollout.stop "
    "rollout.stop_token_ids rollout.ignore_eos rollout.max_failed_groups rollout.retries rollout.timeout_s "
    "door.* replay.* reroll.* engine.max_sequences engine.kv_positions engine.prefill_tokens "
    "engine.kv_after_update generation.* algorithm.mismatch_gate train.lr train.schedule train.warmup_steps "
    "train.min_lr_ratio train.weight_decay train.decay_norms_and_biases train.eps train.grad_clip "
    "train.tokens_per_microbatch train.gradient_checkpointing train.skip_zero_advantage train.max_steps "
    "train.max_epochs train.time_limit_s train.partial_final_step"
)
FREE_ON_RESUME: tuple[str, ...] = tuple(_FREE.split())
_ROWS = "group ids and the saved place in the prompts would name other rows"
_WEIGHTS = "the saved weights and optimizer state belong to the old value"
_LEDGER = "the saved counts of groups, turns and versions belong to the old value"
_CURVE = "the run would go on with another objective under the same name; start a new run from the checkpoint instead"
_REFUSED: Mapping[str, str] = {
    "all randomness is keyed by it": "seed",
    _LEDGER: "preset rollout.group_size rollout.groups_per_step rollout.max_staleness "
    "rollout.weight_sync_interval rollout.streaming algorithm.updates_per_batch algorithm.minibatches",
    _WEIGHTS: "model.path model.gguf_file model.tokenizer model.dtype model.random_init model.lora.rank "
    "model.lora.alpha model.lora.target_modules model.lora.target_parameters model.lora.dropout "
    "engine.kind train.kind train.beta1 train.beta2",
    _ROWS: "data.train data.prompt_column data.system_prompt data.template data.chat_template_kwargs "
    "data.control_tokens data.date data.max_prompt_tokens data.overlong data.shuffle",
    _CURVE: "reward.functions reward.model reward.scale_adv_by_len reward.text.special_tokens reward.text.stop "
    "reward.text.opened hooks rollout.environment algorithm.loss algorithm.advantage "
    "algorithm.old_logprobs algorithm.force_on_policy algorithm.router_replay",
}  # fmt: skip
REFUSED_ON_RESUME: Mapping[str, str] = {name: why for why, names in _REFUSED.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class Change:
    """One knob that differs between two configurations."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name}: {short(self.old)} -> {short(self.new)}"


def help_text() -> str:
    """The schema: dotted name, type, default and sentence of every knob, and the presets."""
    lines = ["Configuration keys. In a YAML file they are nested; on the command line: a.b=value or --a.b value.", ""]
    section = ""
    for knob in knobs().values():
        head = knob.name.rpartition(".")[0]
        if head != section:
            section = head
            lines += ["", *_heading(head)]
        default = "required" if knob.default is PydanticUndefined else f"default {short(knob.default)}"
        lines.append(f"{knob.name}  ({knob.expected}; {default})")
        lines += textwrap.wrap(knob.text, 110, initial_indent="    ", subsequent_indent="    ")
        if (item := item_of(knob)) is not None:
            for name, info in item.model_fields.items():
                lines.append(f"      {name}: {info.description}")
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


def to_plain(config: BaseModel) -> dict[str, Any]:
    """Dictionaries, lists and scalars alone, for YAML and JSON, without secrets; `Config.model_validate` reads it back."""
    fields = type(config).model_fields
    return {key: _plain(value) for key, value in config if not fields[key].exclude}


def to_yaml(config: Config) -> str:
    """The text of `config.yaml`; `load_config` reads an equal configuration from it. Settings of losses and advantages that
    are not chosen are left out: a checked configuration has their defaults."""
    plain = to_plain(config)
    for section in unread(config.algorithm):
        del plain["algorithm"][section]
    return dump(plain)


def diff(old: Config, new: Config) -> list[Change]:
    """Every knob that differs, in the order of the schema, without secrets."""
    known = {**knobs(type(old)), **knobs(type(new))}.values()  # only one may have the settings of a loss of the user's
    return [Change(k.name, a, b) for k in known if not k.secret and (a := _value(old, k)) != (b := _value(new, k))]


def refusal(name: str, settings: Mapping[str, Setting] = SETTINGS) -> str | None:
    """Why this knob may not change on resume; None where it may. A knob in neither table is refused."""
    if name in settings:
        return _CURVE if settings[name].fixed else None
    if any(fnmatchcase(name, pattern) for pattern in FREE_ON_RESUME):
        return None
    return REFUSED_ON_RESUME.get(name, "nobody has said that it may change")


def check_resume(old: Config, new: Config) -> list[str]:
    """Lines of the diff between the run's resolved configuration and the one it goes on with, both resolved.

    `resume` itself, which always differs, is left out.
    Errors: `ConfigError` that lists every change that would make the saved state wrong, with the reason.
    """
    changes = diff(old, new)
    known = settings_of(new.algorithm)
    refused = [f"  {change} ({reason})" for change in changes if (reason := refusal(change.name, known)) is not None]
    if refused:
        raise ConfigError(
            "this run cannot be resumed with a configuration that differs in:\n" + "\n".join(refused) + "\n"
            "put these back, or start a run under another run.name"
        )
    return [str(change) for change in changes if change.name != "resume"]


def _value(config: Config, knob: Knob) -> Any:
    return get(config, knob.name) if knob.name in knobs(type(config)) else None


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return to_plain(value)
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def short(value: Any) -> str:
    """A value of a setting in one line, as YAML has it."""
    if isinstance(value, (tuple, list)) and not any(isinstance(item, BaseModel) for item in value):
        return f"[{', '.join(map(short, value))}]"
    return dump(_plain(value)).removesuffix("\n").removesuffix("\n...").replace("\n", "; ")
