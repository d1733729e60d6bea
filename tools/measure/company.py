"""How many sequences come out the same, token for token, when others are decoded beside them: what rounding does to a seed.

    python tools/measure company PATH [--dtype bfloat16 float32] [--sequences 64] [--tokens 64] [--company 40 3]

The same prompts with the same seeds are sampled once with the first number of `--company` together, once with the second.
PATH: what model.path takes. On one core; its kernels decide the numbers, so the machine is named beside them.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from commands import machine

from asyncrl.config.schema import ModelConfig
from asyncrl.generation.embedded.engine import open_core
from asyncrl.models.loading import load_policy
from asyncrl.models.policy import PolicyModel
from asyncrl.types import FinishReason, GenerationRequest, Int32Array, SamplingParams

PROMPT = 16  # tokens


def requests(vocabulary: int, sequences: int, tokens: int) -> list[GenerationRequest]:
    """Four of each prompt."""
    random, found = np.random.default_rng(0), []
    for seed in range(sequences):
        if seed % 4 == 0:
            prompt = random.integers(0, vocabulary, PROMPT).astype(np.int32)
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        found.append(GenerationRequest(prompt, sampling, seed, prefix_key=f"prompt {seed // 4}"))
    return found


def sample(policy: PolicyModel, asked: list[GenerationRequest], together: int) -> list[Int32Array]:
    """Token ids of each completion; at most `together` run at a time."""
    longest = PROMPT + asked[0].sampling.max_tokens
    core = open_core(
        policy,
        max_sequences=together,
        max_context=longest,
        kv_positions=together * longest,
        prefill_tokens=1024,
        recompute=False,
    )
    ended: dict[int, Int32Array] = {}
    running: dict[int, int] = {}  # slot -> number of the request
    waiting = list(range(len(asked)))
    while len(ended) < len(asked):
        while waiting and len(running) < together:
            number = waiting.pop(0)
            running[core.add(asked[number], ())] = number
        while core.needs_prefill:
            core.prefill()
        for slot in core.decode().ended:
            ended[running.pop(slot)] = core.sequences.generation(slot, FinishReason.LENGTH).token_ids
            core.remove(slot, keep_prefix=False)
    return [ended[number] for number in range(len(asked))]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--company", type=int, nargs=2, default=(40, 3))


def main(given: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    print(f"{machine()}, one thread")
    for dtype in given.dtype:
        policy, _ = load_policy(ModelConfig(path=given.path, dtype=dtype), longest=PROMPT + given.tokens)
        asked = requests(int(policy.config.get_text_config().vocab_size), given.sequences, given.tokens)
        many, few = (sample(policy, asked, together) for together in given.company)
        equal = [bool(np.array_equal(one, other)) for one, other in zip(many, few, strict=True)]
        kept = [
            float(np.logical_and.accumulate(one == other).mean()) for one, other in zip(many, few, strict=True)
        ]  # tokens before the first that differs
        print(
            f"{dtype}: {sum(equal)} of {len(equal)} sequences of {given.tokens} tokens ({np.mean(equal):.0%}) are the same with "
            f"{given.company[0]} and with {given.company[1]} together; {np.mean(kept):.0%} of all tokens come before a difference",
            flush=True,
        )
    return 0
