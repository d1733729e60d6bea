"""Weights that come to vLLM in its own ways, and not all: the comparison of outputs says so, and the node ends the run."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from generation_cores import needs_vllm, opened_core
from generation_models import change_weights
from test_generation_vllm_engine import policy_and_plain

from asyncrl.concurrency.channel import Channel
from asyncrl.generation.worker.server import Server
from asyncrl.models.outputs import fixed_logprobs
from asyncrl.models.policy import PolicyModel
from asyncrl.transport.memory.board import Board

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
    type(core).bind(core, policy.weights.working)


@pytest.fixture
def made_policy(request: pytest.FixtureRequest) -> tuple[PolicyModel, Any]:
    return policy_and_plain(request.param)


@pytest.fixture
def boards(made_policy: tuple[PolicyModel, Any]) -> Iterator[tuple[Board, Board]]:
    """The node's end and the worker's."""
    weights = made_policy[0].weights
    with Board.create(weights.size, torch.float32, weights.layout_digest()) as owner:
        with Board.attach(owner.description, os.dup(owner.fd), owner.layout) as reader:
            yield owner, reader


Boards = tuple[Board, Board]


async def said_of(way: Callable[[Any, PolicyModel], None], policy: PolicyModel, plain: Any, boards: Boards) -> Any:
    """What the node hears of a move to new weights that arrive in this way, after its answer."""
    owner, reader = boards
    node, worker = socket.socketpair()
    ours, theirs = Channel(node, "worker 0"), Channel(worker, "the node")
    producer: Any = None  # nothing is generated
    try:
        async with opened_core("vllm", policy, plain) as made:
            server = Server(theirs, made.engine, made.lane, reader, producer)
            made.cores[0].bind = lambda _, **__: way(made.cores[0], policy)
            version = change_weights(policy)
            owner.write(version % 2, version, policy.weights.working)
            await server.weights.move(version, version % 2, fixed_logprobs(policy))
            theirs.send({"last": 0})
            assert await ours.receive() == {"bound": version}
            return await ours.receive()
    finally:
        ours.close()
        theirs.close()


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
    way: Callable[[Any, PolicyModel], None], right: bool, made_policy: tuple[PolicyModel, Any], boards: Boards
) -> None:
    said = await said_of(way, *made_policy, boards)
    if right:
        assert said == {"last": 0}
    else:
        assert "it computes log-probs of a fixed row that are" in said["wrong"]


@pytest.mark.parametrize("made_policy", ["llama", "olmoe"], indirect=True)
async def test_a_reload_is_an_error(made_policy: tuple[PolicyModel, Any], boards: Boards) -> None:
    """Whatever it makes of the parameters first."""
    with pytest.raises(RuntimeError, match="must match the size"):
        await said_of(reload_weights, *made_policy, boards)
