"""A trajectory that uses every field, whether two say the same, and the checksum of a header that was changed."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from asyncrl.records.layout import CRC_OFFSET, ENTRY, HEADER
from asyncrl.types import FinishReason, Trajectory


def trajectory(member: int, length: int, group_size: int = 4, **changes: Any) -> Trajectory:
    random = np.random.default_rng(member * 1000 + length)
    mask = random.random(length) < 0.5
    fields: dict[str, Any] = {
        "group_id": 7,
        "member": member,
        "group_size": group_size,
        "prompt_length": min(2, length),
        "tokens": random.integers(0, 2**31 - 1, length).astype(np.int32),
        "mask": mask,
        "logprobs": random.normal(size=length).astype(np.float32),
        "sampled_logprobs": random.normal(size=length).astype(np.float32),
        "versions": np.where(mask, 3, -1).astype(np.int32),
        "temperature": 0.5,
        "finish_reason": FinishReason.LENGTH,
        "completion": "grün \N{SNOWMAN}" * member,
        "reward": None if member == 2 else member / 3,
        "components": {"b": 1.5, "a": None} if member else {"a": -2.0},
        "metadata": {"nested": [1, {"x": None}]},
    }
    return Trajectory(**{**fields, **changes})


def same(left: Trajectory, right: Trajectory) -> None:
    for name in Trajectory.__dataclass_fields__:
        a, b = getattr(left, name), getattr(right, name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, name
            np.testing.assert_array_equal(a, b, err_msg=name)
        else:
            assert a == b and type(a) is type(b), name
    assert list(left.components) == list(right.components)


def resealed(raw: bytearray) -> bytearray:
    """With an honest checksum over a header and a table that may be dishonest, as far as they are here."""
    end = min(len(raw), HEADER.size + ENTRY.size * int.from_bytes(raw[12:16], "little"))
    raw[CRC_OFFSET : CRC_OFFSET + 4] = bytes(4)
    raw[CRC_OFFSET : CRC_OFFSET + 4] = zlib.crc32(raw[:end]).to_bytes(4, "little")
    return raw
