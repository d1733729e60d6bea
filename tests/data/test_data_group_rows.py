"""Groups as rows: a trajectory comes back as it went in, made of the store's own arrays."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from asyncrl.data.columns import materialize
from asyncrl.data.group_rows import (
    TOKEN_DTYPES,
    get_trajectories,
    put_trajectories,
    register_groups,
    row_id,
    store_metrics,
)
from asyncrl.data.store import Store
from asyncrl.errors import DataError
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import FinishReason, Trajectory


def trajectory(member: int, length: int, **settings: Any) -> Trajectory:
    values: dict[str, Any] = dict(
        group_id=7,
        member=member,
        group_size=2,
        prompt_length=2,
        tokens=np.arange(length, dtype=np.int32) + member,
        mask=np.arange(length) >= 2,
        logprobs=-np.arange(length, dtype=np.float32),
        sampled_logprobs=-np.arange(length, dtype=np.float32) / 2,
        versions=np.where(np.arange(length) >= 2, 3 + member, -1).astype(np.int32),
        temperature=0.7,
        finish_reason=FinishReason.LENGTH,
        completion=[{"role": "assistant", "content": "hm"}],
        reward=None if member else 0.25,
        components={"a": None, "b": 1.0},
        metadata={"calls": [1, 2]},
    )
    return Trajectory(**{**values, **settings})


def new(*observers: Any) -> Store:
    store = Store(observers)
    register_groups(store, "rollout", ("train",))
    return store


def test_trajectories_come_back_as_they_went_in_read_only_and_unaliased() -> None:
    store = new()
    group = [trajectory(0, 4), trajectory(1, 6)]
    meta, rows = put_trajectories(store, "rollout", group)
    assert meta.ids == ("e0_g7_m0", "e0_g7_m1") and meta.lengths == (4, 6)
    assert meta.tags is not None and meta.tags[1] == {"epoch": 0, "group": 7, "member": 1, "group_size": 2, "oldest": 4}
    for before, after in zip(group, rows, strict=True):
        for declared in fields(Trajectory):
            a, b = getattr(before, declared.name), getattr(after, declared.name)
            assert type(a) is type(b) and (np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b), declared.name
        for name, dtype in TOKEN_DTYPES.items():
            assert getattr(after, name).dtype == dtype and not getattr(after, name).flags.writeable
    group[0].tokens[0] = 99
    group[0].metadata["calls"].append(3)  # type: ignore[attr-defined]
    assert rows[0].tokens[0] == 0 and rows[0].metadata == {"calls": [1, 2]}
    assert get_trajectories(store, meta)[0].tokens is rows[0].tokens  # one copy, the store's own
    store.clear("rollout")
    assert rows[1].tokens.tolist() == [1, 2, 3, 4, 5, 6] and store.statistics().bytes == 0


def test_columns_of_a_batch_are_padded_on_demand() -> None:
    store = new()
    meta, _ = put_trajectories(store, "rollout", [trajectory(0, 4), trajectory(1, 6)])
    columns = store.get(meta, ["tokens", "versions", "mask"])
    padded = materialize(columns, {"tokens": 50}, lengths=meta.lengths, pad_to=meta.pad_target(8))
    assert padded["tokens"][0].tolist() == [0, 1, 2, 3, 50, 50, 50, 50]
    assert padded["versions"][0].tolist() == [-1, -1, 3, 3, -1, -1, -1, -1]
    assert padded["mask"].sum() == 6


def test_columns_of_another_dtype_become_the_schemas_and_short_ones_are_refused() -> None:
    store = new()
    wide = replace(trajectory(0, 4), tokens=np.arange(4), mask=np.array([0, 0, 1, 1]), logprobs=np.zeros(4))
    _, [row] = put_trajectories(store, "rollout", [wide])
    assert row.tokens.dtype == np.int32 and row.mask.dtype == np.bool_ and row.logprobs.dtype == np.float32
    with pytest.raises(DataError, match=r"'logprobs' of 'rollout': row 'e1_g7_m1' has 3 entries for 4 tokens"):
        put_trajectories(
            store, "rollout", [trajectory(0, 4), replace(trajectory(1, 4), logprobs=np.zeros(3, np.float32))], epoch=1
        )
    assert store.meta("rollout").ids == (row_id(7, 0),)  # nothing of the group that was refused


def test_every_operation_is_in_the_metrics_of_the_step() -> None:
    recorder = Recorder(max_events=0, nvtx=False)
    store = new(store_metrics(recorder))
    meta, _ = put_trajectories(store, "rollout", [trajectory(0, 4), trajectory(1, 6)])
    held = store.statistics().bytes
    with pytest.raises(KeyError):
        store.get(meta, ["nothing"])
    store.clear("rollout", meta.ids[:1])
    metrics = recorder.drain()
    assert metrics["queue/store/depth"] == 1 and metrics["store/bytes"] == held and metrics["store/get_error"] == 1
    assert metrics["store/put_ms"] >= 0 and metrics["store/clear_ms"] >= 0
