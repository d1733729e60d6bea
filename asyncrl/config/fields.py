"""The settings as a flat table, made of pydantic's JSON schema: each under its dotted name, with its types, default and sentence.

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
PARALLEL = (
    "no engine is cut over devices or processes (tensor, pipeline, expert and data parallelism of vLLM): each worker has the whole "
    "model on one device; generation.workers, generation.devices and more ranks give more of them, which share the requests"
)
# Ours -> what TRL, verl and others call it, where letters do not lead there: whole dotted names, or their last parts.
_THEIRS: Mapping[str, str] = {
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
    "generation.placement": "vllm_mode",
    "engine.kv_positions": "gpu_memory_utilization vllm_gpu_memory_utilization",
}
OTHER_NAMES: Mapping[str, str] = {theirs: ours for ours, names in _THEIRS.items() for theirs in names.split()}
# Of letters: from here on a name is suggested.
_SIMILAR = 0.75


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting as the schema declares it."""

    name: str
    default: Any
    text: str
    # A JSON schema for each type that it may have.
    types: tuple[Mapping[str, Any], ...]
    # Where it is a list of sections: the fields of one.
    items: Mapping[str, Knob] = field(default_factory=dict)

    def takes(self, kind: str) -> bool:
        """Whether every value of this JSON type is allowed."""
        return any(each.get("type") == kind and not _choices(each) for each in self.types)

    @property
    def takes_texts(self) -> bool:
        """Whether it may be a list of any texts."""
        return any(each.get("items", {}).get("type") == "string" and "enum" not in each["items"] for each in self.types)

    @property
    def choices(self) -> list[Any]:
        """The values of which it must be one, where there are such."""
        return [value for each in self.types for value in _choices(each)]

    @property
    def expected(self) -> str:
        """Types and bounds in words."""
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
def knobs(schema: type[Config] = Config) -> Mapping[str, Knob]:
    """Every setting by its dotted name, in the order of the schema."""
    whole = schema.model_json_schema()
    return {knob.name: knob for knob in _walk(whole, "", whole["$defs"])}


def _walk(section: Mapping[str, Any], prefix: str, named: Mapping[str, Any]) -> Iterator[Knob]:
    for key, about in section["properties"].items():
        if "$ref" in about:
            yield from _walk(_referred(about, named), f"{prefix}{key}.", named)
            continue
        item = _referred(about.get("items", {}), named)
        items = {each.name: each for each in _walk(item, "", named)} if "properties" in item else {}
        types = tuple(about.get("anyOf", [about]))
        yield Knob(f"{prefix}{key}", about.get("default"), about.get("description", ""), types, items)


def _referred(about: Mapping[str, Any], named: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = named[about["$ref"].rpartition("/")[2]] if "$ref" in about else about
    return found


@cache
def sections(schema: type[Config] = Config) -> frozenset[str]:
    """Every section by its dotted name: `train`, `model.lora`."""
    return frozenset(name.rpartition(".")[0] for name in knobs(schema)) - {""}


@cache
def _theirs() -> Mapping[str, str]:
    return {**{each.flat: dotted for dotted, each in SETTINGS.items()}, **OTHER_NAMES}


def other_name(name: str) -> str | None:
    """What the setting is called here that goes by `name`, or by its last parts, in another code base or in a call of
    `build_loss`."""
    return next((_theirs()[tail] for tail in _tails(name) if tail in _theirs()), None)


def nearest_name(name: str, schema: type[Config] = Config) -> str | None:
    """The dotted name that was most likely meant by `name`, or None where nothing is similar.

    What others call a setting is looked up; else letters decide.
    """
    if (found := other_name(name)) is not None:
        return found
    # The first section that has a setting of this name has it.
    last = {full.rpartition(".")[2]: full for full in reversed([*knobs(schema)])}
    names = {**last, **_theirs(), **{full: full for full in (*sections(schema), *knobs(schema))}}
    near = (difflib.get_close_matches(tail, names, n=1, cutoff=_SIMILAR) for tail in _tails(name))
    return next((names[each[0]] for each in near if each), None)


def _tails(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def get(config: Config, name: str) -> Any:
    """The value of a dotted name."""
    return reduce(getattr, name.split("."), config)
