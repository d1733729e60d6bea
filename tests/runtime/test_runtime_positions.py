"""What rank 0 knows of where the others are in their prompts, on a real store: said, said late, said before, never."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.data.prompts import EMBEDDED_GROUPS, REROLLS
from asyncrl.distributed.line import LineServer
from asyncrl.distributed.ranks_store import LineThread, RankStore
from asyncrl.errors import CheckpointError
from asyncrl.runtime.positions import Departure, Positions, after_step
from asyncrl.runtime.saving import SavedRun

_opened: list[LineThread] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def a_store() -> RankStore:
    _opened.append(LineThread(LineServer("a secret of the test"), "127.0.0.1"))
    return RankStore(_opened[-1])


def two() -> tuple[Positions, Positions, RankStore]:
    store = a_store()
    return Positions(store, 0, (0, 3)), Positions(store, 1, (0, 3)), store


def at(position: int, **more: Any) -> dict[str, Any]:
    return {"turn": 0, "prompts": {"position": position}, "untrained": [position], "next_group": 1} | more


def whole(position: int, replay: Any = None) -> dict[str, Any]:
    return at(position, replay=replay)


def test_what_was_said_at_the_version_needs_nobody_at_the_end() -> None:
    first, other, _ = two()
    for version in range(1, 6):
        other.announce(version, at(10 * version + 1))
        first.announce(version, at(10 * version))
    everybody, missing = first.gather(5, whole(52), sharded=False)
    assert everybody == [whole(52), whole(51)] and missing == []


def test_what_is_said_at_last_counts() -> None:
    first, other, _ = two()
    other.announce(1, at(11))
    assert other.gather(1, whole(13), sharded=False) == ([], [])
    assert first.gather(1, whole(12), sharded=False)[0] == [whole(12), whole(13)]


def test_a_rank_that_did_not_say_stands_where_it_was_a_version_before() -> None:
    first, other, _ = two()
    for version in (1, 2):
        other.announce(version, at(10 * version + 1))
        first.announce(version, at(10 * version))
    first.announce(3, at(30))  # hears what was said at 2
    assert first.gather(3, whole(30), sharded=False, wait_s=0.05) == ([whole(30), whole(21)], [1])


def test_of_a_rank_that_was_never_heard_of_there_is_no_checkpoint_but_after_a_resume() -> None:
    first, _, _ = two()
    with pytest.raises(
        CheckpointError, match=r"version 1 was not written: .*waited for \[3\]: nothing came for 0.\d s"
    ):
        first.gather(1, whole(10), sharded=False, wait_s=0.05)
    first.start({0: at(4), 1: at(5)})
    assert first.gather(1, whole(10), sharded=False, wait_s=0.05) == ([whole(10), whole(5)], [1])


@pytest.mark.parametrize("before", [True, False])
def test_a_part_that_never_comes_is_not_waited_for_by_a_run_that_is_being_stopped(before: bool) -> None:
    """Whether the stop comes before, or while it is waited for: a rank that was killed says nothing, and there are minutes else."""
    first, other, _ = two()
    other.announce(1, at(11))
    if before:
        first.hurry(0.05)
    else:
        threading.Timer(0.2, first.hurry, [0.05]).start()
    with pytest.raises(
        CheckpointError, match=r"waited for \[3\]: nothing came for \d.\d s, and this run is being stopped"
    ):
        first.gather(1, whole(10), sharded=True)


def test_a_run_that_is_being_stopped_waits_for_the_parts_that_come() -> None:
    first, other, _ = two()
    first.hurry(60.0)
    threading.Timer(0.2, lambda: other.gather(1, whole(11), sharded=True)).start()
    assert first.gather(1, whole(10), sharded=True) == ([whole(10), whole(11)], [])


def test_parts_and_replay_buffers_are_waited_for() -> None:
    first, other, _ = two()
    other.announce(1, at(11))
    with pytest.raises(CheckpointError, match=r"not every rank announced .*waited for \[3\]"):
        first.gather(1, whole(10), sharded=True, wait_s=0.05)
    # A replay buffer that does not come is no reason to lose the weights.
    assert first.gather(1, whole(10, {"a": 1}), sharded=False, wait_s=0.05) == ([whole(10, {"a": 1}), whole(11)], [])
    late = threading.Timer(0.05, lambda: other.gather(1, whole(11, {"b": 2}), sharded=True))
    late.start()
    everybody, missing = first.gather(1, whole(10, {"a": 1}), sharded=True)
    late.join()
    assert everybody == [whole(10, {"a": 1}), whole(11, {"b": 2})] and missing == []


def test_the_store_does_not_grow() -> None:
    first, other, store = two()
    for version in range(1, 50):
        for rank in (other, first):
            rank.announce(version, at(version))
            rank.gather(version, whole(version), sharded=False)
    assert len(store._thread._values) <= 2 * 2 * 2


def test_all_ranks_save_the_version_after_the_one_at_which_the_first_says_so() -> None:
    first, other, store = two()
    answers = []
    for version in range(2, 20, 2):  # two updates per batch
        due = version in (4, 6, 14)
        answers.append(
            (first.announce(version, at(version), save_next=due), other.announce(version, at(version), save_next=True))
        )
    assert [version for version, said in zip(range(2, 20, 2), answers, strict=True) if said == (True, True)] == [
        6,
        8,
        16,
    ]
    assert all(mine == theirs for mine, theirs in answers)
    assert not [version for version in (4, 6, 14) if store.check([f"{version}/save"])]


def test_ranks_that_leave_together_hear_each_other_and_one_alone_does_not_wait_for_ever() -> None:
    first, other, _ = two()
    heard: list[dict[int, Departure]] = []
    late = threading.Timer(0.05, lambda: heard.append(other.leave(7, "SIGINT")))
    late.start()
    assert first.leave(7, None, wait_s=20.0) == {1: Departure(7, "SIGINT")}
    late.join()
    assert heard == [{0: Departure(7, None)}]
    alone, _, _ = two()
    assert alone.leave(3, "SIGTERM", wait_s=0.05) == {}


def test_parts_of_two_versions_are_no_checkpoint_and_nobody_waits_for_them() -> None:
    first, other, _ = two()
    other.announce(11, at(11))
    other.leave(12, "SIGINT", wait_s=0.01)
    with pytest.raises(CheckpointError, match=r"version 11 was not written: .*ranks \[3\] ended at another version"):
        first.gather(11, whole(10), sharded=True)  # its patience is minutes


def test_what_a_rank_says_last_is_of_the_version_that_the_others_reached() -> None:
    first, other, _ = two()
    for version in (11, 12):
        if version == 11:
            other.announce(version, at(111))
        first.announce(version, at(10 * version))
    other.announce_last(12, at(112))
    assert first.gather(12, whole(120), sharded=False) == ([whole(120), whole(112)], [])


def test_a_rank_that_dies_before_it_says_so_is_heard_of_at_the_version_before() -> None:
    """Rank 0 had not come to say the newest version either."""
    first, other, _ = two()
    for version in (1, 2):
        other.announce(version, at(10 * version + 1))
        first.announce(version, at(10 * version))
    assert first.gather(3, whole(30), sharded=False, wait_s=0.05) == ([whole(30), whole(21)], [1])


def test_where_a_rank_stands_after_a_step_that_it_did_not_tell_of() -> None:
    """Rank 1 of 2. 3 and 5 were in hand; in the step it had 5, 9, one that was to be played again, and one from outside."""
    again, late, outside = 1, REROLLS + 1, EMBEDDED_GROUPS + 11
    cursor = {"position": 7, "again": [again, 3], "failed": [late, REROLLS + 3], "world_size": 2, "rows": 24}
    said = {"turn": 4, "prompts": cursor, "untrained": [3, 5], "next_group": EMBEDDED_GROUPS + 3}
    after = after_step(said, [9, 5, again, late, outside], 2)
    assert after == {
        "turn": 5,
        "prompts": cursor | {"position": 11, "again": [3], "failed": [REROLLS + 3]},
        "untrained": [3, 7],
        "next_group": outside + 2,
    }
    assert after_step(said, [], 2) == said | {"turn": 5}
    assert after_step(said | {"prompts": None, "untrained": []}, [outside], 2)["prompts"] is None


def test_a_rank_that_does_not_come_makes_no_noise(capfd: pytest.CaptureFixture[str]) -> None:
    first, other, _ = two()
    for version in (1, 2):
        other.announce(1, at(11))
        first.announce(version, at(10))
    assert first.leave(2, None, wait_s=0.05) == {}
    assert first.gather(2, whole(20), sharded=False, wait_s=0.05)[1] == [1]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("prompts", "one", "error"),
    [
        ({"0": {}, "1": None}, True, None),
        ({"0": {}, "1": {}}, False, None),
        ({"0": {}}, True, None),
        ({"0": {}}, False, None),
        ({"0": None, "1": None}, False, None),
        ({"0": {}, "1": None}, False, "has one prompt cursor for all ranks .* resume it with distributed.roles"),
        ({"0": {}, "1": {}}, True, "has one prompt cursor for each rank.* resume it without distributed.roles"),
    ],
)
def test_a_resume_with_other_cursors_is_refused_by_name(prompts: Any, one: bool, error: str | None) -> None:
    saved = SavedRun(SimpleNamespace(run={"prompts": prompts}), -1)  # type: ignore[arg-type]  # what it uses of it
    with pytest.raises(CheckpointError, match=error) if error else nullcontext():
        saved.require_cursor(one)
