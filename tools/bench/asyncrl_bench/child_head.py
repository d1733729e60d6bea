"""`child.py head`: memory and time of asyncrl's head and of full logits, in this process; `peers/trl_head.py` is TRL's.

`asyncrl` are the head's passes by torch, `asyncrl_liger` the same by Liger's kernels, which need a GPU.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.algorithms.base import Loss, LossInputs
from asyncrl.algorithms.registry import build_loss
from asyncrl.models.head.liger import choose_head_kernel
from asyncrl.models.head.logprobs import HeadKernel, token_logprobs
from asyncrl.models.parameters.flat import FlatParameters, FlatWeights
from asyncrl.models.parameters.packed import JoinedLinear, packing_works

from .job import LIGER, HeadJob
from .machine import versions
from .peers import naive_head
from .peers.side import peak_above


class Heads:
    """All heads over the same inputs. asyncrl's add the weight's gradient to a flat buffer, as in training."""

    def __init__(self, job: HeadJob, trained: bool, liger: HeadKernel | None, tokens: int | None = None) -> None:
        """`trained`: the weight has a gradient. `tokens`: other than the job's."""
        self.inputs = naive_head.Inputs(asdict(job), tokens)
        self.kernels = {"asyncrl": None, LIGER: liger}
        rows = self.inputs.target.numel()
        self.temperature = torch.full((rows,), job.temperature)
        self.sequence = torch.arange(rows, device=job.device) * job.sequences // rows
        self.sequences = job.sequences
        head = nn.Linear(job.hidden, job.vocabulary, bias=False, dtype=self.inputs.weight.dtype, device="meta")
        head.weight = nn.Parameter(self.inputs.weight)
        flat: FlatWeights
        flat = FlatParameters(head, head.weight.dtype) if trained else FlatWeights(head, head.weight.dtype)
        self.inputs.weight = head.weight  # the naive side's own gradient lies in it
        self.buffer = None if flat.grad is None else flat.view(flat.grad, 0)
        pack = packing_works(flat.working.dtype, flat.working.device)
        self.project = JoinedLinear(flat, [head], {id(head.weight): 0}, pack)

    def results(self, side: str) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [S]."""
        inputs = self.inputs
        if side == "naive":
            return naive_head.naive(inputs)
        return token_logprobs(
            inputs.hidden, inputs.weight, inputs.target, self.temperature, grad_buffer=self.buffer, entropy_grad=True,
            project=self.project, kernel=self.kernels[side],
        )  # fmt: skip

    def step(self, side: str, loss: Loss) -> None:
        """Forward, loss and backward."""
        inputs = self.inputs
        inputs.hidden.grad = None
        logp, entropy = self.results(side)
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
        sums.total.backward()


def run_head(job: HeadJob) -> dict[str, Any]:
    if job.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch finds no CUDA device here")
    torch.set_num_threads(job.threads)
    loss = build_loss(job.loss, entropy_coef=naive_head.ENTROPY_COEF)
    trained = job.measure == "time"
    sides = ("naive", "asyncrl", *((LIGER,) if job.liger else ())) if trained else (job.side,)
    liger = None
    if LIGER in sides:
        liger = choose_head_kernel("liger", torch.device(job.device), getattr(torch, job.dtype), job.vocabulary)
    small = Heads(job, trained, liger, job.sequences)
    for side in sides:
        small.step(side, loss)  # libraries, kernels and threads are there before anything is measured
    del small
    heads = Heads(job, trained, liger)
    found = versions(*(("liger-kernel", "triton") if liger is not None else ()))
    if job.device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    answer: dict[str, Any] = {"versions": found}
    steps = {side: partial(heads.step, side, loss) for side in sides}
    if trained:
        answer["times"] = naive_head.alternate(steps, job.steps, job.device)
    else:
        answer["head_bytes"] = peak_above(steps[job.side], job.device)
    return answer
