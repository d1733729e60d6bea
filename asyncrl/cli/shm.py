"""`asyncrl shm`: list this user's shared-memory segments of asyncrl, and clear those without an owner."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from asyncrl.errors import AsyncrlError, TransportError
from asyncrl.transport.inventory import clear, inventory


def main(arguments: Sequence[str]) -> int:
    """Run the command. Exit codes: 0; 1 if a named segment was not cleared; that of an AsyncrlError (`asyncrl.errors`)."""
    parser = argparse.ArgumentParser(prog="asyncrl shm", description=__doc__)
    actions = parser.add_subparsers(dest="action")
    actions.add_parser("list", help="list the segments and their owners (the default)")
    clearing = actions.add_parser("clear", help="remove segments whose owner is gone")
    clearing.add_argument(
        "names", nargs="*", help="names from `asyncrl shm list`; default: all segments without an owner"
    )
    clearing.add_argument(
        "--drop-records",
        action="store_true",
        help="remove also segments with an unreadable ring, and those with accepted records; the records are lost",
    )
    options = parser.parse_args(list(arguments))
    try:
        if options.action == "clear":
            return _clear(options.names, options.drop_records)
        return _list()
    except AsyncrlError as error:
        print(f"asyncrl shm: {error}", file=sys.stderr)
        return error.exit_code


def _list() -> int:
    entries = inventory()
    if not entries:
        print("this user has no shared memory segments of asyncrl")
        return 0
    rows = [("name", "owner", "size", "records")]
    for entry in entries:
        owner = {None: "nobody", 0: "not visible"}.get(entry.owner) or f"process {entry.owner}"
        rows.append((entry.name, owner, f"{entry.size / 2**20:.1f} MiB", str(entry.records)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for entry in entries:
        if entry.problem:
            print(f"{entry.name}: {entry.problem}")
    return 0


def _clear(names: Sequence[str], drop_records: bool) -> int:
    """Clear the segments with these names; without names, all that have no owner. Returns the exit code, see `main`."""
    # `inventory` misses owners in outer pid namespaces. `clear` tries the lock, and raises ArenaOwned if there is an owner.
    wanted = list(names) or [entry.name for entry in inventory() if entry.owner is None]
    failed = 0
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
        failed += 1
    if not wanted:
        print("nothing to clear")
    return 1 if failed and names else 0
