"""Kills and stops the generation workers of whole runs at random moments, and the runs, and looks at what becomes of them.

    python tools/chaos workers --lives 10
    python tools/chaos workers --minutes 15 --blows 8

A life is a run of the quickstart with two workers, which goes on from the checkpoint of the one before. It takes blows: SIGKILL or
SIGSTOP to one of the workers, wherever that is (at work, starting anew, before its first sequence). Then it is ended: SIGTERM or
SIGKILL to the node, or a worker is killed before it has come up for the first time. Then this must hold:

    goes on     after a blow, steps are committed and every lost worker is replaced, within `PATIENCE_S`; or the run has ended by
                itself, and its last words name the worker and how it died
    ended       the node in time, and nothing of it is left: no process; in shared memory nothing, or after SIGKILL nothing
                that the start of the next life has not swept
    exact       the newest checkpoint loads, and of the prompts that its cursors have passed as many are trained as its version
                says; no group is twice in what a life has trained

Prints a line for each life that breaks one of them (its output is kept), and a table. Exits 1 where there was any.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from chaos.runs import STARTED_S, Life, add_common, keep_life, run_lives
from commands import left_in_shared_memory, wait_for

from asyncrl.telemetry.sinks import read_jsonl

WORKERS = 2
SILENT_S = 6.0  # after which a stopped worker is killed, at work or while it starts
PATIENCE_S = 150.0  # that, and two starts of a worker on a machine with other work
LOOK_S = 0.2  # there is no event that a foreign process could set
SETTINGS = (
    f"generation.placement=worker generation.workers={WORKERS} generation.threads=1 watchdog.loop_timeout_s={SILENT_S} "
    "telemetry.rollouts_per_step=64"
)
ENDS = {"TERM": "SIGTERM", "KILL": "SIGKILL", "START": "SIGTERM; a worker was killed in its first start"}
NAMED = re.compile(r"worker \d (\(process \d+\)|died 3 times in a row)")
Books = list[dict[str, Any]]


class WorkersLife(Life):
    """A life with workers. `how`: TERM, KILL: to the node; START: a worker is killed before there is a step."""

    def __init__(self, folder: Path, how: str, chance: random.Random) -> None:
        super().__init__(folder, 1, "replicate", how, SETTINGS.split(), launched=False)
        self.chance = chance
        self.began = time.time()
        self.hit: dict[int, str] = {}  # by process number

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def workers(self) -> list[psutil.Process]:
        found = []
        for each in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "asyncrl.generation.worker.main" in each.cmdline():  # a zombie has none
                    found.append(each)
        return found

    def new_lines(self) -> Books:
        return [line for line in read_jsonl(self.run / "metrics.jsonl") if line["time"] > self.began]

    def until(self, true: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> str | None:
        """A sentence where it does not come true. Where the run has ended meanwhile, that is for `named`."""
        if wait_for(lambda: self.ended or true(), patience_s, LOOK_S):
            return None
        return f"{what}: not within {patience_s:g} s"

    def blow(self, signals: Sequence[str]) -> str | None:
        """To a worker that has not had one."""
        time.sleep(self.chance.choice((0.0, self.chance.uniform(0.0, 2.0))))
        fresh = [each for each in self.workers() if each.pid not in self.hit]
        if not fresh:
            return None
        victim, how = self.chance.choice(fresh), self.chance.choice(signals)
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(getattr(signal, f"SIG{how}"))
            self.hit[victim.pid] = how
            return how
        return None

    def recovered(self) -> bool:
        """All that were hit have been replaced, and two steps came after that."""
        deaths = [int(line.get("engine/worker_deaths", 0)) for line in self.new_lines()]
        return sum(deaths) >= len(self.hit) and not any(deaths[-2:]) and len(deaths) >= 3

    def named(self) -> Iterator[str]:
        """What is wrong with an end that nobody asked for."""
        said, code = self.log.read_text(errors="replace", encoding="utf-8"), self.process.poll()
        last = said[-4000:]
        if code != 7 or not self.hit or not NAMED.search(last):
            yield f"ended with {code}, which no blow explains: {last[-300:]!r}"
        elif not any(f"(process {pid})" in last for pid in self.hit):
            yield f"ended with {code}, and names none of {list(self.hit)}: {last[-300:]!r}"

    def twice(self) -> Iterator[str]:
        """Groups that this life has trained more than once, or in part."""
        steps = [int(line["step"]) for line in self.new_lines()]
        steps = steps[:-2] if self.how == "KILL" else steps  # the last ones may not have been written
        seen = Counter[int]()
        for step in steps:
            rows = read_jsonl(self.run / "rollouts" / f"step_{step}.jsonl")
            members = Counter(int(row["group_id"]) for row in rows)
            if any(count != 4 for count in members.values()):
                yield f"step {step} trained groups in part: {dict(members)}"
            seen.update(set(members))
        if again := [group for group, count in seen.items() if count > 1]:
            yield f"trained more than once: {again[:5]}"


def lead(life: WorkersLife, options: argparse.Namespace, counts: Counter[str], strangers: list[str]) -> Iterator[str]:
    """One life to its last signal; what is wrong with it. `strangers`: dead segments that were there before."""
    if life.how == "START":
        if wrong := life.until(lambda: len(life.workers()) == WORKERS, "its workers", STARTED_S):
            yield wrong
        counts["worker, SIGKILL in its first start"] += life.blow(("KILL",)) is not None
    if wrong := life.until(lambda: len(life.new_lines()) >= 3, "three steps", STARTED_S):
        yield wrong
        return
    if left := set(dead_segments()) - set(strangers):
        yield f"not swept by its start: {left}"
    while len(life.hit) < options.blows and not life.ended:
        how = life.blow(options.signals)
        if how is None:
            time.sleep(LOOK_S)
            continue
        counts[f"worker, SIG{how}"] += 1
        if life.chance.random() < 0.7 and (wrong := life.until(life.recovered, f"on after SIG{how}")):
            yield wrong
            return
    if wrong := life.until(life.recovered, "on after all"):
        yield wrong


def dead_segments() -> list[str]:
    """Workers' segments whose node is dead."""
    found = [
        re.fullmatch(r"asyncrl\.worker-[a-z]+-\d+\.(\d+)\.[0-9a-f]{12}.*", name) for name in os.listdir("/dev/shm")
    ]
    return [match[0] for match in found if match and not psutil.pid_exists(int(match[1]))]


