"""Tokens per second of vLLM as a worker has it, with the cost of new weights, beside vLLM by itself; the sizes of SmolLM2-135M.

    .venv-vllm/bin/python tools/measure vllm [--jobs 64x128 16x512] [--model DIR] [--dtype float32 bfloat16] [--threads 2]

    ours       a version is copied into vLLM's parameters, then the step generates; layers are not packed
    offline    `vllm.LLM` as it comes (its own process, compiled), the same cores, with `LLM.generate` and no new weights
    async      `AsyncLLM`, likewise, all requests at once

A step: a job's sequences with prompts of 48 tokens that no two share, sampled at temperature 1. Each side is a process of its own;
they take turns, one at work and the others idle; medians. `asyncrl bench weights` measures a change of weights.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import psutil
from commands import command, machine, start, table

SIDES = ("ours", "offline", "async")
COLUMNS = "dtype;job;side;tokens/s of whole steps;of generation alone;new weights, ms;start, s;peak MiB"
PROMPT = 48  # tokens of a prompt
CACHE = 2 << 30  # bytes of vLLM's own cache
ENDED_S = 30.0  # that a side has for its end, which is not measured
WARM_UP = 16  # tokens of each sequence in the first turn of a job, which does not count


def config_of(layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


def module_of(options: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    if options.model:
        return AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    torch.manual_seed(0)
    return LlamaForCausalLM(config_of(options.layers))


def prompts(sequences: int, turn: int) -> list[list[int]]:
    """No two alike, in no turn."""
    return [[(7919 * (turn * sequences + i) + 31 * j) % 49_000 for j in range(PROMPT)] for i in range(sequences)]


def job(text: str) -> tuple[int, int]:
    sequences, _, tokens = text.partition("x")
    if not (sequences.isdecimal() and tokens.isdecimal() and int(sequences) and int(tokens)):
        raise argparse.ArgumentTypeError(f"{text!r} is not SEQUENCESxTOKENS, as in 64x128")
    return int(sequences), int(tokens)


def longest(options: argparse.Namespace) -> tuple[int, int, int]:
    """(sequences, tokens of one, tokens of all with their prompts) that any job has."""
    return (
        max(sequences for sequences, _ in options.jobs),
        PROMPT + max(tokens for _, tokens in options.jobs),
        max(sequences * (PROMPT + tokens) for sequences, tokens in options.jobs),
    )


# -- our engine


@dataclass
class Ours:
    """An engine that has not been moved to any weights, and how to ask it. `ends`: when each step of vLLM ended."""

    engine: Any
    lane: Any
    trainer: Trainer
    ends: list[float]

    async def generate(self, sequences: int, tokens: int, turn: int) -> int:
        """How many tokens came."""
        import numpy as np

        from asyncrl.types import GenerationRequest, SamplingParams

        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        asked = [np.array(each, np.int32) for each in prompts(sequences, turn)]
        found = await asyncio.gather(
            *(self.engine.generate(GenerationRequest(ids, sampling, seed)) for seed, ids in enumerate(asked))
        )
        return sum(len(each.token_ids) for each in found)

    async def move(self, version: int) -> float:
        """Seconds of the closure that no step runs beside, once the trainer has published the version."""

        def closure() -> float:
            began = time.perf_counter()
            self.engine.move_to(self.trainer.board.half(version % 2), version)
            return time.perf_counter() - began

        await self.lane.run(lambda: self.trainer.publish(version), name="publish/write")

        found: float = await self.lane.run(closure, name="engine/bind", priority=1)
        return found


class Trainer:
    """A policy and the weight board. On the lane: an operation that torch
    shares among threads, run once on another thread, leaves threads there, and with more of them than cores libgomp's no longer
    spin: each of some hundred operations of a step then waits for one to wake."""

    def __init__(self, options: argparse.Namespace) -> None:
        from asyncrl.models.policy import PolicyModel
        from asyncrl.transport.memory.board import Board

        self.policy = PolicyModel(module_of(options), options.dtype)
        weights, dtype = self.policy.weights, self.policy.dtype
        self.board = Board.create(weights.size, dtype, weights.layout_digest())
        self.publish(0)

    def publish(self, version: int) -> None:
        """What the trainer of a run does on a core of its own."""
        self.board.write(version % 2, version, self.policy.weights.working)


@asynccontextmanager
async def ours(options: argparse.Namespace) -> AsyncIterator[Ours]:
    """The engine of a worker, in this process: core, sampler and lane as there."""
    import torch

    from asyncrl.concurrency.lane import ThreadLane
    from asyncrl.generation.embedded.engine import cache_shape
    from asyncrl.generation.vllm.engine import CoreSpec, VllmEngine
    from asyncrl.generation.vllm.versions import load_adapter
    from asyncrl.telemetry.recorder import Recorder

    sequences, context, positions = longest(options)
    recorder, ends = Recorder(max_events=0), list[float]()

    def make(choose: Any) -> Any:
        adapter = load_adapter()
        size = cache_shape(policy.config, 1, 1).nbytes(policy.dtype)
        room = adapter.CoreLimits(sequences + 1, context, positions + 17, 2048, size)
        form = adapter.ModelSpec(config, policy.weights.layout(), trainer.board.half(0))
        core = adapter.VllmCore(form, room, choose)
        step = core.step

        def timed() -> Any:
            found = step()
            ends.append(time.perf_counter())
            return found

        core.step = timed
        return core

    async with ThreadLane("worker", recorder, lambda: torch.set_num_threads(options.threads)) as lane:
        trainer = await lane.run(lambda: Trainer(options), name="trainer")
        policy = trainer.policy
        config = json.loads(policy.config.to_json_string(use_diff=False))
        config |= {"architectures": [type(policy.module).__name__]}
        made = CoreSpec(policy.dtype, int(policy.config.vocab_size), ())
        numbers = {"max_sequences": sequences, "max_context": context, "kv_positions": positions}
        async with VllmEngine(make, made, None, lane, recorder, **numbers) as engine:
            await engine.update_weights(-1)
            yield Ours(engine, lane, trainer, ends)


# -- vLLM by itself


@contextmanager
def arguments(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of `LLM` and `AsyncLLM`: as they come, on the same cores, with a cache for all."""
    os.environ |= {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}"}
    sequences, context, _ = longest(options)
    with contextlib.ExitStack() as stack:
        folder = options.model
        if not folder:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            config_of(options.layers).save_pretrained(folder)
        yield {
            "model": folder,
            "skip_tokenizer_init": True,
            "load_format": "auto" if options.model else "dummy",
            "dtype": options.dtype,
            "generation_config": "vllm",
            "max_model_len": context,
            "max_num_seqs": sequences,
            "kv_cache_memory_bytes": CACHE,
        }


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


