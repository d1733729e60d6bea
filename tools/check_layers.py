"""Checks the house: imports point down, files and functions keep their size, no torch on the lower floors.

    python tools/check_layers.py            # exit 1 and a list of complaints, or one line that says all is well

Floors are those of the README's architecture drawing. Two rooms on one floor may not import each other. Exceptions are
listed below, each with its reason.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "asyncrl"

FLOORS: dict[str, int] = {
    "types": 0, "ports": 0, "errors": 0, "builds": 0, "config": 0, "records": 0,
    "telemetry": 1,
    "concurrency": 2,
    "transport": 3, "distributed": 3,
    "data": 4, "algorithms": 4, "models": 4, "client": 4,
    "generation": 5, "environments": 5, "rewards": 5, "training": 5, "weights": 5, "checkpoint": 5,
    "pumps": 6, "runtime": 6,
    "main": 7, "cli": 7, "http": 7,
}  # fmt: skip

# importer -> rooms it may import beside what its floor allows
SAME_FLOOR: dict[str, set[str]] = {
    "config": {"types", "errors"},  # the ground floor is one room in four files
    "ports": {"types"},
    "types": set(),
    "records": {"types", "errors", "builds"},  # the schema is data about the nouns
    "runtime": {"pumps"},  # the facade owns the pumps; the pumps know nothing of it
    "main": {"http"},  # opens it where the configuration asks for it
    "cli": {"main"},  # two doors to the same run
}
TORCH_FREE = {
    "types",
    "ports",
    "errors",
    "config",
    "records",
    "telemetry",
    "concurrency",
    "environments",
    "rewards",
    "client",
}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_TEST_FILE_LINES = 650  # a test file is a list: it is read entry by entry
# path or path:function -> reason
SIZE_EXCEPTIONS: dict[str, str] = {
    "tests/algorithms/test_algorithms_trl_oracle.py:stand_in": "every attribute that TRL's own code reads, one a line",
}


def imports(tree: ast.AST, room_path: list[str]) -> Iterator[tuple[str, int, bool]]:
    """(dotted module, line, at run time) for every import; relative ones are made absolute."""
    guarded: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            guarded.update(child for statement in node.body for child in ast.walk(statement))
    deferred = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        loaded = node not in guarded and node not in deferred
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, loaded) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = room_path[: len(room_path) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "asyncrl":
                yield from ((f"asyncrl.{alias.name}", node.lineno, loaded) for alias in node.names)
            else:
                yield module, node.lineno, loaded


def check_file(path: Path) -> Iterator[str]:
    relative = path.relative_to(ROOT)
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    room = parts[0]
    text = path.read_text()
    tree = ast.parse(text)
    if room != "__init__" and room not in FLOORS:
        yield f"{relative}: {room!r} has no floor; add it to FLOORS and to the README's drawing"
        return
    package = ["asyncrl", *parts[:-1]]
    for module, line, at_run_time in imports(tree, package):
        names = module.split(".")
        if names[0] == "torch" and at_run_time and room in TORCH_FREE:
            yield f"{relative}:{line}: {room} imports torch; it must work without"
        if names[0] != "asyncrl" or len(names) < 2 or room == "__init__":
            continue
        other = names[1]
        if other == room or other not in FLOORS:
            continue
        if FLOORS[other] > FLOORS[room]:
            yield f"{relative}:{line}: {room} (floor {FLOORS[room]}) imports {other} (floor {FLOORS[other]}): imports point down"
        elif FLOORS[other] == FLOORS[room] and other not in SAME_FLOOR.get(room, set()):
            yield f"{relative}:{line}: {room} imports {other} on its own floor; go through asyncrl.ports"
    yield from check_sizes(path, relative, text, tree)


def check_sizes(path: Path, relative: Path, text: str, tree: ast.AST) -> Iterator[str]:
    lines = text.count("\n")
    most = MAX_TEST_FILE_LINES if relative.parts[0] == "tests" else MAX_FILE_LINES
    if lines > most and str(relative) not in SIZE_EXCEPTIONS:
        yield f"{relative}: {lines} lines; at most {most}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES and f"{relative}:{node.name}" not in SIZE_EXCEPTIONS:
                yield f"{relative}:{node.lineno}: {node.name} has {length} lines; at most {MAX_FUNCTION_LINES}"


def main() -> int:
    files = sorted(PACKAGE.rglob("*.py"))
    complaints = [complaint for path in files for complaint in check_file(path)]
    for path in sorted((ROOT / "tests").rglob("*.py")) + sorted((ROOT / "tools").glob("*.py")):
        text = path.read_text()
        complaints += check_sizes(path, path.relative_to(ROOT), text, ast.parse(text))
    print("\n".join(complaints) if complaints else f"{len(files)} files: imports point down, sizes are kept")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
