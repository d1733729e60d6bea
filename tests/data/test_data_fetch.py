"""Fetch within a replica group, over real gloo groups between threads; one writer, computed from coordinates."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch.distributed as dist
import warm

from asyncrl.data.batch_meta import BatchMeta
from asyncrl.data.columns import ColumnForm, Columns, Jagged, join, split, stored_copy
from asyncrl.data.fetch import fetch, write_back
from asyncrl.distributed.replica import Coordinates, RankLayout, ReplicaGroup
from asyncrl.errors import ConfigError, DataError, FetchFailed, LifecycleError

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]


def siblings(size: int, work: Callable[[ReplicaGroup], T]) -> list[T | BaseException]:
    """Every rank of one replica in a thread of its own; what each returned or raised."""
    store = dist.HashStore()

    def rank(number: int) -> T | BaseException:
        group = dist.ProcessGroupGloo(store, number, size, timedelta(seconds=30))  # type: ignore[attr-defined]
        try:
            return work(ReplicaGroup(group, number, size))
        except BaseException as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


class Table:
    """Columns as one process may hold them: a source that counts its readers by thread, and a sink."""

    def __init__(self) -> None:
        self.columns: dict[str, tuple[ColumnForm, dict[str, Any]]] = {}
        self.puts, self.reads = 0, Counter[str]()
        self.meta = self.put(
            "p",
            ["a", "b", "c"],
            {
                "tokens": [np.arange(n, dtype=np.int32) for n in (2, 0, 3)],
                "routes": [np.full((n, 2), n, np.uint16) for n in (2, 0, 3)],
                "reward": np.array([0.5, np.nan, -1.0], np.float32),
                "mask": np.array([[True, False], [True, True], [False, False]]),
                "text": ["one", None, [{"role": "user"}]],
            },
        )

    def put(self, partition: str, ids: Sequence[str], columns: Mapping[str, Any]) -> BatchMeta:
        self.puts += 1
        for name, column in columns.items():
            form, rows = split(column, len(ids), name)
            self.columns[name] = form, {row: stored_copy(form, value) for row, value in zip(ids, rows, strict=True)}
        return BatchMeta(partition, tuple(ids), tuple(self.columns))

    def get(self, meta: BatchMeta, fields: Sequence[str] | None = None) -> Columns:
        self.reads[threading.current_thread().name] += 1
        return self.here(meta, fields)

    def here(self, meta: BatchMeta, fields: Sequence[str] | None = None) -> Columns:
        """The same, and nobody reads."""
        if missing := [name for name in fields or () if name not in self.columns]:
            raise KeyError(f"column {missing[0]!r} of {meta.partition!r} is not there")
        columns = {name: self.columns[name] for name in fields or meta.fields}
        return {name: join(form, [rows[row] for row in meta.ids], name) for name, (form, rows) in columns.items()}


def same(a: Columns, b: Columns) -> bool:
    """Bit for bit, so NaN equals NaN."""

    def equal(x: Any, y: Any) -> bool:
        if isinstance(x, Jagged):
            return isinstance(y, Jagged) and equal(x.values, y.values) and equal(x.offsets, y.offsets)
        contents = repr(x.tolist()) == repr(y.tolist()) if x.dtype == object else x.tobytes() == y.tobytes()
        return x.dtype == y.dtype and x.shape == y.shape and contents

    return list(a) == list(b) and all(equal(a[name], b[name]) for name in a)


def test_leader_broadcast_gives_what_independent_reads_give_and_reads_once() -> None:
    source = Table()
    expected = source.here(source.meta)

    def together(group: ReplicaGroup) -> list[Columns]:
        return [
            fetch(source, source.meta, group=group),
            fetch(source if group.leads else None, source.meta, group=group, policy="leader_broadcast"),
            fetch(source if group.leads else None, source.meta.subset([2, 0]), ["reward", "text"], group=group),
        ]

    results = siblings(3, together)
    assert sum(source.reads.values()) == 3 and len(source.reads) == 1
    for result in results:
        assert isinstance(result, list), result
        assert same(result[0], expected) and same(result[1], expected)
        assert same(result[2], source.here(source.meta.subset([2, 0]), ["reward", "text"]))
    alone = siblings(3, lambda group: fetch(source, source.meta, group=group, policy="independent"))
    assert sum(source.reads.values()) == 6 and all(same(result, expected) for result in alone)  # type: ignore[arg-type]


def test_received_columns_are_ones_own() -> None:
    source = Table()
    results = siblings(2, lambda group: fetch(source, source.meta, ["reward"], group=group)["reward"])
    for result in results:
        assert isinstance(result, np.ndarray)
        result[0] = 99
    assert source.here(source.meta, ["reward"])["reward"][0] == 0.5  # type: ignore[index]


def test_an_error_of_the_leader_is_heard_by_everybody_and_the_group_goes_on() -> None:
    source = Table()

    def work(group: ReplicaGroup) -> Columns:
        with pytest.raises(KeyError if group.leads else FetchFailed, match="'nothing' of 'p' is not there"):
            fetch(source, source.meta, ["nothing"], group=group)
        with pytest.raises(LifecycleError if group.leads else FetchFailed, match="give it a store"):
            fetch(None, source.meta, group=group)
        return fetch(source, source.meta, group=group)

    for result in siblings(2, work):
        assert isinstance(result, dict) and same(result, source.here(source.meta)), result


def test_siblings_that_ask_for_different_rows_are_told() -> None:
    source = Table()
    leader, sibling = siblings(2, lambda g: fetch(source, source.meta if g.leads else source.meta.slice(0, 2), group=g))
    assert isinstance(leader, dict)
    assert isinstance(sibling, DataError) and "leader asks for 3 rows" in str(sibling) and "for 2" in str(sibling)


def test_without_siblings_everybody_reads_and_leader_broadcast_is_refused() -> None:
    source = Table()
    assert same(fetch(source, source.meta), source.here(source.meta))
    with pytest.raises(LifecycleError, match="leader_broadcast needs the replica's group"):
        fetch(source, source.meta, policy="leader_broadcast")


RANK = """
import sys, torch, torch.distributed as dist
from asyncrl.data.batch_meta import BatchMeta
from asyncrl.data.columns import ColumnForm, join
from asyncrl.data.fetch import fetch
from asyncrl.distributed.replica import RankLayout
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
meta = BatchMeta("p", ("a", "b"), ("text",))
class Source:
    def get(self, meta, fields=None):
        return {"text": join(ColumnForm.OBJECT, [f"of rank {rank}", None], "text")}
