"""TRL's heads, inside TRL's environment: `trl`, its chunked head, which GRPOTrainer uses, and `trl_logits`, over full logits.

Prints one JSON line: the peak above the inputs of `job["side"]`, or the seconds of both beside the naive head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import naive_head
import side
import torch
import trl
from naive_head import Inputs
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE, selective_log_softmax_and_entropy

OUTPUTS = ("log_probs", "entropy")


def chunked(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """As `add_fused_lm_head` calls it for GRPO."""
    logp, entropy, *_ = ChunkedLogProbFunction.apply(
        inputs.hidden, inputs.weight, None, inputs.target, inputs.temperature, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0,
        OUTPUTS,
    )  # fmt: skip
    return logp, entropy


def full_logits(inputs: Inputs) -> tuple[Tensor, Tensor]:
    logits = inputs.hidden @ inputs.weight.t()
    rows = inputs.sequences  # TRL's tensors are [sequences, tokens, V], and it goes over them one by one
    logp, entropy = selective_log_softmax_and_entropy(
        logits.view(rows, -1, logits.shape[1]), inputs.target.view(rows, -1), temperature=inputs.temperature
    )
    return logp.view(-1), entropy.view(-1)


SIDES: dict[str, Callable[[Inputs], tuple[Tensor, Tensor]]] = {
    "naive": naive_head.naive,
    "trl": chunked,
    "trl_logits": full_logits,
}


def step(name: str, inputs: Inputs) -> None:
    inputs.hidden.grad = inputs.weight.grad = None
    naive_head.plain_loss(inputs, *SIDES[name](inputs)).backward()


def main() -> None:
    job = side.job()
    torch.set_num_threads(job["threads"])
    small, inputs = Inputs(job, job["sequences"]), Inputs(job)
    found: dict[str, Any] = {"versions": {"trl": trl.__version__, "torch": torch.__version__}}
    if job["measure"] == "memory":
        step(job["side"], small)  # libraries and threads are there before the count begins
        found["head_bytes"] = side.peak_above(lambda: step(job["side"], inputs), job["device"])
    else:
        small.weight.requires_grad_()
        inputs.weight.requires_grad_()
        for name in SIDES:
            step(name, small)
        sides = {name: partial(step, name, inputs) for name in SIDES}
        found["times"] = naive_head.alternate(sides, job["steps"], job["device"])
    side.answer(found)


if __name__ == "__main__":
    main()
