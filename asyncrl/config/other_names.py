"""What TRL's GRPOConfig, verl, OpenRLHF and the Hugging Face Trainer call our knobs, where the words of the name do not say so; and
what they have that is not here."""

from __future__ import annotations

from collections.abc import Mapping

# Ours -> theirs: whole dotted names, or their last parts
_THEIRS: Mapping[str, str] = {
    "train.lr": "learning_rate actor_learning_rate",
    "rollout.group_size": "num_generations n n_samples_per_prompt",
    "rollout.groups_per_step": "batch_size prompts_per_batch train_batch_size per_device_train_batch_size generation_batch_size "
    "global_batch_size rollout_batch_size",
    "algorithm.minibatches": "steps_per_generation mini_batch_size ppo_mini_batch_size",
    "train.tokens_per_microbatch": "gradient_accumulation_steps micro_batch_size ppo_micro_batch_size_per_gpu "
    "ppo_max_token_len_per_gpu micro_train_batch_size",
    "rollout.max_tokens": "max_completion_length max_response_length max_new_tokens max_length max_seq_length response_length "
    "generate_max_len max_model_len max_seq_len vllm_max_model_length",
    "data.max_prompt_tokens": "prompt_length max_prompt_length prompt_max_len",
    "rollout.min_tokens": "min_new_tokens min_length",
    "rollout.logit_bias": "sequence_bias suppress_tokens",
    "rollout.bad_words": "bad_words_ids",
    "data.overlong": "truncation",
    "algorithm.kl.coef": "beta kl_beta kl kl_loss_coef use_kl_loss",
    "algorithm.kl.estimator": "kl_loss_type",
    "algorithm.clip.epsilon": "clip_ratio clip_range clip_ratio_low",
    "algorithm.clip.epsilon_high": "clip_ratio_high",
    "algorithm.clip.dual_clip": "clip_ratio_c",
    "algorithm.loss": "loss_agg_mode algo",
    "algorithm.advantage": "scale_rewards multi_objective_aggregation norm_adv_by_std_in_grpo adv_estimator",
    "algorithm.importance.mode": "importance_sampling_level vllm_importance_sampling_correction rollout_is",
    "algorithm.importance.cap": "vllm_importance_sampling_clip_max rollout_is_threshold",
    "algorithm.importance.floor": "vllm_importance_sampling_clip_min",
    "rollout.filter.dynamic_sampling": "filter_groups.enable filter_groups",
    "reward.overlong.cache": "overlong_buffer.len",
    "reward.overlong.weight": "overlong_buffer.penalty_factor",
    "algorithm.updates_per_batch": "num_iterations ppo_epochs",
    "train.schedule": "lr_scheduler_type",
    "train.grad_clip": "max_grad_norm",
    "train.eps": "adam_epsilon",
    "train.max_steps": "total_steps total_training_steps steps",
    "model.dtype": "bf16 fp16",
    "model.path": "model_name model_name_or_path pretrained base_model model.name",
    "model.lora.rank": "lora_r peft use_peft",
    "data.train": "dataset dataset_name dataset_path dataset_split prompt_data train_file train_files train_dataset "
    "data.path",
    "data.eval": "eval_dataset val_files test_file",
    "evaluate.samples": "num_generations_eval val_kwargs.n",
    "evaluate.limit": "val_batch_size",
    "data.prompt_column": "prompt_key input_key",
    "data.template": "apply_chat_template",
    "reward.text.special_tokens": "skip_special_tokens",
    "reward.text.stop": "include_stop_str_in_output",
    "reward.functions": "reward_funcs reward_fn reward_file reward_weights custom_reward_function.path",
    "evaluate.every": "eval_steps eval_interval eval_strategy evaluation_strategy val_before_train test_freq",
    "checkpoint.every": "save_steps save_every save_interval checkpoint_interval save_freq",
    "checkpoint.keep": "save_total_limit max_actor_ckpt_to_keep",
    "resume": "resume_from_checkpoint resume_mode",
    "run.dir": "save_path ckpt_path output_dir default_local_dir",
    "run.name": "experiment_name",
    "telemetry.rollouts_per_step": "log_completions num_completions_to_print",
    "generation.engine": "use_vllm rollout.name",
    "generation.placement": "vllm_mode",
    "rollout.max_staleness": "async_level max_async_level max_off_policy_steps staleness_threshold",
    "rollout.weight_sync_interval": "trigger_parameter_sync_step",
    "engine.kv_positions": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "engine.max_sequences": "max_num_seqs",
    "engine.prefill_tokens": "max_num_batched_tokens",
    "telemetry.sinks": "report_to logger wandb",
    "distributed.sharding": "fsdp strategy",
}  # fmt: skip
OTHER_NAMES: Mapping[str, str] = {theirs: ours for ours, names in _THEIRS.items() for theirs in names.split()}

# Names of theirs for what there is none of here, and whose words would find something else.
_NOT_HERE = (
    "cache_implementation deepspeed disable_dropout generation_kwargs label_key lam log_multimodal "
    "logging_steps model_init_kwargs num_rollouts partial_rollout per_device_eval_batch_size ref_model "
    "ref_model_mixup_alpha ref_model_sync_steps reference_model reward_fn_key reward_manager sync_ref_model "
    "vllm_model_impl"
)
NOT_HERE = frozenset(_NOT_HERE.split())

PARALLEL = (
    "no engine is cut over devices or processes (tensor, pipeline, expert and data parallelism of vLLM): each worker has the whole "
    "model on one device; generation.workers, generation.devices and more ranks give more of them, which share the requests"
)
# Last part of a name of what there is nothing of here -> what works in its place.
ABSENT: Mapping[str, str] = dict.fromkeys(
    (
        "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "expert_parallel_size",
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
        "vllm_tensor_parallel_size", "enable_expert_parallel",
    ),
    PARALLEL,
)  # fmt: skip


def other_name(name: str) -> str | None:
    """Our name for a knob of another code base: by the whole of its name, or by its last parts; None for one that is not known."""
    parts = name.split(".")
    tails = (".".join(parts[start:]) for start in range(len(parts)))
    return next((OTHER_NAMES[tail] for tail in tails if tail in OTHER_NAMES), None)
