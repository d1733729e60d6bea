"""A flat table of the settings, made from pydantic's JSON schema: dotted name -> types, default and description.

Loading, `--help`, the diff of two configurations and "did you mean" read this table.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any

from .methods import SETTINGS
from .schema import Config

_WORDS = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "null": "null",
    "object": "a mapping",
}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
# Error text for a setting such as `pipeline_parallel_size`, which splits an engine in a way that does not exist here.
SPLIT_ENGINE_MESSAGE = (
    "an engine cannot be split by pipeline, expert or data parallelism of vLLM; to use more devices, set "
    "generation.tensor_parallel, or generation.workers and generation.devices, or start more ranks"
)
# Setting -> its names in TRL, verl and others, if those are spelled too differently to be found by similarity. A name is given
# in full or without its leading sections.
_FOREIGN_NAMES: Mapping[str, str] = {
    "train.lr": "learning_rate actor_learning_rate",
    "train.schedule": "lr_scheduler_type",
    "train.warmup_steps": "warmup_ratio",
    "train.grad_clip": "max_grad_norm clip_grad_norm",
    "train.beta1": "adam_beta1",
    "train.beta2": "adam_beta2",
    "train.eps": "adam_epsilon",
    "train.max_steps": "total_steps total_training_steps steps",
    "train.max_epochs": "epochs num_train_epochs total_epochs",
    "train.tokens_per_microbatch": "gradient_accumulation_steps micro_batch_size ppo_micro_batch_size_per_gpu "
    "ppo_max_token_len_per_gpu",
    "rollout.group_size": "num_generations n n_samples_per_prompt",
    "rollout.groups_per_step": "batch_size prompts_per_batch train_batch_size per_device_train_batch_size "
    "generation_batch_size rollout_batch_size",
    "rollout.max_tokens": "max_completion_length max_response_length max_new_tokens max_length max_seq_length max_seq_len "
    "generate_max_len max_model_len",
    "rollout.max_turns": "max_tool_calling_iterations max_steps_per_episode max_num_turns max_assistant_turns",
    "rollout.min_tokens": "min_new_tokens min_length",
    "rollout.max_staleness": "prefetch_depth async_level max_async_level max_off_policy_steps staleness_threshold",
    "rollout.filter.dynamic_sampling": "dynamic_sampling filter_groups.enable filter_groups",
    "algorithm.minibatches": "steps_per_generation ppo_mini_batch_size mini_batch_size",
    "algorithm.updates_per_batch": "num_iterations ppo_epochs",
    "algorithm.kl.coef": "beta kl_beta kl kl_coefficient kl_loss_coef use_kl_loss",
    "algorithm.kl.estimator": "kl_loss_type",
    "algorithm.clip.epsilon": "clip_ratio clip_range clip_ratio_low",
    "algorithm.clip.epsilon_high": "clip_ratio_high",
    "algorithm.loss": "loss_type loss_agg_mode algo",
    "algorithm.advantage": "scale_rewards multi_objective_aggregation norm_adv_by_std_in_grpo adv_estimator",
    "algorithm.importance.mode": "importance_sampling_level vllm_importance_sampling_correction rollout_is",
    "algorithm.importance.cap": "vllm_importance_sampling_clip_max rollout_is_threshold",
    "algorithm.mask.truncated": "mask_truncated_completions",
    "reward.functions": "reward_funcs reward_fn reward_file reward_weights custom_reward_function.path",
    "reward.overlong.cache": "overlong_cache overlong_buffer.len",
    "model.path": "model_name model_name_or_path pretrained base_model model.name",
    "model.dtype": "torch_dtype bf16 fp16",
    "model.lora.rank": "lora_r peft use_peft",
    "model.lora.alpha": "lora_alpha",
    "data.train": "dataset dataset_name dataset_path prompt_data train_file train_files train_dataset data.path",
    "data.eval": "eval_dataset val_files test_file",
    "data.max_prompt_tokens": "max_prompt_length prompt_length prompt_max_len",
    "data.prompt_column": "prompt_key",
    "evaluate.samples": "num_generations_eval val_kwargs.n",
    "evaluate.every": "eval_steps eval_interval eval_strategy test_freq",
    "checkpoint.every": "save_steps save_every save_interval checkpoint_interval save_freq",
    "checkpoint.keep": "save_total_limit",
    "resume": "resume_from_checkpoint resume_mode",
    "run.dir": "output_dir save_path ckpt_path default_local_dir",
    "run.name": "experiment_name",
    "telemetry.rollouts_per_step": "log_completions",
    "telemetry.sinks": "report_to logger wandb",
    "generation.engine": "use_vllm rollout.name",
    "generation.tensor_parallel": "tensor_parallel_size vllm_tensor_parallel_size tensor_model_parallel_size gen_tp",
    "generation.placement": "vllm_mode",
    "engine.kv_positions": "gpu_memory_utilization vllm_gpu_memory_utilization",
}
OTHER_NAMES: Mapping[str, str] = {name: setting for setting, names in _FOREIGN_NAMES.items() for name in names.split()}
# The lowest `difflib` ratio at which a name is suggested.
_MIN_SIMILARITY = 0.75


@dataclass(frozen=True, slots=True)
class ConfigField:
    """A setting as the schema declares it."""

    name: str
    default: Any
    text: str
    # One JSON schema per allowed type.
    types: tuple[Mapping[str, Any], ...]
    # The fields of one section, if the setting is a list of sections.
    items: Mapping[str, ConfigField] = field(default_factory=dict)
    secret: bool = False

    def takes(self, kind: str) -> bool:
        """Whether values of this JSON type (`integer`, `string`, ...) are allowed. False if only fixed choices are allowed."""
        return any(schema.get("type") == kind and not _choices(schema) for schema in self.types)

    @property
    def takes_texts(self) -> bool:
        """Whether the setting may be a list of arbitrary strings."""
        item_schemas = (schema.get("items", {}) for schema in self.types)
        return any(item.get("type") == "string" and "enum" not in item for item in item_schemas)

    @property
    def choices(self) -> list[Any]:
        """The allowed values of a setting with fixed choices; empty for other settings."""
        return [value for schema in self.types for value in _choices(schema)]

    @property
    def expected(self) -> str:
        """The allowed types and bounds in words, for `--help` and errors."""
        if self.items:
            return f"a list of {{{', '.join(self.items)}}}"
        return " or ".join(map(_in_words, self.types))


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    return list(schema.get("enum", [schema["const"]] if "const" in schema else []))


def _in_words(schema: Mapping[str, Any]) -> str:
    if choices := _choices(schema):
        return "one of " + ", ".join(map(str, choices))
    if "anyOf" in schema:
        return " or ".join(map(_in_words, schema["anyOf"]))
    if schema["type"] == "array":
        return "a list, each item " + _in_words(schema["items"])
    bounds = " and ".join(f"{sign} {schema[bound]}" for bound, sign in _BOUNDS.items() if bound in schema)
    return f"{_WORDS[schema['type']]} {bounds}".rstrip()


@cache
def config_fields(schema: type[Config] = Config) -> Mapping[str, ConfigField]:
    """Dotted name -> setting, in the order of the schema."""
    root = schema.model_json_schema()
    return {field.name: field for field in _walk(root, "", root["$defs"])}


def _walk(section: Mapping[str, Any], prefix: str, definitions: Mapping[str, Any]) -> Iterator[ConfigField]:
    for key, entry in section["properties"].items():
        if "$ref" in entry:
            yield from _walk(_dereferenced(entry, definitions), f"{prefix}{key}.", definitions)
            continue
        item = _dereferenced(entry.get("items", {}), definitions)
        items = {field.name: field for field in _walk(item, "", definitions)} if "properties" in item else {}
        types = tuple(entry.get("anyOf", [entry]))
        text, secret = entry.get("description", ""), entry.get("writeOnly", False)
        yield ConfigField(f"{prefix}{key}", entry.get("default"), text, types, items, secret)


def _dereferenced(entry: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    schema: Mapping[str, Any] = definitions[entry["$ref"].rpartition("/")[2]] if "$ref" in entry else entry
    return schema


def sections(schema: type[Config] = Config) -> frozenset[str]:
    """The dotted names of all sections, such as `train` and `model.lora`."""
    return frozenset(name.rpartition(".")[0] for name in config_fields(schema)) - {""}


@cache
def _aliases() -> Mapping[str, str]:
    return {**{setting.flat: dotted for dotted, setting in SETTINGS.items()}, **OTHER_NAMES}


def other_name(name: str) -> str | None:
    """The setting that TRL, verl or `build_loss` calls `name`, or None. Unknown sections in front of the name are ignored."""
    return next((_aliases()[tail] for tail in _tails(name) if tail in _aliases()), None)


def nearest_name(name: str, schema: type[Config] = Config) -> str | None:
    """The dotted name that the user most likely meant by `name`, or None if no name is similar enough.

    Names from other code bases are looked up first. Then the most similar spelling is taken.
    """
    if (setting := other_name(name)) is not None:
        return setting
    # Reversed, so that the first section wins if several have a setting of this name.
    last_parts = {full.rpartition(".")[2]: full for full in reversed([*config_fields(schema)])}
    names = {**last_parts, **_aliases(), **{full: full for full in (*sections(schema), *config_fields(schema))}}
    matches = (difflib.get_close_matches(tail, names, n=1, cutoff=_MIN_SIMILARITY) for tail in _tails(name))
    return next((names[match[0]] for match in matches if match), None)


def _tails(name: str) -> list[str]:
    """`a.b.c` -> `a.b.c`, `b.c`, `c`."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def get(config: Config, name: str) -> Any:
    """The value of the setting with this dotted name."""
    return reduce(getattr, name.split("."), config)
