"""The head in the usual way, full logits and autograd, and how memory and time of a head are measured: torch and nothing else.

Every side is a function of the same inputs that ends with a backward. Used by asyncrl's child and inside TRL's environment.
"""

import time
from pathlib import Path

import torch

ENTROPY_COEF = 0.01


class Inputs:
    """Hidden states [S, E], the head's weight [V, E] and targets [S] of a job, the same for every side."""

    def __init__(self, job, tokens=None):  # type: ignore[no-untyped-def]
        dtype = getattr(torch, job["dtype"])
        draw = torch.Generator().manual_seed(job["seed"])
        rows = tokens or job["tokens"]
        self.hidden = torch.randn(rows, job["hidden"], generator=draw).to(dtype).requires_grad_()
        self.weight = (torch.randn(job["vocabulary"], job["hidden"], generator=draw) * job["hidden"] ** -0.5).to(dtype)
        self.target = torch.randint(job["vocabulary"], (rows,), generator=draw)
        self.advantage = torch.randn(rows, generator=draw)
        self.temperature = job["temperature"]


def naive(inputs):  # type: ignore[no-untyped-def]
    """Log-probs and entropies [S]. The softmax stays in the dtype of the products, which is the cheapest form there is."""
    logits = inputs.hidden @ inputs.weight.t()
    logp = torch.log_softmax(logits / inputs.temperature, -1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(1, inputs.target.unsqueeze(1)).squeeze(1), entropy


def plain_loss(inputs, logp, entropy):  # type: ignore[no-untyped-def]
    """REINFORCE with an entropy bonus, for sides that cannot import asyncrl's losses."""
    return -(logp.float() * inputs.advantage).sum() - ENTROPY_COEF * entropy.float().sum()


def status(key):  # type: ignore[no-untyped-def]
    """Bytes from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"no {key} in /proc/self/status; this benchmark runs on Linux")


def peak_above(run):  # type: ignore[no-untyped-def]
    """Most resident bytes while `run` runs, above those before it."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is that of making the inputs
    before = status("VmRSS")
    run()
    return max(status("VmHWM") - before, 0)


def alternate(sides, steps):  # type: ignore[no-untyped-def]
    """Seconds of each side, by the clock and of the CPU, `steps` times in turns; the first side changes every time.

    On a machine that others use, the CPU seconds of the process are the fairer measure: they leave out the waiting.
    """
    names = list(sides)
    taken: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "cpu_seconds": []} for name in names}
    for step in range(steps):
        for name in names if step % 2 == 0 else reversed(names):
            started, cpu = time.perf_counter(), time.process_time()
            sides[name]()
            taken[name]["cpu_seconds"].append(time.process_time() - cpu)
            taken[name]["seconds"].append(time.perf_counter() - started)
    return taken
