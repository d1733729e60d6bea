"""What runs in asyncrl's own child processes: `python -m asyncrl_bench.child COMMAND JOB.json`, one JSON line at the end.

The scripts of peers/ are called in the same way, each by its own interpreter. A command's module is imported when it is asked for:
the sides that hand groups over need no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from . import job as jobs
from .peers.side import answer

# command -> its job, the module and the function that does it
COMMANDS: dict[str, tuple[type[jobs.Job], str, str]] = {
    "model": (jobs.ModelJob, "models", "make_model"),
    "rates": (jobs.RatesJob, "machine", "rates"),
    "step": (jobs.StepJob, "child_step", "run_steps"),
    "sides": (jobs.StepJob, "child_overlap", "run_sides"),
    "overlap": (jobs.StepJob, "child_overlap", "run_overlap"),
    "weights": (jobs.StepJob, "child_weights", "run_weights"),
    "train": (jobs.TrainJob, "child_train", "run_training"),
    "generate": (jobs.GenerateJob, "child_generate", "run_generation"),
    "turns": (jobs.TurnsJob, "child_generate", "run_turns"),
    "sweep": (jobs.SweepJob, "child_generate", "run_sweep"),
    "head": (jobs.HeadJob, "child_head", "run_head"),
    "handover": (jobs.HandoverJob, "child_handover", "run_handover"),
    "ledger": (jobs.LedgerJob, "child_ledger", "run_ledger"),
    "broadcast": (jobs.BroadcastJob, "child_broadcast", "run_broadcast"),
    "costs": (jobs.HandoverJob, "child_costs", "run_costs"),
}

if __name__ == "__main__":
    kind, module, function = COMMANDS[sys.argv[1]]
    answer(getattr(import_module(f"asyncrl_bench.{module}"), function)(kind.read(Path(sys.argv[2]))))
