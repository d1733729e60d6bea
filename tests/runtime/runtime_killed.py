"""One rank of a run of which one is killed at an exact moment of a step (for the tests). KILLED: "RANK STEP MOMENT".

commit      before the shared ledger hears of its commit: the other rank makes that
committed   when it has made it: the other rank waits for that before its own
say         both have committed, and it does not announce where it is; the other one waits for groups, in no collective
line        it has committed, and its line is about to be written
sums        before the first sum of the step: the others wait for it there
during      its part of the gradients' reduction is on its way
gather      the step is applied, and the others wait for its part of the report
fails       as `sums`, but an error ends it
"""

from __future__ import annotations

import os
import runpy
import signal
from typing import Any

import anyio

from asyncrl.distributed import collectives
from asyncrl.distributed.collectives import Collectives
from asyncrl.distributed.line_ledger import LineLedger
from asyncrl.runtime import meeting, positions
from asyncrl.telemetry.sinks import JsonlSink
from asyncrl.training.trainer import TorchTrainer

rank, step, moment = os.environ.get("KILLED", "no 0 never").split()
dies = os.environ.get("RANK", "0") == rank
finishing = 0  # the version that the open step makes
claim, commit, say, write = LineLedger.claim, LineLedger.commit, positions.Positions.announce, JsonlSink.write
gather, finish, started = Collectives.all_gather_bytes, TorchTrainer.finish_train_step, collectives.dist.all_reduce


def reached(now: str, number: int) -> None:
    if dies and now == moment and number == int(step):
        if moment == "fails":
            raise ArithmeticError("on purpose")
        os.kill(os.getpid(), signal.SIGKILL)


async def claiming(ledger: LineLedger, ready: Any) -> Any:
    if moment == "say" and not dies and ledger.turn >= int(step):
        await anyio.sleep_forever()  # else it may hear of the death in a collective, before its signal or after it
    return await claim(ledger, ready)


async def committing(ledger: LineLedger) -> int:
    reached("commit", ledger.turn + 1)
    while moment == "committed" and not dies and ledger.turn + 1 == int(step) and ledger.statistics().turn < int(step):
        await ledger.wait_changed(ledger.changes)
    turn = await commit(ledger)
    reached("committed", turn)
    return turn


def saying(self: positions.Positions, version: int, *books: object, **more: object) -> bool:
    reached("say", version)
    return say(self, version, *books, **more)  # type: ignore[arg-type]


def writing(sink: JsonlSink, version: int, *line: Any) -> None:
    reached("line", version)
    write(sink, version, *line)


def finishes(trainer: TorchTrainer) -> Any:
    global finishing
    finishing = trainer.version + 1
    reached("sums", finishing)
    reached("fails", finishing)
    return finish(trainer)


def starts(values: Any, **options: Any) -> Any:
    work = started(values, **options)
    if values.numel() > 1000:
        reached("during", finishing)
    return work


def gathers(self: Collectives, value: bytes) -> list[bytes]:
    reached("gather", finishing)
    return gather(self, value)


TorchTrainer.finish_train_step = finishes  # type: ignore[method-assign]
collectives.dist.all_reduce = starts
Collectives.all_gather_bytes = gathers  # type: ignore[method-assign]
JsonlSink.write = writing  # type: ignore[method-assign]
LineLedger.claim = claiming  # type: ignore[method-assign]
LineLedger.commit = committing  # type: ignore[method-assign]
positions.Positions.announce = saying  # type: ignore[assignment,method-assign]
positions.GATHER_TIMEOUT_S = 0.5  # it is dead: nothing comes any more
if os.environ.get("WORLD_SIZE") == "2":
    meeting._LEAVE_AFTER_ERROR_S = 0.5  # no other rank is left to wait for
runpy.run_module("asyncrl.main", run_name="__main__", alter_sys=True)
