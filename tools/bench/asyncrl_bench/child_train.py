"""`child.py train`: steps of the real `TorchTrainer` over packed groups, and where the time of one more goes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM

from asyncrl.algorithms.registry import build_loss
from asyncrl.config.schema import TrainConfig
from asyncrl.data.packing import pack_groups
from asyncrl.models.paths import PACKED
from asyncrl.models.policy import PolicyModel
from asyncrl.training.trainer import TorchTrainer
from asyncrl.types import FinishReason, Group, Int32Array, Prompt, Ticket, Trajectory

from .job import TrainJob
from .machine import gemm_rate, versions
from .peers.side import peak_bytes

SHORTEST = 4
_GEMM_SECONDS = 0.5  # before every step: the rate of a busy machine moves
_FINISH = "bench: optimizer"
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::linear", "mkldnn::_linear_pointwise", "mkl::_mkl_linear")
_ATTENTION = ("attention", "aten::bmm", "aten::baddbmm")
PARTS = ("products", "head", "attention", "elementwise", "optimizer", "rest")


def completion_lengths(job: TrainJob) -> list[int]:
    """As completions of a model that ends by itself: geometric with the job's mean, cut to [4, max_tokens]."""
    lengths = np.random.default_rng(job.seed).geometric(1 / job.mean_tokens, job.groups * job.group_size)
    drawn: list[int] = np.clip(lengths, min(SHORTEST, job.max_tokens), job.max_tokens).tolist()
    return drawn


def make_groups(job: TrainJob, vocabulary: int) -> list[tuple[Group, Sequence[float]]]:
    """Random tokens under the policy's version 0, with advantages from -1 to 1."""
    draw = np.random.default_rng(job.seed + 1)
    lengths = completion_lengths(job)
    groups: list[tuple[Group, Sequence[float]]] = []
    for number in range(job.groups):
        prompt = draw.integers(0, vocabulary, max(job.prompt_tokens + int(draw.integers(-3, 3)), 1)).astype(np.int32)
        own = lengths[number * job.group_size : (number + 1) * job.group_size]
        members = [
            _trajectory(number, member, job.group_size, prompt, draw.integers(0, vocabulary, size).astype(np.int32))
            for member, size in enumerate(own)
        ]
        group = Group(Ticket(number, 0, 0), Prompt(number, prompt, ""), tuple(members))
        groups.append((group, np.linspace(-1, 1, job.group_size).tolist()))
    return groups


def _trajectory(group: int, member: int, size: int, prompt: Int32Array, completion: Int32Array) -> Trajectory:
    tokens = np.concatenate([prompt, completion])
    mask = np.arange(tokens.size) >= prompt.size
    logprobs = np.where(mask, np.float32(-1), np.float32(0))
    return Trajectory(
        group_id=group,
        member=member,
        group_size=size,
        prompt_length=prompt.size,
        tokens=tokens,
        mask=mask,
        logprobs=logprobs,
        sampled_logprobs=logprobs,
        versions=np.where(mask, 0, -1).astype(np.int32),
        temperature=1.0,
        finish_reason=FinishReason.LENGTH,
    )


class Steps:
    """The trainer, its microbatches, and one whole optimizer step over them."""

    def __init__(self, job: TrainJob) -> None:
        torch.set_num_threads(job.threads)
        module = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
        self.policy = PolicyModel(module, job.dtype, path=PACKED if job.packed else None)
        config = TrainConfig(lr=job.lr)
        self.trainer = TorchTrainer(self.policy, config, max_completion_length=job.max_tokens)
        self.vocabulary = self.policy.head.out_features
        budget = job.tokens_per_microbatch or config.tokens_per_microbatch
        self.batches = pack_groups(make_groups(job, self.vocabulary), budget)
        self.loss = build_loss("grpo")

    def step(self) -> None:
        with record_function(_FINISH):  # zeroing the gradient belongs to it
            self.trainer.begin_train_step(self.loss)
        for batch in self.batches:
            self.trainer.train_microbatch(batch)
        with record_function(_FINISH):
            self.trainer.finish_train_step()

    def sizes(self, job: TrainJob) -> dict[str, Any]:
        """Tokens are the job's, not those that this packing runs: what a prompt costs twice is not needed twice."""
        head = self.policy.head.weight.numel()
        body = self.policy.matmul_parameters - head
        scored = sum(batch.scored for batch in self.batches)
        prompts = sum(group.prompt.ids.size for group, _ in make_groups(job, self.vocabulary))
        tokens = prompts + scored - job.groups * job.group_size  # the last token of a completion is only predicted
        return {
            "needed_flop": 6.0 * (body * tokens + head * scored),
            "needed_tokens": tokens,
            "packed_tokens": sum(len(batch.tokens) for batch in self.batches),
            "scored_tokens": scored,
            "microbatches": len(self.batches),
            "body_parameters": body,
            "head_parameters": head,
        }


def run_training(job: TrainJob) -> dict[str, Any]:
    """Seconds of each measured step, the best GEMM rate seen between them, and the breakdown of one more."""
    steps = Steps(job)
    seconds: list[float] = []
    cpu_seconds: list[float] = []  # of all threads: what a busy machine says less about
    gemm = 0.0
    for number in range(job.warmup_steps + job.steps):
        gemm = max(gemm, gemm_rate(job.dtype, job.threads, _GEMM_SECONDS))
        started, before = time.perf_counter(), time.process_time()
        steps.step()
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - before)
        print(f"step {number + 1}: {seconds[-1]:.2f} s", file=sys.stderr, flush=True)
    answer = {
        "path": str(steps.policy.path),
        "step_seconds": seconds[job.warmup_steps :],
        "step_cpu_seconds": cpu_seconds[job.warmup_steps :],
        "gemm_flops": gemm,
        "peak_bytes": peak_bytes(),
        **steps.sizes(job),
        "versions": versions("transformers"),
    }
    return {**answer, "breakdown": breakdown(steps) if job.profile else {}}


def breakdown(steps: Steps) -> dict[str, float]:
    """Seconds of one step by part, under torch's profiler, which makes it somewhat slower. Their sum is the step.

    `products`: those of the body. `head`: the head's products, softmax and gradient, known by the vocabulary in their
    shapes. `optimizer`: all of begin and finish: zeroing, norm, clip, AdamW, refresh of the working copy. `rest`: Python,
    autograd and torch's dispatcher between the operators.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        started = time.perf_counter()
        steps.step()
        whole = time.perf_counter() - started
    parts = dict.fromkeys(PARTS, 0.0)
    for event in profiler.events() or ():
        if event.name.startswith(("aten::", "mkldnn::", "mkl::")):
            parts[part_of(event, steps.vocabulary)] += event.self_cpu_time_total / 1e6
    parts["rest"] = max(whole - sum(parts.values()), 0.0)
    return parts


def part_of(event: Any, vocabulary: int) -> str:
    above = event.cpu_parent
    while above is not None:
        if above.name == _FINISH:
            return "optimizer"
        above = above.cpu_parent
    if any(vocabulary in shape for shape in event.input_shapes if isinstance(shape, (list, tuple))):
        return "head"
    if event.name in _PRODUCTS:
        return "products"
    return "attention" if any(word in event.name for word in _ATTENTION) else "elementwise"
