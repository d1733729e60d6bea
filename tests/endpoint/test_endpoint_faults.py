"""The endpoint against strangers, broken clients and slow ones: nothing of them stays in an episode."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import socket
import struct
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest

aiohttp = pytest.importorskip("aiohttp", reason="needs the extra [http]")

from endpoint_helpers import ASK, Held, Opened, opened  # noqa: E402
from environments_chat import Script, session_of  # noqa: E402

from asyncrl.endpoint import endpoint as module  # noqa: E402
from asyncrl.http.access import Address  # noqa: E402
from asyncrl.http.server import log  # noqa: E402
from asyncrl.types import Generation, GenerationRequest  # noqa: E402

CHAT = "/v1/chat/completions"


async def until(condition: Any) -> None:
    with anyio.fail_after(20):
        while not condition():  # noqa: ASYNC110  # of the real parts, which have no event for it
            await anyio.sleep(0.005)


async def test_nothing_listens_until_an_episode_asks_and_nothing_after() -> None:
    endpoint = module.Endpoint(
        Address(port=0), "p", untrained_session=lambda: session_of("qwen2_5", Script("qwen2_5")), max_context=9
    )
    assert not endpoint._server.url
    url, _ = endpoint.open(session_of("qwen2_5", Script("qwen2_5")))
    port = urlsplit(url).port or 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(endpoint.serve)
        async with await anyio.connect_tcp("127.0.0.1", port):
            pass
        tasks.cancel_scope.cancel()
    with pytest.raises(OSError):
        await anyio.connect_tcp("127.0.0.1", port)


async def test_a_key_reaches_its_own_episode_alone() -> None:
    async with opened(Script("qwen2_5", "a", "b", "c")) as o:
        other = session_of("qwen2_5", Script("qwen2_5", "z"), member=1)
        _, key = o.endpoint.open(other)
        assert key != o.key and (await o.post(CHAT, ASK, key))[0] == 200
        assert (other.turns, o.session.turns) == (1, 0)
        assert (await o.post(CHAT, ASK, "x", **{"x-api-key": o.key}))[0] == 401
        head, digits = o.key.rsplit("-", 1)
        wrong = f"{head}-{digits[:-1]}{'0' if digits[-1] != '0' else '1'}"
        for bad in (wrong, head, "", f"asyncrl-2-{digits}", key + "0", "é", f"asyncrl-\u0661-{digits}"):
            status, reply = await o.post(CHAT, ASK, bad)
            assert status == 401 and reply["error"]["type"] == "authentication_error"
        assert (other.turns, o.session.turns) == (1, 0)
        # The key may be a part of the URL, for programs that take no key.
        async with o.http.post(f"{o.origin}/{o.key}{CHAT}", json=ASK) as reply:
            assert reply.status == 200 and o.session.turns == 1
        # Anthropic's client adds /v1 to any base URL, and has a header of its own.
        body = ASK | {"max_tokens": 5}
        async with o.http.post(f"{o.url}/v1/messages", json=body, headers={"x-api-key": o.key}) as reply:
            assert reply.status == 200 and o.session.turns == 2


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "rebound.example:8000"}, 421),
        ({"Host": "localhost:9000"}, 200),
        ({"Host": "trainer.example"}, 200),
        ({"Host": "[::1"}, 400),
        ({"Origin": "http://page.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Encoding": "gzip"}, 415),
        ({"X-Long": "x" * 20_000}, 400),
    ],
)
async def test_web_pages_and_strange_requests_are_kept_out(headers: dict[str, str], code: int) -> None:
    async with opened(Script("qwen2_5", "a"), address=Address(port=0, names=("trainer.example",))) as o:
        headers = {"Authorization": f"Bearer {o.key}", "Content-Type": "application/json", **headers}
        async with o.http.post(o.origin + CHAT, data=json.dumps(ASK), headers=headers) as reply:
            assert reply.status == code
        assert o.session.turns == (code == 200)


@pytest.mark.parametrize(
    ("body", "code", "word"),
    [
        (b"{", 400, "not valid JSON"),
        (b"", 400, "not valid JSON"),
        (b"\xff\xfe", 400, "not valid JSON"),
        (b"[" * 100_000, 400, "not valid JSON"),
        (b'{"messages": NaN}', 400, "not valid JSON"),
        (b"[1]", 400, "dictionary"),
        (b'{"messages": "\\ud800"}', 400, "not valid JSON"),
        (json.dumps(ASK | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]})
         .replace("{}", '{"a":' * 500 + "{}" + "}" * 500).encode(), 400, ""),
        (b" " * (module.MOST_BODY_BYTES + 1), 413, "more than"),
    ],
)  # fmt: skip
async def test_garbage_is_refused_with_a_reason(body: bytes, code: int, word: str) -> None:
    async with opened(Script("qwen2_5")) as o:
        headers = {"Authorization": f"Bearer {o.key}", "Content-Type": "application/json"}
        async with o.http.post(o.origin + CHAT, data=io.BytesIO(body), headers=headers) as reply:
            found = await reply.json()
            assert reply.status == code and word in found["error"]["message"], found
        assert o.session.turns == 0 and not o.endpoint._held_bytes


async def test_methods_and_paths() -> None:
    async with opened(Script("qwen2_5")) as o:
        headers = {"Authorization": f"Bearer {o.key}"}
        async with o.http.get(o.origin + CHAT, headers=headers) as reply:
            assert reply.status == 405 and reply.headers["Allow"] == "POST"
        async with o.http.get(f"{o.origin}/v1/../etc/passwd", headers=headers) as reply:
            assert reply.status == 404 and (await reply.json())["error"]["type"] == "not_found_error"
        async with o.http.get(f"{o.origin}/openapi.json") as reply:
            assert reply.status == 401
        async with o.http.get(f"{o.origin}/openapi.json", headers=headers) as reply:
            paths = (await reply.json())["paths"]
        for path, streams in (("/v1/chat/completions", True), ("/inference/v1/generate", False)):
            assert ("text/event-stream" in paths[path]["post"]["responses"]["200"]["content"]) == streams


async def test_a_key_ends_with_its_episode() -> None:
    held = Held(Script("qwen2_5", "a"))
    async with opened(held) as o, anyio.create_task_group() as tasks:
        found: list[Any] = []

        async def ask() -> None:
            found.append(await o.post(CHAT, ASK))

        tasks.start_soon(ask)
        await held.asked.wait()
        o.endpoint.end(o.session)
        await until(lambda: found)
        assert found[0][0] == 401 and "the episode of this key has ended" in found[0][1]["error"]["message"]
        assert held.running == 0 and o.session.turns == 0
        status, reply = await o.post(CHAT, ASK)
        assert status == 401 and "the episode of this key has ended" in reply["error"]["message"]
        status, reply = await o.post("/v1/messages", ASK)
        assert status == 401 and reply["type"] == "error" and reply["error"]["type"] == "authentication_error"
        o.endpoint.end(o.session)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_cancels_its_request(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.01)
    held = Held(Script("qwen2_5", "a"))
    async with opened(held) as o:
        headers = {"Authorization": f"Bearer {o.key}"}
        if stream:
            async with o.http.post(o.origin + CHAT, json=ASK | {"stream": True}, headers=headers) as reply:
                assert (await reply.content.readline()).startswith(b":")
                reply.close()
        else:
            asked = asyncio.ensure_future(o.http.post(o.origin + CHAT, json=ASK, headers=headers))
            await until(lambda: held.running == 1)
            asked.cancel()
        await until(lambda: held.running == 0 and o.counts["endpoint/cancelled"] == 1)
        assert o.session.turns == 0
        held.free.set()
        assert (await o.post(CHAT, ASK))[0] == 200
        assert o.session.turns == 1 and o.session.trajectory().branches is None


@pytest.mark.parametrize("why", ["ValueError: broken", "the episode of this key has ended"])
async def test_an_error_in_a_stream_is_an_event(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.01)
    held = Held(Script("qwen2_5", ValueError("broken")))
    async with opened(held) as o, anyio.create_task_group() as tasks:
        found: list[Any] = []

        async def ask() -> None:
            found.append(await o.post(CHAT, ASK | {"stream": True}))

        tasks.start_soon(ask)
        await held.asked.wait()
        await anyio.sleep(0.05)
        if "ended" in why:
            o.endpoint.end(o.session)
        held.free.set()
        await until(lambda: found)
        assert found[0][0] == 200 and "event: error" in found[0][1] and why in found[0][1]


class Dropping:
    """An engine whose first reply comes when its client has just gone: it was sampled, and cannot be delivered."""

    def __init__(self, script: Script, after: int = 1) -> None:
        self.script, self.after = script, after
        self.client: socket.socket | None = None

    async def __call__(self, request: GenerationRequest) -> Generation:
        generation = await self.script(request)
        self.after -= 1
        if self.after == 0 and self.client is not None:
            self.client.close()
        return generation


async def send(o: Opened, body: dict[str, Any]) -> socket.socket:
    """A request over a socket whose close resets the connection at once."""
    raw = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {o.key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    client = socket.create_connection(("127.0.0.1", urlsplit(o.url).port or 0))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.sendall(head.encode() + raw)
    return client


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_gets_the_answer_that_was_not_delivered(stream: bool) -> None:
    engine = Dropping(Script("qwen2_5", "Sunny", "Rain", "Snow"))
    async with opened(engine) as o:
        body = json.loads(json.dumps(ASK | {"stream": stream}))
        engine.client = await send(o, body)
        await until(lambda: o.session.turns == 1 and o.counts["endpoint/requests"] == 1)
        raw = json.dumps(body)
        headers = {"Authorization": f"Bearer {o.key}", "Content-Type": "application/json"}

        async def post(**more: str) -> str:
            async with o.http.post(o.origin + CHAT, data=raw, headers=headers | more) as reply:
                return await reply.text()

        assert "Sunny" in await post() and o.session.turns == 1 and o.counts["endpoint/retries"] == 1
        # It was delivered now: the same request is a new one.
        assert "Rain" in await post() and o.session.turns == 2
        # The client knows better than the server whether an answer arrived.
        assert "Rain" in await post(**{"x-stainless-retry-count": "1"}) and o.session.turns == 2
        assert "Snow" in await post() and o.session.turns == 3


async def test_a_client_that_does_not_read_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEND_S", 0.2)
    script = Script("qwen2_5", "word " * 100_000, "b")
    async with opened(script, max_context=1 << 20) as o:
        client = await send(o, ASK | {"logprobs": True})
        await until(lambda: o.session.turns == 1)
        episode = next(iter(o.endpoint._keys._open.values()))
        await until(lambda: not episode.requests)
        assert episode.undelivered
        client.close()


@pytest.mark.parametrize("reads", [False, True])
async def test_an_answer_on_its_way_at_the_end_of_the_episode_counts_if_all_of_it_was_sent(reads: bool) -> None:
    async with opened(Script("qwen2_5", "word " * 100_000), max_context=1 << 20) as o:
        client = await send(o, ASK | {"logprobs": True})
        client.setblocking(False)
        [key] = o.endpoint._keys._open.values()
        await until(lambda: any(to for _, to in key.answering.values()))
        [(_, connection)] = key.answering.values()
        assert connection is not None
        while reads and connection.get_write_buffer_size():
            with contextlib.suppress(BlockingIOError):
                client.recv(1 << 20)
            await anyio.lowlevel.checkpoint()
        assert key.answering  # the handler of the request has not woken up yet
        o.endpoint.end(o.session)
        assert o.session.turns == reads
        client.close()


async def test_a_key_without_an_episode_keeps_the_newest_answers_that_no_client_got(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a key, a judge's for example, lasts as long as the run."""
    monkeypatch.setattr(module, "SEND_S", 0.1)
    monkeypatch.setattr(module, "_MOST_KEPT_ANSWERS", 2)
    async with opened(Script("qwen2_5", *["word " * 100_000] * 4), max_context=1 << 20) as o:
        of_run = replace(o, key=o.endpoint.open(None)[1])
        key = next(key for key in o.endpoint._keys._open.values() if key.session is None)
        seen = list[bytes]()

        def has_new() -> bool:
            return bool(key.undelivered) and [*key.undelivered][-1:] != seen[-1:]

        for limit in range(4):
            client = await send(of_run, ASK | {"logprobs": True, "max_tokens": 200_000 + limit})
            await until(has_new)
            seen += [*key.undelivered][-1:]
            client.close()
        assert [*key.undelivered] == seen[-2:]


