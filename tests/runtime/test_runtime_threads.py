"""Which thread computes: nothing that torch shares among threads runs on the event loop's."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_helpers import MODEL, REAL, config_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl.runtime.runtime import Runtime

SHARED_FROM = 32_768  # elements of an operation (at::internal::GRAIN_SIZE)


class Large(TorchDispatchMode):
    """Operations of the thread that enters it, by where in our code they were called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
        if max(sizes, default=0) >= SHARED_FROM and not function.is_view:
            ours = [frame for frame in traceback.extract_stack() if "/asyncrl/" in frame.filename]
            self.found.append(f"{function} in {ours[-1].filename}:{ours[-1].lineno}")
        return result


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize(
    "placed", [["generation.placement=shared"], ["generation.placement=worker", "generation.threads=1"]]
)
async def test_nothing_that_torch_shares_among_threads_runs_on_the_loops_thread(
    tmp_path: Path, placed: list[str]
) -> None:
    """It would leave a pool of threads there, and those of the lane would no longer spin between two operations."""
    own = f"model.path={MODEL}:build_deep", "train.max_steps=2", *placed
    with Large() as large:
        async with Runtime(config_of(tmp_path, *own, base=REAL)) as runtime:
            summary = await runtime.run()
    assert summary.version == 2 and large.found == []
