"""`Client` and `AsyncClient`: attach by name, push, read the policy version."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..records.write import Plan, plan
from ..transport.rings.producer import AsyncProducer, Producer, ProducerStatistics
from .scored import Scored, Sender, group_draft


class _Numbering:
    """What the two clients share: the epoch, and how a push becomes a record."""

    def __init__(self, producer: Producer | AsyncProducer, epoch: int | None) -> None:
        self._producer = producer
        self.epoch = time.time_ns() if epoch is None else epoch

    @property
    def policy_version(self) -> int:
        """The version the run trains from now; -1 before it said so. Read from shared memory: costs nothing."""
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


class Client(_Numbering):
    """Synchronous; may be used by several threads of one process. Close it, or use `with`."""

    _producer: Producer

    @classmethod
    def attach(cls, name: str, *, timeout: float = 30.0, epoch: int | None = None) -> Client:
        """Attach to the run whose ring is `name`, waiting for it at most `timeout` seconds.

        `epoch` names your numbering of groups: give the same one again to push the same groups again (the run removes what
        it had), leave it out for a new numbering. Errors: RingDetached, PlatformError, ConfigError.
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
        """Hand over trajectories of one group: all of them, or `members` of `group_size`. Returns when accepted.

        Errors: RecordError (what is wrong with them), RecordTooLarge, RingFull after `timeout` seconds, RingDetached: the run
        ended (push them again to wait, `timeout` seconds, for the next one; members that it has already are removed).
        """
        self._producer.put(self._plan(group, scored, members, group_size, policy_version, metadata), timeout=timeout)

    def close(self) -> None:
        """What was pushed stays. Twice is fine."""
        self._producer.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncClient(_Numbering):
    """For one event loop: `async with await AsyncClient.attach(name) as client: await client.push(...)`."""

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
        """As `Client.push`; a cancelled push pushed nothing, unless the owner went away meanwhile."""
        await self._producer.put(
            self._plan(group, scored, members, group_size, policy_version, metadata), timeout=timeout
        )

    async def close(self) -> None:
        """Let go of the ring. What was accepted stays in it. Closing twice is fine."""
        await self._producer.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
