"""How far the trainer's log-probs are from the sampler's in a real run, token by token: ten steps, preset sync.

    python tools/measure_mismatch.py                          # a Mistral of random weights, window 16, rows of 100 tokens
    python tools/measure_mismatch.py examples/smollm2_addition.yaml [model.dtype=bfloat16] [--out tools/results/mismatch.md]

A configuration that is given keeps what it says but for the lines of ALWAYS; overrides come last. Of each step, in nats:

    run      `mismatch/current_mean` and `mismatch/current_max`, over sequences that one version sampled and trains
    oracle   transformers' own eager forward in the run's dtype beside its eager forward in the next wider one, with the weights
             that the step left, over the same tokens (or `--oracle-rows` of them); it has nothing of ours

Sampler and trainer are two computations of the same numbers. Where each is as near to the truth as transformers' eager forward in
that dtype is, they are at most twice as far from each other: that is the bound, on the largest mean of a step and on the largest
token. In float32, where the oracle itself is as small as the order of a sum, no token may be farther off than FLOAT32. Exits 1
past it.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]  # reward workers load this file, too

from letters import LETTERS, WORDS, share, tokenizer  # noqa: E402, F401  share: the reward

FLOAT32 = 1e-4  # nats, of a token
MULTIPLE = 2.0  # of the oracle
WIDER = {"bfloat16": "float32", "float16": "float32", "float32": "float64"}
ALWAYS = ("preset=sync", "model.dtype=float32", "train.max_steps=10", "evaluate.every=null", "telemetry.live=off")
WINDOWED = (
    f"model.path={__file__}:build", f"data.train={__file__}:rows", "data.max_prompt_tokens=12", f"reward={__file__}:share",
    "rollout.group_size=8", "rollout.groups_per_step=4", "rollout.max_tokens=90", "rollout.ignore_eos=true", "train.lr=1e-3",
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """Nats. `run`, `oracle`: (mean, largest token)."""

    version: int
    tokens: int
    run: tuple[float, float]
    oracle: tuple[float, float]

    def __str__(self) -> str:
        said = [f"mean {mean:.2g}, largest {largest:.2g}" for mean, largest in (self.run, self.oracle)]
        return f"step {self.version}: {said[0]} nats; oracle: {said[1]} ({self.tokens} tokens)"


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


class Oracle:
    """transformers' own eager model, in a dtype and in the next wider one."""

    def __init__(self, policy: Any, dtype: str) -> None:
        """`policy`: the run's, of which the class and the configuration are taken."""
        import torch

        config = copy.deepcopy(policy.config)
        config._attn_implementation = "eager"
        self._models = [
            type(policy.module)._from_config(config, dtype=getattr(torch, name), attn_implementation="eager").eval()
            for name in (dtype, WIDER[dtype])
        ]

    def distance(self, state: dict[str, Any], trajectories: list[Any]) -> tuple[int, tuple[float, float]]:
        """(tokens, (mean, largest)) of how far the log-probs of what was sampled are apart. `state`: named weights of the run."""
        import torch

        for model in self._models:
            model.load_state_dict(state)
        apart = []
        with torch.no_grad():
            for row in trajectories:
                narrow, wide = (self._logprobs(model, row) for model in self._models)
                apart.append((narrow.double() - wide.double()).abs())
        both = torch.cat(apart)
        return both.numel(), (float(both.mean()), float(both.max()))

    @staticmethod
    def _logprobs(model: Any, row: Any) -> Any:
        """Of the sampled tokens, as transformers' users compute them: logits widened, divided by the temperature."""
        import numpy as np
        import torch

        tokens = torch.from_numpy(row.tokens.astype(np.int64))
        places = torch.from_numpy(np.flatnonzero(row.mask))
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, places - 1]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        logp = torch.log_softmax(wide / row.temperature, -1)
        return logp.gather(1, tokens[places][:, None])[:, 0]


