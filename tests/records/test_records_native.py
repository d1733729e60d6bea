"""The native code of the records against the Python that runs where it was not built."""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records_helpers import resealed, same, trajectory, usual
from transport_records import draft_of, written

from asyncrl import builds
from asyncrl.errors import RecordError
from asyncrl.records import native, quick, trajectories, write
from asyncrl.records import read as reading
from asyncrl.records.layout import CRC_OFFSET, ENTRY, HEADER, SPECS, Section
from asyncrl.records.read import Record, read
from asyncrl.records.trajectories import trajectories_of, whole_group
from asyncrl.records.write import Draft, Plan, plan
from asyncrl.types import Trajectory

pytestmark = pytest.mark.skipif(native.records is None, reason="the native code of the records was not built here")


@contextmanager
def python_alone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (write, reading, quick, trajectories):
            patch.setattr(module, "records", None)
        yield


def both(compute: Callable[[], Any]) -> tuple[Any, Any]:
    """What natively comes out, and in Python; a RecordError or ValueError as its words."""

    def answer() -> Any:
        try:
            return compute()
        except (RecordError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    with_it = answer()
    with python_alone():
        return with_it, answer()


def without_time(raw: bytes) -> bytes:
    return raw[:CRC_OFFSET] + raw[CRC_OFFSET + 4 : 104] + raw[112:]


def same_records(left: Record, right: Record) -> None:
    for name in Record.__dataclass_fields__:
        a, b = getattr(left, name), getattr(right, name)
        if name == "written_ns":
            continue
        assert type(a) is type(b), name
        if name == "arrays":
            assert list(a) == list(b)
            for key in a:
                same_arrays(a[key], b[key])
        elif name == "strings":
            assert {key: bytes(raw) for key, raw in a.items()} == {key: bytes(raw) for key, raw in b.items()}
            assert all(raw.readonly for raw in a.values())
        elif isinstance(a, np.ndarray):
            same_arrays(a, b)
        else:
            assert a == b, name


def same_arrays(a: np.ndarray, b: np.ndarray) -> None:
    assert (a.dtype, a.shape, a.strides) == (b.dtype, b.shape, b.strides)
    for flag in ("writeable", "aligned", "c_contiguous", "f_contiguous", "owndata"):
        assert getattr(a.flags, flag) == getattr(b.flags, flag), flag
    assert a.tobytes() == b.tobytes()


KINDS = ("plain", "list", "strided", "swapped", "narrow", "double", "unpickled", "subclass", "tuple")


def as_kind(columns: list[np.ndarray], kind: str) -> Any:
    """The same numbers, some of them in a form that only the Python knows."""
    if kind == "list":
        return [column.tolist() for column in columns]
    if kind == "strided":
        return [np.repeat(column, 2)[::2] for column in columns]
    if kind == "swapped":
        return [column.astype(column.dtype.newbyteorder(">")) for column in columns]
    if kind == "narrow":
        return [column.astype(np.int16) if column.dtype.kind == "i" else column for column in columns]
    if kind == "double":
        return [column.astype(np.float64) if column.dtype.kind == "f" else column for column in columns]
    if kind == "unpickled":
        return pickle.loads(pickle.dumps(columns))
    if kind == "subclass":
        return [column.view(np.recarray) for column in columns]
    return tuple(columns) if kind == "tuple" else columns


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Mostly good ones; now and then a length, a member or a number that is refused."""
    group_size = draw(st.integers(1, 6))
    members = draw(st.lists(st.integers(0, group_size - draw(st.sampled_from([1, 1, 1, 0]))), min_size=1, max_size=6))
    members = list(dict.fromkeys(members)) if draw(st.booleans()) else members
    lengths = [draw(st.integers(0, 40)) for _ in members]
    sections: dict[int, Any] = {}
    for section in (Section.TOKENS, Section.MASK, Section.LOGPROBS, Section.SAMPLED_LOGPROBS, Section.VERSIONS):
        if section is not Section.TOKENS and draw(st.booleans()):
            continue
        dtype = SPECS[section].dtypes[0]
        columns = [np.arange(n).astype(dtype) for n in lengths]
        if draw(st.integers(0, 19)) == 0:
            columns[-1] = np.zeros(lengths[-1] + 1, dtype)
        sections[section] = as_kind(columns, draw(st.sampled_from(KINDS)))
    if draw(st.booleans()):
        sections[Section.REWARDS] = [float(member) for member in members]
    if draw(st.booleans()):
        sections[Section.METADATA] = [b"{}" if member else b'{"a": 1}' for member in members]
    if draw(st.booleans()):
        sections[Section.ROUTED_EXPERTS] = [np.arange(6 * n, dtype=np.uint16).reshape(n, 3, 2) % 7 for n in lengths]
    if draw(st.booleans()):
        sections[0x8000 + draw(st.integers(-1, 5))] = draw(st.binary(max_size=70))
    producer = bytes(draw(st.sampled_from([16, 16, 16, 15])))
    version = draw(st.sampled_from([-1, 0, 2**31 - 1, -2]))
    return Draft(draw(st.integers(-(2**63), 2**63 - 1)), members, group_size, sections, 5, version, producer)


@settings(max_examples=400, deadline=None)
@given(drafts())
def test_any_draft_is_planned_written_read_and_cut_as_in_python(draft: Draft) -> None:
    ours, reference = both(lambda: plan(draft))
    if isinstance(reference, str):
        assert ours == reference
        return
    assert (ours.tokens, ours.size, len(ours.parts)) == (reference.tokens, reference.size, len(reference.parts))
    assert [part[0] for part in ours.parts] == [part[0] for part in reference.parts]
    raw, expected = both(lambda: written(reference, sequence=9))
    assert without_time(raw) == without_time(expected)
    assert without_time(written(ours, sequence=9)) == without_time(expected)
    same_records(*both(lambda: read(raw, sequence=9)))
    record = read(raw)
    for copy in (False, True):
        for one, other in zip(*both(lambda copy=copy: trajectories_of(record, copy=copy)), strict=True):
            same(one, other)
            for name in ("tokens", "mask", "logprobs", "versions"):
                same_arrays(getattr(one, name), getattr(other, name))


def test_the_usual_form_never_falls_back() -> None:
    """The tests that compare would pass as well if everything went through the Python."""
    assert native.records is not None
    for draft in (Draft(1, range(3), 3, usual()), draft_of([trajectory(i, 5 + i) for i in range(4)])):
        planned = native.records.plan(draft)
        assert type(planned) is Plan
        buffer = memoryview(bytearray(planned.size))
        assert native.records.write(planned, buffer, 7, None) is True
        assert type(native.records.read(buffer, 7)) is Record
        assert native.records.read(buffer, None).sequence == 7


@pytest.mark.parametrize("kind", KINDS[:5] + KINDS[7:8])
def test_what_is_unusual_is_left_to_the_python(kind: str) -> None:
    assert native.records is not None
    sections = usual()
    for section in (Section.TOKENS, Section.LOGPROBS):
        changed = as_kind(sections[section], kind)
        if all(a is b for a, b in zip(changed, sections[section], strict=True)):
            continue
        assert native.records.plan(Draft(1, range(3), 3, {**sections, section: changed})) is None


@pytest.mark.parametrize(
    "change",
    [
        {"members": [2**63, 0, 1]},
        {"members": None},
        {"sections": {2**64: b"", **usual()}},
        {"group_size": 2**40},
        {"group": 2**64},
    ],
    ids=["member", "members", "section", "size", "group"],
)
def test_numbers_that_fit_nowhere_get_the_words_of_the_python(change: dict[str, Any]) -> None:
    draft = Draft(**{"group": 1, "members": range(3), "group_size": 3, "sections": usual()} | change)

    def words() -> str:
        try:
            return str(len(written(plan(draft))))
        except (RecordError, TypeError, struct.error) as error:
            return f"{type(error).__name__}: {error}"

    assert len(set(both(words))) == 1


def test_sequences_below_0_and_foreign_buffers_are_left_to_the_python() -> None:
    assert native.records is not None
    planned = plan(Draft(1, range(3), 3, usual()))
    with pytest.raises(struct.error):
        written(planned, sequence=-1)
    raw = resealed(bytearray(written(planned, sequence=2**64 - 1)))
    assert native.records.read(raw, -1) is None
    for buffer in (memoryview(bytes(planned.size)), memoryview(bytearray(2 * planned.size))[::2]):
        assert native.records.write(planned, buffer, 0, None) is None


def test_every_damaged_byte_gets_the_verdict_of_the_python() -> None:
    assert native.records is not None
    planned = plan(Draft(1, range(3), 3, usual(length=3) | {Section.METADATA: [b"{}"] * 3}))
    raw = written(planned)
    end = HEADER.size + ENTRY.size * len(planned.parts)
    for index in range(end + 256):
        for flip in (0x01, 0x10, 0x80):
            torn = bytearray(raw)
            torn[index] ^= flip
            ours, reference = both(lambda torn=torn: read(resealed(torn), sequence=0))
            if isinstance(reference, str):
                assert ours == reference and native.records.read(torn, 0) is None
            else:
                same_records(ours, reference)


def test_rows_are_frozen_and_their_errors_say_what_is_wrong() -> None:
    assert native.records is not None
    rows, names = native.records.rows, list(Trajectory.__dataclass_fields__)
    columns: list[Any] = [[i, i + 1] for i in range(len(names))]
    numbers = np.arange(5, dtype=np.int32)
    columns[names.index("tokens")] = numbers
    first, second = rows(Trajectory, (0, 2, 5), tuple(columns), False)
    assert (first.group_id, second.member, first.tokens.tolist(), second.tokens.tolist()) == (0, 2, [0, 1], [2, 3, 4])
    assert first.tokens.base is numbers and first.tokens.flags.writeable
    with pytest.raises(AttributeError):
        first.member = 3
    with pytest.raises(ValueError, match="2 rows, but column 0 has 1"):
        rows(Trajectory, (0, 2, 5), ([1], *columns[1:]), False)
    for bounds in ((0, 2, 6), (0, 3, 2), (-1, 2, 5)):
        with pytest.raises(ValueError, match="do not cut 5 values"):
            rows(Trajectory, bounds, tuple(columns), False)
    for wrong, words in ((numbers[::2], "without gaps"), (numbers.astype(object), "of numbers")):
        columns[names.index("tokens")] = wrong
        with pytest.raises(ValueError, match=words):
            rows(Trajectory, (0, 1, 2), tuple(columns), False)
    with pytest.raises(ValueError, match="columns expected"):
        rows(Trajectory, (0, 1, 2), ([1, 2],), False)
    with pytest.raises(TypeError, match="slots"):
        rows(dict, (0, 1, 2), ([1, 2],), False)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 5),
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["group_id", "member", "group_size"]), st.integers(-1, 6)),
        max_size=2,
    ),
    st.sampled_from([list, tuple]),
)
def test_a_whole_group_is_told_alike(n: int, changes: list[tuple[int, str, int]], kind: type) -> None:
    group = [replace(trajectory(0, 4), group_id=3, member=i, group_size=n) for i in range(n)]
    for position, name, value in changes:
        if position < n:
            group[position] = replace(group[position], **{name: value})
    ours, reference = both(lambda: whole_group(kind(group)))
    assert ours == reference
    if not changes:
        assert ours is (n > 0)


def test_what_is_no_plain_integer_is_told_in_python() -> None:
    whole: Any = native.records and native.records.whole  # wrong arguments are what this is about
    good = [replace(trajectory(0, 4), group_id=3, member=i, group_size=2) for i in range(2)]
    assert whole(Trajectory, good)
    huge: Any = 2**70
    odd = [replace(one, group_id=huge) for one in good]
    for rows in (odd, [replace(good[0], member=np.int64(0)), good[1]], [good[0], "a row"], iter(good)):
        assert not whole(Trajectory, rows)
    assert whole_group(odd)
    with pytest.raises(TypeError, match="2 arguments"):
        whole(good)


def test_a_build_of_another_source_is_refused(tmp_path: Path) -> None:
    texts = [tmp_path / "a.c", tmp_path / "b.h"]
    texts[0].write_text("one")
    assert builds.of_this_source("a.so", 1, texts)  # installed without its source: nothing to compare with
    texts[1].write_text("two")
    assert builds.of_this_source("a.so", builds.checksum(texts), texts)
    texts[1].write_text("three")
    with pytest.warns(RuntimeWarning, match=r"a.so was built of another a.c, b.h .* build it again"):
        assert not builds.of_this_source("a.so", zlib.crc32(b"onetwo"), texts)


def test_it_can_be_turned_off() -> None:
    check = "from asyncrl.records import native; assert native.records is None"
    environment = {"ASYNCRL_NATIVE": "0", "PYTHONPATH": str(Path(builds.__file__).parent.parent)}
    subprocess.run([sys.executable, "-c", check], env=environment, check=True)
