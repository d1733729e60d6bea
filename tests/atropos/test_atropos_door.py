"""The HTTP door over real sockets into a real record ring: replies, backpressure, resends, and what lands in the ring."""

from __future__ import annotations

import asyncio
import gzip
import os
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest
import warm

from asyncrl.errors import ConfigError, LifecycleError

aiohttp = pytest.importorskip("aiohttp", reason="needs the extra [http]")

from atropos_helpers import TERMS, group, opened  # noqa: E402

from asyncrl.atropos.door import FORGET_S, AtroposDoor, Environments  # noqa: E402
from asyncrl.atropos.groups import RankRings  # noqa: E402
from asyncrl.http.access import Address  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


async def test_a_group_posted_as_atropos_posts_it_lies_in_the_ring(name: str) -> None:
    async with opened(name) as s:
        assert await s.post("/scored_data", group(7, 8)) == (200, {"status": "received", "groups_processed": 1})
        delivery, (first, second) = await s.next()
        assert first.tokens.tolist() == [5, 7, 9] and first.mask.tolist() == [False, True, True]
        assert second.logprobs.tolist() == pytest.approx([0, -0.8, -0.25]) and second.versions.tolist() == [-1, 3, 3]
        assert (first.reward, second.reward, first.prompt_length, first.group_size) == (7.0, 8.0, 1, 2)
        delivery.release()
        columns = {"tokens": (5, 7), "masks": (-100, 7), "inference_logprobs": (1.0, -0.5)}
        long = group(7, **{column: [[first] + [then] * 500] for column, (first, then) in columns.items()})
        assert (await s.post("/scored_data", long))[0] == 200  # compressed
        delivery, (only,) = await s.next()
        assert only.tokens.size == 501 and set(only.logprobs[1:].tolist()) == {-0.5}
        delivery.release()


async def test_a_list_is_taken_group_by_group_and_the_bad_ones_are_named(name: str) -> None:
    async with opened(name) as s:
        code, reply = await s.post("/scored_data_list", [group(7, 8), group(7, advantages=[[1, 1, 1]]), group(9)])
        assert (code, reply["groups_processed"]) == (422, 2)
        assert [one["index"] for one in reply["refused"]] == [1] and "advantages" in reply["message"]
        found = []
        for _ in range(2):
            delivery, members = await s.next()
            found.append([m.reward for m in members])
            delivery.release()
        assert found == [[7.0, 8.0], [9.0]]
        assert (s.door.groups.statistics.groups, s.door.groups.statistics.refused) == (2, 1)


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        (b'{"tokens": [[1', {}, 400),
        (b'{"scores": [NaN]}', {}, 400),
        (rb'{"messages": ["\ud800"]}', {}, 400),
        (b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", {}, 400),
        (b"", {}, 400),
        (b"\x1f\x8bnonsense", {"Content-Encoding": "gzip"}, 400),
        (gzip.compress(b'{"tokens": [[1, 2]]}')[:-9], {"Content-Encoding": "gzip"}, 400),
        (b"{}", {"Content-Encoding": "br"}, 415),
        (b"3", {}, 422),
    ],
)
async def test_nonsense_is_answered_and_the_door_stays_open(
    name: str, body: bytes, headers: dict[str, str], code: int
) -> None:
    async with opened(name) as s:
        headers = {"Content-Type": "application/json", **headers}
        async with s.http.post(f"{s.door.url}/scored_data", data=body, headers=headers) as reply:
            assert reply.status == code
        assert (await s.post("/scored_data", group(7)))[0] == 200


async def test_a_full_ring_holds_the_reply_back_until_something_was_trained(name: str) -> None:
    async with opened(name) as s:
        for _ in range(2):
            assert (await s.post("/scored_data", group(7)))[0] == 200
        replies: list[int] = []

        async def third() -> None:
            replies.append((await s.post("/scored_data", group(9)))[0])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(third)
            while not s.client.statistics().waits:
                await anyio.lowlevel.checkpoint()
            assert not replies
            (await s.next())[0].release()
        assert replies == [200]


