"""Rank 0 writes `nodes.json` into the run directory: which ranks are connected or lost. `asyncrl nodes RUN` reads the file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import anyio
import orjson

from asyncrl.concurrency.offload import offload
from asyncrl.distributed.line import LineServer

from .opened import OpenRun

FILE = "nodes.json"


class Nodes:
    """The nodes of a run with several ranks, as rank 0 knows them."""

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
        """Write the file at the end of the run."""
        outcome = "completed" if error is None else f"run ended: {type(error).__name__}"
        with anyio.CancelScope(shield=True):
            await self._write(f"stopped by {self._run.stopped_by}" if self._run.stopped_by else outcome)

    async def _write(self, outcome: str | None) -> None:
        """`outcome`: how the run ended; None: the run goes on. Without room on the disk nothing is written."""
        directory = self._run.directory
        if directory is None or directory.lost:
            return
        every_s = self._run.config.watchdog.interval_s
        state = {"written": time.time(), "every_s": every_s, "ended": outcome, "nodes": self.rows()}
        path = directory.path / FILE

        def write() -> None:
            partial = path.with_name(f"{FILE}.partial")
            partial.write_bytes(orjson.dumps(state))
            partial.replace(path)

        with contextlib.suppress(OSError):
            await offload(write, "nodes")

    def rows(self) -> list[dict[str, Any]]:
        """One row for each rank that is or was connected, sorted by rank."""
        run, server, now = self._run, self._server, time.monotonic()
        assert run.ledger is not None
        reports: Mapping[str, Any] = {} if run.dispatch is None else run.dispatch.reports
        tokens = {peer: report["progress"][0] for peer, report in reports.items()}
        tokens[server.name] = run.ports.engine.statistics().get("tokens", 0.0)
        loads, silences = run.ledger.loads(), server.silences()
        peers = {f"rank {rank}" for rank in range(run.world.world_size)} | server.machines.keys()
        rows = []
        for rank, peer in sorted((int(peer.removeprefix("rank ")), peer) for peer in peers if peer.startswith("rank ")):
            # A rank that joined later generates.
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