def finish(life: WorkersLife) -> Iterator[str]:
    """End it, and look at what it left."""
    asked, life.how = life.how, "TERM"
    if life.ended or asked == "KILL":
        life.how = "KILL"  # as to what it has saved
    if life.ended:
        yield from life.named()
        return
    if asked == "KILL":
        life.process.kill()
        life.process.wait()
        if left := life.remaining(10.0):
            yield f"left processes: {[' '.join(each.cmdline())[:80] for each in left]}"
        return
    yield from life.end()
    if life.process.poll() != 143:
        yield f"ended with {life.process.poll()} after SIGTERM"
    if left_names := left_in_shared_memory(f".{life.process.pid}."):
        yield f"left in /dev/shm: {left_names}"


def attack(options: argparse.Namespace, keep: Path) -> Counter[str]:
    """What was done how often, and how many lives of each end were wrong ("broken ...")."""
    lives, chance, counts, began = options.lives, random.Random(options.seed), Counter[str](), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-workers-"))
    strangers, last = dead_segments(), False
    for number in range(lives):
        last = number == lives - 1 or time.monotonic() - began > 60.0 * options.minutes
        how = "TERM" if last and lives > 1 else chance.choice(options.ends)  # whom nobody follows must leave nothing
        life = WorkersLife(folder, how, chance)
        try:
            found = [*lead(life, options, counts, strangers)]
            end = "run ended by itself, the worker named" if life.ended else f"node, {ENDS[how]}"
            found += [*finish(life)]
        finally:
            if not life.ended:  # this program is being ended itself
                life.process.terminate()
        found += [*life.twice()]
        found += [*life.judge()] if life.steps() else []
        counts[end] += 1
        if found:
            counts[f"broken {end}"] += 1
            keep_life(folder, keep / f"life_{number}", f"life {number} ({end}, {life.hit}): {'; '.join(found)}")
            shutil.rmtree(life.run)
        if last:
            break
    shutil.rmtree(folder)
    return counts


def add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--lives", type=int, default=10, help="at most")
    parser.add_argument("--blows", type=int, default=6, help="to the workers of a life")
    parser.add_argument("--ends", nargs="+", choices=ENDS, default=list(ENDS))
    parser.add_argument("--signals", nargs="+", choices=("KILL", "STOP"), default=["KILL", "STOP"])
    parser.add_argument("--seed", type=int, default=0)


def main(options: argparse.Namespace) -> int:
    return run_lives(attack, options, "what was hit, and how", "times")