async def test_what_finds_no_room_in_time_is_answered_503_and_gone_on_with(name: str) -> None:
    async with opened(name, wait_s=0.05) as s:
        three = [group(7), group(8), group(9)]
        code, reply = await s.post("/scored_data_list", three)
        assert code == 503 and "no room" in reply["message"]
        found = []
        for _ in range(2):
            delivery, (member,) = await s.next()
            found.append(member.reward)
            delivery.release()
        assert (await s.post("/scored_data_list", three))[0] == 200  # Atropos sends the same body again
        delivery, (member,) = await s.next()
        assert [*found, member.reward] == [7.0, 8.0, 9.0]
        delivery.release()
        assert s.client.statistics().puts == 3  # none twice
        assert (await s.post("/scored_data_list", three[:1]))[0] == 200
        assert (await s.post("/scored_data_list", three[:1]))[0] == 200  # a whole request sent twice is two groups
        assert s.client.statistics().puts == 5


async def test_a_sender_that_leaves_while_it_waits_has_pushed_nothing(name: str) -> None:
    async with opened(name) as s:
        for _ in range(2):
            await s.post("/scored_data", group(7))
        with anyio.move_on_after(30) as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(s.post, "/scored_data", group(9))
                while not s.client.statistics().waits:
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
        assert not scope.cancelled_caught
        while s.door.groups.waiting:  # the door hears of it through the closed connection
            await anyio.lowlevel.checkpoint()
        for _ in range(2):
            (await s.next())[0].release()
        assert (await s.post("/scored_data", group(9)))[0] == 200
        assert s.client.statistics().puts == 3


async def test_a_sender_that_leaves_before_its_reply_has_pushed_its_groups_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(name) as s:
        timeouts, real = list[float](), RankRings.push

        async def push(self: RankRings, number: int, scored: Any, *, timeout: float) -> None:
            timeouts.append(timeout)
            await real(self, number, scored, timeout=timeout)
            if len(timeouts) == 2:
                for connection in s.door._server._server.connections:
                    connection.transport.abort()

        monkeypatch.setattr(RankRings, "push", push)
        with pytest.raises(aiohttp.ClientError):
            await s.post("/scored_data_list", [group(7), group(8)])
        assert timeouts[0] > timeouts[1]  # all groups of a request have one deadline
        assert (await s.post("/scored_data_list", [group(7), group(8)]))[0] == 200
        assert s.client.statistics().puts == 2


async def test_environments_that_ask_are_told_that_the_run_is_over_before_the_port_closes(name: str) -> None:
    """As Atropos reckons: it ends by itself once its steps and those of the queue exceed the number of steps."""
    async with opened(name) as s:
        for number in range(3):
            _, registered = await s.post("/register-env", {"desired_name": "maths"})
            await s.get("/status-env", {"env_id": number})
        await s.post("/disconnect-env", {"env_id": 0})
        await s.post("/register-env", {"desired_name": "never asked"})
        answers: list[Any] = []

        async def ask() -> None:
            while not s.door.groups.ended:
                await anyio.lowlevel.checkpoint()
            answers.append(await s.get("/status-env", {"env_id": 1}))
            answers.append(await s.post("/scored_data", group(7)))
            answers.append(await s.get("/status-env", {"env_id": 2}))

        asking = asyncio.create_task(ask())
        await s.door.__aexit__()
        await asking
        (_, first), (code, refused), (_, second) = answers
        assert (code, refused["message"]) == (503, "the run ends and accepts no more groups")
        for status in (first, second):
            assert status["current_step"] == 3
            assert status["current_step"] + status["queue_size"] * 1 // 8 > registered["num_steps"]
        with pytest.raises(OSError):
            await anyio.connect_tcp("127.0.0.1", urlsplit(s.door.url).port or 0)


async def test_an_environment_that_died_does_not_hold_up_the_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.atropos.door.LINGER_S", 0.05)
    async with opened(name) as s:
        await s.post("/register-env", {"desired_name": "maths"})
        await s.get("/status-env", {"env_id": 0})
        async with asyncio.timeout(30):
            await s.door.__aexit__()


