"""The HTTP door for Atropos: stock `atroposlib` environment servers push groups into a run.

    async with RecordRing("my-run") as ring, Runtime(config) as runtime, anyio.create_task_group() as tasks:
        door = await tasks.start(serve, runtime, ring)      # door.url is http://127.0.0.1:8000/KEY
        async for step in runtime.steps(): ...

    environment ──▶ server.py, access.py ──▶ groups.py ──▶ AsyncClient.push ──▶ ring ──▶ runtime/door.py
                    connections, key, names  bytes to groups  waits for room         as for other producers

Guarantees
* status 200: the groups are in the ring. They survive the death of this process. Each is trained once, or is dropped and counted;
* a request waits up to `wait_s` for room in a ring; then the reply is 503, and Atropos sends the request again. Nothing is lost;
* a request that got 503, or was cut off while a group waited, can be sent to the same run again: accepted groups are skipped;
* a group that cannot be trained is refused as a whole (422) with the reason; the other groups of its request are accepted;
* a run that ends or is stopped answers 503 to waiting requests, and ends every environment server that asks for its status;
* the next run serves an environment server that registered with an earlier run, if `door.http_key` gives both runs the same key;
* a client without the key sees and changes nothing. No bytes of a client end the run or fill its memory: bodies that are too large,
  too deep, too slow or too many are refused (4xx or 503).

Differences from Atropos' own server: every `ScoredData` is one complete group. The requests of a trainer (`/register`, `/batch`,
`/reset_data`) are refused, because the run itself is the trainer. `min_batch_allocation` has no effect. `queue_size` counts groups
that were accepted and are not trained yet, so Atropos' `max_batches_offpolicy` limits their number. There is no `/latest_example`:
the run writes its groups into `rollouts/`.

The connection is not encrypted: beyond this machine use networks that you trust, or a tunnel.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc
import orjson

from asyncrl.client import AsyncClient
from asyncrl.concurrency import awake
from asyncrl.concurrency.supervisor import plain_task_group
from asyncrl.config.resolve import last_version
from asyncrl.http.access import Access, Address
from asyncrl.http.server import Handler, HttpServer, receive, reply, web
from asyncrl.records.check import Limits
from asyncrl.runtime import door as ring_door

from .groups import GroupReceiver, RankRings

# Limit for the bytes of a body of any route that receives no groups.
MOST_FIELDS_BYTES = 1 << 16
# The smallest `env_weight` in a reply, as in Atropos. With weight 0 an environment would produce nothing.
LEAST_WEIGHT = 0.01
# `num_steps` in replies of a run without `train.max_steps`: -1 would end the environment server.
NO_END = 1 << 31
# The `queue_size` that ends an environment server.
OVER = 1 << 52
# Longest time for environment servers to learn the end of the run. A server asks about ten times a second.
LINGER_S = 2.0
# Limit of registered environments. A further registration removes the environment that was silent for longest.
MOST_ENVIRONMENTS = 1024
FORGET_S = 3600.0  # until a silent environment may be removed

if TYPE_CHECKING:
    from asyncrl.runtime.runtime import Runtime
    from asyncrl.transport.rings.record_ring import RecordRing


@dataclass(frozen=True, slots=True)
class ServedTerms:
    """What the door needs to know of the run for its replies to environment servers."""

    name: str
    batch_size: int  # sequences in a step
    limits: Limits
    last_version: int | None  # the last policy version; None: no end
    checkpoint_dir: str


@dataclass(slots=True)
class _Environment:
    weight: float  # the registered `weight` times `max_token_length`
    seen_at: float  # time of the last request (`awake.now`)
    asked_status: bool = False
    knows_over: bool = False  # got a reply with `OVER`


class Environments:
    """The registered environment servers, and the door's replies to `/status-env`.

    Atropos has no message for the end of a run. A server ends by itself once `current_step + queue_size * group_size // batch_size`
    exceeds its number of steps. If its requests fail, it ends with a stack trace. So a door that closes keeps answering
    `/status-env` for up to `LINGER_S`. The `queue_size` of these replies is `OVER`, which ends every server."""

    def __init__(self) -> None:
        # Number -> environment. The environment that was silent for longest is first.
        self._all: dict[int, _Environment] = {}
        self._next = 0
        self.over = False
        self._all_know_over = anyio.Event()

    def register(self, fields: dict[str, Any]) -> tuple[int, str]:
        """Returns (number, name). No number is used twice. Errors: TypeError, ValueError."""
        weight = float(1.0 if fields.get("weight") is None else fields["weight"])
        context = float(fields.get("max_token_length") or 1)
        if not math.isfinite(weight * context):
            raise ValueError(f"weight is {weight} and max_token_length {context}; expected finite numbers")
        now, number, self._next = awake.now(), self._next, self._next + 1
        for other in list(self._all):
            if len(self._all) >= MOST_ENVIRONMENTS or self._all[other].seen_at < now - FORGET_S:
                del self._all[other]
        self._all[number] = _Environment(max(context, 0.0) * max(weight, 0.0), now)
        self._check_all_know()
        return number, f"{fields.get('desired_name') or 'env'}_{number}"

    def touch(self, number: Any) -> _Environment | None:
        """Record that an environment made a request. Returns the environment; None if no environment has this number."""
        environment = self._all.pop(number, None) if type(number) is int else None
        if environment is not None:
            environment.seen_at = awake.now()
            self._all[number] = environment
        return environment

    def disconnect(self, number: Any) -> bool:
        """Remove an environment. Returns False if no environment has this number."""
        found = self.touch(number) is not None
        if found:
            del self._all[number]
        self._check_all_know()
        return found

    def status(self, number: Any, version: int, held: deque[tuple[int | None, int]]) -> dict[str, Any]:
        """The reply to `/status-env`. `held`: (environment, sequences) of each accepted group that is not trained yet. A server
        multiplies queue sizes by its group size. So a queue size is a number of sequences, divided by the size of the server's
        largest held group. If no group of the server is held, the divisor is the size of the largest held group of all servers.
        An unknown environment (removed, or of an earlier run) gets weight 1."""
        environment = self.touch(number)
        total = sum(known.weight for known in self._all.values())
        weight = 1.0 if environment is None or total <= 0 else environment.weight / total
        own_groups = [] if environment is None else [sequences for owner, sequences in held if owner == number]
        largest = max((sequences for _, sequences in held), default=1)
        size = max(own_groups, default=largest)
        if environment is not None:
            environment.asked_status, environment.knows_over = True, self.over
        self._check_all_know()
        return {
            "current_step": version,
            "queue_size": OVER if self.over else sum(sequences for _, sequences in held) // size,
            "unallocated_fraction": 1.0,
            "self_queue_size": sum(own_groups) // size,
            "max_group_size": largest,
            "env_weight": min(1.0, max(LEAST_WEIGHT, weight)),
        }

    async def announce_over(self) -> None:
        """Announce the end of the run. Waits until every registered environment that has ever asked for its status has got `OVER`,
        but at most `LINGER_S`, because a server that died never asks again."""
        self.over = True
        self._check_all_know()
        with anyio.move_on_after(LINGER_S):
            await self._all_know_over.wait()

    def _check_all_know(self) -> None:
        if self.over and all(known.knows_over or not known.asked_status for known in self._all.values()):
            self._all_know_over.set()


class AtroposDoor:
    """`async with AtroposDoor(RankRings([client]), terms) as door` listens at `door.url`. The caller closes the clients."""

    def __init__(
        self, rings: RankRings, terms: ServedTerms, at: Address | None = None, *, wait_s: float = 240.0
    ) -> None:
        """`wait_s`: longest wait of a request for room. Atropos repeats a request after 300 s, so set less. Errors: ConfigError."""
        self._rings, self._terms = rings, terms
        self._environments = Environments()
        self.groups = GroupReceiver(rings, terms.limits, wait_s, self._environments.touch)
        routes: dict[tuple[str, str], Handler] = {
            ("POST", "/scored_data"): self.groups.post,
            ("POST", "/scored_data_list"): self.groups.post,
            ("POST", "/register-env"): self._register_env,
            ("POST", "/disconnect-env"): self._disconnect_env,
            ("POST", "/register"): _refuse_trainer,
            ("GET", "/info"): self._info,
            ("GET", "/wandb_info"): self._wandb_info,
            ("GET", "/status"): self._status,
            ("GET", "/status-env"): self._status_env,
            ("GET", "/batch"): _refuse_trainer,
            ("GET", "/reset_data"): _refuse_trainer,
        }
        self._server = HttpServer(Access(at or Address()), routes)

    @property
    def url(self) -> str:
        """The base URL for clients, with the key."""
        return self._server.url

    async def __aenter__(self) -> AtroposDoor:
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Refuse further groups, announce the end of the run to environment servers, and close the port."""
        self.groups.end()
        try:
            with anyio.CancelScope(shield=True):
                await self._environments.announce_over()
        finally:
            await self._server.__aexit__(*exc)

    async def _register_env(self, request: web.BaseRequest) -> web.Response:
        try:
            number, name = self._environments.register(orjson.loads(await receive(request, MOST_FIELDS_BYTES)))
        except (AttributeError, TypeError, ValueError) as error:
            return reply(422, status="refused", message=f"{error}; send an object with weight and max_token_length")
        return reply(
            200,
            status="success",
            env_id=number,
            wandb_name=name,
            checkpoint_dir=self._terms.checkpoint_dir,
            starting_step=self._rings.policy_version,
            checkpoint_interval=-1,
            num_steps=NO_END if self._terms.last_version is None else self._terms.last_version,
        )

    async def _disconnect_env(self, request: web.BaseRequest) -> web.Response:
        known = self._environments.disconnect(_env_id(await receive(request, MOST_FIELDS_BYTES)))
        return reply(200, status="success" if known else "failure")

    async def _status_env(self, request: web.BaseRequest) -> web.Response:
        number, version = _env_id(await receive(request, MOST_FIELDS_BYTES)), self._rings.policy_version
        return reply(200, **self._environments.status(number, version, self.groups.held()))

    async def _info(self, _: web.BaseRequest) -> web.Response:
        # An environment server drops trajectories of `max_token_len` tokens or more, so the door sends the limit of a row plus 1.
        max_path_tokens = self._terms.limits.max_path_tokens or 0
        return reply(200, batch_size=self._terms.batch_size, max_token_len=max_path_tokens + 1)

    async def _wandb_info(self, _: web.BaseRequest) -> web.Response:
        return reply(200, group=self._terms.name, project="asyncrl")

    async def _status(self, _: web.BaseRequest) -> web.Response:
        counts = self.groups.statistics
        return reply(
            200,
            current_step=self._rings.policy_version,
            queue_size=len(self.groups.held()),
            waiting=self.groups.waiting,  # groups that wait for room in a ring
            accepted=counts.groups,
            refused=counts.refused,
            last_refusal=counts.last_refusal,
        )


