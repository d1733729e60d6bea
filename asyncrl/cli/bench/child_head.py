"""`child.py head`: memory and time of asyncrl's head and of full logits, in this process; `peers/trl_head.py` is TRL's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.algorithms.base import Loss, LossInputs
from asyncrl.algorithms.registry import build_loss
from asyncrl.models import native
from asyncrl.models.flat import FlatParameters, FlatWeights
from asyncrl.models.logprobs import token_logprobs
from asyncrl.models.packed import JoinedLinear, packing_works

from .job import HeadJob
from .peers import naive_head


class Heads:
    """Both heads over the same inputs. asyncrl's adds the weight's gradient to a flat buffer, as in training."""

    def __init__(self, job: HeadJob, trained: bool, tokens: int | None = None) -> None:
        """`trained`: the weight has a gradient. `tokens`: other than the job's."""
        self.inputs: Any = naive_head.Inputs(asdict(job), tokens)
        rows = self.inputs.target.numel()
        self.temperature = torch.full((rows,), job.temperature)
        self.sequence = torch.arange(rows) * job.sequences // rows
        self.sequences = job.sequences
        head = nn.Linear(job.hidden, job.vocabulary, bias=False, dtype=self.inputs.weight.dtype, device="meta")
        head.weight = nn.Parameter(self.inputs.weight)
        flat: FlatWeights
        flat = FlatParameters(head, head.weight.dtype) if trained else FlatWeights(head, head.weight.dtype)
        self.inputs.weight = head.weight  # the naive side's own gradient lies in it
        self.buffer = None if flat.grad is None else flat.view(flat.grad, 0)
        pack = packing_works(flat.working.dtype, flat.working.device)
        self.project = JoinedLinear(flat, [head], {id(head.weight): 0}, pack)

    def asyncrl(self) -> tuple[Tensor, Tensor]:
        inputs = self.inputs
        return token_logprobs(
            inputs.hidden, inputs.weight, inputs.target, self.temperature, grad_buffer=self.buffer, entropy_grad=True,
            project=self.project,
        )  # fmt: skip

    def naive(self) -> tuple[Tensor, Tensor]:
        logp, entropy = naive_head.naive(self.inputs)  # type: ignore[no-untyped-call]
        return logp, entropy

    def step(self, side: str, loss: Loss) -> None:
        """Forward, loss and backward."""
        inputs = self.inputs
        inputs.hidden.grad = None
        logp, entropy = getattr(self, side)()
        logp, entropy = logp.float(), entropy.float()
        sums = loss(
            LossInputs(
                logp_S=logp,
                entropy_S=entropy,
                sampler_logp_S=logp.detach() + 0.01 * inputs.advantage,
                advantage_S=inputs.advantage,
                sequence_S=self.sequence,
                sequences=self.sequences,
            )
        )
        total = sums.total if sums.extra is None else sums.total + sums.extra
        total.backward()


def run_head(job: HeadJob) -> dict[str, Any]:
    torch.set_num_threads(job.threads)
    loss = build_loss(job.loss, entropy_coef=naive_head.ENTROPY_COEF)
    trained = job.measure == "time"
    sides = ("naive", "asyncrl") if trained else (job.side,)
    small = Heads(job, trained, job.sequences)
    for side in sides:
        small.step(side, loss)  # libraries and threads are there before anything is measured
    del small
    heads = Heads(job, trained)
    answer: dict[str, Any] = {"versions": {"torch": metadata.version("torch"), "kernels": native.build()}}
    if not trained:
        answer["head_bytes"] = naive_head.peak_above(lambda: heads.step(job.side, loss))  # type: ignore[no-untyped-call]
        return answer

    def step_of(side: str) -> Callable[[], None]:
        return lambda: heads.step(side, loss)

    answer["times"] = naive_head.alternate({side: step_of(side) for side in sides}, job.steps)  # type: ignore[no-untyped-call]
    return answer
