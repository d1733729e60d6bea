"""What the native part of the records gains where it counts: all that a run does to a group from outside, ring to microbatch.

    python tools/measure_records.py [--rounds 9] [--groups 240] [--tokens 2048] [--out FILE.md]

It is the side `client` of `asyncrl bench transport` at full speed: a producer process pushes groups of 16 with `asyncrl.client`,
and the door and pumps of a run take them: lease, checks, stash, intake, store, advantages, packing, commit. Each round starts
both processes anew, once with native code and once with ASYNCRL_NATIVE=0, in turns. CPU time is that of the consumer's event
loop (its thread), of its whole process, and of the producer; wall time is that of both together.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools" / "bench")]

from asyncrl.telemetry.machine import describe_cpu  # noqa: E402
from asyncrl_bench.job import HandoverJob  # noqa: E402
from asyncrl_bench.processes import environment, run_json  # noqa: E402

NAMES = {
    "loop_s": "loop's thread",
    "consumer_s": "consuming process",
    "wall_s": "wall",
    "producer_s": "producing process",
}


def measured(native: bool, options: argparse.Namespace) -> dict[str, float]:
    """Microseconds a group, by the names of `NAMES`."""
    job = HandoverJob("client", "uvloop", options.tokens, options.groups, pace_s=0.0, seconds=600.0)
    given = environment(1, package=True) | {"ASYNCRL_NATIVE": str(int(native))}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "asyncrl_bench.child", "handover", job.write(Path(folder) / "job.json")]
        found = run_json(words, environment=given, log=Path(folder) / "log", timeout_s=900.0)
    if (found["versions"]["records"] == "native") != native:
        raise SystemExit("the native part of the records is not built: pip install -e .")
    return {name: found[name] / found["packed"]["groups"] * 1e6 for name in NAMES}


def table(rows: list[tuple[dict[str, float], dict[str, float]]]) -> str:
    head = "| microseconds a group, medians | native | Python | native to Python, median of pairs | of all pairs |"
    lines = [head, "|---|---|---|---|---|"]
    for key, name in NAMES.items():
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
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for round_ in range(options.rounds):
        order = (True, False) if round_ % 2 == 0 else (False, True)
        found = {native: measured(native, options) for native in order}
        rows.append((found[True], found[False]))
        us = [f"{found[native]['consumer_s']:,.0f}" for native in (True, False)]
        print(f"round {round_ + 1}: {us[0]} and {us[1]} us", flush=True)
    text = f"16 x {options.tokens:,} tokens, {options.groups} groups, {options.rounds} rounds, {describe_cpu()}\n\n"
    text += table(rows) + "\n"
    print(text)
    if options.out:
        options.out.write_text(f"`python tools/measure_records.py`, {time.strftime('%Y-%m-%d')}: {text}")


if __name__ == "__main__":
    main()