# -- children


def turns() -> Iterator[dict[str, Any]]:
    """Of a side: those that come on standard input."""
    print("ready", flush=True)
    for line in sys.stdin:
        yield json.loads(line)


def answer(**found: float) -> None:
    """Of a side, to its turn."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print("turn " + json.dumps(found | {"mib": peak}), flush=True)


class Side:
    """A child. `found`: its answers, by what was asked."""

    def __init__(self, name: str, dtype: str, options: argparse.Namespace) -> None:
        given = json.dumps(vars(options) | {"dtype": dtype})
        environment = {"OMP_NUM_THREADS": str(options.threads), "VLLM_LOGGING_LEVEL": "ERROR"}
        environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        began = time.perf_counter()
        self.found: dict[Any, list[dict[str, float]]] = {}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = start(__name__, "side", name, given, env=environment, **pipes)
        self._read("ready")
        self.start = time.perf_counter() - began

    def turn(self, key: Any, **asked: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        self.found.setdefault(key, []).append(json.loads(self._read("turn ")))

    def close(self) -> None:
        """With what it has started: vLLM's own end of its processes may never come."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        family = psutil.Process(self.process.pid).children(recursive=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(ENDED_S)
        for each in [*family, self.process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait()

    def median(self, key: Any, name: str) -> float:
        return median(each[name] for each in self.found[key][1:])  # the first warms up

    def _read(self, begin: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(begin):
                return line.removeprefix(begin)
        raise RuntimeError(f"a side ended: {self.process.wait()}")


def side(name: str, given: str) -> None:
    """In the child."""
    options = argparse.Namespace(**json.loads(given))
    if name == "offline":
        offline(options)
    else:
        asyncio.run(by_async_llm(options) if name == "async" else by_us(options))


def take_turns(dtype: str, options: argparse.Namespace) -> dict[str, Side]:
    """Every side, after all turns of all jobs; the first turn has few tokens and warms up. The order turns; all are closed."""
    sides = {name: Side(name, dtype, options) for name in options.sides}
    for number in range(options.turns + 1):
        for name in sorted(sides, reverse=bool(number % 2)):
            for sequences, tokens in options.jobs:
                count = tokens if number else min(tokens, WARM_UP)
                sides[name].turn((sequences, tokens), number=number, sequences=sequences, tokens=count)
                seconds = sides[name].found[sequences, tokens][-1]["seconds"]
                print(f"turn {number}: {name}, {sequences} x {count}, {seconds:.1f} s", file=sys.stderr, flush=True)
    for side in sides.values():
        side.close()
    return sides


def rows_of(dtype: str, options: argparse.Namespace) -> Iterator[tuple[object, ...]]:
    sides = take_turns(dtype, options)
    for job in options.jobs:
        for name, side in sides.items():
            seconds, tokens, bind = (side.median(job, each) for each in ("seconds", "tokens", "bind"))
            speeds = f"{tokens / seconds:.0f}", f"{tokens / (seconds - bind):.0f}", f"{bind * 1e3:.0f}"
            yield dtype, f"{job[0]} x {job[1]}", name, *speeds, f"{side.start:.0f}", f"{side.median(job, 'mib'):.0f}"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--jobs", nargs="+", type=job, default=[(64, 128), (16, 512)], metavar="SEQUENCESxTOKENS")
    parser.add_argument("--model", help="a directory; left out: random weights of SmolLM2's sizes")
    for name, default in (("layers", 30), ("threads", 2), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)


def main(options: argparse.Namespace) -> int:
    print(f"{machine()}, {options.threads} thread(s), `{command()}`", end="\n\n")
    rows = [row for dtype in options.dtype for row in rows_of(dtype, options)]
    print("\n".join(table(COLUMNS.split(";"), rows)))
    return 0
