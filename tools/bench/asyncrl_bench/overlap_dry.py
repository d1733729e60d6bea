"""A dry run on two devices of equal cost: how close a step comes to the longer of the two.

    generation alone  ->  cost of a trained token at which both lanes are equally busy (a few runs)  ->  measured runs

The real loop, ledger, slots, queues and pumps run in real time, preset `async`; only the work on the lanes is a wait of known
length. So what a step takes above the busier lane is what the runtime loses: waits of one for the other, and its own Python.
One lane for both (`dry_run.shared_device`) is measured beside it: there a step should take the sum.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import asdict, dataclass

from .command import OVERRIDES, Bench, Measured, Place, option, result_options
from .job import new_loop
from .plots import markdown

_BALANCED = 0.02  # relative difference between the lanes that counts as equal
_TRIALS = 5


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds per step in the steady state: by the clock, and of nominal work on either lane."""

    step: float
    decode: float
    train: float
    tokens: float  # packed tokens trained in a step

    @property
    def to_longer(self) -> float:
        return self.step / max(self.decode, self.train)

    @property
    def to_sum(self) -> float:
        return self.step / (self.decode + self.train)


def run_pace(options: argparse.Namespace, train_token_s: float, shared: bool) -> Pace:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(_pace(options, train_token_s, shared))


async def _pace(options: argparse.Namespace, train_token_s: float, shared: bool) -> Pace:
    import anyio

    from asyncrl.config.load import load_config
    from asyncrl.runtime.runtime import Runtime

    decode_s = options.decode_step_ms / 1e3
    settings = [
        "preset=async", "engine.kind=dry_run", "train.kind=dry_run", "dry_run.finish_s=0", f"dry_run.decode_step_s={decode_s}",
        f"dry_run.train_token_s={train_token_s}", f"dry_run.shared_device={str(shared).lower()}",
        f"rollout.group_size={options.group_size}", f"rollout.groups_per_step={options.groups}",
        f"rollout.max_tokens={options.max_tokens}", "train.max_steps=1000000", "checkpoint.save_final=false",
        "telemetry.trace=false", "telemetry.report=false", "telemetry.live=off", *options.overrides,
    ]  # fmt: skip
    first, last = options.warmup_steps - 1, options.warmup_steps + options.steps - 1
    times, decoded, tokens = list[float](), list[float](), list[float]()
    with anyio.CancelScope() as scope:
        async with Runtime(load_config([], settings), write=False) as runtime, anyio.create_task_group() as tasks:

            async def watch() -> None:
                async for step in runtime.steps():
                    times.append(time.perf_counter())
                    decoded.append(runtime.built.ports.engine.statistics()["decode_steps"])
                    tokens.append(step.metrics["dry_run/packed_tokens"])
                    if len(times) > last:
                        scope.cancel()

            tasks.start_soon(watch)
            await runtime.run()
    trained = sum(tokens[first + 1 : last + 1]) / options.steps
    return Pace(
        step=(times[last] - times[first]) / options.steps,
        decode=(decoded[last] - decoded[first]) / options.steps * decode_s,
        train=trained * train_token_s,
        tokens=trained,
    )


def balance(place: Place) -> float:
    """Seconds per trained token at which both lanes have the same to do. Decode steps get fuller and fewer as training
    gets faster, so it takes a few runs to find."""
    alone = run_pace(place.options, 0.0, shared=False)
    cost = alone.decode / alone.tokens
    for _ in range(_TRIALS):
        pace = run_pace(place.options, cost, shared=False)
        place.say(f"balancing: decode {pace.decode:.3f} s, training {pace.train:.3f} s a step")
        if abs(pace.decode - pace.train) <= _BALANCED * pace.decode:
            break
        cost *= pace.decode / pace.train
    return cost


def measure(place: Place) -> Measured:
    cost = balance(place)
    runs: dict[str, list[Pace]] = {"two devices": [], "one device": []}
    for _ in range(place.options.repetitions):
        for name, own in runs.items():
            own.append(pace := run_pace(place.options, cost, shared=name == "one device"))
            place.say(f"{name}: step {pace.step:.3f} s, decode {pace.decode:.3f} s, training {pace.train:.3f} s")
    summary = {
        "two devices, step to the longer lane": statistics.median(pace.to_longer for pace in runs["two devices"]),
        "one device, step to the sum": statistics.median(pace.to_sum for pace in runs["one device"]),
    }
    paces = {name: [asdict(pace) for pace in own] for name, own in runs.items()}
    place.write(train_token_s=cost, summary=summary, runs=paces)
    rows = [[name, f"{value:.3f}"] for name, value in summary.items()]
    return Measured(markdown(["dry run, lanes of equal cost", "ratio"], rows))


BENCH = Bench(
    "overlap-dry",
    __doc__,
    "short steps, one repetition",
    (
        option("--decode-step-ms", 10.0, "cost of one decode step", 2.0),
        option("--groups", 8, "prompts per step", 2),
        option("--group-size", 8, "completions per prompt", 2),
        option("--max-tokens", 128, "longest completion", 16),
        option("--steps", 12, "measured steps of a run; take a multiple of 3", 3),
        option("--warmup-steps", 6, "steps before them", 3),
        option("--repetitions", 3, "runs on two devices and on one, in turns; medians are shown", 1),
        *result_options("bench_overlap_dry"),
        OVERRIDES,
    ),
    measure,
)
