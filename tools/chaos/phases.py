"""Every fault in every phase of a run: while it starts, while it trains, while it ends; and the life after it.

    python tools/chaos phases                             # one moment of each phase
    python tools/chaos phases --all                       # each stage of the start and of the end
    python tools/chaos phases --ranks 2 --faults blocks SIGSTOP --phases run    # the second rank meets the fault
    python tools/chaos phases --ranks 2 --rank 0                                # the first one does, which hosts the store
    python tools/chaos phases --all --minutes 5 --tally met.json                # a part of it; the next call goes on from there

A life of a few steps meets one fault of `faults.py` at one moment. Then this must hold:

    ended       by itself, within its deadline, with success only where the fault leaves a run whole
    named       what it says has the culprit in it: the stage, the frame, the signal, the rank, the error
    left        nothing: no process, nothing in /dev/shm
    whole       its newest checkpoint loads, every byte of it verified
    exact       a second life goes on from there to the end, and every prompt was trained once

Prints a line for each that breaks one of them (its output is kept), and a table. Exits 1 where there was any.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chaos.runs import GROUPS, Life, add_common, keep_life, run_lives, trained
from commands import TOOLS, tally_of

from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.errors import CheckpointError
from asyncrl.telemetry.sinks import read_jsonl

STEPS, LATER = 6, 9  # of the life that meets the fault, and of the one after it
STANDSTILL_S = 20.0  # of a stage, a lane or everything; the event loop has less
DEADLINE_S = 100.0  # from the fault on; torchrun alone may take 30 of them to end what does not answer
PHASES = ("start", "run", "end")
FAULTY = str(TOOLS / "chaos" / "faults.py")


@dataclass(frozen=True)
class Expected:
    """Codes: of one rank without a launcher (several give 1). Words: a pattern of what it must say, with NUMBER for that of the
    rank. Codes with 0: it may also go on, and then says nothing."""

    codes: tuple[int, ...]
    words: str = ""
    ranks: tuple[int, ...] = (1, 2)
    phases: tuple[str, ...] = PHASES


STALLED = (1, 4)  # 1: ended by the thread that needs no GIL
EXPECTED = {
    "blocks": Expected(STALLED, r"faults\.py"),
    "lane blocks": Expected((0, *STALLED), r"faults\.py"),  # 0: where a lane has no more to do
    "holds the GIL": Expected(STALLED, r"faults\.py"),
    "raises": Expected((1,), "a planted error"),
    "SIGKILL": Expected((-9,)),
    "SIGSTOP": Expected((), r"[Rr]ank NUMBER|rank\s*:\s*NUMBER|Signal 9", ranks=(2,)),  # alone, nobody is there to tell
    "SIGTERM": Expected((143, -15), "SIGTERM|^$"),
    "SIGINT": Expected((130, -2), "SIGINT|^$"),
    "SIGHUP": Expected((129, -1), "SIGHUP|^$"),
    "children killed": Expected((0, 6), "reward|worker"),
    "children stopped": Expected((0, 6), "reward|worker"),
    "disk full": Expected((0, 1, 2, 5, 11), r"File too large|EFBIG|Errno 27"),
    "no descriptors": Expected((0, 1, 2, 4, 5, 6, 11), r"[Tt]oo many open files|Errno 24"),
    "output gone": Expected((0,)),
    "names gone": Expected((0, 6, 11), "/dev/shm|shared memory"),
    "task cancelled": Expected((1, 10), "cancel", phases=("run",)),
    "weights NaN": Expected((3,), "NaN|nan|finite|weights", phases=("run",)),
}


@dataclass
class Faulty(Life):
    """A life of a few steps, with short deadlines."""

    last: int = STEPS

    def __post_init__(self) -> None:
        limits = "watchdog.interval_s=1 watchdog.loop_timeout_s=8 watchdog.abort_grace_s=15 reward.timeout_s=10"
        still = " ".join(f"watchdog.{name}_timeout_s={STANDSTILL_S:g}" for name in ("stall", "stage", "lane"))
        self.settings = f"{limits} {still} checkpoint.every=2 train.max_steps={self.last}".split()
        self.launched = self.ranks > 1
        super().__post_init__()

    def watch(self, met: Path | None = None) -> Iterator[str]:
        """Until it has ended; what is wrong with the end. met: a file that the fault makes."""
        try:
            yield from self._watch(met)
        finally:
            for each in self.family():  # this program is being ended itself
                each.kill()

    def _watch(self, met: Path | None) -> Iterator[str]:
        fault_at, began = None, time.monotonic()
        while self.process.poll() is None:
            self.family()
            if fault_at is None and met is not None and met.exists():
                fault_at = time.monotonic()
            since, limit = (began, 300.0) if fault_at is None else (fault_at, DEADLINE_S)
            if time.monotonic() - since > limit:
                yield f"did not end within {limit:g} s"
                break
            time.sleep(0.1)  # there is no event that a foreign process could set
        # Reward workers learn of the death from their pipe.
        if left := self.remaining(5.0):
            yield f"left processes: {[' '.join(each.cmdline())[:80] for each in left]}"
        for each in left:
            each.kill()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        yield from self.left_in_shared_memory()


def moments(folder: Path) -> dict[str, list[str]]:
    """Of each phase, in their order, by a life without a fault."""
    seen = folder / "moments"
    life = Faulty(folder, 1, "replicate", "", (), False, (FAULTY,), of("record", "", 0, seen))
    if wrong := [*life.watch()] or life.process.returncode:
        raise SystemExit(f"a life without a fault: {wrong}\n{life.log.read_text(encoding='utf-8')}")
    shutil.rmtree(life.run)
    found: dict[str, list[str]] = {phase: [] for phase in PHASES}
    trains = False
    for line in seen.read_text(encoding="utf-8").splitlines():
        kind, _, name = line.partition(" ")
        name = re.split(r"[:0-9]", name)[0].strip() if kind == "stage" else name
        trains = trains or kind == "version"
        phase = "run" if kind == "version" else "end" if trains else "start"
        moment = f"{kind} {name}"
        if moment not in found[phase] and (kind == "stage" or name == "4"):
            found[phase].append(moment)
    return found


def of(fault: str, moment: str, rank: int, met: Path) -> dict[str, str]:
    return {"FAULT": fault, "FAULT_AT": moment, "FAULT_RANK": str(rank), "FAULT_MET": str(met)}


def meet(folder: Path, ranks: int, fault: str, moment: str, rank: int | None = None) -> list[str]:
    """What is wrong with a life whose `rank` (None: the last one) meets `fault`, and with the one after it."""
    met, expected = folder / "met", EXPECTED[fault]
    rank = ranks - 1 if rank is None else rank
    words = expected.words.replace("NUMBER", str(rank))
    environment = of(fault, moment, rank, met)
    first = Faulty(folder, ranks, "replicate", "", (), False, (FAULTY,), environment)
    wrong = [*first.watch(met)]
    said, code = first.log.read_text(errors="replace", encoding="utf-8"), first.process.returncode
    if not met.exists():
        return [*wrong, f"never came to {moment!r} (code {code})"]
    if ranks == 1 and code not in expected.codes:
        wrong.append(f"ended with {code}, and not with {' or '.join(map(str, expected.codes))}")
    if ranks > 1 and (code == 0) > (0 in expected.codes):
        wrong.append("ended with success")
    if code and not re.search(words, said):
        wrong.append(f"says nothing that matches {words!r}")
    wrong += _whole(first.run, told=fault != "disk full")
    shutil.copy(first.log, folder / "first.txt")
    second = Faulty(folder, ranks, "replicate", "", last=LATER)
    after = [*second.watch()]
    if second.process.returncode:
        after.append(f"ended with {second.process.returncode}")
    after += _whole(second.run, LATER, told=fault != "disk full")  # what the first one could not write
    return [*wrong, *(f"the life after it: {each}" for each in after)]


def _whole(run: Path, version: int | None = None, *, told: bool = True) -> Iterator[str]:
    """What is wrong with its newest checkpoint, which may be missing where no version is asked for. told: its lines of metrics
    could be written."""
    try:
        found = CheckpointStore(run / "checkpoints").load_latest()
    except CheckpointError as error:
        yield f"the newest checkpoint does not load: {error}"
        return
    steps = [int(line["step"]) for line in read_jsonl(run / "metrics.jsonl")]
    if told and (steps != [*range(1, len(steps) + 1)] or len(steps) < (0 if found is None else found.version)):
        yield f"the newest checkpoint is {found and found.version}, and the lines of the metrics are of the steps {steps}"
    if found is None or (version is not None and found.version != version):
        if version is not None:
            yield f"the newest checkpoint is {found and found.version}, and not {version}"
        return
    if (count := trained(found)) != GROUPS * found.version:
        yield f"{count} prompts are passed and not to come again, {GROUPS * found.version} were trained"


def attack(options: argparse.Namespace, keep: Path) -> Counter[str]:
    """How many lives met which fault at which moment, and in how many something was wrong ("broken ...")."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-phases-") as folder:
        found = moments(Path(folder))
    chosen = {
        phase: found[phase] if options.all else found[phase][len(found[phase]) // 2 :][:1] for phase in options.phases
    }
    print(chosen, flush=True)
    done, counts, until = tally_of(options.tally), Counter[str](), time.monotonic() + 60.0 * options.minutes
    for fault in options.faults:
        expected = EXPECTED[fault]
        for phase, moment in ((phase, each) for phase, those in chosen.items() for each in those):
            name = f"{fault} | {phase} | {moment}"
            if options.ranks not in expected.ranks or phase not in expected.phases or name in done:
                continue
            if time.monotonic() > until:
                return counts
            folder = tempfile.mkdtemp(prefix="asyncrl-phases-")
            wrong = meet(Path(folder), options.ranks, fault, moment, options.rank)
            counts[name] += 1
            if wrong:
                counts[f"broken {name}"] += 1
                kept = keep / f"{fault}_{moment}".replace(" ", "_")
                keep_life(Path(folder), kept, f"{fault} at {moment!r}: {'; '.join(wrong)}")
            shutil.rmtree(folder)
    return counts


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    parser.add_argument("--rank", type=int, choices=(0, 1), help="that meets the fault; the last one")
    parser.add_argument("--faults", nargs="+", choices=EXPECTED, default=list(EXPECTED))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--all", action="store_true", help="every stage of the start and of the end")
    add_common(parser)


def main(options: argparse.Namespace) -> int:
    return run_lives(attack, options, "fault | phase | moment", "lives")
