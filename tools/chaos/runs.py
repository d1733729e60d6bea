"""Ends whole runs at random moments, and looks at what they leave: one rank and two, replicated and sharded.

    python tools/chaos runs --lives 20                            # every kind in turns
    python tools/chaos runs --lives 100 --kinds 2-fsdp --signals TERM INT
    python tools/chaos runs --lives 500 --warm                    # a quarter of the CPU time: nobody loads torch anew
    python tools/chaos runs --warm --minutes 8 --seed 3 --tally kills.json   # a part of many, which add up in that file

A life starts (or goes on from the checkpoint of the one before), commits steps, and is ended by a signal: SIGTERM or SIGINT to
the launcher or to all of the job at once, SIGKILL to the launcher, to one rank or to all of them. One in five is ended while it
starts. Then this must hold:

    ended       within torchrun's 30 s and a little, nobody by the watchdog; nothing is left: no process, nothing in /dev/shm
    saved       after a signal to the launcher the last committed version, SIGKILL included (the ranks hear of it), and no save
                that is half done; also after SIGKILL of a rank that is not the first, where the model is not cut; else what
                `checkpoint.every` promises, with one save on its way
    told        every step up to the last one has one line of metrics, and so has what the checkpoint holds
    whole       the newest checkpoint loads, every byte of it verified
    exact       of the prompts that its cursors have passed, as many are trained as its version says; no others are missing

Processes are found whoever their parent is: those that nobody owns any more become children of this program.
Prints a line for each life that breaks one of them (its output is kept), and a table. Exits 1 where there was any.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from commands import EXAMPLES, ROOT, print_tally, wait_for

from asyncrl.checkpoint.store import Checkpoint, CheckpointStore
from asyncrl.errors import CheckpointError
from asyncrl.telemetry.sinks import read_jsonl

GROUPS = 4  # of a step
EVERY = 5  # steps, of a checkpoint
STARTED_S = 180.0
ENDED_S = 45.0
START_S = 5.0  # until the first steps, about; measured by each life that gets there
EARLY = 0.2  # of all lives are ended while they start
KINDS = {"1": (1, "replicate"), "2": (2, "replicate"), "2-fsdp": (2, "fsdp")}
TO_LAUNCHER = ("TERM", "INT", "TERM job", "INT job", "KILL launcher")
SIGNALS = (*TO_LAUNCHER, "KILL one", "KILL all")
_PR_SET_CHILD_SUBREAPER = 36


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Processes whose parent has ended become children of this one, and so `Life.family` finds them."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@dataclass
class Life:
    """One process tree that trains in `folder/runs/run`. Inside of `adopting`."""

    folder: Path
    ranks: int
    sharding: str
    how: str
    settings: Sequence[str] = ()  # more of them
    launched: bool = True  # by torchrun
    program: Sequence[str] = ("-m", "asyncrl.main")
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.run = self.folder / "runs" / "run"
        self.before = self.lines()
        self.saved_before = CheckpointStore(self.run / "checkpoints").latest_version() or 0
        self.shared = set(os.listdir("/dev/shm"))  # of others
        self.log = self.folder / "output.txt"
        self.first_killed = True  # of its ranks; known after `end`
        self.numbers: set[int] = set()  # of all its processes that were seen
        self.process = self._start()
        self.others = {each for each in psutil.Process().children() if each.pid != self.process.pid}

    def _start(self) -> subprocess.Popen[bytes]:
        resume = self.saved_before > 0
        settings = [
            f"run.name=run run.dir={self.folder}/runs run.overwrite={str(not resume).lower()} resume={str(resume).lower()}",
            f"model.path={ROOT}/tools/chaos/faults.py:build",
            f"rollout.groups_per_step={GROUPS} rollout.group_size=4 rollout.max_tokens=8 train.max_steps=1000000",
            f"checkpoint.every={EVERY} distributed.sharding={self.sharding} telemetry.live=off telemetry.rollouts_per_step=0",
        ]
        command = [sys.executable]
        if self.ranks > 1 or self.launched:
            command += ["-m", "torch.distributed.run", "--nproc-per-node", str(self.ranks)]
        command += [*self.program, str(EXAMPLES / "quickstart.yaml"), *" ".join(settings).split(), *self.settings]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **self.environment}
        with self.log.open("wb") as log:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def lines(self) -> list[tuple[int, float]]:
        """Step and time of each line of the metrics."""
        return [(int(line["step"]), line["time"]) for line in read_jsonl(self.run / "metrics.jsonl")]

    def steps(self) -> list[int]:
        return [step for step, _ in self.lines()]

    def family(self) -> list[psutil.Process]:
        """All of its processes that are there, the launcher first."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.process.pid)
            found = [launcher, *launcher.children(recursive=True)]
        for each in psutil.Process().children():
            if each in self.others or each.pid == self.process.pid:
                continue
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                found += [each, *each.children(recursive=True)]
                if each.status() == psutil.STATUS_ZOMBIE:  # adopted: nobody else would
                    os.waitpid(each.pid, os.WNOHANG)
        found = [each for each in dict.fromkeys(found) if is_alive(each)]
        self.numbers |= {each.pid for each in found}
        return found

    def remaining(self, seconds: float) -> list[psutil.Process]:
        """Those of its processes that are there after so long, or sooner none."""
        wait_for(lambda: not self.family(), seconds, 0.1)
        return self.family()

    def live(self, delay_s: float) -> str | None:
        """Until some steps are committed, and a little longer. A sentence where it ends by itself."""
        deadline = time.monotonic() + STARTED_S
        last = self.before[-1][0] if self.before else 0
        while len(steps := self.steps()) < 3 or steps[-1] <= last:
            if self.process.poll() is not None:
                return f"ended by itself with {self.process.returncode}"
            if time.monotonic() > deadline:
                return f"committed no step within {STARTED_S:g} s"
            self.family()
            time.sleep(0.2)  # there is no event that a foreign process could set
        return self.wait(delay_s)

    def wait(self, delay_s: float) -> str | None:
        """So long. A sentence where it ends by itself."""
        time.sleep(delay_s)
        return None if self.process.poll() is None else f"ended by itself with {self.process.returncode}"

    def end(self) -> Iterator[str]:
        """Send the signal, wait; what is wrong with the end."""
        self._signal(self.family())
        deadline = time.monotonic() + ENDED_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self.family()
            time.sleep(0.1)
        if self.process.poll() is None:
            yield f"did not end within {ENDED_S:g} s"
        # The ranks of a launcher that was killed have as long as they would have with it.
        if left := self.remaining(deadline - time.monotonic() if self.how == "KILL launcher" else 10.0):
            yield f"left processes: {[' '.join(each.cmdline())[:80] for each in left]}"
        for each in left:
            each.kill()
        yield from self.left_in_shared_memory()
        said = self.log.read_text(errors="replace", encoding="utf-8")
        if "=== asyncrl watchdog" in said:
            yield "was ended by the watchdog"
        if self.how in TO_LAUNCHER and "asyncrl: RankLost" in said:
            yield "calls it an error that another rank was stopped, too"

    def _signal(self, family: list[psutil.Process]) -> None:
        if self.how == "KILL one":
            ranks = [each for each in family if is_rank(each)]
            chosen = random.choice(ranks or family)
            self.first_killed = self.ranks == 1 or len(ranks) < self.ranks or rank_of(chosen, ranks) == 0
            family = [chosen]
        if self.how.startswith(("TERM", "INT")):  # a service manager signals all of a job at once
            name, _, job = self.how.partition(" ")
            for each in [self.process, *filter(is_rank, family)] if job else [self.process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.send_signal(getattr(signal, f"SIG{name}"))
        elif self.how == "KILL launcher":
            self.process.kill()
        else:
            for each in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()

    def left_in_shared_memory(self) -> Iterator[str]:
        numbers = {str(each) for each in self.numbers}
        names = {name for name in set(os.listdir("/dev/shm")) - self.shared if numbers & set(re.split(r"\W", name))}
        if names:
            yield f"left in /dev/shm: {sorted(names)}"
        for name in names:
            os.unlink(f"/dev/shm/{name}")

    def judge(self) -> Iterator[str]:
        """What is wrong with what it left."""
        store, steps = CheckpointStore(self.run / "checkpoints"), self.steps()
        if steps != [*range(1, len(steps) + 1)]:
            yield f"the lines of the metrics are of the steps {steps}"
        try:
            found = store.load_latest()
        except CheckpointError as error:
            yield f"the newest checkpoint does not load: {error}"
            return
        least, version = self._least(), 0 if found is None else found.version
        if version < least:
            yield f"the newest checkpoint is of version {version}, and not of {least}; {len(steps)} steps have a line"
        if version > len(steps):
            yield f"version {version} is saved, and only {len(steps)} steps have a line"
        if self.how in TO_LAUNCHER and (half := [*store.directory.glob(".tmp-*")]) and self.lines() != self.before:
            yield f"half a checkpoint: {half}"
        if found is not None and (count := trained(found)) != GROUPS * version:
            yield f"{count} prompts are passed and not to come again, {GROUPS * version} were trained"

    def _least(self) -> int:
        """The version that has to be saved."""
        if (
            self.lines() == self.before
        ):  # it has not come to a step, and perhaps not even to drop what was not saved before
            return self.saved_before
        last = self.steps()[-1] if self.steps() else 0
        if self.how in TO_LAUNCHER or (
            self.how == "KILL one" and self.sharding == "replicate" and not self.first_killed
        ):
            return max(self.saved_before, last)
        return max(self.saved_before, last - last % EVERY - EVERY)


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def is_rank(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        return process.name() == "asyncrl.main" or ("asyncrl.main" in words and "torch.distributed.run" not in words)
    return False


def rank_of(process: psutil.Process, ranks: list[psutil.Process]) -> int:
    """torchrun starts them in their order."""
    return sorted(ranks, key=lambda each: (each.create_time(), each.pid)).index(process)


def trained(checkpoint: Checkpoint) -> int:
    """Prompts that the cursors have passed, and that are not to be played again."""
    run = checkpoint.run
    ranks = run["world_size"]
    total = 0
    for rank in range(ranks):
        taken = set(range(rank, run["prompts"][str(rank)]["position"], ranks))
        again = run["prompts"][str(rank)]["again"]  # of the life before, not played since
        total += len(taken - set(run["untrained"][str(rank)]) - set(again))
    return total


def attack(plan: argparse.Namespace, keep: Path) -> Counter[str]:
    """How many lives had which end, and in how many something was wrong ("broken ...")."""
    chance, counts = random.Random(plan.seed), Counter[str]()
    random.seed(plan.seed)
    folders = {kind: Path(tempfile.mkdtemp(prefix=f"asyncrl-{kind}-")) for kind in plan.kinds}
    start_s, until = dict.fromkeys(plan.kinds, START_S), time.monotonic() + 60.0 * plan.minutes
    for number in range(plan.lives):
        if time.monotonic() > until:
            break
        kind, how = plan.kinds[number % len(plan.kinds)], chance.choice(list(plan.signals))
        early, began = chance.random() < plan.early, time.monotonic()
        life = Life(folders[kind], *KINDS[kind], how)
        try:
            if early:
                wrong = life.wait(chance.uniform(0.0, start_s[kind]))
            else:
                wrong = life.live(0.0)
                start_s[kind] = time.monotonic() - began
                wrong = wrong or life.wait(chance.uniform(0.0, 1.5))
            found = [wrong] if wrong else [*life.end()]
        finally:
            if life.process.poll() is None:  # this program is being ended itself
                life.process.terminate()
        found += [*life.judge()]
        name = f"{kind}, {how}{', while it starts' if early else ''}"
        counts[name] += 1
        if found:
            counts[f"broken {name}"] += 1
            keep_life(life.folder, keep / f"life_{number}", f"life {number} ({name}): {'; '.join(found)}")
        if found or chance.random() < 0.1:  # and a fresh start now and then
            shutil.rmtree(life.run, ignore_errors=True)
    for folder in folders.values():
        shutil.rmtree(folder)
    return counts


def keep_life(folder: Path, kept: Path, said: str) -> None:
    """Its files and its output, for somebody to look at."""
    shutil.copytree(folder, kept, symlinks=True)
    print(f"{said}; what it left: {kept}", flush=True)


def answer_signals() -> None:
    """Those that `timeout` or a terminal sends end the lives in hand, too. And what is started does not inherit that a shell has
    some of them ignored by what it runs in the background."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


def start_warm() -> None:
    """From now on."""
    global subprocess
    sys.path.append(str(ROOT / "tests"))
    import warm

    subprocess = warm.in_place_of_subprocess()  # type: ignore[assignment]  # what is used here has the same names


def run_lives(
    attack: Callable[[argparse.Namespace, Path], Counter[str]], options: argparse.Namespace, *heads: str
) -> int:
    """What was wrong is kept; a table of the rest. The exit code."""
    answer_signals()
    if options.warm:
        start_warm()
    keep = Path(tempfile.mkdtemp(prefix="asyncrl-lives-"))
    with adopting():
        counts = attack(options, keep)
    if not any(keep.iterdir()):
        keep.rmdir()
    return print_tally(counts, *heads, file=options.tally)


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no life after so long")
    parser.add_argument("--tally", type=Path, help="a JSON file to which the counts are added")
    parser.add_argument(
        "--warm", action="store_true", help="programs start from one that has loaded torch, as in tests"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--lives", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--signals", nargs="+", choices=SIGNALS, default=list(SIGNALS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--early", type=float, default=EARLY, help="share of lives that are ended while they start")


def main(options: argparse.Namespace) -> int:
    return run_lives(attack, options, "ended", "lives")
