"""`child.py generate`, `turns` and `sweep`: the real embedded engine, and decode steps of its core at chosen sizes."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.config.schema import EngineConfig
from asyncrl.generation.embedded.cache import CacheShape, KVCache
from asyncrl.generation.embedded.core import Core
from asyncrl.generation.embedded.engine import EmbeddedEngine, cache_shape
from asyncrl.generation.embedded.sequences import Sequences
from asyncrl.models.policy import PolicyModel
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import GenerationRequest, Int32Array, SamplingParams

from .job import GenerateJob, SweepJob, TurnsJob, new_loop
from .machine import versions
from .peers.side import peak_bytes

GIB = 1 << 30


def load(model: str, dtype: str) -> PolicyModel:
    return PolicyModel(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), dtype)


# -- generation --------------------------------------------------------------------------------------------------------


async def generate(job: GenerateJob, rows: list[Int32Array]) -> dict[str, Any]:
    """All requests at once, as a step of a run hands them over; the clock stops when the last one is answered. Episodes of a
    `TurnsJob` begin at once.

    `rows`: prompts of the groups, and as many for the warm-up.
    """
    groups, play, context = len(rows) // 2, _batch, job.prompt_tokens + job.max_tokens
    options: dict[str, Any] = {}
    if isinstance(job, TurnsJob):
        play, context = _episodes, job.prompt_tokens + job.turns * (job.max_tokens + job.tool_tokens)
        options = {"kept_prefix_max_age": job.kept_prefix_max_age}
    recorder = Recorder()
    async with ThreadLane("cpu", recorder, lambda: torch.set_num_threads(job.threads)) as lane:
        policy = await lane.run(lambda: load(job.model, job.dtype), name="bench/load")
        async with EmbeddedEngine(
            policy,
            None,
            lane,
            recorder,
            max_sequences=job.sequences,
            max_context=context,
            prefill_tokens=EngineConfig().prefill_tokens,
            **options,
        ) as engine:
            await play(engine, job, rows[groups:], job.warmup_tokens)
            before = engine.statistics()
            started = time.perf_counter()
            tokens = await play(engine, job, rows[:groups], job.max_tokens)
            seconds = time.perf_counter() - started
            after = engine.statistics()
    return {
        "seconds": seconds,
        "tokens": tokens,
        "peak_bytes": peak_bytes(),
        "decode_steps": after["decode_steps"] - before["decode_steps"],
        "prefill_tokens": after["prefill_tokens"] - before["prefill_tokens"],
        "versions": versions("transformers"),
    }


async def _batch(engine: EmbeddedEngine, job: GenerateJob, prompts: list[Int32Array], tokens: int) -> int:
    sizes: list[int] = []

    async def one(number: int) -> None:
        group = number // job.group_size
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        request = GenerationRequest(prompts[group], sampling, seed=number, prefix_key=f"{tokens}/{group}")
        sizes.append((await engine.generate(request)).token_ids.size)

    async with anyio.create_task_group() as tasks:
        for number in range(job.sequences):
            tasks.start_soon(one, number)
    return sum(sizes)


async def _episodes(engine: EmbeddedEngine, job: GenerateJob, prompts: list[Int32Array], tokens: int) -> int:
    """Tools answer at once."""
    assert isinstance(job, TurnsJob)
    sizes: list[int] = []

    async def one(number: int, turns: int) -> None:
        group, session = number // job.group_size, f"{tokens}/{number}"
        ids, tool = prompts[group], prompts[group][: job.tool_tokens]
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        for turn in range(turns):
            key = None if turn else f"{tokens}/{group}"
            request = GenerationRequest(ids, sampling, seed=turns * number + turn, prefix_key=key, session=session)
            answer = await engine.generate(request)
            sizes.append(answer.token_ids.size)
            ids = np.concatenate([ids, answer.token_ids, tool]).astype(np.int32)
        engine.end_session(session)

    async with anyio.create_task_group() as tasks:
        for number in range(job.sequences):
            tasks.start_soon(one, number, job.turns)
    return sum(sizes)


def run_turns(job: TurnsJob) -> dict[str, Any]:
    return run_generation(job)


def run_generation(job: GenerateJob) -> dict[str, Any]:
    rows = [np.asarray(row, np.int32) for row in json.loads(Path(job.prompts).read_text(encoding="utf-8"))]
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(generate(job, rows))


# -- the sweep ---------------------------------------------------------------------------------------------------------


def run_sweep(job: SweepJob) -> dict[str, Any]:
    """Milliseconds of a decode step in every cell, with the FLOP and the bytes that it cannot do without."""
    torch.set_num_threads(job.threads)
    policy = load(job.model, job.dtype)
    cells = []
    for sequences in job.sequences:
        for context in job.contexts:
            shape = cache_shape(policy.config, sequences, context + job.warmup_steps + job.steps)
            cell: dict[str, Any] = {"sequences": sequences, "context": context}
            if shape.nbytes(policy.dtype) <= job.cache_gib * GIB:
                seconds = _decode_seconds(job, policy, shape, sequences, context)
                cell |= {"seconds": seconds, **_must(policy, shape, sequences, context)}
                print(f"{sequences} x {context}: {1e3 * seconds:.1f} ms", file=sys.stderr, flush=True)
            cells.append(cell)
    return {"cells": cells, "peak_bytes": peak_bytes()}


def _decode_seconds(job: SweepJob, policy: PolicyModel, shape: CacheShape, sequences: int, context: int) -> float:
    """Median of the measured steps. The cache is filled with numbers, not by a prefill: what they are changes no cost."""
    cache = KVCache(shape, policy.dtype, policy.device)
    cache.data.fill_(0.01)  # written, so that its pages exist: unwritten ones would all be read from one zero page
    columns = Sequences(sequences, shape.positions)
    core = Core(policy, cache, columns, prefill_tokens=1, recompute=False)
    sampling = SamplingParams(max_tokens=job.warmup_steps + job.steps, ignore_eos=True)
    prompt = np.full(context, 7, np.int32)
    for number in range(sequences):
        slot = core.add(GenerationRequest(prompt, sampling, seed=job.seed + number), ())
        columns.cached[slot] = context - 1
    seconds = []
    for _ in range(job.warmup_steps + job.steps):
        started = time.perf_counter()
        decoded = core.decode()
        seconds.append(time.perf_counter() - started)
        assert decoded.rows == sequences, "every row holds its context: nothing is behind"
    return statistics.median(seconds[job.warmup_steps :])


def _must(policy: PolicyModel, shape: CacheShape, sequences: int, context: int) -> dict[str, float]:
    """Weights are read once a step and used once a sequence; keys and values are read once, for every query head.

    FLOP: 2 per parameter and sequence, 4 per position, query head and entry of a head (scores, and their sum of values).
    """
    config = policy.config.get_text_config()
    heads = config.num_attention_heads
    positions = sequences * context * shape.layers
    item = policy.dtype.itemsize
    return {
        "flop": 2.0 * policy.matmul_parameters * sequences + 4.0 * positions * heads * shape.head_size,
        "bytes": float(policy.matmul_parameters * item + 2 * positions * shape.heads * shape.head_size * item),
    }
