"""The column store: readiness, cursors, roll-back, accounting and events."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrl.concurrency.clock import run_virtual
from asyncrl.data.batch_meta import BatchMeta
from asyncrl.data.columns import Jagged, nbytes
from asyncrl.data.store import Field, Store, StoreEvent, StoreFull
from asyncrl.errors import DataError, LifecycleError

PER_TOKEN = (Field("tokens", per_token=True, dtype="int32"), Field("logprobs", per_token=True))


def new(**settings: Any) -> Store:
    store = Store(**{k: v for k, v in settings.items() if k == "observers"})
    rest = {k: v for k, v in settings.items() if k != "observers"}
    store.register("p", PER_TOKEN, ("train", "log"), **rest)
    return store


def tokens(*lengths: int) -> list[np.ndarray]:
    return [np.arange(n, dtype=np.int32) + 10 * n for n in lengths]


# -- readiness and cursors -----------------------------------------------------------------------------------------


def test_a_row_is_ready_when_its_columns_are_there_and_each_task_claims_it_once() -> None:
    store = new()
    store.put("p", ["a", "b", "c"], {"tokens": tokens(2, 3, 4)})
    store.put("p", ["c", "a"], {"advantages": np.array([1.0, 2.0])})
    first = store.claim("p", "train", ["tokens", "advantages"])
    assert first is not None and first.ids == ("a", "c")  # in the order of their first put
    assert first.lengths == (2, 4) and first.fields == ("tokens", "advantages")
    assert store.claim("p", "train", ["tokens", "advantages"]) is None
    other = store.claim("p", "log", max_rows=2)
    assert other is not None and other.ids == ("a", "b") and other.fields == ("tokens",)
    store.put("p", ["b"], {"advantages": np.array([3.0])})
    late = store.claim("p", "train", ["advantages"])
    assert late is not None and late.ids == ("b",)
    assert store.consumption("p", "train") == (3, 3) and store.consumption("p", "log") == (2, 3)


def test_too_few_rows_are_not_claimed_at_all_and_a_claim_can_be_given_back() -> None:
    store = new()
    store.put("p", ["a", "b"], {"x": np.arange(2)})
    assert store.claim("p", "train", min_rows=3) is None
    found = store.claim("p", "train", min_rows=2, max_rows=2)
    assert found is not None
    store.unclaim(found.subset([1]), "train")
    with pytest.raises(KeyError, match=r"has not claimed the rows \['b'\]"):
        store.unclaim(found, "train")
    again = store.claim("p", "train")
    assert again is not None and again.ids == ("b",)
    assert store.claim("p", "log", among=["b", "zz"]) == again


def test_a_cleared_id_can_be_used_again_by_every_task() -> None:
    store = new()
    for life in range(3):
        store.put("p", ["a"], {"x": np.array([life])})
        for task in ("train", "log"):
            found = store.claim("p", task, ["x"])
            assert found is not None and store.get(found)["x"].tolist() == [life]  # type: ignore[union-attr]
        assert store.clear("p", ["a", "a"]) == 1


def test_what_is_not_there_is_a_key_error_that_names_it() -> None:
    store = new()
    meta = store.put("p", ["a", "b"], {"x": np.arange(2)})
    store.put("p", ["a"], {"y": np.arange(1)})
    for call, words in (
        (lambda: store.get(meta, ["y"]), "'y' of 'p' is not there for 1 rows, such as 'b'"),
        (lambda: store.get(BatchMeta("p", ("zz",)), ["x"]), r"no rows \['zz'\]"),
        (lambda: store.clear("p", ["a", "zz"]), r"no rows \['zz'\]"),
        (lambda: store.claim("p", "nobody"), "no task 'nobody'"),
        (lambda: store.put("q", ["a"], {}), "no partition 'q'"),
        (lambda: store.meta("p", ["zz"]), "never put, or cleared"),
    ):
        with pytest.raises(KeyError, match=words):
            call()
    assert store.meta("p").ids == ("a", "b") and store.meta("p").fields == ("x",)  # clear took nothing
    with pytest.raises(DataError, match="name the fields"):
        store.get(BatchMeta("p", ("a",)))


def test_wait_claim_wakes_up_on_a_put_an_unclaim_and_the_end() -> None:
    seen: list[tuple[float, Any]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = new()

        async def consume() -> None:
            while True:
                try:
                    found = await store.wait_claim("p", "train", ["x"], min_rows=2)
                except LifecycleError as error:
                    seen.append((loop.time(), str(error)))
                    return
                seen.append((loop.time(), found.ids))

        with pytest.raises(TimeoutError, match=r"waited 3 s for 1 rows of 'p' with \['x'\]"):
            await store.wait_claim("p", "log", ["x"], timeout_s=3)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consume)
            await anyio.sleep(1)
            store.put("p", ["a"], {"x": np.arange(1)})
            await anyio.sleep(1)
            meta = store.put("p", ["b", "c"], {"y": np.arange(2)})
            await anyio.sleep(1)
            store.put("p", meta.ids, {"x": np.arange(2)})
            await anyio.sleep(1)
            with anyio.move_on_after(1):
                await store.wait_claim("p", "train", ["x"])
            store.unclaim(meta, "train")
            await anyio.sleep(1)
            store.close()
        assert store.statistics().errors["claim"] == 3  # the timeout, the cancelled one, the closed one

    run_virtual(main)
    assert seen == [(6.0, ("a", "b", "c")), (8.0, ("b", "c")), (9.0, "the store is closed")]


# -- forms ---------------------------------------------------------------------------------------------------------


def test_per_token_columns_are_jagged_padded_input_is_cut_to_the_lengths_and_extras_pass_through() -> None:
    store = new()
    padded = np.array([[1, 2, 0, 0], [3, 4, 5, 0]], np.int32)  # wider than the longest row
    meta = store.put(
        "p",
        ["a", "b"],
        {
            "tokens": padded,
            "pixels": [np.zeros((1, 2), np.float32), np.ones((3, 2), np.float32)],
            "reward": np.array([0.5, 1.5], np.float32),
            "text": ["one", None],
            "messages": [[{"role": "user"}], []],
            "grid": np.arange(8).reshape(2, 2, 2),
        },
        lengths=[2, 3],
        tags=[{"group": 0}, {"group": 1}],
    )
    store.put("p", ["b"], {"logprobs": np.array([[-1.0, -2.0, -3.0, 9.0]], np.float32)})  # lengths known from before
    assert meta.lengths == (2, 3) and meta.tags == ({"group": 0}, {"group": 1})
    columns = store.get(meta.subset([1, 0]))
    assert isinstance(columns["tokens"], Jagged)
    assert [row.tolist() for row in columns["tokens"]] == [[3, 4, 5], [1, 2]]
    assert columns["pixels"].lengths.tolist() == [3, 1]  # type: ignore[union-attr]
    assert columns["reward"].tolist() == [1.5, 0.5] and columns["reward"].dtype == np.float32  # type: ignore[union-attr]
    assert columns["text"].tolist() == [None, "one"]  # type: ignore[union-attr]
    assert columns["messages"].tolist() == [[], [{"role": "user"}]]  # type: ignore[union-attr]
    assert columns["grid"].shape == (2, 2, 2)  # type: ignore[union-attr]
    logprobs = store.get(BatchMeta("p", ("b",)), ["logprobs"])["logprobs"]
    assert isinstance(logprobs, Jagged) and logprobs.values.tolist() == [-1, -2, -3]


def test_nothing_is_aliased_in_or_out() -> None:
    store = new()
    token, message = np.arange(3, dtype=np.int32), {"role": "user"}
    meta = store.put("p", ["a"], {"tokens": [token], "messages": [[message]], "x": np.zeros(1)})
    token[0], message["role"] = 99, "robber"
    got = store.get(meta)
    got["tokens"].values[1] = 99  # type: ignore[union-attr]
    got["messages"][0].append("robber")  # type: ignore[index]
    got["x"][0] = 99  # type: ignore[index]
    [row] = store.rows(meta)
    assert (row["tokens"].tolist() == [0, 1, 2] and row["messages"] == [{"role": "user"}]) or row["x"] == 0
    assert row["messages"] == [[{"role": "user"}]][0] and row["x"] == 0
    with pytest.raises(ValueError, match="read-only"):
        row["tokens"][0] = 5
    row["messages"].append("robber")
    assert store.get(meta, ["messages"])["messages"][0] == [{"role": "user"}]


@pytest.mark.parametrize(
    "columns, words",
    [
        ({"x": np.arange(2), "y": np.arange(3)}, "'y' has 3 rows for 2 ids"),
        ({"x": np.arange(2), "tokens": np.zeros((2, 2), np.int32)}, "put it with the lengths"),
        ({"x": np.arange(2), "tokens": [np.zeros(1), np.zeros(2)]}, "declared as int32"),
        ({"x": np.arange(2), "tokens": np.arange(2)}, "one entry a token"),
        ({"x": np.arange(2), "tokens": tokens(1, 2), "logprobs": [np.zeros(1), np.zeros(3)]}, "3 entries for 2 tokens"),
        ({"x": np.arange(2), "old": np.zeros((2, 1))}, "before it was scalar"),
        ({"x": np.arange(2), "old": np.zeros(2, np.float32)}, "before it was scalar of float64"),
        ({"x": np.arange(2), "long": [np.zeros(2), np.zeros((2, 2))]}, "differ in more than their length"),
    ],
)
def test_a_put_that_fails_in_its_last_column_leaves_no_trace(columns: dict[str, Any], words: str) -> None:
    store = new()
    meta = store.put("p", ["a"], {"old": np.zeros(1)}, tags=[{"t": 0}])
    before = store.statistics()
    with pytest.raises(DataError, match=words):
        store.put("p", ["a", "b"], columns, tags=[{"t": 1}, {"t": 1}])
    with pytest.raises(TypeError):
        store.put("p", ["a", "b"], {"x": np.arange(2), "y": 5})
    after = store.statistics()
    assert (after.rows, after.bytes, after.most_rows) == (before.rows, before.bytes, before.most_rows)
    assert store.meta("p") == meta and store.claim("p", "train", ["x"]) is None
    store.put("p", ["a", "b"], {"x": [None, "objects are fine: the failed put fixed no form"]})


def test_lengths_change_only_together_with_every_per_token_column() -> None:
    store = new()
    store.put("p", ["a"], {"tokens": tokens(3), "logprobs": [np.zeros(3)]})
    with pytest.raises(DataError, match="'a' of 'p' has 3 tokens; the put says 2"):
        store.put("p", ["a"], {"tokens": tokens(2)})
    with pytest.raises(DataError, match="1 columns for rows of up to 3"):
        store.put("p", ["a"], {"logprobs": np.zeros((1, 1))})
    with pytest.raises(DataError, match="one each"):
        store.put("p", ["a"], {"tokens": np.zeros((1, 4), np.int32)}, lengths=[1, 2])
    meta = store.put("p", ["a"], {"tokens": tokens(2), "logprobs": [np.ones(2)]})
    assert meta.lengths == (2,)


@pytest.mark.parametrize("ids", [["a", "a"], "ab"])
def test_ids_are_a_sequence_of_different_names(ids: Any) -> None:
    with pytest.raises(DataError, match="different names"):
        new().put("p", ids, {"x": np.arange(2)})


# -- capacity, roll-back, draining -----------------------------------------------------------------------------------


def test_a_full_partition_refuses_a_put_as_a_whole_and_clears_nothing() -> None:
    store = new(max_rows=3, max_bytes=40)
    store.put("p", ["a", "b"], {"x": np.arange(2)})
    with pytest.raises(StoreFull, match="4 rows; max_rows is 3"):
        store.put("p", ["a", "c", "d"], {"x": np.arange(3)})
    with pytest.raises(StoreFull, match="48 bytes; max_bytes is 40"):
        store.put("p", ["a", "b"], {"y": np.zeros((2, 2))})
    assert store.meta("p").ids == ("a", "b") and store.statistics().bytes == 16
    store.clear("p", ["a"])
    store.put("p", ["c", "d"], {"x": np.arange(2)})


def test_rows_are_drained_when_a_worker_fails_or_is_cancelled() -> None:
    store = new()
    store.put("p", ["z"], {"x": np.arange(1)})
    for failure in (RuntimeError("worker died"), asyncio.CancelledError()):
        with pytest.raises(type(failure)):
            with store.cleared_on_error("p", ["a", "b"]):
                store.put("p", ["a"], {"x": np.arange(1)})
                raise failure
        assert store.meta("p").ids == ("z",)
    with store.cleared_on_error("p", ["a"]):
        store.put("p", ["a"], {"x": np.arange(1)})
    assert store.meta("p").ids == ("z", "a")
    with pytest.raises(BaseExceptionGroup) as both:
        with store.cleared_on_error("p", ["a"]):
            store.close()
            raise RuntimeError("worker died")
    assert [type(error) for error in both.value.exceptions] == [RuntimeError, LifecycleError]


def test_registering_again_is_fine_in_the_same_words_only() -> None:
    store = new(max_rows=3)
    store.put("p", ["a"], {"x": np.arange(1)})
    store.register("p", PER_TOKEN, ("train", "log"), max_rows=3)
    assert len(store.meta("p")) == 1
    with pytest.raises(DataError, match="other fields, tasks or capacity"):
        store.register("p", PER_TOKEN, ("train",), max_rows=3)


def test_a_closed_store_says_so_and_closing_twice_is_fine() -> None:
    with new() as store:
        store.put("p", ["a"], {"x": np.arange(1)})
    store.close()
    assert store.statistics().rows == store.statistics().bytes == 0
    with pytest.raises(LifecycleError, match="closed"):
        store.put("p", ["a"], {"x": np.arange(1)})


# -- accounting and events -----------------------------------------------------------------------------------------


def test_every_operation_is_one_event_with_its_rows_bytes_and_outcome() -> None:
    events: list[StoreEvent] = []

    def broken(event: StoreEvent) -> None:
        raise ZeroDivisionError("a bad dashboard")

    store = new(observers=[broken, events.append])
    meta = store.put("p", ["a", "b"], {"x": np.arange(2), "tokens": tokens(1, 2)})
    store.get(meta, ["x"])
    found = store.claim("p", "train")
    assert found is not None
    store.unclaim(found, "train")
    store.consumption("p", "train")
    with pytest.raises(KeyError):
        store.get(meta, ["nothing"])
    store.clear("p")
    store.close()
    assert [(e.op, e.partition, e.rows, e.bytes, e.status) for e in events] == [
        ("register", "p", 0, 0, "ok"),
        ("put", "p", 2, 28, "ok"),
        ("get", "p", 2, 16, "ok"),
        ("claim", "p", 2, 0, "ok"),
        ("unclaim", "p", 2, 0, "ok"),
        ("consumption", "p", 0, 0, "ok"),
        ("get", "p", 0, 0, "error"),
        ("clear", "p", 2, 28, "ok"),
        ("close", "", 0, 0, "ok"),
    ]
    assert all(event.seconds >= 0 for event in events)
    statistics = store.statistics()
    assert statistics.observer_failures == 9 and statistics.observer_failure == "ZeroDivisionError: a bad dashboard"
    assert statistics.operations["get"] == 2 and statistics.errors == {"get": 1}
    assert (statistics.most_rows, statistics.most_bytes, statistics.largest_row) == (2, 28, 16)


class AgainstADictionary(RuleBasedStateMachine):
    """Random operations beside a dictionary of rows: contents, order, cursors, lengths and accounting agree at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.store = new()
        self.rows: dict[str, dict[str, Any]] = {}
        self.claimed: dict[str, set[str]] = {"train": set(), "log": set()}

    @rule(
        ids=st.lists(st.sampled_from("abcdef"), unique=True, max_size=4),
        names=st.sets(st.sampled_from(["x", "text", "grid"]), min_size=1),
        salt=st.integers(0, 9),
    )
    def put(self, ids: list[str], names: set[str], salt: int) -> None:
        values = {
            "x": np.arange(len(ids)) + salt,
            "text": [f"{name}{'!' * salt}" for name in ids],
            "grid": np.arange(2.0 * len(ids)).reshape(-1, 2) + salt,
        }
        self.store.put("p", ids, {name: values[name] for name in names})
        for index, row in enumerate(ids):
            self.rows.setdefault(row, {}).update({name: values[name][index] for name in names})

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True))
        self.store.clear("p", ids)
        for row in ids:
            del self.rows[row]
            for claimed in self.claimed.values():
                claimed.discard(row)

    @rule(
        task=st.sampled_from(["train", "log"]),
        need=st.sampled_from([(), ("x",), ("x", "grid")]),
        most=st.integers(1, 3),
    )
    def claim(self, task: str, need: tuple[str, ...], most: int) -> None:
        expected = [
            row for row, values in self.rows.items() if row not in self.claimed[task] and all(n in values for n in need)
        ][:most]
        found = self.store.claim("p", task, need, max_rows=most)
        assert (list(found.ids) if found else []) == expected
        self.claimed[task].update(expected)
        if found and found.fields:
            columns = self.store.get(found)
            for name, column in columns.items():
                assert all(np.array_equal(a, self.rows[row][name]) for row, a in zip(found.ids, column, strict=True))

    @invariant()
    def books_agree(self) -> None:
        assert self.store.meta("p").ids == tuple(self.rows)
        statistics = self.store.statistics()
        assert statistics.rows == len(self.rows)
        assert statistics.bytes == sum(nbytes(value) for row in self.rows.values() for value in row.values())
        for task, claimed in self.claimed.items():
            assert self.store.consumption("p", task) == (len(claimed), len(self.rows))

    def teardown(self) -> None:
        self.store.clear("p")
        assert (self.store.statistics().rows, self.store.statistics().bytes) == (0, 0)


TestAgainstADictionary = AgainstADictionary.TestCase
TestAgainstADictionary.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
