"""TRL's own code, the oracle of this room."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def trl() -> Iterator[Any]:
    """Its classes. Their import is slow, warns, and needs float64 as the default where they build tensors from lists."""
    pytest.importorskip("trl", reason="the oracle comes with the extra `oracle`")
    default = torch.get_default_dtype()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.rewards import get_soft_overlong_punishment
        from trl.trainer.grpo_trainer import GRPOTrainer
        from trl.trainer.rloo_trainer import RLOOTrainer

        torch.set_default_dtype(torch.float64)
        yield SimpleNamespace(grpo=GRPOTrainer, rloo=RLOOTrainer, soft_overlong=get_soft_overlong_punishment)
    torch.set_default_dtype(default)


@pytest.fixture(scope="module")
def grpo_trainer(trl: Any) -> Any:
    return trl.grpo
