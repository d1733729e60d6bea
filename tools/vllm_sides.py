"""What the tools that measure vLLM share: models of SmolLM2's sizes, our engine as a worker has it, vLLM's own arguments, children.

A side is a child of the tool (`--child NAME`) with its own interpreter: it says "ready", takes turns as lines of JSON, and answers
each with one. Sides take turns, one at work and the others idle.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import psutil

from asyncrl.telemetry.machine import describe_cpu

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
        import asyncio

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

        self.policy = PolicyModel(module_of(options), options.dtype[0])
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
        room = adapter.Room(sequences + 1, context, positions + 17, 2048, size)
        form = adapter.ModelSpec(config, policy.weights.layout(), trainer.board.half(0))
        core = adapter.Core(form, room, choose)
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
            "dtype": options.dtype[0],
            "generation_config": "vllm",
            "max_model_len": context,
            "max_num_seqs": sequences,
            "kv_cache_memory_bytes": CACHE,
        }


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
        numbers = [f"--{each}={getattr(options, each)}" for each in ("layers", "threads")]
        jobs = ["--jobs", *(f"{sequences}x{tokens}" for sequences, tokens in options.jobs)]
        model = ["--model", options.model] if options.model else []
        command = [sys.executable, sys.argv[0], "--child", name, "--dtype", dtype, *numbers, *jobs, *model]
        environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "VLLM_LOGGING_LEVEL": "ERROR"}
        environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        began = time.perf_counter()
        self.found: dict[Any, list[dict[str, float]]] = {}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, env=environment
        )
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


def take_turns(dtype: str, options: argparse.Namespace) -> dict[str, Side]:
    """Every side, started one after the other, after all turns. They are closed."""
    return turns_of({name: Side(name, dtype, options) for name in options.sides}, options)


def turns_of(sides: dict[str, Side], options: argparse.Namespace) -> dict[str, Side]:
    """All turns of all jobs, after one of few tokens to warm up, in an order that turns. The sides are closed then."""
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


def print_table(
    options: argparse.Namespace, columns: Sequence[str], rows: Callable[[str, argparse.Namespace], list[str]]
) -> None:
    """`rows(dtype, options)` of every dtype, under machine, command, load and the names of the columns."""
    print(heading(options), end="\n\n")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for dtype in options.dtype:
        print("\n".join(rows(dtype, options)), flush=True)


def parser_of(text: str | None, sides: tuple[str, ...], jobs: list[tuple[int, int]]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--sides", nargs="+", default=list(sides), choices=sides)
    parser.add_argument("--jobs", nargs="+", type=job, default=jobs, metavar="SEQUENCESxTOKENS")
    parser.add_argument("--model", help="a directory; left out: random weights of SmolLM2's sizes")
    for name, default in (("layers", 30), ("threads", 2), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--child", choices=sides, help=argparse.SUPPRESS)
    return parser


def heading(options: argparse.Namespace) -> str:
    """Machine, command and load, for above a table."""
    given = " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
    if options.model:
        given = given.replace(options.model, "MODEL")
    load = os.getloadavg()[0]
    return f"{describe_cpu()}, {options.threads} thread(s), `python tools/{given}`; load at the start {load:.1f}"
