"""One rank of a run of which one is killed at a collective of a step (for the tests). KILLED: "RANK STEP MOMENT".

sums      before the first sum of the step: the others wait for it there
during    its part of the gradients' reduction is on its way
gather    the step is applied, and the others wait for its part of the report
fails     as `sums`, but an error ends it
"""

from __future__ import annotations

import os
import runpy
import signal
from typing import Any

from asyncrl.distributed import collectives
from asyncrl.distributed.collectives import Collectives
from asyncrl.training.trainer import TorchTrainer

rank, step, moment = os.environ["KILLED"].split()
finishing = 0  # the version that the open step makes
gather, finish, started = Collectives.all_gather_bytes, TorchTrainer.finish_train_step, collectives.dist.all_reduce


def reached(now: str) -> None:
    if os.environ["RANK"] == rank and now == moment and finishing == int(step):
        os.kill(os.getpid(), signal.SIGKILL)


def finishes(trainer: TorchTrainer) -> Any:
    global finishing
    finishing = trainer.version + 1
    reached("sums")
    if os.environ["RANK"] == rank and moment == "fails" and finishing == int(step):
        raise ArithmeticError("on purpose")
    return finish(trainer)


def starts(values: Any, **options: Any) -> Any:
    work = started(values, **options)
    if values.numel() > 1000:
        reached("during")
    return work


def gathers(self: Collectives, value: bytes) -> list[bytes]:
    reached("gather")
    return gather(self, value)


TorchTrainer.finish_train_step = finishes  # type: ignore[method-assign]
collectives.dist.all_reduce = starts
Collectives.all_gather_bytes = gathers  # type: ignore[method-assign]
runpy.run_module("asyncrl.main", run_name="__main__", alter_sys=True)
