"""Two network namespaces as two hosts, and a link between them that drops, delays and comes back.

    python tools/chaos link                     # needs unprivileged user namespaces, `ip` and `tc`
    python tools/chaos link --cases drops       # one case
    python tools/chaos link --warm              # ranks start from a process that has loaded torch

The first host has rank 0, which trains, and rank 1, which generates. The second host has rank 2, which generates. Nobody but the
ranks sees that the link is down: there is no torchrun. Cases:

    drops     the link is down for 1 to 3 s again and again, less than watchdog.loop_timeout_s: the run goes on
    delays    the link has 1 Mbit/s and a queue of up to a second: the run goes on
    cut       the link goes down for good: within its deadline rank 2 ends and names rank 0; the run goes on without rank 2

After each case every prompt was trained once, each version of the weights had the same bytes on every rank, and nothing is left.
Prints a table. Exits 1 where one of that does not hold.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from chaos import nodes
from chaos.nodes import DEADLINE_S, SILENCE_S, STARTED_S, Job
from chaos.runs import answer_signals, keep_life
from commands import TOOLS, command, machine, print_tally

HERE, THERE = "10.77.0.1", "10.77.0.2"
STEPS = 40
ROLES = ("distributed.roles.train=1", "distributed.roles.generate=2")
CASES = ("drops", "delays", "cut")


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


class Link:
    """A pair of interfaces between this network and that of `holder`, which is the second host. For root of a user namespace."""

    def __enter__(self) -> Link:
        self.holder = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
        self.net = f"/proc/{self.holder.pid}/ns/net"
        while os.readlink(self.net) == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)
        self.there = ("nsenter", f"--net={self.net}")
        run("ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1")
        run("ip", "link", "set", "v1", "netns", str(self.holder.pid))
        for at, name, address in (((), "v0", HERE), (self.there, "v1", THERE)):
            run(*at, "ip", "addr", "add", f"{address}/24", "dev", name)
            run(*at, "ip", "link", "set", "lo", "up")
            run(*at, "ip", "link", "set", name, "up")
        return self

    def __exit__(self, *exc: object) -> None:
        self.holder.kill()
        self.holder.wait()

    def set(self, state: str) -> None:
        """`up` or `down`."""
        run(*self.there, "ip", "link", "set", "v1", state)

    def slow(self, rate: str) -> None:
        """This rate in both directions, with a queue of up to a second."""
        for at, name in (((), "v0"), (self.there, "v1")):
            run(
                *at, "tc", "qdisc", "replace", "dev", name, "root", "tbf", "rate", rate, "burst", "8kb", "latency", "1s"
            )

    def fast(self) -> None:
        for at, name in (((), "v0"), (self.there, "v1")):
            run(*at, "tc", "qdisc", "del", "dev", name, "root")


def job_of(folder: Path, link: Link, steps: int) -> Job:
    own = [
        {"MASTER_ADDR": HERE, "ASYNCRL_SECRET": "a secret of two hosts", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    ] * 3
    here, there = {"GLOO_SOCKET_IFNAME": "v0"}, {"GLOO_SOCKET_IFNAME": "v1", "NODES_NET": link.net}
    pair = {"LOCAL_WORLD_SIZE": "2"}
    environs = own[0] | here | pair, own[1] | here | pair | {"LOCAL_RANK": "1"}, own[2] | there
    return Job(folder, ROLES, environs, steps)


def meet(case: str, folder: Path, link: Link, steps: int, seed: int) -> Iterator[str]:
    """What is wrong with a run whose link has these faults."""
    chance, job = random.Random(seed), job_of(folder, link, steps)
    faults = 0
    try:
        until = time.monotonic() + STARTED_S
        while job.steps() < 2 and None in job.wait(range(3), 0.2) and time.monotonic() < until:
            pass
        before = job.steps()
        if case == "delays":
            link.slow("1mbit")
        while job.steps() < steps and job.wait(range(3), 0.2) == [None] * 3 and time.monotonic() < until:
            if case == "drops":
                link.set("down")
                job.wait(range(3), chance.uniform(0.2, 0.5) * SILENCE_S)
                link.set("up")
                faults += 1
                job.wait(range(3), chance.uniform(0.5, 2.0))
            elif case == "cut":
                link.set("down")
                faults += 1
                break
            faults += case == "delays"
        codes = job.wait(range(3), DEADLINE_S)
        print(f"{case}: {faults} faults after step {before}, exit codes {codes}, {job.steps()} steps", flush=True)
    finally:
        job.kill()
        link.set("up")
        if case == "delays":
            link.fast()
    yield from job.left()
    if not before or not faults:
        yield f"the link was not attacked: {job.steps()} steps, exit codes {codes}"
    expected = [0, 0, 12] if case == "cut" else [0, 0, 0]
    if codes != expected:
        yield f"the ranks ended with {codes}, and not with {expected}"
    for rank, other in ((2, 0), (0, 2)) if case == "cut" else ():
        if f"rank {other}" not in job.output(rank):
            yield f"rank {rank} does not name rank {other}"
    yield from job.wrong(steps)


def inside(*words: str) -> int:
    """The tool itself, as root of a user namespace with a network of its own."""
    answer_signals()
    steps, seed, warm, cases = int(words[0]), int(words[1]), words[2] == "True", words[3:]
    if warm:
        nodes.start_warm()
    keep, counts = Path(tempfile.mkdtemp(prefix="asyncrl-link-kept-")), Counter[str]()
    with Link() as link:
        for case in cases:
            folder = Path(tempfile.mkdtemp(prefix="asyncrl-link-")) / "life"
            found = [*meet(case, folder, link, steps, seed)]
            counts[case] += 1
            if found:
                counts[f"broken {case}"] += 1
                keep_life(folder, keep / case, f"{case}: {'; '.join(found)}")
            shutil.rmtree(folder.parent)
    if not any(keep.iterdir()):
        keep.rmdir()
    return print_tally(counts, "link", "runs")


def refused() -> str:
    """Why this machine cannot have two networks; empty if it can."""
    missing = [name for name in ("unshare", "nsenter", "ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"this machine has no {' and no '.join(missing)}"
    program = ["unshare", "-rn", "ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    return f"no user namespace with a network: {done.stderr.strip()}" if done.returncode else ""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--warm", action="store_true", help="ranks start from a process that has loaded torch, as in tests"
    )


def main(options: argparse.Namespace) -> int:
    if why := refused():
        print(f"chaos link needs two network namespaces: {why}")
        return 2
    print(f"`{command()}`, {machine()}", flush=True)
    words: Sequence[object] = (options.steps, options.seed, options.warm, *options.cases)
    program = [sys.executable, str(TOOLS / "chaos" / "__main__.py"), "link:inside", *map(str, words)]
    return subprocess.run(["unshare", "-rn", *program], check=False).returncode
