"""`asyncrl bench overlap`: a dry run on two devices of equal cost: how close a step comes to the longer of the two.

    generation alone  ->  cost of a trained token at which both lanes are equally busy (a few runs)  ->  measured runs

The real loop, ledger, slots, queues and pumps run in real time, preset `async`; only the work on the lanes is a wait of known
length. So what a step takes above the busier lane is what the runtime loses: waits of one for the other, and its own Python.
One lane for both (`dry_run.shared_device`) is measured beside it: there a step should take the sum.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncrl.telemetry.machine import describe_cpu

from . import report
from .shares import positive, public_command

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


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl bench overlap", allow_abbrev=False, description=__doc__.partition("\n\n")[0]
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="smoke test: short steps, one repetition")
    add("--decode-step-ms", type=float, default=10.0, help="cost of one decode step (10)")
    add("--groups", type=positive, default=8, help="prompts per step (8)")
    add("--group-size", type=positive, default=8, help="completions per prompt (8)")
    add("--max-tokens", type=positive, default=128, help="longest completion (128)")
    add("--steps", type=positive, default=12, help="measured steps of a run; take a multiple of 3 (12)")
    add("--warmup-steps", type=positive, default=6, help="steps before them (6)")
    add(
        "--repetitions",
        type=positive,
        default=3,
        help="runs on two devices and on one, in turns; medians are shown (3)",
    )
    add("--out", default="tools/results", help="folder of the results (tools/results)")
    add("--name", default="bench_overlap", help="name of the result file (bench_overlap)")
    add("overrides", nargs="*", metavar="a.b=c", help="settings, after the job's own")
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    options = parser().parse_args(arguments)
    if options.quick:
        options.groups, options.group_size, options.max_tokens = 2, 2, 16
        options.decode_step_ms, options.steps, options.warmup_steps, options.repetitions = 2.0, 3, 3, 1
    return options


def run_pace(options: argparse.Namespace, train_token_s: float, shared: bool) -> Pace:
    from .child import loop_factory

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
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
                    decoded.append(runtime.built.rooms.engine.statistics()["decode_steps"])
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


def balance(options: argparse.Namespace) -> float:
    """Seconds per trained token at which both lanes have the same to do. Decode steps get fuller and fewer as training
    gets faster, so it takes a few runs to find."""
    alone = run_pace(options, 0.0, shared=False)
    cost = alone.decode / alone.tokens
    for _ in range(_TRIALS):
        pace = run_pace(options, cost, shared=False)
        _say(f"balancing: decode {pace.decode:.3f} s, training {pace.train:.3f} s a step")
        if abs(pace.decode - pace.train) <= _BALANCED * pace.decode:
            break
        cost *= pace.decode / pace.train
    return cost


def measure(options: argparse.Namespace, command: str) -> str:
    cost = balance(options)
    runs: dict[str, list[Pace]] = {"two devices": [], "one device": []}
    for _ in range(options.repetitions):
        for name, own in runs.items():
            own.append(run_pace(options, cost, shared=name == "one device"))
            _say(f"{name}: step {own[-1].step:.3f} s, decode {own[-1].decode:.3f} s, training {own[-1].train:.3f} s")
    summary = {
        "two devices, step to the longer lane": statistics.median(pace.to_longer for pace in runs["two devices"]),
        "one device, step to the sum": statistics.median(pace.to_sum for pace in runs["one device"]),
    }
    path = Path(options.out) / f"{options.name}.json"
    document = {
        "bench": "overlap",
        "date": time.strftime("%Y-%m-%d %H:%M:%S +0000", time.gmtime()),
        "command": command,
        "cpu": describe_cpu(),
        "train_token_s": cost,
        "summary": summary,
        "runs": {name: [asdict(pace) for pace in own] for name, own in runs.items()},
    }
    report.write_json(path, document)
    lines = ["| dry run, lanes of equal cost | ratio |", "|---|---|"]
    lines += [f"| {name} | {value:.3f} |" for name, value in summary.items()]
    return "\n".join([*lines, "", f"written: {path}"])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    print(measure(parse(arguments), public_command("overlap", arguments)))
    return 0
