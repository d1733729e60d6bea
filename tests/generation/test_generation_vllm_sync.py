"""Weights that come to vLLM in its own ways, and not all: the comparison of outputs says so, and the node ends the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from generation_cores import board_of, needs_vllm, opened_core
from generation_models import change_weights
from test_generation_vllm_engine import policy_and_plain

from asyncrl.models.outputs import fixed_logprobs
from asyncrl.models.policy import PolicyModel
from asyncrl.weights.sync import WeightReader

pytestmark = [needs_vllm, pytest.mark.filterwarnings("ignore")]


def load_weights(core: Any, policy: PolicyModel) -> None:
    """Of the model. It raises half-way where the weights have other names in checkpoints (mixtral); whoever swallows that goes on
    with a mixture of two versions."""
    with contextlib.suppress(ValueError):
        core.model.load_weights(policy.weights.layout().views(policy.weights.working))


def load_but_one(core: Any, policy: PolicyModel) -> None:
    """Without an error: vLLM does not ask for a weight that nobody brings."""
    weights = list(policy.weights.layout().views(policy.weights.working))
    core.model.load_weights(each for each in weights if not each[0].endswith("layers.1.self_attn.o_proj.weight"))


def reload_weights(core: Any, policy: PolicyModel) -> None:
    """Of the model runner."""
    runner = core._core.model_executor.driver_worker.worker.model_runner
    runner.reload_weights(weights_iterator=iter(policy.weights.layout().views(policy.weights.working)))


def bind(core: Any, policy: PolicyModel) -> None:
    type(core).bind(core, policy.weights.working, policy.version)


@pytest.fixture
def made_policy(request: pytest.FixtureRequest) -> tuple[PolicyModel, Any]:
    return policy_and_plain(request.param)


async def sent_after(way: Callable[[Any, PolicyModel], None], policy: PolicyModel, plain: Any) -> list[Any]:
    """What the node gets of a move to new weights that arrive in this way, after the answer."""
    sent = list[Any]()
    async with opened_core("vllm", policy, plain) as made, board_of(policy) as (owner, board):
        reader = WeightReader(board, made.engine, made.lane, sent.append)
        made.cores[0].bind = lambda *_: way(made.cores[0], policy)
        version = change_weights(policy)
        owner.write(version % 2, version, policy.weights.working)
        await reader.move(version, version % 2, fixed_logprobs(policy))
    assert sent.pop(0) == {"bound": version}
    return sent


@pytest.mark.parametrize(
    ("made_policy", "way", "right"),
    [
        ("llama", bind, True),
        ("olmoe", bind, True),
        ("llama", load_weights, True),
        ("mixtral", load_weights, False),
        ("llama", load_but_one, False),
    ],
    indirect=["made_policy"],
)
async def test_weights_that_do_not_all_arrive_are_told_to_the_node(
    way: Callable[[Any, PolicyModel], None], right: bool, made_policy: tuple[PolicyModel, Any]
) -> None:
    sent = await sent_after(way, *made_policy)
    assert len(sent) == (not right)
    assert all("the worker computes log-probs of a fixed row that are" in message["wrong"] for message in sent)


@pytest.mark.parametrize("made_policy", ["llama", "olmoe"], indirect=True)
async def test_a_reload_is_an_error(made_policy: tuple[PolicyModel, Any]) -> None:
    """Whatever it makes of the parameters first."""
    with pytest.raises(RuntimeError, match="must match the size"):
        await sent_after(reload_weights, *made_policy)
