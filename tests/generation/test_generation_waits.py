"""When the host waits for the device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import warm
from generation_cores import small_model
from generation_models import generate_all, opened, request

from asyncrl.generation.embedded.sampling import Sampled
from asyncrl.models.policy import PolicyModel
from asyncrl.models.routes import Routes

PRETENDED = Path(__file__).with_name("generation_pretended.py")


@pytest.mark.parametrize(
    "arguments", ["steps qwen3", "steps qwen3 graphs", pytest.param("steps gemma2", marks=pytest.mark.slow), "terms"]
)
def test_on_a_pretended_gpu(arguments: str) -> None:
    """Steps wait for their tokens alone; attention with capped scores takes few launches."""
    with warm.Popen(
        [sys.executable, str(PRETENDED), *arguments.split()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as program:
        output, _ = program.communicate()
    assert program.returncode == 0, output.decode()


async def test_routes_are_read_behind_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before them, the device would wait until the host has launched the sampling."""
    order: list[str] = []
    read, routes = Sampled.read, Routes.numpy
    monkeypatch.setattr(Sampled, "read", staticmethod(lambda drawn: order.append("tokens") or read(drawn)))
    monkeypatch.setattr(Routes, "numpy", lambda own: order.append("routes") or routes(own))
    policy = PolicyModel(small_model("qwen3_moe"))
    async with opened(policy, record_routes=True) as run:
        await generate_all(run.engine, [request(5, 1, max_tokens=3)])
    assert order == ["routes", *["tokens", "routes"] * 3], "those of the prompt, then of each step"
