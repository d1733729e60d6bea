"""The HTTP door for Atropos: a stock `atroposlib` environment server trains a run.

    async with RecordRing("my-run") as ring, Runtime(config) as runtime, anyio.create_task_group() as tasks:
        door = await tasks.start(serve, runtime, ring)      # http://127.0.0.1:8000
        async for step in runtime.steps(): ...

    environment ──POST /scored_data──▶ read_group ──▶ AsyncClient.push ──▶ ring ──▶ runtime/door.py, as for everybody
                                                                                   (stash, submit, release, accounts)

Guarantees
* 200 means accepted, as `push` means it: the group survives the death of this process and is trained or dropped, counted, once;
* a full ring holds the reply back, up to `wait_s`; then 503, which Atropos sends again. Nothing is dropped for want of room;
* a request that was cut off, or answered 503, is gone on with where it stopped when its body comes again;
* a group that cannot be trained is refused as a whole (422) with the reason; the other groups of its request are taken;
* a run that ends or is stopped answers 503 to who waits, and lets every environment server that asks know (`environments.py`);
* no state that a restart loses: an environment server that registered with an earlier run is served by the next one.

Differences from Atropos' own server: every `ScoredData` is one group whatever its size, so nothing waits for pieces that add
up; the trainer's end (`/register`, `/batch`, `/reset_data`) is refused, because the run itself is the trainer;
`min_batch_allocation` reserves nothing (and `/status-env` says so). `queue_size` counts what was accepted and is not
trained yet, so Atropos' `max_batches_offpolicy` bounds that. JSON is read on the event loop: about 10 ms for 16 x 2,048
tokens. Shared memory (`asyncrl.client`) is the fast path into the same ring.

Nobody is asked for a password: bind addresses that you trust.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc
import orjson

from asyncrl.client import AsyncClient
from asyncrl.concurrency.supervisor import plain_task_group
from asyncrl.errors import ConfigError, DataError, LifecycleError, RecordError, RecordTooLarge, TransportError
from asyncrl.records.check import Limits
from asyncrl.runtime import door as ring_door

from .environments import NO_END, Environments
from .scored_data import read_group
from .spread import Spread

try:
    from aiohttp import web
except ImportError as error:  # pragma: no cover - the whole point is to be importable only with the extra
    raise ConfigError(
        "the HTTP door needs aiohttp, which is not installed; pip install 'asyncrl[http]', or push through shared memory "
        "(asyncrl.client)"
    ) from error

if TYPE_CHECKING:
    from asyncrl.runtime.runtime import Runtime
    from asyncrl.transport.rings.record_ring import RecordRing

MOST_BYTES = 1 << 28  # of one request, unpacked
MOST_INTERRUPTED = 1024  # requests remembered until they come again


@dataclass(frozen=True, slots=True)
class Terms:
    """What the door tells environment servers about the run."""

    name: str
    batch_size: int  # sequences a step
    limits: Limits
    steps: int | None  # in all; None: no end
    checkpoint_dir: str

    @classmethod
    def of(cls, runtime: Runtime) -> Terms:
        """Out of the configuration of a run that is open."""
        config = runtime.config
        return cls(
            name=config.run.name,
            batch_size=config.rollout.groups_per_step * config.rollout.group_size,
            limits=ring_door.limits_of(runtime),
            steps=config.train.max_steps,
            checkpoint_dir="" if runtime.directory is None else str(runtime.directory.path.absolute()),
        )


@dataclass(slots=True)
class AtroposStatistics:
    """What came through the door so far."""

    groups: int = 0  # accepted
    without_logprobs: int = 0  # of them: trained at ratio 1
    refused: int = 0
    full: int = 0  # requests answered 503
    last_refusal: str = ""


class AtroposDoor:
    """`async with AtroposDoor(Spread([client]), terms) as door`: listens at `door.url`. The clients stay the caller's."""

    def __init__(
        self, rings: Spread, terms: Terms, *, host: str = "127.0.0.1", port: int = 8000, wait_s: float = 240.0
    ) -> None:
        """`port` 0: a free one. `wait_s`: below Atropos' own 300 s, after which it would send the group again."""
        self._rings = rings
        self._terms = terms
        self._address = (host, port)
        self._wait_s = wait_s
        self._environments = Environments()
        self._accepted: deque[tuple[int | None, int]] = deque()  # (environment, sequences) of the newest groups
        self._interrupted: OrderedDict[bytes, set[int]] = OrderedDict()
        self._pushing: set[anyio.CancelScope] = set()
        self._next_group = 0
        self._latest: Any = None
        self._runner: web.AppRunner | None = None
        self.statistics = AtroposStatistics()
        self.url = ""

    async def __aenter__(self) -> AtroposDoor:
        if self._runner is not None:
            raise LifecycleError("an AtroposDoor is opened once; make a new one")
        app = web.Application(client_max_size=MOST_BYTES)
        posts: dict[str, Callable[[web.Request], Awaitable[web.Response]]] = {
            "/scored_data": self._scored_data,
            "/scored_data_list": self._scored_data,
            "/register-env": self._register_env,
            "/disconnect-env": self._disconnect_env,
            "/register": _refuse_trainer,
        }
        gets: dict[str, Callable[[web.Request], Awaitable[web.Response]]] = {
            "/": self._root,
            "/info": self._info,
            "/wandb_info": self._wandb_info,
            "/status": self._status,
            "/status-env": self._status_env,
            "/latest_example": self._latest_example,
            "/batch": _refuse_trainer,
            "/reset_data": _refuse_trainer,
        }
        app.add_routes([web.post(path, handler) for path, handler in posts.items()])
        app.add_routes([web.get(path, handler) for path, handler in gets.items()])
        self._runner = web.AppRunner(
            app,
            access_log=None,
            auto_decompress=False,  # aiohttp answers what it cannot unpack with a stack trace and 500
            handler_cancellation=True,  # a group whose sender is gone is not pushed: it will come again
            shutdown_timeout=5.0,
        )
        host, port = self._address
        try:
            await self._runner.setup()
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(f"the HTTP door cannot listen at {host}:{port}: {error}; choose another port") from error
        self.url = f"http://{host}:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._runner is None:
            return
        for scope in self._pushing:  # they answer 503
            scope.cancel()
        with anyio.CancelScope(shield=True):
            try:
                await self._environments.say_over()
            finally:
                await self._runner.cleanup()

    # -- groups

    async def _scored_data(self, request: web.Request) -> web.Response:
        try:
            body = _unpacked(await request.read(), request.headers.get("Content-Encoding", ""))
            payload = orjson.loads(body)
        except (DataError, orjson.JSONDecodeError) as error:
            self._refuse(error)
            return _reply(400, status="refused", message=f"the body is no JSON (NaN and Infinity are none): {error}")
        groups = payload if isinstance(payload, list) else [payload]
        refused: list[dict[str, Any]] = []
        key = hashlib.blake2b(body).digest()
        done = self._interrupted.pop(key, set())  # when it came before
        try:
            for index, group in enumerate(groups):
                if index in done:
                    continue
                try:
                    full = await self._push(group)
                except (DataError, RecordError, RecordTooLarge) as error:
                    self._refuse(error)
                    refused.append({"index": index, "message": str(error)})
                    continue
                if full:
                    self.statistics.full += 1
                    return _reply(503, status="full", message=full)
                done.add(index)
            done = set()
        finally:  # also where the sender left
            if done:
                self._interrupted[key] = done
                while len(self._interrupted) > MOST_INTERRUPTED:
                    self._interrupted.popitem(last=False)
        accepted = len(groups) - len(refused)
        if refused:
            message = "; ".join(str(one["message"]) for one in refused)
            return _reply(422, status="refused", message=message, groups_processed=accepted, refused=refused)
        return _reply(200, status="received", groups_processed=accepted)

    async def _push(self, item: Any) -> str:
        """Empty where it was accepted, else why there is no room. Errors: DataError, RecordError, RecordTooLarge."""
        if self._environments.over:
            return "the run ends; nothing was taken"
        group = read_group(item, self._terms.limits, max(self._rings.policy_version, 0))
        number, self._next_group = self._next_group, self._next_group + 1
        scope = anyio.CancelScope()
        self._pushing.add(scope)
        try:
            with scope:
                await self._rings.push(number, group.scored, timeout=self._wait_s)
        except (RecordError, RecordTooLarge):
            raise
        except TransportError as error:  # full, or nobody owns the ring
            return str(error)
        finally:
            self._pushing.discard(scope)
        if scope.cancelled_caught:
            return "the run ends; nothing was taken"
        self.statistics.groups += 1
        self.statistics.without_logprobs += not group.with_logprobs
        environment = item.get("env_id")
        self._accepted.append((environment if isinstance(environment, int) else None, len(group.scored)))
        self._latest = item
        self._held()
        return ""

    def _refuse(self, error: Exception) -> None:
        self.statistics.refused += 1
        self.statistics.last_refusal = str(error)

    def _held(self) -> deque[tuple[int | None, int]]:
        """The groups that were accepted and are not trained or dropped: as many as the ring still holds, the newest."""
        held = self._rings.records_held
        while len(self._accepted) > held:
            self._accepted.popleft()
        return self._accepted

    # -- environments

    async def _register_env(self, request: web.Request) -> web.Response:
        try:
            number, name = self._environments.register(_fields(await request.read()))
        except (TypeError, ValueError) as error:
            return _reply(422, status="refused", message=str(error))
        return _reply(
            200,
            status="success",
            env_id=number,
            wandb_name=name,
            checkpoint_dir=self._terms.checkpoint_dir,
            starting_step=max(self._rings.policy_version, 0),
            checkpoint_interval=-1,
            num_steps=NO_END if self._terms.steps is None else self._terms.steps,
        )

    async def _disconnect_env(self, request: web.Request) -> web.Response:
        if self._environments.disconnect(_number(await request.read())):
            return _reply(200, status="success")
        return _reply(200, status="failure", error="no such environment")

    async def _status_env(self, request: web.Request) -> web.Response:
        number, version = _number(await request.read()), max(self._rings.policy_version, 0)
        return _reply(200, **self._environments.status(number, version, self._held()))

    # -- about the run

    async def _root(self, _: web.Request) -> web.Response:
        return _reply(200, message=f"asyncrl run {self._terms.name}: Atropos API")

    async def _info(self, _: web.Request) -> web.Response:
        # An environment server drops what is as long as this, so that the longest fits it says one more.
        return _reply(200, batch_size=self._terms.batch_size, max_token_len=(self._terms.limits.longest or 0) + 1)

    async def _wandb_info(self, _: web.Request) -> web.Response:
        return _reply(200, group=self._terms.name, project="asyncrl")

    async def _status(self, _: web.Request) -> web.Response:
        counts = self.statistics
        return _reply(
            200,
            current_step=max(self._rings.policy_version, 0),
            queue_size=len(self._held()),
            waiting=len(self._pushing),  # for room
            accepted=counts.groups,
            refused=counts.refused,
            last_refusal=counts.last_refusal,
        )

    async def _latest_example(self, _: web.Request) -> web.Response:
        empty: dict[str, Any] = {"tokens": [], "masks": [], "scores": [], "inference_logprobs": [], "messages": []}
        return _reply(200, **(empty if self._latest is None else self._latest))