async def test_slow_bodies_and_too_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.http.server.PAUSE_S", 0.1)
    monkeypatch.setattr(module, "MOST_REQUESTS", 1)
    held = Held(Script("qwen2_5", "a"))
    async with opened(held) as o, anyio.create_task_group() as tasks:
        client = await send(o, ASK)
        await held.asked.wait()
        assert (await o.post(CHAT, ASK))[0] == 429
        client.close()
        await until(lambda: held.running == 0)

        async def slow() -> Any:
            yield b"{"
            await anyio.sleep_forever()

        headers = {"Authorization": f"Bearer {o.key}", "Content-Type": "application/json"}
        async with o.http.post(o.origin + CHAT, data=slow(), headers=headers) as reply:
            assert reply.status == 408 and "too slow" in (await reply.json())["error"]["message"]
        monkeypatch.setattr(module, "MOST_HELD_BYTES", 10)
        assert (await o.post(CHAT, ASK))[0] == 429 and not o.endpoint._held_bytes
        tasks.cancel_scope.cancel()


async def test_choices_that_were_sampled_before_a_disconnect_are_not_sampled_again() -> None:
    script = Script("qwen2_5", "Sunny", "Rain")
    held = Held(script)
    asked: list[GenerationRequest] = []

    async def engine(request: GenerationRequest) -> Generation:
        asked.append(request)
        return await (held(request) if len(asked) == 2 else script(request))

    async with opened(engine) as o:
        body = ASK | {"n": 2}
        client = await send(o, body)
        await held.asked.wait()
        await until(lambda: o.session.turns == 1)
        client.close()
        await until(lambda: held.running == 0)
        held.free.set()
        headers = {"Authorization": f"Bearer {o.key}", "Content-Type": "application/json"}
        async with o.http.post(o.origin + CHAT, data=json.dumps(body), headers=headers) as reply:
            texts = [choice["message"]["content"] for choice in (await reply.json())["choices"]]
        assert texts == ["Sunny", "Rain"] and o.session.turns == 2
        o.endpoint.end(o.session)
        assert o.session.turns == 2


