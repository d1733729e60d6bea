"""Rank 0's answers to nodes that join, over a real line; and the address at which it listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asyncrl import __version__
from asyncrl.cli.join import main
from asyncrl.distributed import joining
from asyncrl.distributed.exchange import Exchange
from asyncrl.distributed.joining import JoinedRun, JoinHandler, ask_to_join, listen_at
from asyncrl.distributed.line import LineServer
from asyncrl.errors import ConfigError, LifecycleError, RankLost

SECRET = "the secret of a test"
TOLD = {"train": (0,), "generate": (0, 1), "restart": 0, "base": 3, "version": 5, "config": {"seed": 1}}


@asynccontextmanager
async def entrance() -> AsyncIterator[tuple[JoinHandler, str, list[str]]]:
    """Of a run of two ranks: (the entrance, its address, the lines that rank 0 has printed)."""
    notes = list[str]()
    server = LineServer(SECRET, on_end=lambda peer, lost: None)
    door = JoinHandler(server, 2, notes.append)
    address = await listen_at(server, "127.0.0.1:0")
    async with server:
        yield door, address, notes


async def test_nodes_that_join_at_once_get_numbers_that_no_rank_has_when_the_run_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer, waiting = JoinHandler._answer, set[str]()

    async def counted(door: JoinHandler, peer: str, node: dict[str, str], buffers: Any) -> Any:
        waiting.add(peer)
        try:
            return await answer(door, peer, node, buffers)
        finally:
            waiting.remove(peer)

    async def until_waiting(count: int) -> None:
        async with asyncio.timeout(60):
            while len(waiting) != count:  # noqa: ASYNC110  # of the door's tasks
                await asyncio.sleep(0.01)

    monkeypatch.setattr(JoinHandler, "_answer", counted)
    async with entrance() as (door, address, notes):
        asking = [asyncio.create_task(ask_to_join(address, SECRET)) for _ in range(3)]
        given_up = asyncio.create_task(ask_to_join(address, SECRET))
        await until_waiting(4)
        assert not any(each.done() for each in asking) and notes == []
        given_up.cancel()
        await asyncio.wait([given_up])
        await until_waiting(3)
        door.open(lambda: TOLD)
        joined = await asyncio.gather(*asking)
        assert sorted(each.rank for each in joined) == [2, 3, 4]
        last = await ask_to_join(address, SECRET)
        assert last == JoinedRun(address, SECRET, 5, (0,), (0, 1), 0, 3, 5, {"seed": 1})
        assert [note.split(": ")[0] for note in notes] == [f"rank {rank} joins" for rank in (2, 3, 4, 5)]


async def test_a_node_with_another_version_of_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = JoinHandler._answer

    async def answer_by_another_version(door: JoinHandler, peer: str, node: dict[str, str], buffers: object) -> object:
        return await answer(door, peer, {**node, "asyncrl": "0.0.1"}, buffers)

    monkeypatch.setattr(joining.JoinHandler, "_answer", answer_by_another_version)
    async with entrance() as (_, address, notes):
        with pytest.raises(
            ConfigError, match=rf"has asyncrl {__version__}, and this node has asyncrl 0\.0\.1; install"
        ):
            await ask_to_join(address, SECRET)
        assert notes == []


async def test_another_version_of_the_protocol_is_named_and_not_a_wrong_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Exchange.send

    def send_other(exchange: Exchange, operation: int, *rest: Any, **options: Any) -> None:
        if "protocol" in (header := options.get("header") or {}):
            options["header"] = header | {"protocol": 0}
        send(exchange, operation, *rest, **options)

    async with entrance() as (_, address, notes):
        monkeypatch.setattr(Exchange, "send", send_other)
        with pytest.raises(RankLost, match=r"lost rank 0 .* has another version of asyncrl; install one version"):
            await ask_to_join(address, SECRET)
        assert notes == []


async def test_a_node_with_another_secret_or_after_the_end_does_not_join() -> None:
    async with entrance() as (door, address, notes):
        with pytest.raises(RankLost, match=r"could not connect to rank 0 .* or has another ASYNCRL_SECRET"):
            await ask_to_join(address, "another secret of a test", silence_s=0.3)

        def refuse() -> dict[str, object]:
            raise LifecycleError("the last step of the run is trained")

        door.open(refuse)
        with pytest.raises(LifecycleError, match="the last step"):
            await ask_to_join(address, SECRET)
        assert notes == []
    with pytest.raises(RankLost, match=r"could not connect to rank 0 .* rank 0 does not run there"):
        await ask_to_join(address, SECRET, silence_s=0.3)


async def test_an_address_where_rank_0_cannot_listen_is_refused_by_name() -> None:
    async with entrance() as (_, address, _notes):
        for setting in (address, "192.0.2.1:29600", "no.such.host.invalid:29600"):
            server = LineServer(SECRET)
            with pytest.raises(ConfigError, match=f"distributed.listen is {setting}, and rank 0 cannot listen there"):
                await listen_at(server, setting)
            await server.aclose()


@pytest.mark.parametrize("address", ["here", "a b:29600", "tcp://10.0.0.5:29600", "10.0.0.5:0", "10.0.0.5:99999"])
def test_an_address_that_no_run_can_have_is_refused_by_name(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([address]) == 2
    assert f"the address is {address!r}; expected HOST:PORT" in capsys.readouterr().err
