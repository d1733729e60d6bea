"""`child.py weights`: what requests in flight see of new weights, in a run with one worker whose trainer does nothing else.

Each turn asks for all groups at once. When every sequence has some tokens, the weights are changed on the trainer's lane as the
optimizer's closure would, and the run's own sink brings them to the worker: checks, copy onto the board, fixed row, the
worker's move between two of its steps, its answer. What requests see is read from the worker's lane: whatever lies
between the ends of two of its steps.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import anyio

from asyncrl.runtime.runtime import Runtime
from asyncrl.telemetry.recorder import LANE_PREFIX
from asyncrl.telemetry.records import TraceEvent

from .child_overlap import plain_costs, prompts_of, stops
from .child_step import configuration
from .job import StepJob, new_loop
from .machine import versions

BEGUN, MORE = (
    4,
    8,
)  # tokens of every sequence, on average, before what is usual is looked at; and from there to the change
# What samples tokens of all that runs: a worker with vLLM compares outputs so, too.
STEPS = {"embedded": ("engine/decode",), "vllm": ("engine/decode", "engine/outputs")}


async def measure_weights(job: StepJob) -> dict[str, Any]:
    """Milliseconds; `steps` changes are measured, after `warmup_steps`."""
    rows = await asyncio.to_thread(prompts_of, job.prompts)
    turns = list[tuple[float, float, float, float]]()  # usual from, changed, answered, ended
    with anyio.CancelScope() as scope:
        async with Runtime(configuration(job), write=False) as runtime:
            for turn in range(job.warmup_steps + job.steps):
                turns.append(await _turn(runtime, job, rows, turn))
                print(f"turn {turn}: answered after {turns[-1][2] - turns[-1][1]:.2f} s", file=sys.stderr, flush=True)
            await anyio.sleep(1.0)  # until the worker has told what its lane did
            plain = await plain_costs(runtime)
            scope.cancel()
    lane = sorted((e for e in runtime.recorder.events() if e.track == f"{LANE_PREFIX}worker0"), key=lambda e: e.start)
    measured = turns[job.warmup_steps :]
    steps = STEPS[runtime.config.generation.engine]
    found = [seen([e for e in lane if began <= e.start <= ended], steps) for began, _, _, ended in measured]
    if not all(found):
        raise RuntimeError("requests ended before the weights had changed: --max-tokens is too small")
    return {
        **{name: [each[name] for each in found] for name in found[0]},
        "total": [1e3 * (answered - changed) for _, changed, answered, _ in measured],
        **plain,
        "versions": versions("transformers"),
    }


async def _turn(runtime: Runtime, job: StepJob, rows: list[Any], turn: int) -> tuple[float, float, float, float]:
    engine, lane, policy = runtime.built.ports.engine, runtime.built.lanes[0], runtime.built.policy
    assert policy is not None
    sequences = job.groups_per_step * job.group_size
    before = engine.statistics()["tokens"]

    async def until(each: int) -> float:
        while engine.statistics()["tokens"] - before < each * sequences:  # noqa: ASYNC110  # the worker tells it now and then
            await anyio.sleep(0.02)
        return time.perf_counter()

    def change() -> int:
        for _, master in policy.flat.named_masters():
            master.mul_(1.0 + 1e-4)
        return policy.advance()

    async with anyio.create_task_group() as tasks:
        for group in range(job.groups_per_step):
            row = rows[(turn * job.groups_per_step + group) % len(rows)]
            tasks.start_soon(partial(runtime.generate, row, n=job.group_size))
        usual = await until(BEGUN)
        await until(BEGUN + MORE)
        version = await lane.run(change, name="train/finish")
        changed = time.perf_counter()
        for sink in runtime.built.ports.sinks:
            await sink.update_weights(version)
        answered = time.perf_counter()
    return usual, changed, answered, time.perf_counter()


def seen(lane: list[TraceEvent], steps: tuple[str, ...]) -> dict[str, float]:
    """Of one turn, in ms. `step`: between the ends of two steps, `step_longest`: the longest such time; `stop`: the longest around
    the move, and `pause`: what that is longer than usual; `between`: the longest time around the move in which no step runs."""
    own = [event._replace(name=steps[0]) if event.name in steps else event for event in lane]
    usual, longest = stops(own)
    binds = [event.duration for event in own if event.name == "engine/bind"]
    if not usual or not longest or not binds:
        return {}
    found = {
        "step": median(usual), "step_longest": max(usual), "stop": longest[0], "pause": longest[0] - median(usual),
        "between": max(_between(own, steps[0])), "bind": binds[0],
    }  # fmt: skip
    return {name: 1e3 * value for name, value in found.items()}


def _between(own: list[TraceEvent], step: str) -> Iterator[float]:
    """Seconds from the end of a step to the start of the next, wherever there is the move."""
    places = [i for i, event in enumerate(own) if event.name == step]
    for i, j in pairwise(places):
        if any(event.name == "engine/bind" for event in own[i + 1 : j]):
            yield own[j].start - own[i].start - own[i].duration


def run_weights(job: StepJob) -> dict[str, Any]:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(measure_weights(job))