async def measure(files: list[str], overrides: list[str], most: int | None) -> tuple[list[str], list[Step]]:
    """(what the run says of its model and dtype, its steps). `most`: rows of a step that the oracle reads; None: all."""
    from asyncrl import Runtime, load_config  # not above: the reward workers load this file too, and need no torch

    found: list[Step] = []
    config = load_config(files, overrides)
    async with Runtime(config, write=False) as runtime:
        verdict, policy, (lane, *_) = runtime.built.verdict, runtime.built.policy, runtime.built.lanes
        assert verdict is not None and policy is not None
        lines = [verdict.lines()[0], str(config.model.dtype)]
        print(lines[0], flush=True)
        oracle = await asyncio.to_thread(Oracle, policy, config.model.dtype)

        async def watch() -> None:
            async for report in runtime.steps():
                numbers = report.metrics
                state = await lane.run(policy.host_state, name="oracle")
                played = [row for group in report.groups for row in group.trajectories]
                tokens, distance = await asyncio.to_thread(oracle.distance, state, played[:most])
                ours = numbers["mismatch/current_mean"], numbers["mismatch/current_max"]
                found.append(Step(report.version, tokens, ours, distance))
                print(found[-1], flush=True)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch())
            await runtime.run()
    return lines, found


def judge(dtype: str, steps: list[Step]) -> tuple[str, bool]:
    """(a sentence, whether the run is within its bounds)."""
    import numpy as np

    # (largest mean of a step, largest token); NaN where one of them is
    ours, theirs = (np.max([getattr(step, side) for step in steps], axis=0).tolist() for side in ("run", "oracle"))
    if dtype == "float32":
        good, bound = ours[1] <= FLOAT32, f"{FLOAT32:g} for a token"
    else:
        bounds = MULTIPLE * theirs[0], MULTIPLE * theirs[1]
        good, bound = ours[0] <= bounds[0] and ours[1] <= bounds[1], f"{bounds[0]:.2g} and {bounds[1]:.2g}"
    return (
        f"{dtype}, {len(steps)} steps: largest mean of a step {ours[0]:.2g} nats, largest token {ours[1]:.2g}; allowed: {bound} "
        f"(transformers' eager {dtype} from its own {WIDER[dtype]}: {theirs[0]:.2g} and {theirs[1]:.2g})"
    ), good


def report(command: str, lines: list[str], steps: list[Step], verdict: str) -> str:
    """A section of the results."""
    from asyncrl.telemetry.machine import describe_cpu

    table = [
        f"| {step.version} | {step.tokens} | {step.run[0]:.2g} | {step.run[1]:.2g} | {step.oracle[0]:.2g} | {step.oracle[1]:.2g} |"
        for step in steps
    ]
    return "\n".join(
        [
            f"{time.strftime('%Y-%m-%d')}, `{command}`, {describe_cpu()}.",
            f"{lines[0][0].upper()}{lines[0][1:]}.",
            "",
            "| step | tokens | mean | largest | oracle's mean | oracle's largest |",
            "|---|---|---|---|---|---|",
            *table,
            "",
            f"{verdict}.",
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("given", nargs="*", help="configuration files and overrides")
    parser.add_argument(
        "--oracle-rows", type=int, help="of a step, at most (a large model's oracle takes longer than its run)"
    )
    parser.add_argument("--out", type=Path, help="a section is added to this file")
    arguments = parser.parse_args()
    files = [word for word in arguments.given if "=" not in word]
    overrides = [word for word in arguments.given if "=" in word]
    lines, steps = asyncio.run(
        measure(files, [*ALWAYS, *(() if files else WINDOWED), *overrides], arguments.oracle_rows)
    )
    verdict, good = judge(lines[1], steps)
    print(verdict)
    if arguments.out:
        rows = [f"--oracle-rows {arguments.oracle_rows}"] if arguments.oracle_rows else []
        command = " ".join(["python tools/measure_mismatch.py", *arguments.given, *rows])
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write("\n" + report(command, lines, steps, verdict))
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
