"""A replica group over real gloo groups between threads and processes: the leader reads, its siblings receive."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch.distributed as dist
import warm

from asyncrl.distributed.replica import Arrays, Coordinates, RankLayout, ReplicaGroup
from asyncrl.errors import ConfigError, FetchFailed

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
ARRAYS = {
    "tokens": np.arange(5, dtype=np.int32),
    "empty": np.zeros((0, 2), np.uint16),
    "reward": np.array([0.5, np.nan, -1.0], np.float32),
    "mask": np.array([[True, False], [False, False]]),
}


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


def test_every_sibling_gets_the_arrays_that_the_leader_read_once() -> None:
    reads: list[int] = []

    def read(group: ReplicaGroup) -> tuple[Arrays, Any]:
        reads.append(group.rank)
        return ARRAYS, ["one", None, {"role": "user"}]

    for result in siblings(3, lambda group: group.share(lambda: read(group))):
        assert isinstance(result, tuple), result
        arrays, beside = result
        assert beside == ["one", None, {"role": "user"}] and list(arrays) == list(ARRAYS)
        for name, array in ARRAYS.items():
            found = arrays[name]
            assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert reads == [0]


def test_an_error_of_the_leader_is_heard_by_everybody_and_the_group_goes_on() -> None:
    def fail() -> tuple[Arrays, Any]:
        raise KeyError("no rows")

    def work(group: ReplicaGroup) -> Any:
        with pytest.raises(KeyError if group.leads else FetchFailed, match="no rows"):
            group.share(fail)
        return group.share(lambda: ({}, "after"))[1]

    assert siblings(2, work) == ["after", "after"]


RANK = """
import sys, torch, torch.distributed as dist
from asyncrl.distributed.replica import RankLayout
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
assert RankLayout(dp=2).open_group(rank, torch.device("cpu")) is None
group = RankLayout(tp=2).open_group(rank, torch.device("cpu"))
assert group is not None and group.leads == (rank == 0)
assert group.share(lambda: ({}, f"of rank {rank}")) == ({}, "of rank 0")
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


def test_an_unknown_axis_is_an_error() -> None:
    assert Coordinates.of({"tp": 1, "dp": 2}) == Coordinates(dp=2, tp=1)
    with pytest.raises(ConfigError, match=r"\['ep'\] are not known"):
        Coordinates.of({"tp": 0, "ep": 1})
    with pytest.raises(ConfigError, match="rank 4 of a layout of 4 ranks"):
        RankLayout(tp=4).coordinates(4)