async def _refuse_trainer(_: web.BaseRequest) -> web.Response:
    message = "asyncrl trains these groups itself: it gives no batches to another trainer, and takes no batches back"
    return reply(409, status="error", message=message, batch=None)


def _env_id(body: bytearray) -> Any:
    """The field `env_id` of a body; None if there is none."""
    try:
        return orjson.loads(body)["env_id"]
    except (ValueError, TypeError, KeyError):
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
    """Runs `asyncrl.runtime.door.serve`, and an HTTP door into the same ring, until the training ends or the ring is closed.

    Other processes may also push through shared memory. `others`: the names of the rings of the other ranks on this machine; the
    door spreads groups over all rings. `statistics` counts the groups, and is returned. `TaskGroup.start` returns the open door.
    Errors: ConfigError if the door cannot listen."""
    counts = statistics or ring_door.DoorStatistics()
    # The HTTP door labels groups with the published version. It may get a group before `ring_door.serve` publishes a version.
    ring.publish_version(runtime.version)
    config = runtime.config
    terms = ServedTerms(
        name=config.run.name,
        batch_size=config.rollout.groups_per_step * config.rollout.group_size,
        limits=ring_door.limits_of(runtime),
        last_version=last_version(config, runtime.built.base),
        checkpoint_dir="" if runtime.directory is None else str(runtime.directory.path.absolute()),
    )
    async with plain_task_group() as tasks:

        async def feed() -> None:
            await ring_door.serve(runtime, ring, counts)
            tasks.cancel_scope.cancel()

        tasks.start_soon(feed)
        async with AsyncExitStack() as clients:
            rings = [await clients.enter_async_context(await AsyncClient.attach(name)) for name in (ring.name, *others)]
            async with AtroposDoor(RankRings(rings), terms, at) as door:
                task_status.started(door)
                await anyio.sleep_forever()
    return counts
