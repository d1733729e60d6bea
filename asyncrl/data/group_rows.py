"""Whole groups as rows of the column store: a row a trajectory, a column a field of `Trajectory`.

The group that goes on through the pipeline is made of the store's own arrays, read-only and not copied again; it may
be kept for as long as anybody likes, but the rows count as held until they are cleared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Trajectory

from .batch_meta import BatchMeta
from .store import Field, Store, StoreEvent

TOKEN_DTYPES = {
    "tokens": np.int32,
    "mask": np.bool_,
    "logprobs": np.float32,
    "sampled_logprobs": np.float32,
    "versions": np.int32,
}
_NAMES = tuple(declared.name for declared in fields(Trajectory))
_OTHERS = tuple(name for name in _NAMES if name not in TOKEN_DTYPES)


def register_groups(store: Store, partition: str, tasks: Sequence[str]) -> None:
    """Open a partition whose rows are trajectories."""
    columns = [Field(name, per_token=True, dtype=np.dtype(kind).name) for name, kind in TOKEN_DTYPES.items()]
    store.register(partition, [*columns, *(Field(name) for name in _OTHERS)], tasks)


def row_id(group_id: int, member: int, epoch: int = 0) -> str:
    """Unique over groups and over lives of a producer; never made from the prompt."""
    return f"e{epoch}_g{group_id}_m{member}"


def put_trajectories(
    store: Store, partition: str, trajectories: Sequence[Trajectory], epoch: int = 0
) -> tuple[BatchMeta, tuple[Trajectory, ...]]:
    """The rows of one group, all or none, and the same trajectories made of them.

    Per-token columns take the dtypes of `types.Trajectory`. Errors: DataError where one is not as long as the tokens.
    """
    columns: dict[str, Any] = {
        name: [np.asarray(getattr(trajectory, name), dtype=kind) for trajectory in trajectories]
        for name, kind in TOKEN_DTYPES.items()
    }
    columns |= {name: _objects([getattr(trajectory, name) for trajectory in trajectories]) for name in _OTHERS}
    meta = store.put(
        partition,
        [row_id(trajectory.group_id, trajectory.member, epoch) for trajectory in trajectories],
        columns,
        tags=[
            {
                "epoch": epoch,
                "group": t.group_id,
                "member": t.member,
                "group_size": t.group_size,
                "oldest": t.oldest_version,
            }
            for t in trajectories
        ],
    )
    return meta, get_trajectories(store, meta)


def get_trajectories(store: Store, meta: BatchMeta) -> tuple[Trajectory, ...]:
    """The trajectories of these rows; their arrays are the store's own and read-only."""
    return tuple(Trajectory(**row) for row in store.rows(meta, _NAMES))


def _objects(values: Sequence[Any]) -> Any:
    column = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        column[index] = value
    return column


def store_metrics(recorder: Recorder) -> Callable[[StoreEvent], None]:
    """An observer that puts every operation into the metrics of the step."""

    def observe(event: StoreEvent) -> None:
        recorder.gauge("queue/store/depth", event.held_rows)
        recorder.observe("store/bytes", event.held_bytes, reduce="max")
        recorder.observe(f"store/{event.op}_ms", 1e3 * event.seconds)
        if event.status != "ok":
            recorder.count(f"store/{event.op}_{event.status}")

    return observe
