"""Records whose every byte follows from (epoch, group, member): whoever reads one can tell whether it is whole. And a ring
with one producer in the same event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from asyncrl.records.layout import Section
from asyncrl.records.read import Record
from asyncrl.records.trajectories import component_sections, json_bytes, reward_number
from asyncrl.records.write import Draft, Plan, plan
from asyncrl.transport.inventory import clear
from asyncrl.transport.rings.producer import AsyncProducer
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.types import Delivery, RingSettings
from asyncrl.types import FinishReason, Trajectory


def draft_of(
    trajectories: Sequence[Trajectory],
    *,
    epoch: int = 0,
    policy_version: int = -1,
    producer: bytes = bytes(16),
    group_metadata: Mapping[str, Any] | None = None,
    extra: Mapping[int, Any] | None = None,
) -> Draft:
    """Trajectories of one group as a client would write them. `extra`: further sections."""
    sections: dict[int, Any] = {
        Section.TOKENS: [t.tokens for t in trajectories],
        Section.MASK: [t.mask for t in trajectories],
        Section.LOGPROBS: [t.logprobs for t in trajectories],
        Section.SAMPLED_LOGPROBS: [t.sampled_logprobs for t in trajectories],
        Section.VERSIONS: [t.versions for t in trajectories],
        Section.REWARDS: [reward_number(t.reward, "reward") for t in trajectories],
        Section.TEMPERATURES: [t.temperature for t in trajectories],
        Section.PROMPT_LENGTHS: [t.prompt_length for t in trajectories],
        Section.FINISH_REASONS: [list(FinishReason).index(t.finish_reason) + 1 for t in trajectories],
        Section.MESSAGES: [json_bytes(t.completion, "completion") for t in trajectories],
        Section.METADATA: [json_bytes(dict(t.metadata), "metadata") for t in trajectories],
    }
    if trajectories[0].routed_experts is not None:
        sections[Section.ROUTED_EXPERTS] = [t.routed_experts for t in trajectories]
    sections |= component_sections([t.components for t in trajectories])
    if group_metadata is not None:
        sections[Section.GROUP_METADATA] = json_bytes(dict(group_metadata), "group metadata")
    first, members = trajectories[0], [t.member for t in trajectories]
    sections |= extra or {}
    return Draft(first.group_id, members, first.group_size, sections, epoch, policy_version, producer)


def planned(
    group: int, *, epoch: int = 0, members: tuple[int, ...] = (0,), group_size: int = 16, length: int = 50
) -> Plan:
    """`length` tokens for the first member, one more for each further one."""
    tokens = [content(epoch, group, member, length + i) for i, member in enumerate(members)]
    sections = {
        Section.TOKENS: tokens,
        Section.LOGPROBS: [-t.astype(np.float32) for t in tokens],
        Section.REWARDS: [float(member) for member in members],
    }
    return plan(Draft(group, members, group_size, sections, epoch=epoch))


def content(epoch: int, group: int, member: int, length: int) -> np.ndarray:
    seed = (epoch * 1_000_003 + group * 1009 + member) % 2**31
    return ((np.arange(length, dtype=np.int64) * 2654435761 + seed) % 2**31).astype(np.int32)


def whole(record: Record) -> bool:
    for position, member in enumerate(record.members.tolist()):
        tokens = record.column(Section.TOKENS, position)
        logprobs = record.column(Section.LOGPROBS, position)
        assert tokens is not None and logprobs is not None
        expected = content(record.epoch, record.group, member, len(tokens))
        if not np.array_equal(tokens, expected) or not np.array_equal(logprobs, -expected.astype(np.float32)):
            return False
        if record.arrays[Section.REWARDS][position] != member:
            return False
    return True


def written(plan: Plan, *, sequence: int = 0) -> bytes:
    """The record as bytes of its own."""
    buffer = bytearray(plan.size)
    plan.write(memoryview(buffer), sequence=sequence)
    return bytes(buffer)


SMALL = RingSettings(total_bytes=1 << 20, slots=8, payload_bytes=1 << 16)
# A process that owns a ring with these settings until it is killed.
OWNER = """
import asyncio, sys
from transport_records import SMALL
from asyncrl.transport.rings.record_ring import RecordRing

async def own():
    async with RecordRing(sys.argv[1], SMALL):
        print("open", flush=True)
        await asyncio.Event().wait()

asyncio.run(own())
"""


@asynccontextmanager
async def pair(name: str, settings: RingSettings = SMALL) -> AsyncIterator[tuple[RecordRing, AsyncProducer]]:
    async with RecordRing(name, settings) as ring, await AsyncProducer.attach(name) as producer:
        yield ring, producer
        drop(ring)


def drop(ring: RecordRing) -> None:
    """Close it and clear what it left for a next owner, as `asyncrl shm clear --drop-records` does."""
    if ring.close():
        clear(ring.name, drop_records=True)


def groups(deliveries: list[Delivery]) -> list[int]:
    return [d.record.group for d in deliveries]
