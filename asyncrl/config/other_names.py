"""What TRL, verl, OpenRLHF and the Hugging Face Trainer call our settings, where letters do not lead there."""

from __future__ import annotations

from collections.abc import Mapping

# Ours -> theirs: whole dotted names, or their last parts.
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
    "rollout.bad_words": "bad_words_ids",
    "rollout.logit_bias": "sequence_bias suppress_tokens",
    "rollout.max_staleness": "prefetch_depth async_level max_async_level max_off_policy_steps staleness_threshold",
    "rollout.weight_sync_interval": "trigger_parameter_sync_step",
    "rollout.filter.dynamic_sampling": "dynamic_sampling filter_groups.enable filter_groups",
    "algorithm.minibatches": "steps_per_generation ppo_mini_batch_size mini_batch_size",
    "algorithm.updates_per_batch": "num_iterations ppo_epochs",
    "algorithm.kl.coef": "beta kl_beta kl kl_coefficient kl_loss_coef use_kl_loss",
    "algorithm.kl.estimator": "kl_loss_type",
    "algorithm.clip.epsilon": "clip_ratio clip_range clip_ratio_low",
    "algorithm.clip.epsilon_high": "clip_ratio_high",
    "algorithm.clip.dual_clip": "clip_ratio_c",
    "algorithm.loss": "loss_type loss_agg_mode algo",
    "algorithm.advantage": "scale_rewards multi_objective_aggregation norm_adv_by_std_in_grpo adv_estimator",
    "algorithm.importance.mode": "importance_sampling_level vllm_importance_sampling_correction rollout_is",
    "algorithm.importance.cap": "vllm_importance_sampling_clip_max rollout_is_threshold",
    "algorithm.importance.floor": "vllm_importance_sampling_clip_min",
    "algorithm.mask.truncated": "mask_truncated_completions",
    "reward.functions": "reward_funcs reward_fn reward_file reward_weights custom_reward_function.path",
    "reward.overlong.cache": "overlong_cache overlong_buffer.len",
    "reward.overlong.weight": "overlong_buffer.penalty_factor",
    "model.path": "model_name model_name_or_path pretrained base_model model.name",
    "model.dtype": "torch_dtype bf16 fp16",
    "model.lora.rank": "lora_r peft use_peft",
    "model.lora.alpha": "lora_alpha",
    "data.train": "dataset dataset_name dataset_path prompt_data train_file train_files train_dataset data.path",
    "data.eval": "eval_dataset val_files test_file",
    "data.max_prompt_tokens": "max_prompt_length prompt_length prompt_max_len",
    "data.prompt_column": "prompt_key input_key",
    "data.template": "apply_chat_template",
    "evaluate.samples": "num_generations_eval val_kwargs.n",
    "evaluate.every": "eval_steps eval_interval eval_strategy test_freq",
    "checkpoint.every": "save_steps save_every save_interval checkpoint_interval save_freq",
    "checkpoint.keep": "save_total_limit max_actor_ckpt_to_keep",
    "resume": "resume_from_checkpoint resume_mode",
    "run.dir": "output_dir save_path ckpt_path default_local_dir",
    "run.name": "experiment_name",
    "telemetry.rollouts_per_step": "log_completions num_completions_to_print",
    "telemetry.sinks": "report_to logger wandb",
    "generation.engine": "use_vllm rollout.name",
    "generation.placement": "vllm_mode",
    "engine.kv_positions": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "engine.max_sequences": "max_num_seqs",
    "engine.prefill_tokens": "max_num_batched_tokens",
    "distributed.sharding": "fsdp strategy",
}
OTHER_NAMES: Mapping[str, str] = {theirs: ours for ours, names in _THEIRS.items() for theirs in names.split()}
PARALLEL = (
    "no engine is cut over devices or processes (tensor, pipeline, expert and data parallelism of vLLM): each worker has the whole "
    "model on one device; generation.workers, generation.devices and more ranks give more of them, which share the requests"
)
