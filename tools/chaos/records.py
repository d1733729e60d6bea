"""Spoilt groups against a live run: none of them may end it, or stay in the ring, or be refused without its name.

    python tools/chaos records                          # 2,000 groups and requests, a minute or two
    python tools/chaos records --requests 50000         # by hand
    python tools/chaos records --only temperature       # those whose name holds the word

A run of a tiny model is fed through shared memory, HTTP and `Runtime.submit`, in turns at random, with every attack of
spoilt.py and with good groups between them. It ends by itself at its last step; the next run of the ring goes on, until
everything was sent. Checked in the end: every run ended by itself, every group that cannot be trained was refused with its
name and place, every good one was trained, no reply was a 5xx, and nothing is left in the ring or in /dev/shm.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import yaml
from chaos.spoilt import HTTP, RECORDS, REFUSED, TRAINED, Attack, Request, body, good
from commands import ROOT, left_in_shared_memory
from transport_records import draft_of

from asyncrl import Runtime
from asyncrl.atropos.door import AtroposDoor, serve
from asyncrl.config.load import load_config
from asyncrl.errors import DataError, LifecycleError, RecordError, RingDetached, RingFull, VersionAhead
from asyncrl.http.access import Address
from asyncrl.pumps.pipeline import StepReport
from asyncrl.records.write import plan
from asyncrl.runtime.door import DoorStatistics
from asyncrl.runtime.door import serve as ring_door
from asyncrl.transport.inventory import clear
from asyncrl.transport.rings.producer import AsyncProducer
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.types import RingSettings

MODEL = ROOT / "tests" / "runtime" / "runtime_model.py"
RING = RingSettings(total_bytes=64 << 20, slots=32, payload_bytes=1 << 20)
EPOCH = 1
NO = (400, 413, 415, 422)  # what a refusal may be
PATIENCE = 120.0  # seconds for what must happen in the end
CONFIG: dict[str, Any] = {
    "threads": 1,
    "model": {"path": f"{MODEL}:build", "dtype": "float32"},
    "data": {"max_prompt_tokens": 12},
    "reward": f"{MODEL.with_name('runtime_rewards.py')}:share",
    "rollout": {"group_size": 4, "groups_per_step": 2, "max_tokens": 8, "max_staleness": 16},
    "train": {"lr": 1e-4, "tokens_per_microbatch": 128},
    "algorithm": {"mismatch_gate": None},  # log-probs are made up
    "telemetry": {"live": "off"},
}


class Heard(DoorStatistics):
    """Every refusal, not the last one only."""

    def __init__(self, into: list[str]) -> None:
        super().__init__()
        object.__setattr__(self, "into", into)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "last_refusal" and value:
            self.into.append(value)  # type: ignore[attr-defined]  # set above, past this method


@dataclass
class Findings:
    sent: Counter[str] = field(default_factory=Counter)  # by door
    refused: Counter[str] = field(default_factory=Counter)  # by door
    wrong: Counter[str] = field(default_factory=Counter)  # by what is wrong
    # By group number: name of the attack that the ring has to refuse, name of what has to be trained, and how often it was.
    expected: dict[int, str] = field(default_factory=dict)
    good: dict[int, str] = field(default_factory=dict)
    trained: Counter[int] = field(default_factory=Counter)
    heard: list[str] = field(default_factory=list)  # refusals of the ring's door
    steps: int = 0
    runs: int = 0


class Attacker:
    """Sends to one run after the other; what a run was too late for goes to the next one."""

    def __init__(self, name: str, requests: int, seed: int, only: str) -> None:
        self.name = name
        self.left = requests
        self.found = Findings()
        self._random = random.Random(seed)
        self._number = 0
        self._records = [attack for attack in RECORDS if only in attack.name]
        self._http = [request for request in HTTP if only in request.name]

    async def against(self, runtime: Runtime, door: AtroposDoor, producer: AsyncProducer, over: anyio.Event) -> None:
        """Until everything was sent, or the run is over; then good groups until it is."""
        async with aiohttp.ClientSession() as http:
            while not over.is_set():
                self._number += 1
                members = good(self._number, self._random)
                with contextlib.suppress(
                    RingDetached, RingFull, LifecycleError, aiohttp.ClientError
                ):  # the run is over
                    if self.left <= 0:
                        await self._put(producer, members, Attack("good", TRAINED, lambda m, extra: None))
                        continue
                    self.left -= 1
                    await self._one(members, runtime, door, producer, http)

    async def _one(self, members: Any, runtime: Runtime, door: AtroposDoor, producer: AsyncProducer, http: Any) -> None:
        kind = self._random.choice(["ring", "ring", "http", "submit"])
        if kind == "http" and self._http:
            await self._post(http, door.url, members, self._random.choice(self._http))
        elif self._records:
            attack = self._random.choice(self._records)
            await (self._put(producer, members, attack) if kind != "submit" else self._submit(runtime, members, attack))

    async def _put(self, producer: AsyncProducer, members: Any, attack: Attack) -> None:
        found, extra = self.found, dict[int, Any]()
        found.sent["ring"] += 1
        number = members[0].group_id
        attack.spoil(members, extra)
        try:
            record = plan(draft_of(members, epoch=EPOCH, group_metadata={"number": number}, extra=extra))
        except RecordError:  # the writer says so
            found.refused["client"] += 1
            found.wrong[f"client refuses: {attack.name}"] += attack.expect == TRAINED
            return
        await producer.put(record, timeout=1.0)
        if attack.expect == REFUSED:
            found.expected[number] = attack.name
        elif attack.expect == TRAINED:
            found.good[number] = attack.name

    async def _submit(self, runtime: Runtime, members: Any, attack: Attack) -> None:
        found, extra = self.found, dict[int, Any]()
        attack.spoil(members, extra)
        if extra or attack.ring_only:  # of records alone
            return
        found.sent["submit"] += 1
        group_id = runtime.built.ports.ids.take()
        members = [replace(t, group_id=group_id) for t in members]
        try:
            await runtime.submit(members, [t.reward for t in members])
        except (DataError, VersionAhead) as error:
            found.refused["submit"] += 1
            found.wrong[f"submit refuses: {attack.name}: {error}"] += attack.expect == TRAINED
            return
        found.wrong[f"submit takes: {attack.name}"] += attack.expect == REFUSED

    async def _post(self, http: Any, url: str, members: Any, request: Request) -> None:
        self.found.sent["http"] += 1
        raw = request.make(body(members))
        headers = {"Content-Type": "application/json", **dict(request.headers)}
        async with http.post(f"{url}/scored_data", data=raw, headers=headers) as reply:
            text = await reply.text()
        found, code = self.found, reply.status
        found.refused["http"] += code in NO
        if code not in (200, *NO) and not (code == 503 and "the run ends" in text):
            found.wrong[f"HTTP {code}: {request.name}"] += 1
        elif (request.expect, code) in [(REFUSED, 200), *((TRAINED, no) for no in NO)]:
            found.wrong[f"HTTP {code}: {request.name}: {text[:200]}"] += 1

    def push(self, report: StepReport) -> None:
        """A step was committed."""
        self.found.steps += 1
        numbers = [g.prompt.columns.get("number") or g.trajectories[0].metadata.get("number") for g in report.groups]
        self.found.trained.update(number for number in numbers if number)

    def close(self) -> None:
        """Of a listener: no step can come any more."""


class Range:
    """One ring, and the runs that it outlives."""

    def __init__(self, attacker: Attacker, folder: Path, steps: int, overrides: Sequence[str] = ()) -> None:
        """`steps`: of each run."""
        self.attacker = attacker
        self.found = attacker.found
        self._folder = folder
        self._steps = steps
        self._overrides = list(overrides)

    async def attack(self) -> None:
        """Runs until everything was sent, and one more, which trains what they left."""
        died = 0
        while self.attacker.left > 0 and died < 5:
            self.found.runs += 1
            try:
                with anyio.fail_after(PATIENCE + self.attacker.left):
                    await self._run()
            except Exception as error:  # of the run: it is what is looked for
                died += 1
                traceback.print_exception(error)
                self.found.wrong[f"a run ended with {_causes(error)}"] += 1
        await self._last()
        left = left_in_shared_memory(self.attacker.name)
        self.found.wrong[f"left in /dev/shm: {left}"] += bool(left)

    def _config(self, **train: Any) -> Any:
        resume = any(self._folder.glob("runs/run/checkpoints/step_*"))
        if not resume:
            shutil.rmtree(self._folder / "runs", ignore_errors=True)  # of a run that came to no checkpoint
        tree = {**CONFIG, "train": {**CONFIG["train"], **train}, "resume": resume, "door": {"ring": self.attacker.name}}
        path = self._folder / "run.yaml"
        path.write_text(
            yaml.safe_dump({**tree, "run": {"dir": str(self._folder / "runs"), "name": "run"}}), encoding="utf-8"
        )
        return load_config([path], self._overrides)

    async def _run(self) -> None:
        """One run that ends by itself, at its last step."""
        config = self._config(max_steps=self.found.steps + self._steps)
        over, attacker, counts = anyio.Event(), self.attacker, Heard(self.found.heard)
        async with RecordRing(attacker.name, RING) as ring, Runtime(config) as runtime:
            runtime.listen(attacker)
            async with anyio.create_task_group() as tasks:
                door = await tasks.start(partial(serve, runtime, ring, at=Address(port=0), statistics=counts))
                producer = await AsyncProducer.attach(attacker.name)
                tasks.start_soon(attacker.against, runtime, door, producer, over)
                await runtime.run()
                over.set()
                await producer.close()

    async def _last(self) -> None:
        """Takes what is left, and ends when there is no more."""
        counts = Heard(self.found.heard)
        async with RecordRing(self.attacker.name, RING) as ring, Runtime(self._config(time_limit_s=1e6)) as runtime:
            runtime.listen(self.attacker)
            runtime.start("door", ring_door, runtime, ring, counts)
            with anyio.fail_after(PATIENCE):
                while (
                    ring.statistics().replayed != counts.submitted + counts.too_old + counts.incomplete + counts.refused
                ):
                    await anyio.lowlevel.checkpoint()
                await runtime.finish()
            outstanding = ring.statistics().outstanding
            self.found.wrong["records left in the ring"] += outstanding
            if ring.close():
                clear(ring.name, drop_records=True)


def _causes(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {str(error)[:300]}"


def verdict(found: Findings) -> dict[str, Any]:
    """What the ring's door said and what was trained, against what was sent."""
    named = {int(match[1]) for text in found.heard if (match := re.match(rf"group (\d+) of epoch {EPOCH}: \S", text))}
    for number, name in found.expected.items():
        found.wrong[f"not refused by name: {name}"] += number not in named
    for number, name in found.good.items():
        found.wrong[f"not trained: {name}"] += not found.trained[number]
    for times in found.trained.values():
        found.wrong[f"trained {times} times"] += times > 1
    for text in found.heard:
        if not re.match(rf"group \d+ of epoch {EPOCH}: ", text):
            found.wrong[f"accepted over HTTP and refused behind it: {text[-200:]}"] += 1
    wrong = {name: count for name, count in found.wrong.most_common() if count}
    return {
        "sent": dict(found.sent),
        "refused": {**found.refused, "ring": len(named)},
        "trained groups": len(found.trained),
        "steps": found.steps,
        "runs": found.runs,
        "wrong": wrong,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=100, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="of the configuration: algorithm.loss=dr_grpo")
    parser.add_argument("--only", default="", help="a word in the names of the attacks")


def main(args: argparse.Namespace) -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        attacker = Attacker(f"attack-{os.getpid()}", args.requests, args.seed, args.only)
        asyncio.run(Range(attacker, Path(folder), args.steps, args.overrides).attack())
    result = verdict(attacker.found) | {"seconds": round(time.monotonic() - began, 1)}
    print(json.dumps(result, indent=1, ensure_ascii=True))
    return 1 if result["wrong"] else 0
