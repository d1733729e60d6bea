"""What the native part of the records gains where it counts: all that a run does to a group from outside, ring to microbatch.

    python tools/measure_records.py [--rounds 9] [--groups 240] [--members 16] [--tokens 2048] [--out FILE.md]

A producer process pushes groups with `asyncrl.client`; a Runtime with the dry run's trainer takes them through its shared-memory
door: lease, checks, stash, `submit`, store, advantages, packing, commit. What is timed begins behind the first steps and ends
with the last. Each round starts both processes anew, once with native code and once with ASYNCRL_NATIVE=0, in turns. CPU time is
that of the consumer's event loop (its thread), of its whole process, and of the producer; wall time is that of both together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from asyncrl.client import Client, Scored  # noqa: E402
from asyncrl.records.native import records  # noqa: E402
from asyncrl.telemetry.machine import describe_cpu  # noqa: E402

PER_STEP, WARM_UP, PROMPT = 4, 10, 128  # groups of a step; steps before the first that is timed; tokens
COLUMNS = 21  # bytes of a token: id, mask, two log-probs, version, and what lies between them
TIMES = ("loop_us", "process_us", "wall_us")
NAMES = {"loop_us": "loop's thread", "process_us": "consuming process", "wall_us": "wall"}


def produce(name: str, groups: int, members: int, tokens: int) -> None:
    """Push until the run has ended; every member has columns of its own."""
    random = np.random.default_rng(0)
    mask = np.arange(tokens) >= PROMPT
    ids = random.integers(0, 256, (members, tokens)).astype(np.int32)
    ids[:, :PROMPT] = ids[0, :PROMPT]
    logprobs = np.where(mask, -random.random((members, tokens)), 0).astype(np.float32)
    scored = [
        Scored(ids[m], float(m % 2), mask, logprobs[m], sampled_logprobs=logprobs[m], prompt_length=PROMPT)
        for m in range(members)
    ]
    with Client.attach(name) as client:
        begun = time.process_time()
        for group in range(groups):
            client.push(group, scored)
        print((time.process_time() - begun) / groups * 1e6, flush=True)


async def consume(name: str, groups: int, members: int, tokens: int) -> dict[str, float]:
    from asyncrl import Runtime, load_config  # not for the producer, which needs no torch
    from asyncrl.runtime.door import DoorStatistics, serve
    from asyncrl.transport.rings.record_ring import RecordRing
    from asyncrl.transport.rings.types import RingSettings

    steps, room = groups // PER_STEP, members * (tokens * COLUMNS + 4096)
    config = load_config(
        [],
        [
            "engine.kind=dry_run", "train.kind=dry_run", f"train.max_steps={steps}", "telemetry.live=off",
            f"train.tokens_per_microbatch={members * tokens}", f"rollout.groups_per_step={PER_STEP}",
            f"rollout.group_size={members}", f"data.max_prompt_tokens={PROMPT}", f"rollout.max_tokens={tokens - PROMPT}",
            "dry_run.train_token_s=0", "dry_run.finish_s=0", "telemetry.trace_events=0",
            "rollout.max_staleness=16",  # steps of no length: what waits in the ring must not get too old meanwhile
        ],
    )  # fmt: skip
    counts, slots = DoorStatistics(), 2 * PER_STEP
    ring = RecordRing(name, RingSettings(size=(slots + 2) * room, slots=slots, ring_bytes=slots * room))
    async with ring, Runtime(config, write=False) as runtime:
        arguments = ("--produce", name, *map(str, (groups, members, tokens)))
        pipe = asyncio.subprocess.PIPE
        producer = await asyncio.create_subprocess_exec(sys.executable, __file__, *arguments, stdout=pipe)
        reports = runtime.steps()
        begun: tuple[float, ...] = ()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve(runtime, ring, counts))
            async for report in reports:
                if report.version == WARM_UP:
                    begun = now()
                elif report.version == steps:
                    ended = now()
        said, _ = await producer.communicate()
    if counts.submitted != groups or counts.too_old:
        raise SystemExit(f"{counts}: not every group was trained")
    timed = (steps - WARM_UP) * PER_STEP
    times = {each: (b - a) / timed * 1e6 for each, a, b in zip(TIMES, begun, ended, strict=True)}
    return {**times, "producer_us": float(said)}


def now() -> tuple[float, ...]:
    return time.thread_time(), time.process_time(), time.perf_counter()


def measured(native: bool, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--consume", f"records-{os.getpid()}"]
    command += [str(each) for each in (options.groups, options.members, options.tokens)]
    environment = {**os.environ, "ASYNCRL_NATIVE": str(int(native)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if found.pop("native") != native:
        raise SystemExit("the native part of the records is not built: pip install -e .")
    return found


def table(rows: list[tuple[dict[str, float], dict[str, float]]]) -> str:
    head = "| microseconds a group, medians | native | Python | native to Python, median of pairs | of all pairs |"
    lines = [head, "|---|---|---|---|---|"]
    for key, name in {**NAMES, "producer_us": "producing process"}.items():
        ours, theirs = ([row[side][key] for row in rows] for side in (0, 1))
        shares = sorted(a / b for a, b in zip(ours, theirs, strict=True))
        middle = statistics.median(shares)
        line = f"| {name} | {statistics.median(ours):,.0f} | {statistics.median(theirs):,.0f} | {middle:.3f} |"
        lines.append(f"{line} {shares[0]:.3f} to {shares[-1]:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="the native part of the records, from the ring to the microbatch")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--groups", type=int, default=240)
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--out", type=Path)
    for side in ("--produce", "--consume"):
        parser.add_argument(side, nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.produce:
        name, *numbers = options.produce
        produce(name, *map(int, numbers))
        return
    if options.consume:
        name, *numbers = options.consume
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            print(json.dumps({**runner.run(consume(name, *map(int, numbers))), "native": records is not None}))
        return
    rows = []
    for round_ in range(options.rounds):
        order = (True, False) if round_ % 2 == 0 else (False, True)
        found = {native: measured(native, options) for native in order}
        rows.append((found[True], found[False]))
        print(
            f"round {round_ + 1}: {found[True]['process_us']:,.0f} and {found[False]['process_us']:,.0f} us", flush=True
        )
    text = f"{options.members} x {options.tokens:,} tokens, {options.groups} groups, {options.rounds} rounds, {describe_cpu()}\n\n"
    text += table(rows) + "\n"
    print(text)
    if options.out:
        options.out.write_text(f"`python tools/measure_records.py`, {time.strftime('%Y-%m-%d')}: {text}")


if __name__ == "__main__":
    main()