@pytest.mark.parametrize("end", ["after", "before", "failed"])
async def test_choices_that_no_client_got_are_no_part_of_the_trajectory(end: str) -> None:
    """`end`: of the episode, after the client has gone, or while the request is still sampled. failed: a choice raises."""
    script = Script("qwen2_5", "Fog", "Sunny", ValueError("broken") if end == "failed" else "Rain")
    held = Held(script)
    asked: list[GenerationRequest] = []

    async def engine(request: GenerationRequest) -> Generation:
        asked.append(request)
        return await (held(request) if len(asked) == 3 else script(request))

    async with opened(engine) as o:
        assert (await o.post(CHAT, ASK))[0] == 200
        client = await send(o, ASK | {"n": 2})
        await held.asked.wait()
        await until(lambda: o.session.turns == 2)
        if end == "before":
            o.endpoint.end(o.session)
        if end == "failed":
            held.free.set()
            await until(lambda: o.counts["endpoint/refused"] == 1)
        client.close()
        await until(lambda: held.running == 0)
        o.endpoint.end(o.session)
        trajectory = o.session.trajectory(turn_rewards=[1.0])
        [first] = script.generations[:1]
        assert trajectory.branches is None and trajectory.tokens[trajectory.mask].tolist() == first.token_ids.tolist()
        assert trajectory.completion == [{"role": "assistant", "content": "Fog"}]


def test_a_client_that_has_gone_makes_no_traceback_in_the_log() -> None:
    uvloop = pytest.importorskip("uvloop")
    shown: list[BaseException] = []

    class Shown(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert record.exc_info and record.exc_info[1]
            shown.append(record.exc_info[1])

    async def write_to_a_closed_connection() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        transport, _ = await loop.create_connection(asyncio.Protocol, *server.sockets[0].getsockname())
        transport.abort()
        await asyncio.sleep(0.01)
        server.close()
        transport.write(b"x")

    handler = Shown()
    log.addHandler(handler)
    try:
        with pytest.raises(RuntimeError) as caught:
            uvloop.run(write_to_a_closed_connection())
        log.error("Unhandled exception", exc_info=caught.value)
        assert not shown
        log.error("Unhandled exception", exc_info=RuntimeError("a bug"))
        assert len(shown) == 1
    finally:
        log.removeHandler(handler)
