"""How far the trainer's log-probs are from the sampler's in a real run, token by token: ten steps, preset sync.

    python tools/measure mismatch                          # a Mistral of random weights, window 16, rows of 100 tokens
    python tools/measure mismatch examples/smollm2_addition.yaml [model.dtype=bfloat16] [--out tools/results/mismatch.md]

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
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from commands import command, machine, split, table

from asyncrl import Runtime, load_config

FLOAT32 = 1e-4  # nats, of a token
MULTIPLE = 2.0  # of the oracle
MODELS = Path(__file__).with_name("models.py")
WIDER = {"bfloat16": "float32", "float16": "float32", "float32": "float64"}
ALWAYS = ("preset=sync", "model.dtype=float32", "train.max_steps=10", "evaluate.every=null", "telemetry.live=off")
WINDOWED = (
    f"model.path={MODELS}:windowed", f"data.train={MODELS}:long_rows", "data.max_prompt_tokens=12", f"reward={MODELS}:share",
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


class Oracle:
    """transformers' own eager model, in a dtype and in the next wider one."""

    def __init__(self, policy: Any, dtype: str) -> None:
        """`policy`: the run's, of which the class and the configuration are taken."""
        config = copy.deepcopy(policy.config)
        config._attn_implementation = "eager"
        self._models = [
            type(policy.module)._from_config(config, dtype=getattr(torch, name), attn_implementation="eager").eval()
            for name in (dtype, WIDER[dtype])
        ]

    def distance(self, state: dict[str, Any], trajectories: list[Any]) -> tuple[int, tuple[float, float]]:
        """(tokens, (mean, largest)) of how far the log-probs of what was sampled are apart. `state`: named weights of the run."""
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
        tokens = torch.from_numpy(row.tokens.astype(np.int64))
        places = torch.from_numpy(np.flatnonzero(row.mask))
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, places - 1]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        logp = torch.log_softmax(wide / row.temperature, -1)
        return logp.gather(1, tokens[places][:, None])[:, 0]


async def measure(files: list[str], overrides: list[str], most: int | None) -> tuple[list[str], list[Step]]:
    """(what the run says of its model and dtype, its steps). `most`: rows of a step that the oracle reads; None: all."""
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


def report(lines: list[str], steps: list[Step], verdict: str) -> str:
    """A section of the results."""
    heads = ("step", "tokens", "mean", "largest", "oracle's mean", "oracle's largest")
    rows = [(each.version, each.tokens, *(f"{nats:.2g}" for nats in (*each.run, *each.oracle))) for each in steps]
    first = f"{time.strftime('%Y-%m-%d')}, `{command()}`, {machine()}."
    model = f"{lines[0][0].upper()}{lines[0][1:]}."
    return "\n".join([first, model, "", *table(heads, rows), "", f"{verdict}.", ""])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("given", nargs="*", help="configuration files and overrides")
    parser.add_argument(
        "--oracle-rows", type=int, help="of a step, at most (a large model's oracle takes longer than its run)"
    )
    parser.add_argument("--out", type=Path, help="a section is added to this file")


def main(arguments: argparse.Namespace) -> int:
    files, given = split(arguments.given)
    overrides = [*ALWAYS, *(() if files else WINDOWED), *given]
    lines, steps = asyncio.run(measure(files, overrides, arguments.oracle_rows))
    verdict, good = judge(lines[1], steps)
    print(verdict)
    if arguments.out:
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write("\n" + report(lines, steps, verdict))
    return int(not good)
