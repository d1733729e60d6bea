"""Opens the line (the connection) between rank 0 and the other ranks, and handles ranks and nodes that join, leave or are lost.

Rank 0 registers the handlers of the first messages before the line opens: other ranks send as soon as they are connected.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import anyio
import orjson

from asyncrl.concurrency.offload import offload
from asyncrl.distributed.connections import Connections
from asyncrl.distributed.exchange import Handler
from asyncrl.distributed.joining import JOINING, VARIABLE, JoinHandler, listen_at
from asyncrl.distributed.line import LineClient, LineServer
from asyncrl.errors import DataError, LifecycleError, RankLost
from asyncrl.pumps.dispatch import Dispatch
from asyncrl.pumps.follow import Remote
from asyncrl.weights.orders import ServedOrders

from .build import make_ledger
from .decided import check_chosen, chosen_settings
from .opened import END_REASON, REWARD_MODELS, OpenRun
from .positions import Positions
from .saving import SavedRun

_MEET = "meet"  # kind of a rank's first message
# How long a rank waits until the other ranks have left. torchrun kills a rank 30 s after it has asked the rank to end.
_LEAVE_S, _LEAVE_AFTER_ERROR_S = 30.0, 5.0


async def meet_ranks(run: OpenRun) -> None:
    """Find the other ranks, and open the line to them. Errors: PlatformError, RankLost; also those of `_agree`."""
    world = run.world
    run.stack.push_async_exit(partial(_leave_ranks, run))
    run.stages.begin("meeting the other ranks")
    single = run.config.distributed.sharding == "fsdp"
    # With `abandon` a run that is stopped does not wait for this call: the other ranks may never come, and nothing needs saving.
    if world.joined is None:
        await offload(lambda: world.open(run.decided.device, single_rank_group=single), "rendezvous", abandon=True)
    for line in world.notes:
        run.journal.live.note(line)
    if world.roles.differ:
        for rank in range(world.world_size) if world.is_first else [world.rank]:
            run.journal.live.note(world.roles.describe(rank))
        if not world.is_first and world.joined is None:
            print(f"asyncrl: {world.roles.describe(world.rank)}", flush=True)
    if world.world_size > 1 or world.roles.differ:
        await _open_line(run)
    if run.line is not None and world.roles.differ:
        run.connections = await run.stack.enter_async_context(Connections(run.line, world.rank, world.secret))
        if run.remote is not None:
            await run.remote.arrive()
        elif run.dispatch is not None:
            await run.dispatch.wait_connected([f"rank {rank}" for rank in range(1, world.world_size)])


async def _leave_ranks(run: OpenRun, kind: object, *_: object) -> None:
    """At the end: on rank 0 wait until the other ranks have left, on others tell rank 0 that this rank leaves. Then close the line.
    Errors: RankLost on a successful rank 0 if another rank did not leave. Without the error torchrun would wait for that rank."""
    world, line, missing = run.world, run.line, list[str]()
    failed = kind is not None or not world.is_open
    timeout_s = _LEAVE_AFTER_ERROR_S if failed else _LEAVE_S
    try:
        # In a thread: leaving may wait for collectives.
        await offload(lambda: world.close(failed=failed), "farewell")
        if isinstance(line, LineServer) and run.dispatch is not None:
            # Do not wait for joined nodes without a running engine: a node that is starting its engine may take minutes to leave.
            for peer in line.peers:
                if _joins(run, peer) and not run.dispatch.generates(peer):
                    line.give_up(peer, RankLost("the run has ended"))
        if line is not None:
            # Other ranks may send requests until they have left. A lost rank that only generates is not missing.
            missing = await line.leave(timeout_s)
            missing = [peer for peer in missing if not _joins(run, peer)]
            missing = [peer for peer in missing if peer in line.peers or world.roles.trains(_rank_of(peer))]
    finally:
        if line is not None:
            await line.aclose()
    if missing and not failed:
        raise RankLost(
            f"{' and '.join(missing)} did not end within {_LEAVE_S:g} s after rank 0, or {'was' if len(missing) == 1 else 'were'} "
            "lost. Rank 0 has written all its files; see the output of the rank that did not end"
        )


def _on_lost(run: OpenRun) -> tuple[Callable[[RankLost], None], Callable[[str, RankLost | None], None], Handler]:
    """Three handlers for the line. On ranks other than 0: for the loss of rank 0. On rank 0: for the end of another rank. On each
    rank: for the message in which another rank says why it ends (`END_REASON`)."""
    world = run.world

    def lose(lost: RankLost) -> None:
        reported = run.end_reasons.get("rank 0")
        lost = reported or lost
        if world.joined is not None:
            world.ended_well = run.remote is not None and run.remote.ended.is_set()
            lost = lost if reported is None else RankLost(f"the run has ended: {reported}")
        if world.joined is None or not run.stages.end_opening(lost):
            run.stages.lost = str(lost)
        world.lost.report(str(lost))
        if run.ledger is not None:
            run.ledger.lose(lost)

    def on_end(peer: str, lost: RankLost | None) -> None:
        if _joins(run, peer) or not world.roles.trains(_rank_of(peer)):
            return _lose_generator(run, peer, lost or RankLost(f"{peer} has left"))
        if run.dispatch is not None and run.orders is not None:
            run.dispatch.lose(peer, ())
            run.orders.orders.lose(peer, str(lost or f"{peer} has left"))
        if lost is not None:
            lose(RankLost(f"{lost}{world.roles.shared(_rank_of(peer))}", lost.stopped_by))
        elif run.ended_by is None and run.stopped_by is None and (reported := run.end_reasons.get(peer)) is not None:
            # The peer has left because of an error, and this rank has no error. Without `lose` this rank would wait for groups that
            # never come. `roles.shared` is not added here, because the reason may name another rank than the peer.
            lose(reported)

    async def on_end_reason(peer: str, ended: Any, buffers: Any) -> None:
        lost = RankLost(ended["reason"], ended["stopped_by"])
        if ended["stalled"]:
            run.describe_waits()
        if not isinstance(run.line, LineServer) and not world.trains:
            # This rank is in no collective that could fail, and rank 0 waits until this rank has left.
            run.end_reasons[peer] = lost
            return lose(lost)
        if not isinstance(run.line, LineServer) or world.roles.trains(_rank_of(peer)):
            # `report` ends collectives, not the run: this rank may be about to raise the error that ended the other rank.
            run.end_reasons[peer] = lost
            world.lost.report(str(lost))
            if lost.stopped_by is not None and run.ledger is not None:
                # After a signal this rank gets no error of its own. It may wait for a call of its leader (pumps/siblings.py).
                run.ledger.lose(lost)
        elif ended["one_rank"] or _joins(run, peer):
            run.line.give_up(peer, lost)
        else:
            lose(lost)

    return lose, on_end, on_end_reason


async def _open_line(run: OpenRun) -> None:
    """Open the line of this rank. A lost rank ends the run, unless the rank only generates (`_lose_generator`)."""
    world, silence_s = run.world, run.config.watchdog.loop_timeout_s
    lose, on_end, on_end_reason = _on_lost(run)

    async def meet(peer: str, header: Any, buffers: Any) -> Any:
        return [chosen_settings(run.config), run.saved is not None, run.decided.row_count], ()

    if world.is_first:
        run.line = server = LineServer(world.secret, silence_s=silence_s)
        server.on(END_REASON, on_end_reason)
        server.on(_MEET, meet)
        server.on_end = on_end
        run.ledger = make_ledger(run)
        run.positions = Positions(server, 0, world.roles.train)
        _open_roles(run, server)
        await _listen(run, server)
    else:
        run.line = client = await offload(lambda: world.join_line(silence_s), "rendezvous", abandon=True)
        client.on(END_REASON, on_end_reason)
        client.on_end = lose
        await client.__aenter__()
        await _agree(run, client)
        run.ledger = make_ledger(run)
        if world.trains:
            run.positions = Positions(client, world.train.rank, world.roles.train)
        if world.roles.differ:
            run.remote = Remote(client, joins=world.joined is not None)
    run.stages.line = run.line


async def _listen(run: OpenRun, server: LineServer) -> None:
    server.on(REWARD_MODELS, partial(_first_rewards, run))
    world, listen = run.world, run.config.distributed.listen
    if listen is None:
        await server.open(world.host)
    else:
        address = await listen_at(server, listen)
        run.journal.live.note(f"nodes may join this run, with its {VARIABLE}: asyncrl join {address}")
    if world.world_size > 1:
        await offload(lambda: world.announce_line(server), "rendezvous")


def let_join(run: OpenRun) -> None:
    """On rank 0: answer nodes that join, now that all parts are open."""
    if run.entrance is None:
        return
    world, dispatch = run.world, run.dispatch
    assert dispatch is not None

    def describe() -> dict[str, Any]:
        if dispatch.trained:
            raise LifecycleError("the last step of the run is trained, so no node can join; start a new run")
        roles = {"train": world.roles.train, "generate": world.roles.generate}
        config = run.config.model_dump(mode="json")
        return {
            **roles, "restart": world.restart, "base": run.base, "version": run.ports.trainer.version, "config": config
        }  # fmt: skip

    run.entrance.open(describe)
    if not dispatch.generating_count:
        run.journal.live.note(
            "no rank generates: the run waits for a node to join. It ends if nothing is generated within "
            f"watchdog.stall_timeout_s ({run.config.watchdog.stall_timeout_s:g} s)"
        )


async def _first_rewards(run: OpenRun, peer: str, header: Any, buffers: Any) -> Any:
    run.first_rewards = run.first_rewards or header
    return run.first_rewards, ()


async def _agree(run: OpenRun, line: LineClient) -> None:
    """Compare automatic settings and the number of prompts with rank 0. Resume if rank 0 resumes: this rank's own search for a
    checkpoint may have come before or after rank 0 wrote files. Errors: ConfigError, DataError."""
    (settings, resumes, rows), _ = await line.ask(_MEET)
    check_chosen(run.config, settings, run.world.rank)
    if run.decided.row_count != rows:
        raise DataError(
            f"data.train has {rows} rows on rank 0 and {run.decided.row_count} on rank {run.world.rank}, so a row would be trained "
            "twice or never; give all ranks the same rows"
        )
    if run.directory is None or not resumes:
        run.saved = None
    elif run.saved is None:
        run.saved = await offload(partial(SavedRun.latest, run.directory), "find-checkpoint")


def _open_roles(run: OpenRun, server: LineServer) -> None:
    """On rank 0: serve the requests of the other ranks, if ranks have different roles."""
    roles = run.world.roles
    if not roles.differ:
        return
    generating = [f"rank {rank}" if rank else "" for rank in roles.generate]
    in_order = run.config.preset == "sync"
    run.dispatch = Dispatch(server, run.recorder, generating, in_order=in_order, listens=roles.listens)
    senders, receivers = ([f"rank {rank}" for rank in ranks] for ranks in (roles.train, roles.receivers))
    if roles.listens:
        run.entrance = JoinHandler(server, run.world.world_size, run.journal.live.note)
    deadline_s = run.config.watchdog.loop_timeout_s
    run.orders = ServedOrders(
        server, senders, receivers, deadline_s, lambda node, reason: server.give_up(node, RankLost(reason))
    )


def _lose_generator(run: OpenRun, peer: str, lost: RankLost) -> None:
    """On rank 0: go on without a rank that only generates. End the run if no rank generates and no node may join."""
    if peer.startswith(JOINING):
        assert isinstance(run.line, LineServer)
        return run.line.forget(peer)
    dispatch, ledger, orders, server, rank = run.dispatch, run.ledger, run.orders, run.line, _rank_of(peer)
    assert dispatch is not None and ledger is not None and orders is not None and isinstance(server, LineServer)
    # An `await` between these calls would let a checkpoint miss a prompt.
    groups = ledger.lose_generator(rank)
    dispatch.lose(peer, groups)
    orders.orders.lose(peer, str(lost))
    if dispatch.dismissed.is_set() or run.stopped_by is not None or run.ended_by is not None:
        return
    run.lost[peer] = time.time(), str(lost)
    if dispatch.lacks_ranks:
        return ledger.lose(RankLost(f"no rank is left that generates: {lost}", lost.stopped_by))
    others = "Other ranks" if dispatch.generating_count else "Nodes that join within watchdog.stall_timeout_s"
    run.journal.warn(
        f"warning: {peer} on {server.machines[peer]} is lost, and the run goes on: {lost}. {others} play its {len(groups)} groups"
    )


def _joins(run: OpenRun, peer: str) -> bool:
    """Whether a peer of rank 0 is a node that joined the run after its start, or is about to join."""
    return peer.startswith(JOINING) or _rank_of(peer) >= run.world.world_size


def _rank_of(peer: str) -> int:
    """N of the peer `rank N`."""
    return int(peer.removeprefix("rank "))


class Nodes:
    """Rank 0 writes `nodes.json` into the run directory: which ranks are connected or lost. `asyncrl nodes RUN` reads the file."""

    def __init__(self, run: OpenRun, server: LineServer) -> None:
        self._run, self._server = run, server
        self._tokens: dict[str, float] = {}  # tokens by peer, at the last call of `rows`
        self._since = time.monotonic()  # time of that call

    async def write_often(self) -> None:
        """Write the file until this task is cancelled."""
        while True:
            await self._write(None)
            await anyio.sleep(self._run.config.watchdog.interval_s)

    async def close(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        outcome = "completed" if error is None else f"run ended: {type(error).__name__}"
        with anyio.CancelScope(shield=True):
            await self._write(f"stopped by {self._run.stopped_by}" if self._run.stopped_by else outcome)

    async def _write(self, outcome: str | None) -> None:
        """`outcome`: how the run ended; None: the run goes on. Errors of the disk are ignored."""
        directory = self._run.directory
        if directory is None or directory.lost:
            return
        every_s = self._run.config.watchdog.interval_s
        state = {"written": time.time(), "every_s": every_s, "ended": outcome, "nodes": self.rows()}
        path = directory.path / "nodes.json"

        def write() -> None:
            partial = path.with_name("nodes.json.partial")
            partial.write_bytes(orjson.dumps(state))
            partial.replace(path)

        with contextlib.suppress(OSError):
            await offload(write, "nodes")

    def rows(self) -> list[dict[str, Any]]:
        """One row for each rank of the run, and for each node that joined, sorted by rank."""
        run, server, now = self._run, self._server, time.monotonic()
        assert run.ledger is not None
        reports: Mapping[str, Any] = {} if run.dispatch is None else run.dispatch.reports
        tokens = {peer: report["progress"][0] for peer, report in reports.items()}
        tokens[server.name] = run.ports.engine.statistics().get("tokens", 0.0)
        loads, silences = run.ledger.loads(), server.silences()
        peers = {f"rank {rank}" for rank in range(run.world.world_size)} | server.machines.keys()
        rows = []
        for rank, peer in sorted((_rank_of(peer), peer) for peer in peers if peer.startswith("rank ")):
            # A rank that joined after the start generates.
            generates = run.world.roles.generates(rank) or rank >= run.world.world_size
            trains = run.world.roles.trains(rank)
            leader, *_ = run.world.roles.siblings(rank) or (rank,)
            with_leader = "" if leader == rank else f" with rank {leader}"
            silent_s = 0.0 if peer == server.name else silences.get(peer)
            lost_at, reason = run.lost.get(peer, (None, None))
            rows.append(
                {
                    "rank": rank,
                    "machine": server.machines.get(peer),
                    "role": " and ".join([f"trains{with_leader}"] * trains + ["generates"] * generates),
                    "version": run.ports.trainer.version if trains else reports.get(peer, {}).get("version"),
                    "groups": loads[rank] if generates else None,
                    "tokens_per_s": self._rate(peer, tokens, now) if generates else None,
                    "seen": lost_at or (None if silent_s is None else time.time() - silent_s),
                    "lost": reason,
                }
            )
        self._tokens, self._since = tokens, now
        return rows

    def _rate(self, peer: str, tokens: Mapping[str, float], now: float) -> float | None:
        if peer not in tokens or peer not in self._tokens or now == self._since:
            return None
        return (tokens[peer] - self._tokens[peer]) / (now - self._since)
