"""`Client` and `AsyncClient`: attach to the ring of a run, push groups, read the policy version."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..records.write import Plan, plan
from ..transport.rings.producer import AsyncProducer, Producer, ProducerStatistics
from .scored import Scored, Sender, group_draft


class _ClientBase:
    """Base of both clients: makes records of pushed groups, numbered within one epoch."""

    def __init__(self, producer: Producer | AsyncProducer, epoch: int | None) -> None:
        self._producer = producer
        self.epoch = time.time_ns() if epoch is None else epoch

    @property
    def policy_version(self) -> int:
        """The version that the run trains now; -1 until the run has published one. One read of shared memory."""
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
    """Blocking client. Several threads of one process may share it. Close it, or use `with`."""

    _producer: Producer

    @classmethod
    def attach(cls, name: str, *, timeout: float = 30.0, epoch: int | None = None) -> Client:
        """Attach to the run with the ring `name`; wait at most `timeout` seconds for the run.

        `epoch` identifies one numbering of groups; the default is a new epoch. To push the same groups again, give the
        same epoch again: the run drops the members that it already has.
        Errors: RingDetached, PlatformError, ConfigError.
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
        """Push trajectories of one group, and return when they are accepted.

        `group`: the group's number, unique within the epoch. `scored`: all trajectories of the group, or only those with
        the numbers `members` in a group of `group_size`. `policy_version`: the version that sampled the tokens; the
        default is the current one. `metadata`: JSON values for the group.
        Errors: RecordError with the fault in the trajectories; RecordTooLarge; RingFull after `timeout` seconds;
        RingDetached when the run ends. Push the same trajectories again to wait `timeout` seconds for the next run: the
        next run drops the members that it already has.
        """
        self._producer.put(self._plan(group, scored, members, group_size, policy_version, metadata), timeout=timeout)

    def close(self) -> None:
        """Detach from the ring. Accepted trajectories stay in the ring. Closing twice is fine."""
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
        """As `Client.push`. A cancelled push has pushed nothing, unless the owner of the ring ended meanwhile."""
        await self._producer.put(
            self._plan(group, scored, members, group_size, policy_version, metadata), timeout=timeout
        )

    async def close(self) -> None:
        """Detach from the ring. Accepted trajectories stay in the ring. Closing twice is fine."""
        await self._producer.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
