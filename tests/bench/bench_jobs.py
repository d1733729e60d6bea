"""The fixed tiny jobs whose work is counted: one training step, and a decode batch. And interpreters that stand in for peers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from support.trajectories import trajectory
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.algorithms.registry import build_loss
from asyncrl.config.schema import TrainConfig
from asyncrl.data.packing import pack_groups
from asyncrl.generation.embedded.cache import KVCache
from asyncrl.generation.embedded.core import Core
from asyncrl.generation.embedded.engine import cache_shape
from asyncrl.generation.embedded.sequences import Sequences
from asyncrl.models.policy import PolicyModel
from asyncrl.training.trainer import TorchTrainer
from asyncrl.types import GenerationRequest, Group, Microbatch, Prompt, SamplingParams, Ticket, Trajectory

VOCABULARY, PROMPT, MEMBERS, GROUPS = 1024, 40, 8, 2
LOSS = build_loss("grpo")


def stand_in(path: Path, program: str) -> Path:
    """An executable `program`, whose first line has {python} for this interpreter."""
    path.write_text(program.format(python=sys.executable))
    path.chmod(0o755)
    return path


def policy(dtype: str = "float32", layers: int = 2) -> PolicyModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return PolicyModel(LlamaForCausalLM(config), dtype)


def lengths() -> list[int]:
    """Ragged completions, from 3 to 32 tokens."""
    return np.random.default_rng(0).integers(3, 33, GROUPS * MEMBERS).tolist()


def groups(share: bool = True) -> list[tuple[Group, list[float]]]:
    """`share=False`: the prompts of a group differ in their first token, so each runs for its completion alone."""
    source = np.random.default_rng(1)
    result = []
    for number in range(GROUPS):
        prompt = source.integers(0, VOCABULARY, PROMPT).astype(np.int32)
        members = []
        for member, size in enumerate(lengths()[number * MEMBERS : (number + 1) * MEMBERS]):
            own = prompt if share else np.concatenate([[number * MEMBERS + member], prompt[1:]]).astype(np.int32)
            completion = source.integers(0, VOCABULARY, size).astype(np.int32)
            members.append(_trajectory(number, member, own, completion))
        group = Group(Ticket(number, 0, 2), Prompt(number, prompt, ""), tuple(members))
        result.append((group, [(-1.0) ** each.member for each in members]))
    return result


def _trajectory(group: int, member: int, prompt: np.ndarray, completion: np.ndarray) -> Trajectory:
    tokens = np.concatenate([prompt, completion])
    return trajectory(group, member, MEMBERS, tokens, prompt_length=prompt.size, logprob=-6.9)


@dataclass(slots=True)
class Training:
    trainer: TorchTrainer
    batches: list[Microbatch]

    @classmethod
    def of(cls, dtype: str = "float32", *, share: bool = True) -> Training:
        trainer = TorchTrainer(policy(dtype), TrainConfig(), max_completion_length=32)
        return cls(trainer, pack_groups(groups(share), TrainConfig().tokens_per_microbatch))

    def step(self) -> None:
        self.trainer.begin_train_step(LOSS)
        for batch in self.batches:
            self.trainer.train_microbatch(batch)
        self.trainer.finish_train_step()

    @property
    def needed_flop(self) -> float:
        """6 per parameter and token: every prompt once a group; the head for scored tokens alone; no last token."""
        model = self.trainer.policy
        head = model.head.weight.numel()
        scored = sum(lengths())
        forward = GROUPS * PROMPT + scored - GROUPS * MEMBERS
        return 6.0 * ((model.matmul_parameters - head) * forward + head * scored)


def decoding(
    sequences: int, *, context: int = PROMPT, layers: int = 2, dtype: str = "float32", share: bool = True
) -> Core:
    """A batch whose prompts of `context` tokens wait for their prefill; groups of `MEMBERS` share one."""
    model = policy(dtype, layers)
    room = context + 32
    cache = KVCache(cache_shape(model.config, sequences, room), model.dtype, model.device)
    core = Core(model, cache, Sequences(sequences, room), prefill_tokens=4096, recompute=False)
    for number in range(sequences):
        group = number // MEMBERS
        prompt = np.random.default_rng(group).integers(0, VOCABULARY, context).astype(np.int32)
        sampling = SamplingParams(max_tokens=32, ignore_eos=True)
        key = str(group) if share else None
        core.add(GenerationRequest(prompt, sampling, seed=number, prefix_key=key), ())
    return core
