"""A real environment of verifiers, played through the run's endpoint and trained by the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="needs verifiers: python tools/adapters.py verifiers")

import numpy as np
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


async def test_its_train_client_gets_the_tokens_that_the_run_records(tmp_path: Path) -> None:
    """`TrainClient` renders by itself, and posts token ids to /inference/v1/generate."""
    from renderers import DefaultRendererConfig

    task = next(iter(vf.load_environment(vf.resolve_env_config(CONFIG)).taskset))
    seen: list[Any] = []

    async def episode(_: dict[str, Any], policy: Any) -> float:
        os.environ["EPISODE_KEY"] = policy.api_key
        environment = vf.load_environment(vf.resolve_env_config(CONFIG))
        client = vf.TrainClientConfig(
            base_url=policy.base_url,
            api_key_var="EPISODE_KEY",
            renderer=DefaultRendererConfig(),
            renderer_model_name=str(tmp_path),
        )
        async with environment.serving():
            played = await environment.run_episode(task, vf.ModelContext("policy", client))
        assert played.ok, played.errors
        seen.append(played.traces[0])
        return float(played.traces[0].reward)

    try:
        async with open_run(f"{__file__}:build", "rollout.max_tokens=2") as runtime:
            runtime.tokenizer.save_pretrained(tmp_path)
            trajectories = await runtime.play(episode, {"prompt": "-"}, n=1)
    finally:
        os.environ.pop("EPISODE_KEY", None)
    [trajectory], [trace] = trajectories, seen
    sampled = [node for node in trace.nodes if node.sampled]
    assert turns_of(trajectory) == len(sampled)
    tokens = [token for node in sampled for token, own in zip(node.token_ids, node.mask, strict=True) if own]
    logprobs = np.array([value for node in sampled for value in node.logprobs], np.float32)
    assert trajectory.tokens[trajectory.mask].tolist() == tokens
    assert trajectory.logprobs[trajectory.mask].tobytes() == logprobs.tobytes()
