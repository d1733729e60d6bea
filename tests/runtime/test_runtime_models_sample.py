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


NIGHTLY = ("mistral", "gemma3_text", "granite multipliers", "phi3", "falcon_h1", "cohere2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in NIGHTLY else []) for name in SAMPLE]
)
def test_a_family_is_computed_as_by_itself(name: str) -> None:
    assert complaint(name) is None