@pytest.mark.parametrize("way", ["disconnects", "forgotten"])
async def test_the_end_waits_for_no_environment_that_has_left(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.atropos.door.LINGER_S", 3600.0)
    known, now = Environments(), [0.0]
    monkeypatch.setattr("asyncrl.atropos.door.awake.now", lambda: now[0])
    number, _ = known.register({})
    known.status(number, 3, deque())
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(known.announce_over)
            await anyio.wait_all_tasks_blocked()
            if way == "disconnects":
                assert known.disconnect(number)
            else:
                now[0] = FORGET_S + 1
                known.register({})


def own_threads() -> set[str]:
    """Without those of the loop, in which the client attached: it keeps them for the next call."""
    return {thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_")}


async def test_closing_answers_those_who_wait_and_leaves_no_task_and_no_thread(name: str) -> None:
    tasks_before, threads_before = asyncio.all_tasks(), own_threads()
    async with opened(name) as s:
        for _ in range(2):
            await s.post("/scored_data", group(7))
        threads_attached = own_threads()
        replies: list[tuple[int, Any]] = []

        async def third() -> None:
            replies.append(await s.post("/scored_data", group(9)))

        waiting = asyncio.create_task(third())
        while not s.client.statistics().waits:
            await anyio.lowlevel.checkpoint()
        await s.door.__aexit__()
        await waiting
        assert replies[0][0] == 503 and "ends" in replies[0][1]["message"]
        assert s.client.statistics().puts == 2
        assert own_threads() == threads_attached
        with pytest.raises(LifecycleError):
            await s.door.__aenter__()
    assert asyncio.all_tasks() == tasks_before
    assert own_threads() == threads_before


async def test_environments_register_and_hear_how_full_the_run_is(name: str) -> None:
    async with opened(name) as s:
        asked = {
            "max_token_length": 64, "desired_name": "maths", "weight": 1.0, "group_size": 2, "min_batch_allocation": None,
        }  # fmt: skip
        _, first = await s.post("/register-env", asked)
        _, second = await s.post("/register-env", {**asked, "weight": 3.0})
        assert (await s.post("/register-env", {**asked, "max_token_length": -64}))[1]["env_id"] == 2
        found = [first[key] for key in ("status", "env_id", "wandb_name", "starting_step")]
        assert found == ["success", 0, "maths_0", 3]
        assert (second["env_id"], second["wandb_name"], first["num_steps"] > 10**6) == (1, "maths_1", True)
        assert await s.get("/info") == (200, {"batch_size": 8, "max_token_len": 601})
        assert (await s.get("/wandb_info"))[1]["group"] == "one"
        _, status = await s.get("/status-env", {"env_id": 0})
        assert status == {
            "current_step": 3, "queue_size": 0, "unallocated_fraction": 1.0, "self_queue_size": 0, "max_group_size": 1,
            "env_weight": 0.25,
        }  # fmt: skip
        await s.post("/scored_data", group(7, 8))
        await s.post("/scored_data", group(7, 8, env_id=1))
        _, status = await s.get("/status-env", {"env_id": 0})
        assert (status["queue_size"], status["self_queue_size"], status["max_group_size"]) == (2, 1, 2)
        for _ in range(2):
            (await s.next())[0].release()
        s.ring.publish_version(4)
        _, status = await s.get("/status-env", {"env_id": 0})
        assert (status["current_step"], status["queue_size"]) == (4, 0)
        assert (await s.post("/disconnect-env", {"env_id": 0}))[1]["status"] == "success"
        assert (await s.get("/status-env", {"env_id": 1}))[1]["env_weight"] == 1.0
        assert (await s.get("/status-env", {"env_id": 77}))[1]["env_weight"] == 1.0  # of an earlier run
        # JSON's true equals 1 in Python.
        for number in (77, True):
            assert (await s.post("/disconnect-env", {"env_id": number}))[1]["status"] == "failure"
        assert (await s.post("/register-env", {"weight": "much"}))[0] == 422
        assert (await s.get("/status"))[1]["accepted"] == 2


@pytest.mark.parametrize(("method", "path"), [("get", "/batch"), ("post", "/register"), ("get", "/reset_data")])
async def test_a_second_trainer_is_sent_away(name: str, method: str, path: str) -> None:
    async with opened(name) as s, s.http.request(method, s.door.url + path, json={}) as reply:
        assert reply.status == 409 and "itself" in (await reply.json())["message"]


async def test_a_taken_port_is_a_clear_error(name: str) -> None:
    async with opened(name) as s:
        port = urlsplit(s.door.url).port or 0
        with pytest.raises(ConfigError, match="choose another port"):
            async with AtroposDoor(RankRings([s.client]), TERMS, Address(port=port)):
                pass


def test_without_aiohttp_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['aiohttp'] = None\nimport asyncrl.atropos.scored_data\nimport asyncrl.atropos.door"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = warm.run([sys.executable, "-c", code], env=environment, timeout=60)
    assert done.returncode == 1 and "pip install -e '.[http]'" in done.stderr
