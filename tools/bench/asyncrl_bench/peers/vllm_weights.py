"""New weights for AsyncLLM while requests are in flight. Runs inside an environment with vLLM: `python vllm_weights.py JOB.json`.

Prints one JSON line at the end: lists of milliseconds, one number for each change. It must not import asyncrl. Eager: compiling
takes minutes at the start, for a tenth of the speed on a CPU.
"""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import side
import torch
import vllm
from transformers import AutoModelForCausalLM
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

BEGUN, MORE = 4, 8  # tokens of every sequence, before what is usual is looked at; and from there to the change
PROMPT = 48  # tokens
CACHE = 1 << 30  # bytes


class Streams:
    """Requests that run. `ends`: when each had a token."""

    def __init__(self, llm: Any, job: dict[str, Any], turn: int) -> None:
        self._llm, self._turn = llm, turn
        self._size, self._vocabulary = job["group_size"], vocabulary(job)
        self._sampling = SamplingParams(
            temperature=1.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        self.ends: list[list[float]] = [[] for _ in range(job["groups_per_step"] * self._size)]
        self.begun = asyncio.Event()

    async def all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(self.ends)):
                group = index // self._size + self._turn * len(self.ends)
                ids = [(7919 * group + 31 * place) % self._vocabulary for place in range(PROMPT)]
                tasks.create_task(self._one(index, ids))

    async def _one(self, index: int, ids: list[int]) -> None:
        async for _ in self._llm.generate({"prompt_token_ids": ids}, self._sampling, f"{self._turn}.{index}"):
            self.ends[index].append(time.perf_counter())
            if min(map(len, self.ends)) >= BEGUN + MORE:
                self.begun.set()


def vocabulary(job: dict[str, Any]) -> int:
    found: int = json.loads((Path(job["model"]) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    return found


def seen(ends: Sequence[float], resumed: float) -> tuple[float, float]:
    """Of tokens that came at `ends`: (the usual gap, the gap that holds this moment or is the first after it)."""
    gaps = [(b - a, b) for a, b in pairwise(ends[BEGUN:])]
    return median(gap for gap, _ in gaps), next(gap for gap, end in gaps if end >= resumed)


async def change(llm: Any, module: Any, folder: str) -> dict[str, float]:
    """Where the parts of it ended."""
    marks = {"began": time.perf_counter()}
    await asyncio.to_thread(module.save_pretrained, folder)
    marks["saved"] = time.perf_counter()
    await llm.pause_generation(mode="keep", clear_cache=False)
    marks["paused"] = time.perf_counter()
    await llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    marks["reloaded"] = time.perf_counter()
    await llm.resume_generation()
    marks["ended"] = time.perf_counter()
    return marks


async def main(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, list[float]] = {
        name: [] for name in ("step", "between", "pause", "bind", "total", "save", "pausing")
    }
    with tempfile.TemporaryDirectory() as folder:
        module = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
        module.save_pretrained(folder)
        arguments = AsyncEngineArgs(
            model=folder, skip_tokenizer_init=True, dtype=job["dtype"], max_model_len=PROMPT + job["max_tokens"],
            max_num_seqs=job["groups_per_step"] * job["group_size"], kv_cache_memory_bytes=CACHE, generation_config="vllm",
            disable_log_stats=True, enforce_eager=True,
        )  # fmt: skip
        llm = AsyncLLM.from_engine_args(arguments)
        for turn in range(job["warmup_steps"] + job["steps"]):
            streams = Streams(llm, job, turn)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(streams.all())
                await streams.begun.wait()
                marks = await change(llm, module, folder)
            if turn < job["warmup_steps"]:
                continue
            gaps = [seen(each, marks["reloaded"]) for each in streams.ends]
            usual = median(gap for gap, _ in gaps)
            parts = {
                "step": usual,
                "pause": median(gap for _, gap in gaps) - usual,
                "between": marks["ended"] - marks["paused"],
                "bind": marks["reloaded"] - marks["paused"],
                "total": marks["ended"] - marks["began"],
                "save": marks["saved"] - marks["began"],
                "pausing": marks["paused"] - marks["saved"],
            }
            for name, value in parts.items():
                found[name].append(1e3 * value)
        llm.shutdown()
    return {**found, "versions": {"vllm": vllm.__version__, "torch": torch.__version__}}


if __name__ == "__main__":
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM logs to stdout, also while it shuts down, and the answer has to be the last line there
    side.answer(asyncio.run(main(side.job())), output)
