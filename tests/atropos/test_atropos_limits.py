"""The HTTP door against those who must not come in, and against what is too large, too slow or too much."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import resource
import socket
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest

aiohttp = pytest.importorskip("aiohttp", reason="needs the extra [http]")

from atropos_helpers import Set, group, opened  # noqa: E402

from asyncrl.atropos.door import FORGET_S, MOST_ENVIRONMENTS, Environments  # noqa: E402
from asyncrl.atropos.groups import MAX_BODIES, MAX_BODY_BYTES, MAX_GROUPS, MAX_OBJECTS, decompress  # noqa: E402
from asyncrl.atropos.scored_data import MAX_MEMBERS  # noqa: E402
from asyncrl.errors import ConfigError  # noqa: E402
from asyncrl.http.access import Access, Address, Refused  # noqa: E402
from asyncrl.http.server import MOST_CONNECTIONS, PAUSE_S, most_connections  # noqa: E402
from asyncrl.transport.rings.types import RingSettings  # noqa: E402

JSON = {"Content-Type": "application/json"}


def without_key(s: Set) -> str:
    return s.door.url.rpartition("/")[0]


async def status(s: Set, url: str, body: bytes = b"", **headers: str) -> int:
    async with s.http.post(
        url, data=body, headers={**JSON, **{k.replace("_", "-"): v for k, v in headers.items()}}
    ) as reply:
        assert "message" in await reply.json(), reply
        return int(reply.status)


async def test_nobody_comes_in_without_the_key(name: str) -> None:
    body = json.dumps(group(7)).encode()
    async with opened(name) as s:
        bare, key = without_key(s), s.door.url.rpartition("/")[2]
        assert await status(s, f"{bare}/scored_data", body) == 401
        assert await status(s, f"{bare}/{key[:-1]}{'y' if key[-1] == 'x' else 'x'}/scored_data", body) == 401
        assert await status(s, f"{bare}/scored_data", body, Authorization=f"Bearer {key}x") == 401
        for path in ("/", "/info", "/status", "/nothing"):
            async with s.http.get(bare + path) as reply:
                assert reply.status == 401 and "rolls" not in await reply.text()
        assert s.door.groups.statistics.groups == 0
        async with s.http.post(
            f"{bare}/scored_data", data=body, headers={**JSON, "Authorization": f"Bearer {key}"}
        ) as reply:
            assert reply.status == 200
        assert (await s.post("/scored_data", group(7)))[0] == 200
        assert (await s.get("/nothing-here", {}))[0] == 404


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "rebound.example:8000"}, 421),
        ({"Host": "localhost:9000"}, 200),  # a tunnel
        ({"Host": "[::1"}, 400),
        ({"Host": "trainer.example"}, 200),
        ({"Origin": "http://page.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ],
)
async def test_web_pages_are_kept_out_even_with_the_key(name: str, headers: dict[str, str], code: int) -> None:
    async with opened(name, at=Address(port=0, names=("trainer.example",))) as s:
        async with s.http.post(
            f"{s.door.url}/scored_data", data=json.dumps(group(7)), headers={**JSON, **headers}
        ) as reply:
            assert reply.status == code
        assert s.door.groups.statistics.groups == (code == 200)


async def test_a_page_of_the_door_itself_has_its_origin(name: str) -> None:
    async with opened(name) as s:
        async with s.http.get(f"{s.door.url}/info", headers={"Origin": without_key(s)}) as reply:
            assert reply.status == 200


def test_a_key_is_made_anew_and_can_be_left_out_on_loopback_only() -> None:
    one, other = Access(Address()), Access(Address())
    assert one.key != other.key and len(one.key) >= 32 and one.url(8000) == f"http://127.0.0.1:8000/{one.key}"
    assert Access(Address(key="")).url(1) == "http://127.0.0.1:1"
    assert Access(Address("::1", key="")).url(1) == "http://[::1]:1"
    assert Access(Address("0.0.0.0", key="k" * 16)).url(1) == f"http://{socket.gethostname()}:1/{'k' * 16}"
    for host, key, why in (("0.0.0.0", "", "everybody"), ("127.0.0.1", "short", "16"), ("127.0.0.1", "a/b" * 9, "URL")):
        with pytest.raises(ConfigError, match=why):
            Access(Address(host, key=key))


async def test_without_a_key_the_other_checks_stay(name: str) -> None:
    async with opened(name, at=Address(port=0, key="")) as s:
        assert (await s.post("/scored_data", group(7)))[0] == 200
        assert await status(s, f"{s.door.url}/scored_data", b"{}", Host="rebound.example") == 421


def bomb(piece: bytes, size: int) -> bytes:
    return gzip.compress(b"[" + piece * (size // len(piece)) + b"{}]", 1)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (bomb(b"{},", MAX_BODY_BYTES + 9), 413),  # 60 million groups are 180 MB, and the same with less
        (bomb(b"{},", 3 * MAX_OBJECTS), 413),
        (bomb(b'"a",', 4 * MAX_OBJECTS), 413),
        (bomb(b"0,", 1 << 24), 413),
        (bomb(b"0,", 1 << 26), 413),
        (bomb(b"]", 1 << 22), 400),
        (bomb(b"[", 1 << 20), 413),
        (bomb(b"[", 1 << 12), 400),
        (gzip.compress(json.dumps([{}] * (MAX_GROUPS + 1)).encode()), 413),
        (gzip.compress(b'{"tokens": [[' + b"1," * (1 << 21) + b"1]]}"), 422),
        (b'{"tokens": [[4]], "masks": [[4]], "scores": [' + b"[" * 1010 + b"]" * 1010 + b"]}", 422),
        (gzip.compress(json.dumps({"tokens": [[4]] * (MAX_MEMBERS + 1)}).encode()), 422),
    ],
)
async def test_a_bomb_is_refused_before_its_objects_are_built(name: str, body: bytes, code: int) -> None:
    async with opened(name) as s:
        encoding = {"Content_Encoding": "gzip"} if body.startswith(b"\x1f\x8b") else {}
        assert await status(s, f"{s.door.url}/scored_data_list", body, **encoding) == code
        assert (await s.post("/scored_data", group(7)))[0] == 200


async def test_what_says_that_it_is_too_long_is_not_received(name: str) -> None:
    async with opened(name) as s:
        head = head_of(s, "/scored_data", f"Content-Length: {MAX_BODY_BYTES + 1}")
        assert await talk(s, head) == 413
        assert await talk(s, head_of(s, "/register-env", "Content-Length: 70000")) == 413
        assert await talk(s, head_of(s, "/scored_data", "Transfer-Encoding: chunked") + b"zz\r\n\r\n") == 400
        assert await talk(s, b"\x00\xff\r\n\r\n") == 400


def head_of(s: Set, path: str, *headers: str) -> bytes:
    parts = urlsplit(s.door.url)
    first = f"POST {parts.path}{path} HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json"
    return "\r\n".join([*first, *headers, "", ""]).encode()


async def talk(s: Set, raw: bytes) -> int:
    """The status of the reply; 0 where the connection was closed without one."""
    async with await anyio.connect_tcp("127.0.0.1", urlsplit(s.door.url).port or 0) as stream:
        await stream.send(raw)
        try:
            with anyio.fail_after(20):
                return int((await stream.receive())[9:12])
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return 0


async def test_slow_senders_are_answered_and_closed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.http.server.BODY_S", 0.1)
    monkeypatch.setattr("asyncrl.http.server.IDLE_S", 0.2)
    async with opened(name) as s:
        assert await talk(s, head_of(s, "/scored_data", "Content-Length: 100") + b"{") == 408
        assert await talk(s, b"POST / HTTP/1.1\r\nHo") == 0  # within aiohttp's own patience with headers
        assert await talk(s, b"") == 0


BODIES_WITHOUT_END = [
    ("/scored_data", ["Content-Length: 9000"], b"{"),
    ("/scored_data", ["Transfer-Encoding: chunked"], b"9\r\n{"),
    ("/register-env", ["Content-Length: 9000"], b""),
    ("/scored_data", ["Content-Length: 9000", "Expect: 100-continue"], b""),
]


@pytest.mark.parametrize(("path", "headers", "begin"), BODIES_WITHOUT_END)
async def test_bodies_that_never_end_hold_up_nobody(name: str, path: str, headers: list[str], begin: bytes) -> None:
    """Four times as many as may wait for room, and nearly as many as may connect; the limits of time are those of a run."""
    async with opened(name) as s, contextlib.AsyncExitStack() as held:
        await never_end(s, held, 4 * MAX_BODIES, head_of(s, path, *headers) + begin)
        with anyio.fail_after(PAUSE_S - 1):
            assert (await s.post("/scored_data", group(7)))[0] == 200


async def test_bodies_that_never_end_free_all_connections_after_one_time_limit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 0.5
    monkeypatch.setattr("asyncrl.http.server.PAUSE_S", limit)
    async with opened(name) as s, contextlib.AsyncExitStack() as held:
        await never_end(s, held, MOST_CONNECTIONS, head_of(s, "/scored_data", "Content-Length: 9000"))
        # One limit, and what 256 refusals take; one limit for each place would be 8 s.
        with anyio.fail_after(limit + 4):
            assert (await s.post("/scored_data", group(7)))[0] == 200


async def never_end(s: Set, held: contextlib.AsyncExitStack, count: int, sent: bytes) -> None:
    for _ in range(count):
        stream = await anyio.connect_tcp("127.0.0.1", urlsplit(s.door.url).port or 0)
        await held.enter_async_context(stream)
        await stream.send(sent)


async def test_bodies_that_are_too_large_together_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(name) as s, contextlib.AsyncExitStack() as held:
        size = len(json.dumps(group(7)))
        monkeypatch.setattr("asyncrl.atropos.groups.MAX_HELD_BYTES", size + 50)
        await never_end(s, held, 1, head_of(s, "/scored_data", "Content-Length: 9000") + b" " * 51)
        while s.door.groups._held_bytes < 51:
            await anyio.lowlevel.checkpoint()
        code, reply = await s.post("/scored_data", group(7))
        assert (code, reply["status"]) == (503, "full") and "too large together" in reply["message"]
        await held.aclose()
        while s.door.groups._held_bytes:
            await anyio.lowlevel.checkpoint()
        assert (await s.post("/scored_data", group(7)))[0] == 200


async def test_a_body_that_pauses_is_told_from_one_that_is_only_long(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.http.server.PAUSE_S", 2.0)
    async with opened(name) as s:
        body = json.dumps(group(7)).encode().ljust(12 * 100)
        async with await anyio.connect_tcp("127.0.0.1", urlsplit(s.door.url).port or 0) as stream:
            await stream.send(head_of(s, "/scored_data", f"Content-Length: {len(body)}"))
            for begin in range(0, len(body), 100):
                await anyio.sleep(0.2)
                await stream.send(body[begin : begin + 100])
            assert (await stream.receive())[9:12] == b"200"


async def test_what_strangers_send_fills_no_log_and_our_own_errors_are_in_it(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(name) as s:
        host = f"Host: {urlsplit(s.door.url).netloc}"
        for lines in (
            ["GET / HTTP/1.1"],
            ["GET / HTTP/1.1", host],
            ["GET / HTTP/1.1", host, "no header"],
            [f"GET /{'a' * 9000} HTTP/1.1", host],
            ["POST / HTTP/1.1", host, "Content-Length: 3", "Content-Length: 4"],
            ["POST / HTTP/1.1", host, "Transfer-Encoding: chunked", "", "zz"],
            ["GET http://[::1 HTTP/1.1", host],
            ["PRI * HTTP/2.0", "", "SM"],
        ):
            assert await talk(s, "\r\n".join([*lines, "", ""]).encode()) in (400, 401)
        assert not caplog.records

        def register(self: Environments, fields: Any) -> Any:
            raise RuntimeError("a bug")

        monkeypatch.setattr(Environments, "register", register)
        async with s.http.post(f"{s.door.url}/register-env", json={}) as reply:
            assert reply.status == 500
        assert "a bug" in caplog.text


async def test_silent_connections_leave_room_for_others_and_descriptors_for_the_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.http.server.most_connections", lambda _: 8)
    monkeypatch.setattr("asyncrl.http.server.GRACE_S", 0.05)
    async with opened(name) as s:
        before, silent = descriptors(), []
        try:
            for _ in range(60):
                silent.append(await anyio.connect_tcp("127.0.0.1", urlsplit(s.door.url).port or 0))
            assert (await s.post("/scored_data", group(7)))[0] == 200
            assert descriptors() <= before + len(silent) + 8 + 2  # theirs lie in this process too; the client's own
        finally:
            for stream in silent:
                await stream.aclose()


async def test_a_request_that_waits_is_not_closed_for_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.http.server.most_connections", lambda _: 2)
    async with opened(name) as s:
        for _ in range(2):
            assert (await s.post("/scored_data", group(7)))[0] == 200
        replies: list[int] = []

        async def post() -> None:
            replies.append((await s.post("/scored_data", group(9)))[0])

        async with anyio.create_task_group() as tasks:
            for _ in range(3):  # the third is not accepted yet
                tasks.start_soon(post)
            while s.door.groups.waiting < 2:
                await anyio.lowlevel.checkpoint()
            for _ in range(3):
                (await s.next())[0].release()
        assert replies == [200] * 3


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_three_quarters_of_the_descriptors_are_the_runs() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    try:
        assert most_connections() == 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_registrations_are_bounded_and_forgotten_after_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("asyncrl.atropos.door.awake.now", lambda: now[0])
    known = Environments()
    for number in range(MOST_ENVIRONMENTS + 10):
        now[0] += 1
        known.touch(0)  # this one is never silent
        assert known.register({"desired_name": "maths"})[0] == number
    assert len(known._all) == MOST_ENVIRONMENTS and known.disconnect(0) and not known.disconnect(1)
    now[0] += FORGET_S + 1
    assert known.register({"desired_name": "maths"}) == (MOST_ENVIRONMENTS + 10, f"maths_{MOST_ENVIRONMENTS + 10}")
    assert len(known._all) == 1
    for fields in ({"weight": "nan"}, {"weight": 1e308, "max_token_length": 1e308}):
        with pytest.raises(ValueError, match="finite"):
            known.register(fields)


async def test_a_large_group_is_taken(name: str) -> None:
    ids = [5] + [7] * 599
    members = {"tokens": [ids] * 40, "masks": [[-100, *ids[1:]]] * 40, "scores": [0.5] * 40, "inference_logprobs": None}
    members["messages"] = [[{"role": "user", "content": '\\"[{' * 500}]] * 40
    async with opened(name, RingSettings(total_bytes=1 << 23, slots=2, payload_bytes=1 << 22)) as s:
        code, reply = await s.post("/scored_data", {**members, "code": 1, "status": 3})
        assert (code, reply["groups_processed"]) == (200, 1), reply
        delivery, found = await s.next()
        assert [m.tokens.tolist() for m in found] == [ids] * 40 and found[39].reward == 0.5
        delivery.release()


async def test_requests_that_wait_for_room_are_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth is not read into groups while three wait."""
    monkeypatch.setattr("asyncrl.atropos.groups.MAX_BODIES", 3)
    async with opened(name, wait_s=0.5) as s, anyio.create_task_group() as tasks:
        for _ in range(2):
            assert (await s.post("/scored_data", group(7)))[0] == 200
        for _ in range(3):
            tasks.start_soon(s.post, "/scored_data", group(7))
        while s.door.groups.waiting < 3:
            await anyio.lowlevel.checkpoint()
        s.door.groups._wait_s = 0.0
        code, reply = await s.post("/scored_data", group(7))
        assert code == 503 and reply["message"].startswith("too many requests wait for room in the ring")


def test_a_gzip_that_is_longer_than_it_may_be_is_told_from_one_that_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    body = gzip.compress(b"x" * 100)
    cases = (body, 100, 200), (body, 99, 413), (body[:-4], 100, 400), (body[:-9], 100, 400), (body + body, 200, 400)
    for sent, most, code in cases:
        monkeypatch.setattr("asyncrl.atropos.groups.MAX_BODY_BYTES", most)
        if code == 200:
            assert decompress(sent, "gzip") == b"x" * 100
            continue
        with pytest.raises(Refused) as refused:
            decompress(sent, "gzip")
        assert refused.value.status == code