async def _refuse_trainer(_: web.Request) -> web.Response:
    message = "asyncrl trains these groups itself: it has no batches for another trainer, and takes back nothing"
    return _reply(409, status="error", message=message, batch=None)


def _unpacked(body: bytes, encoding: str) -> bytes:
    """Errors: DataError where it is not what it says, or too much."""
    if encoding in ("", "identity"):
        return body
    if encoding.lower() not in ("gzip", "x-gzip"):
        raise DataError(f"Content-Encoding {encoding!r} is unknown here; use gzip or none")
    unpacker = zlib.decompressobj(wbits=31)
    try:
        unpacked = unpacker.decompress(body, MOST_BYTES)
    except zlib.error as error:
        raise DataError(f"the body is no gzip: {error}") from error
    if not unpacker.eof:
        raise DataError(f"the gzip body is cut off, or has more than {MOST_BYTES:,} bytes")
    return unpacked


def _reply(code: int, **fields: Any) -> web.Response:
    return web.Response(status=code, body=orjson.dumps(fields), content_type="application/json")


def _fields(body: bytes) -> dict[str, Any]:
    """Errors: ValueError where the body is no JSON object."""
    fields = orjson.loads(body)
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, found {fields!r}")
    return fields


def _number(body: bytes) -> Any:
    """`env_id`, None where there is none."""
    try:
        return _fields(body).get("env_id")
    except ValueError:
        return None


