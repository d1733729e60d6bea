"""Whole steps of TRL's `GRPOTrainer`. Runs inside TRL's own environment: `python trl_step.py JOB.json`.

Prints one JSON line at the end. It must not import asyncrl, and no file beside it may be named like a package.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import side
import torch
import transformers
import trl
from datasets import Dataset
from letter_reward import vowel_share  # the folder of this script is the first on sys.path
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Times of the beginning of training and of the end of every optimizer step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.times.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.append(time.perf_counter())
        print(f"step {len(self.times) - 1}: {self.times[-1] - self.times[-2]:.1f} s", file=sys.stderr, flush=True)


def settings(job: dict[str, Any], directory: str) -> GRPOConfig:
    sequences = job["groups_per_step"] * job["group_size"]
    microbatch = min(job["microbatch"], sequences)
    if sequences % microbatch:
        raise SystemExit(f"{sequences} sequences are no multiple of the microbatch of {microbatch}")
    fixed = {"min_new_tokens": job["max_tokens"]} if job["lengths"] == "fixed" else None
    return GRPOConfig(
        output_dir=directory,
        use_cpu=job["device"] == "cpu",
        bf16=job["dtype"] == "bfloat16",
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=sequences // microbatch,
        num_generations=job["group_size"],
        max_completion_length=job["max_tokens"],
        generation_kwargs=fixed,
        max_steps=job["warmup_steps"] + job["steps"],
        num_iterations=1,
        beta=0.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        loss_type="grpo",
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        gradient_checkpointing=job["gradient_checkpointing"],
        shuffle_dataset=False,
        seed=job["seed"],
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def main() -> None:
    job = side.job()
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    weights = "float32" if job["float32_masters"] else job["dtype"]  # Trainer's `bf16=True` is autocast in either case
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, weights))
    rows = [json.loads(line) for line in Path(job["prompts"]).read_text(encoding="utf-8").splitlines()]
    sampled: list[int] = []  # tokens of each generation batch, which is one step
    prompt_tokens: list[int] = []  # tokens of its prompts, once per group

    def reward(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float | None]:
        sampled.append(sum(len(ids) for ids in completion_ids))
        groups = prompts[:: job["group_size"]]
        rendered = (tokenizer.apply_chat_template(g, add_generation_prompt=True, tokenize=False) for g in groups)
        prompt_tokens.append(sum(len(tokenizer(text, add_special_tokens=False).input_ids) for text in rendered))
        return vowel_share(completions)  # type: ignore[no-any-return]

    clock = Clock()
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[reward],
        args=settings(job, str(Path(sys.argv[1]).parent / "trl")),
        train_dataset=Dataset.from_list(rows),
        callbacks=[clock],
    )
    trainer.train()
    answer(job, clock, sampled, prompt_tokens)


def answer(job: dict[str, Any], clock: Clock, sampled: list[int], prompt_tokens: list[int]) -> None:
    """`sampled`, `prompt_tokens`: of each step, the warm-up included."""
    first, last = job["warmup_steps"], job["warmup_steps"] + job["steps"]
    if len(sampled) != last or len(clock.times) != last + 1:
        raise SystemExit(f"asked for {last} steps, saw {len(clock.times) - 1} with {len(sampled)} generations")
    result = {
        "seconds": clock.times[last] - clock.times[first],
        "step_seconds": [clock.times[i + 1] - clock.times[i] for i in range(first, last)],
        "steps": job["steps"],
        "sampled_tokens": sum(sampled[first:]),
        "generated_tokens": sum(sampled[first:]),
        "prompt_tokens": sum(prompt_tokens[first:]),
        "sequences": job["steps"] * job["groups_per_step"] * job["group_size"],
        "peak_bytes": side.peak_bytes(job["device"]),
        "shares": {},
        "versions": {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }
    side.answer(result)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
