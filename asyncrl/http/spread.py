"""The rings of all ranks of this machine as one: an HTTP request does not say which rank trains its group."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.client import AsyncClient, Scored


class Spread:
    """Pushes each group, whole, into the ring that holds the fewest records (in turn where they hold equally many)."""

    def __init__(self, clients: Sequence[AsyncClient]) -> None:
        if not clients:
            raise ValueError("an HTTP door needs the client of at least one ring")
        self._clients = list(clients)

    @property
    def policy_version(self) -> int:
        """The newest that any rank said; they differ for a moment only. -1 before the first did."""
        return max(client.policy_version for client in self._clients)

    @property
    def records_held(self) -> int:
        """Accepted and not yet trained or dropped."""
        return sum(client.statistics().records_held for client in self._clients)

    async def push(self, group: int, scored: Sequence[Scored], *, timeout: float) -> None:
        """As `AsyncClient.push`. Where every ring is full it waits for the one it chose: they empty step by step together."""
        client = min(self._clients, key=lambda client: client.statistics().records_held)
        self._clients.remove(client)
        self._clients.append(client)  # the next group looks at the others first
        await client.push(group, scored, timeout=timeout)
