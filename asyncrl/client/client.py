"""Clients of a run. They send groups to the run through a ring, a buffer in shared memory. The methods of `Client` block."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..records.write import Plan, plan
from ..transport.rings.producer import AsyncProducer, Producer, ProducerStatistics
from .scored import Scored, Sender, group_draft


class _ClientBase:
    """Base of both clients. Makes the record (the bytes in the ring) of a pushed group."""

    def __init__(self, producer: Producer | AsyncProducer, epoch: int | None) -> None:
        self._producer = producer
        self.epoch = time.time_ns() if epoch is None else epoch

    @property
    def policy_version(self) -> int:
        """The newest policy version that the run has published. -1: none yet. The call only reads shared memory."""
        return self._producer.policy_version

    def statistics(self) -> ProducerStatistics:
        return self._producer.statistics()

    def _plan(
        self,
        group: int,
        scored: Sequence[Scored | Mapping[str, Any]],
        members: Sequence[int] | None,
        group_size: int | None,
        policy_version: int | None,
        metadata: Mapping[str, Any] | None,
    ) -> Plan:
        version = self.policy_version if policy_version is None else policy_version
        sender = Sender(self.epoch, version, self._producer.identity)
        draft = group_draft(group, scored, sender, members=members, group_size=group_size, metadata=metadata)
        return plan(draft)


class Client(_ClientBase):
    """Blocking client. Several threads of one process may share a client. Call `close`, or use `with`."""

    _producer: Producer

    @classmethod
    def attach(cls, name: str, *, timeout: float = 30.0, epoch: int | None = None) -> Client:
        """Attaches to the run with the ring `name`. Waits at most `timeout` seconds for the run.

        `epoch`: a number; the run identifies a group by the pair (epoch, number of the group). None: a new epoch. To push the same
        groups again after a crash, give the old epoch: the run drops the members that it already has.
        Errors: RingDetached if no such run is there; PlatformError; ConfigError for an invalid name.
        """
        return cls(Producer.attach(name, timeout=timeout), epoch)

    def push(
        self,
        group: int,
        scored: Sequence[Scored | Mapping[str, Any]],
        *,
        members: Sequence[int] | None = None,
        group_size: int | None = None,
        policy_version: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Pushes trajectories of one group. Returns when the ring has accepted them.

        `group`: the number of the group, unique within the epoch. `scored`: trajectories of the group. `members`: their
        numbers in the group, from 0; None: 0, 1, 2 ... `group_size`: trajectories of the whole group; None: as many as
        `scored`. `policy_version`: the version that sampled the tokens; None: the newest. `metadata`: JSON values for the group.
        Errors: RecordError for wrong trajectories; RecordTooLarge; RingFull after `timeout` seconds; RingDetached if the run
        has ended: push the same trajectories again for the next run, which drops the members that it already has.
        """
        self._producer.put(self._plan(group, scored, members, group_size, policy_version, metadata), timeout=timeout)

    def close(self) -> None:
        """Detach from the ring. Accepted trajectories stay in the ring. A second call does nothing."""
        self._producer.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncClient(_ClientBase):
    """Client for one event loop: `async with await AsyncClient.attach(name) as client: await client.push(...)`."""

    _producer: AsyncProducer

    @classmethod
    async def attach(cls, name: str, *, timeout: float = 30.0, epoch: int | None = None) -> AsyncClient:
        return cls(await AsyncProducer.attach(name, timeout=timeout), epoch)

    async def push(
        self,
        group: int,
        scored: Sequence[Scored | Mapping[str, Any]],
        *,
        members: Sequence[int] | None = None,
        group_size: int | None = None,
        policy_version: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        timeout: float = 60.0,
    ) -> None:
        """As `Client.push`. A push that is cancelled while the run lives has pushed nothing."""
        await self._producer.put(
            self._plan(group, scored, members, group_size, policy_version, metadata), timeout=timeout
        )

    async def close(self) -> None:
        """Detach from the ring. Accepted trajectories stay in the ring. A second call does nothing."""
        await self._producer.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