async def serve(
    runtime: Runtime,
    ring: RecordRing,
    *,
    others: Sequence[str] = (),
    host: str = "127.0.0.1",
    port: int = 8000,
    statistics: ring_door.DoorStatistics | None = None,
    task_status: anyio.abc.TaskStatus[AtroposDoor] = anyio.TASK_STATUS_IGNORED,
) -> ring_door.DoorStatistics:
    """`asyncrl.runtime.door.serve` with an HTTP door into the same ring, until the training ends or the ring is closed.

    Other processes may push through shared memory meanwhile. `others`: the rings of further ranks on this machine, among
    which the groups are spread. Reports the open door to the task group's `start`.
    Errors: ConfigError where it cannot listen.
    """
    counts = statistics or ring_door.DoorStatistics()
    ring.publish_version(runtime.version)  # before anything is stamped with it
    async with plain_task_group() as tasks:

        async def feed() -> None:
            await ring_door.serve(runtime, ring, counts)
            tasks.cancel_scope.cancel()

        tasks.start_soon(feed)
        async with AsyncExitStack() as clients:
            rings = [await clients.enter_async_context(await AsyncClient.attach(name)) for name in (ring.name, *others)]
            async with AtroposDoor(Spread(rings), Terms.of(runtime), host=host, port=port) as door:
                task_status.started(door)
                await anyio.sleep_forever()
    return counts
