# What `native.c` gives. None: of an unusual form, and nothing was done.
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .read import Record
from .write import Draft, Plan

T = TypeVar("T")

SOURCE: int

def set_forms(dtypes: tuple[Any, ...], forms: tuple[tuple[Any, ...], ...], crc32: Callable[..., int], /) -> None: ...
def set_plan(plan: type, draft: type, rows: Callable[..., Any], row_bytes: Callable[..., Any], /) -> None: ...
def plan(draft: Draft, /) -> Plan | None: ...
def write(
    plan: Plan, buffer: memoryview, sequence: int, checksum: bool, fault: Callable[[str], None] | None, /
) -> bool | None: ...
def set_record(record: type, /) -> None: ...
def read(buffer: memoryview | bytes | bytearray, sequence: int | None, checksum: bool, /) -> Record | None: ...
def whole(cls: type[T], rows: Sequence[T], /) -> bool: ...
def set_ring(head: int, state: int, arrays: int, /) -> None: ...
def publish(
    plan: Plan,
    block: memoryview,
    slots: int,
    payload_at: int,
    slot: int,
    start: int,
    size: int,
    sequence: int,
    checksum: bool,
    fault: Callable[[str], None] | None,
    /,
) -> bool | None: ...
def take(
    block: memoryview, slots: int, payload_at: int, slot: int, sequence: int, checksum: bool, /
) -> Record | None: ...
def rows(cls: type[T], bounds: tuple[int, ...], columns: tuple[Any, ...], copy: bool, /) -> list[T]: ...
