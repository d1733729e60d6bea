"""How far the trainer's log-probs are from the sampler's in a real run, token by token: ten steps in float32, preset sync.

    python tools/measure_mismatch.py                          # a Mistral of random weights, window 16, rows of 100 tokens
    python tools/measure_mismatch.py examples/smollm2_addition.yaml

A configuration that is given keeps what it says but for the lines of ALWAYS; overrides come last. Of each step:
`mismatch/current_mean` and `mismatch/current_max`, in nats, over sequences that one version sampled and trains. Exits 1 where
a token is farther off than ALLOWED.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]  # reward workers load this file, too

from letters import LETTERS, WORDS, share, tokenizer  # noqa: E402, F401  share: the reward

ALLOWED = 1e-4
ALWAYS = ("preset=sync", "model.dtype=float32", "train.max_steps=10", "evaluate.every=null", "telemetry.live=off")
WINDOWED = (
    f"model.path={__file__}:build", f"data.train={__file__}:rows", "data.max_prompt_tokens=12", f"reward={__file__}:share",
    "rollout.group_size=8", "rollout.groups_per_step=4", "rollout.max_tokens=90", "rollout.ignore_eos=true", "train.lr=1e-3",
)  # fmt: skip


def build(seed: int) -> tuple[Any, Any]:
    """(model, tokenizer): letters as tokens; every layer sees the last 16 of them."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(seed)
    config = MistralConfig(
        vocab_size=len(WORDS), hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16, sliding_window=16, initializer_range=0.1, max_position_embeddings=128,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return MistralForCausalLM(config), tokenizer()


def rows() -> list[dict[str, str]]:
    """Prompts of ten tokens; vowels are wanted."""
    return [{"prompt": f"{LETTERS[i % 26]}{LETTERS[i // 26 % 26]}qrstuvw="} for i in range(520)]


async def measure(files: list[str], overrides: list[str]) -> list[tuple[float, float]]:
    """(mean, largest) of each step."""
    from asyncrl import Runtime, load_config  # not above: the reward workers load this file too, and need no torch

    found: list[tuple[float, float]] = []
    async with Runtime(load_config(files, overrides), write=False) as runtime:
        verdict = runtime.built.verdict
        assert verdict is not None
        print(verdict.lines()[0], flush=True)

        async def watch() -> None:
            async for report in runtime.steps():
                numbers = report.metrics
                found.append((numbers["mismatch/current_mean"], numbers["mismatch/current_max"]))
                print(f"step {report.version}: mean {found[-1][0]:.2g}, largest {found[-1][1]:.2g} nats", flush=True)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch())
            await runtime.run()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("given", nargs="*", help="configuration files and overrides")
    given = parser.parse_args().given
    files = [word for word in given if "=" not in word]
    overrides = [word for word in given if "=" in word]
    found = asyncio.run(measure(files, [*ALWAYS, *(() if files else WINDOWED), *overrides]))
    mean, worst = (max(numbers) for numbers in zip(*found, strict=True))
    print(f"{len(found)} steps: largest mean of a step {mean:.2g} nats, largest token {worst:.2g}")
    return int(not worst <= ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
