"""`asyncrl.client`: what is pushed arrives equal, numpy is all it needs, and its own distribution holds all it needs."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
from transport_records import drop

import asyncrl
from asyncrl.client import AsyncClient, Client, Scored
from asyncrl.errors import RecordError
from asyncrl.records.trajectories import group_metadata, trajectories_of
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.types import RingSettings
from asyncrl.types import FinishReason

ROOT = Path(__file__).resolve().parents[2]
DEEP = functools.reduce(lambda inner, _: [inner], range(5000), "deep")
NESTED = functools.reduce(lambda inner, _: [inner], range(900), "deep")
SMALL = RingSettings(total_bytes=1 << 20, slots=8, payload_bytes=1 << 16)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"client-{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**9}"


async def test_a_group_arrives_as_trajectories(name: str) -> None:
    async with RecordRing(name, SMALL) as ring:
        async with await AsyncClient.attach(name, epoch=5) as client:
            assert client.policy_version == -1
            ring.publish_version(3)
            scored = [
                Scored(
                    tokens=[1, 2, 3 + i],
                    reward=0.5 * i,
                    mask=[0, 1, 1],
                    logprobs=np.array([0, -0.5, -1], np.float64),
                    versions=[-1, 2, 3],
                    prompt_length=1,
                    temperature=0.5,
                    finish_reason="length",
                    components={"format": 1.0, "answer": None},
                    messages=[{"role": "assistant", "content": "x"}],
                    metadata={"seed": i},
                )
                for i in range(2)
            ]
            await client.push(7, scored, metadata={"task": "adding"})
            await client.push(
                8, [{"tokens": np.arange(4, dtype=np.int64), "prompt_length": 1}], members=[2], group_size=4
            )
            first, second = await ring.get(), await ring.get()
            assert client.statistics().puts == 2
        a, b = trajectories_of(first.record)
        assert (a.group_id, a.member, b.member, a.group_size, first.record.epoch) == (7, 0, 1, 2, 5)
        assert b.tokens.tolist() == [1, 2, 4] and a.mask.tolist() == [False, True, True]
        assert a.logprobs.tolist() == a.sampled_logprobs.tolist() == [0, -0.5, -1] and a.versions.tolist() == [-1, 2, 3]
        assert (b.reward, a.temperature, a.finish_reason) == (0.5, 0.5, FinishReason.LENGTH)
        assert a.components == {"format": 1.0, "answer": None} and b.metadata == {"seed": 1}
        assert a.completion == [{"role": "assistant", "content": "x"}]
        assert group_metadata(first.record) == {"task": "adding"}
        (c,) = trajectories_of(second.record)
        assert (c.member, c.group_size, c.reward) == (2, 4, None)
        assert c.mask.tolist() == [False, True, True, True]
        assert c.versions.tolist() == [-1, 3, 3, 3]  # the version the run was at when it was pushed
        drop(ring)


async def test_what_is_wrong_is_said_and_nothing_is_pushed(name: str) -> None:
    async with RecordRing(name, SMALL) as ring:
        async with await AsyncClient.attach(name) as client:
            for scored, words in (
                ([{"token": [1]}], r"unknown fields \['token'\]"),
                ([{"reward": 1.0}], "tokens are missing"),
                (
                    [Scored([1], prompt_length=1), Scored([1, 2], mask=[0, 1])],
                    r"mask is missing for trajectories \[0\]",
                ),
                (
                    [Scored([1], prompt_length=1, finish_reason="done")],
                    "trajectory 0: finish_reason is 'done'; expected one",
                ),
                ([Scored([1], reward=float("inf"))], "trajectory 0: reward is inf; expected a finite"),
                ([Scored([1], reward=10**400)], "finite"),
                ([Scored([1, 2], prompt_length=1, logprobs=[0.0])], "LOGPROBS: expected one array per member"),
                ([Scored([1, 2], mask=[0, 1]), Scored([1, 2])], "trajectory 1: mask and prompt_length"),
                ([Scored([1, 2], mask=[1, 1])], "trajectory 0: prompt_length is 0"),
                ([Scored([1, 2], prompt_length=0)], "trajectory 0: prompt_length is 0"),
                ([Scored([1, 2])], "trajectory 0: mask and prompt_length"),
                (
                    [Scored([1, 2, 3], mask=[0, 1, 1], prompt_length=2)],
                    "trajectory 0: mask trains a token of the prompt",
                ),
                ([Scored([1, 2], mask=[1, 1], prompt_length=1)], "trajectory 0: mask trains a token of the prompt"),
                *(
                    ([Scored([1, 2], prompt_length=1, temperature=t)], f"trajectory 0: temperature is {t}; .* 1e-06 to")
                    for t in (0.0, float("nan"), 1e-40)
                ),
                ([Scored([1, 2], prompt_length=1, metadata={"a": NESTED})], "trajectory 0: .*more than 64 levels deep"),
                (
                    [Scored([1, 2], prompt_length=1, metadata={"a": 2**64})],
                    "trajectory 0: an integer .* write it as text",
                ),
                ([Scored([1, 2], prompt_length=1, messages=[DEEP])], "the messages must be JSON"),
                ([Scored([1, 2], prompt_length=1, messages="\ud800")], "surrogates not allowed"),
            ):
                with pytest.raises(RecordError, match=words):
                    await client.push(0, scored)  # type: ignore[arg-type]
            with pytest.raises(RecordError, match="1 trajectories with 2 member numbers"):
                await client.push(0, [Scored([1], prompt_length=1)], members=[0, 1])
        assert ring.statistics().records == 0


async def test_pushing_again_under_the_same_epoch_is_harmless(name: str) -> None:
    async with RecordRing(name, SMALL) as ring:
        for group in (0, 0, 1):
            client = await asyncio.to_thread(Client.attach, name, epoch=1)
            with client:
                await asyncio.to_thread(
                    client.push, group, [Scored([1], prompt_length=1), Scored([2], prompt_length=1)]
                )
        for group in (0, 1):
            delivery = await ring.get()
            assert delivery.record.group == group
            delivery.release()
        s = ring.statistics()
        assert (s.records, s.duplicates, s.outstanding) == (2, 2, 0)


PROGRAM = """
import sys
from asyncrl.client import Client, Scored
with Client.attach(sys.argv[1], timeout=20) as client:
    client.push(3, [Scored(tokens=[1, 2, 3], mask=[0, 1, 1], reward=1.0)])
