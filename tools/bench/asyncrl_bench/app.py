"""`asyncrl bench BENCH [options]`: which benches there are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from asyncrl.telemetry.machine import describe_cpu

from .command import run

BENCHES = (
    "step",
    "generate",
    "turns",
    "endpoint",
    "train",
    "head",
    "overlap",
    "overlap-dry",
    "weights",
    "transport",
    "nodes",
    "agents",
)  # each a module with its BENCH
USAGE = f"""\
usage: asyncrl bench [{" | ".join(BENCHES)}] [options]

  step        whole RL steps against TRL's GRPOTrainer: sampled tokens per second, share of the arithmetic limit, memory
  generate    generation alone, against vLLM on the CPU (--peer vllm); --sweep: decode steps by sequences and context
  turns       episodes of several turns: keys and values kept between turns against computed again
  endpoint    tokens per second of concurrent sessions: through policy.base_url against the policy in the process
  train       training alone: share of the GEMM rate, and where the time of a step goes
  head        log-probs, entropy and gradients of the LM head: memory and time against full logits and TRL's head
  overlap     generation and training on one core each: step time against either side alone, hand-over of weights, timeline
  overlap-dry a dry run on two devices of equal cost: step time against the longer of the two
  weights     new weights while requests are in flight: the pause that they see, the total; embedded, vLLM, AsyncLLM
  transport   handing a group of trajectories to another process: the record ring, the line,
              multiprocessing.Queue, memcpy; with --peers Ray, TransferQueue, Atropos' HTTP API
  nodes       ledger transitions and groups a second over the line between ranks; weights by broadcast to other nodes;
              a simulation of many nodes
  agents      whole steps of agents whose tools take 0.2 to 2 s, against the same agents with instant tools

`asyncrl bench step --help` lists the options; `--quick` is a smoke test of some seconds, of each of them.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0; 1 where a run failed; 2 for a wrong command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if not given or given[0].startswith("-"):  # `asyncrl bench --quick` is `asyncrl bench step --quick`
        given = ["step", *given]
    if given[0] not in BENCHES:
        print(f"asyncrl bench: there is no {given[0]!r}; there is: {', '.join(BENCHES)}\n\n{USAGE}", file=sys.stderr)
        return 2
    code = run(import_module(f"asyncrl_bench.{given[0].replace('-', '_')}").BENCH, given[1:])
    if code == 0:
        print(f"measured on {describe_cpu()}")
    return code
