"""`asyncrl shm`: list the shared-memory segments of asyncrl on this machine, and clear those that nobody owns."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence

from asyncrl.errors import AsyncrlError, TransportError
from asyncrl.transport.inventory import Entry, clear, inventory


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0; 1 where something that was named could not be cleared; as in `asyncrl.errors` otherwise."""
    parser = argparse.ArgumentParser(prog="asyncrl shm", description=__doc__)
    actions = parser.add_subparsers(dest="action")
    listing = actions.add_parser("list", help="who owns what (also without a word)")
    listing.add_argument("--json", action="store_true", help="one JSON object a line")
    clearing = actions.add_parser("clear", help="remove segments whose owner is gone")
    clearing.add_argument("names", nargs="*", help="as `asyncrl shm list` shows them; default: all that nobody owns")
    clearing.add_argument(
        "--drop-records",
        action="store_true",
        help="also where accepted records, or a damaged ring, are kept; they are lost",
    )
    given = parser.parse_args(list(arguments))
    try:
        if given.action == "clear":
            return _clear(given.names, given.drop_records)
        return _list(as_json=given.action == "list" and given.json)
    except AsyncrlError as error:
        print(f"asyncrl shm: {error}", file=sys.stderr)
        return error.exit_code


def _list(*, as_json: bool) -> int:
    entries = inventory()
    if as_json:
        for entry in entries:
            print(json.dumps(dataclasses.asdict(entry)))
        return 0
    if not entries:
        print("nothing of asyncrl lies in shared memory")
        return 0
    rows: list[tuple[str, ...]] = [("name", "owner", "size", "rings", "records", "owners", "age")]
    rows += [_row(entry) for entry in entries]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for entry in entries:
        if entry.problem:
            print(f"{entry.name}: {entry.problem}")
    return 0


def _row(entry: Entry) -> tuple[str, ...]:
    owner = "nobody" if entry.owner is None else str(entry.owner or "not visible")
    age = "?" if not entry.created_ns else f"{(time.time_ns() - entry.created_ns) / 60e9:.1f} min"
    return (
        entry.name,
        owner,
        f"{entry.size / 2**20:.1f} MiB",
        str(entry.rings),
        str(entry.records),
        str(entry.tenure),
        age,
    )


def _clear(names: Sequence[str], drop_records: bool) -> int:
    """Named ones must go; without names, whatever may go goes and the rest is explained."""
    wanted = list(names) or [entry.name for entry in inventory() if entry.free]
    left = 0
    for name in wanted:
        try:
            size = clear(name, drop_records=drop_records)
        except FileNotFoundError:
            print(f"{name}: there is no such segment", file=sys.stderr)
        except TransportError as error:
            print(f"{name}: {error}", file=sys.stderr)
        else:
            print(f"{name}: {size / 2**20:.1f} MiB cleared")
            continue
        left += 1
    if not wanted:
        print("nothing to clear")
    return 1 if left and names else 0
