"""What TRL's GRPOConfig, verl and the Hugging Face Trainer call our knobs, where no word of the name says so; and what they
have that is not here."""

from __future__ import annotations

from collections.abc import Mapping

# Whole dotted name, or its last part -> ours
OTHER_NAMES: Mapping[str, str] = {
    "learning_rate": "train.lr",
    "num_generations": "rollout.group_size",
    "n": "rollout.group_size",
    "batch_size": "rollout.groups_per_step",
    "train_batch_size": "rollout.groups_per_step",
    "per_device_train_batch_size": "rollout.groups_per_step",
    "gradient_accumulation_steps": "train.tokens_per_microbatch",
    "micro_batch_size": "train.tokens_per_microbatch",
    "ppo_micro_batch_size_per_gpu": "train.tokens_per_microbatch",
    "ppo_max_token_len_per_gpu": "train.tokens_per_microbatch",
    "max_completion_length": "rollout.max_tokens",
    "max_response_length": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "beta": "algorithm.kl.coef",
    "kl_loss_coef": "algorithm.kl.coef",
    "clip_ratio": "algorithm.clip.epsilon",
    "clip_ratio_low": "algorithm.clip.epsilon",
    "clip_ratio_high": "algorithm.clip.epsilon_high",
    "clip_ratio_c": "algorithm.clip.dual_clip",
    "loss_agg_mode": "algorithm.loss",
    "scale_rewards": "algorithm.advantage",
    "adv_estimator": "algorithm.advantage",
    "importance_sampling_level": "algorithm.importance.mode",
    "num_iterations": "algorithm.updates_per_batch",
    "ppo_epochs": "algorithm.updates_per_batch",
    "lr_scheduler_type": "train.schedule",
    "max_grad_norm": "train.grad_clip",
    "adam_epsilon": "train.eps",
    "total_training_steps": "train.max_steps",
    "steps": "train.max_steps",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "model_name_or_path": "model.path",
    "model.name": "model.path",
    "lora_r": "model.lora.rank",
    "dataset_name": "data.train",
    "train_file": "data.train",
    "train_files": "data.train",
    "train_dataset": "data.train",
    "data.path": "data.train",
    "eval_dataset": "data.eval",
    "val_files": "data.eval",
    "val_batch_size": "evaluate.limit",
    "prompt_key": "data.prompt_column",
    "reward_funcs": "reward.functions",
    "reward_weights": "reward.functions",
    "custom_reward_function.path": "reward.functions",
    "eval_steps": "evaluate.every",
    "test_freq": "evaluate.every",
    "save_steps": "checkpoint.every",
    "save_every": "checkpoint.every",
    "save_freq": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "max_actor_ckpt_to_keep": "checkpoint.keep",
    "resume_from_checkpoint": "resume",
    "resume_mode": "resume",
    "output_dir": "run.dir",
    "default_local_dir": "run.dir",
    "experiment_name": "run.name",
    "report_to": "telemetry.sinks",
    "logger": "telemetry.sinks",
    "wandb": "telemetry.sinks",
    "fsdp": "distributed.sharding",
    "strategy": "distributed.sharding",
}

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
