"""Nodes that join a run while it goes on (`asyncrl join`, `distributed.listen`).

    node      connects to rank 0 under a name of its own, with the secret of the run
    node      run/join: its version of asyncrl ──▶ rank 0
    rank 0    ──▶ a number that no rank has had, the configuration, the roles
    node      connects again as `rank N`, and works as a rank that only generates

The ledger, the prompt cursor and the evaluations count the node only when its engine serves weights that are new enough
(`pumps/follow.py`). Until then no rank waits for the node.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import __version__
from ..errors import ConfigError, PlatformError
from .line import SILENCE_S, LineClient, LineServer

VARIABLE = "ASYNCRL_SECRET"
MIN_SECRET_LENGTH = 16  # characters of a secret
JOIN = "run/join"
# On the line, the name of a node without a number begins with this text.
JOINING = "joining node "


@dataclass(frozen=True, slots=True)
class JoinedRun:
    """What a node that joins knows of the run. `address`: of rank 0's line. `rank`: the node's number. `train`, `generate`: the
    run's roles. `restart`: see `RankInfo`. `base`: see `pumps.pipeline.Ports`. `version`: of the weights. `config`: resolved."""

    address: str
    secret: str
    rank: int
    train: tuple[int, ...]
    generate: tuple[int, ...]
    restart: int
    base: int
    version: int
    config: Mapping[str, Any]


class JoinHandler:
    """Answers joining nodes, on rank 0. Create it before the line opens: the constructor registers the handler of `JOIN`."""

    def __init__(self, line: LineServer, ranks: int, note: Callable[[str], None]) -> None:
        """`ranks`: the number of ranks that the launcher started; the first node gets this number. `note`: prints a text."""
        self._next, self._note = ranks, note
        self._describe: asyncio.Future[Callable[[], Mapping[str, Any]]] = asyncio.get_running_loop().create_future()
        line.on(JOIN, self._answer)

    def open(self, describe: Callable[[], Mapping[str, Any]]) -> None:
        """Answer from now on. Earlier requests wait for this call. `describe()`: the fields of `JoinedRun` that all nodes share."""
        self._describe.set_result(describe)

    async def _answer(self, peer: str, node: Mapping[str, Any], _: object) -> tuple[dict[str, Any], tuple[()]]:
        if node["asyncrl"] != __version__:
            raise ConfigError(
                f"the run has asyncrl {__version__}, and this node has asyncrl {node['asyncrl']}; install asyncrl "
                f"{__version__} on this node"
            )
        # `shield`: a cancelled call of one node must not cancel the future of all nodes.
        shared_fields = (await asyncio.shield(self._describe))()
        rank, self._next = self._next, self._next + 1
        self._note(f"rank {rank} joins: process {node['process']} on {node['host']}")
        return {**shared_fields, "rank": rank}, ()


async def ask_to_join(address: str, secret: str, silence_s: float = SILENCE_S) -> JoinedRun:
    """Get a rank number from the run at `address`. Errors: RankLost if no run with this secret answers within `silence_s`;
    ConfigError for another version of asyncrl; LifecycleError if the run has trained its last step."""
    async with LineClient(address, secret, JOINING + secrets.token_hex(8), silence_s=silence_s) as line:
        node = {"asyncrl": __version__, "host": socket.gethostname(), "process": os.getpid()}
        fields, _ = await line.ask(JOIN, node)
    fields |= {name: tuple(fields[name]) for name in ("train", "generate")}
    return JoinedRun(address, secret, **fields)


def require_secret(why: str, environ: Mapping[str, str] | None = None) -> str:
    """The secret in ASYNCRL_SECRET. `why`: a clause for the error text. Errors: PlatformError for a missing or short secret."""
    secret = (os.environ if environ is None else environ).get(VARIABLE)
    if secret is None or len(secret) < MIN_SECRET_LENGTH:
        found = f"{why}, and {VARIABLE} is not set" if secret is None else f"{VARIABLE} has {len(secret)} characters"
        raise PlatformError(
            f"{found}; set it to the same {MIN_SECRET_LENGTH} or more random characters on every machine "
            '(python -c "import secrets; print(secrets.token_hex())")'
        )
    return secret


async def listen_at(line: LineServer, setting: str) -> str:
    """Open the line at `distributed.listen`. Returns HOST:PORT for `asyncrl join`. Errors: ConfigError if rank 0 cannot listen."""
    host, _, port = setting.rpartition(":")
    try:
        [found, *_] = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        await line.open(str(found[4][0]), int(port))
    except OSError as error:
        raise ConfigError(
            f"distributed.listen is {setting}, and rank 0 cannot listen there ({error}); give an address of the machine of rank "
            "0 and a free port"
        ) from error
    return f"{host}:{line.address.rpartition(':')[2]}"
