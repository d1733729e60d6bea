"""The HTTP door for Atropos: a stock `atroposlib` environment server trains a run.

    async with RecordRing("my-run") as ring, Runtime(config) as runtime, anyio.create_task_group() as tasks:
        door = await tasks.start(serve, runtime, ring)      # door.url is http://127.0.0.1:8000/KEY
        async for step in runtime.steps(): ...

    environment ──▶ listener.py ──▶ access.py ──▶ body.py, posted.py ──▶ AsyncClient.push ──▶ ring ──▶ runtime/door.py
                    connections     key, names    bytes to groups        waits for room       as for everybody

Guarantees
* 200 means accepted, as `push` means it: the group survives the death of this process and is trained or dropped, counted, once;
* a full ring holds the reply back, up to `wait_s`; then 503, which Atropos sends again. Nothing is dropped for want of room;
* a request that was cut off, or answered 503, is gone on with where it stopped when its body comes again;
* a group that cannot be trained is refused as a whole (422) with the reason; the other groups of its request are taken;
* a run that ends or is stopped answers 503 to who waits, and lets every environment server that asks know (`environments.py`);
* no state that a restart loses: an environment server that registered with an earlier run is served by the next one, where
  `door.http_key` gives both the same key;
* nobody without the key sees or changes anything, and no bytes that are sent end the run, hold its loop or fill its memory:
  what is too large, too deep, too slow or too much is answered 4xx, and connections leave the run its descriptors.

Differences from Atropos' own server: every `ScoredData` is one group whatever its size, so nothing waits for pieces that add
up; the trainer's end (`/register`, `/batch`, `/reset_data`) is refused, because the run itself is the trainer;
`min_batch_allocation` reserves nothing (and `/status-env` says so). `queue_size` counts what was accepted and is not
trained yet, so Atropos' `max_batches_offpolicy` bounds that. Shared memory (`asyncrl.client`)
is the fast path into the same ring.

What is sent is not encrypted: beyond this machine use networks that you trust, or a tunnel.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc
import orjson

from asyncrl.client import AsyncClient
from asyncrl.concurrency.supervisor import plain_task_group
from asyncrl.errors import ConfigError, LifecycleError
from asyncrl.records.check import Limits
from asyncrl.runtime import door as ring_door

from .access import Access, Address, Refused
from .body import MOST_FIELDS_BYTES, Body, receive
from .environments import NO_END, Environments
from .groups import Groups
from .library import log, web
from .listener import IDLE_S, Listener, most_connections
from .replies import reply
from .spread import Spread

if TYPE_CHECKING:
    from asyncrl.runtime.runtime import Runtime
    from asyncrl.transport.rings.record_ring import RecordRing


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


class AtroposDoor:
    """`async with AtroposDoor(Spread([client]), terms) as door`: listens at `door.url`. The clients stay the caller's."""

    def __init__(self, rings: Spread, terms: Terms, at: Address | None = None, *, wait_s: float = 240.0) -> None:
        """`wait_s`: below Atropos' own 300 s, after which it would send the group again. Errors: ConfigError."""
        self._rings = rings
        self._terms = terms
        self._address = at or Address()
        self._access = Access(self._address)
        self._environments = Environments()
        self.groups = Groups(rings, terms.limits, wait_s, self._environments.hear)
        self._listener: Listener | None = None
        self._closing = AsyncExitStack()
        self.url = ""

    async def __aenter__(self) -> AtroposDoor:
        if self._listener is not None:
            raise LifecycleError("an AtroposDoor is opened once; make a new one")
        app = web.Application(middlewares=[self._answer])
        posts: dict[str, Callable[[web.Request], Awaitable[web.Response]]] = {
            "/scored_data": self.groups.post,
            "/scored_data_list": self.groups.post,
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
        for prefix in ("", f"/{self._access.key}") if self._access.key else ("",):
            app.add_routes([web.post(prefix + path, handler) for path, handler in posts.items()])
            app.add_routes([web.get(prefix + path, handler) for path, handler in gets.items()])
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=log,
            auto_decompress=False,  # aiohttp answers what it cannot unpack with a stack trace and 500
            handler_cancellation=True,  # a group whose sender is gone is not pushed: it will come again
            keepalive_timeout=IDLE_S,
            lingering_time=1.0,  # for the rest of a body that was refused: else its sender may miss the reply
            shutdown_timeout=5.0,
        )
        async with AsyncExitStack() as stack:
            await runner.setup()
            stack.push_async_callback(_clean, runner)
            assert runner.server is not None
            self._listener = Listener(runner.server, most_connections())
            host, port = self._address.host, self._address.port
            try:
                addresses = await self._listener.open(host, port)
            except OSError as error:
                raise ConfigError(
                    f"the HTTP door cannot listen at {host}:{port}: {error}; choose another port"
                ) from error
            self._access.add(address for address, _ in addresses)
            self.url = self._access.url(addresses[0][1])
            tasks = await stack.enter_async_context(plain_task_group())
            tasks.start_soon(self._listener.run)
            self._closing = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            with anyio.CancelScope(shield=True):
                await self.close()
        finally:
            await self._closing.aclose()

    async def close(self) -> None:
        """Takes nothing any more, and tells the environment servers. Leaving the `async with` does this and closes the port."""
        self.groups.end()
        try:
            await self._environments.say_over()
        finally:
            if self._listener is not None:
                await self._listener.close()

    @web.middleware
    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        assert self._listener is not None
        with self._listener.request(request.protocol):
            try:
                self._access.check(request)
                return await handler(request)
            except Refused as error:
                refusal = reply(error.status, status=error.state, message=str(error))
                refusal.force_close()  # whoever is refused holds no connection, nor the rest of a body
                return refusal
            except web.HTTPException as error:  # no such path, or no such method there
                return reply(error.status, status="refused", message=error.reason)

    # -- environments

    async def _register_env(self, request: web.Request) -> web.Response:
        try:
            number, name = self._environments.register(_fields(await receive(request, MOST_FIELDS_BYTES)))
        except (TypeError, ValueError) as error:
            return reply(422, status="refused", message=str(error))
        return reply(
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
        if self._environments.disconnect(_number(await receive(request, MOST_FIELDS_BYTES))):
            return reply(200, status="success")
        return reply(200, status="failure", error="no such environment")

    async def _status_env(self, request: web.Request) -> web.Response:
        number, version = _number(await receive(request, MOST_FIELDS_BYTES)), max(self._rings.policy_version, 0)
        return reply(200, **self._environments.status(number, version, self.groups.held()))

    # -- about the run

    async def _root(self, _: web.Request) -> web.Response:
        return reply(200, message=f"asyncrl run {self._terms.name}: Atropos API")

    async def _info(self, _: web.Request) -> web.Response:
        # An environment server drops what is as long as this, so that the longest fits it says one more.
        return reply(200, batch_size=self._terms.batch_size, max_token_len=(self._terms.limits.longest or 0) + 1)

    async def _wandb_info(self, _: web.Request) -> web.Response:
        return reply(200, group=self._terms.name, project="asyncrl")

    async def _status(self, _: web.Request) -> web.Response:
        counts = self.groups.statistics
        return reply(
            200,
            current_step=max(self._rings.policy_version, 0),
            queue_size=len(self.groups.held()),
            waiting=self.groups.waiting,  # for room
            accepted=counts.groups,
            refused=counts.refused,
            last_refusal=counts.last_refusal,
        )

    async def _latest_example(self, _: web.Request) -> web.Response:
        empty: dict[str, Any] = {"tokens": [], "masks": [], "scores": [], "inference_logprobs": [], "messages": []}
        return reply(200, **(empty | self.groups.latest))


async def _clean(runner: web.AppRunner) -> None:
    with anyio.CancelScope(shield=True):
        await runner.cleanup()


async def _refuse_trainer(_: web.Request) -> web.Response:
    message = "asyncrl trains these groups itself: it has no batches for another trainer, and takes back nothing"
    return reply(409, status="error", message=message, batch=None)


def _fields(body: Body) -> dict[str, Any]:
    """Errors: ValueError where the body is no JSON object."""
    fields = orjson.loads(body)
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, found a {type(fields).__name__}")
    return fields


def _number(body: Body) -> Any:
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
    at: Address | None = None,
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
            async with AtroposDoor(Spread(rings), Terms.of(runtime), at) as door:
                task_status.started(door)
                await anyio.sleep_forever()
    return counts
