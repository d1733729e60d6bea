"""What new weights cost the requests of a worker: its server, engine and lane in this process, 8 sequences that decode meanwhile.

    python tools/measure_moves.py MODEL [--dtype bfloat16] [--moves 3] [--ways fresh late ahead board]

    board      as a run does it: the trainer has packed the weights for all, on a board beside the one of the weights
    ahead      where it cannot: packed copies are made in slices between decode steps, beside those in use
    late       as where there is no memory for that: the first step after the move writes them, in place
    fresh      the same by torch, without the native kernel

Milliseconds of CPU time of the lane's thread, so that a busy machine shows less; `asyncrl bench overlap` has the wall time of a
whole run. The longest gap between two tokens is from the end of a decode step to the end of the next one, between the announcement
and the fourth step after the move.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import time
from statistics import median
from typing import Any

import numpy as np
import torch

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.concurrency.supervisor import plain_task_group
from asyncrl.config.schema import ModelConfig
from asyncrl.generation.worker.control import ControlLine
from asyncrl.generation.worker.opening import attach_copies
from asyncrl.generation.worker.server import Server
from asyncrl.generation.worker.serving import EmbeddedServing
from asyncrl.models.loading import load_policy
from asyncrl.models.native import library
from asyncrl.models.parameters import reordered
from asyncrl.models.reading import Outline, describe_rest, open_reader
from asyncrl.telemetry.machine import describe_cpu
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.memory.board import Board
from asyncrl.types import GenerationRequest, PostedVersion, SamplingParams
from asyncrl.weights.copies import PackedCopies

SEQUENCES, TOKENS, CONTEXT, BETWEEN, AFTER = 8, 2000, 2048, 12, 4
WAYS = ["fresh", "late", "ahead", "board"]
DECODE, PREPARE, BIND = "engine/decode", "engine/prepare", "engine/bind"


class Timed(ThreadLane):
    """It keeps name and CPU time of every closure, in order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.closures: list[tuple[str, float]] = []

    def _execute(self, job: Any) -> None:
        began = time.thread_time()
        super()._execute(job)
        self.closures.append((job.name, 1e3 * (time.thread_time() - began)))

    def steps(self) -> int:
        return sum(name == DECODE for name, _ in self.closures)

    async def reach(self, steps: int) -> None:
        while self.steps() < steps:  # noqa: ASYNC110  a thread counts
            await asyncio.sleep(0.01)


async def measure(config: ModelConfig, way: str, moves: int) -> list[dict[str, float]]:
    trainer, _ = load_policy(config)
    weights = trainer.weights
    owner = Board.create(weights.size, trainer.dtype, weights.layout_digest())
    reader = Board.attach(owner.description, os.dup(owner.fd), owner.layout)
    copies = PackedCopies.of(trainer) if way == "board" else None

    def write(version: int) -> float:
        """What packing takes of it, in milliseconds."""
        owner.write(version % 2, version, weights.working)
        began = time.thread_time()
        if copies is not None:
            copies.complete(version % 2, version)
        return 1e3 * (time.thread_time() - began)

    write(0)
    ours, theirs = socket.socketpair()
    node, line, producer = ControlLine(ours, "worker"), ControlLine(theirs, "node"), None
    async with Timed("worker0", Recorder(max_events=0), lambda: torch.set_num_threads(1)) as lane:
        rest, half = describe_rest(trainer), reader.half(0)
        policy = await lane.run(
            lambda: open_reader(Outline(config), half, rest, trainer.path, CONTEXT, 0), name="engine/load"
        )
        recorder, read = Recorder(max_events=0), None
        if copies is not None:
            halves, fd = [reader.half(0), reader.half(1)], os.dup(copies.board.fd)
            message = json.loads(json.dumps(copies.message()))
            read = await lane.run(lambda: attach_copies(policy, halves, message, fd), name="engine/copies")
        engine = EmbeddedServing(
            policy,
            None,
            lane,
            recorder,
            max_sequences=SEQUENCES,
            max_context=CONTEXT,
            packs_ahead=way in ("ahead", "board"),
        )
        server = Server(line, engine, lane, reader, producer, read)  # type: ignore[arg-type]  # requests are given to the engine
        found = []
        async with engine, plain_task_group() as tasks:
            tasks.start_soon(server.follow)
            server.tell(PostedVersion(0, 0, None))
            await node.receive()
            for number in range(SEQUENCES):
                sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
                tasks.start_soon(engine.generate, GenerationRequest(np.arange(5, 25, dtype=np.int32), sampling, number))
            for version in range(1, moves + 1):
                await lane.reach(lane.steps() + BETWEEN)
                first = len(lane.closures)
                packed = write(version)
                server.tell(PostedVersion(version, version % 2, None))
                await node.receive()
                await lane.reach(lane.steps() + AFTER)
                found.append(
                    figures(lane.closures[first - BETWEEN : first], lane.closures[first:]) | {"packed before": packed}
                )
            tasks.cancel_scope.cancel()
    return found


def figures(before: list[tuple[str, float]], own: list[tuple[str, float]]) -> dict[str, float]:
    gaps, since = [0.0], 0.0
    for name, took in own:
        since += took
        if name == DECODE:
            gaps.append(since)
            since = 0.0
    moved = next(number for number, (name, _) in enumerate(own) if name == BIND)
    slices = [took for name, took in own if name == PREPARE]
    return {
        "a decode step before": median(took for name, took in before if name == DECODE),
        "the first one after the move": next(took for name, took in own[moved:] if name == DECODE),
        "longest gap between two tokens": max(gaps),
        "the move": own[moved][1],
        "slices before it": float(len(slices)),
        "a slice": median(slices) if slices else 0.0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--moves", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{describe_cpu()}; kernels: {library.build()}, one thread; load {os.getloadavg()[0]:.1f}")
    for way in options.ways:
        known = reordered.KNOWN_BLOCKS
        if way == "fresh":
            reordered.KNOWN_BLOCKS = ()
        try:
            runs = asyncio.run(measure(ModelConfig(path=options.model, dtype=options.dtype), way, options.moves))
        finally:
            reordered.KNOWN_BLOCKS = known
        print(
            f"  {way}: " + ", ".join(f"{name} {median(run[name] for run in runs):.2f}" for name in runs[0]), flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
