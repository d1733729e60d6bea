"""Tokens per second of vLLM as a worker has it, with the cost of new weights, beside vLLM by itself; the sizes of SmolLM2-135M.

    .venv-vllm/bin/python tools/measure_vllm.py [--jobs 64x128 16x512] [--model DIR] [--dtype float32 bfloat16] [--threads 2]

    ours       a version is copied into vLLM's parameters, then the step generates; layers are not packed
    offline    `vllm.LLM` as it comes (its own process, compiled), the same cores, with `LLM.generate` and no new weights
    async      `AsyncLLM`, likewise, all requests at once

A step: a job's sequences with prompts of 48 tokens that no two share, sampled at temperature 1. Each side is a process of its own;
they take turns, one at work and the others idle; medians. `asyncrl bench weights` measures a change of weights.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from typing import Any

from vllm_sides import answer, arguments, ours, parser_of, print_table, prompts, take_turns, turns

SIDES = ("ours", "offline", "async")
COLUMNS = (
    "dtype",
    "job",
    "side",
    "tokens/s of whole steps",
    "of generation alone",
    "new weights, ms",
    "start, s",
    "peak MiB",
)


def offline(options: argparse.Namespace) -> None:
    with arguments(options) as given:
        from vllm import LLM, SamplingParams

        llm = LLM(**given)
        for turn in turns():
            params = SamplingParams(temperature=1.0, max_tokens=turn["tokens"], ignore_eos=True, detokenize=False)
            asked = [{"prompt_token_ids": each} for each in prompts(turn["sequences"], turn["number"])]
            began = time.perf_counter()
            found = llm.generate(asked, params, use_tqdm=False)
            seconds = time.perf_counter() - began
            answer(seconds=seconds, tokens=sum(len(each.outputs[0].token_ids) for each in found), bind=0.0)


async def by_async_llm(options: argparse.Namespace) -> None:
    with arguments(options) as given:
        from vllm import AsyncEngineArgs, SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM

        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**given, disable_log_stats=True))

        async def one(ids: list[int], params: Any, name: str) -> int:
            count = 0
            async for output in llm.generate({"prompt_token_ids": ids}, params, name):
                count = len(output.outputs[0].token_ids)
            return count

        for turn in turns():
            kind = RequestOutputKind.FINAL_ONLY
            params = SamplingParams(
                temperature=1.0, max_tokens=turn["tokens"], ignore_eos=True, detokenize=False, output_kind=kind
            )
            asked = prompts(turn["sequences"], turn["number"])
            began = time.perf_counter()
            counts = await asyncio.gather(
                *(one(ids, params, f"{turn['number']}.{index}") for index, ids in enumerate(asked))
            )
            answer(seconds=time.perf_counter() - began, tokens=sum(counts), bind=0.0)
        llm.shutdown()


async def by_us(options: argparse.Namespace) -> None:
    async with ours(options) as made:
        for version, turn in enumerate(turns()):
            bind = await made.move(version)
            began = time.perf_counter()
            tokens = await made.generate(turn["sequences"], turn["tokens"], turn["number"])
            answer(seconds=bind + time.perf_counter() - began, tokens=tokens, bind=bind)


def measure(dtype: str, options: argparse.Namespace) -> list[str]:
    sides = take_turns(dtype, options)
    rows = []
    for job in options.jobs:
        for name, side in sides.items():
            seconds, tokens, bind = (side.median(job, each) for each in ("seconds", "tokens", "bind"))
            rows.append(
                f"| {dtype} | {job[0]} x {job[1]} | {name} | {tokens / seconds:.0f} | {tokens / (seconds - bind):.0f} | "
                f"{bind * 1e3:.0f} | {side.start:.0f} | {side.median(job, 'mib'):.0f} |"
            )
    return rows


def main() -> int:
    options = parser_of(__doc__, SIDES, [(64, 128), (16, 512)]).parse_args()
    if options.child == "offline":
        offline(options)
    elif options.child == "async":
        asyncio.run(by_async_llm(options))
    elif options.child is not None:
        asyncio.run(by_us(options))
    else:
        print_table(options, COLUMNS, measure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
