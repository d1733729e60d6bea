"""Ends whole runs at random moments, and looks at what they leave: one rank and two, replicated and sharded.

    python tools/attack_runs.py --lives 20                            # every kind in turns
    python tools/attack_runs.py --lives 100 --kinds 2-fsdp --signals TERM INT
    python tools/attack_runs.py --lives 500 --warm                    # a quarter of the CPU time: nobody loads torch anew

A life starts (or goes on from the checkpoint of the one before), commits steps, and is ended by a signal: SIGTERM or SIGINT to
the launcher, SIGKILL to one rank or to all of them. Then this must hold:

    ended       within torchrun's 30 s and a little; nothing of it is left: no process, nothing in /dev/shm, no half checkpoint
    saved       after SIGTERM and SIGINT the last committed version; after SIGKILL what `checkpoint.every` promises
    whole       the newest checkpoint loads, every byte of it verified
    exact       of the prompts that its cursors have passed, as many are trained as its version says; no others are missing

Prints a line for each life that breaks one of them (its output is kept), and a table. Exits 1 where there was any.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from asyncrl.checkpoint.store import Checkpoint, CheckpointStore  # noqa: E402
from asyncrl.errors import CheckpointError  # noqa: E402
from asyncrl.telemetry.sinks import read_jsonl  # noqa: E402

GROUPS = 4  # of a step
EVERY = 5  # steps, of a checkpoint
STARTED_S = 180.0
ENDED_S = 45.0
KINDS = {"1": (1, "replicate"), "2": (2, "replicate"), "2-fsdp": (2, "fsdp")}
SIGNALS = ("TERM", "INT", "KILL one", "KILL all")


@dataclass
class Life:
    """One process tree that trains in `folder/runs/run`."""

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
        self.before = len(self.steps())
        self.shared = set(os.listdir("/dev/shm"))  # of others
        self.log = self.folder / "output.txt"
        resume = (self.run / "checkpoints" / "latest").exists()
        settings = [
            f"run.name=run run.dir={self.folder}/runs run.overwrite={str(not resume).lower()} resume={str(resume).lower()}",
            f"rollout.groups_per_step={GROUPS} rollout.group_size=4 rollout.max_tokens=8 train.max_steps=1000000",
            f"checkpoint.every={EVERY} distributed.sharding={self.sharding} telemetry.live=off telemetry.rollouts_per_step=0",
        ]
        command = [sys.executable]
        if self.ranks > 1 or self.launched:
            command += ["-m", "torch.distributed.run", "--nproc-per-node", str(self.ranks)]
        command += [
            *self.program,
            str(ROOT / "examples" / "quickstart.yaml"),
            *" ".join(settings).split(),
            *self.settings,
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **self.environment}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def steps(self) -> list[int]:
        return [int(line["step"]) for line in read_jsonl(self.run / "metrics.jsonl")]

    def live(self, delay_s: float) -> str | None:
        """Until some steps are committed, and a little longer. A sentence where it ends by itself."""
        deadline = time.monotonic() + STARTED_S
        while len(self.steps()) < 3 or self.steps()[-1] <= self.before:
            if self.process.poll() is not None:
                return f"ended by itself with {self.process.returncode}"
            if time.monotonic() > deadline:
                return f"committed no step within {STARTED_S:g} s"
            time.sleep(0.1)  # there is no event that a foreign process could set
        time.sleep(delay_s)
        return None

    def end(self) -> Iterator[str]:
        """Send the signal, wait; what is wrong with the end."""
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        ranks = [
            each
            for each in family
            if ("asyncrl.main" in each.cmdline() or each.name() == "asyncrl.main")
            and "torch.distributed.run" not in each.cmdline()
        ]
        if self.how == "KILL all":
            for each in family:
                if each.is_running():
                    each.kill()
        elif self.how == "KILL one":
            random.choice(ranks or family).kill()
        else:
            self.process.send_signal(getattr(signal, f"SIG{self.how}"))
        try:
            self.process.wait(ENDED_S)
        except subprocess.TimeoutExpired:
            yield f"did not end within {ENDED_S:g} s"
        _, left = psutil.wait_procs(family, timeout=10.0)
        if left:
            yield f"left processes: {[' '.join(each.cmdline())[:80] for each in left]}"
        for each in left:
            each.kill()
        numbers = {str(each.pid) for each in family}
        if names := [
            name for name in set(os.listdir("/dev/shm")) - self.shared if numbers & set(re.split(r"\W", name))
        ]:
            yield f"left in /dev/shm: {names}"

    def judge(self) -> Iterator[str]:
        """What is wrong with what it left."""
        store = CheckpointStore(self.run / "checkpoints")
        last = self.steps()[-1]
        try:
            found = store.load_latest()
        except CheckpointError as error:
            yield f"the newest checkpoint does not load: {error}"
            return
        least = last if self.how in ("TERM", "INT") else last - 2 * EVERY  # one may have been on its way
        if found is None:
            if least > 0:
                yield f"no checkpoint at all, the last line is of step {last}"
            return
        if found.version < least:
            yield f"the newest checkpoint is of version {found.version}, the last line of step {last}"
        count = trained(found)
        if count != GROUPS * found.version:
            yield f"{count} prompts are passed and not to come again, {GROUPS * found.version} were trained"


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


def attack(lives: int, kinds: list[str], signals: list[str], seed: int, keep: Path) -> Counter[str]:
    """How many lives had which end, and in how many something was wrong ("broken ...")."""
    chance, counts = random.Random(seed), Counter[str]()
    random.seed(seed)
    folders = {kind: Path(tempfile.mkdtemp(prefix=f"asyncrl-{kind}-")) for kind in kinds}
    for number in range(lives):
        kind, how = kinds[number % len(kinds)], chance.choice(signals)
        life = Life(folders[kind], *KINDS[kind], how)
        try:
            wrong = life.live(chance.uniform(0.0, 1.5))
            found = [wrong] if wrong else []
            found += [*life.end()] if life.process.poll() is None else []
        finally:
            if life.process.poll() is None:  # this program is being ended itself
                life.process.terminate()
        found += [*life.judge()] if not wrong else []
        counts[f"{kind}, {how}"] += 1
        if found:
            counts[f"broken {kind}, {how}"] += 1
            kept = keep / f"life_{number}"
            if life.run.exists():
                shutil.copytree(life.run, kept, symlinks=True)
            kept.mkdir(exist_ok=True)
            shutil.copy(life.log, kept)
            print(f"life {number} ({kind}, SIG{how}): {'; '.join(found)}; what it left: {kept}", flush=True)
        if found or chance.random() < 0.1:  # and a fresh start now and then
            shutil.rmtree(life.run, ignore_errors=True)
    for folder in folders.values():
        shutil.rmtree(folder)
    return counts


def table(counts: Counter[str], *heads: str) -> int:
    """What was counted, and how often it was broken. The exit code."""
    head = f"| {' | '.join(heads)} | broken |"
    print(f"\n{head}\n{'|---' * (head.count('|') - 1)}|")
    for name in sorted(name for name in counts if not name.startswith("broken")):
        print(f"| {name} | {counts[name]} | {counts[f'broken {name}']} |")
    return int(any(name.startswith("broken") for name in counts))


def start_warm() -> None:
    """From now on."""
    global subprocess
    sys.path.append(str(ROOT / "tests"))
    import warm

    subprocess = warm.in_place_of_subprocess()  # type: ignore[assignment]  # what is used here has the same names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lives", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--signals", nargs="+", choices=SIGNALS, default=list(SIGNALS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--warm", action="store_true", help="programs start as the tests' do, from one that has loaded torch"
    )
    options = parser.parse_args()
    if options.warm:
        start_warm()
    keep = Path(tempfile.mkdtemp(prefix="asyncrl-lives-"))
    counts = attack(options.lives, options.kinds, options.signals, options.seed, keep)
    return table(counts, "ended", "lives")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # of `timeout`: the run in hand is ended, too
    sys.exit(main())
