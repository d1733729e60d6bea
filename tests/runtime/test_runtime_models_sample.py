"""A family of each kind through a run's own load path, against transformers' eager model: tools/model_sweep.py has the rest."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from model_sweep import SAMPLE, complaint
from small_models import ROW


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """One thread and an environment of its own are the sweep's."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    os.environ.pop(ROW, None)


@pytest.mark.parametrize(
    "name", [name if name != "falcon_h1" else pytest.param(name, marks=pytest.mark.slow) for name in SAMPLE]
)
def test_a_family_is_computed_as_by_itself(name: str) -> None:
    assert complaint(name) is None
