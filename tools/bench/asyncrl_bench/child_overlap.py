"""`child.py sides` and `child.py overlap`: both sides of a run each alone, and the run itself with what its lanes did.

sides     groups are generated as fast as it goes, while nothing trains; then those groups are trained as fast as it goes, while
          nothing is generated. In one run with a worker, by its own engine, pumps and trainer
overlap   the run, in either placement: steps, every closure of every lane, hand-overs of weights; behind the last step, while
          the run still goes on, what a plain copy of the same weights takes on the trainer's lane, and a checkpoint of them
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import anyio
import torch

from asyncrl.runtime.runtime import Runtime
from asyncrl.telemetry.budget import kind_of
from asyncrl.telemetry.recorder import LANE_PREFIX
from asyncrl.telemetry.records import TraceEvent
from asyncrl.types import Trajectory

from .child_step import Window, configuration
from .job import StepJob, new_loop
from .machine import versions

AHEAD = 3  # steps whose groups are asked for at a time, as at staleness 2
COPIES, CHECKPOINTS = 9, 3
SHOWN_STEPS = 3  # of the timeline
PARTS = ("token_gap", "stop", "usual_gap", "decode", "gap", "bind", "decode_after")
Groups = deque[list[Trajectory]]


async def measure_sides(job: StepJob) -> dict[str, Any]:
    steps = job.warmup_steps + job.steps
    everything = job.of(overrides=(*job.overrides, f"rollout.max_staleness={steps + AHEAD}"))  # all of one version
    with anyio.CancelScope() as scope:
        async with Runtime(configuration(everything), write=False) as runtime:
            generation, groups = await _generate(runtime, job)
            training = await _train(runtime, job, groups)
            scope.cancel()
    return {"generation": generation, "training": training}


async def _generate(runtime: Runtime, job: StepJob) -> tuple[dict[str, float], Groups]:
    """Until there are groups for all steps; what is measured is behind the warm-up, and while more groups wait all the time.

    Tokens are those of the groups that ended in between: what a worker says of itself is up to a tenth of a second old."""
    rows = await asyncio.to_thread(prompts_of, job.prompts)
    wanted = (job.warmup_steps + job.steps + AHEAD) * job.groups_per_step
    warm, last = job.warmup_steps * job.groups_per_step, (job.warmup_steps + job.steps) * job.groups_per_step
    numbers, groups, marks = iter(range(wanted)), Groups(), list[float]()

    async def ask() -> None:
        for number in numbers:
            groups.append(await runtime.generate(rows[number % len(rows)], n=job.group_size))
            if len(groups) in (warm, last):
                marks.append(time.perf_counter())

    async with anyio.create_task_group() as tasks:
        for _ in range(AHEAD * job.groups_per_step):
            tasks.start_soon(ask)
    began, ended = marks
    tokens = sum(int(member.mask.sum()) for members in islice(groups, warm, last) for member in members)
    return {"seconds": ended - began, "tokens": tokens}, groups


def prompts_of(file: str) -> list[Any]:
    return [json.loads(line)["prompt"] for line in Path(file).read_text(encoding="utf-8").splitlines()]


async def _train(runtime: Runtime, job: StepJob, groups: Groups) -> dict[str, float]:
    window = Window(job.warmup_steps, job.steps)

    async def submit() -> None:
        while groups:
            members = groups.popleft()
            rewards = [each / max(len(members) - 1, 1) for each in range(len(members))]
            await runtime.submit(members, rewards)

    async with anyio.create_task_group() as tasks:
        reports = runtime.steps()
        tasks.start_soon(submit)
        async for report in reports:
            if window.add(report, 0.0):
                break
        tasks.cancel_scope.cancel()
    found = window.result()
    return {"seconds": found["seconds"], "tokens": found["sampled_tokens"], "prompt_tokens": found["prompt_tokens"]}


async def measure_overlap(job: StepJob) -> dict[str, Any]:
    window, more = Window(job.warmup_steps, job.steps), dict[str, Any]()
    with anyio.CancelScope() as scope:
        async with Runtime(configuration(job), write=False) as runtime, anyio.create_task_group() as tasks:

            async def watch() -> None:
                async for report in runtime.steps():
                    if window.add(report, runtime.built.ports.engine.statistics().get("tokens", 0.0)):
                        break
                plain = await plain_costs(runtime)
                parts = zip(plain.pop("save"), plain.pop("load"), strict=True)
                more["plain"] = plain | {"checkpoint": [save + load for save, load in parts]}
                scope.cancel()

            tasks.start_soon(watch)
            await runtime.run()
    if not more:
        raise RuntimeError(f"the run ended after {len(window.times)} of {job.warmup_steps + job.steps} steps")
    events = [event for event in runtime.recorder.events() if event.phase == "X"]
    lanes = {
        track.removeprefix(LANE_PREFIX): sorted((e for e in events if e.track == track), key=lambda e: e.start)
        for track in sorted({event.track for event in events if event.track.startswith(LANE_PREFIX)})
    }
    first, last = window.times[job.warmup_steps - 1], window.times[-1]
    result = window.result()
    return {
        **result,
        "staleness_mean": sum(r.metrics["staleness/mean"] for r in window.reports[-job.steps :]) / job.steps,
        "busy": {name: busy(own, first, last, job.steps) for name, own in lanes.items()},
        "load": os.getloadavg(),
        "hand_over": hand_over(events, lanes, first, last) | more["plain"],
        "timeline": timeline(lanes, window.times[-SHOWN_STEPS - 1 :]),
        "versions": versions("transformers"),
    }


def busy(own: Sequence[TraceEvent], first: float, last: float, steps: int) -> dict[str, float]:
    """Seconds a step by kind of closure."""
    found: dict[str, float] = {}
    for event in own:
        inside = min(event.start + event.duration, last) - max(event.start, first)
        if inside > 0:
            kind = kind_of(event.name)
            found[kind] = found.get(kind, 0.0) + inside / steps
    return found


def hand_over(
    events: Sequence[TraceEvent], lanes: dict[str, list[TraceEvent]], first: float, last: float
) -> dict[str, Any]:
    """Milliseconds at each version within the window; nothing where trainer and engine share a lane.

    `total`, from the end of the optimizer's closure to the last worker's answer: until its copy begins, the copy, until the
    worker's closure has ended that it was in, and the answer's way back. `gap`: between two decode steps with the move in it.
    `stop`, `token_gap`: see `stops`.
    """
    workers = [own for name, own in lanes.items() if name.startswith("worker")]
    if not workers:
        return {}
    found: dict[str, list[float]] = {name: [] for name in PARTS}
    for own in workers:
        inside = [event for event in own if first <= event.start <= last]
        decodes = [i for i, event in enumerate(inside) if event.name == "engine/decode"]
        for i, j in pairwise(decodes):
            between = [event.name for event in inside[i + 1 : j]]
            gap = inside[j].start - _end(inside[i])
            if set(between) <= {"engine/check"}:
                found["usual_gap"].append(gap)
                found["decode"].append(inside[j].duration)
            elif "engine/bind" in between and "engine/prefill" not in between:
                found["gap"].append(gap)
                found["decode_after"].append(inside[j].duration)
        found["bind"] += [event.duration for event in inside if event.name == "engine/bind"]
        usual, longest = stops(inside)
        found["token_gap"] += usual
        found["stop"] += longest
    found |= {"to_write": [], "write": [], "to_bind": [], "to_answer": [], "total": []}
    lane_events = sorted((event for own in lanes.values() for event in own), key=_end)
    for published in events:
        if published.name != "publish" or published.start < first or _end(published) > last:
            continue
        done = [_end(event) for event in lane_events if event.name == "train/finish" and _end(event) <= published.start]
        write = [event for event in lane_events if event.name == "publish/write" and event.start >= published.start][:1]
        binds = [e for e in lane_events if e.name == "engine/bind" and published.start <= e.start <= _end(published)]
        if done and write and binds:
            found["to_write"].append(write[0].start - done[-1])
            found["write"].append(write[0].duration)
            found["to_bind"].append(binds[-1].start - _end(write[0]))
            found["to_answer"].append(_end(published) - _end(binds[-1]))
            found["total"].append(_end(published) - done[-1])
    return {name: [1e3 * value for value in values] for name, values in found.items()}


def stops(own: Sequence[TraceEvent]) -> tuple[list[float], list[float]]:
    """Seconds between two tokens of a running request, from the end of one decode step to the end of the next, of a worker's lane:
    (the usual ones, the longest around each move). Around: to the second step after it.
    Gaps with a prefill in them are left out: requests come at any time."""
    usual, longest = list[float](), list[float]()
    decodes = [i for i, event in enumerate(own) if event.name == "engine/decode"]
    around, after = 0.0, 0  # the longest gap so far of a move that is under way; steps that still belong to it
    for i, j in pairwise(decodes):
        between = {event.name for event in own[i + 1 : j]}
        gap = 0.0 if "engine/prefill" in between else _end(own[j]) - _end(own[i])
        if "engine/bind" in between:
            after = 2
        if after:
            around = max(around, gap)
        elif between <= {"engine/check"} and gap:
            usual.append(gap)
        if after:
            after -= 1
            if not after and around:
                longest.append(around)
                around = 0.0
    return usual, longest


def timeline(lanes: dict[str, list[TraceEvent]], commits: Sequence[float]) -> dict[str, Any]:
    """What ran from the first of these commits on: [closure, start, end] by lane, in seconds."""
    zero, last = commits[0], commits[-1]
    return {
        "commits": [round(each - zero, 5) for each in commits],
        "lanes": {
            name: [
                [event.name, round(max(event.start, zero) - zero, 5), round(min(_end(event), last) - zero, 5)]
                for event in own
                if _end(event) > zero and event.start < last
            ]
            for name, own in lanes.items()
        },
    }


def _end(event: TraceEvent) -> float:
    return event.start + event.duration


async def plain_costs(runtime: Runtime) -> dict[str, Any]:
    """Milliseconds of plain copies, and of writing and loading a checkpoint, on the trainer's lane, the run going on around it."""
    policy, lane = runtime.built.policy, runtime.built.lanes[0]
    assert policy is not None
    source = policy.weights.working
    target = torch.empty_like(source).fill_(0)

    def copy() -> None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)

    def save(file: Path) -> None:
        from safetensors.torch import save_file

        save_file({name: each.detach() for name, each in policy.module.named_parameters()}, file)

    def load(file: Path) -> None:
        from safetensors.torch import load_file

        for each in load_file(file).values():
            each.clone()  # it is only mapped until somebody reads it

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.safetensors"
        return {
            "bytes": source.nbytes,
            "memcpy": await _timed(copy, lane.run, COPIES),
            "save": await _timed(partial(save, file), lane.run, CHECKPOINTS),
            "load": await _timed(partial(load, file), lane.run, CHECKPOINTS),
        }


async def _timed(work: Callable[[], None], run: Callable[..., Awaitable[Any]], times: int) -> list[float]:
    def timed() -> float:
        began = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - began)

    await run(timed, name="bench/plain", priority=1)
    return [await run(timed, name="bench/plain", priority=1) for _ in range(times)]


def run_sides(job: StepJob) -> dict[str, Any]:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(measure_sides(job))


def run_overlap(job: StepJob) -> dict[str, Any]:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(measure_overlap(job))
