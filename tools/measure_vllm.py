"""vLLM as a worker has it, at the sizes of SmolLM2-135M: what new weights cost on whole steps, and its speed beside `LLM.generate`.

    .venv-vllm/bin/python tools/measure_vllm.py [--dtype float32 bfloat16] [--threads 2] [--write]

    packed     a version is bound and all linear layers are packed anew, then the step generates
    unpacked   a version is bound where it lies, and linear layers read it there
    offline    `vllm.LLM` as it comes (its own process, compiled), the same cores, with `LLM.generate` and no new weights

A step: --sequences prompts of 48 tokens, --tokens tokens each, sampled at temperature 1. Each side is a process of its own; they
take turns, one at work and the others idle; medians. --write puts the result into tools/results/vllm.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from asyncrl.telemetry.machine import describe_cpu

SIDES = ("packed", "unpacked", "offline")
PROMPT = 48
RESULT = Path(__file__).parent / "results" / "vllm.md"


def config_of(layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


def prompts(sequences: int, turn: int) -> list[list[int]]:
    """No two alike, in no turn."""
    return [[(7919 * (turn * sequences + i) + 31 * j) % 49_000 for j in range(PROMPT)] for i in range(sequences)]


# -- the sides, each in a process of its own


def offline(options: argparse.Namespace) -> None:
    os.environ |= {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}"}
    from vllm import LLM, SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=options.tokens, ignore_eos=True, detokenize=False)
    with tempfile.TemporaryDirectory() as folder:
        config_of(options.layers).save_pretrained(folder)
        llm = LLM(
            folder, skip_tokenizer_init=True, load_format="dummy", dtype=options.dtype[0], generation_config="vllm",
            max_model_len=PROMPT + options.tokens, max_num_seqs=options.sequences, kv_cache_memory_bytes=2 << 30,
        )  # fmt: skip
        for turn in turns():
            asked = [{"prompt_token_ids": each} for each in prompts(options.sequences, turn)]
            began = time.perf_counter()
            found = llm.generate(asked, params, use_tqdm=False)
            answer(time.perf_counter() - began, sum(len(each.outputs[0].token_ids) for each in found), 0.0)


async def ours(options: argparse.Namespace, pack: bool) -> None:
    import numpy as np
    import torch
    from transformers import LlamaForCausalLM

    from asyncrl.concurrency.lane import ThreadLane
    from asyncrl.generation.embedded.engine import cache_shape
    from asyncrl.generation.vllm.engine import Made, VllmEngine
    from asyncrl.generation.vllm.versions import load_adapter
    from asyncrl.models.parameters.flat import ServedParameters
    from asyncrl.telemetry.recorder import Recorder
    from asyncrl.types import GenerationRequest, SamplingParams

    dtype, context = getattr(torch, options.dtype[0]), PROMPT + options.tokens
    torch.manual_seed(0)
    flat = ServedParameters(LlamaForCausalLM(config_of(options.layers)), dtype)
    halves = [flat.working, flat.working.clone()]
    config = json.loads(config_of(options.layers).to_json_string(use_diff=False))
    recorder = Recorder(max_events=0)

    def make(choose: Any) -> Any:
        adapter = load_adapter()
        size = cache_shape(config_of(options.layers), 1, 1).nbytes(dtype)
        room = adapter.Room(options.sequences + 1, context, options.sequences * context, 2048, size)
        return adapter.Core(adapter.Form(config, flat.layout(), halves[0]), room, choose, pack=pack)

    async with ThreadLane("worker", recorder, lambda: torch.set_num_threads(options.threads)) as lane:
        numbers = {"max_sequences": options.sequences, "max_context": context}
        async with VllmEngine(make, Made(dtype, 49_152, ()), None, lane, recorder, **numbers) as engine:
            sampling = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
            await engine.update_weights(-1)
            for turn in turns():
                asked = [np.array(each, np.int32) for each in prompts(options.sequences, turn)]
                began = time.perf_counter()
                await lane.run(lambda turn=turn: engine.move_to(halves[turn % 2], turn), name="engine/bind")
                bound = time.perf_counter() - began
                found = await asyncio.gather(
                    *(engine.generate(GenerationRequest(ids, sampling, seed)) for seed, ids in enumerate(asked))
                )
                answer(time.perf_counter() - began, sum(len(each.token_ids) for each in found), bound)


def turns() -> Any:
    """Of a side: the numbers that come on standard input."""
    print("ready", flush=True)
    for line in sys.stdin:
        yield int(line)


def answer(seconds: float, tokens: int, bind: float) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print("turn " + json.dumps({"seconds": seconds, "tokens": tokens, "bind": bind, "mib": peak}), flush=True)


# -- the program


class Side:
    """A child."""

    def __init__(self, name: str, dtype: str, options: argparse.Namespace) -> None:
        numbers = [f"--{each}={getattr(options, each)}" for each in ("layers", "sequences", "tokens", "threads")]
        command = [sys.executable, __file__, "--child", name, "--dtype", dtype, *numbers]
        environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "VLLM_LOGGING_LEVEL": "ERROR"}
        began = time.perf_counter()
        self.found: list[dict[str, float]] = []
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, env=environment
        )
        self._read("ready")
        self.start = time.perf_counter() - began

    def turn(self, number: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        self.found.append(json.loads(self._read("turn ")))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def median(self, name: str) -> float:
        return median(each[name] for each in self.found[1:])  # the first warms up

    def _read(self, begin: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(begin):
                return line.removeprefix(begin)
        raise RuntimeError(f"a side ended: {self.process.wait()}")


def measure(dtype: str, options: argparse.Namespace) -> list[str]:
    sides = {name: Side(name, dtype, options) for name in options.sides}
    for number in range(options.turns + 1):
        for name in sorted(sides, reverse=bool(number % 2)):
            sides[name].turn(number)
    rows = []
    for name, side in sides.items():
        side.close()
        seconds, tokens = side.median("seconds"), side.median("tokens")
        rows.append(
            f"| {dtype} | {name} | {tokens / seconds:.0f} | {seconds:.2f} | {side.median('bind') * 1e3:.0f} | {side.start:.0f} | "
            f"{side.median('mib'):.0f} |"
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    for name, default in (("layers", 30), ("sequences", 64), ("tokens", 64), ("threads", 2), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.child == "offline":
        offline(options)
        return 0
    if options.child is not None:
        asyncio.run(ours(options, pack=options.child == "packed"))
        return 0
    lines = [
        f"{describe_cpu()}, {options.threads} thread(s), {date.today()}; `python tools/measure_vllm.py "
        f"{' '.join(sys.argv[1:])}`: {options.sequences} x {options.tokens} tokens, {options.layers} layers; load at the start "
        f"{os.getloadavg()[0]:.1f}",
        "",
        "| dtype | side | tokens/s of whole steps | step, s | new weights, ms | start, s | peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for dtype in options.dtype:
        lines += measure(dtype, options)
    print("\n".join(lines))
    if options.write:
        RESULT.write_text("# vLLM in a worker\n\n" + "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
