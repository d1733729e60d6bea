"""What requests in flight see of new weights: our worker's move to a version, beside `AsyncLLM` and checkpoints.

    .venv-vllm/bin/python tools/measure_vllm_update.py [--jobs 16x256] [--model DIR] [--dtype float32 bfloat16] [--threads 2]

    packed     a version is written to a weight board and bound between two steps; linear layers (and experts) are packed anew
    unpacked   the same, and linear layers read the board
    async      `AsyncLLM`: `pause_generation(mode="keep", clear_cache=False)`, `reload_weights` from a checkpoint, and
               `resume_generation`. Only its time is looked at: on a CPU it leaves a tied head as it was

    pause      the time between two tokens across the change, less the median of all others: what a request sees
    bind       of it, the closure that no step runs beside
    total      until every later token has them: write and move here; checkpoint, pause, reload and resume there
    memcpy     a plain copy of the same bytes; `save` and `load`: of a checkpoint of them (safetensors), all in our process

Weights change once a turn, when every sequence has eight tokens. Each side is a process of its own, one at work and the others
idle; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from vllm_sides import Ours, answer, arguments, module_of, ours, parser_of, print_table, prompts, take_turns, turns

SIDES = ("packed", "unpacked", "async")
COLUMNS = (
    "dtype",
    "job",
    "side",
    "pause, ms",
    "bind, ms",
    "write, ms",
    "total, ms",
    "memcpy, ms",
    "save, ms",
    "load, ms",
)
BEGUN = 8  # tokens of every sequence, before the weights change


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def pause(ends: Sequence[float], changed: float) -> float:
    """Of tokens that came at `ends`: the gap that holds this moment or is the first after it, less the median gap."""
    gaps = [(b - a, b) for a, b in pairwise(ends)]
    across = next(gap for gap, end in gaps if end >= changed)
    return across - median(gap for gap, _ in gaps)


async def by_us(options: argparse.Namespace, pack: bool) -> None:
    from asyncrl.transport.memory.board import Board

    async with ours(options, pack) as made:
        weights = made.flat.working.clone()
        with Board.create(weights.numel(), weights.dtype, "measured") as board:
            board.write(0, 0, weights)
            await made.move(board.half(0), 0)
            for version, turn in enumerate(turns(), 1):
                found = await one_update(made, board, weights, version, turn)
                answer(**found, **copies(made, weights))


async def one_update(made: Ours, board: Any, weights: Any, version: int, turn: dict[str, Any]) -> dict[str, float]:
    """While a job runs."""
    made.ends.clear()
    before, half = made.engine.statistics()["tokens"], version % 2
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(made.generate(turn["sequences"], turn["tokens"], turn["number"]))
        while made.engine.statistics()["tokens"] - before < BEGUN * turn["sequences"]:
            await made.lane.run(lambda: None, name="measure/wait")  # between two steps
        began = time.perf_counter()
        await asyncio.to_thread(board.write, half, version, weights)
        written = time.perf_counter()
        bind = await made.move(board.half(half), version)
        moved = time.perf_counter()
    return {"pause": pause(made.ends, moved - bind), "bind": bind, "total": moved - began, "write": written - began}


def copies(made: Ours, weights: Any) -> dict[str, float]:
    """Of the same bytes, with nothing beside: a plain copy, and a checkpoint."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        to = made.module.to(weights.dtype)
        return {
            "memcpy": timed(lambda: weights.clone().copy_(weights)) / 2,
            "save": timed(lambda: to.save_pretrained(folder)),
            "load": timed(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=weights.dtype)),
        }


class Streams:
    """Requests of `AsyncLLM` that run. `ends`: when each had a token."""

    def __init__(self, llm: Any, turn: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._llm, self._turn = llm, turn
        self._params = SamplingParams(
            temperature=1.0, max_tokens=turn["tokens"], ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        self.ends: list[list[float]] = [[] for _ in range(turn["sequences"])]
        self.begun = asyncio.Event()

    async def all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for index, ids in enumerate(prompts(self._turn["sequences"], self._turn["number"])):
                tasks.create_task(self._one(index, ids))

    async def _one(self, index: int, ids: list[int]) -> None:
        name = f"{self._turn['number']}.{index}"
        async for _ in self._llm.generate({"prompt_token_ids": ids}, self._params, name):
            self.ends[index].append(time.perf_counter())
            if min(map(len, self.ends)) >= BEGUN:
                self.begun.set()


async def by_async_llm(options: argparse.Namespace) -> None:
    with arguments(options) as given, tempfile.TemporaryDirectory() as folder:
        import torch
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        module = module_of(options).to(getattr(torch, options.dtype[0]))
        module.save_pretrained(folder)
        given |= {"model": folder, "load_format": "auto"}
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**given, disable_log_stats=True))
        for turn in turns():
            streams = Streams(llm, turn)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(streams.all())
                await streams.begun.wait()
                began = time.perf_counter()
                await asyncio.to_thread(module.save_pretrained, folder)
                saved = time.perf_counter()
                await llm.pause_generation(mode="keep", clear_cache=False)
                paused = time.perf_counter()
                await llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
                reloaded = time.perf_counter()
                await llm.resume_generation()
                total = time.perf_counter() - began
            seen = median(pause(each, reloaded) for each in streams.ends)
            answer(pause=seen, bind=reloaded - paused, total=total, write=saved - began)
        llm.shutdown()


def measure(dtype: str, options: argparse.Namespace) -> list[str]:
    sides = take_turns(dtype, options)
    rows = []
    for job in options.jobs:
        for name, side in sides.items():
            shown = [f"{side.median(job, each) * 1e3:.0f}" for each in ("pause", "bind", "write", "total")]
            own = "memcpy" in side.found[job][0]
            shown += [f"{side.median(job, each) * 1e3:.0f}" if own else "" for each in ("memcpy", "save", "load")]
            rows.append(f"| {dtype} | {job[0]} x {job[1]} | {name} | {' | '.join(shown)} |")
    return rows


def main() -> int:
    options = parser_of(__doc__, SIDES, [(16, 256)]).parse_args()
    if options.child == "async":
        asyncio.run(by_async_llm(options))
    elif options.child is not None:
        asyncio.run(by_us(options, pack=options.child == "packed"))
    else:
        print_table(options, COLUMNS, measure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
