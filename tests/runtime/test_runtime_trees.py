"""Episodes with branches and several replies through a real run: what a step counts, and what is trained of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runtime_helpers import REAL, embedded

from asyncrl.runtime.runtime import Runtime
from asyncrl.types import Trajectory

ONE = ("rollout.groups_per_step=1",)


def branched(t: Trajectory) -> Trajectory:
    """The completion twice: as it was sampled, and as a second branch behind the prompt. A reply each."""
    size, prompt = t.tokens.size, t.prompt_length
    again = np.r_[:size, prompt:size]
    columns = {name: getattr(t, name)[again] for name in ("tokens", "mask", "logprobs", "sampled_logprobs", "versions")}
    branches, turns = np.array([[size, prompt - 1]], np.int32), np.array([prompt, size], np.int32)
    return replace(t, branches=branches, turns=turns, turn_rewards=(float(t.member), 0.0), **columns)


@pytest.mark.parametrize(
    ("credit", "terms"),
    [("episode", ()), ("discounted", ("algorithm.kl.coef=0.1", "algorithm.updates_per_batch=2")), ("last_turn", ())],
)
async def test_a_step_of_trees(tmp_path: Path, credit: str, terms: tuple[str, ...]) -> None:
    async with Runtime(embedded(tmp_path, REAL, *ONE, f"algorithm.credit={credit}", *terms), write=False) as runtime:
        steps = runtime.steps()
        group = [branched(t) for t in await runtime.generate("a3=", n=4)]
        await runtime.submit(group, [0.0, 1.0, 2.0, 3.0])
        report = await anext(steps)
        sampled = sum(t.sampled_length for t in group)
        assert report.result.sequences == 4
        assert report.result.tokens == (sampled // 2 if credit == "last_turn" else sampled)
        # The trainer's log-probs of both branches are those of the sampler, which read the same tokens.
        assert terms or report.metrics["mismatch/current_max"] < 1e-4
        advantages = report.advantages[report.groups[0].group_id]
        # The return of a second reply is 0, and with the credit of its own its advantage too.
        assert np.sign(advantages).tolist() == [-1, -1, 1, 1]
        assert abs(advantages[0]) == pytest.approx(abs(advantages[3]))
        assert report.groups[0].trajectories[0].sampled_length == group[0].sampled_length
        await runtime.finish()
    assert runtime.version >= 1
