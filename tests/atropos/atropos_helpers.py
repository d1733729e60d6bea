"""An HTTP door over a real record ring, and a client that posts as Atropos does."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import anyio
from transport_records import drop

from asyncrl.atropos.door import AtroposDoor, ServedTerms
from asyncrl.atropos.groups import RankRings
from asyncrl.client import AsyncClient
from asyncrl.http.access import Address
from asyncrl.records.check import Limits
from asyncrl.records.trajectories import trajectories_of
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.types import Delivery, RingSettings

M = -100
TERMS = ServedTerms("one", 8, Limits(max_path_tokens=600, vocabulary=1000), last_version=None, checkpoint_dir="/c")
TWO_GROUPS = RingSettings(total_bytes=1 << 20, slots=2, payload_bytes=1 << 16)


def group(*first: int, **changes: Any) -> dict[str, Any]:
    n = len(first)
    return {
        "tokens": [[5, token, 9] for token in first],
        "masks": [[M, token, 9] for token in first],
        "scores": [float(token) for token in first],
        "inference_logprobs": [[1.0, -0.1 * token, -0.25] for token in first],
        "advantages": None, "ref_logprobs": None, "messages": None, "generation_params": None, "overrides": None,
        "group_overrides": None, "images": None, "env_id": 0, "distill_token_ids": None, "distill_logprobs": None,
        **changes,
    } | ({} if n else {"tokens": []})  # fmt: skip


@dataclass
class Set:
    ring: RecordRing
    client: AsyncClient
    door: AtroposDoor
    http: Any

    async def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """As Atropos' `_post_json_with_compression` does."""
        raw = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if len(raw) >= 1024:
            raw, headers["Content-Encoding"] = gzip.compress(raw), "gzip"
        async with self.http.post(self.door.url + path, data=raw, headers=headers) as reply:
            return reply.status, await reply.json()

    async def get(self, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        async with self.http.get(self.door.url + path, json=body) as reply:
            return reply.status, await reply.json()

    async def next(self) -> tuple[Delivery, list[Any]]:
        with anyio.fail_after(10):
            delivery = await self.ring.get()
        return delivery, trajectories_of(delivery.record)


@contextlib.asynccontextmanager
async def opened(
    name: str, settings: RingSettings = TWO_GROUPS, wait_s: float = 30.0, at: Address | None = None
) -> AsyncIterator[Set]:
    async with (
        RecordRing(name, settings) as ring,
        await AsyncClient.attach(name) as client,
        aiohttp.ClientSession() as http,
    ):
        ring.publish_version(3)
        async with AtroposDoor(RankRings([client]), TERMS, at or Address(port=0), wait_s=wait_s) as door:
            yield Set(ring, client, door, http)
        drop(ring)
