"""Ranks with roles that are killed, stopped or cut off at their messages: one life of a run for each message and moment.

    python tools/chaos nodes --warm                              # every message of the table, every fault
    python tools/chaos nodes --warm --joined --moments sent      # of a node that has joined the run
    python tools/chaos nodes --warm --faults SIGKILL --messages group report
    python tools/chaos nodes --warm --minutes 8 --tally met.json  # a part of it; the next call goes on from there

Ranks 0 and 1 train, ranks 2 and 3 generate. With `--joined` a fifth node joins, and is the victim in the place of rank 2. The
victim meets the fault when it sends a message, just after that, when it handles a message, or after its handler has run. The fault
CUT breaks all connections of the victim's line. Then this must hold:

    ended       every other rank ends within its deadline: with success if the run goes on, else with a code that is not 0. After
                CUT, and without a node that has joined, the run goes on
    named       if the run ends, the output of rank 0 names the victim, and the output of every other rank the victim or rank 0
    exact       every prompt is trained once. If the run has ended, a second life goes on from its checkpoint to the last step
    equal       each version of the weights has the same bytes on every rank that has received it
    left        no process and nothing in /dev/shm

Prints a line for each life that breaks one of them (its output is kept), and a table. Exits 1 where there was any.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import hashlib
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from chaos.runs import add_common, answer_signals, keep_life
from commands import EXAMPLES, ROOT, TOOLS, print_tally, tally_of

from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.telemetry.sinks import read_jsonl

GROUPS, SIZE, STEPS = 4, 4, 8
SILENCE_S = 6.0  # watchdog.loop_timeout_s
DEADLINE_S = 60.0  # from the fault on
STARTED_S = 120.0
CLONE_NEWNET = 0x40000000
FAULTS = ("SIGKILL", "SIGSTOP", "CUT")
# Message -> (rank that sends it, rank that handles it, at which message of this kind). The ledger's have the operation's name.
MESSAGES = {
    "meet": (2, 0, 1),
    "run/here": (2, 0, 1),
    "weights/model": (2, 0, 1),
    "training/here": (1, 0, 1),
    "training/where": (2, 0, 1),
    "weights/wrote": (1, 0, 3),
    "weights/next": (2, 0, 3),
    "weights/broadcast": (0, 2, 3),
    "prompts/next": (2, 0, 5),
    "prompts/admitted": (2, 0, 5),
    "ledger join": (2, 0, 1),
    "ledger admit": (2, 0, 5),
    "ledger assign": (2, 0, 5),
    "ledger arrive": (1, 0, 3),
    "ledger claim": (1, 0, 5),
    "ledger commit": (1, 0, 2),
    "ledger release": (2, 0, 2),
    "group": (2, 1, 3),
    "watch": (2, 0, 1),
    "position": (1, 0, 3),
    "report": (2, 0, 3),
    "evaluate": (0, 2, 2),
    "run/trained": (0, 2, 1),
    "run/ended": (0, 2, 1),
    "run/left": (2, 0, 1),
}
OF_JOINED = {"run/join": (2, 0, 1), "ledger begin": (2, 0, 1), "run/begun": (2, 0, 1)}


class Job:
    """The ranks of one run, each started with the variables that torchrun sets. `environs`: more variables, by rank."""

    def __init__(
        self, folder: Path, settings: Sequence[str], environs: Sequence[Mapping[str, str]], steps: int = STEPS
    ) -> None:
        self.folder, self.run = folder, folder / "runs" / "run"
        self.shared = set(os.listdir("/dev/shm"))  # of others
        self.numbers = set[int]()  # of all processes
        folder.mkdir(exist_ok=True)
        self.first = CheckpointStore(self.run / "checkpoints").latest_version() or 0
        resume = self.first > 0
        text = (
            f"run.name=run run.dir={folder}/runs run.overwrite={str(not resume).lower()} resume={str(resume).lower()} "
            f"model.path={TOOLS}/chaos/faults.py:build rollout.groups_per_step={GROUPS} rollout.group_size={SIZE} "
            f"rollout.max_tokens=8 train.max_steps={steps} checkpoint.every=2 watchdog.loop_timeout_s={SILENCE_S} "
            "telemetry.live=plain telemetry.trace=false telemetry.report=false"
        )
        port = free_port()
        self.ranks: list[Any] = []
        for number, own in enumerate(environs):
            environment = {"RANK": str(number), "WORLD_SIZE": str(len(environs)), "MASTER_PORT": str(port)}
            environment |= {
                "LOCAL_RANK": str(number),
                "LOCAL_WORLD_SIZE": str(len(environs)),
                "MASTER_ADDR": "127.0.0.1",
            }
            self.start({**environment, **own}, str(EXAMPLES / "quickstart.yaml"), *text.split(), *settings)

    def start(self, own: Mapping[str, str], *words: str) -> None:
        """Start the next rank, or with the words of `asyncrl join` a node. `own`: variables."""
        number = len(self.ranks)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WARM_WORKERS": ""}
        environment["NODES_NOTES"] = str(self.folder / f"notes_{self.first}_{number}.jsonl")
        with self.log(number).open("ab") as log:
            self.ranks.append(
                subprocess.Popen(
                    [sys.executable, str(TOOLS / "chaos" / "__main__.py"), "nodes:rank", *words],
                    env={**environment, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def log(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.txt"

    def output(self, rank: int) -> str:
        return self.log(rank).read_text("utf-8", errors="replace")

    def look(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.numbers |= {rank.pid, *(each.pid for each in psutil.Process(rank.pid).children(recursive=True))}

    def wait(self, ranks: Sequence[int], seconds: float) -> list[int | None]:
        """The exit codes of these ranks; None: it lives."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(self.ranks[rank].poll() is None for rank in ranks):
            self.look()
            time.sleep(0.1)
        return [self.ranks[rank].poll() for rank in ranks]

    def steps(self) -> int:
        return max((int(line["step"]) for line in read_jsonl(self.run / "metrics.jsonl")), default=0)

    def kill(self) -> None:
        self.look()
        for rank in self.ranks:
            rank.kill()
            rank.wait()

    def left(self) -> Iterator[str]:
        """Processes and names in /dev/shm that have outlived all ranks."""
        until = time.monotonic() + 10.0
        while (alive := [number for number in self.numbers if is_program(number)]) and time.monotonic() < until:
            time.sleep(0.1)
        if alive:
            yield f"processes {alive} are left"
        for number in alive:
            os.kill(number, signal.SIGKILL)
        numbers = {str(number) for number in self.numbers}
        new = set(os.listdir("/dev/shm")) - self.shared
        if names := [name for name in new if numbers & set(re.split(r"\W", name))]:
            yield f"left in /dev/shm: {names}"
        for name in names:
            os.unlink(f"/dev/shm/{name}")

    def wrong(self, steps: int = STEPS) -> Iterator[str]:
        """Prompts that were trained twice or not at all, and versions whose bytes differ between ranks."""
        counts, halves = Counter[int](), dict[tuple[int, int, str], set[str]]()
        notes = [(*map(int, path.stem.split("_")[1:]), read_jsonl(path)) for path in self.folder.glob("notes_*.jsonl")]
        firsts = sorted({first for first, *_ in notes})
        for first, _rank, lines in notes:
            # What a life has trained after its last checkpoint is trained again by the next one.
            last = min((other for other in firsts if other > first), default=steps)
            for line in lines:
                if "sha" in line:
                    halves.setdefault((first, line["version"], line["sender"]), set()).add(line["sha"])
                elif line["version"] <= last:
                    counts.update(line.get("claimed", ()))
                    counts.subtract(line.get("back", ()))
        counts = +counts
        if twice := sorted(group for group, count in counts.items() if count > 1):
            yield f"groups {twice} were trained twice"
        # Groups that were live at the end may be missing.
        missing = sorted(set(range((steps - 3) * GROUPS)) - set(counts))
        if len(counts) != steps * GROUPS or missing:
            yield f"{len(counts)} groups were trained, and not {steps * GROUPS}; {missing} were not"
        if not halves:
            yield "no version of the weights was sent"
        if differ := [key for key, shas in halves.items() if len(shas) > 1]:
            yield f"the bytes of versions {differ} differ between ranks"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def is_program(number: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    return False


# -- one rank ----------------------------------------------------------------------------------------------------------


def rank(*words: str) -> None:
    """In the place of `asyncrl.main` or `asyncrl join`. NODES_NET: enter this network. NODES_FAULT: fault, moment, message,
    number."""
    if "NODES_NET" in os.environ:
        with open(os.environ["NODES_NET"], encoding="utf-8") as net:
            if ctypes.CDLL(None, use_errno=True).setns(net.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "cannot enter the network of the other host")
    if "NODES_FAULT" in os.environ:
        plant(*os.environ["NODES_FAULT"].split("|"))
    take_notes(Path(os.environ["NODES_NOTES"]))
    sys.argv = ["asyncrl", *words]
    module = "asyncrl.cli.app" if words[0] == "join" else "asyncrl.main"
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def take_notes(file: Path) -> None:
    """Write the groups that each step claims on this rank, and a hash of each sender's stripe of the weights.

    Rank 0 may save a step as soon as its collective is done, so a rank that dies then must have written its groups before."""
    from asyncrl.distributed.line_ledger import LineLedger
    from asyncrl.weights.broadcast import Stripes, buckets

    # An earlier life that began at the same version has saved nothing.
    file.unlink(missing_ok=True)
    broadcast, claim, rollback = Stripes.broadcast, LineLedger.claim, LineLedger.rollback

    def note(**line: object) -> None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")

    def sending(self: Stripes, order: Any, half: Any, read: Any = None, whole_bytes: int | None = None) -> str | None:
        failure = broadcast(self, order, half, read, whole_bytes)
        if failure is None:
            data = half.view(-1).numpy().view("uint8")
            for sender, cut in zip(
                order.senders, buckets(whole_bytes or data.nbytes, len(order.senders), 1 << 26), strict=True
            ):
                # A sender may have its stripe alone.
                if sender == self._node or not whole_bytes:
                    stripe = data if whole_bytes else data[cut[0][0] : cut[-1][1]]
                    note(version=order.version, sender=sender, sha=hashlib.sha256(stripe.tobytes()).hexdigest())
        return failure

    async def claiming(self: LineLedger, ready: Any) -> Any:
        state, ticket = await claim(self, ready)
        if ticket is not None:
            note(version=self._turn + 1, claimed=[ticket.group_id])
        return state, ticket

    async def rolling_back(self: LineLedger) -> Any:
        tickets = await rollback(self)
        note(version=self._turn + 1, back=[ticket.group_id for ticket in tickets])
        return tickets

    Stripes.broadcast = sending  # type: ignore[method-assign]
    LineLedger.claim, LineLedger.rollback = claiming, rolling_back  # type: ignore[method-assign]


def plant(fault: str, moment: str, message: str, number: str) -> None:
    """Meet the fault at this message. `record`: write every moment and message into the file MESSAGE instead."""
    from asyncrl.distributed.exchange import Exchange
    from asyncrl.distributed.line import LineClient, LineServer

    left, ends = int(number), list[Any]()
    post, handle, open_end = Exchange.post, Exchange._handle, LineServer._open

    def opening(self: Any, kind: int) -> Any:
        ends.append(self)
        return open_end(self, kind)

    def at(now: str, kind: str, header: Any) -> None:
        nonlocal left
        name = f"ledger {header[0]}" if kind == "ledger" else kind
        if fault == "record":
            with open(message, "a", encoding="utf-8") as lines:
                lines.write(f"{now}|{name}\n")
        elif (now, name) == (moment, message):
            left -= 1
            if left == 0:
                print(f"{fault} at {now} {name}", flush=True)
                Path(os.environ["NODES_MET"]).touch()
                if fault == "CUT":
                    cut({int(end.address.rpartition(":")[2]) for end in ends if end.address})
                else:
                    os.kill(os.getpid(), getattr(signal, fault))

    def posting(self: Exchange, operation: int, kind: str, header: Any, *more: Any, **options: Any) -> Any:
        at("sends", kind, header)
        posted = post(self, operation, kind, header, *more, **options)
        # The message is on its way then.
        asyncio.get_running_loop().call_later(0.02, at, "sent", kind, header)
        return posted

    async def handling(self: Exchange, kind: str, header: Any, buffers: Sequence[Any]) -> Any:
        at("handles", kind, header)
        answer = await handle(self, kind, header, buffers)
        at("handled", kind, header)
        return answer

    Exchange.post, Exchange._handle = posting, handling  # type: ignore[method-assign]
    LineServer._open = LineClient._open = opening  # type: ignore[method-assign]


def cut(ports: Collection[int]) -> None:
    """Break all connections of this process from or to these ports."""
    for each in psutil.Process().net_connections("tcp"):
        if each.raddr and (each.raddr.port in ports or each.laddr.port in ports):
            with socket.socket(fileno=os.dup(each.fd)) as connection, contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


# -- the attack --------------------------------------------------------------------------------------------------------

ROLES = ("distributed.roles.train=2", "distributed.roles.generate=2")
EVALUATED = (
    f"data.eval={EXAMPLES}/quickstart_model.py:rows",
    "evaluate.every=2",
    "evaluate.limit=6",
    "evaluate.samples=1",
)


def victim_of(message: str, moment: str, joined: bool) -> int:
    """The rank that meets the fault; 4 is the node that joins."""
    sender, handler, _ = (MESSAGES | OF_JOINED)[message]
    victim = sender if moment in ("sends", "sent") else handler
    return 4 if joined and victim == 2 else victim


def meet(folder: Path, fault: str, moment: str, message: str, joined: bool = False) -> Iterator[str]:
    """What is wrong with the life that meets the fault, and with the life after it."""
    *_, number = (MESSAGES | OF_JOINED)[message]
    victim = victim_of(message, moment, joined)
    met, gate = folder.with_suffix(".met"), folder.with_suffix(".gate")
    own = {"NODES_FAULT": f"{fault}|{moment}|{message}|{number}", "NODES_MET": str(met)}
    address, common, settings = f"127.0.0.1:{free_port()}", dict[str, str](), (*ROLES, *EVALUATED)
    if joined:
        # The steps after the first wait for the node.
        common = {"ASYNCRL_SECRET": "a secret of the attack", "NODES_GATE": str(gate)}
        settings += f"distributed.listen={address}", f"hooks={TOOLS}/chaos/faults.py:gated"
    job = Job(folder, settings, [common | (own if rank == victim else {}) for rank in range(4)])
    everyone = range(4 + joined)
    others = [rank for rank in everyone if rank != victim]
    try:
        until = time.monotonic() + STARTED_S
        while joined and "nodes may join" not in job.output(0) and time.monotonic() < until:
            job.wait([0], 0.2)
        if joined:
            job.start(common | own, "join", address, "threads=1")
        while not met.exists() and time.monotonic() < until and None in job.wait(everyone, 0.2):
            if joined and "this node generates from now on" in job.output(4):
                gate.touch()
        gate.touch()
        if not met.exists():
            yield f"the fault was not met: {job.wait(everyone, 0.0)}"
            return
        codes = job.wait(everyone if fault == "CUT" else others, DEADLINE_S)
    finally:
        job.kill()
    yield from job.left()
    if None in codes:
        yield f"not ended after {DEADLINE_S:g} s: {codes}"
        return
    goes_on, must_go_on = not any(codes), victim > 1 or fault == "CUT"
    if fault == "CUT" and not goes_on:
        yield f"the run ends with {codes}"
    elif not goes_on:
        # Without rank 0 a rank may have ended that had no more to do.
        if 0 in codes and victim and job.steps() < STEPS:
            yield f"some ranks ended with success: {dict(zip(others, codes, strict=True))}"
        for rank in others:
            # Rank 0 names the victim, and the others name one of them.
            named = {victim, 0 if rank else victim}
            if job.ranks[rank].returncode and not any(f"rank {each}" in job.output(rank) for each in named):
                yield f"rank {rank} does not name rank {victim}"
    # After the last step the other ranks may have left before rank 0 is lost.
    if goes_on != must_go_on and (must_go_on or job.steps() < STEPS):
        yield f"the run {'goes on' if goes_on else 'ends'} without rank {victim}: {codes}"
    if not goes_on and job.steps() < STEPS and not joined:
        job = Job(folder, (*ROLES, *EVALUATED), [{}] * 4)
        try:
            codes = job.wait(range(4), STARTED_S)
        finally:
            job.kill()
        yield from job.left()
        if codes != [0] * 4:
            yield f"the second life ended with {codes}"
            return
    yield from job.wrong()


def moments(message: str) -> Sequence[str]:
    return "sends", "sent", "handles", "handled"


def attack(plan: argparse.Namespace, keep: Path) -> Counter[str]:
    counts, done, until = Counter[str](), tally_of(plan.tally), time.monotonic() + 60.0 * plan.minutes
    for message in plan.messages:
        for moment in plan.moments:
            for fault in plan.faults:
                name = f"{message}, {moment}, {fault}"
                if plan.joined:
                    name = f"{message} of a joined node, {moment}, {fault}"
                never = victim_of(message, moment, True) != 4 if plan.joined else message in OF_JOINED
                if never or time.monotonic() > until or name in done:
                    continue
                folder = Path(tempfile.mkdtemp(prefix="asyncrl-nodes-")) / "life"
                found = [*meet(folder, fault, moment, message, plan.joined)]
                counts[name] += 1
                if found:
                    counts[f"broken {name}"] += 1
                    keep_life(
                        folder,
                        keep / name.replace("/", "_").replace(", ", "_").replace(" ", "_"),
                        f"{name}: {'; '.join(found)}",
                    )
                shutil.rmtree(folder.parent)
    return counts


def start_warm() -> None:
    """From now on ranks start from a process that has loaded torch."""
    global subprocess
    sys.path.append(str(ROOT / "tests"))
    import warm

    subprocess = warm.in_place_of_subprocess()  # type: ignore[assignment]  # what is used here has the same names


def add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    both = [*MESSAGES, *OF_JOINED]
    parser.add_argument("--messages", nargs="+", choices=both, default=both)
    parser.add_argument("--joined", action="store_true", help="the victim is a node that has joined")
    parser.add_argument("--moments", nargs="+", choices=moments(""), default=list(moments("")))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))


def main(options: argparse.Namespace) -> int:
    answer_signals()
    if options.warm:
        start_warm()
    keep = Path(tempfile.mkdtemp(prefix="asyncrl-nodes-kept-"))
    counts = attack(options, keep)
    if not any(keep.iterdir()):
        keep.rmdir()
    return print_tally(counts, "message, moment, fault", "lives", file=options.tally)
