"""`preset: sync`: the same command trains the same weights bit by bit, also on several ranks, which train what one rank does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from runtime_helpers import REAL, config_of, equal_weights, start_two, weights_of

from asyncrl import Runtime

DUMP = str(Path(__file__).with_name("runtime_rank.py"))
SYNC: dict[str, Any] = REAL | {
    "preset": "sync",
    "model": REAL["model"] | {"dtype": "float64"},
    "rollout": REAL["rollout"] | {"groups_per_step": 5},
    "train": REAL["train"] | {"max_steps": 3},
    "telemetry": {"live": "off", "trace": False, "report": False},
}


async def test_two_ranks_train_their_ordinals_of_each_step_and_the_weights_of_one_rank(tmp_path: Path) -> None:
    """Five groups a step: three and two, then two and three. Again, with an equal command: every bit."""
    ended: list[list[dict[str, Any]]] = []
    for name in ("first", "again"):
        folder = tmp_path / name
        folder.mkdir()
        with start_two(folder, SYNC, program=(DUMP,), RANK_WEIGHTS=str(folder)) as ranks:
            assert [each.wait(120) for each in ranks] == [0, 0], [each.output for each in ranks]
        ended.append([torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in (0, 1)])
    (one, other), again = ended
    assert one["groups"] == [[0, 2, 4], [6, 8], [10, 12, 14]] and other["groups"] == [[1, 3], [5, 7, 9], [11, 13]]
    for rank in (0, 1):
        assert equal_weights(again[rank]["weights"], one["weights"]) and again[rank]["rows"] == ended[0][rank]["rows"]
    async with Runtime(config_of(tmp_path, base=SYNC)) as runtime:
        await runtime.run()
    expected = weights_of(tmp_path / "runs/run", 3)
    for name, weight in weights_of(tmp_path / "first/runs/run", 3).items():
        assert weight.dtype == torch.float64
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-12)