assert RankLayout(dp=2).open_group(rank, torch.device("cpu")) is None
group = RankLayout(tp=2).open_group(rank, torch.device("cpu"))
assert group is not None and group.leads == (rank == 0)
assert fetch(Source(), meta, group=group)["text"].tolist() == ["of rank 0", None]
assert fetch(Source(), meta, group=group, policy="independent")["text"][0] == f"of rank {rank}"
dist.destroy_process_group()
print("done")
"""


def test_the_group_of_a_replica_is_made_from_the_layout(tmp_path: Path) -> None:
    """Two processes: alone in a replica each, then siblings."""
    arguments = [[sys.executable, "-c", RANK, str(rank), str(tmp_path / "rendezvous")] for rank in range(2)]
    ranks = [warm.Popen(a, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) for a in arguments]
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        assert rank.returncode == 0 and out == "done\n", err


# -- one writer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [RankLayout(), RankLayout(tp=2), RankLayout(dp=2, tp=2), RankLayout(dp=3, tp=2, cp=2, pp=2), RankLayout(cp=4)],
)
def test_every_replica_has_one_writer_whatever_its_shape(layout: RankLayout) -> None:
    """tp = 2 with cp = 1 included: the writer is computed, not read off the group that fetches."""
    ranks = range(layout.world_size)
    places = [layout.coordinates(rank) for rank in ranks]
    assert len(set(places)) == layout.world_size
    for dp in range(layout.dp):
        replica = layout.replica(dp)
        writers = [rank for rank in replica if places[rank].writes]
        assert writers == replica[:1] and {places[rank].dp for rank in replica} == {dp}
    assert sorted(rank for dp in range(layout.dp) for rank in layout.replica(dp)) == list(ranks)


def test_write_back_writes_once_and_tells_every_rank_the_new_fields() -> None:
    source, layout = Table(), RankLayout(tp=2, pp=2)
    before = source.puts
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        sink = source if place.writes else None
        meta = write_back(sink, source.meta, {"old": np.arange(3.0)}, place)
        assert meta == source.meta.with_fields("old")
    assert source.puts == before + 1
    for place in (Coordinates(), Coordinates(tp=1)):
        with pytest.raises(DataError, match="has 2 rows for 3 ids"):
            write_back(source, source.meta, {"fine": np.arange(3), "short": np.arange(2)}, place)
    assert "fine" not in source.columns
    with pytest.raises(LifecycleError, match="writes for its replica; give it a store"):
        write_back(None, source.meta, {}, Coordinates())


def test_an_unknown_axis_is_an_error() -> None:
    assert Coordinates.of({"tp": 1, "dp": 2}) == Coordinates(dp=2, tp=1)
    with pytest.raises(ConfigError, match=r"\['ep'\] are not known"):
        Coordinates.of({"tp": 0, "ep": 1})
    with pytest.raises(ConfigError, match="rank 4 of a layout of 4 ranks"):
        RankLayout(tp=4).coordinates(4)