foreign = {m.partition(".")[0] for m in sys.modules} - set(sys.stdlib_module_names) - {"__main__", "__mp_main__"}
print(sorted(m for m in foreign if not m.startswith("_")))
"""


def build_wheel(folder: Path) -> Path:
    """The client's wheel, from a copy of the tree (setuptools writes beside the sources)."""
    shutil.copytree(ROOT / "asyncrl", folder / "asyncrl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "client", folder / "client")
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    command = [sys.executable, "-W", "ignore", "-c", build, str(folder)]
    subprocess.run(command, cwd=folder / "client", check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    return wheel


async def test_the_distribution_of_its_own_pushes_with_numpy_alone(name: str, tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    wheel = await asyncio.to_thread(build_wheel, tmp_path)
    assert wheel.name.startswith("asyncrl_client-0.1.0-")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        text = archive.read("asyncrl_client-0.1.0.dist-info/METADATA").decode()
    assert [row for row in text.splitlines() if row.startswith("Requires-Dist")] == ["Requires-Dist: numpy"]
    packages = Path(sysconfig.get_paths()["purelib"])
    for part in ("numpy", "numpy.libs"):  # numpy, and nothing else that is installed here
        if (packages / part).exists():
            (site / part).symlink_to(packages / part)
    async with RecordRing(name, SMALL) as ring:
        program = f"import sys; sys.path.insert(0, {str(site)!r})\n" + PROGRAM
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            "-c",
            program,
            name,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        assert out.decode().strip() == "['asyncrl', 'numpy']"
        delivery = await ring.get()
        assert trajectories_of(delivery.record)[0].tokens.tolist() == [1, 2, 3]
        delivery.release()


def test_both_distributions_have_one_version() -> None:
    client = tomllib.loads((ROOT / "client/pyproject.toml").read_text())["project"]["version"]
    assert client == asyncrl.__version__
