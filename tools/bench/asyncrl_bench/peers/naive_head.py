"""The head in the usual way, full logits and autograd, and how the time of a head is measured: torch and nothing else.

Every side is a function of the same inputs that ends with a backward. Used by asyncrl's child and inside TRL's environment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

ENTROPY_COEF = 0.01


class Inputs:
    """Hidden states [S, E], the head's weight [V, E] and targets [S] of a job, the same for every side."""

    def __init__(self, job: Mapping[str, Any], tokens: int | None = None) -> None:
        """`tokens`: other than the job's."""
        device, dtype = job["device"], getattr(torch, job["dtype"])
        draw = torch.Generator().manual_seed(job["seed"])
        rows: int = tokens or job["tokens"]
        hidden, vocabulary = job["hidden"], job["vocabulary"]
        self.hidden: Tensor = torch.randn(rows, hidden, generator=draw).to(device, dtype).requires_grad_()
        self.weight: Tensor = (torch.randn(vocabulary, hidden, generator=draw) * hidden**-0.5).to(device, dtype)
        self.target: Tensor = torch.randint(vocabulary, (rows,), generator=draw).to(device)
        self.advantage: Tensor = torch.randn(rows, generator=draw).to(device)
        self.temperature: float = job["temperature"]
        self.sequences: int = job["sequences"]


def naive(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [S]. The softmax stays in the dtype of the products, which is the cheapest form there is."""
    logits = inputs.hidden @ inputs.weight.t()
    logp = torch.log_softmax(logits / inputs.temperature, -1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(1, inputs.target.unsqueeze(1)).squeeze(1), entropy


def plain_loss(inputs: Inputs, logp: Tensor, entropy: Tensor) -> Tensor:
    """REINFORCE with an entropy bonus, for sides that cannot import asyncrl's losses."""
    return -(logp.float() * inputs.advantage).sum() - ENTROPY_COEF * entropy.float().sum()


def alternate(
    sides: Mapping[str, Callable[[], None]], steps: int, device: str = "cpu"
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each side, by the clock and of the CPU, `steps` times in turns; the first side changes every time.

    On a machine that others use, the CPU seconds of the process are the fairer measure: they leave out the waiting. With a
    GPU they are those of launching alone.
    """
    names = list(sides)
    taken: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "cpu_seconds": []} for name in names}
    for step in range(steps):
        for name in names if step % 2 == 0 else reversed(names):
            if device == "cuda":
                torch.cuda.synchronize()
            started, cpu = time.perf_counter(), time.process_time()
            sides[name]()
            taken[name]["cpu_seconds"].append(time.process_time() - cpu)
            if device == "cuda":
                torch.cuda.synchronize()
            taken[name]["seconds"].append(time.perf_counter() - started)
    return taken
