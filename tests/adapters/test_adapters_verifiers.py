"""A real environment of verifiers, played through the run's endpoint and trained by the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="needs verifiers: python tools/adapters.py verifiers")

import verifiers.v1 as vf
from adapters_helpers import cancel_play, chat_model, open_run, turns_of
from from_verifiers import from_verifiers

sys.path.append(str(Path(__file__).parent))
import verifiers_guess

# The package's own libraries warn of each other.
pytestmark = pytest.mark.filterwarnings("ignore")
CONFIG = {"taskset": {"id": "verifiers_guess"}, "agent": {"runtime": {"type": "subprocess"}}}


@pytest.fixture(autouse=True)
def nothing_blocks(blockbuster: Any) -> Iterator[None]:
    """In place of the check of conftest.py: verifiers itself makes folders in the event loop."""
    blockbuster.deactivate()
    yield
    blockbuster.activate()


def build(seed: int) -> tuple[Any, Any]:
    return chat_model(seed, ["yes", "no"])


async def test_an_environment_of_verifiers_trains_a_step_and_is_always_closed() -> None:
    rows, episode = from_verifiers(lambda: vf.load_environment(vf.resolve_env_config(CONFIG)))
    plain, raises, waits = rows()
    async with open_run(f"{__file__}:build", "rollout.max_tokens=2") as runtime:
        groups = [await runtime.play(episode, plain, n=8) for _ in range(2)]
        assert len(verifiers_guess.opened) == len(verifiers_guess.closed) == 16
        assert await runtime.play(episode, raises, n=2) == []
        await cancel_play(runtime, episode, waits, verifiers_guess.asked.is_set)
        summary = await runtime.finish()
    # Of two members that fail, the second may be cancelled before it has an environment.
    assert verifiers_guess.opened == verifiers_guess.closed and len(verifiers_guess.opened) in (18, 19)
    assert not [name for name in os.environ if name.startswith("EPISODE_")]
    for trajectory in [*groups[0], *groups[1]]:
        said = [m["content"] for m in trajectory.completion if m["role"] == "assistant"]
        assert turns_of(trajectory) == len(said) == trajectory.extras["own/guesses"] <= 3
        assert trajectory.branches is None and trajectory.reward == (said[-1] == "yes") / len(said)
    assert len({t.reward for group in groups for t in group}) > 1
    assert summary.version == 1 and summary.books.failed == 1
