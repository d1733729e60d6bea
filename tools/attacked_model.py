"""What the attacks on whole runs train: the quickstart's model, smaller and without its warm-up.

A life of an attack is a few steps: most of its CPU time would be that warm-up. Everything else of the run is the same.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import quickstart_model

quickstart_model.warm_up = lambda *_: None


def build(seed: int) -> tuple[Any, Any]:
    return quickstart_model.build(seed, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8)
