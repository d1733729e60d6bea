"""`asyncrl bench`: measurements against other systems and the limits of this machine.

    step.py       whole RL steps: options, the alternating runs, what is kept of each (`tools/bench_step.py` is the same door)
    train.py      training alone; generate.py: generation alone; sweep.py: decode steps by sequences and context
    head.py       the LM head alone: memory and time
    overlap.py    dry runs on two devices: the runtime by itself (in this process: nothing is computed)
    shares.py     what these share: options; medians, shares of the limit, the document of train and generate
    job.py        one side's task as data; prompts and models, made once and cached
    processes.py  one child process per run; the peers' own virtual environments
    child.py      what runs in asyncrl's own child processes (with child_train, child_head, child_generate and models: all that
                  imports torch)
    peers/        scripts that run inside a peer's environment and must not import asyncrl; the reward both sides use
    transport.py  handing groups over: options, the alternating runs; transport_report.py: medians, goals, table, plot
    handover.py   what runs in asyncrl's own processes of it; handover_costs.py: writing and reading by themselves
    report.py     FLOP limit, medians, table, JSON, plot

The parent process imports no torch: it would only take memory and threads from the sides that are measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from asyncrl.telemetry.machine import describe_cpu

USAGE = """\
usage: asyncrl bench [step | generate | train | head | overlap | transport] [options]

  step        whole RL steps against TRL's GRPOTrainer: sampled tokens per second, share of the arithmetic limit, memory
  generate    generation alone, against vLLM on the CPU (--peer vllm); --sweep: decode steps by sequences and context
  train       training alone: share of the GEMM rate, and where the time of a step goes
  head        log-probs, entropy and gradients of the LM head: memory and time against full logits and TRL's head
  overlap     a dry run on two devices of equal cost: step time against the longer of the two
  transport   handing a group of trajectories to another process: the record ring, the tensor queue,
              multiprocessing.Queue, memcpy; with --peers Ray, TransferQueue, Atropos' HTTP API

`asyncrl bench step --help` lists the options; `--quick` is a smoke test of some seconds, of each of them.
"""


def _step(arguments: Sequence[str]) -> int:
    from .step import main as step

    return step(arguments)


def _generate(arguments: Sequence[str]) -> int:
    from .generate import main as generate

    return generate(arguments)


def _train(arguments: Sequence[str]) -> int:
    from .train import main as train

    return train(arguments)


def _head(arguments: Sequence[str]) -> int:
    from .head import main as head

    return head(arguments)


def _overlap(arguments: Sequence[str]) -> int:
    from .overlap import main as overlap

    return overlap(arguments)


def _transport(arguments: Sequence[str]) -> int:
    from .transport import main as transport

    return transport(arguments)


BENCHES: dict[str, Callable[[Sequence[str]], int]] = {
    "step": _step,
    "generate": _generate,
    "train": _train,
    "head": _head,
    "overlap": _overlap,
    "transport": _transport,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0; 1 where a run failed; 2 for a wrong command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if not given or given[0].startswith("-"):  # `asyncrl bench --quick` is `asyncrl bench step --quick`
        given = ["step", *given]
    bench = BENCHES.get(given[0])
    if bench is None:
        print(f"asyncrl bench: there is no {given[0]!r}; there is: {', '.join(BENCHES)}\n\n{USAGE}", file=sys.stderr)
        return 2
    code = bench(given[1:])
    if code == 0:
        print(f"measured on {describe_cpu()}")
    return code
